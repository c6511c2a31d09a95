# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates the terms of score mods: on a tile of a kernel, or on all scores at once."""

import functools
from typing import NamedTuple, Sequence, TypeAlias

import jax
import jax.numpy as jnp

from attn_core.masks import dropout, leaves, mask as mask_lib, materialize, tile as tile_lib
from attn_core.score_mods import terms
from attn_core.score_mods.score_mod import (HEADS, PAIR, ScoreMod, ScoreTile, chain, of_structure,
                                            structure_roles)
from attn_core.types import NO_SCORE_MOD, MaskOperands

Structure: TypeAlias = jax.tree_util.PyTreeDef
Arrays = Sequence[jax.Array]


class Runs(NamedTuple):
  """Runs of positions: those of queries have equal lengths, and so have those of keys."""

  queries: int = 1  # number of runs
  keys: int = 1
  stride: int = 1  # distance of neighbors in a run


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


def apply_keys_first(structure: Structure, sliced: Arrays, scores: jax.Array,
                     tile: ScoreTile) -> jax.Array:
  """Returns scores [keys, heads / group, queries * group] after a term.

  Args:
    structure: the term's tree structure.
    sliced: its arrays, each the part [1, ...] that `parts` names.
    scores: as decoding computes them, a few rows against many keys.
    tile: where; transposed.
  """
  keys, heads, rows = scores.shape
  four = scores.transpose(1, 0, 2).reshape(heads, keys, rows // tile.group, tile.group)
  found = apply(structure, sliced, four, tile)
  return found.reshape(heads, keys, rows).transpose(1, 0, 2)


def move_to_positions(mask: mask_lib.Mask,
                      at: mask_lib.Coordinates) -> tuple[mask_lib.Coordinates, bool]:
  """Returns coordinates with the positions of the mask, and whether these are consecutive.

  They are those at which dropout is evaluated.
  """
  return dropout.move_to_positions(mask, at), is_consecutive(mask)


def positions(structure: Structure, numbers: MaskOperands,
              shape: materialize.Shape) -> mask_lib.Coordinates:
  """Returns coordinates whose positions are [B or 1, 1, T or 1, 1] and [B or 1, 1, 1, S or 1].

  Args:
    structure: the mask's tree structure.
    numbers: its arrays.
    shape: (B, H, T, S) of the call.
  """
  return move_to_positions(*materialize.expand(structure, numbers, shape))[0]


def is_consecutive(mask: mask_lib.Mask) -> bool:
  """Whether positions are consecutive: the mask lists none, but for those of one run."""
  return runs_of(mask) == Runs()


def runs_of(mask: mask_lib.Mask) -> Runs | None:
  """Returns the runs that positions form, one of each where the mask lists none; None: no runs."""
  found = Runs()
  for node in mask_lib.nodes(mask):
    if isinstance(node, leaves.PlacedRuns) and found == Runs():
      found = Runs(*node.runs, node.stride)
    elif isinstance(node, (leaves.Placed, leaves.Positions)):
      return None
  return found


def distance_of_first(mask: mask_lib.Mask) -> int | None:
  """Returns the position of the first key minus that of the first query; None: arrays tell."""
  if any(isinstance(x, (leaves.Positions, leaves.Placed))
         or isinstance(x, leaves.Offset) and x.amounts is not None for x in mask_lib.nodes(mask)):
    return None
  at, _ = move_to_positions(mask, mask_lib.Coordinates(0, 0, 0, 0, 0, 0))
  return int(at.key_position) - int(at.query_position)


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


def has_function(structure: Structure) -> bool:
  """Returns whether a term has a function of the user; a call without a term has none."""
  return structure != NO_SCORE_MOD and any(
      isinstance(x, terms.Custom) for x in chain(of_structure(structure)))


def only_adds(structure: Structure) -> bool:
  """Returns whether a term adds to scores only, as a call without a term does."""
  return structure == NO_SCORE_MOD or of_structure(structure).is_additive


def apply_to_all(structure: Structure, arrays: Arrays, score: jax.Array, mask: mask_lib.Mask,
                 numbers: MaskOperands, used: jax.Array | None = None) -> jax.Array:
  """Returns all scores [B, H, T, S] after a term.

  Args:
    structure: the term's tree structure.
    arrays: its arrays.
    score: the scores before.
    mask: whose positions count.
    numbers: arrays of the mask, and the global numbers of batch rows and heads.
    used: see `ScoreTile`; None, or bool [B, H, T, S].
  """
  rows, heads, queries, keys = score.shape
  mask, at = materialize.expand(jax.tree.structure(mask), numbers, (rows, heads, queries, keys))
  at, is_consecutive = move_to_positions(mask, at)

  def one_row(score: jax.Array, at: Sequence[jax.Array], arrays: Arrays,
              used: jax.Array | None) -> jax.Array:
    fields = [x.reshape(x.shape[1], x.shape[2], 1, x.shape[3]) for x in at]
    fields[0] = fields[0].reshape(())
    where = ScoreTile(mask_lib.Coordinates._make([*fields, False]), 1,
                      is_consecutive=is_consecutive,
                      used=None if used is None else used.reshape(score[:, :, None].shape))
    return apply(structure, arrays, score[:, :, None], where)[:, :, 0]

  if rows == 1:
    return one_row(score[0], at[:-1], arrays, used)[None]
  # Arrays and coordinates of one row are shared by the others.
  flat, tree = jax.tree.flatten((at[:-1], tuple(arrays), used))
  axes = [None if x.shape[0] == 1 else 0 for x in flat]
  return jax.vmap(lambda score, *flat: one_row(score, *jax.tree.unflatten(tree, flat)), (0, *axes))(
      score, *(x if axis is None else x[:, None] for x, axis in zip(flat, axes)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def apply_where(structure: Structure, mask: Structure, arrays: Arrays, score: jax.Array,
                numbers: MaskOperands, visible: jax.Array) -> jax.Array:
  """Returns `apply_to_all`, whose derivatives exist where a hidden pair has none.

  Args:
    structure: the term's tree structure.
    mask: that of the mask.
    arrays: those of the term.
    score: the scores before.
    numbers: see `apply_to_all`.
    visible: bool, broadcastable to the scores; others have no cotangents.
  """
  del visible
  return apply_to_all(structure, arrays, score, mask_lib.of_structure(mask), numbers)


@apply_where.defjvp
def _apply_where_jvp(structure: Structure, mask: Structure, primals: tuple,
                     tangents: tuple) -> tuple[jax.Array, jax.Array]:
  arrays, score, numbers, visible = primals
  used = jnp.broadcast_to(visible, score.shape)
  safe = lambda arrays, score: apply_to_all(
      structure, arrays, score, mask_lib.of_structure(mask), numbers, used)
  return apply_where(structure, mask, *primals), jax.jvp(safe, primals[:2], tangents[:2])[1]


def bias_of(structure: Structure, arrays: Arrays, mask: mask_lib.Mask, numbers: MaskOperands,
            zeros: jax.Array) -> jax.Array:
  """Returns what an additive term adds to scores [B, H, T, S]; see `apply_to_all`."""
  assert of_structure(structure).is_additive
  return apply_to_all(structure, arrays, zeros, mask, numbers)
