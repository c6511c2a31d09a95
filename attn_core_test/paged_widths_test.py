# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunks over pages, and keys and values of different widths in one array, against the oracle."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagesMetadata, PagesV1, PagesV2,
                       PagesV3, attention, explain)
from attn_core.caches import pages
from attn_core.references import paged as reference
from attn_core.types import PagedSpec
from attn_core_test import sampling, tpu_interpret

LENGTHS, QUERIES, PAGE, H, K = (9, 17, 1), (9, 4, 1), 4, 4, 2
POOL = 12
TPU = OperationMetadata(platform="tpu")
MECHANISMS = {PagesV1: "page_attention", PagesV2: "ragged_page_attention_v2",
              PagesV3: "ragged_page_attention_v3"}
# Widths D and E, and arguments.
CASES = {"narrow_values": ((8, 3), {}), "wide_values": ((4, 6), {"sliding_window": (5, 0)}),
         "chunks": ((6, 6), {"chunk_size": 5}),
         "chunks_and_a_window": ((4, 3), {"chunk_size": 6, "sliding_window": (2, 1),
                                          "causal": False})}


def metadata(layout):
  tables = np.full((3, 6), -1, np.int32)
  free = np.random.default_rng(0).permutation(POOL)
  for row, length in enumerate(LENGTHS):
    count = -(-length // PAGE)
    tables[row, :count], free = free[:count], free[count:]
  starts = None if layout is PagesV1 else np.cumsum([0, *QUERIES]).astype(np.int32)
  return PagesMetadata(tables, np.array(LENGTHS, np.int32), starts)


def arrays(widths, queries=QUERIES):
  """Returns the query [T, H, D], and keys and values of every request [S, K, width]."""
  rng = np.random.default_rng(1)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return (normal(sum(queries), H, widths[0]),
          [normal(n, K, widths[0]) for n in LENGTHS], [normal(n, K, widths[1]) for n in LENGTHS])


def expected(arguments, queries, query, keys, values):
  """Returns the oracle's output."""
  spec = PagedSpec(query.shape[-1]**-0.5, None, arguments.get("causal", True),
                   arguments.get("sliding_window", (None, None)),
                   chunk_size=arguments.get("chunk_size"))
  return reference.attention(query, list(zip(queries, keys, values)), spec)[0]


def computed(layout, arguments, queries, query, keys, values):
  """Returns the output over pages; v3 writes the queries' own tokens."""
  about = metadata(layout)
  held = [n - (q if layout is PagesV3 else 0) for n, q in zip(LENGTHS, queries)]
  padded = lambda parts: jnp.stack([jnp.pad(x[:n], ((0, 6 * PAGE - n), (0, 0), (0, 0)))
                                    for x, n in zip(parts, held)])
  cache = pages.init(layout, POOL, PAGE, Heads(K, keys[0].shape[-1], values[0].shape[-1]),
                     jnp.float32)
  cache = pages.from_dense(cache, padded(keys), padded(values),
                           about._replace(context_lens=np.array(held, np.int32)))
  new = lambda parts: jnp.concatenate([x[n:] for x, n in zip(parts, held)])
  key, value = (new(keys), new(values)) if layout is PagesV3 else (None, None)
  return attention(query, key, value, mechanism=MECHANISMS[layout], layout="thd", cache_view=cache,
                   cache_metadata=about, block_sizes=BlockSizes(block_q=4, block_kv=8),
                   **arguments).attention_outputs


class PagedWidthsTest(parameterized.TestCase):

  @parameterized.product(name=tuple(CASES), layout=tuple(MECHANISMS))
  def test_values_and_gradients_equal_the_oracle(self, name, layout):
    widths, arguments = CASES[name]
    queries = (1, 1, 1) if layout is PagesV1 else QUERIES
    given = arrays(widths, queries)
    def results(run):
      loss = lambda *a: (lambda out: ((out * jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(
          out.shape)).sum(), out))(run(arguments, queries, *a))
      return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)
    found = results(functools.partial(computed, layout))
    self.assertEqual(found[0][1].shape, (sum(queries), H, widths[1]))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(results(expected)), strict=True):
      np.testing.assert_allclose(x, y, atol=2e-5)

  @parameterized.parameters(*sampling.with_slow(
      [(PagesV3, "narrow_values")], (PagesV3, "wide_values"), (PagesV2, "narrow_values"),
      (PagesV2, "wide_values")))
  def test_the_kernel_for_tpus(self, layout, name):
    widths, arguments = CASES[name]
    given = arrays(widths)
    run = lambda layout, **more: jax.jit(functools.partial(
        computed, layout, {**arguments, **more}, QUERIES))(*given)
    with tpu_interpret.interpreted():
      found = jax.block_until_ready(run(layout, metadata=TPU))
    self.assertEqual(found.shape[2], widths[1])
    np.testing.assert_allclose(found, run(layout), atol=2e-5)

  def test_the_kernel_for_tpus_takes_the_widths_of_up_projected_latent_rows(self):
    cache = pages.init(PagesV3, POOL, 16, Heads(K, 192, 128), jnp.bfloat16)
    shape = lambda *sizes: jax.ShapeDtypeStruct((14, *sizes), jnp.bfloat16)
    found = explain(shape(H, 192), shape(K, 192), shape(K, 128), layout="thd", cache_view=cache,
                    cache_metadata=metadata(PagesV3), metadata=TPU,
                    mechanism="ragged_page_attention_v3")
    self.assertIn("can, by paged.tpu_writing", str(found))

  @parameterized.parameters(("tpu", "chunks"), ("gpu", "chunks"), ("gpu", "narrow_values"))
  def test_explain_names_what_the_kernel_leaves_to_plain_xla(self, platform, name):
    widths, arguments = CASES[name]
    query, *_ = arrays(widths)
    cache = pages.init(PagesV2, POOL, PAGE, Heads(K, *widths), jnp.float32)
    found = explain(query, None, None, layout="thd", cache_view=cache,
                    cache_metadata=metadata(PagesV2), mechanism="ragged_page_attention_v2",
                    metadata=OperationMetadata(platform=platform, compute_capability="9.0"),
                    **arguments)
    self.assertEqual(found.chosen, "ragged_page_attention_v2")
    self.assertIn({"narrow_values": "value width 3", "chunks": "chunk_size=5"}[name], str(found))

  def test_conversions_and_copies_keep_the_widths(self):
    widths = Heads(K, 5, 3)
    key, value = (jnp.asarray(np.random.default_rng(2).normal(size=(K, POOL, PAGE, n)), jnp.float32)
                  for n in widths[1:])
    one = PagesV1(key, value)
    two = pages.convert(one, PagesV2)
    self.assertEqual(two.pages.shape, (POOL, PAGE, 2 * K, 5))
    self.assertEqual(pages.heads_of(two), widths)
    back = pages.convert(pages.convert(two, PagesV3), PagesV1, widths)
    copied = pages.convert(pages.copy_pages(two, np.array([1]), np.array([4])), PagesV1)
    np.testing.assert_array_equal(back.value_pages, value)
    np.testing.assert_array_equal(copied.value_pages, value.at[:, 4].set(value[:, 1]))
    np.testing.assert_array_equal(copied.key_pages, key.at[:, 4].set(key[:, 1]))

  def test_widths_that_do_not_fit_are_refused(self):
    cache = pages.init(PagesV2, POOL, PAGE, Heads(K, 8, 3), jnp.float32)
    with self.assertRaisesRegex(ValueError, r"cache_view.widths: got .*8"):
      attention(jnp.ones((14, H, 8)), None, None, layout="thd",
                cache_view=cache._replace(pages=cache.pages[..., :7]),
                cache_metadata=metadata(PagesV2))


if __name__ == "__main__":
  absltest.main()
