# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Delta of the backward where one block holds all keys, and these are few: as a sum of its tiles.

Delta is sum(P * dP) over the keys of a row, which equals sum(d_out * out).
"""

import jax
import jax.numpy as jnp

from attn_core.kernels.common.backward import finite_lse
from attn_core.kernels.common.contract import BackwardResiduals
from attn_core.kernels.xla import plain, tile_ops


def sums_delta(inputs: tile_ops.BlockedInputs, residuals: BackwardResiduals) -> bool:
  """Returns whether a tile computes delta as sum(P * dP), which takes all keys of its rows.

  Where nearly all weight is on one key, dP of that key and delta cancel, and so do their rounding
  errors if delta is a sum of the dP themselves. Those of sum(d_out * out) remain: in float32 a
  multiple of the gradient's own error in 16 bits, where no row has enough keys to share its weight.
  """
  return (residuals.out is not None and inputs.sizes.num_key_blocks == 1
          and inputs.sizes.block_kv <= plain.FEW and inputs.operands.query.dtype.itemsize < 4)


def weighted_sum(inputs: tile_ops.BlockedInputs, grid_index: tile_ops.GridIndex,
                  weights: jax.Array, d_weights: jax.Array, lse: jax.Array) -> jax.Array:
  """Returns sum(P * dP) over all keys, [step_heads, 1, block_rows].

  The sum of the P is known, 1 without sinks, and the error of the lse is taken out of it. Where
  sinks have half of the weight, nothing cancels, and little is known.

  Args:
    inputs: with all keys in one block.
    grid_index: of the rows.
    weights: P, [step_heads, block_kv, block_rows].
    d_weights: dP.
    lse: [step_heads, 1, block_rows].
  """
  total, expected = weights.sum(1, keepdims=True), jnp.ones_like(lse)
  sinks = tile_ops.row_sinks(inputs, grid_index)
  if sinks is not None:
    expected = expected - jnp.exp(sinks.swapaxes(1, 2) - finite_lse(lse))
  one, known = jnp.ones_like(total), total > 0.5
  factor = jnp.where(known, expected, one) / jnp.where(known, total, one)
  return (weights * d_weights).sum(1, keepdims=True) * factor
