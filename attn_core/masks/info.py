"""MaskInfo: the arrays by which a model says what is visible, and their mask value.

Letters: B batch, H query heads, T query length, S key length.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.masks import leaves as algebra


class MaskInfo(NamedTuple):
  """Arrays that together hide keys from queries; None: nothing said. Never mutated."""

  attention_mask: Any = None  # bool [B or 1, H or 1, T or 1, S or 1]; True = visible
  q_segment_ids: Any = None  # int32 [B or 1, T]; negative = padding
  kv_segment_ids: Any = None  # int32 [B or 1, S]
  q_positions: Any = None  # int32 [B or 1, T], tokens
  kv_positions: Any = None  # int32 [B or 1, S], tokens

  @classmethod
  def from_segments(cls, q_segment_ids, kv_segment_ids=None, q_positions=None, kv_positions=None):
    """Packed documents: equal ids see each other, negative ones are padding.

    Args:
      q_segment_ids: int32 [B or 1, T].
      kv_segment_ids: int32 [B or 1, S]; None: those of the queries.
      q_positions: int32 [B or 1, T] (tokens); None: 0 to T - 1 over all documents.
      kv_positions: int32 [B or 1, S] (tokens); None: 0 to S - 1 over all documents.

    Raises:
      ValueError: no `q_segment_ids`; what they are is checked by `to_mask` and `attention`.
    """
    checks.require(q_segment_ids is not None, "q_segment_ids", None, "int32 [B or 1, T]")
    return cls(q_segment_ids=q_segment_ids,
               kv_segment_ids=q_segment_ids if kv_segment_ids is None else kv_segment_ids,
               q_positions=q_positions, kv_positions=kv_positions)

  @classmethod
  def from_attention_mask(cls, attention_mask):
    """From a boolean mask, or a padding mask of the keys.

    Args:
      attention_mask: bool [B or 1, H or 1, T or 1, S or 1], or bool or 0/1 integers [B, S] that
        say which keys are tokens and which padding. True or 1 = visible.

    Raises:
      ValueError: None, any other rank, a float mask (that is a bias), or integers other than 0 and
        1, where their values are known (those are segment ids).
    """
    checks.require(attention_mask is not None, "attention_mask", None, "bool or 0/1 integers")
    mask = jnp.asarray(attention_mask)
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
  def from_cu_seqlens(cls, cu_seqlens_q, total_q: int, cu_seqlens_k=None, total_k=None):
    """Packed sequences by their offsets: segment ids, and positions that restart in each.

    Args:
      cu_seqlens_q: int32 [B + 1], starting at 0, never falling, ending at `total_q` at most.
      total_q: number of packed query tokens (static); tokens past the last offset are padding.
      cu_seqlens_k: int32 [B + 1] of the keys; None: as the queries.
      total_k: number of packed key tokens; None: `total_q`.

    Returns:
      A MaskInfo whose arrays have a leading axis of 1.

    Raises:
      ValueError: offsets of another rank or dtype, or, where their values are known, that do not
        rise from 0 to the total at most; another number of offsets for keys than for queries;
        totals that are no int >= 1; or `total_k` without `cu_seqlens_k`.
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

  def to_mask(self, base: algebra.Mask = algebra.Full()) -> algebra.Mask:
    """`base` and everything these arrays say, as one mask value.

    Args:
      base: a mask that reads the positions, such as `causal() & window(127, 0)`.

    Raises:
      ValueError: `base` is no mask, segment ids of one side only, or arrays of a wrong rank or
        dtype.
    """
    checks.require(isinstance(base, algebra.Mask), "base", type(base).__name__,
                   "a mask, such as masks.causal()")
    mask = base
    if (self.q_segment_ids is None) != (self.kv_segment_ids is None):
      given, missing = (("q_segment_ids", "kv_segment_ids") if self.kv_segment_ids is None
                        else ("kv_segment_ids", "q_segment_ids"))
      raise ValueError(f"mask_info: {given} is given and {missing} is None; expected both or none "
                       "(MaskInfo.from_segments uses one array for both)")
    if self.q_segment_ids is not None:
      mask = mask & algebra.segments(self.q_segment_ids, self.kv_segment_ids)
    if self.attention_mask is not None:
      mask = mask & algebra.dense(self.attention_mask)
    if self.q_positions is not None or self.kv_positions is not None:
      mask = algebra.positions(self.q_positions, self.kv_positions, mask)
    return mask


def _packed(argument: str, cu_seqlens, of_total: str, total: int):
  """(segment ids, positions), int32 [1, total]; -1 and 0 past the last offset."""
  checks.integer(of_total, total, "an int >= 1 (tokens)", lambda x: x >= 1)
  expected = (f"int32 [B + 1] offsets that start at 0, never fall, and end at {of_total}={total} "
              "at most")
  checks.require(cu_seqlens is not None, argument, None, expected)
  offsets = jnp.asarray(cu_seqlens)
  checks.require(offsets.ndim == 1 and offsets.shape[0] >= 2
                 and jnp.issubdtype(offsets.dtype, jnp.integer), argument,
                 checks.describe(offsets), expected)
  if not isinstance(offsets, jax.core.Tracer):
    known = np.asarray(offsets)
    checks.require(known[0] == 0 and (np.diff(known) >= 0).all() and known[-1] <= total,
                   argument, known.tolist(), expected)
  offsets = offsets.astype(jnp.int32)
  token = jnp.arange(total, dtype=jnp.int32)
  segment = jnp.searchsorted(offsets, token, side="right").astype(jnp.int32) - 1
  inside = token < offsets[-1]
  position = token - offsets[jnp.clip(segment, 0, offsets.shape[0] - 1)]
  return jnp.where(inside, segment, -1)[None], jnp.where(inside, position, 0)[None]
