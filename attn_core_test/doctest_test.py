# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples in the library's docstrings run and print the output they show."""

import contextlib
import doctest
import importlib
import inspect
import io
import re
import typing

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

import attn_core
from attn_core import masks, score_mods
from attn_core.caches import dense, window
from attn_core.caches.paged import allocator, ops
from attn_core_test import import_graph

jax.config.update("jax_num_cpu_devices", 8)  # for the examples with meshes

EXAMPLE = ">>> "
MODULES = [name for name, path in import_graph.library_modules().items()
           if EXAMPLE in path.read_text(encoding="utf-8")]
MAX_LINES = 10  # of source and output together

# Functions, and modules for the functions in them, whose docstring must have an example.
ENTRY_POINTS = (
    attn_core.attention, attn_core.explain, attn_core.ring_attention,
    attn_core.ragged_page_attention_v2, attn_core.create_mesh, attn_core.rotary, dense, window, ops,
    allocator)
MASK_CONSTRUCTORS = """
causal chunk custom dense full lengths offset placed positions prefix segments selected_blocks
selected_keys window
""".split()
PICTURE_ROW = re.compile(r"^.{3}([#.]{4})\|$", re.MULTILINE)


def examples_of(entry) -> list[doctest.Example]:
  """Returns the examples in the docstring of a function or module."""
  return doctest.DocTestParser().get_examples(inspect.getdoc(entry) or "")


class DoctestTest(parameterized.TestCase):

  def test_entry_points_have_examples(self):
    without = [entry.__name__ for entry in ENTRY_POINTS
               if not any(example.want for example in examples_of(entry))]
    self.assertEmpty(without)

  def test_score_mods_have_examples(self):
    made = [getattr(score_mods, name) for name in score_mods.__all__]
    without = [entry.__name__ for entry in filter(inspect.isfunction, made)
               if not any(example.want for example in examples_of(entry))]
    self.assertEmpty(without)

  def test_list_of_mask_constructors_is_complete(self):
    made = [name for name in masks.__all__ if inspect.isfunction(getattr(masks, name))
            and typing.get_type_hints(getattr(masks, name)).get("return") is masks.Mask]
    self.assertCountEqual(made, MASK_CONSTRUCTORS)

  @parameterized.parameters(*MASK_CONSTRUCTORS)
  def test_mask_constructors_have_pictures(self, name):
    """Compares 4 rows of 4 characters exactly: for doctest "..." in a picture matches anything."""
    examples, names = examples_of(getattr(masks, name)), {"np": np}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
      for example in examples:
        exec(example.source, names)  # pylint: disable=exec-used
    rows = PICTURE_ROW.findall("".join(example.want for example in examples))
    self.assertLen(rows, 4)
    self.assertEqual(rows, PICTURE_ROW.findall(output.getvalue()))
    self.assertTrue(any(f"masks.{name}(" in example.source for example in examples))

  def test_examples_are_short(self):
    parser = doctest.DocTestParser()
    for name in MODULES:
      module = importlib.import_module(name)
      for test in doctest.DocTestFinder(exclude_empty=True, parser=parser).find(module):
        lines = sum(example.source.count("\n") + example.want.count("\n")
                    for example in test.examples)
        self.assertLessEqual(lines, MAX_LINES, test.name)

  @parameterized.parameters(*[(name,) for name in MODULES])
  def test_examples_of(self, name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(
        module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    self.assertGreater(tried, 0)
    self.assertEqual(failed, 0, f"the examples of {name}, see above")


if __name__ == "__main__":
  absltest.main()
