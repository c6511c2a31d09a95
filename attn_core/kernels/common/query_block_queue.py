# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The query blocks of all requests in one queue, for kernels whose grid runs over it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_core.array_axes import count_reached
from attn_core.kernels.common import paged_operands
from attn_core.kernels.common.paged_operands import BlockedInputs, Index, QueryBlock


class QueryBlockQueue(NamedTuple):
  """Query blocks in the order of their requests, and the place of every token in them."""

  blocks: QueryBlock  # arrays [capacity, ...]; only the first `num_blocks` blocks are valid
  num_blocks: jax.Array  # int32 [1]
  block_index: jax.Array  # int32 [T]: the block of a token; 0 for tokens that are not live
  row: jax.Array  # int32 [T]: the token's row in its block
  live: jax.Array  # bool [T]: whether the token is a query of one of the requests


def capacity(tokens: int, requests: int, block_q: int) -> int:
  """Returns the largest possible number of blocks."""
  return tokens if block_q == 1 else tokens // block_q + 2 * requests


def make_queue(inputs: BlockedInputs, tokens: int,
               request_range: tuple[Index, Index] | None = None) -> QueryBlockQueue:
  """Returns the queue; valid for any metadata, consistent or not.

  Args:
    inputs: the call, cut into blocks.
    tokens: T.
    request_range: (first, end) of the requests in the queue; None: all requests.
  """
  requests, block_q = inputs.lengths.shape[0], inputs.block_q
  is_in = lambda request: True if request_range is None else (
      (request >= request_range[0]) & (request < request_range[1]))
  every = jnp.arange(requests, dtype=jnp.int32)
  first, end = jax.vmap(lambda r: paged_operands.query_blocks(inputs, r))(every)
  first = jnp.maximum(first, 0)
  counts = jnp.where(is_in(every), jnp.maximum(end, first) - first, 0)
  ends = jnp.cumsum(counts).astype(jnp.int32)
  offsets = ends - counts
  owner_of = lambda bounds, number: jnp.minimum(count_reached(bounds, number), requests - 1)
  number = jnp.arange(capacity(tokens, requests, block_q), dtype=jnp.int32)
  request = owner_of(ends, number)
  blocks = jax.vmap(lambda r, i: paged_operands.query_block(inputs, r, i))(
      request, first[request] + number - offsets[request])

  token = jnp.arange(tokens, dtype=jnp.int32)
  owner = owner_of(inputs.starts[1:], token)
  position = inputs.lengths[owner] - inputs.starts[owner + 1] + token
  found = (token >= inputs.starts[owner]) & (token < inputs.starts[-1])
  live = found & (position >= 0) & is_in(owner)
  if inputs.part.one_block:
    live = live & (counts[owner] > 0)  # a request of more queries has no block
  # A request that is one block begins at its first query.
  begin, _ = paged_operands.query_positions(inputs, owner)
  place = position - jnp.maximum(begin, 0) if inputs.part.one_block else position
  block_index = jnp.where(live, offsets[owner] + place // block_q - first[owner], 0)
  return QueryBlockQueue(blocks, jnp.minimum(ends[-1:], len(number)), block_index,
                         jnp.where(live, place % block_q, 0), live)
