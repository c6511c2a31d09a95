"""Attention over pages as a Pallas TPU kernel: pages come by transfers of its own, two blocks deep.

A step of the grid is one block of a request's queries, cut as in `xla.paged`; which these are, and
which pages they see, is said in scalar memory. While a block of pages is computed, the next one is
on its way, be it of the next step. Only live pages are transferred, keys and values of all heads
together, and no reference is reshaped or cast, so that the kernel runs in interpret mode with races
watched.

Letters: as in `xla.paged`; W steps of the grid, n pages of a key block, N pages of a row of tables.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.caches import pages
from attn_core.kernels import softmax
from attn_core.kernels.kernel import Residuals
from attn_core.kernels.xla import paged, steps
from attn_core.types import BlockSizes, PagedSpec, cdiv

SUBLANES = 8  # rows of a block of queries are a multiple of this
LANES = 128
BUFFER_BYTES = 6 * 2**20  # of vector memory for keys and values on their way and spread out
SCALAR_BYTES = 2**19  # of scalar memory for tables and schedule
DTYPES = ("float32", "bfloat16")


class Items(NamedTuple):
  """What the steps of the grid compute, int32 [W] each; in scalar memory as [fields, W]."""

  request: Any
  first: Any  # the first key block that the step visits
  end: Any  # behind the last one
  begin: Any  # position of the first row
  low: Any  # position of the request's first query
  length: Any  # tokens of the request
  start: Any  # the first position that a query of the step sees
  stop: Any  # behind the last one


class Shape(NamedTuple):
  """The static numbers of a kernel; hashable."""

  key_heads: int
  group: int
  block_q: int
  block_pages: int
  page_size: int
  row_pages: int  # N
  rows: int  # Q * G, padded to whole sublanes

  @property
  def block_kv(self) -> int:
    return self.block_pages * self.page_size


def forward(operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
            block_sizes: BlockSizes) -> Residuals:
  """out [T, H, D] and lse [T, H, 1] of pages in layout v2; see `xla.paged.forward`."""
  tokens, query_heads, width = operands.query.shape
  group = query_heads // heads.key_heads
  block_q, block_pages = paged.sizes_of(operands, block_sizes, group)
  page_bytes = _page_bytes(operands.cache.pages.shape, operands.cache.pages.dtype)
  block_pages = max(1, min(block_pages, BUFFER_BYTES // page_bytes))
  sizes = block_q, block_pages
  problem = paged.cut(operands, spec, heads, sizes)
  shape = Shape(heads.key_heads, group, *sizes, pages.page_size(operands.cache),
                problem.tables.shape[1], cdiv(sizes[0] * group, SUBLANES) * SUBLANES)
  items, blocks, count, places = _schedule(problem, tokens)
  rows = jax.vmap(lambda block: paged.live_rows_of(problem, block, problem.query))(blocks)
  rows = steps.pad_axis(rows, 2, shape.rows - rows.shape[2])
  out, lse = _call(spec, shape, items, count, problem.tables.reshape(-1), rows,
                   operands.cache.pages)
  item, row, live = places
  def of_tokens(x, empty):
    x = x[:, :, :sizes[0] * group].reshape(*x.shape[:2], sizes[0], group, x.shape[-1])
    x = x.transpose(0, 2, 1, 3, 4).reshape(-1, sizes[0], query_heads, x.shape[-1])
    return jnp.where(live[:, None, None], x[item, row], empty)
  return _with_sinks(of_tokens(out, 0), of_tokens(lse, -jnp.inf), operands.sinks, live)


def _page_bytes(shape, dtype) -> int:
  """Vector memory of a page: twice on its way, once in float32."""
  _, size, rows, width = shape
  return size * rows * cdiv(width, LANES) * LANES * (2 * jnp.dtype(dtype).itemsize + 4)


def refusal(query, cache, metadata: pages.PagesMetadata) -> str | None:
  """Why the kernel does not compute a call, by shapes and dtypes; None: it does.

  Args:
    query: [T, H, D].
    cache: `PagesV2`.
    metadata: what goes with it.
  """
  dtype, width = jnp.dtype(cache.pages.dtype).name, query.shape[2]
  if cache.key_scales is not None or dtype not in DTYPES or query.dtype != cache.pages.dtype:
    return f"pages of {dtype}: the TPU kernel reads {' and '.join(DTYPES)} as they are"
  if width > LANES and width % LANES:
    return f"head_dim {width}: the TPU kernel needs a multiple of {LANES} above {LANES}"
  if _page_bytes(cache.pages.shape, dtype) > BUFFER_BYTES:
    return (f"pages of {cache.pages.shape[1]} tokens: keys and values of one page do not fit the "
            f"TPU kernel's {BUFFER_BYTES} bytes")
  steps_most = query.shape[0] + 2 * metadata.context_lens.shape[0]
  entries = metadata.page_tables.size + BUFFER_BYTES // _page_bytes(cache.pages.shape, dtype)
  if 4 * (entries + len(Items._fields) * steps_most) > SCALAR_BYTES:
    return (f"page tables of {list(metadata.page_tables.shape)} and {query.shape[0]} queries: they "
            f"do not fit the TPU kernel's {SCALAR_BYTES} bytes of scalar memory")
  return None


def _with_sinks(out, lse, sinks, live) -> Residuals:
  """Sinks weigh in the denominator only, so they may join last."""
  if sinks is None:
    return Residuals(out, lse)
  joint = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
  joint = jnp.where(live[:, None, None], joint, -jnp.inf)
  share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - jnp.where(live[:, None, None], joint, 0)))
  return Residuals((out * share).astype(out.dtype), joint)


def _schedule(problem: paged.Problem, tokens: int):
  """(Items, their query blocks, int32 [1] how many, (item, row, live) of every token)."""
  requests, block_q = problem.lengths.shape[0], problem.block_q
  most = tokens if block_q == 1 else tokens // block_q + 2 * requests
  first, end = jax.vmap(lambda r: paged.query_blocks(problem, r))(jnp.arange(requests))
  # A step without pages to visit would leave a transfer unawaited, whatever the metadata says.
  first = jnp.maximum(first, 0)
  end = jnp.maximum(end, first)
  ends = jnp.cumsum(end - first).astype(jnp.int32)
  offsets = ends - (end - first)
  number = jnp.arange(most, dtype=jnp.int32)
  request = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
  request = jnp.minimum(request, requests - 1)
  blocks = jax.vmap(lambda r, i: paged.query_block(problem, r, i))(
      request, first[request] + number - offsets[request])
  kv_first, kv_end = jax.vmap(lambda block: paged.key_blocks(problem, block))(blocks)
  begin, length = blocks.positions[:, 0], problem.lengths[request]
  low = length - (problem.starts[request + 1] - problem.starts[request])
  left, right = paged.reach(problem.spec)
  start = 0 * begin if left is None else jnp.maximum(jnp.maximum(begin, low) - left, 0)
  stop = length if right is None else jnp.minimum(length, begin + block_q + right)
  items = Items(request, kv_first, kv_end, begin, low, length, start, stop)

  token = jnp.arange(tokens, dtype=jnp.int32)
  owner = jnp.searchsorted(problem.starts[1:], token, side="right", method="compare_all")
  owner = jnp.minimum(owner.astype(jnp.int32), requests - 1)
  position = problem.lengths[owner] - problem.starts[owner + 1] + token
  live = (token < problem.starts[-1]) & (position >= 0)
  item = jnp.where(live, offsets[owner] + position // block_q - first[owner], 0)
  row = jnp.where(live, position % block_q, 0)
  return items, blocks, jnp.minimum(ends[-1:], most), (item, row, live)


def _call(spec, shape: Shape, items: Items, count, tables, rows, pool):
  """out [W, K, M, D] and lse [W, K, M, 1]."""
  width = rows.shape[-1]
  block = lambda last: pl.BlockSpec((1, shape.key_heads, shape.rows, last),
                                    lambda w, *scalars: (w, 0, 0, 0))
  varying = jax.typeof(rows).manual_axis_type
  results = [jax.ShapeDtypeStruct((*rows.shape[:3], last), dtype, manual_axis_type=varying)
             for last, dtype in ((width, rows.dtype), (1, jnp.float32))]
  numbers = lambda last: pltpu.VMEM((shape.key_heads, shape.rows, last), jnp.float32)
  return pl.pallas_call(
      functools.partial(_kernel, spec, shape),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=3, grid=(rows.shape[0],),
          in_specs=[block(width), pl.BlockSpec(memory_space=pl.ANY)],
          out_specs=[block(width), block(1)],
          scratch_shapes=[
              pltpu.VMEM((2, shape.block_pages, *pool.shape[1:]), pool.dtype),
              pltpu.VMEM((cdiv(width, LANES), shape.block_kv * 2 * shape.key_heads,
                          min(width, LANES)), jnp.float32),
              numbers(1), numbers(1), numbers(width),
              pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)]),
      out_shape=results, name="attn_core_paged",
      compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
  )(jnp.stack(items), count, tables, rows, pool)


class _Refs(NamedTuple):
  """The references of a kernel, in their order."""

  items: Any
  count: Any
  tables: Any
  rows: Any
  pool: Any
  out: Any
  lse: Any
  buffer: Any  # [2, n, page, 2K, D]
  tokens: Any  # float32 [D / 128, C * 2K, 128], or [1, C * 2K, D] of less than 128
  highest: Any
  total: Any
  output: Any
  arrived: Any  # semaphores [2]
  turn: Any  # [1]: blocks computed so far, by which the halves of the buffer alternate


def _kernel(spec, shape: Shape, *refs):
  refs = _Refs(*refs)
  step = pl.program_id(0)

  @pl.when(step == 0)
  def _():
    refs.turn[0] = 0
    @pl.when(refs.count[0] > 0)
    def _():
      _transfer(shape, refs, 0, step, _item(refs, step).first, start=True)

  @pl.when(step < refs.count[0])
  def _():
    item = _item(refs, step)
    refs.highest[...] = jnp.full_like(refs.highest, -jnp.inf)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.output[...] = jnp.zeros_like(refs.output)

    @pl.loop(item.first, item.end)
    def _(number):
      half = refs.turn[0] & 1
      last = number + 1 == item.end
      following = jnp.where(last, step + 1, step)

      @pl.when(following < refs.count[0])
      def _():
        then = jnp.where(last, _item(refs, following).first, number + 1)
        _transfer(shape, refs, 1 - half, following, then, start=True)

      _transfer(shape, refs, half, step, number, start=False)
      _fold(spec, shape, refs, item, half, number)
      refs.turn[0] += 1

    out, lse = softmax.finish(softmax.Running(
        refs.highest[...], refs.total[...], refs.output[...]))
    refs.out[0] = out.astype(refs.out.dtype)
    refs.lse[0] = lse


def _item(refs: _Refs, step) -> Items:
  return Items(*(refs.items[field, step] for field in range(len(Items._fields))))


def _transfer(shape: Shape, refs: _Refs, half, step, number, *, start: bool):
  """Starts the transfers of a key block's live pages to a half of the buffer, or awaits them."""
  item = _item(refs, step)
  for place in range(shape.block_pages):
    page = number * shape.block_pages + place

    @pl.when((page * shape.page_size < item.stop) & ((page + 1) * shape.page_size > item.start))
    def _(place=place, page=page):
      source = refs.pool.at[refs.tables[item.request * shape.row_pages + page]]
      copy = pltpu.make_async_copy(source, refs.buffer.at[half, place], refs.arrived.at[half])
      (copy.start if start else copy.wait)()


def _fold(spec, shape: Shape, refs: _Refs, item: Items, half, number):
  """Folds a key block into the running softmax of every head."""
  stride = 2 * shape.key_heads
  parts, _, lanes = refs.tokens.shape
  for part in range(parts):  # rows of 32 bits and at most 128 lanes can be read at a stride
    block = refs.buffer[half, :, :, :, pl.ds(part * lanes, lanes)]
    refs.tokens[part] = block.astype(jnp.float32).reshape(refs.tokens.shape[1:])
  seen = _visible(spec, shape, item, number)
  for head in range(shape.key_heads):
    key, value = (jnp.concatenate(
        [refs.tokens[part, pl.ds(2 * head + odd, shape.block_kv, stride=stride), :]
         for part in range(parts)], 1) for odd in range(2))
    key, value = steps.shield(key, value, steps.finite_keys(key, value))
    rows = refs.rows[0, head]
    logits = _dot(spec, rows, key.astype(rows.dtype), 1) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
      logits = jnp.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
    weigh = lambda weights, value=value.astype(rows.dtype): _dot(
        spec, weights.astype(value.dtype), value, 0)
    before = softmax.Running(refs.highest[head], refs.total[head], refs.output[head])
    after = softmax.update(before, jnp.where(seen, logits, -jnp.inf), weigh)
    refs.highest[head], refs.total[head], refs.output[head] = after


def _visible(spec, shape: Shape, item: Items, number):
  """bool [M, C]."""
  tile = (shape.rows, shape.block_kv)
  row = lax.broadcasted_iota(jnp.int32, tile, 0)
  query = item.begin + lax.div(row, jnp.int32(shape.group))
  key = number * shape.block_kv + lax.broadcasted_iota(jnp.int32, tile, 1)
  seen = (row < shape.block_q * shape.group) & (query >= item.low) & (query < item.length)
  left, right = paged.reach(spec)
  seen = seen & (key < item.length)
  seen = seen if left is None else seen & (key >= query - left)
  return seen if right is None else seen & (key <= query + right)


def _dot(spec, a, b, axis: int):
  """a [M, x] times b, over axis `axis` of b."""
  return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=spec.precision,
                         preferred_element_type=jnp.float32)
