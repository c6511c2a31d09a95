# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The list of blocks that a thread block visits, as a kernel reads it from global memory."""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import block_map as block_map_lib

Index = tuple[Any, Any, Any]  # batch row, head, row block


class AffineCount(NamedTuple):
  """A count per row, start + slope * row, which is computed instead of loaded."""

  slope: int
  start: int


jax.tree_util.register_static(AffineCount)


class RowBlocks(NamedTuple):
  """The blocks that one row block visits; numbers are int32."""

  block: Callable[[jax.Array], jax.Array]  # n -> the n-th block to visit
  num_full: jax.Array  # the first ones, which need no mask
  num_visited: jax.Array


class BlockList(NamedTuple):
  """A `masks.block_map.BlockMap` as arrays, or a kernel's references to them."""

  # int32 [B or 1, H or 1, num_row_blocks, max_visited]; None: the n-th block to visit is block n.
  indices: Any
  num_full: Any  # int32 [B or 1, H or 1, num_row_blocks], or an AffineCount
  num_visited: Any  # int32 [B or 1, H or 1, num_row_blocks], or an AffineCount

  @property
  def is_count_known(self) -> bool:
    """Whether all row blocks visit the same number of blocks, known without the arrays."""
    return isinstance(self.num_visited, AffineCount) and self.num_visited.slope == 0

  def row_blocks(self, batch: Any, head: Any, row: Any) -> RowBlocks:
    """Returns the blocks that row block `row` of a batch row and a head visits."""
    return RowBlocks(lambda n: self.block(batch, head, row, n),
                     *(_count(x, (batch, head, row)) for x in (self.num_full, self.num_visited)))

  def block(self, batch: Any, head: Any, row: Any, n: jax.Array) -> jax.Array:
    """Returns the n-th block that a row block visits."""
    if self.indices is None:
      return n
    return self.indices[(*_broadcast_index(self.indices, (batch, head, row)), n)]

  def any_of(self, flags: jax.Array, first: Any, rows: int) -> jax.Array:
    """Returns whether a flag is set among the first blocks of a row block; outside of kernels.

    Args:
      flags: bool [B, H, num_column_blocks].
      first: the number of blocks to consider: `num_full` or `num_visited`.
      rows: number of row blocks.

    Returns:
      bool [B, H, rows].
    """
    if isinstance(first, AffineCount):
      first = first.start + first.slope * jnp.arange(rows, dtype=jnp.int32)[None, None]
    if self.indices is None:
      set_before = jnp.pad(jnp.cumsum(flags.astype(jnp.int32), -1), ((0, 0), (0, 0), (1, 0)))
      shape = *flags.shape[:2], rows
      return jnp.take_along_axis(set_before, jnp.broadcast_to(first, shape), -1) > 0
    found = jnp.take_along_axis(flags[:, :, None], self.indices, -1)
    number = jnp.arange(found.shape[-1], dtype=jnp.int32)
    return (found & (number[None, None, None] < first[..., None])).any(-1)


def _broadcast_index(ref: Ref, index: Index) -> Index:
  """Returns the index into an array whose first two axes may have length 1."""
  batch, head, row = index
  return batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0, row


def _count(x: Any, index: Index) -> jax.Array:
  if isinstance(x, AffineCount):
    return index[2] * np.int32(x.slope) + np.int32(x.start)
  return x[_broadcast_index(x, index)]


def make_block_list(block_map: block_map_lib.BlockMap) -> BlockList:
  """Returns the arrays for a kernel; no arrays where they would be trivial."""
  indices, counts = block_map.indices, block_map.num_visited
  if isinstance(indices, np.ndarray):
    number = np.arange(indices.shape[-1])
    if ((indices == number) | (number >= counts[..., None])).all():
      indices = None
  return BlockList(None if indices is None else jnp.asarray(indices),
                   _affine_or_array(block_map.num_full), _affine_or_array(counts))


def _affine_or_array(x: np.ndarray | jax.Array) -> AffineCount | jax.Array:
  """Returns an AffineCount where all batch rows and heads have the same one."""
  if isinstance(x, np.ndarray):
    start, slope = int(x[0, 0, 0]), int(x[0, 0, 1] - x[0, 0, 0]) if x.shape[2] > 1 else 0
    if (x == start + slope * np.arange(x.shape[2])).all():
      return AffineCount(slope, start)
  return jnp.asarray(x)
