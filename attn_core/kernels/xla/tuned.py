"""Block sizes of the XLA kernel: what XLA:CPU likes, by measurement.

A step should hold about 512 query rows (tokens times query heads per key head)
and 256 to 512 keys, for as many heads as keep its arrays within the caches.
"""

from attn_core.masks.blocks import Sizes
from attn_core.types import BlockSizes, cdiv

ROWS = 512  # query rows of one step
STEP_BYTES = 24e6  # arrays that one group of heads may hold


def choose(shape, itemsize: int, requested: BlockSizes, *, sparse: bool, backward: bool):
  """(Sizes, key heads per step).

  Args:
    shape: (T, S, H, K, D, E).
    itemsize: bytes of an element of the operands.
    requested: what the caller fixed; None fields are chosen here.
    sparse: whether some blocks are skipped or masked.
    backward: for the backward loops.
  """
  queries, keys, query_heads, key_heads, width, value_width = shape
  group = query_heads // key_heads
  rows = ROWS if queries * group >= 2 * ROWS else ROWS // 2
  if backward:
    block_q, block_kv = requested.block_q_backward, requested.block_kv_backward
    default_kv, most_heads = (512, 4) if itemsize >= 4 else (256, 8)
  else:
    block_q, block_kv = requested.block_q, requested.block_kv
    default_kv, most_heads = (256 if sparse else 512), 8
  block_q = min(queries, block_q or _even(queries, max(rows // group, 16)))
  block_kv = min(keys, block_kv or _even(keys, default_kv))
  heads = requested.block_heads or most_heads

  def step_bytes(heads):
    held = heads * keys * (width + value_width) * itemsize
    if backward:
      held += heads * queries * group * (width * (itemsize + 4) + 2 * value_width * itemsize)
    return held + 2 * heads * block_q * group * block_kv * 4

  heads = min(heads, key_heads)
  while key_heads % heads or (heads > 1 and not requested.block_heads
                              and step_bytes(heads) > STEP_BYTES):
    heads -= 1
  return Sizes(queries, keys, block_q, block_kv), heads


def _even(length: int, block: int) -> int:
  """A block of about `block` that cuts `length` with the least padding."""
  return cdiv(length, cdiv(length, block))
