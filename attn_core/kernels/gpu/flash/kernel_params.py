"""What all GPU kernels share: how they compute, where a block of threads works, rings of stages.

Letters: H query heads.
"""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash.tile_inputs import Extras, Feed
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.gpu.flash.block_list import Visits, visits_of
from attn_core.kernels.xla import tile_ops as steps
from attn_core.masks import block_map as blocks
from attn_core.types import AttentionSpec, Operands


class Setting(NamedTuple):
  """What all parts of a kernel share."""

  cut: Any  # of `tuned`
  logits: Logits
  heads: int  # H
  group: int  # query heads of a key head
  any_full: bool  # whether there may be blocks without a mask
  any_partial: bool  # and with one
  interpret: bool

  @property
  def feed(self) -> Feed:
    return self.logits.feed

  @property
  def drops(self) -> bool:
    return self.feed.spec.dropout_prob > 0


class Place(NamedTuple):
  """Where a block of threads works; int32."""

  batch: Any
  head: Any  # query head, or key head where it sums over queries
  block: Any  # of queries, or of keys where it sums over queries


def setting_of(operands: Operands, spec: AttentionSpec, cut,
               by_keys: bool = False) -> tuple[Setting, Visits, Extras]:
  """How a kernel computes, which blocks it visits and what it reads beside.

  by_keys: whether it sums over queries; its tiles are [keys, queries] then.
  """
  kinds = blocks.block_kinds(steps.mask_of(operands, spec), cut.sizes)
  block_map = blocks.block_map(kinds.swapaxes(-1, -2) if by_keys else kinds)
  heads = operands.query.shape[2]
  group = heads // operands.key.shape[2]
  feed = Feed(spec, cut.sizes, transposed=by_keys, group=group)
  setting = Setting(cut, Logits(feed, operands.bias is not None), heads, group,
                    block_map.any_full, block_map.any_partial, mosaic.interpreted())
  return setting, visits_of(block_map), feed.pack(operands)


def place_of(block, heads: int, number: int) -> Place:
  """Of the block of threads with that number: blocks of one head are neighbours.

  Args:
    block: int32.
    heads: of a batch row.
    number: of the blocks of a head.
  """
  heads, number = mosaic.int32(heads), mosaic.int32(number)
  line = lax.div(block, number)
  return Place(lax.div(line, heads), lax.rem(line, heads), lax.rem(block, number))


def last_first(place: Place, number: int) -> Place:
  """The same with blocks in reverse: those with most to do begin, as far as a mask is causal."""
  return place._replace(block=mosaic.int32(number - 1) - place.block)


def drain(free, stages: int, filled):
  """Waits until all that was copied into a ring is free.

  Args:
    free: barriers of the ring's stages.
    stages: how many.
    filled: how many times one was filled, int32.
  """
  def wait(n, _):
    plgpu.barrier_wait(free.at[lax.rem(n, mosaic.int32(stages))])
    return ()
  lax.fori_loop(jnp.maximum(filled - stages, 0), filled, wait, ())
