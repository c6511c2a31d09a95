# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one test module as the suite does: python3 -m attn_core_test.run_module rope_test.

Skips tests that `sampling` calls slow and that this run does not select; the module itself, as in
`python3 -m attn_core_test.rope_test`, runs all of its tests.
"""

import gc
import os
import runpy
import sys

from absl.testing import absltest

from attn_core_test import sampling, small_programs


def main(module: str) -> None:
  """Runs the quick tests of a module, and the slow ones that this rotation selects."""
  all_names = absltest.TestLoader.getTestCaseNames
  one_test = sampling.OneTest()

  def taken_names(self: absltest.TestLoader, case: type) -> list[str]:
    if os.environ.get(sampling.FEW):
      return one_test.of_class(case, all_names(self, case))
    return sampling.taken_of(all_names(self, case), f"{module}.{case.__name__}")

  absltest.TestLoader.getTestCaseNames = taken_names
  if sampling.emulates(module):
    sampling.optimize_least()
  else:
    small_programs.compile_quickly()
  small_programs.keep_quickly()
  gc.set_threshold(50_000, 20, 50)  # tracing makes many objects, few of which are in cycles
  runpy.run_module(f"attn_core_test.{module}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main(sys.argv.pop(1))
