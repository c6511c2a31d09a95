# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Slot mapping: the place of each token of a call in the pool of pages."""

import jax
import jax.numpy as jnp

from attn_core import checks
from attn_core.array_axes import count_reached
from attn_core.caches import device_parts
from attn_core.caches.paged import page_stripes
from attn_core.caches.paged.layouts import (Array, PagesMetadata, in_int32, query_starts,
                                            rows_in_use, takes_metadata)
from attn_core.caches.paged.page_stripes import Stripe


@takes_metadata
def slots(pages_metadata: PagesMetadata, size: int, num_tokens: int,
          stripe: Stripe | None = None) -> jax.Array:
  """Computes the slot of each token of a call: page * page_size + offset in the page.

  Args:
    pages_metadata: token i of a request with q queries has position context_len - q + i.
    size: tokens of a page.
    num_tokens: T.
    stripe: the stripe whose pages the tables hold; None: the tables hold all pages.

  Returns:
    int32 [T]; -1 for tokens past the last request, tokens without a page in their row, and tokens
    of other stripes.

  Raises:
    ValueError: metadata of groups; use `groups.slots` for these.
  """
  return _slots(of_one_pool(pages_metadata), size, num_tokens, stripe)


@device_parts.one_program("size", "num_tokens")
def _slots(pages_metadata: PagesMetadata, size: int, num_tokens: int,
           stripe: Stripe | None) -> jax.Array:
  """Computes the slot of each token of a call to one pool."""
  token = jnp.arange(num_tokens, dtype=jnp.int32)
  requests = pages_metadata.context_lens.shape[0]
  starts = query_starts(pages_metadata)
  request = count_reached(starts[1:], token)
  live = request < rows_in_use(pages_metadata)
  request = jnp.minimum(request, requests - 1)
  position = pages_metadata.context_lens[request] - starts[request + 1] + token
  width, place = pages_metadata.page_tables.shape[1], page_stripes.held(stripe, position)
  page = pages_metadata.page_tables[request, jnp.clip(place // size, 0, width - 1)]
  live = live & (position >= 0) & (place < width * size)
  if stripe is not None:
    live = live & (page_stripes.position_of(stripe, place) == position)
  return slot_of(page, position % size, size, live)


def slot_at(pages_metadata: PagesMetadata, request: Array, position: Array, size: int,
            live: Array) -> jax.Array:
  """Returns the slots of positions within requests' tables, -1 where not live; see `slot_of`."""
  page = pages_metadata.page_tables[request, position // size]
  return slot_of(page, position % size, size, live)


def first_slots(pages_metadata: PagesMetadata, size: int, argument: str,
                rows: checks.Array) -> jax.Array:
  """Computes the slots of the first context_lens tokens of every request, for `from_dense`.

  Args:
    pages_metadata: tables and lengths.
    size: tokens of a page.
    argument: the name of `rows` in errors.
    rows: what is written, [R, S, ...].

  Returns:
    int32 [R * S]; -1 past a request's last token.

  Raises:
    ValueError: metadata of groups, or rows that do not fit.
  """
  pages_metadata = of_one_pool(pages_metadata)
  requests, width = pages_metadata.page_tables.shape
  checks.require(rows.shape[0] == requests and rows.shape[1] <= width * size, argument,
                 checks.describe(rows), f"[R, S, ...], R = {requests}, S at most {width * size}: "
                 f"{width} pages of {size} in a row of the table")
  return _first_slots(pages_metadata, size, rows.shape[1])


@device_parts.one_program("size", "tokens")
def _first_slots(pages_metadata: PagesMetadata, size: int, tokens: int) -> jax.Array:
  """Computes the slots of the first `tokens` tokens of every request."""
  requests = pages_metadata.page_tables.shape[0]
  position = jnp.arange(tokens, dtype=jnp.int32)[None]
  request = jnp.arange(requests, dtype=jnp.int32)[:, None]
  live = ((position < pages_metadata.context_lens[:, None])
          & (request < rows_in_use(pages_metadata)))
  return slot_at(pages_metadata, request, position, size, live).reshape(-1)


def holds_tokens(pages_metadata: PagesMetadata, size: int, num_pages: int) -> jax.Array:
  """Returns which tokens of the requests' pages are theirs, bool [R, max_pages * page_size].

  Args:
    pages_metadata: int32 arrays, without groups.
    size: tokens of a page.
    num_pages: P; pages outside the pool hold no tokens.
  """
  tables = pages_metadata.page_tables
  requests, width = tables.shape
  lengths = jnp.where(jnp.arange(requests) < rows_in_use(pages_metadata),
                      pages_metadata.context_lens, 0)
  held = (tables >= 0) & (tables < num_pages)
  return (jnp.arange(width * size)[None] < lengths[:, None]) & jnp.repeat(held, size, 1)


def slot_of(page: Array, offset: Array, size: int, live: Array) -> jax.Array:
  """page * size + offset; -1 where not live, or where the page number cannot exist."""
  # The product must not overflow to a valid slot for a page far outside the pool.
  live = live & (page >= 0) & (page < (2**31 - 1) // size)
  return jnp.where(live, page * size + offset, -1)


def of_one_pool(pages_metadata: PagesMetadata) -> PagesMetadata:
  """Converts metadata to int32 arrays; ValueError for metadata of groups."""
  pages_metadata = in_int32(pages_metadata)
  checks.require(pages_metadata.page_tables.ndim == 2, "pages_metadata.page_tables",
                 checks.describe(pages_metadata.page_tables),
                 "int32 [R, max_pages]; for groups use caches.groups.slots, or join them with "
                 "caches.groups.joined")
  return pages_metadata
