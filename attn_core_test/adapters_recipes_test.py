# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/adapters.md: its programs run, those for MaxText and axlearn on objects of their shapes."""

import enum
import inspect
import os
import pathlib
import re
import sys
import types
from unittest import mock

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once, when it is imported

# pylint: disable=wrong-import-position
from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from attn_core import adapters, create_mesh, masks
from attn_core_test import optional_deps

jax.config.update("jax_num_cpu_devices", 4)

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
PAGE = pathlib.Path(os.path.abspath(__file__)).parent.parent / "docs" / "adapters.md"
BLOCK = re.compile(r"^```python ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

B, T, H, K, D = 2, 8, 4, 2, 8

# Parameters of `AttentionOp.apply_attention` as read in maxtext 0.2.5, after self.
MAXTEXT = ("query", "key", "value", "decoder_segment_ids", "segment_positions", "lengths",
           "model_mode", "use_ragged_attention", "previous_chunk", "bidirectional_mask", "sinks",
           "indexer_mask", "compressed_mask", "record_max_logits", "decoder_segment_ids_kv",
           "pad_kv_total", "compress_ratio")
MAXTEXT_KEYWORDS = ("qk_product_einsum", "wv_product_einsum")

# Entries of `input_batch`, as read in axlearn at 34aed43.
AXLEARN = ("query", "key", "value", "page_tables", "bias", "logit_sink")


def blocks() -> dict[str, str]:
  """Returns {library: program} of the page; "" is the one that needs none."""
  return dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def operands():
  keys = jax.random.split(jax.random.key(0), 3)
  return [jax.random.normal(key, (B, T, heads, D)) for key, heads in zip(keys, (H, K, K))]


def run(name: str, modules: dict[str, types.ModuleType] | None = None) -> dict:
  """Runs a program of the page, with other modules in place of those that it imports."""
  names = {"jnp": jnp}
  with mock.patch.dict(sys.modules, modules or {}):
    exec(blocks()[name], names)  # pylint: disable=exec-used
  return names


def module(name: str, **contents) -> types.ModuleType:
  made = types.ModuleType(name)
  made.__dict__.update(contents)
  return made


class PageTest(parameterized.TestCase):

  @parameterized.parameters("", "flax", "equinox", "keras")
  def test_program(self, name):
    if name:
      optional_deps.module(self, "flax.nnx" if name == "flax" else name, "adapters")
    out = run(name)["out"]
    self.assertEqual(out.shape, (2, 16, 32) if name else (2, 16, 4, 8))
    self.assertTrue(np.isfinite(out).all())

  def test_every_adapter_is_listed(self):
    text = PAGE.read_text(encoding="utf-8")
    for name in adapters.__all__:
      self.assertIn(f"`{name}`", text)


class Kind(enum.Enum):
  GLOBAL = "global"
  LOCAL_SLIDING = "local_sliding"
  CHUNK = "chunk"
  FULL = "full"
  MLA = "mla"


class FakeAttentionOp:
  """The part of MaxText's AttentionOp that the recipe reads."""

  def __init__(self, kind):
    self.attention_type = kind
    self.mesh = create_mesh((2, 1, 1, 2, 1))
    self.flash_axis_names_q = ("activation_batch_attn", "heads", "length", "kv")
    self.sliding_window_size, self.chunk_attn_window_size = 3, 4
    self.attn_logits_soft_cap = 0.0
    self.devices = 1

  def _logical_to_mesh_axes(self, names):
    assert names == self.flash_axis_names_q
    return PartitionSpec("dp", "tp", None, None)

  def _context_parallel_size(self):
    return self.devices

  def apply_attention(self, *args, **products):
    return args, products


class MaxTextTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    attention_op = module("maxtext.layers.attention_op", AttentionOp=FakeAttentionOp)
    self.attentions = module("maxtext.layers.attentions", AttentionOp=FakeAttentionOp)
    layers = module("maxtext.layers", attention_op=attention_op, attentions=self.attentions)
    self.made = run("maxtext", {"maxtext": module("maxtext", layers=layers),
                                "maxtext.layers": layers})["AttnCoreOp"]
    self.products = {name: jnp.einsum for name in MAXTEXT_KEYWORDS}

  def test_parameters_are_those_of_maxtext(self):
    parameters = list(inspect.signature(self.made.apply_attention).parameters.values())[1:]
    self.assertEqual(tuple(p.name for p in parameters[:-1]), MAXTEXT)
    self.assertEqual(parameters[-1].kind, inspect.Parameter.VAR_KEYWORD)
    self.assertIs(self.attentions.AttentionOp, self.made)

  @parameterized.parameters(
      (Kind.GLOBAL, masks.causal()), (Kind.LOCAL_SLIDING, masks.window(2, 0)),
      (Kind.CHUNK, masks.causal() & masks.chunk(4)), (Kind.FULL, masks.full()))
  def test_training(self, kind, mask):
    ids = jnp.array([[1] * 5 + [2] * 3, [1] * 8])
    arrays = operands()
    out, largest, total = jax.jit(lambda *x: self.made(kind).apply_attention(
        *x, ids, None, None, "train", **self.products))(*arrays)
    self.assertIsNone(largest or total)
    expected = adapters.dot_product_attention(
        *arrays, mask=mask & masks.segments(ids), scale=1.0)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    self.assertEqual(out.sharding.shard_shape(out.shape), (1, T, H // 2, D))

  def test_everything_else_is_left_to_maxtext(self):
    rest = list(range(len(MAXTEXT)))
    for name, value in (("model_mode", "autoregressive"), ("bidirectional_mask", 1),
                        ("record_max_logits", True)):
      given = {**dict.fromkeys(MAXTEXT), "model_mode": "train", "record_max_logits": False,
               name: value}
      args, products = self.made(Kind.GLOBAL).apply_attention(**given, **self.products)
      self.assertEqual(dict(zip(MAXTEXT, args)), given)
      self.assertEqual(products, self.products)
    rest[MAXTEXT.index("model_mode")] = "train"
    self.assertEqual(self.made(Kind.MLA).apply_attention(*rest)[0], tuple(rest))
    sharded = self.made(Kind.GLOBAL)
    sharded.devices = 2
    self.assertLen(sharded.apply_attention(*rest)[0], len(MAXTEXT))


class FakeBias:
  """A bias of axlearn without a value."""

  def __init__(self, value=None, **fields):
    self._value = value
    self.__dict__.update(fields)

  def has_value(self):
    return bool(set(self.__dict__) - {"_value"}) or self._value is not None

  def value(self):
    return self._value


class FakeFlashAttention:
  """The part of axlearn's BaseFlashAttention that the recipe reads."""

  def __init__(self, **config):
    self.cfg = types.SimpleNamespace(**{"softmax_scale": 1.0, "dropout_rate": 0.0, **config})

  def is_supported(self, input_batch, kv_cache_type):
    return "query" in input_batch and kv_cache_type is None


class AxlearnTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    kinds = {name: type(name, (FakeBias,), {}) for name in (
        "MaskFnAttentionBias", "SegmentIdAttentionBias")}
    def split(bias, *classes):
      for cls in classes:
        yield next((part for part in bias if isinstance(part, cls)), FakeBias())
      yield next((part for part in bias if not isinstance(part, classes)), FakeBias())
    self.kinds = kinds
    bias = module("axlearn.common.attention_bias", split=split, **kinds)
    self.utils = module("utils", BACKENDS={"tpu": [object], "cpu": [object]})
    flash_common = module("common", BaseFlashAttention=FakeFlashAttention)
    flash = module("flash_attention", utils=self.utils, common=flash_common)
    common = module("axlearn.common", attention_bias=bias, flash_attention=flash)
    self.made = run("axlearn", {
        "axlearn": module("axlearn", common=common), "axlearn.common": common,
        "axlearn.common.flash_attention": flash,
        "axlearn.common.flash_attention.common": flash_common})["AttnCoreAttention"]

  def batch(self, *bias, **changes):
    given = dict(zip(("query", "key", "value"), operands()), bias=bias, **changes)
    return {**dict.fromkeys(AXLEARN), **given}

  def test_it_is_asked_first(self):
    self.assertTrue(all(found[0] is self.made for found in self.utils.BACKENDS.values()))
    self.assertTrue(self.made().is_supported(self.batch(), None))
    self.assertFalse(self.made().is_supported(self.batch(), dict))

  def test_mask_segments_bias_and_sinks(self):
    positions, ids = jnp.arange(T)[None], jnp.array([[1] * 5 + [2] * 3, [1] * 8])
    added, sinks = jax.random.normal(jax.random.key(1), (1, H, T, T)), jnp.ones(H)
    def seen(query, key):
      return (query >= key) & (query < key + 3)
    bias = (
        self.kinds["MaskFnAttentionBias"](mask=seen, target_positions=positions,
                                          source_positions=positions),
        self.kinds["SegmentIdAttentionBias"](segment_ids=ids), FakeBias(added))
    batch = self.batch(*bias, logit_sink=sinks)
    expected = adapters.dot_product_attention(
        *operands(), added, masks.window(2, 0) & masks.segments(ids), scale=0.5, softmax_aux=sinks)
    np.testing.assert_allclose(jax.jit(
        lambda: self.made(softmax_scale=0.5)(batch))(), expected, atol=2e-6)

  def test_nothing_hidden_and_keys_of_another_dtype(self):
    query, key, value = operands()
    batch = {**self.batch(), "key": key.astype(jnp.bfloat16)}
    rounded = key.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(self.made()(batch), adapters.dot_product_attention(
        query, rounded, value, scale=1.0), atol=2e-6)

  def test_dropout(self):
    batch = self.batch(prng_key=jax.random.key(0))
    self.assertGreater(abs(self.made(dropout_rate=0.5)(batch) - self.made()(batch)).max(), 0.01)


if __name__ == "__main__":
  absltest.main()
