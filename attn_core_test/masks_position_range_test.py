# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Static bounds on key position minus query position hold every visible pair."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from attn_core import masks
from attn_core.masks import position_range
from attn_core_test.masks_cases import dense


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

  def test_documents_are_narrow_and_long_windows_are_not(self):
    documents = masks.causal() & masks.segments(np.zeros((1, 4), np.int32))
    self.assertTrue(position_range.is_narrow(documents))
    self.assertFalse(position_range.is_narrow(masks.window(position_range.NARROW + 1, 0)))


if __name__ == "__main__":
  absltest.main()
