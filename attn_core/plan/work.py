# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the blocks that the kernels of a sharded sequence visit, per device."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from attn_core.masks import block_map, constructors, mask as mask_lib
from attn_core.sharding import token_order
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import TokenOrder

# About the largest number of pairs of blocks that are evaluated: longer sequences are sampled.
CELLS = 2**20
FEWEST_MEMBERS = 16  # smallest number of sampled members, if there are as many

# Matrix products of an attention: (number of products with D, number with E).
_FORWARD_PRODUCTS = (1, 1)  # scores, output
_BACKWARD_PRODUCTS = (3, 2)  # scores again, d_query, d_key; d_weights, d_value

# Role of a mask's array -> {axis: whether it counts queries or keys}.
_TOKEN_AXES = {mask_lib.QUERY: {1: mask_lib.QUERY}, mask_lib.KEY: {1: mask_lib.KEY},
           mask_lib.DENSE: {2: mask_lib.QUERY, 3: mask_lib.KEY}}


def flops_of_pair(width: int, value_width: int, backward: bool) -> int:
  """Returns the flops of a pair: 2 (D + E) in the forward, 2 (3 D + 2 E) in the backward."""
  of_width, of_value_width = _BACKWARD_PRODUCTS if backward else _FORWARD_PRODUCTS
  return 2 * (of_width * width + of_value_width * value_width)


class Visits(NamedTuple):
  """Visited blocks of each member, for one batch row and head (means over both)."""

  members: np.ndarray  # int [num_members]: the counted members
  blocks: np.ndarray  # float [num_members, num_sources], by owner of the keys; gathered: 1 source
  pairs: float  # pairs of a query and a key in a block

  @property
  def imbalance(self) -> float:
    """Visited blocks of the busiest member over the mean; 1 if there are none."""
    each = self.blocks.sum(1)
    return float(each.max() / each.mean()) if each.any() else 1.0


def visits(sequence: Sequence, mask: mask_lib.Mask, block: tuple[int, int]) -> Visits:
  """Counts the blocks that are not EMPTY in the block maps of all ring steps.

  Exact for up to CELLS pairs of blocks. Longer sequences are sampled: evenly spaced members, with
  the first and the last, and evenly spaced query blocks of each, against all keys. The sample is
  exact for work that is linear along the sequence, as under a causal mask, or constant.

  Args:
    sequence: the sharding of the sequence.
    mask: mask of the whole sequence, with numpy arrays in the natural order of the tokens.
    block: queries and keys of a block (tokens).
  """
  own_queries, own_keys = (sequence.padded(length) // sequence.members
                           for length in (sequence.queries, sequence.keys))
  sources = 1 if sequence.gathers else sequence.members
  own_keys *= sequence.members // sources
  split = _tokens if set(mask_lib.leaf_roles(mask)) & {*_TOKEN_AXES} else _ends
  block_q, block_kv = min(block[0], own_queries), min(block[1], own_keys)
  rows = split(sequence.layout, sequence.padded(sequence.queries), sequence.shards,
               sequence.members, block_q)
  columns = split(sequence.layout, sequence.padded(sequence.keys), sequence.shards, sources,
                  block_kv)
  (_, query_blocks, _), (_, key_blocks, _) = rows.shape, columns.shape
  members, picked = _sample(sequence, query_blocks, CELLS // (sources * key_blocks))
  rows = rows[np.ix_(members, picked)]
  kinds = _kinds(mask, sequence, rows, columns)
  seen = (kinds != block_map.EMPTY).mean((0, 1))
  counts = seen.reshape(len(members), len(picked), sources, key_blocks).sum((1, 3))
  return Visits(members, counts * (query_blocks / len(picked)),
                own_queries / query_blocks * own_keys / key_blocks)


def _kinds(mask: mask_lib.Mask, sequence: Sequence, rows: np.ndarray,
           columns: np.ndarray) -> np.ndarray:
  """Classifies all pairs of blocks of rows and columns [..., tokens of a block]."""
  sizes = block_map.Sizes(rows.size, columns.size, rows.shape[-1], columns.shape[-1])
  rows, columns = rows.reshape(-1), columns.reshape(-1)
  mask = _taken(mask, sequence, rows, columns)
  return block_map.host_kinds(
      constructors.placed(mask, rows[None], columns[None], sequence.size), sizes)


def _sample(sequence: Sequence, query_blocks: int, most: int) -> tuple[np.ndarray, np.ndarray]:
  """Samples (members, numbers of their query blocks), about `most` blocks in total.

  The runs of consecutive tokens of a shard are all sampled at the same positions, or none is.
  """
  many = min(sequence.members, max(most // query_blocks, FEWEST_MEMBERS))
  members = np.linspace(0, sequence.members - 1, many).round().astype(np.int32)
  each = min(query_blocks, max(most // many, 2))
  pieces = token_order.pieces(sequence.layout)
  a_run = query_blocks // (sequence.group * pieces)
  if each == query_blocks or sequence.layout == "contiguous" or not a_run:
    return members, _middles(query_blocks, each)
  of_run = min(a_run, max(each // pieces, 1))
  shards = _middles(sequence.group, min(sequence.group, max(each // (pieces * of_run), 1)))
  runs = (shards[:, None] * pieces + np.arange(pieces)).reshape(-1, 1)
  return members, (runs * a_run + _middles(a_run, of_run)).reshape(-1)


def _middles(count: int, picked: int) -> np.ndarray:
  """Returns the middles of `picked` equal parts of range(count), halves rounded down and up."""
  middle = (np.arange(picked) + 0.5) * count / picked - 0.5
  return np.where(np.arange(picked) % 2, np.ceil(middle), np.floor(middle)).astype(np.int32)


def _tokens(layout: TokenOrder, length: int, shards: int, parts: int, block: int) -> np.ndarray:
  """Returns the tokens of blocks [parts, blocks of a part, block], padded by the last token."""
  every_shard = token_order.numbers(shards)
  tokens = np.asarray(token_order.tokens_of(layout, length, shards, every_shard)).reshape(parts, -1)
  if tokens.shape[1] % block:
    tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % block)), mode="edge")
  return tokens.reshape(parts, -1, block)


@functools.lru_cache(maxsize=64)
def _ends(layout: TokenOrder, length: int, shards: int, parts: int, block: int) -> np.ndarray:
  """Returns the smallest and the largest token of blocks, [parts, blocks of a part, 2]."""
  if parts < shards and length // shards % block == 0:  # every part consists of consecutive shards
    return _ends(layout, length, shards, shards, block).reshape(parts, -1, 2)
  tokens = _tokens(layout, length, shards, parts, block)
  return np.stack([tokens.min(-1), tokens.max(-1)], -1)


def _taken(mask: mask_lib.Mask, sequence: Sequence, rows: np.ndarray,
           columns: np.ndarray) -> mask_lib.Mask:
  """Returns the mask with its arrays at some rows and columns, zeros where these are padding."""
  tokens_of = {mask_lib.QUERY: (rows, sequence.queries), mask_lib.KEY: (columns, sequence.keys)}
  def take(x: np.ndarray, role: str) -> np.ndarray:
    for axis, counted in _TOKEN_AXES.get(role, {}).items():
      tokens, length = tokens_of[counted]
      if x.shape[axis] > 1:
        exists = np.expand_dims(tokens < length, tuple(range(1, x.ndim - axis)))
        x = np.where(exists, np.take(x, np.minimum(tokens, length - 1), axis), 0).astype(x.dtype)
    return x
  arrays, structure = jax.tree.flatten(mask)
  return jax.tree.unflatten(structure, map(take, arrays, mask_lib.leaf_roles(mask)))
