# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: the names that its reference must show, and links in built pages."""

import html.parser
import importlib
import inspect
import pathlib
import re
import types
from typing import Any, Iterator, NamedTuple
import urllib.parse

import attn_core
from attn_core_test import import_graph

REFERENCE = import_graph.ROOT / "docs" / "reference"
DIRECTIVE = re.compile(
    r"^\.\. (?:auto(?:function|class|module)|py:data):: ([\w.]+)", re.MULTILINE)

# Attributes of HTML that name another resource; the tags whose resource a page needs to be shown.
ADDRESSES = ("href", "src")
NEEDED = ("img", "link", "script", "source", "iframe")
NOT_LOCAL = "the page needs another site to be shown"


# --- Names. --------------------------------------------------------------------------------------


class Name(NamedTuple):
  """A public name of a module."""

  module: str
  name: str
  value: Any

  def __str__(self) -> str:
    return f"{self.module}.{self.name}"


def public_names() -> list[Name]:
  """Returns every public name: of the library, of every `__all__`, and of the modules in these."""
  modules = {attn_core: list(dict.fromkeys([*attn_core.__all__, *_aliases()]))}
  for name, path in import_graph.library_modules().items():
    if re.search(r"^__all__ = ", path.read_text(encoding="utf-8"), re.MULTILINE):
      module = importlib.import_module(name)
      modules.setdefault(module, module.__all__)
  for module, names in list(modules.items()):
    for found in (getattr(module, name) for name in names):
      if inspect.ismodule(found) and found not in modules:
        modules[found] = _defined_in(found)
  return [Name(module.__name__, name, getattr(module, name))
          for module, names in modules.items() for name in names]


def _aliases() -> list[str]:
  """Returns the names of the library that are importable but not in its `__all__`."""
  return [name for name, value in vars(attn_core).items()
          if not name.startswith("_") and not inspect.ismodule(value)]


def _defined_in(module: types.ModuleType) -> list[str]:
  """Returns the functions and classes that a module without `__all__` defines."""
  return [name for name, value in vars(module).items() if not name.startswith("_")
          and (inspect.isfunction(value) or inspect.isclass(value))
          and value.__module__ == module.__name__]


def documented_in_sources() -> list[str]:
  """Returns the names that the pages of the reference document."""
  return [name for path in sorted(REFERENCE.glob("*.md"))
          for name in DIRECTIVE.findall(path.read_text(encoding="utf-8"))]


def undocumented(names: list[str]) -> list[str]:
  """Returns the public names that are not among `names`, under this or another name."""
  values, places = [], set()
  for name in names:
    value, owner = resolve(name), resolve(name.rpartition(".")[0])
    places.add((id(owner), name.rpartition(".")[2]))
    if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
      values.append(id(value))
  return [str(name) for name in public_names() if id(name.value) not in values
          and (id(importlib.import_module(name.module)), name.name) not in places]


def resolve(name: str) -> Any:
  """Returns the object of a dotted name, which may lead through aliases of modules."""
  first, *rest = name.split(".")
  value = importlib.import_module(first)
  for part in rest:
    if not hasattr(value, part):
      importlib.import_module(f"{value.__name__}.{part}")
    value = getattr(value, part)
  return value


# --- Links. --------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
  """Links, pictures and anchors of a page."""

  def __init__(self, text: str):
    super().__init__()
    self.links: list[tuple[int, str, str]] = []  # (line, tag, address)
    self.anchors: set[str] = set()
    self.without_text: list[int] = []  # lines of pictures without a description
    self.feed(text)

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    given = dict(attrs)
    self.anchors.update(given[name] or "" for name in ("id", "name") if name in given)
    self.links += [(self.getpos()[0], tag, given[name] or "") for name in ADDRESSES
                   if name in given]
    if tag == "img" and not given.get("alt"):
      self.without_text.append(self.getpos()[0])


def broken_links(root: pathlib.Path) -> list[str]:
  """Checks the pages below a folder without network, and returns what is wrong, one line each.

  Internal links need their file and anchor, pictures a description. Addresses of other sites are
  checked for their form only, and a page must not need one to be shown.
  """
  pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
  found = []
  for path, page in pages.items():
    where = path.relative_to(root)
    found += [f"{where}:{line}: a picture without a description" for line in page.without_text]
    for line, tag, address in page.links:
      if error := _error_of(path, tag, address, pages):
        found.append(f"{where}:{line}: {tag} {address!r}: {error}")
  return found


def _error_of(path: pathlib.Path, tag: str, address: str,
              pages: dict[pathlib.Path, Page]) -> str | None:
  """Returns what is wrong with a link in a page."""
  parts = urllib.parse.urlsplit(address)
  if parts.scheme in ("http", "https"):
    return NOT_LOCAL if tag in NEEDED else address_error(address)
  if parts.scheme in ("mailto", "data"):
    return None
  if parts.scheme or parts.netloc:
    return "not an address that a reader can follow"
  target = path if not parts.path else (path.parent / urllib.parse.unquote(parts.path)).resolve()
  if not target.is_file():
    return "the file does not exist"
  anchor = urllib.parse.unquote(parts.fragment)
  if anchor and target in pages and anchor not in pages[target].anchors:
    return f"{target.name} has the anchor nowhere"
  return None


def address_error(address: str) -> str | None:
  """Returns what is wrong with the form of an address of another site."""
  parts = urllib.parse.urlsplit(address)
  if not re.fullmatch(r"(?:[a-z0-9-]+\.)+[a-z]{2,}", parts.netloc):
    return "not the name of a host"
  if re.search(r"[\s<>\"`|\\^{}]|[.,;)]$", address):
    return "a character that belongs to the sentence, not to the address"
  return None


def links_of(text: str) -> Iterator[tuple[int, str]]:
  """Yields (line, address) of the links and pictures in a Markdown text, without its code."""
  plain = re.sub(r"^```.*?^```$|`[^`\n]*`", lambda match: "\n" * match[0].count("\n"), text,
                 flags=re.MULTILINE | re.DOTALL)
  for match in re.finditer(r"\]\(([^()\s]+)\)|<(https?:[^>]+)>", plain):
    yield plain.count("\n", 0, match.start()) + 1, match[1] or match[2]
