# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Definition of latent attention: the keys and values of all heads, written out.

  key[b, s, h]   = [sum over l of key_up[l, h] * row[b, s, l], the rest of row[b, s]]
  value[b, s, h] = sum over l of value_up[l, h] * row[b, s, l]

Without up-projections a row is the key, and its first numbers the value, of every head. It does not
import kernels.
"""

import jax
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
  assert spec.latent_width is not None
  key, value = keys_and_values(operands.key[:, :, 0], spec.latent_width, operands.up)
  return oracle.attention(operands._replace(key=key, value=value, up=()),
                          spec._replace(latent_width=None))


def keys_and_values(rows: jax.Array, latent: int,
                    up: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """Returns the keys and values that rows stand for, [..., 1 or H, width].

  Args:
    rows: [..., latent + rope].
    latent: the width of the first part.
    up: (key_up [latent, H, nope], value_up [latent, H, E]), or ().
  """
  latents, rope = rows[..., None, :latent], rows[..., None, latent:]
  if not up:
    return rows[..., None, :], latents
  key, value = (jnp.einsum("...l,lhd->...hd", latents[..., 0, :], x, precision="highest")
                for x in up)
  return jnp.concatenate([key, jnp.repeat(rope, key.shape[-2], -2)], -1), value
