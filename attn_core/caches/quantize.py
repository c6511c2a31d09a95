"""Keys and values in 8 bits: one scale for every vector, so per token and head.

  scale  = max over the last axis of |x| / largest number of the dtype
  values = x / scale, rounded to the nearest (ties to even)

Numbers in 8 bits do not move by small steps, so what is stored in them, and its scales, are
constants: a query that attends to them has its gradient, and to differentiate what was stored is
refused by name, everywhere alike.

Letters: W width; "..." any axes, such as tokens and heads.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core import checks

# dtype of the storage -> the largest magnitude that it is used for.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_quantized(dtype) -> bool:
  """Whether numbers of a dtype need scales beside them."""
  return jnp.dtype(dtype).name in LIMITS


def constant(tree, argument: str):
  """The arrays of a tree, which have no derivative.

  Args:
    tree: arrays.
    argument: what an error calls them.

  Raises:
    NotImplementedError: where they are differentiated, in forward or in reverse mode.
  """
  return jax.tree.map(functools.partial(_constant, argument), tree)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(argument: str, x):
  del argument
  return x


@_constant.defjvp
def _refuse(argument: str, primals, tangents):
  del primals, tangents
  raise NotImplementedError(
      f"{argument}: gradients of what a cache stores in 8 bits are not supported: rounding has "
      "none. Take it through jax.lax.stop_gradient, so that the query alone is differentiated, or "
      "keep a cache of a floating-point dtype")


def quantize(x, dtype):
  """`x` in 8 bits and its scales over the last axis.

  Args:
    x: float [..., W].
    dtype: int8 or float8_e4m3fn.

  Returns:
    (values [..., W] of `dtype`, scales float32 [...]). A vector with a number that is not finite
    has a scale that is not finite either and comes back as NaN.

  Raises:
    ValueError: another dtype, or an `x` that is no float [..., W] with W >= 1.
    NotImplementedError: `x` is differentiated.
  """
  dtype = checks.dtype("dtype", dtype, f"one of {', '.join(map(repr, LIMITS))}")
  checks.one_of("dtype", dtype.name, tuple(LIMITS))
  checks.array("x", x, "float [..., W]")
  checks.require(jnp.issubdtype(x.dtype, jnp.floating) and x.ndim >= 1 and x.shape[-1] >= 1, "x",
                 checks.describe(x), "float [..., W], at least one number in a vector")
  limit = LIMITS[dtype.name]
  x = constant(x, f"keys and values in {dtype.name}").astype(jnp.float32)
  # At least the least normal number, so that a vector of zeros is not divided by 0.
  scales = jnp.maximum(jnp.abs(x).max(-1) / limit, jnp.finfo(jnp.float32).tiny)
  scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
  scaled = x / scales[..., None]
  if jnp.issubdtype(dtype, jnp.integer):
    scaled = jnp.clip(jnp.round(jnp.nan_to_num(scaled)), -limit, limit)
  return scaled.astype(dtype), scales


def bits(values):
  """float8_e4m3fn as the uint8 of its bits, which XLA:CPU slices fast; anything else as it is."""
  if values.dtype != jnp.float8_e4m3fn:
    return values
  return lax.bitcast_convert_type(values, jnp.uint8)


def dequantize(values, scales, dtype=jnp.float32):
  """The inverse of `quantize`, up to its rounding.

  Args:
    values: int8 or float8_e4m3fn [..., W], or the latter's `bits`.
    scales: float32 [...], or fewer, for several vectors alike.
    dtype: of the result.

  Returns:
    [..., W] of `dtype`.

  Raises:
    ValueError: no arrays, or scales that do not broadcast to one for each vector.
  """
  checks.array("values", values, "int8 or float8_e4m3fn [..., W]")
  checks.array("scales", scales, "float32 [...]")
  vectors = values.shape[:-1]
  checks.require(values.ndim >= 1 and scales.ndim <= len(vectors) and all(
      n in (1, full) for n, full in zip(scales.shape[::-1], vectors[::-1])), "scales",
                 checks.describe(scales), f"float32 {list(vectors)}, one for each vector of the "
                 f"values {checks.describe(values)}, or what broadcasts to that")
  return (unscaled(values).astype(jnp.float32) * scales[..., None]).astype(dtype)


def unscaled(values):
  """What is to be multiplied by the scales; float8_e4m3fn's `bits` become float32."""
  values = bits(values)
  if values.dtype != jnp.uint8:
    return values
  return lax.platform_dependent(
      values, cpu=_from_e4m3fn,
      default=lambda x: lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32))


def _from_e4m3fn(x):
  """The float32 that has these bits as float8_e4m3fn, by operations that XLA:CPU vectorises."""
  x = x.astype(jnp.uint32)
  magnitude = x & np.uint32(0x7F)
  # Exponents are biased by 7 here and by 127 there; below the normal numbers, 2**-9 is one step.
  normal = (magnitude << np.uint32(20)) + np.uint32((127 - 7) << 23)
  normal = lax.bitcast_convert_type(normal, jnp.float32)
  small = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2**-9)
  found = jnp.where(magnitude < 8, small, jnp.where(magnitude == 0x7F, jnp.nan, normal))
  return jnp.where(x >= 0x80, -found, found)
