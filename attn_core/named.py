"""Each mechanism as a function of its own: `attention` with the mechanism filled in."""

import functools

import jax.numpy as jnp

from attn_core.attention import attention
from attn_core.metadata import OperationMetadata
from attn_core.types import AttentionMechanism, BlockSizes


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
