# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The grid of a TPU kernel: the blocks with visible entries, listed in scalar memory.

One grid step computes one block of queries against one block of keys. Blocks are divided into
tiles; the schedule says of each tile of a block whether it is hidden, fully visible or partly
visible, so that the cost of a block on the diagonal is that of its visible tiles. Every row of
blocks has at least one step, which writes its result even where nothing is visible.
"""

from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import block_map
from attn_core.masks.mask import Mask
from attn_core.types import cdiv

LANES = 128
FIRST, LAST = 1, 2  # bits of `flags`
MOST_PATTERNS = 6
MOST_BYTES = 3 * 2**18  # of the 1 MiB of scalar memory


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

  def patterns(self, tiling: Tiling) -> tuple[tuple[int, ...], bool]:
    """Returns the values of `kinds` that get specialized code, and whether these are all values.

    These are the most frequent values, and first the one with all tiles FULL if it occurs. Where
    the arrays of a mask are traced, only the latter.
    """
    all_full = sum(block_map.FULL << (2 * n) for n in range(tiling.tiles_q * tiling.tiles_kv))
    if not isinstance(self.kinds, np.ndarray):
      return (all_full,), False
    found, counts = np.unique(self.kinds.view(np.uint32), return_counts=True)
    frequent = [int(found[n]) for n in np.argsort(-counts, kind="stable") if found[n]]
    patterns = tuple(dict.fromkeys([all_full, *frequent] if all_full in frequent else frequent))
    return patterns[:MOST_PATTERNS], len(patterns) <= MOST_PATTERNS

  @property
  def single_step_rows(self) -> bool:
    """True if every row block has exactly one step, and all steps have the same tile kinds."""
    return (isinstance(self.kinds, np.ndarray) and bool((self.flags == FIRST | LAST).all())
            and bool((self.kinds == self.kinds.flat[0]).all()) and bool(self.kinds.flat[0]))


class StepLists(NamedTuple):
  """Sizes of the leading axes of a mask's tiles, by which a schedule has one or more lists."""

  batches: int  # B, or 1: all batch rows share their lists
  heads: int  # groups of heads, or 1: all heads share their lists

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
  kinds = block_map.block_kinds(
      mask, block_map.Sizes(tiling.query_length, tiling.key_length, tiling.tile_q, tiling.tile_kv))
  kinds = block_map.merge_heads(kinds, tiling.query_heads)
  lists = StepLists(*kinds.shape[:2])
  xp = np if isinstance(kinds, np.ndarray) else jnp
  tiles = (tiling.padded_queries // tiling.tile_q, tiling.padded_keys // tiling.tile_kv)
  padding = [(0, 0), (0, 0)] + [(0, n - m) for n, m in zip(tiles, kinds.shape[2:])]
  kinds = xp.pad(kinds, padding, constant_values=block_map.EMPTY).astype(np.int32)
  kinds = kinds.reshape(-1, tiles[0] // tiling.tiles_q, tiling.tiles_q,
                        tiles[1] // tiling.tiles_kv, tiling.tiles_kv)
  kinds = kinds if query_blocks is None else kinds[:, slice(*query_blocks)]
  # [num_lists, row_blocks, column_blocks, tiles]; tile (kv, q) of a block is kv * tiles_q + q.
  kinds = kinds.transpose((0, 3, 1, 4, 2) if by_keys else (0, 1, 3, 4, 2))
  kinds = kinds.reshape(*kinds.shape[:3], -1)
  return _compact(kinds, xp), lists


def check(mask: Mask, tiling: Tiling, *, by_keys: bool,
          query_blocks: tuple[int, int] | None = None) -> None:
  """Checks that a schedule fits in scalar memory; computes only its shape.

  Args:
    mask, tiling, by_keys, query_blocks: as in `build`.

  Raises:
    ValueError: the schedule needs more than MOST_BYTES.
  """
  steps = jax.eval_shape(
      lambda mask: build(mask, tiling, by_keys=by_keys, query_blocks=query_blocks)[0], mask)
  size = sum(x.size * 4 for x in steps)
  if size > MOST_BYTES:
    num_lists, num_steps = steps.rows.shape
    raise ValueError(
        f"block_sizes: blocks of {tiling.block_q} queries and {tiling.block_kv} keys make a "
        f"schedule of {num_steps} steps for each of {num_lists} rows of the mask, "
        f"{size / 2**10:.0f} KiB of scalar memory; expected at most {MOST_BYTES // 2**10}: give "
        "larger block_q and block_kv")


def _compact(kinds: jax.Array | np.ndarray, xp: ModuleType) -> Schedule:
  """Lists the blocks with a visible tile.

  Args:
    kinds: [num_lists, row_blocks, column_blocks, tiles].
    xp: numpy, or jax.numpy if `kinds` is traced.
  """
  _, rows, columns, tiles = kinds.shape
  visited = (kinds != block_map.EMPTY).any(-1)
  idle = ~visited.any(-1, keepdims=True) & (np.arange(columns) == 0)
  listed = (visited | idle).reshape(-1, rows * columns)
  count = listed.sum(-1, keepdims=True)
  order = xp.argsort(~listed, axis=-1, stable=True)
  longest = int(count.max()) if xp is np else rows * columns
  number = np.arange(longest)
  order = xp.take_along_axis(order, xp.minimum(number, count - 1), axis=-1)
  row, column = order // columns, order % columns
  edge = xp.ones_like(row[:, :1], bool)
  change = row[:, 1:] != row[:, :-1]
  first = xp.concatenate([edge, change], -1)
  last = xp.concatenate([change, edge], -1) | (number == count - 1)
  active = number < count
  bits = (kinds.astype(np.uint32) << (2 * np.arange(tiles, dtype=np.uint32))).sum(
      -1, dtype=np.uint32).reshape(-1, rows * columns)
  bits = xp.take_along_axis(bits, order, axis=-1)
  flags = (FIRST * first + LAST * last) * active
  return Schedule(row.astype(np.int32), column.astype(np.int32),
                  xp.where(active, bits, 0).astype(np.uint32).view(np.int32),
                  flags.astype(np.int32))
