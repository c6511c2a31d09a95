# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Normalizes the latent rows of a call: one key head, whose first numbers are the values.

Shapes use latent and rope for the widths of the two parts of a row, and nope for that of the
unrotated part of an up-projected key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.arguments.arguments import AttentionArguments
from attn_core.caches.latent import LatentCache
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.dispatch.latent import Widths
from attn_core.types import LatentOptions

CACHES = (LatentCache, PagesLatent)  # those of latent rows
ROWS = "latents (key)"  # name in errors: `latents` of the functions, `key` of `attention`
_WIDTHS = ("latent_width", "rope_width", "nope_width")


def expand(a: AttentionArguments, default_scale: float | None) -> AttentionArguments:
  """Returns the arguments with latent rows as keys of one head, and values without numbers.

  The softmax scale is filled in: it is that of the up-projected heads, (nope + rope)**-0.5.

  Args:
    a: the arguments; those without `latent_options` are returned as they are.
    default_scale: that of the metadata.

  Raises:
    ValueError: the options, rows or value are not as `LatentOptions` documents, or nothing says
      what the softmax scale is.
  """
  options = a.latent_options
  if options is None:
    checks.require(not isinstance(a.cache_view, CACHES), "latent_options",
                   f"None with a {type(a.cache_view).__name__}",
                   "LatentOptions(latent_width, rope_width)")
    return a
  _check_options(options)
  checks.require(a.value is None, "value", checks.describe(a.value),
                 "None with latent_options: the first numbers of a latent row are its value")
  checks.require(a.cache_view is None or isinstance(a.cache_view, CACHES), "cache_view",
                 type(a.cache_view).__name__,
                 "a LatentCache or PagesLatent with latent_options, or None")
  if a.softmax_scale is None and default_scale is None:
    a = a._replace(softmax_scale=_default_scale(options))
  if a.key is None:
    return a
  rows = checks.array(ROWS, a.key, _expected(a.layout))
  rank = getattr(checks.array("query", a.query, "an array"), "ndim") - 1
  checks.require(rows.ndim == rank, ROWS, checks.describe(rows),
                 f"{_expected(a.layout)}, one row for each token, of {rank} dimensions as the "
                 f"query {checks.describe(a.query)} has one more")
  checks.floating(ROWS, rows, rank, _expected(a.layout))
  keys: Any = jnp.expand_dims(jnp.asarray(rows), -3 if a.layout == "bhtd" else -2)
  return a._replace(key=keys, value=keys[..., :0])


def _expected(layout: str) -> str:
  return "float [total, latent + rope]" if layout == "thd" else "float [B, S, latent + rope]"


def _check_options(options: LatentOptions) -> None:
  checks.require(isinstance(options, LatentOptions), "latent_options", type(options).__name__,
                 "a LatentOptions or None")
  for name in _WIDTHS:
    width = getattr(options, name)
    if name != "nope_width" or width is not None:
      checks.integer(f"latent_options.{name}", width, "an int >= 1", lambda x: x >= 1)
  given = [x is not None for x in (options.key_up, options.value_up)]
  checks.require(given[0] == given[1], "latent_options.key_up and value_up",
                 "one of the two", "both, for queries of heads, or none, for absorbed queries")
  for name in ("key_up", "value_up"):
    x = getattr(options, name)
    if x is not None:
      shape = checks.floating(f"latent_options.{name}", x, 3, "[latent, H, width]").shape
      checks.require(shape[0] == options.latent_width and 0 not in shape,
                     f"latent_options.{name}", checks.describe(x),
                     f"float [{options.latent_width}, H, width], from latent_width numbers to the "
                     "heads")
  if options.key_up is not None and options.nope_width is not None:
    width = np.shape(options.key_up)[2]
    checks.require(options.nope_width == width, "latent_options.nope_width",
                   str(options.nope_width), f"{width}, the width of key_up, or None")


def _default_scale(options: LatentOptions) -> float:
  nope = options.nope_width if options.key_up is None else np.shape(options.key_up)[2]
  if nope is None:
    raise ValueError(
        "softmax_scale: got None for absorbed queries; expected softmax_scale, or "
        "latent_options.nope_width: the scale is (nope_width + rope_width)**-0.5, that of the "
        "up-projected heads, which the width of absorbed queries does not tell")
  return float((nope + options.rope_width) ** -0.5)


def check(query: jax.Array, key: jax.Array, value: jax.Array, a: AttentionArguments, *,
          quantized: bool) -> None:
  """Checks shapes and dtypes in layout bthd.

  Args:
    query: [B, T, H, latent + rope], or with up-projections [B, T, H, nope + rope].
    key: [B, S, 1, latent + rope], or the latents alone.
    value: [B, S, 1, rope] where the key is the latents alone, else [B, S, 1, 0].
    a: the caller's arguments.
    quantized: whether the key may have any dtype.

  Raises:
    ValueError: any disagreement.
  """
  options, mixed = a.latent_options, a.compute_dtype is not None
  assert options is not None
  held = a.cache_view.widths if isinstance(a.cache_view, LatentCache) else None  # of padded rows
  checks.floating("query", query, 4, "[B, T, H, width]")
  batch = query.shape[0]
  of_row = options.latent_width + options.rope_width
  sum_of = f"latent_width {options.latent_width} + rope_width {options.rope_width}"
  apart, width = value.shape[3], key.shape[3] + value.shape[3]
  if held is not None:
    apart, width = apart and held.rope, held.latent + held.rope
    checks.require(held.latent == options.latent_width, "latent_options.latent_width",
                   str(options.latent_width), f"{held.latent}, that of the cache")
  checks.require(width == of_row, ROWS, f"latent rows of {width} numbers", f"{of_row} = {sum_of}")
  checks.require(apart in (0, options.rope_width), "latent_options.rope_width",
                 str(options.rope_width), f"{apart}, that of the rotary part of the cache")
  checks.require(key.shape[0] == batch, ROWS, checks.describe(key[:, :, 0]),
                 f"[{batch}, S, {of_row}], B of the query {checks.describe(query)}")
  checks.require(quantized or mixed or key.dtype == query.dtype, ROWS, checks.describe(key),
                 f"the query's dtype {query.dtype}; pass compute_dtype to compute in one dtype, or "
                 "cast one of them (a cache has that of its init)")
  check_query(query, options, mixed=mixed)


def check_query(query: checks.Array, options: LatentOptions, *, mixed: bool) -> None:
  """Checks queries and up-projections.

  Args:
    query: [B, T, H, width], or over pages [T, H, width].
    options: the caller's.
    mixed: whether up-projections may have any floating-point dtype.

  Raises:
    ValueError: any disagreement.
  """
  *_, heads, width = query.shape
  tokens = "B, T" if query.ndim == 4 else "T"
  of_row = options.latent_width + options.rope_width
  if options.key_up is None:
    checks.require(
        heads > 0 and width == of_row, "query", checks.describe(query),
        f"[{tokens}, H, {of_row}], absorbed queries of latent_width {options.latent_width} + "
        f"rope_width {options.rope_width} numbers; queries of heads need latent_options.key_up and "
        "value_up")
    return
  nope = options.key_up.shape[2]
  checks.require(width == nope + options.rope_width, "query", checks.describe(query),
                 f"[{tokens}, H, {nope + options.rope_width}], nope {nope} of key_up + rope_width "
                 f"{options.rope_width}")
  for name in ("key_up", "value_up"):
    x = getattr(options, name)
    checks.require(x.shape[1] == heads, f"latent_options.{name}", checks.describe(x),
                   f"[{options.latent_width}, {heads}, width], with the heads of the query "
                   f"{checks.describe(query)}")
    checks.require(mixed or x.dtype == query.dtype, f"latent_options.{name}", checks.describe(x),
                   f"the query's dtype {query.dtype}, or compute_dtype")


def up_projections(options: LatentOptions | None, dtype: np.dtype) -> tuple[jax.Array, ...]:
  """Returns (key_up, value_up) in the dtype of the products, or () for absorbed queries."""
  if options is None or options.key_up is None or options.value_up is None:
    return ()
  return jnp.asarray(options.key_up).astype(dtype), jnp.asarray(options.value_up).astype(dtype)


def widths_of(options: LatentOptions | None) -> Widths | None:
  """Returns the widths of a call with latent rows; None: it has none."""
  if options is None:
    return None
  if options.key_up is None or options.value_up is None:
    return Widths(options.latent_width, options.rope_width)
  return Widths(options.latent_width, options.rope_width, np.shape(options.key_up)[2],
                np.shape(options.value_up)[2])
