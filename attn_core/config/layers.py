# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derives a layer's mask, rotary embedding and attention arguments from a configuration."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks, masks
from attn_core.config import position_bias
from attn_core.config.config import AttnConfig, checked, get_head_dim, layer_type
from attn_core.config.validate import validated
from attn_core.rope.frequencies import Rope, inverse_frequencies
from attn_core.rope.rope import rotary, rotary_table
from attn_core.types import DECODE_MODES, MODES, Mode


class AttnMaskDetail(NamedTuple):
  """The mask of a layer."""

  mask_type: str  # one of config.LAYER_TYPES
  causal: bool = True
  sliding_window: tuple[int, int] | None = None  # (left, right), tokens; for "sliding_attention"
  chunk_size: int | None = None  # tokens; for "chunked_attention"

  @property
  def size(self) -> int | None:
    """The largest number of visible keys of a query (tokens); None: unbounded."""
    if self.sliding_window is None:
      return self.chunk_size
    left, right = self.sliding_window
    right = 0 if self.causal else right
    return None if -1 in (left, right) else left + right + 1

  def to_mask(self) -> masks.Mask:
    """Converts to a mask value, for `mask` of `attention` with causal=False."""
    mask = masks.causal() if self.causal else masks.full()
    if self.sliding_window is not None:
      mask = mask & masks.window(*[None if n == -1 else n for n in self.sliding_window])
    return mask if self.chunk_size is None else mask & masks.chunk(self.chunk_size)


def get_mask_details(config: AttnConfig) -> dict[int, AttnMaskDetail] | None:
  """The mask of every layer by its index, from 0; None: all are alike, see `mask_detail`.

  Linear layers have no mask and are left out.

  Raises:
    ValueError: as `validated`.
  """
  layer_types = validated(config).layer_types
  if layer_types is None:
    return None
  return {layer: mask_detail(config, layer) for layer, kind in enumerate(layer_types)
          if kind != "linear_attention"}


def mask_detail(config: AttnConfig, layer: int = 0) -> AttnMaskDetail:
  """The mask of one layer, also if all layers are alike.

  The mask of a layer of type "indexed_attention" is that of `index_mask` besides.

  Raises:
    NotImplementedError: the layer is of type "linear_attention".
    ValueError: as `layer_type`.
  """
  kind = layer_type(config, layer)
  if kind == "linear_attention":
    raise NotImplementedError(
        f"layer={layer} of model_type={config.model_type!r} is of type 'linear_attention', a layer "
        "without softmax, which the caller's model computes; its layers of other types are "
        f"{sorted(get_mask_details(config) or ())}")
  return AttnMaskDetail(kind, config.causal,
                        config.sliding_window if kind == "sliding_attention" else None,
                        config.chunk_size if kind == "chunked_attention" else None)


def layer_rope(config: AttnConfig, layer: int = 0) -> Rope:
  """The rotary embedding of one layer; its type is "none" for a layer without one.

  Raises:
    ValueError: as `layer_type`.
  """
  kind = layer_type(config, layer)
  if layer in config.layers_without_rope or kind == "linear_attention":
    return Rope("none")
  return dict(config.layer_ropes).get(kind, config.rope)


def query_temperature(
    config: AttnConfig, positions: jax.Array | np.ndarray, layer: int = 0) -> jax.Array | None:
  """The factor of a layer's queries that keeps attention sharp at late positions.

    1 + strength * ln(1 + floor((position + offset) / step))

  As in Llama 4 (offset 1, in layers without a rotary embedding) and Ministral 3 (offset 0, in all
  layers), after Nakanishi, Scalable-Softmax, https://arxiv.org/abs/2501.19399.

  Args:
    config: its `temperature_tuning` is (strength, step), its `temperature_offset` the offset, and
      its `temperature_with_rope` says whether layers with a rotary embedding scale queries.
    positions: int [B or 1, T], of the queries (tokens); negative positions are padding.
    layer: the index of the layer, from 0.

  Returns:
    float32 [B or 1, T], to be multiplied with the queries before `attention`:
    `query * temperature[..., None, None]` in layout bthd; None if the layer does not scale queries.

  Raises:
    ValueError: as `layer_type`, or `positions` is not an array of integers.
  """
  has_rope = layer_rope(config, layer).rope_type != "none"
  positions = checks.int32("positions", positions, "int [B or 1, T]")
  if (config.temperature_tuning is None or has_rope and not config.temperature_with_rope
      or layer_type(config, layer) == "linear_attention"):
    return None
  strength, step = config.temperature_tuning
  steps = jnp.maximum(positions + config.temperature_offset, 0) // step
  return 1 + strength * jnp.log1p(steps.astype(jnp.float32))


def index_mask(config: AttnConfig, scores: jax.Array | np.ndarray, layer: int = 0,
               ) -> jax.Array | None:
  """The keys that a layer's index selects for each query: the `index_topk` highest scores.

  DeepSeek-AI, https://github.com/deepseek-ai/DeepSeek-V3.2-Exp. Pass it as `mask` besides
  `attention_arguments(config, layer)`. A layer that reuses the keys of another one reuses its mask.
  `masks.selected_keys(jax.lax.top_k(scores, config.index_topk)[1])` selects the same keys by lists,
  for time and memory that grow with their number.

  Args:
    config: its `index_topk` is read.
    scores: float [B, T, S], of the model's index; -inf where a query does not see a key.
    layer: the index of the layer, from 0.

  Returns:
    bool [B, 1, T, S], True = selected; None if all keys are: the layer has no index, or S is at
    most `index_topk`. Of equal scores the first are selected.

  Raises:
    ValueError: as `layer_type`, or `scores` is not a floating-point array of rank 3.
  """
  kind = layer_type(config, layer)
  checks.floating("scores", scores, 3, "float [B, T, S]")
  scores = jnp.asarray(scores)
  selected = config.index_topk
  if kind != "indexed_attention" or selected is None or scores.shape[-1] <= selected:
    return None
  # Compared with the last selected score, not scattered: so the mask is sharded as the scores are.
  last = jax.lax.top_k(scores, selected)[0][..., -1:]
  above, equal = scores > last, scores == last
  missing = selected - jnp.sum(above, -1, keepdims=True)
  return (above | (equal & (jnp.cumsum(equal, -1) <= missing)))[:, None]


def attention_arguments(config: AttnConfig, layer: int = 0,
                        mode: Mode = "__train__") -> dict[str, Any]:
  """The keyword arguments of a layer's `attention`, for `attention(q, k, v, **arguments)`.

  The mechanism is "auto" unless one is set. `OperationMetadata.from_config(config)` has the block
  sizes and the devices, for `metadata` of the same call.

  Args:
    config: the configuration.
    layer: the index of the layer, from 0.
    mode: the mode of the call; the mechanism is `decode_attn_mechanism` in the decode modes.

  Returns:
    mechanism, causal, sliding_window, chunk_size, softmax_scale, logits_soft_cap, dropout_prob, and
    compute_dtype: `attn_dtype` if it is set, or the model's file has one, and has 16 bits. Sinks
    are parameters of the layer and are passed as `softmax_aux`; see also `query_temperature` and
    `index_mask`. Where the model has ALiBi, its score_mod; that of T5 is `layer_score_mod`, as it
    has parameters.

  Raises:
    NotImplementedError: as `mask_detail`.
    ValueError: as `validated`, `layer` is not the index of a layer, or `mode` is unknown.
  """
  config = validated(config)
  checks.one_of("mode", mode, MODES)
  detail = mask_detail(config, layer)
  chosen = "auto" if "attn_mechanism" in config.unset else config.attn_mechanism
  mechanism = (mode in DECODE_MODES and config.decode_attn_mechanism) or chosen
  dtype = np.dtype(config.attn_dtype)
  narrow = "attn_dtype" not in config.unset and dtype.itemsize < 4
  bias = position_bias.alibi(config)
  return {
      **({} if bias is None else {"score_mod": bias}),
      "mechanism": mechanism, "causal": detail.causal,
      "sliding_window": detail.sliding_window, "chunk_size": detail.chunk_size,
      "softmax_scale": config.softmax_scale, "logits_soft_cap": config.logits_soft_cap,
      "dropout_prob": config.dropout_prob, "compute_dtype": dtype if narrow else None}


def granted_freq_max_position_embedding(config: AttnConfig) -> int:
  """Length of the tables of rotary embeddings (tokens).

  Raises:
    ValueError: `config` is not an AttnConfig, or both `freq_max_position_embeddings` and
      `max_position_embeddings` are None.
  """
  return _granted(config, "freq_max_position_embeddings")


def granted_mask_max_position_embedding(config: AttnConfig) -> int:
  """Length of dense masks (tokens).

  Raises:
    ValueError: `config` is not an AttnConfig, or both `mask_max_position_embeddings` and
      `max_position_embeddings` are None.
  """
  return _granted(config, "mask_max_position_embeddings")


def get_basic_causal_mask(config: AttnConfig, dense: bool = False) -> masks.Mask | jax.Array:
  """The causal mask, as a mask value that costs no memory and fits every length.

  Args:
    config: the configuration; its length is read only if `dense`.
    dense: whether to return the mask as an array instead.

  Returns:
    A mask value, or bool [1, 1, length, length]; see `granted_mask_max_position_embedding`.

  Raises:
    ValueError: `dense` is True, and as `granted_mask_max_position_embedding`.
  """
  if not dense:
    return masks.causal()
  length = granted_mask_max_position_embedding(config)
  return jnp.tril(jnp.ones((1, 1, length, length), bool))


def get_fcm_mask(config: AttnConfig, batch_size: int, seq_length: int, deterministic: bool,
                 key: jax.Array | None = None) -> jax.Array | None:
  """The mask of forgetful causal masking: random keys are hidden from all queries of a batch row.

    ratio[b] ~ uniform(fcm_min_ratio, fcm_max_ratio);   P(key s of row b is hidden) = ratio[b]

  The first key is always visible, so that every query has a visible key. Pass the mask as `mask`
  together with causal=True.
  Liu et al., FCM: Forgetful Causal Masking, https://arxiv.org/abs/2210.13432.

  Args:
    config: fcm_min_ratio and fcm_max_ratio.
    batch_size: B.
    seq_length: number of keys (tokens).
    deterministic: whether no key is hidden.
    key: a `jax.random` key.

  Returns:
    bool [B, 1, 1, seq_length], True = visible; None if no key is hidden.

  Raises:
    ValueError: `config` is not an AttnConfig; or keys are to be hidden, and `key` is not an array,
      a size is not an int >= 1, or as `validated`.
  """
  if deterministic or not checked(config).fcm_max_ratio:
    return None
  validated(config)
  for name, size in (("batch_size", batch_size), ("seq_length", seq_length)):
    checks.integer(name, size, "an int >= 1", lambda x: x >= 1)
  checks.require(isinstance(key, (jax.Array, np.ndarray)), "key", checks.describe(key),
                 "a jax.random key, since deterministic=False and "
                 f"fcm_max_ratio={config.fcm_max_ratio}")
  ratio_key, drop_key = jax.random.split(jnp.asarray(key))
  ratio = jax.random.uniform(ratio_key, (batch_size, 1, 1, 1), minval=config.fcm_min_ratio,
                             maxval=config.fcm_max_ratio)
  kept = jax.random.uniform(drop_key, (batch_size, 1, 1, seq_length)) >= ratio
  return kept.at[..., 0].set(True)


def get_basic_inv_frequencies(
    config: AttnConfig, head_size: int | None = None, rotary_dim: int | None = None,
    base: float | None = None, partial_rotary_factor: float | None = None) -> jax.Array:
  """The inverse frequencies of the configured rotary embedding.

  Args:
    config: its `rope`, `rope_head_dim` and `head_dim` are read.
    head_size: D; None: as configured.
    rotary_dim: number of rotated dimensions of a head; None: the configured fraction of D.
    base: None: the configured rope_theta.
    partial_rotary_factor: fraction of D that is rotated, if `rotary_dim` is None; None: as
      configured.

  Returns:
    float32 [rotary_dim / 2], radians per position.

  Raises:
    ValueError: as `config.get_head_dim` if no width is given, `rotary_dim` is given for rope_type
      "proportional", or as `inverse_frequencies`.
  """
  rope = _based(config, base)
  if partial_rotary_factor is not None:
    rope = rope._replace(partial_rotary_factor=partial_rotary_factor)
  width, rope = _rotated(config, rope, head_size, rotary_dim)
  return jnp.asarray(inverse_frequencies(rope, width))


def get_basic_frequencies(
    config: AttnConfig, head_size: int | None = None, rotary_dim: int | None = None,
    base: float | None = None) -> jax.Array:
  """The table of cosines and sines of the configured rotary embedding.

  Types whose frequencies depend on the length use the length of the table. `rotary_table` computes
  cosines and sines at any position without a table.

  Args:
    config: as for `get_basic_inv_frequencies`; the length of the table is
      `granted_freq_max_position_embedding(config)`.
    head_size: D; None: as configured.
    rotary_dim: number of rotated dimensions of a head; None: the configured fraction of D.
    base: None: the configured rope_theta.

  Returns:
    float32 [length, rotary_dim]: first the cosines, then the sines, rotary_dim / 2 each.

  Raises:
    ValueError: as `get_basic_inv_frequencies` and `granted_freq_max_position_embedding`.
  """
  width, rope = _rotated(config, _based(config, base), head_size, rotary_dim)
  positions = jnp.arange(granted_freq_max_position_embedding(config), dtype=jnp.int32)
  return jnp.concatenate(rotary_table(rope, positions, width), -1)


def get_basic_rope(
    config: AttnConfig, dtype: DTypeLike, head_size: int, rotary_dim: int | None = None,
    is_neox_style: bool | None = None, base: float | None = None,
) -> Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  """Makes a function that rotates query and key by their positions.

  Args:
    config: its `rope` is read.
    dtype: of the results of the function.
    head_size: D.
    rotary_dim: number of rotated dimensions of a head; None: the configured fraction of D.
    is_neox_style: True: pairs are (i, rotary_dim / 2 + i); False: neighbors; None: as configured.
    base: None: the configured rope_theta.

  Returns:
    (positions int [B, T], query [B, T, H, D], key [B, T, K, D]) -> (query, key); see `rotary`.

  Raises:
    ValueError: as `get_basic_inv_frequencies`, `rotary_dim` is more than `head_size`, or `dtype` is
      not a dtype.
  """
  dtype = checks.dtype("dtype", dtype, "a floating-point dtype, such as jnp.bfloat16")
  width, rope = _rotated(config, _based(config, base), head_size, rotary_dim)
  if is_neox_style is not None:
    rope = rope._replace(interleaved=not is_neox_style)
  inverse_frequencies(rope, width)  # raises its errors before the first call
  if width != head_size:
    checks.require(width < head_size, "rotary_dim", width, f"at most head_size={head_size}")
    rope = rope._replace(partial_rotary_factor=width / head_size)

  def rotate(positions: jax.Array, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    rotated_query, rotated_key = rotary(query, key, positions, rope)
    return jnp.asarray(rotated_query).astype(dtype), jnp.asarray(rotated_key).astype(dtype)

  return rotate


def _based(config: AttnConfig, base: float | None) -> Rope:
  """The configured rope with another base; None: the configured base."""
  rope = checked(config).rope
  if base is None:
    return rope
  return rope._replace(rope_theta=checks.number("base", base, "a number, or None for rope_theta"))


def _rotated(config: AttnConfig, rope: Rope, head_size: int | None,
             rotary_dim: int | None) -> tuple[int, Rope]:
  """(width, rope): `rope` rotates its fraction of the width, which is `rotary_dim` if given."""
  if rotary_dim is not None:
    checks.require(rope.rope_type != "proportional", "rotary_dim", rotary_dim,
                   "None, since rope_type='proportional' rotates a head whole")
    return rotary_dim, rope._replace(partial_rotary_factor=1.0)
  return head_size or config.rope_head_dim or get_head_dim(config), rope


def _granted(config: AttnConfig, name: str) -> int:
  """The length of a field, else `max_position_embeddings`."""
  length: int = getattr(checked(config), name) or config.max_position_embeddings or 0
  checks.require(length > 0, name, None, "a length (tokens), here or as max_position_embeddings")
  return length
