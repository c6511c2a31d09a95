# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Libraries that some tests compare with, if they are installed."""

import importlib
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


def module(test: unittest.TestCase, name: str, extra: str) -> types.ModuleType:
  """Returns a module; skips the test, with a reason, where it is missing or does not import.

  Args:
    test: the test that needs it.
    name: of the module.
    extra: of setup.py, which has its package.
  """
  try:
    return importlib.import_module(name)
  # A release for another jax fails with an AttributeError.
  except (ImportError, AttributeError) as error:
    print(f"skipped: {name}: {error}; pip install '.[{extra}]' has it")
    test.skipTest(f"{name}: {error}")
