"""`AttnConfig`: what a model's configuration says about its attention, as one immutable value.

`config_merge` makes new ones of it. Letters: H query heads, K key heads, D and E widths of a head,
N layers.
"""

import enum
import json
import math
from typing import Any, NamedTuple, TypedDict

import jax
from jax.sharding import Mesh, PartitionSpec
import jax.numpy as jnp

from attn_core import checks
from attn_core.config import remat
from attn_core.rope.frequencies import Rope, check_rope
from attn_core.config.metadata import OperationMetadata
from attn_core.sharding import mesh as mesh_lib
from attn_core.sharding.partition import PartitionAxis, axis_names
from attn_core.sharding.rules import check_rules
from attn_core.types import AttentionMechanism, BlockSizes

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class EasyMethod(str, enum.Enum):
  """What a model is set up for."""

  TRAIN = "train"
  SERVE = "serve"
  EVAL = "serve"
  CONVERT = "convert"


class AttnConfig(NamedTuple):
  """Static and hashable; what belongs to the caller's model is carried for it and not used here."""

  # Where it runs.
  sharding_axis_dims: tuple[int, ...] = (1, -1, 1, 1, 1)  # as `create_mesh` takes them
  sharding_dcn_axis_dims: tuple[int, ...] | None = None
  sharding_axis_names: tuple[str, ...] = mesh_lib.AXIS_NAMES
  # What it runs: names of AttentionMechanism; None: attn_mechanism.
  attn_mechanism: str = "vanilla"
  decode_attn_mechanism: str | None = None
  blocksize_k: int | None = 128  # key tokens; None: tuned
  blocksize_q: int | None = 128  # query tokens; None: tuned
  blocksize_b: int | None = 1  # batch rows; None: tuned
  moe_tiling_size_batch: int = 4  # of the caller's experts
  moe_tiling_size_seqlen: int = 128  # of the caller's experts
  moe_tiling_size_dim: int = 128  # of the caller's experts
  partition_axis: PartitionAxis = PartitionAxis()
  use_sharded_kv_caching: bool = False
  use_sharding_constraint: bool = False  # of the caller's model
  backend: str | None = None  # as OperationMetadata takes it
  platform: str | None = None  # a key of metadata.BACKENDS, "triton" or "jax"; None: the backend's
  easy_method: str = "train"  # a value of EasyMethod
  bits: int | None = None  # of the caller's quantised weights
  scan_ring_attention: bool = True
  scan_attention_layers: bool = False  # of the caller's model
  use_scan_mlp: bool = False  # of the caller's model
  scan_mlp_chunk_size: int = 1024  # of the caller's model, tokens
  sequence_axis_name: str = "sp"
  gradient_checkpointing: str = ""  # a name that `checkpoint_policy` knows
  gradient_checkpointing_targets: tuple[str, ...] | None = None  # for the policies that name some
  precompute_masks: bool = True  # carried only: a mask here is a value and costs nothing
  kv_cache_quantization_config: Any = None  # hashable and of JSON; see `config_merge.frozen`
  quantization_config: Any = None  # of the caller's quantised weights
  kv_cache_sharding_sequence_axis_name: str | tuple[str, ...] = "sp"
  flash_attention_backward_pass_impl: str = "triton"  # carried only: the table chooses
  attn_dtype: Any = jnp.dtype("bfloat16")
  kvdtype: Any = None  # of caches; None: attn_dtype
  attn_softmax_dtype: Any = jnp.dtype("float32")
  fcm_max_ratio: float = 0.0  # the largest share of keys that `get_fcm_mask` drops
  fcm_min_ratio: float = 0.0  # the smallest one
  hardware_abstraction: bool = False  # of the caller's model
  pallas_m_block_size: int = 128  # of the caller's products
  pallas_k_block_size: int = 128  # of the caller's products
  pallas_n_block_size: int = 128  # of the caller's products
  moe_method: str = "fused_moe"  # one of MOE_METHODS, of the caller's experts
  moe_force_xla_gmm: bool = False  # of the caller's experts
  use_expert_tensor_mode: bool = False  # of the caller's experts
  use_ring_of_experts: bool = False  # of the caller's experts
  fsdp_is_ep_bound: bool = True  # as `expert_mesh` takes it
  sp_is_ep_bound: bool = True  # as `expert_mesh` takes it
  operation_configs: tuple[tuple[str, BlockSizes], ...] = ()  # (mechanism, block sizes)

  # The model's attention; None: not known.
  model_type: str | None = None  # as model hubs call it
  num_hidden_layers: int | None = None  # N
  hidden_size: int | None = None
  num_attention_heads: int | None = None  # H
  num_key_value_heads: int | None = None  # K; None: H
  head_dim: int | None = None  # D of query and key; None: hidden_size / H
  value_head_dim: int | None = None  # E; None: D
  rope_head_dim: int | None = None  # width that `rope` turns, a head's last part; None: D
  causal: bool = True
  softmax_scale: float | None = None  # None: D**-0.5
  logits_soft_cap: float | None = None
  dropout_prob: float = 0.0
  sinks: bool = False  # whether a head has a learned logit: attention's `softmax_aux`
  layer_types: tuple[str, ...] | None = None  # N of LAYER_TYPES; None: all layers are alike
  sliding_window: tuple[int, int] | None = None  # (left, right), as attention takes it, tokens
  chunk_size: int | None = None  # tokens
  rope: Rope = Rope()
  layer_ropes: tuple[tuple[str, Rope], ...] = ()  # (layer type, its own rope)
  layers_without_rope: tuple[int, ...] = ()  # numbers of layers, from 0
  # (strength, step in tokens) of `query_temperature`, in layers without rope; None: there is none
  temperature_tuning: tuple[float, int] | None = None
  max_position_embeddings: int | None = None  # tokens
  freq_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings
  mask_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings

  partition_rules: tuple[tuple[str, PartitionSpec], ...] | None = None  # (pattern, spec)
  mesh: Mesh | None = None  # as set_model_mesh sets it; None: see get_mesh
  extras: tuple[tuple[str, str], ...] = ()  # (name, JSON) without a field; `extras_of` reads them


jax.tree_util.register_static(AttnConfig)

# The fields as a dictionary, none of them required.
AttnConfigDict = TypedDict("AttnConfigDict", dict(AttnConfig.__annotations__), total=False)

MOE_METHODS = ("fused_moe", "standard_moe", "dense_moe")
BACKWARD_IMPLEMENTATIONS = ("triton", "xla")

# The fields that every model has, as against those of one model's attention.
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
  """The same configuration; its fields are looked at by `validated`.

  Raises:
    ValueError: it is no AttnConfig.
  """
  checks.require(isinstance(config, AttnConfig), "config", type(config).__name__, "an AttnConfig")
  return config


def get_mesh(config: AttnConfig) -> Mesh:
  """The mesh that was set, else one over all devices as the sharding fields say.

  Raises:
    ValueError: no AttnConfig, or as `create_mesh`: the sizes' product is not the number of devices,
      and the like.
  """
  if checked(config).mesh is not None:
    return config.mesh
  return mesh_lib.create_mesh(config.sharding_axis_dims, config.sharding_axis_names,
                              config.sharding_dcn_axis_dims, backend=config.backend)


def get_partition_rules(config: AttnConfig) -> tuple[tuple[str, PartitionSpec], ...]:
  """How the model's parameters are sharded: pairs for `match_partition_rules`.

  Raises:
    NotImplementedError: the configuration has none, since they are the model's.
    ValueError: it is no AttnConfig.
  """
  if checked(config).partition_rules is None:
    raise NotImplementedError(
        "get_partition_rules: which parameters there are is known to the model only; set "
        "AttnConfig(partition_rules=((pattern, PartitionSpec(...)), ...))")
  return config.partition_rules


def get_axis_dims(config: AttnConfig) -> tuple[int, ...]:
  """Devices along each axis of the mesh; -1: all that are left.

  Raises:
    ValueError: `config` is no AttnConfig.
  """
  return tuple(checked(config).sharding_axis_dims)


def get_axis_names(config: AttnConfig) -> tuple[str, ...]:
  """The names of the mesh's axes.

  Raises:
    ValueError: `config` is no AttnConfig.
  """
  return tuple(checked(config).sharding_axis_names)


def get_backend(config: AttnConfig) -> str:
  """The configured backend, else JAX's default one.

  Raises:
    ValueError: `config` is no AttnConfig.
  """
  return checked(config).backend or jax.default_backend()


def get_head_dim(config: AttnConfig) -> int:
  """D, the width of a query's head.

  Raises:
    ValueError: no AttnConfig, or one that knows neither it nor what it follows from.
  """
  if checked(config).head_dim is not None:
    return config.head_dim
  checks.require(config.hidden_size and config.num_attention_heads
                 and config.hidden_size % config.num_attention_heads == 0, "head_dim",
                 f"None with hidden_size={config.hidden_size} and "
                 f"num_attention_heads={config.num_attention_heads}",
                 "a width, or a hidden_size that the heads divide")
  return config.hidden_size // config.num_attention_heads


def validated(config: AttnConfig) -> AttnConfig:
  """The same configuration in its normal form: dtypes as numpy's, names as plain strings.

  Raises:
    ValueError: a field's value is not what AttnConfig says, or two of them contradict each other;
      the message has the values.
  """
  checked(config)
  normal = {"partition_axis": config.partition_axis or PartitionAxis()}
  for name in ("attn_mechanism", "decode_attn_mechanism"):
    if getattr(config, name) is not None:
      checks.one_of(name, getattr(config, name), [m.value for m in AttentionMechanism])
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
  OperationMetadata.from_config(config)  # knows what devices, meshes, axes and blocks can be
  remat.checkpoint_policy(config.gradient_checkpointing, config.gradient_checkpointing_targets)
  _check_carried(config)
  _check_numbers(config)
  _check_layers(config)
  return config._replace(**normal)


def _check_carried(config: AttnConfig) -> None:
  """What is kept for others is hashable, of JSON, and of the kind that its field says."""
  checks.require(config.model_type is None or isinstance(config.model_type, str), "model_type",
                 repr(config.model_type), "a model hub's name for it, or None")
  for name in ("quantization_config", "kv_cache_quantization_config", "extras"):
    try:
      hash(getattr(config, name))
      json.dumps(getattr(config, name), allow_nan=False)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{name}={getattr(config, name)!r}: expected hashable values that JSON "
                       f"knows; {error}") from error
  checks.require(isinstance(config.extras, tuple) and all(
      isinstance(pair, tuple) and list(map(type, pair)) == [str, str] for pair in config.extras),
                 "extras", repr(config.extras), "pairs (name, JSON), as attach_custom_arguments "
                 "makes them")
  axis_names(config.kv_cache_sharding_sequence_axis_name, "kv_cache_sharding_sequence_axis_name")
  if config.partition_rules is not None:
    check_rules("partition_rules", config.partition_rules)


def _check_numbers(config: AttnConfig) -> None:
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
  """The pattern of layers, windows and chunks agree."""
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
                 "layers_without_rope", repr(config.layers_without_rope), "numbers of layers, "
                 f"from 0 to {'N' if layers is None else layers} - 1")
  if types is None:
    checks.require(config.sliding_window is None or config.chunk_size is None, "sliding_window",
                   f"{config.sliding_window} with chunk_size={config.chunk_size}, no layer_types",
                   "layer_types that say which layer has which")
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


def _dtype(name: str, value: Any, optional: bool):
  if value is None and optional:
    return None
  try:
    dtype = jnp.dtype(value)
  except TypeError:
    dtype = None
  checks.require(dtype is not None and value is not None, name, repr(value),
                 "a dtype, such as jnp.bfloat16 or 'float32'")
  return dtype
