# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers by distance in the TPU kernels: tiles [keys, queries] with constant diagonals.

Such an array is a row of one number for each distance. A tile of LANES x LANES reads 2 * LANES of
them: each of its rows is that of the row before, moved by one lane. All tiles on one block diagonal
are equal, so that a step makes one of each and loads it wherever it occurs. The cotangents of
these tiles are added up likewise, and their diagonals are summed once a step.
"""

from typing import Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.tpu.flash.schedule import LANES, Tiling
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, Index, KernelRefs, Ref, TileIndex, TileInputs)

SUBLANES = 8


def length(tiling: Tiling) -> int:
  """Returns the length of a row: one number for each distance of padded queries and keys."""
  return tiling.padded_queries + tiling.padded_keys


def distances(tiling: Tiling) -> np.ndarray:
  """Returns int32 [length]: key index minus query index of the numbers of a row."""
  return tiling.padded_keys - np.arange(length(tiling), dtype=np.int32)


def row_of(values: jax.Array, first: int, base: jax.Array, tiling: Tiling) -> jax.Array:
  """Returns numbers by distance, the greatest one first: float32 [B or 1, H or 1, length].

  Args:
    values: [B or 1, H or 1, n], of distances from `first` on; others are clipped to the ends.
    first: the first distance.
    base: int32 [B or 1]: position of the first key minus that of the first query.
    tiling: blocks and tiles.
  """
  size, count = length(tiling), values.shape[2]
  # Slices instead of look-ups, so that the derivative adds no numbers one by one.
  padded = jnp.pad(values[:, :, ::-1].astype(jnp.float32), ((0, 0), (0, 0), (size, size)),
                   mode="edge")
  start = jnp.clip(size + count - 1 - tiling.padded_keys + first - base, 0, size + count)
  cut = lambda x, start: lax.dynamic_slice_in_dim(x, start, size, 1)
  if base.shape[0] == 1:
    return lax.dynamic_slice_in_dim(padded, start[0], size, 2)
  return jax.vmap(cut, (0 if values.shape[0] > 1 else None, 0))(
      padded if values.shape[0] > 1 else padded[0], start)


def tiles_shape(tiling: Tiling, heads: int) -> tuple[int, ...]:
  """Returns the shape of the tiles of a step: [heads, block diagonals, LANES, LANES]."""
  return heads, (tiling.block_q + tiling.block_kv) // LANES - 1, LANES, LANES


class Diagonals(NamedTuple):
  """An array of numbers by distance, and the tiles of a step made of it."""

  row: Callable[[KernelRefs], Ref]  # [1, heads, 1, length] of a step, heads are 1 if they share it
  tiling: Tiling
  num_heads: int  # of a step, or 1
  scratch: int  # place of the tiles in `KernelRefs.scratch`

  def make(self, refs: KernelRefs, grid: GridIndex) -> None:
    """Makes the tiles of a step."""
    row, tiles = self.row(refs), refs.scratch[self.scratch]
    is_left = _is_left()
    @pl.loop(0, self.num_heads)
    def _(head: jax.Array) -> None:
      before = None
      for n in range(tiles.shape[1] + 1):
        numbers = row[0, head, :, _lanes(self.tiling, grid, n)]
        # Row r moves r lanes to the right; what leaves on the right enters the next tile.
        moved = pltpu.roll(jnp.broadcast_to(numbers, (LANES, LANES)), 0, 1, stride=1,
                           stride_axis=0)
        if before is not None:
          tiles[head, n - 1] = jnp.where(is_left, before, moved)
        before = moved

  def read(self, refs: KernelRefs, tile: TileIndex) -> jax.Array:
    """Returns [keys, queries]."""
    tiles, begin = refs.scratch[self.scratch], _diagonal(self.tiling, tile)
    head = tile.head if self.num_heads > 1 else 0
    rows = [jnp.concatenate([tiles[head, begin + c - r] for c in range(tile.shape[1] // LANES)], 1)
            for r in range(tile.shape[0] // LANES)]
    return jnp.concatenate(rows, 0)


def add_diagonals(inputs: TileInputs, row: jax.Array, scratch: int) -> Diagonals:
  """Adds the result of `row_of` to the inputs of a kernel; scratch: see `Diagonals`."""
  rows, heads, size = row.shape
  num_heads = inputs.tiling.query_heads if heads > 1 else 1
  ref = inputs.add_array(row[:, :, None], (1, num_heads, 1, size), lambda b, h, i, j: (
      b if rows > 1 else 0, h if heads > 1 else 0, 0, 0))
  return Diagonals(ref, inputs.tiling, num_heads, scratch)


def add_tile(tiling: Tiling, tiles: Ref, tile: TileIndex, x: jax.Array) -> None:
  """Adds x [keys, queries] to the sums [heads, block diagonals, LANES, LANES] of a step."""
  begin = _diagonal(tiling, tile)
  parts: dict[int, jax.Array] = {}
  for r in range(tile.shape[0] // LANES):
    for c in range(tile.shape[1] // LANES):
      part = x[r * LANES:(r + 1) * LANES, c * LANES:(c + 1) * LANES]
      parts[c - r] = parts[c - r] + part if c - r in parts else part
  for n, part in parts.items():
    tiles[tile.head, begin + n] += part


def sum_diagonals(tiling: Tiling, tiles: Ref, grid: GridIndex, total: Ref) -> None:
  """Adds the diagonals of the sums of a step to those of all steps, and clears the former.

  Args:
    tiling: blocks and tiles.
    tiles: see `add_tile`.
    grid: position of the step.
    total: [1, heads, 1, length], in the order of `row_of`.
  """
  is_left, last = _is_left(), tiles.shape[1]
  zeros = jnp.zeros((LANES, LANES), jnp.float32)
  @pl.loop(0, tiling.query_heads)
  def _(head: jax.Array) -> None:
    before = zeros
    for n in range(last + 1):
      here = tiles[head, n] if n < last else zeros
      x, before = jnp.where(is_left, here, before), here
      # Row r is to be moved r lanes to the left: by halves, from the largest power of two on.
      half = LANES
      while half > SUBLANES:
        half //= 2
        x = x[:half] + pltpu.roll(x[half:], LANES - half, 1)
      while half > 1:
        half //= 2
        x = x + pltpu.roll(pltpu.roll(x, SUBLANES - half, 0), LANES - half, 1)
      total[0, head, :, _lanes(tiling, grid, n)] += x[:1]
    tiles[head] = jnp.zeros(tiles.shape[1:], jnp.float32)


def _is_left() -> jax.Array:
  """Returns whether a place of a tile is on the left of its diagonal."""
  row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
  return lane < row


def _lanes(tiling: Tiling, grid: GridIndex, n: Index) -> pl.Slice:
  """Returns the first LANES numbers that the tiles on block diagonal n of a step read."""
  start = (grid.query_block * tiling.block_q - grid.key_block * tiling.block_kv
           + (tiling.padded_keys - tiling.block_kv) + n * LANES)
  return pl.ds(pl.multiple_of(start, LANES), LANES)


def _diagonal(tiling: Tiling, tile: TileIndex) -> Index:
  """Returns the block diagonal of the first LANES x LANES of a tile."""
  keys = tile.keys.start
  keys = keys // LANES if isinstance(keys, int) else lax.div(keys, jnp.int32(LANES))
  return tile.queries.start // LANES - keys + tiling.block_kv // LANES - 1
