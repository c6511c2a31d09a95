"""Orders of a sequence that is cut into shards: which token stands where.

contiguous  shard r holds the tokens [r L, (r + 1) L)
zigzag      shard r holds piece r and piece 2 N - 1 - r of 2 N pieces: a head and a tail
striped     shard r holds the tokens r, r + N, r + 2 N, ...

where N shards hold L tokens each. Under a causal mask the queries of a contiguous shard see the
more, the later it comes; those of a zigzag or striped shard see as much as those of any other.
A model stays in a layout for its whole depth: tokens, positions, segment ids and labels go
`to_layout` once, and what comes out goes `from_layout`, or straight into a loss.

Striped: Brandon et al., https://arxiv.org/abs/2311.09431. Zigzag: as in Llama 3,
https://arxiv.org/abs/2407.21783.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks

LAYOUTS = ("contiguous", "zigzag", "striped")


def to_layout(x, layout: str, shards: int, axis: int = 1):
  """Permutes tokens from their natural order into a layout.

  Args:
    x: an array, or a pytree of arrays, with tokens along `axis`.
    layout: one of LAYOUTS.
    shards: N, the number of shards.
    axis: of the tokens.

  Returns:
    The same with the token `order(layout, length, shards)[i]` at place i.

  Raises:
    ValueError: an unknown layout, fewer than one shard, what is no array with such an axis, or a
      length that the layout does not divide.
  """
  return _permuted(x, layout, shards, axis, lambda order: order)


def from_layout(x, layout: str, shards: int, axis: int = 1):
  """The exact inverse of `to_layout`; same arguments and errors."""
  return _permuted(x, layout, shards, axis, np.argsort)


def _permuted(x, layout, shards, axis, which):
  checks.integer("axis", axis, "an int, the dimension of the tokens")
  def one(x):
    checks.array("x", x, f"with tokens along axis {axis}")
    checks.require(-x.ndim <= axis < x.ndim, "axis", f"{axis} with x {checks.describe(x)}",
                   f"a dimension of every array: -{x.ndim} to {x.ndim} - 1 of this one")
    tokens = order(layout, x.shape[axis], shards)
    return x if layout == "contiguous" else jnp.take(x, which(tokens), axis, unique_indices=True)
  return jax.tree.map(one, x)


def order(layout: str, length: int, shards: int) -> np.ndarray:
  """The token at every place.

  Args:
    layout: one of LAYOUTS.
    length: of the sequence (tokens).
    shards: N, the number of shards.

  Returns:
    int32 [length].

  Raises:
    ValueError: an unknown layout, or a length that the layout does not divide.
  """
  require_length("length", layout, length, shards)
  if layout == "contiguous":
    return numbers(length)
  return tokens_of(layout, length, shards, numbers(shards)).ravel()


def tokens_of(layout: str, length: int, shards: int, shard):
  """The tokens of some shards.

  Args:
    layout: one of LAYOUTS.
    length: of the whole sequence (tokens).
    shards: N, the number of shards.
    shard: int32 [n], numbers of shards; may be traced.

  Returns:
    int32 [n, length / N].
  """
  place, shard = numbers(length // shards), shard[:, None]
  if layout == "striped":
    return shard + shards * place
  if layout == "contiguous":
    return shard * len(place) + place
  half = len(place) // 2
  piece = place // max(half, 1)  # 0: of the head, 1: of the tail
  return ((1 - piece) * shard + piece * (2 * shards - 1 - shard)) * half + place % max(half, 1)


def numbers(count: int) -> np.ndarray:
  """int32 [count]: 0, 1, 2, ..."""
  return np.arange(count, dtype=np.int32)


def pieces(layout: str) -> int:
  """How many runs of neighbouring tokens a shard consists of, taking stripes for one."""
  return 2 if layout == "zigzag" else 1


def require_length(name: str, layout: str, length: int, shards: int) -> None:
  """Refuses what a layout cannot cut; the contiguous one takes any length, and so does one shard.

  Raises:
    ValueError: an unknown layout, fewer than one shard, or such a length.
  """
  if layout not in LAYOUTS:
    raise ValueError(f"layout={layout!r}: expected one of {', '.join(map(repr, LAYOUTS))}")
  if isinstance(shards, bool) or not isinstance(shards, (int, np.integer)) or shards < 1:
    raise ValueError(f"shards={shards!r}: expected at least 1, an int")
  unit = 1 if layout == "contiguous" or shards == 1 else shards * pieces(layout)
  if length % unit:
    below = length // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    raise ValueError(
        f"{name}={length}: expected a multiple of {unit} for layout {layout!r} over {shards} "
        f"shards; the nearest are {nearest}: pad before to_layout, with segment id -1 or behind a "
        "mask, or use layout 'contiguous', which is padded inside")
