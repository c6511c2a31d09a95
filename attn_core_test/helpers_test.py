# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions around an attention: masks and ropes of a configuration, remat, devices, shardings."""

import collections
import types

from absl.testing import absltest, parameterized
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

from attn_core import (AttentionMechanism, AttnConfig, AttnMaskDetail, OperationMetadata, Rope,
                       apply_qk_shardings, apply_qkv_shardings, attention, attention_arguments,
                       build_cache_pos, checkpoint_policy, create_mesh, default_key_value_sharding,
                       get_basic_causal_mask, get_basic_frequencies, get_basic_inv_frequencies,
                       get_basic_rope, get_fcm_mask, get_mask_details, get_optimal_config,
                       get_sharding_safely, granted_freq_max_position_embedding,
                       granted_mask_max_position_embedding, inverse_frequencies, masks,
                       match_partition_rules, repeat_key_value, rotary, rotary_table,
                       shard_attention_prod, tpu_version_check)
from attn_core.config import remat
from attn_core.masks import materialize
from attn_core.types import MaskOperands

jax.config.update("jax_num_cpu_devices", 8)

LAYERED = AttnConfig(
    num_hidden_layers=3, layer_types=("full_attention", "sliding_attention", "chunked_attention"),
    sliding_window=(2, 1), chunk_size=4, max_position_embeddings=9)


def visible(mask, length: int):
  """Returns a mask as a boolean array [T, S]."""
  arrays, structure = jax.tree.flatten(mask)
  shape = (1, 1, length, length)
  return np.broadcast_to(np.asarray(materialize.visible(
      structure, MaskOperands(tuple(map(jnp.asarray, arrays))), shape)), shape)[0, 0]


class MasksTest(parameterized.TestCase):

  def test_details_describe_visible_keys(self):
    t, s = np.mgrid[:9, :9]
    expected = [s <= t, (s <= t) & (t - s <= 2), (s <= t) & (t // 4 == s // 4)]
    details = get_mask_details(LAYERED)
    self.assertEqual([details[i].size for i in range(3)], [None, 3, 4])
    key = jnp.eye(9)[None, :, None]  # the value of key i is the i-th unit vector
    for layer, mask in enumerate(expected):
      np.testing.assert_array_equal(visible(details[layer].to_mask(), 9), mask)
      out = attention(jnp.zeros_like(key), key, key, **attention_arguments(LAYERED, layer))
      np.testing.assert_array_equal(out.attention_outputs[0, :, 0] > 0, mask)
    both = AttnMaskDetail("sliding_attention", False, (2, -1))
    self.assertIsNone(both.size)
    np.testing.assert_array_equal(visible(both.to_mask(), 9), t - s <= 2)
    self.assertEqual(both._replace(sliding_window=(2, 1)).size, 4)

  def test_alike_layers(self):
    for changes, kind in (({}, "full_attention"), ({"sliding_window": (3, 0)}, "sliding_attention"),
                          ({"chunk_size": 4}, "chunked_attention")):
      config = AttnConfig(causal=False, **changes)
      self.assertIsNone(get_mask_details(config))
      arguments = attention_arguments(config, 17)  # any layer, since all are alike
      self.assertEqual((arguments["sliding_window"], arguments["chunk_size"], arguments["causal"]),
                       (config.sliding_window, config.chunk_size, False), kind)

  def test_causal(self):
    self.assertEqual(get_basic_causal_mask(AttnConfig()), masks.causal())
    np.testing.assert_array_equal(get_basic_causal_mask(LAYERED, dense=True)[0, 0],
                                  np.tri(9, dtype=bool))

  def test_lengths(self):
    config = AttnConfig(max_position_embeddings=8, freq_max_position_embeddings=16)
    self.assertEqual((granted_freq_max_position_embedding(config),
                      granted_mask_max_position_embedding(config)), (16, 8))
    for granted in (granted_freq_max_position_embedding, granted_mask_max_position_embedding,
                    lambda config: get_basic_causal_mask(config, dense=True)):
      with self.assertRaisesRegex(ValueError, "max_position_embeddings"):
        granted(AttnConfig())

  def test_forgetful_mask(self):
    config, key = AttnConfig(fcm_min_ratio=0.2, fcm_max_ratio=0.6), jax.random.key(0)
    mask = get_fcm_mask(config, 64, 500, False, key)
    self.assertEqual((mask.shape, mask.dtype), ((64, 1, 1, 500), bool))
    self.assertTrue(mask[..., 0].all())
    dropped = 1 - np.asarray(mask, float).mean((1, 2, 3))  # every row has its own share
    self.assertBetween(dropped.min(), 0.12, 0.3)
    self.assertBetween(dropped.max(), 0.5, 0.68)
    self.assertBetween(dropped.mean(), 0.35, 0.45)
    np.testing.assert_array_equal(mask, get_fcm_mask(config, 64, 500, False, key))
    self.assertTrue((mask != get_fcm_mask(config, 64, 500, False, jax.random.key(1))).any())
    x = jnp.ones((2, 7, 1, 4))
    few = get_fcm_mask(config._replace(fcm_min_ratio=0.6), 2, 7, False, key)
    weights = attention(x, x, x, mask=few, return_weights=True).attention_weights
    np.testing.assert_array_equal(weights > 0, np.tri(7, dtype=bool) & np.asarray(few))
    self.assertIsNone(get_fcm_mask(config, 2, 7, True))
    self.assertIsNone(get_fcm_mask(AttnConfig(), 2, 7, False))
    with self.assertRaisesRegex(ValueError, "key: got None.*fcm_max_ratio=0.6"):
      get_fcm_mask(config, 2, 7, False)


class BasicRopeTest(absltest.TestCase):

  def test_are_those_of_the_configured_rope(self):
    rope = Rope("linear", factor=2.0, partial_rotary_factor=0.5)
    config = AttnConfig(hidden_size=64, num_attention_heads=4, rope=rope, max_position_embeddings=9)
    np.testing.assert_array_equal(get_basic_inv_frequencies(config), inverse_frequencies(rope, 16))
    np.testing.assert_array_equal(get_basic_inv_frequencies(config, rotary_dim=4, base=100.0),
                                  np.float32([0.5, 0.05]))
    self.assertEqual(get_basic_inv_frequencies(config, 32, partial_rotary_factor=0.25).shape, (4,))
    table = get_basic_frequencies(config)
    self.assertEqual((table.shape, table.dtype), ((9, 8), jnp.float32))
    cosine, sine = rotary_table(rope, np.arange(9), 16)
    np.testing.assert_array_equal(table, jnp.concatenate([cosine, sine], -1))
    with self.assertRaisesRegex(ValueError, "head_dim: got None"):
      get_basic_inv_frequencies(AttnConfig())

  def test_function(self):
    config = AttnConfig(rope=Rope(partial_rotary_factor=0.5))
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 20))
    positions = jnp.arange(5)[None]
    for rotary_dim, style, rope in (
        (None, None, config.rope), (6, True, Rope(partial_rotary_factor=0.3)),
        (6, False, Rope(partial_rotary_factor=0.3, interleaved=True))):
      turn = get_basic_rope(config, jnp.bfloat16, 20, rotary_dim, style)
      for mine, theirs in zip(turn(positions, x, x), rotary(x, x, positions, rope)):
        self.assertEqual(mine.dtype, jnp.bfloat16)
        np.testing.assert_array_equal(mine, theirs.astype(jnp.bfloat16))
    with self.assertRaisesRegex(ValueError, "head_dim: got 7"):
      get_basic_rope(config, jnp.float32, 20, rotary_dim=7)
    with self.assertRaisesRegex(ValueError, "rotary_dim: got 24; expected at most head_size=20"):
      get_basic_rope(config, jnp.float32, 20, rotary_dim=24)


class RematTest(parameterized.TestCase):

  def forwards(self, policy, mechanism="flash_attn2"):
    """Returns how often a layer's attention and its products run in a gradient."""
    def layer(w, x):
      hidden = checkpoint_name(jnp.einsum("btd,de->bte", x, w), "normed_input")
      heads = hidden.reshape(*hidden.shape[:2], 2, -1)
      return attention(heads, heads, heads, mechanism=mechanism).attention_outputs.sum()
    layer = layer if policy is None else jax.checkpoint(layer, policy=policy)
    jaxpr = jax.make_jaxpr(jax.grad(layer))(jnp.ones((8, 8)), jnp.ones((1, 4, 8)))
    found = collections.Counter()
    def visit(jaxpr):
      for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
          inner = getattr(inner, "jaxpr", inner)
          if hasattr(inner, "eqns"):
            visit(inner)
    visit(jaxpr.jaxpr)
    return found["attention_forward"], found["dot_general"]

  def test_saved_names_are_not_recomputed(self):
    named = lambda *names: checkpoint_policy("save_only_these_names", names)
    self.assertEqual(self.forwards(None), (1, 2))  # the product and its transpose
    self.assertEqual(self.forwards(checkpoint_policy("")), (1, 2))
    self.assertEqual(self.forwards(checkpoint_policy("everything_saveable")), (1, 2))
    self.assertEqual(self.forwards(checkpoint_policy("nothing_saveable")), (2, 3))
    self.assertEqual(self.forwards(named("attn_output")), (1, 3))
    self.assertEqual(self.forwards(named("attn_output", "attn_qkv")), (1, 2))
    self.assertEqual(self.forwards(named("attn_output", "normed_input")), (1, 2))
    self.assertEqual(self.forwards(named("normed_input")), (2, 2))
    self.assertEqual(self.forwards(checkpoint_policy("dots_saveable")), (2, 2))
    self.assertEqual(self.forwards(checkpoint_policy("checkpoint_dots")), (2, 2))
    self.assertEqual(self.forwards(checkpoint_policy(
        "save_any_names_but_these", ["attn_output"])), (2, 2))
    # Values without a name are saved, and so is the output before it gets its name.
    self.assertEqual(self.forwards(checkpoint_policy(
        "save_anything_except_these_names", ["attn_output"])), (1, 2))
    # The backward needs the lse too, which is why the policy of this library implies it.
    self.assertEqual(self.forwards(
        jax.checkpoint_policies.save_only_these_names("attn_output")), (2, 3))

  def test_mechanisms_name_their_residuals(self):
    residuals = {"attn_query", "attn_key", "attn_value", "attn_output", "attn_lse"}
    x = jnp.ones((1, 4, 2, 8))
    for mechanism, names in (("flash_attn2", residuals), ("vanilla", residuals | {"attn_weights"})):
      run = lambda x: attention(x, x, x, mechanism=mechanism, return_lse=True,
                                return_weights="attn_weights" in names)
      jaxpr = str(jax.make_jaxpr(jax.vjp, static_argnums=0)(run, x))
      self.assertEqual({name for name in remat.NAMES if f"name={name}" in jaxpr}, names, mechanism)
    for target, parts in (("attn_key_value", residuals - {"attn_query"}), ("attn_qkv", residuals)):
      self.assertContainsSubset(remat.IMPLIED[target], parts)
    kept = checkpoint_policy("save_only_these_names", (
        "attn_output", "attn_key_value", "attn_query"))
    self.assertEqual(self.forwards(kept), (1, 2))

  def test_every_name(self):
    for name in (*remat.POLICIES, *remat.TARGETED):
      targets = ("attn_output", "residual") if name in remat.TARGETED else None
      self.assertTrue(callable(checkpoint_policy(name, targets)), name)
    self.assertIsNone(checkpoint_policy("none"))
    x = jnp.ones((1, 4, 2, 8))
    for name in remat.POLICIES:
      loss = lambda x, name=name: attention(x, x, x, policy=name).attention_outputs.sum()
      self.assertTrue(jnp.isfinite(jax.eval_shape(jax.grad(loss), x).size))

  @parameterized.parameters(
      (("save_all",), "gradient_checkpointing: got 'save_all'.*'nothing_saveable'"),
      (("save_only_these_names",), "gradient_checkpointing_targets: got None.*attn_lse"),
      (("save_only_these_names", "attn_output"), "targets: got attn_output"),
      (("save_only_these_names", [1]), r"targets: got \[1\]"),
      (("nothing_saveable", ["attn_output"]), "None with gradient_checkpointing='nothing_"),
  )
  def test_bad_names(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      checkpoint_policy(*arguments)


class DevicesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("tpu", "TPU v2", "flash_attn2", "float32"), ("tpu", "TPU v3", "flash_attn2", "float32"),
      ("tpu", "TPU v4", "blocksparse", "bfloat16"),
      ("tpu", "TPU v5 lite", "blocksparse", "bfloat16"),
      ("tpu", "TPU7x", "blocksparse", "bfloat16"),
      ("gpu", "NVIDIA H100 80GB HBM3", "flash_attn2", "float16"),
      ("cuda", "Tesla V100", "flash_attn2", "float16"), ("cpu", "cpu", "flash_attn2", "bfloat16"))
  def test_table(self, platform, kind, mechanism, dtype):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    self.assertEqual(get_optimal_config(device), (AttentionMechanism(mechanism), dtype))

  def test_versions(self):
    def check(version, kind, platform="tpu"):
      return tpu_version_check(version, types.SimpleNamespace(platform=platform, device_kind=kind))
    for kind, versions in (("TPU v4", {"v4"}), ("TPU v5 lite", {"v5", "v5e"}),
                           ("TPU v5e", {"v5", "v5e"}), ("TPU v5p", {"v5", "v5p"}),
                           ("TPU v5", {"v5", "v5p"}), ("TPU v6 lite", {"v6", "v6e"}),
                           ("TPU7x", {"v7", "v7x"}), ("TPU v3", {"v3"})):
      known = ("v2", "v3", "v4", "v5", "v5e", "v5p", "v6", "v6e", "v7", "v7x")
      self.assertEqual({version for version in known if check(version, kind)}, versions, kind)
    self.assertFalse(check("v4", "v4", platform="gpu"))
    self.assertFalse(tpu_version_check())
    self.assertEqual(get_optimal_config().dtype, jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, "version: got 'v1'"):
      tpu_version_check("v1")
    for call in (get_optimal_config, lambda device: tpu_version_check("v4", device)):
      with self.assertRaisesRegex(ValueError, "device: got 'tpu'"):
        call("tpu")


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
                                                               "scale": jnp.ones(())}}]}
    rules = (("embed", P("tp", None)), (r"layers/\d+/q/kernel", P("dp", "tp")), (".*", P()))
    specs, drops = match_partition_rules(rules, parameters)
    self.assertEqual(specs, {"embed": P("tp", None), "layers": [{"q": {
        "kernel": P("dp", "tp"), "scale": P()}}]})
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
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 5, 6, 4))
    key, value = (jax.random.normal(k, (2, 5, 2, 4)) for k in keys[1:])
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
