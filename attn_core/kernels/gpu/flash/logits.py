# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits from scores of queries and keys, for every GPU kernel.

  logits = soft_cap(scale * scores) + bias, -inf where hidden

Exponentials are powers of two. Where logits are scores times a positive number, the scores stay as
they are and that number goes into the unit: exp(logit) = 2 ** (unit * number).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs


class Logits(NamedTuple):
  """Computes the logits of a tile from its scores."""

  loader: Any  # `TileInputLoader`, or one for pages
  biased: bool

  @property
  def plain(self) -> bool:
    """Whether logits are scores times a positive number."""
    spec = self.loader.spec
    return spec.logits_soft_cap is None and not self.biased and spec.softmax_scale > 0

  @property
  def unit(self) -> float:
    """The unit of logits: exp(logit) = 2 ** (unit * what `compute` returns)."""
    return LOG2E * (self.loader.spec.softmax_scale if self.plain else 1.0)

  def compute(self, tile_inputs: TileInputs, tile: Any, scores: jax.Array,
              masked: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns (logits / (unit * ln 2), d logit / d scaled score or None for 1).

    Args:
      tile_inputs: references to the inputs of tiles.
      tile: `masks.tile.Tile`, or one of pages; None if it is not needed.
      scores: float32, of the tile's shape.
      masked: whether something of the tile may be hidden.
    """
    logits, slope, spec = scores, None, self.loader.spec
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
        logits = logits + self.loader.bias(tile_inputs, tile)
    if masked:
      if tile_inputs.nan_keys is not None:
        logits = self.loader.propagate_nan(tile_inputs, tile, logits)
      logits = jnp.where(self.loader.visible(tile_inputs, tile), logits, -jnp.inf)
    return logits, slope
