# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention to selected blocks of keys in plain XLA: time and memory grow with their number.

Keys are gathered for each list, `selected_gathered`, or for a tile of queries, `selected_union`.
Tangents gather them for each list.

Yuan et al., Native Sparse Attention, https://arxiv.org/abs/2502.11089.
"""

import jax
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands
from attn_core.kernels.common.backward import compute_delta, d_sinks, finite_lse
from attn_core.kernels.common.contract import BackwardResiduals, Residuals
from attn_core.kernels.xla import selected_gathered, selected_union
from attn_core.kernels.xla.selected_steps import Inputs, Rows, Sums
from attn_core.types import value_width


def forward(inputs: Inputs) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  operands, spec = inputs.operands, inputs.spec
  dense_operands.assert_operands(operands, spec.latent_width)
  form = selected_union if selected_union.is_faster(inputs) else selected_gathered
  batch, queries, heads, _ = operands.query.shape
  shape = batch, form.num_queries(inputs), heads
  out, lse = form.forward(inputs, Residuals(
      jnp.zeros((*shape, value_width(operands, spec)), dense_operands.out_dtype(operands, spec)),
      jnp.zeros((*shape, 1), dense_operands.lse_dtype(spec))))
  return Residuals(out[:, :queries], lse[:, :queries, :, 0].swapaxes(1, 2))


def backward(inputs: Inputs, residuals: BackwardResiduals, cotangents: Residuals,
             wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `contract.BackwardFn`.

  dS = P * (d_out . value - delta), and from it d_query and d_key; d_value = P^T . d_out. On GPUs
  the order of the sums of keys and values is not fixed.
  """
  operands, latent = inputs.operands, inputs.spec.latent_width
  dense_operands.assert_operands(operands, latent)
  dense_operands.assert_residuals(operands, residuals, cotangents, latent_width=latent)
  form = selected_union if selected_union.is_faster(inputs) else selected_gathered
  delta = compute_delta(residuals, cotangents, inputs.dtype)
  found = {}
  if operands.sinks is not None and "sinks" in wrt:
    found["sinks"] = d_sinks(operands.sinks, residuals.lse, delta)
  if {*Sums._fields} & {*wrt}:
    batch, queries, *heads_and_width = operands.query.shape
    lse, delta = (x.swapaxes(1, 2)[..., None] for x in (finite_lse(residuals.lse), delta))
    sums = form.backward(inputs, Rows(cotangents.out, lse, delta), Sums(
        jnp.zeros((batch, form.num_queries(inputs), *heads_and_width), operands.query.dtype),
        *(jnp.zeros(x.shape, x.dtype) for x in operands[1:3])))
    found.update(sums._replace(query=sums.query[:, :queries])._asdict())
  return tuple(found[name] for name in wrt)


def tangent(inputs: Inputs, residuals: Residuals, tangents: dict[str, jax.Array]) -> Residuals:
  """Computes the tangents of out and lse; see `contract.TangentFn`.

  d_lse = sum_s P * d_logits;  d_out = sum_s P * (d_logits * value + d_value) - d_lse * out
  """
  return selected_gathered.tangent(inputs, residuals, tangents)
