# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of the grid steps of a TPU kernel: the blocks to visit, in order.

A list goes through ranges of column blocks, in each of them through all row blocks, and in each row
block through the visible column blocks of the range. Every row block and every range has at least
one step, which writes its result even where nothing is visible.
"""

from types import ModuleType
from typing import NamedTuple

import jax
import numpy as np

from attn_core.masks import block_map

Array = jax.Array | np.ndarray

# Bits of `Schedule.flags`. The row block of a step is that of one range of columns.
FIRST, LAST = 1, 2  # step of its row block
NEW = 4  # no earlier range has a step in the row block
BEGIN, END = 8, 16  # first and last step of its range
FLAG_BITS = 5
EARLIER, LATER = -1, 1  # rows than another one
# Lists of a traced mask are made by comparing each of their places with each block, up to this many
# pairs, of which more take longer than look-ups. At most 2^26, see `_in_order`.
MOST_COMPARED = 2**22


class Schedule(NamedTuple):
  """The work of every grid step: int32 [num_lists, num_steps] each; see `schedule.StepLists`."""

  rows: Array  # the row block
  columns: Array  # the column block
  kinds: Array  # two bits a tile: EMPTY, PARTIAL or FULL of `masks.block_map`
  flags: Array  # FIRST, LAST, NEW, BEGIN and END

  @property
  def single_step_rows(self) -> bool:
    """True if every row block has exactly one step, and all steps have the same tile kinds."""
    single = FIRST | LAST
    return (isinstance(self.kinds, np.ndarray) and bool((self.flags & single == single).all())
            and bool((self.kinds == self.kinds.flat[0]).all()) and bool(self.kinds.flat[0]))


class WordSizes(NamedTuple):
  """Numbers of blocks and tiles, by which the words of a packed schedule have their bits."""

  rows: int  # row blocks
  columns: int  # column blocks
  tiles: int  # of a block

  @property
  def column_bits(self) -> int:
    """Bits of a column block."""
    return (self.columns - 1).bit_length()

  @property
  def kind_bits(self) -> int:
    """Bits of the kinds of a block's tiles; 0 where they take a word of their own."""
    bits = 2 * self.tiles
    return bits if (self.rows - 1).bit_length() + self.column_bits + FLAG_BITS + bits < 32 else 0

  @property
  def words(self) -> int:
    """Words of a step."""
    return 1 if self.kind_bits else 2


class PackedSchedule(NamedTuple):
  """A schedule as it lies in scalar memory: int32 [num_lists * num_steps] each.

  The last axis of other shapes would be padded.
  """

  blocks: Array  # row, column, flags, and the kinds of tiles if there is room
  kinds: Array | None  # None: in `blocks`

  @classmethod
  def pack(cls, schedule: Schedule, sizes: WordSizes) -> "PackedSchedule":
    """Packs a schedule."""
    rows, columns, kinds, flags = schedule
    words = ((rows << sizes.column_bits | columns) << FLAG_BITS) | flags
    if sizes.kind_bits:
      return cls(((words << sizes.kind_bits) | kinds).reshape(-1), None)
    return cls(words.reshape(-1), kinds.reshape(-1))

  def step(self, at: Array | int, sizes: WordSizes) -> tuple[Array | int, ...]:
    """Returns (row, column, kinds, flags) of a step; the arrays may be references."""
    word, bits = self.blocks[at], sizes.column_bits
    kinds = word & (2**sizes.kind_bits - 1) if self.kinds is None else self.kinds[at]
    word = word >> sizes.kind_bits
    column = (word >> FLAG_BITS) & (2**bits - 1) if bits else 0
    return word >> (FLAG_BITS + bits), column, kinds, word & (2**FLAG_BITS - 1)


def with_idle(visited: Array, num_ranges: int, xp: ModuleType) -> Array:
  """Adds a block to row blocks and to ranges that have none.

  Args:
    visited: bool [num_lists, num_ranges * row_blocks, columns of a range].
    num_ranges: ranges of column blocks.
    xp: numpy, or jax.numpy if `visited` is traced.

  Returns:
    bool of the same shape.
  """
  _, rows, columns = visited.shape
  is_left = (np.arange(columns) == 0).reshape(1, 1, columns)
  if num_ranges == 1:
    return visited | ~visited.any(-1, keepdims=True) & is_left
  number, row_block = np.divmod(np.arange(rows), rows // num_ranges)
  in_row_block, in_range = (_in_rows(visited, group, xp) for group in (row_block, number))
  idle = ((in_row_block == 0) & (number == 0).reshape(1, rows, 1)
          | (in_range == 0) & (row_block == 0).reshape(1, rows, 1))
  return visited | idle & is_left


def compact(kinds: Array, num_ranges: int, room: int, xp: ModuleType, *,
            descending: bool) -> tuple[Schedule, int | jax.Array]:
  """Lists the blocks with a visible tile.

  Args:
    kinds: [num_lists, num_ranges * row_blocks, columns of a range, tiles].
    num_ranges: ranges of column blocks.
    room: length of the lists, at least that of the longest.
    xp: numpy, or jax.numpy if `kinds` is traced.
    descending: visits the blocks of a row from the last column to the first.

  Returns:
    (the schedule, steps of the longest list).
  """
  _, rows, columns = kinds.shape[:3]
  row_blocks = rows // num_ranges
  listed = with_idle((kinds != block_map.EMPTY).any(-1), num_ranges, xp)
  place, flags = _places(listed, num_ranges, xp, descending=descending)
  block, flags, bits = _in_order(flags, tile_bits(kinds), listed, place, room, xp)
  row, column = block // columns, block % columns
  if num_ranges > 1:
    row, column = row % row_blocks, column + row // row_blocks * columns
  schedule = Schedule(row, column, bits.view(np.int32), flags)
  return schedule, room if xp is np else xp.where(listed, place, 0).max() + 1


def _places(listed: Array, num_ranges: int, xp: ModuleType, *,
            descending: bool) -> tuple[Array, Array]:
  """Returns (places of the listed blocks in their list, their flags), row by row.

  Args:
    listed: bool [num_lists, num_ranges * row_blocks, columns].
    num_ranges, xp, descending: as in `compact`.

  Returns:
    int32 of the shape of `listed`; of other blocks arbitrary.
  """
  rows = listed.shape[1]
  row, (number, row_block) = np.arange(rows), np.divmod(np.arange(rows), rows // num_ranges)
  in_rows = lambda group, than: _in_rows(listed, group, xp, than)
  before, after = (_beside(listed, xp, later=x) for x in (descending, not descending))
  place = in_rows(np.zeros_like(row), EARLIER) + before
  is_first, is_last = before == 0, after == 0
  if num_ranges == 1:  # every row has a block
    begins, ends, is_new = (x.reshape(1, rows, 1) for x in (row == 0, row == rows - 1, row >= 0))
  else:
    begins, ends = in_rows(number, EARLIER) == 0, in_rows(number, LATER) == 0
    is_new = in_rows(row_block, EARLIER) == 0
  flags = sum(xp.where(holds, flag, 0) for holds, flag in (
      (is_first, FIRST), (is_last, LAST), (is_new, NEW), (is_first & begins, BEGIN),
      (is_last & ends, END)))
  return place, xp.broadcast_to(flags, listed.shape).astype(np.int32)


def _in_rows(listed: Array, group: np.ndarray, xp: ModuleType, than: int = 0) -> Array:
  """Counts the listed blocks of all rows of the same group, of its earlier rows, or of later ones.

  Args:
    listed: bool [num_lists, rows, columns].
    group: int [rows].
    xp: numpy or jax.numpy.
    than: EARLIER, LATER or 0.

  Returns:
    int32 [num_lists, rows, 1].
  """
  if xp is np:
    return _in_known_rows(np.asarray(listed.sum(-1, dtype=np.int32)), group, than)[..., None]
  row = np.arange(len(group))
  chosen = group[:, None] == group
  if than:
    chosen = chosen & (np.sign(row - row[:, None]) == than)
  counts = listed.astype(np.int32)
  # Few of them, as those of rows are, XLA for TPUs would move between kinds of memory.
  if chosen.size * listed.shape[2] > MOST_COMPARED:
    counts = counts.sum(-1, keepdims=True, dtype=np.int32)
  return xp.where(chosen[None, :, :, None], counts[:, None], 0).sum(
      (2, 3), dtype=np.int32)[..., None]


def _in_known_rows(counts: np.ndarray, group: np.ndarray, than: int) -> np.ndarray:
  """Implements `_in_rows` for int32 counts [num_lists, rows], without an array of pairs of rows."""
  order = np.argsort(group, kind="stable")
  place, group = np.arange(len(order)), group[order]
  first, end = (np.searchsorted(group, group, side) for side in ("left", "right"))
  first, end = {0: (first, end), EARLIER: (first, place), LATER: (place + 1, end)}[than]
  total = np.pad(counts[:, order].cumsum(-1, dtype=np.int32), ((0, 0), (1, 0)))
  found = np.empty_like(counts)
  found[:, order] = total[:, end] - total[:, first]
  return found


def _beside(listed: Array, xp: ModuleType, *, later: bool) -> Array:
  """Counts the listed blocks of earlier columns, or of later ones: int32, shape of `listed`."""
  if xp is np:
    listed = listed[..., ::-1] if later else listed
    found = listed.cumsum(-1, dtype=np.int32) - listed
    return found[..., ::-1] if later else found
  column = np.arange(listed.shape[-1])
  is_beside = column > column[:, None] if later else column < column[:, None]
  return xp.where(is_beside[None, None], listed.astype(np.int32)[:, :, None], 0).sum(
      -1, dtype=np.int32)


def _in_order(flags: Array, bits: Array, listed: Array, place: Array, room: int,
              xp: ModuleType) -> tuple[Array, Array, Array]:
  """Returns (numbers, flags, bits) of the listed blocks in their order, [num_lists, room] each.

  Args:
    flags: int32 [num_lists, rows, columns].
    bits: uint32, likewise.
    listed: bool, likewise.
    place: int32, likewise.
    room: places of each list. Those after the last block repeat its number, without flags and bits.
    xp: numpy or jax.numpy.
  """
  lists, rows, columns = listed.shape
  size, number = rows * columns, np.arange(room, dtype=np.int32)[None]
  if xp is not np and size * room <= MOST_COMPARED:
    # XLA's look-ups, sorts and running sums for TPUs take longer, also those of a few numbers.
    at, number_at = place[:, None], number[..., None, None]
    blocks = np.arange(size, dtype=np.int32).reshape(1, rows, columns)
    words = ((place * size + blocks) << FLAG_BITS) | flags
    last = xp.where(listed[:, None] & (at <= number_at), words[:, None], 0).max((2, 3))
    bits = xp.where(listed[:, None] & (at == number_at), bits[:, None], 0).sum(
        (2, 3), dtype=bits.dtype)
    found, flags = last >> FLAG_BITS, last & (2**FLAG_BITS - 1)
    return found % size, xp.where(found // size == number, flags, 0), bits
  count = listed.sum((1, 2), dtype=np.int32)[:, None]
  at = xp.minimum(number, count - 1)
  if xp is np:
    block = np.zeros((lists, room), np.int32)
    in_list, row, column = np.nonzero(listed)
    block[in_list, place[listed]] = row * columns + column
    block = np.take_along_axis(block, at, axis=-1)
  else:
    # By comparing with all rows: XLA takes long to compile other searches, and sorts of long axes.
    in_row = listed.sum(-1, dtype=np.int32)
    ends = in_row.cumsum(-1, dtype=np.int32)
    row = (ends[:, None] <= at[..., None]).sum(-1, dtype=np.int32)
    order = xp.argsort(xp.where(listed, place, np.iinfo(np.int32).max), axis=-1)
    within = at - xp.take_along_axis(ends - in_row, row, axis=-1)
    block = row * columns + xp.take_along_axis(
        order.reshape(lists, -1), row * columns + within, axis=-1).astype(np.int32)
  flags, bits = (xp.where(number < count, xp.take_along_axis(
      x.reshape(lists, -1), block, axis=-1), 0).astype(x.dtype) for x in (flags, bits))
  return block, flags, bits


def tile_bits(kinds: Array) -> Array:
  """Packs kinds [..., tiles] into uint32, two bits a tile, the first tile lowest."""
  places = np.uint32(4) ** np.arange(kinds.shape[-1], dtype=np.uint32)
  places = places.reshape((1,) * (kinds.ndim - 1) + (-1,))  # as strict rank promotion wants it
  return (kinds.astype(np.uint32) * places).sum(-1, dtype=np.uint32)
