# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of which several requests share the first; see `caches.prefixes`.

On every level of the tree a group is like a request whose queries are those of all its requests,
and which sees all its tokens. Relative positions are all that counts in the rest, which begins
after the last shared page.
"""

from typing import Callable

import jax
import jax.numpy as jnp

from attn_core import partials
from attn_core.array_axes import count_reached
from attn_core.caches.paged import layouts, prefixes as prefixes_lib
from attn_core.kernels.common import dense_operands, paged_operands
from attn_core.kernels.common.contract import Residuals
from attn_core.types import BlockSizes, PagedOperands, PagedSpec

# Tokens of a key block of what a request does not share, which is short more often than whole
# requests are: on a CPU 128 tokens take 0.6 of the time of blocks of 256, and 700 tokens 1.15 times
# as long.
REST_BLOCK_KV = 128

Attend = Callable[[PagedOperands, PagedSpec, BlockSizes], Residuals]


def attend(run: Attend, operands: PagedOperands, spec: PagedSpec,
           block_sizes: BlockSizes) -> Residuals:
  """Attends to the pages of groups and to those of single requests, and merges the results.

  Args:
    run: attends to pages that are not shared.
    operands: the operands of one group of requests on one device.
    spec: what to compute.
    block_sizes: sizes fixed by the caller.
  """
  prefixes = operands.metadata.prefixes
  if prefixes is None:
    return run(operands, spec, block_sizes)
  dtype = dense_operands.out_dtype(operands, spec)
  spec = spec._replace(out_dtype=spec.softmax_dtype)
  parts = [run(_alone(operands, prefixes), spec, block_sizes._replace(
      block_kv=block_sizes.block_kv or REST_BLOCK_KV))]
  tokens, starts = _token_order(operands, prefixes)
  back = jnp.zeros_like(tokens).at[tokens].set(jnp.arange(tokens.shape[0], dtype=jnp.int32))
  heads, key_heads = operands.query.shape[1], layouts.heads_of(operands.cache).key_heads
  mods = tuple(x[:, :, tokens] if has_tokens else x for x, has_tokens in zip(
      operands.mods, paged_operands.has_tokens(operands.mods, spec)))
  # Without a size, a call with as many queries as requests would take one query at a time.
  block_q = block_sizes.block_q or max(1, paged_operands.BLOCK_ROWS * key_heads // heads)
  for rows, tables, counts in zip(prefixes.rows, prefixes.page_tables, prefixes.page_counts):
    groups = layouts.PagesMetadata(
        tables, counts * layouts.page_size(operands.cache), starts[rows])
    part = run(operands._replace(query=operands.query[tokens], metadata=groups, sinks=None,
                                 mods=mods),
               spec._replace(causal=False), block_sizes._replace(block_q=block_q))
    parts.append(Residuals(*(x[back] for x in part)))
  out, lse = (jnp.stack(x) for x in zip(*parts))
  out, lse = partials.combine_stacked(out, lse, lambda x: x[..., 0])
  return Residuals(out.astype(dtype), lse)


def _alone(operands: PagedOperands, prefixes: prefixes_lib.Prefixes) -> PagedOperands:
  """Returns the operands with the pages of each request that groups do not read."""
  metadata = operands.metadata
  skipped, width = prefixes_lib.pages_of_requests(prefixes), metadata.page_tables.shape[1]
  column = jnp.minimum(jnp.arange(width, dtype=jnp.int32) + skipped[:, None], width - 1)
  return operands._replace(metadata=metadata._replace(
      page_tables=jnp.take_along_axis(metadata.page_tables, column, 1), prefixes=None,
      context_lens=metadata.context_lens - skipped * layouts.page_size(operands.cache)))


def _token_order(operands: PagedOperands,
                 prefixes: prefixes_lib.Prefixes) -> tuple[jax.Array, jax.Array]:
  """Returns the tokens in the order of the groups' requests, and where each request begins there.

  Returns:
    (int32 [T], int32 [R + 1]).
  """
  starts, order = layouts.query_starts(operands.metadata), prefixes.order
  numbers = (starts[1:] - starts[:-1])[order]
  begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(numbers, dtype=jnp.int32)])
  token = jnp.arange(operands.query.shape[0], dtype=jnp.int32)
  place = jnp.minimum(count_reached(begins[1:], token), order.shape[0] - 1)
  tokens = starts[order[place]] + token - begins[place]
  return jnp.where(token < begins[-1], tokens, token), begins
