# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rest of a custom predicate after its look-ups, which `arguments.mask_lookups` has done."""

from typing import Callable

from attn_core.masks.mask import (BATCH, KEY, QUERY, Array, Booleans, Bounds, Coordinates, Grid,
                                  Mask)
from attn_core.masks.values import value_dataclass


@value_dataclass
class LookedUp(Mask):
  """A custom predicate without its look-ups, whose results are arrays.

  predicate(batch, head, query position, key position, rows, queries, keys), elementwise.
  """

  predicate: Callable[..., Booleans]
  rows: tuple[Array, ...]
  queries: tuple[Array, ...]
  keys: tuple[Array, ...]
  roles = {"rows": BATCH, "queries": QUERY, "keys": KEY}

  def visible(self, at: Coordinates) -> Booleans:
    return self.predicate(at.batch, at.head, at.query_position, at.key_position, self.rows,
                          self.queries, self.keys)

  def bounds(self, grid: Grid) -> Bounds:
    everything = grid.xp.ones((1, 1, 1, 1), bool)
    return everything, ~everything
