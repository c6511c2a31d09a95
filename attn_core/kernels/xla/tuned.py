"""Block sizes of the XLA kernel: what XLA:CPU likes, by measurement.

A forward step should hold about a million scores: 512 query rows (tokens times query heads per key
head) and 256 keys, 512 where nothing is masked, for as many heads as that takes. A backward step
wants 512 by 512. In both, the arrays of a group of heads should stay within the caches.
"""

from attn_core.masks.blocks import Sizes
from attn_core.types import BlockSizes, cdiv

STEP_BYTES = 24e6  # arrays that one group of heads may hold
FEW_SCORES = 2**19  # below so many scores a forward step takes more rows


def choose(shape, itemsize: int, requested: BlockSizes, *, sparse: bool, backward: bool):
  """(Sizes, key heads per step).

  Args:
    shape: (T, S, H, K, D, E).
    itemsize: bytes of an element of the operands.
    requested: what the caller fixed; None fields are chosen here.
    sparse: whether the mask hides anything.
    backward: for the backward loops.
  """
  queries, keys, query_heads, key_heads, width, value_width = shape
  group = query_heads // key_heads
  if backward:
    wanted_q, wanted_kv = requested.block_q_backward, requested.block_kv_backward
    default_kv, most_heads = 512, 4
  else:
    wanted_q, wanted_kv = requested.block_q, requested.block_kv
    default_kv = 256 if sparse else 512
    most_heads = 8 if sparse and max(width, value_width) <= 64 else 4
  most_heads = min(requested.block_heads or most_heads, key_heads)
  rows = 512 if queries * group >= 1024 else 256
  if not backward and queries * group >= 4096 and most_heads * rows * default_kv < FEW_SCORES:
    rows = 1024
  block_q = min(queries, wanted_q or _even(queries, max(rows // group, 16)))
  block_kv = min(keys, wanted_kv or _even(keys, default_kv))

  def step_bytes(heads):
    held = heads * keys * (width + value_width) * itemsize
    if backward:
      held += heads * queries * group * (width * (itemsize + 4) + 2 * value_width * itemsize)
    return held + 2 * heads * block_q * group * block_kv * 4

  heads = most_heads
  while key_heads % heads or (heads > 1 and not requested.block_heads
                              and step_bytes(heads) > STEP_BYTES):
    heads -= 1
  return Sizes(queries, keys, block_q, block_kv), heads


def _even(length: int, block: int) -> int:
  """A block of about `block` that cuts `length` with the least padding."""
  return cdiv(length, cdiv(length, block))
