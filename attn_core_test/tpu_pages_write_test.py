# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""New tokens that the TPU kernel writes to pages, byte for byte as plain XLA writes them.

Interpret mode watches for races, and runs with transfers executed at once and as late as possible.
"""

import functools
import types
from typing import NamedTuple
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, Heads, LatentOptions, OperationMetadata, PagesMetadata, PagesV3,
                       attention)
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import latent_pages, pages
from attn_core.kernels.tpu.ragged import new_tokens, row_writes, runs
from attn_core_test import sampling
from attn_core_test.tpu_interpret import interpreted

TPU = OperationMetadata(platform="tpu")
REQUESTS, TOKENS, ROW_PAGES, PAGE, POOL = 4, 26, 5, 8, 24
OUTSIDE = 10**6
FREE = np.random.default_rng(0).permutation(POOL)[:REQUESTS * ROW_PAGES].reshape(REQUESTS, -1)


class Requests(NamedTuple):
  """Metadata of one call: lengths and numbers of queries, and changed entries of the tables."""

  lengths: tuple[int, ...]
  queries: tuple[int, ...]
  pages: tuple[tuple[int, int, int], ...] = ()  # (request, column, page id)
  first: int = 0  # query_start_loc[0]
  used: int | None = None  # num_requests

  def metadata(self) -> PagesMetadata:
    tables = FREE.astype(np.int32).copy()
    for request, column, page in self.pages:
      tables[request, column] = page
    starts = np.cumsum([self.first, *self.queries])
    used = REQUESTS if self.used is None else self.used
    return PagesMetadata(*(jnp.asarray(x, jnp.int32) for x in (
        tables, self.lengths, starts, used)))

  def rows_in_tables(self) -> np.ndarray:
    """Returns which rows are no queries beyond their table, which calls outside of jit refuse."""
    found, begin = np.ones(TOKENS, bool), self.first
    for length, count in list(zip(self.lengths, self.queries))[:self.used]:
      rows = found[begin:begin + count]
      rows[:] = np.arange(length - count, length)[:rows.size] < ROW_PAGES * PAGE
      begin += count
    return found


# The second request reads, in pages of its own table, what the first one writes in this call.
SHARED = tuple((1, column, int(FREE[0, column])) for column in range(ROW_PAGES))
CALLS = {
    "partial_and_whole_pages": Requests((23, 3, 40, 1), (13, 3, 9, 1)),
    "one_query_each": Requests((8, 9, 16, 33), (1, 1, 1, 1)),
    "nothing": Requests((5, 0, 9, 0), (0, 0, 0, 0)),
    "invalid_page_ids": Requests((23, 8, 40, 1), (13, 3, 9, 1), (
        (0, 1, -1), (1, 0, POOL), (2, 4, OUTSIDE), (3, 0, -OUTSIDE))),
    "one_request_reads_what_another_writes": Requests((12, 17, 2, 5), (12, 3, 1, 2), SHARED),
    "more_queries_than_tokens": Requests((4, 2, 9, 1), (9, 2, 3, 4)),
    "longer_than_the_tables": Requests((45, 41, 60, 3), (9, 2, 3, 4)),
    "more_queries_than_the_call_has": Requests((23, 20, 30, 9), (13, 9, 9, 9)),
    "first_queries_of_no_request": Requests((9, 8, 3, 1), (4, 3, 3, 1), first=2),
    "unused_rows": Requests((23, 8, 999, 999), (13, 3, -20, 4), used=2),
}
SLOW = sampling.names(CALLS, ("partial_and_whole_pages", "invalid_page_ids",
                              "one_request_reads_what_another_writes", "unused_rows"))


def arrays(tokens: int, pool: int, page: int, dtype: str = "float32", scales: str | None = None,
           heads: tuple[int, int] = (2, 1)):
  """Returns query, key, value and pages full of numbers."""
  rng = np.random.default_rng(1)
  query, key, value = (jnp.asarray(rng.normal(size=(tokens, h, 128)), jnp.float32)
                       for h in (heads[0], heads[1], heads[1]))
  cache = pages.init(PagesV3, pool, page, Heads(heads[1], 128, 128), dtype, scales)
  # 8 bits: every code but those of NaN.
  shape = cache.pages.shape
  numbers = rng.integers(0, 100, shape) if scales else rng.normal(size=shape)
  held = jnp.asarray(numbers, jnp.int8 if scales else dtype)
  held = jax.lax.bitcast_convert_type(held, cache.pages.dtype)
  if scales:  # numbers of about 1, as those of the new tokens are
    cache = cache._replace(key_scales=jnp.float32(0.02) * cache.key_scales,
                           value_scales=jnp.float32(0.03) * cache.value_scales)
  return query, key, value, cache._replace(pages=held)


def attend(metadata: OperationMetadata | None, blocks: BlockSizes, query, key, value, cache,
           requests):
  output = attention(query, key, value, mechanism="ragged_page_attention_v3", layout="thd",
                     cache_view=cache, cache_metadata=requests, metadata=metadata,
                     block_sizes=blocks, return_lse=True)
  return output.attention_outputs, output.lse, output.cache_view


class Program:
  """One call, compiled for the interpreted kernel and for plain XLA, for any metadata."""

  def __init__(self, operands, requests, blocks, transfers="on_wait"):
    self.operands, self.transfers = operands, transfers
    with interpreted(transfers):
      self.kernel = jax.jit(functools.partial(attend, TPU, blocks)).lower(
          *operands, requests).compile()
    self.xla = jax.jit(functools.partial(attend, None, blocks)).lower(
        *operands, requests).compile()

  def check(self, test, requests, rows=slice(None)):
    """Compares the results of some rows, and all bytes of the pages."""
    with interpreted(self.transfers):
      found = jax.block_until_ready(self.kernel(*self.operands, requests))
    expected = self.xla(*self.operands, requests)
    for x, y, at in zip(found[:2], expected[:2], (rows, (slice(None), rows))):
      np.testing.assert_allclose(x[at], y[at], atol=1e-5)
    for x, y in zip(jax.tree.leaves(found[2]), jax.tree.leaves(expected[2]), strict=True):
      test.assertEqual(x.dtype, y.dtype)
      test.assertEqual(np.asarray(x).tobytes(), np.asarray(y).tobytes())
    return found


@functools.cache
def program(transfers: str) -> Program:
  return Program(arrays(TOKENS, POOL, PAGE), CALLS["nothing"].metadata(),
                 BlockSizes(block_q=4, block_kv=16), transfers)


class BytesTest(parameterized.TestCase):

  @parameterized.parameters(*SLOW)
  def test_as_xla_writes_them(self, name):
    found = program("on_wait").check(
        self, CALLS[name].metadata(), CALLS[name].rows_in_tables())
    self.assertEqual(np.asarray(found[2].pages).tobytes() ==
                     np.asarray(program("on_wait").operands[3].pages).tobytes(), name == "nothing")

  @parameterized.parameters("one_request_reads_what_another_writes", "partial_and_whole_pages")
  def test_transfers_at_once(self, name):
    program("eager").check(self, CALLS[name].metadata())

  def test_tokens_that_are_not_awaited_are_noticed(self):
    """Checks that these tests see a kernel that reads pages before they are written."""
    requests = CALLS["one_request_reads_what_another_writes"].metadata()
    unawaited = types.SimpleNamespace(by_sizes=runs.by_sizes, powers_of_two=lambda *_: None)
    # No other test has these blocks: a program that has been traced is not traced again.
    with unittest.mock.patch.object(new_tokens, "runs", unawaited):
      changed = Program(arrays(TOKENS, POOL, PAGE), requests, BlockSizes(block_q=2, block_kv=16))
    with self.assertRaises(AssertionError):
      changed.check(self, requests)

  @parameterized.parameters(*sampling.with_slow(
      [("int8", "tensor")], ("int8", "token"), ("float8_e4m3fn", "token"),
      ("float8_e4m3fn", "tensor")))
  def test_8_bits(self, dtype, scales):
    blocks = BlockSizes(block_q=4, block_kv=128 if scales == "token" else 16)
    operands = arrays(TOKENS, POOL, PAGE, dtype, scales, heads=(4, 2))
    requests = CALLS["partial_and_whole_pages"].metadata()
    Program(operands, requests, blocks).check(self, requests)

  def test_one_request(self):
    """Writes whole pages, and pages that begin and end within a run of tokens."""
    operands = arrays(37, 8, 8)
    make = lambda length: PagesMetadata(*(jnp.asarray(x, jnp.int32) for x in (
        [[5, 2, 7, 0, 3, 1]], [length], [0, 37])))
    one = Program(operands, make(37), BlockSizes(block_q=16, block_kv=16))
    for length in 37, 40, 43:
      one.check(self, make(length))

  @sampling.slow("256 requests of one token")
  def test_256_requests(self):
    """One query each, without and with a distribution, in pages of 4 that all requests share."""
    number, rng = 256, np.random.default_rng(2)
    tables = rng.permutation(2 * number).reshape(number, 2)
    lengths = rng.integers(1, 9, number)
    operands = arrays(number, 2 * number, 4, heads=(1, 1))
    requests = PagesMetadata(*(jnp.asarray(x, jnp.int32) for x in (
        tables, lengths, np.arange(number + 1))))
    Program(operands, requests, BlockSizes(block_kv=8)).check(self, requests)
    Program(operands, requests._replace(query_start_loc=None), BlockSizes(block_kv=8)).check(
        self, requests._replace(query_start_loc=None))

  def test_the_first_of_two_kernels_writes_for_both(self):
    """A request of one query reads what one of many writes in the same call."""
    requests = Requests((25, 17, 2, 5), (1, 12, 1, 2)).metadata()
    tables = requests.page_tables.at[0, :3].set(requests.page_tables[1, :3])
    requests = requests._replace(page_tables=tables, num_requests=None,
                                 distribution=jnp.asarray([1, 1, 4], jnp.int32))
    Program(arrays(TOKENS, POOL, PAGE), requests, BlockSizes(block_q=4, block_kv=16)).check(
        self, requests)


class LatentRowsTest(parameterized.TestCase):
  """Latent rows, which are quantized for pages of 8 bits, and their scales."""

  WIDTHS = (128, 20)

  def operands(self, about, page, dtype, of="bfloat16", padded=True):
    """Returns query, new rows and a cache, with NaN where no token is."""
    rng, tokens = np.random.default_rng(3), int(about.query_start_loc[-1]) + 2
    query = jnp.asarray(rng.normal(size=(tokens, 2, sum(self.WIDTHS))), of)
    rows = jnp.asarray(rng.normal(size=(tokens, sum(self.WIDTHS))) * 10.0**rng.integers(
        -3, 1, (tokens, 1)), of)
    rows = rows.at[-1].set(jnp.nan).at[1].set(0)
    cache = latent_pages.init(24, page, self.WIDTHS, dtype=dtype, padded=True)
    if cache.scales is None:
      cache = cache._replace(pages=jnp.full_like(cache.pages, jnp.nan))
    else:
      nan = lambda x: jnp.full_like(x, jnp.nan if x.dtype != jnp.int8 else 77)
      scales = nan(cache.scales) if padded else nan(cache.scales)[:, :page]
      cache = cache._replace(pages=nan(cache.pages), rope=nan(cache.rope), scales=scales)
    held = latent_pages.from_dense(cache, jnp.asarray(rng.normal(
        size=(len(about.context_lens), about.page_tables.shape[1] * page, sum(self.WIDTHS))), of),
        about._replace(context_lens=about.context_lens - jnp.diff(about.query_start_loc)))
    return query, rows, held

  def check(self, lengths, queries, page, dtype, *, transfers="on_wait", **more):
    row_pages = 6
    tables = np.random.default_rng(0).permutation(24)[:row_pages * len(lengths)]
    about = PagesMetadata(*(jnp.asarray(x, jnp.int32) for x in (
        tables.reshape(len(lengths), -1), lengths, np.cumsum([0, *queries]))))
    operands = self.operands(about, page, dtype, **more)
    def run(query, rows, cache, about, platform):
      found = attention(
          query, rows, None, mechanism="multi_latent_ragged_page_attention", layout="thd",
          cache_view=cache, cache_metadata=about, softmax_scale=0.1, return_lse=True,
          latent_options=LatentOptions(*self.WIDTHS), block_sizes=BlockSizes(block_q=8),
          metadata=OperationMetadata(platform=platform))
      return found.attention_outputs, found.lse, found.cache_view
    run = jax.jit(run, static_argnums=4)
    with interpreted(transfers):
      got = jax.block_until_ready(run(*operands, about, "tpu"))
    query, rows, cache = operands
    if cache.scales is not None:  # plain XLA rounds converted latents to the query's dtype
      query = query.astype(jnp.float32)
    want = run(query, rows, cache, about, "cpu")
    for x, y in zip(got[:2], want[:2]):
      np.testing.assert_allclose(np.float32(x), np.float32(y), atol=2**-6, rtol=2**-6)
    self.assertFalse(np.isnan(np.float32(got[0])).any())
    for x, y in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want[2]), strict=True):
      self.assertEqual((x.shape, x.dtype), (y.shape, y.dtype))
      x, y = np.asarray(x), np.asarray(y)
      if x.dtype == jnp.int8:  # XLA may round a quotient that is as near to two numbers otherwise
        self.assertLessEqual(np.abs(np.int32(x) - y).max(), 1)
        self.assertLessEqual((x != y).sum(), 10)
      else:
        self.assertEqual(x.tobytes(), y.tobytes())

  @parameterized.parameters(*sampling.with_slow(
      [("int8", 64, (100, 0, 70), (75, 0, 3)), ("float8_e4m3fn", 16, (40, 9), (5, 1)),
       ("int8", 128, (130, 300), (3, 70)), ("bfloat16", 16, (20, 9), (20, 2))],
      ("float8_e4m3fn", 64, (100, 0, 70), (75, 0, 3)), ("int8", 16, (40, 9), (5, 1)),
      ("float8_e4m3fn", 128, (130, 300), (3, 70)), ("int8", 48, (100, 40), (60, 1)),
      ("int8", 6, (20, 9), (9, 1)), ("bfloat16", 64, (100, 0, 70), (75, 0, 3)),
      ("int8", 64, (64, 65, 1), (1, 1, 1)), ("int8", 200, (399, 201), (199, 3))))
  @mock.patch.object(row_writes, "MOST_SLOTS", 3)
  def test_as_xla_writes_them(self, dtype, page, lengths, queries):
    self.check(lengths, queries, page, dtype)

  @parameterized.parameters(("eager", "float32", True), ("on_wait", "bfloat16", False))
  def test_transfers_at_once_and_scales_without_padding(self, transfers, dtype, padded):
    """Scales that are not padded are copied, and cut again."""
    self.check((100, 70), (75, 3), 64, "int8", transfers=transfers, of=dtype, padded=padded)


class DerivativesTest(absltest.TestCase):

  def test_gradients_are_those_of_xla(self):
    """Compares those of query, key, value and pages, also through the returned pages."""
    query, key, value, cache = arrays(TOKENS, POOL, PAGE)
    requests, blocks = CALLS["partial_and_whole_pages"].metadata(), BlockSizes(4, 16)
    weights = jnp.cos(jnp.arange(cache.pages.size, dtype=jnp.float32)).reshape(cache.pages.shape)

    def gradient(metadata):
      def loss(query, key, value, held):
        out, _, cache = attend(metadata, blocks, query, key, value, PagesV3(held), requests)
        return jnp.sin(out).sum() + (cache.pages * weights).sum()
      return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(query, key, value, cache.pages)

    with interpreted():
      found = jax.block_until_ready(gradient(TPU))
    for x, y in zip(found, gradient(None)):
      np.testing.assert_allclose(x, y, atol=1e-5)

  def test_the_query_of_8_bit_pages_has_a_gradient_and_keys_do_not(self):
    query, key, value, cache = arrays(TOKENS, POOL, PAGE, "int8", "tensor", heads=(4, 2))
    requests, blocks = CALLS["partial_and_whole_pages"].metadata(), BlockSizes(4, 16)
    loss = lambda query, key: jnp.sin(attend(
        TPU, blocks, query, key, value, cache, requests)[0]).sum()
    with interpreted():
      found = jax.block_until_ready(jax.jit(jax.grad(loss))(query, key))
      with self.assertRaisesRegex(NotImplementedError, "gradients of quantized"):
        jax.eval_shape(jax.grad(loss, 1), query, key)
    self.assertGreater(np.abs(found).max(), 0)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("v6e", 8, "bfloat16", 16, 64)], ("v5e", 1, "float8_e4m3fn", 64, 16),
      ("v5p", 8, "int8", 256, 2048), ("tpu7x", 2, "bfloat16", 48, 256)))
  def test_writes_in_place_within_one_kernel(self, chip, key_heads, dtype, page, tokens):
    place = SingleDeviceSharding(static_profile.devices(chip)[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    cache = jax.tree.map(lambda x: array(x.dtype, *x.shape), jax.eval_shape(lambda: pages.init(
        PagesV3, 2048, page, Heads(key_heads, 128, 128), dtype,
        "tensor" if jnp.dtype(dtype).itemsize == 1 else None)))
    new = array(jnp.bfloat16, tokens, key_heads, 128)
    requests = PagesMetadata(*(array(jnp.int32, *x) for x in ((16, 32), (16,), (17,))))
    compiled = jax.jit(lambda cache, *a: attend(TPU, BlockSizes(), *a[:3], cache, a[3])[::2],
                       donate_argnums=0).trace(
        cache, array(jnp.bfloat16, tokens, 4 * key_heads, 128), new, new, requests).lower(
            lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)
    self.assertNotIn("scatter", text)
    memory, held = compiled.memory_analysis(), cache.pages.size * cache.pages.dtype.itemsize
    self.assertGreaterEqual(memory.alias_size_in_bytes, held)
    self.assertLess(memory.temp_size_in_bytes, held // 4)


if __name__ == "__main__":
  absltest.main()
