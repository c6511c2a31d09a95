# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes of pages next to those of other caches, whose layouts are loops over numbers here.

JAX: `paged_attention` and `ragged_paged_attention` of `jax.experimental.pallas.ops.tpu`.
tpu-inference: `ragged_paged_attention` v3, and its variant for a head width of 64.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import Heads, PagesMetadata, PagesV1, PagesV2, PagesV3
from attn_core.caches import exchange, pages

NUM_PAGES, PAGE_SIZE = 3, 4
SLOTS = [9, 0, 3, 8, 5]  # of the tokens
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def rounded_up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple


def tokens(key_heads: int, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns keys and values [num_tokens, K, D], no number of which is 0."""
  rng = np.random.default_rng(key_heads * width)
  return tuple(np.asarray(jnp.asarray(rng.integers(1, 100, (len(SLOTS), key_heads, width)), dtype))
               for _ in range(2))


def paged(layout: type, key: np.ndarray, value: np.ndarray):
  """Returns pages of this library with the tokens in their slots."""
  one_byte = key.dtype.itemsize == 1
  cache = pages.init(layout, NUM_PAGES, PAGE_SIZE, Heads(key.shape[1], key.shape[2], key.shape[2]),
                     key.dtype, "tensor" if one_byte else None)
  return pages.append(cache, jnp.asarray(key), jnp.asarray(value), np.array(SLOTS, np.int32))


def jax_ragged(key: np.ndarray, value: np.ndarray) -> np.ndarray:
  """[pages, page size, 2K, D]: the key and the value of a head in rows that follow each other."""
  found = np.zeros((NUM_PAGES, PAGE_SIZE, 2 * key.shape[1], key.shape[2]), key.dtype)
  for token, slot in enumerate(SLOTS):
    for head in range(key.shape[1]):
      for row, x in enumerate((key, value)):
        found[slot // PAGE_SIZE, slot % PAGE_SIZE, 2 * head + row] = x[token, head]
  return found


def tpu_inference(key: np.ndarray, value: np.ndarray) -> np.ndarray:
  """[pages, page size, words, rows of a word, width]; rows as in JAX's, the width whole lanes."""
  packing, (_, heads, width) = 4 // key.dtype.itemsize, key.shape
  found = np.zeros((NUM_PAGES, PAGE_SIZE, rounded_up(2 * heads, packing) // packing, packing,
                    rounded_up(width, 128)), key.dtype)
  for token, slot in enumerate(SLOTS):
    for row in range(2 * heads):
      x = (key, value)[row % 2][token, row // 2]
      found[slot // PAGE_SIZE, slot % PAGE_SIZE, row // packing, row % packing, :width] = x
  return found


def tpu_inference_64(key: np.ndarray, value: np.ndarray) -> np.ndarray:
  """[pages, page size, words, rows of a word, 128]: a key and its value in one row."""
  packing, heads = 4 // key.dtype.itemsize, key.shape[1]
  found = np.zeros((NUM_PAGES, PAGE_SIZE, rounded_up(heads, packing) // packing, packing, 128),
                   key.dtype)
  for token, slot in enumerate(SLOTS):
    for head in range(heads):
      place = slot // PAGE_SIZE, slot % PAGE_SIZE, head // packing, head % packing
      found[place][:64], found[place][64:] = key[token, head], value[token, head]
  return found


class PageLayoutsTest(parameterized.TestCase):

  def assert_same_bytes(self, ours, theirs):
    self.assertEqual((ours.shape, ours.dtype), (theirs.shape, theirs.dtype))
    self.assertEqual(np.asarray(ours).tobytes(), theirs.tobytes())

  @parameterized.product(key_heads=(1, 2, 3), width=(64, 80, 128, 192, 256), dtype=DTYPES)
  def test_same_bytes(self, key_heads, width, dtype):
    key, value = tokens(key_heads, width, dtype)
    self.assert_same_bytes(paged(PagesV2, key, value).pages, jax_ragged(key, value))
    self.assert_same_bytes(paged(PagesV3, key, value).pages, tpu_inference(key, value))
    first = paged(PagesV1, key, value)
    by_heads = jax_ragged(key, value).transpose(2, 0, 1, 3)
    self.assert_same_bytes(first.key_pages, by_heads[::2])
    self.assert_same_bytes(first.value_pages, by_heads[1::2])

  def assert_exchanged(self, layout, theirs, ours, heads):
    """Checks both directions, byte for byte; views are the same arrays."""
    scales = None if ours.key_scales is None else (ours.key_scales, ours.value_scales)
    given = tuple(map(jnp.asarray, theirs)) if layout == "jax_v1" else jnp.asarray(theirs)
    read = jax.jit(exchange.from_other, static_argnums=(0, 2))(layout, given, heads, scales)
    self.assertIs(type(read), type(ours))
    back = jax.jit(exchange.to_other, static_argnums=(0, 2))(layout, ours, heads)
    for x, y in zip(jax.tree.leaves((read, back)), jax.tree.leaves((ours, theirs)), strict=True):
      self.assert_same_bytes(x, np.asarray(y))
    if layout != "v3_64":
      again = exchange.to_other(layout, exchange.from_other(layout, given, heads, scales), heads)
      for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(given), strict=True):
        self.assertIs(x, y)

  @parameterized.product(key_heads=(1, 2, 3), width=(64, 80, 128), dtype=DTYPES)
  def test_exchange(self, key_heads, width, dtype):
    key, value = tokens(key_heads, width, dtype)
    heads, by_heads = Heads(key_heads, width, width), jax_ragged(key, value).transpose(2, 0, 1, 3)
    self.assert_exchanged("jax_v1", (np.ascontiguousarray(by_heads[::2]),
                                     np.ascontiguousarray(by_heads[1::2])),
                          paged(PagesV1, key, value), heads)
    self.assert_exchanged("ragged", jax_ragged(key, value), paged(PagesV2, key, value), heads)
    third = paged(PagesV3, key, value)
    self.assert_exchanged("v3", tpu_inference(key, value), third, heads)
    if width == 64:
      self.assert_exchanged("v3_64", tpu_inference_64(key, value), third, heads)

  def test_exchange_of_bad_input(self):
    key, value = tokens(2, 64, "int8")
    ours, scales, heads = paged(PagesV3, key, value), (jnp.ones(()),) * 2, Heads(2, 64, 64)
    theirs = jnp.asarray(tpu_inference_64(key, value))
    for arguments, words in (
        (("v4", theirs, heads, scales), "layout: got 'v4'.*'v3_64'"),
        (("v3_64", theirs, heads), "scales: got None"),
        (("v3_64", theirs, Heads(5, 64, 64), scales), "arrays: got int8"),
        (("v3_64", theirs, Heads(2, 32, 32), scales), "heads: got .* 64"),
        (("v3", theirs, Heads(2, 64, 32), scales), "heads: got .*as wide"),
        (("v3", theirs, [2, 64, 64], scales), "heads: got .*Heads"),
        (("ragged", theirs, heads, scales), "arrays: got int8"),
        (("jax_v1", theirs, heads, scales), "arrays: got .*a pair")):
      with self.assertRaisesRegex(ValueError, words):
        exchange.from_other(*arguments)
    for call, words in (
        (lambda: exchange.to_other("v4", ours, heads), "layout: got 'v4'"),
        (lambda: exchange.to_other("ragged", ours, heads), "cache: got PagesV3.*pages.convert"),
        (lambda: exchange.to_other("v3_64", ours, Heads(3, 64, 64)), "arrays: got int8"),
        (lambda: exchange.to_other("v3", ours._replace(
            key_scales=jnp.ones((3, 4, 2))), heads), "key_scales: got .*no scale for each token")):
      with self.assertRaisesRegex(ValueError, words):
        call()

  @parameterized.parameters(*DTYPES)
  def test_the_other_layout_for_a_width_of_64(self, dtype):
    """Checks that it differs, and that keys and values read from it can be written here."""
    key, value = tokens(3, 64, dtype)
    theirs, ours = tpu_inference_64(key, value), paged(PagesV3, key, value)
    self.assertNotEqual(theirs.shape, ours.pages.shape)
    rows = jnp.asarray(theirs).reshape(1, NUM_PAGES * PAGE_SIZE, -1, 128)[:, :, :3]
    every = PagesMetadata([range(NUM_PAGES)], [NUM_PAGES * PAGE_SIZE])
    empty = paged(PagesV3, key * 0, value * 0)
    written = pages.from_dense(empty, rows[..., :64], rows[..., 64:], every)
    self.assert_same_bytes(written.pages, np.asarray(ours.pages))
    read = pages.to_dense(ours, every, Heads(3, 64, 64), ours.pages.dtype)
    self.assert_same_bytes(jnp.concatenate(read, -1), np.asarray(rows))


if __name__ == "__main__":
  absltest.main()
