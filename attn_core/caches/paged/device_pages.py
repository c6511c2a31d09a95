# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of an array of pages, on each device's part where Explicit mesh axes shard it.

See `caches.device_parts`.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attn_core import array_axes
from attn_core.caches import device_parts


def write(array: jax.Array, new: jax.Array, axis: int, page: jax.Array,
          offset: jax.Array | None = None) -> jax.Array:
  """Writes tokens or whole pages to an array of a cache.

  Args:
    array: the pages are its dimension `axis`, their tokens the next one.
    new: num_tokens tokens in place of these two dimensions, or pages if `offset` is None.
    axis: 0, or 1 for the keys and values of PagesV1.
    page: int32 [num_tokens or pages]; those past the pool are dropped.
    offset: int32 [num_tokens], place of each token in its page; None: whole pages.
  """
  index = (page,) if offset is None else (page, offset)
  everything = (slice(None),) * axis
  parts = array_axes.parts_of(array, new, *index)
  if parts is None:
    return array.at[*everything, *index].set(new, mode="drop")

  def local(array: jax.Array, new: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    own = (device_parts.local_index(x, array.shape[n], parts.axes(n))
           for n, x in enumerate(index, start=axis))
    return array.at[*everything, *own].set(new, mode="drop")

  spec = parts.spec
  of_new = PartitionSpec(*spec[:axis], None, *spec[axis + len(index):])
  return parts.run(local, (array, new, index),
                   (PartitionSpec(*spec), of_new, (PartitionSpec(),) * len(index)),
                   PartitionSpec(*spec))


def take(array: jax.Array, ids: jax.Array, axis: int) -> jax.Array:
  """Reads pages `ids` int32 [num_ids], clipped to the pool, along dimension `axis`."""
  parts = array_axes.parts_of(array, ids)
  if parts is None or not parts.axes(axis):
    ids = ids if parts is None else device_parts.match(ids, array, (None,))
    return jnp.take(array, ids, axis, mode="clip")
  pool, axes = array.shape[axis], parts.axes(axis)

  def local(array: jax.Array, ids: jax.Array) -> jax.Array:
    own = device_parts.local_index(jnp.clip(ids, 0, pool - 1), array.shape[axis], axes)
    found = jnp.take(array, own, axis, mode="fill", fill_value=0)
    if array.dtype.itemsize > 1:
      return lax.psum(found, axes)  # one device has the page, the others add zeros
    bits = lax.psum(lax.bitcast_convert_type(found, jnp.uint8), axes)
    return lax.bitcast_convert_type(bits, array.dtype)

  spec = parts.spec
  return parts.run(local, (array, ids), (PartitionSpec(*spec), PartitionSpec()),
                   PartitionSpec(*spec[:axis], None, *spec[axis + 1:]))
