# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: every error names the argument, what it got and what it expected."""

from collections.abc import Callable, Collection
import functools
import numbers
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

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
  """Returns an array of integers as int32, clipped to its range so that none wraps around.

  The ends of the range are not positions in any cache, so clipped numbers stay out of range.

  Raises:
    ValueError: not an array of integers.
  """
  given = array(argument, x, expected)
  require(jnp.issubdtype(given.dtype, jnp.integer), argument, describe(given), expected)
  if given.dtype.itemsize >= 4 and given.dtype != jnp.int32:
    # In numpy for numpy arrays: jax would truncate the numbers first.
    ends = np.iinfo(np.int32)
    low, high = max(ends.min, int(np.iinfo(given.dtype).min)), ends.max
    clip = np.clip if isinstance(given, np.ndarray) else jnp.clip
    given = clip(given, low, high)
  return given.astype(np.int32)


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


def one_of(argument: str, x: object, known: Collection[object]) -> None:
  """Raises ValueError that lists the known values unless x is among them."""
  require(x in known, argument, repr(x), "one of " + ", ".join(map(repr, known)))


def query_key_value(query: Array, key: Array, value: Array, *, quantized: bool = False) -> None:
  """Checks shapes and dtypes in layout bthd; a quantized key and value may have any dtype.

  Raises:
    ValueError: any disagreement, or no heads or width; B, T and S may be 0.
  """
  floating("query", query, 4, "[B, T, H, D]")
  if not quantized:
    floating("key", key, 4, "[B, S, K, D]")
    floating("value", value, 4, "[B, S, K, E]")
  for name, x in (("query", query), ("key", key), ("value", value)):
    require(0 not in x.shape[2:], name, describe(x), "heads and a width, not of size 0")
    require(quantized or x.dtype == query.dtype, name, describe(x),
            f"the query's dtype {query.dtype}; cast one of them (a cache has that of its init)")
  batch, _, heads, width = query.shape
  require(key.shape[0] == batch and key.shape[3] == width, "key", describe(key),
          f"[{batch}, S, K, {width}], B and D of the query {describe(query)}")
  require(value.shape[:3] == key.shape[:3], "value", describe(value),
          f"{list(key.shape[:3])} and any width, as the key {describe(key)}")
  require(heads % key.shape[2] == 0, "key", describe(key),
          f"a number of key heads that divides the {heads} query heads")


def cum_seqlens(argument: str, x: object, total: int) -> Array:
  """Returns int32 offsets from 0 to `total`; values are checked where they are concrete.

  Raises:
    ValueError: another dtype or rank, or offsets that do not rise from 0 to the total.
  """
  expected = f"int32 [B + 1] offsets that start at 0, never decrease, and end at the total {total}"
  given = array(argument, x, expected)
  require(given.ndim == 1 and given.shape[0] >= 2 and given.dtype == jnp.int32, argument,
          describe(given), expected)
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
