# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Explicit mesh axes: which dimensions they shard is a part of the type of an array."""

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from attn_core.array_axes import AnyMesh, Axes, size_of, typed_axes
from attn_core.sharding import partition


class TypedRules(NamedTuple):
  """Sharding rules of one call in layout bthd, from the types of its arrays."""

  query: P
  key: P


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
  rows, length, heads, width = typed_axes(query)
  whole: Axes = ()
  for axis in length + width:
    if axis in reserved:
      continue
    if query.shape[2] % size_of(mesh, (*heads, axis)) == 0:
      heads += (axis,)
    elif query.shape[0] % size_of(mesh, (*rows, axis)) == 0:
      rows += (axis,)
    else:
      whole += (axis,)
  used = {*rows, *heads, *whole}
  keys = tuple(axis for axis in typed_axes(key)[1] if axis not in used)
  return TypedRules(*map(partition.to_spec, ((rows, whole, heads), (rows, keys, heads))))


def output_spec(query: jax.Array, width: int, mesh: AnyMesh) -> P:
  """Returns the spec of an output of another width E: the query's, where the width divides."""
  *entries, own = typed_axes(query)
  return partition.to_spec((*entries, own if width % size_of(mesh, own) == 0 else ()))
