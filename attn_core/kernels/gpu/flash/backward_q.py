"""The cotangent of the queries on Hopper: dS K, summed over blocks of keys.

A block of threads computes a block of queries of one head: one warpgroup copies blocks of keys and
values into two rings of stages, two compute, each its own half of the queries.

  scores = Q K^T;  dP = d_out V^T, beside the exponentials;  d_query += dS K, beside the next scores

Letters: B batch, T query length, S key length, H query heads, K key heads, D query and key width,
E value width; R queries of a warpgroup, C keys of a block.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attn_core.kernels.gpu import mosaic, wgmma as products
from attn_core.kernels.gpu.flash import tiling as tuned
from attn_core.kernels.gpu.flash.backward_common import Arrays, Setting
from attn_core.kernels.gpu.flash.kernel_params import (Place, drain, last_first, place_of, setting_of)
from attn_core.kernels.gpu.flash.block_list import Row
from attn_core.masks import tile as tiles
from attn_core.types import AttentionSpec, Operands


class Scratch(NamedTuple):
  """Shared memory and barriers; a barrier is for every warpgroup or for every stage."""

  query: Any  # [2, R, D]
  d_out: Any  # [2, R, E]
  key: Any  # [stages, C, D]
  value: Any  # [stages, C, E]
  own_full: Any
  key_full: Any
  value_full: Any
  key_free: Any
  value_free: Any
  sums: tuple  # see `products.scratch_of`


def d_query(arrays: Arrays, operands: Operands, spec: AttentionSpec, cut: tuned.BackwardCut):
  """[B, T, H, D]; `arrays` without visits and extras."""
  common, visits, extras = setting_of(operands, spec, cut)
  batch, rows, heads, width = arrays.query.shape
  dtype = arrays.query.dtype
  found, = mosaic.call(
      functools.partial(_kernel, Setting(*common)),
      (jax.core.ShapedArray((batch, rows, heads, width), dtype),),
      arrays._replace(visits=visits, extras=extras), _scratch(cut, dtype),
      grid=batch * heads * cut.sizes.num_query_blocks, warpgroups=tuned.COMPUTING + 1,
      name="attn_core_backward_query")
  return found[:, :cut.queries, :, :operands.query.shape[3]]


def _scratch(cut: tuned.BackwardCut, dtype) -> Scratch:
  number, rows = tuned.COMPUTING, cut.block_q // tuned.COMPUTING
  full = [plgpu.Barrier(num_barriers=stages) for stages in cut.stages]
  free = [plgpu.Barrier(num_arrivals=number, num_barriers=stages) for stages in cut.stages]
  return Scratch(
      mosaic.operand((number, rows, cut.width), dtype),
      mosaic.operand((number, rows, cut.value_width), dtype),
      mosaic.operand((cut.stages[0], cut.block_kv, cut.width), dtype),
      mosaic.operand((cut.stages[1], cut.block_kv, cut.value_width), dtype),
      plgpu.Barrier(num_arrivals=2, num_barriers=number), *full, *free,
      products.scratch_of([(number, rows, cut.width)]))


def _kernel(setting: Setting, arrays: Arrays, outputs, scratch: Scratch):
  warpgroup = lax.axis_index("warpgroup")

  # What is computed before the warpgroups part must fit into the registers of the one that copies.
  @pl.when(warpgroup == tuned.COMPUTING)
  def _():
    plgpu.set_max_registers(tuned.REGISTERS["copy"], action="decrease")
    place = _place(setting)
    _copy(setting, arrays, scratch, place, arrays.visits.of(*place))

  @pl.when(warpgroup < tuned.COMPUTING)
  def _():
    plgpu.set_max_registers(tuned.REGISTERS["compute"], action="increase")
    place = _place(setting)
    own = lax.optimization_barrier(warpgroup)
    _Compute(setting, arrays, scratch, place, own).run(arrays.visits.of(*place), *outputs)


def _place(setting: Setting) -> Place:
  number = setting.cut.sizes.num_query_blocks
  return last_first(place_of(lax.axis_index("block"), setting.heads, number), number)


def _copy(setting: Setting, arrays: Arrays, scratch: Scratch, place: Place, row: Row):
  """Fills the stages with keys and values of the blocks to visit."""
  cut = setting.cut
  head = lax.div(place.head, mosaic.int32(setting.group))
  rings = ((arrays.key, scratch.key, scratch.key_full, scratch.key_free, cut.stages[0]),
           (arrays.value, scratch.value, scratch.value_full, scratch.value_free, cut.stages[1]))

  def fill(n, _):
    tokens = pl.ds(row.block(n) * cut.block_kv, cut.block_kv)
    for source, ring, full, free, stages in rings:
      slot = lax.rem(n, mosaic.int32(stages))
      pl.when(n >= stages)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
      plgpu.copy_gmem_to_smem(source.at[place.batch, tokens, head], ring.at[slot], full.at[slot])
    return ()

  lax.fori_loop(mosaic.int32(0), row.num_visited, fill, ())
  for _, _, _, free, stages in rings:
    drain(free, stages, row.num_visited)


class _Compute(NamedTuple):
  """What a computing warpgroup does."""

  setting: Setting
  arrays: Arrays
  scratch: Scratch
  place: Place
  warpgroup: Any

  @property
  def rows(self) -> int:
    return self.setting.cut.block_q // tuned.COMPUTING

  @property
  def first_query(self):
    return self.place.block * self.setting.cut.block_q + self.warpgroup * self.rows

  def run(self, row: Row, result):
    """From the copies of queries and d_out to that of the result."""
    cut, scratch, (batch, head, _) = self.setting.cut, self.scratch, self.place
    own = pl.ds(self.first_query, self.rows)
    full = scratch.own_full.at[self.warpgroup]
    query = scratch.query.at[self.warpgroup]
    plgpu.copy_gmem_to_smem(self.arrays.query.at[batch, own, head], query, full)
    plgpu.copy_gmem_to_smem(
        self.arrays.d_out.at[batch, own, head], scratch.d_out.at[self.warpgroup], full)
    lse, correction = (mosaic.load(self.arrays.numbers.at[n, batch, head, own], mosaic.ROWS)
                       for n in range(2))
    plgpu.barrier_wait(full)

    def sum_over_keys(total):
      lax.fori_loop(mosaic.int32(0), row.num_visited,
                    lambda n, _: self.step(n, row, (lse, correction), total), ())
      plgpu.wgmma_wait(0)
      pl.when(row.num_visited > 0)(lambda: self.free_keys(row.num_visited - 1))
    total, = products.sum_up(sum_over_keys, [(self.rows, cut.width)],
                             [x.at[self.warpgroup] for x in scratch.sums])
    query[...] = (total * self.setting.feed.spec.softmax_scale).astype(query.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(query, result.at[batch, own, head])
    plgpu.wait_smem_to_gmem(0)

  def free_keys(self, n):
    """The product with the keys of step n has ended."""
    plgpu.barrier_arrive(self.scratch.key_free.at[lax.rem(n, mosaic.int32(
        self.setting.cut.stages[0]))])

  def step(self, n, row: Row, numbers, total):
    """Adds what the n-th block of keys contributes."""
    cut, scratch, setting = self.setting.cut, self.scratch, self.setting
    warpgroup, *place = products.anew((self.warpgroup, *self.place), n)
    slot, value_slot = (lax.rem(n, mosaic.int32(stages)) if stages > 1
                        else products.anew((mosaic.int32(0),), n)[0] for stages in cut.stages)
    now = self._replace(warpgroup=warpgroup, place=Place(*place))
    tile = lambda: tiles.Tile(now.place.batch, now.place.head, now.first_query,
                              row.block(n) * cut.block_kv, 1, self.rows, cut.block_kv)
    lse, correction = (lax.broadcast_in_dim(x, (self.rows, cut.block_kv), [0]) for x in numbers)
    plgpu.barrier_wait(scratch.key_full.at[slot])
    scores, _ = products.beside(scratch.query.at[warpgroup], scratch.key.at[slot].T)
    pl.when(n > 0)(lambda: self.free_keys(n - 1))
    logits = setting.logits_of(self.arrays.extras, tile, scores, setting.masked(row, n))
    plgpu.barrier_wait(scratch.value_full.at[value_slot])
    d_weights, (_, factor) = setting.beside(
        scratch.d_out.at[warpgroup], scratch.value.at[value_slot].T,
        lambda: setting.weigh(self.arrays.extras, tile, logits, lse))
    plgpu.barrier_arrive(scratch.value_free.at[value_slot])
    d_scores = setting.d_scores(factor, d_weights, correction)
    products.add(total, d_scores.astype(scratch.key.dtype), scratch.key.at[slot],
                 interpret=setting.interpret)
    return ()
