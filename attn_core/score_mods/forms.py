# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of score mods in forms that Pallas kernels compute.

Pallas lowers no other form of them for TPUs or Hopper, or one whose special cases are not known.
They are made of exp, exp2, log, rsqrt, atan2, round and arithmetic, which both lower.
"""

import math
from typing import Any, Callable, Mapping, TypeAlias

import jax
from jax import lax
from jax.extend.core import JaxprEqn
import jax.numpy as jnp

from attn_core import operations

# Operation -> its form: of its operands and, for `integer_pow`, of the exponent y.
Forms: TypeAlias = Mapping[str, Callable[..., jax.Array]]

_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_LARGE = 1e8  # of which float32 adds 1 to the square in vain


def sqrt(x: jax.Array) -> jax.Array:
  """Returns the square root, without the operation of that name."""
  return jnp.where((x == 0.0) | (x == jnp.inf), x, x * lax.rsqrt(x))


def round_even(x: jax.Array) -> jax.Array:
  return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _sign(x: jax.Array) -> jax.Array:
  one = jnp.ones_like(x)
  return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


def _with_sign(size: jax.Array, x: jax.Array) -> jax.Array:
  return jnp.where(x < 0, -size, size)


def _power(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x ** y, NaN for a fractional power of a negative number; -0 counts as 0."""
  y = lax.convert_element_type(y, jnp.result_type(x))
  size, half = abs(x), 0.5 * y
  is_whole = round_even(y) == y
  found = jnp.exp2(y * (jnp.log(size) * _LOG2E))
  found = jnp.where((y == 0) | (size == 1), jnp.ones_like(found), found)
  found = jnp.where((x < 0) & is_whole & (round_even(half) != half), -found, found)
  return jnp.where((x < 0) & (size != jnp.inf) & ~is_whole, jnp.nan, found)


def _cube_root(x: jax.Array) -> jax.Array:
  return _with_sign(jnp.exp2(jnp.log(abs(x)) * (_LOG2E / 3)), x)


def _log1p(x: jax.Array) -> jax.Array:
  """Returns log(1 + x), near 0 by 2 * atanh(s), s = x / (2 + x), |s| <= 1 / 4."""
  s = x / (2 + x)
  square = s * s
  series = 2 * s * _polynomial(square, [1 / 9, 1 / 7, 1 / 5, 1 / 3, 1])
  return jnp.where(abs(x) < 0.4, series, jnp.log(1 + x))


def _expm1(x: jax.Array) -> jax.Array:
  series = x * _polynomial(x, [1 / math.factorial(n) for n in range(9, 0, -1)])
  return jnp.where(abs(x) < 0.5, series, jnp.exp(x) - 1)


def _polynomial(x: jax.Array, coefficients: list[float]) -> jax.Array:
  """Returns a polynomial, by Horner's rule; the coefficient of the highest power comes first."""
  found = coefficients[0] * x + coefficients[1]
  for coefficient in coefficients[2:]:
    found = found * x + coefficient
  return found


def _sinh(x: jax.Array) -> jax.Array:
  size = abs(x)
  small = _expm1(jnp.minimum(size, 1))
  large = jnp.exp(size - _LN2) - jnp.exp(-size - _LN2)  # e ** size may be infinite
  return _with_sign(jnp.where(size < 1, 0.5 * (small + small / (1 + small)), large), x)


def _cosh(x: jax.Array) -> jax.Array:
  return jnp.exp(abs(x) - _LN2) + jnp.exp(-abs(x) - _LN2)


def _asinh(x: jax.Array) -> jax.Array:
  size = abs(x)
  small = jnp.minimum(size, _LARGE)
  square = small * small
  found = _log1p(small + square / (1 + sqrt(square + 1)))
  return _with_sign(jnp.where(size < _LARGE, found, jnp.log(size) + _LN2), x)


def _acosh(x: jax.Array) -> jax.Array:
  more = jnp.minimum(x, _LARGE) - 1
  return jnp.where(x < _LARGE, _log1p(more + sqrt(more) * sqrt(more + 2)), jnp.log(x) + _LN2)


def _atanh(x: jax.Array) -> jax.Array:
  return 0.5 * (_log1p(x) - _log1p(-x))


def _cosine_of_asin(x: jax.Array) -> jax.Array:
  return sqrt((1 - x) * (1 + x))


# Those of all Pallas kernels.
COMMON: Forms = {
    "acos": lambda x: lax.atan2(_cosine_of_asin(x), x), "acosh": _acosh,
    "asin": lambda x: lax.atan2(x, _cosine_of_asin(x)), "asinh": _asinh,
    "atan": lambda x: lax.atan2(x, jnp.ones_like(x)), "atanh": _atanh, "cbrt": _cube_root,
    "copy": lambda x: x, "cosh": _cosh, "expm1": _expm1, "log1p": _log1p, "pow": _power,
    "sign": _sign, "sinh": _sinh}


def _widened(x: jax.Array) -> jax.Array:
  """Returns narrow floats as float32, in which the errors of a form are small."""
  dtype = jnp.result_type(x)
  narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return lax.convert_element_type(x, jnp.float32) if narrow else x


def binder(forms: Forms) -> operations.Bind[jax.Array]:
  """Returns what applies an operation in its form, in 32 bits; see `operations.evaluate`."""
  def apply(equation: JaxprEqn, given: list[jax.Array]) -> list[jax.Array]:
    name, parameters = equation.primitive.name, equation.params
    if name not in forms:
      return operations.bind(equation, given)
    exponent = {"y": parameters["y"]} if "y" in parameters else {}
    found = forms[name](*map(_widened, given), **exponent)
    aval: Any = equation.outvars[0].aval
    return [found if found.dtype == aval.dtype else found.astype(aval.dtype)]
  return apply


def in_forms(function: Callable[..., jax.Array], forms: Forms) -> Callable[..., jax.Array]:
  """Returns a function whose operations, and those of its derivative, have other forms.

  Args:
    function: of arrays; may be differentiated once, by those of floats.
    forms: of operations.
  """
  apply = binder(forms)

  def evaluate(run: Callable[..., Any], *arguments: Any) -> Any:
    traced, result = jax.make_jaxpr(run, return_shape=True)(*arguments)
    found = operations.evaluate(
        traced.jaxpr, traced.consts, jax.tree.leaves(arguments), apply)
    return jax.tree.unflatten(jax.tree.structure(result), found)

  # Integers are arguments, too: Pallas lowers no rule of a function that captures what it traces.
  @jax.custom_jvp
  def run(*arguments: jax.Array) -> jax.Array:
    return evaluate(function, *arguments)

  @run.defjvp
  def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    moved = [n for n, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]
    def both(given: tuple, changes: list) -> tuple[jax.Array, jax.Array]:
      def of_floats(*floats: jax.Array) -> jax.Array:
        found = dict(enumerate(given)) | dict(zip(moved, floats))
        return function(*found.values())
      return jax.jvp(of_floats, [given[n] for n in moved], changes)
    return evaluate(both, primals, [tangents[n] for n in moved])
  return run
