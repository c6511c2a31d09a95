# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The words of docstrings, comments and documents: plain American English, fixed shape letters.

A docstring begins with a verb or a noun phrase, never with one of BAD_STARTS; arrays are not
people; the shape of an array is written with the letters of LETTERS, and every other dimension is a
word.
"""

import pathlib
import re
from unittest import mock

from absl.testing import absltest

from attn_core_test import prose

MAX_COLUMNS = 100

LETTERS = set("BTSHKGDE")
PAGED_LETTERS = LETTERS | set("PR")

BANNED = re.compile(
    r"\b(nobody|somebody|everybody|anybody|anew|meanwhile|seldom|owed|owes|spoilt|beside|whoever"
    r"|(?:un|de|re)?(?:normal|quant|optim|initial|serial|special|final|factor|general|parallel"
    r"|recogn|minim|maxim|organ|penal|util|synchron|vector|local)is(?:e|ed|es|er|ers|ing|ation"
    r"|ations)"
    r"|(?:hono|colo|behavio|neighbo|favo|flavo)ur\w*)\b", re.IGNORECASE)
BAD_STARTS = ("What ", "Who ", "How ", "Why ", "Which ", "Of ", "Those ", "That ", "Everything ",
              "Whether it does not")
SHAPE = re.compile(r"\[([A-Za-z0-9_ ,.*+/()|-]+)\]")
LETTER = re.compile(r"\b[A-Z]\b")


def files() -> list[pathlib.Path]:
  """Returns every file to check."""
  found = [path for folder in ("attn_core", "attn_core_test", "examples", "docs")
           for path in (prose.ROOT / folder).rglob("*.py") if "_build" not in path.parts]
  found += (prose.ROOT / "attn_core_test" / "results").glob("*_notes.md")
  return sorted(found + prose.documents())


def prose_of(path: pathlib.Path, text: str) -> list[tuple[int, str]]:
  """Returns (line, text) of everything in a file that is written for readers."""
  if path.suffix != ".py":
    return list(prose.paragraphs(prose.markdown_of(path)))
  in_tests = path.relative_to(prose.ROOT).parts[0] == "attn_core_test"
  return [*prose.docstrings(text), *prose.comments(text),
          *([] if in_tests else prose.messages(text))]


def foreign_letters(words: str, allowed: set[str]) -> list[str]:
  """Returns the shapes in brackets that have a letter outside `allowed`."""
  return [match[0] for match in SHAPE.finditer(words) if set(LETTER.findall(match[1])) - allowed]


def errors_of(path: pathlib.Path) -> list[str]:
  """Returns the rules that a file breaks, one line each."""
  text, name = path.read_text(encoding="utf-8"), path.relative_to(prose.ROOT).as_posix()
  found = []
  if path.suffix == ".py":
    if text and not text.startswith(prose.LICENSE):  # Bazel adds empty __init__.py files
      found.append(f"{name}:1: the two lines of the license are missing")
    found += [f"{name}:{number}: {len(line)} columns; at most {MAX_COLUMNS}"
              for number, line in enumerate(text.splitlines(), 1) if len(line) > MAX_COLUMNS]
    found += [f"{name}:{line}: a docstring begins with {words[:20]!r}"
              for line, words in prose.docstrings(text) if words.startswith(BAD_STARTS)]
  for line, words in prose_of(path, text):
    plain = prose.CODE.sub("``", words)
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
    with mock.patch.object(prose, "ROOT", path.parent):
      found = " ".join(errors_of(path))
    for words in ("license", "begins with 'What", "' is no '", "[N, D]", "'seldom'",
                  "'normalised'", "'quantised'"):
      self.assertIn(words, found)
    self.assertNotIn("num_pages", found)
    self.assertNotIn("honoured", found)

  def test_rules_find_words_across_the_lines_of_a_document(self):
    path = pathlib.Path(self.create_tempfile("bad.md", "# Title\n\nHere is\nno use.\n").full_path)
    with mock.patch.object(prose, "ROOT", path.parent):
      self.assertEqual(errors_of(path), ["bad.md:3: ' is no '"])


if __name__ == "__main__":
  absltest.main()
