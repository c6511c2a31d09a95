# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages read once for the requests that share them: values, gradients, pages read, bad input."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (Heads, OperationMetadata, PagesMetadata, PagesV1, PagesV2, PagesV3, explain,
                       multi_latent_ragged_page_attention, page_attention,
                       ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.caches import allocator, groups, latent_pages, page_checks, pages, prefixes
from attn_core.kernels.common import paged_operands
from attn_core.mechanisms import paged_prefixes
from attn_core.types import BlockSizes, PagedOperands, PagedSpec
from attn_core_test import sampling
from attn_core_test.tpu_interpret import interpreted

PAGE, POOL, WIDTH, H, K, D = 4, 80, 16, 4, 2, 8
QUERIES = (3, 1, 2, 2, 1, 0, 5)


def tree(seed, requests=len(QUERIES)):
  """Returns tables and lengths of requests that continue others at random."""
  rng = np.random.default_rng(seed)
  free = list(rng.permutation(POOL))
  rows = [[free.pop() for _ in range(rng.integers(2, 4))]]
  while len(rows) < requests:
    parent = rows[rng.integers(len(rows))]
    kept = parent[:rng.integers(0, len(parent) + 1)]
    rows.append(kept + [free.pop() for _ in range(rng.integers(2, 4))])
  # New tokens are in the last two pages, which others do not share.
  rows = [rows[i] + [free.pop(), free.pop()] for i in rng.permutation(requests)]
  tables = np.full((requests, WIDTH), 10**6, np.int32)
  for row, held in zip(tables, rows):
    row[:len(held)] = held
  lengths = np.array([len(held) * PAGE - rng.integers(0, PAGE) for held in rows], np.int32)
  return tables, lengths


def call(seed, num_levels=2, queries=QUERIES):
  """Returns query, cache, metadata without and with prefixes."""
  tables, lengths = tree(seed)
  rng = np.random.default_rng(seed)
  cache = pages.init(PagesV2, POOL, PAGE, Heads(K, D, D), "float32")
  cache = cache._replace(pages=jnp.asarray(rng.normal(size=cache.pages.shape), jnp.float32))
  query = jnp.asarray(rng.normal(size=(sum(queries) + 2, H, D)), jnp.float32)
  starts = np.cumsum([0, *queries]).astype(np.int32)
  metadata = PagesMetadata(tables, lengths, starts)
  found = prefixes.find(tables, (lengths - queries) // PAGE, num_levels, min_requests=2)
  return query, cache, metadata, metadata._replace(prefixes=found)


@functools.partial(jax.jit, static_argnames="platform")
def attend(query, cache, metadata, sinks=None, platform=None):
  return ragged_page_attention_v2(
      query, cache, metadata, return_lse=True, softmax_aux=sinks, logits_soft_cap=3.0,
      metadata=OperationMetadata(platform=platform))


class ValuesTest(parameterized.TestCase):

  @parameterized.product(seed=(0, 1), num_levels=(1, 3))
  def test_equals_the_call_without(self, seed, num_levels):
    query, cache, alone, shared = call(seed, num_levels)
    sinks = jnp.linspace(-1, 1, H)
    self.assertGreater(shared.prefixes.page_counts.sum(), 0)
    want, got = (attend(query, cache, x, sinks) for x in (alone, shared))
    np.testing.assert_allclose(got.out, want.out, atol=2e-6)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=2e-6)

  def test_gradients_equal_those_of_the_call_without(self):
    query, cache, alone, shared = call(1)
    @jax.jit
    def gradient(query, cache, sinks, metadata):
      def loss(query, cache, sinks):
        output = attend(query, cache, metadata, sinks)
        return jnp.sin(output.out).sum() + jnp.sin(output.lse[:, :sum(QUERIES)]).sum()
      return jax.grad(loss, (0, 1, 2))(query, cache, sinks)
    found = [gradient(query, cache, jnp.zeros(H), x) for x in (alone, shared)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=5e-6), *found)

  @parameterized.parameters("bfloat16", "float16")
  def test_parts_are_not_rounded(self, dtype):
    query, cache, alone, shared = call(2)
    exact = attend(query.astype(dtype).astype("float32"),
                   jax.tree.map(lambda x: x.astype(dtype).astype("float32"), cache), alone).out
    query, cache = query.astype(dtype), cache._replace(pages=cache.pages.astype(dtype))
    errors = [np.abs(np.float32(attend(query, cache, x).out) - exact).max()
              for x in (alone, shared)]
    self.assertLessEqual(errors[1], 1.2 * errors[0])

  def test_other_layouts_and_pages_that_are_written(self):
    query, cache, alone, shared = call(3, queries=(1,) * len(QUERIES))
    query = query[:len(QUERIES)]
    single = lambda x: x._replace(query_start_loc=None)
    first = pages.convert(cache, PagesV1)
    want, got = (page_attention(query, first, single(x)).out for x in (alone, shared))
    np.testing.assert_allclose(got, want, atol=2e-6)
    third = pages.convert(cache, PagesV3, Heads(K, D, D))
    tokens = jnp.ones((2, len(QUERIES), K, D))
    want, got = (ragged_page_attention_v3(query, *tokens, third, x) for x in (alone, shared))
    np.testing.assert_allclose(got.out, want.out, atol=2e-6)
    np.testing.assert_array_equal(got.cache_view.pages, want.cache_view.pages)

  @parameterized.parameters(*sampling.with_slow(
      (("float32", None), ("bfloat16", BlockSizes(block_q=4, block_kv=16))),
      ("float32", BlockSizes(block_q=1, block_kv=8)), ("bfloat16", None)))
  def test_the_same_cut_gives_the_same_bits(self, dtype, block_sizes):
    rng = np.random.default_rng(0)
    heads, counts, shared = Heads(K, 64, 64), np.array([1, 3, 1, 2, 1, 4]), 9  # pages shared
    tables = np.zeros((len(counts), 2 * shared), np.int32)
    tables[:, :shared] = rng.permutation(POOL)[:shared]
    free = rng.permutation(np.setdiff1d(np.arange(POOL), tables))
    tables[:, shared:] = free[:54].reshape(6, 9)
    lengths = shared * PAGE + counts + rng.integers(1, 8 * PAGE - 4, len(counts))
    queries = [rng.normal(size=(n, H, 64)).astype(jnp.dtype(dtype)) for n in counts]
    cache = pages.init(PagesV2, POOL, PAGE, heads, dtype)
    cache = cache._replace(pages=jnp.asarray(rng.normal(size=cache.pages.shape), dtype))
    attend = jax.jit(functools.partial(ragged_page_attention_v2, block_sizes=block_sizes,
                                       return_lse=True))

    def bits(requests, grouped=True):
      """Returns [(output, lse)] of these requests, computed in one call."""
      unused = [(0, 0)] * (len(counts) - len(requests))
      row_tables = np.zeros_like(tables)
      row_tables[:len(requests)] = tables[requests]
      row_lengths = np.int32([*lengths[requests], *(0 for _ in unused)])
      starts = np.cumsum([0, *counts[requests], *(0 for _ in unused)]).astype(np.int32)
      query = np.zeros((16, H, 64), queries[0].dtype)
      query[:starts[-1]] = np.concatenate([queries[n] for n in requests])
      found = prefixes.find(row_tables, np.where(row_lengths > 0, shared, 0), min_requests=1)
      out = attend(query, cache, PagesMetadata(
          row_tables, row_lengths, starts, np.int32(len(requests)),
          prefixes=found if grouped else None))
      spans = [slice(*starts[i:i + 2]) for i in range(len(requests))]
      return [(np.asarray(out.out)[x], np.asarray(out.lse)[:, x]) for x in spans]

    alone = [bits([n])[0] for n in range(len(counts))]
    for _ in range(12):
      requests = rng.permutation(len(counts))[:rng.integers(2, 7)]
      for n, found in zip(requests, bits(requests)):
        np.testing.assert_array_equal(found[0], alone[n][0])
        np.testing.assert_array_equal(found[1], alone[n][1])
    if dtype == "float32":  # another cut gives other bits: the test would see them
      self.assertTrue(any((bits([n], False)[0][0] != alone[n][0]).any() for n in range(6)))

  @parameterized.parameters("float32", "bfloat16")
  def test_a_large_group_has_the_bits_of_groups_of_one(self, dtype):
    count, shared = 70, 3  # more queries than a block has
    rng = np.random.default_rng(4)
    own = shared + np.arange(2 * count).reshape(count, 2)
    tables = np.concatenate([np.tile(np.arange(shared), (count, 1)), own], 1).astype(np.int32)
    cache = pages.init(PagesV2, shared + 2 * count, PAGE, Heads(K, D, D), dtype)
    cache = cache._replace(pages=jnp.asarray(rng.normal(size=cache.pages.shape), dtype))
    query = jnp.asarray(rng.normal(size=(count, H, D)), dtype)
    metadata = PagesMetadata(tables, rng.integers(14, 21, count).astype(np.int32),
                             np.arange(count + 1, dtype=np.int32))
    together = prefixes.find(tables, np.full(count, shared), min_requests=2)
    self.assertEqual(together.rows[0, 1], count)
    apart = together._replace(
        page_tables=np.tile(together.page_tables[:, :1], (1, count, 1)),
        page_counts=np.full((1, count), shared, np.int32),
        rows=np.arange(count + 1, dtype=np.int32)[None])
    got, want = (attend(query, cache, metadata._replace(prefixes=x)) for x in (together, apart))
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)

  def test_groups_with_pools_of_their_own(self):
    calls = [call(seed, queries=QUERIES) for seed in (0, 1)]
    query = jnp.concatenate([x[0] for x in calls])
    cache = PagesV2(jnp.concatenate([x[1].pages for x in calls]))
    metadata = groups.stack(*(x[3] for x in calls))
    got = attend(query, cache, metadata)
    want = jnp.concatenate([attend(*x[:3]).out for x in calls])
    np.testing.assert_allclose(got.out, want, atol=2e-6)

  def test_a_mask_of_drafts_counts_in_the_rest(self):
    query, cache, alone, shared = call(0)
    mask = np.tile(np.eye(5, dtype=bool), (len(QUERIES), 1, 1))
    want, got = (attend(query, cache, x._replace(draft_mask=mask)).out for x in (alone, shared))
    np.testing.assert_allclose(got, want, atol=2e-6)


class TpuTest(parameterized.TestCase):
  """The kernel for TPUs, interpreted, reads the pages of groups and those of single requests."""

  @parameterized.parameters(*sampling.with_slow([(2,)], (1,)))
  def test_equals_the_call_without(self, num_levels):
    """Also where the requests of a group have more queries together than its pages have tokens."""
    query, cache, alone, shared = call(0, num_levels, queries=(4, 1, 2, 2, 4, 1, 6))
    starts = np.asarray(shared.query_start_loc)
    groups = shared.prefixes
    numbers = (starts[1:] - starts[:-1])[groups.order]
    of_groups = [numbers[first:end].sum() for first, end in zip(groups.rows[0], groups.rows[0, 1:])]
    self.assertTrue(((groups.page_counts[0] > 0) & (np.array(of_groups) > PAGE)).any())
    sinks = jnp.linspace(-1, 1, H)
    want = attend(query, cache, alone, sinks)
    with interpreted():
      got = attend(query, cache, shared, sinks, platform="tpu")
    np.testing.assert_allclose(got.out, want.out, atol=2e-6)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=2e-6)

  @sampling.slow_parameters(("rows",), ("keys and values",))
  def test_pages_that_are_written(self, kind):
    count = len(QUERIES)
    query, cache, alone, shared = call(3, queries=(1,) * count)
    query = query[:count]
    if kind == "rows":
      cache = latent_pages.init(POOL, PAGE, (100, 28), dtype=jnp.float32, padded=True)
      rng = np.random.default_rng(0)
      cache = cache._replace(pages=jnp.asarray(rng.normal(size=cache.pages.shape), jnp.float32))
      query = jnp.asarray(rng.normal(size=(count, H, 128)), jnp.float32)
      run = lambda cache, metadata, place: multi_latent_ragged_page_attention(
          query, jnp.ones((count, 128)), cache, metadata, metadata=place, softmax_scale=0.1)
    else:
      cache = pages.convert(cache, PagesV3, Heads(K, D, D))
      run = lambda cache, metadata, place: ragged_page_attention_v3(
          query, *jnp.ones((2, count, K, D)), cache, metadata, metadata=place)
    want = run(cache, alone, None)
    with interpreted():
      got = run(cache, shared, OperationMetadata(platform="tpu"))
    np.testing.assert_allclose(got.out, want.out, atol=2e-6)
    np.testing.assert_array_equal(got.cache_view.pages, want.cache_view.pages)

  def test_the_kernel_and_its_limits(self):
    query, cache, _, shared = call(0)
    def asked(shared):
      return str(explain(query, None, None, mechanism="ragged_page_attention_v2", layout="thd",
                         cache_view=cache, cache_metadata=shared,
                         metadata=OperationMetadata(platform="tpu")))
    self.assertIn("by paged.tpu, which", asked(shared))
    table = np.pad(shared.page_tables, ((0, 0), (0, 25_000)))
    found = prefixes.find(table, np.zeros(len(QUERIES), int))
    wide = shared._replace(page_tables=table, prefixes=found)
    self.assertIn("cache_metadata.prefixes, as 11 requests: page tables of [11, 25016]",
                  asked(wide))
    self.assertIn("by paged.tpu, which", asked(wide._replace(prefixes=None)))


class FindTest(parameterized.TestCase):

  @parameterized.product(seed=tuple(range(6)), num_levels=(1, 2, 4), min_requests=(1, 2, 3))
  def test_the_groups_are_those_of_a_tree(self, seed, num_levels, min_requests):
    tables, lengths = tree(seed, 12)
    counts = lengths // PAGE
    found = prefixes.find(tables, counts, num_levels, min_requests)
    self.assertTrue(prefixes.agree(found, tables, np))
    read = prefixes.pages_of_requests(found, np)
    self.assertTrue((read <= counts).all())
    for level in range(num_levels):
      for n in np.flatnonzero(found.page_counts[level]):
        members = found.order[found.rows[level, n]:found.rows[level, n + 1]]
        self.assertGreaterEqual(len(members), min_requests)
    if num_levels == 4 and min_requests == 2:
      # Deep enough, every page that two requests have at their beginning is read by a group.
      for r, count in enumerate(counts):
        others = [s for s in range(12) if s != r]
        most = max(next((i for i in range(min(count, counts[s]))
                         if tables[r, i] != tables[s, i]), min(count, counts[s])) for s in others)
        self.assertLessEqual(read[r], most)
        self.assertGreaterEqual(read[r], min(most, 1))

  def test_the_groups_of_forks(self):
    pool = allocator.create(40, PAGE)
    pool = allocator.add(pool, "system")
    pool, _ = allocator.extend(pool, "system", 3 * PAGE)
    names = [f"user {n}" for n in range(5)]
    for name in names:
      pool = allocator.fork(pool, "system", name, 3 * PAGE)
      pool, _ = allocator.extend(pool, name, PAGE + 1)
    tables = allocator.table(pool, names, 6)
    found = prefixes.find(tables, np.full(5, 4))
    np.testing.assert_array_equal(found.page_counts[0, 0], 3)
    np.testing.assert_array_equal(found.rows[0, :2], (0, 5))

  def test_pages_read(self):
    """One pass over the pages that all requests share, in place of one for each request."""
    requests, shared, own = 16, 32, 2
    tables = np.concatenate([np.tile(np.arange(shared), (requests, 1)), shared + np.arange(
        requests * own).reshape(requests, own)], 1).astype(np.int32)
    lengths = np.full(requests, (shared + own) * PAGE, np.int32)
    cache = pages.init(PagesV2, shared + requests * own, PAGE, Heads(K, D, D), "float32")
    alone = PagesMetadata(tables, lengths)
    grouped = alone._replace(prefixes=prefixes.find(tables, (lengths - 1) // PAGE))
    read = []

    def count(operands, spec, sizes):
      heads = Heads(K, D, D)
      sizes = paged_operands.choose_block_sizes(operands, sizes._replace(block_kv=PAGE), H // K)
      inputs = paged_operands.block_inputs(operands, spec, heads, sizes)
      total = 0
      for request in range(operands.metadata.context_lens.shape[0]):
        first, end = paged_operands.query_blocks(inputs, request)
        for block in range(int(first), int(end)):
          begin, stop = paged_operands.key_blocks(
              inputs, paged_operands.query_block(inputs, request, block))
          total += max(0, int(stop - begin))
      read[-1] += total
      rows = operands.query.shape[:2]
      return jnp.zeros((*rows, D)), jnp.zeros((*rows, 1))

    for metadata in (alone, grouped):
      read.append(0)
      paged_prefixes.attend(paged_prefixes.on_xla(count, Heads(K, D, D)), PagedOperands(
          jnp.zeros((requests, H, D)), cache, jax.tree.map(jnp.asarray, metadata), None),
                            PagedSpec(1.0), BlockSizes())
    self.assertEqual(read, [requests * (shared + own), shared + requests * own])


class BadInputTest(parameterized.TestCase):

  def test_refused(self):
    query, cache, _, shared = call(0)
    run = lambda metadata=shared, **options: ragged_page_attention_v2(
        query, cache, metadata, **options)
    for options, words in ((dict(sliding_window=(3, 0)), "sliding_window: .*with cache_metadata.p"),
                           (dict(chunk_size=4), "chunk_size: "), (dict(causal=False), "causal: "),
                           (dict(metadata=shared._replace(scope=pages.Scope.NEW)), "scope: ")):
      with self.assertRaisesRegex(ValueError, words):
        run(**options)
    for changes, words in (
        (dict(order=shared.prefixes.order[:3]), "prefixes.order: got int32"),
        (dict(rows=shared.prefixes.rows[0]), "prefixes.rows: got int32"),
        (dict(order=np.zeros_like(shared.prefixes.order)), "prefixes: got .*full ones"),
        (dict(page_tables=shared.prefixes.page_tables + 1), "prefixes: got .*full ones"),
        (dict(page_counts=shared.prefixes.page_counts + 1), "prefixes: got .*full ones")):
      wrong = shared._replace(prefixes=shared.prefixes._replace(**changes))
      with self.assertRaisesRegex(ValueError, f"cache_metadata.{words}"):
        run(wrong)
    with self.assertRaisesRegex(ValueError, "cache_metadata.prefixes: got tuple"):
      run(shared._replace(prefixes=(1, 2)))

  def test_numbers_under_jit(self):
    query, cache, _, shared = call(0)
    flag = jax.jit(lambda x: page_checks.flag(cache, x, query.shape[0]))
    self.assertFalse(flag(shared))
    self.assertTrue(flag(shared._replace(prefixes=shared.prefixes._replace(
        page_tables=shared.prefixes.page_tables + 1))))

  def test_find(self):
    tables, counts = np.zeros((3, 4), np.int32), np.ones(3, np.int32)
    for arguments, words in (((tables[0], counts), "page_tables"), ((tables, counts + 4), "0 to 4"),
                             ((tables, counts[:2]), "page_counts"),
                             ((tables, counts, 0), "num_levels"),
                             ((tables, counts, 1, 0), "min_requests")):
      with self.assertRaisesRegex(ValueError, words):
        prefixes.find(*arguments)


class HopperTest(absltest.TestCase):
  """See gpu_paged_test for values."""

  def test_the_kernel_and_its_limits(self):
    tables = np.arange(64, dtype=np.int32).reshape(4, 16)
    tables[:, :8] = tables[0, :8]
    metadata = PagesMetadata(tables, np.full(4, 256, np.int32), np.arange(5, dtype=np.int32))
    cache = jax.eval_shape(lambda: pages.init(PagesV2, 64, 16, Heads(K, 64, 64), "bfloat16"))
    query = jax.ShapeDtypeStruct((4, H, 64), "bfloat16")
    def asked(tables, blocks=None):
      found = prefixes.find(tables, np.full(4, 15))
      return str(explain(query, None, None, mechanism="ragged_page_attention_v2", layout="thd",
                         cache_view=cache, cache_metadata=metadata._replace(
                             page_tables=tables, prefixes=found), block_sizes=blocks,
                         metadata=OperationMetadata(platform="gpu", compute_capability="9.0")))
    self.assertIn("by paged.gpu, which", asked(tables))
    wide = np.pad(tables, ((0, 0), (0, 500_000)))
    self.assertIn("cache_metadata.prefixes, as 4 requests: 4 queries and page tables of "
                  "[4, 500016]", asked(wide, BlockSizes(block_q=1, block_kv=64)))


if __name__ == "__main__":
  absltest.main()
