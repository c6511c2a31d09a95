# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mechanisms over pages of keys and values, as functions."""

from typing import Unpack

from jax.typing import ArrayLike

from attn_core.arguments.arguments import AttentionOptions
from attn_core.arguments.paged_options import PagedOptions
from attn_core.caches.paged.layouts import PagesMetadata, PagesV1, PagesV2, PagesV3
from attn_core.mechanism_functions.call import BY_KEYWORD, attend_to_pages
from attn_core.types import AttentionOutput


def page_attention(query: ArrayLike, cache: PagesV1, pages_metadata: PagesMetadata = BY_KEYWORD,
                   options: PagedOptions | None = None,
                   **keywords: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention of one query per request to its pages, which already hold the query's token.

    output[r] = softmax(soft_cap(scale * query[r] . keys[r])) . values[r]

  Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180. Shapes
  are those of `jax.experimental.pallas.ops.tpu.paged_attention`; the scale is D**-0.5 unless given.

  Args:
    query: float [num_requests, H, D], each at its request's last position.
    cache: `PagesV1`: key_pages [K, num_pages, page_size, D], value_pages
      [K, num_pages, page_size, E].
    pages_metadata: page_tables int32 [num_requests, pages_per_request], context_lens int32
      [num_requests] (tokens); no query_start_loc.
    options: keywords as one value; not together with any of them.
    **keywords: the rest, as in `attention`, where `pages_metadata` is called `cache_metadata`.

  Returns:
    attention_outputs [num_requests, H, E] in the query's dtype and, where requested, lse float32
    [H, num_requests]. A request of length 0 has output 0 and lse -inf (or that of the sinks).

  Raises:
    ValueError: an argument is not as documented here.
    NotImplementedError: gradients with respect to quantized pages; a mesh that does not divide
      them.
  """
  return attend_to_pages("page_attention", (query, None, None), cache, pages_metadata, options,
                         keywords)


def ragged_page_attention_v2(query: ArrayLike, cache: PagesV2,
                             pages_metadata: PagesMetadata = BY_KEYWORD,
                             options: PagedOptions | None = None,
                             **keywords: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention of any number of queries per request, prefill and decode mixed, to pages.

  Shapes are those of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`; the scale is
  D**-0.5 unless given, and a window applies to each query. Queries are the last tokens of their
  request, which the pages hold already: query i of n has position context_len - n + i.

  The output of a request has the same bits alone, in any batch, in any pages and in any chunks of a
  prefill, for given `block_sizes` and without `distribution` and `prefixes` in `pages_metadata`.
  Prefixes change the order of sums where they cut the pages of a request: with the same cut, and
  given `block_sizes`, it has the same bits alone and in any batch, see `caches.prefixes`.

  >>> import numpy as np
  >>> from attn_core import Heads, PagesMetadata, PagesV2, ragged_page_attention_v2
  >>> from attn_core.caches.paged import ops
  >>> cache = ops.init(PagesV2, num_pages=4, page_size=16, heads=Heads(1, 8, 8), dtype="float32")
  >>> tables, lengths = np.array([[2], [0]], np.int32), np.array([5, 3], np.int32)
  >>> requests = PagesMetadata(tables, lengths, query_start_loc=np.array([0, 1, 4], np.int32))
  >>> query = np.ones((4, 2, 8), np.float32)  # one query of request 0, three of request 1
  >>> ragged_page_attention_v2(query, cache, requests, softmax_scale=1.0).attention_outputs.shape
  (4, 2, 8)

  Args:
    query: float [T, H, D], the queries of the requests in order; more rows may follow.
    cache: `PagesV2`: pages [num_pages, page_size, 2K, D].
    pages_metadata: page_tables int32 [num_requests, pages_per_request], context_lens int32
      [num_requests], query_start_loc int32 [num_requests + 1];
      num_requests int32 [] or [1] if some rows are unused.
    options: keywords as one value; not together with any of them.
    **keywords: the rest, as in `attention`, where `pages_metadata` is called `cache_metadata`.

  Returns:
    attention_outputs [T, H, D] in the query's dtype and, where requested, lse float32 [H, T]; rows
    past the last request are 0 and -inf.

  Raises:
    ValueError: an argument is not as documented here.
    NotImplementedError: gradients with respect to quantized pages; a mesh that does not divide
      them.
  """
  return attend_to_pages("ragged_page_attention_v2", (query, None, None), cache,
                         pages_metadata, options, keywords)


def ragged_page_attention_v3(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
                             cache: PagesV3,
                             pages_metadata: PagesMetadata = BY_KEYWORD,
                             options: PagedOptions | None = None,
                             **keywords: Unpack[AttentionOptions]) -> AttentionOutput:
  """Writes the queries' keys and values to the pages, and computes attention to them as v2 does.

  Shapes are those of vLLM's kernel of this name for TPUs, with the page table as
  [num_requests, pages_per_request]; the scale is D**-0.5 unless given. A donated cache is updated
  in place.

  A layer that shares the keys of another layer gives None for key and value: it reads that layer's
  cache, whose heads `pages_metadata.stored_heads` says, and writes nothing.

  Args:
    query: float [T, H, D], the queries of the requests in order; more rows may follow.
    key: float [T, K, D], of the same tokens; quantized pages hold the scales. None: see above.
    value: float [T, K, D]; None with key.
    cache: `PagesV3`: pages [num_pages, page_size, cdiv(2K, packing), packing, padded_width],
      D padded to a multiple of 128.
    pages_metadata: as for v2, and distribution int32 [3]: (decode end, prefill end, total);
      requests before decode end have one query each and are computed separately.
    options: keywords as one value; not together with any of them.
    **keywords: the rest, as in `attention`, where `pages_metadata` is called `cache_metadata`.

  Returns:
    attention_outputs [T, H, D], lse as for v2, and cache_view, the cache with the new tokens; None
    where nothing is written.

  Raises:
    ValueError: an argument is not as documented here.
    NotImplementedError: gradients with respect to quantized pages; a mesh that does not divide
      them.
  """
  return attend_to_pages("ragged_page_attention_v3", (query, key, value), cache,
                         pages_metadata, options, keywords)
