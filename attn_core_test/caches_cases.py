# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Caches and tokens that the tests of caches share.

B rows of T new tokens, H query heads, K key heads, D and E widths; S is the number of slots.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.caches import dense, window

B, T, S, H, K, D, E = 3, 4, 11, 4, 2, 6, 5
HEADS = (K, D, E)
EVEN = (K, D, 4)  # of caches of 4 bits
KINDS = {"dense": (dense, S), "ring": (window, 5)}


def tokens(count, batch=B, seed=0):
  """Returns random keys [B, T, K, D] and values [B, T, K, E] for `count` tokens T."""
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return array(batch, count, K, D), array(batch, count, K, E)


def filled(module, slots, counts, *, dtype=jnp.float32, heads=HEADS):
  """Returns a cache with `counts` tokens in its rows, the same ones for every kind of cache."""
  key, value = (x[..., :w] for x, w in zip(tokens(max(counts), len(counts), 7), heads[1:]))
  cache = module.init(len(counts), slots, heads, dtype=dtype)
  return module.append(cache, key, value, np.array(counts))


def equal(a, b):
  """Asserts that two pytrees have equal arrays."""
  jax.tree.map(np.testing.assert_array_equal, a, b)
