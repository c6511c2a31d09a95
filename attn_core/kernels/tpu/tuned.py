"""Blocks and tiles of the TPU kernels, and the vector memory that they need.

A block is what one step of the grid fetches; its tiles are hidden, visible or in between, and
neighbouring tiles of one kind are computed at once. Chosen by libtpu's static cycles for v6e,
bfloat16, D = 128, S = 4,096 (attn_core_test/results/tpu_static.md): large blocks, since every step
pays for filling and draining the pipeline between the units; small tiles in the backward where a
diagonal cuts them. What is not in the table takes the same blocks, as far as its length goes, and
query blocks divided by the query heads of a key head.
"""

from attn_core.kernels.tpu.schedule import LANES, Cut, round_up
from attn_core.types import BlockSizes, Operands

MOST_TILES = 16  # of a block: their kinds share one 32-bit number
# (backward, whether the mask hides anything): query tokens times query heads of a key head, key
# tokens, and tokens of a tile along both sides.
BLOCKS = {(False, False): (2048, 2048, 512), (False, True): (2048, 2048, 512),
          (True, False): (1024, 2048, 512), (True, True): (1024, 1024, 256)}
PER_PAIR_BLOCK = (512, 512, 512)  # where a bias or a dense mask brings a number per pair
AHEAD = 3  # strips of tiles whose first products are issued before they are used
MEBIBYTE = 2**20
MOST_VMEM = 60 * MEBIBYTE  # what every chip since v5 has, less a margin
LEAST_VMEM = 16 * MEBIBYTE  # the compiler's own limit on the smallest
RESIDENT = 24 * MEBIBYTE  # for the cotangent of the queries, which stays through a backward


def choose(shape, requested: BlockSizes, *, sparse: bool, per_pair: bool, backward: bool) -> Cut:
  """How to cut an attention.

  Args:
    shape: (T, S, H, K).
    requested: what the caller fixed; None fields are chosen here.
    sparse: whether the mask hides anything.
    per_pair: whether a bias or a dense mask brings a number per pair into the kernel.
    backward: for the backward.

  Raises:
    ValueError: a requested block is neither a multiple of 128 tokens nor the whole length.
  """
  queries, keys, query_heads, key_heads = shape
  group = query_heads // key_heads
  suffix = "_backward" if backward else ""
  wanted_q, wanted_kv = (
      _wanted(requested, f"{name}{suffix}", length)
      for name, length in (("block_q", queries), ("block_kv", keys)))
  rows, columns, tile = PER_PAIR_BLOCK if per_pair else BLOCKS[backward, sparse]
  block_q = round_up(min(wanted_q or max(LANES, rows // group // LANES * LANES), queries), LANES)
  block_kv = round_up(min(wanted_kv or columns, keys), LANES)
  tile_q, tile_kv = _tile(block_q, tile), _tile(block_kv, tile)
  while (block_q // tile_q) * (block_kv // tile_kv) > MOST_TILES:
    tile_q, tile_kv = _tile(block_q, 2 * tile_q), _tile(block_kv, 2 * tile_kv)
  return Cut(queries, keys, block_q, block_kv, tile_q, tile_kv)


def _wanted(requested: BlockSizes, field: str, length: int) -> int | None:
  size = getattr(requested, field)
  if size is not None and size % LANES and size < length:
    raise ValueError(f"block_sizes.{field}: got {size}; on a TPU expected a multiple of {LANES} "
                     f"tokens, or at least the whole length of {length}")
  return size


def resident_queries(width: int, group: int) -> int:
  """Tokens whose cotangent a backward holds for all query heads of a key head."""
  return RESIDENT // (2 * 4 * group * max(width, LANES))


def vmem_limit(requested: BlockSizes, cut: Cut, operands: Operands, resident: int = 0) -> int:
  """The bytes of vector memory that a kernel may use.

  Args:
    resident: blocks of queries whose cotangent stays; 0: the forward.

  Raises:
    ValueError: the blocks need more than a chip has.
  """
  if requested.vmem_limit_bytes is not None:
    return requested.vmem_limit_bytes
  group = operands.query.shape[2] // operands.key.shape[2]
  width, value_width = (round_up(x.shape[3], LANES) for x in (operands.query, operands.value))
  itemsize = operands.query.dtype.itemsize
  rows = group * cut.block_q
  blocks = (rows + cut.block_kv) * (width + value_width) * itemsize
  pairs = sum((group if x.shape[1] > 1 else 1) * size * cut.block_q * cut.block_kv
              for x, size in _per_pair(operands))
  sums = rows * value_width
  if resident:
    blocks += cut.block_kv * (2 * width + value_width) * itemsize
    sums = cut.block_kv * (width + value_width) + 2 * resident * rows * width
  strips = (2 if resident else 1) * (AHEAD + 1) * cut.block_q * cut.tile_kv
  needed = 2 * (blocks + pairs) + 4 * (sums + strips)
  if needed > MOST_VMEM:
    raise ValueError(
        f"block_sizes: blocks of {cut.block_q} queries times {group} heads and {cut.block_kv} keys "
        f"need about {needed / MEBIBYTE:.0f} MiB of vector memory; expected at most "
        f"{MOST_VMEM // MEBIBYTE}: give smaller block_q and block_kv")
  return min(MOST_VMEM, max(LEAST_VMEM, 2 * needed))


def _per_pair(operands: Operands):
  """(array, bytes of an element in the kernel) of what may have a number for every pair."""
  if operands.bias is not None:
    yield operands.bias, operands.bias.dtype.itemsize
  for x in operands.mask.arrays:
    if x.ndim == 4:
      yield x, 1


def _tile(block: int, most: int) -> int:
  """The largest multiple of LANES up to `most` that divides `block`."""
  return max(n for n in range(LANES, min(block, most) + 1, LANES) if block % n == 0)
