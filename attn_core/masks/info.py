# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaskInfo: arrays that hide keys from queries, and the mask that they make."""

from typing import NamedTuple

import jax
from jax import export
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.array_axes import count_reached
from attn_core.masks import constructors, mask as mask_lib


Array = mask_lib.Array
_SYMBOLIC = type(export.symbolic_shape("t")[0])  # a number of tokens in a `jax.export`


class MaskInfo(NamedTuple):
  """Arrays that together hide keys from queries; None: no restriction. Never mutated."""

  attention_mask: Array | None = None  # bool [B or 1, H or 1, T or 1, S or 1]; True = visible
  q_segment_ids: Array | None = None  # int32 [B or 1, T]; negative = padding
  kv_segment_ids: Array | None = None  # int32 [B or 1, S]
  q_positions: Array | None = None  # int32 [B or 1, T], tokens
  kv_positions: Array | None = None  # int32 [B or 1, S], tokens

  @classmethod
  def from_segments(cls, q_segment_ids: Array, kv_segment_ids: Array | None = None,
                    q_positions: Array | None = None,
                    kv_positions: Array | None = None) -> "MaskInfo":
    """Makes a MaskInfo of packed documents: equal ids are visible, negative ids are padding.

    Args:
      q_segment_ids: int32 [B or 1, T].
      kv_segment_ids: int32 [B or 1, S]; None: `q_segment_ids`.
      q_positions: int32 [B or 1, T] (tokens); None: 0 to T - 1 over all documents.
      kv_positions: int32 [B or 1, S] (tokens); None: 0 to S - 1 over all documents.

    Raises:
      ValueError: `q_segment_ids` is None; `to_mask` and `attention` check shapes and dtypes.
    """
    checks.require(q_segment_ids is not None, "q_segment_ids", None, "int32 [B or 1, T]")
    return cls(q_segment_ids=q_segment_ids,
               kv_segment_ids=q_segment_ids if kv_segment_ids is None else kv_segment_ids,
               q_positions=q_positions, kv_positions=kv_positions)

  @classmethod
  def from_attention_mask(cls, attention_mask: Array) -> "MaskInfo":
    """Makes a MaskInfo of a boolean mask, or of a padding mask of the keys.

    Args:
      attention_mask: bool [B or 1, H or 1, T or 1, S or 1], or bool or 0/1 integers [B, S],
        0 for padding. True or 1 = visible.

    Raises:
      ValueError: the mask is not an array, of another rank, float (a bias), or holds concrete
        integers other than 0 and 1 (segment ids).
    """
    checks.require(attention_mask is not None, "attention_mask", None, "bool or 0/1 integers")
    given = checks.as_array("attention_mask", attention_mask, "bool or 0/1 integers")
    known = given.dtype == bool or jnp.issubdtype(given.dtype, jnp.number)
    checks.require(known, "attention_mask", checks.describe(given), "bool or 0/1 integers")
    mask = jnp.asarray(given)
    if mask.ndim not in (2, 4) or jnp.issubdtype(mask.dtype, jnp.inexact):
      raise ValueError(
          f"attention_mask has dtype {mask.dtype} and shape {mask.shape}; expected bool or 0/1 "
          "integers, [B, S] (padding of the keys) or [B or 1, H or 1, T or 1, S or 1]; an additive "
          "float mask goes to `bias`")
    if mask.dtype != bool and not isinstance(mask, jax.core.Tracer):
      checks.require(np.isin(np.asarray(mask), (0, 1)).all(), "attention_mask",
                     f"{checks.describe(mask)} with other integers than 0 and 1",
                     "0 or 1; ids of packed documents go to MaskInfo.from_segments")
    mask = mask.astype(bool)
    return cls(attention_mask=mask[:, None, None, :] if mask.ndim == 2 else mask)

  @classmethod
  def from_cu_seqlens(cls, cu_seqlens_q: Array, total_q: int, cu_seqlens_k: Array | None = None,
                      total_k: int | None = None) -> "MaskInfo":
    """Makes segment ids, and positions that restart in each sequence, of packed sequences.

    Args:
      cu_seqlens_q: int32 [B + 1] nondecreasing offsets from 0 to at most `total_q`.
      total_q: number of packed query tokens (static); tokens past the last offset are padding.
      cu_seqlens_k: int32 [B + 1] of the keys; None: `cu_seqlens_q`.
      total_k: number of packed key tokens; None: `total_q`.

    Returns:
      A MaskInfo whose arrays have a leading axis of 1.

    Raises:
      ValueError: offsets have another rank or dtype, or concrete values that do not rise from 0 to
        at most the total; the numbers of offsets of keys and queries differ; a total is not an
        int >= 0; or `total_k` is given without `cu_seqlens_k`.
    """
    q_ids, q_positions = _packed("cu_seqlens_q", cu_seqlens_q, "total_q", total_q)
    if cu_seqlens_k is None:
      checks.require(total_k is None, "total_k", total_k, "None without cu_seqlens_k: the keys "
                     "are packed as the queries")
      return cls(None, q_ids, q_ids, q_positions, q_positions)
    checks.require(np.shape(cu_seqlens_k) == np.shape(cu_seqlens_q), "cu_seqlens_k",
                   f"{np.shape(cu_seqlens_k)}", f"as many offsets as cu_seqlens_q has, "
                   f"{np.shape(cu_seqlens_q)}")
    k_ids, k_positions = _packed("cu_seqlens_k", cu_seqlens_k, "total_k",
                                 total_q if total_k is None else total_k)
    return cls(None, q_ids, k_ids, q_positions, k_positions)

  def to_mask(self, base: mask_lib.Mask = mask_lib.Full()) -> mask_lib.Mask:
    """Combines `base` and these arrays into one mask.

    Args:
      base: a mask that reads the positions, such as `causal() & window(127, 0)`.

    Raises:
      ValueError: `base` is not a mask, segment ids of one side are missing, or arrays have a wrong
        rank or dtype.
    """
    checks.require(isinstance(base, mask_lib.Mask), "base", type(base).__name__,
                   "a mask, such as masks.causal()")
    mask = base
    if (self.q_segment_ids is None) != (self.kv_segment_ids is None):
      given, missing = (("q_segment_ids", "kv_segment_ids") if self.kv_segment_ids is None
                        else ("kv_segment_ids", "q_segment_ids"))
      raise ValueError(f"mask_info: {given} is given and {missing} is None; expected both or none "
                       "(MaskInfo.from_segments uses one array for both)")
    if self.q_segment_ids is not None:
      mask = mask & constructors.segments(self.q_segment_ids, self.kv_segment_ids)
    if self.attention_mask is not None:
      mask = mask & constructors.dense(self.attention_mask)
    if self.q_positions is not None or self.kv_positions is not None:
      mask = constructors.positions(self.q_positions, self.kv_positions, mask)
    return mask


def _packed(argument: str, cu_seqlens: Array, of_total: str,
            total: int) -> tuple[jax.Array, jax.Array]:
  """(segment ids, positions), int32 [1, total]; -1 and 0 past the last offset."""
  if not isinstance(total, _SYMBOLIC):
    checks.integer(of_total, total, "an int >= 0 (tokens)", lambda x: x >= 0)
  expected = (f"int32 [B + 1] offsets that start at 0, never decrease, and end at most at "
              f"{of_total}={total}")
  checks.require(cu_seqlens is not None, argument, None, expected)
  offsets = checks.int32(argument, cu_seqlens, expected)
  checks.require(offsets.ndim == 1 and offsets.shape[0] >= 2, argument, checks.describe(offsets),
                 expected)
  if not isinstance(offsets, jax.core.Tracer):
    known = np.asarray(offsets)
    checks.require(known[0] == 0 and (np.diff(known) >= 0).all() and known[-1] <= total,
                   argument, known.tolist(), expected)
  offsets = jnp.asarray(offsets)
  token = jnp.arange(total, dtype=jnp.int32)
  segment = count_reached(offsets, token) - 1
  inside = token < offsets[-1]
  position = token - offsets[jnp.clip(segment, 0, offsets.shape[0] - 1)]
  return jnp.where(inside, segment, -1)[None], jnp.where(inside, position, 0)[None]
