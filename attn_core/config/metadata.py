# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`OperationMetadata`: dtypes, devices, mesh axes and block sizes of an attention.

Static, hashable data: it crosses the boundary of `jax.jit` as a part of the treedef. The mesh, the
platform and the compute capability may be None; `resolved_mesh`, `resolved_platform`,
`resolved_capability`, `resolved_tpu_version` and `resolved_num_cores` determine them.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import array_axes
from attn_core.config import devices, metadata_fields, metadata_json
from attn_core.config.config import AttnConfig
from attn_core.config.metadata_fields import BACKENDS
from attn_core.sharding import partition
from attn_core.types import (ARRAY_LAYOUTS, MODES, PLATFORMS, ArrayLayout, BlockSizes, Mode,
                             RingConfig)

# Kinds of kernels that a base configuration may have as its platform -> the platform of each.
KERNEL_HINTS = {"jax": None, "triton": "gpu"}

# Field of OperationMetadata -> attribute of a base configuration, where the names differ.
RENAMED = {"runtime_dtype": "attn_dtype", "runtime_softmax_dtype": "attn_softmax_dtype"}


class AttnShardingRules(NamedTuple):
  """A spec for every tensor of an attention, in the dimensions of its layout."""

  query3d: PartitionSpec = PartitionSpec()  # [B, H, D]: one query per row, for decode kernels
  query: PartitionSpec = PartitionSpec()  # [B, T, H, D] in layout bthd
  key: PartitionSpec = PartitionSpec()  # [B, S, K, D]
  value: PartitionSpec = PartitionSpec()  # [B, S, K, E]
  bias: PartitionSpec = PartitionSpec()  # [B, H, T, S]
  mask: PartitionSpec = PartitionSpec()  # [B, 1, T, S]
  output: PartitionSpec = PartitionSpec()  # [B, T, H, E]
  q_segment_ids: PartitionSpec = PartitionSpec()  # [B, T]
  kv_segment_ids: PartitionSpec = PartitionSpec()  # [B, S]
  softmax_aux: PartitionSpec | None = None  # [H] or [H, num_sinks]; None: without sinks


@dataclasses.dataclass(frozen=True)
class OperationMetadata:
  """Dtypes, devices, mesh axes and block sizes of an attention, without arrays.

  Fields are normalized: equal metadata compare equal and hash alike whatever spelling was used.
  The hash leaves out `base_config`, so that it can be any object.

  Example:
    >>> from attn_core import OperationMetadata
    >>> metadata = OperationMetadata(runtime_dtype="bfloat16", platform="cuda")
    >>> metadata.runtime_dtype, metadata.platform
    (dtype(bfloat16), 'gpu')

  Raises:
    ValueError: the value of a field is not what its comment describes.
  """

  runtime_dtype: DTypeLike | None = np.dtype("float32")  # of matrix products; None: float32
  runtime_softmax_dtype: DTypeLike | None = np.dtype("float32")  # of softmax; None: float32
  sequence_axis_name: str = "sp"  # mesh axis over which ring attention shards the sequence
  mesh: Mesh | AbstractMesh | None = None  # None: see resolved_mesh
  # A key of BACKENDS, stored as its value there; None: see resolved_platform.
  platform: str | None = None
  backend: str | None = None  # a key of BACKENDS; None or "": JAX's default backend
  partition_axis: partition.PartitionAxis = partition.PartitionAxis()  # None: PartitionAxis()
  base_config: Any = dataclasses.field(default=None, hash=False)  # the argument of from_config
  scan_ring_attention: bool = True  # whether the steps of a ring are steps of a jax.lax.scan
  softmax_scale: float | None = None  # a finite number; None: D**-0.5
  dropout_prob: float = 0.0  # 0 <= dropout_prob < 1
  blocksize_q: int | None = None  # query tokens, at least 1; None: tuned
  blocksize_k: int | None = None  # key tokens, at least 1; None: tuned
  # Batch rows, at least 1, or None; unused here: the caller's model reads it.
  blocksize_b: int | None = None
  # A mapping from mechanisms to BlockSizes (None: empty), stored as sorted pairs.
  operation_configs: Mapping[str, BlockSizes] | tuple[tuple[str, BlockSizes], ...] | None = ()
  compute_capability: str | None = None  # of the GPU, such as "9.0"; None: see resolved_capability
  ring: RingConfig = RingConfig()  # how `ring` shards a sequence; None: RingConfig()

  def __post_init__(self) -> None:
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    for name, value in metadata_fields.normalized(fields).items():
      object.__setattr__(self, name, value)

  replace = dataclasses.replace  # metadata.replace(field=value): a copy with other values

  @classmethod
  def from_config(cls, config: Any) -> "OperationMetadata":
    """Reads metadata from a base configuration, which is kept as `base_config`.

    Args:
      config: any object. `attn_dtype` and `attn_softmax_dtype` become the runtime dtypes; other
        attributes are read by their own names. Attributes that are missing or None, or that the
        field `unset` of an AttnConfig lists, have defaults.

    Returns:
      The metadata.

    Raises:
      ValueError: `config` is None, or an attribute is not what the field expects.
    """
    if config is None:
      raise metadata_fields.error("config", config, "an object with attributes such as attn_dtype")
    values: dict[str, Any] = {}
    unset = config.unset if isinstance(config, AttnConfig) else ()
    for field in dataclasses.fields(cls):
      name = RENAMED.get(field.name, field.name)
      value = getattr(config, name, None)
      if value is not None and field.name != "base_config" and name not in unset:
        values[field.name] = value
    hint = metadata_fields.plain_value(values.get("platform"))
    if isinstance(hint, str):
      values["platform"] = KERNEL_HINTS.get(hint.lower(), hint)
    return cls(base_config=config, **values)

  @classmethod
  def from_dict(cls, data: Mapping[str, Any]) -> "OperationMetadata":
    """Inverse of `to_dict`; missing fields have their defaults.

    Raises:
      ValueError: `data` is not a mapping, has a key that is not a field, has a value that is not
        what the field expects, or names devices or classes that this process does not have.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(data, Mapping) or not set(data) <= set(names):
      unknown = (sorted(set(data) - set(names), key=repr) if isinstance(data, Mapping)
                 else type(data).__name__)
      raise metadata_fields.error("data", unknown,
                                  f"a mapping with keys among {', '.join(names)}")
    return cls(**metadata_json.decoded(data))

  def to_dict(self) -> dict[str, Any]:
    """Converts all fields to JSON-serializable values; `from_dict` is the exact inverse.

    Raises:
      ValueError: `base_config` is neither None nor a NamedTuple of plain values, or `mesh` has no
        devices to name.
    """
    return metadata_json.encoded({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

  @classmethod
  def from_json(cls, json_str: str) -> "OperationMetadata":
    """Inverse of `to_json`.

    Raises:
      ValueError: `json_str` is not JSON text, or as `from_dict`.
    """
    if not isinstance(json_str, (str, bytes, bytearray)):
      raise metadata_fields.error("json_str", json_str,
                                  "text written by to_json; from_dict takes a mapping")
    try:
      data = json.loads(json_str)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
      raise metadata_fields.error("json_str", json_str,
                                  f"text written by to_json; {error}") from error
    return cls.from_dict(data)

  def to_json(self, indent: int | None = None) -> str:
    """Converts all fields to JSON text; `from_json` is the exact inverse.

    Args:
      indent: spaces per level; None: one line.

    Raises:
      ValueError: as `to_dict`.
    """
    return json.dumps(self.to_dict(), indent=indent)

  def get_operation_config(self, impl_name: str) -> BlockSizes | None:
    """The block sizes that were set for one mechanism; None: the tuned ones.

    Args:
      impl_name: a value of AttentionMechanism.

    Raises:
      ValueError: `impl_name` is not a mechanism.
    """
    name = metadata_fields.mechanism("impl_name", impl_name)
    return dict(self.operation_configs or ()).get(name)

  def get_shardings(
      self,
      mode: Mode,
      layout: ArrayLayout = "bthd",
      qkv_mni_sharding: bool = False,
      softmax_aux: ArrayLike | None = None,
  ) -> AttnShardingRules:
    """The specs of all tensors of an attention, before any shape or mesh is known.

    Every tensor of an attention has the same axes for the same meaning. If `partition_axis` names
    a mesh axis for several dimensions of a tensor, one of them gets it; `dropped_axes` lists the
    axes that the others lost.

    Args:
      mode: one of MODES.
      layout: one of ARRAY_LAYOUTS.
      qkv_mni_sharding: whether heads and widths of key and value are sharded like those of the
        query, for attention with as many key heads as query heads.
      softmax_aux: the sinks, [H] or [H, num_sinks]; only the rank is read. None: without sinks.

    Returns:
      The specs; entries that are not sharded are None.

    Raises:
      ValueError: `mode` or `layout` is unknown, or `softmax_aux` has another rank.
    """
    for name, value, known in (("mode", mode, MODES), ("layout", layout, ARRAY_LAYOUTS)):
      if value not in known:
        raise metadata_fields.error(name, value, f"one of {', '.join(map(repr, known))}")
    rules = _sharding_rules(self.partition_axis, mode, layout, bool(qkv_mni_sharding))
    if softmax_aux is not None:
      shape = jnp.shape(softmax_aux)
      if len(shape) not in (1, 2):
        raise metadata_fields.error("softmax_aux of shape", shape,
                                    "[H] or [H, num_sinks], H query heads")
      heads = rules.query[layout.index("h")]
      rules = rules._replace(softmax_aux=PartitionSpec(heads, *[None] * (len(shape) - 1)))
    return rules


@functools.lru_cache(maxsize=256)  # else a quarter of a call's time without jit
def _sharding_rules(partition_axis: partition.PartitionAxis, mode: Mode, layout: ArrayLayout,
                    qkv_mni_sharding: bool) -> AttnShardingRules:
  """The specs of all tensors of an attention except the sinks."""
  return AttnShardingRules(**{
      tensor: partition.resolve(partition_axis, axes, mode, tensor=tensor).spec
      for tensor, axes in _semantic_axes(layout, qkv_mni_sharding).items()})


jax.tree_util.register_static(AttnShardingRules)
jax.tree_util.register_static(OperationMetadata)


def dropped_axes(
    metadata: OperationMetadata, mode: Mode, layout: ArrayLayout = "bthd",
    qkv_mni_sharding: bool = False) -> tuple[partition.DroppedAxis, ...]:
  """The mesh axes that `metadata.get_shardings` left out; same arguments and errors."""
  resolutions = [
      partition.resolve(metadata.partition_axis, axes, mode, tensor=tensor)
      for tensor, axes in _semantic_axes(layout, qkv_mni_sharding).items()]
  return tuple(drop for resolution in resolutions for drop in resolution.drops)


def resolved_mesh(metadata: OperationMetadata) -> Mesh | AbstractMesh | None:
  """The mesh to run on: the metadata's, else its base configuration's, else JAX's current mesh.

  Returns:
    A mesh that is not empty, or None: a single device.
  """
  for mesh in (metadata.mesh, getattr(metadata.base_config, "mesh", None)):
    if mesh is not None:
      return None if mesh.empty else mesh
  mesh = array_axes.current_mesh()
  return None if mesh.empty else mesh


def resolved_platform(metadata: OperationMetadata) -> str:
  """The platform whose kernels run: "cpu", "gpu" or "tpu".

  The first known platform of: the metadata, its backend, the devices of the mesh,
  `jax.default_device`, JAX's default backend.

  Raises:
    ValueError: the platform is not a key of BACKENDS.
  """
  if metadata.platform is not None:
    return metadata.platform
  name = metadata.backend or _mesh_platform(resolved_mesh(metadata)) or _default_platform()
  if name not in BACKENDS:
    raise metadata_fields.error(
        "platform of the backend", name, f"one of {', '.join(map(repr, PLATFORMS))}; set "
        "OperationMetadata.platform to one of them")
  return BACKENDS[name]


def resolved_capability(metadata: OperationMetadata) -> str | None:
  """The compute capability of the GPUs: "9.0" is Hopper; None: unknown, or the platform is not GPU.

  The first known capability of: the metadata, the devices of the mesh, `jax.default_device`, the
  first device of JAX's default backend. AMD GPUs have architecture names, such as "gfx942".
  """
  if resolved_platform(metadata) != "gpu":
    return None
  if metadata.compute_capability is not None:
    return metadata.compute_capability
  mesh = resolved_mesh(metadata)
  device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else _default_device()
  found = getattr(device, "compute_capability", None)
  return None if found is None else str(found)


def resolved_tpu_version(metadata: OperationMetadata) -> str | None:
  """The generation of the TPUs, such as "v5e"; None: unknown, or the platform is not TPU.

  That of the first known of: the devices of the mesh, `jax.default_device`, the first device of
  JAX's default backend.
  """
  device = _tpu(metadata)
  return None if device is None else devices.tpu_version(device.device_kind)


def resolved_num_cores(metadata: OperationMetadata) -> int:
  """The cores of a TPU that share a kernel; 1: unknown, or the platform is not TPU."""
  return getattr(_tpu(metadata), "num_cores", None) or 1


def _tpu(metadata: OperationMetadata) -> Any:
  """One of the TPUs that `resolved_tpu_version` describes; None: unknown, or not TPU."""
  if resolved_platform(metadata) != "tpu":
    return None
  mesh = resolved_mesh(metadata)
  if mesh is None:  # one without axes may still say of which devices it is
    mesh = array_axes.current_mesh()
  device: Any = (mesh.devices.flat[0] if isinstance(mesh, Mesh) and not mesh.empty
                 else getattr(mesh, "abstract_device", None) or _default_device())
  # A program for TPUs may be traced elsewhere.
  return device if getattr(device, "platform", None) == "tpu" else None


def _default_platform() -> str:
  """The platform of `jax.default_device`, else of JAX's default backend."""
  # A device, the name of a platform, or None.
  chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
  return getattr(chosen, "platform", chosen) or jax.default_backend()


def _default_device() -> jax.Device:
  """The device of `jax.default_device`, else the first local device."""
  chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
  if isinstance(chosen, str):
    return jax.local_devices(backend=chosen)[0]
  return chosen or jax.local_devices()[0]


def _mesh_platform(mesh: Mesh | AbstractMesh | None) -> str | None:
  """The platform of a mesh's devices; None if unknown."""
  if isinstance(mesh, Mesh):
    return mesh.devices.flat[0].platform
  device = getattr(mesh, "abstract_device", None)
  return getattr(device, "platform", None)


def _semantic_axes(
    layout: ArrayLayout, qkv_mni_sharding: bool) -> dict[str, tuple[str | None, ...]]:
  """The meanings of the dimensions of every tensor except the sinks."""
  if layout not in ARRAY_LAYOUTS:
    raise metadata_fields.error("layout", layout, f"one of {', '.join(map(repr, ARRAY_LAYOUTS))}")
  batch: tuple[str, ...] = () if layout == "thd" else (partition.BATCH,)

  def arranged(length: str, head: str, width: str) -> tuple[str, ...]:
    return batch + ((head, length, width) if layout == "bhtd" else (length, head, width))

  query = arranged(partition.QUERY_LENGTH, partition.HEAD, partition.HEAD_DIM)
  if qkv_mni_sharding:
    key = arranged(partition.KV_LENGTH, partition.HEAD, partition.HEAD_DIM)
  else:
    key = arranged(partition.KV_LENGTH, partition.KV_HEAD, partition.KV_HEAD_DIM)
  logits = (partition.QUERY_LENGTH, partition.BIAS_KV_SEQ)
  return {
      "query3d": (partition.BATCH, partition.HEAD, partition.HEAD_DIM),
      "query": query,
      "key": key,
      "value": key,
      "bias": batch + (partition.BIAS_HEAD_SEQ,) + logits,
      "mask": batch + (None,) + logits,
      "output": query,
      "q_segment_ids": batch + (partition.QUERY_LENGTH,),
      "kv_segment_ids": batch + (partition.KV_LENGTH,),
  }
