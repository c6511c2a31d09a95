# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward of block-wise attention on Hopper.

  P = exp(logits - lse);  dP = d_out V^T;  dS = P * (dP - delta)
  d_query = dS K;  d_key = dS^T Q;  d_value = P^T d_out;  delta = sum(d_out * out) - d_lse

One kernel sums over keys (`backward_q`), one over queries (`backward_kv`), and others compute the
cotangents of the bias (`backward_bias`) and of tables by distance (`backward_table`). Every sum has
one owner and a fixed order: results are the same bit for bit, at the price of computing S and dP
twice. While a warpgroup exponentiates, its product dP runs; while it forms dS, P^T d_out does; the
sums over a loop stay in flight from step to step.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import (
    backward_bias, backward_kv, backward_q, backward_table, score_tiles, tiling as tiling_lib)
from attn_core.kernels.gpu.flash.backward_common import Arrays
from attn_core.kernels.common import dense_operands, nonfinite, online_softmax
from attn_core.kernels.common.backward import complete_cotangents, compute_delta, finite_lse
from attn_core.kernels.common.contract import BackwardFn, BackwardResiduals, Residuals
from attn_core.score_mods import evaluate, tables
from attn_core.types import (AttentionSpec, BlockSizes, Operands, is_mod, mod_number,
                             operand)


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: BackwardResiduals, cotangents: Residuals, wrt: tuple[str, ...], *,
             fallback: BackwardFn) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `contract.BackwardFn`.

  Args:
    fallback: computes the cotangents of biases that this does not.
  """
  products = functools.partial(_products, operands, spec, block_sizes)
  others = lambda names: _others(
      operands, spec, block_sizes, residuals, cotangents, names, fallback)
  return complete_cotangents(products, others, operands, residuals, cotangents, wrt)


def _others(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
            residuals: BackwardResiduals, cotangents: Residuals, names: tuple[str, ...],
            fallback: BackwardFn) -> tuple[jax.Array, ...]:
  """Returns the cotangents of the bias and of arrays of the score mod that are named."""
  delta = compute_delta(residuals, cotangents, jnp.float32)
  with_table = tables.find(spec.score_mod)
  arrays = lambda: _arrays(operands, spec, cotangents.out, residuals.lse, delta)

  def of(name: str) -> jax.Array:
    x, number = operand(operands, name), mod_number(name) if is_mod(name) else score_tiles.BIAS
    if number in with_table:
      return backward_table.d_table(arrays(), operands, spec, number)
    if is_mod(name) or x.shape[3] > 1 or not evaluate.only_adds(spec.score_mod):
      return backward_bias.d_array(arrays(), operands, spec,
                                   backward_bias.Summed(number, x.shape, x.dtype))
    if residuals.out is None:  # sums over more keys than these
      return fallback(operands, spec, block_sizes, residuals, cotangents, (name,))[0]
    return backward_bias.d_bias_of_rows(operands, residuals.lse, cotangents.lse, delta)
  return tuple(map(of, names))


def _products(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes, d_out: jax.Array,
              lse: jax.Array, delta: jax.Array, wrt: tuple[str, ...]) -> dict[str, jax.Array]:
  """Returns the cotangents of query, or of key and value, or of all, as `wrt` needs them."""
  tilings = tiling_lib.make_backward_tilings(operands, spec, block_sizes)
  arrays = _arrays(operands, spec, d_out, lse, delta * spec.softmax_scale)
  found = {}
  if "query" in wrt:
    found["query"] = backward_q.d_query(arrays, operands, spec, tilings.query)
  if {"key", "value"} & set(wrt):
    found["key"], found["value"] = backward_kv.d_key_and_value(arrays, operands, spec, tilings.key)
  return found


def _arrays(operands: Operands, spec: AttentionSpec, d_out: jax.Array, lse: jax.Array,
            delta: jax.Array) -> Arrays:
  """Returns the arrays that all kernels read."""
  chex.assert_rank(d_out, 4)
  chex.assert_equal_shape([lse, delta])
  width, value_width = (tiling_lib.padded_width(name, getattr(operands, name).shape[3])
                        for name in ("query", "value"))
  inputs = nonfinite.mask_nonfinite_unless_full(
      dense_operands.mask_of(operands, spec), operands.query, operands.key, operands.value)
  query, key, value = (mosaic.pad_for_tma(x, w)
                       for x, w in zip(inputs, (width, width, value_width)))
  # Rows past the queries have weight 0, in blocks of any size.
  padding = ((0, 0), (0, 0), (0, -lse.shape[2] % (tiling_lib.CONSUMERS * mosaic.WGMMA_ROWS)))
  lse = jnp.pad(finite_lse(lse) * online_softmax.LOG2E, padding, constant_values=jnp.inf)
  return Arrays(query, key, value, mosaic.pad_for_tma(d_out, value_width),
                jnp.stack([lse, jnp.pad(delta, padding)]))
