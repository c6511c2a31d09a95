# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cotangents of keys and values on Hopper: dS^T Q and P^T d_out, summed over blocks of queries.

A thread block computes a block of keys of one key head, with all query heads of its group one
after the other: a producer warpgroup copies blocks of queries and d_out into two pipelines,
two consumers compute. Tiles are transposed, so that P^T and dS^T are operands in registers.

  scores = K Q^T;  dP = V d_out^T;  d_value += P^T d_out;  d_key += dS^T Q

Up to 128 wide, each consumer has separate keys, and both of their sums in registers.
Wider sums fill the registers of a warpgroup one at a time: the two share their keys, the first
computes P and sums d_value, the second takes P from shared memory, computes dS and sums d_key.

In shapes, rows is the number of keys of a consumer.
"""

import functools
from typing import Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.gpu import mosaic, wgmma
from attn_core.kernels.gpu.flash import tiling as tiling_lib
from attn_core.kernels.gpu.flash.backward_common import Arrays, BackwardParams
from attn_core.kernels.gpu.flash.block_list import RowBlocks
from attn_core.kernels.gpu.flash.kernel_params import (
    GridIndex, drain, grid_index_of, make_kernel_params)
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import dropout, tile as tile_lib
from attn_core.types import AttentionSpec, Operands


class Scratch(NamedTuple):
  """Shared memory and barriers, one barrier per part of the keys or per stage.

  There are two parts of the keys, one for each consumer, or one for both.
  """

  k_smem: Ref  # [num_parts, rows, D]
  v_smem: Ref  # [num_parts, rows, E]
  q_smem: Ref  # [num_stages, block_q, D]
  d_out_smem: Ref  # [num_stages, block_q, E]
  lse_smem: Ref  # float32 [num_stages, block_q]
  delta_smem: Ref  # float32 [num_stages, block_q]
  p_smem: Ref  # float32 [num_stages, rows, block_q]: P passed between the consumers; or None
  k_barriers: Ref
  v_barriers: Ref
  q_barriers: Ref
  d_out_barriers: Ref
  q_consumed_barriers: Ref
  d_out_consumed_barriers: Ref
  p_barriers: Ref  # None: not needed
  p_consumed_barriers: Ref
  accumulators: tuple[Ref, ...]  # see `wgmma.accumulator_scratch`


class Step(NamedTuple):
  """One block of queries of one head; int32."""

  number: jax.Array  # among those of all heads
  head: jax.Array  # query head
  row: RowBlocks  # of the head
  index: jax.Array  # among those of the row


def d_key_and_value(arrays: Arrays, operands: Operands, spec: AttentionSpec,
                    tiling: tiling_lib.BackwardTiling) -> tuple[jax.Array, jax.Array]:
  """Returns ([B, S, K, D], [B, S, K, E]); `arrays` has no block_list and tile_inputs."""
  base, block_list, tile_inputs = make_kernel_params(operands, spec, tiling, by_keys=True)
  batch, _, heads, _ = arrays.key.shape
  found = mosaic.call(
      functools.partial(_kernel, BackwardParams(*base)),
      tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in (arrays.key, arrays.value)),
      arrays._replace(block_list=block_list, tile_inputs=tile_inputs),
      _scratch(tiling, arrays.key.dtype),
      grid=batch * heads * tiling.sizes.num_key_blocks, warpgroups=tiling_lib.CONSUMERS + 1,
      name="attn_core_backward_key")
  return tuple(x[:, :tiling.keys, :, :like.shape[3]]
               for x, like in zip(found, (operands.key, operands.value)))


def _scratch(tiling: tiling_lib.BackwardTiling, dtype: DTypeLike) -> Scratch:
  parts, rows = (1, tiling.block_kv) if tiling.shared else (tiling_lib.CONSUMERS, mosaic.WGMMA_ROWS)
  stages, copied = tiling.num_stages, plgpu.Barrier(num_barriers=parts)
  full = [plgpu.Barrier(num_arrivals=2, num_barriers=n) for n in stages]
  free = [plgpu.Barrier(num_arrivals=tiling_lib.CONSUMERS, num_barriers=n) for n in stages]
  weights = passed = None
  if tiling.shared:
    weights = mosaic.operand_smem((tiling_lib.P_STAGES, rows, tiling.block_q), jnp.float32)
    passed = plgpu.Barrier(num_barriers=tiling_lib.P_STAGES)
  return Scratch(
      mosaic.operand_smem((parts, rows, tiling.width), dtype),
      mosaic.operand_smem((parts, rows, tiling.value_width), dtype),
      mosaic.operand_smem((stages[0], tiling.block_q, tiling.width), dtype),
      mosaic.operand_smem((stages[1], tiling.block_q, tiling.value_width), dtype),
      plgpu.SMEM((stages[0], tiling.block_q), jnp.float32),
      plgpu.SMEM((stages[1], tiling.block_q), jnp.float32), weights, copied, copied, *full, *free,
      passed, passed,
      wgmma.accumulator_scratch([(parts, rows, tiling.width), (parts, rows, tiling.value_width)]))


def _kernel(params: BackwardParams, arrays: Arrays, outputs: tuple[Ref, ...],
            scratch: Scratch) -> None:
  warpgroup = lax.axis_index("warpgroup")

  # Values computed before the warpgroups diverge must fit into the registers of the producer.
  @pl.when(warpgroup == tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["copy"], action="decrease")
    _copy(params, arrays, scratch, _grid_index(params))

  def compute(part: jax.Array, run: Callable[..., None], registers: int) -> None:
    plgpu.set_max_registers(registers, action="increase")
    part = lax.optimization_barrier(part)
    run(_ConsumerWarpgroup(params, arrays, scratch, _grid_index(params), part), *outputs)

  if params.tiling.shared:
    runs = zip((_sum_values, _sum_keys), params.registers_shared, strict=True)
    for n, (run, registers) in enumerate(runs):
      pl.when(warpgroup == n)(functools.partial(compute, mosaic.int32(0), run, registers))
  else:
    pl.when(warpgroup < tiling_lib.CONSUMERS)(
        functools.partial(compute, warpgroup, _sum_both, tiling_lib.REGISTERS["compute"]))


def _grid_index(params: BackwardParams) -> GridIndex:
  """Returns the position of this thread block; neighbors share queries."""
  return grid_index_of(lax.axis_index("block"), params.heads // params.group,
                  params.tiling.sizes.num_key_blocks)


def _visit(params: BackwardParams, arrays: Arrays, grid: GridIndex, run: Callable[[Step], None],
           unrolls: bool = True) -> jax.Array:
  """Runs run(Step) for all blocks of queries of all heads of the group; returns their number.

  Args:
    unrolls: whether the compiler may unroll the loop where it knows how often it runs.
  """
  def of_head(g: jax.Array, done: jax.Array) -> jax.Array:
    head = grid.head * params.group + g
    row = arrays.block_list.row_blocks(grid.batch, head, grid.block)
    if not unrolls and arrays.block_list.is_count_known:
      row = row._replace(num_visited=lax.optimization_barrier(row.num_visited))
    def of_block(m: jax.Array, _: tuple) -> tuple:
      run(Step(done + m, head, row, m))
      return ()
    lax.fori_loop(mosaic.int32(0), row.num_visited, of_block, ())
    return done + row.num_visited

  if params.group == 1:
    return of_head(mosaic.int32(0), mosaic.int32(0))
  return lax.fori_loop(mosaic.int32(0), mosaic.int32(params.group), of_head, mosaic.int32(0))


def _copy(params: BackwardParams, arrays: Arrays, scratch: Scratch, grid: GridIndex) -> None:
  """Fills the stages with queries and d_out of the blocks to visit, and their numbers."""
  tiling = params.tiling
  pipelines = (
      (arrays.query, 0, scratch.q_smem, scratch.lse_smem, scratch.q_barriers,
       scratch.q_consumed_barriers, tiling.num_stages[0]),
      (arrays.d_out, 1, scratch.d_out_smem, scratch.delta_smem, scratch.d_out_barriers,
       scratch.d_out_consumed_barriers, tiling.num_stages[1]))

  def fill(step: Step) -> None:
    tokens = pl.ds(step.row.block(step.index) * tiling.block_q, tiling.block_q)
    for tile, number, tile_smem, number_smem, full, free, stages in pipelines:
      slot = lax.rem(step.number, mosaic.int32(stages))
      pl.when(step.number >= stages)(
          lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
      plgpu.copy_gmem_to_smem(
          tile.at[grid.batch, tokens, step.head], tile_smem.at[slot], full.at[slot])
      plgpu.copy_gmem_to_smem(
          arrays.numbers.at[number, grid.batch, step.head, tokens], number_smem.at[slot],
          full.at[slot])

  # Unrolled, the loop would keep the addresses of barriers, which take too many registers.
  filled = _visit(params, arrays, grid, fill, unrolls=False)
  for *_, free, stages in pipelines:
    drain(free, stages, filled)


class _ConsumerWarpgroup(NamedTuple):
  """A consumer warpgroup: the computations that all kinds share."""

  params: BackwardParams
  arrays: Arrays
  scratch: Scratch
  grid: GridIndex
  part: jax.Array  # of the keys

  @property
  def rows(self) -> int:
    return self.scratch.k_smem.shape[1]

  @property
  def first_key(self) -> jax.Array:
    return self.grid.block * self.params.tiling.block_kv + self.part * self.rows

  def at_step(self, step: Step) -> "_ConsumerWarpgroup":
    """Returns a copy to use in one step; see `wgmma.recompute_each_step`."""
    part, *grid = wgmma.recompute_each_step((self.part, *self.grid), step.number)
    return self._replace(part=part, grid=GridIndex(*grid))

  def visit(self, run: Callable[[Step], None]) -> jax.Array:
    return _visit(self.params, self.arrays, self.grid, run)

  def fetch(self, source: Ref, smem: Ref, full: Ref) -> None:
    """Starts the copy of this part of the keys or of the values."""
    head = self.grid.batch, pl.ds(self.first_key, self.rows), self.grid.head
    plgpu.copy_gmem_to_smem(source.at[head], smem.at[self.part], full.at[self.part])

  def write(self, total: jax.Array, smem: Ref, result: Ref) -> None:
    """Copies a sum to global memory, by way of the operand whose cotangent it is."""
    head = self.grid.batch, pl.ds(self.first_key, self.rows), self.grid.head
    smem = smem.at[self.part]
    smem[...] = total.astype(smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, result.at[head])

  def query_slot(self, number: jax.Array) -> jax.Array:
    return lax.rem(number, mosaic.int32(self.params.tiling.num_stages[0]))

  def d_out_slot(self, number: jax.Array) -> jax.Array:
    return lax.rem(number, mosaic.int32(self.params.tiling.num_stages[1]))

  def free_query(self, number: jax.Array) -> None:
    plgpu.barrier_arrive(self.scratch.q_consumed_barriers.at[self.query_slot(number)])

  def free_d_out(self, number: jax.Array) -> None:
    plgpu.barrier_arrive(self.scratch.d_out_consumed_barriers.at[self.d_out_slot(number)])

  def numbers(self, smem: Ref, slot: jax.Array) -> jax.Array:
    """Returns [block_q] of a stage, repeated for every key."""
    shape = self.rows, self.params.tiling.block_q
    return lax.broadcast_in_dim(mosaic.load(smem.at[slot], mosaic.COLUMN_LAYOUT), shape, [1])

  def scores(self, step: Step) -> jax.Array:
    """Returns K Q^T of a step."""
    slot = self.query_slot(step.number)
    plgpu.barrier_wait(self.scratch.q_barriers.at[slot])
    return wgmma.matmul_overlapped(
        self.scratch.k_smem.at[self.part], self.scratch.q_smem.at[slot].T)[0]

  def d_weights_of(self, step: Step) -> tuple[Ref, Ref]:
    """Returns references V and d_out^T of a step, whose product is dP."""
    slot = self.d_out_slot(step.number)
    plgpu.barrier_wait(self.scratch.d_out_barriers.at[slot])
    return self.scratch.v_smem.at[self.part], self.scratch.d_out_smem.at[slot].T

  def tile(self, step: Step) -> tile_lib.Tile:
    tiling = self.params.tiling
    return tile_lib.Tile(self.grid.batch, step.head, step.row.block(step.index) * tiling.block_q,
                      self.first_key, 1, tiling.block_q, self.rows)

  def logits(self, step: Step, scores: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns (logits, slope) of a step; see `BackwardParams.logits_of`."""
    return self.params.logits_of(self.arrays.tile_inputs, lambda: self.tile(step), scores,
                                 self.params.masked(step.row, step.index))

  def weigh(self, step: Step,
            logits: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
    """Returns `BackwardParams.weigh` of a step, P in the dtype of a product."""
    lse = self.numbers(self.scratch.lse_smem, self.query_slot(step.number))
    kept, factor = self.params.weigh(self.arrays.tile_inputs, lambda: self.tile(step), logits, lse)
    return kept.astype(self.scratch.d_out_smem.dtype), factor

  def add_values(self, total: Ref, step: Step, weights: jax.Array) -> None:
    wgmma.accumulate(total, weights, self.scratch.d_out_smem.at[self.d_out_slot(step.number)],
                 interpret=self.params.interpret)

  def add_keys(self, total: Ref, step: Step, d_scores: jax.Array) -> None:
    wgmma.accumulate(total, d_scores.astype(self.scratch.q_smem.dtype),
                 self.scratch.q_smem.at[self.query_slot(step.number)],
                 interpret=self.params.interpret)

  def sum_up(self, run: Callable[..., None], *which: int) -> list[jax.Array]:
    """See `wgmma.run_with_accumulators`: of keys (0) or values (1)."""
    shapes = [(self.rows, self.scratch[n].shape[2]) for n in which]
    return wgmma.run_with_accumulators(run, shapes, [
        self.scratch.accumulators[n].at[self.part] for n in which if self.scratch.accumulators])

  def finish(self, number: jax.Array, free: Callable[[jax.Array], None]) -> None:
    """Waits for the last products of all `number` steps, and frees what they read."""
    plgpu.wgmma_wait(0)
    pl.when(number > 0)(lambda: free(number - 1))

  def d_scores(self, factor: jax.Array, d_weights: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns dS times the softmax scale; see `BackwardParams.d_scores`."""
    params = self.params
    return params.d_scores(factor, d_weights, delta, params.loader.spec.softmax_scale)

  @property
  def value_scale(self) -> float:
    return dropout.kept_scale(self.params.loader.spec.dropout_prob)


def _sum_both(compute: _ConsumerWarpgroup, d_key: Ref, d_value: Ref) -> None:
  """Computes both sums of a warpgroup that does not share its keys."""
  scratch, params = compute.scratch, compute.params
  compute.fetch(compute.arrays.key, scratch.k_smem, scratch.k_barriers)
  compute.fetch(compute.arrays.value, scratch.v_smem, scratch.v_barriers)
  for full in (scratch.k_barriers, scratch.v_barriers):
    plgpu.barrier_wait(full.at[compute.part])

  def free(number: jax.Array) -> None:
    plgpu.commit_smem()  # lse and delta were not read by copies or products
    compute.free_query(number)
    compute.free_d_out(number)

  def sum_over_queries(key_total: Ref, value_total: Ref) -> None:
    def of_step(step: Step) -> None:
      now = compute.at_step(step)
      scores = now.scores(step)
      pl.when(step.number > 0)(lambda: free(step.number - 1))
      logits = now.logits(step, scores)
      d_weights, (weights, factor) = params.matmul_overlapped(
          *now.d_weights_of(step), lambda: now.weigh(step, logits))
      now.add_values(value_total, step, weights)
      delta = now.numbers(scratch.delta_smem, now.d_out_slot(step.number))
      now.add_keys(key_total, step, now.d_scores(factor, d_weights, delta))
    compute.finish(compute.visit(of_step), free)

  key_total, value_total = compute.sum_up(sum_over_queries, 0, 1)
  compute.write(key_total, scratch.k_smem, d_key)
  compute.write(value_total * compute.value_scale, scratch.v_smem, d_value)
  plgpu.wait_smem_to_gmem(0)


def _sum_values(compute: _ConsumerWarpgroup, _: Ref, d_value: Ref) -> None:
  """Work of the first of two warpgroups that share their keys: P, and P^T d_out."""
  scratch = compute.scratch
  compute.fetch(compute.arrays.key, scratch.k_smem, scratch.k_barriers)
  compute.fetch(compute.arrays.value, scratch.v_smem, scratch.v_barriers)
  plgpu.barrier_wait(scratch.k_barriers.at[compute.part])

  def sum_over_queries(total: Ref) -> None:
    def of_step(step: Step) -> None:
      now = compute.at_step(step)
      scores = now.scores(step)
      pl.when(step.number > 0)(lambda: compute.free_d_out(step.number - 1))
      weights, factor = now.weigh(step, now.logits(step, scores))
      plgpu.commit_smem()  # lse was not read by copies or products
      compute.free_query(step.number)
      slot = lax.rem(step.number, mosaic.int32(tiling_lib.P_STAGES))
      pl.when(step.number >= tiling_lib.P_STAGES)(
          lambda: plgpu.barrier_wait(scratch.p_consumed_barriers.at[slot]))
      scratch.p_smem[slot] = factor
      plgpu.barrier_arrive(scratch.p_barriers.at[slot])
      plgpu.barrier_wait(scratch.d_out_barriers.at[compute.d_out_slot(step.number)])
      now.add_values(total, step, weights)
    number = compute.visit(of_step)
    compute.finish(number, compute.free_d_out)
    drain(scratch.p_consumed_barriers, tiling_lib.P_STAGES, number)

  total, = compute.sum_up(sum_over_queries, 1)
  # The other warpgroup has read the values: it has consumed all of P. With a constant index, the
  # address of the barrier would be kept through the loop.
  plgpu.barrier_wait(scratch.v_barriers.at[compute.part])
  compute.write(total * compute.value_scale, scratch.v_smem, d_value)
  plgpu.wait_smem_to_gmem(0)


def _sum_keys(compute: _ConsumerWarpgroup, d_key: Ref, _: Ref) -> None:
  """Work of the second of two warpgroups that share their keys: dS, and dS^T Q."""
  scratch = compute.scratch
  plgpu.barrier_wait(scratch.v_barriers.at[compute.part])

  def sum_over_queries(total: Ref) -> None:
    def of_step(step: Step) -> None:
      now = compute.at_step(step)
      d_weights, _ = wgmma.matmul_overlapped(*now.d_weights_of(step))
      pl.when(step.number > 0)(lambda: compute.free_query(step.number - 1))
      delta = now.numbers(scratch.delta_smem, compute.d_out_slot(step.number))
      slot = lax.rem(step.number, mosaic.int32(tiling_lib.P_STAGES))
      plgpu.barrier_wait(scratch.p_barriers.at[slot])
      factor = mosaic.load(scratch.p_smem.at[slot], mosaic.TILE_LAYOUT)
      d_scores = now.d_scores(factor, d_weights, delta)
      plgpu.commit_smem()  # delta was not read by copies or products
      compute.free_d_out(step.number)
      plgpu.barrier_arrive(scratch.p_consumed_barriers.at[slot])
      plgpu.barrier_wait(scratch.q_barriers.at[compute.query_slot(step.number)])
      now.add_keys(total, step, d_scores)
    compute.finish(compute.visit(of_step), compute.free_query)

  total, = compute.sum_up(sum_over_queries, 0)
  # The other warpgroup has read the keys: it has passed all of P on.
  plgpu.barrier_wait(scratch.k_barriers.at[compute.part])
  compute.write(total, scratch.k_smem, d_key)
  plgpu.wait_smem_to_gmem(0)
