# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Long sequences and many query heads of a key head on TPUs: one kernel each, which compiles."""

import time
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import SingleDeviceSharding

from attn_core import attention
from attn_core.benchmark.static import profile as static_profile
from attn_core_test import sampling
from attn_core_test.tpu_cases import TPU

KINDS = {"causal": {}, "full": {"causal": False}, "window": {"sliding_window": (4095, 0)}}
# (T, H, K, D, dtype, mask): before, the backward was 2 to 256 kernels.
CASES = {
    "one_head": (131072, 1, 1, 128, "bfloat16", "causal"),
    "one_key_head": (131072, 8, 1, 128, "bfloat16", "causal"),
    "llama": (131072, 32, 8, 128, "bfloat16", "causal"),
    "many_heads": (32768, 64, 1, 128, "bfloat16", "causal"),
    "narrow": (131072, 8, 2, 64, "bfloat16", "causal"),
    "wide": (131072, 16, 1, 256, "bfloat16", "causal"),
    "window": (131072, 8, 1, 256, "bfloat16", "window"),
    "full": (131072, 8, 1, 64, "bfloat16", "full"),
    "float32": (131072, 8, 1, 128, "float32", "causal"),
    "float32_wide_window": (131072, 4, 1, 256, "float32", "window"),
    "short_of_many_heads": (4096, 64, 1, 64, "bfloat16", "causal"),
}
# Of machine code, for a forward in both forms and a backward. Seconds depend on the machine: where
# a megabyte takes four to eight of CPU time, these cases take 17 to 36.
MOST_BYTES = {"bfloat16": 5 << 20, "float32": 6 << 20}


def lowered(name, chip=None):
  """Returns (the backward given the residuals of a forward, forward and backward), lowered."""
  tokens, heads, key_heads, width, dtype, kind = CASES[name]
  place = SingleDeviceSharding(static_profile.devices(chip)[0]) if chip else None
  shape = lambda n: jax.ShapeDtypeStruct((1, tokens, n, width), dtype, sharding=place)
  attend = lambda *x: attention(
      *x, mechanism="flash_attn2", metadata=TPU, **KINDS[kind]).attention_outputs
  arrays = [shape(n) for n in (heads, key_heads, key_heads)]
  def both(d_out, *arrays):
    out, pull = jax.vjp(attend, *arrays)
    return out, pull(d_out)
  lower = lambda run, *x: jax.jit(run).trace(*x).lower(lowering_platforms=("tpu",))
  pull = jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], *arrays)
  return (lambda: lower(lambda pull, d_out: pull(d_out), pull, shape(heads)),
          lambda: lower(both, shape(heads), *arrays))


class LoweredTest(parameterized.TestCase):

  @parameterized.parameters(*((name,) for name in sampling.names(
      CASES, ("one_key_head", "llama", "window", "short_of_many_heads"))))
  def test_the_backward_is_one_kernel(self, name):
    backward, _ = lowered(name)
    text = backward().as_text()
    self.assertEqual(text.count('"attn_core_backward"'), 1)
    self.assertEqual(text.count("tpu_custom_call"), 2)  # the other one sums d_out * out


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompiledTest(parameterized.TestCase):

  @parameterized.parameters(*((name,) for name in sampling.names(CASES, ("one_key_head",))))
  def test_compiles_to_little_code(self, name):
    cached = jax.config.jax_enable_compilation_cache
    self.addCleanup(jax.config.update, "jax_enable_compilation_cache", cached)
    jax.config.update("jax_enable_compilation_cache", False)
    start = time.process_time()
    _, both = lowered(name, "v6e")
    code = both().compile().memory_analysis().generated_code_size_in_bytes
    print(f"measured: {name}: {code:,} bytes of code, {time.process_time() - start:.0f} s of CPU")
    self.assertBetween(code, 1, MOST_BYTES[CASES[name][4]])


if __name__ == "__main__":
  absltest.main()
