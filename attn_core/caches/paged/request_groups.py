# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of requests with separate pages, which a mesh distributes over its devices.

If the arrays of a `PagesMetadata` have a leading axis of num_groups, group g has the g-th part of
the pool's pages, whose page ids its tables hold, and the g-th part of a call's tokens, at whose
start its query_start_loc begins. Groups share nothing, so every device may hold some of them with
their own tables. The meaning is the same on one device.

If page_tables has a second axis of num_stripes, [num_groups, num_stripes, R, max_pages], the pages
of a request are dealt out among as many parts of its group's pages, so that a mesh can shard a
request's keys: column n of stripe w is the request's page n * num_stripes + w, numbered within the
w-th part (see `page_stripes`).

Shapes: R requests of a group, P pages of the whole pool, T tokens of the whole call, max_pages per
request in a stripe.
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.caches.paged import layouts, slot_mapping
from attn_core.caches.paged.layouts import Pages, PagesMetadata, takes_metadata
from attn_core.caches.paged.page_stripes import Stripe


def stack(*groups: PagesMetadata) -> PagesMetadata:
  """Stacks the metadata of groups of equal shapes; what is not a jax array becomes numpy's."""
  groups = tuple(map(layouts.checked, groups))
  on_host = lambda x: all(isinstance(part, (np.ndarray, np.generic)) for part in x)
  return jax.tree.map(lambda *x: (np if on_host(x) else jnp).stack(x), *groups)


@takes_metadata
def count(pages_metadata: PagesMetadata) -> int | None:
  """The number of groups; None if the metadata has no axis of groups."""
  tables = pages_metadata.page_tables
  return np.shape(tables)[0] if np.ndim(tables) > 2 else None


@takes_metadata
def stripe_count(pages_metadata: PagesMetadata) -> int | None:
  """The number of stripes; None if the tables have no axis of stripes."""
  tables = pages_metadata.page_tables
  return np.shape(tables)[1] if np.ndim(tables) > 3 else None


@takes_metadata
def shapes_of_one(pages_metadata: PagesMetadata) -> PagesMetadata:
  """The shapes of one group's metadata, with its stripes merged."""
  without = 0 if count(pages_metadata) is None else 1
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[without:], x.dtype), pages_metadata)
  if stripe_count(pages_metadata) is None:
    return one
  number, requests, width = one.page_tables.shape
  return one._replace(page_tables=jax.ShapeDtypeStruct(
      (requests, number * width), one.page_tables.dtype))


@takes_metadata
def whole(pages_metadata: PagesMetadata, num_pages: int, xp: ModuleType = jnp) -> PagesMetadata:
  """Merges the stripes of the tables, with page ids within the group.

  Args:
    pages_metadata: of groups; other metadata is returned unchanged.
    num_pages: P.
    xp: numpy, or jax.numpy.

  Returns:
    Tables [num_groups, R, max_pages * num_stripes]; -1 for ids outside their stripe.
  """
  stripes, tables = stripe_count(pages_metadata), pages_metadata.page_tables
  if stripes is None:
    return pages_metadata
  number, _, requests, width = tables.shape
  size = num_pages // number // stripes
  first = size * xp.arange(stripes, dtype=xp.int32)[None, :, None, None]
  # An id out of range would be a page of another stripe.
  tables = xp.where((tables >= 0) & (tables < size), tables + first, -1)
  tables = tables.transpose(0, 2, 3, 1).reshape(number, requests, width * stripes)
  return pages_metadata._replace(page_tables=tables)


@takes_metadata
def with_pool_ids(pages_metadata: PagesMetadata, num_pages: int) -> PagesMetadata:
  """Converts the tables of groups to page ids of the whole pool.

  Args:
    pages_metadata: of groups.
    num_pages: P.
  """
  number = _count(pages_metadata)
  pages_metadata = whole(layouts.checked(pages_metadata, "pages_metadata"), num_pages)
  size = num_pages // number
  first = jnp.arange(number, dtype=jnp.int32) * size
  # An id out of range would be a page of another group.
  own = lambda tables: jnp.clip(tables, 0, size - 1)
  pages_metadata = pages_metadata._replace(
      page_tables=own(pages_metadata.page_tables) + first[:, None, None])
  prefixes = pages_metadata.prefixes
  if prefixes is None:
    return pages_metadata
  return pages_metadata._replace(prefixes=prefixes._replace(
      page_tables=own(prefixes.page_tables) + first[:, None, None, None]))


@takes_metadata
def slots(cache: Pages, pages_metadata: PagesMetadata, num_tokens: int,
          stripe: Stripe | None = None) -> jax.Array:
  """Computes the slot of each token in the whole pool, see `slot_mapping.slots`: int32 [T].

  Args:
    cache: any layout.
    pages_metadata: with or without groups.
    num_tokens: T.
    stripe: the stripe whose pages the tables hold, where these have no axis of stripes; None: the
      tables hold all pages.
  """
  number, size = count(pages_metadata), layouts.page_size(cache)
  if number is None:
    return slot_mapping.slots(pages_metadata, size, num_tokens, stripe)
  most = layouts.num_pages(cache) // number * size
  tokens = num_tokens // number
  pages_metadata = whole(layouts.in_int32(pages_metadata), layouts.num_pages(cache))
  found = jax.vmap(lambda part: slot_mapping.slots(part, size, tokens, stripe))(pages_metadata)
  first = most * jnp.arange(number, dtype=jnp.int32)[:, None]
  # An id out of range would be a page of another group.
  return jnp.where((found >= 0) & (found < most), found + first, -1).reshape(-1)


@takes_metadata
def joined(pages_metadata: PagesMetadata, num_pages: int) -> PagesMetadata:
  """Joins the requests of all groups, for `ops.to_dense` and `ops.from_dense`.

  Args:
    pages_metadata: of groups.
    num_pages: P.

  Returns:
    Tables [num_groups * R, max_pages] with page ids of the pool and lengths [num_groups * R], 0 for
    unused rows; without queries. A page id outside its group's part becomes -1, which is outside
    the pool: `to_dense` reads 0 there and `from_dense` writes nothing. Calls of attention refuse it
    where numbers are concrete; under jit they cannot, so pass them the metadata of groups instead.
  """
  pages_metadata = whole(layouts.in_int32(pages_metadata), num_pages)
  own, size = pages_metadata.page_tables, num_pages // _count(pages_metadata)
  pages_metadata = with_pool_ids(pages_metadata, num_pages)
  rows = jnp.arange(pages_metadata.context_lens.shape[1])
  used_lengths = lambda part: jnp.where(rows < layouts.rows_in_use(part), part.context_lens, 0)
  lengths = jax.vmap(used_lengths)(pages_metadata)
  tables = jnp.where((own >= 0) & (own < size), pages_metadata.page_tables, -1)
  return PagesMetadata(tables.reshape(-1, tables.shape[2]), lengths.reshape(-1))


def _count(pages_metadata: PagesMetadata) -> int:
  """The number of groups of metadata that has them."""
  return np.shape(pages_metadata.page_tables)[0]
