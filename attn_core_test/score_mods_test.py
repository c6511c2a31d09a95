# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Score mods as values: their meaning number by number, their algebra, and refusals."""

import functools
import importlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import score_mods
from attn_core.score_mods import buckets, tables
from attn_core_test import optional_deps
from attn_core_test.score_mods_cases import (ADDITIVE, B, CASES, H, IDS, T, arrays_of, bucket,
                                             by_hand, composed, numbers, same_document)

TABLE = np.zeros((8, H), np.float32)


class MeaningTest(parameterized.TestCase):

  @parameterized.named_parameters(*((name, name) for name in CASES))
  def test_numbers(self, name):
    case, scores = CASES[name], numbers(B, H, T, T)
    arrays = arrays_of(case)
    with jax.enable_x64(True):
      got = score_mods.apply(case.make(**arrays), scores)
    np.testing.assert_allclose(got, by_hand(case, scores, arrays), rtol=1e-12, atol=1e-12)

  def test_order_is_the_written_one(self):
    first, second = (composed(*names) for names in (("soft_cap", "alibi"), ("alibi", "soft_cap")))
    scores = numbers(B, H, T, T)
    found = []
    for case in (first, second):
      arrays = arrays_of(case)
      with jax.enable_x64(True):
        got = score_mods.apply(case.make(**arrays), scores)
      np.testing.assert_allclose(got, by_hand(case, scores, arrays), rtol=1e-12, atol=1e-12)
      found.append(got)
    self.assertGreater(abs(found[0] - found[1]).max(), 0.1)

  @parameterized.product(num_buckets=(8, 32), most=(17, 128, 200), both=(True, False))
  def test_buckets(self, num_buckets, most, both):
    distance = np.arange(-300, 301)
    got = buckets.bucket(distance, num_buckets, most, both)
    want = np.array([bucket(int(n), num_buckets, most, both) for n in distance])
    # Only where float32 and float64 round to either side of a border, and one by one.
    self.assertLess((got != want).mean(), 0.01)
    np.testing.assert_array_less(abs(got - want), 2)
    first, known = buckets.by_distance(num_buckets, most, both)
    np.testing.assert_array_equal(got, known[np.clip(distance - first, 0, len(known) - 1)])

  def test_buckets_are_those_of_transformers(self):
    torch, _ = optional_deps.torch_and_transformers(self)
    model = importlib.import_module("transformers.models.t5.modeling_t5")
    for both in (True, False):
      want = model.T5Attention._relative_position_bucket(  # pylint: disable=protected-access
          torch.arange(-300, 301), both, 32, 128).numpy()
      np.testing.assert_array_equal(buckets.bucket(np.arange(-300, 301), 32, 128, both), want)

  def test_alibi_slopes(self):
    np.testing.assert_allclose(score_mods.alibi_slopes(8), [2.0**-n for n in range(1, 9)])
    np.testing.assert_allclose(score_mods.alibi_slopes(12)[8:], [2.0**-(n + 0.5) for n in range(4)])


class AlgebraTest(parameterized.TestCase):

  @parameterized.named_parameters(*((name, name) for name in CASES))
  def test_equal_by_value(self, name):
    case = CASES[name]
    arrays = arrays_of(case)
    mod, same = case.make(**arrays), case.make(**{k: x.copy() for k, x in arrays.items()})
    self.assertEqual(mod, same)
    self.assertEqual(hash(mod), hash(same))
    if arrays:
      self.assertNotEqual(mod, case.make(**{k: x + 1 for k, x in arrays.items()}))
    self.assertNotEqual(mod, mod >> score_mods.soft_cap(3.0))
    self.assertEqual(jax.tree.structure(mod), jax.tree.structure(same))

  def test_equal_ones_do_not_retrace(self):
    traced = []
    @jax.jit
    def run(mod, scores):
      traced.append(mod)
      return score_mods.apply(mod, scores)
    scores = numbers(1, H, 3, 3).astype(np.float32)
    for seed in range(3):
      run(score_mods.relative(numbers(8, H, seed=seed).astype(np.float32))
          >> score_mods.custom(same_document, np.ones(H, np.float32), IDS), scores)
    self.assertLen(traced, 1)
    run(score_mods.relative(TABLE, max_distance=64), scores)
    self.assertLen(traced, 2)

  def test_structures_of_different_leaves_differ(self):
    x = np.ones((1, 1, 1), np.float32)
    mods = [score_mods.per_query(x), score_mods.per_key(x), score_mods.scale_by(x)]
    self.assertLen({jax.tree.structure(mod) for mod in mods}, 3)

  def test_is_additive(self):
    for name, case in CASES.items():
      mod = case.make(**arrays_of(case)).lower((B, H, T, T))
      self.assertEqual(mod.is_additive, name in ADDITIVE, name)

  def test_has_no_truth_value(self):
    with self.assertRaisesRegex(ValueError, "truth value"):
      bool(score_mods.soft_cap(1.0))

  def test_composes_with_score_mods_alone(self):
    for compose in (lambda mod: mod >> same_document, lambda mod: same_document >> mod,
                    lambda mod: mod >> np.ones(3)):
      with self.assertRaisesRegex(TypeError, r"(?s)score_mod >> other: got .*score_mods.custom"):
        compose(score_mods.soft_cap(1.0))


def _mean(score, batch, head, query, key):
  return score - score.mean(-1, keepdims=True)


def _inner(score, batch, head, query, key):
  return jax.jit(jnp.cumsum, static_argnums=1)(score, -1)


def _of_scores(table):
  return lambda score, batch, head, query, key: score + table[0]


def _half(score, batch, head, query, key):
  return score.astype(jnp.bfloat16)


# Functions of the tile that a kernel gives them: name, function, message.
OF_TILE = (
    ("first_key", lambda x, b, h, q, k: x + (k - k.min()).astype(x.dtype),
     "applies `reduce_min` along a tile"),
    ("first_query", lambda x, b, h, q, k: x + q.reshape(-1)[0].astype(x.dtype),
     "applies `.*slice` along a tile"),
    ("count", lambda x, b, h, q, k: jax.jit(lambda x, k: x + jnp.cumsum(k > 3, 3))(x, k).astype(
        x.dtype), "applies `cumsum` along a tile"),
    ("any", lambda x, b, h, q, k: jax.lax.cond((q > 3).any(), lambda x: x, lambda x: -x, x),
     "applies `reduce_or` along a tile"),
    ("products", lambda x, b, h, q, k: x + jnp.einsum("hqgk,hqgk->hq", k, k)[:, :, None, None],
     "applies `.*` along a tile"),
    ("columns", lambda x, b, h, q, k: x + jnp.arange(x.shape[-1]).astype(x.dtype),
     "by the place in a tile .`iota`"),
    ("captured", lambda x, b, h, q, k: x + np.arange(x.shape[-1]).astype(x.dtype),
     "captures an array of the size of a tile"),
    ("size", lambda x, b, h, q, k: x / x.shape[-1], "computes with the size of a tile"),
    ("noise", lambda x, b, h, q, k: x + jax.random.normal(jax.random.key(0), x.shape),
     "by the place in a tile .`random_bits`"),
    ("keys", lambda x, b, h, q, k: x + jax.vmap(jax.random.normal)(
        jax.random.split(jax.random.key(0), x.shape[-1])), "`random_split`"),
    ("split", lambda x, b, h, q, k: x + jnp.split(k, [1], 3)[0], "applies `.*` along a tile"),
    ("every_other", lambda x, b, h, q, k: x + jnp.repeat(k[..., ::2], 2, 3)[..., :1],
     "applies `.*` along a tile"),
    ("counted", lambda x, b, h, q, k: x + jnp.bincount(k.reshape(-1), length=8)[k % 8],
     "applies `scatter.*` along a tile"),
    ("first_heads", lambda x, b, h, q, k: x + jnp.arange(9.)[:x.shape[0]].reshape(-1, 1, 1, 1),
     "applies `.*` by the size of a tile"),
    ("power", lambda x, b, h, q, k: x**x.shape[-1], "size of a tile .`integer_pow`"),
    ("repeated", lambda x, b, h, q, k: jax.lax.fori_loop(0, x.shape[-1], lambda n, x: 2 * x, x),
     "applies `scan` along a tile"),
    ("replaced", lambda x, b, h, q, k: x + jax.lax.dynamic_update_slice(
        k, jnp.zeros((1, 1, 1, 1), k.dtype), (0, 0, 0, 0)),
     "applies `dynamic_update_slice` along a tile"))


def _of_bounds(score, batch, head, query, key, bounds):
  """Returns scores by look-ups in sorted numbers, sums over axes of its own, noise, and a loop."""
  bucket = jnp.searchsorted(bounds, (query - key).astype(bounds.dtype))
  powers = jax.vmap(lambda n: jnp.sin(n * bounds).sum())(jnp.arange(3, dtype=bounds.dtype))
  near = (jax.nn.one_hot(bucket, 4) * bounds[:4] * jnp.arange(4)).sum(-1)
  line = jnp.interp((key - query).astype(score.dtype), bounds, jnp.flip(bounds))
  rows = jnp.stack([bounds, jnp.flip(bounds)])[head % 2]
  found = jnp.take_along_axis(rows, bucket.clip(0, 4)[..., None], -1)[..., 0] + rows[..., batch]
  noise = jnp.vectorize(lambda n: jax.random.uniform(jax.random.fold_in(jax.random.key(0), n)))
  median = jnp.median(rows, -1) + jnp.argsort(rows, -1)[..., 0]
  line += jax.lax.reduce_precision(found + noise(query - key) + median, 8, 7)
  return jax.lax.fori_loop(0, 3, lambda n, x: x + powers[n] * near, score) * line


class TablesTest(parameterized.TestCase):

  def test_numbers_along_distances(self):
    """Also where sums of distances are beyond int32."""
    rng, most = np.random.default_rng(0), 2**31 - 1
    for _ in range(15):
      count, step = int(rng.integers(1, 40)), int(rng.choice([-7, -2, -1, 1, 3]))
      begin = int(rng.integers(-80, 80))
      first = int(rng.choice([0, -5, 2**30, most - count, -most]))
      apart = range(begin, begin + step * int(rng.integers(1, 60)), step)
      near = rng.choice([60, most])
      bases = rng.integers(-near, near, (2, 3)) + (first if near == 60 else 0)
      bases = np.clip(bases, -most - 1, most)
      values = rng.normal(size=(2, 3, count)).astype(np.float32)
      place = np.clip(bases[:, :, None] + np.array(apart) - first, 0, count - 1)
      expected = np.stack([x[:, at] for x, at in zip(values, place)])
      np.testing.assert_array_equal(expected, tables.along(
          jnp.asarray(values), first, jnp.asarray(bases, jnp.int32), apart))

  @parameterized.parameters((32, 128), (32, 4000))
  def test_buckets_are_summed_without_look_ups(self, count, most):
    _, index = buckets.by_distance(count, most, True)
    table = np.random.default_rng(0).normal(size=(1, 3, count)).astype(np.float32)
    found, pull = jax.vjp(lambda x: buckets.spread(x, index), table)
    np.testing.assert_array_equal(found, table[..., index])
    weights = np.random.default_rng(1).normal(size=found.shape).astype(np.float32)
    expected = np.zeros_like(table)
    np.add.at(expected, (slice(None), slice(None), index), weights)
    np.testing.assert_allclose(pull(weights)[0], expected, atol=1e-4)
    text = jax.jit(pull).lower(weights)
    self.assertNotIn("scatter", text.as_text())
    self.assertLess(text.compile().memory_analysis().temp_size_in_bytes, 2**20)
    self.assertTrue(np.isfinite(jax.jvp(lambda x: buckets.spread(x, index), (table,), (table,))[1]
                                ).all())


class BadInputTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("alibi_ints", lambda: score_mods.alibi(np.arange(4)), r"alibi: slopes: got int64\[4\]"),
      ("alibi_rank", lambda: score_mods.alibi(np.ones((1, 4, 1))), r"\[H\] or \[B or 1, H\]"),
      ("slopes", lambda: score_mods.alibi_slopes(0), "alibi_slopes: heads: got 0"),
      ("relative_rank", lambda: score_mods.relative(np.ones(8)), r"\[num_buckets, H or 1\]"),
      ("relative_odd", lambda: score_mods.relative(np.ones((7, 1))), "even number"),
      ("relative_near", lambda: score_mods.relative(np.ones((32, 1)), max_distance=8),
       "relative: max_distance: got 8"),
      ("by_distance", lambda: score_mods.by_distance(np.ones((3, 1)), 1.5), "by_distance: first"),
      ("grid_shape", lambda: score_mods.grid(np.ones((3, 1)), 2), "grid: shape: got 2"),
      ("grid_table", lambda: score_mods.grid(np.ones((8, 1)), (2, 2)), r"\[9, H or 1\]"),
      ("per_query", lambda: score_mods.per_query(np.ones(3)), r"\[B or 1, H or 1, T or 1\]"),
      ("per_key", lambda: score_mods.per_key(np.ones((3, 3))), r"\[B or 1, H or 1, S or 1\]"),
      ("scale_by", lambda: score_mods.scale_by(2.0), "scale_by: array"),
      ("dense_bool", lambda: score_mods.dense(np.ones((1, 1, 2, 2), bool)), "got bool"),
      ("soft_cap", lambda: score_mods.soft_cap(-1.0), "soft_cap: cap: got -1.0"),
      ("custom_none", lambda: score_mods.custom(None), "custom: function=None"),
      ("custom_arity", lambda: score_mods.custom(lambda score, query: score),
       r"expected 5: score, batch, head, query position, key position"),
      ("custom_operands", lambda: score_mods.custom(same_document, np.ones(4)), "and 1 operands"),
      ("custom_shape", lambda: score_mods.custom(lambda x, b, h, q, k: x.sum()),
       "expected the same shape and dtype"),
      ("custom_dtype", lambda: score_mods.custom(_half), "expected the same shape and dtype"),
      ("custom_number", lambda: score_mods.custom(lambda x, b, h, q, k: 1.0), "same shape"),
      ("custom_branch", lambda: score_mods.custom(lambda x, b, h, q, k: x if q > k else -x),
       r"custom: function=.*failed while it was traced.*truth value.*jnp.where in place of `if`"),
      ("custom_numpy", lambda: score_mods.custom(lambda x, b, h, q, k: np.exp(x)),
       "custom: function=.*failed while it was traced with arrays"),
      ("custom_select", lambda: score_mods.custom(
          lambda x, b, h, q, k: jax.lax.select_n(q > k, x, -x)), "shapes that broadcast"),
      ("custom_mean", lambda: score_mods.custom(_mean), "applies `reduce_sum` to the scores"),
      ("custom_inner", lambda: score_mods.custom(_inner), "applies `cumsum` to the scores"),
      *((f"custom_{name}", functools.partial(score_mods.custom, function), message)
        for name, function, message in OF_TILE),
      ("apply", lambda: score_mods.apply(np.ones(3), np.ones((1, 1, 2, 2))), "a score mod"))
  def test_refuses(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()

  def test_refuses_a_function_that_captures_a_traced_array(self):
    with self.assertRaisesRegex(ValueError, "captures a traced array"):
      jax.jit(lambda table: score_mods.apply(
          score_mods.custom(_of_scores(table)), np.ones((1, 1, 2, 2))))(jnp.ones(3))

  @parameterized.named_parameters(
      ("alibi", lambda: score_mods.alibi(np.ones(3)), r"alibi: slopes is float64\[3\]"),
      ("alibi_rows", lambda: score_mods.alibi(np.ones((3, H))), r"the sizes \[2, 4\]"),
      ("relative", lambda: score_mods.relative(np.ones((8, 3))), r"relative: table is"),
      ("per_query", lambda: score_mods.per_query(np.ones((1, 1, 9))), r"sizes \[2, 4, 13\]"),
      ("dense", lambda: score_mods.dense(np.ones((1, 1, 9, 9))), r"sizes \[2, 4, 13, 13\]"))
  def test_names_shapes_that_do_not_fit(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      score_mods.apply(make(), np.ones((B, H, T, T)))

  def test_elementwise_functions_of_many_kinds_are_accepted(self):
    def function(score, batch, head, query, key, table):
      near = jax.nn.relu(score) + jax.jit(jnp.sin)(score)
      return jax.lax.cond(batch > 0, lambda x: x, lambda x: -x, jnp.where(
          (query - key)[..., :] > 0, near + (score > 0).astype(score.dtype),
          table[head, key % 3] * jnp.squeeze(score[None], 0)))
    mod = score_mods.custom(functools.partial(function), np.ones((H, 3), np.float32))
    self.assertEqual(score_mods.apply(mod, np.ones((1, H, 2, 2), np.float32)).shape, (1, H, 2, 2))
    score_mods.custom(_of_bounds, np.arange(5, dtype=np.float32))


if __name__ == "__main__":
  absltest.main()
