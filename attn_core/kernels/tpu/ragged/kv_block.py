"""A block of keys and values in a TPU's vector memory, and how a head's numbers are read there.

Numbers of less than 32 bits are kept as the words that hold them, of which any row can be read at
a stride; 8-bit numbers are multiplied by their scales where they are read. No reference is reshaped
or cast, so that everything runs in interpret mode with races watched.

Letters: as in `pool`.
"""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.tpu.ragged.kv_layout import PAIRED, SUBLANES, Live, Pool


class Block(NamedTuple):
  """A block of keys and values in vector memory."""

  pool: Pool
  buffers: Any
  words: Any
  factors: Any  # scales of all keys and of all values, in scalar memory; None: not so
  slot: Any
  live: Live
  number: Any

  @property
  def tokens(self):
    """(first, end) of those that may be read, among the block's."""
    return self.live.tokens(self.pool, self.number)

  def bring(self):
    """Brings the block to words; pages that were not transferred become zeros.

    What else nobody may read stays as it is.
    """
    pool = self.pool
    first, end = self.live.pages(pool, self.number)
    def clear(place):
      for buffer in self.buffers[:len(pool.widths)]:
        buffer[self.slot, place] = jnp.zeros(buffer.shape[2:], buffer.dtype)
    pl.loop(jnp.int32(0), first)(clear)
    pl.loop(end, jnp.int32(pool.block_pages))(clear)
    for array, part in self._parts():
      self._bring(array, part)
    self._turn_scales()

  def settle(self):
    """Brings the block to words, zeros where nobody may read; whether all of it is finite."""
    pool, odd = self.pool, jnp.zeros((1, 1), jnp.float32)
    whole = (self.tokens[0] <= 0) & (self.tokens[1] >= pool.block)
    for array, part in self._parts():
      self._bring(array, part)
      self._clear(self.words[array], part, whole)
      odd += _not_finite(self.words[array][part], pool)
    if pool.apart:
      for array in range(len(pool.widths)):
        for row in range(pool.rows):
          odd += _not_finite(self._apart(array, row), pool)
    # Transfers bring numbers that are finite but for mishaps.
    return (odd + self._turn_scales())[0, 0] == 0

  def _parts(self):
    """(array, part of its width) of everything that is kept as words."""
    if not self.pool.apart:
      for array in range(len(self.pool.widths)):
        for part in range(self.words[array].shape[0]):
          yield array, part

  def _bring(self, array: int, part: int):
    pool, words = self.pool, self.words[array]
    lanes = words.shape[2]
    x = self.buffers[array][self.slot, :, :, :, pl.ds(part * lanes, lanes)]
    x = self._to_words(x.reshape(pool.block * pool.rows, lanes))
    if pool.split:
      x = x.reshape(pool.block // PAIRED, SUBLANES, 2, pool.words, lanes)
      x = jnp.stack([x[:, :, odd] for odd in range(2)], 1).reshape(words.shape[1:])
    words[part] = x

  def _turn_scales(self):
    """Lays scales beside the tokens, zeros where nobody may read; float32 [1, 1], 0: finite."""
    odd = jnp.zeros((1, 1), jnp.float32)
    if self.pool.scales == "token":
      for scales, turned in zip(self.buffers[-2:], self.words[-2:]):
        turned[...] = jnp.where(self.readable(), scales[self.slot].T, 0)
        odd += _sum(turned[...])
    return odd

  def readable(self):
    """bool [C, 1]: the tokens that may be read."""
    token = lax.broadcasted_iota(jnp.int32, (self.pool.block, 1), 0)
    return (token >= self.tokens[0]) & (token < self.tokens[1])

  def _to_words(self, x):
    if self.pool.packing > 1:
      return pltpu.bitcast(x, jnp.uint32)
    return _to_float(x.astype(jnp.int32), self.pool.dtype) if x.dtype == jnp.int8 else (
        x.astype(jnp.float32))

  def _clear(self, words, part: int, whole):
    @pl.when(jnp.logical_not(whole))
    def _():
      token = lax.div(lax.broadcasted_iota(jnp.int32, words.shape[1:], 0),
                      jnp.int32(self.pool.words))
      if self.pool.split:
        within = lax.rem(token, jnp.int32(PAIRED))
        token += lax.rem(within, jnp.int32(SUBLANES)) * 2 + lax.div(
            within, jnp.int32(SUBLANES)) - within
      first, end = self.tokens
      words[part] = jnp.where((token >= first) & (token < end), words[part],
                              jnp.zeros((), words.dtype))

  def _apart(self, array: int, row):
    """Numbers [C, D or E] of a row of the tokens, as stored."""
    x = self.buffers[array][self.slot, :, row]
    x = x.reshape(self.pool.block, x.shape[-1])
    return jnp.where(self.readable(), x.astype(jnp.float32), 0) if x.dtype != jnp.int8 else (
        jnp.where(self.readable(), x.astype(jnp.int32), 0))

  def read_both(self, head, dtype):
    """Keys [C, D] and values [C, E] of a head, dequantised."""
    pool = self.pool
    if not (pool.together and pool.paired):
      return self.read(False, head, dtype), self.read(True, head, dtype)
    pairs = self._pairs(0, head)  # of both
    return tuple(_paired(*pairs, value, pool.dtype).astype(dtype) for value in range(2))

  def read(self, value: bool, head, dtype):
    """Keys [C, D] or values [C, E] of a head, dequantised."""
    pool = self.pool
    array, row = (0, 2 * head + int(value)) if pool.together else (int(value), head)
    if pool.apart:
      x = self._apart(array, row)
      x = _to_float(x, pool.dtype) if x.dtype == jnp.int32 else x
    else:
      packing = pool.packing
      row, packed = jnp.int32(row), jnp.int32(packing)
      word, place = lax.div(row, packed), lax.rem(row, packed)
      if pool.together and packing == 2:
        word, place = head, int(value)
      if pool.paired:
        return _paired(*self._pairs(array, word), place, pool.dtype).astype(dtype)
      x = self._words(array, word)
      x = _unpacked(x, place, pool) if packing > 1 else x
    if pool.scales == "tensor":
      x = x * self.factors[int(value)]
    elif pool.scales == "token":
      scales = self.words[int(value) - 2][...]
      this = lax.broadcasted_iota(jnp.int32, scales.shape, 1) == head
      x = x * jnp.where(this, scales, 0).sum(1, keepdims=True)
    return x.astype(dtype)

  def _pairs(self, array: int, word):
    """([C / 2, D or E] of even tokens, the same of odd ones): one word of each."""
    pool = self.pool
    if not pool.split:
      return tuple(self._words(array, word + odd * pool.words, 2) for odd in range(2))
    x = self._words(array, word)
    x = x.reshape(pool.block // PAIRED, 2, SUBLANES, x.shape[1])
    return tuple(x[:, odd].reshape(pool.block // 2, x.shape[3]) for odd in range(2))

  def _words(self, array: int, word, step: int = 1):
    """[C / step, D or E] of one word of every token, or every so many."""
    pool, words = self.pool, self.words[array]
    at = pl.ds(word, pool.block // step, stride=step * pool.words)
    return jnp.concatenate([words[part, at, :] for part in range(words.shape[0])], 1)


def _paired(even, odd, place, dtype):
  """16-bit numbers at a place in the words of even and of odd tokens, in the tokens' order."""
  low, high, far = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(16)
  first = lambda: (even & low) | (odd << far)
  second = lambda: (even >> far) | (odd & high)
  if isinstance(place, int):
    words = second() if place else first()
  else:
    words = jnp.where(place == 1, second(), first())
  return pltpu.bitcast(words, dtype)


def _unpacked(words, place, pool: Pool):
  """float32 of the numbers at a place in their words."""
  bits = 8 * jnp.dtype(pool.dtype).itemsize
  high = words << jnp.uint32(32 - bits - bits * place)
  if pool.packing == 2:
    return lax.bitcast_convert_type(high & np.uint32(0xFFFF0000), jnp.float32)
  return _to_float(lax.bitcast_convert_type(high, jnp.int32) >> np.int32(24), pool.dtype)


def _to_float(codes, dtype):
  """float32 of 8-bit numbers, given as int32 with their sign."""
  if jnp.dtype(dtype) == jnp.int8:
    return codes.astype(jnp.float32)
  # float8_e4m3fn, which not every chip converts: exponents are biased by 7 here and by 127 there;
  # below the normal numbers, 2**-9 is one step.
  magnitude = codes & np.int32(0x7F)
  normal = lax.bitcast_convert_type(
      (magnitude << np.int32(20)) + np.int32((127 - 7) << 23), jnp.float32)
  small = magnitude.astype(jnp.float32) * np.float32(2**-9)
  found = jnp.where(magnitude < 8, small, jnp.where(magnitude == 0x7F, jnp.nan, normal))
  return jnp.where(codes < 0, -found, found)


def _sum(x):
  """[1, 1]: 0, or NaN where the sum of all is not finite."""
  total = x.sum(0, keepdims=True).sum(1, keepdims=True)
  return total - total


def _not_finite(x, pool: Pool):
  """float32 [1, 1]: 0 where all of `x`, words or stored numbers, is finite."""
  dtype = jnp.dtype(pool.dtype)
  if x.dtype == jnp.float32:
    return _sum(x)
  if dtype == jnp.int8:
    return jnp.zeros((1, 1), jnp.float32)
  if x.dtype == jnp.uint32 and dtype.itemsize == 2:
    return _sum(_unpacked(x, 0, pool) + _unpacked(x, 1, pool))
  # Of float8_e4m3fn only 0x7F is not finite, with either sign.
  if x.dtype == jnp.uint32:
    x = lax.bitcast_convert_type(x, jnp.int32)
    codes = (x & np.int32(0x7F7F7F7F)) + np.int32(0x01010101)
    codes = lax.shift_right_logical(codes, np.int32(7)) & np.int32(0x01010101)
  else:
    codes = ((x & np.int32(0x7F)) == 0x7F).astype(jnp.int32)
  return (codes != 0).astype(jnp.float32).sum(0, keepdims=True).sum(1, keepdims=True)
