# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention in one piece: all scores at once, without loops, in plain XLA.

Quadratic in memory: for sequences that one block holds (`tiling.is_short`), and for vanilla.
Products, softmax and copies have the form that XLA:CPU computes fastest:

  * Non-finite numbers are replaced while query, key and value are transposed, which costs nothing:
    keys by NaN, which reaches every query that sees them, and values by 0, with NaN in their keys.
  * Hidden logits are a finite number instead of -inf. XLA:CPU of jax 0.12 fuses a softmax only
    without choices between its steps; queries that see nothing are corrected in the output.
  * The backward has scores transposed, so that no product transposes one; see `flash.backward`.

Operands have 32 or 64 bits: XLA:CPU widens transposed copies of 16, and multiplies float32.

T * S scores of a head are [T * G, S] of a key head: the G query heads of a key head become rows.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands, matmul_precision
from attn_core.kernels.common.backward import compute_delta, finite_lse
from attn_core.kernels.common.contract import BackwardResiduals, Kernel, Residuals
from attn_core.kernels.xla import cpu_math
from attn_core.masks import mask as mask_lib, materialize
from attn_core.types import AttentionSpec, BlockSizes, Operands


def supports(operands: Operands, spec: AttentionSpec) -> bool:
  """Returns whether this kernel computes the call, whatever its size.

  Args:
    operands: only dtypes, and which of them are given, count.
    spec: what is computed.
  """
  extras = (operands.bias, operands.sinks, operands.dropout_key, operands.key_scale)
  dtypes = {x.dtype for x in (operands.query, operands.key, operands.value)}
  return (all(x is None for x in extras) and spec.logits_soft_cap is None and len(dtypes) == 1
          and operands.query.dtype.itemsize >= 4 and jnp.dtype(spec.softmax_dtype).itemsize >= 4)


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  del block_sizes
  dense_operands.assert_operands(operands)
  inputs = _inputs(operands, spec, np.nan, _bad_rows(operands.value))
  logits = inputs.product("bkrd,bksd->bkrs", inputs.query, inputs.key)
  hidden = _hidden_logit(logits.dtype)
  if not _sees_all(spec):
    logits = jnp.where(_visible(operands, spec), logits, hidden)
  m_i = lax.stop_gradient(logits.max(-1, keepdims=True))
  weights = jnp.exp(logits - m_i)
  l_i = weights.sum(-1, keepdims=True)
  out = inputs.product("bkrs,bkse->bkre", weights, inputs.value)
  # The maximum that XLA:CPU of jax 0.12 computes ignores NaN, the sum does not.
  empty = (m_i <= hidden) & ~jnp.isnan(l_i)
  out = jnp.where(empty, 0, out * (1 / l_i)).astype(dense_operands.out_dtype(operands, spec))
  lse = jnp.where(empty, -jnp.inf, m_i + jnp.log(l_i))
  lse = lse.astype(dense_operands.lse_dtype(spec))
  batch, length, heads, _ = operands.query.shape
  split = (batch, operands.key.shape[2], length, -1)  # [B, K, T, G]
  out = out.reshape(*split[:3], heads // split[1], out.shape[-1]).transpose(0, 2, 1, 3, 4)
  return Residuals(out.reshape(batch, length, heads, -1),
                   lse.reshape(split).transpose(0, 1, 3, 2).reshape(batch, heads, length))


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: BackwardResiduals, cotangents: Residuals,
             wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `contract.BackwardFn`."""
  del block_sizes
  dense_operands.assert_operands(operands)
  dense_operands.assert_residuals(operands, residuals, cotangents)
  inputs = _inputs(operands, spec, 0, None)
  (batch, length, heads, width), key_heads = operands.query.shape, operands.key.shape[2]
  def row_scalars(x: jax.Array) -> jax.Array:
    """Maps [B, H, T] to [B, K, 1, T * G]."""
    return x.reshape(batch, key_heads, -1, length).transpose(0, 1, 3, 2).reshape(
        batch, key_heads, 1, -1)

  # Doubled here and halved at the end, both exactly: XLA:CPU transposes in a quarter of the time
  # where it computes something as well.
  d_out = inputs.rows_of(cotangents.out * 2)
  delta = row_scalars(compute_delta(residuals, cotangents, spec.softmax_dtype)) * 2
  scores = inputs.product("bksd,bkrd->bksr", inputs.key, inputs.query)
  weights = cpu_math.exp(scores - row_scalars(finite_lse(residuals.lse)))
  if not _sees_all(spec):
    weights = jnp.where(_visible(operands, spec).swapaxes(2, 3), weights, 0)
  d_weights = inputs.product("bkse,bkre->bksr", inputs.value, d_out)
  d_logits = weights * (d_weights - delta)
  found = {}
  if "query" in wrt:
    d_query = inputs.product("bksd,bksr->bkdr", inputs.key, d_logits)
    d_query = d_query.reshape(batch, key_heads, width, length, -1).transpose(0, 3, 1, 4, 2)
    found["query"] = d_query * (spec.softmax_scale / 2)
  if "key" in wrt:
    d_key = inputs.product("bksr,bkrd->bksd", d_logits, inputs.query)
    found["key"] = d_key.transpose(0, 2, 1, 3) / 2
  if "value" in wrt:
    d_value = inputs.product("bksr,bkre->bkse", weights, d_out)
    found["value"] = d_value.transpose(0, 2, 1, 3) / 2
  return tuple(found[name].astype(x.dtype).reshape(x.shape)
               for name in wrt for x in (getattr(operands, name),))


def tangent(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
            residuals: Residuals, tangents: dict[str, jax.Array]) -> Residuals:
  """Computes the tangents of out and lse; see `contract.TangentFn`."""
  names = tuple(tangents)
  def attend(*arrays: jax.Array) -> Residuals:
    given: dict[str, Any] = dict(zip(names, arrays))
    return forward(operands._replace(**given), spec, block_sizes)
  found = jax.jvp(attend, [getattr(operands, name) for name in names], list(tangents.values()))[1]
  is_nan = jnp.isnan(residuals.lse)
  return Residuals(jnp.where(is_nan.transpose(0, 2, 1)[..., None], jnp.nan, found.out),
                   jnp.where(is_nan, jnp.nan, found.lse))


KERNEL = Kernel("plain", forward, backward, tangent)


class _Inputs(NamedTuple):
  """Query, key and value, heads first and without non-finite numbers."""

  query: jax.Array  # [B, K, T * G, D], times the scale
  key: jax.Array  # [B, K, S, D]
  value: jax.Array  # [B, K, S, E]
  spec: AttentionSpec

  def product(self, formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum of two arrays, in the dtype of the softmax."""
    return jnp.einsum(formula, left, right, preferred_element_type=self.spec.softmax_dtype,
                      precision=matmul_precision.resolve(self.query.dtype, self.spec.precision))

  def rows_of(self, x: jax.Array) -> jax.Array:
    """Maps [B, T, H, width] to [B, K, T * G, width]."""
    batch, length, heads, width = x.shape
    key_heads = self.key.shape[1]
    x = x.reshape(batch, length, key_heads, heads // key_heads, width)
    return x.transpose(0, 2, 1, 3, 4).reshape(batch, key_heads, -1, width)


def _inputs(operands: Operands, spec: AttentionSpec, filler: float,
            bad_values: jax.Array | None) -> _Inputs:
  """Returns the operands for the products.

  Args:
    operands: the arrays.
    spec: what is computed.
    filler: replaces non-finite numbers of queries and keys.
    bad_values: bool [B, S, K, 1]: values whose keys are replaced as well; None: none.
  """
  query, key, value = operands.query, operands.key, operands.value
  bad_key = ~jnp.isfinite(key)
  bad_key = bad_key if bad_values is None else bad_key | bad_values
  scale = jnp.asarray(spec.softmax_scale, query.dtype)
  query = jnp.where(jnp.isfinite(query), query * scale, filler)
  key = jnp.where(bad_key, filler, key).transpose(0, 2, 1, 3)
  value = jnp.where(jnp.isfinite(value), value, 0).transpose(0, 2, 1, 3)
  inputs = _Inputs(query, key, value, spec)
  return inputs._replace(query=inputs.rows_of(query))


def _bad_rows(x: jax.Array) -> jax.Array:
  """Returns bool [..., 1]: the rows of x [..., width] with a number that is not finite."""
  # By a sum, which takes a third of the time of a logical reduction. The barrier keeps XLA from
  # computing it again where it is read.
  zero_or_nan = (x * 0).astype(jnp.float32).sum(-1, keepdims=True)
  return lax.optimization_barrier(zero_or_nan) != 0


def _sees_all(spec: AttentionSpec) -> bool:
  """Returns whether the mask hides nothing."""
  return spec.mask == jax.tree.structure(mask_lib.Full())


def _visible(operands: Operands, spec: AttentionSpec) -> jax.Array:
  """Evaluates the mask: bool [B or 1, K or 1, T * G or 1, S or 1]."""
  batch, length, heads, _ = operands.query.shape
  keys, key_heads = operands.key.shape[1:3]
  group = heads // key_heads
  seen = materialize.visible(spec.mask, operands.mask, (batch, heads, length, keys))
  if group == 1 or seen.shape[1:3] == (1, 1):
    return seen
  split = (key_heads, group) if seen.shape[1] > 1 else (1, 1)
  seen = seen.reshape(seen.shape[0], *split, *seen.shape[2:]).transpose(0, 1, 3, 2, 4)
  shape = (*seen.shape[:2], length, group, seen.shape[4])
  return jnp.broadcast_to(seen, shape).reshape(*shape[:2], -1, shape[4])


def _hidden_logit(dtype: jnp.dtype) -> float:
  """Returns the logit of hidden keys, too low to have a weight where a key is visible."""
  return float(0.7 * jnp.finfo(dtype).min)
