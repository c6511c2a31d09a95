# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Unions of lists: the key blocks that any query of a tile lists, and bits that say which.

All unions of an attention are found before its loops, by the same operations in the forward and in
the backward, so that XLA computes them once where both are in one program. A bit for each list and
key block takes T * S / 8 bytes for lists of single keys. Lists for which unions are used name at
least a sixteenth of all keys, in 4 bytes each: that is twice as much. It is not where there are few
queries, as a tile has bits for all of its own, or where `block_q` divides no tile, so that each
query has bits. Unions take T * S / 64 bytes more for each batch row whose lists or mask differ.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.xla import cpu_math, tile_ops, tiling
from attn_core.kernels.xla.selected_steps import Inputs
from attn_core.masks import block_map, tile as tile_lib
from attn_core.types import cdiv

TILE = 256  # queries of a step
CHUNK = 256  # keys of a step
WHOLE = 2 / 3  # of the blocks of a chunk: if as many are listed, all are taken
BITS = 8  # of a number

Index = tuple[jax.Array, jax.Array, jax.Array]  # of a batch row, a step of heads, and a tile


class Unions(NamedTuple):
  """The key blocks that the queries of tiles list.

  Axes of all tiles: [B or 1, steps of heads or 1, tiles, ..]; see `index`.
  """

  # uint8 [.., groups of lists, key blocks and one more chunk, which may begin with the last]:
  # bit n is that of list n * groups + group.
  bits: jax.Array
  blocks: jax.Array  # int32 [.., whole chunks], ascending: the union, and some that no query lists
  num_chunks: jax.Array  # int32 [..]: of the union


def num_blocks(inputs: Inputs) -> int:
  """Returns the key blocks of all keys."""
  return cdiv(inputs.operands.key.shape[1], inputs.lists.block_kv)


def chunk_blocks(inputs: Inputs) -> int:
  """Returns the key blocks of a chunk."""
  return max(1, CHUNK // inputs.lists.block_kv)


def step_heads(inputs: Inputs) -> int:
  """Returns the key heads of a step, which have one list."""
  key_heads = inputs.operands.key.shape[2]
  if inputs.lists.indices.shape[1] > 1:
    key_heads = math.gcd(key_heads, inputs.lists.group // inputs.group)
  keys = max(CHUNK, inputs.lists.block_kv)  # of a chunk
  most = tiling.STEP_SCORES_BACKWARD // (inputs.group * TILE * keys)
  return max(n for n in range(1, key_heads + 1) if key_heads % n == 0 and n <= max(1, most))


def num_tiles(inputs: Inputs) -> int:
  """Returns the tiles of all queries."""
  return cdiv(inputs.operands.query.shape[1], TILE)


def num_lists(inputs: Inputs) -> int:
  """Returns the lists of a tile; each is that of as many neighbors."""
  block_q = inputs.lists.block_q
  return TILE if TILE % block_q and block_q % TILE else cdiv(TILE, block_q)


def find(inputs: Inputs) -> Unions:
  """Finds the unions of all tiles."""
  lists, possible, tiles = inputs.lists, _possible(inputs), num_tiles(inputs)
  batch, _, key_heads, _ = inputs.operands.key.shape
  # One for all rows, and for all heads, where these share their lists.
  shared = (batch if lists.indices.shape[0] > 1 else 1,
            key_heads // step_heads(inputs) if lists.indices.shape[1] > 1 else 1)
  rows, steps = (max(pair) for pair in zip(shared, possible.shape))

  def body(n: jax.Array, found: Unions) -> Unions:
    n = jnp.asarray(n, jnp.int32)
    group, tile = lax.div(n, jnp.int32(tiles)), lax.rem(n, jnp.int32(tiles))
    at = lax.div(group, jnp.int32(steps)), lax.rem(group, jnp.int32(steps)), tile
    return Unions(*(tile_ops.write_at(x, jnp.reshape(part, (1, 1, 1, *part.shape)), (
        *index(x, at), *[0] * part.ndim)) for x, part in zip(
            found, _of_tile(inputs, possible, at))))

  size, more = cdiv(num_blocks(inputs), chunk_blocks(inputs)), chunk_blocks(inputs)
  return tile_ops.loop(0, rows * steps * tiles, body, Unions(
      jnp.zeros((*shared, tiles, _num_groups(inputs), num_blocks(inputs) + more), jnp.uint8),
      jnp.zeros((rows, steps, tiles, size * more), jnp.int32),
      jnp.zeros((rows, steps, tiles), jnp.int32)))


def index(x: jax.Array, at: Index) -> Index:
  """Returns the index of a tile in an array of `Unions`, which rows and heads may share.

  Args:
    x: the array.
    at: batch row, step of heads, and tile.
  """
  (row, step, tile), zero = at, jnp.int32(0)
  return row if x.shape[0] > 1 else zero, step if x.shape[1] > 1 else zero, tile


def listed(inputs: Inputs, bits: jax.Array, *, transposed: bool) -> jax.Array:
  """Returns which lists name which blocks, bool [lists, n]; transposed: [n, lists].

  Args:
    inputs: the attention.
    bits: [groups of lists, n] of `Unions`.
    transposed: the order of axes.
  """
  groups, count = bits.shape
  number = jnp.arange(num_lists(inputs) // groups, dtype=jnp.uint8)
  if transposed:
    found = (bits.T[:, None] >> number[None, :, None]) & np.uint8(1)
    # With three axes: within the operations of scores XLA:CPU divides to find each number.
    return cpu_math.apart(found).reshape(count, -1) != 0
  return ((bits[None] >> number[:, None, None]) & np.uint8(1)).reshape(-1, count) != 0


def _num_groups(inputs: Inputs) -> int:
  """Returns the groups of lists that share numbers of `Unions.bits`."""
  return cdiv(num_lists(inputs), BITS)


def _possible(inputs: Inputs) -> jax.Array:
  """Returns bool [B or 1, steps of heads or 1, tiles, chunks]: what the rest may show."""
  chunk = chunk_blocks(inputs) * inputs.lists.block_kv
  kinds = block_map.block_kinds(inputs.rest, block_map.Sizes(
      inputs.operands.query.shape[1], inputs.operands.key.shape[1], TILE, chunk))
  merged = block_map.merge_heads(kinds, step_heads(inputs) * inputs.group)
  return jnp.asarray(merged != block_map.EMPTY)


def _list_at(inputs: Inputs, at: Index, number: jax.Array) -> jax.Array:
  """Returns the list int32 [k] of some number among those of a tile.

  A slice, which XLA:CPU reads several times faster than it gathers numbers.
  """
  lists, (row, step, tile) = inputs.lists, at
  rows, kinds, blocks, length = lists.indices.shape
  batch, start = tile_lib.global_numbers(inputs.operands.mask, row)
  head = step * (step_heads(inputs) * inputs.group) + start
  query = tile * TILE + number * (TILE // num_lists(inputs))
  block = jnp.minimum(lax.div(query, jnp.int32(lists.block_q)), blocks - 1)  # queries of padding
  return tile_lib.slice_at(jnp.asarray(lists.indices), (
      batch if rows > 1 else 0, lax.div(head, jnp.int32(lists.group)) if kinds > 1 else 0, block,
      0), (1, 1, 1, length)).reshape(length)


def _of_tile(inputs: Inputs, possible: jax.Array, at: Index) -> Unions:
  """Returns the key blocks that the queries of a tile list and may see.

  Args:
    inputs: the attention.
    possible: see `_possible`.
    at: batch row, step of heads, and tile.
  """
  count, per_chunk = num_blocks(inputs), chunk_blocks(inputs)
  chunks = cdiv(count, per_chunk)
  padding = chunks * per_chunk - count
  bits = _bits(inputs, at)
  taken = lax.reduce(bits[:, :count], np.uint8(0), lax.bitwise_or, (0,)) != 0
  taken = tile_lib.pad_axis(taken, 0, padding).reshape(chunks, per_chunk)
  most = np.full((chunks, 1), per_chunk) - np.where(np.arange(chunks) < chunks - 1, 0, padding)[
      :, None]
  whole = taken.sum(1, keepdims=True, dtype=jnp.int32) >= np.ceil(WHOLE * most).astype(np.int32)
  row, step = (x if size > 1 else 0 for x, size in zip(at[:2], possible.shape))
  taken = (taken | whole) & possible[row, step, at[2]][:, None]
  blocks, num_chunks = lax.cond(
      (taken.any(1) == taken.all(1)).all(), _of_whole_chunks,
      functools.partial(_of_single_blocks, count=count), taken)
  return Unions(bits, blocks, num_chunks)


def _of_whole_chunks(taken: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns blocks and num_chunks of `Unions` if chunks are taken whole or not at all.

  Args:
    taken: bool [chunks, blocks of a chunk].
  """
  chunks, per_chunk = taken.shape
  some, number = taken.any(1), jnp.arange(chunks, dtype=jnp.int32)
  at = lax.cumsum(some.astype(jnp.int32))
  order = jnp.zeros(chunks + 1, jnp.int32).at[jnp.where(some, at - 1, jnp.int32(chunks))].set(
      number, mode="promise_in_bounds")[:chunks]
  block = jnp.arange(per_chunk, dtype=jnp.int32)
  return (order[:, None] * per_chunk + block[None]).reshape(-1), at[-1]


def _of_single_blocks(taken: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns blocks and num_chunks of `Unions`.

  Args:
    taken: bool [chunks, blocks of a chunk].
    count: number of all blocks.
  """
  size, per_chunk = taken.size, taken.shape[1]
  seen = taken.reshape(-1)[:count]
  # Not `jnp.nonzero`, which jax 0.12 cannot partition over a mesh.
  number = jnp.arange(size, dtype=jnp.int32)
  counts = taken.sum(1, dtype=jnp.int32)
  before = lax.cumsum(counts) - counts
  at = (lax.cumsum(taken.astype(jnp.int32), axis=1) + before[:, None]).reshape(-1)[:count]
  blocks = jnp.zeros(size + 1, jnp.int32).at[jnp.where(seen, at - 1, jnp.int32(size))].set(
      number[:count], mode="promise_in_bounds")[:size]
  # The rest of the last chunk are neighbors, so that it, too, may be a slice.
  last, num_seen = jnp.where(seen, number[:count], 0).max(), at[-1]
  blocks = jnp.where(number < num_seen, blocks, last + 1 + number - num_seen)
  return blocks, lax.div(num_seen + jnp.int32(per_chunk - 1), jnp.int32(per_chunk))


def _bits(inputs: Inputs, at: Index) -> jax.Array:
  """Returns `Unions.bits` of a tile."""
  groups, numbers = _num_groups(inputs), lax.ScatterDimensionNumbers((), (0,), (0,))

  def of_group(group: jax.Array) -> jax.Array:
    found = jnp.zeros(num_blocks(inputs), jnp.uint8)
    for n in range(num_lists(inputs) // groups):
      blocks, bit = _list_at(inputs, at, n * groups + group), np.uint8(1 << n)
      # Leaves out numbers that are none of a block. A repeated one sets its bit again.
      found = lax.scatter_apply(found, blocks[:, None], functools.partial(jnp.bitwise_or, bit),
                                numbers, update_shape=blocks.shape, mode="drop")
    return tile_lib.pad_axis(found, 0, chunk_blocks(inputs))

  # On a CPU one after another: their bits are few enough for a cache, and have one index.
  return lax.platform_dependent(
      jnp.arange(groups, dtype=jnp.int32), cpu=lambda x: lax.map(of_group, x),
      default=jax.vmap(of_group))
