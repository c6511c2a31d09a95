# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the backward that every kernel shares: delta, and the cotangents of sinks and bias.

  delta      = sum(d_out * out) - d_lse
  dS         = P * (d_out . value - delta)
  d_sink[h]  = -sum over b, t of exp(sink[h] - lse) * delta

Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning,
https://arxiv.org/abs/2307.08691.
"""

from typing import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import matmul_precision
from attn_core.kernels.common.contract import BackwardResiduals, Residuals
from attn_core.types import Operands, is_mod

# (d_out [B, T, H, E], lse [B, H, T], delta [B, H, T], wrt) -> cotangents by the operand's name.
ProductsFn = Callable[[jax.Array, jax.Array, jax.Array, tuple[str, ...]], dict[str, jax.Array]]


def compute_delta(residuals: BackwardResiduals, cotangents: Residuals,
                  dtype: DTypeLike) -> jax.Array:
  """Returns delta [B, H, T]: d_lse is subtracted here because both enter dS in the same place.

  Args:
    residuals: results of the forward, see `contract.BackwardFn`.
    cotangents: of out [B, T, H, E] and lse [B, H, T].
    dtype: of the sum.
  """
  if residuals.out is None:  # cotangents.lse includes it
    return -cotangents.lse
  sums = row_sums("bthe,bthe->bht", cotangents.out, residuals.out, dtype)
  return sums.astype(cotangents.lse.dtype) - cotangents.lse


def row_sums(formula: str, d_out: jax.Array, out: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns sums of d_out * out over the width, as exact as these are.

  No `precision` applies: this is neither of the two products, and its time is that of reading.
  """
  return jnp.einsum(formula, d_out, out, preferred_element_type=dtype,
                    precision=matmul_precision.resolve(out.dtype, None))


def finite_lse(lse: jax.Array) -> jax.Array:
  """Returns +inf in place of -inf, so that rows that saw nothing have weights exp(-inf) = 0."""
  return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def d_sinks(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
  """Returns the cotangent of sinks [B or 1, H].

  Args:
    sinks: [B or 1, H].
    lse: [B, H, T].
    delta: [B, H, T], of `compute_delta`.
  """
  sink = sinks[..., None]
  weights = jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - finite_lse(lse)))
  total = -(weights * delta).sum(-1)
  return (total if sinks.shape[0] > 1 else total.sum(0, keepdims=True)).astype(sinks.dtype)


def complete_cotangents(
    products: ProductsFn, others: Callable[[tuple[str, ...]], tuple[jax.Array, ...]],
    operands: Operands, residuals: BackwardResiduals, cotangents: Residuals,
    wrt: tuple[str, ...], own_mods: tuple[str, ...] = (), sums: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
  """Completes the backward of a kernel that computes cotangents of query, key and value.

  Args:
    products: computes at least the cotangents of those of query, key, value and `own_mods` that are
      in `wrt`; called only where there is one.
    others: computes the cotangents of the bias, which has a number for every pair of a query and a
      key, and of other arrays of the score mod, by a kernel of its own; called with their names,
      once, only where there is one.
    operands: those of the forward.
    residuals: results of the forward.
    cotangents: of out [B, T, H, E] and lse [B, H, T].
    wrt: names of the operands.
    own_mods: names of the arrays of the score mod whose cotangents `products` computes.
    sums: of d_out * out over the width, float32 [B, H, T]; None: computed here.

  Returns:
    Cotangents of the operands named in `wrt`, in that order.
  """
  delta = (compute_delta(residuals, cotangents, jnp.float32) if sums is None
           else sums.astype(cotangents.lse.dtype) - cotangents.lse)
  found: dict[str, jax.Array] = {}
  if {"query", "key", "value", *own_mods} & set(wrt):
    found = products(cotangents.out, residuals.lse, delta, wrt)
  if "sinks" in wrt:
    assert operands.sinks is not None
    found["sinks"] = d_sinks(operands.sinks, residuals.lse, delta)
  if names := tuple(name for name in wrt
                    if name == "bias" or is_mod(name) and name not in own_mods):
    found.update(zip(names, others(names), strict=True))
  return tuple(found[name] for name in wrt)
