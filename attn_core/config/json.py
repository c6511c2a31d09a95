"""`AttnConfig` as plain data, as JSON, and on disk."""

from collections.abc import Mapping
import json
import os
import pathlib
import re
from typing import Any

from jax.sharding import PartitionSpec

from attn_core import checks
from attn_core.config import readers as config_readers
from attn_core.config.config import AttnConfig, validated
from attn_core.config.merge import add_basic_configurations, frozen
from attn_core.rope.frequencies import Rope
from attn_core.sharding.mesh import mesh_from_dict, mesh_to_dict
from attn_core.sharding.partition import PartitionAxis
from attn_core.types import BlockSizes

CONFIG_NAME = "config.json"

# What marks a dictionary as one of this library, and says how it is to be read.
FORMAT = "attn_core_format"

_COMMIT = re.compile(r"snapshots/([^/]+)/")
_HASH = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Arguments of from_pretrained that are about fetching files.
_DOWNLOADS = ("cache_dir", "force_download", "proxies", "resume_download", "revision", "token",
              "use_auth_token", "code_revision")


def to_dict(config: AttnConfig) -> dict[str, Any]:
  """All fields as values that JSON knows; `from_dict` is the exact inverse.

  Raises:
    ValueError: `validated` refuses the configuration, or its mesh has no devices to name.
  """
  config = validated(config)
  return {FORMAT: 1, **{name: _encoded(name, value) for name, value in config._asdict().items()}}


def to_diff_dict(config: AttnConfig) -> dict[str, Any]:
  """As `to_dict`, the fields that differ from those of AttnConfig() only.

  Raises:
    ValueError: as `to_dict`.
  """
  default = to_dict(AttnConfig())
  return {name: value for name, value in to_dict(config).items()
          if name == FORMAT or value != default[name]}


def from_dict(data: Mapping[str, Any]) -> AttnConfig:
  """The configuration that a dictionary describes: this library's own, or a model hub's.

  Args:
    data: what `to_dict` or `to_diff_dict` gave, or the contents of a hub's config.json (see
      `config_readers.read_config`).

  Raises:
    ValueError: no mapping, a field that does not exist, or a value that is none of the field.
    NotImplementedError: a hub's configuration of a model type that has no reader.
  """
  checks.require(isinstance(data, Mapping), "data", type(data).__name__, "a mapping")
  if FORMAT not in data:
    return config_readers.read_config(data)
  checks.require(data[FORMAT] == 1, FORMAT, repr(data[FORMAT]), "1, the only one there is")
  values = {name: value for name, value in data.items() if name != FORMAT}
  unknown = sorted(set(values) - set(AttnConfig._fields), key=repr)
  checks.require(not unknown, "data", f"the keys {unknown}", "fields of AttnConfig: "
                 f"{', '.join(AttnConfig._fields)}")
  try:
    return validated(AttnConfig(**{name: _decoded(name, value) for name, value in values.items()}))
  except (AttributeError, TypeError) as error:
    raise ValueError(f"data: expected what to_dict gave; {error}") from error


def to_json_file(config: AttnConfig, json_file_path: str | os.PathLike, use_diff: bool = True):
  """Writes a configuration to a file.

  Args:
    config: the configuration.
    json_file_path: the file; it is replaced where there is one.
    use_diff: whether to leave out what is as in AttnConfig().

  Raises:
    ValueError: no path, or as `to_dict`.
  """
  _check_path("json_file_path", json_file_path)
  data = to_diff_dict(config) if use_diff else to_dict(config)
  text = json.dumps(data, indent=2, sort_keys=True) + "\n"
  pathlib.Path(json_file_path).write_text(text, encoding="utf-8")


def save_pretrained(
    config: AttnConfig, save_directory: str | os.PathLike, push_to_hub: bool = False) -> None:
  """Writes `config.json` into a folder, which is made where there is none.

  Raises:
    NotImplementedError: `push_to_hub`.
    ValueError: no path, or as `to_dict`.
  """
  _check_path("save_directory", save_directory)
  if push_to_hub:
    raise NotImplementedError("save_pretrained: push_to_hub=True needs a network and an account of "
                              "a model hub; save to a folder and upload that")
  folder = pathlib.Path(save_directory)
  folder.mkdir(parents=True, exist_ok=True)
  to_json_file(config, folder / CONFIG_NAME)


def from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike, subfolder: str = "",
    return_unused_kwargs: bool = False, **given: Any):
  """Reads a configuration from disk: this library's own, or one as model hubs write it.

  Args:
    pretrained_model_name_or_path: a folder with a file config.json, or a JSON file.
    subfolder: a folder inside it.
    return_unused_kwargs: whether names in `given` that are no fields come back; else an error.
    **given: fields of AttnConfig that replace those of the file; `local_files_only` is accepted,
      since nothing else is ever done.

  Returns:
    The configuration, or (configuration, names and values that are no fields).

  Raises:
    NotImplementedError: the name of a hub's model in place of a path, or an argument of downloads.
    FileNotFoundError: there is no such file.
    ValueError: a name that is no path, a file that is no JSON in UTF-8, or as `from_dict` and
      `add_basic_configurations`.
  """
  given.pop("local_files_only", None)
  for name in _DOWNLOADS:
    if given.pop(name, None) not in (None, False, "main"):
      raise NotImplementedError(f"from_pretrained: {name} is about downloads, and nothing is "
                                "downloaded here; fetch config.json and give its folder")
  _check_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
  _check_path("subfolder", subfolder)
  path = _config_file(os.fspath(pretrained_model_name_or_path), subfolder)
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f"{path} is not JSON: {error}; expected what to_json_file wrote, or a hub's "
                     "config.json, in UTF-8") from error
  unused = {name: given.pop(name) for name in set(given) - set(AttnConfig._fields)
            if return_unused_kwargs}
  config = add_basic_configurations(from_dict(data), **given)
  return (config, unused) if return_unused_kwargs else config


def extract_commit_hash(resolved_file: str | None, commit_hash: str | None) -> str | None:
  """The commit of a file in a model hub's cache, `.../snapshots/<commit>/...`.

  Args:
    resolved_file: the file's path, or None.
    commit_hash: what is known already: it is given back.

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
        f"from_pretrained: {name!r} is no folder or file here, and models are not fetched from a "
        "hub by their names, which needs a network; download its config.json and give the path")
  raise FileNotFoundError(f"from_pretrained: there is no file {path}; expected a folder with "
                          f"{CONFIG_NAME}, or a JSON file")


def _encoded(name: str, value: Any) -> Any:
  """One field as JSON knows it."""
  if name in ("attn_dtype", "kvdtype", "attn_softmax_dtype"):
    return None if value is None else value.name
  if name == "mesh":
    return None if value is None else mesh_to_dict(value)
  if name in ("operation_configs", "layer_ropes"):
    return {key: item._asdict() for key, item in value}
  if name == "partition_rules" and value is not None:
    return [[pattern, list(spec)] for pattern, spec in value]
  return value._asdict() if isinstance(value, (PartitionAxis, Rope)) else _listed(value)


def _decoded(name: str, value: Any) -> Any:
  """The inverse of `_encoded`."""
  kinds = {"partition_axis": PartitionAxis, "rope": Rope, "operation_configs": BlockSizes,
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


def _made(kind, fields: Mapping[str, Any]):
  return kind(**{name: frozen(value) for name, value in fields.items()})


def _listed(value: Any) -> Any:
  return list(map(_listed, value)) if isinstance(value, tuple) else value
