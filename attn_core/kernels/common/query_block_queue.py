"""The query blocks of all requests in one queue, for kernels whose grid runs over it.

Letters: T tokens, R requests, Q tokens of a block, N places of the queue.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.kernels.xla import paged_blocks as paged


class Queue(NamedTuple):
  """Blocks in the order of their requests, and where tokens are in it."""

  blocks: paged.QueryBlock  # [N]; at places that are not taken any
  count: Any  # int32 [1]: how many places are taken, the first ones
  place: Any  # int32 [T]: of the block of a token; 0 where it is no query
  row: Any  # int32 [T]: of the token in its block
  live: Any  # bool [T]: whether it is a query of one of the requests


def places(tokens: int, requests: int, block_q: int) -> int:
  """N: how many blocks there can be."""
  return tokens if block_q == 1 else tokens // block_q + 2 * requests


def of_requests(problem: paged.Problem, tokens: int, among=None) -> Queue:
  """The queue, whatever the metadata says.

  Args:
    problem: of which `block_q` is Q.
    tokens: T.
    among: (first, end) of the requests that are in it; None: all.
  """
  requests, block_q = problem.lengths.shape[0], problem.block_q
  is_in = lambda request: True if among is None else (
      (request >= among[0]) & (request < among[1]))
  every = jnp.arange(requests, dtype=jnp.int32)
  first, end = jax.vmap(lambda r: paged.query_blocks(problem, r))(every)
  first = jnp.maximum(first, 0)
  numbers = jnp.where(is_in(every), jnp.maximum(end, first) - first, 0)
  ends = jnp.cumsum(numbers).astype(jnp.int32)
  offsets = ends - numbers
  owner_of = lambda bounds, number: jnp.minimum(jnp.searchsorted(
      bounds, number, side="right", method="compare_all").astype(jnp.int32), requests - 1)
  number = jnp.arange(places(tokens, requests, block_q), dtype=jnp.int32)
  request = owner_of(ends, number)
  blocks = jax.vmap(lambda r, i: paged.query_block(problem, r, i))(
      request, first[request] + number - offsets[request])

  token = jnp.arange(tokens, dtype=jnp.int32)
  owner = owner_of(problem.starts[1:], token)
  position = problem.lengths[owner] - problem.starts[owner + 1] + token
  live = (token < problem.starts[-1]) & (position >= 0) & is_in(owner)
  place = jnp.where(live, offsets[owner] + position // block_q - first[owner], 0)
  return Queue(blocks, jnp.minimum(ends[-1:], len(number)), place,
               jnp.where(live, position % block_q, 0), live)
