# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Explicit mesh axes: which dimensions they shard is a part of the type of an array."""

import math
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from attn_core.sharding import partition
from attn_core.sharding.context_parallel import AnyMesh


class TypedRules(NamedTuple):
  """Sharding rules of one call in layout bthd, from the types of its arrays."""

  query: P
  key: P


def mesh_of(*arrays: jax.Array) -> AnyMesh | None:
  """Returns the mesh of the first array whose type has Explicit axes; None if there is none."""
  meshes = (jax.typeof(x).sharding.mesh for x in arrays)
  return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def spec_of(x: jax.Array) -> list[tuple[str, ...]]:
  """Returns the mesh axes that the type of an array has for each of its dimensions."""
  entries = [partition.axis_names(entry, "the type of an array")
             for entry in jax.typeof(x).sharding.spec]
  return entries + [()] * (x.ndim - len(entries))


def rules_of(query: jax.Array, key: jax.Array, mesh: AnyMesh,
             reserved: tuple[str, ...]) -> TypedRules:
  """Returns the rules that follow from the types of query and key, for Explicit axes.

  Keys and values are sharded as the query is. Axes of the query's length or width, which a
  mechanism keeps whole, shard the heads or the rows of the batch instead if they divide them.

  Args:
    query: [B, T, H, D].
    key: [B, S, K, D].
    mesh: the mesh of their types.
    reserved: mesh axes of a sharded sequence.
  """
  rows, length, heads, width = spec_of(query)
  whole: tuple[str, ...] = ()
  for axis in length + width:
    if axis in reserved:
      continue
    if query.shape[2] % _size(mesh, (*heads, axis)) == 0:
      heads += (axis,)
    elif query.shape[0] % _size(mesh, (*rows, axis)) == 0:
      rows += (axis,)
    else:
      whole += (axis,)
  used = {*rows, *heads, *whole}
  keys = tuple(axis for axis in spec_of(key)[1] if axis not in used)
  return TypedRules(*map(partition.to_spec, ((rows, whole, heads), (rows, keys, heads))))


def output_spec(query: jax.Array, value: jax.Array, mesh: AnyMesh) -> P:
  """Returns the spec of the output [B, T, H, E]: the query's, where the width divides."""
  *entries, width = spec_of(query)
  width = width if value.shape[-1] % _size(mesh, width) == 0 else ()
  return partition.to_spec((*entries, width))


def reshard(x: jax.Array, mesh: AnyMesh, spec: P) -> jax.Array:
  """Returns an array of this sharding; its cotangent has the sharding that it had before."""
  return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _size(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
  return math.prod(mesh.shape[axis] for axis in axes)
