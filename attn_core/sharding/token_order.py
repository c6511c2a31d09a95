# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Token orders of a sequence that is divided into shards: which token is at which index.

contiguous  shard r holds the tokens [r * length, (r + 1) * length)
zigzag      shard r holds pieces r and 2 * shards - 1 - r of 2 * shards pieces: a head and a tail
striped     shard r holds the tokens r, r + shards, r + 2 * shards, ...

where `length` is the number of tokens of a shard. Under a causal mask a contiguous shard has more
visible keys the later it comes; all zigzag or striped shards have about the same number.
A model keeps one order for its whole depth: tokens, positions, segment ids and labels are permuted
once by `permute_tokens`, and the outputs are permuted back by `unpermute_tokens`, or go straight
into a loss.

Striped: Brandon et al., https://arxiv.org/abs/2311.09431. Zigzag: as in Llama 3,
https://arxiv.org/abs/2407.21783.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.types import TokenOrder

TOKEN_ORDERS: tuple[TokenOrder, ...] = ("contiguous", "zigzag", "striped")


def permute_tokens(x: Any, layout: TokenOrder, shards: int, axis: int = 1) -> Any:
  """Permutes tokens from their natural order into a token order.

  Example (with 8 devices):
    >>> import jax.numpy as jnp
    >>> from attn_core import (OperationMetadata, RingConfig, create_mesh, from_layout,
    ...                        ring_attention, to_layout)
    >>> metadata = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, 8)),
    ...                              ring=RingConfig(layout="zigzag"))
    >>> x = to_layout(jnp.ones((1, 64, 2, 16)), "zigzag", shards=8)
    >>> output = ring_attention(x, x, x, metadata=metadata).attention_outputs
    >>> from_layout(output, "zigzag", shards=8).shape
    (1, 64, 2, 16)

  Args:
    x: an array, or a pytree of arrays, with tokens along `axis`.
    layout: one of TOKEN_ORDERS.
    shards: the number of shards.
    axis: the dimension of the tokens.

  Returns:
    The same arrays with token `order(layout, length, shards)[i]` at index i, sharded as before over
    Explicit mesh axes.

  Raises:
    ValueError: `layout` is unknown, `shards` is less than 1, a leaf of `x` is not an array or does
      not have the dimension `axis`, or the layout does not divide the number of tokens.
  """
  return _permuted(x, layout, shards, axis, lambda tokens: tokens)


def unpermute_tokens(x: Any, layout: TokenOrder, shards: int, axis: int = 1) -> Any:
  """Inverse of `permute_tokens`; same arguments and errors."""
  return _permuted(x, layout, shards, axis, np.argsort)


# The public names.
to_layout, from_layout = permute_tokens, unpermute_tokens


def _permuted(x: Any, layout: TokenOrder, shards: int, axis: int,
              indices: Callable[[np.ndarray], np.ndarray]) -> Any:
  """Takes `indices(order)` along `axis` of every leaf."""
  checks.integer("axis", axis, "an int, the dimension of the tokens")

  def permute_leaf(leaf: Any) -> Any:
    checks.array("x", leaf, f"with tokens along axis {axis}")
    checks.require(-leaf.ndim <= axis < leaf.ndim, "axis",
                   f"{axis} with x {checks.describe(leaf)}",
                   f"a dimension of every array: -{leaf.ndim} to {leaf.ndim} - 1 of this one")
    tokens = order(layout, leaf.shape[axis], shards)
    if layout == "contiguous":
      return leaf
    # JAX does not derive the sharding of a gather along a dimension that Explicit axes shard.
    sharding = jax.typeof(leaf).sharding
    place = (slice(None),) * (axis % leaf.ndim) + (indices(tokens),)
    return jnp.asarray(leaf).at[place].get(
        unique_indices=True, out_sharding=sharding if sharding.mesh.explicit_axes else None)

  return jax.tree.map(permute_leaf, x)


def order(layout: TokenOrder, length: int, shards: int) -> np.ndarray:
  """The token at every index of the permuted sequence.

  Args:
    layout: one of TOKEN_ORDERS.
    length: tokens of the whole sequence.
    shards: the number of shards.

  Returns:
    int32 [length].

  Raises:
    ValueError: `layout` is unknown, `shards` is less than 1, or the layout does not divide
      `length`.
  """
  require_length("length", layout, length, shards)
  if layout == "contiguous":
    return numbers(length)
  return np.asarray(tokens_of(layout, length, shards, numbers(shards))).ravel()


def tokens_of(layout: TokenOrder, length: int, shards: int,
              shard: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
  """The tokens of some shards.

  Args:
    layout: one of TOKEN_ORDERS.
    length: tokens of the whole sequence.
    shards: the number of shards.
    shard: int32 [num_shards], indices of shards; may be traced.

  Returns:
    int32 [num_shards, length / shards].
  """
  place, shard = numbers(length // shards)[None], shard[:, None]
  if layout == "striped":
    return shard + shards * place
  if layout == "contiguous":
    return shard * place.shape[1] + place
  half = place.shape[1] // 2
  piece = place // max(half, 1)  # 0: of the head, 1: of the tail
  return ((1 - piece) * shard + piece * (2 * shards - 1 - shard)) * half + place % max(half, 1)


def numbers(count: int) -> np.ndarray:
  """int32 [count]: 0, 1, 2, ..."""
  return np.arange(count, dtype=np.int32)


def pieces(layout: TokenOrder) -> int:
  """Number of runs of neighboring tokens in a shard, counting the stripes of a shard as one."""
  return 2 if layout == "zigzag" else 1


def require_length(name: str, layout: TokenOrder, length: int, shards: int) -> None:
  """Requires that a layout divides a length; "contiguous" and a single shard take any length.

  Args:
    name: the name of the length in errors.
    layout: one of TOKEN_ORDERS.
    length: tokens of the whole sequence.
    shards: the number of shards.

  Raises:
    ValueError: `layout` is unknown, `shards` is less than 1, or the layout does not divide
      `length`.
  """
  if layout not in TOKEN_ORDERS:
    raise ValueError(f"layout={layout!r}: expected one of {', '.join(map(repr, TOKEN_ORDERS))}")
  if isinstance(shards, bool) or not isinstance(shards, (int, np.integer)) or shards < 1:
    raise ValueError(f"shards={shards!r}: expected at least 1, an int")
  unit = 1 if layout == "contiguous" or shards == 1 else shards * pieces(layout)
  if length % unit:
    below = length // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    raise ValueError(
        f"{name}={length}: expected a multiple of {unit} for layout {layout!r} over {shards} "
        f"shards; the nearest are {nearest}: pad before to_layout, with segment id -1 or behind a "
        "mask, or use layout 'contiguous', which is padded internally")
