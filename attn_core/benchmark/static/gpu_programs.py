# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention programs of this library and of others, to compile for a GPU that is not attached.

`programs` returns them by name (`Program.label`), as `static.gpu.measure` expects them.
"""

import functools
import itertools
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.attention import attention
from attn_core.benchmark import cases, contenders
from attn_core.benchmark.cases import Case
from attn_core.kernels.gpu.flash import tiling
from attn_core.config.metadata import OperationMetadata
from attn_core.types import BlockSizes, MaskOperands, operands_like

OURS, JAX, TOKAMAX = "flash_attn2", "jax attention_mgpu", "tokamax mosaic"
WIDTHS = (64, 128, 256)
MASKS = ("causal", "full", "window", "documents")
WINDOW = (1023, 0)
DOCUMENTS = 4
TOKENS = 4096
HEADS = 4


class Program(NamedTuple):
  """One contender on one case in one direction."""

  contender: str  # a key of CONTENDERS
  case: Case
  backward: bool

  @property
  def label(self) -> str:
    return f"{self.contender}, {self.case.name}, {'backward' if self.backward else 'forward'}"


def plan(widths: tuple[int, ...] = WIDTHS) -> list[Program]:
  """Returns every contender on every case."""
  found = []
  for width, mask, backward in itertools.product(widths, MASKS, (False, True)):
    case = Case(f"{mask}_d{width}_t{TOKENS}", 1, HEADS, HEADS, width, width, TOKENS, TOKENS,
                mask != "full", WINDOW if mask == "window" else None,
                documents=DOCUMENTS if mask == "documents" else 1, dtype="bfloat16")
    found += [Program(contender, case, backward) for contender in CONTENDERS]
  return found


def programs() -> dict[str, tuple]:
  """Returns {label: (function, shapes of its arguments)}; a backward includes its forward."""
  return {program.label: _built(program) for program in plan()}


def _built(program: Program) -> tuple[Callable, tuple]:
  attend, dtype = CONTENDERS[program.contender]
  case = program.case._replace(dtype=dtype)
  run = functools.partial(attend, case)
  def both(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, pull = jax.vjp(run, *arrays)
    return out, pull(out)
  return both if program.backward else run, shapes(case)


def shapes(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the shapes of query, key and value."""
  return tuple(jax.ShapeDtypeStruct((case.batch, *shape), jnp.dtype(case.dtype)) for shape in (
      (case.queries, case.heads, case.width), (case.keys, case.key_heads, case.width),
      (case.keys, case.key_heads, case.value_width)))


def staged_bytes(program: Program) -> tuple[int, ...]:
  """Returns the bytes that each of our kernels copies per step, in the order of their names."""
  case = program.case
  mask = cases.mask(case)
  operands = operands_like(*shapes(case), mask=MaskOperands(tuple(jax.tree.leaves(mask))))
  spec, row = cases.spec(case, jax.tree.structure(mask)), 2 * (case.width + case.value_width)
  if not program.backward:
    return (row * tiling.make_tiling(operands, spec, BlockSizes()).block_kv,)
  tilings = tiling.make_backward_tilings(operands, spec, BlockSizes())
  return (row * tilings.key.block_q + 2 * 4 * tilings.key.block_q,
          row * tilings.query.block_kv)


# --- Contenders. ---------------------------------------------------------------------------------


def _ours(case: Case, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  ids = cases.segment_ids(case)
  mask = cases.mask(case, None if ids is None else jnp.asarray(ids))
  return attention(query, key, value, mechanism="flash_attn2", mask=mask, causal=False,
                   metadata=OperationMetadata(platform="gpu", compute_capability="9.0")
                   ).attention_outputs


def _jax(case: Case, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  from jax.experimental.pallas.ops.gpu import attention_mgpu
  _require(case.window is None and case.documents == 1, "neither windows nor documents")
  block_kv = 128 if case.width <= 128 else 64
  return attention_mgpu.attention(query, key, value, attention_mgpu.TuningConfig(
      64, block_kv, 2, causal=case.causal, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64,
      block_kv_dq=64))


def _tokamax(case: Case, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  ids = cases.segment_ids(case)
  return contenders.tokamax_mechanism("mosaic", case, contenders.Inputs(
      query, key, value, cotangent=query,  # which the forward does not read
      segment_ids=None if ids is None else jnp.asarray(ids)))


def _require(condition: bool, what: str) -> None:
  if not condition:
    raise NotImplementedError(what)


# Name -> (function, dtype); JAX's kernel supports float16 only.
CONTENDERS = {OURS: (_ours, "bfloat16"), JAX: (_jax, "float16"), TOKAMAX: (_tokamax, "bfloat16")}
