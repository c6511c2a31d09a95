# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel of the sums of d_out * out, in interpret mode, and where the backward uses it."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import OperationMetadata, attention
from attn_core.kernels.tpu.flash import row_sums, schedule
from attn_core_test import tpu_interpret


class RowSumsTest(parameterized.TestCase):

  @parameterized.parameters(
      (300, 4, 2, 128), (256, 3, 1, 64), (130, 2, 2, 256), (128, 6, 3, 40))
  def test_equals_a_sum_over_the_width(self, tokens, heads, heads_of_step, width):
    tiling = schedule.Tiling(tokens, tokens, 128, 128, 128, 128, key_heads=heads_of_step)
    rng = np.random.default_rng(0)
    d_out, out = (rng.normal(size=(2, tokens, heads, width)).astype(np.float32) for _ in range(2))
    d_out = jnp.asarray(d_out, jnp.bfloat16)
    with tpu_interpret.interpreted():
      run = jax.jit(lambda d_out, out: row_sums.row_sums(d_out, out, tiling, 2**24))
      found = run(d_out, jnp.asarray(out))
    expected = np.einsum("bthe,bthe->bht", np.asarray(d_out, np.float64), out)
    self.assertEqual(found.dtype, jnp.float32)
    np.testing.assert_allclose(found, expected, atol=1e-5 * width**0.5, rtol=1e-6)

  @parameterized.parameters(jnp.bfloat16, jnp.float32)
  def test_the_backward_leaves_no_sum_over_the_width_to_xla(self, dtype):
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), dtype)
    attend = lambda *x: attention(*x, mechanism="flash_attn2", causal=True,
                                  metadata=OperationMetadata(platform="tpu")).attention_outputs
    text = jax.jit(lambda d_out, *x: jax.vjp(attend, *x)[1](d_out)).trace(x, x, x, x).lower(
        lowering_platforms=("tpu",)).as_text()
    self.assertIn("attn_core_row_sums", text)
    self.assertNotIn("dot_general", text)  # outside of the kernels


if __name__ == "__main__":
  absltest.main()
