# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of the split-KV kernels for Hopper that attend to few keys, to none, or to infinite ones.

Interpreted on a CPU; memory that no kernel wrote holds NaN. See gpu_test.
"""

import os

# See gpu_test.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, PagedOptions, PagesV1, PagesV2, masks,
                       ragged_page_attention_v2)
from attn_core.caches import pages, quantize
from attn_core.kernels.common import paged_operands, query_block_queue
from attn_core.kernels.gpu.split_kv import decode, kernel as split_kv, quantized_kv
from attn_core_test import gpu_cases, gpu_interpret, paged_cases, sampling
from attn_core_test.gpu_cases import Case
from attn_core_test.gpu_interpret import interpret

BLOCKS = BlockSizes(block_kv=128)  # two blocks of keys a split
WINDOW = (100, 0)
OPTIONS = PagedOptions(metadata=gpu_cases.HOPPER, block_sizes=BLOCKS, return_lse=True,
                       sliding_window=WINDOW)
# Tables of 64 tokens. The first request is so long that its window is behind its table, and so is
# that of the last query of the second.
SHORT = paged_cases.Case((64, 64, 40), (1, 2, 1), H=2, K=1, page=8, D=64, rest=0, dtype="bfloat16")
SHORT_LENGTHS, SHORT_EMPTY = np.array([400, 165, 40], np.int32), np.array([1, 0, 1, 0], bool)
# Windows that begin behind a split, in a block that is partly hidden; the next is not.
LONG = paged_cases.Case((256, 256, 200), (1, 1, 1), H=2, K=1, page=32, D=64, rest=0,
                        dtype="bfloat16", options=PagedOptions(sliding_window=WINDOW))
# Windows of three blocks of five; the last split has none of them.
_AT, _SLOTS = np.array([[255], [255]], np.int32), np.tile(np.arange(320, dtype=np.int32), (2, 1))
_WINDOWS = masks.positions(_AT, _SLOTS, masks.causal() & masks.window(*WINDOW))
DECODED = {
    "by_head": Case(
        _WINDOWS & masks.custom(lambda b, h, q, k: (k + h) % 3 != 0), B=2, T=1, S=320, H=2, K=1,
        extras={"sinks": ((2, 2), "float32")}, blocks=BLOCKS),
    "plain": Case(_WINDOWS, B=2, T=1, S=320, H=2, K=1, blocks=BLOCKS)}


def run_pages(query, cache, metadata):
  """Returns (out [T, H, E], lse [T, H]) in float32."""
  run = functools.partial(ragged_page_attention_v2, options=OPTIONS)
  output = interpret(run, query, cache, metadata)
  return np.float32(output.attention_outputs), np.float32(output.lse).T


def compare(found, expected):
  for x, y, tolerance in zip(found, expected, (1e-2, 1e-5)):
    np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=0, atol=tolerance)


class LiveSplitsTest(parameterized.TestCase):

  def test_chosen_splits_hold_all_blocks_and_are_not_too_many(self):
    for blocks in range(1, 1200):
      params = split_kv.make_kernel_params(1, (64, 64), blocks, None)
      self.assertLessEqual(params.num_splits, split_kv.MAX_SPLITS)
      self.assertGreaterEqual(params.num_splits * params.split_blocks, blocks)
      self.assertLess((params.num_splits - 1) * params.split_blocks, blocks)

  def test_scales_are_padded_to_heads_that_are_copied_together(self):
    for heads in range(1, 13):
      scales = jnp.arange(1.0, 8 * heads + 1).reshape(8, heads)
      found = quantized_kv.pack_scales(
          quantized_kv.QuantizedKV("int8", quantized_kv.TOKEN, heads == 1), scales)
      if heads == 1:
        np.testing.assert_array_equal(found, scales[:, 0])
      else:
        self.assertEqual(found.shape, (8, -(-heads // 4) * 4))
        np.testing.assert_array_equal(found[:, :heads], scales)

  def test_those_with_a_block_and_no_others(self):
    params = split_kv.make_kernel_params(1, (64, 64), 12, 3)
    first, end = np.array([(a, b) for a in range(13) for b in range(13)]).T
    for a, b, low, high in zip(first, end, *map(np.asarray, split_kv.live_splits(
        params, jnp.asarray(first), jnp.asarray(end)))):
      self.assertEqual({n // 3 for n in range(a, b)}, set(range(low, high)), (a, b))


class BlockMapTest(absltest.TestCase):

  def test_a_row_visits_the_blocks_that_any_head_sees(self):
    seen = np.zeros((1, 2, 1, 320), bool)
    seen[0, 0, 0, :64] = seen[0, 1, 0, 130:140] = seen[..., 192:256] = True
    case = Case(masks.dense(seen), T=1, S=320, H=2, K=1)
    found = decode.block_map_of(case.operands(), case.full_spec)
    # The one that both heads see whole comes first.
    self.assertEqual(np.asarray(found.num_full).tolist(), [[[1]]])
    self.assertEqual(np.asarray(found.num_visited).tolist(), [[[3]]])
    self.assertEqual(np.asarray(found.indices)[0, 0, 0, :3].tolist(), [3, 0, 2])


class QueueTest(parameterized.TestCase):
  """Query blocks over pages, which GPU and TPU kernels share."""

  @parameterized.parameters(1, 4)
  def test_every_live_token_is_in_one_block_and_no_block_is_without(self, block_q):
    tokens, requests, some = 12, 5, (1, 4)
    fields = paged_operands.BlockedInputs._fields
    inputs = paged_operands.BlockedInputs(**dict.fromkeys(fields) | {
        "block_q": block_q, "part": paged_operands.RequestPart(0, requests, block_q)})
    build = jax.jit(lambda lengths, starts, chosen: query_block_queue.make_queue(
        inputs._replace(lengths=lengths, starts=starts), tokens, chosen))
    rng = np.random.default_rng(0)
    straddling = np.full(requests, 5), np.arange(0, 12, 2)  # the most blocks that there can be
    held = rng.integers(-3, 9, (40, requests))  # also fewer tokens than queries
    cuts = np.sort(rng.integers(0, tokens + 1, (40, requests + 1)))
    cuts[:, 0] = 0
    for lengths, starts in (straddling, *zip(held, cuts)):
      for chosen in (None, some):
        found = build(np.int32(lengths), np.int32(starts), chosen)
        blocks, visited = jax.device_get(found.blocks), set()
        first, end = (0, requests) if chosen is None else chosen
        for token, (index, row, live) in enumerate(zip(*map(np.asarray, found[2:]))):
          owner = int(np.searchsorted(starts, token, side="right")) - 1
          position = lengths[owner] - starts[owner + 1] + token if owner < requests else -1
          self.assertEqual(live, first <= owner < end and position >= 0)
          if not live:
            self.assertEqual((index, row), (0, 0))
            continue
          visited.add(int(index))
          self.assertEqual((blocks.request[index], blocks.positions[index, row],
                            blocks.live[index, row], blocks.row[index] + row - block_q),
                           (owner, position, True, token))
        self.assertEqual(visited, set(range(int(found.num_blocks[0]))))


@gpu_interpret.interprets
class InterpretTest(parameterized.TestCase):

  @sampling.slow("a scale of NaN in pages on a GPU")
  def test_a_scale_of_nan_reaches_no_row_that_sees_nothing(self):
    query, key, value, _ = SHORT.arrays()
    scales = [jnp.float32(np.nanmax(np.abs(x)) / quantize.LIMITS["int8"]) for x in (key, value)]
    stored = [pages.store(x, "int8", scale) for x, scale in zip((key, value), scales)]
    cache = pages.convert(PagesV1(*stored, scales[0], jnp.float32(np.nan)), PagesV2)
    metadata = SHORT.metadata()._replace(context_lens=SHORT_LENGTHS)
    out, lse = run_pages(query, cache, metadata)
    np.testing.assert_array_equal(out[SHORT_EMPTY], 0)
    np.testing.assert_array_equal(lse[SHORT_EMPTY], -np.inf)
    self.assertTrue(np.isnan(out[~SHORT_EMPTY]).all())

  def test_one_scale_for_all_keys_and_one_for_all_values(self):
    query, key, value, _ = SHORT.arrays()
    scales = jnp.float32(np.nanmax(np.abs(key)) / 127), jnp.float32(np.nanmax(np.abs(value)) / 30)
    stored = [pages.store(x, "int8", scale) for x, scale in zip((key, value), scales)]
    found = run_pages(query, pages.convert(PagesV1(*stored, *scales), PagesV2), SHORT.metadata())
    read = (x.astype(jnp.float32) * scale for x, scale in zip(stored, scales))
    out, lse = SHORT.oracle(query.astype(jnp.float32), *read, None)
    compare(found, (out, lse.T))

  def test_pages_with_windows_that_skip_splits_or_the_table(self):
    query, key, value, _ = LONG.arrays()
    query, key = query.at[..., 3].set(1), key.at[..., 3].set(0)
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    out, lse = (np.array(x) for x in LONG.oracle(*wide, None))
    metadata, size = LONG.metadata(), LONG.page
    # A key of the second request, in the block that its query sees whole, has a score of -inf.
    key = key.at[0, metadata.page_tables[1, 200 // size], 200 % size, 3].set(-np.inf)
    out[1] = lse[:, 1] = np.nan
    # The third is so long that its window is behind its table: it attends to nothing.
    metadata = metadata._replace(context_lens=np.array([256, 256, 700], np.int32))
    out[2], lse[:, 2] = 0, -np.inf
    found = run_pages(query, pages.convert(PagesV1(key, value), PagesV2), metadata)
    compare(found, (out, lse.T))

  @parameterized.named_parameters((name, name) for name in sampling.names(DECODED, ("by_head",)))
  def test_decode_with_windows_that_skip_blocks(self, name):
    case = DECODED[name]
    operands = case.operands()
    operands = operands._replace(
        query=operands.query.at[..., 3].set(1), key=operands.key.at[..., 3].set(0))
    out, lse = (np.array(x) for x in case.oracle(operands))
    # A key of the first row, in the block that its query may see whole, has a score of -inf.
    operands = operands._replace(key=operands.key.at[0, 200, 0, 3].set(-np.inf))
    heads = [h for h in range(case.H) if name == "plain" or (200 + h) % 3]
    out[0, :, heads] = lse[0, heads] = np.nan
    found = interpret(case.decode, operands)
    compare(found, (out, lse))


if __name__ == "__main__":
  absltest.main()
