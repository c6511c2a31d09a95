# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Static bounds on key position minus query position hold every visible pair."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from attn_core import masks
from attn_core.masks import position_range
from attn_core.masks.mask import Coordinates
from attn_core_test.masks_cases import Draw, build, dense, draw_sizes, seen_by_all


class PositionRangeTest(parameterized.TestCase):

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

  def test_static_superset(self):
    """Without arrays, it shows every pair that the mask shows; a mask without arrays is its own."""
    generator, changed = np.random.default_rng(3), 0
    for _ in range(400):
      shape, _ = draw_sizes(generator)
      recipe = Draw(generator, generator, shape).recipe(3, True)
      mask = build(recipe)
      found = position_range.static_superset(mask)
      self.assertEmpty(jax.tree.leaves(found))
      if not jax.tree.leaves(mask):
        self.assertEqual(found, mask)
      b, h, t, s = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, shape))])
      shown = np.broadcast_to(found.visible(Coordinates(b, h, t, s, t, s)), shape)
      self.assertFalse((seen_by_all(recipe, shape) & ~shown).any(), recipe)
      changed += not shown.all()
    self.assertGreater(changed, 100)

  def test_documents_are_narrow_and_long_windows_are_not(self):
    documents = masks.causal() & masks.segments(np.zeros((1, 4), np.int32))
    self.assertTrue(position_range.is_narrow(documents))
    self.assertFalse(position_range.is_narrow(masks.window(position_range.NARROW + 1, 0)))


if __name__ == "__main__":
  absltest.main()
