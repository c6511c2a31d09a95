# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""equinox_attention over the layers of Equinox, against `equinox.nn.MultiheadAttention`."""

import functools
import types

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import OperationMetadata, create_mesh, masks
from attn_core.adapters import equinox_attention
from attn_core_test import optional_deps

jax.config.update("jax_num_cpu_devices", 4)

B, T, S, H, FEATURES = 2, 5, 7, 4, 16


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_close(found, expected, tolerance=5e-6):
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance),
               found, expected)


class LayerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.equinox = optional_deps.module(self, "equinox", "adapters")

  def layer(self, **options):
    return self.equinox.nn.MultiheadAttention(
        H, FEATURES, key=jax.random.key(0), **{"use_output_bias": True, **options})

  @parameterized.named_parameters(
      ("plain", {}), ("mask", {"mask": np.tri(T, S, dtype=bool)}),
      ("mask_of_floats", {"mask": np.tri(T, S, dtype=np.float32)}),
      ("mask_of_heads", {"mask": np.array(normal(H, T, S) < 1) | (np.arange(S) == 0)}),
      ("heads", {"process_heads": lambda q, k, v: (2 * q, k + 1, v)}))
  def test_values_and_gradients(self, options):
    layer, arrays = self.layer(), (normal(T, FEATURES), normal(S, FEATURES), normal(S, FEATURES))
    theirs = dict(options)
    if "mask" in theirs:
      theirs["mask"] = jnp.asarray(theirs["mask"], bool)
    def results(function, options):
      loss = lambda layer, *x: (function(layer, *x, **options)**2).mean()
      return jax.tree.leaves(self.equinox.filter_jit(self.equinox.filter_value_and_grad(loss))(
          layer, *arrays))
    assert_close(results(equinox_attention, options),
                 results(lambda layer, *x, **o: layer(*x, **o), theirs))

  def test_widths_of_their_own(self):
    layer = self.layer(qk_size=6, vo_size=10, key_size=8, value_size=12, output_size=5,
                       use_query_bias=True, use_key_bias=True, use_value_bias=True)
    arrays = normal(T, FEATURES), normal(S, 8), normal(S, 12)
    assert_close(equinox_attention(layer, *arrays), layer(*arrays))

  def test_a_subclass_in_a_batch(self):
    class Attention(self.equinox.nn.MultiheadAttention):

      def __call__(self, *args, **options):
        return equinox_attention(self, *args, mechanism="blockwise", **options)

    ours = Attention(H, FEATURES, key=jax.random.key(0))
    theirs = self.equinox.nn.MultiheadAttention(H, FEATURES, key=jax.random.key(0))
    x, mask = normal(B, T, FEATURES), jnp.tri(T, dtype=bool)
    batched = lambda layer: jax.vmap(lambda x: layer(x, x, x, mask))(x)
    assert_close(batched(ours), batched(theirs))

  def test_sharded(self):
    metadata = OperationMetadata(mesh=create_mesh((1, 1, 1, 4, 1)))
    layer, x = self.layer(), normal(T, FEATURES)
    arrays, static = self.equinox.partition(layer, self.equinox.is_array)
    found = jax.jit(lambda arrays, x: equinox_attention(
        self.equinox.combine(arrays, static), x, x, x, metadata=metadata))(arrays, x)
    assert_close(found, layer(x, x, x))

  @parameterized.product(kind=(AxisType.Explicit, AxisType.Auto), mechanism=("auto", "vanilla"))
  def test_batch_and_heads_over_a_mesh(self, kind, mechanism):
    """Checks rows, which vmap maps, over one axis and heads, by the weights, over another.

    The output projection sums over all heads. Where both it and the heads are sharded by an
    Explicit axis, Equinox's own layer raises JAX's error; here its weights are on all devices then.
    """
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    layer = self.layer()
    arrays, static = self.equinox.partition(layer, self.equinox.is_array)
    def results(function, arrays, x, queries=T):
      def loss(arrays, x):
        layer = self.equinox.combine(arrays, static)
        out = jax.vmap(lambda x: function(layer, x[-queries:], x, x))(x)
        return (out**2).sum(), out
      return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, x)
    def place(path, weights):
      spec = P("model") if weights.ndim == 2 else P()
      if "output_proj" in str(path):
        spec = P(None, "model") if weights.ndim == 2 and kind == AxisType.Auto else P()
      return jax.device_put(weights, NamedSharding(mesh, spec))
    x = normal(B, T, FEATURES)
    ours = functools.partial(equinox_attention, mechanism=mechanism)
    theirs = lambda layer, *x: layer(*x)
    for queries in (T, 1):
      want = results(theirs, arrays, x, queries)
      with jax.set_mesh(mesh):
        placed = jax.tree_util.tree_map_with_path(place, arrays)
        got = results(ours, placed, jax.device_put(x, NamedSharding(mesh, P("data"))), queries)
      assert_close(got, want, 1e-4)
      (_, out), gradients = got
      self.assertEqual(out.sharding.spec[0], "data")
      for one, other in zip(jax.tree.leaves(gradients[0]), jax.tree.leaves(placed)):
        self.assertTrue(one.sharding.is_equivalent_to(other.sharding, one.ndim))

  def test_dropout(self):
    layer, x = self.layer(dropout_p=0.5), normal(T, FEATURES)
    one, same, other = (equinox_attention(layer, x, x, x, key=jax.random.key(seed))
                        for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    self.assertGreater(abs(one - other).max(), 0.01)
    whole = layer(x, x, x, inference=True)
    assert_close(equinox_attention(layer, x, x, x, inference=True), whole)
    assert_close(equinox_attention(self.equinox.nn.inference_mode(layer), x, x, x), whole)
    keys = jax.random.split(jax.random.key(0), B)
    rows = jax.vmap(lambda key: equinox_attention(layer, x, x, x, key=key))(keys)
    assert_close(rows[1], equinox_attention(layer, x, x, x, key=keys[1]))

  def test_a_dropout_key_is_required(self):
    layer, x = self.layer(dropout_p=0.5), normal(T, FEATURES)
    with self.assertRaisesRegex(ValueError, "key: got None with layer.dropout.p=0.5.*inference"):
      equinox_attention(layer, x, x, x)

  def test_process_heads_keeps_shapes(self):
    layer, x = self.layer(), normal(T, FEATURES)
    with self.assertRaisesRegex(ValueError, "process_heads: got heads of shapes"):
      equinox_attention(layer, x, x, x, process_heads=lambda q, k, v: (q[:2], k, v))


class FieldsTest(absltest.TestCase):
  """An object with the fields of the layer, which needs no Equinox."""

  def setUp(self):
    super().setUp()
    identity = lambda x: x
    self.layer = types.SimpleNamespace(
        query_proj=identity, key_proj=identity, value_proj=identity, output_proj=identity,
        dropout=types.SimpleNamespace(p=0.0, inference=False), num_heads=H)

  def test_values(self):
    x = normal(T, FEATURES)
    heads = x.reshape(T, H, -1)
    assert_close(equinox_attention(self.layer, x, x, x),
                 jax.nn.dot_product_attention(heads, heads, heads).reshape(T, FEATURES))
    assert_close(equinox_attention(self.layer, x, x, x, masks.causal()),
                 jax.nn.dot_product_attention(heads, heads, heads, is_causal=True).reshape(
                     T, FEATURES))

  def test_a_batch_dimension_is_refused(self):
    x = normal(B, T, FEATURES)
    with self.assertRaisesRegex(ValueError, r"query: got float32\[2, 5, 16\].*jax.vmap"):
      equinox_attention(self.layer, x, x, x)

  def test_an_argument_of_the_layer_is_not_an_option(self):
    x = normal(T, FEATURES)
    with self.assertRaisesRegex(TypeError, "'dropout_rng'; here it is 'key'"):
      equinox_attention(self.layer, x, x, x, dropout_rng=jax.random.key(0))


if __name__ == "__main__":
  absltest.main()
