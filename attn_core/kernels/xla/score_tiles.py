# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score mod on one tile of scores, with its derivatives.

Scores [step_heads, block_rows, block_kv] of `tile_ops`, transposed in the backward, and those of
pages, have the four axes of `score_mod.ScoreTile` here. Derivatives are those that JAX finds for
one tile: the arrays of a score mod are sliced first, so that their gradients are as small as the
tile's part of them.
"""

from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.xla import cpu_math, tile_ops, tile_sums
from attn_core.masks import tile as tile_lib
from attn_core.score_mods import evaluate, score_mod
from attn_core.types import is_mod, mod_number

Arrays = list[jax.Array]
Mods = tuple[jax.Array, ...]  # the arrays of a score mod, padded to whole blocks
Sums = dict[str, jax.Array]  # cotangents of arrays of the score mod, by name


class ModTile(NamedTuple):
  """The score mod of one tile."""

  structure: jax.tree_util.PyTreeDef
  parts: list[evaluate.Part]  # of its arrays
  where: score_mod.ScoreTile

  def slices(self, mods: Mods) -> Arrays:
    """Returns the tile's part of every array of the score mod, or of its tangents."""
    return [tile_lib.slice_at(x, *part) for x, part in zip(mods, self.parts, strict=True)]

  def apply(self, scores: jax.Array, slices: Arrays) -> jax.Array:
    """Returns scores, of `tile_ops`, after the score mod."""
    return evaluate.apply(
        self.structure, slices, self._four_axes(scores), self.where).reshape(scores.shape)

  def pull_where_used(self, scores: jax.Array, slices: Arrays, d_logits: jax.Array,
                      names: tuple[str, ...]) -> Arrays:
    """Returns cotangents of arrays of the score mod, by pairs with a cotangent alone."""
    used = self._four_axes(d_logits != 0)
    where_used = self._replace(where=self.where._replace(used=used))
    d_slices = jax.vjp(where_used.apply, scores, slices)[1](d_logits)[1]
    return [jnp.where(used.any(), d_slices[mod_number(name)], 0) for name in names]

  def _four_axes(self, scores: jax.Array) -> jax.Array:
    """Returns scores with the axes of `ScoreTile`."""
    heads, first, second = scores.shape
    rows = self.where.at.query_position.size, self.where.group
    return scores.reshape((heads, first, *rows) if self.where.transposed
                          else (heads, *rows, second))


def of_tile(inputs: tile_ops.BlockedInputs, grid_index: tile_ops.GridIndex, tile: tile_ops.Tile,
            transposed: bool = False) -> ModTile | None:
  """Returns the score mod of the tile (query block, key block); None: the call has none."""
  structure, sizes = inputs.spec.score_mod, inputs.sizes
  if not inputs.spec.has_score_mod:
    return None
  mask, at = tile_ops.mask_tile(inputs, grid_index, tile, transposed)
  at, is_consecutive = evaluate.move_to_positions(mask, at)
  i, j = tile
  part = tile_lib.Tile(
      grid_index.batch, grid_index.key_head * inputs.group, i * sizes.block_q, j * sizes.block_kv,
      inputs.step_heads * inputs.group, sizes.block_q, sizes.block_kv)
  return ModTile(structure, evaluate.parts(structure, inputs.operands.mods, part),
                 score_mod.ScoreTile(at, inputs.group, transposed, is_consecutive, is_block=True))


def modify(mods: Mods, mod: ModTile | None, scores: jax.Array) -> jax.Array:
  """Returns the scores of a tile after its score mod, if there is one."""
  return scores if mod is None else mod.apply(scores, mod.slices(mods))


def tangent(mods: Mods, d_mods: Mods, mod: ModTile | None, scores: jax.Array,
            d_scores: jax.Array | float) -> tuple[jax.Array, jax.Array | float]:
  """Returns logits of a tile and their tangent.

  Args:
    mods: arrays of the score mod.
    d_mods: their tangents, zeros where there are none.
    mod: of the tile; None: the scores are the logits.
    scores: of the tile.
    d_scores: their tangent, or the number 0.
  """
  if mod is None:
    return scores, d_scores
  slices = mod.slices(mods)
  moves = [x.astype(part.dtype) if jnp.issubdtype(part.dtype, jnp.inexact)
           else np.zeros(part.shape, jax.dtypes.float0)
           for x, part in zip(mod.slices(d_mods), slices)]
  return jax.jvp(mod.apply, (scores, slices), (jnp.zeros_like(scores) + d_scores, moves))


def no_moves(mods: Mods) -> Mods:
  """Returns tangents of zero for the arrays of the score mod."""
  return tuple(map(jnp.zeros_like, mods))


def pullback(mods: Mods, mod: ModTile | None, scores: jax.Array
             ) -> tuple[jax.Array, Callable[[jax.Array, Sums], tuple[jax.Array, Sums]]]:
  """Returns logits of a tile, and a function for their cotangents.

  It maps cotangents of the logits, and sums of the cotangents of the score mod's arrays, to
  cotangents of the scores and sums that include those of this tile.
  """
  if mod is None:
    return scores, lambda d_logits, sums: (d_logits, sums)
  logits, pull = jax.vjp(mod.apply, scores, mod.slices(mods))

  def add(d_logits: jax.Array, sums: Sums) -> tuple[jax.Array, Sums]:
    def chosen(d_logits: jax.Array) -> Arrays:
      d_scores, d_slices = pull(d_logits)
      return [d_scores, *(d_slices[mod_number(name)] for name in sums)]
    # The barrier keeps XLA:CPU from computing weights again for each sum.
    d_scores, *d_mods = tile_sums.evaluate(
        chosen, cpu_math.apart(d_logits)) if sums else chosen(d_logits)
    if evaluate.has_function(mod.structure):
      # A function's derivative may be infinite at a hidden pair, and 0 * inf is NaN.
      d_scores = jnp.where(d_logits == 0, 0, d_scores)
      if d_mods:
        d_mods = jax.lax.cond(
            jnp.stack([jnp.isfinite(x).all() for x in d_mods]).all(), lambda: d_mods,
            lambda: mod.pull_where_used(scores, mod.slices(mods), d_logits, tuple(sums)))
    found = {}
    for (name, total), d in zip(sums.items(), d_mods):
      part = mod.parts[mod_number(name)]
      found[name] = tile_ops.write_at(
          total, tile_lib.slice_at(total, *part) + d.astype(total.dtype), part.starts)
    return d_scores, found

  return logits, add


def start(mods: Mods, wrt: tuple[str, ...], dtype: DTypeLike) -> Sums:
  """Returns sums without summands, of the arrays of the score mod in `wrt`."""
  return {name: jnp.zeros(mods[mod_number(name)].shape, dtype) for name in wrt if is_mod(name)}


def finish(mods: Mods, sums: Sums) -> dict[str, jax.Array]:
  """Returns the cotangents of arrays of the score mod from their sums, which may be padded."""
  found = {}
  for name, total in sums.items():
    x = mods[mod_number(name)]
    found[name] = total[tuple(slice(n) for n in x.shape)].astype(x.dtype)
  return found
