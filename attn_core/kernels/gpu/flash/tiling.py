# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tilings of the GPU kernels, and the shared memory that they need.

A thread block computes a block of queries, half of it in each of two consumer warpgroups; blocks of
keys and values pass through a pipeline in shared memory.
"""

from typing import NamedTuple

import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, listed
from attn_core.kernels.gpu import mosaic
from attn_core.masks import block_map, leaves, mask as mask_lib
from attn_core.score_mods import evaluate, score_mod
from attn_core.types import AttentionSpec, BlockSizes, Operands

CONSUMERS = 2  # warpgroups that compute; one more copies
# Registers per thread of the warpgroups that compute and that copy; a processor has 65,536.
REGISTERS = {"compute": 240, "copy": 24}
DTYPES = ("bfloat16", "float16")
# Supported values of D and E; others are padded to the next.
WIDTHS = (64, 80, 96, 128, 192, 256)
# Larger width of keys and values -> (tokens of a block of queries, tokens of a block of keys,
# number of stages, as many as fit).
FORWARD = {64: (128, 128, 4), 80: (128, 128, 4), 96: (128, 128, 4), 128: (128, 128, 2),
           192: (128, 64, 3), 256: (128, 64, 2)}
# The same for widths up to 64 with a full mask, or a causal one of many keys: a seventh fewer
# instructions per pair, which limit the speed at such widths; other masks and features do not leave
# enough registers.
LONG_TILING = (128, 256, 2)
LONG = 4096  # keys; with fewer, a causal mask hides too much of larger blocks
# With two of `_features`, or in the forward one of them and bits of lists.
HIGH_PRESSURE_BLOCK_KV = 64
# Sums of wider values leave no registers for numbers that can be recomputed.
WIDE = 192
OTHER_BYTES = 4096  # for barriers, lse, alignment, and reductions across warps


class Tiling(NamedTuple):
  """Tiling of the forward, in tokens, and the widths of its rows in shared memory; hashable."""

  queries: int  # T
  keys: int  # S
  block_q: int  # of a thread block
  block_kv: int
  num_stages: int
  width: int  # D, padded
  value_width: int  # E, padded

  @property
  def sizes(self) -> block_map.Sizes:
    return block_map.Sizes(self.queries, self.keys, self.block_q, self.block_kv)

  @property
  def warpgroup_rows(self) -> int:
    """Queries of a warpgroup."""
    return self.block_q // CONSUMERS


def unsupported_reason(dtype: jnp.dtype, widths: tuple[int, int]) -> str | None:
  """Returns why the kernels cannot compute a call; None: they can, as far as these say.

  Args:
    dtype: of query, key and value.
    widths: (D, E).
  """
  if (reason := mosaic.unsupported_reason()) is not None:
    return reason
  if dtype.name not in DTYPES:
    return f"dtype {dtype.name}: the kernels for Hopper compute {' and '.join(DTYPES)} only"
  widest = max(widths)
  if widest > WIDTHS[-1]:
    return f"a head_dim of {widest}: the kernels for Hopper compute widths up to {WIDTHS[-1]}"
  return None


def padded_width(name: str, width: int) -> int:
  """Returns the width in shared memory.

  Raises:
    NotImplementedError: `width` is larger than the largest of WIDTHS.
  """
  if width > WIDTHS[-1]:
    raise NotImplementedError(
        f"{name}: width {width}; the GPU kernels compute at most {WIDTHS[-1]}; "
        "mechanism='blockwise' takes any width")
  return next(x for x in WIDTHS if x >= width)


def make_tiling(operands: Operands, spec: AttentionSpec, requested: BlockSizes) -> Tiling:
  """Returns the tiling of the forward.

  Args:
    operands: only shapes and dtypes are read.
    spec: what is computed.
    requested: sizes fixed by the caller; None fields are chosen here, so that all fits.

  Raises:
    NotImplementedError: the dtype or a width is not supported, or a requested size with the lists
      of the mask.
    ValueError: a requested size is not supported, or does not fit into shared memory.
  """
  _check_dtype(operands)
  width = padded_width("query", operands.query.shape[3])
  value_width = padded_width("value", operands.value.shape[3])
  block_q, block_kv, stages = FORWARD[max(width, value_width)]
  mask, lengths = (mask_lib.of_structure(spec.mask),
                   (operands.query.shape[1], operands.key.shape[1]))
  has_bits = bool(listed.with_bits(mask, lengths))
  if sum(_features(operands, spec)) + has_bits > 1:
    block_kv = HIGH_PRESSURE_BLOCK_KV
  elif (not any(_features(operands, spec)) and max(width, value_width) <= 64
        and _has_long_rows(operands, spec)):
    block_q, block_kv, stages = LONG_TILING
  block_q = _requested(requested, "block_q", block_q, 128, 256)
  block_kv = _requested(requested, "block_kv", block_kv, 64, 256)
  if reason := listed.refusal_of_sizes(mask, lengths, requested, "Hopper"):
    raise NotImplementedError(reason)
  if requested.block_heads is not None:
    raise ValueError(f"block_sizes.block_heads: got {requested.block_heads}; the GPU kernels "
                     "compute one query head at a time: expected None")
  tiling = Tiling(*lengths, block_q, block_kv, stages, width, value_width)
  # An output whose width differs from that of the queries takes additional memory.
  while tiling.num_stages > 1 and shared_memory(tiling) > mosaic.SHARED_MEMORY_BYTES:
    tiling = tiling._replace(num_stages=tiling.num_stages - 1)
  needed = shared_memory(tiling)
  if needed > mosaic.SHARED_MEMORY_BYTES:
    raise ValueError(
        f"block_sizes: blocks of {block_q} queries and {block_kv} keys need "
        f"{needed / 1024:.0f} KiB of shared memory; expected at most "
        f"{mosaic.SHARED_MEMORY_BYTES // 1024}: give smaller block_q and block_kv")
  return tiling


def _has_long_rows(operands: Operands, spec: AttentionSpec) -> bool:
  """Returns whether most queries attend to many keys."""
  mask = dense_operands.mask_of(operands, spec)
  if isinstance(mask, mask_lib.Full):
    return True
  return isinstance(mask, leaves.Causal) and operands.key.shape[1] >= LONG


def shared_memory(tiling: Tiling) -> int:
  """Returns the bytes that the forward takes: queries, keys and values in stages, the output."""
  itemsize = 2
  row_width = tiling.width + (tiling.value_width if tiling.value_width != tiling.width else 0)
  staged = tiling.num_stages * tiling.block_kv * (tiling.width + tiling.value_width)
  return itemsize * (tiling.block_q * row_width + staged) + OTHER_BYTES


def _features(operands: Operands, spec: AttentionSpec) -> tuple[bool, ...]:
  """Returns whether there are a bias, dropout, a soft cap, and score mods that add or do more."""
  chain = tuple(score_mod.chain(score_mod.of_structure(spec.score_mod))
                ) if spec.has_score_mod else ()
  return (operands.bias is not None, spec.dropout_prob > 0, spec.logits_soft_cap is not None,
          any(x.is_additive for x in chain), any(not x.is_additive for x in chain))


def _high_register_pressure(operands: Operands, spec: AttentionSpec) -> bool:
  """Returns whether at least two features need registers for every pair."""
  return sum(_features(operands, spec)) > 1


def _check_dtype(operands: Operands) -> None:
  dtype = jnp.dtype(operands.query.dtype).name
  if dtype not in DTYPES:
    raise NotImplementedError(
        f"query: dtype {dtype}; the GPU kernels compute {' and '.join(DTYPES)}; "
        "mechanism='blockwise' takes any float dtype")


def _requested(requested: BlockSizes, field: str, tuned: int, multiple: int, most: int) -> int:
  """Returns the requested size, checked, or the tuned one."""
  size = getattr(requested, field)
  if size is None:
    return tuned
  if size % multiple or not 0 < size <= most:
    raise ValueError(f"block_sizes.{field}: got {size}; on a GPU expected a multiple of {multiple} "
                     f"tokens up to {most}")
  return size


# --- Backward. -----------------------------------------------------------------------------------

P_STAGES = 2  # of the pipeline of P between two warpgroups that share their keys
# Registers per thread of the first of them, which exponentiates, and of the second.
REGISTERS_SHARED = 248, 232
REGISTERS_CROWDED = 256, 224  # where logits take the most registers
# Tilings of the backward: larger width of keys and values -> tiling.
# Of the kernel that sums over keys: (tokens of a block of keys, stages of (keys, values)).
BACKWARD_QUERY = {64: (128, (2, 2)), 80: (128, (2, 2)), 96: (128, (2, 2)), 128: (128, (2, 2)),
                  192: (64, (2, 2)), 256: (64, (2, 1))}
# Of the kernel that sums over queries: (stages of (queries, d_out), whether the warpgroups share
# their keys). A block has 64 queries: more would not leave enough registers.
BACKWARD_KEY = {64: ((3, 3), False), 80: ((3, 3), False), 96: ((3, 3), False),
                128: ((2, 2), False), 192: ((2, 2), True), 256: ((2, 2), True)}
# Of the kernel of a bias's cotangent: the number of stages.
BACKWARD_BIAS = {64: 4, 80: 3, 96: 3, 128: 2, 192: 2, 256: 1}
# Of the same kernel of a table, where queries and keys have as many stages; of wider ones there is
# room for one stage of queries.
BACKWARD_TABLE = {64: 4, 80: 3, 96: 2, 128: 2}
BACKWARD_OTHER_BYTES = 1536  # for barriers and alignment


class BackwardTiling(NamedTuple):
  """Tiling of a kernel of the backward, in tokens; hashable."""

  queries: int  # T
  keys: int  # S
  block_q: int
  block_kv: int
  num_stages: tuple[int, int]  # of the pipelines of width D and of width E
  width: int  # D, padded
  value_width: int  # E, padded
  by_keys: bool  # whether it sums over queries, which then pass through the pipelines
  shared: bool = False  # whether the consumer warpgroups share their keys
  joined: bool = False  # whether queries and keys change together, and have the same stages

  @property
  def sizes(self) -> block_map.Sizes:
    return block_map.Sizes(self.queries, self.keys, self.block_q, self.block_kv)


class BiasTilings(NamedTuple):
  """Tilings of the kernel of a bias's cotangent."""

  query: BackwardTiling  # owns queries: for a bias with a number for every pair
  key: BackwardTiling  # owns keys: for a bias with the same number for all queries
  table: BackwardTiling  # owns diagonals: for a table by distance


class BackwardTilings(NamedTuple):
  """Tilings of the two kernels of the backward."""

  query: BackwardTiling  # sums over keys
  key: BackwardTiling  # sums over queries


def make_backward_tilings(operands: Operands, spec: AttentionSpec,
                          requested: BlockSizes) -> BackwardTilings:
  """Returns the tilings of the backward; arguments and errors as of `make_tiling`."""
  _check_dtype(operands)
  lengths = operands.query.shape[1], operands.key.shape[1]
  widths = (padded_width("query", operands.query.shape[3]),
            padded_width("value", operands.value.shape[3]))
  high_pressure = _high_register_pressure(operands, spec)
  block_kv, stages = BACKWARD_QUERY[max(widths)]
  if high_pressure or operands.bias is not None or evaluate.has_function(spec.score_mod):
    block_kv = HIGH_PRESSURE_BLOCK_KV
  block_kv = _requested(requested, "block_kv_backward", block_kv, 64, 128)
  query = BackwardTiling(*lengths, CONSUMERS * mosaic.WGMMA_ROWS, block_kv, stages, *widths, False)
  stages, shared = BACKWARD_KEY[max(widths)]
  shared = shared or high_pressure
  block_q = _requested(requested, "block_q_backward", mosaic.WGMMA_ROWS, 64, 64)
  block_kv = (1 if shared else CONSUMERS) * mosaic.WGMMA_ROWS
  key = BackwardTiling(*lengths, block_q, block_kv, stages, *widths, True, shared)
  needed = shared_memory_backward(query)
  if needed > mosaic.SHARED_MEMORY_BYTES:
    raise ValueError(
        f"block_sizes.block_kv_backward: {query.block_kv} keys need {needed / 1024:.0f} KiB of "
        f"shared memory; expected at most {mosaic.SHARED_MEMORY_BYTES // 1024}: give 64")
  return BackwardTilings(query, key)


def shared_memory_backward(tiling: BackwardTiling) -> int:
  """Returns the bytes that a kernel of the backward takes: its own tokens, and staged ones."""
  own, staged = tiling.block_q, tiling.block_kv
  if tiling.by_keys:
    own, staged = staged, own
  tokens = [own + stages * staged for stages in tiling.num_stages]
  needed = 2 * (tokens[0] * tiling.width + tokens[1] * tiling.value_width)
  if tiling.by_keys:
    needed += 4 * sum(tiling.num_stages) * staged
  if tiling.shared:
    needed += 4 * P_STAGES * tiling.block_q * tiling.block_kv
  return needed + BACKWARD_OTHER_BYTES


def make_bias_tilings(operands: Operands) -> BiasTilings:
  """Returns the tilings of the kernels of the cotangents of a bias and of a table, by shapes."""
  widths = (padded_width("query", operands.query.shape[3]),
            padded_width("value", operands.value.shape[3]))
  stages = (BACKWARD_BIAS[max(widths)],) * 2
  def make(by_keys: bool) -> BackwardTiling:
    blocks_of = mosaic.WGMMA_ROWS, CONSUMERS * mosaic.WGMMA_ROWS
    block_q, block_kv = blocks_of if by_keys else blocks_of[::-1]
    return BackwardTiling(operands.query.shape[1], operands.key.shape[1], block_q, block_kv, stages,
                       *widths, by_keys)
  query, joined = make(False), BACKWARD_TABLE.get(max(widths))
  table = query if joined is None else query._replace(num_stages=(joined, joined), joined=True)
  return BiasTilings(query, make(True), table)


def shared_memory_bias(tiling: BackwardTiling) -> int:
  """Returns the bytes that the kernel of a bias's cotangent takes."""
  own, staged = CONSUMERS * mosaic.WGMMA_ROWS, mosaic.WGMMA_ROWS
  stages = tiling.num_stages[0]
  tokens = own * (stages if tiling.joined else 1) + staged * stages
  # One number for each row it owns, in whole kilobytes, and memory for sums across warps; where
  # queries are owned, at most as much as a number for every pair takes.
  result = 1024 * (1 + CONSUMERS) if tiling.by_keys else 4 * own * staged
  return 2 * tokens * (tiling.width + tiling.value_width) + result + BACKWARD_OTHER_BYTES
