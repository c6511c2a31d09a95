# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles of a block of keys and the rows of a key head, where rows are many.

Which tiles are visible, and whether the mask cuts them, is known once the kernel runs. The usual
cases, a block that is visible whole and those on the diagonal, are patterns with code of their own,
as in the flash kernel.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_core.caches.paged.layouts import Scope
from attn_core.kernels.tpu.ragged.common import (
    KernelRefs, LogitsSpec, StepShape, TileIndex, TilePart)
from attn_core.masks.block_map import EMPTY, FULL, PARTIAL

SLICE_KEYS = 128  # least keys of a part of a tile for which the mask is left out
MOST_CASES = 6  # each has code of its own

Pattern = tuple[int, ...]  # EMPTY, PARTIAL or FULL for each tile, in the order of `parts`


def parts(shape: StepShape) -> list[TilePart]:
  """Returns all tiles, those of the same rows one after the other."""
  keys, rows = shape.tile_sizes
  return [TilePart(slice(a, a + keys), slice(b, b + rows))
          for b in range(0, shape.group_rows, rows) for a in range(0, shape.layout.block_kv, keys)]


class Case(NamedTuple):
  """A pattern, and where it is that of a mask that only bounds keys to the right of each query."""

  pattern: Pattern
  slices: tuple[Pattern, ...]  # of each tile: the kinds of its parts of equal numbers of keys
  # Positions of the step's first query, counted from the block's first key: [first, end); end None:
  # unbounded. Of a full pattern only, without such a mask.
  first: int | None = None
  end: int | None = None

  def matches(self, k: KernelRefs, tile: TileIndex) -> jax.Array:
    """Returns whether the pattern is that of a block, or shows as much of its visible tiles."""
    if self.first is None or not _is_bounded_to_the_right(k.spec):
      return kinds(k, tile).match(self.pattern)
    shift = tile.step.query_begin - tile.block * k.shape.layout.block_kv
    found = shift >= self.first
    return found if self.end is None else found & (shift < self.end)


def _is_bounded_to_the_right(spec: LogitsSpec) -> bool:
  """Returns whether the mask is nothing but causality, which hides what is beyond the request."""
  return (spec.right == 0 and spec.left is None and not spec.drafts
          and spec.scope == Scope.ALL)


def cases(spec: LogitsSpec, shape: StepShape) -> list[Case]:
  """Returns the patterns that have code of their own, those with least work first."""
  tiles = parts(shape)
  if shape.mask_rows:
    return [Case((PARTIAL,) * len(tiles), ((PARTIAL,),) * len(tiles))]
  whole, whole_slices = (FULL,) * len(tiles), ((FULL,),) * len(tiles)
  if spec.right is None or shape.one_block or spec.drafts:
    return [Case(whole, whole_slices)]
  block_q, block_kv = shape.block_q, shape.layout.block_kv
  step = math.gcd(block_q, block_kv)  # between possible positions of the first query
  found: dict[tuple, Case] = {}
  for shift in range(-(block_q + spec.right) // step * step, block_kv + step, step):
    pattern = tuple(_kind_at(spec.right, shape, part, shift) for part in tiles)
    # Of other masks, only kinds of tiles are compared.
    slices = tuple(tuple(_kind_at(spec.right, shape, x, shift) for x in sliced(part))
                   for part in tiles) if _is_bounded_to_the_right(spec) else (
                       tuple((kind,) for kind in pattern))
    if pattern == whole:
      found.setdefault(pattern, Case(pattern, whole_slices, shift))
    elif any(pattern):
      found[slices] = Case(pattern, slices, shift, shift + step)
  usual = [*found.values()]
  return usual if len(usual) <= MOST_CASES else [x for x in usual if x.pattern == whole]


def sliced(part: TilePart) -> list[TilePart]:
  """Returns the parts of a tile, of equal numbers of keys."""
  first, end = part.keys.start, part.keys.stop
  size = (end - first) // 2 if (end - first) % (2 * SLICE_KEYS) == 0 else end - first
  return [part._replace(keys=slice(a, a + size)) for a in range(first, end, size)]


def _kind_at(right: int, shape: StepShape, part: TilePart, shift: int) -> int:
  """Returns the kind of a tile whose mask is a bound to the right of each query.

  Args:
    right: keys after a query that it sees.
    shape: of the step.
    part: the tile.
    shift: position of the step's first query, counted from the block's first key.
  """
  first, last = (shift + row // shape.group_size + right
                 for row in (part.rows.start, part.rows.stop - 1))
  if part.keys.stop - 1 <= first:
    return FULL
  return EMPTY if part.keys.start > last else PARTIAL


class Kinds(NamedTuple):
  """Kinds of the tiles of a running kernel: int32, a bit for each tile."""

  hidden: jax.Array  # no query of the call sees any key of it
  shown: jax.Array  # all queries of the call see all keys of it, if there are any

  def match(self, pattern: Pattern) -> jax.Array:
    """Returns whether a pattern computes no less than is visible, and hides what is not."""
    bits = lambda kind: jnp.int32(sum(1 << i for i, x in enumerate(pattern) if x == kind))
    wrong = (bits(EMPTY) & ~self.hidden) | (bits(FULL) & ~self.shown)
    return wrong == 0

  def is_hidden(self, number: int) -> jax.Array:
    """Returns whether no key of a tile is visible."""
    return (self.hidden >> number) & 1 == 1


def kinds(k: KernelRefs, tile: TileIndex) -> Kinds:
  """Returns the kinds of all tiles of a block."""
  hidden, shown = jnp.int32(0), jnp.int32(0)
  for number, part in enumerate(parts(k.shape)):
    is_hidden, is_shown = _kinds_of(k, tile, part)
    hidden = hidden | jnp.where(is_hidden, jnp.int32(1 << number), 0)
    shown = shown | jnp.where(is_shown, jnp.int32(1 << number), 0)
  return Kinds(hidden, shown)


def _kinds_of(k: KernelRefs, tile: TileIndex, part: TilePart) -> tuple[jax.Array, jax.Array]:
  """Returns whether a tile is hidden, and whether it is visible whole."""
  spec, step, group = k.spec, tile.step, k.shape.group_size
  begin = tile.block * k.shape.layout.block_kv
  first, last = begin + part.keys.start, begin + (part.keys.stop - 1)
  # The queries of the call.
  query = jnp.maximum(step.query_begin + part.rows.start // group, step.row_begin)
  query_end = jnp.minimum(step.query_begin + part.rows.stop // group, step.row_length)
  none = query >= query_end
  hidden = none | (first >= step.kv_stop) | (last < step.kv_start)
  shown = (last < step.kv_stop) & (first >= step.kv_start)
  if spec.right is not None:
    hidden |= first > query_end - 1 + spec.right
    shown &= last <= query + spec.right
  if spec.drafts:  # of them, none sees all others
    shown &= last < step.row_begin
  if spec.left is not None:
    # A draft follows at most all others, however many its request has.
    end = step.row_begin + spec.drafts if spec.drafts else query_end
    hidden |= last < (step.row_begin if spec.drafts else query) - spec.left
    shown &= first >= end - 1 - spec.left
  return hidden, none | shown
