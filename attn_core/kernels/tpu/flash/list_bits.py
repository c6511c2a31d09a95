# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks of any size in the TPU kernels: which pairs of a tile are listed.

A tile is [keys, queries], and a query has a bit for each listed block of keys: one row of numbers
for as many keys as share a bit, or a word.
"""

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import listed
from attn_core.kernels.tpu.flash.schedule import LANES
from attn_core.kernels.tpu.flash.tile_inputs import (
    Index, KernelRefs, Reader, TileIndex, TileInputs, pad)
from attn_core.masks import leaves, mask as mask_lib


def readers(inputs: TileInputs, mask: mask_lib.Mask) -> tuple[Reader, ...]:
  """Adds the bits of lists to the inputs of a kernel.

  Args:
    inputs: of the kernel.
    mask: of its batch rows and heads. Lists of which a block of the kernel has one need no bits.

  Returns:
    Readers of bool [keys, queries], of which all must hold.
  """
  return tuple(_reader(inputs, node)
               for node in listed.with_bits(mask, inputs.tiling.layout.lengths))


def _reader(inputs: TileInputs, node: leaves.Selected) -> Reader:
  """Adds the bits of lists; see `readers`."""
  tiling = inputs.tiling
  words = pad(jnp.asarray(listed.bits(node, tiling.layout)), 3, tiling.padded_queries)
  batch, lists = words.shape[:2]
  steps = node.group // tiling.query_heads  # that share a list, of those of a batch row
  of_block = listed.words_of_block(node, tiling.layout)
  list_of = lambda h: 0 if lists == 1 else h if steps == 1 else lax.div(h, jnp.int32(steps))
  ref = inputs.add_array(
      words[:, :, :, None], (1, 1, of_block, 1, tiling.block_q),
      lambda b, h, i, j: (b if batch > 1 else 0, list_of(h), j, 0, i))
  size = listed.bit_keys(node, tiling.layout)

  def row(refs: KernelRefs, tile: TileIndex, bit: Index) -> jax.Array:
    """Returns the words [1, queries] in which a bit is."""
    word = _split(bit, listed.WORD)[0] if of_block > 1 else 0
    return ref(refs)[0, 0, word, :, tile.queries.slice]

  def read(refs: KernelRefs, tile: TileIndex) -> jax.Array:
    (keys, queries), first = tile.shape, _split(tile.keys.start, size)[0]
    highest = listed.WORD - 1  # the sign, to which the bit of a key is moved
    if size >= listed.SUBLANES:
      bits = [first + n for n in range(keys // size)]
      parts = [jnp.broadcast_to(lax.shift_left(row(refs, tile, bit), jnp.full(
          (1, queries), highest - _split(bit, listed.WORD)[1], jnp.int32)), (size, queries))
               for bit in bits]
    else:  # a word has the keys of whole registers
      of_word = listed.WORD * size
      number = lax.broadcasted_iota(jnp.int32, (of_word, LANES), 0) >> (size.bit_length() - 1)
      amount = jnp.concatenate([highest - number] * (queries // LANES), 1)
      parts = [lax.shift_left(jnp.broadcast_to(
          row(refs, tile, first + n * listed.WORD), (of_word, queries)), amount)
               for n in range(keys // of_word)]
    return jnp.concatenate(parts, 0) < 0

  return read


def _split(x: Index, size: int) -> tuple[Index, Index]:
  """Returns (x // size, x % size) of a number that is not negative."""
  if isinstance(x, int):
    return divmod(x, size)
  return lax.div(x, jnp.int32(size)), lax.rem(x, jnp.int32(size))
