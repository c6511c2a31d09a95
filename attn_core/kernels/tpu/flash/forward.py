# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward kernel on TPUs, with a naive softmax where that is safe.

  scores = K Q^T;  out^T = V^T P

The naive softmax uses 0 in place of the maximum: no score has to wait in memory until the maximum
of its row is known, and no sum has to be rescaled. It is exact while sums of exp(logit) stay in
the range of float32; the few rows for which they do not are computed again by the safe softmax,
with the maximum.

Milakov and Gimelshein, Online normalizer calculation for softmax, section 2,
https://arxiv.org/abs/1805.02867.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import dense_operands, nonfinite, online_softmax
from attn_core.kernels.common.contract import RemoteCopy, Residuals
from attn_core.kernels.tpu.flash import (
    call, scalar_memory, schedule, step_list, tile_inputs, tiling as tiling_lib)
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, KernelRefs, TileIndex, TokenRange, TokenReader)
from attn_core.kernels.tpu.flash.tile_loop import (
    KernelParams, Strip, for_each_tile, issue_ahead, make_kernel_params)
from attn_core.types import AttentionSpec, BlockSizes, Operands

Ref = Any  # a Pallas reference
# (m_i, l_i) by (query head, first query) of a tile: float32 [1, queries] each
TileState = dict[tuple[int, int], tuple[jax.Array, jax.Array]]

# The range of l_i for which a naive softmax is as accurate as a safe one: below it, weights that
# count may be less than the smallest float32, 2 ** -126; above it, products with values may
# overflow.
NAIVE_TOTALS = (2.0**-32, 2.0**96)
TRACE = 2.0**-120  # l_i of a row with visible keys is at least this, even where weights underflow


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Computes out [B, T, H, E] and lse [B, H, T]; see `contract.Kernel`."""
  return forward_with_remote_copy(operands, spec, block_sizes, None)[0]


def forward_with_remote_copy(
    operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
    transfer: RemoteCopy | None) -> tuple[Residuals, tuple[jax.Array, ...]]:
  """Runs `forward` and copies arrays to another device in the meantime.

  The softmax is naive first; rows for which l_i leaves NAIVE_TOTALS or that meet a non-finite
  number, if there are any, are computed again by the safe softmax.

  Args:
    operands: query [B, T, H, D], key [B, S, K, D], value [B, S, K, E] and the optional ones.
    spec: what is computed.
    block_sizes: None fields are chosen by `tiling`.
    transfer: the arrays to copy; None: none.

  Returns:
    (the residuals, the arrays received in place of those of `transfer`).
  """
  dense_operands.assert_shapes(operands)
  operands = operands._replace(query=nonfinite.infinite_to_nan(operands.query))

  def safe(transfer: RemoteCopy | None = None) -> tuple[Residuals, tuple[jax.Array, ...]]:
    finite = nonfinite.is_finite(operands.key, operands.value)
    key, value = nonfinite.propagate_nan(operands.key, operands.value, finite)
    return _forward(operands._replace(key=key, value=value), spec, block_sizes, transfer, safe=True)

  if operands.query.dtype.name not in tiling_lib.NAIVE_DTYPES:
    return safe(transfer)
  naive, received = _forward(operands, spec, block_sizes, transfer, safe=False)
  return _recompute_failed_rows(naive, lambda: safe()[0]), received


def _recompute_failed_rows(naive: Residuals, safe: Callable[[], Residuals]) -> Residuals:
  """Replaces the rows of `naive` for which lse is NaN by those of safe(), if there are any."""
  failed = jnp.isnan(naive.lse)
  def recompute() -> Residuals:
    recomputed = safe()
    failed_rows = Residuals(failed.transpose(0, 2, 1)[..., None], failed)
    return jax.tree.map(jnp.where, failed_rows, recomputed, naive)
  return lax.cond(failed.any(), recompute, lambda: naive)


def _forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             transfer: RemoteCopy | None, *,
             safe: bool) -> tuple[Residuals, tuple[jax.Array, ...]]:
  """Runs the kernel; a naive softmax marks the rows where it fails by an lse of NaN."""
  cold_path = safe and operands.query.dtype.name in tiling_lib.NAIVE_DTYPES
  tiling = tiling_lib.make_tiling(operands, spec, block_sizes, backward=False, cold_path=cold_path)
  groups = scalar_memory.num_groups(operands, spec, tiling, by_keys=False)
  value_dtype = operands.value.dtype
  exact = jnp.dtype(dense_operands.out_dtype(operands, spec)).itemsize > value_dtype.itemsize
  mode = _SoftmaxMode(safe, cold_path, value_dtype if exact else None)
  def run(operands: Operands, arrays: tuple[()],
          transfer: RemoteCopy | None) -> tuple[Residuals, tuple[jax.Array, ...]]:
    del arrays
    return _forward_group(operands, spec, block_sizes, transfer, tiling, mode)
  return scalar_memory.in_groups(run, operands, (), groups, transfer)


def _forward_group(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
                   transfer: RemoteCopy | None, tiling: schedule.Tiling,
                   mode: "_SoftmaxMode") -> tuple[Residuals, tuple[jax.Array, ...]]:
  """Runs the kernel on batch rows whose schedule fits in scalar memory."""
  batch, queries, heads, _ = operands.query.shape
  value_width = operands.value.shape[3]
  # 1. Schedule.
  mask = dense_operands.mask_of(operands, spec)
  steps, lists = schedule.build(mask, tiling, by_keys=False)
  # 2. Inputs and outputs.
  inputs = tile_inputs.TileInputs(steps, lists, tiling, by_keys=False)
  arrays = operands.query, operands.key, operands.value
  blocks = (inputs.query_blocks(arrays[0].shape), *(inputs.key_blocks(x.shape) for x in arrays[1:]))
  query, key, value = (
      inputs.add_tokens(block, block.pack(x)) for block, x in zip(blocks, arrays))
  readers = _ForwardReaders(query, key, value, _add_sinks(inputs, operands))
  result = inputs.query_blocks((batch, queries, heads, value_width))
  params = make_kernel_params(inputs, operands, spec, tiling,
                              schedule.patterns(steps, mask, tiling, by_keys=False),
                              steps.single_step_rows)
  rows = tiling.query_heads * tiling.block_q
  outputs = [
      call.Output(result.shape, dense_operands.out_dtype(operands, spec), result.block_shape,
                  result.block_index),
      call.Output((batch, heads, 1, tiling.padded_queries), jnp.float32,
                  (1, tiling.query_heads, 1, tiling.block_q), lambda b, h, i, j: (b, h, 0, i))]
  # 3. The kernel, with m_i, l_i and acc in scratch memory.
  (out, lse), received = call.call(
      functools.partial(_forward_kernel, params, inputs, readers, result, mode), inputs, outputs,
      call.LaunchParams(
          (batch, heads // tiling.query_heads, tiling.halves, 1, inputs.num_steps),
          [(1, rows), (1, rows), (value_width, rows)],
          tiling_lib.vmem_limit(block_sizes, tiling, operands, backward=False),
          "attn_core_forward" if mode.safe else "attn_core_forward_naive"), transfer)
  return Residuals(result.unpack(out)[:, :queries], lse[:, :, 0, :queries]), received


class _SoftmaxMode(NamedTuple):
  """Kind of softmax."""

  safe: bool  # relative to the maximum; else relative to 0
  joins_naive: bool  # some rows of the result are of a naive softmax
  # Dtype to which weights are rounded before they are summed, as they are before their product
  # with the values: the errors cancel where nearly all weight is on one key. None: not rounded; an
  # output of 16 bits would not show it, see `autodiff.rounding`.
  rounds_to: DTypeLike | None

  def rounded(self, weights: jax.Array) -> jax.Array:
    """Rounds weights to `rounds_to`."""
    if self.rounds_to is None:
      return weights
    return weights.astype(self.rounds_to).astype(weights.dtype)


class _ForwardReaders(NamedTuple):
  """Readers of the inputs' blocks; see `tile_inputs.TileInputs.add_tokens`."""

  query: TokenReader  # [queries, D]
  key: TokenReader  # [keys, D]
  value: TokenReader  # [keys, E]
  sinks: Callable[[KernelRefs, Any, Any], jax.Array] | None  # (refs, batch row, query head)


def _add_sinks(inputs: tile_inputs.TileInputs,
               operands: Operands) -> Callable[[KernelRefs, Any, Any], jax.Array] | None:
  """Adds the sinks to scalar memory, float32; returns a reader of one, or None without sinks."""
  if operands.sinks is None:
    return None
  rows, heads = operands.sinks.shape
  ref = inputs.add_scalars(operands.sinks.astype(jnp.float32).reshape(-1))
  return lambda refs, b, head: ref(refs)[(b * heads if rows > 1 else 0) + head]


def _forward_kernel(params: KernelParams, inputs: tile_inputs.TileInputs, readers: _ForwardReaders,
                    result: tile_inputs.TokenBlocks, mode: _SoftmaxMode, refs: KernelRefs,
                    outputs: tuple[Ref, ...], scratch: tuple[Ref, ...]) -> None:
  """Computes one block of queries against one block of keys, for the heads of a step."""
  grid, kinds, flags = inputs.step(refs.scalars, refs.program_ids)
  step = _ForwardStep(params, readers, result, refs, grid, mode, outputs, scratch)
  all_queries = TokenRange(0, params.tiling.block_q)
  heads = range(params.tiling.query_heads)

  def propagate_nan() -> None:
    nan_of_keys = step.nan_of_keys()
    for head in heads:
      step.propagate_nan(head, nan_of_keys)

  if params.single_step_rows:
    # Head by head, so that one is finished while another is computed; m_i and l_i stay values.
    strips = sorted(params.strips(grid, params.patterns.kinds[0]), key=lambda strip: strip[0].head)
    nan_of_keys = step.nan_of_keys()
    def finish(head: int, state: TileState) -> None:
      step.store(params.row_tiles(head, all_queries), state)
      step.propagate_nan(head, nan_of_keys)
      step.finish(head)
    step.fold(strips, {}, finish)
    return

  # 1. Start the running softmax in the first step of a block of queries.
  @pl.when((flags & step_list.FIRST) != 0)
  def _() -> None:
    for head in heads:
      step.store(params.row_tiles(head, all_queries), {})

  # 2. Fold in the visible tiles of the block of keys.
  def compute(strips: list[Strip]) -> None:
    tiles: dict[tuple[int, int], Any] = {}
    for tile, _ in strips:
      tiles.update(params.row_tiles(tile.head, tile.queries))
    step.store(tiles, step.fold(strips, {key: step.load(rows) for key, rows in tiles.items()}))

  for_each_tile(params, grid, kinds, compute, propagate_nan)

  # 3. Normalize and write in the last step of a block of queries.
  @pl.when((flags & step_list.LAST) != 0)
  def _() -> None:
    for head in heads:
      step.finish(head)


class _ForwardStep(NamedTuple):
  """One grid step; its scratch memory holds the running softmax of its rows."""

  params: KernelParams
  readers: _ForwardReaders
  result: tile_inputs.TokenBlocks
  refs: KernelRefs
  grid: GridIndex
  mode: _SoftmaxMode
  outputs: tuple[Ref, ...]  # out, lse
  scratch: tuple[Ref, ...]  # m_i [1, rows], l_i [1, rows] and acc [E, rows]

  def load(self, rows: Any) -> tuple[jax.Array, jax.Array]:
    """Reads (m_i, l_i)."""
    m_i, l_i, _ = self.scratch
    return m_i[:, rows], l_i[:, rows]

  def start(self, rows: Any) -> tuple[jax.Array, jax.Array]:
    """Clears acc and returns (m_i, l_i) of rows before their first key."""
    acc = self.scratch[2]
    acc[:, rows] = jnp.zeros((acc.shape[0], rows.size), jnp.float32)
    zeros = jnp.zeros((1, rows.size), jnp.float32)
    return jnp.full_like(zeros, -jnp.inf) if self.mode.safe else zeros, zeros

  def store(self, tiles: dict[tuple[int, int], Any], state: TileState) -> None:
    """Writes (m_i, l_i) of tiles; those that `state` lacks are started."""
    m_i, l_i, _ = self.scratch
    for tile, rows in tiles.items():
      m_i[:, rows], l_i[:, rows] = state.get(tile) or self.start(rows)

  def fold(self, strips: list[Strip], state: TileState,
           ended: Callable[[int, TileState], None] = lambda head, state: None) -> TileState:
    """Folds strips into the running softmax.

    Args:
      strips: tiles of one kind.
      state: (m_i, l_i) of tiles of queries; others have seen no key. They pass from strip to
        strip as values, because a round trip through memory would delay the next strip.
      ended: called with a head and the state after its last strip.

    Returns:
      The new state.
    """
    last = {tile.head: tile for tile, _ in strips}
    for tile, masked, scores in issue_ahead(strips, self.scores, tiling_lib.AHEAD[False]):
      tiles = self.params.row_tiles(tile.head, tile.queries)
      before = None
      if any(key in state for key in tiles):
        m_i, l_i = zip(*(state.get(key) or self.start(rows) for key, rows in tiles.items()))
        before = jnp.concatenate(m_i, 1), jnp.concatenate(l_i, 1)
      after = self.update(tile, masked, scores, before)
      state.update(zip(tiles, zip(*(jnp.split(x, len(tiles), 1) for x in after))))
      if tile is last[tile.head]:
        ended(tile.head, state)
    return state

  def scores(self, tile: TileIndex) -> jax.Array:
    """Computes K Q^T, [keys, queries]."""
    key = self.readers.key(self.refs, self.params.key_head(tile), tile.keys)
    query = self.readers.query(self.refs, tile.head, tile.queries)
    return self.params.dot(key, query, ((1,), (1,)))

  def update(self, tile: TileIndex, masked: bool, scores: jax.Array,
             before: tuple[jax.Array, jax.Array] | None) -> tuple[jax.Array, jax.Array]:
    """Folds in one strip; maps (m_i, l_i) before it, None at the first one, to those after it."""
    acc, rows = self.scratch[2], self.params.rows(tile)
    running = None if before is None else online_softmax.Running(*before, acc[:, rows])
    logits, _ = self.params.logits(self.refs, tile, scores)
    update = self.update_safe if self.mode.safe else self.update_naive
    after = update(tile, masked, logits, running)
    acc[:, rows] = after.acc
    return after.m_i, after.l_i

  def update_safe(self, tile: TileIndex, masked: bool, logits: jax.Array,
                  running: online_softmax.Running | None) -> online_softmax.Running:
    """Folds in one strip relative to the maximum.

    If other rows of the result are of a naive softmax, the maximum is rounded up to a whole power
    of two, so that weights round in the same way.
    """
    unit = self.params.unit
    rounded_up = lambda m_i: jnp.ceil(m_i * unit) * (1 / unit)
    logits = self.params.hide(self.refs, tile, masked, logits, -jnp.inf)
    return online_softmax.update(
        running, logits, functools.partial(self.weigh, tile), exp=lambda x: jnp.exp2(x * unit),
        rounded=self.mode.rounded,
        above=rounded_up if self.mode.joins_naive else lambda m_i: m_i, axis=0)

  def update_naive(self, tile: TileIndex, masked: bool, logits: jax.Array,
                   running: online_softmax.Running | None) -> online_softmax.Running:
    """Folds in one strip relative to 0; rows that see any key get at least TRACE in l_i."""
    weights = jnp.exp2(logits * self.params.unit)
    if masked:
      weights = self.params.hide(self.refs, tile, masked, weights + TRACE, 0.0)
    after = online_softmax.add(running, self.mode.rounded(weights),
                               functools.partial(self.weigh, tile), axis=0)
    return after if masked else after._replace(l_i=after.l_i + TRACE)

  def weigh(self, tile: TileIndex, weights: jax.Array) -> jax.Array:
    """Computes V^T P, [E, queries], of weights [keys, queries]."""
    kept, = self.params.dropout.drop(self.refs, tile, weights)
    values = self.readers.value(self.refs, self.params.key_head(tile), tile.keys)
    return self.params.dot(values, kept.astype(values.dtype), ((0,), (0,)))

  def nan_of_keys(self) -> list[jax.Array]:
    """Returns [1, 1] per key head: NaN if a key of the block is non-finite, else 0.

    The weight of a non-finite key may be 0, and then does not show in l_i or acc.
    """
    if self.mode.safe:
      return []
    tiling = self.params.tiling
    all_keys = TokenRange(0, tiling.block_kv)
    totals = [self.readers.key(self.refs, head, all_keys).astype(jnp.float32)
              .sum(0, keepdims=True).sum(1, keepdims=True) for head in range(tiling.key_heads)]
    return [total - total for total in totals]

  def propagate_nan(self, head: int, nan_of_keys: list[jax.Array]) -> None:
    """Adds `nan_of_keys` to l_i of a head, so that its rows are computed again."""
    if not self.mode.safe:
      l_i = self.scratch[1]
      l_i[:, self.params.head_rows(head)] += nan_of_keys[head // self.params.tiling.group]

  def finish(self, head: int) -> None:
    """Normalizes and writes the results of a head."""
    (out, lse), tiling = self.outputs, self.params.tiling
    rows, sink = self.params.head_rows(head), None
    if self.readers.sinks is not None:
      sink = self.readers.sinks(self.refs, self.grid.batch,
                                self.grid.head_group * tiling.query_heads + head)
    (m_i, l_i), acc = self.load(rows), self.scratch[2][:, rows]
    running = online_softmax.Running(m_i * (self.params.unit / online_softmax.LOG2E), l_i, acc)
    mean, row_lse = online_softmax.finish(running, sink)
    if not self.mode.safe:
      least, most = NAIVE_TOTALS
      l_i = l_i + (acc - acc).sum(0, keepdims=True)  # NaN where an output is not finite
      row_lse = jnp.where((l_i == 0) | ((l_i >= least) & (l_i <= most)), row_lse, jnp.nan)
    lse[0, head] = row_lse
    slices = self.result.slices(head, TokenRange(0, tiling.block_q))
    out[slices] = (mean * self.params.dropout.scale).T.astype(out.dtype)
