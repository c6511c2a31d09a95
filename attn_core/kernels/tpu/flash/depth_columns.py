# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""ALiBi's slopes as a part of the product of keys and queries, where the matrix unit has room.

  slope * (key - query) = slope * (k + shift - q),  k, q: places of tokens in their blocks

A matrix unit may multiply 256 numbers of each key and query in the time of 128. What heads leave
free takes columns whose products sum up to the term. They are numbers of 8 bits, which bfloat16
holds exactly, and powers of two times these; products are added in float32:

  lanes     0..3     4..7     8..23             24..27     28..31
  key       k % 128  k - ..   4 parts of shift  -slope     -slope
  query     slope    slope    slope             q % 128    q - ..

Of the four lanes of a number three meet the parts of a slope, and one meets 0. Columns of queries
are made once for all steps of their heads, those of keys when a tile reads them.

The cotangent of a slope, the sum of dS * (key - query), takes three more rows of K^T in the product
K^T dS of the backward: the numbers of the keys in two parts, and ones. It is then as exact as the
cotangents of queries and keys, for which dS is rounded to 16 bits as well.
"""

from typing import Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.tpu.flash import tile_inputs
from attn_core.kernels.tpu.flash.schedule import LANES, Tiling, round_up
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, Index, KernelRefs, Ref, TileIndex, TileInputs, TokenRange, whole_lanes)

WIDTH = LANES  # of the columns
BITS = 8  # of the numbers of bfloat16
ROWS = 16  # of bfloat16 in a register
SHIFT_PARTS = 4
MOST_TOKENS = LANES << BITS  # of a block
SCALES = (2.0**-60, 2.0**60)  # for which slopes before the scale are in the range of float32
# Numbers of groups of 4 lanes.
_KEY_LOW, _KEY_HIGH, _SHIFT, _QUERY_LOW, _QUERY_HIGH = 0, 1, 2, 6, 7


def are_free(width: int, depth: int) -> bool:
  """Returns whether a matrix unit multiplies heads of a width and the columns in the same time.

  Args:
    width: of heads, D.
    depth: numbers of a row that the matrix unit multiplies at once.
  """
  return width % LANES == 0 and round_up(width + WIDTH, depth) == round_up(width, depth)


class SlopeColumns(NamedTuple):
  """Columns of the slopes of a score mod, one number for each head."""

  slopes: tile_inputs.Reader
  scale: float  # of the products
  base: Callable[[KernelRefs, GridIndex], Index]  # position of the first key minus first query
  tiling: Tiling
  scratch_start: int  # of `KernelRefs.scratch`

  @property
  def scratch(self) -> list[jax.ShapeDtypeStruct]:
    """The scratch memory: columns of queries, rows that keys share, places along both sides."""
    heads, tiling = self.tiling.query_heads, self.tiling
    of = jax.ShapeDtypeStruct
    return [of((heads * tiling.block_q, WIDTH), jnp.bfloat16), of((heads * 8, WIDTH), jnp.float32),
            of((LANES, WIDTH), jnp.bfloat16)]

  def prepare(self, refs: KernelRefs, grid: GridIndex) -> None:
    """Makes what all steps of a batch row and of its heads read, in the first of them."""
    @pl.when(refs.program_ids[-1] == 0)
    def _() -> None:
      queries, rows, places = self._scratch(refs)
      places[...] = _places(_KEY_LOW)
      of_queries = _places(_QUERY_LOW)
      for head in range(self.tiling.query_heads):
        tile = TileIndex(grid, head, TokenRange(0, LANES), TokenRange(0, LANES))
        slope = _parts(self.slopes(refs, tile) * (1 / self.scale))
        rows[pl.ds(head * 8, 8), :] = jnp.broadcast_to(
            jnp.where(_group() >= _QUERY_LOW, -slope, 0.0), (8, WIDTH))
        row = jnp.where(_group() < _QUERY_LOW, slope, 0.0)
        for start in range(0, self.tiling.block_q, LANES):
          queries[pl.ds(head * self.tiling.block_q + start, LANES), :] = of_queries + _tall(
              jnp.where(_group() == _QUERY_HIGH, float(start), row))

  def _scratch(self, refs: KernelRefs) -> tuple[Ref, ...]:
    return refs.scratch[self.scratch_start:self.scratch_start + len(self.scratch)]

  def of_queries(self, refs: KernelRefs, head: Index, tokens: TokenRange) -> jax.Array:
    """Returns bfloat16 [queries, WIDTH]."""
    start = whole_lanes(head * self.tiling.block_q + tokens.start)
    return self._scratch(refs)[0][pl.ds(start, tokens.length), :]

  def of_keys(self, refs: KernelRefs, tile: TileIndex) -> jax.Array:
    """Returns bfloat16 [keys, WIDTH]."""
    _, rows, places = self._scratch(refs)
    grid, tiling, group = tile.grid, self.tiling, _group()
    shift = (self.base(refs, grid) + grid.key_block * tiling.block_kv
             - grid.query_block * tiling.block_q)
    row, half = rows[pl.ds(tile.head * 8, 1), :], 1 << (BITS - 1)
    for n in range(SHIFT_PARTS):
      # From -128 to 127, so that a small number has small parts.
      last = n == SHIFT_PARTS - 1
      part = shift if last else ((shift + half) & (2 * half - 1)) - half
      row = jnp.where(group == _SHIFT + n, part.astype(jnp.float32) * 2.0**(BITS * n), row)
      shift = (shift - part) >> BITS
    found = []
    for start in range(0, tile.keys.length, LANES):
      first = _number(tile.keys.start + start)
      found.append(places[...] + _tall(jnp.where(group == _KEY_HIGH, first, row)))
    return jnp.concatenate(found, 0)


def rows_of_keys(keys: int) -> jax.Array:
  """Returns bfloat16 [ROWS, keys], of which two rows sum up to the number of a key, and one is 1.

  Their product with cotangents of scores gives that of the slopes; see `ModReader.d_slopes`.
  """
  row, key = (lax.broadcasted_iota(jnp.int32, (ROWS, keys), axis) for axis in (0, 1))
  low = key & ((1 << BITS) - 1)
  found = jnp.where(row == 0, low, jnp.where(row == 1, key - low, jnp.where(row == 2, 1, 0)))
  return found.astype(jnp.float32).astype(jnp.bfloat16)


def _number(x: Index) -> jax.Array | float:
  return float(x) if isinstance(x, int) else x.astype(jnp.float32)


def _group() -> jax.Array:
  """Returns the number of the group of each lane, int32 [1, WIDTH]."""
  return lax.broadcasted_iota(jnp.int32, (1, WIDTH), 1) >> 2


def _places(group: int) -> jax.Array:
  """Returns bfloat16 [LANES, WIDTH]: numbers of the rows in a group of lanes."""
  row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, WIDTH), axis) for axis in (0, 1))
  return jnp.where(lane >> 2 == group, row, 0).astype(jnp.float32).astype(jnp.bfloat16)


def _tall(row: jax.Array) -> jax.Array:
  """Returns bfloat16 [LANES, WIDTH] of one row."""
  return jnp.concatenate(
      [jnp.broadcast_to(row, (ROWS, WIDTH)).astype(jnp.bfloat16)] * (LANES // ROWS), 0)


def _parts(x: jax.Array) -> jax.Array:
  """Returns float32 [1, WIDTH]: three numbers of 8 bits and a 0, repeated, which sum up to x."""
  part, rest = lax.broadcasted_iota(jnp.int32, (1, WIDTH), 1) & 3, jnp.broadcast_to(x, (1, WIDTH))
  found = jnp.zeros((1, WIDTH), jnp.float32)
  for n in range(3):
    # Not by conversions, which compilers may leave out.
    bits = lax.bitcast_convert_type(rest, jnp.int32) & jnp.int32(-2**16)
    kept = lax.bitcast_convert_type(bits, jnp.float32)
    found, rest = jnp.where(part == n, kept, found), rest - kept
  return found


def slope_columns(inputs: TileInputs, slopes: jax.Array, scale: float, base: jax.Array | int,
                  scratch_start: int) -> SlopeColumns:
  """Adds slopes to the inputs of a kernel.

  Args:
    inputs: of the kernel.
    slopes: [B or 1, H or 1].
    scale: of the products of queries and keys.
    base: position of the first key minus that of the first query: int32 [B or 1], or one number.
    scratch_start: see `SlopeColumns`.
  """
  read = inputs.add_per_head(slopes)
  if isinstance(base, int):  # nothing that XLA would copy to scalar memory
    return SlopeColumns(read, scale, lambda refs, grid: base, inputs.tiling, scratch_start)
  is_row, bases = base.shape[0] > 1, inputs.add_scalars(base)
  return SlopeColumns(read, scale, lambda refs, grid: bases(refs)[grid.batch if is_row else 0],
                      inputs.tiling, scratch_start)
