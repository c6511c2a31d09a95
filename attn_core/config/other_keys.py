# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of a model hub's config.json that do not affect the values of an attention."""

# They are kept in `extras` without a warning.
OTHER_KEYS = frozenset("""
    _name_or_path activation activation_sparsity_pattern add_cross_attention altup_active_idx
    altup_coef_clip altup_correct_scale altup_num_inputs
    apply_residual_connection_post_layernorm architectures attention_bias attention_k_eq_v
    attention_softmax_in_fp32 attn_config audio_config audio_soft_tokens_per_image
    audio_token_id auto_map bias block_size boa_token_id boi_token_id boi_token_index
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout d_ff
    decoder_sparse_step decoder_start_token_id dense_act_fn emb_pdrop embd_pdrop
    embedding_fraction embedding_multiplier enable_moe_block encoder_stride eoa_token_id
    eoa_token_index eoi_token_id eoi_token_index eos_token_id ep_size expansion_ratio
    experts_per_token feed_forward_proj ffn_hidden_size final_logit_softcapping finetuning_task
    first_k_dense_replace full_attn_alpha_factor full_attn_beta_factor gradient_checkpointing
    hidden_act hidden_activation hidden_dropout hidden_dropout_prob hidden_size_per_layer_input
    id2label image_size image_token_id image_token_index index_head_dim index_n_heads
    index_skip_topk_offset index_topk_freq index_topk_pattern indexer_types init_device
    initial_context_length initializer_factor initializer_range interleave_moe_layer_step
    intermediate_size intermediate_size_mlp is_decoder is_encoder_decoder is_gated_act label2id
    laurel_rank layer_norm_eps layer_norm_epsilon layer_switch layernorm_epsilon learned_pos_emb
    linear_attn_alpha_factor linear_attn_beta_factor linear_attn_config linear_conv_kernel_dim
    linear_head_dim linear_key_head_dim linear_num_heads linear_num_key_heads
    linear_num_value_heads linear_value_head_dim logit_scale logits_scaling mamba_chunk_size
    mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups
    mamba_n_heads mamba_proj_bias masked_softmax_fusion mlp_alpha_factor mlp_beta_factor
    mlp_bias mlp_layer_types mlp_only_layers mm_tokens_per_image model_max_length
    moe_intermediate_size moe_layer_freq moe_layers moe_renormalize multimodal_projector_bias
    n_group n_positions n_routed_experts n_shared_experts no_bias norm_topk_prob norm_type
    num_channels num_decoder_layers num_expert_group num_experts num_experts_per_tok
    num_experts_per_token num_kv_shared_layers num_local_experts num_mtp_layers
    num_nextn_predict_layers num_shared_experts offset_alibi order_of_interleaved_layers
    output_attentions output_hidden_states output_past output_router_logits pad_token_id
    parallel_attn patch_size pooler_act pooler_output_size pretraining_tp problem_type
    projection_hidden_size projection_layer_norm_eps projector_hidden_act q_lora_rank qkv_bias
    quantization_config resid_pdrop residual_multiplier return_dict rms_norm_eps
    routed_scaling_factor router_aux_loss_coef router_jitter_noise scale_decoder_outputs
    scoring_func seq_length shared_expert_intermediate_size shared_intermediate_size
    skip_bias_add skip_bias_add_qkv slow_but_exact spatial_merge_size swiglu_alpha swiglu_limit
    task_specific_params tie_word_embeddings time_step_limit tokenizer_class top_k_experts
    topk_group topk_method torch_dtype transformers_version type_vocab_size unk_token_id
    use_bidirectional_attention use_cache use_double_wide_mlp use_embedding_sharing
    use_gated_activation use_parallel_block use_parallel_embedding use_qk_norm verbose
    video_token_id vision_config vision_end_token_id vision_feature_layer
    vision_soft_tokens_per_image vision_start_token_id vision_token_id vocab_size
    vocab_size_per_layer_input
""".split())
