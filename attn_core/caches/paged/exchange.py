# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the pages of other servers as pages of this library, and back.

Layouts, P pages of the pool, K key heads, D their width, `packing` numbers in 32 bits (4 of 8 bits,
2 of 16, 1 of 32):

* "jax_v1", of `jax.experimental.pallas.ops.tpu.paged_attention`: keys and values [K, P, page_size,
  D]. The same bytes as `PagesV1`.
* "ragged", of `jax.experimental.pallas.ops.tpu.ragged_paged_attention` and of v2 in tpu-inference:
  [P, page_size, 2K, D], the key and the value of a head in rows that follow each other. The same
  bytes as `PagesV2`.
* "v3", of tpu-inference: [P, page_size, cdiv(2K, packing), packing, D rounded up to a multiple of
  128]. The same bytes as `PagesV3`.
* "v3_64", of tpu-inference's kernel for a width of 64: [P, page_size, cdiv(K, packing), packing,
  128], where the row of a head is its key and then its value. A permutation of `PagesV3`, which
  pads each of the two to a row of 128.

The first three are views: nothing is computed or copied. The last one is moved, under `jax.jit` in
one pass over the pages. Rows and columns that only pad a layout are written as 0 and not read.

>>> import jax.numpy as jnp
>>> from attn_core.caches import exchange, pages
>>> theirs = jnp.ones((4, 16, 1, 2, 128), jnp.bfloat16)  # two key heads of width 64
>>> cache = exchange.from_other("v3_64", theirs, pages.Heads(2, 64, 64))
>>> cache.pages.shape
(4, 16, 2, 2, 128)
>>> exchange.to_other("v3_64", cache, pages.Heads(2, 64, 64)).shape
(4, 16, 1, 2, 128)
"""

from typing import Callable, cast

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.caches import quantize
from attn_core.caches.paged import latent_layout
from attn_core.caches.paged.layouts import (
    LANES, Array, Heads, Pages, PagesV1, PagesV2, PagesV3, packing)
from attn_core.caches.paged.pool import checked_heads
from attn_core.types import cdiv

HALF = LANES // 2  # the width of "v3_64"

# Layout -> the type of pages with the same bytes, or into which they are moved.
LAYOUTS: dict[str, type[Pages]] = {
    "jax_v1": PagesV1, "ragged": PagesV2, "v3": PagesV3, "v3_64": PagesV3}


def from_other(layout: str, arrays: Array | tuple[Array, Array], heads: tuple[int, ...],
               scales: tuple[Array, Array] | None = None) -> Pages:
  """Returns pages of this library with the keys and values of another server's.

  Args:
    layout: "jax_v1", "ragged", "v3" or "v3_64".
    arrays: the pages in that layout; for "jax_v1" a pair (keys, values).
    heads: the key heads and their width, without padding, as in `pages.init`; keys and values have
      the same.
    scales: float32 [] of keys and of values, with pages of 8 bits; the other servers keep these
      numbers outside of the pages.

  Returns:
    A `PagesV1`, `PagesV2` or `PagesV3`, see `LAYOUTS`.

  Raises:
    ValueError: an unknown layout, widths that differ or are not 64 in "v3_64", arrays of another
      shape, or scales that are missing or given for pages that are not of 8 bits.
  """
  heads = checked_heads(heads)
  parts = cast(tuple[Array, ...], arrays if layout == "jax_v1" else (arrays,))
  checks.require(layout != "jax_v1" or isinstance(arrays, tuple) and len(arrays) == 2, "arrays",
                 type(arrays).__name__, "a pair (keys, values) in layout 'jax_v1'")
  for x in parts:
    checks.array("arrays", x, f"pages in layout {layout!r}")
    checks.require(0 not in x.shape and len(x.shape) > 3 and x.dtype == parts[0].dtype
                   and x.shape == parts[0].shape, "arrays", checks.describe(x),
                   f"pages in layout {layout!r}")
  _check(layout, parts[0], heads)
  quantized = quantize.has_8_bits(parts[0].dtype)
  checks.require(quantized == (scales is not None), "scales",
                 "None" if scales is None else "arrays", "float32 [] of keys and of values with "
                 f"pages of 8 bits, None with others; these are {checks.describe(parts[0])}")
  checks.require(scales is None or isinstance(scales, tuple)
                 and [np.shape(x) for x in scales] == [(), ()], "scales", repr(scales),
                 "(float32 [] of keys, float32 [] of values)")
  of_all = (None, None) if scales is None else tuple(jnp.asarray(x, jnp.float32) for x in scales)
  if layout == "v3_64":
    parts = (_in_two_rows(parts[0], heads),)
  make: Callable[..., Pages] = LAYOUTS[layout]
  return make(*parts, *of_all)


def to_other(layout: str, cache: Pages, heads: tuple[int, ...]) -> Array | tuple[Array, Array]:
  """Returns the arrays of pages in another server's layout: the inverse of `from_other`.

  Args:
    layout: as for `from_other`.
    cache: of the type in `LAYOUTS`; `pages.convert` makes it of another. A scale for each token is
      not part of any of these layouts, and one scale for all is kept outside of the pages.
    heads: as for `from_other`.

  Returns:
    The pages; for "jax_v1" a pair (keys, values).

  Raises:
    ValueError: an unknown layout, pages of another type or with other heads, or with a scale for
      each token.
  """
  heads = checked_heads(heads)
  checks.one_of("layout", layout, tuple(LAYOUTS))
  checks.require(isinstance(cache, LAYOUTS[layout]), "cache", type(cache).__name__,
                 f"a {LAYOUTS[layout].__name__} for layout {layout!r}; pages.convert makes one")
  checks.require(cache.key_scales is None or cache.key_scales.ndim == 0, "cache.key_scales",
                 checks.describe(cache.key_scales), "no scale for each token, which other servers "
                 "do not read")
  if isinstance(cache, PagesV1):
    for x in (cache.key_pages, cache.value_pages):
      _check(layout, x, heads)
    return cache.key_pages, cache.value_pages
  if isinstance(cache, PagesV2):
    checks.require(cache.widths is None, "cache.widths", repr(cache.widths),
                   "None: values as wide as keys")
  if layout == "v3_64":
    _check("v3", cache.pages, heads)
    _check_heads(layout, heads)
    return _in_one_row(cache.pages, heads)
  _check(layout, cache.pages, heads)
  return cache.pages


def _check_heads(layout: str, heads: Heads) -> None:
  """Checks that a layout can hold keys and values of these widths."""
  checks.one_of("layout", layout, tuple(LAYOUTS))
  width, value_width = heads[1:]
  expected = f"values as wide as keys in layout {layout!r}"
  checks.require(width == value_width and (layout != "v3_64" or width == HALF), "heads", heads,
                 expected + (f", {HALF}" if layout == "v3_64" else ""))


def _check(layout: str, pages: Array, heads: Heads) -> None:
  """Checks the shape of pages against the heads that they are said to hold."""
  _check_heads(layout, heads)
  number, width, _ = heads
  if layout == "jax_v1":
    want: tuple[int, ...] = (number, *pages.shape[1:3], width)
  elif layout == "ragged":
    want = (*pages.shape[:2], 2 * number, width)
  else:
    packed = packing(pages.dtype)
    rows = number if layout == "v3_64" else 2 * number
    want = (*pages.shape[:2], cdiv(rows, packed), packed, latent_layout.padded_width(width))
  checks.require(pages.shape == want, "arrays", checks.describe(pages),
                 f"{list(want)}, {heads} in layout {layout!r}")


def _in_two_rows(theirs: Array, heads: Heads) -> jax.Array:
  """Returns the pages of a `PagesV3` of those in layout "v3_64"."""
  pool, size, words, packed, _ = theirs.shape
  rows = theirs.reshape(pool, size, words * packed, 2, HALF)[:, :, :heads.key_heads]
  more = -2 * heads.key_heads % packed
  rows = rows.reshape(pool, size, 2 * heads.key_heads, HALF)
  rows = jnp.pad(rows, ((0, 0), (0, 0), (0, more), (0, LANES - HALF)))
  return rows.reshape(pool, size, -1, packed, LANES)


def _in_one_row(ours: Array, heads: Heads) -> jax.Array:
  """Returns the pages in layout "v3_64" of those of a `PagesV3`."""
  pool, size, words, packed, _ = ours.shape
  rows = ours.reshape(pool, size, words * packed, LANES)[:, :, :2 * heads.key_heads, :HALF]
  rows = rows.reshape(pool, size, heads.key_heads, LANES)
  rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -heads.key_heads % packed), (0, 0)))
  return rows.reshape(pool, size, -1, packed, LANES)
