"""Checks of arguments: every error names the argument, what came, what was expected, and the cure.

Letters: B batch, T query length, S key length, H query heads, K key heads, D and E widths.
"""

import numbers

import jax
import jax.numpy as jnp
import numpy as np


def require(condition, argument: str, got, expected: str) -> None:
  """Raises ValueError("argument: got ..., expected ...") unless the condition holds."""
  if not condition:
    raise ValueError(f"{argument}: got {got}; expected {expected}")


def describe(x) -> str:
  """An array in an error message: dtype and shape, not its numbers."""
  if hasattr(x, "dtype") and hasattr(x, "shape"):
    return f"{x.dtype}{list(x.shape)}"
  return repr(x)


def array(argument: str, x, expected: str):
  """An argument as an array.

  Raises:
    ValueError: it is None or no array.
  """
  require(isinstance(x, (jax.Array, np.ndarray)), argument, type(x).__name__,
          f"a jax or numpy array, {expected}")
  return x


def int32(argument: str, x, expected: str):
  """Integers as int32; those that it does not hold become its ends and none wraps around.

  The ends are no place in any cache, so such a number stays as wrong as it was.

  Raises:
    ValueError: it is no array of integers.
  """
  array(argument, x, expected)
  require(jnp.issubdtype(x.dtype, jnp.integer), argument, describe(x), expected)
  if x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
    # numpy's in numpy: jax would cut the numbers off first.
    xp, ends = np if isinstance(x, np.ndarray) else jnp, np.iinfo(np.int32)
    x = xp.clip(x, max(ends.min, int(np.iinfo(x.dtype).min)), ends.max)
  return x.astype(np.int32)


def dtype(argument: str, x, expected: str) -> np.dtype:
  """What a dtype's name or class stands for.

  Raises:
    ValueError: there is no such dtype.
  """
  try:
    return jnp.dtype(x)
  except TypeError as error:
    raise ValueError(f"{argument}: got {x!r}; expected {expected}") from error


def floating(argument: str, x, rank: int, letters: str):
  """A floating-point array of a rank.

  Raises:
    ValueError: another rank or dtype.
  """
  array(argument, x, f"{letters} of a floating-point dtype")
  require(x.ndim == rank and jnp.issubdtype(x.dtype, jnp.floating), argument, describe(x),
          f"{letters} of a floating-point dtype")
  return x


def broadcastable(argument: str, x, shape, letters: str) -> None:
  """Every dimension is 1 or that of `shape`.

  Raises:
    ValueError: another rank or size.
  """
  require(x.ndim == len(shape) and all(n in (1, full) for n, full in zip(x.shape, shape)),
          argument, describe(x), f"{letters} = {list(shape)}, any dimension may be 1")


def number(argument: str, x, expected: str, good=lambda x: True) -> float:
  """A static real number.

  Raises:
    ValueError: a tracer, something that is no number, or `good(x)` is false.
  """
  is_number = isinstance(x, (numbers.Real, np.number)) and not isinstance(x, (bool, np.bool_))
  require(is_number, argument, describe(x), f"{expected}, a static Python number")
  require(good(x), argument, repr(x), expected)
  return float(x)


def integer(argument: str, x, expected: str, good=lambda x: True) -> int:
  """A static integer that int32 holds.

  Raises:
    ValueError: a tracer, something that is no such integer, or `good(x)` is false.
  """
  is_integer = (isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.bool_))
                and -2**31 <= x < 2**31)
  require(is_integer and good(x), argument, describe(x), f"{expected}, a static Python int (int32)")
  return int(x)


def one_of(argument: str, x, known) -> None:
  """Raises ValueError that lists the known values unless x is among them."""
  require(x in known, argument, repr(x), "one of " + ", ".join(map(repr, known)))


def query_key_value(query, key, value, *, quantized: bool = False) -> None:
  """Shapes and dtypes of layout bthd; those of a quantized key and value are a cache's own.

  Raises:
    ValueError: any disagreement, or an empty dimension.
  """
  floating("query", query, 4, "[B, T, H, D]")
  if not quantized:
    floating("key", key, 4, "[B, S, K, D]")
    floating("value", value, 4, "[B, S, K, E]")
  for name, x in (("query", query), ("key", key), ("value", value)):
    require(0 not in x.shape, name, describe(x), "no dimension of size 0")
    require(quantized or x.dtype == query.dtype, name, describe(x),
            f"the query's dtype {query.dtype}; cast one of them (a cache has that of its init)")
  batch, _, heads, width = query.shape
  require(key.shape[0] == batch and key.shape[3] == width, "key", describe(key),
          f"[{batch}, S, K, {width}], B and D of the query {describe(query)}")
  require(value.shape[:3] == key.shape[:3], "value", describe(value),
          f"{list(key.shape[:3])} and any width, as the key {describe(key)}")
  require(heads % key.shape[2] == 0, "key", describe(key),
          f"a number of key heads that divides the {heads} query heads")


def cum_seqlens(argument: str, x, total: int) -> None:
  """int32 offsets from 0 to `total`; values are looked at where they are concrete.

  Raises:
    ValueError: another dtype or rank, or offsets that do not rise from 0 to the total.
  """
  expected = f"int32 [B + 1] offsets that start at 0, never fall, and end at the total {total}"
  array(argument, x, expected)
  require(x.ndim == 1 and x.shape[0] >= 2 and x.dtype == jnp.int32, argument, describe(x), expected)
  if not isinstance(x, jax.core.Tracer):
    offsets = np.asarray(x)
    require(offsets[0] == 0 and (np.diff(offsets) >= 0).all() and offsets[-1] == total,
            argument, offsets.tolist(), expected)


def window(sides) -> tuple[int | None, int | None]:
  """`sliding_window` as (left, right), None for unbounded.

  Raises:
    ValueError: neither an int nor two, or one below -1.
  """
  if sides is None:
    return None, None
  expected = ("an int w for (w, w) or a pair (left, right) of ints >= 0 (tokens, inclusive), -1 or "
              "None for unbounded; 'W tokens, itself included' is (W - 1, 0)")
  given, sides = sides, sides if isinstance(sides, (tuple, list)) else (sides, sides)
  require(len(sides) == 2, "sliding_window", repr(given), expected)
  for side in sides:
    if side is not None:
      integer("sliding_window", side, expected, lambda x: x >= -1)
  return tuple(None if side is None or side == -1 else int(side) for side in sides)
