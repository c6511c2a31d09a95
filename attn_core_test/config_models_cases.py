# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small configurations of models of transformers, by model type."""

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
         "num_hidden_layers": 4, "max_position_embeddings": 64, "attention_dropout": 0.0}
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}
LENGTH = 23  # tokens; more than every window and chunk below

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16}

EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}
ROUTED = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1,
          "moe_intermediate_size": 16}
LATENT = {**{k: v for k, v in TEXT.items() if k != "head_dim"}, **ROUTED, "num_key_value_heads": 4,
          "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
          "v_head_dim": 12}
INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}  # heads enough for no ties
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
         "mrope_section": [2, 1, 1], "mrope_interleaved": True}
LAYERED_ROPE = {"full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}

# Model -> (configuration class, model class, arguments of the configuration).
MODELS = {
    "llama": ("LlamaConfig", "LlamaModel", {**TEXT, "rope_parameters": LLAMA3}),
    "llama4": ("Llama4TextConfig", "Llama4TextModel", {
        **TEXT, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 32,
        "rope_parameters": LLAMA3, "floor_scale": 4, "attn_scale": 0.3}),
    "mistral": ("MistralConfig", "MistralModel", {**TEXT, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", "MixtralModel", {**TEXT, "num_local_experts": 2}),
    "gemma2": ("Gemma2Config", "Gemma2Model", {
        **TEXT, "sliding_window": 8, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3TextModel", {
        **TEXT, "sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 5,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0,
                                               "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "qwen2": ("Qwen2Config", "Qwen2Model", {
        **TEXT, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeModel", {
        **TEXT, **EXPERTS, "sliding_window": 8, "use_sliding_window": True,
        "max_window_layers": 3}),
    "qwen2_vl": ("Qwen2VLTextConfig", "Qwen2VLTextModel", {
        **TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                    "mrope_section": [2, 3, 3]}}),
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", "Qwen2_5_VLTextModel", {
        **TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                    "mrope_section": [2, 3, 3]}}),
    "qwen3": ("Qwen3Config", "Qwen3Model", {**TEXT, "rope_parameters": {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeModel", {
        **TEXT, "sliding_window": 8, "use_sliding_window": True, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16}),
    "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextModel", {
        **TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                    "mrope_section": [4, 2, 2], "mrope_interleaved": True}}),
    "phi3": ("Phi3Config", "Phi3Model", {
        **TEXT, "sliding_window": 8, "original_max_position_embeddings": 16, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}}),
    "gpt_oss": ("GptOssConfig", "GptOssModel", {
        **TEXT, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {**YARN, "truncate": False}}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3Model", {
        **LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}),
    "ministral3": ("Ministral3Config", "Ministral3Model", {
        **TEXT, "sliding_window": 8, "rope_parameters": {
            **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}}),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nTextModel", {
        **TEXT, "sliding_window": 8, "num_hidden_layers": 7, "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8, "laurel_rank": 4}),
    "gemma4": ("Gemma4TextConfig", "Gemma4TextModel", {
        **TEXT, "sliding_window": 8, "num_hidden_layers": 8, "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8, "global_head_dim": 32,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextModel", {**TEXT, **EXPERTS, **LINEAR}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5TextModel", {
        **TEXT, **LINEAR, "rope_parameters": MROPE}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeTextModel", {
        **TEXT, **EXPERTS, **LINEAR, "rope_parameters": MROPE}),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32Model", {
        **LATENT, **INDEX, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaModel", {**LATENT, **INDEX}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteModel", LATENT),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearModel", {
        **LATENT, "num_hidden_layers": 5, "q_lora_rank": None, "num_local_experts": 2,
        "linear_num_heads": 2, "linear_head_dim": 8}),
    "glm": ("GlmConfig", "GlmModel", TEXT),
    "glm4": ("Glm4Config", "Glm4Model", TEXT),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeModel", {**TEXT, **ROUTED}),
    "minimax": ("MiniMaxConfig", "MiniMaxModel", {
        **TEXT, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8,
        "sliding_window": 8}),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2Model", {
        **TEXT, "num_local_experts": 2, "num_experts_per_tok": 1, "rotary_dim": 8}),
    "olmo2": ("Olmo2Config", "Olmo2Model", TEXT),
    "olmo3": ("Olmo3Config", "Olmo3Model", {
        **TEXT, "sliding_window": 8, "rope_parameters": LAYERED_ROPE}),
    "granite": ("GraniteConfig", "GraniteModel", {**TEXT, "attention_multiplier": 0.3}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridModel", {
        **TEXT, "layer_types": ["mamba", "attention"] * 2, "attention_multiplier": 0.3,
        "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16,
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8}),
    "cohere": ("CohereConfig", "CohereModel", TEXT),
    "cohere2": ("Cohere2Config", "Cohere2Model", {**TEXT, "sliding_window": 8}),
    "smollm3": ("SmolLM3Config", "SmolLM3Model", {
        **TEXT, "sliding_window": 8, "use_sliding_window": True}),
    "vit": ("ViTConfig", "ViTModel", {
        **{k: v for k, v in SIZES.items() if k not in ("attention_dropout",
                                                       "max_position_embeddings")},
        "image_size": 16, "patch_size": 4}),
    "bert": ("BertConfig", "BertModel", {
        **{k: v for k, v in SIZES.items() if k != "attention_dropout"}, "vocab_size": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}
