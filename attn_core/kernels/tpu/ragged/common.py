# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Types and helpers shared by the ragged kernel and its two updates of the running softmax.

A grid step computes some queries of one row: a request, or a batch row. The rows of a step are its
pairs of a query and a query head of one key head, queries first. Key heads are computed in groups.
"""

import itertools
import math
from typing import Any, Callable, NamedTuple, Sequence

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.caches.paged.layouts import Scope
from attn_core.kernels.common import matmul_precision, online_softmax
from attn_core.kernels.tpu.ragged.kv_block import KVBlock
from attn_core.kernels.tpu.ragged.kv_layout import LANES, SUBLANES, KVLayout, LiveTokens
from attn_core.kernels.tpu.ragged.mod_form import ModForm, ModInputs, ModRefs
from attn_core.types import BlockSizes, cdiv

Ref = Any  # a Pallas reference
Index = Any  # int, or a traced int32

SCALAR_BYTES = 15 * 2**16  # of the 1 MiB of scalar memory, for tables and steps
TILE_KEYS = 256  # keys of a tile, with many rows
TILE_ROWS = 1024  # rows of a tile
MOST_TILES = 31  # of a block and a head group: bits of `row_tiles.Kinds`
FEW_ROWS = 64  # rows of a key head: up to here keys and values stay in the matrix units
FEW_ROWS_LATENT = 256  # the same of latent rows, which are whole where they are stored
LATENT_PIECE = 512  # latent rows of a piece, see `StepShape.pieces`; twice for more than FEW_ROWS
MOST_SCORES = 2**19  # of a block and a head group of latent rows, or of a dense cache
OVERFLOWED = 2**31 - 1  # `Steps.row_begin` of rows of a cache that had no place for new tokens
MOST_DRAFTS = 32  # new tokens of a request that form a tree: bits of a number
FEW_HEADS = 1  # key heads, see `StepShape.starts_between`
FEW_ROWS_GROUPS = 8  # head groups that are unrolled, with few rows
FEW_ROWS_SLOTS = 3  # blocks in vector memory where a block takes less time to compute than to copy


class VectorMemory(NamedTuple):
  """Bytes of vector memory by which blocks are chosen."""

  buffers: int = 16 * 2**20  # for keys and values as copied and as words
  chosen: int = 48 * 2**20  # for everything, where blocks are chosen
  most: int = 51 * 2**20  # of a call that is not refused; the compiler gets a quarter more


def vector_memory(block_sizes: BlockSizes) -> VectorMemory:
  """Returns what a kernel may use, of the memory of a chip that has little, or of others."""
  limit = block_sizes.vmem_limit_bytes
  if limit is None:
    return VectorMemory()
  most = limit * 4 // 5
  return VectorMemory(limit // 4, most * 15 // 16, most)


def has_few_rows(layout: KVLayout, rows: int) -> bool:
  """Returns True if keys stay in the matrix units and rows pass by, instead of the reverse.

  Args:
    layout: of the keys.
    rows: of a key head.
  """
  return rows <= (FEW_ROWS_LATENT if layout.latent else FEW_ROWS)


class Steps(NamedTuple):
  """The work of every grid step: int32 [num_steps] each; in scalar memory [fields, num_steps]."""

  row: Index  # request, or batch row
  first_block: Index  # the first key block that the step visits
  end_block: Index  # the end of its key blocks; above `first_block`
  query_begin: Index  # position of the step's first query
  row_begin: Index  # position of the row's first query
  row_length: Index  # tokens of the row
  kv_start: Index  # the first position that a query of the step attends to
  kv_stop: Index  # the end of those positions


class StepShape(NamedTuple):
  """Static shape of a grid step; hashable."""

  layout: KVLayout
  group_size: int  # G, query heads of a key head
  block_q: int  # queries of a step
  row_pages: int = 0  # pages of a row of the tables; 0: rows are consecutive tokens
  mask_rows: int = 0  # rows of the mask for a batch row; 0: the mask follows from positions
  mask_heads: bool = False  # whether the mask has rows for every query head
  one_block: bool = False  # whether a step has all queries of its request, from the first one on
  row_groups: int = 1  # head groups that the rows of latent rows form, see `decode`
  # Whether few rows come without padding and with infinities, and the kernel writes those of the
  # next step as they are read while it computes one; and whether they come transposed.
  raw_rows: bool = False
  transposed_rows: bool = False
  num_cores: int = 1  # cores of the chip, among which the steps are divided

  @property
  def head_rows(self) -> int:
    """Rows of a key head: block_q * G."""
    return self.block_q * self.group_size

  @property
  def few_rows(self) -> bool:
    """See `has_few_rows`."""
    return has_few_rows(self.layout, self.head_rows // self.row_groups)

  @property
  def group_heads(self) -> int:
    """Key heads of a head group.

    With few rows two heads, which fill matrix units of 256; many rows of one fill the lanes.
    """
    pairs = self.few_rows and self.layout.key_heads % 2 == 0
    return 2 if pairs and all(width == LANES for width in self.layout.widths) else 1

  @property
  def group_rows(self) -> int:
    """Rows of a head group."""
    return self.group_heads * self.head_rows // self.row_groups

  @property
  def head_groups(self) -> int:
    """Number of head groups."""
    return self.layout.key_heads // self.group_heads * self.row_groups

  @property
  def unrolled_groups(self) -> int:
    """Number of head groups that are unrolled, with few rows."""
    if self.row_groups > 1:
      return 1
    return max(n for n in range(1, self.head_groups + 1)
               if self.head_groups % n == 0 and n <= FEW_ROWS_GROUPS)

  @property
  def tile_sizes(self) -> tuple[int, int]:
    """Keys and rows of a tile, with many rows."""
    block_kv, rows = self.layout.block_kv, self.group_rows
    keys = math.gcd(block_kv, TILE_KEYS)
    # Whole queries, so that a tile's rows are a range of positions.
    count = max(n for n in range(1, max(1, rows // TILE_ROWS) + 1)
                if self.block_q % n == 0 and (n == 1 or rows // n % LANES == 0))
    split = keys % min(LANES, TILE_KEYS) == 0 and block_kv // keys * count <= MOST_TILES
    return keys if split else block_kv, rows // count

  @property
  def pieces(self) -> list[slice | None]:
    """Parts of a block that few rows are computed for one after the other; None: the block."""
    if not self.layout.latent:
      return [None]
    size = self._piece_tokens
    return [slice(first, min(first + size, self.layout.block_kv))
            for first in range(0, self.layout.block_kv, size)]

  @property
  def _piece_tokens(self) -> int:
    """Latent rows of a piece."""
    size = LATENT_PIECE if self.group_rows <= FEW_ROWS else 2 * LATENT_PIECE
    return min(size, self.layout.block_kv)

  @property
  def starts_between(self) -> bool:
    """Whether transfers of the next block start between the products of this one.

    It costs more than it saves where heads are many, and with latent rows.
    """
    return (bool(self.row_pages) and self.few_rows and not self.layout.latent
            and self.layout.key_heads <= FEW_HEADS)

  def running_shapes(self) -> list[tuple[int, ...]]:
    """Returns shapes of m_i, l_i and acc, two of each: before a block and after it."""
    shape = lambda size: (2, self.head_groups, self.group_rows, size) if self.few_rows else (
        2, self.head_groups, size, self.group_rows)
    return [shape(1), shape(1), shape(self.layout.widths[-1])]

  def vmem_bytes(self, dtype: DTypeLike) -> int:
    """Returns an upper estimate of the vector memory that a kernel needs."""
    # Rows are along the sublanes or the lanes, and a number per row takes whole tiles.
    tile, number = (2 * SUBLANES, LANES) if self.few_rows else (LANES, SUBLANES)
    rows, size = cdiv(self.group_rows, tile) * tile, jnp.dtype(dtype).itemsize
    width = cdiv(max(self.layout.widths), LANES) * LANES
    blocks = 2 * self.head_groups * rows * (2 * width * size + 4 * number)
    state = 2 * self.head_groups * rows * 4 * (width + 2 * number)
    mask_bytes = 4 if self.mask_rows == 1 else 2 * self.mask_rows
    mask = self.layout.slots * self.layout.block_kv * mask_bytes
    # With few rows, the keys and values of all unrolled heads are read before any is used; some of
    # them still have 32 bits.
    heads = self.group_heads * (self.unrolled_groups if self.few_rows else 2)
    read = 2 * self.layout.block_kv * width
    some = read
    if self.few_rows and self.layout.latent and size == 2:
      # Latent rows of 16 bits are operands where they are, those of 8 are converted piece by piece,
      # and those of 32 are split into parts of 16 bits as a whole.
      some = 2 * self._piece_tokens * width
      read = some if self.layout.rest_dtype is None else read
    values = read * heads * size + (some * self.group_heads * 8 if self.few_rows else 0)
    if self.row_pages:
      # `token_kernel` copies queries and results. In vector memory, the query heads of a key head
      # are rows of tiles; and rows are kept twice.
      padded = cdiv(self.group_size, SUBLANES) * SUBLANES if self.group_size > SUBLANES else (
          2 ** (self.group_size - 1).bit_length())
      blocks = blocks * max(padded, 4 // size) // self.group_size
      blocks += self.head_groups * rows * width * size
    return (self.layout.vmem_bytes() + blocks + state + mask + values
            + 6 * 4 * (self.layout.block_kv * rows if self.few_rows else
                       math.prod(self.tile_sizes)))


class LogitsSpec(NamedTuple):
  """Definition of logits and of the mask by positions; static and hashable."""

  softmax_scale: float
  logits_soft_cap: float | None
  left: int | None  # window to the left of a query; None: unbounded
  right: int | None
  precision: Any
  mods: ModForm | None = None  # the score mod, which follows the soft cap
  scope: Scope = Scope.ALL  # the tokens of a request that count
  drafts: int = 0  # rows of a request in `KernelRefs.drafts`; 0: new tokens follow one another
  of_cache: bool = False  # whether steps are those of `cache_rows`
  int8_products: bool = False  # whether the matrix unit multiplies int8 by int8

  @property
  def _is_scaled(self) -> bool:
    """Whether `logits` multiplies by the scale."""
    return (self.logits_soft_cap is not None or self.softmax_scale <= 0 or self.mods is not None)

  @property
  def keeps_infinite(self) -> bool:
    """Whether infinite scores give sums that are out of range, or NaN."""
    return self.logits_soft_cap is None and self.mods is None

  @property
  def unit(self) -> float:
    """The factor in exp(logit) = 2 ** (unit * result of `logits`)."""
    return online_softmax.LOG2E * (1.0 if self._is_scaled else self.softmax_scale)

  def logits(self, scores: jax.Array) -> jax.Array:
    """Returns the logits of scores without the factor `unit`."""
    if self.logits_soft_cap is not None:
      capped = jnp.tanh(scores * (self.softmax_scale / self.logits_soft_cap))
      return capped * self.logits_soft_cap
    return scores * self.softmax_scale if self._is_scaled else scores

  def update(self, running: online_softmax.Running, scores: jax.Array,
             weigh: Callable[[jax.Array], jax.Array], visible: jax.Array | None,
             modify: Callable[[jax.Array], jax.Array] | None, *,
             axis: int) -> online_softmax.Running:
    """Folds scores into the running softmax.

    Args:
      running: of the keys before.
      scores: Q K^T, the keys along `axis`.
      weigh: maps weights to their product with the values.
      visible: bool, broadcastable to `scores`; None: all True.
      modify: the score mod; None: there is none.
      axis: of the keys.
    """
    logits = self.logits(scores)
    logits = logits if modify is None else modify(logits)
    if visible is not None:
      logits = jnp.where(visible, logits, -jnp.inf)
    return online_softmax.update(running, logits, weigh, exp=lambda x: jnp.exp2(x * self.unit),
                                 axis=axis)


class KernelInputs(NamedTuple):
  """Arrays that the kernel reads."""

  # (int32 [fields of `Steps`, num_steps],), or what `cache_rows.numbers` returns
  steps: tuple[jax.Array, ...]
  num_live: jax.Array  # int32 [n]: the last is the number of steps that compute anything
  tables: jax.Array  # int32 [rows * row_pages]: pages of the rows
  tensor_scales: jax.Array | None  # float32 [2]: scales of all keys and of all values
  rows: jax.Array  # queries [num_steps, head_groups, group_rows, D], see `StepShape.raw_rows`
  # [rows, mask_rows, keys], 1: visible; bfloat16, or float32 if it is one row; None: by positions
  mask: jax.Array | None
  tokens: tuple[jax.Array, ...]  # keys, values and scales; see `KVLayout`
  mods: ModInputs | None = None


class KernelRefs(NamedTuple):
  """Static parameters and references of a running kernel."""

  spec: LogitsSpec
  shape: StepShape
  steps: Ref
  num_live: Ref
  tables: Ref
  tensor_scales: Ref | None
  rows: Ref
  sources: Sequence[Ref]  # keys, values, scales, keys of the score mod and mask in HBM
  outputs: Sequence[Ref]  # out, lse
  buffers: Sequence[Ref]  # targets of the transfers from `sources`
  words: Sequence[Ref]  # see `KVLayout.word_buffers`
  running: online_softmax.Running  # see `StepShape.running_shapes`
  semaphores: Ref  # of the transfers to each slot
  counters: Ref  # int32 [4] in scalar memory, indexed by the names below
  mods: ModRefs | None = None
  # Of each new token of each request, int32 [requests * spec.drafts] in scalar memory: which new
  # tokens it sees, one bit for each; with a window also how many of them it follows. Or empty.
  drafts: Sequence[Ref] = ()
  # With `StepShape.raw_rows`: the rows of the first step and of the next one, and places for those
  # of two steps as they are read.
  raw: Sequence[Ref] = ()
  cache_rows: Sequence[Ref] = ()  # with `LogitsSpec.of_cache`, see `cache_rows.numbers`


def split(refs: Sequence[Ref], counts: Sequence[int]) -> list[Sequence[Ref]]:
  """Splits the references of a kernel into groups of `counts`."""
  ends = list(itertools.accumulate(counts))
  return [refs[end - count:end] for end, count in zip(ends, counts)]


# Number of blocks computed and of blocks whose transfers have started, which determine their slots
# of the buffers; the step and the key block that are fetched next; and, with many rows, whether a
# block of the step had numbers that are not finite, or large.
COMPUTED, FETCHED, NEXT_STEP, NEXT_BLOCK, CAREFUL = range(5)
NUM_COUNTERS = 5


def current(k: "KernelRefs") -> jax.Array:
  """Returns which of the two running softmaxes is that of the keys before the block."""
  return k.counters[COMPUTED] & 1


class TilePart(NamedTuple):
  """Some keys of a block and some rows of a head group."""

  keys: slice
  rows: slice

  def kept(self, x: jax.Array) -> jax.Array:
    """Slices [keys, rows], or an array that broadcasts to it."""
    return x[self.keys if x.shape[0] > 1 else slice(None),
             self.rows if x.shape[1] > 1 else slice(None)]


class TileIndex(NamedTuple):
  """A block of keys, and the step that visits it."""

  step: Steps  # its numbers
  slot: Index  # of the buffers
  block: Index  # number of the block in its row

  def kv_block(self, k: KernelRefs) -> KVBlock:
    """Returns the block in vector memory."""
    layout = k.shape.layout
    return KVBlock(layout, k.buffers[:len(layout.buffers())], k.words, k.tensor_scales, self.slot,
                   LiveTokens(self.step.kv_start, self.step.kv_stop), self.block)


def infinite_to_nan(rows: jax.Array) -> jax.Array:
  """Replaces infinite queries by NaN, so that all their logits are NaN."""
  wide = rows.astype(jnp.float32)
  return (wide + (wide - wide)).astype(rows.dtype)


def dot(k: KernelRefs, a: jax.Array, b: jax.Array, axis: int, axis_a: int = 1) -> jax.Array:
  """Contracts `axis_a` of a with `axis` of b, into float32."""
  rows = a.shape[0]
  if k.shape.group_rows == 1:  # a product of one column is a sum, which Mosaic does not widen
    if k.shape.layout.latent:  # whose rows are wide: several equal rows are a product
      a = jnp.broadcast_to(a, (SUBLANES, a.shape[1]))
    else:
      a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  found = lax.dot_general(a, b, (((axis_a,), (axis,)), ((), ())),
                          precision=matmul_precision.resolve(a.dtype, k.spec.precision),
                          preferred_element_type=jnp.float32)
  return found[:rows] if a.shape[0] > rows else found
