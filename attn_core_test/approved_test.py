# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The library says about many calls, without running them, what was approved before.

The texts in attn_core_test/approved are read in the difference of a commit, as a compiler's
expected outputs are; `python3 -m attn_core_test.approve` writes them again.
"""

import difflib

from absl.testing import absltest
from absl.testing import parameterized
from attn_core_test import sampling

sampling.optimize_least()  # the texts do not depend on what XLA makes of the programs

# pylint: disable-next=wrong-import-position
from attn_core_test import approved_cases

MOST_LINES = 60  # of a printed difference


class ApprovedTest(parameterized.TestCase):

  @parameterized.parameters(*approved_cases.FILES)
  def test_text(self, name):
    path = approved_cases.path_of(name)
    wanted = path.read_text(encoding="utf-8").splitlines()
    found = approved_cases.generated(name).splitlines()
    if wanted != found:
      lines = list(difflib.unified_diff(wanted, found, "approved", "found", lineterm="", n=1))
      more = [f"... and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
      self.fail("\n".join([f"{path} differs:", *lines[:MOST_LINES], *more, "If this is meant: "
                           f"python3 -m attn_core_test.approve {name}"]))

  def test_every_file_has_a_generator(self):
    names = {path.stem for path in approved_cases.present()}
    self.assertEqual(names, set(approved_cases.FILES))


if __name__ == "__main__":
  absltest.main()
