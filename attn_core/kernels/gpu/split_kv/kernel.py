# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Split-KV attention on Hopper: few queries, many keys, one thread block per split of keys.

  qk^T = K Q^T,   out^T = V^T P^T,   of 64 keys at a time
  lse = log(sum over splits of exp(lse_i)),   out = sum over splits of out_i * exp(lse_i - lse)

Keys are the rows of the products, so few queries cost little: each query is one column. A row block
is a key head of a batch row with up to 32 of its rows, the queries of all heads of a group. Of the
two warpgroups of a thread block, the producer copies blocks of keys and values into pipelines, as
many stages ahead as there are, and the consumer computes (`compute.ConsumerWarpgroup`). Where
possible a thread block takes less than half of a processor's shared memory, so that one copies
while another one begins or ends.

Latent rows are keys whose first columns are their values: one copy in shared memory is the operand
of both products. Two consumers, each with a row block, share it where there are more than 32 rows.
Latents of 8 bits have their rotary part apart; the consumers convert them together, for both
products.

The splits depend on the request alone, and `combine` adds them in their order: the results of a
request are the same bit for bit in any batch.
Flash-Decoding, https://pytorch.org/blog/flash-decoding/.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash.kernel_params import drain
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.kernels.gpu.split_kv import quantized_kv
from attn_core.types import cdiv

BLOCK_KV = mosaic.WGMMA_ROWS  # tokens of a block of keys
ROW_MULTIPLE = 8  # a row block has a multiple of this number of rows
MAX_ROWS = 32  # of a row block; more would not leave enough registers
SPLIT_BLOCKS = 8  # blocks of keys of a split, unless a cache has more than MAX_SPLITS such splits
MAX_SPLITS = 32
WIDTHS = (64, 80, 96, 128, 192, 256)  # D and E
LATENT_WIDTHS = (576, 512)  # of latent rows and of their values, at most
LATENT_MULTIPLE = 64  # both are multiples of it
MAX_STAGES = 6
MAX_CONSUMERS = 2
# Registers of the threads of both kinds of warpgroups, where there are two consumers.
REGISTERS = {"copy": 24, "compute": 240}
OTHER_BYTES = 3328  # for barriers, alignment, and reductions across warps
ALIGNMENT = 1024  # bytes; operands begin at multiples of it
FEWER_OTHER_BYTES = 3072  # the same where results are not copied
FEW_REDUCTION_BYTES = 1024  # for reductions of 32 rows across warps
QUANTIZED_BYTES = 2048  # in addition to OTHER_BYTES, for quantized keys and values
# The shared memory of a processor holds two thread blocks, each with 1024 bytes for the system.
HALF_SHARED_MEMORY = (mosaic.SHARED_MEMORY_BYTES + 1024) // 2 - 1024


class KernelParams(NamedTuple):
  """Static parameters of a split-KV kernel; hashable."""

  num_rows: int  # of a row block, which one consumer warpgroup computes
  width: int  # D
  value_width: int  # E
  padded_value_width: int  # E rounded up to rows of a product; the padding is unused
  num_stages: tuple[int, int]  # of the pipelines of keys and of values
  split_blocks: int  # blocks of keys of a split
  num_splits: int
  quantized: quantized_kv.QuantizedKV | None = None  # of int8 or fp8 keys and values
  latent: bool = False  # whether values are the first columns of their keys
  consumers: int = 1  # row blocks of a thread block, which share its keys
  has_score_mod: bool = False


class Scratch(NamedTuple):
  """Shared memory and barriers of a thread block; barriers have one entry for every stage.

  With latent rows, what has rows of queries begins with an axis of the consumers.
  """

  q_smem: Ref  # [num_rows, D]
  k_smem: Ref  # [num_stages, block_kv, D], of quantized latents [num_stages, block_kv, E]
  # [num_stages, block_kv, padded_value_width]; of quantized latents the rotary part
  # [num_stages, block_kv, D - E]; None: values are in k_smem.
  v_smem: Ref
  # float32 scales of quantized keys and values, [num_stages, block_kv] or
  # [num_stages, block_kv, scale_heads]; () where there are none.
  scales_smem: tuple[Ref, ...]
  dequantized_v_smem: Ref  # [block_kv, padded_value_width] of quantized values, or None
  p_smem: Ref  # [num_rows, block_kv]
  # float32 [padded_value_width, num_rows]; None: the output goes from registers to global memory
  out_smem: Ref
  lse_smem: Ref  # float32 [num_rows]; None where `out_smem` is
  q_barrier: Ref
  k_barriers: Ref
  v_barriers: Ref  # None with latent rows, and so is `v_consumed_barriers`
  k_consumed_barriers: Ref
  v_consumed_barriers: Ref
  meeting_barrier: Ref = None  # of all consumers; None: there is one

  def of_warpgroup(self, warpgroup: jax.Array, zero: jax.Array | None = None) -> "Scratch":
    """Returns the scratch with the parts of a consumer warpgroup, where there may be several.

    Args:
      warpgroup: int32, its number.
      zero: int32, the index of converted latents, whose addresses a step computes by it.
    """
    found = self._replace(**{name: getattr(self, name).at[warpgroup]
                             for name in ("q_smem", "p_smem")})
    return found if zero is None else found._replace(
        dequantized_v_smem=self.dequantized_v_smem.at[zero])


class BlockRange(NamedTuple):
  """Blocks of keys to compute, in ascending order; int32."""

  first: jax.Array | np.int32
  first_full: jax.Array | None  # blocks before it need the mask; None: there are none before it
  end_full: jax.Array  # blocks from it on need the mask, too
  end: jax.Array


class CopyTarget(NamedTuple):
  """Destination of a block of keys or of values in shared memory."""

  block: Ref  # [block_kv, D or E]
  scales: Ref | None
  barrier: Ref
  rope: Ref | None = None  # [block_kv, D - E], the destination of the rest of quantized latents


def padded_rows(count: int) -> int:
  """Returns the rows of a row block for `count` rows of a key head."""
  return min(cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE, MAX_ROWS)


def row_blocks(params: KernelParams, count: int) -> int:
  """Returns the row blocks of `count` rows, a multiple of the consumers of a thread block."""
  return cdiv(count, params.num_rows * params.consumers) * params.consumers


def first_row_block(params: KernelParams, number: jax.Array) -> jax.Array:
  """Returns the first row block of the number-th thread block."""
  return number if params.consumers == 1 else number * mosaic.int32(params.consumers)


def make_kernel_params(count: int, widths: tuple[int, int], num_blocks: int,
                       split_blocks: int | None,
                       quantized: quantized_kv.QuantizedKV | None = None, *,
                       latent_heads: int | None = None,
                       has_score_mod: bool = False) -> KernelParams:
  """Returns the parameters for `count` rows of a key head.

  Args:
    count: query tokens times heads of a group.
    widths: (D, E).
    num_blocks: the largest number of blocks of keys that a row block can have.
    split_blocks: blocks of keys of a split; None: chosen here.
    quantized: of int8 or fp8 keys and values.
    latent_heads: query heads of latent rows; None: keys and values are apart.
    has_score_mod: whether scores go through a score mod.
  """
  latent, consumers = latent_heads is not None, 1
  if latent and count > MAX_ROWS:
    consumers = MAX_CONSUMERS
  if split_blocks is None:
    # Results of a split are larger where more heads share its rows.
    least = SPLIT_BLOCKS * min(cdiv(latent_heads or 1, MAX_ROWS), MAX_CONSUMERS)
    split_blocks = max(least, cdiv(num_blocks, MAX_SPLITS))
  params = KernelParams(padded_rows(count), *widths, cdiv(widths[1], BLOCK_KV) * BLOCK_KV,
                        (1, 0 if latent else 1), split_blocks, cdiv(num_blocks, split_blocks),
                        quantized, latent, consumers, has_score_mod)
  limit = HALF_SHARED_MEMORY if fits_twice(params) else mosaic.SHARED_MEMORY_BYTES
  # One more stage of keys, one more of values, ...
  more = [(cdiv(total, 2), total // 2) for total in range(3, 2 * MAX_STAGES + 1)]
  for stages in more if not latent else [(n, 0) for n in range(2, MAX_STAGES + 1)]:
    larger = params._replace(num_stages=stages)
    if shared_memory(larger) > limit:
      break
    params = larger
  return params


def fits_twice(params: KernelParams) -> bool:
  """Returns whether a processor has registers for two thread blocks at once."""
  rows, width = params.num_rows, params.width
  fits = rows <= 16 and width <= 192 and params.value_width <= 128
  if params.has_score_mod:  # whose arrays take registers, too
    return fits and rows <= 8 and params.quantized is None
  if params.quantized is None or not fits:
    return fits
  # Quantized keys come to the products in registers.
  return rows <= 8 and width <= 128 if params.quantized.is_floating else rows * width <= 2048


def shared_memory(params: KernelParams) -> int:
  """Returns the bytes of shared memory that a thread block takes."""
  k_stages, v_stages = params.num_stages
  staged, other = BLOCK_KV * (k_stages * params.width + v_stages * params.padded_value_width), 0
  if params.latent and params.quantized is not None:
    of_token = params.value_width + 2 * (params.width - params.value_width)
    staged = BLOCK_KV * (k_stages * of_token // 2 + params.value_width)  # and converted latents
    other = (cdiv(k_stages * params.quantized.scale_bytes(BLOCK_KV), ALIGNMENT) * ALIGNMENT
             + reduction_bytes(params) - mosaic.REDUCTION_BYTES)
  rows = params.consumers * params.num_rows
  own = cdiv(2 * rows * params.width, ALIGNMENT) * ALIGNMENT + rows * 2 * BLOCK_KV
  if stores_registers(params):
    return 2 * staged + own + other + FEWER_OTHER_BYTES
  own += rows * 4 * (params.padded_value_width + 1)
  if params.quantized is None or params.latent:
    return 2 * staged + own + other + OTHER_BYTES
  staged += (k_stages + v_stages) * params.quantized.scale_bytes(BLOCK_KV)
  return (staged + 2 * BLOCK_KV * params.padded_value_width + own + OTHER_BYTES
          + QUANTIZED_BYTES)


def reduction_bytes(params: KernelParams) -> int:
  """Returns the bytes for reductions across warps: few, so that two stages of 8 bits fit."""
  return FEW_REDUCTION_BYTES if params.latent and params.quantized else mosaic.REDUCTION_BYTES


def stores_registers(params: KernelParams) -> bool:
  """Returns whether results go from registers to global memory, which whole lines of it allow."""
  return params.latent and params.num_rows == MAX_ROWS


def tokens_per_copy(params: KernelParams, values: bool, tokens: int) -> int:
  """Returns the tokens of keys or values of one copy, where `tokens` are contiguous in memory."""
  # A copy into the first columns of a stage has as many tokens as a tile has rows.
  padded = values and params.padded_value_width > params.value_width
  return min(tokens, mosaic.TMA_TOKENS) if padded else tokens


def scratch_types(params: KernelParams, dtype: DTypeLike, tokens: int = BLOCK_KV) -> Scratch:
  """Returns the shared memory and barriers of a thread block.

  Args:
    params: static parameters.
    dtype: of queries.
    tokens: of a block of keys that are contiguous in memory.
  """
  k_stages, v_stages = params.num_stages
  kv_dtype, dequantized = dtype, None
  scales: tuple[Any, ...] = ()
  if params.latent:
    return _latent_scratch_types(params, dtype, tokens)
  if params.quantized is not None:
    kv_dtype = params.quantized.dtype
    scales = tuple(plgpu.SMEM((n, *scale), jnp.float32) for n in params.num_stages
                   for scale in params.quantized.scale_shapes(BLOCK_KV))
    dequantized = mosaic.operand_smem(
        (BLOCK_KV, params.padded_value_width), dtype, params.value_width)
  copies = [BLOCK_KV // tokens_per_copy(params, values, tokens)
            + (BLOCK_KV // tokens if scales else 0) for values in (False, True)]
  full, consumed = ([plgpu.Barrier(num_arrivals=m, num_barriers=n)
                     for m, n in zip(arrivals, params.num_stages)]
                    for arrivals in (copies, (1, 1)))
  return Scratch(
      mosaic.operand_smem((params.num_rows, params.width), dtype),
      mosaic.operand_smem((k_stages, BLOCK_KV, params.width), kv_dtype),
      mosaic.operand_smem((v_stages, BLOCK_KV, params.padded_value_width), kv_dtype,
                          params.value_width),
      scales, dequantized,
      # Both operands of a product are swizzled in the same way.
      mosaic.operand_smem((params.num_rows, BLOCK_KV), dtype,
                          mosaic.tile_columns(params.value_width, dtype)),
      mosaic.operand_smem((params.padded_value_width, params.num_rows), jnp.float32),
      plgpu.SMEM((params.num_rows,), jnp.float32), plgpu.Barrier(), *full, *consumed)


def _latent_scratch_types(params: KernelParams, dtype: DTypeLike, tokens: int) -> Scratch:
  """Returns `scratch_types` where values are in the same memory as their keys."""
  consumers, (stages, _) = params.consumers, params.num_stages
  out = lse = rope = dequantized = None
  scales: tuple[Any, ...] = ()
  key, columns, arrivals = (params.width, dtype), params.width, BLOCK_KV // tokens
  if params.quantized is not None:
    key, arrivals = (params.value_width, params.quantized.dtype), 3 * arrivals
    columns = quantized_kv.LATENT_COLUMNS
    rope = mosaic.operand_smem((stages, BLOCK_KV, params.width - params.value_width), dtype)
    dequantized = mosaic.operand_smem((1, BLOCK_KV, params.value_width), dtype)
    scales = tuple(plgpu.SMEM((stages, *scale), jnp.float32)
                   for scale in params.quantized.scale_shapes(BLOCK_KV))
  if not stores_registers(params):
    out = mosaic.operand_smem((params.padded_value_width, params.num_rows), jnp.float32)
    lse = plgpu.SMEM((params.num_rows,), jnp.float32)
  return Scratch(
      mosaic.operand_smem((consumers, params.num_rows, params.width), dtype),
      mosaic.operand_smem((stages, BLOCK_KV, key[0]), key[1], columns), rope, scales, dequantized,
      mosaic.operand_smem((consumers, params.num_rows, BLOCK_KV), dtype), out, lse,
      plgpu.Barrier(num_arrivals=consumers),
      plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages), None,
      plgpu.Barrier(num_arrivals=consumers, num_barriers=stages), None,
      None if consumers == 1 else plgpu.Barrier(num_arrivals=consumers))


def split_range(params: KernelParams, split: jax.Array, whole: BlockRange) -> BlockRange:
  """Returns the blocks of one split of a row block; splits begin at multiples of their size."""
  first = split * mosaic.int32(params.split_blocks)
  end = jnp.minimum(first + mosaic.int32(params.split_blocks), whole.end)
  first = jnp.maximum(first, whole.first)
  within = lambda x: jnp.clip(x, first, jnp.maximum(first, end))
  return BlockRange(first, None if whole.first_full is None else within(whole.first_full),
                    within(whole.end_full), end)


def live_splits(params: KernelParams, first: jax.Array,
                end: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (first, end) of the splits with some of the blocks first..end - 1 of a row block.

  An empty range has none, wherever it is: nothing writes their results.
  """
  live = first < end
  return (jnp.where(live, first // params.split_blocks, 0).astype(jnp.int32),
          jnp.where(live, cdiv(end, params.split_blocks), 0).astype(jnp.int32))


def partial_results(params: KernelParams, num_row_blocks: int) -> tuple[Any, Any]:
  """Returns the types of (out, lse) of all splits; lse is times log2(e)."""
  leading = num_row_blocks, params.num_splits
  return (jax.core.ShapedArray((*leading, params.padded_value_width, params.num_rows), jnp.float32),
          jax.core.ShapedArray((*leading, params.num_rows), jnp.float32))


def begin_copies(params: KernelParams, scratch: Scratch, first: jax.Array,
                 rows: Callable[[jax.Array], Ref]) -> None:
  """Starts the copies of the queries of every consumer; the first work of the producer warpgroup.

  Args:
    params: static parameters.
    scratch: of the thread block.
    first: int32, the first row.
    rows: first row -> reference to the queries [num_rows, D] in global memory.
  """
  if not params.latent:
    plgpu.copy_gmem_to_smem(rows(first), scratch.q_smem, scratch.q_barrier)
    return
  if params.consumers > 1:
    plgpu.set_max_registers(REGISTERS["copy"], action="decrease")
  for n in range(params.consumers):
    plgpu.copy_gmem_to_smem(rows(first + n * params.num_rows), scratch.q_smem.at[n],
                            scratch.q_barrier)


def begin_consumer(params: KernelParams, warpgroup: jax.Array) -> jax.Array | None:
  """Returns the number of a consumer warpgroup, which takes its registers; None: see `Scratch`."""
  if params.consumers > 1:
    plgpu.set_max_registers(REGISTERS["compute"], action="increase")
  return warpgroup if params.latent else None


def copy_blocks(params: KernelParams, scratch: Scratch, blocks: BlockRange,
                locate: Callable[[jax.Array], Any],
                copy: Callable[[jax.Array, Any, bool, CopyTarget], None]) -> None:
  """Fills the pipelines with keys and values; the work of the producer warpgroup.

  Args:
    params: static parameters.
    scratch: of the thread block.
    blocks: which to copy.
    locate: n -> where the n-th block of the row block is in global memory.
    copy: copy(n, location, values, target) starts the copies of a block's keys or values.
  """
  pipelines = [
      (False, scratch.k_smem, scratch.k_barriers, scratch.k_consumed_barriers,
       params.num_stages[0]),
      (True, scratch.v_smem, scratch.v_barriers, scratch.v_consumed_barriers,
       params.num_stages[1])]
  if params.latent:
    del pipelines[1]

  def stage_of(smem: Ref, values: bool, slot: jax.Array) -> Ref:
    if not values or params.padded_value_width == params.value_width:
      return smem.at[slot]
    return smem.at[slot, :, pl.ds(0, params.value_width)]

  def fill(n: jax.Array, _: tuple) -> tuple:
    step, location = n - blocks.first, locate(n)
    for values, smem, full, consumed, num_stages in pipelines:
      slot = lax.rem(step, mosaic.int32(num_stages))
      pl.when(step >= num_stages)(functools.partial(plgpu.barrier_wait, consumed.at[slot]))
      scales = scratch.scales_smem[values].at[slot] if scratch.scales_smem else None
      rope = scratch.v_smem.at[slot] if params.latent and scratch.scales_smem else None
      copy(n, location, values, CopyTarget(
          stage_of(smem, values, slot), scales, full.at[slot], rope))
    return ()

  lax.fori_loop(blocks.first, blocks.end, fill, ())
  for *_, consumed, num_stages in pipelines:
    drain(consumed, num_stages, blocks.end - blocks.first)
