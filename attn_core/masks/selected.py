# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks by indices: constructors, their checks, and the list that a kernel may follow."""

from typing import NamedTuple

import jax
from jax.typing import ArrayLike
import numpy as np

from attn_core import checks
from attn_core.masks import leaves, mask as mask_lib
from attn_core.masks.mask import Array, Mask
from attn_core.types import cdiv


def selected_blocks(indices: ArrayLike, block_q: int, block_kv: int) -> Mask:
  """The key blocks that a list for each query block names.

  >>> from attn_core import masks
  >>> lists = np.array([[[[0, -1], [1, 0]]]])
  >>> print(masks.show(masks.selected_blocks(lists, 2, 2), 4))  # doctest: +ELLIPSIS
  selected(indices int32[1, 1, 2, 2], block_q=2, block_kv=2)
  ...
  0 |##..|
    |##..|
    |####|
    |####|
  ...

  Trainable sparse attention selects blocks so: Native Sparse Attention with `block_q` 1
  (https://arxiv.org/abs/2502.11089), Mixture of Block Attention (https://arxiv.org/abs/2502.13189).
  Combine it with `causal()`, as the call does by default: the last block of a query usually
  extends past it. Blocks are counted by rows and columns, whatever the positions. The kernels for
  TPUs and for Hopper visit the listed blocks and no others where both blocks are multiples of 128
  tokens. Of any other blocks they visit the tiles that some query of a tile lists, and read a bit
  for each query and key block. For each list of a batch row and head these take on TPUs T * S / 256
  bytes, or if that is more T * S / (8 * n), where n is the greatest power of two that divides
  block_kv; on Hopper the latter, with n up to a block of the kernel, 64 or 128 keys.

  Args:
    indices: int32 [B or 1, K or 1, num_query_blocks, k], numbers of key blocks; H query heads in
      place of K key heads if each has lists of its own. -1 names none, and a block named several
      times counts once.
    block_q: queries of a query block (tokens); the last one may be shorter.
    block_kv: keys of a key block (tokens); the last one may be shorter.

  Raises:
    ValueError: `indices` have another rank or dtype, or hold a known number below -1; a block is
      not a static int >= 1; in a call, where rows, heads or query blocks do not fit, or a known
      number is not that of a key block.
  """
  for name, size in (("block_q", block_q), ("block_kv", block_kv)):
    checks.integer(f"selected_blocks: {name}", size, "an int >= 1 (tokens)", lambda x: x >= 1)
  expected = "int32 [B or 1, K or 1, num_query_blocks, k], -1 for no block"
  array = _lists("selected_blocks", indices, (4,), expected)
  return leaves.Selected(array, int(block_q), int(block_kv), 1)


def selected_keys(indices: ArrayLike) -> Mask:
  """The keys that a list for each query names.

  >>> from attn_core import masks
  >>> lists = np.array([[[0, -1], [0, 1], [2, 0], [3, 1]]])
  >>> print(masks.show(masks.selected_keys(lists), 4))  # doctest: +ELLIPSIS
  selected(indices int32[1, 1, 4, 2], block_q=1, block_kv=1)
  ...
  0 |#...|
    |##..|
    |#.#.|
    |.#.#|
  ...

  The top-k tokens of an indexer, as in DeepSeek Sparse Attention of DeepSeek-V3.2
  (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp). The kernels for TPUs and for Hopper compute
  all keys of the tiles that some query of a tile lists, and read a bit for each query and key,
  T * S / 8 bytes.
  `multi_latent_attention` gathers the listed latent rows of each query, once for all heads; while
  decoding it reads no other row of a cache that is not in 8 bits, where all its lists together
  name fewer keys than it has slots.

  Args:
    indices: int32 [B or 1, T, k], numbers of keys by column; [B or 1, K or 1, T, k] if every key
      head, or query head, has lists of its own. -1 names none, and a key named several times
      counts once.

  Raises:
    ValueError: as `selected_blocks`.
  """
  expected = "int32 [B or 1, T, k] or [B or 1, K or 1, T, k], -1 for no key"
  array = _lists("selected_keys", indices, (3, 4), expected)
  return leaves.Selected(array[:, None] if array.ndim == 3 else array, 1, 1, 1)


def _lists(function: str, indices: ArrayLike, ranks: tuple[int, ...], expected: str) -> Array:
  """Returns lists of numbers as int32, after checking what is known of them."""
  array = checks.as_array(f"{function}: indices", indices, expected)
  if not np.issubdtype(array.dtype, np.integer) or array.ndim not in ranks:
    raise ValueError(f"{function}: indices have dtype {array.dtype} and shape {array.shape}; "
                     f"expected {expected}")
  array = checks.int32(f"{function}: indices", array, expected)
  checks.require(array.shape[-1] >= 1, f"{function}: indices", checks.describe(array),
                 f"{expected}, k >= 1")
  if not isinstance(array, jax.core.Tracer) and array.size:
    lowest = int(np.asarray(array).min())
    checks.require(lowest >= -1, f"{function}: indices", f"the number {lowest}", expected)
  return array


def fitted(mask: Mask, shape: tuple[int, ...]) -> Mask:
  """Returns a mask whose lists know how many query heads share each of them.

  Args:
    mask: any mask.
    shape: (B, H, T, S) of the call.

  Raises:
    ValueError: lists do not fit the shape, or a known number is not that of a key block.
  """
  batch, heads, queries, keys = shape

  def fit(node: Mask) -> Mask:
    if not isinstance(node, leaves.Selected):
      return node
    rows, lists, blocks, _ = node.indices.shape
    expected = (f"int32 [B or 1, K or 1, num_query_blocks, k] with B = {batch}, a divisor of the "
                f"{heads} query heads and {cdiv(queries, node.block_q)} blocks of {node.block_q} "
                f"for {queries} queries")
    checks.require(
        rows in (1, batch) and lists and not heads % lists
        and blocks == cdiv(queries, node.block_q), "mask: indices of selected blocks or keys",
        checks.describe(node.indices), expected)
    if not isinstance(node.indices, jax.core.Tracer) and node.indices.size:
      highest, count = int(np.asarray(node.indices).max()), cdiv(keys, node.block_kv)
      checks.require(highest < count, "mask: indices of selected blocks or keys",
                     f"the number {highest}", f"numbers below {count}: {keys} keys in blocks of "
                     f"{node.block_kv}")
    return leaves.Selected(node.indices, node.block_q, node.block_kv, heads // lists)

  return mask_lib.map_nodes(fit, mask)


class Followed(NamedTuple):
  """A mask as a list that a kernel follows, and the rest that it evaluates."""

  lists: leaves.Selected
  rest: Mask


def follow(mask: Mask) -> Followed | None:
  """Returns the shortest lists of which a mask is a conjunct, and the rest of it; None: no list."""
  lists, rest = split(mask)
  if not lists:
    return None
  shortest = min(range(len(lists)), key=lambda n: _length(lists[n]))
  for other in lists[:shortest] + lists[shortest + 1:]:
    rest = rest & other
  return Followed(lists[shortest], rest)


def split(mask: Mask) -> tuple[tuple[leaves.Selected, ...], Mask]:
  """Returns all lists of which a mask is a conjunct, and the rest of it."""
  match mask:
    case leaves.Selected():
      return (mask,), mask_lib.Full()
    case leaves.Positions(mask=inner) | leaves.Offset(mask=inner):
      lists, rest = split(inner)
      return (lists, mask_lib.with_children(mask, [rest])) if lists else ((), mask)
    case mask_lib.And(left, right):
      (ours, left_rest), (theirs, right_rest) = split(left), split(right)
      return (ours + theirs, left_rest & right_rest) if ours or theirs else ((), mask)
  return (), mask


def _length(lists: leaves.Selected) -> int:
  """Returns how many keys a list names at most (tokens)."""
  return lists.indices.shape[-1] * lists.block_kv
