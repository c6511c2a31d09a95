# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dense attention in plain XLA: all scores at once, the only kernel that can return weights.

Quadratic in memory. Differentiated by JAX.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from attn_core.kernels.common import (dense_operands, matmul_precision, nonfinite,
                                      online_softmax)
from attn_core.masks import dropout, materialize
from attn_core.types import AttentionOutput, AttentionSpec, Operands, at_least_float32


def attend(operands: Operands, spec: AttentionSpec) -> AttentionOutput:
  """Computes attention.

  Args:
    operands: the arrays.
    spec: what is computed.

  Returns:
    outputs [B, T, H, E], weights [B, H, T, S] after dropout, lse [B, H, T].
  """
  dense_operands.assert_operands(operands)
  query, finite_query = nonfinite.mask_nonfinite_rows(operands.query)
  key, value, finite = nonfinite.mask_nonfinite_pairs(operands.key, operands.value)
  batch, length, heads, _ = query.shape
  keys, key_heads = key.shape[1:3]
  shape = (batch, heads, length, keys)
  finite = jnp.repeat(finite.transpose(0, 2, 3, 1), heads // key_heads, 1)  # [B, H, 1, S]
  finite = finite & finite_query.transpose(0, 2, 1, 3)
  # The query heads of a key head become more rows: one plain product per key head.
  rows = query.transpose(0, 2, 1, 3).reshape(batch, key_heads, -1, query.shape[3])
  precision = matmul_precision.resolve(query.dtype, spec.precision)
  logits = jnp.einsum("bkrd,bskd->bkrs", rows, key, precision=precision,
                      preferred_element_type=spec.softmax_dtype).reshape(shape)
  logits = logits * jnp.asarray(spec.softmax_scale, logits.dtype)
  if spec.logits_soft_cap is not None:
    logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
  if operands.bias is not None:
    logits = logits + operands.bias.astype(logits.dtype)
  logits = logits + jnp.where(finite, 0, jnp.nan).astype(logits.dtype)
  visible = materialize.visible(spec.mask, operands.mask, shape)
  logits = jnp.where(visible, logits, -jnp.inf)

  weights, total, lse = _softmax(logits, operands.sinks)
  if spec.dropout_prob:
    assert operands.dropout_key is not None
    mask, at = materialize.expand(spec.mask, operands.mask, shape)
    keep = dropout.keep_mask(operands.dropout_key.T.reshape(2, -1, 1, 1, 1),
                             dropout.move_to_positions(mask, at), spec.dropout_prob)
    weights = jnp.where(keep, weights * dropout.kept_scale(spec.dropout_prob), 0)
  # Dividing the output instead of the weights saves a pass over all of them.
  rows = weights.astype(value.dtype).reshape(batch, key_heads, -1, keys)
  outputs = jnp.einsum("bkrs,bske->bkre", rows, value, precision=precision,
                       preferred_element_type=spec.softmax_dtype)
  outputs = (outputs.reshape(batch, heads, length, -1) / total).transpose(0, 2, 1, 3)
  outputs = outputs.astype(query.dtype)
  weights = checkpoint_name((weights / total).astype(value.dtype), "attn_weights")
  lse = lse.astype(at_least_float32(lse.dtype))
  if not spec.normalize_output:
    outputs = online_softmax.numerator(outputs, lse)
  return AttentionOutput(checkpoint_name(outputs, "attn_output"), weights,
                         checkpoint_name(lse, "attn_lse"))


def _softmax(logits: jax.Array,
             sinks: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes the softmax over the last axis of [B, H, T, S]; sinks [B or 1, H] or None.

  Returns:
    (weights [B, H, T, S], their divisor [B, H, T, 1], lse [B, H, T]). A row of -inf has weights 0
    and lse -inf, with gradients 0.
  """
  m_i = logits.max(-1, keepdims=True)
  if sinks is not None:
    sinks = sinks[..., None, None].astype(logits.dtype)
    m_i = jnp.maximum(m_i, sinks)
  m_i = jax.lax.stop_gradient(jnp.where(m_i == -jnp.inf, 0, m_i))
  weights = jnp.exp(logits - m_i)
  l_i = weights.sum(-1, keepdims=True)
  if sinks is not None:
    l_i = l_i + jnp.exp(sinks - m_i)
  empty = l_i == 0
  l_i = jnp.where(empty, 1, l_i)
  return weights, l_i, jnp.where(empty, -jnp.inf, jnp.log(l_i) + m_i)[..., 0]
