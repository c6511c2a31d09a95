# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages in plain XLA: only the pages that a query sees are read.

Loops over requests, over blocks of a request's queries, and over blocks of the pages these see,
with trip counts from the lengths: the time is that of the live tokens, however wide the page table.
`kernels.common.paged_operands` says where blocks begin, and which results have the same bits.

A block of queries has block_rows = block_q * G rows (token-major).
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged import layouts, ops, page_stripes
from attn_core.kernels.common import matmul_precision, paged_operands
from attn_core.kernels.common.paged_operands import BlockedInputs, Index, QueryBlock
from attn_core.kernels.xla import score_tiles
from attn_core.masks import mask as mask_lib, tile
from attn_core.score_mods import evaluate, score_mod
from attn_core.types import PagedSpec


def keys_and_values(inputs: BlockedInputs, request: Index,
                    block_index: Index) -> tuple[jax.Array, jax.Array]:
  """Returns keys [K, block_kv, D] and values [K, block_kv, E] of a request's key block."""
  return ops.read(inputs.cache, page_ids(inputs, request, block_index), inputs.heads,
                    inputs.query.dtype)


def page_ids(inputs: BlockedInputs, request: Index, block_index: Index) -> jax.Array:
  """Returns the pages of a key block, int32 [block_pages]."""
  return lax.dynamic_slice(inputs.tables, tile.int32s((request, block_index * inputs.block_pages)),
                           (1, inputs.block_pages))[0]


def put_rows(inputs: BlockedInputs, block: QueryBlock, x: jax.Array,
             rows: jax.Array) -> jax.Array:
  """Writes the live rows [K, block_rows, width] of a block into x; see `rows_of`."""
  rows = rows.astype(x.dtype)
  rows = rows.reshape(inputs.heads.key_heads, inputs.block_q, inputs.group, -1)
  rows = rows.transpose(1, 0, 2, 3).reshape(inputs.block_q, -1, x.shape[-1])
  old = lax.dynamic_slice_in_dim(x, block.row, inputs.block_q)
  rows = jnp.where(block.live[:, None, None], rows, old)
  return lax.dynamic_update_slice_in_dim(x, rows, block.row, 0)


def scores_of(inputs: BlockedInputs, rows: jax.Array, key: jax.Array) -> jax.Array:
  """Returns rows [K, block_rows, D] times keys [K, block_kv, D]: [K, block_rows, block_kv]."""
  return lax.dot_general(rows, key, (((2,), (2,)), ((0,), (0,))),
                         precision=matmul_precision.resolve(rows.dtype, inputs.spec.precision),
                         preferred_element_type=inputs.dtype)


def capped(inputs: BlockedInputs, scores: jax.Array) -> tuple[jax.Array, jax.Array | float]:
  """Returns scaled scores after the soft cap, and their derivative (a number, or like the scores).

  Args:
    inputs: the attention.
    scores: in any order of axes.
  """
  spec = inputs.spec
  slope: jax.Array | float = spec.softmax_scale
  logits = scores * jnp.asarray(spec.softmax_scale, inputs.dtype)
  if spec.logits_soft_cap is not None:
    share = jnp.tanh(logits / spec.logits_soft_cap)
    logits, slope = share * spec.logits_soft_cap, (1 - share * share) * spec.softmax_scale
  return logits, slope


def mod_tile(inputs: BlockedInputs, block: QueryBlock, block_index: Index, *,
             transposed: bool = False) -> score_tiles.ModTile | None:
  """Returns the score mod of a query block and a key block; None: the call has none."""
  if not inputs.spec.has_score_mod:
    return None
  heads = inputs.query.shape[1]
  first, _ = paged_operands.query_positions(inputs, block.request)
  query, key = block.positions, _key_positions(inputs, block_index)
  if inputs.draft_mask is not None:
    drafts = _Drafts(inputs.draft_mask[block.request], first, inputs.spec)
    query, key = drafts.position(query), drafts.position(key)
  head = jnp.arange(heads, dtype=jnp.int32)
  head = head if inputs.head_offset is None else head + inputs.head_offset
  index = block.row + jnp.arange(inputs.block_q, dtype=jnp.int32)
  where = score_mod.ScoreTile(
      mask_lib.Coordinates(jnp.int32(0), head, index, key, query, key), inputs.group, transposed,
      is_block=True, is_consecutive=inputs.stripe is None and inputs.draft_mask is None)
  of_query = lambda x: where.orient(x.reshape(1, -1, 1))
  of_key = lambda x: where.orient(x.reshape(1, 1, -1))
  at = where.at._replace(
      head=where.orient(head.reshape(-1, 1, 1)), query_index=of_query(index),
      key_index=of_key(key), query_position=of_query(query), key_position=of_key(key))
  part = tile.Tile(0, 0, block.row, 0, heads, inputs.block_q, 1)
  return score_tiles.ModTile(
      inputs.spec.score_mod, evaluate.parts(inputs.spec.score_mod, inputs.mods, part),
      where._replace(at=at))


def visible(inputs: BlockedInputs, block: QueryBlock, block_index: Index) -> jax.Array:
  """Returns which keys of a key block the rows see, bool [block_rows, block_kv]."""
  spec = inputs.spec
  key = _key_positions(inputs, block_index)[None]
  query = block.positions[:, None]
  first, _ = paged_operands.query_positions(inputs, block.request)
  seen = block.live[:, None] & (key < inputs.lengths[block.request])
  if inputs.scope == layouts.Scope.CACHED:
    seen = seen & (key < first)
  elif inputs.scope == layouts.Scope.NEW:
    seen = seen & (key >= first)
  left, right = paged_operands.window_of(spec)
  if spec.causal:
    seen, right = seen & (key <= query), None
  if inputs.draft_mask is not None:
    drafts = _Drafts(inputs.draft_mask[block.request], first, spec)
    seen, query, key = seen & drafts.seen(query, key), drafts.position(query), drafts.position(key)
  seen = seen if left is None else seen & (key >= query - left)
  seen = seen if right is None else seen & (key <= query + right)
  chunk = spec.chunk_size
  seen = seen if chunk is None else seen & (key // chunk == query // chunk)
  return jnp.repeat(seen, inputs.group, 0)


def _key_positions(inputs: BlockedInputs, block_index: Index) -> jax.Array:
  """Returns the places of a key block's tokens in their request, int32 [block_kv]."""
  token = block_index * inputs.block_kv + jnp.arange(inputs.block_kv, dtype=jnp.int32)
  return page_stripes.position_of(inputs.stripe, token)


class _Drafts(NamedTuple):
  """The new tokens of a request, of which each sees some."""

  mask: jax.Array  # bool [q, q]
  first: Index  # where they begin, tokens
  spec: PagedSpec

  def number(self, slots: jax.Array) -> jax.Array:
    """Returns which of the new tokens are in some places of the request; any for other places."""
    return jnp.clip(slots - self.first, 0, self.mask.shape[0] - 1)

  def seen(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns whether the token in a place [n, 1] sees that in a place [1, m], bool [n, m]."""
    return (key < self.first) | self.mask[self.number(query), self.number(key)]

  def position(self, slots: jax.Array) -> jax.Array:
    """Returns the positions of tokens; see `paged_operands.drafts_of`."""
    _, depth = paged_operands.drafts_of(self.mask, self.spec)
    return jnp.where(slots < self.first, slots, self.first + depth[self.number(slots)])
