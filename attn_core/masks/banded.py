# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks that are a diagonal band with lengths, the only ones that some library kernels accept."""

from typing import NamedTuple

from attn_core.masks import leaves, mask as mask_lib, position_range


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
  left = None if -low >= queries - 1 else int(-low)
  right = None if high >= keys - 1 else high
  if right not in (None, 0):
    return None
  if left is not None and (left < 0 or right is None or queries > keys or lengths):
    return None
  return Band(right == 0, left,
              tuple(x.query_lengths for x in lengths if x.query_lengths is not None),
              tuple(x.key_lengths for x in lengths if x.key_lengths is not None))


def _conjuncts(mask: mask_lib.Mask) -> list[mask_lib.Mask]:
  """The masks whose conjunction `mask` is."""
  if isinstance(mask, mask_lib.And):
    return _conjuncts(mask.left) + _conjuncts(mask.right)
  return [mask]
