# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages: against the dense oracle, the public kernels' references, and itself.

Letters: R requests, N pages per request, P pages, T tokens of a call, H query heads, K key heads,
D width.
"""

import functools
import importlib
import importlib.util
import sys
import types
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import checkify
from jax.experimental.pallas.ops.tpu.paged_attention import util as public_v1
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as public_v2
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, Heads, PagedOptions, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       attention, checkpoint_policy, explain, page_attention,
                       ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.caches import pages, quantize
from attn_core.caches.paged import validate
from attn_core.kernels.common import paged_operands
from attn_core.types import PagedSpec
from attn_core_test.paged_cases import Case


jax.config.update("jax_num_cpu_devices", 8)


RAGGED = {
    "window_sinks_cap": Case((9, 0, 17, 5), (9, 0, 5, 1), sinks=True, options=PagedOptions(
        sliding_window=(6, 0), logits_soft_cap=1.5, softmax_scale=0.7)),
    "both_sides_large_logits": Case((9, 0, 21), (9, 0, 5), options=PagedOptions(
        sliding_window=(3, 2), causal=False, softmax_scale=30.0)),
    "itself_in_pages_of_one_token": Case((5, 3), (4, 3), page=1, options=PagedOptions(
        sliding_window=(0, 0))),
    "not_causal_one_head": Case((5, 17), (4, 1), H=1, K=1, D=1, options=PagedOptions(causal=False)),
    "unused_rows_odd_pages": Case((13, 1), (7, 1), page=3, unused=3, rest=7, K=1),
    "distribution": Case((20, 11), (1, 5), distribution=(1, 1, 2), unused=2),
}
BLOCKS = BlockSizes(block_q=4, block_kv=8)


def run(mechanism, case, query, key, value, sinks):
  """(output, lse) by the mechanism; for v3 the queries' own tokens are in no page yet."""
  options = case.options._replace(softmax_aux=sinks, block_sizes=BLOCKS, return_lse=True)
  cache = PagesV1(key, value)
  metadata = case.metadata(single=mechanism == "v1")
  heads = Heads(case.K, case.D, case.D)
  if mechanism == "v1":
    output = page_attention(query, cache, metadata, options)
  elif mechanism == "v2":
    output = ragged_page_attention_v2(query, pages.convert(cache, PagesV2), metadata, options)
  else:
    mapping = pages.slots(metadata, case.page, query.shape[0])
    outside = jnp.where(mapping < 0, 10**6, mapping)
    flat = [x.reshape(case.K, -1, case.D) for x in (key, value)]
    new = [x.at[:, outside].get(mode="fill", fill_value=np.nan).swapaxes(0, 1) for x in flat]
    holes = [x.at[:, outside].set(np.nan, mode="drop").reshape(key.shape) for x in flat]
    output = ragged_page_attention_v3(
        query, *new, pages.convert(PagesV1(*holes), PagesV3, heads), metadata, options)
  return output.attention_outputs, output.lse


def with_gradients(function, case, wanted):
  """(*arrays) -> [output, lse, gradients...], those of a scalar that all of these reach."""
  rows = sum(case.queries)  # those of no request have no part
  weights = lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
  def loss(*arrays):
    found = function(*arrays)
    out, lse = found[0][:rows].astype(jnp.float32), found[1][:, :rows].astype(jnp.float32)
    return (out * weights(out)).sum() + jnp.where(
        lse == -jnp.inf, 0, lse * weights(lse)).sum(), found
  def everything(*arrays):
    (_, found), gradients = jax.value_and_grad(loss, wanted, has_aux=True)(*arrays)
    return [*found, *gradients]
  return everything


def both(function, case, arrays):
  """[output, lse, gradients...]."""
  wanted = tuple(i for i, x in enumerate(arrays) if x is not None)
  return jax.jit(with_gradients(function, case, wanted))(*arrays)


@functools.cache
def expected_of(name, table):
  case = table[name]
  with jax.enable_x64(True):
    arrays = tuple(None if x is None else x.astype(jnp.float64) for x in case.arrays())
    return [np.asarray(x) for x in both(case.oracle, case, arrays)]


class Frozen(dict):
  __hash__ = object.__hash__


RAGGED = Frozen(RAGGED)
SINGLE = Frozen({
    "window_sinks_cap_mqa": Case((9, 0, 32), (1,) * 3, rest=0, K=1, sinks=True,
                                 options=PagedOptions(sliding_window=(6, 0), logits_soft_cap=2.0)),
    "one": Case((1,), (1,), rest=0, page=1),
})


class OracleTest(parameterized.TestCase):

  def check(self, mechanism, name, table):
    case = table[name]
    got = both(functools.partial(run, mechanism, case), case, case.arrays())
    rows = sum(case.queries)
    self.assertFalse(np.asarray(got[0][rows:]).any())
    self.assertTrue((np.asarray(got[1][:, rows:]) == -np.inf).all())
    for index, (mine, want) in enumerate(zip(got, expected_of(name, table), strict=True)):
      # An output's row of no request is 0, and what is not live has no gradient.
      self.assertFalse(np.isnan(mine).any(), index)
      same = np.isfinite(want)
      np.testing.assert_array_equal(np.asarray(mine)[~same], want[~same])
      scale = max(1.0, np.abs(want[same]).max())
      np.testing.assert_allclose(np.asarray(mine)[same], want[same], rtol=1e-5, atol=5e-6 * scale,
                                 err_msg=str(index))

  @parameterized.parameters(*RAGGED)
  def test_ragged(self, name):
    self.check("v2", name, RAGGED)

  @parameterized.parameters("window_sinks_cap", "unused_rows_odd_pages")
  def test_ragged_that_writes(self, name):
    self.check("v3", name, RAGGED)

  @parameterized.parameters(("bfloat16", 1.5e-2), ("float16", 2e-3))
  def test_16_bits(self, dtype, tolerance):
    case = RAGGED["window_sinks_cap"]._replace(dtype=dtype)
    got = both(functools.partial(run, "v2", case), case, case.arrays())
    for mine, want in zip(got, expected_of("window_sinks_cap", RAGGED), strict=True):
      seen = np.isfinite(want)
      error = np.abs(np.asarray(mine, np.float64) - want)[seen].max()
      self.assertLess(error, tolerance * np.abs(want[seen]).max())

  @parameterized.parameters(*SINGLE)
  def test_page_attention(self, name):
    self.check("v1", name, SINGLE)


class DerivativesTest(absltest.TestCase):

  def test_forward_mode_and_second_derivatives(self):
    """Tangents of output, lse and all gradients, along a direction that moves what nobody sees."""
    case = RAGGED["window_sinks_cap"]._replace(lengths=(9, 5), queries=(4, 1))
    rng = np.random.default_rng(5)
    directions = [rng.normal(size=x.shape) for x in case.arrays()]
    def tangents(function, arrays):
      everything = with_gradients(function, case, (0, 1, 2, 3))
      moved = tuple(jnp.asarray(d, x.dtype) for d, x in zip(directions, arrays))
      return jax.jit(lambda a, d: jax.jvp(everything, a, d)[1])(arrays, moved)
    got = tangents(functools.partial(run, "v2", case), case.arrays())
    with jax.enable_x64(True):
      want = tangents(case.oracle, tuple(x.astype(jnp.float64) for x in case.arrays()))
    for index, (mine, right) in enumerate(zip(got, want, strict=True)):
      right = np.nan_to_num(np.asarray(right))  # rows of no request, where the oracle says NaN
      np.testing.assert_allclose(mine, right, rtol=2e-5, atol=2e-5 * max(1, np.abs(right).max()),
                                 err_msg=str(index))

  def test_saved_residuals_are_not_computed_anew(self):
    query, cache, metadata = plain(Case((9, 6), (4, 2), rest=2))
    run = lambda query, cache: ragged_page_attention_v2(
        2 * query, cache, metadata).attention_outputs.sum()
    def loops(*targets):
      policy = checkpoint_policy("save_only_these_names", targets)
      kept = jax.checkpoint(run, policy=policy)
      return str(jax.make_jaxpr(jax.grad(kept, (0, 1)))(query, cache)).count("while[")
    plain_loops = str(jax.make_jaxpr(jax.grad(run, (0, 1)))(query, cache)).count("while[")
    self.assertEqual(loops("attn_output", "attn_query"), plain_loops)
    self.assertGreater(loops("attn_query"), plain_loops)


def plain(case, dtype="float32"):
  """query, v2 cache, metadata, without NaN."""
  query, key, value, _ = (None if x is None else jnp.nan_to_num(x.astype(dtype))
                          for x in case.arrays())
  return query, pages.convert(PagesV1(key, value), PagesV2), case.metadata()


def _public_v3():
  """The module of tpu-inference's kernel v3, without the package around it, which needs vLLM."""
  found = importlib.util.find_spec("tpu_inference")
  if found is None:
    raise unittest.SkipTest("tpu-inference is not installed: pip install --no-deps tpu-inference")
  package = types.ModuleType("tpu_inference")
  package.__path__ = list(found.submodule_search_locations)
  with mock.patch.dict(sys.modules, {"tpu_inference": package}):
    return importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")


class MeaningTest(parameterized.TestCase):

  def test_shapes_and_meanings_are_those_of_the_public_ragged_kernel(self):
    case = Case((9, 17), (9, 1), rest=0, unused=2)
    query, cache, metadata = plain(case)
    tables = np.minimum(metadata.page_tables, case.pool - 1)
    want = public_v2.ref_ragged_paged_attention(
        query, cache.pages, *map(jnp.asarray, (metadata.context_lens, tables,
                                               metadata.query_start_loc, metadata.num_requests)),
        sm_scale=0.4, sliding_window=5, soft_cap=2.0)
    # There a window of W tokens holds the query's own.
    got = ragged_page_attention_v2(query, cache, metadata, PagedOptions(
        softmax_scale=0.4, sliding_window=(4, None), logits_soft_cap=2.0))
    np.testing.assert_allclose(got.attention_outputs, want, atol=1e-5)

  def test_shapes_and_meanings_are_those_of_the_public_kernel_that_writes(self):
    """What vLLM's own reference says for TPUs, where tpu-inference is installed."""
    public_v3 = _public_v3()
    case = Case((9, 17, 6), (9, 1, 2), rest=0, unused=1)
    _, wide, metadata = plain(case)
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(12, n, case.D)), jnp.float32)
                         for n in (case.H, case.K, case.K))
    cache = pages.convert(wide, PagesV3, Heads(case.K, case.D, case.D))
    metadata = metadata._replace(num_requests=None, distribution=np.array([0, 0, 3], np.int32))
    tables = np.minimum(metadata.page_tables, case.pool - 1)
    starts = np.maximum.accumulate(metadata.query_start_loc)
    want, held = public_v3.ref_ragged_paged_attention(
        query, key, value, cache.pages, *map(jnp.asarray, (
            metadata.context_lens, tables.reshape(-1), starts, metadata.distribution)),
        sm_scale=0.4, sliding_window=5, soft_cap=2.0)
    got = ragged_page_attention_v3(query, key, value, cache, metadata, PagedOptions(
        softmax_scale=0.4, sliding_window=(4, None), logits_soft_cap=2.0))
    np.testing.assert_allclose(got.attention_outputs, want, atol=1e-5)
    live = np.unique(tables[:3][np.arange(8) < -(-np.array(case.lengths)[:, None] // case.page)])
    np.testing.assert_array_equal(got.cache_view.pages[live], held[live])

  def test_shapes_and_meanings_are_those_of_the_public_decode_kernel(self):
    case = Case((9, 17, 1, 24), (1,) * 4, rest=0)
    query, key, value, _ = map(lambda x: None if x is None else jnp.nan_to_num(x), case.arrays())
    metadata = case.metadata(single=True)
    dense = [x.swapaxes(1, 2) for x in pages.to_dense(PagesV1(key, value), metadata)]
    want = public_v1.grouped_query_attention_reference(
        query * case.D**-0.5, *dense, jnp.asarray(metadata.context_lens), soft_cap=3.0)
    got = page_attention(query, PagesV1(key, value), metadata, PagedOptions(logits_soft_cap=3.0))
    np.testing.assert_allclose(got.attention_outputs, want, atol=1e-5)

  def test_a_window_of_any_int32_is_cut_nowhere(self):
    query, cache, metadata = plain(Case((9, 17), (9, 1), rest=0))
    wide, all_of_it = (ragged_page_attention_v2(query, cache, metadata, PagedOptions(
        sliding_window=window, causal=False)) for window in (2**31 - 1, None))
    np.testing.assert_array_equal(wide.attention_outputs, all_of_it.attention_outputs)

  def test_a_nan_reaches_those_who_see_it_and_no_other(self):
    case = Case((8, 9), (8, 9), rest=0)
    query, cache, metadata = plain(case)
    page = metadata.page_tables[0, 1]  # positions 4 to 7 of the first request
    for row in (0, 1):  # a key, a value
      spoilt = cache._replace(pages=cache.pages.at[page, 1, row].set(jnp.nan))
      run = jax.jit(lambda *a: ragged_page_attention_v2(*a, metadata, PagedOptions(
          sliding_window=(1, 0), block_sizes=BLOCKS)).attention_outputs)
      before, after = np.asarray(run(query, cache)), np.asarray(run(query, spoilt))
      seen = np.zeros(before.shape, bool)
      seen[5:7, :2] = True  # key head 0 is that of query heads 0 and 1
      self.assertTrue(np.isnan(after[seen]).all())
      np.testing.assert_array_equal(after[~seen], before[~seen])

  def test_bfloat16_sums_in_float32(self):
    """600 equal keys: in bfloat16 the sum of their weights would stop at 256."""
    length = 600
    cache = pages.init(PagesV3, 40, 16, Heads(1, 8, 8), jnp.bfloat16)
    metadata = PagesMetadata(np.arange(40, dtype=np.int32)[None], np.array([length], np.int32),
                             np.array([0, length], np.int32), None, np.array([0, 1, 1], np.int32))
    ones = jnp.ones((length, 1, 8), jnp.bfloat16)
    output = ragged_page_attention_v3(ones[:, [0, 0]], ones, ones, cache, metadata,
                                      PagedOptions(causal=False, return_lse=True))
    self.assertEqual(output.attention_outputs.dtype, jnp.bfloat16)
    np.testing.assert_array_equal(output.attention_outputs.astype(jnp.float32), 1)
    np.testing.assert_allclose(output.lse, np.log(length) + 8**0.5, rtol=1e-6)
    self.assertEqual(output.lse.shape, (2, length))

  @parameterized.product(layout=(PagesV1, PagesV2), kind=("tensor", "token"))
  def test_quantised_pages_are_read_by_their_scales(self, layout, kind):
    case = Case((9, 17, 3), (1,) * 3, rest=0)
    query, wide, _ = plain(case)
    heads, metadata = Heads(case.K, case.D, case.D), case.metadata(single=True)
    key, value = pages.to_dense(wide, metadata)
    cache = pages.init(layout, case.pool, case.page, heads, jnp.int8, kind)
    if kind == "tensor":
      cache = cache._replace(key_scales=abs(key).max() / 127, value_scales=abs(value).max() / 100)
      cache = pages.from_dense(cache, key, value, metadata)
    else:
      cache = pages.from_dense(cache, key, value, metadata)  # the write makes the scales
      stored, scales = zip(*(quantize.quantize(x, jnp.int8) for x in (key, value)))
      given = pages.from_dense(pages.init(layout, case.pool, case.page, heads, jnp.int8, kind),
                               *stored, metadata, scales)
      jax.tree.map(np.testing.assert_array_equal, cache, given)
    back = pages.from_dense(pages.init(PagesV1, case.pool, case.page, heads, jnp.float32),
                            *pages.to_dense(cache, metadata), metadata)
    want = page_attention(query, back, metadata).attention_outputs
    run = page_attention if layout is PagesV1 else ragged_page_attention_v2
    got = run(query, cache, metadata).attention_outputs
    np.testing.assert_allclose(got, want, atol=1e-6)
    if layout is PagesV2:  # the query has its gradient, and what is stored has none
      loss = lambda run, cache, q: jnp.sin(run(q, cache, metadata).attention_outputs).sum()
      np.testing.assert_allclose(
          jax.grad(functools.partial(loss, run, cache))(query),
          jax.grad(functools.partial(loss, page_attention, back))(query), atol=2e-6)
      with self.assertRaisesRegex(NotImplementedError, "cache_view: gradients .* quantized"):
        jax.grad(lambda scales: loss(run, cache._replace(key_scales=scales), query))(
            cache.key_scales)

  @parameterized.parameters(("float8_e4m3fn", "tensor"), ("int8", "token"))
  def test_new_tokens_are_stored_by_the_scales(self, dtype, kind):
    """v3 into 8 bits: what is written is what append writes, in place, and is attended to."""
    case = Case((9, 6), (4, 1), rest=2)
    heads, metadata = Heads(2, 6, 6), case.metadata()
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(7, n, 6)), jnp.float32) for n in (4, 2, 2))
    cache = pages.init(PagesV3, case.pool, case.page, heads, dtype, kind)
    if kind == "tensor":
      cache = cache._replace(key_scales=jnp.float32(0.5), value_scales=jnp.float32(0.25))
    run = jax.jit(lambda cache, *a: ragged_page_attention_v3(*a, cache, metadata),
                  donate_argnums=0)
    held = cache.pages.nbytes
    compiled = run.lower(cache, query, key, value).compile()
    self.assertIn("input_output_alias", compiled.as_text())
    self.assertGreaterEqual(compiled.memory_analysis().alias_size_in_bytes, held)
    want = pages.append(cache, key, value, pages.slots(metadata, case.page, 7))
    output = compiled(jax.tree.map(jnp.copy, cache), query, key, value)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(
        x.astype(jnp.float32), y.astype(jnp.float32)), output.cache_view, want)
    read = ragged_page_attention_v2(query, pages.convert(want, PagesV2, heads), metadata)
    np.testing.assert_array_equal(output.attention_outputs, read.attention_outputs)

  def test_values_of_another_width(self):
    case = Case((9, 1, 14), (1,) * 3, rest=0)
    query, key, value, _ = map(lambda x: None if x is None else jnp.nan_to_num(x), case.arrays())
    metadata, narrow = case.metadata(single=True), value[..., :3]
    def loss(value):
      out = page_attention(query, PagesV1(key, value), metadata).attention_outputs
      return (out[..., :3]**2).sum(), out
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    ((_, found), gradient), ((_, whole), of_whole) = run(narrow), run(value)
    self.assertEqual(found.shape, (3, 4, 3))
    np.testing.assert_allclose(found, whole[..., :3], atol=1e-6)
    np.testing.assert_allclose(gradient, of_whole[..., :3], atol=1e-6)

  def test_only_live_blocks_are_visited(self):
    """The trips of the loops, whatever the width of the table."""
    case = Case((9, 0, 17, 24), (9, 0, 5, 1), rest=0, options=PagedOptions())
    query, cache, metadata = plain(case)
    metadata = jax.tree.map(jnp.asarray, metadata._replace(
        page_tables=np.pad(metadata.page_tables, ((0, 0), (0, 1000)))))
    for window, want in (((None, None), (1 + 1 + 2) + (2 + 3) + 3),
                         ((5, 0), (1 + 1 + 2) + (2 + 2) + 1)):
      problem = paged_operands.block_inputs(paged_operands.PagedOperands(query, cache, metadata),
                          PagedSpec(1.0, window=window), Heads(2, 6, 6), (4, 2))
      visited = 0
      for r in range(4):
        for i in range(*map(int, paged_operands.query_blocks(problem, r))):
          begin, end = paged_operands.key_blocks(problem, paged_operands.query_block(problem, r, i))
          visited += int(end) - int(begin)
      self.assertEqual(visited, want)

  def test_gradients_take_linear_memory(self):
    tokens, length = 512, 4096
    metadata = PagesMetadata(np.arange(256, dtype=np.int32)[None], np.array([length], np.int32),
                             np.array([0, tokens], np.int32))
    query = jax.ShapeDtypeStruct((tokens, 4, 16), jnp.float32)
    cache = PagesV2(jax.ShapeDtypeStruct((256, 16, 4, 16), jnp.float32))
    loss = lambda q, c: ragged_page_attention_v2(q, c, metadata).attention_outputs.sum()
    memory = jax.jit(jax.grad(loss, (0, 1))).lower(query, cache).compile().memory_analysis()
    self.assertLess(memory.temp_size_in_bytes, 4 * 2**20)  # the scores would be 32 MiB

  def test_the_door_finds_the_mechanism_of_a_cache(self):
    query, cache, metadata = plain(Case())
    arguments = dict(layout="thd", cache_view=cache, cache_metadata=metadata)
    said = explain(query, None, None, **arguments)
    self.assertEqual(said.chosen, "ragged_page_attention_v2")
    self.assertIn("PagesV2: it reads a PagesV1", str(said))
    np.testing.assert_array_equal(
        attention(query, None, None, **arguments).attention_outputs,
        ragged_page_attention_v2(query, cache, metadata).attention_outputs)
    for changes, words in (
        (dict(bias=jnp.ones((1, 1, 1))), "bias"), (dict(init_bias=lambda: 1.0), "bias"),
        (dict(chunk_size=4), "chunk_size=4"),
        (dict(return_weights=True), "return_weights=True"), (dict(query_offset=1), "query_offset"),
        (dict(normalize_output=False), "normalize_output=False")):
      with self.assertRaisesRegex(NotImplementedError, words):
        attention(query, None, None, **arguments, **changes)


class TransformationTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.query, self.cache, self.metadata = plain(Case((9, 6), (4, 2), rest=2))
    self.mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

  def run_v2(self, query, cache, metadata):
    return ragged_page_attention_v2(query, cache, metadata).attention_outputs

  def gradient(self, query, cache, metadata):
    def loss(query, cache):
      out = self.run_v2(query, cache, metadata)
      return (out**2).sum(), out
    (total, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(query, cache)
    axes = jax.typeof(total).manual_axis_type.varying
    return (jax.lax.psum(total, tuple(axes)) if axes else total, out), gradients

  def test_requests_and_heads_over_devices(self):
    """In the caller's shard_map: requests, tables and pages of a device's own, and heads.

    Key and value rows of a head are neighbours, so the pages are cut like the heads.
    """
    arrays = (self.query, self.cache, self.metadata)
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), arrays)
    query, cache = P("x", "y"), PagesV2(P("x", None, "y"))
    spread = jax.shard_map(self.gradient, mesh=self.mesh, in_specs=(query, cache, P("x")),
                           out_specs=((P(), query), (query, cache)))
    (_, out), gradients = jax.jit(spread)(*two)
    (_, want), expected = jax.jit(self.gradient)(*arrays)
    for got, one in zip(*map(jax.tree.leaves, ((out, gradients), (want, expected))), strict=True):
      np.testing.assert_allclose(got, jnp.concatenate([one, one]), atol=1e-6)

  def test_maps_over_pools(self):
    pools = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), self.cache)
    run = lambda cache: self.run_v2(self.query, cache, self.metadata)
    mapped, gradient = jax.jit(jax.value_and_grad(
        lambda pools: (lambda x: (jnp.sin(x).sum(), x))(jax.vmap(run)(pools)), has_aux=True))(pools)
    one = jax.jit(jax.value_and_grad(lambda cache: (lambda x: (jnp.sin(x).sum(), x))(run(cache)),
                                     has_aux=True))
    for row in range(2):
      (_, want), of_pages = one(jax.tree.map(lambda x, row=row: x[row], pools))
      np.testing.assert_allclose(mapped[1][row], want, atol=1e-6)
      np.testing.assert_allclose(gradient.pages[row], of_pages.pages, atol=1e-6)

  def test_scans_over_layers(self):
    """A cache a layer, written in the scan: what an engine does."""
    heads = Heads(2, 6, 6)
    caches = jax.tree.map(lambda x: jnp.stack([x] * 3),
                          pages.init(PagesV3, 16, 4, heads, jnp.float32))
    metadata = self.metadata._replace(context_lens=np.array([4, 2], np.int32))
    def layer(x, cache):
      output = ragged_page_attention_v3(x, x[:, :2], x[:, 2:], cache, metadata)
      return x + output.attention_outputs, output.cache_view
    out, filled = jax.lax.scan(layer, self.query, caches)
    x = self.query
    for index in range(3):
      x, cache = layer(x, jax.tree.map(lambda x: x[0], caches))
      np.testing.assert_allclose(filled.pages[index], cache.pages, atol=1e-6)
    np.testing.assert_allclose(out, x, atol=1e-6)


class BatchInvarianceTest(parameterized.TestCase):
  """A request's output has the same bits in 200 random schedules."""

  R, N, PAGE, POOL, ROWS, TOKENS = 4, 8, 4, 40, 16, 29

  @parameterized.parameters((8, 2, 64), (4, 1, 64), (4, 1, 128))
  def test_what_is_in_dead_slots_changes_no_bit(self, H, K, D):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (
        (3, H, D), (K, 64, 16, D), (K, 64, 16, D)))
    lengths, tables = np.array([300, 17, 5], np.int32), np.arange(60, dtype=np.int32).reshape(3, 20)
    dead = np.ones((64, 16), bool)
    dead[tables] = np.arange(320).reshape(20, 16) >= lengths[:, None, None]
    attend = jax.jit(lambda x: page_attention(query, PagesV1(*(
        jnp.where(dead[None, ..., None], x, held) for held in (key, value))), PagesMetadata(
            tables, lengths)).attention_outputs)
    np.testing.assert_array_equal(attend(0.0), attend(jnp.nan))

  @parameterized.parameters(("float32", 160), ("bfloat16", 40))
  def test_schedules(self, dtype, schedules):
    rng = np.random.default_rng(0)
    heads = Heads(2, 64, 64)
    sinks = jnp.asarray(rng.normal(size=8), jnp.float32)
    texts = [[rng.normal(size=(self.TOKENS, h, 64)).astype(jnp.dtype(dtype)) for h in (8, 2, 2)]
             for _ in range(6)]
    options = PagedOptions(sliding_window=(11, 0), softmax_aux=sinks, logits_soft_cap=4.0,
                           block_sizes=BlockSizes(block_q=8, block_kv=16), return_lse=True)
    step = jax.jit(lambda cache, metadata, q, k, v: ragged_page_attention_v3(
        q, k, v, cache, metadata, options), donate_argnums=0)
    empty = pages.init(PagesV3, self.POOL, self.PAGE, heads, dtype)
    garbage = [jnp.full_like(empty.pages, x) for x in (jnp.nan, -jnp.inf, 7.0)]

    def play(requests, orders, held=empty.pages):
      """Outputs of each request; `requests`: text -> chunks; all in random rows and pages."""
      cache, done = PagesV3(held + 0), {text: 0 for text in requests}
      free = list(orders.permutation(self.POOL))
      tables = {text: [free.pop() for _ in range(self.N)] for text in requests}
      outputs = {text: [] for text in requests}
      chunks = {text: list(sizes) for text, sizes in requests.items()}
      while any(chunks.values()):
        ready = [text for text in chunks if chunks[text]]
        batch = list(orders.permutation(ready))[:orders.integers(1, self.R + 1)]
        arrays = [np.zeros((self.ROWS, *x.shape[1:]), x.dtype) for x in texts[0]]
        starts, lengths, table, start = [0], [], np.zeros((self.R, self.N), np.int32), 0
        taken = []
        for text in batch:
          size = chunks[text][0]
          if start + size > self.ROWS:
            continue
          chunks[text].pop(0)
          for mine, whole in zip(arrays, texts[text]):
            mine[start:start + size] = whole[done[text]:done[text] + size]
          table[len(taken)] = tables[text]
          taken.append((text, start, size))
          done[text], start = done[text] + size, start + size
          starts.append(start)
          lengths.append(done[text])
        pad = lambda x, value: np.array(x + [value] * (self.R - len(taken)), np.int32)
        metadata = PagesMetadata(table, pad(lengths, 0), pad(starts, start),
                                 np.array([len(taken)], np.int32))
        output = step(cache, metadata, *arrays)
        cache = output.cache_view
        out, lse = np.asarray(output.attention_outputs), np.asarray(output.lse)
        for text, begin, size in taken:
          outputs[text].append((out[begin:begin + size], lse[:, begin:begin + size]))
      return {text: (np.concatenate([out for out, _ in parts]),
                     np.concatenate([lse for _, lse in parts], 1))
              for text, parts in outputs.items()}

    alone = {text: play({text: [16, self.TOKENS - 16]}, rng)[text] for text in range(len(texts))}
    once = {text: play({text: [16]}, rng)[text] for text in range(len(texts))}
    for schedule in range(schedules):
      chosen = rng.permutation(len(texts))[:rng.integers(1, self.R + 1)]
      requests = {}
      for text in chosen:
        cuts = np.sort(rng.integers(0, self.TOKENS + 1, size=rng.integers(0, 4)))
        sizes = np.diff([0, *cuts, self.TOKENS])
        sizes = [part for size in sizes for part in [self.ROWS] * (size // self.ROWS) + [
            size % self.ROWS] if part]
        if rng.random() < 0.3:  # the end token by token
          sizes = [*sizes[:-1], *[1] * sizes[-1]]
        requests[int(text)] = sizes
      held = garbage[schedule % len(garbage)]  # in the pages before anything is written
      for text, (out, lse) in play(requests, rng, held).items():
        np.testing.assert_array_equal(out, alone[text][0])
        np.testing.assert_array_equal(lse, alone[text][1])
        np.testing.assert_array_equal(out[:16], once[text][0])


def broken(**changes):
  """The metadata of three requests with something wrong."""
  return lambda metadata: metadata._replace(**{
      name: np.asarray(value, np.int32) for name, value in changes.items()})


def entry(row, column, value):
  def change(metadata):
    tables = metadata.page_tables.copy()
    tables[row, column] = value if value >= 0 else value if value == -1 else tables[
        -value // 10, -value % 10]
    return metadata._replace(page_tables=tables)
  return change


# name: what is wrong with the metadata of lengths (9, 4, 6) and queries (3, 0, 2), in the message
NUMBERS = {
    "page_past_the_pool": (entry(0, 2, 24), "page_tables: .*page ids from 0 to 23"),
    "page_below_the_pool": (entry(0, 0, -1), "page_tables: .*page ids from 0 to 23"),
    "page_twice_in_a_row": (entry(0, 0, -2 - 0), "page_tables: .*a page once in a request's row"),
    "page_written_and_owned_twice": (entry(1, 0, -21), "page_tables: .*in one request's row only"),
    "length_beyond_the_table": (broken(context_lens=[9, 33, 6]),
                                "context_lens: .*from 0 to 32 tokens"),
    "length_negative": (broken(context_lens=[9, -1, 6]), "context_lens: .*from 0 to 32 tokens"),
    "more_queries_than_tokens": (broken(context_lens=[2, 4, 6]), "context_lens: .*no fewer"),
    "starts_fall": (broken(query_start_loc=[0, 3, 2, 5]), "query_start_loc: .*never decrease"),
    "starts_begin_late": (broken(query_start_loc=[1, 3, 3, 5]), "query_start_loc: .*start at 0"),
    "starts_end_late": (broken(query_start_loc=[0, 3, 3, 9]), "query_start_loc: .*8 tokens"),
    "too_many_requests": (broken(num_requests=[4]), "num_requests: got .4.*from 0 to the 3 rows"),
    "distribution_falls": (broken(distribution=[2, 1, 3]), "distribution: .*rising"),
    "decode_of_three": (broken(distribution=[1, 1, 3]), "query_start_loc: .*one query each"),
}


class BadInputTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    case = Case((9, 4, 6), (3, 0, 2))
    self.query, self.cache, self.metadata = plain(case)

  @parameterized.parameters(*NUMBERS)
  def test_numbers(self, name):
    change, words = NUMBERS[name]
    wrong = change(self.metadata)
    with self.assertRaisesRegex(ValueError, f"cache_metadata.{words}"):
      ragged_page_attention_v2(self.query, self.cache, wrong)

  def test_numbers_under_jit(self):
    """In the debug mode every wrong number is an error; without it nothing is checked."""
    def run(cache, metadata):
      validate.debug_check(cache, metadata, 8)
      return ragged_page_attention_v2(self.query, cache, metadata).attention_outputs
    checked = jax.jit(checkify.checkify(run))
    checked(self.cache, self.metadata)[0].throw()
    numbers = jax.jit(checkify.checkify(lambda metadata: validate.debug_check(
        self.cache, metadata, 8)))
    flag = jax.jit(lambda metadata: validate.flag(self.cache, metadata, 8))
    self.assertFalse(flag(self.metadata))
    for name, (change, words) in NUMBERS.items():
      wrong = change(self.metadata)
      self.assertTrue(flag(wrong), name)
      with self.assertRaisesRegex(Exception, f"(?s)cache_metadata.{words}"):
        numbers(wrong)[0].throw()
    with self.assertRaisesRegex(Exception, "(?s)cache_metadata.page_tables"):
      checked(self.cache, NUMBERS["page_past_the_pool"][0](self.metadata))[0].throw()

  def test_full_pages_may_be_shared(self):
    shared = entry(1, 0, -20)(self.metadata)  # the first page of the third request
    validate.check(self.cache, shared, 8)

  def test_a_page_that_is_not_full_may_be_shared_by_requests_without_queries(self):
    metadata = PagesMetadata(*(np.array(x, np.int32) for x in (
        [[5, 1], [5, 2], [3, 0]], [2, 3, 4], [0, 0, 0, 4])))
    validate.check(self.cache, metadata, 8)
    with self.assertRaisesRegex(ValueError, "in one request's row only"):
      validate.check(self.cache, metadata._replace(query_start_loc=np.array(
          [0, 0, 1, 5], np.int32)), 8)

  def test_other_mechanisms_refuse_pages_by_name(self):
    for mechanism in ("flash_attn2", "autoregressive_decodeattn", "vanilla"):
      with self.assertRaisesRegex(
          NotImplementedError, f"mechanism='{mechanism}'.*a cache_view of PagesV2 .a cache in pages"
          ". is not supported.*mechanism='ragged_page_attention_v2' can"):
        attention(self.query, None, None, mechanism=mechanism, layout="thd", cache_view=self.cache,
                  cache_metadata=self.metadata)
    with self.assertRaisesRegex(ValueError, "mechanism='flash': expected one of"):
      attention(self.query, None, None, mechanism="flash", layout="thd", cache_view=self.cache,
                cache_metadata=self.metadata)

  def test_scales_of_another_number_of_heads(self):
    quantised = pages.init(PagesV2, 24, 4, Heads(2, 6, 6), jnp.int8, "token")
    narrow = quantised._replace(key_scales=quantised.key_scales[..., :1],
                                value_scales=quantised.value_scales[..., :1])
    with self.assertRaisesRegex(ValueError, r"cache_view.key_scales: got float32\[24, 4, 1\]; "
                                r"expected float32 \[\] or \[24, 4, 2\]"):
      ragged_page_attention_v2(self.query, narrow, self.metadata)
    padded = pages.init(PagesV3, 24, 4, Heads(2, 6, 6), jnp.int8, "token")
    with self.assertRaisesRegex(ValueError, "key: got .*as many heads as the cache's key_scales"):
      ragged_page_attention_v3(self.query, self.query[:, :1], self.query[:, :1], padded,
                               self.metadata)

  @parameterized.parameters(
      (lambda q, c, m: ragged_page_attention_v2(q, pages.convert(c, PagesV1), m),
       "cache_view: got PagesV1; expected a PagesV2"),
      (lambda q, c, m: ragged_page_attention_v2(q, PagesV2(c.pages[:, :, :3]), m),
       "cache_view: .*as many rows of values"),
      (lambda q, c, m: ragged_page_attention_v2(q, PagesV2(c.pages[0]), m),
       "cache_view: .*P, page"),
      (lambda q, c, m: ragged_page_attention_v2(q, PagesV2(c.pages.astype(jnp.int8)), m),
       "cache_view.key_scales: got None"),
      (lambda q, c, m: ragged_page_attention_v2(q, c._replace(key_scales=jnp.float32(1)), m),
       "cache_view.key_scales: got float32.*None with pages of float32"),
      (lambda q, c, m: ragged_page_attention_v2(q.astype(jnp.bfloat16), c, m),
       "query: got bfloat16.*the dtype of the pages, float32"),
      (lambda q, c, m: ragged_page_attention_v2(q[:, :3], c, m), "query: got .*2 key heads"),
      (lambda q, c, m: ragged_page_attention_v2(q[..., :3], c, m), "query: got .*width"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, m._replace(
          context_lens=m.context_lens.astype(np.int64))), "context_lens: got int64"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, m._replace(
          query_start_loc=m.query_start_loc[1:])), "query_start_loc: got int32.3"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, None), "cache_metadata: got NoneType"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, m._replace(query_start_loc=None)),
       "query_start_loc: got None with 8 queries and 3 requests"),
      (lambda q, c, m: page_attention(q, pages.convert(c, PagesV1), m),
       "query_start_loc: .*page_attention has one query"),
      (lambda q, c, m: ragged_page_attention_v3(q, q, q, pages.convert(c, PagesV3), m),
       "key: got .*K at most 2"),
      (lambda q, c, m: ragged_page_attention_v3(
          q, q[:, :2], q[:, :1], pages.convert(c, PagesV3), m), "value: got "),
      (lambda q, c, m: ragged_page_attention_v3(q, None, None, pages.convert(c, PagesV3), m),
       "key: got NoneType"),
      (lambda q, c, m: ragged_page_attention_v3(
          q, q[:, :2].astype(jnp.bfloat16), q[:, :2], pages.convert(c, PagesV3), m),
       "key: got bfloat16"),
      (lambda q, c, m: attention(q, None, None, layout="thd", cache_view=c, cache_metadata=m,
                                 mode="serve"), "mode: got 'serve'"),
      (lambda q, c, m: attention(q, None, None, cache_view=c, cache_metadata=m),
       "layout: got 'bthd'"),
      (lambda q, c, m: attention(q, q, q, layout="thd", cache_view=c, cache_metadata=m),
       "key: got .*caches.pages.append"),
      (lambda q, c, m: attention(q, None, None, layout="thd", cache_view=c, cache_metadata=m,
                                 cum_seqlens_q=m.query_start_loc), "cum_seqlens_q: "))
  def test_shapes(self, call, words):
    with self.assertRaisesRegex(ValueError, words):
      call(self.query, self.cache, self.metadata)


if __name__ == "__main__":
  absltest.main()
