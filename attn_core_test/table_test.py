"""The table: one signature, honest choices, and programs for platforms that are not here."""

import inspect

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from attn_core import AttentionMechanism, OperationMetadata, attention, explain, table
from attn_core.types import PLATFORMS


def request(*features, dtype=jnp.bfloat16, width=64):
  return table.Request({feature: feature for feature in features}, dtype, width)


class TableTest(parameterized.TestCase):

  def test_all_entries_share_one_signature(self):
    signatures = {str(inspect.signature(entry.run)) for entry in table.TABLE.values()}
    self.assertLen(signatures, 1)

  def test_every_name_is_there_or_says_why_not(self):
    for name in table.names():
      for platform in PLATFORMS:
        if name != "auto":
          self.assertTrue((name, platform) in table.TABLE or name in table.MISSING,
                          (name, platform))

  def test_features_exist(self):
    for entry in table.TABLE.values():
      self.assertContainsSubset(entry.features, table.FEATURES)

  @parameterized.parameters(
      ((), "cudnn"), (("causal", "gqa"), "cudnn"), (("window",), "flash_attn2"),
      (("mask",), "flash_attn2"), (("bias",), "flash_attn2"),
      (("sinks", "soft_cap"), "flash_attn2"),
      (("weights",), "vanilla"), (("lse",), "flash_attn2"))
  def test_auto_on_gpu(self, features, chosen):
    self.assertEqual(table.choose("auto", "gpu", request(*features)), chosen)

  def test_auto_on_gpu_by_dtype_and_width(self):
    self.assertEqual(table.choose("auto", "gpu", request(dtype=jnp.float32)), "flash_attn2")
    self.assertEqual(table.choose("auto", "gpu", request(width=72 + 4)), "flash_attn2")

  @parameterized.parameters(("cpu", "flash_attn2"), ("tpu", "blockwise"))
  def test_auto_is_linear_unless_weights_are_asked_for(self, platform, chosen):
    everything = set(table.FEATURES) - {"vmem_limit_bytes", "cache", "weights"}
    self.assertEqual(table.choose("auto", platform, request(*everything)), chosen)
    self.assertEqual(table.choose("auto", platform, request("segments", "bias")), "flash_attn2")
    self.assertEqual(table.choose("auto", platform, request("weights")), "vanilla")

  def test_a_name_is_never_replaced(self):
    with self.assertRaisesRegex(NotImplementedError, "mechanism='sdpa'.*sinks.*'flash_attn2'"):
      table.choose("sdpa", "cpu", request("sinks", dtype=jnp.float32))

  def test_nobody_can(self):
    with self.assertRaisesRegex(NotImplementedError, "no mechanism here can"):
      table.choose("auto", "cpu", request("cache"))

  def test_splash_is_blocksparse(self):
    self.assertIs(AttentionMechanism.SPLASH, AttentionMechanism.BLOCKSPARSE)

  def test_explain_runs_nothing_and_agrees_with_the_door(self):
    x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    said = explain(x, x, x, return_weights=True)
    self.assertEqual(said.chosen, "vanilla")
    refusals = {v.mechanism: v.reasons for v in said.verdicts}
    self.assertIn("return_weights=True", refusals["flash_attn2"][0])

  @parameterized.parameters(("tpu", "tpu", "flash_attn2"), ("tpu", "tpu", "vanilla"),
                            ("tpu", "tpu", "sdpa"), ("gpu", "cuda", "flash_attn2"),
                            ("gpu", "cuda", "vanilla"))
  def test_lowers_for_a_platform_that_is_not_here(self, platform, lowering, mechanism):
    def gradient(x):
      metadata = OperationMetadata(platform=platform)
      loss = lambda x: attention(x, x, x, mechanism=mechanism, metadata=metadata
                                 ).attention_outputs.astype(jnp.float32).sum()
      return jax.grad(loss)(x)
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    lowered = jax.jit(gradient).trace(x).lower(lowering_platforms=(lowering,))
    self.assertIn("dot_general", lowered.as_text())


if __name__ == "__main__":
  absltest.main()
