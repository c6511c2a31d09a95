# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The blocks into which all kernels over pages cut their operands.

Blocks of queries and of keys begin at multiples of their size in positions. So a query is always
the same row of the same products: its result has the same bits alone, in any batch, in any pages
and in any chunk of a prefill, for given block sizes and without `distribution`.

Where the caller does not give block_q, and an aligned block has several queries, plain XLA computes
a request of few queries, such as a token and its drafts, as one block that begins at the first of
them: aligned blocks would have many rows that are not queries, or be two. Its result has the same
bits for every other content of the call and of the pages.

T is the number of tokens of the call, R of requests; block_rows = block_q * G rows (token-major)
belong to a block of queries.
"""

from typing import NamedTuple, Sequence

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.caches.paged import layouts, page_stripes
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import dense_operands
from attn_core.kernels.common.contract import Residuals
from attn_core.score_mods import score_mod
from attn_core.types import BlockSizes, PagedOperands, PagedSpec, cdiv

BLOCK_ROWS = 64  # rows of a query block where requests bring more than one query
BLOCK_KV = 256  # tokens of a key block
FEW_QUERIES = 8  # of a request that is one block
# Tokens per request beyond which a call is taken to have long parts of prompts only.
MANY_QUERIES = 64

Index = jax.Array | int  # a number that may be traced, int32


class BlockedInputs(NamedTuple):
  """Inputs of one attention over pages, padded to whole blocks."""

  query: jax.Array  # [block_q + T + block_q, H, D]
  cache: Pages
  tables: jax.Array  # int32 [R, row_pages], whole key blocks, every entry within the pool
  lengths: jax.Array  # int32 [R], tokens of the requests in all stripes
  starts: jax.Array  # int32 [R + 1]
  sinks: jax.Array | None  # [H]
  spec: PagedSpec
  heads: layouts.Heads
  block_q: int
  block_pages: int
  stripe: page_stripes.Stripe | None
  draft_mask: jax.Array | None  # bool [R, q, q]; see `PagesMetadata`
  scope: layouts.Scope
  mods: tuple[jax.Array, ...]  # of the score mod; those per query are padded as the query is
  head_offset: jax.Array | None  # int32, the global number of head 0
  part: "RequestPart"

  @property
  def group(self) -> int:
    """G, query heads per key head."""
    return self.query.shape[1] // self.heads.key_heads

  @property
  def block_kv(self) -> int:
    """Tokens of a key block."""
    return self.block_pages * layouts.page_size(self.cache)

  @property
  def dtype(self) -> DTypeLike:
    """The dtype of logits, sums and accumulators."""
    return self.spec.softmax_dtype


class RequestPart(NamedTuple):
  """Requests that are computed alike."""

  first: Index
  end: Index
  block_q: int  # query tokens of a block
  more_than: int = 0  # requests with at most so many queries are left out
  # Whether each request is one block, which begins at its first query; those with more queries than
  # a block has are left out.
  one_block: bool = False


class QueryBlock(NamedTuple):
  """Consecutive positions of a request; some may not be queries of this call."""

  request: Index
  row: Index  # where the block begins in padded arrays of tokens
  positions: jax.Array  # int32 [block_q]
  live: jax.Array  # bool [block_q]: whether it is a query of this call


def assert_operands(operands: PagedOperands, heads: layouts.Heads) -> None:
  """Asserts ranks, shapes and dtypes of the operands while a kernel is traced.

  Raises:
    AssertionError: query is not float [T, H, D] with as many heads as a multiple of the key heads,
      sinks are not [H], or the tables do not have two axes.
  """
  import chex  # Takes 0.13 s, and is used only where a kernel is traced.
  chex.assert_rank([operands.query, operands.metadata.page_tables], [3, 2])
  chex.assert_type(operands.query, float)
  chex.assert_is_divisible(operands.query.shape[1], heads.key_heads)
  if operands.sinks is not None:
    chex.assert_shape(operands.sinks, (operands.query.shape[1],))


def assert_residuals(operands: PagedOperands, heads: layouts.Heads, *residuals: Residuals) -> None:
  """Asserts the shapes of results of a forward, or of their cotangents.

  Raises:
    AssertionError: out is not [T, H, E] or lse not [T, H, 1].
  """
  import chex  # As in `assert_operands`.
  shape = operands.query.shape[:2]
  for out, lse in residuals:
    chex.assert_shape(out, (*shape, heads.value_width))
    chex.assert_shape(lse, (*shape, 1))


def choose_block_sizes(
    operands: PagedOperands, requested: BlockSizes, group: int) -> tuple[int, int]:
  """Returns (query tokens, pages) of a block; both depend on static shapes only.

  Args:
    operands: only shapes count.
    requested: sizes fixed by the caller; None fields are chosen here.
    group: G, query heads per key head.
  """
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  single = tokens <= requests  # where all requests have a query, each has one
  block_q = requested.block_q or (1 if single else max(1, BLOCK_ROWS // group))
  if operands.metadata.query_start_loc is None:
    block_q = 1  # a request has one query
  block_kv = requested.block_kv or BLOCK_KV
  return block_q, cdiv(block_kv, layouts.page_size(operands.cache))


def block_inputs(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
                 sizes: tuple[int, int], part: RequestPart | None = None) -> BlockedInputs:
  """Pads the queries and the tables to whole blocks.

  Args:
    operands: the arrays.
    spec: what is computed.
    heads: the heads in the pages, without their padding.
    sizes: (query tokens, pages) of a block.
    part: the requests that are computed, in blocks of this size; None: any.
  """
  block_q, block_pages = sizes
  if part is None:
    part = RequestPart(0, operands.metadata.context_lens.shape[0], block_q)
  metadata = operands.metadata
  tables = dense_operands.pad_axis(
      metadata.page_tables, 1, -metadata.page_tables.shape[1] % block_pages)
  return BlockedInputs(
      pad_tokens(operands.query, block_q), operands.cache,
      jnp.clip(tables, 0, layouts.num_pages(operands.cache) - 1), metadata.context_lens,
      layouts.query_starts(metadata), operands.sinks, spec, heads, block_q, block_pages,
      operands.stripe, metadata.draft_mask, metadata.scope, pad_mods(operands.mods, spec, block_q),
      operands.head_offset, part)


def pad_tokens(x: jax.Array, amount: int) -> jax.Array:
  """Puts `amount` zero rows in front of and behind x [T, ...]."""
  return jnp.pad(x, ((amount, amount),) + ((0, 0),) * (x.ndim - 1))


def has_tokens(mods: Sequence[jax.Array], spec: PagedSpec) -> list[bool]:
  """Returns which arrays of the score mod have a number for each query token, [1, H or 1, T, 1]."""
  roles = score_mod.structure_roles(spec.score_mod)
  return [role == score_mod.PAIR and x.shape[2] != 1 for x, role in zip(mods, roles, strict=True)]


def pad_mods(mods: Sequence[jax.Array], spec: PagedSpec, amount: int) -> tuple[jax.Array, ...]:
  """Puts `amount` zero tokens in front of and behind arrays of the score mod that have tokens."""
  widths = ((0, 0), (0, 0), (amount, amount), (0, 0))
  return tuple(jnp.pad(x, widths) if tokens else x
               for x, tokens in zip(mods, has_tokens(mods, spec)))


def request_ranges(operands: PagedOperands, block_q: int) -> list[tuple[Index, Index, int]]:
  """Returns (first request, end, tokens of a query block) for requests that are computed alike."""
  distribution = operands.metadata.distribution
  end = layouts.rows_in_use(operands.metadata)
  if distribution is None or block_q == 1:
    return [(jnp.int32(0), end, block_q)]
  return [(jnp.int32(0), distribution[0], 1), (distribution[0], end, block_q)]


def request_parts(operands: PagedOperands, requested: BlockSizes,
                  block_q: int) -> list[RequestPart]:
  """Returns the parts of a call: those of `request_ranges`, and requests of few queries.

  Args:
    operands: only shapes count, and the numbers of requests.
    requested: sizes fixed by the caller.
    block_q: query tokens of an aligned block.
  """
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  mask = operands.metadata.draft_mask
  most = tokens if mask is None else min(tokens, mask.shape[1])  # queries that a request can have
  *alike, (begin, end, block_q) = request_ranges(operands, block_q)
  parts = [RequestPart(*part) for part in alike]
  few = 0
  if not requested.block_q and block_q > 1 and tokens <= MANY_QUERIES * requests:
    few = most if most <= FEW_QUERIES else min(cdiv(tokens, requests), FEW_QUERIES)
    parts.append(RequestPart(begin, end, few, one_block=True))
  return [*parts, RequestPart(begin, end, block_q, few)] if most > few else parts


def query_blocks(inputs: BlockedInputs, request: Index) -> tuple[Index, Index]:
  """Returns (first, end) of a request's query blocks, numbered from position 0."""
  first, end = query_positions(inputs, request)
  if inputs.part.one_block:
    fits = (first < end) & (end - first <= inputs.block_q)
    return jnp.int32(0), jnp.where(fits, jnp.int32(1), jnp.int32(0))
  empty = end - first <= inputs.part.more_than
  first_block = first // inputs.block_q
  return first_block, jnp.where(empty, first_block, (end - 1) // inputs.block_q + 1)


def query_positions(inputs: BlockedInputs, request: Index) -> tuple[Index, Index]:
  """Returns (first, end) of the positions of a request's queries."""
  length = inputs.lengths[request]
  return length - (inputs.starts[request + 1] - inputs.starts[request]), length


def query_block(inputs: BlockedInputs, request: Index, block_index: Index) -> QueryBlock:
  """Returns one of a request's query blocks."""
  first, end = query_positions(inputs, request)
  begin = first if inputs.part.one_block else block_index * inputs.block_q
  positions = begin + jnp.arange(inputs.block_q, dtype=jnp.int32)
  row = inputs.starts[request] + begin - first + inputs.block_q
  return QueryBlock(request, row, positions, (positions >= first) & (positions < end))


def key_blocks(inputs: BlockedInputs, block: QueryBlock) -> tuple[Index, Index]:
  """Returns (first, end) of the key blocks that some query of the block attends to."""
  length = inputs.lengths[block.request]
  first, end = query_positions(inputs, block.request)
  lowest = jnp.maximum(block.positions[0], first)
  highest = jnp.minimum(block.positions[-1], end - 1)
  left, right = window_of(inputs.spec)
  if inputs.draft_mask is not None:
    # A position in a tree of drafts is between that of the first and that of the token's slot.
    lowest = jnp.asarray(first)
    highest = highest if inputs.spec.causal else length - 1
  begin = jnp.int32(0) if left is None else jnp.maximum(lowest - left, 0)
  stop = length if right is None else jnp.minimum(length, highest + right + 1)
  chunk = inputs.spec.chunk_size
  if chunk is not None:
    begin = jnp.maximum(begin, lowest // chunk * chunk)
    stop = jnp.minimum(stop, highest // chunk * chunk + chunk)
  if inputs.scope == layouts.Scope.CACHED:
    stop = jnp.minimum(stop, first)
  elif inputs.scope == layouts.Scope.NEW:
    begin = jnp.maximum(begin, first)
  begin, stop = (page_stripes.held(inputs.stripe, x) for x in (begin, jnp.maximum(stop, 0)))
  return begin // inputs.block_kv, cdiv(stop, inputs.block_kv)


def drafts_of(mask: jax.Array, spec: PagedSpec) -> tuple[jax.Array, jax.Array]:
  """Returns what new tokens see of each other, and their positions after the first of them.

  A token's position is the number of other new tokens that it sees.

  Args:
    mask: bool [..., q, q], see `PagesMetadata.draft_mask`.
    spec: if it is causal, no token sees a later one.

  Returns:
    bool [..., q, q] and int32 [..., q].
  """
  mask = jnp.tril(mask) if spec.causal else mask
  return mask, (mask & ~np.eye(mask.shape[-1], dtype=bool)).sum(-1, dtype=jnp.int32)


def window_of(spec: PagedSpec) -> tuple[int | None, int | None]:
  """Returns (left, right), the window in tokens, causality included; None: unbounded."""
  left, right = spec.window
  return left, 0 if spec.causal else right


def rows_of(inputs: BlockedInputs, block: QueryBlock, x: jax.Array) -> jax.Array:
  """Returns a block's rows [K, block_rows, width] of x [block_q + T + block_q, H, width]."""
  x = lax.dynamic_slice_in_dim(x, block.row, inputs.block_q)
  x = x.reshape(inputs.block_q, inputs.heads.key_heads, inputs.group, x.shape[-1])
  return x.transpose(1, 0, 2, 3).reshape(inputs.heads.key_heads, -1, x.shape[-1])


def live_rows_of(inputs: BlockedInputs, block: QueryBlock, x: jax.Array) -> jax.Array:
  """Returns `rows_of` with zeros in rows that are not queries of this call."""
  return jnp.where(jnp.repeat(block.live, inputs.group)[:, None], rows_of(inputs, block, x), 0)


def rows_of_mod(inputs: BlockedInputs, blocks: QueryBlock, x: jax.Array) -> jax.Array:
  """Returns an array of the score mod for rows of blocks, [blocks or 1, K, block_q, G, n].

  Args:
    inputs: the call, cut into blocks.
    blocks: arrays of all blocks.
    x: [1, H or 1, padded tokens or 1, n].
  """
  heads, block_q = inputs.query.shape[1], inputs.block_q
  x = jnp.broadcast_to(x, (1, heads, *x.shape[2:]))
  if x.shape[2] > 1:  # of all tokens: those of every block
    token = jnp.asarray(blocks.row)[:, None] + jnp.arange(block_q, dtype=jnp.int32)
    x = jnp.take(x[0], token, 1, mode="clip").swapaxes(0, 1)
  else:
    x = jnp.broadcast_to(x, (1, heads, block_q, x.shape[3]))
  return x.reshape(x.shape[0], -1, inputs.group, *x.shape[2:]).swapaxes(2, 3)


def row_sinks(inputs: BlockedInputs) -> jax.Array | None:
  """Returns the sinks of a block's rows, [K, block_rows, 1], or None."""
  if inputs.sinks is None:
    return None
  sinks = inputs.sinks.astype(inputs.dtype).reshape(inputs.heads.key_heads, inputs.group)
  return jnp.tile(sinks, (1, inputs.block_q))[..., None]
