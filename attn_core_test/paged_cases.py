# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests over pages, and their attention by the dense reference."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, PagedOptions, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       page_attention, ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.caches import pages
from attn_core.references import paged as reference
from attn_core.types import PagedSpec

BLOCKS = BlockSizes(block_q=4, block_kv=8)


class Case(NamedTuple):
  """Some requests: the tokens of each, and how many of them are queries of this call."""

  lengths: tuple = (9, 0, 17, 1, 24, 5)
  queries: tuple = (9, 0, 5, 1, 1, 2)
  options: PagedOptions = PagedOptions()
  H: int = 4
  K: int = 2
  D: int = 6
  page: int = 4
  rest: int = 3  # rows of the query after those of the last request
  unused: int = 0  # rows of the tables after that of the last request
  distribution: tuple | None = None
  dtype: str = "float32"
  sinks: bool = False

  @property
  def pool(self):
    return 8 * len(self.lengths)

  def metadata(self, single=False) -> PagesMetadata:
    """Returns tables of pages in random order; unused entries point outside the pool."""
    rng = np.random.default_rng(0)
    rows = len(self.lengths) + self.unused
    tables = np.full((rows, 8), 10**6, np.int32)
    free = rng.permutation(self.pool)
    for row, length in enumerate(self.lengths):
      used = -(-length // self.page)
      tables[row, :used], free = free[:used], free[used:]
    pad = lambda x, value: np.array([*x, *[value] * self.unused], np.int32)
    starts = np.cumsum([0, *self.queries])
    number = np.array([len(self.lengths)], np.int32) if self.unused else None
    if self.distribution is not None:
      number = None
    return PagesMetadata(
        tables, pad(self.lengths, 999), None if single else pad(starts, -5), number,
        None if self.distribution is None else np.array(self.distribution, np.int32))

  def arrays(self):
    """Returns query, key and value pages [K, P, page, D] and sinks [H]; NaN in unused places."""
    rng = np.random.default_rng(1)
    tokens = sum(self.queries) + self.rest
    query = rng.normal(size=(tokens, self.H, self.D))
    query[sum(self.queries):] = np.nan
    key, value = rng.normal(size=(2, self.K, self.pool, self.page, self.D))
    live = np.zeros((self.pool, self.page), bool)
    tables = self.metadata().page_tables
    for row, length in enumerate(self.lengths):
      for p in range(length):
        live[tables[row, p // self.page], p % self.page] = True
    key[:, ~live] = value[:, ~live] = np.nan
    sinks = rng.normal(size=self.H) if self.sinks else None
    return tuple(None if x is None else jnp.asarray(x, self.dtype)
                 for x in (query, key, value, sinks))

  def oracle(self, query, key, value, sinks):
    """Returns (output [T, H, D], lse [H, T]) of the reference, NaN where it has them."""
    return jax.jit(self._oracle)(query, key, value, sinks)  # its operations one by one take seconds

  def _oracle(self, query, key, value, sinks):
    tables, o = self.metadata().page_tables, self.options
    window = (None, None) if o.sliding_window is None else o.sliding_window
    mods, structure = jax.tree.flatten(
        None if o.score_mod is None else o.score_mod.lower((1, self.H, query.shape[0], 1)))
    spec = PagedSpec(o.softmax_scale or self.D**-0.5, o.logits_soft_cap, o.causal, window,
                     score_mod=structure)
    requests = []
    for row, (length, number) in enumerate(zip(self.lengths, self.queries)):
      found = (None, None)
      if length:
        found = reference.tokens(key, value, tables[row], length)
      requests.append((number, *found))
    query = query.at[sum(self.queries):].set(0)
    return reference.attention(query, requests, spec, sinks, tuple(map(jnp.asarray, mods)))


@functools.partial(jax.jit, static_argnums=0)
def _cached(dtype, query, *pages_v1):
  query, key, value = (jnp.nan_to_num(x.astype(dtype)) for x in (query, *pages_v1))
  return query, pages.convert(PagesV1(key, value), PagesV2)


def plain(case, dtype="float32"):
  """Returns query, v2 cache and metadata of a case, with 0 in place of NaN."""
  return *_cached(dtype, *case.arrays()[:3]), case.metadata()


def run_pages(mechanism, case, arrays, options, rest=np.nan, **changes):
  """Returns (output, lse) of "v1", "v2" or "v3".

  Args:
    mechanism: v3 gets the new tokens as arguments, and their slots in the pages hold NaN.
    case: the requests.
    arrays: query, and key and value in pages of v1.
    options: a PagedOptions.
    rest: the new tokens that are of no request.
    **changes: fields of the metadata.
  """
  query, key, value = arrays
  cache = PagesV1(key, value)
  metadata = case.metadata(single=mechanism == "v1")._replace(**changes)
  if mechanism == "v1":
    output = page_attention(query, cache, metadata, options)
  elif mechanism == "v2":
    output = ragged_page_attention_v2(query, pages.convert(cache, PagesV2), metadata, options)
  else:
    mapping = pages.slots(metadata, case.page, query.shape[0])
    outside = jnp.where(mapping < 0, 10**6, mapping)
    flat = [x.reshape(case.K, -1, case.D) for x in (key, value)]
    new = [x.at[:, outside].get(mode="fill", fill_value=rest).swapaxes(0, 1) for x in flat]
    holes = [x.at[:, outside].set(np.nan, mode="drop").reshape(key.shape) for x in flat]
    output = ragged_page_attention_v3(query, *new, pages.convert(
        PagesV1(*holes), PagesV3, Heads(case.K, case.D, case.D)), metadata, options)
  return output.attention_outputs, output.lse
