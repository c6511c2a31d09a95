# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of attention mechanisms against each other and against other libraries."""

from attn_core.benchmark.runner import run_attention_benchmarks

__all__ = ["run_attention_benchmarks"]
