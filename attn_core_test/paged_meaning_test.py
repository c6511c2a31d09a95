# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages against the public kernels' references: windows, NaN, 8 bits, memory."""

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
from jax.experimental.pallas.ops.tpu.paged_attention import util as public_v1
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as public_v2
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, PagedOptions, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       attention, explain, page_attention, ragged_page_attention_v2,
                       ragged_page_attention_v3)
from attn_core.caches import pages, quantize
from attn_core.kernels.common import paged_operands
from attn_core.types import PagedSpec
from attn_core_test.paged_cases import BLOCKS, Case, plain


def _public_v3():
  """Imports the kernel v3 of tpu-inference without the rest of the package, which needs vLLM."""
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
    # The public kernel counts the query itself among the tokens of a window.
    got = ragged_page_attention_v2(query, cache, metadata, PagedOptions(
        softmax_scale=0.4, sliding_window=(4, None), logits_soft_cap=2.0))
    np.testing.assert_allclose(got.attention_outputs, want, atol=1e-5)

  def test_shapes_and_meanings_are_those_of_the_public_kernel_that_writes(self):
    """Compares with vLLM's own reference for TPUs, where tpu-inference is installed."""
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

  def test_a_window_as_wide_as_int32_hides_nothing(self):
    query, cache, metadata = plain(Case((9, 17), (9, 1), rest=0))
    wide, all_of_it = (ragged_page_attention_v2(query, cache, metadata, PagedOptions(
        sliding_window=window, causal=False)) for window in (2**31 - 1, None))
    np.testing.assert_array_equal(wide.attention_outputs, all_of_it.attention_outputs)

  def test_windows_at_every_place_in_a_block_of_keys(self):
    query, cache, metadata = plain(Case((24, 9), (24, 9), rest=0))
    def everything(sizes):
      def loss(query, cache):
        output = ragged_page_attention_v2(query, cache, metadata, PagedOptions(
            sliding_window=(5, 2), causal=False, block_sizes=sizes))
        return jnp.sin(output.attention_outputs).sum(), output.attention_outputs
      return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(query, cache)
    expected = everything(BlockSizes(64, 64))  # one block
    for block_q in (1, 3):
      jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
                   everything(BlockSizes(block_q, 4)), expected)

  def test_derivatives_by_keys_or_values_alone(self):
    case = Case((9, 5), (1, 1), rest=0)
    query, *stored = (jnp.nan_to_num(x) for x in case.arrays()[:3])
    metadata = case.metadata(single=True)
    loss = lambda key, value: jnp.sin(
        page_attention(query, PagesV1(key, value), metadata).attention_outputs).sum()
    both, *alone = jax.jit(lambda *x: (
        jax.grad(loss, (0, 1))(*x), jax.grad(loss, 0)(*x), jax.grad(loss, 1)(*x)))(*stored)
    for x, y in zip(alone, both, strict=True):
      self.assertTrue(np.any(y))
      np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)

  def test_a_nan_reaches_only_queries_that_see_it(self):
    case = Case((8, 9), (8, 9), rest=0)
    query, cache, metadata = plain(case)
    page = metadata.page_tables[0, 1]  # positions 4 to 7 of the first request
    small, packed = (pages.from_dense(
        pages.init(PagesV2, case.pool, case.page, Heads(case.K, case.D, case.D), dtype, scales),
        *pages.to_dense(cache, metadata), metadata)
                     for dtype, scales in (("int8", "token"), ("int4", "group")))
    run = jax.jit(lambda *a: ragged_page_attention_v2(*a, metadata, PagedOptions(
        sliding_window=(1, 0), block_sizes=BLOCKS)).attention_outputs)
    for held, name, place in (
        (cache, "pages", (page, 1, 0)), (cache, "pages", (page, 1, 1)),  # a key, a value
        (small, "key_scales", (page, 1, 0)), (small, "value_scales", (page, 1, 0)),
        (packed, "key_scales", (page, 1, 0, 0)), (packed, "value_scales", (page, 1, 0, 0))):
      with_nan = held._replace(**{name: getattr(held, name).at[place].set(jnp.nan)})
      before, after = np.asarray(run(query, held)), np.asarray(run(query, with_nan))
      seen = np.zeros(before.shape, bool)
      seen[5:7, :2] = True  # query heads 0 and 1 read key head 0
      self.assertTrue(np.isnan(after[seen]).all())
      np.testing.assert_array_equal(after[~seen], before[~seen])

  def test_a_query_that_is_nan_reaches_only_gradients_of_what_it_sees(self):
    query, cache, metadata = plain(Case((8, 9), (8, 9), rest=0))
    keep = np.arange(17)[:, None, None] != 6
    run = jax.jit(jax.grad(lambda *a: jnp.sin(jnp.where(keep, ragged_page_attention_v2(
        *a, metadata, PagedOptions(sliding_window=(1, 0), block_sizes=BLOCKS)
        ).attention_outputs, 0)).sum(), (0, 1)))
    before, after = run(query, cache), run(query.at[6, 0].set(jnp.nan), cache)
    np.testing.assert_array_equal(after[0][7:], before[0][7:])
    page = metadata.page_tables[0, 1]  # positions 4 to 7 of the first request
    seen = np.zeros(cache.pages.shape, bool)
    seen[page, 1:3, :2] = True  # positions 5 and 6, key and value of key head 0
    np.testing.assert_array_equal(after[1].pages[~seen], before[1].pages[~seen])
    self.assertTrue(np.abs(before[1].pages[page, :, :2]).max((1, 2)).all())

  def test_bfloat16_sums_in_float32(self):
    """Sums the weights of 600 equal keys, which in bfloat16 would stop at 256."""
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

  @parameterized.product(layout=(PagesV1, PagesV2), kind=("tensor", "token", "group"))
  def test_quantized_pages_are_read_by_their_scales(self, layout, kind):
    widths = {"token": 8, "tensor": 6, "group": 40}  # two loops on a CPU
    dtype = "int4" if kind == "group" else "int8"
    case = Case((9, 17, 3), (1,) * 3, rest=0, D=widths[kind])
    query, wide, _ = plain(case)
    heads, metadata = Heads(case.K, case.D, case.D), case.metadata(single=True)
    key, value = pages.to_dense(wide, metadata)
    cache = pages.init(layout, case.pool, case.page, heads, dtype, kind)
    if kind == "tensor":
      cache = cache._replace(key_scales=abs(key).max() / 127, value_scales=abs(value).max() / 100)
      cache = pages.from_dense(cache, key, value, metadata)
    else:
      cache = pages.from_dense(cache, key, value, metadata)  # the write makes the scales
      stored, scales = zip(*(quantize.quantize(x, dtype) for x in (key, value)))
      given = pages.from_dense(pages.init(layout, case.pool, case.page, heads, dtype, kind),
                               *stored, metadata, scales)
      jax.tree.map(np.testing.assert_array_equal, cache, given)
    back = pages.from_dense(pages.init(PagesV1, case.pool, case.page, heads, jnp.float32),
                            *pages.to_dense(cache, metadata), metadata)
    want = page_attention(query, back, metadata).attention_outputs
    run = page_attention if layout is PagesV1 else ragged_page_attention_v2
    got = run(query, cache, metadata).attention_outputs
    np.testing.assert_allclose(got, want, atol=1e-6)
    if layout is PagesV2:  # the query has a gradient, and quantized pages have none
      loss = lambda run, cache, q: jnp.sin(run(q, cache, metadata).attention_outputs).sum()
      np.testing.assert_allclose(
          jax.jit(jax.grad(functools.partial(loss, run, cache)))(query),
          jax.jit(jax.grad(functools.partial(loss, page_attention, back)))(query), atol=2e-6)
      with self.assertRaisesRegex(NotImplementedError, "cache_view: gradients .* quantized"):
        jax.grad(lambda scales: loss(run, cache._replace(key_scales=scales), query))(
            cache.key_scales)

  @parameterized.parameters(("float8_e4m3fn", "tensor"), ("int8", "token"), ("int4", "group"))
  def test_new_tokens_are_stored_by_the_scales(self, dtype, kind):
    """In 8 and in 4 bits, v3 writes in place what `append` writes, and attends to it."""
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

  @parameterized.parameters(PagesV1, PagesV2, PagesV3)
  def test_keys_and_values_with_other_numbers_of_groups(self, layout):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(3, *n)), jnp.float32)
                         for n in ((2, 64), (1, 64), (1, 32)))
    metadata = PagesMetadata(*map(np.int32, ([[1, 0]], [3], [0, 3])))
    cache = pages.init(layout, 2, 2, Heads(1, 64, 32), "int4", "group")
    filled = pages.append(cache, key, value, pages.slots(metadata, 2, 3))
    if layout is PagesV3:
      found = ragged_page_attention_v3(query, key, value, cache, metadata)
    elif layout is PagesV2:
      found = ragged_page_attention_v2(query, filled, metadata)
    else:
      found = page_attention(query[2:], filled, metadata._replace(query_start_loc=None))
    keys, values = (quantize.dequantize(*quantize.quantize(x, "int4"))[:, 0] for x in (key, value))
    scores = jnp.einsum("thd,sd->ths", query, keys) / 8
    weights = jax.nn.softmax(jnp.where(np.tri(3)[:, None] > 0, scores, -jnp.inf))
    want = jnp.einsum("ths,se->the", weights, values)
    got = found.attention_outputs
    np.testing.assert_allclose(got[..., :32], want[-len(got):], atol=1e-5)

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
    """Counts the visited key blocks, which do not depend on the width of the table."""
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

  def test_attention_finds_the_mechanism_of_a_cache(self):
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
        (dict(return_weights=True), "return_weights=True"), (dict(query_offset=1), "query_offset"),
        (dict(normalize_output=False), "normalize_output=False")):
      with self.assertRaisesRegex(NotImplementedError, words):
        attention(query, None, None, **arguments, **changes)


if __name__ == "__main__":
  absltest.main()
