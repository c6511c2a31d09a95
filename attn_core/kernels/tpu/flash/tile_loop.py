"""What the forward and the backward on TPUs share: the tiles of a block, and how they are visited.

Of a block, only tiles that are partly visible evaluate the mask; for the commonest patterns of
tiles there is code without branches, in which the products of the next strips are issued before
those of the current one are used, so that the matrix units work meanwhile.

Letters: C keys and Q queries of a tile.
"""

import collections
import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common.online_softmax import LOG2E
from attn_core.kernels.tpu.flash import tile_inputs as feeds
from attn_core.kernels.tpu.flash import schedule
from attn_core.kernels.tpu.flash.tile_inputs import Part, Refs, Where
from attn_core.masks import block_map as blocks
from attn_core.types import AttentionSpec, Operands


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
  def unit(self) -> float:
    """exp(logit) = 2 ** (unit * what `logits` returns): the scale, unless that must come first."""
    scale = self.spec.softmax_scale
    plain = self.spec.logits_soft_cap is None and self.bias is None and scale > 0
    return scale * LOG2E if plain else 1.0

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

  def rows_of(self, head: int):
    """All queries of a head, among those of all heads of the step."""
    return pl.ds(head * self.cut.block_q, self.cut.block_q)

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

  def logits(self, refs: Refs, at: Where, scores):
    """(logits / `unit`, d logit / d scaled score or None) of scores [C, Q], whatever the mask."""
    if self.unit != 1:
      return scores, None
    scale, cap, slope = self.spec.softmax_scale, self.spec.logits_soft_cap, None
    if cap is None:
      logits = scores * (scale * LOG2E)
    else:
      capped = jnp.tanh(scores * (scale / cap))
      logits, slope = capped * (cap * LOG2E), 1 - capped * capped
    if self.bias is not None:
      logits = logits + self.bias(refs, at).astype(jnp.float32) * LOG2E
    return logits, slope

  def hide(self, refs: Refs, at: Where, masked: bool, x, hidden):
    """`x`, but `hidden` where the mask says so; masked: whether it does anywhere."""
    return jnp.where(self.mask.visible(refs, at), x, hidden) if masked else x


def setting_of(feed, operands: Operands, spec: AttentionSpec, cut, visits) -> Setting:
  mask = feeds.mask_of(feed, operands, spec.mask)
  bias = None if operands.bias is None else feed.per_pair(operands.bias)
  # Products of 16-bit numbers are exact whatever is asked; those of float32 are unless otherwise.
  precision = None
  if operands.query.dtype == jnp.float32:
    precision = lax.Precision.HIGHEST if spec.precision is None else spec.precision
  return Setting(spec, cut, mask, feeds.dropout_of(feed, operands, spec, mask),
                 visits.patterns(cut), visits.single, bias, precision)


def visit(setting: Setting, place, kinds, strips, once=lambda: None):
  """Runs strips([(where, masked)]) over what a block shows: a pattern at once, else by tiles.

  And once(), among the instructions of a pattern, or before the tiles.
  """
  patterns, complete = setting.patterns
  known = [kinds == np.uint32(pattern).view(np.int32) for pattern in patterns]
  for is_pattern, pattern in zip(known, patterns):
    @pl.when(is_pattern)
    def _(pattern=pattern):
      once()
      strips(setting.strips(place, pattern))

  if complete:
    return

  @pl.when(jnp.logical_not(functools.reduce(jnp.logical_or, known)))
  def _():
    once()
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


def ahead(strips, products, number: int):
  """(where, masked, products(where)) of all strips, those of the next ones issued before."""
  issued = collections.deque(products(at) for at, _ in strips[:number])
  for n, (at, masked) in enumerate(strips):
    if n + number < len(strips):
      issued.append(products(strips[n + number][0]))
    yield at, masked, issued.popleft()
