"""The cotangents of keys and values on Hopper: dS^T Q and P^T d_out, summed over blocks of queries.

A block of threads computes a block of keys of one key head, with all query heads of its group one
after the other: one warpgroup copies blocks of queries and d_out into two rings of stages, two
compute. Tiles are transposed, so that P^T and dS^T are operands in registers.

  scores = K Q^T;  dP = V d_out^T;  d_value += P^T d_out;  d_key += dS^T Q

Up to 128 wide, each computing warpgroup has keys of its own and both of their sums in registers.
Wider sums fill the registers of a warpgroup one at a time: the two share their keys, the first
computes P and sums d_value, the second takes P from shared memory, computes dS and sums d_key.

Letters: B batch, T query length, S key length, H query heads, K key heads, D query and key width,
E value width; R keys of a warpgroup, C queries of a block.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.masks import dropout
from attn_core.kernels.gpu import mosaic, wgmma as products
from attn_core.kernels.gpu.flash import tiling as tuned
from attn_core.kernels.gpu.flash.backward_common import Arrays, Setting
from attn_core.kernels.gpu.flash.kernel_params import Place, drain, place_of, setting_of
from attn_core.kernels.gpu.flash.block_list import Row
from attn_core.masks import tile as tiles
from attn_core.types import AttentionSpec, Operands


class Scratch(NamedTuple):
  """Shared memory and barriers; a barrier is for every part of the keys or for every stage.

  There are two parts of the keys, one for each computing warpgroup, or one for both.
  """

  key: Any  # [parts, R, D]
  value: Any  # [parts, R, E]
  query: Any  # [stages, C, D]
  d_out: Any  # [stages, C, E]
  lse: Any  # float32 [stages, C]
  correction: Any  # float32 [stages, C]
  weights: Any  # float32 [stages, R, C]: P on its way between the warpgroups; None: not needed
  key_full: Any
  value_full: Any
  query_full: Any
  d_out_full: Any
  query_free: Any
  d_out_free: Any
  weights_full: Any  # None: not needed
  weights_free: Any
  sums: tuple  # see `products.scratch_of`


class Step(NamedTuple):
  """One block of queries of one head; int32."""

  number: Any  # of those of all heads
  head: Any  # query head
  row: Row  # of the head
  index: Any  # among those of the row


def d_key_and_value(arrays: Arrays, operands: Operands, spec: AttentionSpec,
                    cut: tuned.BackwardCut):
  """([B, S, K, D], [B, S, K, E]); `arrays` without visits and extras."""
  common, visits, extras = setting_of(operands, spec, cut, by_keys=True)
  batch, _, heads, _ = arrays.key.shape
  found = mosaic.call(
      functools.partial(_kernel, Setting(*common)),
      tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in (arrays.key, arrays.value)),
      arrays._replace(visits=visits, extras=extras), _scratch(cut, arrays.key.dtype),
      grid=batch * heads * cut.sizes.num_key_blocks, warpgroups=tuned.COMPUTING + 1,
      name="attn_core_backward_key")
  return tuple(x[:, :cut.keys, :, :like.shape[3]]
               for x, like in zip(found, (operands.key, operands.value)))


def _scratch(cut: tuned.BackwardCut, dtype) -> Scratch:
  parts, rows = (1, cut.block_kv) if cut.shared else (tuned.COMPUTING, mosaic.ROW_TILE)
  stages, copied = cut.stages, plgpu.Barrier(num_barriers=parts)
  full = [plgpu.Barrier(num_arrivals=2, num_barriers=n) for n in stages]
  free = [plgpu.Barrier(num_arrivals=tuned.COMPUTING, num_barriers=n) for n in stages]
  weights = passed = None
  if cut.shared:
    weights = mosaic.operand((tuned.PASSED, rows, cut.block_q), jnp.float32)
    passed = plgpu.Barrier(num_barriers=tuned.PASSED)
  return Scratch(
      mosaic.operand((parts, rows, cut.width), dtype),
      mosaic.operand((parts, rows, cut.value_width), dtype),
      mosaic.operand((stages[0], cut.block_q, cut.width), dtype),
      mosaic.operand((stages[1], cut.block_q, cut.value_width), dtype),
      plgpu.SMEM((stages[0], cut.block_q), jnp.float32),
      plgpu.SMEM((stages[1], cut.block_q), jnp.float32), weights, copied, copied, *full, *free,
      passed, passed,
      products.scratch_of([(parts, rows, cut.width), (parts, rows, cut.value_width)]))


def _kernel(setting: Setting, arrays: Arrays, outputs, scratch: Scratch):
  warpgroup = lax.axis_index("warpgroup")

  # What is computed before the warpgroups part must fit into the registers of the one that copies.
  @pl.when(warpgroup == tuned.COMPUTING)
  def _():
    plgpu.set_max_registers(tuned.REGISTERS["copy"], action="decrease")
    _copy(setting, arrays, scratch, _place(setting))

  def compute(part, run, registers):
    plgpu.set_max_registers(registers, action="increase")
    part = lax.optimization_barrier(part)
    run(_Compute(setting, arrays, scratch, _place(setting), part), *outputs)

  if setting.cut.shared:
    runs = zip((_sum_values, _sum_keys), tuned.REGISTERS_SHARED, strict=True)
    for n, (run, registers) in enumerate(runs):
      pl.when(warpgroup == n)(functools.partial(compute, mosaic.int32(0), run, registers))
  else:
    pl.when(warpgroup < tuned.COMPUTING)(
        functools.partial(compute, warpgroup, _sum_both, tuned.REGISTERS["compute"]))


def _place(setting: Setting) -> Place:
  """Neighbours share queries; those with most to do begin, as far as a mask is causal."""
  return place_of(lax.axis_index("block"), setting.heads // setting.group,
                  setting.cut.sizes.num_key_blocks)


def _visit(setting: Setting, arrays: Arrays, place: Place, run):
  """Runs run(Step) for all blocks of queries of all heads of the group; returns their number."""
  def of_head(g, done):
    head = place.head * setting.group + g
    row = arrays.visits.of(place.batch, head, place.block)
    def of_block(m, _):
      run(Step(done + m, head, row, m))
      return ()
    lax.fori_loop(mosaic.int32(0), row.num_visited, of_block, ())
    return done + row.num_visited

  if setting.group == 1:
    return of_head(mosaic.int32(0), mosaic.int32(0))
  return lax.fori_loop(mosaic.int32(0), mosaic.int32(setting.group), of_head, mosaic.int32(0))


def _copy(setting: Setting, arrays: Arrays, scratch: Scratch, place: Place):
  """Fills the stages with queries and d_out of the blocks to visit, and their numbers."""
  cut = setting.cut
  rings = (
      (arrays.query, 0, scratch.query, scratch.lse, scratch.query_full, scratch.query_free,
       cut.stages[0]),
      (arrays.d_out, 1, scratch.d_out, scratch.correction, scratch.d_out_full, scratch.d_out_free,
       cut.stages[1]))

  def fill(step: Step):
    tokens = pl.ds(step.row.block(step.index) * cut.block_q, cut.block_q)
    for tile, number, tile_ring, number_ring, full, free, stages in rings:
      slot = lax.rem(step.number, mosaic.int32(stages))
      pl.when(step.number >= stages)(
          lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
      plgpu.copy_gmem_to_smem(
          tile.at[place.batch, tokens, step.head], tile_ring.at[slot], full.at[slot])
      plgpu.copy_gmem_to_smem(
          arrays.numbers.at[number, place.batch, step.head, tokens], number_ring.at[slot],
          full.at[slot])

  filled = _visit(setting, arrays, place, fill)
  for *_, free, stages in rings:
    drain(free, stages, filled)


class _Compute(NamedTuple):
  """What the computing warpgroups have in common."""

  setting: Setting
  arrays: Arrays
  scratch: Scratch
  place: Place
  part: Any  # of the keys

  @property
  def rows(self) -> int:
    return self.scratch.key.shape[1]

  @property
  def first_key(self):
    return self.place.block * self.setting.cut.block_kv + self.part * self.rows

  def anew(self, step: Step) -> "_Compute":
    """See `products.anew`."""
    part, *place = products.anew((self.part, *self.place), step.number)
    return self._replace(part=part, place=Place(*place))

  def visit(self, run):
    return _visit(self.setting, self.arrays, self.place, run)

  def fetch(self, source, ring, full):
    """Begins the copy of this part of the keys or of the values."""
    head = self.place.batch, pl.ds(self.first_key, self.rows), self.place.head
    plgpu.copy_gmem_to_smem(source.at[head], ring.at[self.part], full.at[self.part])

  def write(self, total, ring, result):
    """Copies a sum to where it belongs, by way of what it is the cotangent of."""
    head = self.place.batch, pl.ds(self.first_key, self.rows), self.place.head
    ring = ring.at[self.part]
    ring[...] = total.astype(ring.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(ring, result.at[head])

  def query_slot(self, number):
    return lax.rem(number, mosaic.int32(self.setting.cut.stages[0]))

  def d_out_slot(self, number):
    return lax.rem(number, mosaic.int32(self.setting.cut.stages[1]))

  def free_query(self, number):
    plgpu.barrier_arrive(self.scratch.query_free.at[self.query_slot(number)])

  def free_d_out(self, number):
    plgpu.barrier_arrive(self.scratch.d_out_free.at[self.d_out_slot(number)])

  def numbers(self, ring, slot):
    """[C] of a stage, repeated for every key."""
    shape = self.rows, self.setting.cut.block_q
    return lax.broadcast_in_dim(mosaic.load(ring.at[slot], mosaic.COLUMNS), shape, [1])

  def scores(self, step: Step):
    """K Q^T of a step."""
    slot = self.query_slot(step.number)
    plgpu.barrier_wait(self.scratch.query_full.at[slot])
    return products.beside(self.scratch.key.at[self.part], self.scratch.query.at[slot].T)[0]

  def d_weights_of(self, step: Step):
    """References V and d_out^T of a step, whose product is dP."""
    slot = self.d_out_slot(step.number)
    plgpu.barrier_wait(self.scratch.d_out_full.at[slot])
    return self.scratch.value.at[self.part], self.scratch.d_out.at[slot].T

  def tile(self, step: Step) -> tiles.Tile:
    cut = self.setting.cut
    return tiles.Tile(self.place.batch, step.head, step.row.block(step.index) * cut.block_q,
                      self.first_key, 1, cut.block_q, self.rows)

  def logits(self, step: Step, scores):
    """`Setting.logits_of` a step."""
    return self.setting.logits_of(self.arrays.extras, lambda: self.tile(step), scores,
                                  self.setting.masked(step.row, step.index))

  def weigh(self, step: Step, logits):
    """`Setting.weigh` of a step, the first part as an operand of a product."""
    lse = self.numbers(self.scratch.lse, self.query_slot(step.number))
    kept, factor = self.setting.weigh(self.arrays.extras, lambda: self.tile(step), logits, lse)
    return kept.astype(self.scratch.d_out.dtype), factor

  def add_values(self, total, step: Step, weights):
    products.add(total, weights, self.scratch.d_out.at[self.d_out_slot(step.number)],
                 interpret=self.setting.interpret)

  def add_keys(self, total, step: Step, d_scores):
    products.add(total, d_scores.astype(self.scratch.query.dtype),
                 self.scratch.query.at[self.query_slot(step.number)],
                 interpret=self.setting.interpret)

  def sum_up(self, run, *which):
    """See `products.sum_up`: of keys (0) or values (1)."""
    shapes = [(self.rows, self.scratch[n].shape[2]) for n in which]
    return products.sum_up(run, shapes, [
        self.scratch.sums[n].at[self.part] for n in which if self.scratch.sums])

  def finish(self, number, free):
    """Waits for the last products of all `number` steps, and frees what they read."""
    plgpu.wgmma_wait(0)
    pl.when(number > 0)(lambda: free(number - 1))

  @property
  def key_scale(self) -> float:
    return self.setting.feed.spec.softmax_scale

  @property
  def value_scale(self) -> float:
    return dropout.kept_scale(self.setting.feed.spec.dropout_prob)


def _sum_both(compute: _Compute, d_key, d_value):
  """A warpgroup with keys of its own."""
  scratch, setting = compute.scratch, compute.setting
  compute.fetch(compute.arrays.key, scratch.key, scratch.key_full)
  compute.fetch(compute.arrays.value, scratch.value, scratch.value_full)
  for full in (scratch.key_full, scratch.value_full):
    plgpu.barrier_wait(full.at[compute.part])

  def free(number):
    plgpu.commit_smem()  # lse and correction were read by other than copies and products
    compute.free_query(number)
    compute.free_d_out(number)

  def sum_over_queries(key_total, value_total):
    def of_step(step: Step):
      now = compute.anew(step)
      scores = now.scores(step)
      pl.when(step.number > 0)(lambda: free(step.number - 1))
      logits = now.logits(step, scores)
      d_weights, (weights, factor) = setting.beside(
          *now.d_weights_of(step), lambda: now.weigh(step, logits))
      now.add_values(value_total, step, weights)
      correction = now.numbers(scratch.correction, now.d_out_slot(step.number))
      now.add_keys(key_total, step, setting.d_scores(factor, d_weights, correction))
    compute.finish(compute.visit(of_step), free)

  key_total, value_total = compute.sum_up(sum_over_queries, 0, 1)
  compute.write(key_total * compute.key_scale, scratch.key, d_key)
  compute.write(value_total * compute.value_scale, scratch.value, d_value)
  plgpu.wait_smem_to_gmem(0)


def _sum_values(compute: _Compute, _, d_value):
  """The first of two warpgroups that share their keys: P, and P^T d_out."""
  scratch = compute.scratch
  compute.fetch(compute.arrays.key, scratch.key, scratch.key_full)
  compute.fetch(compute.arrays.value, scratch.value, scratch.value_full)
  plgpu.barrier_wait(scratch.key_full.at[0])

  def sum_over_queries(total):
    def of_step(step: Step):
      now = compute.anew(step)
      scores = now.scores(step)
      pl.when(step.number > 0)(lambda: compute.free_d_out(step.number - 1))
      weights, factor = now.weigh(step, now.logits(step, scores))
      plgpu.commit_smem()  # lse was read by other than copies and products
      compute.free_query(step.number)
      slot = lax.rem(step.number, mosaic.int32(tuned.PASSED))
      pl.when(step.number >= tuned.PASSED)(
          lambda: plgpu.barrier_wait(scratch.weights_free.at[slot]))
      scratch.weights[slot] = factor
      plgpu.barrier_arrive(scratch.weights_full.at[slot])
      plgpu.barrier_wait(scratch.d_out_full.at[compute.d_out_slot(step.number)])
      now.add_values(total, step, weights)
    number = compute.visit(of_step)
    compute.finish(number, compute.free_d_out)
    drain(scratch.weights_free, tuned.PASSED, number)

  total, = compute.sum_up(sum_over_queries, 1)
  # The other warpgroup is through with the values: it has freed all weights.
  plgpu.barrier_wait(scratch.value_full.at[0])
  compute.write(total * compute.value_scale, scratch.value, d_value)
  plgpu.wait_smem_to_gmem(0)


def _sum_keys(compute: _Compute, d_key, _):
  """The second of two warpgroups that share their keys: dS, and dS^T Q."""
  scratch, setting = compute.scratch, compute.setting
  plgpu.barrier_wait(scratch.value_full.at[0])

  def sum_over_queries(total):
    def of_step(step: Step):
      now = compute.anew(step)
      d_weights, _ = products.beside(*now.d_weights_of(step))
      pl.when(step.number > 0)(lambda: compute.free_query(step.number - 1))
      correction = now.numbers(scratch.correction, compute.d_out_slot(step.number))
      slot = lax.rem(step.number, mosaic.int32(tuned.PASSED))
      plgpu.barrier_wait(scratch.weights_full.at[slot])
      factor = mosaic.load(scratch.weights.at[slot], mosaic.TILE)
      d_scores = setting.d_scores(factor, d_weights, correction)
      plgpu.commit_smem()  # correction was read by other than copies and products
      compute.free_d_out(step.number)
      plgpu.barrier_arrive(scratch.weights_free.at[slot])
      plgpu.barrier_wait(scratch.query_full.at[compute.query_slot(step.number)])
      now.add_keys(total, step, d_scores)
    compute.finish(compute.visit(of_step), compute.free_query)

  total, = compute.sum_up(sum_over_queries, 0)
  # The other warpgroup is through with the keys: it has passed all weights on.
  plgpu.barrier_wait(scratch.key_full.at[0])
  compute.write(total * compute.key_scale, scratch.key, d_key)
  plgpu.wait_smem_to_gmem(0)
