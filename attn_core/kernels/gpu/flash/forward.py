# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward of block-wise attention on Hopper.

A thread block computes a block of queries of one head: a producer warpgroup copies blocks of keys
and values into a pipeline, two consumers compute, each its own half of the queries. The two take
turns at the tensor cores: while one exponentiates, the products of the other run.

  qk = Q K^T, from shared memory;  out = P V, with P in registers

Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.

In shapes, rows is the number of queries of a warpgroup.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import dense_operands, nonfinite
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import tiling as tiling_lib
from attn_core.kernels.gpu.flash.block_list import BlockList, RowBlocks
from attn_core.kernels.gpu.flash.kernel_params import (
    GridIndex, KernelParams, drain, grid_index_of, make_kernel_params, reverse_blocks)
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import dropout, mask as mask_lib, tile as tile_lib
from attn_core.types import AttentionSpec, BlockSizes, Operands


class Inputs(NamedTuple):
  """References in global memory, or the arrays."""

  query: Any  # [B, T, H, D]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  # The values with 0 for non-finite numbers, for blocks that are partly hidden; None: `value`.
  masked_value: Any
  sinks: Any  # float32 [B or 1, H], or None
  # float32 [B, H, num_query_blocks]: NaN where all queries of a block attend to a non-finite key
  # of a block without a mask, else 0. The logit of such a key may be -inf, which changes nothing.
  block_nan: Any
  block_list: BlockList
  tile_inputs: TileInputs


class Scratch(NamedTuple):
  """Shared memory and barriers, one barrier per consumer or per stage."""

  q_smem: Ref  # [2, rows, D]
  k_smem: Ref  # [num_stages, block_kv, D]
  v_smem: Ref  # [num_stages, block_kv, E]
  out_smem: Ref  # [2, rows, E]; None: the output is written to q_smem
  lse_smem: Ref  # float32 [2, rows]
  q_barriers: Ref
  k_barriers: Ref
  v_barriers: Ref
  k_consumed_barriers: Ref
  v_consumed_barriers: Ref
  schedule_barrier: Ref  # hands the tensor cores from one consumer to the other


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Returns out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  tiling = tiling_lib.make_tiling(operands, spec, block_sizes)
  batch, queries, heads, _ = operands.query.shape
  params, block_list, tile_inputs = make_kernel_params(operands, spec, tiling)
  sinks = operands.sinks
  inputs = Inputs(
      mosaic.pad_for_tma(nonfinite.infinite_to_nan(operands.query), tiling.width),
      mosaic.pad_for_tma(operands.key, tiling.width),
      mosaic.pad_for_tma(operands.value, tiling.value_width), None,
      None if sinks is None else sinks.astype(jnp.float32), None, block_list, tile_inputs)
  inputs = _propagate_nan(params, inputs, operands, isinstance(
      dense_operands.mask_of(operands, spec), mask_lib.Full) or not params.any_partial)
  rows, dtype, out_dtype = (inputs.query.shape[1], operands.query.dtype,
                            dense_operands.out_dtype(operands, spec))
  num_blocks = tiling.sizes.num_query_blocks
  padded_rows = num_blocks * tiling.block_q
  out_rows = rows if out_dtype == dtype else padded_rows
  out, lse = mosaic.call(
      functools.partial(_kernel, params),
      (jax.core.ShapedArray((batch, out_rows, heads, tiling.value_width), out_dtype),
       # Copies of one dimension are clipped at the end of the array, not of a row.
       jax.core.ShapedArray((batch, heads, padded_rows), jnp.float32)),
      inputs, _scratch_types(tiling, dtype), grid=batch * heads * num_blocks,
      warpgroups=tiling_lib.CONSUMERS + 1, name="attn_core_forward")
  return Residuals(out[:, :queries, :, :operands.value.shape[3]], lse[..., :queries])


def _propagate_nan(params: KernelParams, inputs: Inputs, operands: Operands,
                   all_visible: bool) -> Inputs:
  """Makes non-finite keys and values yield NaN for the queries that attend to them, and no others.

  0 * NaN is NaN, and would reach all queries: in blocks that are partly hidden, non-finite values
  are 0, and the logits of their keys are NaN where visible. Keys are not copied, since the logits
  of hidden ones are replaced.

  Args:
    params: of the kernel.
    inputs: without `masked_value` and `block_nan`.
    operands: the arrays.
    all_visible: whether all queries attend to all keys they visit: then non-finite values reach
      the result by themselves.
  """
  tiling, finite = params.tiling, jnp.isfinite(operands.value)
  finite_keys = nonfinite.is_finite(
      operands.key, operands.key if all_visible else operands.value)[..., 0]
  nan_keys = jnp.where(finite_keys, 0.0, jnp.nan).astype(jnp.float32).transpose(0, 2, 1)
  nan_keys = dense_operands.pad_axis(nan_keys, 2, dense_operands.key_padding(tiling.sizes))
  has_nan = jnp.isnan(nan_keys).reshape(*nan_keys.shape[:2], -1, tiling.block_kv).any(-1)
  seen = inputs.block_list.num_visited if all_visible else inputs.block_list.num_full
  block_nan = inputs.block_list.any_of(
      jnp.repeat(has_nan, params.group, 1), seen, tiling.sizes.num_query_blocks)
  inputs = inputs._replace(block_nan=jnp.where(block_nan, jnp.nan, 0.0).astype(jnp.float32))
  if all_visible:
    return inputs
  return inputs._replace(
      masked_value=mosaic.pad_for_tma(
          jnp.where(finite, operands.value, 0), tiling.value_width),
      tile_inputs=inputs.tile_inputs._replace(
          nan_keys=nan_keys, block_has_nan=has_nan.astype(jnp.int32)))


def _scratch_types(tiling: tiling_lib.Tiling, dtype: DTypeLike) -> Scratch:
  consumers, num_stages = tiling_lib.CONSUMERS, tiling.num_stages
  full = plgpu.Barrier(num_barriers=num_stages)
  consumed = plgpu.Barrier(num_arrivals=consumers, num_barriers=num_stages)
  out = None
  if tiling.value_width != tiling.width:
    out = mosaic.operand_smem((consumers, tiling.warpgroup_rows, tiling.value_width), dtype)
  return Scratch(
      mosaic.operand_smem((consumers, tiling.warpgroup_rows, tiling.width), dtype),
      mosaic.operand_smem((num_stages, tiling.block_kv, tiling.width), dtype),
      mosaic.operand_smem((num_stages, tiling.block_kv, tiling.value_width), dtype), out,
      plgpu.SMEM((consumers, tiling.warpgroup_rows), jnp.float32),
      plgpu.Barrier(num_barriers=consumers), full, full, consumed, consumed,
      plgpu.Barrier(num_arrivals=consumers))


def _kernel(params: KernelParams, inputs: Inputs, outputs: tuple[Ref, ...],
            scratch: Scratch) -> None:
  grid = _grid_index(params)
  row_blocks = inputs.block_list.row_blocks(*grid)
  warpgroup = lax.axis_index("warpgroup")

  # 1. The producer warpgroup copies keys and values.
  @pl.when(warpgroup == tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["copy"], action="decrease")
    _copy(params, inputs, scratch, grid, row_blocks)

  # 2. The consumer warpgroups compute.
  @pl.when(warpgroup < tiling_lib.CONSUMERS)
  def _() -> None:
    plgpu.set_max_registers(tiling_lib.REGISTERS["compute"], action="increase")
    _ConsumerWarpgroup(params, inputs, scratch, warpgroup).run(row_blocks, *outputs)


def _grid_index(params: KernelParams) -> GridIndex:
  """Returns the position of this thread block; neighbors share keys.

  It is recomputed where it is needed: kept, it would take registers that the products need, and
  the barrier is what keeps the compiler from keeping it.
  """
  num_blocks = params.tiling.sizes.num_query_blocks
  block = lax.optimization_barrier(lax.axis_index("block"))
  return reverse_blocks(grid_index_of(block, params.heads, num_blocks), num_blocks)


def _copy(params: KernelParams, inputs: Inputs, scratch: Scratch, grid: GridIndex,
          row_blocks: RowBlocks) -> None:
  """Fills the pipeline with keys and values of the blocks to visit."""
  num_stages, block_kv = mosaic.int32(params.tiling.num_stages), params.tiling.block_kv
  head = lax.div(grid.head, mosaic.int32(params.group))

  def fill(n: jax.Array, _: tuple) -> tuple:
    slot = lax.rem(n, num_stages)
    rows = pl.ds(row_blocks.block(n) * block_kv, block_kv)
    def copy(source: Ref, smem: Ref, full: Ref) -> None:
      plgpu.copy_gmem_to_smem(source.at[grid.batch, rows, head], smem.at[slot], full.at[slot])
    pl.when(n >= num_stages)(lambda: plgpu.barrier_wait(scratch.k_consumed_barriers.at[slot]))
    copy(inputs.key, scratch.k_smem, scratch.k_barriers)
    pl.when(n >= num_stages)(lambda: plgpu.barrier_wait(scratch.v_consumed_barriers.at[slot]))
    if inputs.masked_value is None:
      copy(inputs.value, scratch.v_smem, scratch.v_barriers)
    else:
      for source, chosen in ((inputs.value, n < row_blocks.num_full),
                             (inputs.masked_value, n >= row_blocks.num_full)):
        pl.when(chosen)(functools.partial(copy, source, scratch.v_smem, scratch.v_barriers))
    return ()

  lax.fori_loop(mosaic.int32(0), row_blocks.num_visited, fill, ())
  for consumed in (scratch.k_consumed_barriers, scratch.v_consumed_barriers):
    drain(consumed, params.tiling.num_stages, row_blocks.num_visited)


class _Running(NamedTuple):
  """The softmax of the keys seen so far; see `kernels.common.online_softmax.Running`."""

  m_i: jax.Array  # [rows]: logits times log2(e); -inf before the first visible key
  l_i: jax.Array  # [rows]
  acc: jax.Array  # [rows, E]


class _ConsumerWarpgroup(NamedTuple):
  """Computes half of the queries of a thread block."""

  params: KernelParams
  inputs: Inputs
  scratch: Scratch
  axis_index: jax.Array  # of this warpgroup

  @property
  def warpgroup(self) -> jax.Array:
    """The number of this warpgroup; recomputed where sums fill the registers."""
    if self.params.tiling.value_width <= tiling_lib.WIDE:
      return self.axis_index
    return lax.optimization_barrier(lax.axis_index("warpgroup"))

  def query_index(self, grid: GridIndex | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (batch row, query head, first query) of this warpgroup."""
    tiling, grid = self.params.tiling, _grid_index(self.params) if grid is None else grid
    return (grid.batch, grid.head,
            grid.block * tiling.block_q + self.warpgroup * tiling.warpgroup_rows)

  def take_turn(self) -> None:
    plgpu.barrier_arrive(self.scratch.schedule_barrier)
    plgpu.barrier_wait(self.scratch.schedule_barrier)

  def run(self, row_blocks: RowBlocks, out: Ref, lse: Ref) -> None:
    """Copies the queries, computes all blocks, and copies the results."""
    scratch, rows = self.scratch, self.params.tiling.warpgroup_rows
    full = scratch.q_barriers.at[self.warpgroup]
    batch, head, first = self.query_index()
    plgpu.copy_gmem_to_smem(self.inputs.query.at[batch, pl.ds(first, rows), head],
                            scratch.q_smem.at[self.warpgroup], full)
    plgpu.barrier_wait(full)
    running = _Running(
        mosaic.full(-jnp.inf, (rows,), mosaic.ROW_LAYOUT),
        mosaic.full(0, (rows,), mosaic.ROW_LAYOUT),
        mosaic.full(0, (rows, self.params.tiling.value_width), mosaic.TILE_LAYOUT))
    # The second warpgroup begins half a step later.
    pl.when(self.warpgroup == 1)(self.take_turn)
    if self.params.any_full:
      running = lax.fori_loop(mosaic.int32(0), row_blocks.num_full,
                              lambda n, x: self.step(n, x, False), running)
    if self.params.any_partial:
      running = lax.fori_loop(row_blocks.num_full, row_blocks.num_visited,
                              lambda n, x: self.step(n, x, True), running)
    pl.when(self.warpgroup == 0)(self.take_turn)
    self.write(running, out, lse)

  def step(self, n: jax.Array, running: _Running, masked: bool) -> _Running:
    """Folds in the n-th block of keys."""
    scratch, params = self.scratch, self.params
    slot = lax.rem(n, mosaic.int32(params.tiling.num_stages))
    tile = self.tile(n) if masked or not params.logits.plain or params.has_dropout else None

    # 1. qk = Q K^T.
    plgpu.barrier_wait(scratch.k_barriers.at[slot])
    qk = self.scores(slot)
    plgpu.barrier_arrive(scratch.k_consumed_barriers.at[slot])

    # 2. Softmax.
    logits, _ = params.logits.compute(self.inputs.tile_inputs, tile, qk, masked)
    unit = params.logits.unit
    m_i = jnp.maximum(running.m_i, logits.max(axis=1) * unit)
    # While a row has seen nothing, m_i is -inf, and -inf - -inf would be NaN.
    reference = jnp.where(m_i == -jnp.inf, 0.0, m_i)
    p = jnp.exp2(logits * unit - _along_rows(reference, logits.shape))
    alpha = jnp.exp2(running.m_i - reference)
    l_i = running.l_i * alpha + p.sum(axis=1)
    if params.has_dropout:
      p = jnp.where(params.loader.keep_mask(self.inputs.tile_inputs, tile), p, 0.0)
    p = p.astype(scratch.v_smem.dtype)
    acc = running.acc * _along_rows(alpha, running.acc.shape)
    # The softmax ends here: the other's turn begins when this one's products are issued.
    m_i, l_i, acc, p = lax.optimization_barrier((m_i, l_i, acc, p))
    plgpu.barrier_arrive(scratch.schedule_barrier)

    # 3. acc += P V.
    plgpu.barrier_wait(scratch.v_barriers.at[slot])
    plgpu.barrier_wait(scratch.schedule_barrier)
    acc = mosaic.accumulate(acc, p, scratch.v_smem.at[slot], interpret=params.interpret)
    plgpu.barrier_arrive(scratch.v_consumed_barriers.at[slot])
    return _Running(m_i, l_i, acc)

  def tile(self, n: jax.Array) -> tile_lib.Tile:
    """Returns this warpgroup's queries and the n-th block of keys."""
    tiling, grid = self.params.tiling, _grid_index(self.params)
    key = self.inputs.block_list.block(*grid, n) * tiling.block_kv
    return tile_lib.Tile(
        *self.query_index(grid), key, 1, tiling.warpgroup_rows, tiling.block_kv)

  def scores(self, slot: jax.Array) -> jax.Array:
    """Returns Q K^T: float32 [rows, block_kv]."""
    tiling, scratch = self.params.tiling, self.scratch
    def product(acc: Ref) -> jax.Array:
      plgpu.wgmma(acc, scratch.q_smem.at[self.warpgroup], scratch.k_smem.at[slot].T)
      self.take_turn()
      return acc[...]
    return pl.run_scoped(
        product, plgpu.ACC((tiling.warpgroup_rows, tiling.block_kv), jnp.float32))

  def write(self, running: _Running, out: Ref, lse: Ref) -> None:
    """Normalizes and copies out and lse."""
    scratch, grid = self.scratch, _grid_index(self.params)
    batch, head, first = self.query_index(grid)
    m_i, l_i, acc = running
    # A row that attends to a non-finite number is NaN in all its columns, and in its lse.
    l_i = l_i + 0.0 * acc.sum(axis=1) + self.inputs.block_nan[grid]
    if self.inputs.sinks is not None:
      sink = self.inputs.sinks[batch if self.inputs.sinks.shape[0] > 1 else 0, head] * LOG2E
      joint = jnp.maximum(m_i, sink)
      reference = jnp.where(joint == -jnp.inf, 0.0, joint)
      alpha = jnp.exp2(m_i - reference)
      l_i = l_i * alpha + jnp.exp2(sink - reference)
      m_i, acc = joint, acc * _along_rows(alpha, acc.shape)
    empty = l_i == 0.0
    l_i = jnp.where(empty, 1.0, l_i)
    scale = dropout.kept_scale(self.params.loader.spec.dropout_prob)
    acc = acc * _along_rows(scale / l_i, acc.shape)
    rows = pl.ds(first, self.params.tiling.warpgroup_rows)
    out_smem = scratch.q_smem if scratch.out_smem is None else scratch.out_smem
    out_smem = out_smem.at[self.warpgroup]
    if out.dtype == out_smem.dtype:
      out_smem[...] = acc.astype(out_smem.dtype)
    else:  # as wide as its registers, and too wide for shared memory
      out.at[batch, rows, head][...] = acc
    lse_smem = scratch.lse_smem.at[self.warpgroup]
    lse_smem[...] = jnp.where(empty, -jnp.inf, m_i * (1 / LOG2E) + jnp.log(l_i))
    plgpu.commit_smem()
    if out.dtype == out_smem.dtype:
      plgpu.copy_smem_to_gmem(out_smem, out.at[batch, rows, head])
    plgpu.copy_smem_to_gmem(lse_smem, lse.at[batch, head, rows])
    plgpu.wait_smem_to_gmem(0)


def _along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[rows] -> `shape`."""
  return lax.broadcast_in_dim(x, shape, [0])
