# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples in the library's docstrings run and print the output they show."""

import doctest
import importlib
import inspect

from absl.testing import absltest
from absl.testing import parameterized
import jax

import attn_core
from attn_core import masks
from attn_core.caches import dense, window
from attn_core.caches.paged import allocator
from attn_core_test import import_graph

jax.config.update("jax_num_cpu_devices", 8)  # for meshes

EXAMPLE = ">>> "
MODULES = [name for name, path in import_graph.library_modules().items()
           if EXAMPLE in path.read_text(encoding="utf-8")]
MAX_LINES = 14  # lines of source and output

# Entry points whose docstrings must have an example.
ENTRY_POINTS = {
    "attention": attn_core.attention, "explain": attn_core.explain,
    **{f"masks.{name}": getattr(masks, name) for name in (
        "causal", "chunk", "custom", "dense", "full", "lengths", "offset", "positions", "prefix",
        "segments", "window")},
    "caches.dense": (dense.init, dense), "caches.window": (window.init, window),
    "caches.paged.allocator": (allocator.create, allocator),
    "PagesMetadata": (attn_core.PagesMetadata, attn_core.page_attention,
                      attn_core.ragged_page_attention_v2),
    "create_mesh": attn_core.create_mesh, "rotary": attn_core.rotary,
    "ring_attention": attn_core.ring_attention,
}
# Entry points that have none yet; this list only shrinks.
NOT_YET = """
caches.paged.allocator
""".split()


class DoctestTest(parameterized.TestCase):

  def test_entry_points_have_examples(self):
    without = [name for name, one_of in ENTRY_POINTS.items() if not any(
        EXAMPLE in (inspect.getdoc(entry) or "")
        for entry in (one_of if isinstance(one_of, tuple) else (one_of,)))]
    self.assertEqual(without, NOT_YET)

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
