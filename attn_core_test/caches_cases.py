# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes and contents of the caches that several tests of caches share."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.caches import dense, window

B, T, S, H, K, D, E = 3, 4, 11, 4, 2, 6, 5
HEADS = (K, D, E)
KINDS = {"dense": (dense, S), "ring": (window, 5)}


def tokens(count, batch=B, seed=0):
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return array(batch, count, K, D), array(batch, count, K, E)


def filled(module, slots, counts, *, dtype=jnp.float32, heads=HEADS):
  """A cache whose rows were given so many tokens, the same ones in every kind of cache."""
  key, value = (x[..., :w] for x, w in zip(tokens(max(counts), len(counts), 7), heads[1:]))
  cache = module.init(len(counts), slots, heads, dtype=dtype)
  return module.append(cache, key, value, np.array(counts))


def equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
