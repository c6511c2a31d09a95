# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout: statistics of the keep mask, its arguments, and the same mask in every mechanism.

With the identity as values, the output of an attention is its weights after dropout, so that the
keep mask of any mechanism can be read from its output.

Letters: B batch, H query heads, T query length, S key length.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
import numpy as np

from attn_core import BlockSizes, MaskInfo, OperationMetadata, attention, create_mesh, masks
from attn_core.masks import dropout
from attn_core.masks.mask import Coordinates

jax.config.update("jax_num_cpu_devices", 8)

MECHANISMS = ("vanilla", "blockwise", "flash_attn2", "blocksparse", "auto")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _keep(words, shape, probability, batch, head, query, key):
  at = Coordinates(*(x.reshape([-1 if a == axis else 1 for a in range(4)]) for axis, x in (
      (0, batch), (1, head), (2, query), (3, key), (2, query), (3, key))))
  return jnp.broadcast_to(dropout.keep_mask(words[0], at, probability), shape)


def keep(shape, probability=0.3, seed=0, words=None, start=(0, 0, 0, 0)) -> np.ndarray:
  """Returns the keep mask of a rectangle, [B, H, T, S]."""
  words = dropout.key_words(jax.random.key(seed)) if words is None else words
  return np.asarray(_keep(words, shape, probability, *(
      jnp.arange(first, first + n, dtype=jnp.int32) for first, n in zip(start, shape))))


class KeepMaskTest(parameterized.TestCase):

  def assert_mean(self, x, expected, deviations=5.0, variance=None):
    """Checks a mean of independent numbers against `expected`, up to some standard deviations."""
    variance = expected * (1 - expected) if variance is None else variance
    self.assertLess(abs(x.mean() - expected), deviations * (variance / x.size) ** 0.5)

  @parameterized.product(probability=(0.01, 0.1, 0.3, 0.5, 0.9, 0.999), seed=(0, 7))
  def test_rate(self, probability, seed):
    self.assert_mean(keep((2, 3, 300, 301), probability, seed), 1 - probability)

  @parameterized.parameters(0.1, 0.5)
  def test_rate_of_every_slice(self, probability):
    """Checks that counts over rows, keys, heads and batch rows vary as binomial numbers do."""
    mask = keep((3, 4, 256, 320), probability)
    for axes in ((2, 3), (1, 2, 3), (0, 2, 3), (3,), (2,), (0, 1, 3), (0, 1, 2)):
      count = np.prod([mask.shape[a] for a in axes])
      z = (mask.sum(axes) - count * (1 - probability)) / (
          count * probability * (1 - probability)) ** 0.5
      self.assertLess(abs(z).max(), 5.2, axes)
      if z.size > 100:  # neither more nor less evenly than by chance
        self.assertLess(abs((z**2).mean() - 1), 5 * (2 / z.size) ** 0.5, axes)

  @parameterized.parameters(0.1, 0.5)
  def test_neighbors_are_independent(self, probability):
    mask = keep((4, 4, 256, 256), probability).astype(np.float64) - (1 - probability)
    variance = (probability * (1 - probability)) ** 2
    for axis, name in enumerate(("batch", "head", "query", "key")):
      lags = (1, 2, 3) if axis < 2 else (1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 128, 255)
      for lag in lags:
        first = np.moveaxis(mask, axis, 0)[:-lag]
        second = np.moveaxis(mask, axis, 0)[lag:]
        with self.subTest(f"{name} {lag}"):
          self.assert_mean(first * second, 0, variance=variance)
    for first, second in ((mask, mask.swapaxes(2, 3)), (mask, mask.swapaxes(0, 1)),
                          (mask, mask[:, :, ::-1]), (mask, mask[..., ::-1])):
      off_axis = first != second  # a transposed or flipped mask equals itself on the axis
      self.assertLess(abs((first * second)[off_axis].mean() + probability * (1 - probability)),
                      1e-2)
    # Along a diagonal and across it, where query and key change together.
    self.assert_mean(mask[..., 1:, 1:] * mask[..., :-1, :-1], 0, variance=variance)
    self.assert_mean(mask[..., 1:, :-1] * mask[..., :-1, 1:], 0, variance=variance)

  def test_seeds_are_independent(self):
    shape, p = (1, 2, 256, 256), 0.4
    masks_of = [keep(shape, p, seed).astype(np.float64) - (1 - p) for seed in (0, 1, 2, 2**31)]
    for i, a in enumerate(masks_of):
      for b in masks_of[:i]:
        self.assert_mean(a * b, 0, variance=(p * (1 - p)) ** 2)
    # Nor is a seed's mask that of another seed, shifted by a head or a row.
    for a, b in zip(masks_of, masks_of[1:]):
      self.assert_mean(a[:, 1:] * b[:, :-1], 0, variance=(p * (1 - p)) ** 2)
      self.assert_mean(a[:, :, 1:] * b[:, :, :-1], 0, variance=(p * (1 - p)) ** 2)

  @parameterized.parameters(0, 1, 42, 2**32 - 1)
  def test_no_row_repeats(self, seed):
    """Checks rows of all heads and batch rows; seed 0 once made head and query exchangeable."""
    mask = keep((4, 16, 128, 96), 0.5, seed).reshape(-1, 96)
    self.assertLen(np.unique(np.packbits(mask, axis=1), axis=0), len(mask))

  def test_is_a_function_of_the_coordinates(self):
    """Checks that the mask of any tile at any place is that part of the whole mask."""
    whole = keep((3, 5, 40, 50))
    for start, shape in (((1, 2, 3, 4), (2, 3, 37, 46)), ((2, 4, 39, 49), (1, 1, 1, 1)),
                         ((0, 1, 16, 32), (3, 2, 16, 16))):
      part = whole[tuple(slice(s, s + n) for s, n in zip(start, shape))]
      np.testing.assert_array_equal(keep(shape, start=start), part)
    order = np.random.default_rng(0).permutation(50)
    shuffled = _keep(dropout.key_words(jax.random.key(0)), whole.shape, 0.3,
                     jnp.arange(3), jnp.arange(5), jnp.arange(40), jnp.asarray(order))
    np.testing.assert_array_equal(shuffled, whole[..., order])

  def test_indices_do_not_matter(self):
    words = dropout.key_words(jax.random.key(0))[0]
    at = Coordinates(1, 2, 3, 4, jnp.arange(64)[:, None], jnp.arange(64))
    moved = at._replace(query_index=30, key_index=40)
    np.testing.assert_array_equal(dropout.keep_mask(words, at, 0.5),
                                  dropout.keep_mask(words, moved, 0.5))

  def test_each_number_counts(self):
    words = dropout.key_words(jax.random.key(0))[0]
    key = jnp.arange(256)
    at = Coordinates(0, 0, 0, 0, 5, key)
    base = np.asarray(dropout.keep_mask(words, at, 0.5))
    for other in (at._replace(batch=1), at._replace(head=1), at._replace(query_position=6),
                  at._replace(key_position=key + 1), at._replace(batch=2**20),
                  at._replace(query_position=-1), at._replace(query_position=5 + 2**16)):
      self.assertBetween((np.asarray(dropout.keep_mask(words, other, 0.5)) != base).sum(), 80, 176)
    for i in range(2):
      changed = words.at[i].add(1)
      self.assertBetween((np.asarray(dropout.keep_mask(changed, at, 0.5)) != base).sum(), 80, 176)

  def test_probabilities_are_nested(self):
    """Checks one hash with several thresholds: a higher probability keeps a subset."""
    kept = [keep((1, 2, 64, 64), p) for p in (0.0, 0.1, 0.5, 0.9, 1 - 2**-12)]
    for more, less in zip(kept, kept[1:]):
      self.assertTrue((more >= less).all())
      self.assertGreater(more.sum(), less.sum())
    self.assertTrue(kept[0].all())

  @parameterized.parameters(0.0, 0.1, 0.5, 0.9)
  def test_the_expected_sum_is_preserved(self, probability):
    kept = 1 - (dropout.least_kept(probability) + 2**15) / 2**16
    self.assertLess(abs(dropout.kept_scale(probability) * kept - 1), 1e-4)

  @parameterized.parameters(0.1, 0.5)
  def test_three_keys_and_two_rows_are_independent(self, probability):
    mask = keep((2, 2, 256, 256), probability).astype(np.float64) - (1 - probability)
    variance = probability * (1 - probability)
    key = lambda n: mask[..., n:n + 192]
    for n, m in ((1, 2), (2, 4), (1, 32), (32, 64)):
      self.assert_mean(key(0) * key(n) * key(m), 0, variance=variance**3)
      square = mask[:, :, :-n] * mask[:, :, n:]
      self.assert_mean(square[..., :-m] * square[..., m:], 0, variance=variance**4)

  def test_the_highest_probabilities(self):
    for probability in (1 - 1e-6, 1 - 2**-33, np.nextafter(1.0, 0.0)):
      self.assertLess(keep((1, 4, 256, 256), float(probability)).sum(), 10)

  def test_integer_dtypes_agree(self):
    words = dropout.key_words(jax.random.key(0))[0]
    found = [np.asarray(dropout.keep_mask(words, Coordinates(
        *[np.array([1], dtype)] * 4, np.arange(50, dtype=dtype)[:, None],
        np.arange(60, dtype=dtype)), 0.5)) for dtype in (np.int32, np.uint32, np.int16, np.int64)]
    for other in found[1:]:
      np.testing.assert_array_equal(other, found[0])

  def test_bits_never_change(self):
    """Checks the exact bits: another hash would change training runs."""
    found = keep((2, 2, 3, 16), 0.5, words=jnp.array([[1, 2]], jnp.uint32), start=(0, 1, 5, 30))
    self.assertEqual(np.packbits(found).tobytes().hex(), PINNED)


PINNED = "230261919f868564443d77005093e71e6c85f41d7ee8b594"


class KeysTest(parameterized.TestCase):

  def test_words(self):
    words = dropout.key_words(jax.random.key(3))
    self.assertEqual((words.shape, words.dtype), ((1, 2), jnp.uint32))

  def test_typed_and_raw_keys_agree(self):
    for seed in (0, 1, 2**32 - 1):
      typed, raw = jax.random.key(seed), jax.random.PRNGKey(seed)
      np.testing.assert_array_equal(dropout.key_words(typed), dropout.key_words(raw))
      np.testing.assert_array_equal(dropout.key_words(typed),
                                    dropout.key_words(jnp.asarray(np.asarray(raw))))

  def test_in_jit(self):
    key = jax.random.key(5)
    np.testing.assert_array_equal(jax.jit(dropout.key_words)(key), dropout.key_words(key))

  @parameterized.parameters("threefry2x32", "rbg", "unsafe_rbg")
  def test_every_implementation(self, implementation):
    keys = jax.random.split(jax.random.key(5, impl=implementation), 200)
    words = np.concatenate([dropout.key_words(key) for key in keys[:60]])
    self.assertLen(np.unique(words[:, 0]), 60)
    self.assertLen(np.unique(words[:, 1]), 60)

  def test_every_word_of_a_key_counts(self):
    data = np.arange(1, 5, dtype=np.uint32)
    words = [np.asarray(dropout.key_words(jnp.asarray(data)))]
    for i in range(4):
      changed = data.copy()
      changed[i] += 1
      words.append(np.asarray(dropout.key_words(jnp.asarray(changed))))
    words.append(np.asarray(dropout.key_words(jnp.asarray(data[::-1].copy()))))
    for each in np.concatenate(words).T:  # it counts in both of the words that it is hashed to
      self.assertLen(np.unique(each), 6)

  def test_folded_keys_give_other_masks(self):
    base = jax.random.key(0)
    first, second = (keep((1, 1, 64, 64), 0.5, words=dropout.key_words(
        jax.random.fold_in(base, i))) for i in (0, 1))
    self.assertBetween((first != second).mean(), 0.45, 0.55)


# --- Through the entry point. --------------------------------------------------------------------

P = 0.35


def inputs(b=2, t=24, s=24, h=4, k=2, d=8, seed=0):
  """Returns query, key, and values that are the identity."""
  generator = np.random.default_rng(seed)
  query, key = (jnp.asarray(generator.standard_normal(shape), jnp.float32)
                for shape in ((b, t, h, d), (b, s, k, d)))
  return query, key, jnp.broadcast_to(jnp.eye(s)[None, :, None], (b, s, k, s))


def weights_of(mechanism="vanilla", qkv=None, *, p=P, rng=None, **kwargs) -> np.ndarray:
  """Returns the weights after dropout [B, H, T, S], by the identity as values."""
  kwargs = {"deterministic": False, "causal": False, **kwargs}
  out = attention(*(inputs() if qkv is None else qkv), mechanism=mechanism, dropout_prob=p,
                  dropout_rng=jax.random.key(0) if rng is None else rng, **kwargs)
  out = np.asarray(out.attention_outputs)
  return out.swapaxes(1, 2) if kwargs.get("layout", "bthd") == "bthd" else out


class MechanismsTest(parameterized.TestCase):

  @parameterized.parameters(*MECHANISMS)
  def test_kept_weights_are_those_of_the_hash(self, mechanism):
    found = weights_of(mechanism)
    np.testing.assert_array_equal(found != 0, keep((2, 4, 24, 24), P))

  @parameterized.parameters(*MECHANISMS)
  def test_kept_weights_are_rescaled(self, mechanism):
    without = weights_of(mechanism, deterministic=True)
    expected = np.where(keep((2, 4, 24, 24), P), without / (1 - P), 0)
    np.testing.assert_allclose(weights_of(mechanism), expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(without.sum(-1), 1, rtol=1e-5)

  @parameterized.parameters((1, 1), (5, 7), (8, 24), (24, 3), (16, 16))
  def test_block_sizes_change_nothing(self, block_q, block_kv):
    found = weights_of("blockwise", block_sizes=BlockSizes(block_q, block_kv, block_q, block_kv))
    np.testing.assert_array_equal(found != 0, keep((2, 4, 24, 24), P))

  def test_heads_computed_together_change_nothing(self):
    qkv = inputs(h=6, k=6)
    for heads in (1, 3):
      found = weights_of("blockwise", qkv, block_sizes=BlockSizes(block_heads=heads))
      np.testing.assert_array_equal(found != 0, keep((2, 6, 24, 24), P))

  @parameterized.product(mechanism=("vanilla", "blockwise"),
                         axes=((8, 1), (2, 4), (4, 2)))
  def test_sharding_changes_nothing(self, mechanism, axes):
    qkv = inputs(b=8, t=16, s=16, h=4, k=2)
    mesh = create_mesh((axes[0], 1, 1, axes[1], 1))
    found = weights_of(mechanism, qkv, metadata=OperationMetadata(mesh=mesh))
    np.testing.assert_array_equal(found != 0, keep((8, 4, 16, 16), P))

  @parameterized.parameters("vanilla", "blockwise")
  def test_layouts(self, mechanism):
    qkv = inputs(b=1)
    expected = keep((1, 4, 24, 24), P)
    turned = weights_of(mechanism, [x.swapaxes(1, 2) for x in qkv], layout="bhtd")
    np.testing.assert_array_equal(turned != 0, expected)
    packed = weights_of(mechanism, [x[0] for x in qkv], layout="thd",
                        cum_seqlens_q=np.array([0, 24], np.int32))
    np.testing.assert_array_equal(packed.swapaxes(0, 1) != 0, expected[0])

  @parameterized.parameters("vanilla", "blockwise")
  def test_with_masks(self, mechanism):
    found = weights_of(mechanism, causal=True, sliding_window=(9, 0),
                       mask_info=MaskInfo.from_segments(np.arange(24)[None] // 11))
    row, column = np.mgrid[:24, :24]
    visible = (column <= row) & (row - column <= 9) & (row // 11 == column // 11)
    np.testing.assert_array_equal(found != 0, visible & keep((2, 4, 24, 24), P))

  def test_compute_dtype_changes_nothing(self):
    found = weights_of("blockwise", compute_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(found != 0, keep((2, 4, 24, 24), P))

  @parameterized.parameters("vanilla", "blockwise")
  def test_in_jit_and_vmap(self, mechanism):
    query, key, value = inputs()
    run = lambda q, k, v, rng: attention(
        q, k, v, mechanism=mechanism, causal=False, dropout_prob=P, dropout_rng=rng,
        deterministic=False).attention_outputs
    found = jax.jit(run)(query, key, value, jax.random.key(0)).swapaxes(1, 2)
    np.testing.assert_array_equal(found != 0, keep((2, 4, 24, 24), P))
    # Two models with keys of their own: rows of each are numbered from 0.
    rngs = jax.random.split(jax.random.key(9), 2)
    found = jax.vmap(run, (None, None, None, 0))(query, key, value, rngs).swapaxes(2, 3)
    for i in range(2):
      np.testing.assert_array_equal(
          found[i] != 0, keep((2, 4, 24, 24), P, words=dropout.key_words(rngs[i])))

  @parameterized.parameters("vanilla", "blockwise")
  def test_key_forms(self, mechanism):
    expected = weights_of(mechanism, rng=jax.random.key(3))
    for rng in (jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))):
      np.testing.assert_array_equal(weights_of(mechanism, rng=rng), expected)
    self.assertFalse(np.array_equal(weights_of(mechanism, rng=jax.random.key(4)), expected))

  @parameterized.parameters(*MECHANISMS)
  def test_off(self, mechanism):
    expected = weights_of(mechanism, deterministic=True)
    self.assertTrue((expected != 0).all())
    np.testing.assert_array_equal(weights_of(mechanism, p=0.0), expected)
    out = attention(*inputs(), mechanism=mechanism, causal=False).attention_outputs
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected)

  @parameterized.parameters("vanilla", "blockwise")
  def test_nearly_all_dropped(self, mechanism):
    found = weights_of(mechanism, p=1 - 2**-6)
    kept = keep((2, 4, 24, 24), 1 - 2**-6)
    np.testing.assert_array_equal(found != 0, kept)
    self.assertTrue(kept.any())
    without = weights_of(mechanism, deterministic=True)
    np.testing.assert_allclose(found[kept], 2**6 * without[kept], rtol=1e-5)
    self.assertTrue(np.isfinite(weights_of(mechanism, p=1 - 2**-20)).all())

  def test_probability_of_the_metadata(self):
    metadata = OperationMetadata(dropout_prob=P)
    np.testing.assert_array_equal(weights_of("blockwise", p=0.0, metadata=metadata) != 0,
                                  keep((2, 4, 24, 24), P))
    np.testing.assert_array_equal(weights_of("blockwise", p=0.6, metadata=metadata) != 0,
                                  keep((2, 4, 24, 24), 0.6))

  def test_sinks_are_not_dropped(self):
    sinks = jnp.full(4, 6.0)
    found = weights_of("vanilla", softmax_aux=sinks)
    without = weights_of("vanilla", softmax_aux=sinks, deterministic=True)
    self.assertTrue((without.sum(-1) < 0.99).all())
    np.testing.assert_allclose(found, np.where(keep((2, 4, 24, 24), P), without / (1 - P), 0),
                               rtol=1e-6)

  @parameterized.parameters("vanilla", "blockwise")
  def test_lse_counts_dropped_keys_too(self, mechanism):
    run = lambda **kwargs: attention(
        *inputs(), mechanism=mechanism, return_lse=True, dropout_prob=P,
        dropout_rng=jax.random.key(0), **kwargs).lse
    # Not bit for bit: XLA:CPU fuses multiplications and additions differently in other
    # surroundings.
    np.testing.assert_allclose(run(deterministic=False), run(deterministic=True), atol=1e-6)

  def test_the_mean_over_keys_is_attention_without_dropout(self):
    query, key, value = inputs(b=1, h=2, k=2)
    run = jax.jit(jax.vmap(lambda rng: attention(
        query, key, value, mechanism="vanilla", causal=False, dropout_prob=P, dropout_rng=rng,
        deterministic=False).attention_outputs))
    outs = run(jax.random.split(jax.random.key(1), 2000))
    expected = np.asarray(attention(query, key, value, mechanism="vanilla",
                                    causal=False).attention_outputs)
    bound = 5.5 * expected * (P / (1 - P) / 2000) ** 0.5
    self.assertTrue((abs(outs.mean(0) - expected) < bound).all())

  def test_gradients_use_the_same_mask(self):
    generator = np.random.default_rng(1)
    query, key, _ = inputs(k=2)
    value = jnp.asarray(generator.standard_normal((2, 24, 2, 5)), jnp.float32)
    target = jnp.asarray(generator.standard_normal((2, 24, 4, 5)), jnp.float32)
    def gradients(mechanism, block_sizes=None):
      return jax.jit(jax.grad(lambda *qkv: jnp.vdot(target, attention(
          *qkv, mechanism=mechanism, dropout_prob=P, dropout_rng=jax.random.key(0),
          deterministic=False, block_sizes=block_sizes).attention_outputs), (0, 1, 2)))(
              query, key, value)
    expected = gradients("vanilla")
    for a, b in zip(gradients("blockwise", BlockSizes(8, 8, 5, 7)), expected):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class PositionsTest(parameterized.TestCase):
  """Positions of tokens, not rows and columns of arrays, decide which weights are kept."""

  @parameterized.parameters(*MECHANISMS)
  def test_query_offset(self, mechanism):
    query, key, value = inputs()
    whole = weights_of(mechanism, (query, key, value), causal=True)
    part = weights_of(mechanism, (query[:, 6:15], key, value), causal=True, query_offset=6)
    np.testing.assert_array_equal(part != 0, whole[:, :, 6:15] != 0)
    np.testing.assert_allclose(part, whole[:, :, 6:15], rtol=1e-4, atol=1e-7)
    each = weights_of(mechanism, (query[:, 6:15], key, value), causal=True,
                      query_offset=np.array([6, 2], np.int32))
    np.testing.assert_array_equal(each[0], part[0])
    lower = keep((2, 4, 9, 24), P, start=(0, 0, 2, 0))[1]
    visible = np.arange(24) <= np.arange(2, 11)[:, None]
    np.testing.assert_array_equal(each[1] != 0, lower & visible)

  @parameterized.parameters(*MECHANISMS)
  def test_positions_of_mask_info(self, mechanism):
    """Checks that tokens shuffled with their positions give the same attention, shuffled."""
    query, key, value = inputs()
    generator = np.random.default_rng(2)
    rows, columns = (np.stack([generator.permutation(24) for _ in range(2)]) for _ in range(2))
    take = lambda x, order: jnp.stack([x[b, order[b]] for b in range(2)])
    info = MaskInfo(q_positions=rows.astype(np.int32), kv_positions=columns.astype(np.int32))
    found = weights_of(mechanism, (take(query, rows), take(key, columns), value), causal=True,
                       mask_info=info)
    whole = weights_of(mechanism, (query, key, value), causal=True)
    for b in range(2):
      np.testing.assert_array_equal(found[b] != 0, whole[b][:, rows[b]][..., columns[b]] != 0)
      np.testing.assert_allclose(found[b], whole[b][:, rows[b]][..., columns[b]], rtol=1e-4,
                                 atol=1e-7)

  @parameterized.parameters("vanilla", "blockwise")
  def test_offset_and_key_positions(self, mechanism):
    order = np.random.default_rng(3).permutation(24).astype(np.int32)
    found = weights_of(mechanism, causal=True, query_offset=3,
                       mask_info=MaskInfo(kv_positions=order[None]))
    kept = keep((2, 4, 24, 24), P, start=(0, 0, 3, 0))[..., order]
    np.testing.assert_array_equal(found != 0, kept & (order <= np.arange(3, 27)[:, None]))

  @parameterized.parameters("vanilla", "blockwise")
  def test_packed_sequences_restart(self, mechanism):
    query, key, value = inputs(b=1)
    found = weights_of(mechanism, (query[0], key[0], value[0]), layout="thd",
                       cum_seqlens_q=np.array([0, 10, 24], np.int32)).swapaxes(0, 1)
    expected = np.zeros((4, 24, 24), bool)
    expected[:, :10, :10] = keep((1, 4, 10, 10), P)[0]
    expected[:, 10:, 10:] = keep((1, 4, 14, 14), P)[0]
    np.testing.assert_array_equal(found != 0, expected)

  def test_positions_of_the_only_part_of_a_mask_that_reads_them(self):
    generator = np.random.default_rng(4)
    rows, columns = (generator.permutation(24).astype(np.int32)[None] for _ in range(2))
    ids = masks.segments(np.arange(24, dtype=np.int32)[None] % 3)
    whole = weights_of(mask=masks.positions(rows, columns, masks.causal() & ids))
    visible = (columns <= rows.T) & (np.arange(24) % 3 == np.arange(24)[:, None] % 3)
    np.testing.assert_array_equal(whole != 0, visible & keep((2, 4, 24, 24), P)[
        :, :, rows[0]][..., columns[0]])
    for part in (masks.positions(rows, columns) & ids, ids & masks.positions(rows, columns),
                 ~(~ids | masks.positions(rows, columns, ~masks.causal()))):
      np.testing.assert_array_equal(weights_of(mask=part), whole)
    np.testing.assert_array_equal(weights_of("blockwise", mask=part) != 0, whole != 0)
    # Of two parts that read positions, each changes only its own.
    found = weights_of(mask=masks.positions(rows, columns) & masks.window(None, 23) & ids)
    np.testing.assert_array_equal(found != 0, visible & keep((2, 4, 24, 24), P))

  def test_offsets_of_masks_do_not_change_dropout(self):
    found = weights_of("blockwise", causal=True, mask=masks.offset(masks.prefix(8), 3))
    plain = weights_of("blockwise", causal=True, mask=masks.prefix(8))
    np.testing.assert_array_equal(found, plain)


if __name__ == "__main__":
  absltest.main()
