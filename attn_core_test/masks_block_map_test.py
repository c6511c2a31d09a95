# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block maps and tiles together equal the mask, for random masks and block sizes.

Each mask is a recipe of masks_cases, which numpy evaluates a second time.
"""

import tracemalloc
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import masks
from attn_core.masks import block_map as block_map_lib, tile as tile_lib
from attn_core.masks.block_map import EMPTY, FULL, PARTIAL, BlockMap, Sizes
from attn_core.types import MaskOperands
from attn_core_test.masks_cases import Draw, build, dense, draw_sizes, modulo, seen_by_all


def listed_kinds(block_map: BlockMap, columns: int) -> np.ndarray:
  """Returns the kind of every pair of blocks from the lists alone; checks that they ascend."""
  indices, num_full, num_visited = map(np.asarray, block_map)
  length = indices.shape[-1]
  kinds = np.full((*num_full.shape, columns + 1), EMPTY, np.int8)
  place = np.arange(length)
  visited = place < num_visited[..., None]
  is_full = place < num_full[..., None]
  rising = np.diff(indices, axis=-1) > 0
  border = place[1:] == num_full[..., None]
  assert (rising | border | ~visited[..., 1:]).all(), "each group must ascend"
  assert ((indices >= 0) & (indices < columns))[visited].all(), "indices of blocks that exist"
  assert (num_full <= num_visited).all() and (num_visited <= length).all()
  np.put_along_axis(kinds, np.where(visited, indices, columns),
                    np.where(is_full, FULL, PARTIAL).astype(np.int8), axis=-1)
  return kinds[..., :columns]


def block_kind_of_pairs(kinds, sizes, shape) -> np.ndarray:
  """Returns the block kind of every pair of a query and a key: int8 [B, H, T, S]."""
  kinds = np.broadcast_to(kinds, (*shape[:2], *kinds.shape[2:]))
  kinds = np.repeat(np.repeat(kinds, sizes.block_q, 2), sizes.block_kv, 3)
  return kinds[:, :, :sizes.queries, :sizes.keys]


def joined(kinds, partial_tiles, sizes, shape) -> np.ndarray:
  """Returns bool [B, H, T, S]: True in full blocks, `partial_tiles` in partial ones, else False."""
  kinds = block_kind_of_pairs(kinds, sizes, shape)
  return np.where(kinds == FULL, True, (kinds == PARTIAL) & partial_tiles)


def slice_numpy(x, starts, lengths):
  """Slices like `tile_lib.slice_at`; asserts that the tile lies inside the array."""
  for start, length, size in zip(starts, lengths, x.shape, strict=True):
    assert 0 <= start and start + length <= size, (starts, lengths, x.shape)
  return x[tuple(slice(start, start + length) for start, length in zip(starts, lengths))]


def evaluate_tiles(mask, kinds, sizes, shape) -> np.ndarray:
  """Evaluates the mask tile by tile inside the partial blocks of `kinds`; False elsewhere."""
  leaves, structure = jax.tree.flatten(mask)
  found = np.zeros((shape[0], shape[1], sizes.num_query_blocks * sizes.block_q,
                    sizes.num_key_blocks * sizes.block_kv), bool)
  with (mock.patch.object(tile_lib, "jnp", np),
        mock.patch.object(tile_lib, "slice_at", slice_numpy)):
    operands = tile_lib.pad_mask(structure, MaskOperands(tuple(leaves)),
                                 found.shape[2] - sizes.queries, found.shape[3] - sizes.keys)
    for b, i, j in np.argwhere((kinds == PARTIAL).any(1)):
      for b in (range(shape[0]) if kinds.shape[0] == 1 else [b]):
        tile = tile_lib.Tile(int(b), 0, int(i) * sizes.block_q, int(j) * sizes.block_kv,
                             shape[1], sizes.block_q, sizes.block_kv)
        cut, at = tile_lib.slice_mask(structure, operands, tile)
        found[b, :, tile.query:tile.query + sizes.block_q,
              tile.key:tile.key + sizes.block_kv] = cut.visible(at) & (at.key_index < sizes.keys)
  return found[:, :, :sizes.queries, :sizes.keys]


def merged_by_hand(kinds, group: int) -> np.ndarray:
  """Merges the kinds of each group of heads, one group after the other."""
  merged = []
  for first in range(0, kinds.shape[1], group):
    some = kinds[:, first:first + group]
    merged.append(np.where((some == FULL).all(1), FULL,
                           np.where((some == EMPTY).all(1), EMPTY, PARTIAL)))
  return np.stack(merged, 1)


class BlockMapTest(parameterized.TestCase):
  """Block map and evaluation inside tiles together equal the mask, for any mask and sizes."""

  def check(self, recipe, shape, sizes, kinds, evaluated):
    """Checks one case: `kinds`, and `evaluated` [B, H, T, S] in partial blocks, against numpy."""
    expected = seen_by_all(recipe, shape)
    where = f"{recipe}\nshape {shape}, {sizes}"
    for transposed in (False, True):
      given = kinds.swapaxes(-1, -2) if transposed else kinds
      listed = listed_kinds(block_map_lib.block_map(np.ascontiguousarray(given)), given.shape[-1])
      listed = listed.swapaxes(-1, -2) if transposed else listed
      np.testing.assert_array_equal(listed, kinds, err_msg=where)
    np.testing.assert_array_equal(joined(kinds, evaluated, sizes, shape), expected, err_msg=where)
    if sizes.keys % sizes.block_kv:
      self.assertFalse((kinds[..., -1] == FULL).any(), where)
    if kinds.shape[1] > 1:
      merged = block_map_lib.merge_heads(kinds, kinds.shape[1])
      np.testing.assert_array_equal(merged, merged_by_hand(kinds, kinds.shape[1]), err_msg=where)
    else:
      np.testing.assert_array_equal(block_map_lib.merge_heads(kinds, shape[1]), kinds)

  @parameterized.parameters(*range(4))
  def test_static_masks_on_the_host(self, seed):
    generator = np.random.default_rng(seed)
    for _ in range(400):
      shape, sizes = draw_sizes(generator)
      recipe = Draw(generator, generator, shape).recipe(int(generator.integers(0, 4)), False)
      mask = build(recipe)
      self.assertEmpty(jax.tree.leaves(mask))
      kinds = block_map_lib.block_kinds(mask, sizes)
      self.assertIsInstance(kinds, np.ndarray)
      self.check(recipe, shape, sizes, kinds, evaluate_tiles(mask, kinds, sizes, shape))

  @parameterized.parameters(*range(4))
  def test_bounds_of_arrays_in_numpy(self, seed):
    """Checks deep masks with arrays in numpy, which needs no compilation."""
    generator = np.random.default_rng(100 + seed)
    for _ in range(250):
      shape, sizes = draw_sizes(generator)
      recipe = Draw(generator, generator, shape).recipe(int(generator.integers(0, 4)), True)
      mask = build(recipe)
      kinds = block_map_lib._kinds(mask, sizes, np)
      self.check(recipe, shape, sizes, kinds, evaluate_tiles(mask, kinds, sizes, shape))

  @parameterized.parameters(*range(8))
  def test_masks_with_arrays_in_jit(self, seed):
    """Compiles a few mask structures once each and runs them with many arrays."""
    generator = np.random.default_rng(200 + seed)
    for n in range(6):
      shape, sizes = draw_sizes(generator)
      depth, start = int(generator.integers(0, 3)), int(generator.integers(2**32))
      def draw(numbers):
        return Draw(np.random.default_rng(start), numbers, shape).recipe(depth, True)
      recipes = [draw(generator) for _ in range(24)]
      if not jax.tree.leaves(build(recipes[0])):
        continue
      self.check_in_jit(recipes, shape, sizes)

  def check_in_jit(self, recipes, shape, sizes):
    built = [build(recipe) for recipe in recipes]
    structure = jax.tree.structure(built[0])
    stacked = jax.tree.map(lambda *x: np.stack(x), *built)

    def tile(operands, b, i, j):
      where = tile_lib.Tile(b, 0, i * sizes.block_q, j * sizes.block_kv, shape[1],
                            sizes.block_q, sizes.block_kv)
      mask, at = tile_lib.slice_mask(structure, operands, where)
      seen_here = mask.visible(at) & (at.key_index < sizes.keys)
      return jnp.broadcast_to(seen_here, (shape[1], sizes.block_q, sizes.block_kv))

    def one(mask):
      kinds = block_map_lib.block_kinds(mask, sizes)
      operands = tile_lib.pad_mask(structure, MaskOperands(tuple(jax.tree.leaves(mask))),
                                   -sizes.queries % sizes.block_q, -sizes.keys % sizes.block_kv)
      every = tile
      for axis, n in ((3, sizes.num_key_blocks), (2, sizes.num_query_blocks), (1, shape[0])):
        numbers = jnp.arange(n, dtype=jnp.int32)
        every = jax.vmap(every, [0 if a == axis else None for a in range(4)])
        every = (lambda f, axis, numbers: lambda *args: f(
            *args[:axis], numbers, *args[axis + 1:]))(every, axis, numbers)
      return (kinds, block_map_lib.block_map(kinds),
              block_map_lib.block_map(kinds.swapaxes(-1, -2)), every(operands, 0, 0, 0))

    kinds, visits, transpose, cut = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(stacked))
    self.assertEqual(kinds.dtype, np.int8)
    cut = cut.transpose(0, 1, 4, 2, 5, 3, 6).reshape(
        len(recipes), shape[0], shape[1], sizes.num_query_blocks * sizes.block_q, -1)
    for n, recipe in enumerate(recipes):
      take = lambda x: x[n]
      listed = listed_kinds(jax.tree.map(take, visits), sizes.num_key_blocks)
      np.testing.assert_array_equal(listed, kinds[n])
      listed = listed_kinds(jax.tree.map(take, transpose), sizes.num_query_blocks)
      np.testing.assert_array_equal(listed.swapaxes(-1, -2), kinds[n])
      self.check(recipe, shape, sizes, kinds[n],
                 cut[n, :, :, :sizes.queries, :sizes.keys])

  @parameterized.product(window=((3, 0), (3, 3), (3, None), (None, 3)), block=(1, 2, 5),
                         padding=(-2**31, 2**31 - 1))
  def test_padding_keys_at_the_ends_of_int32(self, window, block, padding):
    query = np.int32([[-3, -1, 0, 1, 2, 3, 4, 5, -2]])
    key = np.where(np.arange(9) % 3 == 1, padding, query + 2).astype(np.int32)
    self.check_ends(("positions", ("window", *window), query, key), block)

  def check_ends(self, recipe, block):
    """Checks one case of 9 queries and 9 keys, in numpy and in jax."""
    sizes, shape = Sizes(9, 9, block, block), (1, 1, 9, 9)
    mask = build(recipe)
    for kinds in (block_map_lib.host_kinds(mask, sizes),
                  np.asarray(block_map_lib.block_kinds(mask, sizes))):
      self.check(recipe, shape, sizes, kinds, evaluate_tiles(mask, kinds, sizes, shape))
    np.testing.assert_array_equal(dense(mask, shape), seen_by_all(recipe, shape))

  @parameterized.product(
      window=((3, 0), (3, 3), (3, None), (None, 3), (None, -2), (-2, None), (-1, 3), (3, -1),
              (2**31 - 1, 2**31 - 1), (-2**31, None), (None, -2**31)), block=(1, 2))
  def test_queries_at_the_ends_of_int32(self, window, block):
    ends = np.array([-2**31, 3 - 2**31, -1, 2, 2**31 - 3, 2**31 - 1], np.int32)
    query, key = ends[[0, 3, 5, 1, 3, 4, 2, 5, 0]][None], ends[[3, 0, 2, 5, 4, 1, 3, 5, 0]][None]
    self.check_ends(("positions", ("window", *window), query, key), block)

  @parameterized.parameters(((3, 0), 5), ((3, None), -5), ((None, 3), 5))
  def test_an_offset_past_the_ends_of_int32_hides_nothing_of_other_queries(self, window, offset):
    query = np.where(np.arange(9) % 3 == 1, np.sign(offset) * (2**31 - 1), np.arange(9) - offset)
    for amount in (("offset", offset), ("offset_rows", np.array([offset], np.int32))):
      recipe = (amount[0], ("window", *window), amount[1])
      self.check_ends(("positions", recipe, query[None].astype(np.int32), None), 2)

  @parameterized.parameters((None, 2**31 - 1), (2**31 - 1, None), (2**31 - 1, 2**31 - 1))
  def test_a_window_as_wide_as_int32_hides_nothing(self, *sides):
    mask, shape = masks.window(*sides), (1, 1, 5, 5)
    self.assertTrue(dense(mask, shape).all())
    kinds = block_map_lib.block_kinds(mask, Sizes(5, 5, 2, 2))
    self.assertTrue((kinds[..., :2] == FULL).all())

  # A recipe and its transpose, where queries and keys are swapped.
  TRANSPOSES = (
      (("causal",), ("window", 0, None)),
      (("window", 5, 2), ("window", 2, 5)),
      (("window", None, 3), ("window", 3, None)),
      (("chunk", 5), ("chunk", 5)),
      (("not", ("and", ("causal",), ("chunk", 4))), ("not", ("and", ("window", 0, None),
                                                             ("chunk", 4)))),
      (("offset", ("causal",), 3), ("window", 3, None)),
  )

  def test_transposed_map_is_the_map_of_the_transpose(self):
    generator = np.random.default_rng(7)
    pairs = [(build(a), build(b)) for a, b in self.TRANSPOSES]
    for _ in range(40):
      ids = [np.sort(generator.integers(-1, 4, (2, n)), 1) for n in (24, 36)]
      array = generator.random((2, 3, 24, 36)) < 0.95
      length = generator.integers(0, 37, 2)
      pairs += [(masks.segments(*ids), masks.segments(*ids[::-1])),
                (masks.dense(array), masks.dense(array.swapaxes(2, 3))),
                (masks.lengths(None, length), masks.lengths(length, None)),
                (masks.positions(*ids), masks.positions(*ids[::-1], masks.window(0, None)))]
    for mask, transpose in pairs:
      for block_q, block_kv in ((8, 12), (4, 9), (24, 1), (6, 36)):
        kinds = block_map_lib._kinds(mask, Sizes(24, 36, block_q, block_kv), np)
        other = block_map_lib._kinds(transpose, Sizes(36, 24, block_kv, block_q), np)
        np.testing.assert_array_equal(kinds.swapaxes(-1, -2), other, str(mask))

  @parameterized.parameters((1, 2**20), (4, 20), (128, 2**20))
  def test_every_query_sees_a_key(self, block, pairs):
    """Compares with the kinds of single pairs."""
    lower = masks.causal() & masks.window(3, 0)
    cases = (masks.full(), ~masks.full(), masks.causal(), ~masks.causal(), lower, ~lower,
             masks.chunk(5), masks.causal() & masks.chunk(4), masks.window(0, 9),
             masks.offset(masks.causal(), -3), masks.offset(masks.causal(), 30), masks.prefix(3),
             masks.prefix(0), masks.offset(masks.window(1, -1), 7), masks.custom(modulo),
             masks.causal() | masks.prefix(1), masks.offset(masks.window(2, 2), 25))
    found = set()
    with mock.patch.multiple(block_map_lib, MANY_KEYS=block, MANY_PAIRS=pairs):
      for mask in cases:
        for queries, keys in ((13, 13), (1, 29), (29, 1), (24, 30), (0, 3), (3, 0)):
          kinds = block_map_lib._kinds(mask, Sizes(queries, keys, 1, 1), np)
          expected = (kinds == FULL).any(-1).all()
          found.add(bool(expected))
          self.assertEqual(block_map_lib.every_query_sees_a_key(mask, queries, keys), expected,
                           (mask, queries, keys))
    self.assertLen(found, 2)

  def test_every_query_of_a_long_sequence_sees_a_key(self):
    """Checks that no array has a number for each of 2**30 pairs."""
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    for mask in (masks.causal(), masks.causal() & masks.window(4000, 0)):
      self.assertTrue(block_map_lib.every_query_sees_a_key(mask, 2**15, 2**15))
    self.assertFalse(block_map_lib.every_query_sees_a_key(~masks.causal(), 2**15, 2**15))
    self.assertLess(tracemalloc.get_traced_memory()[1], 2**26)

  def test_merge_heads(self):
    generator = np.random.default_rng(3)
    for heads, group in ((6, 1), (6, 2), (6, 3), (6, 6), (1, 4)):
      kinds = generator.integers(0, 3, (2, heads, 5, 4)).astype(np.int8)
      kinds[0, :, 0], kinds[0, :, 1], kinds[1, :, 2] = EMPTY, FULL, PARTIAL
      expected = kinds if heads == 1 else merged_by_hand(kinds, group)
      for found in (block_map_lib.merge_heads(kinds, group),
                    block_map_lib.merge_heads(jnp.array(kinds), group)):
        np.testing.assert_array_equal(found, expected)
        self.assertEqual(found.dtype, np.int8)

  def test_join_full(self):
    E, F, P = EMPTY, FULL, PARTIAL
    kinds = [[F, F, F, F, F, P, E, F, F], [F, E, F, F, P, P, F, F, P]]
    kinds = np.array(kinds, np.int8)[:, None, None]
    large = [[F, F, E, E], [E, F, E, F]]
    small = [[E, E, E, E, F, P, E, F, F], [F, E, E, E, P, P, E, E, P]]
    for given in (kinds, jnp.array(kinds)):
      for found, expected in zip(block_map_lib.join_full(given, 2), (large, small), strict=True):
        np.testing.assert_array_equal(found[:, 0, 0], expected)
        self.assertEqual((found.dtype, type(found)), (np.int8, type(given)))

  def test_full_map_has_no_partial_block_even_when_traced(self):
    kinds = np.array([FULL, EMPTY, FULL], np.int8)[None, None, None]
    for given in (kinds, jnp.array(kinds)):
      visits = block_map_lib.full_map(given)
      self.assertFalse(visits.any_partial)
      np.testing.assert_array_equal(visits.num_visited, block_map_lib.block_map(given).num_visited)
      np.testing.assert_array_equal(visits.indices[0, 0, 0, :2], [0, 2])

  def test_kinds_known_on_the_host(self):
    sizes = Sizes(8, 8, 4, 4)
    for mask, full, partial in ((masks.full(), True, False), (masks.causal(), True, True),
                                (masks.custom(modulo), False, True),
                                (~masks.full(), False, False), (masks.chunk(4), True, False)):
      visits = block_map_lib.block_map(block_map_lib.block_kinds(mask, sizes))
      self.assertEqual((visits.any_full, visits.any_partial), (full, partial), mask)
    traced = block_map_lib.block_map(block_map_lib.block_kinds(masks.lengths(np.array([8])), sizes))
    self.assertTrue(traced.any_full and traced.any_partial)


if __name__ == "__main__":
  absltest.main()
