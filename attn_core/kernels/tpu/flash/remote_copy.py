"""A ring's transfers inside its kernels: while a hop is computed, its arrays go to another device.

The first step of a kernel starts remote copies from memory to memory, its last one awaits them. So
nothing depends on what the compiler overlaps, in a loop neither. Nobody reads what comes before
the kernel ends: what it computes with and what comes are the two buffers of a ring, and the next
hop's kernel changes their parts.

A device may be ahead of the one that it sends to, which may still use its buffer until its own
kernel of the hop begins. So a kernel first tells the device that it gets from that it has begun,
and sends when the device that it sends to has said so.

JAX's guide to such kernels, https://docs.jax.dev/en/latest/pallas/tpu/distributed.html.
"""

import functools
import operator
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn_core.kernels.common.contract import Cargo

# Kernels that others wrote count their semaphores from 0.
FIRST_CHANNEL, MOST_AXES = 1024, 16
MEMORY = pl.BlockSpec(memory_space=pltpu.HBM)


class Alone(NamedTuple):
  """How the grid (batch, heads, steps) of a kernel is run that sends nothing."""

  grid: tuple[int, int, int]
  semantics = ("parallel", "parallel", "arbitrary")
  inputs, results, semaphores, channel = (), (), (), None

  @property
  def cut(self):
    return self.grid

  def block_spec(self, spec: pl.BlockSpec) -> pl.BlockSpec:
    return spec

  def unpack(self, arrived) -> tuple:
    return tuple(arrived)

  def run(self, kernel, inputs, results, semaphores) -> None:
    del inputs, results, semaphores
    kernel(tuple(pl.program_id(axis) for axis in range(3)))


class Route(NamedTuple):
  """The same of a kernel that sends its cargo meanwhile.

  Where a chip has two cores, one computes half of the batch or of the heads, and sends; semaphores
  belong to a core.
  """

  grid: tuple[int, int, int]
  cargo: Cargo
  semantics = ("parallel", "arbitrary", "arbitrary", "arbitrary")

  @property
  def cut(self) -> tuple[int, int, int, int]:
    """The grid that is run: (parts, batch, heads, steps)."""
    (batch, heads, steps), cores = self.grid, self.cargo.cores
    if batch % cores == 0:
      return cores, batch // cores, heads, steps
    return (cores, batch, heads // cores, steps) if heads % cores == 0 else (1, *self.grid)

  def place(self, part, batch, head, step):
    """The place in `grid` of one in `cut`."""
    _, rows, heads, _ = self.cut
    if rows < self.grid[0]:
      return part * rows + batch, head, step
    return batch, part * heads + head, step

  def block_spec(self, spec: pl.BlockSpec) -> pl.BlockSpec:
    """For `cut` what a spec is for `grid`."""
    def index_map(part, batch, head, step, *scalars):
      return spec.index_map(*self.place(part, batch, head, step), *scalars)
    return pl.BlockSpec(spec.block_shape, index_map)

  @property
  def inputs(self) -> list:
    """What is sent; heads are side by side, or memory would pad them to whole tiles."""
    return [x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x for x in self.cargo.arrays]

  @property
  def results(self) -> list:
    """The shapes of what comes."""
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in self.inputs]

  def unpack(self, arrived) -> tuple:
    """What came, in the shapes of the cargo."""
    return tuple(x.reshape(like.shape)
                 for x, like in zip(arrived, self.cargo.arrays, strict=True))

  @property
  def semaphores(self) -> tuple:
    """[2, arrays]: of what goes and of what comes."""
    return (pltpu.SemaphoreType.DMA((2, len(self.cargo.arrays))),)

  @property
  def channel(self) -> int:
    """Which semaphore says that a kernel has begun: one for every way that kernels send.

    A device that has begun the next kernel would else be taken for one that has not begun this.
    """
    return FIRST_CHANNEL + MOST_AXES * self.cargo.distance + self.cargo.axis_number

  def run(self, kernel, inputs, results, semaphores) -> None:
    """Runs kernel(place in `grid`), the transfers from the first step to the last one.

    Args:
      kernel: one step.
      inputs: references of `inputs`.
      results: of `results`.
      semaphores: of `semaphores`.
    """
    ids = [pl.program_id(axis) for axis in range(4)]
    is_at = lambda place: functools.reduce(operator.and_, map(operator.eq, ids, place))
    (pairs,), to = semaphores, self._member(self.cargo.distance)
    copies = [pltpu.make_async_remote_copy(x, result, pairs.at[0, n], pairs.at[1, n], device_id=to)
              for n, (x, result) in enumerate(zip(inputs, results))]

    @pl.when(is_at((0, 0, 0, 0)))
    def _():
      ready = pltpu.get_barrier_semaphore()
      pl.semaphore_signal(ready, 1, device_id=self._member(-self.cargo.distance))
      pl.semaphore_wait(ready, 1)
      for copy in copies:
        copy.start()

    kernel(self.place(*ids))

    @pl.when(is_at((0, *(size - 1 for size in self.cut[1:]))))
    def _():
      for copy in copies:
        copy.wait()

  def _member(self, distance: int) -> dict:
    """The device so many members on."""
    axis, members = self.cargo.axis, self.cargo.members
    return {axis: lax.rem(lax.axis_index(axis) + distance % members, members)}
