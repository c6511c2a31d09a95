# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of key blocks in the Pallas kernels, which visit the listed blocks and no others.

The heads of a step have one list. Where the listed blocks are multiples of 128 tokens, a block of a
kernel lies in one of them, and what the list says holds for all of its pairs: a kernel visits it or
not, and evaluates the rest of the mask only. Of other lists a kernel visits the tiles that any
query of the tile lists, and reads there a bit for each query and listed block (`bits`).

Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, https://arxiv.org/abs/2502.13189.
Yuan et al., Native Sparse Attention, https://arxiv.org/abs/2502.11089.
"""

import math
from types import ModuleType
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands
from attn_core.masks import block_map, leaves, mask as mask_lib, selected
from attn_core.types import AttentionSpec, BlockSizes, Operands, cdiv

_NAME = "masks.selected_blocks or masks.selected_keys"
LANES = 128
SUBLANES = 8  # keys of a register
WORD = 32  # bits
QUERIES, KEYS = "block_q", "block_kv"  # fields of `leaves.Selected`


class Layout(NamedTuple):
  """Tokens of a call and of its tiles, and of the blocks of keys that the words of bits are for."""

  queries: int  # T
  keys: int  # S
  tile_q: int
  tile_kv: int
  block_kv: int | None = None  # whole tiles; None: as many as fill whole words

  @property
  def lengths(self) -> tuple[int, int]:
    """(T, S)."""
    return self.queries, self.keys


def refusal(mask: mask_lib.Mask, chips: str = "TPUs") -> str | None:
  """Returns why the kernels cannot follow the lists of a mask; None: they can, or it has none.

  Args:
    mask: with anything in place of its arrays.
    chips: that the kernels are for, as an error says it.
  """
  _, rest = selected.split(mask)
  if any(isinstance(x, leaves.Selected) for x in mask_lib.nodes(rest)):
    return (f"{_NAME} under `|`, `~` or masks.placed: the kernels for {chips} follow lists joined "
            "by `&`")
  return None


def refusal_of_sizes(mask: mask_lib.Mask, lengths: tuple[int, int], sizes: BlockSizes,
                     chips: str) -> str | None:
  """Returns why the kernels cannot compute blocks of the sizes that a caller gives; None: they can.

  Args:
    mask, lengths, chips: as in `refusal`.
    sizes: None fields are not given.
  """
  for field in (QUERIES, KEYS):
    size = getattr(sizes, field)
    if size and (most := divisor(mask, field, lengths)) % size:
      return (f"block_sizes.{field}={size} with {_NAME} of {field}={most}: the kernels for {chips} "
              f"compute blocks within a listed one; give a divisor of {most}, or None")
  if sizes.block_kv and sizes.block_kv & sizes.block_kv - 1 and with_bits(mask, lengths):
    return (f"block_sizes.{KEYS}={sizes.block_kv} with {_NAME} of blocks of no multiple of {LANES} "
            f"tokens: the kernels for {chips} read bits of a power of two of keys; give 64, 128, "
            "256 or None")
  return None


def is_whole(node: leaves.Selected, lengths: tuple[int, int]) -> bool:
  """Whether a block of a kernel may lie in one listed block.

  Args:
    node: the lists.
    lengths: (T, S).
  """
  return all(not size % LANES or size >= length
             for size, length in zip((node.block_q, node.block_kv), lengths))


def with_bits(mask: mask_lib.Mask, lengths: tuple[int, int]) -> tuple[leaves.Selected, ...]:
  """Returns the lists of which a kernel reads `bits`, since a tile may lie in several blocks.

  Args:
    mask: the mask.
    lengths: (T, S).
  """
  return tuple(x for x in selected.split(mask)[0] if not is_whole(x, lengths))


def divisor(mask: mask_lib.Mask, field: str, lengths: tuple[int, int]) -> int:
  """Returns the greatest common divisor of the listed blocks in which blocks of a kernel lie.

  0: there are none that are shorter than all tokens, and any block will do.

  Args:
    mask: the mask.
    field: QUERIES or KEYS.
    lengths: (T, S), tokens.
  """
  sizes = (getattr(x, field) for x in selected.split(mask)[0] if is_whole(x, lengths))
  return math.gcd(*(n for n in sizes if n < lengths[field == KEYS]))


def heads_of_a_list(mask: mask_lib.Mask) -> int:
  """Returns how many consecutive query heads have the same lists; 0: all."""
  return math.gcd(*(x.group for x in selected.split(mask)[0] if x.indices.shape[1] > 1))


def most_visited(mask: mask_lib.Mask, block_q: int, block_kv: int) -> int | None:
  """Returns the most blocks of keys that a block of queries sees; None: no list says.

  Args:
    mask: the mask.
    block_q: queries of a block.
    block_kv: keys of a block.
  """
  lists, _ = selected.split(mask)
  return min((min(x.indices.shape[2], _overlapped(block_q, x.block_q)) * x.indices.shape[3]
              * _overlapped(x.block_kv, block_kv) for x in lists), default=None)


def _overlapped(size: int, block: int) -> int:
  """Returns the most blocks that `size` tokens, which start at a multiple of it, overlap."""
  if size % block and block % size:
    return cdiv(size - 1, block) + 1
  return max(size // block, 1)


def of_local_rows(operands: Operands, spec: AttentionSpec) -> tuple[Operands, AttentionSpec]:
  """Returns a call whose lists are those of its own batch rows and heads.

  Args:
    operands: `mask.batch_index` and `mask.head_offset` say which rows and heads of all these are.
    spec: what is computed.
  """
  mask = dense_operands.mask_of(operands, spec)
  if not selected.split(mask)[0]:
    return operands, spec
  heads = operands.query.shape[2]
  rows, first = operands.mask.batch_index, operands.mask.head_offset

  def local(node: mask_lib.Mask) -> mask_lib.Mask:
    if not isinstance(node, leaves.Selected):
      return node
    lists, group = jnp.asarray(node.indices), node.group
    if lists.shape[0] > 1 and rows is not None:
      lists = lists.at[rows].get(mode="promise_in_bounds")
    if lists.shape[1] > 1 and first is not None:
      group = math.gcd(node.group, heads)
      head = jnp.arange(0, heads, group, dtype=jnp.int32)[None] + first[:, None]
      row = jnp.arange(lists.shape[0], dtype=jnp.int32)[:, None]
      lists = lists.at[row, head // node.group].get(mode="promise_in_bounds")
    return leaves.Selected(lists, node.block_q, node.block_kv, group)

  return _with_mask(operands, spec, mask_lib.map_nodes(local, mask))


def shapes_of_local_rows(operands: Operands, spec: AttentionSpec) -> tuple[Operands, AttentionSpec]:
  """`of_local_rows` of shapes and dtypes in place of arrays."""
  if not selected.split(dense_operands.mask_of(operands, spec))[0]:
    return operands, spec
  found: list[AttentionSpec] = []
  def run(operands: Operands) -> Operands:
    operands, spec_of_rows = of_local_rows(operands, spec)
    found.append(spec_of_rows)
    return operands
  return jax.eval_shape(run, operands), found[0]


def without_lists(operands: Operands, spec: AttentionSpec) -> tuple[Operands, AttentionSpec]:
  """Returns a call with the part of its mask that a kernel evaluates in visited blocks."""
  lists, rest = selected.split(dense_operands.mask_of(operands, spec))
  return _with_mask(operands, spec, rest) if lists else (operands, spec)


def _with_mask(operands: Operands, spec: AttentionSpec,
               mask: mask_lib.Mask) -> tuple[Operands, AttentionSpec]:
  arrays, structure = jax.tree.flatten(mask)
  return (operands._replace(mask=operands.mask._replace(arrays=tuple(arrays))),
          spec._replace(mask=structure))


def visited(kinds: jax.Array | np.ndarray, lists: tuple[leaves.Selected, ...], layout: Layout,
            heads: int = 1) -> jax.Array | np.ndarray:
  """Returns the kinds of tiles [B or 1, steps or 1, ..] of a mask, EMPTY outside of its lists.

  Args:
    kinds: those of the rest of the mask.
    lists: of the rows and heads of the call, or ().
    layout: of the tiles.
    heads: query heads of a step, which have the same list.
  """
  xp = np if isinstance(kinds, np.ndarray) and all(
      isinstance(x.indices, np.ndarray) for x in lists) else jnp
  for node in lists:
    if is_whole(node, layout.lengths):
      found = tiles(node, layout, heads, xp)
      kinds = xp.where(found, kinds, block_map.EMPTY)
    else:
      seen, whole = (_by_step(node, x, heads, xp) for x in _tiles_of_bits(node, layout, xp))
      partial = xp.minimum(kinds, block_map.PARTIAL)
      kinds = xp.where(seen, xp.where(whole, kinds, partial), block_map.EMPTY)
  return kinds


def tiles(node: leaves.Selected, layout: Layout, heads: int,
          xp: ModuleType) -> jax.Array | np.ndarray:
  """Returns which tiles are in listed blocks.

  Args:
    node: lists of the rows and heads of a call.
    layout: of the tiles, each of which lies in one listed block.
    heads: query heads of a step, which have the same list.
    xp: numpy, or jax.numpy if a list is traced.

  Returns:
    bool [B or 1, steps of all heads or 1, tiles of queries, tiles of keys].
  """
  rows, columns = (np.arange(0, length, size, dtype=np.int32) // block for length, size, block in
                   zip(layout.lengths, (layout.tile_q, layout.tile_kv),
                       (node.block_q, node.block_kv)))
  listed = _named(xp.asarray(node.indices), cdiv(layout.keys, node.block_kv), xp)
  listed = xp.take(xp.take(listed, rows, axis=2), columns, axis=3)
  return _by_step(node, listed, heads, xp)


def _by_step(node: leaves.Selected, found: jax.Array | np.ndarray, heads: int,
             xp: ModuleType) -> jax.Array | np.ndarray:
  """Repeats what is known of lists [B or 1, lists, ..] for the steps of all heads, if several."""
  return xp.repeat(found, node.group // heads, axis=1) if found.shape[1] > 1 else found


def _named(indices: jax.Array | np.ndarray, count: int,
           xp: ModuleType) -> jax.Array | np.ndarray:
  """Returns which of `count` blocks each list [.., k] names: bool [.., count]."""
  if xp is not np:
    return (indices[..., None] == _numbers(count, indices.ndim + 1)).any(-2)
  # Without an array of all pairs, which XLA does not make either.
  named = np.zeros((*indices.shape[:-1], count + 1), bool)
  exists = (indices >= 0) & (indices < count)
  np.put_along_axis(named, np.where(exists, indices, count), True, -1)
  return named[..., :count]


def _numbers(count: int, ndim: int) -> np.ndarray:
  """Returns int32 [1, .., 1, count] of a rank: JAX may be told to refuse arrays of several."""
  return np.arange(count, dtype=np.int32).reshape(*[1] * (ndim - 1), count)


# --- Lists of blocks of any size. -----------------------------------------------------------------


def bit_keys(node: leaves.Selected, layout: Layout) -> int:
  """Returns the keys of a bit, which divide those of a tile: a multiple of 8, or 1, 2 or 4."""
  size = math.gcd(_listed_keys(node, layout), layout.tile_kv)
  return size if size % SUBLANES == 0 else math.gcd(size, SUBLANES)


def words_of_block(node: leaves.Selected, layout: Layout) -> int:
  """Returns the words of a query and a block of keys."""
  return cdiv(_block_kv(node, layout) // bit_keys(node, layout), WORD)


def _block_kv(node: leaves.Selected, layout: Layout) -> int:
  """Returns the keys of a block of `Layout`."""
  return layout.block_kv or math.lcm(layout.tile_kv, WORD * bit_keys(node, layout))


def bits(node: leaves.Selected, layout: Layout) -> jax.Array | np.ndarray:
  """Returns which keys each query lists, a bit for `bit_keys` of them.

  They take a word for up to 32 * bit_keys of the keys of a block: with listed blocks of 64 keys and
  blocks of 1,024 a word, S / 256 bytes a query and list; with listed keys S / 8 bytes.

  Args:
    node: lists of the rows and heads of a call.
    layout: the words of a block of keys start with its first bit in their lowest one.

  Returns:
    int32 [B or 1, lists, blocks of keys * words of a block, T], NumPy's if the lists are.
  """
  size, words = bit_keys(node, layout), words_of_block(node, layout)
  block_kv = _block_kv(node, layout)
  of_block, blocks = block_kv // size, cdiv(layout.keys, block_kv)
  # The numbers of the bits of each entry, those of none in place of -1.
  parts = _listed_keys(node, layout) // size
  xp = np if isinstance(node.indices, np.ndarray) else jnp
  indices = xp.asarray(node.indices)
  exists = (indices >= 0) & (indices < cdiv(layout.keys, node.block_kv))
  number = (xp.where(exists, indices, blocks * of_block)[..., None] * np.int32(parts)
            + _numbers(parts, indices.ndim + 1)).reshape(*indices.shape[:-1], -1)
  if xp is np:
    named = _named(number, blocks * of_block, np).reshape(*number.shape[:-1], blocks, of_block)
    named = np.pad(named, [(0, 0)] * 4 + [(0, words * WORD - of_block)])
    packed = np.packbits(named, -1, "little").view("<u4").view(np.int32)
    found: jax.Array | np.ndarray = packed.reshape(*number.shape[:-1], -1).swapaxes(-1, -2)
  else:
    # By comparing each entry with each word: XLA for TPUs writes single elements one by one.
    number = number.swapaxes(-1, -2)
    block, bit = number // of_block, number % of_block
    at = (block * words + bit // WORD)[:, :, None]
    of_word = at == _numbers(blocks * words, at.ndim - 2)[..., None, None]
    bit = lax.shift_left(jnp.int32(1), bit % WORD)[:, :, None]
    found = lax.reduce_or(jnp.where(of_word, bit, 0), (3,))
  return xp.repeat(found, node.block_q, axis=-1)[..., :layout.queries]


def _tiles_of_bits(node: leaves.Selected, layout: Layout, xp: ModuleType,
                   ) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]:
  """Returns (tiles of which a pair is listed, tiles of which all are), bool [.., tiles, tiles]."""
  words, size = bits(node, layout), bit_keys(node, layout)
  padding = [(0, 0)] * 3 + [(0, -layout.queries % layout.tile_q)]
  words = xp.pad(xp.asarray(words), padding).reshape(*words.shape[:3], -1, layout.tile_q)
  joined = xp.bitwise_or.reduce(words, axis=-1), xp.bitwise_and.reduce(words, axis=-1)

  def of_tiles(words: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Unpacks [.., blocks of keys * words, tiles of queries] to [.., tiles, tiles, bits]."""
    *leading, _, rows = words.shape
    words = words.reshape(*leading, -1, words_of_block(node, layout), 1, rows)
    known = (words >> _numbers(WORD, words.ndim - 1)[..., None]) & 1 != 0
    known = known.reshape(*known.shape[:-3], -1, rows)[..., :_block_kv(node, layout) // size, :]
    known = known.reshape(*leading, -1, layout.tile_kv // size, rows)
    return xp.moveaxis(known, -1, -3)[..., :cdiv(layout.keys, layout.tile_kv), :]

  return xp.any(of_tiles(joined[0]), axis=-1), xp.all(of_tiles(joined[1]), axis=-1)


def _listed_keys(node: leaves.Selected, layout: Layout) -> int:
  """Returns the keys of a listed block, of which there is one in whole tiles if it has all."""
  if node.block_kv >= layout.keys:
    return cdiv(layout.keys, layout.tile_kv) * layout.tile_kv
  return node.block_kv
