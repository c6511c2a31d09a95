# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding in plain XLA: a few queries per batch row against many keys, each key read once.

Computes one row of the batch after another, all its heads together, and only the blocks of keys
that its mask leaves visible. So the time is proportional to the visible keys of every row, and a
row's result has the same bits in any batch: the order of its sums depends only on its own mask and
on the block size.

  scores[c, k, r] = sum over d of query[k, r, d] * key[c, k, d]

With few queries a matrix product does not reach the memory's speed; on a CPU the products are sums
that vectorize and read every number in place in the cache. With `cpu_matvec.MANY_ROWS` they are
matrix products. num_rows = T * G is the number of rows of a key head (token-major).
Flash-decoding, https://pytorch.org/blog/flash-decoding/.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches import quantize
from attn_core.kernels.common import dense_operands, matmul_precision, online_softmax
from attn_core.kernels.common.contract import BackwardResiduals, Kernel, Residuals
from attn_core.kernels.xla import cpu_math, cpu_matvec, flash, tile_ops, tiling
from attn_core.masks import block_map, tile as tile_lib
from attn_core.score_mods import evaluate, score_mod
from attn_core.types import (AttentionSpec, BlockSizes, Operands, at_least_float32, holds_pairs,
                             value_width)

HALF_GROUP = quantize.GROUP // 2  # even or odd columns that share a scale, with 4 bits


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  dense_operands.assert_operands(operands, spec.latent_width)
  levels = _block_inputs(operands, spec, block_sizes)
  batch, length, heads, _ = operands.query.shape
  inputs, width = levels[-1], value_width(operands, spec)

  def row(b: jax.Array, results: Residuals) -> Residuals:
    grid_index = tile_ops.GridIndex(b, 0)
    rows = tile_ops.scaled_query(inputs, grid_index, None)

    def key_block(inputs: tile_ops.BlockedInputs, j: jax.Array, running: online_softmax.Running,
                  masked: bool) -> online_softmax.Running:
      block = _Block(inputs, b, j)
      logits = _logits(block, rows)
      if masked:
        # 0 * NaN is NaN, so values that may be hidden are replaced by zeros.
        seen = _seen(inputs, (b, j))
        if seen.shape[1:] == (1, 1, 1):  # all rows see the same keys
          kept = jnp.broadcast_to(seen[:, :, 0, 0], (inputs.sizes.block_kv, inputs.step_heads))
        else:
          kept = _finite(block)  # other values make their keys NaN
          logits = jnp.where(kept[..., None], logits, jnp.nan)
        block = block.with_masked_values(kept, apart=not many)
        logits = _hide(inputs, seen, logits)
      if many:
        return online_softmax.update(
            running, logits.transpose(1, 2, 0), lambda x: _weigh(block, x.transpose(2, 0, 1)),
            exp=cpu_math.exp)
      return online_softmax.update(
          running, logits[..., None], lambda x: _weigh(block, x[..., 0])[None], axis=0,
          exp=lambda x: lax.optimization_barrier(tile_ops.weights_of(inputs, x)),
          fold=cpu_matvec.fold)

    many = rows.shape[1] >= cpu_matvec.MANY_ROWS  # then keys are the last axis of logits
    leading = () if many else (1,)
    running = online_softmax.start((*leading, *rows.shape[:2]), width, inputs.dtype)
    for level in levels:
      running = tile_ops.visit_full_and_partial(
          level, grid_index, 0, functools.partial(key_block, level), running)
    sinks = tile_ops.row_sinks(inputs, grid_index)
    sinks = None if sinks is None else sinks.reshape(*leading, *sinks.shape)
    out, lse = (x.reshape(*rows.shape[:2], -1) for x in online_softmax.finish(running, sinks))
    # A mean of finite values is finite; a row that saw a non-finite value becomes NaN in whole.
    finite = (out - out).sum(-1, keepdims=True) == 0
    out, lse = (jnp.where(finite, x, jnp.nan) for x in (out, lse))
    return Residuals(tile_ops.write_rows(inputs, grid_index, None, results.out, out),
                     tile_ops.write_row_scalars(inputs, grid_index, 0, results.lse, lse[..., 0]))

  return tile_ops.loop(0, batch, row, Residuals(
      jnp.zeros((batch, length, heads, width), dense_operands.out_dtype(operands, spec)),
      jnp.zeros((batch, heads, length), dense_operands.lse_dtype(spec))))


def _block_inputs(operands: Operands, spec: AttentionSpec,
                  block_sizes: BlockSizes) -> list[tile_ops.BlockedInputs]:
  """Returns one block of queries and the blocks of keys that each row must visit, unpadded.

  Runs of keys that are all visible form large blocks, which take less time per key; the others form
  small blocks, so that a row computes few keys that it does not see. With `block_sizes.block_kv`
  all blocks have that size.
  """
  (_, queries, _, _), (_, keys, key_heads, _) = operands.query.shape, operands.key.shape
  pairs = 2 if holds_pairs(operands.key_scale, operands.key) else 1
  elements = key_heads * max(operands.key.shape[-1], operands.value.shape[-1]) * pairs
  block_kv = min(keys, block_sizes.block_kv or tiling.decode_block(keys, elements))
  if block_kv > cpu_matvec.FAN:  # another size would be folded part by part
    block_kv -= block_kv % cpu_matvec.FAN
  sizes = block_map.Sizes(queries, keys, queries, block_kv)
  kinds = block_map.block_kinds(dense_operands.mask_of(operands, spec), sizes)
  kinds = block_map.merge_heads(kinds, kinds.shape[1])
  # XLA:CPU takes the bits of a whole float8 cache before the loop, which copies 8-bit numbers;
  # slicing a block of a float8 array and taking its bits then is several times as slow.
  operands = operands._replace(
      key=quantize.bits(operands.key), value=quantize.bits(operands.value))
  make = lambda sizes, visits: tile_ops.BlockedInputs(operands, spec, sizes, key_heads, visits)
  large = tiling.decode_large_block(keys, elements)
  if block_sizes.block_kv or large <= block_kv:
    return [make(sizes, block_map.block_map(kinds))]
  joined, left = block_map.join_full(kinds, large // block_kv)
  return [make(sizes._replace(block_kv=large), block_map.full_map(joined)),
          make(sizes, block_map.block_map(left))]


def _start(sizes: block_map.Sizes, j: tile_ops.Index) -> jax.Array:
  """Returns the first key of a block; the last block begins early enough to end with the keys."""
  return jnp.minimum(j * sizes.block_kv, sizes.keys - sizes.block_kv)


class _Block(NamedTuple):
  """One block of a row's keys, sliced out of the cache wherever it is read.

  Names are "key", "value", and "rest": the columns of 8-bit latent keys that are stored apart. With
  4 bits the even columns are read as one block and the odd ones as another, see `halves`.
  """

  inputs: tile_ops.BlockedInputs
  batch: tile_ops.Index
  block_index: tile_ops.Index
  values: jax.Array | None = None  # [block_kv, K, E], replaces the cache's
  value_scale: jax.Array | None = None  # [block_kv, K] or [.., groups], replaces the cache's
  half: int | None = None  # with 4 bits: 0 for even columns, 1 for odd ones

  def _stored_in(self, name: str) -> str:
    """Returns the field of `Operands` that holds an array; latent values are a part of the keys."""
    if name == "rest":
      return "value"
    return "key" if self.inputs.spec.latent_width is not None else name

  @property
  def has_pairs(self) -> bool:
    """Whether the cache holds two numbers in a byte."""
    return holds_pairs(self.inputs.operands.key_scale, self.inputs.operands.key)

  def halves(self) -> "list[_Block]":
    """Returns the blocks of all even and of all odd columns, or the one of all columns."""
    return [self._replace(half=half) for half in (0, 1)] if self.has_pairs else [self]

  def width(self, name: str) -> int:
    """Returns the number of columns of an array as it is stored."""
    operands, spec = self.inputs.operands, self.inputs.spec
    if name == "value" and not self.has_pairs:
      return value_width(operands, spec)
    return getattr(operands, self._stored_in(name)).shape[-1]

  def itemsize(self, name: str) -> int:
    """Returns the bytes of a number of an array."""
    return getattr(self.inputs.operands, self._stored_in(name)).dtype.itemsize

  def slice(self, name: str, keys: tuple[int, int], columns: tuple[int, int]) -> jax.Array:
    """Returns [length, K, width] of an array, by (first, length) of either axis."""
    if name == "value" and self.values is not None:
      return self.values[keys[0]:sum(keys), :, columns[0]:sum(columns)]
    x = getattr(self.inputs.operands, self._stored_in(name))
    start, batch = _start(self.inputs.sizes, self.block_index) + keys[0], self.batch
    if cpu_matvec.WIDENS_WHOLE and x.dtype == jnp.bfloat16:
      # The barrier makes `x` a different array in every step, also of a loop with one block.
      x, start, batch = lax.optimization_barrier((x, start, batch))
    return tile_lib.slice_at(x, (batch, start, 0, columns[0]),
                          (1, keys[1], self.inputs.step_heads, columns[1]))[0]

  def scales(self, name: str) -> jax.Array | None:
    """Returns the scales [block_kv, K] of an 8-bit cache, or None: `part` is multiplied by them."""
    return None if self.has_pairs else self.all_scales(name)

  def all_scales(self, name: str) -> jax.Array | None:
    """Returns the scales [block_kv, K], with 4 bits [block_kv, K, groups], or None."""
    if name == "value" and self.value_scale is not None:
      return self.value_scale
    scale = getattr(self.inputs.operands, f"{self._stored_in(name)}_scale")
    sizes = self.inputs.sizes
    return scale if scale is None else tile_lib.slice_at(
        scale, (self.batch, _start(sizes, self.block_index), *[0] * (scale.ndim - 2)),
        (1, sizes.block_kv, self.inputs.step_heads, *scale.shape[3:]))[0].astype(
            _dtype(self.inputs))

  def part(self, name: str, keys: tuple[int, int], columns: tuple[int, int]) -> jax.Array:
    """Returns `slice` in the dtype of sums, without its scales but those of groups."""
    x, scale = self.slice(name, keys, columns), self.all_scales(name)
    if self.half is None or scale is None:
      return quantize.unscaled(x).astype(_dtype(self.inputs))
    scale = quantize.of_columns(scale[keys[0]:sum(keys)], *columns, HALF_GROUP)
    return quantize.unpack(x, bool(self.half)).astype(_dtype(self.inputs)) * scale

  def whole(self, name: str) -> jax.Array:
    """Returns [block_kv, K, D or E], dequantized."""
    columns = (0, self.width(name))
    if self.half is not None:
      x = self.part(name, (0, self.inputs.sizes.block_kv), columns)
      return x.astype(self.inputs.operands.query.dtype)
    x, scale = self.slice(name, (0, self.inputs.sizes.block_kv), columns), self.scales(name)
    if scale is not None:
      return quantize.dequantize(x, scale, _dtype(self.inputs))
    return quantize.unscaled(x).astype(self.inputs.operands.query.dtype)

  def with_masked_values(self, kept: jax.Array, *, apart: bool) -> "_Block":
    """Replaces values that are not `kept`, bool [block_kv, K], by zeros, `apart` from products."""
    width, keys = self.width("value"), self.inputs.sizes.block_kv
    values, scale = self.slice("value", (0, keys), (0, width)), self.all_scales("value")
    values = jnp.where(kept[..., None], values, 0)
    # The barrier keeps the choice out of sums of products: XLA:CPU would compile these twice, for
    # blocks with and without zeros, and round them in different ways.
    values = lax.optimization_barrier(values) if apart else values
    if scale is not None:
      scale = jnp.where(kept.reshape(*kept.shape, *[1] * (scale.ndim - 2)), scale, 0)
    return self._replace(values=values, value_scale=scale)


def _finite(block: _Block) -> jax.Array:
  """Returns bool [block_kv, K]: whether a value is finite."""
  width, keys = block.width("value"), (0, block.inputs.sizes.block_kv)
  if block.has_pairs:  # numbers of 4 bits are finite, and their scales tell the rest
    scales = block.all_scales("value")
    assert scales is not None
    return jnp.isfinite(scales).all(-1)
  def whole() -> jax.Array:
    return jnp.isfinite(block.whole("value")).all(-1)

  def summed() -> jax.Array:
    scale = block.scales("value")
    def zero_or_nan(i: int) -> jax.Array:
      x = block.part("value", keys, (i, cpu_matvec.LANES))
      return x - x if scale is None else (x - x) * scale[..., None]
    return cpu_matvec.over_width(width, zero_or_nan) == 0

  return lax.platform_dependent(cpu=whole if width % cpu_matvec.LANES else summed, default=whole)


def _logits(block: _Block, rows: jax.Array) -> jax.Array:
  """Returns logits [block_kv, K, num_rows] of rows [K, num_rows, D], NaN where not finite."""
  inputs = block.inputs
  spec, rest = inputs.spec, tile_ops.scale_parts(inputs)[1]
  logits = _scores(block, rows).astype(inputs.dtype)
  logits = jnp.where(jnp.isfinite(logits), logits, jnp.nan)
  logits = logits if rest == 1 else logits * jnp.asarray(rest, inputs.dtype)
  if spec.logits_soft_cap is not None:
    logits = jnp.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
  return _modified(block, logits) if spec.has_score_mod else logits


def _modified(block: _Block, scores: jax.Array) -> jax.Array:
  """Returns scores [block_kv, K, num_rows] of a block after the score mod."""
  inputs, spec = block.inputs, block.inputs.spec
  mask_range = _tile(inputs, (block.batch, block.block_index))
  mask, at = tile_lib.slice_mask(spec.mask, inputs.operands.mask, mask_range,
                                 lambda x: tile_ops.orient(x, inputs, True))
  at, is_consecutive = evaluate.move_to_positions(mask, at)
  parts = evaluate.parts(spec.score_mod, inputs.operands.mods, mask_range)
  sliced = [tile_lib.slice_at(x, *part)
            for x, part in zip(inputs.operands.mods, parts, strict=True)]
  return evaluate.apply_keys_first(spec.score_mod, sliced, scores, score_mod.ScoreTile(
      at, inputs.group, transposed=True, is_consecutive=is_consecutive))


def _tile(inputs: tile_ops.BlockedInputs, tile: tile_ops.Tile) -> tile_lib.Tile:
  """Returns what a block (batch row, key block) covers, with all heads and queries."""
  (b, j), sizes = tile, inputs.sizes
  return tile_lib.Tile(b, 0, 0, _start(sizes, j), inputs.step_heads * inputs.group, sizes.queries,
                       sizes.block_kv)


def _seen(inputs: tile_ops.BlockedInputs, tile: tile_ops.Tile) -> jax.Array:
  """Returns the visible pairs of a block, bool [block_kv or 1, K or 1, T or 1, G or 1].

  Keys that the last block shares with the one before it, see `_start`, are hidden.
  """
  (_, j), sizes, heads, group = tile, inputs.sizes, inputs.step_heads, inputs.group

  def orient(x: jax.Array) -> jax.Array:
    """Maps [H or 1, T or 1, block_kv or 1] to [block_kv or 1, K or 1, T or 1, G or 1]."""
    x = x.reshape(*((heads, group) if x.shape[0] > 1 else (1, 1)), *x.shape[1:])
    return x.transpose(3, 0, 2, 1)

  mask, at = tile_lib.slice_mask(
      inputs.spec.mask, inputs.operands.mask, _tile(inputs, tile), orient)
  seen = mask.visible(at)
  if dense_operands.key_padding(sizes):
    seen = seen & (at.key_index >= j * sizes.block_kv)
  return seen


def _hide(inputs: tile_ops.BlockedInputs, seen: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns logits [block_kv, K, num_rows] with -inf for keys that are not `seen`."""
  four = (*logits.shape[:2], inputs.sizes.queries, inputs.group)
  return jnp.where(jnp.broadcast_to(seen, four).reshape(logits.shape), logits, -jnp.inf)


def _dtype(inputs: tile_ops.BlockedInputs) -> jnp.dtype:
  """Returns the dtype of sums."""
  return at_least_float32(inputs.dtype)


def _scores(block: _Block, rows: jax.Array) -> jax.Array:
  """Returns scores [block_kv, K, num_rows] of rows [K, num_rows, D]."""
  if block.has_pairs:
    even, odd = (_scores_of("key", half, rows[..., n::2]) for n, half in enumerate(block.halves()))
    return even + odd
  width = block.width("key")
  if width == rows.shape[2]:
    return _scores_of("key", block, rows)
  return (_scores_of("key", block, rows[..., :width])
          + _scores_of("rest", block, rows[..., width:]))


def _scores_of(name: str, block: _Block, rows: jax.Array) -> jax.Array:
  """Returns scores [block_kv, K, num_rows] of rows [K, num_rows, width] and an array of a block."""
  inputs = block.inputs
  def dots(rows: jax.Array) -> jax.Array:
    return jnp.einsum("krd,ckd->ckr", rows, block.whole(name),
                      precision=matmul_precision.resolve(rows.dtype, inputs.spec.precision),
                      preferred_element_type=_dtype(inputs))

  def summed(rows: jax.Array) -> jax.Array:
    found = cpu_matvec.scores(rows.astype(_dtype(inputs)), lambda i: block.part(
        name, (0, inputs.sizes.block_kv), (i, cpu_matvec.LANES)))
    scale = block.scales(name)
    return found if scale is None else found * scale[..., None]

  if not cpu_matvec.is_faster(rows.shape[1], rows.shape[2]):
    return dots(rows)
  return lax.platform_dependent(rows, cpu=summed, default=dots)


def _weigh(block: _Block, weights: jax.Array) -> jax.Array:
  """Returns weights [block_kv, K, num_rows] times values: [K, num_rows, E]."""
  found = [_weigh_half(half, weights) for half in block.halves()]
  return found[0] if len(found) == 1 else jnp.stack(found, -1).reshape(*found[0].shape[:-1], -1)


def _weigh_half(block: _Block, weights: jax.Array) -> jax.Array:
  """Returns `_weigh` of the columns of one of `_Block.halves`."""
  inputs, width = block.inputs, block.width("value")
  def dots(weights: jax.Array) -> jax.Array:
    # Latent values are weighed with the rest of their keys: a copy of them takes longer.
    is_key = inputs.spec.latent_width is not None and block.values is None
    value = block.whole("key" if is_key else "value")
    return jnp.einsum("ckr,cke->kre", weights.astype(value.dtype), value,
                      precision=matmul_precision.resolve(value.dtype, inputs.spec.precision),
                      preferred_element_type=_dtype(inputs))[..., :width]

  def summed(weights: jax.Array) -> jax.Array:
    scale, weights = block.scales("value"), weights.astype(_dtype(inputs))
    weights = weights if scale is None else weights * scale[..., None]
    widened = block.itemsize("value") < weights.dtype.itemsize
    return cpu_matvec.weigh(weights, lambda first, length: block.part(
        "value", (first, length), (0, width)), width, widened=widened)

  many = weights.shape[2] >= cpu_matvec.MANY_ROWS
  found = dots(weights) if many else lax.platform_dependent(weights, cpu=summed, default=dots)
  return found.astype(inputs.dtype)


def dequantized(operands: Operands) -> Operands:
  """Returns operands with all keys and values in the query's dtype, as derivatives need them."""
  if operands.key_scale is None:
    return operands
  dtype = operands.query.dtype
  if operands.value_scale is None:  # latent keys, whose other columns are stored apart
    key = quantize.dequantize(operands.key, operands.key_scale, dtype)
    return operands._replace(key=jnp.concatenate([key, operands.value.astype(dtype)], -1),
                             value=operands.value[..., :0].astype(dtype), key_scale=None)
  return operands._replace(
      key=quantize.dequantize(operands.key, operands.key_scale, dtype),
      value=quantize.dequantize(operands.value, operands.value_scale, dtype),
      key_scale=None, value_scale=None)


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: BackwardResiduals, cotangents: Residuals,
             wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
  """Computes the cotangents of the operands named in `wrt`; see `contract.BackwardFn`."""
  return flash.backward(dequantized(operands), spec, block_sizes, residuals, cotangents, wrt)


def tangent(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
            residuals: Residuals, tangents: dict[str, jax.Array]) -> Residuals:
  """Computes the tangents of out and lse; see `contract.TangentFn`."""
  return flash.tangent(dequantized(operands), spec, block_sizes, residuals, tangents)


KERNEL = Kernel("decode", forward, backward, tangent)
