# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed-Ulysses: an all-to-all within a group of devices exchanges tokens for heads.

Each device of a group has T / group tokens of all H heads; between the two exchanges it has all T
tokens of H / group heads. T and S are the numbers of queries and keys of a group.

Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
"""

import math
from typing import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.kernels.common.contract import Residuals
from attn_core.masks import mask as mask_lib
from attn_core.score_mods import score_mod
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import AttentionSpec, Operands


def exchanged(attend: Callable[[Operands], Residuals], sequence: Sequence,
              spec: AttentionSpec, operands: Operands) -> Residuals:
  """Runs `attend` on all tokens of the group and H / group heads.

  Args:
    attend: computes the attention of some heads.
    sequence: the sharding of the sequence; its `group` divides H.
    spec: the structures of mask and score mod count.
    operands: those of one device.

  Returns:
    out and lse of the device's tokens, of all heads.
  """
  axes, group = sequence.head_axes, sequence.group
  if group == 1:
    return attend(operands)
  length, heads = operands.query.shape[1:3]
  mine = lax.axis_index(axes).astype(jnp.int32) * (heads // group)
  to_heads = lambda x: lax.all_to_all(x, axes, 2, 1, tiled=True)
  everything = lambda x, axis: lax.all_gather(x, axes, axis=axis, tiled=True)
  my_heads = lambda x: lax.dynamic_slice_in_dim(x, mine, heads // group, 1)

  def per_pair(x: jax.Array) -> jax.Array:
    """Maps [B or 1, H or 1, T / group or 1, S or 1] to [B or 1, H / group or 1, T or 1, S or 1]."""
    if x.shape[2] != length:
      return my_heads(x) if x.shape[1] > 1 else x
    return lax.all_to_all(x, axes, 1, 2, tiled=True) if x.shape[1] > 1 else everything(x, 2)

  def of_mask(x: jax.Array, role: str) -> jax.Array:
    if role == mask_lib.DENSE:
      return per_pair(x)
    return everything(x, 1) if role in (mask_lib.QUERY, mask_lib.KEY) else x

  def of_mod(x: jax.Array, role: str) -> jax.Array:
    if role == score_mod.PAIR:
      return per_pair(x)
    return my_heads(x) if x.shape[1] > 1 else x

  mask, roles = operands.mask, mask_lib.structure_roles(spec.mask)
  assert mask.head_offset is not None  # set by `shard_map.sharded`
  needed = key_heads_needed(heads, operands.key.shape[2], group)
  pick = lambda x: x if len(needed) == x.shape[2] else jnp.take(x, needed, 2)
  key, value = (to_heads(pick(x)) for x in (operands.key, operands.value))
  out, lse = attend(operands._replace(
      query=to_heads(operands.query), key=key, value=value,
      bias=None if operands.bias is None else per_pair(operands.bias),
      sinks=None if operands.sinks is None else my_heads(operands.sinks),
      mods=tuple(map(of_mod, operands.mods, score_mod.structure_roles(spec.score_mod))),
      mask=mask._replace(arrays=tuple(map(of_mask, mask.arrays, roles)),
                         head_offset=mask.head_offset + mine)))
  return Residuals(lax.all_to_all(out, axes, 1, 2, tiled=True),
                   lax.all_to_all(lse, axes, 2, 1, tiled=True))


def key_heads_needed(heads: int, key_heads: int, group: int) -> np.ndarray:
  """Returns the key heads that the devices of a group need, in the order of the devices.

  These are all key heads in order if `group` divides K, else some occur twice: each run of
  neighboring query heads has one key head.
  """
  shared = math.gcd(heads // group, heads // key_heads)
  return np.arange(0, heads, shared) // (heads // key_heads)
