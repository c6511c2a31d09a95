# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Distances of positions that a predicate may show, where it compares them with constants.

Sums and products of positions and constants are kept as such, so that `query - key <= 512` bounds
the distance, whatever the positions are, up to 2**24. Everything else may show any distance.
"""

import functools
import math
from typing import Any, Callable, NamedTuple

from jax.extend.core import JaxprEqn
import numpy as np

from attn_core.masks import intervals
from attn_core.masks.mask import Booleans

# Of a sum, which does not wrap around where positions are at most 2**24.
_MOST_FACTORS, _MOST_REST = 64, 2**30

Range = tuple[float, float]  # of key position minus query position, both inclusive
_ALL, _NONE = (-math.inf, math.inf), (math.inf, -math.inf)


class _Sum(NamedTuple):
  """query * query position + key * key position + rest."""

  query: int
  key: int
  rest: int


class _Size(NamedTuple):
  """The absolute value of a sum."""

  sum: _Sum


class _Seen(NamedTuple):
  """A boolean: the distances at which it may be true, and those at which it may be false."""

  true: Range
  false: Range


_UNKNOWN = _Seen(_ALL, _ALL)
_Value = _Sum | _Size | _Seen | None  # None: any number


def bounds(predicate: Callable[..., Booleans], numbers: object) -> Range:
  """Returns the smallest and largest key position minus query position of a visible pair.

  Args:
    predicate, numbers: as in `intervals.bounds`.
  """
  given: list[_Value] = [None, None, _Sum(1, 0, 0), _Sum(0, 1, 0)]
  found = intervals.evaluate(predicate, numbers, given, _apply, _literal)
  return found.true if isinstance(found, _Seen) else _ALL


def _literal(x: Any) -> _Value:
  number = np.asarray(x)
  if number.size != 1:
    return None
  if number.dtype == bool:
    return _Seen(_ALL, _NONE) if number.item() else _Seen(_NONE, _ALL)
  return _sum(0, 0, number.item()) if np.issubdtype(number.dtype, np.signedinteger) else None


def _apply(equation: JaxprEqn, given: list[_Value]) -> list[_Value]:
  rule = _RULES.get(equation.primitive.name)
  found = None if rule is None else rule(*given)
  return [found] * len(equation.outvars)


def _sum(query: int, key: int, rest: int) -> _Value:
  small = abs(query) + abs(key) <= _MOST_FACTORS and abs(rest) < _MOST_REST
  return _Sum(query, key, rest) if small else None


def _add(a: _Value, b: _Value) -> _Value:
  if not (isinstance(a, _Sum) and isinstance(b, _Sum)):
    return None
  return _sum(*(x + y for x, y in zip(a, b)))


def _times(a: _Value, number: int) -> _Value:
  return _sum(*(x * number for x in a)) if isinstance(a, _Sum) else None


def _subtract(a: _Value, b: _Value) -> _Value:
  return _add(a, _times(b, -1))


def _multiply(a: _Value, b: _Value) -> _Value:
  for x, y in ((a, b), (b, a)):
    if isinstance(x, _Sum) and x[:2] == (0, 0):
      return _times(y, x.rest)
  return None


def _most(a: _Value, most: int) -> _Seen:
  """Returns whether a number is at most `most`."""
  if isinstance(a, _Size):
    below, above = _most(a.sum, most), _most(_times(a.sum, -1), most)
    return _and(below, above)
  if not isinstance(a, _Sum) or a.query != -a.key:
    return _UNKNOWN
  factor, left = a.key, most - a.rest  # factor * distance <= left
  if factor == 0:
    return _Seen(_ALL, _NONE) if left >= 0 else _Seen(_NONE, _ALL)
  if factor > 0:
    end = left // factor
    return _Seen((-math.inf, end), (end + 1, math.inf))
  end = -(left // -factor)
  return _Seen((end, math.inf), (-math.inf, end - 1))


def _less_equal(a: _Value, b: _Value, more: int = 0) -> _Seen:
  """Returns whether a + more <= b."""
  for x, y, sign in ((a, b, 1), (b, a, -1)):
    if isinstance(x, _Size) and isinstance(y, _Sum) and y[:2] == (0, 0):
      # A size that is at least a number is not at most the number below it.
      return _most(x, y.rest - more) if sign > 0 else _not(_most(x, y.rest + more - 1))
  return _most(_subtract(a, b), -more)


def _equal(a: _Value, b: _Value) -> _Seen:
  return _and(_less_equal(a, b), _less_equal(b, a))


def _not(a: _Value) -> _Seen:
  return _Seen(a.false, a.true) if isinstance(a, _Seen) else _UNKNOWN


def _and(a: _Value, b: _Value) -> _Seen:
  a, b = (x if isinstance(x, _Seen) else _UNKNOWN for x in (a, b))
  (low, high), (other_low, other_high) = a.true, b.true
  hull = min(a.false[0], b.false[0]), max(a.false[1], b.false[1])
  return _Seen((max(low, other_low), min(high, other_high)), hull)


def _or(a: _Value, b: _Value) -> _Seen:
  return _not(_and(_not(a), _not(b)))


def _same(a: _Value, *_: _Value) -> _Value:
  return a


# By the names of JAX's operations.
_RULES: dict[str, Callable[..., _Value]] = {
    "add": _add, "sub": _subtract, "neg": functools.partial(_times, number=-1), "mul": _multiply,
    "abs": lambda a: _Size(a) if isinstance(a, _Sum) else None,
    "le": _less_equal, "ge": lambda a, b: _less_equal(b, a), "eq": _equal,
    "lt": functools.partial(_less_equal, more=1), "gt": lambda a, b: _less_equal(b, a, 1),
    "ne": lambda a, b: _not(_equal(a, b)), "and": _and, "or": _or, "not": _not,
    "copy": _same, "reshape": _same, "broadcast_in_dim": _same, "squeeze": _same}
