# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The buckets of T5's relative positions.

Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer,
https://arxiv.org/abs/1910.10683.
"""

import jax
import jax.numpy as jnp
import numpy as np

MOST_COMPARED = 2**14  # pairs of a bucket and a distance, for each head


def bucket(distance: np.ndarray, num_buckets: int, max_distance: int,
           bidirectional: bool) -> np.ndarray:
  """Returns the bucket of key position - query position: int, in 0..num_buckets - 1.

  Half of the buckets hold one distance each, the others ranges that grow by a constant factor up to
  `max_distance`; farther keys share the last one. Bidirectional: the second half of the buckets is
  for keys after the query, which otherwise share the first bucket.

  Args:
    distance: ints (tokens).
    num_buckets: even if bidirectional.
    max_distance: the first distance of the last bucket (tokens).
    bidirectional: whether keys after the query have buckets.
  """
  distance = np.asarray(distance)
  first = np.zeros_like(distance)
  if bidirectional:
    num_buckets //= 2
    first = np.where(distance > 0, num_buckets, 0)
    apart = abs(distance)
  else:
    apart = np.maximum(-distance, 0)
  exact = num_buckets // 2
  # In float32, as everywhere that models were trained: it decides on which side a border lies.
  ratio = np.log(np.maximum(apart, 1).astype(np.float32) / np.float32(exact))
  ratio = ratio / np.float32(np.log(max_distance / exact)) * np.float32(num_buckets - exact)
  far = np.minimum(exact + ratio.astype(np.int32), num_buckets - 1)
  return first + np.where(apart < exact, apart, far)


def by_distance(num_buckets: int, max_distance: int,
                bidirectional: bool) -> tuple[int, np.ndarray]:
  """Returns (the first distance, the bucket of it and of each following one).

  Distances before the first, and after the last, have the buckets of these.
  """
  last = max_distance if bidirectional else 0
  distance = np.arange(-max_distance, last + 1)
  return -max_distance, bucket(distance, num_buckets, max_distance, bidirectional)


def spread(table: jax.Array, index: np.ndarray) -> jax.Array:
  """Returns table [..., n] at the buckets of an index [m]: [..., m].

  Its derivative looks nothing up, so that the cotangent of a bucket is a sum in one order on every
  platform; additions of single numbers have none on GPUs, and take long on TPUs.
  """
  @jax.custom_jvp
  def look_up(table: jax.Array) -> jax.Array:
    return table[..., index]

  @look_up.defjvp
  def _(tables: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    few = tables[0].shape[-1] * index.size <= MOST_COMPARED
    return look_up(*tables), (_compared if few else _repeated)(*tangents, index)
  return look_up(table)


def _compared(table: jax.Array, index: np.ndarray) -> jax.Array:
  """Returns what `spread` does, in one operation on all pairs of a bucket and an entry."""
  chosen = np.arange(table.shape[-1])[:, None] == index[None]
  chosen = chosen.reshape(*[1] * (table.ndim - 1), *chosen.shape)
  return jnp.where(chosen, table[..., None], 0).sum(-2)


def _repeated(table: jax.Array, index: np.ndarray) -> jax.Array:
  """Returns what `spread` does, in linear memory: runs of entries of one bucket, joined."""
  borders = [0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), index.size]
  return jnp.concatenate([
      jnp.broadcast_to(table[..., index[first], None], (*table.shape[:-1], end - first))
      for first, end in zip(borders, borders[1:])], -1)
