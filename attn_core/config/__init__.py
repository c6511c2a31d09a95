# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of a model's attention and its devices, and values derived from it."""

from attn_core.config.config import AttnConfig, EasyMethod
from attn_core.config.config_dict import AttnConfigDict

__all__ = ["AttnConfig", "AttnConfigDict", "EasyMethod"]
