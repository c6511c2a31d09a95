# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The consumer warpgroup of a split-KV kernel: folds blocks of keys and values into a softmax.

Tiles are [block_kv, num_rows]: keys along the rows, queries along the columns.
"""

import functools
from typing import Any, Callable, Iterator, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.gpu import mosaic, wgmma
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.kernels.gpu.split_kv import quantized_kv
from attn_core.kernels.gpu.split_kv.kernel import BLOCK_KV, BlockRange, KernelParams, Scratch

Slots = tuple[jax.Array, jax.Array]  # int32 stages of keys and of values


class _Running(NamedTuple):
  """The softmax of the keys seen so far; see `kernels.common.online_softmax.Running`."""

  m_i: jax.Array  # [num_rows]: logits times log2(e); -inf before the first visible key
  l_i: jax.Array  # [block_kv, num_rows]: to be summed over block_kv
  acc: jax.Array  # [padded_value_width, num_rows]


class _Scores(NamedTuple):
  """Scores of a block of keys, and what its values contribute besides themselves."""

  qk: jax.Array  # [block_kv, num_rows]
  # [block_kv]: NaN for keys whose values are non-finite, else 0; None: nothing is masked.
  nan_keys: jax.Array | None
  value_scales: jax.Array | None  # [block_kv]: factors of P; None: 1


class ConsumerWarpgroup(NamedTuple):
  """Computes the results of a split from the blocks in the pipelines."""

  params: KernelParams
  logits: Logits
  tile_inputs: TileInputs  # of `logits`
  tile: Callable[[jax.Array], Any]  # n -> tile of `logits`: rows, and the n-th block of keys
  scratch: Scratch
  interpret: bool  # whether the kernel is interpreted
  scales: quantized_kv.ScaleReader | None = None  # of int8 or fp8 keys and values
  warpgroup: jax.Array | None = None  # the number of this consumer of latent rows

  def run(self, blocks: BlockRange, out: Ref, lse: Ref) -> None:
    """Computes all blocks and copies out [padded_value_width, num_rows] and lse [num_rows]."""
    params = self.params
    running = _Running(
        mosaic.full(-jnp.inf, (params.num_rows,), mosaic.COLUMN_LAYOUT),
        mosaic.full(0, (BLOCK_KV, params.num_rows), mosaic.TILE_LAYOUT),
        mosaic.full(0, (params.padded_value_width, params.num_rows), mosaic.TILE_LAYOUT))
    plgpu.barrier_wait(self.scratch.q_barrier)
    bounds = blocks.first, blocks.first_full, blocks.end_full, blocks.end
    if blocks.first_full is None:
      bounds = None, blocks.first, blocks.end_full, blocks.end
    for first, end, masked in zip(bounds, bounds[1:], (True, False, True)):
      if first is not None:
        running = lax.fori_loop(first, end, functools.partial(
            lambda masked, n, x: self.own(n).step(n, n - blocks.first, x, masked), masked), running)
    self.own().write(running, out, lse)

  def own(self, n: jax.Array | None = None) -> "ConsumerWarpgroup":
    """Returns the same with this consumer's part of the scratch, to use for the n-th block."""
    if self.warpgroup is None:
      return self
    numbers = self.warpgroup, *(() if self.scales is None else (jnp.zeros_like(self.warpgroup),))
    if n is not None:
      numbers = wgmma.recompute_each_step(numbers, n)
    return self._replace(scratch=self.scratch.of_warpgroup(*numbers))

  def step(self, n: jax.Array, step: jax.Array, running: _Running, masked: bool) -> _Running:
    """Folds in the n-th block of the row block, in the step-th step of the split."""
    scratch, unit = self.scratch, self.logits.unit
    slots = tuple(lax.rem(step, mosaic.int32(stages)) for stages in self.params.num_stages
                  if stages)

    # 1. qk = K Q^T, and NaN for non-finite keys.
    plgpu.barrier_wait(scratch.k_barriers.at[slots[0]])
    find = self.scores if self.scales is None else self.quantized_scores
    if self.params.latent:
      find = self.latent_scores if self.scales is None else self.quantized_latent_scores
    qk, nan_keys, value_scales = find(slots, masked)
    if not self.params.latent:
      plgpu.barrier_arrive(scratch.k_consumed_barriers.at[slots[0]])
    qk = qk + 0.0 * qk  # NaN where not finite
    if nan_keys is not None:
      qk = qk + mosaic.broadcast_along(nan_keys, qk.shape, 0)

    # 2. Logits and softmax.
    reads_tile = masked or self.logits.reads_tile
    logits, _ = self.logits.compute(
        self.tile_inputs, self.tile(n) if reads_tile else None, qk, masked)
    m_i = jnp.maximum(running.m_i, self.in_turn(lambda: logits.max(axis=0)) * unit)
    # While a row has seen nothing, m_i is -inf, and -inf - -inf would be NaN.
    reference = jnp.where(m_i == -jnp.inf, 0.0, m_i)
    p = jnp.exp2(logits * unit - mosaic.broadcast_along(reference, logits.shape, 1))
    alpha = jnp.exp2(running.m_i - reference)
    scaled = p if value_scales is None else p * mosaic.broadcast_along(value_scales, p.shape, 0)
    mosaic.store_transposed(scratch.p_smem, scaled)
    plgpu.commit_smem()
    self.meet()

    # 3. V^T P^T, while the accumulators are rescaled.
    if self.params.latent:
      l_i = running.l_i * mosaic.broadcast_along(alpha, running.l_i.shape, 1) + p
      acc = running.acc * mosaic.broadcast_along(alpha, running.acc.shape, 1)
      # The sums alone take half of the registers, so products add to them.
      acc = wgmma.added(acc, self.latent_values(slots[0]).T, scratch.p_smem.T,
                        interpret=self.interpret)
      if self.scales is None:
        plgpu.barrier_arrive(scratch.k_consumed_barriers.at[slots[0]])
      return _Running(m_i, l_i, acc)
    v_smem = scratch.dequantized_v_smem
    if self.scales is None:
      v_smem = scratch.v_smem.at[slots[1]]
      if not masked:
        plgpu.barrier_wait(scratch.v_barriers.at[slots[1]])
    def rescale() -> tuple[jax.Array, jax.Array]:
      return (running.l_i * mosaic.broadcast_along(alpha, running.l_i.shape, 1) + p,
              running.acc * mosaic.broadcast_along(alpha, running.acc.shape, 1))
    pv, (l_i, acc) = wgmma.matmul_overlapped(v_smem.T, scratch.p_smem.T, rescale)
    if self.scales is None:
      plgpu.barrier_arrive(scratch.v_consumed_barriers.at[slots[1]])
    return _Running(m_i, l_i, acc + pv)

  def scores(self, slots: Slots, masked: bool) -> _Scores:
    """Computes K Q^T; masks non-finite values where some of the block is hidden."""
    scratch, (k_slot, v_slot) = self.scratch, slots
    qk, _ = wgmma.matmul_overlapped(scratch.k_smem.at[k_slot], scratch.q_smem.T)
    if not masked:
      return _Scores(qk, None, None)
    plgpu.barrier_wait(scratch.v_barriers.at[v_slot])
    return _Scores(qk, self.mask_nonfinite(scratch.v_smem.at[v_slot]), None)

  def latent_values(self, slot: jax.Array) -> Ref:
    """Returns a reference to the values [block_kv, E] of a stage of latent rows, in 16 bits."""
    if self.scales is not None:
      return self.scratch.dequantized_v_smem
    return self.scratch.k_smem.at[slot, :, pl.ds(0, self.params.value_width)]

  def latent_scores(self, slots: tuple[jax.Array, ...], masked: bool) -> _Scores:
    """Computes the same where values are parts of their keys, and NaN reaches scores by itself."""
    scratch, slot = self.scratch, slots[0]
    qk, _ = wgmma.matmul_overlapped(scratch.k_smem.at[slot], scratch.q_smem.T)
    if masked:
      self.meet()  # all consumers have multiplied what is replaced
      self.mask_nonfinite(self.latent_values(slot))
      self.meet()
    return _Scores(qk, None, None)

  def quantized_latent_scores(self, slots: tuple[jax.Array, ...], masked: bool) -> _Scores:
    """Computes the same for latents of 8 bits, which are converted for both products."""
    scratch, (slot,), latent = self.scratch, slots, self.params.value_width
    self.convert_latents(slot)
    value = self.latent_values(slot)
    qk, _ = wgmma.matmul_overlapped(value, scratch.q_smem.at[:, pl.ds(0, latent)].T)
    scales = self.scales.per_token(False, slot)
    qk = qk * mosaic.broadcast_along(scales, qk.shape, 0)
    rest, _ = wgmma.matmul_overlapped(
        scratch.v_smem.at[slot], scratch.q_smem.at[:, pl.ds(latent, self.params.width - latent)].T)
    plgpu.barrier_arrive(scratch.k_consumed_barriers.at[slot])
    if masked:
      scales = jnp.where(0.0 * scales == 0.0, scales, 0.0)
      if self.scales.quantized.is_floating:
        self.meet()  # all consumers have multiplied what is replaced
        self.mask_nonfinite(value)
        self.meet()
    return _Scores(qk + rest, None, scales)

  def convert_latents(self, slot: jax.Array) -> None:
    """Converts a stage of 8-bit latents; each of several consumers takes some of the columns."""
    stage, target = self.scratch.k_smem.at[slot], self.scratch.dequantized_v_smem
    # Until all warps are past the last product of values, it may read what is written now.
    plgpu.commit_smem()
    self.meet()
    width = quantized_kv.LATENT_COLUMNS
    consumers = mosaic.int32(self.params.consumers)
    def columns(n: jax.Array, _: tuple) -> tuple:
      first = (n * consumers + self.warpgroup) * width
      for start, x in quantized_kv.load_converted_at(stage, first, width, target.dtype):
        target[:, pl.ds(start, x.shape[1])] = x
      return ()
    number = mosaic.int32(self.params.value_width // width)
    number = lax.div(number - self.warpgroup + (consumers - 1), consumers)
    lax.fori_loop(mosaic.int32(0), number, columns, ())
    plgpu.commit_smem()
    self.meet()

  def meet(self) -> None:
    """Waits for the other consumers, if there are any."""
    if self.scratch.meeting_barrier is not None:
      plgpu.barrier_arrive(self.scratch.meeting_barrier)
      plgpu.barrier_wait(self.scratch.meeting_barrier)

  def in_turn(self, reduce: Callable[[], jax.Array]) -> jax.Array:
    """Returns reduce(), a sum or a maximum over keys, in one warpgroup after the other.

    The warps of a warpgroup exchange their parts in shared memory that all warpgroups share, so the
    second one waits until the first has its result. Each meets the other once; before the next
    call, both must `meet` again.
    """
    if self.scratch.meeting_barrier is None:
      return reduce()
    pl.when(self.warpgroup == 1)(self.meet)
    result = reduce()
    pl.when(self.warpgroup == 0)(self.meet)
    return result

  def quantized_scores(self, slots: Slots, masked: bool) -> _Scores:
    """Does the same for quantized keys, and converts the values."""
    scratch, scales, (k_slot, v_slot) = self.scratch, self.scales, slots
    def pieces() -> Iterator[tuple[jax.Array, Ref]]:
      for columns, x in quantized_kv.load_converted(
          scratch.k_smem.at[k_slot], self.params.width, scratch.q_smem.dtype):
        yield x, scratch.q_smem.at[:, columns].T
    qk = wgmma.matmul_registers(
        (BLOCK_KV, self.params.num_rows), pieces(), interpret=self.interpret)
    nan_keys, value_scales = self.convert_values(v_slot, masked)
    key_scales = scales.per_token(False, k_slot)
    qk = qk * (scales.per_tensor(False) if key_scales is None
               else mosaic.broadcast_along(key_scales, qk.shape, 0))
    return _Scores(qk, nan_keys, value_scales)

  def convert_values(self, slot: jax.Array,
                     masked: bool) -> tuple[jax.Array | None, jax.Array | None]:
    """Converts a stage of quantized values; returns (nan_keys, value_scales) of `_Scores`."""
    scratch, scales = self.scratch, self.scales
    plgpu.barrier_wait(scratch.v_barriers.at[slot])
    # Until all warps are past the last product of values, it may read what is written now.
    plgpu.commit_smem()
    for columns, x in quantized_kv.load_converted(
        scratch.v_smem.at[slot], self.params.value_width, scratch.dequantized_v_smem.dtype):
      scratch.dequantized_v_smem[:, columns] = x
    nan_keys, value_scales = None, scales.per_token(True, slot)
    plgpu.barrier_arrive(scratch.v_consumed_barriers.at[slot])
    if masked and scales.quantized.is_floating:
      plgpu.commit_smem()
      nan_keys = self.mask_nonfinite(scratch.dequantized_v_smem)
    if masked and value_scales is not None:
      zero_or_nan = 0.0 * value_scales
      value_scales = jnp.where(zero_or_nan == 0.0, value_scales, 0.0)
      nan_keys = zero_or_nan if nan_keys is None else nan_keys + zero_or_nan
    return nan_keys, value_scales

  def mask_nonfinite(self, v_smem: Ref) -> jax.Array:
    """Replaces non-finite values by 0; returns [block_kv], NaN for their keys and 0 for others.

    0 * NaN is NaN, and would reach queries from which the key is hidden. Each of several consumers
    takes some of the columns.

    Args:
      v_smem: reference [block_kv, padded_value_width].
    """
    def columns(n: jax.Array, nan_keys: jax.Array) -> jax.Array:  # few at a time saves registers
      if self.warpgroup is not None:
        n = n * self.params.consumers + self.warpgroup
      part = v_smem.at[:, pl.ds(n * BLOCK_KV, BLOCK_KV)]
      value = mosaic.load(part, mosaic.TILE_LAYOUT).astype(jnp.float32)
      zero_or_nan = self.zero_padding(0.0 * value, 1, n * BLOCK_KV)
      part[...] = jnp.where(zero_or_nan == 0.0, value, 0.0).astype(v_smem.dtype)
      return nan_keys + zero_or_nan.sum(axis=1)
    number = mosaic.int32(self.params.padded_value_width // BLOCK_KV)
    if self.warpgroup is not None:  # of an odd number the first consumer takes one more
      consumers = mosaic.int32(self.params.consumers)
      number = lax.div(number - self.warpgroup + (consumers - 1), consumers)
    nan_keys = lax.fori_loop(mosaic.int32(0), number, columns,
                             mosaic.full(0, (BLOCK_KV,), mosaic.ROW_LAYOUT))
    plgpu.commit_smem()
    return nan_keys

  def zero_padding(self, x: jax.Array, axis: int, first: Any) -> jax.Array:
    """Returns x with zeros beyond E along an axis, whose indices begin at `first`."""
    params = self.params
    if params.padded_value_width == params.value_width:
      return x
    index = plgpu.broadcasted_iota(
        jnp.int32, (x.shape[axis],), 0,
        layout=mosaic.COLUMN_LAYOUT if axis else mosaic.ROW_LAYOUT)
    index = mosaic.broadcast_along(lax.optimization_barrier(index + first), x.shape, axis)
    return jnp.where(index < mosaic.int32(params.value_width), x, 0.0)

  def write(self, running: _Running, out: Ref, lse: Ref) -> None:
    """Normalizes and copies the results of a split."""
    scratch, (m_i, l_i, acc) = self.scratch, running
    acc, l_i = self.zero_padding(acc, 0, 0), self.in_turn(functools.partial(l_i.sum, axis=0))
    scale = None if self.scales is None else self.scales.per_tensor(True)
    if scale is not None:  # even a non-finite scale leaves rows that attend to nothing at 0
      scale = jnp.where(l_i == 0.0, 0.0, jnp.full_like(l_i, scale))
      acc = acc * mosaic.broadcast_along(scale, acc.shape, 1)
    if not self.params.latent:  # whose values are NaN where the scores of their keys are
      # A row that attends to a non-finite value is NaN in all its columns, and in its lse.
      l_i = l_i + 0.0 * acc.sum(axis=0)
    empty = l_i == 0.0
    l_i = jnp.where(empty, 1.0, l_i)
    is_direct = scratch.out_smem is None  # the queries and the pipeline take its place
    out_ref, lse_ref = (out, lse) if is_direct else (scratch.out_smem, scratch.lse_smem)
    out_ref[...] = acc * mosaic.broadcast_along(1 / l_i, acc.shape, 1)
    lse_ref[...] = jnp.where(empty, -jnp.inf, m_i + jnp.log(l_i) * LOG2E)
    if is_direct:
      return
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.out_smem, out)
    plgpu.copy_smem_to_gmem(scratch.lse_smem, lse)
    plgpu.wait_smem_to_gmem(0)
