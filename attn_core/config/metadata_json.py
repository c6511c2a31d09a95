# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts the fields of an `OperationMetadata` to JSON-serializable values and back.

Dtypes are written as names, a mesh as names, sizes and device ids, and PartitionAxis, BlockSizes
and RingConfig as their fields. A base configuration can hold any value, so each of its values that
JSON does not have is written as a dict with its kind: {"dtype": "bfloat16"}, {"tuple": [1, 2]}.
"""

from collections.abc import Mapping
import enum
import sys
from typing import Any

from jax.sharding import Mesh, PartitionSpec
import numpy as np

from attn_core.sharding.mesh import mesh_from_dict, mesh_to_dict
from attn_core.sharding.partition import PartitionAxis
from attn_core.types import BlockSizes, RingConfig


_LIBRARY = __name__.partition(".")[0]


def encoded(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Converts all fields of an OperationMetadata to JSON-serializable values.

  Args:
    fields: the normalized fields by name.

  Raises:
    ValueError: `base_config` is neither None nor a NamedTuple of plain values, or `mesh` has no
      devices to name.
  """
  return dict(
      fields,
      runtime_dtype=fields["runtime_dtype"].name,
      runtime_softmax_dtype=fields["runtime_softmax_dtype"].name,
      mesh=None if fields["mesh"] is None else mesh_to_dict(fields["mesh"]),
      partition_axis={name: list(axes) if isinstance(axes, tuple) else axes
                      for name, axes in fields["partition_axis"]._asdict().items()},
      base_config=encode(fields["base_config"], "base_config"),
      operation_configs={name: sizes._asdict() for name, sizes in fields["operation_configs"]},
      ring=fields["ring"]._asdict(),
  )


def decoded(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Inverse of `encoded`, for some or all fields; values that are not mappings are kept.

  Raises:
    ValueError: a mapping was not written by `encoded`, or names devices or classes that this
      process does not have.
  """
  values = dict(fields)
  if isinstance(values.get("mesh"), Mapping):
    values["mesh"] = mesh_from_dict(values["mesh"])
  if isinstance(values.get("partition_axis"), Mapping):
    values["partition_axis"] = _named_tuple(
        PartitionAxis, values["partition_axis"], "partition_axis")
  if isinstance(values.get("operation_configs"), Mapping):
    values["operation_configs"] = {
        name: _named_tuple(BlockSizes, sizes, f"operation_configs[{name!r}]")
        if isinstance(sizes, Mapping) else sizes
        for name, sizes in values["operation_configs"].items()}
  if isinstance(values.get("ring"), Mapping):
    values["ring"] = _named_tuple(RingConfig, values["ring"], "ring")
  if isinstance(values.get("base_config"), Mapping):
    try:
      values["base_config"] = decode(values["base_config"])
    except (AttributeError, TypeError) as error:
      raise ValueError(f"base_config={values['base_config']!r}: expected what to_dict returns for "
                       f"it; {error}") from error
  return values


def encode(value: Any, name: str) -> Any:
  """Converts one value of a base configuration to JSON-serializable values.

  Args:
    value: None, a bool, int, float, string, dtype, mesh, spec or enum member; or a NamedTuple,
      tuple, list or dict with strings as keys, of such values.
    name: the name of the value in errors.

  Raises:
    ValueError: the value is something else, or its class is not at the top level of a module.
  """
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, enum.Enum):
    return {"enum": _address(value, name), "value": encode(value.value, name)}
  if isinstance(value, np.dtype) and value.isbuiltin and not value.fields:
    return {"dtype": value.name}
  if isinstance(value, Mesh):
    return {"mesh": mesh_to_dict(value)}
  if isinstance(value, PartitionSpec):
    return {"partition_spec": [encode(item, name) for item in value]}
  if isinstance(value, tuple) and hasattr(value, "_fields"):
    fields = {key: encode(item, f"{name}.{key}") for key, item in zip(value._fields, value)}
    return {"named_tuple": _address(value, name), "fields": fields}
  if type(value) in (tuple, list):
    items = [encode(item, f"{name}[{i}]") for i, item in enumerate(value)]
    return {"tuple": items} if isinstance(value, tuple) else items
  if type(value) is dict and all(type(key) is str for key in value):
    return {"dict": {key: encode(item, f"{name}[{key!r}]") for key, item in value.items()}}
  raise ValueError(
      f"{name}={value!r}: expected None or a NamedTuple of plain values, which can be serialized; "
      "the metadata has already read its fields from base_config, so call "
      "metadata.replace(base_config=None) first")


def decode(value: Any) -> Any:
  """Inverse of `encode`.

  Raises:
    ValueError: a dict in `value` was not written by `encode`, or its class is not imported.
  """
  if isinstance(value, list):
    return [decode(item) for item in value]
  if not isinstance(value, Mapping):
    return value
  keys = set(value)
  if keys == {"enum", "value"}:
    kind, member = _found(value["enum"], enum.Enum), decode(value["value"])
    try:
      return kind(member)
    except ValueError as error:
      raise ValueError(f"base_config has {member!r}: expected the value of a member of "
                       f"{kind.__qualname__}, one of {[x.value for x in kind]}") from error
  if keys == {"dtype"}:
    return np.dtype(value["dtype"])
  if keys == {"mesh"}:
    return mesh_from_dict(value["mesh"])
  if keys == {"partition_spec"}:
    return PartitionSpec(*map(decode, value["partition_spec"]))
  if keys == {"named_tuple", "fields"}:
    fields = {key: decode(item) for key, item in value["fields"].items()}
    return _named_tuple(_found(value["named_tuple"], tuple), fields, "base_config")
  if keys == {"tuple"}:
    return tuple(decode(item) for item in value["tuple"])
  if keys == {"dict"}:
    return {key: decode(item) for key, item in value["dict"].items()}
  raise ValueError(f"base_config has a dict of {sorted(keys)}: expected what to_dict returns")


def _named_tuple(kind: Any, fields: Mapping[str, Any], name: str) -> Any:
  """Makes a NamedTuple of class `kind` from a mapping that has some or all of its fields."""
  unknown = sorted(set(fields) - set(kind._fields))
  if unknown:
    raise ValueError(f"{name} has the fields {unknown}: expected fields among "
                     f"{', '.join(kind._fields)}")
  return kind(**fields)


def _address(value: Any, name: str) -> str:
  """The class of a value as "module:Name".

  A class of this library is written with the innermost package that exports it, such as
  "attn_core.config:AttnConfig", which stays the same when a module inside that package is renamed.
  """
  kind = type(value)
  module = kind.__module__.rpartition(".")[0]
  if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
    raise ValueError(f"{name} is of class {kind.__qualname__}: expected a class at the top level "
                     "of a module, which can be found when it is read")
  while module.partition(".")[0] == _LIBRARY:
    if getattr(sys.modules.get(module), kind.__qualname__, None) is kind:
      return f"{module}:{kind.__qualname__}"
    module = module.rpartition(".")[0]
  return f"{kind.__module__}:{kind.__qualname__}"


def _found(address: str, base: type) -> Any:
  """The class that `_address` wrote.

  Only modules that are already imported are searched, since data must not import code. A class of
  this library whose address is that of an older version is found among the public names.
  """
  module, _, name = address.partition(":")
  kind = getattr(sys.modules.get(module), name, None)
  if kind is None and module.partition(".")[0] == _LIBRARY:
    kind = getattr(sys.modules.get(_LIBRARY), name, None)
  if not isinstance(kind, type) or not issubclass(kind, base) or (
      base is tuple and not hasattr(kind, "_fields")):
    raise ValueError(f"base_config is of class {address!r}: expected a NamedTuple or Enum of an "
                     "imported module; import that module first")
  return kind
