# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes along an axis that `vmap` maps: folded into the rows of the batch, and back."""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax.interpreters import mlir
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from attn_core.array_axes import axes_of, reshard
from attn_core.masks import mask as mask_lib
from attn_core.sharding import shard_map
from attn_core.sharding.partitioned import Context, Value
from attn_core.types import Operands, mod_names


def operand_labels(structure: jax.tree_util.PyTreeDef, mask: jax.tree_util.PyTreeDef) -> list[str]:
  """Returns the name of every operand leaf; "whole" for arrays a predicate reads whole.

  Args:
    structure: of Operands.
    mask: structure of their mask.
  """
  operands: Operands = jax.tree.unflatten(structure, range(structure.num_leaves))
  fields = operands._asdict()
  roles = mask_lib.structure_roles(mask)
  arrays = ["whole" if role == mask_lib.WHOLE else "mask" for role in roles]
  rest = ["mask"] * (len(jax.tree.leaves(fields["mask"])) - len(arrays))
  # Up-projections are outside of kernels.
  labels = {"mask": arrays + rest, "mods": list(mod_names(operands)), "up": []}
  return [label for name, value in fields.items() if value is not None
          for label in labels.get(name, [name])]


def lead(x: jax.Array, dim: int | None, sizes: tuple[int, ...], full: bool) -> jax.Array:
  """Returns an array with a mapped axis first, before its other mapped axes and its rows.

  Args:
    x: its leading axes, without the mapped one, have the sizes `sizes[1:]`, or 1.
    dim: the mapped axis; None: the array is shared.
    sizes: (size of the mapped axis, those of other mapped axes, rows).
    full: whether a shared array with 1 row must not keep it. Every other array gets all rows.
  """
  x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
  if dim is None and not full and all(n == 1 for n in x.shape[:len(sizes)]):
    return x
  return jnp.broadcast_to(x, (*sizes, *x.shape[len(sizes):]))


def fold(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
  """Folds mapped axes and rows, of these sizes or all 1, into one leading axis."""
  own, rest = x.shape[:len(sizes)], x.shape[len(sizes):]
  if all(n == 1 for n in own):
    return x.reshape(1, *rest)
  return jnp.broadcast_to(x, (*sizes, *rest)).reshape(math.prod(sizes), *rest)  # may be empty


def unfold(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
  """Returns an array with mapped axes and rows, from one with one leading axis or 1 row."""
  whole = x.shape[0] == math.prod(sizes)
  return x.reshape(*(sizes if whole else (1,) * len(sizes)), *x.shape[1:])


def by_folding(compute: Callable[..., Sequence[jax.Array]], labels: Sequence[str], mapped: int,
               args: Sequence[jax.Array]) -> list[jax.Array]:
  """Computes with arrays whose rows follow mapped axes, by a function of arrays with rows only.

  Args:
    compute: the function.
    labels: of the arguments.
    mapped: number of mapped axes.
    args: the query first, which has all of them.
  """
  sizes = args[0].shape[:mapped + 1]
  found = compute(*(x if label == "whole" else fold(x, sizes) for x, label in zip(args, labels)))
  return [unfold(x, sizes) for x in found]


def empty(compute: Callable[..., list[jax.Array]], args: Sequence[jax.Array],
          dims: Sequence[int | None]) -> list[jax.Array]:
  """Returns the results for a mapped axis of size 0, which comes first in them."""
  one = jax.eval_shape(compute, *[
      x if d is None else jax.ShapeDtypeStruct((*x.shape[:d], *x.shape[d + 1:]), x.dtype)
      for x, d in zip(args, dims)])
  return [jnp.zeros((0, *x.shape), x.dtype) for x in one]


def one_by_one(compute: Callable[..., list[jax.Array]], args: Sequence[jax.Array],
               dims: Sequence[int | None], size: int) -> list[jax.Array]:
  """Returns the results of one entry of the mapped axis after another; the axis comes first."""
  leading = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
  return jax.lax.map(lambda i: compute(
      *[x if d is None else x[i] for x, d in zip(leading, dims)]), jnp.arange(size))


def by_rows(compute: Callable[..., list[jax.Array]],
            sharding: NamedSharding) -> Callable[..., list[jax.Array]]:
  """Returns a computation of each device's rows, where an Explicit axis shards them.

  That is an axis which shards a dimension that vmap maps. JAX leaves it to the computation, in a
  shard_map over other axes too. Inside of a primitive's lowering, derivatives need no rules for it.

  Args:
    compute: a function of arrays with rows, or with one row for all; its results have all rows.
    sharding: of the first array, which has all rows.
  """
  axes, mesh = axes_of(sharding.spec[0]), sharding.mesh.abstract_mesh

  def run(*args: jax.Array) -> list[jax.Array]:
    specs = tuple(P(axes) if x.ndim and x.shape[0] == args[0].shape[0] else P() for x in args)
    with jax.sharding.use_abstract_mesh(mesh):
      return jax.shard_map(
          compute, mesh=mesh, in_specs=specs, out_specs=P(axes), axis_names=set(axes),
          check_vma=False)(*(reshard(x, mesh, spec) for x, spec in zip(args, specs)))
  return run


def lower(ctx: Context, inner: Context, compute: Callable[..., list[jax.Array]],
          args: Sequence[Value]) -> Sequence[Value]:
  """Lowers a computation, by rows where an Explicit axis shards them.

  Args:
    ctx: the context of a lowering rule.
    inner: the same, with arguments whose types name no mesh axes.
    compute: the computation.
    args: values of the lowered program.
  """
  avals: Sequence[Any] = ctx.avals_in
  sharding = avals[0].sharding
  if not any(sharding.spec[:1]):
    return mlir.lower_fun(functools.partial(shard_map.over_every_axis, compute))(inner, *args)
  typed = [jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in avals]
  return mlir.lower_fun(by_rows(compute, sharding))(
      ctx.replace(avals_in=typed), *args)


def summed(x: jax.Array, like: Sequence[int]) -> jax.Array:
  """Sums a cotangent over mapped axes and rows that its operand, of shape `like`, has not."""
  axes = tuple(axis for axis, size in enumerate(like) if size == 1 < x.shape[axis + 1])
  return x.sum([axis + 1 for axis in axes], keepdims=True).astype(x.dtype) if axes else x
