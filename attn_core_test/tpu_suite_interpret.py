# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of tpu_suite on a TPU, or in the interpreter where there is none."""

import contextlib
from typing import Iterator
from unittest import mock

import jax
from jax.experimental.pallas import tpu as pltpu

from attn_core.kernels.tpu.flash import remote_copy


@contextlib.contextmanager
def running() -> Iterator[None]:
  """Runs TPU kernels where they are: on a TPU, else in the interpreter."""
  if jax.default_backend() == "tpu":
    yield
    return
  # The interpreter numbers barrier semaphores by int16.
  with (mock.patch.object(remote_copy, "END_BARRIERS", 2**15),
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode="eager"))):
    yield
