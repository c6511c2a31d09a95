# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A typed program that a type checker must accept."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (AttentionMechanism, AttentionOutput, BlockSizes, MaskInfo, OperationMetadata,
                       PagedOptions, attention, autoregressive_decodeattn, blockwise_attn, caches,
                       explain, flash_attn2, masks, vanilla)


def train(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  output: AttentionOutput = attention(
      query, key, value, mechanism=AttentionMechanism.FLASH_ATTN2, layout="bhtd",
      metadata=OperationMetadata(dropout_prob=0.1), mask=masks.causal() & masks.window(4, 0),
      mask_info=MaskInfo(), bias=np.zeros((1, 1, 1, 1), np.float32), sliding_window=(4, None),
      softmax_aux=jnp.zeros(4), dropout_rng=jax.random.key(0), compute_dtype="bfloat16",
      precision="highest", block_sizes=BlockSizes(block_q=128), policy="nothing_saveable",
      return_lse=True)
  lse = output.lse
  assert lse is not None
  return output.attention_outputs + lse.sum()


def decode(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  cache = caches.dense.init(2, 16, (2, 8))
  output = autoregressive_decodeattn(query, key, value, cache_view=cache,
                                     mode="__autoregressive__", deterministic=None)
  again = vanilla(query, None, None, cache_view=output.cache_view, mode="__autoregressive__")
  return again.attention_outputs


def inspect(shape: tuple[int, ...]) -> str | None:
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  explanation = explain(x, x, x, bias=jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32))
  sizes: BlockSizes = explanation.block_sizes
  print(sizes.block_q, [verdict.kernel for verdict in explanation.verdicts])
  return explanation.chosen


def rest(x: jax.Array, options: PagedOptions) -> jax.Array:
  print(options._replace(causal=False, sliding_window=3).softmax_scale)
  return blockwise_attn(x, x, x, policy=False) + flash_attn2(x, x, x).attention_outputs
