# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shapes of real models, under the names by which tests know them.

The benchmark of the library ships them, so they are defined there.
"""

from attn_core.benchmark.cases import CASES, Case, flops, mask, scale, visible_pairs

__all__ = ["CASES", "Case", "flops", "mask", "scale", "visible_pairs"]
