# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks as values: `&`, `|`, `~`, equality, pytrees, and when equal masks retrace."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import attention, masks
from attn_core.masks import block_map as block_map_lib, mask as mask_lib, materialize
from attn_core_test.masks_cases import dense, even_sum, from_table, rows


class AlgebraTest(parameterized.TestCase):

  def test_laws(self):
    shape = (2, 2, 6, 7)
    generator = np.random.default_rng(0)
    pool = [
        masks.full(), masks.causal(), masks.window(2, 1), masks.chunk(3), masks.prefix(2),
        masks.segments(generator.integers(-1, 2, (2, 6)), generator.integers(-1, 2, (2, 7))),
        masks.lengths(np.array([5, 3]), np.array([7, 2])), masks.custom(even_sum),
        masks.dense(generator.random((2, 2, 6, 7)) < 0.5), masks.offset(masks.causal(), 2),
        masks.selected_blocks(generator.integers(-1, 3, (2, 2, 2, 2)), 4, 3),
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

  # Makers of masks: each call returns a new mask, equal to that of every other call.
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
      ("custom", lambda: masks.custom(from_table, np.array([1]))),
      ("selected_blocks", lambda: masks.selected_blocks(np.array([[[[0, -1]]]]), 2, 3)),
      ("selected_blocks_of_others", lambda: masks.selected_blocks(np.array([[[[0, -1]]]]), 3, 2)),
      ("selected_keys", lambda: masks.selected_keys(np.array([[[0, -1]]]))),
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
        ~~masks.causal(), masks.offset(masks.causal(), 3), masks.custom(even_sum),
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
        & masks.custom(from_table, np.array([7]))) & masks.prefix(np.array([8]))
    self.assertEqual([int(x.flat[0]) for x in jax.tree.leaves(mask)], [3, 4, 5, 1, 7, 1, 2, 8])
    self.assertEqual(mask_lib.leaf_roles(mask), (
        "query", "key", "batch", "dense", "whole", "query", "key", "batch"))

  def test_vmap_over_the_arrays(self):
    found = jax.vmap(lambda x: materialize.to_dense(masks.lengths(None, x), (1, 1, 1, 4)))(
        jnp.array([[1], [3]]))
    np.testing.assert_array_equal(found[:, 0, 0, 0], rows("1000 1110"))


class RetraceTest(parameterized.TestCase):
  """A mask equal to an earlier one never retraces; a different structure does."""

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
    f(make([0, 1, 2]), 2.0)  # the same structure with other numbers
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
  def test_masks_of_equal_numbers_differ(self, mechanism):
    """Structures that differ only in the kind of one node do not share compiled code."""
    q = np.random.default_rng(0).normal(size=(1, 8, 1, 4)).astype(np.float32)
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


if __name__ == "__main__":
  absltest.main()
