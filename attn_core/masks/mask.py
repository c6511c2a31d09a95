# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mask: the keys that each query attends to, as a value.

A mask is a small tree of leaves combined with `&`, `|` and `~`. True means visible. A mask is a
pytree: its structure (kinds of leaves, static numbers, predicates) is hashable and compared by
value, so equal masks never cause retracing; its arrays (segment ids, lengths, positions, dense
arrays) are ordinary operands.

Every mask implements two methods, and the rest of the library needs nothing else from it:

* `visible(at)`: elementwise, for the coordinates of a tile. The caller has sliced the mask's own
  arrays to the tile by their roles (see `tile.slice_mask` and `materialize.expand`).
* `bounds(grid)`: for every (query block, key block), whether some pair may be visible and whether
  all pairs certainly are. Conservative: `possible` is never False and `certain` never True by
  mistake.

This module holds the base class, the combinations and the roles of arrays; `leaves` holds the
leaves, `constructors` the public functions that make them.
"""

import dataclasses
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import jax
import numpy as np

from attn_core.masks.values import (Value, leaf_roles as leaf_roles,
                                    structure_roles as structure_roles, value_dataclass)

Array = jax.Array | np.ndarray
# Checkers cannot follow arithmetic between unions of numpy's and jax's arrays, so these are Any.
Integers = Any  # int, or integers of numpy or jax: scalars or arrays that broadcast together
Booleans = Any  # bool of numpy or jax: scalars or arrays
NumpyModule = Any  # numpy on the host, jax.numpy inside jit

# The role of an array: its shape, and thereby how it is sliced, padded and sharded.
QUERY = "query"  # [B or 1, T]: one number per query row
KEY = "key"  # [B or 1, S]: one number per key column
BATCH = "batch"  # [B or 1]: one number per batch row
DENSE = "dense"  # [B or 1, H or 1, T or 1, S or 1]: bool, or int32 as in `looked_up`
WHOLE = "whole"  # never sliced: operands of a custom predicate, lists of selected blocks


class Coordinates(NamedTuple):
  """Coordinates of the elements of a tile: integers that broadcast to the tile's shape.

  An index counts rows and columns of the arrays. A position is the number that causal, window,
  chunk and prefix compare; it equals the index unless the mask changes it (`offset`,
  `positions`). Batch and head are global numbers.
  """

  batch: Integers
  head: Integers
  query_index: Integers
  key_index: Integers
  query_position: Integers
  key_position: Integers
  given_positions: bool = False  # query positions come from the user: any int32, even its ends


class Interval(NamedTuple):
  """Smallest and largest value in every block (both inclusive)."""

  low: Array
  high: Array


class Grid(NamedTuple):
  """The blocks of a mask, as `bounds` reads them.

  Intervals of queries broadcast as [B or 1, 1, num_query_blocks, 1], those of keys as
  [B or 1, 1, 1, num_key_blocks].
  """

  xp: NumpyModule
  reduce_query: Callable[[Array], Interval]  # [B or 1, T] -> Interval
  reduce_key: Callable[[Array], Interval]  # [B or 1, S] -> Interval
  # [B or 1, H or 1, T or 1, S or 1] -> (any, all) per block
  reduce_dense: Callable[[Array], tuple[Array, Array]]
  # (lists of selected blocks, their block_q, their block_kv) -> whether a block has a selected pair
  # in some row and head; None: rows and columns are not in their order
  reduce_selected: Callable[[Array, int, int], Array] | None
  query_index: Interval
  key_index: Interval
  query_position: Interval
  key_position: Interval


Bounds = tuple[Array, Array]  # (possible, certain), see `Mask.bounds`


class Mask(Value):
  """Base class of all masks; use the functions of `attn_core.masks` to make one."""

  def visible(self, at: Coordinates) -> Booleans:
    """Whether the query attends to the key, elementwise; bool, broadcastable to the tile."""
    raise NotImplementedError

  def bounds(self, grid: Grid) -> Bounds:
    """(possible, certain), broadcastable to [B or 1, H or 1, num_query_blocks, num_key_blocks]."""
    raise NotImplementedError

  def __and__(self, other: "Mask") -> "Mask":
    if not isinstance(other, Mask):
      return NotImplemented
    if isinstance(self, Full):
      return other
    return self if isinstance(other, Full) else And(self, other)

  def __or__(self, other: "Mask") -> "Mask":
    return Or(self, other) if isinstance(other, Mask) else NotImplemented

  def __invert__(self) -> "Mask":
    return Not(self)

  def __bool__(self) -> bool:
    raise ValueError("a mask has no truth value: combine masks with `&`, `|` and `~`, since "
                     "`and`, `or` and `not` would drop one of them; test for a missing mask with "
                     "`mask is None`")


@value_dataclass
class Full(Mask):
  """All keys are visible to all queries."""

  def visible(self, at: Coordinates) -> Booleans:
    return np.True_

  def bounds(self, grid: Grid) -> Bounds:
    everything = grid.xp.ones((1, 1, 1, 1), bool)
    return everything, everything


@value_dataclass
class And(Mask):
  """Visible in both masks."""

  left: Mask
  right: Mask
  roles = {"left": None, "right": None}

  def visible(self, at: Coordinates) -> Booleans:
    return self.left.visible(at) & self.right.visible(at)

  def bounds(self, grid: Grid) -> Bounds:
    (possible, certain), (other_possible, other_certain) = (
        self.left.bounds(grid), self.right.bounds(grid))
    return possible & other_possible, certain & other_certain


@value_dataclass
class Or(Mask):
  """Visible in at least one of two masks."""

  left: Mask
  right: Mask
  roles = {"left": None, "right": None}

  def visible(self, at: Coordinates) -> Booleans:
    return self.left.visible(at) | self.right.visible(at)

  def bounds(self, grid: Grid) -> Bounds:
    (possible, certain), (other_possible, other_certain) = (
        self.left.bounds(grid), self.right.bounds(grid))
    return possible | other_possible, certain | other_certain


@value_dataclass
class Not(Mask):
  """Visible where `mask` is hidden."""

  mask: Mask
  roles = {"mask": None}

  def visible(self, at: Coordinates) -> Booleans:
    return ~self.mask.visible(at)

  def bounds(self, grid: Grid) -> Bounds:
    possible, certain = self.mask.bounds(grid)
    return ~certain, ~possible


def nodes(mask: Mask) -> Iterator[Mask]:
  """Iterates over a mask and all masks inside it, outermost first."""
  yield mask
  for name, role in mask.roles.items():
    if role is None:
      yield from nodes(getattr(mask, name))


def conjuncts(mask: Mask) -> Iterator[Mask]:
  """Iterates over masks other than conjunctions that together show what a mask shows."""
  if isinstance(mask, And):
    yield from conjuncts(mask.left)
    yield from conjuncts(mask.right)
  else:
    yield mask


def of_structure(structure: jax.tree_util.PyTreeDef) -> Mask:
  """Returns a mask of a structure, with numbers in place of its arrays."""
  return jax.tree.unflatten(structure, range(structure.num_leaves))


def with_children(mask: Mask, children: Iterable[Mask]) -> Mask:
  """Returns a mask with other masks in place of those inside it, in their order."""
  names = [name for name, role in mask.roles.items() if role is None]
  return dataclasses.replace(  # type: ignore[type-var]
      mask, **dict(zip(names, children, strict=True)))


def map_nodes(function: Callable[[Mask], Mask], mask: Mask) -> Mask:
  """Applies a function to a mask and to all masks inside it, innermost first."""
  inner = [getattr(mask, name) for name, role in mask.roles.items() if role is None]
  if inner:
    mask = with_children(mask, [map_nodes(function, x) for x in inner])
  return function(mask)
