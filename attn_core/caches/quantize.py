# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization of keys and values to 8 bits, with one scale per token and head.

  scale  = max over the last axis of |x| / largest number of the dtype
  values = x / scale, rounded to the nearest (ties to even)

Rounding has no useful derivative, so quantized values and their scales are constants: queries that
attend to them have gradients, and differentiating the stored values is an error.

In shapes, "..." is any axes, such as tokens and heads, and width is that of a vector.
"""

import functools
from typing import Any, TypeVar

import jax
from jax import lax
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks

# Storage dtype -> the largest magnitude of quantized values.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


Tree = TypeVar("Tree")


def is_quantized(dtype: DTypeLike) -> bool:
  """Whether values of a dtype need scales."""
  return jnp.dtype(dtype).name in LIMITS


def constant(tree: Tree, argument: str) -> Tree:
  """Marks the arrays of a tree as not differentiable.

  Args:
    tree: arrays.
    argument: their name in error messages.

  Raises:
    NotImplementedError: they are differentiated, in forward or in reverse mode.
  """
  return jax.tree.map(functools.partial(_constant, argument), tree)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(argument: str, x: jax.Array) -> jax.Array:
  del argument
  return x


@_constant.defjvp
def _raise_if_differentiated(argument: str, primals: Any, tangents: Any) -> Any:
  del primals, tangents
  raise NotImplementedError(
      f"{argument}: gradients of quantized keys and values are not supported: rounding has no "
      "derivative. Apply jax.lax.stop_gradient to them, so that only the query is differentiated, "
      "or use a cache of a floating-point dtype")


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Quantizes `x` to 8 bits, with scales over the last axis.

  Args:
    x: float [..., width].
    dtype: int8 or float8_e4m3fn.

  Returns:
    (values [..., width] of `dtype`, scales float32 [...]). A vector with a non-finite number has a
    NaN scale and is dequantized to NaN.

  Raises:
    ValueError: an unsupported dtype, or `x` is not float [..., width] with width >= 1.
    NotImplementedError: `x` is differentiated.
  """
  dtype = checks.dtype("dtype", dtype, f"one of {', '.join(map(repr, LIMITS))}")
  checks.one_of("dtype", dtype.name, tuple(LIMITS))
  checks.array("x", x, "float [..., width]")
  checks.require(jnp.issubdtype(x.dtype, jnp.floating) and x.ndim >= 1 and x.shape[-1] >= 1, "x",
                 checks.describe(x), "float [..., width], width >= 1")
  limit = LIMITS[dtype.name]
  x = constant(x, f"keys and values in {dtype.name}").astype(jnp.float32)
  # At least the smallest normal number, so that a vector of zeros is not divided by 0.
  scales = jnp.maximum(jnp.abs(x).max(-1) / limit, jnp.finfo(jnp.float32).tiny)
  scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
  scaled = x / scales[..., None]
  if jnp.issubdtype(dtype, jnp.integer):
    scaled = jnp.clip(jnp.round(jnp.nan_to_num(scaled)), -limit, limit)
  return scaled.astype(dtype), scales


def bits(values: jax.Array) -> jax.Array:
  """Bitcasts float8_e4m3fn to uint8, which XLA:CPU slices fast; other dtypes are unchanged."""
  if values.dtype != jnp.float8_e4m3fn:
    return values
  return lax.bitcast_convert_type(values, jnp.uint8)


def dequantize(values: jax.Array, scales: jax.Array,
               dtype: DTypeLike = jnp.float32) -> jax.Array:
  """The inverse of `quantize`, up to rounding.

  Args:
    values: int8 or float8_e4m3fn [..., width], or the `bits` of the latter.
    scales: float32 [...], or any shape that broadcasts to it.
    dtype: of the result.

  Returns:
    [..., width] of `dtype`.

  Raises:
    ValueError: not arrays, or scales that do not broadcast to one per vector.
  """
  checks.array("values", values, "int8 or float8_e4m3fn [..., width]")
  checks.array("scales", scales, "float32 [...]")
  vectors = values.shape[:-1]
  checks.require(values.ndim >= 1 and scales.ndim <= len(vectors) and all(
      n in (1, full) for n, full in zip(scales.shape[::-1], vectors[::-1])), "scales",
                 checks.describe(scales), f"float32 {list(vectors)}, one for each vector of the "
                 f"values {checks.describe(values)}, or broadcastable to that")
  return (unscaled(values).astype(jnp.float32) * scales[..., None]).astype(dtype)


def unscaled(values: jax.Array) -> jax.Array:
  """Quantized values before multiplication by scales; `bits` of float8_e4m3fn become float32."""
  values = bits(values)
  if values.dtype != jnp.uint8:
    return values
  return lax.platform_dependent(
      values, cpu=_from_e4m3fn,
      default=lambda x: lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32))


def _from_e4m3fn(x: jax.Array) -> jax.Array:
  """Converts bits of float8_e4m3fn to float32, by operations that XLA:CPU vectorizes."""
  x = x.astype(jnp.uint32)
  magnitude = x & np.uint32(0x7F)
  # Exponents are biased by 7 in float8 and by 127 in float32; subnormals have steps of 2**-9.
  normal = (magnitude << np.uint32(20)) + np.uint32((127 - 7) << 23)
  normal = lax.bitcast_convert_type(normal, jnp.float32)
  small = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2**-9)
  found = jnp.where(magnitude < 8, small, jnp.where(magnitude == 0x7F, jnp.nan, normal))
  return jnp.where(x >= 0x80, -found, found)
