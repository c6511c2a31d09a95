# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A typed program that a type checker must accept."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from attn_core import (AttentionMechanism, AttentionOutput, BlockSizes, CacheMetadata, DenseCache,
                       Heads, Mask, MaskInfo, OperationMetadata, PagedOptions, PagesMetadata,
                       RingConfig, Shapes, WindowCache, attention, autoregressive_decodeattn,
                       blocksparse, blockwise, blockwise_attn, caches, concatenate, create_mesh,
                       cuda_flash_attn2, cudnn, explain, flash_attn2, get_optimal_config, masks,
                       page_attention, plan_context_parallel, ragged_page_attention_v2,
                       ragged_page_attention_v3, ring_attention, sdpa, vanilla)


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


def by_name(x: jax.Array) -> list[AttentionOutput]:
  metadata = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, -1)),
                               ring=RingConfig("hybrid", layout="zigzag", heads_axis_name="tp"))
  return [
      vanilla(x, x, x, return_weights=True), sdpa(x, x, x, causal=False),
      cudnn(x, x, x, sliding_window=4), cuda_flash_attn2(x, x, x, softmax_scale=1.0),
      blockwise(x, x, x, block_sizes=BlockSizes(64, 64)), flash_attn2(x, x, x, layout="thd"),
      blocksparse(x, x, x, mask=masks.chunk(64)), ring_attention(x, x, x, metadata=metadata)]


def decode(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  cache: DenseCache = caches.dense.init(2, 16, (2, 8))
  output = autoregressive_decodeattn(query, key, value, cache_view=cache,
                                     mode="__autoregressive__", deterministic=None)
  again = vanilla(query, None, None, cache_view=output.cache_view, mode="__autoregressive__")
  return again.attention_outputs


def keep(key: jax.Array, value: jax.Array) -> WindowCache:
  ring = caches.window.init(2, 16, (2, 8), dtype="int8")
  ring = caches.window.append(ring, key, value, lengths=np.array([1, 2], np.int32))
  full = caches.window.to_dense(ring, 32)
  joined = concatenate(query=key, key=key, value=value, mode="__prefill__", cache_view=full,
                       cache_metadata=CacheMetadata(starts=np.array([0, 1], np.int32)))
  assert isinstance(joined.cache_view, DenseCache)
  return caches.window.from_dense(joined.cache_view, 16)


def pages(x: jax.Array, metadata: PagesMetadata, options: PagedOptions) -> jax.Array:
  first = caches.pages.init(caches.pages.PagesV1, 4, 16, Heads(2, 8, 8))
  first = caches.pages.append(first, x, x, caches.pages.slots(metadata, 16, 4))
  second = caches.pages.convert(first, caches.pages.PagesV2)
  third = caches.pages.init(caches.pages.PagesV3, 4, 16, Heads(2, 8, 8), scales="token")
  options = options._replace(causal=False, sliding_window=3)
  written = ragged_page_attention_v3(x, x, x, third, metadata, options).cache_view
  assert written is not None
  return (page_attention(x, first, metadata).attention_outputs
          + ragged_page_attention_v2(x, second, metadata, options).attention_outputs)


def combined(ids: jax.Array, seen: np.ndarray) -> Mask:
  by_position = masks.positions(ids, None, masks.causal()) | masks.offset(masks.prefix(4), 3)
  custom = masks.custom(lambda b, h, q, k, table: table[q] > k, ids)
  return (by_position & masks.segments(ids) & masks.dense(seen) & ~masks.window(None, 3)
          & masks.lengths(key_lengths=ids) & custom)


def inspect(shape: tuple[int, ...]) -> str | None:
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  explanation = explain(x, x, x, bias=jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32))
  sizes: BlockSizes = explanation.block_sizes
  print(sizes.block_q, [verdict.kernel for verdict in explanation.verdicts])
  return explanation.chosen


def plan(mesh: Mesh) -> str:
  best = plan_context_parallel(Shapes(1, 64, 64, 4, 2, 8, 8), masks.causal(), mesh, "v5p",
                               sequence_axis_name="sp").recommended
  print(get_optimal_config(jax.devices()[0]).mechanism.value, best.seconds)
  return best.variant


def rest(x: jax.Array, options: PagedOptions) -> jax.Array:
  print(options.softmax_scale)
  return blockwise_attn(x, x, x, policy=False) + flash_attn2(x, x, x).attention_outputs
