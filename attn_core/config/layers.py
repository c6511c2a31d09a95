"""What a configuration means for a layer: its mask, its rotary embedding, its `attention`.

Letters: B batch, L longest length (tokens), D a head's width, R rotated width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks, masks
from attn_core.config.config import AttnConfig, checked, get_head_dim, validated
from attn_core.rope.frequencies import Rope, inverse_frequencies
from attn_core.rope.rope import rotary, rotary_table


class AttnMaskDetail(NamedTuple):
  """Which keys a layer's queries see."""

  mask_type: str  # one of config.LAYER_TYPES
  causal: bool = True
  sliding_window: tuple[int, int] | None = None  # (left, right), tokens; of "sliding_attention"
  chunk_size: int | None = None  # tokens; of "chunked_attention"

  @property
  def size(self) -> int | None:
    """The largest number of keys that a query sees (tokens); None: all."""
    if self.sliding_window is None:
      return self.chunk_size
    left, right = self.sliding_window
    right = 0 if self.causal else right
    return None if -1 in (left, right) else left + right + 1

  def to_mask(self) -> masks.Mask:
    """The mask as a value, for `mask` of `attention` with causal=False."""
    mask = masks.causal() if self.causal else masks.full()
    if self.sliding_window is not None:
      mask = mask & masks.window(*[None if n == -1 else n for n in self.sliding_window])
    return mask if self.chunk_size is None else mask & masks.chunk(self.chunk_size)


def get_mask_details(config: AttnConfig) -> dict[int, AttnMaskDetail] | None:
  """The mask of every layer by its number, from 0; None: all are alike, see `mask_detail`.

  Raises:
    ValueError: `validated` refuses the configuration.
  """
  if validated(config).layer_types is None:
    return None
  return {layer: mask_detail(config, layer) for layer in range(len(config.layer_types))}


def mask_detail(config: AttnConfig, layer: int = 0) -> AttnMaskDetail:
  """The mask of one layer, whether all are alike or not.

  Raises:
    ValueError: `config` is no AttnConfig, or there is no such layer.
  """
  if checked(config).layer_types is None:
    _check_layer(config.num_hidden_layers, layer)
    kind = ("sliding_attention" if config.sliding_window is not None else
            "chunked_attention" if config.chunk_size is not None else "full_attention")
  else:
    _check_layer(len(config.layer_types), layer)
    kind = config.layer_types[layer]
  return AttnMaskDetail(kind, config.causal,
                        config.sliding_window if kind == "sliding_attention" else None,
                        config.chunk_size if kind == "chunked_attention" else None)


def layer_rope(config: AttnConfig, layer: int = 0) -> Rope:
  """The rotary embedding of one layer; of type "none" where the layer has none.

  Raises:
    ValueError: `config` is no AttnConfig, or there is no such layer.
  """
  kind = mask_detail(config, layer).mask_type
  if layer in config.layers_without_rope:
    return Rope("none")
  return dict(config.layer_ropes).get(kind, config.rope)


def query_temperature(config: AttnConfig, positions, layer: int = 0) -> jax.Array | None:
  """What a layer multiplies its queries by before `attention`, so that late ones stay sharp.

    1 + strength * ln(1 + floor((position + 1) / step))   in layers without a rotary embedding

  As Llama 4 has it, after Nakanishi, Scalable-Softmax, https://arxiv.org/abs/2501.19399.

  Args:
    config: (strength, step) are its `temperature_tuning`.
    positions: int [B or 1, T], of the queries (tokens); those before 0 are padding.
    layer: the layer's number, from 0.

  Returns:
    float32 [B or 1, T]: `query * temperature[..., None, None]` in layout bthd; None where the layer
    leaves its queries as they are.

  Raises:
    ValueError: `config` is no AttnConfig, there is no such layer, or positions that are no array of
      integers.
  """
  turns = layer_rope(config, layer).rope_type != "none"
  checks.array("positions", positions, "int [B or 1, T]")
  checks.require(jnp.issubdtype(positions.dtype, jnp.integer), "positions",
                 checks.describe(positions), "int [B or 1, T]")
  if config.temperature_tuning is None or turns:
    return None
  strength, step = config.temperature_tuning
  steps = (jnp.maximum(jnp.asarray(positions), -1) + 1) // step
  return 1 + strength * jnp.log1p(steps.astype(jnp.float32))


def attention_arguments(config: AttnConfig, layer: int = 0) -> dict[str, Any]:
  """What a layer passes to `attention` beside its arrays: `attention(q, k, v, **arguments)`.

  Args:
    config: the configuration.
    layer: the layer's number, from 0.

  Returns:
    mechanism, causal, sliding_window, chunk_size, softmax_scale, logits_soft_cap, dropout_prob.
    Sinks are the layer's parameters and go to `softmax_aux`; see also `query_temperature`.

  Raises:
    ValueError: `validated` refuses the configuration, or there is no such layer.
  """
  config = validated(config)
  detail = mask_detail(config, layer)
  return {
      "mechanism": config.attn_mechanism, "causal": detail.causal,
      "sliding_window": detail.sliding_window, "chunk_size": detail.chunk_size,
      "softmax_scale": config.softmax_scale, "logits_soft_cap": config.logits_soft_cap,
      "dropout_prob": config.dropout_prob}


def granted_freq_max_position_embedding(config: AttnConfig) -> int:
  """L of the tables of rotary embeddings (tokens).

  Raises:
    ValueError: the configuration knows no length.
  """
  return _granted(config, "freq_max_position_embeddings")


def granted_mask_max_position_embedding(config: AttnConfig) -> int:
  """L of masks that are written out (tokens).

  Raises:
    ValueError: the configuration knows no length.
  """
  return _granted(config, "mask_max_position_embeddings")


def get_basic_causal_mask(config: AttnConfig, dense: bool = False):
  """The causal mask: a value, which is free and fits every length.

  Args:
    config: the configuration; its length is read only where `dense`.
    dense: whether to write it out, as bool [1, 1, L, L].

  Raises:
    ValueError: `dense`, and the configuration knows no length.
  """
  if not dense:
    return masks.causal()
  length = granted_mask_max_position_embedding(config)
  return jnp.tril(jnp.ones((1, 1, length, length), bool))


def get_fcm_mask(config: AttnConfig, batch_size: int, seq_length: int, deterministic: bool,
                 key: jax.Array | None = None):
  """The mask of forgetful causal masking: keys dropped at random, from all queries of a row alike.

    share[b] ~ uniform(fcm_min_ratio, fcm_max_ratio);   key s of row b is dropped with share[b]

  The first key stays, so that every query sees one. Pass it as `mask`, beside causal=True.
  Liu et al., FCM: Forgetful Causal Masking, https://arxiv.org/abs/2210.13432.

  Args:
    config: fcm_min_ratio and fcm_max_ratio.
    batch_size: B.
    seq_length: number of keys (tokens).
    deterministic: whether nothing is to be dropped.
    key: a `jax.random` key.

  Returns:
    bool [B, 1, 1, seq_length], True = visible; None where nothing is dropped.

  Raises:
    ValueError: no key where there is something to drop, sizes that are no ints >= 1, or as
      `validated`.
  """
  if deterministic or not checked(config).fcm_max_ratio:
    return None
  validated(config)
  for name, size in (("batch_size", batch_size), ("seq_length", seq_length)):
    checks.integer(name, size, "an int >= 1", lambda x: x >= 1)
  checks.require(isinstance(key, (jax.Array, np.ndarray)), "key", checks.describe(key),
                 "a jax.random key, since deterministic=False and "
                 f"fcm_max_ratio={config.fcm_max_ratio}")
  share_key, drop_key = jax.random.split(key)
  share = jax.random.uniform(share_key, (batch_size, 1, 1, 1), minval=config.fcm_min_ratio,
                             maxval=config.fcm_max_ratio)
  kept = jax.random.uniform(drop_key, (batch_size, 1, 1, seq_length)) >= share
  return kept.at[..., 0].set(True)


def get_basic_inv_frequencies(
    config: AttnConfig, head_size: int | None = None, rotary_dim: int | None = None,
    base: float | None = None, partial_rotary_factor: float | None = None):
  """The inverse frequencies of the configured rotary embedding.

  Args:
    config: its `rope`, `rope_head_dim` and `head_dim`.
    head_size: D; None: the configured one.
    rotary_dim: R; None: the configured share of D.
    base: None: the configured rope_theta.
    partial_rotary_factor: share of D that is rotated, where `rotary_dim` is None; None: the
      configured one.

  Returns:
    float32 [R / 2], radians for each position.

  Raises:
    ValueError: the configuration knows no width, or as `inverse_frequencies`.
  """
  rope = _based(config, base)
  if partial_rotary_factor is not None:
    rope = rope._replace(partial_rotary_factor=partial_rotary_factor)
  width, rope = _rotated(config, rope, head_size, rotary_dim)
  return jnp.asarray(inverse_frequencies(rope, width))


def get_basic_frequencies(
    config: AttnConfig, head_size: int | None = None, rotary_dim: int | None = None,
    base: float | None = None):
  """The table of cosines and sines of the configured rotary embedding.

  Types that choose their frequencies by length choose them for L; a table that is too short does
  not exist here otherwise: `rotary_table` takes any position.

  Args:
    config: as for `get_basic_inv_frequencies`, and its longest length.
    head_size: D; None: the configured one.
    rotary_dim: R; None: the configured share of D.
    base: None: the configured rope_theta.

  Returns:
    float32 [L, R]: R / 2 cosines, then R / 2 sines.

  Raises:
    ValueError: as `get_basic_inv_frequencies`, or the configuration knows no length.
  """
  width, rope = _rotated(config, _based(config, base), head_size, rotary_dim)
  positions = jnp.arange(granted_freq_max_position_embedding(config), dtype=jnp.int32)
  return jnp.concatenate(rotary_table(rope, positions, width), -1)


def get_basic_rope(
    config: AttnConfig, dtype: Any, head_size: int, rotary_dim: int | None = None,
    is_neox_style: bool | None = None, base: float | None = None):
  """A function that turns query and key to their positions.

  Args:
    config: its `rope`.
    dtype: of what the function returns.
    head_size: D.
    rotary_dim: R; None: the configured share of D.
    is_neox_style: True: pairs (i, R / 2 + i); False: neighbours; None: the configured way.
    base: None: the configured rope_theta.

  Returns:
    (positions int [B, T], query [B, T, H, D], key [B, T, K, D]) -> (query, key); see `rotary`.

  Raises:
    ValueError: as `get_basic_inv_frequencies`, a `rotary_dim` above `head_size`, or no dtype.
  """
  dtype = checks.dtype("dtype", dtype, "a floating-point dtype, such as jnp.bfloat16")
  width, rope = _rotated(config, _based(config, base), head_size, rotary_dim)
  if is_neox_style is not None:
    rope = rope._replace(interleaved=not is_neox_style)
  inverse_frequencies(rope, width)  # says now what it would say of every call
  if width != head_size:
    checks.require(width < head_size, "rotary_dim", width, f"at most head_size={head_size}")
    rope = rope._replace(partial_rotary_factor=width / head_size)

  def turn(positions, query, key):
    return tuple(x.astype(dtype) for x in rotary(query, key, positions, rope))

  return turn


def _based(config: AttnConfig, base: float | None) -> Rope:
  rope = checked(config).rope
  if base is None:
    return rope
  return rope._replace(rope_theta=checks.number("base", base, "a number, or None for rope_theta"))


def _rotated(config: AttnConfig, rope: Rope, head_size: int | None, rotary_dim: int | None):
  """(width, rope): a width and the rope that turns its share of it; R itself where given."""
  if rotary_dim is not None:
    return rotary_dim, rope._replace(partial_rotary_factor=1.0)
  return head_size or config.rope_head_dim or get_head_dim(config), rope


def _granted(config: AttnConfig, name: str) -> int:
  length = getattr(checked(config), name) or config.max_position_embeddings
  checks.require(length is not None, name, None, "a length (tokens), here or as "
                 "max_position_embeddings")
  return length


def _check_layer(layers: int | None, layer: int) -> None:
  checks.integer("layer", layer, f"a number from 0 to {'N' if layers is None else layers} - 1",
                 lambda x: x >= 0 and (layers is None or x < layers))
