# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of `PagesV2` and `PagesV3`: the key and the value of each head in turn."""

import jax
import jax.numpy as jnp

from attn_core import array_axes
from attn_core.caches.paged.layouts import Array, PagesV2, PagesV3, heads_of


def interleave(key: Array, value: Array) -> jax.Array:
  """Interleaves the heads of keys and values, as in PagesV2 and PagesV3.

  Args:
    key: [..., K, D].
    value: [..., K, E].

  Returns:
    [..., 2K, max(D, E)], keys in even rows; the narrower are padded with zeros.
  """
  width = max(key.shape[-1], value.shape[-1])
  key, value = (jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))
                for x in (key, value))
  shape = (*key.shape[:-2], 2 * key.shape[-2], width)
  if array_axes.parts_of(key, value) is not None:  # JAX keeps the axes of heads in this form
    return jnp.stack([key, value], -2).reshape(shape)
  # XLA writes this in one pass on TPUs, a stack of both in three.
  return jnp.concatenate([key, value], -1).reshape(shape)


def pad_rows(cache: PagesV2 | PagesV3, rows: Array) -> jax.Array:
  """Pads interleaved rows with zeros to the heads and width of a cache.

  Args:
    cache: PagesV2 or PagesV3.
    rows: [num_tokens, 2K, width], with at most the cache's heads and width.

  Returns:
    [num_tokens, 2K, width], K and the width of the cache.
  """
  return jnp.pad(rows, ((0, 0), (0, 2 * heads_of(cache).key_heads - rows.shape[1]),
                        (0, cache.pages.shape[-1] - rows.shape[2])))
