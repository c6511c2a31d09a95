# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.json files of published models, read as an AttnConfig."""

import json
import warnings

from absl.testing import absltest, parameterized
import numpy as np

from attn_core import (AttnConfig, Rope, attention_arguments, extras_of, from_dict,
                       get_mask_details, layer_rope, query_temperature, to_dict)
from attn_core.config.config import get_head_dim

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
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
    "vit-base": (
        {"model_type": "vit", "attention_probs_dropout_prob": 0.0, "image_size": 224},
        {"causal": False, "head_dim": 64, "num_key_value_heads": 12, "rope": Rope("none")}),
    "bert-base": (
        {"model_type": "bert", "attention_probs_dropout_prob": 0.1, "is_decoder": False,
         "position_embedding_type": "absolute"},
        {"causal": False, "head_dim": 64, "dropout_prob": 0.1, "rope": Rope("none")}),
}


class ReadersTest(parameterized.TestCase):

  def test_deepseek_scales_the_softmax_only_with_a_longer_rope(self):
    given = {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
             "original_max_position_embeddings": 4096}
    scale = lambda kind: from_dict({"model_type": "deepseek_v3", "rope_scaling": {
        **given, "rope_type": kind}}).softmax_scale
    self.assertIsNone(scale("default"))
    self.assertAlmostEqual(scale("yarn"), 192**-0.5 * 1.3688879454113936**2)

  @parameterized.parameters(*PUBLISHED)
  def test_published(self, name):
    data, meaning = PUBLISHED[name]
    with warnings.catch_warnings():
      warnings.simplefilter("error")  # every key is known
      config = from_dict(data)
    for field, value in meaning.items():
      mine = get_head_dim(config) if field == "head_dim" else getattr(config, field)
      if field == "softmax_scale" and value is not None:
        self.assertAlmostEqual(mine, value, places=15)
      else:
        self.assertEqual(mine, value, field)
    self.assertEqual(from_dict(json.loads(json.dumps(to_dict(config)))), config)
    # The newer spelling of the same file: everything about rotary embedding in one dictionary.
    text = dict(data, **data.get("text_config", {}))
    parameters = {**(text.get("rope_scaling") or {}), "rope_theta": config.rope.rope_theta}
    if config.layer_ropes:
      parameters = {FULL: parameters, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}
    newer = {k: v for k, v in text.items() if not k.startswith("rope_") and k != "text_config"}
    if config.rope.rope_type != "none":
      newer["rope_parameters"] = parameters
    self.assertEqual(from_dict(newer), config)

  def test_layers(self):
    config = from_dict(PUBLISHED["gemma-3-4b"][0])
    details = get_mask_details(config)
    self.assertLen(details, 34)
    self.assertEqual(details[4].sliding_window, (1023, 0))
    self.assertEqual((details[4].size, details[5].size), (1024, None))
    self.assertEqual(layer_rope(config, 4).rope_theta, 10000.0)
    self.assertEqual(layer_rope(config, 5).factor, 8.0)
    self.assertEqual(attention_arguments(config, 5)["sliding_window"], None)
    llama = from_dict(PUBLISHED["llama-4-scout"][0])
    self.assertEqual([layer_rope(llama, i).rope_type for i in range(4)], ["llama3"] * 3 + ["none"])
    self.assertIsNone(get_mask_details(AttnConfig()))
    for layer in (-1, 34):
      with self.assertRaisesRegex(ValueError, f"layer: got {layer}"):
        attention_arguments(config, layer)

  def test_query_temperature(self):
    """The temperature of Llama 4 is 1 + 0.1 ln(1 + floor((p + 1) / 8192)) in every fourth layer."""
    data = PUBLISHED["llama-4-scout"][0]
    config, positions = from_dict(data), np.array([[-7, 0, 8190, 8191, 16383, 81919]])
    expected = 1 + 0.1 * np.log([[1, 1, 1, 2, 3, 11]])
    np.testing.assert_allclose(query_temperature(config, positions, 3), expected, rtol=1e-6)
    self.assertIsNone(query_temperature(config, positions, 2))
    for tuned, found in ((True, (0.1, 8192)), (None, None), (False, None)):
      text = {**data["text_config"], "attn_temperature_tuning": tuned}
      self.assertEqual(from_dict({"model_type": "llama4", "text_config": text}).temperature_tuning,
                       found)
    self.assertIsNone(query_temperature(config._replace(temperature_tuning=None), positions, 3))
    with self.assertRaisesRegex(ValueError, "positions: got float64.*expected int"):
      query_temperature(config, positions / 2, 3)

  def test_fields_of_other_models_are_reported(self):
    for kind, name in (("llama", "sliding_window"), ("gemma2", "attention_chunk_size"),
                       ("qwen2", "attn_logit_softcapping"), ("llama", "query_pre_attn_scalar"),
                       ("mistral", "qk_rope_head_dim"), ("qwen3", "rope_local_base_freq")):
      with self.assertWarnsRegex(UserWarning, name):
        config = from_dict({"model_type": kind, name: 64})
      self.assertEqual(extras_of(config), {name: 64})
      self.assertEqual(config._replace(extras=()), from_dict({"model_type": kind}))
    bare = from_dict({"model_type": "llama", "sliding_window": None})
    self.assertEqual((bare.extras, bare.sliding_window), ((), None))

  def test_a_decoder_is_causal(self):
    self.assertTrue(from_dict({"model_type": "bert", "is_decoder": True}).causal)

  def test_unknown_keys_are_kept_and_reported(self):
    data = {"model_type": "llama", "alibi_slopes": [1, 2], "vocab_size": 7, "rope_scaling": {
        "rope_type": "linear", "factor": 2.0, "wobble": 3}}
    with self.assertWarnsRegex(UserWarning, r"\['alibi_slopes', 'rope_scaling.wobble'\]"):
      config = from_dict(data)
    self.assertEqual(extras_of(config),
                     {"alibi_slopes": [1, 2], "vocab_size": 7, "rope_scaling.wobble": 3})

  @parameterized.parameters(
      ({"model_type": "rwkv"}, NotImplementedError, "'rwkv' has no reader.*gpt_oss"),
      ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, NotImplementedError,
       "use_bidirectional_attention"),
      ({"model_type": "bert", "position_embedding_type": "relative_key"}, ValueError,
       "position_embedding_type: got 'relative_key'"),
      ({"model_type": 3}, ValueError, "model_type: got 3"),
      ({"model_type": "llama", "num_attention_heads": "many"}, ValueError, "got 'many'"),
      ({"model_type": "llama", "rope_scaling": {"rope_type": "spiral"}}, ValueError, "'spiral'"),
      ({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default"}}, ValueError, "null, since rope_parameters"),
      ({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": [SLIDING],
        "use_sliding_window": False, "sliding_window": 8}, ValueError, "use_sliding_window"),
      ({"model_type": "gemma2", "num_hidden_layers": 1, "layer_types": [FULL],
        "sliding_window": 8}, ValueError, r"sliding_window: got \(7, 0\); expected None"),
      ({"model_type": "gemma2", "num_hidden_layers": 3, "layer_types": [FULL, SLIDING]},
       ValueError, "2 of them.*num_hidden_layers=3"),
      ({"model_type": "llama4", "attn_temperature_tuning": "on"}, ValueError,
       "attn_temperature_tuning: got 'on'; expected true or false"),
      ({"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": -1},
       ValueError, "max_window_layers: got -1; expected an int >= 0"),
      ({"model_type": "mistral", "sliding_window": 0}, ValueError, "sliding_window: got 0"),
      ({"model_type": "llama", "text_config": "llama"}, ValueError, "text_config: got 'llama'"),
      ({"model_type": "llama", "rope_scaling": "llama3"}, ValueError, "rope_scaling: got 'llama3'"),
      ({"model_type": "llama", "rope_scaling": [1]}, ValueError, r"rope_scaling: got \[1\]"),
      ({"model_type": "gemma3_text", "rope_parameters": {FULL: 3}}, ValueError,
       "rope_parameters.full_attention: got 3; expected a dictionary"),
      ({"model_type": "gpt_oss", "layer_types": FULL}, ValueError,
       "layer_types: got 'full_attention'; expected a list of 36 names"),
      ({"model_type": "gpt_oss", "layer_types": 3}, ValueError, "layer_types: got 3"),
      ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, ValueError,
       "sliding_window_pattern: got 0; expected an int >= 1"),
      ({"model_type": "gemma3_text", "sliding_window_pattern": None}, ValueError,
       "sliding_window_pattern: got None"),
      ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None}, ValueError,
       "max_window_layers: got None; expected an int >= 0"),
      ({"model_type": "qwen2", "use_sliding_window": "no"}, ValueError,
       "use_sliding_window: got 'no'; expected true or false"),
      ({"model_type": "bert", "is_decoder": "no"}, ValueError, "is_decoder: got 'no'"),
      ({"model_type": "llama4_text", "no_rope_layers": 4}, ValueError, "no_rope_layers: got 4"),
      ({"model_type": "llama4_text", "no_rope_layers": [1, 0]}, ValueError,
       r"no_rope_layers: got \[1, 0\]; expected 48 of 0 and 1"),
      ({"model_type": "llama4_text", "no_rope_layer_interval": 0}, ValueError,
       "no_rope_layer_interval: got 0"),
      ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, ValueError,
       "query_pre_attn_scalar: got 0; expected a finite number > 0"),
      ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, ValueError,
       "query_pre_attn_scalar: got -1"),
      ({"model_type": "deepseek_v3", "qk_nope_head_dim": "a"}, ValueError,
       "qk_nope_head_dim: got 'a'"),
  )
  def test_bad_files(self, data, error, message):
    with self.assertRaisesRegex(error, message):
      from_dict(data)


if __name__ == "__main__":
  absltest.main()
