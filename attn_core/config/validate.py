# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks the fields of an `AttnConfig`."""

import json
import math
from typing import Any

from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.config import remat
from attn_core.config.config import AUTOMATIC, LAYER_TYPES, AttnConfig, EasyMethod, checked
from attn_core.config.metadata import OperationMetadata
from attn_core.config.other_names import OTHER_MECHANISM_NAMES
from attn_core.rope.frequencies import Rope, check_rope
from attn_core.sharding.partition import PartitionAxis, axis_names
from attn_core.sharding.rules import check_rules
from attn_core.types import MECHANISM_ALIASES, AttentionMechanism

MOE_METHODS = ("fused_moe", "standard_moe", "dense_moe")
BACKWARD_IMPLEMENTATIONS = ("triton", "xla")

_FLAGS = tuple(
    name for name, value in AttnConfig._field_defaults.items() if isinstance(value, bool))
# Whole numbers of at least 1.
_COUNTS = (
    "moe_tiling_size_batch", "moe_tiling_size_seqlen", "moe_tiling_size_dim", "bits",
    "scan_mlp_chunk_size", "pallas_m_block_size", "pallas_k_block_size", "pallas_n_block_size",
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "value_head_dim", "latent_width", "rope_head_dim", "chunk_size", "index_topk",
    "max_position_embeddings", "freq_max_position_embeddings", "mask_max_position_embeddings")


def validated(config: AttnConfig) -> AttnConfig:
  """Checks a configuration and normalizes it: dtypes are numpy's, names and numbers are Python's.

  Raises:
    ValueError: `config` is not an AttnConfig, the value of a field is not what the comments of
      AttnConfig describe, or two fields contradict each other; the message has the values.
  """
  checked(config)
  _check_unset(config)
  normal: dict[str, Any] = {"partition_axis": config.partition_axis or PartitionAxis()}
  for name in ("attn_mechanism", "decode_attn_mechanism"):
    if getattr(config, name) is not None:
      known = [*(m.value for m in AttentionMechanism), *MECHANISM_ALIASES]
      checks.one_of(name, getattr(config, name), known, OTHER_MECHANISM_NAMES)
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
  remat.checkpoint_policy(
      config.gradient_checkpointing, config.gradient_checkpointing_targets,
      arguments=("gradient_checkpointing", "gradient_checkpointing_targets"))
  _check_carried(config)
  _check_numbers(config)
  _check_layers(config)
  plain = {name: _plain(value) for name, value in (config._asdict() | normal).items()}
  return config._replace(**plain)


def _plain(value: Any) -> Any:
  """Returns a value with Python's numbers in place of numpy's, which JSON cannot hold."""
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, (tuple, list)) and not isinstance(value, PartitionSpec):
    found = [_plain(x) for x in value]
    return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
  return value


def _check_unset(config: AttnConfig) -> None:
  """Checks that fields that are not set have their defaults."""
  unset = config.unset
  checks.require(isinstance(unset, tuple) and set(unset) <= set(AUTOMATIC), "unset", repr(unset),
                 f"a tuple of names among {', '.join(AUTOMATIC)}")
  for name in unset:
    value = getattr(config, name)
    checks.require(value == AttnConfig._field_defaults[name], "unset",
                   f"{unset} with {name}={value!r}", "names of fields that have their default")


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
  for name in ("softmax_scale", "logits_soft_cap", "alibi_bias_max"):
    if getattr(config, name) is not None:
      checks.number(name, getattr(config, name), "a finite number > 0, or None",
                    lambda x: 0 < x < math.inf)
  if config.relative_buckets is not None:
    checks.require(isinstance(config.relative_buckets, tuple)
                   and len(config.relative_buckets) == 2, "relative_buckets",
                   repr(config.relative_buckets), "(number of buckets, distance), or None")
    for size in config.relative_buckets:
      checks.integer("relative_buckets", size, "ints >= 1", lambda x: x >= 1)
    checks.require(config.alibi_bias_max is None, "alibi_bias_max", config.alibi_bias_max,
                   f"None with relative_buckets={config.relative_buckets}")
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
  checks.integer("temperature_offset", config.temperature_offset, "an int >= 0 (tokens)",
                 lambda x: x >= 0)
  checks.require(config.fcm_min_ratio <= config.fcm_max_ratio, "fcm_min_ratio",
                 config.fcm_min_ratio, f"at most fcm_max_ratio={config.fcm_max_ratio}")
  heads, key_heads = config.num_attention_heads, config.num_key_value_heads
  for name in ("layer_key_value_heads", "layer_head_dims"):
    pairs = getattr(config, name)
    checks.require(isinstance(pairs, (tuple, list)) and all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and pair[0] in LAYER_TYPES
        for pair in pairs), name, repr(pairs),
                   f"pairs (layer type, number) with layer types of {', '.join(LAYER_TYPES)}")
    for _, number in pairs:
      checks.integer(name, number, "numbers that are ints >= 1", lambda x: x >= 1)
  for name, number in (("num_key_value_heads", key_heads),
                       *(("layer_key_value_heads", n) for _, n in config.layer_key_value_heads)):
    checks.require(heads is None or number is None or heads % number == 0, name, number,
                   f"a divisor of num_attention_heads={heads}")
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
  for kind, name in (("sliding_attention", "sliding_window"), ("chunked_attention", "chunk_size"),
                     ("indexed_attention", "index_topk")):
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
