# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Update of the running softmax of many rows, which are along the lanes.

  scores = K Q^T;  out^T = V^T P

As in the flash kernel, a block is computed by tiles, of which hidden ones are left out and only
those that the mask cuts evaluate it; and weights are relative to a number that is 0 at first,
whatever the scores, so that no score waits for the maximum of its row. Where a row's sum leaves the
range in which that is as accurate as a maximum, the block is computed again for this row, relative
to its maximum, which the row keeps. So the result of a row depends on no other row, bit by bit. A
block with a number that is not finite, or large, is computed again for all rows.
"""

import collections
from typing import Callable, NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax
from attn_core.kernels.common.online_softmax import Running
from attn_core.kernels.tpu.flash.forward_step import NAIVE_TOTALS, TRACE, reference_above
from attn_core.kernels.tpu.ragged import common, row_mods, row_tiles, visibility
from attn_core.kernels.tpu.ragged.common import Index, KernelRefs, TileIndex, TilePart
from attn_core.kernels.tpu.ragged.kv_block import KVBlock

AHEAD = 3  # tiles whose scores are issued before they are used


class _Step(NamedTuple):
  """A block of keys for one head group."""

  k: KernelRefs
  tile: TileIndex
  group: Index
  key: jax.Array  # [block_kv, D]
  value: jax.Array  # [block_kv, E]
  nan_of_keys: jax.Array | None  # [block_kv, 1], NaN where a key or value is not finite; else 0


def start(k: KernelRefs) -> None:
  """Starts the running softmax of a step."""
  for ref in k.running:
    ref[common.current(k)] = jnp.zeros(ref.shape[1:], jnp.float32)
  k.counters[common.CAREFUL] = 0


def result(k: KernelRefs, group: Index) -> Running:
  """Returns m_i [1, group_rows], l_i [1, group_rows] and acc [E, group_rows] of a head group."""
  return Running(*(x[common.current(k), group] for x in k.running))


def update(k: KernelRefs, tile: TileIndex) -> None:
  """Folds a block of keys into the running softmax of every head."""
  # 1. Load the block.
  block = tile.kv_block(k)
  large = block.load_masked_words()
  # 2. Fold it in as one of the usual patterns.
  left = k.counters[common.CAREFUL] == 0
  for case in row_tiles.cases(k.spec, k.shape):
    matches = left if k.shape.mask_rows else left & case.matches(k, tile)
    left = left & jnp.logical_not(matches)

    @pl.when(matches)
    def _(case: row_tiles.Case = case) -> None:
      _for_each_group(k, lambda group: _fold_case(_load(k, tile, block, group), case))

  # 3. Fold it in tile by tile if it is none, or with care if any of its numbers are large; and
  # once more for rows whose sums have left their range.
  left = left | (k.counters[common.CAREFUL] != 0)

  @pl.when(left | _needs_care(k, large))
  def _() -> None:
    k.counters[common.CAREFUL] |= jnp.where(large[0, 0] == 0, 0, 1)
    kinds = None if k.shape.mask_rows else row_tiles.kinds(k, tile)

    @pl.loop(jnp.int32(0), jnp.int32(2))  # one piece of code for both
    def _(attempt: jax.Array) -> None:
      is_careful = k.counters[common.CAREFUL] != 0

      @pl.when(is_careful | jnp.where(attempt == 0, left, _needs_care(k)))
      def _() -> None:
        _for_each_group(k, lambda group: _fold_tiles(
            _load(k, tile, block, group, shields=True), kinds, attempt > 0))


def _for_each_group(k: KernelRefs, fold: Callable[[Index], None]) -> None:
  """Calls `fold` for every head group."""
  if k.shape.head_groups == 1:
    fold(0)
  else:
    pl.loop(jnp.int32(0), jnp.int32(k.shape.head_groups))(fold)


def _load(k: KernelRefs, tile: TileIndex, block: KVBlock, group: Index, *,
          shields: bool = False) -> _Step:
  """Reads the keys and values of a head group.

  Args:
    k: the kernel.
    tile, block: of keys.
    group: of heads.
    shields: whether keys and values may be non-finite: queries that attend to them get NaN.
  """
  key, value = (block.read(bool(odd), group, k.rows.dtype) for odd in range(2))
  if not shields:
    return _Step(k, tile, group, key, value, None)
  zero_or_nan = lambda x: (x - x).astype(jnp.float32).sum(1, keepdims=True)
  nan_of_keys = zero_or_nan(key) + zero_or_nan(value)
  key, value = (jnp.where(nan_of_keys == 0, x, jnp.zeros((), x.dtype)) for x in (key, value))
  return _Step(k, tile, group, key, value, nan_of_keys)


# --- Tiles. --------------------------------------------------------------------------------------


def _fold_case(step: _Step, case: row_tiles.Case) -> None:
  """Folds in the tiles that a case shows; scores of the next ones are issued ahead."""
  k = step.k
  shown = [(part, kinds) for part, kinds in zip(row_tiles.parts(k.shape), case.slices)
           if any(kinds)]
  issued = collections.deque(_scores(step, _visible_part(*x)) for x in shown[:AHEAD])
  state: dict[int, Running] = {}
  for n, (part, kinds) in enumerate(shown):
    if n + AHEAD < len(shown):
      issued.append(_scores(step, _visible_part(*shown[n + AHEAD])))
    rows = part.rows
    before = state.pop(rows.start, None) or _read(step, common.current(k), rows)
    state[rows.start] = _folded(step, part, issued.popleft(), before, kinds)
    if n + 1 == len(shown) or shown[n + 1][0].rows != rows:
      _write(step, rows, state.pop(rows.start))
  for part in row_tiles.parts(k.shape):
    if part.keys.start == 0 and not any(x.rows == part.rows for x, _ in shown):
      _write(step, part.rows, _read(step, common.current(k), part.rows))


def _visible_part(part: TilePart, kinds: row_tiles.Pattern) -> TilePart:
  """Returns a tile without hidden slices at its end; `kinds` are those of its slices."""
  count = max(n + 1 for n, kind in enumerate(kinds) if kind)
  size = (part.keys.stop - part.keys.start) // len(kinds)
  return part._replace(keys=slice(part.keys.start, part.keys.start + count * size))


def _fold_tiles(step: _Step, kinds: row_tiles.Kinds | None, only_failed: jax.Array) -> None:
  """Folds in all visible tiles of a block, one after the other, with care.

  Args:
    step: the block and the head group.
    kinds: which tiles are visible; None: all may be.
    only_failed: whether rows that have failed are computed, relative to their maximum, and others
      keep their result; else all are computed, as in `_fold_case`.
  """
  k = step.k
  failed = _failed(k, step.group) & only_failed
  changes = failed | jnp.logical_not(only_failed)
  for ref in k.running:
    before, after = ref[common.current(k), step.group], ref[1 - common.current(k), step.group]
    ref[1 - common.current(k), step.group] = jnp.where(changes, before, after)
  for number, part in enumerate(row_tiles.parts(k.shape)):
    @pl.when(True if kinds is None else jnp.logical_not(kinds.is_hidden(number)))
    def _(part: TilePart = part) -> None:
      before = _read(step, 1 - common.current(k), part.rows)
      after = _folded_safely(step, part, before, failed[:, part.rows])
      _write(step, part.rows, Running(*(
          jnp.where(changes[:, part.rows], x, y) for x, y in zip(after, before))))


def _read(step: _Step, buffer: Index, rows: slice) -> Running:
  """Reads the softmax of some rows."""
  return Running(*(x[buffer, step.group, :, rows] for x in step.k.running))


def _write(step: _Step, rows: slice, running: Running) -> None:
  """Writes the softmax of some rows after the block."""
  for ref, x in zip(step.k.running, running):
    ref[1 - common.current(step.k), step.group, :, rows] = x


def _scores(step: _Step, part: TilePart) -> jax.Array:
  """Computes K Q^T, [keys, rows]."""
  rows = step.k.rows[0, step.group, part.rows]
  if step.nan_of_keys is None:
    return common.dot(step.k, step.key[part.keys], rows, 1)
  return common.dot(step.k, step.key[part.keys], common.infinite_to_nan(rows), 1) + (
      step.nan_of_keys[part.keys])


def _logits(step: _Step, part: TilePart, scores: jax.Array) -> jax.Array:
  """Returns the logits of scores without the factor `unit`, before the mask."""
  logits = step.k.spec.logits(scores)
  modify = row_mods.modifier(step.k, step.tile, 0, part)(step.group)
  return logits if modify is None else modify(logits)


def _weigh(step: _Step, part: TilePart, weights: jax.Array) -> jax.Array:
  """Computes V^T P, [E, rows], of weights [keys, rows]."""
  return common.dot(step.k, step.value[part.keys], weights.astype(step.k.rows.dtype), 0, 0)


def _rounded(k: KernelRefs, weights: jax.Array) -> jax.Array:
  """Rounds weights before they are summed as before their product, for an output of more bits.

  As in `SoftmaxForm.rounds_to` of the flash kernel: derivatives read such an output, and so does
  the merge of prefixes. The lse then has the rounding of the weights.
  """
  if k.outputs[0].dtype.itemsize <= k.rows.dtype.itemsize:
    return weights
  return weights.astype(k.rows.dtype).astype(weights.dtype)


def _folded(step: _Step, part: TilePart, scores: jax.Array, before: Running,
            kinds: row_tiles.Pattern) -> Running:
  """Folds in one tile relative to `m_i`; rows that see any key get at least TRACE in l_i.

  Args:
    step: the block and the head group.
    part: the tile.
    scores: of `_visible_part`.
    before: the running softmax of its rows.
    kinds: of its slices.
  """
  k, trace = step.k, jnp.zeros((1, 1), jnp.float32)
  slices = row_tiles.sliced(part) if len(kinds) > 1 else [part]
  found: list[jax.Array] = []
  for piece, kind in zip(slices, kinds):
    first, size = piece.keys.start - part.keys.start, piece.keys.stop - piece.keys.start
    if kind == row_tiles.EMPTY:
      found.append(jnp.zeros((size, before.m_i.shape[1]), jnp.float32))
      continue
    logits = _logits(step, piece, scores[first:first + size])
    weights = jnp.exp2((logits - before.m_i) * k.spec.unit)
    sees: jax.Array | bool = True
    if kind == row_tiles.PARTIAL:
      visible = visibility.visible(k, step.tile, step.group, axis=0, part=piece)
      weights = jnp.where(visible, weights, 0.0)
      sees = visibility.sees_any(k, step.tile, piece, visible)
    found.append(weights)
    trace = jnp.maximum(trace, jnp.where(sees, TRACE, 0.0))
  weights = jnp.concatenate(found, 0) if len(found) > 1 else found[0]
  after = online_softmax.add(before, _rounded(k, weights), lambda x: _weigh(step, part, x), axis=0)
  return after._replace(l_i=after.l_i + trace)


def _folded_safely(step: _Step, part: TilePart, before: Running, failed: jax.Array) -> Running:
  """Folds in one tile, relative to the maximum for rows that failed, as `_folded` for others.

  The number used for the maximum is that of `reference_above`.
  """
  unit = step.k.spec.unit
  visible = visibility.visible(step.k, step.tile, step.group, axis=0, part=part)
  logits = jnp.where(visible, _logits(step, part, _scores(step, part)), -jnp.inf)
  # A row without a key has no number yet.
  before = before._replace(m_i=jnp.where(failed & (before.l_i == 0), -jnp.inf, before.m_i))
  def above(x: jax.Array) -> jax.Array:
    return jnp.where(failed, reference_above(x, unit), before.m_i)
  after = online_softmax.update(before, logits, lambda x: _weigh(step, part, x),
                                exp=lambda x: jnp.exp2(x * unit), above=above, axis=0,
                                rounded=lambda x: _rounded(step.k, x))
  sees = jnp.logical_not(failed) & visibility.sees_any(step.k, step.tile, part, visible)
  return after._replace(m_i=jnp.where(after.l_i == 0, 0.0, after.m_i),
                        l_i=after.l_i + jnp.where(sees, TRACE, 0.0))


# --- Rows whose sums are out of range. -----------------------------------------------------------


def _failed(k: KernelRefs, group: Index) -> jax.Array:
  """Returns which rows of a head group, [1, group_rows], have failed in the block.

  Their sum is out of range; or, in range, their acc is not finite, as values were large.
  """
  _, l_i, acc = (x[1 - common.current(k), group] for x in k.running)
  return _out_of_range(l_i) | ((acc - acc).sum(0, keepdims=True) != 0) & (l_i == l_i)


def _out_of_range(l_i: jax.Array) -> jax.Array:
  """Returns which sums are out of range; those that are NaN are not, as nothing mends them."""
  least, most = NAIVE_TOTALS
  return (l_i > 0) & (l_i < least) | (l_i > most)


def _needs_care(k: KernelRefs, large: jax.Array | None = None) -> jax.Array:
  """Returns whether any sum is out of range after the block, or a number of it is large.

  Args:
    k: the kernel.
    large: [1, 1], not 0 or NaN: some number is; None: none is.
  """
  found = _out_of_range(k.running.l_i[1 - common.current(k)])
  found = jnp.where(found, 1.0, 0.0).sum(0).max(1, keepdims=True)
  found = found if large is None else found + jnp.where(large == 0, 0.0, 1.0)
  return found[0, 0] > 0
