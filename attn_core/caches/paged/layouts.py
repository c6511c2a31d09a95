# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of paged keys and values, the metadata of requests, and their shapes and dtypes.

A cache is a pool of pages of some tokens each; a request owns a row of a page table, and its token
at position p lies in slot p % page_size of page page_table[p // page_size].

Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180.

Shapes: R requests, P pages of the pool, max_pages per request (width of the table).
"""

from collections.abc import Callable
import dataclasses
import enum
import functools
import math
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.caches import device_parts, quantize
from attn_core.caches.paged import device_pages, latent_layout
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.prefixes import Prefixes

Array = jax.Array  # or a numpy array, where it is only read

LANES = latent_layout.LANES  # widths in layout v3 are multiples of this


class PagesV1(NamedTuple):
  """Heads outermost, the layout of `jax.experimental.pallas.ops.tpu.paged_attention`."""

  key_pages: Array  # [K, P, page_size, D]; with 4 bits uint8 [.., D / 2]: neighbors in a byte
  value_pages: Array  # [K, P, page_size, E]; with 4 bits uint8 [.., E / 2]
  # float32 [P, page_size, K], with 4 bits [P, page_size, K, groups], or [] for all; None: not
  # quantized
  key_scales: Array | None = None
  value_scales: Array | None = None  # as key_scales


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Widths:
  """Different widths of keys and values that share an array; the narrower are padded with zeros."""

  key: int
  value: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StoredHeads:
  """Key heads and widths of pages that a call of v3 only reads; their padding hides them."""

  key_heads: int
  key_width: int
  value_width: int


class PagesV2(NamedTuple):
  """Heads interleaved, as in `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

  Where E == D, shape and bytes are those of its `kv_pages`, for every width and dtype.
  """

  # [P, page_size, 2K, width]: key heads in even rows, value heads in odd ones; the width is D, or
  # with `widths` the larger one. With 4 bits uint8 [P, page_size, K, width]: the low half of a byte
  # is a number of the key of a head, the high half one of its value.
  pages: Array
  key_scales: Array | None = None  # as in PagesV1
  value_scales: Array | None = None  # as key_scales
  widths: Widths | None = None  # D and E where they differ


class PagesV3(NamedTuple):
  """PagesV2 with rows packed into 32-bit words and padded, and widths padded to 128.

  Where E == D, shape and bytes are those of the key-value cache of `ragged_paged_attention` v3 in
  tpu-inference, for every width and number of heads and all dtypes of 8, 16 and 32 bits: pages may
  be exchanged without a conversion. The exception is its separate kernel for a head width of 64,
  whose cache [P, page_size, cdiv(K, packing), packing, 128] has a key and its value in one row:
  see `caches.exchange`. Scales are not part of the pages in either. Where E != D, the narrower are
  padded.
  """

  # [P, page_size, cdiv(2K, packing), packing, padded_width]: packing = 4 / itemsize,
  # padded_width = max(D, E) rounded up to a multiple of 128. With 4 bits uint8 [P, page_size,
  # cdiv(K, 4), 4, padded_width], with keys and values in a byte as in PagesV2.
  pages: Array
  key_scales: Array | None = None  # as in PagesV1
  value_scales: Array | None = None  # as key_scales


@jax.tree_util.register_static
class Scope(enum.Enum):
  """The part of its request's tokens that a query attends to; the new ones are those of the call.

  Results of the parts are merged by `merge_partials`.
  """

  ALL = "all"
  CACHED = "cached"  # those before the request's first query
  NEW = "new"  # those from the request's first query on


class PagesMetadata(NamedTuple):
  """Pages and lengths of requests; with a leading axis, those of groups (see `request_groups`)."""

  page_tables: Array  # int32 [R, max_pages]; entries past a request's last page are not read
  context_lens: Array  # int32 [R]: tokens of a request in the cache, including this call's
  # int32 [R + 1]: offsets of the requests' queries; None: one query per request.
  query_start_loc: Array | None = None
  num_requests: Array | int | None = None  # int32 [] or [1]: first rows, in use; None: all
  # int32 [3]: (decode end, prefill end, total): requests before the first have one query each,
  # and total is the number of rows in use.
  distribution: Array | None = None
  # bool [R, q, q]: whether a request's i-th query sees the token of its j-th, where drafts form a
  # tree (see `drafts`); earlier tokens are seen as without. None: drafts follow one another.
  draft_mask: Array | None = None
  scope: Scope = Scope.ALL  # the tokens that count
  # Groups of requests that begin with the same pages, which are read once for a group; None: the
  # pages of every request are read for it alone.
  prefixes: Prefixes | None = None
  # Of a call of v3 without key and value, which reads what another layer has written: the heads in
  # the pages. None: the call writes its keys and values first.
  stored_heads: StoredHeads | None = None


class Heads(NamedTuple):
  """Number of key heads and their widths, which the shape of a padded layout does not give."""

  key_heads: int
  key_width: int
  value_width: int


REQUIRED = ("page_tables", "context_lens")  # fields of PagesMetadata
INTEGERS = (*REQUIRED, "query_start_loc", "num_requests", "distribution")  # the same

PAGES = (PagesV1, PagesV2, PagesV3)  # those of keys and values
KeyValuePages = PagesV1 | PagesV2 | PagesV3
Pages = KeyValuePages | PagesLatent
PagesT = TypeVar("PagesT", bound=Pages)
KeyValuesT = TypeVar("KeyValuesT", bound=KeyValuePages)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def takes_metadata(function: FunctionT) -> FunctionT:
  """Decorates a function whose argument `pages_metadata` used to be called `metadata`.

  The earlier keyword works as before.
  """
  @functools.wraps(function)
  def renamed(*args: Any, **keywords: Any) -> Any:
    if "metadata" in keywords:
      checks.require("pages_metadata" not in keywords, "pages_metadata and metadata",
                     "values for each", "one of them: both name the PagesMetadata")
      keywords["pages_metadata"] = keywords.pop("metadata")
    return function(*args, **keywords)
  return cast(FunctionT, renamed)


def packing(dtype: DTypeLike) -> int:
  """Number of rows of a dtype in a 32-bit word.

  Args:
    dtype: of 8, 16 or 32 bits.

  Returns:
    4, 2 or 1.
  """
  return 4 // jnp.dtype(dtype).itemsize


def page_size(cache: Pages) -> int:
  """Tokens of a page.

  Args:
    cache: any layout.
  """
  return cache.key_pages.shape[2] if isinstance(cache, PagesV1) else cache.pages.shape[1]


def num_pages(cache: Pages) -> int:
  """Pages of the pool, P.

  Args:
    cache: any layout.
  """
  return cache.key_pages.shape[1] if isinstance(cache, PagesV1) else cache.pages.shape[0]


def heads_of(cache: Pages) -> Heads:
  """The heads of a cache; for PagesV3 the padded numbers, the most that it can hold.

  Args:
    cache: any layout.

  Returns:
    Heads(K, D, E).
  """
  if isinstance(cache, PagesLatent):
    return Heads(1, cache.width, cache.widths.latent)
  if isinstance(cache, PagesV1):
    return Heads(cache.key_pages.shape[0], quantize.width_of(cache.key_pages),
                 quantize.width_of(cache.value_pages))
  *rows, width = cache.pages.shape[2:]
  key_heads = math.prod(rows) // (1 if quantize.is_packed(cache.pages.dtype) else 2)
  if isinstance(cache, PagesV2) and cache.widths is not None:
    return Heads(key_heads, cache.widths.key, cache.widths.value)
  return Heads(key_heads, width, width)


def most_widths(cache: Pages) -> Widths:
  """The largest widths of keys and values that a cache and its scales of groups can hold.

  Args:
    cache: any layout.
  """
  found = Widths(*heads_of(cache)[1:])
  if not has_token_scales(cache) or not quantize.is_packed(dtype_of(cache)):
    return found
  assert cache.key_scales is not None and cache.value_scales is not None
  return Widths(min(found.key, quantize.GROUP * cache.key_scales.shape[3]),
                min(found.value, quantize.GROUP * cache.value_scales.shape[3]))


def head_axis(cache: Pages) -> int:
  """The dimension of the pages array that holds the key heads.

  Args:
    cache: any layout.
  """
  return 0 if isinstance(cache, PagesV1) else 2


def dtype_of(cache: Pages) -> np.dtype:
  """The dtype in which keys and values are stored; uint8 with two numbers of 4 bits in a byte.

  Args:
    cache: any layout.
  """
  return (cache.key_pages if isinstance(cache, PagesV1) else cache.pages).dtype


@takes_metadata
def in_int32(pages_metadata: PagesMetadata) -> PagesMetadata:
  """Converts metadata, arrays or lists of integers of any dtype, to int32 jax arrays.

  Explicit mesh axes do not shard them.

  Raises:
    ValueError: as `checked`.
  """
  return jax.tree.map(
      lambda x: device_parts.match(x, jnp.asarray(x), (None,) * np.ndim(x)),
      checked(pages_metadata, "pages_metadata"))


def checked(pages_metadata: PagesMetadata, argument: str = "cache_metadata") -> PagesMetadata:
  """Converts metadata to int32 and bool arrays, of numpy where they are not jax arrays.

  Args:
    pages_metadata: arrays or lists of integers of any dtype.
    argument: its name in errors.

  Raises:
    ValueError: not a PagesMetadata; a field does not hold integers, or concrete ones outside of
      int32; scope is not a Scope, draft_mask not of booleans, or stored_heads not a StoredHeads.
  """
  checks.require(isinstance(pages_metadata, PagesMetadata), argument,
                 type(pages_metadata).__name__, "a PagesMetadata")
  fields: dict[str, Any] = {
      name: checks.int32(f"{argument}.{name}", getattr(pages_metadata, name), "int32")
      for name in INTEGERS if name in REQUIRED or getattr(pages_metadata, name) is not None}
  scope, mask = pages_metadata.scope, pages_metadata.draft_mask
  checks.require(isinstance(scope, Scope), f"{argument}.scope", repr(scope),
                 "a caches.pages.Scope: Scope.ALL, Scope.CACHED or Scope.NEW")
  if mask is not None:
    mask = cast(Array, checks.as_array(f"{argument}.draft_mask", mask, "bool [R, q, q]"))
    checks.require(mask.dtype == bool, f"{argument}.draft_mask", checks.describe(mask),
                   "bool [R, q, q]; caches.drafts.mask makes it of the drafts' parents")
  stored = pages_metadata.stored_heads
  checks.require(stored is None or isinstance(stored, StoredHeads), f"{argument}.stored_heads",
                 repr(stored), "a caches.pages.StoredHeads(key_heads, key_width, value_width)")
  return pages_metadata._replace(**fields, draft_mask=mask, prefixes=_checked_prefixes(
      pages_metadata.prefixes, f"{argument}.prefixes"))


def _checked_prefixes(prefixes: Prefixes | None, argument: str) -> Prefixes | None:
  """Converts prefixes to int32 arrays; ValueError as `checked`."""
  if prefixes is None:
    return None
  checks.require(isinstance(prefixes, Prefixes), argument, type(prefixes).__name__,
                 "a caches.prefixes.Prefixes, as caches.prefixes.find makes")
  return Prefixes(*(cast(Array, checks.int32(f"{argument}.{name}", x, "int32"))
                    for name, x in prefixes._asdict().items()))


@takes_metadata
def query_starts(pages_metadata: PagesMetadata) -> Array:
  """The offsets of the requests' queries; unused rows have no queries.

  Args:
    pages_metadata: its query_start_loc int32 [R + 1], or None for one query each.

  Returns:
    int32 [R + 1].
  """
  requests = np.shape(pages_metadata.context_lens)[0]
  starts = pages_metadata.query_start_loc
  if isinstance(starts, (list, tuple)):
    starts = jnp.asarray(starts, jnp.int32)
  if starts is None:
    starts = jnp.arange(requests + 1, dtype=jnp.int32)
  if pages_metadata.distribution is None and pages_metadata.num_requests is None:
    return starts  # all rows are in use
  used = rows_in_use(pages_metadata)
  rows = jnp.arange(requests + 1, dtype=jnp.int32)
  return jnp.where(rows <= used, starts, starts[used])


@takes_metadata
def rows_in_use(pages_metadata: PagesMetadata) -> Array:
  """The number of requests: the first rows of the tables.

  Args:
    pages_metadata: its distribution int32 [3], else its num_requests int32 [] or [1], else all R
      rows.

  Returns:
    int32 [].
  """
  if pages_metadata.distribution is not None:
    return pages_metadata.distribution[2]
  if pages_metadata.num_requests is not None:
    return jnp.reshape(pages_metadata.num_requests, ())
  return jnp.int32(np.shape(pages_metadata.context_lens)[0])


def check_key_values(cache: object) -> None:
  """Raises ValueError if a cache is not one of keys and values."""
  checks.require(isinstance(cache, PAGES), "cache", type(cache).__name__,
                 "a PagesV1, PagesV2 or PagesV3; caches.latent_pages is for a PagesLatent")


def has_token_scales(cache: Pages) -> bool:
  """Whether the pages keep scales per token and head.

  Args:
    cache: any layout.
  """
  return cache.key_scales is not None and cache.key_scales.ndim > 0


def take(cache: PagesT, ids: Array) -> PagesT:
  """Makes a cache of some pages.

  Args:
    cache: any layout.
    ids: int32 [num_ids], clipped to the pool.

  Returns:
    A cache of the same layout with num_ids pages, in the order of `ids`.
  """
  return over_arrays(lambda x, axis: device_pages.take(x, ids, axis), cache)


def over_arrays(function: Callable[[Array, int], Array], cache: PagesT) -> PagesT:
  """Applies a function to the arrays of a cache that have pages, and to the dimension of these.

  Args:
    function: returns the new array.
    cache: any layout; one scale for all stays as it is.
  """
  found: Pages = cache
  if isinstance(found, PagesLatent):
    found = latent_layout.over_arrays(function, found)
    assert isinstance(found, type(cache))
    return found
  if has_token_scales(cache):
    assert cache.key_scales is not None and cache.value_scales is not None
    found = found._replace(key_scales=function(cache.key_scales, 0),
                           value_scales=function(cache.value_scales, 0))
  if isinstance(found, PagesV1):
    found = found._replace(key_pages=function(found.key_pages, 1),
                           value_pages=function(found.value_pages, 1))
  else:
    found = found._replace(pages=function(found.pages, 0))
  assert isinstance(found, type(cache))
  return found
