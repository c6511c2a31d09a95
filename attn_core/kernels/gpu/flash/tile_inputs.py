"""What a GPU kernel reads beside queries, keys and values: the mask's arrays, bias, dropout words.

`Feed.pack` lays out the arrays; a running kernel holds references to them in global memory and
reads what belongs to a tile straight into the registers of a warpgroup. A tile is a
`masks.tiles.Tile` of one head: [queries, keys], or [keys, queries] where the feed is transposed.

Letters: B batch, T query length, S key length, H query heads.
"""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax
import jax.numpy as jnp

from attn_core.masks import dropout
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.xla import tile_ops as steps
from attn_core.masks import leaves as algebra, block_map as blocks, tile as tiles
from attn_core.types import AttentionSpec, Operands


class Extras(NamedTuple):
  """The arrays, or a running kernel's references to them; None: not needed."""

  mask: tuple  # leaves of the mask, padded to whole blocks; dense ones as int8
  batch_index: Any  # int32 [B]
  head_offset: Any  # int32 [B or 1]
  bias: Any  # [B or 1, H or 1, T or 1, S or 1], padded to whole blocks
  words: Any  # uint32 [B or 1, 2], of dropout
  poisoned: Any = None  # int32 [B, K, blocks of keys]: whether `poison` is anything but 0
  poison: Any = None  # float32 [B, K, S], padded to whole blocks: NaN for keys of values that are
  # not finite, 0 for others; None: such values are left as they are


class Feed(NamedTuple):
  """How a kernel reads `Extras`."""

  spec: AttentionSpec
  sizes: blocks.Sizes  # block_q: of a block of threads
  transposed: bool = False
  group: int = 1  # query heads of a key head

  def pack(self, operands: Operands) -> Extras:
    """Pads to whole blocks; transposes what has a number for every pair, if tiles are."""
    sizes = self.sizes
    rows, columns = -sizes.queries % sizes.block_q, steps.key_padding(sizes)
    mask = tiles.pad(self.spec.mask, operands.mask, rows, columns)
    turn = lambda x: x.swapaxes(2, 3) if self.transposed else x
    leaves = tuple(
        turn(x.astype(jnp.int8)) if role == algebra.DENSE else x
        for x, role in zip(mask.arrays, algebra.structure_roles(self.spec.mask)))
    bias = operands.bias
    if bias is not None:
      bias = steps.pad_axis(bias, 2, rows if bias.shape[2] > 1 else 0)
      bias = turn(steps.pad_axis(bias, 3, columns if bias.shape[3] > 1 else 0))
    words = operands.dropout_key if self.spec.dropout_prob else None
    return Extras(leaves, mask.batch_index, mask.head_offset, bias, words)

  def shape(self, tile: tiles.Tile) -> tuple[int, int]:
    """Of a tile in registers."""
    shape = tile.num_queries, tile.num_keys
    return shape[::-1] if self.transposed else shape

  def visible(self, extras: Extras, tile: tiles.Tile):
    """Whether each query sees each key: bool of the tile's shape."""
    mask, at = self.coordinates(extras, tile)
    seen = mask.visible(at)
    if self.sizes.keys % self.sizes.block_kv or not getattr(seen, "ndim", 0):
      seen = seen & (at.key_index < mosaic.int32(self.sizes.keys))
    return seen

  def kept(self, extras: Extras, tile: tiles.Tile):
    """Which weights dropout keeps: bool of the tile's shape."""
    row = _row(extras.words, 0, tile.batch)
    words = [extras.words[row, n] for n in range(2)]
    mask, at = self.coordinates(extras, tile)
    return dropout.keep_mask(words, algebra.move_to_positions(mask, at), self.spec.dropout_prob)

  def bias(self, extras: Extras, tile: tiles.Tile):
    """float32, of the tile's shape or a number."""
    return self._per_pair(extras.bias, tile).astype(jnp.float32)

  def poisoned(self, extras: Extras, tile: tiles.Tile, logits):
    """Logits of the tile's shape, NaN for keys of values that are not finite."""
    head = lax.div(tile.head, mosaic.int32(self.group))
    flags, keys = (ref.at[tile.batch, head] for ref in (extras.poisoned, extras.poison))
    def add(logits):
      return logits + self._vector(keys.at[pl.ds(tile.key, tile.num_keys)], self._axis(1), tile)
    block = lax.div(tile.key, mosaic.int32(self.sizes.block_kv))
    return lax.cond(flags[block] != 0, add, lambda logits: logits, logits)

  def coordinates(self, extras: Extras, tile: tiles.Tile):
    """(mask with its arrays cut to the tile, where the tile's elements are)."""
    leaves = [self._leaf(ref, role, tile) for ref, role in zip(
        extras.mask, algebra.structure_roles(self.spec.mask))]
    batch, head = tile.batch, tile.head
    if extras.batch_index is not None:
      batch = extras.batch_index[tile.batch]
    if extras.head_offset is not None:
      head = head + extras.head_offset[_row(extras.head_offset, 0, tile.batch)]
    query = self._index(self._axis(0), tile.query, tile)
    key = self._index(self._axis(1), tile.key, tile)
    return (jax.tree.unflatten(self.spec.mask, leaves),
            algebra.Coordinates(batch, head, query, key, query, key))

  def _axis(self, axis: int) -> int:
    """Where the queries (0) or the keys (1) of a tile are."""
    return 1 - axis if self.transposed else axis

  def _index(self, axis: int, start, tile: tiles.Tile):
    """The numbers of the tile's rows or columns.

    The barrier keeps the compiler from computing in advance what does not depend on `start`: kept
    through a loop, it would take registers that the products need.
    """
    layout = mosaic.COLUMNS if axis else mosaic.ROWS
    shape = self.shape(tile)
    numbers = plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=layout)
    return lax.broadcast_in_dim(lax.optimization_barrier(numbers + start), shape, [axis])

  def _leaf(self, ref, role: str, tile: tiles.Tile):
    if role == algebra.DENSE:
      return self._per_pair(ref, tile).astype(jnp.int32) != 0
    row = _row(ref, 0, tile.batch)
    if role == algebra.BATCH or ref.shape[1] == 1:
      return ref[row] if role == algebra.BATCH else ref[row, 0]
    start, length = ((tile.query, tile.num_queries) if role == algebra.QUERY
                     else (tile.key, tile.num_keys))
    axis = self._axis(0 if role == algebra.QUERY else 1)
    return self._vector(ref.at[row, pl.ds(start, length)], axis, tile)

  def _vector(self, ref, axis: int, tile: tiles.Tile):
    """A vector along an axis of the tile, repeated along the other."""
    layout = mosaic.COLUMNS if axis else mosaic.ROWS
    return lax.broadcast_in_dim(mosaic.load(ref, layout), self.shape(tile), [axis])

  def _per_pair(self, ref, tile: tiles.Tile):
    """The tile of [B or 1, H or 1, T or 1, S or 1] (S and T exchanged if transposed)."""
    line = _row(ref, 0, tile.batch), _row(ref, 1, tile.head)
    starts = tile.query, tile.key
    parts = [pl.ds(start, length) for start, length in zip(
        starts[::-1] if self.transposed else starts, self.shape(tile))]
    one = [n == 1 for n in ref.shape[2:]]
    if all(one):
      return ref[(*line, 0, 0)]
    if one[0]:
      return self._vector(ref.at[(*line, 0, parts[1])], 1, tile)
    if one[1]:
      return self._vector(ref.at[(*line, parts[0], 0)], 0, tile)
    return mosaic.load(ref.at[(*line, *parts)], mosaic.TILE)


def _row(ref, axis: int, number):
  """`number` along an axis of an array, or 0 where there is one for all."""
  return number if ref.shape[axis] > 1 else 0
