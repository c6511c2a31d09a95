# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exponentials and roundings of the XLA kernel on a CPU, against numpy."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.xla import cpu_math

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-40, 65504.0],
                   np.float32)


class ExpTest(absltest.TestCase):

  def test_relative_error(self):
    x = np.concatenate([np.linspace(-87.3, 0, 1_000_001), -np.logspace(-30, 0, 1001)])
    x = x.astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    error = np.asarray(jax.jit(cpu_math.exp)(x)) / expected - 1
    self.assertLess(np.abs(error).max(), 3e-7)

  def test_ends(self):
    x = np.array([0, -0.0, -88, -1e30, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(jax.jit(cpu_math.exp)(x), [1, 1, 0, 0, 0, np.nan])

  def test_what_rounding_leaves_above_zero(self):
    np.testing.assert_allclose(cpu_math.exp(jnp.float32(1e-3)), np.exp(1e-3), rtol=3e-7)

  def test_other_dtypes_are_exact(self):
    with jax.enable_x64(True):
      x = np.linspace(-700, 0, 1001)
      np.testing.assert_allclose(cpu_math.exp(jnp.asarray(x)), np.exp(x), rtol=1e-15)

  def test_derivatives(self):
    x = jnp.float32(-1.5)
    for order in range(3):
      f = cpu_math.exp
      for _ in range(order):
        f = jax.jacfwd(f)
      np.testing.assert_allclose(f(x), np.exp(-1.5), rtol=3e-7)


class NarrowTest(absltest.TestCase):

  def bits(self, x):
    return np.asarray(x).view(np.uint16)

  def test_bfloat16_bit_for_bit(self):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([x, ties, SPECIAL])
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(
        self.bits(jax.jit(lambda x: cpu_math.narrow(x, jnp.bfloat16))(x)),
        self.bits(x.astype(jnp.bfloat16)))

  def test_every_nan_stays_nan(self):
    x = np.array([0x7fffffff, 0xffffffff, 0x7f800001, 0xff800001, 0x7fc00000],
                 np.uint32).view(np.float32)
    self.assertTrue(np.isnan(np.asarray(cpu_math.narrow(x, jnp.bfloat16), np.float32)).all())

  def test_other_dtypes(self):
    x = jnp.asarray(SPECIAL)
    np.testing.assert_array_equal(cpu_math.narrow(x, jnp.float16), x.astype(jnp.float16))
    self.assertIs(cpu_math.narrow(x, jnp.float32), x)

  def test_derivative(self):
    primal, tangent = jax.jvp(lambda x: cpu_math.narrow(x, jnp.bfloat16),
                              (jnp.float32(1.003),), (jnp.float32(2.0),))
    self.assertEqual((float(primal), float(tangent), tangent.dtype), (1.0, 2.0, jnp.bfloat16))


if __name__ == "__main__":
  absltest.main()
