# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiling of the TPU kernels, and the vector memory that they need.

A block is the data of one grid step; its tiles are hidden, fully visible or partly visible, and
neighboring tiles of one kind are computed at once. The tables are chosen by libtpu's static cycles
in bfloat16 (attn_core_test/results/tpu_static.md, tpu_notes.md): large blocks, because every step
pays for filling and draining the pipeline between the units; small tiles where the edge of a mask
crosses many of them. Measured for v6e with D = 64, 128 and 256 at 4,096 tokens and D = 128 at 1,024
to 8,192, and for v5e, v5p and tpu7x with D = 128: the best blocks for one chip are the best or
nearly the best for the others, so that the tables depend only on the kind of mask and the
direction, and on the width where a step can hold all keys. Shapes outside the tables take the same
blocks: cut to their length, halved until a kernel fits in vector memory, and doubled until the
schedule of a batch row fits in scalar memory.
"""

from typing import Iterator

import jax

from attn_core.kernels.common import listed
from attn_core.kernels.tpu.flash import scalar_memory, score_tiles
from attn_core.kernels.tpu.flash.schedule import LANES, MEBIBYTE, Tiling, round_up
from attn_core.masks import leaves, mask as mask_lib, position_range
from attn_core.types import AttentionSpec, BlockSizes, Operands, cdiv

MOST_TILES = 16  # of a block: their kinds share one 32-bit number
# (kind of mask, backward): query tokens, key tokens, and tokens of a tile along both sides, doubled
# while a block has more than MOST_TILES. A full mask leaves the queries of a block in one tile.
WHOLE, FULL, MASKED, LONG = "whole", "full", "masked", "long"
BLOCKS = {(WHOLE, False): (1024, 4096, 512), (WHOLE, True): (1024, 2048, 512),
          (FULL, False): (2048, 2048, 512), (FULL, True): (1024, 2048, 512),
          (MASKED, False): (1024, 1024, 256), (MASKED, True): (1024, 1024, 256),
          (LONG, False): (2048, 2048, 256), (LONG, True): (1024, 1024, 256)}
# Query tokens times query heads of one key head in a step, at most: these heads share a block of
# keys, and the work of one hides the latency of another. Other kinds of masks, and SMALL_BLOCKS,
# take a block of queries of one head. The other query heads of the key head are other steps.
GROUPED_ROWS = {(MASKED, False): 4096, (MASKED, True): 2048}
# The most where queries or values are wider than the lanes: 2 of 4 heads, all of 5 or 7.
WIDE_GROUPED_ROWS = 3584
LEAST_GROUPED_ROWS = 512  # of a head, where a step computes several and their blocks are cut
# A full mask is WHOLE if its key tokens and its width are above the first number and at most the
# second: a step then takes all keys, and its sums need no second step. With 1,024 queries a step
# instead of 2,048 it is 2% slower, in half of the code, but one that is computed again costs half.
WHOLE_KEYS, WHOLE_WIDTHS = (2048, 4096), (64, 256)
LONG_KEYS = 8192  # from this length on, a mask that may show most of a row is LONG
# In a forward of heads wider than the lanes, one whose keys lie within this many positions is not.
WIDE_NARROW_KEYS = 4096
# With a dense mask, whose code is longer in larger blocks, and in 32 bits with any number of pairs.
# In 16 bits a bias takes the blocks of MASKED.
PER_PAIR_BLOCK = (512, 512, 512)
# By backward, for float32, where a third of the code compiles in half the time. Products of float32
# take six passes, compared to which filling the pipeline costs little: the forward is 2% slower to
# 4% faster than with the blocks above, the backward 7 to 9% slower.
SMALL_BLOCKS = {False: (1024, 1024, 256), True: (512, 512, 256)}
# A step takes as many key heads as have this many tokens, because every step fills and drains the
# units, and the work of one head hides the latency of another; with SMALL_BLOCKS one head.
STEP_TOKENS = 2048
# Dtypes that try a naive softmax first (`forward`). Products of float32 take so long that the
# maximum costs nothing in comparison.
NAIVE_DTYPES = ("bfloat16",)
# By backward: strips of tiles whose first products are issued before they are used.
AHEAD = {False: 3, True: 1}
MOST_VMEM = 34 * MEBIBYTE  # by this estimate; of 64 from v5 on, some of which XLA uses
LEAST_VMEM = 16 * MEBIBYTE  # the compiler's own limit on the smallest chip
SLACK = 1.6  # float32 takes up to 1.5 times the estimate
# For the cotangent of the queries, kept through a backward; less where a kernel may use less.
RESIDENT_BYTES = 16 * MEBIBYTE


def make_tiling(operands: Operands, spec: AttentionSpec, requested: BlockSizes, *,
                backward: bool) -> Tiling:
  """Chooses the blocks and tiles of a kernel.

  Args:
    operands: only shapes and dtypes are used.
    spec: only the structure of its mask is used.
    requested: the caller's choice; None fields are chosen here, so that the kernel fits.
    backward: for the backward kernel.

  Raises:
    ValueError: a requested block is neither a multiple of 128 tokens nor the whole length, or
      does not divide a listed block, or a number of heads is requested.
  """
  if requested.block_heads is not None:
    raise ValueError(f"block_sizes.block_heads: got {requested.block_heads}; the TPU kernels set "
                     "the key heads of a step by the block sizes: expected None")
  mask = jax.tree.unflatten(spec.mask, operands.mask.arrays)
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  suffix = "_backward" if backward else ""
  wanted_q, wanted_kv = (
      _requested(requested, f"{name}{suffix}", length, listed.divisor(mask, name, (queries, keys)))
      for name, length in ((listed.QUERIES, queries), (listed.KEYS, keys)))
  small = operands.query.dtype.itemsize == 4
  rows, columns, tile = _blocks(operands, mask, backward, small)
  most_rows = rows if small else GROUPED_ROWS.get(
      (_kind(operands, mask, backward), backward), rows)
  if max(operands.query.shape[3], operands.value.shape[3]) > LANES:
    most_rows = min(most_rows, WIDE_GROUPED_ROWS)
  rows, columns = _within_lists(mask, (queries, keys), (rows, columns))
  most_heads = listed.heads_of_a_list(mask)
  group, rows = _step_heads(operands, wanted_q or rows, most_rows, wanted_q is not None,
                            most_heads)
  while True:
    if isinstance(mask, mask_lib.Full):
      rows = cdiv(queries, cdiv(queries, rows))  # equal blocks, because no tile can be skipped
    tiling = _tiling(operands, spec, wanted_q or rows, wanted_kv or columns, tile, group)
    tiling = _with_ranges(tiling, operands, requested, backward)
    for several in [tiling] if small else _with_heads(
        tiling, operands, requested, backward, most_heads):
      if needed_vmem(several, operands, backward) <= most_vmem(requested):
        found = _with_short_schedule(several, operands, spec, requested, tile, backward=backward)
        return _with_halves(found, operands, backward)
    if not wanted_kv and columns > LANES and (wanted_q or columns >= rows):
      columns //= 2
    elif not wanted_q and rows > LANES:
      rows //= 2
    elif group > 1:
      group = max(n for n in range(1, group) if group % n == 0)
    else:
      return tiling  # too large: `vmem_limit` raises


def _with_short_schedule(tiling: Tiling, operands: Operands, spec: AttentionSpec,
                         requested: BlockSizes, tile: int, *, backward: bool) -> Tiling:
  """Doubles blocks until the schedule of one batch row fits in scalar memory.

  Args:
    tiling: fits in vector memory.
    operands, spec, requested, backward: as in `make_tiling`; requested blocks stay as they are.
    tile: see `BLOCKS`.

  Returns:
    A tiling that fits in vector memory, whose schedule fits if larger blocks make it fit.
  """
  fixed_q, fixed_kv = (
      getattr(requested, f"{name}_backward" if backward else name) is not None
      for name in ("block_q", "block_kv"))
  while not scalar_memory.fits(operands, spec, tiling, by_keys=backward):
    q, kv = tiling.block_q, tiling.block_kv
    larger = [_with_ranges(_tiling(operands, spec, rows, columns, tile, tiling.group), operands,
                           requested, backward)
              for rows, columns, grows in ((2 * q, kv, not fixed_q and q < tiling.query_length),
                                           (q, 2 * kv, not fixed_kv and kv < tiling.key_length))
              if grows]
    larger = [x for x in larger if x != tiling  # which lists of blocks may not let grow
              and needed_vmem(x, operands, backward) <= most_vmem(requested)]
    if not larger:
      return tiling  # `scalar_memory.num_groups` raises
    # The squarest, which takes fewest copies.
    tiling = min(larger, key=lambda x: max(x.group * x.block_q, x.block_kv))
  return tiling


def _blocks(operands: Operands, mask: mask_lib.Mask, backward: bool,
            small: bool) -> tuple[int, int, int]:
  """Returns (query tokens, key tokens, tile) from the tables."""
  if list(_per_pair(operands)):
    is_dense = any(_is_dense(x) for x in operands.mask.arrays)
    return PER_PAIR_BLOCK if small or is_dense else BLOCKS[MASKED, backward]
  if small:
    return SMALL_BLOCKS[backward]
  return BLOCKS[_kind(operands, mask, backward), backward]


def _step_heads(operands: Operands, rows: int, most_rows: int, fixed: bool,
                most_heads: int) -> tuple[int, int]:
  """Returns the query heads of a key head that a step computes, and the query tokens of its block.

  They are those that take most rows together; the blocks of several heads may be smaller.

  Args:
    operands: only shapes are used.
    rows: query tokens of a block of one head.
    most_rows: see GROUPED_ROWS.
    fixed: blocks have this number of rows.
    most_heads: see `listed.heads_of_a_list`.
  """
  group, rows = _group(operands), round_up(min(rows, operands.query.shape[1]), LANES)
  most_rows = max(most_rows, rows)
  def rows_of(heads: int) -> int:
    # A divisor: blocks then add no padding, and have few different places on the diagonal.
    whole = fixed or heads * rows <= most_rows
    return rows if whole else _tile(rows, max(most_rows // heads, LANES))
  least = min(rows, LEAST_GROUPED_ROWS)
  choices = [heads for heads in range(1, group + 1) if group % heads == 0 and
             most_heads % heads == 0 and rows_of(heads) >= least
             and heads * rows_of(heads) <= most_rows]
  heads = max(choices, key=lambda heads: (heads * rows_of(heads), -heads))
  return heads, rows_of(heads)


def _tiling(operands: Operands, spec: AttentionSpec, rows: int, columns: int, tile: int,
            group: int) -> Tiling:
  """Rounds blocks to lanes and divides them into tiles."""
  mask = jax.tree.unflatten(spec.mask, operands.mask.arrays)
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  block_q, block_kv = _within_lists(mask, (queries, keys), (rows, columns))
  tile_q, tile_kv = _tile(block_q, tile), _tile(block_kv, tile)
  if isinstance(mask, mask_lib.Full):
    tile_q = block_q
  while (block_q // tile_q) * (block_kv // tile_kv) > MOST_TILES:
    larger = _tile(block_q, 2 * tile_q), _tile(block_kv, 2 * tile_kv)
    if larger == (tile_q, tile_kv):  # blocks of 5 or 7 times 128 tokens have no such tiles
      larger = (_next_tile(block_q, tile_q), tile_kv) if tile_q < block_q else (
          tile_q, _next_tile(block_kv, tile_kv))
    tile_q, tile_kv = larger
  found = Tiling(queries, keys, block_q, block_kv, tile_q, tile_kv, group,
                 head_parts=_group(operands) // group, runs=score_tiles.runs_of(operands, mask))
  return found._replace(by_distance=tuple(score_tiles.terms_by_distance(spec)),
                        block_diagonals=score_tiles.num_diagonals(operands, spec, found))


def _within_lists(mask: mask_lib.Mask, lengths: tuple[int, int],
                  sizes: tuple[int, int]) -> tuple[int, int]:
  """Rounds (query tokens, key tokens) of a block to lanes, so that it lies in one listed block."""
  found = []
  for field, length, size in zip((listed.QUERIES, listed.KEYS), lengths, sizes):
    size, divisor = round_up(min(size, length), LANES), listed.divisor(mask, field, lengths)
    found.append(_tile(divisor, size) if divisor else size)
  return found[0], found[1]


def _with_halves(tiling: Tiling, operands: Operands, backward: bool) -> Tiling:
  """Halves the work where a chip with two cores could not divide batch rows and heads evenly.

  The lists of a forward together are as long as before. A backward then has two sums of the same
  keys, which costs other chips less than the idle core costs these.
  """
  units = operands.key.shape[0] * operands.key.shape[2] // tiling.key_heads
  if not backward:
    units *= tiling.head_parts
  can = (tiling.head_parts if backward else tiling.query_blocks) % 2 == 0
  return tiling._replace(halves=2) if can and units % 2 else tiling


def _with_ranges(tiling: Tiling, operands: Operands, requested: BlockSizes,
                 backward: bool) -> Tiling:
  """Divides the queries of a backward into ranges whose cotangent fits in vector memory at once."""
  if not backward:
    return tiling
  width = round_up(operands.query.shape[3], LANES)
  resident = RESIDENT_BYTES * most_vmem(requested) // MOST_VMEM
  # The sum in float32, and the block that is written, twice, since two are in flight.
  tokens = resident // (tiling.query_heads * width * (4 + 2 * operands.query.dtype.itemsize))
  total = tiling.query_blocks
  blocks = cdiv(total, cdiv(total, max(tokens // tiling.block_q, 1)))
  return tiling._replace(range_blocks=blocks if blocks < total else 0)


def _with_heads(tiling: Tiling, operands: Operands, requested: BlockSizes,
                backward: bool, most_heads: int) -> Iterator[Tiling]:
  """Yields the tiling with several key heads per step, in falling order, down to one."""
  most = STEP_TOKENS // max(tiling.group * tiling.block_q, tiling.block_kv)
  for heads in range(most if tiling.head_parts == 1 else 1, 1, -1):
    several = _with_ranges(tiling._replace(key_heads=heads), operands, requested, backward)
    # More ranges of queries would cost more than heads save.
    if (operands.key.shape[2] % heads == 0 and several.num_ranges == 1
        and most_heads % several.query_heads == 0):
      yield several
  yield tiling


def is_naive_first(operands: Operands) -> bool:
  """Says if the forward tries a naive softmax first."""
  return operands.query.dtype.name in NAIVE_DTYPES


def state_buffers(operands: Operands) -> int:
  """Returns how many copies of its running softmax the forward keeps.

  A step of a naive softmax that failed is computed again from the state before it.
  """
  return 2 if is_naive_first(operands) else 1


def _group(operands: Operands) -> int:
  """Returns G, the query heads of a key head."""
  return operands.query.shape[2] // operands.key.shape[2]


def _kind(operands: Operands, mask: mask_lib.Mask, backward: bool) -> str:
  """Returns the row of BLOCKS for a mask."""
  *_, keys, _, width = operands.key.shape
  if isinstance(mask, mask_lib.Full):
    whole = all(low < n <= most for n, (low, most) in ((keys, WHOLE_KEYS), (width, WHOLE_WIDTHS)))
    return WHOLE if whole else FULL
  # Documents may be short, and a large block of several ones has many hidden pairs. So has one
  # with lists of small blocks.
  lengths = operands.query.shape[1], keys
  packed = any(isinstance(node, leaves.Segments) for node in mask_lib.nodes(mask)) or bool(
      listed.with_bits(mask, lengths))
  wide = width > LANES and not backward
  narrow = position_range.is_narrow(mask, WIDE_NARROW_KEYS if wide else position_range.NARROW)
  long = keys >= LONG_KEYS and not packed and not narrow
  return LONG if long else MASKED


def _requested(requested: BlockSizes, field: str, length: int, divisor: int) -> int | None:
  """Returns a requested block size, or None; see `make_tiling` and `listed.divisor`."""
  size = getattr(requested, field)
  if size is not None and size % LANES and size < length:
    raise ValueError(f"block_sizes.{field}: got {size}; on a TPU expected a multiple of {LANES} "
                     f"tokens, or at least the whole length of {length}")
  if size is not None and divisor and (size % LANES or divisor % size):
    raise ValueError(f"block_sizes.{field}: got {size}; with a mask that lists blocks "
                     f"expected a multiple of {LANES} that divides {divisor} tokens")
  return size


def most_vmem(requested: BlockSizes) -> int:
  """Returns the bytes of vector memory that a kernel may need by the estimate."""
  limit = requested.vmem_limit_bytes
  return MOST_VMEM if limit is None else min(MOST_VMEM, int(limit / SLACK))


def needed_vmem(tiling: Tiling, operands: Operands, backward: bool) -> int:
  """Estimates the bytes of vector memory that a kernel takes."""
  itemsize = operands.query.dtype.itemsize
  width, value_width = (round_up(x.shape[3], LANES) for x in (operands.query, operands.value))
  both, rows = width + value_width, tiling.query_heads * tiling.block_q
  keys = tiling.key_heads * tiling.block_kv
  blocks = (rows + keys) * both * itemsize
  pairs = sum((tiling.query_heads if x.shape[1] > 1 else 1) * size
              * tiling.block_q * tiling.block_kv for x, size in _per_pair(operands))
  # At most a bit for each pair, of lists of blocks; numbers of predicates take less.
  pairs += sum(tiling.block_q * tiling.block_kv // 8 for x in operands.mask.arrays
               if x.ndim == 4 and x.dtype != bool)
  sums = rows * value_width * state_buffers(operands)
  if backward:
    resident = tiling.blocks_of_range * rows * width
    sums = keys * both + resident
    blocks += sums * itemsize
  strips = (2 if backward else 1) * (AHEAD[backward] + 1) * tiling.block_q * tiling.tile_kv
  return (2 * (blocks + pairs) + 4 * (sums + strips)
          + score_tiles.needed_vmem(tiling, operands, backward))


def vmem_limit(requested: BlockSizes, tiling: Tiling, operands: Operands, *, backward: bool) -> int:
  """Returns the bytes of vector memory that a kernel may use.

  Raises:
    ValueError: the blocks need more than a chip has, or twice what the kernel may use.
  """
  needed, limit = needed_vmem(tiling, operands, backward), requested.vmem_limit_bytes
  # The estimate is less than twice what a kernel needs: what might fit is left to the compiler.
  most = MOST_VMEM if limit is None else 2 * limit
  if needed > most:
    raise ValueError(
        f"block_sizes: blocks of {tiling.block_q} queries times {tiling.query_heads} heads and "
        f"{tiling.block_kv} keys need about {needed / MEBIBYTE:.0f} MiB of vector memory; expected "
        f"at most {most / MEBIBYTE:.3g}: give smaller block_q and block_kv")
  if limit is not None:
    return limit
  exact = score_tiles.needed_vmem(tiling, operands, backward)  # arrays, and no values of a tile
  return max(LEAST_VMEM, int(SLACK * (needed - exact)) + exact)


def _per_pair(operands: Operands) -> Iterator[tuple[jax.Array, int]]:
  """Yields (array, bytes of an element in the kernel) of the bias, dense masks and score mods."""
  if operands.bias is not None:
    yield operands.bias, operands.bias.dtype.itemsize
  for x in operands.mask.arrays:
    if _is_dense(x):
      yield x, 1
  for x in operands.mods:
    if x.ndim == 4 and min(x.shape[2:]) > 1:
      yield x, x.dtype.itemsize


def _is_dense(x: jax.Array) -> bool:
  """Whether an array of a mask is a dense one; others with four axes are lists, or numbers."""
  return x.ndim == 4 and x.dtype == bool


def _next_tile(block: int, tile: int) -> int:
  """Returns the least multiple of LANES above `tile` that divides `block`, which is larger."""
  return min(n for n in range(tile + LANES, block + 1, LANES) if block % n == 0)


def _tile(block: int, most: int) -> int:
  """Returns the largest multiple of LANES up to `most` that divides `block`."""
  return max(n for n in range(LANES, min(block, most) + 1, LANES) if block % n == 0)
