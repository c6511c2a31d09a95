# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rest of a custom predicate after its look-ups, which `arguments.mask_lookups` has done."""

from typing import Callable

import jax
import numpy as np

from attn_core.masks import intervals
from attn_core.masks.mask import (BATCH, DENSE, KEY, QUERY, Array, Booleans, Bounds, Coordinates,
                                  Grid, Interval, Mask)
from attn_core.masks.values import value_dataclass


@value_dataclass
class LookedUp(Mask):
  """A custom predicate without its look-ups, whose results are int32 arrays.

  predicate(batch, head, query position, key position, rows, queries, keys, heads), elementwise;
  `heads` are numbers of a head, or of a head and a query or key.
  """

  predicate: Callable[..., Booleans]
  rows: tuple[Array, ...]
  queries: tuple[Array, ...]
  keys: tuple[Array, ...]
  heads: tuple[Array, ...]
  roles = {"rows": BATCH, "queries": QUERY, "keys": KEY, "heads": DENSE}

  def visible(self, at: Coordinates) -> Booleans:
    return self.predicate(at.batch, at.head, at.query_position, at.key_position, self.rows,
                          self.queries, self.keys, self.heads)

  def bounds(self, grid: Grid) -> Bounds:
    number = lambda x: Interval(*(x.reshape(-1, 1, 1, 1),) * 2)
    ranges = [*map(number, self.rows), *map(grid.reduce_query, self.queries),
              *map(grid.reduce_key, self.keys),
              *(_of_all_heads(x, grid) for x in self.heads)]
    return intervals.bounds(self.predicate, grid, self.numbers, ranges)

  @property
  def numbers(self) -> object:
    """The types of the predicate's numbers of one pair."""
    number = jax.ShapeDtypeStruct((), np.int32)
    return jax.tree.map(lambda _: number, (self.rows, self.queries, self.keys, self.heads))


def _of_all_heads(x: Array, grid: Grid) -> Interval:
  """Returns the interval of the numbers [B or 1, H or 1, T or 1, S or 1] of a block."""
  ends = x.min(1), x.max(1)
  if x.shape[2] != 1:  # it may be symbolic
    ends = grid.reduce_query(ends[0][:, :, 0]).low, grid.reduce_query(ends[1][:, :, 0]).high
  elif x.shape[3] != 1:
    ends = grid.reduce_key(ends[0][:, 0]).low, grid.reduce_key(ends[1][:, 0]).high
  else:
    ends = ends[0][:, None], ends[1][:, None]
  return Interval(*ends)
