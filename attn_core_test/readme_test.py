# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""README.md: its table is generated from the library, and every block of Python in it runs."""

import contextlib
import io
import os
import pathlib
import re
from unittest import mock

from absl.testing import absltest
import jax

from attn_core import __main__ as report
from attn_core import table
from attn_core.dispatch import capabilities

jax.config.update("jax_num_cpu_devices", 8)  # so that its examples of meshes run on several devices

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
README = pathlib.Path(os.path.abspath(__file__)).parent.parent / "README.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# A block of Python, and the block of text right after it, which must be its output.
FENCE = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


class TableTest(absltest.TestCase):

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
    self.assertEqual(row.mechanism, "ring")
    self.assertEqual(row.limits, ("width 1024: too wide", "lse of dtype bfloat16: too narrow"))
    marks = {feature: row.marks[feature] for feature in ("lse", "bias", "gqa")}
    self.assertEqual(
        marks, {"lse": report.LIMITED, "bias": report.SUPPORTED, "gqa": report.REFUSED})

  def test_text_and_markdown_show_every_row(self):
    for rendered in (report.text(), report.markdown()):
      for name in table.names():
        self.assertIn(name, rendered)
    lines = [line for line in report.markdown().splitlines() if line.startswith("|")]
    self.assertLen(lines, 2 + len(report.rows()))
    self.assertEqual({line.count("|") for line in lines}, {5 + len(capabilities.FEATURES)})


class ReadmeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if not README.exists():
      self.fail(f"there is no {README}; write it, and under Bazel name it in the test's data")
    self.text = README.read_text(encoding="utf-8")

  def test_table_is_the_generated_one(self):
    self.assertEqual((self.text.count(BEGIN), self.text.count(END)), (1, 1),
                     f"README.md must hold one line {BEGIN} and, after the table, one line {END}")
    shown = self.text.partition(BEGIN)[2].partition(END)[0].strip()
    self.assertEqual(shown, report.markdown(), f"put what `python3 -m attn_core --markdown` prints "
                     f"between {BEGIN} and {END} of README.md")

  def test_python_blocks_run(self):
    blocks = list(FENCE.finditer(self.text))
    self.assertNotEmpty(blocks, "README.md has no ```python block")
    for block in blocks:
      line = self.text.count("\n", 0, block.start(1))  # number of lines before the block
      with self.subTest(f"README.md line {line + 1}"):
        code = compile("\n" * line + block[1], "README.md", "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
          exec(code, {"__name__": "readme"})  # pylint: disable=exec-used
        if block[2] is not None:
          self.assertEqual(printed.getvalue(), block[2])


if __name__ == "__main__":
  absltest.main()
