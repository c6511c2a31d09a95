# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages in plain XLA, forward: blocks of keys, folded into a running softmax.

A few rows (decoding) are computed with tokens as the outermost axis, as in the pages: on a CPU
every key and every value is then read once. Many rows are matrix products with heads outermost.
"""

import functools
from typing import Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches import quantize
from attn_core.caches.paged import latent_layout, layouts, ops
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import (dense_operands, matmul_precision, nonfinite, online_softmax,
                                      paged_operands)
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.paged_operands import BlockedInputs, Index
from attn_core.kernels.xla import cpu_math, cpu_matvec, paged_blocks, score_tiles, tile_ops
from attn_core.score_mods import evaluate
from attn_core.sharding import varying_axes
from attn_core.types import BlockSizes, PagedOperands, PagedSpec, at_least_float32


def forward(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
            block_sizes: BlockSizes) -> Residuals:
  """Computes out [T, H, E] in the query's dtype or `spec.out_dtype`, and lse [T, H, 1].

  Tokens outside of all requests have output 0 and lse -inf.

  Args:
    operands: the arrays.
    spec: what is computed.
    heads: the heads in the pages, without their padding.
    block_sizes: sizes fixed by the caller.
  """
  paged_operands.assert_operands(operands, heads)
  tokens, query_heads, _ = operands.query.shape
  block_q, block_pages = paged_operands.choose_block_sizes(
      operands, block_sizes, query_heads // heads.key_heads)
  out = jnp.zeros((tokens, query_heads, heads.value_width),
                  dense_operands.out_dtype(operands, spec))
  lse = jnp.full((tokens, query_heads, 1), -jnp.inf, spec.softmax_dtype)
  for part in paged_operands.request_parts(operands, block_sizes, block_q):
    block_q = part.block_q
    inputs = paged_operands.block_inputs(operands, spec, heads, (block_q, block_pages), part)
    results = varying_axes.initial_carry(inputs.query, Residuals(
        paged_operands.pad_tokens(out, block_q), paged_operands.pad_tokens(lse, block_q)))
    results = tile_ops.loop(part.first, part.end, functools.partial(_request, inputs), results)
    out, lse = (x[block_q:block_q + tokens] for x in results)
  return Residuals(out, lse)


# Whether it is the first, whether another follows, and the result.
_Attempt = tuple[jax.Array, jax.Array, online_softmax.Running]


def _request(inputs: BlockedInputs, request: Index, results: Residuals) -> Residuals:
  """Computes all queries of a request."""

  def step(block_index: jax.Array, results: Residuals) -> Residuals:
    block = paged_operands.query_block(inputs, request, block_index)
    rows = paged_operands.live_rows_of(inputs, block, inputs.query)
    order = (_TokenMajor if cpu_matvec.is_faster(*rows.shape[1:]) else _HeadMajor)(inputs, rows)

    def fold(block_index: jax.Array, running: online_softmax.Running) -> online_softmax.Running:
      ids = paged_blocks.page_ids(inputs, request, block_index)
      seen = paged_blocks.visible(inputs, block, block_index)
      mod = paged_blocks.mod_tile(inputs, block, block_index,
                                  transposed=isinstance(order, _TokenMajor))

      def attempt(state: _Attempt) -> _Attempt:
        first, _, _ = state
        taken = lax.cond(first, lambda: layouts.take(inputs.cache, ids),
                         lambda: _propagate_nan(layouts.take(inputs.cache, ids), inputs))
        found = order.fold(running, _reader(taken, inputs), seen, mod)
        return jnp.zeros_like(first), first & ~jnp.isfinite(found.acc).all(), found

      # Non-finite keys and values show in the output, which costs a fraction of checking all keys
      # and values. The same code computes both attempts, so both round alike.
      yes = varying_axes.initial_carry(rows, jnp.bool_(True))
      return lax.while_loop(lambda state: state[1], attempt, (yes, yes, running))[2]

    running = tile_ops.loop(*paged_operands.key_blocks(inputs, block), fold,
                            varying_axes.initial_carry(rows, order.start()))
    out, lse = order.finish(running)
    return Residuals(paged_blocks.put_rows(inputs, block, results.out, out),
                     paged_blocks.put_rows(inputs, block, results.lse, lse))

  return tile_ops.loop(*paged_operands.query_blocks(inputs, request), step, results)


def _reader(cache: Pages, inputs: BlockedInputs) -> Callable[..., jax.Array]:
  """Returns a function that reads keys or values; see `ops.reader`."""
  return ops.reader(cache, inputs.heads, inputs.query.dtype)


def _propagate_nan(cache: Pages, inputs: BlockedInputs) -> Pages:
  """Applies `nonfinite.propagate_nan` to pages as they are stored."""
  part, size = _reader(cache, inputs), layouts.page_size(cache)
  finite = nonfinite.is_finite(part("key"), part("value"))  # [block_kv, K, 1]
  if isinstance(cache, PagesLatent):
    return latent_layout.propagate_nan(cache, finite.reshape(-1, size))
  more = layouts.heads_of(cache).key_heads - inputs.heads.key_heads
  finite = jnp.pad(finite, ((0, 0), (0, more), (0, 0)), constant_values=True)
  finite = finite.reshape(-1, size, *finite.shape[1:])  # [pages, size, K, 1]

  def key_of(finite: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(finite, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

  def value_of(finite: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(finite, x, jnp.zeros((), x.dtype))

  if layouts.has_token_scales(cache):
    assert cache.key_scales is not None and cache.value_scales is not None
    kept = finite[:, :, :cache.key_scales.shape[2]]
    kept = kept if cache.key_scales.ndim > 3 else kept[..., 0]
    cache = cache._replace(key_scales=key_of(kept, cache.key_scales),
                           value_scales=value_of(kept, cache.value_scales))
  if quantize.is_packed(layouts.dtype_of(cache)):  # every number of 4 bits is finite
    return cache
  if isinstance(cache, layouts.PagesV1):
    finite = finite.transpose(2, 0, 1, 3)
    return cache._replace(key_pages=key_of(finite, cache.key_pages),
                          value_pages=value_of(finite, cache.value_pages))
  rows = cache.pages.reshape(*finite.shape[:3], 2, -1)
  rows = jnp.stack([key_of(finite, rows[..., 0, :]), value_of(finite, rows[..., 1, :])], 3)
  return cache._replace(pages=rows.reshape(cache.pages.shape))


def _scores(inputs: BlockedInputs, scores: jax.Array) -> jax.Array:
  """Returns scores after scale and soft cap, NaN where not finite."""
  return paged_blocks.capped(inputs, jnp.where(jnp.isfinite(scores), scores, jnp.nan))[0]


def _wide(inputs: BlockedInputs) -> jnp.dtype:
  """Returns the dtype of sums."""
  return at_least_float32(inputs.dtype)


class _HeadMajor(NamedTuple):
  """Many rows, whose logits are [K, block_rows, block_kv]."""

  inputs: BlockedInputs
  rows: jax.Array  # [K, block_rows, D]

  def start(self) -> online_softmax.Running:
    """Returns the running softmax of an empty set of keys."""
    width = self.inputs.heads.value_width
    return online_softmax.start(self.rows.shape[:2], width, self.inputs.dtype)

  def fold(self, running: online_softmax.Running, part: Callable[..., jax.Array],
           seen: jax.Array, mod: score_tiles.ModTile | None) -> online_softmax.Running:
    """Folds in keys and values read by `part`, visible where seen [block_rows, block_kv]."""
    key = part("key").transpose(1, 0, 2)
    if self.rows.shape[1] < cpu_matvec.ROWS_FIRST:
      scores = _scores(self.inputs, paged_blocks.scores_of(self.inputs, key, self.rows))
      scores = scores.swapaxes(1, 2)
    else:
      scores = _scores(self.inputs, paged_blocks.scores_of(self.inputs, self.rows, key))

    def weigh(weights: jax.Array) -> jax.Array:  # rounded to the values' dtype, summed in full
      value = part("value").transpose(1, 0, 2)
      return lax.dot_general(
          cpu_math.narrow(weights, value.dtype), value, (((2,), (1,)), ((0,), (0,))),
          precision=matmul_precision.resolve(value.dtype, self.inputs.spec.precision),
          preferred_element_type=self.inputs.dtype)

    scores = score_tiles.modify(self.inputs.mods, mod, scores)
    logits = jnp.where(seen, scores, -jnp.inf)
    return online_softmax.update(running, logits, weigh, exp=cpu_math.exp)

  def finish(self, running: online_softmax.Running) -> tuple[jax.Array, jax.Array]:
    """Returns out [K, block_rows, E] and lse [K, block_rows, 1]."""
    return online_softmax.finish(running, paged_operands.row_sinks(self.inputs))


class _TokenMajor(NamedTuple):
  """A few rows, whose logits are [block_kv, K, block_rows]; see `cpu_matvec`."""

  inputs: BlockedInputs
  rows: jax.Array  # [K, block_rows, D]

  def start(self) -> online_softmax.Running:
    """Returns the running softmax of an empty set of keys."""
    shape = (1, *self.rows.shape[:2])
    return online_softmax.start(shape, self.inputs.heads.value_width, self.inputs.dtype)

  def fold(self, running: online_softmax.Running, part: Callable[..., jax.Array],
           seen: jax.Array, mod: score_tiles.ModTile | None) -> online_softmax.Running:
    """Folds in keys and values read by `part`, visible where seen [block_rows, block_kv]."""
    scores = _scores(self.inputs, self._scores(part))
    if mod is not None:
      scores = evaluate.apply_keys_first(
          mod.structure, mod.slices(self.inputs.mods), scores, mod.where)
    logits = jnp.where(seen.T[:, None], scores, -jnp.inf)
    return online_softmax.update(
        running, logits[..., None], lambda weights: self._weigh(weights[..., 0], part)[None],
        exp=lambda x: lax.optimization_barrier(cpu_math.exp(x)), axis=0, fold=cpu_matvec.fold)

  def finish(self, running: online_softmax.Running) -> tuple[jax.Array, jax.Array]:
    """Returns out [K, block_rows, E] and lse [K, block_rows, 1]."""
    sinks = paged_operands.row_sinks(self.inputs)
    out, lse = online_softmax.finish(running, None if sinks is None else sinks[None])
    return out[0], lse[0]

  def _scores(self, part: Callable[..., jax.Array]) -> jax.Array:
    """Returns scores [block_kv, K, block_rows]."""
    summed = lambda rows: cpu_matvec.scores(rows.astype(_wide(self.inputs)), lambda i: part(
        "key", columns=slice(i, i + cpu_matvec.LANES))).astype(self.inputs.dtype)
    dots = lambda rows: jnp.einsum(
        "kmd,ckd->ckm", rows, part("key"), preferred_element_type=self.inputs.dtype,
        precision=matmul_precision.resolve(rows.dtype, self.inputs.spec.precision))
    return lax.platform_dependent(self.rows, cpu=summed, default=dots)

  def _weigh(self, weights: jax.Array, part: Callable[..., jax.Array]) -> jax.Array:
    """Returns weights [block_kv, K, block_rows] times values: [K, block_rows, E]."""
    inputs, dtype = self.inputs, _wide(self.inputs)
    widened = layouts.dtype_of(inputs.cache).itemsize < dtype.itemsize
    summed = lambda weights: cpu_matvec.weigh(
        weights.astype(dtype), lambda first, length: part("value", slice(first, first + length)),
        inputs.heads.value_width, widened=widened).astype(inputs.dtype)

    def dots(weights: jax.Array) -> jax.Array:  # rounded to the values' dtype, summed in full
      value = part("value")
      return jnp.einsum(
          "ckm,cke->kme", cpu_math.narrow(weights, value.dtype), value,
          precision=matmul_precision.resolve(value.dtype, inputs.spec.precision),
          preferred_element_type=inputs.dtype)

    return lax.platform_dependent(weights, cpu=summed, default=dots)
