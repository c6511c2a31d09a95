"""Block sizes of the XLA kernel: what XLA:CPU likes, by measurement.

A step should hold about 512 query rows (tokens times query heads per key head)
and 512 keys, for as many heads as keep its arrays within the caches; narrow
heads want fewer rows in the backward, which adds to a whole row of d_query.
"""

from attn_core.masks.blocks import Sizes
from attn_core.types import BlockSizes, cdiv

BLOCK_KV = 512  # keys of one step
STEP_BYTES = 24e6  # arrays that one group of heads may hold
MOST_HEADS = {"forward": 4, "backward": 2}


def choose(shape, itemsize: int, requested: BlockSizes, *, backward: bool):
  """(Sizes, key heads per step).

  Args:
    shape: (T, S, H, K, D, E).
    itemsize: bytes of an element of the operands.
    requested: what the caller fixed; None fields are chosen here.
    backward: for the backward loops.
  """
  queries, keys, query_heads, key_heads, width, value_width = shape
  group = query_heads // key_heads
  rows = 256 if queries * group < 1024 or (backward and max(width, value_width) <= 64) else 512
  if backward:
    block_q, block_kv = requested.block_q_backward, requested.block_kv_backward
  else:
    block_q, block_kv = requested.block_q, requested.block_kv
  block_q = min(queries, block_q or _even(queries, max(rows // group, 16)))
  block_kv = min(keys, block_kv or _even(keys, BLOCK_KV))

  def step_bytes(heads):
    held = heads * keys * (width + value_width) * itemsize
    if backward:
      held += heads * queries * group * (width * (itemsize + 4) + 2 * value_width * itemsize)
    return held + 2 * heads * block_q * group * block_kv * 4

  heads = min(requested.block_heads or MOST_HEADS["backward" if backward else "forward"], key_heads)
  while key_heads % heads or (heads > 1 and not requested.block_heads
                              and step_bytes(heads) > STEP_BYTES):
    heads -= 1
  return Sizes(queries, keys, block_q, block_kv), heads


def _even(length: int, block: int) -> int:
  """A block of about `block` that cuts `length` with the least padding."""
  return cdiv(length, cdiv(length, block))
