# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.json files of published models, read as an AttnConfig."""

import json
import warnings

from absl.testing import absltest, parameterized
import numpy as np

from attn_core import (AttnConfig, attention_arguments, extras_of, from_dict, get_mask_details,
                       layer_rope, query_temperature, to_dict)
from attn_core.config.config import get_head_dim
from attn_core.config.models import MODELS
from attn_core_test.config_published import PUBLISHED

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

# Fields that have their defaults where PUBLISHED has no value of them.
UNUSUAL = ("layer_ropes", "layers_without_rope", "layer_head_dims", "layer_key_value_heads",
           "chunk_size", "index_topk", "sinks", "logits_soft_cap", "temperature_tuning",
           "temperature_offset", "temperature_with_rope", "rope_head_dim", "value_head_dim")


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
    unlisted = {name: AttnConfig._field_defaults[name] for name in UNUSUAL}
    for field, value in {**unlisted, **meaning}.items():
      mine = get_head_dim(config) if field == "head_dim" else getattr(config, field)
      if field == "softmax_scale" and value is not None:
        self.assertAlmostEqual(mine, value, places=15)
      else:
        self.assertEqual(mine, value, field)
    self.assertEqual(from_dict(json.loads(json.dumps(to_dict(config)))), config)
    # The newer spelling of the same file: everything about rotary embedding in one dictionary.
    text = dict(data, **data.get("text_config", {}))
    defaults = MODELS[config.model_type].defaults
    if config.rope.rope_type == "none" or "rope_parameters" in {**text, **defaults}:
      return  # has only the newer spelling
    parameters = {**(text.get("rope_scaling") or {}), "rope_theta": config.rope.rope_theta}
    if config.layer_ropes:
      parameters = {FULL: parameters, SLIDING: {
          "rope_type": "default", "rope_theta": config.layer_ropes[0][1].rope_theta}}
    newer = {k: v for k, v in text.items() if not k.startswith("rope_") and k != "text_config"}
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
    self.assertEqual(from_dict({"model_type": "llama", "dtype": "auto"}).attn_dtype,
                     from_dict({"model_type": "llama"}).attn_dtype)
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

  def test_kept_values_are_of_any_type(self):
    kept = {"tie_word_embeddings": True, "torchscript": "no", "id2label": {"0": "a"}}
    with self.assertWarnsRegex(UserWarning, "torchscript"):
      config = from_dict({"model_type": "llama", **kept})
    self.assertEqual(extras_of(config), kept)

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
