"""A mask as a diagonal band and lengths, where it is one: what a kernel with no masks may know of.

Letters: B batch, T query length, S key length.
"""

from typing import Any, NamedTuple

from attn_core.masks import leaves as algebra, position_range as reach


class Band(NamedTuple):
  """Key s is visible to query t when t - left <= s, s <= t if causal, and both within lengths."""

  causal: bool
  left: int | None  # None: unbounded
  query_lengths: tuple[Any, ...]  # int32 [B or 1] each; all of them apply
  key_lengths: tuple[Any, ...]


def of(mask: algebra.Mask, queries: int, keys: int) -> Band | None:
  """The band that a mask is, for T = `queries` and S = `keys`; None: it is none.

  A bounded left side comes only with causality, without lengths and with T <= S: so no query within
  the lengths sees nothing, unless the lengths leave no key at all.
  """
  leaves = _conjuncts(mask)
  if not all(isinstance(leaf, (algebra.Full, algebra.Causal, algebra.Window, algebra.Lengths))
             for leaf in leaves):
    return None
  lengths = [leaf for leaf in leaves if isinstance(leaf, algebra.Lengths)]
  low, high = reach.reach(mask)
  left = None if -low >= queries - 1 else -low
  right = None if high >= keys - 1 else high
  if right not in (None, 0):
    return None
  if left is not None and (left < 0 or right is None or queries > keys or lengths):
    return None
  return Band(right == 0, left,
              tuple(x.query_lengths for x in lengths if x.query_lengths is not None),
              tuple(x.key_lengths for x in lengths if x.key_lengths is not None))


def _conjuncts(mask: algebra.Mask) -> list[algebra.Mask]:
  """The masks that `mask` is the conjunction of."""
  if isinstance(mask, algebra.And):
    return _conjuncts(mask.left) + _conjuncts(mask.right)
  return [mask]
