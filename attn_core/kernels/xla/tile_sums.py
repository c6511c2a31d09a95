# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over tiles, as derivatives of score mods have them, in a form that is fast on XLA:CPU.

XLA:CPU fuses what makes the summands into the loop of a sum, which adds one number after another,
since it may not reorder them, and computes each summand by scalar operations: for an exponential or
a division that took more time than the products of the tile. As products with ones, sums are fast,
and the summands are computed before, by vectors. On other platforms sums remain as they are.
"""

import functools
import math
from typing import Callable

import jax
from jax import lax
from jax.extend.core import JaxprEqn
import jax.numpy as jnp

from attn_core import operations
from attn_core.kernels.xla import cpu_math
from attn_core.types import are_known

_SMALL = 2**14  # numbers from which on a sum is rewritten
_FEW = 8  # numbers along an axis that are added one by one


def evaluate(function: Callable[..., list[jax.Array]], x: jax.Array) -> list[jax.Array]:
  """Returns function(x), with sums over large arrays in the fast form."""
  if not are_known(*x.shape) or x.size < _SMALL:
    return function(x)
  return _by_operations(function, x)


def _by_operations(function: Callable[..., list[jax.Array]], *arguments: jax.Array
                   ) -> list[jax.Array]:
  traced = jax.make_jaxpr(function)(*arguments)
  return operations.evaluate(traced.jaxpr, traced.consts, list(arguments), _bind)


def _bind(equation: JaxprEqn, given: list[jax.Array]) -> list[jax.Array]:
  """See `operations.evaluate`."""
  name, parameters = equation.primitive.name, equation.params
  if name == "cond":
    index, *rest = given
    branches = [functools.partial(_by_operations, jax.extend.core.jaxpr_as_fun(branch))
                for branch in parameters["branches"]]
    return list(lax.switch(index.astype(jnp.int32), branches, *rest))
  if name == "reduce_sum" and given[0].size >= _SMALL and jnp.issubdtype(
      given[0].dtype, jnp.floating):
    axes = tuple(parameters["axes"])
    return [lax.platform_dependent(given[0], cpu=lambda x: _by_products(x, axes),
                                   default=lambda x: x.sum(axes))]
  found = operations.bind(equation, given)
  # The derivative of a table by distance shifts rows by padding them: indices of padded arrays
  # that are computed within other operations take divisions.
  return [cpu_math.apart(x) for x in found] if name == "pad" else found


def _by_products(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns x.sum(axes)."""
  for axis in sorted(axes, key=lambda axis: x.shape[axis] > _FEW):  # short ones first
    count, before, after = x.shape[axis], x.shape[:axis], x.shape[axis + 1:]
    if count <= _FEW:
      x = functools.reduce(jnp.add, (lax.slice_in_dim(x, n, n + 1, axis=axis)
                                     for n in range(count)))
    else:
      rows = x.reshape(math.prod(before), count, math.prod(after))
      ones = jnp.ones((rows.shape[0], 1, count), x.dtype)
      total = lax.dot_general(ones, rows, (((2,), (1,)), ((0,), (0,))),
                              precision=lax.Precision.HIGHEST)
      x = total.reshape(*before, 1, *after)
  return x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes])
