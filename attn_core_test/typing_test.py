# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A type checker accepts a right program and finds every mistake of a wrong one."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
FOLDER = pathlib.Path(os.path.abspath(__file__)).parent
PROGRAMS = FOLDER / "typed_programs"
MARK = re.compile(r"# error: ([a-z-]+)$")
ERROR = re.compile(r"^[^:]*\b(\w+)\.py:(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


class TypingTest(absltest.TestCase):

  def test_right_and_wrong_program(self):
    if importlib.util.find_spec("mypy") is None:
      self.skipTest("mypy is not installed; pip install '.[test]'")
    with tempfile.TemporaryDirectory() as cache:
      process = subprocess.run(
          [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent",
           f"--cache-dir={cache}", *map(str, sorted(PROGRAMS.glob("*.py")))],
          cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    found = {(program, int(line), code) for program, line, code in ERROR.findall(process.stdout)}
    expected = {
        (path.stem, number, mark[1]) for path in PROGRAMS.glob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (mark := MARK.search(line))}
    self.assertNotEmpty(expected)
    self.assertEqual(found, expected, process.stdout + process.stderr)


if __name__ == "__main__":
  absltest.main()
