# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values: small trees of static fields and arrays, such as masks and score mods.

A value is a pytree. Its structure (classes, static numbers, functions) is hashable and compared by
value, so equal ones never cause retracing; its arrays are ordinary operands.
"""

import dataclasses
from typing import Any, ClassVar, Iterable, Mapping, TypeVar, dataclass_transform

import jax
import numpy as np


class Value:
  """Base class of values, whose classes are decorated by `value_dataclass`."""

  roles: ClassVar[Mapping[str, str | None]] = {}  # array field -> role, None: a value; field order

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Value):
      return NotImplemented
    (arrays, structure), (other_arrays, other_structure) = map(jax.tree.flatten, (self, other))
    same_structure = bool(structure == other_structure)  # type: ignore[operator]
    return same_structure and all(map(_same_array, arrays, other_arrays))

  def __hash__(self) -> int:
    return hash(jax.tree.structure(self))


def _same_array(a: Any, b: Any) -> bool:
  """Whether two arrays are known to be equal; traced arrays are equal to themselves only."""
  if a is b:
    return True
  if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
    return False  # values unknown while tracing
  return np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a) == np.asarray(b)))


ValueClass = TypeVar("ValueClass", bound=type)


@dataclass_transform(frozen_default=True, eq_default=False)
def value_dataclass(value_class: ValueClass) -> ValueClass:
  """Makes a class a frozen dataclass and a pytree; fields with a role are its children."""
  cls: Any = dataclasses.dataclass(frozen=True, eq=False, repr=True)(value_class)
  names = [field.name for field in dataclasses.fields(cls)]
  children_names = [name for name in names if name in cls.roles]
  static_names = [name for name in names if name not in cls.roles]

  def flatten(value: object) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    # The class is part of the static data: jax treats the structures of two classes as equal when
    # their data are equal, and would run code compiled for one class with the other.
    return ([(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in children_names],
            (cls, *(getattr(value, name) for name in static_names)))

  def unflatten(auxiliary: tuple[Any, ...], children: Iterable[Any]) -> object:
    return cls(**dict(zip(static_names, auxiliary[1:])), **dict(zip(children_names, children)))

  jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
  return cls


def leaf_roles(value: Value) -> tuple[str, ...]:
  """The role of every array of a value, in the order of `jax.tree.leaves(value)`."""
  roles: list[Any] = []
  for name, role in value.roles.items():
    field = getattr(value, name)
    if isinstance(field, Value):
      roles.extend(leaf_roles(field))
    elif isinstance(field, tuple):
      roles.extend([role] * len(field))
    elif field is not None:
      roles.append(role)
  return tuple(roles)


def structure_roles(structure: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
  """`leaf_roles` of a value given by its tree structure."""
  return leaf_roles(jax.tree.unflatten(structure, range(structure.num_leaves)))
