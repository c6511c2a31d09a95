"""Decoding from pages on Hopper: a few queries a request, of whose pages the live ones are read.

Requests' queries are cut into blocks as in `xla.paged`; a block of threads computes a part of what
one of them sees, see `parts`. Pages come as they lie, a copy each, or in pieces where blocks of
keys end within them; which pages these are is read in global memory by the warpgroup that copies,
ahead of the one that computes. Parts are cut at multiples of their size in positions: a query's
bits are the same in any batch, pages and chunk.

Letters: as in `xla.paged`; W blocks of queries, R rows of a line, M lines of a key head, N parts.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.caches.paged import ops as pages
from attn_core.kernels.gpu.split_kv import (decode, compute as fold, combine as merge, kernel as parts, quantized_kv as small)
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash.tile_inputs import Extras
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import paged_blocks as paged, tile_ops as steps
from attn_core.kernels.common import query_block_queue as queue
from attn_core.types import BlockSizes, PagedSpec, cdiv

PARTIAL_BYTES = 2**28  # of results of parts, at most


_NOTHING = Extras((), None, None, None, None)


class Items(NamedTuple):
  """The blocks of queries, int32 [W] each; a running kernel's are numbers."""

  request: Any
  begin: Any  # position of the first row
  length: Any  # tokens of the request
  first: Any  # the first block of keys that a query of it sees
  first_full: Any  # see `parts.Visit`
  end_full: Any
  end: Any


class Inputs(NamedTuple):
  """References in global memory."""

  rows: Any  # [W, K, M * R, D]
  cache: Any  # without its scales
  scales: tuple  # of keys and of values in 8 bits, or ()
  tables: Any  # int32 [requests, N]
  items: Any  # int32 [fields of Items, W]


class Cut(NamedTuple):
  """How an attention over pages is cut; hashable."""

  shape: parts.Shape
  heads: pages.Heads
  group: int
  block_q: int
  lines: int  # M
  page: int  # tokens
  interpret: bool


class _Tile(NamedTuple):
  """Some rows of a block of queries, and a block of keys; int32 but for `rows`."""

  item: Items
  row: Any
  key: Any  # the position of the first


class _Feed(NamedTuple):
  """What `Logits` asks of a feed."""

  spec: PagedSpec
  cut: Cut

  def visible(self, _, tile: _Tile):
    """bool [C, R]."""
    shape = parts.BLOCK, self.cut.shape.rows
    def numbers(axis, layout):
      along = plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=layout)
      return lax.broadcast_in_dim(along, shape, [axis])
    key = tile.key + numbers(0, mosaic.ROWS)
    row = tile.row + numbers(1, mosaic.COLUMNS)
    query = tile.item.begin + lax.div(row, jnp.full_like(row, self.cut.group))
    seen = key < tile.item.length
    left, right = paged.reach(self.spec)
    seen = seen if left is None else seen & (key >= query - left)
    return seen if right is None else seen & (key <= query + right)


def refusal(query, cache, metadata: pages.PagesMetadata, heads: pages.Heads) -> str | None:
  """Why the kernel does not compute a call, by shapes and dtypes; None: it does.

  Args:
    query: [T, H, D].
    cache: pages in any layout.
    metadata: what goes with it.
    heads: those in the pages, without their padding.
  """
  held, page, quantized = pages.dtype_of(cache), pages.page_size(cache), stored_of(cache)
  if quantized is None and held != query.dtype:
    return (f"pages of {jnp.dtype(held).name}: the kernel for Hopper reads those of the query's "
            "dtype, or of 8 bits")
  if page % mosaic.COPIED_TOKENS:
    return (f"pages of {page} tokens: the kernel for Hopper copies multiples of "
            f"{mosaic.COPIED_TOKENS}")
  width = query.shape[2]
  value_width = cache.value_pages.shape[3] if isinstance(cache, pages.PagesV1) else width
  refused = decode.refusal(query.dtype, (width, value_width), (1, page), quantized is not None)
  if refused or quantized is None:
    return refused or _too_large(query, cache, metadata, heads)
  number = 0 if quantized.scales == small.TENSOR else cache.key_scales.shape[2]
  if number % small.QUAD and (
      not quantized.alone or piece_of(page) % small.ALONE_TOKENS):
    return (f"pages of {page} tokens with scales of {number} heads each: the kernel for Hopper "
            f"copies those of {small.QUAD} heads together, or of {small.ALONE_TOKENS} tokens of a "
            "head by itself")
  return _too_large(query, cache, metadata, heads)


def _too_large(query, cache, metadata: pages.PagesMetadata, heads: pages.Heads) -> str | None:
  """As `refusal`, for the sake of memory."""
  cut = cut_of(paged.PagedOperands(query, cache, metadata), heads, BlockSizes())
  lines = queue.places(query.shape[0], metadata.context_lens.shape[0], cut.block_q) * (
      heads.key_heads * cut.lines)
  size = sum(4 * math.prod(x.shape) for x in parts.partial_results(cut.shape, lines))
  if size > PARTIAL_BYTES:
    return (f"{query.shape[0]} queries and page tables of {list(metadata.page_tables.shape)}: the "
            f"kernel for Hopper keeps a result of every part of the keys, which takes {size} bytes "
            f"here, of {PARTIAL_BYTES} at most")
  return None


def piece_of(page: int) -> int:
  """Tokens that are copied together: as many as pages and blocks of keys both are multiples of."""
  return math.gcd(page, parts.BLOCK)


def stored_of(cache) -> small.Small | None:
  """How pages in 8 bits are stored; None: they are not."""
  if cache.key_scales is None:
    return None
  by_token = pages.has_token_scales(cache)
  return small.Small(jnp.dtype(pages.dtype_of(cache)).name,
                     small.TOKEN if by_token else small.TENSOR,
                     by_token and cache.key_scales.shape[2] == 1)


def cut_of(operands: paged.PagedOperands, heads: pages.Heads, requested: BlockSizes) -> Cut:
  """How to cut a call; as `decode.cut_of`.

  Args:
    operands: only shapes count.
    heads: the heads in the pages, without their padding.
    requested: `block_q`, queries computed together, and `block_kv`, tokens of a part; None: chosen.
  """
  group, page = operands.query.shape[1] // heads.key_heads, pages.page_size(operands.cache)
  sizes = requested._replace(block_kv=None)
  block_q, _ = paged.sizes_of(operands, sizes, group)
  if requested.block_q is None:
    block_q = min(block_q, max(1, parts.MOST_ROWS // group))
  shape = parts.shape_of(
      block_q * group, heads[1:], cdiv(operands.metadata.page_tables.shape[1] * page, parts.BLOCK),
      decode.part_blocks(requested), stored_of(operands.cache))
  return Cut(shape, heads, group, block_q, cdiv(block_q * group, shape.rows), page,
             mosaic.interpreted())


def forward(operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
            block_sizes: BlockSizes) -> Residuals:
  """out [T, H, E] and lse [T, H, 1]; see `xla.paged_forward.forward`."""
  cut, (tokens, query_heads, _) = cut_of(operands, heads, block_sizes), operands.query.shape
  shape, dtype = cut.shape, operands.query.dtype
  problem = paged.cut(operands, spec, heads, (cut.block_q, 1))
  work = queue.of_requests(problem, tokens)
  items = _items_of(problem, work)
  number = cut.lines * shape.rows
  rows = jax.vmap(lambda block: paged.live_rows_of(problem, block, problem.query))(work.blocks)
  rows = steps.pad_axis(rows, 2, number - rows.shape[2])
  lines = rows.shape[0] * heads.key_heads * cut.lines
  out, lse = mosaic.call(
      functools.partial(_kernel, cut, Logits(_Feed(spec, cut), False)),
      parts.partial_results(shape, lines),
      Inputs(rows, operands.cache._replace(key_scales=None, value_scales=None),
             _scales(cut, operands.cache), problem.tables, jnp.stack(items)),
      parts.scratch_of(shape, dtype, piece_of(cut.page)), grid=lines * shape.parts,
      warpgroups=2, name="attn_core_paged")
  sinks = paged.row_sinks(problem)
  if sinks is not None:
    sinks = steps.pad_axis(sinks[..., 0].astype(jnp.float32), 1, number - sinks.shape[1])
    sinks = jnp.broadcast_to(sinks, (rows.shape[0], *sinks.shape)).reshape(lines, shape.rows)
  live_parts = parts.live_parts(shape, *(jnp.repeat(x, lines // rows.shape[0])
                                         for x in (items.first, items.end)))
  out, lse = merge.merge(shape, out, lse, sinks, live_parts, dtype)
  def of_tokens(x, empty):
    x = x.reshape(-1, heads.key_heads, number, x.shape[-1])[:, :, :cut.block_q * cut.group]
    x = x.reshape(*x.shape[:2], cut.block_q, cut.group, -1).swapaxes(1, 2)
    x = x.reshape(*x.shape[:2], query_heads, -1)
    return jnp.where(work.live[:, None, None], x[work.place, work.row], empty)
  return Residuals(of_tokens(out, 0), of_tokens(lse[..., None], -jnp.inf))


def _scales(cut: Cut, cache) -> tuple:
  """What `Inputs.scales` is."""
  if cut.shape.stored is None:
    return ()
  scales = cache.key_scales, cache.value_scales
  if cut.shape.stored.scales == small.TENSOR:
    return tuple(x.reshape(1) for x in scales)
  return tuple(small.packed(cut.shape.stored, x) for x in scales)


def _items_of(problem: paged.Problem, work: queue.Queue) -> Items:
  """Which keys the live queries of blocks see, and which all of them do."""
  blocks = work.blocks
  used = jnp.arange(blocks.request.shape[0]) < work.count
  begin, length = blocks.positions[:, 0], problem.lengths[blocks.request]
  # Whatever the metadata says, no more than the table has.
  held = jnp.minimum(length, problem.tables.shape[1] * pages.page_size(problem.cache))
  queries = problem.starts[blocks.request + 1] - problem.starts[blocks.request]
  lowest = jnp.maximum(begin, length - queries)
  highest = jnp.minimum(begin + problem.block_q, length) - 1
  left, right = paged.reach(problem.spec)
  start = start_full = jnp.zeros_like(begin)
  stop = stop_full = held
  if left is not None:
    start, start_full = (jnp.maximum(x - left, 0) for x in (lowest, highest))
  if right is not None:
    stop, stop_full = (jnp.minimum(held, x + right + 1) for x in (highest, lowest))
  stop = jnp.where(used & (lowest <= highest), stop, 0)
  end = cdiv(jnp.maximum(stop, 0), parts.BLOCK)
  first = jnp.minimum(start // parts.BLOCK, end)
  first_full = jnp.clip(cdiv(start_full, parts.BLOCK), first, end)
  end_full = jnp.clip(stop_full // parts.BLOCK, first_full, end)
  return Items(*(x.astype(jnp.int32) for x in (
      blocks.request, begin, held, first, first_full, end_full, end)))


def _kernel(cut: Cut, logits: Logits, inputs: Inputs, outputs, scratch: parts.Scratch):
  shape, block = cut.shape, lax.axis_index("block")
  found = []
  for number in (cut.heads.key_heads, cut.lines, shape.parts):  # neighbours read the same pages
    found.append(lax.rem(block, mosaic.int32(number)))
    block = lax.div(block, mosaic.int32(number))
  head, line, part = found
  item = Items(*(inputs.items[field, block] for field in range(len(Items._fields))))
  visit = parts.visit_of(shape, part, parts.Visit(
      item.first, item.first_full, item.end_full, item.end))
  first_row = line * mosaic.int32(shape.rows)
  warpgroup = lax.axis_index("warpgroup")

  @pl.when((warpgroup == 1) & (visit.first < visit.end))
  def _():
    plgpu.copy_gmem_to_smem(inputs.rows.at[block, head, pl.ds(first_row, shape.rows)],
                            scratch.query, scratch.query_full)
    parts.copy_blocks(shape, scratch, visit, functools.partial(_locate, cut, inputs, item),
                      functools.partial(_copy, cut, inputs, item, head))

  @pl.when((warpgroup == 0) & (visit.first < visit.end))
  def _():
    tile = lambda n: _Tile(item, first_row, n * mosaic.int32(parts.BLOCK))
    results = (block * cut.heads.key_heads + head) * cut.lines + line
    out, lse = (x.at[results, part] for x in outputs)
    scales = shape.stored and small.Scales(shape.stored, scratch.scales or inputs.scales, head)
    fold.Fold(shape, logits, _NOTHING, tile, scratch, cut.interpret, scales).run(visit, out, lse)


def _locate(cut: Cut, inputs: Inputs, item: Items, n) -> list:
  """(page, its token) where the pieces of the n-th block of keys begin."""
  found, page = [], mosaic.int32(cut.page)
  for start in _starts(cut, n):
    # Behind the last page of a table nothing is live.
    number = jnp.minimum(lax.div(start, page), mosaic.int32(inputs.tables.shape[1] - 1))
    found.append((inputs.tables[item.request, number], lax.rem(start, page)))
  return found


def _starts(cut: Cut, n) -> list:
  """Positions of the n-th block's pieces."""
  first = n * mosaic.int32(parts.BLOCK)
  return [first + mosaic.int32(i) for i in range(0, parts.BLOCK, piece_of(cut.page))]


def _copy(cut: Cut, inputs: Inputs, item: Items, head, n, places, values, target):
  """Starts the copies of a block's live pieces; a dead one arrives without a copy."""
  tokens, (stage, scales, full) = piece_of(cut.page), target
  some = parts.together(cut.shape, values, tokens)
  for i, (start, (page, token)) in enumerate(zip(_starts(cut, n), places)):
    first = i * tokens
    copies = [(_page(cut, inputs.cache, page, pl.ds(token + k, some), head, values),
               stage.at[pl.ds(first + k, some)]) for k in range(0, tokens, some)]
    if scales is not None:
      copies += [(small.quad(cut.shape.stored, inputs.scales[values],
                             (page, pl.ds(token, tokens)), head),
                  scales.at[pl.ds(first, tokens)])]
    live = start < item.length
    for source, place in copies:
      pl.when(live)(functools.partial(plgpu.copy_gmem_to_smem, source, place, full))
      pl.when(~live)(functools.partial(plgpu.barrier_arrive, full))


def _page(cut: Cut, cache, page, tokens, head, values: bool):
  """Reference to the keys or values [tokens, W] of a head in a page."""
  if isinstance(cache, pages.PagesV1):
    return (cache.value_pages if values else cache.key_pages).at[head, page, tokens]
  if isinstance(cache, pages.PagesV2):
    return cache.pages.at[page, tokens, 2 * head + int(values)]
  row, packing = 2 * head + int(values), mosaic.int32(pages.packing(cache.pages.dtype))
  return cache.pages.at[page, tokens, lax.div(row, packing), lax.rem(row, packing),
                        pl.ds(0, cut.heads.key_width)]
