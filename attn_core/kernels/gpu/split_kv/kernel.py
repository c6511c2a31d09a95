"""Few queries and many keys on Hopper: the keys in parts, a block of threads each, merged by lse.

  scores^T = K Q^T,   out^T = V^T P^T,   of 64 keys at a time
  lse = log(sum over parts of exp(lse_i)),   out = sum over parts of out_i * exp(lse_i - lse)

Keys are the rows of the products, so few queries cost little, and a query's results are a column of
its own. One warpgroup copies blocks of keys and values into rings of stages, as far ahead as these
reach, another computes. Where it can, a block of threads takes less than half of a processor's
shared memory, so that one copies while another one begins or ends.

What a part is depends on the request alone, and `merge` adds parts in their order: a request's
bits are the same in any batch. Flash-decoding, https://pytorch.org/blog/flash-decoding/.
`fold` is what computes.

Letters: L lines: a key head of a batch row and up to 32 of its rows; N parts of a line; R rows
(queries and heads of a group, padded); C keys of a block; D query and key width, E value width, E'
padded.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.split_kv import quantized_kv as small
from attn_core.kernels.gpu.flash.kernel_params import drain
from attn_core.types import cdiv

BLOCK = mosaic.ROW_TILE  # C
ROWS = 8  # R is a multiple, up to MOST_ROWS, for which there are registers
MOST_ROWS = 32
PART_BLOCKS = 8  # of a part, but for caches of more than MOST_PARTS such parts
MOST_PARTS = 32
WIDTHS = (64, 80, 96, 128, 192, 256)  # D and E
MOST_STAGES = 6
OTHER_BYTES = 3328  # for barriers, alignment, and what reductions across warps need
ALIGNED = 1024  # bytes that operands begin at multiples of
SMALL_BYTES = 2048  # more of these, for keys and values in 8 bits
# A processor's shared memory holds two blocks of threads, each with a reserve of the system's.
HALF = (mosaic.SHARED_MEMORY + 1024) // 2 - 1024


class Shape(NamedTuple):
  """The static numbers of a kernel; hashable."""

  rows: int  # R
  width: int  # D
  value_width: int  # E
  value_rows: int  # E padded to rows of a product; what is in the padding is of no account
  stages: tuple[int, int]  # of keys, of values
  blocks: int  # of keys, of a part
  parts: int  # N
  stored: small.Small | None = None  # of keys and values in 8 bits


class Scratch(NamedTuple):
  """Shared memory and barriers; a barrier is for every stage, or for the queries."""

  query: Any  # [R, D]
  key: Any  # [stages, C, D]
  value: Any  # [stages, C, E']
  scales: tuple  # float32 of keys and of values in 8 bits, [stages, C] or [stages, C, QUAD], or ()
  converted: Any  # [C, E'] of values in 8 bits, or None
  weights: Any  # [R, C]
  out: Any  # float32 [E', R]
  lse: Any  # float32 [R]
  query_full: Any
  key_full: Any
  value_full: Any
  key_free: Any
  value_free: Any


def rows_of(count: int) -> int:
  """R for so many rows of a key head."""
  return min(cdiv(count, ROWS) * ROWS, MOST_ROWS)


def shape_of(count: int, widths: tuple[int, int], blocks: int, part_blocks: int | None,
             stored: small.Small | None = None) -> Shape:
  """How to compute `count` rows of a key head.

  Args:
    widths: (D, E).
    blocks: of keys that a line can have.
    part_blocks: of a part; None: chosen.
    stored: of keys and values in 8 bits.
  """
  if part_blocks is None:
    part_blocks = max(PART_BLOCKS, cdiv(blocks, MOST_PARTS))
  shape = Shape(rows_of(count), *widths, cdiv(widths[1], BLOCK) * BLOCK, (1, 1), part_blocks,
                cdiv(blocks, part_blocks), stored)
  memory = HALF if two_at_once(shape) else mosaic.SHARED_MEMORY
  for number in range(3, 2 * MOST_STAGES + 1):  # one more of keys, one more of values, ...
    more = shape._replace(stages=(cdiv(number, 2), number // 2))
    if shared_memory(more) > memory:
      break
    shape = more
  return shape


def two_at_once(shape: Shape) -> bool:
  """Whether a processor runs two blocks of threads at once: their registers are few enough."""
  rows, width = shape.rows, shape.width
  fits = rows <= 16 and width <= 192 and shape.value_width <= 128
  if shape.stored is None or not fits:
    return fits
  # Keys in 8 bits come to the products in registers.
  return rows <= 8 and width <= 128 if shape.stored.floats else rows * width <= 2048


def shared_memory(shape: Shape) -> int:
  """Bytes that a part takes."""
  keys, values = shape.stages
  staged = BLOCK * (keys * shape.width + values * shape.value_rows)
  own = cdiv(2 * shape.rows * shape.width, ALIGNED) * ALIGNED + shape.rows * (
      2 * BLOCK + 4 * (shape.value_rows + 1))
  if shape.stored is None:
    return 2 * staged + own + OTHER_BYTES
  staged += (keys + values) * shape.stored.scale_bytes(BLOCK)
  return staged + 2 * BLOCK * shape.value_rows + own + OTHER_BYTES + SMALL_BYTES


def together(shape: Shape, values: bool, tokens: int) -> int:
  """Tokens of keys or values that are copied together, where so many lie side by side."""
  # Into the first columns of a stage go as many tokens as a tile has rows.
  padded = values and shape.value_rows > shape.value_width
  return min(tokens, mosaic.COPIED_TOKENS) if padded else tokens


def scratch_of(shape: Shape, dtype, tokens: int = BLOCK) -> Scratch:
  """What a part needs.

  Args:
    shape: of it.
    dtype: of queries.
    tokens: of a block of keys that lie side by side.
  """
  keys, values = shape.stages
  kind, scales, converted = dtype, (), None
  if shape.stored is not None:
    kind = shape.stored.dtype
    scales = tuple(plgpu.SMEM((n, *scale), jnp.float32) for n in shape.stages
                   for scale in shape.stored.scale_shapes(BLOCK))
    converted = mosaic.operand((BLOCK, shape.value_rows), dtype, shape.value_width)
  copies = [BLOCK // together(shape, values, tokens) + (BLOCK // tokens if scales else 0)
            for values in (False, True)]
  full, free = ([plgpu.Barrier(num_arrivals=m, num_barriers=n)
                 for m, n in zip(arrivals, shape.stages)] for arrivals in (copies, (1, 1)))
  return Scratch(
      mosaic.operand((shape.rows, shape.width), dtype),
      mosaic.operand((keys, BLOCK, shape.width), kind),
      mosaic.operand((values, BLOCK, shape.value_rows), kind, shape.value_width), scales, converted,
      # Both operands of a product are swizzled in the same way.
      mosaic.operand((shape.rows, BLOCK), dtype, mosaic.tile_columns(shape.value_width, dtype)),
      mosaic.operand((shape.value_rows, shape.rows), jnp.float32),
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
  return (jax.core.ShapedArray((lines, shape.parts, shape.value_rows, shape.rows), jnp.float32),
          jax.core.ShapedArray((lines, shape.parts, shape.rows), jnp.float32))


def copy_blocks(shape: Shape, scratch: Scratch, visit: Visit, locate, copy):
  """Fills the stages with the blocks of a visit.

  Args:
    visit: which.
    locate: n -> where the n-th block of the line is.
    copy: copy(n, place, values, target) starts the copies of its keys or values to a target, which
      is a stage, that of the scales (or None), and the barrier of both.
  """
  rings = (
      (False, scratch.key, scratch.key_full, scratch.key_free, shape.stages[0]),
      (True, scratch.value, scratch.value_full, scratch.value_free, shape.stages[1]))

  def stage_of(ring, values, slot):
    if not values or shape.value_rows == shape.value_width:
      return ring.at[slot]
    return ring.at[slot, :, pl.ds(0, shape.value_width)]

  def fill(n, _):
    number, place = n - visit.first, locate(n)
    for values, ring, full, free, stages in rings:
      slot = lax.rem(number, mosaic.int32(stages))
      pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
      scales = scratch.scales[values].at[slot] if scratch.scales else None
      copy(n, place, values, (stage_of(ring, values, slot), scales, full.at[slot]))
    return ()

  lax.fori_loop(visit.first, visit.end, fill, ())
  for *_, free, stages in rings:
    drain(free, stages, visit.end - visit.first)


def along(x, shape, axis: int):
  """A vector along an axis of `shape`, repeated along the other."""
  return lax.broadcast_in_dim(x, shape, [axis])


def store_turned(ref, x):
  """A tile in registers to shared memory, rows as columns."""
  ref.T[...] = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
