# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cotangent of a bias on Hopper, or of an array of the score mod: summed as it is broadcast.

  d_array = sum of P * (dP - delta) * d logit / d array

For a bias the last factor is the score mod's slope, without that of the soft cap.

For an array with a number per pair, a thread block owns a block of queries of one batch row and
head of the array, and sums each tile over the batch rows and heads that share it before it is
written once. For one with a number per key, it owns a block of keys and sums over all queries.
Arrays of the score mod with a number per query, per head or one at all have the sums over all keys
of each query, which XLA adds up further; so has a bias with one number for all keys, if the score
mod does more than add. The sums take no memory besides the gradient. Tables by distance are summed
by `backward_table`.

Another bias with one number for all keys needs no tiles. It shifts all logits of a row equally,
which changes only the lse and the weight of the sinks:

  d_bias[t] = sum over s of dS = d_lse + P_sink * delta
"""

from typing import Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common.backward import finite_lse
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import backward_sums, score_tiles, tiling as tiling_lib
from attn_core.kernels.gpu.flash.backward_common import Arrays
from attn_core.kernels.gpu.flash.backward_sums import Index, Step, Total
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.types import AttentionSpec, Operands


class Summed(NamedTuple):
  """The array whose cotangent is wanted."""

  number: int  # of an array of the score mod; `score_tiles.BIAS`: the bias
  shape: tuple[int, ...]
  dtype: DTypeLike

  @property
  def four(self) -> tuple[int, ...]:
    """The shape with an axis each for batch rows, heads, queries and keys."""
    return (*self.shape, *[1] * (4 - len(self.shape)))


def d_array(arrays: Arrays, operands: Operands, spec: AttentionSpec,
            summed: Summed) -> jax.Array:
  """Returns the cotangent of a bias, or of an array of the score mod, in its shape and dtype.

  `arrays` comes without block_list and tile_inputs.
  """
  (batch, queries, heads, _), own = operands.query.shape, summed.four
  by_keys = own[2] == 1 < own[3]
  whole_rows = by_keys or own[3] == 1
  if summed.number != score_tiles.BIAS and whole_rows:  # what shares a number is summed by XLA
    own = batch, heads, *own[2:]
  tilings = tiling_lib.make_bias_tilings(operands)
  tiling = tilings.key if by_keys else tilings.query
  plan = backward_sums.make_plan(summed.number, operands, own[:2],
                                 backward_sums.number_of_rows(tiling), whole_rows)
  # Whole blocks: copies of one dimension are clipped at the end of the array, not of a row, and
  # those of two need an array of whole tiles.
  rows = tiling.sizes.num_query_blocks * tiling.block_q
  columns = tiling.sizes.num_key_blocks * tiling.block_kv
  dtype = summed.dtype if jnp.dtype(summed.dtype).itemsize <= 4 else jnp.float32
  out = (jax.core.ShapedArray((*own[:2], columns if by_keys else rows), jnp.float32) if whole_rows
         else jax.core.ShapedArray((*own[:2], rows, columns), dtype))
  found = backward_sums.sum_tiles(_OfBlock, arrays, operands, spec, plan, tiling, out)
  if not whole_rows:
    return found[..., :queries, :tiling.keys].astype(summed.dtype)
  found = found[..., :tiling.keys] if by_keys else found[..., :queries]
  found = found[..., None, :] if by_keys else found[..., None]
  axes = [n for n, (size, wanted) in enumerate(zip(found.shape, summed.four)) if size != wanted]
  found = found.sum(axes) if axes else found
  return found.reshape(summed.shape).astype(summed.dtype)


def d_bias_of_rows(operands: Operands, lse: jax.Array, d_lse: jax.Array,
                   delta: jax.Array) -> jax.Array:
  """Returns the cotangent of a bias with one number for all keys.

  lse, d_lse and delta are [B, H, T].
  """
  total = d_lse
  if operands.sinks is not None:
    sink = operands.sinks[..., None]
    weights = jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - finite_lse(lse)))
    total = total + weights * delta
  total = jnp.where(lse == -jnp.inf, 0, total)[..., None]
  shape = operands.bias.shape
  summed = [axis for axis in range(4) if shape[axis] == 1]
  return total.sum(summed, keepdims=True).astype(operands.bias.dtype)


class _OfBlock(backward_sums.Work):
  """The tiles of a block of rows, summed where their array repeats."""

  def walk(self, run: Callable[[Step, Total], Total], total: Total,
           finish: Callable[[Total, Index], None]) -> jax.Array:
    """See `Work.walk`; a sum ends with all pairs of a column, or with everything."""
    pairs, columns = (mosaic.int32(n) for n in (
        self.plan.pairs, backward_sums.number_of_columns(self.tiling)))
    zero = mosaic.int32(0)
    if self.plan.whole_rows:
      def of_pair(pair: jax.Array, carry: tuple) -> tuple:
        begun, _ = carry
        return lax.fori_loop(
            zero, columns, lambda c, x: self.visit(run, pair, c, x[0] == begun, x), carry)
      number, total = lax.fori_loop(zero, pairs, of_pair, (zero, total))
      finish(total, zero)
      return number

    def of_column(column: jax.Array, number: jax.Array) -> jax.Array:
      def of_pair(pair: jax.Array, carry: tuple) -> tuple:
        fresh = carry[0] == 0 if self.plan.pairs == 1 else True
        return self.visit(run, pair, column, fresh, carry)
      number, found = lax.fori_loop(zero, pairs, of_pair, (number, total))
      finish(found, column)
      return number
    return lax.fori_loop(zero, columns, of_column, zero)

  def row(self, column: Index) -> jax.Array:
    return self.grid.block

  def target(self, out: Ref, column: Index, rows: int, columns: int) -> Ref:
    grid, own = self.grid, self.own_rows(column, self.warpgroup)
    if self.plan.whole_rows:
      return out.at[grid.batch, grid.head, own]
    return out.at[grid.batch, grid.head, own, pl.ds(column * columns, columns)]
