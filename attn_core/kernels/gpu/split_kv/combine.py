# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Combines the results of the splits of every row block by their logsumexp.

  lse = log(sum over splits of exp(lse_i)),   out = sum over splits of out_i * exp(lse_i - lse)

A thread block combines 64 columns of a row block, and loads the results of several splits together.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.kernels.gpu.split_kv.kernel import KernelParams

LOADED_SPLITS = 8  # loaded together


class _Inputs(NamedTuple):
  """References in global memory, or the arrays."""

  out: Any  # float32 [num_row_blocks, num_splits, padded_value_width, num_rows]
  lse: Any  # float32 [num_row_blocks, num_splits, num_rows]
  sinks: Any  # float32 [num_row_blocks, num_rows], or None
  first: Any  # int32 [num_row_blocks]: the first live split
  end: Any  # int32 [num_row_blocks]: behind the last live split


def combine(params: KernelParams, out: jax.Array, lse: jax.Array, sinks: jax.Array | None,
            live: tuple[jax.Array, jax.Array], dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Combines the results of all live splits of every row block.

  Args:
    params: of the kernel that computed the splits.
    out: float32 [num_row_blocks, num_splits, padded_value_width, num_rows].
    lse: float32 [num_row_blocks, num_splits, num_rows], times log2(e).
    sinks: float32 [num_row_blocks, num_rows], a logit per row without a value, or None.
    live: int32 [num_row_blocks] (first, end) of the splits that have results.
    dtype: of the output.

  Returns:
    (out [num_row_blocks, num_rows, E], lse float32 [num_row_blocks, num_rows] in natural units);
    0 and -inf, or the sink, for rows that attend to nothing.
  """
  num_row_blocks, num_splits, width, rows = out.shape
  chex.assert_shape(lse, (num_row_blocks, num_splits, rows))
  chex.assert_shape(live, (num_row_blocks,))
  out, lse = mosaic.call(
      functools.partial(_kernel, params),
      (jax.core.ShapedArray((num_row_blocks, rows, width), dtype),
       jax.core.ShapedArray((num_row_blocks, rows), jnp.float32)),
      _Inputs(out, lse, sinks, *live),
      (mosaic.operand_smem((rows, mosaic.WGMMA_ROWS), dtype), plgpu.SMEM((rows,), jnp.float32)),
      grid=num_row_blocks * (width // mosaic.WGMMA_ROWS), name="attn_core_combine")
  return out[..., :params.value_width], lse


def combine_exactly(params: KernelParams, out: jax.Array, lse: jax.Array, sinks: jax.Array | None,
                    live: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
  """Computes `combine` in float32 and in plain XLA, for an output that is not rounded.

  The kernel transposes an output of 16 bits while it stores it, which it cannot do with 32.
  """
  number = jnp.arange(out.shape[1], dtype=jnp.int32)[None, :, None]
  first, end = (x[:, None, None] for x in live)
  is_live = (number >= first) & (number < end)  # [num_row_blocks, num_splits, 1]
  # Other splits hold whatever the memory did.
  lse = jnp.where(is_live, lse / LOG2E, -jnp.inf)
  out = jnp.where(is_live[..., None], out, 0)
  every = lse if sinks is None else jnp.concatenate([lse, sinks[:, None]], 1)
  joint = jax.nn.logsumexp(every, axis=1)
  share = jnp.exp(lse - jnp.where(joint == -jnp.inf, 0, joint)[:, None])
  found = (out * share[:, :, None]).sum(1).swapaxes(1, 2)
  return found[..., :params.value_width], joint


def _kernel(params: KernelParams, inputs: _Inputs, outputs: tuple[Ref, ...],
            scratch: tuple[Ref, ...]) -> None:
  num_tiles = mosaic.int32(params.padded_value_width // mosaic.WGMMA_ROWS)
  block = lax.axis_index("block")
  row_block, tile = lax.div(block, num_tiles), lax.rem(block, num_tiles)
  columns = pl.ds(tile * mosaic.WGMMA_ROWS, mosaic.WGMMA_ROWS)
  first, end = inputs.first[row_block], inputs.end[row_block]
  shape = mosaic.WGMMA_ROWS, params.num_rows

  # 1. The running softmax over live splits, several at a time.
  def step(turn: jax.Array, running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    m_i, l_i, acc = running
    splits = [turn * LOADED_SPLITS + n for n in range(min(LOADED_SPLITS, params.num_splits))]
    clipped = [jnp.clip(n, first, end - 1) for n in splits]
    lses = [mosaic.load(inputs.lse.at[row_block, n], mosaic.COLUMN_LAYOUT) for n in clipped]
    outs = [mosaic.load(inputs.out.at[row_block, n, columns], mosaic.TILE_LAYOUT) for n in clipped]
    lses = [jnp.where((n >= first) & (n < end), x, -jnp.inf) for n, x in zip(splits, lses)]
    joint = functools.reduce(jnp.maximum, lses, m_i)
    # While a row has seen nothing, joint is -inf, and -inf - -inf would be NaN.
    reference = jnp.where(joint == -jnp.inf, 0.0, joint)
    alpha = jnp.exp2(m_i - reference)
    l_i, acc = l_i * alpha, acc * mosaic.broadcast_along(alpha, shape, 1)
    for x, y in zip(lses, outs):
      p = jnp.exp2(x - reference)
      l_i, acc = l_i + p, acc + y * mosaic.broadcast_along(p, shape, 1)
    return joint, l_i, acc

  start = (mosaic.full(-jnp.inf, (params.num_rows,), mosaic.COLUMN_LAYOUT),
           mosaic.full(0, (params.num_rows,), mosaic.COLUMN_LAYOUT),
           mosaic.full(0, shape, mosaic.TILE_LAYOUT))
  turn = lambda n: lax.div(n, mosaic.int32(LOADED_SPLITS))
  m_i, l_i, acc = lax.fori_loop(
      turn(first), turn(end + mosaic.int32(LOADED_SPLITS - 1)), step, start)

  # 2. Sinks join the denominator.
  if inputs.sinks is not None:
    sink = mosaic.load(inputs.sinks.at[row_block], mosaic.COLUMN_LAYOUT) * LOG2E
    joint = jnp.maximum(m_i, sink)
    reference = jnp.where(joint == -jnp.inf, 0.0, joint)
    alpha = jnp.exp2(m_i - reference)
    l_i = l_i * alpha + jnp.exp2(sink - reference)
    m_i, acc = joint, acc * mosaic.broadcast_along(alpha, shape, 1)

  # 3. Normalize and store.
  empty = l_i == 0.0
  l_i = jnp.where(empty, 1.0, l_i)
  out_smem, lse_smem = scratch
  mosaic.store_transposed(out_smem, acc * mosaic.broadcast_along(1 / l_i, shape, 1))
  lse_smem[...] = jnp.where(empty, -jnp.inf, (m_i + jnp.log(l_i) * LOG2E) * (1 / LOG2E))
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(out_smem, outputs[0].at[row_block, :, columns])
  pl.when(tile == 0)(lambda: plgpu.copy_smem_to_gmem(lse_smem, outputs[1].at[row_block]))
  plgpu.wait_smem_to_gmem(0)
