# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Transfers of runs of tokens whose number is known only while a TPU kernel runs.

A transfer has a static size. A run is cut into as few as possible; semaphores count bytes, so that
a run may be awaited in other parts than it was started in.
"""

import functools
from typing import Any, Callable

from jax.experimental import pallas as pl

Index = Any  # int, or a traced int32


def by_sizes(count: Index, most: int, available: int,
             transfer: Callable[[Index, int], None]) -> None:
  """Calls `transfer` for parts of a run: one if it has one token or `most`, else powers of two.

  Args:
    count: tokens of the run, at most `most`; 0: nothing is called.
    most: tokens of the longest run.
    available: tokens of the array, at least `count`.
    transfer: given the first token of a part, counted from the run's first one, and its size.
  """
  pl.when(count == 1)(lambda: transfer(0, 1))
  if 1 < most <= available:
    pl.when(count == most)(lambda: transfer(0, most))
  largest = min(most - 1, available)
  if largest > 1:
    @pl.when((count > 1) & (count < most))
    def _() -> None:
      powers_of_two(count, largest, transfer)


def powers_of_two(count: Index, most: int, transfer: Callable[[Index, int], None]) -> None:
  """Calls `transfer` for the bits of a count that is at most `most`, the smallest first."""
  for bit in range(most.bit_length()):
    before = count & ((1 << bit) - 1)
    pl.when((count >> bit) & 1 == 1)(functools.partial(transfer, before, 1 << bit))
