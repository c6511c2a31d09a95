# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports of programs that are compiled and not run."""

from collections.abc import Callable

# Given the number of programs, returns what is called with a line of text for every one.
Progress = Callable[[int], Callable[[str], object]]
