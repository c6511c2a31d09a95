# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of d_out * out over the width, by a kernel that reads both as other kernels have them.

  sums[b, h, t] = sum over e of d_out[b, t, h, e] * out[b, t, h, e]

XLA reduces [B, T, H, E] in a layout with heads along the sublanes, of which few heads fill few, and
converts both arrays to it.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.flash import call, schedule
from attn_core.kernels.tpu.flash.tile_inputs import TokenBlocks, TokenRange

Ref = Any  # a Pallas reference


def row_sums(d_out: jax.Array, out: jax.Array, tiling: schedule.Tiling,
             vmem_bytes: int) -> jax.Array:
  """Returns the sums, float32 [B, H, T].

  Args:
    d_out, out: [B, T, H, E].
    tiling: of the backward; its blocks of queries and heads are those of a step.
    vmem_bytes: vector memory that a step may use; enough for the backward is enough.
  """
  batch, queries, heads, width = out.shape
  blocks = TokenBlocks(batch, tiling.padded_queries, heads, width, tiling.query_heads,
                       tiling.block_q, lambda i, j: i)

  def kernel(d_out: Ref, out: Ref, sums: Ref) -> None:
    for head in range(tiling.query_heads):
      at = blocks.slices(head, TokenRange(0, tiling.block_q))
      products = d_out[at].astype(jnp.float32) * out[at].astype(jnp.float32)
      sums[0, head] = products.T.sum(0, keepdims=True)

  spec = pl.BlockSpec(blocks.block_shape, lambda b, h, i: blocks.block_index(b, h, i, i))
  # Not ShapeDtypeStruct, see `call.call`.
  result = jax.core.ShapedArray((batch, heads, 1, tiling.padded_queries), jnp.float32)
  sums = launch.in_32_bits(pl.pallas_call(
      kernel, grid=(batch, heads // tiling.query_heads, tiling.query_blocks),
      in_specs=[spec, spec],
      out_specs=pl.BlockSpec((1, tiling.query_heads, 1, tiling.block_q),
                             lambda b, h, i: (b, h, 0, i)),
      out_shape=result,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel",) * 3, vmem_limit_bytes=vmem_bytes),
      name="attn_core_row_sums",
  ))(*call.placed([blocks.pack(x) for x in (d_out, out)], [result], vmem_bytes))
  return sums[:, :, 0, :queries]
