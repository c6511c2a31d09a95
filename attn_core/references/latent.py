# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Definition of latent attention: the keys and values of all heads, written out.

  key[b, s, h]   = [sum over l of key_up[l, h] * row[b, s, l], the rest of row[b, s]]
  value[b, s, h] = sum over l of value_up[l, h] * row[b, s, l]

Without up-projections a row is the key, and its first numbers the value, of every head. It does not
import kernels.
"""

import jax.numpy as jnp

from attn_core.references import oracle
from attn_core.types import AttentionOutput, AttentionSpec, Operands


def attention(operands: Operands, spec: AttentionSpec) -> AttentionOutput:
  """Computes latent attention by its definition.

  Args:
    operands: query [B, T, H, width], key [B, S, 1, latent + rope], up, and the rest of `Operands`.
    spec: what to compute, with a latent_width; see `oracle.attention`.

  Returns:
    As `oracle.attention`.
  """
  rows, latent = operands.key, spec.latent_width
  key, value = rows, rows[..., :latent]
  if operands.up:
    key_up, value_up = operands.up
    latents, rope = rows[:, :, 0, :latent], rows[..., latent:]
    key = jnp.einsum("bsl,lhd->bshd", latents, key_up, precision="highest")
    key = jnp.concatenate([key, jnp.repeat(rope, key.shape[2], 2)], -1)
    value = jnp.einsum("bsl,lhe->bshe", latents, value_up, precision="highest")
  return oracle.attention(operands._replace(key=key, value=value, up=()),
                          spec._replace(latent_width=None))
