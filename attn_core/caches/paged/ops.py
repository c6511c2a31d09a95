"""Keys and values in pages: three layouts, and pure functions that write, read and convert them.

A cache is a pool of pages of some tokens each; a request owns a row of a page table, and its token
at position p lies in slot p % page_size of page page_table[p // page_size]. Every function returns
a new value; with its cache donated, XLA writes in place.

Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180.

Letters: R requests, N pages per request (width of the table), P pages of the pool, T tokens of a
call, S positions, K key heads, D key width, E value width, n pages read together, C their tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.caches import quantize
from attn_core.caches.paged import page_stripes as stripes
from attn_core.caches.paged.page_stripes import Stripe
from attn_core.types import cdiv

LANES = 128  # widths in layout v3 are multiples of this


class PagesV1(NamedTuple):
  """Heads outermost, as `jax.experimental.pallas.ops.tpu.paged_attention` takes them."""

  key_pages: Any  # [K, P, page, D]
  value_pages: Any  # [K, P, page, E]
  key_scales: Any = None  # float32 [P, page, K], or [] for all; None: not quantised
  value_scales: Any = None  # the same for the values


class PagesV2(NamedTuple):
  """Heads interleaved, as `jax.experimental.pallas.ops.tpu.ragged_paged_attention` takes them."""

  pages: Any  # [P, page, 2K, D]: key heads in even rows, value heads in odd ones
  key_scales: Any = None  # float32 [P, page, K], or [] for all; None: not quantised
  value_scales: Any = None  # the same for the values


class PagesV3(NamedTuple):
  """As v2, with rows packed into 32-bit words and padded, and widths padded to 128."""

  pages: Any  # [P, page, cdiv(2K, packing), packing, D']: packing = 4 / itemsize, D' % 128 == 0
  key_scales: Any = None  # float32 [P, page, K], or [] for all; None: not quantised
  value_scales: Any = None  # the same for the values


class PagesMetadata(NamedTuple):
  """Where the tokens of a call and of the requests before it lie; or of groups, see `groups`."""

  page_tables: Any  # int32 [R, N]; entries past a request's last page are not read
  context_lens: Any  # int32 [R]: tokens of a request in the cache, those of this call included
  query_start_loc: Any = None  # int32 [R + 1]: offsets of the requests' queries; None: one each
  num_requests: Any = None  # int32 [] or [1]: rows in use, the first ones; None: all
  # int32 [3]: (decode end, prefill end, total): requests before the first have one query each,
  # and total is the number of rows in use.
  distribution: Any = None


class Heads(NamedTuple):
  """The shape of a token in the cache, which a padded layout does not tell."""

  key_heads: int
  key_width: int
  value_width: int


PAGES = (PagesV1, PagesV2, PagesV3)


def packing(dtype) -> int:
  """Rows of a dtype in a 32-bit word.

  Args:
    dtype: of 8, 16 or 32 bits.

  Returns:
    4, 2 or 1.
  """
  return 4 // jnp.dtype(dtype).itemsize


def init(layout: type, num_pages: int, page_size: int, heads: Heads, dtype=jnp.bfloat16,
         scales: str | None = None):
  """A pool of empty pages.

  Args:
    layout: PagesV1, PagesV2 or PagesV3.
    num_pages: P.
    page_size: tokens of a page.
    heads: key heads and widths; v2 and v3 hold keys and values of one width.
    dtype: that of the pages; int8 and float8_e4m3fn need scales.
    scales: "token": one per token and head; "tensor": one for all keys and one for all values;
      None: none.

  Returns:
    A cache of that layout, all zeros.

  Raises:
    ValueError: a size that is no int >= 1, no Heads, another layout or kind of scales, E != D where
      one array holds both, a dtype of one byte without scales, or one that is no dtype of these.
  """
  checks.require(layout in PAGES, "layout", repr(layout), "PagesV1, PagesV2 or PagesV3")
  checks.require(isinstance(heads, Heads), "heads", repr(heads),
                 "Heads(key heads K, key width D, value width E)")
  dtype = checks.dtype("dtype", dtype, "16 or 32 bits, int8 or float8_e4m3fn")
  checks.one_of("scales", scales, (None, "token", "tensor"))
  for name, size in (("num_pages", num_pages), ("page_size", page_size), *heads._asdict().items()):
    checks.integer(name, size, "an int >= 1", lambda x: x >= 1)
  size = jnp.dtype(dtype).itemsize
  checks.require(quantize.is_quantized(dtype) or size > 1 and (size <= 4 or layout is not PagesV3),
                 "dtype", jnp.dtype(dtype).name, "16 or 32 bits (64 but for PagesV3), int8 or "
                 "float8_e4m3fn")
  checks.require(scales is not None or jnp.dtype(dtype).itemsize > 1, "scales",
                 f"None with pages of {jnp.dtype(dtype).name}", "'token' or 'tensor': quantised "
                 "pages mean nothing without their scales")
  shape = {"token": (num_pages, page_size, heads.key_heads), "tensor": ()}
  scale = None if scales is None else jnp.ones(shape[scales], jnp.float32)
  if layout is PagesV1:
    pool = (heads.key_heads, num_pages, page_size)
    return PagesV1(jnp.zeros((*pool, heads.key_width), dtype),
                   jnp.zeros((*pool, heads.value_width), dtype), scale, scale)
  checks.require(heads.key_width == heads.value_width, "heads.value_width",
                 heads.value_width, f"the key width {heads.key_width}: one array holds both")
  rows, width = 2 * heads.key_heads, heads.key_width
  if layout is PagesV2:
    return PagesV2(jnp.zeros((num_pages, page_size, rows, width), dtype), scale, scale)
  words, width = cdiv(rows, packing(dtype)), cdiv(width, LANES) * LANES
  return PagesV3(
      jnp.zeros((num_pages, page_size, words, packing(dtype), width), dtype), scale, scale)


def page_size(cache) -> int:
  """Tokens of a page.

  Args:
    cache: any layout.
  """
  return cache.key_pages.shape[2] if isinstance(cache, PagesV1) else cache.pages.shape[1]


def num_pages(cache) -> int:
  """Pages of the pool, P.

  Args:
    cache: any layout.
  """
  return cache.key_pages.shape[1] if isinstance(cache, PagesV1) else cache.pages.shape[0]


def heads_of(cache) -> Heads:
  """The heads of a cache; of v3 the padded ones, the most that it can hold.

  Args:
    cache: any layout.

  Returns:
    Heads(K, D, E).
  """
  if isinstance(cache, PagesV1):
    return Heads(cache.key_pages.shape[0], cache.key_pages.shape[3], cache.value_pages.shape[3])
  *rows, width = cache.pages.shape[2:]
  rows = rows[0] * rows[1] if len(rows) == 2 else rows[0]
  return Heads(rows // 2, width, width)


def head_axis(cache) -> int:
  """The dimension of the pages that has the key heads.

  Args:
    cache: any layout.
  """
  return 0 if isinstance(cache, PagesV1) else 2


def dtype_of(cache):
  """The dtype of the pages, which is that of keys and values as they are stored.

  Args:
    cache: any layout.
  """
  return (cache.key_pages if isinstance(cache, PagesV1) else cache.pages).dtype


def slots(metadata: PagesMetadata, size: int, num_tokens: int, stripe: Stripe | None = None):
  """The slot mapping of a call's tokens: page * page_size + offset in the page.

  Raises ValueError for metadata of groups, of which `groups.slots` has them.

  Args:
    metadata: token i of request r, of q queries, stands at position context_len - q + i.
    size: tokens of a page.
    num_tokens: T.
    stripe: whose pages the tables have; None: all.

  Returns:
    int32 [T]; -1 for tokens past the last request, for those that its row has no page for, and for
    those of other stripes.
  """
  metadata = _of_one_pool(metadata)
  token = jnp.arange(num_tokens, dtype=jnp.int32)
  requests = metadata.context_lens.shape[0]
  starts = query_starts(metadata)
  request = jnp.searchsorted(starts[1:], token, side="right", method="compare_all")
  request = request.astype(jnp.int32)
  live = request < rows_in_use(metadata)
  request = jnp.minimum(request, requests - 1)
  position = metadata.context_lens[request] - starts[request + 1] + token
  width, place = metadata.page_tables.shape[1], stripes.held(stripe, position)
  page = metadata.page_tables[request, jnp.clip(place // size, 0, width - 1)]
  live = live & (position >= 0) & (place < width * size)
  if stripe is not None:
    live = live & (stripes.position_of(stripe, place) == position)
  return _slot(page, position % size, size, live)


def _slot(page, offset, size: int, live):
  """page * size + offset; -1 where it is not live, or no pool has the page."""
  # A page far outside of the pool must not become another one by the product's overflow.
  live = live & (page >= 0) & (page < (2**31 - 1) // size)
  return jnp.where(live, page * size + offset, -1)


def _of_one_pool(metadata: PagesMetadata) -> PagesMetadata:
  """The same in arrays, which are those of one pool."""
  metadata = in_int32(metadata)
  checks.require(metadata.page_tables.ndim == 2, "metadata.page_tables",
                 checks.describe(metadata.page_tables),
                 "int32 [R, N]; caches.groups has slots of groups, and joins groups to one pool")
  return metadata


def in_int32(metadata: PagesMetadata) -> PagesMetadata:
  """The same in int32 arrays.

  Raises:
    ValueError: something is no array of integers.
  """
  def converted(name, x):
    x = np.asarray(x) if isinstance(x, (int, np.generic)) else x
    return jnp.asarray(checks.int32(f"metadata.{name}", x, "int32"))
  return metadata._replace(**{
      name: converted(name, x) for name, x in metadata._asdict().items() if x is not None})


def query_starts(metadata: PagesMetadata):
  """The offsets of the requests' queries; rows not in use have none.

  Args:
    metadata: its query_start_loc int32 [R + 1], or None for one query each.

  Returns:
    int32 [R + 1].
  """
  requests = metadata.context_lens.shape[0]
  starts = metadata.query_start_loc
  if starts is None:
    starts = jnp.arange(requests + 1, dtype=jnp.int32)
  if metadata.distribution is None and metadata.num_requests is None:
    return starts  # all rows are in use
  used = rows_in_use(metadata)
  rows = jnp.arange(requests + 1, dtype=jnp.int32)
  return jnp.where(rows <= used, starts, starts[used])


def rows_in_use(metadata: PagesMetadata):
  """How many rows of the tables are requests, the first ones.

  Args:
    metadata: its distribution int32 [3], else its num_requests int32 [] or [1], else all R rows.

  Returns:
    int32 [].
  """
  if metadata.distribution is not None:
    return metadata.distribution[2]
  if metadata.num_requests is not None:
    return jnp.reshape(metadata.num_requests, ())
  return jnp.int32(metadata.context_lens.shape[0])


def append(cache, key, value, mapping, scales=None):
  """Writes one key and one value a token.

  Args:
    cache: any layout.
    key: [T, K, D] in the dtype of the pages. Into quantised pages any float: quantised, which makes
      a scale per token and head, or divided by the one scale for all, rounded and clipped.
    value: [T, K, E], likewise.
    mapping: int32 [T] slots (see `slots`); tokens with a slot outside the pool are not written.
    scales: float32 (key [T, K], value [T, K]) of tokens that are in 8 bits already, for pages with
      scales per token and head; None: tokens are not, or the pages keep none.

  Returns:
    The cache with the tokens written.

  Raises:
    ValueError: shapes or dtypes that do not fit, a `mapping` that is no integers [T], or `scales`
      missing where tokens in 8 bits need them, or given where the pages keep none.
    NotImplementedError: what is quantised is differentiated.
  """
  size, dtype = page_size(cache), dtype_of(cache)
  per_token = has_token_scales(cache)
  _check_tokens(cache, key, value, scales)
  mapping = _numbers("mapping", mapping, key.shape[0], "slots")
  if not per_token:
    key, value = store(key, dtype, cache.key_scales), store(value, dtype, cache.value_scales)
  elif scales is None:
    (key, of_key), (value, of_value) = (quantize.quantize(x, dtype) for x in (key, value))
    scales = of_key, of_value
  mapping = jnp.where(mapping < 0, num_pages(cache) * size, mapping)
  page, offset = mapping // size, mapping % size
  if isinstance(cache, PagesV1):
    cache = cache._replace(
        key_pages=cache.key_pages.at[:, page, offset].set(key.swapaxes(0, 1), mode="drop"),
        value_pages=cache.value_pages.at[:, page, offset].set(value.swapaxes(0, 1), mode="drop"))
  else:
    token = pad_rows(cache, interleave(key, value)).reshape(-1, *cache.pages.shape[2:])
    cache = cache._replace(pages=cache.pages.at[page, offset].set(token, mode="drop"))
  if scales is not None:
    cache = cache._replace(key_scales=cache.key_scales.at[page, offset].set(scales[0], mode="drop"),
                           value_scales=cache.value_scales.at[page, offset].set(
                               scales[1], mode="drop"))
  return cache


def _numbers(argument: str, x, count: int, what: str):
  """int32 [count]."""
  expected = f"int32 [{count}], {what}"
  x = checks.int32(argument, x, expected)
  checks.require(x.shape == (count,), argument, checks.describe(x), expected)
  return x


def has_token_scales(cache) -> bool:
  """Whether the pages keep a scale per token and head.

  Args:
    cache: any layout.
  """
  return cache.key_scales is not None and cache.key_scales.ndim > 0


def _check_tokens(cache, key, value, scales) -> None:
  heads = heads_of(cache)
  tokens, key_heads, width = key.shape if key.ndim == 3 else (0, 0, 0)
  padded = isinstance(cache, PagesV3)
  fits = (key_heads <= heads.key_heads and width <= heads.key_width if padded
          else (key_heads, width) == heads[:2])
  checks.require(key.ndim == 3 and fits, "key", checks.describe(key),
                 f"[T, {heads.key_heads}, {heads.key_width}], the pages' heads and width"
                 + (", or fewer" if padded else ""))
  expected = (tokens, key_heads, width if padded else heads.value_width)
  checks.require(value.shape == expected, "value", checks.describe(value), f"{list(expected)}")
  dtype, per_token = dtype_of(cache), has_token_scales(cache)
  for name, x in (("key", key), ("value", value)):
    wide = cache.key_scales is not None and jnp.issubdtype(x.dtype, jnp.floating)
    checks.require(x.dtype == dtype or wide, name, checks.describe(x),
                   f"the dtype of the pages, {dtype}")
    if per_token:
      checks.require((scales is not None) == (x.dtype == dtype), "scales",
                     f"{'None' if scales is None else 'arrays'} with {name} {checks.describe(x)}",
                     f"float32 (key [{tokens}, {key_heads}], value) with tokens in {dtype}, None "
                     "with those that are not: the pages keep a scale per token and head")
  checks.require(per_token or scales is None, "scales", "arrays",
                 "None: the pages keep no scale per token")
  held = cache.key_scales.shape[2] if per_token else key_heads
  checks.require(held == key_heads, "key", checks.describe(key),
                 f"{held} heads, those of key_scales {checks.describe(cache.key_scales)}")
  for x in () if scales is None else scales:
    checks.require(x.shape == (tokens, key_heads) and x.dtype == jnp.float32, "scales",
                   checks.describe(x), f"float32 [{tokens}, {key_heads}] of key and of value")


def store(x, dtype, scale=None):
  """Values as pages hold them: divided by their scale, clipped and, where integers, rounded.

  One scale for all does not reach as far as what is not finite: that becomes the largest number,
  and NaN 0 in integers.

  Args:
    x: keys or values of any shape, floating-point or of `dtype`, which stay as they are.
    dtype: of the pages.
    scale: float32 [], the one for all; None: nothing is divided.

  Returns:
    An array of x's shape, of `dtype`.

  Raises:
    NotImplementedError: what is to be stored in 8 bits is differentiated.
  """
  if x.dtype == dtype:
    return x
  if jnp.dtype(dtype).itemsize == 1:
    x, scale = quantize.constant((x, scale), f"keys and values in {jnp.dtype(dtype).name}")
  if scale is None:
    return x.astype(dtype)
  x = x.astype(jnp.float32) / scale
  if jnp.issubdtype(dtype, jnp.integer):
    x = jnp.round(jnp.where(jnp.isnan(x), 0, x))
  limit = quantize.LIMITS[jnp.dtype(dtype).name]
  return jnp.clip(x, -limit, limit).astype(dtype)


def interleave(key, value):
  """Keys and values as layouts v2 and v3 have them, in turns.

  Args:
    key: [..., K, D].
    value: [..., K, D].

  Returns:
    [..., 2K, D], keys in even rows.
  """
  shape = (*key.shape[:-2], 2 * key.shape[-2], key.shape[-1])
  return jnp.stack([key, value], -2).reshape(shape)


def pad_rows(cache, rows):
  """Interleaved rows with the zeros that the layout pads them with.

  Args:
    cache: PagesV2 or PagesV3.
    rows: [C, 2K, D], with at most the cache's heads and width.

  Returns:
    [C, 2K', D'], K' and D' of the cache.
  """
  heads = heads_of(cache)
  return jnp.pad(rows, ((0, 0), (0, 2 * heads.key_heads - rows.shape[1]),
                        (0, heads.key_width - rows.shape[2])))


def read(cache, ids, heads: Heads, dtype):
  """The keys and values of some pages, heads outermost.

  Args:
    cache: any layout.
    ids: int32 [n], within the pool.
    heads: what to take of padded pages.
    dtype: that of the result; quantised pages are multiplied by their scales in float32.

  Returns:
    key [K, C, D] and value [K, C, E].
  """
  part = reader(take(cache, ids), heads, dtype)
  return part("key").transpose(1, 0, 2), part("value").transpose(1, 0, 2)


def take(cache, ids):
  """A cache of some pages alone.

  Args:
    cache: any layout.
    ids: int32 [n], within the pool; others are taken for the nearest one that is.

  Returns:
    A cache of the same layout with n pages, in the order of `ids`.
  """
  pick = lambda x, axis: jnp.take(x, ids, axis, mode="clip")
  if has_token_scales(cache):
    cache = cache._replace(key_scales=pick(cache.key_scales, 0),
                           value_scales=pick(cache.value_scales, 0))
  if isinstance(cache, PagesV1):
    return cache._replace(key_pages=pick(cache.key_pages, 1),
                          value_pages=pick(cache.value_pages, 1))
  return cache._replace(pages=pick(cache.pages, 0))


def reader(cache, heads: Heads, dtype):
  """`read` of all pages, piece by piece and tokens outermost: no key is copied to be ordered.

  Args:
    cache, heads, dtype: as for `read`.

  Returns:
    A function ("key" or "value", slice of tokens, slice of columns) -> [tokens, K, columns]; both
    slices are everything where they are left out.
  """
  tokens = num_pages(cache) * page_size(cache)
  if isinstance(cache, PagesV1):
    arrays = {name: x.reshape(x.shape[0], tokens, x.shape[3]) for name, x in (
        ("key", cache.key_pages), ("value", cache.value_pages))}
  else:
    rows = cache.pages.reshape(tokens, -1, 2, cache.pages.shape[-1])
  widths = {"key": heads.key_width, "value": heads.value_width}
  scales = {"key": cache.key_scales, "value": cache.value_scales}
  if has_token_scales(cache):
    scales = {name: x.reshape(tokens, -1) for name, x in scales.items()}

  def part(name, tokens=slice(None), columns=None):
    columns = slice(0, widths[name]) if columns is None else columns
    if isinstance(cache, PagesV1):
      x = arrays[name][:, tokens, columns].transpose(1, 0, 2)
    else:
      x = rows[tokens, :heads.key_heads, int(name == "value"), columns]
    scale = scales[name]
    if scale is None:
      return x.astype(dtype)
    return quantize.dequantize(x, scale if scale.ndim == 0 else scale[tokens], dtype)

  return part


def _all_heads(cache) -> Heads:
  """The heads in the pages; where scales know them, without those that only pad."""
  heads = heads_of(cache)
  return heads._replace(key_heads=cache.key_scales.shape[2]) if has_token_scales(cache) else heads


def to_dense(cache, metadata: PagesMetadata, heads: Heads | None = None, dtype=None):
  """Every request's keys and values side by side.

  Args:
    cache: any layout.
    metadata: tables and lengths.
    heads: what to take of padded pages; None: all.
    dtype: of the result; None: that of the pages, float32 where they are quantised.

  Returns:
    key [R, S, K, D] and value [R, S, K, E] with S = N * page_size; 0 past a request's last token,
    and where the table names a page outside of the pool.

  Raises:
    ValueError: metadata of groups.
    NotImplementedError: quantised pages that are differentiated.
  """
  heads = _all_heads(cache) if heads is None else heads
  if dtype is None:
    dtype = dtype_of(cache) if cache.key_scales is None else jnp.float32
  if cache.key_scales is not None:
    cache = quantize.constant(cache, "cache")
  metadata = _of_one_pool(metadata)
  requests, width = metadata.page_tables.shape
  key, value = read(cache, metadata.page_tables.reshape(-1), heads, dtype)
  length = width * page_size(cache)
  lengths = jnp.where(jnp.arange(requests) < rows_in_use(metadata), metadata.context_lens, 0)
  held = (metadata.page_tables >= 0) & (metadata.page_tables < num_pages(cache))
  live = (jnp.arange(length) < lengths[:, None]) & jnp.repeat(held, page_size(cache), 1)
  live = live[..., None, None]
  shaped = lambda x: x.transpose(1, 0, 2).reshape(requests, length, heads.key_heads, -1)
  return jnp.where(live, shaped(key), 0), jnp.where(live, shaped(value), 0)


def from_dense(cache, key, value, metadata: PagesMetadata, scales=None):
  """Writes the first context_lens tokens of every request into its pages.

  Args:
    cache: any layout; pages that no request owns keep what they hold.
    key: [R, S, K, D], S at most N * page_size.
    value: [R, S, K, E].
    metadata: tables and lengths.
    scales: as in `append`, of [R, S, K].

  Returns:
    The cache with the tokens written.

  Raises:
    ValueError: metadata of groups, more keys than the tables have places for, and as `append`.
  """
  metadata, size = _of_one_pool(metadata), page_size(cache)
  requests, width = metadata.page_tables.shape
  checks.require(key.ndim == 4 and key.shape[0] == requests and key.shape[1] <= width * size, "key",
                 checks.describe(key), f"[R, S, K, D], R = {requests}, S at most {width * size}: "
                 f"{width} pages of {size} in a row of the table")
  length = key.shape[1]
  position = jnp.arange(length, dtype=jnp.int32)
  rows = jnp.arange(requests, dtype=jnp.int32)[:, None]
  live = (position < metadata.context_lens[:, None]) & (rows < rows_in_use(metadata))
  page = metadata.page_tables[rows, position // size]
  mapping = _slot(page, position % size, size, live).reshape(-1)
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  return append(cache, flat(key), flat(value), mapping,
                None if scales is None else tuple(map(flat, scales)))


def convert(cache, layout: type, heads: Heads | None = None):
  """The same pages in another layout.

  Args:
    cache: any layout.
    layout: PagesV1, PagesV2 or PagesV3.
    heads: what to take of padded pages; None: all.

  Returns:
    A cache of the other layout, with the same pages and scales.

  Raises:
    ValueError: another layout than these, keys and values of two widths into a layout of one, or as
      `init`.
  """
  heads = _all_heads(cache) if heads is None else heads
  pool, size = num_pages(cache), page_size(cache)
  plain = cache._replace(key_scales=None, value_scales=None)
  key, value = read(plain, jnp.arange(pool, dtype=jnp.int32), heads, dtype_of(cache))
  cut = lambda x: x[..., :heads.key_heads] if x is not None and x.ndim else x
  scales = tuple(map(cut, (cache.key_scales, cache.value_scales)))
  if layout is PagesV1:
    shaped = lambda x: x.reshape(heads.key_heads, pool, size, -1)
    return PagesV1(shaped(key), shaped(value), *scales)
  kind = "tensor" if dtype_of(cache).itemsize == 1 else None  # the scales are those of `cache`
  empty = init(layout, pool, size, heads, dtype_of(cache), kind)
  empty = empty._replace(key_scales=None, value_scales=None)
  tokens = (x.swapaxes(0, 1) for x in (key, value))
  full = append(empty, *tokens, jnp.arange(pool * size, dtype=jnp.int32))
  return full._replace(key_scales=scales[0], value_scales=scales[1])


def copy_pages(cache, sources, targets):
  """The cache with pages copied: what the allocator asks for when a shared page is written.

  Args:
    cache: any layout.
    sources: int32 [n].
    targets: int32 [n]; those outside the pool are not written.

  Raises:
    ValueError: sources and targets that are no integers, or not as many.
  """
  count = np.size(sources)
  sources, targets = (_numbers(name, x, count, "page ids, as many sources as targets")
                      for name, x in (("sources", sources), ("targets", targets)))
  # A negative target would count from the end of the pool.
  targets = jnp.where(targets < 0, num_pages(cache), targets)

  def copied(x, axis):
    if x is None or x.ndim == 0:
      return x
    at = x.at[(slice(None),) * axis + (targets,)]
    return at.set(jnp.take(x, sources, axis, mode="clip"), mode="drop")
  if isinstance(cache, PagesV1):
    return PagesV1(copied(cache.key_pages, 1), copied(cache.value_pages, 1),
                   copied(cache.key_scales, 0), copied(cache.value_scales, 0))
  return type(cache)(*(copied(x, 0) for x in cache))
