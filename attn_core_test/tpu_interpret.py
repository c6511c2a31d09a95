# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs TPU kernels on the CPU: with a race detector, and with the bytes of transfers counted."""

import contextlib
import io
from typing import Any, Iterator, NamedTuple
from unittest import mock

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def interpreted(transfers: str = "on_wait") -> Iterator[None]:
  """Runs TPU kernels on the CPU; fails on a detected race."""
  printed = io.StringIO()
  parameters = pltpu.InterpretParams(
      detect_races=True, uninitialized_memory="nan", dma_execution_mode=transfers)
  with contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(parameters):
    yield
  assert "RACE" not in printed.getvalue(), printed.getvalue()


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
  """Interprets TPU kernels; yields a list to which every starting transfer adds its bytes."""
  moved, make = [], pltpu.make_async_copy
  class Copy(NamedTuple):
    copy: Any
    size: int

    def start(self):
      jax.debug.callback(lambda: moved.append(self.size))
      self.copy.start()

    def wait(self):
      self.copy.wait()

  def counting(source, target, arrived):
    size = int(np.prod(target.shape)) * jnp.dtype(target.dtype).itemsize
    return Copy(make(source, target, arrived), size)

  with mock.patch.object(pltpu, "make_async_copy", counting), interpreted():
    yield moved
    jax.effects_barrier()
