# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks of the rows of a dense cache by the numbers of slots, without a number for every slot.

Where nothing but causality and windows hides keys, what a query sees follows from the slots between
which a row has tokens, and the query's own slot.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.caches.slots import CacheRows
from attn_core.kernels.tpu.ragged import common
from attn_core.masks import leaves, mask as mask_lib
from attn_core.types import AttentionSpec, Operands

MOST_SIDE = 2**30  # tokens; sums of slots and of larger ones might not be int32
FIELDS = 3  # of `numbers`
Sides = tuple[int | None, int | None]  # of a window, tokens; None: unbounded


def window_of(operands: Operands, spec: AttentionSpec) -> Sides | None:
  """Returns the sides of the window that hides keys; None: the mask is not one by slots.

  The mask of a call with a cache has one array of positions, and one of segments that says which
  slots and queries count: `CacheRows` says both.
  """
  if operands.mask.rows is None:
    return None
  whole = mask_lib.of_structure(spec.mask)
  if not isinstance(whole, leaves.Positions):
    return None
  left: int | None = None
  right: int | None = None
  segments = 0
  for mask in mask_lib.conjuncts(whole.mask):
    if isinstance(mask, leaves.Segments):
      segments += 1
    elif isinstance(mask, leaves.Causal):
      right = _narrower(right, 0)
    elif isinstance(mask, leaves.Window):
      left, right = _narrower(left, mask.left), _narrower(right, mask.right)
    elif not isinstance(mask, mask_lib.Full):
      return None
  if segments != 1 or any(side is not None and abs(side) >= MOST_SIDE for side in (left, right)):
    return None
  return left, right


def _narrower(side: int | None, other: int | None) -> int | None:
  """Returns the smaller one of two sides of windows."""
  return min((x for x in (side, other) if x is not None), default=None)


def numbers(rows: CacheRows) -> tuple[jax.Array, ...]:
  """Returns what `write_steps` reads, int32 [B] each.

  They are the fields `row_begin`, `row_length` and `query_begin` of `Steps`. The kernel computes
  the others: XLA takes a third of a microsecond for each operation on so few numbers.
  """
  start, end, first = (x.astype(jnp.int32) for x in rows[:3])
  return jnp.where(rows.overflow, common.OVERFLOWED, jnp.maximum(start, 0)), end, first


def write_steps(k: common.KernelRefs) -> None:
  """Writes the numbers of all steps to `k.steps`."""
  layout, left, right = k.shape.layout, k.spec.left, k.spec.right
  blocks = lambda tokens: lax.div(tokens, jnp.int32(layout.block_kv))

  @pl.loop(0, k.steps.shape[1])
  def _(row: jax.Array) -> None:
    start, end, first = (ref[row] for ref in k.cache_rows)
    # The queries that are not padding, and the keys that they see; none of rows that overflowed.
    begin, last = jnp.maximum(first, start), jnp.minimum(first + k.shape.block_q, end) - 1
    kv_start = start if left is None else jnp.maximum(start, begin - left)
    kv_stop = jnp.minimum(end, layout.row_tokens)
    kv_stop = kv_stop if right is None else jnp.minimum(kv_stop, last + (right + 1))
    sees = (begin <= last) & (kv_start < kv_stop)
    kv_start, kv_stop = (jnp.where(sees, x, 0) for x in (kv_start, kv_stop))
    # At least one key block: a step without one would not wait for the transfers of the next step.
    step = common.Steps(
        row, blocks(kv_start), jnp.maximum(blocks(kv_stop + (layout.block_kv - 1)), 1), first,
        start, end, kv_start, kv_stop)
    for field, number in enumerate(step):
      k.steps[field, row] = number
