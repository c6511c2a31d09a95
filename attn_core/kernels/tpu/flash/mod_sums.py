# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cotangents of arrays of a score mod in the backward kernel: sums of those of tiles.

A number for each query is a sum over keys, and so is that of an array with one for each row or head
or one at all, which XLA adds up further. A number for each key is a sum over queries, a number for
each distance one over diagonals. The sums of a batch row and of the heads of a step stay in vector
memory until all steps have added to them. Those of slopes that are in the products of keys and
queries come from the product K^T dS, with the numbers of the keys as two more rows of K^T.
"""

import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.tpu.flash import call, diagonals, score_tiles
from attn_core.kernels.tpu.flash.schedule import LANES, Tiling
from attn_core.kernels.tpu.flash.tile_inputs import (
    GridIndex, KernelRefs, Ref, TileIndex, TokenRange, Index)
from attn_core.types import AttentionSpec, Operands, is_mod, mod_number

QUERY, KEY, DISTANCE = "query", "key", "distance"


class ModSums(NamedTuple):
  """The sums of the arrays whose cotangents are wanted."""

  kinds: dict[int, str]  # by the number of an array: QUERY, KEY or DISTANCE
  tiling: Tiling
  band: diagonals.Band
  scratch_start: int = 0  # place of the tiles of DISTANCE in `KernelRefs.scratch`

  def outputs(self, batch: int, heads: int) -> list[call.Output]:
    """The outputs of the kernel, of B batch rows and H query heads."""
    tiling = self.tiling
    sizes = {QUERY: tiling.padded_queries, KEY: tiling.padded_keys,
             DISTANCE: diagonals.length(tiling)}
    rows = {QUERY: 1, KEY: 1, DISTANCE: self.band.pairs}
    return [call.Output((batch, heads * rows[kind], 1, sizes[kind]), jnp.float32,
                        (1, tiling.query_heads * rows[kind], 1, sizes[kind]),
                        lambda b, h, i, j: (b, h, 0, 0)) for kind in self.kinds.values()]

  @property
  def scratch(self) -> list[tuple[int, ...]]:
    """Shapes of the scratch memory, float32, after that of the score mod's reader."""
    return [self.band.shape(self.tiling.query_heads)] * len(self._of_distance)

  @property
  def _of_distance(self) -> list[int]:
    """Numbers of the arrays by distance, in the order of `scratch`."""
    return [n for n, kind in self.kinds.items() if kind == DISTANCE]

  def _tiles(self, refs: KernelRefs, number: int) -> Ref:
    return refs.scratch[self.scratch_start + self._of_distance.index(number)]

  def start(self, refs: KernelRefs, outputs: tuple[Ref, ...]) -> None:
    """Clears the sums in the first step of a batch row and group of heads."""
    @pl.when(refs.program_ids[-1] == 0)
    def _() -> None:
      for ref in (*outputs, *(self._tiles(refs, n) for n in self._of_distance)):
        ref[...] = jnp.zeros_like(ref)

  def add(self, refs: KernelRefs, outputs: tuple[Ref, ...], tile: TileIndex,
          d_arrays: score_tiles.Arrays) -> None:
    """Adds cotangents of one tile, of some or all arrays: [1, queries] or [keys, queries]."""
    grid, tiling = tile.grid, self.tiling
    for (number, kind), ref in zip(self.kinds.items(), outputs, strict=True):
      if number not in d_arrays:
        continue
      x = d_arrays[number]
      if kind == DISTANCE:
        diagonals.add_tile(self.band, self._tiles(refs, number), tile, x)
      elif kind == QUERY:
        ref[0, tile.head, :, _tokens(grid.query_block * tiling.block_q, tile.queries)] += x
      else:
        # Keys are along the lanes in memory: of LANES columns each, transposed.
        columns = functools.reduce(jnp.add, jnp.split(x, tile.queries.length // LANES, 1))
        ref[0, tile.head, :, _tokens(grid.key_block * tiling.block_kv, tile.keys)] += (
            columns.T.sum(0, keepdims=True))

  def end_step(self, refs: KernelRefs, outputs: tuple[Ref, ...], grid: GridIndex,
               kinds: jax.Array) -> None:
    """Adds up what steps leave in scratch memory."""
    if self._of_distance:
      @pl.when(self.band.at(False, refs, kinds))
      def _() -> None:
        for (number, kind), ref in zip(self.kinds.items(), outputs, strict=True):
          if kind == DISTANCE:
            diagonals.sum_diagonals(self.band, self._tiles(refs, number), grid, ref)

  def finish(self, found: tuple[jax.Array, ...], operands: Operands,
             spec: AttentionSpec) -> dict[str, jax.Array]:
    """Returns the cotangents by name, from the outputs of all batch rows."""
    in_rows, results = score_tiles.terms_by_distance(spec), {}
    for (number, kind), total in zip(self.kinds.items(), found, strict=True):
      x = operands.mods[number]
      if kind == DISTANCE:
        row, pull = jax.vjp(lambda x, n=number: score_tiles.row_of(
            in_rows[n], x, operands, spec, self.tiling), x)
        rows = total.reshape(total.shape[0], -1, *row.shape[2:])
        result, = pull(_sum_to(rows, row.shape))
      else:
        length = operands.query.shape[1] if kind == QUERY else operands.key.shape[1]
        shape = (*x.shape[:2], 1, 1) if x.ndim == 2 else x.shape
        total = total[..., :length]
        total = total.reshape(*total.shape[:2], -1, 1) if kind == QUERY else total
        result = _sum_to(total, shape).reshape(x.shape).astype(x.dtype)
      results[f"mods.{number}"] = result
    return results


def mod_sums(operands: Operands, spec: AttentionSpec, tiling: Tiling,
             wrt: tuple[str, ...]) -> ModSums:
  """Returns the sums of those arrays of the score mod in `wrt` that the kernel computes."""
  in_rows = score_tiles.terms_by_distance(spec)
  def kind(number: int) -> str:
    if number in in_rows:
      return DISTANCE
    shape = operands.mods[number].shape
    return KEY if len(shape) == 4 and shape[2] == 1 < shape[3] else QUERY
  own = score_tiles.own_names(operands, spec)
  return ModSums({mod_number(name): kind(mod_number(name)) for name in wrt
                  if is_mod(name) and name in own}, tiling,
                score_tiles.band_of(operands, spec, tiling))


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Sums over the axes that are 1 in `shape`."""
  axes = tuple(n for n, (size, wanted) in enumerate(zip(x.shape, shape)) if size != wanted)
  return x.sum(axes, keepdims=True)


def _tokens(start: Index, tokens: TokenRange) -> slice | pl.Slice:
  """Returns the slice of tokens of a block that begins at `start`."""
  return pl.ds(pl.multiple_of(start + tokens.start, LANES), tokens.length)
