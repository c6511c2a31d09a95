"""Matrix products of a warpgroup that run beside other work.

A product is issued and forgotten; only reading its accumulator waits, for it and all before it. So
sums over a loop stay in flight from step to step, and what does not need a product runs meanwhile.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attn_core.kernels.gpu import mosaic


def sum_up(run, shapes, scratch):
  """Runs run(*sums), where `add` adds products to the sums, and returns them.

  Args:
    run: what adds.
    shapes: [R, N] of each float32 sum; it begins as zeros.
    scratch: this warpgroup's part of what `scratch_of` asked for.
  """
  if scratch:
    for total in scratch:
      total[...] = jnp.zeros(total.shape, jnp.float32)
    run(*scratch)
    return [total[...] for total in scratch]

  def scoped(*sums):
    run(*sums)
    return [total[...] for total in sums]
  return pl.run_scoped(scoped, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def scratch_of(shapes) -> tuple:
  """Shared memory for `sum_up`; only interpret mode, which has no such accumulators, needs any."""
  if not mosaic.interpreted():
    return ()
  return tuple(plgpu.SMEM(shape, jnp.float32) for shape in shapes)


def add(total, left, right, *, interpret: bool):
  """total += left @ right, in flight.

  Args:
    total: a sum of `sum_up`, [R, N].
    left: [R, C], in registers.
    right: reference [C, N] in shared memory.
    interpret: whether the kernel is interpreted; there, no product takes registers.
  """
  if not interpret:
    plgpu.wgmma(total, left, right)
    return
  total[...] = total[...] + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
  plgpu.commit_smem()


def beside(left, right, meanwhile=lambda: None):
  """(left @ right, meanwhile()), which runs beside the product.

  Args:
    left: reference [R, C] in shared memory.
    right: reference [C, N] in shared memory.
    meanwhile: issues no product.
  """
  def scoped(total):
    plgpu.wgmma(total, left, right)
    found = meanwhile()
    return total[...], found
  shape = left.shape[0], right.shape[1]
  return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def of_registers(shape, pieces, *, interpret: bool):
  """The sum of left @ right over pieces.

  Args:
    shape: [R, N] of the sum.
    pieces: yields left [R, C], in registers, and right, a reference [C, N] in shared memory.
    interpret: whether the kernel is interpreted; there, no product takes registers.
  """
  if interpret:
    total = sum(jnp.dot(left, right[...], preferred_element_type=jnp.float32)
                for left, right in pieces)
    plgpu.commit_smem()
    return total

  def scoped(total):
    for left, right in pieces:
      plgpu.wgmma(total, left, right)
    return total[...]
  return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def anew(numbers, step):
  """The same numbers, a tuple; what depends on them is computed in this step of a loop.

  Else the compiler computes the addresses and positions of all parts of a tile before the loop, and
  they fill the registers that the products need.
  """
  return lax.optimization_barrier((*numbers, step))[:-1]
