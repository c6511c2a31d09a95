# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A type checker accepts a right program and finds every mistake of a wrong one."""

import collections
import dataclasses
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest

from attn_core_test import import_graph

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
FOLDER = pathlib.Path(os.path.abspath(__file__)).parent
PROGRAMS = FOLDER / "typed_programs"
MARK = re.compile(r"# error: ([a-z-]+)$")
ERROR = re.compile(r"^[^:]*\b(\w+)\.py:(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


def undeclared_fields(kind: type) -> set[str]:
  """Public fields and constants of a NamedTuple or dataclass that no class declares with a type."""
  declared = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
  values = {name for name, value in vars(kind).items() if not hasattr(value, "__get__")}
  return {name for name in values | set(getattr(kind, "_fields", ()))
          if not name.startswith("_")} - declared


class TypingTest(absltest.TestCase):

  def test_every_public_field_has_a_type(self):
    kinds = {
        kind for name in import_graph.library_modules()
        for kind in vars(importlib.import_module(name)).values()
        if isinstance(kind, type) and kind.__module__ == name and not kind.__name__.startswith("_")
        and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))}
    self.assertGreater(len(kinds), 50)
    self.assertEmpty({f"{kind.__module__}.{kind.__name__}": undeclared_fields(kind)
                      for kind in kinds if undeclared_fields(kind)})

  def test_undeclared_fields_are_found(self):
    Pair = collections.namedtuple("Pair", "left right")
    self.assertEqual(undeclared_fields(Pair), {"left", "right"})

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
