"""The sliding-window cache: a ring of W slots that keeps every row's last W tokens.

The token at position p of its sequence stands in slot p % W. A query sees its window only, so what
is overwritten is what no later query sees. Pure functions, as those of `dense`.

Letters: B batch, T new tokens, W slots of the ring, K key heads, D key width, E value width.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from attn_core import checks
from attn_core.caches import dense, slots as storage
from attn_core.caches.slots import CacheView

__all__ = ["WindowCache", "append", "from_dense", "init", "insert", "to_dense", "view"]


class WindowCache(NamedTuple):
  """The last W keys and values of B sequences; made by `init` or `from_dense`."""

  key: Any  # [B, W, K, D]
  value: Any  # [B, W, K, E]
  starts: Any  # int32 [B]: positions before it are padding
  lengths: Any  # int32 [B]: tokens written so far, which is the next one's position
  overflow: Any  # bool [B]: some write was wrong and was left out; until the row is replaced
  key_scale: Any = None  # float32 [B, W, K] of keys in 8 bits
  value_scale: Any = None

  @property
  def indexs(self):
    """`lengths`, by another name that is in use."""
    return self.lengths


def init(batch: int, window: int, heads: tuple, *, dtype=jnp.bfloat16) -> WindowCache:
  """A cache without tokens.

  Args:
    batch: rows B.
    window: tokens W that a row keeps. `sliding_window=(left, right)` needs left + 1 of them; with
      left + T of them, T tokens are appended and attended to without a copy of the ring.
    heads: as in `dense.init`.
    dtype: as in `dense.init`.

  Raises:
    ValueError: as `dense.init`.
  """
  return storage.empty(WindowCache, batch, window, heads, dtype=dtype)


def insert(cache: WindowCache, slots, prefilled: WindowCache) -> WindowCache:
  """As `dense.insert`, for a cache of as many slots: a token's slot goes by their number.

  Raises:
    ValueError: as `dense.insert`, another kind of cache, or another number of slots.
  """
  storage.check_kind(cache, WindowCache)
  storage.check_kind(prefilled, WindowCache, "prefilled")
  mine, theirs = cache.key.shape[1], prefilled.key.shape[1]
  checks.require(mine == theirs, "prefilled", f"a WindowCache of {theirs} slots",
                 f"{mine} slots, as the cache: to_dense, then from_dense, makes one of the other")
  return storage.insert(cache, slots, prefilled)


def append(cache: WindowCache, key, value, lengths=None) -> WindowCache:
  """New tokens after those of every row; the oldest ones give way. T may be larger than W.

  Args:
    cache: B rows.
    key, value, lengths: as in `dense.append`.

  Returns:
    The cache. Under jit a row with a wrong length stays what it was and is marked in `overflow`.

  Raises:
    ValueError: another kind of cache; shapes that do not fit; lengths known to be outside of 0..T.
  """
  storage.check_kind(cache, WindowCache)
  storage.check_tokens(cache, key, value)
  (batch, tokens), window = key.shape[:2], cache.key.shape[1]
  count = storage.counts(lengths, batch, tokens)
  bad = (count < 0) | (count > tokens)
  token = jnp.arange(tokens, dtype=jnp.int32)
  last = count[:, None]
  kept = (token < last) & (token >= last - window) & ~bad[:, None]
  places = jnp.where(kept, (cache.lengths[:, None] + token) % window, window)
  cache = storage.written(cache, key, value,
                          lambda array, new: storage.write_slots(array, new, places))
  return cache._replace(lengths=cache.lengths + jnp.where(bad, 0, count),
                        overflow=cache.overflow | bad)


def view(cache: WindowCache) -> CacheView:
  """What a call reads: the ring as it is, and the position of the token in every slot."""
  storage.check_kind(cache, WindowCache)
  window = cache.key.shape[1]
  last = cache.lengths[:, None] - 1
  position = last - (last - jnp.arange(window, dtype=jnp.int32)) % window
  live = position >= jnp.maximum(cache.starts[:, None], 0)
  return CacheView(cache.key, cache.value, cache.starts, cache.lengths,
                   jnp.where(live, position, -1), cache.key_scale, cache.value_scale)


def from_dense(cache: dense.DenseCache, window: int) -> WindowCache:
  """The last `window` tokens of every row of a dense cache.

  Raises:
    ValueError: another kind of cache, or a window below 1.
  """
  storage.check_kind(cache, dense.DenseCache)
  ring = storage.like(cache, WindowCache, cache.lengths.shape[0], window)
  ring = ring._replace(starts=cache.starts, lengths=cache.lengths, overflow=cache.overflow)
  return _moved(cache, ring, view(ring).positions)


def to_dense(cache: WindowCache, slots: int) -> dense.DenseCache:
  """A dense cache with what the ring still holds; earlier slots are padding.

  Args:
    cache: the ring.
    slots: tokens that a row of the dense cache can hold.

  Returns:
    The dense cache. Under jit, rows longer than `slots` are empty and marked in `overflow`.

  Raises:
    ValueError: another kind of cache, or a row is known to be longer than `slots`.
  """
  storage.check_kind(cache, WindowCache)
  checks.integer("slots", slots, "an int >= 1", lambda x: x >= 1)
  storage.refuse_known("tokens in the cache", (cache.lengths,), lambda x: x > slots,
                       f"at most {slots} slots")
  window, fits = cache.key.shape[1], cache.lengths <= slots
  full = storage.like(cache, dense.DenseCache, cache.lengths.shape[0], slots)
  full = full._replace(
      starts=jnp.where(fits, jnp.maximum(cache.starts, cache.lengths - window), 0),
      lengths=jnp.where(fits, cache.lengths, 0), overflow=cache.overflow | ~fits)
  position = dense.view(full).positions
  return _moved(cache, full, jnp.where(position < 0, -1, position % window))


def _moved(source, target, slots):
  """`target` with what `source` has in the slots [B, number of target's]; zeros where it is -1."""
  fields = {}
  for name in storage.STORED:
    x = getattr(source, name)
    if x is not None:
      index = slots.reshape(*slots.shape, *[1] * (x.ndim - 2))
      picked = jnp.take_along_axis(x, jnp.maximum(index, 0), axis=1)
      fields[name] = jnp.where(index < 0, jnp.zeros((), x.dtype), picked)
  return target._replace(**fields)
