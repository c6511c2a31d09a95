# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of queries in the ragged kernel over pages: their steps, and their transfers.

Queries and results are arrays of tokens in the memory of the device. The queries of a block are
consecutive tokens of a request. They are copied to their rows of the block, whose other rows are
zero; their results are copied back. Transfers of a block overlap the computation of others.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.caches.paged.layouts import Scope
from attn_core.kernels.tpu.ragged import common, runs, visibility
from attn_core.kernels.tpu.ragged.common import KernelRefs, Steps

Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32

SLOTS = 2  # blocks of queries, and of results, in vector memory


class RequestPart(NamedTuple):
  """The requests that a kernel computes, by places of numbers in `counts`; static and hashable."""

  first: int | None  # number of requests before these; None: 0
  end: int | None  # end of these; None: all rows of the tables
  in_use: int | None  # number of requests of the call; None: all rows of the tables

  @property
  def is_first(self) -> bool:
    """Whether no requests come before."""
    return self.first is None

  @property
  def is_last(self) -> bool:
    """Whether no requests follow."""
    return self.end == self.in_use


class TokenRefs(NamedTuple):
  """References to tokens in a running kernel, and to their blocks."""

  counts: Ref | None  # int32 [n]: numbers of requests, of which `part` picks some
  part: RequestPart
  starts: Ref  # int32 [requests + 1]: where the queries of each request begin
  lengths: Ref  # int32 [requests]: tokens of the requests
  query: Ref  # [T, K, G, D]
  out: Ref  # [T, K, G, E]
  lse: Ref  # of every step
  query_blocks: Ref  # [SLOTS, K, block_q, G, D]
  out_blocks: Ref  # [SLOTS, K, block_q, G, E]
  lse_blocks: Ref  # [SLOTS, ...]
  query_arrived: Ref  # semaphores, one for each slot
  out_sent: Ref
  numbers: Ref | None = None  # of the score mod, [num_steps, ...]; see `ModInputs.by_step`
  number_blocks: Ref | None = None  # [SLOTS, ...]


class Run(NamedTuple):
  """The queries of a block: consecutive tokens."""

  token: Index  # the first one
  row: Index  # its query of the block
  count: Index  # at most block_q


# --- Steps. --------------------------------------------------------------------------------------


class Request(NamedTuple):
  """The queries of a request."""

  begin: Index  # position of the first one, negative if there are more queries than tokens
  length: Index  # tokens of the request, its queries last
  shift: Index  # token minus position


def start_of(t: TokenRefs, request: Index) -> Index:
  """Returns the first query of a request, or the end of all queries."""
  return t.starts[request]


def request_of(t: TokenRefs, request: Index) -> Request:
  """Reads the numbers of a request."""
  end, length = start_of(t, request + 1), t.lengths[request]
  return Request(length - (end - start_of(t, request)), length, end - length)


def requests_in_use(t: TokenRefs) -> Index:
  """Returns the number of requests of the call."""
  return _count(t, t.part.in_use, t.lengths.shape[0])


def bounds_of(t: TokenRefs) -> tuple[Index, Index]:
  """Returns which requests [first, end) are computed."""
  first = _count(t, t.part.first, 0)
  return first, jnp.maximum(_count(t, t.part.end, t.lengths.shape[0]), first)


def _count(t: TokenRefs, place: int | None, otherwise: int) -> jax.Array:
  """Reads a number of requests, at most the rows of the tables."""
  if place is None or t.counts is None:
    return jnp.int32(otherwise)
  return jnp.clip(t.counts[place], 0, t.lengths.shape[0])


def make_steps(k: KernelRefs, t: TokenRefs) -> None:
  """Writes the steps of all requests and their number to scalar memory."""
  block_q, capacity = jnp.int32(k.shape.block_q), k.steps.shape[1]

  def add_request(number: Index, count: Index) -> Index:
    request = request_of(t, number)
    some = request.begin < request.length
    origin, first, end = _block_range(k, request)
    end = jnp.minimum(jnp.where(some, end, first), first + (capacity - count))

    @pl.loop(first, end)
    def _(block: Index) -> None:
      step = _make_step(k, number, request, origin + block * block_q)
      for field, x in enumerate(step):
        k.steps[field, count + block - first] = jnp.asarray(x, jnp.int32)
    return count + jnp.maximum(end - first, 0)

  k.num_live[0] = lax.fori_loop(*bounds_of(t), add_request, jnp.int32(0))


def steps_of_core(k: KernelRefs, count: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the steps [begin, end) of the core, of `count`: half of the blocks of keys, if of two.

  A step counts as a block more than it has, for its queries and results.
  """
  if k.shape.num_cores == 1:
    return jnp.int32(0), count
  fields = Steps._fields
  first_block, end_block = fields.index("first_block"), fields.index("end_block")

  def add(number: Index, sums: tuple[Index, Index], total: Index) -> tuple[Index, Index]:
    """Adds a step to the sum of blocks, and to the number of steps in the first half of `total`."""
    blocks, steps = sums
    after = blocks + (k.steps[end_block, number] - k.steps[first_block, number] + 1)
    # A step belongs to the half that its middle, (blocks + after) / 2, is in.
    return after, steps + (blocks + after <= total).astype(jnp.int32)

  zero = jnp.int32(0)
  total = lax.fori_loop(zero, count, functools.partial(add, total=zero), (zero, zero))[0]
  middle = lax.fori_loop(zero, count, functools.partial(add, total=total), (zero, zero))[1]
  core = pl.program_id(0)
  return jnp.where(core == 0, zero, middle), jnp.where(core == 0, middle, count)


def _block_range(k: KernelRefs, request: Request) -> tuple[Index, Index, Index]:
  """Returns where blocks of a request with queries begin to count, the first one and the end."""
  begin, block_q = jnp.maximum(request.begin, 0), jnp.int32(k.shape.block_q)
  if k.shape.one_block:  # none for more queries than a block, as in `query_blocks`
    fits = request.length - request.begin <= block_q
    return begin, jnp.int32(0), jnp.where(fits, jnp.int32(1), jnp.int32(0))
  return (jnp.int32(0), lax.div(begin, block_q),
          lax.div(request.length + (block_q - 1), block_q))


def _make_step(k: KernelRefs, number: Index, request: Request, begin: Index) -> Steps:
  """Finds the keys that the queries of a block attend to.

  Args:
    k: the kernel.
    number: of the request.
    request: its numbers.
    begin: position of the block's first query.
  """
  left, right, layout = k.spec.left, k.spec.right, k.shape.layout
  # A draft's place in its tree may be any from that of the first one on.
  lowest = request.begin if k.spec.drafts else jnp.maximum(begin, request.begin)
  start = jnp.int32(0) if left is None else jnp.maximum(lowest - left, 0)
  stop = request.length if right is None else jnp.minimum(
      request.length, begin + (k.shape.block_q + right))
  if k.spec.scope == Scope.CACHED:
    stop = jnp.minimum(stop, jnp.maximum(request.begin, 0))
  elif k.spec.scope == Scope.NEW:
    start = jnp.maximum(start, request.begin)
  # Lengths may be beyond the tables: nothing outside of these is copied, scales included.
  held = k.shape.row_pages * layout.page_size
  start, stop = jnp.minimum(start, held), jnp.minimum(stop, held)
  size = jnp.int32(layout.block_kv)
  first = lax.div(jnp.minimum(start, held - 1), size)
  # At least one key block: a step without one would not wait for the transfers of the next step.
  end = jnp.maximum(lax.div(stop + (size - 1), size), first + 1)
  return Steps(number, first, end, begin, request.begin, request.length, start, stop)


def clear_others(k: KernelRefs, t: TokenRefs) -> None:
  """Writes zeros to the results of tokens that are not queries of any request."""
  tokens, (first, end) = t.out.shape[0], bounds_of(t)
  block_q, capacity = jnp.int32(k.shape.block_q), k.steps.shape[1]

  def clear_before(number: Index, cleared: tuple[Index, Index, Index],
                   ) -> tuple[Index, Index, Index]:
    request, (token, count, left) = request_of(t, number), cleared
    begin = jnp.clip(jnp.maximum(request.begin, 0) + request.shift, token, tokens)
    # The last blocks of requests for which `make_steps` has no room are not computed.
    origin, block, stop = _block_range(k, request)
    stop = jnp.minimum(stop, block + left)
    last = jnp.minimum(request.length, origin + stop * block_q)
    return (jnp.clip(last + request.shift, begin, tokens), _clear(k, t, token, begin, count),
            left - jnp.maximum(stop - block, 0))

  token = 0 if t.part.is_first else jnp.clip(start_of(t, first), 0, tokens)
  token, count, _ = lax.fori_loop(
      first, end, clear_before, (jnp.int32(token), jnp.int32(0), jnp.int32(capacity)))
  rest = tokens if t.part.is_last else jnp.clip(start_of(t, end), 0, tokens)
  count = _clear(k, t, token, rest, count)

  def wait(_: Index, size: int) -> None:
    part = t.out.at[pl.ds(0, size)]
    pltpu.make_async_copy(part, part, t.out_sent.at[0]).wait()
  runs.powers_of_two(count, tokens, wait)


def _clear(k: KernelRefs, t: TokenRefs, token: Index, end: Index, count: Index) -> Index:
  """Starts to clear the tokens [token, end); returns `count` and how many these are."""
  size = jnp.int32(k.shape.block_q)

  @pl.when((token < end) & (count == 0))
  def _() -> None:
    t.out_blocks[0] = jnp.zeros(t.out_blocks.shape[1:], t.out_blocks.dtype)

  @pl.loop(jnp.int32(0), lax.div(jnp.maximum(end - token, 0) + (size - 1), size))
  def _(part: Index) -> None:
    begin = token + part * size
    _start(t.out, t.out_blocks, t.out_sent, 0, Run(begin, 0, jnp.minimum(end - begin, size)),
           is_query=False)
  return count + jnp.maximum(end - token, 0)


# --- Transfers of a step. ------------------------------------------------------------------------


def run_of(k: KernelRefs, t: TokenRefs, step: Steps) -> Run:
  """Returns the queries of a step that are tokens of the call."""
  tokens = t.query.shape[0]
  shift = request_of(t, step.row).shift
  first = jnp.maximum(jnp.maximum(step.query_begin, step.row_begin), -shift)
  end = jnp.minimum(jnp.minimum(step.query_begin + k.shape.block_q, step.row_length),
                    tokens - shift)
  return Run(first + shift, first - step.query_begin, jnp.maximum(end - first, 0))


def start_queries(k: KernelRefs, t: TokenRefs, number: Index, step: Steps, slot: Index) -> None:
  """Starts to copy the queries of a step, and the numbers of its rows, to a slot."""
  _start(t.query, t.query_blocks, t.query_arrived, slot, run_of(k, t, step), is_query=True)
  if t.numbers is not None and t.number_blocks is not None:
    pltpu.make_async_copy(t.numbers.at[number], t.number_blocks.at[slot],
                          t.query_arrived.at[slot]).start()


def load_rows(k: KernelRefs, t: TokenRefs, step: Steps, slot: Index) -> None:
  """Waits for the queries of a step and their numbers, and writes them to `k.rows` and `k.mods`.

  Queries of latent rows are padded. Infinite ones become NaN; where rows are many, only if their
  sums would not show them.
  """
  run = run_of(k, t, step)
  _wait(t.query, t.query_blocks, t.query_arrived, slot, run)
  if t.number_blocks is not None:
    assert k.mods is not None
    block = t.number_blocks.at[slot]
    pltpu.make_async_copy(block, block, t.query_arrived.at[slot]).wait()
    k.mods.by_step[0] = t.number_blocks[slot]

  def load(is_whole: bool) -> None:
    heads = k.shape.group_heads
    for group in range(k.shape.head_groups):
      x = t.query_blocks[slot, pl.ds(group * heads, heads)]
      x = x.reshape(k.shape.group_rows, x.shape[-1])
      missing = k.rows.shape[3] - x.shape[1]
      if missing:
        x = jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], 1)
      if k.shape.few_rows or not k.spec.keeps_infinite:
        x = common.infinite_to_nan(x)
      if not is_whole:
        row = visibility.query_of(k, visibility.row_numbers(k, 0))
        is_live = (row >= run.row) & (row < run.row + run.count)
        x = jnp.where(is_live, x.astype(jnp.float32), 0)
      k.rows[0, group] = x.astype(k.rows.dtype)

  pl.when(run.count == k.shape.block_q)(lambda: load(True))
  pl.when(run.count < k.shape.block_q)(lambda: load(False))


def start_results(k: KernelRefs, t: TokenRefs, current: Index, step: Steps, slot: Index) -> None:
  """Starts to copy the results of a step from a slot."""
  _start(t.out, t.out_blocks, t.out_sent, slot, run_of(k, t, step), is_query=False)
  pltpu.make_async_copy(t.lse_blocks.at[slot], t.lse.at[current], t.out_sent.at[slot]).start()


def wait_results(k: KernelRefs, t: TokenRefs, step: Steps, slot: Index) -> None:
  """Waits until the results of a step have been copied from a slot."""
  _wait(t.out, t.out_blocks, t.out_sent, slot, run_of(k, t, step))
  block = t.lse_blocks.at[slot]
  pltpu.make_async_copy(block, block, t.out_sent.at[slot]).wait()


def _start(array: Ref, blocks: Ref, semaphores: Ref, slot: Index, run: Run, *,
           is_query: bool) -> None:
  """Starts to copy a run of tokens to a slot if these are queries, or from it.

  Args:
    array: [T, K, G, width].
    blocks: [SLOTS, K, block_q, G, width].
    semaphores: one for each slot.
    slot: of the blocks.
    run: the tokens.
    is_query: whether the tokens are copied to the block.
  """
  (tokens, heads), block_q = array.shape[:2], blocks.shape[2]

  def copy(*pair: Ref) -> None:
    source, target = pair if is_query else pair[::-1]
    pltpu.make_async_copy(source, target, semaphores.at[slot]).start()

  def start(before: Index, size: int) -> None:
    token, row = run.token + before, run.row + before
    if size == 1:
      copy(array.at[token], blocks.at[slot, pl.ds(0, heads), row])
    elif heads == 1:
      copy(array.at[pl.ds(token, size), 0], blocks.at[slot, 0, pl.ds(row, size)])
    else:
      @pl.loop(jnp.int32(0), jnp.int32(heads))
      def _(head: Index) -> None:
        copy(array.at[pl.ds(token, size), head], blocks.at[slot, head, pl.ds(row, size)])

  runs.by_sizes(run.count, block_q, tokens, start)


def _wait(array: Ref, blocks: Ref, semaphores: Ref, slot: Index, run: Run) -> None:
  """Waits until a run of tokens has been copied; arguments as in `_start`."""
  def wait(_: Index, size: int) -> None:
    part = array.at[pl.ds(0, size)]
    pltpu.make_async_copy(part, part, semaphores.at[slot]).wait()
  runs.by_sizes(run.count, blocks.shape[2], array.shape[0], wait)
