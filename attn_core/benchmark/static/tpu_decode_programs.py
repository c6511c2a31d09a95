# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding programs of this library and of JAX's kernels, to compile for a TPU not attached.

Every request has one query. A static profiler reads zeros from scalar memory, which holds lengths
and steps: these programs compute them instead. Page tables are read, and point to page 0.
"""

import contextlib
import functools
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.attention import attention
from attn_core.benchmark import cases
from attn_core.benchmark.cases import Case
from attn_core.benchmark.static.tpu_programs import Built, Contender, Program
from attn_core.caches import dense
from attn_core.caches.paged import layouts, ops
from attn_core.kernels.tpu.ragged import (common, kernel as ragged_kernel, new_tokens,
                                          token_blocks, update_few_rows)
from attn_core.config.metadata import OperationMetadata
from attn_core.types import BlockSizes, cdiv

DENSE = "autoregressive_decodeattn"
PAGES = "ragged_page_attention_v2"
WRITES = "ragged_page_attention_v3"  # the program also writes the new tokens
JAX_RAGGED = "jax ragged_paged_attention"
JAX_PAGED = "jax paged_attention"
JAX_VECTOR_BYTES = 100 * 2**20  # limit of JAX's kernel, on chips that have as much


def case_of(requests: int, tokens: int, heads: tuple[int, int], width: int) -> Case:
  """Returns a case of one query per request, for requests of equal length; heads: (H, K)."""
  return Case(f"decode_{requests}x{tokens}_d{width}", requests, *heads, width, width, 1, tokens,
              dtype="bfloat16")


def live_bytes(case: Case) -> int:
  """Returns the bytes of all keys and values."""
  return (case.batch * case.keys * case.key_heads * (case.width + case.value_width)
          * jnp.dtype(case.dtype).itemsize)


# --- This library's. -----------------------------------------------------------------------------


@contextlib.contextmanager
def _computed(case: Case) -> Iterator[None]:
  """Makes the kernel compute its steps, and assume that results are finite."""
  def item(k: Any, number: Any) -> common.Steps:
    number = jnp.asarray(number, jnp.int32)
    at = lambda x: 0 * number + x
    last = case.keys - 1
    return common.Steps(number, at(0), at(cdiv(case.keys, k.shape.layout.block_kv)), at(last),
                        at(last), at(case.keys), at(0), at(case.keys))
  span = lambda new, request: new_tokens.Span(request, request + 1, case.keys - 1 - request)
  is_finite = update_few_rows._is_finite
  request_of = lambda _, r: token_blocks.Request(
      case.keys - 1, jnp.int32(case.keys), r + 1 - case.keys)
  with (mock.patch.object(new_tokens, "span_of", span),
        mock.patch.object(token_blocks, "request_of", request_of),
        mock.patch.object(token_blocks, "start_of", lambda _, r: r),
        mock.patch.object(ragged_kernel, "step_of", item),
        mock.patch.object(ragged_kernel, "step_count",
                          lambda k: case.batch + 0 * pl.program_id(0)),
        mock.patch.object(update_few_rows, "_is_finite",
                          lambda x: is_finite(x) | (pl.program_id(0) >= 0))):
    yield


@contextlib.contextmanager
def _ours(program: Program) -> Iterator[Built]:
  case, (_, block_kv, page) = program.case, program.blocks
  ours = functools.partial(
      attention, mechanism=program.contender, metadata=OperationMetadata(platform="tpu"),
      block_sizes=BlockSizes(block_q=1, block_kv=block_kv), score_mod=cases.score_mod(case))
  attend: Callable[..., Any]
  arguments: tuple[Any, ...]
  if program.contender == DENSE:
    cache = jax.eval_shape(lambda: dense.init(
        case.batch, case.keys, (case.key_heads, case.width), dtype=case.dtype))
    attend = lambda query, cache: ours(
        query, None, None, cache_view=cache, mode="__autoregressive__").attention_outputs
    arguments = _array(case, case.batch, 1, case.heads, case.width), cache
  else:
    form = layouts.PagesV3 if program.contender == WRITES else layouts.PagesV2
    pages = jax.eval_shape(lambda: ops.init(
        form, _pages(case, page), page, layouts.Heads(case.key_heads, case.width, case.width),
        case.dtype))
    new = (_new(case, case.key_heads),) * 2 if program.contender == WRITES else (None, None)
    attend = lambda query, cache, new, *metadata: ours(
        query, *new, layout="thd", cache_view=cache,
        cache_metadata=layouts.PagesMetadata(*metadata))[::3]
    if program.contender == WRITES:
      attend = jax.jit(attend, donate_argnums=1)
    arguments = _new(case, case.heads), pages, new, *_metadata(case, page)
  with _computed(case):
    yield attend, arguments


# --- JAX's. --------------------------------------------------------------------------------------


class _Known(NamedTuple):
  """A reference to scalars whose values are computed."""

  at: Callable[[Any], Any]
  shape: tuple[int, ...] = (1,)

  def __getitem__(self, index: Any) -> Any:
    return jnp.asarray(self.at(index), jnp.int32)


@contextlib.contextmanager
def _jax_ragged(program: Program) -> Iterator[Built]:
  from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as library
  case, (block_q, block_kv, page) = program.case, program.blocks
  kernel = library.ragged_paged_attention_kernel

  def known(*refs: Any, sm_scale: Any, sliding_window: Any, soft_cap: Any, mask_value: Any,
            k_scale: Any, v_scale: Any) -> None:
    lengths, tables, starts, turn, _, *rest = refs
    kernel(_Known(lambda _: case.keys, lengths.shape), tables, _Known(lambda i: i, starts.shape),
           turn, _Known(lambda _: case.batch), *rest, sm_scale=sm_scale,
           sliding_window=sliding_window, soft_cap=soft_cap, mask_value=mask_value,
           k_scale=k_scale, v_scale=v_scale)

  attend = lambda query, cache, lengths, tables, starts: library.ragged_paged_attention(
      query, cache, lengths, tables, starts, jnp.full((1,), case.batch, jnp.int32),
      sm_scale=case.width**-0.5, num_kv_pages_per_block=block_kv // page,
      num_queries_per_block=block_q, vmem_limit_bytes=JAX_VECTOR_BYTES)
  cache = _array(case, _pages(case, page), page, 2 * case.key_heads, case.width)
  tables, lengths, starts = _metadata(case, page)
  with mock.patch.object(library, "ragged_paged_attention_kernel", known):
    yield attend, (_new(case, case.heads), cache, lengths, tables, starts)


@contextlib.contextmanager
def _jax_paged(program: Program) -> Iterator[Built]:
  from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as library
  case, (_, block_kv, page) = program.case, program.blocks
  name = "paged_flash_attention_kernel_inline_seq_dim"
  kernel = getattr(library, name)

  def known(*refs: Any, pages_per_sequence: Any, batch_size: Any, pages_per_compute_block: Any,
            mask_value: Any, attn_logits_soft_cap: Any, megacore_mode: Any) -> None:
    kernel(_Known(lambda _: case.keys, refs[0].shape), *refs[1:],
           pages_per_sequence=pages_per_sequence, batch_size=batch_size,
           pages_per_compute_block=pages_per_compute_block, mask_value=mask_value,
           attn_logits_soft_cap=attn_logits_soft_cap, megacore_mode=megacore_mode)

  attend = lambda query, key, value, lengths, tables: library.paged_attention(
      query, key, value, lengths, tables, pages_per_compute_block=block_kv // page)
  held = _array(case, case.key_heads, _pages(case, page), page, case.width)
  with mock.patch.object(library, name, known):
    yield attend, (_new(case, case.heads), held, held, *_metadata(case, page)[1::-1])


# --- Arguments. ----------------------------------------------------------------------------------


def _array(case: Case, *shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, case.dtype)


def _new(case: Case, heads: int) -> jax.ShapeDtypeStruct:
  """Returns the shape of the new tokens' queries, keys or values."""
  return _array(case, case.batch, heads, case.width)


def _pages(case: Case, page: int) -> int:
  return case.batch * (case.keys // page)


def _metadata(case: Case, page: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the shapes of tables, lengths and starts of the requests."""
  shapes = (case.batch, case.keys // page), (case.batch,), (case.batch + 1,)
  return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)


CONTENDERS: dict[str, Contender] = {
    **dict.fromkeys((DENSE, PAGES, WRITES), _ours), JAX_RAGGED: _jax_ragged,
              JAX_PAGED: _jax_paged}
