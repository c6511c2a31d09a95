# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dense attention in plain XLA: all scores at once, the only kernel that can return weights.

Quadratic in memory. Differentiated by JAX.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from attn_core.kernels.common import (dense_operands, matmul_precision, nonfinite,
                                      online_softmax)
from attn_core.masks import dropout, materialize
from attn_core.score_mods import evaluate
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
  visible = materialize.visible(spec.mask, operands.mask, shape)
  if evaluate.has_function(spec.score_mod):
    logits = evaluate.apply_where(spec.score_mod, spec.mask, operands.mods, logits, operands.mask,
                                  visible)
  elif spec.has_score_mod:
    logits = evaluate.apply_to_all(spec.score_mod, operands.mods, logits,
                                   dense_operands.mask_of(operands, spec), operands.mask)
  logits = logits + jnp.where(finite, 0, jnp.nan).astype(logits.dtype)
  logits = jnp.where(visible, logits, -jnp.inf)

  weights, total, lse = _softmax(logits, operands.sinks)
  if spec.dropout_prob:
    assert operands.dropout_key is not None
    mask, at = materialize.expand(spec.mask, operands.mask, shape)
    keep = dropout.keep_mask(operands.dropout_key.T.reshape(2, -1, 1, 1, 1),
                             dropout.move_to_positions(mask, at), spec.dropout_prob)
    weights = jnp.where(keep, weights * dropout.kept_scale(spec.dropout_prob), 0)
  by_key_head = lambda x: x.reshape(batch, key_heads, -1, x.shape[-1])
  outputs = _weighted_mean(spec.precision, by_key_head(weights), by_key_head(total), value)
  outputs = outputs.reshape(batch, heads, length, -1).transpose(0, 2, 1, 3)
  outputs = outputs.astype(query.dtype)
  weights = checkpoint_name((weights / total).astype(value.dtype), "attn_weights")
  lse = lse.astype(at_least_float32(lse.dtype))
  if not spec.normalize_output:
    outputs = online_softmax.numerator(outputs, lse)
  return AttentionOutput(checkpoint_name(outputs, "attn_output"), weights,
                         checkpoint_name(lse, "attn_lse"))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weighted_mean(precision: jax.lax.PrecisionLike, weights: jax.Array, total: jax.Array,
                   value: jax.Array) -> jax.Array:
  """Returns weights . value / total, rounding the weights to the dtype of the values.

  Dividing the output instead of the weights saves a pass over all of them.

  Args:
    precision: of the product, as the caller asks for it.
    weights: [B, K, G * T, S], in the dtype of the softmax.
    total: [B, K, G * T, 1].
    value: [B, S, K, E].

  Returns:
    [B, K, G * T, E], in the dtype of the softmax.
  """
  return _product(precision, weights.astype(value.dtype), value, weights.dtype) / total


@_weighted_mean.defjvp
def _weighted_mean_jvp(precision: jax.lax.PrecisionLike, primals: tuple[jax.Array, ...],
                       tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """Computes the tangent so that its transpose rounds no cotangent of a weight.

  With d_p = d_out . value / total, the cotangents are d_p of the weights and -sum(weights * d_p) of
  the total. Where nearly all weight is on one key, they cancel in the logits, and what remains is
  precise only because both contain the same d_p: where JAX transposes the product of 16 bits it
  rounds d_p to them in the one and not in the other, and gradients are 2 to 200 times as imprecise
  as those of jax.nn.dot_product_attention (`gradient_precision_test`).
  """
  (weights, total, value), (d_weights, d_total, d_value) = primals, tangents
  out = _weighted_mean(precision, weights, total, value)
  d_weights = d_weights - weights * (d_total / total)
  d_out = (_tangent_product(precision, d_weights, value)
           + _product(precision, weights.astype(value.dtype), d_value, weights.dtype))
  return out, d_out / total


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _tangent_product(precision: jax.lax.PrecisionLike, d_weights: jax.Array,
                     value: jax.Array) -> jax.Array:
  """Returns d_weights . value, where d_weights may have more bits than value."""
  return _product(precision, d_weights, value, d_weights.dtype)


@_tangent_product.defjvp
def _tangent_product_jvp(precision: jax.lax.PrecisionLike, primals: tuple[jax.Array, ...],
                         tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """Computes the tangent so that its transpose has the precision of d_weights.

  The cotangent of d_value is a product of d_weights and the cotangent of the output, both of the
  dtype of the softmax, and JAX computes it at the precision of the product that it transposes.
  """
  (d_weights, value), (dd_weights, d_value) = primals, tangents
  return (_tangent_product(precision, d_weights, value),
          _tangent_product(precision, dd_weights, value)
          + _product(precision, d_weights, d_value.astype(d_weights.dtype), d_weights.dtype))


def _product(precision: jax.lax.PrecisionLike, weights: jax.Array, value: jax.Array,
             dtype: jnp.dtype) -> jax.Array:
  """Returns the product [B, K, G * T, E] of weights [B, K, G * T, S] and value [B, S, K, E]."""
  return jax.lax.dot_general(weights, value, (((3,), (1,)), ((0, 1), (0, 2))),
                             precision=matmul_precision.resolve(value.dtype, precision),
                             preferred_element_type=dtype)


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
