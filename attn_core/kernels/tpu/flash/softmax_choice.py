# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of the form of the softmax that a step of the forward computes.

It is the naive one until that fails. The choice is made while the kernel runs, and lies in scalar
memory from step to step. It is kept from head to head of a batch row, so that the worst numbers
cost one naive step in SAFE_STEPS. Every batch row begins with the naive softmax, so that its
results do not depend on other batch rows, and so does every half of a row's work, which may run on
another core.
"""

from typing import Any, Callable, NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.tpu.flash.schedule import Tiling
from attn_core.kernels.tpu.flash.tile_inputs import Index

Ref = Any  # a Pallas reference

# After the naive softmax has failed, it is tried again in the first row of blocks that starts
# after this many steps.
SAFE_STEPS = 32
# Words in scalar memory; after these, whether a block of keys was looked at, for each.
_SAFE_LEFT, _BUFFER, _LARGE, _SHIELDED, _STAMP, _BLOCKS = range(6)


def num_words(tiling: Tiling) -> int:
  """Returns the length of `SoftmaxChoice.words`."""
  return _BLOCKS + tiling.key_blocks


class SoftmaxChoice(NamedTuple):
  """State in scalar memory."""

  words: Ref  # int32 [num_words]

  def begin_step(self, program_ids: tuple, sizes: tuple[int, int, Index],
                 first: jax.Array) -> None:
    """Updates the state at the begin of a step.

    Args:
      program_ids: see `KernelRefs.program_ids`.
      sizes: numbers of head groups, of halves and of steps.
      first: whether a row of blocks begins.
    """
    b, h, half, part, n = program_ids
    del part  # forwards have one
    groups, halves, steps = sizes
    # The memory holds anything at first, on each of two cores that share a grid: only what the
    # step before this one has left counts. The size of the grid tells another launch apart.
    stamp = ((b * groups + h) * halves + half) * steps + n + groups * halves * steps * 7919
    begins = (n == 0) if halves > 1 else (n == 0) & (h == 0)
    continues = (self.words[_STAMP] == stamp - 1) & jnp.logical_not(begins)
    left = jnp.where(continues, self.words[_SAFE_LEFT], 0)
    self.words[_STAMP] = stamp
    self.words[_SAFE_LEFT] = jnp.where(left > 1, left - 1, jnp.where(first, 0, left))
    self.words[_SHIELDED] = 0

    @pl.when(n == 0)
    def _() -> None:
      self.words[_BUFFER] = 0
      self.words[_LARGE] = 0
      @pl.loop(_BLOCKS, self.words.shape[0])
      def clear(block: jax.Array) -> None:
        self.words[block] = 0

  def look_at_block(self, block: jax.Array, visible: jax.Array, is_large: Callable[[], jax.Array],
                    is_nonfinite: Callable[[], jax.Array]) -> None:
    """Finds numbers of a block of keys for which a sum of weights in range says nothing.

    Args:
      block: number of the block.
      visible: whether the step reads it.
      is_large: tells whether the block may have such numbers; asked once for each block.
      is_nonfinite: tells whether it has numbers that are not finite.
    """
    @pl.when(visible & self._is_new(block))
    def _() -> None:
      self.words[_BLOCKS + block] = 1
      self.words[_LARGE] |= is_large().astype(jnp.int32)

    @pl.when(visible & (self.words[_LARGE] != 0))
    def _() -> None:
      self.words[_SAFE_LEFT] = SAFE_STEPS
      self.words[_SHIELDED] = is_nonfinite().astype(jnp.int32)

  def _is_new(self, block: jax.Array) -> jax.Array:
    """Returns whether a block was not looked at for these heads."""
    return self.words[_BLOCKS + block] == 0

  @property
  def tries_naive(self) -> jax.Array:
    """Whether this step begins with the naive softmax."""
    return self.words[_SAFE_LEFT] == 0

  def after_naive(self, failed: jax.Array) -> None:
    """Notes whether the naive softmax of this step failed."""
    self.words[_SAFE_LEFT] = jnp.where(failed, SAFE_STEPS, 0)

  @property
  def is_safe(self) -> jax.Array:
    """Whether this step needs the safe softmax."""
    return (self.words[_SAFE_LEFT] > 0) & (self.words[_SHIELDED] == 0)

  @property
  def is_shielded(self) -> jax.Array:
    """Whether this step needs the shielded softmax."""
    return self.words[_SHIELDED] != 0

  def shield(self) -> None:
    """Makes this step need the shielded softmax."""
    self.words[_SHIELDED] = 1

  @property
  def buffer(self) -> jax.Array:
    """The number of the buffer, of two, that holds the running softmax."""
    return self.words[_BUFFER]

  def swap_buffers(self) -> None:
    """Makes the other buffer the one that holds the running softmax."""
    self.words[_BUFFER] = 1 - self.words[_BUFFER]
