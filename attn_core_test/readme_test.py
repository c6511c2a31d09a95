# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""README.md: short, and its tables agree with the library and with what was measured.

`documents_test` runs its blocks of Python.
"""

import os
import pathlib
import re

from absl.testing import absltest

from attn_core import table
from attn_core.benchmark import report as benchmark
from attn_core.dispatch import capabilities

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
TESTS = pathlib.Path(os.path.abspath(__file__)).parent
README = TESTS.parent / "README.md"
MOST_LINES, MOST_COLUMNS = 200, 8
RUN = "<!-- ci: run -->"  # marks the blocks of commands that .ci/run runs

# Columns of the table of mechanisms, and what it calls implementations and their memory.
PLACES = {"CPU": "cpu", "TPU": "tpu", "Hopper GPU": "gpu 9.0", "other GPU": "gpu"}
KERNELS = {**dict.fromkeys(("vanilla", "xla", "xla_writing", "projected", "decode", "absorbed",
                            "pages", "dequantized"), "XLA"), "cudnn": "cuDNN",
           **dict.fromkeys(("tpu", "tpu_writing", "tpu_remote", "gpu", "gpu_writing", "pages_tpu",
                            "pages_gpu", "decode_tpu", "decode_gpu", "projected_tpu",
                            "projected_gpu", "dequantized_tpu", "dequantized_gpu"), "Pallas")}
MEMORY = {capabilities.LINEAR: "linear", capabilities.LINEAR_BANDED: "linear †",
          capabilities.QUADRATIC: "quadratic"}
# Rows of the table of times -> (case, direction) in the results of the benchmark.
TIMES = {"float32, forward": ("causal_f32_d64_t4096", "forward"),
         "float32, forward and backward": ("causal_f32_d64_t4096", "forward_backward"),
         "bfloat16, forward": ("causal_bf16_d64_t4096", "forward"),
         "bfloat16, forward and backward": ("causal_bf16_d64_t4096", "forward_backward")}
PEERS = ("jax.nn xla", "tokamax", "torch sdpa")


def tables(text: str) -> list[list[list[str]]]:
  """Returns the tables of a page as rows of cells, without the rows of dashes."""
  found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
  return [[[cell.strip() for cell in line.strip("|").split("|")]
           for n, line in enumerate(lines.splitlines()) if n != 1] for lines in found]


def mechanism_cells(name: str) -> dict[str, str]:
  """Returns the cells that the table of mechanisms must show for one of them."""
  found = {column: table.TABLE.get((name, place), table.TABLE.get((name, place.partition(" ")[0])))
           for column, place in PLACES.items()}
  kernels = {column: list(dict.fromkeys(KERNELS[one.name.rpartition(".")[2]] for one in row.chain))
             for column, row in found.items() if row}
  memory = {kernels[column][0]: MEMORY[row.general.memory] for column, row in found.items() if row}
  if len(set(memory.values())) == 1:
    shown = next(iter(memory.values()))
  else:
    shown = ", ".join(f"{kernel} {growth}" for kernel, growth in memory.items())
  cells = {column: ", else ".join(kernels.get(column, ["–"])) for column in PLACES}
  return cells | {"memory": shown}


class ReadmeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if not README.exists():
      self.fail(f"there is no {README}; write it, and under Bazel name it in the test's data")
    self.text = README.read_text(encoding="utf-8")

  def test_is_short(self):
    self.assertLessEqual(len(self.text.splitlines()), MOST_LINES,
                         "README.md is the front door; move what is longer to docs/")
    for rows in tables(self.text):
      for row in rows:
        self.assertLen(row, len(rows[0]), row)
        self.assertLessEqual(len(row), MOST_COLUMNS, row)

  def test_two_commands_are_run(self):
    commands = re.findall(f"^{RUN}\n```bash\n(.*)\n```$", self.text, re.MULTILINE)
    self.assertLen(commands, 2, f"{RUN} marks the commands that .ci/run takes from README.md")
    self.assertEqual(self.text.count(RUN), 2)
    self.assertIn("examples/train_and_generate.py", commands[0])
    self.assertEndsWith(commands[1], "-m attn_core_test")  # all: later runs leave out what this has

  def test_five_examples(self):
    self.assertLen(re.findall("^```python$", self.text, re.MULTILINE), 5)

  def test_mechanisms_are_those_of_the_library(self):
    columns, *rows = next(rows for rows in tables(self.text) if rows[0][0] == "mechanism")
    self.assertEqual(columns, ["mechanism", "for", *PLACES, "memory"])
    names = []
    for row in rows:
      cells = dict(zip(columns, row))
      for name in re.findall("`(.*?)`", cells["mechanism"]):
        names.append(name)
        self.assertEqual({column: cells[column] for column in (*PLACES, "memory")},
                         mechanism_cells(name), name)
    self.assertCountEqual(names, set(table.names()) - {"auto"})

  def test_times_are_those_of_the_results(self):
    found = benchmark.from_json(
        (TESTS / "results" / "cpu_py312_jax0.12.0.1.json").read_text(encoding="utf-8"))
    seconds = {(r.case.name, r.direction, r.contender): r.seconds for r in found.results}
    columns, *rows = next(rows for rows in tables(self.text) if rows[0][0] == "case")
    self.assertIn(f"{found.environment['cpu']} ({found.environment['date'][:10]}", columns[1])
    for package in ("tokamax", "torch"):
      self.assertIn(f"{package} {found.environment['versions'][package]}", columns[1])
    self.assertCountEqual([row[0] for row in rows], TIMES)
    for case, cell, _ in rows:
      ours = seconds[*TIMES[case], "flash_attn2"]
      ratios = [seconds[*TIMES[case], peer] / ours for peer in PEERS]
      self.assertEqual(cell, f"{1e3 * ours:.0f} ms: " + ", ".join(f"{x:.1f}" for x in ratios), case)


if __name__ == "__main__":
  absltest.main()
