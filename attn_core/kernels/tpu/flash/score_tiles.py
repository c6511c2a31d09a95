# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score mod of a tile in the TPU kernels: traced into them, on scores [keys, queries].

The cotangents of its arrays are sums over the keys or the queries of a tile, or over its diagonals
(`mod_sums`). Those of an array with a number for every pair come from another kernel, as that of
the bias does.
"""

import math
from typing import Callable, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands
from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.tpu.flash import (
    call, depth_columns, diagonals, mask_tiles, scalar_memory, tile_inputs)
from attn_core.kernels.tpu.flash.schedule import LANES, Tiling
from attn_core.kernels.tpu.flash.tile_inputs import GridIndex, KernelRefs, TileIndex
from attn_core.masks import mask as mask_lib
from attn_core.masks.values import value_dataclass
from attn_core.score_mods import evaluate, forms, score_mod, terms, traceable
from attn_core.score_mods.score_mod import ScoreMod, ScoreTile
from attn_core.types import AttentionSpec, Operands, mod_names

Arrays: TypeAlias = dict[int, jax.Array]  # by the number of an array of the score mod


class ModReader(NamedTuple):
  """Readers of the arrays of a score mod, which evaluate it on one tile."""

  structure: jax.tree_util.PyTreeDef  # of the term, which adds what depends on distances alone
  readers: tuple[tile_inputs.Reader, ...]
  mask: mask_tiles.MaskReader
  by_distance: tuple[diagonals.Diagonals, ...]
  factor: float  # of the scores before and after; not 1 where the term adds to them only
  columns: depth_columns.SlopeColumns | None  # of a term that scores have already
  in_product: int | None  # the array of that term

  def prepare(self, refs: KernelRefs, grid: GridIndex, kinds: jax.Array) -> None:
    """Makes what tiles read by distance, and columns."""
    if self.columns is not None:
      self.columns.prepare(refs, grid)
    if self.by_distance:
      @pl.when(self.by_distance[0].band.at(True, refs, kinds))
      def _() -> None:
        for x in self.by_distance:
          x.make(refs, grid)

  @property
  def scratch(self) -> list[call.Scratch]:
    """The scratch memory."""
    tiles: list[call.Scratch] = [x.band.shape(x.num_heads) for x in self.by_distance]
    return tiles + ([] if self.columns is None else [*self.columns.scratch])

  def apply(self, refs: KernelRefs, tile: TileIndex, scores: jax.Array) -> jax.Array:
    """Returns scores [keys, queries] after the score mod."""
    return self._apply(refs, tile, scores, self._read(refs, tile), False)

  def _positions(self, refs: KernelRefs, tile: TileIndex) -> mask_lib.Coordinates:
    return evaluate.move_to_positions(*self.mask.coordinates(refs, tile))[0]

  def d_slopes(self, refs: KernelRefs, tile: TileIndex, sums: jax.Array) -> jax.Array:
    """Returns cotangents of the slopes of `columns`, one for each query, from those of a tile.

    Args:
      refs, tile: as in `apply`.
      sums: the product of `depth_columns.rows_of_keys` and the cotangents of the scores.
    """
    of_numbers = sums[:1] + sums[1:2]
    return of_numbers + sums[2:3] * _distances_of_first_key(self._positions(refs, tile))

  def _read(self, refs: KernelRefs, tile: TileIndex) -> list[jax.Array]:
    return [reader(refs, tile).astype(jnp.float32) for reader in self.readers]

  def _apply(self, refs: KernelRefs, tile: TileIndex, scores: jax.Array,
             arrays: list[jax.Array], pulls_back: bool) -> jax.Array:
    at = self._positions(refs, tile)
    # A function may compute what the scalar unit cannot.
    batch, head = (jnp.full((1, 1), x, jnp.int32) for x in (at.batch, at.head))
    term: ScoreMod = jax.tree.unflatten(self.structure, arrays)
    return term.apply(scores, ScoreTile(at._replace(batch=batch, head=head), 1, transposed=True,
                                        skips_zeros=pulls_back, forms=forms.COMMON))

  def pullback(self, refs: KernelRefs, tile: TileIndex, scores: jax.Array, wrt: tuple[int, ...],
               ) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, Arrays]]]:
    """Returns `apply`, and a function from cotangents to those of the scores and of arrays.

    Args:
      refs, tile, scores: as in `apply`.
      wrt: numbers of arrays, whose cotangents are [1, queries] or [keys, queries].
    """
    arrays = self._read(refs, tile)
    wide = lambda x: jnp.broadcast_to(x, (x.shape[0], tile.queries.length))
    def run(scores: jax.Array, moved: Arrays) -> jax.Array:
      return self._apply(refs, tile, scores, [moved.get(n, x) for n, x in enumerate(arrays)], True)
    logits, pull = jax.vjp(run, scores, {n: wide(arrays[n]) for n in wrt})
    return logits, lambda d_logits: pull(d_logits)


def mod_reader(inputs: tile_inputs.TileInputs, operands: Operands, spec: AttentionSpec,
               mask: mask_tiles.MaskReader) -> ModReader | None:
  """Adds the arrays of a score mod to the inputs of a kernel; None: the call has none."""
  if not spec.has_score_mod:
    return None
  term = score_mod.of_structure(spec.score_mod)
  # Scores and what is added to them are multiplied once, by all that exp2 needs.
  factor = LOG2E if term.is_additive else 1.0
  in_rows, pairs = terms_by_distance(spec), traceable.by_pair(spec.score_mod, operands.mods)
  readers: list[tile_inputs.Reader] = []
  by_distance: list[diagonals.Diagonals] = []
  in_product, columns = _slope_in_product(inputs, operands, spec), None
  for n, x in enumerate(operands.mods):
    x = x if n in pairs else x.astype(jnp.float32) * factor
    if n in in_rows:
      row = row_of(in_rows[n], x, operands, spec, inputs.tiling)
      by_distance.append(diagonals.add_diagonals(
          inputs, row, band_of(operands, spec, inputs.tiling), len(by_distance)))
      readers.append(by_distance[-1].read)
    elif n == in_product:
      base = evaluate.distance_of_first(mask_lib.of_structure(spec.mask))
      columns = depth_columns.slope_columns(
          inputs, operands.mods[n].reshape(x.shape[:2]), spec.softmax_scale,
          dense_operands.distances_of_runs(operands, spec)[:, 0] if base is None else base,
          len(in_rows))
      readers.append(columns.slopes)
    elif scalar_memory.is_per_head(x):
      readers.append(inputs.add_per_head(x.reshape(x.shape[:2])))
    elif n in pairs:
      readers.append(_scaled(inputs.add_per_pair(x), factor))
    else:
      readers.append(inputs.add_per_pair(x))
  structure = jax.tree.structure(_in_kernel(term, spec, in_product))
  return ModReader(structure, tuple(readers), mask, tuple(by_distance), factor, columns,
                   in_product)


def _scaled(read: tile_inputs.Reader, factor: float) -> tile_inputs.Reader:
  """Returns a reader of float32 numbers times a factor."""
  return lambda refs, tile: read(refs, tile).astype(jnp.float32) * factor


def band_of(operands: Operands, spec: AttentionSpec, tiling: Tiling) -> diagonals.Band:
  """Returns the block diagonals of which the kernels of a call keep tiles."""
  found = terms_by_distance(spec)
  if not found:
    return diagonals.Band(tiling, 0, 0)
  return diagonals.band_of(dense_operands.mask_of(operands, spec), tiling, len(found),
                           _ends(found, operands, spec, tiling))


def num_diagonals(operands: Operands, spec: AttentionSpec, tiling: Tiling) -> int:
  """Returns how many block diagonals of a call differ; 0: it has no tables by distance."""
  found = terms_by_distance(spec)
  return diagonals.different(dense_operands.mask_of(operands, spec), tiling,
                             _ends(found, operands, spec, tiling))[1] if found else 0


def _ends(found: dict[int, ScoreMod], operands: Operands, spec: AttentionSpec,
          tiling: Tiling) -> tuple[int, int] | None:
  """Returns `diagonals.ends` of all tables by distance; None: they are not known."""
  base, ends = evaluate.distance_of_first(mask_lib.of_structure(spec.mask)), []
  for number, x in found.items():
    if base is None or not isinstance(x, terms.Distance):
      return None
    ends.append(diagonals.ends(x.first, operands.mods[number].shape[2], base, tiling))
  return min(x for x, _ in ends), max(x for _, x in ends)


def terms_by_distance(spec: AttentionSpec) -> dict[int, ScoreMod]:
  """Returns the terms that add a number for each distance, by the number of their array."""
  if not (spec.has_score_mod and _runs(spec)):
    return {}
  found: dict[int, ScoreMod] = {}
  for x in score_mod.chain(score_mod.of_structure(spec.score_mod)):
    if (isinstance(x, terms.Distance)
        or isinstance(x, terms.Slope) and x.symmetric and _is_consecutive(spec)):
      number, = jax.tree.leaves(x)
      found[number] = x
  return found


def _slope_in_product(inputs: tile_inputs.TileInputs, operands: Operands,
                      spec: AttentionSpec) -> int | None:
  """Returns the number of the array of slopes that become columns of keys and queries."""
  term, tiling, (least, most) = (
      score_mod.of_structure(spec.score_mod), inputs.tiling, depth_columns.SCALES)
  adds_to_products = (term.is_additive and _is_consecutive(spec) and spec.logits_soft_cap is None
                      and least <= spec.softmax_scale <= most)
  are_free = (operands.query.dtype == operands.key.dtype == jnp.bfloat16
              and depth_columns.are_free(operands.query.shape[3], spec.matrix_depth)
              and max(tiling.block_q, tiling.block_kv) <= depth_columns.MOST_TOKENS)
  if not (adds_to_products and are_free):
    return None
  found = (jax.tree.leaves(x)[0] for x in score_mod.chain(term)
           if isinstance(x, terms.Slope) and not x.symmetric)
  return next(found, None)


def has_slopes(spec: AttentionSpec) -> bool:
  """Whether scores fall with distance, as with ALiBi."""
  return spec.has_score_mod and any(isinstance(x, terms.Slope) for x in score_mod.chain(
      score_mod.of_structure(spec.score_mod)))


def _is_consecutive(spec: AttentionSpec) -> bool:
  return evaluate.is_consecutive(mask_lib.of_structure(spec.mask))


def _runs(spec: AttentionSpec) -> evaluate.Runs | None:
  return evaluate.runs_of(mask_lib.of_structure(spec.mask))


def runs_of(operands: Operands, mask: mask_lib.Mask) -> tuple[int, int]:
  """Returns the runs of positions of queries and of keys, (1, 1) where no table needs them."""
  runs = evaluate.runs_of(mask) if any(x.ndim == 3 for x in operands.mods) else None
  return (1, 1) if runs is None else (runs.queries, runs.keys)


def row_of(term: ScoreMod, x: jax.Array, operands: Operands, spec: AttentionSpec,
           tiling: Tiling) -> jax.Array:
  """Returns `diagonals.rows_of` for a term of `terms_by_distance` and its array."""
  base, runs = dense_operands.distances_of_runs(operands, spec), _runs(spec)
  assert runs is not None
  if isinstance(term, terms.Distance):
    return diagonals.rows_of(x, term.first, base, runs.stride, tiling)
  assert isinstance(term, terms.Slope)
  distance = -abs(diagonals.distances(tiling)[None] + base)
  return (x[..., 0].astype(jnp.float32) * distance.astype(jnp.float32)[:, None])[:, :, None]


def _in_kernel(term: ScoreMod, spec: AttentionSpec, in_product: int | None) -> ScoreMod:
  """Returns the form of a term as a kernel computes it; see `_slope_in_product`."""
  if isinstance(term, score_mod.Composed):
    return score_mod.Composed(
        *(_in_kernel(x, spec, in_product) for x in (term.first, term.second)))
  if isinstance(term, terms.Distance) and _runs(spec):
    return terms.Add(term.values)
  if isinstance(term, terms.Slope) and _is_consecutive(spec):
    if term.slopes == in_product:
      return _InProduct(term.slopes)
    return terms.Add(term.slopes) if term.symmetric else _Ramp(term.slopes)
  return term


@value_dataclass
class _Ramp(terms.PositionTerm):
  """score + slope * (key position - query position): one number a key and one a query."""

  slopes: jax.Array  # [1, 1 or queries]
  roles = {"slopes": score_mod.PAIR}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    keys, queries = score.shape
    key = lax.broadcasted_iota(jnp.int32, (keys, LANES), 0).astype(jnp.float32)
    first = _distances_of_first_key(tile.at)
    wide = jnp.broadcast_to(self.slopes, (1, max(LANES, self.slopes.shape[1])))
    of_keys = [wide[:, :LANES] * key] * (queries // LANES) if self.slopes.shape[1] == 1 else [
        x * key for x in jnp.split(wide, queries // LANES, 1)]
    ramp = jnp.concatenate(of_keys, 1), self.slopes * first  # of keys, and of queries
    return score + ramp[0] + ramp[1]


def _distances_of_first_key(at: mask_lib.Coordinates) -> jax.Array:
  """Returns the position of a tile's first key minus those of queries, float32 [1, queries]."""
  return (at.key_position[:1] - at.query_position[:1]).astype(jnp.float32)


@value_dataclass
class _InProduct(terms.PositionTerm):
  """A term that scores have already, and whose cotangent comes from another product."""

  slopes: jax.Array
  roles = {"slopes": score_mod.PAIR}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    return score


def own_names(operands: Operands, spec: AttentionSpec) -> tuple[str, ...]:
  """Returns the arrays of the score mod whose cotangents the backward kernel computes."""
  others = traceable.by_pair(spec.score_mod, operands.mods)
  return tuple(name for n, name in enumerate(mod_names(operands)) if n not in others)


def needed_vmem(tiling: Tiling, operands: Operands, backward: bool) -> int:
  """Estimates the bytes of vector memory of what is read by distance, and of sums of cotangents."""
  heads, pairs, size = tiling.query_heads, math.prod(tiling.runs), 0
  keeps_all = diagonals.keeps_all(tiling.block_diagonals, tiling, len(tiling.by_distance))
  tiles = tiling.block_diagonals if keeps_all else diagonals.step_count(tiling)
  for n, x in enumerate(operands.mods):
    if n in tiling.by_distance:
      for count in (heads if x.shape[1] > 1 else 1, heads)[:1 + backward]:
        row = 2 * count * diagonals.length(tiling)
        size += pairs * (row + tiles * heads * LANES**2)
      continue
    if scalar_memory.is_per_head(x):  # perhaps a slope
      size += heads * tiling.block_q * depth_columns.WIDTH // 2
    if backward:
      size += 2 * heads * max(tiling.padded_queries, tiling.padded_keys)
  return 4 * size
