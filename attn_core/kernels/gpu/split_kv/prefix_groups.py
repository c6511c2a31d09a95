# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages that several requests share, as calls of the kernel over pages on Hopper.

A group is like a request whose queries are those of all its requests; see
`mechanisms.paged_prefixes`. One with many queries is several, see `kernels.common.prefix_parts`. A
row block has as many queries as it holds, so that its keys are read once for all of them.
"""

import jax

from attn_core.caches.paged import layouts
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages, PagesMetadata
from attn_core.kernels.common import prefix_parts
from attn_core.kernels.gpu.split_kv import paged
from attn_core.types import BlockSizes, PagedOperands


def block_sizes(operands: PagedOperands, heads: layouts.Heads, given: BlockSizes) -> BlockSizes:
  """Returns the block sizes for groups: blocks are not of one query, although requests may have it.

  Args:
    operands: of the call; only shapes count.
    heads: the heads in the pages, without their padding.
    given: None fields are chosen.
  """
  group = operands.query.shape[1] // heads.key_heads
  most = paged.most_queries(isinstance(operands.cache, PagesLatent), group)
  return given._replace(block_q=given.block_q or most)


def unsupported_reason(query: jax.Array, cache: Pages, metadata: PagesMetadata,
                       heads: layouts.Heads, given: BlockSizes) -> str | None:
  """Returns why the kernel does not read the pages of groups, by shapes, or None if it does.

  Args:
    query, cache, metadata, heads: as in `paged.unsupported_reason`.
    given: block sizes; None fields are chosen.
  """
  def of_groups(groups: PagesMetadata) -> str | None:
    sizes = block_sizes(PagedOperands(query, cache, metadata), heads, given)
    return paged.unsupported_memory(query, cache, groups, heads, sizes)
  return prefix_parts.unsupported_reason(query, cache, metadata, of_groups)
