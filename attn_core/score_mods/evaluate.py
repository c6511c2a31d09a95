# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates the terms of score mods: on a tile of a kernel, or on all scores at once."""

from typing import NamedTuple, Sequence, TypeAlias

import jax

from attn_core.masks import dropout, leaves, mask as mask_lib, materialize, tile as tile_lib
from attn_core.score_mods.score_mod import (HEADS, PAIR, ScoreMod, ScoreTile, of_structure,
                                            structure_roles)
from attn_core.types import MaskOperands

Structure: TypeAlias = jax.tree_util.PyTreeDef
Arrays = Sequence[jax.Array]


class Part(NamedTuple):
  """A part of an array: where it begins, and its shape."""

  starts: tuple[tile_lib.Index, ...]
  lengths: tuple[int, ...]


def parts(structure: Structure, arrays: Arrays, tile: tile_lib.Tile) -> list[Part]:
  """Returns the part of each array of a term that a tile reads.

  Args:
    structure: the term's tree structure.
    arrays: its arrays, padded so that they contain the tile.
    tile: the tile.
  """
  starts = (tile.batch, tile.head, tile.query, tile.key)
  sizes = (1, tile.num_heads, tile.num_queries, tile.num_keys)
  count = {PAIR: 4, HEADS: 2}
  found = []
  for x, role in zip(arrays, structure_roles(structure), strict=True):
    cut = [i < count.get(role, 1) and n != 1 for i, n in enumerate(x.shape)]
    found.append(Part(tuple(starts[i] if c else 0 for i, c in enumerate(cut)),
                      tuple(sizes[i] if c else n for i, (c, n) in enumerate(zip(cut, x.shape)))))
  return found


def apply(structure: Structure, sliced: Arrays, score: jax.Array, tile: ScoreTile) -> jax.Array:
  """Returns the scores of a tile after a term.

  Args:
    structure: the term's tree structure.
    sliced: its arrays, each the part [1, ...] that `parts` names.
    score: with the axes of `ScoreTile`.
    tile: where.
  """
  def ready(x: jax.Array, role: str) -> jax.Array:
    if role == PAIR:
      return tile.orient(x[0])
    return x[0] if role == HEADS else x[0, 0]
  roles = structure_roles(structure)
  term: ScoreMod = jax.tree.unflatten(structure, map(ready, sliced, roles))
  return term.apply(score, tile)


def move_to_positions(mask: mask_lib.Mask,
                      at: mask_lib.Coordinates) -> tuple[mask_lib.Coordinates, bool]:
  """Returns coordinates with the positions of the mask, and whether these are consecutive.

  They are those at which dropout is evaluated.
  """
  return dropout.move_to_positions(mask, at), is_consecutive(mask)


def is_consecutive(mask: mask_lib.Mask) -> bool:
  """Whether positions are consecutive: the mask lists none."""
  return not any(isinstance(node, (leaves.Placed, leaves.Positions))
                 for node in mask_lib.nodes(mask))


def pad(structure: Structure, arrays: Arrays, queries: int,
        keys: int) -> tuple[jax.Array, ...]:
  """Pads the arrays of a term by `queries` rows and `keys` columns."""
  def padded(x: jax.Array, role: str) -> jax.Array:
    if role != PAIR:
      return x
    for axis, amount in ((2, queries), (3, keys)):
      x = tile_lib.pad_axis(x, axis, amount) if x.shape[axis] != 1 else x
    return x
  return tuple(map(padded, arrays, structure_roles(structure)))


def apply_to_all(structure: Structure, arrays: Arrays, score: jax.Array, mask: mask_lib.Mask,
                 numbers: MaskOperands) -> jax.Array:
  """Returns all scores [B, H, T, S] after a term.

  Args:
    structure: the term's tree structure.
    arrays: its arrays.
    score: the scores before.
    mask: whose positions count.
    numbers: arrays of the mask, and the global numbers of batch rows and heads.
  """
  rows, heads, queries, keys = score.shape
  mask, at = materialize.expand(jax.tree.structure(mask), numbers, (rows, heads, queries, keys))
  at, is_consecutive = move_to_positions(mask, at)

  def one_row(score: jax.Array, at: Sequence[jax.Array], arrays: Arrays) -> jax.Array:
    fields = [x.reshape(x.shape[1], x.shape[2], 1, x.shape[3]) for x in at]
    fields[0] = fields[0].reshape(())
    where = ScoreTile(mask_lib.Coordinates._make([*fields, False]), 1,
                      is_consecutive=is_consecutive)
    return apply(structure, arrays, score[:, :, None], where)[:, :, 0]

  if rows == 1:
    return one_row(score[0], at[:-1], arrays)[None]
  # Arrays and coordinates of one row are shared by the others.
  flat, tree = jax.tree.flatten((at[:-1], tuple(arrays)))
  axes = [None if x.shape[0] == 1 else 0 for x in flat]
  return jax.vmap(lambda score, *flat: one_row(score, *jax.tree.unflatten(tree, flat)), (0, *axes))(
      score, *(x if axis is None else x[:, None] for x, axis in zip(flat, axes)))


def bias_of(structure: Structure, arrays: Arrays, mask: mask_lib.Mask, numbers: MaskOperands,
            zeros: jax.Array) -> jax.Array:
  """Returns what an additive term adds to scores [B, H, T, S]; see `apply_to_all`."""
  assert of_structure(structure).is_additive
  return apply_to_all(structure, arrays, zeros, mask, numbers)
