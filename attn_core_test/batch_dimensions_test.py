# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls without a batch dimension, with several of them, and with dimensions of size 0."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

import attn_core
from attn_core import MaskInfo, OperationMetadata, attention, create_mesh, explain, masks
from attn_core.caches import dense

jax.config.update("jax_num_cpu_devices", 4)

T, H, K, D = 5, 4, 2, 8
MECHANISMS = ("vanilla", "sdpa", "blockwise", "flash_attn2", "blocksparse", "ring",
              "autoregressive_decodeattn")
BATCHES = ((), (1,), (3,), (2, 3), (2, 1, 3), (1, 1))


def floats(*shape, seed=0) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands(*batch, keys=T, width=D):
  return (floats(*batch, T, H, D), floats(*batch, keys, K, D, seed=1),
          floats(*batch, keys, K, width, seed=2))


def folded(batch, x, rest):
  """Returns [*batch or 1, ...] written out as [B, ...]."""
  x = np.asarray(x)
  return np.broadcast_to(x, (*batch, *x.shape[len(batch):])).reshape(-1, *x.shape[x.ndim - rest:])


class BatchTest(parameterized.TestCase):

  @parameterized.parameters(*BATCHES)
  def test_equals_one_folded_dimension(self, *batch):
    arrays = operands(*batch)
    output = attention(*arrays, return_lse=True, return_weights=True)
    expected = attention(*(folded(batch, x, 3) for x in arrays), return_lse=True,
                         return_weights=True)
    self.assertEqual(output.out.shape, (*batch, T, H, D))
    self.assertEqual(output.lse.shape, (*batch, H, T))
    self.assertEqual(output.attention_weights.shape, (*batch, H, T, T))
    for one, other in zip(output[:3], expected[:3]):
      np.testing.assert_array_equal(one.reshape(other.shape), other)

  @parameterized.parameters(*MECHANISMS)
  def test_the_function_of_every_mechanism(self, name):
    function = getattr(attn_core, name if name != "ring" else "ring_attention")
    arrays = operands(2, 3)
    expected = attention(*(folded((2, 3), x, 3) for x in arrays), mechanism=name).out
    output = jax.jit(function)(*arrays).out
    np.testing.assert_allclose(output.reshape(expected.shape), expected, atol=1e-6)
    np.testing.assert_allclose(function(*(x[1, 2] for x in arrays)).out, output[1, 2], atol=1e-6)

  def test_layout_bhtd(self):
    arrays = operands(2, 3)
    output = attention(*(x.swapaxes(-2, -3) for x in arrays), layout="bhtd").out
    np.testing.assert_allclose(output.swapaxes(-2, -3), attention(*arrays).out, atol=1e-6)

  @parameterized.parameters(
      ((2, 3), (1, 3)), ((2, 3), (2, 1)), ((2, 3), (1, 1)), ((2, 3), (2, 3)), ((), ()))
  def test_arrays_with_rows(self, batch, given):
    """Masks, biases, segment ids, positions and offsets may be 1 in each batch dimension."""
    arrays = operands(*batch)
    bias, seen = floats(*given, H, 1, T), floats(*given, 1, T, T) < 1
    ids = np.int32(floats(*given, T) > 0)
    offset = np.int32(floats(*given) * 2)
    calls = {
        "bias": bias, "mask": seen, "mask_info": MaskInfo.from_segments(ids),
        "query_offset": offset, "init_bias": lambda: bias}
    for name, x in calls.items():
      with self.subTest(name):
        rest = {"bias": 3, "mask": 3, "mask_info": 1, "query_offset": 0}.get(name)
        whole = jax.tree.map(lambda leaf: folded(batch, leaf, rest), x) if rest is not None else (
            lambda: folded(batch, bias, 3))
        expected = attention(*(folded(batch, y, 3) for y in arrays), **{name: whole}).out
        output = attention(*arrays, **{name: x}).out
        np.testing.assert_allclose(output.reshape(expected.shape), expected, atol=1e-6)
        self.assertTrue(explain(*arrays, **{name: x}).chosen)

  def test_one_row_without_batch_dimension(self):
    arrays = operands()
    bias, ids = floats(1, H, T, T), np.int32([[0, 0, 1, 1, 1]])
    one = attention(*arrays, bias=bias, mask_info=MaskInfo.from_segments(ids)).out
    np.testing.assert_array_equal(
        one, attention(*arrays, bias=bias[0], mask_info=MaskInfo.from_segments(ids[0])).out)

  def test_a_mask_value_counts_folded_rows(self):
    arrays, lengths = operands(2, 3), np.int32([1, 2, 3, 4, 5, 2])
    output = attention(*arrays, mask=masks.lengths(None, lengths)).out
    for row in range(6):
      one = [x[divmod(row, 3)] for x in arrays]
      mask = masks.lengths(None, lengths[row:row + 1])
      np.testing.assert_allclose(output[divmod(row, 3)], attention(*one, mask=mask).out, atol=1e-6)

  def test_gradients_sum_over_broadcast_dimensions(self):
    arrays, bias = operands(2, 3), floats(1, 3, H, T, T)
    loss = lambda *x: (attention(*x[:3], bias=x[3]).out**2).sum()
    found = jax.grad(loss, range(4))(*arrays, bias)
    whole = jax.grad(loss, range(4))(*(folded((2, 3), x, 3) for x in (*arrays, bias)))
    for one, other in zip(found[:3], whole[:3]):
      np.testing.assert_allclose(one.reshape(other.shape), other, atol=1e-5)
    np.testing.assert_allclose(found[3], whole[3].reshape(2, *bias.shape[1:]).sum(0)[None],
                               atol=1e-5)

  def test_dropout_is_that_of_the_folded_rows(self):
    arrays, dropped = operands(2, 3), {"dropout_prob": 0.5, "dropout_rng": jax.random.key(0)}
    expected = attention(*(folded((2, 3), x, 3) for x in arrays), **dropped).out
    np.testing.assert_array_equal(attention(*arrays, **dropped).out.reshape(expected.shape),
                                  expected)

  def test_vmap_equals_a_dimension(self):
    arrays = operands(2, 3)
    np.testing.assert_allclose(jax.vmap(jax.vmap(lambda *x: attention(*x).out))(*arrays),
                               attention(*arrays).out, atol=1e-6)

  def test_a_cache_has_folded_rows(self):
    arrays = operands(2, 3)
    cache = dense.init(6, 8, (K, D), dtype="float32")
    output = attention(*arrays, cache_view=cache, mode="__prefill__")
    np.testing.assert_allclose(output.out, attention(*arrays).out, atol=1e-6)
    np.testing.assert_array_equal(output.cache_view.lengths, [T] * 6)

  @parameterized.parameters(("x", "y"), ("x", None, None, "y"), (None, "y"))
  def test_explicit_axes(self, *spec):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    arrays = [np.concatenate([x, x]) for x in operands(2, 2)]
    expected = attention(*arrays).out
    with jax.set_mesh(mesh):
      sharding = NamedSharding(mesh, PartitionSpec(*spec))
      output = attention(*(jax.device_put(x, sharding) for x in arrays)).out
    np.testing.assert_allclose(output, expected, atol=1e-6)
    self.assertEqual(output.shape, expected.shape)

  def test_over_a_mesh(self):
    metadata = OperationMetadata(mesh=create_mesh((2, 1, 1, 2, 1)))
    arrays = operands(2, 2)
    np.testing.assert_allclose(attention(*arrays, metadata=metadata).out, attention(*arrays).out,
                               atol=1e-6)

  @parameterized.named_parameters(
      ("key", {"key": floats(2, 2, T, K, D)}, r"key: got float32\[2, 2, 5, 2, 8\]",
       r"batch dimensions \[2, 3\] of the query"),
      ("key_rank", {"key": floats(6, T, K, D)}, r"key: got float32\[6, 5, 2, 8\]", r"\[2, 3\]"),
      ("value", {"value": floats(2, 1, T, K, D)}, "value: got", r"\[2, 3\]"),
      ("bias", {"bias": floats(2, 2, H, T, T)}, "bias: got", r"\[2, 3\] .* may be 1"),
      ("bias_rank", {"bias": floats(6, H, T, T)}, "bias: got", r"\[2, 3\]"),
      ("init_bias", {"init_bias": lambda: floats(2, 2, H, T, T)}, "init_bias returned: got"),
      ("mask", {"mask": floats(3, 1, T, T) > 0}, "mask: got bool", r"\[2, 3\]"),
      ("ids", {"mask_info": MaskInfo.from_segments(np.zeros((6, T), np.int32))},
       "mask_info.q_segment_ids: got int32", r"\[2, 3\]"),
      ("offset", {"query_offset": np.zeros(6, np.int32)}, "query_offset: got int32", r"\[2, 3\]"))
  def test_refuses(self, changes, *words):
    query, key, value = operands(2, 3)
    with self.assertRaisesRegex(ValueError, "(?s)" + ".*".join(words)):
      attention(**{"query": query, "key": key, "value": value, **changes})


class EmptyTest(parameterized.TestCase):

  @parameterized.product(shape=((0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)),
                         mechanism=MECHANISMS)
  def test_results_of_every_mechanism(self, shape, mechanism):
    batch, queries, keys = shape
    width = D if mechanism == "sdpa" else 6
    output = attention(floats(batch, queries, H, D), floats(batch, keys, K, D),
                       floats(batch, keys, K, width), mechanism=mechanism, return_lse=True,
                       return_weights=mechanism == "vanilla")
    np.testing.assert_array_equal(output.out, np.zeros((batch, queries, H, width)))
    np.testing.assert_array_equal(output.lse, np.full((batch, H, queries), -np.inf))
    if mechanism == "vanilla":
      self.assertEqual(output.attention_weights.shape, (batch, H, queries, keys))

  def test_gradients_are_zero(self):
    arrays = floats(2, 3, H, D), floats(2, 0, K, D), floats(2, 0, K, D)
    found = jax.jit(jax.grad(lambda *x: attention(*x).out.sum(), (0, 1, 2)))(*arrays)
    for one, x in zip(found, arrays):
      np.testing.assert_array_equal(one, np.zeros_like(x))

  def test_sinks_are_the_lse_where_there_are_no_keys(self):
    arrays, sinks = (floats(2, 3, H, D), floats(2, 0, K, D), floats(2, 0, K, D)), floats(H)
    lse = lambda sinks: attention(*arrays, softmax_aux=sinks, return_lse=True).lse
    np.testing.assert_allclose(lse(sinks), np.broadcast_to(sinks[None, :, None], (2, H, 3)))
    np.testing.assert_allclose(jax.grad(lambda x: lse(x).sum())(sinks), np.full(H, 6.0))

  def test_without_batch_dimension(self):
    self.assertEqual(attention(floats(0, H, D), floats(T, K, D), floats(T, K, D)).out.shape,
                     (0, H, D))

  def test_packed(self):
    output = attention(floats(0, H, D), floats(0, K, D), floats(0, K, D), layout="thd",
                       cum_seqlens_q=np.int32([0, 0])).out
    self.assertEqual(output.shape, (0, H, D))

  def test_dtype_and_sharding_of_the_query(self):
    mesh = create_mesh((1, 2, 1, 2, 1))
    x = jnp.zeros((4, 3, H, D), jnp.bfloat16)
    output = attention(x, x[:, :0], x[:, :0], metadata=OperationMetadata(mesh=mesh)).out
    self.assertEqual(output.dtype, jnp.bfloat16)
    explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
      spec = PartitionSpec("x", None, "y", None)
      query = jax.device_put(x, NamedSharding(explicit, spec))
      self.assertEqual(jax.typeof(attention(query, query[:, :0], query[:, :0]).out).sharding.spec,
                       spec)

  def test_a_step_without_tokens_leaves_the_cache(self):
    cache = dense.init(2, 8, (K, D), dtype="float32")
    filled = attention(*operands(2), cache_view=cache, mode="__prefill__").cache_view
    output = attention(floats(2, 0, H, D), floats(2, 0, K, D), floats(2, 0, K, D),
                       cache_view=filled, mode="__prefill__")
    self.assertEqual(output.out.shape, (2, 0, H, D))
    jax.tree.map(np.testing.assert_array_equal, output.cache_view, filled)

  @parameterized.parameters("cpu", "gpu", "tpu")
  def test_explained_on_every_platform(self, platform):
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, "bfloat16")
    for batch, queries, keys in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
      explanation = explain(
          shape(batch, queries, H, 64), shape(batch, keys, K, 64), shape(batch, keys, K, 64),
          metadata=OperationMetadata(platform=platform))
      self.assertIsNotNone(explanation.chosen)

  def test_what_is_not_supported_is_refused_as_ever(self):
    with self.assertRaisesRegex(NotImplementedError, "softmax_aux"):
      attention(floats(2, 0, H, D), floats(2, 4, K, D), floats(2, 4, K, D), mechanism="sdpa",
                softmax_aux=floats(H))

  @parameterized.parameters((2, 3, 0, D), (2, 3, H, 0))
  def test_heads_and_widths_are_not_empty(self, *shape):
    x = floats(*shape)
    with self.assertRaisesRegex(ValueError, "query: got .* heads and a width"):
      attention(x, x, x)


class MaskDtypeTest(parameterized.TestCase):

  @parameterized.parameters(np.float32, np.int32, jnp.bfloat16)
  def test_the_error_names_astype(self, dtype):
    seen = jnp.ones((1, 1, T, T), dtype)
    for changes in ({"mask": seen}, {"mask_info": MaskInfo(attention_mask=seen)}):
      with self.assertRaisesRegex(ValueError, r"mask: got .*\.astype\(bool\)"):
        attention(*operands(1), **changes)
    with self.assertRaisesRegex(ValueError, r"\.astype\(bool\)"):
      masks.dense(seen)


if __name__ == "__main__":
  absltest.main()
