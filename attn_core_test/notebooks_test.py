# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Notebooks of docs/notebooks run from their first cell to their last and print what they show."""

import copy
import os
import pathlib
import time
from typing import Any
from unittest import mock

from absl.testing import absltest

from attn_core_test import optional_deps, prose

NOTEBOOKS = [path for path in prose.documents() if path.suffix == ".ipynb"]
SECONDS = 300  # for one cell
MAX_BYTES = 500_000  # of a notebook with its outputs, so that a diff and a page stay readable


def outputs_of(cell: Any) -> list[str]:
  """Returns the texts that a cell prints or shows; of a picture only that there is one."""
  found = []
  for output in cell.get("outputs", ()):
    if output["output_type"] == "stream":
      if found and found[-1].startswith(output["name"]):  # a kernel may divide a text anywhere
        found[-1] += "".join(output["text"])
      else:
        found.append(f"{output['name']}: {''.join(output['text'])}")
    else:
      data = output.get("data", {})
      pictures = sorted(kind for kind in data if kind.startswith("image/"))
      found.append("".join(pictures) or f"result: {''.join(data.get('text/plain', ''))}")
  return found


def differences(shown: Any, printed: Any) -> list[str]:
  """Returns the cells whose outputs differ, each with both."""
  found = []
  for number, (before, after) in enumerate(zip(shown.cells, printed.cells), 1):
    if outputs_of(before) != outputs_of(after):
      found.append(f"cell {number}: shows {outputs_of(before)}, prints {outputs_of(after)}")
  return found


class NotebooksTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.nbformat = optional_deps.module(self, "nbformat", "docs")
    self.nbclient = optional_deps.module(self, "nbclient", "docs")
    optional_deps.module(self, "ipykernel", "docs")

  def run_notebook(self, notebook: Any, folder: pathlib.Path) -> Any:
    """Returns a copy of a notebook with the outputs of a run in this environment."""
    notebook = copy.deepcopy(notebook)
    environment = {"PYTHONPATH": str(prose.ROOT), "JAX_PLATFORMS": "cpu",
                   "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    with mock.patch.dict(os.environ, environment):
      self.nbclient.NotebookClient(
          notebook, timeout=SECONDS, kernel_name="python3",
          resources={"metadata": {"path": str(folder)}}).execute()
    return notebook

  def test_outputs(self):
    for path in NOTEBOOKS:
      with self.subTest(path.name):
        self.assertLess(path.stat().st_size, MAX_BYTES)
        shown = self.nbformat.read(path, as_version=4)
        self.assertTrue(any(cell.get("outputs") for cell in shown.cells), "saved without outputs")
        start = time.monotonic()
        self.assertEmpty(differences(shown, self.run_notebook(shown, path.parent)))
        print(f"measured: {path.name} runs in {time.monotonic() - start:.0f} s")

  def test_another_output_is_found(self):
    new = self.nbformat.v4
    notebook = new.new_notebook(cells=[
        new.new_markdown_cell("# Title"),
        new.new_code_cell("import attn_core\nx = 1\nprint(x)", outputs=[
            new.new_output("stream", name="stdout", text="1\n")]),
        new.new_code_cell("x + 1", outputs=[
            new.new_output("execute_result", data={"text/plain": "3"}, execution_count=2)])])
    printed = self.run_notebook(notebook, pathlib.Path(self.create_tempdir().full_path))
    self.assertEqual(differences(notebook, printed),
                     ["cell 3: shows ['result: 3'], prints ['result: 2']"])


if __name__ == "__main__":
  absltest.main()
