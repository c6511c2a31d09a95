# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys and values in pages; public as `attn_core.caches.pages`.

`layouts` holds the types, `rows` how two of them lay out heads, `pool`, `token_writes` and `ops`
the functions on them, `allocator` the host-side bookkeeping, `request_groups` and `page_stripes`
the division over devices, `validate` the checks. All of them call a `PagesMetadata`
`pages_metadata`, and take it by the earlier keyword `metadata` as well.
"""

from attn_core.caches.paged.layouts import (
    LANES, PAGES, Heads, Pages, PagesMetadata, PagesV1, PagesV2, PagesV3, Scope, StoredHeads,
    dtype_of, has_token_scales, head_axis, heads_of, in_int32, num_pages, packing, page_size,
    query_starts, rows_in_use, take)
from attn_core.caches.paged.ops import convert, copy_pages, from_dense, read, reader, to_dense
from attn_core.caches.paged.pool import init, init_like
from attn_core.caches.paged.rows import interleave, pad_rows
from attn_core.caches.paged.slot_mapping import slots
from attn_core.caches.paged.token_writes import append, store

__all__ = ["LANES", "PAGES", "Heads", "Pages", "PagesMetadata", "PagesV1", "PagesV2", "PagesV3",
           "Scope", "StoredHeads", "append", "convert", "copy_pages", "dtype_of", "from_dense",
           "has_token_scales", "head_axis", "heads_of", "in_int32", "init", "init_like",
           "interleave", "num_pages", "packing", "pad_rows", "page_size", "query_starts", "read",
           "reader", "rows_in_use", "slots", "store", "take", "to_dense"]
