# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding from pages by the GPU kernel: interpreted on a CPU, and compiled for a Hopper.

See gpu_test for what the tests of all GPU kernels share.
"""

import os

# Interpreted warpgroups wait for each other on threads of XLA's, of which there are otherwise as
# many as cores.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
import numpy as np

from attn_core import (BlockSizes, Heads, LatentOptions, OperationMetadata, PagedOptions,
                       PagesMetadata, PagesV1, PagesV2, PagesV3, attention, explain,
                       multi_latent_ragged_page_attention, page_attention,
                       ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.caches import latent_pages, pages, prefixes, quantize
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.split_kv import paged
from attn_core_test import gpu_cases, gpu_faults, gpu_interpret, gpu_machine_code, sampling
from attn_core_test.gpu_interpret import interpret
from attn_core_test.paged_cases import Case, run_pages

# The cases that differ most; the others are slow.
FEW = ("v2_pages_of_32_few_queries", "v3_pages_of_64", "v2_int8_pages_of_16")
LATENT = "multi_latent_ragged_page_attention"
WIDTHS = (128, 64)  # of latent rows
# Calls over pages of latent rows: heads, whether rows are padded, and their dtype.
LATENTS = {"two_consumers_padded": (16, True, "bfloat16"),
           "two_row_blocks": (72, False, "bfloat16"),
           "one_consumer": (3, False, "bfloat16"),
           "int8_one_consumer_padded": (3, True, "int8", 32),
           "float8_two_consumers": (16, False, "float8_e4m3fn", 32),
           "int8_pages_of_16": (16, False, "int8"),
           "float8_pages_of_16_padded": (3, True, "float8_e4m3fn"),
           "float8_pages_of_8": (16, False, "float8_e4m3fn", 8)}
BLOCKS = BlockSizes(block_kv=128)
OPTIONS = PagedOptions(metadata=gpu_cases.HOPPER, block_sizes=BLOCKS, return_lse=True)
WHOLE = OPTIONS._replace(block_sizes=None)
# Requests of no, one and several queries, whose windows begin in two blocks; slots that may not be
# read hold NaN.
RAGGED = Case((70, 0, 130, 9), (1, 0, 5, 2), H=40, K=1, page=32, D=64, unused=1, sinks=True,
              dtype="bfloat16",
              options=PagedOptions(sliding_window=(62, 0), logits_soft_cap=2.0))
# The same with score mods, by the layout: blocks of several queries, and of one for each head.
MODDED = {"v2": RAGGED._replace(lengths=(130, 9), queries=(5, 2), H=4, K=2),
          "v3": Case((70, 9), (3, 2), H=6, K=3, page=64, D=64, dtype="bfloat16"),
          "v1": Case((130, 0, 1), (1,) * 3, H=2, K=2, page=32, D=64, rest=0, dtype="bfloat16")}
# Quantized, with scales per token and head, and with one for all keys and one for all values.
QUANTIZED = (
    ("int8_pages_of_96_of_one_head", PagesV1, "int8", "token",
     Case((70, 129), (1, 1), H=3, K=1, page=96, D=64, rest=0, dtype="bfloat16")),
    ("int8_pages_of_48_of_one_head", PagesV2, "int8", "token",
     Case((70, 0, 123, 9), (1, 0, 2, 2), H=4, K=1, page=48, D=64, dtype="bfloat16")),
    ("float8_pages_of_8_of_one_head", PagesV1, "float8_e4m3fn", "token",
     Case((62, 33), (1, 1), H=3, K=1, page=8, D=64, rest=0, dtype="bfloat16")),
    ("int8_pages_of_16", PagesV2, "int8", "token",
     Case((70, 0, 123, 9), (1, 0, 2, 2), H=8, K=4, page=16, D=96, dtype="bfloat16")),
    ("float8_pages_of_24", PagesV2, "float8_e4m3fn", "token",
     Case((70, 192, 150, 9), (1, 1, 2, 2), H=8, K=4, page=24, D=64, dtype="bfloat16")),
    ("float8_padded_pages_of_64", PagesV3, "float8_e4m3fn", "tensor",
     Case((65, 100), (3, 1), H=6, K=3, page=64, D=64, dtype="bfloat16")))
SINGLE = Case((129, 1), (1, 1), page=128, H=2, K=2, D=64, rest=0, dtype="bfloat16")


def requests_with_prefixes():
  """Returns metadata of pages of 8 tokens, of which all share one, and three of five another."""
  tables = np.array([[3, 7, 0, 9], [3, 7, 1, 9], [3, 7, 2, 9], [3, 4, 9, 9], [3, 5, 6, 9]],
                    np.int32)
  return PagesMetadata(tables, np.array([23, 17, 20, 14, 24], np.int32),
                       np.array([0, 4, 5, 8, 10, 13], np.int32))


def prefixed_pages(layout):
  """Returns run(cache, metadata, place), the cache, and `requests_with_prefixes`."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  cache = pages.convert(PagesV1(normal(2, 10, 8, 64), normal(2, 10, 8, 64)), layout,
                        Heads(2, 64, 64))
  query, tokens = normal(13, 4, 64), (normal(13, 2, 64), normal(13, 2, 64))
  def run(cache, metadata, place):
    options = PagedOptions(metadata=place, return_lse=True, logits_soft_cap=2.0,
                           softmax_aux=np.linspace(-1, 1, 4, dtype=np.float32))
    if layout is PagesV3:
      return ragged_page_attention_v3(query, *tokens, cache, metadata, options)
    return ragged_page_attention_v2(query, cache, metadata, options)
  return run, cache, requests_with_prefixes()


def prefixed_latents():
  """The same for latent rows, of more heads than a row block has rows."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  cache = latent_pages.init(10, 8, WIDTHS, dtype="bfloat16")
  cache = cache._replace(pages=normal(*cache.pages.shape))
  query, rows = normal(13, 40, 192), normal(13, 192)
  run = lambda cache, metadata, place: multi_latent_ragged_page_attention(
      query, rows, cache, metadata, softmax_scale=0.1, metadata=place, return_lse=True)
  return run, cache, requests_with_prefixes()


PREFIXED = {"v2": functools.partial(prefixed_pages, PagesV2),
            "v3": functools.partial(prefixed_pages, PagesV3), "latents": prefixed_latents}


def quantized_cache(layout, dtype, scales, case):
  """Quantizes the case's pages; slots that may not be read, and their scales, hold NaN."""
  _, *arrays, _ = case.arrays()
  if scales == "tensor":
    scales = tuple(jnp.float32(np.nanmax(np.abs(x)) / quantize.LIMITS[dtype]) for x in arrays)
    arrays = [pages.store(x, dtype, scale) for x, scale in zip(arrays, scales)]
  else:
    arrays, scales = zip(*(quantize.quantize(x, dtype) for x in arrays))
    scales = [x.transpose(1, 2, 0) for x in scales]
  return pages.convert(PagesV1(*arrays, *scales), layout)


def widened(cache, case):
  """Returns keys and values [K, P, page, D] in float32."""
  cache = pages.convert(cache, PagesV1, Heads(case.K, case.D, case.D))
  scales = (x.transpose(2, 0, 1) if x.ndim else jnp.full(cache.key_pages.shape[:3], x)
            for x in cache[2:])
  return [quantize.dequantize(x, scale) for x, scale in zip(cache[:2], scales)]


def numbers(output):
  return [np.asarray(x, np.float32) for x in (output.attention_outputs, output.lse)]


@gpu_interpret.interprets
class InterpretTest(parameterized.TestCase):

  def compare(self, found, expected):
    for x, y, tolerance in zip(found, expected, (1e-2, 1e-5)):
      np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
      np.testing.assert_allclose(x, y, atol=tolerance)

  def test_ragged_equals_the_oracle_in_any_order_and_chunk(self):
    query, key, value, sinks = RAGGED.arrays()
    cache, metadata = pages.convert(PagesV1(key, value), PagesV2), RAGGED.metadata()
    options = OPTIONS._replace(softmax_aux=sinks, sliding_window=(62, 0), logits_soft_cap=2.0)
    run = functools.partial(ragged_page_attention_v2, options=options)
    found = numbers(interpret(run, query, cache, metadata))
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    out, lse = map(np.asarray, RAGGED.oracle(*wide, sinks.astype(jnp.float32)))
    live = sum(RAGGED.queries)
    self.compare([found[0][:live], found[1][:, :live]], [out[:live], lse[:, :live]])
    # The third request first, without its first two queries.
    order = np.array([2, 0, 3, 1, 4])
    moved = PagesMetadata(metadata.page_tables[order], metadata.context_lens[order],
                          np.array([0, 3, 4, 6, 6, -5], np.int32), metadata.num_requests)
    # The last three belong to no request.
    tokens = np.array([3, 4, 5, 0, 6, 7, *range(8, 13)])
    again = numbers(interpret(run, query[tokens], cache, moved))
    np.testing.assert_array_equal(again[0][:6], found[0][tokens[:6]])
    np.testing.assert_array_equal(again[1][:, :6], found[1][:, tokens[:6]])

  @parameterized.named_parameters((name, name) for name in sampling.names(MODDED, ("v2",)))
  def test_score_mods(self, mechanism):
    case = MODDED[mechanism]
    mod = gpu_cases.every_mod_of_pages(case.H, sum(case.queries) + case.rest)
    case = case._replace(options=case.options._replace(score_mod=mod))
    query, key, value, sinks = case.arrays()
    options = case.options._replace(metadata=gpu_cases.HOPPER, block_sizes=BLOCKS,
                                    return_lse=True)
    found = interpret(lambda sinks, *arrays: run_pages(
        mechanism, case, arrays, options._replace(softmax_aux=sinks)), sinks, query, key, value)
    wide = [None if x is None else x.astype(jnp.float32) for x in (query, key, value, sinks)]
    live = sum(case.queries)
    cut = lambda out, lse: [np.float32(out)[:live], np.float32(lse)[:, :live]]
    self.compare(cut(*found), cut(*case.oracle(*wide)))

  @parameterized.named_parameters(
      x for x in QUANTIZED
      if x[0] == "int8_pages_of_96_of_one_head" or sampling.chosen(x[0]))
  def test_quantized_pages(self, layout, dtype, scales, case):
    query, key, value, _ = case.arrays()
    cache, metadata = quantized_cache(layout, dtype, scales, case), case.metadata()
    if layout is PagesV1:
      metadata = case.metadata(single=True)
    call = {PagesV1: page_attention, PagesV2: ragged_page_attention_v2,
            PagesV3: ragged_page_attention_v3}[layout]
    new = () if layout is not PagesV3 else [
        jnp.zeros((query.shape[0], case.K, case.D), query.dtype)] * 2
    found = interpret(functools.partial(call, options=WHOLE), query, *new, cache, metadata)
    cache = found.cache_view if layout is PagesV3 else cache
    out, lse = map(np.asarray, case.oracle(
        query.astype(jnp.float32), *widened(cache, case), None))
    live = sum(case.queries)
    found = numbers(found)
    self.compare([found[0][:live], found[1][:, :live]], [out[:live], lse[:, :live]])

  @sampling.slow("pages of both other layouts on a GPU")
  @parameterized.named_parameters((name, name) for name in sampling.names(PREFIXED, ("v2",)))
  def test_prefixes_are_read_by_groups(self, name):
    """Also where the requests of a group have more queries together than its pages have tokens."""
    run, cache, alone = PREFIXED[name]()
    counts = (alone.context_lens - np.diff(alone.query_start_loc)) // 8
    shared = alone._replace(prefixes=prefixes.find(alone.page_tables, counts, 2, min_requests=2))
    self.assertTrue((shared.prefixes.page_counts > 0).any(1).all())
    expected = numbers(run(cache, alone, None))
    found = interpret(lambda *x: run(*x, gpu_cases.HOPPER), cache, shared)
    self.compare(numbers(found), expected)
    for x, y in zip(*map(jax.tree.leaves, (found.cache_view, run(cache, alone, None).cache_view))):
      np.testing.assert_array_equal(x, y)

  def test_pages_of_both_other_layouts(self):
    query, key, value, _ = SINGLE.arrays()
    cache, metadata = PagesV1(key, value), SINGLE.metadata(single=True)
    found = numbers(interpret(
        functools.partial(page_attention, options=WHOLE), query, cache, metadata))
    out, lse = SINGLE.oracle(*(x.astype(jnp.float32) for x in (query, key, value)), None)
    self.compare([found[0], found[1]], [np.asarray(out), np.asarray(lse)])
    # The last token of every request is written by the call, into rows of 128.
    last = [(metadata.page_tables[row, (n - 1) // 128], (n - 1) % 128)
            for row, n in enumerate(SINGLE.lengths)]
    new = [jnp.stack([x[:, page, slot] for page, slot in last]) for x in (key, value)]
    padded = pages.convert(cache, PagesV3)
    for page, slot in last:
      padded = padded._replace(pages=padded.pages.at[page, slot].set(jnp.nan))
    output = interpret(functools.partial(ragged_page_attention_v3, options=WHOLE),
                       query, *new, padded, metadata)
    for x, y in zip(numbers(output), found):
      np.testing.assert_array_equal(x, y)


def latent_call(heads, padded, held, page=16, requests=(0, 1, 2, 3)):
  """Returns (query, new rows, cache, metadata) of requests; slots without a token hold NaN."""
  rng = np.random.default_rng(3)
  lengths, queries = np.array([70, 0, 130, 9]), np.array([1, 0, 3, 1])
  rows = rng.normal(size=(4, 144, sum(WIDTHS)))
  query = rng.normal(size=(4, 3, heads, sum(WIDTHS)))
  order = np.array(requests)
  columns = max(9, 144 // page)
  tables = rng.permutation(4 * columns).astype(np.int32)
  last = tables.argmax()  # the last page, behind which there is nothing, is the first request's
  tables[[0, last]] = tables[[last, 0]]
  metadata = PagesMetadata(
      tables.reshape(4, columns)[order], np.int32(lengths[order]),
      np.cumsum([0, *queries[order]]).astype(np.int32))
  cache = latent_pages.init(4 * columns, page, WIDTHS, dtype=held, padded=padded)
  nan = lambda x: x if x is None or x.dtype == jnp.int8 else jnp.full_like(x, jnp.nan)
  cache = cache._replace(pages=nan(cache.pages), rope=nan(cache.rope), scales=nan(cache.scales))
  cache = latent_pages.from_dense(
      cache, jnp.asarray(rows[order], jnp.bfloat16),
      metadata._replace(context_lens=np.int32(lengths - queries)[order]))
  of = lambda x: jnp.asarray(np.concatenate(x), jnp.bfloat16)
  return (of([query[r, :queries[r]] for r in order]),
          of([rows[r, lengths[r] - queries[r]:lengths[r]] for r in order]), cache, metadata)


def latent_attended(query, rows, cache, about, sinks, metadata=gpu_cases.HOPPER):
  output = attention(
      query, rows, None, layout="thd", mechanism=LATENT, cache_view=cache, cache_metadata=about,
      latent_options=LatentOptions(*WIDTHS, 32), softmax_aux=sinks, sliding_window=(62, 0),
      logits_soft_cap=2.0, metadata=metadata, block_sizes=BLOCKS, return_lse=True)
  return output.attention_outputs, output.lse


class LatentTest(parameterized.TestCase):

  @gpu_interpret.interprets
  @parameterized.named_parameters((name, name) for name in sampling.names(
      LATENTS, ("two_consumers_padded",)))
  def test_equals_plain_xla_in_any_batch(self, name):
    arguments = LATENTS[name]
    sinks = jnp.asarray(np.random.default_rng(4).normal(size=arguments[0]), jnp.float32)
    given = (*latent_call(*arguments), sinks)
    found = interpret(latent_attended, *given)
    wide = arguments[2] != "bfloat16"  # plain XLA rounds converted latents to the query's dtype
    query = given[0].astype("float32" if wide else "bfloat16")
    want = jax.jit(functools.partial(
        latent_attended, metadata=OperationMetadata(platform="cpu")))(query, *given[1:])
    for x, y, tolerance in zip(found, want, (1e-2, 1e-5)):
      np.testing.assert_allclose(np.float32(x), np.float32(y), atol=tolerance)
    if sampling.chosen(name):
      again = interpret(latent_attended, *latent_call(*arguments, requests=(3, 2, 0)), sinks)
      tokens = np.array([4, 1, 2, 3, 0])
      np.testing.assert_array_equal(np.float32(again[0]), np.float32(found[0])[tokens])
      np.testing.assert_array_equal(again[1], found[1][:, tokens])

  def test_is_chosen_first_if_supported(self):
    def said(dtype="bfloat16", page=16, widths=(512, 64), padded=False, tokens=4, held=None,
             rope=None, pages_of_a_request=2, **more):
      cache = jax.eval_shape(lambda: latent_pages.init(
          8, page, widths, dtype=held or dtype, padded=padded, rope_dtype=rope or dtype))
      of = lambda *shape: jax.ShapeDtypeStruct((tokens, *shape, sum(widths)), jnp.dtype(dtype))
      about = PagesMetadata(*(jnp.zeros(shape, jnp.int32) for shape in (
          (4, pages_of_a_request), 4, 5)))
      explanation = explain(
          of(128), of(), None, layout="thd", mechanism=LATENT, cache_view=cache,
          cache_metadata=about, latent_options=LatentOptions(*widths, 128),
          **{"metadata": gpu_cases.HOPPER, **more})
      return str(next(v for v in explanation.verdicts if v.mechanism == LATENT))
    for arguments in ({}, {"padded": True}, {"page": 64, "sliding_window": (9, 0)},
                      {"dtype": "float16"}, {"held": "int8"}, {"held": "int8", "page": 24},
                      {"held": "float8_e4m3fn", "page": 64, "padded": True}):
      self.assertRegex(said(**arguments), "can, by latent.pages_gpu")
    for arguments, words in (
        (dict(dtype="float32"), "dtype float32"), (dict(page=20), "pages of 20 tokens"),
        (dict(held="int8", dtype="float16", page=32), "float16 with quantized"),
        (dict(held="int8", page=32, rope="float16"), "a rotary part of float16 with latents in 8"),
        (dict(chunk_size=8), "chunk_size"),
        (dict(widths=(512, 32)), r"rows of 512 \+ 32 numbers"), (dict(precision="highest"),
                                                                  "precision"),
        (dict(pages_of_a_request=4096, tokens=4096), "1073741824 at most")):
      self.assertRegex(said(**arguments), f"by latent.pages, not by latent.pages_gpu: .*{words}")


class ChoiceTest(parameterized.TestCase):

  def kernel(self, layout=PagesV2, heads=Heads(2, 128, 128), page=16, dtype=jnp.bfloat16,
             scales=None, **options):
    query = jax.ShapeDtypeStruct((4, heads.key_heads, heads.key_width),
                                 jnp.bfloat16 if scales else dtype)
    cache = jax.eval_shape(lambda: pages.init(layout, 8, page, heads, dtype, scales))
    metadata = PagesMetadata(jnp.zeros((4, 2), jnp.int32), jnp.zeros(4, jnp.int32))
    name = {PagesV1: "page_attention", PagesV2: "ragged_page_attention_v2",
            PagesV3: "ragged_page_attention_v3"}[layout]
    new = (query, query) if layout is PagesV3 else (None, None)
    explanation = explain(
        query, *new, layout="thd", mechanism=name, cache_view=cache, cache_metadata=metadata,
        **{"metadata": gpu_cases.HOPPER, **options})
    verdict, = (v for v in explanation.verdicts if v.mechanism == name)
    return str(verdict)

  def test_is_chosen_first_if_supported(self):
    for layout, name in ((PagesV1, "gpu"), (PagesV2, "gpu"), (PagesV3, "gpu_writing")):
      self.assertRegex(self.kernel(layout), rf"by paged\.{name}, which goes before")
    mesh = gpu_cases.HOPPER.replace(mesh=AbstractMesh((2,), ("tp",)))
    self.assertRegex(self.kernel(metadata=mesh), "by paged.gpu, which goes before")
    for arguments in (dict(scales="tensor"), dict(scales="token", heads=Heads(4, 64, 64)),
                      dict(scales="token", heads=Heads(1, 64, 64)),
                      dict(scales="token", heads=Heads(1, 64, 64), page=24)):
      self.assertRegex(self.kernel(dtype=jnp.int8, **arguments), "by paged.gpu, which goes before")
    for arguments, words in (
        (dict(dtype=jnp.float32), "dtype float32"), (dict(page=20), "pages of 20 tokens"),
        (dict(dtype=jnp.int8, scales="token"), "pages with scales of 2 heads .*, or of 4 heads"),
        (dict(heads=Heads(2, 32, 32)), "head_dim of 32"),
        (dict(precision="highest"), "precision")):
      self.assertRegex(self.kernel(**arguments), f"by paged.xla, not by paged.gpu: .*{words}")
    with mock.patch.object(mosaic, "cuda_version", return_value=12080):
      self.assertRegex(self.kernel(), "by paged.xla, not by paged.gpu: .*CUDA 12.8:")


class LowerTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name, name) for name in sampling.names(gpu_cases.paged(), FEW))
  def test_for_cuda(self, name):
    self.assertEqual(gpu_faults.check(*gpu_cases.paged_programs()[name]), 2)


class CompileTest(gpu_machine_code.CompileTestCase):
  programs = {"paged_programs": sampling.names(gpu_cases.paged(), FEW)}

  @parameterized.named_parameters(
      (name, name) for name in sampling.names(gpu_cases.paged(), FEW))
  def test_machine_code(self, name):
    operands, heads = gpu_cases.paged()[name]
    tiling = paged.make_tiling(operands, gpu_cases.paged_spec(operands), BlockSizes(), heads)
    self.check_split_kv(name, "paged", tiling.params)


if __name__ == "__main__":
  absltest.main()
