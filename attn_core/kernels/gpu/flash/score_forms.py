# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of score mods in forms that the GPU kernels compute.

The hardware's tanh has 11 bits, and its sine and cosine lose bits outside of [-pi, pi]. Mosaic GPU
has no sum of cotangents, no floor, no remainder of floats, and before jax 0.11 no square root.
"""

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.score_mods import forms

# 2 pi in parts: of 8, 11 and 24 bits. Products of the first two with a number of turns are exact.
_TURN = (6.28125, 0.0019350051879882812, 3.019916050561733e-07)


def capped(scores: jax.Array, scale: float, cap: float) -> tuple[jax.Array, jax.Array]:
  """Returns cap * tanh(scale * scores / cap), and its derivative by scale * scores.

  tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's own has 11 bits. A reciprocal is less code than a
  quotient.
  """
  rest = 1 / (1 + jnp.exp2(scores * (2 * LOG2E * scale / cap)))
  return cap - (2 * cap) * rest, 4 * (rest - rest * rest)


def _integer_power(x: jax.Array, y: int) -> jax.Array:
  """Returns x ** y; Mosaic GPU multiplies at least twice."""
  if y < 0:
    return 1 / _integer_power(x, -y)
  return lax.integer_pow(x, y) if y > 1 else x if y else jnp.ones_like(x)


def _floor(x: jax.Array) -> jax.Array:
  nearest = forms.round_even(x)
  return jnp.where(nearest > x, nearest - 1, nearest)


def _remainder(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x - y * (x / y without its fraction), with the sign of x and less than y in size.

  Of quotients of 2^24 or more no remainder is left in 32 bits: it is 0 where it comes out of range.
  """
  if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
    return lax.rem(x, y)
  size, divisor = abs(x), abs(y)
  quotient = _floor(size / divisor)
  rest = jnp.where(quotient == 0, size, size - quotient * divisor)
  # The quotient is rounded, and may be one more or less.
  rest = jnp.where(rest < 0, rest + divisor, rest)
  rest = jnp.where(rest >= divisor, rest - divisor, rest)
  rest = jnp.where((rest < 0) | (rest >= divisor), jnp.zeros_like(rest), rest)
  return jnp.where(x < 0, -rest, rest)


def _turned(x: jax.Array) -> jax.Array:
  """Returns an angle without its whole turns, exact up to 2^-24 of a turn for 2^13 of them."""
  turns = forms.round_even(x * (1 / sum(_TURN)))
  for part in _TURN:
    x = x - turns * part
  return x


def _tan(x: jax.Array) -> jax.Array:
  angle = _turned(x)
  return jnp.sin(angle) / jnp.cos(angle)


FORMS: forms.Forms = {
    **forms.COMMON, "add_any": lax.add, "stop_gradient": lambda x: x,
    "ceil": lambda x: -_floor(-x), "cos": lambda x: jnp.cos(_turned(x)), "floor": _floor,
    "integer_pow": _integer_power, "is_finite": lambda x: x - x == 0,
    "log2": lambda x: jnp.log(x) * LOG2E, "rem": _remainder,
    "sin": lambda x: jnp.sin(_turned(x)), "sqrt": forms.sqrt, "tan": _tan,
    "tanh": lambda x: capped(x, 1.0, 1.0)[0]}
