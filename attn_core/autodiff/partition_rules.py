# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""How the compiler's partitioner shards the primitives of `primitives`: by batch rows and heads.

Rows of the batch and query heads are independent. Each device gets the global numbers of its rows
and heads, as parts of two ranges, and the key heads that its query heads read. Cotangents of arrays
that devices share are summed over these devices.
"""

from collections.abc import Callable, Sequence
import hashlib
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from attn_core.masks import mask as mask_lib
from attn_core.sharding import partitioned
from attn_core.sharding.partitioned import Axes
from attn_core.types import Operands

# A name for each dimension of an array: "b" rows, "h" query heads, "k" key heads; "" any other.
Names = tuple[str, ...]

ROWS, HEADS, KEY_HEADS = "b", "h", "k"

# Of operands and results by their field; "lse" is that of the residuals.
NAMES: dict[str, Names] = {
    "query": ("b", "", "h", ""), "key": ("b", "", "k", ""), "value": ("b", "", "k", ""),
    "bias": ("b", "h", "", ""), "sinks": ("b", "h"), "dropout_key": ("b", ""),
    "key_scale": ("b", "", "k"), "value_scale": ("b", "", "k"), "lse": ("b", "h", ""),
}


class Shapes(NamedTuple):
  """Sizes of the dimensions that may be sharded."""

  rows: int
  heads: int
  key_heads: int

  @property
  def group(self) -> int:
    """The query heads of a key head."""
    return self.heads // self.key_heads

  def size(self, name: str) -> int:
    return {ROWS: self.rows, HEADS: self.heads, KEY_HEADS: self.key_heads}[name]


class Shards(NamedTuple):
  """Mesh axes of the rows, of the query heads, and of the key heads."""

  rows: Axes
  heads: Axes
  key_heads: Axes  # the first of `heads`

  def of(self, name: str) -> Axes:
    """Returns the mesh axes of a dimension."""
    return {ROWS: self.rows, HEADS: self.heads, KEY_HEADS: self.key_heads}.get(name, ())


class Signature(NamedTuple):
  """Names of all dimensions of a primitive's arguments and results."""

  arguments: tuple[Names, ...]
  results: tuple[Names, ...]


def operand_names(operands: Any, mask: jax.tree_util.PyTreeDef) -> list[Names]:
  """Returns the names of the dimensions of each array of `Operands`, in tree order.

  Args:
    operands: an `Operands`, whose structure counts.
    mask: the structure of the mask.
  """
  found: list[Names] = []
  for name, value in operands._asdict().items():
    if name == "mask":
      found += [("b", "h", "", "") if role == mask_lib.DENSE else
                () if role == mask_lib.WHOLE else ("b",)
                for role in mask_lib.structure_roles(mask)]
      found += [("b",)] * sum(x is not None for x in (value.batch_index, value.head_offset))
    elif value is not None:
      found.append(NAMES[name])
  return found


def rule_of(signature: Signature, arguments: Sequence[Any], results: Sequence[Any],
            shapes: Shapes) -> partitioned.Rule:
  """Returns the rule by which shardings of rows and heads propagate.

  Args:
    signature: of the primitive.
    arguments: arrays with a shape.
    results: arrays with a shape.
    shapes: of query and key.
  """
  several = shapes.group > 1 and shapes.key_heads > 1
  heads = "(k g)" if several else "h"
  keys = "k" if several else "h" if shapes.group == 1 else ""
  replicated: list[str] = []

  def dimension(name: str, size: int) -> str:
    found = {ROWS: "b", HEADS: heads, KEY_HEADS: keys}.get(name, "")
    if found and size == shapes.size(name):
      return found
    replicated.append(f"u{len(replicated)}")
    return replicated[-1]

  def text(arrays: Sequence[Any], names: Sequence[Names]) -> str:
    return ", ".join(" ".join(
        dimension(name, size) for name, size in zip((*of_array, *[""] * x.ndim), x.shape))
                     for x, of_array in zip(arrays, names, strict=True))

  left, right = text(arguments, signature.arguments), text(results, signature.results)
  return partitioned.Rule(f"{left} -> {right}", tuple(replicated),
                          (("g", shapes.group),) if several else ())


def planner(signature: Signature, shapes: Shapes,
            compute: Callable[..., list[jax.Array]]) -> partitioned.Planner:
  """Returns a planner of a primitive.

  Args:
    signature: names of the arguments, the first of which is the query and the last two of which
      are the numbers of all rows and heads, and of the results.
    shapes: of query and key.
    compute: the computation of one device: takes the arguments of its rows and heads, the key heads
      that these read, and the numbers.
  """
  def plan(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> partitioned.Plan:
    shards = _shards(signature, mesh, arguments, results, shapes)
    shared = [{name for name, size in zip(names, x.shape) if name and size < shapes.size(name)}
              for names, x in zip(signature.results, results)]
    local = _local(signature, shards, mesh, shapes, compute, shared)
    axes = lambda x, names: [
        shards.of(name) if name and size == shapes.size(name) else ()
        for name, size in zip((*names, *[""] * len(x.shape)), x.shape)]
    return partitioned.Plan(local, [axes(*pair) for pair in zip(arguments, signature.arguments)],
                            [axes(*pair) for pair in zip(results, signature.results)])
  return plan


def _shards(signature: Signature, mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any],
            shapes: Shapes) -> Shards:
  """Returns the axes of the query, and of results for what it does not shard."""
  rows: Axes = ()
  heads: Axes = ()
  for x, names in ((arguments[0], signature.arguments[0]), *zip(results, signature.results)):
    for name, axes in zip(names, partitioned.axes_of(x, mesh)):
      free = not {*axes} & {*rows, *heads} and (
          name in (ROWS, HEADS) and shapes.size(name) % partitioned.size_of(axes, mesh) == 0)
      if name == ROWS and free:
        rows = rows or axes
      if name == HEADS and free:
        heads = heads or axes
  count = next(n for n in range(len(heads), -1, -1)
               if shapes.key_heads % partitioned.size_of(heads[:n], mesh) == 0)
  return Shards(rows, heads, heads[:count])


def _local(signature: Signature, shards: Shards, mesh: Mesh, shapes: Shapes,
           compute: Callable[..., list[jax.Array]],
           shared: Sequence[set[str]]) -> Callable[..., list[jax.Array]]:
  """Returns the computation of one device; `shared`: dimensions of size 1 of each result."""
  held = shapes.key_heads // partitioned.size_of(shards.key_heads, mesh)
  heads = shapes.heads // partitioned.size_of(shards.heads, mesh)
  beyond = shards.heads[len(shards.key_heads):]  # axes whose devices share key heads

  def local(*arguments: jax.Array) -> list[jax.Array]:
    if not beyond:
      needed = None
    else:
      # Runs of query heads use one key head, on each device alike.
      run = math.gcd(heads, shapes.group)
      needed = arguments[-1][::run] // shapes.group % held
    selected = [x if needed is None or KEY_HEADS not in names
                else jnp.take(x, needed, axis=names.index(KEY_HEADS))
                for x, names in zip(arguments, signature.arguments)]
    return [summed(x, names, of_result, needed) for x, names, of_result in zip(
        compute(*selected), signature.results, shared)]

  def summed(x: jax.Array, names: Names, of_result: set[str],
             needed: jax.Array | None) -> jax.Array:
    # Each device has its part of a sum over rows or heads.
    axes = sum((shards.of(name) for name in sorted(of_result)), ())
    if needed is not None and KEY_HEADS in names:
      axis = names.index(KEY_HEADS)
      shape = (*x.shape[:axis], held, *x.shape[axis + 1:])
      x = jnp.zeros(shape, x.dtype).at[(slice(None),) * axis + (needed,)].add(x)
      axes += beyond
    return lax.psum(x, axes) if axes else x

  return local


def digest(*static: Any) -> jax.Array:
  """Returns a hash of the static part of a computation, uint32 [2].

  The program that JAX compiles has no other trace of it before the partitioner runs, and caches of
  compiled programs compare programs.
  """
  words = hashlib.sha256(repr(static).encode()).digest()
  return jnp.array(np.frombuffer(words[:8], np.uint32))


def with_numbers(operands: Operands, rows: jax.Array, heads: jax.Array) -> Operands:
  """Returns one device's operands with the global numbers of its rows and of its first head.

  Args:
    operands: those of the device.
    rows: int32 [B], the numbers of its rows.
    heads: int32 [H], those of its query heads.
  """
  mask = operands.mask
  first = heads[:1]
  return operands._replace(mask=mask._replace(
      batch_index=rows if mask.batch_index is None else mask.batch_index,
      head_offset=first if mask.head_offset is None else mask.head_offset + first))
