# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cotangent of a bias on Hopper, or of an array of the score mod: summed as it is broadcast.

  d_array = sum of P * (dP - delta) * d logit / d array

For a bias the last factor is the score mod's slope, without that of the soft cap.

For an array with a number per pair, a thread block owns a block of queries of one batch row and
head of the array, and sums each tile over the batch rows and heads that share it before it is
written once. For one with a number per key, it owns a block of keys and sums over all queries.
Arrays of the score mod with a number per query, per head or one at all have the sums over all keys
of each query, which XLA adds up further; so has a bias with one number for all keys, if the score
mod does more than add. In all cases a producer warpgroup copies and two consumer warpgroups compute
half of the owned block each; every sum has one owner and a fixed order, and takes no memory besides
the gradient.

  scores = X Z^T;  dP = Y W^T,  X, Y: rows of Q and d_out;  Z, W: rows of K and V, or vice versa

Another bias with one number for all keys needs no tiles. It shifts all logits of a row equally,
which changes only the lse and the weight of the sinks:

  d_bias[t] = sum over s of dS = d_lse + P_sink * delta

Rows are queries and columns are keys, or vice versa where keys are owned; in shapes, rows is the
number of rows of a warpgroup and columns that of a tile.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common.backward import finite_lse
from attn_core.kernels.gpu import mosaic, wgmma
from attn_core.kernels.gpu.flash import score_tiles, tiling as tiling_lib
from attn_core.kernels.gpu.flash.backward_common import Arrays, BackwardParams
from attn_core.kernels.gpu.flash.kernel_params import (
    GridIndex, drain, grid_index_of, kinds_of, local_mask, make_kernel_params)
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import block_map, tile as tile_lib
from attn_core.types import AttentionSpec, Operands


class Inputs(NamedTuple):
  """References in global memory."""

  arrays: Arrays
  kinds: Any  # int32 [B or 1, H or 1, num_row_blocks, num_column_blocks]; see `masks.block_map`


class Scratch(NamedTuple):
  """Shared memory and barriers, one barrier per stage."""

  rows: tuple[Ref, Ref]  # [2, rows, D] and [2, rows, E]
  columns: tuple[Ref, Ref]  # [num_stages, columns, D] and [num_stages, columns, E]
  result: Ref  # [2, rows, columns], or float32 [2, rows] where rows are summed
  rows_full: Ref
  rows_free: Ref
  columns_full: Ref
  columns_free: Ref


class Shared(NamedTuple):
  """Axes of the bias that are sums, those of length 1."""

  batch: int  # of the bias, 1 or B
  heads: int  # of the bias, 1 or H
  summed_batch: int  # B / batch
  summed_heads: int  # H / heads
  whole_rows: bool  # whether all columns of a row are summed, too

  @property
  def pairs(self) -> int:
    """Batch rows and heads that are summed."""
    return self.summed_batch * self.summed_heads

  def of(self, batch: jax.Array, head: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the batch row and head of the n-th of them."""
    number = mosaic.int32(self.summed_heads)
    return (lax.div(n, number) if self.summed_batch > 1 else batch,
            lax.rem(n, number) if self.summed_heads > 1 else head)


class Summed(NamedTuple):
  """The array whose cotangent is wanted."""

  number: int  # of an array of the score mod; `score_tiles.SCORES`: the bias
  shape: tuple[int, ...]
  dtype: DTypeLike

  @property
  def four(self) -> tuple[int, ...]:
    """The shape with an axis each for batch rows, heads, queries and keys."""
    return (*self.shape, *[1] * (4 - len(self.shape)))


def d_array(arrays: Arrays, operands: Operands, spec: AttentionSpec,
            summed: Summed) -> jax.Array:
  """Returns the cotangent of a bias, or of an array of the score mod, in its shape and dtype.

  `arrays` comes without block_list and tile_inputs.
  """
  (batch, queries, heads, _), own = operands.query.shape, summed.four
  by_keys = own[2] == 1 < own[3]
  whole_rows = by_keys or own[3] == 1
  if summed.number != score_tiles.SCORES and whole_rows:  # what shares a number is summed by XLA
    own = batch, heads, *own[2:]
  tilings = tiling_lib.make_bias_tilings(operands)
  tiling = tilings.key if by_keys else tilings.query
  base, _, tile_inputs = make_kernel_params(operands, spec, tiling, by_keys=by_keys)
  kinds, _ = kinds_of(local_mask(operands, spec), tiling.sizes)
  kinds = jnp.asarray(kinds.swapaxes(-1, -2) if by_keys else kinds, jnp.int32)
  shared = Shared(own[0], own[1], batch // own[0], heads // own[1], whole_rows)
  # Whole blocks: copies of one dimension are clipped at the end of the array, not of a row, and
  # those of two need an array of whole tiles.
  rows = tiling.sizes.num_query_blocks * tiling.block_q
  columns = tiling.sizes.num_key_blocks * tiling.block_kv
  dtype = summed.dtype if jnp.dtype(summed.dtype).itemsize <= 4 else jnp.float32
  out = (jax.core.ShapedArray((*own[:2], columns if by_keys else rows), jnp.float32) if whole_rows
         else jax.core.ShapedArray((*own[:2], rows, columns), dtype))
  found, = mosaic.call(
      functools.partial(_kernel, BackwardParams(*base), shared, summed.number), (out,),
      Inputs(arrays._replace(tile_inputs=tile_inputs), kinds),
      _scratch(tiling, shared, arrays.key.dtype, out.dtype),
      grid=own[0] * own[1] * _number_of_rows(tiling), warpgroups=tiling_lib.CONSUMERS + 1,
      name="attn_core_backward_bias" if summed.number == score_tiles.SCORES
      else "attn_core_backward_mod")
  if not whole_rows:
    return found[..., :queries, :tiling.keys].astype(summed.dtype)
  found = found[..., :tiling.keys] if by_keys else found[..., :queries]
  found = found[..., None, :] if by_keys else found[..., None]
  axes = [n for n, (size, wanted) in enumerate(zip(found.shape, summed.four)) if size != wanted]
  found = found.sum(axes) if axes else found
  return found.reshape(summed.shape).astype(summed.dtype)


def d_bias_of_rows(operands: Operands, lse: jax.Array, d_lse: jax.Array,
                   delta: jax.Array) -> jax.Array:
  """Returns the cotangent of a bias with one number for all keys.

  lse, d_lse and delta are [B, H, T].
  """
  total = d_lse
  if operands.sinks is not None:
    sink = operands.sinks[..., None]
    weights = jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - finite_lse(lse)))
    total = total + weights * delta
  total = jnp.where(lse == -jnp.inf, 0, total)[..., None]
  shape = operands.bias.shape
  summed = [axis for axis in range(4) if shape[axis] == 1]
  return total.sum(summed, keepdims=True).astype(operands.bias.dtype)


def _number_of_rows(tiling: tiling_lib.BackwardTiling) -> int:
  return tiling.sizes.num_key_blocks if tiling.by_keys else tiling.sizes.num_query_blocks


def _number_of_columns(tiling: tiling_lib.BackwardTiling) -> int:
  return tiling.sizes.num_query_blocks if tiling.by_keys else tiling.sizes.num_key_blocks


def _scratch(tiling: tiling_lib.BackwardTiling, shared: Shared, dtype: DTypeLike,
             result_dtype: DTypeLike) -> Scratch:
  number, rows, stages = tiling_lib.CONSUMERS, mosaic.WGMMA_ROWS, tiling.num_stages[0]
  columns = tiling.block_q if tiling.by_keys else tiling.block_kv
  widths = tiling.width, tiling.value_width
  result = (plgpu.SMEM((number, rows), jnp.float32) if shared.whole_rows else
            mosaic.operand_smem((number, rows, columns), result_dtype))
  return Scratch(
      tuple(mosaic.operand_smem((number, rows, width), dtype) for width in widths),
      tuple(mosaic.operand_smem((stages, columns, width), dtype) for width in widths), result,
      plgpu.Barrier(num_arrivals=2 * number), plgpu.Barrier(num_arrivals=number),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_arrivals=number, num_barriers=stages))


def _kernel(params: BackwardParams, shared: Shared, number: int, inputs: Inputs,
            outputs: tuple[Ref, ...], scratch: Scratch) -> None:
  warpgroup = lax.axis_index("warpgroup")
  work = _Work(params, shared, number, inputs, scratch)

  # Values computed before the warpgroups diverge must fit into the registers of the producer.
  @pl.when(warpgroup == tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["copy"], action="decrease")
    work.copy()

  @pl.when(warpgroup < tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["compute"], action="increase")
    work.compute(*outputs)


class _Step(NamedTuple):
  """One tile of one batch row and head; int32."""

  number: jax.Array  # of steps before
  batch: jax.Array
  head: jax.Array
  column: jax.Array  # block of columns
  masked: jax.Array | bool  # whether something of it is hidden
  fresh: jax.Array | bool  # whether the rows are those of another batch row or head than before


class _Work(NamedTuple):
  """Work of a thread block, of both kinds of warpgroups."""

  params: BackwardParams
  shared: Shared
  number: int  # see `Summed`
  inputs: Inputs
  scratch: Scratch

  @property
  def tiling(self) -> tiling_lib.BackwardTiling:
    return self.params.tiling

  @property
  def warpgroup(self) -> jax.Array:
    """The number of this warpgroup; recomputed, since keeping it takes registers of the tiles."""
    return lax.optimization_barrier(lax.axis_index("warpgroup"))

  @property
  def grid(self) -> GridIndex:
    """See `kernel_params.grid_index_of`; batch row and head are those of the bias."""
    block = lax.optimization_barrier(lax.axis_index("block"))
    return grid_index_of(block, self.shared.heads, _number_of_rows(self.tiling))

  def walk(self, run: Callable[..., Any], total: Any = (),
           finish: Callable[..., None] = lambda total, column: None) -> jax.Array:
    """Runs total = run(step, total) for every tile that is not hidden.

    Args:
      run: the work of a step.
      total: the initial value of every sum.
      finish: finish(total, column), at the end of every sum: all pairs of a column, or everything.

    Returns:
      The number of tiles.
    """
    pairs, columns = (mosaic.int32(n) for n in (self.shared.pairs, _number_of_columns(self.tiling)))
    zero = mosaic.int32(0)
    if self.shared.whole_rows:
      def of_pair(pair: jax.Array, carry: tuple) -> tuple:
        begun, _ = carry
        return lax.fori_loop(
            zero, columns, lambda c, x: self._visit(run, pair, c, x[0] == begun, x), carry)
      number, total = lax.fori_loop(zero, pairs, of_pair, (zero, total))
      finish(total, zero)
      return number

    def of_column(column: jax.Array, number: jax.Array) -> jax.Array:
      def of_pair(pair: jax.Array, carry: tuple) -> tuple:
        fresh = carry[0] == 0 if self.shared.pairs == 1 else True
        return self._visit(run, pair, column, fresh, carry)
      number, found = lax.fori_loop(zero, pairs, of_pair, (number, total))
      finish(found, column)
      return number
    return lax.fori_loop(zero, columns, of_column, zero)

  def _visit(self, run: Callable[..., Any], pair: jax.Array, column: jax.Array,
             fresh: jax.Array | bool, carry: tuple) -> tuple:
    """Returns (number, total) after one tile, visited or not."""
    grid, kinds = self.grid, self.inputs.kinds
    batch, head = self.shared.of(grid.batch, grid.head, pair)
    kind = kinds[batch if kinds.shape[0] > 1 else 0, head if kinds.shape[1] > 1 else 0,
                 grid.block, column]
    masked = kind == block_map.PARTIAL if self.params.any_full else True
    def visit(carry: tuple) -> tuple:
      number, total = carry
      return number + 1, run(_Step(number, batch, head, column, masked, fresh), total)
    # A loop of one step or none: branches cannot hold what products need.
    return lax.fori_loop(
        mosaic.int32(0), jnp.where(kind == block_map.EMPTY, 0, 1).astype(jnp.int32),
        lambda _, carry: visit(carry), carry)

  def slot(self, step: _Step) -> jax.Array:
    return lax.rem(step.number, mosaic.int32(self.tiling.num_stages[0]))

  def sources(self) -> tuple:
    """Returns the arrays of the rows and those of the columns, each D and E wide."""
    arrays = self.inputs.arrays
    both = (arrays.query, arrays.d_out), (arrays.key, arrays.value)
    return both[::-1] if self.tiling.by_keys else both

  def heads_of(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the heads of the arrays of rows and of columns."""
    key_head = lax.div(head, mosaic.int32(self.params.group))
    return (key_head, head) if self.tiling.by_keys else (head, key_head)

  def own_rows(self, warpgroup: Any) -> Any:
    first = (self.grid.block * (tiling_lib.CONSUMERS * mosaic.WGMMA_ROWS)
             + warpgroup * mosaic.WGMMA_ROWS)
    return pl.ds(first, mosaic.WGMMA_ROWS)

  def copy(self) -> None:
    """Fills the pipelines."""
    scratch, stages = self.scratch, self.tiling.num_stages[0]
    row_arrays, column_arrays = self.sources()
    length = scratch.columns[0].shape[1]

    def fill(step: _Step, _: tuple) -> tuple:
      row_head, column_head = self.heads_of(step.head)
      def rows() -> None:
        pl.when(step.number > 0)(lambda: plgpu.barrier_wait(scratch.rows_free))
        for array, smem in zip(row_arrays, scratch.rows):
          for n in range(tiling_lib.CONSUMERS):
            plgpu.copy_gmem_to_smem(
                array.at[step.batch, self.own_rows(n), row_head], smem.at[n], scratch.rows_full)
      if step.fresh is True:
        rows()
      else:
        pl.when(step.fresh)(rows)
      slot = self.slot(step)
      pl.when(step.number >= stages)(lambda: plgpu.barrier_wait(scratch.columns_free.at[slot]))
      tokens = pl.ds(step.column * length, length)
      for array, smem in zip(column_arrays, scratch.columns):
        plgpu.copy_gmem_to_smem(array.at[step.batch, tokens, column_head], smem.at[slot],
                                scratch.columns_full.at[slot])
      return ()

    drain(scratch.columns_free, stages, self.walk(fill))

  def compute(self, out: Ref) -> None:
    """Sums all tiles and copies the sums."""
    shape = mosaic.WGMMA_ROWS, self.scratch.columns[0].shape[1]
    self.walk(self.add, mosaic.full(0, shape, mosaic.TILE_LAYOUT),
              functools.partial(self.write, out))
    plgpu.wait_smem_to_gmem(0)

  def add(self, step: _Step, total: jax.Array) -> jax.Array:
    """Returns the sum of `total` and the dS of a tile."""
    scratch, params, slot = self.scratch, self.params, self.slot(step)
    def change() -> None:
      pl.when(step.number > 0)(lambda: plgpu.barrier_arrive(scratch.rows_free))
      plgpu.barrier_wait(scratch.rows_full)
    if step.fresh is True:
      change()
    else:
      pl.when(step.fresh)(change)
    plgpu.barrier_wait(scratch.columns_full.at[slot])
    factors = lambda n: (scratch.rows[n].at[self.warpgroup], scratch.columns[n].at[slot].T)
    tile = lambda: self.tile(step)
    tile_inputs = self.inputs.arrays.tile_inputs
    scores, _ = wgmma.matmul_overlapped(*factors(0))
    logits, slopes = params.logits_of(tile_inputs, tile, scores, step.masked, self.number)
    lse, delta = self.numbers(step, total.shape)
    # The bias comes after the soft cap: its slope is left out.
    d_weights, (_, weights) = params.matmul_overlapped(
        *factors(1), lambda: params.weigh(tile_inputs, tile, (logits, slopes.added), lse))
    total = total + params.d_scores(weights, d_weights, delta)
    plgpu.barrier_arrive(scratch.columns_free.at[slot])
    return total

  def tile(self, step: _Step) -> tile_lib.Tile:
    rows, length = self.own_rows(self.warpgroup), self.scratch.columns[0].shape[1]
    own, others = (rows.start, rows.size), (step.column * length, length)
    query, key = (others, own) if self.tiling.by_keys else (own, others)
    return tile_lib.Tile(step.batch, step.head, query[0], key[0], 1, query[1], key[1])

  def numbers(self, step: _Step, shape: tuple[int, ...]) -> list[jax.Array]:
    """Returns lse and delta of the queries, of a tile's shape."""
    tile = self.tile(step)
    axis, layout = (1, mosaic.COLUMN_LAYOUT) if self.tiling.by_keys else (0, mosaic.ROW_LAYOUT)
    of = self.inputs.arrays.numbers
    queries = pl.ds(tile.query, tile.num_queries)
    return [lax.broadcast_in_dim(
        mosaic.load(of.at[n, step.batch, step.head, queries], layout), shape, [axis])
            for n in range(2)]

  def write(self, out: Ref, total: jax.Array, column: jax.Array) -> None:
    """Copies a sum to global memory."""
    grid, rows = self.grid, self.own_rows(self.warpgroup)
    result = self.scratch.result.at[self.warpgroup]
    target = out.at[grid.batch, grid.head, rows]
    if self.shared.whole_rows:
      total = total.sum(axis=1)
    else:
      plgpu.wait_smem_to_gmem(0)
      target = out.at[grid.batch, grid.head, rows, pl.ds(column * total.shape[1], total.shape[1])]
    result[...] = total.astype(result.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, target)
