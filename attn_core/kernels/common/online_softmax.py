# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Online softmax: folds one block of keys after another into a running result.

  m_i' = max(m_i, max_s logits)
  l_i' = l_i * exp(m_i - m_i') + sum_s exp(logits - m_i')
  acc' = acc * exp(m_i - m_i') + exp(logits - m_i') @ value

Milakov and Gimelshein, Online normalizer calculation for softmax,
https://arxiv.org/abs/1805.02867.

"..." are leading axes, num_rows is the number of query rows, block_kv that of keys in a block.
"""

import math
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.types import at_least_float32

ArrayFn = Callable[[Any], Any]  # maps an array to an array

LOG2E = math.log2(math.e)  # exp(x) = 2 ** (LOG2E * x)


class Running(NamedTuple):
  """The softmax of the keys seen so far, relative to the highest logit."""

  # Arrays, or the values of one kernel's registers.
  m_i: Any  # [..., num_rows, 1]; -inf before the first visible key; with `add`, 0
  l_i: Any  # [..., num_rows, 1]: sum of exp(logits - m_i)
  acc: Any  # [..., num_rows, E]: not yet divided by l_i


def start(shape: tuple[int, ...], width: int, dtype: DTypeLike) -> Running:
  """Returns the result of no keys, for rows of shape (..., num_rows) and value width E."""
  return Running(jnp.full((*shape, 1), -jnp.inf, dtype), jnp.zeros((*shape, 1), dtype),
                 jnp.zeros((*shape, width), dtype))


def update(running: Running | None, logits: jax.Array, weigh: ArrayFn, *, exp: ArrayFn = jnp.exp,
           rounded: ArrayFn = lambda weights: weights, above: ArrayFn = lambda x: x, axis: int = -1,
           fold: Callable[..., jax.Array] | None = None) -> Running:
  """Folds in one block of keys.

  Args:
    running: the result of the keys so far; None: no keys.
    logits: [..., num_rows, block_kv]; -inf where hidden.
    weigh: maps exp(logits - m_i) [..., num_rows, block_kv] to its product with the values
      [..., num_rows, E].
    exp: the exponential; of another base where logits are in other units.
    rounded: rounds the weights, before `weigh` and before their sum.
    above: maps the maximum to the number used in its place, at least as large.
    axis: that of the keys; where it is 0, all arrays are transposed: [block_kv, num_rows],
      [1, num_rows], [E, num_rows].
    fold: fold(combine, x) reduces x over the keys, and keeps the axis; None: JAX's own reductions.
  """
  if fold is None:
    fold = lambda combine, x: (x.max if combine is jnp.maximum else x.sum)(axis, keepdims=True)
  m_i = above(fold(jnp.maximum, logits))
  if running is not None:
    m_i = jnp.maximum(running.m_i, m_i)
  # While a row has seen nothing, m_i is -inf, and -inf - -inf would be NaN.
  reference = jnp.where(m_i == -jnp.inf, 0, m_i)
  weights = rounded(exp(logits - reference))
  l_i = fold(jnp.add, weights.astype(m_i.dtype))
  if running is None:
    return Running(m_i, l_i, weigh(weights))
  alpha = exp(running.m_i - reference)
  return Running(m_i, running.l_i * alpha + l_i, running.acc * alpha + weigh(weights))


def add(running: Running | None, weights: jax.Array, weigh: ArrayFn, *,
        axis: int = -1) -> Running:
  """Folds in a block relative to 0 instead of m_i: weights are exp(logits), 0 where hidden."""
  l_i, acc = weights.sum(axis, keepdims=True), weigh(weights)
  if running is None:
    return Running(jnp.zeros_like(l_i), l_i, acc)
  return Running(running.m_i, running.l_i + l_i, running.acc + acc)


def finish(running: Running,
           sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Returns the normalized output and its lse.

  Args:
    running: all keys seen; logits in natural units, axes in either order (see `update`).
    sinks: a logit without a value per row, broadcastable to `m_i`; None: no sinks.

  Returns:
    (output, lse) shaped like `acc` and `m_i`; 0 and -inf (or the sink) for rows that saw
    nothing.
  """
  m_i, l_i, acc = running
  if sinks is not None:
    joint = jnp.maximum(m_i, sinks)
    reference = jnp.where(joint == -jnp.inf, 0, joint)
    alpha = jnp.exp(m_i - reference)
    m_i, l_i, acc = joint, l_i * alpha + jnp.exp(sinks - reference), acc * alpha
  empty = l_i == 0
  l_i = jnp.where(empty, 1, l_i)
  return acc * (1 / l_i), jnp.where(empty, -jnp.inf, m_i + jnp.log(l_i))


def join_sinks(output: jax.Array, lse: jax.Array,
               sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Joins sinks to a normalized softmax: they change its denominator only, so may come last.

  Args:
    output: [..., E].
    lse: [..., 1], of the keys alone.
    sinks: a logit without a value per row, broadcastable to `lse`; None: no sinks.

  Returns:
    (output, lse) with the sinks.
  """
  if sinks is None:
    return output, lse
  joint = jnp.logaddexp(lse, sinks.astype(lse.dtype))
  share = jnp.exp(lse - jnp.where(joint == -jnp.inf, 0, joint))
  return (output.astype(share.dtype) * share).astype(output.dtype), joint


def numerator(output: jax.Array, lse: jax.Array) -> jax.Array:
  """Returns sum over s of exp(logits) * value, the output for `normalize_output=False`.

  Args:
    output: [B, T, H, E], normalized.
    lse: [B, H, T], that of the output's denominator, with or without sinks.
  """
  total = jnp.exp(lse).transpose(0, 2, 1)[..., None]
  wide = at_least_float32(output.dtype)
  return (output.astype(wide) * total.astype(wide)).astype(output.dtype)
