# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of key blocks in the Pallas kernels, which visit the listed blocks and no others.

A block of a kernel lies in one listed block, and the heads of a step have one list: what the list
says of a block holds for all of its pairs: a kernel visits it or not, and evaluates the rest of the
mask only.

Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, https://arxiv.org/abs/2502.13189.
"""

import math
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common import dense_operands
from attn_core.masks import block_map, leaves, mask as mask_lib, selected
from attn_core.types import AttentionSpec, Operands, cdiv

LANES = 128
QUERIES, KEYS = "block_q", "block_kv"  # fields of `leaves.Selected`


def refusal(mask: mask_lib.Mask, lengths: tuple[int, int],
            chips: str = "TPUs") -> str | None:
  """Returns why the kernels cannot follow the lists of a mask; None: they can, or it has none.

  Args:
    mask: with anything in place of its arrays.
    lengths: (T, S).
    chips: that the kernels are for, as an error says it.
  """
  lists, rest = selected.split(mask)
  name = "masks.selected_blocks or masks.selected_keys"
  if any(isinstance(x, leaves.Selected) for x in mask_lib.nodes(rest)):
    return (f"{name} under `|`, `~` or masks.placed: the kernels for {chips} follow lists joined "
            "by `&`")
  for node in lists:
    for field, length in zip((QUERIES, KEYS), lengths):
      size = getattr(node, field)
      if size % LANES and size < length:
        return (f"{name} with {field}={size}: the kernels for {chips} follow lists of blocks of a "
                f"multiple of {LANES} tokens")
  return None


def divisor(mask: mask_lib.Mask, field: str, length: int) -> int:
  """Returns the greatest common divisor of the listed blocks that are shorter than a length.

  Blocks of a kernel must divide it. 0: no listed block is shorter, and any block will do.

  Args:
    mask: the mask.
    field: QUERIES or KEYS.
    length: T or S, tokens.
  """
  sizes = (getattr(x, field) for x in selected.split(mask)[0])
  return math.gcd(*(n for n in sizes if n < length))


def heads_of_a_list(mask: mask_lib.Mask) -> int:
  """Returns how many consecutive query heads have the same lists; 0: all."""
  return math.gcd(*(x.group for x in selected.split(mask)[0] if x.indices.shape[1] > 1))


def most_visited(mask: mask_lib.Mask, block_kv: int) -> int | None:
  """Returns the most blocks of keys that a block of queries sees; None: no list says.

  Args:
    mask: the mask.
    block_kv: keys of a block.
  """
  lists, _ = selected.split(mask)
  return min((x.indices.shape[-1] * cdiv(x.block_kv, block_kv) for x in lists), default=None)


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


def visited(kinds: jax.Array | np.ndarray, lists: tuple[leaves.Selected, ...],
            lengths: tuple[int, int], tile: tuple[int, int],
            heads: int = 1) -> jax.Array | np.ndarray:
  """Returns the kinds of tiles [B or 1, steps or 1, ..] of a mask, EMPTY outside of its lists.

  Args:
    kinds: those of the rest of the mask.
    lists: of the rows and heads of the call, or ().
    lengths, tile, heads: as in `tiles`.
  """
  if not lists:
    return kinds
  xp = np if isinstance(kinds, np.ndarray) and all(
      isinstance(x.indices, np.ndarray) for x in lists) else jnp
  return xp.where(tiles(lists, lengths, tile, heads, xp), kinds, block_map.EMPTY)


def tiles(lists: tuple[leaves.Selected, ...], lengths: tuple[int, int], tile: tuple[int, int],
          heads: int, xp: ModuleType) -> jax.Array | np.ndarray:
  """Returns which tiles are in listed blocks.

  Args:
    lists: at least one, of the rows and heads of a call.
    lengths: (T, S), tokens.
    tile: (queries, keys) of a tile, which lies in one listed block.
    heads: query heads of a step, which have the same list.
    xp: numpy, or jax.numpy if a list is traced.

  Returns:
    bool [B or 1, steps of all heads or 1, tiles of queries, tiles of keys].
  """
  found: jax.Array | np.ndarray | None = None
  for node in lists:
    rows, columns = (np.arange(0, length, size, dtype=np.int32) // block for length, size, block in
                     zip(lengths, tile, (node.block_q, node.block_kv)))
    count = cdiv(lengths[1], node.block_kv)
    listed = _named(xp.asarray(node.indices), count, xp)
    listed = xp.take(xp.take(listed, rows, axis=2), columns, axis=3)
    if listed.shape[1] > 1:
      listed = xp.repeat(listed, node.group // heads, axis=1)
    found = listed if found is None else found & listed
  assert found is not None
  return found


def _named(indices: jax.Array | np.ndarray, count: int,
           xp: ModuleType) -> jax.Array | np.ndarray:
  """Returns which of `count` blocks each list [.., k] names: bool [.., count]."""
  if xp is not np:
    return (indices[..., None] == np.arange(count, dtype=np.int32)).any(-2)
  # Without an array of all pairs, which XLA does not make either.
  named = np.zeros((*indices.shape[:-1], count + 1), bool)
  exists = (indices >= 0) & (indices < count)
  np.put_along_axis(named, np.where(exists, indices, count), True, -1)
  return named[..., :count]
