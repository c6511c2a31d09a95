"""New configurations from old ones: what is given wins, what is not stays."""

import enum
import json
from typing import Any, Unpack

from jax.sharding import Mesh

from attn_core import checks
from attn_core.config.config import (BASICS, AttnConfig, AttnConfigDict, checked, validated)


def add_basic_configurations(config: AttnConfig, **given: Unpack[AttnConfigDict]) -> AttnConfig:
  """A configuration with some values replaced: given ones win, the others stay.

  Args:
    config: the configuration.
    **given: fields of AttnConfig; lists and dictionaries are made hashable.

  Returns:
    The new configuration; the one that was given stays what it is.

  Raises:
    ValueError: `config` is no AttnConfig, a name is no field, or `validated` refuses the result.
  """
  checked(config)
  unknown = sorted(set(given) - set(AttnConfig._fields))
  checks.require(not unknown, "add_basic_configurations", unknown, "fields of AttnConfig: "
                 f"{', '.join(AttnConfig._fields)}; attach_custom_arguments takes other names")
  return validated(config._replace(**{name: frozen(value) for name, value in given.items()}))


def attach_custom_arguments(config: AttnConfig, **given: Any) -> AttnConfig:
  """A configuration with values under any names: fields are replaced, the others become extras.

  Args:
    config: the configuration.
    **given: fields of AttnConfig, or other names with values that JSON knows.

  Raises:
    ValueError: `config` is no AttnConfig, a value that JSON does not know, or `validated` refuses
      the result.
  """
  extras = dict(checked(config).extras)
  for name in set(given) - set(AttnConfig._fields):
    try:
      extras[name] = json.dumps(given.pop(name), allow_nan=False)
    except (TypeError, ValueError) as error:
      raise ValueError(f"attach_custom_arguments: {name} is no value that JSON knows ({error}); "
                       "expected numbers, strings, lists or dictionaries") from error
  return add_basic_configurations(config._replace(extras=tuple(sorted(extras.items()))), **given)


def extras_of(config: AttnConfig) -> dict[str, Any]:
  """What was attached to a configuration, or read for it, and is no field of it.

  Raises:
    ValueError: `config` is no AttnConfig.
  """
  return {name: json.loads(text) for name, text in checked(config).extras}


def read_basics_from_config(config: AttnConfig, source: Any) -> AttnConfig:
  """A configuration with the basic fields of another one, which say nothing of a model.

  Args:
    config: the configuration.
    source: an AttnConfig, or any object; attributes of the names BASICS are read, absent ones stay.

  Returns:
    The new configuration.

  Raises:
    ValueError: `source` has no attribute of these names, as a dictionary has none, or `validated`
      refuses the result.
  """
  given = {name: getattr(source, name) for name in BASICS if hasattr(source, name)}
  checks.require(given, "source", type(source).__name__, "an object with attributes such as "
                 "attn_mechanism; add_basic_configurations(config, **values) takes a dictionary")
  return add_basic_configurations(config, **given)


def set_model_mesh(config: AttnConfig, mesh: Mesh | None) -> AttnConfig:
  """A configuration with this mesh; None: the one that `get_mesh` makes.

  Raises:
    ValueError: `mesh` is not a `jax.sharding.Mesh`.
  """
  return add_basic_configurations(config, mesh=mesh)


def frozen(value: Any) -> Any:
  """Hashable: lists as tuples, dictionaries as sorted pairs, enums as their values, all the way."""
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, dict):
    return tuple(sorted((name, frozen(item)) for name, item in value.items()))
  if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
    return tuple(map(frozen, value))
  return value
