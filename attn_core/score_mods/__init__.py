# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions of the scores as values: `alibi(slopes) >> soft_cap(30.0)`; see `constructors`."""

from attn_core.score_mods.constructors import alibi, alibi_slopes, apply, by_distance, custom, dense
from attn_core.score_mods.constructors import grid, per_key, per_query, relative, scale_by, soft_cap
from attn_core.score_mods.score_mod import ScoreMod

__all__ = ["ScoreMod", "alibi", "alibi_slopes", "apply", "by_distance", "custom", "dense", "grid",
           "per_key", "per_query", "relative", "scale_by", "soft_cap"]
