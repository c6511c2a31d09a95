# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages on a mesh by `jax.shard_map`: request groups, heads and stripes.

Groups (see `caches.paged.request_groups`) and heads are independent, so devices do not communicate,
and each holds only the pages of its groups and key heads. The keys of a request stay on one device
unless its pages are in stripes: the mesh axes of the key sequence shard the stripes, and partial
results are combined. `paged_placement` chooses the mesh axes.
"""

from typing import Any, Callable, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from attn_core.array_axes import reshard, size_of, typed_spec
from attn_core.caches.paged import layouts, request_groups
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages
from attn_core.score_mods import score_mod
from attn_core.sharding import shard_map, varying_axes
from attn_core.sharding.placement import Placement
from attn_core.types import NO_SCORE_MOD, AttentionOutput, Call, PagedOperands


class PagedShapes(NamedTuple):
  """Shapes of one kernel call over pages: one group of requests on one device."""

  query: jax.ShapeDtypeStruct  # [T, H, D]
  cache: Pages  # of shapes
  metadata: layouts.PagesMetadata  # of shapes
  heads: layouts.Heads  # without padding


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
  specs = _specs(call.operands, placement, call.spec.score_mod)
  operands = shard_map.resharded(call.operands, specs, placement.mesh)
  rows, heads = placement.batch or None, placement.heads or None
  out_specs = shard_map.output_like(
      P(None, rows, heads), lse=P(None, heads, rows) if call.return_lse else None,
      cache_view=specs.cache if writes else None)
  if varying_axes.of(operands):
    output = shard_map.inside_a_checked_one(local, placement.mesh, specs, out_specs)(operands)
  else:
    output = jax.shard_map(local, mesh=placement.mesh, in_specs=(specs,),
                           out_specs=out_specs)(operands)
  if not writes or not placement.mesh.explicit_axes:
    return output
  as_before = lambda new, old: reshard(new, placement.mesh, P(*typed_spec(old)))
  return output._replace(cache_view=jax.tree.map(
      as_before, output.cache_view, call.operands.cache))


def local_shapes(operands: PagedOperands, placement: Placement | None,
                 heads: layouts.Heads) -> PagedShapes:
  """Returns the shapes in one call of a kernel.

  Args:
    operands: the operands of the call.
    placement: None: one device.
    heads: those of the call, without padding.
  """
  local = _device_shapes(operands._replace(up=()), placement)  # no kernel reads up-projections
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
  operands = operands._replace(mods=())  # which decide nothing
  def shard(x: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
    sizes = [size_of(placement.mesh, entry) for entry in spec]
    shape = [n // m for n, m in zip(x.shape, sizes + [1] * x.ndim)]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
  return jax.tree.map(shard, operands, _specs(operands, placement, NO_SCORE_MOD))


def _specs(operands: PagedOperands, placement: Placement,
           structure: jax.tree_util.PyTreeDef) -> PagedOperands:
  """Returns the spec of each operand.

  Args:
    operands: of all devices.
    placement: the mesh axes.
    structure: of the score mod.
  """
  rows, heads, of_keys, keys, parts = (axes or None for axes in (
      placement.batch, placement.heads, placement.key_heads, placement.keys,
      placement.batch + placement.keys))
  def of_cache(x: jax.Array) -> P:
    if x.ndim == 0:  # one scale for all
      return P()
    if isinstance(operands.cache, PagesLatent):
      return P(parts)
    # Scales of 4 bits have four dimensions too, in the order of those of 8.
    heads_first = (isinstance(operands.cache, layouts.PagesV1)
                   and x.dtype == layouts.dtype_of(operands.cache))
    return P(of_keys, parts) if heads_first else P(parts, None, of_keys)
  def of_mod(x: jax.Array, role: str) -> P:
    own = heads if x.shape[1] > 1 else None
    return P(None, own, rows) if role == score_mod.PAIR and x.shape[2] > 1 else P(None, own)
  roles = score_mod.structure_roles(structure)
  whole: dict[str, Any] = {"query": P(rows, heads), "key": P(rows, of_keys),
                           "value": P(rows, of_keys), "sinks": P(heads),
                           "mods": tuple(map(of_mod, operands.mods, roles))}
  return operands._replace(
      cache=jax.tree.map(of_cache, operands.cache),
      metadata=jax.tree.map(lambda x: P(rows) if rows else P(), operands.metadata)._replace(
          page_tables=P(rows, keys)),
      **{name: spec for name, spec in whole.items() if getattr(operands, name) is not None})
