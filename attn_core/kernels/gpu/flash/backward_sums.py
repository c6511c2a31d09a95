# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of tiles of dS on Hopper, the cotangents of a bias and of arrays of the score mod.

  scores = X Z^T;  dP = Y W^T,  X, Y: rows of Q and d_out;  Z, W: rows of K and V, or vice versa

A producer warpgroup copies and two consumer warpgroups compute half of the rows of a tile each;
every sum has one owner and a fixed order. Which tiles a thread block adds up is left to a subclass
of `Work`.

Rows are queries and columns are keys, or vice versa where keys are owned; in shapes, rows is the
number of rows of a warpgroup and columns that of a tile.
"""

import functools
from typing import Any, Callable, NamedTuple, TypeVar

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.gpu import mosaic, wgmma
from attn_core.kernels.gpu.flash import score_tiles, tiling as tiling_lib
from attn_core.kernels.gpu.flash.backward_common import Arrays, BackwardParams
from attn_core.kernels.gpu.flash.kernel_params import (
    GridIndex, drain, grid_index_of, kinds_of, local_mask, make_kernel_params)
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import block_map, tile as tile_lib
from attn_core.types import AttentionSpec, Operands


Index = jax.Array | np.int32
Total = TypeVar("Total")  # a sum in registers, or () of the warpgroup that copies


class Inputs(NamedTuple):
  """References in global memory."""

  arrays: Arrays  # without block_list and tile_inputs
  tile_inputs: TileInputs
  kinds: Ref  # int32 [B or 1, H or 1, num_row_blocks, num_column_blocks]; see `masks.block_map`


class Scratch(NamedTuple):
  """Shared memory and barriers, one barrier per stage."""

  rows: tuple[Ref, Ref]  # [2, rows, D] and [2, rows, E]; joined, [num_stages * 2, rows, ...]
  columns: tuple[Ref, Ref]  # [num_stages, columns, D] and [num_stages, columns, E]
  result: Ref  # [2, rows, columns], or float32 [2, rows] where rows are summed
  rows_full: Ref  # None where rows are joined to columns, and so is `rows_free`
  rows_free: Ref
  columns_full: Ref
  columns_free: Ref


class Plan(NamedTuple):
  """The sums and the thread blocks that compute them; hashable."""

  number: int  # of an array of the score mod; `score_tiles.BIAS`: the bias
  batch: int  # of the sums, 1 or B
  heads: int  # of the sums, 1 or H
  summed_batch: int  # B / batch
  summed_heads: int  # H / heads
  blocks: int  # thread blocks of a head of the sums
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


def make_plan(number: int, operands: Operands, own: tuple[int, ...], blocks: int,
              whole_rows: bool = False) -> Plan:
  """Returns the plan of sums for `own` batch rows and heads; other arguments as of `Plan`."""
  batch, _, heads, _ = operands.query.shape
  return Plan(number, own[0], own[1], batch // own[0], heads // own[1], blocks, whole_rows)


def number_of_rows(tiling: tiling_lib.BackwardTiling) -> int:
  return tiling.sizes.num_key_blocks if tiling.by_keys else tiling.sizes.num_query_blocks


def number_of_columns(tiling: tiling_lib.BackwardTiling) -> int:
  return tiling.sizes.num_query_blocks if tiling.by_keys else tiling.sizes.num_key_blocks


class Step(NamedTuple):
  """One tile of one batch row and head; int32."""

  number: jax.Array  # of steps before
  batch: jax.Array
  head: jax.Array
  column: jax.Array  # block of columns
  masked: jax.Array | bool  # whether something of it is hidden
  fresh: jax.Array | bool  # whether the rows are others than those of the step before


class Work(NamedTuple):
  """Work of a thread block, of both kinds of warpgroups."""

  params: BackwardParams
  plan: Plan
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
    """See `kernel_params.grid_index_of`; batch row and head are those of the sums."""
    block = lax.optimization_barrier(lax.axis_index("block"))
    return grid_index_of(block, self.plan.heads, self.plan.blocks)

  def walk(self, run: Callable[[Step, Total], Total], total: Total,
           finish: Callable[[Total, Index], None]) -> jax.Array:
    """Runs total = run(step, total) for every tile that is not hidden.

    Args:
      run: the work of a step.
      total: the initial value of every sum.
      finish: finish(total, column), at the end of every sum; see `write`.

    Returns:
      The number of tiles.
    """
    raise NotImplementedError

  def row(self, column: Index) -> jax.Array:
    """Returns the block of rows of the tile in a block of columns."""
    raise NotImplementedError

  def target(self, out: Ref, column: Index, rows: int, columns: int) -> Ref:
    """Returns the part of the result that a warpgroup's sum of a block of columns goes to."""
    raise NotImplementedError

  def visit(self, run: Callable[[Step, Total], Total], pair: jax.Array, column: jax.Array,
            fresh: jax.Array | bool, carry: tuple[jax.Array, Total]) -> tuple[jax.Array, Total]:
    """Returns (number, total) after one tile, visited or not; see `walk`."""
    grid, kinds = self.grid, self.inputs.kinds
    batch, head = self.plan.of(grid.batch, grid.head, pair)
    kind = kinds[batch if kinds.shape[0] > 1 else 0, head if kinds.shape[1] > 1 else 0,
                 self.row(column), column]
    masked = kind == block_map.PARTIAL if self.params.any_full else True
    def visit(carry: tuple[jax.Array, Total]) -> tuple[jax.Array, Total]:
      number, total = carry
      return number + 1, run(Step(number, batch, head, column, masked, fresh), total)
    # A loop of one step or none: branches cannot hold what products need.
    return lax.fori_loop(
        mosaic.int32(0), jnp.where(kind == block_map.EMPTY, 0, 1).astype(jnp.int32),
        lambda _, carry: visit(carry), carry)

  def slot(self, step: Step) -> jax.Array:
    return lax.rem(step.number, mosaic.int32(self.tiling.num_stages[0]))

  def row_slot(self, step: Step, warpgroup: jax.Array | int) -> jax.Array | int:
    """Returns where the rows of a warpgroup are."""
    return (self.slot(step) * mosaic.int32(tiling_lib.CONSUMERS) + warpgroup
            if self.tiling.joined else warpgroup)

  def sources(self) -> tuple:
    """Returns the arrays of the rows and those of the columns, each D and E wide."""
    arrays = self.inputs.arrays
    both = (arrays.query, arrays.d_out), (arrays.key, arrays.value)
    return both[::-1] if self.tiling.by_keys else both

  def heads_of(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the heads of the arrays of rows and of columns."""
    key_head = lax.div(head, mosaic.int32(self.params.group))
    return (key_head, head) if self.tiling.by_keys else (head, key_head)

  def own_rows(self, column: Index, warpgroup: jax.Array | int) -> slice | pl.Slice:
    first = (self.row(column) * (tiling_lib.CONSUMERS * mosaic.WGMMA_ROWS)
             + warpgroup * mosaic.WGMMA_ROWS)
    return pl.ds(first, mosaic.WGMMA_ROWS)

  def copy(self) -> None:
    """Fills the pipelines."""
    scratch, stages = self.scratch, self.tiling.num_stages[0]
    row_arrays, column_arrays = self.sources()
    length = scratch.columns[0].shape[1]

    def copy_rows(step: Step, head: jax.Array, barrier: Ref) -> None:
      for array, smem in zip(row_arrays, scratch.rows):
        for n in range(tiling_lib.CONSUMERS):
          plgpu.copy_gmem_to_smem(array.at[step.batch, self.own_rows(step.column, n), head],
                                  smem.at[self.row_slot(step, n)], barrier)

    def fill(step: Step, _: tuple) -> tuple:
      row_head, column_head = self.heads_of(step.head)
      # Opaque: of a first step apart from the loop, CUDA's assembler 13.0 to 13.3 lost coordinates.
      filled = lax.optimization_barrier(step.number)
      def rows() -> None:
        pl.when(filled > 0)(lambda: plgpu.barrier_wait(scratch.rows_free))
        copy_rows(step, row_head, scratch.rows_full)
      if self.tiling.joined:
        pass  # below
      elif step.fresh is True:
        rows()
      else:
        pl.when(step.fresh)(rows)
      slot = self.slot(step)
      pl.when(filled >= stages)(lambda: plgpu.barrier_wait(scratch.columns_free.at[slot]))
      if self.tiling.joined:
        copy_rows(step, row_head, scratch.columns_full.at[slot])
      tokens = pl.ds(step.column * length, length)
      for array, smem in zip(column_arrays, scratch.columns):
        plgpu.copy_gmem_to_smem(array.at[step.batch, tokens, column_head], smem.at[slot],
                                scratch.columns_full.at[slot])
      return ()

    drain(scratch.columns_free, stages, self.walk(fill, (), lambda *_: None))

  def compute(self, out: Ref) -> None:
    """Sums all tiles and copies the sums."""
    shape = mosaic.WGMMA_ROWS, self.scratch.columns[0].shape[1]
    self.walk(self.add, mosaic.full(0, shape, mosaic.TILE_LAYOUT),
              functools.partial(self.write, out))
    plgpu.wait_smem_to_gmem(0)

  def add(self, step: Step, total: jax.Array) -> jax.Array:
    """Returns the sum of `total` and the dS of a tile."""
    scratch, params, slot = self.scratch, self.params, self.slot(step)
    def change() -> None:
      pl.when(step.number > 0)(lambda: plgpu.barrier_arrive(scratch.rows_free))
      plgpu.barrier_wait(scratch.rows_full)
    if self.tiling.joined:
      pass  # They come with the columns.
    elif step.fresh is True:
      change()
    else:
      pl.when(step.fresh)(change)
    plgpu.barrier_wait(scratch.columns_full.at[slot])
    factors = lambda n: (scratch.rows[n].at[self.row_slot(step, self.warpgroup)],
                         scratch.columns[n].at[slot].T)
    tile = lambda: self.tile(step)
    tile_inputs = self.inputs.tile_inputs
    scores, _ = wgmma.matmul_overlapped(*factors(0))
    logits = params.logits_of(tile_inputs, tile, scores, step.masked, self.plan.number)
    lse, delta = self.numbers(step, total.shape)
    d_weights, (_, weights) = params.matmul_overlapped(
        *factors(1), lambda: params.weigh(tile_inputs, tile, logits, lse))
    total = total + params.d_scores(weights, d_weights, delta)
    plgpu.barrier_arrive(scratch.columns_free.at[slot])
    return total

  def tile(self, step: Step) -> tile_lib.Tile:
    length = self.scratch.columns[0].shape[1]
    own = self.own_rows(step.column, self.warpgroup).start, mosaic.WGMMA_ROWS
    others = step.column * length, length
    query, key = (others, own) if self.tiling.by_keys else (own, others)
    return tile_lib.Tile(step.batch, step.head, query[0], key[0], 1, query[1], key[1])

  def numbers(self, step: Step, shape: tuple[int, ...]) -> list[jax.Array]:
    """Returns lse and delta of the queries, of a tile's shape."""
    tile = self.tile(step)
    axis, layout = (1, mosaic.COLUMN_LAYOUT) if self.tiling.by_keys else (0, mosaic.ROW_LAYOUT)
    of = self.inputs.arrays.numbers
    queries = pl.ds(tile.query, tile.num_queries)
    return [lax.broadcast_in_dim(
        mosaic.load(of.at[n, step.batch, step.head, queries], layout), shape, [axis])
            for n in range(2)]

  def write(self, out: Ref, total: jax.Array, column: Index) -> None:
    """Copies a sum to global memory."""
    result = self.scratch.result.at[self.warpgroup]
    target = self.target(out, column, *total.shape)
    if self.plan.whole_rows:
      total = total.sum(axis=1)
    else:
      plgpu.wait_smem_to_gmem(0)
    result[...] = total.astype(result.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, target)


def sum_tiles(work: type[Work], arrays: Arrays, operands: Operands, spec: AttentionSpec, plan: Plan,
              tiling: tiling_lib.BackwardTiling, out: jax.core.ShapedArray) -> jax.Array:
  """Returns the array `out`, of the sums of a plan.

  Args:
    work: which tiles a thread block adds up.
    arrays: without block_list and tile_inputs.
    operands: the arrays of the call.
    spec: what is computed.
    plan: what is summed.
    tiling: of the kernel.
    out: shape and dtype of the result.
  """
  base, _, tile_inputs = make_kernel_params(operands, spec, tiling, by_keys=tiling.by_keys)
  kinds, _ = kinds_of(local_mask(operands, spec), tiling.sizes)
  kinds = jnp.asarray(kinds.swapaxes(-1, -2) if tiling.by_keys else kinds, jnp.int32)
  found, = mosaic.call(
      functools.partial(_kernel, work, BackwardParams(*base), plan), (out,),
      Inputs(arrays, tile_inputs, kinds),
      _scratch(tiling, plan, arrays.key.dtype, out.dtype),
      grid=plan.batch * plan.heads * plan.blocks, warpgroups=tiling_lib.CONSUMERS + 1,
      name="attn_core_backward_bias" if plan.number == score_tiles.BIAS
      else "attn_core_backward_mod")
  return found


def _scratch(tiling: tiling_lib.BackwardTiling, plan: Plan, dtype: DTypeLike,
             result_dtype: DTypeLike) -> Scratch:
  number, rows, stages = tiling_lib.CONSUMERS, mosaic.WGMMA_ROWS, tiling.num_stages[0]
  columns = tiling.block_q if tiling.by_keys else tiling.block_kv
  widths = tiling.width, tiling.value_width
  result = (plgpu.SMEM((number, rows), jnp.float32) if plan.whole_rows else
            mosaic.operand_smem((number, rows, columns), result_dtype))
  copies, held = 2, number
  full: Any = plgpu.Barrier(num_arrivals=2 * number)
  free: Any = plgpu.Barrier(num_arrivals=number)
  if tiling.joined:
    full, free, copies, held = None, None, 2 + 2 * number, stages * number
  return Scratch(
      tuple(mosaic.operand_smem((held, rows, width), dtype) for width in widths),
      tuple(mosaic.operand_smem((stages, columns, width), dtype) for width in widths), result,
      full, free, plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
      plgpu.Barrier(num_arrivals=number, num_barriers=stages))


def _kernel(work: type[Work], params: BackwardParams, plan: Plan, inputs: Inputs,
            outputs: tuple[Ref, ...], scratch: Scratch) -> None:
  warpgroup = lax.axis_index("warpgroup")
  of_block = work(params, plan, inputs, scratch)

  # Values computed before the warpgroups diverge must fit into the registers of the producer.
  @pl.when(warpgroup == tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["copy"], action="decrease")
    of_block.copy()

  @pl.when(warpgroup < tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["compute"], action="increase")
    of_block.compute(*outputs)
