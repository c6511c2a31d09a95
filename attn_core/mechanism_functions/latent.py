# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mechanisms of latent attention, as functions."""

from typing import Unpack, cast

from jax.typing import ArrayLike

from attn_core.arguments import paged_options
from attn_core.arguments.arguments import AttentionOptions
from attn_core.arguments.paged_options import PagedOptions
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import PagesMetadata
from attn_core.mechanism_functions.call import BY_KEYWORD, attend
from attn_core.types import AttentionMechanism, AttentionOutput, LatentOptions


def multi_latent_attention(query: ArrayLike, latents: ArrayLike | None,
                           **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes multi-head latent attention: one row per token is the key and value of all heads.

    key[s, h]   = [key_up[:, h]^T . latents[s, :latent], latents[s, latent:]]
    value[s, h] = value_up[:, h]^T . latents[s, :latent]

  DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434.

  Without up-projections the queries are absorbed, key_up[:, h] . query_nope besides query_rope, and
  the outputs are weighted latents. With them the call computes either that, or keys and values of a
  few heads at a time, whichever is less work; `explain` says which. Values are never copied out of
  the rows. Rotary is applied to the last numbers of queries and rows before the call.

  >>> import jax.numpy as jnp
  >>> from attn_core import LatentOptions, multi_latent_attention
  >>> query, latents = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 8))  # absorbed: 6 + 2 numbers
  >>> options = LatentOptions(latent_width=6, rope_width=2, nope_width=4)
  >>> multi_latent_attention(query, latents, latent_options=options).attention_outputs.shape
  (1, 4, 2, 6)

  Args:
    query: float [B, T, H, latent + rope]; with up-projections [B, T, H, nope + rope].
    latents: float [B, S, latent + rope]; with a `LatentCache` as cache_view those of the new
      tokens, or None where the cache holds them already.
    **options: as in `attention`: latent_options, the widths and up-projections, if any, is
      `LatentOptions()` unless given; softmax_scale is (nope + rope)**-0.5 unless given.

  Returns:
    AttentionOutput with outputs [B, T, H, latent], with up-projections [B, T, H, E].

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
    ValueError: an argument is not as documented here, or nothing tells the softmax scale.
  """
  return attend(AttentionMechanism.MULTI_LATENT_ATTENTION, query, latents, None,
                cast(AttentionOptions, {"latent_options": LatentOptions(), **options}))


def multi_latent_ragged_page_attention(
    query: ArrayLike, latents: ArrayLike | None, cache: PagesLatent,
    pages_metadata: PagesMetadata = BY_KEYWORD, options: PagedOptions | None = None,
    **keywords: Unpack[AttentionOptions]) -> AttentionOutput:
  """Writes the queries' latent rows to pages, and computes latent attention to the pages.

    output[t, h] = softmax(soft_cap(scale * query[t, h] . rows)) . rows[:, :latent]

  DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434. A row is stored once, as the key and
  the value of all heads. Queries are absorbed: up-projections, if any, are applied to queries and
  outputs, as in `multi_latent_attention`. Pages, requests and their order are as in
  `ragged_page_attention_v3`. A donated cache is updated in place.

  >>> import numpy as np
  >>> from attn_core import PagesMetadata, multi_latent_ragged_page_attention
  >>> from attn_core.caches import latent_pages
  >>> cache = latent_pages.init(4, 16, (6, 2), dtype="float32")  # 4 pages of 16 tokens
  >>> requests = PagesMetadata(np.int32([[2], [0]]), np.int32([1, 3]), np.int32([0, 1, 4]))
  >>> query, latents = np.ones((4, 3, 8), np.float32), np.ones((4, 8), np.float32)
  >>> multi_latent_ragged_page_attention(
  ...     query, latents, cache, requests, softmax_scale=0.5).attention_outputs.shape
  (4, 3, 6)

  Args:
    query: float [T, H, latent + rope], the queries of the requests in order; more rows may follow.
      With up-projections [T, H, nope + rope].
    latents: float [T, latent + rope], of the same tokens; None: the pages hold them already, and
      nothing is written.
    cache: `PagesLatent`: pages [num_pages, page_size, latent + rope].
    pages_metadata: page_tables int32 [num_requests, pages_per_request], context_lens int32
      [num_requests], and the rest of `PagesMetadata` as for v3, without stored_heads.
    options: keywords as one value; not together with any of them but latent_options.
    **keywords: the rest, as in `attention`, where `pages_metadata` is called `cache_metadata`.
      latent_options, the widths and up-projections, if any, is that of the pages unless given;
      softmax_scale is (nope + rope)**-0.5 unless given, and needed where nothing tells nope.

  Returns:
    attention_outputs [T, H, latent] in the query's dtype, with up-projections [T, H, E]; where
    requested, lse float32 [H, T]; and cache_view, the cache with the new tokens.

  Raises:
    ValueError: an argument is not as documented here, or nothing tells the softmax scale.
    NotImplementedError: gradients with respect to quantized pages; a mesh that does not divide
      them.
  """
  mechanism = AttentionMechanism.MULTI_LATENT_RAGGED_PAGE_ATTENTION
  latent_options = keywords.pop("latent_options", None)
  if latent_options is None and isinstance(cache, PagesLatent):
    latent_options = LatentOptions(cache.widths.latent, cache.widths.rope)
  given = paged_options.keywords_of(mechanism.value, pages_metadata, options, keywords)
  return attend(mechanism, query, latents, None,
                {"cache_view": cache, "latent_options": latent_options, **given})
