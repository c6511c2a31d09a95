# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention in one piece: all scores at once, without loops, in plain XLA.

Quadratic in memory: for sequences that one block holds (`tiling.is_short`), and for vanilla.
Products, softmax and copies have the form that XLA:CPU of jax 0.12 computes fastest, as two
programs of its library, one forward and one more backward:

  * Batch and heads are one dimension. With two, XLA:CPU multiplies 16-bit numbers as float32.
  * Weights are normalized before the product, and nothing else reads their maximum and sum. The
    backward computes them again by the same operations, and not from the lse: a program of both
    computes them once.
  * Where a mask hides keys, non-finite numbers are replaced by 0 while query, key and value are
    transposed, which costs nothing, because 0 * NaN would reach results that do not depend on
    them. Small products with the mask find the results that do; 0 or NaN is added to these.
  * Hidden logits are a finite number instead of -inf.

T * S scores of a head are [T * G, S] of a key head: the G query heads of a key head become rows.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands, matmul_precision
from attn_core.kernels.common.contract import BackwardResiduals, Kernel, Residuals
from attn_core.kernels.xla import cpu_math
from attn_core.masks import block_map, mask as mask_lib, materialize
from attn_core.types import AttentionSpec, BlockSizes, Operands, are_known


# Largest number of rows and of keys whose cotangents of logits are not rounded to 16 bits on a CPU,
# which takes up to 1.1 times as long there.
FEW = 64


def supports(operands: Operands, spec: AttentionSpec) -> bool:
  """Returns whether this kernel computes the call, whatever its size.

  Args:
    operands: only dtypes, and which of them are given, count.
    spec: what is computed.
  """
  extras = (operands.bias, operands.sinks, operands.dropout_key, operands.key_scale)
  dtypes = {x.dtype for x in (operands.query, operands.key, operands.value)}
  return (all(x is None for x in extras) and spec.logits_soft_cap is None
          and not spec.has_score_mod and len(dtypes) == 1
          and operands.query.dtype.itemsize >= 2 and jnp.dtype(spec.softmax_dtype).itemsize >= 4)


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  del block_sizes
  dense_operands.assert_operands(operands)
  inputs = _inputs(operands, spec)
  weights, lse = _softmax(inputs)
  out = inputs.product(inputs.narrow(weights), inputs.value, 2, 1)
  nan_rows = inputs.merged(_nan_rows(inputs, operands))
  out = (out + nan_rows).astype(dense_operands.out_dtype(operands, spec))
  lse = (lse + nan_rows).astype(dense_operands.lse_dtype(spec))
  return Residuals(inputs.queries_of(out), inputs.queries_of(lse)[..., 0].swapaxes(1, 2))


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: BackwardResiduals, cotangents: Residuals,
             wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `contract.BackwardFn`.

  dS = P * (dP - sum(P * dP) + d_lse) with dP = d_out . value. Where the lse is that of more keys
  than the operands have, sum(P * dP) is in its cotangent.
  """
  del block_sizes
  dense_operands.assert_operands(operands)
  inputs = _inputs(operands, spec)
  row_scalars = lambda x: inputs.merged(inputs.rows_of(x.swapaxes(1, 2)[..., None]))
  d_out, d_lse = inputs.merged(inputs.rows_of(cotangents.out)), row_scalars(cotangents.lse)
  nan_rows = _nan_rows(inputs, operands)
  if residuals.out is None:
    lse = row_scalars(residuals.lse)
    nan_rows = nan_rows + inputs.split(jnp.where(jnp.isnan(lse), jnp.nan, jnp.zeros_like(lse)))
    weights = jnp.exp(_logits(inputs) - jnp.where(jnp.isfinite(lse), lse, jnp.inf))
  else:
    weights, _ = _softmax(inputs)
  d_weights = inputs.product(d_out, inputs.value, 2, 2)
  delta = -d_lse
  if residuals.out is not None:
    delta = delta + (weights * d_weights).sum(-1, keepdims=True)
  # In float16, times the scale before it is rounded: it fits where the gradient does. Elsewhere
  # after the products: XLA:CPU would write the scale as often as there are scores.
  scale, d_scores = jnp.asarray(spec.softmax_scale, weights.dtype), weights * (d_weights - delta)
  if operands.query.dtype == jnp.float16:
    d_scores, scale = d_scores * scale, jnp.ones_like(scale)
  # Sums of few numbers do not average their rounding.
  if max(d_scores.shape[1:]) > FEW or not are_known(*d_scores.shape[1:]):
    d_scores = cpu_math.for_product(d_scores, operands.query.dtype)
  found = {}
  if "query" in wrt:
    d_query = inputs.product(d_scores, inputs.key, 2, 1) * scale + inputs.merged(nan_rows)
    found["query"] = inputs.queries_of(d_query.astype(operands.query.dtype))
  nan_keys = inputs.merged(_reached(inputs, nan_rows[..., 0], "r"))
  for name, left, right, factor in (
      ("key", d_scores, inputs.query, scale), ("value", inputs.narrow(weights), d_out, None)):
    if name in wrt:
      d = _sum_over_rows(inputs, left, right, factor, nan_keys).astype(operands.key.dtype)
      found[name] = inputs.split(d).transpose(0, 2, 1, 3)
  return tuple(found[name] for name in wrt)


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
  """Query, key and value without non-finite numbers, batch and heads merged, and the mask."""

  query: jax.Array  # [B * K, T * G, D]
  key: jax.Array  # [B * K, S, D]
  value: jax.Array  # [B * K, S, E]
  seen: jax.Array | None  # bool [B or 1, K or 1, T * G or 1, S or 1]; None: all pairs are visible
  empty: jax.Array | None  # of `_empty_rows`, bool [B, K, T * G, 1]
  key_heads: int  # K
  queries: int  # T
  spec: AttentionSpec

  def product(self, left: jax.Array, right: jax.Array, left_axis: int,
              right_axis: int) -> jax.Array:
    """Returns products over one axis of each, in the dtype of the softmax.

    One of them may have more bits than the other; see `cpu_math.mixed_product`.
    """
    if left.dtype != right.dtype:
      return cpu_math.mixed_product(lambda x, y: self.product(x, y, left_axis, right_axis),
                                    left, right)
    return lax.dot_general(
        left, right, (((left_axis,), (right_axis,)), ((0,), (0,))),
        precision=matmul_precision.resolve(left.dtype, self.spec.precision),
        preferred_element_type=self.spec.softmax_dtype)

  def narrow(self, x: jax.Array) -> jax.Array:
    """Returns `x` in the dtype of the products' operands."""
    return x.astype(self.query.dtype)

  def merged(self, x: jax.Array) -> jax.Array:
    """Maps [B, K, ...] to [B * K, ...]."""
    return x.reshape(-1, *x.shape[2:])

  def split(self, x: jax.Array) -> jax.Array:
    """Maps [B * K, ...] to [B, K, ...]."""
    return x.reshape(-1, self.key_heads, *x.shape[1:])

  def rows_of(self, x: jax.Array) -> jax.Array:
    """Maps [B, T, H, width] to [B, K, T * G, width]."""
    return _rows_of(x, self.key_heads)

  def queries_of(self, x: jax.Array) -> jax.Array:
    """Maps [B * K, T * G, width] to [B, T, H, width]."""
    x = self.split(x)
    batch, heads, rows, width = x.shape
    x = x.reshape(batch, heads, self.queries, rows // self.queries, width)
    return x.transpose(0, 2, 1, 3, 4).reshape(batch, self.queries, -1, width)


def _inputs(operands: Operands, spec: AttentionSpec) -> _Inputs:
  """Returns the operands for the products."""
  key_heads, queries = operands.key.shape[2], operands.query.shape[1]
  seen = None if sees_all(spec) else _visible(operands, spec)
  filler = np.nan if seen is None else 0.0
  rows = _rows_of(cpu_math.fill_nonfinite(filler, operands.query), key_heads)
  key = cpu_math.fill_nonfinite(filler, operands.key).transpose(0, 2, 1, 3)
  value = cpu_math.fill_nonfinite(0.0, operands.value).transpose(0, 2, 1, 3)
  empty = _empty_rows(operands, spec, seen)
  empty = None if empty is None else jnp.broadcast_to(empty, (*rows.shape[:3], 1))
  rows, key, value = (x.reshape(-1, *x.shape[2:]) for x in (rows, key, value))
  return _Inputs(rows, key, value, seen, empty, key_heads, queries, spec)


def _rows_of(x: jax.Array, key_heads: int) -> jax.Array:
  """Maps [B, T, H, width] to [B, K, T * G, width]."""
  batch, length, heads, width = x.shape
  x = x.reshape(batch, length, key_heads, heads // key_heads, width)
  return x.transpose(0, 2, 1, 3, 4).reshape(batch, key_heads, -1, width)


def _logits(inputs: _Inputs) -> jax.Array:
  """Returns logits [B * K, T * G, S], hidden ones of a finite number."""
  logits = inputs.product(inputs.query, inputs.key, 2, 2)
  logits = logits * jnp.asarray(inputs.spec.softmax_scale, logits.dtype)
  if inputs.seen is None:
    return logits
  # Too low to have a weight where a key is visible.
  hidden = jnp.asarray(0.7 * jnp.finfo(logits.dtype).min, logits.dtype)
  return inputs.merged(jnp.where(inputs.seen, inputs.split(logits), hidden))


def _softmax(inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
  """Returns weights [B * K, T * G, S] and lse [B * K, T * G, 1] of the logits.

  Rows that see nothing have weights 0 and lse -inf.
  """
  logits = _logits(inputs)
  m_i = lax.stop_gradient(logits.max(-1, keepdims=True))
  weights = jnp.exp(logits - m_i)
  l_i = weights.sum(-1, keepdims=True)
  lse = m_i + jnp.log(l_i)
  if inputs.empty is None:
    return weights * (1 / l_i), lse
  empty = inputs.merged(inputs.empty)
  return weights * (jnp.where(empty, 0, jnp.ones_like(l_i)) / l_i), jnp.where(empty, -jnp.inf, lse)


def _sum_over_rows(inputs: _Inputs, weights: jax.Array, rows: jax.Array,
                   factor: jax.Array | None, nan_keys: jax.Array) -> jax.Array:
  """Returns the sums [B * K, S, width] of weights [B * K, T * G, S] times rows of any width.

  Args:
    inputs: the attention.
    weights: [B * K, T * G, S].
    rows: [B * K, T * G, width].
    factor: of the sums; None: 1.
    nan_keys: [B * K, S or 1, 1], added.
  """
  scaled = lambda x: x if factor is None else x * factor
  # The library of XLA:CPU does not multiply a transposed left operand. The barriers keep XLA from
  # folding the transposition of the smaller one into the product; without either it is as fast
  # where both are about as large.
  keys, width = weights.shape[2], rows.shape[2]
  if are_known(keys) and keys > 2 * width:
    rows = lax.optimization_barrier(rows.swapaxes(1, 2))
    found = scaled(inputs.product(rows, weights, 2, 1)) + nan_keys.swapaxes(1, 2)
    return found.swapaxes(1, 2)
  if are_known(keys) and 2 * keys <= width:
    weights = lax.optimization_barrier(weights.swapaxes(1, 2))
    return scaled(inputs.product(weights, rows, 2, 1)) + nan_keys
  return scaled(inputs.product(weights, rows, 1, 1)) + nan_keys


# --- Non-finite numbers, and queries that see nothing. -------------------------------------------


def _nan_rows(inputs: _Inputs, operands: Operands) -> jax.Array:
  """Returns [B, K, T * G or 1, 1]: NaN is added to rows that see a non-finite key or value, else 0.

  Rows that are not finite get it too. Where all pairs are visible, NaN in queries and keys reaches
  all that it must by itself. Rows that see nothing are 0.
  """
  # By sums, which take a third of the time of logical reductions.
  dtype = inputs.spec.softmax_dtype
  zero_or_nan = lambda x: x.astype(dtype) - x.astype(dtype)
  query, key, value = map(zero_or_nan, (operands.query, operands.key, operands.value))
  if inputs.seen is None:
    return value.sum((1, 3))[..., None, None]
  keys = (key + value).sum(-1) if key.shape == value.shape else key.sum(-1) + value.sum(-1)
  found = _reached(inputs, keys.transpose(0, 2, 1), "s")
  found = found + inputs.rows_of(query.sum(-1, keepdims=True))
  return found if inputs.empty is None else jnp.where(inputs.empty, 0, found)


def _reached(inputs: _Inputs, nan: jax.Array, axis: str) -> jax.Array:
  """Returns NaN for rows that see a key marked by NaN, or for keys that a marked row sees, else 0.

  Args:
    inputs: of the attention, with its mask.
    nan: 0 or NaN [B, K, S], or with axis "r" [B, K, T * G].
    axis: "s" or "r", the last axis of `nan`.

  Returns:
    [B, K, T * G or 1, 1], or with axis "r" [B, K, S or 1, 1].
  """
  seen = inputs.seen
  if seen is None:
    return nan.sum(-1)[..., None, None]
  ones = tuple(i for i, size in enumerate(seen.shape) if are_known(size) and size == 1)
  letters = "".join(letter for i, letter in enumerate("bkrs") if i not in ones)
  other = "r" if axis == "s" else "s"
  count = jnp.einsum(f"bk{axis},{letters}->bk{other if other in letters else ''}",
                     jnp.isnan(nan).astype(jnp.float32), seen.squeeze(ones).astype(jnp.float32),
                     precision=matmul_precision.resolve(jnp.float32, inputs.spec.precision))
  count = count if other in letters else count[..., None]
  return jnp.where(count > 0, jnp.nan, jnp.zeros_like(count, nan.dtype))[..., None]


def _empty_rows(operands: Operands, spec: AttentionSpec,
                seen: jax.Array | None) -> jax.Array | None:
  """Returns bool [B or 1, K or 1, T * G or 1, 1]: rows that see nothing; None: all see a key."""
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  static = not spec.mask.num_leaves and are_known(queries, keys)
  if seen is None or (static and _all_see(spec.mask, queries, keys)):
    return None
  return seen.astype(jnp.float32).sum(-1, keepdims=True) == 0


@functools.lru_cache(maxsize=256)
def _all_see(structure: jax.tree_util.PyTreeDef, queries: int, keys: int) -> bool:
  """Returns whether each query certainly sees a key, for a mask without arrays."""
  kinds = block_map.host_kinds(jax.tree.unflatten(structure, ()),
                               block_map.Sizes(queries, keys, 1, 1))
  return bool((kinds == block_map.FULL).any(-1).all())


def sees_all(spec: AttentionSpec) -> bool:
  """Returns whether the mask hides nothing, as its structure says."""
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
