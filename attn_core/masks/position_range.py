# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Static bounds on key position minus query position implied by a mask."""

import math

import jax

from attn_core.masks import constructors, distances, leaves, looked_up, mask as mask_lib

NARROW = 2048  # tokens


def is_narrow(mask: mask_lib.Mask, most: int = NARROW) -> bool:
  """Whether all keys of a query are within `most` positions; documents are assumed short."""
  low, high = bounds(mask)
  return high - low <= most


def bounds(mask: mask_lib.Mask) -> tuple[float, float]:
  """Smallest and largest key position minus query position of a visible pair.

  Segments count as (0, 0): their lengths are not static, and documents are assumed short.
  """
  match mask:
    case leaves.Causal():
      return -math.inf, 0
    case leaves.Window(left, right):
      return -math.inf if left is None else -left, math.inf if right is None else right
    case leaves.Chunk(size):
      return -size, size
    case leaves.Segments():
      return 0, 0
    case leaves.Custom(predicate, ()):
      return distances.bounds(predicate, ())
    case looked_up.LookedUp(predicate):
      return distances.bounds(predicate, mask.numbers)
    case leaves.Offset(inner) | leaves.Positions(mask=inner) | leaves.Placed(mask=inner):
      return bounds(inner)
    case mask_lib.And(left, right):
      (low, high), (other_low, other_high) = bounds(left), bounds(right)
      return max(low, other_low), min(high, other_high)
    case mask_lib.Or(left, right):
      (low, high), (other_low, other_high) = bounds(left), bounds(right)
      return min(low, other_low), max(high, other_high)
  return -math.inf, math.inf


def static_superset(mask: mask_lib.Mask) -> mask_lib.Mask:
  """The smallest mask without arrays that shows all pairs that `mask` may show.

  Args:
    mask: any mask; the values of its arrays are not read.
  """
  return _without_arrays(mask, True)


def static_subset(mask: mask_lib.Mask) -> mask_lib.Mask:
  """The largest mask without arrays that shows only pairs that `mask` certainly shows.

  Args:
    mask: any mask; the values of its arrays are not read.
  """
  return _without_arrays(mask, False)


def _without_arrays(mask: mask_lib.Mask, superset: bool) -> mask_lib.Mask:
  """A mask that shows all that `mask` may show (superset), or only what it certainly shows."""
  if not jax.tree.leaves(mask):
    return mask
  match mask:
    case mask_lib.And(left, right) | mask_lib.Or(left, right):
      return type(mask)(*(_without_arrays(x, superset) for x in (left, right)))
    case mask_lib.Not(inner):
      return ~_without_arrays(inner, not superset)
    case leaves.Offset(inner, int(amount), None):
      return constructors.offset(_without_arrays(inner, superset), amount)
  return constructors.full() if superset else ~constructors.full()
