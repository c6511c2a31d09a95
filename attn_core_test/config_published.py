# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files config.json of models, and what they mean."""

import numpy as np

from attn_core import Rope

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, LINEAR = "indexed_attention", "linear_attention"
LLAMA31_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}

# name -> (config.json as published, without keys that repeat a default; expected fields, by hand).
PUBLISHED = {
    "llama-3-8b": (
        {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 32, "max_position_embeddings": 8192,
         "rope_scaling": None, "rope_theta": 500000.0, "vocab_size": 128256},
        {"num_key_value_heads": 8, "head_dim": 128, "layer_types": None, "sliding_window": None,
         "softmax_scale": None, "rope": Rope(rope_theta=500000.0, max_position_embeddings=8192)}),
    "llama-3.1-8b": (
        {"model_type": "llama", "num_key_value_heads": 8, "max_position_embeddings": 131072,
         "rope_scaling": LLAMA31_ROPE, "rope_theta": 500000.0},
        {"head_dim": 128, "rope": Rope(
            "llama3", 500000.0, 8.0, 131072, 8192, low_freq_factor=1.0, high_freq_factor=4.0)}),
    "llama-4-scout": (
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128,
            "max_position_embeddings": 10485760, "no_rope_layers": [], "num_attention_heads": 40,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_theta": 500000.0,
            "attn_temperature_tuning": 4, "attn_scale": 0.1, "floor_scale": 8192,
            "rope_scaling": {**LLAMA31_ROPE, "factor": 16.0, "high_freq_factor": 1.0}},
         "vision_config": {"model_type": "llama4_vision_model"}},
        {"layer_types": ((CHUNKED,) * 3 + (FULL,)) * 12, "chunk_size": 8192,
         "layers_without_rope": tuple(range(3, 48, 4)), "head_dim": 128,
         "temperature_tuning": (0.1, 8192),
         "rope": Rope("llama3", 500000.0, 16.0, 10485760, 8192, interleaved=True,
                      low_freq_factor=1.0, high_freq_factor=1.0)}),
    "mistral-7b-v0.1": (
        {"model_type": "mistral", "num_hidden_layers": 32, "max_position_embeddings": 32768,
         "sliding_window": 4096},
        {"sliding_window": (4095, 0), "layer_types": (SLIDING,) * 32, "num_key_value_heads": 8}),
    "mistral-7b-v0.3": (  # null: without a window, though the model's default has one
        {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
        {"sliding_window": None, "layer_types": (FULL,) * 32}),
    "mixtral-8x7b": (
        {"model_type": "mixtral", "sliding_window": None, "rope_theta": 1000000.0,
         "num_local_experts": 8},
        {"sliding_window": None, "head_dim": 128, "num_key_value_heads": 8}),
    "gemma-2-27b": (  # 144 is hidden_size / heads; the width of a head is 128
        {"model_type": "gemma2", "hidden_size": 4608, "num_attention_heads": 32,
         "num_key_value_heads": 16, "num_hidden_layers": 46, "head_dim": 128,
         "query_pre_attn_scalar": 144, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
        {"softmax_scale": 1 / 12, "logits_soft_cap": 50.0, "sliding_window": (4095, 0),
         "layer_types": (SLIDING, FULL) * 23, "head_dim": 128}),
    "gemma-3-4b": (
        {"model_type": "gemma3", "text_config": {
            "hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
         "vision_config": {"hidden_size": 1152}},
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
         "softmax_scale": 1 / 16, "logits_soft_cap": None, "sliding_window": (1023, 0),
         "layer_types": ((SLIDING,) * 5 + (FULL,)) * 5 + (SLIDING,) * 4, "hidden_size": 2560,
         "rope": Rope("linear", 1000000.0, 8.0, 131072),
         "layer_ropes": ((SLIDING, Rope("default", 10000.0, None, 131072)),)}),
    "qwen2-7b": (
        {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28,
         "num_key_value_heads": 4, "num_hidden_layers": 28, "max_window_layers": 28,
         "sliding_window": 131072, "use_sliding_window": False, "rope_theta": 1000000.0},
        {"sliding_window": None, "layer_types": (FULL,) * 28, "head_dim": 128}),
    "qwen2-windowed": (
        {"model_type": "qwen2", "num_hidden_layers": 4, "max_window_layers": 3,
         "sliding_window": 64, "use_sliding_window": True},
        {"sliding_window": (63, 0), "layer_types": (FULL,) * 3 + (SLIDING,)}),
    "qwen1.5-moe-a2.7b": (
        {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048,
         "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
         "num_attention_heads": 16, "num_experts": 60, "num_hidden_layers": 24,
         "num_key_value_heads": 16, "rope_theta": 1000000.0, "sliding_window": 32768,
         "shared_expert_intermediate_size": 5632, "use_sliding_window": False},
        {"sliding_window": None, "layer_types": (FULL,) * 24, "head_dim": 128,
         "num_key_value_heads": 16, "rope": Rope(
             rope_theta=1000000.0, max_position_embeddings=8192)}),
    "qwen2-moe-windowed": (
        {"model_type": "qwen2_moe", "num_hidden_layers": 6, "max_window_layers": 3,
         "sliding_window": 64, "use_sliding_window": True},
        {"sliding_window": (63, 0), "layer_types": (SLIDING, FULL, SLIDING) + (FULL,) * 3}),
    "qwen2-vl-7b": (
        {"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28,
         "num_key_value_heads": 4, "num_hidden_layers": 28, "max_window_layers": 28,
         "max_position_embeddings": 32768, "sliding_window": 32768, "use_sliding_window": False,
         "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
         "image_token_id": 151655, "vision_config": {"depth": 32}},
        {"head_dim": 128, "layer_types": (FULL,) * 28, "rope": Rope(
            "mrope", 1000000.0, None, 32768, mrope_section=(16, 24, 24))}),
    "qwen2.5-vl-7b": (
        {"model_type": "qwen2_5_vl", "hidden_size": 3584, "num_attention_heads": 28,
         "num_key_value_heads": 4, "num_hidden_layers": 28, "max_window_layers": 28,
         "max_position_embeddings": 128000, "sliding_window": 32768, "use_sliding_window": False,
         "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
         "vision_config": {"depth": 32}, "vision_token_id": 151654},
        {"head_dim": 128, "rope": Rope("mrope", 1000000.0, None, 128000,
                                       mrope_section=(16, 24, 24))}),
    "qwen3-8b": (
        {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 36, "max_window_layers": 36,
         "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
         "use_sliding_window": False},
        {"head_dim": 128, "num_key_value_heads": 8, "layer_types": (FULL,) * 36}),
    "qwen3-30b-a3b": (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
         "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
         "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128,
         "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_theta": 1000000.0,
         "sliding_window": None, "use_sliding_window": False},
        {"head_dim": 128, "num_key_value_heads": 4, "layer_types": (FULL,) * 48,
         "sliding_window": None, "rope": Rope(
             rope_theta=1000000.0, max_position_embeddings=40960)}),
    "qwen3-moe-windowed": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 3, "sliding_window": 64,
         "use_sliding_window": True},
        {"sliding_window": (63, 0), "layer_types": (SLIDING,) * 3, "head_dim": 64}),
    "qwen3-vl-8b": (
        {"model_type": "qwen3_vl", "text_config": {
            "model_type": "qwen3_vl_text", "head_dim": 128, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_hidden_layers": 36, "max_position_embeddings": 262144,
            "rope_theta": 5000000, "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}},
        {"rope": Rope("default", 5000000, None, 262144, mrope_section=(24, 20, 20),
                      mrope_interleaved=True)}),
    "phi-3-mini-128k": (
        {"model_type": "phi3", "max_position_embeddings": 131072, "sliding_window": 262144,
         "original_max_position_embeddings": 4096, "rope_scaling": {
             "long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
        {"head_dim": 96, "sliding_window": (262143, 0), "rope": Rope(
            "longrope", 10000.0, None, 131072, 4096, short_factor=(1.0,) * 48,
            long_factor=(1.5,) * 48)}),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "sliding_window": 128,
         "layer_types": [SLIDING, FULL] * 12, "rope_theta": 150000, "rope_scaling": {
             "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
             "original_max_position_embeddings": 4096, "truncate": False}},
        {"sinks": True, "sliding_window": (127, 0), "head_dim": 64, "num_key_value_heads": 8,
         "layer_types": (SLIDING, FULL) * 12, "rope": Rope(
             "yarn", 150000, 32.0, 131072, 4096, truncate=False)}),
    "deepseek-v3": (  # 0.1 ln 40 + 1 = 1.36888794541, which enters twice
        {"model_type": "deepseek_v3", "num_key_value_heads": 128, "max_position_embeddings": 163840,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_scaling": {
             "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
             "original_max_position_embeddings": 4096, "type": "yarn"}},
        {"head_dim": 192, "value_head_dim": 128, "rope_head_dim": 64,
         "softmax_scale": 192**-0.5 * 1.3688879454113936**2, "rope": Rope(
             "yarn", 10000.0, 40, 163840, 4096, interleaved=True, beta_fast=32, beta_slow=1,
             mscale=1.0, mscale_all_dim=1.0)}),
    "mistral-small-3.1-24b": (
        {"model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2,
         "torch_dtype": "bfloat16", "vision_feature_layer": -1, "text_config": {
             "model_type": "mistral", "head_dim": 128, "hidden_size": 5120,
             "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
             "max_position_embeddings": 131072, "rope_theta": 1e9, "sliding_window": None}},
        {"head_dim": 128, "num_key_value_heads": 8, "layer_types": (FULL,) * 40,
         "attn_dtype": "bfloat16", "rope": Rope(rope_theta=1e9, max_position_embeddings=131072)}),
    "ministral-3-8b": (
        {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
        {"head_dim": 128, "sliding_window": None, "temperature_tuning": (0.1, 16384),
         "temperature_offset": 0, "temperature_with_rope": True, "rope": Rope(
             "yarn", 1e6, 16.0, 262144, 16384, mscale=1.0, mscale_all_dim=1.0)}),
    "gemma-3n-e4b": (
        {"model_type": "gemma3n", "audio_config": {"hidden_size": 1536}, "text_config": {
            "model_type": "gemma3n_text", "num_kv_shared_layers": 15, "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0, "sliding_window": 512, "laurel_rank": 64,
            "layer_types": ((SLIDING,) * 4 + (FULL,)) * 7}},
        {"head_dim": 256, "num_key_value_heads": 2, "softmax_scale": 1.0,
         "sliding_window": (511, 0), "layer_types": ((SLIDING,) * 4 + (FULL,)) * 7,
         "rope": Rope(rope_theta=1e6, max_position_embeddings=32768),
         "layer_ropes": ((SLIDING, Rope(rope_theta=1e4, max_position_embeddings=32768)),)}),
    "gemma-4": (
        {"model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "num_hidden_layers": 8, "num_key_value_heads": 8,
            "attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 512,
            "use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0}},
        {"head_dim": 512, "layer_head_dims": ((SLIDING, 256),), "num_key_value_heads": 2,
         "layer_key_value_heads": ((SLIDING, 8),), "softmax_scale": 1.0,
         "sliding_window": (511, 0), "layer_types": (SLIDING,) * 5 + (FULL, SLIDING, FULL),
         "rope": Rope("proportional", 1e6, None, 131072, partial_rotary_factor=0.25),
         "layer_ropes": ((SLIDING, Rope(rope_theta=1e4, max_position_embeddings=131072)),)}),
    "qwen3-next-80b-a3b": (
        {"model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 256,
         "linear_num_key_heads": 16, "max_position_embeddings": 262144, "num_experts": 512,
         "partial_rotary_factor": 0.25, "rope_theta": 10000000},
        {"head_dim": 256, "num_key_value_heads": 2, "layer_types": ((LINEAR,) * 3 + (FULL,)) * 12,
         "rope": Rope("default", 10000000, None, 262144, partial_rotary_factor=0.25)}),
    "qwen3.5": (
        {"model_type": "qwen3_5", "image_token_id": 248056, "text_config": {
            "model_type": "qwen3_5_text", "num_hidden_layers": 8}},
        {"head_dim": 256, "num_key_value_heads": 4, "layer_types": ((LINEAR,) * 3 + (FULL,)) * 2,
         "rope": Rope("default", 10000.0, None, 32768, partial_rotary_factor=0.25,
                      mrope_section=(11, 11, 10), mrope_interleaved=True)}),
    "deepseek-v3.2": (
        {"model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64,
         "index_topk": 2048, "rope_scaling": {
             "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn",
             "original_max_position_embeddings": 4096}},
        {"head_dim": 192, "value_head_dim": 128, "rope_head_dim": 64, "index_topk": 2048,
         "layer_types": (INDEXED,) * 61, "softmax_scale": 192**-0.5 * 1.3688879454113936**2,
         "rope": Rope("yarn", 10000.0, 40, 163840, 4096, interleaved=True, mscale=1.0,
                      mscale_all_dim=1.0)}),
    "kimi-k2": (
        {"model_type": "kimi_k2", "num_attention_heads": 64, "max_position_embeddings": 131072,
         "rope_theta": 50000.0, "torch_dtype": "bfloat16", "rope_scaling": {
             "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}},
        {"head_dim": 192, "value_head_dim": 128, "num_key_value_heads": 64, "rope_head_dim": 64,
         "softmax_scale": 192**-0.5 * (0.1 * np.log(32) + 1)**2, "rope": Rope(
             "yarn", 50000.0, 32.0, 131072, 4096, interleaved=True, beta_fast=1.0, beta_slow=1.0,
             mscale=1.0, mscale_all_dim=1.0)}),
    "kimi-linear-48b-a3b": (
        {"model_type": "kimi_linear", "num_hidden_layers": 4, "model_max_length": 1048576,
         "rope_theta": 10000.0, "mla_use_nope": True, "linear_attn_config": {
             "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128}},
        {"head_dim": 192, "value_head_dim": 128, "rope_head_dim": None, "rope": Rope("none"),
         "layer_types": (LINEAR,) * 3 + (FULL,), "max_position_embeddings": 1048576}),
    "glm-4-9b": (
        {"model_type": "glm4", "attention_bias": True, "max_position_embeddings": 32768,
         "partial_rotary_factor": 0.5},
        {"head_dim": 128, "num_key_value_heads": 2, "rope": Rope(
            "default", 10000.0, None, 32768, partial_rotary_factor=0.5, interleaved=True)}),
    "glm-4.5": (
        {"model_type": "glm4_moe", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 92,
         "partial_rotary_factor": 0.5, "rope_theta": 1000000, "use_qk_norm": True},
        {"head_dim": 128, "num_key_value_heads": 8, "rope": Rope(
            "default", 1000000, None, 131072, partial_rotary_factor=0.5)}),
    "glm-5": (
        {"model_type": "glm_moe_dsa", "head_dim": 64, "indexer_types": ["full"] * 78,
         "layer_types": ["deepseek_sparse_attention"] * 78, "rope_parameters": {
             "rope_theta": 1000000, "rope_type": "default"}},
        {"head_dim": 256, "value_head_dim": 256, "rope_head_dim": 64, "index_topk": 2048,
         "layer_types": (INDEXED,) * 78, "softmax_scale": None,
         "rope": Rope("default", 1000000, None, 202752, interleaved=True)}),
    "minimax": (
        {"model_type": "minimax", "num_hidden_layers": 4, "head_dim": 128, "block_size": 256,
         "full_attn_alpha_factor": 3.5, "layer_types": [LINEAR, LINEAR, LINEAR, FULL]},
        {"head_dim": 128, "layer_types": (LINEAR,) * 3 + (FULL,), "sliding_window": None,
         "rope": Rope(rope_theta=1e6, max_position_embeddings=131072)}),
    "minimax-m2": (
        {"model_type": "minimax_m2", "rotary_dim": 64, "use_qk_norm": True},
        {"head_dim": 128, "num_key_value_heads": 8, "rope": Rope(
            "default", 5e6, None, 196608, partial_rotary_factor=0.5)}),
    "olmo-2-7b": (
        {"model_type": "olmo2", "max_position_embeddings": 4096, "rope_theta": 500000},
        {"head_dim": 128, "num_key_value_heads": 32, "rope": Rope(
            rope_theta=500000, max_position_embeddings=4096)}),
    "olmo-3-7b": (
        {"model_type": "olmo3", "max_position_embeddings": 65536, "sliding_window": 4096,
         "rope_theta": 500000, "rope_scaling": {
             "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
             "original_max_position_embeddings": 8192, "rope_type": "yarn"}},
        {"head_dim": 128, "sliding_window": (4095, 0),
         "layer_types": ((SLIDING,) * 3 + (FULL,)) * 8,
         "rope": Rope("yarn", 500000, 8.0, 65536, 8192, attention_factor=1.2079441541679836,
                      beta_fast=32, beta_slow=1),
         "layer_ropes": ((SLIDING, Rope("default", 500000, None, 65536)),)}),
    "granite-3.1-8b": (
        {"model_type": "granite", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
         "max_position_embeddings": 131072, "num_hidden_layers": 40, "num_key_value_heads": 8,
         "rope_theta": 10000000.0},
        {"head_dim": 128, "softmax_scale": 1 / 128, "num_key_value_heads": 8}),
    "granite-4": (
        {"model_type": "granitemoehybrid", "attention_multiplier": 0.015625,
         "layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_d_state": 128,
         "position_embedding_type": "nope", "rope_theta": 10000},
        {"layer_types": (LINEAR, FULL), "rope": Rope("none"), "softmax_scale": 1 / 64}),
    "command-r": (
        {"model_type": "cohere", "model_max_length": 131072, "rope_theta": 8000000.0,
         "logit_scale": 0.0625, "use_qk_norm": False},
        {"head_dim": 128, "num_key_value_heads": 64, "max_position_embeddings": 8192,
         "rope": Rope("default", 8000000.0, None, 8192, interleaved=True)}),
    "command-r7b": (
        {"model_type": "cohere2", "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 32, "position_embedding_type": "rope_gptj",
         "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4},
        {"head_dim": 128, "sliding_window": (4095, 0),
         "layer_types": ((SLIDING,) * 3 + (FULL,)) * 8,
         "layers_without_rope": tuple(range(3, 32, 4)),
         "rope": Rope("default", 50000, None, 8192, interleaved=True)}),
    "smollm3-3b": (
        {"model_type": "smollm3", "max_position_embeddings": 65536, "max_window_layers": 28,
         "no_rope_layers": [1, 1, 1, 0] * 9, "rope_theta": 5000000.0, "use_sliding_window": False},
        {"head_dim": 128, "num_key_value_heads": 4, "layer_types": (FULL,) * 36,
         "layers_without_rope": tuple(range(3, 36, 4)), "sliding_window": None}),
    "vit-base": (
        {"model_type": "vit", "attention_probs_dropout_prob": 0.0, "image_size": 224},
        {"causal": False, "head_dim": 64, "num_key_value_heads": 12, "rope": Rope("none")}),
    "bert-base": (
        {"model_type": "bert", "attention_probs_dropout_prob": 0.1, "is_decoder": False,
         "position_embedding_type": "absolute"},
        {"causal": False, "head_dim": 64, "dropout_prob": 0.1, "rope": Rope("none")}),
}
