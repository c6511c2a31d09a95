"""The online softmax: folding one block of keys after another into a running result.

  highest' = max(highest, max_s logits)
  total'   = total * exp(highest - highest') + sum_s exp(logits - highest')
  output'  = output * exp(highest - highest') + exp(logits - highest') @ value

Milakov and Gimelshein, Online normalizer calculation for softmax,
https://arxiv.org/abs/1805.02867.

Letters: R query rows, C keys of the block, E value width; "..." leading axes.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

LOG2E = math.log2(math.e)  # exp(x) = 2 ** (LOG2E * x)


class Running(NamedTuple):
  """The softmax of the keys seen so far, relative to the highest logit."""

  highest: Any  # [..., R, 1]; -inf before the first visible key; with `add`, 0
  total: Any  # [..., R, 1]: sum of exp(logits - highest)
  output: Any  # [..., R, E]: not yet divided by total


def start(shape, width: int, dtype) -> Running:
  """No keys seen: shape (..., R), value width E."""
  return Running(jnp.full((*shape, 1), -jnp.inf, dtype), jnp.zeros((*shape, 1), dtype),
                 jnp.zeros((*shape, width), dtype))


def update(running: Running | None, logits, weigh, *, exp=jnp.exp, rounded=lambda weights: weights,
           above=lambda highest: highest, axis: int = -1, fold=None) -> Running:
  """Folds in one block of keys.

  Args:
    running: what was seen so far; None: nothing.
    logits: [..., R, C]; -inf where hidden.
    weigh: maps exp(logits - highest) [..., R, C] to its product with the values [..., R, E].
    exp: the exponential; of another base where logits are in other units.
    rounded: what `weigh` is given and `total` sums.
    above: what to call the highest instead: something at or above it.
    axis: that of the keys; where it is 0, all arrays are transposed: [C, R], [1, R], [E, R].
    fold: fold(combine, x) reduces x over the keys, and keeps the axis; None: JAX's own reductions.
  """
  if fold is None:
    fold = lambda combine, x: (x.max if combine is jnp.maximum else x.sum)(axis, keepdims=True)
  highest = above(fold(jnp.maximum, logits))
  if running is not None:
    highest = jnp.maximum(running.highest, highest)
  # While a row has seen nothing, its highest is -inf, and -inf - -inf would be NaN.
  reference = jnp.where(highest == -jnp.inf, 0, highest)
  weights = rounded(exp(logits - reference))
  total = fold(jnp.add, weights.astype(highest.dtype))
  if running is None:
    return Running(highest, total, weigh(weights))
  shrink = exp(running.highest - reference)
  return Running(highest, running.total * shrink + total, running.output * shrink + weigh(weights))


def add(running: Running | None, weights, weigh, *, axis: int = -1) -> Running:
  """`update` relative to 0 instead of the highest: weights are exp(logits), 0 where hidden."""
  total, output = weights.sum(axis, keepdims=True), weigh(weights)
  if running is None:
    return Running(jnp.zeros_like(total), total, output)
  return Running(running.highest, running.total + total, running.output + output)


def finish(running: Running, sinks=None):
  """The normalised output and its lse.

  Args:
    running: all keys seen; logits in natural units, axes in either order (see `update`).
    sinks: a logit without a value per row, broadcastable to `highest`; None: none.

  Returns:
    (output, lse) shaped like `output` and `highest`; 0 and -inf (or the sink) for rows that saw
    nothing.
  """
  highest, total, output = running
  if sinks is not None:
    joint = jnp.maximum(highest, sinks)
    reference = jnp.where(joint == -jnp.inf, 0, joint)
    shrink = jnp.exp(highest - reference)
    highest, total, output = joint, total * shrink + jnp.exp(sinks - reference), output * shrink
  empty = total == 0
  total = jnp.where(empty, 1, total)
  return output * (1 / total), jnp.where(empty, -jnp.inf, highest + jnp.log(total))


def join_sinks(output, lse, sinks):
  """Sinks joined to a normalised softmax: they weigh in its denominator only, so may come last.

  Args:
    output: [..., E].
    lse: [..., 1], of the keys alone.
    sinks: a logit without a value per row, broadcastable to `lse`; None: none.

  Returns:
    (output, lse) with the sinks.
  """
  if sinks is None:
    return output, lse
  joint = jnp.logaddexp(lse, sinks.astype(lse.dtype))
  share = jnp.exp(lse - jnp.where(joint == -jnp.inf, 0, joint))
  return (output * share).astype(output.dtype), joint


def numerator(output, lse):
  """sum over s of exp(logits) * value: what `normalize_output=False` asks for.

  Args:
    output: [B, T, H, E], normalised.
    lse: [B, H, T]; of the keys alone or with sinks, whichever the output was divided by.
  """
  return (output * jnp.exp(lse).transpose(0, 2, 1)[..., None]).astype(output.dtype)
