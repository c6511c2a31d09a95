# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block maps visit no more blocks than the mask touches, wherever its leaves can tell."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from attn_core import masks
from attn_core.masks import block_map as block_map_lib
from attn_core.masks.block_map import EMPTY, FULL, PARTIAL, Sizes
from attn_core_test.masks_cases import Draw, build, draw_sizes, even_sum, seen_by_all


class TightnessTest(parameterized.TestCase):
  """Visited and full blocks, counted exactly."""

  def visited(self, mask, sizes):
    kinds = block_map_lib.block_kinds(mask, sizes)
    return int((kinds != EMPTY).sum()), int((kinds == FULL).sum())

  @parameterized.parameters(1, 2, 3, 8, 33)
  def test_causal(self, n):
    self.assertEqual(self.visited(masks.causal(), Sizes(n * 16, n * 16, 16, 16)),
                     (n * (n + 1) // 2, n * (n - 1) // 2))

  @parameterized.product(n=(1, 5, 64), left=(0, 1, 15, 16, 17, 40, 10**6))
  def test_window_is_linear(self, n, left):
    block = 16
    # Blocks before its own that the first query of a block sees.
    reach = min(-(-left // block), n - 1)
    expected = n * (reach + 1) - reach * (reach + 1) // 2
    found, _ = self.visited(masks.window(left, 0), Sizes(n * block, n * block, block, block))
    self.assertEqual(found, expected)

  @parameterized.product(n=(1, 6, 12), wide=(1, 2, 3, 4))
  def test_chunks_visit_their_diagonal(self, n, wide):
    block = 8
    kinds = block_map_lib.block_kinds(masks.chunk(wide * block),
                                      Sizes(n * block, n * block, block, block))
    number = np.arange(n) // wide
    expected = np.where(number[:, None] == number, FULL, EMPTY)
    np.testing.assert_array_equal(kinds[0, 0], expected)

  def test_sorted_segments_visit_what_they_touch(self):
    generator = np.random.default_rng(11)
    sizes = Sizes(60, 72, 6, 8)
    find = jax.jit(lambda mask: block_map_lib.block_kinds(mask, sizes))
    for _ in range(50):
      query, key = (np.sort(generator.integers(0, 20, (2, n)), 1) for n in (60, 72))
      # Padding follows the documents, as packing leaves it.
      query, key = (np.where(x > 17, -1, x) for x in (query, key))
      kinds = np.asarray(find(masks.segments(query, key)))
      for b in range(2):
        for i, j in np.ndindex(10, 9):
          ids = set(query[b, i * 6:i * 6 + 6]) - {-1}
          others = set(key[b, j * 8:j * 8 + 8]) - {-1}
          # Sorted ids of a block lie in an interval; two intervals can overlap without a shared id.
          overlap = ids and others and min(ids) <= max(others) and min(others) <= max(ids)
          self.assertEqual(kinds[b, 0, i, j] != EMPTY, bool(overlap))

  @parameterized.parameters(64, 61)
  def test_packed_documents_visit_what_they_touch(self, length):
    """With the same documents on both sides, visits exactly the pairs of blocks that share one."""
    generator = np.random.default_rng(12)
    sizes = Sizes(length, length, 8, 8)
    for _ in range(50):
      ids = 1 + np.cumsum(generator.random((1, length)) < 0.15, axis=1)
      place = np.arange(length)[None] - np.searchsorted(ids[0], ids)
      parts = [set(ids[0, i:i + 8]) for i in range(0, length, 8)]
      shared = np.array([[bool(a & b) for b in parts] for a in parts])
      kinds = block_map_lib._kinds(masks.segments(ids), sizes, np)[0, 0]
      np.testing.assert_array_equal(kinds != EMPTY, shared)
      same = np.array([[len(a | b) == 1 for b in parts] for a in parts])
      same[:, -1] &= length % 8 == 0
      np.testing.assert_array_equal(kinds == FULL, same)
      # With positions that restart in each document, nothing above the diagonal is needed.
      both = block_map_lib._kinds(masks.segments(ids) & masks.causal(), sizes, np)[0, 0]
      np.testing.assert_array_equal(both != EMPTY, np.tril(shared))
      restarted = masks.positions(place, place, masks.segments(ids) & masks.causal())
      kinds = block_map_lib._kinds(restarted, sizes, np)[0, 0]
      np.testing.assert_array_less(kinds != EMPTY, 1 + shared)

  # (name, mask, kinds of 4 x 4 blocks of 4 queries and 4 keys: 0 empty, 1 partial, 2 full)
  @parameterized.named_parameters(
      ("or_prefix", masks.causal() | masks.prefix(4), "2000 2100 2210 2221"),
      ("or_chunk", masks.causal() | masks.chunk(8), "2200 2200 2222 2222"),
      ("and_chunk", masks.causal() & masks.chunk(8), "1000 2100 0010 0021"),
      ("and_window", masks.causal() & masks.window(4, None), "1000 1100 0110 0011"),
      ("not_causal", ~masks.causal(), "1222 0122 0012 0001"),
      ("not_or", ~(masks.causal() | masks.prefix(4)), "0222 0122 0012 0001"),
      ("not_and", ~(masks.causal() & masks.chunk(8)), "1222 0122 2212 2201"),
      ("offset", masks.offset(masks.causal(), 4), "2100 2210 2221 2222"),
      ("offset_back", masks.offset(masks.causal(), -4), "0000 1000 2100 2210"),
      ("custom_and", masks.custom(even_sum) & masks.chunk(4), "1000 0100 0010 0001"),
      ("custom_or", masks.custom(even_sum) | masks.prefix(8), "2211 2211 2211 2211"))
  def test_combinations(self, mask, expected):
    kinds = block_map_lib.block_kinds(mask, Sizes(16, 16, 4, 4))
    self.assertEqual(" ".join("".join(map(str, row)) for row in kinds[0, 0]), expected)

  @parameterized.parameters("causal", "window", "chunk", "prefix", "lengths", "dense",
                            "prefix_rows")
  def test_leaves_are_exact(self, leaf):
    """A block is EMPTY only where nothing is visible, and FULL only where everything is."""
    generator = np.random.default_rng(13)
    for _ in range(60):
      shape, sizes = draw_sizes(generator)
      recipe = (leaf, *getattr(Draw(generator, generator, shape), leaf, tuple)())
      if leaf == "window" and None not in recipe and -recipe[1] > recipe[2]:
        continue  # an empty window: nothing is visible in any block
      kinds = block_map_lib._kinds(build(recipe), sizes, np)
      kinds = np.broadcast_to(kinds, (*shape[:2], *kinds.shape[2:]))
      visible = seen_by_all(recipe, shape)
      for b, h, i, j in np.ndindex(kinds.shape):
        part = visible[b, h, i * sizes.block_q:(i + 1) * sizes.block_q,
                       j * sizes.block_kv:(j + 1) * sizes.block_kv]
        whole = part.shape[1] == sizes.block_kv
        expected = (FULL if part.all() and whole else
                    PARTIAL if part.any() else EMPTY)
        self.assertEqual(kinds[b, h, i, j], expected, (recipe, shape, sizes, b, h, i, j))


if __name__ == "__main__":
  absltest.main()
