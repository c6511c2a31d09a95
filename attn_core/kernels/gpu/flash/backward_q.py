# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cotangent of the queries on Hopper: dS K, summed over blocks of keys.

A thread block computes a block of queries of one head: a producer warpgroup copies blocks of keys
and values into two pipelines, two consumers compute, each its own half of the queries.

  scores = Q K^T;  dP = d_out V^T, during the exponentials;  d_query += dS K, during the next scores

In shapes, rows is the number of queries of a warpgroup.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from attn_core.kernels.gpu import mosaic, wgmma
from attn_core.kernels.gpu.flash import tiling as tiling_lib
from attn_core.kernels.gpu.flash.backward_common import Arrays, BackwardParams
from attn_core.kernels.gpu.flash.block_list import RowBlocks
from attn_core.kernels.gpu.flash.kernel_params import (
    GridIndex, drain, grid_index_of, make_kernel_params, reverse_blocks)
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import tile as tile_lib
from attn_core.types import AttentionSpec, Operands


class Scratch(NamedTuple):
  """Shared memory and barriers, one barrier per warpgroup or per stage."""

  q_smem: Ref  # [2, rows, D]
  d_out_smem: Ref  # [2, rows, E]
  k_smem: Ref  # [num_stages, block_kv, D]
  v_smem: Ref  # [num_stages, block_kv, E]
  own_barriers: Ref
  k_barriers: Ref
  v_barriers: Ref
  k_consumed_barriers: Ref
  v_consumed_barriers: Ref
  accumulators: tuple[Ref, ...]  # see `wgmma.accumulator_scratch`


def d_query(arrays: Arrays, operands: Operands, spec: AttentionSpec,
            tiling: tiling_lib.BackwardTiling) -> jax.Array:
  """Returns [B, T, H, D]; `arrays` has no block_list and tile_inputs."""
  base, block_list, tile_inputs = make_kernel_params(operands, spec, tiling)
  batch, rows, heads, width = arrays.query.shape
  dtype = arrays.query.dtype
  found, = mosaic.call(
      functools.partial(_kernel, BackwardParams(*base)),
      (jax.core.ShapedArray((batch, rows, heads, width), dtype),),
      arrays._replace(block_list=block_list, tile_inputs=tile_inputs), _scratch(tiling, dtype),
      grid=batch * heads * tiling.sizes.num_query_blocks, warpgroups=tiling_lib.CONSUMERS + 1,
      name="attn_core_backward_query")
  return found[:, :tiling.queries, :, :operands.query.shape[3]]


def _scratch(tiling: tiling_lib.BackwardTiling, dtype: DTypeLike) -> Scratch:
  number, rows = tiling_lib.CONSUMERS, tiling.block_q // tiling_lib.CONSUMERS
  full = [plgpu.Barrier(num_barriers=stages) for stages in tiling.num_stages]
  free = [plgpu.Barrier(num_arrivals=number, num_barriers=stages) for stages in tiling.num_stages]
  return Scratch(
      mosaic.operand_smem((number, rows, tiling.width), dtype),
      mosaic.operand_smem((number, rows, tiling.value_width), dtype),
      mosaic.operand_smem((tiling.num_stages[0], tiling.block_kv, tiling.width), dtype),
      mosaic.operand_smem((tiling.num_stages[1], tiling.block_kv, tiling.value_width), dtype),
      plgpu.Barrier(num_arrivals=2, num_barriers=number), *full, *free,
      wgmma.accumulator_scratch([(number, rows, tiling.width)]))


def _kernel(params: BackwardParams, arrays: Arrays, outputs: tuple[Ref, ...],
            scratch: Scratch) -> None:
  warpgroup = lax.axis_index("warpgroup")

  # Values computed before the warpgroups diverge must fit into the registers of the producer.
  @pl.when(warpgroup == tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["copy"], action="decrease")
    grid = _grid_index(params)
    _copy(params, arrays, scratch, grid, arrays.block_list.row_blocks(*grid))

  @pl.when(warpgroup < tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["compute"], action="increase")
    grid = _grid_index(params)
    own = lax.optimization_barrier(warpgroup)
    _ConsumerWarpgroup(params, arrays, scratch, grid, own).run(
        arrays.block_list.row_blocks(*grid), *outputs)


def _grid_index(params: BackwardParams) -> GridIndex:
  number = params.tiling.sizes.num_query_blocks
  return reverse_blocks(grid_index_of(lax.axis_index("block"), params.heads, number), number)


def _copy(params: BackwardParams, arrays: Arrays, scratch: Scratch, grid: GridIndex,
          row: RowBlocks) -> None:
  """Fills the stages with keys and values of the blocks to visit."""
  tiling = params.tiling
  head = lax.div(grid.head, mosaic.int32(params.group))
  pipelines = (
      (arrays.key, scratch.k_smem, scratch.k_barriers, scratch.k_consumed_barriers,
       tiling.num_stages[0]),
      (arrays.value, scratch.v_smem, scratch.v_barriers, scratch.v_consumed_barriers,
       tiling.num_stages[1]))

  def fill(n: jax.Array, _: tuple) -> tuple:
    tokens = pl.ds(row.block(n) * tiling.block_kv, tiling.block_kv)
    # Opaque: of a first step apart from the loop, CUDA's assembler 13.0 to 13.3 lost coordinates.
    filled = lax.optimization_barrier(n)
    for source, smem, full, free, stages in pipelines:
      slot = lax.rem(n, mosaic.int32(stages))
      pl.when(filled >= stages)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
      plgpu.copy_gmem_to_smem(source.at[grid.batch, tokens, head], smem.at[slot], full.at[slot])
    return ()

  lax.fori_loop(mosaic.int32(0), row.num_visited, fill, ())
  for _, _, _, free, stages in pipelines:
    drain(free, stages, row.num_visited)


class _ConsumerWarpgroup(NamedTuple):
  """Computes half of the queries of a thread block."""

  params: BackwardParams
  arrays: Arrays
  scratch: Scratch
  grid: GridIndex
  warpgroup: jax.Array

  @property
  def rows(self) -> int:
    return self.params.tiling.block_q // tiling_lib.CONSUMERS

  @property
  def first_query(self) -> jax.Array:
    return self.grid.block * self.params.tiling.block_q + self.warpgroup * self.rows

  def run(self, row: RowBlocks, result: Ref) -> None:
    """Copies queries and d_out, sums over all blocks of keys, and copies the result."""
    tiling, scratch, (batch, head, _) = self.params.tiling, self.scratch, self.grid
    own = pl.ds(self.first_query, self.rows)
    full = scratch.own_barriers.at[self.warpgroup]
    query = scratch.q_smem.at[self.warpgroup]
    plgpu.copy_gmem_to_smem(self.arrays.query.at[batch, own, head], query, full)
    plgpu.copy_gmem_to_smem(
        self.arrays.d_out.at[batch, own, head], scratch.d_out_smem.at[self.warpgroup], full)
    numbers = [mosaic.load(self.arrays.numbers.at[n, batch, head, own], mosaic.ROW_LAYOUT)
               for n in range(1 if self.params.reads_delta_late else 2)]
    plgpu.barrier_wait(full)

    def sum_over_keys(total: Ref) -> None:
      lax.fori_loop(mosaic.int32(0), row.num_visited,
                    lambda n, _: self.step(n, row, numbers, total), ())
      plgpu.wgmma_wait(0)
      pl.when(row.num_visited > 0)(lambda: self.free_keys(row.num_visited - 1))
    total, = wgmma.run_with_accumulators(sum_over_keys, [(self.rows, tiling.width)],
                             [x.at[self.warpgroup] for x in scratch.accumulators])
    query[...] = total.astype(query.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(query, result.at[batch, own, head])
    plgpu.wait_smem_to_gmem(0)

  def delta(self) -> jax.Array:
    """Returns delta of the queries, repeated for every key."""
    own = pl.ds(self.first_query, self.rows)
    found = mosaic.load(
        self.arrays.numbers.at[1, self.grid.batch, self.grid.head, own], mosaic.ROW_LAYOUT)
    return lax.broadcast_in_dim(found, (self.rows, self.params.tiling.block_kv), [0])

  def free_keys(self, n: jax.Array) -> None:
    """Frees the keys of step n, whose product has ended."""
    plgpu.barrier_arrive(self.scratch.k_consumed_barriers.at[lax.rem(n, mosaic.int32(
        self.params.tiling.num_stages[0]))])

  def step(self, n: jax.Array, row: RowBlocks, numbers: list[jax.Array], total: Ref) -> tuple:
    """Adds the contribution of the n-th block of keys; `numbers` are lse, and delta if not late."""
    tiling, scratch, params = self.params.tiling, self.scratch, self.params
    warpgroup, *grid = wgmma.recompute_each_step((self.warpgroup, *self.grid), n)
    slot, value_slot = (lax.rem(n, mosaic.int32(stages)) if stages > 1
                        else wgmma.recompute_each_step((mosaic.int32(0),), n)[0]
                        for stages in tiling.num_stages)
    now = self._replace(warpgroup=warpgroup, grid=GridIndex(*grid))
    tile = lambda: tile_lib.Tile(now.grid.batch, now.grid.head, now.first_query,
                              row.block(n) * tiling.block_kv, 1, self.rows, tiling.block_kv)
    lse, *delta = (lax.broadcast_in_dim(x, (self.rows, tiling.block_kv), [0]) for x in numbers)
    plgpu.barrier_wait(scratch.k_barriers.at[slot])
    # 1. Scores and logits.
    scores, _ = wgmma.matmul_overlapped(scratch.q_smem.at[warpgroup], scratch.k_smem.at[slot].T)
    pl.when(n > 0)(lambda: self.free_keys(n - 1))
    logits = params.logits_of(self.arrays.tile_inputs, tile, scores, params.masked(row, n))
    # 2. dP = d_out V^T, during the exponentials.
    plgpu.barrier_wait(scratch.v_barriers.at[value_slot])
    d_weights, (_, factor) = params.matmul_overlapped(
        scratch.d_out_smem.at[warpgroup], scratch.v_smem.at[value_slot].T,
        lambda: params.weigh(self.arrays.tile_inputs, tile, logits, lse))
    plgpu.barrier_arrive(scratch.v_consumed_barriers.at[value_slot])
    # 3. d_query += dS K.
    d_scores = params.d_scores(factor, d_weights, *(delta or [now.delta()]),
                               scale=params.loader.spec.softmax_scale)
    wgmma.accumulate(total, d_scores.astype(scratch.k_smem.dtype), scratch.k_smem.at[slot],
                 interpret=params.interpret)
    return ()
