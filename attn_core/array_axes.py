# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mesh axes that shard an array, as its type says, and the mesh in force.

The type of an array names the axes of type Explicit that shard each dimension. Axes of type Auto
are not in it: during tracing they are not known.
"""

from collections.abc import Callable, Collection
import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike

AnyMesh = Mesh | AbstractMesh
Axes = tuple[str, ...]
Entry = str | Axes | None  # of a PartitionSpec
Tree = TypeVar("Tree")


def axes_of(entry: Entry) -> Axes:
  """Returns the mesh axes of an entry of a PartitionSpec."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_among(spec: P, chosen: Collection[str]) -> list[Axes]:
  """Returns those of some mesh axes that each entry of a PartitionSpec has."""
  return [tuple(axis for axis in axes_of(entry) if axis in chosen) for entry in spec]


def size_of(mesh: AnyMesh, axes: Entry) -> int:
  """Returns the number of devices along some mesh axes."""
  return math.prod(mesh.shape[axis] for axis in axes_of(axes))


def typed_mesh(*arrays: ArrayLike) -> AnyMesh | None:
  """Returns the mesh of the first array whose type has Explicit axes; None without such arrays."""
  for x in arrays:
    mesh: AnyMesh = jax.typeof(x).sharding.mesh
    if mesh.explicit_axes:
      own = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
      # Outside of jit and of jax.set_mesh only a mesh with devices says where other arrays go.
      if isinstance(own, NamedSharding) and jax.sharding.get_abstract_mesh().empty:
        return own.mesh
      return mesh
  return None


def typed_spec(x: ArrayLike) -> tuple[Entry, ...]:
  """Returns an entry for each dimension of an array: the Explicit axes that shard it."""
  aval = jax.typeof(x)
  spec = tuple(aval.sharding.spec)
  return spec + (None,) * (aval.ndim - len(spec))


def typed_axes(x: ArrayLike) -> list[Axes]:
  """Returns the Explicit axes that shard each dimension of an array."""
  return [axes_of(entry) for entry in typed_spec(x)]


def reshard(x: ArrayLike, mesh: AnyMesh, spec: P) -> jax.Array:
  """Returns an array of this sharding; its cotangent has the sharding that it had before."""
  return jax.sharding.reshard(x, NamedSharding(mesh, spec))


class Parts(NamedTuple):
  """Division of an array by Explicit mesh axes."""

  mesh: AnyMesh
  spec: tuple[Entry, ...]  # one entry for each dimension

  def axes(self, dimension: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dimension."""
    return axes_of(self.spec[dimension])

  def run(self, local: Callable[..., Tree], arrays: tuple, specs: tuple,
          out_specs: object) -> Tree:
    """Runs `local` on each device's part of some arrays.

    Args:
      local: a function of the parts.
      arrays: pytrees of arrays, which are resharded where they are sharded otherwise.
      specs: a pytree of PartitionSpec for each of them.
      out_specs: those of the results.

    Returns:
      The concatenated results.
    """
    placed = jax.tree.map(lambda x, spec: reshard(x, self.mesh, spec), arrays, specs)
    return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs,
                         axis_names=set(self.mesh.explicit_axes))(*placed)


def parts_of(array: ArrayLike, *others: ArrayLike) -> Parts | None:
  """Returns how Explicit axes shard an array.

  Args:
    array: the array.
    *others: arrays of the same computation, which may be on a mesh where `array` is on none.

  Returns:
    None if no array is on a mesh with Explicit axes.
  """
  mesh = typed_mesh(array, *others)
  return None if mesh is None else Parts(mesh, typed_spec(array))


def count_reached(bounds: jax.Array, numbers: jax.Array) -> jax.Array:
  """Returns how many bounds are at most each number, int32, as `jnp.searchsorted(side="right")`.

  JAX (0.10.2 to 0.12.0.1) cannot trace that function inside of a shard_map over some axes of a mesh
  that tracks over which of them values vary.
  """
  return (bounds[None] <= numbers[:, None]).sum(1, dtype=jnp.int32)


def current_mesh() -> AnyMesh:
  """Returns the mesh of `jax.set_mesh`, which is abstract during tracing; it may be empty.

  A surrounding `jax.shard_map` has marked axes of an abstract mesh as Manual.
  """
  try:
    mesh = jax.sharding.get_mesh()
  except ValueError:  # get_mesh raises during tracing
    return jax.sharding.get_abstract_mesh()
  return jax.sharding.get_abstract_mesh() if mesh.empty else mesh
