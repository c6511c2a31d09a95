# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exponential and rounding that are fast on XLA:CPU, and barriers that XLA does not remove.

The first two use integer operations on the bits, which vectorize where XLA's own code for the CPU
does not: the exponential of a tile costs about as much as copying it, and rounding to bfloat16
takes half the time of XLA's conversion. On other platforms they are the usual functions.
"""

from collections.abc import Callable, Iterable
import functools
from typing import Any, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.types import are_known

Tree = TypeVar("Tree")  # a pytree of arrays

# exp(x) = 2^n * exp(r) with n = round(x / log 2), |r| <= log(2) / 2, and exp(r) by a polynomial
# 1 + r + r^2 * (c2 + c3 r + ...), of least relative error: 1.1e-7 before rounding.
_COEFFICIENTS = (0.499992311, 0.166671142, 0.0418901481, 0.00831252150)
_LOG2_HIGH = 0.693359375  # log(2) in two parts: n * high is exact
_LOG2_LOW = float(np.log(2.0)) - _LOG2_HIGH
_ROUND = np.float32(1.5 * 2**23)  # adding it leaves the nearest integer in the low bits
# XLA:CPU computes a loop on two threads from about this many numbers on; a loop with more
# operations than bytes from about 5,000 on, where starting the thread takes longer than the loop.
_SMALL = 2**17
_SMALLEST = -88.0  # from here on the result is 0


@jax.custom_jvp
def exp(x: jax.Array) -> jax.Array:
  """Returns exp(x) for x <= 0 (up to rounding), the range of a softmax.

  Float32 on a CPU: relative error at most 3e-7, exp(0) = 1, exp(-inf) = 0, NaN stays NaN, and
  results below the normal numbers are 0. Where the result is rounded to 16 bits, `jnp.exp` is
  faster.
  """
  if x.dtype != jnp.float32:
    return jnp.exp(x)
  return lax.platform_dependent(x, cpu=_exp_cpu, default=jnp.exp)


@exp.defjvp
def _exp_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
  y = exp(*primals)
  return y, y * tangents[0]


def _exp_cpu(x: jax.Array) -> jax.Array:
  x = jnp.maximum(x, np.float32(_SMALLEST))
  # Rounded by an operation of its own: LLVM may compute n twice, with a fused multiply-add in one
  # of them only. If n came from adding `_ROUND`, the two could differ, and the result be double.
  n = lax.round(x * np.float32(1 / np.log(2.0)), lax.RoundingMethod.TO_NEAREST_EVEN)
  r = x - n * np.float32(_LOG2_HIGH) - n * np.float32(_LOG2_LOW)
  y: jax.Array | np.float32 = np.float32(_COEFFICIENTS[-1])
  for c in (*_COEFFICIENTS[-2::-1], 1.0, 1.0):
    y = y * r + np.float32(c)
  exponent = lax.bitcast_convert_type(n + _ROUND, jnp.int32) - np.int32(_ROUND.view(np.int32) - 127)
  return y * lax.bitcast_convert_type(exponent << np.int32(23), jnp.float32)


def narrow(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns x.astype(dtype), bit for bit."""
  if x.dtype != jnp.float32 or dtype != jnp.bfloat16:
    return x.astype(dtype)
  return _to_bfloat16(x)


@jax.custom_jvp
def _to_bfloat16(x: jax.Array) -> jax.Array:
  return lax.platform_dependent(
      x, cpu=_to_bfloat16_cpu, default=lambda x: x.astype(jnp.bfloat16))


@_to_bfloat16.defjvp
def _to_bfloat16_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
  return _to_bfloat16(*primals), tangents[0].astype(jnp.bfloat16)


def _to_bfloat16_cpu(x: jax.Array) -> jax.Array:
  """Returns the upper half of the bits, rounded to nearest even; NaN becomes a quiet NaN."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  rounded = bits + np.uint32(0x7fff) + ((bits >> np.uint32(16)) & np.uint32(1))
  bits = jnp.where(jnp.isnan(x), bits | np.uint32(0x400000), rounded)
  return lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def for_product(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns weights, or their cotangents, for a product with an array of `dtype`.

  They are rounded to 16 bits, except for float16 on a CPU, where that would take longer and cost
  digits; see `mixed_product`.
  """
  if dtype != jnp.float16 or x.dtype != jnp.float32:
    return narrow(x, dtype)
  info = jnp.finfo(dtype)
  return lax.platform_dependent(
      x, cpu=lambda x: x, default=lambda x: lax.reduce_precision(x, info.nexp, info.nmant))


def mixed_product(product: Callable[[jax.Array, jax.Array], jax.Array], left: jax.Array,
                  right: jax.Array) -> jax.Array:
  """Returns the product of an array of 16 bits and a wider one, of `for_product`.

  On a CPU no digit is rounded off: XLA:CPU multiplies float16 as float32. Elsewhere the wider array
  is rounded to the dtype of the other one.

  Args:
    product: of two arrays of one dtype.
    left: an operand.
    right: the other one.
  """
  narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
  wide = max(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
  return lax.platform_dependent(
      left, right, cpu=lambda x, y: product(x.astype(wide), y.astype(wide)),
      default=lambda x, y: product(x.astype(narrow), y.astype(narrow)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def fill_nonfinite(filler: float, x: jax.Array, *others: jax.Array) -> jax.Array:
  """Returns `x` with `filler`, 0 or NaN, in place of non-finite numbers.

  Args:
    filler: 0 or NaN.
    x: floating-point numbers.
    others: of the shape and dtype of `x`: the arrays whose non-finite numbers count, in place of
      those of `x`.
  """
  others = others or (x,)
  if x.dtype != jnp.bfloat16:
    return jnp.where(_all(jnp.isfinite(y) for y in others), x, filler)
  # By integers: XLA:CPU chooses between bfloat16 numbers as float32, and multiplies these.
  bits = lambda y: lax.bitcast_convert_type(y, jnp.uint16)
  exponent, replaced = (jnp.asarray(n, jnp.uint16) for n in (0x7f80, 0x7fc0 if filler else 0))
  finite = [(bits(y) & exponent) != exponent for y in others]
  if is_small(x):
    finite = [apart(y) for y in finite]
  return lax.bitcast_convert_type(jnp.where(_all(finite), bits(x), replaced), x.dtype)


@fill_nonfinite.defjvp
def _fill_nonfinite_jvp(filler: float, primals: tuple,
                        tangents: tuple) -> tuple[jax.Array, jax.Array]:
  finite = _all(jnp.isfinite(y) for y in primals[1:] or primals)
  return fill_nonfinite(filler, *primals), jnp.where(finite, tangents[0], 0)


def is_small(x: jax.Array) -> bool:
  """Returns whether XLA:CPU computes a loop over x with few operations on one thread."""
  return are_known(*x.shape) and x.size < _SMALL


def apart(x: jax.Array) -> jax.Array:
  """Returns x behind a barrier, so that XLA:CPU compiles what makes x and what reads it apart."""
  return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def _all(conditions: Iterable[jax.Array]) -> jax.Array:
  """Returns where all conditions hold."""
  return functools.reduce(jnp.logical_and, conditions)


def add_nan(x: jax.Array, nan: jax.Array) -> jax.Array:
  """Returns x + nan for `nan` of 0 and NaN, in the dtype of x."""
  if x.dtype.itemsize >= 4:
    return x + nan  # takes less time to compile than a choice
  # A sum of 16 bits, or operations on the bits, would be folded into a product together with the
  # transposition of keys, which takes 1.2 times as long in bfloat16.
  return jnp.where(nan == 0, x, nan)


def zeros(shape: tuple[int, ...], dtype: DTypeLike, *, done: Any) -> jax.Array:
  """Returns zeros that XLA computes only after the arrays of the pytree `done`.

  XLA computes a constant once, keeps it in memory from the beginning of the program, and copies it
  for every loop that starts with it.
  """
  return jnp.broadcast_to(after(jnp.zeros((), dtype), done), shape)


def after(x: Tree, done: Any) -> Tree:
  """Returns the pytree of arrays `x`, computed after all arrays of the pytree `done`.

  XLA removes optimization barriers before it schedules a program. So x is reduced by a number that
  is always 0, which the compiler cannot know.
  """
  bits = [lax.bitcast_convert_type(first(y).astype(jnp.float32), jnp.int32)
          for y in jax.tree.leaves(done)]
  nothing = sum((jnp.minimum(y & np.int32(2**31 - 1), 0) for y in bits), np.int32(0))
  # Subtracting 0 keeps all bits, also of -0.
  return jax.tree.map(lambda x: x - nothing.astype(x.dtype), x)


def first(x: jax.Array) -> jax.Array:
  """Returns the first number of an array, as an array []."""
  return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
