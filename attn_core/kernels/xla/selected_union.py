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

from typing import Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import nonfinite, online_softmax
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math, selected_bits, tile_ops
from attn_core.kernels.xla.selected_steps import (
    Inputs, Results, Rows, Sums, add_blocks, cotangents_of, dropped, masked, product, scores_of,
    sliced)
from attn_core.masks import dropout, mask as mask_lib, tile as tile_lib

# By the processor's time on XLA:CPU (attn_core_test/results/score_mods_notes.md).
MOST_ROWS = 16  # that a list serves; more are multiplied by gathered keys as matrices
# The least share of all keys that a list names, for lists that serve at most so many rows. Measured
# with random lists below the diagonal; where neighbors agree, shorter ones would gain, too.
LEAST_SHARES = ((1, 1 / 16), (4, 1 / 8), (MOST_ROWS, 1 / 4))


class Group(NamedTuple):
  """Arrays of one batch row and the key heads of a step."""

  batch: jax.Array
  first: jax.Array  # the first of its key heads
  key: jax.Array  # [keys of all blocks and of one more chunk, heads * D]; zeros at the end
  value: jax.Array  # [keys of all blocks and of one more chunk, heads * E]


class Union(NamedTuple):
  """The key blocks that the queries of a tile list."""

  query: jax.Array  # int32 [queries]
  bits: jax.Array  # of `selected_bits.Unions`, of all tiles
  at: selected_bits.Index  # of this tile
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
  return selected_bits.num_tiles(inputs) * selected_bits.TILE


def forward(inputs: Inputs, results: Residuals) -> Residuals:
  """Writes out [B, T padded, H, E] and lse [B, T padded, H, 1] into arrays of zeros."""
  spec, width = inputs.spec, inputs.operands.value.shape[3]
  query = _padded(nonfinite.infinite_to_nan(inputs.operands.query))
  unions = selected_bits.find(inputs)

  def of_group(group: Group, results: Residuals) -> Residuals:
    def step(n: jax.Array, results: Residuals) -> Residuals:
      union, rows = _union(inputs, group, unions, n), _scaled_rows(inputs, query, group, n)

      def of_chunk(c: jax.Array, running: online_softmax.Running) -> online_softmax.Running:
        chunk = _chunk(inputs, group, union, c)
        scores, _ = scores_of(inputs, rows, chunk.key)
        return online_softmax.update(
            running, masked(inputs, chunk.seen, scores, -jnp.inf), lambda weights: product(
                "brn,bne->bre", dropped(inputs, chunk.keep, weights), chunk.value, inputs),
            exp=cpu_math.exp)

      running = tile_ops.loop(0, union.num_chunks, of_chunk, online_softmax.start(
          (selected_bits.step_heads(inputs), rows.shape[1]), width, inputs.dtype))
      out, lse = online_softmax.finish(running, _sinks(inputs, group))
      out = out * dropout.kept_scale(spec.dropout_prob)
      return Residuals(*(_write(inputs, x, group, n, rows) for x, rows in zip(
          results, (out, lse))))

    return tile_ops.loop(0, selected_bits.num_tiles(inputs), step, results)

  return _over_groups(inputs, of_group, results)


def backward(inputs: Inputs, rows: Rows, results: Sums) -> Sums:
  """Writes the cotangents of query, key and value into arrays of zeros; see `selected.backward`."""
  spec, unions = inputs.spec, selected_bits.find(inputs)
  query, d_out, lse, delta = map(_padded, (nonfinite.mask_nonfinite(inputs.operands.query), *rows))

  def of_group(group: Group, results: Sums) -> Sums:
    group = group._replace(key=nonfinite.mask_nonfinite(group.key))

    def step(n: jax.Array, sums: Sums) -> Sums:
      union = _union(inputs, group, unions, n)
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
    sums = tile_ops.loop(0, selected_bits.num_tiles(inputs), step, Sums(
        results.query, zeros(group.key), zeros(group.value)))
    d_value = sums.value * dropout.kept_scale(spec.dropout_prob)
    return Sums(sums.query, _write_keys(results.key, group, sums.key),
                _write_keys(results.value, group, d_value))

  return _over_groups(inputs, of_group, results)


def _over_groups(inputs: Inputs, of_group: Callable[[Group, Results], Results],
                 results: Results) -> Results:
  """Runs of_group(group, results) over all batch rows and the key heads of all steps."""
  operands, heads = inputs.operands, selected_bits.step_heads(inputs)
  batch, keys, key_heads, _ = operands.key.shape
  blocks = selected_bits.num_blocks(inputs) + selected_bits.chunk_blocks(inputs)
  padding = blocks * inputs.lists.block_kv - keys

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
  return tile_lib.pad_axis(x, 1, -x.shape[1] % selected_bits.TILE)


def _rows(inputs: Inputs, x: jax.Array, group: Group, n: jax.Array) -> jax.Array:
  """Returns rows [heads, queries * G, width] of x [B, T padded, H, width]."""
  heads, width, tile = selected_bits.step_heads(inputs), x.shape[3], selected_bits.TILE
  rows = tile_lib.slice_at(x, (group.batch, n * tile, group.first * inputs.group, 0),
                           (1, tile, heads * inputs.group, width))
  rows = rows.reshape(tile, heads, inputs.group, width).swapaxes(0, 1)
  return rows.reshape(heads, -1, width).astype(inputs.dtype)


def _scaled_rows(inputs: Inputs, query: jax.Array, group: Group, n: jax.Array) -> jax.Array:
  return _rows(inputs, query, group, n) * jnp.asarray(inputs.spec.softmax_scale, inputs.dtype)


def _write(inputs: Inputs, x: jax.Array, group: Group, n: jax.Array, rows: jax.Array) -> jax.Array:
  """Writes what `_rows` returns."""
  (heads, _, width), tile = rows.shape, selected_bits.TILE
  rows = rows.reshape(heads, tile, inputs.group, width).swapaxes(0, 1)
  return tile_ops.write_at(x, rows.reshape(1, tile, -1, width).astype(x.dtype),
                           (group.batch, n * tile, group.first * inputs.group, 0))


def _write_keys(x: jax.Array, group: Group, rows: jax.Array) -> jax.Array:
  """Writes keys, shaped like `Group.key`, into x [B, S, K, width]."""
  rows = rows[:x.shape[1]].reshape(1, x.shape[1], -1, x.shape[3])
  return tile_ops.write_at(x, rows.astype(x.dtype), (group.batch, 0, group.first, 0))


def _sinks(inputs: Inputs, group: Group) -> jax.Array | None:
  """Returns the sinks of a step's rows [heads, queries * G, 1], or None."""
  sinks, heads = inputs.operands.sinks, selected_bits.step_heads(inputs)
  if sinks is None:
    return None
  sinks = tile_lib.slice_at(sinks, (group.batch if sinks.shape[0] > 1 else 0,
                                    group.first * inputs.group), (1, heads * inputs.group))
  sinks = jnp.tile(sinks.reshape(heads, inputs.group), (1, selected_bits.TILE))
  return sinks[..., None].astype(inputs.dtype)


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
  heads = selected_bits.step_heads(inputs)
  batch, start = tile_lib.global_numbers(inputs.operands.mask, group.batch)
  local = group.first * inputs.group + jnp.arange(heads * inputs.group, dtype=jnp.int32)
  orient = lambda x: x.transpose(0, 3, 1, 2) if transposed else x
  local = orient(local.reshape(heads, 1, inputs.group, 1))
  query, key = orient(query[None, :, None, None]), orient(key[None, None, None])
  at = mask_lib.Coordinates(batch, local + start, query, key, query, key)
  return sliced(inputs.rest, group.batch, at._replace(head=local),
                inputs.operands.key.shape[1]), at


def _union(inputs: Inputs, group: Group, unions: selected_bits.Unions, n: jax.Array) -> Union:
  """Returns the union of tile n."""
  tile, heads = selected_bits.TILE, jnp.int32(selected_bits.step_heads(inputs))
  n = jnp.asarray(n, jnp.int32)
  query, at = n * tile + jnp.arange(tile, dtype=jnp.int32), (
      group.batch, lax.div(group.first, heads), n)
  of_tile = lambda x: tile_lib.slice_at(
      x, (*selected_bits.index(x, at), *[0] * (x.ndim - 3)), (1, 1, 1, *x.shape[3:])).reshape(
          x.shape[3:])
  return Union(query, unions.bits, at, of_tile(unions.blocks), of_tile(unions.num_chunks))


def _chunk(inputs: Inputs, group: Group, union: Union, c: jax.Array, *,
           transposed: bool = False) -> Chunk:
  """Returns chunk c of a union."""
  lists, spec, keys = inputs.lists, inputs.spec, inputs.operands.key.shape[1]
  size, heads = selected_bits.chunk_blocks(inputs), selected_bits.step_heads(inputs)
  blocks = tile_lib.slice_at(union.blocks, (c * size,), (size,))
  key, value, bits = _taken(inputs, (group.key, group.value, union.bits), union.at, blocks)
  key, value = (x.reshape(size * lists.block_kv, heads, -1).swapaxes(0, 1) for x in (key, value))
  number = blocks[:, None] * lists.block_kv + jnp.arange(lists.block_kv, dtype=jnp.int32)[None]
  rest, at = _coordinates(inputs, group, union.query, number.reshape(-1), transposed=transposed)
  listed = selected_bits.listed(inputs, bits, transposed=transposed)
  by_key, by_query = (0, 1) if transposed else (1, 0)
  listed = jnp.repeat(jnp.repeat(listed, lists.block_kv, axis=by_key),
                      len(union.query) // listed.shape[by_query], axis=by_query)
  listed = listed[None, :, :, None] if transposed else listed[None, :, None]
  seen = jnp.asarray(rest.visible(at)) & listed
  if keys % lists.block_kv:
    seen = seen & (at.key_index < keys)
  keep = None
  if spec.dropout_prob:
    words = inputs.operands.dropout_key
    assert words is not None
    keep = dropout.keep_mask(words[group.batch if words.shape[0] > 1 else 0],
                             dropout.move_to_positions(rest, at), spec.dropout_prob)
  return Chunk(blocks, key, value, seen, keep)


def _taken(inputs: Inputs, arrays: tuple[jax.Array, ...], at: selected_bits.Index,
           blocks: jax.Array) -> tuple[jax.Array, ...]:
  """Returns some blocks of keys [n, width], of values [n, width] and of bits [groups, n].

  Args:
    inputs: the attention.
    arrays: keys, values, and bits of all tiles.
    at: the tile.
    blocks: int32 [blocks].
  """
  block_kv, size, at = inputs.lists.block_kv, len(blocks), selected_bits.index(arrays[2], at)

  def slices(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    *rows, bits = arrays
    groups = bits.shape[3]
    bits = tile_lib.slice_at(bits, (*at, 0, blocks[0]), (1, 1, 1, groups, size))
    return *(tile_lib.slice_at(x, (blocks[0] * block_kv, 0), (size * block_kv, x.shape[1]))
             for x in rows), bits.reshape(groups, size)

  def gathered(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    *rows, bits = arrays
    group = jnp.arange(bits.shape[3], dtype=jnp.int32)[:, None]
    return *(x.reshape(-1, block_kv, x.shape[1]).at[blocks].get(mode="promise_in_bounds").reshape(
        -1, x.shape[1]) for x in rows), bits.at[*at, group, blocks[None]].get(
            mode="promise_in_bounds")

  if size == 1:
    return slices(*arrays)
  are_neighbors = blocks[-1] - blocks[0] == size - 1
  return lax.platform_dependent(
      *arrays, cpu=lambda *x: lax.cond(are_neighbors, slices, gathered, *x), default=gathered)


def _scattered(inputs: Inputs, x: jax.Array, chunk: Chunk, found: jax.Array) -> jax.Array:
  """Adds [heads, n, width] to the keys of a chunk, of x shaped like `Group.key`."""
  rows = found.swapaxes(0, 1).reshape(-1, x.shape[1])
  return add_blocks(x, chunk.blocks, rows, inputs.lists.block_kv)
