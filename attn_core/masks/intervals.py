# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that a predicate shows or hides as a whole, by interval arithmetic on its operations.

For a block of queries and keys, a predicate is evaluated once, on the smallest and largest position
and looked-up number of the block. Each operation gives the ends between which its results lie; of
booleans, whose smallest is False, the ends say whether all pairs are visible and whether some may
be. An operation without a rule may give any number of its type, so what is known stays true.
"""

import functools
import operator
from typing import Any, Callable, Sequence, TypeVar

import jax
from jax.extend.core import Jaxpr, JaxprEqn
import jax.numpy as jnp
import numpy as np

from attn_core import operations
from attn_core.masks.mask import Booleans, Bounds, Grid, Interval, NumpyModule

_INT32 = np.iinfo(np.int32)
Value = TypeVar("Value")


def bounds(predicate: Callable[..., Booleans], grid: Grid, numbers: object,
           ranges: Sequence[Interval]) -> Bounds:
  """Returns `Mask.bounds` of a predicate.

  Args:
    predicate: of a batch row, a head, the positions and `numbers`; elementwise.
    grid: the blocks.
    numbers: a tuple of trees of shapes, its other arguments.
    ranges: intervals of the numbers of a block, for each shape in order; (): any numbers.
  """
  xp = grid.xp
  everything = xp.ones((1, 1, 1, 1), bool)
  index = Interval(*(xp.full((1, 1, 1, 1), x, np.int32) for x in (0, _INT32.max)))
  given: list[Interval | None] = [index, index, grid.query_position, grid.key_position, *ranges]
  found = evaluate(
      predicate, numbers, given, functools.partial(_apply, xp), functools.partial(_literal, xp))
  return (everything, ~everything) if found is None else (found.high, found.low)


def evaluate(predicate: Callable[..., Booleans], numbers: object, given: list[Value],
             apply: operations.Bind[Value], literal: Callable[[object], Value]) -> Value | None:
  """Returns the result of a predicate of single pairs, in another arithmetic; None: anything.

  So it is where the predicate takes no single pairs, or does more than return a boolean.

  Args:
    predicate, numbers: as in `bounds`.
    given: values of its first arguments; others, and arrays that it captures, may be any numbers.
    apply: see `operations.evaluate`.
    literal: returns the value of a constant.
  """
  leaves, structure = jax.tree.flatten(numbers)
  shapes = tuple((x.shape, x.dtype) for x in leaves)
  jaxpr = _traced(predicate, structure, shapes, operations.settings())
  if jaxpr is None:
    return None
  others: list[Any] = [None] * (len(jaxpr.invars) - len(given))
  captured: Callable[[Any], Any] = lambda _: None
  found, = operations.evaluate(jaxpr, [None] * len(jaxpr.constvars), [*given, *others], apply,
                               operations.Walk(literal=literal, captured=captured))
  return found


@functools.lru_cache(maxsize=256)  # predicates are traced, and each block map asks
def _traced(predicate: Callable[..., Booleans], structure: jax.tree_util.PyTreeDef,
            shapes: tuple[tuple[tuple[int, ...], Any], ...], settings: tuple) -> Jaxpr | None:
  """Returns a predicate of single pairs, as JAX traces it with some settings; see `evaluate`."""
  del settings  # which count where the predicate is traced
  index = jax.ShapeDtypeStruct((), np.int32)
  numbers = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in shapes])
  try:
    traced = jax.make_jaxpr(lambda *x: (jnp.asarray(predicate(*x)),))(*[index] * 4, *numbers)
  except Exception:  # pylint: disable=broad-exception-caught
    return None  # the predicate's own, of which `visible` tells the caller
  result, = traced.out_avals
  is_one = result.shape == () and result.dtype == bool and not traced.effects
  return traced.jaxpr if is_one else None


def _literal(xp: NumpyModule, x: Any) -> Interval | None:
  number = np.asarray(x)  # int64 for Python's; its type is that of the operation
  if number.size != 1 or number.dtype != bool and not np.issubdtype(number.dtype, np.signedinteger):
    return None
  return Interval(*(xp.asarray(number.reshape(1, 1, 1, 1)),) * 2)


def _apply(xp: NumpyModule, equation: JaxprEqn, given: list[Interval | None]) -> list:
  """Returns intervals of the results of an operation; None: any numbers."""
  types: list[Any] = [x.aval for x in equation.invars]
  results: list[Any] = [x.aval for x in equation.outvars]
  name = equation.primitive.name
  rule = _RULES.get(name) if name != "convert_element_type" else functools.partial(
      _convert, dtype=results[0].dtype)
  known = sum(x is not None for x in given)
  if rule is None or not all(_has_rules(x.dtype) for x in (*types, *results)) or known < (
      1 if name in _OF_SOME else len(given)):
    return [None] * len(results)
  return [rule(xp, *(_any(xp, like.dtype) if x is None else Interval(
      *(y.astype(like.dtype) for y in x)) for x, like in zip(given, types)))]


def _has_rules(dtype: Any) -> bool:
  """Returns whether there are rules for a type, which may be one that NumPy does not have.

  Not for integers of 64 bits, so that what is known does not depend on `jax_enable_x64`: numbers
  that do not wrap around in fewer bits are the same in 64.
  """
  return dtype == np.bool_ or jnp.issubdtype(dtype, np.signedinteger) and dtype.itemsize <= 4


def _any(xp: NumpyModule, dtype: Any) -> Interval:
  """Returns the interval of all numbers of a type."""
  ends = (False, True) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
  return Interval(*(xp.full((1, 1, 1, 1), x, dtype) for x in ends))


def _unless(xp: NumpyModule, wraps: Any, low: Any, high: Any) -> Interval:
  """Returns an interval, or that of all numbers where a result of the operation may wrap around."""
  least, most = np.iinfo(low.dtype).min, np.iinfo(low.dtype).max
  return Interval(xp.where(wraps, np.asarray(least, low.dtype), low),
                  xp.where(wraps, np.asarray(most, low.dtype), high))


def _hull(xp: NumpyModule, corners: Sequence[Any]) -> tuple[Any, Any]:
  """Returns the smallest and the largest of some arrays."""
  return functools.reduce(xp.minimum, corners), functools.reduce(xp.maximum, corners)


def _corners(function: Callable[[Any, Any], Any], a: Interval, b: Interval) -> list[Any]:
  return [function(x, y) for x in a for y in b]


def _add(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  found = [x + y for x, y in zip(a, b)]
  wraps = [((x < 0) == (y < 0)) & ((z < 0) != (x < 0)) for x, y, z in zip(a, b, found)]
  return _unless(xp, wraps[0] | wraps[1], *found)


def _subtract(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  found = [x - y for x, y in zip(a, reversed(b))]
  wraps = [((x < 0) != (y < 0)) & ((z < 0) != (x < 0)) for x, y, z in zip(a, reversed(b), found)]
  return _unless(xp, wraps[0] | wraps[1], *found)


def _negative(xp: NumpyModule, a: Interval) -> Interval:
  return _unless(xp, a.low == np.iinfo(a.low.dtype).min, -a.high, -a.low)


def _multiply(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  size = lambda x: functools.reduce(xp.maximum, [abs(y.astype(np.float32)) for y in x])
  wraps = size(a) * size(b) > float(np.iinfo(a.low.dtype).max) / 2  # far above float32's rounding
  return _unless(xp, wraps, *_hull(xp, _corners(operator.mul, a, b)))


def _absolute(xp: NumpyModule, a: Interval) -> Interval:
  apart = xp.maximum(xp.maximum(a.low, -a.high), np.asarray(0, a.low.dtype))
  return _unless(xp, a.low == np.iinfo(a.low.dtype).min, apart, xp.maximum(-a.low, a.high))


def _sign(xp: NumpyModule, a: Interval) -> Interval:
  return Interval(xp.sign(a.low), xp.sign(a.high))


def _quotient(x: Any, y: Any) -> Any:
  """Returns x / y for y > 0, rounded to zero."""
  return x // y + ((x % y != 0) & (x < 0)).astype(x.dtype)


def _at_least_one(xp: NumpyModule, b: Interval) -> Interval:
  return Interval(*(xp.maximum(x, np.asarray(1, x.dtype)) for x in b))


def _divide(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  found = _corners(_quotient, a, _at_least_one(xp, b))
  return _unless(xp, b.low <= 0, *_hull(xp, found))


def _remainder(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  """Returns x % y rounded to zero: it has the sign of x and lies between x and 0."""
  divisor = _at_least_one(xp, b)
  zero, most = np.asarray(0, a.low.dtype), divisor.high - np.asarray(1, a.low.dtype)
  low = xp.minimum(xp.maximum(a.low, -most), zero)
  high = xp.maximum(xp.minimum(a.high, most), zero)
  quotient = _quotient(a.low, divisor.low)
  one = (b.low == b.high) & (quotient == _quotient(a.high, divisor.low))
  first, last = (x - quotient * divisor.low for x in a)
  return _unless(xp, b.low <= 0, xp.where(one, first, low), xp.where(one, last, high))


def _shift_right(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  bits = a.low.dtype.itemsize * 8
  inside = Interval(*(xp.clip(x, 0, bits - 1) for x in b))
  found = _hull(xp, _corners(operator.rshift, a, inside))
  return _unless(xp, (b.low < 0) | (b.high >= bits), *found)


def _and(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  if a.low.dtype == bool:
    return Interval(a.low & b.low, a.high & b.high)
  # Of two numbers, one of which is not negative, the result is at most that one.
  most = np.asarray(np.iinfo(a.low.dtype).max, a.low.dtype)
  high = functools.reduce(xp.minimum, [xp.where(x.low >= 0, x.high, most) for x in (a, b)])
  return _unless(xp, (a.low < 0) & (b.low < 0), xp.zeros_like(high), high)


def _or(xp: NumpyModule, a: Interval, b: Interval) -> Interval | None:
  del xp
  return Interval(a.low | b.low, a.high | b.high) if a.low.dtype == bool else None


def _not(xp: NumpyModule, a: Interval) -> Interval:
  del xp
  return Interval(~a.high, ~a.low)  # of integers, too: -1 - x


def _equal(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  del xp
  return Interval((a.low == a.high) & (b.low == b.high) & (a.low == b.low),
                  (a.low <= b.high) & (b.low <= a.high))


def _not_equal(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  return _not(xp, _equal(xp, a, b))


def _less(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  del xp
  return Interval(a.high < b.low, a.low < b.high)


def _less_equal(xp: NumpyModule, a: Interval, b: Interval) -> Interval:
  return _not(xp, _less(xp, b, a))


def _select(xp: NumpyModule, which: Interval, *cases: Interval) -> Interval | None:
  if which.low.dtype != bool or len(cases) != 2:
    return None
  no, yes = cases
  low, high = xp.minimum(no.low, yes.low), xp.maximum(no.high, yes.high)
  choose = lambda x, y, both: xp.where(which.low, y, xp.where(which.high, both, x))
  return Interval(choose(no.low, yes.low, low), choose(no.high, yes.high, high))


def _convert(xp: NumpyModule, a: Interval, dtype: Any) -> Interval:
  if dtype == bool and a.low.dtype != bool:
    return _not_equal(xp, a, Interval(*(xp.zeros((1, 1, 1, 1), a.low.dtype),) * 2))
  if dtype == bool or a.low.dtype == bool or dtype.itemsize >= a.low.dtype.itemsize:
    return Interval(*(x.astype(dtype) for x in a))
  info = np.iinfo(dtype)
  wraps = (a.low < info.min) | (a.high > info.max)
  return _unless(xp, wraps, *(x.astype(dtype) for x in a))


def _same(xp: NumpyModule, a: Interval, *_: Interval) -> Interval:
  del xp
  return a


# Operations whose result is known in part where that of some inputs is.
_OF_SOME = ("and", "or", "select_n", "min", "max", "clamp", "rem")

# By the names of JAX's operations.
_RULES: dict[str, Callable[..., Interval | None]] = {
    "add": _add, "sub": _subtract, "neg": _negative, "mul": _multiply, "abs": _absolute,
    "sign": _sign, "div": _divide, "rem": _remainder, "shift_right_arithmetic": _shift_right,
    "and": _and, "or": _or, "not": _not, "eq": _equal, "ne": _not_equal, "xor": (
        lambda xp, a, b: _not_equal(xp, a, b) if a.low.dtype == bool else None),
    "lt": _less, "le": _less_equal, "gt": lambda xp, a, b: _less(xp, b, a),
    "ge": lambda xp, a, b: _less_equal(xp, b, a),
    "min": lambda xp, a, b: Interval(*map(xp.minimum, a, b)),
    "max": lambda xp, a, b: Interval(*map(xp.maximum, a, b)),
    "clamp": lambda xp, least, a, most: Interval(*(
        xp.minimum(xp.maximum(x, y), z) for x, y, z in zip(a, least, most))),
    "select_n": _select, "copy": _same, "reshape": _same, "broadcast_in_dim": _same,
    "squeeze": _same}
