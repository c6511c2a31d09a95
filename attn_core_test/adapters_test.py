# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""attn_core.adapters without another library than JAX: `jax.nn`, tokamax, options and errors.

The cases of `jax.nn` are those of JAX's own tests of its function (tests/nn_test.py), except for
the ones that look for calls of cuDNN.
"""

import functools
import inspect
import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from attn_core import MaskInfo, OperationMetadata, adapters, create_mesh, masks
from attn_core.adapters import dot_product_attention, tokamax_dot_product_attention
from attn_core_test import optional_deps

jax.config.update("jax_num_cpu_devices", 4)

B, T, S, H, K, D = 2, 6, 9, 4, 2, 8


def normal(*shapes, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)  # jax.random would compile a program for each shape
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def operands(*batch, queries=T, keys=S):
  return normal((*batch, queries, H, D), (*batch, keys, K, D), (*batch, keys, K, D))


def assert_close(found, expected, tolerance=2e-6):
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance),
               found, expected)


# name -> keyword arguments that leave every query a visible key.
CASES = {
    "plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3},
    "scale_array": {"scale": np.float32(0.3)},
    "window": {"local_window_size": (2, 1)}, "window_int": {"local_window_size": 2},
    "window_causal": {"local_window_size": (3, 2), "is_causal": True},
    "window_behind": {"local_window_size": (-1, 4)},
    "mask_keys": {"mask": np.arange(S) < 5}, "mask_rank_2": {"mask": np.tri(T, S, dtype=bool)},
    "mask_rank_3": {"mask": np.tri(T, S, dtype=bool)[None]},
    "mask_batch": {"mask": np.arange(S) < np.array([3, 8]).reshape(2, 1, 1, 1)},
    "mask_heads": {"mask": np.arange(S) < np.array([3, 8, 1, 9]).reshape(1, 4, 1, 1)},
    "mask_causal": {"mask": np.arange(S) != 1, "is_causal": True},
    "bias": {"bias": normal((B, H, T, S))[0]}, "bias_keys": {"bias": normal((S,))[0]},
    "bias_rows": {"bias": normal((T, 1))[0]}, "bias_heads": {"bias": normal((H, 1, 1))[0]},
    "bias_16_bits": {"bias": normal((1, H, T, S), dtype=jnp.bfloat16)[0]},
    "bias_ints": {"bias": np.arange(S)},
    "bias_causal": {"bias": normal((1, H, T, S))[0], "is_causal": True},
    "key_lengths": {"key_value_seq_lengths": jnp.array([4, 9])},
    "lengths": {"query_seq_lengths": jnp.array([3, 6]), "key_value_seq_lengths": jnp.array([4, 9])},
    "query_lengths": {"query_seq_lengths": jnp.array([3, 6])},
    "lengths_causal": {"query_seq_lengths": jnp.array([3, 6]), "is_causal": True},
    "lengths_mask": {"mask": np.tri(T, S, dtype=bool),
                     "key_value_seq_lengths": jnp.array([4, 9])}}


class JaxNnTest(parameterized.TestCase):

  def test_signature_is_that_of_jax(self):
    ours, theirs = (inspect.signature(f).parameters.values()
                    for f in (dot_product_attention, jax.nn.dot_product_attention))
    named = [p for p in ours if p.kind != inspect.Parameter.VAR_KEYWORD]
    self.assertEqual([(p.name, p.kind, p.default) for p in named],
                     [(p.name, p.kind, p.default) for p in theirs])

  def test_every_case(self):
    """In one program, which compiles faster than many."""
    arrays = operands(B)
    found, expected = (jax.jit(lambda arrays, run=run: {
        name: run(*arrays, **options) for name, options in CASES.items()})(arrays)
                       for run in (dot_product_attention, jax.nn.dot_product_attention))
    for name in CASES:
      first = int(name == "window_behind")  # row 0 sees nothing
      with self.subTest(name):
        assert_close(found[name][:, first:], expected[name][:, first:])

  @parameterized.parameters(*itertools.product(
      ("lengths", "bias_causal", "window_causal"), ("xla", "flash_attn2")))
  def test_values(self, name, implementation):
    arrays, options = operands(B), CASES[name]
    assert_close(dot_product_attention(*arrays, implementation=implementation, **options),
                 jax.nn.dot_product_attention(*arrays, **options))

  @parameterized.parameters("causal", "lengths", "bias")
  def test_residual(self, name):
    arrays = operands(B)
    found = dot_product_attention(*arrays, return_residual=True, **CASES[name])
    expected = jax.nn.dot_product_attention(*arrays, return_residual=True, **CASES[name])
    if name == "lengths":
      found, expected = ((out, lse[:, :3]) for out, lse in (found, expected))
    assert_close(found, expected)

  @parameterized.parameters((jnp.bfloat16, 1, None), (jnp.bfloat16, 4, "xla"),
                            (jnp.float16, 2, None), (jnp.float16, 4, "xla"))
  def test_grouped_heads_and_gradients_in_16_bits(self, dtype, groups, implementation):
    query, key, value, gradient, of_residual = normal(
        (2, 32, 4, 16), (2, 32, 4 // groups, 16), (2, 32, 4 // groups, 16), (2, 32, 4, 16),
        (2, 32, 4), dtype=dtype)
    written = [jnp.repeat(x, groups, axis=2) for x in (key, value)]
    with_residual = functools.partial(
        dot_product_attention, implementation=implementation, return_residual=True)
    found, pull = jax.vjp(with_residual, query, key, value)
    expected, reference = jax.vjp(functools.partial(
        jax.nn.dot_product_attention, return_residual=True), query, *written)
    self.assertEqual(jax.tree.map(lambda x: x.dtype, found), (dtype, dtype))
    d_query, *d_rest = reference((gradient, of_residual))
    summed = [x.reshape(2, 32, 4 // groups, groups, 16).sum(3) for x in d_rest]
    assert_close([*found, *pull((gradient, of_residual))], [*expected, d_query, *summed], 0.02)

  def test_the_residual_has_no_gradient(self):
    arrays = operands(B)
    found = jax.grad(lambda *x: dot_product_attention(*x, return_residual=True)[1].sum())(*arrays)
    np.testing.assert_array_equal(found, np.zeros_like(found))

  @parameterized.parameters("bias_rows", "bias_causal")
  def test_gradients_of_a_bias(self, name):
    arrays, (weights,) = operands(B), normal((B, T, H, D), seed=3)
    options = dict(CASES[name])
    bias = options.pop("bias")
    def gradients(function):
      return jax.grad(lambda *x: (function(*x, **options) * weights).sum(), (0, 1, 2, 3))(
          *arrays, bias)
    assert_close(gradients(dot_product_attention), gradients(jax.nn.dot_product_attention), 1e-5)

  def test_vmap_over_batches_and_biases(self):
    x, bias = normal((3, 2, 16, 4, 8), (3, 2, 4, 16, 16), dtype=jnp.bfloat16)
    mask = jnp.ones((1, 1, 16), bool)
    def mapped(function):
      return jax.jit(jax.vmap(lambda x, bias, mask: function(x, x, x, bias, mask),
                              in_axes=(0, 0, None)))(x, bias, mask)
    assert_close(mapped(dot_product_attention).astype(jnp.float32),
                 mapped(jax.nn.dot_product_attention).astype(jnp.float32), 0.01)

  def test_float64_without_infinities(self):
    with jax.enable_x64(True), jax.debug_infs(True):
      query, key = jnp.zeros((5, 6, 11)), jnp.zeros((7, 3, 11))
      self.assertEqual(query.dtype, jnp.float64)
      out = dot_product_attention(query, key, key, mask=jnp.arange(7) <= 3)
      self.assertEqual(jax.block_until_ready(out).dtype, jnp.float64)

  def test_a_traced_scale_has_a_gradient(self):
    arrays = operands(B)
    loss = lambda function: jax.grad(lambda scale: (function(*arrays, scale=scale)**2).sum())(0.3)
    assert_close(loss(dot_product_attention), loss(jax.nn.dot_product_attention), 1e-4)

  @parameterized.parameters("causal", "mask_keys", "mask_rank_2", "bias_heads")
  def test_without_batch_dimension(self, name):
    arrays = operands()
    found = dot_product_attention(*arrays, return_residual=True, **CASES[name])
    expected = jax.nn.dot_product_attention(*arrays, return_residual=True, **CASES[name])
    self.assertEqual([x.shape for x in found], [(T, H, D), (T, H)])
    assert_close(found, expected)

  def test_lengths_and_masks_of_rank_4_without_batch_dimension(self):
    arrays = operands()
    options = {"key_value_seq_lengths": jnp.array([4]), "mask": np.ones((1, 1, T, S), bool)}
    assert_close(dot_product_attention(*arrays, **options),
                 jax.nn.dot_product_attention(*arrays, **options))

  @parameterized.parameters((2, 3), (2, 1, 3))
  def test_more_batch_dimensions(self, *batch):
    rows = math.prod(batch)
    arrays = operands(*batch)
    lengths = np.arange(1, rows + 1, dtype=np.int32).reshape(batch)
    (bias,) = normal((*batch[1:], H, 1, S))
    found = dot_product_attention(*arrays, bias, is_causal=True, key_value_seq_lengths=lengths,
                                  return_residual=True)
    whole = jnp.broadcast_to(bias, (*batch, H, 1, S)).reshape(rows, H, 1, S)
    expected = jax.nn.dot_product_attention(
        *(x.reshape(rows, *x.shape[-3:]) for x in arrays), whole, is_causal=True,
        key_value_seq_lengths=lengths.reshape(-1), return_residual=True)
    self.assertEqual(found[1].shape, (*batch, T, H))
    assert_close(tuple(x.reshape(y.shape) for x, y in zip(found, expected)), expected)

  def test_a_query_that_sees_nothing(self):
    arrays = operands(B)
    out, residual = dot_product_attention(*arrays, mask=np.arange(T)[:, None] != 1,
                                          return_residual=True)
    np.testing.assert_array_equal(out[:, 1], np.zeros((B, H, D)))
    np.testing.assert_array_equal(residual[:, 1], np.full((B, H), -np.inf))

  def test_empty(self):
    for shape in ((0, T), (B, 0)):
      query, key = jnp.zeros((*shape, H, D)), jnp.zeros((shape[0], S, K, D))
      self.assertEqual(dot_product_attention(query, key, key, is_causal=True).shape, query.shape)

  @parameterized.parameters(np.float32, np.int32)
  def test_masks_of_0_and_1(self, dtype):
    arrays, seen = operands(B), np.tri(T, S, dtype=bool)
    for mask in (seen.astype(dtype), jnp.asarray(seen, dtype)):
      assert_close(dot_product_attention(*arrays, mask=mask),
                   dot_product_attention(*arrays, mask=seen))
      assert_close(jax.jit(dot_product_attention)(*arrays, mask=mask),
                   dot_product_attention(*arrays, mask=seen))

  def test_python_numbers(self):
    arrays = operands(B)
    assert_close(dot_product_attention(*arrays, key_value_seq_lengths=[4, 9]),
                 dot_product_attention(*arrays, **CASES["key_lengths"]))
    assert_close(dot_product_attention(*(np.asarray(x).tolist() for x in arrays)),
                 dot_product_attention(*arrays))

  def test_without_rank_promotion(self):
    with jax.numpy_rank_promotion("raise"):
      dot_product_attention(*operands(2, 3), **CASES["bias_keys"])


class ExplicitAxesTest(parameterized.TestCase):
  """dot_product_attention and its gradients on Explicit axes: values of one device, types kept."""

  @parameterized.named_parameters(
      ("rows_and_heads", (B,), ("data", None, "model")), ("both", (4,), (("data", "model"),)),
      ("unbatched", (), (None, "model")),
      ("two_batch_dimensions", (2, 2), ("data", "model", None, None)))
  def test_values_and_gradients(self, batch, spec):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    arrays = operands(*batch)
    def loss(*arrays):
      out = dot_product_attention(*arrays, local_window_size=(5, 2))
      return jnp.sin(out).sum(), out
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    with jax.set_mesh(mesh):
      placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for x in arrays]
      got = run(*placed)
      out = placed[0] + got[0][1]  # of one type
    assert_close(got, run(*arrays), 5e-6)
    self.assertEqual(list(map(jax.typeof, (out, *got[1]))), list(map(
        jax.typeof, (placed[0], *placed))))


class OptionsTest(parameterized.TestCase):

  def test_options_are_those_of_attention(self):
    arrays = operands(B, keys=T)
    sinks, ids = jnp.ones(H), np.int32([[0, 0, 0, 1, 1, 1]])
    function = functools.partial(
        dot_product_attention, mechanism="blockwise", softmax_aux=sinks, sliding_window=(2, 0),
        logits_soft_cap=5.0, mask_info=MaskInfo.from_segments(ids))
    found = function(*arrays, mask=np.arange(T) != 2, is_causal=True)
    expected = dot_product_attention(
        *arrays, softmax_aux=sinks, logits_soft_cap=5.0, mask=masks.window(2, 0)
        & masks.causal() & masks.segments(ids) & masks.dense((np.arange(T) != 2)[None, None, None]))
    assert_close(found, expected)

  def test_masks_of_the_options_and_of_the_call_apply_together(self):
    arrays, one, other = operands(B), np.arange(S) != 1, np.arange(S) != 2
    info = MaskInfo(attention_mask=np.broadcast_to(one, (1, 1, 1, S)))
    assert_close(dot_product_attention(*arrays, mask=other, mask_info=info),
                 dot_product_attention(*arrays, mask=one & other))

  def test_offset_of_the_queries(self):
    arrays = operands(B)
    assert_close(dot_product_attention(*arrays, is_causal=True, query_offset=S - T),
                 dot_product_attention(*arrays, mask=np.tri(T, S, S - T, dtype=bool)))

  def test_over_a_mesh(self):
    mesh, arrays = create_mesh((2, 1, 1, 2, 1)), operands(B)
    found = jax.jit(functools.partial(
        dot_product_attention, metadata=OperationMetadata(mesh=mesh)))(*arrays)
    assert_close(found, dot_product_attention(*arrays))
    self.assertEqual(found.sharding.shard_shape(found.shape), (1, T, H // 2, D))

  @parameterized.named_parameters(
      ("unknown", TypeError, {"window": 3}, "dot_product_attention.*'window'.*the options are"),
      ("of_attention", TypeError, {"cache_view": 3}, "'cache_view' .`attention` has it"),
      ("causal", TypeError, {"causal": True}, "'causal'; here it is 'is_causal'"),
      ("scale", TypeError, {"softmax_scale": 1.0}, "'softmax_scale'; here it is 'scale'"),
      ("implementation", ValueError, {"implementation": "flash"}, "mechanism='flash'.*flash_attn2"),
      ("both", ValueError, {"implementation": "xla", "mechanism": "vanilla"}, "one of the two"),
      ("cudnn", NotImplementedError, {"implementation": "cudnn"}, "cudnn.*platform 'cpu'"),
      ("mask_shape", ValueError, {"mask": np.ones((3, 1, 1), bool)},
       r"mask: got bool\[3, 1, 1\].*\[2, 4, 6, 9\]"),
      ("mask_rank", ValueError, {"mask": np.ones((1, 1, 1, 1, 1), bool)}, "mask: got"),
      ("mask_of_minus_infinity", ValueError, {"mask": np.full(S, -1e9)}, "other numbers.*bias"),
      ("bias_shape", ValueError, {"bias": np.ones((3, 1, 1, 1))}, "bias: got"),
      ("lengths_shape", ValueError, {"key_value_seq_lengths": np.ones(3, np.int32)},
       r"key_value_seq_lengths: got int32\[3\]"),
      ("lengths_float", ValueError, {"query_seq_lengths": np.ones(2)}, "query_seq_lengths: got"),
      ("window_triple", ValueError, {"local_window_size": (1, 2, 3)}, "local_window_size: got"),
      ("window_none", ValueError, {"local_window_size": (1, None)}, "local_window_size: got"))
  def test_refuses(self, error, options, words):
    with self.assertRaisesRegex(error, f"(?s){words}"):
      dot_product_attention(*operands(B), **options)

  @parameterized.parameters(*sorted(set(adapters.__all__) - {"AdapterOptions"}))
  def test_every_adapter_names_unknown_options(self, name):
    function = getattr(adapters, name)
    with self.assertRaisesRegex(TypeError, rf"{name}\(\) got an unexpected .*'metadat'.*metadata"):
      function(*[None] * (4 if name == "equinox_attention" else 3), metadat=1)


class TokamaxTest(parameterized.TestCase):

  def test_signature_is_that_of_tokamax(self):
    tokamax = optional_deps.module(self, "tokamax", "parity")
    ours, theirs = (inspect.signature(f).parameters.values() for f in (
        tokamax_dot_product_attention, tokamax.dot_product_attention))
    named = [p for p in ours if p.kind != inspect.Parameter.VAR_KEYWORD]
    self.assertEqual([(p.name, p.kind, p.default) for p in named],
                     [(p.name, p.kind, p.default) for p in theirs])

  @parameterized.parameters("lengths_causal", "mask_heads", "bias", "window")
  def test_values_are_those_of_jax(self, name):
    arrays = operands(B)
    assert_close(tokamax_dot_product_attention(*arrays, **CASES[name]),
                 jax.nn.dot_product_attention(*arrays, **CASES[name]))

  @parameterized.parameters(
      "xla", "xla_chunked", "mosaic", "triton", "blocksparse", ("cudnn", "xla"), (("xla",),))
  def test_implementations(self, *names):
    arrays = operands(B)
    implementation = names if len(names) > 1 else names[0]
    assert_close(tokamax_dot_product_attention(*arrays, implementation=implementation),
                 jax.nn.dot_product_attention(*arrays))

  def test_soft_cap(self):
    arrays = operands(B)
    logits = jnp.einsum("bthd,bshd->bhts", arrays[0], jnp.repeat(arrays[1], H // K, 2)) * 0.5
    weights = jax.nn.softmax(2.0 * jnp.tanh(logits / 2.0), -1)
    assert_close(tokamax_dot_product_attention(*arrays, logits_soft_cap=2.0, scale=0.5),
                 jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(arrays[2], H // K, 2)))

  def test_sharding_of_the_query(self):
    mesh = create_mesh((2, 1, 1, 2, 1))
    arrays = operands(B)
    sharding = NamedSharding(mesh, PartitionSpec("dp", None, "tp"))
    found = jax.jit(functools.partial(tokamax_dot_product_attention, q_sharding=sharding))(*arrays)
    assert_close(found, jax.nn.dot_product_attention(*arrays))
    self.assertEqual(found.sharding.shard_shape(found.shape), (1, T, H // 2, D))

  @parameterized.named_parameters(
      ("cap_and_bias", NotImplementedError, {"logits_soft_cap": 2.0, "bias": np.ones(S)},
       "logits_soft_cap=2.0 with a bias.*attention"),
      ("all", NotImplementedError, {"implementation": ("cudnn", "cuda_flash_attn2")},
       "none of the names.*cudnn.*cuda_flash_attn2"),
      ("empty", ValueError, {"implementation": ()}, "not empty"),
      ("callable", ValueError, {"implementation": (print,)}, "sequence of names"))
  def test_refuses(self, error, options, words):
    with self.assertRaisesRegex(error, f"(?s){words}"):
      tokamax_dot_product_attention(*operands(B), **options)

  @parameterized.parameters((("dp", "tp"), "sequence or the width"),
                            ((None, None, None, "tp"), "width"))
  def test_refuses_shardings(self, spec, words):
    sharding = NamedSharding(create_mesh((2, 1, 1, 2, 1)), PartitionSpec(*spec))
    with self.assertRaisesRegex(NotImplementedError, words):
      tokamax_dot_product_attention(*operands(B), q_sharding=sharding)

  def test_refuses_a_quantized_array(self):
    query, key, value = operands(B)
    with self.assertRaisesRegex(ValueError, "key: got object.*dequantized"):
      tokamax_dot_product_attention(query, object(), value)


if __name__ == "__main__":
  absltest.main()
