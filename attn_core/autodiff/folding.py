# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes along an axis that `vmap` maps: folded into the rows of the batch, and back."""

from collections.abc import Callable, Sequence
import functools
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
  labels = {"mask": arrays + rest, "mods": list(mod_names(operands))}
  return [label for name, value in fields.items() if value is not None
          for label in labels.get(name, [name])]


def fold(x: jax.Array, dim: int | None, shape: tuple[int, int], full: bool,
         rows_first: bool) -> jax.Array:
  """Folds a mapped axis into the leading axis.

  Args:
    x: its leading axis has as many entries as there are rows, or 1.
    dim: the mapped axis; None: the array is shared.
    shape: (size of the mapped axis, rows).
    full: whether a shared array with 1 row must not keep it. Every other array gets all rows.
    rows_first: whether the rows are the slower part of the folded axis.
  """
  if dim is None and x.shape[0] == 1 and not full:
    return x
  x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
  x = jnp.broadcast_to(x, (*shape, *x.shape[2:]))
  return (x.swapaxes(0, 1) if rows_first else x).reshape(-1, *x.shape[2:])


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


def unfold(x: jax.Array, shape: tuple[int, int], rows_first: bool) -> jax.Array:
  """Returns an array with the mapped axis first, from one that `fold` gives."""
  size, rows = shape
  if rows_first:
    return x.reshape(rows, size, *x.shape[1:]).swapaxes(0, 1)
  return x.reshape(size, rows, *x.shape[1:])


def rows_of(args: Sequence[jax.Array], dims: Sequence[int | None], labels: Sequence[str],
            name: str) -> int:
  """Returns the rows of the argument of this label, not counting the mapped axis."""
  x, dim = next((x, d) for x, d, label in zip(args, dims, labels) if label == name)
  return x.shape[1 if dim == 0 else 0]
