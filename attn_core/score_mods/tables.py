# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables by distance in kernels that look nothing up: their numbers are laid out before, and added.

A kernel lays them out along the diagonals of its tiles, in a line for each row, or, where positions
are in no order, one for each of a few queries and each key.
"""

from typing import Callable, Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.masks.mask import Coordinates
from attn_core.score_mods import terms
from attn_core.score_mods.score_mod import Composed, ScoreMod, chain, of_structure
from attn_core.types import NO_SCORE_MOD, cdiv


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


def along(values: jax.Array, first: int, bases: jax.Array, apart: range) -> jax.Array:
  """Returns the numbers at some distances: float32 [B or 1, H or 1, pairs, len(apart)].

  They are slices of repeated ends, not look-ups, so that the derivative adds no numbers one by one.

  Args:
    values: [B or 1, H or 1, n], of distances from `first` on; others are clipped to the ends.
    first: the first distance.
    bases: int32 [B or 1, pairs], to which `apart` is added.
    apart: evenly spaced.
  """
  values, last, step, length = (
      values.astype(jnp.float32), values.shape[2] - 1, apart.step, len(apart))
  # Bases beyond which all numbers are equal, so that no place is beyond int32.
  reach, limits = max(abs(apart[0]), abs(apart[-1])) + 1, np.iinfo(np.int32)
  ends = (np.int32(np.clip(x, limits.min, limits.max))
          for x in (first - reach, first + last + reach))
  starts = jnp.clip(bases, *ends) - np.int32(first) + np.int32(apart.start)
  if step < 0:
    values, starts, step = values[:, :, ::-1], np.int32(last) - starts, -step
  return jnp.stack([
      _row(*_strided(values, starts[:, n], step), length) for n in range(starts.shape[1])], 2)


def _strided(values: jax.Array, start: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
  """Returns (values, start [B or 1]) of which places 1 apart are those `step` apart."""
  if step == 1:
    return values, start
  heads, count = values.shape[1:]
  number = cdiv(count - 1, step) + 2  # the first and the last are beyond the ends
  padded = jnp.pad(values, ((0, 0), (0, 0), (step, number * step - count)), mode="edge")
  whole, rest = jnp.divmod(start, np.int32(step))
  found = _slices(padded, rest, number * step)
  return found.reshape(found.shape[0], heads, number, step)[..., 0], whole + np.int32(1)


def _row(values: jax.Array, start: jax.Array, length: int) -> jax.Array:
  """Returns numbers [B or 1, H or 1, length] from the place start [B or 1] on."""
  padded = jnp.pad(values, ((0, 0), (0, 0), (length, length)), mode="edge")
  most = np.int32(length + values.shape[2])
  return _slices(padded, jnp.clip(start + np.int32(length), 0, most), length)


def _slices(x: jax.Array, starts: jax.Array, size: int) -> jax.Array:
  """Returns x[b, :, starts[b]:starts[b] + size], for x and starts of B or 1 batch rows."""
  if starts.shape[0] == 1:
    return lax.dynamic_slice_in_dim(x, starts[0], size, 2)
  cut = lambda x, start: lax.dynamic_slice_in_dim(x, start, size, 1)
  return jax.vmap(cut, (0 if x.shape[0] > 1 else None, 0))(x if x.shape[0] > 1 else x[0], starts)
