# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of any layout on TPUs, as steps of the ragged kernel.

A step is one block of a request's queries, cut at multiples of its size in positions, so that the
result of a query has the same bits alone, in any batch, in any pages and in any chunk of a
prefill, for given block sizes and without `distribution`.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.caches.paged import latent_layout, layouts, slot_mapping, token_writes
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import (dense_operands, online_softmax, paged_operands,
                                      query_block_queue)
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.paged_operands import BlockedInputs, Index
from attn_core.kernels.tpu.ragged import (
    common, paged_tiling, row_mods, row_writes, token_kernel)
from attn_core.kernels.tpu.ragged.kv_layout import KVLayout
from attn_core.kernels.tpu.ragged.mod_form import ModInputs
from attn_core.kernels.tpu.ragged.token_blocks import RequestPart
from attn_core.types import BlockSizes, PagedOperands, PagedSpec


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
  """Writes new tokens to pages, then computes attention over them, in one kernel.

  Args:
    operands: as in `forward`, with pages in layout v3 or of latent rows; and the new keys [T, K, D]
      and values [T, K, E], or the rows [T, 1, latent + rope] as keys, in the dtype of the pages, or
      of floating point where these are quantized.
    spec: what is computed.
    heads: the heads in the pages, without their padding.
    block_sizes: None fields are chosen here.

  Returns:
    (out [T, H, E] and lse [T, H, 1], the cache with the new tokens).
  """
  cache, metadata = operands.cache, operands.metadata
  assert operands.key is not None and operands.value is not None
  if isinstance(cache, PagesLatent):
    rows = operands.key[:, 0]
    latent_layout.check_dtype(cache, rows)
    new = row_writes.new_rows(rows, paged_tiling.make_layout(cache, heads, 1))
  else:
    assert isinstance(cache, layouts.PagesV3)
    # Scales per token and head are not contiguous in memory: XLA writes them.
    slots = lambda: slot_mapping.slots(metadata, layouts.page_size(cache), operands.query.shape[0])
    rows, cache = token_writes.append_scales(cache, operands.key, operands.value, slots)
    new = _token_rows(rows, paged_tiling.lane_parts(cache))
  return _forward(operands._replace(cache=cache), spec, heads, block_sizes, new)


def _forward(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
             block_sizes: BlockSizes, new: jax.Array | None) -> tuple[Residuals, Pages]:
  """Computes `forward` after writing new tokens, if any; returns also the cache with these."""
  chex.assert_rank(operands.query, 3)
  tokens, query_heads, width = operands.query.shape
  chex.assert_is_divisible(query_heads, heads.key_heads)
  chex.assert_rank(operands.metadata.page_tables, 2)
  chex.assert_shape(operands.metadata.context_lens, operands.metadata.page_tables.shape[:1])
  group_size = query_heads // heads.key_heads
  single_page = paged_tiling.make_layout(operands.cache, heads, 1)
  # The kernel pads queries of latent rows, for which XLA would write them once more.
  missing = 0 if single_page.latent else single_page.widths[0] - width
  pad_width = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, missing)))
  padded = operands._replace(query=pad_width(operands.query))
  lse = jnp.full((tokens, query_heads, 1), -jnp.inf, jnp.float32)
  chosen = paged_tiling.choose_block_q(operands, block_sizes, single_page, group_size)
  out = None
  ranges = paged_operands.request_ranges(operands, chosen)
  for number, (first, end, block_q) in enumerate(ranges):
    layout = paged_tiling.with_blocks(single_page, operands, block_sizes, block_q * group_size)
    mask = operands.metadata.draft_mask
    # A tree is computed at once, wherever it begins, if it fits.
    requests = paged_operands.RequestPart(
        first, end, block_q, one_block=mask is not None and mask.shape[1] <= block_q)
    inputs = paged_operands.block_inputs(
        padded, spec, heads, (block_q, layout.block_pages), requests)
    possible = paged_tiling.possible_tokens(operands, block_q, chosen)
    places = _request_part(operands.metadata, number, len(ranges))
    part = _Part(operands.metadata, (first, end), places, possible, out)
    found = _attend(inputs, layout, part, padded.query, new)
    out, lse = found.out, jnp.where(found.live[:, None, None], found.lse, lse)
    if new is not None:  # the first kernel writes the tokens of all requests
      padded, new = padded._replace(cache=_with_pages(padded.cache, found.pages)), None
  assert out is not None
  out = out.reshape(tokens, query_heads, -1)[..., :heads.value_width]
  return (Residuals(*online_softmax.join_sinks(out, lse, _token_sinks(operands))),
          padded.cache)


def _token_rows(x: jax.Array, lane_parts: int) -> jax.Array:
  """Returns tokens [..., rows, packed, width] of layout v3 as `KVLayout` describes them.

  Both are the same memory.
  """
  *before, packed, width = x.shape
  x = x.reshape(*before, packed, lane_parts, width // lane_parts).swapaxes(-3, -2)
  return x.reshape(*before[:-1], -1, width // lane_parts)


def _with_pages(cache: Pages, arrays: tuple[jax.Array, ...]) -> Pages:
  """Returns a cache with arrays that the kernel wrote, the inverse of `_token_arrays`."""
  if isinstance(cache, PagesLatent):
    if cache.scales is None:
      return cache._replace(pages=arrays[0])
    pages, rope, scales = arrays
    return cache._replace(pages=pages, rope=rope, scales=scales[:, :cache.scales.shape[1]])
  assert isinstance(cache, layouts.PagesV3)
  x, = arrays
  *before, packed, width = cache.pages.shape
  parts = paged_tiling.lane_parts(cache)
  x = x.reshape(*before, parts, packed, width // parts).swapaxes(-3, -2)
  return cache._replace(pages=x.reshape(cache.pages.shape))


def _token_arrays(inputs: BlockedInputs, layout: KVLayout) -> tuple[jax.Array, ...]:
  """Returns the arrays of a cache as `KVLayout` describes them."""
  cache = inputs.cache
  tokens: tuple[jax.Array, ...]
  if isinstance(cache, layouts.PagesV1):
    tokens = cache.key_pages, cache.value_pages
  elif isinstance(cache, layouts.PagesV3):
    tokens = _token_rows(cache.pages, layout.lane_parts),
  elif isinstance(cache, PagesLatent):
    if cache.rope is None or cache.scales is None:
      return cache.pages,
    missing = layout.scale_width - cache.scales.shape[1]
    return cache.pages, cache.rope, dense_operands.pad_axis(cache.scales, 1, missing)
  else:
    tokens = cache.pages.swapaxes(1, 2) if layout.heads_major else cache.pages,
  if layout.scales != "token":
    return tokens
  # XLA stores scales with the pages along the lanes, so that a page's scales are not contiguous:
  # those that a table points to are gathered before the kernel.
  def gather(x: jax.Array) -> jax.Array:
    x = jnp.take(x, inputs.tables, 0, mode="clip").transpose(0, 3, 1, 2)
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, layout.scale_rows - x.shape[1]), (0, 0)))
  assert cache.key_scales is not None and cache.value_scales is not None
  return *tokens, gather(cache.key_scales), gather(cache.value_scales)


class _Found(NamedTuple):
  """Results of a kernel."""

  out: jax.Array  # [T, ...], H heads of E numbers for each token
  lse: jax.Array  # [T, H, 1]
  live: jax.Array  # bool [T]: the tokens for which `lse` is computed
  pages: tuple[jax.Array, ...]  # the arrays to which new tokens were written


class _Part(NamedTuple):
  """Some of a call's requests."""

  metadata: layouts.PagesMetadata
  requests: tuple[Index, Index]  # [first, end)
  places: RequestPart  # of these numbers in the metadata
  most_tokens: int  # that their queries may be
  out: jax.Array | None  # the results of requests before them, [T, K, G, E]


def _attend(inputs: BlockedInputs, layout: KVLayout, part: _Part, query: jax.Array,
            new: jax.Array | None) -> _Found:
  """Computes some requests, after writing the new tokens of all.

  Args:
    inputs: the call, in blocks.
    layout: of the pages.
    part: the requests.
    query: [T, H, D].
    new: the tokens to write, see `TokenInputs`.
  """
  key_heads, group_size, block_q = inputs.heads.key_heads, inputs.group, inputs.block_q
  tokens, (first, end) = query.shape[0], part.requests
  shape = common.StepShape(layout, group_size, block_q, part.metadata.page_tables.shape[1],
                           one_block=inputs.part.one_block, num_cores=inputs.spec.num_cores)
  if new is not None and not row_writes.are_same_on_all_cores(layout, tokens):
    shape = shape._replace(num_cores=1)
  # 1. The kernel.
  queue = query_block_queue.make_queue(inputs, part.most_tokens, (first, end))
  metadata, places = part.metadata, part.places
  counts = metadata.num_requests if metadata.distribution is None else metadata.distribution
  mods = _mod_inputs(inputs, shape, queue) if inputs.spec.has_score_mod else None
  starts = metadata.query_start_loc  # without what unused rows have, which the kernel does not read
  out, lse, pages = token_kernel.attend(
      _logits_spec(inputs)._replace(mods=mods and mods.form), shape, token_kernel.TokenInputs(
          None if counts is None else jnp.reshape(counts, -1).astype(jnp.int32),
          inputs.starts if starts is None else jnp.asarray(starts, jnp.int32), inputs.lengths,
          metadata.page_tables.reshape(-1), _tensor_scales(inputs, layout),
          query.reshape(tokens, key_heads, group_size, query.shape[-1]),
          _token_arrays(inputs, layout), new, part.out, mods, _drafts(inputs)), _out_dtype(inputs),
      num_steps=queue.blocks.positions.shape[0], part=places)
  # 2. The lse by token. XLA leaves this out where it is not used.
  lse = lse.reshape(-1, key_heads, block_q, group_size)
  lse = lse.swapaxes(1, 2).reshape(-1, block_q, key_heads * group_size, 1)
  lse = lse[queue.block_index, queue.row]
  lse, live = (dense_operands.pad_axis(x, 0, tokens - x.shape[0]) for x in (lse, queue.live))
  return _Found(out, lse, live, pages)


def _mod_inputs(inputs: BlockedInputs, shape: common.StepShape,
                queue: query_block_queue.QueryBlockQueue) -> ModInputs:
  """Returns the arrays of the score mod, which have heads and tokens, and the numbers of heads."""
  heads = inputs.query.shape[1]
  head = jnp.arange(heads, dtype=jnp.int32).reshape(1, -1, 1, 1)
  head = head if inputs.head_offset is None else head + inputs.head_offset

  def rows_of(x: jax.Array) -> jax.Array:
    return paged_operands.rows_of_mod(inputs, queue.blocks, x)

  return row_mods.make_inputs(inputs.spec.score_mod, inputs.mods, {"head": head}, shape, rows_of)


def _request_part(metadata: layouts.PagesMetadata, number: int, parts: int) -> RequestPart:
  """Returns where the metadata have the bounds of a part of the requests, as `RequestPart`."""
  if metadata.distribution is None:
    used = None if metadata.num_requests is None else 0
    return RequestPart(None, used, used)
  first, end = (None, 2) if parts == 1 else ((None, 0), (0, 2))[number]
  return RequestPart(first, end, 2)


def _logits_spec(inputs: BlockedInputs) -> common.LogitsSpec:
  spec, mask = inputs.spec, inputs.draft_mask
  left, right = paged_operands.window_of(spec)
  if mask is not None and not spec.causal:
    right = None  # of the tree, see `_drafts`
  return common.LogitsSpec(
      spec.softmax_scale, spec.logits_soft_cap, left, right, spec.precision, scope=inputs.scope,
      drafts=0 if mask is None else mask.shape[1], int8_products=spec.int8_products)


def _drafts(inputs: BlockedInputs) -> tuple[jax.Array, ...]:
  """Returns what new tokens see of each other, as `KernelRefs.drafts`."""
  mask, spec = inputs.draft_mask, inputs.spec
  if mask is None:
    return ()
  mask, depth = paged_operands.drafts_of(mask, spec)
  distance = depth[:, None] - depth[:, :, None]  # of a key from a query
  left, right = paged_operands.window_of(spec)
  if left is not None:
    mask = mask & (distance >= -left)
  if right is not None and not spec.causal:
    mask = mask & (distance <= right)
  bit = np.left_shift(np.int32(1), np.arange(mask.shape[2], dtype=np.int32))
  bits = jnp.where(mask, bit, 0).sum(2, dtype=jnp.int32).reshape(-1)
  return (bits,) if left is None else (bits, depth.reshape(-1))


def _out_dtype(inputs: BlockedInputs) -> DTypeLike:
  return inputs.query.dtype if inputs.spec.out_dtype is None else inputs.spec.out_dtype


def _tensor_scales(inputs: BlockedInputs, layout: KVLayout) -> jax.Array | None:
  """Returns the scales of all keys and of all values, float32 [2]; None: there are none."""
  if layout.scales != "tensor":
    return None
  key_scales, value_scales = inputs.cache.key_scales, inputs.cache.value_scales
  assert key_scales is not None and value_scales is not None
  return jnp.stack([key_scales, value_scales]).astype(jnp.float32)


def _token_sinks(operands: PagedOperands) -> jax.Array | None:
  """Returns the sinks of all tokens, [T, H, 1], or None; -inf for tokens of no request."""
  if operands.sinks is None:
    return None
  token = jnp.arange(operands.query.shape[0], dtype=jnp.int32)
  live = (token < layouts.query_starts(operands.metadata)[-1])[:, None, None]
  return jnp.where(live, operands.sinks.astype(jnp.float32)[:, None], -jnp.inf)
