# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""BlockMap: the key blocks that each query block visits, and those that need the mask evaluated.

All block-wise kernels read the same lists. They are computed on the host, once per value, for masks
without arrays; for masks with arrays inside jit, from the smallest and largest id, position or
length of every block.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import mask as mask_lib
from attn_core.types import are_known, cdiv

Array = Any  # of numpy or jax

EMPTY, PARTIAL, FULL = 0, 1, 2
# Of `every_query_sees_a_key`: keys of a block, at first and then, and pairs at a time.
MANY_KEYS, SOME_KEYS, MANY_PAIRS = 128, 16, 2**20


class BlockMap(NamedTuple):
  """Per row block, the column blocks to visit: full ones first, then partial ones."""

  # int32 [B or 1, H or 1, num_rows, longest], ascending among full and among partial blocks;
  # entries past num_visited are arbitrary.
  indices: Array
  num_full: Array  # int32 [B or 1, H or 1, num_rows]: the first blocks, which need no mask
  num_visited: Array  # int32 [B or 1, H or 1, num_rows]: full and partial blocks

  @property
  def any_full(self) -> bool:
    """False only when it is known on the host that no block is full."""
    return not isinstance(self.num_full, np.ndarray) or bool((self.num_full > 0).any())

  @property
  def any_partial(self) -> bool:
    """False only when it is known on the host that no block is partial."""
    if self.num_visited is self.num_full:  # one array: see `full_map`
      return False
    return (not isinstance(self.num_full, np.ndarray)
            or bool((self.num_visited > self.num_full).any()))


class Sizes(NamedTuple):
  """A rectangle of queries and keys cut into blocks; all in tokens."""

  queries: int
  keys: int
  block_q: int
  block_kv: int

  @property
  def num_query_blocks(self) -> int:
    return _count(self.queries, self.block_q)

  @property
  def num_key_blocks(self) -> int:
    return _count(self.keys, self.block_kv)

  @property
  def query_padding(self) -> int:
    """Number of queries to append for whole blocks."""
    return self.num_query_blocks * self.block_q - self.queries

  @property
  def key_padding(self) -> int:
    """Number of keys to append for whole blocks."""
    return self.num_key_blocks * self.block_kv - self.keys


def _count(length: int, block: int) -> int:
  """Number of blocks of a length; of a symbolic one in a form that JAX knows to be at least 1."""
  return cdiv(length, block) if are_known(length) else (length + block - 1) // block


def block_kinds(mask: mask_lib.Mask, sizes: Sizes) -> Array:
  """Classifies every pair of blocks as EMPTY, PARTIAL or FULL.

  Conservative: EMPTY and FULL are certain, PARTIAL may turn out to be either. A last key block that
  extends past the keys is never FULL.

  Args:
    mask: a mask; its arrays may be traced.
    sizes: the blocks.

  Returns:
    int8 [B or 1, H or 1, num_query_blocks, num_key_blocks]; numpy if the mask holds no arrays.
  """
  if jax.tree.leaves(mask) or not are_known(*sizes):
    return _kinds(mask, sizes, jnp)
  return _static_kinds(mask, sizes)


def host_kinds(mask: mask_lib.Mask, sizes: Sizes) -> np.ndarray:
  """`block_kinds` computed by numpy, for a mask with numpy arrays."""
  return _kinds(mask, sizes, np)


@functools.lru_cache(maxsize=256)
def _static_kinds(mask: mask_lib.Mask, sizes: Sizes) -> np.ndarray:
  kinds = _kinds(mask, sizes, np)
  kinds.setflags(write=False)  # the cached array is shared
  return kinds


def every_query_sees_a_key(mask: mask_lib.Mask, queries: int, keys: int) -> bool:
  """Returns whether each query certainly sees a key, for a mask without arrays.

  By blocks of keys, which is enough for most queries, and key by key for the others: a long
  sequence has too many pairs for an array of them.
  """
  grid, rows = _grid(Sizes(queries, keys, 1, 1), np), np.arange(queries, dtype=np.int32)
  for block in (MANY_KEYS, SOME_KEYS, 1):
    key = _index_interval(keys, block, np, (1, 1, 1, -1))
    columns, left = key.low.size, []
    for some in np.split(rows, range(0, rows.size, max(1, MANY_PAIRS // max(1, columns)))):
      query = mask_lib.Interval(*(some.reshape(1, 1, -1, 1),) * 2)
      possible, certain = mask.bounds(grid._replace(
          query_index=query, query_position=query, key_index=key, key_position=key))
      seen = np.broadcast_to(possible & certain, (1, 1, some.size, columns)).any(axis=(0, 1, 3))
      left.append(some[~seen])
      if block == 1 and not seen.all():
        return False
    rows = np.concatenate(left)
  return True


def _kinds(mask: mask_lib.Mask, sizes: Sizes, xp: mask_lib.NumpyModule) -> Any:
  possible, certain = mask.bounds(_grid(sizes, xp))
  if not are_known(sizes.keys) or sizes.keys % sizes.block_kv:
    last = sizes.num_key_blocks - 1
    whole = xp.arange(sizes.num_key_blocks) < (last if are_known(last) else xp.asarray(last))
    certain = certain & whole[(None,) * (certain.ndim - 1)]
  shape = jnp.broadcast_shapes(possible.shape, certain.shape,
                              (1, 1, sizes.num_query_blocks, sizes.num_key_blocks))
  if xp is np:  # in 8 bits from the beginning
    return np.broadcast_to((certain & possible).astype(np.int8) + possible, shape).astype(np.int8)
  kinds = xp.where(certain & possible, FULL, xp.where(possible, PARTIAL, EMPTY))
  return xp.broadcast_to(kinds, shape).astype(np.int8)


def _grid(sizes: Sizes, xp: mask_lib.NumpyModule) -> mask_lib.Grid:
  query = _index_interval(sizes.queries, sizes.block_q, xp, (1, 1, -1, 1))
  key = _index_interval(sizes.keys, sizes.block_kv, xp, (1, 1, 1, -1))
  return mask_lib.Grid(
      xp=xp,
      reduce_query=lambda x: _reduce(x, sizes.block_q, xp, (x.shape[0], 1, -1, 1)),
      reduce_key=lambda x: _reduce(x, sizes.block_kv, xp, (x.shape[0], 1, 1, -1)),
      reduce_dense=lambda x: _reduce_dense(x, sizes, xp),
      reduce_selected=None if not are_known(*sizes) else (
          lambda indices, block_q, block_kv: _reduce_selected(
              xp.asarray(indices), Sizes(*sizes[:2], block_q, block_kv), sizes, xp)),
      query_index=query, key_index=key, query_position=query, key_position=key)


def _index_interval(length: int, block: int, xp: mask_lib.NumpyModule,
                    shape: tuple[int, ...]) -> mask_lib.Interval:
  if not are_known(length):
    first = block * jnp.arange(_count(length, block), dtype=jnp.int32)
    last = jnp.minimum(first + block, jnp.asarray(length, jnp.int32)) - 1
    return mask_lib.Interval(first.reshape(shape), last.reshape(shape))
  low = np.arange(0, length, block, dtype=np.int32)
  high = np.minimum(low + block, length) - 1
  return mask_lib.Interval(xp.asarray(low.reshape(shape)), xp.asarray(high.reshape(shape)))


def _reduce(x: Array, block: int, xp: mask_lib.NumpyModule,
            shape: tuple[int, ...]) -> mask_lib.Interval:
  """Smallest and largest number of every block of [B or 1, length]."""
  length = x.shape[1]
  if are_known(length):
    x = xp.pad(x, ((0, 0), (0, -length % block)), mode="edge")
  else:
    token = jnp.arange(_count(length, block) * block, dtype=jnp.int32)
    x = jnp.take(x, jnp.minimum(token, jnp.asarray(length, jnp.int32) - 1), axis=1)
  x = x.reshape(x.shape[0], -1, block)
  return mask_lib.Interval(x.min(-1).reshape(shape), x.max(-1).reshape(shape))


def _reduce_dense(x: Array, sizes: Sizes, xp: mask_lib.NumpyModule) -> tuple[Array, Array]:
  """(any, all) over the blocks of [B or 1, H or 1, T or 1, S or 1]."""
  possible = certain = x
  for axis, block in ((2, sizes.block_q), (3, sizes.block_kv)):
    if x.shape[axis] != 1:
      possible = _blocks(possible, axis, block, False, xp).any(axis + 1)
      certain = _blocks(certain, axis, block, True, xp).all(axis + 1)
  return possible, certain


def _reduce_selected(indices: Array, listed: Sizes, sizes: Sizes,
                     xp: mask_lib.NumpyModule) -> Array:
  """Whether blocks of `sizes` have a pair of the listed blocks, over all rows and heads.

  Rows and heads count together: inside of a shard a block map does not know their global numbers.

  Args:
    indices: int32 [B or 1, heads or 1, num_query_blocks, k], key blocks of `listed`; -1: none.
    listed: the blocks that they number.
    sizes: the blocks of the map.
    xp: numpy or jax.numpy.

  Returns:
    bool [1, 1, num_query_blocks, num_key_blocks] of `sizes`.
  """
  table = xp.zeros((sizes.num_query_blocks, sizes.num_key_blocks + 1), bool)
  first = indices * listed.block_kv
  last = first + listed.block_kv - 1
  rows = np.arange(indices.shape[2])[:, None] * listed.block_q
  for n in range(cdiv(listed.block_q - 1, sizes.block_q) + 1):
    row = np.minimum(rows // sizes.block_q + n, (rows + listed.block_q - 1) // sizes.block_q)
    row = np.minimum(row, sizes.num_query_blocks - 1)
    for m in range(cdiv(listed.block_kv - 1, sizes.block_kv) + 1):
      column = xp.minimum(first // sizes.block_kv + m, last // sizes.block_kv)
      column = xp.where(indices < 0, sizes.num_key_blocks,
                        xp.minimum(column, sizes.num_key_blocks - 1))
      if xp is np:
        table[np.broadcast_to(row, column.shape), column] = True
      else:
        table = table.at[row, column].set(True)
  return table[None, None, :, :-1]


def _blocks(x: Array, axis: int, block: int, fill: bool, xp: mask_lib.NumpyModule) -> Array:
  """Splits an axis into [num_blocks, block], padding with `fill`."""
  length = x.shape[axis]
  more = _count(length, block) * block - length
  if are_known(length):
    x = xp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
  else:
    x = jax.lax.pad(x, np.bool_(fill), [(0, more if i == axis else 0, 0) for i in range(x.ndim)])
  return x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1:])


def merge_heads(kinds: Array, group: int) -> Array:
  """Merges the kinds of each `group` consecutive heads, which are computed together.

  Args:
    kinds: int8 [B or 1, H or 1, num_query_blocks, num_key_blocks].
    group: heads in a group; divides H.

  Returns:
    int8 [B or 1, H / group or 1, num_query_blocks, num_key_blocks]: EMPTY or FULL where all heads
    agree, else PARTIAL.
  """
  if kinds.shape[1] == 1:
    return kinds
  kinds = kinds.reshape(kinds.shape[0], -1, group, *kinds.shape[2:])
  xp = np if isinstance(kinds, np.ndarray) else jnp
  low, high = kinds.min(2), kinds.max(2)
  return xp.where(low == high, low, PARTIAL).astype(np.int8)


def block_map(kinds: Array) -> BlockMap:
  """Lists the blocks to visit, per row block.

  Args:
    kinds: int8 [B or 1, H or 1, num_rows, num_columns] from `block_kinds`; swap the last two
      axes for the map of the key-side backward.

  Returns:
    A BlockMap; of numpy arrays if `kinds` is one.
  """
  host = isinstance(kinds, np.ndarray)
  xp = np if host else jnp
  num_full = (kinds == FULL).sum(-1).astype(np.int32)
  num_visited = (kinds != EMPTY).sum(-1).astype(np.int32)
  order = xp.argsort(-kinds, axis=-1, **({"kind": "stable"} if host else {"stable": True}))
  if host:
    order = order[..., :max(int(num_visited.max()), 1)]
  return BlockMap(order.astype(np.int32), num_full, num_visited)


def full_map(kinds: Array) -> BlockMap:
  """`block_map` for kinds without PARTIAL, which makes that static for traced kinds too."""
  found = block_map(kinds)
  return found._replace(num_visited=found.num_full)


def join_full(kinds: Array, factor: int) -> tuple[Array, Array]:
  """Joins each `factor` consecutive key blocks into a larger one where all of them are FULL.

  Args:
    kinds: int8 [B or 1, H or 1, num_query_blocks, num_key_blocks] from `block_kinds`.
    factor: number of blocks to join; larger blocks begin at its multiples.

  Returns:
    (kinds of the num_key_blocks // factor larger blocks, FULL or EMPTY; `kinds` with EMPTY where
    these are FULL).
  """
  xp = np if isinstance(kinds, np.ndarray) else jnp
  count = kinds.shape[-1] // factor
  joined, rest = kinds[..., :count * factor], kinds[..., count * factor:]
  groups = joined.reshape(*kinds.shape[:-1], count, factor)
  whole = (groups == FULL).all(-1, keepdims=True)
  left = xp.where(whole, EMPTY, groups).reshape(joined.shape)
  large = xp.where(whole[..., 0], FULL, EMPTY)
  return large.astype(np.int8), xp.concatenate([left, rest], -1).astype(np.int8)
