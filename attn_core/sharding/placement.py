# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Placement of a call on a mesh: which mesh axes shard the batch, the heads, the sequence and keys.

Explicit axes shard what the types of the arrays say; other axes what the rules say, in the order of
the mesh. A mesh axis that shards nothing replicates the work. When the axes of the heads do not
divide the key heads, every device holds all key heads and takes those of its query heads.

Where all axes are Auto, the compiler's partitioner places the call as its operands are sharded, on
CPUs and GPUs; the rules then apply to dimensions that nothing shards. See `partitioned`. cuDNN is
the exception where the rules leave no choice.
"""

import math
from typing import NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec as P

from attn_core.array_axes import AnyMesh, size_of
from attn_core.sharding import partition
from attn_core.sharding.context_parallel import Sequence
from attn_core.sharding.mesh import AXIS_NAMES


class Rules(Protocol):
  """Sharding rules of layout bthd, such as `AttnShardingRules`."""

  @property
  def query(self) -> P: ...

  @property
  def key(self) -> P: ...


class Placement(NamedTuple):
  """Mesh axes that shard the batch, the query heads, the key heads, the sequence and the keys."""

  mesh: AnyMesh
  batch: tuple[str, ...]
  heads: tuple[str, ...]
  key_heads: tuple[str, ...]  # either `heads`, or () for replicated
  drops: tuple[partition.DroppedAxis, ...]  # axes that were requested and shard nothing
  sequence: Sequence | None = None  # None: the sequence is not sharded
  keys: tuple[str, ...] = ()  # of the key sequence; queries are not sharded then
  rows: str = "rows of the batch"  # the dimension that `batch` shards
  partitioner: bool = False  # whether the compiler shards the call; axes here are its defaults
  output: P | None = None  # of [B, T, H, E], if axes of the mesh are Explicit

  @property
  def length(self) -> tuple[str, ...] | None:
    """The entry of a spec for queries, and for keys unless `keys` is not empty."""
    return None if self.sequence is None or self.sequence.is_split else self.sequence.axes

  def size(self, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along some mesh axes."""
    return size_of(self.mesh, axes)

  def sharded_dimensions(self) -> tuple[str, ...]:
    """Returns one line of text for each sharded dimension, with its mesh axes."""
    where = ", unless the operands are sharded otherwise" if self.partitioner else ""
    return tuple(
        f"{what} over " + " * ".join(f"{name}={self.mesh.shape[name]}" for name in names) + where
        for what, names in self._dimensions().items() if self.size(names) > 1)

  def roles_of_axes(self) -> tuple[str, ...]:
    """Returns one line of text for each mesh axis of several devices: what it does."""
    reasons: dict[str, str] = {}
    for drop in self.drops:
      reasons.setdefault(drop.axis, drop.reason)
    return tuple(f"mesh axis {axis!r} of {size} devices {self._role(axis, reasons.get(axis))}"
                 for axis, size in self.mesh.shape.items() if size > 1)

  def _dimensions(self) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes of each dimension."""
    return {self.rows: self.batch, "query heads": self.heads, "key heads": self.key_heads,
            "keys": self.keys, "the sequence": self.sequence.axes if self.sequence else ()}

  def _role(self, axis: str, reason: str | None) -> str:
    """Returns what one mesh axis does."""
    if axis in self.mesh.manual_axes:
      return "is Manual: the caller's shard_map has split the arrays over it"
    found = " and ".join(what for what, axes in self._dimensions().items() if axis in axes)
    if self.partitioner:
      return ("is left to the partitioner: it shards the rows and heads that the operands shard"
              + (f", by default {found}" if found else ""))
    if found:
      return f"shards {found}"
    return f"replicates the work: {reason or 'no rule and no array shards rows or heads over it'}"


def mesh_in_force(mesh: AnyMesh | None) -> AnyMesh | None:
  """Returns the mesh, or inside the caller's shard_map its abstract mesh with Manual axes."""
  context = jax.sharding.get_abstract_mesh()
  return context if context.manual_axes else mesh


def is_single(mesh: AnyMesh) -> bool:
  """Whether the axes of a mesh that are not Manual have one device."""
  return math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes) == 1


def entries(spec: P) -> list[tuple[str, ...]]:
  """Returns the mesh axes that a rule of layout bthd has for each of four dimensions."""
  names = [partition.axis_names(entry, "a sharding rule") for entry in spec]
  return names + [()] * (4 - len(names))


class OrderedRules(NamedTuple):
  """Sharding rules in layout bthd for the axes of one mesh."""

  query: P
  key: P


def ordered_rules(rules: Rules, mesh: AnyMesh, typed: Rules | None = None) -> OrderedRules:
  """Returns rules with the axes of each dimension in the order of the mesh.

  Args:
    rules: `AttnShardingRules` of layout bthd.
    mesh: the mesh.
    typed: the rules of its Explicit axes, in their own order; None: it has none.
  """
  explicit = mesh.explicit_axes
  def merged(spec: P, own: P) -> P:
    of_types = entries(own)
    return partition.to_spec([first + tuple(
        axis for axis in (*mesh.axis_names, *(x for x in rest if x not in mesh.shape))
        if axis in rest and axis not in explicit)
                              for first, rest in zip(of_types, entries(spec))])
  own = OrderedRules(P(), P()) if typed is None else typed
  return OrderedRules(merged(rules.query, own.query), merged(rules.key, own.key))


def unknown_axes(placement: Placement, partition_axis: partition.PartitionAxis) -> tuple[str, ...]:
  """Returns the Auto axes of several devices that neither a `PartitionAxis` nor `ring` names."""
  known = {*(placement.length or ())} | {name for field, axes in partition_axis._asdict().items()
           for name in partition.axis_names(axes, f"partition_axis.{field}")}
  return tuple(axis for axis in _auto_axes(placement.mesh) if axis not in known)


def unknown_axes_error(unknown: tuple[str, ...], why: str) -> ValueError:
  """Returns the error of a call with `unknown_axes`; `why` the compiler cannot place it."""
  return ValueError(
      f"metadata.partition_axis names no mesh axis {', '.join(map(repr, unknown))}, an Auto axis "
      f"{why}: every device along it would gather the arrays; expected PartitionAxis("
      f"batch_axis=..., head_axis=..., kv_head_axis=...) with it, for example "
      f"OperationMetadata(partition_axis=PartitionAxis(batch_axis={unknown[0]!r}))")


def is_ambiguous(placement: Placement) -> bool:
  """Whether the placement of a call is one of several that its operands may have.

  True where several axes shard one dimension, in either order, and where an axis shards nothing,
  so that the operands may be sharded over it otherwise.
  """
  mesh = placement.mesh
  several = lambda axes: sum(mesh.shape[axis] > 1 for axis in axes) > 1
  idle = set(_auto_axes(mesh)) - {*placement.batch, *placement.heads}
  return several(placement.batch) or several(placement.heads) or bool(idle)


def is_auto(mesh: AnyMesh) -> bool:
  """Whether all axes of several devices are Auto, and no axis is Explicit."""
  several = sum(size > 1 for size in mesh.shape.values())
  return len(_auto_axes(mesh)) == several and not mesh.explicit_axes


def _auto_axes(mesh: AnyMesh) -> tuple[str, ...]:
  """Returns the Auto axes of several devices."""
  return tuple(name for name in mesh.auto_axes if mesh.shape[name] > 1)


def place(rules: Rules, mesh: AnyMesh | None, query_shape: tuple[int, ...],
          key_shape: tuple[int, ...], reserved: tuple[str, ...] = (), *,
          shard_keys: bool = False) -> Placement | None:
  """Fits the rules to a mesh and to shapes.

  Args:
    rules: `AttnShardingRules` of layout bthd.
    mesh: the mesh; None: one device.
    query_shape: (B, T, H, D).
    key_shape: (B, S, K, D).
    reserved: mesh axes for the sequence, which then shard neither batch nor heads.
    shard_keys: whether the mechanism combines partial results over shards of the keys.

  Returns:
    The placement, without a sequence; None if there is one device, and no type names its axes.
  """
  mesh = mesh_in_force(mesh)
  if mesh is None or is_single(mesh) and not mesh.explicit_axes:
    return None
  query, key = ([tuple(axis for axis in axes if axis not in reserved) for axes in entries(spec)]
                for spec in (rules.query, rules.key))
  of_query = partition.fit(P(query[0], None, query[2]), query_shape[:3], mesh, "query")
  of_key = partition.fit(P(query[0], key[1] if shard_keys else None, key[2]), key_shape[:3], mesh,
                         "key")
  drops = of_query.drops + of_key.drops + tuple(
      partition.DroppedAxis(
          name, 1, axis, "this mechanism keeps sequences whole; `ring` shards them")
      for name, spec in (("query", query), ("key", key)) if not (shard_keys and name == "key")
      for axis in spec[1] if mesh.shape.get(axis, 1) > 1)
  # Default names are meant for meshes of any axes; another name that the mesh lacks is a mistake.
  is_lost = lambda drop: (mesh.shape[drop.axis] > 1 if drop.axis in mesh.shape
                          else drop.axis not in AXIS_NAMES)
  batch, _, heads = (partition.axis_names(x, "query") for x in of_query.spec)
  key_heads = partition.axis_names(of_key.spec[2], "key")
  return Placement(mesh, batch, heads, key_heads if key_heads == heads else (),
                   tuple(dict.fromkeys(drop for drop in drops if is_lost(drop))),
                   keys=tuple(axis for axis in partition.axis_names(of_key.spec[1], "key")
                              if mesh.shape[axis] > 1))


def of_types(query: jax.Array) -> Placement | None:
  """Returns the placement of a call without a mesh: the partitioner's, where arrays have a mesh."""
  mesh = mesh_in_force(jax.typeof(query).sharding.mesh)
  if mesh is None or mesh.empty or is_single(mesh) or not is_auto(mesh):
    return None
  return Placement(mesh, (), (), (), (), partitioner=True)


def local_shapes(placement: Placement | None, query: tuple[int, ...], key: tuple[int, ...],
                 ) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the shapes of query and key on one device.

  Args:
    placement: None: one device.
    query: (B, T, H, D).
    key: (B, S, K, D).
  """
  if placement is None:
    return query, key
  (batch, queries, heads, width), (_, keys, key_heads, _) = query, key
  batch, group = batch // placement.size(placement.batch), heads // key_heads
  heads //= placement.size(placement.heads)
  if placement.key_heads == placement.heads:
    key_heads //= placement.size(placement.heads)
  else:
    key_heads = heads // math.gcd(heads, group)
  keys //= placement.size(placement.keys)
  sequence = placement.sequence
  if sequence is not None and not sequence.is_split:
    queries, keys = (sequence.padded(n) // sequence.shards for n in (queries, keys))
  return (batch, queries, heads, width), (batch, keys, key_heads, width)
