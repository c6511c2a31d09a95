# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the latent rows of new tokens to their pages, as the first work of the ragged kernel.

A transfer moves whole tiles of memory, and a tile holds several rows: the tiles that get rows are
copied to vector memory, some at a time, get them there, and are copied back. Two requests that
write to the same tile, which valid tables do not have, would lose rows of one of them. Rows come as
a call has them: they are padded here, and quantized for pages of 8 bits, whose scales are copied
with the tiles, those of a whole page at a time.

All rows are in their pages before the first page is read, as in `new_tokens`.
"""

from typing import Any, NamedTuple, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
import jax.numpy as jnp

from attn_core.caches import quantize
from attn_core.kernels.common import dense_operands
from attn_core.kernels.tpu.ragged import new_tokens
from attn_core.kernels.tpu.ragged.kv_layout import (
    SUBLANES, KVLayout, narrowed, whole_tile, widened)
from attn_core.kernels.tpu.ragged.new_tokens import NewTokenRefs
from attn_core.types import cdiv

Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32

MOST_SLOTS = 16  # tiles in vector memory
MOST_BYTES = 8 * 2**20  # of vector memory, for these
ALIGNED = 2 * SUBLANES  # new rows of which a transfer copies a multiple: a tile of 16 bits
# The numbers of a tile, see `RowRefs.numbers`.
PAGE, PLACE, TOKEN, COUNT, FOLLOWS = range(5)


class RowRefs(NamedTuple):
  """References to rows to write, and to their places, in a running kernel."""

  tokens: NewTokenRefs  # its rows are [padded tokens, latent + rope], see `new_rows`
  layout: KVLayout
  # The arrays of the pages, [num_pages, page_size, width] each, and of scales, if there are any.
  targets: Sequence[Ref]
  tiles: Sequence[Ref]  # [slots, tile rows, width], or [slots, 1, width] scales, in vector memory
  windows: Ref  # [slots, window rows, latent + rope], in vector memory
  # int32 [5, slots]: page, first row in it, first token and tokens of each tile, and whether the
  # tile in the slot before is of the same page, in scalar memory
  numbers: Ref
  arrived: Ref  # semaphores, one for each slot
  sent: Ref


def tile_rows(layout: KVLayout) -> int:
  """Returns the rows that are copied together: whole tiles, or a page that has no whole ones."""
  rows = whole_tile(*layout.array_dtypes)
  return rows if layout.page_size % rows == 0 else layout.page_size


def _window_rows(layout: KVLayout) -> int:
  """Returns how many rows, from a multiple of ALIGNED on, hold all new ones of any tile."""
  return cdiv(tile_rows(layout), ALIGNED) * ALIGNED + ALIGNED


def new_rows(rows: jax.Array, layout: KVLayout) -> jax.Array:
  """Returns new rows [T, latent + rope] as `write` takes them.

  There are a few, which are copied as a whole, or a multiple of ALIGNED.
  """
  if rows.dtype not in (jnp.float32, jnp.bfloat16):  # only pages of 8 bits take others
    rows = rows.astype(jnp.float32)
  tokens = rows.shape[0]
  whole = tokens % SUBLANES == 0 and tokens <= _window_rows(layout)
  return rows if whole else dense_operands.pad_axis(rows, 0, -tokens % ALIGNED)


def scratch(layout: KVLayout, rows: tuple[int, ...], dtype: DTypeLike) -> list:
  """Returns the scratch memory for `new_rows` of a shape: tiles, windows, numbers, semaphores."""
  slots, widths = _slots(layout), layout.array_widths
  tiles = [((slots, tile_rows(layout), width), held)
           for width, held in zip(widths, layout.array_dtypes)]
  if layout.scales_by_page:
    tiles.append(((slots, 1, layout.scale_width), jnp.dtype(jnp.float32)))
  window = min(rows[0], _window_rows(layout)), rows[1]
  return [*(pltpu.VMEM(*x) for x in tiles), pltpu.VMEM((slots, *window), jnp.dtype(dtype)),
          pltpu.SMEM((FOLLOWS + 1, slots), jnp.int32), *[pltpu.SemaphoreType.DMA((slots,))] * 2]


def vmem_bytes(layout: KVLayout) -> int:
  """Returns an upper estimate of the vector memory of `scratch`."""
  return _slots(layout) * bytes_of_slot(layout)


def bytes_of_slot(layout: KVLayout) -> int:
  """Returns an upper estimate of the vector memory of one tile with its new rows."""
  scales = SUBLANES * layout.scale_width * 4 if layout.scales_by_page else 0
  return 2 * _window_rows(layout) * sum(layout.array_widths) * 4 + scales


def _slots(layout: KVLayout) -> int:
  """Returns how many tiles are in vector memory."""
  return max(1, min(MOST_SLOTS, MOST_BYTES // bytes_of_slot(layout)))


def are_same_on_all_cores(layout: KVLayout, tokens: int) -> bool:
  """Returns whether several cores may each write all rows, and read pages after their own writes.

  A tile gets all new rows at once. So do the scales of a page, but where its tiles are not all in
  vector memory at the same time: then a core could write some again as they were.
  """
  return not layout.scales_by_page or tokens <= _slots(layout)


def refs(tokens: NewTokenRefs, layout: KVLayout, targets: Sequence[Ref],
         scratch_refs: Sequence[Ref]) -> RowRefs:
  """Names the references of a kernel."""
  count = len(targets)
  return RowRefs(tokens, layout, targets, scratch_refs[:count], *scratch_refs[count:])


def write(w: RowRefs) -> None:
  """Writes all rows to their pages, and waits until they are there."""
  write_request = lambda request, held: _write_request(w, request, held)
  _flush(w, lax.fori_loop(jnp.int32(0), jnp.int32(w.tokens.requests), write_request, jnp.int32(0)))


def _write_request(w: RowRefs, request: Index, held: Index) -> jax.Array:
  """Takes the tiles of a request; returns how many are held in vector memory."""
  new, span = w.tokens, new_tokens.span_of(w.tokens, request)
  num_pages, page_size = new.target.shape[:2]
  size = w.tiles[0].shape[1]
  tile_of = lambda token: lax.div(token + span.shift, jnp.int32(size))
  begin = tile_of(span.first)
  stop = jnp.where(span.first < span.end, tile_of(jnp.maximum(span.end - 1, span.first)) + 1, begin)

  def take(number: Index, held: Index) -> jax.Array:
    at = number * size - span.shift  # the token at the tile's first row
    first, end = jnp.maximum(at, span.first), jnp.minimum(at + size, span.end)
    position = number * size
    page = new.pages[request * new.row_pages + lax.div(position, jnp.int32(page_size))]
    exists = (page >= 0) & (page < num_pages)

    @pl.when(exists)
    def _() -> None:
      in_page = lax.rem(position, jnp.int32(page_size))
      follows = (in_page > 0) & (number > begin) & (held > 0)
      for field, x in ((PAGE, page), (PLACE, in_page + (first - at)), (TOKEN, first),
                       (COUNT, end - first), (FOLLOWS, follows.astype(jnp.int32))):
        w.numbers[field, held] = x
      _copy_in(w, held, start=True)
    held = held + exists.astype(jnp.int32)
    slots = w.numbers.shape[1]
    pl.when(held == slots)(lambda: _flush(w, slots))
    return lax.rem(held, jnp.int32(slots))

  return lax.fori_loop(begin, stop, take, held)


def _flush(w: RowRefs, held: Index) -> None:
  """Puts the new rows into the tiles in vector memory, and copies these back."""
  @pl.loop(jnp.int32(0), jnp.int32(held))
  def _(slot: Index) -> None:
    _copy_in(w, slot, start=False)
    arrays, scales = _stored(w.layout, w.windows[slot].astype(jnp.float32))
    for tile, new in zip(w.tiles, arrays):
      _merge(w, slot, tile, new)
    if scales is not None:
      _merge_scales(w, slot, w.tiles[-1], scales)
    _copy_out(w, slot, held, start=True)

  pl.loop(jnp.int32(0), jnp.int32(held))(lambda slot: _copy_out(w, slot, held, start=False))


def _stored(layout: KVLayout, x: jax.Array) -> tuple[list[jax.Array], jax.Array | None]:
  """Returns rows, float32 [rows, latent + rope], as the pages have them.

  Returns:
    (their parts for the arrays of the pages, `widened`, and scales float32 [rows, 1] or None).
  """
  missing = sum(layout.array_widths) - x.shape[1]
  if missing:
    x = jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], 1)
  if not layout.scales_by_page:
    return [x], None
  latents, rest = x[:, :layout.array_widths[0]], x[:, layout.array_widths[0]:]
  scales = quantize.scale_of(jnp.abs(latents).max(1, keepdims=True), layout.dtype)
  values = quantize.rounded(latents / scales, layout.dtype).astype(layout.dtype)
  return [widened(values), rest], scales


def _window_begin(w: RowRefs, slot: Index) -> Index:
  """Returns the first row of a slot's window."""
  tokens, window = w.tokens.rows.shape[0], w.windows.shape[1]
  if tokens == window:
    return 0
  begin = lax.div(w.numbers[TOKEN, slot], jnp.int32(ALIGNED)) * ALIGNED
  return pl.multiple_of(jnp.minimum(begin, tokens - window), ALIGNED)


def _merge(w: RowRefs, slot: Index, tile: Ref, new: jax.Array) -> None:
  """Puts the new rows of a window in their places in a tile."""
  rows = tile.shape[1]
  turned = cdiv(max(rows, new.shape[0]), SUBLANES) * SUBLANES
  if turned > new.shape[0]:
    new = jnp.concatenate([new, jnp.zeros((turned - new.shape[0], new.shape[1]), new.dtype)])
  first = lax.rem(w.numbers[PLACE, slot], jnp.int32(rows))
  # Row `first` of the tile is that of token TOKEN in the window.
  turn = first - (w.numbers[TOKEN, slot] - _window_begin(w, slot))
  new = pltpu.roll(new, lax.rem(turn + turned, jnp.int32(turned)), 0)[:rows]
  row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
  is_new = (row >= first) & (row < first + w.numbers[COUNT, slot])
  tile[slot] = narrowed(jnp.where(is_new, new, widened(tile[slot])), tile.dtype)


def _merge_scales(w: RowRefs, slot: Index, tile: Ref, new: jax.Array) -> None:
  """Puts the scales of a window's new rows, [rows, 1], in their places among those of a page."""
  # A page's second tile finds the scales of its first one in the slot before.
  follows = w.numbers[FOLLOWS, slot] == 1
  held = tile[jnp.where(follows, slot - 1, slot)]
  place, count = w.numbers[PLACE, slot], w.numbers[COUNT, slot]
  row = lax.broadcasted_iota(jnp.int32, (new.shape[0], held.shape[1]), 0)
  column = lax.broadcasted_iota(jnp.int32, (new.shape[0], held.shape[1]), 1)
  turn = place - (w.numbers[TOKEN, slot] - _window_begin(w, slot))
  found = jnp.where(row + turn == column, new, 0).sum(0, keepdims=True)
  column = column[:1]
  tile[slot] = jnp.where((column >= place) & (column < place + count), found, held)


def _copy_in(w: RowRefs, slot: Index, *, start: bool) -> None:
  """Starts or awaits the copies of a slot's tiles and of the rows for them."""
  rows, window = w.tokens.rows, w.windows.at[slot]
  if rows.shape[0] > w.windows.shape[1]:
    rows = rows.at[pl.ds(_window_begin(w, slot), w.windows.shape[1])]
  for source, target in ((rows, window), *(x[::-1] for x in _tiles(w, slot))):
    copy = pltpu.make_async_copy(source, target, w.arrived.at[slot])
    (copy.start if start else copy.wait)()


def _copy_out(w: RowRefs, slot: Index, held: Index, *, start: bool) -> None:
  """Starts or awaits the copies of a slot's tiles to their pages; `held` slots have tiles."""
  for number, (tile, place) in enumerate(_tiles(w, slot)):
    copy = pltpu.make_async_copy(tile, place, w.sent.at[slot])
    if number < len(w.layout.array_widths):
      (copy.start if start else copy.wait)()
    else:  # scales that the next slot has as well are copied from there
      following = w.numbers[FOLLOWS, jnp.minimum(slot + 1, w.numbers.shape[1] - 1)] == 1
      last = jnp.logical_not(following & (slot + 1 < held))

      @pl.when(last)
      def _() -> None:
        (copy.start if start else copy.wait)()


def _tiles(w: RowRefs, slot: Index) -> list[tuple[Ref, Ref]]:
  """Returns the tiles of a slot in vector memory, and their places in the pages."""
  found, page = [], w.numbers[PAGE, slot]
  for tile, target in zip(w.tiles, w.targets):
    if len(target.shape) == 2:  # scales
      place = target.at[pl.ds(page, 1)]
    else:
      rows = tile.shape[1]
      begin = lax.div(w.numbers[PLACE, slot], jnp.int32(rows)) * rows
      place = target.at[page, pl.ds(pl.multiple_of(begin, rows), rows)]
    found.append((tile.at[slot], place))
  return found
