# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every mask constructor against rows written by hand; constructors refuse bad arguments."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import attention, masks
from attn_core.masks import leaves, materialize
from attn_core.masks.mask import Coordinates
from attn_core.types import MaskOperands
from attn_core_test.masks_cases import dense, even_sum, from_table, rows

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
    ("custom", masks.custom(even_sum), "1010 0101 1010"),
    ("custom_operand", masks.custom(from_table, np.array([2])), "0011 0011 0011"),
    ("selected_blocks", masks.selected_blocks(np.array([[[[1, -1], [-1, 0]]]]), 2, 3),
     "0001 0001 1110"),
    ("selected_keys", masks.selected_keys(np.array([[[3, 1], [-1, -1], [2, 2]]])),
     "0101 0000 0010"),
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

  def test_chunks_of_every_size_on_devices(self):
    """Positions of jax arrays are divided by floats; the result is that of integers."""
    ends = np.array([-2**31, -2**31 + 1, 2**31 - 2, 2**31 - 1])
    few, points = (1, 2, 3, 5, 64, 100, 127, 200), {}
    for size in range(1, 201):
      chunks = np.array([-100, -1, 0, 1, 7, 100, 2**24 // size, ends[-1] // size, ends[0] // size])
      edges = (chunks[:, None] * size + [-1, 0, 1]).ravel()
      points[size] = np.clip(np.append(edges, ends), ends[0], ends[-1]).astype(np.int32)
    see = lambda size, x: leaves.Chunk(size).visible(Coordinates(0, 0, 0, 0, x[:, None], x))
    compiled = jax.jit(lambda points: [see(n, x) for n, x in zip(few, points)])
    found = dict(zip(few, compiled([points[size] for size in few])))
    for size, x in points.items():
      chunk = x.astype(np.int64) // size
      seen = chunk[:, None] == chunk
      np.testing.assert_array_equal(see(size, jnp.asarray(x)), seen, f"{size}")
      if size in few:
        np.testing.assert_array_equal(found[size], seen, f"{size} in jit")

  def test_segments_compare_once(self):
    """Compares equal ids, negative ones and others, by one operation for each pair of tokens."""
    ids = np.array([-2**31, -2**31 + 1, -3, -2, -1, 0, 1, 2, 2**31 - 1], np.int32)
    see = lambda query, key: leaves.Segments(query, key).visible(Coordinates(0, 0, 0, 0, 0, 0))
    seen = (ids[:, None] == ids) & (ids >= 0)
    np.testing.assert_array_equal(see(ids[:, None], ids), seen)
    np.testing.assert_array_equal(see(jnp.asarray(ids)[:, None], ids), seen)
    np.testing.assert_array_equal(see(ids[:, None], jnp.asarray(ids)), seen)
    steps = jax.make_jaxpr(see)(ids[:, None], ids).eqns
    self.assertLen([x for x in steps if x.outvars[0].aval.shape == seen.shape], 1)

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
        (masks.custom(even_sum), "101 010", "010 101")):
      with self.subTest(str(mask)):
        np.testing.assert_array_equal(dense(mask, shape)[:, 0], [rows(first), rows(second)])

  def test_heads_differ(self):
    shape = (1, 2, 2, 3)
    for mask, first, second in (
        (masks.custom(even_sum), "101 010", "010 101"),
        (masks.custom(from_table, np.array([1, 2])), "011 011", "001 001"),
        (masks.dense(np.stack([rows("100 011"), rows("111 000")])[None]), "100 011", "111 000")):
      with self.subTest(str(mask)):
        np.testing.assert_array_equal(dense(mask, shape)[0], [rows(first), rows(second)])

  def test_a_scalar_array_applies_to_all_rows(self):
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
       "segments: query_ids: got numbers from 0 to 2147483648; expected int32"),
      ("positions_too_large", lambda: masks.positions(None, np.array([[-2**40, 0]])),
       "positions: key: got numbers from -1099511627776 to 0; expected int32"),
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
  def test_a_custom_predicate_that_captures_a_traced_array(self, by):
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
    """A shard evaluates predicates at the global indices of its rows and heads."""
    mask = masks.custom(lambda b, h, q, k: (b == 5) & (h == 3))
    _, structure = jax.tree.flatten(mask)
    here = MaskOperands((), jnp.array([4, 5], jnp.int32), jnp.array([2], jnp.int32))
    found = np.asarray(materialize.visible(structure, here, (2, 2, 1, 1)))
    np.testing.assert_array_equal(found[..., 0, 0], [[False, False], [False, True]])


if __name__ == "__main__":
  absltest.main()
