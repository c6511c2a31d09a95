# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table: one signature, reasons for refusals, and programs for platforms that are not here."""

import functools
import inspect
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (AttentionMechanism, BlockSizes, OperationMetadata, attention, explain, masks,
                       score_mods, table)
from attn_core.caches import dense
from attn_core.dispatch import selection
from attn_core.dispatch.capabilities import FEATURES, Request
from attn_core.kernels.gpu import mosaic
from attn_core.types import PLATFORMS


def request(*features, dtype=jnp.bfloat16, width=64, value_width=None, lengths=(2, 2), **fields):
  """Returns a request for one device; lengths: T, S."""
  shape = lambda length, width: jax.ShapeDtypeStruct((1, length, 2, width), dtype)
  fields = {"mask": jax.tree.structure(masks.full()), **fields}
  return Request({feature: feature for feature in features}, shape(lengths[0], width),
                 shape(lengths[1], width), shape(lengths[1], value_width or width), **fields)


def question(platform, asked):
  """Returns a question whose request does not depend on the placement of the call."""
  return selection.Question(selection.Target(platform, asked.capability), asked.lengths[0] == 1,
                            None, lambda implementation: asked)


def ask(mechanism, platform, asked):
  return selection.ask(table.RULES, mechanism, question(platform, asked))


def choose(mechanism, platform, asked):
  return selection.choose(table.RULES, mechanism, question(platform, asked)).mechanism


class TableTest(parameterized.TestCase):

  def test_all_entries_share_one_signature(self):
    signatures = {str(inspect.signature(entry.run)) for entry in table.TABLE.values()}
    self.assertLen(signatures, 1)

  def test_every_name_has_a_row_or_a_reason(self):
    self.assertContainsSubset({place.split()[0] for _, place in table.TABLE}, PLATFORMS)
    for name in table.names():
      for platform in PLATFORMS:
        if name != "auto":
          self.assertTrue((name, platform) in table.TABLE or name in table.MISSING,
                          (name, platform))

  def test_features_exist_and_a_fallback_has_all_of_them(self):
    for entry in table.TABLE.values():
      self.assertContainsSubset(entry.features, FEATURES)
      for implementation in entry.chain[1:]:
        self.assertContainsSubset(entry.features, implementation.features)

  @parameterized.named_parameters(
      ("plain", "8.0", {}, "flash_attn2", "sdpa.cudnn"),
      ("newer", "10.0", {}, "flash_attn2", "sdpa.cudnn"),
      ("unknown", None, {}, "flash_attn2", "flash.xla"),
      ("too_old", "7.5", {}, "flash_attn2", "flash.xla"),
      ("window", "8.0", dict(sliding_window=(3, 0)), "flash_attn2", "sdpa.cudnn"),
      ("window_right", "8.0", dict(sliding_window=3, causal=False), "flash_attn2", "flash.xla"),
      ("lengths", "8.0", dict(mask=masks.lengths(None, np.ones(1, np.int32))), "flash_attn2",
       "sdpa.cudnn"),
      ("mask", "8.0", dict(mask=np.ones((1, 1, 8, 8), bool)), "flash_attn2", "flash.xla"),
      ("bias", "8.0", dict(bias=np.ones((1, 1, 8, 8), jnp.bfloat16)), "flash_attn2", "flash.xla"),
      ("sinks", "8.0", dict(softmax_aux=np.ones(2, np.float32)), "flash_attn2", "flash.xla"),
      ("lse", "8.0", dict(return_lse=True), "flash_attn2", "flash.xla"),
      ("blocks", "8.0", dict(block_sizes=BlockSizes(4)), "flash_attn2", "flash.xla"),
      ("optimized", "8.0", dict(optimized=True), "flash_attn2", "sdpa.cudnn"),
      ("weights", "8.0", dict(return_weights=True), "vanilla", "dense.vanilla"))
  def test_auto_on_gpu(self, capability, arguments, chosen, kernel):
    self.check_auto(capability, arguments, chosen, kernel)

  def check_auto(self, capability, arguments, chosen, kernel):
    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    metadata = OperationMetadata(platform="gpu", compute_capability=capability)
    explanation = explain(x, x, x, metadata=metadata, **arguments)
    verdicts = {verdict.mechanism: verdict for verdict in explanation.verdicts}
    self.assertEqual((explanation.chosen, verdicts[chosen].kernel), (chosen, kernel))
    self.assertIn(f"* {chosen:26} can, by {kernel}", str(explanation))
    self.assertIn(f"on platform 'gpu', compute capability {capability or 'unknown'}\n",
                  str(explanation))
    if kernel == "flash.gpu":
      self.assertIn("by flash.gpu, which is for compute capability 9.0\n", str(explanation))
    if kernel == "sdpa.cudnn":
      self.assertIn("by sdpa.cudnn, which goes before flash.xla\n", str(explanation))

  @parameterized.named_parameters(
      ("plain", {}, "flash_attn2", "flash.gpu"),
      ("everything", dict(
          sliding_window=3, softmax_aux=np.ones(2, np.float32), logits_soft_cap=30.0,
          bias=np.ones((1, 1, 8, 8), np.float32), return_lse=True, chunk_size=4),
       "flash_attn2", "flash.gpu"),
      ("score_mods", dict(score_mod=(
          score_mods.by_distance(np.ones((3, 2), np.float32)) >> score_mods.soft_cap(3.0)
          >> score_mods.custom(lambda s, b, h, q, k, x: s * x, np.ones((), np.float32)))),
       "flash_attn2", "flash.gpu"),
      ("look_up", dict(score_mod=score_mods.grid(np.ones((9 * 1, 2), np.float32), (2, 2))),
       "blockwise", "flash.xla"),
      ("float32", dict(compute_dtype=jnp.float32), "blockwise", "flash.xla"),
      ("precision", dict(precision="highest"), "blockwise", "flash.xla"),
      ("operands", dict(mask=masks.custom(lambda b, h, t, s, x: s <= x, np.int32(3))), "blockwise",
       "flash.xla"),
      ("weights", dict(return_weights=True), "vanilla", "dense.vanilla"))
  def test_auto_on_hopper(self, arguments, chosen, kernel):
    self.check_auto("9.0", arguments, chosen, kernel)

  @parameterized.parameters("flash_attn2", "blocksparse", "cuda_flash_attn2")
  def test_on_hopper_a_name_runs_our_kernel_or_is_refused(self, mechanism):
    asked = functools.partial(request, "causal", "float16", dtype=jnp.float16, capability="9.0")
    self.assertEqual(ask(mechanism, "gpu", asked()).kernel, "flash.gpu")
    for change, word in ((dict(dtype=jnp.float32), "dtype float32"), (dict(width=264), "264"),
                         (dict(value_width=512), "up to 256")):
      with self.assertRaisesRegex(NotImplementedError, f"9.0, refuses.*{word}.*'blockwise'"):
        choose(mechanism, "gpu", asked(**{**asked.keywords, **change}))

  def test_our_kernels_are_not_compiled_by_a_cuda_that_miscompiles_masks(self):
    def kernels():
      asked = functools.partial(request, "causal", capability="9.0")
      return [str(ask(name, "gpu", asked(*features, lengths=(1, 64)))) for name, *features in (
          ("autoregressive_decodeattn",), ("flash_attn2",), ("ring",))]
    for version, name in ((12080, "12.8"), (12090, "12.9")):
      with mock.patch.object(mosaic, "cuda_version", return_value=version):
        self.check_auto("9.0", {}, "blockwise", "flash.xla")
        decode, flash, ring = kernels()
        self.assertRegex(decode, f"can, by decode.xla, not by decode.gpu: .*CUDA {name}:")
        self.assertRegex(ring, f"can, by context_parallel.xla, not by .*CUDA {name}:")
        self.assertRegex(flash, f"CUDA {name}: .*miscompiles.*install jax.cuda13.")
        with self.assertRaisesRegex(NotImplementedError, f"9.0, refuses.*CUDA {name}:"):
          choose("flash_attn2", "gpu", request("causal", capability="9.0"))
    for version in (12060, 12091, 13000, None):
      with mock.patch.object(mosaic, "cuda_version", return_value=version):
        for words, kernel in zip(kernels(), ("decode.gpu", "flash.gpu", "context_parallel.gpu")):
          self.assertIn(f"can, by {kernel}", words)

  def test_the_version_of_cuda_is_that_of_its_runtime_if_there_is_one(self):
    for plugin, expected in (
        (None, None), (mock.Mock(**{"cuda_runtime_get_version.return_value": 12080}), 12080),
        (mock.Mock(**{"cuda_runtime_get_version.side_effect": RuntimeError("no CUDA")}), None)):
      with mock.patch.object(mosaic, "cuda_versions", plugin):
        self.assertEqual(mosaic.cuda_version(), expected)

  @parameterized.parameters((dict(dtype=jnp.float32), "dtype float32"), (dict(width=76), "76"),
                            (dict(lengths=(8, 7)), "7 keys"))
  def test_skipped_implementations_give_a_reason(self, change, word):
    asked = request("causal", capability="8.6", **change)
    self.assertEqual(choose("auto", "gpu", asked), "flash_attn2")
    verdict = ask("flash_attn2", "gpu", asked)
    self.assertEqual(verdict.kernel, "flash.xla")
    self.assertRegex(str(verdict), f"can, by flash.xla, not by sdpa.cudnn: .*{word}")

  @parameterized.parameters("chunk", "segments")
  def test_a_reason_begins_with_the_argument(self, feature):
    asked = request(feature, mask=jax.tree.structure(masks.chunk(4)), lengths=(8, 8),
                    capability="8.0")
    self.assertEqual(ask("cudnn", "gpu", asked).reasons,
                     (f"{feature} ({FEATURES[feature]}) is not supported",))

  def test_a_row_for_a_compute_capability_goes_first(self):
    special = table.TABLE["vanilla", "gpu"]
    with mock.patch.dict(table.TABLE, {("flash_attn2", "gpu 9.9"): special}):
      find = lambda name, capability: selection.find(
          table.RULES, name, selection.Target("gpu", capability))
      self.assertIs(find("flash_attn2", "9.9"), special)
      self.assertIs(find("flash_attn2", "8.9"), table.TABLE["flash_attn2", "gpu"])
      self.assertIs(find("blocksparse", "9.9"), table.TABLE["blocksparse", "gpu"])
      with self.assertRaisesRegex(NotImplementedError, "'gpu', compute capability 9.9, refuses"):
        choose("flash_attn2", "gpu", request("block_sizes", capability="9.9"))

  @parameterized.parameters(("cpu", "flash_attn2"), ("tpu", "blockwise"))
  def test_auto_is_linear_unless_weights_are_asked_for(self, platform, chosen):
    everything = set(FEATURES) - {"vmem_limit_bytes", "quantized", "int4", "pages", "draft_mask",
                                  "scope", "prefixes", "stored_heads", "sequence_layout", "weights",
                                  "latent"}
    self.assertEqual(choose("auto", platform, request(*everything)), chosen)
    self.assertEqual(choose("auto", platform, request("segments", "bias")), "flash_attn2")
    self.assertEqual(choose("auto", platform, request("weights")), "vanilla")

  @parameterized.parameters(
      *((platform, 1, True) for platform in ("cpu", "tpu", "gpu 9.0")), ("gpu 8.0", 1, False),
      ("cpu", 8, True), ("cpu", 9, False), ("tpu", 64, True), ("tpu", 65, False),
      ("gpu 9.0", 16, True), ("gpu 9.0", 17, False))
  def test_auto_decodes_few_queries_a_row(self, place, queries, decodes):
    platform, *capability = place.split()
    metadata = OperationMetadata(platform=platform, compute_capability=(*capability, None)[0])
    array = lambda length, heads: jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16)
    cache = jax.eval_shape(lambda: dense.init(2, 128, (2, 64), dtype="bfloat16"))
    cached = explain(array(queries, 4), array(queries, 2), array(queries, 2), cache_view=cache,
                     metadata=metadata)
    whole = explain(array(queries, 4), array(128, 2), array(128, 2), query_offset=0,
                    metadata=metadata)
    tried = f"auto tries first on {platform} for {'one query' if queries == 1 else 'few queries'}"
    for explanation, expected in ((cached, decodes), (whole, decodes and queries == 1)):
      chosen = "autoregressive_decodeattn" if expected else "flash_attn2"
      self.assertEqual(explanation.chosen, chosen)
      self.assertEqual(explanation.verdicts[0].mechanism, chosen)
      self.assertEqual(tried in str(explanation), expected)

  @parameterized.parameters("cpu", "tpu", "gpu")
  def test_auto_decodes_by_its_kernel_or_not_first(self, platform):
    """Checks calls of one query that the row for few queries refuses."""
    metadata = OperationMetadata(platform=platform)
    query, key = (jax.ShapeDtypeStruct((2, n, 2, 64), jnp.float16) for n in (1, 8))
    explanation = explain(query, key, key, query_offset=7, metadata=metadata)
    self.assertEqual(explanation.chosen, {"cpu": "autoregressive_decodeattn", "tpu": "blockwise",
                                          "gpu": "flash_attn2"}[platform])
    explanation = explain(query, key, key, query_offset=7, metadata=metadata,
                          bias=np.zeros((1, 1, 1, 8), np.float32))
    self.assertIn(explanation.chosen, ("flash_attn2", "blockwise"))
    self.assertNotIn("tries first", str(explanation))
    # Only decoding reads caches of 8 bits, also without a kernel.
    cache = jax.eval_shape(lambda: dense.init(2, 128, (2, 64), dtype="int8"))
    self.assertEqual(explain(query, None, None, cache_view=cache, metadata=metadata).chosen,
                     "autoregressive_decodeattn")

  def test_a_name_is_never_replaced(self):
    with self.assertRaisesRegex(NotImplementedError, "mechanism='sdpa'.*sinks.*'flash_attn2'"):
      choose("sdpa", "cpu", request("sinks", dtype=jnp.float32))

  def test_no_mechanism_supports_the_call(self):
    with self.assertRaisesRegex(NotImplementedError, "no mechanism here can"):
      choose("auto", "cpu", request("quantized", "bias"))

  def test_splash_is_blocksparse(self):
    self.assertIs(AttentionMechanism.SPLASH, AttentionMechanism.BLOCKSPARSE)

  def test_explain_runs_nothing_and_agrees_with_attention(self):
    x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    explanation = explain(x, x, x, return_weights=True)
    self.assertEqual(explanation.chosen, "vanilla")
    refusals = {v.mechanism: v.reasons for v in explanation.verdicts}
    self.assertIn("return_weights=True", refusals["flash_attn2"][0])

  @parameterized.parameters(
      ("tpu", "tpu", "flash_attn2", 'kernel_name = "attn_core_backward"'),
      ("tpu", "tpu", "vanilla"), ("tpu", "tpu", "sdpa"), ("gpu", "cuda", "flash_attn2"),
      ("gpu", "cuda", "blockwise"), ("gpu", "cuda", "vanilla"))
  def test_lowers_for_a_platform_that_is_not_here(self, platform, lowering, mechanism,
                                                  product="dot_general"):
    def gradient(x):
      metadata = OperationMetadata(platform=platform)
      loss = lambda x: attention(x, x, x, mechanism=mechanism, metadata=metadata
                                 ).attention_outputs.astype(jnp.float32).sum()
      return jax.grad(loss)(x)
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    lowered = jax.jit(gradient).trace(x).lower(lowering_platforms=(lowering,))
    self.assertIn(product, lowered.as_text())

  @parameterized.parameters("auto", "flash_attn2", "blocksparse", "cuda_flash_attn2")
  def test_lowers_for_hopper(self, mechanism):
    metadata = OperationMetadata(platform="gpu", compute_capability="9.0")
    run = lambda x: attention(x, x, x, mechanism=mechanism, metadata=metadata).attention_outputs
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    lowered = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",))
    self.assertIn("mosaic_gpu", lowered.as_text())


if __name__ == "__main__":
  absltest.main()
