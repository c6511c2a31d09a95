# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Combines the attention of devices to their own keys, see `partials`."""

import jax
from jax import lax
import jax.numpy as jnp

from attn_core import partials

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
  combined, total = partials.combine(
      out, lse, lambda x: x.transpose(0, 2, 1), lambda x: lax.pmax(x, axes),
      lambda x: lax.psum(x, axes))
  return combined.astype(out.dtype), total
