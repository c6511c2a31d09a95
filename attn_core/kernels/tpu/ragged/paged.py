"""Attention over pages on TPUs, of any layout: which steps `stream` takes for which queries.

A step is one block of a request's queries, cut as in `xla.paged` at multiples of its size in
positions, so that a query's result has the same bits alone, in any batch, in any pages and in any
chunk of a prefill, for given block sizes and without `distribution`.

Letters: as in `xla.paged` and `stream`; N pages of a row of tables.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged import ops as pages
from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.tpu.ragged import common as step, kernel as stream
from attn_core.kernels.tpu.ragged.kv_layout import LANES, Pool, heads_apart
from attn_core.kernels.xla import paged_blocks as paged
from attn_core.kernels.common import query_block_queue as queue
from attn_core.types import BlockSizes, PagedSpec, cdiv

BLOCK_ROWS = 1024  # rows of a step, at most, where requests bring more than one query
BLOCK_KV = 512  # tokens of a key block where rows are many
FEW_BLOCK_KV = 1024  # where they are few
MOST_PAGES = 64  # of a key block: a transfer each
BUFFER_BYTES = 16 * 2**20  # of vector memory for keys and values on their way and as words
VECTOR_BYTES = 48 * 2**20  # of vector memory for everything
SCALAR_BYTES = 2**19  # of scalar memory for tables and schedule
DTYPES = ("float32", "bfloat16")


def forward(operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
            block_sizes: BlockSizes) -> Residuals:
  """out [T, H, E] and lse [T, H, 1] of pages in any layout; see `xla.paged_forward.forward`."""
  tokens, query_heads, width = operands.query.shape
  group, usual = query_heads // heads.key_heads, pool_of(operands.cache, heads, 1)
  spread = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, usual.widths[0] - width)))
  padded = operands._replace(query=spread(operands.query))
  out = jnp.zeros((tokens, query_heads, usual.widths[-1]), operands.query.dtype)
  lse = jnp.full((tokens, query_heads, 1), -jnp.inf, jnp.float32)
  for first, end, block_q in paged.classes(
      operands, _block_q(operands, block_sizes, usual, group)):
    pool = _sized(usual, block_sizes, step.is_few(block_q * group))
    problem = paged.cut(padded, spec, heads, (block_q, pool.block_pages))
    found, live = _attend(problem, pool, (first, end), padded.query)
    out, lse = (jnp.where(live[:, None, None], *x) for x in zip(found, (out, lse)))
  return Residuals(*softmax.join_sinks(out[..., :heads.value_width], lse, _sinks(operands)))


def _block_q(operands, block_sizes: BlockSizes, pool: Pool, group: int) -> int:
  """Query tokens of a block."""
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  block_q = block_sizes.block_q
  if block_q is None:
    # As many as requests have on average; where all have one, each has no more.
    usual = 2 ** (tokens // requests).bit_length() // 2
    block_q = max(1, min(BLOCK_ROWS // group, max(LANES // group, usual)))
    block_q = 1 if tokens <= requests else block_q
  block_q, _ = paged.sizes_of(operands, BlockSizes(block_q), group)
  pool = _sized(pool, block_sizes, step.is_few(block_q * group))
  while block_sizes.block_q is None and block_q > 1 and (
      step.Shape(pool, group, block_q).bytes(operands.query.dtype) > VECTOR_BYTES):
    block_q //= 2
  return block_q


def _sized(pool: Pool, block_sizes: BlockSizes, few: bool) -> Pool:
  """With the pages of a block, and as many blocks in vector memory as it takes."""
  pool = pool._replace(slots=step.FEW_SLOTS if few else 2)
  wanted = cdiv(block_sizes.block_kv or (FEW_BLOCK_KV if few else BLOCK_KV), pool.page)
  most = max(1, wanted * BUFFER_BYTES // pool._replace(block_pages=wanted).bytes())
  block_pages = min(wanted, most, MOST_PAGES)
  if pool.scales == "token":  # whose blocks are whole lanes
    lanes = LANES // math.gcd(LANES, pool.page)
    block_pages = cdiv(block_pages, lanes) * lanes
  return pool._replace(block_pages=block_pages)


def pool_of(cache, heads: pages.Heads, block_pages: int) -> Pool:
  """How the pages of a cache lie."""
  two, dtype = isinstance(cache, pages.PagesV1), pages.dtype_of(cache)
  held = pages.heads_of(cache)
  # Heads that pad a layout are not read, but they are transferred.
  key_heads = held.key_heads if isinstance(cache, pages.PagesV3) else heads.key_heads
  scales = None
  if cache.key_scales is not None:
    scales = "token" if cache.key_scales.ndim else "tensor"
  widths = (held.key_width, held.value_width) if two else (held.key_width,)
  apart = two or isinstance(cache, pages.PagesV2) and heads_apart(2 * key_heads, dtype)
  return Pool(not two, apart, key_heads, widths, jnp.dtype(dtype), pages.page_size(cache),
              block_pages, scales=scales)


def _arrays(problem: paged.Problem, pool: Pool) -> tuple:
  """The arrays of a cache as `Pool` has them."""
  cache = problem.cache
  stored = lambda x: lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 else x
  if isinstance(cache, pages.PagesV1):
    tokens = stored(cache.key_pages), stored(cache.value_pages)
  else:
    # Rows of layout v3 are in memory as those of v2 are.
    x = stored(cache.pages)
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    tokens = x.swapaxes(1, 2) if pool.apart else x,
  if pool.scales != "token":
    return tokens
  # XLA keeps the pages' numbers along the lanes: what a table points to is gathered beforehand.
  def of_rows(x):
    x = jnp.take(x, problem.tables, 0, mode="clip").transpose(0, 3, 1, 2)
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, pool.scale_rows - x.shape[1]), (0, 0)))
  return *tokens, of_rows(cache.key_scales), of_rows(cache.value_scales)


def _attend(problem: paged.Problem, pool: Pool, requests, query):
  """(out [T, H, E] and lse [T, H, 1], bool [T]: of which tokens) of requests first..end - 1."""
  spec, cache = problem.spec, problem.cache
  key_heads, group, block_q = problem.heads.key_heads, problem.group, problem.block_q
  shape = step.Shape(pool, group, block_q, problem.tables.shape[1])
  work = _by_token(problem, requests[1], query) if block_q == 1 else (
      _by_block(problem, requests, query))
  # Heads that only pad the pages have no rows.
  rows = jnp.pad(work.rows, ((0, 0), (0, pool.key_heads - key_heads), (0, 0), (0, 0)))
  rows = rows.reshape(rows.shape[0], shape.groups, shape.lanes, rows.shape[-1])
  factors = None
  if pool.scales == "tensor":
    factors = jnp.stack([cache.key_scales, cache.value_scales]).astype(jnp.float32)
  left, right = paged.reach(spec)
  out, lse = stream.attend(
      step.Rule(spec.softmax_scale, spec.logits_soft_cap, left, right, spec.precision), shape,
      step.Arrays(work.items, work.count, problem.tables.reshape(-1), factors, rows, None,
                  _arrays(problem, pool)))
  def of_tokens(x):
    x = x.reshape(x.shape[0], pool.key_heads, block_q, group, x.shape[-1])[:, :key_heads]
    x = x.transpose(0, 2, 1, 3, 4).reshape(-1, block_q, key_heads * group, x.shape[-1])
    return x[:, 0] if work.place is None else x[work.place]
  return (of_tokens(out), of_tokens(lse[..., None])), work.live


class _Work(NamedTuple):
  """What the steps compute."""

  items: step.Items
  count: Any  # int32 [1]
  rows: Any  # [W, K, M, D]
  place: Any  # (step, query of the step) of every token; None: a step each, in their order
  live: Any  # bool [T]: whether a token is a query of the requests


def _by_token(problem: paged.Problem, end, query) -> _Work:
  """A step for each token of the requests before `end`.

  Whose token it is, and what that one's numbers are, is found by comparing all with all, which XLA
  makes one operation of, where every gather would be one.
  """
  token = jnp.arange(query.shape[0], dtype=jnp.int32)
  request = jnp.arange(problem.lengths.shape[0], dtype=jnp.int32)
  ends = problem.starts[1:]
  owner = jnp.minimum((ends <= token[:, None]).sum(1, dtype=jnp.int32), request[-1])
  own = owner[:, None] == request
  of_owner = lambda x: jnp.where(own, x, 0).sum(1, dtype=jnp.int32)
  length = of_owner(problem.lengths)
  begin = length - of_owner(ends) + token
  computed = (token < ends[-1]) & (owner < end)
  rows = query.reshape(query.shape[0], problem.heads.key_heads, problem.group, query.shape[-1])
  return _Work(_items(problem, owner, begin, begin, length),
               computed.sum(keepdims=True, dtype=jnp.int32), rows, None, computed & (begin >= 0))


def _by_block(problem: paged.Problem, requests, query) -> _Work:
  """A step for each block of queries."""
  work = queue.of_requests(problem, query.shape[0], requests)
  request, begin = work.blocks.request, work.blocks.positions[:, 0]
  length = problem.lengths[request]
  low = length - (problem.starts[request + 1] - problem.starts[request])
  rows = jax.vmap(lambda block: paged.live_rows_of(problem, block, problem.query))(work.blocks)
  return _Work(_items(problem, request, begin, low, length), work.count, rows,
               (work.place, work.row), work.live)


def _items(problem: paged.Problem, request, begin, low, length) -> step.Items:
  """Which keys the live queries of blocks see, int32 [W] each; see `step.Items`."""
  left, right = paged.reach(problem.spec)
  start = 0 * begin if left is None else jnp.maximum(jnp.maximum(begin, low) - left, 0)
  stop = length if right is None else jnp.minimum(length, begin + problem.block_q + right)
  stop = jnp.minimum(stop, problem.tables.shape[1] * pages.page_size(problem.cache))
  first = start // problem.block_kv
  # A step of no key block would leave the next one's first transfers to nobody.
  end = jnp.maximum(cdiv(stop, problem.block_kv), first + 1)
  return step.Items(request, first, end, begin, low, length, start, stop)


def _sinks(operands):
  """The sinks of all tokens, [T, H, 1], or None; -inf for those that belong to no request."""
  if operands.sinks is None:
    return None
  token = jnp.arange(operands.query.shape[0], dtype=jnp.int32)
  live = (token < pages.query_starts(operands.metadata)[-1])[:, None, None]
  return jnp.where(live, operands.sinks.astype(jnp.float32)[:, None], -jnp.inf)


# --- What is refused. ----------------------------------------------------------------------------


def refusal(query, cache, metadata: pages.PagesMetadata, heads: pages.Heads) -> str | None:
  """Why the kernel does not compute a call, by shapes and dtypes; None: it does.

  Args:
    query: [T, H, D].
    cache: of any layout.
    metadata: what goes with it.
    heads: those in the pages, without their padding.
  """
  held, dtype = pages.dtype_of(cache), query.dtype.name
  quantized = cache.key_scales is not None
  if dtype not in DTYPES or not quantized and held != query.dtype or (
      quantized and held.itemsize > 1):
    return (f"queries of {dtype} and pages of {held.name}: the TPU kernel computes in "
            f"{' and '.join(DTYPES)}, from pages of these or of 8 bits")
  pool = pool_of(cache, heads, 1)
  for width in pool.widths:
    if width > LANES and width % LANES:
      return f"head_dim {width}: the TPU kernel needs a multiple of {LANES} above {LANES}"
  if pool.bytes() > BUFFER_BYTES:
    return (f"pages of {pool.page} tokens: keys and values of one page do not fit the "
            f"TPU kernel's {BUFFER_BYTES} bytes")
  requests, row_pages = metadata.page_tables.shape
  entries = requests * (row_pages + cdiv(FEW_BLOCK_KV, pool.page))
  most = query.shape[0] + 2 * requests
  if 4 * (entries + len(step.Items._fields) * most) > SCALAR_BYTES:
    return (f"page tables of {[requests, row_pages]} and {query.shape[0]} queries: they "
            f"do not fit the TPU kernel's {SCALAR_BYTES} bytes of scalar memory")
  return None
