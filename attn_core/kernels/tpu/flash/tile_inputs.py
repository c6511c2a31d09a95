# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a tile of a TPU kernel: its queries, keys and values, and numbers that it reads.

Tiles are transposed, [keys, queries]: keys are along the sublanes and queries along the lanes, so
that a number per query is one dense row and a softmax reduces over sublanes. `TileInputs` collects
the operands of a kernel with their block specs before it is called, and returns readers that the
kernel body calls with its references.
"""

from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.tpu.flash.schedule import LANES, StepLists, Tiling
from attn_core.kernels.tpu.flash.step_list import PackedSchedule, Schedule

Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32
GRID_AXES = 5  # batch, head groups, halves, head parts, steps; see `Tiling`


class KernelRefs(NamedTuple):
  """References of a running kernel, and its position in the grid."""

  scalars: tuple[Ref, ...]  # in scalar memory
  arrays: tuple[Ref, ...]  # blocks in vector memory
  program_ids: tuple  # position in `remote_copy.LogicalGrid`
  num_steps: Index  # of the grid
  scratch: tuple[Ref, ...] = ()  # of the score mod and of the sums of its cotangents


class GridIndex(NamedTuple):
  """Position of a grid step."""

  batch: Index  # local batch row
  head_group: Index  # of the query heads that a step computes, among the local ones
  query_block: Index
  key_block: Index


class TokenRange(NamedTuple):
  """Consecutive tokens of a block."""

  start: Index
  length: int

  @property
  def slice(self) -> Any:
    return pl.ds(self.start, self.length)


class TileIndex(NamedTuple):
  """Queries and keys of one block and one query head that are computed at once."""

  grid: GridIndex
  head: Index  # query head, of those of the step
  queries: TokenRange
  keys: TokenRange
  # The least and the greatest number of tokens from the first key of the block to its first query,
  # of all blocks whose code this is; None: any.
  apart: tuple[int, int] | None = None

  @property
  def shape(self) -> tuple[int, int]:
    return self.keys.length, self.queries.length

  @property
  def code_head(self) -> int:
    """The head, in code that is written for each; 0 where it is written once, in a loop."""
    return known_or_0(self.head)


def known_or_0(index: Index) -> int:
  """Returns an index that is known when a kernel is written, or 0."""
  return index if isinstance(index, int) else 0


Reader = Callable[[KernelRefs, TileIndex], Any]  # gives a part of an operand that a tile needs
TokenReader = Callable[[KernelRefs, Index, TokenRange], jax.Array]  # [tokens, D or E] of a head


class TokenBlocks(NamedTuple):
  """Layout and blocks of an array [B, tokens, heads, width] in a kernel.

  Where `width` fills whole lanes, the heads are merged into the last axis, as they are in memory,
  so that packing copies nothing. Otherwise the heads come before the tokens.
  """

  batch: int
  length: int  # padded to whole blocks
  heads: int
  width: int
  block_heads: int
  block_length: int  # tokens of a block
  block_number: Callable[[Index, Index], Index]  # from (query block, key block)
  head_parts: int = 1  # groups of query heads that share a block

  @property
  def merged_heads(self) -> bool:
    """True if heads are merged into the last axis."""
    return self.width % LANES == 0

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the packed array."""
    if self.merged_heads:
      return self.batch, self.length, self.heads * self.width
    return self.batch, self.heads, self.length, self.width

  @property
  def block_shape(self) -> tuple[int, ...]:
    """Shape of a block of the packed array."""
    if self.merged_heads:
      return 1, self.block_length, self.block_heads * self.width
    return 1, self.block_heads, self.block_length, self.width

  def block_index(self, b: Index, h: Index, i: Index, j: Index) -> tuple:
    """Returns the block number along every axis of `shape`; see `TileInputs.block_spec`."""
    number = self.block_number(i, j)
    h = lax.div(h, jnp.int32(self.head_parts)) if self.head_parts > 1 else h
    return (b, number, h) if self.merged_heads else (b, h, number, 0)

  def pack(self, x: jax.Array) -> jax.Array:
    """Converts [B, tokens, heads, width] to `shape`."""
    x = pad(x, 1, self.length)
    return x.reshape(self.shape) if self.merged_heads else x.transpose(0, 2, 1, 3)

  def unpack(self, x: jax.Array) -> jax.Array:
    """Converts `shape` to [B, length, heads, width]."""
    if self.merged_heads:
      return x.reshape(self.batch, self.length, self.heads, self.width)
    return x.transpose(0, 2, 1, 3)

  def block_slices(self, b: Index, h: Index, i: Index, j: Index) -> tuple:
    """Returns the index into the packed array that gives a block; see `TileInputs.block_spec`."""
    numbers = self.block_index(b, h, i, j)
    return tuple(pl.ds(pl.multiple_of(n * size, size) if size > 1 else n, size)
                 for n, size in zip(numbers, self.block_shape))

  def slices(self, head: Index, tokens: TokenRange) -> tuple:
    """Returns the index into a block that gives tokens of a head, [tokens, width]."""
    if self.merged_heads:
      return 0, tokens.slice, pl.ds(whole_lanes(head * self.width), self.width)
    return 0, head, tokens.slice


class TileInputs:
  """Operands of a kernel, in the order of its arguments; the schedule comes first."""

  def __init__(self, schedule: Schedule, lists: StepLists, tiling: Tiling, *, by_keys: bool):
    self.word_sizes = tiling.word_sizes(by_keys)
    packed = PackedSchedule.pack(schedule, self.word_sizes)
    self.scalars: list[Any] = [x for x in packed if x is not None]
    self.arrays: list[jax.Array] = []
    self.specs: list[pl.BlockSpec] = []
    self.tiling, self.lists, self.by_keys = tiling, lists, by_keys
    self.list_length: int = schedule.rows.shape[1]
    self.num_steps = lists.longest  # of the grid

  def query_blocks(self, shape: tuple[int, ...]) -> TokenBlocks:
    """Returns the layout of [B, T, H, D or E], in blocks of queries."""
    batch, _, heads, width = shape
    return TokenBlocks(batch, self.tiling.padded_queries, heads, width, self.tiling.query_heads,
                       self.tiling.block_q, lambda i, j: i)

  def key_blocks(self, shape: tuple[int, ...]) -> TokenBlocks:
    """Returns the layout of [B, S, K, D or E], in blocks of keys."""
    batch, _, heads, width = shape
    return TokenBlocks(batch, self.tiling.padded_keys, heads, width, self.tiling.key_heads,
                       self.tiling.block_kv, lambda i, j: j, self.tiling.head_parts)

  def add_tokens(self, blocks: TokenBlocks, packed: jax.Array) -> TokenReader:
    """Adds the result of `blocks.pack`; returns a reader of tokens of a head."""
    ref = self.add_array(packed, blocks.block_shape, blocks.block_index)
    return lambda refs, head, tokens: ref(refs)[blocks.slices(head, tokens)]

  def step(self, scalars: tuple[Ref, ...], program_ids: tuple) -> tuple[GridIndex, Index, Index]:
    """Returns (position, tile kinds, flags) of a step; see `KernelRefs.program_ids`."""
    batch, head_group, half, part, n = program_ids
    if self.by_keys and self.tiling.head_parts > 1:
      head_group = head_group * self.tiling.head_parts + half * self.tiling.parts_of_half + part
    row, column, kinds, flags = self.schedule_entry(
        scalars, self.lists.list_of(batch, head_group, half), n)
    query_block, key_block = (column, row) if self.by_keys else (row, column)
    return GridIndex(batch, head_group, query_block, key_block), kinds, flags

  def schedule_entry(self, scalars: tuple[Ref, ...], list_number: Index, n: Index) -> tuple:
    """Returns (row, column, tile kinds, flags) of step n of a list of the schedule."""
    blocks, kinds, *_ = *scalars[:self.word_sizes.words], None
    return PackedSchedule(blocks, kinds).step(list_number * self.list_length + n, self.word_sizes)

  def block_spec(self, block_shape: tuple[int, ...],
                 index: Callable[[Index, Index, Index, Index], tuple]) -> pl.BlockSpec:
    """Returns the spec of the block index(b, h, i, j).

    Args:
      block_shape: shape of the block.
      index: maps batch row, group of query heads, query block and key block of a step to the number
        of the block along every axis.
    """
    def index_map(*arguments: Any) -> tuple:
      program_ids, scalars = arguments[:GRID_AXES], arguments[GRID_AXES:]
      grid, _, _ = self.step(scalars, program_ids)
      return index(*grid)
    return pl.BlockSpec(block_shape, index_map)

  def add_scalars(self, x: jax.Array) -> Callable[[KernelRefs], Ref]:
    """Adds an int32 or float32 array [n] in scalar memory; returns a function to its reference."""
    assert x.ndim == 1, x.shape  # scalar memory pads the last axis of others to whole lanes
    self.scalars.append(x)
    number = len(self.scalars) - 1
    return lambda refs: refs.scalars[number]

  def add_array(self, x: jax.Array, block_shape: tuple[int, ...],
                index: Callable[[Index, Index, Index, Index], tuple],
                ) -> Callable[[KernelRefs], Ref]:
    """Adds an array in blocks, see `block_spec`; returns a function to a block's reference."""
    self.arrays.append(x)
    self.specs.append(self.block_spec(block_shape, index))
    number = len(self.arrays) - 1
    return lambda refs: refs.arrays[number]

  def add_per_pair(self, x: jax.Array) -> Reader:
    """Adds [B or 1, H or 1, T or 1, S or 1]; returns a reader of [keys or 1, queries or 1].

    The reader of [B or 1, H or 1, 1, S] returns [keys, queries]; see `add_per_key`.
    """
    tiling = self.tiling
    if x.shape[2] == 1 < x.shape[3]:
      return self._add_row_per_key(x)
    # In the kernel, as numbers of 32 bits: XLA would write all numbers once more.
    transposes = min(x.shape[2:]) > 1
    wide = _wide_dtype(x)
    order = 1 if transposes else -1  # queries first, or keys
    x = x if transposes else x.swapaxes(2, 3)
    rows, heads, *lengths = x.shape
    sizes = (tiling.block_q, tiling.block_kv)[::order]
    for axis, padded in zip((2, 3), (tiling.padded_queries, tiling.padded_keys)[::order]):
      x = pad(x, axis, padded) if x.shape[axis] > 1 else x
    choose = lambda n, length, other=0: n if length > 1 else other
    ref = self.add_array(
        x, (1, *map(choose, (tiling.query_heads, *sizes), (heads, *lengths), (1, 1, 1))),
        lambda b, h, i, j: tuple(map(choose, (b, h, *(i, j)[::order]), (rows, heads, *lengths))))
    def read(refs: KernelRefs, tile: TileIndex) -> jax.Array:
      tokens = [x.slice if length > 1 else slice(0, 1) for x, length in zip(
          (tile.queries, tile.keys)[::order], lengths)]
      found = ref(refs)[0, tile.head if heads > 1 else 0, *tokens]
      return found.astype(wide).T if transposes else found
    return read

  def add_per_query(self, x: jax.Array) -> Reader:
    """Adds int32 [B or 1, T]; returns a reader of [1, queries]."""
    tiling = self.tiling
    x = pad(x[:, None], 2, tiling.padded_queries)
    ref = self.add_array(x, (1, 1, tiling.block_q),
                         lambda b, h, i, j: (b if x.shape[0] > 1 else 0, 0, i))
    return lambda refs, tile: ref(refs)[0, :, tile.queries.slice]

  def add_per_key(self, x: jax.Array) -> Reader:
    """Adds int32 [B or 1, S]; returns a reader of [keys, queries].

    Keys are along the lanes in memory, because a number in each sublane would take as much as
    LANES numbers; those of a tile are transposed when they are read.
    """
    return self._add_row_per_key(x[:, None, None])

  def _add_row_per_key(self, x: jax.Array) -> Reader:
    """Adds [B or 1, H or 1, 1, S]; returns a reader of [keys, queries], of 32 bits."""
    tiling = self.tiling
    x = pad(x, 3, tiling.padded_keys)
    rows, heads = x.shape[:2]
    wide = _wide_dtype(x)
    ref = self.add_array(
        x, (1, tiling.query_heads if heads > 1 else 1, 1, tiling.block_kv),
        lambda b, h, i, j: (b if rows > 1 else 0, h if heads > 1 else 0, 0, j))
    def read(refs: KernelRefs, tile: TileIndex) -> jax.Array:
      row = ref(refs)[0, tile.head if heads > 1 else 0, :, tile.keys.slice].astype(wide)
      column = jnp.broadcast_to(row, (LANES, tile.keys.length)).T
      return jnp.concatenate([column] * (tile.queries.length // LANES), 1)
    return read

  def add_per_head(self, x: jax.Array) -> Reader:
    """Adds [B or 1, H or 1]; returns a reader of the number of a row and a head, float32 [1, 1]."""
    rows, heads = x.shape
    ref = self.add_scalars(x.astype(jnp.float32).reshape(-1))
    def read(refs: KernelRefs, tile: TileIndex) -> jax.Array:
      head = tile.grid.head_group * self.tiling.query_heads + tile.head if heads > 1 else 0
      return jnp.full((1, 1), ref(refs)[(tile.grid.batch * heads if rows > 1 else 0) + head])
    return read

  def add_per_batch(self, x: jax.Array) -> Reader:
    """Adds int32 [B or 1]; returns a reader of the number of a batch row."""
    ref = self.add_scalars(x)
    return lambda refs, tile: ref(refs)[tile.grid.batch if x.shape[0] > 1 else 0]


def whole_lanes(start: Index) -> Index:
  """Says to the compiler that a number of elements is a multiple of LANES."""
  return start if isinstance(start, int) else pl.multiple_of(start, LANES)


def _wide_dtype(x: jax.Array) -> DTypeLike:
  """Returns the dtype of 32 bits for the numbers of `x`."""
  return jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32


def pad(x: jax.Array, axis: int, length: int) -> jax.Array:
  """Pads an axis with zeros at its end up to `length`."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, length - x.shape[axis])
  return jnp.pad(x, widths) if length > x.shape[axis] else x
