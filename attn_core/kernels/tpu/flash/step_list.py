# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of the grid steps of a TPU kernel: the blocks to visit, in order.

A list goes through ranges of column blocks, in each of them through all row blocks, and in each row
block through the visible column blocks of the range. Every row block and every range has at least
one step, which writes its result even where nothing is visible.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import block_map

Array = jax.Array | np.ndarray

# Bits of `Schedule.flags`. The row block of a step is that of one range of columns.
FIRST, LAST = 1, 2  # step of its row block
NEW = 4  # no earlier range has a step in the row block
BEGIN, END = 8, 16  # first and last step of its range
FLAG_BITS = 5


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
  lists, rows, columns = visited.shape
  found = visited.any(-1).reshape(lists, num_ranges, -1)
  is_first = lambda size, *shape: (np.arange(size) == 0).reshape(shape)
  row_blocks = rows // num_ranges
  idle = ((~found.any(1, keepdims=True) & is_first(num_ranges, 1, -1, 1))
          | (~found.any(2, keepdims=True) & is_first(row_blocks, 1, 1, -1)))
  return visited | (xp.reshape(idle, (lists, rows, 1)) & is_first(columns, 1, 1, -1))


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
  lists, rows, columns = kinds.shape[:3]
  row_blocks = rows // num_ranges
  listed = with_idle((kinds != block_map.EMPTY).any(-1), num_ranges, xp)
  if descending:
    row, column, count = _listed_blocks(listed[..., ::-1], room, xp)
    column = columns - 1 - column
  else:
    row, column, count = _listed_blocks(listed, room, xp)
  active = np.arange(room, dtype=np.int32)[None] < count
  bits = xp.take_along_axis(tile_bits(kinds).reshape(lists, -1), row * columns + column, axis=-1)
  flags = _edges(row, count, FIRST, LAST, xp)
  if num_ranges == 1:
    flags = flags | NEW | _edges(xp.zeros_like(row), count, BEGIN, END, xp)
  else:
    in_row = listed.any(-1).reshape(lists, num_ranges, row_blocks)
    new = (in_row & (in_row.cumsum(1) == 1)).reshape(lists, rows)
    number = row // row_blocks
    flags = flags | xp.where(xp.take_along_axis(new, row, axis=-1), NEW, 0)
    flags = flags | _edges(number, count, BEGIN, END, xp)
    row, column = row % row_blocks, column + number * columns
  schedule = Schedule(row.astype(np.int32), column.astype(np.int32),
                      xp.where(active, bits, 0).astype(np.uint32).view(np.int32),
                      xp.where(active, flags, 0).astype(np.int32))
  return schedule, room if xp is np else count.max()


def _edges(x: Any, count: Any, first: int, last: int, xp: ModuleType) -> Any:
  """Returns int32 bits `first` and `last` at the ends of runs of equal numbers.

  Args:
    x: int32 [num_lists, room].
    count: int32 [num_lists, 1]: the last run ends there.
    first, last: the bits.
    xp: numpy or jax.numpy.
  """
  edge = xp.ones_like(x[:, :1], bool)
  change = x[:, 1:] != x[:, :-1]
  is_end = np.arange(x.shape[1], dtype=np.int32)[None] == count - 1
  is_first = xp.concatenate([edge, change], -1)
  is_last = xp.concatenate([change, edge], -1) | is_end
  return first * is_first.astype(np.int32) + last * is_last.astype(np.int32)


def tile_bits(kinds: Array) -> Array:
  """Packs kinds [..., tiles] into uint32, two bits a tile, the first tile lowest."""
  shifts = 2 * np.arange(kinds.shape[-1], dtype=np.uint32)
  shifts = shifts.reshape((1,) * (kinds.ndim - 1) + (-1,))  # as strict rank promotion wants it
  return (kinds.astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)


def _listed_blocks(listed: Array, room: int,
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
