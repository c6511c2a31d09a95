# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the functions of `custom`, by tracing them: nothing is computed."""

from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp

from attn_core import checks
from attn_core.masks.mask import Array

# Operations that mix the elements of an array, by the beginning of their names.
_MIXING = ("reduce_", "arg", "cum", "dot_general", "ragged_dot", "conv", "sort", "top_k", "rev",
           "gather", "scatter", "dynamic_slice", "fft", "reduce")
# Of those that only change the axes, squeezing and broadcasting keep the elements apart.
_MOVING = ("transpose", "slice", "concatenate", "pad", "reshape")


def check(function: Callable[..., jax.Array], operands: Sequence[Array]) -> None:
  """Checks the function of a `custom` with its operands.

  Raises:
    ValueError: it is not callable, does not take 5 arguments and the operands, captures a traced
      array, returns another shape or dtype than the scores', or is not elementwise in them, as far
      as its operations tell.
  """
  checks.elementwise("function", function, "score, batch, head, query position, key position",
                     len(operands), consequence=", and differentiates it")
  score = jax.ShapeDtypeStruct((3, 5, 1, 7), jnp.float32)
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  given = (score, number(), number(3, 1, 1, 1), number(1, 5, 1, 1), number(1, 1, 1, 7),
           *(jax.ShapeDtypeStruct(x.shape, score.dtype if jnp.issubdtype(x.dtype, jnp.floating)
                                  else x.dtype) for x in operands))
  traced, result = jax.make_jaxpr(function, return_shape=True)(*given)
  if not isinstance(result, jax.ShapeDtypeStruct) or (
      result.shape, result.dtype) != (score.shape, score.dtype):
    raise ValueError(f"custom: function={function!r} returned {result} for scores "
                     f"{score}; expected the same shape and dtype: a score mod is elementwise")
  found = _mixing(traced.jaxpr, [True] + [False] * (len(given) - 1))[1]
  if found:
    raise ValueError(f"custom: function={function!r} applies `{found}` to the scores; expected an "
                     "elementwise function: a kernel gives it one tile of the scores at a time")


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
    inner = [x for x in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
             if _is_jaxpr(x)]
    if any(inputs) and len(inner) == 1:
      body = getattr(inner[0], "jaxpr", inner[0])
      if len(body.invars) == len(inputs):
        outputs, found = _mixing(body, inputs)
        if found:
          return outputs, found
    elif any(inputs) and (name.startswith(_MIXING) or name in _MOVING):
      return outputs, name
    known.update({id(variable): value for variable, value in zip(equation.outvars, outputs)})
  return [is_dependent(x) for x in jaxpr.outvars], None


def _is_jaxpr(x: Any) -> bool:
  return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
