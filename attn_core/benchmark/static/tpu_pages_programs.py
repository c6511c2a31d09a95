# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that write new tokens to pages and attend to them, to compile for a TPU not attached.

The first `decoding` requests of a program have one query, all others `case.queries`; every request
has `case.keys` tokens. Lengths and steps are computed, as in `tpu_decode_programs`.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from typing import Any, Iterator
from unittest import mock

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.attention import attention
from attn_core.benchmark.cases import Case
from attn_core.benchmark.static.tpu_programs import Built, Contender, Program
from attn_core.caches import latent
from attn_core.caches.paged import latent_pages, layouts, ops
from attn_core.config.metadata import OperationMetadata
from attn_core.kernels.tpu.ragged import (common, kernel as ragged_kernel, new_tokens,
                                          token_blocks, update_few_rows, update_many_rows)
from attn_core.types import BlockSizes, LatentOptions, cdiv

Index = int | jax.Array

OURS = "attn_core ragged_page_attention_v3"
OURS_LATENT = "attn_core multi_latent_ragged_page_attention"
OURS_DENSE = "attn_core multi_latent_attention"  # latent rows in a dense cache
LATENT = 512  # numbers of a latent row that are its value
RPA = "tpu-inference rpa v3"
RPA_VECTOR_BYTES = 100 * 2**20  # limit of its kernel
RPA_SCALE = 0.05  # of keys and values in 8 bits, any number
VERSIONS = {"v5e": 5, "v6e": 6, "tpu7x": 7}  # chip -> the number that it expects
PACKAGE = "tpu_inference.kernels.ragged_paged_attention.v3"


def case_of(kind: str, requests: tuple[int, int], lengths: tuple[int, int],
            heads: tuple[int, int], width: int, stored: str = "") -> Case:
  """Returns a case.

  Args:
    kind: its name begins with it.
    requests: (those of one query, those of many).
    lengths: (tokens of a request, queries of a request of many).
    heads: (H, K).
    width: D.
    stored: dtype of the pages, if it is not bfloat16.
  """
  tokens, queries = lengths
  value_width = LATENT if kind in ("latent", "dense") else width
  name = f"{kind}_{sum(requests)}x{tokens}_h{heads[0]}_{heads[1]}_d{width}"
  name += f"_{stored}" if stored else ""
  return Case(name, sum(requests), *heads, width, value_width, queries, tokens, dtype="bfloat16")


class Requests:
  """The requests of a program: where their queries begin, and how many there are."""

  def __init__(self, program: Program) -> None:
    self.case, self.decoding = program.case, program.decoding

  @property
  def tokens(self) -> int:
    """T."""
    return self.decoding + (self.case.batch - self.decoding) * self.case.queries

  def start(self, request: Index) -> Index:
    """Returns where the queries of a request begin."""
    several = (request - self.decoding) * self.case.queries + self.decoding
    if isinstance(request, int):
      return request if request <= self.decoding else several
    return jnp.where(request <= self.decoding, request, several)

  def distribution(self) -> tuple[int, int, int]:
    """Returns the ends of requests of one query, of prefills of one size, and of all."""
    return self.decoding, self.decoding, self.case.batch


def cache_of(program: Program) -> layouts.PagesV3:
  """Returns the shapes of the pages of all requests, with scales of all numbers if of 8 bits."""
  case, page = program.case, program.blocks[2]
  cache = jax.eval_shape(lambda: ops.init(
      layouts.PagesV3, case.batch * (case.keys // page), page,
      layouts.Heads(case.key_heads, case.width, case.width), program.stored or case.dtype,
      "tensor" if program.stored else None))
  assert isinstance(cache, layouts.PagesV3)
  return cache


def shapes(program: Program) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the shapes of (query, key, value, lengths, tables [R, max_pages], starts)."""
  case, page, tokens = program.case, program.blocks[2], Requests(program).tokens
  array = lambda heads: jax.ShapeDtypeStruct((tokens, heads, case.width), case.dtype)
  pages = cache_of(program).pages
  assert isinstance(pages, jax.ShapeDtypeStruct)
  numbers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  return (array(case.heads), array(case.key_heads), array(case.key_heads), pages,
          numbers(case.batch), numbers(case.batch, case.keys // page), numbers(case.batch + 1))


# --- This library's. -----------------------------------------------------------------------------


@contextlib.contextmanager
def _computed(program: Program) -> Iterator[None]:
  """Makes the kernel compute its steps, and assume that results are finite."""
  requests, case = Requests(program), program.case
  span = lambda new, r: new_tokens.Span(requests.start(r), requests.start(r + 1),
                                        case.keys - requests.start(r + 1))

  def steps_of(k: Any) -> tuple[int, int, int]:
    """Returns (queries of a request, its first block of queries, number of its blocks)."""
    if k.shape.block_q == 1 and requests.decoding:
      return 1, case.keys - 1, 1
    first = (case.keys - case.queries) // k.shape.block_q
    return case.queries, first, cdiv(case.keys, k.shape.block_q) - first

  def item(k: Any, number: Any) -> common.Steps:
    number, (queries, first, count) = jnp.asarray(number, jnp.int32), steps_of(k)
    at = lambda x: 0 * number + x
    begin = (first + jax.lax.rem(number, jnp.int32(count))) * k.shape.block_q
    stop = jnp.minimum(begin + k.shape.block_q, case.keys)
    return common.Steps(jax.lax.div(number, jnp.int32(count)), at(0),
                        jax.lax.div(stop + (k.shape.layout.block_kv - 1),
                                    jnp.int32(k.shape.layout.block_kv)),
                        begin, at(case.keys - queries), at(case.keys), at(0), stop)

  def count(k: Any) -> Any:
    one = k.shape.block_q == 1 and requests.decoding
    rows = requests.decoding if one else case.batch - requests.decoding
    return rows * steps_of(k)[2] + 0 * pl.program_id(0)

  def bounds(t: Any) -> tuple[jax.Array, jax.Array]:
    one = t.part.is_first and requests.decoding
    first, end = (0, requests.decoding) if one else (requests.decoding, case.batch)
    return jnp.int32(first), jnp.int32(end)

  def request_of(_: Any, r: Any) -> token_blocks.Request:
    end = requests.start(r + 1)
    return token_blocks.Request(case.keys - (end - requests.start(r)), jnp.int32(case.keys),
                                end - case.keys)

  is_finite, needs_care = update_few_rows._is_finite, update_many_rows._needs_care
  with (mock.patch.object(new_tokens, "span_of", span),
        mock.patch.object(token_blocks, "bounds_of", bounds),
        mock.patch.object(token_blocks, "requests_in_use", lambda _: jnp.int32(case.batch)),
        mock.patch.object(token_blocks, "request_of", request_of),
        mock.patch.object(token_blocks, "start_of", lambda _, r: requests.start(r)),
        mock.patch.object(ragged_kernel, "step_of", item),
        mock.patch.object(ragged_kernel, "step_count", count),
        mock.patch.object(update_few_rows, "_is_finite",
                          lambda x: is_finite(x) | (pl.program_id(0) >= 0)),
        # Scalar memory reads as zeros.
        mock.patch.object(update_many_rows, "_needs_care", lambda k, *large: (
            needs_care(k, *large) & (k.counters[common.FETCHED] < 0)))):
    yield


@contextlib.contextmanager
def _ours(program: Program) -> Iterator[Built]:
  (block_q, block_kv, _), requests = program.blocks, Requests(program)
  mixed = 0 < requests.decoding < program.case.batch
  query, key, value, _, lengths, tables, starts = shapes(program)
  split = (None, jax.ShapeDtypeStruct((3,), jnp.int32)) if mixed else ()
  size = program.case.queries if program.case.name.startswith("trees") else 0
  tree = jax.ShapeDtypeStruct((program.case.batch, size, size), jnp.bool_) if size else None

  def attend(cache: layouts.PagesV3, query: Any, key: Any, value: Any, tree: Any,
             *metadata: Any) -> Any:
    output = attention(
        query, key, value, mechanism="ragged_page_attention_v3", layout="thd",
        metadata=OperationMetadata(platform="tpu"), cache_view=cache,
        block_sizes=BlockSizes(block_q or None, block_kv or None),
        cache_metadata=layouts.PagesMetadata(*metadata)._replace(draft_mask=tree))
    assert isinstance(output.cache_view, layouts.PagesV3)
    return output.attention_outputs, output.cache_view.pages

  with _computed(program):
    yield jax.jit(attend, donate_argnums=0), (
        cache_of(program), query, key, value, tree, tables, lengths, starts, *split)


@contextlib.contextmanager
def _latent(program: Program) -> Iterator[Built]:
  """Yields the call over pages of latent rows, [P, page, D] whose first E numbers are values."""
  case, (_, block_kv, page) = program.case, program.blocks
  widths = case.value_width, case.width - case.value_width
  query, _, _, _, *numbers = shapes(program)
  cache = jax.eval_shape(lambda: latent_pages.init(
      case.batch * (case.keys // page), page, widths, dtype=program.stored or case.dtype,
      padded=True))
  rows = jax.ShapeDtypeStruct((query.shape[0], case.width), case.dtype)

  def attend(cache: Any, query: Any, rows: Any, *metadata: Any) -> Any:
    output = attention(
        query, rows, None, mechanism="multi_latent_ragged_page_attention", layout="thd",
        metadata=OperationMetadata(platform="tpu"), cache_view=cache,
        softmax_scale=case.width**-0.5, latent_options=LatentOptions(*widths),
        block_sizes=BlockSizes(block_kv=block_kv or None),
        cache_metadata=layouts.PagesMetadata(*metadata))
    return output.attention_outputs, output.cache_view

  lengths, tables, starts = numbers
  with _computed(program):
    yield jax.jit(attend, donate_argnums=0), (
        cache, query, rows, tables, lengths, starts)


@contextlib.contextmanager
def _dense(program: Program) -> Iterator[Built]:
  """Yields the call over a dense cache of latent rows."""
  case = program.case
  widths = case.value_width, case.width - case.value_width
  cache = jax.eval_shape(lambda: latent.init(
      case.batch, case.keys, widths, dtype=program.stored or case.dtype, padded=True))
  array = lambda *shape: jax.ShapeDtypeStruct((case.batch, 1, *shape), case.dtype)

  def attend(cache: Any, query: Any, rows: Any) -> Any:
    output = attention(
        query, rows, None, mechanism="multi_latent_attention",
        metadata=OperationMetadata(platform="tpu"), cache_view=cache,
        softmax_scale=case.width**-0.5, latent_options=LatentOptions(*widths),
        block_sizes=BlockSizes(block_kv=program.blocks[1] or None))
    return output.attention_outputs, output.cache_view

  with _computed(program):
    yield jax.jit(attend, donate_argnums=0), (cache, array(case.heads, case.width),
                                              array(case.width))


# --- The kernel of tpu-inference. ----------------------------------------------------------------


def missing_rpa() -> str | None:
  """Returns the reason why its kernel cannot be loaded; None if it can."""
  if importlib.util.find_spec("tpu_inference"):
    return None
  return "tpu_inference is not installed: pip install --no-deps tpu-inference"


def load_rpa() -> types.ModuleType:
  """Loads the module of the kernel, without the packages around it, which need vLLM."""
  spec = importlib.util.find_spec("tpu_inference")
  if spec is None or spec.submodule_search_locations is None:
    raise ModuleNotFoundError(missing_rpa())
  path, name = list(spec.submodule_search_locations), "tpu_inference"
  for part in ("", *PACKAGE.split(".")[1:]):
    if part:
      name, path = f"{name}.{part}", [f"{path[0]}/{part}"]
    package = types.ModuleType(name)
    package.__path__ = path
    sys.modules[name] = package
  return importlib.import_module(f"{PACKAGE}.kernel")


class _Known:
  """A reference to scalars whose values are computed; writes are lost."""

  def __init__(self, at: Any, shape: tuple[int, ...]) -> None:
    self.at, self.shape = at, shape

  def __getitem__(self, index: Any) -> Any:
    return jnp.asarray(self.at(index), jnp.int32)

  def __setitem__(self, index: Any, value: Any) -> None:
    pass


@contextlib.contextmanager
def _rpa(program: Program) -> Iterator[Built]:
  library: Any = load_rpa()
  requests, case = Requests(program), program.case
  kernel, loop = (library._ragged_paged_attention_kernel,
                  library._ragged_paged_attention_kernel_loop)
  query, key, value, pages, lengths, tables, starts = shapes(program)

  def _known(*refs: Any, **options: Any) -> None:
    lens, tables, starts, split, *rest = refs
    kernel(_Known(lambda _: case.keys, lens.shape), tables, _Known(requests.start, starts.shape),
           _Known(lambda i: requests.distribution()[i], split.shape), *rest, **options)

  def _known_loop(request: Any, *refs: Any, **options: Any) -> None:
    """Tells which buffer is next, and which results have been sent.

    Where every request has one block of queries and one of keys, buffers alternate. Otherwise the
    first one is always next, and what is fetched into the second is not awaited, so that this
    kernel seems faster than it is.
    """
    alternate = options["static_q_len"] == 1 and options["bkv_sz"] >= case.keys
    end = options["case"].get_range(refs[3])[1]
    turn = lambda _: jax.lax.rem(request, 2) if alternate else 0
    def sent(number: Any) -> Any:
      if isinstance(number, int):  # at the end; there are two buffers
        return end - 2 + number if alternate and number < 2 else -5 * (number == 1)
      return request - 2 if alternate else -5
    scalars = _Known(turn, refs[4].shape), _Known(sent, refs[5].shape), _Known(
        lambda _: 0, refs[6].shape)
    loop(request, *refs[:4], *scalars, *refs[7:], **options)

  block_q, block_kv, _ = program.blocks
  sizes: dict[str, Any] = {}
  if block_q:
    sizes["m_block_sizes"] = block_q, block_kv, block_q, min(512, block_kv)
  if block_kv:
    sizes["d_block_sizes"] = (1, min(block_kv, case.keys), 1, min(block_kv, case.keys))

  stored = jnp.dtype(program.stored or case.dtype)
  if program.stored:
    sizes |= {"k_scale": RPA_SCALE, "v_scale": RPA_SCALE}

  def attend(pages: Any, query: Any, key: Any, value: Any, *arrays: Any) -> Any:
    if program.stored:  # as the package does before it calls the kernel
      most = float(jnp.finfo(stored).max)
      key, value = (jnp.clip(x.astype(jnp.float32) / RPA_SCALE, -most, most).astype(stored)
                    for x in (key, value))
    return library.ragged_paged_attention(
        query, key, value, pages, *arrays, sm_scale=case.width**-0.5,
        vmem_limit_bytes=RPA_VECTOR_BYTES, **sizes)

  version = lambda: VERSIONS[program.chip]
  with (mock.patch.object(library, "_ragged_paged_attention_kernel", _known),
        mock.patch.object(library, "_ragged_paged_attention_kernel_loop", _known_loop),
        mock.patch.object(library, "get_tpu_version", version)):
    flat = jax.ShapeDtypeStruct((tables.size,), jnp.int32)
    yield jax.jit(attend, donate_argnums=(0, 1, 2, 3)), (
        pages, query, key, value, lengths, flat, starts, jax.ShapeDtypeStruct((3,), jnp.int32))


CONTENDERS: dict[str, Contender] = {
    OURS: _ours, OURS_LATENT: _latent, OURS_DENSE: _dense, RPA: _rpa}
