# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Windows over pages in the TPU kernel, interpreted: which keys are seen, and which are copied.

One program, in which the window is wider than a key block, and its left edge moves over the places
of a page and of a key block.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, OperationMetadata, PagedOptions, PagesMetadata, PagesV2,
                       ragged_page_attention_v2)
from attn_core.caches import pages, quantize
from attn_core_test import sampling
from attn_core_test.tpu_interpret import counted

REQUESTS, QUERIES, ROW_PAGES, PAGE, WIDTH = 4, 2, 6, 64, 8
BLOCK_KV = 128  # pages of 8 bits with scales per token come in multiples of it
LEFT = 149
SIZES = {"many_rows": (8, 32), "few_rows": (2, 2)}  # (query heads, queries of a block)


class Setup:
  """One compiled program, and the arrays that it runs with."""

  def __init__(self, name):
    self.heads, self.block_q = SIZES[name]
    rng = np.random.default_rng(0)
    count = REQUESTS * ROW_PAGES
    self.query = jnp.asarray(rng.normal(size=(REQUESTS * QUERIES, self.heads, WIDTH)), jnp.float32)
    tokens = [jnp.asarray(rng.normal(size=(count, PAGE, 1, WIDTH)), jnp.float32) for _ in range(2)]
    stored, scales = zip(*(quantize.quantize(x, "int8") for x in tokens))
    self.cache = PagesV2(pages.interleave(*stored), *scales)
    self.tables = rng.permutation(count).reshape(REQUESTS, ROW_PAGES).astype(np.int32)
    self.key, self.value = (
        np.asarray(quantize.dequantize(*x), np.float64)[self.tables].reshape(REQUESTS, -1, WIDTH)
        for x in zip(stored, scales))
    options = PagedOptions(
        sliding_window=(LEFT, 0), metadata=OperationMetadata(platform="tpu"), return_lse=True,
        block_sizes=BlockSizes(block_q=self.block_q, block_kv=BLOCK_KV))
    starts = jnp.arange(REQUESTS + 1, dtype=jnp.int32) * QUERIES
    with counted() as moved:
      self.moved = moved
      self.attend = jax.jit(lambda query, cache, tables, lengths: ragged_page_attention_v2(
          query, cache, PagesMetadata(tables, lengths, starts), options)).lower(
              self.query, self.cache, jnp.asarray(self.tables),
              jnp.zeros(REQUESTS, jnp.int32)).compile()

  def run(self, lengths):
    """Returns (output [R, queries, H, D], lse [R, queries, H], bytes copied)."""
    self.moved.clear()
    found = jax.block_until_ready(self.attend(
        self.query, self.cache, jnp.asarray(self.tables), jnp.asarray(lengths, jnp.int32)))
    jax.effects_barrier()
    shape = (REQUESTS, QUERIES, self.heads)
    return (np.asarray(found.attention_outputs).reshape(*shape, WIDTH),
            np.asarray(found.lse).T.reshape(shape), sum(self.moved))

  def expected(self, request, position, query):
    """Returns (output [H, D], lse [H]) of one query, by the definition."""
    seen = slice(max(0, position - LEFT), position + 1)
    logits = query @ self.key[request, seen].T * WIDTH**-0.5
    weights = np.exp(logits)
    return (weights @ self.value[request, seen] / weights.sum(-1, keepdims=True),
            np.log(weights.sum(-1)))


@functools.cache
def setup(name):
  return Setup(name)


def lengths_of(places):
  """Returns lengths whose windows begin at these places of pages 0, 1, 2, 0."""
  return [LEFT + QUERIES + place + PAGE * (row % 3) for row, place in enumerate(places)]


def blocks_of(length, block_q):
  """Returns the numbers of a request's blocks of queries."""
  return range((length - QUERIES) // block_q, (length - 1) // block_q + 1)


def copied_tokens(lengths, case):
  """Returns the bytes of queries, of their results, and of the lse of every block."""
  blocks = sum(len(blocks_of(length, case.block_q)) for length in lengths)
  return 2 * case.query.nbytes + blocks * case.block_q * case.heads * 4


def copied(lengths, block_q):
  """Returns the bytes of the pages and scales that the blocks of queries need."""
  page, scales, total = 2 * PAGE * WIDTH, 2 * BLOCK_KV * 8 * 4, 0
  for length in lengths:
    for block in blocks_of(length, block_q):
      first = max(block * block_q, length - QUERIES) - LEFT
      stop = min(length, (block + 1) * block_q)
      total += page * ((stop - 1) // PAGE - first // PAGE + 1)
      total += scales * ((stop - 1) // BLOCK_KV - first // BLOCK_KV + 1)
  return total


class WindowTest(parameterized.TestCase):

  # Where pages begin and end; the slow ones are all places.
  @parameterized.parameters(*sampling.with_slow(
      [("many_rows", 0, 0, 1, 63)], ("few_rows", 0, 0, 1, 63),
      *(("many_rows", *range(first, first + 4)) for first in range(0, PAGE, 4))))
  def test_left_edges(self, name, *places):
    case, lengths = setup(name), lengths_of(places)
    query = np.asarray(case.query, np.float64).reshape(REQUESTS, QUERIES, -1, WIDTH)
    out, lse, moved = case.run(lengths)
    for row, length in enumerate(lengths):
      self.assertEqual((length - QUERIES - LEFT) % PAGE, places[row])
      for number in range(QUERIES):
        want = case.expected(row, length - QUERIES + number, query[row, number])
        np.testing.assert_allclose(out[row, number], want[0], atol=5e-6)
        np.testing.assert_allclose(lse[row, number], want[1], atol=1e-5)
    self.assertEqual(moved, copied(lengths, case.block_q) + copied_tokens(lengths, case))

  @parameterized.parameters(*sampling.with_slow([("many_rows",)], ("few_rows",)))
  def test_lengths_beyond_the_table_copy_nothing_outside_of_it(self, name):
    case, lengths = setup(name), lengths_of((0, 0, 1, 63))
    lengths[-1] += 2**20
    out, lse, moved = case.run(lengths)  # the interpreter checks where each transfer reads
    np.testing.assert_array_equal(out[-1], 0)
    np.testing.assert_array_equal(lse[-1], -np.inf)
    self.assertTrue(np.isfinite(lse[:-1]).all())
    scales = 2 * BLOCK_KV * 8 * 4  # of each block of queries
    moved -= copied_tokens(lengths, case) + copied(lengths[:-1], case.block_q)
    self.assertEqual(moved % scales, 0)


if __name__ == "__main__":
  absltest.main()
