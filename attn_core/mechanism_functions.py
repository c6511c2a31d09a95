"""Each mechanism as a function of its own: `attention` with the mechanism filled in."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from attn_core.attention import attention
from attn_core.caches.paged.ops import PagesMetadata, PagesV1, PagesV2, PagesV3
from attn_core.config.metadata import OperationMetadata
from attn_core.types import AttentionMechanism, AttentionOutput, BlockSizes


def _named(mechanism: AttentionMechanism, what: str):
  function = functools.partial(attention, mechanism=mechanism.value)
  function.__name__ = mechanism.value
  function.__doc__ = f"""{what}

  Takes the arguments of `attention` but for `mechanism`, and raises what it raises.
  """
  return function


vanilla = _named(AttentionMechanism.VANILLA,
                 "Dense attention, quadratic in memory, the only one that returns its weights.")
sdpa = _named(AttentionMechanism.SDPA,
              "`jax.nn.dot_product_attention`, the platform's own implementation.")
cudnn = _named(AttentionMechanism.CUDNN, """NVIDIA's cuDNN attention by JAX, on GPUs only.

  Full, causal, windowed to the left, and within lengths in linear memory; bias and other masks
  written out. Differentiated in reverse mode, once.""")
cuda_flash_attn2 = _named(
    AttentionMechanism.CUDA_FLASH_ATTN2,
    "FlashAttention on NVIDIA GPUs only: the library's own kernels on Hopper, elsewhere cuDNN.")
blockwise = _named(AttentionMechanism.BLOCKWISE,
                   "Block-wise attention in plain XLA, linear in memory, on every platform.")
_ON_GPUS = """

  The name is that of the algorithm; which kernel computes it depends on the device, and `explain`
  says it. CPU: plain XLA. TPU: Pallas. Hopper GPUs: Mosaic GPU. Other GPUs: cuDNN where it honours
  every argument in linear memory, and then in reverse mode, once; else plain XLA."""
flash_attn2 = _named(AttentionMechanism.FLASH_ATTN2,
                     f"FlashAttention-2, linear in memory.{_ON_GPUS}")
blocksparse = _named(
    AttentionMechanism.BLOCKSPARSE,
    f"Block-sparse (splash) attention: only the blocks that a mask leaves visible.{_ON_GPUS}")

ring_attention = _named(AttentionMechanism.RING, """One sequence over several devices.

  `metadata.mesh` has the axis `metadata.sequence_axis_name`, `metadata.ring` says what travels and
  in which order the tokens stand, `metadata.scan_ring_attention` whether hops are steps of a scan.
  Without a mesh, or with one shard, it is `flash_attn2` by the library's own kernel.
  Liu, Zaharia and Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889.""")

autoregressive_decodeattn = _named(
    AttentionMechanism.REGRESSIVE_DECODE,
    "A few queries a row against many keys or a cache, of which only live blocks are read.")


def blockwise_attn(
    query, key, value, bias=None, deterministic=True, dropout_rng=None, attn_pdrop=0.0,
    causal=True, query_chunk_size=2048, key_chunk_size=2048, dtype=jnp.float32, policy=False,
    precision=None, float32_logits=True, prevent_cse=True):
  """Block-wise attention by its documented arguments.

  Liu and Abbeel, Blockwise Parallel Transformer, https://arxiv.org/abs/2305.19370.

  Args:
    query: float [B, T, H, D].
    key: float [B, S, K, D].
    value: float [B, S, K, E].
    bias: float [B or 1, H or 1, T or 1, S or 1], or None.
    deterministic: whether dropout is off.
    dropout_rng: a `jax.random` key, needed where dropout is on.
    attn_pdrop: probability in [0, 1) that a weight is dropped.
    causal: whether keys after the query are hidden; T must be S then.
    query_chunk_size: queries of a block (tokens).
    key_chunk_size: keys of a block (tokens).
    dtype: dtype of the products.
    policy: remat policy or its name; False or None: none.
    precision: `jax.lax.PrecisionLike` of the products.
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


class PagedOptions(NamedTuple):
  """Arguments of `attention` that attention over pages takes as well, with their defaults.

  Where `metadata` has a mesh, heads are spread over its axes, and so are groups of requests, each
  with pages of its own: see `caches.groups`.
  """

  causal: bool = True
  sliding_window: Any = None
  softmax_scale: float | None = None
  logits_soft_cap: float | None = None
  softmax_aux: Any = None
  precision: Any = None
  block_sizes: BlockSizes | None = None
  return_lse: bool = False
  metadata: OperationMetadata | None = None


def page_attention(query, cache: PagesV1, metadata: PagesMetadata,
                   options: PagedOptions = PagedOptions()) -> AttentionOutput:
  """One query per request against its pages, which hold the query's own token already.

    output[r] = softmax(soft_cap(scale * query[r] . keys[r])) . values[r]

  Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180. In shapes that of
  `jax.experimental.pallas.ops.tpu.paged_attention`; the scale is D**-0.5 unless given.

  Args:
    query: float [R, H, D], each at its request's last position.
    cache: `PagesV1`: key_pages [K, P, page, D], value_pages [K, P, page, E].
    metadata: page_tables int32 [R, N], context_lens int32 [R] (tokens); no query_start_loc.
    options: the rest, as in `attention`.

  Returns:
    attention_outputs [R, H, E] in the query's dtype and, where asked for, lse float32 [H, R]. A
    request of length 0 has output 0 and lse -inf (or that of the sinks).

  Raises:
    ValueError: an argument is not what is said here.
    NotImplementedError: gradients of what is in quantised pages; a mesh that does not divide them.
  """
  return _paged("page_attention", (query, None, None), cache, metadata, options)


def ragged_page_attention_v2(query, cache: PagesV2, metadata: PagesMetadata,
                             options: PagedOptions = PagedOptions()) -> AttentionOutput:
  """Any number of queries per request, prefill and decode mixed, against the requests' pages.

  In shapes that of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`; the scale is D**-0.5
  unless given, and a window is cut for every query by itself. Queries are the last tokens of their
  request, which the pages hold already: token i of q stands at position context_len - q + i.

  A request's output has the same bits alone, in any batch, in any pages and in any chunks of a
  prefill, for given `options.block_sizes` and without `metadata.distribution`.

  Args:
    query: float [T, H, D], the requests' queries one after the other; more rows may follow.
    cache: `PagesV2`: pages [P, page, 2K, D].
    metadata: page_tables int32 [R, N], context_lens int32 [R], query_start_loc int32 [R + 1];
      num_requests int32 [] or [1] where not all rows are in use.
    options: the rest, as in `attention`.

  Returns:
    attention_outputs [T, H, D] in the query's dtype and, where asked for, lse float32 [H, T]; rows
    past the last request are 0 and -inf.

  Raises:
    ValueError: an argument is not what is said here.
    NotImplementedError: gradients of what is in quantised pages; a mesh that does not divide them.
  """
  return _paged("ragged_page_attention_v2", (query, None, None), cache, metadata, options)


def ragged_page_attention_v3(query, key, value, cache: PagesV3, metadata: PagesMetadata,
                             options: PagedOptions = PagedOptions()) -> AttentionOutput:
  """As v2, with the queries' own keys and values written into the pages in the same call.

  In shapes that of vLLM's kernel of this name for TPUs, with the page table as [R, N]; the scale is
  D**-0.5 unless given. Donate the cache, and it is written in place.

  Args:
    query: float [T, H, D], the requests' queries one after the other; more rows may follow.
    key: float [T, K, D], of the same tokens; quantised pages make or have the scales.
    value: float [T, K, D].
    cache: `PagesV3`: pages [P, page, cdiv(2K, packing), packing, D'], D' a multiple of 128.
    metadata: as for v2, and distribution int32 [3]: (decode end, prefill end, total), which
      computes the requests before the first one, of one query each, by themselves.
    options: the rest, as in `attention`.

  Returns:
    attention_outputs [T, H, D], lse as for v2, and cache_view, the cache with the new tokens.

  Raises:
    ValueError: an argument is not what is said here.
    NotImplementedError: gradients of what is in quantised pages; a mesh that does not divide them.
  """
  return _paged("ragged_page_attention_v3", (query, key, value), cache, metadata, options)


def _paged(mechanism: str, arrays, cache, metadata, options: PagedOptions) -> AttentionOutput:
  return attention(*arrays, mechanism=mechanism, layout="thd", cache_view=cache,
                   cache_metadata=metadata, **options._asdict())
