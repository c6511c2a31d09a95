# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cotangent of a table by distance on Hopper: sums of diagonals of tiles.

  d_table[n] = sum of P * (dP - delta) * d logit / d table[n]  over pairs at the distance of n

All tiles on one block diagonal read the same tile of numbers (`score_tiles.shifted`). So a thread
block owns a block diagonal of a pair of runs of positions, and sums its tiles over all batch rows
and heads that share the table. XLA adds up the diagonals of these sums, whose memory is linear in
the lengths.

Neighboring warpgroups compute neighboring block diagonals, of different rows: each diagonal has two
sums, which are added last.
"""

from typing import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import (
    backward_sums, score_tiles, tile_inputs as tile_inputs_lib, tiling as tiling_lib)
from attn_core.kernels.gpu.flash.backward_common import Arrays
from attn_core.kernels.gpu.flash.backward_sums import Index, Step, Total
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.score_mods import tables
from attn_core.types import AttentionSpec, Operands

_ROWS, _WARPGROUPS = mosaic.WGMMA_ROWS, tiling_lib.CONSUMERS


def d_table(arrays: Arrays, operands: Operands, spec: AttentionSpec, number: int) -> jax.Array:
  """Returns the cotangent of the array `number` of the score mod, a table by distance.

  `arrays` comes without block_list and tile_inputs.
  """
  term, values = tables.find(spec.score_mod)[number], operands.mods[number]
  bases = tile_inputs_lib.bases_of(operands, spec)
  tiling = tiling_lib.make_bias_tilings(operands).table
  at = score_tiles.Distances(tiling.sizes, False, score_tiles.runs_of(spec))
  own = max(values.shape[0], bases.shape[0]), values.shape[1]
  pairs = at.runs.queries * at.runs.keys
  plan = backward_sums.make_plan(number, operands, own, pairs * at.length // _ROWS)
  out = jax.core.ShapedArray(
      (_WARPGROUPS * own[0], own[1], _ROWS, pairs * at.length), jnp.float32)
  found = backward_sums.sum_tiles(_OfDiagonal, arrays, operands, spec, plan, tiling, out)
  found = found.reshape(_WARPGROUPS, *own, _ROWS, pairs, at.length)
  # The first warpgroup's diagonals are those of the second, moved by one block.
  first = jnp.pad(found[0, ..., :-_ROWS], [(0, 0)] * 4 + [(_ROWS, 0)])
  total = (first + found[1]).reshape(*found.shape[1:4], -1)
  pull = jax.vjp(lambda x: score_tiles.shifted(term, x, bases, at), values)[1]
  return pull(total)[0]


class _OfDiagonal(backward_sums.Work):
  """The tiles of a block diagonal of a pair of runs, summed into one.

  Diagonal n of a pair has the tiles of block row i and block column n + 1 + 2 * (i - num_rows),
  since blocks of rows are twice as long as those of columns.
  """

  @property
  def runs(self) -> tuple[int, int, int]:
    """(runs of keys, blocks of rows of a run of queries, blocks of columns of one of keys)."""
    at = self.params.loader.distances
    return at.runs.keys, at.run[0] // self.tiling.block_q, at.run[1] // self.tiling.block_kv

  @property
  def place(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(run of queries, run of keys, diagonal) of this thread block."""
    keys, rows, columns = self.runs
    count = mosaic.int32(_WARPGROUPS * rows + columns)
    pair, diagonal = lax.div(self.grid.block, count), lax.rem(self.grid.block, count)
    return lax.div(pair, mosaic.int32(keys)), lax.rem(pair, mosaic.int32(keys)), diagonal

  @property
  def first_column(self) -> jax.Array:
    """The block of columns that row 0 of the run has on the diagonal, which may be negative."""
    return self.place[2] + mosaic.int32(1 - _WARPGROUPS * self.runs[1])

  def walk(self, run: Callable[[Step, Total], Total], total: Total,
           finish: Callable[[Total, Index], None]) -> jax.Array:
    """See `Work.walk`; there is one sum."""
    (_, rows, columns), first = self.runs, self.first_column
    ratio, zero = mosaic.int32(_WARPGROUPS), mosaic.int32(0)
    # Of the rows where 0 <= first + ratio * row < columns.
    up = lambda x: jnp.clip(lax.div(x + ratio - 1, ratio), 0, mosaic.int32(rows))
    begin, end = up(jnp.maximum(-first, 0)), up(jnp.maximum(mosaic.int32(columns) - first, 0))

    def of_pair(pair: jax.Array, carry: tuple) -> tuple:
      def of_row(row: jax.Array, carry: tuple) -> tuple:
        column = self.place[1] * mosaic.int32(columns) + self.first_column + row * ratio
        return self.visit(run, pair, column, True, carry)
      return lax.fori_loop(begin, end, of_row, carry)
    # Opaque: few pairs would be written out, with copies at constant coordinates.
    pairs = lax.optimization_barrier(jnp.int32(self.plan.pairs))
    number, total = lax.fori_loop(zero, pairs, of_pair, (zero, total))
    finish(total, zero)
    return number

  def row(self, column: Index) -> jax.Array:
    _, rows, columns = self.runs
    of_queries, of_keys, _ = self.place
    inside = column - of_keys * mosaic.int32(columns) - self.first_column
    return of_queries * mosaic.int32(rows) + lax.div(inside, mosaic.int32(_WARPGROUPS))

  def target(self, out: Ref, column: Index, rows: int, columns: int) -> Ref:
    grid = self.grid
    batch = self.warpgroup * mosaic.int32(self.plan.batch) + grid.batch
    return out.at[batch, grid.head, pl.ds(0, rows), pl.ds(grid.block * columns, columns)]
