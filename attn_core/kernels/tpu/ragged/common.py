"""What a step of `stream` computes, and what its ways to fold a block of keys have in common.

Letters: as in `pool`; W steps, Q queries of a step, G query heads of a key head, M = Q * G rows of
a key head (queries first), u key heads computed together, L = u * M rows, R rows of the mask.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.tpu.ragged.kv_block import Block
from attn_core.kernels.tpu.ragged.kv_layout import LANES, SUBLANES, Live, Pool
from attn_core.types import cdiv

UNROLLED = 2**18  # scores of the heads that are one piece of code, where rows are many
FEW = 64  # rows of a key head: up to here keys and values are what stays in the matrix units
FEW_GROUPS = 8  # that are one piece of code, where rows are few
FEW_SLOTS = 3  # blocks in vector memory, where they take less time to compute than to come


def is_few(rows: int) -> bool:
  """Whether so many rows of a key head pass by its keys, instead of these by them."""
  return rows <= FEW


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
  row_pages: int = 0  # of a row of the tables; 0: rows are tokens side by side
  mask_rows: int = 0  # R; 0: what is seen follows from positions
  mask_heads: bool = False  # whether the mask has rows for every query head

  @property
  def rows(self) -> int:
    """M."""
    return self.queries * self.group

  @property
  def few(self) -> bool:
    """Whether keys and values stay in the matrix units, and rows pass by."""
    return is_few(self.rows)

  @property
  def together(self) -> int:
    """u: of few rows two heads side by side, which fill units of 256; else what fills the lanes."""
    heads = self.pool.key_heads
    if self.few:
      return 2 if heads % 2 == 0 and all(width == LANES for width in self.pool.widths) else 1
    return max(u for u in range(1, heads + 1)
               if heads % u == 0 and (u == 1 or u * self.rows <= LANES))

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
    most = FEW_GROUPS if self.few else max(
        1, UNROLLED // (self.pool.block * cdiv(self.lanes, LANES) * LANES))
    return max(x for x in range(1, self.groups + 1) if self.groups % x == 0 and x <= most)

  def running(self) -> list[tuple[int, ...]]:
    """Shapes of the numbers of the running softmax.

    Of few rows two of each: one before a block and one after it.
    """
    last = lambda size: (2, self.groups, self.lanes, size) if self.few else (
        self.groups, size, self.lanes)
    return [last(1), last(1), last(self.pool.widths[-1])]

  def bytes(self, dtype) -> int:
    """Vector memory that a kernel needs, generously."""
    # Rows lie along the sublanes or the lanes, and what is one number a row takes whole tiles.
    tile, number = (2 * SUBLANES, LANES) if self.few else (LANES, SUBLANES)
    lanes, size = cdiv(self.lanes, tile) * tile, jnp.dtype(dtype).itemsize
    width = cdiv(max(self.pool.widths), LANES) * LANES
    blocks = 2 * self.groups * lanes * (2 * width * size + 4 * number)
    state = (2 if self.few else 1) * self.groups * lanes * 4 * (width + 2 * number)
    mask = self.pool.slots * self.mask_rows * self.pool.block * 2
    # Where rows are few, keys and values are made for all heads of a piece of code before any is
    # used; some are on their way to it, in 32 bits.
    heads = self.together * (self.unrolled if self.few else 2)
    made = 2 * self.pool.block * width
    values = made * heads * size + (made * self.together * 8 if self.few else 0)
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

  def update(self, before: softmax.Running, scores, weigh, seen, *, axis: int) -> softmax.Running:
    """Folds scores into the running softmax; `seen` None: everything is."""
    logits = self.logits(scores)
    if seen is not None:
      logits = jnp.where(seen, logits, -jnp.inf)
    return softmax.update(before, logits, weigh, exp=lambda x: jnp.exp2(x * self.unit), axis=axis)


class Arrays(NamedTuple):
  """What a kernel reads."""

  items: Items
  count: Any  # int32 [1]: steps that compute anything
  tables: Any  # int32 [rows * row_pages]: pages of the rows
  factors: Any  # float32 [2]: scales of all keys and of all values; None: there are none
  rows: Any  # [W, K / u, L, D]
  mask: Any  # bfloat16 [rows, R, keys], 1: visible; None: by positions
  tokens: tuple  # keys, values and scales; see `Pool`


class Kernel(NamedTuple):
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
  running: softmax.Running  # see `Shape.running`
  arrived: Any  # semaphores [slots]
  turn: Any  # int32 [4] in scalar memory, by the names below


# Blocks computed so far and blocks whose transfers have started, by which the slots of the buffers
# take turns, and the step and the block that are fetched next.
COMPUTED, FETCHED, NEXT_STEP, NEXT_BLOCK = range(4)


class Place(NamedTuple):
  """A block of keys, and the step that visits it."""

  item: Items
  slot: Any  # of the buffers
  number: Any  # of the block in its row

  def block(self, k: Kernel) -> Block:
    pool = k.shape.pool
    return Block(pool, k.buffers[:len(pool.buffers())], k.words, k.factors, self.slot,
                 Live(self.item.start, self.item.stop), self.number)


def dot(k: Kernel, a, b, axis: int, axis_a: int = 1):
  precision = k.rule.precision
  if k.shape.lanes == 1:  # a product of one column is a sum, which Mosaic does not widen
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  if a.dtype == jnp.float32 and precision is None:
    precision = lax.Precision.HIGHEST
  return lax.dot_general(a, b, (((axis_a,), (axis,)), ((), ())), precision=precision,
                         preferred_element_type=jnp.float32)


# --- What is seen. -------------------------------------------------------------------------------


def shown(k: Kernel, place: Place):
  """Whether all queries of a step, be they of this call or not, see all of a block."""
  size, rule, item = k.shape.pool.block, k.rule, place.item
  first, last = place.number * size, place.number * size + size - 1
  found = (first >= item.start) & (last < item.stop)
  if rule.left is not None:
    found = found & (first >= item.begin + (k.shape.queries - 1) - rule.left)
  return found if rule.right is None else found & (last <= item.begin + rule.right)


def seen(k: Kernel, place: Place, group, *, axis: int):
  """bool [C, L] where keys are axis 0, or [L, C] where they are axis 1."""
  return (_seen_by_mask if k.shape.mask_rows else _seen_by_position)(k, place, group, axis)


def rows_along(k: Kernel, axis: int):
  """int32 [1, L] or [L, 1]: numbers of rows along an axis."""
  shape = (k.shape.lanes, 1) if axis == 0 else (1, k.shape.lanes)
  return lax.broadcasted_iota(jnp.int32, shape, axis)


def _tokens(k: Kernel, rows):
  """Which query of the step a row is of."""
  return lax.div(lax.rem(rows, jnp.int32(k.shape.rows)), jnp.int32(k.shape.group))


def _seen_by_position(k: Kernel, place: Place, group, axis: int):
  """Hidden from rows that are no queries of this call."""
  del group
  size, rule, item = k.shape.pool.block, k.rule, place.item
  key = place.number * size + lax.broadcasted_iota(
      jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
  query = item.begin + _tokens(k, rows_along(k, 1 - axis))
  live = (query >= item.low) & (query < item.length)
  end = jnp.full_like(query, item.length)
  if rule.right is not None:
    end = jnp.minimum(end, query + (rule.right + 1))
  found = key < jnp.where(live, end, 0)
  return found if rule.left is None else found & (key >= query - rule.left)


def _seen_by_mask(k: Kernel, place: Place, group, axis: int):
  """Columns of the mask, by a product that picks them, unless all rows are of one."""
  shape, rows = k.shape, rows_along(k, 1 - axis)
  if axis == 1 and shape.queries == 1 and not shape.mask_heads:
    return k.buffers[-1][place.slot, :1].astype(jnp.float32) > 0.5
  wanted = _tokens(k, rows)
  if shape.mask_heads:
    key_head = group * shape.together + lax.div(rows, jnp.int32(shape.rows))
    head = key_head * shape.group + lax.rem(rows, jnp.int32(shape.group))
    wanted = head * shape.queries + wanted
  mask = k.buffers[-1][place.slot]
  sizes = (shape.mask_rows, shape.lanes)[::1 if axis == 0 else -1]
  picked = (lax.broadcasted_iota(jnp.int32, sizes, axis) == wanted).astype(mask.dtype)
  operands = (mask, picked, 0, 0) if axis == 0 else (picked, mask, 1, 0)
  return lax.dot_general(*operands[:2], ((operands[2:3], operands[3:]), ((), ())),
                         preferred_element_type=jnp.float32) > 0.5
