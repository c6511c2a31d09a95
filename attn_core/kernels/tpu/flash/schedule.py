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
import itertools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import block_map, position_range
from attn_core.masks.mask import Mask
from attn_core.types import cdiv

LANES = 128
FIRST, LAST = 1, 2  # bits of `flags`
MOST_PATTERNS = 6
# A block whose tiles are of no pattern is computed tile by tile, in branches. By static cycles on
# v6e one such tile takes as long as this many tiles of a pattern whose mask is evaluated; by
# `by_keys`, forward and backward.
TILES_FOR_BRANCH = {False: 3, True: 2}


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
  group: int = 1  # G, query heads of a key head
  key_heads: int = 1  # key heads of a grid step

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
  def tiles_q(self) -> int:
    """Tiles of a block along the queries."""
    return self.block_q // self.tile_q

  @property
  def tiles_kv(self) -> int:
    """Tiles of a block along the keys."""
    return self.block_kv // self.tile_kv


class Schedule(NamedTuple):
  """The work of every grid step: int32 [num_lists, num_steps] each; see `StepLists`."""

  rows: jax.Array | np.ndarray  # the row block
  columns: jax.Array | np.ndarray  # the column block
  kinds: jax.Array | np.ndarray  # two bits a tile: EMPTY, PARTIAL or FULL of `masks.block_map`
  flags: jax.Array | np.ndarray  # FIRST and LAST step of its row block

  @property
  def single_step_rows(self) -> bool:
    """True if every row block has exactly one step, and all steps have the same tile kinds."""
    return (isinstance(self.kinds, np.ndarray) and bool((self.flags == FIRST | LAST).all())
            and bool((self.kinds == self.kinds.flat[0]).all()) and bool(self.kinds.flat[0]))


class Patterns(NamedTuple):
  """The values of `Schedule.kinds` that get specialized code."""

  kinds: tuple[int, ...]  # as uint32; the one with all tiles FULL comes first if it occurs
  complete: bool  # whether these are all values


class PackedSchedule(NamedTuple):
  """A schedule as it lies in scalar memory, where the last axis of other shapes is padded."""

  blocks: jax.Array | np.ndarray  # int32 [num_lists * num_steps]: row, column and flags of a step
  kinds: jax.Array | np.ndarray  # int32 [num_lists * num_steps]

  @classmethod
  def pack(cls, schedule: Schedule, num_columns: int) -> "PackedSchedule":
    """Packs a schedule with this number of column blocks."""
    rows, columns, kinds, flags = schedule
    words = ((rows << _column_bits(num_columns) | columns) << 2) | flags
    return cls(words.reshape(-1), kinds.reshape(-1))

  @staticmethod
  def unpack(word: jax.Array, num_columns: int) -> tuple[jax.Array, jax.Array | int, jax.Array]:
    """Returns (row, column, flags) of an entry of `blocks`."""
    bits = _column_bits(num_columns)
    column = (word >> 2) & (2**bits - 1) if bits else 0
    return word >> (2 + bits), column, word & (FIRST | LAST)


def _column_bits(num_columns: int) -> int:
  return (num_columns - 1).bit_length()


class StepLists(NamedTuple):
  """Sizes of the leading axes of a mask's tiles, by which a schedule has one or more lists."""

  batches: int  # B, or 1: all batch rows share their lists
  heads: int  # groups of heads, or 1: all heads share their lists
  longest: int | jax.Array  # steps of the longest list, which all others are padded to

  def list_of(self, batch: jax.Array, head_group: jax.Array) -> jax.Array | int:
    """Returns the list of a batch row and a group of heads."""
    return (batch * self.heads if self.batches > 1 else 0) + (head_group if self.heads > 1 else 0)


def build(mask: Mask, tiling: Tiling, *, by_keys: bool,
          query_blocks: tuple[int, int] | None = None) -> tuple[Schedule, StepLists]:
  """Builds the grid steps of a mask.

  Args:
    mask: any mask; its arrays may be traced.
    tiling: blocks and tiles; at most 16 tiles a block.
    by_keys: row blocks are blocks of keys (the backward) instead of queries.
    query_blocks: restricts the steps to the query blocks [first, end), numbered from `first`;
      None: all.

  Returns:
    (the schedule, its lists); NumPy arrays if the mask holds none that are traced.
  """
  kinds = _kinds(mask, tiling, by_keys, query_blocks)
  xp = np if isinstance(kinds, np.ndarray) else jnp
  if xp is np:
    room = num_steps(mask, tiling, by_keys=by_keys, query_blocks=query_blocks)
  else:
    # What no array can make visible is left out in any case: `num_steps` relies on it.
    possible = _possible(mask, tiling, by_keys, query_blocks)
    kinds = jnp.where(possible[..., None], kinds, block_map.EMPTY)
    kinds = _rounded(kinds, _static_tiles(mask, tiling, by_keys, query_blocks),
                     TILES_FOR_BRANCH[by_keys])
    room = _longest(possible)
  steps, longest = _compact(kinds.reshape(-1, *kinds.shape[2:]), room, xp)
  return steps, StepLists(kinds.shape[0], kinds.shape[1], longest)


def patterns(steps: Schedule, mask: Mask, tiling: Tiling, *, by_keys: bool,
             query_blocks: tuple[int, int] | None = None) -> Patterns:
  """Chooses the kinds of tiles that get specialized code: the most frequent ones.

  Where the arrays of the mask are traced, these are the kinds of blocks that the arrays do not cut,
  and those to which `build` rounds the others.

  Args:
    steps: result of `build` for the other arguments.
    mask, tiling, by_keys, query_blocks: as in `build`.
  """
  all_full = sum(block_map.FULL << (2 * n) for n in range(tiling.tiles_q * tiling.tiles_kv))
  if known := isinstance(steps.kinds, np.ndarray):
    frequent = _by_frequency(steps.kinds.view(np.uint32))
  else:
    tiles = _static_tiles(mask, tiling, by_keys, query_blocks)
    pairs = itertools.zip_longest(*(
        _by_frequency(_bits(x)) for x in (tiles, _as_partial(tiles))))
    frequent = [bits for pair in pairs for bits in pair if bits is not None]
  first = [all_full] if all_full in frequent else []
  chosen = tuple(dict.fromkeys([*first, *frequent]))
  return Patterns(chosen[:MOST_PATTERNS], known and len(chosen) <= MOST_PATTERNS)


def _by_frequency(bits: np.ndarray) -> list[int]:
  """Returns the different numbers other than 0, the most frequent one first."""
  found, counts = np.unique(bits, return_counts=True)
  return [int(found[n]) for n in np.argsort(-counts, kind="stable") if found[n]]


def num_steps(mask: Mask, tiling: Tiling, *, by_keys: bool,
              query_blocks: tuple[int, int] | None = None) -> int:
  """Returns the length of the lists of `build`, without the values of the mask's arrays."""
  return _longest(_possible(mask, tiling, by_keys, query_blocks))


def num_lists(mask: Mask, tiling: Tiling) -> tuple[int, int]:
  """Returns `StepLists.batches` and `StepLists.heads`, without the values of the mask's arrays."""
  batches, heads, *_ = jax.eval_shape(
      lambda mask: jnp.asarray(_kinds(mask, tiling, False, None)), mask).shape
  return batches, heads


def _kinds(mask: Mask, tiling: Tiling, by_keys: bool,
           query_blocks: tuple[int, int] | None) -> jax.Array | np.ndarray:
  """Returns the tile kinds, int32 [batches, heads, row_blocks, column_blocks, tiles]."""
  kinds = block_map.block_kinds(
      mask, block_map.Sizes(tiling.query_length, tiling.key_length, tiling.tile_q, tiling.tile_kv))
  kinds = block_map.merge_heads(kinds, tiling.query_heads)
  xp = np if isinstance(kinds, np.ndarray) else jnp
  first, end = query_blocks or (0, tiling.query_blocks)
  kinds = kinds[:, :, first * tiling.tiles_q:end * tiling.tiles_q]
  tiles = (end - first) * tiling.tiles_q, tiling.padded_keys // tiling.tile_kv
  padding = [(0, 0), (0, 0)] + [(0, n - m) for n, m in zip(tiles, kinds.shape[2:])]
  kinds = xp.pad(kinds, padding, constant_values=block_map.EMPTY).astype(np.int32)
  kinds = kinds.reshape(*kinds.shape[:2], end - first, tiling.tiles_q, -1, tiling.tiles_kv)
  # Tile (kv, q) of a block is kv * tiles_q + q.
  kinds = kinds.transpose((0, 1, 4, 2, 5, 3) if by_keys else (0, 1, 2, 4, 5, 3))
  return kinds.reshape(*kinds.shape[:4], -1)


def _possible(mask: Mask, tiling: Tiling, by_keys: bool,
              query_blocks: tuple[int, int] | None) -> np.ndarray:
  """Returns which blocks the mask may show whatever its arrays hold.

  Returns:
    bool [batches, heads, row_blocks, column_blocks]; [1, 1, ...] if the mask has arrays.
  """
  kinds = _static_kinds(position_range.static_superset(mask), tiling, by_keys, query_blocks)
  possible = np.any(kinds != block_map.EMPTY, -1)
  return np.any(possible, (0, 1), keepdims=True) if jax.tree.leaves(mask) else possible


def _static_tiles(mask: Mask, tiling: Tiling, by_keys: bool,
                  query_blocks: tuple[int, int] | None) -> np.ndarray:
  """Returns the kinds of tiles as far as they are known whatever the mask's arrays hold.

  Returns:
    int32 [row_blocks, column_blocks, tiles]: EMPTY where no batch row and head can see a pair.
  """
  kinds = _static_kinds(position_range.static_superset(mask), tiling, by_keys, query_blocks)
  return np.asarray(block_map.merge_heads(kinds, kinds.shape[1]))[0, 0].astype(np.int32)


def _as_partial(tiles: np.ndarray) -> np.ndarray:
  """Replaces FULL by PARTIAL."""
  return np.minimum(tiles, block_map.PARTIAL)


def _rounded(kinds: jax.Array, static: np.ndarray, tiles_for_branch: int) -> jax.Array:
  """Rounds the tiles of blocks that the arrays of a mask cut to one of `patterns`.

  A tile may be PARTIAL whatever it shows, since its mask is evaluated. A block with few visible
  tiles keeps them, as they take less time in branches than all that may be visible in a pattern.

  Args:
    kinds: int32 [batches, heads, row_blocks, column_blocks, tiles].
    static: see `_static_tiles`.
    tiles_for_branch: see TILES_FOR_BRANCH.
  """
  static = static[None, None]
  visible = (kinds != block_map.EMPTY).sum(-1, keepdims=True)
  few = visible * tiles_for_branch < (static != block_map.EMPTY).sum(-1, keepdims=True)
  uncut = (kinds == static).all(-1, keepdims=True)
  return jnp.where((visible == 0) | few | uncut, kinds, _as_partial(static))


@functools.lru_cache(maxsize=256)
def _static_kinds(mask: Mask, tiling: Tiling, by_keys: bool,
                  query_blocks: tuple[int, int] | None) -> np.ndarray:
  """`_kinds` for a mask without arrays, int8."""
  kinds = np.asarray(_kinds(mask, tiling, by_keys, query_blocks)).astype(np.int8)
  kinds.setflags(write=False)  # the cached array is shared
  return kinds


def _longest(possible: np.ndarray) -> int:
  """Returns the steps of the longest list; rows of blocks without a visible one have a step."""
  return int(np.maximum(possible.sum(-1), 1).sum(-1).max())


def _compact(kinds: jax.Array | np.ndarray, room: int,
             xp: ModuleType) -> tuple[Schedule, int | jax.Array]:
  """Lists the blocks with a visible tile.

  Args:
    kinds: [num_lists, row_blocks, column_blocks, tiles].
    room: length of the lists, at least that of the longest.
    xp: numpy, or jax.numpy if `kinds` is traced.

  Returns:
    (the schedule, steps of the longest list).
  """
  columns = kinds.shape[2]
  visited = (kinds != block_map.EMPTY).any(-1)
  idle = ~visited.any(-1, keepdims=True) & (np.arange(columns) == 0)[None, None]
  row, column, count = _listed_blocks(visited | idle, room, xp)
  edge = xp.ones_like(row[:, :1], bool)
  change = row[:, 1:] != row[:, :-1]
  first = xp.concatenate([edge, change], -1)
  number = np.arange(room, dtype=np.int32)[None]
  last = xp.concatenate([change, edge], -1) | (number == count - 1)
  active = number < count
  bits = xp.take_along_axis(_bits(kinds).reshape(len(row), -1), row * columns + column, axis=-1)
  flags = xp.where(active, FIRST * first.astype(np.int32) + LAST * last.astype(np.int32), 0)
  schedule = Schedule(row.astype(np.int32), column.astype(np.int32),
                      xp.where(active, bits, 0).astype(np.uint32).view(np.int32),
                      flags.astype(np.int32))
  return schedule, room if xp is np else count.max()


def _bits(kinds: Any) -> Any:
  """Packs kinds [..., tiles] into uint32, two bits a tile, the first tile lowest."""
  shifts = 2 * np.arange(kinds.shape[-1], dtype=np.uint32)
  shifts = shifts.reshape((1,) * (kinds.ndim - 1) + (-1,))  # as strict rank promotion wants it
  return (kinds.astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)


def _listed_blocks(listed: jax.Array | np.ndarray, room: int,
                   xp: ModuleType) -> tuple[Any, Any, Any]:
  """Returns the places of the listed blocks, row by row; the last one fills the rest of the room.

  Args:
    listed: bool [num_lists, row_blocks, column_blocks].
    room: places of each list.
    xp: numpy or jax.numpy.

  Returns:
    int32 (rows [num_lists, room], columns [num_lists, room], number of blocks [num_lists, 1]).
  """
  lists, _, columns = listed.shape
  ends = listed.sum(-1, dtype=np.int32).cumsum(-1, dtype=np.int32)
  count = ends[:, -1:]
  number = xp.minimum(np.arange(room, dtype=np.int32)[None], count - 1)
  order = xp.argsort(~listed, axis=-1, stable=True).astype(np.int32)  # listed columns first
  if xp is np:
    row = np.stack([np.searchsorted(end, n, side="right") for end, n in zip(ends, number)])
  else:
    # By comparing with all rows: XLA takes long to compile other searches, and sorts of long axes.
    row = (ends[:, None] <= number[..., None]).sum(-1, dtype=np.int32)
  starts = xp.concatenate([xp.zeros_like(count), ends[:, :-1]], -1)
  within = number - xp.take_along_axis(starts, row, axis=-1)
  column = xp.take_along_axis(order.reshape(lists, -1), row * columns + within, axis=-1)
  return row, column, count
