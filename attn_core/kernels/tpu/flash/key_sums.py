# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cotangents of keys and values to which a backward comes back: sums in HBM.

Several ranges of queries, and several parts of the query heads of a key head, add to the same block
of keys, at different times. The first of these visits writes its sum to HBM, and later ones read it
back and add their own. The transfers overlap with computation: a sum is read in the first step of a
visit, after its products, and added in its last; its write ends before the products of the next
visit's first step do.
"""

from typing import Any, Callable, NamedTuple, Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels.tpu.flash import call, step_list
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, KernelRefs, TokenBlocks, TokenRange)

Ref = Any  # a Pallas reference
SEMAPHORES = 2  # of a kernel: one for each array


class KeySums(NamedTuple):
  """The sums of d_key and d_value."""

  blocks: tuple[TokenBlocks, ...]  # of d_key and d_value
  halves: int  # see `schedule.Tiling`: each has sums of its own

  @property
  def outputs(self) -> list[call.Output]:
    """The outputs of the kernel, which stay in HBM: those of the halves along the batch."""
    return [call.Output((x.shape[0] * self.halves, *x.shape[1:]), jnp.float32, x.block_shape, None)
            for x in self.blocks]

  def unpack(self, found: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds the sums of the halves; returns d_key [B, padded_keys, K, D] and d_value likewise."""
    halves = [x.reshape(-1, self.halves, *x.shape[1:]) for x in found]
    return [block.unpack(sum((x[:, n] for n in range(1, self.halves)), x[:, 0]))
            for block, x in zip(self.blocks, halves)]

  @property
  def scratch(self) -> list[tuple[int, ...]]:
    """Shapes of the scratch memory: a block on its way to or from HBM."""
    return [x.block_shape for x in self.blocks]

  def add(self, refs: KernelRefs, grid: GridIndex, flags: jax.Array,
          total: Callable[[int, int], jax.Array], outputs: Sequence[Ref],
          scratch: Sequence[Ref]) -> None:
    """Adds the sums of a visit, after the products of every step.

    Args:
      refs: of the kernel.
      grid: position of the step.
      flags: see `step_list.Schedule`.
      total: maps (0 for d_key and 1 for d_value, key head of the step) to [keys, D or E], the sum
        of this visit so far.
      outputs: references of `outputs`.
      scratch: references of `scratch`, then of the semaphores.
    """
    *buffers, arrived = scratch
    half, part, n = refs.program_ids[2:]
    rows = grid._replace(batch=grid.batch * self.halves + half)
    places = [output.at[block.block_slices(*rows)] for block, output in zip(self.blocks, outputs)]
    reads = [pltpu.make_async_copy(place, buffer, arrived.at[k])
             for k, (place, buffer) in enumerate(zip(places, buffers))]
    writes = [pltpu.make_async_copy(buffer, place, arrived.at[k])
              for k, (place, buffer) in enumerate(zip(places, buffers))]
    is_first, is_last = ((flags & flag) != 0 for flag in (step_list.FIRST, step_list.LAST))
    is_new = ((flags & step_list.NEW) != 0) & (part == 0)

    def for_all(copies: Sequence[Any], what: str) -> None:
      for copy in copies:
        getattr(copy, what)()

    @pl.when(is_first & (n > 0))
    def _() -> None:
      for_all(writes, "wait")  # of the visit before

    @pl.when(is_first & ~is_new)
    def _() -> None:
      for_all(reads, "start")

    @pl.when(is_last & ~is_new)
    def _() -> None:
      for_all(reads, "wait")

    @pl.when(is_last)
    def _() -> None:
      for number, (block, buffer) in enumerate(zip(self.blocks, buffers)):
        for head in range(block.block_heads):
          slices = block.slices(head, TokenRange(0, block.block_length))
          before = jnp.where(is_new, 0.0, buffer[slices])
          buffer[slices] = before + total(number, head)
      for_all(writes, "start")

    @pl.when(n == refs.num_steps - 1)
    def _() -> None:
      for_all(writes, "wait")
