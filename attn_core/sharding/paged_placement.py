# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Placement of attention over pages: mesh axes of groups of requests, of heads and of stripes.

Explicit axes shard what the types of the arrays say, those of the pages first, since these are
large; other axes what the rules say, in the order of the mesh. Replicating pages would cost the
memory that they save, so dimensions of them that do not divide are refused. Dimensions of size 1
are replicated: one group of requests, one key head.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from attn_core.array_axes import AnyMesh, Axes, size_of, typed_axes, typed_mesh
from attn_core.caches.paged import layouts, pool as pool_lib, request_groups
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.sharding import explicit_axes, partition, placement as placement_lib
from attn_core.sharding.explicit_axes import TypedRules
from attn_core.sharding.partition import DroppedAxis, PartitionAxis
from attn_core.sharding.placement import Placement
from attn_core.types import PagedOperands

ROWS = "groups of requests"


class PlacementResult(NamedTuple):
  """Placement of a call, or the reason why the mesh does not fit it."""

  placement: Placement | None  # None: one device
  error: Exception | None = None  # None: the mesh fits


class _Found(NamedTuple):
  """A placement, and the reasons why the mesh does not fit it."""

  placement: Placement
  reasons: tuple[str, ...]


class _Typed(NamedTuple):
  """Rules that follow from the types of the arrays of a call."""

  rules: TypedRules
  drops: tuple[DroppedAxis, ...] = ()
  reasons: tuple[str, ...] = ()  # why the pages cannot be read as they are sharded


def place(rules: placement_lib.Rules, mesh: AnyMesh | None, operands: PagedOperands,
          heads: layouts.Heads, partition_axis: PartitionAxis) -> PlacementResult:
  """Fits the types of the arrays and the rules to a mesh and to a call.

  Args:
    rules: `AttnShardingRules` of layout bthd, whose axes of the batch shard the groups.
    mesh: the mesh in force; None: that of the arrays' types, or one device.
    operands: the operands of the call.
    heads: those of the call, without padding.
    partition_axis: names the axes that may replicate the work.
  """
  typed_by = typed_mesh(*jax.tree.leaves((operands.query, operands.cache, operands.key,
                                          operands.value)))
  mesh = placement_lib.mesh_in_force(typed_by or mesh)
  if mesh is None or placement_lib.is_single(mesh) and not mesh.explicit_axes:
    return PlacementResult(None)
  typed = None if typed_by is None else _typed_rules(operands, mesh, heads.key_heads)
  found = _place(placement_lib.ordered_rules(rules, mesh, typed and typed.rules), mesh, operands,
                 heads.key_heads)
  reasons, placement = found.reasons, found.placement
  if typed is not None:
    reasons = typed.reasons or reasons
    output = explicit_axes.output_spec(operands.query, heads.value_width, mesh)
    placement = placement._replace(drops=typed.drops + placement.drops, output=P(None, *output))
  if reasons:
    return PlacementResult(placement, NotImplementedError("; ".join(reasons)))
  unknown = placement_lib.unknown_axes(placement, partition_axis)
  return PlacementResult(placement, placement_lib.unknown_axes_error(
      unknown, "of a call over pages") if unknown else None)


def _place(rules: placement_lib.Rules, mesh: AnyMesh, operands: PagedOperands,
           key_heads: int) -> _Found:
  """Fits the rules to the numbers of groups, stripes and heads."""
  query, key = ([tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1
                       and axis not in mesh.manual_axes) for axes in placement_lib.entries(spec)]
                for spec in (rules.query, rules.key))
  rows, heads, of_keys = query[0], query[2], key[2]
  number = request_groups.count(operands.metadata)
  stripes = request_groups.stripe_count(operands.metadata)
  keys, reasons = (() if stripes is None else key[1]), []
  drops = [DroppedAxis("query", 1, axis, "a request's keys stay on one device, unless its pages "
                       "are in stripes (caches.groups)")
           for axis in dict.fromkeys(query[1] + key[1]) if axis not in keys]
  if number is None or number == 1:
    drops += [DroppedAxis("cache_metadata", 0, axis, "all requests are one group; metadata in "
                          "groups (caches.groups) is sharded")
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
  if isinstance(operands.cache, PagesLatent) and operands.query.shape[1] % size_of(
      mesh, heads) == 0:
    of_keys = ()  # every head reads whole rows
  elif key_heads == 1 and operands.query.shape[1] % size_of(mesh, heads) == 0:
    drops += [DroppedAxis("cache_view", layouts.head_axis(operands.cache), axis,
                          "there is one key head") for axis in of_keys]
    of_keys = ()
  elif heads != of_keys or not pool_lib.divides_heads(
      operands.cache, key_heads, size_of(mesh, heads)):
    reasons.append(f"{key_heads} key heads over {_written(mesh, of_keys or heads)} (query heads: "
                   f"{_written(mesh, heads)}): expected axes, the same for both, that divide the "
                   "key heads and the rows of a page; repeat_key_value makes more of them, "
                   "partition_axis says which axes shard them")
  placement = Placement(mesh, rows, heads, of_keys, tuple(drops), keys=keys, rows=ROWS)
  return _Found(placement, tuple(reasons))


def _typed_rules(operands: PagedOperands, mesh: AnyMesh, key_heads: int) -> _Typed:
  """Returns the rules that follow from the types of pages and query, for Explicit axes.

  The query follows pages that are sharded. Pages that are not sharded are read in the parts that
  the query's shards need, unless the call writes them: then every device writes all of them.
  """
  cache, writes = operands.cache, operands.key is not None
  number = request_groups.count(operands.metadata)
  pages = typed_axes(cache.key_pages if isinstance(cache, layouts.PagesV1) else cache.pages)
  pool = pages.pop(1 if isinstance(cache, layouts.PagesV1) else 0)
  of_keys = (Axes() if isinstance(cache, PagesLatent)
             else pages.pop(0 if isinstance(cache, layouts.PagesV1) else 1))
  tokens, heads, _ = typed_axes(operands.query)
  rows, keys, drops = pool, Axes(), list[DroppedAxis]()
  reasons: list[str] = []
  if request_groups.stripe_count(operands.metadata) is not None:
    count = next((n for n in range(len(pool) + 1) if size_of(mesh, pool[:n]) == number), 0)
    rows, keys = pool[:count], pool[count:]
  elif pool and number in (None, 1):
    reasons.append(f"pages over {_written(mesh, pool)} with all requests in one group, which would "
                   "gather them: expected metadata in groups (caches.groups), or a pool that is "
                   "not sharded")
  if sum(pages, ()):
    reasons.append(f"tokens or columns of pages over {_written(mesh, sum(pages, ()))}: expected "
                   "axes for the pages and for the heads only")

  def of_query(axes: Axes, fits: Callable[[int], bool]) -> Axes:
    """Returns the first axes of a dimension of the query that shard nothing else and fit."""
    free = tuple(axis for axis in axes if axis not in {*rows, *keys, *of_keys})
    count = next(n for n in range(len(free), -1, -1) if fits(size_of(mesh, free[:n])))
    return free[:count]

  if not rows and number is not None and not writes:
    rows = of_query(tokens, lambda size: number % size == 0)
  shards_heads = of_keys
  if key_heads == 1 and not of_keys:
    shards_heads = of_query(heads, lambda size: operands.query.shape[1] % size == 0)
  elif not of_keys and not writes:
    shards_heads = of_query(heads, lambda size: pool_lib.divides_heads(cache, key_heads, size))
  if writes:
    drops = [DroppedAxis("query", dimension, axis, "the pages are not sharded over it, and this "
                         "mechanism writes them")
             for dimension, axes in enumerate((tokens, heads)) for axis in axes
             if axis not in {*rows, *keys, *shards_heads} and mesh.shape[axis] > 1]
  return _Typed(TypedRules(*map(partition.to_spec, (
      (rows, (), shards_heads), (rows, keys, shards_heads)))), tuple(drops), tuple(reasons))


def _written(mesh: AnyMesh, axes: Axes) -> str:
  return " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes) or "one device"
