# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over a mesh by `jax.shard_map`: batch, heads, and where placed so the sequence or keys.

Calls that are left to the compiler's partitioner run on whole operands instead.

Rows of the batch and heads are independent: devices communicate only for a mechanism that shards
the sequence too (`Placement.sequence`), or combines results over shards of the keys
(`Placement.keys`).
"""

import math
from typing import Any, Callable, NamedTuple, TypeVar

import jax
from jax import lax
from jax.interpreters import ad
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from attn_core.array_axes import AnyMesh, axes_among, reshard, typed_axes
from attn_core.masks import mask as mask_lib
from attn_core.score_mods import score_mod
from attn_core.sharding import default_sharding, partition, varying_axes
from attn_core.sharding.placement import Placement, is_single
from attn_core.types import AttentionOutput, Call, MaskOperands, Operands, operands_like

Tree = TypeVar("Tree")

# Trees of PartitionSpecs in place of arrays; see `operands_like`.
output_like: Callable[..., AttentionOutput] = AttentionOutput
_mask_like: Callable[..., MaskOperands] = MaskOperands


def resharded(operands: Tree, specs: Tree, mesh: AnyMesh) -> Tree:
  """Returns the operands as `jax.shard_map` expects them if axes of the mesh are Explicit."""
  explicit = mesh.explicit_axes
  if not explicit:
    return operands
  return jax.tree.map(
      lambda x, spec: reshard(x, mesh, partition.to_spec(axes_among(spec, explicit))),
      operands, specs)


def sharded(local: Callable[[Operands], AttentionOutput], call: Call) -> AttentionOutput:
  """Runs `local` on each device's rows of the batch and heads.

  Args:
    local: computes one device's part; reads global row and head numbers from `Operands.mask`.
    call: operands, and the placement (None: `local` runs on the whole operands).

  Returns:
    The concatenated outputs of `local`.
  """
  placement, operands = call.placement, call.operands
  if placement is None:
    return local(operands)
  if placement.partitioner:
    return local(operands._replace(query=default_sharding.prefer(
        operands.query, placement.mesh, {0: placement.batch, 2: placement.heads})))
  specs = _specs(call, placement)
  operands = resharded(operands, specs, placement.mesh)
  batch, heads = placement.batch or None, placement.heads or None
  out_specs = output_like(
      P(batch, placement.length, heads, None),
      P(batch, heads, None, None) if call.return_weights else None,
      P(batch, heads, placement.length) if call.return_lse else None)
  group = operands.query.shape[2] // operands.key.shape[2]
  run = lambda part: local(_localize(part, placement, group))
  if is_single(placement.mesh) and not placement.mesh.explicit_axes:
    # The caller's shard_map has split everything.
    return run(operands)
  if varying_axes.of(operands):
    return inside_a_checked_one(run, placement.mesh, specs, out_specs)(operands)
  # Kernels that communicate are traced without JAX's check of which values vary over the mesh.
  return jax.shard_map(run, mesh=placement.mesh, in_specs=(specs,), out_specs=out_specs,
                       check_vma=placement.sequence is None)(operands)


class _Differentiated(NamedTuple):
  """Flags of the arguments of a function: whether they are differentiated; static."""

  flags: tuple[bool, ...]


jax.tree_util.register_static(_Differentiated)


def inside_a_checked_one(run: Callable[[Tree], AttentionOutput], mesh: AnyMesh, specs: Tree,
                         out_specs: AttentionOutput) -> Callable[[Tree], AttentionOutput]:
  """Returns a shard_map for use inside the caller's one of other axes with check_vma=True.

  JAX (0.10.2 to 0.12.0.1) cannot lower the residuals that a shard_map hands to its backward there.
  So the backward computes the forward again, within one shard_map: in reverse mode only.

  Args:
    run: a function of one device's part of a pytree.
    mesh: the mesh in force.
    specs: of the pytree.
    out_specs: of the results.
  """
  of_operands, structure = jax.tree.flatten(specs)

  @jax.custom_vjp
  def mapped(*leaves: jax.Array) -> AttentionOutput:
    return jax.shard_map(lambda *leaves: run(jax.tree.unflatten(structure, leaves)), mesh=mesh,
                         in_specs=tuple(of_operands), out_specs=out_specs)(*leaves)

  def forward(*leaves: Any) -> tuple:
    values = tuple(x.value for x in leaves)
    return mapped(*values), (values, _Differentiated(tuple(x.perturbed for x in leaves)))

  def backward(residuals: tuple, cotangents: AttentionOutput) -> tuple:
    leaves, differentiated = residuals
    chosen = [n for n, given in enumerate(differentiated.flags) if given]
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
    cotangents = jax.tree.map(
        lambda x: ad.zeros_like_aval(x.aval) if is_zero(x) else x, cotangents, is_leaf=is_zero)

    def local(leaves: tuple[jax.Array, ...], cotangents: AttentionOutput) -> tuple:
      def of_chosen(*values: jax.Array) -> AttentionOutput:
        given = dict(zip(chosen, values))
        return run(jax.tree.unflatten(structure, [given.get(n, x) for n, x in enumerate(leaves)]))
      return jax.vjp(of_chosen, *(leaves[n] for n in chosen))[1](cotangents)

    found = jax.shard_map(local, mesh=mesh, in_specs=(tuple(of_operands), out_specs),
                          out_specs=tuple(of_operands[n] for n in chosen))(leaves, cotangents)
    given = dict(zip(chosen, found))
    return tuple(given.get(n) for n in range(len(leaves)))

  mapped.defvjp(forward, backward, symbolic_zeros=True)
  return lambda operands: mapped(*jax.tree.leaves(varying_axes.unify(operands)))


def over_every_axis(compute: Callable[..., Tree], *arguments: object) -> Tree:
  """Runs a computation inside the caller's shard_map over its other axes too, each of one device.

  Pallas lowers kernels for TPUs, and interprets any, only where all axes of a mesh are Manual.

  Args:
    compute: a function that JAX does not differentiate.
    *arguments: pytrees of arrays.
  """
  mesh = jax.sharding.get_abstract_mesh()
  left = {axis for axis in mesh.auto_axes if mesh.shape[axis] == 1}
  if not (left and mesh.manual_axes) or left | {*mesh.manual_axes} < {*mesh.axis_names}:
    return compute(*arguments)
  return jax.shard_map(compute, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=left,
                       check_vma=bool(varying_axes.of(arguments)))(*arguments)


def partitioner_mesh(placement: Placement | None) -> AnyMesh | None:
  """Returns the mesh of a call that the compiler's partitioner shards; None for other calls."""
  return placement.mesh if placement is not None and placement.partitioner else None


def as_query(output: AttentionOutput, placement: Placement | None) -> AttentionOutput:
  """Returns an output of `sharded`, sharded as the type of the query says, if it says anything."""
  if placement is None or placement.output is None:
    return output
  mesh, spec = placement.mesh, placement.output
  batch, length, heads, _ = spec
  as_spec = lambda x, *entries: None if x is None else reshard(x, mesh, P(*entries))
  return output._replace(
      attention_outputs=reshard(output.attention_outputs, mesh, spec),
      attention_weights=as_spec(output.attention_weights, batch, heads, length, None),
      lse=as_spec(output.lse, batch, heads, length))


def first_tokens(output: AttentionOutput, placement: Placement, count: int) -> AttentionOutput:
  """Returns an output of `sharded` without the padding tokens after the first `count`."""
  def first(x: jax.Array, axis: int) -> jax.Array:
    if x.shape[axis] == count:
      return x
    if placement.mesh.explicit_axes:
      entries = typed_axes(x)  # a length that does not divide is replicated
      entries[axis] = ()
      x = reshard(x, placement.mesh, partition.to_spec(entries))
    return lax.slice_in_dim(x, 0, count, axis=axis)
  return output._replace(attention_outputs=first(output.attention_outputs, 1),
                         lse=None if output.lse is None else first(output.lse, 2))


def _specs(call: Call, placement: Placement) -> Operands:
  """Returns the spec of each operand; dimensions of size 1 are replicated."""
  operands = call.operands
  batch, heads, length = placement.batch or None, placement.heads or None, placement.length
  columns = placement.keys or None
  def rows(x: jax.Array, *rest: tuple[str, ...] | None) -> P:
    return P(batch if x.shape[0] > 1 else None, *rest)
  def rows_and_heads(x: jax.Array) -> P:
    return rows(x, heads if x.shape[1] > 1 else None)
  def per_pair(x: jax.Array) -> P:
    return P(*rows_and_heads(x), length if x.shape[2] > 1 else None,
             columns if x.shape[3] > 1 else None)
  def of_mask(x: jax.Array, role: str) -> P:
    if role == mask_lib.WHOLE:
      return P()
    if role == mask_lib.DENSE:
      return per_pair(x)
    along = {mask_lib.QUERY: length, mask_lib.KEY: columns or length}
    return rows(x, along[role]) if role in along else rows(x)
  def of_mod(x: jax.Array, role: str) -> P:
    return per_pair(x) if role == score_mod.PAIR else rows_and_heads(x)
  whole = lambda x: None if x is None else rows(x)
  keys = P(batch, columns or length, placement.key_heads or None)
  scale = lambda x: None if x is None else keys
  roles = mask_lib.structure_roles(call.spec.mask)
  mask = operands.mask
  return operands_like(
      query=P(batch, length, heads), key=keys, value=keys,
      bias=None if operands.bias is None else per_pair(operands.bias),
      mask=_mask_like(tuple(map(of_mask, mask.arrays, roles)),
                      whole(mask.batch_index), whole(mask.head_offset),
                      jax.tree.map(whole, mask.rows)),
      sinks=None if operands.sinks is None else rows_and_heads(operands.sinks),
      dropout_key=whole(operands.dropout_key),
      key_scale=scale(operands.key_scale), value_scale=scale(operands.value_scale),
      mods=tuple(map(of_mod, operands.mods, score_mod.structure_roles(call.spec.score_mod))))


def _localize(part: Operands, placement: Placement, group: int) -> Operands:
  """Adds the global row and head numbers to one device's operands, and selects its key heads."""
  rows, _, heads, _ = part.query.shape
  first_head = _index(placement.heads) * heads
  batch_index = _index(placement.batch) * rows + jnp.arange(rows, dtype=jnp.int32)
  part = part._replace(mask=part.mask._replace(
      batch_index=batch_index, head_offset=jnp.reshape(first_head, (1,))))
  if placement.key_heads == placement.heads:
    return part
  # Runs of `shared` query heads use one key head, on each device alike.
  shared = math.gcd(heads, group)
  needed = (first_head + shared * jnp.arange(heads // shared, dtype=jnp.int32)) // group
  key, value = (jnp.take(x, needed, axis=2) for x in (part.key, part.value))
  key_scale, value_scale = (None if x is None else jnp.take(x, needed, axis=2)
                            for x in (part.key_scale, part.value_scale))
  return part._replace(key=key, value=value, key_scale=key_scale, value_scale=value_scale)


def _index(axes: tuple[str, ...]) -> jax.Array:
  """Returns this device's int32 index along some mesh axes together."""
  return lax.axis_index(axes).astype(jnp.int32) if axes else jnp.int32(0)
