# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention to long lists of single queries in plain XLA, by dense products of many queries.

A step takes the queries of a tile and all key blocks that any of them sees, their union, some
blocks at a time; the others hide what they do not list. A gathered key so serves many queries, in
products of matrices, where `selected` gathers it for each query and multiplies by vectors. The
less neighbors agree the more is hidden, at most all keys that the rest of the mask shows.

Axes of a step: [heads, rows, n]: key heads with one list, queries * G rows (token-major), n keys.
"""

import math
from typing import Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, nonfinite, online_softmax
from attn_core.kernels.common.backward import compute_delta, d_sinks, finite_lse
from attn_core.kernels.common.contract import BackwardResiduals, Residuals
from attn_core.kernels.xla import cpu_math, tile_ops, tiling
from attn_core.kernels.xla.selected_steps import Inputs, Results, product, sliced
from attn_core.masks import dropout, mask as mask_lib, tile as tile_lib
from attn_core.types import cdiv

# By the processor's time on XLA:CPU (attn_core_test/results/score_mods_notes.md).
MOST_ROWS = 16  # that a list serves; more are multiplied by gathered keys as matrices
# Of all keys, that a list names: of a list for one row, and for several. Measured with random lists
# below the diagonal; where neighbors agree, shorter ones would gain, too.
LEAST_SHARE_ONE, LEAST_SHARE = 1 / 16, 1 / 8
TILE = 128  # queries of a step
CHUNK = 256  # keys of a step


class Group(NamedTuple):
  """Arrays of one batch row and the key heads of a step."""

  batch: jax.Array
  first: jax.Array  # the first of its key heads
  key: jax.Array  # [num_key_blocks + 1, block_kv, heads * D]; the last block is of zeros
  value: jax.Array  # [num_key_blocks + 1, block_kv, heads * E]


class Union(NamedTuple):
  """The key blocks that the queries of a tile see."""

  query: jax.Array  # int32 [queries]
  table: jax.Array  # bool [num_key_blocks + 1, queries]: which query lists which block
  blocks: jax.Array  # int32 [whole chunks]: those that any query sees, then the last one
  num_seen: jax.Array  # of those that are seen


class Chunk(NamedTuple):
  """Some keys of a union."""

  blocks: jax.Array  # int32 [n / block_kv]
  key: jax.Array  # [heads, n, D]
  value: jax.Array  # [heads, n, E]
  seen: jax.Array  # bool, broadcastable to [heads, queries, G, n]
  keep: jax.Array | None  # dropout, likewise; None: everything is kept


def is_faster(inputs: Inputs) -> bool:
  """Whether dense products of a union take less time than gathering each list.

  Latent rows, which are key and value of all heads, are gathered.
  """
  if inputs.spec.latent_width is not None:
    return False
  lists, keys = inputs.lists, inputs.operands.key.shape[1]
  listed, rows = lists.indices.shape[-1] * lists.block_kv, lists.block_q * inputs.group
  return rows <= MOST_ROWS and listed >= keys * (LEAST_SHARE_ONE if rows == 1 else LEAST_SHARE)


def forward(inputs: Inputs) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  operands, spec = inputs.operands, inputs.spec
  dense_operands.assert_operands(operands)
  heads, width = _step_heads(inputs), operands.value.shape[3]
  query = _padded(nonfinite.infinite_to_nan(operands.query))

  def of_group(group: Group, results: Residuals) -> Residuals:
    def step(n: jax.Array, results: Residuals) -> Residuals:
      union, rows = _union(inputs, group, n), _scaled_rows(inputs, query, group, n)

      def of_chunk(c: jax.Array, running: online_softmax.Running) -> online_softmax.Running:
        chunk = _chunk(inputs, group, union, c)
        scores, _ = _capped(inputs, product("krd,knd->krn", rows, chunk.key, inputs))
        return online_softmax.update(
            running, _masked(chunk.seen, scores, -jnp.inf), lambda weights: product(
                "krn,kne->kre", _dropped(chunk, weights), chunk.value, inputs), exp=cpu_math.exp)

      running = tile_ops.loop(0, _num_chunks(inputs, union), of_chunk, online_softmax.start(
          (heads, rows.shape[1]), width, inputs.dtype))
      out, lse = online_softmax.finish(running, _sinks(inputs, group))
      out = out * dropout.kept_scale(spec.dropout_prob)
      return Residuals(*(_write(inputs, x, group, n, rows) for x, rows in zip(
          results, (out, lse))))

    return tile_ops.loop(0, query.shape[1] // TILE, step, results)

  batch, queries, num_heads, _ = operands.query.shape
  shape = batch, query.shape[1], num_heads
  out, lse = _over_groups(inputs, of_group, Residuals(
      jnp.zeros((*shape, width), dense_operands.out_dtype(operands, spec)),
      jnp.zeros((*shape, 1), dense_operands.lse_dtype(spec))))
  return Residuals(out[:, :queries], lse[:, :queries, :, 0].swapaxes(1, 2))


class _Sums(NamedTuple):
  """Cotangents; of a step those of the keys are like `Group.key` and `Group.value`."""

  query: jax.Array
  key: jax.Array
  value: jax.Array


def backward(inputs: Inputs, residuals: BackwardResiduals, cotangents: Residuals,
             wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `selected.backward`."""
  operands, spec = inputs.operands, inputs.spec
  dense_operands.assert_operands(operands)
  dense_operands.assert_residuals(operands, residuals, cotangents)
  delta = compute_delta(residuals, cotangents, inputs.dtype)
  found = {}
  if operands.sinks is not None and "sinks" in wrt:
    found["sinks"] = d_sinks(operands.sinks, residuals.lse, delta)
  kept = dropout.kept_scale(spec.dropout_prob)
  query, d_out, row_lse, row_delta = map(_padded, (
      nonfinite.mask_nonfinite(operands.query), cotangents.out,
      *(x.swapaxes(1, 2)[..., None] for x in (finite_lse(residuals.lse), delta))))

  def of_group(group: Group, results: _Sums) -> _Sums:
    group = group._replace(key=nonfinite.mask_nonfinite(group.key))

    def step(n: jax.Array, sums: _Sums) -> _Sums:
      union, rows = _union(inputs, group, n), _scaled_rows(inputs, query, group, n)
      d_rows = _rows(inputs, d_out, group, n)
      lse, delta = (_rows(inputs, x, group, n).swapaxes(1, 2) for x in (row_lse, row_delta))

      def of_chunk(c: jax.Array, carry: _Sums) -> _Sums:
        chunk = _chunk(inputs, group, union, c)
        scores, slope = _capped(inputs, product("knd,krd->knr", chunk.key, rows, inputs))
        # A hidden key may have a higher score than the lse, and an infinite weight no derivative.
        weights = _masked(chunk.seen, cpu_math.exp(jnp.minimum(scores - lse, 1)), 0,
                          transposed=True)
        d_weights = _dropped(chunk, product("kne,kre->knr", chunk.value, d_rows, inputs),
                             transposed=True)
        d_scores = weights * (d_weights * kept - delta)
        d_scores = d_scores if slope is None else d_scores * slope
        d_value = product("knr,kre->kne", _dropped(chunk, weights, transposed=True), d_rows, inputs)
        return _Sums(
            carry.query + product("knr,knd->krd", d_scores, chunk.key, inputs),
            _scattered(carry.key, chunk, product("knr,krd->knd", d_scores, rows, inputs)),
            _scattered(carry.value, chunk, d_value))

      of_tile = tile_ops.loop(0, _num_chunks(inputs, union), of_chunk, sums._replace(
          query=jnp.zeros_like(rows)))
      # Queries are scaled already, and so is the cotangent of a key.
      d_query = of_tile.query * jnp.asarray(spec.softmax_scale, inputs.dtype)
      return of_tile._replace(query=_write(inputs, sums.query, group, n, d_query))

    zeros = lambda x: jnp.zeros_like(x, dtype=inputs.dtype)
    sums = tile_ops.loop(0, query.shape[1] // TILE, step, _Sums(
        results.query, zeros(group.key), zeros(group.value)))
    return _Sums(sums.query, _write_keys(results.key, group, sums.key),
                 _write_keys(results.value, group, sums.value * kept))

  if {*_Sums._fields} & {*wrt}:
    sums = _over_groups(inputs, of_group, _Sums(
        jnp.zeros(query.shape, operands.query.dtype),
        *(jnp.zeros(x.shape, x.dtype) for x in operands[1:3])))
    found.update(sums._asdict() | {"query": sums.query[:, :operands.query.shape[1]]})
  return tuple(found[name] for name in wrt)


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
  operands, heads, block_kv = inputs.operands, _step_heads(inputs), inputs.lists.block_kv
  batch, keys, key_heads, _ = operands.key.shape
  blocks = cdiv(keys, block_kv) + 1

  def body(n: jax.Array, results: Results) -> Results:
    n, steps = jnp.asarray(n, jnp.int32), jnp.int32(key_heads // heads)
    row, first = lax.div(n, steps), lax.rem(n, steps) * heads
    key, value = (tile_lib.slice_at(x, (row, 0, first, 0), (1, keys, heads, x.shape[3]))[0]
                  for x in (operands.key, operands.value))
    key, value = nonfinite.propagate_nan(key, value, nonfinite.is_finite(key, value))
    key, value = (jnp.pad(x.reshape(keys, -1).astype(inputs.dtype), (
        (0, blocks * block_kv - keys), (0, 0))).reshape(blocks, block_kv, -1)
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


def _write_keys(x: jax.Array, group: Group, blocks: jax.Array) -> jax.Array:
  """Writes key blocks, shaped like `Group.key`, into x [B, S, K, width]."""
  rows = blocks.reshape(-1, blocks.shape[2])[:x.shape[1]].reshape(1, x.shape[1], -1, x.shape[3])
  return tile_ops.write_at(x, rows.astype(x.dtype), (group.batch, 0, group.first, 0))


def _sinks(inputs: Inputs, group: Group) -> jax.Array | None:
  """Returns the sinks of a step's rows [heads, queries * G, 1], or None."""
  sinks, heads = inputs.operands.sinks, _step_heads(inputs)
  if sinks is None:
    return None
  sinks = tile_lib.slice_at(sinks, (group.batch if sinks.shape[0] > 1 else 0,
                                    group.first * inputs.group), (1, heads * inputs.group))
  return jnp.tile(sinks.reshape(heads, inputs.group), (1, TILE))[..., None].astype(inputs.dtype)


def _coordinates(inputs: Inputs, group: Group, query: jax.Array, key: jax.Array,
                 ) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
  """Returns the rest of the mask, and coordinates broadcastable to [heads, queries, G, n].

  Args:
    inputs: the attention.
    group: the heads.
    query: int32 [queries].
    key: int32 [n].
  """
  mask, heads = inputs.operands.mask, _step_heads(inputs)
  at_row = lambda x: x[group.batch if x.shape[0] > 1 else 0]
  batch = group.batch if mask.batch_index is None else at_row(mask.batch_index)
  start = jnp.int32(0) if mask.head_offset is None else at_row(mask.head_offset)
  local = group.first * inputs.group + jnp.arange(heads * inputs.group, dtype=jnp.int32)
  local = local.reshape(heads, 1, inputs.group, 1)
  query, key = query[None, :, None, None], key[None, None, None]
  at = mask_lib.Coordinates(batch, local + start, query, key, query, key)
  return sliced(inputs.rest, group.batch, at._replace(head=local),
                inputs.operands.key.shape[1]), at


def _union(inputs: Inputs, group: Group, n: jax.Array) -> Union:
  """Returns the key blocks that the queries of tile n see."""
  lists, keys = inputs.lists, inputs.operands.key.shape[1]
  count = group.key.shape[0] - 1
  query = jnp.asarray(n, jnp.int32) * TILE + jnp.arange(TILE, dtype=jnp.int32)
  key = jnp.arange(count * lists.block_kv, dtype=jnp.int32)
  rest, at = _coordinates(inputs, group, query, key)
  found = lists.blocks_of(at.batch, at.head[0, 0, 0, 0], query)
  found = jnp.where((found < 0) | (found >= count), jnp.int32(count), found)
  table = jnp.zeros((count + 1, TILE), bool).at[
      found, jnp.arange(TILE, dtype=jnp.int32)[:, None]].set(True, mode="promise_in_bounds")
  listed = jnp.repeat(table[:count].T, lists.block_kv, axis=1)[None, :, None]
  seen = jnp.asarray(rest.visible(at)) & (at.key_index < keys) & listed & (
      at.query_index < inputs.operands.query.shape[1])
  seen = seen.any((0, 1, 2)).reshape(count, lists.block_kv).any(1)
  # Not `jnp.nonzero`, which jax 0.12 cannot partition over a mesh.
  per_chunk = _chunk_blocks(inputs)
  size = cdiv(count, per_chunk) * per_chunk
  place = jnp.where(seen, lax.cumsum(seen.astype(jnp.int32)) - 1, jnp.int32(size))
  blocks = jnp.full(size + 1, count, jnp.int32).at[place].set(
      jnp.arange(count, dtype=jnp.int32), mode="promise_in_bounds")
  return Union(query, table, blocks[:size], seen.sum(dtype=jnp.int32))


def _chunk_blocks(inputs: Inputs) -> int:
  """Returns the key blocks of a chunk."""
  return max(1, CHUNK // inputs.lists.block_kv)


def _num_chunks(inputs: Inputs, union: Union) -> jax.Array:
  """Returns the chunks of a union."""
  size = _chunk_blocks(inputs)
  return lax.div(union.num_seen + jnp.int32(size - 1), jnp.int32(size))


def _chunk(inputs: Inputs, group: Group, union: Union, c: jax.Array) -> Chunk:
  """Returns chunk c of a union."""
  lists, spec, size = inputs.lists, inputs.spec, _chunk_blocks(inputs)
  blocks = tile_lib.slice_at(union.blocks, (c * size,), (size,))
  take = lambda x: x.at[blocks].get(mode="promise_in_bounds")
  key, value = (take(x).reshape(size * lists.block_kv, _step_heads(inputs), -1).swapaxes(0, 1)
                for x in (group.key, group.value))
  number = blocks[:, None] * lists.block_kv + jnp.arange(lists.block_kv, dtype=jnp.int32)[None]
  rest, at = _coordinates(inputs, group, union.query, number.reshape(-1))
  listed = jnp.repeat(take(union.table), lists.block_kv, axis=0).T[None, :, None]
  seen = jnp.asarray(rest.visible(at)) & (at.key_index < inputs.operands.key.shape[1]) & listed
  keep = None
  if spec.dropout_prob:
    words = inputs.operands.dropout_key
    assert words is not None
    keep = dropout.keep_mask(words[group.batch if words.shape[0] > 1 else 0],
                             dropout.move_to_positions(rest, at), spec.dropout_prob)
  return Chunk(blocks, key, value, seen, keep)


def _scattered(blocks: jax.Array, chunk: Chunk, found: jax.Array) -> jax.Array:
  """Adds [heads, n, width] to the blocks of a chunk."""
  parts = found.swapaxes(0, 1).reshape(len(chunk.blocks), *blocks.shape[1:])
  return blocks.at[chunk.blocks].add(parts, mode="promise_in_bounds", indices_are_sorted=True)


def _capped(inputs: Inputs, scores: jax.Array) -> tuple[jax.Array, jax.Array | None]:
  """Returns scores after the soft cap, and their derivative (None: 1)."""
  if (cap := inputs.spec.logits_soft_cap) is None:
    return scores, None
  capped = jnp.tanh(scores / cap)
  return capped * cap, 1 - capped * capped


def _dropped(chunk: Chunk, weights: jax.Array, *, transposed: bool = False) -> jax.Array:
  """Returns weights with zeros where they are dropped, unscaled."""
  return weights if chunk.keep is None else _masked(chunk.keep, weights, 0, transposed=transposed)


def _masked(where: jax.Array, x: jax.Array, filler: float, *,
            transposed: bool = False) -> jax.Array:
  """Returns x [heads, rows, n], or [heads, n, rows], with a filler where `where` is False."""
  heads, rows, keys = (x.shape[0], *(x.shape[:0:-1] if transposed else x.shape[1:]))
  wide = jnp.broadcast_to(where, (heads, TILE, rows // TILE, keys))
  wide = wide.transpose(0, 3, 1, 2) if transposed else wide
  return jnp.where(wide.reshape(x.shape), x, filler)
