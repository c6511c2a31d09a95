# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages that several requests share, as calls of the ragged kernel over pages.

A group is like a request whose queries are those of all its requests; see
`mechanisms.paged_prefixes`. One with many queries is several, see `kernels.common.prefix_parts`.
"""

import jax

from attn_core.caches.paged import layouts
from attn_core.caches.paged.layouts import Pages, PagesMetadata
from attn_core.kernels.common import prefix_parts
from attn_core.kernels.tpu.ragged import paged_tiling
from attn_core.kernels.tpu.ragged.kv_layout import LANES
from attn_core.types import BlockSizes, PagedOperands, cdiv


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
  shapes = operands._replace(metadata=prefix_parts.metadata_of(operands.metadata, groups))
  layout = paged_tiling.make_layout(operands.cache, heads, 1)
  return given._replace(block_q=paged_tiling.choose_block_q(shapes, given, layout, group_size))


def unsupported_reason(query: jax.Array, cache: Pages, metadata: PagesMetadata,
                       heads: layouts.Heads, given: BlockSizes) -> str | None:
  """Returns why the kernel does not read the pages of groups, by shapes, or None if it does.

  Args:
    query, cache, metadata, heads: as in `paged_tiling.unsupported_reason`.
    given: block sizes; None fields are chosen.
  """
  def of_groups(groups: PagesMetadata) -> str | None:
    sizes = block_sizes(PagedOperands(query, cache, metadata), heads, given)
    return paged_tiling.unsupported_reason(query, cache, groups, heads, sizes)
  return prefix_parts.unsupported_reason(query, cache, metadata, of_groups)
