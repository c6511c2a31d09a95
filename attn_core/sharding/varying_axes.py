# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Manual mesh axes over which arrays vary, inside `jax.shard_map(check_vma=True)`.

JAX requires the carry of a loop, and the operands of a custom derivative, to vary over the same
axes on both sides; `jax.lax.pcast` marks an array as varying over more axes.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

Tree = TypeVar("Tree")
Aval = Any  # an abstract array


def unify(tree: Tree) -> Tree:
  """Marks every array of a pytree as varying over the union of the axes of all of them."""
  return over(tree, ())


def over(tree: Tree, others: tuple[str, ...]) -> Tree:
  """Marks arrays as varying over the union of their axes and other ones, if any of them varies."""
  axes = of(tree)
  axes |= frozenset(others) if axes else frozenset()

  def vary(x: jax.Array) -> jax.Array:
    missing = axes - _varying(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

  return jax.tree.map(vary, tree)


def of(tree: object) -> frozenset:
  """Returns the manual axes over which any array of a pytree varies."""
  return frozenset().union(*(_varying(x) for x in jax.tree.leaves(tree)))


def initial_carry(like: Any, carry: Tree) -> Tree:
  """Marks the initial carry of a loop as varying over the axes of the arrays `like`, too."""
  return unify((like, carry))[1]


def as_untracked(x: Tree, like: jax.Array) -> Tree:
  """Forgets that arrays vary, inside of a computation that does not track it.

  The computation of a primitive is lowered with arguments that vary over nothing, as on one device.
  Results of a collective are marked as varying there all the same.

  Args:
    x: a pytree, results of collectives.
    like: an argument of the computation; where it varies, `x` is returned.
  """
  if _varying(like):
    return x
  return jax.tree.map(lambda x: _untracked_p.bind(x) if _varying(x) else x, x)


_untracked_p = Primitive("untracked")
_untracked_p.def_impl(lambda x: x)
_untracked_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_untracked_p, lambda ctx, x: [x])
ad.deflinear2(_untracked_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_untracked_p)


def like(aval: Aval, shape: Sequence[int], dtype: DTypeLike, spec: P = P()) -> Aval:
  """Returns an abstract array that varies over the same manual mesh axes as `aval`.

  Args:
    aval: the other one.
    shape: of the array.
    dtype: of the array.
    spec: its Explicit axes, in a shard_map over other axes.
  """
  sharding = NamedSharding(aval.sharding.mesh, P(*spec, *[None] * (len(shape) - len(spec))))
  return aval.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False,
                     sharding=sharding)


def _varying(x: jax.Array) -> frozenset:
  """The manual axes over which one array varies."""
  return frozenset(jax.typeof(x).manual_axis_type.varying)
