# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Merged attention over separate keys: that over all keys, with all derivatives."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import attention, merge_partials

B, T, S, H, K, D, E = 2, 5, 11, 6, 2, 8, 3
PARTS = {"one": (11,), "two": (4, 11), "three, one empty": (3, 3, 11), "single keys": (1, 2, 11)}


def inputs(dtype="float32"):
  rng = np.random.default_rng(0)
  query, key, value = (rng.normal(size=shape) for shape in
                       ((B, T, H, D), (B, S, K, D), (B, S, K, E)))
  query[0, 1] *= 40  # one key takes all the weight
  mask = rng.random((B, 1, T, S)) < 0.6
  mask[1, :, 2] = False  # no key in any part
  mask[0, :, 3, 4:] = False  # keys in the first parts only
  return *(jnp.asarray(x, dtype) for x in (query, key, value)), jnp.asarray(mask)


def ordered(x, layout, swap=True):
  """Converts [B, T, H, E] to a layout, of B = 1 for thd."""
  x = x.swapaxes(1, 2) if layout == "bhtd" and swap else x
  return x[0] if layout == "thd" else x


def merged(query, key, value, mask, ends, layout="bthd"):
  """Attends to the keys between two ends after the other, and merges."""
  parts = []
  for begin, end in zip((0, *ends), ends):
    if begin == end:  # attention to nothing
      parts.append((jnp.full((B, T, H, E), jnp.nan, query.dtype), jnp.full((B, H, T), -jnp.inf)))
      continue
    part = attention(query, key[:, begin:end], value[:, begin:end], mechanism="vanilla",
                     mask=mask[..., begin:end], causal=False, return_lse=True)
    parts.append((part.out, part.lse))
  batch = slice(0, 1) if layout == "thd" else slice(None)
  return merge_partials([ordered(out[batch], layout) for out, _ in parts],
                        [ordered(lse[batch], layout, swap=False) for _, lse in parts], layout)


class MergeTest(parameterized.TestCase):

  @parameterized.product(ends=list(PARTS), layout=("bthd", "bhtd", "thd"))
  def test_equals_all_keys_at_once(self, ends, layout):
    query, key, value, mask = inputs()
    want = attention(query, key, value, mechanism="vanilla", mask=mask, causal=False,
                     return_lse=True)
    got = merged(query, key, value, mask, PARTS[ends], layout)
    batch = slice(0, 1) if layout == "thd" else slice(None)
    np.testing.assert_allclose(got.out, ordered(want.out[batch], layout), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.lse, ordered(want.lse[batch], layout, swap=False), rtol=1e-5)
    if layout == "bthd":
      self.assertTrue((got.out[1, 2] == 0).all() and (got.lse[1, :, 2] == -jnp.inf).all())

  @parameterized.parameters("two", "three, one empty")
  def test_derivatives_equal_those_of_all_keys(self, ends):
    *operands, mask = inputs()
    rng = np.random.default_rng(1)
    d_out = jnp.asarray(rng.normal(size=(B, T, H, E)), jnp.float32)
    d_lse = jnp.asarray(rng.normal(size=(B, H, T)), jnp.float32)

    def loss(result):
      lse = jnp.where(jnp.isfinite(result.lse), result.lse, 0)
      return (result.out * d_out).sum() + (lse * d_lse).sum()

    whole = lambda *x: loss(attention(*x, mechanism="vanilla", mask=mask, causal=False,
                                      return_lse=True))
    parts = lambda *x: loss(merged(*x, mask, PARTS[ends]))
    want, got = (jax.jit(jax.grad(f, (0, 1, 2)))(*operands) for f in (whole, parts))
    for x, y in zip(got, want):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    tangents = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in operands)
    want, got = (jax.jvp(f, tuple(operands), tangents)[1] for f in (whole, parts))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    want, got = (jax.jvp(jax.grad(f), tuple(operands), tangents)[1] for f in (whole, parts))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)

  def test_dtypes(self):
    """Sums 16-bit outputs in float32, and keeps what is wider."""
    query, key, value, mask = inputs("bfloat16")
    got = merged(query, key, value, mask, PARTS["two"])
    self.assertEqual((got.out.dtype, got.lse.dtype), (jnp.bfloat16, jnp.float32))
    exact = merged(*(x.astype(jnp.float32) for x in (query, key, value)), mask, PARTS["two"])
    np.testing.assert_allclose(got.out.astype(np.float32), exact.out, rtol=2e-2, atol=2e-2)
    ones = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    many = merge_partials([ones] * 300, [jnp.zeros((1, 1, 1))] * 300)
    self.assertEqual(float(many.out.sum()), 1)
    self.assertAlmostEqual(float(many.lse.sum()), np.log(300), places=6)
    with jax.enable_x64(True):
      wide = merge_partials([jnp.ones((1, 1, 1), jnp.float64)], [jnp.zeros((1, 1), jnp.float64)],
                            "thd")
      self.assertEqual((wide.out.dtype, wide.lse.dtype), (jnp.float64, jnp.float64))

  def test_what_is_not_finite_stays_visible(self):
    """A visible part that is not finite counts, also where its weight underflows to 0."""
    outs = [jnp.ones((1, 1, 2, 1)), jnp.full((1, 1, 2, 1), jnp.inf)]
    lses = [jnp.zeros((1, 2, 1)), jnp.array([[[-500.0], [-jnp.inf]]])]
    np.testing.assert_array_equal(merge_partials(outs, lses).out.ravel(), [jnp.nan, 1])
    nan = merge_partials(outs, [lses[0], jnp.full((1, 2, 1), jnp.nan)])
    self.assertTrue(jnp.isnan(nan.out).all() and jnp.isnan(nan.lse).all())

  def test_vmap_and_strict_modes(self):
    *operands, mask = inputs()
    want = merged(*operands, mask, PARTS["two"]).out
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
      outs = [jnp.stack([x, 2 * x]) for x in (want, want)]
      lses = [jnp.zeros((2, B, H, T))] * 2
      np.testing.assert_allclose(jax.vmap(lambda *x: merge_partials(x[:2], x[2:]).out)(
          *outs, *lses), outs[0], rtol=1e-6)

  def test_bad_input(self):
    out, lse = jnp.ones((2, 3, 4, 5)), jnp.ones((2, 4, 3))
    for call, words in (
        (lambda: merge_partials([], []), "lses: got 0 with 0 outs; expected as many as outs, at"),
        (lambda: merge_partials([out], [lse, lse]), "lses: got 2 with 1 outs"),
        (lambda: merge_partials([out], [lse], "btdh"), "layout: got 'btdh'"),
        (lambda: merge_partials([out], [lse], "bhtd"), r"lses\[0\]: got float32\[2, 4, 3\]; "
         r"expected shape \[2, 3, 4\]"),
        (lambda: merge_partials([out], [lse], "thd"), r"outs\[0\]: got float32\[2, 3, 4, 5\]"),
        (lambda: merge_partials([out, out[..., :2]], [lse, lse]), r"outs\[1\]: got float32\[2, 3"),
        (lambda: merge_partials([out, out], [lse, lse.astype(int)]), r"lses\[1\]: got int32")):
      with self.assertRaisesRegex(ValueError, words):
        call()


if __name__ == "__main__":
  absltest.main()
