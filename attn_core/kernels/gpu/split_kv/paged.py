# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding from pages on Hopper: a few queries per request; only live pages are read.

The queries of a request are divided into blocks as in `common.paged_operands`; a thread block
computes one query block over one split of its keys, see `split_kv.kernel`. Pages are copied one by
one, or in pieces where blocks of keys end within them. The producer warpgroup reads the page table
in global memory, ahead of the consumers. Splits begin at multiples of their size in positions: the
result of a query has the same bits in any batch, in any pages and in any chunk of a prefill.
"""

import functools
import math
from typing import Any, NamedTuple, Sequence

import chex
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.caches.paged import layouts
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import (dense_operands, nonfinite, paged_operands,
                                      query_block_queue)
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.common.paged_operands import BlockedInputs
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.gpu.flash.tile_inputs import TileInputs
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.kernels.gpu.split_kv import (combine, compute, decode, kernel as split_kv,
                                            quantized_kv)
from attn_core.kernels.gpu.split_kv.paged_tiles import (PagedTile, PagedTileInputLoader,
                                                        WorkItem, line_length)
from attn_core.masks import tile as tile_lib
from attn_core.types import BlockSizes, PagedOperands, PagedSpec, cdiv

PARTIAL_BYTES = 2**28  # of results of splits, at most
LATENT_PARTIAL_BYTES = 2**30  # the same for latent rows: a request's results are as large as rows

class Inputs(NamedTuple):
  """References in global memory, or the arrays."""

  rows: Any  # [num_items, K, row_blocks * num_rows, D]
  cache: Any  # without its scales
  scales: tuple[Any, ...]  # of int8 or fp8 keys and values, or ()
  tables: Any  # int32 [R, row_pages]
  items: Any  # int32 [fields of WorkItem, num_items]
  tile_inputs: TileInputs


class Tiling(NamedTuple):
  """Division of an attention over pages into thread blocks; hashable."""

  params: split_kv.KernelParams
  heads: layouts.Heads
  group: int
  block_q: int
  row_blocks: int  # of a key head, a multiple of the consumers of a thread block
  page_size: int  # tokens
  interpret: bool


def unsupported_reason(query: jax.Array, cache: Pages, metadata: layouts.PagesMetadata,
                       heads: layouts.Heads) -> str | None:
  """Returns the reason why the kernel does not support a call; None if it does.

  Args:
    query: [T, H, D]; only shapes and dtypes of all arrays are read.
    cache: pages in any layout.
    metadata: of the cache.
    heads: those in the pages, without their padding.
  """
  page_dtype, page_size = layouts.dtype_of(cache), layouts.page_size(cache)
  quantized, rope = quantized_of(cache), None
  if quantized is None and page_dtype != query.dtype:
    return (f"pages of {jnp.dtype(page_dtype).name}: the kernel for Hopper reads those of the "
            "query's dtype, or quantized ones")
  if page_size % mosaic.TMA_TOKENS:
    return (f"pages of {page_size} tokens: the kernel for Hopper copies multiples of "
            f"{mosaic.TMA_TOKENS}")
  is_latent, widths = isinstance(cache, PagesLatent), (query.shape[2], query.shape[2])
  if isinstance(cache, PagesLatent):
    widths, rope = (cache.width, cache.widths.latent), None if quantized is None else cache.rope
  elif isinstance(cache, layouts.PagesV1):
    widths = query.shape[2], cache.value_pages.shape[3]
  reason = decode.unsupported_reason(
      query.dtype, widths, (1, page_size), quantized is not None, is_latent,
      None if rope is None else rope.dtype)
  if reason or quantized is None:
    return reason or unsupported_memory(query, cache, metadata, heads, BlockSizes())
  assert cache.key_scales is not None
  number = 0 if quantized.scale_kind == quantized_kv.TENSOR or is_latent else (
      cache.key_scales.shape[2])
  if number % quantized_kv.SCALE_HEADS and not quantized.single_head:
    return (f"pages with scales of {number} heads for every token: the kernel for Hopper copies "
            f"those of a single head, or of {quantized_kv.SCALE_HEADS} heads together")
  return unsupported_memory(query, cache, metadata, heads, BlockSizes())


def unsupported_mod(query: jax.Array, cache: Pages, metadata: layouts.PagesMetadata,
                    heads: layouts.Heads, requested: BlockSizes,
                    arrays: Sequence[jax.ShapeDtypeStruct]) -> str | None:
  """Returns the reason if lines of tables by distance take too much memory, or None.

  Args:
    query, cache, metadata, heads: as in `unsupported_reason`.
    requested: as in `make_tiling`.
    arrays: of the score mod; only shapes are used.
  """
  tiling = make_tiling(PagedOperands(query, cache, metadata), None, requested, heads)
  rows = heads.key_heads * tiling.row_blocks * tiling.params.num_rows
  size = sum(4 * rows * line_length(x.shape[2], tiling.block_q) for x in arrays if x.ndim == 3)
  if size > PARTIAL_BYTES:
    return (f"score_mods.relative or by_distance of {tiling.block_q} queries and "
            f"{query.shape[1]} heads: their numbers for every row of a block take {size} bytes, of "
            f"which the kernel for Hopper takes {PARTIAL_BYTES} at most")
  return None


def unsupported_memory(query: jax.Array, cache: Pages, metadata: layouts.PagesMetadata,
                       heads: layouts.Heads, requested: BlockSizes) -> str | None:
  """Returns the reason if the results of all splits take too much memory."""
  tiling = make_tiling(PagedOperands(query, cache, metadata), None, requested, heads)
  num_row_blocks = heads.key_heads * tiling.row_blocks * query_block_queue.capacity(
      query.shape[0], metadata.context_lens.shape[0], tiling.block_q)
  size = sum(4 * math.prod(x.shape)
             for x in split_kv.partial_results(tiling.params, num_row_blocks))
  most = LATENT_PARTIAL_BYTES if tiling.params.latent else PARTIAL_BYTES
  if size > most:
    return (f"{query.shape[0]} queries and page tables of {list(metadata.page_tables.shape)}: the "
            "kernel for Hopper keeps a result of every split of the keys, which takes "
            f"{size} bytes here, of {most} at most")
  return None


def piece_size(page_size: int) -> int:
  """Returns the tokens that are copied together, a divisor of a page and of a block of keys."""
  return math.gcd(page_size, split_kv.BLOCK_KV)


def quantized_of(cache: Pages) -> quantized_kv.QuantizedKV | None:
  """Returns the static description of quantized pages; None if they are not quantized."""
  if cache.key_scales is None:
    return None
  piece = piece_size(layouts.page_size(cache))
  if isinstance(cache, PagesLatent):
    return quantized_kv.QuantizedKV(
        jnp.dtype(cache.pages.dtype).name, quantized_kv.TOKEN, True, piece)
  by_token = layouts.has_token_scales(cache)
  return quantized_kv.QuantizedKV(
      jnp.dtype(layouts.dtype_of(cache)).name,
      quantized_kv.TOKEN if by_token else quantized_kv.TENSOR,
      by_token and cache.key_scales.shape[2] == 1, piece)


def most_queries(latent: bool, group: int) -> int:
  """Returns the queries of a block, of `group` heads each, whose keys are copied once."""
  return max(1, split_kv.MAX_ROWS * (split_kv.MAX_CONSUMERS if latent else 1) // group)


def make_tiling(operands: PagedOperands, spec: PagedSpec | None, requested: BlockSizes,
                heads: layouts.Heads) -> Tiling:
  """Returns the division of a call into thread blocks.

  Args:
    operands: only shapes and dtypes are read.
    spec: whether there is a score mod; None: there is none.
    requested: `block_q`, queries computed together, and `block_kv`, tokens of a split; None: chosen
      here.
    heads: the heads in the pages, without their padding.
  """
  group = operands.query.shape[1] // heads.key_heads
  page_size, quantized = layouts.page_size(operands.cache), quantized_of(operands.cache)
  latent = isinstance(operands.cache, PagesLatent)
  block_q, _ = paged_operands.choose_block_sizes(
      operands, requested._replace(block_kv=None), group)
  if requested.block_q is None:
    block_q = min(block_q, most_queries(latent, group))
  num_blocks = cdiv(operands.metadata.page_tables.shape[1] * page_size, split_kv.BLOCK_KV)
  params = split_kv.make_kernel_params(
      block_q * group, heads[1:], num_blocks, decode.split_blocks(requested),
      quantized, latent_heads=group if latent else None,
      has_score_mod=spec is not None and spec.has_score_mod)
  return Tiling(params, heads, group, block_q, split_kv.row_blocks(params, block_q * group),
                page_size, mosaic.interpreted())


def forward(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
            block_sizes: BlockSizes) -> Residuals:
  """Returns out [T, H, E] and lse [T, H, 1]."""
  chex.assert_rank(operands.query, 3)
  chex.assert_rank(operands.metadata.page_tables, 2)
  chex.assert_shape(operands.metadata.context_lens, (operands.metadata.page_tables.shape[0],))
  tiling = make_tiling(operands, spec, block_sizes, heads)
  params, dtype = tiling.params, operands.query.dtype
  blocked = paged_operands.block_inputs(operands, spec, heads, (tiling.block_q, 1))
  queue = query_block_queue.make_queue(blocked, operands.query.shape[0])
  items = _make_work_items(blocked, queue)
  loader = PagedTileInputLoader(spec, params.num_rows, tiling.group)
  padded_rows = tiling.row_blocks * params.num_rows
  rows = jax.vmap(lambda block: paged_operands.live_rows_of(
      blocked, block, nonfinite.infinite_to_nan(blocked.query)))(queue.blocks)
  rows = dense_operands.pad_axis(rows, 2, padded_rows - rows.shape[2])
  num_row_blocks = rows.shape[0] * heads.key_heads * tiling.row_blocks
  cache = operands.cache
  if isinstance(cache, PagesLatent):
    cache = cache._replace(scales=None)
  else:
    cache = cache._replace(key_scales=None, value_scales=None)
  out, lse = mosaic.call(
      functools.partial(_kernel, tiling, Logits(loader, False)),
      split_kv.partial_results(params, num_row_blocks),
      Inputs(rows, cache, _scales(tiling, operands.cache), blocked.tables, jnp.stack(items),
             loader.pack(blocked, queue.blocks, padded_rows)),
      split_kv.scratch_types(params, dtype, piece_size(tiling.page_size)),
      grid=num_row_blocks // params.consumers * params.num_splits,
      warpgroups=params.consumers + 1, name="attn_core_paged",
      reduction_bytes=split_kv.reduction_bytes(params))
  sinks = paged_operands.row_sinks(blocked)
  if sinks is not None:
    sinks = dense_operands.pad_axis(
        sinks[..., 0].astype(jnp.float32), 1, padded_rows - sinks.shape[1])
    sinks = jnp.broadcast_to(sinks, (rows.shape[0], *sinks.shape)).reshape(
        num_row_blocks, params.num_rows)
  live = split_kv.live_splits(params, *(jnp.repeat(x, num_row_blocks // rows.shape[0])
                                        for x in (items.first, items.end)))
  if dense_operands.out_dtype(operands, spec) == dtype:
    out, lse = combine.combine(params, out, lse, sinks, live, dtype)
  else:
    out, lse = combine.combine_exactly(params, out, lse, sinks, live)
  return Residuals(_to_tokens(tiling, queue, out, 0),
                   _to_tokens(tiling, queue, lse[..., None], -jnp.inf))


def _to_tokens(tiling: Tiling, queue: query_block_queue.QueryBlockQueue, x: jax.Array,
               empty: float) -> jax.Array:
  """[num_row_blocks, num_rows, width] -> [T, H, width], `empty` for tokens that are not live."""
  key_heads, block_q, group = tiling.heads.key_heads, tiling.block_q, tiling.group
  x = x.reshape(-1, key_heads, tiling.row_blocks * tiling.params.num_rows,
                x.shape[-1])[:, :, :block_q * group]
  x = x.reshape(*x.shape[:2], block_q, group, -1).swapaxes(1, 2)
  x = x.reshape(*x.shape[:2], key_heads * group, -1)
  return jnp.where(queue.live[:, None, None], x[queue.block_index, queue.row], empty)


def _scales(tiling: Tiling, cache: Pages) -> tuple[jax.Array, ...]:
  """Returns `Inputs.scales`."""
  quantized = tiling.params.quantized
  if quantized is None:
    return ()
  if isinstance(cache, PagesLatent):
    assert cache.token_scales is not None
    return (quantized_kv.pack_scales(quantized, cache.token_scales[..., None]),)
  assert cache.key_scales is not None and cache.value_scales is not None
  scales = cache.key_scales, cache.value_scales
  if quantized.scale_kind == quantized_kv.TENSOR:
    return tuple(x.reshape(1) for x in scales)
  return tuple(quantized_kv.pack_scales(quantized, x) for x in scales)


def _make_work_items(blocked: BlockedInputs,
                     queue: query_block_queue.QueryBlockQueue) -> WorkItem:
  """Returns the blocks of keys that live queries attend to, and those that all attend to."""
  blocks = queue.blocks
  assert isinstance(blocks.request, jax.Array)
  used = jnp.arange(blocks.request.shape[0]) < queue.num_blocks
  position, length = blocks.positions[:, 0], blocked.lengths[blocks.request]
  # No more than the table holds, even if the metadata says so.
  length_held = jnp.minimum(length, blocked.tables.shape[1] * layouts.page_size(blocked.cache))
  queries = blocked.starts[blocks.request + 1] - blocked.starts[blocks.request]
  lowest = jnp.maximum(position, length - queries)
  highest = jnp.minimum(position + blocked.block_q, length) - 1
  left, right = paged_operands.window_of(blocked.spec)
  start = start_full = jnp.zeros_like(position)
  stop = stop_full = length_held
  if left is not None:
    start, start_full = (jnp.maximum(x - left, 0) for x in (lowest, highest))
  if right is not None:
    stop, stop_full = (jnp.minimum(length_held, x + right + 1) for x in (highest, lowest))
  stop = jnp.where(used & (lowest <= highest), stop, 0)
  end = cdiv(jnp.maximum(stop, 0), split_kv.BLOCK_KV)
  first = jnp.minimum(start // split_kv.BLOCK_KV, end)
  first_full = jnp.clip(cdiv(start_full, split_kv.BLOCK_KV), first, end)
  end_full = jnp.clip(stop_full // split_kv.BLOCK_KV, first_full, end)
  return WorkItem(*(x.astype(jnp.int32) for x in (
      blocks.request, position, length_held, first, first_full, end_full, end)))


def _kernel(tiling: Tiling, logits: Logits, inputs: Inputs, outputs: tuple[Ref, ...],
            scratch: split_kv.Scratch) -> None:
  params, block, found = tiling.params, lax.axis_index("block"), []
  # Neighboring thread blocks read the same pages.
  for number in (tiling.heads.key_heads, tiling.row_blocks // params.consumers,
                 params.num_splits):
    found.append(lax.rem(block, mosaic.int32(number)))
    block = lax.div(block, mosaic.int32(number))
  head, row_block, split = found
  row_block = split_kv.first_row_block(params, row_block)
  item = WorkItem(*(inputs.items[field, block] for field in range(len(WorkItem._fields))))
  blocks = split_kv.split_range(params, split, split_kv.BlockRange(
      item.first, item.first_full, item.end_full, item.end))
  first_row = row_block * mosaic.int32(params.num_rows)
  warpgroup = lax.axis_index("warpgroup")

  # 1. The producer warpgroup copies queries, keys and values.
  @pl.when((warpgroup == params.consumers) & (blocks.first < blocks.end))
  def _() -> None:
    split_kv.begin_copies(params, scratch, first_row, lambda row: inputs.rows.at[
        block, head, pl.ds(row, params.num_rows)])
    split_kv.copy_blocks(params, scratch, blocks, functools.partial(_locate, tiling, inputs, item),
                         functools.partial(_copy, tiling, inputs, item, head))

  # 2. The consumer warpgroups compute.
  @pl.when((warpgroup < params.consumers) & (blocks.first < blocks.end))
  def _() -> None:
    own = split_kv.begin_consumer(params, warpgroup)
    row = first_row if own is None else first_row + own * params.num_rows
    tile = lambda n: PagedTile(item, tile_lib.Tile(
        block, head, row, n * mosaic.int32(split_kv.BLOCK_KV), 1, params.num_rows,
        split_kv.BLOCK_KV))
    results = (block * tiling.heads.key_heads + head) * tiling.row_blocks + row_block
    out, lse = (x.at[results if own is None else results + own, split] for x in outputs)
    scales = params.quantized and quantized_kv.ScaleReader(
        params.quantized, scratch.scales_smem or inputs.scales, head)
    compute.ConsumerWarpgroup(params, logits, inputs.tile_inputs, tile, scratch,
                              tiling.interpret, scales, own).run(blocks, out, lse)


def _locate(tiling: Tiling, inputs: Inputs, item: WorkItem,
            n: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
  """Returns (page, token within it) where the pieces of the n-th block of keys begin."""
  found, page_size = [], mosaic.int32(tiling.page_size)
  for start in _piece_starts(tiling, n):
    # Tokens behind the last page of a table are not live.
    number = jnp.minimum(lax.div(start, page_size), mosaic.int32(inputs.tables.shape[1] - 1))
    found.append((inputs.tables[item.request, number], lax.rem(start, page_size)))
  return found


def _piece_starts(tiling: Tiling, n: jax.Array) -> list[jax.Array]:
  """Returns the positions of the n-th block's pieces."""
  first = n * mosaic.int32(split_kv.BLOCK_KV)
  return [first + mosaic.int32(i)
          for i in range(0, split_kv.BLOCK_KV, piece_size(tiling.page_size))]


def _copy(tiling: Tiling, inputs: Inputs, item: WorkItem, head: jax.Array, n: jax.Array,
          locations: list[tuple[jax.Array, jax.Array]], values: bool,
          target: split_kv.CopyTarget) -> None:
  """Starts the copies of a block's live pieces; arrives at the barrier for the others."""
  tokens, params = piece_size(tiling.page_size), tiling.params
  some = split_kv.tokens_per_copy(params, values, tokens)
  for i, (start, (page, token)) in enumerate(zip(_piece_starts(tiling, n), locations)):
    first = i * tokens
    copies = [(_page_slice(tiling, inputs.cache, page, pl.ds(token + k, some), head, values),
               target.block.at[pl.ds(first + k, some)]) for k in range(0, tokens, some)]
    if target.rope is not None:
      copies += [(inputs.cache.rope.at[page, pl.ds(token, tokens), pl.ds(0, target.rope.shape[1])],
                  target.rope.at[pl.ds(first, tokens)])]
    if target.scales is not None and params.quantized is not None:
      copies += [quantized_kv.page_copy(
          params.quantized, (inputs.scales[values], target.scales), (page, token),
          (tiling.page_size, tokens, i), head)]
    live = start < item.length
    for source, destination in copies:
      pl.when(live)(functools.partial(
          plgpu.copy_gmem_to_smem, source, destination, target.barrier))
      pl.when(~live)(functools.partial(plgpu.barrier_arrive, target.barrier))


def _page_slice(tiling: Tiling, cache: Any, page: jax.Array, tokens: Any, head: jax.Array,
                values: bool) -> Ref:
  """Returns a reference to the keys or values [tokens, D or E] of a head in a page."""
  if isinstance(cache, PagesLatent):
    width = tiling.heads.key_width if cache.rope is None else tiling.heads.value_width
    return cache.pages.at[page, tokens, pl.ds(0, width)]
  if isinstance(cache, layouts.PagesV1):
    return (cache.value_pages if values else cache.key_pages).at[head, page, tokens]
  if isinstance(cache, layouts.PagesV2):
    return cache.pages.at[page, tokens, 2 * head + int(values)]
  row, packing = 2 * head + int(values), mosaic.int32(layouts.packing(cache.pages.dtype))
  return cache.pages.at[page, tokens, lax.div(row, packing), lax.rem(row, packing),
                        pl.ds(0, tiling.heads.key_width)]
