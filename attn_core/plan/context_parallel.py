# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which way to spread a sequence: what each moves, computes and takes, by arithmetic alone.

  computed in hop h     c_h = pairs of the visited blocks * H / U * B * operations a pair / peak,
                        of the member that visits most in it
  sent in hop h         x_h = bytes through the busiest link / its bandwidth, see `traffic`
  ring                  t = sum over h of max(c_h, x_h) + x_home
  all-gather            t = x + c
  heads exchanged       t = x + what the exchanged heads take, U devices at a time

Operations a pair: 2 (D + E) forward and 2 (3 D + 2 E) backward. The peaks are the makers': times
are lower bounds, for comparison. Not in them: what a kernel loses, latencies, other traffic.

Letters: B batch rows and H query heads of a device, D and E widths, U devices that exchange heads.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
import numpy as np

from attn_core import checks
from attn_core.masks import mask as mask_lib, position_range
from attn_core.mechanisms.context_parallel import ring_step, ulysses as heads
from attn_core.config.metadata import OperationMetadata
from attn_core.plan import peaks, traffic, work
from attn_core.sharding import (context_parallel as sequences, placement as placement_lib,
                                token_order)
from attn_core.sharding.context_parallel import AnyMesh, Sequence
from attn_core.types import RING_VARIANTS, BlockSizes, RingConfig, RingVariant, TokenOrder

BLOCK = 512  # tokens
MASK_BYTES = 4  # of a number per query or key
# Beyond so many shards or tokens, hops are those that some members need, see `work.visits`.
MANY_SHARDS, MANY_TOKENS = 512, 2**20


class Shapes(NamedTuple):
  """The arrays of one attention, on all devices together."""

  batch: int  # B
  queries: int  # T, tokens
  keys: int  # S, tokens
  heads: int  # query heads
  key_heads: int
  width: int  # D
  value_width: int  # E
  dtype: str = "bfloat16"


class Way(NamedTuple):
  """One way to spread the sequence."""

  variant: RingVariant
  layout: TokenOrder
  members: int  # among whom keys travel
  group: int  # devices that exchange heads


class Prediction(NamedTuple):
  """One way to spread the sequence; what follows `impossible` is None where that says why."""

  variant: RingVariant
  layout: TokenOrder
  members: int  # among whom keys travel
  group: int  # devices that exchange heads
  impossible: str | None = None
  collectives: tuple[traffic.Collective, ...] | None = None  # a kind each
  # Through the busiest link in one direction, one operation after the other: of the hybrid those
  # between groups and those within, whose links may be different ones.
  link_bytes: float | None = None
  flops: float | None = None  # of the busiest device
  imbalance: float | None = None  # visited blocks: of the busiest device over the mean
  compute_seconds: float | None = None  # of the busiest device
  link_seconds: float | None = None
  seconds: float | None = None  # of all, with what overlaps


class ContextParallelPlan(NamedTuple):
  """Every variant in every layout, and the fastest of them."""

  predictions: tuple[Prediction, ...]
  recommended: Prediction  # there always is one: a contiguous ring is never impossible


def plan_context_parallel(
    shapes: Shapes, mask: mask_lib.Mask, mesh: AnyMesh, device_kind: str, *,
    sequence_axis_name: str = "sp", heads_axis_name: str | None = None, backward: bool = True,
    block_sizes: BlockSizes = BlockSizes()) -> ContextParallelPlan:
  """Predicts every variant of `ring` in every layout; see the formulas above and in `traffic`.

  Args:
    shapes: of the whole. Batch and heads go over the other axes of the mesh as in `attention`.
    mask: of the whole, in the natural order of the tokens.
    mesh: a Mesh or AbstractMesh; nothing runs on it.
    device_kind: a name in `devices.DEVICES`, or a `jax.Device.device_kind`.
    sequence_axis_name: the mesh axis of the sequence.
    heads_axis_name: a second one, which variant "hybrid" then exchanges heads over, and all others
      take together with the first as one. None: "hybrid" is the fastest split of the one axis, in
      groups of neighbours.
    backward: whether the backward is counted too.
    block_sizes: of the kernel, block_q and block_kv; None: 512 tokens.

  Returns:
    A prediction for every variant and layout, the impossible ones with the reason, and the fastest.

  Raises:
    ValueError: a mesh without the axes or with one device along them, an unknown device kind, sizes
      that are no attention or no blocks, or arrays of the mask that do not fit them.
  """
  device = peaks.find(device_kind)
  sizes = _sequence_sizes(mesh, sequence_axis_name, heads_axis_name)
  _check(shapes)
  mask = _on_host(mask, shapes)
  local = _local(shapes, mesh, (sequence_axis_name, heads_axis_name))
  block = _block(block_sizes)
  fixed = None if heads_axis_name is None else (sizes[0], sizes[1])
  axes = sequence_axis_name, heads_axis_name
  def best(variant: RingVariant, layout: TokenOrder) -> Prediction:
    found = [_predicted(local, mask, Way(variant, layout, *split), axes, device, backward, block)
             for split in _splits(variant, math.prod(sizes), fixed)]
    possible = [each for each in found if not each.impossible]
    return fastest(possible) if possible else found[0]
  predictions = tuple(best(variant, layout) for variant in RING_VARIANTS
                      for layout in token_order.TOKEN_ORDERS)
  possible = [each for each in predictions if not each.impossible]
  return ContextParallelPlan(predictions, fastest(possible))


def fastest(possible: list[Prediction]) -> Prediction:
  """Returns the prediction that takes the least time; none of them is of an impossible way."""
  def seconds(each: Prediction) -> float:
    assert each.seconds is not None
    return each.seconds
  return min(possible, key=seconds)


# --- What is asked. ------------------------------------------------------------------------------


def _sequence_sizes(mesh: AnyMesh, name: str, heads_name: str | None) -> tuple[int, ...]:
  """The devices along the axes of the sequence."""
  checks.require(hasattr(mesh, "shape") and hasattr(mesh, "axis_names"), "mesh", repr(mesh),
                 "a Mesh or AbstractMesh")
  between, within = sequences.axes_of(RingConfig(heads_axis_name=heads_name), name)
  sequences.require_axes(RingConfig(heads_axis_name=heads_name), name, mesh)
  sizes = tuple(mesh.shape[axis] for axis in between + within)
  checks.require(math.prod(sizes) > 1, "mesh", f"one device along {between + within}",
                 "at least two, to spread the sequence over")
  return sizes


def _check(shapes: Shapes) -> None:
  checks.require(isinstance(shapes, Shapes), "shapes", repr(shapes), "an attn_core.Shapes")
  for field, size in shapes._asdict().items():
    if field != "dtype":
      checks.integer(f"shapes.{field}", size, "an int >= 1", lambda x: x >= 1)
  checks.require(shapes.heads % shapes.key_heads == 0, "shapes.heads",
                 f"{shapes.heads} with {shapes.key_heads} key heads",
                 "a multiple of the key heads")
  try:
    jnp.dtype(shapes.dtype)
  except TypeError as error:
    raise ValueError(f"shapes.dtype: got {shapes.dtype!r}; expected a dtype") from error


def _block(sizes: BlockSizes) -> tuple[int, int]:
  """The queries and keys of a block."""
  checks.require(isinstance(sizes, BlockSizes), "block_sizes", repr(sizes), "a BlockSizes")
  def checked(field: str, size: int | None) -> int:
    return BLOCK if size is None else checks.integer(
        f"block_sizes.{field}", size, "an int >= 1, or None for 512", lambda x: x >= 1)
  return checked("block_q", sizes.block_q), checked("block_kv", sizes.block_kv)


def _on_host(mask: mask_lib.Mask, shapes: Shapes) -> mask_lib.Mask:
  """The mask with arrays of numpy, which fit."""
  checks.require(isinstance(mask, mask_lib.Mask), "mask", repr(mask),
                 "a mask value such as masks.causal()")
  mask = jax.tree.map(np.asarray, mask)
  expected = {mask_lib.QUERY: (shapes.queries,), mask_lib.KEY: (shapes.keys,), mask_lib.BATCH: (),
              mask_lib.DENSE: (shapes.heads, shapes.queries, shapes.keys)}
  for x, role in zip(jax.tree.leaves(mask), mask_lib.leaf_roles(mask), strict=True):
    if role in expected:
      full = (shapes.batch, *expected[role])
      fits = x.ndim == len(full) and all(
          size == most or size == 1 and (axis == 0 or role == mask_lib.DENSE)
          for axis, (size, most) in enumerate(zip(x.shape, full)))
      checks.require(fits, f"mask: an array per {role}", checks.describe(x),
                     f"{list(full)}; 1 for the batch, and anywhere in a boolean mask")
  return mask


def _local(shapes: Shapes, mesh: AnyMesh, reserved: tuple[str | None, ...]) -> Shapes:
  """The batch rows and heads of one device."""
  rules = OperationMetadata(mesh=mesh).get_shardings("__train__")
  placement = placement_lib.place(
      rules, mesh, (shapes.batch, shapes.queries, shapes.heads, shapes.width),
      (shapes.batch, shapes.keys, shapes.key_heads, shapes.width),
      tuple(axis for axis in reserved if axis is not None))
  assert placement is not None  # there are several devices
  count = lambda axes: math.prod(mesh.shape[axis] for axis in axes)
  parts = count(placement.heads)
  key_heads = shapes.key_heads // parts
  if placement.key_heads != placement.heads:  # all are there, those of its own heads are used
    key_heads = len(heads.key_heads_needed(shapes.heads, shapes.key_heads, parts)) // parts
  return shapes._replace(batch=shapes.batch // count(placement.batch), heads=shapes.heads // parts,
                         key_heads=key_heads)


def _splits(variant: str, shards: int, fixed: tuple[int, int] | None) -> list[tuple[int, int]]:
  """(members, devices of a group) to try."""
  if variant != "hybrid":
    return [(1, shards) if variant == "ulysses" else (shards, 1)]
  if fixed is not None:
    return [fixed]
  return [(shards // n, n) for n in range(2, shards) if shards % n == 0] or [(1, shards)]


# --- What is predicted. --------------------------------------------------------------------------


def _predicted(local: Shapes, mask: mask_lib.Mask, way: Way, axes: tuple[str, str | None],
               device: peaks.Device, backward: bool, block: tuple[int, int]) -> Prediction:
  """One variant, layout, number of members and size of groups, by the names of the axes."""
  variant, layout, members, group = way
  if variant == "hybrid" and min(members, group) == 1:
    return Prediction(*way, f"{members * group} devices do not split into members and groups of "
                      "at least 2 each")
  name, heads_name = axes[0], axes[1] or f"{axes[0]}_heads"
  is_hybrid = variant == "hybrid"
  mesh = (AbstractMesh((members, group), (name, heads_name)) if is_hybrid
          else AbstractMesh((members * group,), (name,)))
  try:
    sequence = sequences.shard_sequence(
        RingConfig(variant, layout, heads_name if is_hybrid else None), name, False, mesh,
        (local.queries, local.keys, local.heads))
  except ValueError as error:
    return Prediction(*way, str(error))
  assert sequence is not None  # there are several devices
  visits = work.visits(sequence, mask, block)
  shifts = _shifts(sequence, mask)
  sizes = _sizes(local, sequence, mask)
  between, within = traffic.links(sequence, device, one_axis=axes[1] is None)
  pairs = visits.pairs * local.batch * (local.heads // group)
  found: list[traffic.Collective] = []
  seconds, flops = 0.0, 0.0
  for direction in (False, True)[:1 + backward]:
    each = pairs * work.flops_of_pair(local.width, local.value_width, direction)
    around = (traffic.exchanges(sequence, sizes, within, direction)
              + traffic.gathers(sequence, sizes, between, direction))
    sent = traffic.hop_by_hop(sequence, sizes, between, shifts, direction)
    busiest = _busiest(visits, sequence, shifts) * each / device.flops
    seconds += sum(x.seconds for x in around) + sum(
        max(computed, sum(x.seconds for x in hop))
        for computed, hop in zip((*busiest, 0.0), sent, strict=True))
    found += [*around, *sum(sent, [])]
    flops += each * visits.blocks.sum(1).max()
  return Prediction(
      *way, None, traffic.total(found), sum(x.link_bytes for x in found), float(flops),
      visits.imbalance, float(flops / device.flops), sum(x.seconds for x in found), float(seconds))


def _shifts(sequence: Sequence, mask: mask_lib.Mask) -> tuple[int, ...]:
  """The hops of the ring; one where there is none."""
  if sequence.gathers:
    return (0,)
  if sequence.shards <= MANY_SHARDS and max(sequence.queries, sequence.keys) <= MANY_TOKENS:
    return ring_step.shifts(sequence, jax.tree.structure(mask))
  runs = sequence.group * token_order.pieces(sequence.layout)  # a ring looks at them as they are
  block_q, block_kv = (sequence.padded(length) // sequence.members // runs
                       for length in (sequence.queries, sequence.keys))
  seen = work.visits(sequence, position_range.static_superset(mask), (block_q, block_kv))
  counted, source = np.nonzero(seen.blocks)
  return tuple(sorted({0, *((seen.members[counted] - source) % sequence.members).tolist()}))


def _busiest(visits: work.Visits, sequence: Sequence, shifts: tuple[int, ...]) -> np.ndarray:
  """float [hops]: the most blocks that a member visits in each hop."""
  if sequence.gathers:
    return visits.blocks.max(0)
  sources = (visits.members[:, None] - np.asarray(shifts)) % sequence.members
  return np.take_along_axis(visits.blocks, sources, 1).max(0)


def _sizes(local: Shapes, sequence: Sequence, mask: mask_lib.Mask) -> traffic.Sizes:
  itemsize = jnp.dtype(local.dtype).itemsize
  queries, keys = (local.batch * sequence.padded(n) // sequence.shards * itemsize
                   for n in (sequence.queries, sequence.keys))
  both = local.width + local.value_width
  needed = len(heads.key_heads_needed(local.heads, local.key_heads, sequence.group))
  arrays = list(zip(jax.tree.leaves(mask), mask_lib.leaf_roles(mask), strict=True))
  length = {mask_lib.QUERY: sequence.padded(sequence.queries) // sequence.shards,
            mask_lib.KEY: sequence.padded(sequence.keys) // sequence.shards}
  rows = lambda x: local.batch if x.shape[0] > 1 else 1
  of = lambda role: tuple(rows(x) * length[role] * MASK_BYTES for x, its in arrays if its == role)
  pairs = lambda x: traffic.Pairs(
      rows(x) * (local.heads if x.shape[1] > 1 else 1) * (
          length[mask_lib.QUERY] if x.shape[2] > 1 else 1) * (
              sequence.padded(sequence.keys) if x.shape[3] > 1 else 1), x.shape[1] > 1,
      x.shape[2] > 1)
  return traffic.Sizes(
      queries * local.heads * local.width, queries * local.heads * local.value_width,
      keys * local.key_heads * both, keys * needed * both, itemsize, of(mask_lib.QUERY),
      of(mask_lib.KEY), tuple(pairs(x) for x, role in arrays if role == mask_lib.DENSE))
