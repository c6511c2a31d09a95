# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_page_attention_v3` of layers that read the keys of another layer, and write nothing."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV1,
                       PagesV3, attention, explain, page_attention, ragged_page_attention_v2,
                       ragged_page_attention_v3)
from attn_core.caches import pages
from attn_core_test.paged_cases import BLOCKS, Case, plain
from attn_core_test.tpu_interpret import interpreted

jax.config.update("jax_num_cpu_devices", 2)

CASE = Case(sinks=True, options=PagedOptions(sliding_window=(9, 0)))
HEADS = Heads(CASE.K, CASE.D, CASE.D)


def stored(metadata: PagesMetadata, heads: Heads = HEADS) -> PagesMetadata:
  return metadata._replace(stored_heads=pages.StoredHeads(*heads))


class ValuesTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_equals_the_definition(self, writes_first):
    """In pages filled by `convert`, and by the call of another layer."""
    query, key, value, sinks = CASE.arrays()
    out, lse = CASE.oracle(query, key, value, sinks)
    cache = pages.convert(PagesV1(jnp.nan_to_num(key), jnp.nan_to_num(value)), PagesV3, HEADS)
    metadata = CASE.metadata()
    options = CASE.options._replace(softmax_aux=sinks, return_lse=True, block_sizes=BLOCKS)
    if writes_first:
      slots = pages.slots(metadata, CASE.page, query.shape[0])
      slots = np.minimum(slots, CASE.pool * CASE.page - 1)
      new = [jnp.nan_to_num(x).reshape(CASE.K, -1, CASE.D)[:, slots].swapaxes(0, 1)
             for x in (key, value)]
      cache = ragged_page_attention_v3(query * 2, *new, cache, metadata, options).cache_view
    found = ragged_page_attention_v3(query, None, None, cache, stored(metadata), options)
    self.assertIsNone(found.cache_view)
    live = sum(CASE.queries)
    np.testing.assert_allclose(found.out[:live], out[:live], atol=3e-6)
    np.testing.assert_allclose(found.lse[:, :live], lse[:, :live], rtol=1e-5, atol=3e-6)

  @parameterized.parameters(("bfloat16", None), ("int8", "token"), ("int8", "tensor"),
                            ("float8_e4m3fn", "token"), ("int4", "group"))
  def test_heads_that_padding_hides(self, dtype, scales):
    """Three heads of widths 6 and 5, in pages with room for four of width 128."""
    heads, rng = Heads(3, 6, 5), np.random.default_rng(0)
    metadata = CASE.metadata()
    tokens = CASE.pool * CASE.page
    query = jnp.asarray(rng.normal(size=(sum(CASE.queries), 6, 6)), jnp.float32)
    key, value = (jnp.asarray(rng.normal(size=(tokens, 3, width)), jnp.float32)
                  for width in heads[1:])
    if scales is None:
      query, key, value = (x.astype(dtype) for x in (query, key, value))

    def filled(layout):
      cache = pages.init(layout, CASE.pool, CASE.page, heads, dtype, scales)
      if scales == "tensor":
        cache = cache._replace(key_scales=jnp.float32(0.03), value_scales=jnp.float32(0.02))
      return pages.append(cache, key, value, np.arange(tokens))
    got = ragged_page_attention_v3(query, None, None, filled(PagesV3), stored(metadata, heads)).out
    want = ragged_page_attention_v2(query, filled(pages.PagesV2), metadata).out
    np.testing.assert_array_equal(got, want)

  def test_gradients(self):
    query, cache, metadata = plain(CASE)
    third = pages.convert(cache, PagesV3, HEADS)
    def loss(query, cache, metadata):
      attend = (ragged_page_attention_v2 if isinstance(cache, pages.PagesV2) else
                lambda query, *rest: ragged_page_attention_v3(query, None, None, *rest))
      return jnp.sin(attend(query, cache, metadata).out).sum()
    run = jax.jit(jax.grad(loss, (0, 1)))
    (want, of_two), (got, of_three) = run(query, cache, metadata), run(
        query, third, stored(metadata))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(pages.convert(of_three, pages.PagesV2, HEADS).pages, of_two.pages)

  def test_over_a_mesh(self):
    """Each device reads its heads; the pages that no call writes may be replicated."""
    query, cache, metadata = plain(CASE)
    cache = pages.convert(cache, PagesV3, HEADS)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    def run(on):
      options = PagedOptions(metadata=on, block_sizes=BLOCKS)
      return ragged_page_attention_v3(query, None, None, cache, stored(metadata), options).out
    np.testing.assert_allclose(run(OperationMetadata(mesh=mesh)), run(None), atol=1e-6)


class KernelsTest(parameterized.TestCase):

  def test_the_kernel_for_tpus(self):
    rng = np.random.default_rng(0)
    heads, page, pool = Heads(1, 128, 128), 8, 12
    cache = pages.init(PagesV3, pool, page, heads, "float32")
    cache = cache._replace(pages=jnp.asarray(rng.normal(size=cache.pages.shape), jnp.float32))
    metadata = stored(PagesMetadata(
        rng.permutation(pool).astype(np.int32).reshape(3, 4), np.int32([17, 9, 30]),
        np.int32([0, 4, 5, 10])), heads)
    query = jnp.asarray(rng.normal(size=(10, 2, 128)), jnp.float32)
    def run(on):
      return attention(query, None, None, mechanism="ragged_page_attention_v3", layout="thd",
                       cache_view=cache, cache_metadata=metadata, metadata=on,
                       block_sizes=BlockSizes(8, 16)).out
    with interpreted():
      got = run(OperationMetadata(platform="tpu"))
    np.testing.assert_allclose(got, run(None), atol=2e-6)

  @parameterized.parameters(("cpu", None), ("tpu", None), ("gpu", "9.0"))
  def test_explain_says_it(self, platform, capability):
    cache = pages.init(PagesV3, 32, 16, Heads(2, 128, 128), "bfloat16")
    metadata = PagesMetadata(np.arange(32, dtype=np.int32).reshape(4, 8), np.int32([9, 1, 99, 4]),
                             np.arange(5, dtype=np.int32))
    query = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    found = explain(query, None, None, mechanism="ragged_page_attention_v3", layout="thd",
                    cache_view=cache, cache_metadata=stored(metadata, Heads(2, 128, 128)),
                    metadata=OperationMetadata(platform=platform, compute_capability=capability))
    verdict = next(x for x in found.verdicts if x.mechanism == "ragged_page_attention_v3")
    kernel = {"cpu": "xla", "tpu": "tpu", "gpu": "gpu"}[platform]
    self.assertStartsWith(str(verdict), f"can, by paged.{kernel}_writing")
    self.assertIn("which writes nothing here: cache_metadata.stored_heads", str(verdict))


class BadInputTest(parameterized.TestCase):

  def test_refused(self):
    query, cache, metadata = plain(CASE)
    third = pages.convert(cache, PagesV3, HEADS)
    new = jnp.ones((query.shape[0], CASE.K, CASE.D))
    run = lambda metadata, *tokens: ragged_page_attention_v3(query, *tokens, third, metadata)
    for tokens, metadata_, words in (
        ((None, None), metadata, "key: got NoneType.*stored_heads"),
        ((new, new), stored(metadata), "key: got float32.*None with cache_metadata.stored_heads"),
        ((None, new), stored(metadata), "value: got float32.*None with"),
        ((None, None), metadata._replace(stored_heads=HEADS), "stored_heads: got .*StoredHeads"),
        ((None, None), stored(metadata, Heads(3, 6, 6)), "stored_heads: got .*at most 2 key heads"),
        ((None, None), stored(metadata, Heads(2, 5, 6)), "stored_heads: got .*width 6, the query"),
        ((None, None), stored(metadata, Heads(2, 6, 129)), "stored_heads: got .*at most 128"),
        ((None, None), stored(metadata, Heads(0, 6, 6)), "stored_heads: got .*at least 1")):
      with self.assertRaisesRegex(ValueError, words):
        run(metadata_, *tokens)
    with self.assertRaisesRegex(ValueError, "stored_heads: got .*None: .*ragged_page_attention_v2"):
      ragged_page_attention_v2(query, cache, stored(metadata))
    one = PagesV1(*jnp.ones((2, 2, 4, 4, 6)))
    with self.assertRaisesRegex(ValueError, "stored_heads: got .*None"):
      page_attention(query[:1], one, stored(PagesMetadata(np.int32([[0]]), np.int32([3]))))


if __name__ == "__main__":
  absltest.main()
