# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of queries that all see a single key, in plain XLA: no transposition, no softmax.

The weight is exp(logit - logit): 1, or NaN where the logit is not finite. So the output is the
value, and the logits are one sum of products over the layout of the caller. Where a sum of heads or
tokens is left, which is the backward of more than one query, it is over whole rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands, matmul_precision
from attn_core.kernels.common.contract import BackwardResiduals, Residuals
from attn_core.kernels.xla import cpu_math
from attn_core.types import AttentionSpec, Operands


def forward(operands: Operands, spec: AttentionSpec) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]."""
  logits, value = _logits(_with_nan_of_values(operands), spec), operands.value
  if operands.key.shape != value.shape:
    wide = value.astype(spec.softmax_dtype)
    logits += (wide - wide).sum(-1)[..., None]
  nan = logits - logits
  out, lse = value.astype(spec.softmax_dtype)[:, :, :, None] + nan[..., None], logits + nan
  return Residuals(_all_heads(out).astype(dense_operands.out_dtype(operands, spec)),
                   _all_heads(lse).swapaxes(1, 2).astype(dense_operands.lse_dtype(spec)))


def backward(operands: Operands, spec: AttentionSpec, residuals: BackwardResiduals,
             cotangents: Residuals, wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`.

  dS = P * (dP - P * dP + d_lse) with dP = d_out . value. Where the lse is that of more keys than
  the operands have, P is less than 1, and the second term is in the cotangent of the lse.
  """
  split = lambda x: _split(x, operands)
  # The same sum as in the forward, so that a program with both computes it once.
  logits = _logits(_with_nan_of_values(operands), spec)
  d_out = split(cotangents.out)
  d_lse = split(cotangents.lse.swapaxes(1, 2)).astype(logits.dtype)
  d_weights = _sums(d_out, operands.value.astype(d_out.dtype), spec)
  # Non-finite numbers of query, key and value reach all three.
  nan = (logits - logits) + (d_weights - d_weights)
  if residuals.out is None:
    lse = split(residuals.lse.swapaxes(1, 2)).astype(logits.dtype)
    weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, jnp.inf, lse)) + nan
    d_logits = weights * (d_weights + d_lse)
  else:
    weights = 1 + nan
    d_logits = weights * (d_weights - weights * d_weights + d_lse)
  d_logits = (d_logits * jnp.asarray(spec.softmax_scale, logits.dtype))[..., None]
  wide = lambda x: x.astype(logits.dtype)
  over_rows = lambda x: x.sum((1, 3))[:, None]
  found = {
      "query": lambda: _all_heads(d_logits * wide(operands.key)[:, :, :, None]),
      "key": lambda: over_rows(d_logits * wide(split(operands.query))),
      "value": lambda: over_rows(weights[..., None] * wide(d_out))}
  return tuple(found[name]().astype(operands.query.dtype) for name in wrt)


def _with_nan_of_values(operands: Operands) -> Operands:
  """Puts NaN where a value is not finite into its key, where both are equally wide.

  Non-finite numbers of a value reach all of its columns, through the logit.
  """
  key, value = operands.key, operands.value
  if key.shape != value.shape:
    return operands
  return operands._replace(key=cpu_math.fill_nonfinite(np.nan, key, value))


def _logits(operands: Operands, spec: AttentionSpec) -> jax.Array:
  """Returns logits [B, T, K, G] in the dtype of the softmax."""
  logits = _sums(_split(operands.query, operands), operands.key, spec)
  return logits * jnp.asarray(spec.softmax_scale, logits.dtype)


def _sums(x: jax.Array, y: jax.Array, spec: AttentionSpec) -> jax.Array:
  """Returns the sums of products over widths, of [B, T, K, G, width] and [B, 1, K, width]."""
  # As a product: XLA:CPU of jax 0.10.2 takes 4 times as long for a sum of all axes but T = 1.
  return jnp.einsum("btkgd,bkd->btkg", x, y[:, 0],
                    precision=matmul_precision.resolve(x.dtype, spec.precision),
                    preferred_element_type=spec.softmax_dtype)


def _split(x: jax.Array, operands: Operands) -> jax.Array:
  """Maps [B, T, H, ...] to [B, T, K, G, ...]."""
  key_heads = operands.key.shape[2]
  return x.reshape(*x.shape[:2], key_heads, x.shape[2] // key_heads, *x.shape[3:])


def _all_heads(x: jax.Array) -> jax.Array:
  """Maps [B, T, K, G, ...] to [B, T, H, ...]."""
  return x.reshape(*x.shape[:2], -1, *x.shape[4:])
