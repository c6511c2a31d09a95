# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers that differ in more than their mask: heads, indices, temperatures, and linear layers."""

from absl.testing import absltest, parameterized
import jax
from jax.sharding import NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from attn_core import (AttnConfig, Rope, attention, attention_arguments, extras_of, from_dict,
                       get_basic_frequencies, get_basic_inv_frequencies, get_mask_details,
                       index_mask, layer_rope, query_temperature, to_dict)
from attn_core.config.config import get_head_dim, get_key_value_heads
from attn_core.config.layers import mask_detail
from attn_core.config.validate import validated

jax.config.update("jax_num_cpu_devices", 8)

FULL, SLIDING, INDEXED, LINEAR = (f"{kind}_attention"
                                  for kind in ("full", "sliding", "indexed", "linear"))


def gemma4(**data):
  return {"model_type": "gemma4_text", "num_hidden_layers": 7, **data}


class HeadsTest(parameterized.TestCase):

  def test_by_layer(self):
    config = from_dict(gemma4(
        global_head_dim=64, num_global_key_value_heads=2, attention_k_eq_v=True))
    self.assertEqual([get_head_dim(config, i) for i in range(7)], [256] * 5 + [64] * 2)
    self.assertEqual([get_key_value_heads(config, i) for i in range(7)], [4] * 5 + [2] * 2)
    self.assertEqual((get_head_dim(config), get_key_value_heads(config)), (64, 2))
    self.assertEqual(from_dict(to_dict(config)), config)
    per_layer = {str(i): {"head_dim": 64, "num_key_value_heads": 2} for i in (5, 6)}
    newer = from_dict(gemma4(attention_k_eq_v=True, per_layer_config=per_layer))
    self.assertEqual(newer._replace(extras=()), config)
    alone = from_dict(gemma4(num_global_key_value_heads=2))  # without attention_k_eq_v: not used
    self.assertEqual(alone.layer_key_value_heads, ())

  def test_alike(self):
    config = AttnConfig(num_attention_heads=8, hidden_size=64, num_hidden_layers=2)
    self.assertEqual((get_head_dim(config, 1), get_key_value_heads(config, 1)), (8, 8))
    for function in (get_head_dim, get_key_value_heads):
      with self.assertRaisesRegex(ValueError, "layer: got 2; expected a number from 0 to 2 - 1"):
        function(config, 2)
    with self.assertRaisesRegex(ValueError, "num_key_value_heads: got None with num_attention_h"):
      get_key_value_heads(AttnConfig())

  @parameterized.parameters(
      ({"layer_head_dims": ((FULL, 0),)}, "layer_head_dims: got 0; expected numbers that are ints"),
      ({"layer_head_dims": 64}, "layer_head_dims: got 64; expected pairs .layer type, number."),
      ({"layer_key_value_heads": (("dense", 2),)}, "layer_key_value_heads: got .*expected pairs"),
      ({"layer_key_value_heads": ((FULL, 3),), "num_attention_heads": 8},
       "layer_key_value_heads: got 3; expected a divisor of num_attention_heads=8"),
      ({"temperature_offset": -1}, "temperature_offset: got -1; expected an int >= 0"),
      ({"temperature_with_rope": 1}, "temperature_with_rope: got 1; expected True or False"),
      ({"index_topk": 0}, "index_topk: got 0; expected an int >= 1"),
      ({"layer_types": (INDEXED,)}, "index_topk: got None; expected a value, since 1 of 1"),
      ({"layer_types": (FULL,), "index_topk": 8}, "index_topk: got 8; expected None, since 0 of 1"),
  )
  def test_bad_values(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      validated(AttnConfig(**given))


class RopeTest(absltest.TestCase):

  def test_proportional_frequencies_span_the_head(self):
    config = from_dict(gemma4(global_head_dim=16))
    self.assertEqual(np.count_nonzero(get_basic_inv_frequencies(config)), 2)
    self.assertEqual(get_basic_inv_frequencies(config).shape, (8,))
    for function in (get_basic_inv_frequencies, get_basic_frequencies):
      with self.assertRaisesRegex(ValueError, "rotary_dim: got 8; expected None, since rope_type="):
        function(config, rotary_dim=8)


class LinearTest(absltest.TestCase):

  def test_is_marked_and_refused_by_name(self):
    config = from_dict({"model_type": "qwen3_next", "num_hidden_layers": 4})
    self.assertEqual(config.layer_types, (LINEAR,) * 3 + (FULL,))
    self.assertEqual(list(get_mask_details(config)), [3])
    for function in (attention_arguments, mask_detail):
      with self.assertRaisesRegex(NotImplementedError, "layer=1 of model_type='qwen3_next' is of "
                                  r"type 'linear_attention'.*other types are \[3\]"):
        function(config, 1)
    self.assertEqual(layer_rope(config, 1), Rope("none"))
    self.assertEqual(layer_rope(config, 3).partial_rotary_factor, 0.25)
    self.assertEqual(attention_arguments(config, 3)["causal"], True)
    scaled = config._replace(temperature_tuning=(1.0, 2), temperature_with_rope=True)
    self.assertIsNone(query_temperature(scaled, np.array([[5]]), 1))

  def test_older_names(self):
    data = {"model_type": "granitemoehybrid", "num_hidden_layers": 2,
            "layers_block_type": ["mamba", "attention"]}
    config = from_dict(data)
    self.assertEqual((config.layer_types, layer_rope(config, 1)), ((LINEAR, FULL), Rope("none")))
    config = from_dict({**data, "position_embedding_type": "rope", "rope_theta": 5e4})
    self.assertEqual(layer_rope(config, 1).rope_theta, 5e4)

  def test_a_window_in_softmax_layers(self):
    config = from_dict({"model_type": "minimax", "num_hidden_layers": 3, "sliding_window": 8,
                        "layer_types": [FULL, LINEAR, FULL]})
    self.assertEqual(attention_arguments(config, 2)["sliding_window"], (7, 0))
    self.assertEqual(from_dict({"model_type": "minimax", "num_hidden_layers": 3}).layer_types,
                     (FULL, LINEAR, FULL))

  def test_no_rope_without_window(self):
    config = from_dict({"model_type": "cohere2", "num_hidden_layers": 4})
    self.assertEqual([layer_rope(config, i).rope_type for i in range(4)],
                     ["default"] * 3 + ["none"])
    config = from_dict({"model_type": "smollm3", "num_hidden_layers": 4, "sliding_window": 8,
                        "use_sliding_window": True})
    self.assertEqual(config.layer_types, (FULL,) * 3 + (SLIDING,))
    self.assertEqual(config.layers_without_rope, (3,))


class IndexTest(absltest.TestCase):

  def test_selects_the_highest_scores(self):
    config = AttnConfig(layer_types=(FULL, INDEXED), index_topk=3)
    scores = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)
    mask = jax.jit(lambda x: index_mask(config, x, 1))(scores)
    self.assertEqual((mask.shape, mask.dtype), ((2, 1, 5, 7), bool))
    expected = scores >= np.sort(scores, -1)[..., -3:-2]
    np.testing.assert_array_equal(mask[:, 0], expected)
    ties = index_mask(config, np.zeros((1, 1, 7), np.float32), 1)
    np.testing.assert_array_equal(ties[0, 0, 0], np.arange(7) < 3)
    few = np.where(np.arange(7) < 2, scores, -np.inf)  # a query that sees fewer keys than selected
    np.testing.assert_array_equal(index_mask(config, few, 1).sum(-1), 3)
    self.assertIsNone(index_mask(config, scores, 0))
    self.assertIsNone(index_mask(config, scores[..., :3], 1))
    with self.assertRaisesRegex(ValueError, "scores: got .*expected"):
      index_mask(config, scores[0], 1)

  def test_is_sharded_as_the_scores(self):
    mesh = jax.make_mesh((4, 2), ("data", "model"))  # its axes are Explicit
    scores = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    config = AttnConfig(index_topk=3)
    with jax.set_mesh(mesh):
      sharded = jax.device_put(scores, NamedSharding(mesh, PartitionSpec("data", "model")))
      mask = index_mask(config, sharded)
      self.assertEqual(jax.typeof(mask).sharding.spec,
                       PartitionSpec("data", None, "model", None))
    np.testing.assert_array_equal(mask, index_mask(config, scores))

  def test_masks_attention(self):
    config = AttnConfig(index_topk=2, num_hidden_layers=1)
    self.assertEqual(mask_detail(config).mask_type, INDEXED)
    scores = np.where(np.tri(6), np.arange(6.0), -np.inf)[None].astype(np.float32)
    key = jnp.eye(6)[None, :, None]  # the value of key i is the i-th unit vector
    output = attention(jnp.zeros_like(key), key, key, mask=index_mask(config, scores),
                       **attention_arguments(config)).attention_outputs
    t, s = np.mgrid[:6, :6]
    np.testing.assert_array_equal(output[0, :, 0] > 0, (s <= t) & (t - s <= 1))


class TemperatureTest(absltest.TestCase):

  def test_of_all_layers(self):
    """Ministral 3: 1 + 0.1 ln(1 + floor(p / 16384)) in every layer."""
    config = from_dict({"model_type": "ministral3", "num_hidden_layers": 2})
    positions = np.array([[-3, 0, 16383, 16384, 50000]])
    for layer in range(2):
      np.testing.assert_allclose(query_temperature(config, positions, layer),
                                 1 + 0.1 * np.log([[1, 1, 1, 2, 4]]), rtol=1e-6)
    data = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5}
    config = from_dict({"model_type": "ministral3", "rope_scaling": data})
    self.assertEqual((config.temperature_tuning, config.rope.factor, extras_of(config)),
                     ((0.5, 8), 4.0, {}))
    plain = from_dict({"model_type": "ministral3", "rope_parameters": {"rope_theta": 1e6}})
    self.assertIsNone(query_temperature(plain, positions))


class FilesTest(parameterized.TestCase):

  @parameterized.parameters(
      (gemma4(per_layer_config={"5": {"head_dim": 64}}), ValueError,
       r"per_layer_config: got .*for each of the layers \[5, 6\]"),
      (gemma4(per_layer_config={"5": {"head_dim": 64}, "6": {"head_dim": 32}}), ValueError,
       "per_layer_config: got .*the same head_dim"),
      (gemma4(per_layer_config={"5": {"bias": 1}, "6": {"bias": 1}}), ValueError,
       "per_layer_config: got"),
      (gemma4(per_layer_config={"a": {}}), ValueError, "per_layer_config: got"),
      (gemma4(per_layer_config=3), ValueError, "per_layer_config: got 3; expected a dictionary"),
      (gemma4(use_bidirectional_attention="all"), NotImplementedError, "use_bidirectional"),
      ({"model_type": "granite", "attention_multiplier": 0}, ValueError,
       "attention_multiplier: got 0; expected a finite number > 0"),
      ({"model_type": "granitemoehybrid", "position_embedding_type": "alibi"}, ValueError,
       "position_embedding_type: got 'alibi'"),
      ({"model_type": "kimi_linear", "linear_attn_config": 3}, ValueError,
       "linear_attn_config: got 3; expected a dictionary"),
      ({"model_type": "kimi_linear", "num_hidden_layers": 3, "linear_attn_config": {
          "full_attn_layers": [3], "kda_layers": [0, 1]}}, ValueError,
       "linear_attn_config: got .*each number from 1 to 3 once"),
      ({"model_type": "kimi_linear", "mla_use_nope": False}, NotImplementedError, "mla_use_nope"),
      ({"model_type": "minimax_m2", "rotary_dim": 0}, ValueError, "rotary_dim: got 0"),
      ({"model_type": "qwen3_next", "full_attention_interval": 0}, ValueError,
       "full_attention_interval: got 0"),
      ({"model_type": "deepseek_v32", "index_topk": None}, ValueError, "index_topk: got None"),
      ({"model_type": "glm5_next"}, NotImplementedError, "'glm5_next' has no reader.*glm_moe_dsa"),
  )
  def test_bad_files(self, data, error, message):
    with self.assertRaisesRegex(error, message):
      from_dict(data)


if __name__ == "__main__":
  absltest.main()
