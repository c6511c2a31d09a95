# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward kernel on TPUs, with a naive softmax where that is safe.

  scores = K Q^T;  out^T = V^T P

Every step of the grid first computes the naive softmax (`forward_step`), which is faster, and
checks the result. Where it failed, the step is computed again by the safe softmax, from the state
before it, and so are the next steps, without a naive attempt: what large logits cost is the
difference between both, not their sum. A call of one step computes the safe one at once.
"""

import functools
from typing import Any, Callable

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, listed, nonfinite
from attn_core.kernels.common.contract import RemoteCopy, Residuals
from attn_core.kernels.tpu.flash import (
    call, patterns as patterns_lib, scalar_memory, schedule, score_tiles, softmax_choice,
    step_list, strip_loop, tile_inputs, tiling as tiling_lib)
from attn_core.kernels.tpu.flash.forward_step import ForwardReaders, ForwardStep, SoftmaxForm
from attn_core.kernels.tpu.flash.tile_inputs import KernelRefs
from attn_core.kernels.tpu.flash.tile_loop import (
    KernelParams, Strip, for_each_block, for_each_tile, head_by_head, loop, make_kernel_params)
from attn_core.types import AttentionSpec, BlockSizes, Operands

Ref = Any  # a Pallas reference


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.Kernel`."""
  return forward_with_remote_copy(operands, spec, block_sizes, None)[0]


def forward_with_remote_copy(
    operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
    transfer: RemoteCopy | None) -> tuple[Residuals, tuple[jax.Array, ...]]:
  """Runs `forward` and copies arrays to another device in the meantime.

  Args:
    operands: query [B, T, H, D], key [B, S, K, D], value [B, S, K, E] and the optional ones.
    spec: what is computed.
    block_sizes: None fields are chosen by `tiling`.
    transfer: the arrays to copy; None: none.

  Returns:
    (the residuals, the arrays received in place of those of `transfer`).
  """
  dense_operands.assert_shapes(operands)
  operands, spec = listed.of_local_rows(operands, spec)
  if not tiling_lib.is_naive_first(operands):
    finite = nonfinite.is_finite(operands.key, operands.value)
    key, value = nonfinite.propagate_nan(operands.key, operands.value, finite)
    operands = operands._replace(key=key, value=value)
  tiling = tiling_lib.make_tiling(operands, spec, block_sizes, backward=False)
  groups = scalar_memory.num_groups(operands, spec, tiling, by_keys=False,
                                    requested=block_sizes)
  def run(operands: Operands, arrays: tuple[()],
          transfer: RemoteCopy | None) -> tuple[Residuals, tuple[jax.Array, ...]]:
    del arrays
    return _forward_group(operands, spec, block_sizes, transfer, tiling)
  return scalar_memory.in_groups(run, operands, (), groups, transfer)


def _forward_group(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
                   transfer: RemoteCopy | None,
                   tiling: schedule.Tiling) -> tuple[Residuals, tuple[jax.Array, ...]]:
  """Runs the kernel on batch rows whose schedule fits in scalar memory."""
  batch, queries, heads, _ = operands.query.shape
  value_width = operands.value.shape[3]
  # 1. Schedule.
  mask = dense_operands.mask_of(operands, spec)
  # A bias may be a penalty that grows with distance, as slopes are. The keys nearest to a causal
  # row, which are its last ones, then keep its sum in the range of the naive softmax.
  steps, lists = schedule.build(
      mask, tiling, by_keys=False,
      descending=operands.bias is not None or score_tiles.has_slopes(spec))
  # 2. Inputs and outputs.
  inputs = tile_inputs.TileInputs(steps, lists, tiling, by_keys=False)
  arrays = operands.query, operands.key, operands.value
  blocks = (inputs.query_blocks(arrays[0].shape), *(inputs.key_blocks(x.shape) for x in arrays[1:]))
  query, key, value = (
      inputs.add_tokens(block, block.pack(x)) for block, x in zip(blocks, arrays))
  readers = ForwardReaders(query, key, value, _add_sinks(inputs, operands))
  result = inputs.query_blocks((batch, queries, heads, value_width))
  params = make_kernel_params(inputs, operands, spec, tiling,
                              patterns_lib.choose(steps, mask, tiling, by_keys=False),
                              steps.single_step_rows)
  rows = tiling.query_heads * tiling.block_q
  out_dtype = dense_operands.out_dtype(operands, spec)
  outputs = [
      call.Output(result.shape, out_dtype, result.block_shape, result.block_index),
      call.Output((batch, heads, 1, tiling.padded_queries), jnp.float32,
                  (1, tiling.query_heads, 1, tiling.block_q), lambda b, h, i, j: (b, h, 0, i))]
  # 3. The kernel, with m_i, l_i and acc in scratch memory.
  value_dtype, searches = operands.value.dtype, tiling_lib.is_naive_first(operands)
  exact = jnp.dtype(out_dtype).itemsize > value_dtype.itemsize
  grid = batch, heads // tiling.query_heads, tiling.halves, 1, inputs.num_steps
  # The only step of a call would take twice as long if it failed, and a quarter longer with a safe
  # softmax from the start.
  adaptive = searches and not (steps.single_step_rows and grid == (1, 1, 1, 1, 1))
  form = SoftmaxForm(not adaptive, False, adaptive, value_dtype if exact else None)
  buffers = 1 if steps.single_step_rows else tiling_lib.state_buffers(operands)
  (out, lse), received = call.call(
      functools.partial(_forward_kernel, params, inputs, readers, result, form), inputs, outputs,
      call.LaunchParams(
          grid,
          [(buffers, 1, rows), (buffers, 1, rows), (buffers, value_width, rows),
           *strip_loop.buffers(tiling), *params.mod_scratch],
          tiling_lib.vmem_limit(block_sizes, tiling, operands, backward=False),
          "attn_core_forward", scalar_words=softmax_choice.num_words(tiling) if searches else 0),
      transfer)
  return Residuals(result.unpack(out)[:, :queries], lse[:, :, 0, :queries]), received


def _add_sinks(inputs: tile_inputs.TileInputs,
               operands: Operands) -> Callable[[KernelRefs, Any, Any], jax.Array] | None:
  """Adds the sinks to scalar memory, float32; returns a reader of one, or None without sinks."""
  if operands.sinks is None:
    return None
  rows, heads = operands.sinks.shape
  ref = inputs.add_scalars(operands.sinks.astype(jnp.float32).reshape(-1))
  return lambda refs, b, head: ref(refs)[(b * heads if rows > 1 else 0) + head]


def _forward_kernel(params: KernelParams, inputs: tile_inputs.TileInputs, readers: ForwardReaders,
                    result: tile_inputs.TokenBlocks, form: SoftmaxForm, refs: KernelRefs,
                    outputs: tuple[Ref, ...], scratch: tuple[Ref, ...]) -> None:
  """Computes one block of queries against one block of keys, for the heads of a step.

  Args:
    params, inputs, readers, result, form: static.
    refs, outputs: of the kernel.
    scratch: m_i, l_i, acc, those of `strip_loop` and of the score mod, and the words of the choice
      of the softmax, unless all keys and values are finite.
  """
  grid, kinds, flags = inputs.step(refs.scalars, refs.program_ids)
  first = 3 + len(strip_loop.buffers(params.tiling))  # of the score mod
  words = scratch[first + len(params.mod_scratch):]
  refs = refs._replace(scratch=scratch[first:first + len(params.mod_scratch)])
  params.prepare(refs, grid, kinds)
  step = ForwardStep(params, readers, result, refs, grid, form, outputs, scratch[:3], 0, 0,
                     scratch[3:first])
  is_first = (flags & step_list.FIRST) != 0
  if not words:
    _fixed_step(step, kinds, is_first, (flags & step_list.LAST) != 0)
    return
  choice = softmax_choice.SoftmaxChoice(words[0])
  num_groups = step.result.heads // params.tiling.query_heads
  choice.begin_step(refs.program_ids, (num_groups, params.tiling.halves, refs.num_steps), is_first)
  choice.look_at_block(grid.key_block, kinds != 0, step.block_is_large, step.block_is_nonfinite)
  if params.single_step_rows:
    _only_step(step, choice, kinds)
  else:
    _adaptive_step(step, choice, kinds, flags)


def _fixed_step(step: ForwardStep, kinds: jax.Array, is_first: jax.Array,
                is_last: jax.Array) -> None:
  """Computes a step with the form of the softmax that `step` has."""
  params = step.params
  if params.single_step_rows:
    step.fold_only_block(params.strips(step.grid, params.patterns.kinds[0]))
    return
  pl.when(is_first)(lambda: step.start(step.source))
  for_each_tile(params, step.grid, kinds, step.fold_block)
  pl.when(is_last)(lambda: _finish(step))


def _only_step(step: ForwardStep, choice: softmax_choice.SoftmaxChoice, kinds: jax.Array) -> None:
  """Computes a step that has all blocks of its rows."""
  params = step.params
  strips = params.strips(step.grid, params.patterns.kinds[0])

  if step.form.safe:
    pl.when(jnp.logical_not(choice.is_shielded))(lambda: step.fold_only_block(strips))
  else:
    @pl.when(choice.tries_naive)
    def _() -> None:
      step.fold_only_block(strips)
      choice.after_naive(step.naive_failed())

    @pl.when(choice.is_safe)
    def _() -> None:
      step.safely().fold_only_block(strips)

  @pl.when(choice.is_shielded)
  def _() -> None:
    shielded = step.safely(shielded=True)
    shielded.start(shielded.target)
    loop(params, step.grid, kinds, shielded.fold_block, always_masked=True)
    _finish(shielded)


def _adaptive_step(step: ForwardStep, choice: softmax_choice.SoftmaxChoice, kinds: jax.Array,
                   flags: jax.Array) -> None:
  """Computes a step that continues the running softmax of its rows.

  The state before the step stays in its buffer, so that the step can be computed again.
  """
  params, grid, buffer = step.params, step.grid, choice.buffer
  step = step._replace(source=buffer, target=1 - buffer)

  # 1. Start the running softmax in the first step of a block of queries.
  pl.when((flags & step_list.FIRST) != 0)(lambda: step.start(step.source))

  # 2. Fold in the visible tiles of the block of keys: naively,
  @pl.when(choice.tries_naive)
  def _() -> None:
    def at_once(strips: list[Strip]) -> None:
      step.fold_block(strips)
      choice.after_naive(step.naive_failed())
    def one_by_one() -> None:
      step.keep_others([])
      loop(params, grid, kinds, step.in_place().fold_block)
      choice.after_naive(step.naive_failed())
    for_each_block(params, grid, kinds, at_once, one_by_one)

  # safely, if that failed now or before,
  @pl.when(choice.is_safe)
  def _() -> None:
    uncut = params._replace(patterns=params.patterns.uncut)  # half as much code
    fold = step.safely().fold_block
    for_each_block(uncut, grid, kinds, lambda strips: head_by_head(params, strips, fold),
                   choice.shield)

  # and tile by tile, if a key or value is not finite or the tiles are of no pattern.
  @pl.when(choice.is_shielded & (kinds != 0))
  def _() -> None:
    shielded = step.safely(shielded=True)
    shielded.keep_others([])
    loop(params, grid, kinds, shielded.in_place().fold_block, always_masked=True)

  pl.when(kinds != 0)(choice.swap_buffers)

  # 3. Normalize and write in the last step of a block of queries.
  @pl.when((flags & step_list.LAST) != 0)
  def _() -> None:
    _finish(step._replace(target=choice.buffer))


def _finish(step: ForwardStep) -> None:
  """Normalizes and writes the results of all heads."""
  for head in step.heads:
    step.finish(head)
