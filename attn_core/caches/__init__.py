"""Caches as values and pure functions: `dense`, `window` (a ring), and their storage in 8 bits.

`caches.dense.init`, `append`, `insert`, `view`, the same in `caches.window`; `caches.quantize`.
"""

from attn_core.caches import dense, quantize, window
from attn_core.caches.dense import DenseCache
from attn_core.caches.update import CacheMetadata, concatenate
from attn_core.caches.slots import CacheView
from attn_core.caches.window import WindowCache

__all__ = ["CacheMetadata", "CacheView", "DenseCache", "WindowCache", "concatenate", "dense",
           "quantize", "window"]
