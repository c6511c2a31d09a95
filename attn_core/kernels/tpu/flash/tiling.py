"""Blocks and tiles of the TPU kernels, and the vector memory that they need.

A block is what one step of the grid fetches; its tiles are hidden, visible or in between, and
neighbouring tiles of one kind are computed at once. Chosen by libtpu's static cycles in bfloat16
(attn_core_test/results/tpu_static.md, tpu_notes.md): large blocks, since every step pays for
filling and draining the pipeline between the units; small tiles where the edge of a mask cuts many
of them. Counted on v6e with D = 64, 128 and 256 at 4,096 tokens and D = 128 at 1,024 to 8,192, on
v5e, v5p and tpu7x with D = 128: what is best on one is best or nearly so on the others, so that
only the kind of mask and the direction count, and the width where a step can hold all keys. What is
not in the table takes the same blocks: as far as its length goes, with query blocks divided by the
query heads of a key head, and halved until a kernel fits.
"""

from attn_core.kernels.tpu.flash.schedule import LANES, Cut, round_up
from attn_core.masks import leaves as algebra, position_range as reach
from attn_core.types import BlockSizes, Operands, cdiv

MOST_TILES = 16  # of a block: their kinds share one 32-bit number
# (kind of mask, backward): query tokens times query heads of a key head, key tokens, and tokens of
# a tile along both sides, or twice that where there were too many; a full mask cuts no queries.
WHOLE, FULL, MASKED, LONG = "whole", "full", "masked", "long"
BLOCKS = {(WHOLE, False): (2048, 4096, 256), (WHOLE, True): (1024, 2048, 512),
          (FULL, False): (2048, 2048, 512), (FULL, True): (1024, 2048, 512),
          (MASKED, False): (1024, 1024, 256), (MASKED, True): (1024, 1024, 256),
          (LONG, False): (2048, 2048, 256), (LONG, True): (1024, 1024, 256)}
# A full mask is WHOLE with key tokens, and widths, above the first number and up to the second: a
# step takes all keys, in twice the code, and is 2 to 3% faster. Other widths are slower so.
WHOLE_KEYS, WHOLE_WIDTHS = (2048, 4096), (64, 128)
LONG_KEYS = 8192  # from here on, a mask that shows most of a row is LONG
PER_PAIR_BLOCK = (512, 512, 512)  # where a bias or a dense mask brings a number per pair
# By backward, for float32 and for what runs seldom, where a third of the code compiles in half the
# time. Products of float32 take six passes, beside which filling the pipeline is little: the
# forward is 2% slower to 4% faster than with the blocks above, the backward 7 to 9% slower.
SMALL_BLOCKS = {False: (1024, 1024, 256), True: (512, 512, 256)}
# A step takes as many key heads as have that many tokens, since every step fills and drains the
# units, and one head's work hides another's waits; with SMALL_BLOCKS one.
STEP_TOKENS = 2048
# Dtypes that try a softmax without the maximum first (`forward`). Products of float32 take so
# long that the maximum costs nothing beside them.
NAIVE = ("bfloat16",)
# By backward: strips of tiles whose first products are issued before they are used.
AHEAD = {False: 3, True: 1}
MEBIBYTE = 2**20
MOST_VMEM = 34 * MEBIBYTE  # as estimated here; of 64 on the smallest chip, where XLA has some, too
LEAST_VMEM = 16 * MEBIBYTE  # the compiler's own limit on the smallest
SLACK = 1.6  # float32 takes up to 1.5 times the estimate
RESIDENT = 16 * MEBIBYTE  # for the cotangent of the queries, which stays through a backward


def choose(operands: Operands, requested: BlockSizes, mask: algebra.Mask, *,
           backward: bool, seldom: bool = False) -> Cut:
  """How to cut an attention.

  Args:
    operands: only shapes and dtypes count.
    requested: what the caller fixed; None fields are chosen here, so that all fits.
    mask: what is visible; only its structure counts.
    backward: for the backward.
    seldom: for what seldom runs, so that its code had better be small.

  Raises:
    ValueError: a requested block is neither a multiple of 128 tokens nor the whole length.
  """
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  suffix = "_backward" if backward else ""
  wanted_q, wanted_kv = (
      _wanted(requested, f"{name}{suffix}", length)
      for name, length in (("block_q", queries), ("block_kv", keys)))
  small = seldom or operands.query.dtype.itemsize == 4
  rows, columns, tile = _blocks(operands, mask, backward, small)
  rows = max(LANES, rows // _group(operands) // LANES * LANES)
  while True:
    if isinstance(mask, algebra.Full):
      rows = cdiv(queries, cdiv(queries, rows))  # equal blocks, as no tile of one can be skipped
    cut = _cut(operands, mask, wanted_q or rows, wanted_kv or columns, tile)
    for several in [cut] if small else _with_heads(cut, operands, backward):
      if needed_vmem(several, operands, backward) <= MOST_VMEM:
        return several
    if not wanted_kv and columns > LANES and (wanted_q or columns >= rows):
      columns //= 2
    elif not wanted_q and rows > LANES:
      rows //= 2
    else:
      return cut  # too large, as `vmem_limit` says


def _blocks(operands: Operands, mask: algebra.Mask, backward: bool,
            small: bool) -> tuple[int, int, int]:
  if list(_per_pair(operands)):
    return PER_PAIR_BLOCK
  if small:
    return SMALL_BLOCKS[backward]
  return BLOCKS[_kind(operands, mask), backward]


def _cut(operands: Operands, mask: algebra.Mask, rows: int, columns: int, tile: int) -> Cut:
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  block_q, block_kv = round_up(min(rows, queries), LANES), round_up(min(columns, keys), LANES)
  tile_q, tile_kv = _tile(block_q, tile), _tile(block_kv, tile)
  if isinstance(mask, algebra.Full):
    tile_q = block_q
  while (block_q // tile_q) * (block_kv // tile_kv) > MOST_TILES:
    tile_q, tile_kv = _tile(block_q, 2 * tile_q), _tile(block_kv, 2 * tile_kv)
  return Cut(queries, keys, block_q, block_kv, tile_q, tile_kv, _group(operands))


def _with_heads(cut: Cut, operands: Operands, backward: bool):
  """The cut with several heads a step, fewer and fewer, and with one."""
  most = STEP_TOKENS // max(cut.group * cut.block_q, cut.block_kv)
  for heads in range(most, 1, -1):
    several = cut._replace(heads=heads)
    # More ranges of queries would cost more than heads save.
    if operands.key.shape[2] % heads == 0 and not (
        backward and len(query_ranges(operands, several)) > 1):
      yield several
  yield cut


def _group(operands: Operands) -> int:
  return operands.query.shape[2] // operands.key.shape[2]


def _kind(operands: Operands, mask: algebra.Mask) -> str:
  *_, keys, _, width = operands.key.shape
  if isinstance(mask, algebra.Full):
    whole = all(low < n <= most for n, (low, most) in ((keys, WHOLE_KEYS), (width, WHOLE_WIDTHS)))
    return WHOLE if whole else FULL
  return LONG if keys >= LONG_KEYS and not reach.is_narrow(mask) else MASKED


def _wanted(requested: BlockSizes, field: str, length: int) -> int | None:
  size = getattr(requested, field)
  if size is not None and size % LANES and size < length:
    raise ValueError(f"block_sizes.{field}: got {size}; on a TPU expected a multiple of {LANES} "
                     f"tokens, or at least the whole length of {length}")
  return size


def query_ranges(operands: Operands, cut: Cut) -> list[tuple[int, int]]:
  """Blocks [first, end) of queries whose cotangent is in vector memory at the same time."""
  width = round_up(operands.query.shape[3], LANES)
  # The sum in float32, and the block that is written, in which the next row's may begin.
  tokens = RESIDENT // (cut.query_heads * width * (4 + 2 * operands.query.dtype.itemsize))
  total = cut.padded_queries // cut.block_q
  number = cdiv(total, cdiv(total, max(tokens // cut.block_q, 1)))
  return [(n, min(n + number, total)) for n in range(0, total, number)]


def needed_vmem(cut: Cut, operands: Operands, backward: bool) -> int:
  """About how many bytes of vector memory a kernel takes."""
  itemsize = operands.query.dtype.itemsize
  width, value_width = (round_up(x.shape[3], LANES) for x in (operands.query, operands.value))
  both, rows = width + value_width, cut.query_heads * cut.block_q
  keys = cut.heads * cut.block_kv
  blocks = (rows + keys) * both * itemsize
  pairs = sum((cut.query_heads if x.shape[1] > 1 else 1) * size * cut.block_q * cut.block_kv
              for x, size in _per_pair(operands))
  sums = rows * value_width
  if backward:
    resident = query_ranges(operands, cut)[0][1] * rows * width
    sums = keys * both + resident
    blocks += sums * itemsize
  strips = (2 if backward else 1) * (AHEAD[backward] + 1) * cut.block_q * cut.tile_kv
  return 2 * (blocks + pairs) + 4 * (sums + strips)


def vmem_limit(requested: BlockSizes, cut: Cut, operands: Operands, *, backward: bool) -> int:
  """The bytes of vector memory that a kernel may use.

  Raises:
    ValueError: the blocks need more than a chip has.
  """
  if requested.vmem_limit_bytes is not None:
    return requested.vmem_limit_bytes
  needed = needed_vmem(cut, operands, backward)
  if needed > MOST_VMEM:
    raise ValueError(
        f"block_sizes: blocks of {cut.block_q} queries times {cut.query_heads} heads and "
        f"{cut.block_kv} keys need about {needed / MEBIBYTE:.0f} MiB of vector memory; expected at "
        f"most {MOST_VMEM // MEBIBYTE}: give smaller block_q and block_kv")
  return max(LEAST_VMEM, int(SLACK * needed))


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
