# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A typed program with one mistake per marked line, each of which a type checker must find."""

import jax

from attn_core import (BlockSizes, CacheMetadata, Heads, MaskInfo, OperationMetadata, PagedOptions,
                       PagesMetadata, PagesV1, RingConfig, Shapes, WindowCache, attention,
                       autoregressive_decodeattn, blocksparse, blockwise, blockwise_attn, caches,
                       concatenate, create_mesh, cuda_flash_attn2, cudnn, explain, flash_attn2,
                       get_optimal_config, masks, page_attention, plan_context_parallel,
                       ragged_page_attention_v2, ragged_page_attention_v3, ring_attention, sdpa,
                       to_layout, vanilla)


def mistakes(x: jax.Array) -> None:
  attention("query", x, x)  # error: arg-type
  attention(x, x)  # error: call-arg
  attention(x, x, x, layout="btdh")  # error: arg-type
  attention(x, x, x, sliding_window="4")  # error: arg-type
  attention(x, x, x, window=4)  # error: call-arg
  attention(x, x, x, mask=masks)  # error: arg-type
  attention(x, x, x, "flash_attn2")  # error: call-arg
  attention(x, x, x).lse.sum()  # error: union-attr
  flash_attn2(x, x, x, mechanism="vanilla")  # error: call-arg
  flash_attn2(x, x, x, logits_soft_cap="30")  # error: arg-type
  BlockSizes(block_q="128")  # error: arg-type
  PagedOptions(causal=None)  # error: arg-type


def by_name(x: jax.Array) -> None:
  vanilla("query", x, x)  # error: arg-type
  vanilla(x, x, x).attention_weights.max()  # error: union-attr
  sdpa(x, x, x, layout="btdh")  # error: arg-type
  cudnn(x, x, x, causal="yes")  # error: arg-type
  cuda_flash_attn2(x, x)  # error: call-arg
  blockwise(x, x, x, block_sizes=128)  # error: arg-type
  blockwise_attn(x, x, x, layout="bhtd")  # error: call-arg
  blockwise_attn(x, x, x).lse  # error: attr-defined
  blocksparse(x, x, x, mask="causal")  # error: arg-type
  ring_attention(x, x, x, metadata="sp")  # error: arg-type
  ring_attention(x, x, x, ring=RingConfig())  # error: call-arg
  autoregressive_decodeattn(x, x, x, cache_view=x)  # error: arg-type
  autoregressive_decodeattn(x, x, x, mode="decode")  # error: arg-type


def of_pages(x: jax.Array, cache: PagesV1, metadata: PagesMetadata) -> None:
  page_attention(x)  # error: call-arg
  page_attention(x, cache, None)  # error: arg-type
  ragged_page_attention_v2(x, cache, metadata)  # error: arg-type
  ragged_page_attention_v2(x, cache=metadata, metadata=metadata)  # error: arg-type
  ragged_page_attention_v3(x, x, x, metadata, metadata)  # error: arg-type
  page_attention(x, cache, metadata, causality=False)  # error: call-arg
  page_attention(x, cache, metadata, causal=None)  # error: arg-type
  caches.pages.init("v2", 4, 16, Heads(2, 8, 8))  # error: arg-type
  caches.pages.init(PagesV1, 4, 16, ("2", 8, 8))  # error: arg-type
  caches.pages.append(cache, x, x)  # error: call-arg
  print(caches.pages.append(cache, x, x, x).pages)  # error: attr-defined


def of_masks(x: jax.Array) -> None:
  masks.causal(1)  # error: call-arg
  masks.window("4", 0)  # error: arg-type
  masks.window(4)  # error: call-arg
  masks.chunk("8")  # error: arg-type
  masks.prefix(None)  # error: arg-type
  masks.segments()  # error: call-arg
  masks.lengths("8")  # error: arg-type
  masks.positions(x, x, "causal")  # error: arg-type
  masks.offset(3, masks.causal())  # error: arg-type
  masks.dense(None)  # error: arg-type
  masks.custom(3)  # error: arg-type
  print(masks.causal() & True)  # error: operator
  MaskInfo.from_segments("ids")  # error: arg-type


def of_caches(x: jax.Array, ring: WindowCache) -> None:
  caches.dense.init(2, 16, 8)  # error: arg-type
  caches.dense.append(ring, x, x)  # error: arg-type
  caches.window.init(2, "16", (2, 8))  # error: arg-type
  caches.window.view(caches.dense.init(2, 16, (2, 8)))  # error: arg-type
  print(ring.keys)  # error: attr-defined
  CacheMetadata(lengths="3")  # error: arg-type
  concatenate(query=x, key=x)  # error: call-arg
  print(concatenate(query=x, key=x, value=x).cache_view.key)  # error: union-attr


def of_devices(x: jax.Array) -> None:
  create_mesh(8)  # error: arg-type
  create_mesh((1, -1), axis_names=("dp", "tp"))  # error: call-arg
  RingConfig(layout="zig-zag")  # error: arg-type
  RingConfig("ulises")  # error: arg-type
  OperationMetadata(mesh="dp")  # error: arg-type
  to_layout(x, "striped", shards="8")  # error: arg-type
  get_optimal_config("tpu")  # error: arg-type
  plan_context_parallel(Shapes(1, 64, 64), masks.causal(), create_mesh(), "v5p")  # error: call-arg
  explain(x, x, x, mode="train")  # error: arg-type
  explain(x, x, x, bias="alibi")  # error: arg-type
  chosen: str = explain(x, x, x).chosen  # error: assignment
  print(chosen)
