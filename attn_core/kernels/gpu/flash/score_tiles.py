# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score mod of a tile in the GPU kernels: traced into them, on scores in registers.

What depends on distances alone is loaded from rows of numbers that XLA shifts by one each, of which
every tile is a slice. Some operations have another form there (`score_forms`).
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core import operations
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import score_forms
from attn_core.masks import block_map, mask as mask_lib
from attn_core.masks.values import value_dataclass
from attn_core.score_mods import evaluate, forms, score_mod, tables, terms
from attn_core.score_mods.score_mod import ScoreMod, ScoreTile
from attn_core.types import AttentionSpec, PagedSpec


class Numbers(NamedTuple):
  """The numbers that a score mod reads at a tile."""

  arrays: tuple[jax.Array, ...]  # float32, of the tile's shape, or numbers
  at: mask_lib.Coordinates | None  # of the tile's shape, batch row and head numbers; None: not read


class Modified(NamedTuple):
  """Scores after a score mod, of the tile's shape."""

  scores: jax.Array
  slope: jax.Array | None  # a derivative of theirs; None: 1, or not asked for


_ZERO = np.int32(0)
_NOWHERE = mask_lib.Coordinates(_ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO)
# Of derivatives that are not by an array of a number: by the scaled scores, or by the bias, which
# is added after a soft cap of the call.
SCORES, BIAS = -1, -2
RUN_TOKENS = 128  # of which runs of positions are multiples, if there are several


def apply(spec: AttentionSpec | PagedSpec, numbers: Numbers, scores: jax.Array, *,
          by: int | None = None, slope: jax.Array | None = None) -> Modified:
  """Returns float32 scores after the score mod of a spec.

  Args:
    spec: what is computed.
    numbers: those of the tile.
    scores: of the tile's shape.
    by: of the derivative: the number of an array, SCORES or BIAS; None: no derivative.
    slope: the derivative of `scores`; None: 1. The first operation multiplies it: kept until after
      the last, it would take one register more for each pair of a thread.
  """
  term = _in_kernel(tables.as_added(score_mod.of_structure(spec.score_mod)), spec)
  structure, of_scores = jax.tree.structure(term), by in (SCORES, BIAS)

  def modify(scores: jax.Array, numbers: Numbers, _: jax.Array | None) -> jax.Array:
    term: ScoreMod = jax.tree.unflatten(structure, numbers.arrays)
    return term.apply(scores, ScoreTile(_NOWHERE if numbers.at is None else numbers.at, 1))

  def both(scores: jax.Array, numbers: Numbers,
           slope: jax.Array | None) -> tuple[jax.Array, ...]:
    def of(x: jax.Array) -> jax.Array:
      if of_scores:
        return modify(x, numbers, None)
      arrays = tuple(x if n == by else y for n, y in enumerate(numbers.arrays))
      return modify(scores, numbers._replace(arrays=arrays), None)
    x = scores if by is None or of_scores else numbers.arrays[by]
    return jax.jvp(of, (x,), (jnp.ones_like(x) if slope is None else slope,))

  arguments = scores, numbers, slope
  is_one = by is None or of_scores and term.is_additive
  traced = jax.make_jaxpr(modify if is_one else both)(*arguments)
  found = operations.evaluate(
      traced.jaxpr, traced.consts, jax.tree.leaves(arguments), forms.binder(score_forms.FORMS))
  return Modified(found[0], slope if is_one else found[1])


def is_consecutive(spec: AttentionSpec | PagedSpec) -> bool:
  """Whether positions are consecutive, those of queries and those of keys."""
  return isinstance(spec, PagedSpec) or evaluate.is_consecutive(mask_lib.of_structure(spec.mask))


def runs_of(spec: AttentionSpec) -> evaluate.Runs:
  """Returns the runs that positions form, which tables by distance need to be known."""
  runs = evaluate.runs_of(mask_lib.of_structure(spec.mask))
  assert runs is not None
  return runs


def reads_positions(spec: AttentionSpec | PagedSpec) -> bool:
  return score_mod.of_structure(spec.score_mod).reads_positions


class Distances(NamedTuple):
  """Where the numbers of a tile lie in rows of numbers by distance; see `shifted`."""

  sizes: block_map.Sizes  # of the kernel
  transposed: bool  # whether the rows of a tile are keys
  runs: evaluate.Runs  # of positions

  @property
  def run(self) -> tuple[int, int]:
    """The queries and the keys of a run, those of whole blocks."""
    sizes, runs = self.sizes, self.runs
    queries, keys = (sizes.num_query_blocks * sizes.block_q, sizes.num_key_blocks * sizes.block_kv)
    return queries // runs.queries, keys // runs.keys

  @property
  def length(self) -> int:
    """The columns of a pair of runs."""
    return sum(self.run)

  @property
  def offset(self) -> int:
    """The column at which the first tile of a pair of runs begins."""
    return self.run[self.transposed]

  def first_column(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the column where the tile of a first query and a first key begins."""
    first = (query - key if self.transposed else key - query) + np.int32(self.offset)
    if self.runs.queries == self.runs.keys == 1:
      return first
    (of_query, of_key), (queries, keys) = (
        (lax.div(x, np.int32(n)) for x, n in zip((query, key), self.run)), self.run)
    moved = of_query * queries - of_key * keys
    pair = of_query * self.runs.keys + of_key
    return first + (-moved if self.transposed else moved) + pair * self.length


def shifted(term: terms.Distance, values: jax.Array, bases: jax.Array,
            at: Distances) -> jax.Array:
  """Returns rows of numbers by distance, each shifted by one: every tile is a slice of them.

  Args:
    term: the kind of term.
    values: its array, [B or 1, H or 1, n].
    bases: int32 [B or 1, pairs of runs], the first distance of each pair.
    at: where the numbers of a tile lie.

  Returns:
    float32 [B or 1, H or 1, rows of a tile, pairs of runs * (padded T + padded S) of a run]: linear
    in the lengths.
  """
  sizes = at.sizes
  if at.runs.queries * at.runs.keys > 1:  # no tile has numbers of two runs
    assert not at.run[0] % sizes.block_q and not at.run[1] % sizes.block_kv, (at.run, sizes)
  tile_rows = mosaic.WGMMA_ROWS if at.transposed else max(mosaic.WGMMA_ROWS, sizes.block_q // 2)
  # Row r, column j: the same number along every diagonal j - r.
  step = -at.runs.stride if at.transposed else at.runs.stride
  lowest = 1 - tile_rows - at.offset
  line = tables.along(values, term.first, bases, range(
      step * lowest, step * (at.length - at.offset), step))
  found = jnp.stack([lax.slice_in_dim(line, start, start + at.length, axis=3)
                     for start in range(tile_rows - 1, -1, -1)], 2)
  return found.reshape(*found.shape[:3], -1)


def _in_kernel(term: ScoreMod, spec: AttentionSpec | PagedSpec) -> ScoreMod:
  """Returns the form of a term in the kernels."""
  if isinstance(term, score_mod.Composed):
    return score_mod.Composed(*(_in_kernel(x, spec) for x in (term.first, term.second)))
  if isinstance(term, terms.Slope) and is_consecutive(spec):
    return _Slope(term.symmetric, term.slopes)
  return _Cap(term.cap) if isinstance(term, terms.Cap) else term


@value_dataclass
class _Slope(terms.PositionTerm):
  """A `Slope` at consecutive positions, converted before they are subtracted: once a row.

  Rounding to 24 bits is exact for those of keys, and changes others as little as their distance.
  """

  symmetric: bool
  slopes: jax.Array
  roles = {"slopes": score_mod.PAIR}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    key, query = (x.astype(score.dtype) for x in (tile.at.key_position, tile.at.query_position))
    distance = -abs(key - query) if self.symmetric else key - query
    return score + self.slopes * distance


@value_dataclass
class _Cap(terms.Term):
  """cap * tanh(score / cap)."""

  cap: float

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    return _cap(score, self.cap)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cap(score: jax.Array, cap: float) -> jax.Array:
  return score_forms.capped(score, 1.0, cap)[0]


@_cap.defjvp
def _cap_jvp(cap: float, primals: tuple[jax.Array],
             tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
  value, slope = score_forms.capped(primals[0], 1.0, cap)
  return value, slope * tangents[0]
