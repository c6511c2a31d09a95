# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each mechanism as a function: `attention` with the mechanism filled in."""

from collections.abc import Callable
from typing import Any, Literal, Unpack, cast

import jax
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp

from attn_core.arguments import paged_options
from attn_core.arguments.arguments import AttentionOptions, Cache
from attn_core.arguments.paged_options import PagedOptions
from attn_core.attention import attention
from attn_core.caches.paged.layouts import PagesMetadata, PagesV1, PagesV2, PagesV3
from attn_core.config.metadata import OperationMetadata
from attn_core.types import AttentionMechanism, AttentionOutput, BlockSizes, LatentOptions


def attend(mechanism: AttentionMechanism, query: ArrayLike, key: ArrayLike | None,
           value: ArrayLike | None, options: AttentionOptions) -> AttentionOutput:
  """Runs `attention` by a mechanism; TypeError for keywords that it does not take."""
  unknown = sorted(options.keys() - AttentionOptions.__annotations__.keys())
  if unknown:
    cure = (f"this function always runs {mechanism.value!r}; call attention(..., mechanism=...) to "
            "choose one" if unknown[0] == "mechanism" else
            f"the keywords are {', '.join(AttentionOptions.__annotations__)}")
    raise TypeError(f"mechanism {mechanism.value!r}: got an unexpected keyword argument "
                    f"{unknown[0]!r}; {cure}")
  return attention(query, key, value, mechanism=mechanism.value, **options)


def vanilla(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
            **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes dense attention, the only mechanism that returns its weights.

  Memory is quadratic in the sequence length.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.VANILLA, query, key, value, options)


def sdpa(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
         **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention by `jax.nn.dot_product_attention`, by cuDNN on GPUs.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.SDPA, query, key, value, options)


def cudnn(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
          **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention by NVIDIA's cuDNN, on GPUs only.

  Full and causal masks, windows to the left and lengths take linear memory, a bias or any other
  mask quadratic memory. Differentiable in reverse mode, once.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.CUDNN, query, key, value, options)


def cuda_flash_attn2(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
                     **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes FlashAttention on NVIDIA GPUs only: by our own kernels on Hopper, else by cuDNN.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.CUDA_FLASH_ATTN2, query, key, value, options)


def blockwise(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
              **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention block by block in plain XLA, on every platform.

  Memory is linear in the sequence length.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.BLOCKWISE, query, key, value, options)


def flash_attn2(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
                **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes FlashAttention-2, in memory linear in the sequence length.

  Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.

  The name is that of the algorithm; the kernel depends on the device, and `explain` names it. CPU:
  plain XLA. TPU: Pallas. Hopper GPUs: Mosaic GPU. Other GPUs: cuDNN where it supports every
  argument in linear memory, and then differentiable in reverse mode, once; else plain XLA.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.FLASH_ATTN2, query, key, value, options)


def blocksparse(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
                **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes block-sparse (splash) attention: only blocks with visible keys.

  The name is that of the algorithm; the kernels are those of `flash_attn2`.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.BLOCKSPARSE, query, key, value, options)


def ring_attention(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
                   **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention over one sequence that is sharded over several devices.

  Liu, Zaharia and Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889.

  `metadata.mesh` has the axis `metadata.sequence_axis_name`; `metadata.ring` chooses the
  communication and the order of the tokens; `metadata.scan_ring_attention` makes the steps of the
  ring those of a scan. Without a mesh, or with one shard, the library's own `flash_attn2` kernel
  runs.

  Inside a `jax.shard_map` of the caller's over these axes, arrays are those of one shard: T and S
  are its tokens, and bias and boolean masks have its rows and the columns of all shards.

  >>> import jax.numpy as jnp
  >>> from attn_core import OperationMetadata, create_mesh, ring_attention
  >>> metadata = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, -1)))  # all devices along "sp"
  >>> x = jnp.ones((1, 16, 2, 8))
  >>> output = ring_attention(x, x, x, metadata=metadata).attention_outputs
  >>> output.shape, output.sharding.spec[1]
  ((1, 16, 2, 8), 'sp')

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.RING, query, key, value, options)


def autoregressive_decodeattn(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
                              **options: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention of a few queries per row to many keys or a cache.

  Only blocks of the cache that hold visible keys are read.

  Arguments, results and other errors are those of `attention`, see `AttentionOptions`.

  Raises:
    TypeError: an unknown keyword, or `mechanism`.
  """
  return attend(AttentionMechanism.REGRESSIVE_DECODE, query, key, value, options)


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


def blockwise_attn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    deterministic: bool | None = True,
    dropout_rng: ArrayLike | None = None,
    attn_pdrop: float = 0.0,
    causal: bool = True,
    query_chunk_size: int = 2048,
    key_chunk_size: int = 2048,
    dtype: DTypeLike = jnp.float32,
    policy: Callable[..., bool] | str | Literal[False] | None = False,
    precision: jax.lax.PrecisionLike = None,
    float32_logits: bool = True,
    prevent_cse: bool = True,
) -> jax.Array:
  """Computes block-wise attention, with the argument names of the published implementation.

  Liu and Abbeel, Blockwise Parallel Transformer, https://arxiv.org/abs/2305.19370.

  Args:
    query: float [B, T, H, D].
    key: float [B, S, K, D].
    value: float [B, S, K, E].
    bias: float [B or 1, H or 1, T or 1, S or 1], or None.
    deterministic: whether dropout is off; None: on if a key is given.
    dropout_rng: a `jax.random` key, required where dropout is on.
    attn_pdrop: probability in [0, 1) that a weight is dropped.
    causal: whether keys after the query are hidden; T must be S then.
    query_chunk_size: queries per block (tokens).
    key_chunk_size: keys per block (tokens).
    dtype: dtype of the products.
    policy: remat policy or its name; False or None: none.
    precision: `jax.lax.PrecisionLike` of the products; see `attention`.
    float32_logits: softmax in float32; False: in `dtype`.
    prevent_cse: as in `jax.checkpoint`.

  Returns:
    [B, T, H, E] in the query's dtype.

  Raises:
    ValueError: as `attention`.
  """
  sizes = BlockSizes(query_chunk_size, key_chunk_size, query_chunk_size, key_chunk_size)
  softmax_dtype = jnp.float32 if float32_logits else dtype
  return attention(
      query, key, value, mechanism="blockwise", bias=bias, deterministic=deterministic,
      dropout_rng=dropout_rng, dropout_prob=attn_pdrop, causal=causal, block_sizes=sizes,
      compute_dtype=dtype, metadata=OperationMetadata(runtime_softmax_dtype=softmax_dtype),
      policy=None if policy is False else policy, precision=precision,
      prevent_cse=prevent_cse).attention_outputs


_BY_KEYWORD: Any = None  # the pages' metadata is given as `cache_metadata=`, or `metadata=`


def page_attention(query: ArrayLike, cache: PagesV1, pages_metadata: PagesMetadata = _BY_KEYWORD,
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
  return _paged("page_attention", (query, None, None), cache,
                pages_metadata, options, keywords)


def ragged_page_attention_v2(query: ArrayLike, cache: PagesV2,
                             pages_metadata: PagesMetadata = _BY_KEYWORD,
                             options: PagedOptions | None = None,
                             **keywords: Unpack[AttentionOptions]) -> AttentionOutput:
  """Computes attention of any number of queries per request, prefill and decode mixed, to pages.

  Shapes are those of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`; the scale is
  D**-0.5 unless given, and a window applies to each query. Queries are the last tokens of their
  request, which the pages hold already: query i of n has position context_len - n + i.

  The output of a request has the same bits alone, in any batch, in any pages and in any chunks of a
  prefill, for given `block_sizes` and without `pages_metadata.distribution`.

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
  return _paged("ragged_page_attention_v2", (query, None, None), cache,
                pages_metadata, options, keywords)


def ragged_page_attention_v3(query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
                             cache: PagesV3,
                             pages_metadata: PagesMetadata = _BY_KEYWORD,
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
  return _paged("ragged_page_attention_v3", (query, key, value), cache,
                pages_metadata, options, keywords)


def _paged(
    mechanism: str, arrays: tuple[ArrayLike, ArrayLike | None, ArrayLike | None], cache: Cache,
    pages_metadata: PagesMetadata | None, options: PagedOptions | None, keywords: AttentionOptions,
) -> AttentionOutput:
  given = paged_options.keywords_of(mechanism, pages_metadata, options, keywords)
  return attend(AttentionMechanism(mechanism), *arrays, {"cache_view": cache, **given})
