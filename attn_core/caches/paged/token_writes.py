# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes of new tokens to pages in any layout.

Shapes: T new tokens, R requests, P pages of the pool.
"""

from typing import Callable, cast

import jax
from jax.typing import DTypeLike
import jax.numpy as jnp

from attn_core import checks
from attn_core.caches import device_parts, quantize
from attn_core.caches.paged import device_pages, layouts, pool as pool_lib
from attn_core.caches.paged.layouts import (
    Array, Pages, PagesT, PagesV1, PagesV3, dtype_of, has_token_scales, heads_of, num_pages,
    over_arrays, page_size)

Scales = tuple[Array, Array] | None  # of keys and values


def append(cache: PagesT, key: Array, value: Array, mapping: Array,
           scales: Scales = None) -> PagesT:
  """Writes one key and one value per token.

  Args:
    cache: any layout.
    key: [T, K, D] in the dtype of the pages. Quantized pages accept any float dtype: keys are
      quantized with a scale per token and head, or divided by the one scale of the pages, rounded
      and clipped.
    value: [T, K, E], likewise.
    mapping: int32 [T] slots (see `slots`); tokens with a slot outside the pool are not written.
    scales: float32 (key [T, K], value [T, K]) of tokens that are already quantized, for pages with
      scales per token and head; with pages of 4 bits [T, K, groups], of tokens in int8. None:
      tokens are not quantized, or pages have no such scales.

  Returns:
    The cache with the tokens written, sharded as before.

  Raises:
    ValueError: shapes or dtypes do not fit, `mapping` is not integers [T], `scales` are missing for
      quantized tokens, or given where the pages have no scales per token.
    NotImplementedError: quantized keys or values are differentiated.
  """
  key, value = jnp.asarray(key), jnp.asarray(value)
  _check_tokens(cache, key, value, scales)
  return _appended(cache, key, value, int32_vector("mapping", mapping, key.shape[0], "slots"),
                   scales)


@device_parts.one_program()
def _appended(cache: PagesT, key: Array, value: Array, mapping: Array, scales: Scales) -> PagesT:
  """Writes tokens that fit the pages to the slots `mapping`."""
  key, value, scales = _stored_tokens(cache, key, value, scales)
  place, write = places(cache, mapping), device_pages.write
  assert isinstance(cache, layouts.PAGES)
  if isinstance(cache, PagesV1):
    if quantize.is_packed(cache.key_pages.dtype):
      key, value = map(quantize.pack_columns, (key, value))
    written: Pages = cache._replace(
        key_pages=write(cache.key_pages, key.swapaxes(0, 1), 1, *place),
        value_pages=write(cache.value_pages, value.swapaxes(0, 1), 1, *place))
  else:
    written = cache._replace(
        pages=write(cache.pages, pool_lib.interleaved(cache, key, value), 0, *place))
  if scales is not None:
    written = _with_scales(written, scales, place)
  assert isinstance(written, type(cache))
  return written


def append_scales(cache: PagesV3, key: Array, value: Array,
                  mapping: Callable[[], Array]) -> tuple[jax.Array, PagesV3]:
  """Does all of `append` but writing keys and values, for kernels that write these.

  Args:
    cache: the pages.
    key: as in `append`, without scales.
    value: likewise.
    mapping: returns the slots; called only where the pages have scales per token.

  Returns:
    (the tokens as the pages hold them [T, rows, ...], the cache with the tokens' scales).
  """
  _check_tokens(cache, key, value, None)
  key, value, scales = _stored_tokens(cache, key, value, None)
  if scales is not None:
    cache = _with_scales(cache, scales, places(cache, mapping()))
  return pool_lib.interleaved(cache, key, value), cache


def move(cache: PagesT, sources: Array, targets: Array) -> PagesT:
  """Copies tokens from some slots to others; all are read before one is written.

  Args:
    cache: any layout.
    sources: int32 [T] slots within the pool.
    targets: int32 [T] slots; those outside the pool are not written.
  """
  size, place, rows = page_size(cache), places(cache, targets), jnp.arange(sources.shape[0])

  def moved(x: Array, axis: int) -> Array:
    held = device_pages.take(x, sources // size, axis)
    return device_pages.write(x, held[*(slice(None),) * axis, rows, sources % size], axis, *place)
  return over_arrays(moved, cache)


def _stored_tokens(cache: Pages, key: Array, value: Array,
                   scales: Scales) -> tuple[Array, Array, Scales]:
  """Returns new tokens in the dtype of the pages, and their scales where these have some."""
  dtype = _dtype_of_tokens(cache)
  if not has_token_scales(cache):
    return store(key, dtype, cache.key_scales), store(value, dtype, cache.value_scales), None
  if scales is None:
    (key, of_key), (value, of_value) = (
        quantize.quantize(x, quantize.dtype_name(dtype_of(cache))) for x in (key, value))
    scales = of_key, of_value
  return key, value, scales


def _dtype_of_tokens(cache: Pages) -> DTypeLike:
  """Returns the dtype of tokens that are quantized as the pages are, before two share a byte."""
  dtype = dtype_of(cache)
  return jnp.dtype("int8") if quantize.is_packed(dtype) else dtype


def places(cache: Pages, mapping: Array) -> tuple[Array, Array]:
  """Returns the pages of slots and their offsets there; past the pool for negative ones."""
  size = page_size(cache)
  mapping = jnp.where(mapping < 0, num_pages(cache) * size, mapping)
  return mapping // size, mapping % size


def _with_scales(cache: PagesT, scales: Scales, place: tuple[Array, Array]) -> PagesT:
  """Writes scales per token and head."""
  assert scales is not None
  assert isinstance(cache, layouts.PAGES)
  key_scales, value_scales = token_scales(cache)
  written: Pages = cache._replace(
      key_scales=device_pages.write(key_scales, scales[0], 0, *place),
      value_scales=device_pages.write(value_scales, scales[1], 0, *place))
  assert isinstance(written, type(cache))
  return written


def int32_vector(argument: str, x: Array, count: int, meaning: str) -> Array:
  """Checks that an argument is an array of integers [count], and converts it to int32."""
  expected = f"int32 [{count}], {meaning}"
  numbers = checks.int32(argument, x, expected)
  checks.require(numbers.shape == (count,), argument, checks.describe(numbers), expected)
  return cast(Array, numbers)


def token_scales(cache: Pages) -> tuple[Array, Array]:
  """The scales of keys and values of pages that have them."""
  assert cache.key_scales is not None and cache.value_scales is not None
  return cache.key_scales, cache.value_scales


def _check_tokens(cache: Pages, key: Array, value: Array, scales: Scales) -> None:
  layouts.check_key_values(cache)
  heads = heads_of(cache)
  tokens, key_heads, width = key.shape if key.ndim == 3 else (0, 0, 0)
  padded = isinstance(cache, PagesV3)
  fits = (key_heads <= heads.key_heads and width <= heads.key_width if padded
          else (key_heads, width) == heads[:2])
  checks.require(key.ndim == 3 and fits, "key", checks.describe(key),
                 f"[T, {heads.key_heads}, {heads.key_width}], the pages' heads and width"
                 + (", or fewer" if padded else ""))
  narrower = value.ndim == 3 and padded and value.shape[2] <= heads.value_width
  expected = (tokens, key_heads, value.shape[-1] if narrower else heads.value_width)
  checks.require(value.shape == expected, "value", checks.describe(value), f"{list(expected)}"
                 + (", or narrower" if padded else ""))
  dtype, per_token = _dtype_of_tokens(cache), has_token_scales(cache)
  for name, x in (("key", key), ("value", value)):
    wide = cache.key_scales is not None and jnp.issubdtype(x.dtype, jnp.floating)
    checks.require(x.dtype == dtype or wide, name, checks.describe(x),
                   f"the dtype of the pages, {quantize.dtype_name(dtype_of(cache))}")
    if per_token:
      checks.require((scales is not None) == (x.dtype == dtype), "scales",
                     f"{'None' if scales is None else 'arrays'} with {name} {checks.describe(x)}",
                     f"float32 (key [{tokens}, {key_heads}], value) with tokens in {dtype}, None "
                     "with tokens in floating point: the pages have a scale per token and head")
  checks.require(per_token or scales is None, "scales", "arrays",
                 "None: the pages have no scale per token")
  held = token_scales(cache)[0].shape[2] if per_token else key_heads
  checks.require(held == key_heads, "key", checks.describe(key),
                 f"{held} heads, those of key_scales {checks.describe(cache.key_scales)}")
  groups = tuple(quantize.scale_shape((), x.shape[2], quantize.dtype_name(dtype_of(cache)))
                 if per_token else () for x in (key, value))
  for name, x, of_heads in zip(("key", "value"), (key, value), groups):
    for number in getattr(cache, f"{name}_scales").shape[3:] if of_heads else ():
      most = number * quantize.GROUP
      checks.require(of_heads == (number,), name, checks.describe(x), f"more than "
                     f"{most - quantize.GROUP} columns and at most {most}, those of the pages' "
                     "scales")
  for x, of_heads in () if scales is None else zip(scales, groups):
    shape = (tokens, key_heads, *of_heads)
    checks.require(x.shape == shape and x.dtype == jnp.float32, "scales", checks.describe(x),
                   f"float32 {list(shape)} of key and of value")


def store(x: Array, dtype: DTypeLike, scale: Array | None = None) -> jax.Array:
  """Converts values to the dtype of pages: divided by their scale, rounded to integers, clipped.

  With one scale for all, infinities become the largest number of the dtype, and NaN becomes 0 in
  integers.

  Args:
    x: keys or values of any shape; those of `dtype` are returned unchanged.
    dtype: of the pages.
    scale: float32 [], one scale for all; None: no division.

  Returns:
    An array of x's shape, of `dtype`.

  Raises:
    NotImplementedError: values to be stored in 8 bits are differentiated.
  """
  if x.dtype == dtype:
    return x
  if jnp.dtype(dtype).itemsize == 1:
    x, scale = quantize.constant((x, scale), f"keys and values in {jnp.dtype(dtype).name}")
  if scale is None:
    return x.astype(dtype)
  x = x.astype(jnp.float32) / scale
  if jnp.issubdtype(dtype, jnp.integer):
    x = jnp.round(jnp.where(jnp.isnan(x), 0, x))
  limit = quantize.LIMITS[jnp.dtype(dtype).name]
  return jnp.clip(x, -limit, limit).astype(dtype)
