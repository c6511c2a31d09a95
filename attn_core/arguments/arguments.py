# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of `attention` as typed values: all of them, and its keywords but `mechanism`."""

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import jax
from jax.typing import ArrayLike, DTypeLike

from attn_core.caches.dense import DenseCache
from attn_core.caches.latent import LatentCache
from attn_core.caches.paged.layouts import Pages, PagesMetadata
from attn_core.caches.update import CacheMetadata
from attn_core.caches.window import WindowCache
from attn_core.config.metadata import OperationMetadata
from attn_core.masks.info import MaskInfo
from attn_core.masks.mask import Mask
from attn_core.score_mods.score_mod import ScoreMod
from attn_core.types import ArrayLayout, BlockSizes, LatentOptions, Mode, SlidingWindow

Cache = DenseCache | WindowCache | LatentCache | Pages
AnyCacheMetadata = CacheMetadata | PagesMetadata
InitBias = Callable[[], ArrayLike | None]
RematPolicy = Callable[..., bool]

# An array, or in `explain` the shape and dtype of one.
Shaped = ArrayLike | jax.ShapeDtypeStruct


class AttentionArguments(NamedTuple):
  """The arguments of `attention` as the caller gave them, in the order of its signature."""

  query: Shaped
  key: Shaped | None
  value: Shaped | None
  mechanism: str
  metadata: OperationMetadata | None
  mode: Mode | None
  layout: ArrayLayout
  mask: Mask | ArrayLike | None
  mask_info: MaskInfo | None
  bias: Shaped | None
  init_bias: InitBias | None
  score_mod: ScoreMod | None
  causal: bool
  query_offset: ArrayLike | None
  sliding_window: SlidingWindow
  chunk_size: int | None
  softmax_scale: float | None
  logits_soft_cap: float | None
  softmax_aux: Shaped | None
  dropout_prob: float
  dropout_rng: ArrayLike | None
  deterministic: bool | None
  cum_seqlens_q: ArrayLike | None
  cum_seqlens_k: ArrayLike | None
  cache_view: Cache | None
  cache_metadata: AnyCacheMetadata | None
  latent_options: LatentOptions | None
  normalize_output: bool
  precision: jax.lax.PrecisionLike
  compute_dtype: DTypeLike | None
  block_sizes: BlockSizes | None
  policy: RematPolicy | str | None
  prevent_cse: bool
  fused_backward: bool
  optimized: bool
  mask_value: float | None
  vmem_limit_bytes: int | None
  return_lse: bool
  return_weights: bool


class AttentionOptions(TypedDict, total=False):
  """The keyword arguments of `attention` except `mechanism`, with the same defaults.

  A function that takes them, such as `flash_attn2`, is `attention` with the mechanism filled in:
  query, key, value and these options, the `AttentionOutput` and the errors are as documented there.
  An unknown keyword, or `mechanism`, is a TypeError.
  """

  metadata: OperationMetadata | None
  mode: Mode | None
  layout: ArrayLayout
  mask: Mask | ArrayLike | None
  mask_info: MaskInfo | None
  bias: ArrayLike | None
  init_bias: InitBias | None
  score_mod: ScoreMod | None
  causal: bool
  query_offset: ArrayLike | None
  sliding_window: SlidingWindow
  chunk_size: int | None
  softmax_scale: float | None
  logits_soft_cap: float | None
  softmax_aux: ArrayLike | None
  dropout_prob: float
  dropout_rng: ArrayLike | None
  deterministic: bool | None
  cum_seqlens_q: ArrayLike | None
  cum_seqlens_k: ArrayLike | None
  cache_view: Cache | None
  cache_metadata: AnyCacheMetadata | None
  latent_options: LatentOptions | None
  normalize_output: bool
  precision: jax.lax.PrecisionLike
  compute_dtype: DTypeLike | None
  block_sizes: BlockSizes | None
  policy: RematPolicy | str | None
  prevent_cse: bool
  fused_backward: bool
  optimized: bool
  mask_value: float | None
  vmem_limit_bytes: int | None
  return_lse: bool
  return_weights: bool
