# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings: tables of cosines and sines, and the rotation.

`rotary_dim` is the number of rotated dimensions of a head: even, and at most the head's width D.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.rope.frequencies import (BY_LENGTH, Rope, attention_factor, check_rope,
                                        inverse_frequencies, position_axes)
from attn_core.types import ARRAY_LAYOUTS, ArrayLayout, at_least_float32

Array = jax.Array | np.ndarray


def rotary_table(
    rope: Rope, positions: Array, head_dim: int,
    length: int | jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Computes cosine and sine of the angles at any positions.

    angle[t, i] = position[t] * frequency[i],   i = 0 .. rotary_dim / 2 - 1

  Args:
    rope: the rotary embedding.
    positions: int [..., T] (tokens); with `rope.mrope_section` [3, B, T] for time, height and
      width, or [B, T] or [T] if the three are the same.
    head_dim: D.
    length: length of the sequence, which selects the frequencies of types "dynamic" and "longrope",
      an int or int32 scalar (tokens); None: one more than the largest position.

  Returns:
    (cosine, sine), float32 [..., T, rotary_dim / 2], times the embedding's attention factor.

  Raises:
    ValueError: `positions` is not an array of integers, is empty although the type needs the
      largest position, or has the wrong shape for `rope.mrope_section`; or as
      `inverse_frequencies`.
  """
  check_rope(rope)
  positions = jnp.asarray(checks.int32("positions", positions, "int [..., T] (tokens)"))
  checks.require(positions.ndim >= 1, "positions", checks.describe(positions),
                 "int [..., T] (tokens)")
  if length is None and rope.rope_type in BY_LENGTH:
    checks.require(positions.size > 0, "positions", checks.describe(positions), "at least one, "
                   f"since rope_type={rope.rope_type!r} depends on the largest; or pass `length`")
    length = jnp.max(positions) + 1
  frequencies = jnp.asarray(inverse_frequencies(rope, head_dim, length))
  axes = position_axes(rope, head_dim)
  if axes is None or positions.ndim < 3:
    positions = positions[..., None]
  else:
    checks.require(positions.ndim == 3 and positions.shape[0] == 3, "positions",
                   checks.describe(positions), "[3, B, T], or [B, T] if time, height and width are "
                   "the same")
    positions = jnp.moveaxis(positions[axes], 0, -1)
  angles = positions.astype(jnp.float32) * frequencies
  factor = attention_factor(rope)
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rotary(x: Array, cosine: Array, sine: Array, interleaved: bool = False,
                 layout: ArrayLayout = "bthd") -> jax.Array:
  """Rotates every pair (a, b) of a head's first `rotary_dim` dimensions by its angle.

    (a, b) -> (a cos - b sin, b cos + a sin)

  Su et al., RoFormer, https://arxiv.org/abs/2104.09864.

  Args:
    x: float [B, T, H, D] in layout bthd, [B, H, T, D] in bhtd, [T, H, D] in thd.
    cosine: float [B or 1, T, rotary_dim / 2] or [T, rotary_dim / 2], from `rotary_table`; in layout
      thd [T, rotary_dim / 2].
    sine: the same.
    interleaved: whether pairs are neighbors (0, 1), (2, 3), ...; False: (i, rotary_dim / 2 + i).
    layout: one of ARRAY_LAYOUTS.

  Returns:
    The rotated `x`, in its shape and dtype; computed in float32, or in the dtype of `x` if wider.

  Raises:
    ValueError: `layout` is unknown, `x` is not a floating-point array of the layout's rank, or
      cosine and sine are not floating-point arrays of one of the shapes above.
  """
  checks.one_of("layout", layout, ARRAY_LAYOUTS)
  checks.floating("x", x, 3 if layout == "thd" else 4, f"a query or key in layout {layout!r}")
  _check_tables(x, cosine, sine, layout)
  heads = 1 if layout == "bhtd" else x.ndim - 2  # dimension of heads, which the tables lack
  from_right = x.ndim - heads
  cosine, sine = (jnp.expand_dims(table, -from_right if table.ndim >= from_right else 0)
                  for table in (cosine, sine))
  width = 2 * cosine.shape[-1]
  rotated = _rotate(x[..., :width], cosine, sine, interleaved)
  return jnp.concatenate([rotated, x[..., width:]], -1) if width < x.shape[-1] else rotated


def rotary(query: Array, key: Array, positions: Array, rope: Rope, layout: ArrayLayout = "bthd",
           key_positions: Array | None = None) -> tuple[Array, Array]:
  """Rotates query and key by their positions, so that logits depend on position differences.

  Example:
    >>> import jax.numpy as jnp
    >>> from attn_core import Rope, rotary
    >>> x = jnp.ones((1, 4, 1, 8))
    >>> query, key = rotary(x, x, jnp.arange(4), Rope())
    >>> logits = jnp.einsum("bthd,bshd->ts", query, key)
    >>> bool(jnp.allclose(logits[1, 0], logits[3, 2], atol=1e-5))
    True

  Args:
    query: float [B, T, H, D] in layout bthd, [B, H, T, D] in bhtd, [T, H, D] in thd.
    key: the same, with K heads and possibly another length.
    positions: int [B or 1, T] or [T] of the queries (tokens), in layout thd [T]; with
      `rope.mrope_section` also [3, B or 1, T].
    rope: the rotary embedding; type "none" returns query and key unchanged.
    layout: one of ARRAY_LAYOUTS.
    key_positions: positions of the keys, in the same shapes; None: those of the queries.

  Returns:
    (query, key), in their shapes and dtypes.

  Raises:
    ValueError: the number of positions is not that of queries or keys, query and key differ in
      width, or as `rotary_table` and `apply_rotary`.
  """
  check_rope(rope)
  checks.one_of("layout", layout, ARRAY_LAYOUTS)
  for name, x in (("query", query), ("key", key)):
    checks.array(name, x, f"a {name} in layout {layout!r}")
  checks.require(query.shape[-1] == key.shape[-1], "key", checks.describe(key),
                 f"the width of the query, {checks.describe(query)}")
  positions = _checked_positions("positions", positions, "query", query, layout)
  if key_positions is None:
    _checked_positions("positions", positions, "key", key, layout)
  else:
    key_positions = _checked_positions("key_positions", key_positions, "key", key, layout)
  if rope.rope_type == "none":
    return query, key
  length = None
  if key_positions is not None and rope.rope_type in BY_LENGTH:
    length = jnp.maximum(jnp.max(positions), jnp.max(key_positions)) + 1
  table = rotary_table(rope, positions, query.shape[-1], length)
  key_table = table if key_positions is None else rotary_table(
      rope, key_positions, query.shape[-1], length)
  return (apply_rotary(query, *table, rope.interleaved, layout),
          apply_rotary(key, *key_table, rope.interleaved, layout))


def apply_complex_rotary(
    xq: Array, xk: Array, freqs_cis: Array) -> tuple[jax.Array, jax.Array]:
  """Multiplies neighboring dimensions, as real and imaginary part, by complex numbers.

    (a + bi) * freqs_cis

  Args:
    xq: float [..., T, H, D].
    xk: float [..., T, K, D].
    freqs_cis: complex [..., T, 1, D / 2]: `jax.lax.complex(cosine, sine)[..., None, :]`.

  Returns:
    The rotated (xq, xk), in their dtypes; computed in float32 or wider.

  Raises:
    ValueError: xq or xk is not a floating-point array of even width, or `freqs_cis` is not complex,
      its width is not half of theirs, or another dimension is neither theirs nor 1.
  """
  for name, x in (("xq", xq), ("xk", xk)):
    checks.array(name, x, "float [..., T, heads, D]")
    checks.require(jnp.issubdtype(x.dtype, jnp.floating) and x.shape[-1] % 2 == 0, name,
                   checks.describe(x), "float [..., T, heads, D] with D even")
    checks.require(jnp.iscomplexobj(freqs_cis) and freqs_cis.shape[-1] * 2 == x.shape[-1],
                   "freqs_cis", checks.describe(freqs_cis),
                   f"complex [..., T, 1, {x.shape[-1] // 2}], half the width of {name}")
    leading = (1,) * (x.ndim - freqs_cis.ndim) + freqs_cis.shape[:-1]
    checks.require(len(leading) == x.ndim - 1 and all(
        n in (1, full) for n, full in zip(leading, x.shape)), "freqs_cis",
                   checks.describe(freqs_cis), "complex [..., T, 1, D / 2] with the leading "
                   f"dimensions of {name} {checks.describe(x)}, each of which may be 1 or missing")
  real, imaginary = freqs_cis.real, freqs_cis.imag
  return _rotate(xq, real, imaginary, True), _rotate(xk, real, imaginary, True)


def _checked_positions(
    name: str, positions: Array, of: str, x: Array, layout: ArrayLayout) -> Array:
  """Returns positions as int32, one for every query, or key."""
  positions = checks.int32(name, positions, "int [..., T]")
  checks.require(x.ndim == len(layout), of, checks.describe(x), f"a {of} in layout {layout!r}")
  length = x.shape[layout.index("t")]
  checks.require(positions.ndim >= 1 and positions.shape[-1] == length, name,
                 checks.describe(positions), f"int [..., {length}], one for each {of} of "
                 f"{checks.describe(x)} in layout {layout!r}; pass `key_positions` for keys whose "
                 "positions are not those of the queries")
  return positions


def _check_tables(x: Array, cosine: Array, sine: Array, layout: ArrayLayout) -> None:
  """Checks that cosine and sine have a row for every position of x, without broadcasting."""
  length, width = x.shape[layout.index("t")], x.shape[-1]
  expected = (f"float [T, rotary_dim / 2] with T = {length} positions and rotary_dim at most the "
              f"width {width}")
  if layout != "thd":
    expected += f", or [B or 1, T, rotary_dim / 2] with B = {x.shape[0]}"
  for name, table in (("cosine", cosine), ("sine", sine)):
    checks.array(name, table, expected)
    checks.require(
        jnp.issubdtype(table.dtype, jnp.floating) and 2 <= table.ndim < x.ndim
        and table.shape[-2] == length and 2 * table.shape[-1] <= width
        and (table.ndim == 2 or table.shape[0] in (1, x.shape[0])),
        name, checks.describe(table), expected)
  checks.require(cosine.shape == sine.shape, "sine", checks.describe(sine),
                 f"the shape of the cosine, {checks.describe(cosine)}")


def _rotate(x: Array, cosine: Array, sine: Array, interleaved: bool) -> jax.Array:
  """Rotates all pairs of dimensions of x."""
  wide = at_least_float32(x.dtype)
  pairs = x.astype(wide)
  if interleaved:
    pairs = pairs.reshape(*x.shape[:-1], -1, 2)
    first, second, axis = pairs[..., 0], pairs[..., 1], -1
  else:
    first, second = jnp.split(pairs, 2, -1)
    axis = -2
  rotated = jnp.stack([first * cosine - second * sine, second * cosine + first * sine], axis)
  return rotated.reshape(x.shape).astype(x.dtype)
