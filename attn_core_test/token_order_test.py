# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Token orders of a sharded sequence: their inverses, and their balance under a causal mask."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
import numpy as np

from attn_core import RingConfig, from_layout, masks, to_layout
from attn_core.masks import block_map
from attn_core.sharding import context_parallel, token_order
from attn_core_test.ring_cases import SHARDS, numbers


class TokenOrderTest(parameterized.TestCase):

  @parameterized.product(layout=token_order.TOKEN_ORDERS, shards=(1, 2, 5, 8))
  def test_there_and_back(self, layout, shards):
    tokens = numbers(2, 6 * shards, 3)
    tree = {"tokens": tokens, "labels": np.arange(12 * shards, dtype=np.int32).reshape(2, -1)}
    there = to_layout(tree, layout, shards)
    jax.tree.map(np.testing.assert_array_equal, from_layout(there, layout, shards), tree)
    order = token_order.order(layout, 6 * shards, shards)
    np.testing.assert_array_equal(there["tokens"], tokens[:, order])
    for shard in range(shards):
      tokens, = jax.jit(lambda n: token_order.tokens_of(layout, 6 * shards, shards, n))(
          jnp.array([shard]))
      np.testing.assert_array_equal(tokens, order[6 * shard:6 * (shard + 1)])

  @parameterized.product(layout=token_order.TOKEN_ORDERS, length=(1, 2, 5, 8))
  def test_one_shard_takes_any_length_and_keeps_its_order(self, layout, length):
    np.testing.assert_array_equal(token_order.order(layout, length, 1), np.arange(length))
    x = np.arange(3 * length).reshape(3, length)
    np.testing.assert_array_equal(to_layout(x, layout, 1), x)

  @parameterized.product(layout=token_order.TOKEN_ORDERS, queries=(8, 16, 9), keys=(8, 16, 9))
  def test_shards_that_are_the_sequence_as_it_is(self, layout, queries, keys):
    mesh = AbstractMesh((4,), ("sp",))
    if layout != "contiguous" and 9 in (queries, keys):
      return  # refused
    sequence = context_parallel.shard_sequence(RingConfig(layout=layout), "sp", False, mesh,
                                               (queries, keys, 1))
    for tokens, length in ((sequence.rows, queries), (sequence.columns, keys)):
      found = np.concatenate([tokens(member) for member in range(4)])
      self.assertEqual(sorted(found), list(range(-(-length // 4) * 4)))
    self.assertEqual(sequence.is_natural, layout == "contiguous" and 9 not in (queries, keys))

  def test_by_hand(self):
    self.assertEqual(token_order.order("contiguous", 8, 2).tolist(), [0, 1, 2, 3, 4, 5, 6, 7])
    self.assertEqual(token_order.order("zigzag", 8, 2).tolist(), [0, 1, 6, 7, 2, 3, 4, 5])
    self.assertEqual(token_order.order("striped", 8, 2).tolist(), [0, 2, 4, 6, 1, 3, 5, 7])
    self.assertEqual(to_layout(np.arange(4), "zigzag", 2, axis=0).tolist(), [0, 3, 1, 2])

  @parameterized.parameters(
      ("zigzag", 24, 8, "length=24: expected a multiple of 16.*nearest are 16 or 32"),
      ("striped", 7, 8, "length=7: expected a multiple of 8.*nearest are 8:"),
      ("stripes", 8, 2, "layout='stripes': expected one of 'contiguous', 'zigzag', 'striped'"),
      ("zigzag", 8, 0, "shards=0: expected at least 1"))
  def test_refuses(self, layout, length, shards, message):
    with self.assertRaisesRegex(ValueError, message):
      to_layout(np.zeros((1, length)), layout, shards)

  @parameterized.parameters(
      (np.zeros((1, 4)), 2, 5, r"axis: got 5 with x float64\[1, 4\]; expected .*-2 to 2 - 1"),
      (np.zeros((1, 4)), 2, -3, "axis: got -3 with x"),
      (np.zeros((1, 4)), 2, "a", "axis: got 'a'; expected an int"),
      (np.zeros((1, 4)), 2, None, "axis: got None; expected an int"),
      ({"labels": 3.0}, 2, 1, "x: got float; expected a jax or numpy array, with tokens along axi"),
      (np.zeros((1, 4)), "a", 1, "shards='a': expected at least 1"),
      (np.zeros((1, 4)), 2.0, 1, "shards=2.0: expected at least 1, an int"))
  def test_bad_axes_and_shards(self, x, shards, axis, message):
    for layout in token_order.TOKEN_ORDERS:
      for function in (to_layout, from_layout):
        with self.assertRaisesRegex(ValueError, message):
          function(x, layout, shards, axis)

  @parameterized.parameters(1, -2)
  def test_explicit_axes_shard_the_result_as_the_array(self, axis):
    mesh = jax.make_mesh((4, 2), ("sp", "tp"))
    sharding = jax.NamedSharding(mesh, jax.P(None, "sp", "tp"))
    x = np.arange(2 * 16 * 4).reshape(2, 16, 4).astype(np.float32)
    sharded = jax.device_put(x, sharding)
    weights = jax.device_put(np.arange(16)[:, None] / np.float32(8), jax.NamedSharding(
        mesh, jax.P("sp")))
    for run in (lambda f: f, jax.jit):
      got = run(lambda x: to_layout(x, "zigzag", 4, axis))(sharded)
      self.assertEqual(str(jax.typeof(got)), "float32[2,16@sp,4@tp]")
      np.testing.assert_array_equal(got, to_layout(x, "zigzag", 4))
      np.testing.assert_array_equal(run(lambda x: from_layout(x, "zigzag", 4, axis))(got), x)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(
        jnp.sin(to_layout(x, "zigzag", 4, axis)) * weights)))(sharded)
    back = from_layout(np.asarray(weights)[None], "zigzag", 4)
    np.testing.assert_allclose(gradient, np.cos(x) * back, rtol=1e-5)

  @parameterized.product(layout=token_order.TOKEN_ORDERS, gathers=(False, True), group=(1, 2))
  def test_tokens_that_attend_together_are_a_step_apart(self, layout, gathers, group):
    sequence = context_parallel.Sequence(
        layout, gathers, ("sp",), ("heads",) * (group - 1), 3, group, True, 70, 46)
    members = [[np.arange(3)]] if gathers else [[m] for m in range(3)]
    columns = [np.concatenate([sequence.columns(np.int32(m)) for m in np.ravel(x)])
               for x in members]
    steps = {n for x in (*columns, *map(sequence.rows, np.arange(3, dtype=np.int32)))
             for n in np.diff(x).tolist()}
    self.assertEqual(sequence.stride if sequence.attended_runs == (1, 1) else None,
                     steps.pop() if len(steps) == 1 else None)

  def test_causal_balance(self):
    """Compares visited blocks of 16 x 16 on the busiest shard with the mean."""
    length, block = 2048, 16
    own = length // SHARDS
    def imbalance(layout):
      sequence = context_parallel.Sequence(
          layout, False, ("sp",), (), SHARDS, 1, True, length, length)
      def visited(member, source):
        mask = masks.placed(masks.causal(), sequence.rows(np.int32(member))[None],
                            sequence.columns(np.int32(source))[None], sequence.size)
        kinds = block_map.host_kinds(mask, block_map.Sizes(own, own, block, block))
        return (kinds != block_map.EMPTY).sum()
      each = [sum(visited(m, s) for s in range(SHARDS)) for m in range(SHARDS)]
      return max(each) / np.mean(each)
    self.assertBetween(imbalance("contiguous"), 1.8, 1.95)
    self.assertLessEqual(imbalance("zigzag"), 1.02)
    self.assertLessEqual(imbalance("striped"), 1.02)


if __name__ == "__main__":
  absltest.main()
