"""The backward of block-wise attention on Hopper.

  P = exp(logits - lse);  dP = d_out V^T;  dS = P * (dP - correction)
  d_query = dS K;  d_key = dS^T Q;  d_value = P^T d_out;  correction = sum(d_out * out) - d_lse

One kernel sums over keys (`backward_query`), one over queries (`backward_key`), and one gives the
bias its cotangent (`backward_bias`). Every sum has one
owner and a fixed order: results are the same bit for bit, for the price of computing S and dP
twice. While a warpgroup exponentiates, its product dP runs; while it forms dS, P^T d_out does; the
sums over a loop stay in flight from step to step.
"""

import functools

import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.gpu.flash import backward_bias, backward_kv as backward_key, backward_q as backward_query, tiling as tuned
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash.backward_common import Arrays
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import flash as blockwise, tile_ops as steps
from attn_core.types import AttentionSpec, BlockSizes, Operands


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: Residuals, cotangents: Residuals, wrt: tuple[str, ...]) -> tuple:
  """The cotangents of the operands named in `wrt`; see `kernels.xla.blockwise.completed`."""
  products = functools.partial(_products, operands, spec, block_sizes)
  names = tuple(name for name in wrt if name != "bias")
  found = dict(zip(names, blockwise.completed(
      products, operands, spec, block_sizes, residuals, cotangents, names)))
  if "bias" in wrt:
    found["bias"] = _d_bias(operands, spec, block_sizes, residuals, cotangents)
  return tuple(found[name] for name in wrt)


def _d_bias(operands: Operands, spec, block_sizes, residuals: Residuals, cotangents: Residuals):
  correction = steps.correction_of(residuals, cotangents, jnp.float32)
  if operands.bias.shape[3] == 1 and residuals.out is None:  # the sums are of more keys than these
    return blockwise.backward(operands, spec, block_sizes, residuals, cotangents, ("bias",))[0]
  if operands.bias.shape[3] == 1:
    return backward_bias.d_bias_of_rows(operands, residuals.lse, cotangents.lse, correction)
  arrays = _arrays(operands, spec, cotangents.out, residuals.lse, correction)
  return backward_bias.d_bias(arrays, operands, spec, tuned.choose_bias(operands))


def _products(operands: Operands, spec, block_sizes, d_out, lse, correction, wrt) -> dict:
  """Cotangents of query, or of key and value, or of all, as `wrt` needs them."""
  cuts = tuned.choose_backward(operands, spec, block_sizes)
  arrays = _arrays(operands, spec, d_out, lse, correction)
  found = {}
  if "query" in wrt:
    found["query"] = backward_query.d_query(arrays, operands, spec, cuts.query)
  if {"key", "value"} & set(wrt):
    found["key"], found["value"] = backward_key.d_key_and_value(arrays, operands, spec, cuts.key)
  return found


def _arrays(operands: Operands, spec: AttentionSpec, d_out, lse, correction) -> Arrays:
  """What both kernels read."""
  width, value_width = (tuned.padded_width(name, getattr(operands, name).shape[3])
                        for name in ("query", "value"))
  inputs = steps.clean_hidden(
      steps.mask_of(operands, spec), operands.query, operands.key, operands.value)
  query, key, value = (mosaic.pack(x, w) for x, w in zip(inputs, (width, width, value_width)))
  # No row past the queries has a weight, whatever blocks it is read in.
  padding = ((0, 0), (0, 0), (0, -lse.shape[2] % (tuned.COMPUTING * mosaic.ROW_TILE)))
  lse = jnp.pad(steps.finite_lse(lse) * softmax.LOG2E, padding, constant_values=jnp.inf)
  return Arrays(query, key, value, mosaic.pack(d_out, value_width),
                jnp.stack([lse, jnp.pad(correction, padding)]))
