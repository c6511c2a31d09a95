# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls with a dense cache on TPUs, whose masks the kernel computes from the rows of the cache.

The interpreted kernel is compared with plain XLA, which reads a number for every slot.
"""

import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import LatentOptions, MaskInfo, OperationMetadata, attention
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import dense, latent
from attn_core.caches.update import CacheMetadata
from attn_core.kernels.tpu.ragged import kernel
from attn_core_test import sampling
from attn_core_test.tpu_interpret import interpreted

TPU, CPU = OperationMetadata(platform="tpu"), OperationMetadata(platform="cpu")
SLOTS = 192
# Rows: empty, with padding before its tokens, full but for one slot, without room, and without
# tokens after its padding. Two new tokens do not fit into the third.
STARTS, LENGTHS = (0, 40, 0, 3, 70), (0, 130, SLOTS - 1, SLOTS, 70)
WIDTHS = (100, 20)  # padded to 128


def filled(cache, rng):
  """Returns a cache with numbers in all slots, in the rows above."""
  number = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
  stored = {name: number(x) for name, x in cache._asdict().items()
            if name in ("key", "value", "latents")}
  if isinstance(cache, latent.LatentCache):
    stored = {"latents": stored["latents"].at[..., sum(WIDTHS):].set(0)}
  return cache._replace(starts=jnp.int32(STARTS), lengths=jnp.int32(LENGTHS), **stored)


def call_of(heads, tokens, rng, **more):
  """Returns (a function of metadata, query and cache, the query, the cache)."""
  array = lambda *shape: jnp.asarray(rng.normal(size=(len(STARTS), tokens, *shape)), jnp.float32)
  if heads[1]:
    cache = filled(dense.init(len(STARTS), SLOTS, (heads[1], 16), dtype=jnp.float32), rng)
    query, new = array(heads[0], 16), (array(heads[1], 16), array(heads[1], 16))
    options = {"mechanism": "autoregressive_decodeattn"}
  else:
    cache = filled(latent.init(len(STARTS), SLOTS, WIDTHS, dtype=jnp.float32, padded=True), rng)
    query, new = array(heads[0], sum(WIDTHS)), (array(sum(WIDTHS)), None)
    options = {"mechanism": "multi_latent_attention", "softmax_scale": 0.1,
               "latent_options": LatentOptions(*WIDTHS)}
  reads = more.pop("reads", False)

  def run(metadata, query, cache):
    return attention(query, *((None, None) if reads else new), cache_view=cache,
                     mode="__autoregressive__", metadata=metadata, return_lse=True,
                     **{**options, **more})
  return run, query, cache


class CacheRowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(False))

  def check(self, run, query, cache, most=2e-5):
    with interpreted():
      got = jax.block_until_ready(jax.jit(lambda *x: run(TPU, *x))(query, cache))
    want = jax.jit(lambda *x: run(CPU, *x))(query, cache)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      x, y = np.asarray(x), np.asarray(y)
      np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
      np.testing.assert_array_equal(x == -np.inf, y == -np.inf)
      np.testing.assert_allclose(np.nan_to_num(x), np.nan_to_num(y), atol=most)
    return want

  @parameterized.parameters(
      ((4, 2), 1, {}), ((4, 2), 2, {}), ((4, 2), 2, {"sliding_window": 50}),
      ((4, 2), 3, {"reads": True, "sliding_window": (30, 0)}), ((4, 2), 2, {"causal": False}),
      ((4, 2), 2, {"causal": False, "sliding_window": (9, 1)}),
      ((4, 2), 2, {"causal": False, "sliding_window": (None, 2**31 - 1)}), ((4, 2), 40, {}),
      ((4, 2), 1, {"softmax_aux": np.ones(4, np.float32)}),
      ((16, 0), 1, {}), ((16, 0), 2, {"sliding_window": 50}), ((128, 0), 1, {}),
      ((128, 0), 1, {"reads": True}), ((128, 0), 3, {}))
  def test_equals_plain_xla(self, heads, tokens, more):
    run, query, cache = call_of(heads, tokens, np.random.default_rng(0), **more)
    want = self.check(run, query, cache)
    if not more.get("reads"):
      overflow = np.asarray(want.cache_view.overflow)
      self.assertTrue(overflow[3] and (tokens == 1 or overflow[2]) and not overflow[1])
      self.assertTrue(np.isnan(np.asarray(want.lse)[overflow]).all())

  @parameterized.parameters(((4, 2),), ((128, 0),))
  def test_other_masks(self, heads):
    rng = np.random.default_rng(1)
    mask = jnp.asarray(rng.random((len(STARTS), 1, 1, SLOTS)) < 0.5)
    run, query, cache = call_of(heads, 1, rng, mask_info=MaskInfo(mask))
    self.check(run, query, cache)

  def test_queries_that_are_not_finite_in_every_step(self):
    run, query, cache = call_of((128, 0), 1, np.random.default_rng(2), causal=False)
    for row, number in enumerate((jnp.inf, -jnp.inf, jnp.nan)):
      query = query.at[row, 0, row + 5, 7].set(number)
    want = self.check(run, query, cache)
    self.assertEqual(np.isnan(np.asarray(want.lse)).sum(), 3 + 128)

  @parameterized.parameters(((4, 2),), ((16, 0),))
  def test_derivatives_are_those_of_plain_xla_and_0_where_rows_overflowed(self, heads):
    run, query, cache = call_of(heads, 1, np.random.default_rng(3))
    def gradient(metadata):
      total = lambda query, cache: jnp.nansum(run(metadata, query, cache).attention_outputs ** 2)
      return jax.jit(jax.grad(total))(query, cache)
    with interpreted():
      got = jax.block_until_ready(gradient(TPU))
    np.testing.assert_allclose(got, gradient(CPU), atol=2e-5)
    self.assertFalse(np.asarray(got)[3].any())

  def test_rows_that_overflowed_do_not_reach_what_follows_the_kernel(self):
    """0 * NaN in the derivatives of an up-projection, or of exp(lse), would be NaN for all rows."""
    rng = np.random.default_rng(7)
    ups = [jnp.asarray(rng.normal(size=(WIDTHS[0], 4, n)), jnp.float32) for n in (8, 12)]
    _, _, cache = call_of((16, 0), 1, rng)
    query, new = (jnp.asarray(rng.normal(size=(5, 1, *x)), jnp.float32) for x in ((4, 28), (120,)))
    def of_latents(metadata, value_up, cache):
      return attention(query, new, None, mechanism="multi_latent_attention", softmax_scale=0.1,
                       latent_options=LatentOptions(*WIDTHS, None, ups[0], value_up),
                       mode="__autoregressive__", cache_view=cache, metadata=metadata)
    run, query_of_heads, cache_of_heads = call_of((4, 2), 1, rng, normalize_output=False)
    for call, x, held in ((of_latents, ups[1], cache), (run, query_of_heads, cache_of_heads)):
      def both(metadata, x, held, call=call):
        out = lambda x: call(metadata, x, held).attention_outputs
        return (jax.grad(lambda x: jnp.nansum(out(x) ** 2))(x),
                jax.jvp(out, (x,), (jnp.ones_like(x),))[1])
      with interpreted():
        got = jax.block_until_ready(jax.jit(lambda *x, both=both: both(TPU, *x))(x, held))
      self.assertTrue(all(np.isfinite(x).all() for x in got))
      want = jax.jit(lambda *x, both=both: both(CPU, *x))(x, held)
      for found, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1, np.abs(expected).max()))

  def test_mapped(self):
    run, query, cache = call_of((4, 2), 1, np.random.default_rng(4))
    mapped = lambda metadata, query, cache: jax.vmap(
        lambda *x: run(metadata, *x)[:3:2])(query, cache)
    twice = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), tree)
    self.check(mapped, twice(query), twice(cache))

  def test_lengths_of_new_tokens(self):
    run, query, cache = call_of((4, 2), 3, np.random.default_rng(5), cache_metadata=CacheMetadata(
        lengths=jnp.int32([3, 0, 1, 0, 2])))
    self.check(run, query, cache)

  def test_the_kernel_reads_no_mask(self):
    found = []
    attend = kernel.attend
    def seen(spec, shape, inputs, dtype):
      found.append((inputs.mask is None, shape.raw_rows, shape.transposed_rows))
      return attend(spec, shape, inputs, dtype)
    for heads in ((4, 2), (16, 0), (128, 0)):
      run, query, cache = call_of(heads, 1, np.random.default_rng(6))
      with absltest.mock.patch.object(kernel, "attend", seen):
        jax.jit(lambda *x, run=run: run(TPU, *x)).trace(query, cache).lower(
            lowering_platforms=("tpu",))
    self.assertEqual(found, [(True, False, False), (True, True, False), (True, True, True)])


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      ((1, 1024, "float32"),), (16, 4096, "float32"), (128, 4096, "float32"),
      (128, 4096, "bfloat16"), (16, 1024, "int8")))
  def test_the_estimate_of_vector_memory_suffices(self, heads, slots, dtype):
    place = SingleDeviceSharding(static_profile.devices("v6e")[0])
    cache = jax.eval_shape(lambda: latent.init(4, slots, (512, 64), dtype=dtype, padded=True))
    computed = "bfloat16" if dtype == "int8" else dtype
    query, new = (jax.ShapeDtypeStruct((4, 1, *x), computed) for x in ((heads, 576), (576,)))
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                          (query, new, cache))
    def run(query, new, cache):
      return attention(query, new, None, mechanism="multi_latent_attention", softmax_scale=0.1,
                       latent_options=LatentOptions(512, 64), mode="__autoregressive__",
                       cache_view=cache, metadata=TPU)
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("tpu",)).compile().as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)


if __name__ == "__main__":
  absltest.main()
