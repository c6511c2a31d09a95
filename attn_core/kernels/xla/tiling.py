# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiling of the XLA kernel, chosen by measurements on XLA:CPU.

A forward step should hold about a million scores, a backward step half of that, in large products:
512 query rows (tokens times query heads per key head) by 512 keys of as many key heads. Where a
mask hides most of a block, in short sequences and in narrow masks, blocks of 256 waste less; with
few heads, a forward step takes more rows. Whether the keys of a step fit into a cache does not
matter.
"""

from typing import NamedTuple

import jax

from attn_core.kernels.common import dense_operands
from attn_core.masks import mask as mask_lib, position_range
from attn_core.masks.block_map import Sizes
from attn_core.types import AttentionSpec, BlockSizes, Operands, are_known, cdiv

STEP_SCORES = 2**20
STEP_SCORES_BACKWARD = 2**19
MOST_HEADS = 8
SHORT = 2048  # tokens
UNKNOWN = 2**20  # tokens that stand for a symbolic length
SHORT_BLOCK = 512  # tokens of the longest sequences that are computed in one piece
SHORT_FLOAT16 = 64  # keys from which the forward of masked float16 is faster in loops
SHORT_SCORES = 2**22  # of all heads and rows of the batch; more are faster in several steps
DECODE_ELEMENTS = 2**18  # elements of a block of keys in decoding
# Elements of a large block without hidden keys; XLA:CPU of jax 0.10.2 is slow to sum many keys.
DECODE_ELEMENTS_LARGE = 2**22 if jax.__version_info__ >= (0, 11) else 2**19


class Tiling(NamedTuple):
  """Blocks of one attention."""

  sizes: Sizes
  step_heads: int  # key heads computed together


def make_tiling(operands: Operands, spec: AttentionSpec, requested: BlockSizes, *,
                backward: bool) -> Tiling:
  """Returns the tiling of an attention.

  Args:
    operands: only shapes count.
    spec: only the structure of the mask counts.
    requested: sizes fixed by the caller; None fields are chosen here.
    backward: whether the tiling is for the backward loops.

  Raises:
    ValueError: the requested number of heads does not divide the key heads.
  """
  (_, queries, query_heads, _), (_, keys, key_heads, _) = operands.query.shape, operands.key.shape
  sizes = queries, keys
  queries, keys = (n if are_known(n) else UNKNOWN for n in sizes)
  mask = dense_operands.mask_of(operands, spec)
  group = query_heads // key_heads
  wanted_q, wanted_kv = ((requested.block_q_backward, requested.block_kv_backward) if backward
                         else (requested.block_q, requested.block_kv))
  sparse = not isinstance(mask, mask_lib.Full)
  usual = 256 if sparse and (queries <= SHORT or position_range.is_narrow(mask)) else 512
  block_q = min(queries, wanted_q or _even(queries, max(usual // group, 16)))
  block_kv = min(keys, wanted_kv or _even(keys, usual))
  most = STEP_SCORES_BACKWARD if backward else STEP_SCORES
  fits = lambda heads: heads == 1 or heads * block_q * group * block_kv <= most
  check_heads(operands, requested)
  heads = min(requested.block_heads or MOST_HEADS, key_heads)
  while key_heads % heads or not (requested.block_heads or fits(heads)):
    heads -= 1
  if not backward and not wanted_q and usual == 512 and heads == key_heads:
    rows = STEP_SCORES // (heads * block_kv)
    block_q = min(queries, max(block_q, _even(queries, max(1, min(rows // group, 1024)))))
  return Tiling(Sizes(*sizes, block_q, block_kv), heads)


def check_heads(operands: Operands, requested: BlockSizes) -> None:
  """Checks the number of key heads that are computed together.

  Args:
    operands: only shapes count.
    requested: sizes fixed by the caller.

  Raises:
    ValueError: the requested number does not divide the key heads.
  """
  wanted, key_heads = requested.block_heads, operands.key.shape[2]
  if wanted and wanted < key_heads and key_heads % wanted:
    raise ValueError(f"block_sizes.block_heads: got {wanted}; expected a divisor of the "
                     f"{key_heads} key heads on a device, or at least as many (all at once)")


def is_short(operands: Operands, requested: BlockSizes) -> bool:
  """Returns whether a single block holds all scores, so that a loop has nothing to loop over.

  Args:
    operands: only shapes count.
    requested: sizes fixed by the caller.
  """
  (batch, queries, heads, _), keys = operands.query.shape, operands.key.shape[1]
  fixed = requested._replace(vmem_limit_bytes=None)
  return (all(size is None for size in fixed) and are_known(batch, queries, keys)
          and max(queries, keys) <= SHORT_BLOCK
          and batch * heads * queries * keys <= SHORT_SCORES)


def decode_block(keys: int, elements: int) -> int:
  """Returns the keys of a block in decoding, a power of two, at most half of all.

  Where a single row has a single block, XLA:CPU removes both loops, and then rounds otherwise than
  in a batch.

  Args:
    keys: S.
    elements: numbers of all heads in one key.
  """
  return _power_of_two(max(1, min(keys // 2, max(64, DECODE_ELEMENTS // elements))))


def decode_large_block(keys: int, elements: int) -> int:
  """Returns the keys of a large block in decoding, at most half of all.

  XLA:CPU removes a loop of one step, and computes its body in one thread.

  Args:
    keys: S.
    elements: numbers of all heads in one key.
  """
  return _power_of_two(max(1, min(keys // 2, DECODE_ELEMENTS_LARGE // elements)))


def _power_of_two(most: int) -> int:
  """Returns the largest power of two up to `most`, at least 1."""
  return 1 << max(0, most.bit_length() - 1)


def _even(length: int, block: int) -> int:
  """Returns a multiple of 16 near `block` that divides `length` with little padding."""
  return length if length <= block else cdiv(cdiv(length, cdiv(length, block)), 16) * 16
