# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`AttnConfig`: a model's attention configuration as one immutable value.

The functions of `config.merge` make new configurations from it, and `config.validate` checks it.
"""

import enum
from typing import Any, NamedTuple, Unpack

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
import jax.numpy as jnp

from attn_core import checks
from attn_core.config.config_dict import AttnConfigDict, JsonValue
from attn_core.rope.frequencies import Rope
from attn_core.sharding import mesh as mesh_lib
from attn_core.sharding.partition import PartitionAxis
from attn_core.types import BlockSizes

# indexed: a query sees the keys that the layer's index selects, see `index_mask`. linear: a layer
# without softmax, such as a state-space model, which the caller's model computes.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention",
               "linear_attention")

# Fields that the library chooses unless they are set. Their documented defaults can be read, and
# are used only if a caller sets them.
AUTOMATIC = ("attn_mechanism", "blocksize_k", "blocksize_q", "attn_dtype")


class EasyMethod(str, enum.Enum):
  """Purpose for which a model is set up."""

  TRAIN = "train"
  SERVE = "serve"
  EVAL = "serve"
  CONVERT = "convert"


class _Fields(NamedTuple):
  """The fields of `AttnConfig`, see there."""

  # Devices.
  sharding_axis_dims: tuple[int, ...] = (1, -1, 1, 1, 1)  # see `create_mesh`
  sharding_dcn_axis_dims: tuple[int, ...] | None = None
  sharding_axis_names: tuple[str, ...] = mesh_lib.AXIS_NAMES
  # Mechanisms are names of AttentionMechanism.
  attn_mechanism: str = "vanilla"  # unless it is set: auto
  decode_attn_mechanism: str | None = None  # in the decode modes; None: attn_mechanism
  blocksize_k: int | None = 128  # key tokens; None, or unless it is set: tuned
  blocksize_q: int | None = 128  # query tokens; None, or unless it is set: tuned
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
  # Of products, where it has 16 bits; unless it is set, or a model's file has a dtype: the arrays'
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
  num_key_value_heads: int | None = None  # K; None: H
  head_dim: int | None = None  # D of query and key; None: hidden_size / H
  # (layer type, number that replaces `num_key_value_heads`)
  layer_key_value_heads: tuple[tuple[str, int], ...] = ()
  layer_head_dims: tuple[tuple[str, int], ...] = ()  # (layer type, D that replaces `head_dim`)
  # E; None: D; unused here: the caller's model reads it
  value_head_dim: int | None = None
  latent_width: int | None = None  # of latent rows, without their rotary part; None: K and V
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
  index_topk: int | None = None  # number of keys that `index_mask` selects, tokens
  rope: Rope = Rope()
  layer_ropes: tuple[tuple[str, Rope], ...] = ()  # (layer type, rope that replaces `rope`)
  layers_without_rope: tuple[int, ...] = ()  # layer indices, from 0
  # (strength, step in tokens) of `query_temperature`; None: not scaled
  temperature_tuning: tuple[float, int] | None = None
  temperature_offset: int = 1  # >= 0, tokens, added to a position before the steps are counted
  temperature_with_rope: bool = False  # whether queries of layers with a rope are scaled too
  # The largest exponent of ALiBi's slopes, 2**-alibi_bias_max; None: no ALiBi; see layer_score_mod
  alibi_bias_max: float | None = None
  alibi_scaled: bool = False  # whether the softmax scale multiplies ALiBi too
  # (number of buckets, first distance of the last in tokens) of T5's biases; None: no such biases
  relative_buckets: tuple[int, int] | None = None
  max_position_embeddings: int | None = None  # tokens
  freq_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings
  mask_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings

  partition_rules: tuple[tuple[str, PartitionSpec], ...] | None = None  # (pattern, spec)
  mesh: Mesh | None = None  # set by set_model_mesh; None: see get_mesh
  extras: tuple[tuple[str, str], ...] = ()  # (name, JSON) of other values; read by `extras_of`
  unset: tuple[str, ...] = AUTOMATIC  # names of AUTOMATIC that are not set


class AttnConfig(_Fields):
  """Static, hashable configuration of a model's attention.

  Fields that are unused here are kept for the caller's model, so that one value holds a model's
  whole configuration. The mechanism, its blocks and its dtype have documented defaults, which are
  used only if they are set: `AttnConfig().attn_mechanism` is "vanilla", and runs "auto";
  `AttnConfig(attn_mechanism="vanilla")` runs "vanilla". The field `unset` keeps track.

  Example:
    >>> from attn_core import AttnConfig, attention_arguments
    >>> config = AttnConfig(blocksize_q=128, sliding_window=(1023, 0))
    >>> attention_arguments(config)["mechanism"], attention_arguments(config)["sliding_window"]
    ('auto', (1023, 0))
    >>> config.unset
    ('attn_mechanism', 'blocksize_k', 'attn_dtype')
  """

  __slots__ = ()

  def __new__(cls, *values: Any, **given: Unpack[AttnConfigDict]) -> "AttnConfig":
    names = {*cls._fields[:len(values)], *given}
    if "unset" not in names:
      given["unset"] = tuple(name for name in AUTOMATIC if name not in names)
    return super().__new__(cls, *values, **given)

  def _replace(self, **given: Any) -> "AttnConfig":
    given.setdefault("unset", tuple(name for name in self.unset if name not in given))
    return super()._replace(**given)

  __replace__ = _replace  # copy.replace of Python 3.13


jax.tree_util.register_static(AttnConfig)

# The fields before those that describe one model's attention.
BASICS = AttnConfig._fields[:AttnConfig._fields.index("model_type")]


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


def layer_type(config: AttnConfig, layer: int = 0) -> str:
  """The kind of a layer, one of LAYER_TYPES, also if all layers are alike.

  Raises:
    ValueError: `config` is not an AttnConfig, or `layer` is not the index of a layer.
  """
  types = checked(config).layer_types
  layers = config.num_hidden_layers if types is None else len(types)
  last = "num_hidden_layers" if layers is None else layers
  checks.integer("layer", layer, f"a number from 0 to {last} - 1",
                 lambda x: x >= 0 and (layers is None or x < layers))
  if types is not None:
    return types[layer]
  return ("sliding_attention" if config.sliding_window is not None else
          "chunked_attention" if config.chunk_size is not None else
          "indexed_attention" if config.index_topk is not None else "full_attention")


def get_head_dim(config: AttnConfig, layer: int | None = None) -> int:
  """D, the width of a query's head.

  Args:
    config: the configuration.
    layer: the index of a layer whose type may have a width of its own; None: `head_dim`.

  Raises:
    ValueError: as `layer_type`, or `head_dim` is None and `hidden_size` is None or not a multiple
      of `num_attention_heads`.
  """
  head_dim = checked(config).head_dim
  if layer is not None:
    head_dim = dict(config.layer_head_dims).get(layer_type(config, layer), head_dim)
  if head_dim is not None:
    return head_dim
  size, heads = config.hidden_size or 0, config.num_attention_heads or 0
  checks.require(size and heads and size % heads == 0, "head_dim",
                 f"None with hidden_size={config.hidden_size} and "
                 f"num_attention_heads={config.num_attention_heads}",
                 "a width, or a hidden_size that the heads divide")
  return size // heads


def get_key_value_heads(config: AttnConfig, layer: int | None = None) -> int:
  """K, the number of heads of keys and values.

  Args:
    config: the configuration.
    layer: the index of a layer whose type may have a number of its own; None:
      `num_key_value_heads`.

  Raises:
    ValueError: as `layer_type`, or `num_key_value_heads` and `num_attention_heads` are None.
  """
  heads = checked(config).num_key_value_heads or config.num_attention_heads
  if layer is not None:
    heads = dict(config.layer_key_value_heads).get(layer_type(config, layer), heads)
  checks.require(heads is not None, "num_key_value_heads", "None with num_attention_heads=None",
                 "a number of heads")
  assert heads is not None
  return heads
