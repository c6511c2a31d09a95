# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kind of each layer of a model: full attention, a window, chunks, an index, or linear."""

from collections.abc import Callable
from typing import Any

from attn_core import checks

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, LINEAR = "indexed_attention", "linear_attention"

# (keys of the file, number of layers) -> a layer type for each layer; None: all are alike.
Pattern = Callable[[dict[str, Any], int], tuple[str, ...] | None]


def every(kind: str) -> Pattern:
  """All layers are of one kind if the model has a window, else full."""
  return lambda keys, layers: (FULL if keys.get("sliding_window") is None else kind,) * layers


def all_but_each(kind: str, key: str) -> Pattern:
  """All layers are of one kind, except every n-th, which is full; n is the value of `key`."""
  def pattern(keys: dict[str, Any], layers: int) -> tuple[str, ...]:
    step = count(keys, key)
    return tuple(FULL if (i + 1) % step == 0 else kind for i in range(layers))
  return pattern


def always(kind: str) -> Pattern:
  """All layers are of one kind."""
  return lambda keys, layers: (kind,) * layers


def gemma4(keys: dict, layers: int) -> tuple[str, ...]:
  """Every n-th layer has full attention, and the last one; n is the value of `pattern`."""
  step = count(keys, "pattern")
  return tuple(FULL if (i + 1) % step == 0 or i + 1 == layers else SLIDING for i in range(layers))


def qwen(keys: dict, layers: int) -> tuple[str, ...]:
  """Layers from max_window_layers on have a window, if use_sliding_window is true."""
  first = layers
  if flag(keys, "use_sliding_window"):
    first = checks.integer("max_window_layers", keys["max_window_layers"],
                           "an int >= 0, the first layer with a window", lambda x: x >= 0)
  return tuple(SLIDING if i >= first and keys.get("sliding_window") is not None else FULL
               for i in range(layers))


def has_window(keys: dict) -> bool:
  """Whether a window is given and enabled."""
  return flag(keys, "use_sliding_window") and keys.get("sliding_window") is not None


def qwen2_moe(keys: dict, layers: int) -> tuple[str, ...]:
  """Every second layer before max_window_layers has a window, if use_sliding_window is true."""
  last = 0
  if has_window(keys):
    last = checks.integer("max_window_layers", keys["max_window_layers"],
                          "an int >= 0, the first layer after those with a window",
                          lambda x: x >= 0)
  return tuple(SLIDING if i < last and i % 2 == 0 else FULL for i in range(layers))


def qwen3_moe(keys: dict, layers: int) -> tuple[str, ...]:
  """All layers have a window, if use_sliding_window is true."""
  return (SLIDING if has_window(keys) else FULL,) * layers


def llama4(keys: dict, layers: int) -> tuple[str, ...]:
  """Layers with a rotary embedding attend within chunks, the others have full attention."""
  if keys.get("attention_chunk_size") is None:
    return (FULL,) * layers
  return tuple(CHUNKED if has_rope else FULL for has_rope in llama4_ropes(keys, layers))


def llama4_ropes(keys: dict, layers: int) -> tuple[int, ...]:
  """1 for every layer with a rotary embedding, 0 for the others."""
  given = keys.get("no_rope_layers")  # 1: the layer has a rotary embedding, despite the name
  if given:
    checks.require(isinstance(given, (list, tuple)) and len(given) == layers
                   and all(flag in (0, 1) for flag in given), "no_rope_layers", given,
                   f"{layers} of 0 and 1, one for each of num_hidden_layers")
    return tuple(given)
  step = count(keys, "no_rope_layer_interval")
  return tuple(int((i + 1) % step != 0) for i in range(layers))


def smollm3(keys: dict, layers: int) -> tuple[str, ...]:
  """Layers without a rotary embedding have a window, if use_sliding_window is true."""
  if not has_window(keys):
    return (FULL,) * layers
  return tuple(FULL if has_rope else SLIDING for has_rope in llama4_ropes(keys, layers))


def minimax(keys: dict, layers: int) -> tuple[str, ...]:
  """Every second layer has softmax, from the first one on."""
  return tuple(LINEAR if i % 2 else FULL for i in range(layers))


def kimi_linear(keys: dict, layers: int) -> tuple[str, ...]:
  """Layers that `linear_attn_config` lists, counted from 1, have full attention; else each 4th."""
  name = "linear_attn_config"
  given = keys.get(name) or {}
  checks.require(isinstance(given, dict), name, repr(given), "a dictionary or null")
  full, linear = given.get("full_attn_layers"), given.get("kda_layers")
  if full is None or linear is None:
    return tuple(FULL if i and i % 4 == 0 else LINEAR for i in range(layers))
  checks.require(all(isinstance(part, (list, tuple)) for part in (full, linear))
                 and sorted([*full, *linear], key=str) == sorted(range(1, layers + 1), key=str),
                 name, repr(given),
                 f"full_attn_layers and kda_layers that have each number from 1 to {layers} once")
  return tuple(FULL if i + 1 in full else LINEAR for i in range(layers))


def count(keys: dict, name: str) -> int:
  """The value of a key that is a number of layers or dimensions, an int >= 1."""
  return checks.integer(name, keys[name], "an int >= 1", lambda x: x >= 1)


def flag(keys: dict, name: str) -> bool:
  """The value of a boolean key; False if it is null or missing."""
  value = keys.get(name)
  checks.require(value is None or isinstance(value, bool), name, repr(value), "true or false")
  return bool(value)
