# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Combines per-device partial attention outputs by logsumexp.

  lse = log(sum over devices of exp(lse_i)),   out = sum over devices of out_i * exp(lse_i - lse)

where device i attended to its own keys only.
"""

import jax
from jax import lax
import jax.numpy as jnp

AxisNames = str | tuple[str, ...]


def sinks_on_first_device(sinks: jax.Array | None, axes: AxisNames) -> jax.Array | None:
  """Keeps the sinks on the first device, so that they count once, with -inf on the others.

  Args:
    sinks: float [..., H], the same on every device; None stays None.
    axes: manual mesh axes over which the keys are sharded.

  Returns:
    float [..., H], or None.
  """
  return None if sinks is None else jnp.where(lax.axis_index(axes) == 0, sinks, -jnp.inf)


def combine(out: jax.Array, lse: jax.Array, axes: AxisNames) -> tuple[jax.Array, jax.Array]:
  """Combines the partial results of all devices along mesh axes.

  Args:
    out: [B, T, H, E], the output over this device's keys.
    lse: [B, H, T], its logsumexp; -inf where this device has no visible key.
    axes: manual mesh axes over which the keys are sharded.

  Returns:
    (out, lse) over all keys, in the same shapes and dtypes.
  """
  m_i = lax.stop_gradient(lse)
  # Without a visible key on any device the maximum is finite: -inf - -inf would be NaN.
  m_i = lax.pmax(jnp.where(m_i == -jnp.inf, jnp.finfo(lse.dtype).min, m_i), axes)
  weight = jnp.exp(lse - m_i)
  l_i = lax.psum(weight, axes)
  share = weight / jnp.where(l_i == 0, 1, l_i)
  combined = lax.psum(out.astype(share.dtype) * share.transpose(0, 2, 1)[..., None], axes)
  return combined.astype(out.dtype), jnp.where(
      l_i == 0, -jnp.inf, m_i + jnp.log(jnp.where(l_i == 0, 1, l_i)))
