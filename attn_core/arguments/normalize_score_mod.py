# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Normalizes the score mod of a call to a term, which has done its look-ups."""

from jax.typing import DTypeLike

from attn_core import checks
from attn_core.masks.mask import Mask
from attn_core.score_mods import lookups, reads
from attn_core.score_mods.score_mod import ScoreMod


def term_of(mod: ScoreMod | None, shape: tuple[int, int, int, int]) -> ScoreMod | None:
  """Returns the term of a score mod for a call of shape (B, H, T, S).

  Raises:
    ValueError: it is not a score mod, or an array of it does not fit the call.
  """
  if mod is None:
    return None
  checks.require(isinstance(mod, ScoreMod), "score_mod", checks.describe(mod),
                 "a score mod of `score_mods`: a function is score_mods.custom(function), an array "
                 "is `bias`")
  return mod.lower(shape)


def after_look_ups(term: ScoreMod | None, mod: ScoreMod | None, dtype: DTypeLike, mask: Mask,
                   shape: tuple[int, int, int, int], is_placed: bool) -> ScoreMod | None:
  """Returns a term whose functions have done their look-ups, which are checked.

  Args:
    term: of the score mod; None: the call has none.
    mod: the score mod.
    dtype: that is computed with.
    mask: of the call.
    shape: (B, H, T, S).
    is_placed: whether the positions are those of the mask.

  Raises:
    ValueError: a function reads beyond its operands.
  """
  if term is None or mod is None:
    return None
  reads.check(mod, mask, shape)
  return lookups.before(term, shape, dtype, mask if is_placed else None)
