# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks of any size in the GPU kernels: which pairs of a tile are listed.

A query has a bit for each listed block of keys. A warpgroup loads the words of its tile straight
into registers, a number for each row of the tile or for each column, and compares the bits of all
pairs. Where the rows of a tile are keys and a bit is for one key, words are those of the keys, with
a bit for each query: two numbers a row in place of two a column, which would fill the registers.
"""

import functools
import operator
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands, listed
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import block_map, mask as mask_lib, tile as tile_lib

REGISTER_COLUMNS = 8  # neighboring columns of a tile, of which each thread has two


class ListBits(NamedTuple):
  """Reads the bits of one mask of lists; hashable."""

  size: int  # keys of a bit, a power of two
  group: int  # query heads that share a list
  transposed: bool  # whether the rows of a tile are keys

  @property
  def by_key(self) -> bool:
    """Whether words are those of keys."""
    return self.transposed and self.size == 1

  def visible(self, ref: Ref, tile: tile_lib.Tile) -> jax.Array:
    """Returns whether each query lists each key: bool of the tile's shape.

    Args:
      ref: reference to the words, of `pack`.
      tile: begins at a whole word, or lies in one.
    """
    own, others = (tile.query, tile.num_queries), (tile.key, tile.num_keys)
    (start, length), (first, bits) = (others, own) if self.by_key else (own, others)
    axis = int(self.by_key or not self.transposed)  # of the bits
    shape, word = (length, bits) if axis else (bits, length), mosaic.int32(listed.WORD)
    first = lax.div(first, mosaic.int32(self.size))
    count = max(1, bits // (listed.WORD * self.size))  # words of a row or a column
    number = mosaic.broadcast_along(plgpu.broadcasted_iota(
        jnp.int32, (bits,), 0, layout=mosaic.VECTOR_LAYOUTS[axis]), shape, axis)
    number = number >> (self.size.bit_length() - 1)
    # Neighbors in a register of columns shift the words; other differences are known numbers.
    few = max(1, REGISTER_COLUMNS // self.size) - 1 if axis else 0
    found = []
    for n in range(count):
      words = mosaic.load(
          self._words(ref, tile, lax.div(first, word) + n).at[pl.ds(start, length)],
          mosaic.VECTOR_LAYOUTS[1 - axis])
      if count == 1:
        words = words >> lax.rem(first, word)
      words = mosaic.broadcast_along(words, shape, 1 - axis)
      bit = jnp.int32(1) << (number & (listed.WORD - 1 - few))
      if few:
        # In this form the compiler finds that two amounts are those of all columns of a thread.
        low = few.bit_length()
        words = words >> (number - (number >> low << low))
      if count > 1:
        bit = jnp.where(number >> (listed.WORD.bit_length() - 1) == n, bit, 0)
      found.append(words & bit)
    return functools.reduce(operator.or_, found) != 0

  def _words(self, ref: Ref, tile: tile_lib.Tile, word: jax.Array) -> Ref:
    """Returns a reference to a word of all queries, or of all keys."""
    batch, lists = ref.shape[:2]
    at = lax.div(tile.head, mosaic.int32(self.group)) if lists > 1 else 0
    return ref.at[tile.batch if batch > 1 else 0, at, word]


def of_mask(mask: mask_lib.Mask, sizes: block_map.Sizes,
            transposed: bool) -> tuple[ListBits, ...]:
  """Returns a reader for each list whose bits are read; see `listed.with_bits`.

  Args:
    mask: of the batch rows and heads of the call.
    sizes: of the kernel.
    transposed: whether the rows of a tile are keys.
  """
  return tuple(ListBits(listed.bit_keys(x, layout(sizes)), x.group, transposed)
               for x in listed.with_bits(mask, (sizes.queries, sizes.keys)))


def pack(mask: mask_lib.Mask, sizes: block_map.Sizes, transposed: bool) -> tuple[jax.Array, ...]:
  """Returns the words that each of `of_mask` reads, padded to whole blocks.

  int32 [B or 1, lists, words of keys, T], or [B or 1, lists, words of queries, S] if `by_key`.
  """
  nodes = listed.with_bits(mask, (sizes.queries, sizes.keys))
  found = []
  for node, bits in zip(nodes, of_mask(mask, sizes, transposed)):
    words = jnp.asarray(listed.bits(node, layout(sizes)))
    words = dense_operands.pad_axis(words, 3, sizes.query_padding)
    found.append(_by_key(words) if bits.by_key else words)
  return tuple(found)


def _by_key(words: jax.Array) -> jax.Array:
  """Returns the bits [.., T / 32, S] of words [.., S / 32, T], in one pass over all pairs."""
  *leading, of_keys, queries = words.shape
  number = np.arange(listed.WORD, dtype=np.int32)
  words = words.reshape(*leading, of_keys, 1, queries // listed.WORD, listed.WORD)
  bit = (words >> number.reshape(-1, 1, 1)) & 1  # [.., S / 32, 32, T / 32, 32]
  joined = lax.reduce_or(bit << number, (bit.ndim - 1,))
  return joined.reshape(*leading, -1, queries // listed.WORD).swapaxes(-1, -2)


def layout(sizes: block_map.Sizes) -> listed.Layout:
  """Returns the tiles of a kernel, and whole words of bits, which hold several of their blocks."""
  return listed.Layout(*sizes)
