# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dense cache: each row keeps all of its tokens in consecutive slots.

Rows may have different lengths. Keys are stored with rotary applied, since the rotation of a token
never changes. All functions are pure and work inside scan, vmap and shard_map; if the cache is
donated to `jax.jit`, it is updated in place.

>>> import jax.numpy as jnp
>>> from attn_core.caches import dense
>>> cache = dense.init(2, 4, (1, 8), dtype=jnp.float32)
>>> cache = dense.append(cache, jnp.ones((2, 3, 1, 8)), jnp.ones((2, 3, 1, 8)), jnp.array([3, 1]))
>>> cache.lengths
Array([3, 1], dtype=int32)
>>> dense.view(cache).positions
Array([[ 0,  1,  2, -1],
       [ 0, -1, -1, -1]], dtype=int32)
"""

from typing import NamedTuple

import jax
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp

from attn_core import checks
from attn_core.caches import device_parts, slots as slots_lib
from attn_core.caches.device_parts import Sharding
from attn_core.caches.slots import CacheView

__all__ = ["CacheView", "DenseCache", "append", "init", "init_like", "insert", "view"]


class DenseCache(NamedTuple):
  """Keys and values of B sequences of up to S tokens; made by `init`."""

  key: jax.Array  # [B, S, K, D]; with 4 bits uint8 [B, S, K, D / 2]
  value: jax.Array  # [B, S, K, E]; with 4 bits uint8 [B, S, K, E / 2]
  starts: jax.Array  # int32 [B]: slots before it are padding
  lengths: jax.Array  # int32 [B]: slots starts..lengths - 1 hold tokens
  overflow: jax.Array  # bool [B]: a write did not fit and was dropped; reset when replaced
  # float32 [B, S, K] of keys in 8 bits, [B, S, K, groups] in 4
  key_scale: jax.Array | None = None
  value_scale: jax.Array | None = None
  # int32 [B]: the slot from which masks count positions, where tokens before `starts` are gone, see
  # `window.to_dense`; None: `starts`.
  origins: jax.Array | None = None
  sharding: device_parts.Kept | None = None  # over Auto axes, static; None: left to the compiler

  @property
  def indexs(self) -> jax.Array:
    """An alias of `lengths`: the slot that is written next."""
    return self.lengths


def init(batch: int, slots: int, heads: tuple[int, ...], *, dtype: DTypeLike = jnp.bfloat16,
         sharding: Sharding | None = None) -> DenseCache:
  """Creates an empty cache.

  Args:
    batch: rows B.
    slots: tokens S that a row can hold.
    heads: (K, D), or (K, D, E) if values have another width.
    dtype: floating-point, int8 or float8_e4m3fn with a scale per token and head, or int4 with one
      for every 32 columns of these too; widths are even then.
    sharding: of the keys [B, S, K, D]: a NamedSharding, or a PartitionSpec over the mesh of
      `jax.set_mesh`; the other arrays of the cache are sharded alike, each device creates its own
      part only, and updates keep it. None: not sharded.

  Returns:
    A cache whose rows are empty.

  Raises:
    ValueError: a size is not an int >= 1, a width is odd with int4, the dtype is not supported, or
      the sharding is not one of four dimensions that it divides over an existing mesh.
  """
  return slots_lib.empty(DenseCache, batch, slots, heads, dtype=dtype, sharding=sharding)


def init_like(like: jax.Array | jax.ShapeDtypeStruct, slots: int,
              heads: tuple[int, ...] | None = None, *,
              dtype: DTypeLike | None = None) -> DenseCache:
  """Creates an empty cache for the rows of a query or key, which is sharded as they are.

  >>> import jax.numpy as jnp
  >>> from attn_core.caches import dense
  >>> dense.init_like(jnp.ones((2, 1, 4, 16)), slots=32, heads=(2, 16)).key.shape
  (2, 32, 2, 16)

  Args:
    like: [B, T, K, D] or [B, T, H, D], in layout bthd. Mesh axes that shard its rows and heads
      shard those of the cache, except for heads that they do not divide. During tracing, shardings
      over axes of type Auto are not known and left to the partitioner.
    slots: tokens S that a row can hold.
    heads: (K, D) or (K, D, E); None: those of `like`, which is a key then.
    dtype: see `init`; None: that of `like`.

  Returns:
    A cache whose rows are empty.

  Raises:
    ValueError: `like` does not have four dimensions, or see `init`.
  """
  return slots_lib.init_like(DenseCache, like, slots, heads, dtype)


def append(cache: DenseCache, key: jax.Array, value: jax.Array,
           lengths: ArrayLike | None = None) -> DenseCache:
  """Appends new tokens to each row.

  Args:
    cache: B rows.
    key: float [B, T, K, D], rotary applied.
    value: float [B, T, K, E].
    lengths: int32 [B], number of valid tokens among a row's T tokens; None: all.

  Returns:
    The cache, sharded as before. Under jit a row without enough free slots, or with a wrong length,
    is unchanged and marked in `overflow`.

  Raises:
    ValueError: another kind of cache, shapes that do not fit, or, outside of jit, lengths outside
      of 0..T or too few free slots.
  """
  slots_lib.check_kind(cache, DenseCache)
  slots_lib.check_tokens(cache, key, value)
  (batch, tokens), slots = key.shape[:2], cache.key.shape[1]
  count = slots_lib.counts(lengths, batch, tokens)
  slots_lib.check_concrete(
      "tokens in the cache and new ones", (cache.lengths, count), lambda x, new: x + new > slots,
      f"together at most {slots} slots; make the cache larger, or use a window cache")
  return _appended(cache, key, value, count)


@device_parts.one_program()
def _appended(cache: DenseCache, key: jax.Array, value: jax.Array,
              count: checks.Array) -> DenseCache:
  """Appends `count` int32 [B] of the new tokens to each row."""
  tokens, slots = key.shape[1], cache.key.shape[1]
  count = device_parts.match(count, cache.lengths)
  after = cache.lengths + count
  bad = (count < 0) | (count > tokens) | (after > slots)
  token = jnp.arange(tokens, dtype=jnp.int32)[None]
  places = jnp.where((token < count[:, None]) & ~bad[:, None], cache.lengths[:, None] + token,
                     slots)
  cache = slots_lib.write_tokens(
      cache, key, value,
      lambda array, new: slots_lib.write_slots(array, new, places, consecutive=True))
  return device_parts.keep(cache._replace(
      lengths=jnp.where(bad, cache.lengths, after),
      overflow=cache.overflow | device_parts.match(bad, cache.overflow)))


def insert(cache: DenseCache, slots: ArrayLike, prefilled: DenseCache) -> DenseCache:
  """Replaces rows `slots` by the rows of another cache.

  Args:
    cache: B rows.
    slots: int32 [num_requests], different rows.
    prefilled: num_requests rows, with at most as many slots in each.

  Returns:
    The cache, sharded as before. Under jit, rows that two requests claim are marked in `overflow`;
    if a row of `slots` does not exist, all rows are.

  Raises:
    ValueError: another kind of cache, a `prefilled` that does not fit, or `slots` that are known to
      be out of range or not different.
  """
  slots_lib.check_kind(cache, DenseCache)
  return slots_lib.insert(cache, slots, prefilled)


def view(cache: DenseCache) -> CacheView:
  """Returns the arrays that attention reads."""
  slots_lib.check_kind(cache, DenseCache)
  slot = jnp.arange(cache.key.shape[1], dtype=jnp.int32)[None]
  live = (slot >= cache.starts[:, None]) & (slot < cache.lengths[:, None])
  return CacheView(cache.key, cache.value, cache.starts, cache.lengths,
                   jnp.where(live, slot, -1), cache.key_scale, cache.value_scale,
                   slots_lib.origins(cache))
