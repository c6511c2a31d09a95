# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each mechanism as a function: `attention` with the mechanism filled in."""

from attn_core.mechanism_functions.dense import (
    autoregressive_decodeattn, blocksparse, blockwise, blockwise_attn, cuda_flash_attn2, cudnn,
    flash_attn2, ring_attention, sdpa, vanilla)
from attn_core.mechanism_functions.latent import (
    multi_latent_attention, multi_latent_ragged_page_attention)
from attn_core.mechanism_functions.pages import (
    page_attention, ragged_page_attention_v2, ragged_page_attention_v3)

__all__ = ["autoregressive_decodeattn", "blocksparse", "blockwise", "blockwise_attn",
           "cuda_flash_attn2", "cudnn", "flash_attn2", "multi_latent_attention",
           "multi_latent_ragged_page_attention", "page_attention", "ragged_page_attention_v2",
           "ragged_page_attention_v3", "ring_attention", "sdpa", "vanilla"]
