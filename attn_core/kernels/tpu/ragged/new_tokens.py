# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the keys and values of new tokens to their pages, as the first work of the ragged kernel.

All tokens are in their pages before the first page is read, as if they had been written before the
kernel: requests may read pages that another one writes in the same call. Each run of tokens within
a page is copied by as few transfers of fixed sizes as possible.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels.tpu.ragged import runs

Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32


class NewTokenRefs(NamedTuple):
  """References to keys and values to write, and to their places, in a running kernel."""

  starts: Ref  # int32 [requests + 1]: where the tokens of each request begin
  lengths: Ref  # int32 [requests]: tokens of the requests, the new ones last
  # int32 [requests * row_pages]: page ids; nothing is written where they are outside the pool.
  pages: Ref
  rows: Ref  # [T, token_rows, D], as the pages hold tokens
  target: Ref  # the pages of the pool [num_pages, page_size, token_rows, D]
  semaphore: Ref
  row_pages: int  # pages of a request
  requests: Index  # whose tokens are written
  tokens: int  # T


class Span(NamedTuple):
  """Tokens [first, end) of the call, at positions `token + shift` of their request."""

  first: Index
  end: Index
  shift: Index


def start(new: NewTokenRefs) -> jax.Array:
  """Starts to copy all new tokens to their pages; returns how many there are."""
  # The number of copied tokens is carried, because semaphores count bytes, whatever the sizes of
  # the transfers.
  def write_request(request: Index, written: Index) -> jax.Array:
    return _write_request(new, request, span_of(new, request), written)
  return lax.fori_loop(jnp.int32(0), jnp.int32(new.requests), write_request, jnp.int32(0))


def wait(new: NewTokenRefs, written: Index) -> None:
  """Waits until the new tokens, of which there are `written`, have arrived."""
  def wait_some(_: Index, size: int) -> None:
    part = new.rows.at[pl.ds(0, size)]
    pltpu.make_async_copy(part, part, new.semaphore).wait()
  runs.powers_of_two(written, new.tokens, wait_some)


def span_of(new: NewTokenRefs, request: Index) -> Span:
  """Returns the tokens of a request that have a position within its pages."""
  page_size, end = new.target.shape[1], new.starts[request + 1]
  shift = new.lengths[request] - end
  first = jnp.maximum(jnp.where(request == 0, 0, new.starts[request]), -shift)
  held = new.row_pages * page_size
  return Span(first, jnp.minimum(jnp.minimum(end, new.tokens), held - shift), shift)


def _write_request(new: NewTokenRefs, request: Index, span: Span, written: Index) -> jax.Array:
  """Starts the transfers of a request; returns how many tokens have been copied so far."""
  num_pages, page_size = new.target.shape[:2]
  size = jnp.int32(page_size)
  page_of = lambda token: lax.div(token + span.shift, size)

  def write_page(number: Index, written: Index) -> jax.Array:
    begin = number * page_size - span.shift  # the token at the page's first slot
    first, end = jnp.maximum(begin, span.first), jnp.minimum(begin + page_size, span.end)
    page = new.pages[request * new.row_pages + number]
    exists = (page >= 0) & (page < num_pages)
    pl.when(exists)(lambda: _copy(new, page, first - begin, first, end - first))
    return written + jnp.where(exists, end - first, 0)

  some = span.first < span.end
  begin = page_of(span.first)
  end = jnp.where(some, page_of(jnp.maximum(span.end - 1, span.first)) + 1, begin)
  return lax.fori_loop(begin, end, write_page, written)


def _copy(new: NewTokenRefs, page: Index, slot: Index, token: Index, count: Index) -> None:
  """Starts the transfers of `count` tokens, at most a page, to consecutive slots of a page."""
  page_size = new.target.shape[1]

  def start(before: Index, size: int) -> None:
    pltpu.make_async_copy(new.rows.at[pl.ds(token + before, size)],
                          new.target.at[page, pl.ds(slot + before, size)], new.semaphore).start()

  runs.by_sizes(count, page_size, new.tokens, start)
