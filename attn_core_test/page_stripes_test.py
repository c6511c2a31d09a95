# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests whose pages are striped over several devices, against the same on one device.

Letters: G groups, R requests of a group, T tokens, H query heads, K key heads, D width.
"""

import functools
import re
from typing import NamedTuple
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV1,
                       PagesV2, PagesV3, attention, explain, ragged_page_attention_v2,
                       ragged_page_attention_v3, score_mods)
from attn_core.autodiff import paged as autodiff_paged
from attn_core.caches import pages
from attn_core.caches.paged import allocator, page_stripes, request_groups, validate
from attn_core.kernels.common import paged_operands
from attn_core.kernels.gpu.split_kv import paged as gpu_paged
from attn_core.kernels.tpu.ragged import paged as tpu_paged
from attn_core.kernels.xla import paged_forward
from attn_core.mechanisms import paged as mechanism
from attn_core.types import PagedSpec
from attn_core_test.paged_shard_cases import (SENT, assert_near, gradients, mesh_of, run,
                                             values)
from attn_core_test.tpu_interpret import interpreted

jax.config.update("jax_num_cpu_devices", 8)

PAGE, D, R, TABLE_WIDTH, PART = 4, 8, 4, 4, 8  # PART: pages of one stripe of a group
# Per group: queries and lengths of its requests, and the number of rows in use.
GROUPS = (((5, 1, 0, 3), (29, 5, 7, 13), 4), ((2, 4, 1, 9), (12, 4, 1, 99), 3))
LENGTHS = ((29, 0, 7, 16), (1, 24, 4, 5))  # of requests with one query each
TOKENS = 10


class Case(NamedTuple):
  """Arrays of G groups, each with `stripes` stripes."""

  layout: type = PagesV2
  G: int = 1
  stripes: int = 2
  H: int = 4
  K: int = 2
  window: tuple[int, int] | None = (7, 0)
  dtype: str = "float32"
  scales: str | None = None

  def tables(self, lengths) -> np.ndarray:
    """Returns tables [stripes, R, pages per request] from an allocator for every stripe."""
    found = []
    for w in range(self.stripes):
      pool, stripe = allocator.create(PART, PAGE), page_stripes.Stripe(w, self.stripes, PAGE)
      for name in np.random.default_rng(w).permutation(R):
        pool = allocator.add(pool, name)
        pool, _ = allocator.extend(pool, name, page_stripes.held(stripe, int(lengths[name])))
      table = allocator.table(pool, range(R), TABLE_WIDTH)
      dead = np.arange(TABLE_WIDTH) >= [[len(pool.requests[name].pages)] for name in range(R)]
      found.append(np.where(dead, 10**6, table).astype(np.int32))
    return np.stack(found)

  def single(self) -> PagesMetadata:
    """Metadata of requests with one query each, T = G * R."""
    return request_groups.stack(*(
        PagesMetadata(self.tables(lengths), np.array(lengths, np.int32))
        for lengths in LENGTHS[:self.G]))

  def metadata(self) -> PagesMetadata:
    found = []
    for queries, lengths, used in GROUPS[:self.G]:
      starts = np.cumsum([0, *queries]).astype(np.int32)
      live = np.where(np.arange(R) < used, lengths, 0)
      found.append(PagesMetadata(self.tables(live), np.array(lengths, np.int32), starts,
                                 np.array(used, np.int32)))
    return request_groups.stack(*found)

  @functools.cache
  def arrays(self):
    """Returns query, key, value, cache, sinks."""
    rng, tokens = np.random.default_rng(1), self.G * (
        R if self.layout is PagesV1 else TOKENS)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), self.dtype)
    query, key, value = (array(tokens, n, D) for n in (self.H, self.K, self.K))
    pool = self.G * self.stripes * PART
    empty = pages.init(self.layout, pool, PAGE, Heads(self.K, D, D),
                       "int8" if self.scales else self.dtype, self.scales)
    cache = jax.jit(pages.append)(
        empty, array(pool * PAGE, self.K, D), array(pool * PAGE, self.K, D),
        jnp.arange(pool * PAGE))
    return query, key, value, cache, jnp.asarray(rng.normal(size=self.H), jnp.float32)


def whole(case: Case) -> PagesMetadata:
  """Returns the case's metadata without stripes."""
  metadata = case.single() if case.layout is PagesV1 else case.metadata()
  return request_groups.whole(metadata, case.G * case.stripes * PART, np)


CASES = {
    "groups_heads_and_stripes": (gradients, Case(G=2), dict(dp=2, tp=2, sp=2)),
    "two_stripes_a_device_no_window": (values, Case(stripes=4, window=None), dict(sp=2)),
    "one_query": (values, Case(PagesV1, stripes=4), dict(sp=4)),
    "writes": (gradients, Case(PagesV3, G=2), dict(dp=2, sp=2)),
    "writes_8_bits_two_stripes_a_device": (
        values, Case(PagesV3, stripes=4, K=4, scales="token"), dict(tp=2, sp=2)),
    "16_bits": (values, Case(stripes=2, dtype="bfloat16"), dict(sp=2)),
}


class EqualityTest(parameterized.TestCase):

  @parameterized.named_parameters(*[(name, name) for name in CASES])
  def test_values_and_gradients_are_those_of_one_device(self, name):
    function, case, sizes = CASES[name]
    assert_near(function(case, mesh_of(**sizes)), function(case, None, whole(case)),
                3e-6 if case.dtype == "float32" else 1e-2)

  @parameterized.parameters((Case(G=2),), (Case(PagesV3, stripes=4),))
  def test_stripes_on_one_device_only_place_pages(self, case):
    got, want = values(case, None), values(case, None, whole(case))
    for x, y in zip(got, want, strict=True):
      np.testing.assert_array_equal(x, y)

  def test_metadata_that_is_traced(self):
    case, mesh = Case(stripes=2), mesh_of(sp=2)
    got = jax.jit(functools.partial(run, case, mesh))(*case.arrays(), case.metadata())
    for x, y in zip(jax.tree.leaves(got), values(case, mesh), strict=True):
      np.testing.assert_array_equal(x, y)

  def test_tokens_written_before_the_call_are_read_by_it(self):
    case = Case(G=2, stripes=2)
    query, key, value, cache, _ = case.arrays()
    written = pages.append(cache, key, value, request_groups.slots(
        cache, case.metadata(), query.shape[0]))
    held = pages.to_dense(written, request_groups.joined(case.metadata(), pages.num_pages(cache)))
    for x, new in zip(held, (key, value)):
      for g, (queries, lengths, used) in enumerate(GROUPS):
        ends = np.cumsum(queries) + g * TOKENS
        for r in range(used):
          np.testing.assert_array_equal(x[g * R + r, lengths[r] - queries[r]:lengths[r]],
                                        new[ends[r] - queries[r]:ends[r]])

  def test_kernels_on_single_stripes(self):
    """Compares the TPU kernel with XLA on each stripe; some stripes have no key of a request."""
    case = Case(stripes=3)
    lengths = np.array([29, 1, 5, 0], np.int32)
    tables = case.tables(lengths)
    query, _, _, cache, _ = case.arrays()
    spec = PagedSpec(D**-0.5, None, True, (None, None), jnp.float32, None)
    def attend(forward, **changes):
      return forward(paged_operands.PagedOperands(query[:R], **changes), spec, Heads(case.K, D, D),
                     BlockSizes(block_kv=8))
    empty = 0
    for w in range(case.stripes):
      operands = dict(cache=PagesV2(cache.pages[w * PART:(w + 1) * PART]), metadata=PagesMetadata(
          jnp.asarray(tables[w]), jnp.asarray(lengths)), stripe=page_stripes.Stripe(
              *map(jnp.int32, (w, case.stripes, PAGE))))
      want = attend(paged_forward.forward, **operands)
      with interpreted():
        got = attend(mechanism.tpu_forward(), **operands)
      for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
      empty += int((want.lse == -jnp.inf).all((1, 2)).sum())
    self.assertEqual(empty, 3 + 1 + 2)  # stripes without a key of their request

  def test_only_results_are_sent_and_the_cache_is_written_in_place(self):
    case, mesh = Case(PagesV3, stripes=4, K=4), mesh_of(tp=2, sp=4)
    like = lambda x, *spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(
        mesh, P(*spec)))
    query, key, value, cache, sinks = case.arrays()
    shapes = (like(query, None, "tp"), like(key, None, "tp"), like(value, None, "tp"),
              PagesV3(like(cache.pages, "sp", None, "tp")), like(sinks, "tp"))
    compiled = jax.jit(functools.partial(run, case, mesh), donate_argnums=3).lower(
        *shapes).compile()
    text = compiled.as_text()
    self.assertEqual(set(re.findall(SENT, text)), {"all-reduce"})
    self.assertIn("input_output_alias={", text)
    self.assertGreaterEqual(compiled.memory_analysis().alias_size_in_bytes, cache.pages.nbytes // 8)
    self.assertLess(compiled.memory_analysis().temp_size_in_bytes, cache.pages.nbytes)


class StripeTest(parameterized.TestCase):

  @parameterized.product(of=(1, 2, 3), unit=(1, 4))
  def test_positions_and_tokens(self, of, unit):
    positions = np.arange(3 * of * unit + 2)
    for number in range(of):
      stripe = page_stripes.Stripe(number, of, unit)
      own = positions[positions // unit % of == number]
      np.testing.assert_array_equal(page_stripes.position_of(stripe, np.arange(len(own))), own)
      for position in range(len(positions) + 1):
        self.assertEqual(page_stripes.held(stripe, position), (own < position).sum())
      np.testing.assert_array_equal(page_stripes.held(stripe, jnp.asarray(positions)),
                                    [(own < position).sum() for position in positions])

  def test_kernels_get_the_number_of_tokens_in_their_stripe(self):
    lengths = np.arange(3 * PAGE * 2)
    for get, kernel in ((mechanism.tpu_forward, tpu_paged), (mechanism.gpu_forward, gpu_paged)):
      for number in range(3):
        stripe = page_stripes.Stripe(number, 3, PAGE)
        operands = paged_operands.PagedOperands(
            None, None, PagesMetadata(None, jnp.asarray(lengths)), stripe=stripe)
        with mock.patch.object(kernel, "forward", lambda operands, *_: operands):
          found = get()(operands, None, None, None)
        self.assertIsNone(found.stripe)
        np.testing.assert_array_equal(found.metadata.context_lens, [
            sum(at // PAGE % 3 == number for at in range(length)) for length in lengths])

  def test_no_stripe_holds_every_token(self):
    self.assertEqual(page_stripes.held(None, 7), 7)
    self.assertEqual(page_stripes.position_of(None, 7), 7)


class PlacementTest(parameterized.TestCase):

  def explained(self, case: Case, mesh, **arguments):
    query, _, _, cache, _ = case.arrays()
    return explain(query, None, None, layout="thd", cache_view=cache,
                   cache_metadata=case.metadata(), metadata=OperationMetadata(mesh=mesh),
                   **arguments)

  def test_explain_reports_sharded_keys(self):
    for mode in ("__train__", "__autoregressive__"):
      explanation = str(self.explained(Case(G=2), mesh_of(dp=2, tp=2, sp=2), mode=mode))
      for words in ("groups of requests over dp=2", "keys over sp=2", "query heads over tp=2"):
        self.assertIn(words, explanation)
      self.assertNotIn("does not shard", explanation)

  @parameterized.parameters(
      (Case(stripes=3), dict(sp=2), "1 groups of 3 stripes over one device and sp=2"),
      (Case(G=2), dict(sp=2), "2 groups of 2 stripes over one device and sp=2"))
  def test_what_does_not_divide_is_refused_by_name(self, case, sizes, words):
    explanation = self.explained(case, mesh_of(**sizes))
    self.assertIsNone(explanation.chosen)
    self.assertRegex(str(explanation), f"ragged_page_attention_v2 +{words}")
    query, _, _, cache, _ = case.arrays()
    with self.assertRaisesRegex(NotImplementedError, words):
      attention(query, None, None, mechanism="ragged_page_attention_v2", layout="thd",
                cache_view=cache, cache_metadata=case.metadata(),
                metadata=OperationMetadata(mesh=mesh_of(**sizes)))

  @parameterized.parameters(("tpu", None), ("gpu", "9.0"))
  def test_kernels_compute_one_query_a_request(self, platform, capability):
    cache = jax.eval_shape(lambda: pages.init(PagesV2, 32, 64, Heads(4, 128, 128)))
    query = jax.ShapeDtypeStruct((8, 16, 128), jnp.bfloat16)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    options = PagedOptions(metadata=OperationMetadata(
        mesh=mesh_of(tp=2, sp=2), platform=platform, compute_capability=capability))
    one = PagesMetadata(ints(1, 2, 8, 4), ints(1, 8))
    cases = [(one, {}, True), (one, dict(sliding_window=(99, 0)), False),
             (one._replace(query_start_loc=ints(1, 9)), {}, False)]
    if platform == "tpu":
      cases += [(one, dict(score_mod=score_mods.soft_cap(2.0)), True),
                (one, dict(score_mod=score_mods.alibi(np.ones(16, np.float32))), False)]
    for metadata, fields, kernel in cases:
      text = jax.jit(functools.partial(
          ragged_page_attention_v2, options=options._replace(**fields))).trace(
              query, cache, metadata).lower(
                  lowering_platforms=("cuda" if platform == "gpu" else "tpu",)).as_text()
      found = re.search("mosaic_gpu" if platform == "gpu" else "tpu_custom_call", text)
      self.assertEqual(found is not None, kernel)

  @parameterized.parameters((2, False), (None, True))
  def test_the_kernel_for_tpus_does_not_write_to_stripes(self, stripes, writes):
    cache = jax.eval_shape(lambda: pages.init(PagesV3, 32, 64, Heads(4, 128, 128)))
    query, key = (jax.ShapeDtypeStruct((8, heads, 128), jnp.bfloat16) for heads in (16, 4))
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    metadata = PagesMetadata(ints(1, *(() if stripes is None else (stripes,)), 8, 4), ints(1, 8))
    call = functools.partial(ragged_page_attention_v3, options=PagedOptions(
        metadata=OperationMetadata(mesh=mesh_of(sp=stripes or 1, tp=2), platform="tpu")))
    with (mock.patch.object(autodiff_paged, "attend", wraps=autodiff_paged.attend) as reader,
          mock.patch.object(autodiff_paged, "attend_writing",
                            wraps=autodiff_paged.attend_writing) as writer):
      jax.eval_shape(call, query, key, key, cache, metadata)
    self.assertEqual((reader.called, writer.called), (not writes, writes))


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(page_tables=np.full((2, 2, R, TABLE_WIDTH), PART, np.int32)), "page_tables: .*0 to 7"),
      (dict(page_tables=np.zeros((2, 0, R, TABLE_WIDTH), np.int32)),
       "page_tables: .*at least one stripe"),
      (dict(context_lens=np.full((2, R), 2 * TABLE_WIDTH * PAGE + 1, np.int32)),
       "context_lens: .*0 to 32"))
  def test_metadata(self, changes, words):
    case = Case(G=2)
    query, _, _, cache, _ = case.arrays()
    metadata = case.metadata()._replace(**changes)
    with self.assertRaisesRegex(ValueError, f"cache_metadata.{words}"):
      ragged_page_attention_v2(query, cache, metadata)
    if 0 not in metadata.page_tables.shape:
      self.assertTrue(jax.jit(lambda metadata: validate.flag(
          cache, metadata, query.shape[0]))(metadata))

  def test_pages_that_stripes_do_not_divide(self):
    case = Case(G=2)
    query, _, _, cache, _ = case.arrays()
    with self.assertRaisesRegex(ValueError, "cache_view: got 30 pages.*2 groups of 2 stripes"):
      ragged_page_attention_v2(query, PagesV2(cache.pages[:30]), case.metadata())

  def test_a_wrong_page_is_not_written_to_another_stripe(self):
    tables = np.zeros((1, 2, 1, 1), np.int32)
    tables[0, 0] = 1  # each stripe has one page
    metadata = PagesMetadata(tables, np.array([[5]], np.int32), np.array([[0, 5]], np.int32))
    cache = pages.init(PagesV2, 2, PAGE, Heads(1, D, D))
    self.assertEqual(request_groups.slots(cache, metadata, 5).tolist(), [-1] * 4 + [PAGE])


if __name__ == "__main__":
  absltest.main()
