# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The named shapes of real models, under the name by which tests know them.

They stand in the library, because its benchmark ships with them.
"""

from attn_core.benchmark.cases import CASES, Case, flops, mask, scale, visible_pairs

__all__ = ["CASES", "Case", "flops", "mask", "scale", "visible_pairs"]
