# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with a cache against attention without one."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import CacheMetadata, MaskInfo, attention, concatenate, masks
from attn_core.caches import dense, window
from attn_core_test import sampling
from attn_core_test.caches_cases import B, D, E, EVEN, H, HEADS, K, S, equal, filled


def rotated(x, position):
  """Rotates the two halves of the width by the position; x [B, T, H, D], position [B, T]."""
  half = x.shape[-1] // 2
  angle = position[..., None, None] * 0.7 ** jnp.arange(half)
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle),
                          a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


LENGTH = 12


def model(seed=3, length=LENGTH, batch=B, heads=H, key_heads=K):
  rng = np.random.default_rng(seed)
  array = lambda n, width: jnp.asarray(rng.normal(size=(batch, length, n, width)), jnp.float32)
  return array(heads, D), array(key_heads, D), array(key_heads, E)


WINDOW = (3, 0)
# name -> (module, slots): a ring with the window's slots only, and one with room for new tokens.
CACHES = {"dense": (dense, LENGTH), "ring": (window, 4), "roomy_ring": (window, 9)}


class StepTest(parameterized.TestCase):
  """attention(..., cache_view=...) in several calls against one call without a cache."""

  @parameterized.product(cache=tuple(CACHES), mechanism=("autoregressive_decodeattn", "auto"))
  def test_any_schedule_equals_one_call(self, cache, mechanism):
    """Rows advance at different speeds, in chunks that wrap around the ring or exceed it."""
    module, slots = CACHES[cache]
    arrays = model()
    want = attention(*arrays, mechanism="vanilla", sliding_window=WINDOW, return_lse=True)
    schedule = np.array([[6, 1, 0], [1, 1, 6], [0, 6, 1], [5, 4, 5]])
    self.assertTrue((schedule.sum(0) == LENGTH).all())

    @jax.jit
    def step(query, key, value, cache, counts):
      return attention(query, key, value, mechanism=mechanism, mode="__autoregressive__",
                       cache_view=cache, cache_metadata=CacheMetadata(counts),
                       sliding_window=WINDOW, return_lse=True)

    cache = module.init(B, slots, HEADS, dtype=jnp.float32)
    done = np.zeros(B, int)
    for counts in schedule:
      index = np.minimum(done[:, None] + np.arange(6), LENGTH - 1)  # padding repeats a token
      part = [np.take_along_axis(np.asarray(x), index[:, :, None, None], 1) for x in arrays]
      output = step(*part, cache, counts)
      cache = output.cache_view
      for b, count in enumerate(counts):
        now = slice(done[b], done[b] + count)
        np.testing.assert_allclose(output.attention_outputs[b, :count],
                                   want.attention_outputs[b, now], atol=2e-6)
        np.testing.assert_allclose(output.lse[b, :, :count], want.lse[b, :, now], atol=2e-6)
        np.testing.assert_array_equal(output.attention_outputs[b, count:], 0)
        np.testing.assert_array_equal(output.lse[b, :, count:], -np.inf)
      done += counts
    np.testing.assert_array_equal(cache.lengths, LENGTH)
    self.assertFalse(cache.overflow.any())

  @parameterized.named_parameters(*[(k, k) for k in CACHES])
  def test_insert_then_decode(self, cache):
    """Requests take rows while others continue; each attends to itself alone."""
    module, slots = CACHES[cache]
    query, key, value = model(batch=4)
    lengths = np.array([7, 2])
    want = attention(query, key, value, sliding_window=WINDOW, mechanism="vanilla")
    cache = module.append(module.init(4, slots, HEADS, dtype=jnp.float32), key[:, :3], value[:, :3],
                          np.array([3, 3, 3, 0]))
    part = lambda x: x[jnp.array([3, 1]), :7]  # rows 3 and 1 are requests of 7 and 2 tokens
    run = jax.jit(functools.partial(attention, sliding_window=WINDOW), static_argnames="mode")
    prefill = run(*map(part, (query, key, value)), mode="__insert__", cache_view=cache,
                  cache_metadata=CacheMetadata(lengths, slots=np.array([3, 1])))
    for row, slot, count in ((0, 3, 7), (1, 1, 2)):
      np.testing.assert_allclose(prefill.attention_outputs[row, :count],
                                 want.attention_outputs[slot, :count], atol=2e-6)
    now = np.array([3, 2, 3, 7])
    np.testing.assert_array_equal(prefill.cache_view.lengths, now)
    pick = lambda x: np.take_along_axis(np.asarray(x), now[:, None, None, None], 1)
    decoded = run(*map(pick, (query, key, value)), mode="__autoregressive__",
                  cache_view=prefill.cache_view)
    np.testing.assert_allclose(decoded.attention_outputs, pick(want.attention_outputs), atol=2e-6)

  @parameterized.named_parameters(*[(k, k) for k in CACHES])
  def test_requests_without_a_row_of_their_own_are_nan_under_jit(self, cache):
    module, slots = CACHES[cache]
    part = [x[:2, :3] for x in model()]
    run = jax.jit(lambda rows: attention(
        *part, mode="__insert__", sliding_window=WINDOW, return_lse=True,
        cache_view=module.init(B, slots, HEADS, dtype=jnp.float32),
        cache_metadata=CacheMetadata(slots=rows)))
    for rows, wrong in (([2, 0], False), ([1, 1], True), ([0, B], True), ([-1, 2], True)):
      output = run(np.array(rows))
      np.testing.assert_array_equal(np.isnan(output.attention_outputs), wrong)
      np.testing.assert_array_equal(np.isnan(output.lse), wrong)

  def test_requests_that_are_inserted_take_masks_by_the_order_of_keys(self):
    """The rows of a window cache do so too, since new requests attend to themselves alone."""
    part = [x[:, :7] for x in model()]
    mask = np.random.default_rng(5).random((B, 1, 7, 7)) < 0.6
    lengths = np.array([7, 3, 5])
    run = lambda **arguments: attention(
        *part, mode="__insert__", sliding_window=WINDOW, return_lse=True,
        cache_view=window.init(B, 4, HEADS, dtype=jnp.float32),
        cache_metadata=CacheMetadata(slots=np.arange(B)), **arguments)
    for arguments in (dict(mask=mask), dict(mask_info=MaskInfo(mask)),
                      dict(mask=masks.lengths(None, lengths))):
      got = run(**arguments)
      want = attention(*part, mechanism="vanilla", sliding_window=WINDOW, return_lse=True,
                       **arguments)
      for name in ("attention_outputs", "lse"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=2e-6)

  def test_left_padding_and_a_cache_that_is_only_read(self):
    starts = np.array([0, 2, 5])
    query, key, value = model()
    mask = (np.arange(LENGTH) >= starts[:, None])[:, None, None]
    want = attention(query, key, value, mask=mask, mechanism="vanilla").attention_outputs
    with_nan = lambda x: jnp.where(mask[:, 0, 0, :, None, None], x, jnp.nan)
    first = attention(
        query[:, :9], with_nan(key)[:, :9], with_nan(value)[:, :9], mode="__prefill__",
        cache_view=dense.init(B, LENGTH, HEADS, dtype=jnp.float32),
        cache_metadata=CacheMetadata(starts=starts))
    rest = dense.append(first.cache_view, key[:, 9:], value[:, 9:])
    second = attention(query[:, 9:], None, None, mode="__autoregressive__", cache_view=rest)
    got = np.concatenate([first.attention_outputs, second.attention_outputs], 1)
    live_rows = np.broadcast_to(mask[:, 0, 0, :, None, None], got.shape)
    np.testing.assert_allclose(np.where(live_rows, got, 0), np.where(live_rows, want, 0), atol=2e-6)
    np.testing.assert_array_equal(got[~live_rows], 0)
    equal(second.cache_view, rest)

  def test_a_padding_mask_of_the_tokens_is_refused_and_names_the_starts(self):
    x = jnp.ones((1, 5, 2, 8))
    padding = MaskInfo.from_attention_mask(np.arange(5)[None] >= 2)
    with self.assertRaisesRegex(ValueError, r"got bool\[1, 1, 1, 5\].*CacheMetadata\(starts="):
      attention(x, x, x, mask_info=padding, cache_view=dense.init(1, 8, (2, 8), dtype="float32"))
    with self.assertRaisesRegex(ValueError, r"got bool\[1, 1, 1, 4\]") as caught:
      attention(x, x, x, mask_info=MaskInfo.from_attention_mask(np.ones((1, 4), bool)))
    self.assertNotIn("starts", str(caught.exception))

  @parameterized.parameters(4, 9)
  def test_left_padding_with_a_window(self, slots):
    starts = np.array([0, 2, 5])
    query, key, value = model()
    mask = (np.arange(LENGTH) >= starts[:, None])[:, None, None]
    want = attention(query, key, value, mask=mask, mechanism="vanilla",
                     sliding_window=WINDOW).attention_outputs
    with_nan = lambda x: jnp.where(mask[:, 0, 0, :, None, None], x, jnp.nan)
    got = attention(
        query, with_nan(key), with_nan(value), mode="__prefill__", sliding_window=WINDOW,
        cache_view=window.init(B, slots, HEADS, dtype=jnp.float32),
        cache_metadata=CacheMetadata(starts=starts)).attention_outputs
    np.testing.assert_allclose(got, np.where(mask[:, 0, 0, :, None, None], want, 0), atol=2e-6)

  @parameterized.parameters(*sampling.with_slow(
      [("dense", "chunk"), ("ring", "prefix")], ("dense", "prefix"), ("ring", "chunk"),
      ("roomy_ring", "chunk"), ("roomy_ring", "prefix")))
  def test_masks_count_positions_from_the_first_token_of_a_row(self, cache, mask):
    """The same tokens after any padding: a prefill, a token, and a cache that is only read."""
    module, slots = CACHES[cache]
    query, key, value = model()
    arguments = {"chunk": dict(chunk_size=5), "prefix": dict(
        causal=False, mask=masks.causal() | masks.prefix(np.array([3, 2, 4], np.int32)))}[mask]
    arguments["sliding_window"] = WINDOW
    want = attention(query, key, value, mechanism="vanilla", **arguments).attention_outputs
    starts, slots = np.array([0, 2, 5]), slots + 8
    pad = lambda x, n: jnp.pad(x, ((n, 5 - n), (0, 0), (0, 0)), constant_values=jnp.nan)
    padded = lambda x: jnp.stack([pad(row, n) for row, n in zip(x, starts)])
    run = jax.jit(functools.partial(attention, **arguments), static_argnames="mode")
    # 1. All tokens but the last two, then one more, of each row.
    lengths = starts + LENGTH - 2
    first = run(*(padded(x)[:, :LENGTH + 3] for x in (query, key, value)), mode="__prefill__",
                cache_view=module.init(B, slots, HEADS, dtype=jnp.float32),
                cache_metadata=CacheMetadata(lengths, starts))
    at = lambda t: (x[:, t:t + 1] for x in (query, key, value))
    second = run(*at(LENGTH - 2), mode="__autoregressive__", cache_view=first.cache_view)
    for b, n in enumerate(starts):
      np.testing.assert_allclose(first.attention_outputs[b, n:n + LENGTH - 2],
                                 want[b, :LENGTH - 2], atol=2e-6)
    np.testing.assert_allclose(second.attention_outputs[:, 0], want[:, -2], atol=2e-6)
    # 2. The same rows in other caches: what a ring has dropped still counts.
    held = second.cache_view
    dense_cache = window.to_dense(held, slots + 9) if module is window else held
    empty = module.init(B, slots, HEADS, dtype=jnp.float32)
    for other in (held, dense_cache, window.from_dense(dense_cache, slots),
                  module.insert(empty, np.arange(B), held)):
      last = run(*at(LENGTH - 1), mode="__autoregressive__", cache_view=other)
      np.testing.assert_allclose(last.attention_outputs[:, 0], want[:, -1], atol=2e-6)
    # 3. Requests that replace rows.
    inserted = run(*map(padded, (query, key, value)), mode="__insert__", cache_view=module.init(
        B, slots + 9, HEADS, dtype=jnp.float32), cache_metadata=CacheMetadata(
            starts + LENGTH, starts, np.arange(B)))
    for b, n in enumerate(starts):
      np.testing.assert_allclose(inserted.attention_outputs[b, n:n + LENGTH], want[b], atol=2e-6)
    # 4. Without new tokens.
    read = run(query[:, -1:], None, None, mode="__autoregressive__",
               cache_view=inserted.cache_view)
    np.testing.assert_allclose(read.attention_outputs[:, 0], want[:, -1], atol=2e-6)

  def test_a_cache_refuses_every_array_of_ids_and_positions(self):
    query, key, value = (x[:, :4] for x in model())
    for name in MaskInfo._fields[1:]:
      with self.assertRaisesRegex(ValueError, f"mask_info.{name}: got an array and a cache"):
        attention(query, key, value, mode="__prefill__", sliding_window=WINDOW,
                  cache_view=window.init(B, 9, HEADS, dtype=jnp.float32),
                  mask_info=MaskInfo(**{name: np.zeros((B, 4), np.int32)}))

  def test_a_window_cache_refuses_masks_by_the_order_of_keys(self):
    query, key, value = (x[:, :4] for x in model())
    cache = window.init(B, 9, HEADS, dtype=jnp.float32)
    def run(**arguments):
      jax.eval_shape(lambda: attention(query, key, value, mode="__prefill__", cache_view=cache,
                                       sliding_window=WINDOW, **arguments).attention_outputs)
    forms = lambda x: (dict(mask=x), dict(mask=masks.causal() & masks.dense(x)),
                       dict(mask=~masks.dense(x)), dict(mask_info=MaskInfo(attention_mask=x)))
    for arguments in (*forms(np.ones((B, 1, 1, 9), bool)), *forms(np.ones((1, 1, 4, 9), bool)),
                      dict(mask=masks.lengths(None, np.full(B, 3)))):
      with self.assertRaisesRegex(ValueError, "with a WindowCache; expected a mask by positions"):
        run(**arguments)
    for arguments in (*forms(np.ones((B, 1, 4, 1), bool)), dict(mask=masks.prefix(2)),
                      dict(mask=masks.lengths(np.full(B, 3)))):
      run(**arguments)

  def test_a_ring_of_another_size_is_refused(self):
    rings = [filled(window, slots, (6,)) for slots in (8, 4)]
    with self.assertRaisesRegex(ValueError, "prefilled: got a WindowCache of 4 slots.*from_dense"):
      window.insert(rings[0], np.array([0]), rings[1])

  def test_rotary_is_applied_before_the_write(self):
    """A token is rotated once, by its own position; the cache rotates nothing."""
    query, key, value = model()
    place = jnp.broadcast_to(jnp.arange(LENGTH), (B, LENGTH))
    want = attention(rotated(query, place), rotated(key, place), value,
                     mechanism="vanilla").attention_outputs
    cache, got = dense.init(B, LENGTH, HEADS, dtype=jnp.float32), []
    for now in (slice(0, 7), slice(7, 8), slice(8, 12)):
      at = cache.lengths[:, None] + jnp.arange(now.stop - now.start)
      output = attention(rotated(query[:, now], at), rotated(key[:, now], at), value[:, now],
                         mode="__autoregressive__", cache_view=cache)
      cache = output.cache_view
      got.append(output.attention_outputs)
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, atol=2e-6)

  def test_one_head_stays_causal(self):
    query, key, value = model(heads=1, key_heads=1)
    cache = dense.init(B, LENGTH, (1, D, E), dtype=jnp.float32)
    got = attention(query, key, value, mode="__prefill__", cache_view=cache)
    late = attention(query, key.at[:, 5:].add(3.0), value.at[:, 5:].add(3.0), mode="__prefill__",
                     cache_view=cache)
    np.testing.assert_array_equal(got.attention_outputs[:, :5], late.attention_outputs[:, :5])
    self.assertFalse(np.allclose(got.attention_outputs[:, 5:], late.attention_outputs[:, 5:]))

  def test_only_rows_that_overflow_under_jit_are_nan(self):
    query, key, value = (x[:, :2] for x in model())
    cache = filled(dense, S, [S - 1, 2, 0])
    output = jax.jit(lambda cache: attention(
        query, key, value, mode="__autoregressive__", cache_view=cache, return_lse=True))(cache)
    np.testing.assert_array_equal(output.cache_view.overflow, [True, False, False])
    np.testing.assert_array_equal(np.isnan(output.attention_outputs).all((1, 2, 3)),
                                  [True, False, False])
    np.testing.assert_array_equal(np.isnan(output.lse).any((1, 2)), [True, False, False])

  def test_layout_bhtd_and_a_mask_of_the_callers(self):
    query, key, value = model()
    mask = np.random.default_rng(5).random((B, 1, LENGTH, LENGTH)) < 0.6
    want = attention(query, key, value, mask=mask, mechanism="vanilla").attention_outputs
    cache = dense.init(B, LENGTH, HEADS, dtype=jnp.float32)
    swap = lambda x: x.transpose(0, 2, 1, 3)
    for arguments in (dict(mask=mask), dict(mask_info=MaskInfo(mask))):
      got = attention(*map(swap, (query, key, value)), layout="bhtd", mode="__prefill__",
                      cache_view=cache, **arguments).attention_outputs
      np.testing.assert_allclose(swap(got), want, atol=2e-6)


class ConcatenateTest(parameterized.TestCase):

  @parameterized.named_parameters(*[(f"{k}_{d}", k, d) for k in CACHES
                                    for d in ("float32", "int8", "int4")])
  def test_attention_over_its_arrays_is_the_same(self, cache, dtype):
    module, slots = CACHES[cache]
    query, key, value = (x[:, 5:8] for x in model())
    heads = HEADS if dtype != "int4" else EVEN
    cache, value = filled(module, slots, [5, 2, 0], dtype=dtype, heads=heads), value[..., :heads[2]]
    arguments = dict(mode="__autoregressive__", cache_view=cache, sliding_window=WINDOW,
                     cache_metadata=CacheMetadata(np.array([3, 0, 2])))
    want = attention(query, key, value, mechanism="autoregressive_decodeattn", **arguments)
    made = concatenate(query=query, key=key, value=value, **arguments)
    self.assertLen(made, 6)
    equal(made.cache_view, want.cache_view)
    self.assertEqual(made.attention_mask.shape, (B, H, 3, made.key.shape[1]))
    got = attention(query, made.key, made.value, mask=made.attention_mask, causal=False,
                    mechanism="vanilla")
    np.testing.assert_allclose(got.attention_outputs, want.attention_outputs, atol=3e-6)
    bias = made.init_attention_bias()
    np.testing.assert_array_equal(bias == 0, made.attention_mask)
    self.assertLess(np.where(made.attention_mask, -np.inf, bias).max(), -1e30)

  def test_without_a_cache_it_merges_masks(self):
    query, key, value = model()
    info = MaskInfo.from_attention_mask(np.arange(LENGTH) < np.array([[12], [7], [0]]))
    made = concatenate(query=query, key=key, value=value, mask_info=info, sliding_window=2)
    self.assertIsNone(made.cache_view)
    t, s = np.ogrid[:LENGTH, :LENGTH]
    for b, length in enumerate((12, 7, 0)):
      np.testing.assert_array_equal(
          made.attention_mask[b], np.broadcast_to((s <= t) & (s >= t - 2) & (s < length),
                                                  (H, LENGTH, LENGTH)))


if __name__ == "__main__":
  absltest.main()
