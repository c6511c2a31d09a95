# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Update of the running softmax of few rows, where keys and values are loaded once.

  scores = Q K^T;  out = P V

Keys and values are the operands of the products that stay in the matrix units, through which few
rows pass at almost no cost. Two key heads form a group, with their keys next to each other: rows
are zero next to the other head's keys, and of the products with both values each row keeps the
half of its own head.

A block of latent rows is folded in by pieces: while the softmax of one is computed, the products of
the next ones are.

A non-finite number shows in scores and outputs, so that no pass looks for it beforehand: a block
where it does is folded again, from the running softmax before it.
"""

import functools
from typing import Any, Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import online_softmax
from attn_core.kernels.tpu.ragged import common, row_mods, visibility
from attn_core.kernels.tpu.ragged.common import Index, KernelRefs, TileIndex
from attn_core.kernels.tpu.ragged.kv_block import KVBlock

DIGITS = 127.0 * 2**16  # the largest number of three digits of int8, of which the lower are < 128
StartSome = Callable[[int, int], None]  # starts part i of n of the next transfers


def start(k: KernelRefs) -> None:
  """Starts the running softmax of a step."""
  for ref, number in zip(k.running, (-jnp.inf, 0.0, 0.0)):
    ref[common.current(k)] = jnp.full(ref.shape[1:], number, jnp.float32)


def result(k: KernelRefs, group: Index) -> online_softmax.Running:
  """Returns m_i [group_rows, 1], l_i [group_rows, 1] and acc [group_rows, E] of a head group."""
  return online_softmax.Running(*(x[common.current(k), group] for x in k.running))


def update(k: KernelRefs, tile: TileIndex, start_some: StartSome | None = None) -> None:
  """Folds a block of keys into the running softmax of every head.

  Args:
    k: the kernel.
    tile: the block.
    start_some: starts a part of the next transfers, by its number of several; None: none are left.
  """
  # 1. Load the block.
  # Scales of all keys and of all values multiply scores and outputs, which are fewer.
  block = tile.kv_block(k)._replace(tensor_scales=None)
  block.load_words()
  visible: Callable[[Index], jax.Array] = functools.partial(visibility.visible, k, tile, axis=1)
  if not k.shape.mask_heads and k.shape.row_groups == 1:
    shared = visible(0)
    visible = lambda group: shared
  update_groups = functools.partial(_update_groups, k, block, visible,
                                    row_mods.modifier(k, tile, axis=1))
  # 2. Fold it in, and once more with care if anything was not finite.
  finite = update_groups(start_some, propagate_nan=False)

  @pl.when(jnp.logical_not(finite))
  def _() -> None:
    update_groups(None, propagate_nan=True)


def _update_groups(k: KernelRefs, block: KVBlock, visible: Callable[[Index], jax.Array],
                   modifier: row_mods.Modifier, start_some: StartSome | None, *,
                   propagate_nan: bool) -> jax.Array:
  """Folds a block into all heads.

  Args:
    k: the kernel.
    block: keys and values.
    visible: maps a head group to bool [group_rows, block_kv].
    modifier: see `row_mods.modifier`.
    start_some: as in `update`.
    propagate_nan: whether keys and values may be non-finite: queries that attend to them get NaN.

  Returns:
    bool: whether all scores and outputs are finite.
  """
  shape = k.shape
  size = 1 if propagate_nan else shape.unrolled_groups

  def update_unrolled(first: Index, nonfinite: jax.Array) -> jax.Array:
    groups = [first * size + i for i in range(size)]
    parts: list[list] = []
    for number, group in enumerate(groups):
      parts.append([_scores(k, block, group, piece, propagate_nan) for piece in shape.pieces])
      if start_some is not None:
        start_some(number, size)
    for group, pieces in zip(groups, parts):
      found: list[jax.Array] = []
      after, seen, modify = result(k, group), visible(group), modifier(group)
      assert modify is None or shape.pieces == [None], "latent rows take no score mods"
      for piece, (scores, weigh) in zip(shape.pieces, pieces):
        def weighed(weights: jax.Array, weigh: Callable = weigh, found: list = found) -> jax.Array:
          found.append(weigh(weights))
          return found[-1]
        after = k.spec.update(after, scores, weighed, seen if piece is None else seen[:, piece],
                              modify, axis=1)
      for ref, x in zip(k.running, after):
        ref[1 - common.current(k), group] = x
      for (scores, _), output in zip(pieces, found):
        total = scores.sum(1, keepdims=True) + output.sum(1, keepdims=True)
        nonfinite = nonfinite + (total - total)
    return nonfinite

  zeros = jnp.zeros((shape.group_rows, 1), jnp.float32)
  number = shape.head_groups // size
  assert start_some is None or number == 1, "a loop would start the parts again"
  nonfinite = update_unrolled(0, zeros) if number == 1 else lax.fori_loop(
      jnp.int32(0), jnp.int32(number), update_unrolled, zeros)
  return _is_finite(nonfinite)


def _is_finite(nonfinite: jax.Array) -> jax.Array:
  """Returns whether [group_rows, 1], 0 or NaN, is 0 throughout, in scalar memory."""
  return nonfinite.sum(0, keepdims=True)[0, 0] == 0


def _own_rows(k: KernelRefs, x: jax.Array, i: int) -> jax.Array:
  """Keeps the rows of head i of a group in x [group_rows, ...]; those of others become zeros."""
  row, head_rows = visibility.row_numbers(k, 0), k.shape.head_rows
  return jnp.where((row >= i * head_rows) & (row < (i + 1) * head_rows), x,
                   jnp.zeros((), x.dtype))


def _block_diagonal(k: KernelRefs, rows: jax.Array) -> jax.Array:
  """Expands [group_rows, D] to [group_rows, group_heads * D]: a row faces its own head's keys."""
  heads = k.shape.group_heads
  if heads == 1:
    return rows
  wide = rows.astype(jnp.float32)
  return jnp.concatenate([_own_rows(k, wide, i) for i in range(heads)], 1).astype(rows.dtype)


def _scores(k: KernelRefs, block: KVBlock, group: Index, piece: slice | None,
            propagate_nan: bool) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """Computes the scores of a head group.

  Args:
    k: the kernel.
    block: keys and values.
    group: of heads.
    piece: the tokens of a block of latent rows; None: all of them.
    propagate_nan: as in `_update_groups`.

  Returns:
    (scores [group_rows, block_kv], a function from their weights to P V [group_rows, E]).
  """
  if k.shape.layout.latent:
    return _scores_of_latents(k, block, group, piece, propagate_nan)
  rows, heads = k.rows[0, group], k.shape.group_heads
  # float8 numbers that each have a scale are multiplied by it, in more bits.
  dtype = rows.dtype if k.shape.layout.scales == "token" else _operand_dtype(k, propagate_nan)
  pairs = [block.read_both(group * heads + i, dtype) for i in range(heads)]
  key, value = (jnp.concatenate(x, 1) for x in zip(*pairs))
  if propagate_nan:
    count = _count_nonfinite(k, key) + _count_nonfinite(k, value)
    key, value = _mask_nonfinite(key), _mask_nonfinite(value)
  scores = _scaled(k, common.dot(k, _block_diagonal(k, rows), key, 1), is_value=False)
  if propagate_nan:
    scores = jnp.where(count > 0, jnp.nan, scores)

  def weigh(weights: jax.Array) -> jax.Array:
    found, width = common.dot(k, weights.astype(rows.dtype), value, 0), value.shape[1] // heads
    found = _scaled(k, found, is_value=True)
    if heads == 1:
      return found
    own: Any = sum(_own_rows(k, found[:, i * width:(i + 1) * width], i) for i in range(heads))
    return own

  return scores, weigh


def _operand_dtype(k: KernelRefs, propagate_nan: bool) -> DTypeLike:
  """Returns the dtype of keys and values in products with the queries.

  float8 numbers are operands as they are, unless NaN is looked for in them.
  """
  stored, dtype = jnp.dtype(k.shape.layout.dtype), k.rows.dtype
  mixed = stored == jnp.float8_e4m3fn and not propagate_nan and dtype == jnp.bfloat16
  return stored if mixed else dtype


def _scores_of_latents(k: KernelRefs, block: KVBlock, group: Index, piece: slice | None,
                       propagate_nan: bool) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """Computes the scores of latent rows, whose value is the first part of the key.

  Scales of rows in 8 bits are applied to scores and weights, which are fewer than the numbers of
  the rows.

  Args:
    k: the kernel.
    block: the rows.
    group: of rows of queries.
    piece: as in `_scores`.
    propagate_nan: as in `_update_groups`.

  Returns:
    As `_scores`.
  """
  rows, width = k.rows[0, group], k.shape.layout.widths[1]
  digits = _in_digits(k)
  parts = block.read_parts(
      piece, rows.dtype, jnp.int8 if digits else _operand_dtype(k, propagate_nan))
  scales = block.row_scales(piece)
  if propagate_nan:
    count = sum(_count_nonfinite(k, x) for x in parts if x.dtype != jnp.int8)
    parts = [x if x.dtype == jnp.int8 else _mask_nonfinite(x) for x in parts]
    if scales is not None:
      finite = scales - scales == 0
      count, scales = count + jnp.where(finite, 0.0, 1.0), jnp.where(finite, scales, 0)
  if scales is None:
    scores = common.dot(k, rows, parts[0], 1)
  else:
    own = rows[:, :width]
    scores = (_dot_in_digits(own, parts[0], 1) if digits else
              common.dot(k, own, parts[0], 1)) * scales
    scores = scores + common.dot(k, rows[:, width:], parts[1], 1)
  if propagate_nan:
    scores = jnp.where(count > 0, jnp.nan, scores)

  def weigh(weights: jax.Array) -> jax.Array:
    weights = weights if scales is None else weights * scales
    if digits:
      return _dot_in_digits(weights, parts[0], 0)
    return common.dot(k, weights.astype(rows.dtype), parts[0][:, :width], 0)

  return scores, weigh


def _in_digits(k: KernelRefs) -> bool:
  """Returns whether products with latents of int8 are those of `_dot_in_digits`.

  It is faster than converting the latents, but for many rows, or in as many bits as float32 has.
  """
  return (k.spec.int8_products and jnp.dtype(k.shape.layout.dtype) == jnp.int8
          and k.rows.dtype == jnp.bfloat16 and k.shape.group_rows <= common.FEW_ROWS)


def _dot_in_digits(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
  """Contracts the columns of a with `axis` of b, int8, into float32.

  The numbers of a row are rounded to a 2**23rd of the largest one, as three digits of int8.
  """
  wide = a.astype(jnp.float32)
  largest = jnp.maximum(jnp.abs(wide).max(1, keepdims=True), jnp.finfo(jnp.float32).tiny)
  rest = jnp.round(wide * (1 / largest) * DIGITS).astype(jnp.int32)
  digits: list[jax.Array] = []
  for _ in range(2):
    digit = lax.shift_right_arithmetic(lax.shift_left(rest, jnp.int32(24)), jnp.int32(24))
    digits.append(digit)
    rest = lax.shift_right_arithmetic(rest - digit, jnp.int32(8))
  stacked = jnp.concatenate([*digits, rest]).astype(jnp.int8)
  found = lax.dot_general(stacked, b, (((1,), (axis,)), ((), ())),
                          preferred_element_type=jnp.int32).astype(jnp.float32)
  low, middle, high = jnp.split(found, 3)
  total = (high * 2.0**16 + middle * 2.0**8 + low) * (largest / DIGITS)
  return total + (wide - wide).sum(1, keepdims=True)


def _scaled(k: KernelRefs, x: jax.Array, *, is_value: bool) -> jax.Array:
  """Multiplies products of keys or of values by the scale of these, NaN if that is not finite."""
  if k.tensor_scales is None:
    return x
  scale = k.tensor_scales[int(is_value)]
  return x * (scale + (scale - scale))


def _count_nonfinite(k: KernelRefs, x: jax.Array) -> jax.Array:
  """Counts the non-finite numbers of each key, for the rows of its head, [group_rows, block_kv].

  Args:
    k: the kernel.
    x: keys or values [block_kv, group_heads * D or group_heads * E].
  """
  wide = x.astype(jnp.float32)
  nonfinite = jnp.where(wide - wide == 0, 0.0, 1.0).astype(x.dtype)
  ones = jnp.ones((k.shape.group_rows, x.shape[1] // k.shape.group_heads), x.dtype)
  return common.dot(k, _block_diagonal(k, ones), nonfinite, 1)


def _mask_nonfinite(x: jax.Array) -> jax.Array:
  """Replaces non-finite numbers by zeros."""
  wide = x.astype(jnp.float32)
  return jnp.where(wide - wide == 0, wide, 0).astype(x.dtype)
