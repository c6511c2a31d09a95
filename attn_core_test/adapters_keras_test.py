# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""keras_dot_product_attention: the operation, and layers of Keras 3 that use it, on JAX."""

import functools
import inspect
import os
from unittest import mock

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once, when it is imported

# pylint: disable=wrong-import-position
from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import OperationMetadata, create_mesh
from attn_core.adapters import keras_dot_product_attention
from attn_core_test import optional_deps

jax.config.update("jax_num_cpu_devices", 4)

B, T, H, D = 2, 6, 4, 8
FEATURES = H * D
SHARDED = functools.partial(keras_dot_product_attention,
                            metadata=OperationMetadata(mesh=create_mesh((2, 1, 1, 2, 1))))


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_close(found, expected, tolerance=5e-6):
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance),
               found, expected)


class KerasTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.keras = optional_deps.module(self, "keras", "adapters")
    self.assertEqual(self.keras.backend.backend(), "jax")

  def layer(self, kind="MultiHeadAttention", function=None):
    """Returns a built layer; with a function, one that overrides Keras's computation."""
    base = getattr(self.keras.layers, kind)
    heads = {"num_heads": H, "key_dim": D} if kind == "MultiHeadAttention" else {
        "num_query_heads": H, "num_key_value_heads": 2, "head_dim": D}
    class Attention(base):

      def _compute_attention(self, query, key, value, attention_mask=None, training=None,
                             return_attention_scores=False, use_causal_mask=False):
        del training, return_attention_scores
        if attention_mask is not None:
          attention_mask = attention_mask[..., None, :, :]
        return function(query, key, value, mask=attention_mask, is_causal=use_causal_mask), None

    self.keras.utils.set_random_seed(0)
    layer = base(**heads) if function is None else Attention(**heads)
    layer.build((B, T, FEATURES), (B, T, FEATURES))
    return layer

  def results(self, layer, x, weights=None, **options):
    """Returns the output of a layer, and the gradients of its weights and of its input."""
    weights = [variable.value for variable in layer.trainable_variables] if weights is None else (
        weights)
    def loss(weights, x):
      out, _ = layer.stateless_call(weights, [], x, x, **options)
      return (out**2).mean(), out
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, x)

  @parameterized.parameters(
      (keras_dot_product_attention, {}), (SHARDED, {"use_causal_mask": True}),
      (keras_dot_product_attention, {"attention_mask": np.arange(T)[None, None] < np.array(
          [[[3]], [[6]]])}))
  def test_layer(self, function, options):
    x = normal(B, T, FEATURES)
    assert_close(self.results(self.layer(function=function), x, **options),
                 self.results(self.layer(), x, **options))

  @parameterized.parameters((AxisType.Explicit, False), (AxisType.Auto, True))
  def test_layer_over_a_mesh(self, kind, has_heads):
    """Checks rows over one axis and, by the weights, heads over another.

    The output projection of Keras sums over all heads, and cannot name the sharding of its sum: it
    raises JAX's error where an Explicit axis shards heads.
    """
    x = normal(B, T, FEATURES)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    layer, options = self.layer(function=keras_dot_product_attention), {"use_causal_mask": True}
    want = self.results(self.layer(), x, **options)
    def place(variable):
      spec = P("model") if variable.ndim == 2 else P(None, "model")
      if "output" in variable.path:
        spec = P("model") if variable.ndim == 3 else P()
      return jax.device_put(variable.value, NamedSharding(mesh, spec if has_heads else P()))
    with jax.set_mesh(mesh):
      weights = [place(variable) for variable in layer.trainable_variables]
      rows = jax.device_put(x, NamedSharding(mesh, P("data")))
      got = self.results(layer, rows, weights, **options)
    assert_close(got, want)
    (_, out), (of_weights, of_x) = got
    self.assertEqual([x.sharding.spec[0] for x in (out, of_x)], ["data"] * 2)
    for one, other in zip(of_weights, weights, strict=True):
      self.assertTrue(one.sharding.is_equivalent_to(other.sharding, one.ndim))

  def test_layer_with_the_operation_of_keras_replaced(self):
    x = normal(B, T, FEATURES)
    expected = self.results(self.layer("GroupQueryAttention"), x, use_causal_mask=True)
    calls = []
    def counted(*args, **options):
      calls.append(args)
      return keras_dot_product_attention(*args, **options)
    with mock.patch.object(self.keras.src.backend.nn, "dot_product_attention", counted):
      found = self.results(self.layer("GroupQueryAttention"), x, use_causal_mask=True)
    self.assertNotEmpty(calls)
    assert_close(found, expected)

  def test_a_model_of_layers_trains(self):
    layer = self.layer(function=keras_dot_product_attention)
    inputs = self.keras.Input((T, FEATURES))
    model = self.keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    model.compile("adam", "mse")
    x = np.asarray(normal(8, T, FEATURES))
    losses = model.fit(x, x, batch_size=4, epochs=3, verbose=0).history["loss"]
    self.assertLess(losses[-1], losses[0])

  @parameterized.named_parameters(
      ("plain", {}), ("causal", {"is_causal": True}), ("scale", {"scale": 0.3}),
      ("mask", {"mask": np.tri(T, dtype=bool)[None, None]}),
      ("bias", {"bias": np.asarray(normal(1, H, T, T))}), ("no_flash", {"flash_attention": False}))
  def test_operation(self, options):
    arrays = [normal(B, T, H, D, seed=seed) for seed in range(3)]
    assert_close(keras_dot_product_attention(*arrays, **options),
                 self.keras.ops.dot_product_attention(*arrays, **options))

  def test_signature_is_that_of_keras(self):
    ours, theirs = (inspect.signature(f).parameters.values() for f in (
        keras_dot_product_attention, self.keras.ops.dot_product_attention))
    named = [p for p in ours if p.kind != inspect.Parameter.VAR_KEYWORD]
    self.assertEqual([(p.name, p.kind, p.default) for p in named],
                     [(p.name, p.kind, p.default) for p in theirs])


class CallTest(parameterized.TestCase):
  """The function alone, which needs no Keras."""

  def test_operands_of_several_dtypes(self):
    x = normal(B, T, H, D)
    out = keras_dot_product_attention(x.astype(jnp.bfloat16), x, x)
    self.assertEqual(out.dtype, jnp.float32)

  def test_soft_cap(self):
    x = normal(B, T, H, D)
    weights = jax.nn.softmax(2 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", x, x) * D**-0.5 / 2), -1)
    assert_close(keras_dot_product_attention(x, x, x, attn_logits_soft_cap=2.0),
                 jnp.einsum("bhts,bshd->bthd", weights, x))

  def test_flash_is_of_linear_memory(self):
    x = normal(B, T, H, D)
    assert_close(keras_dot_product_attention(x, x, x, flash_attention=True),
                 keras_dot_product_attention(x, x, x))
    with self.assertRaisesRegex(NotImplementedError, "optimized"):
      keras_dot_product_attention(x, x, x, flash_attention=True, mechanism="vanilla")

  @parameterized.named_parameters(
      ("cap_and_bias", NotImplementedError, {"attn_logits_soft_cap": 2.0, "bias": np.ones(T)},
       "attn_logits_soft_cap=2.0 with a bias"),
      ("optimized", TypeError, {"optimized": True}, "'optimized'; here it is 'flash_attention'"))
  def test_refuses(self, error, options, words):
    x = normal(B, T, H, D)
    with self.assertRaisesRegex(error, words):
      keras_dot_product_attention(x, x, x, **options)


if __name__ == "__main__":
  absltest.main()
