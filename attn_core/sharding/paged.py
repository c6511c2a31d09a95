"""Attention over pages on a mesh: groups of requests, heads and stripes, by `jax.shard_map`.

Groups (see `caches.groups`) and heads are independent, so nothing communicates, and every device
holds the pages of its own groups and key heads only. To hold others' as well would cost what pages
are there to save, so what does not divide is refused. What there is one of is replicated: a call
of one group of requests, one key head. A request's keys stay on one device, unless its pages are in
stripes: these go by the axes of the keys' sequence, and the devices' results are merged.

Letters: G groups, W stripes, T tokens of the call, P pages of the pool, H query heads, K key heads,
E value width.
"""

import math
from typing import Any, Callable, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from attn_core.caches.paged import request_groups as groups, ops as pages
from attn_core.sharding import partition, shard_map as shard
from attn_core.types import AttentionOutput, Call

ROWS = "groups of requests"


class Placed(NamedTuple):
  """Where a call runs."""

  placement: shard.Placement | None  # None: there is nothing to spread over
  refusal: str | None = None  # why it cannot run there; None: it can


def place(rules, mesh, operands, key_heads: int) -> Placed:
  """Fits the rules to a mesh and to a call.

  Args:
    rules: `AttnShardingRules` of layout bthd, of which the rows of the batch are groups.
    mesh: the mesh; None: one device.
    operands: a `PagedOperands` [T, H, D].
    key_heads: K, without padding.
  """
  mesh = shard.mesh_in_force(mesh)
  if mesh is None or shard.is_single(mesh):
    return Placed(None)
  query, key = ([tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1
                       and axis not in mesh.manual_axes) for axes in shard.entries(spec)]
                for spec in (rules.query, rules.key))
  rows, heads, of_keys = query[0], query[2], key[2]
  number, stripes = groups.count(operands.metadata), groups.stripe_count(operands.metadata)
  keys, refusals = (() if stripes is None else key[1]), []
  drops = [partition.Drop("query", 1, axis, "a request's keys stay on one device, unless its pages "
                          "are in stripes (caches.groups)")
           for axis in dict.fromkeys(query[1] + key[1]) if axis not in keys]
  if number in (None, 1):
    drops += [partition.Drop("cache_metadata", 0, axis, "all requests are one group; metadata in "
                             "groups (caches.groups) is spread") for axis in rows]
    rows = ()
  elif number % _size(mesh, rows):
    refusals.append(f"{number} groups of requests over {_written(mesh, rows)}: expected a number "
                    "of groups that it divides")
  if keys and (stripes % _size(mesh, keys) or (number or 1) != _size(mesh, rows)):
    refusals.append(f"{number} groups of {stripes} stripes over {_written(mesh, rows)} and "
                    f"{_written(mesh, keys)}: expected one group a device, and a number of stripes "
                    "that the second divides")
  if key_heads == 1 and operands.query.shape[1] % _size(mesh, heads) == 0:
    drops += [partition.Drop("cache_view", pages.head_axis(operands.cache), axis,
                             "there is one key head") for axis in of_keys]
    of_keys = ()
  elif heads != of_keys or not _divides(operands.cache, key_heads, _size(mesh, heads)):
    refusals.append(f"{key_heads} key heads over {_written(mesh, of_keys or heads)} (query heads: "
                    f"{_written(mesh, heads)}): expected axes, the same for both, that divide the "
                    "key heads and the rows of a page; repeat_key_value makes more of them, "
                    "partition_axis says which axes shard them")
  placement = shard.Placement(mesh, rows, heads, of_keys, tuple(drops), keys=keys,
                               rows=ROWS)
  return Placed(placement, "; ".join(refusals) or None)


def sharded(local: Callable[[Any], AttentionOutput], call: Call, *,
            writes: bool) -> AttentionOutput:
  """Runs `local` on every device's groups, heads and stripes.

  Args:
    local: computes one device's part of the operands.
    call: operands, and the placement (None: `local` runs as it is).
    writes: whether `local` returns the cache.

  Returns:
    What `local` returns, put together: outputs [1, T, H, E], lse [1, H, T], the cache as it was.
  """
  placement = call.placement
  if placement is None:
    return local(call.operands)
  specs = _specs(call.operands, placement)
  operands = shard.resharded(call.operands, specs, placement.mesh)
  rows, heads = placement.batch or None, placement.heads or None
  out_specs = AttentionOutput(
      P(None, rows, heads), lse=P(None, heads, rows) if call.return_lse else None,
      cache_view=specs.cache if writes else None)
  return jax.shard_map(local, mesh=placement.mesh, in_specs=(specs,),
                       out_specs=out_specs)(operands)


def part(operands, placement: shard.Placement | None):
  """The shapes of one device's operands, for a kernel to look at."""
  if placement is None:
    return operands
  def cut(x, spec):
    sizes = [_size(placement.mesh, partition.axis_names(entry, "a spec")) for entry in spec]
    shape = [n // m for n, m in zip(x.shape, sizes + [1] * x.ndim)]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
  return jax.tree.map(cut, operands, _specs(operands, placement))


def _specs(operands, placement: shard.Placement):
  """The spec of every operand."""
  rows, heads, of_keys, keys, parts = (axes or None for axes in (
      placement.batch, placement.heads, placement.key_heads, placement.keys,
      placement.batch + placement.keys))
  def of_cache(name, x):
    if x.ndim == 0:  # one scale for all
      return P()
    return P(of_keys, parts) if name in ("key_pages", "value_pages") else P(parts, None, of_keys)
  cache = operands.cache
  whole = {"query": P(rows, heads), "key": P(rows, of_keys), "value": P(rows, of_keys),
           "sinks": P(heads)}
  return operands._replace(
      cache=cache._replace(**{name: of_cache(name, x) for name, x in cache._asdict().items()
                              if x is not None}),
      metadata=jax.tree.map(lambda x: P(rows) if rows else P(), operands.metadata)._replace(
          **{"page_tables": P(rows, keys)} if keys else {}),
      **{name: spec for name, spec in whole.items() if getattr(operands, name) is not None})


def _divides(cache, key_heads: int, devices: int) -> bool:
  """Whether heads can be cut: every device has whole ones, in rows of its own."""
  held = pages.heads_of(cache).key_heads
  rows = cache.pages.shape[2] if isinstance(cache, pages.PagesV3) else devices
  return devices == 1 or (key_heads % devices == 0 and held == key_heads and rows % devices == 0)


def _size(mesh, axes) -> int:
  return math.prod(mesh.shape[axis] for axis in axes)


def _written(mesh, axes) -> str:
  return " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes) or "one device"
