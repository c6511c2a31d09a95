# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations as text: their fields, the files of models, and what layers make of them."""

import collections
import json
import pathlib
import re
import tempfile
import types
from typing import Any, Iterator

import jax
from jax.sharding import PartitionSpec as P
import jax.numpy as jnp
import numpy as np

import attn_core
from attn_core import AttnConfig, BlockSizes, OperationMetadata, PartitionAxis, Rope
from attn_core.config import config as config_lib, layers, merge
from attn_core.config import json as json_lib
from attn_core.config.models import MODELS
from attn_core.config.validate import validated
from attn_core_test import config_published
from attn_core_test.approved_text import Line, attempt, text
from attn_core_test.approved_values import alternatives, candidates, lines

BASE = AttnConfig(num_attention_heads=6, num_hidden_layers=4, hidden_size=42,
                  max_position_embeddings=50)
# Field -> further values, right ones and ones that are wrong in a way of their own.
FIELD_VALUES: dict[str, tuple[Any, ...]] = {
    "sharding_axis_dims": ((1, 2, 1, 1, -1), (1, 2), (2, 2, 2, 2, 2), (-1, -1, 1, 1, 1)),
    "sharding_axis_names": (("a", "b", "c", "d", "e"), ("a",)),
    "attn_mechanism": ("ring", "flash"), "decode_attn_mechanism": ("vanilla", "decode"),
    "operation_configs": ((("ring", BlockSizes(3)),), (("flash", BlockSizes()),), (("ring", 1),),
                          {"vanilla": BlockSizes(block_kv=5)}, (("ring", BlockSizes(0)),)),
    "layer_types": (("full_attention",) * 4, ("full_attention",) * 3, ("sliding_attention",) * 4,
                    ("linear_attention",) * 4, ("other",) * 4, "full_attention"),
    "sliding_window": ((3, 0), (3, -1), (-2, 0), [3, 0], (3, 0, 1), 3),
    "rope": (Rope("linear", factor=2.0), Rope("x"), Rope("yarn"), Rope(rope_theta=-1.0)),
    "layer_ropes": ((("full_attention", Rope("none")),), (("full", Rope()),), ("a",)),
    "layers_without_rope": ((0, 3), (4,), (-1,), (True,), [1]),
    "temperature_tuning": ((0.1, 8), (0.1, 0), (-1.0, 8), (0.1, 8, 2), [0.1, 8]),
    "num_key_value_heads": (2, 4, 6), "layer_head_dims": ((("full_attention", 5),), (("x", 5),)),
    "layer_key_value_heads": ((("full_attention", 3),), (("full_attention", 4),), ((1, 2),)),
    "partition_rules": (((".*", P("tp")),), (("[", P()),), ((".*", "tp"),), ((".*", P(), 1),)),
    "extras": ((("a", "1"),), (("a", 1),), (("a",),)), "unset": (("attn_dtype",), ("rope",)),
    "easy_method": ("serve", "EVAL", config_lib.EasyMethod.CONVERT), "platform": ("gpu", "triton"),
    "moe_method": ("dense_moe", "dense"), "gradient_checkpointing": ("nothing_saveable", "save"),
    "partition_axis": (PartitionAxis(batch_axis="x"), PartitionAxis(head_axis=3)),
    "attn_dtype": ("float16", jnp.float32, "float99"), "backend": ("cuda", "CPU", "xla"),
    "fcm_max_ratio": (0.25, 1.0), "fcm_min_ratio": (0.25,), "index_topk": (3,), "chunk_size": (3,)}


def changed(config: AttnConfig, base: AttnConfig = AttnConfig()) -> str:
  """Returns the fields of a configuration that differ from another one's."""
  return ", ".join(f"{name}={text(value)}" for name, value in config._asdict().items()
                   if value != getattr(base, name)) or "as it was"


def fields() -> Iterator[str]:
  """Yields what the check of a configuration makes of each value of each field."""
  same = collections.defaultdict(list)
  for name in AttnConfig._fields:
    for line in lines(name, lambda x, name=name: validated(BASE._replace(**{name: x})),
                      candidates(0, FIELD_VALUES.get(name, ())), results=False):
      same[re.sub(rf"\b{name}\b", "NAME", line)].append(name)
  yield from (f"{' '.join(names)}: {line.removeprefix('NAME = ')}" for line, names in same.items())
  for values in ({"sliding_window": (3, 0), "chunk_size": 4}, {"fcm_min_ratio": 0.5},
                 {"layer_types": ("full_attention",) * 4, "index_topk": 4},
                 {"layer_types": ("indexed_attention",) * 4}, {"head_dim": 0},
                 {"num_attention_heads": 6, "num_key_value_heads": 4}):
    yield f"{values}: {attempt(lambda values=values: validated(BASE._replace(**values)))}"


def uses() -> Iterator[str]:
  """Yields what each field changes in the metadata, in the arguments of a layer and in a file."""
  base = BASE._replace(sliding_window=None)
  views = {
      "metadata": lambda config: metadata_text(OperationMetadata.from_config(config)),
      "arguments": lambda config: text(layers.attention_arguments(config, 1)),
      "decoding": lambda config: layers.attention_arguments(
          config, 1, "__autoregressive__")["mechanism"],
      "file": lambda config: text(json_lib.to_diff_dict(config)),
      "read again": lambda config: text(json_lib.from_dict(json.loads(json.dumps(
          json_lib.to_dict(config)))) == config)}
  plain = {view: function(base) for view, function in views.items()}
  yield from (f"{view}: {said}" for view, said in plain.items())
  for name in AttnConfig._fields:
    for written, value in candidates(0, FIELD_VALUES.get(name, ())):
      try:
        config = validated(base._replace(**{name: value}))
      except (ValueError, TypeError, NotImplementedError, AttributeError):
        continue
      yield f"{name} = {written}"
      for view, function in views.items():
        said = attempt(lambda function=function, config=config: Line(function(config)))
        if said != plain[view]:
          yield f"  {view}: {said}"


def metadata_text(metadata: OperationMetadata) -> str:
  """Returns metadata without its base configuration."""
  return text(metadata.replace(base_config=None))


# --- Files of models. ----------------------------------------------------------------------------


def models() -> Iterator[str]:
  """Yields the configuration of each model type without a key of its own."""
  for name in MODELS:
    config = json_lib.from_dict({"model_type": name})
    yield f"{name}: {changed(config)}"


def published() -> Iterator[str]:
  """Yields the configurations of published files, and of files with one other value."""
  for index, (name, (data, *_)) in enumerate(config_published.PUBLISHED.items()):
    config = json_lib.from_dict(data)
    yield f"{name}: {changed(config)}"
    yield from (f"  {line}" for line in _layers(config))
    inner = data.get("text_config", data)
    for key, value in inner.items():
      if key == "model_type" or index % 2:
        continue
      others = (("left out", None), ("half", _half(value)))
      for written, other in others:
        if other == value and written != "left out":
          continue
        less = {k: v for k, v in inner.items() if written != "left out" or k != key}
        if written != "left out":
          less[key] = other
        given = {**data, "text_config": less} if "text_config" in data else less
        said = attempt(lambda given=given, config=config: Line(
            changed(json_lib.from_dict(given), config)))
        if said != "as it was" and not said.startswith("extras="):
          yield f"  {key} {written}: {said}"


def _half(value: Any) -> Any:
  """Returns a value like another one, in about half the size."""
  if isinstance(value, dict):
    return {key: _half(one) for key, one in value.items()}
  if isinstance(value, list):
    return value[:len(value) // 2]
  return value // 2 if type(value) is int else value / 2 if isinstance(value, float) else not value


def _layers(config: AttnConfig) -> Iterator[str]:
  """Yields the attention of the layers of a model, those that are alike together."""
  positions = np.int32([[0, 5, 4095, 8191, 100000, -1]])
  said = []
  for layer in range(config.num_hidden_layers or 1):
    arguments = attempt(lambda layer=layer: layers.attention_arguments(config, layer))
    said.append("; ".join((
        arguments, attempt(lambda layer=layer: layers.mask_detail(config, layer).size),
        attempt(lambda layer=layer: layers.layer_rope(config, layer)),
        attempt(lambda layer=layer: config_lib.get_head_dim(config, layer)),
        attempt(lambda layer=layer: config_lib.get_key_value_heads(config, layer)),
        attempt(lambda layer=layer: layers.query_temperature(config, positions, layer)))))
  for line in dict.fromkeys(said):
    yield f"layers {[i for i, one in enumerate(said) if one == line][:6]}: {line}"
  yield attempt(lambda: layers.get_basic_inv_frequencies(config))


def readers() -> Iterator[str]:
  """Yields what the reader makes of files that are wrong, or written otherwise."""
  base: dict[str, Any] = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6}
  for more in ({}, {"model_type": "unknown"}, {"model_type": "lama"}, {"torch_dtype": "bfloat16"},
               {"dtype": "float16"}, {"dtype": "x"}, {"attn_core_format": 2},
               {"text_config": {"model_type": "qwen2"}}, {"text_config": 3},
               {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": "x"},
               {"rope_scaling": {"type": "linear", "factor": 2.0, "other": 1}},
               {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
               {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
               {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4.0],
                                 "long_factor": [2.0, 3.0, 4.0, 5.0]}},
               {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention",
                                                             "chunked_attention"],
                "sliding_window": 4, "attention_chunk_size": 8, "num_hidden_layers": 3,
                "num_key_value_heads": 2,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5.0},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                    "chunked_attention": {"rope_type": "linear", "factor": 3.0}}},
               {"head_dim": None}, {"head_dim": 5}, {"num_key_value_heads": 4},
               {"attention_dropout": 0.5}, {"attention_bias": True}, {"my_key": [1, {"a": 2}]},
               {"layer_types": ["full_attention"] * 32}, {"layer_types": ["full_attention"]},
               {"layer_types": ["sliding_attention"] * 32}, {"sliding_window": 5},
               {"is_causal": False}, {"num_hidden_layers": 0}, {"num_hidden_layers": "3"},
               {"partial_rotary_factor": 0.5}, {"max_position_embeddings": None},
               {"attn_core_format": 1}, {"quantization_config": {"bits": 4}}):
    given = {**base, **more}
    yield f"{more}: {attempt(lambda given=given: Line(changed(json_lib.from_dict(given))))}"
  for model in ("qwen2", "gemma3_text", "llama4_text", "gpt_oss", "smollm3", "minimax",
                "kimi_linear", "qwen3_next", "deepseek_v3", "gemma4_text", "qwen2_moe"):
    for key, value in (("sliding_window", 7), ("use_sliding_window", True),
                       ("use_sliding_window", "yes"), ("max_window_layers", 2),
                       ("sliding_window_pattern", 3), ("no_rope_layer_interval", 3),
                       ("no_rope_layers", [1, 0, 1]), ("attention_chunk_size", 5),
                       ("full_attention_interval", 2), ("num_hidden_layers", 7),
                       ("qk_rope_head_dim", 16), ("layer_types", None), ("head_dim", 32),
                       ("attn_type_list", [1, 0, 1, 0, 1, 0, 0]),
                       ("rope_scaling", {"type": "yarn", "factor": 4.0, "mscale": 0.5,
                                         "mscale_all_dim": 0.7,
                                         "original_max_position_embeddings": 128})):
      given = {"model_type": model, "num_hidden_layers": 7, key: value}
      plain = attempt(lambda given=given, key=key: Line(changed(
          json_lib.from_dict(given), json_lib.from_dict({"model_type": given["model_type"],
                                                         "num_hidden_layers": 7}))))
      yield f"{model} {key}={value}: {plain}"


# --- Functions of configurations. ----------------------------------------------------------------


def functions() -> Iterator[str]:
  """Yields the results of the functions that read and make configurations."""
  config = BASE._replace(
      layer_types=("full_attention", "sliding_attention", "chunked_attention", "linear_attention"),
      sliding_window=(3, 1), chunk_size=5, head_dim=8, fcm_min_ratio=0.25, fcm_max_ratio=0.75,
      rope=Rope("linear", factor=4.0), temperature_tuning=(0.1, 7), temperature_offset=3)
  indexed = BASE._replace(index_topk=2)
  scores = np.float32([[[1, 3, 3, 2, 3], [5, 4, -np.inf, -np.inf, 0], [0, 0, 0, 0, 0]]])
  for name, function in {
      "details": lambda: layers.get_mask_details(config),
      "details, alike": lambda: layers.get_mask_details(BASE),
      "masks": lambda: [d.to_mask() for d in (layers.get_mask_details(config) or {}).values()],
      "sizes": lambda: [layers.AttnMaskDetail("x", causal, window, chunk).size
                        for causal in (True, False) for chunk in (None, 4)
                        for window in (None, (3, 1), (9, -1), (-1, 0), (0, 0))],
      "layer 4": lambda: layers.mask_detail(config, 4), "layer -1": lambda: layers.layer_rope(
          config, -1), "layer x": lambda: layers.mask_detail(config, "x"),
      "linear": lambda: layers.mask_detail(config, 3),
      "linear rope": lambda: layers.layer_rope(config, 3),
      "temperature": lambda: layers.query_temperature(config._replace(
          temperature_with_rope=True), np.int32([[0, 3, 4, 11, 18, -9]])),
      "temperature, rope": lambda: layers.query_temperature(config, np.int32([[0, 3]])),
      "temperature, float": lambda: layers.query_temperature(config, np.float32([[0, 3]])),
      "index": lambda: layers.index_mask(indexed, scores),
      "index of all": lambda: layers.index_mask(indexed._replace(index_topk=5), scores),
      "no index": lambda: layers.index_mask(BASE, scores),
      "index, rank": lambda: layers.index_mask(indexed, scores[0]),
      "causal": lambda: layers.get_basic_causal_mask(BASE),
      "causal, dense": lambda: layers.get_basic_causal_mask(
          BASE._replace(mask_max_position_embeddings=3), dense=True),
      "forgetful": lambda: layers.get_fcm_mask(config, 3, 11, False, jax.random.key(3)),
      "forgetful, off": lambda: layers.get_fcm_mask(config, 3, 11, True),
      "forgetful, no key": lambda: layers.get_fcm_mask(config, 3, 11, False),
      "forgetful, 0 rows": lambda: layers.get_fcm_mask(config, 0, 11, False, jax.random.key(3)),
      "forgetful, 0 keys": lambda: layers.get_fcm_mask(config, 3, 0, False, jax.random.key(3)),
      "lengths": lambda: [function(c) for c in (
          BASE, BASE._replace(freq_max_position_embeddings=7, mask_max_position_embeddings=9))
                          for function in (layers.granted_freq_max_position_embedding,
                                           layers.granted_mask_max_position_embedding)],
      "no length": lambda: layers.granted_freq_max_position_embedding(AttnConfig()),
      "head_dim": lambda: [config_lib.get_head_dim(BASE), config_lib.get_head_dim(config),
                           config_lib.get_head_dim(config._replace(
                               layer_head_dims=(("sliding_attention", 5),)), 1)],
      "no head_dim": lambda: config_lib.get_head_dim(AttnConfig(hidden_size=7)),
      "key heads": lambda: [config_lib.get_key_value_heads(BASE), config_lib.get_key_value_heads(
          config._replace(layer_key_value_heads=(("chunked_attention", 3),)), 2)],
      "no heads": lambda: config_lib.get_key_value_heads(AttnConfig()),
      "types": lambda: [config_lib.layer_type(c) for c in (
          BASE, BASE._replace(sliding_window=(1, 0)), BASE._replace(chunk_size=2), indexed)],
      "dims": lambda: (config_lib.get_axis_dims(BASE), config_lib.get_axis_names(BASE)),
      "backend": lambda: (config_lib.get_backend(BASE._replace(backend="tpu")),
                          config_lib.get_backend(BASE)),
      "rules": lambda: config_lib.get_partition_rules(BASE),
      "mesh": lambda: config_lib.get_mesh(BASE._replace(sharding_axis_dims=(1, 2, 1, -1, 1))),
      "not a config": lambda: config_lib.get_mesh({}),
  }.items():
    yield f"{name}: {attempt(function)}"
  yield from _frequencies(config)
  yield from _merging()


def _frequencies(config: AttnConfig) -> Iterator[str]:
  """Yields tables of rotary embeddings, and what the functions make of other arguments."""
  for name in ("get_basic_inv_frequencies", "get_basic_frequencies"):
    function = getattr(attn_core, name)
    for given in ({}, {"head_size": 6}, {"head_size": 8, "rotary_dim": 4}, {"base": 100.0},
                  {"rotary_dim": 6}, {"base": "x"}, {"rotary_dim": 5}, {"head_size": -2}):
      yield f"{name} {given}: {attempt(lambda f=function, given=given: f(config, **given))}"
  yield "partial: " + attempt(lambda: attn_core.get_basic_inv_frequencies(
      config, partial_rotary_factor=0.5))
  x = np.arange(2 * 3 * 2 * 8, dtype=np.float32).reshape(2, 3, 2, 8) % 5
  good = {"dtype": "float32", "head_size": 8, "rotary_dim": None, "is_neox_style": None,
          "base": None}
  for given in ({}, {"is_neox_style": True}, {"is_neox_style": False}, {"rotary_dim": 4},
                {"base": 50.0}, {"dtype": "bfloat16", "rotary_dim": 2, "is_neox_style": False}):
    for rope in (config.rope, Rope(interleaved=True)):
      yield f"rotated {given} {text(rope)}: " + attempt(lambda g=given, r=rope: (
          attn_core.get_basic_rope(config._replace(rope=r), **{**good, **g})(
              np.int32([[0, 1, 7]] * 2), x, x[:, :, :1])))
  yield from alternatives(lambda **given: attn_core.get_basic_rope(config, **given)(
      np.int32([[0, 1, 7]] * 2), x, x[:, :, :1]), good,
                          {"rotary_dim": (4, 16), "head_size": (8,)}, traced=True)


def _merging() -> Iterator[str]:
  """Yields merged configurations."""
  config = merge.attach_custom_arguments(BASE, head_dim=8, mine=[1, {"a": (2, None)}], other="x")
  for name, function in {
      "attached": lambda: config, "extras": lambda: merge.extras_of(config),
      "attached again": lambda: merge.extras_of(merge.attach_custom_arguments(config, mine=3)),
      "not json": lambda: merge.attach_custom_arguments(BASE, mine=object()),
      "basics": lambda: merge.add_basic_configurations(BASE, blocksize_q=3, sinks=True),
      "unknown": lambda: merge.add_basic_configurations(BASE, blocksize=3, block=2),
      "read": lambda: merge.read_basics_from_config(
          BASE, AttnConfig(attn_mechanism="ring", head_dim=3, sharding_axis_dims=(2, 1, 1, 1, 4))),
      "read other": lambda: merge.read_basics_from_config(
          BASE, types.SimpleNamespace(blocksize_k=7, attn_dtype="float16", kvdtype=None)),
      "read nothing": lambda: merge.read_basics_from_config(BASE, 3),
      "frozen": lambda: merge.frozen({"b": [1, (2,)], "a": {"c": None}}),
      "mesh": lambda: merge.set_model_mesh(BASE._replace(sharding_axis_dims=(2, 2, 1, 2, 1)), None),
      "no mesh": lambda: merge.set_model_mesh(BASE, 3),
      "positional": lambda: AttnConfig((1, 1, 1, 1, 1)).unset,
      "replaced": lambda: AttnConfig()._replace(attn_dtype="float32").unset,
  }.items():
    yield f"{name}: {attempt(function)}"


def files() -> Iterator[str]:
  """Yields what writing and reading of files does."""
  config = merge.attach_custom_arguments(
      BASE, rope=Rope("linear", factor=2.0), partition_rules=((".*", P(("dp", "tp"), None)),),
      operation_configs=(("ring", BlockSizes(3, 4)),), attn_dtype="float16", mine=[1])
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    for diff in (True, False):
      json_lib.to_json_file(config, path / f"{diff}.json", use_diff=diff)
      yield f"diff {diff}: {text(json.loads((path / f'{diff}.json').read_text('utf-8')))}"
    json_lib.save_pretrained(config, path / "model" / "inner")
    (path / "bad.json").write_text("{", encoding="utf-8")
    (path / "list.json").write_text("[1]", encoding="utf-8")
    for name, function in {
        "again": lambda: json_lib.from_pretrained(path / "model" / "inner") == config,
        "subfolder": lambda: json_lib.from_pretrained(path / "model", subfolder="inner") == config,
        "file": lambda: json_lib.from_pretrained(path / "True.json") == config,
        "given": lambda: changed(json_lib.from_pretrained(
            path / "model" / "inner", head_dim=5, revision="main"), config),
        "unused": lambda: json_lib.from_pretrained(
            path / "model" / "inner", return_unused_kwargs=True, head_dim=5, foo=3)[1],
        "unknown": lambda: json_lib.from_pretrained(path / "model" / "inner", foo=3),
        "bad": lambda: json_lib.from_pretrained(path / "bad.json"),
        "a list": lambda: json_lib.from_pretrained(path / "list.json"),
        "missing": lambda: json_lib.from_pretrained(path / "none"),
        "hub": lambda: json_lib.from_pretrained("meta-llama/Llama-3"),
        "number": lambda: json_lib.from_pretrained(3),
        "push": lambda: json_lib.save_pretrained(config, path / "x", push_to_hub=True),
        "folder": lambda: json_lib.to_json_file(config, 3),
        "commit": lambda: [json_lib.extract_commit_hash(a, b) for a, b in (
            (f"/hub/snapshots/{'ab12' * 10}/config.json", None), ("/hub/snapshots/main/x", None),
            (f"/hub/snapshots/{'ab12' * 10}/x", "given"), (None, None), ("x", None))],
    }.items():
      yield f"{name}: {attempt(function).replace(folder, 'TMP')}"
    good = json_lib.to_dict(config)
    for key, value in (("rope", {"rope_type": "x"}), ("rope", 3), ("partition_axis", {"a": 1}),
                       ("operation_configs", 3), ("attn_dtype", 3), ("foo", 1), ("unset", 3),
                       ("partition_rules", [["a"]]), ("mesh", {"a": 1}), ("layer_ropes", 3)):
      given = {**good, key: value}
      yield f"{key}={value}: {attempt(lambda given=given: json_lib.from_dict(given))}"


FILES = {"config_fields": fields, "config_uses": uses, "config_models": models,
         "config_published": published, "config_readers": readers, "config_functions": functions,
         "config_files": files}
