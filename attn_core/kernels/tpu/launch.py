# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared wrapper of `pl.pallas_call` for TPU kernels."""

from typing import Any, Callable

import jax


def in_32_bits(call: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a `pl.pallas_call` so that Python numbers have 32 bits, whatever jax_enable_x64 says.

  TPUs have no 64-bit scalars; a 64-bit grid position or index does not compile.
  """
  def run(*operands: jax.Array) -> Any:
    with jax.enable_x64(False):
      return call(*operands)

  return run
