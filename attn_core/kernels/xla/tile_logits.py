# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The logits of one tile: soft cap, bias and mask.

Tiles are those of `tile_ops`.
"""

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands
from attn_core.kernels.xla import tile_ops
from attn_core.kernels.xla.tile_ops import BlockedInputs, GridIndex, Index, Masked, Tile
from attn_core.masks import tile as tile_lib


def biased_scores(inputs: BlockedInputs, grid_index: GridIndex, rows: jax.Array, keys: jax.Array,
                  tile: Tile, *, transposed: bool = False) -> tuple[jax.Array, jax.Array | None]:
  """Returns scores of a tile after soft cap and bias, and their derivative (None: 1).

  Args:
    inputs: the attention.
    grid_index: batch row and heads.
    rows: scaled queries [step_heads, block_rows, D].
    keys: [step_heads, block_kv, D].
    tile: (query block, key block).
    transposed: whether the results are [step_heads, block_kv, block_rows].
  """
  spec, logit_scale = inputs.spec, tile_ops.scale_parts(inputs)[1]
  scores, slope = tile_ops.scores_of(inputs, rows, keys, transposed=transposed), None
  scores = scores if logit_scale == 1 else scores * jnp.asarray(logit_scale, inputs.dtype)
  if spec.logits_soft_cap is not None:
    capped = jnp.tanh(scores / spec.logits_soft_cap)
    scores, slope = capped * spec.logits_soft_cap, 1 - capped * capped
  if inputs.operands.bias is not None:
    scores = scores + bias_tile(inputs, grid_index, tile, transposed).astype(inputs.dtype)
  return scores, slope


def hide(inputs: BlockedInputs, grid_index: GridIndex, tile: tuple[Index, Index, Masked],
         logits: jax.Array, *, transposed: bool = False) -> jax.Array:
  """Returns the logits of a tile, -inf where hidden.

  Args:
    inputs: the attention.
    grid_index: batch row and heads.
    tile: (query block, key block, whether the mask must be evaluated).
    logits: [step_heads, block_rows, block_kv].
    transposed: whether they are [step_heads, block_kv, block_rows].
  """
  i, j, masked = tile
  def hidden(logits: jax.Array) -> jax.Array:
    mask, at = tile_ops.mask_tile(inputs, grid_index, (i, j), transposed)
    seen = mask.visible(at)
    if dense_operands.has_key_padding(inputs.sizes):
      seen = seen & (at.key_index < inputs.sizes.keys)
    return jnp.where(tile_ops.per_element(seen, logits.shape, inputs, transposed), logits, -jnp.inf)

  if isinstance(masked, bool):
    return hidden(logits) if masked else logits
  return lax.cond(masked, hidden, lambda logits: logits, logits)


def bias_tile(inputs: BlockedInputs, grid_index: GridIndex, tile: Tile,
              transposed: bool = False) -> jax.Array:
  """Returns the bias of a tile, broadcast to the scores' shape."""
  bias, sizes, group = inputs.operands.bias, inputs.sizes, inputs.group
  assert bias is not None
  starts, lengths = bias_slice(bias.shape, inputs, grid_index, tile)
  part = tile_lib.slice_at(bias, starts, lengths)[0]
  shape = (inputs.step_heads, sizes.block_q * group, sizes.block_kv)
  shape = (shape[0], shape[2], shape[1]) if transposed else shape
  return tile_ops.per_element(tile_ops.orient(part, inputs, transposed), shape, inputs, transposed)


def bias_slice(shape: tuple[int, ...], inputs: BlockedInputs, grid_index: GridIndex,
               tile: Tile) -> tuple[tuple[Index, ...], tuple[int, ...]]:
  """Returns (starts, lengths) of a tile in a bias [B or 1, H or 1, T or 1, S or 1]."""
  (i, j), sizes, group = tile, inputs.sizes, inputs.group
  starts = (grid_index.batch, grid_index.key_head * group, i * sizes.block_q, j * sizes.block_kv)
  lengths = (1, inputs.step_heads * group, sizes.block_q, sizes.block_kv)
  return (tuple(0 if n == 1 else start for n, start in zip(shape, starts)),
          tuple(1 if n == 1 else length for n, length in zip(shape, lengths)))


def add_bias_tile(inputs: BlockedInputs, grid_index: GridIndex, tile: Tile, d_bias: jax.Array,
                  d_logits: jax.Array) -> jax.Array:
  """Adds d_logits [step_heads, block_kv, block_rows] to the tile's part of d_bias."""
  group, sizes = inputs.group, inputs.sizes
  starts, lengths = bias_slice(d_bias.shape, inputs, grid_index, tile)
  part = d_logits.reshape(inputs.step_heads, sizes.block_kv, sizes.block_q, group)
  part = part.transpose(0, 3, 2, 1).reshape(1, -1, sizes.block_q, sizes.block_kv)
  part = part.sum([a for a in range(4) if lengths[a] == 1], keepdims=True)
  return tile_ops.write_at(
      d_bias, tile_lib.slice_at(d_bias, starts, lengths) + part.reshape(lengths), starts)
