# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages on a mesh by `jax.shard_map`: request groups, heads and stripes.

Groups (see `caches.paged.request_groups`) and heads are independent, so devices do not communicate,
and each holds only the pages of its groups and key heads. Replicating pages would cost the memory
that they save, so dimensions that do not divide are refused. Dimensions of size 1 are replicated:
one group of requests, one key head. The keys of a request stay on one device unless its pages are
in stripes: the mesh axes of the key sequence shard the stripes, and partial results are combined.
"""

from typing import Any, Callable, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from attn_core.array_axes import AnyMesh, size_of
from attn_core.caches.paged import layouts, request_groups
from attn_core.caches.paged.layouts import Pages
from attn_core.sharding import partition, placement as placement_lib, shard_map
from attn_core.sharding.placement import Placement
from attn_core.types import AttentionOutput, Call, PagedOperands

ROWS = "groups of requests"


class PagedShapes(NamedTuple):
  """Shapes of one kernel call over pages: one group of requests on one device."""

  query: jax.ShapeDtypeStruct  # [T, H, D]
  cache: Pages  # of shapes
  metadata: layouts.PagesMetadata  # of shapes
  heads: layouts.Heads  # without padding


class PlacementResult(NamedTuple):
  """Placement of a call, or the reason why the mesh does not fit it."""

  placement: Placement | None  # None: one device
  unsupported_reason: str | None = None  # None: the mesh fits


def place(rules: placement_lib.Rules, mesh: AnyMesh | None, operands: PagedOperands,
          key_heads: int) -> PlacementResult:
  """Fits the rules to a mesh and to a call.

  Args:
    rules: `AttnShardingRules` of layout bthd, whose axes of the batch shard the groups.
    mesh: the mesh; None: one device.
    operands: the operands of the call.
    key_heads: K, without padding.
  """
  mesh = placement_lib.mesh_in_force(mesh)
  if mesh is None or placement_lib.is_single(mesh):
    return PlacementResult(None)
  query, key = ([tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1
                       and axis not in mesh.manual_axes) for axes in placement_lib.entries(spec)]
                for spec in (rules.query, rules.key))
  rows, heads, of_keys = query[0], query[2], key[2]
  number = request_groups.count(operands.metadata)
  stripes = request_groups.stripe_count(operands.metadata)
  keys, reasons = (() if stripes is None else key[1]), []
  drops = [partition.DroppedAxis("query", 1, axis, "a request's keys stay on one device, unless "
                                 "its pages are in stripes (caches.groups)")
           for axis in dict.fromkeys(query[1] + key[1]) if axis not in keys]
  if number is None or number == 1:
    drops += [partition.DroppedAxis("cache_metadata", 0, axis, "all requests are one group; "
                                    "metadata in groups (caches.groups) is sharded")
              for axis in rows]
    rows = ()
  elif number % size_of(mesh, rows):
    reasons.append(f"{number} groups of requests over {_written(mesh, rows)}: expected a number "
                   "of groups that it divides")
  if keys and stripes is not None and (
      stripes % size_of(mesh, keys) or number != size_of(mesh, rows)):
    reasons.append(f"{number} groups of {stripes} stripes over {_written(mesh, rows)} and "
                   f"{_written(mesh, keys)}: expected one group a device, and a number of stripes "
                   "that the second divides")
  if key_heads == 1 and operands.query.shape[1] % size_of(mesh, heads) == 0:
    drops += [partition.DroppedAxis("cache_view", layouts.head_axis(operands.cache), axis,
                             "there is one key head") for axis in of_keys]
    of_keys = ()
  elif heads != of_keys or not _divides(operands.cache, key_heads, size_of(mesh, heads)):
    reasons.append(f"{key_heads} key heads over {_written(mesh, of_keys or heads)} (query heads: "
                   f"{_written(mesh, heads)}): expected axes, the same for both, that divide the "
                   "key heads and the rows of a page; repeat_key_value makes more of them, "
                   "partition_axis says which axes shard them")
  placement = Placement(mesh, rows, heads, of_keys, tuple(drops), keys=keys, rows=ROWS)
  return PlacementResult(placement, "; ".join(reasons) or None)


def sharded(local: Callable[[PagedOperands], AttentionOutput], call: Call, *,
            writes: bool) -> AttentionOutput:
  """Runs `local` on each device's groups, heads and stripes.

  Args:
    local: computes one device's part of the operands.
    call: operands, and the placement (None: `local` runs on the whole operands).
    writes: whether `local` returns the cache.

  Returns:
    The concatenated outputs of `local`: outputs [1, T, H, E], lse [1, H, T], and the cache,
    sharded as before.
  """
  placement = call.placement
  if placement is None:
    return local(call.operands)
  specs = _specs(call.operands, placement)
  operands = shard_map.resharded(call.operands, specs, placement.mesh)
  rows, heads = placement.batch or None, placement.heads or None
  out_specs = shard_map.output_like(
      P(None, rows, heads), lse=P(None, heads, rows) if call.return_lse else None,
      cache_view=specs.cache if writes else None)
  return jax.shard_map(local, mesh=placement.mesh, in_specs=(specs,),
                       out_specs=out_specs)(operands)


def local_shapes(operands: PagedOperands, placement: Placement | None,
                 heads: layouts.Heads) -> PagedShapes:
  """Returns the shapes in one call of a kernel.

  Args:
    operands: the operands of the call.
    placement: None: one device.
    heads: those of the call, without padding.
  """
  local = _device_shapes(operands, placement)
  query, cache, metadata = local.query, local.cache, local.metadata
  tokens = query.shape[0] // (request_groups.count(metadata) or 1)
  shards = layouts.heads_of(operands.cache).key_heads // layouts.heads_of(cache).key_heads
  return PagedShapes(
      jax.ShapeDtypeStruct((tokens, *query.shape[1:]), query.dtype), cache,
      request_groups.shapes_of_one(metadata), heads._replace(key_heads=heads.key_heads // shards))


def _device_shapes(operands: PagedOperands, placement: Placement | None) -> PagedOperands:
  """Returns the shapes of one device's operands."""
  if placement is None:
    return operands
  def shard(x: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
    sizes = [size_of(placement.mesh, entry) for entry in spec]
    shape = [n // m for n, m in zip(x.shape, sizes + [1] * x.ndim)]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
  return jax.tree.map(shard, operands, _specs(operands, placement))


def _specs(operands: PagedOperands, placement: Placement) -> PagedOperands:
  """Returns the spec of each operand."""
  rows, heads, of_keys, keys, parts = (axes or None for axes in (
      placement.batch, placement.heads, placement.key_heads, placement.keys,
      placement.batch + placement.keys))
  def of_cache(name: str, x: jax.Array) -> P:
    if x.ndim == 0:  # one scale for all
      return P()
    return P(of_keys, parts) if name in ("key_pages", "value_pages") else P(parts, None, of_keys)
  whole: dict[str, Any] = {"query": P(rows, heads), "key": P(rows, of_keys),
                           "value": P(rows, of_keys), "sinks": P(heads)}
  cache: dict[str, Any] = {name: of_cache(name, x)
                           for name, x in operands.cache._asdict().items() if x is not None}
  return operands._replace(
      cache=operands.cache._replace(**cache),
      metadata=jax.tree.map(lambda x: P(rows) if rows else P(), operands.metadata)._replace(
          page_tables=P(rows, keys)),
      **{name: spec for name, spec in whole.items() if getattr(operands, name) is not None})


def _divides(cache: Pages, key_heads: int, devices: int) -> bool:
  """Whether each device gets whole key heads, in separate rows of a page."""
  held = layouts.heads_of(cache).key_heads
  rows = cache.pages.shape[2] if isinstance(cache, layouts.PagesV3) else devices
  return devices == 1 or (key_heads % devices == 0 and held == key_heads and rows % devices == 0)


def _written(mesh: AnyMesh, axes: tuple[str, ...]) -> str:
  return " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes) or "one device"
