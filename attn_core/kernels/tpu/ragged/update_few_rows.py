"""Folds a block of keys into the softmax of few rows: keys and values are what is loaded once.

  scores = Q K^T;  out = P V

Keys and values are the side of the products that stays in the matrix units, through which few rows
pass at almost no cost. Of two key heads together, whose keys lie side by side: their rows are zero
beside the other's keys, and of the products with both values each keeps its own half.

What is not finite shows in scores and outputs, so that nothing looks for it beforehand: a block
where it does is folded again, from what there was before it.

Letters: as in `step`.
"""

import functools

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.tpu.ragged import common as step
from attn_core.kernels.tpu.ragged.kv_block import Block
from attn_core.kernels.tpu.ragged.common import Kernel, Place


def start(k: Kernel) -> None:
  """No keys seen."""
  for ref, number in zip(k.running, (-jnp.inf, 0.0, 0.0)):
    ref[_side(k)] = jnp.full(ref.shape[1:], number, jnp.float32)


def result(k: Kernel, group: int) -> softmax.Running:
  """The running softmax of a group's rows: [L, 1], [L, 1], [L, E]."""
  return softmax.Running(*(x[_side(k), group] for x in k.running))


def _side(k: Kernel):
  """Which of the two running softmaxes is that of all keys before the block."""
  return k.turn[step.COMPUTED] & 1


def fold(k: Kernel, place: Place) -> None:
  """Folds a block into the running softmax of every head."""
  block = place.block(k)
  block.bring()
  seen = functools.partial(step.seen, k, place, axis=1)
  if not k.shape.mask_heads:
    same = seen(0)
    seen = lambda group: same
  finite = _fold_groups(k, block, seen, careful=False)

  @pl.when(jnp.logical_not(finite))
  def _():
    _fold_groups(k, block, seen, careful=True)


def _fold_groups(k: Kernel, block: Block, seen, *, careful: bool):
  """Folds a block into all heads; whether all that was computed is finite.

  Args:
    seen: group of heads -> bool [L, C].
    careful: whether keys and values may not be finite, which is then for those who see them.
  """
  shape = k.shape
  size = 1 if careful else shape.unrolled

  def piece(first, odd):
    groups = [first * size + i for i in range(size)]
    parts = [_scores(k, block, group, careful) for group in groups]
    for group, (scores, weigh) in zip(groups, parts):
      found = []
      def weighed(weights, weigh=weigh, found=found):
        found.append(weigh(weights))
        return found[0]
      after = k.rule.update(result(k, group), scores, weighed, seen(group), axis=1)
      for ref, x in zip(k.running, after):
        ref[1 - _side(k), group] = x
      total = scores.sum(1, keepdims=True) + found[0].sum(1, keepdims=True)
      odd = odd + (total - total)
    return odd

  nothing = jnp.zeros((shape.lanes, 1), jnp.float32)
  number = shape.groups // size
  odd = piece(0, nothing) if number == 1 else lax.fori_loop(
      jnp.int32(0), jnp.int32(number), piece, nothing)
  return _is_finite(odd)


def _is_finite(odd):
  """Whether x - x [L, 1] is 0 throughout, in scalar memory."""
  return odd.sum(0, keepdims=True)[0, 0] == 0


def _own(k: Kernel, x, i: int):
  """Rows [L, ...] of one of the heads that are computed together, zeros for the others'."""
  row, m = step.rows_along(k, 0), k.shape.rows
  return jnp.where((row >= i * m) & (row < (i + 1) * m), x, jnp.zeros((), x.dtype))


def _apart(k: Kernel, rows):
  """[L, D] -> [L, u * D]: each row beside the keys of its own head."""
  u = k.shape.together
  if u == 1:
    return rows
  wide = rows.astype(jnp.float32)
  return jnp.concatenate([_own(k, wide, i) for i in range(u)], 1).astype(rows.dtype)


def _scores(k: Kernel, block: Block, group, careful: bool):
  """(scores [L, C], their weights [L, C] -> output [L, E]) of a group of heads."""
  rows, u = k.rows[0, group], k.shape.together
  pairs = [block.read_both(group * u + i, rows.dtype) for i in range(u)]
  key, value = (jnp.concatenate(x, 1) for x in zip(*pairs))
  if careful:
    spoilt = sum(_number_odd(k, x) for x in (key, value))
    key, value = _finite(key), _finite(value)
  scores = step.dot(k, _apart(k, rows), key, 1)
  if careful:
    scores = jnp.where(spoilt > 0, jnp.nan, scores)

  def weigh(weights):
    found, width = step.dot(k, weights.astype(value.dtype), value, 0), value.shape[1] // u
    if u == 1:
      return found
    return sum(_own(k, found[:, i * width:(i + 1) * width], i) for i in range(u))

  return scores, weigh


def _number_odd(k: Kernel, x):
  """How many numbers of [C, u * D] are not finite, for the rows of each head [L, C]."""
  wide = x.astype(jnp.float32)
  odd = jnp.where(wide - wide == 0, 0.0, 1.0).astype(x.dtype)
  ones = jnp.ones((k.shape.lanes, x.shape[1] // k.shape.together), x.dtype)
  return step.dot(k, _apart(k, ones), odd, 1)


def _finite(x):
  wide = x.astype(jnp.float32)
  return jnp.where(wide - wide == 0, wide, 0).astype(x.dtype)
