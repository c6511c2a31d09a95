# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs GPU kernels on the CPU, and checks each as it would run on a GPU.

Interpret mode clips what a copy would write into the next row, and copies by any tensor map.
Therefore `interpret` lowers every program for CUDA, too; see gpu_faults.
"""

import contextlib
import functools
import io
from typing import Any, Callable, Iterator
import unittest
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import thread_map
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

from attn_core_test import gpu_faults, numpy_programs

# Decorates tests that interpret kernels.
interprets = unittest.skipUnless(hasattr(plgpu, "force_gpu_interpret_mode"),
                                 "jax interprets Mosaic GPU kernels from 0.11 on")


def interpret(run: Callable[..., Any], *arguments: Any) -> Any:
  """Returns the results of a function, jitted, whose GPU kernels are interpreted and checked."""
  with interpreted():
    found = jax.block_until_ready(_jitted(run)(*arguments))
  assert gpu_faults.check(run, arguments), "no GPU kernel was called"
  return found


@functools.lru_cache(maxsize=8)
def _jitted(run: Callable[..., Any]) -> Callable[..., Any]:
  return jax.jit(run)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
  """Runs GPU kernels on the CPU; fails on a detected race, which jax before 0.12 only prints."""
  # pylint: disable-next=g-import-not-at-top
  from jax._src.pallas.mosaic_gpu.interpret import shared_memory  # of jax 0.11 and later
  printed, to_int = io.StringIO(), shared_memory._to_int
  with (contextlib.redirect_stdout(printed),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        mock.patch.object(thread_map, "_run_jaxpr", numpy_programs.run_thread),
        mock.patch.object(shared_memory, "_to_int", lambda x: to_int(
            int(x) if isinstance(x, np.integer) else x))):
    yield
  assert "RACE" not in printed.getvalue(), printed.getvalue()
