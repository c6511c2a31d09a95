# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention programs of this library and of JAX's kernels, to compile for a TPU not attached.

The schedule of a kernel, the list of blocks to visit, is in scalar memory. A static profiler reads
zeros there, and rejects it on some chips: these programs compute the same schedule from the number
of the step instead.
"""

import contextlib
import functools
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.attention import attention
from attn_core.benchmark import cases
from attn_core.benchmark.cases import Case
from attn_core.kernels.tpu.flash import schedule, step_list, tile_inputs, tiling
from attn_core.config.metadata import OperationMetadata

OURS = "flash_attn2"
OURS_SAFE = "flash_attn2, safe"  # with the maximum; see `kernels.tpu.flash.forward`


class Program(NamedTuple):
  """One kernel at one choice of block sizes."""

  contender: str
  case: Case
  backward: bool
  chip: str
  # (query tokens, key tokens, key tokens computed at once; for a paged cache, tokens of a page).
  blocks: tuple[int, int, int]
  decoding: int = 0  # requests of one query, before those of case.queries; over pages only
  stored: str = ""  # dtype of the pages, if it is not that of the case


# What a contender yields: a function, and the shapes of its arguments.
Built = tuple[Callable[..., Any], tuple[Any, ...]]
Contender = Callable[[Program], contextlib.AbstractContextManager[Built]]


@contextlib.contextmanager
def built(program: Program, contender: Contender) -> Iterator[Built]:
  """Yields (function, shapes of its arguments): the forward, or the backward given its residuals.

  The function must be compiled inside the context, since kernels are traced when it is compiled.

  Args:
    program: the program to build.
    contender: a value of a table such as CONTENDERS, which makes the forward of the program.
  """
  with contender(program) as (attend, arguments):
    if program.backward:
      out, pull = jax.eval_shape(lambda *x: jax.vjp(attend, *x), *arguments)
      yield (lambda pull, out: pull(out)), (pull, out)
    else:
      yield attend, arguments


def _arrays(case: Case, form: Callable) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns query, key and value; form(batch, tokens, heads, width) orders the axes."""
  shapes = ((case.queries, case.heads, case.width), (case.keys, case.key_heads, case.width),
            (case.keys, case.key_heads, case.value_width))
  return tuple(jax.ShapeDtypeStruct(form(case.batch, *shape), jnp.dtype(case.dtype))
               for shape in shapes)


# --- This library's. -----------------------------------------------------------------------------


@contextlib.contextmanager
def _ours(program: Program, *, naive: tuple[str, ...]) -> Iterator[Built]:
  metadata, case = OperationMetadata(platform="tpu"), program.case
  mask = cases.mask(case)
  attend = lambda query, key, value, *sinks: attention(
      query, key, value, mechanism="flash_attn2", mask=mask, causal=False, metadata=metadata,
      logits_soft_cap=case.soft_cap, softmax_aux=sinks[0] if sinks else None,
      dropout_prob=case.dropout,
      dropout_rng=jax.random.key(0) if case.dropout else None).attention_outputs
  sinks = (jax.ShapeDtypeStruct((case.heads,), jnp.float32),) if case.sinks else ()
  with (mock.patch.object(tile_inputs, "TileInputs", _ComputedTileInputs),
        mock.patch.object(tiling, "NAIVE_DTYPES", naive),
        mock.patch.object(tiling, "BLOCKS", dict.fromkeys(tiling.BLOCKS, program.blocks))):
    yield attend, (*_arrays(case, lambda b, t, h, w: (b, t, h, w)), *sinks)


class _ComputedTileInputs(tile_inputs.TileInputs):
  """Inputs of a kernel with a schedule that is computed instead of read."""

  def __init__(self, steps: step_list.Schedule, lists: schedule.StepLists, tiling: schedule.Tiling,
               *, by_keys: bool):
    super().__init__(steps, lists, tiling, by_keys=by_keys)
    self.scalars = []
    self._computed = [computed(step_list.Schedule(*(np.asarray(x)[k:k + 1] for x in steps)))
                      for k in range(lists.halves)]

  def schedule_entry(self, scalars: tuple, list_number: Any, n: Any) -> tuple:
    entry, *others = (one(n) for one in self._computed)
    for other in others:  # of the second half
      entry = tuple(x + (y - x) * list_number for x, y in zip(entry, other))
    return entry


def computed(visits: step_list.Schedule) -> Callable[[Any], tuple]:
  """Returns a function step -> (row, column, kinds, flags) that computes a schedule.

  Args:
    visits: numpy arrays of one list; the columns of a row are consecutive, in rising or in falling
      order, and the tile kinds of a block depend only on its distance to the diagonal. Idle steps
      after its end repeat its last block.

  Raises:
    ValueError: the schedule is not of this form.
  """
  whole = [np.asarray(x)[0].astype(np.int64) for x in visits]
  end = int(np.flatnonzero(whole[-1] & step_list.END)[-1]) + 1  # idle steps from here on
  rows, columns, kinds, flags = (x[:end] for x in whole)
  starts = np.flatnonzero(flags & step_list.FIRST)
  falls = bool(((np.diff(columns) < 0) & (np.diff(rows) == 0)).any())
  sign = np.int32(-1 if falls else 1)
  shifts = columns[starts] - sign * starts
  marks = [(np.flatnonzero(flags & bit), bit) for bit in (
      step_list.FIRST, step_list.LAST, step_list.BEGIN, step_list.END)]
  is_new = (flags[starts] & step_list.NEW).astype(np.int64)
  size = max(1, rows.max() + 1), max(1, columns.max() + 1)
  distance = lambda row, column: row * size[1] - column * size[0]
  found, counts = np.unique(kinds, return_counts=True)
  usual = int(found[np.argmax(counts)])
  special = {int(distance(rows[n], columns[n])): int(kinds[n])
             for n in np.flatnonzero(kinds != usual)}

  number = lambda condition, x=1: condition.astype(np.int32) * np.int32(x)

  def entry(step: Any) -> tuple[Any, ...]:
    is_idle = number(step >= end)
    n = step - is_idle * (step - np.int32(end - 1))
    row, column = number(n >= 0, rows[0]), sign * n + np.int32(shifts[0])
    flag = number(n >= 0, is_new[0])
    for start, change in zip(starts[1:], np.diff(np.stack([rows[starts], shifts, is_new])).T):
      row, column, flag = (x + number(n >= start, y) if y else x
                           for x, y in zip((row, column, flag), change))
    away = distance(row, column).astype(np.int32)
    found = number(n >= 0, usual)
    for where, bits in special.items():
      found = found + number(away == where, np.int64(bits - usual).astype(np.int32))
    for places, bit in marks:
      flag = flag + sum(number(n == place, bit) for place in places)
    alive = np.int32(1) - is_idle
    return row, column, found * alive, flag * alive

  steps = np.arange(len(whole[0]), dtype=np.int32)
  if any((x != y).any() for x, y in zip(entry(steps), whole)):
    raise ValueError("visits: got a schedule that does not follow from distances to the diagonal")
  return entry


# --- JAX's. --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _jax_flash(program: Program) -> Iterator[Built]:
  from jax.experimental.pallas.ops.tpu import flash_attention as library
  case, (block_q, block_kv, compute) = program.case, program.blocks
  _require(case.window is None and case.key_heads == case.heads and case.width == case.value_width,
           "flash: without windows, grouped heads or two widths")
  sizes = library.BlockSizes(
      block_q, block_kv, compute, 1,
      block_q_major_dkv=block_q, block_k_major_dkv=block_kv, block_k_dkv=compute,
      block_q_dkv=block_q, block_k_major_dq=block_kv, block_k_dq=compute, block_q_dq=block_q)
  attend = lambda q, k, v: library.flash_attention(
      q, k, v, causal=case.causal, sm_scale=case.width**-0.5, block_sizes=sizes)
  yield attend, _arrays(case, lambda b, t, h, w: (b, h, t, w))


def splash_steps(case: Case, forward: tuple[int, ...],
                 backward: tuple[int, ...]) -> Callable[..., tuple[object, ...]]:
  """Returns splash's function from a step to the next block, without lists in scalar memory.

  Args:
    case: causal, or without a mask.
    forward: its blocks, first of queries, then of keys.
    backward: those of the gradients of keys and values, whose steps are columns.
  """
  def next_nonzero(h: Any, i: Any, j: Any, data_next: Any, block_mask: Any, m_next: Any,
                   next_i: bool = False) -> tuple[Any, ...]:
    here = i if next_i else j
    if not case.causal:
      return here, None, True, False
    # As in the original, the next block that runs is fetched in place of a skipped one.
    block_q, block_kv = (backward if next_i else forward)[:2]
    runs = j * block_kv <= i * block_q + (block_q - 1)
    after = jnp.where(runs, here, j * block_kv // block_q if next_i else 0)
    return after, None if m_next is None else 0, runs, m_next is None
  return next_nonzero


@contextlib.contextmanager
def _jax_splash(program: Program, *, fused: bool) -> Iterator[Built]:
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as kinds
  case, (block_q, block_kv, compute) = program.case, program.blocks
  _require(case.window is None and case.key_heads == case.heads,
           "splash: measured without windows and grouped heads")
  sizes = library.BlockSizes(
      block_q, block_kv, compute, block_q, block_kv, compute,
      None if fused else block_q, None if fused else block_kv, use_fused_bwd_kernel=fused)
  shape = (case.queries, case.keys)
  mask = kinds.CausalMask(shape) if case.causal else kinds.FullMask(shape)

  def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    kernel = library.make_splash_mha_single_device(
        kinds.MultiHeadMask([mask] * case.heads), block_sizes=sizes)
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
      info = getattr(kernel, name)
      if info is not None:
        setattr(kernel, name, info._replace(data_next=None, block_mask=None, mask_next=None))
    return kernel(query[0] * jnp.asarray(case.width**-0.5, query.dtype), key[0], value[0])

  steps = splash_steps(case, program.blocks, program.blocks)
  with mock.patch.object(library, "_next_nonzero", steps):
    yield attend, _arrays(case, lambda b, t, h, w: (b, h, t, w))


def _require(condition: bool, what: str) -> None:
  if not condition:
    raise NotImplementedError(what)


CONTENDERS: dict[str, Contender] = {
    OURS: functools.partial(_ours, naive=tiling.NAIVE_DTYPES),
    OURS_SAFE: functools.partial(_ours, naive=()), "jax flash": _jax_flash,
    "jax splash": functools.partial(_jax_splash, fused=False),
    "jax splash, fused": functools.partial(_jax_splash, fused=True)}
