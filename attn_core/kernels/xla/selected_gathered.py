# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention to selected blocks in plain XLA, by gathering the keys of each list.

A step gathers the keys that the lists of a few query blocks name, evaluates the rest of the mask
there, and computes an ordinary softmax over them. The backward adds the cotangents of gathered keys
and values to those of all; on GPUs the order of these sums is not fixed.

Axes of a step are those of `selected_steps`.
"""

import jax
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, nonfinite, online_softmax
from attn_core.kernels.common.backward import finite_lse
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math, tile_ops
from attn_core.kernels.xla.selected_steps import (
    Head, Inputs, Rows, Sums, add_blocks, cotangents_of, dropped, head_of, head_rows,
    keys_and_values, keys_of, masked, over_heads, product, reading_listed, row_sinks, rows_of,
    scores_of, weights_of, write, write_head, write_keys)
from attn_core.masks import dropout
from attn_core.types import value_width


def num_queries(inputs: Inputs) -> int:
  """Returns how many queries results have."""
  return inputs.operands.query.shape[1]


def forward(inputs: Inputs, results: Residuals) -> Residuals:
  """Writes out [B, T, H, E] and lse [B, T, H, 1] into arrays of zeros."""
  inputs = reading_listed(inputs)
  spec, width = inputs.spec, value_width(inputs.operands, inputs.spec)

  def of_head(head: Head, results: Residuals) -> Residuals:
    def step(n: jax.Array, sums: Residuals) -> Residuals:
      keys = keys_of(inputs, head, n)
      key, value = keys_and_values(inputs, head, keys)
      scores, _ = scores_of(inputs, rows_of(inputs, head.query, n), key)
      running = online_softmax.update(
          None, masked(inputs, keys.seen, scores, -jnp.inf), lambda weights: product(
              "brn,bne->bre", dropped(inputs, keys.keep, weights), value, inputs), exp=cpu_math.exp)
      out, lse = online_softmax.finish(running, row_sinks(inputs, head))
      out = out * dropout.kept_scale(spec.dropout_prob)
      return Residuals(write(inputs, sums.out, n, out), write(inputs, sums.lse, n, lse))

    empty = Residuals(*(jnp.zeros((inputs.padded, inputs.group, n), inputs.dtype)
                        for n in (width, 1)))
    out, lse = tile_ops.loop(0, inputs.num_steps, step, empty)
    return Residuals(write_head(inputs, results.out, head, out),
                     write_head(inputs, results.lse, head, lse))

  return over_heads(inputs, of_head, results)


def backward(inputs: Inputs, rows: Rows, results: Sums) -> Sums:
  """Writes the cotangents of query, key and value into arrays of zeros; see `selected.backward`.

  Scores are transposed, [num_blocks, n, block_rows], so that all products but that of d_query are
  row-major.
  """
  latent, kept = inputs.spec.latent_width, dropout.kept_scale(inputs.spec.dropout_prob)
  columns = lambda x, n: rows_of(inputs, x, n).swapaxes(1, 2)  # [num_blocks, 1, block_rows]

  def of_head(head: Head, results: Sums) -> Sums:
    head = head._replace(query=nonfinite.mask_nonfinite(head.query),
                         key=nonfinite.mask_nonfinite(head.key))
    d_out, lse, delta = (head_rows(inputs, x, head.batch, head.key_head).astype(inputs.dtype)
                         for x in rows)

    def step(n: jax.Array, sums: Sums) -> Sums:
      keys = keys_of(inputs, head, n, transposed=True)
      key, value = keys_and_values(inputs, head, keys)
      queries, d_rows = rows_of(inputs, head.query, n), rows_of(inputs, d_out, n)
      weights, d_scores = cotangents_of(
          inputs, scores_of(inputs, queries, key, transposed=True), keys.seen, keys.keep,
          (value, d_rows, columns(lse, n), columns(delta, n)))
      d_query = write(inputs, sums.query, n, product("bnr,bnd->brd", d_scores, key, inputs))
      d_key = product("bnr,brd->bnd", d_scores, queries, inputs)
      d_value = product("bnr,bre->bne", weights, d_rows, inputs) * kept
      scattered = lambda x, found: add_blocks(
          x, keys.blocks.reshape(-1), found.reshape(-1, x.shape[1]), inputs.lists.block_kv)
      if latent is not None:  # values are a part of the keys
        d_key = d_key + dense_operands.pad_axis(d_value, 2, d_key.shape[2] - latent)
        return Sums(d_query, scattered(sums.key, d_key), sums.value)
      return Sums(d_query, scattered(sums.key, d_key), scattered(sums.value, d_value))

    key_shapes = ((x.shape[0] * x.shape[1], x.shape[2]) for x in (head.key, head.value))
    sums = tile_ops.loop(0, inputs.num_steps, step, Sums(*(
        jnp.zeros(shape, inputs.dtype) for shape in (head.query.shape, *key_shapes))))
    # Queries are scaled already, and so is the cotangent of a key.
    d_query = sums.query * jnp.asarray(inputs.spec.softmax_scale, inputs.dtype)
    return Sums(write_head(inputs, results.query, head, d_query),
                write_keys(results.key, head, sums.key),
                write_keys(results.value, head, sums.value))

  return over_heads(inputs, of_head, results)


def tangent(inputs: Inputs, residuals: Residuals, tangents: dict[str, jax.Array]) -> Residuals:
  """Computes the tangents of out and lse; see `contract.TangentFn`.

  d_lse = sum_s P * d_logits;  d_out = sum_s P * (d_logits * value + d_value) - d_lse * out
  """
  operands, spec = inputs.operands, inputs.spec
  dense_operands.assert_tangents(operands, residuals, tangents, spec.latent_width)
  query, key, value = (tangents.get(name, jnp.zeros_like(x)) for name, x in zip(
      Sums._fields, operands[:3]))
  moved = inputs._replace(operands=operands._replace(
      query=query, key=key, value=value, sinks=tangents.get("sinks")))

  def of_head(head: Head, results: Residuals) -> Residuals:
    d_head = head_of(moved, head.batch, head.key_head, propagate=False)
    out, lse = (head_rows(inputs, x, head.batch, head.key_head).astype(inputs.dtype)
                for x in (residuals.out, residuals.lse.swapaxes(1, 2)[..., None]))

    def step(n: jax.Array, sums: Residuals) -> Residuals:
      keys = keys_of(inputs, head, n)
      (key, value), (d_key, d_value) = (keys_and_values(inputs, x, keys) for x in (head, d_head))
      rows, d_rows, row_out, row_lse = (rows_of(inputs, x, n) for x in (
          head.query, d_head.query, out, lse))
      scores, slope = scores_of(inputs, rows, key)
      weights = weights_of(inputs, keys.seen, scores - finite_lse(row_lse))
      d_logits = (product("brd,bnd->brn", d_rows, key, inputs)
                  + product("brd,bnd->brn", rows, d_key, inputs))
      d_logits = d_logits if slope is None else d_logits * slope
      d_logits = jnp.where(weights == 0, 0, weights * d_logits)
      d_lse = d_logits.sum(-1, keepdims=True)
      d_out = (product("brn,bne->bre", dropped(inputs, keys.keep, d_logits), value, inputs)
               + product("brn,bne->bre", dropped(inputs, keys.keep, weights), d_value, inputs))
      sinks, d_row_sinks = row_sinks(inputs, head), row_sinks(moved, head)
      if sinks is not None and d_row_sinks is not None:
        d_lse = d_lse + jnp.where(sinks == -jnp.inf, 0, jnp.exp(
            sinks - finite_lse(row_lse)) * d_row_sinks)
      d_out = d_out * dropout.kept_scale(spec.dropout_prob) - d_lse * row_out
      return Residuals(write(inputs, sums.out, n, d_out), write(inputs, sums.lse, n, d_lse))

    found = tile_ops.loop(0, inputs.num_steps, step, Residuals(
        jnp.zeros_like(out), jnp.zeros_like(lse)))
    return Residuals(write_head(inputs, results.out, head, found.out),
                     write_head(inputs, results.lse, head, found.lse))

  out, lse = over_heads(inputs, of_head, Residuals(
      jnp.zeros(residuals.out.shape, dense_operands.out_dtype(operands, spec)),
      jnp.zeros_like(residuals.lse.swapaxes(1, 2)[..., None])))
  return Residuals(out, lse[..., 0].swapaxes(1, 2))
