"""From scores of queries and keys to what the softmax exponentiates, for every GPU kernel.

  logits = soft_cap(scale * scores) + bias, -inf where hidden

Exponentials are powers of two. Where logits are scores times a positive number, the scores stay as
they are and that number goes into the unit: exp(logit) = 2 ** (unit * number).
"""

from typing import NamedTuple

import jax.numpy as jnp

from attn_core.kernels.gpu.flash.tile_inputs import Extras, Feed
from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.masks import tile as tiles


class Logits(NamedTuple):
  """What is done to the scores of a tile."""

  feed: Feed
  biased: bool

  @property
  def plain(self) -> bool:
    """Whether logits are scores times a positive number."""
    spec = self.feed.spec
    return spec.logits_soft_cap is None and not self.biased and spec.softmax_scale > 0

  @property
  def unit(self) -> float:
    """exp(logit) = 2 ** (unit * what `of` returns)."""
    return LOG2E * (self.feed.spec.softmax_scale if self.plain else 1.0)

  def of(self, extras: Extras, tile: tiles.Tile, scores, masked: bool):
    """(logits / (unit * ln 2), d logit / d scaled score or None for 1) of float32 scores."""
    logits, slope, spec = scores, None, self.feed.spec
    if not self.plain:
      cap = spec.logits_soft_cap
      if cap is None:
        logits = logits * spec.softmax_scale
      else:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's own has 11 bits. A reciprocal is less
        # code than a quotient.
        rest = 1 / (1 + jnp.exp2(logits * (2 * LOG2E * spec.softmax_scale / cap)))
        logits, slope = cap - (2 * cap) * rest, 4 * (rest - rest * rest)
      if self.biased:
        logits = logits + self.feed.bias(extras, tile)
    if masked:
      if extras.poison is not None:
        logits = self.feed.poisoned(extras, tile, logits)
      logits = jnp.where(self.feed.visible(extras, tile), logits, -jnp.inf)
    return logits, slope
