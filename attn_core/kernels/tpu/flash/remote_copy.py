# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Remote copies of ring attention that overlap with the computation of a kernel.

The first grid step of a kernel starts copies from the memory of this device to that of another,
and the last step waits for them. The overlap therefore does not depend on the compiler's
scheduler, also inside a loop. No step reads the arrays that arrive: the arrays that a kernel
computes with and those that arrive are the two buffers of a ring, which the kernel of the next
ring step swaps.

A device may be ahead of the device that it sends to, which may still use its buffer until its own
kernel of the ring step begins. A kernel therefore first signals to the device that it receives
from that it has begun, and sends once the device that it sends to has signaled.

JAX's guide to such kernels, https://docs.jax.dev/en/latest/pallas/tpu/distributed.html.
"""

import dataclasses
import functools
import hashlib
import operator
from typing import Any, Callable, ClassVar, Literal, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn_core.kernels.common.contract import RemoteCopy

Ref = Any  # a Pallas reference
Semantics = tuple[Literal["parallel", "arbitrary"], ...]  # of every axis of a grid
# (batch, head groups, halves, head parts, steps), see `schedule.Tiling`; the number of steps may be
# traced, as kernels of several devices need not take the same number of them.
LogicalGrid = tuple[int, int, int, int, int | jax.Array]

# Kernels of other libraries number their barrier semaphores from 0; numbers are int32.
FIRST_BARRIER, END_BARRIERS = 1024, 2**31
MEMORY = pl.BlockSpec(memory_space=pltpu.HBM)


@dataclasses.dataclass(frozen=True)
class LocalGrid:
  """The grid of a kernel without remote copies."""

  logical_grid: LogicalGrid
  semantics: ClassVar[Semantics] = ("parallel", "parallel", "parallel", "arbitrary", "arbitrary")
  inputs: ClassVar[tuple] = ()
  input_specs: ClassVar[tuple] = ()
  results: ClassVar[tuple] = ()
  semaphores: ClassVar[tuple] = ()
  barrier: ClassVar[int | None] = None

  @property
  def grid(self) -> LogicalGrid:
    """The grid that is run."""
    return self.logical_grid

  @property
  def num_steps(self) -> int | jax.Array:
    """The number of steps, inside of the kernel."""
    return _num_steps(self.grid)

  def block_spec(self, spec: pl.BlockSpec) -> pl.BlockSpec:
    """Returns `spec`, as both grids are the same."""
    return spec

  def unpack(self, received: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the received arrays; there are none."""
    return tuple(received)

  def run(self, kernel: Callable[[tuple], None], inputs: Sequence[Ref], results: Sequence[Ref],
          semaphores: Sequence[Ref]) -> None:
    """Runs kernel(grid position)."""
    del inputs, results, semaphores
    kernel(tuple(pl.program_id(axis) for axis in range(len(self.grid))))


@dataclasses.dataclass(frozen=True)
class RemoteCopyGrid:
  """The grid of a kernel that copies arrays to another device while it computes.

  On a chip with two cores, each core computes half of the batch or of the heads and runs its own
  copies, since semaphores belong to a core.
  """

  logical_grid: LogicalGrid
  transfer: RemoteCopy
  semantics: ClassVar[Semantics] = (
      "parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary", "arbitrary")

  @property
  def grid(self) -> tuple[int, int, int, int, int, int | jax.Array]:
    """The grid that is run: (cores, batch, head groups, halves, head parts, steps)."""
    (batch, heads, halves, parts, steps), cores = self.logical_grid, self.transfer.num_cores
    if batch % cores == 0:
      return cores, batch // cores, heads, halves, parts, steps
    if heads % cores == 0:
      return cores, batch, heads // cores, halves, parts, steps
    return 1, batch, heads, halves, parts, steps

  @property
  def num_steps(self) -> int | jax.Array:
    """The number of steps, inside of the kernel."""
    return _num_steps(self.grid)

  def logical_index(self, core: Any, batch: Any, head: Any, *rest: Any) -> tuple:
    """Maps a position in `grid` to one in `logical_grid`."""
    _, rows, heads, *_ = self.grid
    if rows < self.logical_grid[0]:
      return core * rows + batch, head, *rest
    return batch, core * heads + head, *rest

  def block_spec(self, spec: pl.BlockSpec) -> pl.BlockSpec:
    """Maps a block spec for `logical_grid` to one for `grid`."""
    logical_index_map = spec.index_map
    assert logical_index_map is not None
    def index_map(*arguments: Any) -> tuple:
      return logical_index_map(*self.logical_index(*arguments))
    return pl.BlockSpec(spec.block_shape, index_map)

  @property
  def inputs(self) -> list[jax.Array]:
    """The device's coordinates, and the arrays to send.

    Heads are merged into the last axis, so that memory does not pad them.
    """
    return [self.transfer.coordinates, *(
        x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x for x in self.transfer.arrays)]

  @property
  def input_specs(self) -> list[pl.BlockSpec]:
    """Memory of `inputs`."""
    return [pl.BlockSpec(memory_space=pltpu.SMEM), *[MEMORY] * len(self.transfer.arrays)]

  @property
  def results(self) -> list[jax.core.ShapedArray]:
    """Shapes of the arrays that arrive."""
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in self.inputs[1:]]

  def unpack(self, received: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the received arrays in the shapes of the sent ones."""
    return tuple(x.reshape(like.shape)
                 for x, like in zip(received, self.transfer.arrays, strict=True))

  @property
  def semaphores(self) -> tuple:
    """DMA semaphores [2, num_arrays]: of sends and of receives."""
    return (pltpu.SemaphoreType.DMA((2, len(self.transfer.arrays))),)

  @property
  def barrier(self) -> int:
    """Number of the barrier semaphore, one for each mesh, mesh axis and distance.

    With a shared semaphore, the signal of a device that has begun the next kernel could be taken
    for that of a device that has not begun this one. The devices of two meshes, or of two orders
    of one, have other neighbors. All processes compute the same number.
    """
    parts = self.transfer.mesh_number, self.transfer.axis_index, self.transfer.distance
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return FIRST_BARRIER + int.from_bytes(digest[:8], "big") % (END_BARRIERS - FIRST_BARRIER)

  def run(self, kernel: Callable[[tuple], None], inputs: Sequence[Ref], results: Sequence[Ref],
          semaphores: Sequence[Ref]) -> None:
    """Runs kernel(position in `logical_grid`), with copies from the first to the last step.

    Args:
      kernel: computes one grid step.
      inputs: references of `inputs`.
      results: references of `results`.
      semaphores: references of `semaphores`.
    """
    ids = [pl.program_id(axis) for axis in range(len(self.grid))]
    is_at = lambda index: functools.reduce(operator.and_, map(operator.eq, ids, index))
    (pairs,), (coordinates, *arrays) = semaphores, inputs
    device = functools.partial(self._device, coordinates)
    target = device(self.transfer.distance)
    copies = [
        pltpu.make_async_remote_copy(x, result, pairs.at[0, n], pairs.at[1, n], device_id=target)
        for n, (x, result) in enumerate(zip(arrays, results))]

    # 1. In the first step: signal to the sender, wait for the receiver, start the copies.
    @pl.when(is_at((0,) * len(ids)))
    def _() -> None:
      ready = pltpu.get_barrier_semaphore()
      pl.semaphore_signal(ready, 1, device_id=device(-self.transfer.distance))
      pl.semaphore_wait(ready, 1)
      for copy in copies:
        copy.start()

    # 2. In every step: compute.
    kernel(self.logical_index(*ids))

    # 3. In the last step: wait for the copies.
    last = [size - 1 for size in self.grid[1:-1]]
    @pl.when(is_at((0, *last, self.num_steps - 1)))
    def _() -> None:
      for copy in copies:
        copy.wait()

  def _device(self, coordinates: Ref, distance: int) -> dict[Any, int | jax.Array]:
    """Returns the mesh index of the device `distance` after this one along the axis.

    It names every axis. JAX would ask for the index along others where the kernel is lowered, which
    fails where it tracks the axes over which values vary (0.10.2 to 0.12.0.1).
    """
    size, found = self.transfer.axis_size, dict[Any, int | jax.Array]()
    for number, axis in enumerate(self.transfer.mesh_axes):
      own = coordinates[number]
      sends = number == self.transfer.axis_index
      found[axis] = lax.rem(own + distance % size, size) if sends else own
    return found


def _num_steps(grid: tuple[int | jax.Array, ...]) -> int | jax.Array:
  """Returns the size of the last axis of a grid, inside of the kernel."""
  steps = grid[-1]
  return steps if isinstance(steps, int) else pl.num_programs(len(grid) - 1)
