# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A normalized call placed on the mesh, and the question which implementation supports it there."""

import jax

from attn_core import array_axes
from attn_core.arguments.normalize import Normalized
from attn_core.config import metadata as metadata_lib
from attn_core.config.metadata import OperationMetadata
from attn_core.dispatch import selection
from attn_core.dispatch.capabilities import Implementation, Request
from attn_core.sharding import context_parallel, explicit_axes, placement as placement_lib
from attn_core.types import are_known, output_width

# Platforms whose compilers take a partitioner of operations from a library; libtpu takes none.
PARTITIONED = ("cpu", "gpu")


def question_of(normal: Normalized) -> selection.Question:
  """Returns the question which implementation supports a call; its placements are cached."""
  requests: dict[tuple[bool, bool, bool], Request] = {}

  def request_for(implementation: Implementation) -> Request:
    placing = (implementation.shards_sequence, implementation.shards_keys,
               implementation.has_partitioner)
    if placing not in requests:
      requests[placing] = _placed_request(normal, implementation)
    return requests[placing]

  target = selection.Target(metadata_lib.resolved_platform(normal.metadata),
                            normal.request.capability)
  queries, keys = normal.request.lengths
  is_cached = "cache" in normal.request.features and are_known(queries)
  return selection.Question(target, queries == 1 and keys != 1, queries if is_cached else None,
                            request_for)


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
    ValueError: the mesh or the lengths do not fit `ring`; or an Auto axis that the metadata does
      not know, where the partitioner cannot place the call.
  """
  if normal.rules is None:  # pages are placed by their own rules
    return normal.request.placement
  query, key, value = normal.call.operands[:3]
  typed_mesh = array_axes.typed_mesh(query, key, value)
  whole_mesh = metadata_lib.resolved_mesh(normal.metadata)
  mesh = placement_lib.mesh_in_force(typed_mesh or whole_mesh)
  if mesh is None:
    return (placement_lib.of_types(query)
            if metadata_lib.resolved_platform(normal.metadata) in PARTITIONED else None)
  reserved = _sequence_axes(normal, implementation, mesh)
  if not are_known(*query.shape, *key.shape) and (
      mesh.explicit_axes or not placement_lib.is_single(mesh)):
    return _of_symbolic_sizes(normal, mesh)
  typed = None if typed_mesh is None else explicit_axes.rules_of(query, key, mesh, reserved)
  placement = placement_lib.place(
      placement_lib.ordered_rules(normal.rules, mesh, typed), mesh, query.shape, key.shape,
      reserved, shard_keys=implementation is not None and implementation.shards_keys)
  if placement is None and reserved and context_parallel.is_split(
      normal.metadata.ring, normal.metadata.sequence_axis_name, mesh):
    placement = placement_lib.Placement(mesh, (), (), (), ())
  if placement is None:
    return None
  if typed is not None:
    placement = placement._replace(output=explicit_axes.output_spec(
        query, output_width(normal.call.operands, normal.call.spec), mesh))
  if reserved:
    placement = placement._replace(sequence=_sequence(normal, placement, whole_mesh))
  return _left_to_the_partitioner(
      placement, normal.metadata, implementation is not None and implementation.has_partitioner)


def _of_symbolic_sizes(normal: Normalized,
                       mesh: array_axes.AnyMesh) -> placement_lib.Placement:
  """Returns the placement of a call for `jax.export` with sizes that may not divide the mesh.

  Raises:
    NotImplementedError: only a shard_map could run the call. Calls of a program exported with a
      shard_map of symbolic sizes fail in JAX: an error in 0.10.2, a crash in 0.12.0.1.
  """
  if (placement_lib.is_auto(mesh)
      and metadata_lib.resolved_platform(normal.metadata) in PARTITIONED):
    return placement_lib.Placement(mesh, (), (), (), (), partitioner=True)
  query = normal.call.operands.query
  raise NotImplementedError(
      f"query {query.dtype}[{', '.join(map(str, query.shape))}] on the mesh {dict(mesh.shape)}: "
      "symbolic sizes of jax.export over several devices are supported on Auto axes of CPUs and "
      "GPUs only, as JAX does not call exported shard_maps of symbolic sizes; export a program for "
      "each size, or set axis_types of the mesh to AxisType.Auto")


def _sequence_axes(normal: Normalized, implementation: Implementation | None,
                   mesh: array_axes.AnyMesh) -> tuple[str, ...]:
  """Returns the mesh axes that shard the sequence, checked; () if none does."""
  if implementation is None or not implementation.shards_sequence:
    return ()
  ring = normal.metadata.ring, normal.metadata.sequence_axis_name
  context_parallel.require_axes(*ring, mesh)
  return sum(context_parallel.axes_of(*ring), ())


def _sequence(normal: Normalized, placement: placement_lib.Placement,
              whole_mesh: array_axes.AnyMesh | None) -> context_parallel.Sequence | None:
  """Returns the sharding of the sequence of a placed call."""
  query, key, metadata = normal.call.operands.query, normal.call.operands.key, normal.metadata
  heads = query.shape[2] // placement.size(placement.heads)
  sequence = context_parallel.shard_sequence(
      metadata.ring, metadata.sequence_axis_name, metadata.scan_ring_attention, placement.mesh,
      (query.shape[1], key.shape[1], heads))
  if sequence is not None and whole_mesh is not None:
    # Inside the caller's shard_map the mesh in force does not know its devices.
    sequence = sequence._replace(mesh_number=context_parallel.mesh_number(whole_mesh))
  return sequence


def _left_to_the_partitioner(placement: placement_lib.Placement,
                             metadata: OperationMetadata,
                             has_partitioner: bool) -> placement_lib.Placement:
  """Returns the placement, marked where the compiler's partitioner knows how arrays are sharded.

  Args:
    placement: of the call.
    metadata: of the call.
    has_partitioner: of the implementation.

  Raises:
    ValueError: an Auto axis that the metadata does not know, where the partitioner cannot place the
      call.
  """
  unknown = placement_lib.unknown_axes(placement, metadata.partition_axis)
  platform = metadata_lib.resolved_platform(metadata)
  if placement.sequence is not None or placement.keys:
    why = "of a mesh whose other axes shard the sequence or the keys"
  elif not placement_lib.is_auto(placement.mesh):
    why = "of a mesh with Explicit or Manual axes"
  elif platform not in PARTITIONED:
    why = f"on platform {platform!r}, whose compiler asks no library for partitions"
  else:
    # JAX's rules for cuDNN take no key heads that are sharded otherwise than the query heads.
    better = not has_partitioner or bool(unknown) or placement_lib.is_ambiguous(placement)
    return placement._replace(partitioner=better)
  if unknown:
    raise placement_lib.unknown_axes_error(unknown, why)
  return placement
