# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention to long lists of single queries in plain XLA, by dense products of many queries.

A step takes the queries of a tile and all key blocks that any of them lists, their union, some
blocks at a time; the others hide what they do not list. A gathered key so serves many queries, in
products of matrices, where `selected_gathered` gathers it for each query and multiplies by vectors.
The less neighbors agree the more is hidden, at most all keys that the rest of the mask shows.

Most of a chunk of neighboring keys is taken whole, so that it is sliced instead of gathered: as in
windows, and in long lists of keys that have nothing in common.

Axes of a step: [heads, rows, n]: key heads with one list, queries * G rows (token-major), n keys;
[heads, n, rows] in the backward, whose arrays are "transposed".
"""

import math
from typing import Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import nonfinite, online_softmax
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math, tile_ops, tiling
from attn_core.kernels.xla.selected_steps import (
    Inputs, Results, Rows, Sums, add_blocks, cotangents_of, dropped, masked, product, scores_of,
    sliced)
from attn_core.masks import block_map, dropout, mask as mask_lib, tile as tile_lib
from attn_core.types import cdiv

# By the processor's time on XLA:CPU (attn_core_test/results/score_mods_notes.md).
MOST_ROWS = 16  # that a list serves; more are multiplied by gathered keys as matrices
# The least share of all keys that a list names, for lists that serve at most so many rows. Measured
# with random lists below the diagonal; where neighbors agree, shorter ones would gain, too.
LEAST_SHARES = ((1, 1 / 16), (4, 1 / 8), (MOST_ROWS, 1 / 4))
TILE = 128  # queries of a step
CHUNK = 256  # keys of a step
WHOLE = 2 / 3  # of the blocks of a chunk: if as many are listed, all are taken


class Group(NamedTuple):
  """Arrays of one batch row and the key heads of a step."""

  batch: jax.Array
  first: jax.Array  # the first of its key heads
  key: jax.Array  # [keys of all blocks and of one more chunk, heads * D]; zeros at the end
  value: jax.Array  # [keys of all blocks and of one more chunk, heads * E]


class Union(NamedTuple):
  """The key blocks that the queries of a tile list."""

  query: jax.Array  # int32 [queries]
  # uint8 [lists, key blocks and more], or transposed: which list of the tile names which block.
  table: jax.Array
  blocks: jax.Array  # int32 [whole chunks], ascending: the union, and blocks that no query lists
  num_chunks: jax.Array  # of the union


class Chunk(NamedTuple):
  """Some keys of a union."""

  blocks: jax.Array  # int32 [n / block_kv]
  key: jax.Array  # [heads, n, D]
  value: jax.Array  # [heads, n, E]
  seen: jax.Array  # bool, see `masked`
  keep: jax.Array | None  # dropout, likewise; None: everything is kept


def is_faster(inputs: Inputs) -> bool:
  """Whether dense products of a union take less time than gathering each list.

  Latent rows, key and value of all heads, are gathered. Measured on CPUs only. Other platforms
  follow the same rule: products are what they do best, gathering a row for each query worst.
  """
  if inputs.spec.latent_width is not None:
    return False
  lists, keys = inputs.lists, inputs.operands.key.shape[1]
  listed, rows = lists.indices.shape[-1] * lists.block_kv, lists.block_q * inputs.group
  return rows <= MOST_ROWS and listed >= keys * next(
      share for most, share in LEAST_SHARES if rows <= most)


def num_queries(inputs: Inputs) -> int:
  """Returns how many queries results have: those of whole tiles."""
  return cdiv(inputs.operands.query.shape[1], TILE) * TILE


def forward(inputs: Inputs, results: Residuals) -> Residuals:
  """Writes out [B, T padded, H, E] and lse [B, T padded, H, 1] into arrays of zeros."""
  spec, width = inputs.spec, inputs.operands.value.shape[3]
  query, possible = _padded(nonfinite.infinite_to_nan(inputs.operands.query)), _possible(inputs)

  def of_group(group: Group, results: Residuals) -> Residuals:
    def step(n: jax.Array, results: Residuals) -> Residuals:
      union, rows = _union(inputs, group, possible, n), _scaled_rows(inputs, query, group, n)

      def of_chunk(c: jax.Array, running: online_softmax.Running) -> online_softmax.Running:
        chunk = _chunk(inputs, group, union, c)
        scores, _ = scores_of(inputs, rows, chunk.key)
        return online_softmax.update(
            running, masked(inputs, chunk.seen, scores, -jnp.inf), lambda weights: product(
                "brn,bne->bre", dropped(inputs, chunk.keep, weights), chunk.value, inputs),
            exp=cpu_math.exp)

      running = tile_ops.loop(0, union.num_chunks, of_chunk, online_softmax.start(
          (_step_heads(inputs), rows.shape[1]), width, inputs.dtype))
      out, lse = online_softmax.finish(running, _sinks(inputs, group))
      out = out * dropout.kept_scale(spec.dropout_prob)
      return Residuals(*(_write(inputs, x, group, n, rows) for x, rows in zip(
          results, (out, lse))))

    return tile_ops.loop(0, query.shape[1] // TILE, step, results)

  return _over_groups(inputs, of_group, results)


def backward(inputs: Inputs, rows: Rows, results: Sums) -> Sums:
  """Writes the cotangents of query, key and value into arrays of zeros; see `selected.backward`."""
  spec, possible = inputs.spec, _possible(inputs)
  query, d_out, lse, delta = map(_padded, (nonfinite.mask_nonfinite(inputs.operands.query), *rows))

  def of_group(group: Group, results: Sums) -> Sums:
    group = group._replace(key=nonfinite.mask_nonfinite(group.key))

    def step(n: jax.Array, sums: Sums) -> Sums:
      union = _union(inputs, group, possible, n, transposed=True)
      queries, d_rows = _scaled_rows(inputs, query, group, n), _rows(inputs, d_out, group, n)
      row_lse, row_delta = (_rows(inputs, x, group, n).swapaxes(1, 2) for x in (lse, delta))

      def of_chunk(c: jax.Array, carry: Sums) -> Sums:
        chunk = _chunk(inputs, group, union, c, transposed=True)
        weights, d_scores = cotangents_of(
            inputs, scores_of(inputs, queries, chunk.key, transposed=True), chunk.seen, chunk.keep,
            (chunk.value, d_rows, row_lse, row_delta))
        return Sums(
            carry.query + product("bnr,bnd->brd", d_scores, chunk.key, inputs),
            _scattered(inputs, carry.key, chunk, product(
                "bnr,brd->bnd", d_scores, queries, inputs)),
            _scattered(inputs, carry.value, chunk, product(
                "bnr,bre->bne", weights, d_rows, inputs)))

      of_tile = tile_ops.loop(0, union.num_chunks, of_chunk, sums._replace(
          query=jnp.zeros_like(queries)))
      # Queries are scaled already, and so is the cotangent of a key.
      d_query = of_tile.query * jnp.asarray(spec.softmax_scale, inputs.dtype)
      return of_tile._replace(query=_write(inputs, sums.query, group, n, d_query))

    zeros = lambda x: jnp.zeros_like(x, dtype=inputs.dtype)
    sums = tile_ops.loop(0, query.shape[1] // TILE, step, Sums(
        results.query, zeros(group.key), zeros(group.value)))
    d_value = sums.value * dropout.kept_scale(spec.dropout_prob)
    return Sums(sums.query, _write_keys(results.key, group, sums.key),
                _write_keys(results.value, group, d_value))

  return _over_groups(inputs, of_group, results)


def _step_heads(inputs: Inputs) -> int:
  """Returns the key heads of a step, which have one list."""
  key_heads = inputs.operands.key.shape[2]
  if inputs.lists.indices.shape[1] > 1:
    key_heads = math.gcd(key_heads, inputs.lists.group // inputs.group)
  keys = max(CHUNK, inputs.lists.block_kv)  # of a chunk
  most = tiling.STEP_SCORES_BACKWARD // (inputs.group * TILE * keys)
  return max(n for n in range(1, key_heads + 1) if key_heads % n == 0 and n <= max(1, most))


def _over_groups(inputs: Inputs, of_group: Callable[[Group, Results], Results],
                 results: Results) -> Results:
  """Runs of_group(group, results) over all batch rows and the key heads of all steps."""
  operands, heads = inputs.operands, _step_heads(inputs)
  batch, keys, key_heads, _ = operands.key.shape
  padding = (_num_blocks(inputs) + _chunk_blocks(inputs)) * inputs.lists.block_kv - keys

  def body(n: jax.Array, results: Results) -> Results:
    n, steps = jnp.asarray(n, jnp.int32), jnp.int32(key_heads // heads)
    row, first = lax.div(n, steps), lax.rem(n, steps) * heads
    key, value = (tile_lib.slice_at(x, (row, 0, first, 0), (1, keys, heads, x.shape[3]))[0]
                  for x in (operands.key, operands.value))
    key, value = nonfinite.propagate_nan(key, value, nonfinite.is_finite(key, value))
    key, value = (tile_lib.pad_axis(x.reshape(keys, -1).astype(inputs.dtype), 0, padding)
                  for x in (key, value))
    return of_group(Group(row, first, key, value), results)

  return tile_ops.loop(0, batch * (key_heads // heads), body, results)


def _padded(x: jax.Array) -> jax.Array:
  """Pads [B, T, ..] to whole tiles."""
  return tile_lib.pad_axis(x, 1, -x.shape[1] % TILE)


def _rows(inputs: Inputs, x: jax.Array, group: Group, n: jax.Array) -> jax.Array:
  """Returns rows [heads, queries * G, width] of x [B, T padded, H, width]."""
  heads, width = _step_heads(inputs), x.shape[3]
  rows = tile_lib.slice_at(x, (group.batch, n * TILE, group.first * inputs.group, 0),
                           (1, TILE, heads * inputs.group, width))
  rows = rows.reshape(TILE, heads, inputs.group, width).swapaxes(0, 1)
  return rows.reshape(heads, -1, width).astype(inputs.dtype)


def _scaled_rows(inputs: Inputs, query: jax.Array, group: Group, n: jax.Array) -> jax.Array:
  return _rows(inputs, query, group, n) * jnp.asarray(inputs.spec.softmax_scale, inputs.dtype)


def _write(inputs: Inputs, x: jax.Array, group: Group, n: jax.Array, rows: jax.Array) -> jax.Array:
  """Writes what `_rows` returns."""
  heads, _, width = rows.shape
  rows = rows.reshape(heads, TILE, inputs.group, width).swapaxes(0, 1)
  return tile_ops.write_at(x, rows.reshape(1, TILE, -1, width).astype(x.dtype),
                           (group.batch, n * TILE, group.first * inputs.group, 0))


def _write_keys(x: jax.Array, group: Group, rows: jax.Array) -> jax.Array:
  """Writes keys, shaped like `Group.key`, into x [B, S, K, width]."""
  rows = rows[:x.shape[1]].reshape(1, x.shape[1], -1, x.shape[3])
  return tile_ops.write_at(x, rows.astype(x.dtype), (group.batch, 0, group.first, 0))


def _sinks(inputs: Inputs, group: Group) -> jax.Array | None:
  """Returns the sinks of a step's rows [heads, queries * G, 1], or None."""
  sinks, heads = inputs.operands.sinks, _step_heads(inputs)
  if sinks is None:
    return None
  sinks = tile_lib.slice_at(sinks, (group.batch if sinks.shape[0] > 1 else 0,
                                    group.first * inputs.group), (1, heads * inputs.group))
  return jnp.tile(sinks.reshape(heads, inputs.group), (1, TILE))[..., None].astype(inputs.dtype)


def _coordinates(inputs: Inputs, group: Group, query: jax.Array, key: jax.Array, *,
                 transposed: bool) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
  """Returns the rest of the mask, and coordinates that broadcast as `masked` expects.

  Args:
    inputs: the attention.
    group: the heads.
    query: int32 [queries].
    key: int32 [n].
    transposed: the order of axes.
  """
  heads = _step_heads(inputs)
  batch, start = tile_lib.global_numbers(inputs.operands.mask, group.batch)
  local = group.first * inputs.group + jnp.arange(heads * inputs.group, dtype=jnp.int32)
  orient = lambda x: x.transpose(0, 3, 1, 2) if transposed else x
  local = orient(local.reshape(heads, 1, inputs.group, 1))
  query, key = orient(query[None, :, None, None]), orient(key[None, None, None])
  at = mask_lib.Coordinates(batch, local + start, query, key, query, key)
  return sliced(inputs.rest, group.batch, at._replace(head=local),
                inputs.operands.key.shape[1]), at


def _num_blocks(inputs: Inputs) -> int:
  """Returns the key blocks of all keys."""
  return cdiv(inputs.operands.key.shape[1], inputs.lists.block_kv)


def _chunk_blocks(inputs: Inputs) -> int:
  """Returns the key blocks of a chunk."""
  return max(1, CHUNK // inputs.lists.block_kv)


def _possible(inputs: Inputs) -> jax.Array:
  """Returns bool [B or 1, heads / step or 1, tiles, chunks]: what the rest of the mask may show."""
  chunk = _chunk_blocks(inputs) * inputs.lists.block_kv
  kinds = block_map.block_kinds(inputs.rest, block_map.Sizes(
      inputs.operands.query.shape[1], inputs.operands.key.shape[1], TILE, chunk))
  merged = block_map.merge_heads(kinds, _step_heads(inputs) * inputs.group)
  return jnp.asarray(merged != block_map.EMPTY)


def _tile_lists(inputs: Inputs, group: Group, n: jax.Array) -> jax.Array:
  """Returns the lists int32 [lists, k] of tile n; each is that of as many neighbors."""
  lists = inputs.lists
  rows, heads, blocks, length = lists.indices.shape
  batch, start = tile_lib.global_numbers(inputs.operands.mask, group.batch)
  head, query = group.first * inputs.group + start, jnp.asarray(n, jnp.int32) * TILE
  if TILE % lists.block_q and lists.block_q % TILE:
    return jnp.asarray(lists.blocks_of(batch, head, query + jnp.arange(TILE, dtype=jnp.int32)))
  # A slice, which XLA:CPU reads several times faster than it gathers numbers.
  count = cdiv(TILE, lists.block_q)
  padded = tile_lib.pad_axis(jnp.asarray(lists.indices), 2, -blocks % count)
  at = (batch if rows > 1 else 0, lax.div(head, jnp.int32(lists.group)) if heads > 1 else 0,
        lax.div(query, jnp.int32(lists.block_q)), 0)
  # Computed with, numbers of a slice take three times as long as copied ones.
  return lax.optimization_barrier(tile_lib.slice_at(padded, at, (1, 1, count, length)))[0, 0]


def _union(inputs: Inputs, group: Group, possible: jax.Array, n: jax.Array, *,
           transposed: bool = False) -> Union:
  """Returns the key blocks that the queries of tile n list and may see."""
  count, per_chunk = _num_blocks(inputs), _chunk_blocks(inputs)
  size = cdiv(count, per_chunk) * per_chunk
  table, listed = _table(inputs, group, n, transposed=transposed)
  of_chunks = tile_lib.pad_axis(listed[:count], 0, size - count).reshape(-1, per_chunk)
  whole = of_chunks.sum(1, keepdims=True, dtype=jnp.int32) >= np.int32(math.ceil(WHOLE * per_chunk))
  row, head = (x if size > 1 else 0 for x, size in zip(
      (group.batch, lax.div(group.first, jnp.int32(_step_heads(inputs)))), possible.shape))
  of_chunks = (of_chunks | whole) & possible[row, head, n][:, None]
  seen = of_chunks.reshape(-1)[:count]
  # Not `jnp.nonzero`, which jax 0.12 cannot partition over a mesh.
  numbers = jnp.arange(size, dtype=jnp.int32)
  at = lax.cumsum(seen.astype(jnp.int32))
  blocks = jnp.zeros(size + 1, jnp.int32).at[jnp.where(seen, at - 1, jnp.int32(size))].set(
      numbers[:count], mode="promise_in_bounds")[:size]
  # The rest of the last chunk are neighbors, so that it, too, may be a slice.
  last, num_seen = jnp.where(seen, numbers[:count], 0).max(), at[-1]
  blocks = jnp.where(numbers < num_seen, blocks, last + 1 + numbers - num_seen)
  query = jnp.asarray(n, jnp.int32) * TILE + jnp.arange(TILE, dtype=jnp.int32)
  return Union(query, table, blocks, lax.div(
      num_seen + jnp.int32(per_chunk - 1), jnp.int32(per_chunk)))


def _table(inputs: Inputs, group: Group, n: jax.Array, *,
           transposed: bool) -> tuple[jax.Array, jax.Array]:
  """Returns `Union.table` of tile n, and which blocks any of its queries lists."""
  count = _num_blocks(inputs)
  width = count + _chunk_blocks(inputs) + 1  # the last column takes what names no block
  found = _tile_lists(inputs, group, n)
  num_lists = found.shape[0]
  found = jnp.where((found < 0) | (found >= count), jnp.int32(width - 1), found)
  number = jnp.arange(num_lists, dtype=jnp.int32)[:, None]
  # With a single index for each block: XLA:CPU takes twice the time for pairs of them.
  place = found * num_lists + number if transposed else number * width + found
  table = jnp.zeros(num_lists * width, jnp.uint8).at[place.reshape(-1)].set(
      jnp.uint8(1), mode="promise_in_bounds")
  if not transposed:
    table = table.reshape(num_lists, width)
    return table, table.any(0)
  table = table.reshape(width, num_lists)
  if num_lists % 4:
    return table, table.any(1)
  words = lax.bitcast_convert_type(table.reshape(width, num_lists // 4, 4), jnp.uint32)
  return table, lax.reduce(words, np.uint32(0), lax.bitwise_or, (1,)) != 0


def _chunk(inputs: Inputs, group: Group, union: Union, c: jax.Array, *,
           transposed: bool = False) -> Chunk:
  """Returns chunk c of a union."""
  lists, spec, size, keys = inputs.lists, inputs.spec, _chunk_blocks(inputs), inputs.operands.key
  blocks = tile_lib.slice_at(union.blocks, (c * size,), (size,))
  key, value, table = _taken(inputs, (group.key, group.value, union.table), blocks, transposed)
  key, value = (x.reshape(size * lists.block_kv, _step_heads(inputs), -1).swapaxes(0, 1)
                for x in (key, value))
  number = blocks[:, None] * lists.block_kv + jnp.arange(lists.block_kv, dtype=jnp.int32)[None]
  rest, at = _coordinates(inputs, group, union.query, number.reshape(-1), transposed=transposed)
  by_key, by_query = (0, 1) if transposed else (1, 0)
  listed = jnp.repeat(jnp.repeat(table != 0, lists.block_kv, axis=by_key),
                      TILE // table.shape[by_query], axis=by_query)
  listed = listed[None, :, :, None] if transposed else listed[None, :, None]
  seen = jnp.asarray(rest.visible(at)) & listed
  if keys.shape[1] % lists.block_kv:
    seen = seen & (at.key_index < keys.shape[1])
  keep = None
  if spec.dropout_prob:
    words = inputs.operands.dropout_key
    assert words is not None
    keep = dropout.keep_mask(words[group.batch if words.shape[0] > 1 else 0],
                             dropout.move_to_positions(rest, at), spec.dropout_prob)
  return Chunk(blocks, key, value, seen, keep)


def _taken(inputs: Inputs, arrays: tuple[jax.Array, ...], blocks: jax.Array,
           transposed: bool) -> tuple[jax.Array, ...]:
  """Returns some blocks of keys [n, width], values [n, width] and of the table of a union."""
  block_kv, size = inputs.lists.block_kv, len(blocks)

  def slices(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    *rows, table = arrays
    lists = table.shape[1 if transposed else 0]
    return *(tile_lib.slice_at(x, (blocks[0] * block_kv, 0), (size * block_kv, x.shape[1]))
             for x in rows), (tile_lib.slice_at(table, (blocks[0], 0), (size, lists)) if transposed
                              else tile_lib.slice_at(table, (0, blocks[0]), (lists, size)))

  def gathered(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    *rows, table = arrays
    take = lambda x, at=blocks: x.at[at].get(mode="promise_in_bounds")
    # Numbers, not columns: those would be written by columns, and copied in both cases.
    number = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None] * table.shape[1] + blocks[None]
    return *(take(x.reshape(-1, block_kv, x.shape[1])).reshape(-1, x.shape[1]) for x in rows), (
        take(table) if transposed else take(table.reshape(-1), number))

  if size == 1:
    return slices(*arrays)
  are_neighbors = blocks[-1] - blocks[0] == size - 1
  return lax.platform_dependent(
      *arrays, cpu=lambda *x: lax.cond(are_neighbors, slices, gathered, *x), default=gathered)


def _scattered(inputs: Inputs, x: jax.Array, chunk: Chunk, found: jax.Array) -> jax.Array:
  """Adds [heads, n, width] to the keys of a chunk, of x shaped like `Group.key`."""
  rows = found.swapaxes(0, 1).reshape(-1, x.shape[1])
  return add_blocks(x, chunk.blocks, rows, inputs.lists.block_kv)
