# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Caches against plain Python models of them, and calls with a cache against calls without one.

Letters: B batch, T new tokens, S slots, W window, H query heads, K key heads, D and E widths.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from attn_core import (CacheMetadata, DenseCache, Heads, MaskInfo, PagesV2, WindowCache, attention,
                       build_cache_pos, concatenate, create_mesh, masks)
from attn_core.caches import dense, pages, quantize, window

jax.config.update("jax_num_cpu_devices", 8)

B, T, S, H, K, D, E = 3, 4, 11, 4, 2, 6, 5
HEADS = (K, D, E)
KINDS = {"dense": (dense, S), "ring": (window, 5)}


def tokens(count, batch=B, seed=0):
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return array(batch, count, K, D), array(batch, count, K, E)


def filled(module, slots, counts, *, dtype=jnp.float32, heads=HEADS):
  """A cache whose rows were given so many tokens, the same ones in every kind of cache."""
  key, value = (x[..., :w] for x, w in zip(tokens(max(counts), len(counts), 7), heads[1:]))
  cache = module.init(len(counts), slots, heads, dtype=dtype)
  return module.append(cache, key, value, np.array(counts))


def equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def live(view):
  """{(row, position): (key, value)} of a view."""
  return {(b, int(p)): (np.asarray(view.key[b, s]).tolist(), np.asarray(view.value[b, s]).tolist())
          for b, row in enumerate(np.asarray(view.positions)) for s, p in enumerate(row) if p >= 0}


class UpdateTest(parameterized.TestCase):

  def test_documented_fields(self):
    for kind, (module, slots) in KINDS.items():
      cache = filled(module, slots, (2, 0, 3))
      self.assertIsInstance(cache, {"dense": DenseCache, "ring": WindowCache}[kind])
      equal((cache.key.shape, cache.value.shape), ((B, slots, K, D), (B, slots, K, E)))
      equal((cache.indexs, cache.starts), (np.array([2, 0, 3]), np.zeros(B)))
      equal(build_cache_pos(np.ones((B, 1, 2, S), bool), "__prefill__", cache),
            np.array([[2, 3], [0, 1], [3, 4]]))

  @parameterized.named_parameters(("dense", "dense"), ("ring", "ring"))
  def test_random_appends_and_inserts_equal_lists(self, kind):
    """Rows at different lengths; padding is not written; what does not fit changes nothing."""
    module, slots = KINDS[kind]
    append, insert = jax.jit(module.append), jax.jit(module.insert)
    cache, rng = module.init(B, slots, HEADS, dtype=jnp.float32), np.random.default_rng(1)
    rows, overflow, overflows = [[] for _ in range(B)], np.zeros(B, bool), 0
    for step in range(30):
      key, value = tokens(T, seed=step)
      counts = rng.integers(0, T + 1, B).astype(np.int32)
      if step % 7 == 6:
        slot = int(rng.integers(B))
        request = module.append(module.init(1, slots, HEADS, dtype=jnp.float32), key[:1], value[:1],
                                counts[:1])
        cache = insert(cache, np.array([slot]), request)
        rows[slot] = [(key[0, t], value[0, t]) for t in range(counts[0])]
        overflow[slot] = False
      else:
        cache = append(cache, key, value, counts)
        for b in range(B):
          if kind == "dense" and len(rows[b]) + counts[b] > slots:
            overflow[b], overflows = True, overflows + 1
          else:
            rows[b] += [(key[b, t], value[b, t]) for t in range(counts[b])]
      want = {(b, p): (row[p][0].tolist(), row[p][1].tolist()) for b, row in enumerate(rows)
              for p in range(max(0, len(row) - slots), len(row))}
      self.assertEqual(live(module.view(cache)), want)
      np.testing.assert_array_equal(cache.lengths, [len(row) for row in rows])
      np.testing.assert_array_equal(cache.overflow, overflow)
    self.assertEqual(overflows > 0, kind == "dense")

  def test_a_full_row_refuses_and_is_not_shifted(self):
    cache = filled(dense, S, [S - 1, 2, 0])
    key, value = tokens(2)
    with self.assertRaisesRegex(ValueError, r"\[10, 2, 0\] and \[2, 2, 2\] \(see rows \[0\]\)"):
      dense.append(cache, key, value)
    after = jax.jit(dense.append)(cache, key, value)
    np.testing.assert_array_equal(after.overflow, [True, False, False])
    np.testing.assert_array_equal(after.lengths, [S - 1, 4, 2])
    equal((after.key[0], after.value[0]), (cache.key[0], cache.value[0]))
    one = jax.jit(dense.append)(after, key, value, jnp.array([1, 0, 0]))  # what fits is taken
    np.testing.assert_array_equal(one.key[0, S - 1], key[0, 0])
    np.testing.assert_array_equal(one.lengths, [S, 4, 2])

  def test_wrong_numbers_under_jit_are_flags(self):
    cache = filled(dense, S, [1, 2, 3])
    key, value = tokens(2)
    after = jax.jit(dense.append)(cache, key, value, jnp.array([-1, 3, 1]))
    np.testing.assert_array_equal(after.overflow, [True, True, False])
    np.testing.assert_array_equal(after.lengths, [1, 2, 4])
    for module in (dense, window):
      with jax.enable_x64(True):  # 2**32 + 1 is 1 in 32 bits
        far = jax.jit(module.append)(filled(module, S, [1, 2, 3]), key, value,
                                     jnp.array([2**32 + 1, 1, -2**32]))
      np.testing.assert_array_equal(far.overflow, [True, False, True])
      np.testing.assert_array_equal(far.lengths, [1, 3, 3])
    request = filled(dense, 2, [1, 2])
    insert = jax.jit(dense.insert)
    np.testing.assert_array_equal(insert(cache, jnp.array([1, 1]), request).overflow,
                                  [False, True, False])
    absent = insert(cache, jnp.array([0, B]), request)
    np.testing.assert_array_equal(absent.overflow, [True] * B)
    equal(absent.key[1:], cache.key[1:])

  @parameterized.named_parameters(("float32", "float32"), ("int8", "int8"))
  def test_conversions(self, dtype):
    counts = [0, 3, S]
    full, ring = (filled(m, n, counts, dtype=dtype) for m, n in KINDS.values())
    made = window.from_dense(full, 5)
    self.assertEqual(live(window.view(made)), live(window.view(ring)))
    back = window.to_dense(ring, S)
    self.assertEqual(live(dense.view(back)), live(window.view(ring)))
    np.testing.assert_array_equal(back.lengths, counts)
    np.testing.assert_array_equal(back.starts, [0, 0, S - 5])
    again = window.from_dense(back, 5)
    self.assertEqual(live(window.view(again)), live(window.view(ring)))
    wide = window.to_dense(window.from_dense(full, S + 2), S)  # nothing was forgotten
    equal((wide.key[2], wide.value[2], wide.starts), (full.key[2], full.value[2], full.starts))
    with self.assertRaisesRegex(ValueError, r"\[0, 3, 11\] \(see rows \[2\]\); expected at most 9"):
      window.to_dense(ring, 9)
    flagged = jax.jit(lambda cache: window.to_dense(cache, 9))(ring)
    np.testing.assert_array_equal(flagged.overflow, [False, False, True])

  def test_a_cache_of_the_other_kind_is_refused(self):
    full, ring, new = filled(dense, S, [1, 2, 3]), filled(window, S, [1, 2, 3]), tokens(1)
    for call in (lambda: dense.append(ring, *new), lambda: dense.view(ring),
                 lambda: dense.insert(ring, np.arange(B), filled(window, 4, [1, 2, 3])),
                 lambda: window.from_dense(ring, 4)):
      with self.assertRaisesRegex(ValueError, "cache: got WindowCache; expected a DenseCache"):
        call()
    for call in (lambda: window.append(full, *new), lambda: window.view(full),
                 lambda: window.insert(full, np.arange(B), full), lambda: window.to_dense(full, S)):
      with self.assertRaisesRegex(ValueError, "cache: got DenseCache; expected a WindowCache"):
        call()
    for call, words in (
        (lambda: dense.insert(full, np.arange(B), ring), "WindowCache; expected a DenseCache"),
        (lambda: window.insert(ring, np.arange(B), full), "DenseCache; expected a WindowCache"),
        (lambda: dense.insert(full, np.arange(B), None), "NoneType; expected a DenseCache")):
      with self.assertRaisesRegex(ValueError, f"prefilled: got {words}"):
        call()

  @parameterized.named_parameters(*[(f"{k}_{d}", k, d) for k in KINDS for d in ("float32", "int8")])
  def test_donated_caches_are_updated_in_place(self, kind, dtype):
    module, _ = KINDS[kind]
    cache = module.init(2, 512, HEADS, dtype=dtype)
    arrays = (*tokens(1, 2), jnp.array([1, 0]))
    compiled = jax.jit(lambda cache, *x: module.append(cache, *x), donate_argnums=0).lower(
        cache, *arrays).compile()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    self.assertEqual(memory.alias_size_in_bytes, size)
    self.assertLess(memory.temp_size_in_bytes, size / 8)
    text = compiled.as_text()
    self.assertIn("input_output_alias={", text)
    pointer = cache.key.unsafe_buffer_pointer()
    self.assertEqual(compiled(cache, *arrays).key.unsafe_buffer_pointer(), pointer)

  @parameterized.named_parameters(*[(k, k) for k in KINDS])
  def test_scan_vmap_and_shard_map(self, kind):
    module, slots = KINDS[kind]
    key, value = tokens(8, 8)
    counts = jnp.array([8, 3, 0, 1, 5, 8, 2, 7])
    empty = module.init(8, slots, HEADS, dtype=jnp.float32)
    want = live(module.view(module.append(empty, key, value, counts)))

    def token(cache, t):
      one = lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, 1)
      return module.append(cache, one(key), one(value), (t < counts).astype(jnp.int32)), None

    scanned, _ = jax.jit(lambda cache: jax.lax.scan(token, cache, jnp.arange(8)))(empty)
    self.assertEqual(live(module.view(scanned)), want)
    split = lambda x: x.reshape(2, 4, *x.shape[1:])
    mapped = jax.vmap(module.append)(jax.tree.map(split, empty), *map(split, (key, value, counts)))
    joined = jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), mapped)
    self.assertEqual(live(module.view(joined)), want)
    mesh = create_mesh((8, 1, 1, 1, 1))
    sharded = jax.jit(jax.shard_map(module.append, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(
        empty, key, value, counts)
    self.assertEqual(live(module.view(sharded)), want)


class InitTest(absltest.TestCase):

  def test_bad_input(self):
    for call, message in (
        (lambda: dense.init(2, 8, (2, 8), dtype="small"),
         "dtype: got 'small'; expected a floating"),
        (lambda: dense.init(2, 8, 2), "heads: got 2"),
        (lambda: pages.init(PagesV2, 4, 4, (2, 8, 8)), r"heads: got \(2, 8, 8\); expected Heads"),
        (lambda: pages.init(PagesV2, 4, 4, Heads(2, 8, 8), "small"), "dtype: got 'small'")):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        call()


class QuantizeTest(parameterized.TestCase):

  @parameterized.parameters(("int8", 0.5 / 127, 0), ("float8_e4m3fn", 2**-10 / 448, 2**-4))
  def test_error_is_that_of_rounding(self, dtype, of_largest, of_itself):
    x = np.random.default_rng(0).normal(size=(50, 3, 16)).astype(np.float32)
    x *= np.exp(np.random.default_rng(1).uniform(-30, 30, (50, 3, 1))).astype(np.float32)
    values, scales = quantize.quantize(jnp.asarray(x), dtype)
    self.assertEqual((values.dtype, values.shape, scales.shape), (dtype, x.shape, x.shape[:2]))
    back = quantize.dequantize(values, scales)
    largest = np.abs(x).max(-1, keepdims=True)
    self.assertTrue((np.abs(back - x) <= 1.001 * (largest * of_largest + np.abs(x) * of_itself))
                    .all())
    np.testing.assert_array_equal(quantize.quantize(back, dtype)[0], values)

  @parameterized.parameters("int8", "float8_e4m3fn")
  def test_zeros_tiny_and_not_finite(self, dtype):
    x = jnp.array([[0, 0, 0], [1e-39, 0, 0], [1, jnp.nan, 2], [1, jnp.inf, 2], [3e38, -3e38, 0]])
    back = np.asarray(quantize.dequantize(*quantize.quantize(x, dtype)))
    np.testing.assert_array_equal(back[0], 0)
    self.assertTrue(np.isfinite(back[1]).all())
    self.assertTrue(np.isnan(back[2:4]).all())
    np.testing.assert_allclose(back[4], x[4], rtol=1e-6)

  def test_bad_input(self):
    x, stored = jnp.ones((2, 3)), jnp.ones((2, 3), jnp.int8)
    for call, message in (
        (lambda: quantize.quantize(x, "int4"), "dtype: got 'int4'; expected one of 'int8'"),
        (lambda: quantize.quantize(x, "small"), "dtype: got 'small'"),
        (lambda: quantize.quantize(None, "int8"), "x: got NoneType"),
        (lambda: quantize.quantize(stored, "int8"), r"x: got int8\[2, 3\]; expected float"),
        (lambda: quantize.quantize(jnp.float32(1), "int8"), r"x: got float32\[\]"),
        (lambda: quantize.quantize(x[:, :0], "int8"), r"x: got float32\[2, 0\]"),
        (lambda: quantize.dequantize(None, x), "values: got NoneType"),
        (lambda: quantize.dequantize(stored, 1.0), "scales: got float"),
        (lambda: quantize.dequantize(stored, jnp.ones(3)),
         r"scales: got float32\[3\]; expected float32 \[2\]")):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        call()

  def test_all_numbers_of_8_bits(self):
    bits = jnp.arange(256, dtype=jnp.uint8)
    x = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    got = np.asarray(quantize.dequantize(x[:, None], jnp.ones(256)))[:, 0]
    want = np.asarray(x).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want) & ~np.isnan(want)
                                  | np.signbit(got) & np.isnan(want))

  def test_what_is_stored_in_8_bits_has_no_derivative_anywhere(self):
    """Refused by name, in both modes; behind stop_gradient the query has its own all the same."""
    key, value = tokens(2)
    query = jnp.ones((B, 2, K, D))
    flat = lambda x: x.reshape(-1, *x.shape[2:])[..., :5]
    slots, places = jnp.arange(2 * B), Heads(K, 5, 5)
    total = lambda cache: sum(x.sum() for x in jax.tree.leaves(cache) if x.dtype == jnp.float32)

    def stored(module, dtype):
      return lambda key: total(module.append(module.init(B, S, HEADS, dtype=dtype), key, value))

    def paged(kind):
      empty = pages.init(PagesV2, 4, 4, places, jnp.float8_e4m3fn, kind)
      return lambda key: pages.append(empty, flat(key), flat(value), slots).pages.astype(
          jnp.float32).sum()

    def attended(key, query=query):
      return jnp.sin(attention(query, key, value, mode="__prefill__", mechanism="auto",
                               cache_view=dense.init(B, S, HEADS, dtype="int8"),
                               sliding_window=3).attention_outputs).sum()

    for function in (stored(dense, "int8"), stored(window, "float8_e4m3fn"), paged("token"),
                     paged("tensor"), attended):
      for derive in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        with self.assertRaisesRegex(NotImplementedError, "gradients of quantized keys"):
          derive(function)(key)
    of_query = jax.grad(lambda x: attended(jax.lax.stop_gradient(x * key), x * query))(1.0)
    self.assertGreater(abs(of_query), 1e-3)
    cache = filled(dense, S, [3, 1, 2], dtype=jnp.int8)
    with self.assertRaisesRegex(NotImplementedError, "cache_view: gradients of quantized keys"):
      jax.grad(lambda scale: attention(
          query, None, None, mode="__autoregressive__", cache_view=cache._replace(key_scale=scale)
          ).attention_outputs.sum())(cache.key_scale)
    with self.assertRaisesRegex(NotImplementedError, "cache_view: gradients of quantized keys"):
      jax.grad(lambda scale: concatenate(
          query=query, key=key, value=value, mode="__prefill__",
          cache_view=cache._replace(key_scale=scale)).key.sum())(cache.key_scale)

  def test_other_dtypes_are_refused(self):
    for dtype in ("int4", "float16"):
      with self.assertRaisesRegex(ValueError, "dtype: got .*expected one of 'int8', 'float8_e4m3"):
        quantize.quantize(jnp.ones((2, 3)), dtype)
    with self.assertRaisesRegex(ValueError, "dtype: got int16; expected a floating-point dtype or"):
      dense.init(B, S, HEADS, dtype="int16")


def rotated(x, position):
  """Rotary: halves of the width turned by the position; x [B, T, H, D], position [B, T]."""
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
# name -> (module, slots): a ring without and with room for the new tokens beside the window.
CACHES = {"dense": (dense, LENGTH), "ring": (window, 4), "roomy_ring": (window, 9)}


class StepTest(parameterized.TestCase):
  """attention(..., cache_view=...): tokens by and by give what they give at once."""

  @parameterized.product(cache=tuple(CACHES), mechanism=("autoregressive_decodeattn", "auto"))
  def test_any_schedule_gives_the_whole(self, cache, mechanism):
    """Rows at their own speed; chunks across the ring's edge and longer than the ring."""
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
      index = np.minimum(done[:, None] + np.arange(6), LENGTH - 1)  # what is no token repeats one
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
    """Requests take rows while another one goes on; each attends to itself."""
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

  def test_left_padding_and_a_cache_that_is_only_read(self):
    starts = np.array([0, 2, 5])
    query, key, value = model()
    mask = (np.arange(LENGTH) >= starts[:, None])[:, None, None]
    want = attention(query, key, value, mask=mask, mechanism="vanilla").attention_outputs
    spoil = lambda x: jnp.where(mask[:, 0, 0, :, None, None], x, jnp.nan)
    first = attention(
        query[:, :9], spoil(key)[:, :9], spoil(value)[:, :9], mode="__prefill__",
        cache_view=dense.init(B, LENGTH, HEADS, dtype=jnp.float32),
        cache_metadata=CacheMetadata(starts=starts))
    rest = dense.append(first.cache_view, key[:, 9:], value[:, 9:])
    second = attention(query[:, 9:], None, None, mode="__autoregressive__", cache_view=rest)
    got = np.concatenate([first.attention_outputs, second.attention_outputs], 1)
    live_rows = np.broadcast_to(mask[:, 0, 0, :, None, None], got.shape)
    np.testing.assert_allclose(np.where(live_rows, got, 0), np.where(live_rows, want, 0), atol=2e-6)
    np.testing.assert_array_equal(got[~live_rows], 0)
    equal(second.cache_view, rest)

  @parameterized.parameters(4, 9)
  def test_left_padding_with_a_window(self, slots):
    starts = np.array([0, 2, 5])
    query, key, value = model()
    mask = (np.arange(LENGTH) >= starts[:, None])[:, None, None]
    want = attention(query, key, value, mask=mask, mechanism="vanilla",
                     sliding_window=WINDOW).attention_outputs
    spoil = lambda x: jnp.where(mask[:, 0, 0, :, None, None], x, jnp.nan)
    got = attention(
        query, spoil(key), spoil(value), mode="__prefill__", sliding_window=WINDOW,
        cache_view=window.init(B, slots, HEADS, dtype=jnp.float32),
        cache_metadata=CacheMetadata(starts=starts)).attention_outputs
    np.testing.assert_allclose(got, np.where(mask[:, 0, 0, :, None, None], want, 0), atol=2e-6)

  def test_a_window_cache_refuses_masks_by_the_order_of_keys(self):
    query, key, value = (x[:, :4] for x in model())
    cache = window.init(B, 9, HEADS, dtype=jnp.float32)
    run = functools.partial(attention, query, key, value, mode="__prefill__", cache_view=cache,
                            sliding_window=WINDOW)
    dense_mask = np.ones((B, 1, 1, 9), bool)
    for arguments in (dict(mask=dense_mask), dict(mask=masks.causal() & masks.dense(dense_mask)),
                      dict(mask=masks.lengths(None, np.full(B, 3))),
                      dict(mask_info=MaskInfo(attention_mask=dense_mask))):
      with self.assertRaisesRegex(ValueError, "with a WindowCache; expected a mask by positions"):
        run(**arguments)
    run(mask=masks.prefix(2))

  def test_a_ring_of_another_size_is_refused(self):
    rings = [filled(window, slots, (6,)) for slots in (8, 4)]
    with self.assertRaisesRegex(ValueError, "prefilled: got a WindowCache of 4 slots.*from_dense"):
      window.insert(rings[0], np.array([0]), rings[1])

  def test_rotary_is_applied_before_the_write(self):
    """A token is turned once, by its own position; the cache never turns anything."""
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

  def test_a_row_that_overflows_under_jit_is_nan_and_no_other(self):
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
                                    for d in ("float32", "int8")])
  def test_its_pieces_attend_to_the_same(self, cache, dtype):
    module, slots = CACHES[cache]
    query, key, value = (x[:, 5:8] for x in model())
    cache = filled(module, slots, [5, 2, 0], dtype=dtype)
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
