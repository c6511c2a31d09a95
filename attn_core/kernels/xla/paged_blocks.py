"""Attention over pages in plain XLA: only the pages that a query sees are read.

Loops over requests, over blocks of a request's queries, and over blocks of the pages these see,
with trip counts from the lengths: the time is that of the live tokens, however wide the page table.
Blocks of queries and of keys are cut at multiples of their size in positions, so a query is always
the same row of the same products: its result has the same bits alone, in any batch, in any pages
and in any chunk of a prefill, for given block sizes and without `distribution`.

Letters: T tokens of the call, R requests, H query heads, K key heads, G = H / K, D and E widths;
Q tokens of a query block, M = Q * G its rows (token-major), C tokens of a key block.
"""

from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged import ops as pages, page_stripes as stripes
from attn_core.kernels.xla import tile_ops as steps
from attn_core.masks import tile as tiles
from attn_core.types import BlockSizes, PagedSpec, cdiv

BLOCK_ROWS = 64  # rows of a query block where requests bring more than one query
BLOCK_KV = 256  # tokens of a key block


class PagedOperands(NamedTuple):
  """The arrays of one attention over pages."""

  query: Any  # [T, H, D], the requests' queries one after the other
  cache: Any  # PagesV1, PagesV2 or PagesV3
  metadata: pages.PagesMetadata
  sinks: Any = None  # float [H]: a logit per head without a value
  key: Any = None  # [T, K, D]: to be written first; None: everything is in the pages
  value: Any = None  # [T, K, E]
  stripe: Any = None  # a Stripe, whose pages the tables and the cache have; None: all


class Problem(NamedTuple):
  """One attention, cut into blocks."""

  query: Any  # [Q + T + Q, H, D]
  cache: Any
  tables: Any  # int32 [R, N], padded to whole key blocks, every entry within the pool
  lengths: Any  # int32 [R], of all stripes
  starts: Any  # int32 [R + 1]
  sinks: Any  # [H] or None
  spec: PagedSpec
  heads: pages.Heads
  block_q: int
  block_pages: int
  stripe: Any

  @property
  def group(self) -> int:
    return self.query.shape[1] // self.heads.key_heads

  @property
  def block_kv(self) -> int:
    return self.block_pages * pages.page_size(self.cache)

  @property
  def dtype(self):
    """The dtype of logits, sums and accumulators."""
    return self.spec.softmax_dtype


class QueryBlock(NamedTuple):
  """Q tokens of a request, at multiples of Q in positions; some may not be its queries."""

  request: Any
  row: Any  # where the block begins in padded arrays of tokens
  positions: Any  # int32 [Q]
  live: Any  # bool [Q]: whether it is a query of this call


def sizes_of(operands: PagedOperands, block_sizes: BlockSizes, group: int) -> tuple[int, int]:
  """(query tokens, pages) of a block; both are functions of static shapes only."""
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  single = tokens <= requests  # where all requests have a query, each has one
  block_q = block_sizes.block_q or (1 if single else max(1, BLOCK_ROWS // group))
  if operands.metadata.query_start_loc is None:
    block_q = 1  # a request has no more
  block_kv = block_sizes.block_kv or BLOCK_KV
  return block_q, cdiv(block_kv, pages.page_size(operands.cache))


def cut(operands: PagedOperands, spec: PagedSpec, heads: pages.Heads,
        sizes: tuple[int, int]) -> Problem:
  """Pads the queries and the tables to whole blocks."""
  block_q, block_pages = sizes
  metadata = operands.metadata
  tables = steps.pad_axis(metadata.page_tables, 1, -metadata.page_tables.shape[1] % block_pages)
  return Problem(
      pad_tokens(operands.query, block_q), operands.cache,
      jnp.clip(tables, 0, pages.num_pages(operands.cache) - 1), metadata.context_lens,
      pages.query_starts(metadata), operands.sinks, spec, heads, block_q, block_pages,
      operands.stripe)


def pad_tokens(x, amount: int):
  """[T, ...] with so many zeros in front and behind."""
  return jnp.pad(x, ((amount, amount),) + ((0, 0),) * (x.ndim - 1))


def classes(operands: PagedOperands, block_q: int):
  """(first request, end, tokens of a query block) of requests that are computed alike."""
  distribution = operands.metadata.distribution
  end = pages.rows_in_use(operands.metadata)
  if distribution is None or block_q == 1:
    return [(jnp.int32(0), end, block_q)]
  return [(jnp.int32(0), distribution[0], 1), (distribution[0], end, block_q)]


def query_blocks(problem: Problem, request):
  """(first, end) of a request's query blocks, numbered from position 0."""
  first, end = _positions(problem, request)
  empty = first >= end
  first_block = first // problem.block_q
  return first_block, jnp.where(empty, first_block, (end - 1) // problem.block_q + 1)


def _positions(problem, request):
  """(position of the first query, of the last one + 1)."""
  length = problem.lengths[request]
  return length - (problem.starts[request + 1] - problem.starts[request]), length


def query_block(problem: Problem, request, number) -> QueryBlock:
  """A request's query block by its number."""
  first, end = _positions(problem, request)
  begin = number * problem.block_q
  positions = begin + jnp.arange(problem.block_q, dtype=jnp.int32)
  row = problem.starts[request] + begin - first + problem.block_q
  return QueryBlock(request, row, positions, (positions >= first) & (positions < end))


def key_blocks(problem: Problem, block: QueryBlock):
  """(first, end) of the key blocks that some query of the block sees."""
  length = problem.lengths[block.request]
  first, end = _positions(problem, block.request)
  lowest = jnp.maximum(block.positions[0], first)
  highest = jnp.minimum(block.positions[-1], end - 1)
  left, right = reach(problem.spec)
  begin = jnp.int32(0) if left is None else jnp.maximum(lowest - left, 0)
  stop = length if right is None else jnp.minimum(length, highest + right + 1)
  begin, stop = (stripes.held(problem.stripe, x) for x in (begin, jnp.maximum(stop, 0)))
  return begin // problem.block_kv, cdiv(stop, problem.block_kv)


def reach(spec: PagedSpec) -> tuple[int | None, int | None]:
  """(left, right): how far a query sees, causality included; None: without end."""
  left, right = spec.window
  return left, 0 if spec.causal else right


def keys_and_values(problem: Problem, request, number):
  """Keys [K, C, D] and values [K, C, E] of a request's key block."""
  return pages.read(problem.cache, page_ids(problem, request, number), problem.heads,
                    problem.query.dtype)


def page_ids(problem: Problem, request, number):
  """int32 [pages of a key block]."""
  return lax.dynamic_slice(problem.tables, tiles.int32s((request, number * problem.block_pages)),
                           (1, problem.block_pages))[0]


def rows_of(problem: Problem, block: QueryBlock, x):
  """[Q + T + Q, H, W] -> [K, M, W]: the block's rows."""
  x = lax.dynamic_slice_in_dim(x, block.row, problem.block_q)
  x = x.reshape(problem.block_q, problem.heads.key_heads, problem.group, x.shape[-1])
  return x.transpose(1, 0, 2, 3).reshape(problem.heads.key_heads, -1, x.shape[-1])


def put_rows(problem: Problem, block: QueryBlock, x, rows):
  """The inverse of `rows_of`; only the live rows are written."""
  rows = rows.astype(x.dtype)
  rows = rows.reshape(problem.heads.key_heads, problem.block_q, problem.group, -1)
  rows = rows.transpose(1, 0, 2, 3).reshape(problem.block_q, -1, x.shape[-1])
  old = lax.dynamic_slice_in_dim(x, block.row, problem.block_q)
  rows = jnp.where(block.live[:, None, None], rows, old)
  return lax.dynamic_update_slice_in_dim(x, rows, block.row, 0)


def live_rows_of(problem: Problem, block: QueryBlock, x):
  """`rows_of`, with zeros instead of what is not a query of this call."""
  return jnp.where(jnp.repeat(block.live, problem.group)[:, None], rows_of(problem, block, x), 0)


def scores_of(problem: Problem, rows, key):
  """Rows [K, M, D] times keys [K, C, D]: [K, M, C]."""
  return lax.dot_general(rows, key, (((2,), (2,)), ((0,), (0,))), precision=problem.spec.precision,
                         preferred_element_type=problem.dtype)


def logits_of(problem: Problem, scores, seen):
  """Logits, -inf where hidden, and d logit / d score (a number, or like the logits).

  Args:
    problem: what is computed.
    scores: in any order of axes.
    seen: bool, broadcastable to the scores.
  """
  spec = problem.spec
  logits, slope = scores * jnp.asarray(spec.softmax_scale, problem.dtype), spec.softmax_scale
  if spec.logits_soft_cap is not None:
    capped = jnp.tanh(logits / spec.logits_soft_cap)
    logits, slope = capped * spec.logits_soft_cap, (1 - capped * capped) * spec.softmax_scale
  return jnp.where(seen, logits, -jnp.inf), slope


def visible(problem: Problem, block: QueryBlock, number):
  """Which keys of a block the rows see, bool [M, C]."""
  token = number * problem.block_kv + jnp.arange(problem.block_kv, dtype=jnp.int32)
  key = stripes.position_of(problem.stripe, token)
  query = block.positions[:, None]
  left, right = reach(problem.spec)
  seen = block.live[:, None] & (key < problem.lengths[block.request])
  seen = seen if left is None else seen & (key >= query - left)
  seen = seen if right is None else seen & (key <= query + right)
  return jnp.repeat(seen, problem.group, 0)


def row_sinks(problem: Problem):
  """The sinks of a block's rows, [K, M, 1], or None."""
  if problem.sinks is None:
    return None
  sinks = problem.sinks.astype(problem.dtype).reshape(problem.heads.key_heads, problem.group)
  return jnp.tile(sinks, (1, problem.block_q))[..., None]
