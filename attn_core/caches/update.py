# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""One step of a model with a cache: writes the new tokens and returns the keys to attend to.

T is the number of new tokens of a row, S that of the keys to attend to.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_core import checks
from attn_core.caches import dense, device_parts, latent, quantize, slots as slots_lib, window
from attn_core.caches.dense import DenseCache
from attn_core.caches.latent import LatentCache
from attn_core.caches.slots import CacheRows, CacheView
from attn_core.caches.window import WindowCache
from attn_core.masks import constructors, leaves, mask as mask_lib, materialize
from attn_core.masks.info import MaskInfo
from attn_core.types import Mode, SlidingWindow

AnyCache = DenseCache | WindowCache
MODES = ("__prefill__", "__autoregressive__", "__insert__")


class CacheMetadata(NamedTuple):
  """Metadata of the new tokens of one step; integers of any dtype, arrays or lists."""

  # int32 [B]: number of valid tokens among the T of each row; None: all
  lengths: ArrayLike | None = None
  # int32 [B]: number of each row's first tokens that are padding; None: unchanged. Masks count
  # positions from the token after them.
  starts: ArrayLike | None = None
  # int32 [num_requests]: the rows that they replace, in mode "__insert__"; None: every other mode
  slots: ArrayLike | None = None


def mode_of(mode: Mode | None, cache_metadata: CacheMetadata | None, tokens: int) -> Mode:
  """Returns the mode of a call with a cache; where none is given, by the call itself.

  Args:
    mode: as given.
    cache_metadata: of the new tokens.
    tokens: T, the queries of each row.
  """
  if mode is not None:
    return mode
  if getattr(cache_metadata, "slots", None) is not None:
    return "__insert__"
  return "__autoregressive__" if tokens == 1 else "__prefill__"


class Step(NamedTuple):
  """Keys, values and mask of a call with a cache, and the updated cache."""

  key: jax.Array  # [B, S, K, D] as stored
  value: jax.Array  # [B, S, K, E]
  key_scale: jax.Array | None  # float32 [B, S, K], scales of 8-bit keys, or None
  value_scale: jax.Array | None
  # Positions of queries and keys, from a row's first token; padding and empty slots are hidden.
  mask_info: MaskInfo
  cache: AnyCache | LatentCache  # after the step
  overflow: jax.Array  # bool [B]: rows whose tokens could not be written; their output becomes NaN
  rows: CacheRows | None = None  # where slots are the positions; None: `mask_info` alone says them


def update_cache(tokens: tuple[jax.Array, jax.Array] | int, cache: AnyCache | LatentCache,
                 cache_metadata: CacheMetadata | None, mode: str | None, reach: int | None) -> Step:
  """Writes new tokens to a cache and returns what their queries attend to.

  Args:
    tokens: (key float [B, T, K, D], value float [B, T, K, E]) of the new tokens; or T: nothing is
      written, and the queries are the last T tokens of their rows.
    cache: a DenseCache or WindowCache; or a LatentCache, with tokens (latent rows
      [B, T, 1, latent + rope], values without numbers).
    cache_metadata: of the new tokens.
    mode: "__prefill__" and "__autoregressive__" append to every row; "__insert__" replaces the rows
      `cache_metadata.slots` by the rows of `tokens`, each of which attends to itself only.
    reach: largest distance of a visible key before its query (tokens); None: unbounded.

  Raises:
    ValueError: an argument does not fit the cache or the mode; see also `append` and `insert` of
      the cache's module.
  """
  if isinstance(cache, LatentCache):
    split = tokens if isinstance(tokens, int) else latent.split_tokens(cache, tokens[0])
    step = update_cache(split, latent.as_dense(cache), cache_metadata, mode, reach)
    assert isinstance(step.cache, DenseCache)
    return step._replace(cache=latent.of_dense(step.cache, cache.widths))
  cache_metadata = CacheMetadata() if cache_metadata is None else cache_metadata
  checks.require(isinstance(cache, AnyCache), "cache_view", type(cache).__name__,
                 "a DenseCache or a WindowCache")
  checks.require(isinstance(cache_metadata, CacheMetadata), "cache_metadata",
                 type(cache_metadata).__name__, "a CacheMetadata or None")
  checks.require(mode in MODES, "mode", f"{mode!r} with a cache", f"one of {', '.join(MODES)}")
  inserts = mode == "__insert__"
  checks.require((cache_metadata.slots is not None) == inserts, "cache_metadata.slots",
                 f"{checks.describe(cache_metadata.slots)} in mode {mode!r}",
                 "the rows to replace in mode '__insert__', None in every other mode")
  if isinstance(cache, WindowCache):
    slots = cache.key.shape[1]
    checks.require(reach is not None and reach < slots, "sliding_window",
                   "no bound to the left" if reach is None else f"{reach} to the left",
                   f"at most {slots - 1} tokens to the left, since the window cache keeps {slots}")
  if inserts:
    return _insert(tokens, cache, cache_metadata)
  if cache_metadata.starts is not None:
    starts = _starts(cache_metadata, cache.lengths.shape[0])
    cache = cache._replace(starts=device_parts.match(starts, cache.starts), origins=None)
  if isinstance(tokens, int):
    return _read(tokens, cache, cache_metadata, reach)
  return _append(tokens, cache, cache_metadata, reach)


def _view(cache: AnyCache) -> CacheView:
  return dense.view(cache) if isinstance(cache, DenseCache) else window.view(cache)


def _starts(cache_metadata: CacheMetadata, rows: int) -> jax.Array:
  return jnp.asarray(slots_lib.row_numbers("cache_metadata.starts", cache_metadata.starts, rows))


def _insert(tokens: tuple[jax.Array, jax.Array] | int, cache: AnyCache,
            cache_metadata: CacheMetadata) -> Step:
  if isinstance(tokens, int):
    raise ValueError("key and value: got None in mode '__insert__'; expected the keys and values "
                     "of the requests")
  assert cache_metadata.slots is not None
  rows, length = tokens[0].shape[:2]
  prefilled = slots_lib.empty_like(cache, DenseCache, length, tokens[0])
  if cache_metadata.starts is not None:
    prefilled = prefilled._replace(
        starts=device_parts.match(_starts(cache_metadata, rows), prefilled.starts))
  prefilled = dense.append(prefilled, *tokens, cache_metadata.lengths)
  seen = dense.view(prefilled)
  if isinstance(cache, WindowCache):
    cache = slots_lib.insert(
        cache, cache_metadata.slots, window.from_dense(prefilled, cache.key.shape[1]))
  else:
    cache = slots_lib.insert(cache, cache_metadata.slots, prefilled)
  slots = slots_lib.row_numbers("slots", cache_metadata.slots, rows)
  overflow = prefilled.overflow | _rows_of(cache.overflow, slots, prefilled.overflow)
  return _step(seen, seen.lengths, jnp.zeros_like(seen.lengths), length, cache, overflow)


def _rows_of(array: jax.Array, rows: checks.Array, like: jax.Array) -> jax.Array:
  """Returns some rows of an array [B], sharded as the array `like`."""
  array, index = (device_parts.match(x, array, (None,)) for x in (array, rows))
  return device_parts.match(array[jnp.clip(index, 0, array.shape[0] - 1)], like)


def _append(tokens: tuple[jax.Array, jax.Array], cache: AnyCache, cache_metadata: CacheMetadata,
            reach: int | None) -> Step:
  length = tokens[0].shape[1]
  before = _view(cache)
  after = (dense.append(cache, *tokens, cache_metadata.lengths) if isinstance(cache, DenseCache)
           else window.append(cache, *tokens, cache_metadata.lengths))
  seen = _view(after)
  if isinstance(cache, WindowCache) and reach is not None and cache.key.shape[1] < reach + length:
    # The last new tokens overwrite keys that the first new queries still see.
    chunk = slots_lib.empty_like(cache, DenseCache, length)
    new = dense.view(dense.append(chunk, *tokens, cache_metadata.lengths))
    position = new.positions + before.lengths[:, None]
    new = new._replace(positions=jnp.where(
        (new.positions < 0) | (position < cache.starts[:, None]), -1, position))
    join = lambda x, y: None if x is None else jnp.concatenate([device_parts.match(x, y), y], 1)
    fields = (*slots_lib.STORED, "positions")
    joined: dict[str, Any] = {
        name: join(getattr(before, name), getattr(new, name)) for name in fields}
    seen = seen._replace(**joined)
  return _with_rows(_step(seen, after.lengths, before.lengths, length, after, after.overflow),
                    before.lengths)


def _read(length: int, cache: AnyCache, cache_metadata: CacheMetadata, reach: int | None) -> Step:
  checks.require(cache_metadata.lengths is None, "cache_metadata.lengths",
                 "lengths without new tokens", "None where key and value are None")
  if isinstance(cache, WindowCache):
    slots = cache.key.shape[1]
    checks.require(reach is not None and reach + length <= slots, "query",
                   f"{length} tokens with a window of {reach} to the left",
                   f"together at most the {slots} slots of the window cache, where key and value "
                   "are None")
  first = cache.lengths - length
  return _with_rows(_step(_view(cache), cache.lengths, first, length, cache, cache.overflow), first)


def _with_rows(step: Step, first: jax.Array) -> Step:
  """Returns a step with the rows of its cache, if that is dense; queries begin at slots `first`."""
  if not isinstance(step.cache, DenseCache):
    return step
  return step._replace(rows=CacheRows(step.cache.starts, step.cache.lengths, first, step.overflow))


def _step(seen: CacheView, ends: jax.Array, first: jax.Array, length: int, cache: AnyCache,
          overflow: jax.Array) -> Step:
  """Returns the step of queries at first..first + length - 1, valid in starts..ends - 1.

  Masks count positions from a row's first token, so that padding before it changes nothing.
  """
  starts, origins = (jnp.maximum(x[:, None], 0) for x in (
      seen.starts, seen.starts if seen.origins is None else seen.origins))
  position = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
  counts = (position < ends[:, None]) & (position >= starts)
  is_empty = seen.positions < 0
  info = MaskInfo(None, jnp.where(counts, 0, -1), jnp.where(is_empty, -1, 0), position - origins,
                  jnp.where(is_empty, -1, seen.positions - origins))
  return Step(seen.key, seen.value, seen.key_scale, seen.value_scale, info, cache, overflow)


def check_masks_with_cache(cache: AnyCache | LatentCache, mode: str | None, info: MaskInfo,
                           mask: mask_lib.Mask | ArrayLike | None = None) -> None:
  """Checks that the masks of a call are compatible with its cache.

  Segment ids and positions come from the cache. With a sliding-window cache, masks must read
  positions: the slots of a ring buffer are not in the order of the tokens.

  Args:
    cache: the cache.
    mode: as in `update_cache`.
    info: `mask_info` of the call, of which a cache allows only the boolean mask.
    mask: a mask value, a boolean array, or None.

  Raises:
    ValueError: segment ids or positions are given, or, with a window cache, a mask that has a
      number per key or key lengths.
  """
  for name in info._fields[1:]:
    checks.require(getattr(info, name) is None, f"mask_info.{name}", "an array and a cache",
                   "None: the cache holds the positions of its tokens; lengths and starts of new "
                   "tokens go into CacheMetadata")
  if not isinstance(cache, WindowCache) or mode == "__insert__":
    return
  cure = ("a mask by positions, such as masks.prefix or masks.custom: the slots of a "
          "sliding-window cache are not in the order of the tokens")
  for name, x in (("mask", mask), ("mask_info.attention_mask", info.attention_mask)):
    if isinstance(x, mask_lib.Mask):
      for node in mask_lib.nodes(x):
        array = node.array if isinstance(node, leaves.Dense) else None
        by_length = isinstance(node, leaves.Lengths) and node.key_lengths is not None
        by_column = by_length or isinstance(node, leaves.Selected)
        checks.require(not by_column and (array is None or array.shape[3] == 1), name,
                       f"{type(node).__name__} with a WindowCache", cure)
    else:
      shape = getattr(x, "shape", ())
      checks.require(not shape or shape[-1] == 1, name,
                     f"{checks.describe(x)} with a WindowCache", cure)


class Concatenated(NamedTuple):
  """Results of `concatenate`, in the documented order."""

  key: jax.Array  # [B, S, K, D]
  value: jax.Array  # [B, S, K, E]
  attention_mask: jax.Array  # bool [B, H, T, S], True = visible
  # () -> float [B, H, T, S], 0 where visible, else the dtype's least
  init_attention_bias: Callable[[], jax.Array]
  cache_view: AnyCache | None  # the updated cache, or None
  cache_metadata: CacheMetadata | None  # as given


def concatenate(*, query: jax.Array, key: jax.Array, value: jax.Array,
                mask_info: MaskInfo | None = None, mode: Mode | None = None,
                cache_view: AnyCache | None = None, cache_metadata: CacheMetadata | None = None,
                sliding_window: SlidingWindow = None) -> Concatenated:
  """Writes new tokens to a cache, and merges all masks of a causal call into one array.

  For models that compute attention themselves; `attention(..., cache_view=...)` does all of it
  without a mask array.

  Args:
    query: float [B, T, H, D].
    key: float [B, T, K, D] of the new tokens, rotary applied.
    value: float [B, T, K, E].
    mask_info: MaskInfo of further masks; with a cache its `attention_mask` [.., S] only.
    mode: as in `update_cache`; may be "__train__" without a cache; None: as `attention` infers it.
    cache_view: a DenseCache or WindowCache; None: nothing is cached.
    cache_metadata: `CacheMetadata`.
    sliding_window: left, or (left, right), in tokens, as in `attention`.

  Returns:
    A Concatenated; keys and values of an 8-bit cache are dequantized to the query's dtype.

  Raises:
    ValueError: as `update_cache`; segment ids or positions are given together with a cache; the
      query is not as documented here.
  """
  checks.floating("query", query, 4, "[B, T, H, D]")
  shared = 1 if cache_view is None else 2
  checks.require(getattr(key, "shape", query.shape)[:shared] == query.shape[:shared], "query",
                 checks.describe(query), f"{'B' if shared == 1 else 'B and T'} of the key "
                 f"{checks.describe(key)}")
  info = MaskInfo() if mask_info is None else mask_info
  sides = checks.window(sliding_window)
  if cache_view is not None:
    mode = mode_of(mode, cache_metadata, query.shape[1])
    check_masks_with_cache(cache_view, mode, info)
    step = update_cache((key, value), cache_view, cache_metadata, mode, sides[0])
    info = step.mask_info._replace(attention_mask=info.attention_mask)
    assert isinstance(step.cache, AnyCache)  # of the kind that was given
    cache_view, key, value = step.cache, step.key, step.value
    if step.key_scale is not None and step.value_scale is not None:
      key, key_scale, value, value_scale = quantize.constant(
          (key, step.key_scale, value, step.value_scale), "cache_view")
      key = quantize.dequantize(key, key_scale, query.dtype)
      value = quantize.dequantize(value, value_scale, query.dtype)
  mask = info.to_mask(constructors.causal() & constructors.window(*sides))
  seen = materialize.to_dense(mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
  bias = lambda: jnp.where(seen, 0, jnp.finfo(query.dtype).min).astype(query.dtype)
  return Concatenated(key, value, seen, bias, cache_view, cache_metadata)
