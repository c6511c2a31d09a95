"""The dense cache: every row keeps all its tokens, in slots of its own, one after another.

Rows stand at different lengths. Keys come with rotary applied: a cache knows nothing of it, and a
token's rotation never changes. Every function is pure; donate the cache to `jax.jit` and it is
updated in place. They may be used inside scan, vmap and shard_map.

Letters: B batch, T new tokens, S slots, K key heads, D key width, E value width; R requests.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from attn_core.caches import slots as storage
from attn_core.caches.slots import CacheView

__all__ = ["CacheView", "DenseCache", "append", "init", "insert", "view"]


class DenseCache(NamedTuple):
  """Keys and values of B sequences of up to S tokens; made by `init`."""

  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  starts: Any  # int32 [B]: slots before it are padding; positions count from slot 0 all the same
  lengths: Any  # int32 [B]: slots starts..lengths - 1 hold tokens
  overflow: Any  # bool [B]: some write did not fit and was left out; until the row is replaced
  key_scale: Any = None  # float32 [B, S, K] of keys in 8 bits
  value_scale: Any = None

  @property
  def indexs(self):
    """`lengths`, by another name that is in use: where a row is written next."""
    return self.lengths


def init(batch: int, slots: int, heads: tuple, *, dtype=jnp.bfloat16) -> DenseCache:
  """A cache without tokens.

  Args:
    batch: rows B.
    slots: tokens S that a row can hold.
    heads: (K, D), or (K, D, E) where values have another width.
    dtype: floating-point, or int8 or float8_e4m3fn with a scale per token and head.

  Returns:
    A cache whose rows are empty.

  Raises:
    ValueError: a size that is no int >= 1, or another dtype.
  """
  return storage.empty(DenseCache, batch, slots, heads, dtype=dtype)


def append(cache: DenseCache, key, value, lengths=None) -> DenseCache:
  """New tokens after those of every row.

  Args:
    cache: B rows.
    key: float [B, T, K, D], rotary applied.
    value: float [B, T, K, E].
    lengths: int32 [B], how many of the T tokens of a row count, the first ones; None: all.

  Returns:
    The cache. Under jit a row without enough free slots, or with a wrong length, stays what it was
    and is marked in `overflow`.

  Raises:
    ValueError: another kind of cache; shapes that do not fit; lengths outside of 0..T, or too few
      free slots, where the numbers are known (outside of jit).
  """
  storage.check_kind(cache, DenseCache)
  storage.check_tokens(cache, key, value)
  (batch, tokens), slots = key.shape[:2], cache.key.shape[1]
  count = storage.counts(lengths, batch, tokens)
  storage.refuse_known(
      "tokens in the cache and new ones", (cache.lengths, count), lambda x, new: x + new > slots,
      f"together at most {slots} slots; make the cache larger, or use a window cache")
  after = cache.lengths + count
  bad = (count < 0) | (count > tokens) | (after > slots)
  token = jnp.arange(tokens, dtype=jnp.int32)
  places = jnp.where((token < count[:, None]) & ~bad[:, None], cache.lengths[:, None] + token,
                     slots)
  cache = storage.written(cache, key, value,
                          lambda array, new: storage.write_slots(array, new, places))
  return cache._replace(lengths=jnp.where(bad, cache.lengths, after), overflow=cache.overflow | bad)


def insert(cache: DenseCache, slots, prefilled: DenseCache) -> DenseCache:
  """Rows of another cache in place of rows `slots` of this one.

  Args:
    cache: B rows.
    slots: int32 [R], different rows.
    prefilled: R rows, with at most as many slots in each.

  Returns:
    The cache. Under jit, rows that two requests claim are marked in `overflow`, and all rows are
    if any of `slots` does not exist.

  Raises:
    ValueError: another kind of cache, a `prefilled` that does not fit, or `slots` that are known to
      be out of range or not different.
  """
  storage.check_kind(cache, DenseCache)
  return storage.insert(cache, slots, prefilled)


def view(cache: DenseCache) -> CacheView:
  """What a call reads: the arrays, and the position of every slot, which is its number."""
  storage.check_kind(cache, DenseCache)
  slot = jnp.arange(cache.key.shape[1], dtype=jnp.int32)
  live = (slot >= cache.starts[:, None]) & (slot < cache.lengths[:, None])
  return CacheView(cache.key, cache.value, cache.starts, cache.lengths,
                   jnp.where(live, slot, -1), cache.key_scale, cache.value_scale)
