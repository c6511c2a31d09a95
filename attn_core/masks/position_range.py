"""How far from a query the keys are that it may see, whatever the mask's arrays hold."""

import math

import jax

from attn_core.masks import leaves as algebra

NARROW = 2048  # tokens


def is_narrow(mask: algebra.Mask) -> bool:
  """Whether a query sees only keys near it; documents are taken to be short."""
  low, high = reach(mask)
  return high - low <= NARROW


def reach(mask: algebra.Mask) -> tuple[float, float]:
  """The least and the greatest position of a visible key, less the query's; 0 within documents."""
  match mask:
    case algebra.Causal():
      return -math.inf, 0
    case algebra.Window(left, right):
      return -math.inf if left is None else -left, math.inf if right is None else right
    case algebra.Chunk(size):
      return -size, size
    case algebra.Segments():
      return 0, 0
    case algebra.Offset(inner) | algebra.Positions(mask=inner) | algebra.Placed(mask=inner):
      return reach(inner)
    case algebra.And(left, right):
      (low, high), (other_low, other_high) = reach(left), reach(right)
      return max(low, other_low), min(high, other_high)
    case algebra.Or(left, right):
      (low, high), (other_low, other_high) = reach(left), reach(right)
      return min(low, other_low), max(high, other_high)
  return -math.inf, math.inf


def known(mask: algebra.Mask) -> algebra.Mask:
  """A mask without arrays that shows all that `mask` may show, and nothing more that can be told.

  Args:
    mask: any; of its arrays only that they are there counts.
  """
  return _without_arrays(mask, True)


def _without_arrays(mask: algebra.Mask, shows_more: bool) -> algebra.Mask:
  """One that shows all that `mask` may show; or nothing but what it certainly shows."""
  if not jax.tree.leaves(mask):
    return mask
  match mask:
    case algebra.And(left, right) | algebra.Or(left, right):
      return type(mask)(*(_without_arrays(x, shows_more) for x in (left, right)))
    case algebra.Not(inner):
      return ~_without_arrays(inner, not shows_more)
    case algebra.Offset(inner, amount, None):
      return algebra.offset(_without_arrays(inner, shows_more), amount)
  return algebra.full() if shows_more else ~algebra.full()
