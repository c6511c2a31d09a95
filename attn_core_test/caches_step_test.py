# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of a cache show each query the tokens of its window, for every size: against lists."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import CacheMetadata, attention
from attn_core.caches import dense, update, window
from attn_core_test.caches_cases import HEADS, tokens

LEFT, TOKENS, ROWS = 2, 3, 3
# Valid tokens of each row, step by step: rows advance at different speeds, around the ring.
SCHEDULE = np.array([[3, 1, 0], [1, 3, 2], [0, 2, 3], [3, 3, 1], [2, 0, 3], [2, 3, 3]], np.int32)
SIZES = tuple(range(LEFT + 1, LEFT + TOKENS + 2))  # of a ring
MODE = "__autoregressive__"


def numbered(begin, count):
  """Returns keys [ROWS, count, 1, 1] that name their row and position, and values, from `begin`."""
  names = 100 * np.arange(ROWS)[:, None] + np.asarray(begin)[:, None] + np.arange(count)
  key = names[..., None, None].astype(np.float32)
  return key, -key


@functools.partial(jax.jit, static_argnums=0)
def step(reach, key, value, cache, metadata):
  """Appends one step to a cache."""
  return update.update_cache((key, value), cache, metadata, MODE, reach)


class EverySizeTest(parameterized.TestCase):
  """A query sees each token of its window once, and no other."""

  def check(self, found, ends, queries, starts=(0,) * ROWS):
    """Checks a step whose last queries are the tokens before `ends`."""
    key, value, info = jax.device_get((found.key, found.value, found.mask_info))
    for b, t in np.ndindex(info.q_positions.shape):
      first = max(starts[b], 0)  # the masks' position 0
      position, valid = int(info.q_positions[b, t]) + first, info.q_segment_ids[b, t] >= 0
      self.assertEqual(valid, t < queries[b] and first <= position < ends[b], (b, t))
      if valid:
        place = info.kv_positions[b] + first
        seen = (info.kv_segment_ids[b] >= 0) & (place <= position) & (place >= position - LEFT)
        want = 100 * b + np.arange(max(first, position - LEFT), position + 1)
        np.testing.assert_array_equal(np.sort(key[b, seen, 0, 0]), want)
        np.testing.assert_array_equal(np.sort(-value[b, seen, 0, 0]), want)

  def filled(self, cache, check):
    """Appends the schedule; calls check(found, ends, counts) after every step."""
    done = np.zeros(ROWS, int)
    for counts in SCHEDULE:
      found = step(LEFT, *numbered(done, TOKENS), cache, CacheMetadata(counts))
      np.testing.assert_array_equal(found.mask_info.q_positions,
                                    done[:, None] + np.arange(TOKENS))
      done += counts
      check(found, done, counts)
      cache = found.cache
    np.testing.assert_array_equal(cache.lengths, done)
    return cache

  @parameterized.parameters(*SIZES)
  def test_a_ring(self, slots):
    def check(found, ends, counts):
      # With room for the new tokens the ring is read in place; else they are appended to a copy.
      self.assertEqual(found.key.shape[1], slots if slots >= LEFT + TOKENS else slots + TOKENS)
      self.check(found, ends, counts)
    cache = self.filled(window.init(ROWS, slots, (1, 1), dtype="float32"), check)
    lengths = np.asarray(cache.lengths)
    for count in {1, slots - LEFT}:  # without new tokens: the last ones of each row
      found = update.update_cache(count, cache, None, MODE, LEFT)
      np.testing.assert_array_equal(found.mask_info.q_positions[:, -1], lengths - 1)
      self.check(found, lengths, [count] * ROWS)
      self.assertIs(found.key, cache.key)
    with self.assertRaisesRegex(ValueError, f"query: got {slots - LEFT + 1} tokens.*{slots} slots"):
      update.update_cache(slots - LEFT + 1, cache, None, MODE, LEFT)

  def test_a_window_that_the_ring_does_not_hold_is_refused(self):
    for slots in SIZES:
      cache = window.init(ROWS, slots, (1, 1), dtype="float32")
      for tried in (1, numbered([0] * ROWS, TOKENS)):
        with self.assertRaisesRegex(ValueError, f"sliding_window: got {slots} to the left.*at most "
                                    f"{slots - 1} tokens"):
          update.update_cache(tried, cache, None, MODE, slots)

  def test_a_dense_cache(self):
    cache = self.filled(dense.init(ROWS, 12, (1, 1), dtype="float32"), self.check)
    for count in (TOKENS, 12):
      found = update.update_cache(count, cache, None, MODE, None)
      self.check(found, np.asarray(cache.lengths), [count] * ROWS)

  @parameterized.parameters((dense, 12), (window, LEFT + 1), (window, LEFT + TOKENS))
  def test_starts_outside_of_the_row(self, module, slots):
    """Negative starts mean 0; from the length on, a row is padding."""
    cache, done = module.init(ROWS, slots, (1, 1), dtype="float32"), np.zeros(ROWS, int)
    starts = np.array([-5, -2**31, 5], np.int32)
    for counts in ([1, 2, 3], [3, 2, 3]):
      metadata = CacheMetadata(np.array(counts, np.int32), starts)
      found = step(LEFT, *numbered(done, TOKENS), cache, metadata)
      done += counts
      self.check(found, done, counts, starts)
      cache = found.cache
      zero = cache._replace(starts=jnp.maximum(cache.starts, 0))
      np.testing.assert_array_equal(module.view(cache).positions, module.view(zero).positions)
      if slots > LEFT + 1:
        read = update.update_cache(3, cache, CacheMetadata(starts=starts), MODE, LEFT)
        self.check(read, done, [3] * ROWS, starts)  # one row has fewer tokens than queries at first


class ChunkSizeTest(parameterized.TestCase):
  """A ring needs as many slots as a chunk, or a narrower window, keeps in sight."""

  @parameterized.parameters(
      (4, None, 4), (4, (2, 0), 3), (3, (9, 0), 3), (4, (-1, 0), 4), (1, None, 1), (6, 2, 3),
      (None, (0, 5), 1))
  def test_the_smallest_ring(self, size, sides, slots):
    key, value = tokens(3, 2)
    run = lambda cache: attention(
        jnp.concatenate([key, -key], 2), key, value, mechanism="vanilla", chunk_size=size,
        sliding_window=sides, mode=MODE, cache_view=cache)
    ring = functools.partial(window.init, 2, heads=HEADS, dtype="float32")
    jax.eval_shape(run, ring(slots))
    if slots > 1:
      with self.assertRaisesRegex(ValueError, f"got {slots - 1} to the left.*keeps {slots - 1}"):
        jax.eval_shape(run, ring(slots - 1))

  def test_decoding_with_it_equals_one_call(self):
    key, value = tokens(9, 2)
    query = jnp.concatenate([key, -key], 2)
    run = functools.partial(attention, mechanism="vanilla", chunk_size=4)
    want = run(query, key, value).attention_outputs
    cache, got = window.init(2, 4, HEADS, dtype="float32"), []
    decode = jax.jit(lambda cache, *x: run(*x, mode=MODE, cache_view=cache))
    for first in range(0, 9, 3):
      output = decode(cache, *(x[:, first:first + 3] for x in (query, key, value)))
      cache = output.cache_view
      got.append(output.attention_outputs)
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, atol=2e-6)


if __name__ == "__main__":
  absltest.main()
