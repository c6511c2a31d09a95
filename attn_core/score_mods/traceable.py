# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Terms that can be traced into a Pallas kernel: of common operations, without look-ups.

Tables by distance need no look-ups there: they are constant along the diagonals of a tile.
"""

import functools
from typing import Any, Sequence

import jax
import jax.numpy as jnp

from attn_core.score_mods import forms, terms
from attn_core.score_mods.score_mod import (PAIR, Composed, ScoreMod, chain, of_structure,
                                            structure_roles)
from attn_core.types import NO_SCORE_MOD, at_least_float32

# Operations of functions that the kernels compile, some of them in another form (`forms`).
_OPERATIONS = frozenset((
    "abs", "add", "add_any", "and", "atan2", "broadcast_in_dim", "ceil", "clamp",
    "convert_element_type", "cos", "custom_jvp_call", "div", "eq", "exp", "exp2", "floor",
    "ge", "gt", "integer_pow", "is_finite", "jit", "le", "log", "log2", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "not", "or", "pjit", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor", *forms.COMMON))
# Those of their derivatives.
_OF_DERIVATIVES = _OPERATIONS | {"one_minus_square", "reshape"}


def refusal(structure: jax.tree_util.PyTreeDef, arrays: tuple[jax.ShapeDtypeStruct, ...],
            at: str = "", chips: str = "TPUs") -> str | None:
  """Returns why Pallas kernels cannot evaluate a term tile by tile; None: they can.

  Args:
    structure: the term's tree structure; or that of a call without a score mod.
    arrays: its arrays; only shapes and dtypes are used.
    at: where tables by distance are not taken, as an error says it; empty: they are taken.
    chips: that the kernels are for, as an error says it.
  """
  if structure == NO_SCORE_MOD:
    return None
  found = _refusal_of(structure, arrays)
  if at and has_tables(structure):
    found = f"a table looked up by distance (score_mods.relative or by_distance){at}"
  return found and f"score_mod with {found}: the kernels for {chips} look nothing up"


def has_tables(structure: jax.tree_util.PyTreeDef) -> bool:
  """Returns whether a term looks numbers up by distance, along diagonals; see `refusal`."""
  return structure != NO_SCORE_MOD and any(
      isinstance(x, terms.Distance) for x in chain(of_structure(structure)))


@functools.lru_cache(maxsize=64)  # a function is traced, and every call asks
def _refusal_of(structure: jax.tree_util.PyTreeDef,
                arrays: tuple[jax.ShapeDtypeStruct, ...]) -> str | None:
  return _refusal(jax.tree.unflatten(structure, arrays))


def by_pair(structure: jax.tree_util.PyTreeDef,
            arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> tuple[int, ...]:
  """Returns the numbers of the arrays of a term that have a number for every query and key."""
  return tuple(n for n, (x, role) in enumerate(zip(arrays, structure_roles(structure), strict=True))
               if role == PAIR and 1 not in x.shape[2:])


def _refusal(term: ScoreMod) -> str | None:
  if isinstance(term, Composed):
    return _refusal(term.first) or _refusal(term.second)
  if isinstance(term, terms.Grid):
    return "a table looked up by distance (score_mods.grid)"
  return _refusal_of_function(term) if isinstance(term, terms.Custom) else None


def _refusal_of_function(term: terms.Custom) -> str | None:
  name = f"score_mods.custom of {getattr(term.function, '__qualname__', term.function)}"
  for x in term.operands:
    if len(x.shape) != 2:  # two leading axes, of rows and heads
      return f"{name} with an operand [{', '.join(map(str, x.shape[2:]))}], not a number"
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return f"{name} with an operand of dtype {x.dtype}, not a float"
  score = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  whole = jax.ShapeDtypeStruct((8, 8), jnp.int32)
  one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  numbers = [jax.ShapeDtypeStruct((1, 1), at_least_float32(jnp.float32))
             for _ in (*term.operands, *term.numbers)]
  at = (one, one, whole, whole)
  try:
    traced = jax.make_jaxpr(term.function)(score, *at, *numbers)
  except (IndexError, TypeError, ValueError):  # as of a `lax.cond` by a number
    return (f"{name}, which fails for a tile of two axes with its batch row, its head and numbers "
            "as arrays [1, 1]")
  if traced.consts:
    return f"{name}, which captures arrays"
  found = sorted(_operations(traced.jaxpr) - _OPERATIONS)
  if found:
    return f"{name}, which applies {', '.join(found)}"
  def tangent(floats: Sequence[jax.Array], at: Sequence[jax.Array]) -> jax.Array:
    run = lambda score, *operands: term.function(score, *at, *operands)
    return jax.jvp(run, floats, floats)[1]
  try:
    traced = jax.make_jaxpr(tangent)((score, *numbers), at)
  except (AttributeError, IndexError, TypeError, ValueError):  # as of a rule of `custom_jvp`
    return f"{name}, which cannot be differentiated"
  found = sorted(_operations(traced.jaxpr) - _OF_DERIVATIVES)
  return f"{name}, whose derivative applies {', '.join(found)}" if found else None


def _operations(jaxpr: Any) -> set[str]:
  """Returns the names of all operations."""
  found = set()
  for equation in jaxpr.eqns:
    found.add(equation.primitive.name)
    for x in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
                             or hasattr(x, "jaxpr")):
      inner = getattr(x, "jaxpr", x)
      if hasattr(inner, "eqns"):
        found |= _operations(inner)
  return found
