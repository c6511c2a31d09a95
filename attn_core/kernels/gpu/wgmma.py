# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous matrix products of a warpgroup (WGMMA).

A product is issued and runs asynchronously; only reading its accumulator waits, for it and for all
products issued before it. So sums over a loop stay in flight from step to step, and code that does
not need a product runs while it is computed.
"""

from typing import Any, Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.mosaic import Ref


def run_with_accumulators(run: Callable[..., None], shapes: Sequence[tuple[int, int]],
                          scratch: Sequence[Ref]) -> list[jax.Array]:
  """Runs run(*accumulators), where `accumulate` adds products, and returns the sums.

  Args:
    run: adds to the accumulators, which begin as zeros.
    shapes: [rows, columns] of each float32 accumulator.
    scratch: this warpgroup's part of what `accumulator_scratch` returned.
  """
  if scratch:
    for acc in scratch:
      acc[...] = jnp.zeros(acc.shape, jnp.float32)
    run(*scratch)
    return [acc[...] for acc in scratch]

  def scoped(*accs: Ref) -> list[jax.Array]:
    run(*accs)
    return [acc[...] for acc in accs]
  return pl.run_scoped(scoped, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def accumulator_scratch(shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
  """Returns shared memory for accumulators in interpret mode, which has no registers for them."""
  if not mosaic.interpreted():
    return ()
  return tuple(plgpu.SMEM(shape, jnp.float32) for shape in shapes)


def accumulate(acc: Ref, left: jax.Array, right: Ref, *, interpret: bool) -> None:
  """Issues acc += left @ right.

  Args:
    acc: an accumulator of `run_with_accumulators`, [rows, columns].
    left: [rows, inner], in registers.
    right: reference [inner, columns] in shared memory.
    interpret: whether the kernel is interpreted, where WGMMA does not take registers.
  """
  if not interpret:
    plgpu.wgmma(acc, left, right)
    return
  acc[...] = acc[...] + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
  plgpu.commit_smem()


def matmul_overlapped(left: Ref, right: Ref,
                      overlapped: Callable[[], Any] = lambda: None) -> tuple[jax.Array, Any]:
  """Returns (left @ right, overlapped()); `overlapped` runs while the product is computed.

  Args:
    left: reference [rows, inner] in shared memory.
    right: reference [inner, columns] in shared memory.
    overlapped: issues no product.
  """
  def scoped(acc: Ref) -> tuple[jax.Array, Any]:
    plgpu.wgmma(acc, left, right)
    result = overlapped()
    return acc[...], result
  shape = left.shape[0], right.shape[1]
  return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def added(acc: jax.Array, left: Ref, right: Ref, *, interpret: bool) -> jax.Array:
  """Returns acc + left @ right, in the registers of acc.

  Args:
    acc: float32 [rows, columns], in registers.
    left: reference [rows, inner] in shared memory.
    right: reference [inner, columns] in shared memory.
    interpret: whether the kernel is interpreted, where sums begin with zeros only.
  """
  if interpret:
    return acc + matmul_overlapped(left, right)[0]
  return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right))(plgpu.ACC.init(acc))


def matmul_registers(shape: tuple[int, int], pieces: Iterable[tuple[jax.Array, Ref]], *,
                     interpret: bool) -> jax.Array:
  """Returns the sum of left @ right over pieces.

  Args:
    shape: [rows, columns] of the sum.
    pieces: yields left [rows, inner], in registers, and right, a reference [inner, columns] in
      shared memory.
    interpret: whether the kernel is interpreted, where WGMMA does not take registers.
  """
  if interpret:
    total: Any = sum(jnp.dot(left, right[...], preferred_element_type=jnp.float32)
                     for left, right in pieces)
    plgpu.commit_smem()
    return total

  def scoped(acc: Ref) -> jax.Array:
    for left, right in pieces:
      plgpu.wgmma(acc, left, right)
    return acc[...]
  return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def recompute_each_step(numbers: tuple[jax.Array, ...], step: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the same numbers; what depends on them is computed in this step of a loop.

  Otherwise the compiler computes the addresses and positions of all parts of a tile before the
  loop, and they fill the registers that the products need.
  """
  return lax.optimization_barrier((*numbers, step))[:-1]
