# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward of attention over pages in plain XLA: cotangents of all operands.

  dS = P * (d_out . value - sum(d_out * out) + d_lse), and from it d_query and d_key
  d_value = P^T . d_out

Requests outside, their key blocks next, query blocks inside. A key block is added to its pages
once, so pages that requests share sum over them, in the order of the requests: the result
is deterministic. Memory is that of the queries and of the pages in the dtype of the sums.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged import latent_layout, layouts
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages
from attn_core.caches.paged.rows import interleave, pad_rows
from attn_core.kernels.common import matmul_precision, nonfinite, paged_operands
from attn_core.kernels.common.backward import finite_lse, row_sums
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.paged_operands import BlockedInputs, Index, QueryBlock
from attn_core.kernels.xla import cpu_math, paged_blocks, score_tiles, tile_ops
from attn_core.sharding import varying_axes
from attn_core.types import BlockSizes, PagedOperands, PagedSpec, mod_number


class Cotangents(NamedTuple):
  """Cotangents of the operands; also their sums while they are computed."""

  query: jax.Array  # [T, H, D]
  cache: Pages | None  # None for quantized pages
  mods: score_tiles.Sums  # of arrays of the score mod, by name
  sinks: jax.Array | None = None  # [H]


def backward(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
             block_sizes: BlockSizes, residuals: Residuals, cotangents: Residuals,
             wrt: tuple[str, ...]) -> Cotangents:
  """Computes the cotangents of query, pages and sinks, and of arrays of the score mod.

  Args:
    operands: those of the forward.
    spec: what was computed.
    heads: the heads in the pages, without their padding.
    block_sizes: sizes fixed by the caller.
    residuals: results of `paged_forward.forward`.
    cotangents: those of out [T, H, E] and lse [T, H, 1].
    wrt: names of operands; only those of arrays of the score mod, as in `types.operand`, count.
  """
  paged_operands.assert_operands(operands, heads)
  paged_operands.assert_residuals(operands, heads, residuals, cotangents)
  query, cache = operands.query, operands.cache
  tokens = query.shape[0]
  block_q, block_pages = paged_operands.choose_block_sizes(
      operands, block_sizes, query.shape[1] // heads.key_heads)
  delta = row_sums("the,the->th", cotangents.out.astype(residuals.out.dtype), residuals.out,
                   spec.softmax_dtype)[..., None] - cotangents.lse
  pages_like = None if cache.key_scales is not None else cache
  d_query, d_cache = jax.tree.map(
      lambda x: jnp.zeros(x.shape, spec.softmax_dtype), (query, pages_like))
  sums = varying_axes.initial_carry(query, Cotangents(
      d_query, d_cache, score_tiles.start(operands.mods, wrt, spec.softmax_dtype)))
  for first, end, block_q in paged_operands.request_ranges(operands, block_q):
    inputs = paged_operands.block_inputs(operands, spec, heads, (block_q, block_pages))
    rows = _QueryRows(*(paged_operands.pad_tokens(x, block_q)
                        for x in (cotangents.out, residuals.lse, delta)))
    sums = sums._replace(query=paged_operands.pad_tokens(sums.query, block_q),
                         mods=_padded(sums.mods, operands, spec, block_q))
    sums = tile_ops.loop(first, end, functools.partial(_request, inputs, rows), sums)
    sums = sums._replace(query=sums.query[block_q:block_q + tokens],
                         mods=_padded(sums.mods, operands, spec, -block_q))
  d_sinks = None
  if operands.sinks is not None:
    share = jnp.exp(operands.sinks[None] - finite_lse(residuals.lse[..., 0]))
    d_sinks = -(share * delta[..., 0]).sum(0).astype(operands.sinks.dtype)
  return Cotangents(sums.query.astype(query.dtype),
                    jax.tree.map(lambda x, like: x.astype(like.dtype), sums.cache, pages_like),
                    score_tiles.finish(operands.mods, sums.mods), d_sinks)


def _padded(sums: score_tiles.Sums, operands: PagedOperands, spec: PagedSpec,
            amount: int) -> score_tiles.Sums:
  """Pads sums of arrays that have tokens by `amount` in front and behind; < 0: removes them."""
  tokens = paged_operands.has_tokens(operands.mods, spec)
  widths = ((0, 0, 0), (0, 0, 0), (amount, amount, 0), (0, 0, 0))
  return {name: lax.pad(x, jnp.zeros((), x.dtype), widths) if tokens[mod_number(name)] else x
          for name, x in sums.items()}


class _QueryRows(NamedTuple):
  """Inputs of the backward for every query, padded by block_q tokens in front and behind."""

  d_out: jax.Array  # [block_q + T + block_q, H, E]
  lse: jax.Array  # [block_q + T + block_q, H, 1]
  delta: jax.Array  # [block_q + T + block_q, H, 1]: sum(d_out * out) - d_lse


# Cotangents of query, key block, value block and arrays of the score mod.
_Carry = tuple[jax.Array, jax.Array, jax.Array, score_tiles.Sums]


def _request(inputs: BlockedInputs, query_rows: _QueryRows, request: Index,
             sums: Cotangents) -> Cotangents:
  """Adds the contribution of one request's queries."""
  first, end = paged_operands.query_blocks(inputs, request)

  def key_block(j: jax.Array, sums: Cotangents) -> Cotangents:
    key, value = map(nonfinite.mask_nonfinite, paged_blocks.keys_and_values(inputs, request, j))

    def query_block(i: jax.Array, carry: _Carry) -> _Carry:
      block = paged_operands.query_block(inputs, request, i)
      begin, stop = paged_operands.key_blocks(inputs, block)
      return lax.cond((begin <= j) & (j < stop),
                      lambda carry: _tile(inputs, query_rows, block, (j, key, value), carry),
                      lambda carry: carry, carry)

    zeros = lambda x: varying_axes.initial_carry(x, jnp.zeros(x.shape, inputs.dtype))
    d_query, d_key, d_value, d_mods = tile_ops.loop(
        first, end, query_block, (sums.query, zeros(key), zeros(value), sums.mods))
    sums = sums._replace(query=d_query, mods=d_mods)
    if sums.cache is None:
      return sums
    ids = paged_blocks.page_ids(inputs, request, j)
    return sums._replace(cache=_add(sums.cache, ids, d_key, d_value))

  # The first block attends to the lowest key, and the last one to the highest.
  begin, _ = paged_operands.key_blocks(inputs, paged_operands.query_block(inputs, request, first))
  _, stop = paged_operands.key_blocks(inputs, paged_operands.query_block(inputs, request, end - 1))
  return tile_ops.loop(begin, jnp.where(first < end, stop, begin), key_block, sums)


def _tile(inputs: BlockedInputs, query_rows: _QueryRows, block: QueryBlock,
          key_tile: tuple[Index, jax.Array, jax.Array], carry: _Carry) -> _Carry:
  """Adds the contribution of a query block and a key block to the cotangents."""
  block_index, key, value = key_tile
  d_query, d_key, d_value, d_mods = carry
  rows, d_out, lse, delta = (paged_operands.live_rows_of(inputs, block, x)
                             for x in (inputs.query, *query_rows))
  rows = nonfinite.mask_nonfinite(rows)
  scores, slope = paged_blocks.capped(inputs, paged_blocks.scores_of(inputs, rows, key))
  logits, pull = score_tiles.pullback(
      inputs.mods, paged_blocks.mod_tile(inputs, block, block_index), scores)
  logits = jnp.where(paged_blocks.visible(inputs, block, block_index), logits, -jnp.inf)
  weights = jnp.where(logits == -jnp.inf, 0, cpu_math.exp(logits - finite_lse(lse)))
  d_weights = dot(inputs, d_out, value, (2, 2))
  d_logits = weights * (d_weights - delta)
  if inputs.spec.has_score_mod:
    d_logits = jnp.where(logits == -jnp.inf, 0, d_logits)
  d_scores, d_mods = pull(d_logits, d_mods)
  d_scores = jnp.where(logits == -jnp.inf, 0, d_scores * slope)
  narrow = lambda x: cpu_math.narrow(x, key.dtype)
  d_rows = dot(inputs, narrow(d_scores), key, (2, 1))
  old = paged_operands.rows_of(inputs, block, d_query)
  return (paged_blocks.put_rows(inputs, block, d_query, old + d_rows),
          d_key + dot(inputs, narrow(d_scores), rows, (1, 1)),
          d_value + dot(inputs, narrow(weights), d_out, (1, 1)), d_mods)


def dot(inputs: BlockedInputs, left: jax.Array, right: jax.Array,
        axes: tuple[int, int]) -> jax.Array:
  """Returns products of matrices [K, m, n] over an axis of each, in the dtype of the sums."""
  return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((0,), (0,))),
                         precision=matmul_precision.resolve(left.dtype, inputs.spec.precision),
                         preferred_element_type=inputs.dtype)


def _add(cache: Pages, ids: jax.Array, key: jax.Array, value: jax.Array) -> Pages:
  """Adds [K, block_kv, D] and [K, block_kv, E] to the pages they were read from."""
  if isinstance(cache, PagesLatent):
    return latent_layout.add(cache, ids, key, value)
  count, size = ids.shape[0], layouts.page_size(cache)
  if isinstance(cache, layouts.PagesV1):
    shaped = lambda x: x.reshape(x.shape[0], count, size, x.shape[2])
    return cache._replace(key_pages=cache.key_pages.at[:, ids].add(shaped(key)),
                          value_pages=cache.value_pages.at[:, ids].add(shaped(value)))
  new = pad_rows(cache, interleave(*(x.swapaxes(0, 1) for x in (key, value))))
  new = new.reshape(count, size, *cache.pages.shape[2:])
  return cache._replace(pages=cache.pages.at[ids].add(new))
