# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores for each operation that kernels compute, and programs that apply them all."""

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import lax
import numpy as np

from attn_core import masks, score_mods
from attn_core_test import gpu_cases

AMOUNT = np.float32(0.7)

# (score, query - key as an int, the same as a float, a number) -> what is added to the score. None
# jumps at a distance, and none has an infinite value or derivative at any.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "acos": lambda x, d, c, a: jnp.arccos(0.9 * a * jnp.tanh(x)),
    "acosh": lambda x, d, c, a: jnp.arccosh(1.5 + a * x * x),
    "asin": lambda x, d, c, a: jnp.arcsin(0.9 * a * jnp.tanh(x)),
    "asinh": lambda x, d, c, a: jnp.arcsinh(a * x),
    "atan": lambda x, d, c, a: jnp.arctan(x * a),
    "atan2": lambda x, d, c, a: jnp.atan2(x, 0.1 * c * a + 0.03) * (d > 0),
    "atanh": lambda x, d, c, a: jnp.arctanh(0.9 * a * jnp.tanh(x)),
    "cbrt": lambda x, d, c, a: jnp.cbrt(-2 - a * x * x),
    "ceil": lambda x, d, c, a: a * jnp.ceil(0.3 * c + 0.05),
    "clamp": lambda x, d, c, a: a * lax.clamp(
        jnp.full_like(x, -0.5), x, jnp.full_like(x, 0.7)),
    "cos": lambda x, d, c, a: jnp.cos(x + a * c),
    "cosh": lambda x, d, c, a: jnp.cosh(a * jnp.tanh(x)),
    "expm1": lambda x, d, c, a: jnp.expm1(-a * x * x),
    "floor": lambda x, d, c, a: a * jnp.floor(0.3 * c + 0.05),
    "integer_pow": lambda x, d, c, a: (0.3 * x * a)**3 + (2 + x * x)**-2,
    "is_finite": lambda x, d, c, a: jnp.where(jnp.isfinite(x), a * x, 0),
    "log1p": lambda x, d, c, a: -a * jnp.log1p(a * abs(c)) + jnp.log1p(0.1 * a * jnp.tanh(x)),
    "log2": lambda x, d, c, a: jnp.log2(1 + a * abs(c)),
    "pow": lambda x, d, c, a: (1 + x * x)**a + a**(0.1 * abs(c)),
    "pow_negative": lambda x, d, c, a: jnp.power(-1 - 0.1 * a * x * x, (d % 4).astype(x.dtype)),
    "relu": lambda x, d, c, a: jax.nn.relu(x - a),
    "rem": lambda x, d, c, a: a * ((0.7 * c + 0.13) % 2.5) + lax.rem(0.71 * c, 3 * a + 0 * c),
    "rem_int": lambda x, d, c, a: jnp.where(d % 3 == 0, x * a, 0) + a * (d // 4).astype(x.dtype),
    "floor_divide": lambda x, d, c, a: a * ((0.7 * c + 0.13) // 2.5),
    "round": lambda x, d, c, a: a * jnp.round(0.3 * c + 0.05),
    "rsqrt": lambda x, d, c, a: lax.rsqrt(1 + a * x * x),
    "shift": lambda x, d, c, a: a * (((d << 3) >> 2) & 3).astype(x.dtype),
    "shift_logical": lambda x, d, c, a: a * lax.shift_right_logical(d, 28 + 0 * d).astype(x.dtype),
    "sign": lambda x, d, c, a: a * x * jnp.sign(c) + jnp.sign(d).astype(x.dtype) + abs(x),
    "sin": lambda x, d, c, a: jnp.sin(x + a * c),
    "sinh": lambda x, d, c, a: jnp.sinh(a * jnp.tanh(x)),
    "softplus": lambda x, d, c, a: jax.nn.softplus(a * x),
    "tan": lambda x, d, c, a: jnp.tan(a * jnp.tanh(x)),
}


def function_of(*names: str) -> Callable[..., jax.Array]:
  """Returns a function of a score mod that adds what operations give, small, to the score."""
  def apply(score, batch, head, query, key, amount):
    distance = query - key
    of_numbers = jnp.sin(amount * (head % 2).astype(score.dtype) + batch.astype(score.dtype))
    found = score + 0.1 * of_numbers
    for name in names:
      found = found + 0.1 * OPERATIONS[name](
          score, distance, distance.astype(score.dtype), amount)
    return found
  return apply


EVERY = function_of(*OPERATIONS)  # the same function in all calls, so that it is traced once


def kerple(score, batch, head, query, key, rate):
  """KERPLE's logarithmic form, with one number for its two."""
  return score - rate * jnp.log1p(rate * abs(query - key).astype(score.dtype))


def function_named(name: str) -> Callable[..., jax.Array]:
  """Returns a function of a number that applies the operation of a name, or all."""
  return {"every": EVERY, "kerple": kerple}.get(name) or function_of(name)


def mod_of(name: str, amount: Any = AMOUNT) -> score_mods.ScoreMod:
  return score_mods.custom(function_named(name), amount)


def gpu_case(name: str) -> gpu_cases.Case:
  return gpu_cases.Case(masks.causal(), T=70, H=2, K=1, mod=mod_of(name))


@functools.cache
def gpu_programs() -> dict[str, tuple[Any, tuple]]:
  """The forward and all kernels of the backward, for `benchmark.static.gpu`."""
  return gpu_cases.programs_of({name: gpu_case(name) for name in ("kerple", *OPERATIONS)})
