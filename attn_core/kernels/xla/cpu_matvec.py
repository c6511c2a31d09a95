"""Products of a few rows with many keys or values, as XLA:CPU computes them at the memory's speed.

A matrix product of so few rows copies its large operand first. These are sums of products instead,
and read every number where it lies: `part` cuts out what is multiplied, each time by itself, since
what several products share XLA:CPU would copy. Other platforms use matrix products.

Letters: C keys of a block, K key heads, R rows of a key head, D and E widths.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

# From so many rows on, a matrix product is as fast on a CPU, too.
MANY_ROWS = 8
# Products that are summed side by side: one register of XLA:CPU. With 16, its code takes more than
# twice the time.
LANES = 8
# XLA:CPU of jax 0.12 sums over the first axis fast where it is left to itself; that of jax 0.10.2
# takes twice to three times as long as for elementwise steps.
SUMS_FIRST_AXIS = jax.__version_info__ >= (0, 11)
# XLA:CPU of jax 0.10.2 makes float32 of a whole bfloat16 array before a loop that cuts parts out.
WIDENS_WHOLE = jax.__version_info__ < (0, 11)
# So many keys are weighed and summed at once. With 16, jax 0.12 takes twice the time in bfloat16;
# with 8, jax 0.10.2 takes half as much again.
WEIGHED = 8 if SUMS_FIRST_AXIS else 16
# Values of few bits are widened once for all rows; XLA:CPU of jax 0.10.2 is no faster for it.
WIDENS_ONCE = jax.__version_info__ >= (0, 11)
# So many parts of an array are combined at once where it is reduced elementwise.
FAN = 16


def suit(rows: int, width: int) -> bool:
  """Whether these sums are faster on a CPU than matrix products."""
  return rows < MANY_ROWS and width % LANES == 0


def over_width(width: int, part):
  """The sum of part(first) [..., LANES] over all columns: [...].

  The last step is a matrix product for two reasons: XLA:CPU's own sums over the last axis are slow,
  and a loop without any product it makes one function of, which runs in one thread.
  """
  total = functools.reduce(jnp.add, [part(i) for i in range(0, width, LANES)])
  # The barrier keeps the product's view of it, one long axis of vectors, out of the loops that sum:
  # the loop over rows is then the innermost one, and unrolled.
  total = lax.optimization_barrier(total)
  ones = jnp.ones(LANES, total.dtype)
  return jnp.dot(total.reshape(-1, LANES), ones, precision="highest").reshape(total.shape[:-1])


def scores(rows, part):
  """rows [K, R, D] . keys [C, K, D] -> [C, K, R]; part(first) cuts keys [C, K, LANES]."""
  return over_width(rows.shape[2], lambda i: (
      rows[None, :, :, i:i + LANES] * part(i).astype(rows.dtype)[:, :, None]))


def weigh(weights, part, width: int, *, widened: bool):
  """weights [C, K, R] . values [C, K, E] -> [K, R, E]; part(first, length) cuts some keys' values.

  Args:
    weights: in the dtype of the sums.
    part: (first key, number) -> [number, K, E].
    width: E.
    widened: whether the values are stored in fewer bits than the sums have. The rows are the inner
      loop then: a value is widened once, and not for every row. Else the width is, which is faster.
  """
  widened = widened and WIDENS_ONCE
  count, heads, number = weights.shape
  length = count // WEIGHED if count % WEIGHED == 0 else count
  lanes = LANES if width % LANES == 0 else width

  def product(i):  # [length, K, R, E / lanes, lanes]; widened: [length, K, E / lanes, R, lanes]
    value = part(i, length).astype(weights.dtype)
    weight = weights[i:i + length, :, :, None, None]
    if widened:
      return weight.swapaxes(2, 3) * value.reshape(length, heads, -1, 1, lanes)
    return weight * value.reshape(length, heads, 1, -1, lanes)

  # The barrier keeps the last sum from becoming one with the products, which is slower.
  total = functools.reduce(jnp.add, [product(i) for i in range(0, count, length)])
  total = lax.optimization_barrier(total)
  total = total.sum(0) if SUMS_FIRST_AXIS else _fold_cpu(jnp.add, total)[0]
  total = total.swapaxes(1, 2) if widened else total
  return total.reshape(heads, number, width)


def fold(combine, x):
  """`x` reduced over its first axis, which is kept, by jnp.maximum or jnp.add, on any platform."""
  reduce = jnp.max if combine is jnp.maximum else jnp.sum
  return lax.platform_dependent(x, cpu=functools.partial(_fold_cpu, combine),
                                default=lambda x: reduce(x, 0, keepdims=True))


def _fold_cpu(combine, x):
  """`fold` by elementwise steps, which XLA:CPU vectorises and spreads over threads."""
  while x.shape[0] > 2 * FAN and x.shape[0] % FAN == 0:
    x = functools.reduce(combine, jnp.split(x, FAN))
  return functools.reduce(combine, jnp.split(x, x.shape[0]))
