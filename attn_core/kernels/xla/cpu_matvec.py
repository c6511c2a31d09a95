# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows with many keys or values, as XLA:CPU computes them at the memory's speed.

A matrix product of few rows copies its large operand first. These functions sum products instead,
and read every number in place: `part` slices the operand for each product separately, because
XLA:CPU would copy a slice that several products share. Other platforms use matrix products.

num_rows is the number of rows of a key head.
"""

import functools
from typing import Callable

import jax
from jax import lax
import jax.numpy as jnp

# With at least this many rows, a matrix product is as fast on a CPU.
MANY_ROWS = 8
# With fewer rows, a product of keys and rows is faster on a CPU than one of rows and keys, if its
# result is not transposed before another operation: XLA would turn the product around.
ROWS_FIRST = 64
# Number of parallel sums of products: one register of XLA:CPU. With 16, its code takes more than
# twice the time.
LANES = 8
# XLA:CPU of jax 0.12 reduces over any axis but a short last one fast by itself, in its library,
# which takes no time to compile; that of jax 0.10.2 takes two to three times as long as for
# elementwise steps.
REDUCES_FAST = jax.__version_info__ >= (0, 11)
# XLA:CPU of jax 0.10.2 converts a whole bfloat16 array to float32 before a loop that slices it.
WIDENS_WHOLE = jax.__version_info__ < (0, 11)
# Number of keys weighed and summed at once. With 16, jax 0.12 takes twice the time in bfloat16;
# with 8, jax 0.10.2 takes 1.5 times the time.
WEIGHED = 8 if REDUCES_FAST else 16
# Whether values of few bits are converted once for all rows; XLA:CPU of jax 0.10.2 gains nothing.
WIDENS_ONCE = jax.__version_info__ >= (0, 11)
# Number of parts of an array that an elementwise reduction combines at once.
FAN = 16


def is_faster(rows: int, width: int) -> bool:
  """Returns whether these sums are faster on a CPU than matrix products."""
  return rows < MANY_ROWS and width % LANES == 0


def over_width(width: int, part: Callable[[int], jax.Array]) -> jax.Array:
  """Returns the sum [...] of part(first) [..., LANES] over all columns.

  The last step is a matrix product for two reasons: XLA:CPU's own sums over a last axis of 8
  numbers take ten times as long, and it compiles a loop without a matrix product to one function,
  which runs in one thread.
  """
  total = functools.reduce(jnp.add, [part(i) for i in range(0, width, LANES)])
  # The barrier keeps the last step's reshape out of the loops that sum: the loop over rows is then
  # the innermost one, and unrolled.
  total = lax.optimization_barrier(total)
  ones = jnp.ones(LANES, total.dtype)
  return jnp.dot(total.reshape(-1, LANES), ones, precision="highest").reshape(total.shape[:-1])


def scores(rows: jax.Array, part: Callable[[int], jax.Array]) -> jax.Array:
  """Returns scores [block_kv, K, num_rows].

  Args:
    rows: [K, num_rows, D].
    part: (first column) -> keys [block_kv, K, LANES].
  """
  return over_width(rows.shape[2], lambda i: (
      rows[None, :, :, i:i + LANES] * part(i).astype(rows.dtype)[:, :, None]))


def weigh(weights: jax.Array, part: Callable[[int, int], jax.Array], width: int, *,
          widened: bool) -> jax.Array:
  """Returns weights times values: [K, num_rows, E].

  Args:
    weights: [block_kv, K, num_rows], in the dtype of the sums.
    part: (first key, length) -> values [length, K, E].
    width: E.
    widened: whether the values are stored in fewer bits than the sums have. Then the inner loop
      runs over rows, and a value is converted once, not for every row; else it runs over the width,
      which is faster.
  """
  widened = widened and WIDENS_ONCE
  count, heads, number = weights.shape
  length = count // WEIGHED if count % WEIGHED == 0 else count
  lanes = LANES if width % LANES == 0 else width

  # [length, K, num_rows, E / lanes, lanes]; widened: [length, K, E / lanes, num_rows, lanes]
  def product(i: int) -> jax.Array:
    value = part(i, length).astype(weights.dtype)
    weight = weights[i:i + length, :, :, None, None]
    if widened:
      return weight.swapaxes(2, 3) * value.reshape(length, heads, -1, 1, lanes)
    return weight * value.reshape(length, heads, 1, -1, lanes)

  # The barrier keeps XLA from fusing the last sum with the products, which is slower.
  total = functools.reduce(jnp.add, [product(i) for i in range(0, count, length)])
  total = lax.optimization_barrier(total)
  total = total.sum(0) if REDUCES_FAST else _fold_cpu(jnp.add, total)[0]
  total = total.swapaxes(1, 2) if widened else total
  return total.reshape(heads, number, width)


def fold(combine: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
  """Reduces `x` by jnp.maximum or jnp.add over its first axis, which is kept."""
  reduce = jnp.max if combine is jnp.maximum else jnp.sum
  if REDUCES_FAST:
    return reduce(x, 0, keepdims=True)
  return lax.platform_dependent(x, cpu=functools.partial(_fold_cpu, combine),
                                default=lambda x: reduce(x, 0, keepdims=True))


def _fold_cpu(combine: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
  """Computes `fold` by elementwise steps, which XLA:CPU vectorizes and runs in several threads."""
  while x.shape[0] > 2 * FAN and x.shape[0] % FAN == 0:
    x = functools.reduce(combine, jnp.split(x, FAN))
  return functools.reduce(combine, jnp.split(x, x.shape[0]))
