# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Placement of a call on a mesh: which mesh axes shard the batch, the heads, the sequence and keys.

A mesh axis that shards nothing replicates the work. When the axes of the heads do not divide the
key heads, every device holds all key heads and takes those of its query heads.
"""

import math
from typing import NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec as P

from attn_core.sharding import partition
from attn_core.sharding.context_parallel import AnyMesh, Sequence


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

  @property
  def length(self) -> tuple[str, ...] | None:
    """The entry of a spec for queries, and for keys unless `keys` is not empty."""
    return None if self.sequence is None or self.sequence.is_split else self.sequence.axes

  def size(self, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along some mesh axes."""
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def sharded_dimensions(self) -> tuple[str, ...]:
    """Returns one line of text for each sharded dimension, with its mesh axes."""
    axes = {self.rows: self.batch, "query heads": self.heads, "key heads": self.key_heads,
            "keys": self.keys, "the sequence": self.sequence.axes if self.sequence else ()}
    return tuple(f"{what} over " + " * ".join(f"{name}={self.mesh.shape[name]}" for name in names)
                 for what, names in axes.items() if self.size(names) > 1)


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
    The placement, without a sequence; None if there is one device.
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
      partition.DroppedAxis(
          name, 1, axis, "this mechanism keeps sequences whole; `ring` shards them")
      for name, spec in (("query", query), ("key", key)) if not (shard_keys and name == "key")
      for axis in spec[1] if mesh.shape.get(axis, 1) > 1)
  batch, _, heads = (partition.axis_names(x, "query") for x in of_query.spec)
  key_heads = partition.axis_names(of_key.spec[2], "key")
  return Placement(mesh, batch, heads, key_heads if key_heads == heads else (),
                   tuple(dict.fromkeys(drop for drop in drops if mesh.shape.get(drop.axis, 1) > 1)),
                   keys=tuple(axis for axis in partition.axis_names(of_key.spec[1], "key")
                              if mesh.shape[axis] > 1))


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
