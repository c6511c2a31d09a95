# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""One grid step of the forward kernel on TPUs: the running softmax of its rows, in three forms.

  naive: relative to 0. No score has to wait in memory until the maximum of its row is known, and
    no sum has to be rescaled. Fails where a sum of exp(logit) leaves NAIVE_TOTALS.
  safe: relative to the maximum. A naive state is a safe one whose maximum is 0.
  shielded: safe, and keys and values may be non-finite.

Milakov and Gimelshein, Online normalizer calculation for softmax, section 2,
https://arxiv.org/abs/1805.02867.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import online_softmax
from attn_core.kernels.tpu.flash import strip_loop, tile_inputs, tiling as tiling_lib
from attn_core.kernels.tpu.flash.patterns import UNMASKED
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, Index, KernelRefs, TileIndex, TokenRange, TokenReader)
from attn_core.kernels.tpu.flash.tile_loop import KernelParams, Strip, issue_ahead
from attn_core.score_mods import evaluate

Ref = Any  # a Pallas reference
Rows = Any  # a slice of Pallas: rows of the state of a step
TileKey = tuple[int, int]  # (`TileIndex.code_head`, first query or 0) of a tile
TileState = dict[TileKey, tuple[jax.Array, jax.Array]]  # m_i, l_i: float32 [1, queries] each

# The range of l_i for which a naive softmax is as accurate as a safe one: below it, weights that
# count may be less than the smallest float32, 2 ** -126; above it, products with values of less
# than LARGE_VALUE may overflow.
NAIVE_TOTALS = (2.0**-32, 2.0**95)
LARGE_VALUE = 2.0**32
SUM_TOKENS = 64  # that are added at once, of a block
TRACE = 2.0**-120  # l_i of a row with visible keys is at least this, even where weights underflow


def reference_above(x: jax.Array, unit: float) -> jax.Array:
  """Rounds maxima up until they are whole in `unit`, so that weights round as if relative to 0.

  Of large numbers, rounding would be the larger part: these stay as they are.
  """
  rounded = jnp.ceil(x * unit) * (1 / unit)
  return jnp.where((rounded - x) * unit <= 1, jnp.maximum(rounded, x), x)


def _fold(top: jax.Array, combine: Any, x: jax.Array) -> jax.Array:
  """Reduces x over the keys; its maxima are known to be `top`."""
  return top if combine is jnp.maximum else x.sum(0, keepdims=True)


class SoftmaxForm(NamedTuple):
  """Form of the softmax."""

  safe: bool  # relative to the maximum; else relative to 0
  shielded: bool  # expects keys and values that are not finite
  joins_naive: bool  # some keys of a row may have been computed by a naive softmax
  # Dtype to which weights are rounded before they are summed, as they are before their product
  # with the values: the errors cancel where nearly all weight is on one key. None: not rounded; an
  # output of 16 bits would not show it, see `autodiff.rounding`.
  rounds_to: DTypeLike | None

  def rounded(self, weights: jax.Array) -> jax.Array:
    """Rounds weights to `rounds_to`."""
    if self.rounds_to is None:
      return weights
    return weights.astype(self.rounds_to).astype(weights.dtype)


class ForwardReaders(NamedTuple):
  """Readers of the inputs' blocks; see `tile_inputs.TileInputs.add_tokens`."""

  query: TokenReader  # [queries, D]
  key: TokenReader  # [keys, D]
  value: TokenReader  # [keys, E]
  sinks: Callable[[KernelRefs, Any, Any], jax.Array] | None  # (refs, batch row, query head)


class ForwardStep(NamedTuple):
  """One grid step; its scratch memory holds the running softmax of its rows, before and after."""

  params: KernelParams
  readers: ForwardReaders
  result: tile_inputs.TokenBlocks
  refs: KernelRefs
  grid: GridIndex
  form: SoftmaxForm
  outputs: tuple[Ref, ...]  # out, lse
  scratch: tuple[Ref, ...]  # by buffer: m_i [1, rows], l_i [1, rows] and acc [E, rows]
  source: Index  # the buffer of the state before the step
  target: Index  # that of the state after it; may be the same
  strip_buffers: tuple[Ref, ...] = ()  # see `strip_loop.buffers`

  @property
  def heads(self) -> range:
    """Query heads of the step."""
    return range(self.params.tiling.query_heads)

  def safely(self, *, shielded: bool = False) -> "ForwardStep":
    """Returns this step with a safe softmax."""
    return self._replace(form=self.form._replace(safe=True, shielded=shielded))

  def in_place(self) -> "ForwardStep":
    """Returns this step, continuing the state after it."""
    return self._replace(source=self.target)

  def load(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Reads (m_i, l_i) before the step."""
    m_i, l_i = (x[self.source, :, rows] for x in self.scratch[:2])
    if self.form.safe and self.form.joins_naive:
      m_i = jnp.where(l_i == 0, -jnp.inf, m_i)  # the naive one has 0 there, before any key, too
    return m_i, l_i

  def initial(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Returns (m_i, l_i) of rows before their first key."""
    zeros = jnp.zeros((1, rows.size), jnp.float32)
    return jnp.full_like(zeros, -jnp.inf) if self.form.safe else zeros, zeros

  def start(self, buffer: Index) -> None:
    """Writes the state of all rows before their first key."""
    for head in self.heads:
      for rows in self.all_row_tiles(head).values():
        self._store_numbers(buffer, rows, self.initial(rows))
        self._clear(buffer, rows)

  def all_row_tiles(self, head: Index) -> dict[TileKey, Rows]:
    """Returns the rows of all tiles of a head."""
    return self.params.row_tiles(head, TokenRange(0, self.params.tiling.block_q))

  def keep_others(self, strips: list[Strip]) -> None:
    """Copies the state of rows that no strip changes from before the step to after it.

    They are of the heads of the strips; without strips, of all.
    """
    if self.source is self.target:
      return
    changed = {key for tile, _ in strips for key in self.params.row_tiles(tile.head, tile.queries)}
    for head in {tile.code_head: tile.head for tile, _ in strips}.values() or self.heads:
      for key, rows in self.all_row_tiles(head).items():
        if key not in changed:
          for ref in self.scratch:
            ref[self.target, :, rows] = ref[self.source, :, rows]

  def fold_block(self, strips: list[Strip]) -> None:
    """Folds all visible tiles of the block into the running softmax."""
    tiles: dict[TileKey, Rows] = {}
    for tile, _ in strips:
      tiles.update(self.params.row_tiles(tile.head, tile.queries))
    state = self.fold(strips, {key: self.load(rows) for key, rows in tiles.items()})
    for key, rows in tiles.items():
      self._store_numbers(self.target, rows, state[key])
    self.keep_others(strips)

  def fold_only_block(self, strips: list[Strip]) -> None:
    """Computes rows that have no other block, head by head.

    So one head is finished while another is computed; m_i and l_i stay values.
    """
    def finish(head: int, state: TileState) -> None:
      for key, rows in self.all_row_tiles(head).items():
        self._store_numbers(self.target, rows, state.get(key) or self.initial(rows))
        if key not in state:
          self._clear(self.target, rows)
      self.finish(head)
    self.fold(sorted(strips, key=lambda strip: strip[0].head), {}, finish)

  def _store_numbers(self, buffer: Index, rows: Rows, numbers: tuple[jax.Array, jax.Array]) -> None:
    """Writes (m_i, l_i) of rows."""
    for ref, x in zip(self.scratch, numbers):
      ref[buffer, :, rows] = x

  def _clear(self, buffer: Index, rows: Rows) -> None:
    """Clears acc of rows."""
    acc = self.scratch[2]
    acc[buffer, :, rows] = jnp.zeros((acc.shape[1], rows.size), jnp.float32)

  def fold(self, strips: list[Strip], state: TileState,
           ended: Callable[[int, TileState], None] = lambda head, state: None) -> TileState:
    """Folds strips into the running softmax; acc of their rows is written to `target`.

    Args:
      strips: tiles of one kind.
      state: (m_i, l_i) of tiles of queries, whose acc is in `source`; others have seen no key. They
        pass from strip to strip as values, because a round trip through memory would delay the
        next strip.
      ended: called with a head and the state after its last strip.

    Returns:
      The new state.
    """
    last = {tile.code_head: tile for tile, _ in strips}
    of_heads = {head: [x for x in strips if x[0].code_head == head] for head in last}
    if self.form.safe and not self.form.shielded and all(
        strip_loop.are_many(x, self.params.tiling.tile_q) for x in of_heads.values()):
      for head, of_head in of_heads.items():
        self._fold_in_loop(of_head, state)
        ended(head, state)
      return state
    buffers = dict.fromkeys(state, self.source)
    # The queries of a head are prepared once for all of its strips.
    prepared: dict[int, jax.Array] | None = (
        {} if self._prepares_queries and len(strips) > len(last) else None)
    scores_of = functools.partial(self.scores, prepared=prepared)
    for tile, masked, scores in issue_ahead(strips, scores_of, tiling_lib.AHEAD[False]):
      tiles = self.params.row_tiles(tile.head, tile.queries)
      after = self.update(tile, masked, scores, self._running(tile, tiles, state, buffers))
      self.scratch[2][self.target, :, self.params.rows(tile)] = after.acc
      numbers = (jnp.split(x, len(tiles), 1) for x in (after.m_i, after.l_i))
      state.update(zip(tiles, zip(*numbers)))
      buffers.update(dict.fromkeys(tiles, self.target))
      if tile is last[tile.code_head]:
        ended(tile.code_head, state)
    return state

  def _fold_in_loop(self, strips: list[Strip], state: TileState) -> None:
    """Folds strips of one head into the safe softmax of `state` in a loop; see `fold`."""
    first = strips[0][0]
    key, = self.params.row_tiles(first.head, first.queries)
    acc = self.scratch[2]
    prepared = {first.code_head: self._queries(
        first.head, TokenRange(0, self.params.tiling.block_q))}
    def write(tile: TileIndex, buffer: Ref) -> jax.Array:
      logits, _ = self.params.logits(self.refs, tile, self.scores(tile, prepared))
      buffer[...] = logits
      return logits.max(0, keepdims=True)
    def use(tile: TileIndex, buffer: Ref, top: jax.Array,
            numbers: strip_loop.Numbers | None) -> strip_loop.Numbers:
      # The first strip is the one whose place is known when the kernel is written.
      is_first = isinstance(tile.keys.start, int) and tile.keys.start == 0
      source, rows = self.source if is_first else self.target, self.params.rows(tile)
      running = None if numbers is None else online_softmax.Running(*numbers, acc[source, :, rows])
      after = self._update_safe(tile, UNMASKED, buffer[...], running, top)
      acc[self.target, :, rows] = after.acc
      return after.m_i, after.l_i
    state[key] = strip_loop.fold(strips, self.strip_buffers, write, use, state.get(key))

  def _running(self, tile: TileIndex, tiles: dict[TileKey, Rows], state: TileState,
               buffers: dict[TileKey, Index]) -> online_softmax.Running | None:
    """Returns the softmax of a strip's rows before it; None: they have seen no key."""
    acc = self.scratch[2]
    found = [buffers.get(key) for key in tiles]
    if all(x is None for x in found):
      return None
    m_i, l_i = zip(*(state.get(key) or self.initial(rows) for key, rows in tiles.items()))
    if all(x is found[0] for x in found):
      before = acc[found[0], :, self.params.rows(tile)]
    else:
      before = jnp.concatenate(
          [jnp.zeros((acc.shape[1], rows.size), jnp.float32) if x is None else acc[x, :, rows]
           for x, rows in zip(found, tiles.values())], 1)
    return online_softmax.Running(jnp.concatenate(m_i, 1), jnp.concatenate(l_i, 1), before)

  def scores(self, tile: TileIndex, prepared: dict[int, jax.Array] | None) -> jax.Array:
    """Computes K Q^T, [keys, queries].

    Args:
      tile: which keys and queries.
      prepared: all queries of the heads so far, by `TileIndex.code_head`, to which this adds those
        of the tile's head, see `fold`; None: only those of the tile are read.
    """
    key = self.params.with_key_columns(
        self.refs, tile, self.readers.key(self.refs, self.params.key_head(tile), tile.keys))
    start, length = tile.queries
    if prepared is None:
      query = self._queries(tile.head, tile.queries)
    else:
      if tile.code_head not in prepared:
        prepared[tile.code_head] = self._queries(
            tile.head, TokenRange(0, self.params.tiling.block_q))
      query = prepared[tile.code_head][start:start + length]
    return self.params.dot(key, query, ((1,), (1,)))

  @property
  def _prepares_queries(self) -> bool:
    """Whether infinite queries must be replaced by NaN.

    They give infinite scores, or NaN. A naive softmax fails in such a row, unless a cap or a score
    mod that does more than add makes its logits finite; a safe one would take logits of -inf for
    hidden ones.
    """
    spec = self.params.spec
    return (self.form.safe or spec.logits_soft_cap is not None
            or not evaluate.only_adds(spec.score_mod))

  def _queries(self, head: Index, tokens: TokenRange) -> jax.Array:
    """Returns queries with their columns, with NaN for infinities if `_prepares_queries`."""
    query = self.readers.query(self.refs, head, tokens)
    query = query + (query - query) if self._prepares_queries else query
    return self.params.with_query_columns(self.refs, head, tokens, query)

  def update(self, tile: TileIndex, masked: int, scores: jax.Array,
             running: online_softmax.Running | None) -> online_softmax.Running:
    """Folds in one strip."""
    logits, _ = self.params.logits(self.refs, tile, scores)
    update = self._update_safe if self.form.safe else self._update_naive
    return update(tile, masked, logits, running)

  def _update_safe(self, tile: TileIndex, masked: int, logits: jax.Array,
                   running: online_softmax.Running | None,
                   top: jax.Array | None = None) -> online_softmax.Running:
    """Folds in one strip relative to the maximum.

    If other keys are of a naive softmax, the number used for the maximum is that of
    `reference_above`. `top`: the maxima of the logits of an unmasked strip, where they are known.
    """
    unit = self.params.unit
    if self.form.shielded:
      logits = logits + self._nan_of_keys(tile)
    logits = self.params.hide(self.refs, tile, masked, logits, -jnp.inf)
    return online_softmax.update(
        running, logits, functools.partial(self.weigh, tile), exp=lambda x: jnp.exp2(x * unit),
        rounded=self.form.rounded,
        above=functools.partial(reference_above, unit=unit) if self.form.joins_naive
        else lambda m_i: m_i, axis=0, fold=None if top is None else functools.partial(_fold, top))

  def _nan_of_keys(self, tile: TileIndex) -> jax.Array:
    """Returns [keys, 1]: NaN where a key or its value is not finite, else 0."""
    head = self.params.key_head(tile)
    def zero_or_nan(read: TokenReader) -> jax.Array:
      x = read(self.refs, head, tile.keys).astype(jnp.float32)
      return (x - x).sum(1, keepdims=True)
    return zero_or_nan(self.readers.key) + zero_or_nan(self.readers.value)

  def _update_naive(self, tile: TileIndex, masked: int, logits: jax.Array,
                    running: online_softmax.Running | None) -> online_softmax.Running:
    """Folds in one strip relative to 0; rows that see any key get at least TRACE in l_i."""
    weights = jnp.exp2(logits * self.params.unit)
    if masked:
      weights = self.params.hide(self.refs, tile, masked, weights + TRACE, 0.0)
    after = online_softmax.add(running, self.form.rounded(weights),
                               functools.partial(self.weigh, tile), axis=0)
    return after if masked else after._replace(l_i=after.l_i + TRACE)

  def weigh(self, tile: TileIndex, weights: jax.Array) -> jax.Array:
    """Computes V^T P, [E, queries], of weights [keys, queries]."""
    values = self.readers.value(self.refs, self.params.key_head(tile), tile.keys)
    kept, = self.params.dropout.drop(self.refs, tile, weights.astype(values.dtype))
    if self.form.shielded:
      wide = values.astype(jnp.float32)
      values = jnp.where(wide - wide == 0, wide, 0.0).astype(values.dtype)
    return self.params.dot(values, kept, ((0,), (0,)))

  def naive_failed(self) -> jax.Array:
    """Returns whether a sum of exp(logit) is not in NAIVE_TOTALS after the step."""
    least, most = NAIVE_TOTALS
    failed = jnp.zeros((1, 1), jnp.float32)
    for head in self.heads:
      l_i = self.scratch[1][self.target, :, self.params.head_rows(head)]
      in_range = (l_i == 0) | ((l_i >= least) & (l_i <= most))
      failed += jnp.where(in_range, 0.0, 1.0).sum(1, keepdims=True)
    return failed.sum() != 0

  def block_is_large(self) -> jax.Array:
    """Returns whether a key may not be finite, or a value may not be less than LARGE_VALUE.

    A key of infinities may have weight 0, which hides it; and the product of a weight and a value
    may overflow or be NaN where the sum of the weights does not.
    """
    return self._overflows(lambda key: key, lambda value: value * (2.0**128 / LARGE_VALUE))

  def block_is_nonfinite(self) -> jax.Array:
    """Returns whether a key or a value of the block is not finite."""
    zero_or_nan = lambda x: x - x
    return self._overflows(zero_or_nan, zero_or_nan)

  def _overflows(self, of_keys: Callable[[jax.Array], jax.Array],
                 of_values: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns whether a sum of functions of all keys and of all values is not finite."""
    tiling, found = self.params.tiling, jnp.zeros((1, 1), jnp.float32)
    for read, function in ((self.readers.key, of_keys), (self.readers.value, of_values)):
      for head in range(tiling.key_heads):
        total = functools.reduce(jnp.add, (
            function(read(self.refs, head, TokenRange(start, SUM_TOKENS)))
            for start in range(0, tiling.block_kv, SUM_TOKENS))).astype(jnp.float32)
        total = total.sum(0, keepdims=True).sum(1, keepdims=True)
        found += total - total
    return jnp.logical_not(found.sum() == 0)

  def finish(self, head: int) -> None:
    """Normalizes and writes the results of a head."""
    (out, lse), tiling = self.outputs, self.params.tiling
    rows, sink = self.params.head_rows(head), None
    if self.readers.sinks is not None:
      sink = self.readers.sinks(self.refs, self.grid.batch,
                                self.grid.head_group * tiling.query_heads + head)
    m_i, l_i, acc = (x[self.target, :, rows] for x in self.scratch)
    running = online_softmax.Running(m_i * (self.params.unit / online_softmax.LOG2E), l_i, acc)
    mean, row_lse = online_softmax.finish(running, sink)
    lse[0, head] = row_lse
    slices = self.result.slices(head, TokenRange(0, tiling.block_q))
    out[slices] = (mean * self.params.dropout.scale).T.astype(out.dtype)
