"""The blocks that a block of threads visits, as a kernel reads them from global memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import block_map as blocks


class Line(NamedTuple):
  """The number start + slope * row of every row: nothing to wait for, unlike memory."""

  slope: int
  start: int


jax.tree_util.register_static(Line)


class Visits(NamedTuple):
  """A `masks.blocks.BlockMap`, or a running kernel's references to it."""

  indices: Any  # int32 [B or 1, H or 1, n, L]; None: the m-th block to visit is block m
  num_full: Any  # int32 [B or 1, H or 1, n], or a Line
  num_visited: Any  # int32 [B or 1, H or 1, n], or a Line

  def of(self, batch, head, row) -> "Row":
    """What row block `row` of a batch row and a head visits."""
    return Row(lambda n: self.block(batch, head, row, n),
               *(_number(x, (batch, head, row)) for x in (self.num_full, self.num_visited)))

  def block(self, batch, head, row, n):
    """The n-th block that a row visits."""
    return n if self.indices is None else self.indices[(*_at(self.indices, (batch, head, row)), n)]

  def any_of(self, flags, first, rows: int):
    """Whether a flag is set among the first blocks that a row visits; outside of kernels.

    Args:
      flags: bool [B, H, column blocks].
      first: how many of a row count: `num_full` or `num_visited`.
      rows: number of row blocks.

    Returns:
      bool [B, H, rows].
    """
    if isinstance(first, Line):
      first = first.start + first.slope * jnp.arange(rows, dtype=jnp.int32)[None, None]
    if self.indices is None:
      set_before = jnp.pad(jnp.cumsum(flags.astype(jnp.int32), -1), ((0, 0), (0, 0), (1, 0)))
      shape = *flags.shape[:2], rows
      return jnp.take_along_axis(set_before, jnp.broadcast_to(first, shape), -1) > 0
    found = jnp.take_along_axis(flags[:, :, None], self.indices, -1)
    return (found & (jnp.arange(found.shape[-1]) < first[..., None])).any(-1)


class Row(NamedTuple):
  """The blocks of one row; numbers are int32."""

  block: Any  # n -> the n-th block to visit
  num_full: Any  # the first so many need no mask
  num_visited: Any


def _at(ref, place):
  batch, head, row = place
  return batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0, row


def _number(x, place):
  if isinstance(x, Line):
    return place[2] * np.int32(x.slope) + np.int32(x.start)
  return x[_at(x, place)]


def visits_of(block_map: blocks.BlockMap) -> Visits:
  """Arrays for a kernel; none where they would say nothing."""
  indices, counts = block_map.indices, block_map.num_visited
  if isinstance(indices, np.ndarray):
    number = np.arange(indices.shape[-1])
    if ((indices == number) | (number >= counts[..., None])).all():
      indices = None
  return Visits(None if indices is None else jnp.asarray(indices),
                _line_or_array(block_map.num_full), _line_or_array(counts))


def _line_or_array(x):
  """A Line where all batch rows and heads have the same one."""
  if isinstance(x, np.ndarray):
    start, slope = int(x[0, 0, 0]), int(x[0, 0, 1] - x[0, 0, 0]) if x.shape[2] > 1 else 0
    if (x == start + slope * np.arange(x.shape[2])).all():
      return Line(slope, start)
  return jnp.asarray(x)
