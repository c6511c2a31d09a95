# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mechanisms as functions whose arguments differ from those of `mechanism_functions`."""
