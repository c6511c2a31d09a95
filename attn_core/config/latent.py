# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derives the options of latent attention from a configuration and a model's weights."""

import jax.numpy as jnp
from jax.typing import ArrayLike

from attn_core import checks
from attn_core.config.config import AttnConfig, checked
from attn_core.types import LatentOptions


def latent_options(config: AttnConfig, up_projection: ArrayLike | None = None) -> LatentOptions:
  """Returns the options of `multi_latent_attention` for a model such as DeepSeek-V3.

  >>> from attn_core import from_dict, latent_options
  >>> latent_options(from_dict({"model_type": "deepseek_v3"}))[:3]
  (512, 64, 128)

  Args:
    config: with latent_width, rope_head_dim and head_dim, as `from_pretrained` reads them.
    up_projection: float [latent, H * (nope + E)], the transposed weight of the layer's
      `kv_b_proj`; None: queries are absorbed by the caller.

  Returns:
    The widths, and key_up and value_up of every head where an up-projection is given. The softmax
    scale is that of `attention_arguments`, where the configuration has one.

  Raises:
    ValueError: the configuration has no such widths, or the up-projection another shape.
  """
  latent, rope, width = checked(config).latent_width, config.rope_head_dim, config.head_dim
  if latent is None or rope is None or width is None or width <= rope:
    raise ValueError(
        f"config: got latent_width={latent}, rope_head_dim={rope} and head_dim={width}; expected "
        "widths of latent attention, with head_dim > rope_head_dim")
  nope = width - rope
  if up_projection is None:
    return LatentOptions(latent, rope, nope)
  heads, value = config.num_attention_heads, config.value_head_dim
  given = checks.floating("up_projection", up_projection, 2, "[latent, H * (nope + E)]")
  checks.require(
      heads is not None and value is not None
      and given.shape == (latent, heads * (nope + value)), "up_projection",
      checks.describe(given), f"float [{latent}, H * (nope + E)] with H = num_attention_heads "
      f"{heads}, nope {nope} and E = value_head_dim {value}")
  split = jnp.asarray(given).reshape(latent, heads, -1)
  return LatentOptions(latent, rope, nope, split[..., :nope], split[..., nope:])
