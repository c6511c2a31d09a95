# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the latent rows of new tokens to their pages, as the first work of the ragged kernel.

A transfer moves whole tiles of memory, and a tile holds several rows: the tiles that get rows are
copied to vector memory, some at a time, get them there, and are copied back. Two requests that
write to the same tile, which valid tables do not have, would lose rows of one of them.

All rows are in their pages before the first page is read, as in `new_tokens`.
"""

from typing import Any, NamedTuple, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels.tpu.ragged import new_tokens
from attn_core.kernels.tpu.ragged.kv_layout import (
    SUBLANES, KVLayout, narrowed, whole_tile, wide_dtype, widened)
from attn_core.kernels.tpu.ragged.new_tokens import NewTokenRefs
from attn_core.types import cdiv

Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32

MOST_SLOTS = 16  # tiles in vector memory
MOST_BYTES = 8 * 2**20  # of vector memory, for these
PAGE, PLACE, TOKEN, COUNT = range(4)  # the numbers of a tile, see `RowRefs.numbers`


class RowRefs(NamedTuple):
  """References to rows to write, and to their places, in a running kernel."""

  tokens: NewTokenRefs  # its rows and target are the first of these
  rows: Sequence[Ref]  # 32 bits [padded tokens, width], as many as `padded_tokens` says
  targets: Sequence[Ref]  # the arrays of the pages, [num_pages, page_size, width] each
  tiles: Sequence[Ref]  # [slots, tile rows, width], in vector memory
  windows: Sequence[Ref]  # 32 bits [slots, window rows, width], in vector memory
  # int32 [4, slots]: page, first row in it, first token and tokens of each tile, in scalar memory
  numbers: Ref
  arrived: Ref  # semaphores, one for each slot
  sent: Ref


def tile_rows(layout: KVLayout) -> int:
  """Returns the rows that are copied together: whole tiles, or a page that has no whole ones."""
  rows = whole_tile(*layout.array_dtypes)
  return rows if layout.page_size % rows == 0 else layout.page_size


def _window_rows(layout: KVLayout) -> int:
  """Returns how many rows, from a multiple of SUBLANES on, hold all new ones of some tiles."""
  return cdiv(tile_rows(layout), SUBLANES) * SUBLANES + SUBLANES


def padded_tokens(tokens: int, layout: KVLayout) -> int:
  """Returns the number of new rows with padding, so that the window of any token exists."""
  return cdiv(tokens, SUBLANES) * SUBLANES + _window_rows(layout)


def scratch(layout: KVLayout) -> list:
  """Returns the scratch memory: tiles, windows, numbers and semaphores."""
  arrays = list(zip(layout.array_widths, layout.array_dtypes))
  slots = _slots(layout)
  return [*(pltpu.VMEM((slots, tile_rows(layout), width), dtype) for width, dtype in arrays),
          *(pltpu.VMEM((slots, _window_rows(layout), width), wide_dtype(dtype))
            for width, dtype in arrays),
          pltpu.SMEM((4, slots), jnp.int32), *[pltpu.SemaphoreType.DMA((slots,))] * 2]


def vmem_bytes(layout: KVLayout) -> int:
  """Returns an upper estimate of the vector memory of `scratch`."""
  return _slots(layout) * bytes_of_slot(layout)


def bytes_of_slot(layout: KVLayout) -> int:
  """Returns an upper estimate of the vector memory of one tile with its new rows."""
  return 2 * _window_rows(layout) * sum(layout.array_widths) * 4


def _slots(layout: KVLayout) -> int:
  """Returns how many tiles are in vector memory."""
  return max(1, min(MOST_SLOTS, MOST_BYTES // bytes_of_slot(layout)))


def refs(tokens: NewTokenRefs, rows: Sequence[Ref], targets: Sequence[Ref],
         scratch_refs: Sequence[Ref]) -> RowRefs:
  """Names the references of a kernel."""
  count = len(targets)
  return RowRefs(tokens, rows, targets, scratch_refs[:count], scratch_refs[count:2 * count],
                 *scratch_refs[2 * count:])


def write(w: RowRefs) -> None:
  """Writes all rows to their pages, and waits until they are there."""
  write_request = lambda request, held: _write_request(w, request, held)
  _flush(w, lax.fori_loop(jnp.int32(0), jnp.int32(w.tokens.requests), write_request, jnp.int32(0)))


def _write_request(w: RowRefs, request: Index, held: Index) -> jax.Array:
  """Takes the tiles of a request; returns how many are held in vector memory."""
  new, span = w.tokens, new_tokens.span_of(w.tokens, request)
  num_pages, page_size = new.target.shape[:2]
  size = w.tiles[0].shape[1]

  def take(number: Index, held: Index) -> jax.Array:
    begin = number * size - span.shift  # the token at the tile's first row
    first, end = jnp.maximum(begin, span.first), jnp.minimum(begin + size, span.end)
    position = number * size
    page = new.pages[request * new.row_pages + lax.div(position, jnp.int32(page_size))]
    exists = (page >= 0) & (page < num_pages)

    @pl.when(exists)
    def _() -> None:
      place = lax.rem(position, jnp.int32(page_size)) + (first - begin)
      for field, x in ((PAGE, page), (PLACE, place), (TOKEN, first), (COUNT, end - first)):
        w.numbers[field, held] = x
      _copy_in(w, held, start=True)
    held = held + exists.astype(jnp.int32)
    slots = w.numbers.shape[1]
    pl.when(held == slots)(lambda: _flush(w, slots))
    return lax.rem(held, jnp.int32(slots))

  tile_of = lambda token: lax.div(token + span.shift, jnp.int32(size))
  begin = tile_of(span.first)
  end = jnp.where(span.first < span.end, tile_of(jnp.maximum(span.end - 1, span.first)) + 1, begin)
  return lax.fori_loop(begin, end, take, held)


def _flush(w: RowRefs, held: Index) -> None:
  """Puts the new rows into the tiles in vector memory, and copies these back."""
  @pl.loop(jnp.int32(0), jnp.int32(held))
  def _(slot: Index) -> None:
    _copy_in(w, slot, start=False)
    for tile, window in zip(w.tiles, w.windows):
      _merge(w, slot, tile, window)
    _copy_out(w, slot, start=True)

  pl.loop(jnp.int32(0), jnp.int32(held))(lambda slot: _copy_out(w, slot, start=False))


def _merge(w: RowRefs, slot: Index, tile: Ref, window: Ref) -> None:
  """Puts the new rows of a window in their places in a tile."""
  rows, held = tile.shape[1], window.shape[1]
  first = lax.rem(w.numbers[PLACE, slot], jnp.int32(rows))
  # Row `first` of the tile is row token % SUBLANES of the window.
  turn = first - lax.rem(w.numbers[TOKEN, slot], jnp.int32(SUBLANES))
  new = pltpu.roll(window[slot], lax.rem(turn + held, jnp.int32(held)), 0)[:rows]
  row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
  is_new = (row >= first) & (row < first + w.numbers[COUNT, slot])
  tile[slot] = narrowed(jnp.where(is_new, new, widened(tile[slot])), tile.dtype)


def _copy_in(w: RowRefs, slot: Index, *, start: bool) -> None:
  """Starts or awaits the copies of a slot's tiles and of the rows for them."""
  token = lax.div(w.numbers[TOKEN, slot], jnp.int32(SUBLANES)) * SUBLANES
  for rows, window in zip(w.rows, w.windows):
    part = pl.ds(pl.multiple_of(token, SUBLANES), window.shape[1])
    copy = pltpu.make_async_copy(rows.at[part], window.at[slot], w.arrived.at[slot])
    (copy.start if start else copy.wait)()
  for tile, place in _tiles(w, slot):
    copy = pltpu.make_async_copy(place, tile, w.arrived.at[slot])
    (copy.start if start else copy.wait)()


def _copy_out(w: RowRefs, slot: Index, *, start: bool) -> None:
  """Starts or awaits the copies of a slot's tiles to their pages."""
  for tile, place in _tiles(w, slot):
    copy = pltpu.make_async_copy(tile, place, w.sent.at[slot])
    (copy.start if start else copy.wait)()


def _tiles(w: RowRefs, slot: Index) -> list[tuple[Ref, Ref]]:
  """Returns the tiles of a slot in vector memory, and their places in the pages."""
  found = []
  for tile, target in zip(w.tiles, w.targets):
    rows = tile.shape[1]
    begin = lax.div(w.numbers[PLACE, slot], jnp.int32(rows)) * rows
    found.append((tile.at[slot], target.at[w.numbers[PAGE, slot],
                                           pl.ds(pl.multiple_of(begin, rows), rows)]))
  return found
