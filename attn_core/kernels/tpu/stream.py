"""Attention of a few queries to a stream of keys and values, as a Pallas TPU kernel.

  scores = K Q^T;  out^T = V^T P

A step of the grid is some queries of one row (a request, or a row of a batch); which these are, and
which keys they see, is said in scalar memory. While a block of keys is computed, the next one is on
its way, be it of the next step. Rows of queries lie along the lanes; of several key heads together
where those of one are few, whose products are then taken of all heads and theirs is kept.

Letters: as in `pool`; W steps, Q queries of a step, G query heads of a key head, M = Q * G rows of
a key head (queries first), u key heads computed together, L = u * M lanes, R rows of the mask.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels import softmax
from attn_core.kernels.tpu.pool import LANES, Block, Live, Pool, Way, transfer, transfer_blocks
from attn_core.types import cdiv


UNROLLED = 2**18  # scores of the heads that are one piece of code


class Items(NamedTuple):
  """What the steps of the grid compute, int32 [W] each; in scalar memory as [fields, W]."""

  row: Any  # request, or row of a batch
  first: Any  # the first key block that the step visits
  end: Any  # behind the last one; above `first`
  begin: Any  # position of the first query
  low: Any  # position of the row's first query
  length: Any  # tokens of the row
  start: Any  # the first position that a query of the step sees
  stop: Any  # behind the last one


class Shape(NamedTuple):
  """The static numbers of a kernel; hashable."""

  pool: Pool
  group: int  # G
  queries: int  # Q
  together: int  # u
  row_pages: int  # of a row of the tables; 0: rows are tokens side by side
  mask_rows: int  # R; 0: what is seen follows from positions
  mask_heads: bool  # whether the mask has rows for every query head

  @property
  def rows(self) -> int:
    """M."""
    return self.queries * self.group

  @property
  def lanes(self) -> int:
    """L."""
    return self.together * self.rows

  @property
  def groups(self) -> int:
    return self.pool.key_heads // self.together

  @property
  def unrolled(self) -> int:
    """How many groups are one piece of code."""
    most = max(1, UNROLLED // (self.pool.block * cdiv(self.lanes, LANES) * LANES))
    return max(x for x in range(1, self.groups + 1) if self.groups % x == 0 and x <= most)

  def bytes(self, dtype) -> int:
    """Vector memory that a kernel needs, generously."""
    lanes, size = cdiv(self.lanes, LANES) * LANES, jnp.dtype(dtype).itemsize
    width = cdiv(max(self.pool.widths), LANES) * LANES
    blocks = 2 * self.groups * lanes * (2 * width * size + 4 * 8)
    state = self.groups * lanes * 4 * (width + 16)
    mask = 2 * self.mask_rows * self.pool.block * 2
    values = 2 * self.together * self.pool.block * 2 * width * size
    return self.pool.bytes() + blocks + state + mask + values + 6 * self.pool.block * lanes * 4


class Rule(NamedTuple):
  """What is computed; static and hashable."""

  softmax_scale: float
  logits_soft_cap: float | None
  left: int | None  # how far a query sees; None: without end
  right: int | None
  precision: Any

  @property
  def unit(self) -> float:
    """exp(logit) = 2 ** (unit * what `logits` returns)."""
    capped = self.logits_soft_cap is not None or self.softmax_scale <= 0
    return softmax.LOG2E * (1.0 if capped else self.softmax_scale)

  def logits(self, scores):
    if self.logits_soft_cap is not None:
      capped = jnp.tanh(scores * (self.softmax_scale / self.logits_soft_cap))
      return capped * self.logits_soft_cap
    return scores if self.softmax_scale > 0 else scores * self.softmax_scale


class Arrays(NamedTuple):
  """What a kernel reads."""

  items: Items
  count: Any  # int32 [1]: steps that compute anything
  tables: Any  # int32 [rows * row_pages]: pages of the rows
  factors: Any  # float32 [2]: scales of all keys and of all values; None: there are none
  rows: Any  # [W, K / u, L, D]
  mask: Any  # bfloat16 [rows, R, keys], 1: visible; None: by positions
  tokens: tuple  # keys, values and scales; see `Pool`


def together(key_heads: int, rows: int) -> int:
  """u: as many key heads as fit the lanes, of those that divide them."""
  return max(u for u in range(1, key_heads + 1)
             if key_heads % u == 0 and (u == 1 or u * rows <= LANES))


def attend(rule: Rule, shape: Shape, arrays: Arrays):
  """out [W, K / u, L, E] in the rows' dtype and lse float32 [W, K / u, 1, L]; the first `count`."""
  rows, pool = arrays.rows, shape.pool
  steps, width = rows.shape[0], pool.widths[-1]
  items = jnp.stack(arrays.items).astype(jnp.int32)
  scalars = [x for x in (items, arrays.count, arrays.tables, arrays.factors) if x is not None]
  streams = [*arrays.tokens, *([] if arrays.mask is None else [arrays.mask])]
  # Steps that compute nothing fetch and write nothing.
  place = lambda w, items, count, *_: (jnp.minimum(w, jnp.maximum(count[0] - 1, 0)), 0, 0, 0)
  block = lambda *last: pl.BlockSpec((1, shape.groups, *last), place)
  varying = jax.typeof(rows).manual_axis_type
  result = lambda last, dtype: jax.ShapeDtypeStruct((steps, shape.groups, *last), dtype,
                                                    manual_axis_type=varying)
  results = [result((shape.lanes, width), rows.dtype), result((1, shape.lanes), jnp.float32)]
  buffers = [pltpu.VMEM(*x) for x in pool.buffers()]
  if arrays.mask is not None:
    buffers.append(pltpu.VMEM((2, shape.mask_rows, pool.block), arrays.mask.dtype))
  numbers = lambda size: pltpu.VMEM((shape.groups, size, shape.lanes), jnp.float32)
  scratch = (buffers, [pltpu.VMEM(*x) for x in pool.spread()],
             [numbers(1), numbers(1), numbers(width)],
             [pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)])
  counts = [len(x) for x in (scalars, [rows], streams, results, *scratch)]

  def kernel(*refs):
    split, parts = list(refs), []
    for number in counts:
      parts.append(split[:number])
      split = split[number:]
    scalars, (rows,), streams, outputs, buffers, words, numbers, (arrived, turn) = parts
    items, step_count, tables, *factors = scalars
    _kernel(_Kernel(rule, shape, items, step_count, tables, factors[0] if factors else None, rows,
                    streams, outputs, buffers, words, softmax.Running(*numbers), arrived, turn))

  return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars), grid=(steps,),
          in_specs=[block(*rows.shape[2:]), *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(streams)],
          out_specs=[block(shape.lanes, width), block(1, shape.lanes)],
          scratch_shapes=[x for group in scratch for x in group]),
      out_shape=results, name="attn_core_stream",
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary",),
          vmem_limit_bytes=max(16 * 2**20, shape.bytes(rows.dtype) * 5 // 4)),
  )(*scalars, rows, *streams)


class _Kernel(NamedTuple):
  """What is computed, and the references of a running kernel."""

  rule: Rule
  shape: Shape
  items: Any
  count: Any
  tables: Any
  factors: Any
  rows: Any
  streams: Any
  outputs: Any  # out, lse
  buffers: Any
  words: Any
  running: softmax.Running  # [K / u, 1, L], the same, [K / u, E, L]
  arrived: Any  # semaphores [2]
  turn: Any  # [1]: blocks computed so far, by which the halves of the buffers alternate


def _kernel(k: _Kernel):
  step, count = pl.program_id(0), _count(k)

  @pl.when(step == 0)
  def _():
    k.turn[0] = 0
    @pl.when(count > 0)
    def _():
      _transfer(k, 0, step, _item(k, step).first, start=True)

  @pl.when(step < count)
  def _():
    item = _item(k, step)
    k.running.highest[...] = jnp.full_like(k.running.highest, -jnp.inf)
    k.running.total[...] = jnp.zeros_like(k.running.total)
    k.running.output[...] = jnp.zeros_like(k.running.output)

    @pl.loop(item.first, item.end)
    def _(number):
      half = k.turn[0] & 1
      last = number + 1 == item.end
      following = jnp.where(last, step + 1, step)

      @pl.when(following < count)
      def _():
        then = jnp.where(last, _item(k, following).first, number + 1)
        _transfer(k, 1 - half, following, then, start=True)

      _transfer(k, half, step, number, start=False)
      _fold(k, item, half, number)
      k.turn[0] += 1

    for group in range(k.shape.groups):
      highest, total, output = (x[group] for x in k.running)
      out, lse = softmax.finish(softmax.Running(
          highest * (k.rule.unit / softmax.LOG2E), total, output))
      k.outputs[0][0, group] = out.T.astype(k.outputs[0].dtype)
      k.outputs[1][0, group] = lse


def _count(k: _Kernel):
  return k.count[0]


def _item(k: _Kernel, step) -> Items:
  return Items(*(k.items[field, step] for field in range(len(Items._fields))))


def _page(k: _Kernel, item: Items, page):
  """Where a page of a row lies."""
  return k.tables[item.row * k.shape.row_pages + page] if k.shape.row_pages else item.row


def _transfer(k: _Kernel, half, step, number, *, start: bool):
  """Starts the transfers of a key block to a half of the buffers, or awaits them."""
  item, pool = _item(k, step), k.shape.pool
  tokens, blocks = slice(len(pool.widths)), slice(len(pool.widths), None)
  way = lambda part: Way(k.streams[part], k.buffers[part], k.arrived, half)
  transfer(pool, way(tokens), Live(item.start, item.stop), number,
           functools.partial(_page, k, item), start=start)
  transfer_blocks(pool, way(blocks), item.row, number, start=start)


def _fold(k: _Kernel, item: Items, half, number):
  """Folds a key block into the running softmax of every head."""
  shape, pool = k.shape, k.shape.pool
  block = Block(pool, k.buffers[:len(pool.buffers())], k.words, k.factors, half,
                Live(item.start, item.stop).tokens(pool, number))
  finite = block.settle()
  seen = functools.partial(_seen_by_mask if shape.mask_rows else _seen_by_position,
                           k, item, half, number)
  shown = jnp.bool_(False)
  if not shape.mask_rows and shape.lanes > LANES:
    shown = _shown(k, item, number)  # for few rows, to look everywhere is as fast
    pl.when(finite & shown)(lambda: _fold_groups(k, block, None, careful=False))
  pl.when(finite & jnp.logical_not(shown))(lambda: _fold_groups(k, block, seen, careful=False))
  pl.when(jnp.logical_not(finite))(lambda: _fold_groups(k, block, seen, careful=True))


def _fold_groups(k: _Kernel, block: Block, seen: Callable | None, *, careful: bool):
  """Folds a block into all heads; scores of the next one are issued before those of one are used.

  Args:
    seen: group of heads -> bool [C, L]; None: everything is.
    careful: whether keys and values may not be finite, which is then for those who see them.
  """
  def fold(group, scores, weigh):
    logits = k.rule.logits(scores)
    if seen is not None:
      logits = jnp.where(seen(group), logits, -jnp.inf)
    before = softmax.Running(*(x[group] for x in k.running))
    after = softmax.update(before, logits, weigh, exp=lambda x: jnp.exp2(x * k.rule.unit), axis=0)
    for ref, x in zip(k.running, after):
      ref[group] = x

  size = 1 if careful else k.shape.unrolled
  @pl.loop(jnp.int32(0), jnp.int32(k.shape.groups // size))
  def _(first):
    groups = [first * size + i for i in range(size)]
    ahead = _scores(k, block, groups[0], careful)
    for i, group in enumerate(groups):
      now, ahead = ahead, (
          _scores(k, block, groups[i + 1], careful) if i + 1 < size else None)
      fold(group, *now)


def _scores(k: _Kernel, block: Block, group: int, careful: bool):
  """(scores [C, L], their weights [C, L] -> output [E, L]) of a group of heads."""
  rows, u, m = k.rows[0, group], k.shape.together, k.shape.rows
  keys, values, scores = [], [], None
  lane = lax.broadcasted_iota(jnp.int32, (1, k.shape.lanes), 1)
  own = [(lane >= i * m) & (lane < (i + 1) * m) for i in range(u)]
  for i in range(u):
    key, value = (block.read(bool(odd), group * u + i, rows.dtype) for odd in range(2))
    if careful:
      nothing = lambda x: (x - x).astype(jnp.float32).sum(1, keepdims=True)  # 0, or NaN
      spoilt = nothing(key) + nothing(value)
      key, value = (jnp.where(spoilt == 0, x, jnp.zeros((), x.dtype)) for x in (key, value))
    found = _dot(k, key, rows, 1)
    found = found + spoilt if careful else found
    scores = found if scores is None else jnp.where(own[i], found, scores)
    values.append(value)

  def weigh(weights):
    weights, output = weights.astype(rows.dtype), None
    for i, value in enumerate(values):
      found = _dot(k, value, weights, 0, 0)
      output = found if output is None else jnp.where(own[i], found, output)
    return output

  return scores, weigh


def _dot(k: _Kernel, a, b, axis: int, axis_a: int = 1):
  precision = k.rule.precision
  if k.shape.lanes == 1:  # a product of one column is a sum, which Mosaic does not widen
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  if a.dtype == jnp.float32 and precision is None:
    precision = lax.Precision.HIGHEST
  return lax.dot_general(a, b, (((axis_a,), (axis,)), ((), ())), precision=precision,
                         preferred_element_type=jnp.float32)


# --- What is seen. -------------------------------------------------------------------------------


def _shown(k: _Kernel, item: Items, number):
  """Whether all queries of a step, be they of this call or not, see all of a block."""
  size, rule = k.shape.pool.block, k.rule
  first, last = number * size, number * size + size - 1
  shown = (first >= item.start) & (last < item.stop)
  if rule.left is not None:
    shown = shown & (first >= item.begin + (k.shape.queries - 1) - rule.left)
  return shown if rule.right is None else shown & (last <= item.begin + rule.right)


def _tokens(k: _Kernel):
  """int32 [1, L]: which query of the step a lane is of."""
  lane = lax.broadcasted_iota(jnp.int32, (1, k.shape.lanes), 1)
  return lax.div(lax.rem(lane, jnp.int32(k.shape.rows)), jnp.int32(k.shape.group))


def _seen_by_position(k: _Kernel, item: Items, half, number, group):
  """bool [C, L]; hidden from rows that are no queries of this call."""
  del half, group
  size, rule = k.shape.pool.block, k.rule
  key = number * size + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
  query = item.begin + _tokens(k)
  live = (query >= item.low) & (query < item.length)
  end = jnp.full_like(query, item.length)
  if rule.right is not None:
    end = jnp.minimum(end, query + (rule.right + 1))
  seen = key < jnp.where(live, end, 0)
  return seen if rule.left is None else seen & (key >= query - rule.left)


def _seen_by_mask(k: _Kernel, item: Items, half, number, group):
  """bool [C, L]: columns of the mask, by a product that turns it round."""
  del item, number
  shape = k.shape
  lane = lax.broadcasted_iota(jnp.int32, (1, shape.lanes), 1)
  row = _tokens(k)
  if shape.mask_heads:
    key_head = group * shape.together + lax.div(lane, jnp.int32(shape.rows))
    head = key_head * shape.group + lax.rem(lane, jnp.int32(shape.group))
    row = head * shape.queries + row
  mask = k.buffers[-1][half]
  picked = lax.broadcasted_iota(jnp.int32, (shape.mask_rows, shape.lanes), 0) == row
  return lax.dot_general(mask, picked.astype(mask.dtype), (((0,), (0,)), ((), ())),
                         preferred_element_type=jnp.float32) > 0.5
