"""A ring: queries stay, keys travel from member to member, partial results merge by their lse.

  out = sum over hops of exp(lse_hop - lse) * out_hop,   lse = logsumexp over hops of lse_hop

Every hop is the platform's own kernel. The next exchange is issued before a hop computes, so that
both can go on at once. The backward goes around again with the lse of the whole: a hop's weights
are then those of the whole softmax, and what it owes to the keys travels with them, one exchange
behind, until it is home. So a hop needs the keys of two members, however many there are.

Liu, Zaharia and Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889.

Letters: B batch, T queries of one device, H query heads, E value width.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Cargo, Kernel, Residuals
from attn_core.kernels.xla import cpu_math as numbers, tile_ops as steps
from attn_core.mechanisms.context_parallel import ring_step as hops
from attn_core.sharding.context_parallel import Sequence


class Hop(NamedTuple):
  """Where a member's keys of the moment come from."""

  is_first: bool  # its own keys; what counts once counts here
  source: Any  # int32


class Parcel(NamedTuple):
  """What goes to another member while a hop is computed."""

  content: Any  # a pytree
  distance: int  # in members


class Visit(NamedTuple):
  """What a hop gives."""

  sums: Any  # of all hops so far
  owed: Any  # to the member that the keys come from
  done: Any  # a pytree of arrays that are there when the work is
  arrived: list  # what came instead of the parcels' contents


@functools.lru_cache(maxsize=256)
def kernel(inner: Kernel, sequence: Sequence) -> Kernel:
  """The kernel of the whole ring, to be run by all its members together."""
  bound = lambda function: functools.partial(function, inner, sequence)
  other = inner.differentiable
  return Kernel(f"ring_{inner.name}", bound(_forward), bound(_backward), bound(_tangent),
                None if other is None else kernel(other, sequence), bound(_check), inner.effects)


def _check(inner, sequence, operands, spec, block_sizes):
  inner.check(*_at(sequence, operands, spec, hops.own_keys(operands, spec),
                   Hop(True, hops.member(sequence))), block_sizes)


def _at(sequence, operands, spec, keys, hop):
  """The attention of one hop; sinks count in the first."""
  operands = operands if hop.is_first else operands._replace(sinks=None)
  return hops.attended(sequence, operands, spec, keys, hop.source)


def _forward(inner, sequence, operands, spec, block_sizes) -> Residuals:
  spec = spec._replace(out_dtype=steps.lse_dtype(spec))  # rounded once, when all is merged

  def visit(hop, keys, running, parcels):
    (out, lse), arrived = _sending(
        sequence, inner.forward, inner.carrying and inner.carrying.forward, parcels,
        *_at(sequence, operands, spec, keys, hop), block_sizes)
    # A partial result counts as one key whose logit is its lse.
    logits = lse.swapaxes(1, 2)[..., None]
    running = softmax.update(running, logits, lambda weights: weights * out)
    return Visit(running, (), lse, arrived)

  running, _ = _around(sequence, spec, hops.own_keys(operands, spec), visit)
  out, lse = softmax.finish(running)
  return Residuals(out.astype(operands.query.dtype), lse[..., 0].swapaxes(1, 2))


def _tangent(inner, sequence, operands, spec, block_sizes, residuals, tangents) -> Residuals:
  own = {name: t for name, t in tangents.items() if name in ("key", "value")}
  spec = spec._replace(out_dtype=steps.lse_dtype(spec))

  def visit(hop, travelling, sums, parcels):
    keys, moved = travelling
    moved = {**tangents, **moved}
    if "bias" in moved:
      moved["bias"] = hops.columns(moved["bias"], keys, hop.source)
    if not hop.is_first:
      moved.pop("sinks", None)
    found, arrived = _sending(
        sequence, inner.tangent, None, parcels, *_at(sequence, operands, spec, keys, hop),
        block_sizes, residuals, moved)
    return Visit(_add(sums, found), (), found.lse, arrived)

  travelling = hops.own_keys(operands, spec), own
  (out, lse), _ = _around(sequence, spec, travelling, visit)
  return Residuals(out.astype(residuals.out.dtype), lse)


def _backward(inner, sequence, operands, spec, block_sizes, residuals, cotangents, wrt) -> tuple:
  dtype = steps.lse_dtype(spec)
  # Once for all hops, so that the output is not kept beside its cotangent.
  cotangents = cotangents._replace(lse=-steps.correction_of(residuals, cotangents, dtype))
  residuals = residuals._replace(out=None)
  # Or XLA would take the keys that arrived in the forward for those of the backward, and keep them;
  # and prepare the queries for the backward before the forward.
  query, own = numbers.after((operands.query, hops.own_keys(operands, spec)), cotangents.lse)
  operands = operands._replace(query=query)

  # What needs no kernel has nobody who sends.
  carrying = inner.carrying if {"query", "key", "value"} & set(wrt) else None

  def visit(hop, keys, sums, parcels):
    names = tuple(name for name in wrt if hop.is_first or name != "sinks")
    found, arrived = _sending(
        sequence, inner.backward, carrying and carrying.backward, parcels,
        *_at(sequence, operands, spec, keys, hop), block_sizes, residuals, cotangents, names)
    found = {name: x.astype(dtype) for name, x in zip(names, found)}
    done = tuple(x for name, x in found.items() if name != "sinks")
    owed = {name: found.pop(name) for name in ("key", "value") if name in found}
    if "bias" in found and operands.bias.shape[3] > 1:
      found["bias"] = lax.dynamic_update_slice_in_dim(
          jnp.zeros(operands.bias.shape, dtype), found["bias"],
          hop.source * keys.key.shape[1], 3)
    sums = found if sums is None else {
        name: x + found[name] if name in found else x for name, x in sums.items()}
    return Visit(sums, owed, done, arrived)

  sums, owed = _around(sequence, spec, own, visit)
  found = {**sums, **owed}
  return tuple(found[name].astype(getattr(operands, name).dtype) for name in wrt)


def _around(sequence: Sequence, spec, travelling, visit):
  """Goes around the ring.

  Hops go one after the other, and an exchange is not issued before the hop that it overlaps:
  transfers that run ahead would have nothing to hide behind, and the keys of all members would be
  held at once.

  Args:
    spec: its mask says which hops there are.
    travelling: what a member's keys take along.
    visit: (hop, travelling, sums, parcels) -> `Visit`; sums is None in the first hop.

  Returns:
    (sums of this member, all that is owed to it).
  """
  shifts = hops.shifts(sequence, spec.mask)
  strides = np.diff(shifts)
  me = hops.member(sequence)
  source = lambda shift: (me - shift) % sequence.members
  sums, owed, done, arriving = visit(
      Hop(True, me), travelling, None, [Parcel(travelling, stride) for stride in strides[:1]])
  if len(shifts) == 1:
    return sums, owed
  arriving, = arriving

  def middle(carry, shift, stride, last_stride):
    travelling, sums, owed, done = carry
    travelling = numbers.after(travelling, done)
    sums, more, done, (arriving, owed) = visit(
        Hop(False, source(shift)), travelling, sums,
        [Parcel(travelling, stride), Parcel(owed, last_stride)])
    return arriving, sums, _add(owed, more), jax.tree.map(numbers.first, done)

  if sequence.scan and len(shifts) > 3 and len(set(strides)) == 1:
    own = None  # a scan's steps are all alike: even what it owes to itself goes around
    begin = arriving, sums, owed, jax.tree.map(numbers.first, done)
    carry, _ = lax.scan(lambda carry, shift: (middle(carry, shift, strides[0], strides[0]), None),
                        begin, np.asarray(shifts[1:-1], np.int32))
  else:
    own, carry = owed, (arriving, sums, None, done)
    for shift, stride, last_stride in zip(shifts[1:-1], strides[1:], strides):
      carry = middle(carry, shift, stride, last_stride)

  travelling, sums, owed, done = carry
  sums, more, _, (owed,) = visit(Hop(False, source(shifts[-1])), numbers.after(travelling, done),
                                 sums, [Parcel(owed, strides[-1])])
  return sums, _add(own, _send(sequence, _add(owed, more), -shifts[-1]))


def _sending(sequence: Sequence, compute, carrying, parcels, *arguments):
  """Computes, and exchanges parcels with other members meanwhile.

  Args:
    compute: a function of a `Kernel`.
    carrying: the same of its `Carrying`; None: exchanges are issued before it computes.
    parcels: [`Parcel`].
    *arguments: what it computes with.

  Returns:
    (compute(*arguments), what comes instead of the contents of the parcels).
  """
  distances = [int(parcel.distance) % sequence.members for parcel in parcels]
  # A kernel sends to one member.
  carried = [bool(carrying and jax.tree.leaves(parcel.content)) and distance == distances[0]
             for parcel, distance in zip(parcels, distances)]
  arrived = [parcel.content if by_kernel else
             _send(sequence, parcel.content, parcel.distance)
             for by_kernel, parcel in zip(carried, parcels)]
  if not any(carried):
    return compute(*arguments), arrived
  leaves, structure = jax.tree.flatten([x for x, by_kernel in zip(arrived, carried) if by_kernel])
  found, leaves = carrying(*arguments, Cargo(
      tuple(leaves), *sequence.key_axes, sequence.axis_number, sequence.members, distances[0],
      sequence.cores))
  trees = iter(jax.tree.unflatten(structure, leaves))
  return found, [next(trees) if by_kernel else x for by_kernel, x in zip(carried, arrived)]


def _add(x, y):
  """The sum of two pytrees; None: zeros."""
  return y if x is None else jax.tree.map(jnp.add, x, y)


def _send(sequence: Sequence, x, distance: int):
  """Moves everything `distance` members on."""
  count = sequence.members
  pairs = [(n, int(n + distance) % count) for n in range(count)]
  return jax.tree.map(lambda x: lax.ppermute(x, sequence.key_axes, pairs), x)
