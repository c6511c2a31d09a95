# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks: every leaf against numbers written by hand, the algebra, and the proof of the block maps.

The proof compares block maps and in-tile evaluation with a dense evaluation of its own. A mask is
first a recipe, a nested tuple such as ("and", ("causal",), ("window", 3, 0)): `build` makes the
mask of it by the library's functions, and `seen` computes in numpy who sees whom, from the words of
the documentation alone.

Letters: B batch, H heads, T query length, S key length.
"""

import functools
from typing import Any, NamedTuple
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import attention
from attn_core import masks
from attn_core.masks import (block_map as block_map_lib, mask as mask_lib, materialize,
                             position_range, tile as tile_lib)
from attn_core.masks.info import MaskInfo
from attn_core.types import MaskOperands


def rows(text: str) -> np.ndarray:
  """ "10 11" -> [[True, False], [True, True]]."""
  return np.array([[digit == "1" for digit in row] for row in text.split()])


def dense(mask, shape=(1, 1, 3, 4)) -> np.ndarray:
  return np.asarray(materialize.to_dense(mask, shape))


# --- Leaves, by hand. ----------------------------------------------------------------------------


def _even_sum(batch, head, query, key):
  return (batch + head + query + key) % 2 == 0


def _from_table(batch, head, query, key, table):
  return key >= table[head]


# (name, mask, expected rows): one batch row, one head, 3 queries, 4 keys.
BY_HAND = (
    ("full", masks.full(), "1111 1111 1111"),
    ("causal", masks.causal(), "1000 1100 1110"),
    ("window_1_1", masks.window(1, 1), "1100 1110 0111"),
    ("window_1_0", masks.window(1, 0), "1000 1100 0110"),
    ("window_0_2", masks.window(0, 2), "1110 0111 0011"),
    ("window_open_left", masks.window(None, 0), "1000 1100 1110"),
    ("window_open_right", masks.window(1, None), "1111 1111 0111"),
    ("window_open", masks.window(None, None), "1111 1111 1111"),
    ("window_ahead_only", masks.window(-1, 2), "0110 0011 0001"),
    ("window_behind_only", masks.window(2, -1), "0000 1000 1100"),
    ("window_empty", masks.window(-2, 1), "0000 0000 0000"),
    ("chunk_1", masks.chunk(1), "1000 0100 0010"),
    ("chunk_2", masks.chunk(2), "1100 1100 0011"),
    ("chunk_3", masks.chunk(3), "1110 1110 1110"),
    ("chunk_9", masks.chunk(9), "1111 1111 1111"),
    ("prefix", masks.prefix(2), "1100 1100 1100"),
    ("prefix_0", masks.prefix(0), "0000 0000 0000"),
    ("segments", masks.segments(np.array([[0, 1, 1]]), np.array([[0, 0, 1, 2]])),
     "1100 0010 0010"),
    ("segments_padding", masks.segments(np.array([[0, -1, 3]]), np.array([[-1, 3, 0, -1]])),
     "0010 0000 0100"),
    ("segments_unsorted", masks.segments(np.array([[2, 0, 2]]), np.array([[0, 2, 1, 2]])),
     "0101 1000 0101"),
    ("lengths", masks.lengths(np.array([2]), np.array([3])), "1110 1110 0000"),
    ("lengths_of_keys", masks.lengths(key_lengths=np.array([1])), "1000 1000 1000"),
    ("lengths_of_queries", masks.lengths(np.array([0])), "0000 0000 0000"),
    ("dense", masks.dense(rows("1010 0110 0001")[None, None]), "1010 0110 0001"),
    ("dense_keys", masks.dense(rows("1010")[None, None]), "1010 1010 1010"),
    ("dense_queries", masks.dense(rows("1 0 1")[None, None]), "1111 0000 1111"),
    ("custom", masks.custom(_even_sum), "1010 0101 1010"),
    ("custom_operand", masks.custom(_from_table, np.array([2])), "0011 0011 0011"),
    ("positions", masks.positions(np.array([[5, 0, 2]]), np.array([[2, 5, 0, 1]])),
     "1111 0010 1011"),
    ("positions_of_queries", masks.positions(np.array([[3, -1, 1]])), "1111 0000 1100"),
    ("positions_of_keys", masks.positions(None, np.array([[1, 0, 2, 9]])), "0100 1100 1110"),
    ("positions_of_a_chunk",
     masks.positions(np.array([[-1, 0, 4]]), np.array([[-2, 1, 5, -3]]), masks.chunk(2)),
     "1000 0100 0010"),
    ("offset", masks.offset(masks.causal(), 1), "1100 1110 1111"),
    ("offset_back", masks.offset(masks.causal(), -1), "0000 1000 1100"),
    ("offset_of_a_window", masks.offset(masks.window(1, 0), 1), "1100 0110 0011"),
    ("offset_of_positions", masks.positions(np.array([[3, -1, 1]]), mask=masks.offset(
        masks.causal(), 1)), "1111 1000 1110"),
    ("positions_of_lengths", masks.positions(np.array([[9, 9, 9]]), mask=masks.lengths(
        np.array([2]))), "1111 1111 0000"),
    ("placed", masks.placed(masks.causal(), np.array([[4, 0, 2]]), np.array([[2, 5, 0, 1]]),
                            (4, 5)), "0000 0010 1011"),
    ("placed_lengths", masks.placed(masks.lengths(np.array([3]), np.array([2])),
                                    np.array([[4, 0, 2]]), np.array([[2, 5, 0, 1]]), (9, 9)),
     "0000 0011 0011"),
    ("and", masks.causal() & masks.prefix(2), "1000 1100 1100"),
    ("or", masks.causal() | masks.prefix(2), "1100 1100 1110"),
    ("not", ~masks.causal(), "0111 0011 0001"),
)


class LeavesTest(parameterized.TestCase):

  @parameterized.named_parameters(*BY_HAND)
  def test_by_hand(self, mask, expected):
    np.testing.assert_array_equal(dense(mask)[0, 0], rows(expected))

  def test_rows_of_the_batch_differ(self):
    shape = (2, 1, 2, 3)
    for mask, first, second in (
        (masks.prefix(np.array([1, 2])), "100 100", "110 110"),
        (masks.lengths(np.array([2, 1]), np.array([3, 2])), "111 111", "110 000"),
        (masks.segments(np.array([[0, 1], [1, 1]]), np.array([[0, 0, 1], [1, -1, 1]])),
         "110 001", "101 101"),
        (masks.positions(np.array([[0, 1], [2, 0]])), "100 110", "111 100"),
        (masks.offset(masks.causal(), np.array([0, 1])), "100 110", "110 111"),
        (masks.dense(np.stack([rows("100 011"), rows("111 000")])[:, None]), "100 011", "111 000"),
        (masks.custom(_even_sum), "101 010", "010 101")):
      with self.subTest(str(mask)):
        np.testing.assert_array_equal(dense(mask, shape)[:, 0], [rows(first), rows(second)])

  def test_heads_differ(self):
    shape = (1, 2, 2, 3)
    for mask, first, second in (
        (masks.custom(_even_sum), "101 010", "010 101"),
        (masks.custom(_from_table, np.array([1, 2])), "011 011", "001 001"),
        (masks.dense(np.stack([rows("100 011"), rows("111 000")])[None]), "100 011", "111 000")):
      with self.subTest(str(mask)):
        np.testing.assert_array_equal(dense(mask, shape)[0], [rows(first), rows(second)])

  def test_a_scalar_array_counts_for_all_rows(self):
    np.testing.assert_array_equal(dense(masks.prefix(np.int32(1)), (2, 1, 1, 2)),
                                  np.broadcast_to([True, False], (2, 1, 1, 2)))
    np.testing.assert_array_equal(dense(masks.prefix(jnp.int32(1)), (2, 1, 1, 2)),
                                  np.broadcast_to([True, False], (2, 1, 1, 2)))

  @parameterized.named_parameters(
      ("window_float", lambda: masks.window(1.5, 0), "window: left=1.5; expected an int"),
      ("window_bool", lambda: masks.window(0, True), "window: right=True; expected an int"),
      ("window_string", lambda: masks.window("3", 0), "window: left='3'; expected an int"),
      ("window_too_wide", lambda: masks.window(2**31, 0), "left=2147483648; expected an int"),
      ("chunk_0", lambda: masks.chunk(0), "chunk: size=0; expected an int >= 1"),
      ("chunk_float", lambda: masks.chunk(2.0), "chunk: size=2.0; expected an int >= 1"),
      ("chunk_bool", lambda: masks.chunk(True), "chunk: size=True; expected an int >= 1"),
      ("chunk_none", lambda: masks.chunk(None), "chunk: size=None; expected an int >= 1"),
      ("prefix_float", lambda: masks.prefix(1.0), r"prefix: length has dtype float64.*int32 \[B"),
      ("prefix_rank", lambda: masks.prefix(np.zeros((2, 2), int)), r"prefix: length.*\(2, 2\)"),
      ("segments_float", lambda: masks.segments(np.zeros((1, 3), np.float32)),
       "segments: query_ids has dtype float32.*expected int32"),
      ("segments_keys", lambda: masks.segments(np.zeros((1, 3), int), np.zeros((1, 3), bool)),
       "segments: key_ids has dtype bool.*expected int32"),
      ("segments_too_large", lambda: masks.segments(np.array([[0, 2**31]])),
       "segments: query_ids holds numbers from 0 to 2147483648; expected int32"),
      ("positions_too_large", lambda: masks.positions(None, np.array([[-2**40, 0]])),
       "positions: key holds numbers from -1099511627776 to 0; expected int32"),
      ("segments_rank", lambda: masks.segments(np.zeros(3, int)),
       r"segments: query_ids.*shape \(3,\); expected int32 \[B or 1, length\]"),
      ("lengths_nothing", masks.lengths, "lengths: query_lengths=None and key_lengths=None"),
      ("lengths_float", lambda: masks.lengths(np.array([1.0])), "lengths: query_lengths.*float64"),
      ("lengths_rank", lambda: masks.lengths(None, np.array(3)), r"lengths: key_lengths.*\(\)"),
      ("positions_float", lambda: masks.positions(np.zeros((1, 2))), "positions: query.*float64"),
      ("positions_rank", lambda: masks.positions(None, np.zeros(2, int)),
       r"positions: key.*\(2,\)"),
      ("offset_float", lambda: masks.offset(masks.causal(), 1.0), "offset: amount.*float64"),
      ("offset_bool", lambda: masks.offset(masks.causal(), True), "offset: amount has dtype bool"),
      ("placed_size", lambda: masks.placed(masks.causal(), np.zeros((1, 2), int), np.zeros(
          (1, 2), int), 3), "placed: size=3; expected .rows, columns."),
      ("placed_sizes", lambda: masks.placed(masks.causal(), np.zeros((1, 2), int), np.zeros(
          (1, 2), int), ("a", 2)), "placed: size=.'a', 2.; expected .rows, columns."),
      ("dense_float", lambda: masks.dense(np.zeros((1, 1, 2, 2))),
       r"dense: array has dtype float64.*expected bool.*bias"),
      ("dense_int", lambda: masks.dense(np.zeros((1, 1, 2, 2), int)), "dense: array has dtype int"),
      ("dense_rank", lambda: masks.dense(np.zeros((2, 2), bool)), r"dense: .*shape \(2, 2\)"),
      ("custom_not_callable", lambda: masks.custom(np.zeros(3)), "custom: predicate=.*callable"),
      ("custom_not_bool", lambda: dense(masks.custom(lambda b, h, q, k: q - k)),
       "custom: .* returned int32.*expected bool"),
  )
  def test_bad_arguments(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()

  @parameterized.parameters("closure", "default", "partial")
  def test_a_custom_predicate_that_holds_what_is_traced(self, by):
    def inner(limit):
      predicate = {"closure": lambda b, h, q, k: q - k < limit,
                   "default": lambda b, h, q, k, most=limit: q - k < most,
                   "partial": functools.partial(lambda most, b, h, q, k: q - k < most, limit)}[by]
      return attention(*[jnp.ones((1, 4, 1, 2))] * 3, mask=masks.custom(predicate))[0]
    with self.assertRaisesRegex(ValueError, "custom: .*captures a traced array.*operands"):
      jax.jit(inner)(2)
    np.testing.assert_array_equal(inner(2), 1)

  def test_a_custom_predicate_may_be_constant(self):
    for value in (True, np.True_):
      constant = masks.custom(lambda b, h, q, k, value=value: value)
      self.assertTrue(dense(constant).all())
      self.assertFalse(dense(~constant).any())

  def test_masks_combine_with_masks_only(self):
    for combine in (lambda m: m & True, lambda m: m | None, lambda m: [True] & m):
      with self.assertRaises(TypeError):
        combine(masks.causal())


class ToDenseTest(absltest.TestCase):

  def test_broadcasts_to_the_shape(self):
    for mask in (masks.full(), masks.causal(), masks.prefix(2), ~masks.full(),
                 masks.dense(np.ones((1, 1, 1, 1), bool))):
      found = materialize.to_dense(mask, (2, 3, 4, 5))
      self.assertEqual(found.shape, (2, 3, 4, 5))
      self.assertEqual(found.dtype, bool)

  def test_in_jit(self):
    mask = masks.causal() & masks.segments(np.array([[0, 0, 1]]))
    found = jax.jit(lambda m: materialize.to_dense(m, (1, 1, 3, 3)))(mask)
    np.testing.assert_array_equal(found[0, 0], rows("100 110 001"))

  def test_global_rows_and_heads(self):
    """A shard evaluates predicates at the global numbers of its rows and heads."""
    mask = masks.custom(lambda b, h, q, k: (b == 5) & (h == 3))
    _, structure = jax.tree.flatten(mask)
    here = MaskOperands((), jnp.array([4, 5], jnp.int32), jnp.array([2], jnp.int32))
    found = np.asarray(materialize.visible(structure, here, (2, 2, 1, 1)))
    np.testing.assert_array_equal(found[..., 0, 0], [[False, False], [False, True]])


# --- The algebra. --------------------------------------------------------------------------------


class AlgebraTest(parameterized.TestCase):

  def test_laws(self):
    shape = (2, 2, 6, 7)
    generator = np.random.default_rng(0)
    pool = [
        masks.full(), masks.causal(), masks.window(2, 1), masks.chunk(3), masks.prefix(2),
        masks.segments(generator.integers(-1, 2, (2, 6)), generator.integers(-1, 2, (2, 7))),
        masks.lengths(np.array([5, 3]), np.array([7, 2])), masks.custom(_even_sum),
        masks.dense(generator.random((2, 2, 6, 7)) < 0.5), masks.offset(masks.causal(), 2),
    ]
    values = [dense(mask, shape) for mask in pool]
    for a, x in zip(pool, values):
      np.testing.assert_array_equal(dense(~a, shape), ~x)
      np.testing.assert_array_equal(dense(~~a, shape), x)
      np.testing.assert_array_equal(dense(a & masks.full(), shape), x)
      np.testing.assert_array_equal(dense(masks.full() & a, shape), x)
      self.assertTrue(dense(a | masks.full(), shape).all())
      self.assertFalse(dense(a & ~a, shape).any())
      self.assertTrue(dense(a | ~a, shape).all())
      for b, y in zip(pool, values):
        np.testing.assert_array_equal(dense(a & b, shape), x & y)
        np.testing.assert_array_equal(dense(a | b, shape), x | y)
    for (a, x), (b, y), (c, z) in zip(
        zip(pool, values), zip(pool[3:], values[3:]), zip(pool[5:], values[5:])):
      np.testing.assert_array_equal(dense(~(a & b) | c, shape), ~(x & y) | z)
      np.testing.assert_array_equal(dense(~(a | (b & ~c)), shape), ~(x | (y & ~z)))

  # Two makers of equal masks, each called afresh.
  MAKERS = (
      ("full", masks.full),
      ("causal", masks.causal),
      ("window", lambda: masks.window(3, 0)),
      ("window_of_numpy", lambda: masks.window(np.int64(3), None)),
      ("chunk", lambda: masks.chunk(4)),
      ("prefix", lambda: masks.prefix(4)),
      ("prefix_rows", lambda: masks.prefix(np.array([4, 5]))),
      ("segments", lambda: masks.segments(np.array([[0, 0, 1]]))),
      ("lengths", lambda: masks.lengths(np.array([3]))),
      ("positions", lambda: masks.positions(np.array([[0, 1, 2]]))),
      ("offset", lambda: masks.offset(masks.causal() & masks.chunk(4), 3)),
      ("placed", lambda: masks.placed(masks.causal(), np.array([[0, 1]]), np.array([[3]]), (2, 3))),
      ("placed_shorter", lambda: masks.placed(
          masks.causal(), np.array([[0, 1]]), np.array([[3]]), (2, 2))),
      ("dense", lambda: masks.dense(np.ones((1, 1, 3, 3), bool))),
      ("custom", lambda: masks.custom(_from_table, np.array([1]))),
      ("tree", lambda: ~(masks.causal() | masks.window(1, 1)) & masks.segments(np.array([[0, 1]]))),
  )

  @parameterized.named_parameters(*MAKERS)
  def test_equal_by_value(self, make):
    self.assertEqual(make(), make())
    self.assertEqual(hash(make()), hash(make()))
    for _, other in self.MAKERS:
      if other is not make:
        self.assertNotEqual(make(), other())

  def test_numbers_and_arrays_count(self):
    different = [
        masks.window(3, 0), masks.window(0, 3), masks.window(3, None), masks.window(None, 3),
        masks.chunk(3), masks.chunk(4), masks.prefix(3), masks.prefix(np.array([3])),
        masks.prefix(np.array([4])), masks.lengths(np.array([3])),
        masks.lengths(None, np.array([3])), masks.causal() & masks.chunk(3),
        masks.chunk(3) & masks.causal(), masks.causal() | masks.chunk(3), ~masks.causal(),
        ~~masks.causal(), masks.offset(masks.causal(), 3), masks.custom(_even_sum),
        masks.segments(np.array([[0, 1]])), masks.segments(np.array([[0, 2]])),
        masks.segments(np.array([[0, 1], [0, 1]]))]
    for i, a in enumerate(different):
      for j, b in enumerate(different):
        self.assertEqual(a == b, i == j, (a, b))

  def test_is_not_equal_to_other_things(self):
    self.assertNotEqual(masks.causal(), "causal")
    self.assertNotEqual(masks.full(), None)

  def test_jax_and_numpy_arrays_are_equal(self):
    self.assertEqual(masks.prefix(np.array([1, 2])), masks.prefix(jnp.array([1, 2])))

  def test_is_immutable(self):
    with self.assertRaises(AttributeError):
      masks.window(1, 1).left = 2

  @parameterized.named_parameters(*MAKERS)
  def test_is_a_pytree(self, make):
    mask = make()
    leaves, structure = jax.tree.flatten(mask)
    self.assertEqual(jax.tree.unflatten(structure, leaves), mask)
    self.assertEqual(jax.tree.structure(make()), structure)
    self.assertEqual(hash(jax.tree.structure(make())), hash(structure))
    self.assertEqual(jax.tree.map(lambda x: x, mask), mask)
    self.assertEqual(jax.jit(lambda m: m)(mask), mask)
    self.assertLen(mask_lib.leaf_roles(mask), len(leaves))
    self.assertEqual(mask_lib.structure_roles(structure), mask_lib.leaf_roles(mask))

  def test_roles_are_in_the_order_of_the_leaves(self):
    mask = masks.positions(
        np.full((1, 2), 1), np.full((1, 3), 2),
        masks.segments(np.full((1, 2), 3), np.full((1, 3), 4))
        & masks.lengths(None, np.array([5])) & masks.dense(np.ones((1, 1, 1, 1), bool))
        & masks.custom(_from_table, np.array([7]))) & masks.prefix(np.array([8]))
    self.assertEqual([int(x.flat[0]) for x in jax.tree.leaves(mask)], [3, 4, 5, 1, 7, 1, 2, 8])
    self.assertEqual(mask_lib.leaf_roles(mask), (
        "query", "key", "batch", "dense", "whole", "query", "key", "batch"))

  def test_vmap_over_the_arrays(self):
    found = jax.vmap(lambda x: materialize.to_dense(masks.lengths(None, x), (1, 1, 1, 4)))(
        jnp.array([[1], [3]]))
    np.testing.assert_array_equal(found[:, 0, 0, 0], rows("1000 1110"))


class RetraceTest(parameterized.TestCase):
  """An equal mask never compiles anything again; a different one does."""

  def setUp(self):
    super().setUp()
    self.traces = 0

  def count(self, mask, x):
    self.traces += 1
    return jnp.where(materialize.to_dense(mask, (1, 1, 3, 3)), x, 0)

  def test_as_an_argument(self):
    f = jax.jit(self.count)
    def make(ids):
      return (masks.causal() & masks.window(2, 0)) | ~masks.segments(np.array([ids]))
    f(make([0, 0, 1]), 1.0)
    f(make([0, 0, 1]), 2.0)
    f(make([0, 1, 2]), 2.0)  # other numbers, the same structure
    self.assertEqual(self.traces, 1)
    f(masks.causal() & masks.window(2, 0), 1.0)
    f((masks.causal() & masks.window(1, 0)) | ~masks.segments(np.array([[0, 0, 1]])), 1.0)
    self.assertEqual(self.traces, 3)

  def test_as_a_static_argument(self):
    f = jax.jit(self.count, static_argnums=0)
    for mask in (lambda: masks.causal() & masks.window(2, 0),
                 lambda: masks.segments(np.array([[0, 0, 1]]))):
      before = self.traces
      f(mask(), 1.0)
      f(mask(), 2.0)
      self.assertEqual(self.traces, before + 1)
    f(masks.segments(np.array([[0, 1, 1]])), 1.0)  # a static array is part of the value
    self.assertEqual(self.traces, 3)

  @parameterized.product(mechanism=("vanilla", "blockwise"), jit=(False, True))
  def test_through_attention(self, mechanism, jit):
    def predicate(batch, head, query, key):
      self.traces += 1
      return key <= query + batch

    q = jnp.ones((1, 8, 2, 4))
    def attend(q, window, ids):
      mask = masks.custom(predicate) & masks.window(window, 0) & masks.segments(ids)
      return attention(q, q, q, mechanism=mechanism, mask=mask).attention_outputs
    attend = jax.jit(attend, static_argnums=1) if jit else attend
    def traces_of(window, ids):
      before = self.traces
      attend(q, window, np.array([ids]))
      return self.traces - before

    self.assertGreater(traces_of(2, [0] * 8), 0)
    self.assertEqual(traces_of(2, [0] * 8), 0)
    self.assertEqual(traces_of(2, [0] * 4 + [1] * 4), 0)
    self.assertGreater(traces_of(1, [0] * 8), 0)

  @parameterized.parameters("vanilla", "blockwise")
  def test_masks_of_equal_numbers_are_told_apart(self, mechanism):
    """Structures that differ in the kind of a node alone do not share what was compiled."""
    q = jax.random.normal(jax.random.key(0), (1, 8, 1, 4))
    outs = {}
    for mask in (masks.full(), masks.causal(), masks.chunk(3), masks.prefix(3),
                 masks.chunk(3) & masks.prefix(7), masks.chunk(3) | masks.prefix(7)):
      out = attention(q, q, q, mechanism=mechanism, mask=mask, causal=False).attention_outputs
      logits = np.where(dense(mask, (1, 1, 8, 8))[0, 0], q[0, :, 0] @ q[0, :, 0].T / 2, -np.inf)
      weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
      np.testing.assert_allclose(out[0, :, 0], weights @ q[0, :, 0], atol=1e-5, err_msg=str(mask))
      outs[mask] = out
    self.assertLen(outs, 6)

  def test_maps_of_equal_masks_are_shared(self):
    sizes = block_map_lib.Sizes(64, 64, 16, 16)
    first = block_map_lib.block_kinds(masks.causal() & masks.window(7, 0), sizes)
    self.assertIs(block_map_lib.block_kinds(masks.causal() & masks.window(7, 0), sizes), first)
    self.assertIsNot(block_map_lib.block_kinds(masks.causal() & masks.window(8, 0), sizes), first)
    with self.assertRaises(ValueError):
      first[...] = 0  # shared, so read-only


# --- MaskInfo. -----------------------------------------------------------------------------------


class MaskInfoTest(parameterized.TestCase):

  def test_from_segments(self):
    ids = np.array([[0, 0, 1, -1]])
    info = MaskInfo.from_segments(ids)
    self.assertIs(info.kv_segment_ids, ids)
    np.testing.assert_array_equal(dense(info.to_mask(), (1, 1, 4, 4))[0, 0],
                                  rows("1100 1100 0010 0000"))
    info = MaskInfo.from_segments(np.array([[0, 1]]), ids, np.array([[1, 2]]),
                                  np.array([[0, 1, 2, 3]]))
    np.testing.assert_array_equal(dense(info.to_mask(masks.causal()), (1, 1, 2, 4))[0, 0],
                                  rows("1100 0010"))

  def test_from_attention_mask(self):
    for dtype in (bool, np.int32, np.uint8):
      padding = MaskInfo.from_attention_mask(rows("110 100").astype(dtype))
      self.assertEqual(padding.attention_mask.dtype, bool)
      np.testing.assert_array_equal(dense(padding.to_mask(), (2, 1, 2, 3))[:, 0],
                                    [rows("110 110"), rows("100 100")])
    whole = rows("110 011")[None, None]
    np.testing.assert_array_equal(
        dense(MaskInfo.from_attention_mask(whole).to_mask(masks.causal()), (1, 1, 2, 3)),
        rows("100 010")[None, None])

  @parameterized.named_parameters(
      ("padding", np.zeros((2, 3), np.float32),
       r"attention_mask has dtype float32 and shape \(2, 3\)"),
      ("whole", np.zeros((1, 1, 2, 3), np.float64), "attention_mask has dtype float"),
      ("rank_1", np.zeros(3, bool), r"attention_mask has dtype bool and shape \(3,\)"),
      ("rank_3", np.zeros((2, 2, 3), bool), r"shape \(2, 2, 3\)"),
      ("nothing", None, "attention_mask: got None"),
      ("segment_ids", np.array([[1, 1, 2]]), "0 or 1; .*MaskInfo.from_segments"))
  def test_bad_attention_masks(self, mask, message):
    with self.assertRaisesRegex(ValueError, message):
      MaskInfo.from_attention_mask(mask)

  def test_from_cu_seqlens(self):
    info = MaskInfo.from_cu_seqlens(np.array([0, 2, 2, 5], np.int32), 6)
    np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, 2, 2, 2, -1]])
    np.testing.assert_array_equal(info.q_positions, [[0, 1, 0, 1, 2, 0]])
    np.testing.assert_array_equal(dense(info.to_mask(masks.causal()), (1, 1, 6, 6))[0, 0], rows(
        "100000 110000 001000 001100 001110 000000"))

  def test_from_cu_seqlens_of_both_sides(self):
    info = MaskInfo.from_cu_seqlens(np.array([0, 1, 3]), 3, np.array([0, 2, 4]), 4)
    np.testing.assert_array_equal(info.q_segment_ids, [[0, 1, 1]])
    np.testing.assert_array_equal(info.kv_segment_ids, [[0, 0, 1, 1]])
    np.testing.assert_array_equal(info.q_positions, [[0, 0, 1]])
    np.testing.assert_array_equal(info.kv_positions, [[0, 1, 0, 1]])
    np.testing.assert_array_equal(dense(info.to_mask(masks.causal()), (1, 1, 3, 4))[0, 0],
                                  rows("1000 0010 0011"))

  @parameterized.parameters(
      ((None, 4), "cu_seqlens_q: got None"),
      ((np.array([0, 2.5, 4]), 4), r"cu_seqlens_q: got float.*\[3\]"),
      ((np.array([[0, 4]]), 4), r"cu_seqlens_q: got int.*\[1, 2\]"),
      ((np.array([0]), 4), "cu_seqlens_q: got int"),
      ((np.array([0, 3, 2, 4]), 4), r"got \[0, 3, 2, 4\]; .*never decrease"),
      ((np.array([1, 3, 4]), 4), r"got \[1, 3, 4\]; .*start at 0"),
      ((np.array([0, 3, 9]), 4), r"got \[0, 3, 9\]; .*end at most at total_q=4"),
      ((np.array([0, 4]), None), "total_q: got None"),
      ((np.array([0, 4]), -1), "total_q: got -1"),
      ((np.array([0, 4]), 4, None, 9), "total_k: got 9; expected None without cu_seqlens_k"),
      ((np.array([0, 4]), 4, np.array([0, 2, 4])), r"cu_seqlens_k: got \(3,\).*\(2,\)"),
      ((np.array([0, 4]), 4, np.array([0, 5])), r"cu_seqlens_k: got \[0, 5\].*total_k=4"))
  def test_bad_cu_seqlens(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      MaskInfo.from_cu_seqlens(*arguments)

  def test_and_between_masks_is_no_python_and(self):
    """`causal() and window(1, 0)` would be window(1, 0), and see into the future no less."""
    for wrong in (lambda: masks.causal() and masks.window(1, None),
                  lambda: masks.causal() or masks.window(1, 0), lambda: not masks.causal()):
      with self.assertRaisesRegex(ValueError, "no truth value.*`&`"):
        wrong()

  def test_masks_of_what_is_none(self):
    for call in (lambda: masks.offset(3, 1), lambda: masks.placed(3, np.zeros((1, 1), int), None, (
        1, 1)), lambda: masks.positions(np.zeros((1, 1), int), mask=3)):
      with self.assertRaisesRegex(ValueError, "mask is a int; expected a mask"):
        call()

  def test_bad_segments_and_base(self):
    with self.assertRaisesRegex(ValueError, "q_segment_ids: got None"):
      MaskInfo.from_segments(None)
    with self.assertRaisesRegex(ValueError, "base: got int; expected a mask"):
      MaskInfo().to_mask(3)

  def test_from_cu_seqlens_in_jit(self):
    info = jax.jit(lambda x: MaskInfo.from_cu_seqlens(x, 4))(np.array([0, 1, 3], np.int32))
    np.testing.assert_array_equal(info.q_segment_ids, [[0, 1, 1, -1]])

  @parameterized.parameters("q_segment_ids", "kv_segment_ids")
  def test_segments_of_one_side(self, name):
    with self.assertRaisesRegex(ValueError, f"{name} is given and .* is None; expected both"):
      MaskInfo(**{name: np.zeros((1, 2), np.int32)}).to_mask()

  def test_nothing_said_is_the_base(self):
    self.assertEqual(MaskInfo().to_mask(), masks.full())
    self.assertEqual(MaskInfo().to_mask(masks.causal()), masks.causal())


# --- The proof. ----------------------------------------------------------------------------------


class At(NamedTuple):
  """Numbers of rows, heads, queries and keys, and positions; they broadcast to [B, H, T, S]."""

  batch: Any
  head: Any
  query: Any
  key: Any
  query_position: Any
  key_position: Any


def seen(recipe, at: At):
  """Who sees whom, by the documentation's words and numpy alone."""
  name, *rest = recipe
  if name == "full":
    return np.ones((1, 1, 1, 1), bool)
  if name == "causal":
    return at.query_position - at.key_position >= 0
  if name == "window":
    ahead = at.key_position - at.query_position
    least, most = -2**60 if rest[0] is None else -rest[0], 2**60 if rest[1] is None else rest[1]
    return (least <= ahead) & (ahead <= most)
  if name == "chunk":
    return np.floor(at.query_position / rest[0]) == np.floor(at.key_position / rest[0])
  if name == "prefix":
    return at.key_position < rest[0] + 0 * at.query_position
  if name == "prefix_rows":
    return at.key_position < rest[0].reshape(-1, 1, 1, 1)
  if name == "segments":
    query, key = rest[0][:, None, :, None], rest[1][:, None, None, :]
    return np.equal(query, key) & (query > -1) & (key > -1)
  if name == "lengths":
    valid = np.ones((1, 1, 1, 1), bool)
    if rest[0] is not None:
      valid = valid & (at.query < rest[0].reshape(-1, 1, 1, 1))
    if rest[1] is not None:
      valid = valid & (at.key < rest[1].reshape(-1, 1, 1, 1))
    return valid
  if name == "dense":
    return rest[0]
  if name == "custom":
    return np.mod(3 * at.query_position + at.key_position + at.batch + at.head, 5) > 1
  if name == "custom_table":
    return np.logical_or(at.key_position >= rest[0][at.head], at.query_position == at.key_position)
  if name == "positions":
    sub, query, key = rest
    if query is not None:
      at = at._replace(query_position=query.astype(np.int64)[:, None, :, None])
    if key is not None:
      at = at._replace(key_position=key.astype(np.int64)[:, None, None, :])
    return seen(sub, at)
  if name == "placed":
    query, key = rest[1][:, None, :, None], rest[2][:, None, None, :]
    return seen(rest[0], at._replace(query=query, key=key, query_position=query,
                                     key_position=key)) & (query < rest[3][0]) & (
                                         key <= rest[3][1] - 1)
  if name == "offset":
    return seen(rest[0], at._replace(query_position=at.query_position + rest[1]))
  if name == "offset_rows":
    return seen(rest[0], at._replace(
        query_position=at.query_position + rest[1].reshape(-1, 1, 1, 1)))
  if name == "not":
    return np.logical_not(seen(rest[0], at))
  combine = {"and": np.logical_and, "or": np.logical_or}[name]
  return combine(seen(rest[0], at), seen(rest[1], at))


def seen_by_all(recipe, shape) -> np.ndarray:
  batch, head, query, key = np.ogrid[tuple(map(slice, shape))]
  return np.broadcast_to(seen(recipe, At(batch, head, query, key, query, key)), shape)


def _modulo(batch, head, query, key):
  return (3 * query + key + batch + head) % 5 > 1


def _table(batch, head, query, key, table):
  return (key >= table[head]) | (query == key)


def build(recipe) -> masks.Mask:
  """The mask of a recipe."""
  name, *rest = recipe
  rest = [build(x) if isinstance(x, tuple) else x for x in rest]
  if name == "positions":
    return masks.positions(rest[1], rest[2], rest[0])
  if name in ("and", "or", "not"):
    return {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "not": lambda a: ~a}[name](*rest)
  return {
      "custom": lambda: masks.custom(_modulo),
      "custom_table": lambda table: masks.custom(_table, table),
      "prefix_rows": masks.prefix, "offset_rows": masks.offset,
  }.get(name, getattr(masks, name, None))(*rest)


STATIC_LEAVES = ("full", "causal", "window", "chunk", "prefix", "custom")
ARRAY_LEAVES = ("prefix_rows", "segments", "lengths", "dense", "custom_table")
MOVES = ("positions", "placed", "offset", "offset_rows")


class Draw:
  """Draws recipes. What `choices` decides is static; `numbers` fills arrays of the same shapes."""

  def __init__(self, choices, numbers, shape):
    self.choices, self.numbers, self.shape = choices, numbers, shape

  def one_or(self, n: int) -> int:
    return int(self.choices.choice([1, n]))

  def recipe(self, depth: int, arrays: bool):
    kind = self.choices.integers(0, 6) if depth else 5
    if kind == 0:
      return "not", self.recipe(depth - 1, arrays)
    if kind < 4:
      name = "and" if kind == 1 else self.choices.choice(["and", "or"])
      return str(name), self.recipe(depth - 1, arrays), self.recipe(depth - 1, arrays)
    if kind == 4:
      move = str(self.choices.choice(MOVES)) if arrays else "offset"
      return move, self.recipe(depth - 1, arrays), *getattr(self, move)()
    leaf = str(self.choices.choice(ARRAY_LEAVES * 2 + STATIC_LEAVES if arrays else STATIC_LEAVES))
    return leaf, *getattr(self, leaf, tuple)()

  def window(self):
    left, right = (None if x < 0 else int(x) for x in self.choices.integers(-1, 12, 2))
    if self.choices.random() < 0.2 and left is not None:
      left, right = -int(self.choices.integers(0, 3)), left
    return left, right

  def chunk(self):
    return (int(self.choices.integers(1, 17)),)

  def prefix(self):
    return (int(self.choices.integers(0, self.shape[3] + 3)),)

  def offset(self):
    return (int(self.choices.integers(-8, 25)),)

  def offset_rows(self):
    return (self.numbers.integers(-8, 25, self.one_or(self.shape[0])),)

  def prefix_rows(self):
    return (self.numbers.integers(0, self.shape[3] + 3, self.one_or(self.shape[0])),)

  def segments(self):
    batch, _, queries, keys = self.shape
    lowest, highest = int(self.choices.choice([-1, 0])), int(self.choices.choice([1, 2, 6]))
    ids = [self.numbers.integers(lowest, highest, (self.one_or(batch), n)) for n in (queries, keys)]
    if self.choices.random() < 0.6:
      ids = [np.sort(x, axis=1) for x in ids]
      if self.choices.random() < 0.5:  # padding behind instead of in front
        ids = [np.where(x == x.max(1, keepdims=True), -1, x) for x in ids]
    return tuple(ids)

  def lengths(self):
    batch, _, queries, keys = self.shape
    both = [self.numbers.integers(0, n + 2, self.one_or(batch)) for n in (queries, keys)]
    which = self.choices.integers(0, 3)
    return tuple(None if which == i else x for i, x in enumerate(both))

  def dense(self):
    shape = [self.one_or(n) for n in self.shape]
    array = self.numbers.random(shape) < self.choices.choice([0.1, 0.5, 0.9])
    if self.choices.random() < 0.5:  # large areas of one value
      array = np.maximum.accumulate(array, axis=3) & (np.arange(shape[2]) % 7 > 2)[:, None]
    return (array,)

  def custom_table(self):
    return (self.numbers.integers(0, self.shape[3] + 1, self.shape[1]),)

  def placed(self):
    batch, _, queries, keys = self.shape
    found = [self.numbers.integers(0, 2 * n, (self.one_or(batch), n)) for n in (queries, keys)]
    if self.choices.random() < 0.7:
      found = [np.sort(x, axis=1) for x in found]
    return *found, [int(self.choices.integers(1, 2 * n + 2)) for n in (queries, keys)]

  def positions(self):
    batch, _, queries, keys = self.shape
    found = []
    for n in (queries, keys):
      kind, size = self.choices.integers(0, 4), (self.one_or(batch), n)
      if kind == 0:
        found.append(None)
      elif kind == 1:
        found.append(self.numbers.integers(-5, n + 5, size))
      elif kind == 2:
        found.append(np.sort(self.numbers.integers(0, 2 * n, size), axis=1))
      else:  # striped over 3 devices
        found.append(np.broadcast_to(np.argsort(np.arange(n) % 3, kind="stable"), size).copy())
    return tuple(found)


def draw_sizes(generator):
  """(B, H, T, S) and block sizes, neither of which divide one another."""
  shape = (*map(int, generator.integers(1, 4, 2)), *map(int, generator.integers(1, 41, 2)))
  return shape, block_map_lib.Sizes(shape[2], shape[3], *(
      int(generator.integers(max(1, n // 7), n + 4)) for n in shape[2:]))


def listed_kinds(block_map: block_map_lib.BlockMap, columns: int) -> np.ndarray:
  """The kind of every block pair, by the lists alone; they must be as documented."""
  indices, num_full, num_visited = map(np.asarray, block_map)
  length = indices.shape[-1]
  kinds = np.full((*num_full.shape, columns + 1), block_map_lib.EMPTY, np.int8)
  place = np.arange(length)
  visited = place < num_visited[..., None]
  is_full = place < num_full[..., None]
  rising = np.diff(indices, axis=-1) > 0
  border = place[1:] == num_full[..., None]
  assert (rising | border | ~visited[..., 1:]).all(), "each group must ascend"
  assert ((indices >= 0) & (indices < columns))[visited].all(), "indices of blocks that exist"
  assert (num_full <= num_visited).all() and (num_visited <= length).all()
  np.put_along_axis(kinds, np.where(visited, indices, columns),
                    np.where(is_full, block_map_lib.FULL, block_map_lib.PARTIAL).astype(np.int8), axis=-1)
  return kinds[..., :columns]


def spread(kinds, sizes, shape) -> np.ndarray:
  """The kind of every pair of a query and a key: [B, H, T, S]."""
  kinds = np.broadcast_to(kinds, (*shape[:2], *kinds.shape[2:]))
  kinds = np.repeat(np.repeat(kinds, sizes.block_q, 2), sizes.block_kv, 3)
  return kinds[:, :, :sizes.queries, :sizes.keys]


def joined(kinds, partial_tiles, sizes, shape) -> np.ndarray:
  """Full blocks True, unvisited ones False, the others as evaluated: bool [B, H, T, S]."""
  kinds = spread(kinds, sizes, shape)
  return np.where(kinds == block_map_lib.FULL, True, (kinds == block_map_lib.PARTIAL) & partial_tiles)


def slice_numpy(x, starts, lengths):
  """`tile_lib.slice_at` that refuses tiles which do not lie inside of the array."""
  for start, length, size in zip(starts, lengths, x.shape, strict=True):
    assert 0 <= start and start + length <= size, (starts, lengths, x.shape)
  return x[tuple(slice(start, start + length) for start, length in zip(starts, lengths))]


def evaluate_tiles(mask, kinds, sizes, shape) -> np.ndarray:
  """What the mask says inside of the partial blocks of `kinds`; elsewhere False."""
  leaves, structure = jax.tree.flatten(mask)
  found = np.zeros((shape[0], shape[1], sizes.num_query_blocks * sizes.block_q,
                    sizes.num_key_blocks * sizes.block_kv), bool)
  with (mock.patch.object(tile_lib, "jnp", np),
        mock.patch.object(tile_lib, "slice_at", slice_numpy)):
    operands = tile_lib.pad_mask(structure, MaskOperands(tuple(leaves)),
                         found.shape[2] - sizes.queries, found.shape[3] - sizes.keys)
    for b, i, j in np.argwhere((kinds == block_map_lib.PARTIAL).any(1)):
      for b in (range(shape[0]) if kinds.shape[0] == 1 else [b]):
        tile = tile_lib.Tile(int(b), 0, int(i) * sizes.block_q, int(j) * sizes.block_kv,
                          shape[1], sizes.block_q, sizes.block_kv)
        cut, at = tile_lib.slice_mask(structure, operands, tile)
        found[b, :, tile.query:tile.query + sizes.block_q,
              tile.key:tile.key + sizes.block_kv] = cut.visible(at) & (at.key_index < sizes.keys)
  return found[:, :, :sizes.queries, :sizes.keys]


def merged_by_hand(kinds, group: int) -> np.ndarray:
  """Kinds of groups of heads, group by group."""
  merged = []
  for first in range(0, kinds.shape[1], group):
    some = kinds[:, first:first + group]
    merged.append(np.where((some == block_map_lib.FULL).all(1), block_map_lib.FULL,
                           np.where((some == block_map_lib.EMPTY).all(1), block_map_lib.EMPTY, block_map_lib.PARTIAL)))
  return np.stack(merged, 1)


class ProofTest(parameterized.TestCase):
  """Block map and in-tile evaluation together say what the mask says, for any mask and sizes."""

  def check(self, recipe, shape, sizes, kinds, evaluated):
    """One case: `kinds` and `evaluated` [B, H, T, S] (in partial blocks) against `seen`."""
    expected = seen_by_all(recipe, shape)
    where = f"{recipe}\nshape {shape}, {sizes}"
    for transposed in (False, True):
      turned = kinds.swapaxes(-1, -2) if transposed else kinds
      listed = listed_kinds(block_map_lib.block_map(np.ascontiguousarray(turned)), turned.shape[-1])
      listed = listed.swapaxes(-1, -2) if transposed else listed
      np.testing.assert_array_equal(listed, kinds, err_msg=where)
    np.testing.assert_array_equal(joined(kinds, evaluated, sizes, shape), expected, err_msg=where)
    if sizes.keys % sizes.block_kv:
      self.assertFalse((kinds[..., -1] == block_map_lib.FULL).any(), where)
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
    """Deep masks with arrays, without waiting for the compiler."""
    generator = np.random.default_rng(100 + seed)
    for _ in range(250):
      shape, sizes = draw_sizes(generator)
      recipe = Draw(generator, generator, shape).recipe(int(generator.integers(0, 4)), True)
      mask = build(recipe)
      kinds = block_map_lib._kinds(mask, sizes, np)
      self.check(recipe, shape, sizes, kinds, evaluate_tiles(mask, kinds, sizes, shape))

  @parameterized.parameters(*range(8))
  def test_masks_with_arrays_in_jit(self, seed):
    """Some structures, each compiled once and run with many arrays."""
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
      return (kinds, block_map_lib.block_map(kinds), block_map_lib.block_map(kinds.swapaxes(-1, -2)),
              every(operands, 0, 0, 0))

    kinds, visits, turned, cut = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(stacked))
    self.assertEqual(kinds.dtype, np.int8)
    cut = cut.transpose(0, 1, 4, 2, 5, 3, 6).reshape(
        len(recipes), shape[0], shape[1], sizes.num_query_blocks * sizes.block_q, -1)
    for n, recipe in enumerate(recipes):
      take = lambda x: x[n]
      listed = listed_kinds(jax.tree.map(take, visits), sizes.num_key_blocks)
      np.testing.assert_array_equal(listed, kinds[n])
      listed = listed_kinds(jax.tree.map(take, turned), sizes.num_query_blocks)
      np.testing.assert_array_equal(listed.swapaxes(-1, -2), kinds[n])
      self.check(recipe, shape, sizes, kinds[n],
                 cut[n, :, :, :sizes.queries, :sizes.keys])

  @parameterized.product(window=((3, 0), (3, 3), (3, None), (None, 3)), block=(1, 2, 5),
                         padding=(-2**31, 2**31 - 1))
  def test_keys_that_are_padding_may_stand_at_the_ends_of_int32(self, window, block, padding):
    query = np.int32([[-3, -1, 0, 1, 2, 3, 4, 5, -2]])
    key = np.where(np.arange(9) % 3 == 1, padding, query + 2).astype(np.int32)
    self.check_ends(("positions", ("window", *window), query, key), block)

  def check_ends(self, recipe, block):
    """One case of 9 queries and 9 keys, by numpy and by jax."""
    sizes, shape = block_map_lib.Sizes(9, 9, block, block), (1, 1, 9, 9)
    mask = build(recipe)
    for kinds in (block_map_lib.host_kinds(mask, sizes), np.asarray(block_map_lib.block_kinds(mask, sizes))):
      self.check(recipe, shape, sizes, kinds, evaluate_tiles(mask, kinds, sizes, shape))
    np.testing.assert_array_equal(dense(mask, shape), seen_by_all(recipe, shape))

  @parameterized.product(
      window=((3, 0), (3, 3), (3, None), (None, 3), (None, -2), (-2, None), (-1, 3), (3, -1),
              (2**31 - 1, 2**31 - 1), (-2**31, None), (None, -2**31)), block=(1, 2))
  def test_queries_may_stand_at_the_ends_of_int32(self, window, block):
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
    self.assertTrue((block_map_lib.block_kinds(mask, block_map_lib.Sizes(5, 5, 2, 2))[..., :2] == block_map_lib.FULL)
                    .all())

  # A recipe and its transpose: queries and keys change places.
  TURNED = (
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
    pairs = [(build(a), build(b)) for a, b in self.TURNED]
    for _ in range(40):
      ids = [np.sort(generator.integers(-1, 4, (2, n)), 1) for n in (24, 36)]
      array = generator.random((2, 3, 24, 36)) < 0.95
      length = generator.integers(0, 37, 2)
      pairs += [(masks.segments(*ids), masks.segments(*ids[::-1])),
                (masks.dense(array), masks.dense(array.swapaxes(2, 3))),
                (masks.lengths(None, length), masks.lengths(length, None)),
                (masks.positions(*ids), masks.positions(*ids[::-1], masks.window(0, None)))]
    for mask, turned in pairs:
      for block_q, block_kv in ((8, 12), (4, 9), (24, 1), (6, 36)):
        kinds = block_map_lib._kinds(mask, block_map_lib.Sizes(24, 36, block_q, block_kv), np)
        other = block_map_lib._kinds(turned, block_map_lib.Sizes(36, 24, block_kv, block_q), np)
        np.testing.assert_array_equal(kinds.swapaxes(-1, -2), other, str(mask))

  def test_merge_heads(self):
    generator = np.random.default_rng(3)
    for heads, group in ((6, 1), (6, 2), (6, 3), (6, 6), (1, 4)):
      kinds = generator.integers(0, 3, (2, heads, 5, 4)).astype(np.int8)
      kinds[0, :, 0], kinds[0, :, 1], kinds[1, :, 2] = block_map_lib.EMPTY, block_map_lib.FULL, block_map_lib.PARTIAL
      expected = kinds if heads == 1 else merged_by_hand(kinds, group)
      for found in (block_map_lib.merge_heads(kinds, group), block_map_lib.merge_heads(jnp.array(kinds), group)):
        np.testing.assert_array_equal(found, expected)
        self.assertEqual(found.dtype, np.int8)

  def test_join_full(self):
    E, F, P = block_map_lib.EMPTY, block_map_lib.FULL, block_map_lib.PARTIAL
    kinds = [[F, F, F, F, F, P, E, F, F], [F, E, F, F, P, P, F, F, P]]
    kinds = np.array(kinds, np.int8)[:, None, None]
    large = [[F, F, E, E], [E, F, E, F]]
    small = [[E, E, E, E, F, P, E, F, F], [F, E, E, E, P, P, E, E, P]]
    for given in (kinds, jnp.array(kinds)):
      for found, expected in zip(block_map_lib.join_full(given, 2), (large, small), strict=True):
        np.testing.assert_array_equal(found[:, 0, 0], expected)
        self.assertEqual((found.dtype, type(found)), (np.int8, type(given)))

  def test_full_map_has_no_partial_block_even_when_traced(self):
    kinds = np.array([block_map_lib.FULL, block_map_lib.EMPTY, block_map_lib.FULL], np.int8)[None, None, None]
    for given in (kinds, jnp.array(kinds)):
      visits = block_map_lib.full_map(given)
      self.assertFalse(visits.any_partial)
      np.testing.assert_array_equal(visits.num_visited, block_map_lib.block_map(given).num_visited)
      np.testing.assert_array_equal(visits.indices[0, 0, 0, :2], [0, 2])

  def test_what_is_known_on_the_host(self):
    sizes = block_map_lib.Sizes(8, 8, 4, 4)
    for mask, full, partial in ((masks.full(), True, False), (masks.causal(), True, True),
                                (masks.custom(_modulo), False, True),
                                (~masks.full(), False, False), (masks.chunk(4), True, False)):
      visits = block_map_lib.block_map(block_map_lib.block_kinds(mask, sizes))
      self.assertEqual((visits.any_full, visits.any_partial), (full, partial), mask)
    traced = block_map_lib.block_map(block_map_lib.block_kinds(masks.lengths(np.array([8])), sizes))
    self.assertTrue(traced.any_full and traced.any_partial)


class TightnessTest(parameterized.TestCase):
  """Few blocks are visited: as many as the mask touches, for every leaf that can know it."""

  def visited(self, mask, sizes):
    kinds = block_map_lib.block_kinds(mask, sizes)
    return int((kinds != block_map_lib.EMPTY).sum()), int((kinds == block_map_lib.FULL).sum())

  @parameterized.parameters(1, 2, 3, 8, 33)
  def test_causal(self, n):
    self.assertEqual(self.visited(masks.causal(), block_map_lib.Sizes(n * 16, n * 16, 16, 16)),
                     (n * (n + 1) // 2, n * (n - 1) // 2))

  @parameterized.product(n=(1, 5, 64), left=(0, 1, 15, 16, 17, 40, 10**6))
  def test_window_is_linear(self, n, left):
    block = 16
    reach = min(-(-left // block), n - 1)  # blocks before its own that a block's first query sees
    expected = n * (reach + 1) - reach * (reach + 1) // 2
    found, _ = self.visited(masks.window(left, 0), block_map_lib.Sizes(n * block, n * block, block, block))
    self.assertEqual(found, expected)

  @parameterized.product(n=(1, 6, 12), wide=(1, 2, 3, 4))
  def test_chunks_visit_their_diagonal(self, n, wide):
    block = 8
    kinds = block_map_lib.block_kinds(masks.chunk(wide * block),
                               block_map_lib.Sizes(n * block, n * block, block, block))
    number = np.arange(n) // wide
    expected = np.where(number[:, None] == number, block_map_lib.FULL, block_map_lib.EMPTY)
    np.testing.assert_array_equal(kinds[0, 0], expected)

  def test_sorted_segments_visit_what_they_touch(self):
    generator = np.random.default_rng(11)
    sizes = block_map_lib.Sizes(60, 72, 6, 8)
    find = jax.jit(lambda mask: block_map_lib.block_kinds(mask, sizes))
    for _ in range(50):
      query, key = (np.sort(generator.integers(0, 20, (2, n)), 1) for n in (60, 72))
      # Padding behind the documents, as packing leaves it.
      query, key = (np.where(x > 17, -1, x) for x in (query, key))
      kinds = np.asarray(find(masks.segments(query, key)))
      for b in range(2):
        for i, j in np.ndindex(10, 9):
          ids = set(query[b, i * 6:i * 6 + 6]) - {-1}
          others = set(key[b, j * 8:j * 8 + 8]) - {-1}
          # Sorted ids of a block lie in an interval: two that overlap need share no id.
          overlap = ids and others and min(ids) <= max(others) and min(others) <= max(ids)
          self.assertEqual(kinds[b, 0, i, j] != block_map_lib.EMPTY, bool(overlap))

  @parameterized.parameters(64, 61)
  def test_packed_documents_visit_what_they_touch(self, length):
    """The same documents on both sides: exactly the pairs of blocks that share one."""
    generator = np.random.default_rng(12)
    sizes = block_map_lib.Sizes(length, length, 8, 8)
    for _ in range(50):
      ids = 1 + np.cumsum(generator.random((1, length)) < 0.15, axis=1)
      place = np.arange(length)[None] - np.searchsorted(ids[0], ids)
      parts = [set(ids[0, i:i + 8]) for i in range(0, length, 8)]
      shared = np.array([[bool(a & b) for b in parts] for a in parts])
      kinds = block_map_lib._kinds(masks.segments(ids), sizes, np)[0, 0]
      np.testing.assert_array_equal(kinds != block_map_lib.EMPTY, shared)
      same = np.array([[len(a | b) == 1 for b in parts] for a in parts])
      same[:, -1] &= length % 8 == 0
      np.testing.assert_array_equal(kinds == block_map_lib.FULL, same)
      # Causal by positions that restart in each document: nothing above the diagonal is needed.
      both = block_map_lib._kinds(masks.segments(ids) & masks.causal(), sizes, np)[0, 0]
      np.testing.assert_array_equal(both != block_map_lib.EMPTY, np.tril(shared))
      restarted = masks.positions(place, place, masks.segments(ids) & masks.causal())
      np.testing.assert_array_less(block_map_lib._kinds(restarted, sizes, np)[0, 0] != block_map_lib.EMPTY,
                                   1 + shared)

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
      ("custom_and", masks.custom(_even_sum) & masks.chunk(4), "1000 0100 0010 0001"),
      ("custom_or", masks.custom(_even_sum) | masks.prefix(8), "2211 2211 2211 2211"))
  def test_combinations(self, mask, expected):
    kinds = block_map_lib.block_kinds(mask, block_map_lib.Sizes(16, 16, 4, 4))
    self.assertEqual(" ".join("".join(map(str, row)) for row in kinds[0, 0]), expected)

  @parameterized.parameters("causal", "window", "chunk", "prefix", "lengths", "dense",
                            "prefix_rows")
  def test_leaves_are_exact(self, leaf):
    """EMPTY where nothing is visible, FULL where all is, and only there."""
    generator = np.random.default_rng(13)
    for _ in range(60):
      shape, sizes = draw_sizes(generator)
      recipe = (leaf, *getattr(Draw(generator, generator, shape), leaf, tuple)())
      if leaf == "window" and None not in recipe and -recipe[1] > recipe[2]:
        continue  # visible nowhere, which is no question of blocks
      kinds = block_map_lib._kinds(build(recipe), sizes, np)
      kinds = np.broadcast_to(kinds, (*shape[:2], *kinds.shape[2:]))
      visible = seen_by_all(recipe, shape)
      for b, h, i, j in np.ndindex(kinds.shape):
        part = visible[b, h, i * sizes.block_q:(i + 1) * sizes.block_q,
                       j * sizes.block_kv:(j + 1) * sizes.block_kv]
        whole = part.shape[1] == sizes.block_kv
        expected = (block_map_lib.FULL if part.all() and whole else
                    block_map_lib.PARTIAL if part.any() else block_map_lib.EMPTY)
        self.assertEqual(kinds[b, h, i, j], expected, (recipe, shape, sizes, b, h, i, j))


class ReachTest(parameterized.TestCase):

  @parameterized.parameters(
      (masks.full(), True), (masks.causal(), True), (masks.window(3, 1), False),
      (masks.window(None, 1), True), (masks.chunk(4), False), (masks.prefix(5), True),
      (masks.causal() & masks.window(3, None), False), (masks.causal() & masks.chunk(4), False),
      (masks.window(3, 0) | masks.chunk(2), False), (masks.window(3, 0) | masks.prefix(1), True),
      (~masks.window(3, 0), True), (masks.offset(masks.window(3, 0), 0), False))
  def test_holds_every_visible_pair(self, mask, unbounded):
    low, high = position_range.bounds(mask)
    query, key = np.nonzero(dense(mask, (1, 1, 12, 12))[0, 0])
    self.assertGreaterEqual((key - query).min(), low)
    self.assertLessEqual((key - query).max(), high)
    self.assertEqual(np.isinf(high - low), unbounded)
    self.assertEqual(position_range.is_narrow(mask), not unbounded)

  def test_documents_are_narrow_and_long_windows_are_not(self):
    self.assertTrue(position_range.is_narrow(masks.causal() & masks.segments(np.zeros((1, 4), np.int32))))
    self.assertFalse(position_range.is_narrow(masks.window(position_range.NARROW + 1, 0)))


if __name__ == "__main__":
  absltest.main()
