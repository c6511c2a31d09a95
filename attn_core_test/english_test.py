# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The words of docstrings, comments and documents: plain American English, fixed shape letters.

A docstring begins with a verb or a noun phrase, never with one of BAD_STARTS; arrays are not
people; the shape of an array is written with the letters of LETTERS, and every other dimension is a
word.
"""

import ast
import io
import os
import pathlib
import re
import tokenize
from typing import Iterator
from unittest import mock

from absl.testing import absltest

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
LICENSE = ("# Copyright 2026 The attn_core Authors.\n"
           "# SPDX-License-Identifier: Apache-2.0\n")
MAX_COLUMNS = 100

LETTERS = set("BTSHKGDE")
PAGED_LETTERS = LETTERS | set("PR")

BANNED = re.compile(
    r"\b(nobody|somebody|everybody|anybody|anew|meanwhile|seldom|owed|owes|spoilt|beside|whoever"
    r"|(?:un|de|re)?(?:normal|quant|optim|initial|serial|special|final|factor|general|parallel"
    r"|recogn|minim|maxim|organ|penal|util|synchron|vector|local)is(?:e|ed|es|er|ers|ing|ation"
    r"|ations)"
    r"|(?:hono|colo|behavio|neighbo|favo|flavo)ur\w*)\b", re.IGNORECASE)
# Names of other libraries' arguments and of code between backquotes keep their spelling.
CODE = re.compile(r"`[^`]*`")
BAD_STARTS = ("What ", "Who ", "How ", "Why ", "Which ", "Of ", "Those ", "That ", "Everything ",
              "Whether it does not")
SHAPE = re.compile(r"\[([A-Za-z0-9_ ,.*+/()|-]+)\]")
LETTER = re.compile(r"\b[A-Z]\b")


def files() -> list[pathlib.Path]:
  """Returns every file to check."""
  found = [path for folder in ("attn_core", "attn_core_test", "examples")
           for path in (ROOT / folder).rglob("*.py")]
  found += [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
  found += (ROOT / "attn_core_test" / "results").glob("*_notes.md")
  return sorted(found + [path for path in (ROOT / "docs").rglob("*")
                         if path.suffix in (".md", ".py") and "_build" not in path.parts])


def docstrings(text: str) -> Iterator[tuple[int, str]]:
  """Yields (line, docstring) of a module and of every class and function in it."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
      if docstring := ast.get_docstring(node):
        yield node.body[0].lineno, docstring


def comments(text: str) -> Iterator[tuple[int, str]]:
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


def messages(text: str) -> Iterator[tuple[int, str]]:
  """Yields (line, string) of every string with a space, such as the parts of error messages."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
      yield node.lineno, node.value


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
  """Yields (line, text) of the paragraphs, lists and tables of a Markdown text, without code."""
  plain = re.sub(r"^```.*?^```$", lambda match: "\n" * match[0].count("\n"), text,
                 flags=re.MULTILINE | re.DOTALL)
  for match in re.finditer(r"(?:^.*\S.*\n?)+", plain, flags=re.MULTILINE):
    yield plain.count("\n", 0, match.start()) + 1, match[0]


def prose_of(path: pathlib.Path, text: str) -> list[tuple[int, str]]:
  """Returns (line, text) of everything in a file that is written for readers."""
  if path.suffix != ".py":
    return list(paragraphs(text))
  in_tests = path.relative_to(ROOT).parts[0] == "attn_core_test"
  return [*docstrings(text), *comments(text), *([] if in_tests else messages(text))]


def foreign_letters(words: str, allowed: set[str]) -> list[str]:
  """Returns the shapes in brackets that have a letter outside `allowed`."""
  return [match[0] for match in SHAPE.finditer(words) if set(LETTER.findall(match[1])) - allowed]


def errors_of(path: pathlib.Path) -> list[str]:
  """Returns the rules that a file breaks, one line each."""
  text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
  found = []
  if path.suffix == ".py":
    if text and not text.startswith(LICENSE):  # Bazel adds empty __init__.py files
      found.append(f"{name}:1: the two lines of the license are missing")
    found += [f"{name}:{number}: {len(line)} columns; at most {MAX_COLUMNS}"
              for number, line in enumerate(text.splitlines(), 1) if len(line) > MAX_COLUMNS]
    found += [f"{name}:{line}: a docstring begins with {words[:20]!r}"
              for line, words in docstrings(text) if words.startswith(BAD_STARTS)]
  for line, words in prose_of(path, text):
    plain = CODE.sub("``", words)
    if " is no " in " ".join(plain.split()):
      found.append(f"{name}:{line}: ' is no '")
    found += [f"{name}:{line}: the word {match[0]!r}" for match in BANNED.finditer(plain)]
    if path.suffix == ".py":
      allowed = PAGED_LETTERS if "page" in name else LETTERS
      found += [f"{name}:{line}: letters of {shape}" for shape in foreign_letters(words, allowed)]
  return found


class EnglishTest(absltest.TestCase):

  def test_files_are_clean(self):
    found = [error for path in files() for error in errors_of(path)]
    if found:
      self.fail("\n" + "\n".join(found))

  def test_rules_find_what_they_are_for(self):
    bad = ('"""What a file holds."""\n\n# There is no use for [N, D], seldom\n# normalised.\n'
           "x = 'a quantised cache'  # [B, T, num_pages] and `honoured`\n")
    path = pathlib.Path(self.create_tempfile("bad.py", bad).full_path)
    with mock.patch.dict(globals(), ROOT=path.parent):
      found = " ".join(errors_of(path))
    for words in ("license", "begins with 'What", "' is no '", "[N, D]", "'seldom'",
                  "'normalised'", "'quantised'"):
      self.assertIn(words, found)
    self.assertNotIn("num_pages", found)
    self.assertNotIn("honoured", found)

  def test_rules_find_words_across_the_lines_of_a_document(self):
    path = pathlib.Path(self.create_tempfile("bad.md", "# Title\n\nHere is\nno use.\n").full_path)
    with mock.patch.dict(globals(), ROOT=path.parent):
      self.assertEqual(errors_of(path), ["bad.md:3: ' is no '"])


if __name__ == "__main__":
  absltest.main()
