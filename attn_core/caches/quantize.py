"""Keys and values in 8 bits: one scale for every vector, so per token and head.

  scale  = max over the last axis of |x| / largest number of the dtype
  values = x / scale, rounded to the nearest (ties to even)

Letters: W width; "..." any axes, such as tokens and heads.
"""

import jax.numpy as jnp

from attn_core import checks

# dtype of the storage -> the largest magnitude that it is used for.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_quantized(dtype) -> bool:
  """Whether numbers of a dtype need scales beside them."""
  return jnp.dtype(dtype).name in LIMITS


def quantize(x, dtype):
  """`x` in 8 bits and its scales over the last axis.

  Args:
    x: float [..., W].
    dtype: int8 or float8_e4m3fn.

  Returns:
    (values [..., W] of `dtype`, scales float32 [...]). A vector with a number that is not finite
    has a scale that is not finite either and comes back as NaN.

  Raises:
    ValueError: another dtype.
  """
  dtype = jnp.dtype(dtype)
  checks.one_of("dtype", dtype.name, tuple(LIMITS))
  limit = LIMITS[dtype.name]
  x = x.astype(jnp.float32)
  # At least the least normal number, so that a vector of zeros is not divided by 0.
  scales = jnp.maximum(jnp.abs(x).max(-1) / limit, jnp.finfo(jnp.float32).tiny)
  scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
  scaled = x / scales[..., None]
  if jnp.issubdtype(dtype, jnp.integer):
    scaled = jnp.clip(jnp.round(jnp.nan_to_num(scaled)), -limit, limit)
  return scaled.astype(dtype), scales


def dequantize(values, scales, dtype=jnp.float32):
  """The inverse of `quantize`, up to its rounding.

  Args:
    values: int8 or float8_e4m3fn [..., W].
    scales: float32 [...].
    dtype: of the result.
  """
  return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)
