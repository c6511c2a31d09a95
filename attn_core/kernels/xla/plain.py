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
  * Logits of a query, key or value that is not finite are NaN, before the mask chooses: NaN reaches
    the rows that see it. The operand becomes NaN while it is transposed, which costs nothing, and
    so does the key of such a value; where their widths differ, NaN is added to the logits.
  * All other products read 0 in place of non-finite numbers, and the backward has 0 at hidden
    pairs, because 0 * NaN would reach results that do not depend on it.
  * Small arrays of bfloat16 find non-finite numbers in one function and replace them in another,
    which has no more operations than bytes: XLA:CPU starts no thread for these.
  * Hidden logits are a finite number instead of -inf.
  * Sums of 16-bit products are rounded to 16 bits by the product itself, where nothing that needs
    more digits follows.

T * S scores of a head are [T * G, S] of a key head: the G query heads of a key head become rows.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.common import dense_operands, matmul_precision
from attn_core.kernels.common.contract import BackwardResiduals, Kernel, Residuals
from attn_core.kernels.xla import cpu_math, one_key
from attn_core.masks import block_map, mask as mask_lib, materialize
from attn_core.types import AttentionSpec, BlockSizes, Operands, are_known


# Largest number of rows and of keys whose cotangents of logits are not rounded to 16 bits on a CPU,
# which takes up to 1.1 times as long there.
FEW = 64
# Largest number of keys whose float32 weights leave the library of XLA:CPU before their product:
# with both products in it, jax 0.12 takes up to 1.3 times as long for 16 keys, less from 64 on.
APART = 32
# Whether a product with a result of 16 bits takes no longer than one of 32 bits; XLA:CPU of jax
# 0.10.2 takes twice as long.
ROUNDS_IN_PRODUCTS = jax.__version_info__ >= (0, 11)


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
  if _sees_one_key(operands, spec):
    return one_key.forward(operands, spec)
  inputs = _inputs(operands, spec)
  weights, lse = _softmax(inputs)
  weights, out_dtype = inputs.narrow(weights), dense_operands.out_dtype(operands, spec)
  if weights.dtype == jnp.float32 and are_known(weights.shape[2]) and weights.shape[2] <= APART:
    weights = cpu_math.apart(weights)
  if out_dtype == weights.dtype:
    out = inputs.scaled_product(weights, inputs.value, 1.0).astype(out_dtype)
  else:
    out = inputs.product(weights, inputs.value, 2, 1).astype(out_dtype)
  lse = lse.astype(dense_operands.lse_dtype(spec))
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
  if _sees_one_key(operands, spec):
    return one_key.backward(operands, spec, residuals, cotangents, wrt)
  inputs = _inputs(operands, spec)
  row_scalars = lambda x: inputs.merged(inputs.rows_of(x.swapaxes(1, 2)[..., None]))
  d_out, d_lse = inputs.merged(inputs.rows_of(cotangents.out)), row_scalars(cotangents.lse)
  if residuals.out is None:
    lse = row_scalars(residuals.lse)
    weights = jnp.exp(_logits(inputs) - jnp.where(lse == -jnp.inf, jnp.inf, lse))
  else:
    weights, _ = _softmax(inputs)
  # NaN in a row must not reach hidden keys. One array for both uses, or both are kept.
  weights = inputs.visible(weights)
  d_weights = inputs.product(d_out, inputs.value, 2, 2)
  delta = -d_lse
  if residuals.out is not None:
    delta = delta + (weights * d_weights).sum(-1, keepdims=True)
  # In float16, times the scale before it is rounded: it fits where the gradient does. Elsewhere
  # after the products: XLA:CPU would write the scale as often as there are scores.
  scale, d_scores = spec.softmax_scale, inputs.visible(weights * (d_weights - delta))
  if operands.query.dtype == jnp.float16:
    d_scores, scale = d_scores * jnp.asarray(scale, weights.dtype), 1.0
  # Sums of few numbers do not average their rounding.
  if not are_known(*d_scores.shape[1:]) or max(d_scores.shape[1:]) > FEW:
    # Rounding by operations on the bits starts threads.
    small = cpu_math.is_small(d_scores) and operands.query.dtype != jnp.float16
    d_scores = (inputs.narrow(d_scores) if small
                else cpu_math.for_product(d_scores, operands.query.dtype))
  found = {}
  if "query" in wrt:
    finite_key = cpu_math.fill_nonfinite(0.0, operands.key).transpose(0, 2, 1, 3)
    d_query = inputs.scaled_product(d_scores, inputs.merged(finite_key), scale)
    found["query"] = inputs.queries_of(d_query.astype(operands.query.dtype))
  finite_query = cpu_math.fill_nonfinite(0.0, operands.query)
  for name, left, x, factor in (
      ("key", d_scores, finite_query, scale),
      ("value", inputs.narrow(weights), cotangents.out, 1.0)):
    if name in wrt:
      found[name] = _sum_over_rows(inputs, left, x, factor).astype(operands.key.dtype)
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
  nan: jax.Array | None  # [B, K, 1, S]: NaN for keys of non-finite values; None: the key has it
  spec: AttentionSpec

  def product(self, left: jax.Array, right: jax.Array, left_axis: int,
              right_axis: int) -> jax.Array:
    """Returns products over one axis of each, in the dtype of the softmax.

    One of them may have more bits than the other; see `cpu_math.mixed_product`.
    """
    if left.dtype != right.dtype:
      return cpu_math.mixed_product(lambda x, y: self.product(x, y, left_axis, right_axis),
                                    left, right)
    return _dot(left, right, (left_axis, right_axis), self.spec.precision,
                self.spec.softmax_dtype)

  def scaled_product(self, left: jax.Array, right: jax.Array, factor: float) -> jax.Array:
    """Returns the matrix product left . right times `factor`.

    In 16 bits where both have 16 and the factor is a power of two: it is rounded once, as it would
    be afterwards, and never written in 32 bits.
    """
    narrow = left.dtype == right.dtype and left.dtype.itemsize < 4
    if ROUNDS_IN_PRODUCTS and narrow and abs(math.frexp(factor)[0]) == 0.5:
      found = _dot(left, right, (2, 1), None, left.dtype)
    else:
      found = self.product(left, right, 2, 1)
    return found if factor == 1 else found * jnp.asarray(factor, found.dtype)

  def visible(self, x: jax.Array) -> jax.Array:
    """Returns x [B * K, T * G, S] with 0 at hidden pairs."""
    return x if self.seen is None else self.merged(jnp.where(self.seen, self.split(x), 0))

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
  seen = None if sees_all(operands, spec) else _visible(operands, spec)
  # A visible infinity would have no weight.
  fill = functools.partial(cpu_math.fill_nonfinite, np.nan)
  rows = _rows_of(fill(operands.query), key_heads)
  # Where keys are as wide as values, a key takes the NaN of its value while it is transposed.
  with_value = operands.key.shape == operands.value.shape
  found = (operands.key, operands.value) if with_value else (operands.key,)
  key = fill(operands.key, *found).transpose(0, 2, 1, 3)
  value = cpu_math.fill_nonfinite(0.0, operands.value).transpose(0, 2, 1, 3)
  empty = _empty_rows(operands, spec, seen)
  empty = None if empty is None else jnp.broadcast_to(empty, (*rows.shape[:3], 1))
  rows, key, value = (x.reshape(-1, *x.shape[2:]) for x in (rows, key, value))
  return _Inputs(rows, key, value, seen, empty, key_heads, queries,
                 None if with_value else _nan_values(operands, spec), spec)


def _sees_one_key(operands: Operands, spec: AttentionSpec) -> bool:
  """Returns whether there is a single key, and no query that does not see it."""
  keys = operands.key.shape[1]
  return are_known(keys) and keys == 1 and sees_all(operands, spec)


def _dot(left: jax.Array, right: jax.Array, axes: tuple[int, int],
         precision: lax.PrecisionLike, dtype: DTypeLike) -> jax.Array:
  """Returns products over one axis of each, for every element of their first axes."""
  return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((0,), (0,))),
                         precision=matmul_precision.resolve(left.dtype, precision),
                         preferred_element_type=dtype)


def _rows_of(x: jax.Array, key_heads: int) -> jax.Array:
  """Maps [B, T, H, width] to [B, K, T * G, width]."""
  batch, length, heads, width = x.shape
  x = x.reshape(batch, length, key_heads, heads // key_heads, width)
  return x.transpose(0, 2, 1, 3, 4).reshape(batch, key_heads, -1, width)


def _columns_of(x: jax.Array, key_heads: int) -> jax.Array:
  """Maps [B, T, H, width] to [B, K, width, T * G]."""
  batch, length, heads, width = x.shape
  x = x.reshape(batch, length, key_heads, heads // key_heads, width)
  return x.transpose(0, 2, 4, 1, 3).reshape(batch, key_heads, width, -1)


def _logits(inputs: _Inputs) -> jax.Array:
  """Returns logits [B * K, T * G, S], hidden ones of a finite number."""
  logits = inputs.product(inputs.query, inputs.key, 2, 2)
  logits = logits * jnp.asarray(inputs.spec.softmax_scale, logits.dtype)
  logits = inputs.split(logits)
  if inputs.nan is not None:
    logits = logits + inputs.nan.astype(logits.dtype)
  if inputs.seen is None:
    return inputs.merged(logits)
  # Too low to have a weight where a key is visible.
  hidden = jnp.asarray(0.7 * jnp.finfo(logits.dtype).min, logits.dtype)
  return inputs.merged(jnp.where(inputs.seen, logits, hidden))


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


def _sum_over_rows(inputs: _Inputs, weights: jax.Array, x: jax.Array, factor: float) -> jax.Array:
  """Returns the sums over rows of weights [B * K, T * G, S] times x: [B, S, K, width].

  The library of XLA:CPU multiplies no transposed left operand, and 16-bit numbers become float32
  where only the last two axes of an operand were exchanged. So x is transposed together with its
  heads, or the weights, where these are smaller, with batch and heads as two axes.

  Args:
    inputs: the attention.
    weights: [B * K, T * G, S].
    x: [B, T, H, width], finite where its weights are 0.
    factor: of the sums.
  """
  keys, width = weights.shape[2], x.shape[3]
  if are_known(keys) and 4 * keys <= width:
    columns = inputs.split(weights).swapaxes(2, 3)
    columns = lax.optimization_barrier(columns.reshape(-1, keys, weights.shape[1]))
    found = inputs.scaled_product(columns, inputs.merged(inputs.rows_of(x)), factor)
    return inputs.split(found).transpose(0, 2, 1, 3)
  columns = inputs.merged(_columns_of(x, inputs.key_heads))
  found = inputs.scaled_product(columns, weights, factor)
  return inputs.split(found).transpose(0, 3, 1, 2)


# --- Non-finite numbers, and queries that see nothing. -------------------------------------------


def _nan_values(operands: Operands, spec: AttentionSpec) -> jax.Array:
  """Returns [B, K, 1, S]: NaN for keys whose value is not finite, else 0."""
  # By a sum, which takes a third of the time of a logical reduction.
  value = operands.value.astype(spec.softmax_dtype)
  return (value - value).sum(-1).transpose(0, 2, 1)[:, :, None]


def _empty_rows(operands: Operands, spec: AttentionSpec,
                seen: jax.Array | None) -> jax.Array | None:
  """Returns bool [B or 1, K or 1, T * G or 1, 1]: rows that see nothing; None: all see a key."""
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  if seen is None:
    return None
  if not spec.mask.num_leaves and are_known(queries, keys) and (
      _every_query_sees_a_key(spec.mask, queries, keys)):
    return None
  return seen.astype(jnp.float32).sum(-1, keepdims=True) == 0


@functools.lru_cache(maxsize=256)
def _every_query_sees_a_key(structure: jax.tree_util.PyTreeDef, queries: int, keys: int) -> bool:
  return block_map.every_query_sees_a_key(jax.tree.unflatten(structure, ()), queries, keys)


@functools.lru_cache(maxsize=256)
def _kinds(structure: jax.tree_util.PyTreeDef, sizes: block_map.Sizes) -> np.ndarray:
  """Returns the kinds of the blocks of a mask without arrays."""
  return block_map.host_kinds(jax.tree.unflatten(structure, ()), sizes)


def sees_all(operands: Operands, spec: AttentionSpec) -> bool:
  """Returns whether the mask hides nothing, as its structure and the lengths say."""
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  if spec.mask.num_leaves or not are_known(queries, keys):
    return spec.mask == jax.tree.structure(mask_lib.Full())
  sizes = block_map.Sizes(queries, keys, queries, keys)
  return bool((_kinds(spec.mask, sizes) == block_map.FULL).all())


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
