# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Definition of attention, written to be read: dense, one formula per line, any float dtype.

  scores[b, h, t, s] = soft_cap(scale * query[b, t, h] . key[b, s, h // G]) + bias[b, h, t, s]
  soft_cap(x)        = c * tanh(x / c)
  logits             = score_mod(scores)
  weights            = exp(logits - lse) where visible, else 0
  lse[b, h, t]       = log(sum over visible s of exp(logits) + exp(sink[h]))
  output[b, t, h]    = sum over s of keep * weights / (1 - dropout_prob) * value[b, s, h // G]

Every kernel is compared with it in float64 (`jax.enable_x64`); its gradients come from JAX. It does
not import kernels.
"""

import jax
import jax.numpy as jnp

from attn_core.masks import dropout, materialize
from attn_core.score_mods import evaluate
from attn_core.types import AttentionOutput, AttentionSpec, Operands


def attention(operands: Operands, spec: AttentionSpec) -> AttentionOutput:
  """Computes attention by its definition.

  Args:
    operands: query [B, T, H, D], key [B, S, K, D], value [B, S, K, E], and the rest of `Operands`.
    spec: what to compute; its dtypes and precision are not read: everything is computed in the
      operands' dtype at the highest precision.

  Returns:
    outputs [B, T, H, E], weights [B, H, T, S] after dropout, lse [B, H, T].
    A query that sees nothing has output 0 and lse -inf (with sinks: the sinks' lse).
    Non-finite keys or values yield NaN for every query that attends to them and affect no other
    query.
  """
  query, key, value = operands.query, operands.key, operands.value
  group = query.shape[2] // key.shape[2]
  key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
  shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
  see = jnp.broadcast_to(materialize.visible(spec.mask, operands.mask, shape), shape)

  # A hidden key has no effect even when it is NaN, so it is replaced before any arithmetic.
  finite = jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1)  # [B, S, H]
  key, value = (jnp.where(finite[..., None], x, 0) for x in (key, value))
  logits = spec.softmax_scale * jnp.einsum("bthd,bshd->bhts", query, key, precision="highest")
  if spec.logits_soft_cap is not None:
    logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
  if operands.bias is not None:
    logits = logits + operands.bias
  if spec.has_score_mod:
    mask = jax.tree.unflatten(spec.mask, operands.mask.arrays)
    logits = evaluate.apply_to_all(spec.score_mod, operands.mods, logits, mask, operands.mask)
  logits = jnp.where(finite.transpose(0, 2, 1)[:, :, None], logits, jnp.nan)
  logits = jnp.where(see, logits, -jnp.inf)

  extra = jnp.full((1, shape[1]), -jnp.inf, logits.dtype)
  extra = jnp.broadcast_to(extra if operands.sinks is None else operands.sinks, shape[:2])
  total = jnp.concatenate([logits, jnp.broadcast_to(extra[..., None, None], (*shape[:3], 1))], -1)
  lse = _logsumexp(total)
  weights = jnp.where(logits == -jnp.inf, 0, jnp.exp(logits - _or_zero(lse)[..., None]))
  if spec.dropout_prob:
    mask, at = materialize.expand(spec.mask, operands.mask, shape)
    assert operands.dropout_key is not None
    words = operands.dropout_key.T.reshape(2, -1, 1, 1, 1)
    at = dropout.move_to_positions(mask, at)
    keep = dropout.keep_mask(words, at, spec.dropout_prob)
    weights = jnp.where(keep, weights / (1 - spec.dropout_prob), 0)
  outputs = jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest")
  if not spec.normalize_output:
    outputs = outputs * jnp.exp(lse).transpose(0, 2, 1)[..., None]
  return AttentionOutput(outputs, weights, lse)


def _or_zero(x: jax.Array) -> jax.Array:
  """Returns 0 in place of -inf: the difference of two infinities is NaN."""
  return jnp.where(x == -jnp.inf, 0, x)


def _logsumexp(x: jax.Array) -> jax.Array:
  """Returns log(sum(exp(x))) over the last axis; -inf with gradient 0 where all are -inf."""
  m = _or_zero(jax.lax.stop_gradient(x.max(-1, keepdims=True)))
  total = jnp.where(x == -jnp.inf, 0, jnp.exp(jnp.where(x == -jnp.inf, 0, x) - m)).sum(-1)
  return jnp.where(total == 0, -jnp.inf, jnp.log(jnp.where(total == 0, 1, total)) + m[..., 0])
