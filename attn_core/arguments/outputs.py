# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts the results of a mechanism to those that the caller asked for."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.caches import device_parts
from attn_core.caches.update import Step
from attn_core.types import AttentionOutput


def with_cache(output: AttentionOutput, step: Step) -> AttentionOutput:
  """Adds the updated cache, and NaN in the rows that overflowed."""
  def with_nan(x: jax.Array) -> jax.Array:
    overflow = device_parts.match(step.overflow, x)
    return jnp.where(overflow.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)

  weights, lse = output.attention_weights, output.lse
  return output._replace(
      attention_outputs=with_nan(output.attention_outputs),
      attention_weights=None if weights is None else with_nan(weights),
      lse=None if lse is None else with_nan(lse), cache_view=step.cache)


def to_layout(output: AttentionOutput, layout: str, dtype: np.dtype) -> AttentionOutput:
  """Converts from layout bthd to the caller's, and to the dtype of the query."""
  out, weights, lse = output.attention_outputs.astype(dtype), output.attention_weights, output.lse
  if layout == "bhtd":
    out = out.transpose(0, 2, 1, 3)
  if layout != "thd":
    return output._replace(attention_outputs=out)
  return output._replace(
      attention_outputs=out[0], attention_weights=None if weights is None else weights[0],
      lse=None if lse is None else lse[0])
