# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates of caches against plain Python lists: append, insert, convert."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from attn_core import (DenseCache, Heads, PagesV1, PagesV2, PagesV3, WindowCache, build_cache_pos,
                       create_mesh)
from attn_core.caches import dense, pages, tile_writes, window
from attn_core.caches import slots as slots_lib
from attn_core.caches.paged import device_pages
from attn_core_test.caches_cases import (
    B, D, E, EVEN, HEADS, K, KINDS, S, T, equal, filled, tokens)

jax.config.update("jax_num_cpu_devices", 8)


def live(view):
  """Returns {(row, position): (key, value)} of a view."""
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
    """Rows have different lengths; padding is not written; what does not fit changes nothing."""
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

  def test_outside_of_jit_updates_run_as_compiled_programs(self):
    x, page = jnp.ones((1, 2, 3, 5)), jnp.array([2, 3])
    pool = pages.init(PagesV2, 3, 2, Heads(3, 5, 5), jnp.float32)
    ring = window.init(1, 4, (3, 5), dtype=jnp.float32)
    cache = dense.init(1, 7, (3, 5), dtype=jnp.float32)
    def update() -> list:
      return [dense.append(cache, x, x), window.append(ring, x, x), window.from_dense(cache, 4),
              window.to_dense(ring, 9), dense.insert(cache, [0], cache),
              pages.append(pool, x[0], x[0], page), pages.copy_pages(pool, [0], [1])]
    first = update()
    traced = AssertionError("an update of the same shapes was traced again")
    with mock.patch.object(slots_lib, "write_slots", side_effect=traced), mock.patch.object(
        slots_lib, "read_slots", side_effect=traced), mock.patch.object(
            slots_lib, "write_rows", side_effect=traced), mock.patch.object(
                device_pages, "write", side_effect=traced):
      chex.assert_trees_all_equal(first, update())

  def test_a_full_row_refuses_and_is_not_shifted(self):
    cache = filled(dense, S, [S - 1, 2, 0])
    key, value = tokens(2)
    with self.assertRaisesRegex(ValueError, r"\[10, 2, 0\] and \[2, 2, 2\] \(see rows \[0\]\)"):
      dense.append(cache, key, value)
    after = jax.jit(dense.append)(cache, key, value)
    np.testing.assert_array_equal(after.overflow, [True, False, False])
    np.testing.assert_array_equal(after.lengths, [S - 1, 4, 2])
    equal((after.key[0], after.value[0]), (cache.key[0], cache.value[0]))
    one = jax.jit(dense.append)(after, key, value, jnp.array([1, 0, 0]))  # one token fits
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

  @parameterized.named_parameters(("float32", "float32"), ("int8", "int8"), ("int4", "int4"))
  def test_conversions(self, dtype):
    counts = [0, 3, S]
    heads = HEADS if dtype != "int4" else EVEN
    full, ring = (filled(m, n, counts, dtype=dtype, heads=heads) for m, n in KINDS.values())
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

  def test_conversions_keep_the_padding_before_a_row(self):
    starts, counts = jnp.array([1, 3, 8], jnp.int32), [4, 3, S]
    full, ring = (filled(m, n, counts)._replace(starts=starts) for m, n in KINDS.values())
    made, back = window.from_dense(full, 5), window.to_dense(ring, S)
    wanted = {(0, 1), (0, 2), (0, 3), (2, 8), (2, 9), (2, 10)}
    for found in map(live, (window.view(made), dense.view(back), dense.view(full))):
      self.assertEqual(found, live(window.view(ring)))
      self.assertEqual(set(found), wanted)
    for x, positions in ((made, window.view(made).positions), (back, dense.view(back).positions)):
      equal((x.starts, x.lengths), (starts, np.array(counts)))
      for empty in (x.key[positions < 0], x.value[positions < 0]):
        self.assertGreater(empty.size, 0)
        self.assertFalse(np.asarray(empty).any())  # nothing of other slots

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

  @parameterized.named_parameters(*[(f"{k}_{d}", k, d) for k in KINDS
                                    for d in ("float32", "int8", "int4")])
  def test_donated_caches_are_updated_in_place(self, kind, dtype):
    module, _ = KINDS[kind]
    heads = HEADS if dtype != "int4" else EVEN
    cache = module.init(2, 512, heads, dtype=dtype)
    arrays = (*(x[..., :n] for x, n in zip(tokens(1, 2), heads[1:])), jnp.array([1, 0]))
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


class TileWritesTest(parameterized.TestCase):

  @parameterized.parameters((1, 64), (8, 64), (33, 96))
  def test_whole_tiles_hold_what_a_scatter_writes(self, length, slots):
    """Rows begin anywhere, also before or after the part of one device; some tokens are dropped."""
    rng = np.random.default_rng(length)
    batch, first = 9, np.array([-3, 0, 1, 30, 31, 32, slots - length, slots - 1, 3 * slots])
    array = rng.integers(-128, 128, (batch, slots, 1, 256)).astype(np.int8)
    new = rng.integers(-128, 128, (batch, length, 1, 256)).astype(np.int8)
    place = first[:, None] + np.arange(length)
    count = rng.integers(0, length + 1, (batch, 1))
    for kept in (place >= 0, np.arange(length) < count, np.zeros((batch, length), bool)):
      places = np.where(kept & (place >= 0) & (place < slots), place, slots).astype(np.int32)
      want = array.copy()
      for row, token in np.argwhere(places < slots):
        want[row, places[row, token]] = new[row, token]
      equal(jax.jit(tile_writes.by_tiles)(array, new, places), want)
      equal(tile_writes.write(array, new, places), want)

  @parameterized.parameters((True, False), (False, True))
  def test_a_libtpu_that_copies_gets_whole_tiles(self, copies, scatters):
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((2, 64, 1, 256), jnp.int8), ((2, 1, 1, 256), jnp.int8), ((2, 1), jnp.int32))]
    with mock.patch.object(tile_writes, "_copies", lambda: copies):
      program = jax.jit(lambda *x: tile_writes.write(*x)).trace(*given)
      text = program.lower(lowering_platforms=("tpu",)).as_text()
    self.assertEqual("stablehlo.scatter" in text, scatters)

  def test_a_write_maps_and_has_a_derivative(self):
    array, new = jnp.ones((2, 3, 64, 1, 256), "float8_e4m3fn"), jnp.full((2, 3, 1, 1, 256), 2)
    places = jnp.array([[[0], [5], [64]]] * 2)
    new = new.astype(array.dtype)
    mapped = jax.vmap(tile_writes.write)(array, new, places)
    equal(mapped[1], tile_writes.scatter(array[1], new[1], places[1]))
    def found(write):
      return jax.jvp(lambda x: write(array[0], x, places[0]), (new[0],), (new[0],))
    equal(found(tile_writes.write), found(tile_writes.scatter))


class InitTest(absltest.TestCase):

  def test_bytes_of_a_token(self):
    """A key and a value of 128 numbers: with 4 bits 64 bytes and 4 scales of 4 bytes each."""
    for module in (dense, window):
      for dtype, size in (("bfloat16", 256), ("int8", 128 + 4), ("int4", 64 + 16)):
        cache = module.init(2, 10, (3, 128), dtype=dtype)
        found = sum(x.nbytes for x in jax.tree.leaves(cache) if x.ndim > 2)
        self.assertEqual(found, 2 * 10 * 3 * 2 * size)
    for layout, rows in ((PagesV1, 3), (PagesV2, 3), (PagesV3, 4)):  # V3 holds four heads in a word
      cache = pages.init(layout, 5, 4, Heads(3, 128, 128), "int4", "group")
      self.assertEqual(sum(x.nbytes for x in jax.tree.leaves(cache)),
                       5 * 4 * 2 * (64 * rows + 16 * 3))

  def test_bad_input(self):
    for call, message in (
        (lambda: dense.init(2, 8, (2, 8), dtype="small"),
         "dtype: got 'small'; expected a floating"),
        (lambda: dense.init(2, 8, 2), "heads: got 2"),
        (lambda: pages.init(PagesV2, 4, 4, (2, 8, 8, 8)),
         r"heads: got \(2, 8, 8, 8\); expected Heads"),
        (lambda: pages.init(PagesV2, 4, 4, Heads(2, 8, 8), "small"), "dtype: got 'small'")):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        call()


if __name__ == "__main__":
  absltest.main()
