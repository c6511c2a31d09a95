# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-wise attention in plain XLA: forward, backward and tangent in linear memory.

Loops over one batch row and a few key heads (`step_heads`) at a time, then over blocks. The
`BlockMap` determines which blocks are visited, and which of them evaluate the mask. The G query
heads of a key head become rows (block_rows = block_q * G), so keys are never repeated.

Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning,
https://arxiv.org/abs/2307.08691.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, nonfinite, online_softmax
from attn_core.kernels.common.backward import compute_delta, d_sinks, finite_lse
from attn_core.kernels.common.contract import BackwardResiduals, Kernel, Residuals
from attn_core.kernels.xla import (
    cpu_math, few_keys, plain, score_tiles, selected, selected_steps, tile_logits, tile_ops,
    tiling)
from attn_core.types import (AttentionSpec, BlockSizes, Operands, at_least_float32, value_width,
                             with_operands)


def _is_short(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> bool:
  """Returns whether the call is computed in one piece."""
  return (spec.latent_width is None and tiling.is_short(operands, block_sizes)
          and plain.supports(operands, spec))


def _is_faster_in_loops(operands: Operands, spec: AttentionSpec) -> bool:
  """Returns whether the forward of a call that fits in one piece takes less time in loops.

  XLA:CPU computes masked float16 in one piece in 1 to 1.9 times the time. Where the forward has a
  backward, which has float32 outputs (`autodiff.rounding`), they share weights in one piece.
  """
  return (operands.query.dtype == jnp.float16 and spec.out_dtype is None
          and not plain.sees_all(operands, spec) and operands.key.shape[1] >= tiling.SHORT_FLOAT16)


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  listed = selected_steps.make_inputs(operands, spec)
  if listed is not None:
    return selected.forward(listed)
  if _is_short(operands, spec, block_sizes) and not _is_faster_in_loops(operands, spec):
    return plain.forward(operands, spec, block_sizes)
  dense_operands.assert_operands(operands)
  inputs = tile_ops.block_inputs(operands, spec, block_sizes, backward=False)
  batch, length, heads, _ = inputs.operands.query.shape
  width = value_width(operands, spec)
  nan_keys = nonfinite.nan_of_pairs(inputs.operands.key, inputs.operands.value)

  def step(n: jax.Array, results: Residuals) -> Residuals:
    grid_index = tile_ops.make_grid_index(inputs, n)

    def query_block(i: jax.Array, results: Residuals) -> Residuals:
      rows = tile_ops.scaled_query(inputs, grid_index, i)

      def key_block(j: jax.Array, running: online_softmax.Running,
                    masked: tile_ops.Masked) -> online_softmax.Running:
        key, value = tile_ops.keys_and_values(inputs, grid_index, j, nan_keys)
        scores, _ = tile_logits.biased_scores(inputs, grid_index, rows, key, (i, j))
        mod = score_tiles.of_tile(inputs, grid_index, (i, j))
        logits = tile_logits.hide(inputs, grid_index, (i, j, masked),
                                  score_tiles.modify(inputs.operands.mods, mod, scores))
        # The sum of the rounded weights divides their product with the values: rounding errors
        # cancel, and XLA:CPU writes the weights once, in the dtype of the product.
        return online_softmax.update(
            running, logits, lambda weights: tile_ops.dot(
                tile_ops.apply_dropout(inputs, grid_index, (i, j), weights), value, inputs),
            exp=lambda x: tile_ops.weights_of(inputs, x),
            rounded=lambda weights: cpu_math.for_product(weights, value.dtype))

      running = online_softmax.start((inputs.step_heads, rows.shape[1]), width, inputs.dtype)
      running = tile_ops.visit_blocks(inputs, grid_index, i, key_block, running)
      out, lse = online_softmax.finish(running, tile_ops.row_sinks(inputs, grid_index))
      return Residuals(
          tile_ops.write_rows(inputs, grid_index, i, results.out,
                              out * tile_ops.kept_scale(inputs)),
          tile_ops.write_row_scalars(inputs, grid_index, i, results.lse, lse[..., 0]))

    return tile_ops.loop(0, inputs.sizes.num_query_blocks, query_block, results)

  results = Residuals(
      jnp.zeros((batch, length, heads, width), dense_operands.out_dtype(operands, spec)),
      jnp.zeros((batch, heads, length), dense_operands.lse_dtype(spec)))
  results = tile_ops.loop(0, inputs.num_steps, step, results)
  queries = operands.query.shape[1]
  return Residuals(results.out[:, :queries], results.lse[..., :queries])


def tangent(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
            residuals: Residuals, tangents: dict[str, jax.Array]) -> Residuals:
  """Computes the tangents of out and lse, block by block; see `contract.TangentFn`.

  d_lse = sum_s P * d_logits;  d_out = sum_s P * (d_logits * value + d_value) - d_lse * out
  """
  listed = selected_steps.make_inputs(operands, spec)
  if listed is not None:
    return selected.tangent(listed, residuals, tangents)
  dense_operands.assert_tangents(operands, residuals, tangents, spec.latent_width)
  spec = _widened(spec)
  inputs = tile_ops.block_inputs(operands, spec, block_sizes, backward=False)
  out, lse = tile_ops.pad_residuals(inputs, residuals)
  given: dict[str, Any] = {"bias": None, "sinks": None, **tangents}
  d_operands = with_operands(operands._replace(mods=score_tiles.no_moves(operands.mods)), given)
  d_operands = dense_operands.pad_operands(d_operands, inputs.sizes)
  d_inputs = inputs._replace(operands=tile_ops.pad_mods(d_operands, spec, inputs.sizes))
  width = value_width(operands, spec)
  nan_keys = nonfinite.nan_of_pairs(inputs.operands.key, inputs.operands.value)

  def step(n: jax.Array, results: Residuals) -> Residuals:
    grid_index = tile_ops.make_grid_index(inputs, n)

    def query_block(i: jax.Array, results: Residuals) -> Residuals:
      rows = tile_ops.scaled_query(inputs, grid_index, i)
      d_rows = tile_ops.scaled_query(d_inputs, grid_index, i) if "query" in tangents else None
      row_lse = tile_ops.row_scalars(inputs, grid_index, i, lse)[..., None]

      def d_scores_of(j: jax.Array, key: jax.Array, slope: jax.Array | None) -> jax.Array | float:
        total: jax.Array | float = 0.0
        if d_rows is not None:
          total = total + tile_ops.scores_of(inputs, d_rows, key)
        if "key" in tangents:
          d_key = tile_ops.key_rows(d_inputs.operands.key, inputs, grid_index, j)
          total = total + tile_ops.scores_of(inputs, rows, d_key)
        total = total * tile_ops.scale_parts(inputs)[1]
        total = total if slope is None else total * slope
        if "bias" in tangents:
          total = total + tile_logits.bias_tile(d_inputs, grid_index, (i, j)).astype(inputs.dtype)
        return total

      def key_block(j: jax.Array, sums: tuple[jax.Array, jax.Array],
                    masked: tile_ops.Masked) -> tuple[jax.Array, jax.Array]:
        key, value = tile_ops.keys_and_values(inputs, grid_index, j, nan_keys)
        scores, slope = tile_logits.biased_scores(inputs, grid_index, rows, key, (i, j))
        mod = score_tiles.of_tile(inputs, grid_index, (i, j))
        logits, d_logits = score_tiles.tangent(
            inputs.operands.mods, d_inputs.operands.mods, mod, scores, d_scores_of(j, key, slope))
        logits = tile_logits.hide(inputs, grid_index, (i, j, masked), logits)
        weights = tile_ops.weights_of(inputs, logits - finite_lse(row_lse))
        # A hidden key has weight 0, and d_logits may be infinite: 0 * inf is NaN.
        d_logits = jnp.where(weights == 0, 0, d_logits * weights)
        d_lse, d_out = sums
        d_lse = d_lse + d_logits.sum(-1, keepdims=True)
        kept = lambda x: tile_ops.apply_dropout(inputs, grid_index, (i, j), x)
        weigh = lambda x, of: tile_ops.dot(cpu_math.narrow(kept(x), of.dtype), of, inputs)
        d_out = d_out + weigh(d_logits, value)
        if ("value" if spec.latent_width is None else "key") in tangents:
          d_value = tile_ops.value_rows(d_inputs, grid_index, j)
          d_out = d_out + weigh(weights, d_value)
        return d_lse, d_out

      sums = (jnp.zeros((inputs.step_heads, rows.shape[1], 1), inputs.dtype),
              jnp.zeros((inputs.step_heads, rows.shape[1], width), inputs.dtype))
      d_lse, d_out = tile_ops.visit_blocks(inputs, grid_index, i, key_block, sums)
      if "sinks" in tangents:
        sinks, d_row_sinks = (tile_ops.row_sinks(x, grid_index) for x in (inputs, d_inputs))
        assert sinks is not None and d_row_sinks is not None
        d_lse = d_lse + jnp.where(
            sinks == -jnp.inf, 0, jnp.exp(sinks - finite_lse(row_lse)) * d_row_sinks)
      row_out = tile_ops.query_rows(out, inputs, grid_index, i).astype(inputs.dtype)
      d_out = d_out * tile_ops.kept_scale(inputs) - d_lse * row_out
      return Residuals(
          tile_ops.write_rows(inputs, grid_index, i, results.out, d_out),
          tile_ops.write_row_scalars(inputs, grid_index, i, results.lse, d_lse[..., 0]))

    return tile_ops.loop(0, inputs.sizes.num_query_blocks, query_block, results)

  results = Residuals(jnp.zeros(out.shape, dense_operands.out_dtype(operands, spec)),
                      jnp.zeros_like(lse))
  results = tile_ops.loop(0, inputs.num_steps, step, results)
  queries = operands.query.shape[1]
  return Residuals(results.out[:, :queries], results.lse[..., :queries])


def _widened(spec: AttentionSpec) -> AttentionSpec:
  """Returns the spec of derivatives: their sums have at least 32 bits, as the lse has."""
  return spec._replace(softmax_dtype=at_least_float32(spec.softmax_dtype))


def _pad_lse(lse: jax.Array, padding: int, spec: AttentionSpec) -> jax.Array:
  """Pads the lse [B, H, T] so that rows of padding weigh little: a score mod may raise them."""
  padded = dense_operands.pad_axis(lse, 2, padding)
  if not spec.has_score_mod or padded is lse:
    return padded
  is_row = jnp.arange(padded.shape[2]) < lse.shape[2]
  return jnp.where(is_row[None, None], padded, jnp.inf)


# Cotangents of query, key, value, bias (None: not in `wrt`) and arrays of the score mod.
_Found = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, score_tiles.Sums]


class _BackwardSums(NamedTuple):
  """Cotangents that the backward accumulates; None: not in `wrt`, or outside its loop."""

  query: jax.Array  # [step_heads, D, T * G]: transposed and without the scale
  key: jax.Array | None  # [step_heads, block_kv, D]
  value: jax.Array | None  # [step_heads, block_kv, E]
  bias: jax.Array | None  # like the bias, padded
  mods: score_tiles.Sums  # like the arrays of the score mod, padded


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: BackwardResiduals, cotangents: Residuals,
             wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `contract.BackwardFn`.

  dS = P * (d_out . value - sum(d_out * out) + d_lse), and from it d_query, d_key, d_bias and
  d_sinks; d_value = P^T . d_out. Key blocks outside, query blocks inside, scores transposed
  [block_kv, block_rows], so that all five products are row-major matrix products without
  transposition. Every sum has a fixed order: the result is deterministic.
  """
  listed = selected_steps.make_inputs(operands, spec)
  if listed is not None:
    return selected.backward(listed, residuals, cotangents, wrt)
  if _is_short(operands, spec, block_sizes):
    return plain.backward(operands, spec, block_sizes, residuals, cotangents, wrt)
  dense_operands.assert_operands(operands)
  dense_operands.assert_residuals(operands, residuals, cotangents, latent_width=spec.latent_width)
  spec = _widened(spec)
  inputs = tile_ops.block_inputs(operands, spec, block_sizes, backward=True)
  padding = inputs.operands.query.shape[1] - operands.query.shape[1]
  lse = _pad_lse(residuals.lse, padding, spec)
  delta = compute_delta(residuals, cotangents, inputs.dtype)
  sums_delta = few_keys.sums_delta(inputs, residuals)
  zeros = functools.partial(cpu_math.zeros, done=(delta, operands.key))
  d_out = dense_operands.pad_axis(cotangents.out, 1, padding)
  delta_rows = dense_operands.pad_axis(
      -cotangents.lse.astype(delta.dtype) if sums_delta else delta, 2, padding)

  def step(n: jax.Array, results: _Found) -> _Found:
    grid_index = tile_ops.make_grid_index(inputs, n)
    queries = nonfinite.mask_nonfinite(tile_ops.scaled_query(inputs, grid_index, None))
    d_outs = tile_ops.query_rows(d_out, inputs, grid_index, None)
    row_lse, row_delta = (tile_ops.row_scalars(inputs, grid_index, None, x)
                               for x in (lse, delta_rows))

    def key_block(j: jax.Array, carry: tuple[_BackwardSums, jax.Array, jax.Array]
                  ) -> tuple[_BackwardSums, jax.Array, jax.Array]:
      sums, d_key, d_value = carry
      key = nonfinite.mask_nonfinite(tile_ops.key_rows(
          inputs.operands.key, inputs, grid_index, j))
      value = nonfinite.mask_nonfinite(tile_ops.value_rows(inputs, grid_index, j, key))
      # The barrier keeps XLA from folding the transposition into a product, which is slower and,
      # in bfloat16 on jax 0.12, more than XLA:CPU can do.
      key_transposed = lax.optimization_barrier(key.transpose(0, 2, 1))
      key_tile = _KeyTile(key, key_transposed, value, queries, d_outs, row_lse, row_delta,
                          sums_delta)
      sums = sums._replace(key=jnp.zeros(key_tile.key.shape, inputs.dtype),
                           value=jnp.zeros(key_tile.value.shape, inputs.dtype))
      sums = tile_ops.visit_blocks(inputs, grid_index, j, lambda i, sums, masked: _backward_tile(
          inputs, grid_index, key_tile, (i, j, masked), sums), sums)
      assert sums.key is not None and sums.value is not None
      scaled = sums.key * (tile_ops.scale_parts(inputs)[1] / tile_ops.d_logits_scale(inputs))
      if spec.latent_width is not None:  # values are a part of the keys
        of_values = sums.value * tile_ops.kept_scale(inputs)
        scaled = scaled + dense_operands.pad_axis(
            of_values, 2, scaled.shape[2] - spec.latent_width)
      d_key = tile_ops.write_key_rows(inputs, grid_index, j, d_key, scaled)
      if spec.latent_width is None:
        d_value = tile_ops.write_key_rows(
            inputs, grid_index, j, d_value, sums.value * tile_ops.kept_scale(inputs))
      return sums._replace(key=None, value=None), d_key, d_value

    d_query, d_key, d_value, d_bias, d_mods = results
    sums = _BackwardSums(
        zeros((inputs.step_heads, queries.shape[2], queries.shape[1]), inputs.dtype),
        None, None, d_bias, d_mods)
    sums, d_key, d_value = tile_ops.loop(
        0, inputs.sizes.num_key_blocks, key_block, (sums, d_key, d_value))
    d_rows = sums.query.transpose(0, 2, 1) * jnp.asarray(
        spec.softmax_scale / tile_ops.d_logits_scale(inputs), inputs.dtype)
    return (tile_ops.write_rows(inputs, grid_index, None, d_query, d_rows), d_key, d_value,
            sums.bias, sums.mods)

  query, key, value, bias, *_ = inputs.operands
  d_bias = None
  if "bias" in wrt:
    assert bias is not None
    d_bias = jnp.zeros(bias.shape, inputs.dtype)
  initial: Any = (*(zeros(x.shape, x.dtype) for x in (query, key, value)), d_bias,
                  score_tiles.start(inputs.operands.mods, wrt, inputs.dtype))
  found = _without_padding(operands, tile_ops.loop(0, inputs.num_steps, step, initial), wrt)
  if operands.sinks is not None and "sinks" in wrt:
    found["sinks"] = d_sinks(operands.sinks, residuals.lse, delta)
  return tuple(found[name] for name in wrt)


def _without_padding(operands: Operands, results: _Found,
                     wrt: tuple[str, ...]) -> dict[str, jax.Array]:
  """Returns the cotangents by the names of their operands."""
  d_query, d_key, d_value, d_bias, d_mods = results
  found = {"query": d_query[:, :operands.query.shape[1]], "key": d_key[:, :operands.key.shape[1]],
           "value": d_value[:, :operands.value.shape[1]],
           **score_tiles.finish(operands.mods, d_mods)}
  if operands.bias is not None and "bias" in wrt:
    assert d_bias is not None
    rows, columns = operands.bias.shape[2:]
    found["bias"] = d_bias[:, :, :rows, :columns].astype(operands.bias.dtype)
  return found


class _KeyTile(NamedTuple):
  """One key block, and all rows of its heads."""

  key: jax.Array  # [step_heads, block_kv, D]
  key_transposed: jax.Array  # [step_heads, D, block_kv], made once, outside the loop over queries
  value: jax.Array  # [step_heads, block_kv, E]
  queries: jax.Array  # [step_heads, T * G, D], scaled
  d_outs: jax.Array  # [step_heads, T * G, E]
  lse: jax.Array  # [step_heads, T * G]
  delta: jax.Array  # [step_heads, T * G]; if sums_delta, without sum(P * dP)
  sums_delta: bool  # of `_sums_delta`


def _backward_tile(inputs: tile_ops.BlockedInputs, grid_index: tile_ops.GridIndex,
                   key_tile: _KeyTile, tile: tuple[tile_ops.Index, tile_ops.Index, tile_ops.Masked],
                   sums: _BackwardSums) -> _BackwardSums:
  """Adds the contribution of one query block and one key block to the cotangents."""
  assert sums.key is not None and sums.value is not None
  i, j, masked = tile
  length = inputs.sizes.block_q * inputs.group
  rows, d_out = (tile_ops.slice_rows(x, i * length, length)
                 for x in (key_tile.queries, key_tile.d_outs))
  lse, delta = (tile_ops.slice_rows(x, i * length, length)[:, None]
                for x in (key_tile.lse, key_tile.delta))
  scores, slope = tile_logits.biased_scores(
      inputs, grid_index, rows, key_tile.key, (i, j), transposed=True)
  mod = score_tiles.of_tile(inputs, grid_index, (i, j), transposed=True)
  logits, pull = score_tiles.pullback(inputs.operands.mods, mod, scores)
  logits = tile_logits.hide(inputs, grid_index, tile, logits, transposed=True)
  weights = tile_ops.weights_of(inputs, logits - finite_lse(lse))
  d_weights = tile_ops.scores_of(inputs, d_out, key_tile.value, transposed=True)
  d_weights = tile_ops.apply_dropout(inputs, grid_index, (i, j), d_weights, transposed=True)
  d_weights = d_weights * tile_ops.kept_scale(inputs)
  if key_tile.sums_delta:
    delta = delta + few_keys.weighted_sum(inputs, grid_index, weights, d_weights, lse)
  d_logits = weights * (d_weights - delta)
  d_logits, d_mods = pull(d_logits, sums.mods)
  d_bias = sums.bias
  if d_bias is not None:
    d_bias = tile_logits.add_bias_tile(inputs, grid_index, (i, j), d_bias, d_logits)
  d_scores = d_logits if slope is None else d_logits * slope
  d_scores = d_scores * tile_ops.d_logits_scale(inputs)
  kept = tile_ops.apply_dropout(inputs, grid_index, (i, j), weights, transposed=True)
  # Sums of few numbers do not average their rounding.
  if not key_tile.sums_delta or weights.shape[2] > plain.FEW:
    d_scores, kept = (cpu_math.for_product(x, rows.dtype) for x in (d_scores, kept))
  d_query = tile_ops.dot(key_tile.key_transposed, d_scores, inputs)
  d_query = d_query + lax.dynamic_slice_in_dim(
      sums.query, i * length, length, 2, allow_negative_indices=False)
  return _BackwardSums(
      query=lax.dynamic_update_slice_in_dim(
          sums.query, d_query, i * length, 2, allow_negative_indices=False),
      key=sums.key + tile_ops.dot(d_scores, rows, inputs),
      value=sums.value + tile_ops.dot(kept, d_out, inputs),
      bias=d_bias, mods=d_mods)


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  """Checks the block sizes before anything is lowered; see `contract.CheckFn`."""
  del spec
  tiling.check_heads(operands, block_sizes)


KERNEL = Kernel("xla", forward, backward, tangent, check=_check)
