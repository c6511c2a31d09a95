# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Many queries over quantized caches: dequantized once, then block-wise attention."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import OperationMetadata, attention, explain
from attn_core.caches import dense, quantize
from attn_core_test.tpu_interpret import interpreted

jax.config.update("jax_num_cpu_devices", 4)

TPU = OperationMetadata(platform="tpu")
MANY = quantize.MANY_QUERIES


def operands_of(stored, tokens, slots, dtype=jnp.float32, rows=2):
  """Returns query, new keys and values, and a cache in which rows hold tokens already."""
  rng = np.random.default_rng(0)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  cache = dense.init(rows, slots, (2, 64), dtype=stored)
  for length in (13, 7):
    cache = dense.append(cache, array(rows, length, 2, 64), array(rows, length, 2, 64))
  return array(rows, tokens, 4, 64), array(rows, tokens, 2, 64), array(rows, tokens, 2, 64), cache


class PrefillTest(parameterized.TestCase):

  @parameterized.parameters(*((stored, window) for stored in ("int8", "float8_e4m3fn", "int4")
                              for window in (None, (11, 0))))
  def test_equals_attention_to_the_dequantized_cache(self, stored, window):
    query, key, value, cache = operands_of(stored, MANY, 64)
    options = dict(return_lse=True, sliding_window=window)
    said = explain(query, key, value, cache_view=cache, **options)
    self.assertIn("by decode.dequantized", str(said))
    got = attention(query, key, value, cache_view=cache, **options)
    held = got.cache_view
    whole = [quantize.dequantize(x, scale, jnp.float32)[:, :20 + MANY] for x, scale in (
        (held.key, held.key_scale), (held.value, held.value_scale))]
    want = attention(query, *whole, mechanism="vanilla", query_offset=20, **options)
    np.testing.assert_allclose(got.attention_outputs, want.attention_outputs, atol=2e-6)
    np.testing.assert_allclose(got.lse, want.lse, atol=2e-6)

  @parameterized.parameters("int8", "int4")
  def test_hidden_scales_and_overflow(self, stored):
    """A scale that is NaN where no query looks changes nothing; a row without room gives NaN."""
    query, key, value, cache = operands_of(stored, MANY, 60)
    attend = jax.jit(lambda cache: attention(query, key, value, cache_view=cache).attention_outputs)
    want = attend(cache)
    hidden = cache._replace(key_scale=cache.key_scale.at[:, 53:].set(np.nan),
                            value_scale=cache.value_scale.at[:, 53:].set(np.nan))
    np.testing.assert_array_equal(attend(hidden), want)
    self.assertTrue(np.isfinite(want).all())
    full = cache._replace(lengths=cache.lengths.at[1].set(40))
    found = attend(full)
    np.testing.assert_array_equal(found[0], want[0])
    self.assertTrue(np.isnan(found[1]).all())

  def test_gradients_of_the_query(self):
    query, _, _, cache = operands_of("int8", MANY, 64)
    cache = cache._replace(lengths=cache.lengths + MANY)
    loss = lambda q, attend: jnp.sum(jnp.sin(attend(q)))
    ours = lambda q: attention(q, None, None, cache_view=cache).attention_outputs
    whole = [quantize.dequantize(x, scale, jnp.float32)[:, :20 + MANY] for x, scale in (
        (cache.key, cache.key_scale), (cache.value, cache.value_scale))]
    plain = lambda q: attention(q, *whole, mechanism="vanilla", query_offset=20).attention_outputs
    got, want = (jax.grad(loss)(query, f) for f in (ours, plain))
    np.testing.assert_allclose(got, want, atol=5e-6)

  @parameterized.parameters((MANY - 1, "decode.xla"), (MANY, "decode.dequantized"))
  def test_few_queries_are_decoded(self, tokens, kernel):
    query, key, value, cache = jax.eval_shape(lambda: operands_of("int8", tokens, 64))
    self.assertIn(f"can, by {kernel}", str(explain(query, key, value, cache_view=cache)))

  def test_bfloat16_within_the_error_of_the_cache(self):
    query, key, value, cache = operands_of("int8", MANY, 64, jnp.bfloat16)
    got = attention(query, key, value, cache_view=cache)
    held = got.cache_view
    whole = [quantize.dequantize(x, scale, jnp.float32)[:, :20 + MANY] for x, scale in (
        (held.key, held.key_scale), (held.value, held.value_scale))]
    want = attention(query.astype("float32"), *whole, mechanism="vanilla", query_offset=20)
    np.testing.assert_allclose(np.asarray(got.attention_outputs, np.float32),
                               want.attention_outputs, atol=2e-2)

  def test_interpreted_for_tpus(self):
    query, key, value, cache = operands_of("int8", 65, 128)
    attend = lambda metadata: jax.jit(lambda *x: attention(
        *x[:3], cache_view=x[3], metadata=metadata).attention_outputs)
    self.assertIn("by decode.dequantized_tpu, not by decode.tpu: 65 queries", str(
        explain(query, key, value, cache_view=cache, metadata=TPU)))
    want = attend(None)(query, key, value, cache)
    with jax.enable_x64(False), interpreted():
      got = jax.block_until_ready(attend(TPU)(query, key, value, cache))
    np.testing.assert_allclose(got, want, atol=2e-5)

  @parameterized.parameters(((2, 2), "dequantized"), ((1, 4), "xla"))
  def test_meshes(self, sizes, kernel):
    """Batch rows and heads are dequantized where they are; sharded keys are decoded."""
    query, key, value, cache = operands_of("int8", MANY, 64)
    want = attention(query, key, value, cache_view=cache).attention_outputs
    devices = np.array(jax.devices()[:4]).reshape(sizes)
    names = ("dp", "tp") if kernel == "dequantized" else ("dp", "sp")
    metadata = OperationMetadata(mesh=jax.sharding.Mesh(devices, names))
    said = explain(query, key, value, cache_view=cache, metadata=metadata)
    self.assertRegex(str(said), rf"can, by decode.{kernel}\b")
    attend = jax.jit(functools.partial(attention, metadata=metadata))
    got = attend(query, key, value, cache_view=cache).attention_outputs
    np.testing.assert_allclose(got, want, atol=2e-6)


if __name__ == "__main__":
  absltest.main()
