# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a model hub's config.json into an `AttnConfig`.

A hub's file leaves out values that are the model's defaults, and every model type has different
defaults and a different meaning of a window. Unsupported model types are therefore an error.
"""

from collections.abc import Callable, Mapping
import json
import math
from typing import Any, NamedTuple
import warnings

from attn_core import checks
from attn_core.config.config import AttnConfig, get_head_dim, validated
from attn_core.rope.frequencies import Rope, rope_from_dict, scale_of, yarn_mscale

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

# (keys of the file, number of layers) -> a layer type for each layer; None: all are alike.
Pattern = Callable[[dict[str, Any], int], tuple[str, ...] | None]


class _Model(NamedTuple):
  """Defaults of a model type, and its assignment of masks to layers."""

  defaults: dict[str, Any] = {}  # those of the model's published code
  pattern: Pattern = lambda keys, layers: None
  causal: bool = True
  sinks: bool = False
  interleaved: bool = False  # whether neighboring dimensions make a pair of the rotary embedding
  has_rope: bool = True  # whether the model has a rotary embedding


def _every(kind: str) -> Pattern:
  """All layers are of one kind if the model has a window, else full."""
  return lambda keys, layers: (FULL if keys.get("sliding_window") is None else kind,) * layers


def _all_but_each(kind: str, key: str) -> Pattern:
  """All layers are of one kind, except every n-th, which is full; n is the value of `key`."""
  def pattern(keys: dict[str, Any], layers: int) -> tuple[str, ...]:
    step = _count(keys, key)
    return tuple(FULL if (i + 1) % step == 0 else kind for i in range(layers))
  return pattern


def _qwen(keys: dict, layers: int) -> tuple[str, ...]:
  """Layers from max_window_layers on have a window, if use_sliding_window is true."""
  first = layers
  if _flag(keys, "use_sliding_window"):
    first = checks.integer("max_window_layers", keys["max_window_layers"],
                           "an int >= 0, the first layer with a window", lambda x: x >= 0)
  return tuple(SLIDING if i >= first and keys.get("sliding_window") is not None else FULL
               for i in range(layers))


def _has_window(keys: dict) -> bool:
  """Whether a window is given and enabled."""
  return _flag(keys, "use_sliding_window") and keys.get("sliding_window") is not None


def _qwen2_moe(keys: dict, layers: int) -> tuple[str, ...]:
  """Every second layer before max_window_layers has a window, if use_sliding_window is true."""
  last = 0
  if _has_window(keys):
    last = checks.integer("max_window_layers", keys["max_window_layers"],
                          "an int >= 0, the first layer after those with a window",
                          lambda x: x >= 0)
  return tuple(SLIDING if i < last and i % 2 == 0 else FULL for i in range(layers))


def _qwen3_moe(keys: dict, layers: int) -> tuple[str, ...]:
  """All layers have a window, if use_sliding_window is true."""
  return (SLIDING if _has_window(keys) else FULL,) * layers


def _llama4(keys: dict, layers: int) -> tuple[str, ...]:
  """Layers with a rotary embedding attend within chunks, the others have full attention."""
  if keys.get("attention_chunk_size") is None:
    return (FULL,) * layers
  return tuple(CHUNKED if has_rope else FULL for has_rope in _llama4_ropes(keys, layers))


def _llama4_ropes(keys: dict, layers: int) -> tuple[int, ...]:
  """1 for every layer with a rotary embedding, 0 for the others."""
  given = keys.get("no_rope_layers")  # 1: the layer has a rotary embedding, despite the name
  if given:
    checks.require(isinstance(given, (list, tuple)) and len(given) == layers
                   and all(flag in (0, 1) for flag in given), "no_rope_layers", given,
                   f"{layers} of 0 and 1, one for each of num_hidden_layers")
    return tuple(given)
  step = _count(keys, "no_rope_layer_interval")
  return tuple(int((i + 1) % step != 0) for i in range(layers))


def _count(keys: dict, name: str) -> int:
  """The value of a key that is a number of layers or dimensions, an int >= 1."""
  return checks.integer(name, keys[name], "an int >= 1", lambda x: x >= 1)


def _flag(keys: dict, name: str) -> bool:
  """The value of a boolean key; False if it is null or missing."""
  value = keys.get(name)
  checks.require(value is None or isinstance(value, bool), name, repr(value), "true or false")
  return bool(value)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
  """Converts null to an empty dictionary.

  Raises:
    ValueError: `value` is neither a dictionary nor null.
  """
  checks.require(value is None or isinstance(value, Mapping), name, repr(value),
                 "a dictionary or null")
  return value or {}


_LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
          "max_position_embeddings": 2048, "rope_theta": 10000.0}
_MISTRAL = {**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_GEMMA = {"num_key_value_heads": 4, "num_attention_heads": 8, "num_hidden_layers": 26,
          "hidden_size": 2304, "head_dim": 256, "query_pre_attn_scalar": 256,
          "sliding_window": 4096, "rope_theta": 10000.0}
_QWEN = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "max_position_embeddings": 32768, "rope_theta": 10000.0,
         "use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_QWEN_VL = {**_QWEN, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80,
            "num_key_value_heads": 8, "rope_theta": 1000000.0, "max_window_layers": 80}
_ENCODER = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}

_gemma2 = _Model({**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                  "sliding_window_pattern": 2}, _all_but_each(SLIDING, "sliding_window_pattern"))
_gemma3 = _Model({**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
                  "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
                  "attn_logit_softcapping": None},
                 _all_but_each(SLIDING, "sliding_window_pattern"))
_llama4_text = _Model(
    {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
     "num_hidden_layers": 48, "max_position_embeddings": 131072, "rope_theta": 500000.0,
     "attention_chunk_size": 8192, "no_rope_layers": None, "no_rope_layer_interval": 4,
     "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192},
    _llama4, interleaved=True)
_qwen2 = _Model(_QWEN, _qwen)
_qwen2_vl = _Model({**_QWEN_VL, "mrope_section": [16, 24, 24]}, _qwen)
_qwen3_vl = _Model({**_QWEN, "head_dim": 128, "max_position_embeddings": 128000,
                    "rope_theta": 500000.0, "mrope_section": [24, 20, 20],
                    "mrope_interleaved": True}, _qwen)

MODELS = {
    "llama": _Model(_LLAMA),
    "llama4": _llama4_text,
    "llama4_text": _llama4_text,
    "mistral": _Model({**_MISTRAL, "sliding_window": 4096}, _every(SLIDING)),
    "mixtral": _Model({**_MISTRAL, "sliding_window": None, "rope_theta": 1000000.0},
                      _every(SLIDING)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "qwen2": _qwen2,
    "qwen2_moe": _Model({**_QWEN, "hidden_size": 2048, "num_attention_heads": 16,
                         "num_key_value_heads": 16, "num_hidden_layers": 24}, _qwen2_moe),
    "qwen2_vl": _qwen2_vl,
    "qwen2_vl_text": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "qwen2_5_vl_text": _qwen2_vl,
    "qwen3": _Model({**_QWEN, "head_dim": 128}, _qwen),
    "qwen3_moe": _Model({**_QWEN, "hidden_size": 2048, "num_key_value_heads": 4,
                         "num_hidden_layers": 24}, _qwen3_moe),
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_text": _qwen3_vl,
    "phi3": _Model({"hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32,
                    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
                    "rope_theta": 10000.0, "sliding_window": None}, _every(SLIDING)),
    "gpt_oss": _Model(
        {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
         "num_hidden_layers": 36, "max_position_embeddings": 131072, "rope_theta": 150000.0,
         "sliding_window": 128, "pattern": 2, "rope_scaling": {
             "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
             "truncate": False, "original_max_position_embeddings": 4096}},
        _all_but_each(SLIDING, "pattern"), sinks=True),
    "deepseek_v3": _Model(
        {"hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
         "max_position_embeddings": 4096, "rope_theta": 10000.0, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True}),
    "vit": _Model(_ENCODER, causal=False, has_rope=False),
    "bert": _Model({**_ENCODER, "max_position_embeddings": 512, "is_decoder": False},
                   causal=False, has_rope=False),
}

# Keys that assign masks to layers.
_PATTERN_KEYS = ("sliding_window", "sliding_window_pattern", "use_sliding_window",
                 "max_window_layers", "no_rope_layers", "no_rope_layer_interval")

# Keys that do not affect the values of an attention: kept in `extras` without a warning.
OTHER_KEYS = frozenset("""
    _name_or_path add_cross_attention architectures attention_bias auto_map bos_token_id
    chunk_size_feed_forward classifier_dropout decoder_sparse_step decoder_start_token_id dtype
    embd_pdrop encoder_stride ep_size eos_token_id experts_per_token final_logit_softcapping
    finetuning_task first_k_dense_replace gradient_checkpointing hidden_act hidden_activation
    hidden_dropout_prob id2label image_size image_token_id initial_context_length initializer_range
    interleave_moe_layer_step intermediate_size intermediate_size_mlp is_decoder is_encoder_decoder
    kv_lora_rank label2id layer_norm_eps layernorm_epsilon mlp_bias mlp_only_layers
    moe_intermediate_size moe_layer_freq moe_layers n_group n_routed_experts n_shared_experts
    norm_topk_prob num_channels num_experts num_experts_per_tok num_local_experts
    num_nextn_predict_layers output_attentions output_hidden_states output_router_logits
    pad_token_id patch_size pooler_act pooler_output_size pretraining_tp problem_type q_lora_rank
    qkv_bias quantization_config resid_pdrop return_dict rms_norm_eps routed_scaling_factor
    router_aux_loss_coef router_jitter_noise scoring_func shared_expert_intermediate_size
    swiglu_alpha swiglu_limit tie_word_embeddings topk_group topk_method torch_dtype
    transformers_version type_vocab_size use_cache video_token_id vision_config vision_end_token_id
    vision_start_token_id vision_token_id vocab_size
""".split())


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
    ValueError: `data` is not a mapping, the model type is missing, or values have the wrong type,
      are out of range or contradict each other.
  """
  checks.require(isinstance(data, Mapping), "data", type(data).__name__, "a mapping")
  checks.require(isinstance(data.get("model_type"), str), "model_type",
                 repr(data.get("model_type")), f"one of {', '.join(MODELS)}")
  text = _mapping("text_config", data.get("text_config"))
  keys = {**{k: v for k, v in data.items() if k != "text_config"}, **text}
  if "_sliding_window_pattern" in keys:  # the name in newer files
    keys["sliding_window_pattern"] = keys.pop("_sliding_window_pattern")
  model_type = keys["model_type"]
  if model_type not in MODELS:
    raise NotImplementedError(
        f"model_type={model_type!r} has no reader; expected one of {', '.join(MODELS)}. Make an "
        "AttnConfig from the values: AttnConfig(num_attention_heads=..., head_dim=..., ...)")
  return _read(MODELS[model_type], _Keys(keys, MODELS[model_type].defaults))


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


def _read(model: _Model, keys: _Keys) -> AttnConfig:
  """Reads the configuration of a known model."""
  get, own = keys.get, keys.own
  if get("use_bidirectional_attention"):
    raise NotImplementedError("use_bidirectional_attention=true is not supported; make an "
                              "AttnConfig(causal=False, sliding_window=(w, w), ...)")
  checks.one_of("position_embedding_type", get("position_embedding_type"), (None, "absolute"))
  layers, heads = (checks.integer(name, get(name), "an int >= 1", lambda x: x >= 1)
                   for name in ("num_hidden_layers", "num_attention_heads"))
  config = AttnConfig(
      model_type=get("model_type"), num_hidden_layers=layers, num_attention_heads=heads,
      hidden_size=get("hidden_size"), num_key_value_heads=get("num_key_value_heads") or heads,
      head_dim=get("head_dim"), max_position_embeddings=get("max_position_embeddings"),
      softmax_scale=_power(own("query_pre_attn_scalar")), sinks=model.sinks,
      causal=model.causal or bool(own("is_decoder")) and _flag(keys.all, "is_decoder"),
      logits_soft_cap=own("attn_logit_softcapping"),
      dropout_prob=get("attention_dropout", "attention_probs_dropout_prob") or 0.0)
  if own("qk_rope_head_dim"):
    config = config._replace(
        rope_head_dim=get("qk_rope_head_dim"), value_head_dim=get("v_head_dim"),
        head_dim=sum(_count(keys.all, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")),
        num_key_value_heads=heads)
    get("qk_nope_head_dim", "qk_head_dim")  # the latter is the sum of the two
  config = _with_layers(config, model, keys)._replace(temperature_tuning=_temperature(keys))
  config, unknown = _with_ropes(config, model, keys)
  extras = {**keys.left(), **unknown}
  unexpected = sorted(set(extras) - OTHER_KEYS)
  if unexpected:
    warnings.warn(f"config.json of model_type={config.model_type!r}: {unexpected} are not read; "
                  "they are kept in `extras`", stacklevel=4)
  return validated(config._replace(extras=tuple(sorted(
      (name, json.dumps(value)) for name, value in extras.items()))))


def _with_layers(config: AttnConfig, model: _Model, keys: _Keys) -> AttnConfig:
  """Adds the layer types, and the window and the chunk size that they need."""
  layers, given = config.num_hidden_layers or 0, keys.get("layer_types")
  checks.require(given is None or isinstance(given, (list, tuple)), "layer_types", repr(given),
                 f"a list of {layers} names, one for each of num_hidden_layers")
  types = tuple(given) if given else model.pattern(keys.all, layers)
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
  ropes = _llama4_ropes(keys.all, layers) if "no_rope_layers" in model.defaults else ()
  return config._replace(
      layer_types=types, sliding_window=None if window is None else (window - 1, 0),
      chunk_size=needed("attention_chunk_size", CHUNKED),
      layers_without_rope=tuple(i for i, has_rope in enumerate(ropes) if not has_rope))


def _with_ropes(
    config: AttnConfig, model: _Model, keys: _Keys) -> tuple[AttnConfig, dict[str, Any]]:
  """(configuration with rotary embeddings and DeepSeek's scale, unknown rope parameters)."""
  get, longest = keys.get, config.max_position_embeddings
  if not model.has_rope:
    return config._replace(rope=Rope("none")), {}
  interleaved = keys.own("rope_interleave")
  shared = {name: get(name) for name in ("partial_rotary_factor",
                                         "original_max_position_embeddings")}
  shared |= {name: keys.own(name) for name in ("mrope_section", "mrope_interleaved")}
  unknown: dict[str, Any] = {}

  def read(parameters: Any, theta: float, where: str) -> Rope:
    given = {**{k: v for k, v in shared.items() if v is not None}, **_mapping(where, parameters)}
    rope, left = rope_from_dict(given, theta, longest,
                                model.interleaved if interleaved is None else interleaved)
    unknown.update({f"{where}.{name}": value for name, value in left.items()})
    return rope

  theta, local = get("rope_theta"), keys.own("rope_local_base_freq")
  name = "rope_parameters" if get("rope_parameters") else "rope_scaling"
  parameters = _mapping(name, get(name))
  checks.require(name == "rope_scaling" or not keys.given.get("rope_scaling"), "rope_scaling",
                 keys.given.get("rope_scaling"), f"null, since rope_parameters={parameters}")
  nested = {kind: part for kind, part in parameters.items() if kind in (FULL, SLIDING, CHUNKED)}
  if nested:
    ropes = {kind: read(part, local if kind == SLIDING and local else theta, f"{name}.{kind}")
             for kind, part in nested.items()}
  else:
    ropes = {FULL: read(parameters, theta, name)}
    if local:  # the rope of layers with a window is not scaled
      ropes[SLIDING] = read(None, local, name)
  main = ropes.pop(FULL) if FULL in ropes else next(iter(ropes.values()))
  config = config._replace(rope=main, layer_ropes=tuple(sorted(ropes.items())))
  if config.rope_head_dim and main.rope_type != "default" and main.mscale_all_dim:
    scale = yarn_mscale(scale_of(main) or 1.0, main.mscale_all_dim)
    config = config._replace(softmax_scale=get_head_dim(config)**-0.5 * scale**2)
  return config, unknown


def _temperature(keys: _Keys) -> tuple[float, int] | None:
  """(strength, step) of `query_temperature`; None: the queries are not scaled."""
  name = "attn_temperature_tuning"
  tuned, *numbers = map(keys.own, (name, "attn_scale", "floor_scale"))
  # Published files have a number instead of true.
  checks.require(tuned is None or isinstance(tuned, int), name, repr(tuned), "true or false")
  return tuple(numbers) if tuned else None


def _power(scalar: float | None) -> float | None:
  """The softmax scale of Gemma: the inverse square root of this number, whatever the width."""
  if scalar is None:
    return None
  return checks.number("query_pre_attn_scalar", scalar, "a finite number > 0",
                       lambda x: 0 < x < math.inf)**-0.5
