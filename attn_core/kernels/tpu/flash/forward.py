"""The forward on TPUs: a softmax without the maximum, and one with it for rows that need it.

  scores = K Q^T;  out^T = V^T P

Without the maximum (naive), no score has to wait, neither for the others of its row nor in memory
until the maximum is known, and nothing summed so far has to be scaled. That is exact while sums of
exp(logit) stay in the range of float32; the few rows that do not are computed again with the
maximum (safe).

Milakov and Gimelshein, Online normalizer calculation for softmax, section 2,
https://arxiv.org/abs/1805.02867.

Letters: B batch, T query length, H query heads, D query and key width, E value width; C keys and
Q queries of a tile.
"""

import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Cargo, Residuals
from attn_core.kernels.tpu.flash import tile_inputs as feeds
from attn_core.kernels.tpu.flash import schedule, tiling as tuned
from attn_core.kernels.tpu.flash.tile_inputs import Part, Refs, Where
from attn_core.kernels.tpu.flash.tile_loop import Setting, ahead, setting_of, visit
from attn_core.kernels.xla import tile_ops as steps
from attn_core.types import AttentionSpec, BlockSizes, Operands

# Sums of exp(logit) from which a naive softmax is as good as a safe one: below them, weights that
# count may be less than the smallest float32, 2 ** -126; above, products with values be infinite.
NAIVE_TOTALS = (2.0**-32, 2.0**96)
TRACE = 2.0**-120  # at least this much is in the total of a row that sees anything


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  return carrying(operands, spec, block_sizes, None)[0]


def carrying(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             cargo: Cargo | None) -> tuple[Residuals, tuple]:
  """`forward`, and what came instead of a cargo meanwhile; see `kernel.Carrying`.

  Naive, and then safe for rows of which the sum leaves NAIVE_TOTALS or that meet something not
  finite, if there are any.
  """
  def safe(cargo=None):
    finite = steps.finite_keys(operands.key, operands.value)
    key, value = steps.shield(operands.key, operands.value, finite)
    return _forward(operands._replace(key=key, value=value), spec, block_sizes, cargo, safe=True)

  if operands.query.dtype.name not in tuned.NAIVE:
    return safe(cargo)
  found, arrived = _forward(operands, spec, block_sizes, cargo, safe=False)
  return _mended(found, lambda: safe()[0]), arrived


def _mended(naive: Residuals, safe) -> Residuals:
  """`naive`, but from safe() the rows of which the lse is NaN."""
  failed = jnp.isnan(naive.lse)
  def mend():
    out, lse = safe()
    rows = failed.transpose(0, 2, 1)[..., None]
    return Residuals(jnp.where(rows, out, naive.out), jnp.where(failed, lse, naive.lse))
  return lax.cond(failed.any(), mend, lambda: naive)


def _forward(operands, spec, block_sizes, cargo, *, safe: bool) -> tuple[Residuals, tuple]:
  """See `carrying`; the lse of what a naive softmax does not give is NaN."""
  batch, queries, heads, width = operands.query.shape
  key_heads, value_width = operands.value.shape[2:]
  mask = steps.mask_of(operands, spec)
  seldom = safe and operands.query.dtype.name in tuned.NAIVE
  way = _Way(safe, beside=seldom)
  cut = tuned.choose(operands, block_sizes, mask, backward=False, seldom=seldom)
  visits, lines = schedule.build(mask, cut, by_keys=False)
  feed = feeds.Feed(visits, lines, cut, by_keys=False)
  arrays = operands.query, operands.key, operands.value
  forms = (feed.query_tokens(arrays[0].shape), *(feed.key_tokens(x.shape) for x in arrays[1:]))
  readers = _ForwardReaders(
      *(feed.tokens(form, form.pack(x)) for form, x in zip(forms, arrays)), _sinks(feed, operands))
  result = feed.query_tokens((batch, queries, heads, value_width))
  setting = setting_of(feed, operands, spec, cut, visits)
  rows = cut.query_heads * cut.block_q
  (out, lse), arrived = feeds.call(
      functools.partial(_forward_kernel, setting, feed, readers, result, way), feed,
      (batch, key_heads // cut.heads, feed.steps),
      [(result.shape, steps.out_dtype(operands, spec), result.block_shape, result.index),
       ((batch, heads, 1, cut.padded_queries), jnp.float32,
        (1, cut.query_heads, 1, cut.block_q), lambda b, h, i, j: (b, h, 0, i))],
      [(1, rows), (1, rows), (value_width, rows)],
      vmem_bytes=tuned.vmem_limit(block_sizes, cut, operands, backward=False),
      name="attn_core_forward" if safe else "attn_core_forward_naive", cargo=cargo)
  return Residuals(result.unpack(out)[:, :queries], lse[:, :, 0, :queries]), arrived


class _Way(NamedTuple):
  """How the softmax is computed."""

  safe: bool  # with the maximum; else that is 0
  beside: bool  # what is computed so stands beside rows that are not


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


def _forward_kernel(setting, feed, readers, result, way, refs: Refs, outputs, scratch):
  b, h, n = refs.place
  i, j, kinds, flags = feed.step(refs.scalars, b, h, n)
  step = _ForwardStep(setting, readers, result, refs, (b, h), way, outputs, scratch)
  every = Part(0, setting.cut.block_q)
  heads = range(setting.cut.query_heads)

  def spoil():
    spoilt = step.spoilt()
    for head in heads:
      step.spoil(head, spoilt)

  if setting.single:
    # Head by head, so that one is finished while another is computed; nothing waits in scratch.
    places = sorted(setting.strips((b, h, i, j), setting.patterns[0][0]),
                    key=lambda place: place[0].head)
    spoilt = step.spoilt()
    def finish(head, numbers):
      step.store(setting.row_tiles(head, every), numbers)
      step.spoil(head, spoilt)
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

  visit(setting, (b, h, i, j), kinds, strips, spoil)

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
  way: _Way
  outputs: Any  # references of output and lse
  scratch: Any  # references of maximum [1, rows], total [1, rows] and output [E, rows]

  def load(self, rows):
    """(maximum, total)."""
    highest, total, _ = self.scratch
    return highest[:, rows], total[:, rows]

  def begin(self, rows):
    """(maximum, total) of rows that have seen nothing."""
    output = self.scratch[2]
    output[:, rows] = jnp.zeros((output.shape[0], rows.size), jnp.float32)
    zeros = jnp.zeros((1, rows.size), jnp.float32)
    return jnp.full_like(zeros, -jnp.inf) if self.way.safe else zeros, zeros

  def store(self, tiles, numbers):
    """Writes `numbers`, and those of tiles without them as of rows that have seen nothing."""
    highest, total, _ = self.scratch
    for tile, rows in tiles.items():
      highest[:, rows], total[:, rows] = numbers.get(tile) or self.begin(rows)

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
    for at, masked, scores in ahead(places, self.scores, tuned.AHEAD[False]):
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
    output, rows = self.scratch[2], self.setting.rows(at)
    before = None if numbers is None else softmax.Running(*numbers, output[:, rows])
    logits, _ = self.setting.logits(self.refs, at, scores)
    fold = self.update_safe if self.way.safe else self.update_naive
    after = fold(at, masked, logits, before)
    output[:, rows] = after.output
    return after.highest, after.total

  def update_safe(self, at: Where, masked, logits, before) -> softmax.Running:
    """Beside a naive form, relative to a whole power of two: so weights round as there."""
    unit = self.setting.unit
    whole = lambda highest: jnp.ceil(highest * unit) * (1 / unit)
    logits = self.setting.hide(self.refs, at, masked, logits, -jnp.inf)
    return softmax.update(
        before, logits, functools.partial(self.weigh, at), exp=lambda x: jnp.exp2(x * unit),
        above=whole if self.way.beside else lambda highest: highest, axis=0)

  def update_naive(self, at: Where, masked, logits, before) -> softmax.Running:
    """A row that sees anything has at least TRACE in its total."""
    weights = jnp.exp2(logits * self.setting.unit)
    if masked:
      weights = self.setting.hide(self.refs, at, masked, weights + TRACE, 0.0)
    after = softmax.add(before, weights, functools.partial(self.weigh, at), axis=0)
    return after if masked else after._replace(total=after.total + TRACE)

  def weigh(self, at: Where, weights):
    """[C, Q] -> [E, Q]: the sum of values."""
    kept, = self.setting.dropout.drop(self.refs, at, weights)
    values = self.readers.value(self.refs, self.setting.key_head(at), at.keys)
    return self.setting.dot(values, kept.astype(values.dtype), ((0,), (0,)))

  def spoilt(self) -> list:
    """[1, 1] of each key head: 0, or NaN where a key is not finite, as its weight may be 0."""
    if self.way.safe:
      return []
    cut, every = self.setting.cut, Part(0, self.setting.cut.block_kv)
    totals = [self.readers.key(self.refs, head, every).astype(jnp.float32).sum(0, keepdims=True)
              .sum(1, keepdims=True) for head in range(cut.heads)]
    return [total - total for total in totals]

  def spoil(self, head: int, spoilt: list) -> None:
    """Adds what `spoilt` gave to the totals of a head."""
    if not self.way.safe:
      cut, total = self.setting.cut, self.scratch[1]
      total[:, self.setting.rows_of(head)] += spoilt[head // cut.group]

  def finish(self, head: int):
    """Writes the results of a head."""
    (b, h), (out, lse), cut = self.place, self.outputs, self.setting.cut
    rows, sink = self.setting.rows_of(head), None
    if self.readers.sinks is not None:
      sink = self.readers.sinks(self.refs, b, h * cut.query_heads + head)
    (highest, total), output = self.load(rows), self.scratch[2][:, rows]
    running = softmax.Running(highest * (self.setting.unit / softmax.LOG2E), total, output)
    mean, row_lse = softmax.finish(running, sink)
    if not self.way.safe:
      least, most = NAIVE_TOTALS
      total = total + (output - output).sum(0, keepdims=True)  # NaN where an output is not finite
      row_lse = jnp.where((total == 0) | ((total >= least) & (total <= most)), row_lse, jnp.nan)
    lse[0, head] = row_lse
    where = self.result.at(head, Part(0, cut.block_q))
    out[where] = (mean * self.setting.dropout.scale).T.astype(out.dtype)
