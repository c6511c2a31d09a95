# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicts traffic, work and time of every way to shard a sequence, by arithmetic alone.

  compute in step n     c_n = pairs of the visited blocks * H / group * B * flops of a pair / peak,
                        of the member that visits most blocks in this step
  exchange in step n    x_n = bytes through the busiest link / its bandwidth, see `traffic`
  ring                  t = sum over n of max(c_n, x_n) + x_return
  all-gather            t = x + c
  exchange of heads     t = x + time of the group's attention with H / group heads per device

A pair takes 2 (D + E) flops forward and 2 (3 D + 2 E) backward. B and H are those of one device;
x_return is the time to send the gradients of keys and values back to their owners. Peaks are those
published by the makers, so times are lower bounds, for comparison: inefficiency of kernels,
latencies and other traffic are not included. With a report of measured times, the speed of kernels
replaces the peak of computation; that of links remains.
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
from attn_core.plan import measured, peaks, traffic, work
from attn_core.sharding import (context_parallel as sequences, placement as placement_lib,
                                token_order)
from attn_core.sharding.context_parallel import AnyMesh, Sequence
from attn_core.types import RING_VARIANTS, BlockSizes, RingConfig, RingVariant, TokenOrder

BLOCK = 512  # tokens
MASK_BYTES = 4  # of one number of a mask's array
# Above these numbers, the steps of a ring are found from `work.visits` of some members only.
MANY_SHARDS, MANY_TOKENS = 512, 2**20


class Shapes(NamedTuple):
  """Shapes of one attention, over all devices."""

  batch: int  # B
  queries: int  # T, tokens
  keys: int  # S, tokens
  heads: int  # query heads
  key_heads: int
  width: int  # D
  value_width: int  # E
  dtype: str = "bfloat16"


class Strategy(NamedTuple):
  """A way to shard a sequence."""

  variant: RingVariant
  layout: TokenOrder
  members: int  # number of groups, between which keys move
  group: int  # number of devices of a group, which exchange heads


class Prediction(NamedTuple):
  """Traffic, work and time of one strategy, or the reason why it is impossible."""

  variant: RingVariant
  layout: TokenOrder
  members: int  # number of groups, between which keys move
  group: int  # number of devices of a group, which exchange heads
  impossible: str | None = None  # the reason; all following fields are None then
  collectives: tuple[traffic.Collective, ...] | None = None  # one of each kind
  # Sum over all exchanges of the bytes through the busiest link in one direction. In a hybrid,
  # exchanges within groups and between groups may use different links.
  link_bytes: float | None = None
  flops: float | None = None  # of the busiest device
  imbalance: float | None = None  # visited blocks of the busiest device over the mean
  compute_seconds: float | None = None  # of the busiest device
  link_seconds: float | None = None
  seconds: float | None = None  # total, where exchanges overlap with computation


class ContextParallelPlan(NamedTuple):
  """Predictions for every variant and token order, and the fastest one."""

  predictions: tuple[Prediction, ...]
  recommended: Prediction  # always exists: a contiguous ring is never impossible


def plan_context_parallel(
    shapes: Shapes, mask: mask_lib.Mask, mesh: AnyMesh, device_kind: str, *,
    sequence_axis_name: str = "sp", heads_axis_name: str | None = None, backward: bool = True,
    block_sizes: BlockSizes = BlockSizes(),
    report: measured.Report | None = None) -> ContextParallelPlan:
  """Predicts every variant of `ring` in every token order; formulas are in this module's docstring.

  Args:
    shapes: shapes of the whole attention. The other axes of the mesh shard batch and heads, as in
      `attention`.
    mask: mask of the whole attention, in the natural order of the tokens.
    mesh: a Mesh or AbstractMesh; nothing runs on it.
    device_kind: a key of `peaks.DEVICES`, or a `jax.Device.device_kind`.
    sequence_axis_name: the mesh axis that shards the sequence.
    heads_axis_name: a second mesh axis, over which variant "hybrid" exchanges heads; other variants
      shard the sequence over both axes. None: "hybrid" splits the one axis into groups of neighbors
      in the fastest way.
    backward: whether to include the backward.
    block_sizes: block_q and block_kv of the kernel; None: 512 tokens.
    report: tpu_suite.json or gpu_suite.json of such a device, a file or its contents: computations
      take as long as measured there; None: as at the peak rate.

  Returns:
    A prediction for every variant and token order, and the fastest one.

  Raises:
    ValueError: the mesh does not have the axes or has one device along them, the device kind is
      unknown, a size is invalid, an array of the mask does not fit the shapes, or the report is
      malformed, of another device or without times.
  """
  device = peaks.find(device_kind)
  sizes = _sequence_sizes(mesh, sequence_axis_name, heads_axis_name)
  _check(shapes)
  mask = _on_host(mask, shapes)
  local = _local(shapes, mesh, (sequence_axis_name, heads_axis_name))
  speed = measured.Speed(device.flops, device.flops) if report is None else measured.speed(
      report, device_kind, shapes.width)
  block = _block(block_sizes)
  fixed = None if heads_axis_name is None else (sizes[0], sizes[1])
  axes = sequence_axis_name, heads_axis_name
  def best(variant: RingVariant, layout: TokenOrder) -> Prediction:
    found = [_predicted(local, mask, Strategy(variant, layout, *split), axes, device,
                        speed[:1 + backward], block)
             for split in _splits(variant, math.prod(sizes), fixed)]
    possible = [each for each in found if not each.impossible]
    return fastest(possible) if possible else found[0]
  predictions = tuple(best(variant, layout) for variant in RING_VARIANTS
                      for layout in token_order.TOKEN_ORDERS)
  possible = [each for each in predictions if not each.impossible]
  return ContextParallelPlan(predictions, fastest(possible))


def fastest(possible: list[Prediction]) -> Prediction:
  """Returns the prediction with the least time; all of them must be possible."""
  def seconds(each: Prediction) -> float:
    assert each.seconds is not None
    return each.seconds
  return min(possible, key=seconds)


# --- Arguments. ----------------------------------------------------------------------------------


def _sequence_sizes(mesh: AnyMesh, name: str, heads_name: str | None) -> tuple[int, ...]:
  """Returns the number of devices along each mesh axis of the sequence."""
  checks.require(hasattr(mesh, "shape") and hasattr(mesh, "axis_names"), "mesh", repr(mesh),
                 "a Mesh or AbstractMesh")
  between, within = sequences.axes_of(RingConfig(heads_axis_name=heads_name), name)
  sequences.require_axes(RingConfig(heads_axis_name=heads_name), name, mesh)
  sizes = tuple(mesh.shape[axis] for axis in between + within)
  checks.require(math.prod(sizes) > 1, "mesh", f"one device along {between + within}",
                 "at least two, to shard the sequence over")
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
  """Returns (queries, keys) of a block."""
  checks.require(isinstance(sizes, BlockSizes), "block_sizes", repr(sizes), "a BlockSizes")
  def checked(field: str, size: int | None) -> int:
    return BLOCK if size is None else checks.integer(
        f"block_sizes.{field}", size, "an int >= 1, or None for 512", lambda x: x >= 1)
  return checked("block_q", sizes.block_q), checked("block_kv", sizes.block_kv)


def _on_host(mask: mask_lib.Mask, shapes: Shapes) -> mask_lib.Mask:
  """Returns the mask with numpy arrays, after checking their shapes."""
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
                     f"{list(full)}; 1 for the batch, and for any dimension of a boolean mask")
  return mask


def _local(shapes: Shapes, mesh: AnyMesh, reserved: tuple[str | None, ...]) -> Shapes:
  """Returns the shapes with the batch rows and heads of one device."""
  rules = OperationMetadata(mesh=mesh).get_shardings("__train__")
  placement = placement_lib.place(
      rules, mesh, (shapes.batch, shapes.queries, shapes.heads, shapes.width),
      (shapes.batch, shapes.keys, shapes.key_heads, shapes.width),
      tuple(axis for axis in reserved if axis is not None))
  assert placement is not None  # there are several devices
  count = lambda axes: math.prod(mesh.shape[axis] for axis in axes)
  parts = count(placement.heads)
  key_heads = shapes.key_heads // parts
  if placement.key_heads != placement.heads:  # replicated: a device uses those of its own heads
    key_heads = len(heads.key_heads_needed(shapes.heads, shapes.key_heads, parts)) // parts
  return shapes._replace(batch=shapes.batch // count(placement.batch), heads=shapes.heads // parts,
                         key_heads=key_heads)


def _splits(variant: str, shards: int, fixed: tuple[int, int] | None) -> list[tuple[int, int]]:
  """Returns (members, devices of a group) to try."""
  if variant != "hybrid":
    return [(1, shards) if variant == "ulysses" else (shards, 1)]
  if fixed is not None:
    return [fixed]
  return [(shards // n, n) for n in range(2, shards) if shards % n == 0] or [(1, shards)]


# --- Predictions. --------------------------------------------------------------------------------


def _predicted(local: Shapes, mask: mask_lib.Mask, strategy: Strategy, axes: tuple[str, str | None],
               device: peaks.Device, speeds: tuple[float, ...],
               block: tuple[int, int]) -> Prediction:
  """Predicts one strategy.

  Args:
    local: shapes of one device.
    mask: of the whole attention.
    strategy: how the sequence is sharded.
    axes: (sequence_axis_name, heads_axis_name).
    device: its links.
    speeds: operations per second in the forward, and in the backward if it is included.
    block: (queries, keys).
  """
  variant, layout, members, group = strategy
  if variant == "hybrid" and min(members, group) == 1:
    return Prediction(*strategy, f"{members * group} devices do not split into members and groups "
                      "of at least 2 each")
  name, heads_name = axes[0], axes[1] or f"{axes[0]}_heads"
  is_hybrid = variant == "hybrid"
  mesh = (AbstractMesh((members, group), (name, heads_name)) if is_hybrid
          else AbstractMesh((members * group,), (name,)))
  try:
    sequence = sequences.shard_sequence(
        RingConfig(variant, layout, heads_name if is_hybrid else None), name, False, mesh,
        (local.queries, local.keys, local.heads))
  except ValueError as error:
    return Prediction(*strategy, str(error))
  assert sequence is not None  # there are several devices
  visits = work.visits(sequence, mask, block)
  shifts = _shifts(sequence, mask)
  sizes = _sizes(local, sequence, mask)
  between, within = traffic.links(sequence, device, one_axis=axes[1] is None)
  pairs = visits.pairs * local.batch * (local.heads // group)
  found: list[traffic.Collective] = []
  seconds, flops, compute_seconds = 0.0, 0.0, 0.0
  for direction, speed in zip((False, True), speeds):
    each = pairs * work.flops_of_pair(local.width, local.value_width, direction)
    serial = (traffic.exchanges(sequence, sizes, within, direction)
              + traffic.gathers(sequence, sizes, between, direction))
    overlapped = traffic.ring_exchanges(sequence, sizes, between, shifts, direction)
    busiest = _busiest(visits, sequence, shifts) * each / speed
    seconds += sum(x.seconds for x in serial) + sum(
        max(computed, sum(x.seconds for x in step))
        for computed, step in zip((*busiest, 0.0), overlapped, strict=True))
    found += [*serial, *sum(overlapped, [])]
    flops += each * visits.blocks.sum(1).max()
    compute_seconds += each * visits.blocks.sum(1).max() / speed
  return Prediction(
      *strategy, None, traffic.total(found), sum(x.link_bytes for x in found), float(flops),
      visits.imbalance, float(compute_seconds), sum(x.seconds for x in found), float(seconds))


def _shifts(sequence: Sequence, mask: mask_lib.Mask) -> tuple[int, ...]:
  """Returns the steps of the ring as distances, see `ring_step.shifts`; (0,) without a ring."""
  if sequence.gathers:
    return (0,)
  if sequence.shards <= MANY_SHARDS and max(sequence.queries, sequence.keys) <= MANY_TOKENS:
    return ring_step.shifts(sequence, jax.tree.structure(mask))
  # As in `ring_step.shifts`, blocks are runs of consecutive tokens.
  runs = sequence.group * token_order.pieces(sequence.layout)
  block_q, block_kv = (sequence.padded(length) // sequence.members // runs
                       for length in (sequence.queries, sequence.keys))
  seen = work.visits(sequence, position_range.static_superset(mask), (block_q, block_kv))
  counted, source = np.nonzero(seen.blocks)
  return tuple(sorted({0, *((seen.members[counted] - source) % sequence.members).tolist()}))


def _busiest(visits: work.Visits, sequence: Sequence, shifts: tuple[int, ...]) -> np.ndarray:
  """Returns the largest number of blocks that a member visits in each step, float [num_steps]."""
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
