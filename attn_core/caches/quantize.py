# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization of keys and values to 8 bits, one scale per token and head, or 4, with more.

  scale  = max over the last axis of |x| / largest number of the dtype
  values = x / scale, rounded to the nearest (ties to even)

With 4 bits every 32 columns of the last axis have a scale of their own, and two numbers share a
byte. XLA has a dtype of 4 bits too, but on CPUs it widens the whole array for every write and takes
ten times as long to read it.

Rounding has no useful derivative, so quantized values and their scales are constants: queries that
attend to them have gradients, and differentiating the stored values is an error.

In shapes, "..." is any axes, such as tokens and heads, width is that of a vector, and groups =
cdiv(width, 32) is the number of its scales with 4 bits.
"""

import functools
from typing import Any, TypeVar

import jax
from jax import lax
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.types import cdiv

# dtype of a cache -> the largest magnitude of quantized values.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "int4": 7.0}
EIGHT_BITS = ("int8", "float8_e4m3fn")
GROUP = 32  # columns that share a scale, with 4 bits
PACKED = jnp.dtype("uint8")  # of arrays that hold two numbers of 4 bits in a byte
# From so many queries of a row on, a cache is dequantized as a whole, where it can be, before any
# query attends to it.
MANY_QUERIES = 32


Tree = TypeVar("Tree")


def is_quantized(dtype: DTypeLike) -> bool:
  """Whether values of a dtype need scales; it may be the one in which they are stored."""
  return jnp.dtype(dtype).name in LIMITS or is_packed(dtype)


def has_8_bits(dtype: DTypeLike) -> bool:
  """Whether values of a dtype have 8 bits and scales."""
  return jnp.dtype(dtype).name in EIGHT_BITS


def is_packed(dtype: DTypeLike) -> bool:
  """Whether an array of a cache holds two numbers of 4 bits in a byte, by its dtype."""
  return jnp.dtype(dtype) == PACKED


def stored_dtype(dtype: DTypeLike) -> np.dtype:
  """Returns the dtype of the arrays of a cache of a dtype."""
  return PACKED if jnp.dtype(dtype).name == "int4" else jnp.dtype(dtype)


def dtype_name(stored: DTypeLike) -> str:
  """Returns the name of the dtype of a cache, by that of its arrays."""
  return "int4" if is_packed(stored) else jnp.dtype(stored).name


def stored_width(width: int, dtype: DTypeLike) -> int:
  """Returns the width of the arrays of a cache of a dtype.

  Raises:
    ValueError: an odd width with int4.
  """
  if jnp.dtype(dtype).name != "int4":
    return width
  checks.require(width % 2 == 0, "width", str(width), "an even one with int4, of which two numbers "
                 "share a byte")
  return width // 2


def width_of(x: jax.Array) -> int:
  """Returns the width of the keys or values that an array [..., stored width] of a cache holds."""
  return x.shape[-1] * (2 if is_packed(x.dtype) else 1)


def scale_shape(vectors: tuple[int, ...], width: int, dtype: DTypeLike) -> tuple[int, ...]:
  """Returns the shape of the scales of some vectors of a width, quantized to `dtype`."""
  return (*vectors, cdiv(width, GROUP)) if jnp.dtype(dtype).name == "int4" else vectors


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
  """Quantizes `x` to 8 or 4 bits, with scales over the last axis.

  Args:
    x: float [..., width].
    dtype: int8, float8_e4m3fn or int4.

  Returns:
    (values [..., width] of `dtype`, scales float32 [...]); with int4 (values int8 [..., width] from
    -7 to 7, scales float32 [..., groups]). Vectors, with int4 groups of their columns, with a
    non-finite number have a NaN scale and are dequantized to NaN.

  Raises:
    ValueError: an unsupported dtype, or `x` is not float [..., width] with width >= 1.
    NotImplementedError: `x` is differentiated.
  """
  dtype = checks.dtype("dtype", dtype, f"one of {', '.join(map(repr, LIMITS))}")
  checks.one_of("dtype", dtype.name, tuple(LIMITS))
  checks.array("x", x, "float [..., width]")
  checks.require(jnp.issubdtype(x.dtype, jnp.floating) and x.ndim >= 1 and x.shape[-1] >= 1, "x",
                 checks.describe(x), "float [..., width], width >= 1")
  grouped = dtype.name == "int4"
  x = constant(x, f"keys and values in {dtype.name}").astype(jnp.float32)
  largest = jnp.abs(x)
  if grouped:
    padding = ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % GROUP),)
    largest = jnp.pad(largest, padding).reshape(*x.shape[:-1], -1, GROUP)
  scales = scale_of(largest.max(-1), dtype)
  scaled = x / (per_column(scales, x.shape[-1]) if grouped else scales[..., None])
  return rounded(scaled, dtype).astype(jnp.int8 if grouped else dtype), scales


def scale_of(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns scales of vectors whose largest magnitudes are given, float32 as these."""
  # XLA multiplies in place of a division by a constant: so that kernels have the same bits, too.
  scales = largest * np.float32(1 / LIMITS[jnp.dtype(dtype).name])
  # At least the smallest normal number, so that a vector of zeros is not divided by 0.
  scales = jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)
  return jnp.where(jnp.isfinite(scales), scales, jnp.nan)


def rounded(scaled: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns quotients of numbers and their scales as `dtype` has them, but still in float32.

  Those of float8_e4m3fn are rounded where they are converted to it.
  """
  name = jnp.dtype(dtype).name
  if not jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
    return scaled
  return jnp.clip(jnp.round(jnp.nan_to_num(scaled)), -LIMITS[name], LIMITS[name])


def per_column(scales: jax.Array, width: int, group: int = GROUP) -> jax.Array:
  """Repeats scales [..., groups] for their columns: [..., width]."""
  return jnp.repeat(scales, group, axis=-1)[..., :width]


def of_width(scales: jax.Array, width: int) -> jax.Array:
  """Returns scales of groups for vectors of another width: cut, or padded with ones."""
  missing = cdiv(width, GROUP) - scales.shape[-1]
  if missing <= 0:
    return scales[..., :cdiv(width, GROUP)] if missing else scales
  return jnp.pad(scales, ((0, 0),) * (scales.ndim - 1) + ((0, missing),), constant_values=1)


def of_columns(scales: jax.Array, first: int, count: int, group: int = GROUP) -> jax.Array:
  """Returns the scales, of [..., groups], of `count` columns from `first` on: [..., count or 1]."""
  start, end = first // group, (first + count - 1) // group + 1
  scales = scales[..., start:end]
  if end - start == 1:
    return scales
  skipped = first - start * group
  return per_column(scales, skipped + count, group)[..., skipped:]


def pack(low: jax.Array, high: jax.Array) -> jax.Array:
  """Packs numbers from -8 to 7, int8 [...], into the two halves of bytes, uint8 [...]."""
  as_byte = lambda x: lax.bitcast_convert_type(x, jnp.uint8)
  return as_byte(low) & np.uint8(0xF) | as_byte(high) << np.uint8(4)


def unpack(packed: jax.Array, high: bool) -> jax.Array:
  """Returns the numbers, int8 [...], in one half of bytes, uint8 [...]."""
  packed = packed if high else packed << np.uint8(4)
  return lax.bitcast_convert_type(packed, jnp.int8) >> np.int8(4)


def pack_columns(values: jax.Array) -> jax.Array:
  """Packs neighboring columns of int8 [..., width] into bytes [..., width / 2]."""
  return pack(values[..., ::2], values[..., 1::2])


def unpack_columns(packed: jax.Array) -> jax.Array:
  """The inverse of `pack_columns`."""
  halves = jnp.stack([unpack(packed, False), unpack(packed, True)], -1)
  return halves.reshape(*packed.shape[:-1], -1)


def bits(values: jax.Array) -> jax.Array:
  """Bitcasts float8_e4m3fn to uint8, which XLA:CPU slices fast; other dtypes are unchanged."""
  if values.dtype != jnp.float8_e4m3fn:
    return values
  return lax.bitcast_convert_type(values, jnp.uint8)


def dequantize(values: jax.Array, scales: jax.Array,
               dtype: DTypeLike = jnp.float32) -> jax.Array:
  """The inverse of `quantize`, up to rounding.

  Args:
    values: int8 or float8_e4m3fn [..., width], or the `bits` of the latter; with scales of groups
      int8, or uint8 [..., width / 2] of `pack_columns`.
    scales: float32 [...], or any shape that broadcasts to it; of int4 [..., groups].
    dtype: of the result.

  Returns:
    [..., width] of `dtype`.

  Raises:
    ValueError: not arrays, or scales that do not broadcast to one per vector or to all groups of
      every vector.
  """
  checks.array("values", values, "int8 or float8_e4m3fn [..., width]")
  checks.array("scales", scales, "float32 [...]")
  if scales.ndim and scales.shape[:-1] == values.shape[:-1]:
    values = unpack_columns(values) if is_packed(values.dtype) else values
    return _dequantize_groups(values, scales).astype(dtype)
  vectors = values.shape[:-1]
  checks.require(values.ndim >= 1 and scales.ndim <= len(vectors) and all(
      n in (1, full) for n, full in zip(scales.shape[::-1], vectors[::-1])), "scales",
                 checks.describe(scales), f"float32 {list(vectors)}, one for each vector of the "
                 f"values {checks.describe(values)}, or broadcastable to that")
  return (unscaled(values).astype(jnp.float32) * scales[..., None]).astype(dtype)


def _dequantize_groups(values: jax.Array, scales: jax.Array) -> jax.Array:
  want = (*values.shape[:-1], cdiv(values.shape[-1], GROUP))
  checks.require(scales.shape == want, "scales", checks.describe(scales),
                 f"float32 {list(want)}, one for every {GROUP} columns of the values "
                 f"{checks.describe(values)}")
  return values.astype(jnp.float32) * per_column(scales, values.shape[-1])


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
