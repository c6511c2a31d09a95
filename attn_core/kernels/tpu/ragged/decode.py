# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries per batch row to a dense cache on TPUs.

Every batch row is one step of the ragged kernel; a page is some consecutive tokens of it, and only
those from the first to the last key that any of its queries sees are read. The mask comes as a
boolean array, which is small compared to keys and values; or it follows from the rows of a cache,
see `cache_rows`. The result of a row has the same bits in any batch: its blocks begin at multiples
of their size, and depend on nothing else.
"""

import functools
from typing import Iterable, Sequence

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.caches import slots
from attn_core.kernels.common import dense_operands, nonfinite, online_softmax
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.ragged import cache_rows, common, kernel, row_mods
from attn_core.kernels.tpu.ragged.kv_layout import (
    LANES, SUBLANES, KVLayout, is_heads_major, whole_tile)
from attn_core.kernels.tpu.ragged.mod_form import ModInputs
from attn_core.masks import materialize
from attn_core.score_mods import tables
from attn_core.types import AttentionSpec, BlockSizes, Operands, cdiv

PAGE_SIZE = 64  # tokens of a transfer
BLOCK_KV = 1024  # tokens of a block; a multiple of LANES, as all are
LATENT_BLOCK_KV = 4096  # of latent rows, of which there is one for all heads
MASK_ROWS = 16  # rows of the mask are padded to a multiple: a tile of bfloat16
MOST_QUERIES = 64  # per batch row, T
MOST_LATENT_ROWS = 1024  # pairs of a query and a query head of latent rows, beyond a few queries
MOST_PAIR_ROWS = 512  # pairs of a query and a query head with numbers for every key
DTYPES = ("float32", "bfloat16")
ShapedArray = jax.Array | jax.ShapeDtypeStruct


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  dense_operands.assert_shapes(operands, spec.latent_width)
  batch, length, heads, width = operands.query.shape
  key_heads = operands.key.shape[2]
  # 1. Layout, mask and steps.
  group_size, layout = heads // key_heads, _make_layout(
      operands.query, operands.key, operands.value, block_sizes,
      (operands.key_scale is not None, spec.latent_width))
  shape, rows_of_cache = _step_shape(layout, operands.query), operands.mask.rows
  shape = shape._replace(num_cores=spec.num_cores)
  sides = cache_rows.window_of(operands, spec) if _computes_masks(shape, spec) else None
  mask: jax.Array | None = None
  steps: tuple[jax.Array, ...]
  if sides is not None and rows_of_cache is not None:
    steps = cache_rows.numbers(rows_of_cache)
  else:
    mask, mask_heads, stacked = _make_steps(operands, spec, shape)
    shape, steps = shape._replace(mask_rows=mask.shape[1], mask_heads=mask_heads), (stacked,)
  # 2. The rows of every step: [batch, key_heads, block_q, group_size, width] in head groups.
  if layout.latent and spec.row_width and shape.few_rows and shape.row_groups == 1:
    shape = shape._replace(raw_rows=True, transposed_rows=_comes_transposed(shape, spec.row_width))
    rows, width = operands.query[..., :spec.row_width], spec.row_width
  else:
    rows = nonfinite.infinite_to_nan(operands.query)
  rows = dense_operands.pad_axis(rows, 1, shape.block_q - length)
  rows = rows.reshape(batch, shape.block_q, key_heads, group_size, width)
  rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, shape.head_groups, shape.group_rows, width)
  rows = rows.swapaxes(2, 3) if shape.transposed_rows else rows
  mods = _mod_inputs(operands, spec, shape) if spec.has_score_mod else None
  logits_spec = common.LogitsSpec(
      spec.softmax_scale, spec.logits_soft_cap, *(sides or (None, None)), spec.precision,
      mods and mods.form, of_cache=sides is not None, int8_products=spec.int8_products)
  count = jnp.full((1,), batch, jnp.int32)
  # 3. The kernel.
  out, lse = kernel.attend(logits_spec, shape, common.KernelInputs(
      steps, count, jnp.zeros((1,), jnp.int32), None, rows, mask, _token_arrays(operands, layout),
      mods), dense_operands.out_dtype(operands, spec))
  # 4. Back to [B, T, H, E], and the sinks.
  def from_rows(x: jax.Array) -> jax.Array:
    x = x.reshape(batch, key_heads, shape.block_q, group_size, -1).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, shape.block_q, heads, -1)[:, :length]
  sinks = None if operands.sinks is None else operands.sinks[:, None, :, None]
  out, lse = online_softmax.join_sinks(from_rows(out)[..., :spec.latent_width], from_rows(lse),
                                       sinks)
  lse = lse[..., 0].swapaxes(1, 2)
  if rows_of_cache is not None and sides is None:
    out, lse = (slots.nan_rows(x, rows_of_cache.overflow) for x in (out, lse))
  return Residuals(out, lse)


def _computes_masks(shape: common.StepShape, spec: AttentionSpec) -> bool:
  """Returns whether the kernel may find out by itself which keys of a cache are seen."""
  return shape.few_rows and shape.row_groups == 1 and not spec.has_score_mod


def _comes_transposed(shape: common.StepShape, width: int) -> bool:
  """Returns whether XLA stores an array [B, 1, H, width] with its heads along the lanes.

  It does for arguments of a program, where less of the tiles is padding then.
  """
  return shape.block_q == 1 and shape.head_groups == 1 and (
      shape.group_rows % LANES == 0 and width % LANES != 0)


def _latent_groups(length: int, heads: int) -> tuple[int, int]:
  """Returns (T with queries that only pad, groups of equal size of few rows that all rows form).

  Latent rows lie in vector memory, and are the operands that stay in the matrix units for one group
  after the other; a group of 16 rows takes as long as one of many. (T, 1): all rows are one group.
  """
  if length * heads > common.FEW_ROWS_LATENT:
    for padded in range(length, length * 5 // 4 + 1):
      least = cdiv(padded * heads, common.FEW_ROWS_LATENT)
      for groups in (least, least + 1):
        if padded * heads % (groups * 2 * SUBLANES) == 0:
          return padded, groups
  return length, 1


def _make_layout(query: ShapedArray, key: ShapedArray, value: ShapedArray,
                 block_sizes: BlockSizes, form: tuple[bool, int | None]) -> KVLayout:
  """Returns the layout of keys and values, with blocks that fit in vector memory.

  Args:
    query, key, value: only shapes and dtypes count.
    block_sizes: those given; None fields are chosen.
    form: (whether there are scales per token, the width of latents or None).
  """
  (has_scales, latent_width), memory = form, common.vector_memory(block_sizes)
  length, heads = query.shape[1:3]
  chosen = BLOCK_KV if latent_width is None else LATENT_BLOCK_KV
  block_kv = cdiv(block_sizes.block_kv or chosen, LANES) * LANES
  block_kv = min(block_kv, cdiv(key.shape[1], LANES) * LANES)
  rows = length * heads // key.shape[2]
  if latent_width is not None:
    padded, groups = _latent_groups(length, heads)
    rows = padded * heads // groups
  lanes = cdiv(rows, LANES) * LANES
  block_kv = min(block_kv, max(1, common.MOST_SCORES // lanes // LANES) * LANES)
  scales = "token" if has_scales else None
  if latent_width is not None:
    page = _latent_page(key, value)
    assert page is not None  # `unsupported_rows`
    layout = KVLayout(
        False, False, 1, (key.shape[3] + value.shape[3], cdiv(latent_width, LANES) * LANES),
        jnp.dtype(key.dtype), page, block_kv // page, key.shape[1], scales, latent=True,
        rest_dtype=value.dtype if value.shape[3] else None)
    return _within_memory(layout, query, memory)
  # With heads before tokens, part of a page would be part of a tile.
  heads_major = is_heads_major(key.shape[2], key.dtype) and key.shape[1] % PAGE_SIZE == 0
  layout = KVLayout(
      False, heads_major, key.shape[2], (key.shape[3], value.shape[3]), jnp.dtype(key.dtype),
      PAGE_SIZE, block_kv // PAGE_SIZE, key.shape[1], scales)
  return _within_memory(layout, query, memory)


def _within_memory(layout: KVLayout, query: ShapedArray,
                   memory: common.VectorMemory) -> KVLayout:
  """Sets the number of blocks in vector memory, and makes them fit, if any does."""
  if _step_shape(layout, query).few_rows:
    layout = layout._replace(slots=common.FEW_ROWS_SLOTS)
  most = max(1, layout.block_kv * memory.buffers // layout.vmem_bytes() // LANES)
  blocks = min(layout.block_kv, most * LANES) // LANES
  sized = lambda blocks: layout._replace(block_pages=blocks * LANES // layout.page_size)
  while blocks > 1 and _vector_bytes(sized(blocks), query) > memory.chosen:
    blocks //= 2
  return sized(blocks)


def _step_shape(layout: KVLayout, query: ShapedArray) -> common.StepShape:
  """Returns the sizes of a step, without a mask."""
  length, heads = query.shape[1:3]
  length, groups = _latent_groups(length, heads) if layout.latent else (length, 1)
  return common.StepShape(layout, heads // layout.key_heads, length, row_groups=groups)


def _vector_bytes(layout: KVLayout, query: ShapedArray) -> int:
  """Estimates the vector memory of the kernel, with the largest mask."""
  shape = _step_shape(layout, query)
  rows = cdiv(shape.block_q, MASK_ROWS) * MASK_ROWS
  return shape._replace(mask_rows=rows).vmem_bytes(query.dtype)


def unsupported_memory(query: ShapedArray, key: ShapedArray, value: ShapedArray,
                       block_sizes: BlockSizes, form: tuple[bool, int | None]) -> str | None:
  """Returns why a call does not fit in vector or scalar memory, or None; see `_make_layout`."""
  def needed(length: int) -> int:
    queries = jax.ShapeDtypeStruct((query.shape[0], length, *query.shape[2:]), query.dtype)
    return _vector_bytes(_make_layout(queries, key, value, block_sizes, form), queries)

  length, heads, width = query.shape[1:]
  if not (length and key.shape[1]):
    return None  # no kernel runs
  rows, fields = query.shape[0], len(common.Steps._fields) + cache_rows.FIELDS
  scalars = 4 * LANES * fields * cdiv(rows, LANES)
  if scalars > common.SCALAR_BYTES:
    return (f"{rows} batch rows: their steps need {scalars} bytes of scalar memory, of which the "
            f"TPU kernel has {common.SCALAR_BYTES}: give fewer rows at a time")
  most = common.vector_memory(block_sizes).most
  if needed(length) <= most:
    return None
  fitting = next((n for n in range(length - 1, 0, -1) if needed(n) <= most), 0)
  cure = f"at most {fitting} queries at a time" if fitting else "fewer or narrower heads"
  return (f"{length} queries of {heads} heads of {width} numbers: the TPU kernel would need "
          f"{needed(length)} bytes of vector memory, of which it has {most}: "
          f"give {cure}")


def _tile(key: ShapedArray, value: ShapedArray) -> int:
  """Returns the rows of a whole tile of every array of latent rows; see `_latent_page`."""
  return whole_tile(*(x.dtype for x in (key, value) if x.shape[3]))


def _latent_page(key: ShapedArray, value: ShapedArray) -> int | None:
  """Returns the tokens of a transfer of latent rows: whole tiles that divide S; None: no number.

  Args:
    key: [B, S, 1, latent + rope], or latents in 8 bits.
    value: [B, S, 1, 0], or the rotary part.
  """
  tile = _tile(key, value)
  return next((size for size in (PAGE_SIZE, 32, 16, 8)
               if size % tile == 0 and key.shape[1] % size == 0), None)


def _token_arrays(operands: Operands, layout: KVLayout) -> tuple[jax.Array, ...]:
  """Returns keys, values and scales as `KVLayout` describes them."""
  def stored(x: jax.Array) -> jax.Array:
    return x.swapaxes(1, 2) if layout.heads_major else x
  arrays = tuple(map(stored, (operands.key, operands.value)))
  if layout.latent:
    arrays = tuple(x.reshape(x.shape[0], -1, layout.page_size, x.shape[3])
                   for x in arrays if x.shape[3])
  if operands.key_scale is None:
    return arrays
  padded = lambda x: dense_operands.pad_axis(dense_operands.pad_axis(
      x.swapaxes(1, 2), 1, layout.scale_rows - layout.key_heads), 2, -x.shape[1] % layout.block_kv)
  scales = operands.key_scale, operands.value_scale
  return *arrays, *(padded(x) for x in scales if x is not None)


def _make_steps(operands: Operands, spec: AttentionSpec,
                shape: common.StepShape) -> tuple[jax.Array, bool, jax.Array]:
  """Evaluates the mask and finds the range of visible keys of every batch row.

  Returns:
    (mask [B, mask_rows, padded_keys] as in `KernelInputs`, whether it has rows for every query
    head, the numbers of all steps int32 [fields of `Steps`, B]).
  """
  (batch, length, heads, _), keys = operands.query.shape, operands.key.shape[1]
  layout = shape.layout
  visible = materialize.visible(spec.mask, operands.mask, (batch, heads, length, keys))
  mask_heads = visible.shape[1] > 1
  visible = jnp.broadcast_to(visible, (batch, heads if mask_heads else 1, length, keys))
  visible = dense_operands.pad_axis(visible, 2, shape.block_q - length)
  # Computed once: XLA would evaluate the mask again for each of its uses.
  visible = lax.optimization_barrier(visible.reshape(batch, -1, keys))
  steps = _stacked_steps(visible.any(1), layout.block_kv)
  # Rows along the lanes select theirs by products; others share one row as it is, if they can.
  one = visible.shape[1] == 1 and shape.few_rows
  mask = dense_operands.pad_axis(visible.astype(jnp.float32 if one else jnp.bfloat16), 2,
                                 -keys % layout.block_kv)
  mask = mask if one else dense_operands.pad_axis(mask, 1, -visible.shape[1] % MASK_ROWS)
  return mask, mask_heads, steps


def _stacked_steps(seen: jax.Array, block_kv: int) -> jax.Array:
  """Returns the numbers of all steps, int32 [fields of `Steps`, B], from the keys that rows see.

  All of them come from one reduction: each of several small ones would take XLA as long as copying
  a thousand latent rows.

  Args:
    seen: bool [B, S].
    block_kv: tokens of a block.
  """
  batch, keys = seen.shape
  number = lax.broadcasted_iota(jnp.int32, (1, 1, keys), 2)
  field = lax.broadcasted_iota(jnp.int32, (len(common.Steps._fields), batch), 0)
  of = lambda name: field == common.Steps._fields.index(name)
  by_first = of("first_block") | of("kv_start")
  # The end of the last key that is seen, or the distance of the first one from the end of all.
  stop = jnp.max(jnp.where(seen, jnp.where(by_first[:, :1, None], keys - number, number + 1), 0), 2)
  start = jnp.where(stop > 0, keys - stop, 0)
  found = jnp.where(of("row"), lax.broadcasted_iota(jnp.int32, field.shape, 1), 0)
  found = jnp.where(of("first_block"), start // block_kv, found)
  # At least one key block: a step without one would not wait for the transfers of the next step.
  found = jnp.where(of("end_block"), jnp.maximum(-(-stop // block_kv), 1), found)
  found = jnp.where(of("kv_start"), start, found)
  return jnp.where(of("row_length") | of("kv_stop"), stop, found)


def _mod_inputs(operands: Operands, spec: AttentionSpec, shape: common.StepShape) -> ModInputs:
  """Returns the arrays of the score mod, and positions, which caches list."""
  length, heads = operands.query.shape[1:3]
  at = dense_operands.positions_of(operands, spec)

  def rows_of(x: jax.Array) -> jax.Array:
    x = jnp.broadcast_to(x, (x.shape[0], heads, length, x.shape[3]))
    x = dense_operands.pad_axis(x, 2, shape.block_q - length)
    x = x.reshape(x.shape[0], -1, shape.group_size, *x.shape[2:])
    return x.swapaxes(2, 3)

  structure, arrays = tables.written_out(spec.score_mod, operands.mods, at)
  return row_mods.make_inputs(structure, arrays, at._asdict(), shape, rows_of)


def unsupported_reason(dtype: DTypeLike, widths: Iterable[int], length: int) -> str | None:
  """Returns why the kernel does not support a call, by shapes and dtypes, or None if it does.

  Args:
    dtype: of the query.
    widths: D and E.
    length: T.
  """
  if jnp.dtype(dtype).name not in DTYPES:
    return f"dtype {jnp.dtype(dtype).name}: the TPU kernel computes {' and '.join(DTYPES)}"
  for width in widths:
    if width > LANES and width % LANES:
      return f"head_dim {width}: the TPU kernel needs a multiple of {LANES} above {LANES}"
  if length > MOST_QUERIES:
    return (f"{length} queries a row: the TPU kernel takes up to {MOST_QUERIES}; prefill with "
            "flash_attn2")
  return None


def unsupported_rows(dtype: DTypeLike, key: ShapedArray, value: ShapedArray) -> str | None:
  """Returns why the kernel does not read latent rows, by shapes and dtypes, or None if it does.

  Args:
    dtype: of the query.
    key: [B, S, 1, latent + rope], or latents in 8 bits.
    value: [B, S, 1, 0], or the rotary part.
  """
  apart = value.shape[3] > 0
  for name in (jnp.dtype(dtype).name, *([value.dtype.name] if apart else [])):
    if name not in DTYPES:
      return f"dtype {name}: the TPU kernel computes {' and '.join(DTYPES)}"
  if apart and key.shape[3] % LANES:
    return (f"latents of {key.shape[3]} numbers in {key.dtype.name}: the TPU kernel needs a "
            f"multiple of {LANES}")
  part, width = ("a rotary part", value.shape[3]) if apart else ("latent rows", key.shape[3])
  if width % LANES:
    return (f"{part} of {width} numbers: the TPU kernel reads rows that are padded to a multiple "
            f"of {LANES}, as by caches.latent.init(padded=True)")
  if _latent_page(key, value) is None:
    return (f"{key.shape[1]} slots of {key.dtype.name}: the TPU kernel copies whole tiles, and "
            f"needs a multiple of {_tile(key, value)}")
  return None


def unsupported_mod(arrays: Sequence[jax.ShapeDtypeStruct], query: tuple[int, ...],
                    key_heads: int) -> str | None:
  """Returns why the kernel does not support a score mod that the kernels can trace, or None.

  Args:
    arrays: of its term; only shapes are used.
    query: [B, T, H, D].
    key_heads: K.
  """
  length, heads = query[1:3]
  rows = length * heads
  pairs = sum(x.ndim == 4 and x.shape[3] > 1 and x.shape[1:3] != (1, 1)
              or x.ndim == 3 and (x.shape[1] > 1 or length > 1)  # a table by distance
              for x in arrays)
  if pairs and rows // key_heads > common.FEW_ROWS:
    return (f"score_mod with numbers for every key and query head, of {rows // key_heads} queries "
            f"and heads a key head: the TPU kernel takes them for up to {common.FEW_ROWS}")
  if pairs * rows > MOST_PAIR_ROWS:
    return (f"score_mod with numbers for every key of {rows} queries and heads: the TPU kernel "
            f"takes them for up to {MOST_PAIR_ROWS}")
  return None


@functools.cache
def make_kernel(fallback: Kernel) -> Kernel:
  """Returns the kernel.

  Args:
    fallback: computes all derivatives.
  """
  return Kernel("decode_tpu", forward, fallback.backward, fallback.tangent, fallback,
                effects=launch.effects)
