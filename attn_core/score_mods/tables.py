# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables by distance in kernels that look nothing up: their numbers are laid out before, and added.

A kernel lays them out along the diagonals of its tiles, in a line for each row, or, where positions
are in no order, one for each of a few queries and each key.
"""

from typing import Callable, Sequence

import jax
import jax.numpy as jnp

from attn_core.masks.mask import Coordinates
from attn_core.score_mods import terms
from attn_core.score_mods.score_mod import Composed, ScoreMod, chain, of_structure
from attn_core.types import NO_SCORE_MOD


def find(structure: jax.tree_util.PyTreeDef) -> dict[int, terms.Distance]:
  """Returns the terms that look up a number for each distance, by the number of their array."""
  if structure == NO_SCORE_MOD:
    return {}
  return {number: x for x in chain(of_structure(structure)) if isinstance(x, terms.Distance)
          for number in jax.tree.leaves(x)}


def as_added(term: ScoreMod) -> ScoreMod:
  """Returns a term that adds its arrays in place of looking numbers up in them."""
  if isinstance(term, Composed):
    return Composed(as_added(term.first), as_added(term.second))
  return terms.Add(term.values) if isinstance(term, terms.Distance) else term


def written_out(structure: jax.tree_util.PyTreeDef, arrays: Sequence[jax.Array],
                at: Coordinates) -> tuple[jax.tree_util.PyTreeDef, tuple[jax.Array, ...]]:
  """Returns a term with a number for each of the few queries and each key in place of tables.

  Args:
    structure: of the term.
    arrays: of the term.
    at: positions [B or 1, 1, T or 1, 1] and [B or 1, 1, 1, S or 1].
  """
  def look_up(table: jax.Array, first: int) -> jax.Array:
    distance = (at.key_position - at.query_position)[:, 0] - first
    rows = max(table.shape[0], distance.shape[0])
    table, distance = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (table, distance))
    of_row = lambda table, distance: table[:, jnp.clip(distance, 0, table.shape[1] - 1)]
    return jax.vmap(of_row)(table, distance)

  found = find(structure)
  return jax.tree.structure(as_added(of_structure(structure))), tuple(
      look_up(x, found[n].first) if n in found else x for n, x in enumerate(arrays))


def lines(table: jax.Array, block_q: int, sizes: tuple[int, int],
          rows_of: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Returns float32 [1, key_heads, block_q, G, length]: a line of numbers for each row of a block.

  A row is a query and a query head. Number n of a line is that of the distance n - before of a key
  to the first query, counted from the first of the table and moved by the place of the row's own
  query: for consecutive keys all rows read the same part of their lines. Beyond the table a line
  repeats its ends.

  Args:
    table: [1, H or 1, n].
    block_q: queries of a block, at consecutive positions.
    sizes: (before, length).
    rows_of: maps [1, H or 1, 1, width] to [1, key_heads, block_q, G, width].
  """
  before, length = sizes
  wide = jnp.pad(table.astype(jnp.float32), ((0, 0), (0, 0), (before + block_q, length)),
                 mode="edge")
  rows = rows_of(wide[:, :, None])
  return jnp.stack([rows[:, :, q, :, block_q - q:block_q - q + length] for q in range(block_q)], 2)
