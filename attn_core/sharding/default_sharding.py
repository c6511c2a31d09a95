# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A default sharding for an array that the compiler's partitioner would leave unsharded.

`jax.lax.with_sharding_constraint` moves an array that is sharded otherwise. Here an array keeps its
sharding, and takes the preferred one in the dimensions that nothing else shards: an operation reads
it together with small arrays with the preferred sharding, one for each dimension, and the
partitioner propagates a sharding from them where the array has none. An axis that shards another
dimension of the array is not used twice.
"""

from typing import Any, Mapping, Sequence

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from attn_core.array_axes import AnyMesh, Axes
from attn_core.sharding import partition, partitioned


def prefer(x: jax.Array, mesh: AnyMesh, axes: Mapping[int, Axes]) -> jax.Array:
  """Returns an array, sharded over mesh axes in dimensions where it is not sharded otherwise.

  Args:
    x: any array.
    mesh: a mesh of Auto axes.
    axes: dimension -> mesh axes that divide it.
  """
  axes = {dimension: found for dimension, found in axes.items() if found}
  if not axes:
    return x
  examples = [jax.lax.with_sharding_constraint(
      jnp.zeros(x.shape[dimension], jnp.int8), NamedSharding(mesh, partition.to_spec([found])))
              for dimension, found in axes.items()]
  return _prefer_p.bind(x, *examples, dimensions=tuple(axes), mesh=mesh)


def _plan(mesh: AbstractMesh, arguments: Sequence[partitioned.Chosen],
          results: Sequence[partitioned.Chosen]) -> partitioned.Plan:
  """Plans a result that is the same on every device."""
  del results
  return partitioned.Plan(lambda *_: [jnp.zeros(1, jnp.int8)],
                          [partitioned.axes_of(x, mesh) for x in arguments], [[()]])


def _lower(ctx: partitioned.Context, x: Any, *examples: Any, dimensions: tuple[int, ...],
           mesh: AnyMesh) -> Any:
  if not partitioned.is_sharded(ctx):
    return [x]
  names = [f"n{i}" for i in range(len(ctx.avals_in[0].shape))]  # type: ignore[attr-defined]
  rule = partitioned.Rule(
      f"{', '.join([' '.join(names), *(names[d] for d in dimensions)])} -> one", ("one",))
  tie = partitioned.operation([jax.core.ShapedArray((1,), jnp.int8)], rule, _plan, mesh)

  def compute(x: jax.Array, *examples: jax.Array) -> list[jax.Array]:
    # The partitioner goes through barriers before it asks for rules: the sharding of x comes first,
    # and the operation, which reads both, then brings those of the examples to what has none.
    x = jax.lax.optimization_barrier(x)
    return [jax.lax.optimization_barrier((x, *tie(x, *examples)))[0]]

  return partitioned.lower(ctx, compute, (x, *examples))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, dimensions: tuple[int, ...],
         mesh: AnyMesh) -> tuple:
  # Derivatives are sharded as whatever they are computed from.
  return _prefer_p.bind(*primals, dimensions=dimensions, mesh=mesh), tangents[0]


def _batch(arguments: Sequence[Any], dims: Sequence[int | None], *,
           dimensions: tuple[int, ...], mesh: AnyMesh) -> tuple[jax.Array, int | None]:
  (x, *examples), (dim, *_) = arguments, dims
  if dim is None:
    return _prefer_p.bind(x, *examples, dimensions=dimensions, mesh=mesh), None
  return _prefer_p.bind(jnp.moveaxis(x, dim, 0), *examples,
                        dimensions=tuple(d + 1 for d in dimensions), mesh=mesh), 0


_prefer_p = Primitive("prefer_sharding")
_prefer_p.def_impl(lambda x, *examples, dimensions, mesh: x)
_prefer_p.def_abstract_eval(lambda x, *examples, dimensions, mesh: x)
mlir.register_lowering(_prefer_p, _lower)
ad.primitive_jvps[_prefer_p] = _jvp
batching.primitive_batchers[_prefer_p] = _batch
