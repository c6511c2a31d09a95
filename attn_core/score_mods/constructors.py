# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The functions that make score mods; they are public as `attn_core.score_mods`.

In the examples scores [B, H, T, S] are zeros, of 3 queries and 3 keys.
"""

from typing import Callable

import jax
from jax.typing import ArrayLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.masks import mask as mask_lib
from attn_core.masks.mask import Array
from attn_core.score_mods import evaluate, functions, leaves
from attn_core.score_mods.score_mod import ScoreMod
from attn_core.types import MaskOperands, at_least_float32


def alibi(slopes: ArrayLike, *, symmetric: bool = False) -> ScoreMod:
  """score + slope * (key position - query position), one slope per head.

  Press et al., Train Short, Test Long: Attention with Linear Biases Enables Input Length
  Extrapolation, https://arxiv.org/abs/2108.12409.

  >>> from attn_core import score_mods
  >>> mod = score_mods.alibi(np.array([0.5], np.float32))
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[ 0.   0.5  1. ]
   [-0.5  0.   0.5]
   [-1.  -0.5  0. ]]

  Args:
    slopes: float [H] or [B or 1, H], such as `alibi_slopes(H)`; differentiable.
    symmetric: True: score - slope * abs(key position - query position), for keys on both sides.

  Raises:
    ValueError: `slopes` has another rank or dtype; in a call, other heads or rows than it.
  """
  return leaves.Alibi(bool(symmetric), _floats("alibi: slopes", slopes, (1, 2),
                                               "[H] or [B or 1, H], as alibi_slopes(H) is,"))


def alibi_slopes(heads: int) -> np.ndarray:
  """Returns the slopes of ALiBi's paper, float32 [H].

  For a power of two, 2**(-8 * n / H) for n from 1 to H; for other numbers, those of the power of
  two below, and then every second one of the power of two above.

  >>> from attn_core import score_mods
  >>> print(score_mods.alibi_slopes(3))
  [0.0625     0.00390625 0.25      ]

  Raises:
    ValueError: `heads` is not an int >= 1.
  """
  checks.integer("alibi_slopes: heads", heads, "an int >= 1", lambda x: x >= 1)
  of_power = lambda n: 2.0 ** (-8 * np.arange(1, n + 1) / n)
  below = 1 << (heads.bit_length() - 1)
  return np.concatenate([of_power(below), of_power(2 * below)[::2]])[:heads].astype(np.float32)


def relative(table: ArrayLike, *, max_distance: int = 128, bidirectional: bool = True) -> ScoreMod:
  """score + table[bucket of key position - query position, head], as in T5.

  Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer,
  https://arxiv.org/abs/1910.10683.

  >>> from attn_core import score_mods
  >>> mod = score_mods.relative(np.arange(8, dtype=np.float32)[:, None])
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[0. 5. 6.]
   [1. 0. 5.]
   [2. 1. 0.]]

  Args:
    table: float [num_buckets, H or 1], the learned biases; differentiable.
    max_distance: the distance from which on keys share the last bucket (tokens).
    bidirectional: True: half of the buckets are for keys after the query (encoders); False: such
      keys share the bucket of distance 0 (decoders).

  Raises:
    ValueError: `table` has another rank or dtype, or too few buckets for `max_distance`; in a call,
      other heads than it.
  """
  array = _floats("relative: table", table, (2,), "[num_buckets, H or 1]")
  parts = 2 if bidirectional else 1
  checks.integer("relative: max_distance", max_distance, "an int above a fourth of the buckets "
                 "(bidirectional) or half of them (tokens)",
                 lambda x: x > array.shape[0] // (2 * parts))
  checks.require(array.shape[0] >= 2 * parts and array.shape[0] % parts == 0, "relative: table",
                 checks.describe(array), f"at least {2 * parts} buckets"
                 + (", an even number of them" if bidirectional else ""))
  return leaves.Relative(int(max_distance), bool(bidirectional), array)


def by_distance(table: ArrayLike, first: int | None = None) -> ScoreMod:
  """score + table[key position - query position - first, head], clipped to the ends of the table.

  Shaw et al., Self-Attention with Relative Position Representations,
  https://arxiv.org/abs/1803.02155; Swin's table of one axis.

  >>> from attn_core import score_mods
  >>> mod = score_mods.by_distance(np.array([[1], [2], [3]], np.float32))
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[2. 3. 3.]
   [1. 2. 3.]
   [1. 1. 2.]]

  Args:
    table: float [n, H or 1], the learned bias of each distance; differentiable.
    first: the distance of the first row of the table; None: -(n // 2), so that the middle of an odd
      number of rows is the query itself. A causal table of n distances has first = 1 - n.

  Raises:
    ValueError: `table` has another rank or dtype, or `first` is not an int; in a call, other heads
      than it.
  """
  array = _floats("by_distance: table", table, (2,), "[n, H or 1]")
  first = -(array.shape[0] // 2) if first is None else checks.integer(
      "by_distance: first", first, "an int (tokens), or None", lambda x: abs(x) < 2**30)
  return leaves.ByDistance(first, array)


def grid(table: ArrayLike, shape: tuple[int, int]) -> ScoreMod:
  """score + table[distance of two tokens by rows and columns of a grid, head], as in Swin.

  The token at position p lies in row p // width and column p % width. Row i * (2 * width - 1) + j
  of the table is for i - (height - 1) rows and j - (width - 1) columns from the key to the query.
  Liu et al., Swin Transformer, https://arxiv.org/abs/2103.14030.

  >>> from attn_core import score_mods
  >>> mod = score_mods.grid(np.arange(5, dtype=np.float32)[:, None], (1, 3))
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[2. 1. 0.]
   [3. 2. 1.]
   [4. 3. 2.]]

  Args:
    table: float [(2 * height - 1) * (2 * width - 1), H or 1]; differentiable.
    shape: (height, width) of the grid (tokens).

  Raises:
    ValueError: `shape` is not a pair of ints >= 1, or `table` has another shape or dtype; in a
      call, other heads than it.
  """
  checks.require(isinstance(shape, (tuple, list)) and len(shape) == 2, "grid: shape", shape,
                 "(height, width), ints >= 1")
  height, width = (checks.integer("grid: shape", x, "(height, width), ints >= 1",
                                  lambda x: x >= 1) for x in shape)
  rows = (2 * height - 1) * (2 * width - 1)
  array = _floats("grid: table", table, (2,), f"[{rows}, H or 1]")
  checks.require(array.shape[0] == rows, "grid: table", checks.describe(array),
                 f"[{rows}, H or 1] for a grid of {height} by {width}")
  return leaves.Grid(height, width, array)


def per_query(x: ArrayLike) -> ScoreMod:
  """score + x[batch, head, query], where the query counts rows of the array.

  >>> from attn_core import score_mods
  >>> mod = score_mods.per_query(np.array([[[1, 2, 3]]], np.float32))
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[1. 1. 1.]
   [2. 2. 2.]
   [3. 3. 3.]]

  Args:
    x: float [B or 1, H or 1, T or 1]; differentiable.

  Raises:
    ValueError: `x` has another rank or dtype; in a call, a shape that does not fit it.
  """
  return _per_pair("per_query", x, (0, 1, 2))


def per_key(x: ArrayLike) -> ScoreMod:
  """score + x[batch, head, key], where the key counts rows of the array.

  >>> from attn_core import score_mods
  >>> mod = score_mods.per_key(np.array([[[1, 2, 3]]], np.float32))
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[1. 2. 3.]
   [1. 2. 3.]
   [1. 2. 3.]]

  Args:
    x: float [B or 1, H or 1, S or 1]; differentiable.

  Raises:
    ValueError: `x` has another rank or dtype; in a call, a shape that does not fit it.
  """
  return _per_pair("per_key", x, (0, 1, 3))


def scale_by(x: ArrayLike) -> ScoreMod:
  """score * x[batch, head, query]: a temperature per query or per head, or log-n scaling.

  >>> from attn_core import score_mods
  >>> mod = score_mods.scale_by(np.array([[[1, 2, 3]]], np.float32))
  >>> print(score_mods.apply(mod, np.ones((1, 1, 3, 3), np.float32))[0, 0])
  [[1. 1. 1.]
   [2. 2. 2.]
   [3. 3. 3.]]

  Args:
    x: float [B or 1, H or 1, T or 1], one number per head as [1, H, 1]; differentiable.

  Raises:
    ValueError: `x` has another rank or dtype; in a call, a shape that does not fit it.
  """
  return _per_pair("scale_by", x, (0, 1, 2), multiplies=True)


def dense(bias: ArrayLike) -> ScoreMod:
  """score + bias[batch, head, query, key]: an array, in memory quadratic in the length.

  >>> from attn_core import score_mods
  >>> mod = score_mods.dense(np.eye(3, dtype=np.float32)[None, None])
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[1. 0. 0.]
   [0. 1. 0.]
   [0. 0. 1.]]

  Args:
    bias: float [B or 1, H or 1, T or 1, S or 1]; differentiable.

  Raises:
    ValueError: `bias` has another rank or dtype; in a call, a shape that does not fit it.
  """
  return _per_pair("dense", bias, (0, 1, 2, 3))


def soft_cap(cap: float) -> ScoreMod:
  """cap * tanh(score / cap).

  >>> from attn_core import score_mods
  >>> print(score_mods.apply(score_mods.soft_cap(2.0), np.full((1, 1, 1, 1), 1e3, np.float32)))
  [[[[2.]]]]

  Raises:
    ValueError: `cap` is not a static number > 0.
  """
  return leaves.SoftCap(checks.number("soft_cap: cap", cap, "a finite number > 0, static",
                                      lambda x: 0 < x < np.inf))


def custom(function: Callable[..., jax.Array], *operands: ArrayLike) -> ScoreMod:
  """A function of your own of scores, indices and operands, elementwise.

  It is called as `function(score, batch, head, query position, key position, *operands)`.

  >>> from attn_core import score_mods
  >>> def after(score, batch, head, query, key, amount):
  ...   return jnp.where(key > query, score + amount[head], score)
  >>> mod = score_mods.custom(after, np.array([4], np.float32))
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 3, 3), np.float32))[0, 0])
  [[0. 4. 4.]
   [0. 0. 4.]
   [0. 0. 0.]]

  Args:
    function: elementwise, traceable by jax. It may read its operands at the batch row, head and
      positions it gets. Two custom score mods are equal only if their functions are the same
      object: define it once, outside of the training step.
    *operands: arrays, passed whole. Those of a floating-point dtype are differentiable, and cast to
      that of the scores, at least float32.

  Raises:
    ValueError: `function` is not callable, does not accept 5 arguments and the operands, captures a
      traced array, fails for arrays, as `if query > key` does, returns another shape or dtype than
      its first argument's, or, as far as its operations tell, mixes scores, looks numbers up by
      scores, or depends on the tile of the scores that it gets, such as on its shape.
  """
  arrays = tuple(map(_as_array, operands))
  functions.check(function, arrays)
  return leaves.Custom(function, arrays)


def apply(mod: ScoreMod, scores: ArrayLike) -> jax.Array:
  """Returns all scores [B, H, T, S] after a score mod, at positions from 0, as one array.

  >>> from attn_core import score_mods
  >>> mod = score_mods.soft_cap(1.0) >> score_mods.per_key(np.full((1, 1, 1), 3, np.float32))
  >>> print(score_mods.apply(mod, np.zeros((1, 1, 1, 2), np.float32)))
  [[[[3. 3.]]]]

  Args:
    mod: any score mod.
    scores: float [B, H, T, S].

  Raises:
    ValueError: `mod` is not a score mod, or an array of it does not fit the scores.
  """
  checks.require(isinstance(mod, ScoreMod), "apply: mod", type(mod).__name__, "a score mod")
  given = jnp.asarray(_floats("apply: scores", scores, (4,), "[B, H, T, S]"))
  batch, heads, queries, keys = given.shape
  arrays, structure = jax.tree.flatten(mod.lower((batch, heads, queries, keys)))
  wide = given.astype(at_least_float32(given.dtype))
  found = evaluate.apply_to_all(structure, arrays, wide, mask_lib.Full(), MaskOperands())
  return found.astype(given.dtype)


def _per_pair(name: str, x: ArrayLike, axes: tuple[int, ...], *,
              multiplies: bool = False) -> ScoreMod:
  """Returns the score mod of an array with some of the axes of [B, H, T, S]."""
  letters = ", ".join(f"{'BHTS'[i]} or 1" for i in axes)
  return leaves.PerPair(name, multiplies, axes,
                        _floats(f"{name}: array", x, (len(axes),), f"[{letters}]"))


def _as_array(x: ArrayLike) -> Array:
  """Returns an array as it is, anything else as one."""
  if isinstance(x, (jax.Array, np.ndarray)):
    return x
  try:
    return np.asarray(x)
  except jax.errors.TracerArrayConversionError:  # a list of traced numbers
    return jnp.asarray(x)


def _floats(name: str, x: ArrayLike, ranks: tuple[int, ...], dimensions: str) -> Array:
  """Returns a floating-point array of one of the ranks."""
  array = _as_array(x)
  checks.require(jnp.issubdtype(array.dtype, jnp.floating) and array.ndim in ranks
                 and 0 not in array.shape, name, checks.describe(array),
                 f"{dimensions} of a floating-point dtype")
  return array
