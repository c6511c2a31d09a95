"""Block-wise attention as Pallas TPU kernels: forward and backward in linear memory.

Scores are computed transposed, keys along the sublanes and queries along the
lanes: reductions over keys then need no movement across lanes, the numbers of a
row (maximum, sum, lse) are dense vectors, and the product with the values fills
the whole width of the matrix unit with queries, whatever the head dimension.

  scores = K Q^T;  out^T = V^T P;  d_value = P d_out;  d_key = dS Q;  d_query^T = K^T dS

The grid visits only blocks with something to see (`schedule`). Of a block, only
tiles that are partly visible evaluate the mask; for the commonest patterns of
tiles there is code without branches, in which the scores of the next strips are
issued before the softmax of the current one, so that the matrix unit works meanwhile.
The backward is one kernel: the cotangent of the queries stays in vector memory,
which saves the two products that a second kernel would have to repeat.

Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning,
https://arxiv.org/abs/2307.08691.

Letters: B batch, T query length, S key length, H query heads, K key heads, G = H / K,
D query and key width, E value width; C keys and Q queries of a tile.
"""

import collections
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from attn_core.kernels import softmax
from attn_core.kernels.kernel import Kernel, Residuals
from attn_core.kernels.tpu import feed as feeds
from attn_core.kernels.tpu import schedule, tuned
from attn_core.kernels.tpu.feed import Part, Refs, Where
from attn_core.kernels.xla import blockwise, steps
from attn_core.masks import algebra, blocks
from attn_core.types import AttentionSpec, BlockSizes, Operands

LOG2E = math.log2(math.e)


class Setting(NamedTuple):
  """What all parts of a kernel share."""

  spec: AttentionSpec
  cut: schedule.Cut
  mask: feeds.Mask
  dropout: feeds.Dropout
  patterns: tuple[tuple[int, ...], bool]  # see `schedule.Schedule.patterns`
  single: bool  # see `schedule.Schedule.single`
  bias: Any  # reader of a tile, or None
  precision: Any

  @property
  def plain(self) -> bool:
    """Whether logits are scores times a positive number."""
    return (self.spec.logits_soft_cap is None and self.bias is None
            and self.spec.softmax_scale > 0)

  @property
  def unit(self) -> float:
    """exp(logit) = 2 ** (unit * what `logits` returns)."""
    return LOG2E * (self.spec.softmax_scale if self.plain else 1.0)

  def tiles(self, place):
    """(bits to shift the kinds by, where) of every tile of a block, of all heads in turns."""
    cut = self.cut
    return [(2 * (c * cut.tiles_q + t), Where(*place, head, Part(t * cut.tile_q, cut.tile_q),
                                              Part(c * cut.tile_kv, cut.tile_kv)))
            for c in range(cut.tiles_kv) for head in range(cut.query_heads)
            for t in range(cut.tiles_q)]

  def strips(self, place, pattern: int):
    """[(where, masked)]: neighbouring tiles of one kind, along the queries, are one strip."""
    found = []
    for shift, at in self.tiles(place):
      kind = (pattern >> shift) & 3
      before, masked = found[-1] if found else (None, None)
      if (before and kind == (blocks.PARTIAL if masked else blocks.FULL)
          and before.head == at.head and before.keys == at.keys
          and before.queries.start + before.queries.length == at.queries.start):
        joined = Part(before.queries.start, before.queries.length + at.queries.length)
        found[-1] = before._replace(queries=joined), masked
      elif kind != blocks.EMPTY:
        found.append((at, kind == blocks.PARTIAL))
    return found

  def rows(self, at: Where):
    """The queries of `at` among those of all heads of the step."""
    return pl.ds(at.head * self.cut.block_q + at.queries.start, at.queries.length)

  def row_tiles(self, head: int, queries: Part):
    """{(query head, first query): its rows} of the tiles of some queries."""
    size = self.cut.tile_q
    return {(head, start): pl.ds(head * self.cut.block_q + start, size)
            for start in range(queries.start, queries.start + queries.length, size)}

  def key_head(self, at: Where) -> int:
    """Among those of the step."""
    return at.head // self.cut.group

  def dot(self, a, b, contract=((1,), (0,))):
    return lax.dot_general(a, b, (contract, ((), ())), precision=self.precision,
                           preferred_element_type=jnp.float32)

  def logits(self, refs: Refs, at: Where, scores, masked: bool):
    """(logits / unit, d logit / d scaled score or None) of scores [C, Q]; -inf where hidden."""
    logits, slope = scores, None
    if not self.plain:
      logits = logits * self.spec.softmax_scale
      cap = self.spec.logits_soft_cap
      if cap is not None:
        capped = jnp.tanh(logits * (1 / cap))
        logits, slope = capped * cap, 1 - capped * capped
      if self.bias is not None:
        logits = logits + self.bias(refs, at).astype(jnp.float32)
    if masked:
      logits = jnp.where(self.mask.visible(refs, at), logits, -jnp.inf)
    return logits, slope


def _mask(operands: Operands, spec: AttentionSpec) -> algebra.Mask:
  return jax.tree.unflatten(spec.mask, operands.mask.arrays)


def _setting(feed, operands: Operands, spec: AttentionSpec, cut, visits) -> Setting:
  mask = feeds.mask_of(feed, operands, spec.mask)
  bias = None if operands.bias is None else feed.per_pair(operands.bias)
  # Products of 16-bit numbers are exact whatever is asked; those of float32 are unless otherwise.
  precision = None
  if operands.query.dtype == jnp.float32:
    precision = lax.Precision.HIGHEST if spec.precision is None else spec.precision
  return Setting(spec, cut, mask, feeds.dropout_of(feed, operands, spec, mask),
                 visits.patterns(cut), visits.single, bias, precision)


def _visit(setting: Setting, place, kinds, strips):
  """Runs strips([(where, masked)]) over what a block shows: a pattern at once, else by tiles."""
  patterns, complete = setting.patterns
  known = [kinds == np.uint32(pattern).view(np.int32) for pattern in patterns]
  for is_pattern, pattern in zip(known, patterns):
    @pl.when(is_pattern)
    def _(pattern=pattern):
      strips(setting.strips(place, pattern))

  if complete:
    return

  @pl.when(jnp.logical_not(functools.reduce(jnp.logical_or, known)))
  def _():
    cut = setting.cut
    for shift, first in setting.tiles(place)[:cut.query_heads * cut.tiles_q]:
      @pl.loop(0, cut.tiles_kv)
      def _(c, shift=shift, first=first):
        kind = (kinds >> (shift + 2 * cut.tiles_q * c)) & 3
        start = pl.multiple_of(c * cut.tile_kv, cut.tile_kv)
        at = first._replace(keys=Part(start, cut.tile_kv))
        for value, masked in ((blocks.FULL, False), (blocks.PARTIAL, True)):
          @pl.when(kind == value)
          def _(masked=masked):
            strips([(at, masked)])


def _ahead(strips, products, number: int):
  """(where, masked, products(where)) of all strips, those of the next ones issued before."""
  issued = collections.deque(products(at) for at, _ in strips[:number])
  for n, (at, masked) in enumerate(strips):
    if n + number < len(strips):
      issued.append(products(strips[n + number][0]))
    yield at, masked, issued.popleft()


# --- Forward. ------------------------------------------------------------------------------------


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  batch, queries, heads, width = operands.query.shape
  key_heads, value_width = operands.value.shape[2:]
  mask = _mask(operands, spec)
  cut = tuned.choose(operands, block_sizes, mask, backward=False)
  visits, lines = schedule.build(mask, cut, by_keys=False)
  feed = feeds.Feed(visits, lines, cut, by_keys=False)
  keys, values = steps.shield(operands.key, operands.value,
                              steps.finite_keys(operands.key, operands.value))
  forms = (feed.query_tokens(operands.query.shape), feed.key_tokens(keys.shape),
           feed.key_tokens(values.shape))
  readers = _ForwardReaders(
      *(feed.tokens(form, form.pack(x)) for form, x in zip(forms, (operands.query, keys, values))),
      _sinks(feed, operands))
  result = feed.query_tokens((batch, queries, heads, value_width))
  setting = _setting(feed, operands, spec, cut, visits)
  rows = cut.query_heads * cut.block_q
  out, lse = feeds.call(
      functools.partial(_forward_kernel, setting, feed, readers, result), feed,
      (batch, key_heads // cut.heads, visits.rows.shape[1]),
      [(result.shape, operands.query.dtype, result.block_shape, result.index),
       ((batch, heads, 1, cut.padded_queries), jnp.float32,
        (1, cut.query_heads, 1, cut.block_q), lambda b, h, i, j: (b, h, 0, i))],
      [(1, rows), (1, rows), (value_width, rows)],
      vmem_bytes=tuned.vmem_limit(block_sizes, cut, operands, backward=False),
      name="attn_core_forward")
  return Residuals(result.unpack(out)[:, :queries], lse[:, :, 0, :queries])


class _ForwardReaders(NamedTuple):
  """Readers of the forward's blocks; see `feed.Feed.tokens`."""

  query: Any  # [queries, D]
  key: Any  # [keys, D]
  value: Any  # [keys, E]
  sinks: Any  # (refs, batch row, query head) -> number; None: none


def _sinks(feed, operands):
  """Reader of a sink per query head, float32 in scalar memory; None: none."""
  if operands.sinks is None:
    return None
  rows = operands.sinks.shape[0]
  ref = feed.scalar(operands.sinks.astype(jnp.float32))
  return lambda refs, b, head: ref(refs)[b if rows > 1 else 0, head]


def _forward_kernel(setting: Setting, feed, readers, result, refs: Refs, outputs, scratch):
  b, h, n = (pl.program_id(axis) for axis in range(3))
  i, j, kinds, flags = feed.step(refs.scalars, b, h, n)
  step = _ForwardStep(setting, readers, result, refs, (b, h), outputs, *scratch)
  every = Part(0, setting.cut.block_q)
  heads = range(setting.cut.query_heads)

  if setting.single:
    # Head by head, so that one is finished while another is computed; nothing waits in scratch.
    places = sorted(setting.strips((b, h, i, j), setting.patterns[0][0]),
                    key=lambda place: place[0].head)
    def finish(head, numbers):
      step.store(setting.row_tiles(head, every), numbers)
      step.finish(head)
    step.strips(places, {}, finish)
    return

  @pl.when((flags & schedule.FIRST) != 0)
  def _():
    for head in heads:
      step.store(setting.row_tiles(head, every), {})

  def strips(places):
    tiles = {}
    for at, _ in places:
      tiles.update(setting.row_tiles(at.head, at.queries))
    step.store(tiles, step.strips(places, {tile: step.load(rows) for tile, rows in tiles.items()}))

  _visit(setting, (b, h, i, j), kinds, strips)

  @pl.when((flags & schedule.LAST) != 0)
  def _():
    for head in heads:
      step.finish(head)


class _ForwardStep(NamedTuple):
  """One block of queries and one of keys; `softmax.Running` of its rows."""

  setting: Setting
  readers: _ForwardReaders
  result: feeds.Tokens
  refs: Refs
  place: Any  # (batch row, number of the step's heads)
  outputs: Any  # references of output and lse
  highest: Any  # reference of [1, rows]
  total: Any  # reference of [1, rows]
  output: Any  # reference of [E, rows]

  def load(self, rows):
    """(maximum, total)."""
    return self.highest[:, rows], self.total[:, rows]

  def begin(self, rows):
    """(maximum, total) of rows that have seen nothing."""
    self.output[:, rows] = jnp.zeros((self.output.shape[0], rows.size), jnp.float32)
    return jnp.full((1, rows.size), -jnp.inf, jnp.float32), jnp.zeros((1, rows.size), jnp.float32)

  def store(self, tiles, numbers):
    """Writes `numbers`, and those of tiles without them as of rows that have seen nothing."""
    for tile, rows in tiles.items():
      self.highest[:, rows], self.total[:, rows] = numbers.get(tile) or self.begin(rows)

  def strips(self, places, numbers, ended=lambda head, numbers: None):
    """Folds in strips.

    Args:
      places: [(where, masked)].
      numbers: {tile of queries: (maximum, total)}; tiles without any have seen nothing. They go
        from strip to strip as values: through memory they would be late.
      ended: called with a head and the numbers after its last strip.

    Returns:
      The new numbers.
    """
    last = {at.head: at for at, _ in places}
    for at, masked, scores in _ahead(places, self.scores, tuned.AHEAD[False]):
      tiles = self.setting.row_tiles(at.head, at.queries)
      before = None
      if any(tile in numbers for tile in tiles):
        parts = zip(*(numbers.get(tile) or self.begin(rows) for tile, rows in tiles.items()))
        before = tuple(jnp.concatenate(x, 1) for x in parts)
      after = self.update(at, masked, scores, before)
      numbers.update(zip(tiles, zip(*(jnp.split(x, len(tiles), 1) for x in after))))
      if at is last[at.head]:
        ended(at.head, numbers)
    return numbers

  def scores(self, at: Where):
    """[C, Q]."""
    return self.setting.dot(self.readers.key(self.refs, self.setting.key_head(at), at.keys),
                            self.readers.query(self.refs, at.head, at.queries), ((1,), (1,)))

  def update(self, at: Where, masked, scores, numbers):
    """Folds in one strip; (maximum, total) before and after, None: nothing was seen before."""
    def weigh(weights):
      kept, = self.setting.dropout.drop(self.refs, at, weights)
      values = self.readers.value(self.refs, self.setting.key_head(at), at.keys)
      return self.setting.dot(values, kept.astype(values.dtype), ((0,), (0,)))

    logits, _ = self.setting.logits(self.refs, at, scores, masked)
    rows = self.setting.rows(at)
    before = None if numbers is None else softmax.Running(*numbers, self.output[:, rows])
    after = softmax.update(before, logits, weigh, axis=0,
                           exp=lambda x: jnp.exp2(x * self.setting.unit))
    self.output[:, rows] = after.output
    return after.highest, after.total

  def finish(self, head: int):
    """Writes the results of a head."""
    (b, h), (out, lse), cut = self.place, self.outputs, self.setting.cut
    rows = pl.ds(head * cut.block_q, cut.block_q)
    sink = None
    if self.readers.sinks is not None:
      sink = self.readers.sinks(self.refs, b, h * cut.query_heads + head)
    highest, total = self.load(rows)
    mean, lse[0, head] = softmax.finish(softmax.Running(
        highest * (self.setting.unit / LOG2E), total, self.output[:, rows]), sink)
    where = self.result.at(head, Part(0, cut.block_q))
    out[where] = (mean * self.setting.dropout.scale).T.astype(out.dtype)


# --- Backward. -----------------------------------------------------------------------------------


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: Residuals, cotangents: Residuals, wrt: tuple[str, ...]) -> tuple:
  """The cotangents of the operands named in `wrt`; see `kernels.xla.blockwise.backward`.

  The bias's cotangent has its own number for every pair and comes from the XLA kernel.
  """
  correction = steps.correction_of(residuals, cotangents, jnp.float32)
  found = {}
  if {"query", "key", "value"} & set(wrt):
    found = _backward(operands, spec, block_sizes, cotangents.out, residuals.lse, correction)
  if "sinks" in wrt:
    found["sinks"] = blockwise.d_sinks(operands.sinks, residuals.lse, correction)
  if "bias" in wrt:
    found["bias"], = blockwise.backward(
        operands, spec, block_sizes, residuals, cotangents, ("bias",))
  return tuple(found[name] for name in wrt)


def _backward(operands: Operands, spec, block_sizes, d_out, lse, correction) -> dict:
  """Cotangents of query, key and value: as many queries at a time as vector memory holds."""
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  cut = tuned.choose(operands, block_sizes, _mask(operands, spec), backward=True)
  rows = lambda x, fill: jnp.pad(
      x[:, :, None], ((0, 0),) * 3 + ((0, cut.padded_queries - queries),), constant_values=fill)
  arrays = _BackwardArrays(
      steps.clean(operands.query), d_out, steps.clean(operands.key), steps.clean(operands.value),
      rows(steps.finite_lse(lse) * LOG2E, jnp.inf), rows(correction, 0))
  parts = [_backward_range(operands, spec, block_sizes, arrays, cut, blocks_q)
           for blocks_q in tuned.query_ranges(operands, cut)]
  d_queries, d_keys, d_values = zip(*parts)
  add = lambda parts, like: sum(parts[1:], parts[0])[:, :keys].astype(like.dtype)
  return {"query": jnp.concatenate(d_queries, 1)[:, :queries],
          "key": add(d_keys, operands.key), "value": add(d_values, operands.value)}


class _BackwardArrays(NamedTuple):
  """What the backward's kernels read, or the readers of its blocks.

  lse times log2(e), +inf where nothing was seen.
  """

  query: Any  # [B, T, H, D]; a reader gives [queries, D]
  d_out: Any  # [B, T, H, E]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  lse: Any  # [B, H, 1, padded T]; a reader gives a block [1, G, 1, queries]
  correction: Any  # the same


def _backward_range(operands, spec, block_sizes, arrays: _BackwardArrays, cut, query_blocks):
  """(d_query [B, T', H, D], d_key and d_value [B, padded S, K, W]) of a range of queries."""
  batch, _, heads, width = operands.query.shape
  key_heads = operands.key.shape[2]
  number = query_blocks[1] - query_blocks[0]
  mask = _mask(operands, spec)
  visits, lines = schedule.build(mask, cut, by_keys=True, query_blocks=query_blocks)
  feed = feeds.Feed(visits, lines, cut, by_keys=True, first_query_block=query_blocks[0])
  of_rows = lambda x: feed.array(
      x, (1, cut.query_heads, 1, cut.block_q), lambda b, h, i, j: (b, h, 0, i))
  forms = (*(feed.query_tokens(x.shape) for x in arrays[:2]),
           *(feed.key_tokens(x.shape) for x in arrays[2:4]))
  readers = _BackwardArrays(
      *(feed.tokens(form, form.pack(x)) for form, x in zip(forms, arrays)),
      of_rows(arrays.lse), of_rows(arrays.correction))
  setting = _setting(feed, operands, spec, cut, visits)
  # The cotangent of all queries of the range is one block: it stays until the last step.
  rows = number * cut.block_q
  results = (feeds.Tokens(batch, rows, heads, width, cut.query_heads, rows, lambda i, j: 0),
             feed.key_tokens(operands.key.shape), feed.key_tokens(operands.value.shape))
  summed = jnp.float32 if rows < cut.padded_queries else operands.query.dtype
  found = feeds.call(
      functools.partial(_backward_kernel, setting, feed, readers, results), feed,
      (batch, key_heads // cut.heads, visits.rows.shape[1]),
      [(form.shape, dtype, form.block_shape, form.index)
       for form, dtype in zip(results, (operands.query.dtype, summed, summed))],
      [(cut.query_heads * number, width, cut.block_q), (cut.heads, cut.block_kv, width),
       (cut.heads, cut.block_kv, operands.value.shape[3])],
      vmem_bytes=tuned.vmem_limit(block_sizes, cut, operands, backward=True),
      name="attn_core_backward")
  return tuple(form.unpack(x) for form, x in zip(results, found))


def _backward_kernel(setting: Setting, feed, readers, results, refs: Refs, outputs, scratch):
  b, h, n = (pl.program_id(axis) for axis in range(3))
  i, j, kinds, flags = feed.step(refs.scalars, b, h, n)
  lse, correction = (read(refs) for read in readers[4:])
  # The queries' cotangent is transposed, block by block of each head.
  d_query, d_key, d_value = scratch
  number = d_query.shape[0] // setting.cut.query_heads

  @pl.when(n == 0)
  def _():
    d_query[...] = jnp.zeros_like(d_query)

  @pl.when((flags & schedule.FIRST) != 0)
  def _():
    d_key[...] = jnp.zeros_like(d_key)
    d_value[...] = jnp.zeros_like(d_value)

  def products(at):
    """(scores, d_weights) [C, Q]."""
    pairs = (readers.key, readers.query), (readers.value, readers.d_out)
    key_head = setting.key_head(at)
    return tuple(setting.dot(keys(refs, key_head, at.keys), queries(refs, at.head, at.queries),
                             ((1,), (1,))) for keys, queries in pairs)

  def add(at, both, masked):
    scores, d_weights = both
    key_head, keys, queries = setting.key_head(at), at.keys.slice, at.queries.slice
    query, d_out = (read(refs, at.head, at.queries) for read in (readers.query, readers.d_out))
    logits, slope = setting.logits(refs, at, scores, masked)
    weights = jnp.exp2(logits * setting.unit - lse[0, at.head, :, queries])
    kept, d_weights = setting.dropout.drop(refs, at, weights, d_weights)
    d_logits = weights * (d_weights * setting.dropout.scale - correction[0, at.head, :, queries])
    d_logits = (d_logits if slope is None else d_logits * slope).astype(query.dtype)
    d_value[key_head, keys] += setting.dot(kept.astype(d_out.dtype), d_out)
    d_key[key_head, keys] += setting.dot(d_logits, query)
    d_query[at.head * number + at.query_block - feed.first_query_block, :, queries] += setting.dot(
        readers.key(refs, key_head, at.keys), d_logits, ((0,), (0,)))

  def strips(places):
    for at, masked, both in _ahead(places, products, tuned.AHEAD[True]):
      add(at, both, masked)

  _visit(setting, (b, h, i, j), kinds, strips)

  def write(which, head, part, x):
    ref = outputs[which]
    ref[results[which].at(head, part)] = x.astype(ref.dtype)

  @pl.when((flags & schedule.LAST) != 0)
  def _():
    every = Part(0, setting.cut.block_kv)
    for head in range(setting.cut.heads):
      write(1, head, every, d_key[head] * setting.spec.softmax_scale)
      write(2, head, every, d_value[head] * setting.dropout.scale)

  @pl.when(n == pl.num_programs(2) - 1)
  def _():
    size = setting.cut.block_q
    for head in range(setting.cut.query_heads):
      for block in range(number):
        write(0, head, Part(block * size, size),
              d_query[head * number + block].T * setting.spec.softmax_scale)


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  mask = _mask(operands, spec)
  for backward in (False, True):
    cut = tuned.choose(operands, block_sizes, mask, backward=backward)
    tuned.vmem_limit(block_sizes, cut, operands, backward=backward)
    schedule.check(mask, cut, by_keys=backward)


def _effects():
  """Those of any TPU kernel: none, but for what interpret mode does on the host."""
  def copy(x, y):
    y[...] = x[...]
  shape = jax.core.ShapedArray((8, 128), jnp.float32)
  return jax.make_jaxpr(pl.pallas_call(copy, out_shape=shape))(shape).effects


KERNEL = Kernel("tpu", forward, backward, blockwise.tangent, blockwise.KERNEL, _check, _effects)
