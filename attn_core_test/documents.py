# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs in the documents: README.md and the pages of docs/.

The blocks of Python of a page run one after another in one namespace, as a reader types them. A
block of text right after one must be what it prints. A word after `python` in the first line of a
block names a package that it needs, as in ```` ```python flax ````.
"""

import contextlib
import io
import os
import pathlib
import re
from typing import NamedTuple

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
FENCE = re.compile(r"^```python ?(\w*)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?",
                   re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
  """A program in a document."""

  line: int  # lines of the document before the program
  needs: str  # a package that has to be importable; "": none
  source: str
  printed: str | None  # what the document shows below it


def pages() -> list[pathlib.Path]:
  """Returns README.md and every page of docs/ that is written by hand."""
  built = ROOT / "docs" / "_build"
  found = (path for path in (ROOT / "docs").rglob("*.md") if built not in path.parents)
  return [ROOT / "README.md", *sorted(found)]


def blocks_of(text: str) -> list[Block]:
  """Returns the programs in a document."""
  return [Block(text.count("\n", 0, match.start(2)), match[1], match[2], match[3])
          for match in FENCE.finditer(text)]


def run(block: Block, name: str, names: dict) -> str:
  """Runs a program of the document `name` in the namespace `names`; returns what it prints."""
  code = compile("\n" * block.line + block.source, name, "exec")
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(code, names)  # pylint: disable=exec-used
  return printed.getvalue()
