"""Which weights dropout keeps: a pure function of (key, batch, head, query, key position).

Nothing is drawn from a stream, so every mechanism, block size, platform and
sharding keeps the same weights, and a backward regenerates the mask instead of
storing it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks.leaves import Coordinates


def key_words(rng) -> jax.Array:
  """Two words that stand for a PRNG key.

  Args:
    rng: a key of `jax.random.key`, or the raw uint32 words of `jax.random.PRNGKey`.

  Returns:
    uint32 [1, 2].
  """
  words = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
  first, second = jnp.uint32(0x243F6A88), jnp.uint32(0x85A308D3)  # a zero key mixes to no zeros
  for i in range(words.shape[0]):
    first, second = _mix(first ^ words[i]), _mix(second + words[i] * np.uint32(0x9E3779B9))
  return jnp.stack([first, second])[None]


def keep_mask(words, at: Coordinates, dropout_prob: float):
  """Whether each weight is kept, with probability 1 - dropout_prob.

  Args:
    words: uint32 [2] or a pair of arrays that broadcast to the tile.
    at: global batch, head and positions, broadcastable to the tile.
    dropout_prob: in [0, 1).

  Returns:
    bool, of the tile's shape.
  """
  batch, head, query, key = (jnp.asarray(x).astype(jnp.uint32) for x in (
      at.batch, at.head, at.query_position, at.key_position))
  stream = _mix(_mix(words[0] + batch) + head)
  # The query enters by another function than the head, or the two could be exchanged.
  row = _mix(stream ^ _mix(query * np.uint32(0x9E3779B9) + words[1]))
  # Per element: a counter spread over all bits, then the last rounds of a 32-bit finaliser with
  # the row's number added in between, so that no two rows walk through the same sequence.
  x = (key * np.uint32(0x9E3779B9)) ^ row
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) + row
  x = x * np.uint32(0xC2B2AE35)
  return (x ^ (x >> 16)) >= np.uint32(min(round(dropout_prob * 2**32), 2**32 - 1))


def kept_scale(dropout_prob: float) -> float:
  """What the weights that are kept are multiplied by, so that their expected sum stays."""
  return 1 / (1 - dropout_prob)


def _mix(x):
  """The 32-bit finaliser of MurmurHash3: every input bit changes half of the output bits."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
