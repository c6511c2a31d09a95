# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Words of the documents and of the public docstrings are English, or are in docs/words.txt.

A word that is right and not known belongs to docs/words.txt, one a line, in lower case. Code,
names with digits or underscores, and abbreviations in capitals are not checked.
"""

import inspect
import re
from typing import Iterator

from absl.testing import absltest

from attn_core_test import optional_deps, prose, site_pages as site

WORDS = prose.ROOT / "docs" / "words.txt"

# Parts of a text that are not prose: code, addresses, comments, directives and their options.
NOT_PROSE = re.compile(
    r"`[^`]*`|\]\([^)]*\)|https?://\S+|<!--.*?-->|^:{3,}.*$|^:\w+:.*$|\{[\w:]+\}",
    re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^ *>>> .*?(?=^ *$|\Z)", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"[A-Za-z]?[a-z]+(?:'[a-z]+)?")
CAPITALS = re.compile(r"[A-Z]{2,}s?")


def words_of(text: str) -> list[str]:
  """Returns the words in a text, in lower case."""
  found = []
  for token in NOT_PROSE.sub(" ", text).replace("’", "'").split():
    token = token.strip(".,;:!?()[]{}\"'*|<>~")
    if re.search(r"[\d_=.@#\\\[\]()+]|\w\*|--", token):  # code, a number or a file
      continue
    found += [part.lower() for part in re.split(r"[^A-Za-z']+", token)
              if WORD.fullmatch(part) and not CAPITALS.fullmatch(part) and len(part) > 2]
  return found


def texts() -> Iterator[tuple[str, str]]:
  """Yields (place, text) of every document and every docstring of the public names."""
  for path in prose.documents():
    name = path.relative_to(prose.ROOT).as_posix()
    yield from ((f"{name}:{line}", text)
                for line, text in prose.paragraphs(prose.markdown_of(path)))
  for name in site.public_names():
    owners = [name.value]
    if inspect.isclass(name.value):
      owners += [value for key, value in vars(name.value).items()
                 if not key.startswith("_") and inspect.isroutine(value)]
    for owner in owners:
      if (getattr(owner, "__module__", None) or getattr(owner, "__name__", "")).startswith(
          "attn_core"):
        yield str(name), EXAMPLE.sub("", inspect.getdoc(owner) or "")


class SpellingTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    checker = optional_deps.module(self, "spellchecker", "docs").SpellChecker(distance=1)
    self.known = checker.known
    self.own = WORDS.read_text(encoding="utf-8").split()

  def mistakes(self, words: set[str]) -> set[str]:
    plain = {re.sub(r"'s?$", "", word): word for word in words}
    unknown = plain.keys() - self.known(plain.keys()) - {*self.own}
    return {plain[word] for word in unknown}

  def test_words_are_known(self):
    places = {}
    for place, text in texts():
      for word in words_of(text):
        places.setdefault(word, place)
    wrong = self.mistakes({*places})
    if wrong:
      self.fail("\n" + "\n".join(f"{places[word]}: {word}" for word in sorted(wrong)))

  def test_a_mistake_is_found(self):
    text = ("A seperate tabel, recieve-only, of `kode` and [the maks](https://adress.org).\n"
            ">>> not_prose\n\nThe kernal's GPUs use float32 and b_loks.")
    self.assertEqual(self.mistakes({*words_of(text)}),
                     {"seperate", "tabel", "recieve", "maks", "kernal's"})

  def test_list_is_sorted_and_short(self):
    self.assertEqual(self.own, sorted({*self.own}))
    self.assertEmpty([word for word in self.own if not re.fullmatch("[a-z]+", word)])
    self.assertEmpty(self.known(self.own), "words that the dictionary has already")


if __name__ == "__main__":
  absltest.main()
