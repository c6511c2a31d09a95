# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The layout of pages of latent rows: one row per token, which is key and value of all heads.

Kernels read it as pages of one key head, whose value is the first part of its key.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.typing import DTypeLike
import jax.numpy as jnp

from attn_core import checks
from attn_core.caches import quantize
from attn_core.caches.latent import LANES, LatentWidths, padded_width

Array = jax.Array  # or a numpy array, where it is only read


class PagesLatent(NamedTuple):
  """Pages of latent rows, made by `caches.latent_pages.init`; a row is stored once.

  In 8 bits only the latents are quantized, with one scale per token, as in `LatentCache`.
  """

  # [P, page_size, latent + rope], or rows padded with zeros to a multiple of 128 numbers; in 8 bits
  # [P, page_size, latent].
  pages: Array
  widths: LatentWidths
  # [P, page_size, rope] where the latents have 8 bits, or padded in the same way.
  rope: Array | None = None
  # float32 [P, page_size] of latents in 8 bits, or padded to a multiple of 128 tokens a page.
  scales: Array | None = None

  @property
  def width(self) -> int:
    """The numbers of a row, latent + rope."""
    return self.widths.latent + self.widths.rope

  @property
  def token_scales(self) -> Array | None:
    """The scales of all tokens, [P, page_size]."""
    return None if self.scales is None else self.scales[:, :self.pages.shape[1]]

  @property
  def key_scales(self) -> Array | None:
    """The scales of the latents, which are a part of the keys; see `scales`."""
    return self.scales

  @property
  def value_scales(self) -> Array | None:
    """The same scales: the latents are the values, too."""
    return self.scales


def over_arrays(function: Callable[[Array, int], Array], cache: PagesLatent) -> PagesLatent:
  """Applies a function to every array, and to the dimension of its pages."""
  return jax.tree.map(lambda x: function(x, 0), cache)


def reader(cache: PagesLatent, dtype: DTypeLike) -> Callable[..., jax.Array]:
  """Reads all pages in slices; keys and values are parts of the same rows.

  Args:
    cache: the pages.
    dtype: of the result; latents in 8 bits are multiplied by their scales in float32.

  Returns:
    As `ops.reader`, with one key head.
  """
  tokens = cache.pages.shape[0] * cache.pages.shape[1]
  rows, rope, scales = (None if x is None else x.reshape(tokens, 1, *x.shape[2:])
                        for x in (cache.pages, cache.rope, cache.token_scales))
  latent = cache.widths.latent

  def part(name: str, tokens: slice = slice(None), columns: slice | None = None) -> jax.Array:
    width = cache.width if name == "key" else latent
    first, end, _ = (columns or slice(0, width)).indices(width)
    assert rows is not None
    if scales is None:
      return rows[tokens, :, first:end].astype(dtype)
    found = []
    if first < latent:
      found.append(quantize.dequantize(rows[tokens, :, first:end], scales[tokens], dtype))
    if end > latent:
      assert rope is not None
      found.append(rope[tokens, :, max(first - latent, 0):end - latent].astype(dtype))
    return found[0] if len(found) == 1 else jnp.concatenate(found, -1)

  return part


def propagate_nan(cache: PagesLatent, finite: jax.Array) -> PagesLatent:
  """Applies `nonfinite.propagate_nan` to rows: the latents become 0, the rest of the key NaN.

  Args:
    cache: the pages.
    finite: bool [P, page_size], whether all numbers of a row are finite.
  """
  apart = cache.rope is not None
  column = jnp.arange(cache.pages.shape[-1])
  of_row = jnp.where(column < cache.widths.latent, 0, jnp.nan)
  hidden = jnp.zeros((), cache.pages.dtype) if apart else of_row.astype(cache.pages.dtype)
  cache = cache._replace(pages=jnp.where(finite[..., None], cache.pages, hidden))
  if not apart:
    return cache
  assert cache.rope is not None and cache.scales is not None
  missing = cache.scales.shape[1] - finite.shape[1]
  of_scales = jnp.pad(finite, ((0, 0), (0, missing)), constant_values=True)
  return cache._replace(rope=jnp.where(finite[..., None], cache.rope, jnp.nan),
                        scales=jnp.where(of_scales, cache.scales, 0))


def add(cache: PagesLatent, ids: jax.Array, key: jax.Array, value: jax.Array) -> PagesLatent:
  """Adds cotangents of keys [1, tokens, latent + rope] and of values [1, tokens, latent] to pages.

  Args:
    cache: pages of a floating-point dtype.
    ids: int32 [num_ids], the pages from which the tokens were read.
    key: those of keys.
    value: those of values.
  """
  rows = pad(cache.pages, key[0].at[:, :cache.widths.latent].add(value[0]))
  return cache._replace(pages=cache.pages.at[ids].add(
      rows.reshape(ids.shape[0], *cache.pages.shape[1:])))


def pad(held: Array, rows: jax.Array) -> jax.Array:
  """Pads rows [tokens, width] with zeros to the width of pages [P, page_size, padded]."""
  return jnp.pad(rows, ((0, 0), (0, held.shape[2] - rows.shape[1])))


def check_dtype(cache: PagesLatent, rows: jax.Array) -> None:
  """Raises ValueError if new rows have another dtype than pages that hold them as they are."""
  checks.require(cache.scales is not None or rows.dtype == cache.pages.dtype, "latents",
                 checks.describe(rows), f"the dtype of the pages, {cache.pages.dtype}")


def check(cache: PagesLatent) -> None:
  """Checks shapes and dtypes of a cache; ValueError as `validate.check`."""
  widths, x = cache.widths, cache.pages
  checks.require(isinstance(widths, LatentWidths), "cache_view.widths", repr(widths),
                 "a caches.latent_pages.LatentWidths, as caches.latent_pages.init makes")
  expected = "pages [P, page, latent + rope] of a PagesLatent, in 8 bits [P, page, latent]"
  checks.array("cache_view", x, expected)
  checks.require(x.ndim == 3 and 0 not in x.shape, "cache_view", checks.describe(x), expected)
  quantized = quantize.has_8_bits(x.dtype)
  checks.require(quantized or jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1,
                 "cache_view", f"pages of {x.dtype}",
                 "pages of a floating-point dtype, int8 or float8_e4m3fn")
  wanted = widths.latent if quantized else cache.width
  padded = padded_width(wanted)
  checks.require(x.shape[2] == wanted or x.shape[2] == padded and not quantized, "cache_view",
                 checks.describe(x), f"rows of {wanted} numbers: latent {widths.latent}" + (
                     ", and the rest in `rope`" if quantized else
                     f" + rope {widths.rope}, or padded to {padded}"))
  for name, last, kind in (("rope", (widths.rope,), "floating point of 16 bits or more"),
                           ("scales", (), "float32")):
    y, shape = getattr(cache, name), (*x.shape[:2], *last)
    if not quantized:
      checks.require(y is None, f"cache_view.{name}", "an array", f"None with pages of {x.dtype}")
      continue
    wanted_array = f"{kind} {list(shape)}: pages of {x.dtype} cannot be read without"
    checks.require(y is not None, f"cache_view.{name}", "None", wanted_array)
    checks.array(f"cache_view.{name}", y, wanted_array)
    fits = y.dtype == jnp.float32 if name == "scales" else (
        jnp.issubdtype(y.dtype, jnp.floating) and y.dtype.itemsize > 1)
    in_lanes = (*shape[:-1], padded_width(shape[-1]))
    wanted_array += "" if in_lanes == shape else f", or padded to {list(in_lanes)}"
    checks.require(fits and y.shape in (shape, in_lanes), f"cache_view.{name}", checks.describe(y),
                   wanted_array)
