# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages, written, read and converted, against plain loops."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import Heads, PagesMetadata, PagesV1, PagesV2, PagesV3
from attn_core.caches import dense, pages, quantize, window
from attn_core.caches.paged import layouts, request_groups, token_writes, validate

LAYOUTS = (PagesV1, PagesV2, PagesV3)
HEADS = Heads(3, 5, 5)
# Rows are requests: 5 tokens of which 2 are new, no tokens, 8 tokens which are all new.
TABLES = np.array([[4, 1, 99], [-7, 99, 99], [0, 6, 99]], np.int32)
METADATA = PagesMetadata(TABLES, np.array([5, 0, 8], np.int32), np.array([0, 2, 2, 10], np.int32))
EIGHT = pages.init(PagesV2, 8, 4, HEADS, jnp.int8, "token")
PADDED = pages.init(PagesV3, 8, 4, HEADS, jnp.int8, "token")
SCALES = {"int8": "token", "int4": "group"}
SLOTS = [19, 4, 0, 1, 2, 3, 24, 25, 26, 27, -1]  # page * 4 + offset, by hand


def tokens(count=11, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(count, 3, 5)), dtype) for _ in range(2))


class PagesTest(parameterized.TestCase):

  def test_slots_are_those_by_hand(self):
    self.assertEqual(pages.slots(METADATA, 4, 11).tolist(), SLOTS)
    for field, number in (("num_requests", [2]), ("num_requests", 2), ("distribution", [0, 0, 2]),
                          ("distribution", [0, 1, 2]), ("distribution", [2, 2, 2])):
      used = METADATA._replace(**{field: np.array(number, np.int32)})
      self.assertEqual(pages.slots(used, 4, 11).tolist(), SLOTS[:2] + [-1] * 9)
    single = METADATA._replace(query_start_loc=None, context_lens=np.array([5, 1, 8], np.int32),
                               page_tables=np.abs(TABLES))
    self.assertEqual(pages.slots(single, 4, 3).tolist(), [4, 28, 27])

  def test_rows_that_are_not_used_have_no_queries(self):
    starts = lambda **fields: np.asarray(
        layouts.query_starts(METADATA._replace(**fields))).tolist()
    self.assertEqual(starts(), [0, 2, 2, 10])
    self.assertEqual(starts(query_start_loc=None), [0, 1, 2, 3])
    for used, wanted, single in ((0, [0] * 4, [0] * 4), (1, [0, 2, 2, 2], [0, 1, 1, 1]),
                                 (2, [0, 2, 2, 2], [0, 1, 2, 2]), (3, [0, 2, 2, 10], [0, 1, 2, 3])):
      for fields in ({"num_requests": np.int32(used)}, {"distribution": np.int32([0, 0, used])}):
        self.assertEqual(starts(**fields), wanted)
        self.assertEqual(starts(query_start_loc=None, **fields), single)

  def test_tokens_without_a_page_are_not_written(self):
    """Checks under jit, where a length beyond the table raises no error: 3 pages have 12 slots."""
    metadata = PagesMetadata(np.array([[4, 1, 6]], np.int32), np.array([14], np.int32),
                             np.array([0, 4], np.int32))
    slots = jax.jit(lambda metadata: pages.slots(metadata, 4, 4))(metadata)
    self.assertEqual(slots.tolist(), [26, 27, -1, -1])
    for absent in (-1, 2**30, 2**31 - 1, -2**30):  # four times 2**30 is 0 in int32
      table = np.array([[4, 1, absent]], np.int32)
      self.assertEqual(pages.slots(metadata._replace(page_tables=table), 4, 4).tolist(), [-1] * 4)
      empty = pages.init(PagesV2, 8, 4, HEADS, jnp.float32)
      written = pages.from_dense(empty, *(x[None] for x in tokens(12)),
                                 metadata._replace(page_tables=table))
      self.assertEqual(np.flatnonzero(written.pages.any((1, 2, 3))).tolist(), [1, 4])
    eight = pages.append(EIGHT, *tokens(4), jnp.array([26, 27, -1, -1]))
    for after, before in zip(jax.tree.leaves(eight), jax.tree.leaves(EIGHT), strict=True):
      changed = (after != before).reshape(32, -1).any(1)
      self.assertEqual(np.flatnonzero(changed).tolist(), [26, 27])

  @parameterized.product(layout=LAYOUTS, dtype=("float32", "int8", "int4"))
  def test_a_dense_cache_and_pages_hold_the_same(self, layout, dtype):
    """Checks conversion to pages and back bit by bit, of quantized caches and of rings too."""
    width = 4 if dtype == "int4" else 5
    heads = Heads(3, width, width)
    key, value = (x[None, :10, :, :width] for x in tokens())
    counts = np.array([8, 0, 5])
    filled = dense.append(dense.init(3, 12, (3, width), dtype=dtype),
                          *(jnp.broadcast_to(x, (3, *x.shape[1:])) for x in (key, value)), counts)
    scale = SCALES.get(dtype)
    metadata = METADATA._replace(context_lens=np.array([8, 0, 5], np.int32), page_tables=np.array(
        [[4, 1, 7], [9, 9, 9], [2, 3, 9]], np.int32))
    scales = None if scale is None else (filled.key_scale, filled.value_scale)
    numbers = quantize.unpack_columns if dtype == "int4" else lambda x: x
    held = pages.from_dense(pages.init(layout, 8, 4, heads, dtype, scale), numbers(filled.key),
                            numbers(filled.value), metadata, scales)
    view = window.view(window.from_dense(filled, 12)) if layout is PagesV2 else dense.view(filled)
    live = (np.arange(12) < counts[:, None])[..., None, None]
    for got, x, s in zip(pages.to_dense(held, metadata, heads), (view.key, view.value),
                         (view.key_scale, view.value_scale)):
      want = x if s is None else quantize.dequantize(x, s)
      np.testing.assert_array_equal(got, np.where(live, want, 0))

  @parameterized.product(layout=LAYOUTS, dtype=("float32", "bfloat16"))
  def test_tokens_are_where_the_layout_puts_them(self, layout, dtype):
    key, value = tokens(dtype=dtype)
    empty = pages.init(layout, 8, 4, HEADS, dtype)
    full = pages.append(empty, key, value, jnp.asarray(SLOTS))
    arrays = [np.asarray(x, np.float32) for x in full if x is not None]
    packing = {"float32": 1, "bfloat16": 2}[dtype]
    for token, slot in enumerate(SLOTS[:-1]):
      page, offset = slot // 4, slot % 4
      for head in range(3):
        if layout is PagesV1:
          found = arrays[0][head, page, offset], arrays[1][head, page, offset]
        elif layout is PagesV2:
          found = arrays[0][page, offset, 2 * head], arrays[0][page, offset, 2 * head + 1]
        else:
          self.assertEqual(arrays[0].shape, (8, 4, 6 // packing, packing, 128))
          found = [arrays[0][page, offset, row // packing, row % packing, :5]
                   for row in (2 * head, 2 * head + 1)]
        np.testing.assert_array_equal(found[0], np.asarray(key[token, head], np.float32))
        np.testing.assert_array_equal(found[1], np.asarray(value[token, head], np.float32))
    written = np.concatenate([key[:-1], value[:-1]]).astype(np.float32)
    np.testing.assert_allclose(sum(np.abs(x).sum() for x in arrays), np.abs(written).sum(),
                               rtol=1e-5)  # and other slots stay empty

  def test_all_layouts_hold_the_same(self):
    rng = np.random.default_rng(0)
    dense = [jnp.asarray(rng.normal(size=(3, 10, 3, 5)), jnp.float32) for _ in range(2)]
    live = (np.arange(10) < METADATA.context_lens[:, None])[..., None, None]
    for layout in LAYOUTS:
      full = pages.from_dense(pages.init(layout, 8, 4, HEADS, jnp.float32), *dense, METADATA)
      for other in LAYOUTS:
        converted = pages.convert(full, other, HEADS)
        self.assertIsInstance(converted, other)
        for x, y in zip(jax.tree.leaves(converted), jax.tree.leaves(pages.from_dense(
            pages.init(other, 8, 4, HEADS, jnp.float32), *dense, METADATA)), strict=True):
          np.testing.assert_array_equal(x, y)
      for x, y in zip(pages.to_dense(full, METADATA, HEADS), dense):
        self.assertEqual(x.shape, (3, 12, 3, 5))
        np.testing.assert_array_equal(x[:, :10], np.where(live, y, 0))
        self.assertFalse(np.asarray(x[:, 10:]).any())

  @parameterized.product(layout=LAYOUTS)
  def test_4_bits(self, layout):
    """Checks where numbers of 4 bits are, by hand, and that other slots stay empty."""
    rng = np.random.default_rng(0)
    wide, narrow = (jnp.asarray(rng.normal(size=(2, 3, n)), jnp.float32) for n in (40, 34))
    heads, slots = Heads(3, 40, 34), jnp.array([9, 2])
    cache = pages.append(pages.init(layout, 4, 4, heads, "int4", "group"), wide, narrow, slots)
    (key, of_key), (value, of_value) = (quantize.quantize(x, "int4") for x in (wide, narrow))
    self.assertEqual(pages.dtype_of(cache), np.uint8)
    for token, slot in enumerate((9, 2)):
      for head in range(3):
        at = slot // 4, slot % 4
        if layout is PagesV1:
          found = [[x[head, *at] & 15, x[head, *at] >> 4] for x in cache[:2]]
          found = [np.stack(halves, -1).ravel() for halves in found]
        else:
          row = (head,) if layout is PagesV2 else (head // 4, head % 4)
          both = cache.pages[*at, *row]
          found = [(both & 15)[:40], (both >> 4)[:34]]
        np.testing.assert_array_equal(found[0], key[token, head] & 15)
        np.testing.assert_array_equal(found[1], value[token, head] & 15)
        np.testing.assert_array_equal(cache.key_scales[*at, head], of_key[token, head])
        np.testing.assert_array_equal(cache.value_scales[*at, head], of_value[token, head])
    nonzero = lambda x: sum(int((np.asarray(x) >> shift & 15 != 0).sum()) for shift in (0, 4))
    stored = cache[:2] if layout is PagesV1 else cache[:1]
    self.assertEqual(sum(map(nonzero, stored)), int((key != 0).sum() + (value != 0).sum()))
    given = pages.append(pages.init(layout, 4, 4, heads, "int4", "group"), key, value, slots,
                         (of_key, of_value))
    for other in (given, pages.convert(pages.convert(cache, PagesV1, heads), layout, heads),
                  pages.convert(pages.convert(cache, PagesV3, heads), layout, heads)):
      jax.tree.map(np.testing.assert_array_equal, cache, other)
    # Padded pages say by their scales how wide they are at most.
    most = Heads(3, 64, 64) if layout is PagesV3 else heads
    jax.tree.map(np.testing.assert_array_equal, pages.convert(cache, PagesV2),
                 pages.convert(cache, PagesV2, most))
    one = PagesMetadata(np.array([[2, 0]], np.int32), np.array([8], np.int32))
    whole = pages.to_dense(cache, one)
    self.assertEqual([x.shape for x in whole], [(1, 8, 3, n) for n in most[1:]])
    if layout is PagesV3:
      for width in (32, 128):  # fewer groups of columns, and more
        places = Heads(3, width, width)
        both = pages.to_dense(cache, one, places)
        for x, y in zip(both, whole):
          np.testing.assert_array_equal(x[..., :64], y[..., :width])
          self.assertFalse(x[..., 64:].any())
        other = pages.convert(cache, PagesV1, places)
        validate.check(other, one, 1)
        jax.tree.map(np.testing.assert_array_equal, pages.to_dense(other, one), both)
    for found, x, scale in zip(pages.read(cache, jnp.array([2, 0]), heads, jnp.float32),
                               (wide, narrow), (of_key, of_value)):
      error = np.abs(np.asarray(found)[:, [1, 6]] - x.swapaxes(0, 1))
      largest = np.asarray(scale).swapaxes(0, 1).repeat(32, -1)[..., :x.shape[-1]]
      self.assertTrue((error <= 0.5001 * largest).all())

  @parameterized.product(layout=LAYOUTS, dtype=("int8", "float8_e4m3fn"),
                         scales=("tensor", "token"))
  def test_quantized(self, layout, dtype, scales):
    key, value = tokens(10)
    cache = pages.init(layout, 8, 4, HEADS, dtype, scales)
    most = 127 if dtype == "int8" else 448
    if scales == "tensor":
      size = [jnp.abs(x).max() / most for x in (key, value)]
      cache = cache._replace(key_scales=size[0], value_scales=size[1])
      cache = pages.append(cache, key, value, jnp.asarray(SLOTS[:10]))
    else:
      cache = pages.append(cache, key, value, jnp.asarray(SLOTS[:10]))
      stored, made = zip(*(quantize.quantize(x, dtype) for x in (key, value)))
      given = pages.append(pages.init(layout, 8, 4, HEADS, dtype, scales), *stored,
                           jnp.asarray(SLOTS[:10]), made)
      jax.tree.map(lambda x, y: np.testing.assert_array_equal(
          x.astype(jnp.float32), y.astype(jnp.float32)), cache, given)
      # The scales have no padding, which tells the heads of padded pages.
      self.assertEqual({x.shape[2] for x in pages.to_dense(cache, METADATA)}, {3})
    self.assertEqual(pages.dtype_of(cache), dtype)
    cache = pages.convert(pages.convert(cache, PagesV2, HEADS), layout, HEADS)
    for found, x in zip(pages.to_dense(cache, METADATA, HEADS), (key, value)):
      back = np.concatenate([found[0, 3:5], found[2, :8]])
      tolerance = np.abs(x).max() / most if dtype == "int8" else np.abs(x) / 16 + 1e-2
      self.assertTrue((np.abs(back - x) <= tolerance).all())
      self.assertGreater(np.abs(back - x).max(), 0)

  @parameterized.parameters(("int8", 127, 0), ("float8_e4m3fn", 448, np.nan))
  def test_one_scale_for_all_rounds_and_clips(self, dtype, most, of_nan):
    """Numbers beyond the range of the dtype become its largest, not its NaN or another sign."""
    x = np.float32([0, 1, 2.5, -3.5, most + 1, -most - 1, 1e30, -1e30, np.inf, -np.inf, np.nan])
    nearest = x[:4] if "float" in dtype else [0, 1, 2, -4]
    found = token_writes.store(jnp.asarray(x * 0.5), dtype, jnp.float32(0.5))
    np.testing.assert_array_equal(found.astype(jnp.float32),
                                  [*nearest, *[most, -most] * 3, of_nan])

  @parameterized.parameters(*LAYOUTS)
  def test_pages_outside_of_the_pool_and_unused_rows_are_empty(self, layout):
    held = [x[None].repeat(4, 0) for x in tokens(8)]
    for absent in (-1, -2**31, 8, 2**31 - 1):
      metadata = PagesMetadata(np.int32([[absent, 2], [3, absent], [0, 7], [4, 5]]),
                               np.int32([8, 8, 8, 8]), num_requests=np.int32(3))
      cache = pages.from_dense(pages.init(layout, 8, 4, HEADS, jnp.float32), *held, metadata)
      live = np.zeros((4, 8), bool)
      live[0, 4:] = live[1, :4] = live[2] = True
      for found, x in zip(pages.to_dense(cache, metadata, HEADS), held):
        np.testing.assert_array_equal(found, np.where(live[..., None, None], x, 0))
      unused = pages.read(cache, np.int32([1, 4, 5, 6]), HEADS, jnp.float32)
      self.assertFalse(any(x.any() for x in unused))

  @parameterized.parameters(*LAYOUTS)
  def test_append_is_in_place_and_scans(self, layout):
    cache = pages.init(layout, 512, 4, HEADS, jnp.float32)
    held = sum(x.nbytes for x in jax.tree.leaves(cache))
    key, value = tokens()

    def write(cache, key, value):
      def step(cache, mapping):
        return pages.append(cache, key, value, mapping), None
      return jax.lax.scan(step, cache, jnp.stack([jnp.asarray(SLOTS)] * 3))[0]
    compiled = jax.jit(write, donate_argnums=0).lower(cache, key, value).compile()
    memory = compiled.memory_analysis()
    self.assertIn("input_output_alias", compiled.as_text())
    self.assertEqual(memory.alias_size_in_bytes, held)
    self.assertLess(memory.temp_size_in_bytes, held // 4)  # no copy of the pool
    np.testing.assert_array_equal(
        jax.tree.leaves(write(cache, key, value))[0],
        jax.tree.leaves(pages.append(cache, key, value, jnp.asarray(SLOTS)))[0])

  def test_maps_over_pools(self):
    pools = jax.tree.map(lambda x: jnp.stack([x, x + 1]),
                         pages.init(PagesV2, 8, 4, HEADS, jnp.float32))
    key, value = tokens()
    mapped = jax.vmap(pages.append, in_axes=(0, None, None, None))(
        pools, key, value, jnp.asarray(SLOTS))
    for row in range(2):
      one = pages.append(jax.tree.map(lambda x, row=row: x[row], pools), key, value,
                         jnp.asarray(SLOTS))
      np.testing.assert_array_equal(mapped.pages[row], one.pages)

  @parameterized.parameters(*[(x, "float32") for x in LAYOUTS], (PagesV1, "int8"),
                            (PagesV2, "int8"), (PagesV2, "int4"))
  def test_copies_pages(self, layout, dtype):
    key, value = tokens()
    cache = pages.append(pages.init(layout, 8, 4, HEADS, dtype, SCALES.get(dtype)), key, value,
                         jnp.asarray(SLOTS))
    # 8 and -1 are outside; -1 does not mean the last page.
    copied = pages.copy_pages(cache, jnp.array([0, 6, 1]), jnp.array([5, 8, -1]))
    self.assertFalse(any(x.any() for x in pages.read(copied, jnp.array([7]), HEADS, jnp.float32)))
    moved = METADATA._replace(page_tables=np.where(TABLES == 0, 5, TABLES).astype(np.int32))
    for before, after in zip(pages.to_dense(cache, METADATA), pages.to_dense(copied, moved)):
      np.testing.assert_array_equal(before, after)

  def test_integers_of_any_dtype_never_wrap_around(self):
    """Checks that integers beyond int32 name no slot and no page, instead of wrapping around."""
    cache = pages.append(pages.init(PagesV2, 8, 4, HEADS, jnp.float32), *tokens(32, seed=1),
                         np.arange(32, dtype=np.int32))
    metadata = METADATA._replace(page_tables=np.maximum(TABLES, 0))
    key, value = tokens()
    for dtype in ("int8", "int16", "uint32"):
      given = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), metadata)
      self.assertEqual(pages.slots(given, 4, 11).tolist(), pages.slots(metadata, 4, 11).tolist())
    far = METADATA._replace(page_tables=TABLES.astype(np.int64) + 2**32, num_requests=3)
    for refused in (lambda: pages.slots(far, 4, 11), lambda: request_groups.stack(far)):
      with self.assertRaisesRegex(ValueError, "page_tables: got numbers from 42949.*int32"):
        refused()
    with jax.enable_x64(True):
      slots = jax.jit(lambda metadata: pages.slots(metadata, 4, 11))
      self.assertEqual(slots(far).tolist(), [-1] * 11)
      of_groups = jax.jit(lambda far: request_groups.slots(cache, request_groups.stack(far), 11))
      self.assertEqual(of_groups(far._replace(num_requests=np.int32(3))).tolist(), [-1] * 11)
      beyond = jnp.arange(11) + jnp.where(jnp.arange(11) % 2, 2**32, -2**32)
      np.testing.assert_array_equal(
          jax.jit(pages.append)(cache, key, value, beyond).pages, cache.pages)
      np.testing.assert_array_equal(
          jax.jit(pages.copy_pages)(cache, jnp.arange(11) % 8, beyond).pages, cache.pages)

  @parameterized.parameters(
      (lambda c, k, v: pages.append(c, k, v, jnp.arange(11) < 3), "mapping: got bool.11.*int32"),
      (lambda c, k, v: pages.append(c, k, v, jnp.arange(10)), r"mapping: got int32.10.*int32 .11"),
      (lambda c, k, v: pages.copy_pages(c, k[:1, 0, 0], jnp.arange(1)), "sources: got float32"),
      (lambda c, k, v: pages.copy_pages(c, jnp.arange(2), jnp.arange(1)), "targets: got int32.1"),
      (lambda c, k, v: pages.slots(METADATA._replace(context_lens=k[:3, 0, 0]), 4, 11),
       "metadata.context_lens: got float32"),
      (lambda c, k, v: pages.append(c, k[:, :2], v, jnp.arange(11)),
       r"key: got float32\[11, 2, 5\]"),
      (lambda c, k, v: pages.append(c, k, v.astype(jnp.bfloat16), jnp.arange(11)),
       "value: got bfloat16.*the dtype of the pages, float32"),
      (lambda c, k, v: pages.append(c, k, v[:4], jnp.arange(11)), r"value: got float32\[4, 3, 5\]"),
      (lambda c, k, v: pages.append(c, k, v, jnp.arange(11), (k, v)), "scales: got arrays"),
      (lambda c, k, v: pages.append(EIGHT, k.astype(jnp.int8), v.astype(jnp.int8), jnp.arange(11)),
       r"scales: got None with key int8\[11, 3, 5\]"),
      (lambda c, k, v: pages.append(EIGHT, k, v, jnp.arange(11), (k[..., 0], v[..., 0])),
       "scales: got arrays with key float32"),
      (lambda c, k, v: pages.append(EIGHT, k.astype(jnp.int8), v.astype(jnp.int8), jnp.arange(11),
                                    (k[..., 0], v[:, :2, 0])),
       r"scales: got float32\[11, 2\]; expected float32 \[11, 3\]"),
      (lambda c, k, v: pages.append(PADDED, k[:, :2], v[:, :2], jnp.arange(11)),
       r"key: got float32\[11, 2, 5\]; expected 3 heads, those of key_scales"),
      (lambda c, k, v: pages.from_dense(c, *[jnp.zeros((3, 13, 3, 5))] * 2, METADATA),
       r"key: got float32\[3, 13, 3, 5\].*S at most 12: 3 pages of 4"),
      (lambda c, k, v: pages.from_dense(c, *[jnp.zeros((2, 12, 3, 5))] * 2, METADATA), "R = 3"),
      (lambda c, k, v: pages.init(dict, 1, 1, HEADS), "layout: got <class 'dict'>"),
      (lambda c, k, v: pages.init(PagesV2, 0, 1, HEADS), "num_pages: got 0"),
      (lambda c, k, v: pages.init(PagesV2, 1, 1, HEADS, jnp.int8), "scales: got None"),
      (lambda c, k, v: pages.init(PagesV2, 1, 1, HEADS, jnp.uint8, "tensor"), "dtype: got uint8"),
      (lambda c, k, v: pages.init(PagesV2, 1, 1, HEADS, "int4", "token"),
       "scales: got 'token' with pages of int4; expected 'group'"),
      (lambda c, k, v: pages.init(PagesV2, 1, 1, HEADS, "int4"),
       "scales: got None with pages of int4; expected 'group'"),
      (lambda c, k, v: pages.init(PagesV2, 1, 1, HEADS, "float99"),
       "dtype: got 'float99'; expected 16 or 32 bits, int8, float8_e4m3fn or int4"),
      (lambda c, k, v: pages.convert(
          pages.init(PagesV2, 1, 1, Heads(1, 5, 4), "int4", "group"), PagesV1),
       "width: got 5; expected an even one"),
      (lambda c, k, v: pages.init(PagesV2, 1, 1, HEADS, "int8", "group"),
       "scales: got 'group' with pages of int8; expected .*'token' or 'tensor'"),
      (lambda c, k, v: pages.init(PagesV1, 1, 1, HEADS, "int4", "group"),
       "width: got 5; expected an even one"),
      (lambda c, k, v: pages.append(pages.init(PagesV3, 8, 4, Heads(3, 40, 40), "int4", "group"),
                                    k, v, jnp.arange(11)),
       r"key: got float32\[11, 3, 5\]; expected more than 32 columns and at most 64"),
      (lambda c, k, v: pages.init(PagesV3, 1, 1, HEADS, jnp.float64), "dtype: got float"),
      (lambda c, k, v: pages.init(PagesV2, 1, 1, HEADS, jnp.int8, "head"), "scales: got 'head'"))
  def test_bad_input(self, call, words):
    key, value = tokens()
    with self.assertRaisesRegex(ValueError, words):
      call(pages.init(PagesV2, 8, 4, HEADS, jnp.float32), key, value)


if __name__ == "__main__":
  absltest.main()
