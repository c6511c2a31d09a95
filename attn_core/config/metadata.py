"""Where an attention runs and how its tensors are sharded: `OperationMetadata`.

Static, hashable data: it crosses the boundary of `jax.jit` as a part of the treedef. The mesh, the
platform and the softmax scale may stay open; `resolved_mesh`, `resolved_platform` and
`resolved_capability` close the first ones.
"""

from collections.abc import Mapping
import dataclasses
import enum
import json
import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
import jax.numpy as jnp
import numpy as np

from attn_core.config import metadata_json
from attn_core.sharding import token_order as layouts, partition
from attn_core.types import (LAYOUTS, PLATFORMS, RING_TRANSFERS, RING_VARIANTS, AttentionMechanism,
                             BlockSizes, RingConfig)

# The backends of JAX, and the platform whose kernels run on each.
BACKENDS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}

# What a base configuration calls a flavour of kernels, and the platform that it asks for.
KERNEL_HINTS = {"jax": None, "triton": "gpu"}

# Field of OperationMetadata -> attribute of a base configuration, where the two differ.
RENAMED = {"runtime_dtype": "attn_dtype", "runtime_softmax_dtype": "attn_softmax_dtype"}


class AttnShardingRules(NamedTuple):
  """A spec for every tensor of an attention, in the dimensions of its layout."""

  query3d: PartitionSpec = PartitionSpec()  # [B, H, D]: one query a row, as decode kernels take it
  query: PartitionSpec = PartitionSpec()  # [B, T, H, D] in layout bthd
  key: PartitionSpec = PartitionSpec()  # [B, S, K, D]
  value: PartitionSpec = PartitionSpec()  # [B, S, K, E]
  bias: PartitionSpec = PartitionSpec()  # [B, H, T, S]
  mask: PartitionSpec = PartitionSpec()  # [B, 1, T, S]
  output: PartitionSpec = PartitionSpec()  # [B, T, H, E]
  q_segment_ids: PartitionSpec = PartitionSpec()  # [B, T]
  kv_segment_ids: PartitionSpec = PartitionSpec()  # [B, S]
  softmax_aux: PartitionSpec | None = None  # [H] or [H, n]; None: there is none


@dataclasses.dataclass(frozen=True)
class OperationMetadata:
  """Types, devices, axes and block sizes of an attention; nothing of it is an array.

  Arguments are normalised: equal metadata compare equal and hash alike however they were written.
  The hash leaves `base_config` out, so that any object can be one.

  Raises:
    ValueError: a field's value is not what its comment says.
  """

  runtime_dtype: Any = np.dtype("float32")  # of the products; None: float32
  runtime_softmax_dtype: Any = np.dtype("float32")  # of softmax and sums; None: float32
  sequence_axis_name: str = "sp"  # the mesh axis that ring attention goes around
  mesh: Mesh | AbstractMesh | None = None  # None: see resolved_mesh
  # A key of BACKENDS, kept as its value there; None: see resolved_platform.
  platform: str | None = None
  backend: str | None = None  # a key of BACKENDS; None or "": JAX's default one
  partition_axis: partition.PartitionAxis = partition.PartitionAxis()  # None: the default one
  base_config: Any = dataclasses.field(default=None, hash=False)  # what from_config was given
  scan_ring_attention: bool = True  # whether a ring's hops are steps of a jax.lax.scan
  softmax_scale: float | None = None  # a finite number; None: D**-0.5
  dropout_prob: float = 0.0  # 0 <= dropout_prob < 1
  blocksize_q: int | None = None  # query tokens, at least 1; None: the tuned number
  blocksize_k: int | None = None  # key tokens, at least 1; None: the tuned number
  blocksize_b: int | None = None  # batch rows, at least 1; None: the tuned number
  # Given as a mapping (None: empty), kept as pairs (mechanism, BlockSizes), sorted.
  operation_configs: tuple[tuple[str, BlockSizes], ...] = ()
  compute_capability: str | None = None  # of the GPU, such as "9.0"; None: see resolved_capability
  ring: RingConfig = RingConfig()  # how `ring` spreads a sequence; None: the default way

  def __post_init__(self):
    normal = {
        "runtime_dtype": _dtype("runtime_dtype", self.runtime_dtype),
        "runtime_softmax_dtype": _dtype("runtime_softmax_dtype", self.runtime_softmax_dtype),
        "platform": BACKENDS.get(_backend("platform", self.platform)),
        "backend": _backend("backend", self.backend),
        "compute_capability": _capability("compute_capability", self.compute_capability),
        "partition_axis": _partition_axis(self.partition_axis),
        "softmax_scale": _number("softmax_scale", self.softmax_scale, "None or a finite number"),
        "dropout_prob": _number("dropout_prob", self.dropout_prob, "a number in [0, 1)"),
        "blocksize_q": _block("blocksize_q", self.blocksize_q),
        "blocksize_k": _block("blocksize_k", self.blocksize_k),
        "blocksize_b": _block("blocksize_b", self.blocksize_b),
        "operation_configs": _operation_configs(self.operation_configs),
        "ring": _ring(self.ring),
    }
    if normal["dropout_prob"] is None or not 0 <= normal["dropout_prob"] < 1:
      raise _error("dropout_prob", self.dropout_prob, "a number in [0, 1)")
    if not isinstance(self.sequence_axis_name, str) or not self.sequence_axis_name:
      raise _error("sequence_axis_name", self.sequence_axis_name, "the name of a mesh axis")
    if self.mesh is not None and not isinstance(self.mesh, (Mesh, AbstractMesh)):
      raise _error("mesh", self.mesh, "a jax.sharding.Mesh, as create_mesh gives, or None")
    if not isinstance(self.scan_ring_attention, (bool, np.bool_)):
      raise _error("scan_ring_attention", self.scan_ring_attention, "True or False")
    normal["scan_ring_attention"] = bool(self.scan_ring_attention)
    for name, value in normal.items():
      object.__setattr__(self, name, value)

  replace = dataclasses.replace  # metadata.replace(field=value): a copy with other values

  @classmethod
  def from_config(cls, config: Any) -> "OperationMetadata":
    """Metadata that a base configuration describes; it is kept as `base_config`.

    Args:
      config: any object. `attn_dtype` and `attn_softmax_dtype` become the runtime dtypes; other
        attributes are read by their own names. Attributes that are absent or None: the defaults.

    Raises:
      ValueError: `config` is None, or a value that it gives is not what the field expects.
    """
    if config is None:
      raise _error("config", config, "an object with attributes such as attn_dtype")
    values = {}
    for field in dataclasses.fields(cls):
      value = getattr(config, RENAMED.get(field.name, field.name), None)
      if value is not None and field.name != "base_config":
        values[field.name] = value
    hint = _plain(values.get("platform"))
    if isinstance(hint, str):
      values["platform"] = KERNEL_HINTS.get(hint.lower(), hint)
    return cls(base_config=config, **values)

  @classmethod
  def from_dict(cls, data: Mapping[str, Any]) -> "OperationMetadata":
    """The inverse of `to_dict`; absent fields have their defaults.

    Raises:
      ValueError: `data` is not a mapping, names a field that does not exist, holds a value that is
        not what the field expects, devices or classes that are not here.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(data, Mapping) or not set(data) <= set(names):
      unknown = (sorted(set(data) - set(names), key=repr) if isinstance(data, Mapping)
                 else type(data).__name__)
      raise _error("data", unknown, f"a mapping with keys among {', '.join(names)}")
    return cls(**metadata_json.decoded(data))

  def to_dict(self) -> dict[str, Any]:
    """All fields as values that JSON knows; `from_dict` is the exact inverse.

    Raises:
      ValueError: `base_config` is neither None nor a NamedTuple of plain values, or `mesh` has no
        devices to name.
    """
    return metadata_json.encoded({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

  @classmethod
  def from_json(cls, json_str: str) -> "OperationMetadata":
    """The inverse of `to_json`.

    Raises:
      ValueError: `json_str` is no text in JSON, or `from_dict` refuses what it says.
    """
    if not isinstance(json_str, (str, bytes, bytearray)):
      raise _error("json_str", json_str, "text, what to_json gave; from_dict takes a mapping")
    try:
      data = json.loads(json_str)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
      raise _error("json_str", json_str, f"what to_json gave; {error}") from error
    return cls.from_dict(data)

  def to_json(self, indent: int | None = None) -> str:
    """All fields as JSON; `from_json` is the exact inverse.

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
      ValueError: there is no such mechanism.
    """
    return dict(self.operation_configs).get(_mechanism("impl_name", impl_name))

  def get_shardings(
      self,
      mode: str,
      layout: str = "bthd",
      qkv_mni_sharding: bool = False,
      softmax_aux: Any = None,
  ) -> AttnShardingRules:
    """The specs of all tensors of an attention, before any shape or mesh is known.

    Every tensor of an attention has the same axes for the same meaning. A mesh axis that
    `partition_axis` gives to several dimensions of a tensor stays with one of them;
    `sharding_drops` lists what the others lost.

    Args:
      mode: one of MODES.
      layout: one of LAYOUTS.
      qkv_mni_sharding: whether heads and widths of key and value are sharded as those of query, as
        where every query head has a key head of its own.
      softmax_aux: the sinks, [H] or [H, n], of which only the rank is read; None: there are none.

    Raises:
      ValueError: unknown mode or layout, or `softmax_aux` of another rank.
    """
    specs = {
        tensor: partition.resolve(self.partition_axis, axes, mode, tensor=tensor).spec
        for tensor, axes in _semantic_axes(layout, qkv_mni_sharding).items()}
    rank = None if softmax_aux is None else len(jnp.shape(softmax_aux))
    if rank not in (None, 1, 2):
      raise _error("softmax_aux of shape", jnp.shape(softmax_aux), "[H] or [H, n], H query heads")
    if rank is not None:
      heads = specs["query"][layout.index("h")]
      specs["softmax_aux"] = PartitionSpec(heads, *[None] * (rank - 1))
    return AttnShardingRules(**specs)


for _static in (AttnShardingRules, OperationMetadata):
  jax.tree_util.register_static(_static)


def sharding_drops(
    metadata: OperationMetadata, mode: str, layout: str = "bthd", qkv_mni_sharding: bool = False,
) -> tuple[partition.Drop, ...]:
  """What `metadata.get_shardings` had to leave out; arguments and errors are the same."""
  resolutions = [
      partition.resolve(metadata.partition_axis, axes, mode, tensor=tensor)
      for tensor, axes in _semantic_axes(layout, qkv_mni_sharding).items()]
  return tuple(drop for resolution in resolutions for drop in resolution.drops)


def resolved_mesh(metadata: OperationMetadata) -> Mesh | AbstractMesh | None:
  """The mesh to run on: the metadata's, else its base configuration's, else JAX's current one.

  Current is what `jax.set_mesh` has set. While tracing that is known as an abstract mesh, in which
  a surrounding `shard_map` has marked its axes as Manual.

  Returns:
    A mesh that is not empty, or None: a single device.
  """
  for mesh in (metadata.mesh, getattr(metadata.base_config, "mesh", None)):
    if mesh is not None:
      return None if mesh.empty else mesh
  try:
    mesh = jax.sharding.get_mesh()
  except ValueError:  # not to be asked for while tracing
    mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def resolved_platform(metadata: OperationMetadata) -> str:
  """The platform whose kernels run: "cpu", "gpu" or "tpu".

  The first that is known of: the metadata's platform, its backend's, that of the mesh's devices,
  that of `jax.default_device`, that of JAX's default backend.

  Raises:
    ValueError: it is none of the three.
  """
  if metadata.platform is not None:
    return metadata.platform
  name = metadata.backend or _mesh_platform(resolved_mesh(metadata)) or _default_platform()
  if name not in BACKENDS:
    raise _error("platform of the backend", name, f"one of {', '.join(map(repr, PLATFORMS))}; set "
                 "OperationMetadata.platform to one of them")
  return BACKENDS[name]


def resolved_capability(metadata: OperationMetadata) -> str | None:
  """Which GPUs the kernels are for: "9.0" is Hopper; None: not known, or not for GPUs.

  The first that is known of: the metadata's, that of the mesh's devices, that of
  `jax.default_device`, that of the first device of JAX's default backend. GPUs that are not
  NVIDIA's have names of their own, such as "gfx942".
  """
  if resolved_platform(metadata) != "gpu":
    return None
  if metadata.compute_capability is not None:
    return metadata.compute_capability
  mesh = resolved_mesh(metadata)
  if isinstance(mesh, Mesh):
    device = mesh.devices.flat[0]
  else:
    device = _default_device()
  found = getattr(device, "compute_capability", None)
  return None if found is None else str(found)


def _default_platform() -> str:
  chosen = jax.config.jax_default_device  # a device, the name of a platform, or None
  return getattr(chosen, "platform", chosen) or jax.default_backend()


def _default_device() -> jax.Device:
  chosen = jax.config.jax_default_device
  if isinstance(chosen, str):
    return jax.local_devices(backend=chosen)[0]
  return chosen or jax.local_devices()[0]


def _mesh_platform(mesh: Mesh | AbstractMesh | None) -> str | None:
  """The platform of a mesh's devices, where it is known."""
  if isinstance(mesh, Mesh):
    return mesh.devices.flat[0].platform
  device = getattr(mesh, "abstract_device", None)
  return getattr(device, "platform", None)


def _semantic_axes(layout: str, qkv_mni_sharding: bool) -> dict[str, tuple[str | None, ...]]:
  """What the dimensions of every tensor but the sinks mean."""
  if layout not in LAYOUTS:
    raise _error("layout", layout, f"one of {', '.join(map(repr, LAYOUTS))}")
  batch = () if layout == "thd" else (partition.BATCH,)

  def arranged(length, head, width):
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


def _error(name: str, value: Any, expectation: str) -> ValueError:
  return ValueError(f"{name}={value!r}: expected {expectation}")


def _plain(value: Any) -> Any:
  """An enum member's value; anything else as it is."""
  return value.value if isinstance(value, enum.Enum) else value


def _dtype(name: str, value: Any) -> np.dtype:
  """A floating dtype of whatever names one; None: float32."""
  expectation = "a floating dtype, such as jnp.bfloat16 or 'float32'"
  try:
    dtype = np.dtype("float32" if value is None else value)
  except TypeError as error:
    raise _error(name, value, expectation) from error
  if not jnp.issubdtype(dtype, jnp.floating) or not dtype.isnative:
    raise _error(name, value, expectation)
  return dtype


def _backend(name: str, value: Any) -> str | None:
  """A key of BACKENDS in lower case, or None."""
  plain = _plain(value)
  if plain is None or plain == "":
    return None
  if not isinstance(plain, str) or plain.lower() not in BACKENDS:
    raise _error(name, value, f"None or one of {', '.join(map(repr, BACKENDS))}")
  return plain.lower()


def _capability(name: str, value: Any) -> str | None:
  """Major and minor number of NVIDIA's compute capability, with a dot between; or None."""
  plain = _plain(value)
  if plain is not None and not (isinstance(plain, str) and re.fullmatch(r"\d+\.\d+", plain)):
    raise _error(name, value, "a string such as '9.0' (Hopper) or '8.0' (A100), or None for that "
                 "of the attached GPU")
  return plain


def _partition_axis(value: Any) -> partition.PartitionAxis:
  """A PartitionAxis whose lists are tuples; None: the default one."""
  if value is None:
    return partition.PartitionAxis()
  if not isinstance(value, partition.PartitionAxis):
    raise _error("partition_axis", value, "a PartitionAxis, or None for PartitionAxis()")
  for field, axes in value._asdict().items():
    partition.axis_names(axes, f"partition_axis.{field}")
  return partition.PartitionAxis(*[tuple(a) if isinstance(a, list) else a for a in value])


def _ring(value: Any) -> RingConfig:
  """A RingConfig whose fields fit together; None: the default one."""
  if value is None:
    return RingConfig()
  if not isinstance(value, RingConfig):
    raise _error("ring", value, "a RingConfig, or None for RingConfig()")
  for field, known in (("variant", RING_VARIANTS), ("layout", layouts.LAYOUTS),
                       ("transfer", RING_TRANSFERS)):
    if getattr(value, field) not in known:
      raise _error(f"ring.{field}", getattr(value, field), f"one of {', '.join(map(repr, known))}")
  name, hybrid = value.heads_axis_name, value.variant == "hybrid"
  if (hybrid and not (isinstance(name, str) and name)) or (not hybrid and name is not None):
    raise _error("ring.heads_axis_name", name, "the name of a mesh axis with variant 'hybrid', "
                 "whose all-to-all goes over it, and None with any other")
  if value.transfer == "remote" and value.variant not in ("ring", "hybrid"):
    raise _error("ring.transfer", value.transfer, f"'collective' with variant {value.variant!r}, "
                 "in which nothing goes around a ring; 'remote' goes with 'ring' and 'hybrid'")
  return value


def _number(name: str, value: Any, expectation: str) -> float | None:
  """A finite Python float, or None."""
  if value is None:
    return None
  if isinstance(value, (bool, str)) or np.ndim(value):
    raise _error(name, value, expectation)
  try:
    number = float(value)
  except (TypeError, ValueError) as error:
    raise _error(name, value, expectation) from error
  if not math.isfinite(number):
    raise _error(name, value, expectation)
  return number


def _block(name: str, value: Any) -> int | None:
  """A Python int of at least 1, or None."""
  if value is None:
    return None
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
    raise _error(name, value, "an integer of at least 1, or None for the tuned one")
  return int(value)


def _mechanism(name: str, value: Any) -> str:
  """The name of a mechanism as a plain string."""
  try:
    return AttentionMechanism(value).value
  except ValueError as error:
    names = ", ".join(repr(mechanism.value) for mechanism in AttentionMechanism)
    raise _error(name, value, f"a mechanism, one of {names}") from error


def _operation_configs(value: Any) -> tuple[tuple[str, BlockSizes], ...]:
  """Sorted pairs (mechanism, block sizes) of a mapping, of such pairs or of None."""
  expectation = "a mapping from mechanisms to BlockSizes, or None"
  try:
    pairs = [] if value is None else list(dict(value).items())
    size = 0 if value is None else len(value)
  except (TypeError, ValueError) as error:
    raise _error("operation_configs", value, expectation) from error
  normal = {}
  for mechanism, sizes in pairs:
    name = f"operation_configs[{_plain(mechanism)!r}]"
    if not isinstance(sizes, BlockSizes):
      raise _error(name, sizes, "a BlockSizes")
    normal[_mechanism("operation_configs key", mechanism)] = BlockSizes(
        *[_block(f"{name}.{field}", tokens) for field, tokens in sizes._asdict().items()])
  if len(normal) != size:
    raise _error("operation_configs", value, "every mechanism once")
  return tuple(sorted(normal.items()))
