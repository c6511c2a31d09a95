"""Masks as values: leaves, `&`, `|`, `~`; see `algebra`."""

from attn_core.masks.leaves import (Mask, causal, chunk, custom, dense, full, lengths, offset)
from attn_core.masks.leaves import (placed, positions, prefix, segments, window)
from attn_core.masks.info import MaskInfo
from attn_core.masks.render import picture, show

__all__ = ["Mask", "MaskInfo", "causal", "chunk", "custom", "dense", "full", "lengths", "offset",
           "picture", "placed", "positions", "prefix", "segments", "show", "window"]
