# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward of attention over pages in plain XLA: cotangents of queries, pages and sinks.

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

from attn_core.caches.paged import layouts
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import matmul_precision, nonfinite, paged_operands
from attn_core.kernels.common.backward import finite_lse, row_sums
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.paged_operands import BlockedInputs, Index, QueryBlock
from attn_core.kernels.xla import cpu_math, paged_blocks, tile_ops
from attn_core.sharding import varying_axes
from attn_core.types import BlockSizes, PagedOperands, PagedSpec


class Cotangents(NamedTuple):
  """Cotangents of query, pages and sinks; also their sums while they are computed."""

  query: jax.Array  # [T, H, D]
  cache: Pages | None  # None for quantized pages
  sinks: jax.Array | None = None  # [H]


def backward(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
             block_sizes: BlockSizes, residuals: Residuals, cotangents: Residuals) -> Cotangents:
  """Computes the cotangents of query, pages and sinks.

  Args:
    operands: those of the forward.
    spec: what was computed.
    heads: the heads in the pages, without their padding.
    block_sizes: sizes fixed by the caller.
    residuals: results of `paged_forward.forward`.
    cotangents: those of out [T, H, E] and lse [T, H, 1].
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
  sums = varying_axes.initial_carry(query, Cotangents(*jax.tree.map(
      lambda x: jnp.zeros(x.shape, spec.softmax_dtype), (query, pages_like))))
  for first, end, block_q in paged_operands.request_ranges(operands, block_q):
    inputs = paged_operands.block_inputs(operands, spec, heads, (block_q, block_pages))
    rows = _QueryRows(*(paged_operands.pad_tokens(x, block_q)
                        for x in (cotangents.out, residuals.lse, delta)))
    sums = sums._replace(query=paged_operands.pad_tokens(sums.query, block_q))
    sums = tile_ops.loop(first, end, functools.partial(_request, inputs, rows), sums)
    sums = sums._replace(query=sums.query[block_q:block_q + tokens])
  d_sinks = None
  if operands.sinks is not None:
    share = jnp.exp(operands.sinks[None] - finite_lse(residuals.lse[..., 0]))
    d_sinks = -(share * delta[..., 0]).sum(0).astype(operands.sinks.dtype)
  return Cotangents(sums.query.astype(query.dtype),
                    jax.tree.map(lambda x, like: x.astype(like.dtype), sums.cache, pages_like),
                    d_sinks)


class _QueryRows(NamedTuple):
  """Inputs of the backward for every query, padded by block_q tokens in front and behind."""

  d_out: jax.Array  # [block_q + T + block_q, H, E]
  lse: jax.Array  # [block_q + T + block_q, H, 1]
  delta: jax.Array  # [block_q + T + block_q, H, 1]: sum(d_out * out) - d_lse


def _request(inputs: BlockedInputs, query_rows: _QueryRows, request: Index,
             sums: Cotangents) -> Cotangents:
  """Adds the contribution of one request's queries."""
  first, end = paged_operands.query_blocks(inputs, request)

  def key_block(j: jax.Array, sums: Cotangents) -> Cotangents:
    key, value = map(nonfinite.mask_nonfinite, paged_blocks.keys_and_values(inputs, request, j))

    def query_block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
                    ) -> tuple[jax.Array, jax.Array, jax.Array]:
      block = paged_operands.query_block(inputs, request, i)
      begin, stop = paged_operands.key_blocks(inputs, block)
      return lax.cond((begin <= j) & (j < stop),
                      lambda carry: _tile(inputs, query_rows, block, (j, key, value), carry),
                      lambda carry: carry, carry)

    zeros = lambda x: varying_axes.initial_carry(x, jnp.zeros(x.shape, inputs.dtype))
    d_query, d_key, d_value = tile_ops.loop(
        first, end, query_block, (sums.query, zeros(key), zeros(value)))
    if sums.cache is None:
      return sums._replace(query=d_query)
    ids = paged_blocks.page_ids(inputs, request, j)
    return sums._replace(query=d_query, cache=_add(sums.cache, ids, d_key, d_value))

  # The first block attends to the lowest key, and the last one to the highest.
  begin, _ = paged_operands.key_blocks(inputs, paged_operands.query_block(inputs, request, first))
  _, stop = paged_operands.key_blocks(inputs, paged_operands.query_block(inputs, request, end - 1))
  return tile_ops.loop(begin, jnp.where(first < end, stop, begin), key_block, sums)


def _tile(inputs: BlockedInputs, query_rows: _QueryRows, block: QueryBlock,
          key_tile: tuple[Index, jax.Array, jax.Array],
          carry: tuple[jax.Array, jax.Array, jax.Array]
          ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds the contribution of a query block and a key block to d_query, d_key and d_value."""
  block_index, key, value = key_tile
  d_query, d_key, d_value = carry
  rows, d_out, lse, delta = (paged_operands.live_rows_of(inputs, block, x)
                             for x in (inputs.query, *query_rows))
  rows = nonfinite.mask_nonfinite(rows)
  logits, slope = paged_blocks.logits_of(inputs, paged_blocks.scores_of(inputs, rows, key),
                                         paged_blocks.visible(inputs, block, block_index))
  weights = jnp.where(logits == -jnp.inf, 0, cpu_math.exp(logits - finite_lse(lse)))
  d_weights = dot(inputs, d_out, value, (2, 2))
  d_scores = jnp.where(logits == -jnp.inf, 0, weights * (d_weights - delta) * slope)
  narrow = lambda x: cpu_math.narrow(x, key.dtype)
  d_rows = dot(inputs, narrow(d_scores), key, (2, 1))
  old = paged_operands.rows_of(inputs, block, d_query)
  return (paged_blocks.put_rows(inputs, block, d_query, old + d_rows),
          d_key + dot(inputs, narrow(d_scores), rows, (1, 1)),
          d_value + dot(inputs, narrow(weights), d_out, (1, 1)))


def dot(inputs: BlockedInputs, left: jax.Array, right: jax.Array,
        axes: tuple[int, int]) -> jax.Array:
  """Returns products of matrices [K, m, n] over an axis of each, in the dtype of the sums."""
  return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((0,), (0,))),
                         precision=matmul_precision.resolve(left.dtype, inputs.spec.precision),
                         preferred_element_type=inputs.dtype)


def _add(cache: Pages, ids: jax.Array, key: jax.Array, value: jax.Array) -> Pages:
  """Adds [K, block_kv, D] and [K, block_kv, E] to the pages they were read from."""
  count, size = ids.shape[0], layouts.page_size(cache)
  if isinstance(cache, layouts.PagesV1):
    shaped = lambda x: x.reshape(x.shape[0], count, size, x.shape[2])
    return cache._replace(key_pages=cache.key_pages.at[:, ids].add(shaped(key)),
                          value_pages=cache.value_pages.at[:, ids].add(shaped(value)))
  rows = layouts.pad_rows(cache, layouts.interleave(*(x.swapaxes(0, 1) for x in (key, value))))
  rows = rows.reshape(count, size, *cache.pages.shape[2:])
  return cache._replace(pages=cache.pages.at[ids].add(rows))
