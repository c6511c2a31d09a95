# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `pl.pallas_call` of the flash kernels, with or without a remote copy."""

import math
from typing import Any, Callable, NamedTuple, Sequence, TypeAlias

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.common.contract import RemoteCopy
from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.flash import remote_copy
from attn_core.kernels.tpu.flash.schedule import MEBIBYTE
from attn_core.kernels.tpu.flash.tile_inputs import KernelRefs, TileInputs

Ref = Any  # a Pallas reference
Scratch: TypeAlias = tuple[int, ...] | jax.ShapeDtypeStruct  # a shape of float32, or any array

# Arrays of a kernel that together take at most this may lie in vector memory, if they and what the
# kernel may use leave some of the 64 MiB that chips have from v5 on. By static cycles
# (attn_core_test/results/tpu_notes.md).
MOST_VMEM_BYTES, MOST_WITH_KERNEL = 24 * MEBIBYTE, 48 * MEBIBYTE


class Output(NamedTuple):
  """An output array of a kernel and its blocks."""

  shape: tuple[int, ...]
  dtype: DTypeLike
  block_shape: tuple[int, ...]
  # (b, h, i, j) -> block number, see `TileInputs.block_spec`; None: it stays in HBM, where the
  # kernel writes it by itself
  block_index: Callable[..., tuple] | None


class LaunchParams(NamedTuple):
  """Static parameters of a launch."""

  grid: remote_copy.LogicalGrid
  scratch: Sequence[Scratch]  # arrays in vector memory
  vmem_bytes: int
  name: str
  scalar_words: int = 0  # an int32 array of this length in scalar memory follows `scratch`; 0: none
  semaphores: int = 0  # for transfers of the kernel itself; one array, the last; 0: none


def call(kernel: Callable[[KernelRefs, tuple[Ref, ...], tuple[Ref, ...]], None],
         inputs: TileInputs, outputs: Sequence[Output], launch_params: LaunchParams,
         transfer: RemoteCopy | None = None) -> tuple[Sequence[jax.Array], tuple[jax.Array, ...]]:
  """Runs kernel(refs, outputs, scratch) over a grid.

  Args:
    kernel: the body of the kernel.
    inputs: the operands.
    outputs: shapes and blocks of the results.
    launch_params: grid, scratch memory and name.
    transfer: arrays to copy to another device during the computation; None: none.

  Returns:
    (the outputs, the arrays received in place of those of `transfer`).
  """
  grid = launch_params.grid
  runner: remote_copy.LocalGrid | remote_copy.RemoteCopyGrid = (
      remote_copy.LocalGrid(grid) if transfer is None
      else remote_copy.RemoteCopyGrid(grid, transfer))
  sent, received = runner.inputs, runner.results
  scratch_shapes = [pltpu.VMEM(x, jnp.float32) if isinstance(x, tuple)
                    else pltpu.VMEM(x.shape, x.dtype) for x in launch_params.scratch]
  if launch_params.scalar_words:
    scratch_shapes.append(pltpu.SMEM((launch_params.scalar_words,), jnp.int32))
  if launch_params.semaphores:
    scratch_shapes.append(pltpu.SemaphoreType.DMA((launch_params.semaphores,)))
  ends = np.cumsum([len(x) for x in (
      inputs.scalars, inputs.arrays, sent, outputs, received, scratch_shapes)])

  def body(*refs: Ref) -> None:
    scalars, arrays, sources, results, targets, scratch, semaphores = (
        refs[start:end] for start, end in zip((0, *ends), (*ends, None)))
    num_steps = runner.num_steps
    runner.run(lambda ids: kernel(KernelRefs(scalars, arrays, ids, num_steps), results, scratch),
               sources, targets, semaphores)

  out_specs = [
      remote_copy.MEMORY if x.block_index is None
      else runner.block_spec(inputs.block_spec(x.block_shape, x.block_index)) for x in outputs]
  found = launch.in_32_bits(pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(inputs.scalars), grid=runner.grid,
          in_specs=[*map(runner.block_spec, inputs.specs), *runner.input_specs],
          out_specs=[*out_specs, *[remote_copy.MEMORY] * len(received)],
          scratch_shapes=[*scratch_shapes, *runner.semaphores]),
      # Not ShapeDtypeStruct, which inside shard_map must say over which axes of the mesh it varies.
      out_shape=[*(jax.core.ShapedArray(x.shape, x.dtype) for x in outputs), *received],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=runner.semantics, vmem_limit_bytes=launch_params.vmem_bytes,
          collective_id=runner.barrier),
      name=launch_params.name,
  ))(*inputs.scalars, *placed(inputs.arrays, outputs, launch_params.vmem_bytes), *sent)
  return found[:len(outputs)], runner.unpack(found[len(outputs):])


def placed(arrays: Sequence[jax.Array], outputs: Sequence[Output | jax.core.ShapedArray],
           vmem_bytes: int) -> Sequence[jax.Array]:
  """Keeps the operands of a kernel in HBM, unless all of its arrays are small.

  XLA places small ones in vector memory, where the kernel and the operations around it read them
  without waiting for HBM. Large ones would lose by it: a kernel copies blocks from vector memory
  through registers.

  Args:
    arrays: the operands.
    outputs: the results.
    vmem_bytes: vector memory that the kernel may use.
  """
  size = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (*arrays, *outputs))
  if size <= min(MOST_VMEM_BYTES, MOST_WITH_KERNEL - vmem_bytes):
    return arrays
  return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
