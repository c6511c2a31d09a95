# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of the operands of TPU kernels, by their shapes and as the compiler counts it."""

import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from attn_core import MaskInfo, OperationMetadata, attention
from attn_core.benchmark.static import profile as static_profile
from attn_core.kernels.tpu.flash import call
from attn_core_test import sampling
from attn_core_test.tpu_cases import CASES

TPU = OperationMetadata(platform="tpu")


class OperandsTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.names(CASES, ("segments", "bias_row")))
  def test_no_number_takes_a_row_of_lanes(self, name):
    """Checks operands of forward and backward; the last axis is padded to 128 numbers."""
    case, found = CASES[name], []
    def recorded(kernel, inputs, outputs, launch_params, transfer=None):
      found.extend(inputs.arrays)
      return run(kernel, inputs, outputs, launch_params, transfer)
    run = call.call
    def both(arrays):
      out, pull = jax.vjp(case.call, arrays)
      return pull(out)
    with mock.patch.object(call, "call", recorded):
      jax.jit(both).trace(case.arrays()).lower(lowering_platforms=("tpu",))
    self.assertGreater(len(found), 2 * 3)
    for x in found:
      self.assertFalse(x.shape[-1] == 1 < x.size, f"{name}: {x.dtype}{x.shape}")


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompiledTest(absltest.TestCase):

  def temporary_bytes(self, tokens, packed):
    place = SingleDeviceSharding(static_profile.devices("v6e")[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    x, ids = array(jnp.float32, 1, tokens, 1, 128), array(jnp.int32, 1, tokens)
    attend = lambda x, ids: attention(
        x, x, x, mask_info=MaskInfo.from_segments(ids) if packed else None,
        mechanism="flash_attn2", metadata=TPU).attention_outputs
    return jax.jit(attend).trace(x, ids).lower(lowering_platforms=("tpu",)).compile(
        ).memory_analysis().temp_size_in_bytes

  def test_packing_takes_few_bytes_a_token(self):
    tokens = 32768  # many, since the compiler counts its code too: up to 600 KB more of it
    more = self.temporary_bytes(tokens, True) - self.temporary_bytes(tokens, False)
    self.assertLess(more, 64 * tokens)


if __name__ == "__main__":
  absltest.main()
