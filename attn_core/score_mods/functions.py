# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the functions of `custom`, by tracing them: nothing is computed."""

from typing import Any, Callable, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Literal
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.masks.mask import Array

# Operations that mix the elements of an array, by the beginning of their names.
_MIXING = ("reduce_", "arg", "cum", "dot_general", "ragged_dot", "conv_", "sort", "top_k", "rev",
           "gather", "scatter", "dynamic_", "fft", "split", "unstack", "reduce")
# Of those that only change the axes, squeezing and broadcasting keep the elements apart.
_MOVING = ("transpose", "slice", "concatenate", "pad", "reshape")
# Operations that make as many random numbers as their parameter "shape" says, for each key.
_RANDOM = ("random_bits", "random_split", "rng_bit_generator", "rng_uniform")


def check(function: Callable[..., jax.Array], operands: Sequence[Array]) -> None:
  """Checks the function of a `custom` with its operands.

  Raises:
    ValueError: it is not callable, does not take 5 arguments and the operands, captures a traced
      array, fails for arrays, returns another shape or dtype than the scores', or is not
      elementwise in them and in the positions, as far as its operations tell.
  """
  checks.elementwise("function", function, "score, batch, head, query position, key position",
                     len(operands), consequence=", and differentiates it")
  traced, others = (_traced(function, operands, sizes) for sizes in ((3, 5, 7), (4, 6, 9)))
  mixing = _mixing(traced.jaxpr, [True] + [False] * (len(traced.in_avals) - 1))[1]
  found = f"applies `{mixing}` to the scores" if mixing else _of_tile(traced, others)
  if found:
    raise ValueError(f"custom: function={function!r} {found}; expected an elementwise function: a "
                     "kernel gives it one tile of the scores at a time")


def _traced(function: Callable[..., jax.Array], operands: Sequence[Array],
            sizes: tuple[int, int, int]) -> ClosedJaxpr:
  """Returns a function of a tile of scores with so many heads, queries and keys."""
  heads, queries, keys = sizes
  score = jax.ShapeDtypeStruct((heads, queries, 1, keys), jnp.float32)
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  given = (score, number(), number(heads, 1, 1, 1), number(1, queries, 1, 1),
           number(1, 1, 1, keys), *(jax.ShapeDtypeStruct(
               x.shape, score.dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
                                    for x in operands))
  try:
    traced, result = jax.make_jaxpr(function, return_shape=True)(*given)
  except jax.errors.UnexpectedTracerError:  # says more itself
    raise
  except (IndexError, TypeError, ValueError) as error:
    first = str(error).partition("\n")[0]
    raise ValueError(f"custom: function={function!r} failed while it was traced with arrays "
                     f"({first}); expected an elementwise function of jax.numpy: jnp.where in "
                     "place of `if`, shapes that broadcast") from error
  if not isinstance(result, jax.ShapeDtypeStruct) or (
      result.shape, result.dtype) != (score.shape, score.dtype):
    raise ValueError(f"custom: function={function!r} returned {result} for scores "
                     f"{score}; expected the same shape and dtype: a score mod is elementwise")
  return traced


def _mixing(jaxpr: Any, depends: Sequence[bool]) -> tuple[list[bool], str | None]:
  """Finds an operation that mixes the elements of arrays that depend on the scores.

  Args:
    jaxpr: of the function.
    depends: for each argument, whether it depends on the scores.

  Returns:
    (for each result, whether it depends on the scores; the name of the operation, or None).
  """
  known = {id(variable): depends_on for variable, depends_on in zip(jaxpr.invars, depends)}
  is_dependent = lambda variable: known.get(id(variable), False)
  for equation in jaxpr.eqns:
    inputs = [is_dependent(x) for x in equation.invars]
    outputs = [any(inputs)] * len(equation.outvars)
    name = equation.primitive.name
    inner = _inner(equation)
    if any(inputs) and len(inner) == 1:
      body = getattr(inner[0], "jaxpr", inner[0])
      if len(body.invars) == len(inputs):
        outputs, found = _mixing(body, inputs)
        if found:
          return outputs, found
    elif any(inputs) and (_is_mixing(name) or name in _MOVING):
      return outputs, name
    known.update({id(variable): value for variable, value in zip(equation.outvars, outputs)})
  return [is_dependent(x) for x in jaxpr.outvars], None


def _is_mixing(name: str) -> bool:
  return name.startswith(_MIXING) and name != "reduce_precision"


def _of_tile(one: Any, other: Any) -> str | None:
  """Returns how a function depends on the tile that it gets; None: in no way that is known.

  Args:
    one: the function, traced for a tile; axes of a tile are those that differ from `other`'s.
    other: the function, traced for a tile of other sizes.
  """
  consts = (getattr(x, "consts", ()) for x in (one, other))
  if any(np.shape(x) != np.shape(y) for x, y in zip(*consts)):
    return "captures an array of the size of a tile"
  one, other = (getattr(x, "jaxpr", x) for x in (one, other))
  for equation, match in zip(one.eqns, other.eqns):
    if equation.primitive is not match.primitive:
      return None  # the function asks for sizes; what it then does is not compared
    found = _of_tile_in(equation, match) or next(
        filter(None, map(_of_tile, _inner(equation), _inner(match))), None)
    if found:
      return found
  return None


def _of_tile_in(equation: Any, match: Any) -> str | None:
  """Returns how an operation depends on the tile; see `_of_tile`."""
  name, given, others = equation.primitive.name, equation.params, match.params
  axes = [_differing(x, y) for x, y in zip(equation.invars, match.invars)]
  made = set().union(*map(_differing, equation.outvars, match.outvars))
  # jnp computes with literals alone where it counts indices from the end.
  if not all(isinstance(x, Literal) for x in equation.invars) and any(
      isinstance(x, Literal) and isinstance(y, Literal) and not np.array_equal(
          x.val, y.val, equal_nan=True) for x, y in zip(equation.invars, match.invars)):
    return f"computes with the size of a tile (`{name}`)"
  if name == "integer_pow" and given["y"] != others["y"]:
    return f"computes with the size of a tile (`{name}`)"
  if name == "iota" and given["dimension"] in made or (
      name in _RANDOM and given.get("shape") != others.get("shape")):
    return f"makes numbers by the place in a tile (`{name}`)"
  if name in ("slice", "dynamic_slice", "pad") and made and not axes[0]:
    return f"applies `{name}` by the size of a tile"
  if name == "scan" and given["length"] != others["length"] and _carries(equation) or (
      name.startswith("scatter") and any(axes)) or axes and axes[0] & _mixed_axes(equation):
    return f"applies `{name}` along a tile"
  return None


def _carries(scan: Any) -> bool:
  """Returns whether a step of a scan gets results of the one before: results without its axis."""
  return any(x.aval.ndim == y.aval.ndim
             for x, y in zip(scan.params["jaxpr"].jaxpr.outvars, scan.outvars))


def _differing(x: Any, y: Any) -> set[int]:
  """Returns the axes whose sizes differ in two traces."""
  return {n for n, sizes in enumerate(zip(x.aval.shape, y.aval.shape)) if sizes[0] != sizes[1]}


def _mixed_axes(equation: Any) -> set[int]:
  """Returns the axes of the first array of an operation along which it mixes elements."""
  name, given, shape = equation.primitive.name, equation.params, equation.invars[0].aval.shape
  if name == "slice":
    limits = zip(shape, given["start_indices"], given["limit_indices"],
                 given["strides"] or (1,) * len(shape))
    return {n for n, (size, *limit) in enumerate(limits) if limit != [0, size, 1]}
  if name == "pad":
    return {n for n, padding in enumerate(given["padding_config"]) if any(padding)}
  if name == "dot_general":
    return set(given["dimension_numbers"][0][0])
  if name == "gather":
    return set(given["dimension_numbers"].start_index_map)
  if name in ("dynamic_slice", "dynamic_update_slice"):
    sizes = given["slice_sizes"] if name == "dynamic_slice" else equation.invars[1].aval.shape
    return {n for n, size in enumerate(shape) if sizes[n] != size}
  if not _is_mixing(name) and name != "concatenate":
    return set()
  for axes in ("axes", "axis", "dimension", "dimensions"):
    if isinstance(given.get(axes), (int, tuple)):
      return set(given[axes]) if isinstance(given[axes], tuple) else {given[axes]}
  return set(range(len(shape)))


def _inner(equation: Any) -> list[Any]:
  """Returns the functions that an operation runs, such as the branches of a `lax.cond`."""
  return [x for x in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
          if _is_jaxpr(x)]


def _is_jaxpr(x: Any) -> bool:
  return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
