# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays of a cache that are sharded over a mesh: their creation, and writes on each device's part.

The type of an array says how mesh axes of type Explicit shard it, and JAX does not derive that of a
scatter or of a gather. Here these run by `jax.shard_map` over the Explicit axes: each device looks
for the indices of its own part and drops the others. Axes of type Auto are left to the partitioner.
"""

from collections.abc import Callable, Sequence
import functools
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from attn_core import checks
from attn_core.array_axes import (Entry, axes_among, axes_of, current_mesh, parts_of, reshard,
                                  size_of)

if TYPE_CHECKING:  # for annotations only: these modules import this one
  from attn_core.caches.dense import DenseCache
  from attn_core.caches.window import WindowCache

Sharding = NamedSharding | P
Cache = TypeVar("Cache", "DenseCache", "WindowCache")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Kept(NamedTuple):
  """A sharding over Auto axes that updates of a cache keep; static.

  The type of an array does not tell it during tracing.
  """

  mesh: AbstractMesh
  spec: P  # of [B, S, K, D]


jax.tree_util.register_static(Kept)


def one_program(*static: str) -> Callable[[Callable[Parameters, Result]],
                                         Callable[Parameters, Result]]:
  """Decorates a function of arrays: outside of jit it is compiled, not run operation by operation.

  Within another jit its operations are part of that program.

  Args:
    *static: names of parameters that are not arrays.
  """
  return functools.partial(jax.jit, static_argnames=static, inline=True)


def local_index(index: jax.Array, size: int, axes: tuple[str, ...]) -> jax.Array:
  """Returns indices relative to a device's part; `size`, which is outside, for those of others.

  Args:
    index: int32, indices along a dimension.
    size: that of the dimension on one device.
    axes: the mesh axes that shard it.
  """
  if axes:
    index = index - lax.axis_index(axes).astype(jnp.int32) * size
  return jnp.where((index < 0) | (index >= size), size, index)


def match(x: ArrayLike, like: jax.Array, spec: Sequence[Entry] | None = None) -> jax.Array:
  """Reshards an array as another one over Explicit axes.

  Args:
    x: the array.
    like: the other one.
    spec: the entries for the dimensions of x; None: those of `like`.
  """
  parts = parts_of(like, x)
  if parts is None:
    return jnp.asarray(x)
  wanted = parts.spec[:jnp.ndim(x)] if spec is None else spec
  return reshard(x, parts.mesh, P(*wanted))


def named(sharding: Sharding | None, dimensions: str,
          shape: Sequence[int | None]) -> NamedSharding | None:
  """Checks the sharding of a new array.

  Args:
    sharding: a NamedSharding, or a PartitionSpec over the current mesh; None: not sharded.
    dimensions: the dimensions, as in an error.
    shape: the size of each dimension; None: any.

  Raises:
    ValueError: another type, no mesh, more entries than dimensions, or mesh axes that do not exist
      or do not divide a dimension.
  """
  if sharding is None:
    return None
  expected = f"a NamedSharding or a PartitionSpec of {dimensions}, or None"
  checks.require(isinstance(sharding, (NamedSharding, P)), "sharding", repr(sharding), expected)
  if isinstance(sharding, P):
    mesh = current_mesh()
    checks.require(mesh.axis_names, "sharding", f"{sharding!r} without a mesh",
                   "a NamedSharding, or a call inside jax.set_mesh(mesh)")
    known = [axis for entry in sharding for axis in axes_of(entry)]
    checks.require(set(known) <= set(mesh.axis_names), "sharding", repr(sharding),
                   f"axes of the mesh, {mesh.axis_names}")
    sharding = NamedSharding(mesh, sharding)
  checks.require(len(sharding.spec) <= len(shape), "sharding", repr(sharding.spec), expected)
  for size, entry in zip(shape, sharding.spec):
    devices = size_of(sharding.mesh, entry)
    checks.require(size is None or size % devices == 0, "sharding",
                   f"{sharding.spec!r} over {dict(sharding.mesh.shape)}",
                   f"axes that divide the dimensions {dimensions} = {list(shape)}")
  return sharding


def of_dimensions(sharding: NamedSharding | None,
                  dimensions: Sequence[int]) -> NamedSharding | None:
  """Returns the sharding of an array that has some dimensions of another one."""
  if sharding is None:
    return None
  every = entries(sharding, 1 + max(dimensions))
  return NamedSharding(sharding.mesh, P(*[every[n] for n in dimensions]))


def entries(sharding: NamedSharding, rank: int) -> tuple[Entry, ...]:
  """Returns the entries of the first `rank` dimensions."""
  given = tuple(sharding.spec)[:rank]
  return given + (None,) * (rank - len(given))


def full(shape: Sequence[int], number: float, dtype: DTypeLike,
         sharding: NamedSharding | None) -> jax.Array:
  """Creates an array of equal numbers, each device its own part only."""
  if sharding is None:
    return jnp.full(shape, number, dtype)
  if not isinstance(jnp.zeros(()), jax.core.Tracer):
    return jnp.full(shape, number, dtype, device=sharding)
  mesh = sharding.mesh
  def over(axes: Sequence[str]) -> NamedSharding:
    return NamedSharding(mesh, P(*[found or None for found in axes_among(sharding.spec, axes)]))
  x = jnp.full(shape, number, dtype)
  if mesh.explicit_axes:
    x = jax.sharding.reshard(x, over(mesh.explicit_axes))
  auto = over(mesh.auto_axes)
  return lax.with_sharding_constraint(x, auto) if any(auto.spec) else x


def kept(sharding: NamedSharding | None) -> Kept | None:
  """Returns what a cache remembers of its sharding; None: its type tells everything."""
  if sharding is None or not sharding.mesh.auto_axes:
    return None
  return Kept(sharding.mesh.abstract_mesh, P(*entries(sharding, 4)))


def keep(cache: Cache) -> Cache:
  """Constrains the arrays of an updated cache, during tracing, to its sharding over Auto axes."""
  sharding = cache.sharding
  if sharding is None:
    return cache
  context = jax.sharding.get_abstract_mesh()
  mesh = context if context.manual_axes else sharding.mesh

  def constrain(path: tuple[object, ...], x: jax.Array) -> jax.Array:
    if not isinstance(x, jax.core.Tracer):
      return x
    # The fourth dimension of scales is of groups of columns, which stay together.
    of_scales = jax.tree_util.keystr(path).endswith("_scale")
    found = axes_among(sharding.spec[:3] if of_scales else sharding.spec, mesh.auto_axes)
    sizes = [size_of(mesh, axes) for axes in found]
    spec = [axes if axes and n % size == 0 else None
            for n, axes, size in zip(x.shape, found, sizes)]
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

  return jax.tree.map_with_path(constrain, cache)


def sharding_of(x: checks.Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
  """Returns the sharding of an array or its type.

  None if it is not known: during tracing, that over axes of type Auto is not.
  """
  sharding = getattr(x, "sharding", None) if not isinstance(x, jax.core.Tracer) else None
  if not isinstance(sharding, NamedSharding):
    sharding = jax.typeof(x).sharding
  return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None
