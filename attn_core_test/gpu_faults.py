# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks GPU kernels, lowered for CUDA, for faults that only hardware would show."""

import functools
from typing import Any, Callable

import jax
from jax._src.lib.mlir import ir
import jax.numpy as jnp

from attn_core_test import gpu_copies, gpu_descriptors, gpu_launch, gpu_lowered


def check(run: Callable[..., Any], arguments: tuple) -> int:
  """Returns the number of GPU kernels in a program; AssertionError: they have faults.

  Args:
    run: a function, jitted or not. What was checked before is not lowered again.
    arguments: of the function, arrays or only their shapes.
  """
  leaves, structure = jax.tree.flatten(jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), arguments))
  count, found = _checked(run, structure, tuple(leaves))
  assert not found, "\n".join(found)
  return count


@functools.lru_cache(maxsize=64)
def _checked(run: Callable[..., Any], structure: Any, leaves: tuple) -> tuple[int, tuple[str, ...]]:
  modules = gpu_lowered.kernels(run, jax.tree.unflatten(structure, leaves))
  return len(modules), tuple(
      f"{gpu_lowered.name_of(module)}: {fault}" for module in modules for fault in faults(module))


def faults(module: ir.Module) -> list[str]:
  """Returns what is wrong with a kernel, a line each."""
  maps = gpu_descriptors.descriptors(module)
  return [*gpu_launch.faults(module), *gpu_copies.faults(module),
          *(fault for one in maps for fault in gpu_descriptors.faults(one))]
