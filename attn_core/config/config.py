# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`AttnConfig`: a model's attention configuration as one immutable value.

The functions of `config.merge` make new configurations from it.
"""

import enum
import json
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.config import remat
from attn_core.config.config_dict import JsonValue
from attn_core.config.metadata import OperationMetadata
from attn_core.rope.frequencies import Rope, check_rope
from attn_core.sharding import mesh as mesh_lib
from attn_core.sharding.partition import PartitionAxis, axis_names
from attn_core.sharding.rules import check_rules
from attn_core.types import OTHER_MECHANISM_NAMES, AttentionMechanism, BlockSizes

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class EasyMethod(str, enum.Enum):
  """Purpose for which a model is set up."""

  TRAIN = "train"
  SERVE = "serve"
  EVAL = "serve"
  CONVERT = "convert"


class AttnConfig(NamedTuple):
  """Static, hashable configuration of a model's attention.

  Fields that are unused here are kept for the caller's model, so that one value holds a model's
  whole configuration.

  Example:
    >>> from attn_core import AttnConfig, attention_arguments
    >>> config = AttnConfig(attn_mechanism="flash_attn2", sliding_window=(1023, 0))
    >>> attention_arguments(config)["sliding_window"]
    (1023, 0)
  """

  # Devices.
  sharding_axis_dims: tuple[int, ...] = (1, -1, 1, 1, 1)  # see `create_mesh`
  sharding_dcn_axis_dims: tuple[int, ...] | None = None
  sharding_axis_names: tuple[str, ...] = mesh_lib.AXIS_NAMES
  # Mechanisms are names of AttentionMechanism.
  attn_mechanism: str = "vanilla"
  decode_attn_mechanism: str | None = None  # in the decode modes; None: attn_mechanism
  blocksize_k: int | None = 128  # key tokens; None: tuned
  blocksize_q: int | None = 128  # query tokens; None: tuned
  blocksize_b: int | None = 1  # batch rows; unused here: the caller's model reads it
  moe_tiling_size_batch: int = 4  # unused here: the caller's model reads it
  moe_tiling_size_seqlen: int = 128  # unused here: the caller's model reads it
  moe_tiling_size_dim: int = 128  # unused here: the caller's model reads it
  partition_axis: PartitionAxis = PartitionAxis()
  use_sharded_kv_caching: bool = False  # unused here: the caller's model reads it
  use_sharding_constraint: bool = False  # unused here: the caller's model reads it
  backend: str | None = None  # see OperationMetadata.backend
  # A key of metadata_fields.BACKENDS, "triton" or "jax"; None: the platform of the backend.
  platform: str | None = None
  easy_method: str = "train"  # a value of EasyMethod; unused here: the caller's model reads it
  bits: int | None = None  # of quantized weights; unused here: the caller's model reads it
  scan_ring_attention: bool = True
  scan_attention_layers: bool = False  # unused here: the caller's model reads it
  use_scan_mlp: bool = False  # unused here: the caller's model reads it
  scan_mlp_chunk_size: int = 1024  # tokens; unused here: the caller's model reads it
  sequence_axis_name: str = "sp"
  # The arguments of `checkpoint_policy`; unused here: the caller's model reads it
  gradient_checkpointing: str = ""
  # Unused here: the caller's model reads it
  gradient_checkpointing_targets: tuple[str, ...] | None = None
  precompute_masks: bool = True  # unused here: the caller's model reads it; masks here are symbolic
  # Hashable and JSON-serializable, see `merge.frozen`; unused here: the caller's model reads it
  kv_cache_quantization_config: JsonValue = None
  quantization_config: JsonValue = None  # of weights; unused here: the caller's model reads it
  # Unused here: the caller's model reads it
  kv_cache_sharding_sequence_axis_name: str | tuple[str, ...] = "sp"
  # Unused here: the caller's model reads it; the mechanism determines its backward pass
  flash_attention_backward_pass_impl: str = "triton"
  attn_dtype: DTypeLike = jnp.dtype("bfloat16")
  # Of caches; None: attn_dtype; unused here: the caller's model reads it
  kvdtype: DTypeLike | None = None
  attn_softmax_dtype: DTypeLike = jnp.dtype("float32")
  fcm_max_ratio: float = 0.0  # largest fraction of keys that `get_fcm_mask` drops
  fcm_min_ratio: float = 0.0  # smallest fraction of keys that `get_fcm_mask` drops
  hardware_abstraction: bool = False  # unused here: the caller's model reads it
  pallas_m_block_size: int = 128  # unused here: the caller's model reads it
  pallas_k_block_size: int = 128  # unused here: the caller's model reads it
  pallas_n_block_size: int = 128  # unused here: the caller's model reads it
  moe_method: str = "fused_moe"  # one of MOE_METHODS; unused here: the caller's model reads it
  moe_force_xla_gmm: bool = False  # unused here: the caller's model reads it
  use_expert_tensor_mode: bool = False  # unused here: the caller's model reads it
  use_ring_of_experts: bool = False  # unused here: the caller's model reads it
  fsdp_is_ep_bound: bool = True  # see `expert_mesh`; unused here: the caller's model reads it
  sp_is_ep_bound: bool = True  # see `expert_mesh`; unused here: the caller's model reads it
  operation_configs: tuple[tuple[str, BlockSizes], ...] = ()  # (mechanism, block sizes)

  # The model's attention; None: unknown.
  model_type: str | None = None  # name on model hubs; unused here: the caller's model reads it
  num_hidden_layers: int | None = None
  hidden_size: int | None = None
  num_attention_heads: int | None = None  # H
  # K; None: H; unused here: the caller's model reads it
  num_key_value_heads: int | None = None
  head_dim: int | None = None  # D of query and key; None: hidden_size / H
  # E; None: D; unused here: the caller's model reads it
  value_head_dim: int | None = None
  rope_head_dim: int | None = None  # width that `rope` rotates, the last part of a head; None: D
  causal: bool = True
  softmax_scale: float | None = None  # None: D**-0.5
  logits_soft_cap: float | None = None
  dropout_prob: float = 0.0
  # Whether heads have a learned logit (`softmax_aux`); unused here: the caller's model reads it
  sinks: bool = False
  # One of LAYER_TYPES for each layer; None: all layers are alike.
  layer_types: tuple[str, ...] | None = None
  sliding_window: tuple[int, int] | None = None  # (left, right), as attention takes it, tokens
  chunk_size: int | None = None  # tokens
  rope: Rope = Rope()
  layer_ropes: tuple[tuple[str, Rope], ...] = ()  # (layer type, rope that replaces `rope`)
  layers_without_rope: tuple[int, ...] = ()  # layer indices, from 0
  # (strength, step in tokens) of `query_temperature`, in layers without rope; None: not scaled
  temperature_tuning: tuple[float, int] | None = None
  max_position_embeddings: int | None = None  # tokens
  freq_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings
  mask_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings

  partition_rules: tuple[tuple[str, PartitionSpec], ...] | None = None  # (pattern, spec)
  mesh: Mesh | None = None  # set by set_model_mesh; None: see get_mesh
  extras: tuple[tuple[str, str], ...] = ()  # (name, JSON) of other values; read by `extras_of`


jax.tree_util.register_static(AttnConfig)

MOE_METHODS = ("fused_moe", "standard_moe", "dense_moe")
BACKWARD_IMPLEMENTATIONS = ("triton", "xla")

# The fields before those that describe one model's attention.
BASICS = AttnConfig._fields[:AttnConfig._fields.index("model_type")]

_FLAGS = tuple(
    name for name, value in AttnConfig._field_defaults.items() if isinstance(value, bool))
# Whole numbers of at least 1.
_COUNTS = (
    "moe_tiling_size_batch", "moe_tiling_size_seqlen", "moe_tiling_size_dim", "bits",
    "scan_mlp_chunk_size", "pallas_m_block_size", "pallas_k_block_size", "pallas_n_block_size",
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "value_head_dim", "rope_head_dim", "chunk_size", "max_position_embeddings",
    "freq_max_position_embeddings", "mask_max_position_embeddings")


def checked(config: AttnConfig) -> AttnConfig:
  """Returns the argument if it is an AttnConfig; `validated` checks its fields.

  Raises:
    ValueError: `config` is not an AttnConfig.
  """
  checks.require(isinstance(config, AttnConfig), "config", type(config).__name__, "an AttnConfig")
  return config


def get_mesh(config: AttnConfig) -> Mesh:
  """The configured mesh, else a mesh over all devices as the sharding fields describe.

  Raises:
    ValueError: `config` is not an AttnConfig, or as `create_mesh`.
  """
  mesh = checked(config).mesh
  if mesh is not None:
    return mesh
  return mesh_lib.create_mesh(config.sharding_axis_dims, config.sharding_axis_names,
                              config.sharding_dcn_axis_dims, backend=config.backend)


def get_partition_rules(config: AttnConfig) -> tuple[tuple[str, PartitionSpec], ...]:
  """The shardings of the model's parameters, as rules for `match_partition_rules`.

  Raises:
    NotImplementedError: `config.partition_rules` is None.
    ValueError: `config` is not an AttnConfig.
  """
  rules = checked(config).partition_rules
  if rules is None:
    raise NotImplementedError(
        "get_partition_rules: partition_rules is None, and only the model knows its parameters; "
        "set AttnConfig(partition_rules=((pattern, PartitionSpec(...)), ...))")
  return rules


def get_axis_dims(config: AttnConfig) -> tuple[int, ...]:
  """Number of devices along each axis of the mesh; -1: all remaining ones.

  Raises:
    ValueError: `config` is not an AttnConfig.
  """
  return tuple(checked(config).sharding_axis_dims)


def get_axis_names(config: AttnConfig) -> tuple[str, ...]:
  """The names of the mesh's axes.

  Raises:
    ValueError: `config` is not an AttnConfig.
  """
  return tuple(checked(config).sharding_axis_names)


def get_backend(config: AttnConfig) -> str:
  """The configured backend, else JAX's default backend.

  Raises:
    ValueError: `config` is not an AttnConfig.
  """
  return checked(config).backend or jax.default_backend()


def get_head_dim(config: AttnConfig) -> int:
  """D, the width of a query's head.

  Raises:
    ValueError: `config` is not an AttnConfig, or `head_dim` is None and `hidden_size` is None or
      not a multiple of `num_attention_heads`.
  """
  head_dim = checked(config).head_dim
  if head_dim is not None:
    return head_dim
  size, heads = config.hidden_size or 0, config.num_attention_heads or 0
  checks.require(size and heads and size % heads == 0, "head_dim",
                 f"None with hidden_size={config.hidden_size} and "
                 f"num_attention_heads={config.num_attention_heads}",
                 "a width, or a hidden_size that the heads divide")
  return size // heads


def validated(config: AttnConfig) -> AttnConfig:
  """Checks a configuration and normalizes it: dtypes are numpy's, names are plain strings.

  Raises:
    ValueError: `config` is not an AttnConfig, the value of a field is not what the comments of
      AttnConfig describe, or two fields contradict each other; the message has the values.
  """
  checked(config)
  normal: dict[str, Any] = {"partition_axis": config.partition_axis or PartitionAxis()}
  for name in ("attn_mechanism", "decode_attn_mechanism"):
    if getattr(config, name) is not None:
      checks.one_of(name, getattr(config, name), [m.value for m in AttentionMechanism],
                    OTHER_MECHANISM_NAMES)
      normal[name] = AttentionMechanism(getattr(config, name)).value
  for name in ("attn_dtype", "kvdtype", "attn_softmax_dtype"):
    normal[name] = _dtype(name, getattr(config, name), optional=name == "kvdtype")
  for name in _FLAGS:
    checks.require(isinstance(getattr(config, name), bool), name, repr(getattr(config, name)),
                   "True or False")
  for name in _COUNTS:
    if getattr(config, name) is not None or AttnConfig._field_defaults[name] is not None:
      checks.integer(name, getattr(config, name), "an int >= 1", lambda x: x >= 1)
  checks.one_of("easy_method", config.easy_method, [method.value for method in EasyMethod])
  normal["easy_method"] = EasyMethod(config.easy_method).value
  checks.one_of("moe_method", config.moe_method, MOE_METHODS)
  checks.one_of("flash_attention_backward_pass_impl", config.flash_attention_backward_pass_impl,
                BACKWARD_IMPLEMENTATIONS)
  OperationMetadata.from_config(config)  # checks devices, mesh, axes and block sizes
  remat.checkpoint_policy(config.gradient_checkpointing, config.gradient_checkpointing_targets)
  _check_carried(config)
  _check_numbers(config)
  _check_layers(config)
  return config._replace(**normal)


def _check_carried(config: AttnConfig) -> None:
  """Checks the fields that are unused here: hashable, JSON-serializable, of the documented type."""
  checks.require(config.model_type is None or isinstance(config.model_type, str), "model_type",
                 repr(config.model_type), "a model type of a model hub, such as 'llama', or None")
  for name in ("quantization_config", "kv_cache_quantization_config", "extras"):
    try:
      hash(getattr(config, name))
      json.dumps(getattr(config, name), allow_nan=False)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{name}={getattr(config, name)!r}: expected hashable, JSON-serializable "
                       f"values; {error}") from error
  checks.require(isinstance(config.extras, tuple) and all(
      isinstance(pair, tuple) and list(map(type, pair)) == [str, str] for pair in config.extras),
                 "extras", repr(config.extras), "pairs (name, JSON); attach_custom_arguments "
                 "makes them")
  axis_names(config.kv_cache_sharding_sequence_axis_name, "kv_cache_sharding_sequence_axis_name")
  if config.partition_rules is not None:
    check_rules("partition_rules", config.partition_rules)


def _check_numbers(config: AttnConfig) -> None:
  """Checks scales, ratios, numbers of heads and the sizes of the mesh."""
  for name in ("softmax_scale", "logits_soft_cap"):
    if getattr(config, name) is not None:
      checks.number(name, getattr(config, name), "a finite number > 0, or None",
                    lambda x: 0 < x < math.inf)
  for name in ("dropout_prob", "fcm_min_ratio", "fcm_max_ratio"):
    checks.number(name, getattr(config, name), "a number in [0, 1)", lambda x: 0 <= x < 1)
  if config.temperature_tuning is not None:
    checks.require(isinstance(config.temperature_tuning, tuple)
                   and len(config.temperature_tuning) == 2, "temperature_tuning",
                   repr(config.temperature_tuning), "(strength, step in tokens), or None")
    strength, step = config.temperature_tuning
    checks.number("temperature_tuning", strength, "a finite strength >= 0",
                  lambda x: 0 <= x < math.inf)
    checks.integer("temperature_tuning", step, "a step >= 1 (tokens)", lambda x: x >= 1)
  checks.require(config.fcm_min_ratio <= config.fcm_max_ratio, "fcm_min_ratio",
                 config.fcm_min_ratio, f"at most fcm_max_ratio={config.fcm_max_ratio}")
  heads, key_heads = config.num_attention_heads, config.num_key_value_heads
  checks.require(heads is None or key_heads is None or heads % key_heads == 0,
                 "num_key_value_heads", key_heads, f"a divisor of num_attention_heads={heads}")
  dims, names = config.sharding_axis_dims, config.sharding_axis_names
  for name in ("sharding_axis_dims", "sharding_axis_names", "sharding_dcn_axis_dims"):
    value = getattr(config, name)
    checks.require(isinstance(value, (tuple, list)) or (value is None and "dcn" in name), name,
                   repr(value), "a tuple with one entry for each axis of the mesh")
  checks.require(len(dims) == len(names), "sharding_axis_dims", dims,
                 f"one size for each of sharding_axis_names={names}")


def _check_layers(config: AttnConfig) -> None:
  """Checks that the layer types, ropes, windows and chunks agree."""
  types, layers = config.layer_types, config.num_hidden_layers
  if config.sliding_window is not None:
    checks.require(isinstance(config.sliding_window, tuple) and len(config.sliding_window) == 2
                   and all(isinstance(side, int) and side >= -1 for side in config.sliding_window),
                   "sliding_window", repr(config.sliding_window), "(left, right) in tokens, -1 for "
                   "unbounded; 'W tokens, itself included' is (W - 1, 0)")
  checks.require(
      isinstance(config.layer_ropes, (tuple, list)) and all(
          isinstance(pair, (tuple, list)) and len(pair) == 2 and pair[0] in LAYER_TYPES
          and isinstance(pair[1], Rope) for pair in config.layer_ropes),
      "layer_ropes", repr(config.layer_ropes),
      f"pairs (layer type, Rope) with layer types of {', '.join(LAYER_TYPES)}")
  for rope in (config.rope, *(rope for _, rope in config.layer_ropes)):
    check_rope(rope)
  last = math.inf if layers is None else layers
  checks.require(isinstance(config.layers_without_rope, (tuple, list)) and all(
      type(layer) is int and 0 <= layer < last for layer in config.layers_without_rope),
                 "layers_without_rope", repr(config.layers_without_rope), "layer indices, "
                 f"from 0 to {'num_hidden_layers' if layers is None else layers} - 1")
  if types is None:
    checks.require(config.sliding_window is None or config.chunk_size is None, "sliding_window",
                   f"{config.sliding_window} with chunk_size={config.chunk_size}, no layer_types",
                   "layer_types, which assign them to layers")
    return
  checks.require(isinstance(types, (tuple, list)), "layer_types", repr(types),
                 f"a tuple of {', '.join(LAYER_TYPES)}, one for each layer")
  for kind in types:
    checks.one_of("layer_types", kind, LAYER_TYPES)
  checks.require(layers is None or len(types) == layers, "layer_types", f"{len(types)} of them",
                 f"num_hidden_layers={layers}")
  for kind, name in (("sliding_attention", "sliding_window"), ("chunked_attention", "chunk_size")):
    used, value = kind in types, getattr(config, name)
    checks.require(used == (value is not None), name, value,
                   f"{'a value' if used else 'None'}, since {types.count(kind)} of "
                   f"{len(types)} layer_types are {kind!r}")


def _dtype(name: str, value: DTypeLike | None, optional: bool) -> np.dtype | None:
  """Converts a field to a numpy dtype; None stays None if `optional`."""
  if value is None and optional:
    return None
  try:
    dtype = jnp.dtype(value)
  except TypeError:
    dtype = None
  checks.require(dtype is not None and value is not None, name, repr(value),
                 "a dtype, such as jnp.bfloat16 or 'float32'")
  return dtype
