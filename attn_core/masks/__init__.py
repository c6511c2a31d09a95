# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks as values: `causal() & window(127, 0)`, and their pictures; see `constructors`."""

from attn_core.masks.constructors import causal, chunk, custom, dense, full, lengths, offset
from attn_core.masks.constructors import placed, positions, prefix, segments, window
from attn_core.masks.info import MaskInfo
from attn_core.masks.mask import Mask
from attn_core.masks.render import picture, show
from attn_core.masks.selected import selected_blocks, selected_keys

__all__ = ["Mask", "MaskInfo", "causal", "chunk", "custom", "dense", "full", "lengths", "offset",
           "picture", "placed", "positions", "prefix", "segments", "selected_blocks",
           "selected_keys", "show", "window"]
