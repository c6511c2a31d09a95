# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: every error names the argument, what it got and what it expected."""

from collections.abc import Callable, Collection, Mapping
import difflib
import functools
import inspect
import numbers
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.types import are_known

Array = jax.Array | np.ndarray


def require(condition: object, argument: str, got: object, expected: str) -> None:
  """Raises ValueError("argument: got ..., expected ...") unless the condition holds."""
  if not condition:
    raise ValueError(f"{argument}: got {got}; expected {expected}")


def describe(x: object) -> str:
  """Describes an array for an error message by dtype and shape, anything else by its repr."""
  if hasattr(x, "dtype") and hasattr(x, "shape"):
    return f"{_written(x.dtype)}{list(x.shape)}"
  return repr(x)


@functools.lru_cache(maxsize=64)  # numpy takes 6 microseconds to write the name of a dtype
def _written(dtype_of_array: object) -> str:
  return str(dtype_of_array)


def array(argument: str, x: object, expected: str) -> Array:
  """Returns an argument that must be a jax or numpy array.

  Raises:
    ValueError: `x` is not a jax or numpy array.
  """
  require(isinstance(x, (jax.Array, np.ndarray)), argument, type(x).__name__,
          f"a jax or numpy array, {expected}")
  return cast(Array, x)


def int32(argument: str, x: object, expected: str) -> Array:
  """Returns integers as an int32 array: those of an array, a number or a nested list.

  Numbers that are not jax arrays stay on the host. Traced numbers outside of int32 are clipped: the
  ends of the range are not positions in any cache, so they stay out of range.

  Raises:
    ValueError: not integers, or concrete numbers outside of int32.
  """
  given = x if isinstance(x, (jax.Array, np.ndarray)) else as_array(argument, x, expected)
  require(jnp.issubdtype(given.dtype, jnp.integer), argument, describe(given), expected)
  if given.dtype.itemsize >= 4 and given.dtype != jnp.int32:
    ends = np.iinfo(np.int32)
    if isinstance(given, jax.core.Tracer):
      given = jnp.clip(given, max(ends.min, int(np.iinfo(given.dtype).min)), ends.max)
    else:
      known = np.asarray(given)
      if known.size:
        require(ends.min <= known.min() and known.max() <= ends.max, argument,
                f"numbers from {known.min()} to {known.max()}", f"{expected} (int32)")
  return given.astype(np.int32)


def as_array(argument: str, x: object, expected: str) -> Array:
  """Returns a number or a nested list of numbers as an array, and an array as it is.

  Raises:
    ValueError: another type, or a list whose parts differ in shape.
  """
  if isinstance(x, (jax.Array, np.ndarray)):
    return x
  is_number = isinstance(x, (int, np.generic)) and not isinstance(x, bool)
  require(is_number or isinstance(x, (list, tuple)), argument, type(x).__name__,
          f"a jax or numpy array, or a list of numbers, {expected}")
  try:
    return np.asarray(x)
  except jax.errors.TracerArrayConversionError:
    return jnp.asarray(cast(list, x))
  except ValueError as error:
    raise ValueError(f"{argument}: got {x!r}; expected {expected}") from error


def dtype(argument: str, x: Any, expected: str) -> np.dtype:
  """Returns the dtype that a name or class stands for.

  Raises:
    ValueError: not a dtype.
  """
  try:
    return jnp.dtype(x)
  except TypeError as error:
    raise ValueError(f"{argument}: got {x!r}; expected {expected}") from error


def floating(argument: str, x: object, rank: int, dimensions: str) -> Array:
  """Returns a floating-point array of a rank.

  Raises:
    ValueError: another rank or dtype.
  """
  given = array(argument, x, f"{dimensions} of a floating-point dtype")
  require(given.ndim == rank and jnp.issubdtype(given.dtype, jnp.floating), argument,
          describe(given), f"{dimensions} of a floating-point dtype")
  return given


def known_sizes(argument: str, cache: object, query: Array) -> None:
  """Checks that a call with a cache has no symbolic size.

  Raises:
    NotImplementedError: it has one.
  """
  if cache is not None and not are_known(*query.shape):
    raise NotImplementedError(
        f"{argument} with query {query.dtype}[{', '.join(map(str, query.shape))}]: symbolic sizes "
        "of jax.export are not supported with a cache; export a program for each number of new "
        "tokens, or calls without a cache")


def broadcastable(argument: str, x: Array, shape: tuple[int, ...], dimensions: str) -> None:
  """Checks that every dimension is 1 or that of `shape`.

  Raises:
    ValueError: another rank or size.
  """
  require(x.ndim == len(shape) and all(n in (1, full) for n, full in zip(x.shape, shape)),
          argument, describe(x), f"{dimensions} = {list(shape)}, any dimension may be 1")


def number(argument: str, x: object, expected: str,
           good: Callable[[Any], object] = lambda x: True) -> float:
  """Returns a static real number as a float.

  Raises:
    ValueError: a tracer, another type, or `good(x)` is false.
  """
  is_number = isinstance(x, (numbers.Real, np.number)) and not isinstance(x, (bool, np.bool_))
  require(is_number, argument, describe(x), f"{expected}, a static Python number")
  require(good(x), argument, repr(x), expected)
  return float(cast(float, x))


def elementwise(argument: str, function: object, parameters: str, operands: int,
                consequence: str = "") -> None:
  """Checks a user's elementwise function of some parameters and of operands.

  Args:
    argument: name of the function in the call custom(function, *operands).
    function: the function.
    parameters: its parameters before the operands, separated by ", ".
    operands: number of operands.
    consequence: of an array among the operands, for the message.

  Raises:
    ValueError: it is not callable, does not accept the parameters and operands, or captures a
      traced array.
  """
  given = f"custom: {argument}={function!r}"
  if not callable(function):
    raise ValueError(f"{given}; expected a callable of ({parameters}, *operands)")
  count = parameters.count(", ") + 1 + operands
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # of a builtin: it is found out when it is called
    signature = None
  try:
    if signature is not None:
      signature.bind(*[None] * count)
  except TypeError as error:
    more = f", and {operands} operands" if operands else ""
    raise ValueError(f"{given} with parameters {signature} ({error}); expected {count}: "
                     f"{parameters}{more}") from error
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(_captured(function))):
    raise ValueError(f"{given} captures a traced array; expected it among the operands: "
                     f"custom({argument}, array) passes it to the {argument} as its last argument"
                     f"{consequence}")


def _captured(function: object) -> list[object]:
  """The objects that a function holds: closure cells, defaults, arguments bound by `partial`."""
  if isinstance(function, functools.partial):
    return [function.args, function.keywords, _captured(function.func)]
  found = [getattr(function, "__defaults__", None)]
  for cell in getattr(function, "__closure__", None) or ():
    try:
      found.append(cell.cell_contents)
    except ValueError:  # not assigned yet
      pass
  return found


def integer(argument: str, x: object, expected: str,
            good: Callable[[Any], object] = lambda x: True) -> int:
  """Returns a static integer in the range of int32.

  Raises:
    ValueError: a tracer, another type or range, or `good(x)` is false.
  """
  is_integer = (isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.bool_))
                and -2**31 <= x < 2**31)
  require(is_integer and good(x), argument, describe(x), f"{expected}, a static Python int (int32)")
  return int(cast(int, x))


def one_of(argument: str, x: object, known: Collection[object],
           other_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> None:
  """Raises ValueError that lists the known values, and those close to x, unless x is among them.

  Args:
    argument: its name.
    x: its value.
    known: the values that it may have.
    other_names: name that users may know -> the known values that it suggests.
  """
  require(x in known, argument, repr(x),
          "one of " + ", ".join(map(repr, known)) + suggestion(x, known, other_names))


def suggestion(x: object, known: Collection[object],
               other_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> str:
  """Returns "; did you mean ...?" with the known values close to x; "" if there are none."""
  if not isinstance(x, str):
    return ""
  name = x.strip().lower().replace("-", "_").replace(" ", "_")
  names = {value: (value,) for value in known if isinstance(value, str)} | dict(other_names)
  meant = names.get(name) or next(
      (names[close] for close in difflib.get_close_matches(name, names, 1, 0.7)), ())
  return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def query_key_value(query: Array, key: Array, value: Array, *, quantized: bool = False,
                    mixed: bool = False) -> None:
  """Checks shapes and dtypes in layout bthd; a quantized key and value may have any dtype.

  Args:
    query: [B, T, H, D].
    key: [B, S, K, D]; quantized in uint8, which holds two numbers, [B, S, K, D / 2].
    value: [B, S, K, E].
    quantized: whether key and value may have any dtype.
    mixed: whether key and value may have any floating-point dtype.

  Raises:
    ValueError: any disagreement, or no heads or width; B, T and S may be 0.
  """
  floating("query", query, 4, "[B, T, H, D]")
  if not quantized:
    floating("key", key, 4, "[B, S, K, D]")
    floating("value", value, 4, "[B, S, K, E]")
  for name, x in (("query", query), ("key", key), ("value", value)):
    require(0 not in x.shape[2:], name, describe(x), "heads and a width, not of size 0")
    require(quantized or mixed or x.dtype == query.dtype, name, describe(x),
            f"the query's dtype {query.dtype}; pass compute_dtype to compute in one dtype, or cast "
            "one of them (a cache has that of its init)")
  batch, _, heads, width = query.shape
  pairs = 2 if quantized and key.dtype == jnp.uint8 else 1
  require(key.shape[0] == batch and key.shape[3] * pairs == width, "key", describe(key),
          f"[{batch}, S, K, {width if pairs == 1 else width / 2:g}], B and "
          f"{'half of ' * (pairs - 1)}D of the query {describe(query)}")
  require(value.shape[:3] == key.shape[:3], "value", describe(value),
          f"{list(key.shape[:3])} and any width, as the key {describe(key)}")
  require(heads % key.shape[2] == 0, "key", describe(key),
          f"a number of key heads that divides the {heads} query heads")


def cum_seqlens(argument: str, x: object, total: int) -> Array:
  """Returns int32 offsets from 0 to `total`; values are checked where they are concrete.

  Raises:
    ValueError: not integers, another rank, or offsets that do not rise from 0 to the total.
  """
  expected = f"int32 [B + 1] offsets that start at 0, never decrease, and end at the total {total}"
  given = int32(argument, x, expected)
  require(given.ndim == 1 and given.shape[0] >= 2, argument, describe(given), expected)
  if not isinstance(given, jax.core.Tracer):
    offsets = np.asarray(given)
    require(offsets[0] == 0 and (np.diff(offsets) >= 0).all() and offsets[-1] == total,
            argument, offsets.tolist(), expected)
  return given


def window(sides: object) -> tuple[int | None, int | None]:
  """Returns `sliding_window` as (left, right), None for unbounded.

  Raises:
    ValueError: neither an int nor two, or one below -1.
  """
  if sides is None:
    return None, None
  expected = ("an int w for (w, w) or a pair (left, right) of ints >= 0 (tokens, inclusive), -1 or "
              "None for unbounded; 'W tokens, itself included' is (W - 1, 0)")
  pair = tuple(sides) if isinstance(sides, (tuple, list)) else (sides, sides)
  require(len(pair) == 2, "sliding_window", repr(sides), expected)
  for side in pair:
    if side is not None:
      integer("sliding_window", side, expected, lambda x: x >= -1)
  left, right = (None if side is None or side == -1 else int(side) for side in pair)
  return left, right


def chunk_size(size: object) -> int | None:
  """Returns `chunk_size` (tokens), None for unbounded.

  Raises:
    ValueError: neither None nor an int of at least 1.
  """
  if size is None:
    return None
  return integer("chunk_size", size, "an int >= 1 (tokens)", lambda x: x >= 1)
