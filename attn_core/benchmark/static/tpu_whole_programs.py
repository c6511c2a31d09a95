# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole programs of attention on [B, T, H, D], to compile for a TPU that is not attached.

Forward, or forward and backward in one program, with XLA's operations around the kernels: layouts,
lists of steps of traced masks. A static profiler reads zeros in scalar memory, so that what a
kernel reads there is computed from the number of the step: its schedule, and which softmax it
chooses.
"""

import contextlib
import functools
import itertools
from typing import Any, Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.attention import attention
from attn_core.benchmark import cases
from attn_core.benchmark.cases import Case
from attn_core.benchmark.static import tpu_programs
from attn_core.benchmark.static.tpu_programs import Built, Contender, Program
from attn_core.config.metadata import OperationMetadata
from attn_core.kernels.tpu.flash import (call, schedule, softmax_choice, step_list, tile_inputs,
                                         tiling)
from attn_core.kernels.tpu.flash.schedule import LANES
from attn_core.masks import constructors, mask as mask_lib

OURS = "flash_attn2, whole"
OURS_WORST = "flash_attn2, whole, worst"  # the naive softmax fails in every step
SPLASH = "jax splash, whole"
IN_HBM = ", in HBM"  # the suffix of a forward whose arrays lie in HBM, as long ones do
# The suffix of arrays that lie as the kernels read them, as those of a model's projections do.
PROJECTED = ", projected"
GRADIENT = " gradient"  # the suffix of forward and backward in one program
# Prefixes of cases with one more argument of the program: segment ids, a dense mask that also hides
# single pairs of every tile, and a bias of all pairs.
PACKED, DENSE, BIASED = "packed", "dense_mask", "bias"


def mask_array(case: Case) -> np.ndarray | None:
  """Returns the segment ids int32 [B, T] or the dense mask bool [1, 1, T, S]; None without."""
  if case.name.startswith(DENSE):
    shape = case.queries, case.keys
    return np.random.default_rng(0).random((1, 1, *shape)) < 0.9
  if not case.name.startswith(PACKED):
    return None
  found = cases.segment_ids(case)
  return np.zeros((case.batch, case.queries), np.int32) if found is None else found


def _shapes(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns query, key, value, and one more where the case has it; see PACKED."""
  arrays = [jax.ShapeDtypeStruct((case.batch, *shape), jnp.dtype(case.dtype)) for shape in (
      (case.queries, case.heads, case.width), (case.keys, case.key_heads, case.width),
      (case.keys, case.key_heads, case.value_width))]
  if case.name.startswith(BIASED):
    arrays.append(jax.ShapeDtypeStruct((1, 1, case.queries, case.keys), arrays[0].dtype))
  found = mask_array(case)
  return (*arrays, *(() if found is None else (jax.ShapeDtypeStruct(found.shape, found.dtype),)))


def _projected(array: jax.Array) -> jax.Array:
  """Converts [B, tokens, heads, width] to what the kernels read: [B, tokens, heads * width].

  Where heads are not whole lanes, they come before the tokens.
  """
  batch, tokens, heads, width = array.shape
  return array.transpose(0, 2, 1, 3) if width % LANES else array.reshape(
      batch, tokens, heads * width)


def _program(case: Case, attend: Callable[..., jax.Array], gradient: bool,
             projected: bool = False) -> Built:
  """Returns attend(query, key, value, *more), or it and its cotangents; see PROJECTED."""
  shapes = _shapes(case)
  out = jax.ShapeDtypeStruct((case.batch, case.queries, case.heads, case.value_width),
                             jnp.dtype(case.dtype))
  if projected:
    plain, tokens = attend, shapes[:3]
    unpacks = [jax.linear_transpose(_projected, x) for x in tokens]

    def attend(*arrays: jax.Array) -> jax.Array:
      found = (unpack(x)[0] for unpack, x in zip(unpacks, arrays))
      return _projected(plain(*found, *arrays[3:]))

    *packed, out = (jax.eval_shape(_projected, x) for x in (*tokens, out))
    shapes = *packed, *shapes[3:]
  if not gradient:
    return attend, shapes

  def both(d_out: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array,
           *more: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, pull = jax.vjp(lambda *x: attend(*x, *more), query, key, value)
    return out, pull(d_out)

  return both, (out, *shapes)


# --- This library's. -----------------------------------------------------------------------------


@contextlib.contextmanager
def _ours(program: Program, *, gradient: bool, worst: bool, in_hbm: bool = False,
          projected: bool = False) -> Iterator[Built]:
  case = program.case
  known = _KnownSteps(mask_array(case))
  plain = cases.mask(case._replace(documents=1))

  def attend(query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array) -> jax.Array:
    mask, bias = plain, None
    if case.name.startswith(BIASED):
      bias, = more
    elif more:
      of_array = constructors.dense if case.name.startswith(DENSE) else constructors.segments
      mask = plain & of_array(*more)
    return attention(query, key, value, mechanism="flash_attn2", mask=mask, causal=False, bias=bias,
                     metadata=OperationMetadata(platform="tpu"), logits_soft_cap=case.soft_cap,
                     dropout_prob=case.dropout,
                     dropout_rng=jax.random.key(0) if case.dropout else None).attention_outputs

  blocks = dict.fromkeys(tiling.BLOCKS, program.blocks) if any(program.blocks) else tiling.BLOCKS
  most_vmem = 0 if in_hbm else call.MOST_VMEM_BYTES
  with (mock.patch.object(call, "MOST_VMEM_BYTES", most_vmem),
        mock.patch.object(schedule, "build", known.build),
        mock.patch.object(tiling, "BLOCKS", blocks),
        mock.patch.object(tile_inputs, "TileInputs", known.inputs),
        mock.patch.object(softmax_choice, "SoftmaxChoice",
                          functools.partial(known.choice, worst=worst))):
    yield _program(case, attend, gradient, projected)


class _KnownSteps:
  """The schedules of a program, also of masks whose array is traced; see `mask_array`."""

  def __init__(self, array: np.ndarray | None):
    self._array, self._build = array, schedule.build
    self._found: list[tuple[Any, step_list.Schedule]] = []

  def build(self, mask: mask_lib.Mask, tiling: schedule.Tiling, *, by_keys: bool,
            descending: bool = False) -> tuple[step_list.Schedule, schedule.StepLists]:
    """`schedule.build`, whose lists have known lengths; the schedule is traced if the mask is."""
    build = functools.partial(self._build, tiling=tiling, by_keys=by_keys, descending=descending)
    steps, lists = known, sizes = build(mask)
    if self._array is not None:
      with jax.ensure_compile_time_eval():
        known, sizes = build(jax.tree.map(lambda x: jnp.asarray(self._array), mask))
      lists = lists._replace(longest=int(sizes.longest))
    self._found.append((steps, step_list.Schedule(
        *(np.asarray(x)[:, :int(lists.longest)] for x in known))))
    return steps, lists

  def inputs(self, steps: step_list.Schedule, lists: schedule.StepLists, tiling: schedule.Tiling,
             *, by_keys: bool) -> tile_inputs.TileInputs:
    """A `TileInputs` that computes its schedule; XLA makes that of a traced mask all the same."""
    known = next(x for key, x in reversed(self._found) if key is steps)
    return _ComputedInputs(steps, known, lists, tiling, by_keys=by_keys)

  def choice(self, words: Any, *, worst: bool) -> softmax_choice.SoftmaxChoice:
    """A `SoftmaxChoice` that depends on the number of the step, of the last forward schedule."""
    return _ComputedChoice(words).prepared(self._found[-1][1], worst)


class _ComputedInputs(tile_inputs.TileInputs):
  """Inputs of a kernel with a schedule that is computed instead of read."""

  def __init__(self, steps: step_list.Schedule, known: step_list.Schedule,
               lists: schedule.StepLists, tiling: schedule.Tiling, *, by_keys: bool):
    super().__init__(steps, lists, tiling, by_keys=by_keys)
    if isinstance(steps.kinds, np.ndarray):
      self.scalars = []
    number = lists.halves if lists.batches == lists.heads == 1 else 1
    self._computed = [tpu_programs.computed(step_list.Schedule(*(x[k:k + 1] for x in known)))
                      for k in range(number)]

  def schedule_entry(self, scalars: tuple, list_number: Any, n: Any) -> tuple:
    entry, *others = (one(n) for one in self._computed)
    for other in others:  # of the second half
      entry = tuple(x + (y - x) * list_number for x, y in zip(entry, other))
    return entry


class _ComputedChoice(softmax_choice.SoftmaxChoice):
  """The choice of all rows friendly, or of all rows failing, by the number of the step.

  It updates the words in scalar memory as the original does, and reads none that matters.
  """

  def prepared(self, known: step_list.Schedule, worst: bool) -> "_ComputedChoice":
    """Returns this, for a schedule."""
    columns = np.asarray(known.columns)[0]
    _, self._new = np.unique(columns, return_index=True)
    self._worst = worst
    return self

  def begin_step(self, program_ids: tuple, sizes: tuple, first: Any) -> None:
    super().begin_step(program_ids, sizes, first)
    b, h, half, _, n = program_ids
    groups, halves, steps = sizes
    self._step = n
    self._number = ((b * groups + h) * halves + half) * steps + n

  def _is_new(self, block: Any) -> Any:
    places = np.sort(self._new)
    ends = np.flatnonzero(np.diff(places, append=places[-1] + 2) > 1)
    starts = [0, *(ends[:-1] + 1)]
    runs = [(self._step >= places[i]) & (self._step <= places[j]) for i, j in zip(starts, ends)]
    return functools.reduce(jnp.logical_or, runs)

  @property
  def tries_naive(self) -> Any:
    if not self._worst:
      return self._number >= 0
    return jax.lax.rem(self._number, jnp.int32(softmax_choice.SAFE_STEPS + 1)) == 0

  @property
  def is_safe(self) -> Any:
    return self._number >= 0 if self._worst else self._number < 0

  @property
  def is_shielded(self) -> Any:
    return self._number < 0


# --- JAX's. --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _splash(program: Program, *, gradient: bool) -> Iterator[Built]:
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as kinds
  case, blocks = program.case, program.blocks
  if case.window is not None:
    raise NotImplementedError("splash: measured without windows")
  backward = min(blocks[0], 1024), min(blocks[1], 2048), min(blocks[2], 512)
  sizes = library.BlockSizes(*blocks, *backward, use_fused_bwd_kernel=True)
  shape = (case.queries, case.keys)
  kind = kinds.CausalMask(shape) if case.causal else kinds.FullMask(shape)

  def attend(query: jax.Array, key: jax.Array, value: jax.Array, *ids: jax.Array) -> jax.Array:
    kernel = library.make_splash_mha_single_device(
        kinds.MultiHeadMask([kind] * case.heads), block_sizes=sizes,
        attn_logits_soft_cap=case.soft_cap)
    for name in ("fwd_mask_info", "dkv_mask_info"):
      info = getattr(kernel, name)
      setattr(kernel, name, info._replace(data_next=None, block_mask=None, mask_next=None))
    scaled = query * jnp.asarray(case.width**-0.5, query.dtype)
    query, key, value = (x[0].transpose(1, 0, 2) for x in (scaled, key, value))
    segments = library.SegmentIds(ids[0][0], ids[0][0]) if ids else None
    return kernel(query, key, value, segment_ids=segments).transpose(1, 0, 2)[None]

  steps = tpu_programs.splash_steps(case, blocks, backward)
  with mock.patch.object(library, "_next_nonzero", steps):
    yield _program(case, attend, gradient)


CONTENDERS: dict[str, Contender] = {
    name + GRADIENT * gradient: functools.partial(contender, gradient=gradient)
    for (name, contender), gradient in itertools.product((
        (OURS, functools.partial(_ours, worst=False)),
        (OURS_WORST, functools.partial(_ours, worst=True)), (SPLASH, _splash)), (False, True))}
CONTENDERS |= {
    OURS + PROJECTED + GRADIENT * gradient: functools.partial(
        _ours, gradient=gradient, worst=False, projected=True) for gradient in (False, True)}
CONTENDERS |= {
    name + IN_HBM: functools.partial(_ours, gradient=False, worst=worst, in_hbm=True)
    for name, worst in ((OURS, False), (OURS_WORST, True))}
