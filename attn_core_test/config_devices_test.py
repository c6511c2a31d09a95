# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Devices: the best mechanism and dtype for one, and its TPU generation."""

import types

from absl.testing import absltest, parameterized
import jax.numpy as jnp

from attn_core import AttentionMechanism, get_optimal_config, tpu_version_check


class DevicesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("tpu", "TPU v2", "blockwise", "float32"), ("tpu", "TPU v3", "blockwise", "float32"),
      ("tpu", "TPU v4", "blocksparse", "bfloat16"),
      ("tpu", "TPU v5 lite", "blocksparse", "bfloat16"),
      ("tpu", "TPU7x", "blocksparse", "bfloat16"),
      ("gpu", "NVIDIA H100 80GB HBM3", "flash_attn2", "float16"),
      ("cuda", "Tesla V100", "flash_attn2", "float16"),
      ("rocm", "AMD Instinct MI300X", "flash_attn2", "float16"),
      ("cpu", "cpu", "flash_attn2", "bfloat16"))
  def test_table(self, platform, kind, mechanism, dtype):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    self.assertEqual(get_optimal_config(device), (AttentionMechanism(mechanism), dtype))

  def test_versions(self):
    def check(version, kind, platform="tpu"):
      return tpu_version_check(version, types.SimpleNamespace(platform=platform, device_kind=kind))
    for kind, versions in (("TPU v4", {"v4"}), ("TPU v5 lite", {"v5", "v5e"}),
                           ("TPU v5e", {"v5", "v5e"}), ("TPU v5p", {"v5", "v5p"}),
                           ("TPU v5", {"v5", "v5p"}), ("TPU v6 lite", {"v6", "v6e"}),
                           ("TPU7x", {"v7", "v7x"}), ("TPU v3", {"v3"})):
      known = ("v2", "v3", "v4", "v5", "v5e", "v5p", "v6", "v6e", "v7", "v7x")
      self.assertEqual({version for version in known if check(version, kind)}, versions, kind)
    self.assertFalse(check("v4", "v4", platform="gpu"))
    self.assertFalse(tpu_version_check())
    self.assertEqual(get_optimal_config().dtype, jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, "version: got 'v1'"):
      tpu_version_check("v1")
    for call in (get_optimal_config, lambda device: tpu_version_check("v4", device)):
      with self.assertRaisesRegex(ValueError, "device: got 'tpu'"):
        call("tpu")


if __name__ == "__main__":
  absltest.main()
