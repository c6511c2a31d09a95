# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharding of one sequence over devices: the mesh axes, the order of tokens, the communication.

The devices form `members` of `group` devices each; the device's index in its group is the fastest
part of the shard's number. Within a group queries, keys and values are exchanged so that each
device has all tokens of the group and a part of the heads; between members keys and values move.
"""

import functools
import hashlib
import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from attn_core.array_axes import AnyMesh
from attn_core.sharding import token_order
from attn_core.types import RingConfig, TokenOrder


class Sequence(NamedTuple):
  """Sharding of one sequence; static."""

  layout: TokenOrder
  gathers: bool  # whether all members gather keys and values, instead of a ring
  key_axes: tuple[str, ...]  # the mesh axes between members
  head_axes: tuple[str, ...]  # the mesh axes within a group
  members: int
  group: int
  scan: bool  # whether the steps of a ring are those of a `lax.scan`
  queries: int  # T, before padding
  keys: int  # S, before padding
  mesh_axes: tuple[str, ...] = ()  # all axes of the mesh
  mesh_number: int = 0  # differs between meshes; see `mesh_number`
  cores: int = 1  # cores of a device that share a kernel; 1 if the devices are not known
  is_split: bool = False  # whether the caller's shard_map has split the arrays already

  @property
  def axes(self) -> tuple[str, ...]:
    """The mesh axes that shard the sequence."""
    return self.key_axes + self.head_axes

  @property
  def size(self) -> tuple[int, int]:
    """(T, S), before padding."""
    return self.queries, self.keys

  @property
  def shards(self) -> int:
    """The number of shards."""
    return self.members * self.group

  def padded(self, length: int) -> int:
    """Returns the length with padding to a multiple of the shards."""
    return -(-length // self.shards) * self.shards

  def rows(self, member: jax.Array | int) -> jax.Array | np.ndarray:
    """Returns the numbers of a member's queries in its order, int32 [T / members]."""
    return self._tokens(self.queries, member)

  def columns(self, member: jax.Array | int) -> jax.Array | np.ndarray:
    """Returns the numbers of a member's keys in its order, int32 [S / members]."""
    return self._tokens(self.keys, member)

  def _tokens(self, length: int, member: jax.Array | int) -> jax.Array | np.ndarray:
    shards = member * self.group + token_order.numbers(self.group)
    return token_order.tokens_of(self.layout, self.padded(length), self.shards, shards).reshape(-1)

  def runs(self, all_keys: bool) -> tuple[int, int]:
    """Returns the runs of a member's queries, and of the keys of one member or of all members.

    The tokens of a run are `stride` apart.
    """
    if self.layout == "contiguous":
      return 1, 1
    of_member = self.group * token_order.pieces(self.layout)
    return of_member, of_member * (self.members if all_keys else 1)

  @property
  def stride(self) -> int:
    """The distance of neighbors in a run of `runs`."""
    return self.shards if self.layout == "striped" else 1

  @property
  def attended_runs(self) -> tuple[int, int]:
    """The runs of queries, and of the keys that they attend to at once; see `runs`."""
    return self.runs(self.gathers)

  @property
  def run_lengths(self) -> tuple[int, int]:
    """The queries of a run and the keys of a run, with padding."""
    queries, keys = self.runs(False)
    return (self.padded(self.queries) // (self.members * queries),
            self.padded(self.keys) // (self.members * keys))

  @property
  def is_natural(self) -> bool:
    """Whether the concatenated shards are the sequence in its order, without padding."""
    return self.layout == "contiguous" and not (self.queries % self.shards
                                                or self.keys % self.shards)


def axes_of(config: RingConfig, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the mesh axes between members and those within a group; see `Sequence`."""
  if config.variant == "ulysses":
    return (), (name,)
  return (name,), () if config.heads_axis_name is None else (config.heads_axis_name,)


def shards_of(config: RingConfig, name: str, mesh: AnyMesh | None) -> int:
  """Returns the number of shards; 1 without a mesh."""
  axes = sum(axes_of(config, name), ())
  return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in axes)


def split_shards(config: RingConfig, name: str) -> int:
  """Returns the number of shards that the caller's shard_map has split a sequence into; else 1."""
  mesh = jax.sharding.get_abstract_mesh()
  return shards_of(config, name, mesh) if is_split(config, name, mesh) else 1


def is_split(config: RingConfig, name: str, mesh: AnyMesh) -> bool:
  """Whether the axes of the sequence are Manual: those of a surrounding shard_map."""
  return any(axis in mesh.manual_axes and mesh.shape[axis] > 1
             for axis in sum(axes_of(config, name), ()))


def require_axes(config: RingConfig, name: str, mesh: AnyMesh) -> None:
  """Checks the mesh axes.

  Raises:
    ValueError: an axis that does not exist, or that is given twice, or of two axes only one is
      Manual.
  """
  between, within = axes_of(config, name)
  fields = dict.fromkeys(between + within, "sequence_axis_name")
  fields.update(dict.fromkeys(within if between else (), "ring.heads_axis_name"))
  if len(fields) < len(between + within):
    raise ValueError(f"ring.heads_axis_name={name!r}: expected another mesh axis than "
                     "sequence_axis_name, which is the same")
  for axis, field in fields.items():
    if axis not in mesh.shape:
      raise ValueError(f"{field}={axis!r}: expected an axis of the mesh, which has "
                       f"{tuple(mesh.axis_names)}; create_mesh makes one with 'sp'")
  several = [axis for axis in fields if mesh.shape[axis] > 1]
  manual = [axis for axis in several if axis in mesh.manual_axes]
  if manual and manual != several:
    rest = [axis for axis in several if axis not in manual]
    raise ValueError(f"{fields[rest[0]]}={rest[0]!r}: got an axis that the surrounding shard_map "
                     f"over {manual[0]!r} leaves out; expected both or none of the axes of the "
                     f"sequence in its axis_names: add {rest[0]!r}, or leave {manual[0]!r} out")


@functools.lru_cache(maxsize=64)
def mesh_number(mesh: AnyMesh) -> int:
  """Returns a number below 2**31 that differs between meshes, the same in every process.

  Meshes of other devices, another order of them or another shape have other numbers, but for one
  pair in 2**31. An abstract mesh does not know its devices: its number depends on its shape alone.
  """
  devices = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None
  digest = hashlib.sha256(repr((tuple(mesh.shape.values()), devices)).encode()).digest()
  return int.from_bytes(digest[:4], "big") >> 1  # `hash` differs between processes


def shard_sequence(config: RingConfig, name: str, scan: bool, mesh: AnyMesh,
           shapes: tuple[int, int, int]) -> Sequence | None:
  """Returns the sharding of a sequence over a mesh.

  Args:
    config: variant and layout.
    name: `OperationMetadata.sequence_axis_name`.
    scan: whether the steps of a ring are those of a `lax.scan`.
    mesh: a mesh with these axes, see `require_axes`.
    shapes: (T, S, query heads of one device); T and S of one shard where the caller's shard_map
      has split the sequence.

  Returns:
    The sharding; None if there is one shard.

  Raises:
    ValueError: a length that the layout does not divide, or heads that the group does not divide.
  """
  queries, keys, heads = shapes
  between, within = axes_of(config, name)
  members, group = (math.prod(mesh.shape[axis] for axis in axes) for axes in (between, within))
  if members * group == 1:
    return None
  split = is_split(config, name, mesh)
  if split:
    queries, keys = queries * members * group, keys * members * group
  for what, length in (("query length", queries), ("key length", keys)):
    token_order.require_length(what, config.layout, length, members * group)
  if heads % group:
    sizes = [n for n in range(2, members * group) if not (heads % n or members * group % n)]
    hybrid = f", or 'hybrid' with a heads axis of size {' or '.join(map(str, sizes))}"
    raise ValueError(
        f"ring.variant={config.variant!r}: got {heads} query heads a device for the {group} "
        f"devices of mesh axis {within[0]!r}; expected a multiple of {group}; variants 'ring' and "
        f"'all_gather' take any number{hybrid if sizes else ''}")
  device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else getattr(
      mesh, "abstract_device", None)
  return Sequence(config.layout, config.variant == "all_gather", between, within, members, group,
                  scan, queries, keys, tuple(mesh.axis_names),
                  mesh_number(mesh), getattr(device, "num_cores", None) or 1, split)
