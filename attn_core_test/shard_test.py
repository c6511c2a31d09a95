# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded equals unsharded, on 8 virtual devices, in every factorization over dp, fsdp and tp."""

import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, PartitionAxis, attention,
                       create_mesh, explain, masks)

jax.config.update("jax_num_cpu_devices", 8)

B, T, H, K, D = 8, 13, 8, 2, 6
FACTORISATIONS = [(dp, fsdp, tp) for dp in (1, 2, 4, 8) for fsdp in (1, 2, 4, 8)
                  for tp in (1, 2, 4, 8) if dp * fsdp * tp == 8]


def operands(key_heads=K, heads=H, batch=B, seed=0):
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {"query": array(batch, T, heads, D), "key": array(batch, T, key_heads, D),
          "value": array(batch, T, key_heads, D), "bias": array(1, heads, T, T),
          "softmax_aux": array(heads, 2)}


def _predicate(batch, head, query, key):
  # Of no number of rows or heads that devices hold does it have a period.
  return (batch * 5 + head * 3 + query + key) % 7 > 1


def features(batch=B):
  """Returns arguments whose rows and heads a wrong spec or offset would mix up."""
  rng = np.random.default_rng(1)
  info = MaskInfo((rng.random((batch, 1, T, T)) < 0.8),
                  *(np.sort(rng.integers(-1, 3, (batch, T)), -1),) * 2)
  return dict(mask=masks.custom(_predicate), mask_info=info, dropout_prob=0.3,
              dropout_rng=np.array([1, 2], np.uint32), deterministic=False, logits_soft_cap=2.0,
              query_offset=rng.integers(0, 3, (batch,)).astype(np.int32))


def both(mechanism, mesh, arguments, only=None):
  """Returns value, lse and gradients as a jitted function of the operands."""
  metadata = None if mesh is None else OperationMetadata(mesh=mesh)
  def loss(arrays):
    output = attention(**arrays, **arguments, mechanism=mechanism, metadata=metadata,
                       return_lse=mechanism != "sdpa")
    lse = 0.0 if output.lse is None else jnp.where(jnp.isfinite(output.lse), output.lse, 0)
    return (jnp.sin(output.attention_outputs).sum() + jnp.sum(lse**2),
            (output.attention_outputs, output.lse))
  return jax.jit(jax.value_and_grad(loss, has_aux=True))


def close(got, want):
  """Compares up to 1e-5 of the largest number of each array, for float32."""
  def one(x, y):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
    x, y = np.where(np.isfinite(x), x, 0), np.where(np.isfinite(y), y, 0)
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * max(1, np.abs(y).max()))
  jax.tree.map(one, got, want)


class PredicatesTest(parameterized.TestCase):

  @parameterized.parameters("vanilla", "sdpa", "blockwise")
  def test_read_numbers_of_the_whole_batch_and_of_all_heads(self, mechanism):
    """Also under vmap, where each element counts its own rows."""
    arrays = {name: operands()[name] for name in ("query", "key", "value")}
    run = lambda mesh: lambda arrays: attention(
        **arrays, mask=masks.custom(_predicate), mechanism=mechanism,
        metadata=None if mesh is None else OperationMetadata(mesh=mesh)).attention_outputs
    want = jax.jit(run(None))(arrays)
    close(jax.jit(run(create_mesh((2, 1, 1, 2, 2))))(arrays), want)
    alone = jax.jit(run(None))(jax.tree.map(lambda x: x[:2], arrays))
    pairs = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), arrays)
    found = jax.jit(jax.vmap(run(None)))(pairs)
    close(found[0], alone)
    close(found[3], jax.jit(run(None))(jax.tree.map(lambda x: x[3], pairs)))


class ShardedTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.want = {m: both(m, None, features())(operands()) for m in ("flash_attn2", "vanilla")}

  @parameterized.named_parameters(*[(f"dp{d}_fsdp{f}_tp{t}", d, f, t)
                                    for d, f, t in FACTORISATIONS])
  def test_every_factorization(self, dp, fsdp, tp):
    mesh = create_mesh((dp, fsdp, 1, tp, 1))
    close(both("flash_attn2", mesh, features())(operands()), self.want["flash_attn2"])

  @parameterized.named_parameters(("dp2_tp4", (2, 1, 1, 4, 1)), ("fsdp4_tp2", (1, 4, 1, 2, 1)))
  def test_vanilla(self, dims):
    close(both("vanilla", create_mesh(dims), features())(operands()), self.want["vanilla"])

  def test_sdpa(self):
    arguments = dict(mask_info=MaskInfo(features()["mask_info"].attention_mask))
    arrays = {k: v for k, v in operands().items() if k != "softmax_aux"}
    close(both("sdpa", create_mesh((2, 1, 1, 4, 1)), arguments)(arrays),
          both("sdpa", None, arguments)(arrays))

  def test_mechanisms_agree_sharded(self):
    mesh = create_mesh((2, 2, 1, 2, 1))
    close(both("flash_attn2", mesh, features())(operands()),
          both("vanilla", mesh, features())(operands()))

  @parameterized.named_parameters(
      ("heads_6_over_3", 6, 3, 2), ("heads_8_over_8", 8, 8, 8), ("heads_4_over_1", 4, 1, 4),
      ("heads_12_over_3", 12, 3, 4))
  def test_key_heads_that_tp_does_not_divide(self, heads, key_heads, tp):
    arrays = operands(key_heads, heads, batch=2)
    arguments = dict(sliding_window=(4, 0))
    mesh = create_mesh((8 // tp, 1, 1, tp, 1))
    close(both("flash_attn2", mesh, arguments)(arrays),
          both("flash_attn2", None, arguments)(arrays))

  @parameterized.named_parameters(("batch_3", 3, 8), ("heads_3", 8, 3), ("batch_1", 1, 8))
  def test_what_does_not_divide_is_replicated_and_reported(self, batch, heads):
    arrays = operands(heads if heads == 3 else K, heads, batch)
    mesh = create_mesh((2, 2, 1, 2, 1))
    close(both("flash_attn2", mesh, features(batch))(arrays),
          both("flash_attn2", None, features(batch))(arrays))
    drops = explain(**arrays, metadata=OperationMetadata(mesh=mesh)).replicated
    self.assertContainsSubset({"tp"} if heads == 3 else {"dp", "fsdp"}, {d.axis for d in drops})

  def test_an_axis_that_the_mesh_lacks_is_reported(self):
    metadata = OperationMetadata(mesh=create_mesh((2, 2, 1, 2, 1)), partition_axis=PartitionAxis(
        batch_axis="data", sequence_axis="sp"))
    drops = explain(**operands(), metadata=metadata).replicated
    self.assertEqual({(d.tensor, d.dimension, d.axis) for d in drops if d.axis == "data"},
                     {("query", 0, "data"), ("key", 0, "data")})
    default = explain(**operands(), metadata=OperationMetadata(
        mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))))
    self.assertEmpty(default.replicated)  # the default names are not in every mesh

  def test_dropout_is_bit_identical(self):
    x = jnp.ones((B, T, H, D))
    arguments = dict(dropout_prob=0.5, deterministic=False, dropout_rng=jax.random.key(3),
                     causal=False, return_weights=True, mechanism="vanilla")
    want = attention(x, x, x, **arguments).attention_weights == 0
    for dims in ((8, 1, 1, 1, 1), (1, 1, 1, 8, 1), (2, 2, 1, 2, 1)):
      metadata = OperationMetadata(mesh=create_mesh(dims))
      got = attention(x, x, x, **arguments, metadata=metadata).attention_weights == 0
      np.testing.assert_array_equal(got, want)

  def test_explicit_meshes_and_the_mesh_in_force(self):
    arrays = {k: v for k, v in operands().items() if k in ("query", "key", "value")}
    want = both("flash_attn2", None, {})(arrays)
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    close(both("flash_attn2", mesh, {})(arrays), want)
    auto = create_mesh((2, 2, 1, 2, 1))
    with jax.set_mesh(auto):
      close(both("flash_attn2", None, {})(arrays), want)
    with jax.set_mesh(mesh):
      close(both("flash_attn2", None, {})(arrays), want)

  def test_inside_the_callers_shard_map(self):
    arrays = {k: v for k, v in operands().items() if k in ("query", "key", "value")}
    mesh = create_mesh((4, 1, 1, 2, 1))
    want = both("flash_attn2", None, {})(arrays)[0][1][0]
    def inner(arrays):
      return attention(**arrays, metadata=OperationMetadata(mesh=mesh)).attention_outputs
    for axes in (set(mesh.axis_names), {"dp"}):
      spec = P("dp")
      got = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=(spec,), out_specs=spec,
                                  axis_names=axes))(arrays)
      np.testing.assert_allclose(got, want, atol=1e-5)

  def test_axes_of_other_names(self):
    axes = PartitionAxis(batch_axis="data", head_axis="model", kv_head_axis="model")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arrays = {k: v for k, v in operands().items() if k in ("query", "key", "value")}
    metadata = OperationMetadata(mesh=mesh, partition_axis=axes)
    out = jax.jit(lambda x: attention(**x, metadata=metadata).attention_outputs)(arrays)
    self.assertEqual(out.sharding.spec[0], "data")
    self.assertEqual(out.sharding.spec[2], "model")
    np.testing.assert_allclose(out, both("flash_attn2", None, {})(arrays)[0][1][0], atol=1e-5)

  @parameterized.named_parameters(("bhtd", "bhtd"), ("thd", "thd"))
  def test_other_layouts(self, layout):
    arrays = {k: v for k, v in operands().items() if k in ("query", "key", "value")}
    arguments = {}
    if layout == "bhtd":
      arrays = {k: v.transpose(0, 2, 1, 3) for k, v in arrays.items()}
    else:
      arrays = {k: v.reshape(B * T, -1, D) for k, v in arrays.items()}
      arguments["cum_seqlens_q"] = jnp.arange(0, B * T + 1, T, dtype=jnp.int32)
    run = lambda metadata: jax.jit(lambda x: attention(
        **x, **arguments, layout=layout, metadata=metadata).attention_outputs)(arrays)
    got = run(OperationMetadata(mesh=create_mesh((2, 1, 1, 4, 1))))
    np.testing.assert_allclose(got, run(None), atol=1e-5)


class CollectivesTest(parameterized.TestCase):
  """Collectives that the compiled program sends between devices."""

  def collectives(self, dims, key_heads, gradient):
    mesh = create_mesh(dims)
    metadata = OperationMetadata(mesh=mesh)
    heads = P(("fsdp", "dp"), None, "tp", None)
    keys = heads if key_heads % mesh.shape["tp"] == 0 else P(("fsdp", "dp"))
    def array(n, spec):
      return jax.ShapeDtypeStruct((B, 64, n, 16), jnp.float32, sharding=NamedSharding(mesh, spec))
    f = lambda *x: attention(*x, metadata=metadata,
                             block_sizes=BlockSizes(16, 16)).attention_outputs
    run = jax.grad(lambda *x: (f(*x)**2).sum(), (0, 1, 2)) if gradient else f
    text = jax.jit(run).lower(
        array(H, heads), array(key_heads, keys), array(key_heads, keys)).compile().as_text()
    return set(re.findall(r"(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
                          r"(?:-start)?\(", text))

  @parameterized.named_parameters(
      ("dp8", (8, 1, 1, 1, 1), 8), ("fsdp2_tp4", (1, 2, 1, 4, 1), 8), ("tp8", (1, 1, 1, 8, 1), 8),
      ("dp2_fsdp2_tp2", (2, 2, 1, 2, 1), 2))
  def test_no_collectives_if_nothing_is_shared(self, dims, key_heads):
    self.assertEmpty(self.collectives(dims, key_heads, gradient=False))
    self.assertEmpty(self.collectives(dims, key_heads, gradient=True))

  def test_replicated_key_heads_send_their_gradients_only(self):
    self.assertEmpty(self.collectives((2, 1, 1, 4, 1), 2, gradient=False))
    # Of parts of the key heads, which are gathered then, as those of jax.nn's function are.
    self.assertEqual(self.collectives((2, 1, 1, 4, 1), 2, gradient=True),
                     {"all-reduce", "all-gather"})


if __name__ == "__main__":
  absltest.main()
