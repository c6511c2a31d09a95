# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention weights as a pure function of (key, batch, head, query, key position).

The random bits are hashed from these numbers instead of drawn from a sequential stream, so all
mechanisms, block sizes, platforms and shardings keep the same weights, and a backward pass computes
the mask again instead of storing it.
"""

from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import leaves, looked_up, mask as mask_lib
from attn_core.masks.mask import Coordinates


def key_words(rng: jax.Array) -> jax.Array:
  """Hashes a PRNG key to two words.

  Args:
    rng: a key of `jax.random.key`, or the raw uint32 words of `jax.random.PRNGKey`.

  Returns:
    uint32 [1, 2].
  """
  words = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
  # Nonzero constants: the words of a key of zeros must not be zeros.
  first, second = jnp.uint32(0x243F6A88), jnp.uint32(0x85A308D3)
  for i in range(words.shape[0]):
    first, second = _mix(first ^ words[i]), _mix(second + words[i] * np.uint32(0x9E3779B9))
  return jnp.stack([first, second])[None]


def keep_mask(words: jax.Array | Sequence[jax.Array], at: Coordinates,
              dropout_prob: float) -> jax.Array:
  """Computes which weights are kept, each with probability 1 - dropout_prob.

  Args:
    words: uint32 [2] or a pair of arrays that broadcast to the tile.
    at: global batch, head and positions, broadcastable to the tile.
    dropout_prob: in [0, 1); a multiple of 2**-16, to which others are rounded.

  Returns:
    bool, of the tile's shape.
  """
  key = jnp.asarray(at.key_position).astype(jnp.uint32)
  factor, addend = row_numbers(words, at)
  # The highest bits of both halves are turned by it: unsigned numbers compare as signed ones do.
  bits = pair_bits((factor, addend + np.uint32(2**31)), pair_numbers(key >> 1))
  # The lower half is that of even keys.
  bits = bits * (np.uint32(2**16) - (key & 1) * np.uint32(2**16 - 1))
  return bits >= np.uint32((least_kept(dropout_prob) + 2**15) * 2**16)


def least_kept(dropout_prob: float) -> int:
  """Returns the least int16, of the two in `pair_bits`, of a kept weight."""
  return min(round(dropout_prob * 2**16), 2**16 - 1) - 2**15


def row_numbers(words: jax.Array | Sequence[jax.Array],
                at: Coordinates) -> tuple[jax.Array, jax.Array]:
  """Returns two uint32 numbers of a batch row, a head and a query; see `keep_mask`."""
  batch, head, query = (jnp.asarray(x).astype(jnp.uint32) for x in (
      at.batch, at.head, at.query_position))
  stream = _mix(_mix(words[0] + batch) + head)
  # Query and head are hashed by different functions; otherwise exchanging them would give the same
  # bits.
  row = _mix(stream ^ _mix(query * np.uint32(0x9E3779B9) + words[1]))
  return row | 1, _mix(row + np.uint32(0x9E3779B9))


def pair_numbers(pair: jax.Array) -> jax.Array:
  """Returns the uint32 number of two neighboring keys, given half of the position of the first."""
  return _mix(pair * np.uint32(0x9E3779B9))


def pair_bits(row: tuple[jax.Array, jax.Array], pair: jax.Array) -> jax.Array:
  """Returns uint32 random bits, 16 for each of two neighboring keys, the lower ones for the first.

  Four operations for two weights. A linear function with random coefficients is pairwise
  independent in its upper half (Dietzfelbinger, 1996, Universal hashing and k-wise independent
  random variables via integer arithmetic without primes,
  https://doi.org/10.1007/3-540-60922-9_46); here both coefficients come from one number of the row,
  and tests check what is left of that. The lower half, whose period is short, is joined with the
  upper one.

  Args:
    row: of `row_numbers`, broadcastable to the tile.
    pair: of `pair_numbers`, likewise.
  """
  factor, addend = row
  bits = pair * factor + addend
  return bits ^ (bits >> 16)


def kept_scale(dropout_prob: float) -> float:
  """The factor 1 / (1 - dropout_prob) of kept weights, which preserves their expected sum.

  Since `keep_mask` rounds the probability, the sum may be off by 2**-17 / (1 - dropout_prob) of it:
  less than 1e-4 up to a probability of 0.9.
  """
  return 1 / (1 - dropout_prob)


def _mix(x: Any) -> Any:
  """The 32-bit finalizer of MurmurHash3: every input bit changes half of the output bits."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)

_READ_POSITIONS = (leaves.Causal, leaves.Window, leaves.Chunk, leaves.Prefix, leaves.Custom,
                   looked_up.LookedUp, leaves.Placed, leaves.Positions, leaves.Offset)


def move_to_positions(mask: mask_lib.Mask, at: Coordinates) -> Coordinates:
  """The coordinates at which dropout is evaluated: those of the mask's positions or offset.

  Positions around one part of a mask count for the whole mask where no other part reads positions:
  positions(q, k, a) & segments(ids) equals positions(q, k, a & segments(ids)). Otherwise they
  apply to their own part only, and dropout ignores them.
  """
  while True:
    if isinstance(mask, (leaves.Placed, leaves.Positions, leaves.Offset)):
      at, mask = mask.move(at), mask.mask
    elif isinstance(mask, mask_lib.Not):
      mask = mask.mask
    elif isinstance(mask, (mask_lib.And, mask_lib.Or)):
      parts = [part for part in (mask.left, mask.right)
               if any(isinstance(node, _READ_POSITIONS) for node in mask_lib.nodes(part))]
      if len(parts) != 1:
        return at
      mask, = parts
    else:
      return at
