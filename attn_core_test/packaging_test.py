# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The package as an index gets it: files, metadata, a long description that renders, a citation."""

import email
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import warnings
import zipfile

from absl.testing import absltest
from absl.testing import parameterized

import attn_core

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
BUILDERS = ("build", "twine", "setuptools")
NO_BUILDERS = f"{', '.join(BUILDERS)} are not all installed: pip install '.[docs]'"


def missing(*packages: str) -> bool:
  return any(importlib.util.find_spec(package) is None for package in packages)


def setup_module():
  """Imports setup.py, which then installs nothing."""
  spec = importlib.util.spec_from_file_location("attn_core_setup", ROOT / "setup.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@unittest.skipIf(missing("setuptools"), "setuptools is not installed: pip install '.[docs]'")
class LinksTest(parameterized.TestCase):

  @parameterized.parameters(
      ("[start](docs/start.md)", "[start]({0}/blob/main/docs/start.md)"),
      ("[all](docs) [one](docs/start.md#a)", "[all]({0}/tree/main/docs) "
       "[one]({0}/blob/main/docs/start.md#a)"),
      ("![time](docs/a.svg)", "![time]({1}/main/docs/a.svg)"),
      ("[`call`](docs/start.md)", "[`call`]({0}/blob/main/docs/start.md)"),
      ("[above](#install), [there](https://jax.dev/x)",
       "[above](#install), [there](https://jax.dev/x)"),
      ("`[0](x)` and `x[0](y)`", "`[0](x)` and `x[0](y)`"),
      ("```python\nx[0](y)\n```\n[a](LICENSE)",
       "```python\nx[0](y)\n```\n[a]({0}/blob/main/LICENSE)"))
  def test_relative_links_become_absolute(self, text, expected):
    setup = setup_module()
    self.assertEqual(setup.absolute_links(text), expected.format(setup.REPOSITORY, setup.RAW))

  def test_long_description_has_no_relative_link(self):
    setup = setup_module()
    text = setup.arguments()["long_description"]
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)", plain)
    self.assertGreater(len(targets), 10)
    for target in targets:
      self.assertRegex(target, "^https://")
    self.assertEqual(setup.absolute_links(text), text)

  def test_long_description_renders(self):
    if missing("readme_renderer"):
      self.skipTest("readme_renderer is not installed: pip install '.[docs]'")
    from readme_renderer import markdown
    setup = setup_module()
    with warnings.catch_warnings(action="ignore"):
      html = markdown.render(setup.arguments()["long_description"])
    if html is None:
      self.skipTest("readme_renderer has no renderer of Markdown: pip install '.[docs]'")
    self.assertEqual(html.count("<table>"), 2)
    self.assertIn(f'src="{setup.RAW}/main/docs/pictures/speed.svg"', html)
    self.assertIn(f'href="{setup.REPOSITORY}/blob/main/docs/start.md"', html)
    prose = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    for source in ("](", "**", "```", "| --- |"):
      self.assertNotIn(source, prose)

  def test_extras_for_the_documentation_have_lower_bounds(self):
    for requirement in setup_module().EXTRAS["docs"]:
      self.assertRegex(requirement, r"^[\w-]+(\[\w+\])?>=[\d.]+$")


class CitationTest(absltest.TestCase):

  def test_citation(self):
    if missing("yaml", "setuptools"):
      self.skipTest("PyYAML or setuptools is not installed: pip install '.[docs]'")
    import yaml
    setup = setup_module()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    # The fields that version 1.2.0 of the format knows and this file may use, by their types.
    types = {"cff-version": str, "message": str, "type": str, "title": str, "abstract": str,
             "authors": list, "version": str, "license": str, "repository-code": str,
             "keywords": list, "date-released": object, "doi": str}
    for field, value in cited.items():
      self.assertIn(field, types)
      self.assertIsInstance(value, types[field], field)
    for field in ("cff-version", "message", "title", "authors"):  # required by the format
      self.assertTrue(cited.get(field), field)
    self.assertEqual((cited["cff-version"], cited["type"]), ("1.2.0", "software"))
    for author in cited["authors"]:
      self.assertTrue({"name"} == set(author) or {"family-names", "given-names"} <= set(author))
    self.assertTrue(all(isinstance(word, str) for word in cited["keywords"]))
    given = setup.arguments()
    self.assertEqual((cited["version"], cited["license"]), (given["version"], given["license"]))
    self.assertEqual(cited["repository-code"], setup.REPOSITORY)


class BazelTest(absltest.TestCase):

  def test_the_page_for_users_has_the_versions_of_this_workspace(self):
    read = lambda name: (ROOT / name).read_text(encoding="utf-8")
    page, module = read("docs/bazel.md"), read("MODULE.bazel")
    archive = re.search(r"^http_archive\(.*?^\)$", read("WORKSPACE"), re.MULTILINE | re.DOTALL)[0]
    self.assertIn(f"\n{archive}\n", page)
    rules = re.search(r'^bazel_dep\(name = "rules_python".*$', module, re.MULTILINE)[0]
    self.assertIn(f"\n{rules}\n", page)
    self.assertIn(f'version = "{attn_core.__version__}",\n', module)
    self.assertIn(f'version = "{attn_core.__version__}",\n', page)


@unittest.skipIf(missing(*BUILDERS), NO_BUILDERS)
class BuildTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    copy = cls.folder / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "bazel-*", "_build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignored)
    cls.run_tool("build", "--no-isolation", "--outdir", str(cls.folder), str(copy))
    cls.archive, = cls.folder.glob("*.tar.gz")
    cls.wheel, = cls.folder.glob("*.whl")

  @classmethod
  def run_tool(cls, *arguments: str) -> str:
    """Runs `python -m`; an error has everything that it printed."""
    process = subprocess.run([sys.executable, "-m", *arguments], cwd=cls.folder, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if process.returncode:
      raise RuntimeError(f"{' '.join(arguments)}\n{process.stdout}")
    return process.stdout

  def test_an_index_accepts_it(self):
    printed = self.run_tool("twine", "--no-color", "check", "--strict", str(self.archive),
                            str(self.wheel))
    self.assertEqual(printed.count("PASSED"), 2, printed)

  def test_wheel_has_the_library_and_no_tests(self):
    with zipfile.ZipFile(self.wheel) as file:
      names = file.namelist()
    self.assertIn("attn_core/py.typed", names)
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "attn_core").rglob("*.py")}
    self.assertEqual({name for name in names if name.endswith(".py")}, here)
    others = {name.partition("/")[0] for name in names} - {"attn_core"}
    self.assertLen(others, 1, others)
    self.assertEndsWith(others.pop(), ".dist-info")

  def test_archive_has_what_its_tests_read(self):
    with tarfile.open(self.archive) as file:
      names = {name.partition("/")[2] for name in file.getnames()}
    for name in ("README.md", "CITATION.cff", "LICENSE", "CHANGELOG.md", "docs/index.md",
                 "docs/conf.py", "examples/serve.py", "attn_core_test/readme_test.py",
                 "attn_core_test/approved/masks_leaves.txt",
                 "attn_core_test/results/cpu_py312_jax0.12.0.1.json"):
      self.assertIn(name, names)
    self.assertEmpty([name for name in names if name.startswith("docs/_build/")])

  def test_metadata(self):
    with zipfile.ZipFile(self.wheel) as file:
      name, = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
      found = email.message_from_bytes(file.read(name))
    given = setup_module().arguments()
    self.assertEqual(found["Version"], given["version"])
    self.assertEqual(found["Requires-Python"], ">=3.11")
    self.assertEqual(found["Description-Content-Type"], "text/markdown")
    self.assertIn("Typing :: Typed", found.get_all("Classifier"))
    self.assertIn("ring attention", found["Keywords"])
    labels = {line.partition(", ")[0] for line in found.get_all("Project-URL")}
    self.assertContainsSubset({"Documentation", "Source", "Issues", "Changelog"}, labels)
    self.assertContainsSubset(setup_module().EXTRAS, found.get_all("Provides-Extra"))


if __name__ == "__main__":
  absltest.main()
