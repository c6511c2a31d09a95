# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Look-ups of functions, done once before the kernels, which look nothing up.

What a function of `custom` computes from its operands, the batch row, the head and one of the two
positions alone, such as `slopes[head]` or `gate[query, head]`, is an array with a number for each
row and head, and maybe query or key. Kernels get these numbers in place of the operands, and
evaluate the rest of the function. `arguments.mask_lookups` does the same for predicates of masks.
"""

import dataclasses
import functools
import operator
from typing import Any, Callable, Sequence

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import array_axes, operations
from attn_core.masks.mask import Mask
from attn_core.masks.materialize import Shape
from attn_core.score_mods import evaluate, terms
from attn_core.score_mods.score_mod import Composed, ScoreMod
from attn_core.types import MaskOperands, at_least_float32

# What a value depends on: bits of a set.
_ROW, _HEAD, _QUERY, _KEY, _SCORE = 1, 2, 4, 8, 16
_NO_POSITIONS = np.zeros((1, 1, 1, 1), np.int32)


def before(term: ScoreMod, shape: Shape, dtype: DTypeLike, mask: Mask | None) -> ScoreMod:
  """Returns a term whose functions get the results of their look-ups.

  Args:
    term: any term; a function that also looks numbers up in another way, such as by both positions,
      is left as it is.
    shape: (B, H, T, S) of the call.
    dtype: of the query.
    mask: whose positions count; None: positions are not known.
  """
  if isinstance(term, Composed):
    return Composed(*(before(x, shape, dtype, mask) for x in (term.first, term.second)))
  if not isinstance(term, terms.Custom):
    return term
  dtype = at_least_float32(dtype)
  shapes = tuple(jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in term.operands)
  rest = Rest(term.function, shapes, _ROW | _HEAD | (0 if mask is None else _QUERY | _KEY))
  found = _done_before(rest, dtype, lambda: tuple(x[0, 0] for x in term.operands), shape,
                       lambda: (_NO_POSITIONS,) * 2 if mask is None else _places(mask, shape))
  return term if found is None else terms.Custom(found[0], (), found[1])


def _done_before(rest: "Rest", dtype: np.dtype, operands_of: Callable[[], tuple[jax.Array, ...]],
                 shape: Shape, places_of: Callable[[], tuple[Any, Any]],
                 ) -> "tuple[Rest, tuple[jax.Array, ...]] | None":
  """Returns the rest and the results of its look-ups; None: there are others, or none.

  Args:
    rest: the function, of which it is not known on what its look-ups depend.
    dtype: of the scores and of the results; int32: there are no scores, see `of_predicate`.
    operands_of: returns the operands.
    shape: (B, H, T, S) of the call.
    places_of: returns the positions of queries and keys, [B or 1, 1, T or 1, S or 1].
  """
  depends = _depends_of_numbers(rest, dtype, operations.settings())
  if not depends:
    return None
  operands, places = operands_of(), places_of()
  mesh = array_axes.typed_mesh(*operands, *places)
  if mesh is not None:
    whole = lambda x: array_axes.reshard(x, mesh, jax.sharding.PartitionSpec())
    operands, places = jax.tree.map(whole, (operands, places))
  rest = dataclasses.replace(rest, depends=depends)
  return rest, _numbers(rest, (shape, dtype), operands, places)


def of_predicate(function: Callable[..., jax.Array], operands: tuple[jax.Array, ...], shape: Shape,
                 places: tuple[jax.Array, jax.Array],
                 ) -> "tuple[Rest, tuple[jax.Array, ...]] | None":
  """Returns a predicate without its look-ups, and their results; None: it has others, or none.

  Args:
    function: of a score that it ignores, the batch row, the head, the positions and the operands.
    operands: given unchanged.
    shape: (B, H, T, S) of the call.
    places: the positions of queries and keys, [B or 1, 1, T or 1, S or 1].

  Returns:
    (the rest, for each of its `depends` int32 [B or 1, H or 1, T or 1, S or 1]).
  """
  shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
  rest = Rest(function, shapes, _ROW | _HEAD | _QUERY | _KEY)
  return _done_before(rest, np.dtype(np.int32), lambda: operands, shape, lambda: places)


def side_of(depends: int) -> str | None:
  """Returns of what a result of `of_predicate` has numbers: "query", "key", "head"; None: of a row.

  Those of a head may be of its queries or keys.
  """
  if depends & _HEAD:
    return "head"
  return "query" if depends & _QUERY else "key" if depends & _KEY else None


def _places(mask: Mask, shape: Shape) -> tuple[jax.Array, jax.Array]:
  """Returns the positions of queries and keys, [B or 1, 1, T or 1, S or 1]."""
  arrays, structure = jax.tree.flatten(mask)
  at = evaluate.positions(structure, MaskOperands(tuple(map(jnp.asarray, arrays))), shape)
  return at.query_position, at.key_position


@functools.partial(jax.jit, static_argnums=(0, 1))
def _numbers(rest: "Rest", scores: tuple[Shape, np.dtype], operands: tuple[jax.Array, ...],
             places: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
  """Returns the results of look-ups, [B or 1, H or 1, T or 1, S or 1].

  Args:
    rest: the function.
    scores: shape and dtype of all scores.
    operands: of the function.
    places: positions of queries and keys, [B or 1, 1, T or 1, S or 1].
  """
  (rows, heads, queries, keys), dtype = scores

  def of_row(row: jax.Array, query: jax.Array, key: jax.Array) -> list[jax.Array]:
    score = jax.ShapeDtypeStruct((heads, queries, 1, keys), dtype)
    head = jnp.arange(heads, dtype=jnp.int32).reshape(-1, 1, 1, 1)
    at = row, head, query.reshape(1, -1, 1, 1), key.reshape(1, 1, 1, -1)
    return [x for _, x in rest.numbers(score, at, operands)]

  several = [x.shape[0] != 1 for x in places]
  by_row = _ROW | _QUERY * several[0] | _KEY * several[1]
  numbers = jax.vmap(of_row, (0, *(0 if x else None for x in several)),
                     [0 if x & by_row else None for x in rest.depends])(
                         jnp.arange(rows, dtype=jnp.int32), *places)
  return tuple(x if depends & by_row else x[None]
               for x, depends in zip(numbers, rest.depends, strict=True))


@dataclasses.dataclass(frozen=True)
class Rest:
  """A function without its look-ups: called as it is, with their results in place of operands."""

  function: Callable[..., jax.Array]
  operands: tuple[jax.ShapeDtypeStruct, ...]  # of the function
  known: int  # what the look-ups may depend on
  depends: tuple[int, ...] = ()  # what each of their results depends on

  def __str__(self) -> str:
    return getattr(self.function, "__qualname__", str(self.function))

  def __call__(self, score: jax.Array | jax.ShapeDtypeStruct, row: Any, head: Any, query: Any,
               key: Any, *numbers: jax.Array) -> jax.Array:
    at: tuple[Any, ...] = (row, head, query, key)
    left = list(numbers)
    if not all(map(functools.partial(_fits, at), numbers, self.depends)):
      at = tuple(jnp.broadcast_to(x, score.shape) for x in at)
    def number(value: _Value, like: Any) -> jax.Array:
      if value.number is None:
        value.number = _decoded(left, like.dtype)
      # Kernels have no reshapes: a scalar of the function may have axes of length 1.
      return _repeated(value.number, like) if like.shape else value.number
    traced = self._trace(score, at, self.operands)
    found, = _Parts(self.known, number, is_rest=True).run(traced, (score, *at), self.operands)
    if left:
      raise _NotBefore
    return found

  def numbers(self, score: jax.ShapeDtypeStruct, at: Sequence[jax.Array],
              operands: Sequence[jax.Array]) -> list[tuple[int, jax.Array]]:
    """Returns what each look-up depends on and its result, [H or 1, T or 1, S or 1].

    Args:
      score: those of all heads, queries and keys, [H, T, 1, S].
      at: the batch row, a number, and the head and the positions, with the axes of the scores.
      operands: of the function.

    Raises:
      _NotBefore: there are none, or the function looks something up in another way.
    """
    found: list[tuple[int, jax.Array]] = []
    def number(value: _Value, like: jax.core.ShapedArray) -> None:
      if value.number is not None:
        return
      value.number = value.array
      for x in _encoded(jnp.asarray(value.array), score.dtype):
        four = x.reshape((1,) * (4 - x.ndim) + x.shape)
        own = (value.depends & _HEAD, value.depends & _QUERY, 0, value.depends & _KEY)
        if any(n != 1 and (n != whole or not has) for n, whole, has in zip(
            four.shape, score.shape, own, strict=True)):
          raise _NotBefore  # numbers for every pair would be quadratic
        found.append((value.depends, four[:, :, 0]))
    parts = _Parts(self.known, number, is_rest=False)
    parts.run(self._trace(score, at, operands), (None, *at), _cast(operands, score.dtype))
    if not parts.looks_up:
      raise _NotBefore
    return found

  def _trace(self, score: Any, at: Sequence[Any], operands: Sequence[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(self.function)(score, *at, *_cast(operands, score.dtype))


class _NotBefore(Exception):
  """Raised where the look-ups of a function cannot be done before."""


@dataclasses.dataclass(eq=False)
class _Value:
  """A value in a function, evaluated in part; its array is computed where it is read."""

  depends: int
  make: Callable[[], Any]
  of_operands: bool = False  # whether it is computed from operands, or arrays that are captured
  is_operand: bool = False  # or one of them
  number: Any = None  # of an early value that the rest reads

  @functools.cached_property
  def array(self) -> Any:
    return self.make()


@dataclasses.dataclass
class _Parts:
  """An evaluation of one part of a function: of its look-ups, or of the rest.

  Values are late, or early: computed from operands by the look-ups, or without them by both parts.
  """

  known: int  # what early values may depend on
  number: Callable[[_Value, Any], Any]  # gives the rest an early value of this type
  is_rest: bool
  looks_up: bool = False  # whether an early value is made from an array

  def run(self, traced: ClosedJaxpr, at: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Returns the results of the part; of the look-ups, `number` gets them."""
    depends = _SCORE, _ROW, _HEAD, _QUERY, _KEY
    given = [*map(_constant, at, depends), *map(_operand, operands)]
    found = operations.evaluate(
        traced.jaxpr, traced.consts, given, functools.partial(self._apply, traced.jaxpr),
        operations.Walk(("jit", "pjit"), literal=_constant, captured=_operand))
    return [self._for_rest(value, x.aval) for value, x in zip(found, traced.jaxpr.outvars)]

  def _apply(self, jaxpr: Jaxpr, equation: JaxprEqn, values: list[_Value]) -> list[_Value]:
    depends = functools.reduce(operator.or_, (x.depends for x in values), 0)
    types: list[Any] = [x.aval for x in equation.invars]
    bind = lambda arrays: operations.bind_whole(equation, jaxpr, arrays)
    if self._is_late(depends) or equation.effects:
      arrays = list(map(self._for_rest, values, types))
      found = bind(_aligned(equation, arrays, types)) if self.is_rest else [
          None] * len(equation.outvars)
      return [_constant(x, depends | _SCORE) for x in found]
    if _is_repeated(equation):  # one number for the rest, which all its elements might not be
      return values
    of_operands = any(x.of_operands for x in values)
    self.looks_up |= any(x.is_operand and like.shape for x, like in zip(values, types))
    results = functools.cache(lambda: bind([_repeated(x.array, like)
                                            for x, like in zip(values, types)]))
    result = lambda n: lambda: results()[n]
    return [_Value(depends, result(n), of_operands) for n in range(len(equation.outvars))]

  def _is_late(self, depends: int) -> bool:
    return bool(depends & ~self.known) or depends & (_QUERY | _KEY) == _QUERY | _KEY

  def _for_rest(self, value: _Value, like: Any) -> Any:
    """Returns a value of this type for the rest; None in the other part."""
    if value.is_operand and np.shape(value.array):
      raise _NotBefore
    if value.of_operands:
      return self.number(value, like)
    return _repeated(value.array, like) if self.is_rest else None


def _aligned(equation: JaxprEqn, arrays: list[Any], types: list[Any]) -> list[Any]:
  """Returns the inputs of an operation, which all have the same axes where one has more than known.

  Raises:
    _NotBefore: the operation calls a function of fewer axes.
  """
  if all(np.shape(x) == like.shape for x, like in zip(arrays, types)):
    return arrays
  if operations.inner(equation) is not None:
    if any(x.size != 1 for x, like in zip(arrays, types) if np.shape(x) != like.shape):
      raise _NotBefore
    return [x if np.shape(x) == like.shape else x.reshape(like.shape)
            for x, like in zip(arrays, types)]
  whole = jnp.broadcast_shapes(*map(np.shape, arrays))
  return [jnp.broadcast_to(x, whole) for x in arrays]


def _constant(x: Any, depends: int = 0) -> _Value:
  return _Value(depends, lambda: x)


def _operand(x: Any) -> _Value:
  return _Value(0, lambda: x, of_operands=True, is_operand=True)


def _repeated(x: Any, like: Any) -> Any:
  """Returns an array along the axes of a type, some of which it may not have."""
  return x if np.shape(x) == like.shape else jnp.broadcast_to(x, like.shape)


def _fits(at: Sequence[Any], x: jax.Array, depends: int) -> bool:
  """Returns whether a number has no other axes than the indices that it depends on."""
  own = jnp.broadcast_shapes(*(np.shape(y) for n, y in enumerate(at) if depends >> n & 1))
  return x.size == 1 or jnp.broadcast_shapes(own, x.shape) == own


def _is_repeated(equation: JaxprEqn) -> bool:
  """Returns whether an operation only repeats an array along axes, or adds axes before them."""
  if equation.primitive.name != "broadcast_in_dim" or len(equation.invars) != 1:
    return False
  given: Any = equation.invars[0].aval
  rank, ndim = len(given.shape), len(equation.params["shape"])
  return tuple(equation.params["broadcast_dimensions"]) == tuple(range(ndim - rank, ndim))


@functools.lru_cache(maxsize=64)  # a function is traced, and every call asks
def _depends_of_numbers(rest: Rest, dtype: np.dtype, settings: tuple) -> tuple[int, ...]:
  """Returns what the look-ups of a function depend on; (): it has none, or others, too.

  Args:
    rest: the function.
    dtype: of the scores.
    settings: those of `operations.settings`.
  """
  del settings  # which count where the function is traced
  score = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
  number = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
  depends: list[int] = []
  def numbers(at: Sequence[jax.Array], operands: Sequence[jax.Array]) -> None:
    depends.extend(x for x, _ in rest.numbers(score(3, 5, 1, 7), at, operands))
  try:
    at = number(), number(3, 1, 1, 1), number(1, 5, 1, 1), number(1, 1, 1, 7)
    jax.eval_shape(numbers, at, rest.operands)
    # The tiles of kernels have other axes: the rest has to be the same there.
    one, whole = number(1, 1), number(8, 8)
    rest = dataclasses.replace(rest, depends=tuple(depends))
    jax.eval_shape(rest, score(3, 5, 1, 7), *at, *(score(
        3 if x & _HEAD else 1, 5 if x & _QUERY else 1, 1, 7 if x & _KEY else 1) for x in depends))
    jax.eval_shape(rest, score(8, 8), one, one, whole, whole, *(score(1, 1) for _ in depends))
    jax.eval_shape(rest, score(8, 8), one, one, whole, whole, *(score(8, 8) for _ in depends))
    jax.eval_shape(rest, score(8, 8), number(), number(), whole, whole, *(score() for _ in depends))
  except (_NotBefore, IndexError, TypeError, ValueError):
    return ()
  return tuple(depends)


def _encoded(x: jax.Array, dtype: np.dtype) -> list[jax.Array]:
  """Returns arrays of a dtype, float or int32, that `_decoded` makes the same array of."""
  if dtype == np.int32:
    return [_as_int32(x)]
  if x.dtype == np.int32:
    return [(x >> 16).astype(dtype), (x & 0xffff).astype(dtype)]
  is_small = x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize <= 2
  if is_small or jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= dtype.itemsize:
    return [x.astype(dtype)]
  raise _NotBefore


def _as_int32(x: jax.Array) -> jax.Array:
  """Returns an array of at most 32 bits as int32, floats by their bits."""
  if x.dtype.itemsize > 4 or not (
      x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(
          x.dtype, jnp.floating)):
    raise _NotBefore
  if jnp.issubdtype(x.dtype, jnp.floating):
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  return x.astype(np.int32)


def _decoded(left: list[jax.Array], dtype: np.dtype) -> jax.Array:
  """Returns the next array of `_encoded` arrays, which it takes out of the list."""
  if left and left[0].dtype == np.int32:
    number = left.pop(0)
    if jnp.issubdtype(dtype, jnp.floating):
      return lax.bitcast_convert_type(number, jnp.float32).astype(dtype)
    return number != 0 if dtype == np.bool_ else number.astype(dtype)
  taken = 2 if dtype == np.int32 else 1
  if len(left) < taken:
    raise _NotBefore
  first, *low = (left.pop(0) for _ in range(taken))
  if low:
    return first.astype(np.int32) * 65536 + low[0].astype(np.int32)
  return first != 0 if dtype == np.bool_ else first.astype(dtype)


def _cast(operands: Sequence[Any], dtype: np.dtype) -> tuple[Any, ...]:
  """Returns the operands as a function of float scores gets them: floats in their dtype."""
  def cast(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.issubdtype(dtype, jnp.floating):
      return x
    return jax.ShapeDtypeStruct(x.shape, dtype) if isinstance(
        x, jax.ShapeDtypeStruct) else x.astype(dtype)
  return tuple(map(cast, operands))
