# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Update of the running softmax of many rows, which are along the lanes.

  scores = K Q^T;  out^T = V^T P

Several key heads form a group if the rows of one do not fill the lanes: products are then computed
for all rows of the group, and each head keeps its own.
"""

import functools
from typing import Any, Callable

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax
from attn_core.kernels.tpu.ragged import common, row_mods
from attn_core.kernels.tpu.ragged.common import Index, KernelRefs, TileIndex
from attn_core.kernels.tpu.ragged.kv_block import KVBlock
from attn_core.kernels.tpu.ragged.kv_layout import LANES


def start(k: KernelRefs) -> None:
  """Starts the running softmax of a step."""
  k.running.m_i[...] = jnp.full_like(k.running.m_i, -jnp.inf)
  k.running.l_i[...] = jnp.zeros_like(k.running.l_i)
  k.running.acc[...] = jnp.zeros_like(k.running.acc)


def result(k: KernelRefs, group: Index) -> online_softmax.Running:
  """Returns m_i [1, group_rows], l_i [1, group_rows] and acc [E, group_rows] of a head group."""
  return online_softmax.Running(*(x[group] for x in k.running))


def update(k: KernelRefs, tile: TileIndex) -> None:
  """Folds a block of keys into the running softmax of every head."""
  shape, block = k.shape, tile.kv_block(k)
  # 1. Load the block.
  finite = block.load_masked_words()
  visible = functools.partial(common.visible, k, tile, axis=0)
  update_groups = functools.partial(_update_groups, k, block, row_mods.modifier(k, tile, axis=0))
  # 2. Fold it in, without a mask where all of it is visible, and with care where it is not finite.
  all_visible = jnp.bool_(False)
  if not shape.mask_rows and shape.group_rows > LANES:  # for fewer rows the mask costs nothing
    all_visible = common.all_visible(k, tile)
    pl.when(finite & all_visible)(lambda: update_groups(None, propagate_nan=False))
  pl.when(finite & jnp.logical_not(all_visible))(
      lambda: update_groups(visible, propagate_nan=False))
  pl.when(jnp.logical_not(finite))(
      lambda: update_groups(visible, propagate_nan=True))


def _update_groups(k: KernelRefs, block: KVBlock, modifier: row_mods.Modifier,
                   visible: Callable[[Index], jax.Array] | None, *, propagate_nan: bool) -> None:
  """Folds a block into all heads; scores of the next head group are issued ahead.

  Args:
    k: the kernel.
    block: keys and values.
    modifier: see `row_mods.modifier`.
    visible: maps a head group to bool [block_kv, group_rows]; None: all True.
    propagate_nan: whether keys and values may be non-finite: queries that attend to them get NaN.
  """
  size = 1 if propagate_nan else k.shape.unrolled_groups

  def update_unrolled(first: Index) -> None:
    groups = [first * size + i for i in range(size)]
    issued = [_scores(k, block, groups[0], propagate_nan)]
    for i, group in enumerate(groups):
      if i + 1 < size:
        issued.append(_scores(k, block, groups[i + 1], propagate_nan))
      after = k.spec.update(result(k, group), *issued.pop(0),
                            None if visible is None else visible(group), modifier(group),
                            axis=0)
      for ref, x in zip(k.running, after):
        ref[group] = x

  number = k.shape.head_groups // size
  if number == 1:
    update_unrolled(0)
  else:
    pl.loop(jnp.int32(0), jnp.int32(number))(update_unrolled)


def _scores(k: KernelRefs, block: KVBlock, group: Index,
            propagate_nan: bool) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """Computes the scores of a head group.

  Returns:
    (scores [block_kv, group_rows], a function from their weights to V^T P [E, group_rows]).
  """
  rows, heads, head_rows = k.rows[0, group], k.shape.group_heads, k.shape.head_rows
  values: list[jax.Array] = []
  scores: Any = None
  row = common.row_numbers(k, 1)
  own = [(row >= i * head_rows) & (row < (i + 1) * head_rows) for i in range(heads)]
  for i in range(heads):
    key, value = (block.read(bool(odd), group * heads + i, rows.dtype) for odd in range(2))
    if propagate_nan:
      zero_or_nan = lambda x: (x - x).astype(jnp.float32).sum(1, keepdims=True)
      nan_of_keys = zero_or_nan(key) + zero_or_nan(value)
      key, value = (jnp.where(nan_of_keys == 0, x, jnp.zeros((), x.dtype)) for x in (key, value))
    found = common.dot(k, key, rows, 1)
    found = found + nan_of_keys if propagate_nan else found
    scores = found if scores is None else jnp.where(own[i], found, scores)
    values.append(value)

  def weigh(weights: jax.Array) -> jax.Array:
    weights = weights.astype(rows.dtype)
    output: Any = None
    for i, value in enumerate(values):
      found = common.dot(k, value, weights, 0, 0)
      output = found if output is None else jnp.where(own[i], found, output)
    return output

  return scores, weigh
