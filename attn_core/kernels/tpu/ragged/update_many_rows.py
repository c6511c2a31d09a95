"""Folds a block of keys into the softmax of many rows, which lie along the lanes.

  scores = K Q^T;  out^T = V^T P

Of several key heads together where the rows of one do not fill the lanes: products are then taken
of all rows, and each head's own are kept.

Letters: as in `step`.
"""

import functools
from typing import Callable

from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.tpu.ragged import common as step
from attn_core.kernels.tpu.ragged.kv_block import Block
from attn_core.kernels.tpu.ragged.kv_layout import LANES
from attn_core.kernels.tpu.ragged.common import Kernel, Place


def start(k: Kernel) -> None:
  """No keys seen."""
  k.running.highest[...] = jnp.full_like(k.running.highest, -jnp.inf)
  k.running.total[...] = jnp.zeros_like(k.running.total)
  k.running.output[...] = jnp.zeros_like(k.running.output)


def result(k: Kernel, group: int):
  """The running softmax of a group's rows: [1, L], [1, L], [E, L]."""
  return softmax.Running(*(x[group] for x in k.running))


def fold(k: Kernel, place: Place) -> None:
  """Folds a block into the running softmax of every head."""
  shape, block = k.shape, place.block(k)
  finite = block.settle()
  seen = functools.partial(step.seen, k, place, axis=0)
  shown = jnp.bool_(False)
  if not shape.mask_rows and shape.lanes > LANES:
    shown = step.shown(k, place)  # for fewer rows, to look everywhere is as fast
    pl.when(finite & shown)(lambda: _fold_groups(k, block, None, careful=False))
  pl.when(finite & jnp.logical_not(shown))(lambda: _fold_groups(k, block, seen, careful=False))
  pl.when(jnp.logical_not(finite))(lambda: _fold_groups(k, block, seen, careful=True))


def _fold_groups(k: Kernel, block: Block, seen: Callable | None, *, careful: bool):
  """Folds a block into all heads; scores of the next one are issued before those of one are used.

  Args:
    seen: group of heads -> bool [C, L]; None: everything is.
    careful: whether keys and values may not be finite, which is then for those who see them.
  """
  size = 1 if careful else k.shape.unrolled
  @pl.loop(jnp.int32(0), jnp.int32(k.shape.groups // size))
  def _(first):
    groups = [first * size + i for i in range(size)]
    ahead = _scores(k, block, groups[0], careful)
    for i, group in enumerate(groups):
      now, ahead = ahead, (
          _scores(k, block, groups[i + 1], careful) if i + 1 < size else None)
      after = k.rule.update(result(k, group), *now, None if seen is None else seen(group), axis=0)
      for ref, x in zip(k.running, after):
        ref[group] = x


def _scores(k: Kernel, block: Block, group: int, careful: bool):
  """(scores [C, L], their weights [C, L] -> output [E, L]) of a group of heads."""
  rows, u, m = k.rows[0, group], k.shape.together, k.shape.rows
  values, scores = [], None
  lane = step.rows_along(k, 1)
  own = [(lane >= i * m) & (lane < (i + 1) * m) for i in range(u)]
  for i in range(u):
    key, value = (block.read(bool(odd), group * u + i, rows.dtype) for odd in range(2))
    if careful:
      nothing = lambda x: (x - x).astype(jnp.float32).sum(1, keepdims=True)  # 0, or NaN
      spoilt = nothing(key) + nothing(value)
      key, value = (jnp.where(spoilt == 0, x, jnp.zeros((), x.dtype)) for x in (key, value))
    found = step.dot(k, key, rows, 1)
    found = found + spoilt if careful else found
    scores = found if scores is None else jnp.where(own[i], found, scores)
    values.append(value)

  def weigh(weights):
    weights, output = weights.astype(rows.dtype), None
    for i, value in enumerate(values):
      found = step.dot(k, value, weights, 0, 0)
      output = found if output is None else jnp.where(own[i], found, output)
    return output

  return scores, weigh
