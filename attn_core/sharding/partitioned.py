# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that the compiler's partitioner shards over Auto axes, by a rule and on each device.

The partitioner propagates shardings through an operation by its rule, and then asks for the
computation of one device. Shardings arrive without names of mesh axes, and may be by parts of an
axis; they are read here as shardings over a mesh with an axis for each prime factor of the devices.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, Sharding
import numpy as np

from attn_core.array_axes import AnyMesh, Axes
from attn_core.sharding import partition


class Rule(NamedTuple):
  """Names of the dimensions of every argument and result; those of one name are sharded alike."""

  text: str  # as of `custom_partitioning`, such as "b t, b -> b t"
  replicated: tuple[str, ...] = ()  # dimensions that are not sharded, in the order of the text
  sizes: tuple[tuple[str, int], ...] = ()  # of names that are only parts of dimensions


class Plan(NamedTuple):
  """The computation of one device, and the mesh axes of every dimension around it."""

  local: Callable[..., list[jax.Array]]
  arguments: Sequence[Sequence[Axes]]
  results: Sequence[Sequence[Axes]]


class Chosen(Protocol):
  """An array with the sharding that the partitioner has chosen for it."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def sharding(self) -> Sharding: ...


# (mesh, arguments, results) -> the plan
Planner = Callable[[AbstractMesh, Sequence[Chosen], Sequence[Chosen]], Plan]
Context = mlir.LoweringRuleContext
Value = Any  # a value of the lowered program


def is_sharded(ctx: Context) -> bool:
  """Whether a computation is lowered for several devices, and not by parts of a shard_map.

  A program of `jax.export` must not call back this process: its computations are whole, and the
  compiler partitions them as it does those of `jax.numpy`.
  """
  context = ctx.module_context
  return (getattr(context.axis_context, "num_devices", 1) > 1
          and not context.lowering_parameters.for_export)


def operation(results: Sequence[jax.core.ShapedArray], rule: Rule, planner: Planner,
              mesh: AnyMesh) -> Callable[..., list[jax.Array]]:
  """Returns an operation for `lower`, with the arguments of `Plan.local`.

  Args:
    results: shapes and dtypes of the results.
    rule: how shardings propagate.
    planner: makes the computation of one device.
    mesh: the mesh of the arguments.
  """
  digits = _digits(mesh)

  def split(_: Any, arguments: Any, results: Any) -> tuple:
    plan = planner(digits, arguments, results)
    named = lambda tree: [NamedSharding(digits, partition.to_spec(axes)) for axes in tree]
    return digits, _without_mesh(plan.local), named(plan.results), tuple(named(plan.arguments))

  # Its own computation, on one device, is never lowered; JAX reads the types of its results.
  found = custom_partitioning(lambda *_: [jnp.zeros(x.shape, x.dtype) for x in results])
  found.def_partition(partition=split, sharding_rule=rule.text, decode_shardings=False,
                      need_replication_factors=rule.replicated, **dict(rule.sizes))
  return found


def lower(ctx: Context, compute: Callable[..., list[jax.Array]],
          arguments: Sequence[Value]) -> Sequence[Value]:
  """Lowers a computation with an `operation` in it, for several devices.

  Args:
    ctx: the context of a lowering rule.
    compute: the computation.
    arguments: values of the lowered program.
  """
  # Devices are only counted. If JAX's own lowering asked for them, a program could have one mesh.
  context = ctx.module_context
  axes: Any = context.axis_context
  context = context.replace(axis_context=dataclasses.replace(
      axes, device_assignment=tuple(range(axes.num_devices))))
  return mlir.lower_fun(compute, multiple_results=True)(
      ctx.replace(module_context=context), *arguments)


def axes_of(x: Chosen, mesh: AbstractMesh) -> list[Axes]:
  """Returns the mesh axes of a `Planner` that shard each dimension; () where none or others do."""
  slices = x.sharding.devices_indices_map(x.shape)
  blocks = x.sharding.shard_shape(x.shape)
  found = []
  for dimension, (size, block) in enumerate(zip(x.shape, blocks)):
    index = np.array([(slices[device][dimension].start or 0) // max(block, 1)
                      for device in range(mesh.size)]).reshape(mesh.axis_sizes)
    found.append(_axes_of_index(index, mesh.axis_names) if size == 0 or size % block == 0 else ())
  return found


def _axes_of_index(index: np.ndarray, names: Sequence[str]) -> Axes:
  """Returns the axes that count the number of a device's block, the slowest first; () if none do.

  Args:
    index: the number of the block of each device of a mesh.
    names: the axes of the mesh.
  """
  first = (0,) * index.ndim
  strides = [int(index[first[:i] + (1,) + first[i + 1:]]) for i in range(index.ndim)]
  counted = sum((stride * np.arange(size).reshape(-1, *[1] * (index.ndim - i - 1))
                 for i, (stride, size) in enumerate(zip(strides, index.shape))), np.array(0))
  axes = sorted((i for i, stride in enumerate(strides) if stride), key=lambda i: -strides[i])
  expected = [math.prod(index.shape[j] for j in axes[n + 1:]) for n in range(len(axes))]
  if [strides[i] for i in axes] != expected or not np.array_equal(
      np.broadcast_to(counted, index.shape), index):
    return ()
  return tuple(names[i] for i in axes)


def _digits(mesh: AnyMesh) -> AbstractMesh:
  """Returns a mesh with an axis for each prime factor of the axes."""
  sizes = tuple(prime for size in mesh.shape.values() for prime in _primes(size))
  return AbstractMesh(sizes, tuple(f"digit{i}" for i in range(len(sizes))))


def _primes(number: int) -> list[int]:
  found, prime = [], 2
  while number > 1:
    while number % prime == 0:
      found.append(prime)
      number //= prime
    prime += 1
  return found


def _without_mesh(local: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function that is traced as on one device, whatever mesh the program has set."""
  def traced(*arguments: jax.Array) -> Any:
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
      closed, shapes = jax.make_jaxpr(local, return_shape=True)(*arguments)
      return jax.tree.unflatten(jax.tree.structure(shapes), _local_p.bind(
          *closed.consts, *arguments, closed=closed))
  return traced


def _lower_local(ctx: Any, *arguments: Value, closed: Any) -> Sequence[Value]:
  """Lowers a computation of one device without the lines of Python that its operations come from.

  XLA renumbers these when it inserts the computation into the program, and where it then inlines a
  loop of one iteration it does not return (jax 0.12.0.1).
  """
  limit = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
  jax.config.update("jax_traceback_in_locations_limit", 0)
  try:
    context = ctx.module_context
    context = context.replace(traceback_caches=type(context.traceback_caches)())
  finally:
    jax.config.update("jax_traceback_in_locations_limit", limit)
  return mlir.lower_fun(_run_local, multiple_results=True)(
      ctx.replace(module_context=context), *arguments, closed=closed)


def _run_local(*arguments: jax.Array, closed: Any) -> list[jax.Array]:
  count = len(closed.consts)
  return jaxpr_as_fun(closed.replace(consts=list(arguments[:count])))(*arguments[count:])


_local_p = Primitive("local_part")
_local_p.multiple_results = True
_local_p.def_impl(_run_local)
_local_p.def_abstract_eval(lambda *_, closed: closed.out_avals)
mlir.register_lowering(_local_p, _lower_local)
