# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaskInfo: masks from segment ids, padding masks and packed sequences."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from attn_core import masks
from attn_core.masks.info import MaskInfo
from attn_core_test.masks_cases import dense, rows


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
      ("text", "x", "attention_mask: got str; expected"),
      ("texts", [["x"]], r"attention_mask: got <U1\[1, 1\]; expected bool"),
      ("ragged", ([1], [2, 3]), r"attention_mask: got \(\[1\], \[2, 3\]\); expected bool"),
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

  def test_python_and_between_masks_raises(self):
    """`causal() and window(1, None)` would be window(1, None), which is not causal."""
    for wrong in (lambda: masks.causal() and masks.window(1, None),
                  lambda: masks.causal() or masks.window(1, 0), lambda: not masks.causal()):
      with self.assertRaisesRegex(ValueError, "no truth value.*`&`"):
        wrong()

  def test_arguments_that_are_not_masks(self):
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

  def test_an_empty_mask_info_is_the_base(self):
    self.assertEqual(MaskInfo().to_mask(), masks.full())
    self.assertEqual(MaskInfo().to_mask(masks.causal()), masks.causal())


if __name__ == "__main__":
  absltest.main()
