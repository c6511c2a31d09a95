"""Rotary position embeddings: tables of cosines and sines, and the rotation.

Letters: B batch, T length, H heads (of query or key), D a head's width, R rotated width.
"""

import jax.numpy as jnp

from attn_core import checks
from attn_core.rope.frequencies import (BY_LENGTH, Rope, attention_factor, check_rope, inverse_frequencies, position_axes)
from attn_core.types import LAYOUTS


def rotary_table(rope: Rope, positions, head_dim: int, length=None):
  """Cosine and sine of every position's angles, at any position: nothing is tabulated beforehand.

    angle[t, i] = position[t] * frequency[i],   i = 0 .. R / 2 - 1

  Args:
    rope: which embedding.
    positions: int [..., T] (tokens); with `rope.mrope_section` [3, ..., T] for time, height and
      width, or [B, T] or [T] where the three are the same.
    head_dim: D.
    length: length of the sequence by which types "dynamic" and "longrope" choose their
      frequencies, an int or int32 scalar (tokens); None: one more than the largest position.

  Returns:
    (cosine, sine), float32 [..., T, R / 2], times the embedding's attention factor.

  Raises:
    ValueError: positions that are no integers, none of them where their largest is the length, or
      as `inverse_frequencies`.
  """
  check_rope(rope)
  checks.array("positions", positions, "int [..., T]")
  checks.require(jnp.issubdtype(positions.dtype, jnp.integer) and positions.ndim >= 1, "positions",
                 checks.describe(positions), "int [..., T] (tokens)")
  positions = jnp.asarray(positions)
  if length is None and rope.rope_type in BY_LENGTH:
    checks.require(positions.size > 0, "positions", checks.describe(positions), "at least one, "
                   f"since rope_type={rope.rope_type!r} goes by the largest; or a `length`")
    length = jnp.max(positions) + 1
  frequencies = jnp.asarray(inverse_frequencies(rope, head_dim, length))
  axes = position_axes(rope, head_dim)
  if axes is None or positions.ndim < 3:
    positions = positions[..., None]
  else:
    checks.require(positions.ndim == 3 and positions.shape[0] == 3, "positions",
                   checks.describe(positions), "[3, B, T], or [B, T] where time, height and width "
                   "are the same")
    positions = jnp.moveaxis(positions[axes], 0, -1)
  angles = positions.astype(jnp.float32) * frequencies
  factor = attention_factor(rope)
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rotary(x, cosine, sine, interleaved: bool = False, layout: str = "bthd"):
  """Turns every pair (a, b) of a head's first R dimensions by its angle.

    (a, b) -> (a cos - b sin, b cos + a sin)

  Su et al., RoFormer, https://arxiv.org/abs/2104.09864.

  Args:
    x: float [B, T, H, D] in layout bthd, [B, H, T, D] in bhtd, [T, H, D] in thd.
    cosine: float [B or 1, T, R / 2] or [T, R / 2], as `rotary_table` gives; in layout thd
      [T, R / 2].
    sine: the same.
    interleaved: the pairs are neighbours (0, 1), (2, 3), ...; False: (i, R / 2 + i).
    layout: one of LAYOUTS.

  Returns:
    As x, in its dtype; computed in float32, or x's dtype where that is wider.

  Raises:
    ValueError: ranks, widths or layouts that do not fit.
  """
  checks.one_of("layout", layout, LAYOUTS)
  checks.floating("x", x, 3 if layout == "thd" else 4, f"a query or key in layout {layout!r}")
  _check_tables(x, cosine, sine, layout)
  heads = 1 if layout == "bhtd" else x.ndim - 2  # cosine and sine have no axis of heads
  from_right = x.ndim - heads
  cosine, sine = (jnp.expand_dims(table, -from_right if table.ndim >= from_right else 0)
                  for table in (cosine, sine))
  width = 2 * cosine.shape[-1]
  rotated = _rotate(x[..., :width], cosine, sine, interleaved)
  return jnp.concatenate([rotated, x[..., width:]], -1) if width < x.shape[-1] else rotated


def rotary(query, key, positions, rope: Rope, layout: str = "bthd", key_positions=None):
  """Query and key turned to their positions.

  Args:
    query: float [B, T, H, D] in layout bthd, [B, H, T, D] in bhtd, [T, H, D] in thd.
    key: the same, with its own number of heads.
    positions: int [B or 1, T] or [T] of the queries (tokens), in layout thd [T]; with
      `rope.mrope_section` [3, B or 1, T] too.
    rope: which embedding; one of type "none" returns both as they are.
    layout: one of LAYOUTS.
    key_positions: the same of the keys, where they are not the queries' own; None: those of the
      queries.

  Returns:
    (query, key), as they came in shape and dtype.

  Raises:
    ValueError: another number of positions than of queries or keys, widths that differ, or as
      `rotary_table` and `apply_rotary`.
  """
  check_rope(rope)
  checks.one_of("layout", layout, LAYOUTS)
  for name, x in (("query", query), ("key", key)):
    checks.array(name, x, f"a {name} in layout {layout!r}")
  checks.require(query.shape[-1] == key.shape[-1], "key", checks.describe(key),
                 f"the width of the query, {checks.describe(query)}")
  _check_positions("positions", positions, "query", query, layout)
  _check_positions("positions" if key_positions is None else "key_positions",
                   positions if key_positions is None else key_positions, "key", key, layout)
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


def apply_complex_rotary(xq, xk, freqs_cis):
  """Turns neighbours, as real and imaginary part of one number, by complex numbers.

    (a + bi) * freqs_cis

  Args:
    xq: float [..., T, H, D].
    xk: float [..., T, K, D].
    freqs_cis: complex [..., T, 1, D / 2]: `jax.lax.complex(cosine, sine)[..., None, :]`.

  Returns:
    (xq, xk) turned, in their own dtypes; computed in float32 or wider.

  Raises:
    ValueError: `freqs_cis` is not complex, its width is not half of the others', or its other
      dimensions are not theirs or 1.
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
                   f"dimensions of {name} {checks.describe(x)}, any of them may be 1 or absent")
  return tuple(_rotate(x, freqs_cis.real, freqs_cis.imag, True) for x in (xq, xk))


def _check_positions(name: str, positions, of: str, x, layout: str) -> None:
  """One position for every query, or key."""
  checks.array(name, positions, "int [..., T]")
  checks.require(x.ndim == len(layout), of, checks.describe(x), f"a {of} in layout {layout!r}")
  length = x.shape[layout.index("t")]
  checks.require(positions.ndim >= 1 and positions.shape[-1] == length, name,
                 checks.describe(positions), f"int [..., {length}], one for each {of} of "
                 f"{checks.describe(x)} in layout {layout!r}; `key_positions` are those of keys "
                 "that do not stand where the queries do")


def _check_tables(x, cosine, sine, layout: str) -> None:
  """Cosine and sine have a row for every position of x: none is repeated in silence."""
  length, width = x.shape[layout.index("t")], x.shape[-1]
  expected = f"float [T, R / 2] with T = {length} positions and R at most the width {width}"
  if layout != "thd":
    expected += f", or [B or 1, T, R / 2] with B = {x.shape[0]}"
  for name, table in (("cosine", cosine), ("sine", sine)):
    checks.array(name, table, expected)
    checks.require(
        jnp.issubdtype(table.dtype, jnp.floating) and 2 <= table.ndim < x.ndim
        and table.shape[-2] == length and 2 * table.shape[-1] <= width
        and (table.ndim == 2 or table.shape[0] in (1, x.shape[0])),
        name, checks.describe(table), expected)
  checks.require(cosine.shape == sine.shape, "sine", checks.describe(sine),
                 f"the shape of the cosine, {checks.describe(cosine)}")


def _rotate(x, cosine, sine, interleaved: bool):
  """x with all its pairs turned."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  pairs = x.astype(wide)
  if interleaved:
    pairs = pairs.reshape(*x.shape[:-1], -1, 2)
    first, second, axis = pairs[..., 0], pairs[..., 1], -1
  else:
    first, second = jnp.split(pairs, 2, -1)
    axis = -2
  turned = jnp.stack([first * cosine - second * sine, second * cosine + first * sine], axis)
  return turned.reshape(x.shape).astype(x.dtype)
