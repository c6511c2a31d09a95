# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Code that the kernels of the backward share: their arrays, and P and dS of a tile.

  P = exp(logits - lse);  dS = P * slope * (dP - delta),  slope = d logit / d scaled score
"""

from typing import Any, Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.gpu import wgmma
from attn_core.kernels.gpu.flash import kernel_params, score_tiles, tiling as tiling_lib
from attn_core.kernels.gpu.flash.block_list import BlockList, RowBlocks
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import dropout
from attn_core.masks.tile import Tile
from attn_core.score_mods import evaluate, tables


class Arrays(NamedTuple):
  """Arrays of a kernel, or references to them in global memory."""

  query: Any  # [B, T, H, D]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  d_out: Any  # [B, T, H, E]
  # float32 [2, B, H, T]: lse times log2(e), +inf for rows that attend to nothing, and delta, times
  # the scale of `BackwardParams.d_scores`.
  numbers: Any
  block_list: BlockList | None = None
  tile_inputs: TileInputs | None = None


class BackwardParams(kernel_params.KernelParams):
  """Static parameters, and the computations that all kernels of the backward share."""

  @property
  def marks_bits(self) -> bool:
    """Whether a bit of a factor says that its weight is dropped, since slopes may be negative."""
    return self.has_dropout and self.loader.spec.has_score_mod

  @property
  def weighs_alone(self) -> bool:
    """Whether P takes so many registers that no product can run during its computation."""
    spec = self.loader.spec
    return (spec.logits_soft_cap is not None or self.has_dropout
            or not evaluate.only_adds(spec.score_mod))

  @property
  def reads_late(self) -> bool:
    """Whether what a score mod reads is loaded after the scores are computed.

    Before that it would take registers that wide blocks do not leave where a step sums d_query, or
    computes the cotangent of a bias.
    """
    return (not self.tiling.by_keys and self.tiling.width > tiling_lib.WIDE
            and not evaluate.only_adds(self.loader.spec.score_mod))

  @property
  def registers_shared(self) -> tuple[int, int]:
    """Registers of two warpgroups that share their keys, of which the first computes logits."""
    spec = self.loader.spec
    capped = spec.logits_soft_cap is not None
    if self.loader.lists or capped and not evaluate.only_adds(spec.score_mod):
      return tiling_lib.REGISTERS_CROWDED
    return tiling_lib.REGISTERS_SHARED

  @property
  def reads_delta_late(self) -> bool:
    """Whether delta is loaded in each step, after dP, which leaves registers for logits."""
    return (self.reads_late and self.logits.biased
            and self.loader.spec.logits_soft_cap is not None)

  def masked(self, row: RowBlocks, n: jax.Array) -> jax.Array | bool:
    """Returns whether the n-th block of a row needs the mask; a bool if the same for all."""
    if not (self.any_full and self.any_partial):
      return self.any_partial
    return n >= row.num_full

  def logits_of(self, tile_inputs: TileInputs, tile: Callable[[], Tile], scores: jax.Array,
                masked: jax.Array | bool,
                by: int = score_tiles.SCORES) -> tuple[jax.Array, jax.Array | None]:
    """Returns (logits, slope) as `Logits.compute` does.

    Args:
      tile: () -> `tile_lib.Tile`; called where the tile's grid matters.
      scores: float32, [queries, keys] or transposed, like the loader.
      masked: as `masked` returns it.
      by: of the slope; see `score_tiles.apply`.
    """
    at = tile() if self.logits.reads_tile else None
    if at is not None and self.reads_late:
      scores, batch, head, query, key = lax.optimization_barrier(
          (scores, at.batch, at.head, at.query, at.key))
      at = at._replace(batch=batch, head=head, query=query, key=key)
    x, slope = self.logits.compute(tile_inputs, at, scores, False, by)
    if masked is not False:
      hide = lambda x: jnp.where(self.loader.visible(tile_inputs, tile()), x, -jnp.inf)
      x = hide(x) if masked is True else lax.cond(masked, hide, lambda x: x, x)
    return x, slope

  def weigh(self, tile_inputs: TileInputs, tile: Callable[[], Tile],
            logits: tuple[jax.Array, jax.Array | None],
            lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of a tile's products.

    Args:
      tile: as of `logits_of`.
      logits: (logits, slope), of `logits_of`.
      lse: float32 of the same shape, times log2(e).

    Returns:
      (P after dropout, without its scale; the factor that `d_scores` takes).
    """
    x, slope = logits
    has_function = evaluate.has_function(self.loader.spec.score_mod)
    weights = jnp.exp2(x * self.logits.unit - lse)
    # Of rows past the queries: a function may have no value there, and a table any.
    if has_function or tables.find(self.loader.spec.score_mod):
      weights = jnp.where(lse == jnp.inf, 0.0, weights)
    kept = weights
    keep = self.loader.keep_mask(tile_inputs, tile()) if self.has_dropout else None
    if keep is not None:
      kept = jnp.where(keep, weights, 0.0)
      if not self.marks_bits:  # a factor is not negative: its sign is free to say "dropped"
        weights = jnp.where(keep, weights, -weights)
    factor = weights if slope is None else weights * slope
    if has_function:  # whose slope may be infinite at hidden pairs
      factor = jnp.where(weights == 0.0, 0.0, factor)
    return kept, _mark(factor, keep) if keep is not None and self.marks_bits else factor

  def matmul_overlapped(self, left: Ref, right: Ref,
                        weigh: Callable[[], Any]) -> tuple[jax.Array, Any]:
    """Returns (left @ right, weigh()), overlapped if registers allow.

    Args:
      left: reference in shared memory.
      right: reference in shared memory.
      weigh: issues no product.
    """
    if not self.weighs_alone:
      return wgmma.matmul_overlapped(left, right, weigh)
    found = lax.optimization_barrier(weigh())
    return wgmma.matmul_overlapped(left, right)[0], found

  def d_scores(self, factor: jax.Array, d_weights: jax.Array, delta: jax.Array,
               scale: float = 1.0) -> jax.Array:
    """Returns dS times `scale`; all arrays have one shape.

    A product takes dS in 16 bits, and float16 ends at 65,504: dS is multiplied by the softmax scale
    before it is converted.

    Args:
      factor: the second result of `weigh`.
      d_weights: dP.
      delta: delta times `scale`, so that scaling dP and subtracting is one instruction.
      scale: the factor.
    """
    kept = scale
    if self.has_dropout:
      kept *= dropout.kept_scale(self.loader.spec.dropout_prob)
    difference = (d_weights if kept == 1.0 else d_weights * kept) - delta
    if self.has_dropout:
      dropped = _is_marked(factor) if self.marks_bits else factor < 0
      difference = jnp.where(dropped, -delta if self.marks_bits else delta, difference)
    return factor * difference


def _mark(x: jax.Array, keep: jax.Array) -> jax.Array:
  """Returns float32 numbers whose last bit says whether they are dropped."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  bits = jnp.where(keep, bits & np.int32(-2), bits | np.int32(1))
  return lax.bitcast_convert_type(bits, jnp.float32)


def _is_marked(x: jax.Array) -> jax.Array:
  return (lax.bitcast_convert_type(x, jnp.int32) & np.int32(1)) != 0
