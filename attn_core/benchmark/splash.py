# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The splash kernel of JAX, a peer on TPUs, at blocks that were the fastest of those tried."""

from typing import Any

import jax
import jax.numpy as jnp

from attn_core.benchmark.cases import Case

LANES = 128


def attend(case: Case, arrays: tuple[jax.Array, jax.Array, jax.Array],
           ids: jax.Array | None) -> jax.Array:
  """Returns the output [B, T, H, E].

  Args:
    case: without sinks or an offset of the queries, of lengths that 128 divides.
    arrays: query, key and value.
    ids: int32 [B, T], segment ids; None: one document.

  Raises:
    NotImplementedError: the kernel does not compute the case.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as kinds
  if case.sinks or case.queries != case.keys or case.keys % LANES or case.width % LANES % 64:
    raise NotImplementedError(
        "splash does not support sinks, an offset of the queries, or lengths that 128 and widths "
        "that 64 does not divide")
  shape, block = (case.queries, case.keys), lambda size: _divisor(case.keys, size)
  mask: Any = kinds.CausalMask(shape) if case.causal else kinds.FullMask(shape)
  if case.window is not None:
    mask = mask & kinds.LocalMask(shape, case.window, 0)
  block_q, block_kv, compute = (block(1024), block(1024 if case.causal else 2048),
                                block(512 if case.causal else 1024))
  sizes = library.BlockSizes(block_q, block_kv, compute, block_q, block_kv, min(compute, 512),
                             use_fused_bwd_kernel=True)
  kernel = library.make_splash_mha_single_device(
      kinds.MultiHeadMask([mask] * case.heads), block_sizes=sizes,
      attn_logits_soft_cap=case.soft_cap)
  scale = case.width**-0.5 if case.softmax_scale is None else case.softmax_scale
  query, key, value = (x.swapaxes(1, 2) for x in arrays)
  query = query * jnp.asarray(scale, query.dtype)
  if ids is None:
    out = jax.vmap(kernel)(query, key, value)
  else:
    out = jax.vmap(kernel)(query, key, value, library.SegmentIds(ids, ids))
  return out.swapaxes(1, 2)


def _divisor(length: int, most: int) -> int:
  """Returns the largest multiple of 128 up to `most` that divides a length."""
  return max(n for n in range(LANES, min(most, length) + 1, LANES) if length % n == 0)
