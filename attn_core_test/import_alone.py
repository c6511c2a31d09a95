# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports every module of the library that lies in the same folder tree as this file.

Bazel runs this once for every library target, with that target's dependencies and nothing else: a
dependency missing from a BUILD file is then a ModuleNotFoundError.
"""

import importlib
import os
import pathlib

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent


def main() -> None:
  paths = sorted((ROOT / "attn_core").rglob("*.py"))
  if not any(path.stat().st_size for path in paths):
    raise SystemExit(f"no module under {ROOT}")
  for path in paths:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = importlib.import_module(name)
    if not pathlib.Path(module.__file__).is_relative_to(ROOT):
      raise SystemExit(f"{name} came from {module.__file__}, which is outside {ROOT}")
    print(name)


if __name__ == "__main__":
  main()
