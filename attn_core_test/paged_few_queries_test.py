# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests of a few queries over pages, which plain XLA computes as one block each."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, Heads, PagedOptions, ragged_page_attention_v2
from attn_core.caches import drafts
from attn_core.kernels.common import paged_operands
from attn_core.types import PagedOperands, PagedSpec
from attn_core_test.paged_cases import Case, plain

# Between one and twelve queries that begin anywhere; the second part is that of the long ones.
MIXED = Case((9, 0, 31, 17, 24, 30), (2, 0, 8, 1, 12, 5), rest=2)


class PartsTest(parameterized.TestCase):

  @parameterized.product(tokens=(5, 12, 24, 60, 4096), requests=(1, 3, 6), mask=(None, 5, 8, 20),
                         block_q=(None, 4), distribution=(False, True))
  def test_every_query_is_in_one_block(self, tokens, requests, mask, block_q, distribution):
    case = Case((1,) * requests, (1,) * requests, rest=tokens - requests)
    if tokens < requests or distribution and requests < 3:
      self.skipTest("no such call")
    rng = np.random.default_rng(tokens)
    most = min(x for x in (mask, tokens // requests, 24) if x is not None)
    queries = rng.integers(0, max(1, min(most, 24)) + 1, requests)
    queries[:2 * distribution] = 1
    lengths = queries + rng.integers(0, 30, requests)
    metadata = case.metadata()._replace(
        context_lens=jnp.int32(lengths), query_start_loc=jnp.int32(np.cumsum([0, *queries])),
        draft_mask=None if mask is None else jnp.ones((requests, mask, mask), bool),
        distribution=jnp.int32([2, 2, requests]) if distribution else None)
    query, cache, _ = plain(case)
    operands = PagedOperands(query, cache, metadata)
    sizes = BlockSizes(block_q)
    chosen, pages = paged_operands.choose_block_sizes(operands, sizes, 2)
    count = np.zeros(tokens, int)
    for part in paged_operands.request_parts(operands, sizes, chosen):
      inputs = paged_operands.block_inputs(
          operands, PagedSpec(1.0), Heads(2, 6, 6), (part.block_q, pages), part)
      for request in range(int(part.first), int(part.end)):
        first, end = map(int, paged_operands.query_blocks(inputs, request))
        self.assertLessEqual(end - first, 1 if part.one_block else end)
        for i in range(first, end):
          block = paged_operands.query_block(inputs, request, i)
          rows = int(block.row) - part.block_q + np.flatnonzero(block.live)
          count[rows] += 1
    np.testing.assert_array_equal(count[:queries.sum()], 1)
    np.testing.assert_array_equal(count[queries.sum():], 0)

  def test_drafts_are_one_block_of_as_many_rows(self):
    """Three requests of five new tokens, at positions that aligned blocks would cut."""
    case = Case((9, 17, 30), (5, 5, 5), rest=0)
    query, cache, metadata = plain(case)
    for mask in (None, jnp.ones((3, 5, 5), bool)):
      operands = PagedOperands(query, cache, metadata._replace(draft_mask=mask))
      parts = paged_operands.request_parts(operands, BlockSizes(), 32)
      self.assertEqual((parts[0].block_q, parts[0].one_block), (5, True))
      self.assertLen(parts, 2 if mask is None else 1)  # without a mask one could have all tokens
    given = paged_operands.request_parts(operands, BlockSizes(32), 32)
    self.assertEqual([(x.block_q, x.one_block) for x in given], [(32, False)])


class ValuesTest(parameterized.TestCase):

  @parameterized.parameters(
      (PagedOptions(),), (PagedOptions(causal=False),), (PagedOptions(sliding_window=(5, 0)),),
      (PagedOptions(logits_soft_cap=2.0), True), (PagedOptions(), False, (1, 1, 6)))
  def test_equals_the_definition(self, options, sinks=False, distribution=None):
    queries = MIXED.queries if distribution is None else (1, 0, 8, 1, 12, 5)
    case = MIXED._replace(queries=queries, options=options, sinks=sinks, distribution=distribution)
    query, key, value, sinks = case.arrays()
    out, lse = case.oracle(query, key, value, sinks)
    live = sum(queries)
    query, cache, metadata = plain(case)
    found = ragged_page_attention_v2(query, cache, metadata, options._replace(
        return_lse=True, softmax_aux=sinks))
    np.testing.assert_allclose(found.out[:live], out[:live], atol=3e-6)
    np.testing.assert_allclose(found.lse[:, :live], lse[:, :live], rtol=1e-5, atol=3e-6)
    np.testing.assert_array_equal(found.out[live:], 0)

  def test_trees_equal_those_in_aligned_blocks(self):
    query, cache, metadata = plain(Case((9, 17, 30), (5, 4, 5), rest=1))
    parents = np.array([[-1, 0, 0, 1, 2], [-1, -1, 0, 1, -1], [-1, 0, 1, 2, 3]])
    metadata = metadata._replace(draft_mask=drafts.mask(parents))
    run = lambda sizes: ragged_page_attention_v2(query, cache, metadata, block_sizes=sizes).out
    np.testing.assert_allclose(run(None), run(BlockSizes(4, 8)), atol=2e-6)

  @parameterized.parameters("float32", "bfloat16")
  def test_the_same_bits_with_other_requests(self, dtype):
    """In calls of one shape; the request is the first, then the last."""
    query, cache, metadata = plain(MIXED, dtype)
    attend = jax.jit(lambda query, metadata: ragged_page_attention_v2(query, cache, metadata).out)
    whole = attend(query, metadata)
    for row in (0, 2, 3, 5):  # of few queries
      start, number = int(metadata.query_start_loc[row]), MIXED.queries[row]
      for place in (0, 5):
        tables, lengths = np.zeros_like(metadata.page_tables), np.zeros(6, np.int32)
        tables[place], lengths[place] = metadata.page_tables[row], MIXED.lengths[row]
        starts = np.where(np.arange(7) > place, number, 0).astype(np.int32)
        alone = jnp.zeros_like(query).at[:number].set(query[start:start + number])
        found = attend(alone, metadata._replace(
            page_tables=tables, context_lens=lengths, query_start_loc=starts))
        np.testing.assert_array_equal(found[:number], whole[start:start + number])


if __name__ == "__main__":
  absltest.main()
