# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits from scores of queries and keys, for every GPU kernel.

  logits = score_mod(soft_cap(scale * scores) + bias), -inf where hidden

Exponentials are powers of two. Where logits are scores times a positive number, the scores stay as
they are and that number goes into the unit: exp(logit) = 2 ** (unit * number).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.gpu.flash import score_forms, score_tiles
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs


class Logits(NamedTuple):
  """Computes the logits of a tile from its scores."""

  loader: Any  # `TileInputLoader`, or one for pages
  biased: bool

  @property
  def plain(self) -> bool:
    """Whether logits are scores times a positive number."""
    spec = self.loader.spec
    return (spec.logits_soft_cap is None and not self.biased and not spec.has_score_mod
            and spec.softmax_scale > 0)

  @property
  def reads_tile(self) -> bool:
    """Whether logits depend on more than scores."""
    return self.biased or self.loader.spec.has_score_mod

  @property
  def unit(self) -> float:
    """The unit of logits: exp(logit) = 2 ** (unit * what `compute` returns)."""
    return LOG2E * (self.loader.spec.softmax_scale if self.plain else 1.0)

  def compute(self, tile_inputs: TileInputs, tile: Any, scores: jax.Array, masked: bool,
              by: int | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Returns (logits / (unit * ln 2), a derivative of the logits, of the tile's shape; None: 1).

    Args:
      tile_inputs: references to the inputs of tiles.
      tile: `masks.tile.Tile`, or one of pages; None if it is not needed.
      scores: float32, of the tile's shape.
      masked: whether something of the tile may be hidden.
      by: of the derivative; see `score_tiles.apply`.
    """
    logits, slope, spec = scores, None, self.loader.spec
    if not self.plain:
      cap = spec.logits_soft_cap
      if cap is None:
        logits = logits * spec.softmax_scale
      else:
        logits, of_cap = score_forms.capped(logits, spec.softmax_scale, cap)
        slope = of_cap if by == score_tiles.SCORES else None
      if self.biased:
        logits = logits + self.loader.bias(tile_inputs, tile)
      if spec.has_score_mod:
        logits, slope = self.loader.modified(tile_inputs, tile, logits, by, slope)
    if masked:
      if tile_inputs.nan_keys is not None:
        logits = self.loader.propagate_nan(tile_inputs, tile, logits)
      logits = jnp.where(self.loader.visible(tile_inputs, tile), logits, -jnp.inf)
    return logits, slope
