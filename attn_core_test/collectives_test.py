# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives of compiled programs on 8 virtual devices: none where those of JAX have none.

JAX's own function, `jax.nn.dot_product_attention`, is plain XLA that the compiler partitions.
"""

import functools
import re
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import BlockSizes, OperationMetadata, attention, masks
from attn_core.benchmark.static import gpu as static_gpu
from attn_core_test import sampling

jax.config.update("jax_num_cpu_devices", 8)

B, T, H, D = 8, 16, 8, 8

# Mesh, and spec of query, key and value.
COMMON = {
    "rows_and_heads": ((("dp", "fsdp", "tp"), (2, 2, 2)), P(("dp", "fsdp"), None, "tp")),
    "other_order": ((("dp", "fsdp", "tp"), (2, 2, 2)), P(("fsdp", "dp"), None, "tp")),
    "rows": ((("dp", "fsdp", "tp"), (2, 2, 2)), P("dp")),
    "heads": ((("dp", "fsdp", "tp"), (2, 2, 2)), P(None, None, "tp")),
    "data_and_model": ((("data", "model"), (4, 2)), P("data", None, "model")),
    "rows_over_all": ((("data", "model"), (4, 2)), P(("data", "model"))),
    "maxtext": ((("data", "fsdp", "tensor"), (2, 2, 2)), P(("data", "fsdp"), None, "tensor")),
    "nothing": ((("data", "fsdp", "tensor"), (2, 2, 2)), P()),
    "batch_and_model": ((("batch", "model"), (2, 4)), P("batch", None, "model")),
    "one_axis": ((("x",), (8,)), P("x")),
}
# Meshes of known names whose arrays are sharded otherwise than the default rules say.
OTHERS = {
    "heads_over_two": ((("fsdp", "tp"), (2, 4)), P(None, None, ("fsdp", "tp"))),
    "rows_over_heads": ((("dp", "tp"), (2, 4)), P("tp")),
    "rows_over_both": ((("dp", "tp"), (2, 4)), P(("dp", "tp"))),
    "rows_over_both_in_another_order": ((("dp", "tp"), (2, 4)), P(("tp", "dp"))),
    "heads_over_rows": ((("dp", "tp"), (2, 4)), P(None, None, ("dp", "tp"))),
    "heads_over_one": ((("dp",), (8,)), P(None, None, "dp")),
}
PAIRS = {**COMMON, **OTHERS}
VARIANTS = [(mechanism, kind) for kind in ("Auto", "Explicit") for mechanism in ("auto", "vanilla")]


def cases():
  """Returns a mechanism and a kind of axes for each pair; the other ones are slow."""
  quick = [(name, *VARIANTS[n % (len(VARIANTS) if name in COMMON else 2)])
           for n, name in enumerate(PAIRS)]
  rest = [(name, *variant) for name in PAIRS for variant in VARIANTS]
  return sampling.with_slow(quick, *(case for case in rest if case not in quick))


def mesh_of(names, sizes, kind):
  return jax.make_mesh(sizes, names, axis_types=(getattr(AxisType, kind),) * len(names))


def compiled(function, x, platform="cpu"):
  """Returns the collectives of a program, and the shardings of its results."""
  program = jax.jit(function).trace(x).lower(lowering_platforms=(platform,)).compile()
  return sorted(re.findall(
      r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(",
      program.as_text())), program.output_shardings


def with_gradient(function):
  return lambda x: (function(x), jax.grad(lambda x: jnp.sin(function(x)).sum())(x))


def jaxs(x):
  return x + jax.nn.dot_product_attention(x, x, x, is_causal=True)


def ours(x, mechanism="auto"):
  return x + attention(x, x, x, mechanism=mechanism).attention_outputs


class PairsTest(parameterized.TestCase):

  def test_ten_common_pairs(self):
    self.assertLen(COMMON, 10)
    self.assertContainsSubset(PAIRS, {name for name, *_ in cases()})

  @parameterized.parameters(*cases())
  def test_none(self, name, mechanism, kind):
    """Checks the forward alone, and the forward with its gradient."""
    mesh, spec = PAIRS[name]
    run = functools.partial(ours, mechanism=mechanism)
    mesh = mesh_of(*mesh, kind)
    x = jax.ShapeDtypeStruct((B, T, H, D), np.float32, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
      self.assertEmpty(compiled(with_gradient(jaxs), x)[0])
      found, shardings = compiled(with_gradient(run), x)
      self.assertEmpty(found)
      forward, sharding = compiled(run, x)
      self.assertEmpty(forward)
    if kind == "Explicit" or name in OTHERS:
      for got in (sharding, *shardings):
        self.assertTrue(got.is_equivalent_to(x.sharding, 4), got)

  def test_idle_axes_refine_what_the_arrays_say(self):
    mesh = mesh_of(("dp", "fsdp", "tp"), (2, 2, 2), "Auto")
    x = jax.ShapeDtypeStruct((B, T, H, D), np.float32, sharding=NamedSharding(
        mesh, P(None, None, ("fsdp", "tp"))))
    with jax.set_mesh(mesh):
      found, sharding = compiled(ours, x)
    self.assertEmpty(found)
    self.assertEqual(sharding.spec, P("dp", None, ("fsdp", "tp")))

  def test_loops_of_one_iteration(self):
    """Checks a gradient over several blocks; the compiler inlines such loops."""
    mesh = mesh_of(("data", "model"), (4, 2), "Auto")
    x = jax.ShapeDtypeStruct((B, 64, H, D), np.float32,
                             sharding=NamedSharding(mesh, P("data", None, "model")))
    run = lambda x: attention(x, x, x, block_sizes=BlockSizes(16, 16)).attention_outputs
    with jax.set_mesh(mesh):
      self.assertEmpty(compiled(with_gradient(run), x)[0])

  def test_arrays_without_a_mesh_in_force(self):
    mesh = mesh_of(("data", "model"), (4, 2), "Auto")
    x = jax.ShapeDtypeStruct((B, T, H, D), np.float32,
                             sharding=NamedSharding(mesh, P("data", None, "model")))
    self.assertEmpty(compiled(lambda x: attention(x, x, x).attention_outputs, x)[0])


class GpuTest(parameterized.TestCase):
  """Compiles ahead of time for four GPUs."""

  @parameterized.parameters(*sampling.with_slow(
      [("blockwise", P("tp")), ("flash_attn2", P(None, None, ("dp", "tp")))],
      ("blockwise", P(("tp", "dp"))), ("blockwise", P(None, None, ("dp", "tp"))),
      ("blockwise", P("dp", None, "tp")), ("flash_attn2", P(("tp", "dp"))),
      ("flash_attn2", P("dp", None, "tp")), ("flash_attn2", P("tp"))))
  @unittest.skipIf(static_gpu.missing(), f"nothing to compile with: {static_gpu.missing()}")
  def test_none(self, mechanism, spec):
    devices = topologies.get_topology_desc(
        platform="cuda", topology="1x1x4", target_config=static_gpu.TARGET).devices
    mesh = Mesh(np.array(devices).reshape(2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    metadata = OperationMetadata(platform="gpu", compute_capability="9.0", mesh=mesh)
    x = jax.ShapeDtypeStruct((B, 128, H, 64), "bfloat16", sharding=NamedSharding(mesh, spec))
    run = lambda x: attention(x, x, x, mechanism=mechanism, metadata=metadata).attention_outputs
    self.assertEmpty(compiled(with_gradient(run), x, "cuda")[0])


class VmapTest(parameterized.TestCase):
  """Mapped dimensions, sharded or not."""

  def jax_gathers(self, x, options):
    """Says if JAX gathers a mapped dimension for any shard_map of other axes; 0.10.2 does."""
    heads = P(*x.sharding.spec[1:])
    double = jax.shard_map(lambda x: 2 * x, in_specs=heads, out_specs=heads, axis_names={"model"})
    found = bool(compiled(jax.vmap(double, **options), x)[0])
    self.assertFalse(found and jax.__version_info__ >= (0, 12), "JAX gathers")
    return found

  def check(self, shape, spec, kind, values=False, **options):
    mesh = mesh_of(("data", "model"), (4, 2), kind)
    x = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
    run = with_gradient(jax.vmap(ours, **options))
    with jax.set_mesh(mesh):
      self.assertEmpty(compiled(with_gradient(jax.vmap(jaxs, **options)), x)[0])
      if kind == "Auto" or not self.jax_gathers(x, options):
        self.assertEmpty(compiled(run, x)[0])
      if not values:
        return
      numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
      got = jax.jit(run)(jax.device_put(numbers, x.sharding))
    want = jax.jit(with_gradient(jax.vmap(ours)))(numbers)
    for one, other in zip(got, want):
      np.testing.assert_allclose(one, other, atol=1e-5)

  @parameterized.parameters(
      ("Auto", None), ("Auto", "data"), ("Explicit", None), ("Explicit", "data"))
  def test_a_sharded_dimension(self, kind, name):
    options = {} if name is None else {"spmd_axis_name": name}
    self.check((B, T, H, D), P("data", None, "model"), kind, values=True, **options)

  @parameterized.parameters(
      ("Auto", None), ("Auto", "data"), ("Explicit", None), ("Explicit", "data"))
  def test_a_sharded_dimension_before_rows(self, kind, name):
    options = {} if name is None else {"spmd_axis_name": name}
    self.check((B, 2, T, H, D), P("data", None, None, "model"), kind, values=True, **options)

  def test_sharded_rows(self):
    self.check((3, B, T, H, D), P(None, "data", None, "model"), "Auto")

  @parameterized.parameters((P("data",),), (P(None, "data", None, None, "model"),),
                            (P(None, None, "data", None, "model"),))
  def test_two_mapped_dimensions(self, spec):
    """Checks masks that read a row's number, and keys that one or both dimensions share."""
    mesh = mesh_of(("data", "model"), (4, 2), "Auto")
    shape = (4, 4, 4, T, H, D)
    mask = masks.custom(lambda batch, head, query, key: (batch * 5 + head + query + key) % 3 != 0)
    def run(query, key, value, bias):
      attend = lambda query, key, value, bias: attention(
          query, key, value, bias=bias, mask=mask).attention_outputs
      inner = jax.vmap(attend, in_axes=(0, 0, None, None))
      return jax.vmap(inner, in_axes=(0, None, 0, None))(query, key, value, bias)
    def both(*x):
      return run(*x), jax.grad(lambda *x: jnp.sin(run(*x)).sum(), (0, 1, 2, 3))(*x)
    shapes = shape, shape[1:], (4, *shape[2:]), (1, H, T, T)
    numbers = [np.random.default_rng(n).standard_normal(x).astype(np.float32)
               for n, x in enumerate(shapes)]
    place = lambda *spec: NamedSharding(mesh, P(*spec))
    placed = [jax.device_put(x, at) for x, at in zip(numbers, (
        place(*spec), place(*spec[1:]), place(*spec[:1], *spec[2:]), place()))]
    with jax.set_mesh(mesh):
      got = jax.jit(both)(*placed)
    want = jax.jit(both)(*numbers)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(one, other, atol=2e-5 * max(1, np.abs(other).max()))


if __name__ == "__main__":
  absltest.main()
