# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/adapters.md: its programs run, those for MaxText and axlearn on objects of their shapes.

The objects have the signatures of maxtext 0.2.5 (October 2026) and of axlearn at 34aed43 (8 July
2026), copied from their sources, and the same errors where the programs could meet them.
"""

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

def blocks() -> dict[str, str]:
  """Returns {library: program} of the page; "" is the one that needs none."""
  return dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def operands():
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(B, T, heads, D)), jnp.float32) for heads in (H, K, K)]


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


Q_LENGTH = "activation_q_length"


class FakeAttentionOp:
  """The part of MaxText's AttentionOp that the recipe reads."""

  def __init__(self, kind, sequence_axes=None, moba=False):
    self.attention_type = kind
    self.config = types.SimpleNamespace(moba=moba)
    self.mesh = create_mesh((2, 1, 1, 2, 1))
    self.flash_axis_names_q = ("activation_batch_attn", "activation_heads", "activation_length",
                               "activation_kv")
    self.sliding_window_size, self.chunk_attn_window_size = 3, 4
    self.attn_logits_soft_cap = 0.0
    self._sequence_axes = sequence_axes

  def _logical_to_mesh_axes(self, logical_name):
    return {self.flash_axis_names_q: PartitionSpec("dp", "tp", None, None),
            (Q_LENGTH,): PartitionSpec(self._sequence_axes)}[logical_name]

  # pylint: disable=unused-argument,too-many-arguments
  def apply_attention(
      self, query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode,
      use_ragged_attention=False, previous_chunk=None, bidirectional_mask=None, sinks=None,
      indexer_mask=None, compressed_mask=None, record_max_logits=False,
      decoder_segment_ids_kv=None, pad_kv_total=0, compress_ratio=0, *, qk_product_einsum,
      wv_product_einsum):
    given = locals()
    return {name: given[name] for name in PARAMETERS}


PARAMETERS = tuple(inspect.signature(FakeAttentionOp.apply_attention).parameters)[1:]
# Of the commit e591f30, which the recipe names by themselves.
COMMON = PARAMETERS[:PARAMETERS.index("pad_kv_total")]


class MaxTextTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    attention_op = module("maxtext.layers.attention_op", AttentionOp=FakeAttentionOp,
                          Q_LENGTH=Q_LENGTH)
    self.attentions = module("maxtext.layers.attentions", AttentionOp=FakeAttentionOp)
    layers = module("maxtext.layers", attention_op=attention_op, attentions=self.attentions)
    self.made = run("maxtext", {"maxtext": module("maxtext", layers=layers),
                                "maxtext.layers": layers})["AttnCoreOp"]
    self.products = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}

  def call(self, operands, ids, **changes):
    """Returns the arguments of `AttentionOp.__call__`, which passes all by keyword."""
    query, key, value = operands
    return {"query": query, "key": key, "value": value, "decoder_segment_ids": ids,
            "segment_positions": jnp.arange(T)[None], "lengths": None, "model_mode": "train",
            "use_ragged_attention": False, "previous_chunk": None, "bidirectional_mask": None,
            "sinks": None, "indexer_mask": None, "compressed_mask": None,
            "record_max_logits": False, "decoder_segment_ids_kv": None, "pad_kv_total": 0,
            "compress_ratio": 0, **self.products, **changes}

  def test_parameters_are_those_of_maxtext(self):
    theirs = inspect.signature(FakeAttentionOp.apply_attention).parameters
    parameters = list(inspect.signature(self.made.apply_attention).parameters.values())[1:]
    self.assertEqual(tuple(p.name for p in parameters[:-1]), COMMON)
    for parameter in parameters[:-1]:
      self.assertEqual(parameter.default, theirs[parameter.name].default, parameter.name)
    self.assertEqual(parameters[-1].kind, inspect.Parameter.VAR_KEYWORD)
    self.assertEqual(tuple(self.call(operands(), None)), PARAMETERS)
    self.assertIs(self.attentions.AttentionOp, self.made)

  @parameterized.parameters(
      (Kind.GLOBAL, masks.causal()), (Kind.LOCAL_SLIDING, masks.window(2, 0)),
      (Kind.CHUNK, masks.causal() & masks.chunk(4)), (Kind.FULL, masks.full()))
  def test_training(self, kind, mask):
    ids, sinks = jnp.array([[1] * 5 + [2] * 3, [1] * 8]), jnp.arange(float(H))
    arrays = operands()
    out, largest, total = jax.jit(lambda *x: self.made(kind, "sp").apply_attention(
        **self.call(x, ids, sinks=sinks)))(*arrays)
    self.assertIsNone(largest or total)
    expected = adapters.dot_product_attention(
        *arrays, mask=mask & masks.segments(ids), scale=1.0, softmax_aux=sinks)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    self.assertEqual(out.sharding.shard_shape(out.shape), (1, T, H // 2, D))

  @parameterized.parameters(
      ({"model_mode": "autoregressive"},), ({"bidirectional_mask": 1},), ({"previous_chunk": 1},),
      ({"indexer_mask": 1},), ({"compressed_mask": 1},), ({"record_max_logits": True},),
      ({"key": jax.ShapeDtypeStruct((B, 4, K, D), "float32")},),
      ({"pad_kv_total": 4}, {"kind": Kind.MLA}),
      ({}, {"sequence_axes": ("sp", "tp")}), ({}, {"moba": True}))
  def test_everything_else_is_left_to_maxtext(self, changes, options=types.MappingProxyType({})):
    given = self.call(operands(), None, **changes)
    passed = self.made(**{"kind": Kind.GLOBAL, **options}).apply_attention(**given)
    self.assertEqual(tuple(passed), PARAMETERS)
    for name, x in passed.items():
      self.assertIs(x, given[name], name)

  def test_a_commit_with_fewer_parameters(self):
    earlier = {name: x for name, x in self.call(operands(), None).items()
               if name not in ("pad_kv_total", "compress_ratio")}
    self.assertEqual(self.made(Kind.GLOBAL).apply_attention(**earlier)[0].shape, (B, T, H, D))


class FakeBias:
  """A bias of axlearn."""

  def __init__(self, value=None, **fields):
    self._value = value
    self.__dict__.update(fields)

  def has_value(self):
    return self._value is not None or len(self.__dict__) > 1

  def value(self):
    return self._value

  def bias_and_residual(self, cls):
    return (self, FakeComposite([])) if isinstance(self, cls) else (None, self)


class FakeComposite(FakeBias):
  """Several biases, of which at most one has each type."""

  def __init__(self, biases):
    super().__init__()
    self.biases = [part for each in biases
                   for part in (each.biases if isinstance(each, FakeComposite) else [each])]

  def has_value(self):
    return any(each.has_value() for each in self.biases)

  def value(self):
    return sum(each.value() for each in self.biases) if self.has_value() else None

  def bias_and_residual(self, cls):
    found = [each for each in self.biases if isinstance(each, cls)]
    return (found[0] if found else None,
            FakeComposite([each for each in self.biases if not isinstance(each, cls)]))


def fake_split(bias, *cls):
  """Splits biases as axlearn's function does, with its error."""
  for c in cls:
    result, bias = bias.bias_and_residual(c)
    if isinstance(bias, cls):
      raise NotImplementedError("Got a residual of type in `cls`.")
    yield FakeBias() if result is None else result
  yield bias


class FakeFlashAttention:
  """The part of axlearn's BaseFlashAttention that the recipe reads."""

  def __init__(self, cfg):
    self.cfg = cfg

  def __call__(self, input_batch):
    raise NotImplementedError()

  def is_supported(self, input_batch, kv_cache_type):
    del kv_cache_type
    return input_batch["key"].shape == input_batch["value"].shape


class AxlearnTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.kinds = {name: type(name, (FakeBias,), {}) for name in (
        "MaskFnAttentionBias", "SegmentIdAttentionBias")}
    positions = ("target_positions", "source_positions")
    jax.tree_util.register_pytree_node(
        self.kinds["MaskFnAttentionBias"],
        lambda bias: (tuple(getattr(bias, name) for name in positions), bias.mask),
        lambda mask, arrays: self.kinds["MaskFnAttentionBias"](
            mask=mask, **dict(zip(positions, arrays))))
    bias = module("axlearn.common.attention_bias", split=fake_split,
                  CompositeAttentionBias=FakeComposite, **self.kinds)
    self.utils = module("utils", BACKENDS={"tpu": [object], "cpu": [object]})
    flash_common = module("common", BaseFlashAttention=FakeFlashAttention)
    flash = module("flash_attention", utils=self.utils, common=flash_common)
    common = module("axlearn.common", attention_bias=bias, flash_attention=flash)
    self.made = run("axlearn", {
        "axlearn": module("axlearn", common=common), "axlearn.common": common,
        "axlearn.common.flash_attention": flash,
        "axlearn.common.flash_attention.common": flash_common})["AttnCoreAttention"]

  def make(self, softmax_scale=1.0, dropout_rate=0.0):
    """Returns the attention of axlearn's `default_config().set(...).instantiate()`."""
    return self.made(types.SimpleNamespace(
        softmax_scale=softmax_scale, dropout_rate=dropout_rate, interpret=True, tpu_block_size=512,
        gpu_block_size=128, backend_overrides=None))

  def batch(self, bias=None, **changes):
    """Returns the entries of `flash_attention_implementation`."""
    return dict(zip(("query", "key", "value"), operands()), page_tables=None, logit_sink=None,
                bias=FakeComposite([]) if bias is None else bias, **changes)

  def test_signatures_are_those_of_axlearn(self):
    for name in ("__call__", "is_supported"):
      mine, theirs = (inspect.signature(getattr(cls, name)) for cls in (
          self.made, FakeFlashAttention))
      self.assertEqual(mine, theirs)

  def test_it_is_asked_first(self):
    self.assertTrue(all(found[0] is self.made for found in self.utils.BACKENDS.values()))
    ask = lambda kind: self.make().is_supported(input_batch=self.batch(), kv_cache_type=kind)
    self.assertTrue(ask(None))
    self.assertFalse(ask(dict))

  def test_mask_segments_bias_and_sinks(self):
    positions, ids = jnp.arange(T)[None], jnp.array([[1] * 5 + [2] * 3, [1] * 8])
    added = jnp.asarray(np.random.default_rng(1).normal(size=(1, H, T, T)), jnp.float32)
    sinks = jnp.ones(H)
    def seen(query, key):
      return (query >= key) & (query < key + 3)
    def run(positions, ids):
      """Takes arrays as axlearn's `shard_map` does, which traces those of biases."""
      batch = self.batch(FakeComposite([
          self.kinds["MaskFnAttentionBias"](mask=seen, target_positions=positions,
                                            source_positions=positions),
          self.kinds["SegmentIdAttentionBias"](segment_ids=ids), FakeBias(added)]))
      batch["logit_sink"] = sinks
      return self.make(softmax_scale=0.5)(batch)
    expected = adapters.dot_product_attention(
        *operands(), added, masks.window(2, 0) & masks.segments(ids), scale=0.5, softmax_aux=sinks)
    np.testing.assert_allclose(jax.jit(run)(positions, ids), expected, atol=2e-6)

  def test_a_bias_that_is_not_in_a_composite(self):
    ids, added = jnp.array([[1] * 5 + [2] * 3, [1] * 8]), jnp.eye(T)[None, None]
    alone = self.kinds["SegmentIdAttentionBias"](segment_ids=ids)
    with self.assertRaises(NotImplementedError):
      list(fake_split(alone, *self.kinds.values()))
    np.testing.assert_allclose(self.make()(self.batch(alone)), adapters.dot_product_attention(
        *operands(), mask=masks.segments(ids), scale=1.0), atol=2e-6)
    np.testing.assert_allclose(self.make()(self.batch(FakeBias(added))),
                               adapters.dot_product_attention(*operands(), added, scale=1.0),
                               atol=2e-6)

  def test_nothing_hidden_and_keys_of_another_dtype(self):
    query, key, value = operands()
    batch = {**self.batch(), "key": key.astype(jnp.bfloat16)}
    rounded = key.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(self.make()(batch), adapters.dot_product_attention(
        query, rounded, value, scale=1.0), atol=2e-6)

  def test_dropout(self):
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
      batch = self.batch(prng_key=key)
      self.assertGreater(abs(self.make(dropout_rate=0.5)(batch) - self.make()(batch)).max(), 0.01)


if __name__ == "__main__":
  absltest.main()
