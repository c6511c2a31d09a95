# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of a block that the rows of a step see in the ragged kernel: by position, or a mask."""

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged.layouts import Scope
from attn_core.kernels.common import matmul_precision
from attn_core.kernels.tpu.ragged.common import (
    MOST_DRAFTS, Index, KernelRefs, TileIndex, TilePart)


def visible(k: KernelRefs, tile: TileIndex, group: Index, *, axis: int,
            part: TilePart | None = None) -> jax.Array:
  """Returns bool [block_kv, group_rows] if keys are axis 0, or [group_rows, block_kv] if axis 1.

  Args:
    k: the kernel.
    tile: the block.
    group: of heads.
    axis: of the keys.
    part: with keys along axis 0: the keys and rows that are wanted; None: all.
  """
  part = part or whole_part(k)
  return (_visible_by_mask if k.shape.mask_rows else _visible_by_position)(
      k, tile, group, axis, part)


def whole_part(k: KernelRefs) -> TilePart:
  """Returns all keys of a block and all rows of a head group."""
  return TilePart(slice(0, k.shape.layout.block_kv), slice(0, k.shape.group_rows))


def numbers_along(part: slice, axis: int) -> jax.Array:
  """Returns numbers of keys or of rows along an axis, int32 [1, n] or [n, 1]."""
  size = part.stop - part.start
  found = lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
  return found + part.start if part.start else found


def row_numbers(k: KernelRefs, axis: int) -> jax.Array:
  """Returns numbers of rows along an axis, int32 [1, group_rows] or [group_rows, 1]."""
  return numbers_along(slice(0, k.shape.group_rows), axis)


def query_of(k: KernelRefs, rows: jax.Array) -> jax.Array:
  """Returns the query of the step that a row belongs to."""
  return lax.div(lax.rem(rows, jnp.int32(k.shape.head_rows)), jnp.int32(k.shape.group_size))


def _visible_by_position(k: KernelRefs, tile: TileIndex, group: Index, axis: int,
                         part: TilePart) -> jax.Array:
  """Evaluates causality and window; rows that are not queries of this call see no key."""
  del group
  spec = k.spec
  key = tile.block * k.shape.layout.block_kv + numbers_along(part.keys, axis)
  query, begin, end = _ranges(k, tile, part, axis)
  found = key < end
  if begin is not None:
    found = found & (key >= begin)
  return found & _visible_to_drafts(k, tile, query, key) if spec.drafts else found


def _ranges(k: KernelRefs, tile: TileIndex, part: TilePart,
            axis: int) -> tuple[jax.Array, jax.Array | None, jax.Array]:
  """Returns (the query of each row, begin and end of the keys it sees, but for those of a tree).

  Args:
    k: the kernel.
    tile: the block.
    part: whose rows.
    axis: of the keys; arrays are along the other one.
  """
  spec, step = k.spec, tile.step
  # One query is the same one for all rows.
  one = not k.shape.row_pages and k.shape.block_q == 1
  query = step.query_begin + (jnp.zeros((1, 1), jnp.int32) if one else query_of(
      k, numbers_along(part.rows, 1 - axis)))
  live = (query >= step.row_begin) & (query < step.row_length)
  end = jnp.full_like(query, step.row_length)
  if spec.right is not None:
    end = jnp.minimum(end, query + (spec.right + 1))
  if spec.scope == Scope.CACHED or spec.of_cache:
    end = jnp.minimum(end, step.kv_stop)
  begin = (jnp.full_like(query, step.kv_start) if spec.scope == Scope.NEW or spec.of_cache else
           None)
  if spec.left is not None and not spec.drafts:
    first = query - spec.left
    begin = first if begin is None else jnp.maximum(begin, first)
  return query, begin, jnp.where(live, end, 0)


def sees_any(k: KernelRefs, tile: TileIndex, part: TilePart, seen: jax.Array) -> jax.Array:
  """Returns which rows see a key of a tile, bool [1, rows], of `visible` [keys, rows]."""
  if k.shape.mask_rows or k.spec.drafts:
    return jnp.where(seen, 1.0, 0.0).max(0, keepdims=True) > 0
  first = tile.block * k.shape.layout.block_kv + part.keys.start
  _, begin, end = _ranges(k, tile, part, 0)
  end = jnp.minimum(end, first + (part.keys.stop - part.keys.start))
  return end > (first if begin is None else jnp.maximum(begin, first))


def _visible_to_drafts(k: KernelRefs, tile: TileIndex, query: jax.Array,
                       key: jax.Array) -> jax.Array:
  """Returns which keys new tokens see that form a tree, of keys that are not after them.

  Args:
    k: the kernel.
    tile: the keys.
    query: places of the queries in their request, int32 [1, group_rows] or its transpose.
    key: places of the keys, int32 [block_kv, 1] or its transpose.
  """
  spec, first = k.spec, tile.step.row_begin
  number, place = query - first, key - first
  per_query = []
  for ref in k.drafts:
    found = jnp.zeros_like(number)
    for i in range(spec.drafts):
      found = jnp.where(number == i, ref[tile.step.row * spec.drafts + i], found)
    per_query.append(found)
  seen, *depth = per_query
  seen = lax.shift_right_logical(seen, jnp.clip(place, 0, MOST_DRAFTS - 1)) & 1
  seen = (seen | lax.shift_right_logical(place, jnp.int32(31))) == 1  # negative: not a new token
  if spec.left is None:
    return seen
  return seen & (place >= jnp.minimum(depth[0] - spec.left, 0))


def _visible_by_mask(k: KernelRefs, tile: TileIndex, group: Index, axis: int,
                     part: TilePart) -> jax.Array:
  """Selects rows of the mask by a matrix product, unless all rows of the step share one."""
  shape, rows = k.shape, numbers_along(part.rows, 1 - axis)
  if shape.mask_rows == 1:
    return k.buffers[-1][tile.slot] > 0.5
  if shape.row_groups > 1:  # of one key head
    rows, group = rows + group * shape.group_rows, 0
  wanted = query_of(k, rows)
  if shape.mask_heads:
    key_head = group * shape.group_heads + lax.div(rows, jnp.int32(shape.head_rows))
    head = key_head * shape.group_size + lax.rem(rows, jnp.int32(shape.group_size))
    wanted = head * shape.block_q + wanted
  mask = k.buffers[-1][tile.slot][:, part.keys]
  sizes = (shape.mask_rows, rows.size)[::1 if axis == 0 else -1]
  selection = (lax.broadcasted_iota(jnp.int32, sizes, axis) == wanted).astype(mask.dtype)
  a, b, contract = (mask, selection, ((0,), (0,))) if axis == 0 else (
      selection, mask, ((1,), (0,)))
  return lax.dot_general(a, b, (contract, ((), ())),
                         precision=matmul_precision.resolve(mask.dtype, None),
                         preferred_element_type=jnp.float32) > 0.5
