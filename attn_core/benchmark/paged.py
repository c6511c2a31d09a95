# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Contenders over pages; the keys and values of a case are in pages before the time is taken.

B rows are as many requests, whose T queries are their last tokens.
"""

import functools
import time
from typing import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.attention import attention
from attn_core.benchmark.cases import Case
from attn_core.benchmark.contenders import Contender, Inputs, Runner, repeat, require_none
from attn_core.caches import drafts, pages, prefixes
from attn_core.caches.paged import Heads, PagesMetadata, PagesV2
from attn_core.types import cdiv

MECHANISM = "ragged_page_attention_v2"
PAGE_SIZE = 16


def mechanisms(names: Iterable[str]) -> list[Contender]:
  """The contenders over pages: as the call is, with the prefix read once, with a mask of drafts.

  Args:
    names: those of mechanisms; the list is empty unless `MECHANISM` is one.
  """
  variants = {MECHANISM: lambda case, metadata: metadata,
              f"{MECHANISM}, prefix once": _read_once, f"{MECHANISM}, drafts": _as_drafts}
  return [Contender(name, functools.partial(_prepare, change), "attn_core", peer=False)
          for name, change in variants.items() if MECHANISM in names]


def _read_once(case: Case, metadata: PagesMetadata) -> PagesMetadata:
  """Adds the groups of requests that begin with the same pages."""
  require_none("a prefix read once", {"a case without a prefix": case.prefix < PAGE_SIZE})
  counts = (metadata.context_lens - case.queries) // PAGE_SIZE
  return metadata._replace(prefixes=prefixes.find(metadata.page_tables, counts, min_requests=2))


def _as_drafts(case: Case, metadata: PagesMetadata) -> PagesMetadata:
  """Adds a mask of drafts that follow one another."""
  require_none("a mask of drafts", {"one query a row": case.queries == 1})
  chain = np.tile(np.arange(-1, case.queries - 1), (case.batch, 1))
  return metadata._replace(draft_mask=drafts.mask(jnp.asarray(chain)))


def _prepare(change: Callable[[Case, PagesMetadata], PagesMetadata], case: Case, inputs: Inputs,
             backward: bool) -> Runner:
  """Fills the pages and compiles the call."""
  require_none("pages", {
      "gradient": backward, "as many keys as queries": case.queries == case.keys,
      "no causal mask": not case.causal, "documents": case.documents > 1, "latent": case.latent,
      "score mods": case.score_mod})
  cache, metadata = _filled(case, inputs)
  query = inputs.query.reshape(-1, case.heads, case.width)

  def attend(query: jax.Array, cache: PagesV2, metadata: PagesMetadata) -> jax.Array:
    return attention(
        query, None, None, mechanism=MECHANISM, layout="thd", cache_view=cache,
        cache_metadata=metadata, sliding_window=case.window, softmax_scale=case.softmax_scale,
        logits_soft_cap=case.soft_cap, softmax_aux=inputs.sinks).attention_outputs

  operands = (query, cache, jax.tree.map(jnp.asarray, change(case, metadata)))
  start = time.perf_counter()
  compiled = jax.jit(attend).lower(*operands).compile()
  seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  shape = (case.batch, case.queries, case.heads, case.value_width)
  return Runner(lambda number: repeat(compiled, operands, number),
                lambda out: {"output": np.asarray(out).reshape(shape)}, seconds,
                None if memory is None else int(memory.temp_size_in_bytes))


def _filled(case: Case, inputs: Inputs) -> tuple[PagesV2, PagesMetadata]:
  """Returns the pages of a case and their metadata; full pages of the prefix are there once."""
  shared, width = case.prefix // PAGE_SIZE, cdiv(case.keys, PAGE_SIZE)
  own = shared + np.arange(case.batch * (width - shared)).reshape(case.batch, -1)
  tables = np.concatenate([np.tile(np.arange(shared), (case.batch, 1)), own], 1)
  metadata = PagesMetadata(
      jnp.asarray(tables, jnp.int32), jnp.full(case.batch, case.keys, jnp.int32),
      jnp.arange(case.batch + 1, dtype=jnp.int32) * case.queries)
  heads = Heads(case.key_heads, case.width, case.value_width)
  cache = pages.init(PagesV2, int(tables.max()) + 1, PAGE_SIZE, heads, inputs.key.dtype)
  return jax.jit(pages.from_dense)(cache, inputs.key, inputs.value, metadata), metadata
