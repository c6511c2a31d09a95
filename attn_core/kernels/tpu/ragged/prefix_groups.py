# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages that several requests share, as calls of the ragged kernel over pages.

A group is like a request whose queries are those of all its requests; see
`mechanisms.paged_prefixes`. The kernel takes at most as many queries of a request as the request
has tokens, so a group with more queries is several requests with the same pages.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp

from attn_core.caches.paged import layouts
from attn_core.caches.paged.layouts import Pages, PagesMetadata
from attn_core.kernels.tpu.ragged import paged_tiling
from attn_core.kernels.tpu.ragged.kv_layout import LANES
from attn_core.types import BlockSizes, PagedOperands, cdiv


def num_parts(tokens: int, requests: int, page_size: int) -> int:
  """Returns how many requests the groups of `requests` are at most, each of at least one page."""
  return requests + tokens // page_size


def block_sizes(operands: PagedOperands, heads: layouts.Heads, given: BlockSizes) -> BlockSizes:
  """Returns the block sizes for groups: blocks are not of one query, although requests may have it.

  Args:
    operands: of the call; only shapes count.
    heads: the heads in the pages, without their padding.
    given: None fields are chosen.
  """
  tokens, group_size = operands.query.shape[0], operands.query.shape[1] // heads.key_heads
  # As if groups had as many queries as fill a row of lanes.
  groups = cdiv(tokens, max(1, LANES // group_size))
  shapes = PagedOperands(operands.query, operands.cache, _metadata(operands.metadata, groups))
  layout = paged_tiling.make_layout(operands.cache, heads, 1)
  return given._replace(block_q=paged_tiling.choose_block_q(shapes, given, layout, group_size))


def unsupported_reason(query: jax.Array, cache: Pages, metadata: PagesMetadata,
                       heads: layouts.Heads, given: BlockSizes) -> str | None:
  """Returns why the kernel does not read the pages of groups, by shapes, or None if it does.

  Args:
    query, cache, metadata, heads: as in `paged_tiling.unsupported_reason`.
    given: block sizes; None fields are chosen.
  """
  if metadata.prefixes is None:
    return None
  operands = PagedOperands(query, cache, metadata)
  parts = num_parts(query.shape[0], metadata.page_tables.shape[0], layouts.page_size(cache))
  reason = paged_tiling.unsupported_reason(
      query, cache, _metadata(metadata, parts), heads, block_sizes(operands, heads, given))
  return reason and f"cache_metadata.prefixes, as {parts} requests: {reason}"


def _metadata(metadata: PagesMetadata, requests: int) -> PagesMetadata:
  """Returns the shapes of the metadata of a number of requests."""
  of: Callable[..., Any] = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  return PagesMetadata(of(requests, metadata.page_tables.shape[1]), of(requests), of(requests + 1))
