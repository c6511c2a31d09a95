# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Latent attention over pages against its definition in float64: every argument and dtype."""

import functools
from typing import NamedTuple
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

import attn_core
from attn_core import (BlockSizes, LatentOptions, OperationMetadata, PagedOptions, PagesMetadata,
                       attention, explain, merge_partials, multi_latent_ragged_page_attention)
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import drafts, latent, latent_pages, page_checks, pages, prefixes, quantize
from attn_core.caches.paged import layouts
from attn_core.config import devices
from attn_core.kernels.tpu.ragged import common as tpu_common, update_few_rows
from attn_core.references import latent as reference, paged as paged_reference
from attn_core.types import PagedSpec
from attn_core_test import sampling, tpu_interpret

jax.config.update("jax_enable_x64", True)

L, R, NOPE, E, PAGE = 10, 4, 6, 5, 4
LENGTHS, QUERIES, REST = (9, 0, 14), (9, 0, 5), 3
T = sum(QUERIES) + REST
SIZES = BlockSizes(block_q=4, block_kv=8)
MECHANISM = "multi_latent_ragged_page_attention"


class Case(NamedTuple):
  """One call."""

  H: int = 3
  up: bool = False
  arguments: dict = {}
  sinks: bool = False


CASES = {
    "window_sinks_cap": Case(sinks=True, arguments={
        "sliding_window": (6, 0), "logits_soft_cap": 1.5}),
    "not_causal": Case(H=70, arguments={"causal": False, "sliding_window": (3, 2)}),
    "up_chunk": Case(H=2, up=True, sinks=True, arguments={"chunk_size": 6}),
}


def metadata(lengths=LENGTHS, queries=QUERIES):
  """Returns tables of pages in random order; unused entries point outside the pool."""
  tables, free = np.full((len(lengths), 6), 10**6, np.int32), np.random.default_rng(0).permutation(
      8 * len(lengths))
  for row, length in enumerate(lengths):
    used = -(-length // PAGE)
    tables[row, :used], free = free[:used], free[used:]
  return PagesMetadata(tables, np.int32(lengths), np.cumsum([0, *queries]).astype(np.int32))


def arrays(case, dtype="float64", seed=1):
  """Returns query, the rows of every request's tokens [R, S, latent + rope], ups and sinks."""
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  found = {"query": array(T, case.H, (NOPE if case.up else L) + R),
           "rows": array(len(LENGTHS), 6 * PAGE, L + R)}
  if case.up:
    found |= {"key_up": array(L, case.H, NOPE), "value_up": array(L, case.H, E)}
  return found | ({"softmax_aux": array(case.H)} if case.sinks else {})


def new_rows(rows):
  """Returns the rows of the queries' tokens, [T, latent + rope]."""
  found = [x[n - q:n] for x, n, q in zip(rows, LENGTHS, QUERIES)]
  return jnp.concatenate([*found, jnp.full((REST, L + R), jnp.nan, rows.dtype)])


def options_of(x):
  return LatentOptions(L, R, NOPE, x.get("key_up"), x.get("value_up"))


def attended(case, x, cache_dtype=None, writes=True, padded=False, about=None, **more):
  """Returns (output, lse) over pages that hold NaN where no token is."""
  about, rows = about or metadata(), x["rows"]
  dtype = rows.dtype if cache_dtype is None else cache_dtype
  cache = latent_pages.init(8 * len(LENGTHS), PAGE, (L, R), dtype=dtype, padded=padded)
  if cache.scales is None:
    cache = cache._replace(pages=jnp.full_like(cache.pages, jnp.nan))
  held = np.int32(LENGTHS) - (np.int32(QUERIES) if writes else 0)
  cache = latent_pages.from_dense(cache, rows, about._replace(context_lens=held))
  output = attention(
      x["query"], new_rows(rows) if writes else None, None, mechanism=MECHANISM, layout="thd",
      cache_view=cache, cache_metadata=about, latent_options=options_of(x), block_sizes=SIZES,
      softmax_aux=x.get("softmax_aux"), return_lse=True, **case.arguments, **more)
  return output.attention_outputs, output.lse


def defined(case, x):
  """Returns the same by the definition."""
  up = (x["key_up"], x["value_up"]) if case.up else ()
  requests = [(q, *(reference.keys_and_values(rows[:n], L, up) if n else (None, None)))
              for rows, n, q in zip(x["rows"], LENGTHS, QUERIES)]
  given = case.arguments
  spec = PagedSpec((NOPE + R)**-0.5, given.get("logits_soft_cap"), given.get("causal", True),
                   given.get("sliding_window", (None, None)), chunk_size=given.get("chunk_size"))
  return paged_reference.attention(x["query"], requests, spec, x.get("softmax_aux"))


def with_gradients(function, x):
  """Returns results and the gradients of a function of them; rows of no request do not count."""
  found, pull = jax.vjp(function, x)
  count = sum(QUERIES)
  given = [jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) for y in found]
  return found, pull((given[0].at[count:].set(0), given[1].at[:, count:].set(0)))[0]


def close(got, want, tolerance):
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64),
                               rtol=tolerance, atol=tolerance)


@functools.cache
def expected(name):
  case = CASES[name]
  run = functools.partial(with_gradients, functools.partial(defined, case))
  return jax.jit(run, compiler_options=sampling.LEAST)(arrays(case))


class OracleTest(parameterized.TestCase):

  @parameterized.parameters(*CASES)
  def test_value_lse_and_gradients(self, name):
    case = CASES[name]
    run = functools.partial(attended, case, padded=name != "up_chunk")
    got = jax.jit(lambda x: with_gradients(run, x))(arrays(case))
    close(got, expected(name), 1e-10)
    count = sum(QUERIES)
    self.assertFalse(np.asarray(got[0][0][count:]).any())
    self.assertTrue((np.asarray(got[0][1][:, count:]) == -np.inf).all())

  @parameterized.parameters("window_sinks_cap", "up_chunk")
  def test_second_derivatives_and_forward_mode(self, name):
    case = CASES[name]._replace(H=1)
    x, directions = arrays(case), arrays(case, seed=2)
    def curved(function, x):
      count = sum(QUERIES)
      gradient = jax.grad(lambda x: (function(case, x)[0][:count] ** 2).sum())
      return jax.jvp(gradient, (x,), (directions,))
    close(jax.jit(functools.partial(curved, attended))(x),
          jax.jit(functools.partial(curved, defined), compiler_options=sampling.LEAST)(x), 1e-8)

  def test_bfloat16(self):
    case = CASES["window_sinks_cap"]
    out, lse = jax.jit(functools.partial(attended, case))(arrays(case, "bfloat16"))
    self.assertEqual((out.dtype, lse.dtype), (jnp.bfloat16, jnp.float32))
    seen = sum(QUERIES)
    want = jax.jit(functools.partial(defined, case), compiler_options=sampling.LEAST)(
        {name: y.astype(jnp.float64) for name, y in arrays(case, "bfloat16").items()})
    close(out[:seen], want[0][:seen], 2**-6)
    close(lse[:, :seen], want[1][:, :seen], 2**-7)

  def test_a_row_that_is_not_finite_reaches_the_queries_that_see_it_only(self):
    case = CASES["window_sinks_cap"]
    x = arrays(case)
    run = jax.jit(functools.partial(attended, case), static_argnums=1)
    for dtype in (None, "int8"):
      clean = run(x, dtype)
      for column in (2, L + 1):  # of the latent part, and of the rotary part
        out, lse = run({**x, "rows": x["rows"].at[0, 5, column].set(jnp.inf)}, dtype)
        seen = np.isin(np.arange(T), np.arange(5, 9))
        self.assertTrue(np.isnan(np.asarray(out)[seen]).all())
        self.assertTrue(np.isnan(np.asarray(lse)[:, seen]).all())
        close((out[~seen], lse[:, ~seen]), (clean[0][~seen], clean[1][:, ~seen]), 1e-12)


class TpuRow(NamedTuple):
  """A call of the kernel for TPUs."""

  case: Case
  dtype: str = "float32"
  transfers: str = "on_wait"


# Up to 256 rows of queries the keys stay in the matrix units: four queries of 70 heads are more.
ON_TPU = {
    "window_sinks_cap": TpuRow(Case(sinks=True, arguments={
        "sliding_window": (6, 0), "logits_soft_cap": 1.5}), "bfloat16"),
    "one_head_not_causal": TpuRow(Case(H=1, arguments={"causal": False}), "bfloat16", "eager"),
    "up": TpuRow(Case(H=16, up=True, sinks=True)),
    "many_rows": TpuRow(Case(H=70, sinks=True, arguments={"sliding_window": (6, 0)}), "bfloat16"),
    "many_rows_float32": TpuRow(Case(H=70, arguments={"logits_soft_cap": 1.5}), "float32", "eager"),
}
CHOSEN = sampling.names(ON_TPU, ("window_sinks_cap", "many_rows"))
TPU = OperationMetadata(platform="tpu")


class TpuTest(parameterized.TestCase):
  """The kernel for TPUs, interpreted from memory full of NaN with races watched."""

  @parameterized.parameters(*CHOSEN)
  @mock.patch.object(tpu_common, "LATENT_PIECE", 6)  # of blocks of 8 tokens
  def test_value_and_lse(self, name):
    case, dtype, transfers = ON_TPU[name]
    x = arrays(case, dtype)
    want = jax.jit(functools.partial(defined, case))(
        {name: y.astype(jnp.float64) for name, y in x.items()})
    run = jax.jit(functools.partial(attended, case, padded=True, metadata=TPU))
    bad = {**x, "rows": x["rows"].at[0, 5, L + 1].set(jnp.inf)}
    with tpu_interpret.interpreted(transfers):
      (out, lse), after = jax.block_until_ready((run(x), run(bad)))
    self.assertEqual((out.dtype, lse.dtype), (x["query"].dtype, jnp.float32))
    count, most = sum(QUERIES), (2**-6, 2**-7) if dtype == "bfloat16" else (1e-5, 1e-5)
    for got, expected, tolerance in zip((out[:count], lse[:, :count]),
                                        (want[0][:count], want[1][:, :count]), most):
      close(got, expected, tolerance)
    self.assertFalse(np.asarray(out[count:]).any())
    self.assertTrue((np.asarray(lse[:, count:]) == -np.inf).all())
    # A row that is not finite reaches the queries that see it, and changes no bit of others.
    seen = np.isin(np.arange(T), np.arange(5 if case.arguments.get("causal", True) else 0, 9))
    for got, before in zip((after[0], after[1].T), (out, lse.T)):
      self.assertTrue(np.isnan(np.asarray(got, np.float32)[seen]).all())
      close(got[~seen], before[~seen], 0)

  @parameterized.parameters(*sampling.with_slow(
      [("float8_e4m3fn", "float32", 3)], ("float8_e4m3fn", "float32", 70), ("int8", "float32", 3),
      ("float8_e4m3fn", "bfloat16", 3), ("int8", "bfloat16", 70), ("int8", "float32", 1)))
  @mock.patch.object(tpu_common, "LATENT_PIECE", 64)  # of blocks of 128 tokens
  def test_8_bits(self, held, dtype, heads):
    """Compares with plain XLA on the same pages, NaN where no token is, scales included."""
    rng, about, latent_width = np.random.default_rng(1), metadata(), 128
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    query, rows = array(T, heads, latent_width + R), array(3, 6 * PAGE, latent_width + R)
    sinks = array(heads)
    empty = latent_pages.init(24, PAGE, (latent_width, R), dtype=held, rope_dtype=dtype,
                              padded=True)
    self.assertEqual(empty.rope.shape, (24, PAGE, 128))
    empty = empty._replace(rope=jnp.full_like(empty.rope, jnp.nan),
                           scales=jnp.full_like(empty.scales, jnp.nan))
    if held != "int8":
      empty = empty._replace(pages=jnp.full_like(empty.pages, jnp.nan))
    before = about._replace(context_lens=np.int32(LENGTHS) - np.int32(QUERIES))
    def run(rows, platform):
      new = jnp.concatenate([*(x[n - q:n] for x, n, q in zip(rows, LENGTHS, QUERIES)),
                             jnp.full((REST, latent_width + R), jnp.nan, dtype)])
      found = multi_latent_ragged_page_attention(
          query, new, latent_pages.from_dense(empty, rows, before), about, softmax_aux=sinks,
          softmax_scale=0.2, sliding_window=(6, 0), return_lse=True, logits_soft_cap=3.0,
          block_sizes=SIZES, metadata=OperationMetadata(platform=platform))
      return found.attention_outputs, found.lse.T
    run = jax.jit(run, static_argnums=1)
    with tpu_interpret.interpreted():
      got = jax.block_until_ready(run(rows, "tpu"))
      bad = jax.block_until_ready(run(
          rows.at[0, 5, 2].set(jnp.inf).at[2, 2, -1].set(jnp.nan), "tpu"))
    close(got, run(rows, "cpu"), 1e-5 if dtype == "float32" else 2**-5)
    seen = np.isin(np.arange(T), np.arange(5, 9))  # not token 2 of the third request
    for x, y in zip(bad, got):
      self.assertTrue(np.isnan(np.asarray(x, np.float32)[seen]).all())
      close(x[~seen], y[~seen], 0)

  @mock.patch.object(devices, "INT8_PRODUCTS", {None})  # of a chip that is not known, too
  def test_products_of_int8(self):
    """The digits of queries and weights are as exact as bfloat16, also of small numbers."""
    rng, width, count = np.random.default_rng(5), 128, 40
    about = PagesMetadata(np.arange(20, dtype=np.int32).reshape(2, 10), np.int32([count, 33]),
                          np.int32([0, 1, 3]))
    cache = latent_pages.init(20, PAGE, (width, R), dtype="int8", padded=True)
    rows = jnp.asarray(rng.normal(size=(2, count, width + R)) * 10.0**rng.integers(
        -30, 2, (2, count, 1)), jnp.float32)
    cache = latent_pages.from_dense(cache, rows, about)
    # Rows of queries of very different sizes, one of which is zero and one not finite.
    query = jnp.asarray(rng.normal(size=(3, 4, width + R)), jnp.bfloat16)
    query = query * jnp.asarray([1, 1e-30, 0, 30], jnp.bfloat16)[:, None]
    query = query.at[1, 1, 3].set(jnp.inf)
    def run(query, platform):
      found = multi_latent_ragged_page_attention(
          query, None, cache, about, softmax_scale=0.1, return_lse=True,
          latent_options=LatentOptions(width, R),
          metadata=OperationMetadata(platform=platform))
      return found.attention_outputs, found.lse.T
    run = jax.jit(run, static_argnums=1)
    with tpu_interpret.interpreted(), mock.patch.object(
        update_few_rows, "_dot_in_digits", wraps=update_few_rows._dot_in_digits) as products:
      got = jax.block_until_ready(run(query, "tpu"))
    self.assertTrue(products.called)
    want = run(query.astype(jnp.float32), "cpu")
    self.assertEqual(np.isnan(np.asarray(want[1])).sum(), 1)
    for x, y, tolerance in zip(got, want, (2**-8, 2**-16)):
      close(x, y, tolerance)

  @parameterized.parameters(*sampling.with_slow(
      [("draft_mask", 3)], ("draft_mask", 70), ("new", 3), ("new", 70), ("cached", 3)))
  def test_drafts_and_scopes(self, tokens, heads):
    """Compares with plain XLA."""
    case = Case(H=heads, sinks=True, arguments={"sliding_window": (6, 0)})
    x = arrays(case, "float32")
    if tokens == "draft_mask":
      seen = np.random.default_rng(2).random((len(LENGTHS), 9, 9)) < 0.5
      about = metadata()._replace(draft_mask=np.tril(seen | np.eye(9, dtype=bool)))
    else:
      about = metadata()._replace(scope=layouts.Scope(tokens))
    run = lambda **more: jax.jit(functools.partial(
        attended, case, padded=True, about=about, **more))(x)
    with tpu_interpret.interpreted():
      got = jax.block_until_ready(run(metadata=TPU))
    count = sum(QUERIES)
    for x, y in zip(got, run()):
      close(*(z[:count] if z.ndim == 3 else z[:, :count] for z in (x, y)), 1e-5)

  @parameterized.product(heads=(1, 16, 128, 256), held=(None, "int8", "float8_e4m3fn"),
                         dtype=("bfloat16", "float32"), page=(16, 64), queries=(1, 2))
  def test_long_tables_fit_the_vector_memory(self, heads, held, dtype, page, queries):
    requests, tokens = 8, 4096
    cache = jax.eval_shape(lambda: latent_pages.init(
        requests * tokens // page, page, (512, 64), dtype=held or dtype, padded=True))
    shape = lambda *sizes: jax.ShapeDtypeStruct((requests * queries, *sizes), dtype)
    number = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
    about = layouts.PagesMetadata(
        number(requests, tokens // page), number(requests), number(requests + 1))
    said = str(explain(shape(heads, 576), shape(576), None, layout="thd", cache_view=cache,
                       cache_metadata=about, latent_options=LatentOptions(512, 64),
                       softmax_scale=0.1, metadata=TPU, mechanism=MECHANISM))
    self.assertIn("can, by latent.pages_tpu", said)

  def test_the_kernel_is_chosen_where_it_computes_the_call(self):
    def said(dtype="bfloat16", held=None, padded=True, widths=(512, 64), **changes):
      cache = jax.eval_shape(lambda: latent_pages.init(
          64, changes.pop("page", 16), widths, dtype=held or dtype, padded=padded))
      shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
      about = metadata()._replace(**changes.pop("about", {}))
      return str(explain(
          shape(T, 16, sum(widths)), shape(T, sum(widths)), None, layout="thd", cache_view=cache,
          cache_metadata=about, latent_options=LatentOptions(*widths, NOPE), metadata=TPU,
          mechanism=MECHANISM, **changes))
    tree, many = (np.ones((3, n, n), bool) for n in (9, 33))
    for changes in ({}, {"held": "int8"}, {"held": "float8_e4m3fn"}, {"page": 1000},
                    {"about": {"scope": layouts.Scope.NEW}}, {"about": {"draft_mask": tree}}):
      self.assertIn("can, by latent.pages_tpu", said(**changes))
    self.assertIn("can, by latent.pages_tpu", said(
        "float32", widths=(10, 4), sliding_window=(6, 0), logits_soft_cap=1.5,
        softmax_aux=np.zeros(16, np.float32), causal=False, block_sizes=SIZES))
    for changes, words in (
        ({"padded": False}, r"latent rows of 576 numbers: .*init\(padded=True\)"),
        ({"held": "int8", "padded": False}, r"a rotary part of 64 numbers: .*padded=True"),
        ({"held": "int8", "widths": (10, 4)}, "latents of 10 numbers in int8"),
        ({"dtype": "float16"}, "float16"), ({"chunk_size": 6}, "chunk_size=6"),
        ({"precision": "highest"}, "precision"), ({"page": 10**5}, "pages of 100000 tokens"),
        ({"page": 2008}, "pages of 2008 latent rows.*whole tiles of 16"),
        ({"about": {"draft_mask": many}}, "draft_mask of 33 tokens")):
      self.assertRegex(said(**changes),
                       f"can, by latent.pages, not by latent.pages_tpu: .*{words}")


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class TpuCompileTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("v6e", "bfloat16", 64, 16, 1)], ("v6e", "int8", 64, 16, 1),
      ("tpu7x", "float8_e4m3fn", 32, 128, 2), ("v5e", "int8", 32, 70, 4),
      ("v5e", "bfloat16", 8, 1, 1), ("v5p", "float32", 16, 16, 1),
      ("tpu7x", "bfloat16", 32, 128, 2), ("v5p", "bfloat16", 16, 128, 32),
      ("v6e", "int8", 16, 16, 1), ("v5e", "float8_e4m3fn", 32, 16, 1),
      ("v6e", "bfloat16", 24, 16, 1)))
  def test_decoding_copies_no_pages(self, chip, dtype, page, heads, queries):
    """Compiles for a chip: one kernel, and much less temporary memory than the pool has."""
    place = SingleDeviceSharding(static_profile.devices(chip)[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    cache = jax.tree.map(lambda x: array(x.dtype, *x.shape), jax.eval_shape(
        lambda: latent_pages.init(2**16 // page, page, (512, 64), dtype=dtype, padded=True)))
    dtype = dtype if cache.scales is None else "bfloat16"
    about = PagesMetadata(*(array(jnp.int32, *x) for x in ((2, 4096 // page), (2,), (3,))))
    tokens = 2 * queries
    def run(query, rows, cache, about):
      return multi_latent_ragged_page_attention(
          query, rows, cache, about, softmax_scale=0.1, sliding_window=(3000, 0), metadata=TPU)[::3]
    with jax.enable_x64(False):
      found = jax.jit(run, donate_argnums=2).trace(
          array(dtype, tokens, heads, 576), array(dtype, tokens, 576), cache, about).lower(
              lowering_platforms=("tpu",)).compile()
    self.assertEqual(found.as_text().count('custom_call_target="tpu_custom_call"'), 1)
    memory, size = found.memory_analysis(), sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(cache._replace(scales=None)))
    self.assertGreaterEqual(memory.alias_size_in_bytes, size)
    self.assertLess(memory.temp_size_in_bytes, size // 2)


class QuantizedTest(parameterized.TestCase):

  @parameterized.parameters(("int8", 0.03), ("float8_e4m3fn", 0.25))
  def test_latents_in_8_bits_and_the_rotary_part_in_16(self, dtype, limit):
    """Checks against the rows as stored, and states what rounding costs."""
    case = CASES["window_sinks_cap"]
    x = arrays(case)
    stored, scale = quantize.quantize(x["rows"][..., :L], dtype)
    rope = x["rows"][..., L:].astype(jnp.bfloat16).astype(jnp.float64)
    held = jnp.concatenate([quantize.dequantize(stored, scale, jnp.float64), rope], -1)
    run = jax.jit(functools.partial(attended, case), static_argnums=1)
    got, whole = run(x, dtype), run(x, None)
    close(got, run({**x, "rows": held}, None), 1e-6)
    self.assertLess(abs(got[0] - whole[0]).max(), limit)
    gradient = jax.jit(lambda rows, dtype: jax.grad(lambda query: attended(
        case, {**x, "rows": rows, "query": query}, dtype)[0].sum())(x["query"]), static_argnums=1)
    close(gradient(x["rows"], dtype), gradient(held, None), 1e-6)
    with self.assertRaisesRegex(NotImplementedError, "gradients of quantized"):
      jax.grad(lambda rows: attended(case, {**x, "rows": rows}, dtype)[0].sum())(x["rows"])

  def test_the_cache_has_the_rows_of_a_latent_cache(self):
    rows = arrays(CASES["window_sinks_cap"])["rows"].astype(jnp.float32)
    about = metadata((9, 3, 24), (9, 3, 24))
    @functools.partial(jax.jit, static_argnums=1)  # one program, not one for each operation
    def both(rows, dtype):
      whole = latent.append(latent.init(3, 24, (L, R), dtype=dtype), rows, about.context_lens)
      held = latent_pages.from_dense(latent_pages.init(24, PAGE, (L, R), dtype=dtype), rows, about)
      wanted = whole.latents if whole.scale is None else jnp.concatenate([quantize.dequantize(
          whole.latents, whole.scale), whole.rope.astype(jnp.float32)], -1)
      return latent_pages.to_dense(held, about), wanted
    live = np.arange(24) < about.context_lens[:, None]
    for dtype in ("int8", "float8_e4m3fn", "float32"):
      found, wanted = both(rows, dtype)
      np.testing.assert_array_equal(found, np.where(live[..., None], wanted, 0))


class CallTest(parameterized.TestCase):

  def call(self, query, rows, cache, about, **more):
    return multi_latent_ragged_page_attention(
        query, rows, cache, about, latent_options=LatentOptions(L, R, NOPE), return_lse=True,
        **more)

  def test_reading_equals_writing(self):
    case = CASES["up_chunk"]
    run = lambda x: (attended(case, x, writes=False), attended(case, x))
    close(*jax.jit(run)(arrays(case)), 0)

  @parameterized.parameters(None, "int8")
  def test_chunks_and_decode_equal_the_whole(self, dtype):
    """Prefills one request in chunks while another decodes."""
    x = arrays(Case(H=2), "float32")
    query = jnp.asarray(np.random.default_rng(3).normal(size=(2, 20, 2, L + R)), jnp.float32)
    rows = x["rows"][:2, :20]
    empty = latent_pages.init(24, PAGE, (L, R), dtype=dtype or "float32")
    about = metadata((20, 20), (20, 20))
    step = jax.jit(self.call)
    whole = step(query.reshape(40, 2, -1), rows.reshape(40, -1), empty, about)
    # 10 tokens a step, so that all steps are one program.
    ends = np.array([[0, 0], [9, 1], [10, 10], [11, 19], [20, 20]])
    cache, found = empty, [[], []]
    for begin, end in zip(ends, ends[1:]):
      part = lambda x: jnp.concatenate([y[b:e] for y, b, e in zip(x, begin, end)])
      new = about._replace(context_lens=np.int32(end),
                           query_start_loc=np.cumsum([0, *(end - begin)]).astype(np.int32))
      output = step(part(query), part(rows), cache, new)
      cache = output.cache_view
      for row, out in enumerate(jnp.split(output.attention_outputs, new.query_start_loc[1:2])):
        found[row].append(out)
    found = jnp.concatenate([*found[0], *found[1]])
    close(cache, whole.cache_view, 0)
    self.assertEqual(cache.pages.dtype, dtype or jnp.float32)
    close(found, whole.attention_outputs, 1e-6)

  def test_parts_prefixes_and_trees(self):
    x = arrays(Case(H=2), "float32")
    about = metadata((14, 13), (4, 3))
    tables = np.array(about.page_tables)
    tables[1, :2] = tables[0, :2]
    about = about._replace(page_tables=tables)
    cache = latent_pages.from_dense(latent_pages.init(24, PAGE, (L, R), dtype="float32"),
                                    x["rows"][:2].at[1, :8].set(x["rows"][0, :8]), about)
    query = x["query"][:7]
    run = lambda **fields: self.call(query, None, cache, about._replace(**fields))
    whole = run()
    parts = [run(scope=scope) for scope in (layouts.Scope.CACHED, layouts.Scope.NEW)]
    close(merge_partials([p.attention_outputs[None] for p in parts],
                         [p.lse[None] for p in parts])[0][0], whole.attention_outputs, 1e-5)
    shared = prefixes.find(tables, [2, 2], min_requests=2)
    self.assertEqual(shared.page_counts.max(), 2)
    close(run(prefixes=shared).attention_outputs, whole.attention_outputs, 1e-5)
    chain = drafts.mask(np.array([[-1, 0, 1, 2], [-1, 0, 1, -1]], np.int32))
    close(run(draft_mask=chain).attention_outputs, whole.attention_outputs, 1e-6)

  def test_options_names_and_explain(self):
    x = arrays(Case(H=2), "float32")
    cache, about = latent_pages.init(24, PAGE, (L, R), dtype="float32"), metadata()
    rows = jnp.ones((T, L + R), jnp.float32)
    want = self.call(x["query"], rows, cache, about, sliding_window=(5, 0))
    got = multi_latent_ragged_page_attention(
        x["query"], rows, cache, about, PagedOptions(
            sliding_window=(5, 0), softmax_scale=(NOPE + R)**-0.5, return_lse=True))
    close(got, want, 0)
    keywords = {"layout": "thd", "cache_view": cache, "cache_metadata": about,
                "latent_options": LatentOptions(L, R, NOPE), "sliding_window": (5, 0)}
    for name in ("auto", MECHANISM, f"{MECHANISM}_v1", f"{MECHANISM}_v2",
                 attn_core.AttentionMechanism.MULTI_LATENT_RAGGED_PAGE_ATTENTION_V2):
      found = attention(x["query"], rows, None, mechanism=name, return_lse=True, **keywords)
      close(found, want, 0)
      for platform in ("cpu", "tpu", "gpu"):
        said = explain(x["query"], rows, None, mechanism=name,
                       metadata=OperationMetadata(platform=platform), **keywords)
        self.assertEqual(said.chosen, MECHANISM)
        self.assertIn("can, by latent.pages", str(said))
        self.assertNotIn("no latent_options", str(said))
    self.assertIs(attn_core.multi_latent_ragged_page_attention_v1,
                  multi_latent_ragged_page_attention)
    for name in ("multi_latent_attention", "ragged_page_attention_v3"):
      with self.assertRaisesRegex((NotImplementedError, ValueError), "PagesLatent"):
        attention(x["query"], rows, None, mechanism=name, **keywords)

  def test_a_call_copies_no_pages(self):
    """Temporary memory of decoding is far below that of the pages, which are written in place."""
    about = PagesMetadata(np.arange(64, dtype=np.int32).reshape(1, 64), np.int32([1000]))
    cache = latent_pages.init(64, 16, (512, 64), dtype="float32")
    step = jax.jit(lambda query, rows, cache: multi_latent_ragged_page_attention(
        query, rows, cache, about, softmax_scale=0.1)[::3], donate_argnums=2)
    memory = step.lower(jnp.ones((1, 16, 576), jnp.float32), jnp.ones((1, 576), jnp.float32),
                        cache).compile().memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, cache.pages.nbytes)
    self.assertLess(memory.temp_size_in_bytes, cache.pages.nbytes)


POOL = latent_pages.init(24, PAGE, (L, R), dtype="float32")
EIGHT = latent_pages.init(24, PAGE, (L, R), dtype="int8")
ONES = jnp.ones((T, L + R), jnp.float32)
UP = jnp.ones((L, 3, NOPE), jnp.float32), jnp.ones((L, 3, E), jnp.float32)

# Changes of a call, and what its error says.
BAD = (
    ({"latent_options": None}, "latent_options: got None with a PagesLatent"),
    ({"latent_options": LatentOptions(L + 1, R - 1, NOPE)},
     "latent_options.latent_width: got 11; expected 10, that of the pages"),
    ({"latent_options": LatentOptions(L, R + 1, NOPE)}, "latent_options.rope_width: got 5"),
    ({"latent_options": LatentOptions(L, R)}, "softmax_scale: got None for absorbed queries"),
    ({"latent_options": LatentOptions(L, R, None, *UP)}, r"query: got .*\[T, H, 10\], nope 6"),
    ({"query": jnp.ones((T, 3, L), jnp.float32)}, r"query: got .*\[T, H, 14\], absorbed"),
    ({"query": jnp.ones((T, 3, L + R), jnp.bfloat16)}, "query: got .*dtype of the pages"),
    ({"key": ONES[:-1]}, r"latents \(key\): got .*\[17, 14\], a latent row for each query"),
    ({"key": ONES[:, :L]}, r"latents \(key\): got .*latent 10 . rope 4"),
    ({"key": ONES[:, None]}, r"latents \(key\): got .*\[B, S, latent|latents .key.: got .*\[total"),
    ({"key": ONES.astype("bfloat16")}, r"latents \(key\): got .*dtype of the pages, float32"),
    ({"value": ONES}, "value: got .*None with latent_options"),
    ({"layout": "bthd"}, "layout: got 'bthd'"),
    ({"cache_view": POOL._replace(pages=POOL.pages[..., 1:])},
     "cache_view: got .*rows of 14 numbers: latent 10 . rope 4, or padded to 128"),
    ({"cache_view": POOL._replace(pages=POOL.pages[0])}, r"cache_view: got .*\[P, page, latent"),
    ({"cache_view": POOL._replace(widths=(L, R))}, "cache_view.widths: got"),
    ({"cache_view": POOL._replace(scales=jnp.ones((24, PAGE)))}, "cache_view.scales: got an arr"),
    ({"cache_view": EIGHT._replace(scales=None)}, "cache_view.scales: got None"),
    ({"cache_view": EIGHT._replace(rope=EIGHT.rope[..., 1:])}, "cache_view.rope: got"),
    ({"cache_view": EIGHT._replace(rope=EIGHT.pages)}, "cache_view.rope: got"),
    ({"cache_metadata": metadata()._replace(page_tables=np.full((3, 6), 24, np.int32))},
     "page_tables: got .*page ids from 0 to 23"),
    ({"cache_metadata": metadata()._replace(page_tables=np.int32([range(6)] * 3))},
     "page_tables: got .*one request's row only"),
    ({"cache_metadata": metadata()._replace(context_lens=np.int32([9, 0, 25]))},
     "context_lens: got .*from 0 to 24"),
    ({"cache_metadata": metadata()._replace(query_start_loc=np.int32([0, 9, 8, 14]))},
     "query_start_loc: got .*never decrease"))


class BadInputTest(parameterized.TestCase):

  @parameterized.named_parameters(*[(str(n), *bad) for n, bad in enumerate(BAD)])
  def test_errors(self, changes, message):
    call = {"query": jnp.ones((T, 3, L + R), jnp.float32), "key": ONES, "value": None,
            "layout": "thd", "latent_options": LatentOptions(L, R, NOPE), "cache_view": POOL,
            "cache_metadata": metadata(), "mechanism": MECHANISM, **changes}
    with self.assertRaisesRegex(ValueError, message):
      attention(**call)

  def test_flags_under_jit(self):
    flag = jax.jit(lambda about: page_checks.flag(POOL, about, T))
    self.assertFalse(flag(metadata()))
    self.assertTrue(flag(metadata()._replace(context_lens=np.int32([9, 0, 25]))))

  @parameterized.parameters(
      (lambda: latent_pages.init(0, 4, (L, R)), "num_pages: got 0"),
      (lambda: latent_pages.init(4, 4, 576), "widths: got 576"),
      (lambda: latent_pages.init(4, 4, (L, R), dtype="int4"), "dtype"),
      (lambda: latent_pages.init_like(ONES[0], 4, 4, (L, R)), "like: got"),
      (lambda: latent_pages.append(POOL, ONES[:, 1:], np.zeros(T, int)), "latents: got"),
      (lambda: latent_pages.append(POOL, ONES.astype("bfloat16"), np.zeros(T, int)),
       "latents: got .*float32"),
      (lambda: latent_pages.append(POOL, ONES, np.zeros(3, int)), "mapping: got"),
      (lambda: latent_pages.append(pages.init(layouts.PagesV2, 4, 4, layouts.Heads(1, 8, 8)),
                                   ONES, np.zeros(T, int)), "cache: got PagesV2"),
      (lambda: latent_pages.from_dense(POOL, jnp.ones((3, 25, L + R)), metadata()),
       "latents: got .*S at most 24"),
      (lambda: pages.append(POOL, ONES[:, None], ONES[:, None], np.zeros(T, int)),
       "cache: got PagesLatent; expected .*caches.latent_pages"),
      (lambda: pages.convert(POOL, layouts.PagesV2), "cache: got PagesLatent"),
      (lambda: pages.init(latent_pages.PagesLatent, 4, 4, layouts.Heads(1, 14, 10)),
       "layout: got .*caches.latent_pages"))
  def test_functions_of_pages(self, run, message):
    with self.assertRaisesRegex(ValueError, message):
      run()

  def test_init_like_and_copies(self):
    for padded, width in ((False, 14), (True, 128)):
      found = latent_pages.init_like(ONES[:, None], 6, 4, (L, R), padded=padded)
      self.assertEqual((found.pages.shape, found.pages.dtype), ((6, 4, width), jnp.float32))
    full = latent_pages.append(EIGHT, ONES, np.arange(T))
    moved = pages.copy_pages(full, np.int32([0, 1]), np.int32([20, 30]))
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(full), strict=True):
      np.testing.assert_array_equal(x[20], y[0])
      np.testing.assert_array_equal(np.delete(x, 20, 0), np.delete(y, 20, 0))


if __name__ == "__main__":
  absltest.main()
