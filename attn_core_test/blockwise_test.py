# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The XLA block-wise kernel: memory, visited blocks, independence of block sizes."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, attention, masks


def compiled_temp_bytes(f, *shapes) -> int:
  return jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def shapes(length, heads=8, width=64, dtype=jnp.float32):
  return [jax.ShapeDtypeStruct((1, length, heads, width), dtype)] * 3


def forward(q, k, v, **arguments):
  return attention(q, k, v, mechanism="flash_attn2", **arguments).attention_outputs


def gradient(q, k, v):
  return jax.grad(lambda *x: forward(*x).sum(), (0, 1, 2))(q, k, v)


def tangent(q, k, v):
  return jax.jvp(forward, (q, k, v), (q, k, v))[1]


def hessian_vector(q, k, v):
  return jax.jvp(lambda *x: jax.grad(lambda *x: (forward(*x)**2).sum(), (0, 1, 2))(*x),
                 (q, k, v), (q, k, v))[1]


class MemoryTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("forward", forward, 40e6), ("gradient", gradient, 150e6),
      ("tangent", tangent, 150e6), ("hessian_vector", hessian_vector, 700e6))
  def test_linear_in_the_length(self, f, most):
    short, long = (compiled_temp_bytes(f, *shapes(n)) for n in (2048, 16384))
    self.assertLessEqual(long, 8 * short)
    self.assertLessEqual(long, most)

  @parameterized.named_parameters(
      ("window", dict(sliding_window=(1023, 0))),
      ("segments", dict(mask_info=masks.MaskInfo.from_segments(np.zeros((1, 16384), np.int32)))),
      ("sinks_and_cap", dict(softmax_aux=np.zeros(8, np.float32), logits_soft_cap=30.0)),
      ("dropout", dict(dropout_prob=0.1, deterministic=False,
                       dropout_rng=np.zeros(2, np.uint32))))
  def test_features_stay_linear(self, arguments):
    f = lambda q, k, v: jax.grad(lambda *x: forward(*x, **arguments).sum(), (0, 1, 2))(q, k, v)
    self.assertLessEqual(compiled_temp_bytes(f, *shapes(16384)), 150e6)

  def test_keys_are_not_repeated(self):
    query, key, value = shapes(16384, heads=32)
    key = value = jax.ShapeDtypeStruct((1, 16384, 1, 64), jnp.float32)
    repeated = 16384 * 32 * 64 * 4
    self.assertLess(compiled_temp_bytes(forward, query, key, value), repeated / 2)

  def test_a_row_bias_stays_a_row(self):
    bias = jax.ShapeDtypeStruct((1, 8, 1, 8192), jnp.float32)
    f = lambda q, k, v, b: jax.grad(lambda b: forward(q, k, v, bias=b).sum())(b)
    self.assertLess(compiled_temp_bytes(f, *shapes(8192), bias), 150e6)


class VisitsTest(parameterized.TestCase):
  """Counts the tiles that really run, through a predicate that reports every evaluation."""

  def visits(self, length, block, mask):
    count = []
    def report(batch, head, query, key):
      jax.debug.callback(lambda: count.append(1))
      return (query >= 0) & (key >= 0)
    x = jnp.ones((1, length, 1, 8))
    attention(x, x, x, mechanism="blocksparse", causal=False, mask=mask & masks.custom(report),
              block_sizes=BlockSizes(block, block)).attention_outputs.block_until_ready()
    jax.effects_barrier()
    return len(count)

  def test_causal_visits_the_triangle(self):
    for n in (1, 3, 8):
      self.assertEqual(self.visits(16 * n, 16, masks.causal()), n * (n + 1) // 2)

  def test_a_window_visits_a_band(self):
    for n in (4, 8, 16):
      self.assertEqual(self.visits(16 * n, 16, masks.causal() & masks.window(16, 0)), 2 * n - 1)

  def test_documents_visit_themselves(self):
    ids = np.repeat(np.arange(4), 32)[None]
    self.assertEqual(self.visits(128, 16, masks.segments(ids)), 4 * 4)

  def test_nothing_visible_visits_nothing(self):
    self.assertEqual(self.visits(64, 16, ~masks.full()), 0)


class BlockSizesTest(parameterized.TestCase):

  @parameterized.parameters((2, 7, 2), (16, 16, 1), (37, 37, 9), (64, 5, 2), (37, 1, 4))
  def test_results_do_not_depend_on_them(self, block_q, block_kv, block_heads):
    """Checks gradients of output and lse, with heads in several steps, and a number per pair."""
    rng = np.random.default_rng(0)
    q, k, v, bias = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (
        (2, 37, 8, 8), (2, 37, 4, 8), (2, 37, 4, 8), (2, 8, 37, 37)))
    mask = rng.random((2, 8, 37, 37)) < 0.8
    def both(sizes):
      def f(q, k, v, bias):
        found = attention(q, k, v, mechanism="flash_attn2", bias=bias, block_sizes=sizes, mask=mask,
                          sliding_window=(9, 0), logits_soft_cap=3.0, return_lse=True)
        lse = jnp.where(found.lse == -jnp.inf, 0, found.lse)
        return (found.attention_outputs**2).sum() + jnp.sin(lse).sum(), found
      return jax.jit(jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True))(q, k, v, bias)
    sizes = BlockSizes(block_q, block_kv, block_q, block_kv, block_heads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5),
                 both(sizes), both(BlockSizes()))


  def test_a_block_of_very_many_keys_leaves_a_query(self):
    query, key = shapes(4, 48, 8)[0], shapes(2**15, 1, 8)[0]
    run = lambda q, k: forward(q, k, k, causal=False, block_sizes=BlockSizes(block_kv=2**15))
    jax.jit(run).lower(query, key)


class NarrowTest(parameterized.TestCase):
  """16-bit operands in every shape of loop: one block or several, one head or several."""

  @parameterized.product(dtype=("bfloat16", "float16"),
                         shape=((256, 8, 8), (197, 4, 4), (16, 2, 1), (600, 4, 2), (1, 4, 2)))
  def test_gradients(self, dtype, shape):
    length, heads, key_heads = shape
    rng = np.random.default_rng(0)
    wide = [jnp.asarray(rng.normal(size=(1, length, n, 64)), dtype).astype(jnp.float32)
            for n in (heads, key_heads, key_heads)]
    loss = lambda *x: (forward(*x).astype(jnp.float32)**2).sum()
    both = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    (value, got), (want_value, want) = both(*[x.astype(dtype) for x in wide]), both(*wide)
    self.assertLess(abs(value / want_value - 1), 2e-2)
    for x, y in zip(got, want):
      error = np.abs(np.asarray(x, np.float32) - y) / max(np.abs(y).max(), 0.1)
      self.assertLess(np.quantile(error, 0.99), 1e-2)
      self.assertLess(error.max(), 5e-2)


if __name__ == "__main__":
  absltest.main()
