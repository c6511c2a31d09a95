# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The leaves of score mods, with arrays as the user has them, and the terms that they become."""

from typing import Callable

import jax
import jax.numpy as jnp

from attn_core import checks
from attn_core.masks.mask import Array
from attn_core.masks.materialize import Shape
from attn_core.masks.values import value_dataclass
from attn_core.score_mods import buckets, terms
from attn_core.score_mods.score_mod import ScoreMod

_GIVEN = "given"  # the role of an array as the user has it


@value_dataclass
class Alibi(ScoreMod):
  """score + slope * (key position - query position), or minus slope * its magnitude."""

  symmetric: bool
  slopes: Array  # [H] or [B or 1, H]
  roles = {"slopes": _GIVEN}

  def lower(self, shape: Shape) -> ScoreMod:
    slopes = self.slopes if self.slopes.ndim == 2 else self.slopes[None]
    _check_fits("alibi: slopes", self.slopes, slopes.shape, shape[:2], "[H] or [B or 1, H]")
    return terms.Slope(self.symmetric, jnp.asarray(slopes)[:, :, None, None])


@value_dataclass
class Relative(ScoreMod):
  """score + table[bucket of key position - query position, head], as in T5."""

  max_distance: int
  bidirectional: bool
  table: Array  # [num_buckets, H or 1]
  roles = {"table": _GIVEN}

  def lower(self, shape: Shape) -> ScoreMod:
    first, index = buckets.by_distance(self.table.shape[0], self.max_distance, self.bidirectional)
    table = _by_head("relative: table", self.table, shape)
    return terms.Distance(first, buckets.spread(table, index))


@value_dataclass
class ByDistance(ScoreMod):
  """score + table[key position - query position - first, head], clipped to the table."""

  first: int
  table: Array  # [n, H or 1]
  roles = {"table": _GIVEN}

  def lower(self, shape: Shape) -> ScoreMod:
    return terms.Distance(self.first, _by_head("by_distance: table", self.table, shape))


@value_dataclass
class Grid(ScoreMod):
  """score + table[distance of two tokens by rows and columns of a grid, head], as in Swin."""

  height: int
  width: int
  table: Array  # [(2 * height - 1) * (2 * width - 1), H or 1]
  roles = {"table": _GIVEN}

  def lower(self, shape: Shape) -> ScoreMod:
    return terms.Grid(self.height, self.width, _by_head("grid: table", self.table, shape))


@value_dataclass
class PerPair(ScoreMod):
  """score + array or score * array, [B or 1, H or 1, T or 1, S or 1] without some of its axes."""

  name: str
  multiplies: bool
  axes: tuple[int, ...]  # the axes of [B, H, T, S] that the array has
  array: Array
  roles = {"array": _GIVEN}

  def lower(self, shape: Shape) -> ScoreMod:
    letters = ", ".join(f"{letter} or 1" for i, letter in enumerate("BHTS") if i in self.axes)
    _check_fits(f"{self.name}: array", self.array, self.array.shape,
                tuple(shape[i] for i in self.axes), f"[{letters}]")
    missing = [i for i in range(4) if i not in self.axes]
    term = terms.Multiply if self.multiplies else terms.Add
    return term(jnp.expand_dims(jnp.asarray(self.array), missing))


@value_dataclass
class SoftCap(ScoreMod):
  """cap * tanh(score / cap)."""

  cap: float

  def lower(self, shape: Shape) -> ScoreMod:
    return terms.Cap(self.cap)


@value_dataclass
class Custom(ScoreMod):
  """function(score, batch, head, query position, key position, *operands), elementwise."""

  function: Callable[..., jax.Array]
  operands: tuple[Array, ...]
  roles = {"operands": _GIVEN}

  def lower(self, shape: Shape) -> ScoreMod:
    # The leading axes are those of batch rows, which vmap may add to, and heads, all in each one.
    return terms.Custom(self.function, tuple(jnp.asarray(x)[None, None] for x in self.operands))


def _by_head(name: str, table: Array, shape: Shape) -> jax.Array:
  """Returns a table [n, H or 1] as [1, H or 1, n]."""
  _check_fits(name, table, table.shape[1:], shape[1:2], "[n, H or 1]")
  return jnp.asarray(table).T[None]


def _check_fits(name: str, array: Array, own: tuple[int, ...], full: tuple[int, ...],
                dimensions: str) -> None:
  """Raises ValueError unless each size is 1 or the full one."""
  if len(own) != len(full) or any(n not in (1, whole) for n, whole in zip(own, full)):
    raise ValueError(f"{name} is {checks.describe(array)}; expected {dimensions} with the sizes "
                     f"{list(full)} of the call")
