"""Exponentials and roundings that XLA:CPU computes fast, and an order that it keeps.

The first two are written with integer operations on the bits, which vectorise where XLA's own code
for the CPU does not: the exponential of a tile costs about as much as copying it, and rounding to
bfloat16 half of what XLA's conversion takes. Elsewhere they are the usual ones.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# exp(x) = 2^n * exp(r) with n = round(x / log 2), |r| <= log(2) / 2, and exp(r) by a polynomial
# 1 + r + r^2 * (c2 + c3 r + ...), of least relative error: 1.1e-7 before rounding.
_COEFFICIENTS = (0.499992311, 0.166671142, 0.0418901481, 0.00831252150)
_LOG2_HIGH = 0.693359375  # log(2) in two parts: n * high is exact
_LOG2_LOW = float(np.log(2.0)) - _LOG2_HIGH
_ROUND = np.float32(1.5 * 2**23)  # adding it leaves the nearest integer in the low bits
_SMALLEST = -88.0  # from here on the result is 0


@jax.custom_jvp
def exp(x):
  """exp(x) for x <= 0 (rounding aside), as a softmax takes it.

  Float32 on a CPU: relative error at most 3e-7, exp(0) = 1, exp(-inf) = 0, NaN stays NaN, and what
  would be below the normal numbers is 0. To be rounded to 16 bits at once, `jnp.exp` is faster.
  """
  if x.dtype != jnp.float32:
    return jnp.exp(x)
  return lax.platform_dependent(x, cpu=_exp_cpu, default=jnp.exp)


@exp.defjvp
def _exp_jvp(primals, tangents):
  y = exp(*primals)
  return y, y * tangents[0]


def _exp_cpu(x):
  x = jnp.maximum(x, np.float32(_SMALLEST))
  shifted = lax.bitcast_convert_type(x * np.float32(1 / np.log(2.0)) + _ROUND, jnp.int32)
  n = shifted - np.int32(_ROUND.view(np.int32))
  whole = n.astype(jnp.float32)
  r = x - whole * np.float32(_LOG2_HIGH) - whole * np.float32(_LOG2_LOW)
  y = np.float32(_COEFFICIENTS[-1])
  for c in (*_COEFFICIENTS[-2::-1], 1.0, 1.0):
    y = y * r + np.float32(c)
  return y * lax.bitcast_convert_type((n + np.int32(127)) << np.int32(23), jnp.float32)


def narrow(x, dtype):
  """x.astype(dtype), bit for bit."""
  if x.dtype != jnp.float32 or dtype != jnp.bfloat16:
    return x.astype(dtype)
  return _to_bfloat16(x)


@jax.custom_jvp
def _to_bfloat16(x):
  return lax.platform_dependent(
      x, cpu=_to_bfloat16_cpu, default=lambda x: x.astype(jnp.bfloat16))


@_to_bfloat16.defjvp
def _to_bfloat16_jvp(primals, tangents):
  return _to_bfloat16(*primals), tangents[0].astype(jnp.bfloat16)


def _to_bfloat16_cpu(x):
  """The upper half of the bits, rounded to nearest, ties to even; NaN stays NaN, made quiet."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  rounded = bits + np.uint32(0x7fff) + ((bits >> np.uint32(16)) & np.uint32(1))
  bits = jnp.where(jnp.isnan(x), bits | np.uint32(0x400000), rounded)
  return lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def zeros(shape, dtype, *, done):
  """Zeros that are not there before the arrays `done`, or XLA would keep them from the beginning.

  What does not depend on anything it makes once, for all loops that begin with it, and copies.
  """
  return jnp.broadcast_to(after(jnp.zeros((), dtype), done), shape)


def after(x, done):
  """A pytree of arrays `x`, but not before all arrays of the pytree `done` are there.

  XLA takes barriers away before it orders what is left. So a number is subtracted from x that is
  always 0, as only who computes it finds out.
  """
  bits = [lax.bitcast_convert_type(first(y).astype(jnp.float32), jnp.int32)
          for y in jax.tree.leaves(done)]
  nothing = sum((jnp.minimum(y & np.int32(2**31 - 1), 0) for y in bits), np.int32(0))
  # Less a zero is the same bit for bit, also of -0.
  return jax.tree.map(lambda x: x - nothing.astype(x.dtype), x)


def first(x):
  """The first number of an array, as an array []."""
  return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
