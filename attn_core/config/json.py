# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts `AttnConfig` to plain data and JSON files, and back."""

from collections.abc import Callable, Mapping
import json
import os
import pathlib
import re
from typing import Any

from jax.sharding import PartitionSpec

from attn_core import checks
from attn_core.config import readers
from attn_core.config.config import AUTOMATIC, AttnConfig
from attn_core.config.merge import add_basic_configurations, frozen
from attn_core.config.validate import validated
from attn_core.rope.frequencies import Rope
from attn_core.sharding.mesh import mesh_from_dict, mesh_to_dict
from attn_core.sharding.partition import PartitionAxis
from attn_core.types import BlockSizes

CONFIG_NAME = "config.json"

# Key that marks a dictionary as written by this library; its value is the version of the format.
FORMAT = "attn_core_format"

_COMMIT = re.compile(r"snapshots/([^/]+)/")
_HASH = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Arguments of from_pretrained that concern downloads.
_DOWNLOADS = ("cache_dir", "force_download", "proxies", "resume_download", "revision", "token",
              "use_auth_token", "code_revision")


def to_dict(config: AttnConfig) -> dict[str, Any]:
  """Converts all fields to JSON-serializable values; `from_dict` is the exact inverse.

  Raises:
    ValueError: as `validated`, or the mesh has no devices.
  """
  config = validated(config)
  return {FORMAT: 1, **{name: _encoded(name, value) for name, value in config._asdict().items()}}


def to_diff_dict(config: AttnConfig) -> dict[str, Any]:
  """Converts the fields that differ from the defaults of AttnConfig, or were set; see `to_dict`.

  Fields of AUTOMATIC are written if they are set, to whatever value, so that `unset` follows.

  Raises:
    ValueError: as `to_dict`.
  """
  default, data = to_dict(AttnConfig()), to_dict(config)
  unset = data.pop("unset")
  return {name: value for name, value in data.items()
          if name == FORMAT or value != default[name] or (name in AUTOMATIC and name not in unset)}


def from_dict(data: Mapping[str, Any]) -> AttnConfig:
  """Reads a configuration from a dictionary, written by this library or by a model hub.

  Args:
    data: the result of `to_dict` or `to_diff_dict`, or the contents of a hub's config.json (see
      `readers.read_config`).

  Returns:
    The configuration.

  Raises:
    ValueError: `data` is not a mapping, has a key that is not a field, or as `validated`; for a
      hub's data, as `readers.read_config`.
    NotImplementedError: a hub's model type is not supported.
  """
  checks.require(isinstance(data, Mapping), "data", type(data).__name__, "a mapping")
  if FORMAT not in data:
    return readers.read_config(data)
  checks.require(data[FORMAT] == 1, FORMAT, repr(data[FORMAT]), "1, the only known format")
  values = {name: value for name, value in data.items() if name != FORMAT}
  unknown = sorted(set(values) - set(AttnConfig._fields), key=repr)
  checks.require(not unknown, "data", f"the keys {unknown}", "fields of AttnConfig: "
                 f"{', '.join(AttnConfig._fields)}")
  try:
    return validated(AttnConfig(**{name: _decoded(name, value) for name, value in values.items()}))
  except (AttributeError, TypeError) as error:
    raise ValueError(f"data: expected the result of to_dict; {error}") from error


def to_json_file(
    config: AttnConfig, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
  """Writes a configuration to a file.

  Args:
    config: the configuration.
    json_file_path: the file; an existing file is replaced.
    use_diff: whether to leave out fields that have their default values.

  Raises:
    ValueError: `json_file_path` is not a path, or as `to_dict`.
  """
  _check_path("json_file_path", json_file_path)
  data = to_diff_dict(config) if use_diff else to_dict(config)
  text = json.dumps(data, indent=2, sort_keys=True) + "\n"
  pathlib.Path(json_file_path).write_text(text, encoding="utf-8")


def save_pretrained(
    config: AttnConfig, save_directory: str | os.PathLike, push_to_hub: bool = False) -> None:
  """Writes `config.json` into a folder, which is created if it does not exist.

  Raises:
    NotImplementedError: `push_to_hub` is True.
    ValueError: `save_directory` is not a path, or as `to_dict`.
  """
  _check_path("save_directory", save_directory)
  if push_to_hub:
    raise NotImplementedError("save_pretrained: push_to_hub=True needs a network and an account on "
                              "a model hub; save to a folder and upload the folder")
  folder = pathlib.Path(save_directory)
  folder.mkdir(parents=True, exist_ok=True)
  to_json_file(config, folder / CONFIG_NAME)


def from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike, subfolder: str = "",
    return_unused_kwargs: bool = False, **given: Any,
) -> AttnConfig | tuple[AttnConfig, dict[str, Any]]:
  """Reads a configuration from disk, written by this library or by a model hub.

  Args:
    pretrained_model_name_or_path: a folder with a file config.json, or a JSON file.
    subfolder: a folder inside it.
    return_unused_kwargs: whether names in `given` that are not fields are returned; otherwise they
      are an error.
    **given: fields of AttnConfig that replace those of the file; `local_files_only` is accepted,
      since only local files are ever read.

  Returns:
    The configuration, or (configuration, the names and values in `given` that are not fields).

  Raises:
    NotImplementedError: the argument is the name of a hub's model instead of a path, or an argument
      concerns downloads.
    FileNotFoundError: the file does not exist.
    ValueError: a path is not a string or PathLike, the file is not JSON in UTF-8, or as `from_dict`
      and `add_basic_configurations`.
  """
  given.pop("local_files_only", None)
  for name in _DOWNLOADS:
    if given.pop(name, None) not in (None, False, "main"):
      raise NotImplementedError(f"from_pretrained: {name} concerns downloads, which are not "
                                "supported; download config.json and pass its folder")
  _check_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
  _check_path("subfolder", subfolder)
  path = _config_file(os.fspath(pretrained_model_name_or_path), subfolder)
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f"{path} is not JSON: {error}; expected a file written by to_json_file, or a "
                     "hub's config.json, in UTF-8") from error
  unused = {name: given.pop(name) for name in set(given) - set(AttnConfig._fields)
            if return_unused_kwargs}
  config = add_basic_configurations(from_dict(data), **given)
  return (config, unused) if return_unused_kwargs else config


def extract_commit_hash(resolved_file: str | None, commit_hash: str | None) -> str | None:
  """Extracts the commit from a path in a model hub's cache, `.../snapshots/<commit>/...`.

  Args:
    resolved_file: the file's path, or None.
    commit_hash: the commit if it is known already, which is then returned.

  Returns:
    40 hexadecimal digits, or None.

  Raises:
    ValueError: `resolved_file` is neither a path nor None.
  """
  if resolved_file is None or commit_hash is not None:
    return commit_hash
  checks.require(isinstance(resolved_file, (str, os.PathLike)), "resolved_file",
                 repr(resolved_file), "a path or None")
  found = _COMMIT.search(pathlib.PurePath(resolved_file).as_posix())
  return found[1] if found and _HASH.fullmatch(found[1]) else None


def _check_path(argument: str, x: Any) -> None:
  """Checks that an argument is a path."""
  checks.require(isinstance(x, (str, os.PathLike)), argument, repr(x),
                 "the path of a folder or a file")


def _config_file(name: str, subfolder: str) -> pathlib.Path:
  """The file that holds the configuration."""
  path = pathlib.Path(name, subfolder)
  if path.is_dir():
    path = path / CONFIG_NAME
  if path.is_file():
    return path
  if not pathlib.Path(name).exists() and _HUB_NAME.fullmatch(name) and not name.endswith(".json"):
    raise NotImplementedError(
        f"from_pretrained: {name!r} is not a local folder or file, and models are not downloaded "
        "from a hub by name; download the model's config.json and pass its path")
  raise FileNotFoundError(f"from_pretrained: {path} does not exist; expected a folder with "
                          f"{CONFIG_NAME}, or a JSON file")


def _encoded(name: str, value: Any) -> Any:
  """Converts one field to JSON-serializable values."""
  if name in ("attn_dtype", "kvdtype", "attn_softmax_dtype"):
    return None if value is None else value.name
  if name == "mesh":
    return None if value is None else mesh_to_dict(value)
  if name in ("operation_configs", "layer_ropes"):
    return {key: _fields(item) for key, item in value}
  if name == "partition_rules" and value is not None:
    return [[pattern, _listed(tuple(spec))] for pattern, spec in value]
  return _fields(value) if isinstance(value, (PartitionAxis, Rope)) else _listed(value)


def _decoded(name: str, value: Any) -> Any:
  """Inverse of `_encoded`."""
  kinds: dict[str, Callable[..., Any]] = {
      "partition_axis": PartitionAxis, "rope": Rope, "operation_configs": BlockSizes,
      "layer_ropes": Rope}
  if name in ("operation_configs", "layer_ropes"):
    return tuple((key, _made(kinds[name], item)) for key, item in value.items())
  if name in kinds:
    return _made(kinds[name], value)
  if name == "mesh":
    return None if value is None else mesh_from_dict(value)
  if name == "partition_rules" and value is not None:
    return tuple((pattern, PartitionSpec(*frozen(spec))) for pattern, spec in value)
  return frozen(value)


def _made(kind: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
  """Makes a value of class `kind`."""
  return kind(**{name: frozen(value) for name, value in fields.items()})


def _fields(value: PartitionAxis | Rope | BlockSizes) -> dict[str, Any]:
  """Converts a NamedTuple to a dict of JSON-serializable values."""
  return {name: _listed(item) for name, item in value._asdict().items()}


def _listed(value: Any) -> Any:
  """Converts tuples to lists, recursively."""
  return list(map(_listed, value)) if isinstance(value, tuple) else value
