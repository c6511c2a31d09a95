# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A block of keys and values in a TPU's vector memory, and reads of one head from it.

Numbers of less than 32 bits are read as the 32-bit words that hold them, because a strided load can
read any row of words: in place where these fill whole tiles (`KVLayout.has_words`), otherwise from
a copy. In interpret mode they are always copied, because it has no references to the same memory in
another dtype, and its detection of races is needed.
"""

import functools
from typing import Any, Iterator, NamedTuple, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.tpu.ragged.kv_layout import (
    LANES, PAIRED_TOKENS, SUBLANES, KVLayout, LiveTokens, narrowed, widened)
from attn_core.types import cdiv

MOST_STORED = 2.0**9  # more than the numbers of 8 bits
LARGE_BITS = (127 + 32) << 7  # 2**32 in bfloat16
Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32


class KVBlock(NamedTuple):
  """A block of keys and values in vector memory."""

  layout: KVLayout
  buffers: Sequence[Ref]  # that transfers fill; see `KVLayout.buffers`
  words: Sequence[Ref]  # see `KVLayout.word_buffers`
  tensor_scales: Ref | None  # scales of all keys and of all values, in scalar memory
  slot: Index
  live: LiveTokens
  block: Index  # number of the block in its row

  @property
  def live_range(self) -> tuple[jax.Array, jax.Array]:
    """The range (first, end) of tokens that may be read, counted from the block's first one."""
    return self.live.tokens(self.layout, self.block)

  def load_words(self) -> None:
    """Converts the block to words; pages that were not copied become zeros.

    Tokens of copied pages that may not be read keep their numbers.
    """
    layout = self.layout
    first, end = self.live.pages(layout, self.block)
    def clear(place: Index) -> None:
      for buffer in self.buffers[:len(layout.array_widths)]:
        buffer[self.slot, place] = jnp.zeros(buffer.shape[2:], buffer.dtype)
    pl.loop(jnp.int32(0), first)(clear)
    pl.loop(end, jnp.int32(layout.block_pages))(clear)
    for array, part in self._word_parts():
      self._load_part(array, part)
    if not layout.latent:  # `row_scales` reads them where they are
      self._load_scales()

  def load_masked_words(self) -> jax.Array:
    """Converts the block to words, with zeros for tokens that may not be read.

    Returns:
      float32 [1, 1]: 0 if all numbers are finite and less than `2**32`, else not 0, or NaN.
    """
    layout, total = self.layout, jnp.zeros((1, 1), jnp.float32)
    if self.tensor_scales is not None:
      for scale in (self.tensor_scales[0], self.tensor_scales[1]):
        total += _nan_if_large(jnp.full((1, 1), scale), MOST_STORED)
    whole = (self.live_range[0] <= 0) & (self.live_range[1] >= layout.block_kv)
    for array, part in self._word_parts():
      self._load_part(array, part)
      words = self._words_of(array, part)
      self._clear_dead_tokens(words, whole)
      total += _large_indicator(words, layout)
    if layout.heads_major:
      for array in range(len(layout.widths)):
        for row in range(layout.token_rows):
          total += _nan_if_large(self._read_heads_major(array, row))
    total += self._load_scales()
    if layout.latent:
      self._clear_dead_rows(whole)
      total += _nan_if_large(self._read_latents(jnp.float32))
    return total

  def _word_parts(self) -> Iterator[tuple[int, int]]:
    """Yields (array, part of its width) of everything that is kept as words."""
    if self.layout.keeps_words:
      for array in range(len(self.layout.widths)):
        for part in range(self._parts_of(array)):
          yield array, part

  def _parts_of(self, array: int) -> int:
    """Returns how many parts of LANES columns the words of an array have."""
    return 1 if self.layout.in_place else self.words[array].shape[0]

  def _words_of(self, array: int, part: int) -> Ref:
    """Returns a reference to the words of all tokens in LANES columns, [rows, lanes]."""
    layout = self.layout
    if not layout.in_place:
      return self.words[array].at[part]
    buffer = self.buffers[array]
    buffer = buffer if layout.packing == 1 else buffer.bitcast(jnp.uint32)
    return buffer.at[self.slot].reshape(layout.block_kv * layout.token_words, buffer.shape[-1])

  def _load_part(self, array: int, part: int) -> None:
    """Converts LANES columns of an array to words, if they are not read in place."""
    layout = self.layout
    if layout.in_place:
      return
    words = self.words[array]
    lanes = words.shape[2]
    x = self.buffers[array][self.slot, :, :, :, pl.ds(part * lanes, lanes)]
    x = self._to_words(x.reshape(layout.block_kv * layout.token_rows * layout.lane_parts, lanes))
    if layout.splits_even_odd:
      x = x.reshape(layout.block_kv // PAIRED_TOKENS, SUBLANES, 2, layout.token_words, lanes)
      x = jnp.stack([x[:, :, odd] for odd in range(2)], 1).reshape(words.shape[1:])
    words[part] = x

  def _load_scales(self) -> jax.Array:
    """Transposes scales to [block_kv, scale_rows], zeros for tokens that may not be read.

    Returns:
      float32 [1, 1]: 0, or NaN if a scale is non-finite or large.
    """
    total, arrays = jnp.zeros((1, 1), jnp.float32), self.layout.scale_arrays
    for number in range(-arrays, 0):
      transposed = self.words[number]
      transposed[...] = jnp.where(self.is_live(), self._scales_along_lanes(number).T, 0)
      total += _nan_if_large(transposed[...], MOST_STORED)
    return total

  def _scales_along_lanes(self, number: int) -> jax.Array:
    """Reads an array of scales, float32 [scale_rows, block_kv]."""
    if self.layout.scales_by_page:
      return self._scales_of_pages(0, self.layout.block_kv)
    return self.buffers[number][self.slot]

  def is_live(self) -> jax.Array:
    """Returns bool [block_kv, 1]: whether a token may be read."""
    token = lax.broadcasted_iota(jnp.int32, (self.layout.block_kv, 1), 0)
    return (token >= self.live_range[0]) & (token < self.live_range[1])

  def _to_words(self, x: jax.Array) -> jax.Array:
    """Converts [rows, lanes] to uint32 words, or to float32 if numbers are not packed."""
    if self.layout.packing > 1:
      return pltpu.bitcast(x, jnp.uint32)
    return x.astype(jnp.float32)

  def _clear_dead_tokens(self, words: Ref, whole: jax.Array) -> None:
    """Writes zeros over the words of tokens that may not be read, unless `whole`."""
    @pl.when(jnp.logical_not(whole))
    def _() -> None:
      token = lax.div(lax.broadcasted_iota(jnp.int32, words.shape, 0),
                      jnp.int32(self.layout.token_words))
      if self.layout.splits_even_odd:
        within = lax.rem(token, jnp.int32(PAIRED_TOKENS))
        token += lax.rem(within, jnp.int32(SUBLANES)) * 2 + lax.div(
            within, jnp.int32(SUBLANES)) - within
      first, end = self.live_range
      words[...] = jnp.where((token >= first) & (token < end), words[...],
                             jnp.zeros((), words.dtype))

  def _clear_dead_rows(self, whole: jax.Array) -> None:
    """Writes zeros over latent rows of tokens that may not be read, unless `whole`."""
    @pl.when(jnp.logical_not(whole))
    def _() -> None:
      for buffer in self.buffers[:len(self.layout.array_widths)]:
        x = buffer[self.slot].reshape(self.layout.block_kv, buffer.shape[-1])
        x = narrowed(jnp.where(self.is_live(), widened(x), 0), buffer.dtype)
        buffer[self.slot] = x.reshape(buffer.shape[1:])

  def _read_latents(self, dtype: DTypeLike) -> jax.Array:
    """Reads the latent rows of all tokens, dequantized, [block_kv, D]."""
    if self.layout.rest_dtype is None:
      return self.read_parts(None, dtype)[0]
    value, rest = self.read_parts(None, jnp.float32)
    return jnp.concatenate([value * self.words[-1][...][:, :1], rest], 1).astype(dtype)

  def read_parts(self, piece: slice | None, dtype: DTypeLike,
                 value_dtype: DTypeLike | None = None) -> list[jax.Array]:
    """Reads the parts in which latent rows are stored, without their scales, in `dtype`.

    Args:
      piece: the tokens of the block; None: all of them.
      dtype: of the result, which holds numbers of 8 bits as they are.
      value_dtype: of a value that is stored apart; None: `dtype`.

    Returns:
      [tokens, D], or the value [tokens, E] and the rest of the rows [tokens, D - E].
    """
    found = []
    for number, buffer in enumerate(self.buffers[:len(self.layout.array_widths)]):
      wanted = dtype if number or value_dtype is None else value_dtype
      x = buffer[self.slot].reshape(self.layout.block_kv, buffer.shape[-1])
      x = x if piece is None else x[piece]
      x = x.astype(jnp.float32) if x.dtype.itemsize == 1 and x.dtype != wanted else x
      found.append(x.astype(wanted))
    return found

  def row_scales(self, piece: slice | None) -> jax.Array | None:
    """Returns the scales of latent rows, float32 [1, tokens], or None.

    Those of tokens that may not be read are 0.
    """
    if self.layout.rest_dtype is None:
      return None
    part = piece or slice(0, self.layout.block_kv)
    if self.layout.scales_by_page:
      x = self._scales_of_pages(part.start, part.stop)
    else:
      x = self.buffers[-1][self.slot][:1, part]
    token = lax.broadcasted_iota(jnp.int32, x.shape, 1) + part.start
    first, end = self.live_range
    return jnp.where((token >= first) & (token < end), x, 0)

  def _scales_of_pages(self, begin: int, end: int) -> jax.Array:
    """Joins scales that were copied page by page, float32 [1, end - begin], of some tokens."""
    first = begin // LANES * LANES
    if LANES % self.layout.page_size:
      found = [self._scales_of_lanes(token) for token in range(first, end, LANES)]
    else:
      found = self._scales_of_small_pages(first // LANES, cdiv(end, LANES))
    return jnp.concatenate(found, 1)[:, begin - first:end - first]

  def _scales_of_small_pages(self, first: int, end: int) -> list[jax.Array]:
    """Returns the scales of every LANES tokens of a block, [1, LANES] each, from `first` to `end`.

    The pages that begin at the same lane are turned together.
    """
    size = self.layout.page_size
    lane, pages = lax.broadcasted_iota(jnp.int32, (1, LANES), 1), LANES // size
    of_place = lambda place: self.buffers[-1].at[self.slot][
        pl.ds(first * pages + place, end - first, stride=pages), :]
    found = of_place(0)
    for place in range(1, pages):
      found = jnp.where(lane >= place * size, pltpu.roll(of_place(place), place * size, 1), found)
    return [found[n:n + 1] for n in range(end - first)]

  def _scales_of_lanes(self, begin: int) -> jax.Array:
    """Returns the scales of the LANES tokens of a block from `begin` on, [1, LANES]."""
    size, lane = self.layout.page_size, lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    found = None
    for place in range(begin // size, (begin + LANES - 1) // size + 1):
      for part in range(0, size, LANES):
        at = place * size + part - begin  # the lane of the first token of the part
        if at <= -LANES or at >= LANES:
          continue
        x = self.buffers[-1][self.slot, pl.ds(place, 1), pl.ds(part, LANES)]
        x = pltpu.roll(x, at % LANES, 1) if at else x
        found = x if found is None else jnp.where(lane >= at, x, found)
    assert found is not None
    return found

  def _read_heads_major(self, array: int, row: Index) -> jax.Array:
    """Reads a row of all tokens, float32 [block_kv, D or E], where heads come first."""
    x = self.buffers[array][self.slot, :, row]
    x = x.reshape(self.layout.block_kv, x.shape[-1])
    return jnp.where(self.is_live(), x.astype(jnp.float32), 0)

  def read_both(self, head: Index, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Reads keys [block_kv, D] and values [block_kv, E] of a head, dequantized."""
    layout = self.layout
    if layout.latent:
      rows = self._read_latents(dtype)
      return rows, rows[:, :layout.widths[1]]
    if not (layout.interleaved and layout.pairs_tokens):
      return self.read(False, head, dtype), self.read(True, head, dtype)
    pairs = self._even_odd_words(0, head)  # hold keys and values
    key, value = (_pack_pairs(*pairs, half, layout.dtype).astype(dtype) for half in range(2))
    return key, value

  def read(self, is_value: bool, head: Index, dtype: DTypeLike) -> jax.Array:
    """Reads keys [block_kv, D] or values [block_kv, E] of a head, dequantized."""
    layout = self.layout
    if layout.latent:
      return self.read_both(head, dtype)[int(is_value)]
    array, row = (0, 2 * head + int(is_value)) if layout.interleaved else (int(is_value), head)
    if layout.heads_major:
      x = self._read_heads_major(array, row)
    else:
      packing = layout.packing
      word: Index
      place: Index
      if isinstance(row, int):
        word, place = divmod(row, packing)
      elif layout.interleaved and packing == 2:
        word, place = head, int(is_value)
      else:
        word, place = lax.div(row, jnp.int32(packing)), lax.rem(row, jnp.int32(packing))
      if layout.pairs_tokens:
        return _pack_pairs(*self._even_odd_words(array, word), place, layout.dtype).astype(dtype)
      x = self._read_words(array, word)
      is_scaled = self.tensor_scales is not None or layout.scales == "token"
      x = _unpack(x, place, layout, jnp.float32 if is_scaled else dtype) if packing > 1 else x
    if self.tensor_scales is not None:
      x = x * self.tensor_scales[int(is_value)]
    elif layout.scales == "token":
      scales = self.words[int(is_value) - 2][...]
      is_head = lax.broadcasted_iota(jnp.int32, scales.shape, 1) == head
      x = x * jnp.where(is_head, scales, 0).sum(1, keepdims=True)
    return x.astype(dtype)

  def _even_odd_words(self, array: int, word: Index) -> tuple[jax.Array, jax.Array]:
    """Reads one word per token: ([block_kv / 2, D or E] of even tokens, of odd tokens)."""
    layout = self.layout
    if not layout.splits_even_odd:
      even, odd = (self._read_words(array, word, odd, 2) for odd in range(2))
      return even, odd
    x = self._read_words(array, word)
    x = x.reshape(layout.block_kv // PAIRED_TOKENS, 2, SUBLANES, x.shape[1])
    even, odd = (x[:, odd].reshape(layout.block_kv // 2, x.shape[3]) for odd in range(2))
    return even, odd

  def _read_words(self, array: int, word: Index, first: int = 0, stride: int = 1) -> jax.Array:
    """Reads one word of every `stride`-th token from the `first`, [block_kv / stride, D or E]."""
    layout = self.layout
    number = layout.token_words // layout.lane_parts
    if layout.in_place and not isinstance(word, int):
      # Offsets within a tile of a reference in place must be static.
      found = self._read_words(array, 0, first, stride)
      for i in range(1, number):
        found = jnp.where(word == i, self._read_words(array, i, first, stride), found)
      return found
    begin = first * layout.token_words + word * layout.lane_parts
    rows = lambda part: pl.ds(begin + part, layout.block_kv // stride,
                              stride=stride * layout.token_words)
    places = ([(part, 0) for part in range(self._parts_of(array))] if layout.lane_parts == 1 else
              [(0, part) for part in range(layout.lane_parts)])
    return jnp.concatenate([self._words_of(array, part)[rows(row), :] for part, row in places], 1)


def _pack_pairs(even: jax.Array, odd: jax.Array, place: Index, dtype: DTypeLike) -> jax.Array:
  """Packs 16-bit numbers at a place in the words of even and of odd tokens, in token order."""
  low, high, shift = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(16)
  first = lambda: (even & low) | (odd << shift)
  second = lambda: (even >> shift) | (odd & high)
  if isinstance(place, int):
    words = second() if place else first()
  else:
    words = jnp.where(place == 1, second(), first())
  return pltpu.bitcast(words, dtype)


def _unpack(words: jax.Array, place: Index, layout: KVLayout, dtype: DTypeLike) -> jax.Array:
  """Converts the numbers at a place in their words to a dtype that holds them all."""
  bits = jnp.uint32(8 * jnp.dtype(layout.dtype).itemsize * place)
  if layout.packing == 2:
    high = (words << (16 - bits)) & np.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(high, jnp.float32).astype(dtype)
  return pltpu.bitcast((words >> bits).astype(jnp.uint8), layout.dtype).astype(dtype)


def _nan_if_large(x: jax.Array, factor: float = 1.0) -> jax.Array:
  """Returns [1, 1]: 0, or NaN if a number times `factor` is not less than `2**32`."""
  x = x * np.float32(2.0**96 * factor)
  total = x.sum(0, keepdims=True).sum(1, keepdims=True)
  return total - total


def _large_indicator(words: Ref, layout: KVLayout) -> jax.Array:
  """Returns float32 [1, 1]: 0 if all numbers are finite and not large, else not 0, or NaN.

  Numbers of 8 bits are small.
  """
  dtype = jnp.dtype(layout.dtype)
  if words.dtype == jnp.float32:
    return _nan_if_large(words[...])
  if dtype == jnp.int8:
    return jnp.zeros((1, 1), jnp.float32)
  if words.dtype == jnp.uint32 and dtype.itemsize == 2:
    # Both numbers of a word at once: a sum carries to the sign where an exponent is large.
    rows = words.shape[0]
    size = SUBLANES if rows % SUBLANES == 0 else rows
    carries = functools.reduce(jnp.bitwise_or, (
        (words[first:first + size] & np.uint32(0x7FFF7FFF))
        + np.uint32(0x00010001 * (0x8000 - LARGE_BITS)) for first in range(0, rows, size)))
    large = (carries & np.uint32(0x80008000)) != 0
    return jnp.where(large, 1.0, 0.0).sum(0, keepdims=True).sum(1, keepdims=True)
  x = words[...]
  # Of float8_e4m3fn only 0x7F is not finite, with either sign.
  x = lax.bitcast_convert_type(x, jnp.int32)
  codes = (x & np.int32(0x7F7F7F7F)) + np.int32(0x01010101)
  codes = lax.shift_right_logical(codes, np.int32(7)) & np.int32(0x01010101)
  return (codes != 0).astype(jnp.float32).sum(0, keepdims=True).sum(1, keepdims=True)
