# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A normalized call placed on the mesh, and the question which implementation supports it there."""

import jax

from attn_core.arguments.normalize import Normalized
from attn_core.config import metadata as metadata_lib
from attn_core.dispatch import selection
from attn_core.dispatch.capabilities import Implementation, Request
from attn_core.sharding import context_parallel, placement as placement_lib


def question_of(normal: Normalized) -> selection.Question:
  """Returns the question which implementation supports a call; its placements are cached."""
  requests: dict[tuple[bool, bool], Request] = {}

  def request_for(implementation: Implementation) -> Request:
    placing = implementation.shards_sequence, implementation.shards_keys
    if placing not in requests:
      requests[placing] = _placed_request(normal, implementation)
    return requests[placing]

  target = selection.Target(metadata_lib.resolved_platform(normal.metadata),
                            normal.request.capability)
  return selection.Question(target, normal.request.lengths[0] == 1, request_for)


def _placed_request(normal: Normalized, implementation: Implementation) -> Request:
  """Returns the request of one device, where the call is placed for an implementation."""
  request = normal.request
  if normal.rules is None:  # pages are placed by their own rules
    return request
  try:
    placement = place(normal, implementation)
  except (NotImplementedError, ValueError) as error:
    return request._replace(placement_error=error)
  query, key = placement_lib.local_shapes(placement, request.query.shape, request.key.shape)
  resized = lambda x, shape: jax.ShapeDtypeStruct((*shape[:3], x.shape[3]), x.dtype)
  return request._replace(query=resized(request.query, query), key=resized(request.key, key),
                          value=resized(request.value, key), placement=placement)


def place(normal: Normalized,
          implementation: Implementation | None) -> placement_lib.Placement | None:
  """Returns the placement of a call; the implementation decides about the sequence and the keys.

  Raises:
    ValueError: the mesh or the lengths do not fit `ring`.
  """
  if normal.rules is None:  # pages are placed by their own rules
    return normal.request.placement
  query, key, metadata = normal.call.operands.query, normal.call.operands.key, normal.metadata
  whole_mesh = metadata_lib.resolved_mesh(metadata)
  mesh = placement_lib.mesh_in_force(whole_mesh)
  reserved: tuple[str, ...] = ()
  ring = metadata.ring, metadata.sequence_axis_name
  if implementation is not None and implementation.shards_sequence and mesh is not None:
    context_parallel.require_axes(*ring, mesh)
    reserved = sum(context_parallel.axes_of(*ring), ())
  placement = placement_lib.place(
      normal.rules, mesh, query.shape, key.shape, reserved,
      shard_keys=implementation is not None and implementation.shards_keys)
  if placement is None and mesh is not None and context_parallel.is_split(*ring, mesh):
    placement = placement_lib.Placement(mesh, (), (), (), ())
  if placement is None or mesh is None or not reserved:
    return placement
  heads = query.shape[2] // placement.size(placement.heads)
  sequence = context_parallel.shard_sequence(
      *ring, metadata.scan_ring_attention, mesh, (query.shape[1], key.shape[1], heads))
  if sequence is not None and whole_mesh is not None:
    # Inside the caller's shard_map the mesh in force does not know its devices.
    sequence = sequence._replace(mesh_number=context_parallel.mesh_number(whole_mesh))
  return placement._replace(sequence=sequence)
