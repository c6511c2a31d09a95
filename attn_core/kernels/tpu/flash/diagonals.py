# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers by distance in the TPU kernels: tiles [keys, queries] with constant diagonals.

Such an array is a row of one number for each distance. A tile of LANES x LANES reads 2 * LANES of
them: each of its rows is that of the row before, moved by one lane. All tiles on one block diagonal
are equal: one of each is made, for all steps of a head or for one, and loaded wherever it occurs.
The cotangents of these tiles are added up likewise, before their diagonals are summed.

Beyond the ends of a table all numbers are equal, and one block diagonal stands for all others on
its side. Where the code of a block knows that a tile lies there, it adds one number to all pairs.
"""

import functools
import math
from typing import Callable, Iterator, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.tpu.flash.schedule import LANES, Tiling
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, Index, KernelRefs, Ref, TileIndex, TileInputs)
from attn_core.masks import block_map, mask as mask_lib, position_range
from attn_core.score_mods import tables
from attn_core.types import cdiv

SUBLANES = 8
CHUNK = 8  # tiles that are made without a loop, so that one hides the latency of another
TILE_BYTES = 4 * LANES * LANES
MOST_BYTES = 8 * 2**20  # of the tiles of all block diagonals; otherwise every step makes its own


def length(tiling: Tiling) -> int:
  """Returns the length of a row: one number for each distance of padded queries and keys."""
  return tiling.padded_queries + tiling.padded_keys


def distances(tiling: Tiling) -> np.ndarray:
  """Returns int32 [length]: key index minus query index of the numbers of a row."""
  return tiling.padded_keys - np.arange(length(tiling), dtype=np.int32)


def rows_of(values: jax.Array, first: int, base: jax.Array, stride: int,
            tiling: Tiling) -> jax.Array:
  """Returns numbers by distance, the greatest one first: float32 [B or 1, H or 1, pairs, length].

  Args:
    values: [B or 1, H or 1, n], of distances from `first` on; others are clipped to the ends.
    first: the first distance.
    base: int32 [B or 1, pairs]: position of the first key minus that of the first query, of each
      pair of runs of positions.
    stride: the distance of neighbors in a run.
    tiling: blocks and tiles.
  """
  greatest = tiling.padded_keys
  return tables.along(values, first, base, range(
      stride * greatest, stride * (greatest - length(tiling)), -stride))


def ends(first: int, count: int, base: int, tiling: Tiling) -> tuple[int, int]:
  """Returns the block diagonals from which on all numbers are the last one, and the first one.

  They have `count` numbers, from distance `first` on; base: of the first key and the first query.
  """
  # Diagonal n has the distances base + padded_keys - p, of 2 * LANES numbers p from n * LANES on.
  last = (tiling.padded_keys + base - (first + count - 1) - (2 * LANES - 1)) // LANES
  return last, cdiv(tiling.padded_keys + base - first, LANES)


class Band(NamedTuple):
  """The block diagonals of which tiles are in scratch memory."""

  tiling: Tiling
  first: int | None  # of all, counted from the last key and the first query; None: those of a step
  size: int
  # Whether the first and the last diagonal stand for all those before and after them, in which
  # numbers are the same as in all of theirs; see `ends`.
  stands_for: tuple[bool, bool] = (False, False)

  @property
  def pairs(self) -> int:
    """The number of pairs of runs of positions, each of which has tiles of its own."""
    return math.prod(self.tiling.runs)

  def shape(self, heads: int) -> tuple[int, ...]:
    """Returns the shape of the tiles: [heads * pairs, size, LANES, LANES]."""
    return heads * self.pairs, self.size, LANES, LANES

  @property
  def has_whole_squares(self) -> bool:
    """Whether the queries and keys of LANES x LANES are in one pair of runs."""
    lengths = self.tiling.query_length, self.tiling.key_length
    return all(runs == 1 or length // runs % LANES == 0
               for length, runs in zip(lengths, self.tiling.runs))

  def pair(self, tile: TileIndex, query: Index, key: Index) -> Index:
    """Returns the pair of runs of a query and a key, which count from the first of a tile."""
    tiling = self.tiling
    def run(index: Index, length: int, runs: int) -> Index:
      return sum((jnp.asarray(index >= n * (length // runs)).astype(jnp.int32)
                  for n in range(1, runs)), start=0)
    in_keys = run(tile.grid.key_block * tiling.block_kv + tile.keys.start + key,
                  tiling.key_length, tiling.runs[1])
    return in_keys + tiling.runs[1] * run(
        tile.grid.query_block * tiling.block_q + tile.queries.start + query,
        tiling.query_length, tiling.runs[0])

  def pair_of_each(self, tile: TileIndex) -> jax.Array:
    """Returns `pair` of the elements of a tile, [keys, queries]."""
    key, query = (lax.broadcasted_iota(jnp.int32, tile.shape, axis) for axis in (0, 1))
    return jnp.broadcast_to(self.pair(tile, query, key), tile.shape)

  def lanes(self, grid: GridIndex, n: Index) -> slice | pl.Slice:
    """Returns the first LANES of the 2 * LANES numbers that the tiles on diagonal n read."""
    start = (n + self.first) * LANES if self.first is not None else (
        grid.query_block * self.tiling.block_q - grid.key_block * self.tiling.block_kv
        + (self.tiling.padded_keys - self.tiling.block_kv) + n * LANES)
    return pl.ds(pl.multiple_of(start, LANES), LANES)

  def places(self, tile: TileIndex) -> Callable[[int], Index]:
    """Returns a function to the place of the diagonal of LANES x LANES of a tile.

    It takes the column minus the row of these in the tile. The place is an int where it is known.
    """
    tiling = self.tiling
    queries, keys = (
        x // LANES if isinstance(x, int) else lax.div(x, jnp.int32(LANES))
        for x in (tile.queries.start, tile.keys.start))
    in_block = queries - keys + tiling.block_kv // LANES - 1
    if self.first is None:
      return lambda shift: in_block + shift
    in_block += (tiling.padded_keys - tiling.block_kv) // LANES - self.first
    begin = (in_block + tile.grid.query_block * (tiling.block_q // LANES)
             - tile.grid.key_block * (tiling.block_kv // LANES))
    def place(shift: int) -> Index:
      if tile.apart is not None:
        low, high = (self._standing_for(in_block + x // LANES + shift) for x in tile.apart)
        if low == high:
          return low
      return self._standing_for(begin + shift)
    return place

  def _standing_for(self, place: Index) -> Index:
    """Returns the place of the diagonal that stands for one; see `stands_for`."""
    first, last = self.stands_for
    least, most = (min, max) if isinstance(place, int) else (jnp.minimum, jnp.maximum)
    place = most(place, 0) if first else place
    return least(place, self.size - 1) if last else place

  def is_constant(self, place: Index) -> bool:
    """Whether it is known that all numbers of a diagonal are equal."""
    first, last = self.stands_for
    return isinstance(place, int) and (first and place == 0 or last and place == self.size - 1)

  def at(self, first_step: bool, refs: KernelRefs, kinds: jax.Array) -> jax.Array:
    """Returns whether a step makes the tiles (first_step) or sums them up (not first_step)."""
    if self.first is None:
      return kinds != 0
    return refs.program_ids[-1] == (0 if first_step else refs.num_steps - 1)


def step_count(tiling: Tiling) -> int:
  """Returns the number of block diagonals of a step."""
  return (tiling.block_q + tiling.block_kv) // LANES - 1


def band_of(mask: mask_lib.Mask, tiling: Tiling, arrays: int,
            of_tables: tuple[int, int] | None) -> Band:
  """Returns the tiles to keep: all that the mask may show, or those of a step if these are many.

  Args:
    mask: any mask; its arrays do not count.
    tiling: blocks and tiles.
    arrays: how many arrays by distance there are.
    of_tables: `ends` of all of them together; None: they are not known.
  """
  first, count, stands_for = different(mask, tiling, of_tables)
  if keeps_all(count, tiling, arrays):
    return Band(tiling, first, count, stands_for)
  return Band(tiling, None, step_count(tiling))


def different(mask: mask_lib.Mask, tiling: Tiling,
              of_tables: tuple[int, int] | None) -> tuple[int, int, tuple[bool, bool]]:
  """Returns (first, count) of the diagonals that a mask may show and that differ, and `stands_for`.

  Args:
    mask, tiling, of_tables: as in `band_of`.
  """
  first, count = visible(mask, tiling)
  last, stands_for = first + count - 1, (False, False)
  if of_tables is not None:
    least, most = of_tables
    stands_for = first <= least, last >= most
    first, last = (min(max(x, least), most) for x in (first, last))
  return first, last - first + 1, stands_for


def keeps_all(count: int, tiling: Tiling, arrays: int) -> bool:
  """Whether scratch memory has the tiles of `count` diagonals, rather than those of a step."""
  return count * tiling.query_heads * math.prod(tiling.runs) * arrays * TILE_BYTES <= MOST_BYTES


def visible(mask: mask_lib.Mask, tiling: Tiling) -> tuple[int, int]:
  """Returns (first, count) of the block diagonals that a mask may show, for any of its arrays."""
  return _visible_diagonals(position_range.static_superset(mask), tiling)


@functools.lru_cache(maxsize=256)
def _visible_diagonals(mask: mask_lib.Mask, tiling: Tiling) -> tuple[int, int]:
  """Returns (first, count) of the block diagonals of tiles with visible pairs of a static mask."""
  sizes = block_map.Sizes(tiling.query_length, tiling.key_length, tiling.tile_q, tiling.tile_kv)
  shown = (np.asarray(block_map.block_kinds(mask, sizes)) != block_map.EMPTY).any((0, 1))
  # A strip of tiles is computed where one of them is visible.
  width = tiling.strip_tiles
  strips = np.pad(shown, ((0, -len(shown) % width), (0, 0))).reshape(-1, width, shown.shape[1])
  query, key = np.nonzero(np.repeat(strips.any(1), width, 0))
  if not len(query):
    return 0, 1
  rows, columns = tiling.tile_kv // LANES, tiling.tile_q // LANES
  number = query * columns - key * rows + tiling.padded_keys // LANES - 1
  first, last = int(np.min(number)) - (rows - 1), int(np.max(number)) + (columns - 1)
  return first, last - first + 1


class Diagonals(NamedTuple):
  """An array of numbers by distance, and the tiles made of it."""

  # [1, heads * pairs, 1, length] of a step, heads are 1 if they share it
  row: Callable[[KernelRefs], Ref]
  band: Band
  num_heads: int  # of a step, or 1
  scratch: int  # place of the tiles in `KernelRefs.scratch`

  def make(self, refs: KernelRefs, grid: GridIndex) -> None:
    """Makes the tiles."""
    row, tiles = self.row(refs), refs.scratch[self.scratch]
    is_left = _is_left()
    @pl.loop(0, self.num_heads * self.band.pairs)
    def _(line: jax.Array) -> None:
      def moved(n: Index) -> jax.Array:
        # Row r moves r lanes to the right; what leaves on the right enters the next tile.
        numbers = jnp.broadcast_to(row[0, line, :, self.band.lanes(grid, n)], (LANES, LANES))
        return pltpu.roll(numbers, 0, 1, stride=1, stride_axis=0)
      def some(start: Index, count: int) -> None:
        before = moved(start)
        for n in range(count):
          after = moved(start + n + 1)
          tiles[line, start + n] = jnp.where(is_left, before, after)
          before = after
      _in_chunks(self.band.size, some)

  def read(self, refs: KernelRefs, tile: TileIndex) -> jax.Array:
    """Returns [keys, queries]."""
    tiles, band, place = refs.scratch[self.scratch], self.band, self.band.places(tile)
    first = (tile.head if self.num_heads > 1 else 0) * band.pairs
    def square(line: Index, at: Index) -> jax.Array:
      if band.is_constant(at):  # one register, which is named again
        return jnp.concatenate([tiles[line, at, :SUBLANES]] * (LANES // SUBLANES), 0)
      return tiles[line, at]
    def squares(line: Callable[[int, int], Index]) -> jax.Array:
      return jnp.concatenate([jnp.concatenate([
          square(line(r, c), place(c - r)) for c in range(tile.shape[1] // LANES)], 1)
                              for r in range(tile.shape[0] // LANES)], 0)
    def of_pair(number: int) -> jax.Array:
      return squares(lambda r, c: first + number)
    if band.pairs == 1:
      return of_pair(0)
    if band.has_whole_squares:
      return squares(lambda r, c: first + band.pair(tile, c * LANES, r * LANES))
    pair, found = band.pair_of_each(tile), of_pair(0)
    for n in range(1, band.pairs):
      found = jnp.where(pair == n, of_pair(n), found)
    return found


def add_diagonals(inputs: TileInputs, row: jax.Array, band: Band, scratch: int) -> Diagonals:
  """Adds the result of `rows_of` to the inputs of a kernel; scratch: see `Diagonals`."""
  rows, heads, pairs, size = row.shape
  num_heads = inputs.tiling.query_heads if heads > 1 else 1
  ref = inputs.add_array(
      row.reshape(rows, heads * pairs, 1, size), (1, num_heads * pairs, 1, size),
      lambda b, h, i, j: (b if rows > 1 else 0, h if heads > 1 else 0, 0, 0))
  return Diagonals(ref, band, num_heads, scratch)


def add_tile(band: Band, tiles: Ref, tile: TileIndex, x: jax.Array) -> None:
  """Adds x [keys, queries] to the sums [heads * pairs, size, LANES, LANES] of block diagonals."""
  first, place = tile.head * band.pairs, band.places(tile)
  def add(x: jax.Array, n: int) -> None:
    parts: dict[tuple[bool, Index], jax.Array] = {}  # by places that are known, or by shifts
    for r, c, part in _squares(x):
      at = place(c - r)
      key = (True, at) if isinstance(at, int) else (False, c - r)
      parts[key] = parts[key] + part if key in parts else part
    for (is_known, number), part in parts.items():
      at, rows = number if is_known else place(number), LANES
      if band.is_constant(at):  # what counts is the sum of all
        part, rows = functools.reduce(jnp.add, jnp.split(part, LANES // SUBLANES)), SUBLANES
      tiles[first + n, at, :rows] += part
  if band.pairs == 1:
    add(x, 0)
  elif band.has_whole_squares:
    for r, c, part in _squares(x):
      tiles[first + band.pair(tile, c * LANES, r * LANES), place(c - r)] += part
  else:
    pair = band.pair_of_each(tile)
    for n in range(band.pairs):
      add(jnp.where(pair == n, x, 0), n)


def _squares(x: jax.Array) -> Iterator[tuple[int, int, jax.Array]]:
  """Yields (row, column, part) of the parts LANES x LANES of an array."""
  for r in range(x.shape[0] // LANES):
    for c in range(x.shape[1] // LANES):
      yield r, c, x[r * LANES:(r + 1) * LANES, c * LANES:(c + 1) * LANES]


def sum_diagonals(band: Band, tiles: Ref, grid: GridIndex, total: Ref) -> None:
  """Adds the diagonals of sums to those of all steps, and clears the former.

  Args:
    band: the block diagonals.
    tiles: see `add_tile`.
    grid: position of the step.
    total: [1, heads * pairs, 1, length], in the order of `rows_of`.
  """
  is_left, zeros = _is_left(), jnp.zeros((LANES, LANES), jnp.float32)

  @pl.loop(0, band.tiling.query_heads * band.pairs)
  def _(line: jax.Array) -> None:
    def add(n: Index, here: jax.Array, before: jax.Array) -> None:
      total[0, line, :, band.lanes(grid, n)] += _sum_rows(jnp.where(is_left, here, before))
    def some(start: Index, count: int) -> None:
      before = jnp.where(start > 0, tiles[line, jnp.maximum(start - 1, 0)], zeros)
      for n in range(count):
        here = tiles[line, start + n]
        add(start + n, here, before)
        before = here
    _in_chunks(band.size, some)
    add(band.size, zeros, tiles[line, band.size - 1])
    if band.first is None:
      tiles[line] = jnp.zeros(tiles.shape[1:], jnp.float32)


def _sum_rows(x: jax.Array) -> jax.Array:
  """Returns [1, LANES]: the sum of rows, row r moved r lanes to the left."""
  half = LANES
  while half > SUBLANES:  # by halves, from the largest power of two on
    half //= 2
    x = x[:half] + pltpu.roll(x[half:], LANES - half, 1)
  while half > 1:
    half //= 2
    x = x + pltpu.roll(pltpu.roll(x, SUBLANES - half, 0), LANES - half, 1)
  return x[:1]


def _in_chunks(count: int, function: Callable[[Index, int], None]) -> None:
  """Calls function(start, number) for ranges of at most CHUNK of `count` tiles."""
  whole = count // CHUNK
  if whole:
    pl.loop(0, whole)(lambda chunk: function(chunk * CHUNK, CHUNK))
  if count % CHUNK:
    function(jnp.int32(whole * CHUNK), count % CHUNK)


def _is_left() -> jax.Array:
  """Returns whether a place of a tile is on the left of its diagonal."""
  row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
  return lane < row
