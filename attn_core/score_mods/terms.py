# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Terms: the forms of score mods that kernels evaluate, tile by tile.

`apply` gets the scores of one batch row, and arrays sliced by their roles: those of PAIR with the
axes of the scores, those of HEADS as [heads or 1, n], those of ROW as the user gave them.
"""

from typing import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.masks.mask import Coordinates
from attn_core.masks.materialize import Shape
from attn_core.masks.values import value_dataclass
from attn_core.score_mods import forms
from attn_core.score_mods.score_mod import HEADS, PAIR, ROW, ScoreMod, ScoreTile
from attn_core.types import are_known


class Term(ScoreMod):
  """Base class of terms, which are lowered already."""

  def lower(self, shape: Shape) -> ScoreMod:
    return self


@value_dataclass
class Add(Term):
  """score + array."""

  array: jax.Array
  roles = {"array": PAIR}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    return score + self.array.astype(score.dtype)

  @property
  def is_additive(self) -> bool:
    return True


@jax.custom_jvp
def _finite_or_0(x: jax.Array) -> jax.Array:
  """Returns x, or 0 where it is not finite; its derivative is 1 in both cases."""
  return jnp.where(x - x == 0, x, 0)


_finite_or_0.defjvp(lambda primals, tangents: (_finite_or_0(*primals), *tangents))


@value_dataclass
class Multiply(Term):
  """score * array; NaN where the array is not finite."""

  array: jax.Array
  roles = {"array": PAIR}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    array = self.array.astype(score.dtype)
    nan = jnp.where(array - array == 0, 0, jnp.nan).astype(score.dtype)
    # A hidden pair has a cotangent of 0, and 0 * NaN would be NaN.
    return score * _finite_or_0(array) + nan


@value_dataclass
class Cap(Term):
  """cap * tanh(score / cap)."""

  cap: float

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    cap = jnp.asarray(self.cap, score.dtype)
    return cap * jnp.tanh(score / cap)


class PositionTerm(Term):
  """Base class of terms that add to the scores what depends on positions alone."""

  @property
  def is_additive(self) -> bool:
    return True

  @property
  def reads_positions(self) -> bool:
    return True


@value_dataclass
class Slope(PositionTerm):
  """score + slope * (key position - query position), or minus slope * its magnitude."""

  symmetric: bool
  slopes: jax.Array  # [B or 1, H or 1, 1, 1]
  roles = {"slopes": PAIR}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    distance = tile.at.key_position - tile.at.query_position
    distance = -abs(distance) if self.symmetric else distance
    return score + self.slopes.astype(score.dtype) * distance.astype(score.dtype)


@value_dataclass
class Distance(PositionTerm):
  """score + values[key position - query position - first], clipped to the ends of the values."""

  first: int
  values: jax.Array  # [B or 1, H or 1, n]
  roles = {"values": HEADS}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    query, key = tile.at.query_position.reshape(-1, 1), tile.at.key_position.reshape(1, -1)
    values = self.values.astype(score.dtype)
    if not tile.is_consecutive or not are_known(query.size, key.size):
      return score + tile.orient(values[:, self._index(key - query, values)])
    base = key[0, 0] - query[0, 0]
    if not tile.is_block:
      return score + self._diagonals(values, base, tile, (query.size, key.size))
    # Most tiles lie beyond all values but the last.
    low, high = base - (query.size - 1), base + (key.size - 1)
    constant = (high <= self.first) | (low >= self.first + values.shape[1] - 1)
    return lax.cond(
        constant,
        lambda score, values: score + tile.orient(values[:, self._index(base, values), None, None]),
        lambda score, values: score + self._diagonals(values, base, tile, (query.size, key.size)),
        score, values)

  def _index(self, distance: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.clip(distance - self.first, 0, values.shape[1] - 1)

  def _diagonals(self, values: jax.Array, base: jax.Array, tile: ScoreTile,
                 sizes: tuple[int, int]) -> jax.Array:
    """Returns the term of consecutive positions, each of its diagonals constant.

    Its derivative sums diagonals without scattered additions.

    Args:
      values: [heads or 1, n].
      base: distance of the first query and the first key.
      tile: where.
      sizes: (queries, keys).
    """
    rows, columns = reversed(sizes) if tile.transposed else sizes
    # One number for each diagonal, from the bottom left to the top right; the last is not used.
    step = jnp.arange(1 - rows, columns + 1, dtype=jnp.int32)
    line = values[:, self._index(base - step if tile.transposed else base + step, values)]
    heads, length = line.shape
    # Rows of one number less than the line, cut from its repetitions, shift by one each.
    x = jnp.broadcast_to(line[:, None], (heads, rows, length)).reshape(heads, rows * length)
    x = x[:, :rows * (length - 1)].reshape(heads, rows, length - 1)[:, :, rows - 1:]
    x = x.reshape(*((-1, tile.group) if heads > 1 else (1, 1)), rows, columns)
    return x.transpose((0, 2, 3, 1) if tile.transposed else (0, 2, 1, 3))


@value_dataclass
class Grid(PositionTerm):
  """score + values at the distance of two tokens of a grid, by rows and by columns."""

  height: int
  width: int
  values: jax.Array  # [B or 1, H or 1, (2 * height - 1) * (2 * width - 1)]
  roles = {"values": HEADS}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    query, key = tile.at.query_position.reshape(-1, 1), tile.at.key_position.reshape(1, -1)
    def apart(query: jax.Array, key: jax.Array, size: int) -> jax.Array:
      return jnp.clip(query - key + (size - 1), 0, 2 * size - 2)
    row = apart(query // self.width, key // self.width, self.height)
    column = apart(query % self.width, key % self.width, self.width)
    values = self.values.astype(score.dtype)
    return score + tile.orient(values[:, row * (2 * self.width - 1) + column])


@value_dataclass
class Custom(Term):
  """function(score, batch, head, query position, key position, *operands), elementwise."""

  function: Callable[..., jax.Array]
  operands: tuple[jax.Array, ...]
  numbers: tuple[jax.Array, ...] = ()  # further operands, [B or 1, H or 1, T or 1, S or 1]
  roles = {"operands": ROW, "numbers": PAIR}

  def apply(self, score: jax.Array, tile: ScoreTile) -> jax.Array:
    at, numbers = tile.at, self.numbers
    if tile.used is not None:
      score, at, numbers = _of_used_pairs(score, at, numbers, tile.used)
    operands = (x.astype(score.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
                for x in (*self.operands, *numbers))
    function = self.function if tile.forms is None else forms.in_forms(self.function, tile.forms)
    function = _skipping_zeros(function) if tile.skips_zeros else function
    result = function(score, at.batch, at.head, at.query_position, at.key_position, *operands)
    if np.shape(result) != score.shape or getattr(result, "dtype", None) != score.dtype:
      found = checks.describe(result)
      raise ValueError(f"custom: {self.function} returned {found}; expected the shape and dtype of "
                       f"its first argument, the scores {checks.describe(score)}: a score mod is "
                       "elementwise")
    # The score of a query or a key that is not finite is NaN, which a function may lose.
    return jnp.where(jnp.isnan(score), score, result)

  @property
  def reads_positions(self) -> bool:
    return True


def _skipping_zeros(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Returns an elementwise function whose reverse mode skips elements with a cotangent of 0."""
  @jax.custom_vjp
  def run(score: jax.Array, numbers: tuple[jax.Array, ...],
          operands: tuple[jax.Array, ...]) -> jax.Array:
    return function(score, *numbers, *operands)

  def backward(saved: tuple, d_result: jax.Array) -> tuple:
    score, numbers, operands = saved
    pull = jax.vjp(lambda x, operands: function(x, *numbers, *operands), score, operands)[1]
    keep = lambda x: x if x.dtype == jax.dtypes.float0 else jnp.where(d_result != 0, x, 0)
    d_score, d_operands = jax.tree.map(keep, pull(d_result))
    return d_score, None, d_operands

  run.defvjp(lambda *arguments: (run(*arguments), arguments), backward)
  def whole(score: jax.Array, *rest: jax.Array) -> jax.Array:
    # Operands get an element for each score, and with it a cotangent of each.
    operands = tuple(jnp.broadcast_to(x, score.shape) for x in rest[4:])
    return run(score, rest[:4], operands)
  return whole


def _of_used_pairs(score: jax.Array, at: Coordinates, numbers: tuple[jax.Array, ...],
                   used: jax.Array) -> tuple[jax.Array, Coordinates, tuple[jax.Array, ...]]:
  """Returns scores, coordinates and numbers with those of a used pair in place of the others'."""
  chosen = jnp.argmax(jnp.broadcast_to(used, score.shape))
  def replaced(x: jax.Array) -> jax.Array:
    x = jnp.broadcast_to(x, score.shape)
    return jnp.where(used, x, x.reshape(-1)[chosen])
  return replaced(score), at._replace(
      head=replaced(at.head), query_index=replaced(at.query_index),
      key_index=replaced(at.key_index), query_position=replaced(at.query_position),
      key_position=replaced(at.key_position)), tuple(
          x if x.size == 1 else replaced(x) for x in numbers)
