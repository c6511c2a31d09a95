# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward mode of attention over pages in plain XLA: tangents of out and lse.

  dS    = slope * (d_query . key + query . d_key), then the tangent of the score mod
  d_lse = sum over s of P * dS
  d_out = sum over s of (P * dS * value + P * d_value) - d_lse * out

The loops are those of the forward; memory is that of the queries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_core.caches.paged import layouts
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import nonfinite, paged_operands
from attn_core.kernels.common.backward import finite_lse
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.paged_operands import BlockedInputs, Index
from attn_core.kernels.xla import (cpu_math, paged_backward, paged_blocks, score_tiles,
                                   tile_ops)
from attn_core.sharding import varying_axes
from attn_core.types import BlockSizes, PagedOperands, PagedSpec, mod_names


class Tangents(NamedTuple):
  """Tangents of operands; None: zero."""

  query: jax.Array | None = None  # [T, H, D]
  cache: Pages | None = None
  sinks: jax.Array | None = None  # [H]
  mods: dict[str, jax.Array] = {}  # of arrays of the score mod, by name; see `types.operand`


def tangent(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
            block_sizes: BlockSizes, residuals: Residuals, tangents: Tangents) -> Residuals:
  """Computes the tangents of out and lse.

  Args:
    operands: those of the forward.
    spec: what was computed.
    heads: the heads in the pages, without their padding.
    block_sizes: sizes fixed by the caller.
    residuals: results of `paged_forward.forward`.
    tangents: those of the operands; quantized pages have none.
  """
  paged_operands.assert_operands(operands, heads)
  paged_operands.assert_residuals(operands, heads, residuals)
  query = operands.query
  tokens = query.shape[0]
  sizes = paged_operands.choose_block_sizes(
      operands, block_sizes, query.shape[1] // heads.key_heads)
  sums = varying_axes.initial_carry(query, Residuals(*(
      jnp.zeros(x.shape, spec.softmax_dtype) for x in residuals)))
  sinks_only = tangents.query is None and tangents.cache is None and not tangents.mods
  d_mods = tuple(tangents.mods.get(name, jnp.zeros_like(x))
                 for name, x in zip(mod_names(operands), operands.mods))
  ranges = [] if sinks_only else paged_operands.request_ranges(operands, sizes[0])
  for first, end, block_q in ranges:
    inputs = paged_operands.block_inputs(operands, spec, heads, (block_q, sizes[1]))
    pad = functools.partial(paged_operands.pad_tokens, amount=block_q)
    lse, d_rows = pad(residuals.lse), tangents
    if tangents.query is not None:
      d_rows = tangents._replace(query=pad(tangents.query))
    d_inputs = _TangentInputs(d_rows, paged_operands.pad_mods(d_mods, spec, block_q), lse)
    sums = tile_ops.loop(first, end, functools.partial(_request, inputs, d_inputs),
                         Residuals(*map(pad, sums)))
    sums = Residuals(*(x[block_q:block_q + tokens] for x in sums))
  d_lse = sums.lse
  if tangents.sinks is not None:
    assert operands.sinks is not None
    share = jnp.exp(operands.sinks[None, :, None] - finite_lse(residuals.lse))
    d_lse = d_lse + (share * tangents.sinks[None, :, None]).astype(d_lse.dtype)
  d_out = sums.out - d_lse * residuals.out.astype(d_lse.dtype)
  return Residuals(d_out.astype(residuals.out.dtype), d_lse.astype(residuals.lse.dtype))


class _TangentInputs(NamedTuple):
  """Tangents, padded as the operands are, and the lse."""

  tangents: Tangents
  mods: tuple[jax.Array, ...]  # of every array of the score mod
  lse: jax.Array  # [block_q + T + block_q, H, 1]


def _request(inputs: BlockedInputs, d_inputs: _TangentInputs, request: Index,
             sums: Residuals) -> Residuals:
  """Computes the two sums over keys for all queries of a request."""
  tangents, lse = d_inputs.tangents, d_inputs.lse

  def step(block_index: jax.Array, sums: Residuals) -> Residuals:
    block = paged_operands.query_block(inputs, request, block_index)
    rows, row_lse = (paged_operands.live_rows_of(inputs, block, x) for x in (inputs.query, lse))
    rows, d_rows = nonfinite.mask_nonfinite(rows), None
    if tangents.query is not None:
      d_rows = paged_operands.live_rows_of(inputs, block, tangents.query)

    def fold(j: jax.Array, running: Residuals) -> Residuals:
      key, value = map(nonfinite.mask_nonfinite, paged_blocks.keys_and_values(inputs, request, j))
      d_key, d_value = None, None
      if tangents.cache is not None:
        d_key, d_value = paged_blocks.keys_and_values(
            inputs._replace(cache=tangents.cache), request, j)
        d_key, d_value = nonfinite.propagate_nan(
            d_key, d_value, nonfinite.is_finite(d_key, d_value))
      scores, slope = paged_blocks.capped(inputs, paged_blocks.scores_of(inputs, rows, key))
      d_scores = sum(paged_blocks.scores_of(inputs, left, right)
                     for left, right in ((d_rows, key), (rows, d_key))
                     if left is not None and right is not None) * slope
      logits, d_logits = score_tiles.tangent(
          inputs.mods, d_inputs.mods, paged_blocks.mod_tile(inputs, block, j), scores, d_scores)
      logits = jnp.where(paged_blocks.visible(inputs, block, j), logits, -jnp.inf)
      weights = jnp.where(logits == -jnp.inf, 0, cpu_math.exp(logits - finite_lse(row_lse)))
      share = jnp.where(logits == -jnp.inf, 0, weights * d_logits)
      out = running.out + _weigh(inputs, share, value)
      if d_value is not None:
        out = out + _weigh(inputs, weights, d_value)
      return Residuals(out, running.lse + share.sum(-1, keepdims=True))

    shapes = (x.shape[-1] for x in sums)
    zeros = varying_axes.initial_carry(rows, Residuals(*(
        jnp.zeros((*rows.shape[:2], width), inputs.dtype) for width in shapes)))
    found = tile_ops.loop(*paged_operands.key_blocks(inputs, block), fold, zeros)
    return Residuals(*(paged_blocks.put_rows(inputs, block, x, y) for x, y in zip(sums, found)))

  return tile_ops.loop(*paged_operands.query_blocks(inputs, request), step, sums)


def _weigh(inputs: BlockedInputs, weights: jax.Array, value: jax.Array) -> jax.Array:
  """Returns weights [K, block_rows, block_kv], in the values' dtype, times values."""
  return paged_backward.dot(inputs, cpu_math.narrow(weights, value.dtype), value, (2, 1))
