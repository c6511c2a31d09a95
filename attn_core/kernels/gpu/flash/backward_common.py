"""What the two kernels of the backward share: their arrays, and P and dS of a tile.

  P = exp(logits - lse);  dS = P * slope * (dP - correction),  slope = d logit / d scaled score

Letters: B batch, T query length, S key length, H query heads, K key heads, D query and key width,
E value width.
"""

from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp

from attn_core.masks import dropout
from attn_core.kernels.gpu import wgmma as products
from attn_core.kernels.gpu.flash import kernel_params as common
from attn_core.kernels.gpu.flash.tile_inputs import Extras
from attn_core.kernels.gpu.flash.block_list import Row, Visits


class Arrays(NamedTuple):
  """Arrays of a kernel, or its references to them in global memory."""

  query: Any  # [B, T, H, D]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  d_out: Any  # [B, T, H, E]
  # float32 [2, B, H, T]: the lse times log2(e), +inf where nothing was seen, and the correction.
  numbers: Any
  visits: Visits | None = None
  extras: Extras | None = None


class Setting(common.Setting):
  """And what the kernels of the backward compute alike."""

  @property
  def crowded(self) -> bool:
    """Whether P takes so many registers that no product can run beside its computation."""
    return self.feed.spec.logits_soft_cap is not None or self.drops

  def masked(self, row: Row, n):
    """Whether the n-th block of a row needs the mask; a bool where that is known for all."""
    if not (self.any_full and self.any_partial):
      return self.any_partial
    return n >= row.num_full

  def logits_of(self, extras: Extras, tile, scores, masked):
    """`Logits.of`, hidden where `masked` (see there); (logits, slope).

    Args:
      tile: () -> `tiles.Tile`; called where the tile's place matters.
      scores: float32, [queries, keys] or transposed, like the feed.
    """
    x, slope = self.logits.of(extras, tile() if self.logits.biased else None, scores, False)
    if masked is not False:
      hide = lambda x: jnp.where(self.feed.visible(extras, tile()), x, -jnp.inf)
      x = hide(x) if masked is True else lax.cond(masked, hide, lambda x: x, x)
    return x, slope

  def weigh(self, extras: Extras, tile, logits, lse):
    """What a tile's products take.

    Args:
      tile: as of `logits_of`.
      logits: what it returned.
      lse: float32 of the same shape, times log2(e).

    Returns:
      (P after dropout, without its scale; the factor that `d_scores` takes).
    """
    x, slope = logits
    weights = kept = jnp.exp2(x * self.logits.unit - lse)
    if self.drops:
      keep = self.feed.kept(extras, tile())
      # A weight is not negative: its sign is free to say that it is dropped.
      kept, weights = jnp.where(keep, weights, 0.0), jnp.where(keep, weights, -weights)
    return kept, weights if slope is None else weights * slope

  def beside(self, left, right, weigh):
    """(left @ right, weigh()), of references in shared memory, at the same time if possible."""
    if not self.crowded:
      return products.beside(left, right, weigh)
    found = lax.optimization_barrier(weigh())
    return products.beside(left, right)[0], found

  def d_scores(self, factor, d_weights, correction):
    """dS, all of one shape."""
    if not self.drops:
      return factor * (d_weights - correction)
    scale = dropout.kept_scale(self.feed.spec.dropout_prob)
    return factor * jnp.where(factor < 0, correction, d_weights * scale - correction)
