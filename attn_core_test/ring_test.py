# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""One sequence over 8 virtual devices equals one device: every variant, every token order."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import MaskInfo, attention, from_layout, masks, ring_attention, to_layout
from attn_core.sharding import token_order
from attn_core.types import RING_VARIANTS
from attn_core_test import sampling
from attn_core_test.ring_cases import (B, D, H, K, SHARDS, RNG, T, Case, close, everything, mesh_of,
                                       metadata_of, numbers, padded, positions)


class EqualTest(parameterized.TestCase):

  @parameterized.product(variant=RING_VARIANTS, layout=token_order.TOKEN_ORDERS)
  def test_everything(self, variant, layout):
    # Forward mode does not depend on the token order: one is enough.
    one = "contiguous" if variant == "ring" else "zigzag"
    everything().check(metadata_of(variant, layout), forward_mode=layout == one)

  @parameterized.parameters(("ring", "contiguous"), ("all_gather", "zigzag"),
                            ("ulysses", "contiguous"), ("hybrid", "striped"))
  def test_positions_and_dense_masks(self, variant, layout):
    positions().check(metadata_of(variant, layout), forward_mode=False)

  def test_unrolled(self):
    positions().check(metadata_of("ring", "zigzag", mesh_of("ring", 4), scan_ring_attention=False),
                      shards=4)

  @parameterized.parameters("ring", "all_gather", "ulysses")
  def test_padded_inside(self, variant):
    padded().check(metadata_of(variant), forward_mode=False)

  @parameterized.parameters(("contiguous", 9, 9), ("zigzag", 3, 0))
  def test_skipped_ring_steps(self, layout, left, right):
    """Checks a window known on the host; the distances to visible members on both sides differ."""
    case = Case(lambda b, h, t, s: -left <= s - t <= right, (1, T, T, 2, 1, D, D), floats=(),
                arguments=dict(causal=False, sliding_window=(left, right)))
    case.check(metadata_of("ring", layout))

  def test_nan_does_not_reach_padded_queries(self):
    q, k, v = numbers(1, 61, 2, D), numbers(1, 64, 2, D, seed=1), numbers(1, 64, 2, D, seed=2)
    k[:, 62] = np.nan  # queries 62 and 63 would see this key
    def gradient(mechanism, metadata):
      return jax.jit(jax.grad(lambda *x: attention(
          *x, mechanism=mechanism, metadata=metadata, query_offset=0).attention_outputs.sum(),
                              (0, 1, 2)))(q, k, v)
    close(gradient("ring", metadata_of("ring")), gradient("vanilla", None))

  def test_one_number_for_one_query_or_one_key(self):
    """Checks arrays of a mask that are padded like those with a number for each token."""
    one, ids = np.zeros((1, 1), np.int32), np.arange(12, dtype=np.int32)[None] % 3 - 1
    for given in ((one, ids), (ids, one)):
      x = [numbers(1, given[n > 0].shape[1], 2, D, seed=n) for n in range(3)]
      run = lambda mechanism, metadata, x=x, given=given: jax.jit(lambda *x: attention(
          *x, mask=masks.segments(*given), causal=False, mechanism=mechanism, metadata=metadata
          ).attention_outputs)(*x)
      close(run("ring", metadata_of("ring")), run("vanilla", None))

  @parameterized.parameters("ring", "ulysses")
  def test_one_query_and_two_keys(self, variant):
    """Checks fewer tokens than shards."""
    q, k = numbers(1, 1, 8, D), numbers(1, 2, 8, D)
    arguments = dict(query_offset=1, sliding_window=(0, 0), mask_info=MaskInfo(
        q_segment_ids=np.array([[3]], np.int32), kv_segment_ids=np.array([[4, 3]], np.int32)))
    out = ring_attention(q, k, k, **arguments, metadata=metadata_of(variant)).attention_outputs
    np.testing.assert_allclose(out, k[:, 1:], rtol=1e-6)

  @parameterized.parameters(*zip(RING_VARIANTS, itertools.cycle(("zigzag", "striped"))))
  def test_dropout_is_bit_identical(self, variant, layout):
    """Checks the weights themselves, by the identity as values."""
    x, value = numbers(1, T, H, D), np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None],
                                                    (1, T, H, T))
    arguments = dict(dropout_prob=0.5, deterministic=False, dropout_rng=RNG, causal=False)
    q, k, v = to_layout((x, x, value), layout, SHARDS)
    @jax.jit
    def kept(q, k, v):
      out = ring_attention(q, k, v, **arguments, metadata=metadata_of(variant, layout))
      return from_layout(out.attention_outputs, layout, SHARDS)
    want = attention(x, x, value, **arguments, mechanism="vanilla").attention_outputs
    np.testing.assert_array_equal(kept(q, k, v) == 0, want == 0)
    self.assertBetween(np.mean(want == 0), 0.45, 0.55)

  @parameterized.parameters(*RING_VARIANTS)
  def test_bfloat16(self, variant):
    x = [jnp.asarray(numbers(B, T, h, D, seed=h), jnp.bfloat16) for h in (H, K, K)]
    def run(mechanism, dtype):
      def loss(*arrays):
        arrays = to_layout(arrays, "zigzag", SHARDS) if mechanism == "ring" else arrays
        metadata = metadata_of(variant, "zigzag") if mechanism == "ring" else None
        out = attention(*arrays, mechanism=mechanism, metadata=metadata,
                        softmax_aux=jnp.ones(H)).attention_outputs
        out = from_layout(out, "zigzag", SHARDS) if mechanism == "ring" else out
        return jnp.sum(out.astype(jnp.float32)**2), out
      arrays = [array.astype(dtype) for array in x]
      return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    got, want = run("ring", jnp.bfloat16), run("vanilla", jnp.float32)
    self.assertTrue(all(array.dtype == jnp.bfloat16 for array in jax.tree.leaves(got)))
    close(got, want, 2e-2)

  def test_bfloat16_is_rounded_once(self):
    """Checks that output and lse are as exact as on one device, and gradients nearly so.

    Results of ring steps are summed in float32 and then rounded, as those of blocks on one device.
    Their gradients have been rounded before: 8 roundings of parts instead of one of the sum.
    """
    x = [jnp.asarray(numbers(1, 128, h, 32, seed=h), jnp.bfloat16) for h in (4, 2, 2)]
    weights = numbers(1, 128, 4, 32, seed=9)
    def run(mechanism, metadata, dtype):
      def loss(*arrays):
        found = attention(*arrays, mechanism=mechanism, metadata=metadata, return_lse=True)
        return (found.attention_outputs.astype(jnp.float32) * weights).sum(), found
      arrays = [array.astype(dtype) for array in x]
      gradients, found = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
      return found.attention_outputs, found.lse, *gradients
    # In float64: the kernel of one device in float32 repeats the errors of that in bfloat16.
    with jax.enable_x64(True):
      truth = run("vanilla", None, jnp.float64)
    def errors(*arguments):
      return [np.sqrt(np.mean((np.asarray(a, np.float64) - np.asarray(b))**2))
              for a, b in zip(run(*arguments, jnp.bfloat16), truth)]
    one, ring = errors("flash_attn2", None), errors("ring", metadata_of("ring"))
    for name, most, a, b in zip(("out", "lse", "query", "key", "value"), (1.05, 1.05, 2, 2, 2), one,
                                ring, strict=True):
      self.assertLess(b, most * a + 1e-9, name)

  @parameterized.parameters(*sampling.with_slow((2, 8), 4))
  def test_second_derivatives_and_vmap(self, members):
    """Checks a Hessian times a vector, for three sets of arrays at once."""
    x = [numbers(3, 1, 16, h, D, seed=h) for h in (2, 1, 1)]
    def product(metadata, mechanism):
      def loss(*arrays):
        out = attention(*arrays, mechanism=mechanism, metadata=metadata, return_lse=True)
        return jnp.sum(jnp.sin(out.attention_outputs)) + jnp.sum(out.lse**2)
      gradient = jax.grad(loss, (0, 1, 2))
      return jax.jit(jax.vmap(lambda *x: jax.jvp(gradient, x, x)[1]))(*x)
    close(product(metadata_of("ring", mesh=mesh_of("ring", members)), "ring"),
          product(None, "vanilla"))

  def test_nan_reaches_the_queries_that_see_it(self):
    x = [numbers(1, T, 2, D, seed=n) for n in range(3)]
    x[1][0, 20], x[2][0, 60] = np.nan, np.inf
    lse = ring_attention(*x, metadata=metadata_of("ring"), return_lse=True).lse
    np.testing.assert_array_equal(np.isnan(lse[0, 0]), np.arange(T) >= 20)


class SharedHeadsTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("ulysses", 2)], *itertools.product(RING_VARIANTS, (8,))))
  def test_a_bias_for_all_heads(self, variant, shards):
    """Checks a bias that is sharded by queries, where another variant exchanges heads for these."""
    case = Case(lambda b, h, t, s: s <= t, (1, 16, 16, 8, 8, 4, 4), floats=("bias",))
    case.floats["bias"], case.moved["bias"] = (numbers(1, 1, 16, 16, seed=n) for n in (4, 9))
    case.check(metadata_of(variant, mesh=mesh_of(variant, shards)), shards, forward_mode=False)


if __name__ == "__main__":
  absltest.main()
