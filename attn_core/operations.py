# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates functions operation by operation, some operations in another way."""

from typing import Any, Callable, Generic, NamedTuple, Sequence, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

Value = TypeVar("Value")
Bind = Callable[[JaxprEqn, list[Value]], list[Value]]

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")


class Walk(NamedTuple, Generic[Value]):
  """The way of `evaluate` through a function."""

  entered: tuple[str, ...] = _CALLS  # calls whose operations are applied in their place
  literal: Callable[[Any], Value] = lambda x: x  # makes a value of a literal
  captured: Callable[[Any], Value] = lambda x: x  # and of an array that the function captures


_EVERY_CALL: Any = Walk()


def settings() -> tuple:
  """Returns the settings of JAX that decide what a function is traced to."""
  names = "jax_enable_x64", "jax_numpy_rank_promotion", "jax_numpy_dtype_promotion"
  return tuple(getattr(jax.config, name) for name in names)


def inner(equation: JaxprEqn) -> Jaxpr | ClosedJaxpr | None:
  """Returns the function that an equation calls, as a jaxpr; None: it calls none."""
  if equation.primitive.name not in _CALLS:
    return None
  given = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
  return next((x for x in given if x is not None), None)


def bind(equation: JaxprEqn, given: list[jax.Array]) -> list[jax.Array]:
  """Applies an operation as it is."""
  found = equation.primitive.bind(*given, **equation.params)
  return list(found) if equation.primitive.multiple_results else [found]


def bind_whole(equation: JaxprEqn, jaxpr: Jaxpr, given: list[jax.Array]) -> list[jax.Array]:
  """Applies an operation of a function; one that calls another keeps its own derivative."""
  if inner(equation) is None:
    return bind(equation, given)
  known = {x: y for x, y in zip(equation.invars, given) if not isinstance(x, Literal)}
  alone = jaxpr.replace(constvars=[], invars=list(known), outvars=list(equation.outvars),
                        eqns=[equation])
  return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*known.values())


def evaluate(jaxpr: Jaxpr, consts: Sequence[object], arguments: Sequence[Value],
             apply: Bind[Value], walk: Walk[Value] = _EVERY_CALL) -> list[Value]:
  """Returns the results of a function, by `apply` for each operation that is not entered.

  Args:
    jaxpr: the function.
    consts: the arrays that it captures.
    arguments: of the function.
    apply: see `bind`.
    walk: which calls are entered, and what `apply` gets.
  """
  known = dict(zip(jaxpr.constvars, map(walk.captured, consts))) | dict(zip(
      jaxpr.invars, arguments))
  value = lambda x: walk.literal(x.val) if isinstance(x, Literal) else known[x]
  for equation in jaxpr.eqns:
    given = [value(x) for x in equation.invars]
    called = inner(equation) if equation.primitive.name in walk.entered else None
    if called is None:
      found = apply(equation, given)
    elif isinstance(called, ClosedJaxpr):
      found = evaluate(called.jaxpr, called.consts, given, apply, walk)
    else:
      found = evaluate(called, (), given, apply, walk)
    known.update(zip(equation.outvars, found))
  return [value(x) for x in jaxpr.outvars]
