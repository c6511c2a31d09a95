# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of mechanisms and platforms in other libraries, for errors that suggest ours."""

# Mechanisms -> the names by which other libraries, or their users, know what they compute.
_NAMES: dict[tuple[str, ...], str] = {
    ("blocksparse",): "block_sparse flex flex_attention splash splash_attention",
    ("sdpa",): "jax_nn sdpa_attention",
    ("flash_attn2",): "fa2 fa3 flash flash_attention flash_attn mosaic pallas triton",
    ("cudnn",): "cudnn_attention cudnn_flash cudnn_flash_te te transformer_engine",
    ("blockwise",): "chunked memory_efficient xformers xla_chunked",
    ("cuda_flash_attn2",): "cuda_flash",
    ("sdpa", "vanilla"): "dot_product dot_product_attention scaled_dot_product_attention",
    ("sdpa", "blockwise"): "xla",
    ("vanilla",): "dense eager math mha naive standard",
    ("auto",): "autoselected default",
    ("ring",): "context_parallel ring_attention ulysses",
    ("autoregressive_decodeattn",): "autoregressive decode decode_attention",
    ("page_attention",): "paged paged_attention",
    ("ragged_page_attention_v2", "ragged_page_attention_v3"):
        "ragged ragged_page_attention ragged_paged_attention",
    ("multi_latent_attention",): "flash_mla latent_attention mla"}
OTHER_MECHANISM_NAMES = {x: names for names, others in _NAMES.items() for x in others.split()}
OTHER_PLATFORM_NAMES: dict[str, tuple[str, ...]] = {"cuda": ("gpu",), "nvidia": ("gpu",)}
