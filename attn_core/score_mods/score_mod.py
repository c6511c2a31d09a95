# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""ScoreMod: a function of the scores before the softmax, as a value.

A score mod is a small tree of leaves, composed by `>>` in the order in which they apply. It is a
pytree: its structure (kinds of leaves, static numbers, functions) is hashable and compared by
value, so equal ones never cause retracing; its arrays (slopes, tables, vectors) are ordinary
operands, and differentiable.

Two kinds of nodes share these classes:

* what the user makes (`constructors`), with arrays as the user has them. It implements
  `lower(shape)`, which checks the arrays and returns
* terms (`terms`), which kernels evaluate. Every array of a term has two leading axes [B or 1, H or
  1] and a role that says how it is sliced to a tile. A term implements `apply(score, tile)` for one
  batch row. Kernels derive its gradients from that.
"""

from typing import Iterator, NamedTuple

import jax

from attn_core.masks import values
from attn_core.masks.mask import Coordinates
from attn_core.masks.materialize import Shape
from attn_core.masks.values import Value, value_dataclass
from attn_core.score_mods import forms as forms_lib
from attn_core.types import NO_SCORE_MOD

# The role of an array of a term: its shape, and thereby how it is sliced, padded and sharded.
PAIR = "pair"  # [B or 1, H or 1, T or 1, S or 1]: sliced to the tile
HEADS = "heads"  # [B or 1, H or 1, n]: sliced to the heads
ROW = "row"  # [B or 1, 1, ...]: sliced to the batch row


class ScoreTile(NamedTuple):
  """Where the scores that a term gets are: one batch row, some heads, queries and keys.

  Scores have four axes: [heads / group, queries, group, keys], or transposed [heads / group, keys,
  queries, group], where group is the number of heads that lie side by side.
  """

  at: Coordinates  # global numbers, with the axes of the scores; the batch row is a scalar
  group: int
  transposed: bool = False
  is_consecutive: bool = False  # whether query positions are consecutive, and key positions too
  is_block: bool = False  # whether the tile is one of many, and not all scores
  # bool, with the axes of the scores: where the results count; None: everywhere. A function of the
  # user gets the numbers of a pair that counts instead of one that does not, whose derivative may
  # be infinite: its cotangent is 0, and 0 * inf is NaN.
  used: jax.Array | None = None
  # Whether reverse mode leaves out pairs whose cotangent is 0, for the same reason: in kernels that
  # cannot take the numbers of another pair.
  skips_zeros: bool = False
  # Of operations of the user's functions, where a kernel has no other; None: all are as they are.
  forms: forms_lib.Forms | None = None

  def orient(self, x: jax.Array) -> jax.Array:
    """Returns x [heads or 1, queries or 1, keys or 1] with the axes of the scores."""
    x = x.reshape(*((-1, self.group) if x.shape[0] > 1 else (1, 1)), *x.shape[1:])
    return x.transpose((0, 3, 2, 1) if self.transposed else (0, 2, 1, 3))


class ScoreMod(Value):
  """Base class of all score mods; use the functions of `attn_core.score_mods` to make one."""

  def lower(self, shape: Shape) -> "ScoreMod":
    """Returns the term that kernels evaluate; checks the arrays."""
    raise NotImplementedError

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    """Returns the scores of a tile after a term, in the same shape and dtype."""
    raise NotImplementedError

  @property
  def is_additive(self) -> bool:
    """Whether a term adds to the scores what does not depend on them."""
    return False

  @property
  def reads_positions(self) -> bool:
    """Whether the result depends on positions."""
    return False

  def __rshift__(self, other: "ScoreMod") -> "ScoreMod":
    if not isinstance(other, ScoreMod):
      raise _not_composable(other)
    return Composed(self, other)

  def __rrshift__(self, other: object) -> "ScoreMod":
    raise _not_composable(other)

  def __bool__(self) -> bool:
    raise ValueError("a score mod has no truth value: compose score mods with `>>`, since `and` "
                     "and `or` would drop one of them; test for a missing one with "
                     "`score_mod is None`")


def _not_composable(other: object) -> TypeError:
  """Returns the error of a composition with anything but a score mod."""
  return TypeError(f"score_mod >> other: got {other!r}; expected score mods on both sides: a "
                   "function is score_mods.custom(function), an array score_mods.dense(array)")


@value_dataclass
class Composed(ScoreMod):
  """`first`, and then `second` of its result."""

  first: ScoreMod
  second: ScoreMod
  roles = {"first": None, "second": None}

  def lower(self, shape: Shape) -> ScoreMod:
    return Composed(self.first.lower(shape), self.second.lower(shape))

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    return self.second.apply(self.first.apply(score, tile), tile)

  @property
  def is_additive(self) -> bool:
    return self.first.is_additive and self.second.is_additive

  @property
  def reads_positions(self) -> bool:
    return self.first.reads_positions or self.second.reads_positions


def chain(mod: ScoreMod) -> Iterator[ScoreMod]:
  """Iterates over the leaves or terms of a score mod, in the order in which they apply."""
  if isinstance(mod, Composed):
    yield from chain(mod.first)
    yield from chain(mod.second)
  else:
    yield mod


def of_structure(structure: jax.tree_util.PyTreeDef) -> ScoreMod:
  """Returns a term of the structure, with numbers in place of its arrays."""
  return jax.tree.unflatten(structure, range(structure.num_leaves))


def structure_roles(structure: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
  """Returns the role of every array of a term of the structure; () without a score mod."""
  return () if structure == NO_SCORE_MOD else values.structure_roles(structure)
