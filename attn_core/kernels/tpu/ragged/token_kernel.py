# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ragged kernel over pages: it makes its steps, and copies queries and results by itself.

So nothing has to bring the queries of requests to blocks before it, or results to tokens after it.
A loop in the kernel computes one step after the other; see `kernel` for what a step does.

Cores of a chip with two compute a range of the steps each. Either writes all new tokens and awaits
its own transfers before it reads a page, so that neither waits for the other: both write the same
bytes.
"""

from typing import NamedTuple, Sequence

import chex
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import online_softmax
from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.ragged import (
    common, kernel, new_tokens, row_mods, row_writes, token_blocks)
from attn_core.kernels.tpu.ragged.common import KernelRefs, LogitsSpec, Ref, StepShape, Steps
from attn_core.kernels.tpu.ragged.mod_form import ModInputs
from attn_core.kernels.tpu.ragged.new_tokens import NewTokenRefs
from attn_core.kernels.tpu.ragged.row_writes import RowRefs
from attn_core.kernels.tpu.ragged.token_blocks import SLOTS, RequestPart, TokenRefs


class TokenInputs(NamedTuple):
  """Arrays that the kernel reads."""

  counts: jax.Array | None  # int32 [n]: numbers of requests; see `RequestPart`
  starts: jax.Array  # int32 [requests + 1]: where the queries of each request begin
  lengths: jax.Array  # int32 [requests]: tokens of the requests
  tables: jax.Array  # int32 [requests * row_pages]: their pages; may be outside of the pool
  tensor_scales: jax.Array | None  # float32 [2]: scales of all keys and of all values
  query: jax.Array  # [T, K, G, D]
  tokens: tuple[jax.Array, ...]  # keys, values and scales; see `KVLayout`
  # Written to `tokens` before anything is read: keys and values [T, token_rows, D], to the first
  # array; or latent rows as of `row_writes.new_rows`, to all arrays. None: there are none.
  new: jax.Array | None
  out: jax.Array | None  # [T, K, G, E], with results of requests before `part`; None: none
  mods: ModInputs | None = None  # without numbers of keys
  drafts: tuple[jax.Array, ...] = ()  # see `KernelRefs.drafts`


class _Form(NamedTuple):
  """Static properties of a kernel."""

  spec: LogitsSpec
  shape: StepShape
  part: RequestPart
  num_written: int  # arrays to which new tokens are written
  num_drafts: int  # arrays of drafts
  has_counts: bool
  has_scales: bool  # whether there are scales of all keys and of all values
  continues: bool  # whether the results of other requests are given


class TokenResults(NamedTuple):
  """Results of the kernel."""

  out: jax.Array  # [T, K, G, E]
  lse: jax.Array  # float32 [num_steps, head_groups, group_rows], of the steps with queries
  # The arrays to which new tokens were written, in the same memory; empty: there were none.
  pages: tuple[jax.Array, ...]


def attend(spec: LogitsSpec, shape: StepShape, inputs: TokenInputs, out_dtype: DTypeLike, *,
           num_steps: int, part: RequestPart) -> TokenResults:
  """Computes the attention of the queries of requests.

  Args:
    spec: what is computed.
    shape: static shape of a step.
    inputs: the arrays.
    out_dtype: of out.
    num_steps: the largest possible number of steps.
    part: which requests are computed.

  Returns:
    The results; zeros for tokens that are not a query of any request.
  """
  shape = shape._replace(layout=shape.layout.at_run_time())
  query, layout, new = inputs.query, shape.layout, inputs.new
  tokens, heads, group, width = query.shape
  chex.assert_shape(query, (tokens, None, shape.group_size, None))
  # 1. Inputs.
  scalars = [x for x in (inputs.starts, inputs.lengths, inputs.tables, *inputs.drafts,
                         inputs.counts, inputs.tensor_scales) if x is not None]
  sources = [query, *inputs.tokens, *(x for x in (new, inputs.out) if x is not None)]
  mods = inputs.mods
  numbers = [] if mods is None else mods.numbers()
  # 2. Outputs.
  like = lambda shape, dtype, x: jax.ShapeDtypeStruct(
      shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
  column = (shape.group_rows, 1) if shape.few_rows else (1, shape.group_rows)
  outputs = [like((tokens, heads, group, layout.widths[-1]), out_dtype, query),
             like((num_steps, shape.head_groups, *column), jnp.float32, query)]
  aliases = {} if inputs.out is None else {len(scalars) + len(sources) - 1: 0}
  written_to = inputs.tokens[:0 if new is None else None if layout.latent else 1]
  for number, pages in enumerate(written_to):
    outputs.append(like(pages.shape, pages.dtype, pages))
    aliases[len(scalars) + 1 + number] = 2 + number
  # 3. The call.
  by_step = None if mods is None else mods.by_step
  scratch = _scratch(shape, (query.dtype, width), (outputs[0].dtype, column), num_steps)
  scratch.append([] if by_step is None else [
      pltpu.VMEM((slots, *by_step.shape[1:]), jnp.int32) for slots in (SLOTS, 1)])
  writes_rows = layout.latent and new is not None
  scratch.append([] if new is None or not layout.latent else
                 row_writes.scratch(layout, new.shape, new.dtype))
  form = _Form(spec, shape, part, len(written_to), len(inputs.drafts), inputs.counts is not None,
               inputs.tensor_scales is not None, inputs.out is not None)
  groups: list[list] = [scalars, sources, numbers, outputs, *scratch]
  counts = [len(x) for x in groups]

  def run(*refs: Ref) -> None:
    _kernel(*_refs(form, common.split(refs, counts)))

  hbm = pl.BlockSpec(memory_space=pltpu.HBM)
  place = lambda x: hbm if x is by_step else pl.BlockSpec(x.shape, lambda *_: (0, 0, 0, 0))
  out, lse, *written = launch.in_32_bits(pl.pallas_call(
      run,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars), grid=(shape.num_cores,),
          in_specs=[*[hbm] * len(sources), *map(place, numbers)],
          out_specs=[hbm] * len(outputs), scratch_shapes=[x for part in scratch for x in part]),
      out_shape=outputs, name="attn_core_ragged", input_output_aliases=aliases,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary" if shape.num_cores == 1 else "parallel",),
          disable_bounds_checks=True,
          vmem_limit_bytes=row_mods.vmem_limit(shape, query.dtype, mods) + (
              row_writes.vmem_bytes(layout) if writes_rows else 0)),
  ))(*scalars, *sources, *numbers)
  return TokenResults(out, lse.reshape(num_steps, shape.head_groups, shape.group_rows),
                      tuple(written))


def _scratch(shape: StepShape, query: tuple[DTypeLike, int],
             out: tuple[DTypeLike, tuple[int, int]], num_steps: int) -> list[list]:
  """Returns the scratch memory: buffers, words, the running softmax, blocks, and scalars.

  Args:
    shape: of a step.
    query: its dtype, and its width.
    out: its dtype, and the shape of a head group's lse.
    num_steps: the largest possible number of steps.
  """
  layout, column = shape.layout, out[1]
  held, out_dtype = jnp.dtype(query[0]), jnp.dtype(out[0])
  block = lambda width: (SLOTS, layout.key_heads, shape.block_q, shape.group_size, width)
  return [
      [pltpu.VMEM(*x) for x in layout.buffers()],
      [pltpu.VMEM(*x) for x in layout.word_buffers()],
      [pltpu.VMEM(x, jnp.float32) for x in shape.running_shapes()],
      [pltpu.VMEM((1, shape.head_groups, shape.group_rows, layout.widths[0]), held),
       pltpu.VMEM(block(query[1]), held), pltpu.VMEM(block(layout.widths[-1]), out_dtype),
       pltpu.VMEM((SLOTS, shape.head_groups, *column), jnp.float32)],
      [pltpu.SMEM((len(Steps._fields), num_steps), jnp.int32), pltpu.SMEM((1,), jnp.int32),
       pltpu.SMEM((common.NUM_COUNTERS,), jnp.int32), pltpu.SemaphoreType.DMA((layout.slots,)),
       pltpu.SemaphoreType.DMA((SLOTS,)), pltpu.SemaphoreType.DMA((SLOTS,)),
       pltpu.SemaphoreType.DMA(())]]


def _refs(form: _Form, parts: Sequence[Sequence[Ref]],
          ) -> tuple[KernelRefs, TokenRefs, NewTokenRefs | RowRefs | None]:
  """Names the references of a kernel.

  Args:
    form: of the kernel.
    parts: references to scalars, sources, numbers of the score mod, outputs, those of `_scratch`,
      blocks of the numbers, and those of `row_writes.scratch`.
  """
  (scalars, sources, numbers, outputs, buffers, words, running, blocks, others, of_mods,
   of_rows) = parts
  starts, lengths, tables, *scalars = scalars
  drafts, scalars = scalars[:form.num_drafts], scalars[form.num_drafts:]
  counts = scalars[0] if form.has_counts else None
  query, *sources = sources[:-1] if form.continues else sources
  out, lse, *pages = outputs
  rows, query_blocks, out_blocks, lse_blocks = blocks
  steps, num_live, counters, arrived, query_arrived, out_sent, new_written = others
  t = TokenRefs(counts, form.part, starts, lengths, query, out, lse, query_blocks, out_blocks,
                lse_blocks, query_arrived, out_sent)
  mods = kernel.mod_refs(form.spec, numbers)
  if mods is not None and of_mods:
    t = t._replace(numbers=mods.by_step, number_blocks=of_mods[0])
    mods = mods._replace(by_step=of_mods[1])
  new: NewTokenRefs | RowRefs | None = None
  if form.num_written:
    # What is read is the result, since interpret mode does not write to the argument.
    new = NewTokenRefs(starts, lengths, tables, sources[-1], pages[0], new_written,
                       form.shape.row_pages, token_blocks.requests_in_use(t), query.shape[0])
    sources = [*pages, *sources[form.num_written:-1]]
    new = row_writes.refs(new, form.shape.layout, pages, of_rows) if of_rows else new
  return KernelRefs(form.spec, form.shape, steps, num_live, tables,
                    scalars[-1] if form.has_scales else None, rows, sources, (out, lse), buffers,
                    words, online_softmax.Running(*running), arrived, counters, mods,
                    drafts), t, new


def _kernel(k: KernelRefs, t: TokenRefs, new: NewTokenRefs | RowRefs | None) -> None:
  """Computes the steps of a core."""
  # 1. Write the new tokens, find the steps, and start the transfers of the first blocks.
  written: jax.Array | int = 0
  if isinstance(new, RowRefs):
    row_writes.write(new)
  elif new is not None:
    written = new_tokens.start(new)
  clear_others = lambda: token_blocks.clear_others(k, t)
  if k.shape.num_cores == 1:
    clear_others()
  else:
    pl.when(pl.program_id(0) == 0)(clear_others)
  token_blocks.make_steps(k, t)
  begin, end = token_blocks.steps_of_core(k, kernel.step_count(k))
  step_of = lambda number: kernel.step_of(k, number)
  pl.when(begin < end)(
      lambda: token_blocks.start_queries(k, t, begin, step_of(begin), begin & 1))
  if isinstance(new, NewTokenRefs):
    new_tokens.wait(new, written)
  kernel.fetch_first(k, begin, end)

  @pl.loop(begin, end)
  def _(current: jax.Array) -> None:
    step, slot = step_of(current), current & 1

    # 2. Fold in the blocks of keys, while the next queries arrive.
    @pl.when(current + 1 < end)
    def _() -> None:
      token_blocks.start_queries(k, t, current + 1, step_of(current + 1), 1 - slot)
    token_blocks.load_rows(k, t, step, slot)
    kernel.fold_blocks(k, step, end)

    # 3. Normalize and send, when the results that were in the slot have been sent.
    @pl.when(current >= begin + SLOTS)
    def _() -> None:
      token_blocks.wait_results(k, t, step_of(current - SLOTS), slot)
    heads = k.shape.group_heads
    for group in range(k.shape.head_groups):
      out, lse = kernel.result(k, group, t.out_blocks.dtype)
      out = out.reshape(heads, k.shape.block_q, k.shape.group_size, out.shape[-1])
      t.out_blocks[slot, pl.ds(group * heads, heads)] = out
      t.lse_blocks[slot, group] = lse
    token_blocks.start_results(k, t, current, step, slot)

  # 4. Wait for the last results.
  @pl.loop(jnp.maximum(end - SLOTS, begin), end)
  def _(number: jax.Array) -> None:
    token_blocks.wait_results(k, t, step_of(number), number & 1)
