# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shapes of calls of kernels over pages for groups of requests that share pages.

A kernel takes at most as many queries of a request as the request has tokens, so a group with more
queries is several requests with the same pages; see `mechanisms.paged_prefixes`.
"""

from typing import Callable, cast

import jax
import jax.numpy as jnp

from attn_core.caches.paged import layouts
from attn_core.caches.paged.layouts import Pages, PagesMetadata


def num_parts(tokens: int, requests: int, page_size: int) -> int:
  """Returns how many requests the groups of `requests` are at most, each of at least one page."""
  return requests + tokens // page_size


def metadata_of(metadata: PagesMetadata, requests: int) -> PagesMetadata:
  """Returns the shapes of the metadata of a number of requests with tables as wide as these."""
  of = lambda *shape: cast(jax.Array, jax.ShapeDtypeStruct(shape, jnp.int32))
  return PagesMetadata(of(requests, metadata.page_tables.shape[1]), of(requests), of(requests + 1))


def unsupported_reason(query: jax.Array, cache: Pages, metadata: PagesMetadata,
                       reason_of: Callable[[PagesMetadata], str | None]) -> str | None:
  """Returns why a kernel does not read the pages of groups, by shapes, or None if it does.

  Args:
    query, cache, metadata: of the call; only shapes and dtypes are read.
    reason_of: returns why the kernel does not take requests like the groups, given their metadata.
  """
  if metadata.prefixes is None:
    return None
  parts = num_parts(query.shape[0], metadata.page_tables.shape[0], layouts.page_size(cache))
  reason = reason_of(metadata_of(metadata, parts))
  return reason and f"cache_metadata.prefixes, as {parts} requests: {reason}"
