# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score mod on one tile of block-wise attention, with its derivatives.

Scores [step_heads, block_rows, block_kv] of `tile_ops`, transposed in the backward, have the four
axes of `score_mod.ScoreTile` here. Derivatives are those that JAX finds for one tile: the arrays of
a score mod are sliced first, so that their gradients are as small as the tile's part of them.
"""

from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.xla import tile_ops
from attn_core.masks import tile as tile_lib
from attn_core.score_mods import evaluate, score_mod
from attn_core.types import Operands, is_mod, mod_number

Arrays = list[jax.Array]
Sums = dict[str, jax.Array]  # cotangents of arrays of the score mod, by name


class ModTile(NamedTuple):
  """The score mod of one tile."""

  structure: jax.tree_util.PyTreeDef
  parts: list[evaluate.Part]  # of its arrays
  where: score_mod.ScoreTile

  def slices(self, operands: Operands) -> Arrays:
    """Returns the tile's part of every array of the score mod, or of its tangents."""
    return [tile_lib.slice_at(x, *part) for x, part in zip(operands.mods, self.parts, strict=True)]

  def apply(self, scores: jax.Array, slices: Arrays) -> jax.Array:
    """Returns scores, of `tile_ops`, after the score mod."""
    at, transposed = self.where.at, self.where.transposed
    heads, first, second = scores.shape
    rows = at.query_position.size, self.where.group
    four = (heads, first, *rows) if transposed else (heads, *rows, second)
    return evaluate.apply(
        self.structure, slices, scores.reshape(four), self.where).reshape(scores.shape)


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


def modify(inputs: tile_ops.BlockedInputs, mod: ModTile | None, scores: jax.Array) -> jax.Array:
  """Returns the scores of a tile after its score mod, if there is one."""
  return scores if mod is None else mod.apply(scores, mod.slices(inputs.operands))


def tangent(inputs: tile_ops.BlockedInputs, d_inputs: tile_ops.BlockedInputs, mod: ModTile | None,
            scores: jax.Array, d_scores: jax.Array | float) -> tuple[jax.Array, jax.Array | float]:
  """Returns logits of a tile and their tangent.

  Args:
    inputs: the attention.
    d_inputs: the same with tangents as operands, zeros where there are none.
    mod: of the tile; None: the scores are the logits.
    scores: of the tile.
    d_scores: their tangent, or the number 0.
  """
  if mod is None:
    return scores, d_scores
  slices = mod.slices(inputs.operands)
  moves = [x.astype(part.dtype) if jnp.issubdtype(part.dtype, jnp.inexact)
           else np.zeros(part.shape, jax.dtypes.float0)
           for x, part in zip(mod.slices(d_inputs.operands), slices)]
  return jax.jvp(mod.apply, (scores, slices), (jnp.zeros_like(scores) + d_scores, moves))


def no_moves(operands: Operands) -> tuple[jax.Array, ...]:
  """Returns tangents of zero for the arrays of the score mod."""
  return tuple(map(jnp.zeros_like, operands.mods))


def pullback(inputs: tile_ops.BlockedInputs, mod: ModTile | None, scores: jax.Array
             ) -> tuple[jax.Array, Callable[[jax.Array, Sums], tuple[jax.Array, Sums]]]:
  """Returns logits of a tile, and a function for their cotangents.

  It maps cotangents of the logits, and sums of the cotangents of the score mod's arrays, to
  cotangents of the scores and sums that include those of this tile.
  """
  if mod is None:
    return scores, lambda d_logits, sums: (d_logits, sums)
  logits, pull = jax.vjp(mod.apply, scores, mod.slices(inputs.operands))

  def add(d_logits: jax.Array, sums: Sums) -> tuple[jax.Array, Sums]:
    d_scores, d_slices = pull(d_logits)
    found = {}
    for name, total in sums.items():
      part = mod.parts[mod_number(name)]
      d = d_slices[mod_number(name)].astype(total.dtype)
      found[name] = tile_ops.write_at(
          total, tile_lib.slice_at(total, *part) + d, part.starts)
    return d_scores, found

  return logits, add


def start(inputs: tile_ops.BlockedInputs, wrt: tuple[str, ...]) -> Sums:
  """Returns sums without summands, of the arrays of the score mod in `wrt`."""
  return {name: jnp.zeros(inputs.operands.mods[mod_number(name)].shape, inputs.dtype)
          for name in wrt if is_mod(name)}


def finish(operands: Operands, sums: Sums) -> dict[str, jax.Array]:
  """Returns the cotangents of arrays of the score mod from their sums, which may be padded."""
  found = {}
  for name, total in sums.items():
    x = operands.mods[mod_number(name)]
    found[name] = total[tuple(slice(n) for n in x.shape)].astype(x.dtype)
  return found
