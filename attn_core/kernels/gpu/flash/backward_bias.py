"""The cotangent of the bias on Hopper: dS without the soft cap's slope, summed as it is broadcast.

A bias with a number for every pair: a block of threads owns a block of queries of one [B', H'] of
the bias, and adds up every tile over the batch rows and heads that share it before it is written
once. One with a number for every key: it owns a block of keys, and adds up all queries. In both,
one warpgroup copies, two compute, each its own half of what is owned; every sum has one owner and
one order, and nothing is held beside the gradient itself.

  scores = X Z^T;  dP = Y W^T:  X, Y the rows of Q and d_out, Z, W of K and V, or the other way

A number for all keys needs no tile. It moves all logits of a row alike, which changes the lse and,
with sinks, their weight, and nothing else:

  d_bias[t] = sum over s of dS = d_lse + P_sink * correction

Letters: B batch, T query length, S key length, H query heads, D query and key width, E value width;
R rows of a warpgroup, C columns of a tile: queries and keys, or where keys are owned the other way.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic, wgmma as products
from attn_core.kernels.gpu.flash import tiling as tuned
from attn_core.kernels.gpu.flash.backward_common import Arrays, Setting
from attn_core.kernels.gpu.flash.kernel_params import drain, place_of, setting_of
from attn_core.kernels.xla import tile_ops as steps
from attn_core.masks import block_map as blocks, tile as tiles
from attn_core.types import AttentionSpec, Operands, cdiv


class Inputs(NamedTuple):
  """References in global memory."""

  arrays: Arrays
  kinds: Any  # int32 [B or 1, H or 1, blocks of rows, blocks of columns]; see `masks.blocks`


class Scratch(NamedTuple):
  """Shared memory and barriers; a barrier is for every stage."""

  rows: tuple  # [2, R, D] and [2, R, E]
  columns: tuple  # [stages, C, D] and [stages, C, E]
  result: Any  # [2, R, C], or float32 [2, R] where rows are summed
  rows_full: Any
  rows_free: Any
  columns_full: Any
  columns_free: Any


class Shared(NamedTuple):
  """How the bias is shared: its axes of length 1 are sums."""

  batch: int  # B', 1 or B
  heads: int  # H', 1 or H
  summed_batch: int  # B / B'
  summed_heads: int  # H / H'
  whole_rows: bool  # whether all columns of a row are summed, too

  @property
  def pairs(self) -> int:
    """Batch rows and heads that are summed."""
    return self.summed_batch * self.summed_heads

  def of(self, batch, head, n):
    """Batch row and head of the n-th of them."""
    number = mosaic.int32(self.summed_heads)
    return (lax.div(n, number) if self.summed_batch > 1 else batch,
            lax.rem(n, number) if self.summed_heads > 1 else head)


def d_bias(arrays: Arrays, operands: Operands, spec: AttentionSpec, cuts: tuned.BiasCuts):
  """Like the bias, whose last axis is the keys; `arrays` without visits and extras."""
  bias = operands.bias
  cut = cuts.key if bias.shape[2] == 1 else cuts.query
  common, _, extras = setting_of(operands, spec, cut, by_keys=cut.by_keys)
  kinds = blocks.block_kinds(steps.mask_of(operands, spec), cut.sizes)
  kinds = jnp.asarray(kinds.swapaxes(-1, -2) if cut.by_keys else kinds, jnp.int32)
  (batch, _, heads, _), own = operands.query.shape, bias.shape
  shared = Shared(own[0], own[1], batch // own[0], heads // own[1], cut.by_keys)
  columns = cdiv(cut.keys, mosaic.COPIED_TOKENS) * mosaic.COPIED_TOKENS
  dtype = bias.dtype if bias.dtype.itemsize <= 4 else jnp.float32
  out = (jax.core.ShapedArray((*own[:2], columns), jnp.float32) if cut.by_keys else
         jax.core.ShapedArray((*own[:3], columns), dtype))
  found, = mosaic.call(
      functools.partial(_kernel, Setting(*common), shared), (out,),
      Inputs(arrays._replace(extras=extras), kinds), _scratch(cut, arrays.key.dtype, out.dtype),
      grid=own[0] * own[1] * _number_of_rows(cut), warpgroups=tuned.COMPUTING + 1,
      name="attn_core_backward_bias")
  return found[..., :cut.keys].reshape(own).astype(bias.dtype)


def d_bias_of_rows(operands: Operands, lse, d_lse, correction):
  """Of a bias with one number for all keys; lse, d_lse and correction [B, H, T]."""
  total = d_lse
  if operands.sinks is not None:
    sink = operands.sinks[..., None]
    weights = jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - steps.finite_lse(lse)))
    total = total + weights * correction
  total = jnp.where(lse == -jnp.inf, 0, total)[..., None]
  shape = operands.bias.shape
  summed = [axis for axis in range(4) if shape[axis] == 1]
  return total.sum(summed, keepdims=True).astype(operands.bias.dtype)


def _number_of_rows(cut: tuned.BackwardCut) -> int:
  return cut.sizes.num_key_blocks if cut.by_keys else cut.sizes.num_query_blocks


def _number_of_columns(cut: tuned.BackwardCut) -> int:
  return cut.sizes.num_query_blocks if cut.by_keys else cut.sizes.num_key_blocks


def _scratch(cut: tuned.BackwardCut, dtype, result_dtype) -> Scratch:
  number, rows, stages = tuned.COMPUTING, mosaic.ROW_TILE, cut.stages[0]
  columns = cut.block_q if cut.by_keys else cut.block_kv
  widths = cut.width, cut.value_width
  result = (plgpu.SMEM((number, rows), jnp.float32) if cut.by_keys else
            mosaic.operand((number, rows, columns), result_dtype))
  return Scratch(
      tuple(mosaic.operand((number, rows, width), dtype) for width in widths),
      tuple(mosaic.operand((stages, columns, width), dtype) for width in widths), result,
      plgpu.Barrier(num_arrivals=2 * number), plgpu.Barrier(num_arrivals=number),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_arrivals=number, num_barriers=stages))


def _kernel(setting: Setting, shared: Shared, inputs: Inputs, outputs, scratch: Scratch):
  warpgroup = lax.axis_index("warpgroup")
  work = _Work(setting, shared, inputs, scratch)

  # What is computed before the warpgroups part must fit into the registers of the one that copies.
  @pl.when(warpgroup == tuned.COMPUTING)
  def _():
    plgpu.set_max_registers(tuned.REGISTERS["copy"], action="decrease")
    work.copy()

  @pl.when(warpgroup < tuned.COMPUTING)
  def _():
    plgpu.set_max_registers(tuned.REGISTERS["compute"], action="increase")
    work.compute(*outputs)


class _Step(NamedTuple):
  """One tile of one batch row and head; int32."""

  number: Any  # of those before
  batch: Any
  head: Any
  column: Any  # block of columns
  masked: Any  # bool: whether something of it is hidden
  fresh: Any  # bool: whether the rows are those of another batch row or head than before


class _Work(NamedTuple):
  """What both kinds of warpgroups have in common."""

  setting: Setting
  shared: Shared
  inputs: Inputs
  scratch: Scratch

  @property
  def cut(self) -> tuned.BackwardCut:
    return self.setting.cut

  @property
  def warpgroup(self):
    """Its number; asked for anew, like the place: kept, they take registers that tiles need."""
    return lax.optimization_barrier(lax.axis_index("warpgroup"))

  @property
  def place(self):
    """See `setting.place_of`; batch row and head are those of the bias."""
    block = lax.optimization_barrier(lax.axis_index("block"))
    return place_of(block, self.shared.heads, _number_of_rows(self.cut))

  def walk(self, run, total=(), finish=lambda total, column: None):
    """Runs total = run(step, total) for every tile that shows something.

    Args:
      run: what is done.
      total: where every sum begins.
      finish: finish(total, column), at the end of every sum: all pairs of a column, or everything.

    Returns:
      How many tiles there were.
    """
    pairs, columns = (mosaic.int32(n) for n in (self.shared.pairs, _number_of_columns(self.cut)))
    zero = mosaic.int32(0)
    if self.shared.whole_rows:
      def of_pair(pair, carry):
        begun, _ = carry
        return lax.fori_loop(
            zero, columns, lambda c, x: self._visit(run, pair, c, x[0] == begun, x), carry)
      number, total = lax.fori_loop(zero, pairs, of_pair, (zero, total))
      finish(total, zero)
      return number

    def of_column(column, number):
      def of_pair(pair, carry):
        fresh = carry[0] == 0 if self.shared.pairs == 1 else True
        return self._visit(run, pair, column, fresh, carry)
      number, found = lax.fori_loop(zero, pairs, of_pair, (number, total))
      finish(found, column)
      return number
    return lax.fori_loop(zero, columns, of_column, zero)

  def _visit(self, run, pair, column, fresh, carry):
    """(number, total) after one tile, visited or not."""
    place, kinds = self.place, self.inputs.kinds
    batch, head = self.shared.of(place.batch, place.head, pair)
    kind = kinds[batch if kinds.shape[0] > 1 else 0, head if kinds.shape[1] > 1 else 0,
                 place.block, column]
    masked = kind == blocks.PARTIAL if self.setting.any_full else True
    def visit(carry):
      number, total = carry
      return number + 1, run(_Step(number, batch, head, column, masked, fresh), total)
    # A loop of one step or none: branches cannot hold what products need.
    return lax.fori_loop(mosaic.int32(0), jnp.where(kind == blocks.EMPTY, 0, 1).astype(jnp.int32),
                         lambda _, carry: visit(carry), carry)

  def slot(self, step: _Step):
    return lax.rem(step.number, mosaic.int32(self.cut.stages[0]))

  def sources(self):
    """The arrays of the rows and those of the columns, each D and E wide."""
    arrays = self.inputs.arrays
    both = (arrays.query, arrays.d_out), (arrays.key, arrays.value)
    return both[::-1] if self.cut.by_keys else both

  def heads_of(self, head):
    """Those of the arrays of rows and of columns."""
    key_head = lax.div(head, mosaic.int32(self.setting.group))
    return (key_head, head) if self.cut.by_keys else (head, key_head)

  def own_rows(self, warpgroup):
    first = self.place.block * (tuned.COMPUTING * mosaic.ROW_TILE) + warpgroup * mosaic.ROW_TILE
    return pl.ds(first, mosaic.ROW_TILE)

  def copy(self):
    """Fills the stages."""
    scratch, stages = self.scratch, self.cut.stages[0]
    row_arrays, column_arrays = self.sources()
    length = scratch.columns[0].shape[1]

    def fill(step: _Step, _):
      row_head, column_head = self.heads_of(step.head)
      def rows():
        pl.when(step.number > 0)(lambda: plgpu.barrier_wait(scratch.rows_free))
        for array, ring in zip(row_arrays, scratch.rows):
          for n in range(tuned.COMPUTING):
            plgpu.copy_gmem_to_smem(
                array.at[step.batch, self.own_rows(n), row_head], ring.at[n], scratch.rows_full)
      if step.fresh is True:
        rows()
      else:
        pl.when(step.fresh)(rows)
      slot = self.slot(step)
      pl.when(step.number >= stages)(lambda: plgpu.barrier_wait(scratch.columns_free.at[slot]))
      tokens = pl.ds(step.column * length, length)
      for array, ring in zip(column_arrays, scratch.columns):
        plgpu.copy_gmem_to_smem(array.at[step.batch, tokens, column_head], ring.at[slot],
                                scratch.columns_full.at[slot])
      return ()

    drain(scratch.columns_free, stages, self.walk(fill))

  def compute(self, out):
    """All tiles, and the copies of the sums."""
    shape = mosaic.ROW_TILE, self.scratch.columns[0].shape[1]
    self.walk(self.add, mosaic.filled(0, shape, mosaic.TILE), functools.partial(self.write, out))
    plgpu.wait_smem_to_gmem(0)

  def add(self, step: _Step, total):
    """total and the dS of a tile."""
    scratch, setting, slot = self.scratch, self.setting, self.slot(step)
    def change():
      pl.when(step.number > 0)(lambda: plgpu.barrier_arrive(scratch.rows_free))
      plgpu.barrier_wait(scratch.rows_full)
    if step.fresh is True:
      change()
    else:
      pl.when(step.fresh)(change)
    plgpu.barrier_wait(scratch.columns_full.at[slot])
    factors = lambda n: (scratch.rows[n].at[self.warpgroup], scratch.columns[n].at[slot].T)
    tile = lambda: self.tile(step)
    extras = self.inputs.arrays.extras
    scores, _ = products.beside(*factors(0))
    logits, _ = setting.logits_of(extras, tile, scores, step.masked)
    lse, correction = self.numbers(step, total.shape)
    # The bias comes after the soft cap: its slope is left out.
    d_weights, (_, weights) = setting.beside(
        *factors(1), lambda: setting.weigh(extras, tile, (logits, None), lse))
    total = total + setting.d_scores(weights, d_weights, correction)
    plgpu.barrier_arrive(scratch.columns_free.at[slot])
    return total

  def tile(self, step: _Step) -> tiles.Tile:
    rows, length = self.own_rows(self.warpgroup), self.scratch.columns[0].shape[1]
    own, others = (rows.start, rows.size), (step.column * length, length)
    query, key = (others, own) if self.cut.by_keys else (own, others)
    return tiles.Tile(step.batch, step.head, query[0], key[0], 1, query[1], key[1])

  def numbers(self, step: _Step, shape):
    """lse and correction of the queries, of a tile's shape."""
    tile = self.tile(step)
    axis, layout = (1, mosaic.COLUMNS) if self.cut.by_keys else (0, mosaic.ROWS)
    of = self.inputs.arrays.numbers
    queries = pl.ds(tile.query, tile.num_queries)
    return [lax.broadcast_in_dim(
        mosaic.load(of.at[n, step.batch, step.head, queries], layout), shape, [axis])
            for n in range(2)]

  def write(self, out, total, column):
    """Copies a sum to where it belongs."""
    place, rows = self.place, self.own_rows(self.warpgroup)
    result = self.scratch.result.at[self.warpgroup]
    target = out.at[place.batch, place.head, rows]
    if self.cut.by_keys:
      total = total.sum(axis=1)
    else:
      plgpu.wait_smem_to_gmem(0)
      target = out.at[place.batch, place.head, rows, pl.ds(column * total.shape[1], total.shape[1])]
    result[...] = total.astype(result.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, target)
