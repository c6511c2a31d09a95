# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The functions that make masks; they are public as `attn_core.masks`.

In the pictures (`masks.show`) queries go down, keys to the right; `#` is visible, `.` hidden.
"""

from typing import Any, Callable

import jax
from jax.typing import ArrayLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.masks import leaves, mask as mask_lib
from attn_core.masks.mask import Array, Mask


def full() -> Mask:
  """All keys are visible to all queries; the neutral element of `&`.

  >>> from attn_core import masks
  >>> print(masks.show(masks.full(), 4))  # doctest: +ELLIPSIS
  full()
  ...
  0 |####|
    |####|
    |####|
    |####|
  ...
  """
  return mask_lib.Full()


def causal() -> Mask:
  """key position <= query position.

  >>> from attn_core import masks
  >>> print(masks.show(masks.causal(), 4))  # doctest: +ELLIPSIS
  causal()
  ...
  0 |#...|
    |##..|
    |###.|
    |####|
  ...
  """
  return leaves.Causal()


def window(left: int | None, right: int | None) -> Mask:
  """-left <= key position - query position <= right, both inclusive.

  >>> from attn_core import masks
  >>> print(masks.show(masks.window(1, 0), 4))  # doctest: +ELLIPSIS
  window(left=1, right=0)
  ...
  0 |#...|
    |##..|
    |.##.|
    |..##|
  ...

  Args:
    left: tokens before the query; None: unbounded. A window of N tokens that includes the query is
      (N - 1, 0).
    right: tokens after the query; None: unbounded. A negative side excludes the query itself:
      window(-1, 2) is the two tokens after it. Unlike in `sliding_window`, -1 does not mean
      unbounded.

  Raises:
    ValueError: a side is neither an int (int32) nor None.
  """
  for name, value in (("left", left), ("right", right)):
    if value is not None and not _is_int32(value):
      raise ValueError(f"window: {name}={value!r}; expected an int (tokens) or None for unbounded")
  return leaves.Window(*(None if side is None else int(side) for side in (left, right)))


def chunk(size: int) -> Mask:
  """Query and key positions fall into the same chunk of `size` positions.

  >>> from attn_core import masks
  >>> print(masks.show(masks.chunk(2), 4))  # doctest: +ELLIPSIS
  chunk(size=2)
  ...
  0 |##..|
    |##..|
    |..##|
    |..##|
  ...

  Raises:
    ValueError: `size` is not a static int >= 1 (tokens).
  """
  if not _is_int32(size) or size < 1:
    raise ValueError(f"chunk: size={size!r}; expected an int >= 1 (tokens)")
  return leaves.Chunk(int(size))


def prefix(length: ArrayLike) -> Mask:
  """key position < length: the keys of a prefix are visible to all queries.

  >>> from attn_core import masks
  >>> print(masks.show(masks.prefix(2) | masks.causal(), 4))  # doctest: +ELLIPSIS
  prefix(length=2) | causal()
  ...
  0 |##..|
    |##..|
    |###.|
    |####|
  ...

  Args:
    length: int, or int32 [B or 1] (tokens).

  Raises:
    ValueError: `length` has another type, rank or dtype.
  """
  return leaves.Prefix(*_static_or_array("prefix", "length", length))


def segments(query_ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
  """Equal ids are visible to each other; negative ids are padding and hidden.

  >>> from attn_core import masks
  >>> print(masks.show(masks.segments(np.array([[0, 0, 1, -1]])), 4))  # doctest: +ELLIPSIS
  segments(query_ids int32[1, 4], key_ids int32[1, 4])
  ...
  0 |##..|
    |##..|
    |..#.|
    |....|
  ...

  Args:
    query_ids: int32 [B or 1, T].
    key_ids: int32 [B or 1, S]; None: `query_ids`.

  Raises:
    ValueError: ids have another rank or dtype.
  """
  key_ids = query_ids if key_ids is None else key_ids
  return leaves.Segments(_int32_array("segments", "query_ids", query_ids, 2),
                         _int32_array("segments", "key_ids", key_ids, 2))


def lengths(query_lengths: ArrayLike | None = None, key_lengths: ArrayLike | None = None) -> Mask:
  """Rows and columns below the lengths are visible to each other.

  >>> from attn_core import masks
  >>> print(masks.show(masks.lengths(np.array([3]), np.array([2])), 4))  # doctest: +ELLIPSIS
  lengths(query_lengths int32[1], key_lengths int32[1])
  ...
  0 |##..|
    |##..|
    |##..|
    |....|
  ...

  Args:
    query_lengths: int32 [B or 1] (tokens); None: unbounded.
    key_lengths: int32 [B or 1] (tokens); None: unbounded.

  Raises:
    ValueError: both are None, or one has another rank or dtype.
  """
  if query_lengths is key_lengths is None:
    raise ValueError("lengths: query_lengths=None and key_lengths=None; expected at least one")
  return leaves.Lengths(*(None if x is None else _int32_array("lengths", name, x, 1) for name, x in
                          (("query_lengths", query_lengths), ("key_lengths", key_lengths))))


def positions(query: ArrayLike | None, key: ArrayLike | None = None,
              mask: Mask = leaves.Causal()) -> Mask:
  """`mask` (causal by default) evaluated at explicit positions.

  >>> from attn_core import masks
  >>> print(masks.show(masks.positions(np.array([[0, 1, 0, 3]])), 4))  # doctest: +ELLIPSIS
  positions(causal(), query int32[1, 4])
  ...
  0 |#...|
    |##..|
    |#...|
    |####|
  ...

  Args:
    query: int32 [B or 1, T] positions of the queries (tokens); None: row numbers.
    key: int32 [B or 1, S] positions of the keys (tokens); None: column numbers.
    mask: the mask whose causal, window, chunk, prefix and custom leaves read the positions. Dropout
      uses them too, unless another part of the whole mask reads positions.

  Raises:
    ValueError: positions have another rank or dtype, or `mask` is not a mask.
  """
  _check_mask("positions", mask)
  return leaves.Positions(mask, *(None if x is None else _int32_array("positions", name, x, 2)
                                  for name, x in (("query", query), ("key", key))))


def offset(mask: Mask, amount: ArrayLike) -> Mask:
  """`mask` with `amount` added to the query positions.

  >>> from attn_core import masks
  >>> print(masks.show(masks.offset(masks.causal(), 1), 4))  # doctest: +ELLIPSIS
  offset(causal(), amount=1)
  ...
  0 |##..|
    |###.|
    |####|
    |####|
  ...

  Args:
    mask: any mask.
    amount: int, or int32 [B or 1] (tokens).

  Raises:
    ValueError: `mask` is not a mask, or `amount` has another type, rank or dtype.
  """
  _check_mask("offset", mask)
  return leaves.Offset(mask, *_static_or_array("offset", "amount", amount))


def placed(mask: Mask, query: ArrayLike, key: ArrayLike, size: tuple[int, int]) -> Mask:
  """`mask` of a longer sequence, at some of its rows and columns.

  >>> from attn_core import masks
  >>> mask = masks.placed(masks.causal(), np.array([[0, 2, 4, 6]]), np.arange(4)[None], (8, 8))
  >>> print(masks.show(mask, 4))  # doctest: +ELLIPSIS
  placed(causal(), size=(8, 8), query int32[1, 4], key int32[1, 4])
  ...
  0 |#...|
    |###.|
    |####|
    |####|
  ...

  Args:
    mask: the mask of the whole sequence. Its arrays with one number per query or key hold those
      of the given rows and columns only.
    query: int32 [B or 1, T]: the rows, in any order.
    key: int32 [B or 1, S]: the columns, in any order.
    size: (rows, columns) of the whole sequence; rows and columns from there on are padding and
      hidden.

  Raises:
    ValueError: `mask` is not a mask, rows or columns have another rank or dtype, or `size` is not a
      pair of ints.
  """
  _check_mask("placed", mask)
  if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(map(_is_int32, size)):
    raise ValueError(f"placed: size={size!r}; expected (rows, columns) of the whole, ints")
  queries, keys = size
  return leaves.Placed(mask, (int(queries), int(keys)), _int32_array("placed", "query", query, 2),
                       _int32_array("placed", "key", key, 2))


def dense(array: ArrayLike) -> Mask:
  """A boolean array [B or 1, H or 1, T or 1, S or 1]; True is visible.

  >>> from attn_core import masks
  >>> print(masks.show(masks.dense(np.eye(4, dtype=bool)[None, None]), 4))  # doctest: +ELLIPSIS
  dense(array bool[1, 1, 4, 4])
  ...
  0 |#...|
    |.#..|
    |..#.|
    |...#|
  ...

  Raises:
    ValueError: the array has another rank or dtype.
  """
  array = _as_array(array)
  if array.dtype != bool or array.ndim != 4:
    raise ValueError(
        f"dense: array has dtype {array.dtype} and shape {array.shape}; expected bool "
        "[B or 1, H or 1, T or 1, S or 1], True = visible (a 0/1 mask of another dtype is "
        "`array.astype(bool)`, an additive float mask is a bias)")
  return leaves.Dense(array)


def custom(predicate: Callable[..., ArrayLike], *operands: ArrayLike) -> Mask:
  """A predicate of `(batch, head, query position, key position, *operands)`.

  What it looks up by the batch row, the head and at most one position, such as `windows[head]` or
  both sides of `ids[batch, query] == ids[batch, key]`, is computed once before the kernels for TPUs
  and GPUs. They leave predicates that look numbers up by both positions to plain XLA.

  Blocks that a predicate hides are skipped, and blocks that it shows are computed without it, where
  comparisons and arithmetic of integers say so for the smallest and the largest number of a block.

  >>> from attn_core import masks
  >>> def even_distance(batch, head, query, key): return (query - key) % 2 == 0
  >>> print(masks.show(masks.custom(even_distance), 4))  # doctest: +ELLIPSIS
  custom(even_distance)
  ...
  0 |#.#.|
    |.#.#|
    |#.#.|
    |.#.#|
  ...

  Args:
    predicate: elementwise, traceable by jax, returns bool. Two custom masks are equal only if
      their predicates are the same object: define it once, outside the training step.
    *operands: arrays passed unchanged to the predicate; traced arrays must be passed this way.

  Raises:
    ValueError: `predicate` is not callable, does not accept 4 arguments and the operands, or
      captures a traced array; when it is evaluated, it returns another dtype than bool, or a shape
      that is not that of its arguments together.
  """
  checks.elementwise("predicate", predicate, "batch, head, query position, key position",
                     len(operands))
  return leaves.Custom(predicate, tuple(map(_as_array, operands)))


def _check_mask(function: str, mask: Any) -> None:
  if not isinstance(mask, Mask):
    raise ValueError(f"{function}: mask is a {type(mask).__name__}; expected a mask, such as "
                     "causal()")


def _is_int32(x: Any) -> bool:
  """Whether `x` is a static integer in the range of int32, the dtype of positions."""
  is_integer = isinstance(x, (int, np.integer)) and not isinstance(x, bool)
  return is_integer and bool(-2**31 <= x < 2**31)


def _as_array(x: ArrayLike) -> Array:
  if isinstance(x, jax.Array):
    return x
  try:
    return np.asarray(x)
  except jax.errors.TracerArrayConversionError:  # a list of traced numbers
    return jnp.asarray(x)


def _int32_array(function: str, name: str, x: ArrayLike, rank: int) -> Array:
  """`x` as int32 of the rank; ValueError where its rank, dtype or values do not fit."""
  x = _as_array(x)
  if not np.issubdtype(x.dtype, np.integer) or x.ndim != rank:
    shape = {1: "[B or 1]", 2: "[B or 1, length]"}[rank]
    raise ValueError(f"{function}: {name} has dtype {x.dtype} and shape {x.shape}; "
                     f"expected int32 {shape}")
  return checks.int32(f"{function}: {name}", x, "int32")


def _static_or_array(function: str, name: str, value: Any) -> tuple[int | None, Array | None]:
  """(int, None) for a static number, (None, array) for one number per batch row."""
  if _is_int32(value):
    return int(value), None
  value = _as_array(value)
  return None, _int32_array(function, name, value[None] if value.ndim == 0 else value, 1)
