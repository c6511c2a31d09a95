# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks that are a diagonal band with lengths, the only ones that some library kernels accept."""

import math
from typing import NamedTuple

import jax

from attn_core.masks import leaves, mask as mask_lib, position_range
from attn_core.types import are_known


class Band(NamedTuple):
  """Key s is visible to query t where t - left <= s, s <= t if causal, and both within lengths."""

  causal: bool
  left: int | None  # None: unbounded
  query_lengths: tuple[mask_lib.Array, ...]  # int32 [B or 1] each; all of them apply
  key_lengths: tuple[mask_lib.Array, ...]


def from_mask(mask: mask_lib.Mask, queries: int, keys: int) -> Band | None:
  """The band equal to a mask.

  A bounded left side is returned only together with causality, without lengths and for T <= S.
  Queries within the lengths then attend to at least one key, unless the key length is 0.

  Args:
    mask: any mask.
    queries: T.
    keys: S.

  Returns:
    The band; None where the mask is not a band.
  """
  conjuncts = _conjuncts(mask)
  if not all(isinstance(leaf, (mask_lib.Full, leaves.Causal, leaves.Window, leaves.Lengths))
             for leaf in conjuncts):
    return None
  lengths = [leaf for leaf in conjuncts if isinstance(leaf, leaves.Lengths)]
  low, high = position_range.bounds(mask)
  left = None if _reaches(-low, queries) else int(-low)
  right = None if _reaches(high, keys) else high
  if right not in (None, 0):
    return None
  if left is not None and (left < 0 or right is None or lengths or not are_known(queries, keys)
                           or queries > keys):
    return None
  return Band(right == 0, left,
              tuple(x.query_lengths for x in lengths if x.query_lengths is not None),
              tuple(x.key_lengths for x in lengths if x.key_lengths is not None))


def from_structure(structure: jax.tree_util.PyTreeDef, queries: int, keys: int, *,
                   has_bias: bool) -> Band | None:
  """The band of a mask's structure for cuDNN, or None where it must be a boolean array.

  With a bias only a causal mask is passed by its parameters: the bias takes the memory in any case,
  and not every cuDNN takes both.

  Args:
    structure: that of the mask; the lengths of the band are the numbers of its leaves.
    queries: T.
    keys: S.
    has_bias: whether a bias is added to the logits.
  """
  form = from_mask(jax.tree.unflatten(structure, range(structure.num_leaves)), queries, keys)
  plain = form is None or (form.left is None and not form.query_lengths and not form.key_lengths)
  return form if plain or not has_bias else None


def _reaches(distance: float, length: int) -> bool:
  """Whether a distance reaches all of a length, which may be symbolic (tokens)."""
  return math.isinf(distance) if not are_known(length) else distance >= length - 1


def _conjuncts(mask: mask_lib.Mask) -> list[mask_lib.Mask]:
  """The masks whose conjunction `mask` is."""
  if isinstance(mask, mask_lib.And):
    return _conjuncts(mask.left) + _conjuncts(mask.right)
  return [mask]
