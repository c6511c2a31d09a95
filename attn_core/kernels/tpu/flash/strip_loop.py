# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A loop over the strips of a head, for a safe softmax of many of them.

The compiler schedules code without branches as a whole. With eight strips of a safe softmax it
keeps the scores of several, spills them, and leaves the matrix units idle in the meantime. Here it
sees two strips at a time: while the weights of one are computed and multiplied by its values, the
scores of the next are written to memory, one part of the queries after another. The code is half as
long.
"""

from typing import Any, Callable, Sequence, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.tpu.flash.patterns import UNMASKED
from attn_core.kernels.tpu.flash.schedule import LANES, Tiling
from attn_core.kernels.tpu.flash.tile_inputs import TileIndex, TokenRange, whole_lanes
from attn_core.kernels.tpu.flash.tile_loop import Strip

Ref = Any  # a Pallas reference
Numbers: TypeAlias = tuple[jax.Array, jax.Array]  # m_i, l_i: float32 [1, queries] each
# Writes the logits of a strip to a buffer [keys, queries]; returns their maxima [1, queries].
Write: TypeAlias = Callable[[TileIndex, Ref], jax.Array]
# Folds in a strip: (tile, its buffer, its maxima, numbers before it or None) -> numbers after it.
Use: TypeAlias = Callable[[TileIndex, Ref, jax.Array, Numbers | None], Numbers]
_Part: TypeAlias = tuple[jax.Array, Numbers]  # maxima of the next strip, numbers before it

# Fewer strips than this fill no loop: the first and the last ones are outside of it.
LEAST_STRIPS = 6
# Of the queries. The compiler keeps to the order of the code in large parts, and this interleaves
# both strips: 2 are 3 to 5% faster than 1, and up to 2% faster than 4.
PARTS = 2


def are_many(strips: list[Strip], tile_q: int) -> bool:
  """Returns whether strips of one head are so many, and so alike, that a loop can compute them.

  Args:
    strips: in the order of their keys, of a block.
    tile_q: queries of a tile; a strip in the loop has one tile.
  """
  first, size = strips[0][0], strips[0][0].keys.length
  return len(strips) >= LEAST_STRIPS and first.queries.length == tile_q and all(
      masked == UNMASKED and tile == first._replace(keys=TokenRange(n * size, size))
      for n, (tile, masked) in enumerate(strips))


def buffers(tiling: Tiling) -> list[tuple[int, int]]:
  """Returns the scratch memory of `fold` in a kernel; none if no block has so many strips."""
  if tiling.block_kv // tiling.tile_kv < LEAST_STRIPS:
    return []
  parts = _num_parts(tiling.tile_q)
  return [(tiling.tile_kv, tiling.tile_q // parts)] * (2 * parts)


def _num_parts(queries: int) -> int:
  """Returns the parts of the queries of a strip."""
  return PARTS if queries % (PARTS * LANES) == 0 else 1


def fold(strips: list[Strip], scratch: Sequence[Ref], write: Write, use: Use,
         numbers: Numbers | None) -> Numbers:
  """Folds strips into a running softmax, whose `acc` the functions keep.

  Args:
    strips: `are_many`.
    scratch: the memory of `buffers`.
    write, use: called for each strip in turn; the first is called for the next strip before the
      second one is for a strip.
    numbers: before the first strip; None: its rows have seen no key.

  Returns:
    Those after the last strip.
  """
  first, number = strips[0][0], len(strips)
  keys, queries = first.shape
  num_parts = _num_parts(queries)
  width = queries // num_parts

  def tile_of(n: Any, part: int) -> TileIndex:
    return first._replace(keys=TokenRange(whole_lanes(n * keys), keys),
                          queries=TokenRange(first.queries.start + part * width, width))

  def buffer_of(parity: int, part: int) -> Ref:
    return scratch[parity * num_parts + part]

  def one(n: Any, parity: int,
          carry: Sequence[tuple[jax.Array, Numbers | None]]) -> list[_Part]:
    found = []
    for part, (top, before) in enumerate(carry):
      next_top = write(tile_of(n + 1, part), buffer_of(1 - parity, part))
      after = use(tile_of(n, part), buffer_of(parity, part), top, before)
      found.append((next_top, after))
    return found

  def two(k: jax.Array, carry: list[_Part]) -> list[_Part]:
    return one(2 * k + 2, 0, one(2 * k + 1, 1, carry))

  turns = (number - 2) // 2
  before: list[Numbers | None] = [None] * num_parts
  if numbers is not None:
    before = list(zip(*(jnp.split(x, num_parts, 1) for x in numbers)))
  carry = one(0, 0, [(write(tile_of(0, part), buffer_of(0, part)), x)
                     for part, x in enumerate(before)])
  carry = lax.fori_loop(0, turns, two, carry)
  for n in range(1 + 2 * turns, number - 1):
    carry = one(n, n % 2, carry)
  n = number - 1
  m_i, l_i = zip(*(use(tile_of(n, part), buffer_of(n % 2, part), *x)
                   for part, x in enumerate(carry)))
  return jnp.concatenate(m_i, 1), jnp.concatenate(l_i, 1)
