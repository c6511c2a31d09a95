# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backward kernel on TPUs: cotangents of queries, keys and values together.

  scores = K Q^T;  d_value = P d_out;  d_key = dS Q;  d_query^T = K^T dS

The cotangent of the queries stays in vector memory, which saves the two products that a separate
kernel for it would have to repeat. Where there are more queries than fit, ranges of them are
computed one after another, and so are parts of the query heads of a key head; the sums of keys and
values then pass through HBM (`key_sums`).
"""

import functools
import itertools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, listed, nonfinite, online_softmax
from attn_core.kernels.common.backward import complete_cotangents, finite_lse
from attn_core.kernels.common.contract import (BackwardFn, BackwardResiduals, RemoteCopy,
                                                   Residuals)
from attn_core.kernels.tpu.flash import (
    call, depth_columns, key_sums, mod_sums, patterns as patterns_lib, row_sums, scalar_memory,
    schedule, score_tiles, step_list, tile_inputs, tiling as tiling_lib)
from attn_core.kernels.tpu.flash.tile_inputs import Index, KernelRefs, TileIndex, TokenRange
from attn_core.kernels.tpu.flash.tile_loop import (
    KernelParams, Strip, for_each_block, head_by_head, issue_ahead, loop, make_kernel_params)
from attn_core.types import AttentionSpec, BlockSizes, Operands

Ref = Any  # a Pallas reference
MOST_UNROLLED = 8  # blocks of queries that are written without a loop


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: BackwardResiduals, cotangents: Residuals, wrt: tuple[str, ...], *,
             fallback: BackwardFn) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `contract.BackwardFn`.

  Args:
    fallback: computes the cotangents of the bias, and of arrays of the score mod by pairs.
  """
  return backward_with_remote_copy(operands, spec, block_sizes, residuals, cotangents, wrt, None,
                                   fallback=fallback)[0]


def backward_with_remote_copy(
    operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes, residuals: BackwardResiduals,
    cotangents: Residuals, wrt: tuple[str, ...], transfer: RemoteCopy | None, *,
    fallback: BackwardFn) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """Runs `backward` and copies arrays to another device in the meantime.

  Args:
    operands, spec, block_sizes: those of the forward.
    residuals: out [B, T, H, E] and lse [B, H, T] of the forward.
    cotangents: of out and lse.
    wrt: names of the operands whose cotangents are returned.
    transfer: the arrays to copy; None: none.
    fallback: computes the cotangents of the bias, and of arrays of the score mod by pairs.

  Returns:
    (the cotangents, the arrays received in place of those of `transfer`).
  """
  dense_operands.assert_shapes(operands)
  batch, queries, heads, _ = operands.query.shape
  chex.assert_shape(residuals.lse, (batch, heads, queries))
  received: list[jax.Array] = []
  local = listed.of_local_rows(operands, spec)
  def products(d_out: jax.Array, lse: jax.Array, delta: jax.Array,
               wrt: tuple[str, ...]) -> dict[str, jax.Array]:
    found, arrays = _backward(*local, block_sizes, transfer, _RowArrays(d_out, lse, delta), wrt)
    received.extend(arrays)
    return found
  others = lambda names: fallback(operands, spec, block_sizes, residuals, cotangents, names)
  sums = _row_sums(*local, block_sizes, residuals, cotangents)
  found = complete_cotangents(products, others, operands, residuals, cotangents, wrt,
                              score_tiles.own_names(operands, spec), sums)
  return found, tuple(received)


def _row_sums(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
              residuals: BackwardResiduals, cotangents: Residuals) -> jax.Array | None:
  """Returns `row_sums.row_sums`; None where the cotangent of lse includes it."""
  if residuals.out is None:
    return None
  tiling = tiling_lib.make_tiling(operands, spec, block_sizes, backward=True)
  limit = tiling_lib.vmem_limit(block_sizes, tiling, operands, backward=True)
  return row_sums.row_sums(cotangents.out, residuals.out, tiling, limit)


class _RowArrays(NamedTuple):
  """Numbers of the query rows that the backward needs."""

  d_out: jax.Array  # [B, T, H, E]
  lse: jax.Array  # float32 [B, H, T]
  delta: jax.Array  # float32 [B, H, T]: rowsum(d_out * out) - d_lse


class _BackwardArrays(NamedTuple):
  """The arrays that the kernel reads, or the readers of their blocks."""

  query: Any  # [B, T, H, D]; a reader gives [queries, D]
  d_out: Any  # [B, T, H, E]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  lse: Any  # lse * log2(e) [B, H, 1, padded_queries], +inf for rows without visible keys; a reader
            # gives a block [1, query_heads, 1, block_q]
  delta: Any  # the same shapes


def _backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
              transfer: RemoteCopy | None, rows: _RowArrays, wrt: tuple[str, ...],
              ) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...]]:
  """Computes cotangents of query, key and value, and of arrays of the score mod in `wrt`.

  Returns:
    (cotangents by name, the arrays received in place of those of `transfer`).
  """
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  mask = dense_operands.mask_of(operands, spec)
  tiling = tiling_lib.make_tiling(operands, spec, block_sizes, backward=True)
  pad_rows = lambda x, fill: jnp.pad(
      x[:, :, None], ((0, 0),) * 3 + ((0, tiling.padded_queries - queries),), constant_values=fill)
  query, key, value = nonfinite.mask_nonfinite_unless_full(
      mask, operands.query, operands.key, operands.value)
  lse = pad_rows(finite_lse(rows.lse) * online_softmax.LOG2E, jnp.inf)
  arrays = _BackwardArrays(query, rows.d_out, key, value, lse, pad_rows(rows.delta, 0))
  groups = scalar_memory.num_groups(operands, spec, tiling, by_keys=True,
                                    requested=block_sizes)
  of_mods = mod_sums.mod_sums(operands, spec, tiling, wrt)

  def run(operands: Operands, arrays: _BackwardArrays, transfer: RemoteCopy | None,
          ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    found, received = _backward_group(operands, spec, block_sizes, arrays, of_mods, transfer)
    cut = lambda x, length, like: x[:, :length].astype(like.dtype)
    return (found[0][:, :queries], cut(found[1], keys, operands.key),
            cut(found[2], keys, operands.value), *found[3:]), received

  found, received = scalar_memory.in_groups(run, operands, arrays, groups, transfer)
  return (dict(zip(("query", "key", "value"), found))
          | of_mods.finish(found[3:], operands, spec)), received


def _backward_group(
    operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes, arrays: _BackwardArrays,
    of_mods: mod_sums.ModSums, transfer: RemoteCopy | None,
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """Runs the kernel on batch rows whose schedule fits in scalar memory.

  Returns:
    ((d_query [B, padded queries, H, D], d_key [B, padded_keys, K, D], d_value [B, padded_keys, K,
    E], and the sums of `of_mods`), the arrays received in place of those of `transfer`).
  """
  tiling = of_mods.tiling
  batch, _, heads, width = operands.query.shape
  key_heads, value_width = operands.value.shape[2:]
  # 1. Schedule and inputs.
  mask = dense_operands.mask_of(operands, spec)
  steps, lists = schedule.build(mask, tiling, by_keys=True)
  patterns = patterns_lib.choose(steps, mask, tiling, by_keys=True)
  inputs = tile_inputs.TileInputs(steps, lists, tiling, by_keys=True)
  add_rows = lambda x: inputs.add_array(
      x, (1, tiling.query_heads, 1, tiling.block_q), lambda b, h, i, j: (b, h, 0, i))
  blocks = (*(inputs.query_blocks(x.shape) for x in arrays[:2]),
            *(inputs.key_blocks(x.shape) for x in arrays[2:4]))
  query, d_out, key, value = (
      inputs.add_tokens(block, block.pack(x)) for block, x in zip(blocks, arrays))
  readers = _BackwardArrays(query, d_out, key, value, add_rows(arrays.lse), add_rows(arrays.delta))
  params = make_kernel_params(inputs, operands, spec, tiling, patterns, single_step_rows=False)
  of_mods = of_mods._replace(scratch_start=len(params.mod_scratch))
  # 2. Outputs: the cotangent of all queries of a range is one block, written in its last step.
  rows = tiling.blocks_of_range * tiling.block_q
  of_queries = tile_inputs.TokenBlocks(
      batch, tiling.num_ranges * rows, heads, width, tiling.query_heads, rows,
      lambda i, j: lax.div(i, jnp.int32(tiling.blocks_of_range)) if tiling.num_ranges > 1 else 0)
  of_keys = inputs.key_blocks(operands.key.shape), inputs.key_blocks(operands.value.shape)
  sums = key_sums.KeySums(of_keys, tiling.halves) if tiling.visits_of_keys > 1 else None
  outputs = [call.Output(of_queries.shape, operands.query.dtype, of_queries.block_shape,
                         of_queries.block_index)]
  outputs += sums.outputs if sums else [
      call.Output(x.shape, operands.query.dtype, x.block_shape, x.block_index) for x in of_keys]
  outputs += of_mods.outputs(batch, heads)
  # 3. The kernel, with sums of d_query^T, d_key and d_value in scratch memory.
  found, received = call.call(
      functools.partial(_backward_kernel, params, inputs, readers, (of_queries, *of_keys),
                        _Sums(sums, of_mods)),
      inputs, outputs,
      call.LaunchParams(
          (batch, key_heads // tiling.key_heads, tiling.halves, tiling.parts_of_half,
           inputs.num_steps),
          [(tiling.query_heads * tiling.blocks_of_range, width, tiling.block_q),
           (tiling.key_heads, tiling.block_kv, width),
           (tiling.key_heads, tiling.block_kv, value_width), *(sums.scratch if sums else ()),
           *params.mod_scratch, *of_mods.scratch],
          tiling_lib.vmem_limit(block_sizes, tiling, operands, backward=True),
          "attn_core_backward", semaphores=key_sums.SEMAPHORES if sums else 0), transfer)
  d_query, of_keys_found, of_mods_found = found[0], found[1:3], found[3:]
  d_keys = sums.unpack(of_keys_found) if sums else [
      block.unpack(x) for block, x in zip(of_keys, of_keys_found)]
  return (of_queries.unpack(d_query), *d_keys, *of_mods_found), received


class _Sums(NamedTuple):
  """Sums that pass through HBM, or leave the kernel besides the cotangents."""

  of_keys: key_sums.KeySums | None
  of_mods: mod_sums.ModSums


def _backward_kernel(params: KernelParams, inputs: tile_inputs.TileInputs,
                     readers: _BackwardArrays, results: tuple[tile_inputs.TokenBlocks, ...],
                     sums: _Sums, refs: KernelRefs, outputs: tuple[Ref, ...],
                     scratch: tuple[Ref, ...]) -> None:
  """Computes one block of keys against one block of queries, for the heads of a step."""
  grid, kinds, flags = inputs.step(refs.scalars, refs.program_ids)
  (d_query, d_key, d_value), rest = scratch[:3], scratch[3:]
  if sums.of_keys is not None:
    *buffers, arrived = rest
    of_transfers, rest = (*buffers[:2], arrived), tuple(buffers[2:])
  refs = refs._replace(scratch=rest)
  is_at = lambda flag: pl.when((flags & flag) != 0)

  # 1. Clear the sums: of queries in the first step of their range, of keys and values in the first
  # step of their block.
  @is_at(step_list.BEGIN)
  def _() -> None:
    d_query[...] = jnp.zeros_like(d_query)

  @is_at(step_list.FIRST)
  def _() -> None:
    d_key[...] = jnp.zeros_like(d_key)
    d_value[...] = jnp.zeros_like(d_value)

  of_mods = _ModOutputs(sums.of_mods, outputs[3:])
  of_mods.sums.start(refs, of_mods.refs)

  # 2. Add the visible tiles.
  params.prepare(refs, grid, kinds)
  step = _BackwardStep(params, readers, refs, (d_query, d_key, d_value), of_mods)
  row_blocks = step.row_blocks()

  def compute(strips: list[Strip]) -> None:
    for tile, masked, products in issue_ahead(strips, step.products, tiling_lib.AHEAD[True]):
      step.add(tile, masked, products, row_blocks)

  # The products hide what a loop over heads takes.
  for_each_block(params, grid, kinds, lambda strips: head_by_head(params, strips, compute),
                 lambda: loop(params, grid, kinds, compute))
  of_mods.sums.end_step(refs, of_mods.refs, grid, kinds)

  # 3. Write the sums: of keys and values in the last step of their block, of queries in the last
  # step of their range.
  def total_of_keys(number: int, head: int) -> jax.Array:
    if number == 0:
      return d_key[head] * params.spec.softmax_scale
    return d_value[head] * params.dropout.scale

  if sums.of_keys is not None:
    sums.of_keys.add(refs, grid, flags, total_of_keys, outputs[1:3], of_transfers)
  else:
    @is_at(step_list.LAST)
    def _() -> None:
      all_keys = TokenRange(0, params.tiling.block_kv)
      for number, head in itertools.product(range(2), range(params.tiling.key_heads)):
        ref = outputs[1 + number]
        slices = results[1 + number].slices(head, all_keys)
        ref[slices] = total_of_keys(number, head).astype(ref.dtype)

  @is_at(step_list.END)
  def _() -> None:
    size, num_blocks, ref = params.tiling.block_q, params.tiling.blocks_of_range, outputs[0]
    for head in range(params.tiling.query_heads):
      def write(block: Index, head: int = head) -> None:
        start = block * size if isinstance(block, int) else pl.multiple_of(block * size, size)
        x = d_query[head * num_blocks + block].T * params.spec.softmax_scale
        ref[results[0].slices(head, TokenRange(start, size))] = x.astype(ref.dtype)
      if num_blocks > MOST_UNROLLED:
        pl.loop(0, num_blocks)(write)
      else:
        for block in range(num_blocks):
          write(block)


class _ModOutputs(NamedTuple):
  """Sums of cotangents of arrays of the score mod, and the outputs that they are added to."""

  sums: mod_sums.ModSums
  refs: tuple[Ref, ...]


class _BackwardStep(NamedTuple):
  """One grid step."""

  params: KernelParams
  readers: _BackwardArrays
  refs: KernelRefs
  scratch: tuple[Ref, ...]  # sums of d_query^T by head and block of a range, d_key, d_value
  of_mods: _ModOutputs

  def row_blocks(self) -> tuple[Ref, Ref]:
    """Returns the references of lse and delta, [1, query_heads, 1, block_q]."""
    return self.readers.lse(self.refs), self.readers.delta(self.refs)

  def products(self, tile: TileIndex) -> tuple[jax.Array, ...]:
    """Computes (scores, d_weights), [keys, queries] each."""
    readers, params, refs = self.readers, self.params, self.refs
    key, value = (read(refs, params.key_head(tile), tile.keys)
                  for read in (readers.key, readers.value))
    query, d_out = (read(refs, tile.head, tile.queries) for read in (readers.query, readers.d_out))
    pairs = (params.with_key_columns(refs, tile, key),
             params.with_query_columns(refs, tile.head, tile.queries, query)), (value, d_out)
    return tuple(params.dot(keys, queries, ((1,), (1,))) for keys, queries in pairs)

  def add(self, tile: TileIndex, masked: int, products: tuple[jax.Array, ...],
          row_blocks: tuple[Ref, Ref]) -> None:
    """Adds the contributions of a tile to the cotangents."""
    params, refs, readers = self.params, self.refs, self.readers
    (scores, d_weights), (lse, delta) = products, row_blocks
    d_query, d_key, d_value = self.scratch
    key_head, keys, queries = params.key_head(tile), tile.keys.slice, tile.queries.slice
    query, d_out = (read(refs, tile.head, tile.queries) for read in (readers.query, readers.d_out))
    # 1. P = exp(logits - lse).
    logits, pull = params.logits(
        refs, tile, scores, pulls=True,
        wrt=tuple(n for n in self.of_mods.sums.kinds if n != self.slopes))
    assert pull is not None
    weights = jnp.exp2(logits * params.unit - lse[0, tile.head, :, queries])
    weights = params.hide(refs, tile, masked, weights, 0.0)
    # 2. dS = P * (dP - delta).
    kept, d_weights = params.dropout.drop(refs, tile, weights.astype(d_out.dtype), d_weights)
    d_logits = weights * (d_weights * params.dropout.scale - delta[0, tile.head, :, queries])
    d_scores, d_arrays = pull(d_logits)
    d_scores = d_scores.astype(query.dtype)
    self.of_mods.sums.add(refs, self.of_mods.refs, tile, d_arrays)
    # 3. The products with dS and P.
    d_value[key_head, keys] += params.dot(kept, d_out)
    d_key[key_head, keys] += params.dot(d_scores, query)
    num_blocks, block = params.tiling.blocks_of_range, tile.grid.query_block
    if params.tiling.num_ranges > 1:
      block = lax.rem(block, jnp.int32(num_blocks))
    place = tile.head * num_blocks + block, slice(None), queries
    before = d_query[place]
    of_queries, d_slopes = self.product_with_keys(
        tile, readers.key(refs, key_head, tile.keys), d_scores)
    d_query[place] = before + of_queries
    self.of_mods.sums.add(refs, self.of_mods.refs, tile, d_slopes)

  @property
  def slopes(self) -> int | None:
    """The array of the score mod that is in the products of keys and queries, if it is wanted."""
    mod = self.params.mod
    return mod.in_product if mod is not None and mod.in_product in self.of_mods.sums.kinds else None

  def product_with_keys(self, tile: TileIndex, key: jax.Array,
                        d_scores: jax.Array) -> tuple[jax.Array, score_tiles.Arrays]:
    """Returns K^T dS [D, queries] of a tile, and the cotangents of `slopes`, by a few more rows."""
    params = self.params
    if self.slopes is None or params.mod is None:
      return params.dot(key, d_scores, ((0,), (0,))), {}
    rows = jnp.concatenate([key.T, depth_columns.rows_of_keys(tile.keys.length)], 0)
    of_queries, sums = jnp.split(params.dot(rows, d_scores), (key.shape[1],))
    return of_queries, {self.slopes: params.mod.d_slopes(self.refs, tile, sums)}
