"""Attention of a few queries to a stream of keys and values, as a Pallas TPU kernel.

A step of the grid is some queries of one row (a request, or a row of a batch); which these are, and
which keys they see, is said in scalar memory. While a block of keys is computed, the next ones are
on their way, be they of the next step. How a block is folded depends on how many rows of queries
there are: `few` or `wide`.

Letters: as in `step`.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.tpu.ragged import update_few_rows as few, common as step, update_many_rows as wide
from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.ragged.kv_layout import Live, Way, transfer, transfer_blocks
from attn_core.kernels.tpu.ragged.common import (Arrays, Items, Kernel, Rule, Shape)


def attend(rule: Rule, shape: Shape, arrays: Arrays):
  """out [W, K / u, L, E] in the rows' dtype and lse float32 [W, K / u, L]; the first `count`."""
  rows, pool = arrays.rows, shape.pool
  steps, width = rows.shape[0], pool.widths[-1]
  items = jnp.stack(arrays.items).astype(jnp.int32)
  scalars = [x for x in (items, arrays.count, arrays.tables, arrays.factors) if x is not None]
  streams = [*arrays.tokens, *([] if arrays.mask is None else [arrays.mask])]
  # Steps that compute nothing fetch and write nothing.
  place = lambda w, items, count, *_: (jnp.minimum(w, jnp.maximum(count[0] - 1, 0)), 0, 0, 0)
  block = lambda *last: pl.BlockSpec((1, shape.groups, *last), place)
  varying = jax.typeof(rows).manual_axis_type
  result = lambda last, dtype: jax.ShapeDtypeStruct((steps, shape.groups, *last), dtype,
                                                    manual_axis_type=varying)
  column = (shape.lanes, 1) if shape.few else (1, shape.lanes)
  results = [result((shape.lanes, width), rows.dtype), result(column, jnp.float32)]
  buffers = [pltpu.VMEM(*x) for x in pool.buffers()]
  if arrays.mask is not None:
    buffers.append(pltpu.VMEM((pool.slots, shape.mask_rows, pool.block), arrays.mask.dtype))
  scratch = (buffers, [pltpu.VMEM(*x) for x in pool.spread()],
             [pltpu.VMEM(x, jnp.float32) for x in shape.running()],
             [pltpu.SemaphoreType.DMA((pool.slots,)), pltpu.SMEM((4,), jnp.int32)])
  counts = [len(x) for x in (scalars, [rows], streams, results, *scratch)]

  def kernel(*refs):
    split, parts = list(refs), []
    for number in counts:
      parts.append(split[:number])
      split = split[number:]
    scalars, (rows,), streams, outputs, buffers, words, numbers, (arrived, turn) = parts
    items, step_count, tables, *factors = scalars
    _kernel(Kernel(rule, shape, items, step_count, tables, factors[0] if factors else None, rows,
                   streams, outputs, buffers, words, softmax.Running(*numbers), arrived, turn))

  out, lse = launch.in_32_bits(pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars), grid=(steps,),
          in_specs=[block(*rows.shape[2:]), *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(streams)],
          out_specs=[block(shape.lanes, width), block(*column)],
          scratch_shapes=[x for group in scratch for x in group]),
      out_shape=results, name="attn_core_stream",
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary",), disable_bounds_checks=True,
          vmem_limit_bytes=max(16 * 2**20, shape.bytes(rows.dtype) * 5 // 4)),
  ))(*scalars, rows, *streams)
  return out, lse.reshape(steps, shape.groups, shape.lanes)


def _kernel(k: Kernel):
  current, count = pl.program_id(0), _count(k)
  way = few if k.shape.few else wide

  @pl.when(current == 0)
  def _():
    for name, number in ((step.COMPUTED, 0), (step.FETCHED, 0), (step.NEXT_STEP, 0),
                         (step.NEXT_BLOCK, _item(k, 0).first)):
      k.turn[name] = number
    for _ in range(k.shape.pool.slots - 1):
      _fetch(k, count)

  @pl.when(current < count)
  def _():
    item = _item(k, current)
    way.start(k)

    @pl.loop(item.first, item.end)
    def _(number):
      _fetch(k, count)
      slot = lax.rem(k.turn[step.COMPUTED], jnp.int32(k.shape.pool.slots))
      _transfer(k, slot, item, number, start=False)
      way.fold(k, step.Place(item, slot, number))
      k.turn[step.COMPUTED] += 1

    for group in range(k.shape.groups):
      found = way.result(k, group)
      out, lse = softmax.finish(found._replace(
          highest=found.highest * (k.rule.unit / softmax.LOG2E)))
      out = out if k.shape.few else out.T
      k.outputs[0][0, group] = out.astype(k.outputs[0].dtype)
      k.outputs[1][0, group] = lse


def _fetch(k: Kernel, count):
  """Starts the transfers of the next block that is not on its way, if there is one."""
  current, number = k.turn[step.NEXT_STEP], k.turn[step.NEXT_BLOCK]

  @pl.when(current < count)
  def _():
    item = _item(k, current)
    slot = lax.rem(k.turn[step.FETCHED], jnp.int32(k.shape.pool.slots))
    _transfer(k, slot, item, number, start=True)
    following = jnp.where(number + 1 == item.end, current + 1, current)
    k.turn[step.FETCHED] += 1
    k.turn[step.NEXT_STEP] = following
    then = _item(k, jnp.minimum(following, pl.num_programs(0) - 1)).first
    k.turn[step.NEXT_BLOCK] = jnp.where(following == current, number + 1, then)


def _count(k: Kernel):
  return k.count[0]


def _item(k: Kernel, step) -> Items:
  return Items(*(k.items[field, step] for field in range(len(Items._fields))))


def _page(k: Kernel, item: Items, page):
  """Where a page of a row lies."""
  return k.tables[item.row * k.shape.row_pages + page] if k.shape.row_pages else item.row


def _transfer(k: Kernel, slot, item: Items, number, *, start: bool):
  """Starts the transfers of a key block to a slot of the buffers, or awaits them."""
  pool = k.shape.pool
  tokens, blocks = slice(len(pool.widths)), slice(len(pool.widths), None)
  way = lambda part: Way(k.streams[part], k.buffers[part], k.arrived, slot)
  transfer(pool, way(tokens), Live(item.start, item.stop), number,
           functools.partial(_page, k, item), start=start)
  transfer_blocks(pool, way(blocks), item.row, number, start=start)
