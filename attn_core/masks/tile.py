"""Cutting a mask to a rectangle of queries and keys, where its elementwise predicate is evaluated.

Letters: B batch, H heads, T query length, S key length; a tile is [heads, queries, keys].
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.masks import leaves as algebra
from attn_core.types import MaskOperands


class Tile(NamedTuple):
  """One batch row, some neighbouring heads, a block of queries and a block of keys."""

  batch: Any  # local batch row, may be traced
  head: Any  # local number of the first query head
  query: Any  # first query row (tokens)
  key: Any  # first key column (tokens)
  num_heads: int
  num_queries: int
  num_keys: int


def int32s(starts):
  """Start indices of one dtype, whatever jax_enable_x64 makes of Python integers."""
  return [jnp.asarray(start, jnp.int32) for start in starts]


def slice_at(x, starts, lengths):
  """`lax.dynamic_slice` that takes Python integers and int32 together."""
  return lax.dynamic_slice(x, int32s(starts), lengths)


def cut(structure, operands: MaskOperands, tile: Tile, orient=lambda x: x):
  """The mask and the coordinates of one tile.

  Args:
    structure: the mask's tree structure.
    operands: its arrays, padded so that the tile lies inside of them.
    tile: where.
    orient: maps arrays [heads or 1, queries or 1, keys or 1] to the kernel's own order of axes.

  Returns:
    (mask, coordinates) that broadcast to [heads, queries, keys], oriented.
  """
  sizes = (1, tile.num_heads, tile.num_queries, tile.num_keys)
  starts = (tile.batch, tile.head, tile.query, tile.key)

  def slice_of(x, axes, shape):
    begin = [0 if x.shape[i] == 1 else starts[a] for i, a in enumerate(axes)]
    size = [1 if x.shape[i] == 1 else sizes[a] for i, a in enumerate(axes)]
    return slice_at(x, begin, size).reshape(shape)

  def slice_array(x, role):
    if role == algebra.QUERY:
      return orient(slice_of(x, (0, 2), (1, -1, 1)))
    if role == algebra.KEY:
      return orient(slice_of(x, (0, 3), (1, 1, -1)))
    if role == algebra.BATCH:
      return slice_of(x, (0,), ())
    if role == algebra.DENSE:
      block = [1 if x.shape[a] == 1 else sizes[a] for a in (1, 2, 3)]
      return orient(slice_of(x, (0, 1, 2, 3), block))
    return x

  roles = algebra.structure_roles(structure)
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
  return mask, algebra.Coordinates(batch, head, query, key, query, key)


def pad(structure, operands: MaskOperands, queries: int, keys: int) -> MaskOperands:
  """Pads the arrays by `queries` rows and `keys` columns; nothing there is ever visible.

  The kernel itself hides columns past the keys and throws away rows past the queries.
  """
  def pad_array(x, role):
    if role == algebra.QUERY and x.shape[1] > 1:
      return jnp.pad(x, ((0, 0), (0, queries)))
    if role == algebra.KEY and x.shape[1] > 1:
      return jnp.pad(x, ((0, 0), (0, keys)))
    if role == algebra.DENSE:
      return jnp.pad(x, ((0, 0), (0, 0), (0, queries if x.shape[2] > 1 else 0),
                         (0, keys if x.shape[3] > 1 else 0)))
    return x

  if not queries and not keys:
    return operands
  roles = algebra.structure_roles(structure)
  return operands._replace(arrays=tuple(map(pad_array, operands.arrays, roles)))
