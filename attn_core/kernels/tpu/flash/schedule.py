# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The grid of a TPU kernel: the blocks with visible entries, listed in scalar memory.

One grid step computes one block of queries against one block of keys. Blocks are divided into
tiles; the schedule says of each tile of a block whether it is hidden, fully visible or partly
visible, so that the cost of a block on the diagonal is that of its visible tiles. Every row of
blocks has at least one step, which writes its result even where nothing is visible.

Where the arrays of a mask are traced, the lists have room for every block that the mask may show
whatever its arrays hold, and the number of grid steps is the traced length of the longest list.
Steps after the end of a shorter list repeat its last blocks, so that nothing is copied, and have no
visible tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import listed
from attn_core.kernels.tpu.flash import step_list
from attn_core.kernels.tpu.flash.step_list import Schedule
from attn_core.masks import block_map, position_range, selected
from attn_core.masks.mask import Mask
from attn_core.types import cdiv

LANES = 128
MEBIBYTE = 2**20  # bytes
# A block whose tiles are of no pattern is computed by short strips, in branches. By static cycles
# of the forward on v6e, one of its visible tiles takes as long as this many tiles of a pattern that
# arrays of the mask cut. In the backward such a pattern would save 4%.
TILES_FOR_BRANCH = 2
# A kind of tile besides those of `block_map`: only arrays of the mask can hide a pair of it.
CUT = 3


def round_up(length: int, multiple: int) -> int:
  """Rounds `length` up to a multiple of `multiple`."""
  return cdiv(length, multiple) * multiple


class Tiling(NamedTuple):
  """Blocks and tiles of queries and keys, in tokens; tiles divide blocks evenly."""

  query_length: int  # T
  key_length: int  # S
  block_q: int
  block_kv: int
  tile_q: int
  tile_kv: int
  group: int = 1  # query heads of a key head that a grid step computes
  key_heads: int = 1  # key heads of a grid step
  head_parts: int = 1  # parts of the query heads of a key head: G / group
  range_blocks: int = 0  # query blocks of a range of the backward; 0: all
  # Parts of the work that chips with two cores may compute at once: of the query blocks in the
  # forward, of `head_parts` in the backward.
  halves: int = 1
  runs: tuple[int, int] = (1, 1)  # of positions of queries and of keys, for numbers by distance
  by_distance: tuple[int, ...] = ()  # arrays of the score mod that are tables by distance
  block_diagonals: int = 0  # that differ in these arrays, and that the mask may show

  @property
  def layout(self) -> listed.Layout:
    """Sizes by which lists of key blocks are read."""
    return listed.Layout(self.query_length, self.key_length, self.tile_q, self.tile_kv,
                         self.block_kv)

  @property
  def query_heads(self) -> int:
    """Query heads of a grid step."""
    return self.key_heads * self.group

  @property
  def padded_queries(self) -> int:
    """Query tokens, padded to whole blocks."""
    return round_up(self.query_length, self.block_q)

  @property
  def padded_keys(self) -> int:
    """Key tokens, padded to whole blocks."""
    return round_up(self.key_length, self.block_kv)

  @property
  def query_blocks(self) -> int:
    """Number of blocks of queries."""
    return cdiv(self.query_length, self.block_q)

  @property
  def key_blocks(self) -> int:
    """Number of blocks of keys."""
    return cdiv(self.key_length, self.block_kv)

  @property
  def blocks_of_range(self) -> int:
    """Query blocks of a range, whose cotangent a backward keeps in vector memory."""
    return self.range_blocks or self.query_blocks

  @property
  def num_ranges(self) -> int:
    """Ranges of query blocks of the backward; the last one may have fewer blocks."""
    return cdiv(self.query_blocks, self.blocks_of_range)

  @property
  def visits_of_keys(self) -> int:
    """Times that a backward comes to a block of keys, to add to its cotangents."""
    return self.head_parts * self.num_ranges

  @property
  def parts_of_half(self) -> int:
    """Parts of the query heads of a key head that a backward computes one after another."""
    return self.head_parts // self.halves

  @property
  def tiles_q(self) -> int:
    """Tiles of a block along the queries."""
    return self.block_q // self.tile_q

  @property
  def tiles_kv(self) -> int:
    """Tiles of a block along the keys."""
    return self.block_kv // self.tile_kv

  @property
  def strip_tiles(self) -> int:
    """Neighboring tiles along the queries that are computed at once in a block of no pattern."""
    return 2 if self.tiles_q % 2 == 0 else 1

  def word_sizes(self, by_keys: bool) -> step_list.WordSizes:
    """Returns the sizes of the words of a schedule; see `build`."""
    rows, columns = self.query_blocks, self.key_blocks
    if by_keys:
      rows, columns = columns, rows
    return step_list.WordSizes(rows, columns, self.tiles_q * self.tiles_kv)


class StepLists(NamedTuple):
  """Sizes of the leading axes of a mask's tiles, by which a schedule has one or more lists."""

  batches: int  # B, or 1: all batch rows share their lists
  heads: int  # groups of heads, or 1: all heads share their lists
  longest: int | jax.Array  # steps of the longest list, which all others are padded to
  halves: int = 1  # of the query blocks, each with lists of its own

  def list_of(self, batch: jax.Array, head_group: jax.Array, half: jax.Array) -> jax.Array | int:
    """Returns the list of a batch row, a group of heads and a half of the query blocks."""
    number = (batch * self.heads if self.batches > 1 else 0) + (head_group if self.heads > 1 else 0)
    return number * 2 + half if self.halves > 1 else number


def build(mask: Mask, tiling: Tiling, *, by_keys: bool,
          descending: bool = False) -> tuple[Schedule, StepLists]:
  """Builds the grid steps of a mask.

  Args:
    mask: any mask; its arrays may be traced.
    tiling: blocks and tiles; at most 16 tiles a block.
    by_keys: row blocks are blocks of keys (the backward) instead of queries; the blocks of queries
      are divided into ranges.
    descending: visits the blocks of a row from the last one to the first.

  Returns:
    (the schedule, its lists); NumPy arrays if the mask holds none that are traced.
  """
  kinds = _kinds(mask, tiling, by_keys)
  xp = np if isinstance(kinds, np.ndarray) else jnp
  if xp is jnp:
    # What no array can make visible is left out in any case: `num_steps` relies on it.
    possible = _possible(mask, tiling, by_keys)
    kinds = jnp.where(possible[..., None], kinds, block_map.EMPTY)
    kinds = _with_cut(kinds, static_tiles(mask, tiling, by_keys), by_keys)
  room = num_steps(mask, tiling, by_keys=by_keys)
  ranges, halves = (tiling.num_ranges, 1) if by_keys else (1, tiling.halves)
  steps, longest = step_list.compact(_by_list(kinds, halves), ranges, room, xp,
                                     descending=descending)
  if halves > 1:
    half = np.arange(len(steps.rows), dtype=np.int32)[:, None] % 2
    steps = steps._replace(rows=2 * steps.rows + (steps.rows + half) % 2)  # see `in_halves`
  return steps, StepLists(kinds.shape[0], kinds.shape[1], longest, halves)


def in_halves(x: step_list.Array) -> step_list.Array:
  """Brings blocks, axis 2, to the order 0 3 4 7 ..., then 1 2 5 6 ...: equal work if causal."""
  xp = np if isinstance(x, np.ndarray) else jnp
  batches, heads, num_blocks, *rest = x.shape
  pairs = x.reshape(batches, heads, num_blocks // 2, 2, *rest)
  is_odd = (np.arange(num_blocks // 2) % 2 == 1).reshape(1, 1, -1, 1, *[1] * len(rest))
  return xp.where(is_odd, pairs[:, :, :, ::-1], pairs).swapaxes(2, 3).reshape(x.shape)


def _by_list(x: step_list.Array, halves: int) -> step_list.Array:
  """Merges the leading axes [batches, heads, rows, ...] to [num_lists, rows of a list, ...]."""
  return x.reshape(-1, x.shape[2] // halves, *x.shape[3:])


def num_steps(mask: Mask, tiling: Tiling, *, by_keys: bool) -> int:
  """Returns the length of the lists of `build`, without the values of the mask's arrays."""
  ranges, halves = (tiling.num_ranges, 1) if by_keys else (1, tiling.halves)
  possible = _by_list(_possible(mask, tiling, by_keys), halves)
  visited = step_list.with_idle(possible, ranges, np)
  # The arrays of a mask may leave a row block and a range, whose only block was the same, without
  # any: both then have an idle step.
  more = ranges if ranges > 1 and jax.tree.leaves(mask) else 0
  found = int(visited.sum((1, 2)).max()) + more
  if (most := listed.most_visited(mask, tiling.block_q, tiling.block_kv)) is None:
    return found
  # Of each block of queries the listed blocks, and one idle step of each row and range.
  of_queries = possible.reshape(possible.shape[0], ranges, -1, possible.shape[-1]).sum(
      2) if by_keys else possible.sum(-1)
  idle = possible.shape[1] // ranges + ranges
  of_lists = np.minimum(of_queries, most).reshape(len(possible), -1).sum(1)
  return min(found, int(of_lists.max()) + idle)


def num_lists(mask: Mask, tiling: Tiling) -> tuple[int, int]:
  """Returns `StepLists.batches` and `StepLists.heads`, without the values of the mask's arrays."""
  whole = tiling._replace(halves=1)  # halves of a backward are of heads, not of query blocks
  batches, heads, *_ = jax.eval_shape(
      lambda mask: jnp.asarray(_kinds(mask, whole, False)), mask).shape
  return batches, heads


def _kinds(mask: Mask, tiling: Tiling, by_keys: bool) -> jax.Array | np.ndarray:
  """Returns the tile kinds by rows of a list: row blocks, of each range or each half in turn.

  Returns:
    int32 [batches, heads, num_ranges * row_blocks, column blocks of a range, tiles].
  """
  lists, rest = selected.split(mask)
  kinds = block_map.block_kinds(rest, block_map.Sizes(*tiling.layout[:4]))
  kinds = block_map.merge_heads(kinds, tiling.query_heads)
  kinds = listed.visited(kinds, lists, tiling.layout, tiling.query_heads)
  xp = np if isinstance(kinds, np.ndarray) else jnp
  ranges, columns = (tiling.num_ranges, tiling.blocks_of_range) if by_keys else (
      1, tiling.query_blocks)
  tiles = ranges * columns * tiling.tiles_q, tiling.padded_keys // tiling.tile_kv
  padding = [(0, 0), (0, 0)] + [(0, n - m) for n, m in zip(tiles, kinds.shape[2:])]
  kinds = xp.pad(kinds, padding, constant_values=block_map.EMPTY).astype(np.int32)
  kinds = kinds.reshape(*kinds.shape[:2], ranges, columns, tiling.tiles_q, -1, tiling.tiles_kv)
  # Tile (kv, q) of a block is kv * tiles_q + q.
  kinds = kinds.transpose((0, 1, 2, 5, 3, 6, 4) if by_keys else (0, 1, 2, 3, 5, 6, 4))
  rows = ranges * (tiling.key_blocks if by_keys else tiling.query_blocks)
  kinds = kinds.reshape(*kinds.shape[:2], rows, -1, tiling.tiles_q * tiling.tiles_kv)
  return in_halves(kinds) if tiling.halves > 1 and not by_keys else kinds


def _possible(mask: Mask, tiling: Tiling, by_keys: bool) -> np.ndarray:
  """Returns which blocks the mask may show whatever its arrays hold.

  Returns:
    bool [batches, heads, rows, columns], see `_kinds`; [1, 1, ...] if the mask has arrays.
  """
  kinds = _static_kinds(position_range.static_superset(mask), tiling, by_keys)
  possible = np.any(kinds != block_map.EMPTY, -1)
  return np.any(possible, (0, 1), keepdims=True) if jax.tree.leaves(mask) else possible


def static_tiles(mask: Mask, tiling: Tiling, by_keys: bool) -> np.ndarray:
  """Returns the kinds of tiles as far as they are known whatever the mask's arrays hold.

  Returns:
    int32 [rows, columns, tiles], see `_kinds`: EMPTY where no batch row and head can see a pair.
  """
  kinds = _static_kinds(position_range.static_superset(mask), tiling, by_keys)
  return np.asarray(block_map.merge_heads(kinds, kinds.shape[1]))[0, 0].astype(np.int32)


def all_cut(static: np.ndarray) -> np.ndarray:
  """Replaces FULL by CUT."""
  return np.where(static == block_map.FULL, CUT, static)


def is_partly_hidden(static: np.ndarray) -> np.ndarray:
  """Returns bool [rows, columns]: which blocks have tiles that no array can show, and others."""
  hidden = static == block_map.EMPTY
  return hidden.any(-1) & ~hidden.all(-1)


def _with_cut(kinds: jax.Array, static: np.ndarray, by_keys: bool) -> jax.Array:
  """Marks CUT tiles; in the forward, rounds blocks that are partly hidden and cut to `Patterns`.

  A block with few visible tiles keeps them, as they take less time in branches than all that may
  be visible in a pattern. So does a block of which the static mask hides nothing: the documents
  that cut it usually show a part of it.

  Args:
    kinds: see `_kinds`.
    static: see `static_tiles`.
    by_keys: whether these are of a backward.
  """
  partly_hidden, static = is_partly_hidden(static)[None, None, :, :, None], static[None, None]
  marked = jnp.where((kinds == block_map.PARTIAL) & (static == block_map.FULL), CUT, kinds)
  if by_keys:
    return marked
  visible = (kinds != block_map.EMPTY).sum(-1, keepdims=True)
  many = visible * TILES_FOR_BRANCH >= (static != block_map.EMPTY).sum(-1, keepdims=True)
  is_cut = (kinds != static).any(-1, keepdims=True) & (visible > 0)
  return jnp.where(partly_hidden & many & is_cut, all_cut(static), marked)


@functools.lru_cache(maxsize=256)
def _static_kinds(mask: Mask, tiling: Tiling, by_keys: bool) -> np.ndarray:
  """`_kinds` for a mask without arrays, int8."""
  kinds = np.asarray(_kinds(mask, tiling, by_keys)).astype(np.int8)
  kinds.setflags(write=False)  # the cached array is shared
  return kinds
