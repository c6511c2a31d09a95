# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Libraries that some tests compare with, if they are installed."""

import types
import unittest


def torch_and_transformers(test: unittest.TestCase) -> tuple[types.ModuleType, types.ModuleType]:
  """Returns the two modules; skips the test, with a reason, if one is missing."""
  try:
    import torch
    import transformers
  except ImportError as error:
    print(f"skipped: {error}; pip install '.[parity]' has it")
    test.skipTest(str(error))
  return torch, transformers
