# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mechanisms for queries, keys and values in arrays of their own, as functions."""

from collections.abc import Callable
from typing import Literal, Unpack

import jax
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp

from attn_core.arguments.arguments import AttentionOptions
from attn_core.config.metadata import OperationMetadata
from attn_core.mechanism_functions.call import attend
from attn_core.types import AttentionMechanism, AttentionOutput, BlockSizes


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
  return attend(AttentionMechanism.BLOCKWISE, query, key, value, {
      "bias": bias, "deterministic": deterministic, "dropout_rng": dropout_rng,
      "dropout_prob": attn_pdrop, "causal": causal, "block_sizes": sizes, "compute_dtype": dtype,
      "metadata": OperationMetadata(runtime_softmax_dtype=softmax_dtype),
      "policy": None if policy is False else policy, "precision": precision,
      "prevent_cse": prevent_cse}).attention_outputs
