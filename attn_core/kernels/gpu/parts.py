"""Few queries and many keys on Hopper: the keys in parts, a block of threads each, merged by lse.

  scores^T = K Q^T,   out^T = V^T P^T,   of 64 keys at a time
  lse = log(sum over parts of exp(lse_i)),   out = sum over parts of out_i * exp(lse_i - lse)

Keys are the rows of the products, so few queries cost little, and a query's results are a column of
its own. One warpgroup copies blocks of keys and values into rings of stages, as far ahead as these
reach, another computes. Where it can, a block of threads takes less than half of a processor's
shared memory, so that one copies while another one begins or ends.

What a part is depends on the request alone, and `merge` adds parts in their order: a request's
bits are the same in any batch. Flash-decoding, https://pytorch.org/blog/flash-decoding/.

Letters: L lines: a key head of a batch row and up to 32 of its rows; N parts of a line; R rows
(queries and heads of a group, padded); C keys of a block; D query and key width, E value width.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic, products
from attn_core.kernels.gpu.logits import Logits
from attn_core.kernels.gpu.setting import drain
from attn_core.kernels.softmax import LOG2E
from attn_core.types import cdiv

BLOCK = mosaic.ROW_TILE  # C
ROWS = 8  # R is a multiple, up to MOST_ROWS, for which there are registers
MOST_ROWS = 32
PART_BLOCKS = 8  # of a part, but for caches of more than MOST_PARTS such parts
MOST_PARTS = 32
WIDTHS = (64, 80, 96, 128, 192, 256)  # of D
VALUE_WIDTHS = (64, 128, 192, 256)  # E makes rows of a product
MOST_STAGES = 6
OTHER_BYTES = 3328  # for barriers, alignment, and what reductions across warps need
# A processor's shared memory holds two blocks of threads, each with a reserve of the system's.
HALF = (mosaic.SHARED_MEMORY + 1024) // 2 - 1024


class Shape(NamedTuple):
  """The static numbers of a kernel; hashable."""

  rows: int  # R
  width: int  # D
  value_width: int  # E
  stages: tuple[int, int]  # of keys, of values
  blocks: int  # of keys, of a part
  parts: int  # N


class Scratch(NamedTuple):
  """Shared memory and barriers; a barrier is for every stage, or for the queries."""

  query: Any  # [R, D]
  key: Any  # [stages, C, D]
  value: Any  # [stages, C, E]
  weights: Any  # [R, C]
  out: Any  # float32 [E, R]
  lse: Any  # float32 [R]
  query_full: Any
  key_full: Any
  value_full: Any
  key_free: Any
  value_free: Any


def rows_of(count: int) -> int:
  """R for so many rows of a key head."""
  return min(cdiv(count, ROWS) * ROWS, MOST_ROWS)


def shape_of(count: int, widths: tuple[int, int], blocks: int, part_blocks: int | None) -> Shape:
  """How to compute `count` rows of a key head.

  Args:
    widths: (D, E).
    blocks: of keys that a line can have.
    part_blocks: of a part; None: chosen.
  """
  if part_blocks is None:
    part_blocks = max(PART_BLOCKS, cdiv(blocks, MOST_PARTS))
  shape = Shape(rows_of(count), *widths, (1, 1), part_blocks, cdiv(blocks, part_blocks))
  memory = HALF if two_at_once(shape) else mosaic.SHARED_MEMORY
  for number in range(3, 2 * MOST_STAGES + 1):  # one more of keys, one more of values, ...
    more = shape._replace(stages=(cdiv(number, 2), number // 2))
    if shared_memory(more) > memory:
      break
    shape = more
  return shape


def two_at_once(shape: Shape) -> bool:
  """Whether a processor runs two blocks of threads at once: their registers are few enough."""
  return shape.rows <= 16 and shape.width <= 192 and shape.value_width <= 128


def shared_memory(shape: Shape) -> int:
  """Bytes that a part takes."""
  keys, values = shape.stages
  staged = BLOCK * (keys * shape.width + values * shape.value_width)
  own = shape.rows * (shape.width + BLOCK)
  return 2 * (staged + own) + 4 * shape.rows * (shape.value_width + 1) + OTHER_BYTES


def scratch_of(shape: Shape, dtype, copies: int = 1) -> Scratch:
  """What a part needs, where so many copies fill a stage."""
  keys, values = shape.stages
  full, free = ([plgpu.Barrier(num_arrivals=arrivals, num_barriers=n) for n in shape.stages]
                for arrivals in (copies, 1))
  return Scratch(
      mosaic.operand((shape.rows, shape.width), dtype),
      mosaic.operand((keys, BLOCK, shape.width), dtype),
      mosaic.operand((values, BLOCK, shape.value_width), dtype),
      mosaic.operand((shape.rows, BLOCK), dtype),
      mosaic.operand((shape.value_width, shape.rows), jnp.float32),
      plgpu.SMEM((shape.rows,), jnp.float32), plgpu.Barrier(), *full, *free)


class Visit(NamedTuple):
  """The blocks of keys that a part computes, in ascending order; int32."""

  first: Any
  first_full: Any  # those before it need the mask; None: there are none
  end_full: Any  # those from it on need the mask, too
  end: Any


def visit_of(shape: Shape, part, line: Visit) -> Visit:
  """What a part visits of a line's blocks; parts are cut at multiples of their size."""
  first = part * mosaic.int32(shape.blocks)
  end = jnp.minimum(first + mosaic.int32(shape.blocks), line.end)
  first = jnp.maximum(first, line.first)
  within = lambda x: jnp.clip(x, first, jnp.maximum(first, end))
  return Visit(first, None if line.first_full is None else within(line.first_full),
               within(line.end_full), end)


def live_parts(shape: Shape, first, end):
  """(first, end) of the parts that visit some of the blocks first..end - 1 of a line, int32."""
  return (first // shape.blocks).astype(jnp.int32), cdiv(end, shape.blocks).astype(jnp.int32)


def partial_results(shape: Shape, lines: int):
  """(out, lse) of all parts: lse times log2(e)."""
  return (jax.core.ShapedArray((lines, shape.parts, shape.value_width, shape.rows), jnp.float32),
          jax.core.ShapedArray((lines, shape.parts, shape.rows), jnp.float32))


def copy_blocks(shape: Shape, scratch: Scratch, visit: Visit, locate, copy):
  """Fills the stages with the blocks of a visit.

  Args:
    visit: which.
    locate: n -> where the n-th block of the line is.
    copy: copy(n, place, values, target) starts the copies of its keys or values to a target, which
      is a stage and its barrier.
  """
  rings = (
      (False, scratch.key, scratch.key_full, scratch.key_free, shape.stages[0]),
      (True, scratch.value, scratch.value_full, scratch.value_free, shape.stages[1]))

  def fill(n, _):
    number, place = n - visit.first, locate(n)
    for values, ring, full, free, stages in rings:
      slot = lax.rem(number, mosaic.int32(stages))
      pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
      copy(n, place, values, (ring.at[slot], full.at[slot]))
    return ()

  lax.fori_loop(visit.first, visit.end, fill, ())
  for *_, free, stages in rings:
    drain(free, stages, visit.end - visit.first)


# --- What the computing warpgroup does. ----------------------------------------------------------


class _Running(NamedTuple):
  """The softmax of the keys seen so far; see `kernels.softmax.Running`."""

  highest: Any  # [R]: logits times log2(e); -inf before the first visible key
  total: Any  # [C, R]: to be summed over C
  output: Any  # [E, R]


class Fold(NamedTuple):
  """Folds blocks of keys and values, as they arrive, into results of a part."""

  shape: Shape
  logits: Logits
  extras: Any  # of `Logits`
  tile: Callable  # n -> tile of `Logits`: rows and the keys of the n-th block of the line
  scratch: Scratch

  def run(self, visit: Visit, out, lse):
    """From the first block to the copy of the results to references [E, R] and [R]."""
    shape = self.shape
    running = _Running(
        mosaic.filled(-jnp.inf, (shape.rows,), mosaic.COLUMNS),
        mosaic.filled(0, (BLOCK, shape.rows), mosaic.TILE),
        mosaic.filled(0, (shape.value_width, shape.rows), mosaic.TILE))
    plgpu.barrier_wait(self.scratch.query_full)
    bounds = visit.first, visit.first_full, visit.end_full, visit.end
    if visit.first_full is None:
      bounds = None, visit.first, visit.end_full, visit.end
    for first, end, masked in zip(bounds, bounds[1:], (True, False, True)):
      if first is not None:
        running = lax.fori_loop(first, end, functools.partial(
            lambda masked, n, x: self.step(n, n - visit.first, x, masked), masked), running)
    self.write(running, out, lse)

  def step(self, n, number, running: _Running, masked: bool) -> _Running:
    """Folds in the n-th block of the line, the `number`-th of the part."""
    scratch, unit = self.scratch, self.logits.unit
    key, value = (lax.rem(number, mosaic.int32(stages)) for stages in self.shape.stages)
    plgpu.barrier_wait(scratch.key_full.at[key])
    scores, _ = products.beside(scratch.key.at[key], scratch.query.T)
    plgpu.barrier_arrive(scratch.key_free.at[key])
    scores = scores + 0.0 * scores  # NaN where not finite
    if masked:
      plgpu.barrier_wait(scratch.value_full.at[value])
      scores = scores + along(self.shield(value), scores.shape, 0)
    logits, _ = self.logits.of(self.extras, self.tile(n) if masked else None, scores, masked)
    highest = jnp.maximum(running.highest, logits.max(axis=0) * unit)
    # While a row has seen nothing, its highest is -inf, and -inf - -inf would be NaN.
    reference = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = jnp.exp2(logits * unit - along(reference, logits.shape, 1))
    shrink = jnp.exp2(running.highest - reference)
    store_turned(scratch.weights, weights)
    plgpu.commit_smem()
    if not masked:
      plgpu.barrier_wait(scratch.value_full.at[value])
    def meanwhile():
      return (running.total * along(shrink, running.total.shape, 1) + weights,
              running.output * along(shrink, running.output.shape, 1))
    fresh, (total, output) = products.beside(scratch.value.at[value].T, scratch.weights.T,
                                              meanwhile)
    plgpu.barrier_arrive(scratch.value_free.at[value])
    return _Running(highest, total, output + fresh)

  def shield(self, slot):
    """Replaces values that are not finite by 0; returns NaN [C] for their keys, 0 for others.

    0 * NaN is NaN, and would reach those from whom the key is hidden.
    """
    def columns(n, spoilt):  # few at a time, for the sake of registers
      values = self.scratch.value.at[slot, :, pl.ds(n * BLOCK, BLOCK)]
      value = mosaic.load(values, mosaic.TILE).astype(jnp.float32)
      zero = 0.0 * value  # or NaN
      values[...] = jnp.where(zero == 0.0, value, 0.0).astype(values.dtype)
      return spoilt + zero.sum(axis=1)
    spoilt = lax.fori_loop(
        mosaic.int32(0), mosaic.int32(self.shape.value_width // BLOCK), columns,
        mosaic.filled(0, (BLOCK,), mosaic.ROWS))
    plgpu.commit_smem()
    return spoilt

  def write(self, running: _Running, out, lse):
    """Normalises and copies a part's results."""
    scratch, (highest, total, output) = self.scratch, running
    # A row that saw a value which is not finite is NaN in all its columns, and in its lse.
    total = total.sum(axis=0) + 0.0 * output.sum(axis=0)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    scratch.out[...] = output * along(1 / total, output.shape, 1)
    scratch.lse[...] = jnp.where(empty, -jnp.inf, highest + jnp.log(total) * LOG2E)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.out, out)
    plgpu.copy_smem_to_gmem(scratch.lse, lse)
    plgpu.wait_smem_to_gmem(0)


def along(x, shape, axis: int):
  """A vector along an axis of `shape`, repeated along the other."""
  return lax.broadcast_in_dim(x, shape, [axis])


def store_turned(ref, x):
  """A tile in registers to shared memory, rows as columns."""
  ref.T[...] = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
