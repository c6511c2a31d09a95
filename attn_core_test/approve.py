# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the approved texts again, which approved_test compares: review their difference.

    python3 -m attn_core_test.approve               all of them
    python3 -m attn_core_test.approve masks_leaves  some
"""

import sys

from attn_core_test import approved_cases


def main(names: list[str]) -> None:
  """Writes the texts of these names, or all, and removes files without a name."""
  approved_cases.FOLDER.mkdir(exist_ok=True)
  for name in names or approved_cases.FILES:
    text, path = approved_cases.generated(name), approved_cases.path_of(name)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
      path.write_text(text, encoding="utf-8")
      print(path)
  for path in approved_cases.present():
    if path.stem not in approved_cases.FILES:
      path.unlink()


if __name__ == "__main__":
  main(sys.argv[1:])
