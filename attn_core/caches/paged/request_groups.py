"""Groups of requests with pages of their own, side by side: what a mesh spreads over its devices.

Where the arrays of a `PagesMetadata` have a leading axis of G groups, group g has the g-th part of
the pool's pages, by whose numbers its tables go, and the g-th part of a call's tokens, from which
its query_start_loc counts. Groups share nothing, so every device may have some of them, with its
own tables, and the meaning is the same on one device.

Where page_tables has a second axis of W stripes, [G, W, R, N], a request's pages are dealt out
among as many parts of its group's pages, for a mesh to spread a request's keys: column n of stripe
w is the request's page n * W + w, by its number in the w-th part of them (see `stripes`).

Letters: G groups, W stripes, R requests of a group, N pages per request in a stripe, P pages of the
whole pool, T tokens of the whole call.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.caches.paged import ops as pages
from attn_core.caches.paged.ops import PagesMetadata
from attn_core.caches.paged.page_stripes import Stripe


def stack(*groups: PagesMetadata) -> PagesMetadata:
  """The metadata of several groups, of equal shapes, as one; what is on the host stays there."""
  on_host = lambda x: all(isinstance(part, (np.ndarray, np.generic)) for part in x)
  return jax.tree.map(lambda *x: (np if on_host(x) else jnp).stack(x), *groups)


def count(metadata: PagesMetadata) -> int | None:
  """G; None: the metadata is that of requests, not of groups."""
  return metadata.page_tables.shape[0] if metadata.page_tables.ndim > 2 else None


def stripe_count(metadata: PagesMetadata) -> int | None:
  """W; None: the tables have no axis of stripes."""
  return metadata.page_tables.shape[1] if metadata.page_tables.ndim > 3 else None


def shapes_of_one(metadata: PagesMetadata) -> PagesMetadata:
  """The shapes of one group's metadata, its stripes together."""
  without = 0 if count(metadata) is None else 1
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[without:], x.dtype), metadata)
  if stripe_count(metadata) is None:
    return one
  number, requests, width = one.page_tables.shape
  return one._replace(page_tables=jax.ShapeDtypeStruct(
      (requests, number * width), one.page_tables.dtype))


def whole(metadata: PagesMetadata, num_pages: int, xp=jnp) -> PagesMetadata:
  """Metadata of groups whose tables have no axis of stripes, by the numbers of a group's pages.

  Args:
    metadata: of groups, or of requests: these are returned as they are.
    num_pages: P.
    xp: numpy, or jax.numpy.

  Returns:
    Tables [G, R, N * W]; -1 for numbers that are no page of their stripe.
  """
  stripes, tables = stripe_count(metadata), metadata.page_tables
  if stripes is None:
    return metadata
  number, _, requests, width = tables.shape
  size = num_pages // number // stripes
  first = size * xp.arange(stripes, dtype=xp.int32)[:, None, None]
  # A wrong page would be another stripe's.
  tables = xp.where((tables >= 0) & (tables < size), tables + first, -1)
  tables = tables.transpose(0, 2, 3, 1).reshape(number, requests, width * stripes)
  return metadata._replace(page_tables=tables)


def with_pool_ids(metadata: PagesMetadata, num_pages: int) -> PagesMetadata:
  """Metadata of groups, with tables that go by the numbers of the whole pool's pages.

  Args:
    metadata: of groups.
    num_pages: P.
  """
  metadata, number = whole(metadata, num_pages), count(metadata)
  size = num_pages // number
  first = jnp.arange(number, dtype=jnp.int32) * size
  # A wrong page would be another group's.
  own = jnp.clip(metadata.page_tables, 0, size - 1)
  return metadata._replace(page_tables=own + first[:, None, None])


def slots(cache, metadata: PagesMetadata, num_tokens: int, stripe: Stripe | None = None):
  """`pages.slots` in the whole pool: int32 [T].

  Args:
    cache: any layout.
    metadata: of groups, or of one whole.
    num_tokens: T.
    stripe: whose pages tables without an axis of stripes have; None: all.
  """
  number, size = count(metadata), pages.page_size(cache)
  if number is None:
    return pages.slots(metadata, size, num_tokens, stripe)
  most = pages.num_pages(cache) // number * size
  metadata = whole(pages.in_int32(metadata), pages.num_pages(cache))
  found = jax.vmap(lambda part: pages.slots(part, size, num_tokens // number, stripe))(metadata)
  first = most * jnp.arange(number, dtype=jnp.int32)[:, None]
  # A wrong page would be another group's.
  return jnp.where((found >= 0) & (found < most), found + first, -1).reshape(-1)


def joined(metadata: PagesMetadata, num_pages: int) -> PagesMetadata:
  """The requests of all groups, in `pages.to_dense` and `from_dense`, with the pool's page ids.

  Args:
    metadata: of groups.
    num_pages: P.

  Returns:
    Tables [G * R, N] and lengths [G * R], 0 for rows that are not in use; without queries. A page
    outside of its group's part is -1, which is none of the pool: `to_dense` reads 0 there,
    `from_dense` writes nothing, and calls with pages refuse it where numbers are concrete; under
    jit they would take it for a page of the pool, so give those the metadata of groups itself.
  """
  metadata = whole(pages.in_int32(metadata), num_pages)
  own, size = metadata.page_tables, num_pages // count(metadata)
  metadata = with_pool_ids(metadata, num_pages)
  rows = jnp.arange(metadata.context_lens.shape[1])
  lengths = jax.vmap(lambda part: jnp.where(rows < pages.rows_in_use(part), part.context_lens, 0))(
      metadata)
  tables = jnp.where((own >= 0) & (own < size), metadata.page_tables, -1)
  return PagesMetadata(tables.reshape(-1, tables.shape[2]), lengths.reshape(-1))
