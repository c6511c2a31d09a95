# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layout of keys and values in a TPU's memory, and their transfers to vector memory.

Each page is copied by a DMA transfer of its own, and only pages with live tokens are copied.
`kv_block` reads a block that has arrived.
"""

from typing import Any, Callable, Iterator, NamedTuple, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.tpu import launch
from attn_core.types import cdiv

Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32
BufferShape = tuple[tuple[int, ...], Any]  # (shape, dtype)

LANES = 128
SUBLANES = 8
PAIRED_TOKENS = 2 * SUBLANES
# Semaphores of transfers count bytes, so that one wait covers all pages of a block. False: each
# page is awaited, for comparison on a chip.
ONE_WAIT_PER_BLOCK = True


class KVLayout(NamedTuple):
  """Layout of keys and values; static and hashable.

  The arrays of tokens are one of:
    keys and values interleaved: one array [num_pages, page_size, 2 * K, D], keys in even rows and
      values in odd ones;
    pages: two arrays [num_pages, page_size, K, D] and [num_pages, page_size, K, E];
    a dense cache: two arrays [B, S, K, D] and [B, S, K, E], where a page is `page_size` tokens of
      a batch row;
    latent rows: one array [num_pages, page_size, D] of one key head, whose first E numbers are the
      value. They are computed from where they arrive, so that a row is copied and kept once. In 8
      bits two arrays, [num_pages, page_size, E] and the rest of the rows in 16 bits or more. Those
      of a dense cache are [B, S / page_size, page_size, ...].
  If `heads_major`, heads come before tokens: [num_pages, 2 * K, page_size, D],
  [K, num_pages, page_size, D or E], [B, K, S, D or E].

  With scales per token there are two more arrays, float32 [rows, scale_rows, padded_tokens], as XLA
  stores them: scale_rows is K rounded up to SUBLANES, and padded_tokens is a multiple of block_kv,
  which is one of LANES. Latent rows have one scale, and one such array, of one row; in pages it is
  [num_pages, scale_width], copied with the pages, with columns that only pad it to whole lanes.
  """

  interleaved: bool
  heads_major: bool
  key_heads: int  # that are read
  widths: tuple[int, ...]  # D and E, or that of the interleaved array
  dtype: Any  # of the stored numbers
  page_size: int  # tokens
  block_pages: int
  row_tokens: int = 0  # S of a dense cache; 0: pages
  scales: str | None = None  # "token", "tensor", or None
  slots: int = 2  # blocks in vector memory: one is computed while the others are copied
  # Parts of LANES columns that a row consists of: consecutive rows of the array, of which each has
  # the numbers that share words. XLA stores rows of layout v3 in this order.
  lane_parts: int = 1
  latent: bool = False  # whether the value is a part of the key
  rest_dtype: Any = None  # of the rest of latent rows whose value has 8 bits; None: they are whole
  # Whether words are read where transfers put the numbers, see `at_run_time`.
  in_place: bool = False
  # Key heads in the interleaved array, with those that only pad it; 0: `key_heads`.
  stored_heads: int = 0

  @property
  def array_widths(self) -> tuple[int, ...]:
    """The widths of the arrays of tokens."""
    if self.rest_dtype is not None:
      return self.widths[1], self.widths[0] - self.widths[1]
    return self.widths[:1] if self.latent else self.widths

  @property
  def array_dtypes(self) -> tuple[np.dtype, ...]:
    """The dtypes of the arrays of tokens."""
    if self.rest_dtype is not None:
      return jnp.dtype(self.dtype), jnp.dtype(self.rest_dtype)
    return (jnp.dtype(self.dtype),) * len(self.array_widths)

  @property
  def scale_arrays(self) -> int:
    """The number of arrays of scales per token."""
    return 0 if self.scales != "token" else 1 if self.latent else 2

  @property
  def scales_by_page(self) -> bool:
    """True if the scales of a page's tokens are one row of an array, and copied with the page."""
    return self.latent and self.scales == "token" and not self.row_tokens

  @property
  def scale_width(self) -> int:
    """Columns of the scales of a page, where they are one row of an array."""
    return cdiv(self.page_size, LANES) * LANES

  @property
  def page_arrays(self) -> int:
    """The number of arrays of which every page is copied."""
    return len(self.array_widths) + self.scales_by_page

  @property
  def pages_follow(self) -> bool:
    """True if the pages of a batch row follow one another, so that one transfer copies several."""
    return self.latent and self.row_tokens > 0

  @property
  def keeps_words(self) -> bool:
    """True if blocks are read as words."""
    return not (self.heads_major or self.latent)

  @property
  def has_words(self) -> bool:
    """True if rows of LANES numbers are words in the order of tokens wherever they are.

    The words of a token must be a whole tile, and fewer than one of SUBLANES rows, which are read
    faster in the order that `splits_even_odd` gives them.
    """
    itemsize = jnp.dtype(self.dtype).itemsize
    return (self.keeps_words and self.token_words in (1, 2, 4)
            and (itemsize == 4 or self.packing > 1)
            and all(width == LANES * self.lane_parts for width in self.widths))

  @property
  def block_kv(self) -> int:
    """Tokens of a block."""
    return self.page_size * self.block_pages

  @property
  def token_rows(self) -> int:
    """Rows of a token: its key heads, or keys and values alternating."""
    return 2 * (self.stored_heads or self.key_heads) if self.interleaved else self.key_heads

  @property
  def packing(self) -> int:
    """Numbers per 32-bit word; 1: every number is widened to 32 bits."""
    packing = 4 // jnp.dtype(self.dtype).itemsize
    return packing if self.token_rows % packing == 0 else 1

  @property
  def token_words(self) -> int:
    """Rows of words of a token."""
    return self.token_rows // self.packing * self.lane_parts

  @property
  def pairs_tokens(self) -> bool:
    """True if a read packs the numbers of two tokens of a head into one word."""
    return self.packing == 2 and not self.heads_major and self.block_kv % PAIRED_TOKENS == 0

  @property
  def splits_even_odd(self) -> bool:
    """True if even tokens come before odd ones in the words of every PAIRED_TOKENS tokens.

    A strided load gives up to eight words, one per token; a pair consists of an even and an odd
    token. Where the words of a token fill whole tiles, this order costs nothing.
    """
    return self.pairs_tokens and self.token_words % SUBLANES == 0

  def buffers(self) -> list[BufferShape]:
    """Returns shapes of the buffers that blocks and their scales are copied to."""
    def shape(width: int) -> tuple[int, ...]:
      if self.latent:
        return self.page_size, width
      return (self.token_rows, self.page_size, width) if self.heads_major else (
          self.page_size, self.token_rows * self.lane_parts, width // self.lane_parts)
    found: list[BufferShape] = [
        ((self.slots, self.block_pages, *shape(width)), dtype)
        for width, dtype in zip(self.array_widths, self.array_dtypes)]
    of_scales = (self.slots, self.block_pages, self.scale_width) if self.scales_by_page else (
        self.slots, self.scale_rows, self.block_kv)
    return found + [(of_scales, jnp.float32)] * self.scale_arrays

  @property
  def scale_rows(self) -> int:
    """Rows of the scales' arrays: K rounded up to SUBLANES, or one of latent rows."""
    return 1 if self.latent else cdiv(self.key_heads, SUBLANES) * SUBLANES

  def word_buffers(self) -> list[BufferShape]:
    """Returns shapes of the buffers for the words of a block and for its transposed scales."""
    dtype = jnp.uint32 if self.packing > 1 else jnp.float32
    found: list[BufferShape] = [] if self.in_place or not self.keeps_words else [
        ((cdiv(width, LANES * self.lane_parts), self.block_kv * self.token_words,
          min(width, LANES)), dtype)
        for width in self.widths]
    return found + [((self.block_kv, self.scale_rows), jnp.float32)] * self.scale_arrays

  def vmem_bytes(self) -> int:
    """Returns the vector memory of all buffers."""
    def padded(shape: tuple[int, ...], dtype: DTypeLike) -> int:
      size = jnp.dtype(dtype).itemsize
      rows = cdiv(shape[-2], 4 // size) * (4 // size)
      return int(np.prod(shape[:-2])) * rows * cdiv(shape[-1], LANES) * LANES * size
    words = self._replace(in_place=self.has_words).word_buffers()
    return sum(padded(*x) for x in (*self.buffers(), *words))

  def at_run_time(self) -> "KVLayout":
    """Returns the layout of a kernel that is traced now.

    Words are read in place where a block has them. Interpret mode has no references to the same
    memory in another dtype or shape: there they are copied.
    """
    return self._replace(in_place=self.has_words and not launch.effects())


def whole_tile(*dtypes: DTypeLike) -> int:
  """Returns the rows of a tile of memory that is whole for arrays of all these dtypes."""
  return max(SUBLANES * 4 // jnp.dtype(dtype).itemsize for dtype in dtypes)


def wide_dtype(dtype: DTypeLike) -> np.dtype:
  """Returns the dtype in which `widened` gives numbers."""
  return jnp.dtype(jnp.int32 if jnp.dtype(dtype).itemsize == 1 else jnp.float32)


def widened(x: jax.Array) -> jax.Array:
  """Converts numbers to 32 bits: to float32, or those of 8 bits as they are to int32."""
  x = lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 else x
  return x.astype(wide_dtype(x.dtype))


def narrowed(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns the inverse of `widened`."""
  if jnp.dtype(dtype).itemsize > 1:
    return x.astype(dtype)
  return lax.bitcast_convert_type(x.astype(jnp.int8), dtype)


def is_heads_major(rows: int, dtype: DTypeLike) -> bool:
  """Returns True if XLA stores [..., tokens, rows, width] with the rows before the tokens.

  It does where the rows do not fill its tiles; passing arrays in that order copies nothing.
  """
  packing = 4 // jnp.dtype(dtype).itemsize
  return rows % SUBLANES != 0 and (rows % packing != 0 or rows // packing not in (1, 2, 4))


class LiveTokens(NamedTuple):
  """Range [start, stop) of a row's tokens that may be read; others may hold NaN."""

  start: Index
  stop: Index

  def pages(self, layout: KVLayout, block: Index) -> tuple[jax.Array, jax.Array]:
    """Returns the range (first, end) of a block's pages that hold live tokens."""
    begin = block * layout.block_pages
    first = jnp.clip(
        lax.div(self.start, jnp.int32(layout.page_size)) - begin, 0, layout.block_pages)
    end = lax.div(self.stop + (layout.page_size - 1), jnp.int32(layout.page_size)) - begin
    return first, jnp.clip(end, 0, layout.block_pages)

  def tokens(self, layout: KVLayout, block: Index) -> tuple[jax.Array, jax.Array]:
    """Returns the range (first, end) of live tokens, counted from the block's first token."""
    begin = block * layout.block_kv
    return self.start - begin, self.stop - begin


class Transfer(NamedTuple):
  """Sources and targets of DMA transfers."""

  sources: Sequence[Ref]  # arrays
  buffers: Sequence[Ref]  # one for each source, with a leading axis of slots
  semaphores: Ref  # one for every slot
  slot: Index


class RowPages(NamedTuple):
  """The pages of a row."""

  begin: Index  # the first one, in the tables of all rows
  index_of: Callable[[Index], Index]  # of a page there: its number in the pool, or the batch row


def copy_block(layout: KVLayout, transfer: Transfer, row: Index, block: Index, *,
               start: bool) -> None:
  """Starts or awaits the copies of a block of tokens of arrays [rows, ..., padded_tokens].

  Args:
    layout: of keys and values.
    transfer: of scales or of a mask.
    row: request or batch row.
    block: number of the block in the row.
    start: True starts the copies, False waits for them.
  """
  sources, buffers, semaphores, slot = transfer
  for source, buffer in zip(sources, buffers, strict=True):
    tokens = pl.ds(pl.multiple_of(block * layout.block_kv, layout.block_kv), layout.block_kv)
    copy = pltpu.make_async_copy(source.at[row, :, tokens], buffer.at[slot], semaphores.at[slot])
    (copy.start if start else copy.wait)()


def copy_pages(layout: KVLayout, transfer: Transfer, live: LiveTokens, block: Index,
               row_pages: RowPages, *, start: bool) -> None:
  """Starts or awaits the copies of a block's live pages.

  Args:
    layout: of keys and values.
    transfer: of the arrays of tokens; see `KVLayout`.
    live: the tokens that may be read.
    block: number of the block in its row.
    row_pages: the pages of the row.
    start: True starts the copies, False waits for them.
  """
  first, end = live.pages(layout, block)
  begin = block * layout.block_pages
  in_tables = row_pages.begin + begin  # added once, so that each page adds one number
  whole, rest = (first == 0) & (end == layout.block_pages), layout.row_tokens % layout.page_size
  if rest:
    whole = whole & ((block + 1) * layout.block_kv <= layout.row_tokens)

  def copy_page(place: Index, tokens: int) -> None:
    index, part = row_pages.index_of(in_tables + place), None
    if layout.pages_follow:
      part = begin + place
    elif layout.row_tokens:
      page = pl.multiple_of((begin + place) * layout.page_size, layout.page_size)
      part = pl.ds(page, tokens)
    for copy in _page_copies(layout, transfer, place, index, part):
      (copy.start if start else copy.wait)()

  # 1. All pages of the block are live.
  @pl.when(whole)
  def _() -> None:
    if start and layout.pages_follow:
      for source, buffer in zip(transfer.sources, transfer.buffers, strict=True):
        pltpu.make_async_copy(source.at[row_pages.index_of(0), pl.ds(begin, layout.block_pages)],
                              buffer.at[transfer.slot],
                              transfer.semaphores.at[transfer.slot]).start()
    elif start or not ONE_WAIT_PER_BLOCK:
      # One piece of code, so that pages do not wait for each other's addresses.
      for place in range(layout.block_pages):
        copy_page(place, layout.page_size)
    else:
      for buffer in transfer.buffers:
        part = buffer.at[transfer.slot]
        pltpu.make_async_copy(part, part, transfer.semaphores.at[transfer.slot]).wait()

  # 2. Some are, or the last page of a dense cache is cut short.
  @pl.loop(first, jnp.where(whole, first, end))
  def _(place: jax.Array) -> None:
    if not rest:
      copy_page(place, layout.page_size)
      return
    full = (begin + place + 1) * layout.page_size <= layout.row_tokens
    pl.when(full)(lambda: copy_page(place, layout.page_size))
    pl.when(jnp.logical_not(full))(lambda: copy_page(place, rest))


def start_pages(layout: KVLayout, transfer: Transfer, block: Index, row_pages: RowPages,
                places: range) -> None:
  """Starts the copies of some pages of a block, all of which are live.

  Args:
    layout: of pages.
    transfer: of the arrays of tokens; see `KVLayout`.
    block: number of the block in its row.
    row_pages: the pages of the row.
    places: of the pages in the block.
  """
  begin = row_pages.begin + block * layout.block_pages
  for place in places:
    for copy in _page_copies(layout, transfer, place, row_pages.index_of(begin + place), None):
      copy.start()


def _page_copies(layout: KVLayout, transfer: Transfer, place: Index, index: Index,
                 part: Any) -> Iterator[Any]:
  """Yields the copies of a page.

  Args:
    layout: of keys and values.
    transfer: of the arrays of tokens.
    place: of the page in its block.
    index: its number in the pool, or the batch row.
    part: its tokens in a batch row, or its number there if `pages_follow`; None: the page is in a
      pool.
  """
  sources, buffers, semaphores, slot = transfer
  for source, buffer in zip(sources, buffers, strict=True):
    heads_major, target = layout.heads_major, buffer.at[slot, place]
    if part is not None:
      source = source.at[index, :, part] if heads_major else source.at[index, part]
      if not layout.pages_follow and part.size < layout.page_size:
        kept = pl.ds(0, part.size)
        target = target.at[:, kept] if heads_major else target.at[kept]
    else:
      split = heads_major and not layout.interleaved
      source = source.at[:, index] if split else source.at[index]
    yield pltpu.make_async_copy(source, target, semaphores.at[slot])
