# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters shared by the forward and backward kernels on TPUs, and their loop over tiles.

The mask is evaluated only on partly visible tiles of a block. The most common patterns of tiles
have specialized code without branches, in which the products of the next strips are issued before
those of the current one are used, so that the matrix units stay busy.
"""

import collections
import functools
from typing import Any, Callable, Iterator, NamedTuple, Sequence, TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands, listed, matmul_precision
from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.tpu.flash import (
    call, depth_columns, list_bits, mask_tiles, schedule, score_tiles, tile_inputs)
from attn_core.kernels.tpu.flash.patterns import MASKED, UNMASKED, Patterns
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, Index, KernelRefs, TileIndex, TokenRange, known_or_0, whole_lanes)
from attn_core.masks import block_map
from attn_core.types import AttentionSpec, Operands

# d logits -> (d scaled scores, cotangents of arrays of the score mod)
Pull: TypeAlias = Callable[[jax.Array], tuple[jax.Array, score_tiles.Arrays]]
# (neighboring tiles, what of the mask must be evaluated in them: see `patterns.UNMASKED`)
Strip = tuple[TileIndex, int]


class KernelParams(NamedTuple):
  """Static parameters of a kernel, and readers of what enters its logits."""

  spec: AttentionSpec
  tiling: schedule.Tiling
  mask: mask_tiles.MaskReader
  dropout: mask_tiles.DropoutReader
  patterns: Patterns
  single_step_rows: bool  # see `schedule.Schedule.single_step_rows`
  bias: tile_inputs.Reader | None  # of a tile
  precision: Any
  mod: score_tiles.ModReader | None = None

  @property
  def unit(self) -> float:
    """The factor in exp(logit) = 2 ** (unit * result of `logits`).

    It is the softmax scale times log2(e), unless the scale must be applied first. A score mod gets
    scaled scores times its factor, and gives logits times that.
    """
    scale = self.spec.softmax_scale
    if self.mod is not None:
      return LOG2E / self.mod.factor
    plain = self.spec.logits_soft_cap is None and self.bias is None and scale > 0
    return scale * LOG2E if plain else 1.0

  def tiles(self, grid: GridIndex) -> list[tuple[int, TileIndex]]:
    """Returns (shift of its two bits in the kinds, index) of each tile of a block, all heads."""
    tiling = self.tiling
    return [(2 * (c * tiling.tiles_q + t),
             TileIndex(grid, head, TokenRange(t * tiling.tile_q, tiling.tile_q),
                       TokenRange(c * tiling.tile_kv, tiling.tile_kv)))
            for c in range(tiling.tiles_kv) for head in range(tiling.query_heads)
            for t in range(tiling.tiles_q)]

  def strips(self, grid: GridIndex, pattern: int) -> list[Strip]:
    """Joins neighboring tiles of one kind along the queries."""
    found: list[Strip] = []
    apart = self.patterns.apart_of(pattern)
    for shift, tile in self.tiles(grid):
      kind = (pattern >> shift) & 3
      if kind == block_map.EMPTY:
        continue
      masked = self.patterns.evaluated(pattern, shift // 2)
      before, masked_before = found[-1] if found else (None, UNMASKED)
      both = masked & masked_before
      # Tiles with unlike parts, as at both sides of a narrow window, are faster in one strip.
      joins = masked == masked_before or bool(both) and both not in (masked, masked_before)
      if (before and joins
          and before.head == tile.head and before.keys == tile.keys
          and before.queries.start + before.queries.length == tile.queries.start):
        joined = TokenRange(before.queries.start, before.queries.length + tile.queries.length)
        found[-1] = before._replace(queries=joined), masked | masked_before
      else:
        found.append((tile._replace(apart=apart), masked))
    return found

  def rows(self, tile: TileIndex) -> Any:
    """Returns the slice of a tile's queries, of those of all heads of the step."""
    start = tile.head * self.tiling.block_q + tile.queries.start
    return pl.ds(whole_lanes(start), tile.queries.length)

  def head_rows(self, head: Index) -> Any:
    """Returns the slice of all queries of a head, of those of all heads of the step."""
    return pl.ds(whole_lanes(head * self.tiling.block_q), self.tiling.block_q)

  def row_tiles(self, head: Index, queries: TokenRange) -> dict[tuple[int, int], Any]:
    """Returns {(query head, first query): slice of rows} of the tiles of some queries.

    Where the head or the first query is known in the kernel only, the keys count from it.
    """
    size, first = self.tiling.tile_q, head * self.tiling.block_q + queries.start
    start, number = known_or_0(queries.start), known_or_0(head)
    return {(number, start + n): pl.ds(whole_lanes(first + n), size)
            for n in range(0, queries.length, size)}

  def key_head(self, tile: TileIndex) -> Index:
    """Returns the key head of a tile, of those of the step."""
    if isinstance(tile.head, int):
      return tile.head // self.tiling.group
    return lax.div(tile.head, jnp.int32(self.tiling.group))

  def dot(self, a: jax.Array, b: jax.Array,
          contract: tuple[tuple[int], tuple[int]] = ((1,), (0,))) -> jax.Array:
    """Multiplies two matrices into float32."""
    return lax.dot_general(a, b, (contract, ((), ())), precision=self.precision,
                           preferred_element_type=jnp.float32)

  @property
  def columns(self) -> depth_columns.SlopeColumns | None:
    """Columns of the score mod, which keys and queries get on their right."""
    return None if self.mod is None else self.mod.columns

  def with_key_columns(self, refs: KernelRefs, tile: TileIndex, key: jax.Array) -> jax.Array:
    """Adds `columns` to the keys of a tile, [keys, D]."""
    return key if self.columns is None else jnp.concatenate(
        [key, self.columns.of_keys(refs, tile)], 1)

  def with_query_columns(self, refs: KernelRefs, head: Index, tokens: TokenRange,
                         query: jax.Array) -> jax.Array:
    """Adds `columns` to queries of a head, [queries, D]."""
    return query if self.columns is None else jnp.concatenate(
        [query, self.columns.of_queries(refs, head, tokens)], 1)

  def logits(self, refs: KernelRefs, tile: TileIndex, scores: jax.Array, *, pulls: bool = False,
             wrt: tuple[int, ...] = ()) -> tuple[jax.Array, Pull | None]:
    """Returns the logits in `unit` before the mask is applied, and their pullback if `pulls`.

    Args:
      refs: of the kernel.
      tile: which scores these are.
      scores: K Q^T, float32 [keys, queries], of keys and queries with `columns`.
      pulls: whether to return a function from d logits to d scaled scores.
      wrt: numbers of arrays of the score mod, whose cotangents that function returns as well.
    """
    if self.mod is None and self.unit != 1:
      return scores, (lambda d_logits: (d_logits, {})) if pulls else None
    factor = LOG2E if self.mod is None else self.mod.factor
    scale, cap, slope = self.spec.softmax_scale, self.spec.logits_soft_cap, None
    if cap is None:
      logits = scores * (scale * factor)
    else:
      capped = jnp.tanh(scores * (scale / cap))
      logits, slope = capped * (cap * factor), 1 - capped * capped
    if self.bias is not None:
      bias = self.bias(refs, tile).astype(jnp.float32)
      logits = logits + (bias if factor == 1 else bias * factor)
    if self.mod is None:
      of_mod: Pull = lambda d_logits: (d_logits, {})
    elif pulls:
      logits, of_mod = self.mod.pullback(refs, tile, logits, wrt)
    else:
      return self.mod.apply(refs, tile, logits), None
    def pull(d_logits: jax.Array) -> tuple[jax.Array, score_tiles.Arrays]:
      d_scores, d_arrays = of_mod(d_logits)
      return (d_scores if slope is None else d_scores * slope), d_arrays
    return logits, pull

  def prepare(self, refs: KernelRefs, grid: GridIndex, kinds: jax.Array) -> None:
    """Makes what the visible tiles of a step read."""
    if self.mod is not None:
      self.mod.prepare(refs, grid, kinds)

  @property
  def mod_scratch(self) -> list[call.Scratch]:
    """The scratch memory of the score mod: the first of `KernelRefs.scratch`."""
    return [] if self.mod is None else self.mod.scratch

  def hide(self, refs: KernelRefs, tile: TileIndex, masked: int, x: jax.Array,
           hidden: float) -> jax.Array:
    """Replaces `x` by `hidden` where the mask hides it; masked: see `Strip`."""
    if masked == UNMASKED:
      return x
    visible = self.mask.visible(refs, tile, which=masked >> 1)
    return jnp.where(visible, x, hidden)


def make_kernel_params(inputs: tile_inputs.TileInputs, operands: Operands, spec: AttentionSpec,
                       tiling: schedule.Tiling, patterns: Patterns,
                       single_step_rows: bool) -> KernelParams:
  """Adds mask, bias, dropout and score mod to the inputs; returns the parameters of a kernel."""
  lists = list_bits.readers(inputs, dense_operands.mask_of(operands, spec))
  operands, spec = listed.without_lists(operands, spec)
  mask = mask_tiles.mask_reader(inputs, operands, spec.mask, lists)
  bias = None if operands.bias is None else inputs.add_per_pair(operands.bias)
  precision = matmul_precision.resolve(operands.query.dtype, spec.precision)
  return KernelParams(
      spec, tiling, mask, mask_tiles.dropout_reader(inputs, operands, spec, mask),
      patterns, single_step_rows, bias, precision,
      score_tiles.mod_reader(inputs, operands, spec, mask))


def for_each_tile(params: KernelParams, grid: GridIndex, kinds: jax.Array,
                  compute: Callable[[list[Strip]], None]) -> None:
  """Runs `compute` on the visible tiles of a block.

  Args:
    params: of the kernel.
    grid: which block.
    kinds: int32, two bits for each tile; see `schedule.Schedule`.
    compute: takes all strips of a block at once if its kinds are one of `params.patterns`, and
      one strip of each head at a time otherwise.
  """
  for_each_block(params, grid, kinds, compute, lambda: loop(params, grid, kinds, compute))


def for_each_block(params: KernelParams, grid: GridIndex, kinds: jax.Array,
                   compute: Callable[[list[Strip]], None], otherwise: Callable[[], None]) -> None:
  """Runs `compute` on all strips of a block at once, or `otherwise` if they are of no pattern.

  A block without visible tiles runs nothing.
  """
  patterns = params.patterns
  known = [kinds == np.uint32(pattern).view(np.int32) for pattern in patterns.kinds]
  for is_pattern, pattern in zip(known, patterns.kinds):
    @pl.when(is_pattern)
    def _(pattern: int = pattern) -> None:
      compute(params.strips(grid, pattern))

  if not patterns.complete:
    pl.when(jnp.logical_not(functools.reduce(jnp.logical_or, known, kinds == 0)))(otherwise)


def head_by_head(params: KernelParams, strips: list[Strip],
                 compute: Callable[[list[Strip]], None]) -> None:
  """Runs `compute` on the strips of one head after another where the patterns depend on arrays.

  Its code, which is long then, is written once for all heads. Otherwise it gets all strips at once.

  Args:
    params: of the kernel.
    strips: the same for each head.
    compute: takes the strips of one head, or of all.
  """
  if params.patterns.known or params.tiling.query_heads == 1:
    compute(strips)
    return
  of_one = [(tile, masked) for tile, masked in strips if tile.head == 0]

  @pl.loop(0, params.tiling.query_heads)
  def _(head: jax.Array) -> None:
    compute([(tile._replace(head=head), masked) for tile, masked in of_one])


def loop(params: KernelParams, grid: GridIndex, kinds: jax.Array,
         compute: Callable[[list[Strip]], None], *, always_masked: bool = False) -> None:
  """Runs `compute` on one visible strip after another, of any kinds.

  Args:
    params, grid, kinds: as in `for_each_tile`.
    compute: takes the same strip of all heads, as the work of one hides the latency of another.
    always_masked: evaluate the mask on fully visible tiles as well, for less code.
  """
  tiling = params.tiling
  width, cases = params.patterns.strip_tiles, params.patterns.others
  cases = (MASKED,) if always_masked else cases
  number = tiling.tiles_q // width  # of strips along the queries

  @pl.loop(0, number * tiling.tiles_kv)
  def _(n: jax.Array) -> None:
    c = lax.div(n, jnp.int32(number)) if number > 1 else n
    t = (n - c * number) * width if number > 1 else 0
    found = _strip_kinds(kinds >> 2 * (tiling.tiles_q * c + t), width)
    queries = TokenRange(whole_lanes(t * tiling.tile_q), width * tiling.tile_q)
    keys = TokenRange(whole_lanes(c * tiling.tile_kv), tiling.tile_kv)
    for masked in cases:
      @pl.when(found.any if cases == (MASKED,) else found.is_case(masked))
      def _(masked: int = masked) -> None:
        compute([(TileIndex(grid, head, queries, keys), masked)
                 for head in range(tiling.query_heads)])


class _StripKinds(NamedTuple):
  """Kinds of the neighboring tiles of a strip."""

  any: jax.Array  # whether one is visible
  full: jax.Array  # whether all are FULL
  partial: jax.Array  # whether more than arrays may hide a pair of one

  def is_case(self, masked: int) -> jax.Array:
    """Returns whether UNMASKED, `Patterns.by_arrays` or MASKED must be evaluated."""
    if masked == UNMASKED:
      return self.full
    if masked == MASKED:
      return self.any & self.partial
    return jnp.logical_not(self.full | self.partial)


def _strip_kinds(bits: jax.Array, width: int) -> _StripKinds:
  """Reads the kinds of a strip, which are the lowest bits of a number."""
  kinds = [(bits >> 2 * n) & 3 for n in range(width)]
  each = lambda test: functools.reduce(jnp.logical_or, [test(kind) for kind in kinds])
  return _StripKinds(each(lambda kind: kind != block_map.EMPTY),
                     jnp.logical_not(each(lambda kind: kind != block_map.FULL)),
                     each(lambda kind: kind < block_map.FULL))


def issue_ahead(strips: Sequence[Strip], products: Callable[[TileIndex], Any],
                number: int) -> Iterator[tuple[TileIndex, int, Any]]:
  """Yields (tile, masked, products(tile)) of all strips; issues `number` products ahead."""
  issued = collections.deque(products(tile) for tile, _ in strips[:number])
  for n, (tile, masked) in enumerate(strips):
    if n + number < len(strips):
      issued.append(products(strips[n + number][0]))
    yield tile, masked, issued.popleft()
