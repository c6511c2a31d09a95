# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sliding-window cache: a ring buffer of `window` slots with each row's last tokens.

The token at position p of its sequence is in slot p % window. Queries attend to their window only,
so tokens are overwritten once no later query attends to them. The functions are pure, see `dense`.

>>> import jax.numpy as jnp
>>> from attn_core.caches import window
>>> cache = window.init(1, 4, (1, 8), dtype=jnp.float32)
>>> cache = window.append(cache, jnp.ones((1, 6, 1, 8)), jnp.ones((1, 6, 1, 8)))
>>> window.view(cache).positions
Array([[4, 5, 2, 3]], dtype=int32)
"""

from typing import Any, NamedTuple, TypeVar

import jax
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp

from attn_core import checks
from attn_core.caches import dense, device_parts, slots as slots_lib
from attn_core.caches.device_parts import Sharding
from attn_core.caches.slots import CacheView

__all__ = ["WindowCache", "append", "from_dense", "init", "init_like", "insert", "to_dense",
           "view"]


class WindowCache(NamedTuple):
  """The last `window` keys and values of B sequences; made by `init` or `from_dense`."""

  key: jax.Array  # [B, window, K, D]
  value: jax.Array  # [B, window, K, E]
  starts: jax.Array  # int32 [B]: tokens before this number are padding
  lengths: jax.Array  # int32 [B]: tokens written so far, padding included
  overflow: jax.Array  # bool [B]: an invalid write was dropped; reset when replaced
  # float32 [B, window, K] of keys in 8 bits, [B, window, K, groups] in 4
  key_scale: jax.Array | None = None
  value_scale: jax.Array | None = None
  origins: jax.Array | None = None  # as in a DenseCache
  sharding: device_parts.Kept | None = None  # over Auto axes, static; None: left to the compiler

  @property
  def indexs(self) -> jax.Array:
    """An alias of `lengths`."""
    return self.lengths


Cache = TypeVar("Cache", dense.DenseCache, WindowCache)


def init(batch: int, window: int, heads: tuple[int, ...], *, dtype: DTypeLike = jnp.bfloat16,
         sharding: Sharding | None = None) -> WindowCache:
  """Creates an empty cache.

  Args:
    batch: rows B.
    window: tokens that a row keeps. `sliding_window=(left, right)` needs left + 1; with left + T,
      calls of T tokens append and attend without a copy of the ring.
    heads: see `dense.init`.
    dtype: see `dense.init`.
    sharding: see `dense.init`.

  Raises:
    ValueError: see `dense.init`.
  """
  return slots_lib.empty(WindowCache, batch, window, heads, dtype=dtype, sharding=sharding)


def init_like(like: jax.Array | jax.ShapeDtypeStruct, window: int,
              heads: tuple[int, ...] | None = None, *,
              dtype: DTypeLike | None = None) -> WindowCache:
  """Creates an empty cache for the rows of a query or key, see `dense.init_like` and `init`.

  Raises:
    ValueError: see `dense.init_like`.
  """
  return slots_lib.init_like(WindowCache, like, window, heads, dtype)


def insert(cache: WindowCache, slots: ArrayLike, prefilled: WindowCache) -> WindowCache:
  """Replaces rows, see `dense.insert`; both caches need the same window.

  Raises:
    ValueError: see `dense.insert`; another kind of cache, or another number of slots.
  """
  slots_lib.check_kind(cache, WindowCache)
  slots_lib.check_kind(prefilled, WindowCache, "prefilled")
  mine, theirs = cache.key.shape[1], prefilled.key.shape[1]
  checks.require(mine == theirs, "prefilled", f"a WindowCache of {theirs} slots",
                 f"{mine} slots, as the cache: to_dense, then from_dense, makes one of the other")
  return slots_lib.insert(cache, slots, prefilled)


def append(cache: WindowCache, key: jax.Array, value: jax.Array,
           lengths: ArrayLike | None = None) -> WindowCache:
  """Appends new tokens to each row, over its oldest ones. T may exceed the window.

  Args:
    cache: B rows.
    key, value, lengths: see `dense.append`.

  Returns:
    The cache. Under jit a row with an invalid length is unchanged and marked in `overflow`.

  Raises:
    ValueError: another kind of cache, shapes that do not fit, or lengths known to be outside of
      0..T.
  """
  slots_lib.check_kind(cache, WindowCache)
  slots_lib.check_tokens(cache, key, value)
  return _appended(cache, key, value, slots_lib.counts(lengths, *key.shape[:2]))


@device_parts.one_program()
def _appended(cache: WindowCache, key: jax.Array, value: jax.Array,
              count: checks.Array) -> WindowCache:
  """Appends `count` int32 [B] of the new tokens to each row."""
  tokens, window = key.shape[1], cache.key.shape[1]
  count = device_parts.match(count, cache.lengths)
  bad = (count < 0) | (count > tokens)
  token = jnp.arange(tokens, dtype=jnp.int32)[None]
  last = count[:, None]
  kept = (token < last) & (token >= last - window) & ~bad[:, None]
  places = jnp.where(kept, (cache.lengths[:, None] + token) % window, window)
  cache = slots_lib.write_tokens(cache, key, value,
                          lambda array, new: slots_lib.write_slots(array, new, places))
  return device_parts.keep(cache._replace(
      lengths=cache.lengths + jnp.where(bad, 0, count),
      overflow=cache.overflow | device_parts.match(bad, cache.overflow)))


def view(cache: WindowCache) -> CacheView:
  """Returns the arrays that attention reads, with the position of the token in each slot."""
  slots_lib.check_kind(cache, WindowCache)
  window = cache.key.shape[1]
  last = cache.lengths[:, None] - 1
  position = last - (last - jnp.arange(window, dtype=jnp.int32)[None]) % window
  live = position >= jnp.maximum(cache.starts[:, None], 0)
  return CacheView(cache.key, cache.value, cache.starts, cache.lengths,
                   jnp.where(live, position, -1), cache.key_scale, cache.value_scale,
                   slots_lib.origins(cache))


def from_dense(cache: dense.DenseCache, window: int) -> WindowCache:
  """Converts the last `window` tokens of each row of a dense cache.

  Raises:
    ValueError: another kind of cache, or a window below 1.
  """
  slots_lib.check_kind(cache, dense.DenseCache)
  checks.integer("window", window, "an int >= 1", lambda x: x >= 1)
  return _from_dense(cache, window)


@device_parts.one_program("window")
def _from_dense(cache: dense.DenseCache, window: int) -> WindowCache:
  """Converts the last `window` tokens of each row."""
  ring = slots_lib.empty_like(cache, WindowCache, window)
  ring = ring._replace(starts=cache.starts, lengths=cache.lengths, overflow=cache.overflow,
                        origins=cache.origins)
  return _gather(cache, ring, view(ring).positions)


def to_dense(cache: WindowCache, slots: int) -> dense.DenseCache:
  """Converts to a dense cache; slots before the window are padding.

  Args:
    cache: the ring.
    slots: capacity of a row of the dense cache (tokens).

  Returns:
    The dense cache. Under jit, rows longer than `slots` are empty and marked in `overflow`.

  Raises:
    ValueError: another kind of cache, or a row is known to be longer than `slots`.
  """
  slots_lib.check_kind(cache, WindowCache)
  checks.integer("slots", slots, "an int >= 1", lambda x: x >= 1)
  slots_lib.check_concrete("tokens in the cache", (cache.lengths,), lambda x: x > slots,
                       f"at most {slots} slots")
  return _to_dense(cache, slots)


@device_parts.one_program("slots")
def _to_dense(cache: WindowCache, slots: int) -> dense.DenseCache:
  """Converts to a dense cache of `slots` tokens a row."""
  window, fits = cache.key.shape[1], cache.lengths <= slots
  full = slots_lib.empty_like(cache, dense.DenseCache, slots)
  full = full._replace(
      starts=jnp.where(fits, jnp.maximum(cache.starts, cache.lengths - window), 0),
      lengths=jnp.where(fits, cache.lengths, 0), overflow=cache.overflow | ~fits,
      origins=jnp.where(fits, slots_lib.origins(cache), 0))
  position = dense.view(full).positions
  return _gather(cache, full, jnp.where(position < 0, -1, position % window))


def _gather(source: dense.DenseCache | WindowCache, target: Cache, slots: jax.Array) -> Cache:
  """Fills `target` from the slots [B, target slots] of `source`; -1 gives zeros."""
  fields: dict[str, Any] = {
      name: slots_lib.read_slots(getattr(source, name), slots) for name in slots_lib.STORED
      if getattr(source, name) is not None}
  return device_parts.keep(target._replace(**fields))
