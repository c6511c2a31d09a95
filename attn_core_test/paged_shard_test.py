# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages sharded over a mesh: equal to one device, and nothing is sent.

Letters: G groups, R requests of a group, P pages, T tokens, H query heads, K key heads, D width.
"""

import functools
import re
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV1,
                       PagesV2, PagesV3, PartitionAxis, attention, explain, page_attention,
                       ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.autodiff import paged as autodiff_paged
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import pages
from attn_core.caches.paged import request_groups, validate
from attn_core.sharding import paged as shard_paged
from attn_core.types import PagedOperands
from attn_core_test import sampling
from attn_core_test.paged_shard_cases import (CASES, TABLE_WIDTH, PAGE, POOL, R, SENT, TOKENS, Case,
                                              assert_near, mesh_of, run, values)


@functools.cache
def on_one_device(function, case: Case):
  return function(case, None)


class EqualityTest(parameterized.TestCase):

  @parameterized.named_parameters(*[(name, name) for name in CASES])
  def test_values_and_gradients_are_those_of_one_device(self, name):
    function, case, sizes = CASES[name]
    assert_near(function(case, mesh_of(**sizes)), on_one_device(function, case))

  def test_a_group_equals_a_call_of_its_own(self):
    case = Case(G=4, layout=PagesV3, K=1)
    query, key, value, cache, sinks = case.arrays()
    out, lse, held = on_one_device(values, case)
    for g in range(4):
      tokens, part = slice(g * TOKENS, (g + 1) * TOKENS), slice(g * POOL, (g + 1) * POOL)
      metadata = jax.tree.map(lambda x, g=g: x[g], case.metadata())
      want = ragged_page_attention_v3(
          *(x[tokens] for x in (query, key, value)), PagesV3(cache.pages[part]), metadata,
          PagedOptions(sliding_window=(7, 0), softmax_aux=sinks, block_sizes=BlockSizes(4, 8),
                       logits_soft_cap=3.0, return_lse=True))
      np.testing.assert_array_equal(out[tokens], want.attention_outputs)
      np.testing.assert_array_equal(lse[:, tokens], want.lse)
      np.testing.assert_array_equal(held[part], want.cache_view.pages)

  def test_vmap(self):
    case = Case(grouped=False)
    query, _, _, cache, _ = case.arrays()
    def mapped(mesh):
      options = PagedOptions(metadata=OperationMetadata(mesh=mesh), block_sizes=BlockSizes(4, 8))
      return jax.vmap(jax.value_and_grad(lambda query: ragged_page_attention_v2(
          query, cache, case.metadata(), options).attention_outputs.sum()))(
              jnp.stack([query, 2 * query]))
    for x, y in zip(mapped(mesh_of(tp=2)), mapped(None)):
      np.testing.assert_allclose(x, y, rtol=3e-6, atol=3e-6)

  def test_a_wrong_page_never_reaches_another_group(self):
    metadata = request_groups.stack(*[
        PagesMetadata(np.array([[page]], np.int32), np.ones(1, np.int32)) for page in (2, -1)])
    self.assertEqual(request_groups.with_pool_ids(metadata, 4).page_tables.ravel().tolist(), [1, 2])
    # In a joined pool it stays outside: of two requests with two pages each, the first page is
    # wrong.
    tables = np.array([[[2, 0]], [[-1, 1]]], np.int32)
    metadata = PagesMetadata(tables, np.full((2, 1), 4, np.int32))
    joined = request_groups.joined(metadata, 4)
    self.assertEqual(joined.page_tables.tolist(), [[-1, 0], [-1, 3]])
    numbers = jnp.arange(1.0, 17).reshape(1, 4, 2, 2)
    cache = PagesV1(numbers, -numbers)
    held = jax.jit(pages.to_dense)(cache, joined)
    for row, page in ((0, 0), (1, 3)):
      np.testing.assert_array_equal(held[0][row, :2], 0)
      np.testing.assert_array_equal(held[0][row, 2:, 0], numbers[0, page])
    back = jax.jit(pages.from_dense)(jax.tree.map(jnp.zeros_like, cache), *held, joined)
    own = np.isin(np.arange(4), (0, 3))[:, None, None]
    np.testing.assert_array_equal(back.value_pages, np.where(own, -numbers, 0))
    with self.assertRaisesRegex(ValueError, r"page_tables: got \[\[-1, 0\].*page ids from 0 to 3"):
      page_attention(np.ones((2, 1, 2), np.float32), cache, joined)

  def test_groups_joined_are_requests_of_one_pool(self):
    case = Case(G=4, layout=PagesV1)
    query, _, _, cache, sinks = case.arrays()
    out, _ = on_one_device(values, case)
    joined = request_groups.joined(case.single(), 4 * POOL)
    want = page_attention(query, cache, joined, PagedOptions(
        sliding_window=(7, 0), softmax_aux=sinks, block_sizes=BlockSizes(4, 8),
        logits_soft_cap=3.0))
    np.testing.assert_array_equal(out, want.attention_outputs)
    dense = jax.jit(pages.to_dense)
    held = dense(cache, joined)
    back = jax.jit(pages.from_dense)(jax.tree.map(jnp.zeros_like, cache), *held, joined)
    jax.tree.map(np.testing.assert_array_equal, dense(back, joined), held)
    self.assertTrue(np.asarray(held[0])[0].any())

  def test_slots_of_groups_are_those_of_their_parts_of_the_pool(self):
    case = Case(G=4)
    metadata, cache = case.metadata(), case.arrays()[3]
    whole = jax.jit(lambda metadata: request_groups.slots(cache, metadata, 4 * TOKENS))
    one = jax.jit(lambda metadata: pages.slots(metadata, PAGE, TOKENS))
    got = np.asarray(whole(metadata)).reshape(4, TOKENS)
    for g in range(4):
      local = np.asarray(one(jax.tree.map(lambda x, g=g: x[g], metadata)))
      np.testing.assert_array_equal(got[g], np.where(local < 0, -1, local + g * POOL * PAGE))
    tables = metadata.page_tables.copy()
    tables[0, 0, 2] = POOL  # This page is the next group's; it would hold the first new token.
    wrong = whole(metadata._replace(page_tables=tables))
    np.testing.assert_array_equal(wrong[:3], [got[0, 0], got[0, 1], -1])


class PlacementTest(parameterized.TestCase):

  def test_nothing_is_sent_and_the_cache_is_written_in_place(self):
    case, mesh = Case(G=2, layout=PagesV3, K=4), mesh_of(dp=2, tp=4)
    like = lambda x, *spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(
        mesh, P(*spec)))
    query, key, value, cache, sinks = case.arrays()
    shapes = (like(query, "dp", "tp"), like(key, "dp", "tp"), like(value, "dp", "tp"),
              PagesV3(like(cache.pages, "dp", None, "tp")), like(sinks, "tp"))
    compiled = jax.jit(functools.partial(run, case, mesh), donate_argnums=3).lower(
        *shapes).compile()
    text = compiled.as_text()
    self.assertEmpty(re.findall(SENT, text))
    self.assertIn("input_output_alias={", text)
    self.assertGreaterEqual(compiled.memory_analysis().alias_size_in_bytes, cache.pages.nbytes // 8)

  def explained(self, case: Case, mesh, **arguments):
    query, key, value, cache, _ = case.arrays()
    if case.layout is PagesV2:
      key = value = None
    return explain(query, key, value, layout="thd", cache_view=cache, cache_metadata=case.metadata(
        ), metadata=OperationMetadata(mesh=mesh, **arguments))

  def test_explain_reports_what_is_sharded_and_what_is_not(self):
    explanation = str(self.explained(Case(G=4, H=8), mesh_of(fsdp=2, dp=2, tp=2)))
    for words in ("groups of requests over fsdp=2 * dp=2", "query heads over tp=2",
                  "key heads over tp=2"):
      self.assertIn(words, explanation)
    explanation = str(self.explained(Case(G=1, K=1, grouped=False), mesh_of(dp=2, tp=2, sp=2)))
    self.assertIn("  query heads over tp=2", explanation)
    self.assertNotIn("key heads over", explanation)
    for words in ("'dp' does not shard dimension 0 of cache_metadata: all requests are one group",
                  "'tp' does not shard dimension 2 of cache_view: there is one key head",
                  "'sp' does not shard dimension 1 of query: a request's keys stay on one device"):
      self.assertIn(words, explanation)

  @parameterized.parameters(
      (Case(G=3), dict(dp=2), {}, "3 groups of requests over dp=2"),
      (Case(H=6, K=3), dict(tp=2), {}, "3 key heads over tp=2"),
      (Case(H=3, K=1), dict(tp=2), {}, "1 key heads over tp=2"),
      (Case(H=8, K=2), dict(tp=4), {}, "2 key heads over tp=4 .*repeat_key_value"),
      (Case(layout=PagesV3, K=2, scales="token"), dict(tp=2), {},
       "2 key heads over tp=2.*rows of a page"),
      (Case(), dict(tp=2), dict(partition_axis=PartitionAxis(kv_head_axis=None)),
       "2 key heads over tp=2"))
  def test_what_does_not_divide_is_refused_by_name(self, case, sizes, arguments, words):
    explanation = self.explained(case, mesh_of(**sizes), **arguments)
    name = ("ragged_page_attention_v3" if case.layout is PagesV3 else "ragged_page_attention_v2")
    self.assertIsNone(explanation.chosen)
    self.assertRegex(str(explanation), f"{name} +{words}")
    query, key, value, cache, _ = case.arrays()
    key, value = (key, value) if case.layout is PagesV3 else (None, None)
    with self.assertRaisesRegex(NotImplementedError, f"mechanism='{name}' .*{words}"):
      attention(query, key, value, mechanism=name, layout="thd", cache_view=cache,
                cache_metadata=case.metadata(),
                metadata=OperationMetadata(mesh=mesh_of(**sizes), **arguments))

  def test_partition_rules_choose_the_axes(self):
    axes = PartitionAxis(batch_axis="x", head_axis="y", kv_head_axis="y")
    explanation = str(self.explained(Case(G=4), mesh_of(y=2, x=2), partition_axis=axes))
    self.assertIn("groups of requests over x=2", explanation)
    self.assertIn("key heads over y=2", explanation)

  def test_a_mesh_whose_axes_are_explicit(self):
    case = Case(G=2)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2,
                         devices=jax.devices()[:4])
    query, _, _, cache, sinks = case.arrays()
    want = on_one_device(values, case)
    with jax.set_mesh(mesh):
      got = jax.jit(lambda query, cache, sinks: run(
          case, mesh, query, None, None, cache, sinks))(query, cache, sinks)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)

  def test_limits_of_the_tpu_kernel_are_for_one_device(self):
    mesh = AbstractMesh((2, 2), ("dp", "tp"))
    arguments = dict(platform="tpu", mesh=mesh)
    query = jax.ShapeDtypeStruct((8, 4, 256), jnp.bfloat16)
    metadata = PagesMetadata(jnp.zeros((2, 4, 4), jnp.int32), jnp.zeros((2, 4), jnp.int32))
    for page, words in ((16, "by paged.tpu"), (10**4, "by paged.xla.*10000 tokens")):
      pool = jnp.zeros((2, page, 4, 256), jnp.bfloat16)
      explanation = explain(query, None, None, layout="thd", cache_view=PagesV2(pool),
                     cache_metadata=metadata, metadata=OperationMetadata(**arguments))
      self.assertRegex(str(explanation), words)


@sampling.slow("pages over four TPU chips")
@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(absltest.TestCase):

  def test_the_tpu_kernel_on_four_chips(self):
    """Compiles forward and backward for v5e, groups and heads over two chips each."""
    mesh = Mesh(np.array(static_profile.devices("v5e")[:4]).reshape(2, 2), ("dp", "tp"))
    def like(dtype, shape, *spec):
      return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    query = like("bfloat16", (64, 16, 128), "dp", "tp")
    cache = PagesV2(like("bfloat16", (256, 16, 16, 128), "dp", None, "tp"))
    metadata = PagesMetadata(*(like("int32", (2, *x), "dp") for x in ((16, 32), (16,), (17,))))
    options = PagedOptions(metadata=OperationMetadata(platform="tpu", mesh=mesh))
    def gradient(query, cache, metadata):
      return jax.grad(lambda *x: ragged_page_attention_v2(
          *x, metadata, options).attention_outputs.astype(jnp.float32).sum(), (0, 1))(query, cache)
    text = jax.jit(gradient).trace(query, cache, metadata).lower(
        lowering_platforms=("tpu",)).compile().as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)
    self.assertEmpty(re.findall(SENT, text))


class GroupsOfADeviceTest(parameterized.TestCase):

  @parameterized.parameters((1, False, 7), (1, True, 7), (4, True, 7))
  def test_a_kernel_call_has_the_tokens_of_one_group(self, groups, grouped, tokens):
    case = Case(G=groups, grouped=grouped)
    query, _, _, cache, _ = case.arrays()
    found = shard_paged.local_shapes(PagedOperands(query, cache, case.metadata()), None,
                                     pages.heads_of(cache))
    self.assertEqual(found.query.shape, (tokens, *query.shape[1:]))
    self.assertEqual(found.metadata.page_tables.shape, (R, TABLE_WIDTH))

  @parameterized.parameters((None, True), (1, True), (2, False))
  def test_the_kernel_for_tpus_writes_tokens_of_one_group_only(self, groups, writes):
    leading = () if groups is None else (groups,)
    metadata = PagesMetadata(*(jax.ShapeDtypeStruct((*leading, *x), jnp.int32)
                               for x in ((4, 2), (4,), (5,))))
    cache = jax.eval_shape(lambda: pages.init(PagesV3, 16, 64, Heads(4, 128, 128)))
    query, key = (jax.ShapeDtypeStruct((8, heads, 128), jnp.bfloat16) for heads in (8, 4))
    call = functools.partial(ragged_page_attention_v3, options=PagedOptions(
        metadata=OperationMetadata(platform="tpu")))
    with mock.patch.object(autodiff_paged, "attend_writing",
                           wraps=autodiff_paged.attend_writing) as writer:
      jax.eval_shape(call, query, key, key, cache, metadata)
    self.assertEqual(writer.called, writes)


class LowerTest(parameterized.TestCase):

  @parameterized.product(platform=("tpu", "gpu"), layout=(PagesV2, PagesV3))
  def test_kernels_on_a_mesh(self, platform, layout):
    """Lowers for chips that are not here, groups and heads over two devices each."""
    metadata = PagesMetadata(*(jax.ShapeDtypeStruct(x, jnp.int32)
                               for x in ((2, 4, 2), (2, 4), (2, 5))))
    cache = jax.eval_shape(lambda: pages.init(layout, 16, 64, Heads(4, 128, 128)))
    query, key = (jax.ShapeDtypeStruct((8, heads, 128), jnp.bfloat16) for heads in (8, 4))
    options = PagedOptions(metadata=OperationMetadata(
        mesh=mesh_of(dp=2, tp=2), platform=platform,
        compute_capability="9.0" if platform == "gpu" else None))
    call, arrays = ((ragged_page_attention_v3, (query, key, key)) if layout is PagesV3 else
                    (ragged_page_attention_v2, (query,)))
    text = jax.jit(functools.partial(call, options=options)).trace(
        *arrays, cache, metadata).lower(
            lowering_platforms=("cuda" if platform == "gpu" else "tpu",)).as_text()
    self.assertRegex(text, "mosaic_gpu" if platform == "gpu" else "tpu_custom_call")
    self.assertEmpty(re.findall(SENT.replace("-", "_"), text))


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(context_lens=np.ones(R, np.int32)), "context_lens: got int32.3.*leading axis of 4"),
      (dict(num_requests=np.array(1, np.int32)), "num_requests: got int32.*leading axis of 4"),
      (dict(query_start_loc=np.zeros((4, R), np.int32)), "query_start_loc: .*R . 1"),
      (dict(page_tables=np.full((4, R, TABLE_WIDTH), POOL, np.int32)), "page_tables: .*0 to 7"),
      (dict(page_tables=np.zeros((4, R), np.int32)), "context_lens: got int32.4, 3."))
  def test_metadata(self, changes, words):
    case = Case(G=4)
    query, _, _, cache, _ = case.arrays()
    with self.assertRaisesRegex(ValueError, f"cache_metadata.{words}"):
      ragged_page_attention_v2(query, cache, case.metadata()._replace(**changes))

  def test_parts_that_groups_do_not_divide(self):
    case = Case(G=3)
    query, _, _, cache, _ = case.arrays()
    metadata = case.metadata()
    for arrays, words in (((query[:-1], cache), "query: got 20 tokens"),
                          ((query, PagesV2(cache.pages[:-1])), "cache_view: got 23 pages")):
      with self.assertRaisesRegex(ValueError, words):
        ragged_page_attention_v2(*arrays, metadata)

  def test_groups_where_one_pool_is_expected(self):
    case = Case(G=4)
    cache, metadata = case.arrays()[3], case.metadata()
    for call in (lambda: pages.slots(metadata, PAGE, 8), lambda: pages.to_dense(cache, metadata),
                 lambda: pages.from_dense(cache, *[np.zeros((R, 4, 2, 8))] * 2, metadata)):
      with self.assertRaisesRegex(ValueError, "page_tables: got int32.4, 3.*caches.groups"):
        call()

  def test_a_flag_under_jit(self):
    case = Case(G=4)
    cache, metadata = case.arrays()[3], jax.tree.map(jnp.asarray, case.metadata())
    wrong = jax.jit(lambda metadata: validate.flag(cache, metadata, 4 * TOKENS))
    self.assertFalse(wrong(metadata))
    self.assertFalse(validate.flag(cache, case.metadata(), 4 * TOKENS))
    lengths = metadata.context_lens.at[3, 0].set(TABLE_WIDTH * PAGE + 1)
    self.assertTrue(wrong(metadata._replace(context_lens=lengths)))


if __name__ == "__main__":
  absltest.main()
