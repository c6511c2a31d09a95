# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharding of the primitives of `primitives` by the compiler's partitioner: batch rows and heads.

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
from jax.sharding import AbstractMesh
import numpy as np

from attn_core.array_axes import AnyMesh, Axes, size_of
from attn_core.masks import mask as mask_lib
from attn_core.sharding import partitioned
from attn_core.types import Operands, is_mod

# A name for each dimension of an array: "b" rows, "h" query heads, "k" key heads; "" any other.
Names = tuple[str, ...]

ROWS, HEADS, KEY_HEADS = "b", "h", "k"

# Of operands and results by their field; "lse" is that of the residuals.
NAMES: dict[str, Names] = {
    "query": ("b", "", "h", ""), "key": ("b", "", "k", ""), "value": ("b", "", "k", ""),
    "bias": ("b", "h", "", ""), "sinks": ("b", "h"), "dropout_key": ("b", ""),
    "key_scale": ("b", "", "k"), "value_scale": ("b", "", "k"), "lse": ("b", "h", ""),
}
_OF_MODS: Names = ("b", "h")  # of arrays of the score mod; further dimensions are whole


class Shapes(NamedTuple):
  """Sizes of the dimensions that may be sharded."""

  rows: int
  heads: int
  key_heads: int
  mapped: tuple[int, ...] = ()  # axes of `vmap`, which come before the rows

  @property
  def group(self) -> int:
    """The query heads of a key head."""
    return self.heads // self.key_heads

  def size(self, name: str) -> int:
    return {ROWS: self.rows, HEADS: self.heads, KEY_HEADS: self.key_heads,
            **dict(zip(mapped_names(len(self.mapped)), self.mapped))}[name]


class Shards(NamedTuple):
  """Mesh axes of the rows, of the query heads, of the key heads, and of mapped axes."""

  rows: Axes
  heads: Axes
  key_heads: Axes  # the first of `heads`
  mapped: tuple[Axes, ...] = ()

  def of(self, name: str) -> Axes:
    """Returns the mesh axes of a dimension."""
    return {ROWS: self.rows, HEADS: self.heads, KEY_HEADS: self.key_heads,
            **dict(zip(mapped_names(len(self.mapped)), self.mapped))}.get(name, ())


class Signature(NamedTuple):
  """Names of all dimensions of a primitive's arguments and results, and their sizes."""

  arguments: tuple[Names, ...]  # the query is the first
  results: tuple[Names, ...]
  shapes: Shapes


def operand_names(operands: Operands, mask: jax.tree_util.PyTreeDef) -> list[Names]:
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
      found += [("b",)] * (len(jax.tree.leaves(value)) - len(value.arrays))
    elif name == "mods":
      found += [_OF_MODS] * len(value)
    elif value is not None and name != "up":  # up-projections are outside of kernels
      found.append(NAMES[name])
  return found


def mapped_names(count: int) -> Names:
  """Returns the names of axes of `vmap`."""
  return tuple(f"m{n}" for n in range(count))


def signature_of(operands: Operands, mask: jax.tree_util.PyTreeDef, labels: Sequence[str],
                 results: Sequence[str], mapped: int) -> Signature:
  """Returns the signature of a primitive.

  Args:
    operands: an `Operands` of arrays with a shape.
    mask: the structure of the mask.
    labels: of the arguments after the operands, each a key of NAMES or an array of the score mod.
    results: likewise.
    mapped: number of axes of `vmap` before the rows of every array that has rows.
  """
  *sizes, rows, _, heads, _ = operands.query.shape
  all_names = lambda found: tuple(x and (*mapped_names(mapped), *x) for x in found)
  names_of = lambda label: _OF_MODS if is_mod(label) else NAMES[label]
  return Signature(
      all_names([*operand_names(operands, mask), *map(names_of, labels)]),
      all_names(map(names_of, results)),
      Shapes(rows, heads, operands.key.shape[-2], tuple(sizes)))


def lower(ctx: partitioned.Context, arguments: Sequence[partitioned.Value],
          compute: Callable[..., list[jax.Array]], signature: Signature, static: tuple,
          mesh: AnyMesh) -> Sequence[partitioned.Value]:
  """Lowers a primitive so that the compiler's partitioner shards it.

  Args:
    ctx: the context of a lowering rule.
    arguments: values of the lowered program.
    compute: the computation of one device. Its arguments are those of the device's rows and query
      heads, with the key heads that these read, and then the numbers of the rows and the heads.
    signature: of the primitive.
    static: the static part of the computation.
    mesh: the mesh of the arguments.
  """
  shapes = signature.shapes
  signature = signature._replace(arguments=(*signature.arguments, ("",), ("b",), ("h",)))

  def sharded(*arguments: jax.Array) -> list[jax.Array]:
    arguments = (*arguments, _digest(static), jnp.arange(shapes.rows, dtype=jnp.int32),
                 jnp.arange(shapes.heads, dtype=jnp.int32))
    rule = _rule(signature, arguments, ctx.avals_out)
    return partitioned.operation(
        ctx.avals_out, rule, _planner(signature, compute), mesh)(*arguments)

  return partitioned.lower(ctx, sharded, arguments)


def _rule(signature: Signature, arguments: Sequence[Any],
          results: Sequence[Any]) -> partitioned.Rule:
  """Returns the rule by which shardings of rows and heads propagate; arrays have a shape."""
  shapes = signature.shapes
  several = shapes.group > 1 and shapes.key_heads > 1
  factors = {ROWS: "b", HEADS: "(k g)" if several else "h",
             KEY_HEADS: "k" if several else "h" if shapes.group == 1 else "",
             **{name: name for name in mapped_names(len(shapes.mapped))}}
  replicated: list[str] = []

  def dimension(name: str, size: int) -> str:
    if factors.get(name) and size == shapes.size(name):
      return factors[name]
    replicated.append(f"u{len(replicated)}")
    return replicated[-1]

  def text(arrays: Sequence[Any], names: Sequence[Names]) -> str:
    return ", ".join(" ".join(
        dimension(name, size) for name, size in zip((*of_array, *[""] * x.ndim), x.shape))
                     for x, of_array in zip(arrays, names, strict=True))

  left, right = text(arguments, signature.arguments), text(results, signature.results)
  return partitioned.Rule(f"{left} -> {right}", tuple(replicated),
                          (("g", shapes.group),) if several else ())


def _planner(signature: Signature,
             compute: Callable[..., list[jax.Array]]) -> partitioned.Planner:
  """Returns the planner of a primitive."""
  shapes = signature.shapes
  def plan(mesh: AbstractMesh, arguments: Sequence[partitioned.Chosen],
           results: Sequence[partitioned.Chosen]) -> partitioned.Plan:
    shards = _shards(signature, mesh, arguments, results)
    axes = lambda x, names: [
        shards.of(name) if name and size == shapes.size(name) else ()
        for name, size in zip((*names, *[""] * len(x.shape)), x.shape)]
    return partitioned.Plan(
        _local(signature, shards, mesh, compute, results),
        [axes(*pair) for pair in zip(arguments, signature.arguments)],
        [axes(*pair) for pair in zip(results, signature.results)])
  return plan


def _shards(signature: Signature, mesh: AbstractMesh, arguments: Sequence[partitioned.Chosen],
            results: Sequence[partitioned.Chosen]) -> Shards:
  """Returns the axes of the query, and of results for what it does not shard."""
  shapes = signature.shapes
  mapped = mapped_names(len(shapes.mapped))
  found: dict[str, Axes] = {name: () for name in (ROWS, HEADS, *mapped)}
  for x, names in ((arguments[0], signature.arguments[0]), *zip(results, signature.results)):
    for name, axes in zip(names, partitioned.axes_of(x, mesh)):
      used = set(sum(found.values(), ()))
      if (name in found and not found[name] and not used & {*axes}
          and shapes.size(name) % size_of(mesh, axes) == 0):
        found[name] = axes
  heads = found[HEADS]
  count = next(n for n in range(len(heads), -1, -1)
               if shapes.key_heads % size_of(mesh, heads[:n]) == 0)
  return Shards(found[ROWS], heads, heads[:count], tuple(found[name] for name in mapped))


def _local(signature: Signature, shards: Shards, mesh: AbstractMesh,
           compute: Callable[..., list[jax.Array]],
           results: Sequence[Any]) -> Callable[..., list[jax.Array]]:
  """Returns the computation of one device; `results` have the shapes of the whole arrays."""
  shapes = signature.shapes
  held = shapes.key_heads // size_of(mesh, shards.key_heads)
  heads = shapes.heads // size_of(mesh, shards.heads)
  beyond = shards.heads[len(shards.key_heads):]  # axes whose devices hold the same key heads

  def local(*arguments: jax.Array) -> list[jax.Array]:
    needed = None
    if beyond:
      # Runs of query heads use one key head, on each device alike.
      needed = arguments[-1][::math.gcd(heads, shapes.group)] // shapes.group % held
    selected = [x if needed is None or KEY_HEADS not in names
                else jnp.take(x, needed, axis=names.index(KEY_HEADS))
                for x, names in zip(arguments, signature.arguments)]
    return [whole(*of_result, needed) for of_result in zip(
        compute(*selected), signature.results, results)]

  def whole(x: jax.Array, names: Names, result: Any, needed: jax.Array | None) -> jax.Array:
    """Returns a result of all devices from this device's part of a sum over rows or heads."""
    axes = sum((shards.of(name) for name, size in zip(names, result.shape)
                if name not in ("", KEY_HEADS) and size < shapes.size(name)), ())
    if needed is not None and KEY_HEADS in names:
      axis = names.index(KEY_HEADS)
      shape = (*x.shape[:axis], held, *x.shape[axis + 1:])
      x = jnp.zeros(shape, x.dtype).at[(slice(None),) * axis + (needed,)].add(x)
      axes += beyond
    return lax.psum(x, axes) if axes else x

  return local


def _digest(static: tuple) -> jax.Array:
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
