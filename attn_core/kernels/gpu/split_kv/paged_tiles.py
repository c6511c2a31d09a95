# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles of the kernel over pages for Hopper: their mask, and what a score mod reads at them.

A tile is [keys, rows]: consecutive tokens of a request, and rows of a block of its queries. Both
have consecutive positions, which count from the first token of the request.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands, paged_operands
from attn_core.kernels.common.paged_operands import BlockedInputs, QueryBlock
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import score_tiles
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs, load_mods
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.kernels.gpu.split_kv.kernel import BLOCK_KV
from attn_core.masks import mask as mask_lib, tile as tile_lib
from attn_core.score_mods import score_mod, tables
from attn_core.types import PagedSpec


class WorkItem(NamedTuple):
  """Blocks of queries, int32 [num_items] each; in a kernel one of them, numbers."""

  request: jax.Array
  position: jax.Array  # of the first query
  length: jax.Array  # tokens of the request
  first: jax.Array  # the first block of keys that one of its queries attends to
  first_full: jax.Array  # see `kernel.BlockRange`
  end_full: jax.Array
  end: jax.Array


class PagedTile(NamedTuple):
  """Some rows of a block of queries, and a block of keys."""

  item: WorkItem
  # The number of the item, the head of keys, the first row, and the position of the first key.
  place: tile_lib.Tile


def line_length(size: int, block_q: int) -> int:
  """Returns the length of the lines of a table, whose ends repeat in a block of keys each."""
  return size + block_q + 2 * BLOCK_KV


class PagedTileInputLoader(NamedTuple):
  """The part of a `TileInputLoader` that `Logits` reads here."""

  spec: PagedSpec
  num_rows: int  # of a tile
  group: int  # G, query heads of a key head

  def pack(self, inputs: BlockedInputs, blocks: QueryBlock, num_rows: int) -> TileInputs:
    """Returns the arrays of the score mod, and the number of the first head.

    Args:
      inputs: the call, cut into blocks.
      blocks: arrays of all blocks.
      num_rows: of a block and key head, padded.
    """
    structure = self.spec.score_mod
    found, rows_of = tables.find(structure), functools.partial(
        paged_operands.rows_of_mod, inputs, blocks)

    def pad(x: jax.Array) -> jax.Array:  # [blocks or 1, K, block_q, G, n]
      x = x.astype(jnp.float32).reshape(*x.shape[:2], -1, x.shape[4])
      return dense_operands.pad_axis(x, 2, num_rows - x.shape[2]).swapaxes(2, 3)

    def pack(n: int, x: jax.Array, role: str) -> jax.Array:
      if n in found:
        sizes = BLOCK_KV, line_length(x.shape[2], inputs.block_q)
        return pad(tables.lines(x, inputs.block_q, sizes, rows_of))
      if role == score_mod.PAIR and x.shape[1:3] != (1, 1):
        return pad(rows_of(x))
      return x.astype(jnp.float32)

    mods = tuple(pack(n, x, role) for n, (x, role) in enumerate(zip(
        inputs.mods, score_mod.structure_roles(structure), strict=True)))
    offset = inputs.head_offset
    return TileInputs((), None, None if offset is None else offset.reshape(1), None, None,
                      mods=mods)

  def visible(self, _: TileInputs, tile: PagedTile) -> jax.Array:
    """Returns bool [block_kv, num_rows]: whether each row attends to each key."""
    key, query = self._key_positions(tile), self._query_positions(tile)
    seen = key < tile.item.length
    left, right = paged_operands.window_of(self.spec)
    seen = seen if left is None else seen & (key >= query - left)
    return seen if right is None else seen & (key <= query + right)

  def modified(self, tile_inputs: TileInputs, tile: PagedTile, scores: jax.Array,
               by: int | None, slope: jax.Array | None) -> score_tiles.Modified:
    """Returns scores of the tile's shape after the score mod; see `score_tiles.apply`."""
    found = tables.find(self.spec.score_mod)
    arrays = load_mods(self.spec.score_mod, tile_inputs.mods, tile.place, True,
                       lambda n, ref: self._by_distance(ref, tile, found[n].first))
    at = self._coordinates(tile_inputs, tile) if score_tiles.reads_positions(self.spec) else None
    return score_tiles.apply(
        self.spec, score_tiles.Numbers(arrays, at), scores, by=by, slope=slope)

  def _by_distance(self, ref: Ref, tile: PagedTile, first: int) -> jax.Array:
    """Returns the tile of `tables.lines`, [1, K, length, rows]."""
    place = tile.place
    start = place.key - tile.item.position + np.int32(BLOCK_KV - first)
    start = jnp.clip(start, np.int32(0), np.int32(ref.shape[2] - BLOCK_KV))
    return mosaic.load(ref.at[0, place.head, pl.ds(start, BLOCK_KV),
                              pl.ds(place.query, self.num_rows)], mosaic.TILE_LAYOUT)

  def _coordinates(self, tile_inputs: TileInputs, tile: PagedTile) -> mask_lib.Coordinates:
    """Returns numbers of heads, and positions, of the tile's shape; batch rows have none."""
    row = self._rows(tile)
    head = tile.place.head * mosaic.int32(self.group) + lax.rem(row, jnp.full_like(row, self.group))
    if tile_inputs.head_offset is not None:
      head = head + tile_inputs.head_offset[0]
    query, key = self._query_positions(tile), self._key_positions(tile)
    return mask_lib.Coordinates(np.int32(0), head, query, key, query, key)

  def _key_positions(self, tile: PagedTile) -> jax.Array:
    return tile.place.key + self._indices(0, mosaic.ROW_LAYOUT)

  def _query_positions(self, tile: PagedTile) -> jax.Array:
    row = self._rows(tile)
    return tile.item.position + lax.div(row, jnp.full_like(row, self.group))

  def _rows(self, tile: PagedTile) -> jax.Array:
    return tile.place.query + self._indices(1, mosaic.COLUMN_LAYOUT)

  def _indices(self, axis: int, layout: Any) -> jax.Array:
    """Returns the indices of the tile's rows or columns, int32 of its shape."""
    shape = BLOCK_KV, self.num_rows
    along = plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=layout)
    return lax.broadcast_in_dim(along, shape, [axis])
