# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of which several requests share the first; see `caches.prefixes`.

On every level of the tree a group is like a request whose queries are those of all its requests,
and which sees all its tokens. Relative positions are all that counts in the rest, which begins
after the last shared page.
"""

from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp

from attn_core import partials
from attn_core.array_axes import count_reached
from attn_core.caches.paged import layouts, prefixes as prefixes_lib
from attn_core.caches.paged.layouts import Pages, PagesMetadata
from attn_core.kernels.common import dense_operands, paged_operands, prefix_parts
from attn_core.kernels.common.contract import Residuals
from attn_core.types import BlockSizes, PagedOperands, PagedSpec

# Tokens of a key block of what a request does not share, which is short more often than whole
# requests are: on a CPU 128 tokens take 0.6 of the time of blocks of 256, and 700 tokens 1.15 times
# as long. With jax 0.10 it is the reverse: 128 tokens in a block of 256 take 0.65 of their time in
# one of 128.
REST_BLOCK_KV = 128 if jax.__version_info__ >= (0, 11) else 256

Attend = Callable[[PagedOperands, PagedSpec, BlockSizes], Residuals]
Write = Callable[[PagedOperands, PagedSpec, BlockSizes], tuple[Residuals, Pages]]


class Form(NamedTuple):
  """Functions of a kernel for the pages of groups and those of single requests."""

  run: Attend  # attends to pages that are not shared
  of_groups: Callable[[PagedOperands, BlockSizes], BlockSizes]  # block sizes from those given
  of_rest: Callable[[BlockSizes], BlockSizes]
  # Whether a group with more queries than tokens is several requests; see `prefix_parts`.
  in_parts: bool = True


def on_xla(run: Attend, heads: layouts.Heads) -> Form:
  """Returns the form of plain XLA, given its function and the heads in the pages."""
  def of_groups(operands: PagedOperands, given: BlockSizes) -> BlockSizes:
    # Without a size, a call with as many queries as requests would take one query at a time.
    group_size = operands.query.shape[1] // heads.key_heads
    return given._replace(
        block_q=given.block_q or max(1, paged_operands.BLOCK_ROWS // group_size))

  return Form(run, of_groups,
              lambda given: given._replace(block_kv=given.block_kv or REST_BLOCK_KV),
              in_parts=False)


def on_tpu(run: Attend, heads: layouts.Heads) -> Form:
  """Returns the form of the kernel for TPUs, given its function and the heads in the pages."""
  from attn_core.kernels.tpu.ragged import prefix_groups  # imported when chosen, as Pallas is
  return Form(run, lambda operands, given: prefix_groups.block_sizes(operands, heads, given),
              lambda given: given)


def on_hopper(run: Attend, heads: layouts.Heads) -> Form:
  """Returns the form of the kernel for Hopper, given its function and the heads in the pages."""
  from attn_core.kernels.gpu.split_kv import prefix_groups  # imported when chosen, as Pallas is
  return Form(run, lambda operands, given: prefix_groups.block_sizes(operands, heads, given),
              lambda given: given)


def attend(form: Form, operands: PagedOperands, spec: PagedSpec, block_sizes: BlockSizes,
           write: Write | None = None) -> tuple[Residuals, Pages]:
  """Attends to the pages of groups and to those of single requests, and merges the results.

  Args:
    form: of the kernel.
    operands: the operands of one group of requests on one device.
    spec: what to compute.
    block_sizes: sizes fixed by the caller.
    write: writes the new tokens, then attends as `form.run` does; None: there are none to write.

  Returns:
    (the results, the cache, with the new tokens if they were written).
  """
  def first(operands: PagedOperands, spec: PagedSpec,
            sizes: BlockSizes) -> tuple[Residuals, Pages]:
    if write is None:
      return form.run(operands, spec, sizes), operands.cache
    return write(operands, spec, sizes)

  prefixes = operands.metadata.prefixes
  if prefixes is None:
    return first(operands, spec, block_sizes)
  dtype = dense_operands.out_dtype(operands, spec)
  spec = spec._replace(out_dtype=spec.softmax_dtype)
  part, cache = first(_alone(operands, prefixes), spec, form.of_rest(block_sizes))
  # Groups read what was written to: a kernel that writes in place leaves nothing else to read.
  operands, parts = operands._replace(cache=cache, key=None, value=None), [part]
  tokens, starts = _token_order(operands, prefixes)
  back = jnp.zeros_like(tokens).at[tokens].set(jnp.arange(tokens.shape[0], dtype=jnp.int32))
  mods = tuple(x[:, :, tokens] if has_tokens else x for x, has_tokens in zip(
      operands.mods, paged_operands.has_tokens(operands.mods, spec)))
  block_sizes = form.of_groups(operands, block_sizes)
  for rows, tables, counts in zip(prefixes.rows, prefixes.page_tables, prefixes.page_counts):
    groups = PagesMetadata(tables, counts * layouts.page_size(cache), starts[rows])
    if form.in_parts:
      groups = _cut(groups, prefix_parts.num_parts(
          tokens.shape[0], tables.shape[0], layouts.page_size(cache)))
    part = form.run(operands._replace(query=operands.query[tokens], metadata=groups, sinks=None,
                                      mods=mods), spec._replace(causal=False), block_sizes)
    parts.append(Residuals(*(x[back] for x in part)))
  out, lse = (jnp.stack(x) for x in zip(*parts))
  out, lse = partials.combine_stacked(out, lse, lambda x: x[..., 0])
  return Residuals(out.astype(dtype), lse), cache


def _cut(groups: PagesMetadata, num_parts: int) -> PagesMetadata:
  """Cuts groups with more queries than tokens into requests with the same pages.

  Args:
    groups: of the pages of groups.
    num_parts: the number of requests, the last of which may have no queries.
  """
  lengths, starts = groups.context_lens, layouts.query_starts(groups)
  queries, most = starts[1:] - starts[:-1], jnp.maximum(lengths, 1)
  numbers = jnp.where(lengths > 0, (queries + most - 1) // most, 1)
  ends = jnp.cumsum(jnp.maximum(numbers, 1), dtype=jnp.int32)
  part = jnp.arange(num_parts, dtype=jnp.int32)
  group = jnp.minimum(count_reached(ends, part), lengths.shape[0] - 1)
  number = part - jnp.where(group > 0, ends[group - 1], 0)
  begins = jnp.minimum(starts[group] + number * lengths[group], starts[group + 1])
  begins = jnp.where(part < ends[-1], begins, starts[-1])
  return PagesMetadata(groups.page_tables[group], lengths[group],
                       jnp.concatenate([begins, starts[-1:]]))


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
