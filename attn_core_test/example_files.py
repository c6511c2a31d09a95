# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples as modules."""

import importlib.util
import os
import pathlib
from types import ModuleType

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent


def load_example(name: str) -> ModuleType:
  """Imports an example as a module."""
  spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
