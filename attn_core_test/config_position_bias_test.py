# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Biases by position of T5, MPT, BLOOM, Falcon and Swin: read from files, and against the models.

The models need torch and transformers (`pip install '.[parity]'`); skipped without them.
"""

import importlib
import json
import warnings
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from attn_core import (AttnConfig, attention, attention_arguments, from_dict, layer_score_mod,
                       masks, score_mods, to_dict)
from attn_core.config.validate import validated
from attn_core_test import optional_deps

LENGTH = 23
# H 6: slopes of 4, then every second one of 8.
SLOPES = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])

# name -> (file, fields).
FILES = {
    "t5-small": (
        {"model_type": "t5", "d_model": 512, "num_heads": 8, "num_layers": 6, "d_kv": 64,
         "d_ff": 2048, "dropout_rate": 0.1, "relative_attention_num_buckets": 32},
        dict(hidden_size=512, num_attention_heads=8, num_hidden_layers=6, head_dim=64,
             causal=False, softmax_scale=1.0, relative_buckets=(32, 128), dropout_prob=0.1)),
    "t5-decoder": (
        {"model_type": "t5", "is_decoder": True, "relative_attention_max_distance": 64},
        dict(causal=True, relative_buckets=(32, 64))),
    "mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048,
         "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_pdrop": 0, "clip_qkv": None,
                         "softmax_scale": None}},
        dict(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, alibi_bias_max=8,
             max_position_embeddings=2048, softmax_scale=None, alibi_scaled=False)),
    "mpt-30b-scaled": (
        {"model_type": "mpt", "attn_config": {"alibi_bias_max": 4, "softmax_scale": 0.1,
                                              "attn_pdrop": 0.2}},
        dict(alibi_bias_max=4, softmax_scale=0.1, dropout_prob=0.2)),
    "mpt-learned": (
        {"model_type": "mpt", "attn_config": {"alibi": False}}, dict(alibi_bias_max=None)),
    "bloom": (
        {"model_type": "bloom", "n_embed": 14336, "num_attention_heads": 112, "n_layer": 70},
        dict(hidden_size=14336, num_attention_heads=112, num_hidden_layers=70, alibi_bias_max=8,
             alibi_scaled=False, causal=True)),
    "falcon-rw-1b": (
        {"model_type": "falcon", "alibi": True, "multi_query": False, "hidden_size": 2048,
         "num_attention_heads": 32, "num_hidden_layers": 24},
        dict(alibi_bias_max=8, alibi_scaled=True, num_key_value_heads=32)),
    "falcon-7b": (
        {"model_type": "falcon", "alibi": False, "multi_query": True, "num_kv_heads": 71},
        dict(alibi_bias_max=None, alibi_scaled=False, num_key_value_heads=1)),
    "falcon-40b": (
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8,
         "num_attention_heads": 128, "hidden_size": 8192, "num_hidden_layers": 60},
        dict(num_key_value_heads=8, alibi_bias_max=None)),
}


class FilesTest(parameterized.TestCase):

  @parameterized.parameters(*FILES)
  def test_fields(self, name):
    data, fields = FILES[name]
    with warnings.catch_warnings():
      warnings.simplefilter("error")  # every key is known
      config = from_dict(data)
    for field, value in fields.items():
      self.assertEqual(getattr(config, field), value, field)
    self.assertEqual(config.rope.rope_type != "none",
                     data["model_type"] == "falcon" and not data.get("alibi"))
    self.assertEqual(from_dict(json.loads(json.dumps(to_dict(config)))), config)

  def test_slopes(self):
    mod = layer_score_mod(AttnConfig(num_attention_heads=6, alibi_bias_max=8))
    np.testing.assert_array_equal(mod.slopes, SLOPES.astype(np.float32))
    half = layer_score_mod(AttnConfig(num_attention_heads=6, alibi_bias_max=4, causal=False))
    np.testing.assert_allclose(half.slopes, SLOPES**0.5, rtol=1e-7)
    self.assertEqual((mod.symmetric, half.symmetric), (False, True))
    scaled = AttnConfig(num_attention_heads=6, alibi_bias_max=8, alibi_scaled=True, head_dim=4)
    np.testing.assert_array_equal(layer_score_mod(scaled).slopes, SLOPES.astype(np.float32) / 2)
    np.testing.assert_allclose(layer_score_mod(scaled._replace(softmax_scale=3.0)).slopes,
                               SLOPES * 3, rtol=1e-7)

  def test_arguments_have_the_biases_without_parameters(self):
    config = from_dict(FILES["bloom"][0])
    self.assertEqual(attention_arguments(config, 69)["score_mod"], layer_score_mod(config))
    for name in ("t5-small", "falcon-7b"):
      self.assertNotIn("score_mod", attention_arguments(from_dict(FILES[name][0])))

  def test_relative(self):
    table = np.arange(32 * 8, dtype=np.float32).reshape(32, 8)
    for name, both in (("t5-small", True), ("t5-decoder", False)):
      config = from_dict(FILES[name][0])
      self.assertEqual(layer_score_mod(config, table), score_mods.relative(
          table, max_distance=128 if both else 64, bidirectional=both))

  @parameterized.named_parameters(
      ("missing", "t5-small", None, "table: got None; expected float .32, 8., the learned biases"),
      ("buckets", "t5-small", np.zeros((31, 8)), r"table: got float64\[31, 8\]; expected float"),
      ("heads", "t5-small", np.zeros((32, 7)), r"table: got float64\[32, 7\]; expected float"),
      ("extra", "bloom", np.zeros((32, 8)), "table: got .*; expected None without relative_b"))
  def test_bad_tables(self, name, table, message):
    with self.assertRaisesRegex(ValueError, message):
      layer_score_mod(from_dict(FILES[name][0]), table)

  @parameterized.parameters(
      (dict(alibi_bias_max=0), "alibi_bias_max: got 0; expected a finite number > 0, or None"),
      (dict(alibi_bias_max="8"), "alibi_bias_max: got '8'"),
      (dict(alibi_scaled=1), "alibi_scaled: got 1; expected True or False"),
      (dict(relative_buckets=32), "relative_buckets: got 32; expected .number of buckets"),
      (dict(relative_buckets=(32, 0)), "relative_buckets: got 0; expected ints >= 1"),
      (dict(relative_buckets=(32, 8), alibi_bias_max=8.0),
       "alibi_bias_max: got 8.0; expected None with relative_buckets"))
  def test_bad_fields(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      validated(AttnConfig(**given))

  def test_alibi_needs_heads(self):
    with self.assertRaisesRegex(ValueError, "num_attention_heads: got None; expected H"):
      layer_score_mod(AttnConfig(alibi_bias_max=8))
    with self.assertRaisesRegex(ValueError, "layer: got 3"):
      layer_score_mod(AttnConfig(num_hidden_layers=3), layer=3)

  @parameterized.parameters({"prefix_lm": True}, {"attn_type": "multiquery_attention"})
  def test_mpt_that_its_code_does_not_compute(self, **part):
    with self.assertRaisesRegex(NotImplementedError, "only causal multihead_attention"):
      from_dict({"model_type": "mpt", "attn_config": part})


# name -> (configuration class, model class, sizes, attention modules, fused projection, output).
FUSED = {
    "mpt": ("MptConfig", "MptModel", dict(
        d_model=48, n_heads=6, n_layers=2, max_seq_len=64, vocab_size=32), "attn", "Wqkv",
            "out_proj"),
    "mpt_scaled": ("MptConfig", "MptModel", dict(
        d_model=48, n_heads=6, n_layers=2, max_seq_len=64, vocab_size=32,
        attn_config={"softmax_scale": 0.5}), "attn", "Wqkv", "out_proj"),
    "bloom": ("BloomConfig", "BloomModel", dict(
        hidden_size=48, n_head=6, n_layer=2, vocab_size=32), "self_attention", "query_key_value",
              "dense"),
    "falcon": ("FalconConfig", "FalconModel", dict(
        hidden_size=48, num_attention_heads=6, num_hidden_layers=2, vocab_size=32, alibi=True,
        multi_query=False), "self_attention", "query_key_value", "dense"),
    "falcon_shared": ("FalconConfig", "FalconModel", dict(
        hidden_size=48, num_attention_heads=6, num_hidden_layers=2, vocab_size=32, alibi=True,
        multi_query=True), "self_attention", "query_key_value", "dense"),
}


def split(name, fused, heads, key_heads):
  """Returns query, key and value [B, T, H or K, D] of a model's fused projection."""
  batch, length, _ = fused.shape
  if name.startswith("mpt"):
    return [x.reshape(batch, length, heads, -1) for x in np.split(fused, 3, -1)]
  if key_heads == 1:
    parts = fused.reshape(batch, length, heads + 2, -1)
    return parts[:, :, :-2], parts[:, :, -2:-1], parts[:, :, -1:]
  parts = fused.reshape(batch, length, heads, 3, -1)
  return [parts[..., n, :] for n in range(3)]


class ModelsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.torch, self.transformers = optional_deps.torch_and_transformers(self)

  def make(self, config_class, model_class, sizes):
    """Returns (module, model with large weights, its configuration read from its file)."""
    # Falcon's other implementation, "eager", adds its biases twice (transformers 5.24).
    theirs = getattr(self.transformers, config_class)(
        **sizes, attn_implementation="sdpa" if "Falcon" in config_class else "eager")
    module = importlib.import_module(type(theirs).__module__.replace("configuration", "modeling"))
    self.torch.manual_seed(0)
    model = getattr(module, model_class)(theirs).eval()
    with self.torch.no_grad():
      for parameter in model.parameters():
        if parameter.ndim > 1:
          parameter.normal_(std=0.3)
    return module, model, json.loads(json.dumps(theirs.to_dict()))

  def ids(self):
    return self.torch.tensor(np.random.default_rng(0).integers(3, 32, (2, LENGTH)))

  def recorded(self, module, run):
    """Returns (module, query, key, value, mask, output) of all attentions, [B, T, H, D]."""
    theirs, found = module.eager_attention_forward, []
    def record(part, query, key, value, mask, *args, **kwargs):
      output = theirs(part, query, key, value, mask, *args, **kwargs)
      arrays = [x.detach().numpy().swapaxes(1, 2) for x in (query, key, value)]
      found.append((part, *arrays, mask, output[0].detach().numpy()))
      return output
    with mock.patch.object(module, "eager_attention_forward", record), self.torch.no_grad():
      run()
    return found

  @parameterized.parameters(*FUSED)
  def test_alibi(self, name):
    *made, attention_name, projection, output = FUSED[name]
    _, model, data = self.make(*made)
    config = from_dict(data)
    fused, contexts = [], []
    for label, part in model.named_modules():
      if label.endswith(f"{attention_name}.{projection}"):
        part.register_forward_hook(lambda part, args, out: fused.append(out.detach().numpy()))
      if label.endswith(f"{attention_name}.{output}"):
        part.register_forward_pre_hook(lambda part, args: contexts.append(
            args[0].detach().numpy()))
    with self.torch.no_grad():
      model(self.ids())
    self.assertLen(contexts, config.num_hidden_layers)
    for layer, (x, theirs) in enumerate(zip(fused, contexts, strict=True)):
      arrays = map(jnp.asarray, split(name, x, 6, config.num_key_value_heads))
      mine = attention(*arrays, **attention_arguments(config, layer)).attention_outputs
      np.testing.assert_allclose(mine.reshape(theirs.shape), theirs, atol=2e-5, err_msg=str(layer))

  def test_t5(self):
    module, model, data = self.make("T5Config", "T5Model", dict(
        d_model=32, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=3, num_heads=4,
        vocab_size=32, relative_attention_num_buckets=8, relative_attention_max_distance=12))
    if not hasattr(module, "eager_attention_forward"):
      self.skipTest(f"transformers {self.transformers.__version__}: T5 has no attention function")
    found = self.recorded(module, lambda: model(
        input_ids=self.ids(), decoder_input_ids=self.ids()[:, :17]))
    stacks = {"encoder": (model.encoder, False), "decoder": (model.decoder, True)}
    kinds = {}
    for stack, (part, is_decoder) in stacks.items():
      table = part.block[0].layer[0].SelfAttention.relative_attention_bias.weight.detach().numpy()
      for layer, block in enumerate(part.block):
        kinds[block.layer[0].SelfAttention] = (is_decoder, layer, table)
        if is_decoder:
          kinds[block.layer[1].EncDecAttention] = (False, layer, None)
    self.assertLen(found, 2 + 2 * 3)
    for part, query, key, value, _, theirs in found:
      is_decoder, layer, table = kinds.pop(part)
      config = from_dict({**data, "is_decoder": is_decoder})._replace(num_hidden_layers=3)
      arguments = attention_arguments(config, layer)
      if table is not None:
        arguments["score_mod"] = layer_score_mod(config, table, layer)
      mine = attention(*map(jnp.asarray, (query, key, value)),
                       **{**arguments, "dropout_prob": 0.0}).attention_outputs
      np.testing.assert_allclose(mine, theirs, atol=2e-5, err_msg=str((is_decoder, layer)))
    self.assertEmpty(kinds)

  def test_swin(self):
    size = 4
    module, model, _ = self.make("SwinConfig", "SwinModel", dict(
        image_size=32, patch_size=4, embed_dim=24, depths=[2], num_heads=[3], window_size=size))
    if not hasattr(module, "eager_attention_forward"):
      self.skipTest(f"transformers {self.transformers.__version__}: Swin has no such function")
    pixels = self.torch.tensor(np.random.default_rng(0).normal(size=(2, 3, 32, 32))).float()
    found = self.recorded(module, lambda: model(pixel_values=pixels))
    self.assertLen(found, 2)
    shifted = 0
    for part, query, key, value, mask, theirs in found:
      bias = part.relative_position_bias
      table = bias.relative_position_bias_table.detach().numpy()
      hidden = (mask - bias()).detach().numpy() < -50  # between regions of a shifted window
      shifted += hidden.any()
      mine = attention(*map(jnp.asarray, (query, key, value)), causal=False,
                       mask=masks.dense(~hidden), score_mod=score_mods.grid(table, (size, size)))
      np.testing.assert_allclose(mine.attention_outputs, theirs, atol=2e-5)
    self.assertEqual(shifted, 1)


if __name__ == "__main__":
  absltest.main()
