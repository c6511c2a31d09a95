# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The text that readers read: paragraphs of documents and notebooks, docstrings and comments."""

import ast
import io
import json
import os
import pathlib
import re
import tokenize
from typing import Iterator

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
LICENSE = ("# Copyright 2026 The attn_core Authors.\n"
           "# SPDX-License-Identifier: Apache-2.0\n")

# Names of other libraries' arguments and of code between backquotes keep their spelling.
CODE = re.compile(r"`[^`]*`")

Lines = Iterator[tuple[int, str]]


def documents() -> list[pathlib.Path]:
  """Returns every document of the project, the pages and notebooks of docs/ included."""
  found = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
  return found + sorted(path for path in (ROOT / "docs").rglob("*")
                        if path.suffix in (".md", ".ipynb")
                        and not {"_build", ".ipynb_checkpoints"} & {*path.parts})


def docstrings(text: str) -> Lines:
  """Yields (line, docstring) of a module and of every class and function in it."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
      if docstring := ast.get_docstring(node):
        yield node.body[0].lineno, docstring


def comments(text: str) -> Lines:
  """Yields (line, text) of every comment but the license; consecutive lines are one comment."""
  begun, last, words = 0, -1, ""
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type != tokenize.COMMENT or token.string in LICENSE:
      continue
    own_line = not token.line[:token.start[1]].strip()
    if own_line and token.start[0] == last + 1:
      words += " " + token.string.lstrip("# ")
    else:
      if words:
        yield begun, words
      begun, words = token.start[0], token.string.lstrip("# ")
    last = token.start[0] if own_line else -1
  if words:
    yield begun, words


def messages(text: str) -> Lines:
  """Yields (line, string) of every string with a space, such as the parts of error messages."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
      yield node.lineno, node.value


def paragraphs(text: str) -> Lines:
  """Yields (line, text) of the paragraphs, lists and tables of a Markdown text, without code."""
  plain = re.sub(r"^(```+).*?^\1$", lambda match: "\n" * match[0].count("\n"), text,
                 flags=re.MULTILINE | re.DOTALL)
  for match in re.finditer(r"(?:^.*\S.*\n?)+", plain, flags=re.MULTILINE):
    yield plain.count("\n", 0, match.start()) + 1, match[0]


def markdown_of(path: pathlib.Path) -> str:
  """Returns the Markdown of a document; of a notebook, its cells of text."""
  text = path.read_text(encoding="utf-8")
  if path.suffix != ".ipynb":
    return text
  return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"]
                     if cell["cell_type"] == "markdown")
