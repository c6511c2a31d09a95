"""Block sizes of the XLA kernel: what XLA:CPU likes, by measurement.

A forward step should hold about a million scores, a backward step half of that, in large products:
512 query rows (tokens times query heads per key head) by 512 keys of as many key heads. Where a
mask hides most of a block, in short sequences and in narrow masks, blocks of 256 waste less; where
a few heads are all there are, a forward step takes more rows. Whether the keys of a step fit into a
cache does not matter.
"""

import jax

from attn_core.masks import leaves as algebra, position_range as reach
from attn_core.masks.block_map import Sizes
from attn_core.types import BlockSizes, cdiv

STEP_SCORES = 2**20
STEP_SCORES_BACKWARD = 2**19
MOST_HEADS = 8
SHORT = 2048  # tokens
DECODE_ELEMENTS = 2**18  # of a block of keys in decoding
# Of a large block, all of which is visible; XLA:CPU of jax 0.10.2 is slow to add up many keys.
DECODE_ELEMENTS_LARGE = 2**22 if jax.__version_info__ >= (0, 11) else 2**19


def choose(shape, requested: BlockSizes, mask: algebra.Mask, *, backward: bool):
  """(Sizes, key heads per step).

  Args:
    shape: (T, S, H, K).
    requested: what the caller fixed; None fields are chosen here.
    mask: what is visible; only its structure counts.
    backward: for the backward loops.
  """
  queries, keys, query_heads, key_heads = shape
  group = query_heads // key_heads
  wanted_q, wanted_kv = ((requested.block_q_backward, requested.block_kv_backward) if backward
                         else (requested.block_q, requested.block_kv))
  sparse = not isinstance(mask, algebra.Full)
  usual = 256 if sparse and (queries <= SHORT or reach.is_narrow(mask)) else 512
  block_q = min(queries, wanted_q or _even(queries, max(usual // group, 16)))
  block_kv = min(keys, wanted_kv or _even(keys, usual))
  most = STEP_SCORES_BACKWARD if backward else STEP_SCORES
  fits = lambda heads: heads == 1 or heads * block_q * group * block_kv <= most
  heads = min(requested.block_heads or MOST_HEADS, key_heads)
  while key_heads % heads or not (requested.block_heads or fits(heads)):
    heads -= 1
  if not backward and not wanted_q and usual == 512 and heads == key_heads:
    rows = STEP_SCORES // (heads * block_kv)
    block_q = min(queries, max(block_q, _even(queries, min(rows // group, 1024))))
  return Sizes(queries, keys, block_q, block_kv), heads


def decode_block(keys: int, elements: int) -> int:
  """Keys of a block in decoding, a power of two, for so many `elements` of all heads in a key."""
  return _power_of_two(min(keys, max(64, DECODE_ELEMENTS // elements)))


def decode_large_block(keys: int, elements: int) -> int:
  """Keys of a large block in decoding: a loop over at least two of them.

  A single one XLA:CPU would take for no loop, and compute in one thread.
  """
  return _power_of_two(max(1, min(keys // 2, DECODE_ELEMENTS_LARGE // elements)))


def _power_of_two(most: int) -> int:
  return 1 << max(0, most.bit_length() - 1)


def _even(length: int, block: int) -> int:
  """A block of about `block` that cuts `length` with little padding, in multiples of 16."""
  return length if length <= block else cdiv(cdiv(length, cdiv(length, block)), 16) * 16
