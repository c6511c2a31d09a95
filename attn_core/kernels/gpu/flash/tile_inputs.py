# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a tile besides queries, keys and values: the mask's arrays, bias, dropout key.

`TileInputLoader.pack` lays out the arrays; a kernel holds references to them in global memory and
loads those of a tile straight into the registers of a warpgroup. A tile is a `masks.tile.Tile` of
one head: [queries, keys], or [keys, queries] where the loader is transposed.
"""

from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import score_tiles
from attn_core.kernels.gpu.flash.list_bits import ListBits
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import block_map, dropout, mask as mask_lib, tile as tile_lib
from attn_core.score_mods import evaluate, score_mod, tables, traceable
from attn_core.types import AttentionSpec, Operands


class TileInputs(NamedTuple):
  """The arrays, or a kernel's references to them; None: not needed."""

  mask: tuple[Any, ...]  # leaves of the mask, padded to whole blocks; those of bool as int8
  batch_index: Any  # int32 [B]
  head_offset: Any  # int32 [B or 1]
  bias: Any  # [B or 1, H or 1, T or 1, S or 1], padded to whole blocks
  dropout_key: Any  # uint32 [B or 1, 2]
  block_has_nan: Any = None  # int32 [B, K, num_key_blocks]: whether `nan_keys` has a NaN there
  # float32 [B, K, S], padded to whole blocks: NaN for keys of non-finite values, 0 for others;
  # None: such values reach the result by themselves.
  nan_keys: Any = None
  mods: tuple[Any, ...] = ()  # arrays of the score mod, those of pairs padded to whole blocks
  lists: tuple[Any, ...] = ()  # words of bits; see `list_bits.pack`


class TileInputLoader(NamedTuple):
  """Loads `TileInputs` in a kernel."""

  spec: AttentionSpec
  sizes: block_map.Sizes  # block_q: of a thread block
  transposed: bool = False
  group: int = 1  # G, query heads of a key head
  lists: tuple[ListBits, ...] = ()  # of the mask, in place of its lists, which `spec` lacks

  @property
  def distances(self) -> score_tiles.Distances:
    """Where the numbers of a tile lie in tables by distance."""
    return score_tiles.Distances(self.sizes, self.transposed, score_tiles.runs_of(self.spec))

  def pack(self, operands: Operands) -> TileInputs:
    """Returns the arrays padded to whole blocks, those of pairs transposed if tiles are."""
    sizes = self.sizes
    rows, columns = -sizes.queries % sizes.block_q, dense_operands.key_padding(sizes)
    mask = tile_lib.pad_mask(self.spec.mask, operands.mask, rows, columns)
    turn = lambda x: x.swapaxes(2, 3) if self.transposed else x
    leaves = tuple(
        turn(x.astype(jnp.int8) if x.dtype == bool else x) if role == mask_lib.DENSE else x
        for x, role in zip(mask.arrays, mask_lib.structure_roles(self.spec.mask)))
    bias = operands.bias
    if bias is not None:
      bias = dense_operands.pad_axis(bias, 2, rows if bias.shape[2] > 1 else 0)
      bias = turn(dense_operands.pad_axis(bias, 3, columns if bias.shape[3] > 1 else 0))
    dropout_key = operands.dropout_key if self.spec.dropout_prob else None
    mods = tuple(turn(x) if role == score_mod.PAIR else x for x, role in zip(
        self._pack_mods(operands, rows, columns), score_mod.structure_roles(self.spec.score_mod)))
    return TileInputs(leaves, mask.batch_index, mask.head_offset, bias, dropout_key, mods=mods)

  def _pack_mods(self, operands: Operands, rows: int, columns: int) -> list[jax.Array]:
    """Returns the arrays of the score mod, padded; only those of all pairs keep their dtype."""
    structure = self.spec.score_mod
    pairs, found = traceable.by_pair(structure, operands.mods), tables.find(structure)
    def pack(n: int, x: jax.Array) -> jax.Array:
      if n in found:
        return score_tiles.shifted(found[n], x, bases_of(operands, self.spec), self.distances)
      return x if n in pairs else x.astype(jnp.float32)
    return [pack(n, x) for n, x in enumerate(
        evaluate.pad(structure, operands.mods, rows, columns))]

  def shape(self, tile: tile_lib.Tile) -> tuple[int, int]:
    """Returns the shape of a tile in registers."""
    return _shape(tile, self.transposed)

  def visible(self, tile_inputs: TileInputs, tile: tile_lib.Tile) -> jax.Array:
    """Returns whether each query attends to each key: bool of the tile's shape."""
    mask, at = self.coordinates(tile_inputs, tile)
    seen = mask.visible(at)
    for bits, ref in zip(self.lists, tile_inputs.lists, strict=True):
      seen = seen & bits.visible(ref, tile)
    if self.sizes.keys % self.sizes.block_kv or not getattr(seen, "ndim", 0):
      seen = seen & (at.key_index < mosaic.int32(self.sizes.keys))
    return seen

  def keep_mask(self, tile_inputs: TileInputs, tile: tile_lib.Tile) -> jax.Array:
    """Returns which weights dropout keeps: bool of the tile's shape."""
    row = _row(tile_inputs.dropout_key, 0, tile.batch)
    words = [tile_inputs.dropout_key[row, n] for n in range(2)]
    mask, at = self.coordinates(tile_inputs, tile)
    return dropout.keep_mask(words, dropout.move_to_positions(mask, at), self.spec.dropout_prob)

  def bias(self, tile_inputs: TileInputs, tile: tile_lib.Tile) -> jax.Array:
    """Returns the bias in float32, of the tile's shape or a number."""
    return load_pairs(tile_inputs.bias, tile, self.transposed).astype(jnp.float32)

  def modified(self, tile_inputs: TileInputs, tile: tile_lib.Tile, scores: jax.Array,
               by: int | None, slope: jax.Array | None) -> score_tiles.Modified:
    """Returns scores of the tile's shape after the score mod; see `score_tiles.apply`."""
    arrays = load_mods(self.spec.score_mod, tile_inputs.mods, tile, self.transposed,
                       lambda _, ref: self._by_distance(ref, tile))
    at = None
    if score_tiles.reads_positions(self.spec):
      mask, at = self.coordinates(tile_inputs, tile)
      at = dropout.move_to_positions(mask, at)
    return score_tiles.apply(self.spec, score_tiles.Numbers(arrays, at), scores, by=by, slope=slope)

  def propagate_nan(self, tile_inputs: TileInputs, tile: tile_lib.Tile,
                    logits: jax.Array) -> jax.Array:
    """Returns logits of the tile's shape, NaN for keys of non-finite values."""
    head = lax.div(tile.head, mosaic.int32(self.group))
    flags, keys = (ref.at[tile.batch, head]
                   for ref in (tile_inputs.block_has_nan, tile_inputs.nan_keys))
    def add(logits: jax.Array) -> jax.Array:
      return logits + _vector(keys.at[pl.ds(tile.key, tile.num_keys)], self._axis(1),
                              self.shape(tile))
    block = lax.div(tile.key, mosaic.int32(self.sizes.block_kv))
    return lax.cond(flags[block] != 0, add, lambda logits: logits, logits)

  def coordinates(self, tile_inputs: TileInputs,
                  tile: tile_lib.Tile) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
    """Returns (mask with its arrays cut to the tile, coordinates of the tile's elements)."""
    leaves = [self._leaf(ref, role, tile) for ref, role in zip(
        tile_inputs.mask, mask_lib.structure_roles(self.spec.mask))]
    batch, head = tile.batch, tile.head
    if tile_inputs.batch_index is not None:
      batch = tile_inputs.batch_index[tile.batch]
    if tile_inputs.head_offset is not None:
      head = head + tile_inputs.head_offset[_row(tile_inputs.head_offset, 0, tile.batch)]
    query = self._index(self._axis(0), tile.query, tile)
    key = self._index(self._axis(1), tile.key, tile)
    return (jax.tree.unflatten(self.spec.mask, leaves),
            mask_lib.Coordinates(batch, head, query, key, query, key))

  def _axis(self, axis: int) -> int:
    """Returns the axis of the queries (0) or of the keys (1) in a tile."""
    return 1 - axis if self.transposed else axis

  def _index(self, axis: int, start: jax.Array, tile: tile_lib.Tile) -> jax.Array:
    """Returns the indices of the tile's rows or columns.

    The barrier keeps the compiler from computing in advance what does not depend on `start`: kept
    through a loop, it would take registers that the products need.
    """
    shape = self.shape(tile)
    numbers = plgpu.broadcasted_iota(
        jnp.int32, (shape[axis],), 0, layout=mosaic.VECTOR_LAYOUTS[axis])
    return lax.broadcast_in_dim(lax.optimization_barrier(numbers + start), shape, [axis])

  def _leaf(self, ref: Ref, role: str, tile: tile_lib.Tile) -> jax.Array:
    """Returns a leaf of the mask for a tile."""
    if role == mask_lib.DENSE:
      found = load_pairs(ref, tile, self.transposed)
      return found.astype(jnp.int32) != 0 if ref.dtype == jnp.int8 else found
    row = _row(ref, 0, tile.batch)
    if role == mask_lib.BATCH or ref.shape[1] == 1:
      return ref[row] if role == mask_lib.BATCH else ref[row, 0]
    start, length = ((tile.query, tile.num_queries) if role == mask_lib.QUERY
                     else (tile.key, tile.num_keys))
    axis = self._axis(0 if role == mask_lib.QUERY else 1)
    return _vector(ref.at[row, pl.ds(start, length)], axis, self.shape(tile))

  def _by_distance(self, ref: Ref, tile: tile_lib.Tile) -> jax.Array:
    """Returns the tile of `score_tiles.shifted`."""
    rows, columns = self.shape(tile)
    start = self.distances.first_column(tile.query, tile.key)
    return mosaic.load(ref.at[_row(ref, 0, tile.batch), _row(ref, 1, tile.head), pl.ds(0, rows),
                              pl.ds(start, columns)], mosaic.TILE_LAYOUT)


def bases_of(operands: Operands, spec: AttentionSpec) -> jax.Array:
  """Returns the `bases` of `score_tiles.shifted`: int32 [B or 1, pairs of runs]."""
  return dense_operands.distances_of_runs(operands, spec, continued=False)


def load_mods(structure: jax.tree_util.PyTreeDef, mods: tuple[Ref, ...], tile: tile_lib.Tile,
              transposed: bool,
              load_table: Callable[[int, Ref], jax.Array]) -> tuple[jax.Array, ...]:
  """Returns the arrays of a score mod in float32, of the tile's shape or numbers.

  Args:
    structure: of the score mod's term.
    mods: references to its arrays.
    tile: the tile.
    transposed: whether its rows are keys.
    load_table: returns the numbers of a table by distance, of the number of its array.
  """
  load = {score_mod.PAIR: lambda _, ref: load_pairs(ref, tile, transposed).astype(jnp.float32),
          score_mod.HEADS: load_table,
          score_mod.ROW: lambda _, ref: ref[_row(ref, 0, tile.batch), 0]}
  return tuple(load[role](n, ref) for n, (ref, role) in enumerate(zip(
      mods, score_mod.structure_roles(structure), strict=True)))


def load_pairs(ref: Ref, tile: tile_lib.Tile, transposed: bool) -> jax.Array:
  """Returns the tile of [B or 1, H or 1, T or 1, S or 1] (S and T exchanged if transposed)."""
  leading = _row(ref, 0, tile.batch), _row(ref, 1, tile.head)
  starts, shape = (tile.query, tile.key), _shape(tile, transposed)
  slices = [pl.ds(start, length) for start, length in zip(
      starts[::-1] if transposed else starts, shape)]
  one = [n == 1 for n in ref.shape[2:]]
  if all(one):
    return ref[(*leading, 0, 0)]
  if one[0]:
    return _vector(ref.at[(*leading, 0, slices[1])], 1, shape)
  if one[1]:
    return _vector(ref.at[(*leading, slices[0], 0)], 0, shape)
  return mosaic.load(ref.at[(*leading, *slices)], mosaic.TILE_LAYOUT)


def _shape(tile: tile_lib.Tile, transposed: bool) -> tuple[int, int]:
  shape = tile.num_queries, tile.num_keys
  return shape[::-1] if transposed else shape


def _vector(ref: Ref, axis: int, shape: tuple[int, int]) -> jax.Array:
  """Returns a vector along an axis of a tile, repeated along the other."""
  return mosaic.broadcast_along(mosaic.load(ref, mosaic.VECTOR_LAYOUTS[axis]), shape, axis)


def _row(ref: Ref, axis: int, index: Any) -> Any:
  """Returns `index` along an axis of an array, or 0 where the axis has length 1."""
  return index if ref.shape[axis] > 1 else 0
