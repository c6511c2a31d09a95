# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of masks: small ones against drawings by hand, all of them against the dense mask."""

import io
import itertools
import operator
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import masks
from attn_core.masks import block_map, materialize, render
from attn_core.masks.render import describe, picture, show

CAUSAL_5_BY_6 = """\
causal()
5 queries x 6 keys in blocks of 2 x 3
   0   3  keys
  +---+---+
0 |#..|   |
  |##.|   |
  +---+---+
2 |###|...|
  |###|#..|
  +---+---+
4 |###|##.|
  +---+---+
# visible, . hidden, space: in an empty block, skipped
6 blocks: 1 empty, 3 partial, 2 full; visited 83.3% of the blocks, visible 50.0% of the elements"""


def even(batch, head, query, key):
  return (batch + head + query + key) % 2 == 0


def rows_of_ids(*lengths):
  return np.repeat([range(len(lengths))], lengths, 1).astype(np.int32)


# Name -> (mask, queries, keys, block_q, block_kv, batch rows, heads).
CASES = {
    "causal": (masks.causal(), 16, 16, 4, 4, 1, 1),
    "window": (masks.causal() & masks.window(3, None), 17, 23, 5, 6, 1, 1),
    "negation": (~masks.window(2, 2) | masks.prefix(4), 12, 30, 4, 10, 1, 1),
    "segments": (masks.segments(np.concatenate([rows_of_ids(9, 7), rows_of_ids(3, 13)])),
                 16, 16, 4, 8, 2, 1),
    "lengths": (masks.lengths(np.array([3, 9]), jnp.array([8, 2])), 9, 8, 3, 4, 2, 1),
    "positions": (masks.positions(np.arange(8)[None] * 2, None), 8, 16, 3, 5, 1, 1),
    "offset": (masks.offset(masks.causal(), np.array([0, 5])), 4, 11, 2, 4, 2, 1),
    "dense": (masks.dense(np.random.default_rng(0).random((2, 3, 7, 9)) < 0.5), 7, 9, 2, 3, 2, 3),
    "dense_keys": (masks.dense(np.arange(9).reshape(1, 1, 1, 9) < 4), 7, 9, 2, 3, 1, 1),
    "custom": (masks.custom(even), 10, 10, 3, 3, 2, 2),
    "one_by_one": (masks.chunk(3), 7, 7, 1, 1, 1, 1),
    "long_blocks": (masks.full(), 4, 6, 100, 100, 1, 1),
}


def elements(text):
  """Returns the characters between the borders, one string per row of cells."""
  lines = [line.partition("|")[2] for line in text.splitlines() if line.endswith("|")]
  return [line.replace("|", "") for line in lines]


class RenderTest(parameterized.TestCase):

  @parameterized.product(length=(1, 7, 64, 5000, 10**5), block=(1, 16, 128), most=(1, 8, 64))
  def test_sampled_elements_are_those_of_their_cells(self, length, block, most):
    """Also the first and the last one, where a cell has several."""
    edges, _ = render._edges(length, block, most)
    points, starts = render._points(edges)
    self.assertEqual((edges[0], edges[-1]), (0, length))
    self.assertLess(len(edges), most + 2)
    for cell, first, end in zip(np.split(points, starts[1:]), edges[:-1], edges[1:], strict=True):
      self.assertTrue((np.diff(cell) > 0).all() and first <= cell[0] and cell[-1] < end)
      if len(cell) > 1:
        self.assertEqual((cell[0], cell[-1]), (first, end - 1))

  def test_by_hand(self):
    self.assertEqual(show(masks.causal(), 5, 6, block_q=2, block_kv=3), CAUSAL_5_BY_6)

  @parameterized.named_parameters((name, *case) for name, case in CASES.items())
  def test_agrees_with_the_dense_mask(self, mask, queries, keys, block_q, block_kv, rows, heads):
    seen = np.asarray(materialize.to_dense(mask, (rows, heads, queries, keys)))
    kinds = np.asarray(block_map.block_kinds(
        mask, block_map.Sizes(queries, keys, min(block_q, queries), min(block_kv, keys))))
    kinds = np.broadcast_to(kinds, (rows, heads, *kinds.shape[2:]))
    for row, head in itertools.product(range(rows), range(heads)):
      text = show(mask, queries, keys, block_q=block_q, block_kv=block_kv, row=row, head=head)
      drawn = np.array([list(line) for line in elements(text)])
      np.testing.assert_array_equal(drawn == "#", seen[row, head], text)
      empty = (kinds[row, head] == block_map.EMPTY).repeat(block_q, 0).repeat(block_kv, 1)
      np.testing.assert_array_equal(drawn == " ", empty[:queries, :keys], text)
      counts = [(kinds[row, head] == kind).sum() for kind in (0, 1, 2)]
      self.assertIn("{} empty, {} partial, {} full".format(*counts), text)
      self.assertIn(f"visible {seen[row, head].mean():.1%} of the elements", text)

  def test_keys_default_to_queries(self):
    self.assertEqual(show(masks.causal(), 8, block_q=4), show(masks.causal(), 8, 8, block_q=4))

  def test_cells_of_several_elements(self):
    text = show(masks.causal(), 256, block_q=64, block_kv=64)
    lines = elements(text)
    self.assertLen(lines, 64)
    self.assertEqual({len(line) for line in lines}, {96})
    self.assertEqual(lines[-1][:72], "#" * 72)  # the full blocks of the last rows
    self.assertEqual(lines[0].rstrip(), "++" + "." * 22)  # 4 queries; cells of 2 and of 3 keys
    self.assertIn("visible 50.2% of the elements", text)  # every element was counted

  def test_cells_of_several_blocks(self):
    text = show(masks.window(0, 0), 1 << 20, block_q=1024, block_kv=1024)
    lines = elements(text)
    self.assertLen(lines, 64)
    self.assertLessEqual(max(map(len, text.splitlines())), 120)
    for i, line in enumerate(lines):  # a diagonal too thin for sampling, found by the block map
      self.assertEqual(line[i * len(line) // 64], "+", text)
    self.assertIn("1048576 blocks: 1047552 empty, 1024 partial, 0 full", text)
    self.assertIn("\n1 block: 0 empty, 1 partial, 0 full", show(masks.causal(), 8))
    self.assertIn("visible about", text)

  def test_describes_masks(self):
    mask = ~(masks.causal() & masks.window(3, None)) | masks.segments(np.zeros((1, 4), int))
    self.assertEqual(describe(mask), "~(causal() & window(left=3, right=None)) | segments("
                     "query_ids int32[1, 4], key_ids int32[1, 4])")
    mask = masks.offset(masks.custom(even), 3)
    self.assertEqual(describe(mask), "offset(custom(even), amount=3)")

  def test_a_description_reads_as_the_mask_in_python(self):
    """Parentheses are where the order of Python's operators needs them."""
    leaf = {"causal": masks.causal(), "chunk": masks.chunk(3), "prefix": masks.prefix(2)}
    names = {name: lambda mask=mask, **fields: mask for name, mask in leaf.items()}
    grown = [~x for x in leaf.values()] + [
        sign(x, y) for sign in (operator.and_, operator.or_)
        for x, y in itertools.product(leaf.values(), repeat=2)]
    dense = lambda mask: np.asarray(materialize.to_dense(mask, (1, 1, 7, 7)))
    for x, y in itertools.product(grown, list(leaf.values())[1:]):
      for mask in (x & y, x | y, ~x & y, ~(x | y), y & x, y | x, ~x | x & y):
        read = eval(describe(mask), names)  # pylint: disable=eval-used
        np.testing.assert_array_equal(dense(read), dense(mask), describe(mask))

  @parameterized.parameters(
      (dict(queries=0), "queries"),
      (dict(queries=2.0), "queries"),
      (dict(block_q=0), "block_q"),
      (dict(block_kv="4"), "block_kv"),
      (dict(queries=5), "queries: got 5; expected 4"),
      (dict(keys=5), "keys: got 5; expected 4"),
      (dict(row=2), "row: got 2"),
      (dict(row=-1), "row: got -1"),
      (dict(mask=np.ones((4, 4), bool)), "mask: got ndarray"),
  )
  def test_refuses(self, change, message):
    arguments = dict(mask=masks.segments(np.zeros((2, 4), int)), queries=4) | change
    with self.assertRaisesRegex(ValueError, message):
      show(**arguments)

  def test_refuses_a_traced_mask(self):
    with self.assertRaises(jax.errors.TracerArrayConversionError):
      jax.jit(lambda ids: show(masks.segments(ids), 4) and ids)(jnp.zeros((1, 4), int))


class PictureTest(absltest.TestCase):

  def test_colors(self):
    from matplotlib import image
    file = io.BytesIO()
    picture(masks.causal(), file, 32, block_q=8, block_kv=8)
    file.seek(0)
    pixels = np.round(image.imread(file, "png")[..., :3] * 255).astype(int)
    of_full, of_visible, of_hidden = ((pixels == colour).all(-1) for colour in (
        (0x00, 0x72, 0xb2), (0xd5, 0x5e, 0x00), (0xfd, 0xeb, 0xc8)))
    full, visible, hidden = of_full.sum(), of_visible.sum(), of_hidden.sum()
    # 6 full blocks of 64 elements, 4 partial ones with 36 visible and 28 hidden each
    self.assertAlmostEqual(visible / full, 4 * 36 / (6 * 64), delta=0.03)
    self.assertAlmostEqual(hidden / full, 4 * 28 / (6 * 64), delta=0.03)
    # The first query is at the top, the first key on the left: full blocks are at the lower left.
    (row, column), diagonal = (np.argwhere(x).mean(0) for x in (of_full, of_visible))
    self.assertGreater(row, diagonal[0] + 10)
    self.assertLess(column, diagonal[1] - 10)

  def test_writes_files_and_leaves_pyplot_alone(self):
    path = pathlib.Path(self.create_tempdir()) / "mask.png"
    code = ("import sys\nfrom attn_core import masks\nfrom attn_core.masks.render import picture\n"
            "picture(masks.causal() & masks.window(4095, 0), sys.argv[1], 1 << 17)\n"
            "assert 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-c", code, path], check=True,
                   cwd=pathlib.Path(__file__).absolute().parent.parent)
    self.assertEqual(path.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

  def test_without_matplotlib(self):
    with absltest.mock.patch.dict(sys.modules, {"matplotlib": None}):
      with self.assertRaisesRegex(ImportError, r"attn_core\[plot\]"):
        picture(masks.causal(), io.BytesIO(), 4)


if __name__ == "__main__":
  absltest.main()
