"""The blocks that a block of threads visits, as a kernel reads them from global memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from attn_core.masks import blocks


class Visits(NamedTuple):
  """A `masks.blocks.BlockMap`, or a running kernel's references to it."""

  indices: Any  # int32 [B or 1, H or 1, n, L]; None: the m-th block to visit is block m
  num_full: Any  # int32 [B or 1, H or 1, n]
  num_visited: Any  # int32 [B or 1, H or 1, n]

  def of(self, batch, head, row) -> "Row":
    """What row block `row` of a batch row and a head visits."""
    line = self._line(batch, head, row)
    return Row(lambda n: self.block(batch, head, row, n), self.num_full[line],
               self.num_visited[line])

  def block(self, batch, head, row, n):
    """The n-th block that a row visits."""
    return n if self.indices is None else self.indices[(*self._line(batch, head, row), n)]

  def _line(self, batch, head, row):
    rows, heads = self.num_full.shape[:2]
    return batch if rows > 1 else 0, head if heads > 1 else 0, row


class Row(NamedTuple):
  """The blocks of one row; numbers are int32."""

  block: Any  # n -> the n-th block to visit
  num_full: Any  # the first so many need no mask
  num_visited: Any


def visits_of(block_map: blocks.BlockMap) -> Visits:
  """Arrays for a kernel; no list where it would say nothing."""
  indices, counts = block_map.indices, block_map.num_visited
  if isinstance(indices, np.ndarray):
    number = np.arange(indices.shape[-1])
    if ((indices == number) | (number >= counts[..., None])).all():
      indices = None
  return Visits(*(None if x is None else jnp.asarray(x)
                  for x in (indices, block_map.num_full, counts)))
