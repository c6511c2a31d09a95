"""The forward of block-wise attention on Hopper.

A block of threads computes a block of queries of one head: one warpgroup copies blocks of keys and
values into a ring of stages, two compute, each its own half of the queries. The two take turns at
the tensor cores: while one exponentiates, the products of the other run.

  scores = Q K^T, from shared memory;  out = P V, with the weights P in registers

Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.

Letters: B batch, T query length, S key length, H query heads, K key heads, D query and key width,
E value width; R queries of a warpgroup, C keys of a block.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.masks import dropout
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import tiling as tuned
from attn_core.kernels.gpu.flash.tile_inputs import Extras
from attn_core.kernels.gpu.flash.kernel_params import (Place, Setting, drain, last_first, place_of, setting_of)
from attn_core.kernels.gpu.flash.block_list import Row, Visits
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.xla import tile_ops as steps
from attn_core.masks import leaves as algebra, tile as tiles
from attn_core.types import AttentionSpec, BlockSizes, Operands


class Inputs(NamedTuple):
  """References in global memory."""

  query: Any  # [B, T, H, D]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  shielded_value: Any  # the same for blocks of which something is hidden; None: `value`
  sinks: Any  # float32 [B or 1, H]; None: none
  # float32 [B, H, blocks of queries]: NaN where all queries of a block see a key of a block without
  # a mask that is not finite, else 0. The logit of such a key may be -inf, which shows nowhere.
  spoilt: Any
  visits: Visits
  extras: Extras


class Scratch(NamedTuple):
  """Shared memory and barriers; a barrier is for every warpgroup or for every stage."""

  query: Any  # [2, R, D]
  key: Any  # [stages, C, D]
  value: Any  # [stages, C, E]
  out: Any  # [2, R, E]; None: written where the queries were
  lse: Any  # float32 [2, R]
  query_full: Any
  key_full: Any
  value_full: Any
  key_free: Any
  value_free: Any
  turn: Any  # whose turn it is at the tensor cores


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  cut = tuned.choose(operands, spec, block_sizes)
  batch, queries, heads, _ = operands.query.shape
  setting, visits, extras = setting_of(operands, spec, cut)
  sinks = operands.sinks
  inputs = Inputs(
      mosaic.pack(operands.query, cut.width), mosaic.pack(operands.key, cut.width),
      mosaic.pack(operands.value, cut.value_width), None,
      None if sinks is None else sinks.astype(jnp.float32), None, visits, extras)
  inputs = _shielded(setting, inputs, operands, isinstance(
      steps.mask_of(operands, spec), algebra.Full) or not setting.any_partial)
  rows, dtype, out_dtype = (inputs.query.shape[1], operands.query.dtype,
                            steps.out_dtype(operands, spec))
  out, lse = mosaic.call(
      functools.partial(_kernel, setting),
      (jax.core.ShapedArray(
          (batch, rows if out_dtype == dtype else cut.sizes.num_query_blocks * cut.block_q, heads,
           cut.value_width), out_dtype),
       jax.core.ShapedArray((batch, heads, rows), jnp.float32)),
      inputs, _scratch(cut, dtype), grid=batch * heads * cut.sizes.num_query_blocks,
      warpgroups=tuned.COMPUTING + 1, name="attn_core_forward")
  return Residuals(out[:, :queries, :, :operands.value.shape[3]], lse[..., :queries])


def _shielded(setting: Setting, inputs: Inputs, operands: Operands, all_see_all: bool) -> Inputs:
  """So that keys and values that are not finite reach all who see them, and nobody else.

  0 * NaN is NaN, and would reach all queries: for blocks of which something is hidden, values that
  are not finite are 0, and make the logits of those who see them NaN. Keys are not copied, since
  the logits of what is hidden are replaced.

  Args:
    all_see_all: whether all queries see all keys they visit: values show by themselves then.
  """
  cut, finite = setting.cut, jnp.isfinite(operands.value)
  fine = steps.finite_keys(operands.key, operands.key if all_see_all else operands.value)[..., 0]
  poison = jnp.where(fine, 0.0, jnp.nan).astype(jnp.float32).transpose(0, 2, 1)
  poison = steps.pad_axis(poison, 2, steps.key_padding(cut.sizes))
  poisoned = jnp.isnan(poison).reshape(*poison.shape[:2], -1, cut.block_kv).any(-1)
  seen = inputs.visits.num_visited if all_see_all else inputs.visits.num_full
  spoilt = inputs.visits.any_of(jnp.repeat(poisoned, setting.group, 1), seen,
                                cut.sizes.num_query_blocks)
  inputs = inputs._replace(spoilt=jnp.where(spoilt, jnp.nan, 0.0).astype(jnp.float32))
  if all_see_all:
    return inputs
  return inputs._replace(
      shielded_value=mosaic.pack(jnp.where(finite, operands.value, 0), cut.value_width),
      extras=inputs.extras._replace(poison=poison, poisoned=poisoned.astype(jnp.int32)))


def _scratch(cut: tuned.Cut, dtype) -> Scratch:
  number, stages = tuned.COMPUTING, cut.stages
  of_stages = plgpu.Barrier(num_barriers=stages)
  free = plgpu.Barrier(num_arrivals=number, num_barriers=stages)
  out = None
  if cut.value_width != cut.width:
    out = mosaic.operand((number, cut.rows, cut.value_width), dtype)
  return Scratch(
      mosaic.operand((number, cut.rows, cut.width), dtype),
      mosaic.operand((stages, cut.block_kv, cut.width), dtype),
      mosaic.operand((stages, cut.block_kv, cut.value_width), dtype), out,
      plgpu.SMEM((number, cut.rows), jnp.float32), plgpu.Barrier(num_barriers=number),
      of_stages, of_stages, free, free, plgpu.Barrier(num_arrivals=number))


def _kernel(setting: Setting, inputs: Inputs, outputs, scratch: Scratch):
  place = _place(setting)
  visits = inputs.visits.of(*place)
  warpgroup = lax.axis_index("warpgroup")

  @pl.when(warpgroup == tuned.COMPUTING)
  def _():
    plgpu.set_max_registers(tuned.REGISTERS["copy"], action="decrease")
    _copy(setting, inputs, scratch, place, visits)

  @pl.when(warpgroup < tuned.COMPUTING)
  def _():
    plgpu.set_max_registers(tuned.REGISTERS["compute"], action="increase")
    _Compute(setting, inputs, scratch, warpgroup).run(visits, *outputs)


def _place(setting: Setting) -> Place:
  """Where this block of threads works; neighbours share keys.

  Asked for anew where it is needed: kept, it would take registers that the products need, and the
  barrier is what keeps the compiler from keeping it.
  """
  number = setting.cut.sizes.num_query_blocks
  block = lax.optimization_barrier(lax.axis_index("block"))
  return last_first(place_of(block, setting.heads, number), number)


def _copy(setting: Setting, inputs: Inputs, scratch: Scratch, place: Place, visits: Row):
  """Fills the stages with keys and values of the blocks to visit."""
  stages = mosaic.int32(setting.cut.stages)
  head = lax.div(place.head, mosaic.int32(setting.group))

  def fill(n, _):
    slot = lax.rem(n, stages)
    rows = pl.ds(visits.block(n) * setting.cut.block_kv, setting.cut.block_kv)
    def copy(source, ring, full):
      plgpu.copy_gmem_to_smem(source.at[place.batch, rows, head], ring.at[slot], full.at[slot])
    pl.when(n >= stages)(lambda: plgpu.barrier_wait(scratch.key_free.at[slot]))
    copy(inputs.key, scratch.key, scratch.key_full)
    pl.when(n >= stages)(lambda: plgpu.barrier_wait(scratch.value_free.at[slot]))
    if inputs.shielded_value is None:
      copy(inputs.value, scratch.value, scratch.value_full)
    else:
      for source, chosen in ((inputs.value, n < visits.num_full),
                             (inputs.shielded_value, n >= visits.num_full)):
        pl.when(chosen)(functools.partial(copy, source, scratch.value, scratch.value_full))
    return ()

  lax.fori_loop(mosaic.int32(0), visits.num_visited, fill, ())
  for free in (scratch.key_free, scratch.value_free):
    drain(free, setting.cut.stages, visits.num_visited)


class _Running(NamedTuple):
  """The softmax of the keys seen so far; see `kernels.softmax.Running`."""

  highest: Any  # [R]: logits times log2(e); -inf before the first visible key
  total: Any  # [R]
  output: Any  # [R, E]


class _Compute(NamedTuple):
  """What a computing warpgroup does."""

  setting: Setting
  inputs: Inputs
  scratch: Scratch
  kept: Any  # number of this warpgroup

  @property
  def warpgroup(self):
    """Its number; where the sums fill the registers, asked for anew like the place."""
    if self.setting.cut.value_width <= tuned.WIDE:
      return self.kept
    return lax.optimization_barrier(lax.axis_index("warpgroup"))

  def queries(self, place: Place | None = None):
    """(batch row, query head, first query) of this warpgroup."""
    cut, place = self.setting.cut, _place(self.setting) if place is None else place
    return (place.batch, place.head,
            place.block * cut.block_q + self.warpgroup * cut.rows)

  def take_turn(self):
    plgpu.barrier_arrive(self.scratch.turn)
    plgpu.barrier_wait(self.scratch.turn)

  def run(self, visits: Row, out, lse):
    """From the copy of the queries to the copy of the results."""
    cut, scratch = self.setting.cut, self.scratch
    full = scratch.query_full.at[self.warpgroup]
    batch, head, first = self.queries()
    plgpu.copy_gmem_to_smem(self.inputs.query.at[batch, pl.ds(first, cut.rows), head],
                            scratch.query.at[self.warpgroup], full)
    plgpu.barrier_wait(full)
    running = _Running(mosaic.filled(-jnp.inf, (cut.rows,), mosaic.ROWS),
                       mosaic.filled(0, (cut.rows,), mosaic.ROWS),
                       mosaic.filled(0, (cut.rows, cut.value_width), mosaic.TILE))
    # The second warpgroup begins half a step later.
    pl.when(self.warpgroup == 1)(self.take_turn)
    if self.setting.any_full:
      running = lax.fori_loop(mosaic.int32(0), visits.num_full,
                              lambda n, x: self.step(n, x, False), running)
    if self.setting.any_partial:
      running = lax.fori_loop(visits.num_full, visits.num_visited,
                              lambda n, x: self.step(n, x, True), running)
    pl.when(self.warpgroup == 0)(self.take_turn)
    self.write(running, out, lse)

  def step(self, n, running: _Running, masked: bool) -> _Running:
    """Folds in the n-th block of keys."""
    cut, scratch, setting = self.setting.cut, self.scratch, self.setting
    slot = lax.rem(n, mosaic.int32(cut.stages))
    tile = self.tile(n) if masked or not setting.logits.plain or setting.drops else None
    plgpu.barrier_wait(scratch.key_full.at[slot])
    scores = self.scores(slot)
    plgpu.barrier_arrive(scratch.key_free.at[slot])
    logits, _ = setting.logits.of(self.inputs.extras, tile, scores, masked)
    unit = setting.logits.unit
    highest = jnp.maximum(running.highest, logits.max(axis=1) * unit)
    # While a row has seen nothing, its highest is -inf, and -inf - -inf would be NaN.
    reference = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = jnp.exp2(logits * unit - self.along_rows(reference, logits.shape))
    shrink = jnp.exp2(running.highest - reference)
    total = running.total * shrink + weights.sum(axis=1)
    if setting.drops:
      weights = jnp.where(setting.feed.kept(self.inputs.extras, tile), weights, 0.0)
    weights = weights.astype(scratch.value.dtype)
    output = running.output * self.along_rows(shrink, running.output.shape)
    # The softmax ends here: the other's turn begins when this one's products are issued.
    highest, total, output, weights = lax.optimization_barrier((highest, total, output, weights))
    plgpu.barrier_arrive(scratch.turn)
    plgpu.barrier_wait(scratch.value_full.at[slot])
    plgpu.barrier_wait(scratch.turn)
    output = mosaic.accumulate(output, weights, scratch.value.at[slot],
                               interpret=setting.interpret)
    plgpu.barrier_arrive(scratch.value_free.at[slot])
    return _Running(highest, total, output)

  def tile(self, n) -> tiles.Tile:
    """This warpgroup's queries and the n-th block of keys."""
    cut, place = self.setting.cut, _place(self.setting)
    key = self.inputs.visits.block(*place, n) * cut.block_kv
    return tiles.Tile(*self.queries(place), key, 1, cut.rows, cut.block_kv)

  def scores(self, slot):
    """Q K^T: float32 [R, C]."""
    cut, scratch = self.setting.cut, self.scratch
    def product(sums):
      plgpu.wgmma(sums, scratch.query.at[self.warpgroup], scratch.key.at[slot].T)
      self.take_turn()
      return sums[...]
    return pl.run_scoped(product, plgpu.ACC((cut.rows, cut.block_kv), jnp.float32))

  def along_rows(self, x, shape):
    """[R] -> `shape`."""
    return lax.broadcast_in_dim(x, shape, [0])

  def write(self, running: _Running, out, lse):
    """Normalises and copies out and lse."""
    cut, scratch, place = self.setting.cut, self.scratch, _place(self.setting)
    batch, head, first = self.queries(place)
    highest, total, output = running
    # A row that saw what is not finite is NaN in all its columns, and in its lse.
    total = total + 0.0 * output.sum(axis=1) + self.inputs.spoilt[place]
    if self.inputs.sinks is not None:
      sink = self.inputs.sinks[batch if self.inputs.sinks.shape[0] > 1 else 0, head] * LOG2E
      joint = jnp.maximum(highest, sink)
      reference = jnp.where(joint == -jnp.inf, 0.0, joint)
      shrink = jnp.exp2(highest - reference)
      total = total * shrink + jnp.exp2(sink - reference)
      highest, output = joint, output * self.along_rows(shrink, output.shape)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    scale = dropout.kept_scale(self.setting.feed.spec.dropout_prob)
    output = output * self.along_rows(scale / total, output.shape)
    rows = pl.ds(first, cut.rows)
    results = scratch.query if scratch.out is None else scratch.out
    results = results.at[self.warpgroup]
    if out.dtype == results.dtype:
      results[...] = output.astype(results.dtype)
    else:  # as wide as its registers, and too wide for shared memory
      out.at[batch, rows, head][...] = output
    numbers = scratch.lse.at[self.warpgroup]
    numbers[...] = jnp.where(empty, -jnp.inf, highest * (1 / LOG2E) + jnp.log(total))
    plgpu.commit_smem()
    if out.dtype == results.dtype:
      plgpu.copy_smem_to_gmem(results, out.at[batch, rows, head])
    plgpu.copy_smem_to_gmem(numbers, lse.at[batch, head, rows])
    plgpu.wait_smem_to_gmem(0)
