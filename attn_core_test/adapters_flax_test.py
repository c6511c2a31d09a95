# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""flax_attention_fn in the MultiHeadAttention of Flax NNX and Linen, against Flax's own."""

import functools
import inspect

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import OperationMetadata, create_mesh
from attn_core.adapters import flax_attention_fn
from attn_core_test import optional_deps

jax.config.update("jax_num_cpu_devices", 4)

B, T, H, FEATURES = 2, 6, 4, 16
MESH = create_mesh((2, 1, 1, 2, 1))
SHARDED = functools.partial(flax_attention_fn, metadata=OperationMetadata(mesh=MESH))
QUADRATIC = functools.partial(flax_attention_fn, mechanism="vanilla")


def mesh_of(kind):
  return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def normal(*shape, seed=0, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_close(found, expected, tolerance=5e-6):
  """Compares arrays; the tolerance is relative to the largest number of each, or to 1."""
  def compare(one, other):
    largest = max(1.0, float(abs(other).max()))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)
  jax.tree.map(compare, found, expected)


def place_cache(mesh, x):
  """Places keys and values of a cache by rows and heads, and everything else on all devices."""
  spec = P("data", None, "model") if x.ndim == 4 else P()
  return jax.device_put(x, NamedSharding(mesh, spec))


def assert_same_shardings(test, found, expected):
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    test.assertTrue(one.sharding.is_equivalent_to(other.sharding, one.ndim))


class NnxTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    optional_deps.module(self, "flax", "adapters")
    self.nnx = optional_deps.module(self, "flax.nnx", "adapters")

  def layer(self, attention_fn=None, **options):
    """Returns a layer with the same weights whatever the function."""
    chosen = {} if attention_fn is None else {"attention_fn": attention_fn}
    return self.nnx.MultiHeadAttention(
        num_heads=H, in_features=FEATURES, rngs=self.nnx.Rngs(0),
        **{"decode": False, "normalize_qk": True, **chosen, **options})

  def results(self, layer, x, **options):
    """Returns the output of a layer, and the gradients of its weights and of its input."""
    def loss(model, x):
      out = model(x, **options)
      return (out.astype(jnp.float32)**2).sum(), out
    (_, out), gradients = self.nnx.jit(self.nnx.value_and_grad(
        loss, argnums=(0, 1), has_aux=True))(layer, x)
    return out, jax.tree.leaves(gradients)

  @parameterized.parameters((flax_attention_fn, "plain"), (flax_attention_fn, "causal"),
                            (SHARDED, "causal"), (SHARDED, "mask"), (QUADRATIC, "mask"))
  def test_training(self, function, name):
    x = normal(B, T, FEATURES)
    options = {
        "plain": {}, "causal": {"is_causal": True},
        "mask": {"mask": self.nnx.make_causal_mask(jnp.ones((B, T)))}}[name]
    found = self.results(self.layer(function), x, **options)
    assert_close(found, self.results(self.layer(), x, **options), 1e-5)

  def test_grouped_heads_and_more_batch_dimensions(self):
    x = normal(2, 3, T, FEATURES)
    found = self.results(self.layer(flax_attention_fn, num_kv_heads=2), x, is_causal=True)
    assert_close(found, self.results(self.layer(num_kv_heads=2), x, is_causal=True), 1e-5)

  @parameterized.parameters(flax_attention_fn, SHARDED)
  def test_decoding(self, function):
    x = normal(B, T, FEATURES)
    ours, theirs = self.layer(function, decode=True), self.layer(decode=True)
    whole = self.layer(function)(x, is_causal=True)
    step = self.nnx.jit(lambda model, x: model(x))
    for layer in (ours, theirs):
      layer.init_cache(x.shape)
    for index in range(T):
      token = x[:, index:index + 1]
      found = step(ours, token)
      assert_close(found, step(theirs, token))
      assert_close(found, whole[:, index:index + 1])

  def placed(self, layer, mesh):
    """Returns (graph, weights, rest); heads lie over "model", rows of a cache over "data"."""
    def place(path, x):
      spec = P() if x.ndim == 1 else P("model") if "out" in str(path) else P(
          *[None] * (x.ndim - 2), "model")
      return jax.device_put(x, NamedSharding(mesh, spec))
    graph, weights, rest = self.nnx.split(layer, self.nnx.Param, ...)
    return (graph, jax.tree_util.tree_map_with_path(place, weights),
            jax.tree.map(functools.partial(place_cache, mesh), rest))

  @parameterized.product(kind=(AxisType.Explicit, AxisType.Auto),
                         function=(flax_attention_fn, QUADRATIC))
  def test_batch_and_heads_over_a_mesh(self, kind, function):
    """Checks rows over one axis and heads over another, which the weights bring."""
    x, mesh = normal(B, T, FEATURES), mesh_of(kind)
    def run(graph, weights, rest, x, **options):
      def loss(weights, x):
        layer = self.nnx.merge(graph, weights, rest)
        out = layer(x, is_causal=True, **options)
        return (out**2).sum(), out
      return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, x)
    want = run(*self.nnx.split(self.layer(), self.nnx.Param, ...), x)
    with jax.set_mesh(mesh):
      graph, weights, rest = self.placed(self.layer(function), mesh)
      got = run(graph, weights, rest, jax.device_put(x, NamedSharding(mesh, P("data"))),
                out_sharding=P("data") if kind == AxisType.Explicit else None)
    assert_close(got, want, 1e-5)
    (_, out), (of_weights, of_x) = got
    self.assertEqual([x.sharding.spec[0] for x in (out, of_x)], ["data"] * 2)
    assert_same_shardings(self, of_weights, weights)

  @parameterized.parameters(AxisType.Explicit, AxisType.Auto)
  def test_decoding_over_a_mesh(self, kind):
    x, mesh = normal(B, T, FEATURES), mesh_of(kind)
    want, layer = self.layer()(x, is_causal=True), self.layer(flax_attention_fn, decode=True)
    layer.init_cache(x.shape)
    sharding = P("data") if kind == AxisType.Explicit else None
    with jax.set_mesh(mesh):
      graph, weights, cache = self.placed(layer, mesh)
      @jax.jit
      def step(cache, x):
        layer = self.nnx.merge(graph, weights, cache)
        return layer(x, out_sharding=sharding), self.nnx.split(layer, self.nnx.Param, ...)[2]
      first = cache
      for index in range(T):
        token = jax.device_put(x[:, index:index + 1], NamedSharding(mesh, P("data")))
        found, cache = step(cache, token)
        assert_close(found, want[:, index:index + 1])
    assert_same_shardings(self, cache, first)

  @parameterized.parameters((jnp.bfloat16, jnp.bfloat16), (None, jnp.float32))
  def test_dtype(self, dtype, expected):
    x = normal(B, T, FEATURES)
    found = self.layer(flax_attention_fn, dtype=dtype)(x)
    self.assertEqual(found.dtype, expected)
    assert_close(found.astype(jnp.float32), self.layer(dtype=dtype)(x).astype(jnp.float32), 0.02)

  def test_dropout(self):
    x = normal(B, T, FEATURES)
    layer = self.layer(flax_attention_fn, dropout_rate=0.5)
    dropped = [layer(x, deterministic=False, rngs=self.nnx.Rngs(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(*dropped[:2])
    self.assertGreater(abs(dropped[0] - dropped[2]).max(), 0.01)
    assert_close(layer(x, deterministic=True), self.layer()(x))

  def test_dropout_has_the_mean_of_the_weights(self):
    """Output rows are linear in the weights that remain, so their mean is that without dropout."""
    query, value = jnp.zeros((64, 64, 1, 8)), jnp.ones((64, 64, 1, 8))
    out = flax_attention_fn(query, query, value, dropout_rng=jax.random.key(0), dropout_rate=0.25)
    self.assertAlmostEqual(float(out.mean()), 1.0, delta=0.01)
    self.assertGreater(float(out.std()), 0.05)

  @parameterized.parameters(0.0, 0.5)
  def test_sow_weights(self, rate):
    """The weights are those before dropout, as Flax stores them."""
    x, stored = normal(B, T, FEATURES), []
    for function in (flax_attention_fn, None):
      layer = self.layer(function, dropout_rate=rate)
      layer(x, sow_weights=True, is_causal=True, deterministic=rate == 0, rngs=self.nnx.Rngs(1))
      stored.append(self.nnx.pop(layer, self.nnx.Intermediate))
    (ours,), (theirs,) = map(jax.tree.leaves, stored)
    assert_close(ours, theirs)

  def test_a_query_that_sees_nothing(self):
    x = normal(B, T, FEATURES)
    layer = self.layer(flax_attention_fn, use_bias=False)
    out = layer(x, mask=jnp.zeros((B, 1, T, T)).at[:, :, 1:].set(1.0))
    np.testing.assert_array_equal(out[:, 0], np.zeros((B, FEATURES)))

  def test_parameters_are_those_of_flax(self):
    ours = inspect.signature(flax_attention_fn).parameters
    theirs = inspect.signature(self.nnx.dot_product_attention).parameters
    for name in set(theirs) - {"promote_dtype"}:
      self.assertEqual((ours[name].kind, ours[name].default),
                       (theirs[name].kind, theirs[name].default), name)
    self.assertEqual(list(ours)[:13], [name for name in theirs if name != "promote_dtype"])


class LinenTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    optional_deps.module(self, "flax", "adapters")
    self.linen = optional_deps.module(self, "flax.linen", "adapters")

  def layer(self, attention_fn=None, **options):
    chosen = {} if attention_fn is None else {"attention_fn": attention_fn}
    return self.linen.MultiHeadDotProductAttention(num_heads=H, **chosen, **options)

  @parameterized.parameters(flax_attention_fn, SHARDED)
  def test_training(self, function):
    x, mask = normal(B, T, FEATURES), self.linen.make_causal_mask(jnp.ones((B, T)))
    variables = self.layer().init(jax.random.key(0), x)
    def results(layer):
      loss = lambda variables, x: (layer.apply(variables, x, mask=mask)**2).sum()
      return jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x)
    assert_close(results(self.layer(function)), results(self.layer()), 1e-5)

  def test_decoding(self):
    x = normal(B, T, FEATURES)
    ours, theirs = self.layer(flax_attention_fn, decode=True), self.layer(decode=True)
    variables = theirs.init(jax.random.key(0), x)
    caches = [variables["cache"]] * 2
    for index in range(T):
      found = []
      for number, layer in enumerate((ours, theirs)):
        out, state = layer.apply({"params": variables["params"], "cache": caches[number]},
                                 x[:, index:index + 1], mutable=["cache"])
        caches[number] = state["cache"]
        found.append(out)
      assert_close(*found)

  def on_a_mesh(self, kind, function, **options):
    """Returns a mesh, a layer whose heads it may shard, and a function that places parameters.

    The output projection sums over all heads: with Explicit axes its product has to name the
    sharding of the sum.
    """
    if kind == AxisType.Explicit:
      options["out_dot_general"] = functools.partial(jax.lax.dot_general, out_sharding=P("data"))
    mesh = mesh_of(kind)
    def place(path, x):
      spec = P("model") if x.ndim == 2 else P(None, "model")
      if "out" in str(path):
        spec = P("model") if x.ndim == 3 else P()
      return jax.device_put(x, NamedSharding(mesh, spec))
    return (mesh, self.layer(function, **options),
            functools.partial(jax.tree_util.tree_map_with_path, place))

  @parameterized.product(kind=(AxisType.Explicit, AxisType.Auto),
                         function=(flax_attention_fn, QUADRATIC))
  def test_batch_and_heads_over_a_mesh(self, kind, function):
    x, mask = normal(B, T, FEATURES), self.linen.make_causal_mask(jnp.ones((B, T)))
    mesh, layer, place = self.on_a_mesh(kind, function)
    variables = self.layer().init(jax.random.key(0), x)
    def results(layer, variables, x, mask):
      def loss(variables, x):
        out = layer.apply(variables, x, mask=mask)
        return (out**2).sum(), out
      return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)
    want = results(self.layer(), variables, x, mask)
    with jax.set_mesh(mesh):
      rows = NamedSharding(mesh, P("data"))
      placed = place(variables)
      got = results(layer, placed, jax.device_put(x, rows), jax.device_put(mask, rows))
    assert_close(got, want, 1e-5)
    (_, out), (of_variables, of_x) = got
    self.assertEqual([x.sharding.spec[0] for x in (out, of_x)], ["data"] * 2)
    assert_same_shardings(self, of_variables, placed)

  @parameterized.parameters(AxisType.Explicit, AxisType.Auto)
  def test_decoding_over_a_mesh(self, kind):
    """Checks a cache whose rows and heads are sharded over axes that no metadata names."""
    x = normal(B, T, FEATURES)
    variables = self.layer(decode=True).init(jax.random.key(0), x)
    mesh, layer, place = self.on_a_mesh(kind, flax_attention_fn, decode=True)
    want = self.layer().apply({"params": variables["params"]}, x,
                              mask=self.linen.make_causal_mask(jnp.ones((B, T))))
    with jax.set_mesh(mesh):
      cache = first = jax.tree.map(functools.partial(place_cache, mesh), variables["cache"])
      params = place(variables["params"])
      step = jax.jit(lambda cache, x: layer.apply(
          {"params": params, "cache": cache}, x, mutable=["cache"]))
      for index in range(T):
        token = jax.device_put(x[:, index:index + 1], NamedSharding(mesh, P("data")))
        found, state = step(cache, token)
        cache = state["cache"]
        assert_close(found, want[:, index:index + 1])
    assert_same_shardings(self, cache, first)

  def test_dropout_dtype_and_softmax(self):
    x = normal(B, T, FEATURES)
    layer = self.layer(flax_attention_fn, dropout_rate=0.5, deterministic=False,
                       dtype=jnp.bfloat16, force_fp32_for_softmax=True)
    variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    one, other = (layer.apply(variables, x, rngs={"dropout": jax.random.key(seed)})
                  for seed in (1, 2))
    self.assertEqual(one.dtype, jnp.bfloat16)
    self.assertGreater(abs(one - other).max(), 0.01)

  def test_sow_weights(self):
    x, stored = normal(B, T, FEATURES), []
    variables = self.layer().init(jax.random.key(0), x)
    for function in (flax_attention_fn, None):
      stored.append(self.layer(function).apply(
          variables, x, sow_weights=True, mutable=["intermediates"])[1])
    assert_close(*stored)

  def test_products_of_the_layer_are_refused(self):
    x = normal(B, T, FEATURES)
    layer = self.layer(flax_attention_fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum,
                       attn_weights_value_einsum_cls=lambda: jnp.einsum)
    with self.assertRaisesRegex(NotImplementedError, "qk_attn_weights_einsum: got a function"):
      layer.init(jax.random.key(0), x)


class CallTest(parameterized.TestCase):
  """The function alone, which needs no Flax."""

  @parameterized.named_parameters(
      ("positions", NotImplementedError, {"input_positions": jnp.arange(T)}, "rotated"),
      ("products", NotImplementedError, {"einsum_dot_general": print}, "einsum_dot_general: got"),
      ("module", NotImplementedError, {"module": object(), "mechanism": "blockwise"},
       "return_weights"),
      ("precision", NotImplementedError, {"precision": "highest", "mechanism": "sdpa"},
       "precision=highest"),
      ("no_key", ValueError, {"dropout_rate": 0.5}, "dropout_rng"),
      ("dtype", TypeError, {"compute_dtype": jnp.bfloat16}, "'compute_dtype'; here it is 'dtype'"))
  def test_refuses(self, error, options, words):
    x = normal(B, T, H, 8)
    with self.assertRaisesRegex(error, words):
      flax_attention_fn(x, x, x, **options)

  def test_a_bias(self):
    x, bias = normal(B, T, H, 8), normal(H, T, T, seed=1)
    assert_close(flax_attention_fn(x, x, x, bias), jax.nn.dot_product_attention(x, x, x, bias))

  def test_operands_of_several_dtypes(self):
    x = normal(B, T, H, 8)
    out = flax_attention_fn(x.astype(jnp.bfloat16), x, x)
    self.assertEqual(out.dtype, jnp.float32)
    self.assertEqual(flax_attention_fn(x, x, x, dtype=jnp.bfloat16).dtype, jnp.bfloat16)

  def test_metadata_does_not_switch_dropout_on(self):
    x = normal(B, T, H, 8)
    metadata = OperationMetadata(dropout_prob=0.5)
    assert_close(flax_attention_fn(x, x, x, dropout_rng=jax.random.key(0), metadata=metadata),
                 flax_attention_fn(x, x, x))


if __name__ == "__main__":
  absltest.main()
