# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with the signatures of other libraries, none of which is imported.

Each function returns an array and takes options such as `mechanism` and `metadata` as keywords (see
`AdapterOptions`), which `functools.partial` binds:

    attention_fn = functools.partial(flax_attention_fn, mechanism="flash_attn2", metadata=metadata)
"""

from attn_core.adapters.equinox import equinox_attention
from attn_core.adapters.flax import flax_attention_fn
from attn_core.adapters.jax_nn import dot_product_attention
from attn_core.adapters.keras import keras_dot_product_attention
from attn_core.adapters.options import AdapterOptions
from attn_core.adapters.tokamax import tokamax_dot_product_attention

__all__ = [
    "AdapterOptions", "dot_product_attention", "equinox_attention", "flax_attention_fn",
    "keras_dot_product_attention", "tokamax_dot_product_attention",
]
