"""BlockMap: which key blocks every query block must visit, and which need the mask evaluated.

Every block-wise kernel consumes the same lists. Masks without arrays are mapped
on the host, once per value; masks with arrays inside jit, from the smallest and
largest id, position or length of every block.

Letters: B batch, H heads, nq and nk numbers of query and key blocks, L longest list.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import leaves as algebra
from attn_core.types import cdiv

EMPTY, PARTIAL, FULL = 0, 1, 2


class BlockMap(NamedTuple):
  """For every block of rows, the column blocks to visit: full ones first, then partial ones."""

  indices: Any  # int32 [B or 1, H or 1, n, L], each group ascending; entries past num_visited: any
  num_full: Any  # int32 [B or 1, H or 1, n]: the first so many need no mask
  num_visited: Any  # int32 [B or 1, H or 1, n]: full and partial ones

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
    return cdiv(self.queries, self.block_q)

  @property
  def num_key_blocks(self) -> int:
    return cdiv(self.keys, self.block_kv)


def block_kinds(mask: algebra.Mask, sizes: Sizes):
  """EMPTY, PARTIAL or FULL for every pair of blocks.

  Conservative: EMPTY and FULL are certain, PARTIAL may turn out to be either. A
  last key block that reaches past the keys is never FULL.

  Args:
    mask: a mask; its arrays may be traced.
    sizes: the blocks.

  Returns:
    int8 [B or 1, H or 1, nq, nk], of numpy when the mask holds no arrays.
  """
  if jax.tree.leaves(mask):
    return _kinds(mask, sizes, jnp)
  return _static_kinds(mask, sizes)


def host_kinds(mask: algebra.Mask, sizes: Sizes) -> np.ndarray:
  """`block_kinds` by numpy, of a mask whose arrays are numpy's."""
  return _kinds(mask, sizes, np)


@functools.lru_cache(maxsize=256)
def _static_kinds(mask, sizes):
  kinds = _kinds(mask, sizes, np)
  kinds.setflags(write=False)  # shared by everyone who asks for an equal mask
  return kinds


def _kinds(mask, sizes, xp):
  possible, certain = mask.bounds(_grid(sizes, xp))
  if sizes.keys % sizes.block_kv:
    whole = xp.arange(sizes.num_key_blocks) < sizes.num_key_blocks - 1
    certain = certain & whole
  shape = np.broadcast_shapes(possible.shape, certain.shape,
                              (1, 1, sizes.num_query_blocks, sizes.num_key_blocks))
  kinds = xp.where(certain & possible, FULL, xp.where(possible, PARTIAL, EMPTY))
  return xp.broadcast_to(kinds, shape).astype(np.int8)


def _grid(sizes: Sizes, xp) -> algebra.Grid:
  query = _index_interval(sizes.queries, sizes.block_q, xp, (1, 1, -1, 1))
  key = _index_interval(sizes.keys, sizes.block_kv, xp, (1, 1, 1, -1))
  return algebra.Grid(
      xp=xp,
      reduce_query=lambda x: _reduce(x, sizes.block_q, xp, (x.shape[0], 1, -1, 1)),
      reduce_key=lambda x: _reduce(x, sizes.block_kv, xp, (x.shape[0], 1, 1, -1)),
      reduce_dense=lambda x: _reduce_dense(x, sizes, xp),
      query_index=query, key_index=key, query_position=query, key_position=key)


def _index_interval(length, block, xp, shape):
  low = np.arange(0, length, block, dtype=np.int32)
  high = np.minimum(low + block, length) - 1
  return algebra.Interval(xp.asarray(low.reshape(shape)), xp.asarray(high.reshape(shape)))


def _reduce(x, block, xp, shape):
  """Smallest and largest number of every block of [B or 1, length]."""
  padding = -x.shape[1] % block
  x = xp.pad(x, ((0, 0), (0, padding)), mode="edge").reshape(x.shape[0], -1, block)
  return algebra.Interval(x.min(-1).reshape(shape), x.max(-1).reshape(shape))


def _reduce_dense(x, sizes, xp):
  """(any, all) over the blocks of [B or 1, H or 1, T or 1, S or 1]."""
  possible = certain = x
  for axis, block in ((2, sizes.block_q), (3, sizes.block_kv)):
    if x.shape[axis] > 1:
      possible = _blocks(possible, axis, block, False, xp).any(axis + 1)
      certain = _blocks(certain, axis, block, True, xp).all(axis + 1)
  return possible, certain


def _blocks(x, axis, block, fill, xp):
  """Splits an axis into [blocks, block], padding with `fill`."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % block)
  x = xp.pad(x, widths, constant_values=fill)
  return x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1:])


def merge_heads(kinds, group: int):
  """Kinds for groups of `group` neighbouring heads that are computed together.

  Args:
    kinds: int8 [B or 1, H or 1, nq, nk].
    group: heads in a group; divides H.

  Returns:
    int8 [B or 1, H / group or 1, nq, nk]: EMPTY where all are, FULL where all are.
  """
  if kinds.shape[1] == 1:
    return kinds
  kinds = kinds.reshape(kinds.shape[0], -1, group, *kinds.shape[2:])
  xp = np if isinstance(kinds, np.ndarray) else jnp
  low, high = kinds.min(2), kinds.max(2)
  return xp.where(low == high, low, PARTIAL).astype(np.int8)


def block_map(kinds) -> BlockMap:
  """The lists of blocks to visit, per row block.

  Args:
    kinds: int8 [B or 1, H or 1, nq, nk] from `block_kinds`; swap the last two
      axes for the map of the key-side backward.

  Returns:
    A BlockMap, of numpy when `kinds` is.
  """
  host = isinstance(kinds, np.ndarray)
  xp = np if host else jnp
  num_full = (kinds == FULL).sum(-1).astype(np.int32)
  num_visited = (kinds != EMPTY).sum(-1).astype(np.int32)
  order = xp.argsort(-kinds, axis=-1, **({"kind": "stable"} if host else {"stable": True}))
  longest = max(int(num_visited.max()), 1) if host else kinds.shape[-1]
  return BlockMap(order[..., :longest].astype(np.int32), num_full, num_visited)


def full_map(kinds) -> BlockMap:
  """`block_map` of kinds without PARTIAL, which is then known of traced kinds, too."""
  found = block_map(kinds)
  return found._replace(num_visited=found.num_full)


def join_full(kinds, factor: int):
  """Joins `factor` neighbouring key blocks into a larger one where all of them are FULL.

  Args:
    kinds: int8 [B or 1, H or 1, nq, nk] from `block_kinds`.
    factor: how many; the larger blocks begin at its multiples.

  Returns:
    (kinds of the nk // factor larger blocks, FULL or EMPTY; `kinds` with EMPTY where these are
    FULL).
  """
  xp = np if isinstance(kinds, np.ndarray) else jnp
  count = kinds.shape[-1] // factor
  joined, rest = kinds[..., :count * factor], kinds[..., count * factor:]
  groups = joined.reshape(*kinds.shape[:-1], count, factor)
  whole = (groups == FULL).all(-1, keepdims=True)
  left = xp.where(whole, EMPTY, groups).reshape(joined.shape)
  large = xp.where(whole[..., 0], FULL, EMPTY)
  return large.astype(np.int8), xp.concatenate([left, rest], -1).astype(np.int8)
