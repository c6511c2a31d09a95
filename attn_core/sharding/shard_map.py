"""The one place where attention meets a mesh: batch and heads over its axes, by `jax.shard_map`.

Rows of the batch and heads are independent: nothing communicates, but for a mechanism that spreads
the sequence too (`Placement.sequence`), or merges what it gets from parts of the keys
(`Placement.keys`). A mesh axis that shards nothing replicates the work. When the axes of the heads
do not divide the key heads, every device holds all key heads and picks those of its own query
heads.

Letters: B batch, T query length, S key length, H query heads, K key heads, D and E widths.
"""

import math
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from attn_core.masks import leaves as algebra
from attn_core.sharding import partition
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import AttentionOutput, Call, MaskOperands, Operands


class Placement(NamedTuple):
  """Which mesh axes shard the batch, the query heads, the key heads and the sequence."""

  mesh: Any
  batch: tuple[str, ...]
  heads: tuple[str, ...]
  key_heads: tuple[str, ...]  # either `heads`, or () for replicated
  drops: tuple[partition.Drop, ...]  # axes that were asked for and shard nothing
  sequence: Sequence | None = None  # None: every device has all of it
  keys: tuple[str, ...] = ()  # of the key sequence; queries are whole then
  rows: str = "rows of the batch"  # what `batch` shards

  @property
  def length(self):
    """The entry of a spec for queries, and for keys unless `keys` has them."""
    return None if self.sequence is None else self.sequence.axes

  def spread(self) -> tuple[str, ...]:
    """What is spread over which axes, to be read."""
    axes = {self.rows: self.batch, "query heads": self.heads, "key heads": self.key_heads,
            "keys": self.keys, "the sequence": self.length or ()}
    return tuple(f"{what} over " + " * ".join(f"{name}={self.mesh.shape[name]}" for name in names)
                 for what, names in axes.items()
                 if math.prod(self.mesh.shape[name] for name in names) > 1)


def mesh_in_force(mesh):
  """The mesh, or inside the caller's shard_map the one that knows which axes are Manual."""
  context = jax.sharding.get_abstract_mesh()
  return context if context.manual_axes else mesh


def is_single(mesh) -> bool:
  """Whether all that a mesh, or its axes that are not Manual, have is one device."""
  return math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes) == 1


def entries(spec) -> list[tuple[str, ...]]:
  """The mesh axes that a rule of layout bthd has for each of four dimensions."""
  names = [partition.axis_names(entry, "a sharding rule") for entry in spec]
  return names + [()] * (4 - len(names))


def resharded(operands, specs, mesh):
  """The operands, where axes of the mesh are Explicit, as `jax.shard_map` expects them."""
  if not any(kind == AxisType.Explicit for kind in mesh.axis_types):
    return operands
  return jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)),
                      operands, specs)


def place(rules, mesh, query_shape, key_shape, reserved=(), *,
          shard_keys=False) -> Placement | None:
  """Fits the rules to a mesh and to shapes.

  Args:
    rules: `AttnShardingRules` of layout bthd.
    mesh: the mesh; None: one device.
    query_shape: (B, T, H, D).
    key_shape: (B, S, K, D).
    reserved: mesh axes for the sequence, which then shard neither batch nor heads.
    shard_keys: whether the mechanism merges what it gets from parts of the keys.

  Returns:
    The placement, without a sequence; None where there is nothing to spread over.
  """
  mesh = mesh_in_force(mesh)
  if mesh is None or is_single(mesh):
    return None
  query, key = ([tuple(axis for axis in axes if axis not in reserved) for axes in entries(spec)]
                for spec in (rules.query, rules.key))
  of_query = partition.fit(P(query[0], None, query[2]), query_shape[:3], mesh, "query")
  of_key = partition.fit(P(query[0], key[1] if shard_keys else None, key[2]), key_shape[:3], mesh,
                         "key")
  drops = of_query.drops + of_key.drops + tuple(
      partition.Drop(name, 1, axis, "this mechanism keeps sequences whole; `ring` shards them")
      for name, spec in (("query", query), ("key", key)) if not (shard_keys and name == "key")
      for axis in spec[1] if mesh.shape.get(axis, 1) > 1)
  batch, _, heads = (partition.axis_names(x, "query") for x in of_query.spec)
  key_heads = partition.axis_names(of_key.spec[2], "key")
  return Placement(mesh, batch, heads, key_heads if key_heads == heads else (),
                   tuple(dict.fromkeys(drop for drop in drops if mesh.shape.get(drop.axis, 1) > 1)),
                   keys=tuple(axis for axis in partition.axis_names(of_key.spec[1], "key")
                              if mesh.shape[axis] > 1))


def sharded(local: Callable[[Operands], AttentionOutput], call: Call) -> AttentionOutput:
  """Runs `local` on every device's rows of the batch and heads.

  Args:
    local: computes one device's part; reads global row and head numbers from `Operands.mask`.
    call: operands, and the placement (None: `local` runs as it is).

  Returns:
    What `local` returns, put together.
  """
  placement, operands = call.placement, call.operands
  if placement is None:
    return local(operands)
  specs = _specs(call)
  operands = resharded(operands, specs, placement.mesh)
  batch, heads = placement.batch or None, placement.heads or None
  out_specs = AttentionOutput(
      P(batch, placement.length, heads, None),
      P(batch, heads, None, None) if call.return_weights else None,
      P(batch, heads, placement.length) if call.return_lse else None)
  group = operands.query.shape[2] // operands.key.shape[2]
  # A kernel that communicates is traced where JAX does not follow what varies over the mesh.
  return jax.shard_map(
      lambda part: local(_localise(part, placement, group)), mesh=placement.mesh,
      in_specs=(specs,), out_specs=out_specs, check_vma=placement.sequence is None)(operands)


def first_tokens(output: AttentionOutput, placement: Placement, count: int) -> AttentionOutput:
  """The first `count` tokens of what `sharded` gave."""
  def cut(x, axis):
    if x is None or x.shape[axis] == count:
      return x
    if any(kind == AxisType.Explicit for kind in placement.mesh.axis_types):
      entries = list(jax.typeof(x).sharding.spec)  # what does not divide cannot stay sharded
      entries[axis] = None
      x = jax.sharding.reshard(x, NamedSharding(placement.mesh, P(*entries)))
    return lax.slice_in_dim(x, 0, count, axis=axis)
  return output._replace(attention_outputs=cut(output.attention_outputs, 1),
                         lse=cut(output.lse, 2))


def _specs(call: Call) -> Operands:
  """The spec of every operand; dimensions of size 1 are replicated."""
  placement, operands = call.placement, call.operands
  batch, heads, length = placement.batch or None, placement.heads or None, placement.length
  columns = placement.keys or None
  def rows(x, *rest):
    return P(batch if x.shape[0] > 1 else None, *rest)
  def rows_and_heads(x):
    return rows(x, heads if x.shape[1] > 1 else None)
  def per_pair(x):
    return P(*rows_and_heads(x), length if x.shape[2] > 1 else None,
             columns if x.shape[3] > 1 else None)
  def of_mask(x, role):
    if role == algebra.WHOLE:
      return P()
    if role == algebra.DENSE:
      return per_pair(x)
    return rows(x, length) if role in (algebra.QUERY, algebra.KEY) else rows(x)
  whole = lambda x: None if x is None else rows(x)
  keys = P(batch, columns or length, placement.key_heads or None)
  scale = lambda x: None if x is None else keys
  roles = algebra.structure_roles(call.spec.mask)
  mask = operands.mask
  return Operands(
      query=P(batch, length, heads), key=keys, value=keys,
      bias=None if operands.bias is None else per_pair(operands.bias),
      mask=MaskOperands(tuple(map(of_mask, mask.arrays, roles)),
                        whole(mask.batch_index), whole(mask.head_offset)),
      sinks=None if operands.sinks is None else rows_and_heads(operands.sinks),
      dropout_key=whole(operands.dropout_key),
      key_scale=scale(operands.key_scale), value_scale=scale(operands.value_scale))


def _localise(part: Operands, placement: Placement, group: int) -> Operands:
  """One device's operands: its global row and head numbers, and the key heads it needs."""
  rows, _, heads, _ = part.query.shape
  first_head = _index(placement.heads) * heads
  batch_index = _index(placement.batch) * rows + jnp.arange(rows, dtype=jnp.int32)
  part = part._replace(mask=part.mask._replace(
      batch_index=batch_index, head_offset=jnp.reshape(first_head, (1,))))
  if placement.key_heads == placement.heads:
    return part
  # Runs of `shared` query heads use one key head, on every device alike.
  shared = math.gcd(heads, group)
  needed = (first_head + shared * jnp.arange(heads // shared, dtype=jnp.int32)) // group
  take = lambda x: None if x is None else jnp.take(x, needed, axis=2)
  return part._replace(**{name: take(getattr(part, name)) for name in (
      "key", "value", "key_scale", "value_scale")})


def _index(axes: tuple[str, ...]):
  """This device's number along some mesh axes together, int32."""
  return lax.axis_index(axes).astype(jnp.int32) if axes else jnp.int32(0)
