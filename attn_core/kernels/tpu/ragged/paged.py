# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of any layout on TPUs, as steps of the ragged kernel.

A step is one block of a request's queries, cut at multiples of its size in positions, so that the
result of a query has the same bits alone, in any batch, in any pages and in any chunk of a
prefill, for given block sizes and without `distribution`.
"""

import math
from typing import NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged import layouts, ops, slot_mapping
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import (dense_operands, nonfinite, online_softmax, paged_operands,
                                      query_block_queue)
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.paged_operands import BlockedInputs, Index
from attn_core.kernels.tpu.ragged import common, kernel
from attn_core.kernels.tpu.ragged.kv_layout import LANES, KVLayout, is_heads_major
from attn_core.kernels.tpu.ragged.new_tokens import NewTokens
from attn_core.types import BlockSizes, PagedOperands, PagedSpec, cdiv

BLOCK_ROWS = 1024  # most rows of a step where requests have more than one query
BLOCK_KV = 512  # tokens of a key block where rows are many
FEW_ROWS_BLOCK_KV = 1024  # where they are few
MOST_PADDING = 4  # rows of all blocks, for each row of a query
MOST_PAGES = 128  # of a key block: a transfer each
BUFFER_BYTES = 16 * 2**20  # of vector memory, for keys and values as copied and as words
VECTOR_BYTES = 48 * 2**20  # of vector memory for everything
SCALAR_BYTES = 15 * 2**16  # of the 1 MiB of scalar memory, for tables and steps
DTYPES = ("float32", "bfloat16")


def forward(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
            block_sizes: BlockSizes) -> Residuals:
  """Computes attention over pages in any layout.

  Args:
    operands: query [T, H, D], the pages and their metadata.
    spec: what is computed.
    heads: the heads in the pages, without their padding.
    block_sizes: None fields are chosen here.

  Returns:
    out [T, H, E] and lse [T, H, 1].
  """
  return _forward(operands, spec, heads, block_sizes, None)[0]


def forward_writing(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
                    block_sizes: BlockSizes) -> tuple[Residuals, Pages]:
  """Writes new tokens to pages in layout v3, then computes attention over them.

  The kernel writes them, unless scalar memory has no room for a second copy of the tables.

  Args:
    operands: as in `forward`, and the new keys [T, K, D] and values [T, K, E], in the dtype of the
      pages, or of floating point where these are quantized.
    spec: what is computed.
    heads: the heads in the pages, without their padding.
    block_sizes: None fields are chosen here.

  Returns:
    (out [T, H, E] and lse [T, H, 1], the cache with the new tokens).
  """
  cache, metadata = operands.cache, operands.metadata
  assert isinstance(cache, layouts.PagesV3)
  assert operands.key is not None and operands.value is not None
  tokens = operands.query.shape[0]
  single_page, group_size = make_layout(cache, heads, 1), operands.query.shape[1] // heads.key_heads
  block_q = _choose_block_q(operands, block_sizes, single_page, group_size)
  if (_scalar_bytes(operands, block_sizes, single_page, (group_size, block_q))
      + _new_scalar_bytes(operands) > SCALAR_BYTES):
    cache = ops.append(cache, operands.key, operands.value, slot_mapping.slots(
        metadata, layouts.page_size(cache), tokens))
    return forward(operands._replace(cache=cache), spec, heads, block_sizes), cache
  # Scales per token are not contiguous in memory: XLA writes them.
  rows, cache = ops.append_scales(cache, operands.key, operands.value, lambda: slot_mapping.slots(
      metadata, layouts.page_size(cache), tokens))
  new = NewTokens(layouts.query_starts(metadata), metadata.context_lens,
                  metadata.page_tables.reshape(-1), _token_rows(rows, _lane_parts(cache)),
                  metadata.page_tables.shape[1])
  found, pages = _forward(operands._replace(cache=cache), spec, heads, block_sizes, new)
  assert pages is not None
  return found, cache._replace(pages=pages)


def _forward(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
             block_sizes: BlockSizes, new: NewTokens | None) -> tuple[Residuals, jax.Array | None]:
  """Computes `forward` after writing new tokens; returns also the array of the pages with these."""
  chex.assert_rank(operands.query, 3)
  tokens, query_heads, width = operands.query.shape
  chex.assert_is_divisible(query_heads, heads.key_heads)
  chex.assert_rank(operands.metadata.page_tables, 2)
  chex.assert_shape(operands.metadata.context_lens, operands.metadata.page_tables.shape[:1])
  group_size = query_heads // heads.key_heads
  single_page = make_layout(operands.cache, heads, 1)
  pad_width = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, single_page.widths[0] - width)))
  padded = operands._replace(query=pad_width(nonfinite.infinite_to_nan(operands.query)))
  out = jnp.zeros((tokens, query_heads, single_page.widths[-1]),
                  dense_operands.out_dtype(operands, spec))
  lse = jnp.full((tokens, query_heads, 1), -jnp.inf, jnp.float32)
  chosen, written = _choose_block_q(operands, block_sizes, single_page, group_size), None
  ranges = paged_operands.request_ranges(operands, chosen)
  for first, end, block_q in ranges:
    layout = _with_blocks(single_page, operands, block_sizes, common.has_few_rows(block_q * group_size))
    inputs = paged_operands.block_inputs(padded, spec, heads, (block_q, layout.block_pages))
    possible = _possible_tokens(operands, block_q, chosen)
    single = len(ranges) == 1
    found, live, pages = _attend(inputs, layout, (first, None if single else end),
                                 padded.query[:possible], new)
    if pages is not None:  # the first kernel writes the tokens of all requests
      assert isinstance(padded.cache, layouts.PagesV3)
      written = _as_pages(pages, padded.cache)
      padded = padded._replace(cache=padded.cache._replace(pages=written))
      new = None
    if block_q == 1 and single and possible == tokens:
      out, lse = found  # steps without a query have written the results of no keys
    else:
      found, live = jax.tree.map(
          lambda x: dense_operands.pad_axis(x, 0, tokens - x.shape[0]), (found, live))
      out, lse = (jnp.where(live[:, None, None], *x) for x in zip(found, (out, lse)))
  return Residuals(*online_softmax.join_sinks(
      out[..., :heads.value_width], lse, _token_sinks(operands))), written


def _choose_block_q(operands: PagedOperands, block_sizes: BlockSizes, layout: KVLayout,
                    group_size: int) -> int:
  """Returns the query tokens of a block: if they are not given, so many that the steps fit."""
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  wanted = block_sizes.block_q
  if wanted is None:
    # As many as requests have on average; where there is one per request, blocks have one.
    average = 2 ** (tokens // requests).bit_length() // 2
    if operands.metadata.distribution is not None:
      average = _block_q_of_many(tokens, requests)
    wanted = max(1, min(BLOCK_ROWS // group_size, max(LANES // group_size, average)))
    wanted = 1 if tokens <= requests else wanted
  block_q, _ = paged_operands.choose_block_sizes(operands, BlockSizes(wanted), group_size)
  if block_sizes.block_q is not None:
    return block_q
  def fits_vector_memory(block_q: int) -> bool:
    blocks = _with_blocks(layout, operands, block_sizes, common.has_few_rows(block_q * group_size))
    return (common.StepShape(blocks, group_size, block_q).vmem_bytes(operands.query.dtype)
            <= VECTOR_BYTES)
  while block_q > 1 and not fits_vector_memory(block_q):
    block_q //= 2
  # With many query heads a key head, blocks of the rows above are too many.
  while 1 < block_q < tokens and fits_vector_memory(2 * block_q) and _scalar_bytes(
      operands, block_sizes, layout, (group_size, block_q)) > SCALAR_BYTES:
    block_q *= 2
  return block_q


def _block_q_of_many(tokens: int, requests: int) -> int:
  """Returns the query tokens of a block where requests of one query are computed separately.

  The other requests may have all other tokens; but where requests are many, large blocks would be
  mostly padding.
  """
  block_q = 2 ** max(1, tokens - requests).bit_length() // 2
  while block_q > 1 and query_block_queue.capacity(tokens, requests, block_q) * block_q > (
      MOST_PADDING * tokens):
    block_q //= 2
  return block_q


def _possible_tokens(operands: PagedOperands, block_q: int, chosen: int) -> int:
  """Returns how many tokens may be queries of the requests that have blocks of `block_q`.

  Where blocks are of another size than the chosen one, requests have one query each, and come
  before all others.
  """
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  return tokens if block_q == chosen else min(tokens, requests)


def _num_steps(operands: PagedOperands, block_q: int, chosen: int) -> int:
  """Returns the number of steps of the requests that have blocks of `block_q`."""
  return query_block_queue.capacity(_possible_tokens(operands, block_q, chosen),
                                    operands.metadata.context_lens.shape[0], block_q)


def _scalar_bytes(operands: PagedOperands, block_sizes: BlockSizes, layout: KVLayout,
                  rows: tuple[int, int]) -> int:
  """Returns the scalar memory for the tables and steps of a kernel.

  Args:
    operands: only shapes count.
    block_sizes: those given.
    layout: of the pages.
    rows: (G, query tokens of a block).
  """
  (requests, row_pages), (group_size, chosen) = operands.metadata.page_tables.shape, rows
  found = []
  for block_q in {chosen, chosen if operands.metadata.distribution is None else 1}:
    blocks = _with_blocks(layout, operands, block_sizes, common.has_few_rows(block_q * group_size))
    entries = requests * cdiv(row_pages, blocks.block_pages) * blocks.block_pages
    steps = _num_steps(operands, block_q, chosen)
    # The rows of an array are padded to whole lanes.
    words = cdiv(entries, LANES) + len(common.Steps._fields) * cdiv(steps, LANES)
    found.append(4 * LANES * words)
  return max(found)


def _new_scalar_bytes(operands: PagedOperands) -> int:
  """Returns the scalar memory for the places of new tokens."""
  requests, row_pages = operands.metadata.page_tables.shape
  return 4 * LANES * sum(cdiv(x, LANES) for x in (requests * row_pages, requests, requests + 1))


def _with_blocks(layout: KVLayout, operands: PagedOperands, block_sizes: BlockSizes,
                 few_rows: bool) -> KVLayout:
  """Sets the pages of a block and the number of blocks in vector memory."""
  layout = layout._replace(slots=common.FEW_ROWS_SLOTS if few_rows else 2)
  chosen = BLOCK_KV
  if few_rows:
    # Few heads are computed faster than a block's other work.
    chosen = FEW_ROWS_BLOCK_KV * min(2, max(1, 8 // max(1, layout.key_heads)))
  wanted = cdiv(block_sizes.block_kv or chosen, layout.page_size)
  if block_sizes.block_kv is None:
    # Whole lanes of tokens, as many as the tables hold.
    held = operands.metadata.page_tables.shape[1] * layout.page_size
    wanted = min(wanted, cdiv(cdiv(held, LANES) * LANES, layout.page_size))
  most = max(1, wanted * BUFFER_BYTES // layout._replace(block_pages=wanted).vmem_bytes())
  block_pages = min(wanted, most, MOST_PAGES)
  if layout.scales == "token":  # blocks must be whole lanes
    lanes = LANES // math.gcd(LANES, layout.page_size)
    block_pages = cdiv(block_pages, lanes) * lanes
  return layout._replace(block_pages=block_pages)


def make_layout(cache: Pages, heads: layouts.Heads, block_pages: int) -> KVLayout:
  """Returns the layout of the pages of a cache, in blocks of `block_pages`."""
  is_v1, dtype = isinstance(cache, layouts.PagesV1), layouts.dtype_of(cache)
  stored = layouts.heads_of(cache)
  # Heads that pad a layout are copied, although nothing reads them.
  key_heads = stored.key_heads if isinstance(cache, layouts.PagesV3) else heads.key_heads
  scales = None
  if cache.key_scales is not None:
    scales = "token" if cache.key_scales.ndim else "tensor"
  widths = (stored.key_width, stored.value_width) if is_v1 else (stored.key_width,)
  heads_major = is_v1 or isinstance(cache, layouts.PagesV2) and is_heads_major(2 * key_heads, dtype)
  return KVLayout(not is_v1, heads_major, key_heads, widths, jnp.dtype(dtype),
                  layouts.page_size(cache), block_pages, scales=scales,
                  lane_parts=_lane_parts(cache))


def _lane_parts(cache: Pages) -> int:
  """Returns `KVLayout.lane_parts`; 1 where XLA would copy the pages to split them."""
  if isinstance(cache, layouts.PagesV3) and layouts.dtype_of(cache).itemsize > 1:
    return cache.pages.shape[-1] // LANES
  return 1


def _stored(x: jax.Array) -> jax.Array:
  """Returns pages or tokens as the kernel copies them: numbers of 8 bits as int8."""
  return lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 else x


def _token_rows(x: jax.Array, lane_parts: int) -> jax.Array:
  """Returns tokens [..., rows, packed, width] of layout v3 as `KVLayout` describes them.

  Both are the same memory.
  """
  x = _stored(x)
  *before, packed, width = x.shape
  x = x.reshape(*before, packed, lane_parts, width // lane_parts).swapaxes(-3, -2)
  return x.reshape(*before[:-1], -1, width // lane_parts)


def _as_pages(x: jax.Array, cache: layouts.PagesV3) -> jax.Array:
  """Returns the inverse of `_token_rows`, as the pages of a cache."""
  *before, packed, width = cache.pages.shape
  parts = _lane_parts(cache)
  x = x.reshape(*before, parts, packed, width // parts).swapaxes(-3, -2).reshape(cache.pages.shape)
  return x if x.dtype == cache.pages.dtype else lax.bitcast_convert_type(x, cache.pages.dtype)


def _token_arrays(inputs: BlockedInputs, layout: KVLayout) -> tuple[jax.Array, ...]:
  """Returns the arrays of a cache as `KVLayout` describes them."""
  cache = inputs.cache
  tokens: tuple[jax.Array, ...]
  if isinstance(cache, layouts.PagesV1):
    tokens = _stored(cache.key_pages), _stored(cache.value_pages)
  elif isinstance(cache, layouts.PagesV3):
    tokens = _token_rows(cache.pages, layout.lane_parts),
  else:
    x = _stored(cache.pages)
    tokens = x.swapaxes(1, 2) if layout.heads_major else x,
  if layout.scales != "token":
    return tokens
  assert cache.key_scales is not None and cache.value_scales is not None
  # XLA stores scales with the pages along the lanes, so that a page's scales are not contiguous:
  # those that a table points to are gathered before the kernel.
  def gather(x: jax.Array) -> jax.Array:
    x = jnp.take(x, inputs.tables, 0, mode="clip").transpose(0, 3, 1, 2)
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, layout.scale_rows - x.shape[1]), (0, 0)))
  return *tokens, gather(cache.key_scales), gather(cache.value_scales)


def _attend(inputs: BlockedInputs, layout: KVLayout, requests: tuple[Index, Index | None],
            query: jax.Array, new: NewTokens | None
            ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array | None]:
  """Computes the requests [first, end), after writing the new tokens of all requests.

  Args:
    inputs: the call, in blocks.
    layout: of the pages.
    requests: (first, end); None: all that have queries.
    query: the tokens that may be theirs, [T, H, D].
    new: the tokens to write.

  Returns:
    ((out [T, H, E], lse [T, H, 1]), bool [T]: the tokens for which these are computed, the tokens
    of all pages if there are new ones).
  """
  spec, cache = inputs.spec, inputs.cache
  key_heads, group_size, block_q = inputs.heads.key_heads, inputs.group, inputs.block_q
  shape = common.StepShape(layout, group_size, block_q, inputs.tables.shape[1],
                           writes_all=block_q == 1)
  # 1. The steps and their rows.
  work = _work_by_token(inputs, requests[1], query) if block_q == 1 else (
      _work_by_block(inputs, requests, query))
  # Heads that only pad the pages have no queries.
  rows = jnp.pad(work.rows, ((0, 0), (0, layout.key_heads - key_heads), (0, 0), (0, 0)))
  rows = rows.reshape(rows.shape[0], shape.head_groups, shape.group_rows, rows.shape[-1])
  tensor_scales = None
  if layout.scales == "tensor":
    assert cache.key_scales is not None and cache.value_scales is not None
    tensor_scales = jnp.stack([cache.key_scales, cache.value_scales]).astype(jnp.float32)
  # 2. The kernel.
  left, right = paged_operands.window_of(spec)
  out, lse, pages = kernel.attend(
      common.LogitsSpec(spec.softmax_scale, spec.logits_soft_cap, left, right, spec.precision),
      shape, common.KernelInputs(
          work.steps, work.num_live, inputs.tables.reshape(-1), tensor_scales, rows, None,
          _token_arrays(inputs, layout), new),
      rows.dtype if spec.out_dtype is None else spec.out_dtype)
  # 3. The results by token.
  def by_token(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], layout.key_heads, block_q, group_size, x.shape[-1])[:, :key_heads]
    x = x.transpose(0, 2, 1, 3, 4).reshape(-1, block_q, key_heads * group_size, x.shape[-1])
    return x[:, 0] if work.token_index is None else x[work.token_index]
  return (by_token(out), by_token(lse[..., None])), work.live, pages


class _Work(NamedTuple):
  """The steps of a call."""

  steps: common.Steps
  num_live: jax.Array  # int32 [n]: the last number is that of steps that compute anything
  rows: jax.Array  # [num_steps, K, head_rows, D]
  # (step, query of the step) of every token; None: a step for each token, in their order.
  token_index: tuple[jax.Array, jax.Array] | None
  live: jax.Array  # bool [T]: whether a token is a query of the requests


def _work_by_token(inputs: BlockedInputs, end: Index | None, query: jax.Array) -> _Work:
  """Makes a step for each token of the requests before `end`.

  The request of each token is found by comparing all tokens with all requests, which XLA fuses
  into few operations, whereas every gather would be one.
  """
  tokens = query.shape[0]
  token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
  request = jnp.arange(inputs.lengths.shape[0], dtype=jnp.int32)
  first, ends = jnp.where(request == 0, 0, inputs.starts[:-1]), inputs.starts[1:]
  own = (token >= first) & (token < ends)
  own = own if end is None else own & (request < end)
  of_owner = lambda x: jnp.where(own, x, 0).sum(1, dtype=jnp.int32)
  owner, length = of_owner(request), of_owner(inputs.lengths)
  begin = of_owner(inputs.lengths - ends + token)
  rows = query.reshape(tokens, inputs.heads.key_heads, inputs.group, query.shape[-1])
  # The tokens of all requests, without those of the requests from `end` on. The kernel reads the
  # number of all tokens where it is, which saves an operation.
  num_live = inputs.starts if end is None else jnp.max(jnp.where(request < end, ends, 0),
                                                       keepdims=True)
  return _Work(_make_steps(inputs, owner, begin, begin, length), num_live, rows, None,
               token[:, 0] < num_live[-1])


def _work_by_block(inputs: BlockedInputs, requests: tuple[Index, Index | None],
                   query: jax.Array) -> _Work:
  """Makes a step for each block of queries of the requests [first, end)."""
  first, end = requests
  # Rows of the tables that are not in use have no queries.
  end = inputs.lengths.shape[0] if end is None else end
  queue = query_block_queue.make_queue(inputs, query.shape[0], (first, end))
  request, begin = queue.blocks.request, queue.blocks.positions[:, 0]
  length = inputs.lengths[request]
  row_begin = length - (inputs.starts[request + 1] - inputs.starts[request])
  rows = jax.vmap(lambda block: paged_operands.live_rows_of(inputs, block, inputs.query))(
      queue.blocks)
  return _Work(_make_steps(inputs, request, begin, row_begin, length), queue.num_blocks, rows,
               (queue.block_index, queue.row), queue.live)


def _make_steps(inputs: BlockedInputs, request: Index, query_begin: jax.Array,
                row_begin: jax.Array, length: jax.Array) -> common.Steps:
  """Finds the keys that the live queries of blocks attend to; all arrays are int32 [num_steps].

  Args:
    inputs: the call, in blocks.
    request: of a block.
    query_begin: position of its first query.
    row_begin: position of the request's first query.
    length: tokens of the request.
  """
  left, right = paged_operands.window_of(inputs.spec)
  start = 0 * query_begin if left is None else jnp.maximum(
      jnp.maximum(query_begin, row_begin) - left, 0)
  stop = length if right is None else jnp.minimum(length, query_begin + inputs.block_q + right)
  # Lengths may be beyond the tables: nothing outside of these is copied, scales included.
  held = inputs.tables.shape[1] * layouts.page_size(inputs.cache)
  start, stop = jnp.minimum(start, held), jnp.minimum(stop, held)
  first = jnp.minimum(start, held - 1) // inputs.block_kv
  # At least one key block: a step without one would not wait for the transfers of the next step.
  end = jnp.maximum(-(-stop // inputs.block_kv), first + 1)
  return common.Steps(request, first, end, query_begin, row_begin, length, start, stop)


def _token_sinks(operands: PagedOperands) -> jax.Array | None:
  """Returns the sinks of all tokens, [T, H, 1], or None; -inf for tokens of no request."""
  if operands.sinks is None:
    return None
  token = jnp.arange(operands.query.shape[0], dtype=jnp.int32)
  live = (token < layouts.query_starts(operands.metadata)[-1])[:, None, None]
  return jnp.where(live, operands.sinks.astype(jnp.float32)[:, None], -jnp.inf)


# --- Limits. -------------------------------------------------------------------------------------


def unsupported_reason(query: jax.Array, cache: Pages, metadata: layouts.PagesMetadata,
                       heads: layouts.Heads, block_sizes: BlockSizes) -> str | None:
  """Returns why the kernel does not support a call, by shapes and dtypes, or None if it does.

  Args:
    query: [T, H, D].
    cache: pages in any layout.
    metadata: of the pages.
    heads: the heads in the pages, without their padding.
    block_sizes: those given; None fields are chosen.
  """
  stored, dtype = layouts.dtype_of(cache), query.dtype.name
  quantized = cache.key_scales is not None
  if dtype not in DTYPES or not quantized and stored != query.dtype or (
      quantized and stored.itemsize > 1):
    return (f"queries of {dtype} and pages of {stored.name}: the TPU kernel computes in "
            f"{' and '.join(DTYPES)}, from pages of these or of 8 bits")
  layout = make_layout(cache, heads, 1)
  for width in layout.widths:
    if width > LANES and width % LANES:
      return f"head_dim {width}: the TPU kernel needs a multiple of {LANES} above {LANES}"
  if layout.vmem_bytes() > BUFFER_BYTES:
    return (f"pages of {layout.page_size} tokens: keys and values of one page do not fit the "
            f"TPU kernel's {BUFFER_BYTES} bytes")
  operands, group_size = PagedOperands(query, cache, metadata), query.shape[1] // heads.key_heads
  block_q = _choose_block_q(operands, block_sizes, layout, group_size)
  needed = _scalar_bytes(operands, block_sizes, layout, (group_size, block_q))
  if needed > SCALAR_BYTES:
    steps = _num_steps(operands, block_q, block_q)
    cure = "a larger block_q or " if block_sizes.block_q is not None else ""
    return (f"page tables of {list(metadata.page_tables.shape)} and {steps} steps of {block_q} "
            f"queries need {needed} bytes of scalar memory, of which the TPU kernel has "
            f"{SCALAR_BYTES}: give {cure}narrower tables, larger pages or fewer requests")
  return None
