"""What a TPU kernel reads beside queries, keys and values: the mask's arrays, bias, numbers.

Tiles are transposed: keys along the sublanes, queries along the lanes, so that
what belongs to a query is one dense row and a softmax reduces over sublanes.
A `Feed` collects operands with their block specs while a kernel is put together,
and hands out readers that the kernel calls with its references.

Letters: B batch, T query length, S key length, H query heads, K key heads, G = H / K.
"""

from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core.masks import dropout
from attn_core.kernels.common.contract import Cargo
from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.flash import remote_copy as ring
from attn_core.kernels.tpu.flash.schedule import LANES, Cut, Lines, Schedule
from attn_core.masks import leaves as algebra
from attn_core.types import AttentionSpec, Operands


class Refs(NamedTuple):
  """The references that a running kernel was given."""

  scalars: Any  # in scalar memory
  arrays: Any  # blocks in vector memory
  place: tuple  # (batch row, number of the step's heads, step) in the grid


class Part(NamedTuple):
  """Neighbouring tokens of a block."""

  start: int
  length: int

  @property
  def slice(self):
    return pl.ds(self.start, self.length)


class Where(NamedTuple):
  """Some queries and keys of one block, of one query head: what is computed at once."""

  batch: Any  # local batch row
  heads: Any  # number of the step's heads among the local ones
  query_block: Any
  key_block: Any
  head: int  # query head of the step
  queries: Part
  keys: Part

  @property
  def shape(self) -> tuple[int, int]:
    return self.keys.length, self.queries.length


class Tokens(NamedTuple):
  """How a kernel sees [B, tokens, heads, W].

  Where W fills whole lanes, heads are side by side, as they are in memory: nothing is moved there.
  Else heads come first.
  """

  batch: int
  length: int  # padded to whole blocks
  heads: int
  width: int
  block_heads: int
  block: int  # tokens of a block
  which: Callable  # (query block, key block) -> number of the block

  @property
  def side_by_side(self) -> bool:
    return self.width % LANES == 0

  @property
  def shape(self) -> tuple[int, ...]:
    if self.side_by_side:
      return self.batch, self.length, self.heads * self.width
    return self.batch, self.heads, self.length, self.width

  @property
  def block_shape(self) -> tuple[int, ...]:
    if self.side_by_side:
      return 1, self.block, self.block_heads * self.width
    return 1, self.block_heads, self.block, self.width

  def index(self, b, h, i, j):
    """The number of the block along every axis of `shape`."""
    number = self.which(i, j)
    return (b, number, h) if self.side_by_side else (b, h, number, 0)

  def pack(self, x):
    """[B, tokens, heads, W] -> `shape`."""
    x = pad(x, 1, self.length)
    return x.reshape(self.shape) if self.side_by_side else x.transpose(0, 2, 1, 3)

  def unpack(self, x):
    """`shape` -> [B, length, heads, W]."""
    if self.side_by_side:
      return x.reshape(self.batch, self.length, self.heads, self.width)
    return x.transpose(0, 2, 1, 3)

  def at(self, head: int, part: Part) -> tuple:
    """Where in a block some tokens of a head are: [tokens, W]."""
    if self.side_by_side:
      return 0, part.slice, pl.ds(head * self.width, self.width)
    return 0, head, part.slice


class Feed:
  """Operands of a kernel, in the order in which it gets them."""

  def __init__(self, schedule: Schedule, lines: Lines, cut: Cut, *, by_keys: bool,
               first_query_block: int = 0):
    self.scalars, self.arrays, self.specs = list(schedule), [], []
    self.cut, self.lines, self.by_keys = cut, lines, by_keys
    self.first_query_block = first_query_block
    self.steps = schedule.rows.shape[1]  # of a line

  def query_tokens(self, shape) -> Tokens:
    """The form of [B, T, H, W] by blocks of queries."""
    batch, _, heads, width = shape
    return Tokens(batch, self.cut.padded_queries, heads, width, self.cut.query_heads,
                  self.cut.block_q, lambda i, j: i)

  def key_tokens(self, shape) -> Tokens:
    """The form of [B, S, K, W] by blocks of keys."""
    batch, _, heads, width = shape
    return Tokens(batch, self.cut.padded_keys, heads, width, self.cut.heads, self.cut.block_kv,
                  lambda i, j: j)

  def tokens(self, form: Tokens, packed) -> Callable:
    """What `form.pack` returned -> reader (refs, head of the block, part) of [tokens, W]."""
    ref = self.array(packed, form.block_shape, form.index)
    return lambda refs, head, part: ref(refs)[form.at(head, part)]

  def step(self, scalars, batch, heads, n):
    """(query block, key block, kinds, flags) of step n."""
    row, column, kinds, flags = self.entry(scalars, self.lines.of(batch, heads), n)
    query_block, key_block = (column, row) if self.by_keys else (row, column)
    return query_block + self.first_query_block, key_block, kinds, flags

  def entry(self, scalars, line, n):
    """Step n of a line of the schedule."""
    return tuple(ref[line, n] for ref in scalars[:4])

  def block_spec(self, block, index) -> pl.BlockSpec:
    """The block index(b, h, i, j) at query block i and key block j."""
    def index_map(b, h, n, *scalars):
      i, j, _, _ = self.step(scalars, b, h, n)
      return index(b, h, i, j)
    return pl.BlockSpec(block, index_map)

  def scalar(self, x) -> Callable:
    """A small int32 or float32 array for scalar memory; the reader gives its reference."""
    self.scalars.append(x)
    number = len(self.scalars) - 1
    return lambda refs: refs.scalars[number]

  def array(self, x, block, index) -> Callable:
    """An array cut into blocks; see `block_spec`."""
    self.arrays.append(x)
    self.specs.append(self.block_spec(block, index))
    number = len(self.arrays) - 1
    return lambda refs: refs.arrays[number]

  def per_pair(self, x) -> Callable:
    """[B or 1, H or 1, T or 1, S or 1] -> reader of a tile [keys or 1, queries or 1]."""
    cut = self.cut
    x = x.transpose(0, 1, 3, 2)
    x = pad(x, 2, cut.padded_keys if x.shape[2] > 1 else 1)
    x = pad(x, 3, cut.padded_queries if x.shape[3] > 1 else 1)
    rows, heads, keys, queries = x.shape
    block = (1, cut.query_heads if heads > 1 else 1, cut.block_kv if keys > 1 else 1,
             cut.block_q if queries > 1 else 1)
    ref = self.array(x, block, lambda b, h, i, j: (
        b if rows > 1 else 0, h if heads > 1 else 0, j if keys > 1 else 0, i if queries > 1 else 0))
    def read(refs, at: Where):
      return ref(refs)[0, at.head if heads > 1 else 0,
                       at.keys.slice if keys > 1 else slice(0, 1),
                       at.queries.slice if queries > 1 else slice(0, 1)]
    return read

  def per_query(self, x) -> Callable:
    """int32 [B or 1, T] -> reader of [1, queries]."""
    cut = self.cut
    x = pad(x[:, None], 2, cut.padded_queries)
    ref = self.array(x, (1, 1, cut.block_q),
                     lambda b, h, i, j: (b if x.shape[0] > 1 else 0, 0, i))
    return lambda refs, at: ref(refs)[0, :, at.queries.slice]

  def per_key(self, x) -> Callable:
    """int32 [B or 1, S] -> reader of [keys, 1]."""
    cut = self.cut
    x = pad(x[:, :, None], 1, cut.padded_keys)
    ref = self.array(x, (1, cut.block_kv, 1),
                     lambda b, h, i, j: (b if x.shape[0] > 1 else 0, j, 0))
    return lambda refs, at: ref(refs)[0, at.keys.slice]

  def per_row(self, x) -> Callable:
    """int32 [B or 1] -> reader of a number."""
    ref = self.scalar(x)
    return lambda refs, at: ref(refs)[at.batch if x.shape[0] > 1 else 0]


def pad(x, axis: int, length: int):
  """Zeros at the end of an axis up to `length`."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, length - x.shape[axis])
  return jnp.pad(x, widths) if length > x.shape[axis] else x


class Mask(NamedTuple):
  """The readers of a mask; `visible` evaluates it on one tile."""

  structure: Any
  readers: tuple[Callable, ...]
  batch_index: Callable | None
  head_offset: Callable | None
  cut: Cut

  def coordinates(self, refs: Refs, at: Where):
    """(mask with its arrays cut to the tile, coordinates), all of the tile's shape."""
    cut, shape = self.cut, at.shape
    spread = lambda x: jnp.broadcast_to(x, shape) if getattr(x, "ndim", 0) else x
    leaves = [read(refs, at) for read in self.readers]
    leaves = [spread(x.astype(jnp.int32) != 0) if role == algebra.DENSE else spread(x)
              for x, role in zip(leaves, algebra.structure_roles(self.structure))]
    key = lax.broadcasted_iota(jnp.int32, shape, 0) + (
        at.key_block * cut.block_kv + at.keys.start)
    query = lax.broadcasted_iota(jnp.int32, shape, 1) + (
        at.query_block * cut.block_q + at.queries.start)
    batch = at.batch if self.batch_index is None else self.batch_index(refs, at)
    head = at.heads * cut.query_heads + at.head
    head = head if self.head_offset is None else head + self.head_offset(refs, at)
    return (jax.tree.unflatten(self.structure, leaves),
            algebra.Coordinates(batch, head, query, key, query, key))

  def visible(self, refs: Refs, at: Where):
    """bool [keys, queries]."""
    mask, where = self.coordinates(refs, at)
    seen = jnp.broadcast_to(mask.visible(where), at.shape)
    if self.cut.keys % self.cut.tile_kv:
      seen = seen & (where.key_index < self.cut.keys)
    return seen


def mask_of(feed: Feed, operands: Operands, structure) -> Mask:
  """Feeds the arrays of a mask."""
  feeders = {algebra.QUERY: feed.per_query, algebra.KEY: feed.per_key, algebra.BATCH: feed.per_row,
             algebra.DENSE: lambda x: feed.per_pair(x.astype(jnp.int8))}
  mask = operands.mask
  readers = tuple(feeders[role](x) for x, role in zip(
      mask.arrays, algebra.structure_roles(structure)))
  optional = lambda x: None if x is None else feed.per_row(x)
  return Mask(structure, readers, optional(mask.batch_index), optional(mask.head_offset),
              feed.cut)


class Dropout(NamedTuple):
  """Which weights of a tile are kept."""

  words: Callable | None  # None: all
  rows: int
  probability: float
  mask: Mask

  def drop(self, refs: Refs, at: Where, *weights):
    """Zeros where weights are dropped."""
    if self.words is None:
      return weights
    words = self.words(refs)
    b = at.batch if self.rows > 1 else 0
    words = [words[b, i].astype(jnp.uint32) for i in range(2)]
    mask, where = self.mask.coordinates(refs, at)
    keep = dropout.keep_mask(words, algebra.move_to_positions(mask, where), self.probability)
    return tuple(jnp.where(keep, x, 0) for x in weights)

  @property
  def scale(self) -> float:
    """`dropout.kept_scale`; multiplied once, on what the weights are summed to."""
    return dropout.kept_scale(self.probability)


def dropout_of(feed: Feed, operands: Operands, spec: AttentionSpec, mask: Mask) -> Dropout:
  if not spec.dropout_prob:
    return Dropout(None, 1, 0.0, mask)
  words = operands.dropout_key
  return Dropout(feed.scalar(lax.bitcast_convert_type(words, jnp.int32)), words.shape[0],
                 spec.dropout_prob, mask)


def call(kernel, feed: Feed, grid, outputs, scratch, *, vmem_bytes: int | None, name: str,
         cargo: Cargo | None = None):
  """Runs kernel(refs, outputs, scratch) over a grid (batch, heads by those of a step, steps).

  Args:
    outputs: [(shape, dtype, block, index(b, h, i, j))].
    scratch: shapes of float32 arrays in vector memory.
    cargo: what it sends meanwhile.

  Returns:
    (the outputs, what came instead of the cargo).
  """
  route = ring.Alone(grid) if cargo is None else ring.Route(grid, cargo)
  sent, came = route.inputs, route.results
  ends = np.cumsum([len(x) for x in (
      feed.scalars, feed.arrays, sent, outputs, came, scratch)])

  def body(*refs):
    scalars, arrays, sources, results, targets, sums, semaphores = (
        refs[start:end] for start, end in zip((0, *ends), (*ends, None)))
    route.run(lambda place: kernel(Refs(scalars, arrays, place), results, sums),
              sources, targets, semaphores)

  out_specs = [feed.block_spec(block, index) for _, _, block, index in outputs]
  found = launch.in_32_bits(pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(feed.scalars), grid=route.cut,
          in_specs=[*map(route.block_spec, feed.specs), *[ring.MEMORY] * len(sent)],
          out_specs=[*map(route.block_spec, out_specs), *[ring.MEMORY] * len(came)],
          scratch_shapes=[*(pltpu.VMEM(shape, jnp.float32) for shape in scratch),
                          *route.semaphores]),
      # Not ShapeDtypeStruct, which inside shard_map must say over which axes of the mesh it varies.
      out_shape=[*(jax.core.ShapedArray(shape, dtype) for shape, dtype, _, _ in outputs), *came],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=route.semantics, vmem_limit_bytes=vmem_bytes,
          collective_id=route.channel),
      name=name,
  ))(*feed.scalars, *map(_in_hbm, feed.arrays), *sent)
  return found[:len(outputs)], route.unpack(found[len(outputs):])


def _in_hbm(x):
  """What XLA leaves in vector memory, a kernel copies block by block through registers."""
  return pltpu.with_memory_space_constraint(x, pltpu.HBM)
