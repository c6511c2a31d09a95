# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values for arguments, right and wrong ones, and what a function makes of each as text."""

from collections.abc import Callable, Iterator, Mapping
import collections
import enum
import math
import re
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

from attn_core import checks
from attn_core_test.approved_text import attempt, text


class Label(enum.Enum):
  X = "x"


# Tried for every argument that is not an array.
PLAIN: tuple[Any, ...] = (
    None, True, 0, 1, 3, -1, 2**31, 2.0, 0.5, -0.25, math.nan, math.inf, "", "tp", "float32", (),
    (2, 3), ("tp", "tp"), [1], {"a": 1}, P("tp"), np.int64(5), np.float32(0.5), Label.X, object)


def arrays_like(x: Any) -> Iterator[tuple[str, Any]]:
  """Yields (name, value) of arrays that differ from a good one in one respect."""
  x = np.asarray(x)
  yield from ((text(value), value) for value in (None, 2, 0.5, "x", [], ([1], [2, 3])))
  yield "a list", x.tolist()
  for dtype in ("int32", "int64", "float32", "float16", "bool", "uint8", "complex64"):
    if x.dtype != dtype:
      yield dtype, x.astype(dtype)
  yield "more dimensions", x[None]
  if x.ndim:
    yield "fewer dimensions", x[0]
    for axis in range(x.ndim):
      yield f"dimension {axis} longer", np.concatenate([x, x.take([0], axis)], axis)
      yield f"dimension {axis} shorter", x.take(range(x.shape[axis] - 1), axis)
      yield f"dimension {axis} of 1", x.take([0], axis)
      yield f"no dimension {axis}", x.take([], axis)
    if x.dtype.kind == "i":
      yield "-1", np.where(np.arange(x.size).reshape(x.shape) == x.size - 1, -1, x).astype(x.dtype)
      yield "large", np.where(np.arange(x.size).reshape(x.shape) == 0, 2**30, x).astype(x.dtype)
      yield "int64, large", x.astype(np.int64) + 2**33
      yield "reversed", x[::-1]


def candidates(good: Any, more: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
  """Yields (name, value) of what may be given in place of a good value."""
  yield from ((text(value), value) for value in more)
  if isinstance(good, (jax.Array, np.ndarray)):
    yield from arrays_like(good)
  else:
    yield from ((text(value), value) for value in PLAIN)


def alternatives(function: Callable[..., Any], good: Mapping[str, Any],
                 more: Mapping[str, tuple[Any, ...]] | None = None, *,
                 traced: bool = False) -> Iterator[str]:
  """Yields what a function makes of other values of each of its keywords, one at a time.

  Args:
    function: called with the keywords.
    good: its keywords.
    more: keyword -> values that are tried besides.
    traced: whether to trace the function, so that nothing is compiled and results are shapes;
      its arguments are known all the same.
  """
  for name, value in good.items():
    call = lambda x, name=name: function(**{**good, name: x})
    yield from lines(name, (lambda x, call=call: shapes_of(call, x)) if traced else call,
                     candidates(value, (more or {}).get(name, ())))


def shapes_of(function: Callable[..., Any], *arguments: Any) -> Any:
  """Returns the result of a function, traced but with known arguments."""
  found: list[Any] = []
  jax.eval_shape(lambda: found.append(function(*arguments)))
  return found[0]


def lines(name: str, function: Callable[[Any], Any], values: Any, *,
          results: bool = True) -> Iterator[str]:
  """Yields what a function of one value says, with values together that are answered alike.

  Of a value in a message, `it` is written.
  """
  same: dict[str, list[str]] = collections.defaultdict(list)
  for written, value in values:
    said = attempt(lambda value=value: function(value))
    if not results and not said.partition(":")[0].endswith("Error"):
      said = "accepted"
    for word in (written, repr(value), type(value).__name__, checks.describe(value)):
      said = re.sub(rf"(got |=){re.escape(word)}(?=[;,:]| with|$)", r"\1it", said)
    same[said].append(written)
  yield from (f"{name} = {' | '.join(written)}: {said}" for said, written in same.items())
