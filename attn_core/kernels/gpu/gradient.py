"""What the two kernels of the backward share: their arrays, and P and dS of a tile.

  P = exp(logits - lse);  dS = P * slope * (dP - correction),  slope = d logit / d scaled score

Letters: B batch, T query length, S key length, H query heads, K key heads, D query and key width,
E value width.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core import dropout
from attn_core.kernels.gpu import mosaic, products, tuned
from attn_core.kernels.gpu.feed import Extras, Feed
from attn_core.kernels.gpu.logits import Logits
from attn_core.kernels.gpu.visits import Row, Visits, visits_of
from attn_core.masks import blocks
from attn_core.types import AttentionSpec, Operands


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


class Setting(NamedTuple):
  """What all parts of a kernel share."""

  cut: tuned.BackwardCut
  logits: Logits
  heads: int  # H
  group: int  # query heads of a key head
  any_full: bool  # whether there may be blocks without a mask
  any_partial: bool  # and with one
  interpret: bool

  @property
  def feed(self) -> Feed:
    return self.logits.feed

  @property
  def crowded(self) -> bool:
    """Whether P takes so many registers that no product can run beside its computation."""
    return self.feed.spec.logits_soft_cap is not None or bool(self.feed.spec.dropout_prob)

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
    if self.feed.spec.dropout_prob:
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
    if not self.feed.spec.dropout_prob:
      return factor * (d_weights - correction)
    scale = dropout.kept_scale(self.feed.spec.dropout_prob)
    return factor * jnp.where(factor < 0, correction, d_weights * scale - correction)


def setting_of(operands: Operands, spec: AttentionSpec,
               cut: tuned.BackwardCut) -> tuple[Setting, Visits, Extras]:
  """How a kernel computes, which blocks it visits and what it reads beside.

  Tiles of the kernel that sums over queries are [keys, queries].
  """
  mask = jax.tree.unflatten(spec.mask, operands.mask.arrays)
  kinds = blocks.block_kinds(mask, cut.sizes)
  block_map = blocks.block_map(kinds.swapaxes(-1, -2) if cut.by_keys else kinds)
  feed = Feed(spec, cut.sizes, transposed=cut.by_keys)
  heads = operands.query.shape[2]
  setting = Setting(cut, Logits(feed, operands.bias is not None), heads,
                    heads // operands.key.shape[2], block_map.any_full, block_map.any_partial,
                    mosaic.interpreted())
  return setting, visits_of(block_map), feed.pack(operands)


def drain(free, stages: int, filled):
  """Waits until all that was copied into a ring is free.

  Args:
    free: barriers of the ring's stages.
    stages: how many.
    filled: how many times one was filled, int32.
  """
  def wait(n, _):
    plgpu.barrier_wait(free.at[lax.rem(n, mosaic.int32(stages))])
    return ()
  lax.fori_loop(jnp.maximum(filled - stages, 0), filled, wait, ())
