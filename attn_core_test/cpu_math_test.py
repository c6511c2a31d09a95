# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exponentials, roundings and sums of the XLA kernel on a CPU, against numpy."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.xla import cpu_math, cpu_matvec
from attn_core_test import sampling

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-40, 65504.0],
                   np.float32)

# Numbers of keys: of one, of less than a register, around the multiples at which code changes.
COUNTS, FEW, EVERY = (1, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40), (1, 8, 16, 33), range(1, 41)


def array(*shape):
  return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


class ExpTest(absltest.TestCase):

  def test_relative_error(self):
    x = np.concatenate([np.linspace(-87.3, 0, 1_000_001), -np.logspace(-30, 0, 1001)])
    x = x.astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    error = np.asarray(jax.jit(cpu_math.exp)(x)) / expected - 1
    self.assertLess(np.abs(error).max(), 3e-7)

  def test_between_two_powers_in_arrays_of_every_width(self):
    # Halfway between two powers of 2 rounding decides, which code for short rows may do twice.
    x = -(np.arange(120).repeat(100) + 0.5) * np.log(2)
    x = x.astype(np.float32) + np.spacing(x.astype(np.float32)) * np.tile(np.arange(-50, 50), 120)
    x = x[x > -87].astype(np.float32)
    for width in (1, 4, 8, 16, 32, 64):
      rows = x[:x.size // width * width].reshape(-1, width)
      error = np.asarray(jax.jit(cpu_math.exp)(rows)) / np.exp(rows.astype(np.float64)) - 1
      self.assertLess(np.abs(error).max(), 3e-7, msg=width)

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


class SumsTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      ((8, False, COUNTS), (8, True, FEW), (3, False, FEW)), (8, False, EVERY), (8, True, EVERY),
      (3, False, EVERY), (3, True, EVERY)))
  def test_weigh_is_a_product(self, width, widened, counts):
    weights, values = array(40, 2, 3), array(40, 2, width)
    dtype = jnp.bfloat16 if widened else jnp.float32
    stored = jnp.asarray(values, dtype)
    def run(weights, stored):
      return [cpu_matvec.weigh(
          weights[:n], lambda i, length: jax.lax.slice_in_dim(stored, i, i + length), width,
          widened=widened) for n in counts]
    for n, found in zip(counts, jax.jit(run)(weights, stored)):
      want = np.einsum("skr,ske->kre", weights[:n], np.asarray(stored[:n], np.float32))
      np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5, err_msg=str(n))

  def test_scores_are_a_product(self):
    rows, keys = array(2, 3, 32), array(7, 2, 32)
    found = jax.jit(lambda rows, keys: cpu_matvec.scores(
        rows, lambda i: keys[..., i:i + cpu_matvec.LANES]))(rows, keys)
    np.testing.assert_allclose(found, np.einsum("krd,skd->skr", rows, keys), rtol=1e-5, atol=1e-5)

  @parameterized.parameters("maximum", "add")
  def test_fold_reduces_the_first_axis(self, name):
    combine, x = getattr(jnp, name), array(600, 2)
    counts = (1, 2, 31, 32, 33, 48, 64, 512, 576)
    found = jax.jit(lambda x: [cpu_matvec.fold(combine, x[:n]) for n in counts])(x)
    reduce = {"maximum": np.max, "add": np.sum}[name]
    for n, part in zip(counts, found):
      np.testing.assert_allclose(part, reduce(x[:n], 0, keepdims=True), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
  absltest.main()
