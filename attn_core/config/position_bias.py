# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score mod of a layer whose model adds biases by position to its scores."""

from jax.typing import ArrayLike
import numpy as np

from attn_core import checks, score_mods
from attn_core.config.config import AttnConfig, get_head_dim, layer_type
from attn_core.config.validate import validated


def layer_score_mod(config: AttnConfig, table: ArrayLike | None = None,
                    layer: int = 0) -> score_mods.ScoreMod | None:
  """The score mod of one layer: ALiBi of MPT, BLOOM and Falcon, or the relative biases of T5.

  >>> from attn_core import from_dict, layer_score_mod
  >>> config = from_dict({"model_type": "bloom", "n_head": 4})
  >>> layer_score_mod(config).slopes
  array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)

  `attention_arguments` has it where the model has no parameters for it. T5's biases are a parameter
  of its first layer, which all layers of a stack share; its cross attention has none.

  Args:
    config: its `alibi_bias_max`, or its `relative_buckets` are read. The biases of T5 have two
      directions unless the configuration is causal.
    table: float [num_buckets, H], T5's `relative_attention_bias`; None where the configuration has
      no `relative_buckets`.
    layer: the index of the layer, from 0.

  Returns:
    A score mod; None where the layer adds no bias by position.

  Raises:
    ValueError: as `validated` or `layer_type`; the number of heads is not known; or `table` is
      missing, of another shape, or given without `relative_buckets`.
  """
  config = validated(config)
  layer_type(config, layer)  # checks the index
  heads = config.num_attention_heads
  if config.relative_buckets is not None:
    buckets, most = config.relative_buckets
    expected = f"float [{buckets}, {'H' if heads is None else heads}], the learned biases"
    checks.require(table is not None, "table", None, expected)
    assert table is not None
    shape = np.shape(table)
    checks.require(len(shape) == 2 and shape[0] == buckets and heads in (None, shape[1]), "table",
                   checks.describe(table), expected)
    return score_mods.relative(table, max_distance=most, bidirectional=not config.causal)
  checks.require(table is None, "table", checks.describe(table),
                 "None without relative_buckets: ALiBi has no parameters")
  return alibi(config)


def alibi(config: AttnConfig) -> score_mods.ScoreMod | None:
  """The ALiBi of a configuration; None where it has none.

  Raises:
    ValueError: the number of heads is not known, or the width where the softmax scale applies.
  """
  if config.alibi_bias_max is None:
    return None
  heads = config.num_attention_heads
  checks.require(heads is not None, "num_attention_heads", None, "H, which the slopes depend on")
  assert heads is not None
  # The slopes of the paper are for a largest bias of 8, by powers of 2.
  exponents = np.log2(score_mods.alibi_slopes(heads).astype(np.float64))
  slopes = np.exp2(exponents * config.alibi_bias_max / 8)
  if config.alibi_scaled:
    scale = config.softmax_scale
    slopes = slopes * (get_head_dim(config) ** -0.5 if scale is None else scale)
  return score_mods.alibi(slopes.astype(np.float32), symmetric=not config.causal)
