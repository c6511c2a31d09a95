# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared wrapper of `pl.pallas_call` for TPU kernels."""

from collections.abc import Set
from typing import Any, Callable

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import platform_guard

Ref = Any  # a Pallas reference


def effects() -> Set:
  """Returns the JAX effects of any TPU kernel: none, except in interpret mode."""
  def copy(x: Ref, y: Ref) -> None:
    y[...] = x[...]
  shape = jax.core.ShapedArray((8, 128), jnp.float32)
  return jax.make_jaxpr(pl.pallas_call(copy, out_shape=shape))(shape).effects


def in_32_bits(call: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a `pl.pallas_call` so that Python numbers have 32 bits, whatever jax_enable_x64 says.

  TPUs have no 64-bit scalars; a 64-bit grid position or index does not compile. Lowering for
  another platform raises, except in interpret mode.
  """
  def run(first: jax.Array, *operands: jax.Array) -> Any:
    with jax.enable_x64(False):
      if not effects():
        first = platform_guard.guarded(first, "tpu")
      return call(first, *operands)

  return run
