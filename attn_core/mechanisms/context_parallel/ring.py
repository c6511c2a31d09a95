# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ring attention: K and V move around a ring of members, and partial results combine by their lse.

  out = sum over steps of exp(lse_step - lse) * out_step,   lse = logsumexp over steps of lse_step

Each step runs the kernel of the platform. The next exchange is issued before a step computes, so
that they overlap. The backward goes around the ring again with the lse of the whole softmax, by
which the weights of a step are those of the whole. Gradients for K and V travel one step behind
them and end on the owning device. A device holds the keys of two members at once.

Liu, Zaharia and Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889.

A member is one device, or one group of devices that exchange heads; see
`sharding.context_parallel`. T and S are the numbers of queries and keys of one member.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands, online_softmax
from attn_core.kernels.common.backward import compute_delta
from attn_core.kernels.common.contract import (BackwardResiduals, Kernel, LseOnly, RemoteCopy,
                                               Residuals)
from attn_core.kernels.xla import cpu_math
from attn_core.mechanisms.context_parallel import ring_step
from attn_core.score_mods import score_mod
from attn_core.sharding import varying_axes
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import (AttentionSpec, BlockSizes, Operands, is_mod, mod_number,
                             operand)


PyTree = Any  # a pytree of arrays


class Step(NamedTuple):
  """One step of the ring on one member."""

  is_first: bool  # whether the keys are the member's; terms that count once count here
  source: jax.Array | int  # int32, the member that the keys come from


class Transfer(NamedTuple):
  """Arrays that go to another member while a step computes."""

  content: PyTree
  distance: int  # in members


class StepResult(NamedTuple):
  """Results of a step."""

  sums: PyTree  # over all steps so far
  kv_grads: PyTree  # gradients for the keys and values, which belong to the source
  done: PyTree  # arrays that exist once the step has computed
  received: list[PyTree]  # in place of the contents of the transfers


Arguments = tuple[Operands, AttentionSpec]
StepFn = Callable[[Step, PyTree, PyTree, list[Transfer]], StepResult]


@functools.lru_cache(maxsize=256)
def kernel(inner: Kernel, sequence: Sequence) -> Kernel:
  """Returns the kernel of the whole ring, which all members run together.

  Args:
    inner: the kernel of a step.
    sequence: the sharding of the sequence.
  """
  bound = lambda function: functools.partial(function, inner, sequence)
  differentiable = inner.differentiable
  return Kernel(f"ring_{inner.name}", bound(_forward), bound(_backward), bound(_tangent),
                None if differentiable is None else kernel(differentiable, sequence),
                bound(_check), inner.effects)


def _check(inner: Kernel, sequence: Sequence, operands: Operands, spec: AttentionSpec,
           block_sizes: BlockSizes) -> None:
  inner.check(*_at(sequence, operands, spec, ring_step.own_keys(operands, spec),
                   Step(True, ring_step.member(sequence, operands.query))), block_sizes)


def _at(sequence: Sequence, operands: Operands, spec: AttentionSpec, keys: ring_step.Keys,
        step: Step) -> Arguments:
  """Returns the attention of one step; sinks count in the first."""
  operands = operands if step.is_first else operands._replace(sinks=None)
  return ring_step.attended(sequence, operands, spec, keys, step.source)


def _forward(inner: Kernel, sequence: Sequence, operands: Operands, spec: AttentionSpec,
             block_sizes: BlockSizes) -> Residuals:
  # The output is rounded once, after all steps are combined.
  out_dtype = dense_operands.out_dtype(operands, spec)
  spec = spec._replace(out_dtype=dense_operands.lse_dtype(spec))

  def run_step(step: Step, keys: PyTree, running: PyTree,
               transfers: list[Transfer]) -> StepResult:
    (out, lse), received = _sending(
        sequence, inner.forward, inner.remote_copy_fns and inner.remote_copy_fns.forward, transfers,
        *_at(sequence, operands, spec, keys, step), block_sizes)
    # A partial result counts as one key whose logit is its lse.
    logits = lse.swapaxes(1, 2)[..., None]
    running = online_softmax.update(running, logits, lambda weights: weights * out)
    return StepResult(running, (), lse, received)

  running, _ = _run_steps(sequence, spec, ring_step.own_keys(operands, spec), run_step)
  out, lse = online_softmax.finish(running)
  return Residuals(out.astype(out_dtype), lse[..., 0].swapaxes(1, 2))


def _tangent(inner: Kernel, sequence: Sequence, operands: Operands, spec: AttentionSpec,
             block_sizes: BlockSizes, residuals: Residuals,
             tangents: dict[str, jax.Array]) -> Residuals:
  own = {name: t for name, t in tangents.items() if name in ("key", "value")}
  roles = score_mod.structure_roles(spec.score_mod)
  out_dtype = dense_operands.out_dtype(operands, spec)
  spec = spec._replace(out_dtype=dense_operands.lse_dtype(spec))

  def run_step(step: Step, traveling: PyTree, sums: PyTree,
               transfers: list[Transfer]) -> StepResult:
    keys, key_tangents = traveling
    step_tangents = {**tangents, **key_tangents}
    if "bias" in step_tangents:
      step_tangents["bias"] = ring_step.columns(step_tangents["bias"], keys, step.source)
    for name in filter(is_mod, tangents):
      step_tangents[name] = ring_step.columns_of_mod(
          tangents[name], roles[mod_number(name)], keys, step.source)
    if not step.is_first:
      step_tangents.pop("sinks", None)
    found, received = _sending(
        sequence, inner.tangent, None, transfers, *_at(sequence, operands, spec, keys, step),
        block_sizes, residuals, step_tangents)
    return StepResult(_add(sums, found), (), found.lse, received)

  traveling = ring_step.own_keys(operands, spec), own
  (out, lse), _ = _run_steps(sequence, spec, traveling, run_step)
  return Residuals(out.astype(out_dtype), lse)


def _backward(inner: Kernel, sequence: Sequence, operands: Operands, spec: AttentionSpec,
              block_sizes: BlockSizes, residuals: BackwardResiduals, cotangents: Residuals,
              wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  dtype = dense_operands.lse_dtype(spec)
  # Once for all steps, so that the output is not kept in addition to its cotangent.
  cotangents = cotangents._replace(lse=-compute_delta(residuals, cotangents, dtype))
  residuals = LseOnly(None, residuals.lse)
  # Otherwise XLA would reuse the keys received in the forward for the backward, and keep them; and
  # it would prepare the queries for the backward before the forward.
  query, own = cpu_math.after((operands.query, ring_step.own_keys(operands, spec)), cotangents.lse)
  operands = operands._replace(query=query)

  roles = score_mod.structure_roles(spec.score_mod)

  def has_columns(name: str) -> bool:
    is_pair = name == "bias" or is_mod(name) and roles[mod_number(name)] == score_mod.PAIR
    return is_pair and operand(operands, name).shape[3] > 1

  # Gradients of bias and sinks alone run without a kernel that could send.
  remote_copy_fns = inner.remote_copy_fns if {"query", "key", "value"} & set(wrt) else None

  def run_step(step: Step, keys: PyTree, sums: PyTree, transfers: list[Transfer]) -> StepResult:
    names = tuple(name for name in wrt if step.is_first or name != "sinks")
    found, received = _sending(
        sequence, inner.backward, remote_copy_fns and remote_copy_fns.backward, transfers,
        *_at(sequence, operands, spec, keys, step), block_sizes, residuals, cotangents, names)
    found = {name: x.astype(dtype) for name, x in zip(names, found)}
    done = tuple(x for name, x in found.items() if name != "sinks")
    kv_grads = {name: found.pop(name) for name in ("key", "value") if name in found}
    for name in filter(has_columns, found):
      found[name] = lax.dynamic_update_slice_in_dim(
          jnp.zeros(operand(operands, name).shape, dtype), found[name],
          step.source * keys.key.shape[1], 3)
    sums = found if sums is None else {
        name: x + found[name] if name in found else x for name, x in sums.items()}
    return StepResult(sums, kv_grads, done, received)

  sums, kv_grads = _run_steps(sequence, spec, own, run_step)
  found = {**sums, **kv_grads}
  return tuple(found[name].astype(operand(operands, name).dtype) for name in wrt)


def _run_steps(sequence: Sequence, spec: AttentionSpec, traveling: PyTree,
               run_step: StepFn) -> tuple[PyTree, PyTree]:
  """Runs all steps of the ring.

  Steps run in order, and an exchange is not issued before the step that it overlaps: transfers
  that run ahead would overlap with nothing, and the keys of all members would be held at once.

  Args:
    sequence: the sharding of the sequence.
    spec: its mask decides which steps are needed.
    traveling: the arrays that move around the ring with a member's keys.
    run_step: (step, traveling, sums, transfers) -> `StepResult`; sums is None in the first step.

  Returns:
    (sums of this member, gradients for its keys and values).
  """
  shifts = ring_step.shifts(sequence, spec.mask)
  strides = [int(stride) for stride in np.diff(shifts)]
  me = ring_step.member(sequence, jax.tree.leaves(traveling)[0])
  source = lambda shift: (me - shift) % sequence.members
  sums, kv_grads, done, received = run_step(
      Step(True, me), traveling, None, [Transfer(traveling, stride) for stride in strides[:1]])
  if len(shifts) == 1:
    return sums, kv_grads
  received, = received

  def middle(carry: tuple, shift: jax.Array | int, stride: int, last_stride: int) -> tuple:
    traveling, sums, kv_grads, done = carry
    traveling = cpu_math.after(traveling, done)
    sums, new_grads, done, (received, kv_grads) = run_step(
        Step(False, source(shift)), traveling, sums,
        [Transfer(traveling, stride), Transfer(kv_grads, last_stride)])
    return received, sums, _add(kv_grads, new_grads), jax.tree.map(cpu_math.first, done)

  if sequence.scan and len(shifts) > 3 and len(set(strides)) == 1:
    rest: Any = np.asarray(shifts[1:-1], np.int32)
    own = None  # the steps of a scan are equal: even gradients for own keys go around
    begin = received, sums, kv_grads, jax.tree.map(cpu_math.first, done)
    carry, _ = lax.scan(lambda carry, shift: (middle(carry, shift, strides[0], strides[0]), None),
                        begin, rest)
  else:
    own, carry = kv_grads, (received, sums, None, done)
    for shift, stride, last_stride in zip(shifts[1:-1], strides[1:], strides):
      carry = middle(carry, shift, stride, last_stride)

  traveling, sums, kv_grads, done = carry
  sums, new_grads, _, (kv_grads,) = run_step(
      Step(False, source(shifts[-1])), cpu_math.after(traveling, done), sums,
      [Transfer(kv_grads, strides[-1])])
  return sums, _add(own, _send(sequence, _add(kv_grads, new_grads), -shifts[-1]))


def _sending(sequence: Sequence, compute: Callable[..., Any],
             compute_and_send: Callable[..., Any] | None, transfers: list[Transfer],
             *arguments: Any) -> tuple[Any, list[PyTree]]:
  """Computes while arrays are exchanged with other members.

  Args:
    sequence: the sharding of the sequence.
    compute: a function of a `Kernel`.
    compute_and_send: that of its `RemoteCopyFns`; None: exchanges are issued before it computes.
    transfers: the arrays to send.
    *arguments: arguments of `compute`.

  Returns:
    (compute(*arguments), the received arrays in place of the contents of the transfers).
  """
  distances = [int(transfer.distance) % sequence.members for transfer in transfers]
  # A kernel sends to one member.
  by_kernel_flags = [
      bool(compute_and_send and jax.tree.leaves(transfer.content)) and distance == distances[0]
      for transfer, distance in zip(transfers, distances)]
  received = [transfer.content if by_kernel else
             _send(sequence, transfer.content, transfer.distance)
             for by_kernel, transfer in zip(by_kernel_flags, transfers)]
  if compute_and_send is None or not any(by_kernel_flags):
    return compute(*arguments), received
  leaves, structure = jax.tree.flatten(
      [x for x, by_kernel in zip(received, by_kernel_flags) if by_kernel])
  axis, = sequence.key_axes
  found, leaves = compute_and_send(*arguments, RemoteCopy(
      tuple(leaves), ring_step.coordinates(sequence, leaves[0]), sequence.mesh_axes,
      sequence.mesh_axes.index(axis), sequence.members, distances[0], sequence.cores,
      sequence.mesh_number))
  trees = iter(jax.tree.unflatten(structure, leaves))
  return found, [next(trees) if by_kernel else x for by_kernel, x in zip(by_kernel_flags, received)]


def _add(x: PyTree, y: PyTree) -> PyTree:
  """Returns the sum of two pytrees; None: zeros."""
  return y if x is None else jax.tree.map(jnp.add, x, y)


def _send(sequence: Sequence, x: PyTree, distance: int) -> PyTree:
  """Sends a pytree to the member `distance` further along the ring."""
  count = sequence.members
  pairs = [(n, int(n + distance) % count) for n in range(count)]
  return jax.tree.map(lambda x: varying_axes.as_untracked(
      lax.ppermute(x, sequence.key_axes, pairs), x), x)
