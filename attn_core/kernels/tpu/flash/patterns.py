# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the kinds of tiles of a TPU kernel's blocks that get specialized code.

The tiles of a block are computed at once, without branches, where their kinds are one of a few
patterns. Blocks of other kinds are computed strip by strip.
"""

import itertools
from typing import NamedTuple

import jax
import numpy as np

from attn_core.kernels.tpu.flash import schedule, step_list
from attn_core.kernels.tpu.flash.schedule import Tiling
from attn_core.kernels.tpu.flash.step_list import Schedule
from attn_core.masks import block_map, selected, tile as tile_lib
from attn_core.masks.mask import Mask

MOST_PATTERNS = 6
# What of the mask must be evaluated in a tile: nothing where it is fully visible, some parts
# (`masks.tile.parts`: 1 and twice their bits), or everything.
UNMASKED, MASKED = 0, -1


class Patterns(NamedTuple):
  """The values of `Schedule.kinds` that get specialized code, and what others need."""

  kinds: tuple[int, ...]  # as uint32; the one with all tiles FULL comes first if it occurs
  known: bool  # whether the kinds do not depend on arrays that are traced
  complete: bool  # whether these are all values
  # For each of `kinds`, and each tile, a bit for each of `masks.tile.parts` that may hide a pair of
  # it in a block of these kinds. (): all of them may.
  parts: tuple[tuple[int, ...], ...]
  apart: tuple[tuple[int, int], ...]  # for each of `kinds`, see `TileIndex.apart`
  by_arrays: int  # what must be evaluated in CUT tiles, see UNMASKED
  others: tuple[int, ...]  # what must be evaluated in strips of other values
  strip_tiles: int  # neighboring tiles along the queries that such a strip has

  def apart_of(self, pattern: int) -> tuple[int, int] | None:
    """Returns `TileIndex.apart` of the blocks of a pattern."""
    return dict(zip(self.kinds, self.apart)).get(pattern)

  def evaluated(self, pattern: int, tile: int) -> int:
    """Returns what must be evaluated in a visible tile of a pattern, see UNMASKED."""
    kind = pattern >> 2 * tile & 3
    if kind == block_map.FULL:
      return UNMASKED
    if kind == schedule.CUT:
      return self.by_arrays
    parts = dict(zip(self.kinds, self.parts)).get(pattern)
    return MASKED if parts is None else 1 | parts[tile] << 1

  @property
  def uncut(self) -> "Patterns":
    """The same without patterns that have CUT tiles."""
    keeps = [not kinds & kinds >> 1 & 0x55555555 for kinds in self.kinds]
    of = lambda x: tuple(itertools.compress(x, keeps))
    return self._replace(kinds=of(self.kinds), parts=of(self.parts), apart=of(self.apart))


def choose(steps: Schedule, mask: Mask, tiling: Tiling, *, by_keys: bool) -> Patterns:
  """Chooses the kinds of tiles that get specialized code: the most frequent ones.

  Where the arrays of the mask are traced, these are the kinds of blocks that the arrays do not cut,
  and in the forward those to which `schedule.build` rounds others.

  Args:
    steps: result of `schedule.build` for the other arguments.
    mask, tiling, by_keys: as in `schedule.build`.
  """
  number = tiling.tiles_q * tiling.tiles_kv
  all_full = sum(block_map.FULL << (2 * n) for n in range(number))
  static, (lists, rest) = schedule.static_tiles(mask, tiling, by_keys), selected.split(mask)
  if known := isinstance(steps.kinds, np.ndarray):
    frequent = _by_frequency(steps.kinds.view(np.uint32))
  else:
    of = lambda tiles: _by_frequency(np.asarray(step_list.tile_bits(tiles)))
    cut = [] if by_keys else of(schedule.all_cut(static[schedule.is_partly_hidden(static)]))
    pairs = itertools.zip_longest(of(static), cut)
    frequent = [bits for pair in pairs for bits in pair if bits is not None]
  first = [all_full] if all_full in frequent else []
  chosen = tuple(dict.fromkeys([*first, *frequent]))
  is_complete, chosen = known and len(chosen) <= MOST_PATTERNS, chosen[:MOST_PATTERNS]
  several = jax.tree.leaves(mask) or len(tile_lib.parts(mask)) > 1
  parts = tuple(_parts_of_tiles(bits, mask, tiling, by_keys) for bits in chosen) if several else ()
  apart = tuple(_apart(bits, steps if known else None, static, tiling, by_keys) for bits in chosen)
  by_arrays = 1 | sum(2 << n for n, part in enumerate(tile_lib.parts(rest))
                      if jax.tree.leaves(part))
  # A list of blocks hides tiles that the mask may show.
  strip_tiles = 1 if lists else tiling.strip_tiles
  occurs = {UNMASKED: strip_tiles < number or not chosen, by_arrays: not known,
            MASKED: known or strip_tiles > 1 or bool((static == block_map.PARTIAL).any())}
  others = tuple(x for x, found in occurs.items() if found)
  if by_keys and not known:
    # The products of a backward take longer than a mask does, which costs nothing then.
    others = (MASKED,)
  return Patterns(chosen, known, is_complete, parts, apart, by_arrays, others, strip_tiles)


def _parts_of_tiles(pattern: int, mask: Mask, tiling: Tiling, by_keys: bool) -> tuple[int, ...]:
  """Returns the numbers of `Patterns.parts` for a pattern, see `Schedule.kinds`."""
  tiles = schedule.static_tiles(mask, tiling, by_keys)
  fits = _may_have(pattern, tiles, is_known=not jax.tree.leaves(mask))
  found = np.zeros(tiles.shape[-1], np.int64)
  for number, part in enumerate(tile_lib.parts(selected.split(mask)[1])):
    hides: bool | np.ndarray = True
    if not jax.tree.leaves(part):
      hides = (schedule.static_tiles(part, tiling, by_keys)[fits] != block_map.FULL).any(0)
    found |= np.where(hides, 1 << number, 0)
  return tuple(found.tolist())


def _may_have(pattern: int, tiles: np.ndarray, *, is_known: bool) -> np.ndarray:
  """Returns which blocks may have a pattern, bool [rows, columns].

  Args:
    pattern: kinds of tiles, see `Schedule.kinds`.
    tiles: see `schedule.static_tiles`.
    is_known: whether the mask has no arrays, which can only hide more.
  """
  kinds = np.array([pattern >> 2 * n & 3 for n in range(tiles.shape[-1])])
  if is_known:
    return (tiles == kinds).all(-1)
  visible = kinds != block_map.EMPTY
  return (tiles[..., visible] != block_map.EMPTY).all(-1)


def _apart(pattern: int, steps: Schedule | None, tiles: np.ndarray, tiling: Tiling,
           by_keys: bool) -> tuple[int, int]:
  """Returns `TileIndex.apart` of the blocks of a pattern.

  Args:
    pattern: kinds of tiles, see `Schedule.kinds`.
    steps: the schedule; None: it is not known.
    tiles: see `schedule.static_tiles`.
    tiling, by_keys: as in `schedule.build`.
  """
  if steps is not None:
    found = np.nonzero(np.asarray(steps.kinds).view(np.uint32) == pattern)
    row, column = np.asarray(steps.rows)[found], np.asarray(steps.columns)[found]
    query, key = (column, row) if by_keys else (row, column)
  else:
    row, column = np.nonzero(_may_have(pattern, tiles, is_known=False))
    if by_keys:
      query = row // tiling.key_blocks * tiling.blocks_of_range + column
      key = row % tiling.key_blocks
    else:
      blocks = np.arange(len(tiles)).reshape(1, 1, -1)
      in_order = np.asarray(schedule.in_halves(blocks)) if tiling.halves > 1 else blocks
      query, key = in_order[0, 0, row], column
  apart = query.astype(np.int64) * tiling.block_q - key.astype(np.int64) * tiling.block_kv
  return int(np.min(apart)), int(np.max(apart))


def _by_frequency(bits: np.ndarray) -> list[int]:
  """Returns the different numbers other than 0, the most frequent one first."""
  found, counts = np.unique(bits, return_counts=True)
  return [int(found[n]) for n in np.argsort(-counts, kind="stable") if found[n]]
