# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""New configurations from old ones: given fields are replaced, the others are kept."""

import enum
import json
from typing import Any, Unpack

from jax.sharding import Mesh

from attn_core import checks
from attn_core.config.config import BASICS, AttnConfig, checked
from attn_core.config.config_dict import AttnConfigDict
from attn_core.config.validate import validated


def add_basic_configurations(config: AttnConfig, **given: Unpack[AttnConfigDict]) -> AttnConfig:
  """Replaces some fields of a configuration.

  Args:
    config: the configuration; it is not changed.
    **given: fields of AttnConfig; lists and dictionaries are converted to hashable tuples.

  Returns:
    The new configuration.

  Raises:
    ValueError: `config` is not an AttnConfig, a name is not a field, or as `validated`.
  """
  checked(config)
  unknown = sorted(set(given) - set(AttnConfig._fields))
  checks.require(not unknown, "add_basic_configurations", unknown, "fields of AttnConfig: "
                 f"{', '.join(AttnConfig._fields)}; attach_custom_arguments takes other names")
  return validated(config._replace(**{name: frozen(value) for name, value in given.items()}))


def attach_custom_arguments(config: AttnConfig, **given: Any) -> AttnConfig:
  """Attaches values under any names: fields are replaced, other names become extras.

  Args:
    config: the configuration; it is not changed.
    **given: fields of AttnConfig, or other names with JSON-serializable values.

  Returns:
    The new configuration; see `extras_of` for the extras.

  Raises:
    ValueError: `config` is not an AttnConfig, the value of another name is not JSON-serializable,
      or as `validated`.
  """
  extras = dict(checked(config).extras)
  for name in set(given) - set(AttnConfig._fields):
    try:
      extras[name] = json.dumps(given.pop(name), allow_nan=False)
    except (TypeError, ValueError) as error:
      raise ValueError(f"attach_custom_arguments: {name} is not JSON-serializable ({error}); "
                       "expected numbers, strings, lists or dictionaries") from error
  return add_basic_configurations(config._replace(extras=tuple(sorted(extras.items()))), **given)


def extras_of(config: AttnConfig) -> dict[str, Any]:
  """The values that were attached to a configuration, or read from a file, beyond its fields.

  Raises:
    ValueError: `config` is not an AttnConfig.
  """
  return {name: json.loads(text) for name, text in checked(config).extras}


def read_basics_from_config(config: AttnConfig, source: Any) -> AttnConfig:
  """Copies the basic fields of another configuration, those that do not describe a model.

  Args:
    config: the configuration; it is not changed.
    source: an AttnConfig, whose unset fields are unset in the result, or any object whose
      attributes of the names BASICS are read; fields that it lacks are kept.

  Returns:
    The new configuration.

  Raises:
    ValueError: `config` is not an AttnConfig, `source` has none of these attributes (a dictionary
      has none), or as `validated`.
  """
  given = {name: getattr(source, name) for name in BASICS if hasattr(source, name)}
  checks.require(given, "source", type(source).__name__, "an object with attributes such as "
                 "attn_mechanism; add_basic_configurations(config, **values) takes a dictionary")
  if isinstance(source, AttnConfig):
    given["unset"] = source.unset
  return add_basic_configurations(config, **given)


def set_model_mesh(config: AttnConfig, mesh: Mesh | None) -> AttnConfig:
  """Replaces the mesh of a configuration; None: the mesh that `get_mesh` creates.

  Raises:
    ValueError: `config` is not an AttnConfig, or `mesh` is neither a mesh nor None.
  """
  return add_basic_configurations(config, mesh=mesh)


def frozen(value: Any) -> Any:
  """Makes a value hashable, recursively.

  Lists become tuples, dictionaries sorted tuples of pairs, and enum members their values.
  """
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, dict):
    return tuple(sorted((name, frozen(item)) for name, item in value.items()))
  if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
    return tuple(map(frozen, value))
  return value
