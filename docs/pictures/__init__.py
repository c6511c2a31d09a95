# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the documentation: `python3 -m docs.pictures` from a clone."""
