# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The documentation builds without a warning, its links lead somewhere, its reference is whole."""

import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

import attn_core
from attn_core_test import documents, import_graph, optional_deps, site_pages as site

PACKAGES = ("sphinx", "myst_nb", "furo", "sphinx_copybutton")


class NamesTest(absltest.TestCase):

  def test_every_public_name_is_in_the_reference(self):
    self.assertEmpty(site.undocumented(site.documented_in_sources()))

  def test_names_are_found(self):
    names = {str(name) for name in site.public_names()}
    self.assertContainsSubset(
        {"attn_core.attention", "attn_core.to_layout", "attn_core.masks.causal",
         "attn_core.caches.dense.init", "attn_core.caches.quantize.dequantize",
         "attn_core.caches.paged.LANES", "attn_core.adapters.dot_product_attention",
         "attn_core.benchmark.run_attention_benchmarks"}, names)

  def test_a_missing_name_is_found(self):
    names = [name for name in site.documented_in_sources()
             if name not in ("attn_core.masks.causal", "attn_core.caches.pages.LANES")]
    self.assertEqual(site.undocumented(names),
                     ["attn_core.masks.causal", "attn_core.caches.paged.LANES"])
    with mock.patch.object(attn_core, "new_function", print, create=True):
      self.assertIn("attn_core.new_function", site.undocumented(site.documented_in_sources()))


class LinksTest(absltest.TestCase):

  def test_broken_links_are_found(self):
    root = pathlib.Path(self.create_tempdir().full_path)
    root.joinpath("there.html").write_text('<h1 id="title">x</h1>', encoding="utf-8")
    root.joinpath("index.html").write_text(
        '<a href="there.html#title">1</a><a href="https://example.org/x">2</a>\n'
        '<a href="gone.html">3</a>\n<a href="there.html#gone">4</a>\n<img src="gone.png" alt="x">\n'
        '<script src="https://example.org/x.js"></script>\n<a href="https://example">5</a>\n'
        '<a href="https://example.org/x).">6</a>\n<img src="there.html">\n<a href="#gone">7</a>',
        encoding="utf-8")
    found = site.broken_links(root)
    self.assertEqual(sorted(int(error.split(":")[1]) for error in found), [*range(2, 10)])

  def test_links_between_documents(self):
    """Checks what readers of the repository follow, in pages that are not part of the site too."""
    if not (documents.ROOT / ".git").exists():
      self.skipTest("needs a checkout: elsewhere some of the files are left out")
    errors = []
    for path in [*documents.pages(), *(documents.ROOT / name for name in
                                       ("CHANGELOG.md", "CONTRIBUTING.md"))]:
      for line, address in site.links_of(path.read_text(encoding="utf-8")):
        where = f"{path.relative_to(documents.ROOT)}:{line}: {address!r}"
        if address.startswith(("http:", "https:")):
          error = site.address_error(address)
          errors += [f"{where}: {error}"] if error else []
        elif not (path.parent / (address.partition("#")[0] or path.name)).exists():
          errors.append(f"{where}: the file does not exist")
    if errors:
      self.fail("\n" + "\n".join(errors))


class SiteTest(absltest.TestCase):

  def test_site(self):
    for package in PACKAGES:
      optional_deps.module(self, package, "docs")
    with tempfile.TemporaryDirectory() as folder:
      command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", folder,
                 "-d", os.path.join(folder, ".doctrees")]
      built = subprocess.run(command, cwd=import_graph.ROOT, text=True, capture_output=True,
                             env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
      self.assertEqual(built.returncode, 0, built.stderr)
      root = pathlib.Path(folder)
      with self.subTest("links"):
        errors = site.broken_links(root)
        self.assertEmpty(errors, "\n" + "\n".join(errors))
      with self.subTest("reference"):
        from sphinx.util import inventory  # after the check that it is there
        with open(root / "objects.inv", "rb") as file:
          shown = inventory.InventoryFile.load(file, "", os.path.join)
        names = [name for kind in shown if kind.startswith("py:") for name in shown[kind]]
        self.assertEmpty({*site.documented_in_sources()} - {*names})
      with self.subTest("search"):
        index = (root / "searchindex.js").read_text(encoding="utf-8")
        for word in ("window", "zigzag", "pagesv3"):
          self.assertIn(word, index)


if __name__ == "__main__":
  absltest.main()
