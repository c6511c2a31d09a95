# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices the arrays of a mask to a tile [num_heads, num_queries, num_keys]."""

from typing import Any, Callable, NamedTuple, Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import leaves, mask as mask_lib
from attn_core.types import MaskOperands, are_known


Index = Any  # int, or a traced int32 scalar


class Tile(NamedTuple):
  """One batch row, consecutive heads, a block of queries and a block of keys."""

  batch: Index  # local batch row
  head: Index  # local index of the first query head
  query: Index  # first query row (tokens)
  key: Index  # first key column (tokens)
  num_heads: int
  num_queries: int
  num_keys: int


def int32s(starts: Sequence[Index]) -> list[jax.Array]:
  """Converts start indices to int32, whatever dtype jax_enable_x64 gives Python integers."""
  return [jnp.asarray(start, jnp.int32) for start in starts]


def slice_at(x: jax.Array, starts: Sequence[Index], lengths: Sequence[int]) -> jax.Array:
  """`lax.dynamic_slice` at starts >= 0, Python integers and int32 together."""
  return lax.dynamic_slice(x, int32s(starts), lengths, allow_negative_indices=False)


def parts(mask: mask_lib.Mask) -> list[mask_lib.Mask]:
  """Returns masks that together show what a mask shows; most tiles are cut by one of them only.

  >>> parts(leaves.Causal() & leaves.Window(7, 0))
  [Causal(), Window(left=7, right=None)]
  """
  found = list(mask_lib.conjuncts(mask))
  is_causal = any(isinstance(part, leaves.Causal) for part in found)
  simple: list[mask_lib.Mask] = []
  for part in found:
    match part:
      case leaves.Window(left, right):
        if left is not None:
          simple.append(leaves.Window(left, None))
        if right is not None and not (is_causal and right >= 0):
          simple.append(leaves.Window(None, right))
      # An amount so small that positions do not overflow beyond an open side of a window.
      case leaves.Offset(mask=inner, amount=int(amount)) if abs(amount) < 2**28:
        simple += [mask_lib.with_children(part, [x]) for x in parts(inner)]
      case _:
        simple.append(part)
  return simple


def visible(mask: mask_lib.Mask, at: mask_lib.Coordinates, *, which: int) -> mask_lib.Booleans:
  """Returns `mask.visible(at)` where only some parts of a mask can hide pairs.

  Args:
    mask: with the tile's part of its arrays.
    at: coordinates of the pairs.
    which: a bit for each of `parts`; those without show all of these pairs. -1: all of them.
  """
  found: mask_lib.Booleans = np.True_
  for number, part in enumerate(parts(mask)):
    if which >> number & 1:
      found = found & part.visible(at)
  return found


def global_numbers(operands: MaskOperands, batch: Index) -> tuple[Index, Index]:
  """Returns the number of a batch row and of its first head among those of all devices."""
  at_row = lambda x: x[batch if x.shape[0] > 1 else 0]
  return (batch if operands.batch_index is None else at_row(operands.batch_index),
          jnp.int32(0) if operands.head_offset is None else at_row(operands.head_offset))


def slice_mask(structure: jax.tree_util.PyTreeDef, operands: MaskOperands, tile: Tile,
               orient: Callable[[jax.Array], jax.Array] = lambda x: x
               ) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
  """Slices a mask's arrays to a tile and computes the tile's coordinates.

  Args:
    structure: the mask's tree structure.
    operands: its arrays, padded so that they contain the tile.
    tile: the tile.
    orient: maps arrays [num_heads or 1, num_queries or 1, num_keys or 1] to the kernel's order of
      axes.

  Returns:
    (mask, coordinates) that broadcast to the oriented [num_heads, num_queries, num_keys].
  """
  sizes = (1, tile.num_heads, tile.num_queries, tile.num_keys)
  starts = (tile.batch, tile.head, tile.query, tile.key)

  def slice_of(x: jax.Array, axes: Sequence[int], shape: Sequence[int]) -> jax.Array:
    begin = [0 if x.shape[i] == 1 else starts[a] for i, a in enumerate(axes)]
    size = [1 if x.shape[i] == 1 else sizes[a] for i, a in enumerate(axes)]
    return slice_at(x, begin, size).reshape(shape)

  def slice_array(x: jax.Array, role: str) -> jax.Array:
    if role == mask_lib.QUERY:
      return orient(slice_of(x, (0, 2), (1, -1, 1)))
    if role == mask_lib.KEY:
      return orient(slice_of(x, (0, 3), (1, 1, -1)))
    if role == mask_lib.BATCH:
      return slice_of(x, (0,), ())
    if role == mask_lib.DENSE:
      block = [1 if x.shape[a] == 1 else sizes[a] for a in (1, 2, 3)]
      return orient(slice_of(x, (0, 1, 2, 3), block))
    return x

  roles = mask_lib.structure_roles(structure)
  mask = jax.tree.unflatten(structure, map(slice_array, operands.arrays, roles))
  batch, head = tile.batch, tile.head + jnp.arange(tile.num_heads, dtype=jnp.int32)
  if operands.batch_index is not None:
    batch = slice_of(operands.batch_index, (0,), ())
  if operands.head_offset is not None:
    head = head + slice_of(operands.head_offset, (0,), ())
  query = tile.query + jnp.arange(tile.num_queries, dtype=jnp.int32)
  key = tile.key + jnp.arange(tile.num_keys, dtype=jnp.int32)
  head, query, key = (orient(x) for x in (
      head.reshape(-1, 1, 1), query.reshape(1, -1, 1), key.reshape(1, 1, -1)))
  return mask, mask_lib.Coordinates(batch, head, query, key, query, key)


def pad_axis(x: jax.Array, axis: int, amount: int) -> jax.Array:
  """Appends `amount` zeros along an axis."""
  if not are_known(amount):  # symbolic, which jnp.pad does not take
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (0, amount, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), widths)
  if not amount:
    return x
  pairs = [(0, 0)] * x.ndim
  pairs[axis] = (0, amount)
  return jnp.pad(x, pairs)


def pad_mask(structure: jax.tree_util.PyTreeDef, operands: MaskOperands, queries: int,
             keys: int) -> MaskOperands:
  """Pads the arrays by `queries` rows and `keys` columns.

  The values of the padding do not matter: the kernel hides columns past the keys and discards rows
  past the queries.
  """
  def pad_array(x: jax.Array, role: str) -> jax.Array:
    if role in (mask_lib.QUERY, mask_lib.KEY) and x.shape[1] != 1:
      return pad_axis(x, 1, queries if role == mask_lib.QUERY else keys)
    if role == mask_lib.DENSE:
      x = pad_axis(x, 2, queries) if x.shape[2] != 1 else x
      return pad_axis(x, 3, keys) if x.shape[3] != 1 else x
    return x

  if are_known(queries, keys) and not queries and not keys:
    return operands
  roles = mask_lib.structure_roles(structure)
  return operands._replace(arrays=tuple(map(pad_array, operands.arrays, roles)))
