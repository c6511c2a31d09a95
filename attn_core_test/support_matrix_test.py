# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The support matrix: `python3 -m attn_core` finds it by asking, and the page shows all of it."""

from unittest import mock

from absl.testing import absltest

from attn_core import __main__ as report
from attn_core import table
from attn_core.dispatch import capabilities
from attn_core_test import documents

PAGE = documents.ROOT / "docs" / "reference" / "support_matrix.md"


class SupportMatrixTest(absltest.TestCase):

  def test_every_mechanism_and_platform_is_listed(self):
    cells = {(row.mechanism, platform) for row in report.rows() for platform in row.platforms}
    self.assertEqual(cells, set(table.TABLE))
    absent = {(name, platform) for name, platforms, _ in report.missing() for platform in platforms}
    everything = {(name, platform) for name in table.names() for platform in report.PLATFORMS}
    self.assertEqual(everything - cells - absent, {("auto", p) for p in report.PLATFORMS})

  def test_marks_are_those_of_the_table(self):
    for row in report.rows():
      features = table.TABLE[row.mechanism, row.platforms[0]].general.features
      supported = {feature for feature, mark in row.marks.items() if mark != report.REFUSED}
      self.assertEqual(supported, set(features), row.mechanism)

  def test_limits_are_found_by_asking(self):
    def limits(request):
      if request.widths[0] > 512:
        return f"width {request.widths[0]}: too wide"
      if "lse" in request.features and request.dtype == "bfloat16":
        return "lse of dtype bfloat16: too narrow"
      return None
    implementation = capabilities.Implementation(
        print, frozenset({"lse", "bias"}), "linear", limits)
    with mock.patch.dict(table.TABLE, {("ring", "cpu"): implementation}):
      row, = (row for row in report.rows() if row.runs == "builtins.print")
      section = report.markdown().split("\n## ")[1]
    self.assertEqual(row.mechanism, "ring")
    self.assertEqual(row.limits, ("width 1024: too wide", "lse of dtype bfloat16: too narrow"))
    marks = {feature: row.marks[feature] for feature in ("lse", "bias", "gqa")}
    self.assertEqual(
        marks, {"lse": report.LIMITED, "bias": report.SUPPORTED, "gqa": report.REFUSED})
    for words in ("| `ring` | builtins.print | linear |", "* `ring`: width 1024: too wide."):
      self.assertIn(words, section)

  def test_text_shows_every_row(self):
    text = report.text()
    for name in table.names():
      self.assertIn(name, text)

  def test_page_has_a_table_for_every_place(self):
    _, *sections, _ = report.markdown().split("\n## ")
    features = list(capabilities.FEATURES)
    self.assertLen(sections, len(report.places()))
    for place, section in zip(report.places(), sections):
      platform = place.split()[0]
      rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
      head = [cell.strip(" |`") for cell in rows[0][1:]]
      there = [name for name in table.names() if {(name, place), (name, platform)} & {*table.TABLE}]
      self.assertEqual(head, there)
      for mechanism, *marks in zip(head, *(row[1:] for row in rows[2:2 + len(features)])):
        row = table.TABLE.get((mechanism, place)) or table.TABLE[mechanism, platform]
        supported = [mark.strip(" |") != report.MARKDOWN_MARKS[report.REFUSED] for mark in marks]
        self.assertEqual(supported, [feature in row.general.features for feature in features],
                         (place, mechanism))

  def test_page_is_current(self):
    self.assertEqual(PAGE.read_text(encoding="utf-8"), report.markdown() + "\n",
                     f"run `python3 -m attn_core --markdown > {PAGE.relative_to(documents.ROOT)}`")


if __name__ == "__main__":
  absltest.main()
