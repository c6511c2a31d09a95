# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharding constraints, partition rules, repeated key heads, positions of a cache."""

import types

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (OperationMetadata, PartitionAxis, apply_qk_shardings, apply_qkv_shardings,
                       attention, build_cache_pos, create_mesh, default_key_value_sharding,
                       get_sharding_safely, match_partition_rules, repeat_key_value,
                       shard_attention_prod)

jax.config.update("jax_num_cpu_devices", 8)


class ShardingsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = create_mesh((2, 1, 1, 2, 2))
    self.metadata = OperationMetadata(mesh=self.mesh)
    self.x, self.few = jnp.ones((4, 6, 2, 8)), jnp.ones((4, 6, 1, 8))

  def test_constraints(self):
    def run(q, k, v):
      return (*apply_qkv_shardings(q, k, v, self.metadata),
              shard_attention_prod(q, self.metadata),
              shard_attention_prod(q.reshape(4, 6, 16), self.metadata))
    query, key, value, output, merged = jax.jit(run)(self.x, self.few, self.x)
    sharded = NamedSharding(self.mesh, P(("fsdp", "dp"), "sp", "tp", None))
    for x in (query, value, output):
      self.assertTrue(x.sharding.is_equivalent_to(sharded, 4))
    self.assertTrue(key.sharding.is_equivalent_to(NamedSharding(  # one head cannot be divided
        self.mesh, P(("fsdp", "dp"), "sp", None, None)), 4))
    self.assertTrue(merged.sharding.is_equivalent_to(NamedSharding(
        self.mesh, P(("fsdp", "dp"), "sp", "tp")), 3))
    for mine, theirs in zip(apply_qk_shardings(self.x, self.few, self.metadata), (query, key)):
      self.assertTrue(mine.sharding.is_equivalent_to(theirs.sharding, 4))
    decoded, _ = apply_qk_shardings(self.x, self.few, self.metadata, "__autoregressive__")
    self.assertTrue(decoded.sharding.is_equivalent_to(NamedSharding(
        self.mesh, P(("fsdp", "dp"), None, "tp", None)), 4))

  def test_keys_and_values_have_their_own_axes(self):
    """Tokens of keys stay sharded where queries are decoded; heads may have another mesh axis."""
    axis = PartitionAxis(kv_head_axis=None, key_sequence_axis=None)
    metadata = OperationMetadata(mesh=self.mesh, partition_axis=axis)
    for changed, mode in ((metadata, "__train__"), (self.metadata, "__autoregressive__")):
      rules = changed.get_shardings(mode)
      self.assertNotEqual(rules.query, rules.key)
      query, key = apply_qk_shardings(self.x, self.x, changed, mode)
      both = apply_qkv_shardings(self.x, self.x, self.x, changed, mode)
      for x, spec in ((query, rules.query), (key, rules.key), *zip(
          both, (rules.query, rules.key, rules.value))):
        self.assertTrue(x.sharding.is_equivalent_to(NamedSharding(self.mesh, spec), 4))

  def test_without_a_mesh_arrays_are_unchanged(self):
    alone = OperationMetadata()
    self.assertIs(apply_qk_shardings(self.x, self.few, alone)[1], self.few)
    self.assertIs(shard_attention_prod(self.x, alone), self.x)
    self.assertIsNone(default_key_value_sharding(alone))
    self.assertEqual(get_sharding_safely(self.x, alone), P())

  def test_specs(self):
    default = default_key_value_sharding(self.metadata)
    self.assertEqual(default, NamedSharding(self.mesh, P(("fsdp", "dp"), "sp", "tp", None)))
    self.assertEqual(get_sharding_safely(self.x, self.metadata), default.spec)
    placed = jax.device_put(self.x, NamedSharding(self.mesh, P("dp", None, "tp", None)))
    self.assertEqual(tuple(get_sharding_safely(placed, self.metadata))[:3], ("dp", None, "tp"))
    seen = []
    jax.jit(lambda x: seen.append(get_sharding_safely(x, self.metadata)) or x)(placed)
    self.assertEqual(seen, [default.spec])  # on Auto axes, which the type of an array does not show
    narrow = OperationMetadata(mesh=create_mesh((8, 1), ("dp", "tp")))
    self.assertEqual(default_key_value_sharding(narrow).spec, P("dp", None, "tp", None))

  def test_bad_arrays(self):
    for call, message in (
        (lambda: shard_attention_prod(jnp.ones((2, 3)), self.metadata), "attn_output: got float32"),
        (lambda: get_sharding_safely("x", self.metadata), "tensor: got str"),
        (lambda: get_sharding_safely(self.x, None), "metadata: got None"),
        (lambda: default_key_value_sharding(None), "metadata: got None"),
        (lambda: shard_attention_prod(self.x, None), "metadata: got None"),
        (lambda: apply_qk_shardings(self.x, self.x, None), "metadata: got None"),
        (lambda: apply_qk_shardings(None, self.x, self.metadata), "query: got NoneType"),
        (lambda: apply_qkv_shardings(self.x, self.x, None, self.metadata), "value: got NoneType"),
        (lambda: apply_qk_shardings(self.x, self.x, self.metadata, "train"), "mode='train'")):
      with self.assertRaisesRegex(ValueError, message):
        call()

  def test_partition_rules(self):
    parameters = {"embed": jnp.ones((6, 4)), "layers": [{"q": {"kernel": jnp.ones((4, 3)),
                                                               "scale": jnp.ones(()),
                                                               "one": jnp.ones((1, 1))}}]}
    rules = (("embed", P("tp", None)), (r"\d+/q/ker", P("dp", "tp")), ("scale|one", P("tp")),
             (".*", P()))
    specs, drops = match_partition_rules(rules, parameters)
    self.assertEqual(specs, {"embed": P("tp", None), "layers": [{"q": {
        "kernel": P("dp", "tp"), "scale": P(), "one": P()}}]})  # one element is not sharded
    self.assertEmpty(drops)
    specs, drops = match_partition_rules(rules, parameters, self.mesh)
    self.assertEqual(specs["layers"][0]["q"]["kernel"], P("dp", None))
    self.assertEqual([(d.tensor, d.axis) for d in drops], [("layers/0/q/kernel", "tp")])
    shapes = jax.eval_shape(lambda: parameters)
    self.assertEqual(match_partition_rules(rules, shapes, self.mesh).specs, specs)
    for bad, message in ((rules[:1], "'layers/0/q/kernel' of shape .4, 3."),
                         ((("(", P()),), "regular expression"),
                         ((("embed", "tp"), (".*", P())), "spec 'tp' .* expected a PartitionSpec"),
                         ((("embed", None), (".*", P())), "spec None for the pattern 'embed'"),
                         (3, "rules=3: expected pairs"),
                         ((("embed", P(None, None, "tp")), (".*", P())), "spec of 3 dimensions")):
      with self.assertRaisesRegex(ValueError, message):
        match_partition_rules(bad, parameters)


class ArraysTest(absltest.TestCase):

  def test_repeated_heads_change_nothing(self):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 5, heads, 4)), jnp.float32)
                         for heads in (6, 2, 2))
    repeated = repeat_key_value(key, value, 3)
    self.assertEqual([x.shape for x in repeated], [(2, 5, 6, 4)] * 2)
    np.testing.assert_array_equal(repeated[0][:, :, 4], key[:, :, 1])
    np.testing.assert_allclose(attention(query, *repeated).attention_outputs,
                               attention(query, key, value).attention_outputs, atol=1e-6)
    with self.assertRaisesRegex(ValueError, "num_reps: got 0"):
      repeat_key_value(key, value, 0)
    for bad in (value[0], value[:, :4], value[:, :, :1]):
      with self.assertRaisesRegex(ValueError, "value: got float32"):
        repeat_key_value(key, bad, 2)

  def test_cache_positions(self):
    left = np.tril(np.ones((5, 5), bool))[None, None] & np.array(
      [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)[:, None, None, :]
    np.testing.assert_array_equal(build_cache_pos(left, "__train__"),
                                  [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    cache = types.SimpleNamespace(indexs=jnp.array([7, 0], jnp.int32))
    one = np.ones((2, 1, 1, 9), bool)
    got = build_cache_pos(one, "__autoregressive__", cache)
    np.testing.assert_array_equal(got, [[7], [0]])
    self.assertEqual(got.dtype, jnp.int32)
    for arguments, message in (((one, "decode"), "mode: got 'decode'"),
                               ((one[0], "__train__"), "attention_mask: got bool"),
                               ((one.astype(int), "__train__"), "attention_mask: got int64"),
                               ((one, "__train__", 3), "cache_view: got 3; expected a cache"),
                               ((one[:1].repeat(3, 0), "__train__", cache),
                                r"cache_view: got int32\[2\]; .*int32 \[3\]")):
      with self.assertRaisesRegex(ValueError, message):
        build_cache_pos(*arguments)


if __name__ == "__main__":
  absltest.main()
