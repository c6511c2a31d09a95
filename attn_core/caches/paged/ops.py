# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pure functions that create, write, read and convert paged keys and values.

All functions return a new value; if the cache is donated to `jax.jit`, XLA writes in place.

>>> import jax.numpy as jnp
>>> from attn_core.caches import pages
>>> cache = pages.init(pages.PagesV2, 4, 2, pages.Heads(1, 8, 8), jnp.float32)
>>> requests = pages.PagesMetadata(jnp.array([[3, 0]]), jnp.array([3]), jnp.array([0, 3]))
>>> mapping = pages.slots(requests, 2, 3)
>>> mapping
Array([6, 7, 0], dtype=int32)
>>> cache = pages.append(cache, jnp.ones((3, 1, 8)), jnp.ones((3, 1, 8)), mapping)
>>> pages.to_dense(cache, requests)[0][0, :, 0, 0]
Array([1., 1., 1., 0.], dtype=float32)

Shapes: R requests, P pages of the pool, max_pages per request (width of the table), num_ids pages
read together, num_tokens of these.
"""

from typing import Any, Callable

import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import array_axes, checks
from attn_core.caches import device_parts, quantize
from attn_core.caches.paged import (device_pages, latent_layout, latent_pages, layouts,
                                    pool as pool_lib, slot_mapping)
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import (
    Array, Heads, KeyValuePages, KeyValuesT, Pages, PagesMetadata, PagesT, PagesV1, PagesV3,
    dtype_of, has_token_scales, heads_of, num_pages, over_arrays, packing, page_size, take,
    takes_metadata)
from attn_core.caches.paged.pool import init
from attn_core.caches.paged.token_writes import Scales, append, int32_vector, token_scales


def append_tokens(cache: Pages, key: Array, value: Array, mapping: Array) -> Pages:
  """Writes new keys [T, K, D] and values, or latent rows [T, 1, latent + rope], to their slots."""
  if isinstance(cache, PagesLatent):
    return latent_pages.append(cache, key[:, 0], mapping)
  return append(cache, key, value, mapping)


def read(cache: Pages, ids: Array, heads: Heads,
         dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Reads the keys and values of some pages, heads outermost.

  Args:
    cache: any layout.
    ids: int32 [num_ids], within the pool.
    heads: the heads and widths to read from padded pages.
    dtype: of the result; quantized pages are multiplied by their scales in float32.

  Returns:
    key [K, num_tokens, D] and value [K, num_tokens, E].
  """
  def local(cache: Pages, heads: Heads) -> tuple[jax.Array, jax.Array]:
    part = reader(cache, heads, dtype)
    return part("key").transpose(1, 0, 2), part("value").transpose(1, 0, 2)
  ids = int32_vector("ids", ids, np.shape(ids)[0], "page ids")
  if isinstance(cache, PagesLatent):  # no mesh axis shards heads or columns
    return local(take(cache, ids), heads)
  return pool_lib.on_each_device(local, take(cache, ids), heads,
                                 lambda pool, heads: (P(heads), P(heads)), keeps_pool=False)


def reader(cache: Pages, heads: Heads, dtype: DTypeLike) -> Callable[..., jax.Array]:
  """Reads all pages in slices, tokens outermost, without a copy that reorders keys.

  Args:
    cache, heads, dtype: see `read`.

  Returns:
    A function ("key" or "value", slice of tokens, slice of columns) -> [tokens, K, columns]; both
    slices default to everything.
  """
  if isinstance(cache, PagesLatent):
    return latent_layout.reader(cache, dtype)
  tokens, pairs = num_pages(cache) * page_size(cache), quantize.is_packed(dtype_of(cache))
  if isinstance(cache, PagesV1):
    arrays = {name: x.reshape(x.shape[0], tokens, x.shape[3]) for name, x in (
        ("key", cache.key_pages), ("value", cache.value_pages))}
  else:
    rows = cache.pages.reshape(tokens, -1, 1 if pairs else 2, cache.pages.shape[-1])
  widths = {"key": heads.key_width, "value": heads.value_width}
  scales: dict[str, Any] = {"key": cache.key_scales, "value": cache.value_scales}
  if has_token_scales(cache):
    scales = {name: x.reshape(tokens, *x.shape[2:]) for name, x in scales.items()}
  if pairs and has_token_scales(cache):
    scales = {name: quantize.of_width(x, widths[name]) for name, x in scales.items()}

  def part(name: str, tokens: slice = slice(None), columns: slice | None = None) -> jax.Array:
    columns, is_value = slice(0, widths[name]) if columns is None else columns, name == "value"
    if isinstance(cache, PagesV1):
      held = slice(columns.start // 2, columns.stop // 2) if pairs else columns
      x = arrays[name][:, tokens, held].transpose(1, 0, 2)
      x = quantize.unpack_columns(x) if pairs else x
    else:
      x = rows[tokens, :heads.key_heads, 0 if pairs else int(is_value), columns]
      x = quantize.unpack(x, is_value) if pairs else x
    scale = scales[name]
    if scale is None:
      return x.astype(dtype)
    if pairs:
      of_columns = quantize.of_columns(
          scale[tokens], columns.start, columns.stop - columns.start)
      return (x.astype(jnp.float32) * of_columns).astype(dtype)
    return quantize.dequantize(x, scale if scale.ndim == 0 else scale[tokens], dtype)

  return part


def _all_heads(cache: Pages) -> Heads:
  """The heads in the pages, without padding where the scales' shape gives their number.

  Scales of groups of columns also give widths, rounded up to whole groups.
  """
  widths = layouts.most_widths(cache)
  number = (token_scales(cache)[0].shape[2] if has_token_scales(cache)
            else heads_of(cache).key_heads)
  return Heads(number, widths.key, widths.value)


@takes_metadata
def to_dense(cache: Pages, pages_metadata: PagesMetadata,
             heads: tuple[int, ...] | None = None,
             dtype: DTypeLike | None = None) -> tuple[jax.Array, jax.Array]:
  """Gathers the keys and values of all requests.

  Args:
    cache: any layout.
    pages_metadata: tables and lengths.
    heads: the heads and widths to read from padded pages, as in `init`; None: all, as far as these
      have scales.
    dtype: of the result; None: the dtype of the pages, float32 if they are quantized.

  Returns:
    key [R, S, K, D] and value [R, S, K, E] with S = max_pages * page_size; 0 past a request's last
    token and in pages outside the pool.

  Raises:
    ValueError: metadata of groups, or `heads` is not as in `init`.
    NotImplementedError: quantized pages are differentiated.
  """
  layouts.check_key_values(cache)
  heads = _all_heads(cache) if heads is None else pool_lib.checked_heads(heads)
  if dtype is None:
    dtype = dtype_of(cache) if cache.key_scales is None else jnp.float32
  if cache.key_scales is not None:
    cache = quantize.constant(cache, "cache")
  return _gathered(cache, slot_mapping.of_one_pool(pages_metadata), heads, dtype)


@device_parts.one_program("heads", "dtype")
def _gathered(cache: Pages, pages_metadata: PagesMetadata, heads: Heads,
              dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Gathers the keys and values of all requests, as `to_dense` returns them."""
  key, value = read(cache, pages_metadata.page_tables.reshape(-1), heads, dtype)
  live = slot_mapping.holds_tokens(pages_metadata, page_size(cache), num_pages(cache))
  live = live[..., None, None]
  shaped = lambda x: x.transpose(1, 0, 2).reshape(*live.shape[:2], heads.key_heads, -1)
  return jnp.where(live, shaped(key), 0), jnp.where(live, shaped(value), 0)


@takes_metadata
def from_dense(cache: PagesT, key: Array, value: Array, pages_metadata: PagesMetadata,
               scales: Scales = None) -> PagesT:
  """Writes the first context_lens tokens of every request into its pages.

  Args:
    cache: any layout; pages without a request are unchanged.
    key: [R, S, K, D], S at most max_pages * page_size.
    value: [R, S, K, E].
    pages_metadata: tables and lengths.
    scales: as in `append`, of [R, S, K].

  Returns:
    The cache with the tokens written.

  Raises:
    ValueError: metadata of groups, more keys than the tables' pages hold, or see `append`.
  """
  checks.require(key.ndim == 4, "key", checks.describe(key), "[R, S, K, D]")
  mapping = slot_mapping.first_slots(pages_metadata, page_size(cache), "key", key)
  def flat(x: jax.Array) -> jax.Array:
    return _whole_rows(x).reshape(-1, *x.shape[2:])
  return append(cache, flat(key), flat(value), mapping,
                None if scales is None else (flat(scales[0]), flat(scales[1])))


def _whole_rows(x: jax.Array) -> jax.Array:
  """Replicates the first two dimensions of an array over Explicit mesh axes."""
  parts = array_axes.parts_of(x)
  return x if parts is None else device_parts.match(x, x, (None, None, *parts.spec[2:]))


def convert(cache: KeyValuePages, layout: type[KeyValuesT],
            heads: tuple[int, ...] | None = None) -> KeyValuesT:
  """Converts pages to another layout.

  Args:
    cache: any layout.
    layout: PagesV1, PagesV2 or PagesV3.
    heads: the heads and widths to read from padded pages, as in `init`; None: all, as far as these
      have scales.

  Returns:
    A cache of the other layout, with the same pages and scales.

  Raises:
    ValueError: see `init`, or `heads` is not as in `init`.
  """
  layouts.check_key_values(cache)
  heads = _all_heads(cache) if heads is None else pool_lib.checked_heads(heads)
  return _in_layout(cache, layout, heads)


@device_parts.one_program("layout", "heads")
def _in_layout(cache: KeyValuePages, layout: type[KeyValuesT], heads: Heads) -> KeyValuesT:
  """Converts pages to another layout, each device its own."""
  rows = 1 if quantize.is_packed(dtype_of(cache)) else 2  # of a head
  unit = max(1, packing(dtype_of(cache)) // rows) if layout is PagesV3 else 1
  def local(cache: Pages, heads: Heads) -> KeyValuesT:
    assert isinstance(cache, layouts.PAGES)
    return _converted(cache, layout, heads)
  full = pool_lib.on_each_device(
      local, cache, heads,
      lambda pool, of_heads: pool_lib.specs_of(layout, pool, of_heads, pool_lib.scale_rank(cache),
                                               pool_lib.widths_of(heads)),
      keeps_pool=True, unit=unit)
  assert isinstance(full, layout)
  return full


def _converted(cache: KeyValuePages, layout: type[KeyValuesT], heads: Heads) -> KeyValuesT:
  """Converts the pages of one device."""
  pool, size = num_pages(cache), page_size(cache)
  plain = cache._replace(key_scales=None, value_scales=None)
  pairs = quantize.is_packed(dtype_of(cache))
  key, value = read(plain, jnp.arange(pool, dtype=jnp.int32), heads,
                    jnp.int8 if pairs else dtype_of(cache))
  without_padding = lambda x: x[:, :, :heads.key_heads] if x is not None and x.ndim else x
  scales = tuple(map(without_padding, (cache.key_scales, cache.value_scales)))
  if pairs:
    scales = tuple(quantize.of_width(x, n) for x, n in zip(scales, heads[1:]))
  if layout is PagesV1:
    for width in heads[1:] if pairs else ():
      quantize.stored_width(width, "int4")
    packed = quantize.pack_columns if pairs else lambda x: x
    shaped = lambda x: packed(x).reshape(heads.key_heads, pool, size, -1)
    full: KeyValuePages = PagesV1(shaped(key), shaped(value), *scales)
  else:
    kind = "tensor" if dtype_of(cache).itemsize == 1 else None  # the scales are those of `cache`
    empty = init(layout, pool, size, heads, quantize.dtype_name(dtype_of(cache)),
                 "group" if pairs else kind)
    full = append(empty._replace(key_scales=None, value_scales=None), key.swapaxes(0, 1),
                  value.swapaxes(0, 1), jnp.arange(pool * size, dtype=jnp.int32))
    full = full._replace(key_scales=scales[0], value_scales=scales[1])
  assert isinstance(full, layout)
  return full


def copy_pages(cache: PagesT, sources: Array, targets: Array) -> PagesT:
  """Copies pages within the pool, as the allocator requests before a shared page is written.

  Args:
    cache: any layout.
    sources: int32 [num_ids].
    targets: int32 [num_ids]; those outside the pool are not written.

  Raises:
    ValueError: sources or targets are not integers, or differ in number.
  """
  count = np.size(sources)
  sources, targets = (int32_vector(name, x, count, "page ids, as many sources as targets")
                      for name, x in (("sources", sources), ("targets", targets)))
  return _with_copies(cache, sources, targets)


@device_parts.one_program()
def _with_copies(cache: PagesT, sources: Array, targets: Array) -> PagesT:
  """Copies pages `sources` int32 [num_ids] to `targets`."""
  # A negative index would count from the end of the pool.
  targets = jnp.where(targets < 0, num_pages(cache), targets)

  return over_arrays(lambda x, axis: device_pages.write(
      x, device_pages.take(x, sources, axis), axis, targets), cache)
