# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries to keys and values in pages, as a Pallas TPU kernel.

A grid step computes some queries of one row (a request, or a batch row); scalar memory says which
queries these are and which keys they see. Cores of a chip with two compute a range of steps each,
with scratch memory and semaphores of their own. While a block of keys is computed, the next ones
are copied to vector memory, also those of the next step. The update of the running softmax depends
on the number of rows of queries: `update_few_rows` or `update_many_rows`.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple, Sequence

import chex
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import online_softmax
from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.ragged import (
    cache_rows, common, row_mods, update_few_rows, update_many_rows)
from attn_core.kernels.tpu.ragged.common import (
    Index, KernelInputs, KernelRefs, LogitsSpec, Ref, StepShape, Steps)
from attn_core.kernels.tpu.ragged.kv_layout import (
    LiveTokens, RowPages, Transfer, copy_block, copy_pages, start_pages)
from attn_core.kernels.tpu.ragged.mod_form import FIXED, LINES, STEP, ModRefs
from attn_core.types import cdiv


def attend(spec: LogitsSpec, shape: StepShape, inputs: KernelInputs,
           out_dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Computes the attention of every step.

  Args:
    spec: what is computed.
    shape: static shape of a step.
    inputs: the arrays.
    out_dtype: of out.

  Returns:
    out [num_steps, head_groups, group_rows, E], and lse float32
    [num_steps, head_groups, group_rows]; only those of the first `num_live` steps are written.
  """
  shape = shape._replace(layout=shape.layout.at_run_time())
  rows, layout = inputs.rows, shape.layout
  # Rows that are prepared a step ahead: those of the first step, and of the next one.
  queries = [rows, rows] if shape.raw_rows else [rows]
  num_steps, width = rows.shape[0], layout.widths[-1]
  chex.assert_shape(rows, (num_steps, shape.head_groups, *(
      (None, shape.group_rows) if shape.transposed_rows else (shape.group_rows, None))))
  chex.assert_rank(inputs.num_live, 1)
  chex.assert_shape(inputs.steps, (
      (num_steps,) if spec.of_cache else (len(Steps._fields), num_steps)))
  chex.assert_rank(inputs.tables, 1)
  # 1. Inputs.
  scalars = [x for x in (inputs.steps[0], inputs.num_live, inputs.tables, inputs.tensor_scales,
                         *inputs.steps[1:]) if x is not None]
  mods = inputs.mods
  sources = [x for x in (*inputs.tokens, mods and mods.keys, inputs.mask) if x is not None]
  numbers = [] if mods is None else mods.numbers()
  grid = _Grid(num_steps, shape.num_cores)
  block = lambda *last: pl.BlockSpec((1, shape.head_groups, *last), grid.block_index)
  block_of = lambda x: block(*x.shape[2:]) if x.shape[0] == num_steps else pl.BlockSpec(
      x.shape, lambda *_: (0, 0, 0, 0))
  row_blocks = [block_of(rows)]
  if shape.raw_rows:
    row_blocks = [pl.BlockSpec((1, *rows.shape[1:]), of) for of in (
        grid.first_index, functools.partial(grid.block_index, after=1))]
  # 2. Outputs.
  varying = jax.typeof(rows).manual_axis_type
  output = lambda last, dtype: jax.ShapeDtypeStruct((num_steps, shape.head_groups, *last), dtype,
                                                    manual_axis_type=varying)
  column = (shape.group_rows, 1) if shape.few_rows else (1, shape.group_rows)
  outputs = [output((shape.group_rows, width), out_dtype), output(column, jnp.float32)]
  # 3. Scratch memory.
  buffers = [pltpu.VMEM(*x) for x in layout.buffers()]
  if mods is not None and mods.keys is not None:
    buffers.append(pltpu.VMEM((layout.slots, mods.form.key_rows, layout.block_kv), jnp.int32))
  if inputs.mask is not None:
    buffers.append(pltpu.VMEM((layout.slots, shape.mask_rows, layout.block_kv), inputs.mask.dtype))
  prepared = (2, 1, shape.head_groups, shape.group_rows, layout.widths[0])
  scratch = ([pltpu.VMEM(prepared, rows.dtype)] if shape.raw_rows else [], buffers,
             [pltpu.VMEM(*x) for x in layout.word_buffers()],
             [pltpu.VMEM(x, jnp.float32) for x in shape.running_shapes()],
             [pltpu.SemaphoreType.DMA((layout.slots,)),
              pltpu.SMEM((common.NUM_COUNTERS,), jnp.int32)],
             [pltpu.SMEM((len(Steps._fields), num_steps), jnp.int32)] if spec.of_cache else [])
  counts = [len(x) for x in (scalars, queries, numbers, sources, outputs, *scratch)]

  def kernel(*refs: Ref) -> None:
    _kernel(_kernel_refs(spec, shape, common.split(refs, counts)))

  # 4. The call.
  out, lse = launch.in_32_bits(pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars), grid=grid.sizes,
          in_specs=[*row_blocks, *map(block_of, numbers),
                    *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(sources)],
          out_specs=[block(shape.group_rows, width), block(*column)],
          scratch_shapes=[x for group in scratch for x in group]),
      out_shape=outputs, name="attn_core_ragged",
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary",) if grid.cores == 1 else ("parallel", "arbitrary"),
          disable_bounds_checks=True,
          vmem_limit_bytes=row_mods.vmem_limit(shape, rows.dtype, mods)),
  ))(*scalars, *queries, *numbers, *sources)
  return out, lse.reshape(num_steps, shape.head_groups, shape.group_rows)


class _Grid(NamedTuple):
  """The grid of a kernel, whose steps are divided among the cores of the chip."""

  num_steps: int
  num_cores: int

  @property
  def cores(self) -> int:
    """Cores that have a step."""
    return min(self.num_cores, self.num_steps)

  @property
  def sizes(self) -> tuple[int, ...]:
    """(steps,), or (cores, steps of a core)."""
    return (self.num_steps,) if self.cores == 1 else (
        self.cores, cdiv(self.num_steps, self.cores))

  def first_of(self, ids: Sequence[Index]) -> Index:
    """Returns the first step of the core at a place of the grid."""
    return 0 if self.cores == 1 else ids[0] * self.sizes[1]

  def first_index(self, *args: Any) -> tuple[Index, ...]:
    """Maps a place of the grid to the block of the first step of its core."""
    return self.first_of(args), 0, 0, 0

  def block_index(self, *args: Any, after: int = 0) -> tuple[Index, ...]:
    """Maps a place of the grid, and scalars, to the block of the step that comes `after` it."""
    axes = len(self.sizes)
    ids, count = args[:axes], args[axes + 1]
    # Steps after the first `num_live` repeat the last block index, so that they copy nothing.
    last = jnp.clip(count[count.shape[0] - 1] - 1, 0, self.num_steps - 1)
    return jnp.minimum(self.first_of(ids) + ids[-1] + after, last), 0, 0, 0


def _kernel_refs(spec: LogitsSpec, shape: StepShape, parts: Sequence[Sequence[Ref]]) -> KernelRefs:
  """Names the references of a kernel.

  Args:
    spec: what is computed.
    shape: static shape of a step.
    parts: references to scalars, rows, numbers of the score mod, sources, outputs, prepared rows,
      buffers, words, the running softmax, semaphores and counters, and steps to write.
  """
  (scalars, rows, numbers, sources, outputs, prepared, buffers, words, running,
   (semaphores, counters), written) = parts
  steps, num_live, tables, *scales = scalars
  of_rows: Sequence[Ref] = ()
  if written:  # a dense cache has no scales of all keys
    of_rows, (steps,), scales = (steps, *scales), written, []
  return KernelRefs(spec, shape, steps, num_live, tables, scales[0] if scales else None, rows[-1],
                    sources, outputs, buffers, words, online_softmax.Running(*running),
                    semaphores, counters, mod_refs(spec, numbers),
                    raw=(*rows, *prepared) if prepared else (), cache_rows=of_rows)


def mod_refs(spec: LogitsSpec, numbers: Sequence[Ref]) -> ModRefs | None:
  """Names the references to the numbers of a step's rows, which are those that there are."""
  if spec.mods is None:
    return None
  rest, kinds = list(numbers), spec.mods.kinds
  return ModRefs(*(rest.pop(0) if kind in kinds else None for kind in (FIXED, STEP, LINES)))


def _kernel(k: KernelRefs) -> None:
  """Computes one grid step."""
  grid = _Grid(k.steps.shape[1], k.shape.num_cores)
  ids = [pl.program_id(axis) for axis in range(len(grid.sizes))]
  begin, current, end = grid.first_of(ids), ids[-1], step_count(k)
  if grid.cores > 1:
    current, end = begin + current, jnp.minimum(begin + grid.sizes[1], end)

  # 1. In the first step: find all steps, and start the transfers of the first blocks.
  @pl.when(current == begin)
  def _() -> None:
    if k.cache_rows:
      cache_rows.write_steps(k)
    fetch_first(k, begin, end)
    if k.raw:
      _prepare(k, begin, k.raw[0])

  # 2. Fold in the blocks of keys, normalize and write.
  @pl.when(current < end)
  def _() -> None:
    step = step_of(k, current)
    of_step = k._replace(rows=k.raw[2].at[current & 1]) if k.raw else k
    fold_blocks(of_step, step, end)
    nan = jnp.where(step.row_begin == common.OVERFLOWED, jnp.nan, 0.0) if k.cache_rows else None
    for group in range(k.shape.head_groups):
      for ref, x in zip(k.outputs, result(k, group, k.outputs[0].dtype, nan)):
        ref[0, group] = x


def _prepare(k: KernelRefs, step: Index, rows: Ref) -> None:
  """Writes the rows of a step with zeros as padding, and with NaN in place of infinities."""
  prepared = k.raw[2].at[step & 1]
  for group in range(k.shape.head_groups):
    x, transposed = rows[0, group], k.shape.transposed_rows
    axis = 0 if transposed else 1
    missing = prepared.shape[3] - x.shape[axis]
    if missing:
      x = jnp.concatenate([x, jnp.zeros(
          (missing, x.shape[1]) if transposed else (x.shape[0], missing), x.dtype)], axis)
    x = common.infinite_to_nan(x)
    prepared[0, group] = x.T if transposed else x


def fetch_first(k: KernelRefs, begin: Index, end: jax.Array) -> None:
  """Starts the transfers of the first blocks of the steps [begin, end), those of a core."""
  # A core without steps may begin where there is none.
  first = step_of(k, begin if isinstance(begin, int) else jnp.minimum(
      begin, k.steps.shape[1] - 1)).first_block
  for name, number in ((common.COMPUTED, 0), (common.FETCHED, 0), (common.NEXT_STEP, begin),
                       (common.NEXT_BLOCK, first)):
    k.counters[name] = number
  for _ in range(k.shape.layout.slots - 1):
    _fetch_next(k, end)


def fold_blocks(k: KernelRefs, step: Steps, end: jax.Array) -> None:
  """Computes the running softmax of a step, and starts the transfers of the next blocks.

  Args:
    k: the kernel.
    step: of it.
    end: of the steps of the core.
  """
  softmax = _softmax(k.shape)
  softmax.start(k)

  # Per block of keys: start the next transfers, wait for this block's, fold it in.
  @pl.loop(step.first_block, step.end_block)
  def _(block: jax.Array) -> None:
    slot = lax.rem(k.counters[common.COMPUTED], jnp.int32(k.shape.layout.slots))
    tile = common.TileIndex(step, slot, block)
    if not k.shape.starts_between:
      _fetch_next(k, end)
      _copy_block(k, slot, step, block, start=False)
      if k.raw:  # between the products of this step, whose rows are others
        following = step.row + 1
        update_few_rows.update(k, tile, lambda *_: _prepare(k, following, k.raw[1]))
      else:
        softmax.update(k, tile)
    else:
      _fold_and_start(k, tile, end)
    k.counters[common.COMPUTED] += 1


def _fold_and_start(k: KernelRefs, tile: common.TileIndex, end_step: jax.Array) -> None:
  """Folds in a block of keys, and starts the transfers of the next one.

  If all pages of that are copied, their transfers start between the products of this block: their
  addresses, which are scalars, are found while vectors are computed.
  """
  current, block = k.counters[common.NEXT_STEP], k.counters[common.NEXT_BLOCK]
  step = step_of(k, jnp.minimum(current, k.steps.shape[1] - 1))
  first, end = LiveTokens(step.kv_start, step.kv_stop).pages(k.shape.layout, block)
  whole = (current < end_step) & (first == 0) & (end == k.shape.layout.block_pages)
  fold = lambda start_some: update_few_rows.update(k, tile, start_some)

  @pl.when(whole)
  def _() -> None:
    slot = lax.rem(k.counters[common.FETCHED], jnp.int32(k.shape.layout.slots))
    _copy_block(k, tile.slot, tile.step, tile.block, start=False)
    _copy_others(k, slot, step, block, start=True)

    def start_some(number: int, of: int) -> None:
      pages = k.shape.layout.block_pages
      start_pages(k.shape.layout, _page_transfer(k, slot), block, _row_pages(k, step),
                  range(number * pages // of, (number + 1) * pages // of))

    fold(start_some)
    _count_fetched(k, step, current, block)

  @pl.when(jnp.logical_not(whole))
  def _() -> None:
    _fetch_next(k, end_step)
    _copy_block(k, tile.slot, tile.step, tile.block, start=False)
    fold(None)


def result(k: KernelRefs, group: Index, dtype: DTypeLike,
           nan: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Returns out [group_rows, E] and lse, float32 and shaped like m_i, of a head group.

  Args:
    k: the kernel.
    group: of heads.
    dtype: of out.
    nan: NaN if all results are NaN, or 0; None: 0.
  """
  running = _softmax(k.shape).result(k, group)
  running = running if nan is None else running._replace(l_i=running.l_i + nan)
  out, lse = online_softmax.finish(running._replace(
      m_i=running.m_i * (k.spec.unit / online_softmax.LOG2E)))
  out = out.astype(dtype)  # fewer bits to transpose
  return out if k.shape.few_rows else out.T, lse


def _softmax(shape: StepShape) -> ModuleType | Any:
  """Returns the module that updates the running softmax."""
  return update_few_rows if shape.few_rows else update_many_rows


def _fetch_next(k: KernelRefs, end: jax.Array) -> None:
  """Starts the transfers of the next block, of this step or one before `end`, if there is any."""
  current, block = k.counters[common.NEXT_STEP], k.counters[common.NEXT_BLOCK]

  @pl.when(current < end)
  def _() -> None:
    step = step_of(k, current)
    slot = lax.rem(k.counters[common.FETCHED], jnp.int32(k.shape.layout.slots))
    _copy_block(k, slot, step, block, start=True)
    _count_fetched(k, step, current, block)


def _count_fetched(k: KernelRefs, step: Steps, current: Index, block: Index) -> None:
  """Counts a block as fetched, and finds the next one.

  Args:
    k: the kernel.
    step: that the block is for.
    current: its number.
    block: number of the block in its row.
  """
  following = jnp.where(block + 1 == step.end_block, current + 1, current)
  k.counters[common.FETCHED] += 1
  k.counters[common.NEXT_STEP] = following
  first = step_of(k, jnp.minimum(following, k.steps.shape[1] - 1)).first_block
  k.counters[common.NEXT_BLOCK] = jnp.where(following == current, block + 1, first)


def step_count(k: KernelRefs) -> jax.Array:
  """Returns the number of steps that compute anything."""
  return jnp.minimum(k.num_live[k.num_live.shape[0] - 1], k.steps.shape[1])


def step_of(k: KernelRefs, step: Index) -> Steps:
  """Reads the numbers of a step."""
  return Steps(*(k.steps[field, step] for field in range(len(Steps._fields))))


def _row_pages(k: KernelRefs, step: Steps) -> RowPages:
  """Returns the pages of a row: those of its table, or one after the other in a dense cache."""
  if not k.shape.row_pages:
    return RowPages(0, lambda _: step.row)
  layout = k.shape.layout
  pool = k.sources[0].shape[1 if layout.heads_major and not layout.interleaved else 0]

  def index_of(place: Index) -> jax.Array:
    found = lax.max(k.tables[place], jnp.int32(0))
    # A minimum of unsigned numbers is one instruction.
    return lax.min(found.astype(jnp.uint32), jnp.uint32(pool - 1)).astype(jnp.int32)

  return RowPages(step.row * k.shape.row_pages, index_of)


def _copy_block(k: KernelRefs, slot: Index, step: Steps, block: Index, *, start: bool) -> None:
  """Starts or awaits the transfers of a key block, its scales and its mask to a slot."""
  copy_pages(k.shape.layout, _page_transfer(k, slot), LiveTokens(step.kv_start, step.kv_stop),
             block, _row_pages(k, step), start=start)
  _copy_others(k, slot, step, block, start=start)


def _page_transfer(k: KernelRefs, slot: Index) -> Transfer:
  """Returns the transfer of a block's pages to a slot."""
  arrays = k.shape.layout.page_arrays
  return Transfer(k.sources[:arrays], k.buffers[:arrays], k.semaphores, slot)


def _copy_others(k: KernelRefs, slot: Index, step: Steps, block: Index, *, start: bool) -> None:
  """Starts or awaits the transfers of a block's mask, and of scales that no page has, to a slot."""
  layout = k.shape.layout
  arrays, first = layout.page_arrays, len(layout.buffers())
  has_keys = k.spec.mods is not None and k.spec.mods.key_rows > 0
  transfer = lambda part: Transfer(k.sources[part], k.buffers[part], k.semaphores, slot)
  copy_block(layout, transfer(slice(arrays, first)), step.row, block, start=start)
  if has_keys:
    row = 0 if k.sources[first].shape[0] == 1 else step.row  # all rows may share one
    copy_block(layout, transfer(slice(first, first + 1)), row, block, start=start)
  copy_block(layout, transfer(slice(first + has_keys, None)), step.row, block, start=start)
