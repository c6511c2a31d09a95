# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations on one tile of block-wise attention, shared by forward, backward and tangent.

A step computes `step_heads` key heads of one batch row. The G query heads of a key head become
rows: block_rows = block_q * G (token-major).
"""

import math
from typing import Callable, NamedTuple, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.common import dense_operands, matmul_precision, nonfinite
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math, tiling
from attn_core.masks import block_map, dropout, mask as mask_lib, tile as tile_lib
from attn_core.score_mods import evaluate
from attn_core.types import AttentionSpec, BlockSizes, Operands


Index = jax.Array | int  # a number that may be traced, int32
Carry = TypeVar("Carry")  # a pytree of arrays
Tile = tuple[Index, Index]  # query block, key block
Masked = bool | jax.Array  # whether a mask must be evaluated


class BlockedInputs(NamedTuple):
  """Inputs of one attention, padded to whole blocks."""

  operands: Operands
  spec: AttentionSpec
  sizes: block_map.Sizes
  step_heads: int  # key heads computed together
  visits: block_map.BlockMap  # of query blocks (forward) or of key blocks (backward)

  @property
  def group(self) -> int:
    """G, query heads per key head."""
    return self.operands.query.shape[2] // self.operands.key.shape[2]

  @property
  def num_steps(self) -> int:
    """Number of pairs of a batch row and `step_heads` key heads."""
    return self.operands.key.shape[0] * (self.operands.key.shape[2] // self.step_heads)

  @property
  def dtype(self) -> DTypeLike:
    """The dtype of logits, sums and accumulators."""
    return self.spec.softmax_dtype


class GridIndex(NamedTuple):
  """Batch row and heads of a step."""

  batch: Index
  key_head: Index  # the first of `step_heads`


def block_inputs(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes, *,
                 backward: bool) -> BlockedInputs:
  """Chooses blocks, pads to whole blocks and finds the blocks to visit."""
  sizes, step_heads = tiling.make_tiling(operands, spec, block_sizes, backward=backward)
  mask = dense_operands.mask_of(operands, spec)
  kinds = block_map.merge_heads(block_map.block_kinds(mask, sizes),
                                step_heads * operands.query.shape[2] // operands.key.shape[2])
  kinds = kinds.swapaxes(-1, -2) if backward else kinds
  operands = dense_operands.pad_operands(operands, sizes, spec.mask)
  return BlockedInputs(pad_mods(operands, spec, sizes), spec, sizes, step_heads,
                       block_map.block_map(kinds))


def pad_mods(operands: Operands, spec: AttentionSpec, sizes: block_map.Sizes) -> Operands:
  """Pads the arrays of the score mod to whole blocks."""
  return operands._replace(mods=evaluate.pad(
      spec.score_mod, operands.mods, sizes.query_padding, sizes.key_padding))


def pad_residuals(inputs: BlockedInputs, residuals: Residuals) -> Residuals:
  """Pads out and lse to whole blocks of queries."""
  padding = inputs.operands.query.shape[1] - residuals.out.shape[1]
  return Residuals(dense_operands.pad_axis(residuals.out, 1, padding),
                   dense_operands.pad_axis(residuals.lse, 2, padding))


def make_grid_index(inputs: BlockedInputs, n: Index) -> GridIndex:
  """Returns the batch row and the heads of step n."""
  parts = inputs.operands.key.shape[2] // inputs.step_heads
  # Division of jax.numpy handles signs, which takes a dozen operations.
  step, divisor = jnp.asarray(n, jnp.int32), jnp.int32(parts)
  return GridIndex(lax.div(step, divisor), lax.rem(step, divisor) * inputs.step_heads)


def write_at(x: jax.Array, part: jax.Array, starts: tuple[Index, ...]) -> jax.Array:
  """Returns `x` with `part` written at `starts`, which are >= 0."""
  return lax.dynamic_update_slice(x, part, tile_lib.int32s(starts), allow_negative_indices=False)


def loop(lower: Index, upper: Index, body: Callable[[jax.Array, Carry], Carry],
         carry: Carry) -> Carry:
  """Runs `lax.fori_loop` with an int32 counter, with and without jax_enable_x64."""
  start, stop = (np.int32(x) if isinstance(x, int) else jnp.asarray(x, jnp.int32)
                 for x in (lower, upper))  # an upper one may be a symbolic size
  return lax.fori_loop(start, stop, body, carry)


def visit_blocks(inputs: BlockedInputs, grid_index: GridIndex, row_block: Index,
                 step: Callable[[jax.Array, Carry, Masked], Carry], carry: Carry) -> Carry:
  """Runs step(column block, carry, masked) over the blocks that `row_block` must visit.

  One loop for full and partial blocks, because a second body would take its time to compile.
  """
  visits = inputs.visits
  indices, num_full, num_visited = _visits_of(visits, inputs, grid_index, row_block)
  known = not (visits.any_full and visits.any_partial)
  return loop(0, num_visited, lambda n, c: step(
      _at(indices, n), c, visits.any_partial if known else n >= num_full), carry)


def _at(indices: jax.Array, n: jax.Array) -> jax.Array:
  """Returns indices[n] for n >= 0."""
  return lax.dynamic_index_in_dim(indices, n, 0, False, allow_negative_indices=False)


def visit_full_and_partial(inputs: BlockedInputs, grid_index: GridIndex, row_block: Index,
                           step: Callable[[jax.Array, Carry, bool], Carry],
                           carry: Carry) -> Carry:
  """Runs `visit_blocks` as a loop over full and one over partial blocks, with a static `masked`."""
  visits = inputs.visits
  indices, num_full, num_visited = _visits_of(visits, inputs, grid_index, row_block)
  if visits.any_full:
    carry = loop(0, num_full, lambda n, c: step(_at(indices, n), c, False), carry)
  if visits.any_partial:
    carry = loop(num_full, num_visited, lambda n, c: step(_at(indices, n), c, True), carry)
  return carry


def _visits_of(visits: block_map.BlockMap, inputs: BlockedInputs, grid_index: GridIndex,
               row_block: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the indices, and the numbers of full and of visited blocks, of `row_block`."""
  b = grid_index.batch if visits.num_full.shape[0] != 1 else 0
  h = (lax.div(jnp.asarray(grid_index.key_head, jnp.int32), jnp.int32(inputs.step_heads))
       if visits.num_full.shape[1] != 1 else 0)
  found = []
  for x in map(jnp.asarray, visits):
    part = tile_lib.slice_at(x, (b, h, row_block, *[0] * (x.ndim - 3)), (1, 1, 1, *x.shape[3:]))
    found.append(part.reshape(x.shape[3:]))
  indices, num_full, num_visited = found
  return indices, num_full, num_visited


def scale_parts(inputs: BlockedInputs) -> tuple[float, float]:
  """Returns factors of the query and of the logits; their product is the softmax scale.

  A 16-bit query is multiplied by a power of two, which is exact.
  """
  scale = inputs.spec.softmax_scale
  if inputs.operands.query.dtype.itemsize >= 4 or scale == 0:
    return scale, 1.0
  mantissa, exponent = math.frexp(scale)
  return 2.0 ** (exponent - 1), 2 * mantissa


def d_logits_scale(inputs: BlockedInputs) -> float:
  """Returns the factor of dS in products of 16 bits, a power of two: most of the softmax scale.

  dS times the scale is a gradient, which fits float16 where the result does; dS alone may not.
  """
  is_float16 = inputs.operands.query.dtype == jnp.float16
  return scale_parts(inputs)[0] if is_float16 and inputs.spec.softmax_scale else 1.0


def scaled_query(inputs: BlockedInputs, grid_index: GridIndex, block: Index | None) -> jax.Array:
  """Returns `query_rows` of the query, times its part of the scale, NaN if not finite."""
  rows = nonfinite.infinite_to_nan(query_rows(inputs.operands.query, inputs, grid_index, block))
  return rows * jnp.asarray(scale_parts(inputs)[0], rows.dtype)


def query_rows(x: jax.Array, inputs: BlockedInputs, grid_index: GridIndex,
               block: Index | None) -> jax.Array:
  """Returns [step_heads, block_rows, width] of x [B, T, H, width]; block None: all queries."""
  length = x.shape[1] if block is None else inputs.sizes.block_q
  start = 0 if block is None else block * length
  group = inputs.group
  x = tile_lib.slice_at(x, (grid_index.batch, start, grid_index.key_head * group, 0),
                        (1, length, inputs.step_heads * group, x.shape[3]))
  x = x.reshape(length, inputs.step_heads, group, -1).transpose(1, 0, 2, 3)
  return x.reshape(inputs.step_heads, length * group, -1)


def write_rows(inputs: BlockedInputs, grid_index: GridIndex, block: Index | None, x: jax.Array,
               rows: jax.Array) -> jax.Array:
  """Writes rows [step_heads, block_rows, width] into x [B, T, H, width]; see `query_rows`."""
  length = rows.shape[1] // inputs.group
  start = 0 if block is None else block * length
  rows = rows.astype(x.dtype).reshape(inputs.step_heads, length, inputs.group, -1)
  rows = rows.transpose(1, 0, 2, 3).reshape(1, length, inputs.step_heads * inputs.group, -1)
  return write_at(x, rows, (grid_index.batch, start, grid_index.key_head * inputs.group, 0))


def row_scalars(inputs: BlockedInputs, grid_index: GridIndex, block: Index | None,
                x: jax.Array) -> jax.Array:
  """Returns [step_heads, block_rows] of x [B, H, T]; block None: all queries."""
  length = x.shape[2] if block is None else inputs.sizes.block_q
  start = 0 if block is None else block * length
  group = inputs.group
  x = tile_lib.slice_at(x, (grid_index.batch, grid_index.key_head * group, start),
                        (1, inputs.step_heads * group, length))
  x = x.reshape(inputs.step_heads, group, length).transpose(0, 2, 1)
  return x.reshape(inputs.step_heads, -1)


def write_row_scalars(inputs: BlockedInputs, grid_index: GridIndex, block: Index, x: jax.Array,
                      scalars: jax.Array) -> jax.Array:
  """Writes scalars [step_heads, block_rows] into x [B, H, T]; see `row_scalars`."""
  length, group = inputs.sizes.block_q, inputs.group
  scalars = scalars.astype(x.dtype).reshape(inputs.step_heads, length, group).transpose(0, 2, 1)
  return write_at(x, scalars.reshape(1, inputs.step_heads * group, length),
                  (grid_index.batch, grid_index.key_head * group, block * length))


def key_rows(x: jax.Array, inputs: BlockedInputs, grid_index: GridIndex,
             block: Index) -> jax.Array:
  """Returns [step_heads, block_kv, width] of x [B, S, K, width].

  Sliced at every visit of a block: a transposed copy of all keys is not faster, and would take most
  of the memory.
  """
  length = inputs.sizes.block_kv
  x = tile_lib.slice_at(x, (grid_index.batch, block * length, grid_index.key_head, 0),
                     (1, length, inputs.step_heads, x.shape[3]))
  return x[0].transpose(1, 0, 2)


def value_rows(inputs: BlockedInputs, grid_index: GridIndex, block: Index,
               key: jax.Array | None = None) -> jax.Array:
  """Returns a block of values [step_heads, block_kv, E].

  Args:
    inputs: the attention.
    grid_index: batch row and heads.
    block: number of the block.
    key: the same block of keys, if it is known: latent values are a part of it.
  """
  if inputs.spec.latent_width is not None:
    key = key_rows(inputs.operands.key, inputs, grid_index, block) if key is None else key
    return key[..., :inputs.spec.latent_width]
  return key_rows(inputs.operands.value, inputs, grid_index, block)


def write_key_rows(inputs: BlockedInputs, grid_index: GridIndex, block: Index, x: jax.Array,
                   rows: jax.Array) -> jax.Array:
  """Writes rows [step_heads, block_kv, width] into x [B, S, K, width]; see `key_rows`."""
  rows = rows.astype(x.dtype).transpose(1, 0, 2)[None]
  return write_at(
      x, rows, (grid_index.batch, block * inputs.sizes.block_kv, grid_index.key_head, 0))


def keys_and_values(inputs: BlockedInputs, grid_index: GridIndex, block: Index,
                    nan_keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns a block of keys, NaN where `nonfinite.propagate_nan` makes them so, and finite values.

  Args:
    inputs: the attention.
    grid_index: batch row and heads.
    block: number of the block of keys.
    nan_keys: of `nonfinite.nan_of_pairs`, [B, S, K, 1]. Choosing between numbers by it, for keys
      and values, takes a quarter of the time to compile a forward.
  """
  key = key_rows(inputs.operands.key, inputs, grid_index, block)
  value = value_rows(inputs, grid_index, block, key)
  nan = key_rows(nan_keys, inputs, grid_index, block)
  return cpu_math.add_nan(key, nan), cpu_math.fill_nonfinite(0.0, value)


def slice_rows(x: jax.Array, start: Index, length: int) -> jax.Array:
  """Returns `length` entries of axis 1."""
  return lax.dynamic_slice_in_dim(x, start, length, 1, allow_negative_indices=False)


def dot(left: jax.Array, right: jax.Array, inputs: BlockedInputs) -> jax.Array:
  """Returns the matrix products of left [step_heads, m, k] and right [step_heads, k, n].

  One of them may have more bits than the other; see `cpu_math.mixed_product`.
  """
  if left.dtype != right.dtype:
    return cpu_math.mixed_product(lambda x, y: dot(x, y, inputs), left, right)
  return lax.dot_general(left, right, (((2,), (1,)), ((0,), (0,))),
                         precision=matmul_precision.resolve(left.dtype, inputs.spec.precision),
                         preferred_element_type=inputs.dtype)


def scores_of(inputs: BlockedInputs, rows: jax.Array, keys: jax.Array, *,
              transposed: bool = False) -> jax.Array:
  """Returns rows . keys [step_heads, block_rows, block_kv].

  Args:
    inputs: the attention.
    rows: [step_heads, block_rows, width].
    keys: [step_heads, block_kv, width].
    transposed: whether the result is [step_heads, block_kv, block_rows].
  """
  left, right = (keys, rows) if transposed else (rows, keys)
  return lax.dot_general(left, right, (((2,), (2,)), ((0,), (0,))),
                         precision=matmul_precision.resolve(left.dtype, inputs.spec.precision),
                         preferred_element_type=inputs.dtype)


def mask_tile(inputs: BlockedInputs, grid_index: GridIndex, tile: Tile,
              transposed: bool) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
  """Returns mask and coordinates of a tile, with arrays of four axes; see `orient`."""
  (i, j), sizes, group = tile, inputs.sizes, inputs.group
  mask_range = tile_lib.Tile(
      grid_index.batch, grid_index.key_head * group, i * sizes.block_q, j * sizes.block_kv,
      inputs.step_heads * group, sizes.block_q, sizes.block_kv)
  return tile_lib.slice_mask(inputs.spec.mask, inputs.operands.mask, mask_range,
                   lambda x: orient(x, inputs, transposed))


def orient(x: jax.Array, inputs: BlockedInputs, transposed: bool) -> jax.Array:
  """Splits the heads of x [step_heads * G, block_q, block_kv]; any axis may have size 1.

  Returns:
    [step_heads, block_q, G, block_kv]; transposed: [step_heads, block_kv, block_q, G].
  """
  x = x.reshape(*((inputs.step_heads, -1) if x.shape[0] > 1 else (1, 1)), *x.shape[1:])
  return x.transpose(0, 3, 2, 1) if transposed else x.transpose(0, 2, 1, 3)


def per_element(x: jax.Array, shape: tuple[int, ...], inputs: BlockedInputs,
                transposed: bool) -> jax.Array:
  """Broadcasts x, which has the four axes of `orient`, to the shape of the scores."""
  heads, (num_rows, keys) = shape[0], (shape[2], shape[1]) if transposed else shape[1:]
  rows = (num_rows // inputs.group, inputs.group)
  four = (heads, keys, *rows) if transposed else (heads, *rows, keys)
  return jnp.broadcast_to(x, four).reshape(shape)


def apply_dropout(inputs: BlockedInputs, grid_index: GridIndex, tile: Tile, weights: jax.Array, *,
                  transposed: bool = False) -> jax.Array:
  """Returns weights of a tile with zeros where they are dropped, unscaled; see `kept_scale`."""
  if not inputs.spec.dropout_prob:
    return weights
  words = inputs.operands.dropout_key
  assert words is not None
  words = words[grid_index.batch if words.shape[0] > 1 else 0]
  mask, at = mask_tile(inputs, grid_index, tile, transposed)
  keep = dropout.keep_mask(words, dropout.move_to_positions(mask, at), inputs.spec.dropout_prob)
  return jnp.where(per_element(keep, weights.shape, inputs, transposed), weights, 0)


def kept_scale(inputs: BlockedInputs) -> float:
  """Returns `dropout.kept_scale`, which is applied once, to sums of dropped weights."""
  return dropout.kept_scale(inputs.spec.dropout_prob)


def weights_of(inputs: BlockedInputs, relative: jax.Array) -> jax.Array:
  """Returns exp(relative) for relative <= 0."""
  # `jnp.exp` is faster where the result is rounded to 16 bits next; see `cpu_math.exp`.
  narrowed = inputs.operands.query.dtype.itemsize < 4
  return (jnp.exp if narrowed else cpu_math.exp)(relative)


def row_sinks(inputs: BlockedInputs, grid_index: GridIndex) -> jax.Array | None:
  """Returns the sinks of a step's rows [step_heads, block_rows, 1], or None."""
  sinks = inputs.operands.sinks
  if sinks is None:
    return None
  group = inputs.group
  sinks = tile_lib.slice_at(
      sinks, (grid_index.batch if sinks.shape[0] > 1 else 0, grid_index.key_head * group),
      (1, inputs.step_heads * group))
  sinks = sinks.reshape(inputs.step_heads, 1, group, 1).astype(inputs.dtype)
  shape = (inputs.step_heads, inputs.sizes.block_q, group, 1)
  return jnp.broadcast_to(sinks, shape).reshape(inputs.step_heads, -1, 1)
