# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every program in README.md and in the pages of docs/ runs and prints what the page shows."""

import importlib.util
import os
import re
import time

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once, when it is imported

# pylint: disable=wrong-import-position
from absl.testing import absltest
from absl.testing import parameterized
import jax

from attn_core_test import documents, sampling

jax.config.update("jax_num_cpu_devices", 8)  # so that examples of meshes run on several devices

SECONDS = 10  # of CPU for the programs of a page, without compiled programs kept from earlier runs

# Programs for packages that cannot be installed here: adapters_recipes_test runs them on objects of
# their shapes.
ELSEWHERE = ("maxtext", "axlearn")
PAGES = {path.relative_to(documents.ROOT).as_posix(): path.read_text(encoding="utf-8")
         for path in documents.pages()}
TAKEN = sampling.in_turn(PAGES, 4)  # of those whose programs need nothing but JAX
PAGES = {name: text for name, text in PAGES.items()
         if name == "README.md" or name in TAKEN
         or any(block.needs for block in documents.blocks_of(text))}


class DocumentsTest(parameterized.TestCase):

  # Tests of other names, as test_programs_of_docs_adapters_md, are found by `-k adapters`.
  @parameterized.named_parameters(*(("_" + re.sub(r"\W", "_", name), name)
                                    for name, text in PAGES.items() if documents.blocks_of(text)))
  def test_programs_of(self, name):
    start = time.process_time()
    names = {"__name__": "document"}
    for block in documents.blocks_of(PAGES[name]):
      with self.subTest(f"{name} line {block.line + 1}"):
        if block.needs in ELSEWHERE:
          continue
        if block.needs and importlib.util.find_spec(block.needs) is None:
          self.skipTest(f"needs {block.needs}")
        printed = documents.run(block, name, names)
        if block.printed is not None:
          self.assertEqual(printed, block.printed)
    seconds = time.process_time() - start
    if seconds > SECONDS:
      print(f"measured: {name} takes {seconds:.0f} s of CPU; at most {SECONDS} are meant")

  def test_a_program_that_prints_something_else_is_found(self):
    text = "# Title\n\n```python flax\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n"
    block, = documents.blocks_of(text)
    self.assertEqual((block.line, block.needs, block.printed), (3, "flax", "2\n"))
    self.assertEqual(documents.run(block, "page", {}), "1\n")


if __name__ == "__main__":
  absltest.main()
