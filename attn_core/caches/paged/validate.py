# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of pages and their metadata: of shapes always, of numbers where these are concrete.

Errors name the metadata `cache_metadata`, as the argument of `attention` is called.

Shapes: R requests, P pages of the pool, max_pages per request (width of the table).
"""

from types import ModuleType
from typing import Any, Iterator, NamedTuple

import jax
from jax.experimental import checkify
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core import checks
from attn_core.caches import quantize
from attn_core.caches.paged import (latent_layout, layouts, prefixes as prefixes_lib,
                                    request_groups)
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.types import cdiv


class Condition(NamedTuple):
  """A condition on the numbers in the metadata."""

  field: str  # of PagesMetadata
  holds: Any  # bool [], of numpy or JAX
  expected: str


@layouts.takes_metadata
def check(cache: layouts.Pages, pages_metadata: layouts.PagesMetadata, num_tokens: int,
          left: int | None = None) -> None:
  """Checks a cache and its metadata; numbers are checked where they are concrete.

  Args:
    cache: any layout.
    pages_metadata: requests of the call.
    num_tokens: T, tokens of the call.
    left: number of tokens before a query that it sees; pages before those of a request's first
      query are not checked. None: it sees all.

  Raises:
    ValueError: a layout, dtype or shape is wrong, scales are missing, or the metadata is concrete
      and violates one of `conditions`.
  """
  check_shapes(cache, pages_metadata, num_tokens)
  pages_metadata = layouts.checked(pages_metadata)
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(pages_metadata)):
    return
  concrete = jax.tree.map(np.asarray, pages_metadata)
  for field, holds, expected in conditions(np, cache, concrete, num_tokens, left):
    got = getattr(concrete, field)
    got = f"groups with {got.page_counts.tolist()} pages" if field == "prefixes" else got.tolist()
    checks.require(holds, f"cache_metadata.{field}", got, expected)


@layouts.takes_metadata
def flag(cache: layouts.Pages, pages_metadata: layouts.PagesMetadata, num_tokens: int,
         left: int | None = None) -> jax.Array:
  """Returns whether `check` would find an error, bool []: for use under jit, once per step.

  Args:
    cache: any layout.
    pages_metadata: requests of the call; may be traced.
    num_tokens: T.
    left: as for `check`.

  Raises:
    ValueError: a layout, dtype or shape is wrong, or scales are missing.
  """
  check_shapes(cache, pages_metadata, num_tokens)
  pages_metadata = layouts.in_int32(pages_metadata)
  return ~jnp.stack([jnp.asarray(holds) for _, holds, _ in conditions(
      jnp, cache, pages_metadata, num_tokens, left)]).all()


@layouts.takes_metadata
def debug_check(cache: layouts.Pages, pages_metadata: layouts.PagesMetadata, num_tokens: int,
                left: int | None = None) -> None:
  """Runs `check` inside jit, for functions under `jax.experimental.checkify.checkify`.

  Args:
    cache: any layout.
    pages_metadata: requests of the call; may be traced.
    num_tokens: T.
    left: as for `check`.

  Raises:
    ValueError: a layout, dtype or shape is wrong, or scales are missing. Errors in numbers are in
      the error value that checkify returns.
  """
  check_shapes(cache, pages_metadata, num_tokens)
  pages_metadata = layouts.in_int32(pages_metadata)
  for field, holds, expected in conditions(jnp, cache, pages_metadata, num_tokens, left):
    checkify.check(holds, f"cache_metadata.{field}: got {{got}}; expected {expected}",
                   got=getattr(pages_metadata, field))


@layouts.takes_metadata
def check_shapes(cache: layouts.Pages, pages_metadata: layouts.PagesMetadata,
                 num_tokens: int) -> None:
  """Checks the layout, shapes and dtypes of a cache and its metadata; see `check`."""
  _check_cache(cache)
  pages_metadata = layouts.checked(pages_metadata)
  number = request_groups.count(pages_metadata)
  if number is None:
    return _check_shapes(pages_metadata, num_tokens)
  for name in (*layouts.INTEGERS, "draft_mask"):
    x = getattr(pages_metadata, name)
    _check_array(name, jnp.int32(0) if x is None else x, f"int32 [{number}, ...]")
    checks.require(x is None or (x.ndim > 0 and x.shape[0] == number > 0), f"cache_metadata.{name}",
                   checks.describe(x), f"a leading axis of {number} groups, as page_tables has")
  stripes = request_groups.stripe_count(pages_metadata)
  checks.require(stripes != 0, "cache_metadata.page_tables",
                 checks.describe(pages_metadata.page_tables),
                 "[num_groups, num_stripes, R, max_pages] of at least one stripe")
  parts = f"{number} groups" + ("" if stripes is None else f" of {stripes} stripes")
  for name, what, amount, divisor in (
      ("cache_view", "pages", layouts.num_pages(cache), number * (stripes or 1)),
      ("query", "tokens", num_tokens, number)):
    checks.require(amount % divisor == 0, name, f"{amount} {what}", f"{what} that the {parts} of "
                   "cache_metadata divide: each has its own part of them")
  return _check_shapes(request_groups.shapes_of_one(pages_metadata), num_tokens // number)


@layouts.takes_metadata
def conditions(xp: ModuleType, cache: layouts.Pages, pages_metadata: layouts.PagesMetadata,
               num_tokens: int, left: int | None = None) -> Iterator[Condition]:
  """Yields the conditions on all numbers of the metadata.

  Args:
    xp: numpy, or jax.numpy.
    cache: any layout.
    pages_metadata: requests of the call.
    num_tokens: T.
    left: as for `check`.
  """
  pool, number = layouts.num_pages(cache), request_groups.count(pages_metadata)
  if number is None:
    yield from _conditions(xp, (layouts.page_size(cache), pool, pool), pages_metadata, num_tokens,
                           left)
    return
  ids = pool // number // (request_groups.stripe_count(pages_metadata) or 1)
  pages_metadata = request_groups.whole(pages_metadata, pool, xp)
  for g in range(number):
    yield from _conditions(xp, (layouts.page_size(cache), pool // number, ids),
                           jax.tree.map(lambda x, g=g: x[g], pages_metadata), num_tokens // number,
                           left)


def _conditions(xp: ModuleType, sizes: tuple[int, int, int], pages_metadata: layouts.PagesMetadata,
                num_tokens: int, left: int | None) -> Iterator[Condition]:
  """Yields the conditions on one group; sizes: (page size, pages of the group, of a stripe)."""
  size, pool, ids = sizes
  tables, lengths = pages_metadata.page_tables, pages_metadata.context_lens
  requests, width = tables.shape
  used: jax.Array | int = requests
  if pages_metadata.distribution is not None:
    decode, prefill, used = (pages_metadata.distribution[i] for i in range(3))
    yield Condition("distribution", (0 <= decode) & (decode <= prefill) & (prefill <= used)
                    & (used <= requests), "(decode end, prefill end, total), rising from 0 to at "
                    f"most the {requests} rows of the tables")
  elif pages_metadata.num_requests is not None:
    used = xp.reshape(pages_metadata.num_requests, ())
    yield Condition("num_requests", (0 <= used) & (used <= requests),
                    f"from 0 to the {requests} rows of the tables")
  row = xp.arange(requests)
  starts = pages_metadata.query_start_loc
  if starts is None:
    queries = xp.where(row < used, 1, 0)
  else:
    queries = xp.where(row < used, starts[1:] - starts[:-1], 0)
    yield Condition("query_start_loc", (starts[0] == 0) & (queries >= 0).all()
                    & (starts[used] <= num_tokens), "offsets that start at 0, never decrease, and "
                    f"end at most at the {num_tokens} tokens of the query")
    if pages_metadata.distribution is not None:
      yield Condition("query_start_loc", xp.where(row < decode, queries == 1, True).all(),
                      "one query for each request before distribution[0]")
  if pages_metadata.draft_mask is not None:
    most = pages_metadata.draft_mask.shape[1]
    yield Condition("query_start_loc", (queries <= most).all(),
                    f"at most {most} queries of a request, as draft_mask has rows for")
  lengths = xp.where(row < used, lengths, 0)
  yield Condition("context_lens", ((lengths >= 0) & (lengths <= width * size)).all(),
                  f"from 0 to {width * size} tokens: {width} pages of {size} in a row of the "
                  "table")
  if starts is not None:
    yield Condition("context_lens", (queries <= lengths).all(),
                    "at least as many tokens as the request has queries, which they include")
  if pages_metadata.prefixes is not None:
    prefixes = pages_metadata.prefixes
    old = prefixes_lib.pages_of_requests(prefixes, xp) * size <= lengths - queries
    yield Condition("prefixes", old.all() & prefixes_lib.agree(prefixes, tables, xp),
                    "groups of requests that begin with the same pages, full ones without tokens "
                    "of this call, as caches.prefixes.find makes them of these page_tables")
  column = xp.arange(width)
  live = column < -(-lengths[:, None] // size)
  if left is not None:  # pages behind the window may belong to others by now
    live = live & (column >= (lengths - queries - left)[:, None] // size)
  yield Condition("page_tables", xp.where(live, (tables >= 0) & (tables < pool), True).all(),
                  f"page ids from 0 to {ids - 1} as far as the lengths go")
  # Dead entries become different numbers below all ids.
  row_ids = xp.sort(xp.where(live, tables, -1 - column), 1)
  yield Condition("page_tables", (row_ids[:, 1:] != row_ids[:, :-1]).all(),
                  "different pages in a request's row: each holds other tokens of the request")
  live_ids = xp.sort(xp.where(live, tables, -1).reshape(-1))
  owners = (xp.searchsorted(live_ids, tables, side="right")
            - xp.searchsorted(live_ids, tables, side="left"))
  written = live & (queries > 0)[:, None] & (column >= (lengths - queries)[:, None] // size)
  yield Condition("page_tables", xp.where(written, owners == 1, True).all(),
                  "pages that hold queries' own tokens in one request's row only; requests share "
                  "pages that are full, and copy the one they write (see caches.allocator)")


def _check_cache(cache: layouts.Pages) -> None:
  if isinstance(cache, PagesLatent):
    return latent_layout.check(cache)
  checks.require(isinstance(cache, layouts.PAGES), "cache_view", type(cache).__name__,
                 "a PagesV1, PagesV2, PagesV3 or PagesLatent")
  name = type(cache).__name__
  shapes = {"PagesV1": (4, "key_pages [K, P, page, D] and value_pages [K, P, page, E]"),
            "PagesV2": (4, "pages [P, page, 2K, D]"),
            "PagesV3": (5, "pages [P, page, 2K / packing, packing, D']")}
  rank, letters = shapes[name]
  arrays = ((cache.key_pages, cache.value_pages) if isinstance(cache, layouts.PagesV1)
            else (cache.pages,))
  for x in arrays:
    checks.array("cache_view", x, f"{letters} of a {name}")
    checks.require(x.ndim == rank and 0 not in x.shape and x.shape[:3] == (
        arrays[0].shape[:3]) and x.dtype == arrays[0].dtype, "cache_view", checks.describe(x),
                   f"{letters} of a {name}")
  x = arrays[0]
  if isinstance(cache, layouts.PagesV2):
    checks.require(x.shape[2] % 2 == 0 or quantize.is_packed(x.dtype), "cache_view",
                   checks.describe(x), f"{letters}: as many rows of values as of keys")
    checks.require(cache.widths is None or max(cache.widths.key, cache.widths.value) == x.shape[3],
                   "cache_view.widths", cache.widths, f"None, or a larger one of {x.shape[3]}")
  if name == "PagesV3":
    expected = layouts.packing(x.dtype)
    checks.require(x.shape[3] == expected and x.shape[2] * x.shape[3] % 2 == 0
                   and x.shape[4] % layouts.LANES == 0, "cache_view", checks.describe(x),
                   f"{letters}, packing = {expected} for {x.dtype} and D' a multiple of "
                   f"{layouts.LANES}")
  _check_scales(cache, x.dtype)


def _check_scales(cache: layouts.Pages, dtype: DTypeLike) -> None:
  quantized = quantize.is_quantized(dtype)
  checks.require(quantized or jnp.dtype(dtype).itemsize > 1, "cache_view", f"pages of {dtype}",
                 "pages of a floating-point dtype, int8 or float8_e4m3fn, or uint8 with those of "
                 "int4")
  pool, size = layouts.num_pages(cache), layouts.page_size(cache)
  most = layouts.heads_of(cache).key_heads
  fewest = 1 if isinstance(cache, layouts.PagesV3) else most  # v3 is padded
  heads = f"{most}" if fewest == most else f"K from 1 to {most}"
  pairs = quantize.is_packed(dtype)
  for name, width in zip(("key_scales", "value_scales"), layouts.heads_of(cache)[1:]):
    x, groups = getattr(cache, name), cdiv(width, quantize.GROUP)
    least = 1 if isinstance(cache, layouts.PagesV3) else groups
    number = f"{groups}" if least == groups else f"from 1 to {groups}"
    expected = "float32 " + (
        f"[{pool}, {size}, {heads}, groups], {number} groups of {quantize.GROUP} columns" if pairs
        else f"[] or [{pool}, {size}, {heads}]") + f": pages of {dtype} cannot be read without"
    if x is None:
      checks.require(not quantized, f"cache_view.{name}", "None", expected)
      continue
    checks.array(f"cache_view.{name}", x, expected)
    fits = (x.ndim == 3 + pairs and x.shape[:2] == (pool, size) and fewest <= x.shape[2] <= most
            and all(least <= n <= groups for n in x.shape[3:]))
    checks.require(quantized and x.dtype == jnp.float32 and (fits or x.shape == () and not pairs),
                   f"cache_view.{name}", checks.describe(x),
                   expected if quantized else f"None with pages of {dtype}")
  key_scales, value_scales = cache.key_scales, cache.value_scales
  checks.require(key_scales is None or value_scales is None
                 or key_scales.shape[:3] == value_scales.shape[:3], "cache_view.value_scales",
                 checks.describe(value_scales), "the shape of key_scales"
                 + (", up to the groups of columns" if pairs else ""))


def _check_shapes(pages_metadata: layouts.PagesMetadata, num_tokens: int) -> None:
  _check_array("context_lens", pages_metadata.context_lens, "int32 [R]")
  requests = pages_metadata.context_lens.shape[0] if pages_metadata.context_lens.ndim == 1 else -1
  fields = {"context_lens": ((requests,), "[R]"),
            "page_tables": ((requests, None), "[R, max_pages]"),
            "query_start_loc": ((requests + 1,), "[R + 1]"), "distribution": ((3,), "[3]")}
  for name, (shape, letters) in fields.items():
    x = getattr(pages_metadata, name)
    if x is None and name in ("query_start_loc", "distribution"):
      continue
    expected = f"int32 {letters}, R = {requests}"
    _check_array(name, x, expected)
    fits = len(shape) == x.ndim and all(n in (None, m) for n, m in zip(shape, x.shape))
    checks.require(fits and x.dtype == jnp.int32 and 0 not in x.shape, f"cache_metadata.{name}",
                   checks.describe(x), expected)
  number = pages_metadata.num_requests
  if number is not None:
    x = _check_array("num_requests", number, "int32 [] or [1]")
    checks.require(x.dtype == jnp.int32 and x.shape in ((), (1,)), "cache_metadata.num_requests",
                   checks.describe(x), "int32 [] or [1]")
  if pages_metadata.prefixes is not None:
    _check_prefixes(pages_metadata)
  mask = pages_metadata.draft_mask
  if mask is not None:
    expected = f"bool [R, q, q] for up to q >= 1 queries of a request, R = {requests}"
    checks.require(mask.ndim == 3 and mask.shape == (requests, mask.shape[1], mask.shape[1])
                   and 0 not in mask.shape, "cache_metadata.draft_mask", checks.describe(mask),
                   expected)
  if pages_metadata.query_start_loc is None:
    checks.require(num_tokens == requests, "cache_metadata.query_start_loc",
                   f"None with {num_tokens} queries and {requests} requests",
                   "int32 [R + 1] offsets of the requests' queries, or one query a request")


def _check_prefixes(pages_metadata: layouts.PagesMetadata) -> None:
  prefixes, (requests, width) = pages_metadata.prefixes, pages_metadata.page_tables.shape
  assert prefixes is not None
  levels = prefixes.page_tables.shape[0] if prefixes.page_tables.ndim == 3 else -1
  for name, shape in (("page_tables", (levels, requests, width)),
                      ("page_counts", (levels, requests)), ("rows", (levels, requests + 1)),
                      ("order", (requests,))):
    x = getattr(prefixes, name)
    checks.require(x.shape == shape, f"cache_metadata.prefixes.{name}", checks.describe(x),
                   "arrays of caches.prefixes.find for the same page_tables "
                   f"{checks.describe(pages_metadata.page_tables)}")


def _check_array(name: str, x: object,
                 expected: str) -> checks.Array | jax.ShapeDtypeStruct | np.generic:
  # ShapeDtypeStructs stand for the arrays of one group, numpy scalars for arrays of rank 0.
  if isinstance(x, (jax.ShapeDtypeStruct, np.generic)):
    return x
  return checks.array(f"cache_metadata.{name}", x, expected)
