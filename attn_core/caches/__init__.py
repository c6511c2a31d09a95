# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Caches as values and pure functions: `dense`, `window`, `latent`, `pages`, `quantize`.

`caches.dense`, `caches.window` and, for latent attention, `caches.latent` offer `init`, `append`,
`insert` and `view`. `pages`, `groups`, `stripes` and `page_checks` are the public names of `paged`,
`paged.request_groups`, `paged.page_stripes` and `paged.validate`; `allocator`, `drafts`,
`exchange`, `latent_pages` and `prefixes` are modules of `paged`, too.
"""

import sys

from attn_core.caches import dense, latent, paged as pages, quantize, window
from attn_core.caches.paged import (allocator, drafts, exchange, latent_pages, prefixes,
                                    validate as page_checks)
from attn_core.caches.paged import page_stripes as stripes, request_groups as groups
from attn_core.caches.dense import DenseCache
from attn_core.caches.latent import LatentCache
from attn_core.caches.update import CacheMetadata, concatenate
from attn_core.caches.slots import CacheView
from attn_core.caches.window import WindowCache

__all__ = ["CacheMetadata", "CacheView", "DenseCache", "LatentCache", "WindowCache",
           "allocator", "concatenate", "dense", "drafts", "exchange", "groups", "latent",
           "latent_pages", "page_checks", "pages", "prefixes", "quantize", "stripes", "window"]

# So that `import attn_core.caches.pages` and `from attn_core.caches.pages import Heads` work.
sys.modules.update({f"{__name__}.{name}": sys.modules[module.__name__] for name, module in (
    ("pages", pages), ("groups", groups), ("stripes", stripes), ("page_checks", page_checks),
    ("allocator", allocator), ("drafts", drafts), ("exchange", exchange),
    ("latent_pages", latent_pages), ("prefixes", prefixes))})
