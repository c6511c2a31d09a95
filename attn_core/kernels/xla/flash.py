"""Block-wise attention in plain XLA: forward, backward and tangent in linear memory.

Loops over one batch row and a few key heads at a time, then over blocks; which
blocks are visited, and which of them evaluate the mask, the `BlockMap` says. The
G query heads of a key head are folded into the rows, so keys are never repeated.

Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning,
https://arxiv.org/abs/2307.08691.

Letters: B batch, T query length, H query heads, G query heads per key head, D query and key
width, E value width; N key heads computed together, C keys of a block, R = Q * G rows of a block.
"""

import functools
from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.xla import cpu_math as numbers, tile_ops as steps
from attn_core.types import AttentionSpec, BlockSizes, Operands


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  problem = steps.cut(operands, spec, block_sizes, backward=False)
  batch, length, heads, _ = problem.operands.query.shape
  width = operands.value.shape[-1]
  finite = steps.finite_keys(problem.operands.key, problem.operands.value)

  def step(n, results):
    place = steps.place_of(problem, n)

    def query_block(i, results):
      rows = steps.scaled_query(problem, place, i)

      def key_block(j, running, masked):
        key, value = steps.keys_and_values(problem, place, j, finite)
        logits, _ = steps.logits_of(problem, place, rows, key, (i, j, masked))
        # The sum over the rounded weights divides their product with the values: what rounding
        # adds to both cancels, and XLA:CPU writes the weights once, in the values' dtype.
        return softmax.update(
            running, logits, lambda weights: steps.dot(
                steps.drop(problem, place, (i, j), weights), value, problem),
            exp=lambda x: steps.weights_of(problem, x),
            rounded=lambda weights: numbers.narrow(weights, value.dtype))

      running = softmax.start((problem.heads, rows.shape[1]), width, problem.dtype)
      running = steps.visit(problem, place, i, key_block, running)
      out, lse = softmax.finish(running, steps.row_sinks(problem, place))
      return Residuals(
          steps.write_rows(problem, place, i, results.out, out * steps.kept_scale(problem)),
          steps.write_row_numbers(problem, place, i, results.lse, lse[..., 0]))

    return steps.loop(0, problem.sizes.num_query_blocks, query_block, results)

  results = Residuals(jnp.zeros((batch, length, heads, width), steps.out_dtype(operands, spec)),
                      jnp.zeros((batch, heads, length), steps.lse_dtype(spec)))
  results = steps.loop(0, problem.num_steps, step, results)
  queries = operands.query.shape[1]
  return Residuals(results.out[:, :queries], results.lse[..., :queries])


def tangent(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
            residuals: Residuals, tangents: dict) -> Residuals:
  """The derivative of (out, lse) along `tangents`, block by block.

  d_lse = sum_s P * d_logits;  d_out = sum_s P * (d_logits * value + d_value) - d_lse * out
  """
  problem = steps.cut(operands, spec, block_sizes, backward=False)
  out, lse = steps.pad_residuals(problem, residuals)
  moved = operands._replace(**{**dict(bias=None, sinks=None), **tangents})
  moved = problem._replace(operands=steps.pad(moved, problem.sizes))
  width = operands.value.shape[-1]
  finite = steps.finite_keys(problem.operands.key, problem.operands.value)

  def step(n, results):
    place = steps.place_of(problem, n)

    def query_block(i, results):
      rows = steps.scaled_query(problem, place, i)
      d_rows = steps.scaled_query(moved, place, i) if "query" in tangents else None
      row_lse = steps.row_numbers(problem, place, i, lse)[..., None]

      def d_logits_of(j, key, slope):
        total = 0.0
        if d_rows is not None:
          total = total + steps.scores_of(problem, d_rows, key)
        if "key" in tangents:
          d_key = steps.key_rows(moved.operands.key, problem, place, j)
          total = total + steps.scores_of(problem, rows, d_key)
        total = total * steps.scale_parts(problem)[1]
        total = total if slope is None else total * slope
        if "bias" in tangents:
          total = total + steps.bias_tile(moved, place, (i, j)).astype(problem.dtype)
        return total

      def key_block(j, sums, masked):
        key, value = steps.keys_and_values(problem, place, j, finite)
        logits, slope = steps.logits_of(problem, place, rows, key, (i, j, masked))
        weights = steps.weights_of(problem, logits - steps.finite_lse(row_lse))
        # A hidden key has weight 0, and what its logit would have done must not be 0 * inf.
        d_logits = jnp.where(weights == 0, 0, d_logits_of(j, key, slope) * weights)
        d_lse, d_out = sums
        d_lse = d_lse + d_logits.sum(-1, keepdims=True)
        weigh = lambda x, of: steps.dot(
            numbers.narrow(steps.drop(problem, place, (i, j), x), of.dtype), of, problem)
        d_out = d_out + weigh(d_logits, value)
        if "value" in tangents:
          d_out = d_out + weigh(weights, steps.key_rows(moved.operands.value, problem, place, j))
        return d_lse, d_out

      sums = (jnp.zeros((problem.heads, rows.shape[1], 1), problem.dtype),
              jnp.zeros((problem.heads, rows.shape[1], width), problem.dtype))
      d_lse, d_out = steps.visit(problem, place, i, key_block, sums)
      if "sinks" in tangents:
        sinks = steps.row_sinks(problem, place)
        d_lse = d_lse + jnp.where(sinks == -jnp.inf, 0, jnp.exp(
            sinks - steps.finite_lse(row_lse)) * steps.row_sinks(moved, place))
      row_out = steps.query_rows(out, problem, place, i).astype(problem.dtype)
      d_out = d_out * steps.kept_scale(problem) - d_lse * row_out
      return Residuals(
          steps.write_rows(problem, place, i, results.out, d_out),
          steps.write_row_numbers(problem, place, i, results.lse, d_lse[..., 0]))

    return steps.loop(0, problem.sizes.num_query_blocks, query_block, results)

  results = Residuals(jnp.zeros(out.shape, steps.out_dtype(operands, spec)), jnp.zeros_like(lse))
  results = steps.loop(0, problem.num_steps, step, results)
  queries = operands.query.shape[1]
  return Residuals(results.out[:, :queries], results.lse[..., :queries])


class _Sums(NamedTuple):
  """What the backward adds up; None: not asked for."""

  query: Any  # [N, D, T * G]: transposed and without the scale
  key: Any  # [N, C, D]
  value: Any  # [N, C, E]
  bias: Any  # like the bias, padded


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: Residuals, cotangents: Residuals, wrt: tuple[str, ...]) -> tuple:
  """The cotangents of the operands named in `wrt`.

  dS = P * (d_out . value - sum(d_out * out) + d_lse), and from it d_query, d_key, d_bias and
  d_sinks; d_value = P^T . d_out. Key blocks outside, query blocks inside, scores transposed
  [C, R], so that all five products are row-major matrix products without transposition.
  Every sum has a fixed order: the result is deterministic.
  """
  problem = steps.cut(operands, spec, block_sizes, backward=True)
  padding = problem.operands.query.shape[1] - operands.query.shape[1]
  lse = steps.pad_axis(residuals.lse, 2, padding)
  correction = steps.correction_of(residuals, cotangents, problem.dtype)
  zeros = functools.partial(numbers.zeros, done=(correction, operands.key))
  d_out = steps.pad_axis(cotangents.out, 1, padding)
  correction_rows = steps.pad_axis(correction, 2, padding)

  def step(n, results):
    place = steps.place_of(problem, n)
    queries = steps.clean(steps.scaled_query(problem, place, None))
    d_outs = steps.query_rows(d_out, problem, place, None)
    row_lse, row_correction = (steps.row_numbers(problem, place, None, x)
                               for x in (lse, correction_rows))

    def key_block(j, carry):
      sums, d_key, d_value = carry
      key, value = (steps.clean(steps.key_rows(x, problem, place, j))
                    for x in (problem.operands.key, problem.operands.value))
      # The barrier keeps XLA from folding the transposition into a product, which is slower and,
      # in bfloat16 on jax 0.12, more than XLA:CPU can do.
      key_transposed = lax.optimization_barrier(key.transpose(0, 2, 1))
      side = _KeySide(key, key_transposed, value, queries, d_outs, row_lse, row_correction)
      sums = sums._replace(key=jnp.zeros(side.key.shape, problem.dtype),
                           value=jnp.zeros(side.value.shape, problem.dtype))
      sums = steps.visit(problem, place, j, lambda i, sums, masked: _backward_tile(
          problem, place, side, (i, j, masked), sums), sums)
      scaled = sums.key * steps.scale_parts(problem)[1]
      d_key = steps.write_key_rows(problem, place, j, d_key, scaled)
      d_value = steps.write_key_rows(
          problem, place, j, d_value, sums.value * steps.kept_scale(problem))
      return sums._replace(key=None, value=None), d_key, d_value

    d_query, d_key, d_value, d_bias = results
    sums = _Sums(zeros((problem.heads, queries.shape[2], queries.shape[1]), problem.dtype),
                 None, None, d_bias)
    sums, d_key, d_value = steps.loop(
        0, problem.sizes.num_key_blocks, key_block, (sums, d_key, d_value))
    d_rows = sums.query.transpose(0, 2, 1) * jnp.asarray(spec.softmax_scale, problem.dtype)
    return steps.write_rows(problem, place, None, d_query, d_rows), d_key, d_value, sums.bias

  query, key, value, bias, *_ = problem.operands
  d_bias = jnp.zeros(bias.shape, problem.dtype) if "bias" in wrt else None
  d_query, d_key, d_value, d_bias = steps.loop(
      0, problem.num_steps, step,
      (*(zeros(x.shape, x.dtype) for x in (query, key, value)), d_bias))
  found = {"query": d_query[:, :operands.query.shape[1]], "key": d_key[:, :operands.key.shape[1]],
           "value": d_value[:, :operands.value.shape[1]]}
  if "bias" in wrt:
    rows, columns = operands.bias.shape[2:]
    found["bias"] = d_bias[:, :, :rows, :columns].astype(operands.bias.dtype)
  if "sinks" in wrt:
    found["sinks"] = d_sinks(operands.sinks, residuals.lse, correction)
  return tuple(found[name] for name in wrt)


class _KeySide(NamedTuple):
  """One key block, and all rows of its heads."""

  key: Any  # [N, C, D]
  key_transposed: Any  # [N, D, C], made once, outside the loop over queries
  value: Any  # [N, C, E]
  queries: Any  # [N, T * G, D], scaled
  d_outs: Any  # [N, T * G, E]
  lse: Any  # [N, T * G]
  correction: Any  # [N, T * G]


def _backward_tile(problem, place, side, tile, sums):
  """Adds what one query block and one key block contribute to the cotangents."""
  i, j, masked = tile
  length = problem.sizes.block_q * problem.group
  rows, d_out = (steps.take(x, i * length, length) for x in (side.queries, side.d_outs))
  lse, correction = (lax.dynamic_slice_in_dim(x, i * length, length, 1)[:, None]
                     for x in (side.lse, side.correction))
  logits, slope = steps.logits_of(problem, place, rows, side.key, (i, j, masked), transposed=True)
  weights = steps.weights_of(problem, logits - steps.finite_lse(lse))
  d_weights = steps.scores_of(problem, d_out, side.value, transposed=True)
  d_weights = steps.drop(problem, place, (i, j), d_weights, transposed=True)
  d_logits = weights * (d_weights * steps.kept_scale(problem) - correction)
  d_bias = sums.bias
  if d_bias is not None:
    d_bias = steps.add_bias_tile(problem, place, (i, j), d_bias, d_logits)
  d_logits = numbers.narrow(d_logits if slope is None else d_logits * slope, rows.dtype)
  kept = numbers.narrow(
      steps.drop(problem, place, (i, j), weights, transposed=True), d_out.dtype)
  d_query = steps.dot(side.key_transposed, d_logits, problem)
  d_query = d_query + lax.dynamic_slice_in_dim(sums.query, i * length, length, 2)
  return _Sums(
      query=lax.dynamic_update_slice_in_dim(sums.query, d_query, i * length, 2),
      key=sums.key + steps.dot(d_logits, rows, problem),
      value=sums.value + steps.dot(kept, d_out, problem),
      bias=d_bias)


def d_sinks(sinks, lse, correction):
  """d_sink[h] = -sum over b, t of exp(sink - lse) * correction; sinks [B or 1, H]."""
  sink = sinks[..., None]
  weights = jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - steps.finite_lse(lse)))
  total = -(weights * correction).sum(-1)
  return (total if sinks.shape[0] > 1 else total.sum(0, keepdims=True)).astype(sinks.dtype)


def completed(products, operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
              residuals: Residuals, cotangents: Residuals, wrt: tuple[str, ...]) -> tuple:
  """`backward` by a kernel for queries, keys and values.

  The bias's cotangent has its own number for every pair and comes from the XLA kernel here.

  Args:
    products: (d_out, lse, `steps.correction_of`, wrt) -> dict with the cotangents of those of
      query, key and value that are in wrt; others in it do not count.
  """
  correction = steps.correction_of(residuals, cotangents, jnp.float32)
  found = {}
  if {"query", "key", "value"} & set(wrt):
    found = products(cotangents.out, residuals.lse, correction, wrt)
  if "sinks" in wrt:
    found["sinks"] = d_sinks(operands.sinks, residuals.lse, correction)
  if "bias" in wrt:
    found["bias"], = backward(operands, spec, block_sizes, residuals, cotangents, ("bias",))
  return tuple(found[name] for name in wrt)


KERNEL = Kernel("xla", forward, backward, tangent)
