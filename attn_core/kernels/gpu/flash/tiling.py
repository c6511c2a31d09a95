"""Blocks of the GPU kernels, and the shared memory that they need.

A block of threads computes a block of queries, half of it in each of two warpgroups; blocks of
keys and values pass through a ring of stages in shared memory.
"""

from typing import NamedTuple

import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.xla import tile_ops as steps
from attn_core.masks import leaves as algebra, block_map as blocks
from attn_core.types import AttentionSpec, BlockSizes, Operands

COMPUTING = 2  # warpgroups of the forward that compute; one more copies
# Registers of a thread that computes, and of one that copies: 65,536 for all.
REGISTERS = {"compute": 240, "copy": 24}
DTYPES = ("bfloat16", "float16")
# The widths of D and E that there is code for; others are padded to the next.
WIDTHS = (64, 80, 96, 128, 192, 256)
# The larger of the widths of keys and values: tokens of a block of queries, of keys, and stages, as
# many as fit.
FORWARD = {64: (128, 128, 4), 80: (128, 128, 4), 96: (128, 128, 4), 128: (128, 128, 2),
           192: (128, 64, 3), 256: (128, 64, 2)}
# Widths up to 64, full or causal and long: a seventh fewer instructions for each pair, which is
# what limits such widths; other masks and features do not leave the registers.
LONG_ROWS = (128, 256, 2)
LONG = 4096  # keys; a causal mask of fewer hides too much of larger blocks
# See `_busy`.
BUSY_BLOCK_KV = 64
# Sums of wider values leave no registers for what can be computed anew.
WIDE = 192
OTHER_BYTES = 4096  # for barriers, lse, alignment, and what reductions across warps need


class Cut(NamedTuple):
  """How an attention is cut, in tokens, and how wide its rows are in shared memory."""

  queries: int  # T
  keys: int  # S
  block_q: int  # of a block of threads
  block_kv: int
  stages: int
  width: int  # D, padded
  value_width: int  # E, padded

  @property
  def sizes(self) -> blocks.Sizes:
    return blocks.Sizes(self.queries, self.keys, self.block_q, self.block_kv)

  @property
  def rows(self) -> int:
    """Queries of a warpgroup."""
    return self.block_q // COMPUTING


def padded_width(name: str, width: int) -> int:
  """The width in shared memory.

  Raises:
    NotImplementedError: wider than any.
  """
  if width > WIDTHS[-1]:
    raise NotImplementedError(
        f"{name}: width {width}; the GPU kernels compute at most {WIDTHS[-1]}; "
        "mechanism='blockwise' takes any width")
  return next(x for x in WIDTHS if x >= width)


def choose(operands: Operands, spec: AttentionSpec, requested: BlockSizes) -> Cut:
  """How to cut the forward.

  Args:
    operands: only shapes and dtypes count.
    spec: what is computed.
    requested: what the caller fixed; None fields are chosen here, so that all fits.

  Raises:
    NotImplementedError: a dtype or a width that there is no kernel for.
    ValueError: a requested block that the kernel does not have, or that does not fit.
  """
  _check_dtype(operands)
  width = padded_width("query", operands.query.shape[3])
  value_width = padded_width("value", operands.value.shape[3])
  block_q, block_kv, stages = FORWARD[max(width, value_width)]
  if _busy(operands, spec):
    block_kv = BUSY_BLOCK_KV
  elif (not any(_features(operands, spec)) and max(width, value_width) <= 64
        and _has_long_rows(operands, spec)):
    block_q, block_kv, stages = LONG_ROWS
  block_q = _requested(requested, "block_q", block_q, 128, 256)
  block_kv = _requested(requested, "block_kv", block_kv, 64, 256)
  if requested.block_heads is not None:
    raise ValueError(f"block_sizes.block_heads: got {requested.block_heads}; the GPU kernels "
                     "compute one query head at a time: expected None")
  cut = Cut(operands.query.shape[1], operands.key.shape[1], block_q, block_kv, stages, width,
            value_width)
  # The output of another width than the queries takes memory of its own.
  while cut.stages > 1 and shared_memory(cut) > mosaic.SHARED_MEMORY:
    cut = cut._replace(stages=cut.stages - 1)
  needed = shared_memory(cut)
  if needed > mosaic.SHARED_MEMORY:
    raise ValueError(
        f"block_sizes: blocks of {block_q} queries and {block_kv} keys need "
        f"{needed / 1024:.0f} KiB of shared memory; expected at most "
        f"{mosaic.SHARED_MEMORY // 1024}: give smaller block_q and block_kv")
  return cut


def _has_long_rows(operands: Operands, spec: AttentionSpec) -> bool:
  mask = steps.mask_of(operands, spec)
  if isinstance(mask, algebra.Full):
    return True
  return isinstance(mask, algebra.Causal) and operands.key.shape[1] >= LONG


def shared_memory(cut: Cut) -> int:
  """Bytes that the forward takes: queries, stages of keys and values, and the output."""
  itemsize = 2
  rows = cut.width + (cut.value_width if cut.value_width != cut.width else 0)
  staged = cut.stages * cut.block_kv * (cut.width + cut.value_width)
  return itemsize * (cut.block_q * rows + staged) + OTHER_BYTES


def _features(operands: Operands, spec: AttentionSpec) -> tuple[bool, ...]:
  """Whether there are a bias, dropout and a soft cap."""
  return operands.bias is not None, spec.dropout_prob > 0, spec.logits_soft_cap is not None


def _busy(operands: Operands, spec: AttentionSpec) -> bool:
  """Whether two of them need registers for every pair."""
  return sum(_features(operands, spec)) > 1


def _check_dtype(operands: Operands) -> None:
  dtype = jnp.dtype(operands.query.dtype).name
  if dtype not in DTYPES:
    raise NotImplementedError(
        f"query: dtype {dtype}; the GPU kernels compute {' and '.join(DTYPES)}; "
        "mechanism='blockwise' takes any float dtype")


def _requested(requested: BlockSizes, field: str, tuned: int, multiple: int, most: int) -> int:
  size = getattr(requested, field)
  if size is None:
    return tuned
  if size % multiple or not 0 < size <= most:
    raise ValueError(f"block_sizes.{field}: got {size}; on a GPU expected a multiple of {multiple} "
                     f"tokens up to {most}")
  return size


# --- Backward. -----------------------------------------------------------------------------------

PASSED = 2  # tiles of weights on their way between two warpgroups that share their keys
# Registers of a thread of the first of these, which has the exponentials, and of the second.
REGISTERS_SHARED = 248, 232
# Width of queries and keys, the larger one of those of values: of the kernel that sums over keys,
# tokens of a block of keys, stages of keys and of values.
BACKWARD_QUERY = {64: (128, (2, 2)), 80: (128, (2, 2)), 96: (128, (2, 2)), 128: (128, (2, 2)),
                  192: (64, (2, 2)), 256: (64, (2, 1))}
# Of the kernel that sums over queries: stages of queries and of d_out, and whether the warpgroups
# share their keys. A block is 64 queries: more do not leave enough registers.
BACKWARD_KEY = {64: ((3, 3), False), 80: ((3, 3), False), 96: ((3, 3), False),
                128: ((2, 2), False), 192: ((2, 2), True), 256: ((2, 2), True)}
# Of the kernel of a bias's cotangent: stages of what is not owned, by the larger width.
BACKWARD_BIAS = {64: 4, 80: 3, 96: 3, 128: 2, 192: 2, 256: 1}
BACKWARD_OTHER_BYTES = 1536  # for barriers and alignment


class BackwardCut(NamedTuple):
  """How a kernel of the backward cuts an attention, in tokens."""

  queries: int  # T
  keys: int  # S
  block_q: int
  block_kv: int
  stages: tuple[int, int]  # of what is D wide, and of what is E wide
  width: int  # D, padded
  value_width: int  # E, padded
  by_keys: bool  # whether it sums over queries: what passes through the stages
  shared: bool = False  # whether the computing warpgroups share their keys

  @property
  def sizes(self) -> blocks.Sizes:
    return blocks.Sizes(self.queries, self.keys, self.block_q, self.block_kv)


class BiasCuts(NamedTuple):
  """Of the kernel of a bias's cotangent."""

  query: BackwardCut  # owns queries: a number for every pair
  key: BackwardCut  # owns keys: the same number for all queries


class BackwardCuts(NamedTuple):
  """Of the two kernels of the backward."""

  query: BackwardCut  # sums over keys
  key: BackwardCut  # sums over queries


def choose_backward(operands: Operands, spec: AttentionSpec, requested: BlockSizes) -> BackwardCuts:
  """How to cut the backward; arguments and errors as of `choose`."""
  _check_dtype(operands)
  lengths = operands.query.shape[1], operands.key.shape[1]
  widths = (padded_width("query", operands.query.shape[3]),
            padded_width("value", operands.value.shape[3]))
  busy = _busy(operands, spec)
  block_kv, stages = BACKWARD_QUERY[max(widths)]
  if busy or operands.bias is not None:
    block_kv = BUSY_BLOCK_KV
  block_kv = _requested(requested, "block_kv_backward", block_kv, 64, 128)
  query = BackwardCut(*lengths, COMPUTING * mosaic.ROW_TILE, block_kv, stages, *widths, False)
  stages, shared = BACKWARD_KEY[max(widths)]
  shared = shared or busy
  block_q = _requested(requested, "block_q_backward", mosaic.ROW_TILE, 64, 64)
  block_kv = (1 if shared else COMPUTING) * mosaic.ROW_TILE
  key = BackwardCut(*lengths, block_q, block_kv, stages, *widths, True, shared)
  needed = shared_memory_backward(query)
  if needed > mosaic.SHARED_MEMORY:
    raise ValueError(
        f"block_sizes.block_kv_backward: {query.block_kv} keys need {needed / 1024:.0f} KiB of "
        f"shared memory; expected at most {mosaic.SHARED_MEMORY // 1024}: give 64")
  return BackwardCuts(query, key)


def shared_memory_backward(cut: BackwardCut) -> int:
  """Bytes that a kernel of the backward takes: its own tokens, and stages of the others."""
  own, staged = (cut.block_kv, cut.block_q) if cut.by_keys else (cut.block_q, cut.block_kv)
  tokens = [own + stages * staged for stages in cut.stages]
  needed = 2 * (tokens[0] * cut.width + tokens[1] * cut.value_width)
  if cut.by_keys:
    needed += 4 * sum(cut.stages) * staged
  if cut.shared:
    needed += 4 * PASSED * cut.block_q * cut.block_kv
  return needed + BACKWARD_OTHER_BYTES


def choose_bias(operands: Operands) -> BiasCuts:
  """How to cut the kernel of a bias's cotangent; only shapes count."""
  widths = (padded_width("query", operands.query.shape[3]),
            padded_width("value", operands.value.shape[3]))
  stages = (BACKWARD_BIAS[max(widths)],) * 2
  def cut(by_keys):
    blocks_of = mosaic.ROW_TILE, COMPUTING * mosaic.ROW_TILE
    block_q, block_kv = blocks_of if by_keys else blocks_of[::-1]
    return BackwardCut(operands.query.shape[1], operands.key.shape[1], block_q, block_kv, stages,
                       *widths, by_keys)
  return BiasCuts(cut(False), cut(True))


def shared_memory_bias(cut: BackwardCut) -> int:
  """Bytes that the kernel of a bias's cotangent takes: what it owns, stages, a float32 result."""
  own, staged = COMPUTING * mosaic.ROW_TILE, mosaic.ROW_TILE
  tokens = own + cut.stages[0] * staged
  # One number for each of its own, in whole kilobytes, with what warps need to add theirs up.
  result = 1024 * (1 + COMPUTING) if cut.by_keys else 4 * own * staged
  return 2 * tokens * (cut.width + cut.value_width) + result + BACKWARD_OTHER_BYTES
