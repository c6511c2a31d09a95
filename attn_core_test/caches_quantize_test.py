# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized cache entries: rounding errors, and refused gradients."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import Heads, PagesV2, attention, concatenate
from attn_core.caches import dense, latent, pages, quantize, window
from attn_core_test.caches_cases import B, D, HEADS, K, S, filled, tokens


class QuantizeTest(parameterized.TestCase):

  @parameterized.parameters(("int8", 0.5 / 127, 0), ("float8_e4m3fn", 2**-10 / 448, 2**-4))
  def test_error_is_that_of_rounding(self, dtype, of_largest, of_itself):
    x = np.random.default_rng(0).normal(size=(50, 3, 16)).astype(np.float32)
    x *= np.exp(np.random.default_rng(1).uniform(-30, 30, (50, 3, 1))).astype(np.float32)
    values, scales = quantize.quantize(jnp.asarray(x), dtype)
    self.assertEqual((values.dtype, values.shape, scales.shape), (dtype, x.shape, x.shape[:2]))
    back = quantize.dequantize(values, scales)
    largest = np.abs(x).max(-1, keepdims=True)
    self.assertTrue((np.abs(back - x) <= 1.001 * (largest * of_largest + np.abs(x) * of_itself))
                    .all())
    np.testing.assert_array_equal(quantize.quantize(back, dtype)[0], values)

  def test_error_of_4_bits_is_that_of_rounding_in_a_group(self):
    """Checks groups of 32, 32 and 16 columns, whose largest numbers differ by much."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3, 80)) * np.exp(rng.uniform(-9, 9, (50, 3, 5))).repeat(16, -1)
    x[..., 16:32], x[..., 48:64] = x[..., :16], x[..., 32:48]
    x = x.astype(np.float32)
    values, scales = quantize.quantize(jnp.asarray(x), "int4")
    self.assertEqual((values.dtype, values.shape, scales.shape), (np.int8, x.shape, (50, 3, 3)))
    self.assertEqual((int(values.min()), int(values.max())), (-7, 7))
    largest = np.stack([np.abs(x[..., first:first + 32]).max(-1) for first in (0, 32, 64)], -1)
    np.testing.assert_allclose(scales, largest / 7, rtol=1e-6)
    back = np.asarray(quantize.dequantize(values, scales))
    error = np.abs(back - x)
    self.assertTrue((error <= 1.001 / 14 * largest.repeat(32, -1)[..., :80]).all())
    packed = quantize.pack_columns(values)
    self.assertEqual((packed.dtype, packed.shape), (np.uint8, (50, 3, 40)))
    np.testing.assert_array_equal(packed[..., 0] & 15, values[..., 0] & 15)
    np.testing.assert_array_equal(packed[..., 0] >> 4, values[..., 1] & 15)
    np.testing.assert_array_equal(quantize.dequantize(packed, scales), back)
    with_nan = jnp.asarray(x).at[..., 40].set(np.inf)
    with_nan = quantize.dequantize(*quantize.quantize(with_nan, "int4"))
    np.testing.assert_array_equal(np.isnan(with_nan).any((0, 1)).nonzero()[0], np.arange(32, 64))
    np.testing.assert_array_equal(with_nan[..., :32], back[..., :32])

  def test_every_pair_of_numbers_of_4_bits(self):
    low, high = (x.ravel() for x in np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)))
    packed = quantize.pack(jnp.asarray(low, jnp.int8), jnp.asarray(high, jnp.int8))
    self.assertLen(set(packed.tolist()), 256)
    np.testing.assert_array_equal(quantize.unpack(packed, False), low)
    np.testing.assert_array_equal(quantize.unpack(packed, True), high)

  @parameterized.parameters("int8", "float8_e4m3fn", "int4")
  def test_zeros_tiny_and_not_finite(self, dtype):
    x = jnp.array([[0, 0, 0], [1e-39, 0, 0], [1, jnp.nan, 2], [1, jnp.inf, 2], [3e38, -3e38, 0]])
    back = np.asarray(quantize.dequantize(*quantize.quantize(x, dtype)))
    np.testing.assert_array_equal(back[0], 0)
    self.assertTrue(np.isfinite(back[1]).all())
    self.assertTrue(np.isnan(back[2:4]).all())
    np.testing.assert_allclose(back[4], x[4], rtol=1e-6)

  def test_bad_input(self):
    x, stored = jnp.ones((2, 3)), jnp.ones((2, 3), jnp.int8)
    for call, message in (
        (lambda: quantize.quantize(x, "int16"), "dtype: got 'int16'; expected one of 'int8'"),
        (lambda: dense.init(2, 8, (2, 8, 5), dtype="int4"),
         "width: got 5; expected an even one with int4"),
        (lambda: dense.init(2, 8, (2, 8), dtype="uint8"), "dtype: got uint8; expected a float"),
        (lambda: latent.init(2, 8, (4, 2), dtype="int4"), "dtype: got int4; expected a float"),
        (lambda: quantize.dequantize(stored, jnp.ones((2, 2))),
         r"scales: got float32\[2, 2\]; expected float32 \[2, 1\], one for every 32 columns"),
        (lambda: quantize.quantize(x, "small"), "dtype: got 'small'"),
        (lambda: quantize.quantize(None, "int8"), "x: got NoneType"),
        (lambda: quantize.quantize(stored, "int8"), r"x: got int8\[2, 3\]; expected float"),
        (lambda: quantize.quantize(jnp.float32(1), "int8"), r"x: got float32\[\]"),
        (lambda: quantize.quantize(x[:, :0], "int8"), r"x: got float32\[2, 0\]"),
        (lambda: quantize.dequantize(None, x), "values: got NoneType"),
        (lambda: quantize.dequantize(stored, 1.0), "scales: got float"),
        (lambda: quantize.dequantize(stored, jnp.ones(3)),
         r"scales: got float32\[3\]; expected float32 \[2\]"),
        (lambda: quantize.dequantize(stored, jnp.ones((1, 2))),
         r"scales: got float32\[1, 2\]; expected float32 \[2\]")):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        call()

  @parameterized.parameters("key_scale", "value_scale")
  def test_kernels_assert_the_groups_of_columns(self, name):
    query, key, _ = (jnp.ones((2, 1, n, 64)) for n in (2, 1, 1))
    cache = dense.append(dense.init(2, 4, (1, 64), dtype="int4"), key, key)
    run = jax.jit(lambda cache: attention(query, None, None, cache_view=cache).attention_outputs)
    run.lower(cache)
    with self.assertRaisesRegex(AssertionError, r"\(2, 4, 1, 1\) but expected \(2, 4, 1, 2\)"):
      run.lower(cache._replace(**{name: getattr(cache, name)[..., :1]}))

  def test_all_numbers_of_8_bits(self):
    bits = jnp.arange(256, dtype=jnp.uint8)
    x = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    got = np.asarray(quantize.dequantize(x[:, None], jnp.ones(256)))[:, 0]
    want = np.asarray(x).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want) & ~np.isnan(want)
                                  | np.signbit(got) & np.isnan(want))

  def test_quantized_entries_have_no_derivative(self):
    """Raises by name in both modes; with stop_gradient on the key, the query has a gradient."""
    key, value = tokens(2)
    query = jnp.ones((B, 2, K, D))
    flat = lambda x: x.reshape(-1, *x.shape[2:])[..., :5]
    slots, places = jnp.arange(2 * B), Heads(K, 5, 5)
    total = lambda cache: sum(x.sum() for x in jax.tree.leaves(cache) if x.dtype == jnp.float32)

    def stored(module, dtype):
      return lambda key: total(module.append(module.init(B, S, HEADS, dtype=dtype), key, value))

    def paged(kind):
      empty = pages.init(PagesV2, 4, 4, places, jnp.float8_e4m3fn, kind)
      return lambda key: pages.append(empty, flat(key), flat(value), slots).pages.astype(
          jnp.float32).sum()

    def attended(key, query=query):
      return jnp.sin(attention(query, key, value, mode="__prefill__", mechanism="auto",
                               cache_view=dense.init(B, S, HEADS, dtype="int8"),
                               sliding_window=3).attention_outputs).sum()

    def packed(key):
      key, value = (x[..., :4] for x in (key, tokens(2)[1]))
      return total(dense.append(dense.init(B, S, (K, 4), dtype="int4"), key, value))

    for function in (stored(dense, "int8"), stored(window, "float8_e4m3fn"), packed, paged("token"),
                     paged("tensor"), attended):
      for derive in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        with self.assertRaisesRegex(NotImplementedError, "gradients of quantized keys"):
          derive(function)(key)
    of_query = jax.grad(lambda x: attended(jax.lax.stop_gradient(x * key), x * query))(1.0)
    self.assertGreater(abs(of_query), 1e-3)
    cache = filled(dense, S, [3, 1, 2], dtype=jnp.int8)
    with self.assertRaisesRegex(NotImplementedError, "cache_view: gradients of quantized keys"):
      jax.grad(lambda scale: attention(
          query, None, None, mode="__autoregressive__", cache_view=cache._replace(key_scale=scale)
          ).attention_outputs.sum())(cache.key_scale)
    with self.assertRaisesRegex(NotImplementedError, "cache_view: gradients of quantized keys"):
      jax.grad(lambda scale: concatenate(
          query=query, key=key, value=value, mode="__prefill__",
          cache_view=cache._replace(key_scale=scale)).key.sum())(cache.key_scale)

  def test_other_dtypes_are_refused(self):
    for dtype in ("int2", "float16"):
      with self.assertRaisesRegex(ValueError, "dtype: got .*expected one of 'int8', 'float8_e4m3"):
        quantize.quantize(jnp.ones((2, 3)), dtype)
    with self.assertRaisesRegex(ValueError, "dtype: got int16; expected a floating-point dtype or"):
      dense.init(B, S, HEADS, dtype="int16")


if __name__ == "__main__":
  absltest.main()
