"""Groups of requests with pages of their own, side by side: what a mesh spreads over its devices.

Where the arrays of a `PagesMetadata` have a leading axis of G groups, group g has the g-th part of
the pool's pages, by whose numbers its tables go, and the g-th part of a call's tokens, from which
its query_start_loc counts. Groups share nothing, so every device may have some of them, with its
own tables, and the meaning is the same on one device.

Letters: G groups, R requests of a group, N pages per request, P pages of the whole pool, T tokens
of the whole call.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.caches import pages
from attn_core.caches.pages import PagesMetadata


def stack(*groups: PagesMetadata) -> PagesMetadata:
  """The metadata of several groups, of equal shapes, as one; what is on the host stays there."""
  on_host = lambda x: all(isinstance(part, (np.ndarray, np.generic)) for part in x)
  return jax.tree.map(lambda *x: (np if on_host(x) else jnp).stack(x), *groups)


def count(metadata: PagesMetadata) -> int | None:
  """G; None: the metadata is that of requests, not of groups."""
  return metadata.page_tables.shape[0] if metadata.page_tables.ndim == 3 else None


def shapes_of_one(metadata: PagesMetadata) -> PagesMetadata:
  """The shapes of one group's metadata."""
  without = 0 if count(metadata) is None else 1
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[without:], x.dtype), metadata)


def with_pool_ids(metadata: PagesMetadata, num_pages: int) -> PagesMetadata:
  """Metadata of groups, with tables that go by the numbers of the whole pool's pages.

  Args:
    metadata: of groups.
    num_pages: P.
  """
  number = count(metadata)
  size = num_pages // number
  first = jnp.arange(number, dtype=jnp.int32) * size
  # A wrong page would be another group's.
  own = jnp.clip(metadata.page_tables, 0, size - 1)
  return metadata._replace(page_tables=own + first[:, None, None])


def slots(cache, metadata: PagesMetadata, num_tokens: int):
  """`pages.slots` in the whole pool: int32 [T].

  Args:
    cache: any layout.
    metadata: of groups, or of one whole.
    num_tokens: T.
  """
  number, size = count(metadata), pages.page_size(cache)
  if number is None:
    return pages.slots(metadata, size, num_tokens)
  most = pages.num_pages(cache) // number * size
  found = jax.vmap(lambda part: pages.slots(part, size, num_tokens // number))(
      pages.in_int32(metadata))
  first = most * jnp.arange(number, dtype=jnp.int32)[:, None]
  # A wrong page would be another group's.
  return jnp.where((found >= 0) & (found < most), found + first, -1).reshape(-1)


def joined(metadata: PagesMetadata, num_pages: int) -> PagesMetadata:
  """The requests of all groups, in `pages.to_dense` and `from_dense`, with the pool's page ids.

  Args:
    metadata: of groups.
    num_pages: P.

  Returns:
    Tables [G * R, N] and lengths [G * R], 0 for rows that are not in use; without queries.
  """
  metadata = with_pool_ids(pages.in_int32(metadata), num_pages)
  rows = jnp.arange(metadata.context_lens.shape[1])
  lengths = jax.vmap(lambda part: jnp.where(rows < pages.rows_in_use(part), part.context_lens, 0))(
      metadata)
  return PagesMetadata(metadata.page_tables.reshape(-1, metadata.page_tables.shape[2]),
                       lengths.reshape(-1))
