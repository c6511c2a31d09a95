# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, layer by layer, against this library with their config.json.

Needs torch and transformers (`pip install '.[parity]'`); skipped without them.
"""

import contextlib
import importlib
import json
import pathlib
import tempfile
from unittest import mock
import warnings

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from attn_core import (AttnConfig, attention, attention_arguments, from_dict, from_pretrained,
                       index_mask, layer_rope, query_temperature, rotary)
from attn_core.config.config import get_head_dim, get_key_value_heads, layer_type
from attn_core.config.models import MODELS as READ
from attn_core_test import optional_deps
from attn_core_test.config_models_cases import LENGTH, MODELS

# A module's rotation is the first of these that it has: an index has a rotation of its own.
ROTARY = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb", "apply_rotary_emb")
# Models whose tokens have three positions.
THREE_POSITIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")


class Recorder:
  """Records arguments and results of a model's own functions."""

  def __init__(self, module):
    self.module, self.rotations, self.layers = module, [], []
    self.projections = []  # queries by layer, as projected
    self.scores = []  # scores of an index by layer, to be filled by `record_scores`

  @contextlib.contextmanager
  def recording(self):
    """Replaces the module's functions by functions that also record."""
    with contextlib.ExitStack() as stack:
      for name in [name for name in ROTARY if hasattr(self.module, name)][:1]:
        stack.enter_context(mock.patch.object(self.module, name, self.rotary(name)))
      stack.enter_context(mock.patch.object(
          self.module, "eager_attention_forward", self.attention()))
      yield self

  def rotary(self, name):
    """Returns a rotation that records query and key before and after it, all as [B, T, H, D]."""
    theirs = getattr(self.module, name)
    swap = name != "apply_rotary_emb"
    def recorded(query, key, *args, **kwargs):
      turned = theirs(query, key, *args, **kwargs)
      if kwargs.get("unsqueeze_dim") == 2:
        if key.ndim == 3:  # a cosine: the call has one array [B, T, H, D]; else it is of an index
          arrays = [x.detach().numpy() for x in (query, query, turned, turned)]
          self.rotations.append((len(self.layers), arrays))
        return turned
      arrays = [x.detach().numpy() for x in (query, key, *turned)]
      arrays = [x.swapaxes(1, 2) if swap else x for x in arrays]
      # This function returns the first elements of all pairs, then the second ones.
      if name.endswith("interleave"):
        arrays[2:] = [np.stack(np.split(x, 2, -1), -1).reshape(x.shape) for x in arrays[2:]]
      self.rotations.append((len(self.layers), arrays))
      return turned
    return recorded

  def attention(self):
    """Returns an attention that records query, key, value, output and sinks of every layer."""
    theirs = self.module.eager_attention_forward
    def recorded(module, query, key, value, *args, **kwargs):
      output = theirs(module, query, key, value, *args, **kwargs)
      arrays = [x.detach().numpy().swapaxes(1, 2) for x in (query, key, value)]
      sinks = getattr(module, "sinks", None)
      self.layers.append((arrays, output[0].detach().numpy(),
                          None if sinks is None else sinks.detach().numpy()))
      return output
    return recorded


  @contextlib.contextmanager
  def record_scores(self, torch, model):
    """Records the scores of which the indices of a model take the highest."""
    theirs, last = torch.Tensor.topk, []
    def topk(scores, *args, **kwargs):
      last[:] = [scores]
      return theirs(scores, *args, **kwargs)
    for label, part in model.named_modules():
      if label.endswith("indexer"):
        part.register_forward_hook(
            lambda part, arrays, out: self.scores.append(last[0].numpy()))
    with mock.patch.object(torch.Tensor, "topk", topk):
      yield


class ModelsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.torch, self.transformers = optional_deps.torch_and_transformers(self)

  def run_model(self, name):
    """Returns (the recorder, the configuration read from the model's saved file, positions)."""
    config_class, model_class, sizes = MODELS[name]
    if not hasattr(self.transformers, config_class):
      self.skipTest(f"transformers {self.transformers.__version__} has no {config_class}")
    theirs = getattr(self.transformers, config_class)(**sizes, attn_implementation="eager")
    module = importlib.import_module(
        type(theirs).__module__.replace("configuration", "modeling"))
    self.torch.manual_seed(0)
    model = getattr(module, model_class)(theirs).eval()
    with self.torch.no_grad():
      for label, parameter in model.named_parameters():
        if parameter.ndim > 1 or label.endswith("sinks"):
          parameter.normal_(std=0.2)  # large enough for scales, caps and sinks to matter
    rng = np.random.default_rng(0)
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    inputs = {"input_ids": self.torch.tensor(rng.integers(3, 32, (2, LENGTH)))}
    if name == "vit":
      inputs = {"pixel_values": self.torch.tensor(rng.normal(size=(2, 3, 16, 16))).float()}
    elif name in THREE_POSITIONS:
      # Positions differ in height and width only: the mask follows the order of the sequence.
      positions = np.stack([np.tile(positions[0], (2, 1)), rng.integers(0, 30, (2, LENGTH)),
                            rng.integers(0, 30, (2, LENGTH))]).astype(np.int32)
      inputs["position_ids"] = self.torch.tensor(positions)
    with Recorder(module).recording() as recorded, self.torch.no_grad():
      for label, part in model.named_modules():
        if label.endswith("q_proj"):
          part.register_forward_hook(
              lambda part, arrays, out: recorded.projections.append(out.numpy()))
      with recorded.record_scores(self.torch, model):
        model(**inputs)
    with tempfile.TemporaryDirectory() as folder:
      theirs.save_pretrained(folder)
      config = from_pretrained(pathlib.Path(folder))
    return recorded, config, positions

  @parameterized.parameters(*MODELS)
  def test_every_layer(self, name):
    recorded, config, positions = self.run_model(name)
    layers = [layer for layer in range(config.num_hidden_layers)
              if layer_type(config, layer) != "linear_attention"]
    self.assertLen(recorded.layers, len(layers))
    turned = {layers[order]: arrays[2] for order, arrays in recorded.rotations}
    for order, layer in enumerate(layers):
      (query, key, value), theirs, sinks = recorded.layers[order]
      self.assertEqual((query.shape[2:], key.shape[2:]), (
          (config.num_attention_heads, get_head_dim(config, layer)),
          (get_key_value_heads(config, layer), get_head_dim(config, layer))))
      self.assertEqual(value.shape[3], config.value_head_dim or query.shape[3])
      self.assertEqual(sinks is not None, config.sinks)
      temperature = query_temperature(config, positions, layer)
      if temperature is not None:
        before = (turned[layer] if layer in turned
                  else recorded.projections[order].reshape(query.shape))
        np.testing.assert_allclose(before * temperature[..., None, None], query, atol=1e-5)
      arguments = attention_arguments(config, layer)
      mask = None
      if layer_type(config, layer) == "indexed_attention":
        mask = index_mask(config, jnp.asarray(recorded.scores[order]), layer)
        self.assertLess(mask.mean(), 0.4)
      mine = attention(*map(jnp.asarray, (query, key, value)), **arguments, mask=mask,
                       softmax_aux=None if sinks is None else jnp.asarray(sinks))
      np.testing.assert_allclose(mine.attention_outputs, theirs, atol=2e-5,
                                 err_msg=f"layer {layer}, {arguments}")
    self.assertEqual(set(turned), {layer for layer in layers
                                   if layer_rope(config, layer).rope_type != "none"})
    for order, (query, key, turned_query, turned_key) in recorded.rotations:
      layer = layers[order]
      mine = rotary(jnp.asarray(query), jnp.asarray(key), positions, layer_rope(config, layer))
      np.testing.assert_allclose(mine[0], turned_query, atol=1e-4, err_msg=f"layer {layer}")
      np.testing.assert_allclose(mine[1], turned_key, atol=1e-4, err_msg=f"layer {layer}")


class DefaultsTest(parameterized.TestCase):

  @parameterized.parameters(*sorted(READ))
  def test_a_file_without_values_has_the_published_defaults(self, model_type):
    """{"model_type": ...} means what a file with every key of the model's configuration means."""
    _, transformers = optional_deps.torch_and_transformers(self)
    if model_type not in transformers.CONFIG_MAPPING:
      self.skipTest(f"transformers has no {model_type}")  # files with this name are read as another
    theirs = transformers.CONFIG_MAPPING[model_type]()
    with warnings.catch_warnings():
      warnings.simplefilter("error")  # every key is known
      whole = from_dict(json.loads(json.dumps(theirs.to_dict())))
      bare = from_dict({"model_type": model_type})
    for name in set(AttnConfig._fields) - {"model_type", "head_dim", "extras"}:
      self.assertEqual(getattr(bare, name), getattr(whole, name), name)
    if whole.head_dim is not None:
      self.assertEqual(get_head_dim(bare), whole.head_dim)


if __name__ == "__main__":
  absltest.main()
