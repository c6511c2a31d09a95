# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bad calls of `attention` are refused before anything runs, with a message that helps."""

import inspect
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, OperationMetadata, attention, blockwise_attn, explain
from attn_core_test.bad_input_cases import (B, CACHE, CACHE_8_BITS, D, DECODING, DROPPED, GOOD, H,
                                            LONG, PACKED, T, VALUES, WIDE, floats, ints, offsets)

# The package's attribute of this name is the function, not the module.
attention_module = sys.modules["attn_core.attention"]


def sdpa(**changes):
  return {"mechanism": "sdpa", **changes}


# (name, changes, words): well-formed and not supported; all raise NotImplementedError.
REFUSED = (
    ("vmem_limit", {"vmem_limit_bytes": 2**20}, "platform 'cpu'", "vmem_limit_bytes=1048576",
     "no mechanism here can"),
    ("cache_view", {"cache_view": CACHE, **DECODING, "mechanism": "sdpa"}, "'sdpa'",
     "cache_view or cache_metadata", "'autoregressive_decodeattn'"),
    ("cache_8_bits", {"cache_view": CACHE_8_BITS, **DECODING, "mechanism": "vanilla"}, "'vanilla'",
     "a cache of dtype int8", "mechanism='autoregressive_decodeattn' can"),
    ("cudnn", {"mechanism": "cudnn"}, "'cudnn' on platform 'cpu'", "NVIDIA GPUs", "platform 'gpu'",
     "'flash_attn2'"),
    ("cuda_flash", {"mechanism": "cuda_flash_attn2"}, "'cuda_flash_attn2' on platform 'cpu'",
     "NVIDIA GPUs"),
    ("weights_flash", {"mechanism": "flash_attn2", "return_weights": True}, "'flash_attn2'",
     "return_weights=True", "mechanism='vanilla' can"),
    ("weights_blockwise", {"mechanism": "blockwise", "return_weights": True},
     "return_weights=True", "mechanism='vanilla' can"),
    ("weights_blocksparse", {"mechanism": "blocksparse", "return_weights": True},
     "return_weights=True", "mechanism='vanilla' can"),
    ("weights_and_blocks", {"return_weights": True, "block_sizes": BlockSizes(8)}, "'auto'",
     "flash_attn2: return_weights=True", "vanilla: block_sizes", "no mechanism here can"),
    ("optimized_vanilla", {"mechanism": "vanilla", "optimized": True}, "'vanilla'",
     "optimized=True", "linear-memory", "'flash_attn2'"),
    ("blocks_vanilla", {"mechanism": "vanilla", "block_sizes": BlockSizes(8)}, "'vanilla'",
     "block_sizes", "'blockwise'"),
    ("sdpa_soft_cap", sdpa(logits_soft_cap=30.0), "'sdpa'", "logits_soft_cap=30.0",
     "'flash_attn2'.*'vanilla'|'vanilla'.*'flash_attn2'"),
    ("sdpa_sinks", sdpa(softmax_aux=floats(H)), "'sdpa'", "softmax_aux", "'flash_attn2'"),
    ("sdpa_dropout", sdpa(**DROPPED, dropout_rng=np.zeros(2, np.uint32)), "'sdpa'",
     "dropout_prob=0.1", "'flash_attn2'"),
    ("sdpa_value_width", sdpa(**WIDE), "'sdpa'", "value width 24 and query width 16"),
    ("sdpa_weights", sdpa(return_weights=True), "return_weights=True", "'vanilla'"),
    ("sdpa_unnormalized", sdpa(normalize_output=False), "normalize_output=False"),
    ("sdpa_precision", sdpa(precision="highest"), "precision=highest"),
    ("sdpa_blocks", sdpa(block_sizes=BlockSizes(8)), "block_sizes"),
    ("sdpa_optimized", sdpa(optimized=True), "optimized=True"),
    ("sdpa_softmax_dtype", sdpa(metadata=OperationMetadata(runtime_softmax_dtype=jnp.bfloat16)),
     "runtime_softmax_dtype=bfloat16"),
    ("sdpa_several", sdpa(logits_soft_cap=30.0, softmax_aux=floats(H)), "softmax_aux",
     "logits_soft_cap=30.0"),
    ("sdpa_float16", sdpa(compute_dtype=jnp.float16), "dtype float16", "'flash_attn2'"),
    ("sdpa_float8", sdpa(compute_dtype=jnp.float8_e4m3fn), "dtype float8_e4m3fn", "'flash_attn2'"),
    ("sdpa_lse_bfloat16", sdpa(compute_dtype=jnp.bfloat16, return_lse=True), "return_lse",
     "bfloat16"),
) + tuple(
    (name, {"mechanism": name}, f"'{name}'", f"no cache_view in pages: it reads a {cache}")
    for name, cache in (("page_attention", "PagesV1"), ("ragged_page_attention_v2", "PagesV2"),
                        ("ragged_page_attention_v3", "PagesV3")))


class BadInputTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.run = self.enter_context(mock.patch.object(attention_module, "_execute"))

  def refused(self, exception, words, call):
    """Asserts that `call` raises with the words in order before it runs; returns the message."""
    with self.assertRaisesRegex(exception, "(?s)" + ".*?".join(words)) as raised:
      call()
    self.assertIs(type(raised.exception), exception)
    self.run.assert_not_called()
    return str(raised.exception)

  @parameterized.named_parameters(*((name, changes, words) for name, changes, *words in VALUES))
  def test_value_error(self, changes, words):
    argument, *rest = words
    message = self.refused(ValueError, [rf"\A{argument}", *rest],
                           lambda: attention(**{**GOOD, **changes}))
    self.assertIn("expected", message)
    self.assertRegex(message, "got|is given|holds|=")

  @parameterized.named_parameters(*((name, changes, words) for name, changes, *words in REFUSED))
  def test_not_implemented(self, changes, words):
    message = self.refused(NotImplementedError, words, lambda: attention(**{**GOOD, **changes}))
    self.assertRegex(message, "mechanism='.*' on platform 'cpu' refuses")
    self.assertRegex(message, "On this platform (mechanism=.* can|no mechanism here can)")

  @parameterized.named_parameters(
      ("softmax_scale", {"softmax_scale": 1.0}, r"softmax_scale: got float32\[\]",
       "traced scale multiplies the query"),
      ("logits_soft_cap", {"logits_soft_cap": 1.0}, r"logits_soft_cap: got float32\[\]", "static"),
      ("dropout_prob", {"dropout_prob": 0.5}, r"dropout_prob: got float32\[\]", "static"),
      ("sliding_window", {"sliding_window": 3}, r"sliding_window: got int32\[\]", "static"),
      ("chunk_size", {"chunk_size": 3}, r"chunk_size: got int32\[\]", "static"),
      ("causal", {"causal": True}, r"causal: got bool\[\]", "static"),
      ("deterministic", {"deterministic": True}, r"deterministic: got bool\[\]", "static"),
      ("mask_value", {"mask_value": -1e30}, r"mask_value: got float32\[\]", "static"))
  def test_traced(self, traced, *words):
    self.refused(ValueError, words, lambda: jax.jit(
        lambda traced: attention(**GOOD, **traced).attention_outputs)(traced))

  def test_arrays_are_checked_while_traced(self):
    call = jax.jit(lambda bias, q: attention(**{**GOOD, "query": q}, bias=bias))
    self.refused(ValueError, ["bias", r"got float32\[8, 8\]"],
                 lambda: call(floats(T, T), GOOD["query"]))
    self.refused(ValueError, ["query", r"got int32\[2, 8, 4, 16\]"],
                 lambda: call(floats(1, 1, T, T), ints(B, T, H, D)))

  def test_unknown_arguments(self):
    """Unknown arguments raise instead of vanishing into **kwargs."""
    for name in ("sinks", "attention_mask", "segment_ids", "window", "q_segment_ids", "dropout"):
      with self.assertRaisesRegex(TypeError, name):
        attention(**GOOD, **{name: None})
      with self.assertRaisesRegex(TypeError, name):
        explain(**GOOD, **{name: None})
    with self.assertRaises(TypeError):
      attention(*GOOD.values(), "vanilla")  # options are keyword-only
    self.run.assert_not_called()

  def test_explain_refuses_the_same(self):
    for name, changes, *words in VALUES[::5]:
      if name.startswith("mechanism"):
        continue
      with self.subTest(name):
        self.refused(ValueError, words, lambda: explain(**{**GOOD, **changes}))
    with self.assertRaisesRegex(ValueError, "mechanism='flash'"):
      explain(**GOOD, mechanism="flash")

  def test_explain_tells_what_is_not_supported(self):
    for name, changes, *words in REFUSED:
      explanation = explain(**{**GOOD, **changes})
      if changes.get("mechanism", "auto") == "auto":
        continue
      with self.subTest(name):
        self.assertIsNone(explanation.chosen)
        reasons, = [v.reasons for v in explanation.verdicts if v.mechanism == changes["mechanism"]]
        self.assertNotEmpty(reasons)
    self.run.assert_not_called()

  def test_blockwise_attn(self):
    for changes, *words in (
        ({"query": floats(T, D)}, "query: got"), ({"bias": floats(T, T)}, "bias: got"),
        ({"query_chunk_size": 0}, "block_sizes.block_q: got 0"),
        ({"key_chunk_size": 1.5}, "block_sizes.block_kv: got 1.5"),
        ({"attn_pdrop": 1.0}, "dropout_prob: got 1.0"),
        ({"attn_pdrop": 0.1, "deterministic": False}, "dropout_rng: got None"),
        ({"dtype": jnp.int32}, "compute_dtype: got"), ({"policy": "none"}, "policy: got 'none'"),
        ({"causal": 1}, "causal: got 1"), (LONG, "query_offset and mask_info.q_positions")):
      self.refused(ValueError, words, lambda: blockwise_attn(**{**GOOD, **changes}))

  def test_every_argument_is_covered(self):
    """Every argument of `attention` appears in the tables."""
    named = {word.split(":")[0].split("=")[0].split(".")[0]
             for _, _, *words in VALUES for word in words[:1]}
    named |= {argument for _, changes, *_ in REFUSED for argument in changes}
    self.assertEmpty(set(inspect.signature(attention).parameters) - named)

  def test_names_are_unique(self):
    for table in (VALUES, REFUSED):
      self.assertLen({row[0] for row in table}, len(table))


class GoodInputTest(parameterized.TestCase):
  """The good calls run, so that only the changes are refused."""

  @parameterized.named_parameters(
      ("good", {}), ("packed", PACKED), ("long", {**LONG, "query_offset": 4}),
      ("wide", WIDE), ("no_positions", {**LONG, "causal": False}),
      ("offset_at_its_limit", {"query_offset": 2**30 - 1, "causal": False,
                               "sliding_window": (-1, 5)}),
      ("window_at_its_limit", {"sliding_window": (2**31 - 1, None)}),
      ("numbers_of_numpy", {"softmax_scale": np.float32(1), "sliding_window": np.int32(3),
                            "chunk_size": np.int64(4), "query_offset": np.int32(0),
                            "causal": np.True_, "logits_soft_cap": np.float64(3)}),
      ("precision", {"precision": ["high", "default"]}),
      ("mask_value", {"mask_value": -1e9}),
      ("dropped", {**DROPPED, "dropout_rng": jax.random.key(0)}),
      ("init_bias", {"init_bias": lambda: floats(1, 1, 1, T)}),
      ("init_bias_none", {"init_bias": lambda: None}))
  def test_runs(self, changes):
    arguments = {**GOOD, **changes}
    out = attention(**arguments).attention_outputs
    self.assertEqual(out.shape, (*arguments["query"].shape[:-1], arguments["value"].shape[-1]))
    self.assertTrue(np.isfinite(out).all())

  def test_empty_sequences_among_packed_ones(self):
    out = attention(**{**PACKED, "cum_seqlens_q": offsets(0, 0, 10, 10)}).attention_outputs
    np.testing.assert_allclose(out, 1, rtol=1e-6)

  @parameterized.named_parameters(("row", np.int32([3, 1])), ("scalar", np.asarray(2)))
  def test_numpy_offsets_with_traced_sequences(self, offset):
    def run(sequences, offset):
      return attention(**{**PACKED, "cum_seqlens_q": sequences}, query_offset=offset,
                       sliding_window=(2, 1), return_lse=True)
    got = jax.jit(lambda sequences: run(sequences, offset))(PACKED["cum_seqlens_q"])
    want = run(PACKED["cum_seqlens_q"], jnp.asarray(offset, jnp.int32))
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)

  @parameterized.product(
      mask=("causal", "full", "window"), argument=("query", "key", "bias"))
  def test_gradient_of_the_lse_of_sdpa(self, mask, argument):
    """Raises, since it would be wrong; the lse itself and d lse / d value = 0 are right."""
    changes = {"causal": {}, "full": {"causal": False}, "window": {"sliding_window": 3}}[mask]
    arguments = {**GOOD, "bias": floats(1, H, 1, T), **changes}
    def lse(x, argument):
      return attention(**{**arguments, argument: x}, mechanism="sdpa", return_lse=True).lse.sum()
    message = "(?s)return_lse=True.*sdpa.*flash_attn2"
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.grad(lse)(arguments[argument], argument)
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.jit(jax.grad(lse), static_argnums=1)(arguments[argument], argument)
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.jvp(lambda x: lse(x, argument), (arguments[argument],), (arguments[argument],))
    if argument == "query":
      self.assertTrue(np.isfinite(lse(arguments[argument], argument)))
      self.assertFalse(jax.grad(lse)(arguments["value"], "value").any())

  def test_a_platform_without_the_mechanism(self):
    with self.assertRaisesRegex(NotImplementedError, "'cudnn' on platform 'tpu' refuses.*NVIDIA"):
      attention(**GOOD, mechanism="cudnn", metadata=OperationMetadata(platform="tpu"))


if __name__ == "__main__":
  absltest.main()
