# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The TPU kernel over pages: interpreted against the oracle, and compiled ahead of time.

Interpret mode starts from memory full of NaN and watches for races between transfers and
computation; it runs with transfers executed at once and as late as possible.
"""

import itertools
from typing import NamedTuple
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV1,
                       PagesV2, PagesV3, attention, explain, ragged_page_attention_v2)
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import pages, quantize
from attn_core.kernels.tpu.ragged import common, row_tiles
from attn_core.kernels.tpu.ragged.kv_block import KVBlock
from attn_core.kernels.tpu.ragged.kv_layout import KVLayout, LiveTokens
from attn_core.types import cdiv
from attn_core_test import sampling, tpu_cases
from attn_core_test.paged_cases import Case
from attn_core_test.tpu_interpret import counted, interpreted

TPU = OperationMetadata(platform="tpu")
NAMES = {"v1": "page_attention", "v2": "ragged_page_attention_v2",
         "v3": "ragged_page_attention_v3"}


class Row(NamedTuple):
  """A call: the case, the layout of its pages, the dtype that these hold, and its block sizes."""

  case: Case
  layout: str = "v2"
  held: str | None = None  # None: the case's
  scales: str | None = None
  blocks: BlockSizes = BlockSizes(block_q=4, block_kv=16)
  transfers: str = "on_wait"


ROWS = {
    "ragged": Row(Case((9, 0, 17, 33, 24, 5), (9, 0, 5, 1, 1, 2), page=8, D=128, unused=1,
                       sinks=True, options=PagedOptions(sliding_window=(11, 0),
                                                        logits_soft_cap=2.0))),
    "ragged_16_bits_many_rows": Row(
        Case((47, 5), (31, 2), page=8, H=24, K=8, D=64, dtype="bfloat16"),
        blocks=BlockSizes(block_q=32, block_kv=16), transfers="eager"),
    "not_causal_wide": Row(Case((9, 20), (3, 5), page=8, H=2, K=1, D=256, rest=1,
                                dtype="bfloat16", options=PagedOptions(causal=False))),
    "one_query_each": Row(Case((29, 0, 1, 17), (1,) * 4, page=4, H=6, K=3, rest=0,
                               dtype="bfloat16"), layout="v1", blocks=BlockSizes(block_kv=8)),
    "three_heads_of_whole_lanes": Row(Case((13, 6), (1, 1), page=8, H=3, K=3, D=128, rest=0)),
    "one_head_of_several_blocks": Row(Case((32, 21), (1, 1), page=4, H=2, K=1, D=128, rest=0,
                                           dtype="bfloat16"), blocks=BlockSizes(block_kv=8)),
    "writes": Row(Case((20, 11, 3), (1, 1, 3), page=8, H=16, K=8, D=128, distribution=(2, 2, 3),
                       unused=1, dtype="bfloat16"), layout="v3"),
    "writes_8_bits": Row(Case((13, 6), (4, 1), page=8, H=2, K=1), layout="v3",
                         held="float8_e4m3fn", scales="tensor", transfers="eager"),
    "16_bits_times_8": Row(
        Case((19, 5), (1, 1), page=8, H=4, K=2, D=128, rest=0, dtype="bfloat16"), layout="v2",
        held="float8_e4m3fn", scales="tensor"),
    "scales_per_token": Row(Case((19, 5), (3, 2), page=8, D=8), held="int8", scales="token"),
    "words_of_four": Row(Case((19, 5), (1, 1), page=8, D=8, rest=0, sinks=True), layout="v1",
                         held="float8_e4m3fn", scales="token", blocks=BlockSizes(block_kv=8)),
}
# Every layout and dtype; the other rows are slow.
CHOSEN = sampling.names(ROWS, ("ragged", "ragged_16_bits_many_rows", "three_heads_of_whole_lanes",
                               "one_head_of_several_blocks", "writes", "16_bits_times_8",
                               "words_of_four"))


def setup(row: Row):
  """Returns (query, key, value, cache, metadata, sinks), and key and value as they are read."""
  query, key, value, sinks = row.case.arrays()  # NaN in slots that may not be read
  metadata = row.case.metadata(single=row.layout == "v1")
  new, cache, read = jax.jit(lambda held: stored(row, held, metadata, query.shape[0]))((key, value))
  return (query, *new, cache, jax.tree.map(jnp.asarray, metadata), sinks), read


def stored(row: Row, held: tuple, metadata: PagesMetadata, tokens: int):
  """Returns keys and values to write, the cache, and what is read from it then."""
  case, layout = row.case, {"v1": PagesV1, "v2": PagesV2, "v3": PagesV3}[row.layout]
  heads = Heads(case.K, case.D, case.D)
  if row.held is None:
    cache = PagesV1(*held)
  else:
    narrow, scales = zip(*(quantize.quantize(x, row.held) for x in held))
    if row.scales == "tensor":
      scales = jnp.float32(0.01), jnp.float32(0.02)
      narrow = [pages.store(x, row.held, s) for x, s in zip(held, scales)]
    else:
      scales = [x.transpose(1, 2, 0) for x in scales]
    cache = PagesV1(*narrow, *scales)
  key, value = pages.read(cache, jnp.arange(case.pool), heads, jnp.float32)
  read = [x.reshape(case.K, case.pool, case.page, -1) for x in (key, value)]
  new = None, None
  if row.layout == "v3":  # no page holds the queries' own tokens yet
    mapping = pages.slots(metadata, case.page, tokens)
    outside = jnp.where(mapping < 0, 10**6, mapping)
    flat = [x.reshape(case.K, -1, case.D) for x in held]
    new = [x.at[:, outside].get(mode="fill", fill_value=np.nan).swapaxes(0, 1) for x in flat]
    holes = [x.reshape(case.K, -1, case.D).at[:, outside].set(
        jnp.nan if row.held is None else jnp.zeros((), row.held), mode="drop").reshape(x.shape)
             for x in cache[:2]]
    cache = cache._replace(key_pages=holes[0], value_pages=holes[1])
  return new, cache if row.layout == "v1" else pages.convert(cache, layout, heads), read


def run(row: Row, query, key, value, cache, metadata, sinks):
  o = row.case.options
  return attention(
      query, key, value, mechanism=NAMES[row.layout], layout="thd", cache_view=cache,
      cache_metadata=metadata, softmax_aux=sinks, metadata=TPU, block_sizes=row.blocks,
      return_lse=True, causal=o.causal, sliding_window=o.sliding_window,
      logits_soft_cap=o.logits_soft_cap)


class InterpretTest(parameterized.TestCase):

  @parameterized.parameters(*CHOSEN)
  def test_equals_the_oracle(self, name):
    row = ROWS[name]
    arguments, read = setup(row)
    with jax.enable_x64(True):
      wide = lambda x: None if x is None else x.astype(jnp.float64)
      expected = row.case.oracle(*map(wide, (arguments[0], *read, arguments[-1])))
    with interpreted(row.transfers):
      output = jax.block_until_ready(jax.jit(lambda *a: run(row, *a))(*arguments))
    tolerance = 1.5e-2 if row.case.dtype == "bfloat16" else 5e-6
    for x, y, most in zip((output.attention_outputs, output.lse), expected, (tolerance, 1e-5)):
      x, y = np.asarray(x, np.float64), np.asarray(y)
      np.testing.assert_array_equal(x == -np.inf, y == -np.inf)
      np.testing.assert_allclose(x, y, atol=most)

  @parameterized.parameters((4, "bfloat16"), (16, "float32"))
  def test_a_nan_reaches_queries_that_attend_to_it_and_no_others(self, heads, dtype):
    """Checks NaN where two heads share a product, and a word holds a key and a value."""
    case = Case((8, 9), (8, 9), page=8, H=heads, D=128, rest=0, dtype=dtype)
    query, key, value, _ = map(lambda x: None if x is None else jnp.nan_to_num(x), case.arrays())
    cache, metadata = pages.convert(PagesV1(key, value), PagesV2), case.metadata()
    wrong = (cache._replace(pages=cache.pages.at[metadata.page_tables[0, 0], 5, 1].set(number))
             for number in (jnp.nan, -jnp.inf))
    # With 4 heads blocks have few rows, with 16 many.
    options = PagedOptions(metadata=TPU, block_sizes=BlockSizes(heads, 16))
    run = jax.jit(lambda cache: ragged_page_attention_v2(
        query, cache, metadata, options).attention_outputs)
    with interpreted():
      before, *found = (np.asarray(run(x)) for x in (cache, *wrong))
    seen = np.zeros(before.shape, bool)
    seen[5:8, :heads // 2] = True
    for after in found:
      self.assertTrue(np.isnan(after[seen]).all())
      np.testing.assert_array_equal(after[~seen], before[~seen])

  @mock.patch.multiple(common, TILE_KEYS=16, TILE_ROWS=128)
  @mock.patch.object(row_tiles, "SLICE_KEYS", 8)
  def test_large_numbers_of_a_row_change_no_other_row(self):
    """Computes rows whose sums are out of range, by tiles of which the mask hides and cuts some."""
    case = Case((43, 9), (39, 9), page=16, H=8, K=1, D=128, rest=0)
    query, key, value, _ = (None if x is None else jnp.nan_to_num(x) for x in case.arrays())
    metadata = case.metadata()
    page = int(metadata.page_tables[0, 2])  # tokens 32 to 47 of the first request
    options = PagedOptions(metadata=TPU, block_sizes=BlockSizes(32, 32), return_lse=True)
    attend = jax.jit(lambda query, *held: ragged_page_attention_v2(
        query, pages.convert(PagesV1(*held), PagesV2), metadata, options))
    around, away = jnp.abs(query), -jnp.abs(key)
    calls = {
        "usual": (query, key, value),
        "one hot row": (query.at[20].mul(300), key, value), "underflow": (around * 9, away, value),
        "large value": (query, key, value.at[0, page, 5].set(1e37)),
        "NaN": (query, key.at[0, page, 5, 3].set(jnp.nan), value),
        "infinite query": (query.at[20, 2, 7].set(jnp.inf), key, value)}
    found = {}
    for name, (q, k, v) in calls.items():
      with interpreted("eager"):
        output = jax.block_until_ready(attend(q, k, v))
      found[name] = [np.asarray(x, np.float64) for x in (output.attention_outputs, output.lse.T)]
      with jax.enable_x64(True):
        out, lse = case.oracle(*(x.astype(jnp.float64) for x in (q, k, v)), None)
      with self.subTest(name):
        np.testing.assert_allclose(found[name][0], out, atol=3e-4, rtol=1e-4)
        np.testing.assert_allclose(found[name][1].T, lse, atol=3e-4, rtol=1e-6)
    for name in ("one hot row", "infinite query"):
      for x, y in zip(found[name], found["usual"]):
        np.testing.assert_array_equal(np.delete(x, 20, 0), np.delete(y, 20, 0))
    seen = np.arange(48) < 28  # before the block of the first request's token 37
    for name in ("large value", "NaN"):
      for x, y in zip(found[name], found["usual"]):
        np.testing.assert_array_equal(x[seen], y[seen])

  @parameterized.parameters((True, (20, 0), (8, 16)), (False, (None, 5), (4, 16)))
  @mock.patch.multiple(common, TILE_KEYS=16, TILE_ROWS=128)
  @mock.patch.object(row_tiles, "SLICE_KEYS", 8)
  def test_masks_that_cut_tiles_alike(self, causal, window, blocks):
    """Blocks whose tiles have the same kinds may hide other slices, and keys of no request."""
    options = PagedOptions(causal=causal, sliding_window=window)
    case = Case((43, 21), (43, 8), page=16, H=16, K=1, D=128, rest=0, options=options)
    query, key, value, _ = (None if x is None else jnp.nan_to_num(x) for x in case.arrays())
    options = options._replace(metadata=TPU, block_sizes=BlockSizes(*blocks), return_lse=True)
    with interpreted("eager"):
      output = jax.block_until_ready(jax.jit(lambda query, *held: ragged_page_attention_v2(
          query, pages.convert(PagesV1(*held), PagesV2), case.metadata(), options))(
              query, key, value))
    with jax.enable_x64(True):
      out, lse = case.oracle(*(x.astype(jnp.float64) for x in (query, key, value)), None)
    np.testing.assert_allclose(output.attention_outputs, out, atol=5e-6, rtol=1e-5)
    np.testing.assert_allclose(output.lse, lse, atol=1e-5, rtol=1e-5)

  def test_the_same_bits_in_any_batch_and_any_chunks(self):
    """Runs one program with different metadata, and checks that it moves live pages only."""
    row = ROWS["ragged"]._replace(case=Case((21, 13), (21, 13), page=8, H=2, K=1, D=128, rest=6))
    (query, _, _, cache, whole, _), _ = setup(row)
    def schedule(tables, *requests):
      """Returns metadata from (number of queries, tokens so far) of both requests."""
      lens = np.array([length for _, length in requests], np.int32)
      starts = np.cumsum([0, *(number for number, _ in requests)]).astype(np.int32)
      return PagesMetadata(tables, jnp.asarray(lens), jnp.asarray(starts),
                           whole.num_requests)
    def queries(*parts):
      picked = jnp.concatenate([query[first:first + number] for first, number in parts])
      return jnp.pad(picked, ((0, query.shape[0] - picked.shape[0]), (0, 0), (0, 0)))
    moved_pages = cache._replace(pages=jnp.roll(cache.pages, 5, 0))
    tables = whole.page_tables
    rolled = jnp.where(tables < row.case.pool, (tables + 5) % row.case.pool, tables)
    with counted() as moved:
      attend = jax.jit(lambda query, cache, metadata: ragged_page_attention_v2(
          query, cache, metadata, PagedOptions(metadata=TPU, block_sizes=row.blocks,
                                               return_lse=True)))
      def run(*arguments):
        found = jax.block_until_ready(attend(*arguments))
        jax.effects_barrier()
        live, moved[:] = sum(moved), []
        return found.attention_outputs, found.lse.T, live
      both = run(query, cache, schedule(tables, (21, 21), (13, 13)))
      # Blocks of 4 queries see blocks of 2 pages: all that hold a token up to their last one.
      page = cache.pages[0].nbytes
      pages_of = lambda length: sum(-(-min(end, length) // 8) for end in range(4, length + 4, 4))
      # Each query is copied, and the result of every token; and the lse of each block.
      tokens_of = lambda queries, blocks: (
          queries * query[0].nbytes + query.nbytes + blocks * 4 * row.case.H * 4)
      self.assertEqual(both[2], page * (pages_of(21) + pages_of(13)) + tokens_of(34, 6 + 4))
      alone = run(queries((21, 13)), moved_pages, schedule(rolled[::-1], (13, 13), (0, 0)))
      self.assertEqual(alone[2], page * pages_of(13) + tokens_of(13, 4))
      chunks = [run(queries((first, number)), cache, schedule(tables, (0, 0), (0, 0))._replace(
          context_lens=jnp.array([first + number, 0], jnp.int32),
          query_start_loc=jnp.array([0, number, number], jnp.int32)))
                for first, number in ((0, 7), (7, 13), (20, 1))]
      self.assertEqual(chunks[2][2], 3 * page + tokens_of(1, 1))  # one query, 21 tokens
    for i in range(2):
      np.testing.assert_array_equal(alone[i][:13], both[i][21:34])
      chunked = np.concatenate([found[i][:number] for found, number in zip(chunks, (7, 13, 1))])
      np.testing.assert_array_equal(chunked, both[i][:21])


def read_block(layout, x, live):
  """Returns keys and values of all heads of a block, and whether all are finite.

  Args:
    layout: of the block.
    x: what a transfer puts there.
    live: the tokens that may be read, others are cleared; None: all, and nothing is looked for.
  """
  def kernel(source, out, finite, buffer, *words):
    buffer[1] = source[...]
    tokens = LiveTokens(*live or (0, layout.block_kv))
    block = KVBlock(layout, [buffer], words, None, 1, tokens, 0)
    if live:
      finite[...] = jnp.where(block.load_masked_words() == 0, 1, 0)
    else:
      block.load_words()
      finite[...] = jnp.ones((1, 1), jnp.int32)
    for head in range(layout.key_heads):
      out[0, head], out[1, head] = block.read_both(head, jnp.float32)
  out = jax.ShapeDtypeStruct((2, layout.key_heads, layout.block_kv, layout.widths[0]), jnp.float32)
  scratch = [pltpu.VMEM(*x) for x in (*layout.buffers(), *layout.word_buffers())]
  return pl.pallas_call(kernel, [out, jax.ShapeDtypeStruct((1, 1), jnp.int32)],
                        scratch_shapes=scratch, interpret=True)(x)


class InPlaceTest(parameterized.TestCase):
  """TPU interpret mode copies words, which compiled kernels read where they are."""

  @parameterized.parameters(("bfloat16", 1, 1), ("bfloat16", 2, 2), ("bfloat16", 4, 1),
                            ("float32", 2, 1), ("float8_e4m3fn", 2, 2), ("int8", 4, 1))
  def test_equals_words(self, dtype, key_heads, lane_parts):
    layout = KVLayout(True, False, key_heads, (128 * lane_parts,), jnp.dtype(dtype), 16, 2,
                      lane_parts=lane_parts)
    self.assertTrue(layout.has_words)
    (shape, stored), = layout.buffers()
    self.assertTrue(layout.at_run_time().in_place)
    with interpreted():
      self.assertFalse(layout.at_run_time().in_place)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape[1:]) * 20, stored)
    for live in None, (5, 27):
      try:
        found = read_block(layout._replace(in_place=True), x, live)
      except NotImplementedError as error:  # of jax before 0.11, which only compiles it
        self.assertIsNotNone(live)
        self.skipTest(f"JAX's interpreter does not write through such references: {error}")
      for a, b in zip(found, read_block(layout, x, live)):
        np.testing.assert_array_equal(a, b)

  def test_words_that_do_not_fill_tiles_are_copied(self):
    layout = KVLayout(True, False, 4, (128,), jnp.dtype("bfloat16"), 16, 2)
    for change in {"key_heads": 3}, {"key_heads": 8}, {"widths": (64,)}, {"latent": True}:
      with self.subTest(**change):
        self.assertFalse(layout._replace(**change).has_words)


class ChoiceTest(parameterized.TestCase):

  def kernel(self, heads, page, dtype, width=64, scales=None, tokens=None, requests=4, group=1,
             distribution=None, **options):
    """Returns the verdict about queries of `tokens` tokens; None: one for every request."""
    query = jax.ShapeDtypeStruct(
        (tokens or requests, heads.key_heads * group, heads.key_width),
        jnp.float32 if scales else dtype)
    cache = jax.eval_shape(lambda: pages.init(PagesV2, 8, page, heads, dtype, scales))
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    metadata = PagesMetadata(i32(requests, width), i32(requests),
                             i32(requests + 1) if tokens else None, distribution=distribution)
    explanation = explain(query, None, None, layout="thd", cache_view=cache,
                          cache_metadata=metadata, **{"metadata": TPU, **options})
    verdict, = (v for v in explanation.verdicts if v.mechanism == "ragged_page_attention_v2")
    return str(verdict)

  def test_is_chosen_first_if_supported(self):
    heads = Heads(2, 128, 128)
    for dtype, scales in ((jnp.bfloat16, None), (jnp.int8, "token"), (jnp.float8_e4m3fn, "tensor")):
      self.assertIn("by paged.tpu", self.kernel(heads, 16, dtype, scales=scales))
    for arguments, words in (
        (dict(dtype=jnp.float16), "float16"),
        (dict(width=10**6), "page tables of .4, 1000000."), (dict(page=10**5), "100000 tokens"),
        (dict(heads=Heads(2, 192, 192)), "head_dim 192: .* padded with zeros"),
        (dict(precision="highest"), "precision")):
      verdict = self.kernel(**{**dict(heads=heads, page=16, dtype=jnp.bfloat16), **arguments})
      self.assertRegex(verdict, f"by paged.xla, not by paged.tpu: .*{words}")

  def test_long_prefills_stay_in_the_kernel(self):
    for tokens, requests, (key_heads, group) in itertools.product(
        (4096, 16384, 65536, 131072), (8, 64, 512), ((8, 4), (1, 32), (2, 1), (1, 128))):
      self.assertIn("can, by paged.tpu", self.kernel(
          Heads(key_heads, 128, 128), 64, jnp.bfloat16, tokens=tokens, requests=requests,
          group=group), (tokens, requests, key_heads, group))

  def test_block_sizes_that_do_not_fit_are_refused_by_name(self):
    verdict = lambda block_q: self.kernel(
        Heads(8, 128, 128), 64, jnp.bfloat16, tokens=65536, requests=8, group=4,
        block_sizes=BlockSizes(block_q=block_q))
    self.assertRegex(verdict(1), "by paged.xla, not by paged.tpu: .* 65536 steps of 1 quer.*"
                     "larger block_q")
    self.assertIn("can, by paged.tpu", verdict(16))
    self.assertRegex(verdict(16384), "not by paged.tpu: blocks of block_q 16384 with 32 query "
                     "heads: .* bytes of vector memory, .* block_q of at most 256")

  def test_requests_of_one_query_are_at_most_as_many_steps_as_requests(self):
    verdict = self.kernel(Heads(8, 128, 128), 64, jnp.bfloat16, tokens=65536, requests=64, group=4,
                          distribution=jax.ShapeDtypeStruct((3,), jnp.int32))
    self.assertIn("can, by paged.tpu", verdict)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow([("ragged", 512)],
                                                *itertools.product(ROWS, (1, 512))))
  def test_interpreted_rows(self, name, requests):
    """Compiles what is interpreted above, in rotation for every chip and configuration."""
    row = ROWS[name]
    repeated = cdiv(requests, len(row.case.lengths))
    case = row.case._replace(lengths=row.case.lengths * repeated,
                             queries=row.case.queries * repeated)
    chip, precision = tpu_cases.compiled_for(f"{name} {requests}")
    place = SingleDeviceSharding(static_profile.devices(chip)[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                          jax.eval_shape(lambda: setup(row._replace(case=case))[0]))
    with jax.default_matmul_precision(precision):
      text = jax.jit(lambda *a: run(row, *a)).trace(*shapes).lower(
          lowering_platforms=("tpu",)).compile().as_text()
    kernels = 2 if case.distribution is not None else 1  # those of one query by one of their own
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), kernels)

  def text(self, chip, shape, dtype, tokens, check_vma=False):
    """Returns the text of forward and backward, compiled inside the caller's shard_map."""
    key_heads, group, width, page = shape
    mesh = Mesh(np.array(static_profile.devices(chip)[:1]), ("dp",))
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P("dp")))
    query = array(dtype, tokens, key_heads * group, width)
    cache = PagesV2(array(dtype, 256, page, 2 * key_heads, width))
    metadata = PagesMetadata(*(array(jnp.int32, *x) for x in ((16, 64), (16,), (17,))))
    def gradient(query, cache, metadata):
      loss = lambda query, cache: ragged_page_attention_v2(query, cache, metadata, PagedOptions(
          sliding_window=(500, 0), metadata=TPU)).attention_outputs.astype(jnp.float32).sum()
      return jax.grad(loss, (0, 1))(query, cache)
    spread = jax.shard_map(gradient, mesh=mesh, in_specs=P("dp"),
                           out_specs=(P("dp"), PagesV2(P("dp"))), check_vma=check_vma)
    return jax.jit(spread).trace(query, cache, metadata).lower(
        lowering_platforms=("tpu",)).compile().as_text()

  @parameterized.named_parameters(
      ("v5e", "v5e", (8, 4, 128, 16), "bfloat16", 64),
      ("v6e", "v6e", (2, 8, 64, 32), "bfloat16", 16),
      ("v5p", "v5p", (4, 1, 256, 16), "float32", 64),
      ("tpu7x", "tpu7x", (1, 8, 128, 8), "bfloat16", 16))
  def test_compiles(self, chip, shape, dtype, tokens):
    self.assertIn(chip, static_profile.CHIPS)
    text = self.text(chip, shape, dtype, tokens, check_vma=chip == "v5e")
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)

  @parameterized.parameters(*sampling.with_slow(
      [("v5e", 65536)], ("v5p", 131072), ("v6e", 16384), ("tpu7x", 131072)))
  def test_long_prefills_compile_with_nearly_full_scalar_memory(self, chip, tokens):
    mesh = Mesh(np.array(static_profile.devices(chip)[:1]), ("dp",))
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P()))
    requests, width = 256, 896 * 1024 // 4 // 256
    compiled = jax.jit(lambda query, cache, metadata: ragged_page_attention_v2(
        query, cache, metadata, PagedOptions(metadata=TPU)).attention_outputs).trace(
            array(jnp.bfloat16, tokens, 1, 128), PagesV2(array(jnp.bfloat16, 4096, 64, 2, 128)),
            PagesMetadata(*(array(jnp.int32, *x) for x in (
                (requests, width), (requests,), (requests + 1,))))).lower(
                    lowering_platforms=("tpu",)).compile()
    self.assertEqual(compiled.as_text().count('custom_call_target="tpu_custom_call"'), 1)

  @parameterized.named_parameters(
      *sampling.with_slow((
        ("v3", "v6e", "v3", 4, jnp.bfloat16, None),
        ("v3_8_bits", "v5e", "v3", 2, jnp.float8_e4m3fn, "tensor"),
        ("v1_8_bits", "tpu7x", "v1", 2, jnp.int8, "tensor")),
        ("v2_three_heads", "v5p", "v2", 3, jnp.bfloat16, None)))
  def test_compiles_without_copies_of_the_pages(self, chip, layout, key_heads, dtype, scales):
    """Checks temporary memory, and that new tokens are written in place."""
    mesh, i32 = Mesh(np.array(static_profile.devices(chip)[:1]), ("dp",)), jnp.int32
    place = NamedSharding(mesh, P())
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    kind = {"v1": PagesV1, "v2": PagesV2, "v3": PagesV3}[layout]
    cache = jax.tree.map(lambda x: array(x.dtype, *x.shape), jax.eval_shape(lambda: pages.init(
        kind, 4096, 32, Heads(key_heads, 128, 128), dtype, scales)))
    tokens, writes = 16, layout == "v3"
    metadata = PagesMetadata(array(i32, 16, 64), array(i32, 16),
                             None if layout == "v1" else array(i32, 17))
    new = array(jnp.bfloat16, tokens, key_heads, 128) if writes else None
    def attend(cache, query, new, metadata):
      return attention(query, new, new, mechanism=NAMES[layout], layout="thd", cache_view=cache,
                       cache_metadata=metadata, metadata=TPU)[::3]
    with jax.enable_x64(True):  # the kernels use 32 bits all the same
      compiled = jax.jit(attend, donate_argnums=(0,) if writes else ()).trace(
          cache, array(jnp.bfloat16, tokens, key_heads * 4, 128), new, metadata).lower(
              lowering_platforms=("tpu",)).compile()
    self.assertEqual(compiled.as_text().count('custom_call_target="tpu_custom_call"'), 1)
    held, memory = sum(x.size * x.dtype.itemsize for x in cache if x is not None), (
        compiled.memory_analysis())
    self.assertLess(memory.temp_size_in_bytes, held // 20)
    if writes:
      self.assertIn("input_output_alias", compiled.as_text())
      self.assertGreaterEqual(memory.alias_size_in_bytes, held)


if __name__ == "__main__":
  absltest.main()
