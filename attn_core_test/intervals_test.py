# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that a predicate shows or hides as a whole, against all of their pairs."""

import operator

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import attention, masks
from attn_core.arguments import mask_lookups
from attn_core.masks import block_map, materialize, position_range
from attn_core_test import mask_lookups as cases

LARGEST = 2**31 - 1
NUMBERS = (-LARGEST - 1, -LARGEST, -2**30, -5, -1, 0, 1, 2, 3, 7, 8, 16, 2**16, 2**30, LARGEST)
# A predicate, and the mask by names that shows the same; queries and keys are from 0 to 95.
NAMED = {
    "causal": (lambda b, h, q, k: q >= k, masks.causal()),
    "window": (lambda b, h, q, k: (q - k <= 20) & (k <= q), masks.causal() & masks.window(20, 0)),
    "both sides": (lambda b, h, q, k: abs(q - k) <= 9, masks.window(9, 9)),
    "below": (lambda b, h, q, k: abs(q - k) < 10, masks.window(9, 9)),
    "not far": (lambda b, h, q, k: ~(10 <= abs(k - q)), masks.window(9, 9)),
    "prefix": (lambda b, h, q, k: (k < 37) | (q >= k), masks.prefix(37) | masks.causal()),
    "where": (lambda b, h, q, k: jnp.where(k < 37, True, q >= k),
              masks.prefix(37) | masks.causal()),
    "shifts": (lambda b, h, q, k: (q >> 4) == (k >> 4), masks.chunk(16)),
    "not": (lambda b, h, q, k: jnp.logical_not(q < k) & (k != 200), masks.causal()),
    "offset": (lambda b, h, q, k: q + 16 > k, masks.window(None, 15)),
    "scaled": (lambda b, h, q, k: 2 * q >= 2 * k, masks.causal()),
    "all": (lambda b, h, q, k: (h >= 0) & (b >= 0), masks.full()),
    "none": (lambda b, h, q, k: h < 0, ~masks.full()),
    "clip": (lambda b, h, q, k: jnp.clip(k, 0, 95) <= jnp.maximum(q, 0), masks.causal())}


def _module(*arrays):
  return np if all(isinstance(x, (np.ndarray, np.generic)) for x in arrays) else jnp


def _least_one(x):
  return _module(x).maximum(x, np.int32(1))


def _toward_zero(x, y):
  if _module(x, y) is jnp:
    return jax.lax.div(*jnp.broadcast_arrays(x, y))
  return (x // y + ((x % y != 0) & (x < 0))).astype(np.int32)


# Operations of NumPy's arrays and of JAX's, which wrap around alike.
ALONE = (abs, operator.neg, operator.invert, lambda x: _module(x).sign(x), lambda x: x >> 3,
         lambda x: x.astype(np.int8).astype(np.int32), lambda x: x % 8, lambda x: x // 5,
         lambda x: x // -5, lambda x: x % -7, lambda x: x + 7, lambda x: x * 3, lambda x: x - 2**30,
         lambda x: (x > 3).astype(np.int32))
PAIRS = (operator.add, operator.sub, operator.mul, operator.and_, operator.or_,
         lambda x, y: _module(x, y).minimum(x, y), lambda x, y: _module(x, y).maximum(x, y),
         lambda x, y: x // _least_one(y), lambda x, y: x % _least_one(y),
         lambda x, y: _toward_zero(x, _least_one(y)),
         lambda x, y: x - _toward_zero(x, _least_one(y)) * _least_one(y))
COMPARE = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
JOIN = (operator.and_, operator.or_, operator.xor)


def _random_predicate(rng):
  """Returns a predicate made of a few operations."""
  pick = lambda options: options[int(rng.integers(len(options)))]
  below = lambda depth: int(rng.integers(depth))
  def number(depth):
    if depth == 0:
      constant = np.int32(pick(NUMBERS[3:12] if rng.random() < 0.8 else NUMBERS))
      return pick([lambda q, k: q, lambda q, k: k, lambda q, k: constant])
    x, y = number(depth - 1), number(below(depth))
    if rng.random() < 0.15:
      which = boolean(0)
      return lambda *at: _module(*at).where(which(*at), x(*at), y(*at))
    if rng.random() < 0.4:
      rule = pick(ALONE)
      return lambda *at: rule(x(*at))
    rule = pick(PAIRS)
    return lambda *at: rule(x(*at), y(*at))
  def boolean(depth):
    if depth == 0:
      rule, x, y = pick(COMPARE), number(below(3)), number(below(3))
    elif rng.random() < 0.25:
      x = boolean(depth - 1)
      return lambda *at: ~x(*at)
    else:
      rule, x, y = pick(JOIN), boolean(depth - 1), boolean(below(depth))
    return lambda *at: rule(x(*at), y(*at))
  return boolean(below(3))


def _random_band(rng):
  """Returns a predicate that mostly compares distances with constants."""
  pick = lambda options: options[int(rng.integers(len(options)))]
  def part():
    rule, factor, (first, other) = pick(COMPARE), pick((1, -1, 2, -3)), rng.integers(-20, 20, 2)
    change = pick((abs, operator.pos, operator.pos))
    sides = [lambda q, k: change(np.int32(factor) * (q - k) + np.int32(first)),
             lambda q, k: np.int32(other)][::pick((1, -1))]
    compared = lambda q, k: rule(*(x(q, k) for x in sides))
    return pick((compared,) * 8 + (lambda q, k: q % 3 == k % 3,))
  def joined(x, y, rule, inverts):
    return lambda q, k: ~rule(x(q, k), y(q, k)) if inverts else rule(x(q, k), y(q, k))
  found = part()
  for _ in range(int(rng.integers(4))):
    found = joined(found, part(), pick(JOIN), rng.random() < 0.2)
  return found


def _kinds(mask, sizes):
  """Returns `block_kinds` of a mask with arrays, compiled."""
  return np.asarray(jax.jit(lambda mask: block_map.block_kinds(mask, sizes))(mask))


class SoundTest(parameterized.TestCase):

  @parameterized.parameters(*range(4))
  def test_random_predicates(self, seed):
    """Says of no block that has a visible pair that it has none, nor the opposite."""
    rng, sizes, known = np.random.default_rng(seed), block_map.Sizes(16, 16, 4, 4), []
    for number in range(100):
      predicate = _random_predicate(rng)
      starts = rng.choice(np.array([-140, -70, -8, 0, 5, 64, LARGEST - 15, -LARGEST - 1]), 2)
      query, key = ((np.arange(16)[None] + x).astype(np.int32) for x in starts)
      mask = masks.positions(query, key, masks.custom(
          lambda batch, head, query, key: predicate(query, key)))
      with np.errstate(over="ignore"):  # of constants
        seen = np.broadcast_to(predicate(query.T, key), (16, 16)).reshape(4, 4, 4, 4)
        kinds = block_map.host_kinds(mask, sizes)[0, 0]
      self.assertFalse((seen.any((1, 3)) & (kinds == block_map.EMPTY)).any(), (seed, number))
      self.assertFalse((~seen.all((1, 3)) & (kinds == block_map.FULL)).any(), (seed, number))
      known.append((kinds != block_map.PARTIAL).mean())
      if number == 50:
        np.testing.assert_array_equal(_kinds(mask, sizes)[0, 0], kinds)
    self.assertGreater(np.mean(known), 0.2)  # and it knows something of many

  @parameterized.parameters(*range(3))
  def test_distances_of_random_predicates(self, seed):
    rng, bounded = np.random.default_rng(seed), 0
    query, key = np.arange(40, dtype=np.int32)[:, None], np.arange(40, dtype=np.int32)[None]
    for number in range(200):
      predicate = _random_band(rng)
      seen = np.broadcast_to(predicate(query, key), (40, 40))
      low, high = position_range.bounds(masks.custom(lambda b, h, q, k: predicate(q, k)))
      distances = (key - query)[seen]
      self.assertTrue(((low <= distances) & (distances <= high)).all(), (seed, number, low, high))
      bounded += low > -np.inf or high < np.inf
    self.assertGreater(bounded, 50)

  @parameterized.named_parameters((x, x) for x in cases.PREDICATES)
  def test_predicates_that_look_up(self, name):
    shape = cases.B, cases.H, cases.T, cases.T
    mask = masks.causal() & cases.PREDICATES[name].mask()
    seen = np.asarray(jax.jit(lambda mask: materialize.to_dense(mask, shape))(mask))
    seen = np.pad(seen, ((0, 0), (0, 0), (0, 2), (0, 2))).reshape(cases.B, cases.H, 9, 8, 9, 8)
    for x in (mask, mask_lookups.before(mask, shape)):
      kinds = _kinds(x, block_map.Sizes(cases.T, cases.T, 8, 8))
      self.assertFalse((seen.any((3, 5)) & (kinds == block_map.EMPTY)).any())
      whole = seen.all((3, 5)) | (np.arange(9) == 8)[:, None]  # queries of padding do not count
      self.assertFalse((~whole & (kinds == block_map.FULL)).any())


class PreciseTest(parameterized.TestCase):

  @parameterized.named_parameters((name, *NAMED[name]) for name in NAMED)
  def test_equals_masks_by_names(self, predicate, named):
    for sizes in (block_map.Sizes(96, 96, 16, 8), block_map.Sizes(90, 96, 32, 32)):
      np.testing.assert_array_equal(*(np.broadcast_to(
          block_map.block_kinds(x, sizes), (1, 1, sizes.num_query_blocks, sizes.num_key_blocks))
                                      for x in (masks.custom(predicate), named)))

  @parameterized.parameters(
      "causal", "window", "both sides", "below", "not far", "prefix", "not", "offset", "scaled",
      "all")
  def test_distances_are_those_of_masks_by_names(self, name):
    predicate, named = NAMED[name]
    self.assertEqual(*(position_range.bounds(x) for x in (masks.custom(predicate), named)))
    near = masks.custom(lambda b, h, q, k, ids: predicate(b, h, q, k) & (ids[b, q] == ids[b, k]),
                        np.zeros((1, 96), np.int32))
    self.assertEqual(position_range.bounds(mask_lookups.before(near, (1, 1, 96, 96))),
                     position_range.bounds(named))

  def test_documents_skip_what_segments_skip(self):
    ids = np.repeat(np.arange(6, dtype=np.int32), 32).reshape(2, 96)
    shape, sizes = (2, 3, 96, 96), block_map.Sizes(96, 96, 16, 16)
    documents = mask_lookups.before(masks.custom(
        lambda row, head, query, key, ids: ids[row, query] == ids[row, key], ids), shape)
    kinds = _kinds(documents, sizes)
    np.testing.assert_array_equal(kinds, _kinds(masks.segments(ids), sizes))
    self.assertEqual(set(np.unique(kinds)), {block_map.EMPTY, block_map.FULL})

  def test_windows_by_head_skip_what_none_sees(self):
    windows = masks.custom(lambda row, head, query, key, sizes: query - key <= sizes[head],
                           np.array([3, 20], np.int32))
    kinds = _kinds(mask_lookups.before(windows, (1, 2, 96, 96)), block_map.Sizes(96, 96, 16, 16))
    visited = kinds[0, 0] != block_map.EMPTY
    np.testing.assert_array_equal(visited, np.arange(6)[None] + 2 >= np.arange(6)[:, None])

  @parameterized.parameters(
      (lambda b, h, q, k: jnp.sin(q) > jnp.cos(k),), (lambda b, h, q, k: q / 2 > k,),
      (lambda b, h, q, k: jnp.asarray(cases.VALID)[0, k],))
  def test_other_operations_may_show_any_pair(self, predicate):
    sizes = block_map.Sizes(64, 64, 16, 16)
    kinds = block_map.block_kinds(masks.custom(predicate), sizes)
    self.assertEqual(set(np.unique(kinds)), {block_map.PARTIAL})
    # What is known of other parts of the predicate still counts.
    both = masks.custom(lambda b, h, q, k: (q >= k) & predicate(b, h, q, k))
    np.testing.assert_array_equal(block_map.block_kinds(both, sizes) == block_map.EMPTY,
                                  block_map.block_kinds(masks.causal(), sizes) == block_map.EMPTY)

  def test_chunks_by_division(self):
    """Visits what a chunk visits; only that the first chunk is seen whole, is not known."""
    sizes, chunk = block_map.Sizes(96, 96, 16, 16), masks.chunk(16)
    kinds = block_map.block_kinds(masks.custom(lambda b, h, q, k: q // 16 == k // 16), sizes)
    want = block_map.block_kinds(chunk, sizes).copy()
    want[0, 0, 0, 0] = block_map.PARTIAL
    np.testing.assert_array_equal(kinds, want)

  def test_64_bits_do_not_change_what_is_known(self):
    """Keeps a block map of one mode from being wrong in the other."""
    sizes = block_map.Sizes(16, 16, 4, 4)
    wraps = masks.custom(lambda b, h, q, k: q.astype(int) * 2**30 <= k.astype(int) * 2**30)
    with jax.enable_x64(True):
      self.assertEqual(set(np.unique(block_map.block_kinds(wraps, sizes))), {block_map.PARTIAL})
    self.assertEqual(set(np.unique(block_map.block_kinds(wraps, sizes))), {block_map.PARTIAL})

  def test_random_numbers(self):
    """Types that NumPy does not have, such as keys, have no intervals."""
    def kept(b, h, q, k):
      return jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), q * 64 + k)) & (q >= k)
    mask, sizes = masks.custom(jnp.vectorize(kept)), block_map.Sizes(64, 64, 16, 16)
    causal = block_map.block_kinds(masks.causal(), sizes)
    np.testing.assert_array_equal(block_map.block_kinds(mask, sizes), np.minimum(causal, 1))

  def test_predicates_of_several_pairs(self):
    """A predicate that takes no single pairs is evaluated in all blocks."""
    def several(b, h, q, k):
      assert q.ndim >= 2
      return q >= k
    kinds = block_map.block_kinds(masks.custom(several), block_map.Sizes(64, 64, 16, 16))
    self.assertEqual(set(np.unique(kinds)), {block_map.PARTIAL})

  def test_narrow_integers_wrap_around(self):
    mask = masks.custom(lambda b, h, q, k: q.astype(np.int8) >= 0)
    kinds = block_map.block_kinds(mask, block_map.Sizes(256, 8, 64, 8))[0, 0, :, 0]
    self.assertEqual(kinds.tolist(), 2 * [block_map.FULL] + 2 * [block_map.PARTIAL])

  def test_strict_modes(self):
    mask = masks.custom(lambda b, h, q, k: (q - k <= 20) & (k <= q))
    sizes = block_map.Sizes(96, 96, 16, 16)
    want = block_map.block_kinds(mask, sizes)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion(
        "strict"), jax.debug_nans(True):
      for xp_mask in (mask, masks.positions(np.arange(96, dtype=np.int32)[None], None, mask)):
        np.testing.assert_array_equal(_kinds(xp_mask, sizes)[0, 0], want[0, 0])

  def test_rows_that_see_a_key_are_known(self):
    """Is known of a predicate as of the mask that shows the same, which saves a pass."""
    for predicate, sees in ((lambda b, h, q, k: q >= k, True), (lambda b, h, q, k: q > k, False)):
      self.assertEqual(block_map.every_query_sees_a_key(masks.custom(predicate), 50, 50), sees)

  def test_attention_equals_that_of_the_name(self):
    """The bits of a result are those of the mask by name."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 200, 2, 16)), jnp.float32) for _ in range(3))
    run = lambda mask: jax.jit(lambda q, k, v: attention(
        q, k, v, causal=False, mask=mask, mechanism="blockwise").attention_outputs)(q, k, v)
    predicate, named = NAMED["window"]
    np.testing.assert_array_equal(run(masks.custom(predicate)), run(named))


if __name__ == "__main__":
  absltest.main()
