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
  * Operands of 16 bits are transposed by the products. XLA:CPU widens a transposed copy, and would
    then multiply float32.

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
          and jnp.float16 not in dtypes and jnp.dtype(spec.softmax_dtype).itemsize >= 4)


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  del block_sizes
  dense_operands.assert_operands(operands)
  inputs = _inputs(operands, spec, np.nan, _bad_rows(operands.value))
  logits = inputs.product("{rows}d,{keys}d->bkrs", inputs.query, inputs.key)
  hidden = _hidden_logit(logits.dtype)
  rest = inputs.rest_of_scale
  if not _sees_all(spec):
    # Multiplied in the pass that hides logits anyway; otherwise in that of the exponential.
    logits, rest = jnp.where(_visible(operands, spec), logits * rest, hidden), 1.0
  m_i = lax.stop_gradient(logits.max(-1, keepdims=True))
  weights = jnp.exp((logits - m_i) * rest)
  l_i = weights.sum(-1, keepdims=True)
  out = inputs.product("bkrs,{keys}e->bkre", weights.astype(inputs.value.dtype), inputs.value)
  # The maximum that XLA:CPU of jax 0.12 computes ignores NaN, the sum does not.
  empty = (m_i <= hidden) & ~jnp.isnan(l_i)
  out = jnp.where(empty, 0, out * (1 / l_i)).astype(dense_operands.out_dtype(operands, spec))
  lse = jnp.where(empty, -jnp.inf, m_i * rest + jnp.log(l_i))
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

  d_out = inputs.rows_of(cotangents.out * 2)
  delta = row_scalars(compute_delta(residuals, cotangents, spec.softmax_dtype)) * 2
  scores = inputs.product("{keys}d,{rows}d->bksr", inputs.key, inputs.query)
  weights = inputs.exp(scores * inputs.rest_of_scale - row_scalars(finite_lse(residuals.lse)))
  if not _sees_all(spec):
    weights = jnp.where(_visible(operands, spec).swapaxes(2, 3), weights, 0)
  d_weights = inputs.product("{keys}e,{rows}e->bksr", inputs.value, d_out)
  d_logits = inputs.narrow(weights * (d_weights - delta))
  found = {}
  if "query" in wrt:
    d_query = inputs.product("{keys}d,bksr->bkdr", inputs.key, d_logits)
    d_query = d_query.reshape(batch, key_heads, width, length, -1).transpose(0, 3, 1, 4, 2)
    found["query"] = d_query * (spec.softmax_scale / 2)
  if "key" in wrt:
    d_key = inputs.product("bksr,{rows}d->bksd", d_logits, inputs.query)
    found["key"] = d_key.transpose(0, 2, 1, 3) * (inputs.rest_of_scale / 2)
  if "value" in wrt:
    d_value = inputs.product("bksr,{rows}e->bkse", inputs.narrow(weights), d_out)
    found["value"] = d_value.transpose(0, 2, 1, 3) / 2
  return tuple(found[name].astype(x.dtype).reshape(x.shape)
               for name in wrt for x in (getattr(operands, name),))


def tangent(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
            residuals: Residuals, tangents: dict[str, jax.Array]) -> Residuals:
  """Computes the tangents of out and lse; see `contract.TangentFn`."""
  del residuals
  names = tuple(tangents)
  def attend(*arrays: jax.Array) -> Residuals:
    given: dict[str, Any] = dict(zip(names, arrays))
    return forward(operands._replace(**given), spec, block_sizes)
  return jax.jvp(attend, [getattr(operands, name) for name in names], list(tangents.values()))[1]


KERNEL = Kernel("plain", forward, backward, tangent)


class _Inputs(NamedTuple):
  """Query, key and value without non-finite numbers, in the layout of the products."""

  query: jax.Array  # times a part of the scale: [B, K, T * G, D], 16 bits: [B, T * G, K, D]
  key: jax.Array  # [B, K, S, D], 16 bits: [B, S, K, D]
  value: jax.Array  # [B, K, S, E], 16 bits: [B, S, K, E]
  rest_of_scale: float
  spec: AttentionSpec

  @property
  def heads_first(self) -> bool:
    """Whether arrays are transposed before the products."""
    return self.query.dtype.itemsize >= 4

  def product(self, formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum; {rows} and {keys} in the formula are the axes of `query` and `key`."""
    letters = dict(rows="bkr", keys="bks") if self.heads_first else dict(rows="brk", keys="bsk")
    return jnp.einsum(formula.format(**letters), left, right,
                      precision=matmul_precision.resolve(self.query.dtype, self.spec.precision),
                      preferred_element_type=self.spec.softmax_dtype)

  def exp(self, x: jax.Array) -> jax.Array:
    """Returns exp(x) for x <= 0."""
    return (cpu_math.exp if self.heads_first else jnp.exp)(x)

  def narrow(self, x: jax.Array) -> jax.Array:
    """Returns `x` in the dtype of the products."""
    return cpu_math.narrow(x, self.query.dtype)

  def rows_of(self, x: jax.Array) -> jax.Array:
    """Returns x [B, T, H, width] in the layout of `query`."""
    batch, length, heads, width = x.shape
    key_heads = self.key.shape[1 if self.heads_first else 2]
    x = x.reshape(batch, length, key_heads, heads // key_heads, width)
    if self.heads_first:
      return x.transpose(0, 2, 1, 3, 4).reshape(batch, key_heads, -1, width)
    return x.transpose(0, 1, 3, 2, 4).reshape(batch, -1, key_heads, width)


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
  scale, heads_first = spec.softmax_scale, query.dtype.itemsize >= 4
  # A 16-bit query keeps its bits; the rest of the scale is positive.
  part, rest = (scale, 1.0) if heads_first else (float(np.sign(scale)), abs(scale) or 1.0)
  bad_key = ~jnp.isfinite(key)
  bad_key = bad_key if bad_values is None else bad_key | bad_values
  query = jnp.where(jnp.isfinite(query), query * jnp.asarray(part, query.dtype), filler)
  key = jnp.where(bad_key, filler, key)
  value = jnp.where(jnp.isfinite(value), value, 0)
  if heads_first:
    key, value = (x.transpose(0, 2, 1, 3) for x in (key, value))
  elif bad_values is not None:
    # One pass of each is faster than one of every product that reads it.
    query, key, value = lax.optimization_barrier((query, key, value))
  inputs = _Inputs(query, key, value, rest, spec)
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
  """Returns the logit of hidden keys, so low that their weights beside any visible key are 0."""
  return float(0.7 * jnp.finfo(dtype).min)
