# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Manual mesh axes over which arrays vary, inside `jax.shard_map(check_vma=True)`.

JAX requires the carry of a loop, and the operands of a custom derivative, to vary over the same
axes on both sides; `jax.lax.pcast` marks an array as varying over more axes.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

Tree = TypeVar("Tree")
Aval = Any  # an abstract array


def unify(tree: Tree) -> Tree:
  """Marks every array of a pytree as varying over the union of the axes of all of them."""
  axes: frozenset = frozenset().union(*(_varying(x) for x in jax.tree.leaves(tree)))

  def vary(x: jax.Array) -> jax.Array:
    missing = axes - _varying(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

  return jax.tree.map(vary, tree)


def initial_carry(like: Any, carry: Tree) -> Tree:
  """Marks the initial carry of a loop as varying over the axes of the arrays `like`, too."""
  return unify((like, carry))[1]


def like(aval: Aval, shape: Sequence[int], dtype: DTypeLike) -> Aval:
  """Returns an abstract array that varies over the same manual mesh axes as `aval`."""
  sharding = NamedSharding(aval.sharding.mesh, P(*[None] * len(shape)))
  return aval.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False,
                     sharding=sharding)


def _varying(x: jax.Array) -> frozenset:
  """The manual axes over which one array varies."""
  return frozenset(jax.typeof(x).manual_axis_type.varying)
