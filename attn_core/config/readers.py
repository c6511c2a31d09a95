# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a model hub's config.json into an `AttnConfig`, with the model's defaults in `models`.

Every model type has different defaults and meanings; others than those of MODELS are an error.
"""

from collections.abc import Mapping, Sequence
import json
import math
from typing import Any
import warnings

import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.config import layer_patterns as patterns
from attn_core.config.config import AttnConfig, get_head_dim
from attn_core.config.layer_patterns import CHUNKED, FULL, INDEXED, LINEAR, SLIDING
from attn_core.config.models import MODELS, Model
from attn_core.config.other_keys import OTHER_KEYS
from attn_core.config.validate import validated
from attn_core.rope.frequencies import Rope, rope_from_dict, scale_of, yarn_mscale

# Names in some files -> the same in the others.
RENAMED = {"torch_dtype": "dtype", "_sliding_window_pattern": "sliding_window_pattern",
           "layers_block_type": "layer_types"}

# Older names of layer types.
OLDER_TYPES = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}

# Keys that assign masks to layers.
_PATTERN_KEYS = ("sliding_window", "sliding_window_pattern", "use_sliding_window",
                 "max_window_layers", "no_rope_layers", "no_rope_layer_interval",
                 "full_attention_interval", "index_topk")


def read_config(data: Mapping[str, Any]) -> AttnConfig:
  """Reads the attention of a hub's config.json.

  A window of `w` tokens, including the query's own, becomes (w - 1, 0). `rope_scaling` (older) and
  `rope_parameters` (newer, also one per layer type) are read alike. For a model of text and images
  the text part is read, from `text_config` if there is one. Every key that is not read is kept in
  `extras` under its name; a warning lists unknown keys.

  Args:
    data: the file's contents.

  Returns:
    An AttnConfig; fields that do not describe the model have their defaults.

  Raises:
    NotImplementedError: the model type is not supported, or use_bidirectional_attention is true.
      Where it is "vision", tokens of the same image see each other besides: pass such a mask.
    ValueError: `data` is not a mapping, the model type is missing, or values have the wrong type,
      are out of range or contradict each other.
  """
  checks.require(isinstance(data, Mapping), "data", type(data).__name__, "a mapping")
  checks.require(isinstance(data.get("model_type"), str), "model_type",
                 repr(data.get("model_type")), f"one of {', '.join(MODELS)}")
  text = _mapping("text_config", data.get("text_config"))
  keys = {**_renamed({k: v for k, v in data.items() if k != "text_config"}), **_renamed(text)}
  model_type = keys["model_type"]
  if model_type not in MODELS:
    raise NotImplementedError(
        f"model_type={model_type!r} has no reader; expected one of {', '.join(MODELS)}. Make an "
        "AttnConfig from the values: AttnConfig(num_attention_heads=..., head_dim=..., ...)")
  model = MODELS[model_type]
  for there, here in model.names.items():
    if keys.get(there) is not None and keys.get(here) is None:
      keys[here] = keys.pop(there)
  return _read(model, _Keys(keys, model.defaults))


def _renamed(data: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of a file under one of their spellings, where newer and older files differ."""
  keys = dict(data)
  for there, here in RENAMED.items():
    if keys.get(there) is not None and keys.get(here) is None:
      keys[here] = keys.pop(there)
  return keys


class _Keys:
  """The keys of a file, with a model's defaults; records which keys have been read.

  A null in the file overrides the default: "sliding_window": null means no window.
  """

  def __init__(self, given: dict[str, Any], defaults: dict[str, Any]):
    self.given, self.defaults = given, defaults
    self.used: set[str] = set()
    self.all = {**defaults, **given}

  def get(self, *names: str) -> Any:
    """The value of the first of these names that the file has, else that the defaults have."""
    self.used.update(names)
    return next((source[name] for source in (self.given, self.all) for name in names
                 if source.get(name) is not None), None)

  def own(self, name: str) -> Any:
    """The value of a key that has a default for this model; None for others, which stay unread."""
    return self.get(name) if name in self.defaults else None

  def left(self) -> dict[str, Any]:
    """The keys of the file that have not been read."""
    return {name: value for name, value in self.given.items()
            if name not in self.used and value is not None}


def _read(model: Model, keys: _Keys) -> AttnConfig:
  """Reads the configuration of a known model."""
  get, own = keys.get, keys.own
  if keys.given.get("use_bidirectional_attention") not in (None, False, "vision"):
    raise NotImplementedError("use_bidirectional_attention=true is not supported; make an "
                              "AttnConfig(causal=False, sliding_window=(w, w), ...)")
  checks.one_of("position_embedding_type", get("position_embedding_type"), (
      None, *model.position_types))
  layers, heads = (checks.integer(name, get(name), "an int >= 1", lambda x: x >= 1)
                   for name in ("num_hidden_layers", "num_attention_heads"))
  config = AttnConfig(
      model_type=get("model_type"), num_hidden_layers=layers, num_attention_heads=heads,
      hidden_size=get("hidden_size"), num_key_value_heads=get("num_key_value_heads") or heads,
      head_dim=get("head_dim"),
      max_position_embeddings=get("max_position_embeddings") or own("model_max_length"),
      softmax_scale=_softmax_scale(model, keys), sinks=model.sinks,
      causal=model.causal or bool(own("is_decoder")) and patterns.flag(keys.all, "is_decoder"),
      logits_soft_cap=own("attn_logit_softcapping"),
      dropout_prob=get("attention_dropout", "attention_probs_dropout_prob") or 0.0)
  if get("dtype") not in (None, "auto"):
    config = config._replace(attn_dtype=_dtype(get("dtype")))
  config = _with_widths(_with_layers(config, model, keys), model, keys)
  config = _with_position_bias(config, keys)
  config, unknown = _with_ropes(config, model, keys)
  config = _with_temperature(config, model, keys, unknown)
  extras = {**keys.left(), **unknown}
  known = OTHER_KEYS
  if config.rope.rope_type == "none":
    known |= {"rope_theta", "rope_scaling", "rope_parameters"}
  unexpected = sorted(set(extras) - known)
  if unexpected:
    warnings.warn(f"config.json of model_type={config.model_type!r}: {unexpected} are not read; "
                  "they are kept in `extras`", stacklevel=4)
  return validated(config._replace(extras=tuple(sorted(
      (name, json.dumps(value)) for name, value in extras.items()))))


def _with_widths(config: AttnConfig, model: Model, keys: _Keys) -> AttnConfig:
  """Adds widths and numbers of heads of models whose heads are not all alike."""
  if keys.own("qk_rope_head_dim"):  # latent attention
    parts = [patterns.count(keys.all, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    keys.get("qk_nope_head_dim", "qk_head_dim")  # the latter is the sum of the two
    return config._replace(
        rope_head_dim=parts[1] if model.has_rope else None, head_dim=sum(parts),
        value_head_dim=keys.get("v_head_dim"), latent_width=keys.own("kv_lora_rank"),
        num_key_value_heads=config.num_attention_heads)
  width, heads = _full_attention_widths(config, keys)
  if width not in (None, config.head_dim) and config.head_dim is not None:
    config = config._replace(head_dim=width, layer_head_dims=((SLIDING, config.head_dim),))
  if heads not in (None, config.num_key_value_heads) and config.num_key_value_heads is not None:
    config = config._replace(num_key_value_heads=heads, layer_key_value_heads=(
        (SLIDING, config.num_key_value_heads),))
  return config


def _full_attention_widths(config: AttnConfig, keys: _Keys) -> tuple[int | None, int | None]:
  """(D, K) of layers with full attention where they may have their own; None: as the others."""
  name, layers = "per_layer_config", config.layer_types or ()
  given = _mapping(name, keys.own(name))
  if not given:
    heads = keys.own("num_global_key_value_heads")
    return keys.own("global_head_dim"), heads if keys.own("attention_k_eq_v") else None
  full = {layer for layer, kind in enumerate(layers) if kind == FULL}
  parts = list(given.values())
  checks.require(
      all(str(layer).isdigit() for layer in given) and set(map(int, given)) == full
      and all(isinstance(part, Mapping) and part == parts[0] for part in parts)
      and set(parts[0]) <= {"head_dim", "num_key_value_heads"}, name, repr(given),
      f"the same head_dim and num_key_value_heads for each of the layers {sorted(full)}, which "
      "have full attention")
  return parts[0].get("head_dim"), parts[0].get("num_key_value_heads")


def _with_position_bias(config: AttnConfig, keys: _Keys) -> AttnConfig:
  """Adds ALiBi or the biases of T5, and what else the files of these models say in their way."""
  get, own = keys.get, keys.own
  if own("relative_attention_num_buckets"):
    return config._replace(relative_buckets=(
        get("relative_attention_num_buckets"), get("relative_attention_max_distance")))
  if "attn_config" in keys.defaults:  # MPT; its dictionary stays in the extras
    part = _mapping("attn_config", keys.all["attn_config"])
    if part.get("prefix_lm") or part.get("attn_type") not in (None, "multihead_attention"):
      raise NotImplementedError(
          f"attn_config has prefix_lm={part.get('prefix_lm')} and attn_type="
          f"{part.get('attn_type')!r}: only causal multihead_attention has a reader")
    config = config._replace(softmax_scale=part.get("softmax_scale"),
                             dropout_prob=part.get("attn_pdrop") or 0.0)
    if patterns.flag({"alibi": True, **part}, "alibi"):
      config = config._replace(alibi_bias_max=part.get("alibi_bias_max", 8))
    return config
  if "multi_query" in keys.defaults:  # Falcon, which scales its biases as it scales its scores
    newer, shared = (patterns.flag(keys.all, name) for name in (
        "new_decoder_architecture", "multi_query"))
    own("new_decoder_architecture"), own("multi_query")
    config = config._replace(alibi_scaled=patterns.flag(keys.all, "alibi"))
    if shared and not newer:
      config = config._replace(num_key_value_heads=1)
  if own("alibi"):
    config = config._replace(alibi_bias_max=8)
  return config


def _with_layers(config: AttnConfig, model: Model, keys: _Keys) -> AttnConfig:
  """Adds the layer types, and the sizes of the masks that they need."""
  layers = config.num_hidden_layers or 0
  given, types = _layer_types(model, keys, layers)
  if types is None:
    return config  # this model type has no windows: those of the file stay unread
  for name in _PATTERN_KEYS:
    keys.own(name)
  off = keys.all.get("use_sliding_window") is False
  checks.require(not (off and SLIDING in types), "use_sliding_window", False,
                 f"true, since {types.count(SLIDING)} layer_types are {SLIDING!r}")

  def needed(name: str, kind: str) -> Any:
    value = keys.get(name) if kind in types else keys.own(name)
    # A value that the file has besides its layer types is kept, so that `validated` rejects it if
    # they do not need it; a default is dropped.
    return value if kind in types or (given and name in keys.given) else None

  window = None if off else needed("sliding_window", SLIDING)
  if window is not None:
    checks.integer("sliding_window", window, "an int >= 1 (tokens, itself included)",
                   lambda x: x >= 1)
  ropes: Sequence[bool | int] = [model.full_has_rope or kind != FULL for kind in types]
  if "no_rope_layers" in model.defaults:
    ropes = patterns.llama4_ropes(keys.all, layers)
  return config._replace(
      layer_types=types, sliding_window=None if window is None else (window - 1, 0),
      chunk_size=needed("attention_chunk_size", CHUNKED), index_topk=needed("index_topk", INDEXED),
      layers_without_rope=tuple(i for i, has_rope in enumerate(ropes) if not has_rope))


def _layer_types(
    model: Model, keys: _Keys, layers: int) -> tuple[bool, tuple[str, ...] | None]:
  """(whether the file has layer types, a type for each layer; None: all are alike)."""
  given = keys.get("layer_types")
  checks.require(given is None or isinstance(given, (list, tuple)), "layer_types", repr(given),
                 f"a list of {layers} names, one for each of num_hidden_layers")
  types: tuple[str, ...] | None
  if given:
    types = tuple(OLDER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in given)
  else:
    types = model.pattern(keys.all, layers)
  if types is not None and model.window_in_full and keys.all.get("sliding_window") is not None:
    types = tuple(SLIDING if kind == FULL else kind for kind in types)
  return bool(given), types


def _with_ropes(
    config: AttnConfig, model: Model, keys: _Keys) -> tuple[AttnConfig, dict[str, Any]]:
  """(configuration with rotary embeddings and DeepSeek's scale, unknown rope parameters)."""
  if not model.has_rope or config.alibi_bias_max is not None or ("rope" in model.position_types
                            and keys.get("position_embedding_type") != "rope"):
    if keys.own("mla_use_nope") is False:
      raise NotImplementedError("mla_use_nope=false is not supported: the published code of "
                                f"model_type={config.model_type!r} has no rotary embedding")
    return config._replace(rope=Rope("none")), {}
  interleaved, shared = keys.own("rope_interleave"), _shared_rope_parameters(config, keys)
  unknown: dict[str, Any] = {}

  def read(parameters: Any, theta: float, where: str) -> Rope:
    rope, left = rope_from_dict(
        {**shared, **_mapping(where, parameters)}, theta, config.max_position_embeddings,
        model.interleaved if interleaved is None else interleaved)
    unknown.update({f"{where}.{name}": value for name, value in left.items()})
    return rope

  theta = keys.get("rope_theta")
  local = keys.own("rope_local_base_freq") or theta  # of layers with a window
  name, parameters = _rope_parameters(keys)
  nested = {kind: part for kind, part in parameters.items() if kind in (FULL, SLIDING, CHUNKED)}
  if nested:
    ropes = {kind: read(part, local if kind == SLIDING else theta, f"{name}.{kind}")
             for kind, part in nested.items()}
  else:
    ropes = {FULL: read(parameters, theta, name)}
    if not model.scaling_in_windows:
      ropes[SLIDING] = read(None, local, name)
  main = ropes.pop(FULL) if FULL in ropes else next(iter(ropes.values()))
  config = config._replace(rope=main, layer_ropes=tuple(sorted(ropes.items())))
  if config.rope_head_dim and main.rope_type != "default" and main.mscale_all_dim:
    scale = yarn_mscale(scale_of(main) or 1.0, main.mscale_all_dim)
    config = config._replace(softmax_scale=get_head_dim(config)**-0.5 * scale**2)
  return config, unknown


def _rope_parameters(keys: _Keys) -> tuple[str, Mapping[str, Any]]:
  """(key, value) of the key that has the rotary embedding, in the file or else in the defaults."""
  names = ("rope_parameters", "rope_scaling")
  name = next((name for source in (keys.given, keys.defaults) for name in names
               if source.get(name)), names[1])
  parameters = _mapping(name, keys.get(name))
  checks.require(name == "rope_scaling" or not keys.given.get("rope_scaling"), "rope_scaling",
                 keys.given.get("rope_scaling"), f"null, since rope_parameters={parameters}")
  return name, parameters


def _shared_rope_parameters(config: AttnConfig, keys: _Keys) -> dict[str, Any]:
  """Parameters of all rotary embeddings of a model, where these do not have their own."""
  shared = {name: keys.get(name) for name in ("partial_rotary_factor",
                                              "original_max_position_embeddings")}
  shared |= {name: keys.own(name) for name in ("mrope_section", "mrope_interleaved")}
  if keys.own("rotary_dim") is not None and shared["partial_rotary_factor"] is None:
    shared["partial_rotary_factor"] = patterns.count(keys.all, "rotary_dim") / get_head_dim(config)
  return {name: value for name, value in shared.items() if value is not None}


def _with_temperature(
    config: AttnConfig, model: Model, keys: _Keys, unknown: dict[str, Any]) -> AttnConfig:
  """Adds the temperature of queries; what it reads of unknown rope parameters is taken out."""
  if model.scales_all_queries:
    beta = [unknown.pop(name) for name in list(unknown) if name.endswith(".llama_4_scaling_beta")]
    if not beta:
      return config
    step = config.rope.original_max_position_embeddings or config.max_position_embeddings
    return config._replace(temperature_tuning=(beta[0], step), temperature_offset=0,
                           temperature_with_rope=True)
  name = "attn_temperature_tuning"
  tuned, *numbers = map(keys.own, (name, "attn_scale", "floor_scale"))
  # Published files have a number instead of true.
  checks.require(tuned is None or isinstance(tuned, int), name, repr(tuned), "true or false")
  return config._replace(temperature_tuning=tuple(numbers)) if tuned else config


def _softmax_scale(model: Model, keys: _Keys) -> float | None:
  """The scale of a model's logits; None: D**-0.5."""
  multiplier, scalar = keys.own("attention_multiplier"), keys.own("query_pre_attn_scalar")
  if multiplier is not None:  # Granite
    return checks.number("attention_multiplier", multiplier, "a finite number > 0",
                         lambda x: 0 < x < math.inf)
  if scalar is not None:  # Gemma: whatever the width
    return checks.number("query_pre_attn_scalar", scalar, "a finite number > 0",
                         lambda x: 0 < x < math.inf)**-0.5
  return model.softmax_scale


def _dtype(name: Any) -> np.dtype:
  """The dtype of a model's weights and activations."""
  try:
    dtype = jnp.dtype(name) if isinstance(name, str) else np.dtype(int)
  except TypeError:
    dtype = np.dtype(int)
  checks.require(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2, "dtype", repr(name),
                 "a floating-point dtype of at least 16 bits, such as 'bfloat16'")
  return dtype


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
  """Converts null to an empty dictionary.

  Raises:
    ValueError: `value` is neither a dictionary nor null.
  """
  checks.require(value is None or isinstance(value, Mapping), name, repr(value),
                 "a dictionary or null")
  return value or {}
