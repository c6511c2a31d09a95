# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation: current, inside their frames, without overlapping texts."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized

from attn_core_test import documents
from docs.pictures import __main__ as pictures
from docs.pictures import canvas

FOLDER = documents.ROOT / "docs" / "pictures"


def overlaps(one: canvas.Box, other: canvas.Box) -> bool:
  return (one.left < other.right and other.left < one.right
          and one.top < other.bottom and other.top < one.bottom)


class PicturesTest(parameterized.TestCase):

  @parameterized.parameters(*pictures.DRAWINGS)
  def test_picture(self, name):
    drawn = pictures.DRAWINGS[name]()
    self.assertEqual(drawn.svg(), (FOLDER / f"{name}.svg").read_text(encoding="utf-8"),
                     "write it again with `python3 -m docs.pictures`")
    for box in drawn.texts:
      self.assertTrue(0 <= box.left and box.right <= canvas.WIDTH and 0 <= box.top
                      and box.bottom <= drawn.height, f"outside the picture: {box}")
    self.assertEmpty([pair for pair in itertools.combinations(drawn.texts, 2) if overlaps(*pair)])

  def test_every_color_has_a_fill_for_dark_pages(self):
    for name, (light, dark) in canvas.FILLS.items():
      self.assertNotEqual(light, dark, name)

  def test_overlapping_texts_are_found(self):
    page = canvas.Canvas(100, "title")
    page.text(10, 20, "one line")
    page.text(30, 26, "another")
    self.assertTrue(overlaps(*page.texts))


if __name__ == "__main__":
  absltest.main()
