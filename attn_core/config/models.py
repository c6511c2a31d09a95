# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The defaults of model types, and what the keys in their config.json mean.

A file leaves out values that are the model's defaults, and the same key has different meanings in
different models. The values are those of the models' published code.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_core.config import layer_patterns as patterns
from attn_core.config.layer_patterns import FULL, INDEXED, LINEAR, SLIDING


class Model(NamedTuple):
  """Defaults of a model type, and what its files do not say."""

  defaults: dict[str, Any] = {}
  pattern: patterns.Pattern = lambda keys, layers: None
  causal: bool = True
  sinks: bool = False
  interleaved: bool = False  # whether neighboring dimensions make a pair of the rotary embedding
  has_rope: bool = True  # whether the model has a rotary embedding
  # Values of position_embedding_type besides null; if "rope" is one, others mean no rope.
  position_types: tuple[str, ...] = ("absolute",)
  full_has_rope: bool = True  # whether its layers with full attention have one
  window_in_full: bool = False  # whether a window is for layers with full attention
  scaling_in_windows: bool = True  # whether `rope_scaling` is also for layers with a window
  scales_all_queries: bool = False  # whether queries have a temperature in layers with a rope too
  names: Mapping[str, str] = {}  # keys of its files -> those of most files
  softmax_scale: float | None = None  # whatever the width of a head; None: see the file


def _sizes(hidden_size: int, layers: int, heads: int, key_value_heads: int | None = None,
           longest: int | None = 2048, theta: float = 10000.0) -> dict[str, Any]:
  """The defaults that almost every model has."""
  shared = {} if key_value_heads is None else {"num_key_value_heads": key_value_heads}
  return {"hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": heads,
          **shared, "max_position_embeddings": longest, "rope_theta": theta}


_ENCODER = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
_LLAMA = _sizes(4096, 32, 32)
_MISTRAL = _sizes(4096, 32, 32, 8, 131072)
_GEMMA = dict(_sizes(2304, 26, 8, 4, 8192), head_dim=256, query_pre_attn_scalar=256,
              sliding_window=4096)
_QWEN = dict(_sizes(4096, 32, 32, 32, 32768), use_sliding_window=False, max_window_layers=28,
             sliding_window=4096)
_QWEN_HYBRID = dict(_sizes(4096, 32, 16, 4, 32768), head_dim=256, partial_rotary_factor=0.25,
                    full_attention_interval=4)
_MROPE_HYBRID = {**_QWEN_HYBRID, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
_LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
           "kv_lora_rank": 512}
_GRANITE = {**_LLAMA, "attention_multiplier": 1.0}
_PROPORTIONAL = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}
_MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                 "truncate": False, "original_max_position_embeddings": 4096}


_BLOOM_NAMES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                "n_embed": "hidden_size"}


def _t5(hidden_size: int, layers: int, heads: int) -> Model:
  """T5 of one size; its biases by position take the place of a rotary embedding."""
  return Model(
      {**_sizes(hidden_size, layers, heads, longest=None), "head_dim": 64, "is_decoder": False,
       "attention_dropout": 0.1, "relative_attention_num_buckets": 32,
       "relative_attention_max_distance": 128}, causal=False, has_rope=False, softmax_scale=1.0,
      names={"d_model": "hidden_size", "num_layers": "num_hidden_layers", "d_kv": "head_dim",
             "num_heads": "num_attention_heads", "dropout_rate": "attention_dropout"})


def _step(key: str) -> patterns.Pattern:
  """All layers have a window, except every n-th; n is the value of `key`."""
  return patterns.all_but_each(SLIDING, key)


_hybrid = patterns.all_but_each(LINEAR, "full_attention_interval")
_gemma3 = Model(
    {**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
     "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6, "attn_logit_softcapping": None},
    _step("sliding_window_pattern"), scaling_in_windows=False)
_gemma3n = Model(
    dict(_sizes(2048, 35, 8, 2, 32768, 1000000.0), head_dim=256, sliding_window=512, pattern=5,
         rope_local_base_freq=10000.0), _step("pattern"), scaling_in_windows=False,
    softmax_scale=1.0)
_gemma4 = Model(
    dict(_sizes(2304, 30, 8, 4, 131072), head_dim=256, global_head_dim=512, sliding_window=512,
         num_global_key_value_heads=None, attention_k_eq_v=False, per_layer_config=None,
         pattern=6, rope_parameters=_PROPORTIONAL), patterns.gemma4, softmax_scale=1.0)
_llama4 = Model(
    dict(_sizes(5120, 48, 40, 8, 131072, 500000.0), head_dim=128, attention_chunk_size=8192,
         no_rope_layers=None, no_rope_layer_interval=4, attn_temperature_tuning=True,
         attn_scale=0.1, floor_scale=8192), patterns.llama4, interleaved=True)
_qwen2_vl = Model(
    {**_QWEN, **_sizes(8192, 80, 64, 8, 32768, 1000000.0), "max_window_layers": 80,
     "mrope_section": [16, 24, 24]}, patterns.qwen)
_qwen3_vl = Model(
    {**_QWEN, "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 500000.0,
     "mrope_section": [24, 20, 20], "mrope_interleaved": True}, patterns.qwen)
_qwen3_5 = Model(_MROPE_HYBRID, _hybrid)
_qwen3_5_moe = Model({**_MROPE_HYBRID, **_sizes(2048, 40, 16, 2, 32768)}, _hybrid)
_deepseek_v3 = Model({**_sizes(7168, 61, 128, longest=4096), **_LATENT, "rope_interleave": True})
_glm = Model(dict(_sizes(4096, 40, 32, 2, 131072), head_dim=128, partial_rotary_factor=0.5),
             interleaved=True)

MODELS = {
    "llama": Model(_LLAMA),
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mistral": Model({**_MISTRAL, "sliding_window": 4096}, patterns.every(SLIDING)),
    "mistral3": Model(
        dict(_sizes(5120, 40, 32, 8, 131072, 1000000000.0), head_dim=128, sliding_window=None),
        patterns.every(SLIDING)),
    "ministral": Model({**_MISTRAL, "sliding_window": 4096}, patterns.every(SLIDING)),
    "ministral3": Model(
        dict(_sizes(4096, 34, 32, 8, 262144, 1000000.0), head_dim=128, sliding_window=None,
             rope_parameters=_MINISTRAL3_ROPE),
        patterns.every(SLIDING), scales_all_queries=True),
    "mixtral": Model({**_MISTRAL, "sliding_window": None, "rope_theta": 1000000.0},
                     patterns.every(SLIDING)),
    "gemma2": Model({**_GEMMA, "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2},
                    _step("sliding_window_pattern")),
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gemma3n": _gemma3n,
    "gemma3n_text": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "qwen2": Model(_QWEN, patterns.qwen),
    "qwen2_moe": Model({**_QWEN, **_sizes(2048, 24, 16, 16, 32768)}, patterns.qwen2_moe),
    "qwen2_vl": _qwen2_vl,
    "qwen2_vl_text": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "qwen2_5_vl_text": _qwen2_vl,
    "qwen3": Model({**_QWEN, "head_dim": 128}, patterns.qwen),
    "qwen3_moe": Model({**_QWEN, **_sizes(2048, 24, 32, 4, 32768)}, patterns.qwen3_moe),
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_text": _qwen3_vl,
    "qwen3_next": Model({**_QWEN_HYBRID, **_sizes(2048, 48, 16, 2, 32768)}, _hybrid),
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "phi3": Model(
        dict(_sizes(3072, 32, 32, longest=4096), original_max_position_embeddings=4096,
             sliding_window=None), patterns.every(SLIDING)),
    "gpt_oss": Model(
        dict(_sizes(2880, 36, 64, 8, 131072, 150000.0), head_dim=64, sliding_window=128, pattern=2,
             rope_scaling=_GPT_OSS_ROPE), _step("pattern"), sinks=True),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": Model({**_sizes(7168, 61, 128, longest=163840), **_LATENT, "index_topk": 2048},
                          patterns.always(INDEXED), interleaved=True),
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _deepseek_v3,
    "kimi_linear": Model(
        {**_sizes(2304, 27, 32, longest=None), **_LATENT, "model_max_length": 1048576,
         "linear_attn_config": None, "mla_use_nope": True},
        patterns.kimi_linear, has_rope=False),
    "glm": _glm,
    "glm4": _glm,
    "glm4_moe": Model(dict(_sizes(4096, 46, 96, 8, 131072), partial_rotary_factor=0.5)),
    "glm4_moe_lite": Model({
        **_sizes(2048, 47, 20, longest=202752), "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "kv_lora_rank": 512, "rope_interleave": True}),
    "glm_moe_dsa": Model({
        **_sizes(6144, 78, 64, longest=202752), "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "kv_lora_rank": 512, "index_topk": 2048}, patterns.always(INDEXED),
                         interleaved=True),
    "minimax": Model({**_MISTRAL, "rope_theta": 1000000.0, "sliding_window": None},
                     patterns.minimax, window_in_full=True),
    "minimax_m2": Model(
        dict(_sizes(3072, 62, 48, 8, 196608, 5000000.0), head_dim=128, rotary_dim=None)),
    "olmo2": Model(_LLAMA),
    "olmo3": Model({**_LLAMA, "rope_theta": 500000.0, "sliding_window": 4096, "pattern": 4},
                   _step("pattern"), scaling_in_windows=False),
    "granite": Model(_GRANITE),
    "granitemoe": Model(_GRANITE),
    "granitemoeshared": Model(_GRANITE),
    "granitemoehybrid": Model(_GRANITE, patterns.always(LINEAR), position_types=("rope", "nope")),
    "cohere": Model(_sizes(8192, 40, 64, longest=8192, theta=500000.0), interleaved=True),
    "cohere2": Model(
        dict(_sizes(8192, 40, 64, longest=8192), sliding_window=4096, sliding_window_pattern=4),
        _step("sliding_window_pattern"), interleaved=True, full_has_rope=False,
        position_types=("absolute", "rope_gptj")),
    "smollm3": Model(
        dict(_sizes(2048, 36, 16, 4, 32768, 2000000.0), use_sliding_window=False,
             sliding_window=None, max_window_layers=None, no_rope_layers=None,
             no_rope_layer_interval=4),
        patterns.smollm3),
    "t5": _t5(512, 6, 8),
    "mt5": _t5(512, 8, 6),
    "mpt": Model({**_sizes(2048, 24, 16), "attn_config": {}}, has_rope=False, names={
        "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings"}),
    "bloom": Model({**_sizes(64, 2, 8, longest=None), "alibi": True}, has_rope=False,
                   names=_BLOOM_NAMES),
    "falcon": Model({**_sizes(4544, 32, 71), "alibi": False, "multi_query": True,
                     "new_decoder_architecture": False}, names={
                         **_BLOOM_NAMES, "num_kv_heads": "num_key_value_heads"}),
    "vit": Model(_ENCODER, causal=False, has_rope=False),
    "bert": Model({**_ENCODER, "max_position_embeddings": 512, "is_decoder": False,
                   "attention_probs_dropout_prob": 0.1}, causal=False, has_rope=False),
}
