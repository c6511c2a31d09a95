# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels for TPUs and GPUs inside the caller's own shard_map, over all axes of a mesh or some.

Rings are in ring_split_test and tpu_ring_test, and cuDNN is in cudnn_test. JAX's interpreter of GPU
kernels fails on several devices (0.12.0.1): those are interpreted on one, and lowered for four.
"""

import functools
import itertools
from typing import Any, Callable, NamedTuple
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (OperationMetadata, PagesMetadata, PagesV1, PagesV2, PagesV3, attention,
                       page_attention, ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import pages
from attn_core.sharding import shard_map
from attn_core_test import gpu_interpret, sampling, tpu_interpret

jax.config.update("jax_num_cpu_devices", 4)

PLATFORMS = {"cpu": OperationMetadata(), "tpu": OperationMetadata(platform="tpu"),
             "gpu": OperationMetadata(platform="gpu", compute_capability="9.0")}
DENSE = ("flash_attn2", "blocksparse", "autoregressive_decodeattn")
PAGED = {"page_attention": PagesV1, "ragged_page_attention_v2": PagesV2,
         "ragged_page_attention_v3": PagesV3}
ROWS = P("dp")


class Call(NamedTuple):
  """A call on the device `dp=0` and on the device `dp=1`, with their arrays concatenated."""

  run: Callable  # (metadata, *arrays) -> out
  arrays: tuple
  specs: Any = ROWS  # of the arrays
  floats: int = 3  # the first arguments, which are differentiated

  def differentiated(self, platform: str) -> Callable:
    """Returns arrays -> (out, gradients)."""
    def found(*arrays):
      def loss(*floats):
        out = self.run(PLATFORMS[platform], *floats, *arrays[self.floats:])
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out
      return jax.grad(loss, range(self.floats), has_aux=True)(*arrays[:self.floats])[::-1]
    return found

  @property
  def result_specs(self):
    return ROWS, self.specs[:self.floats] if isinstance(self.specs, tuple) else ROWS


def numbers(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def call_of(name, tokens=12, width=8, dtype="float32"):
  """Returns a call of a mechanism: two rows, or two groups of requests, on each device."""
  if name in DENSE:
    queries = 1 if name == "autoregressive_decodeattn" else tokens
    def run(metadata, *arrays):
      return attention(*arrays, mechanism=name, metadata=metadata,
                       query_offset=tokens - queries).attention_outputs
    shapes = (4, queries, 4, width), (4, tokens, 2, width), (4, tokens, 2, width)
    return Call(run, tuple(jnp.asarray(numbers(*shape), dtype) for shape in shapes))
  layout, page = PAGED[name], tokens // 3
  halves = [pages.convert(PagesV1(*(jnp.asarray(numbers(2, 4, page, width, seed=seed + n), dtype)
                                    for n in range(2))), layout) for seed in (1, 3)]
  axis = 1 if layout is PagesV1 else 0
  cache = jax.tree.map(lambda *x: jnp.concatenate(x, axis), *halves)
  starts = np.array([0, 1, 2] if layout is PagesV1 else [0, 2, 4], np.int32)
  queries, lengths = starts[-1], np.array([page - 1, page + 1], np.int32)
  metadata = PagesMetadata(*(jnp.asarray(np.concatenate([x, x])) for x in (
      np.array([[0, 1], [2, 3]], np.int32), lengths, starts)))
  query = jnp.asarray(numbers(2 * queries, 4, width), dtype)
  of_cache = jax.tree.map(lambda _: P(*[None] * axis, "dp"), cache)
  if layout is PagesV3:
    new = [jnp.asarray(numbers(2 * queries, 2, width, seed=n), dtype) for n in (5, 6)]
    return Call(lambda metadata, query, key, value, cache, pages: ragged_page_attention_v3(
        query, key, value, cache, pages, metadata=metadata).attention_outputs,
                (query, *new, cache, metadata), (ROWS, ROWS, ROWS, of_cache, ROWS), 1)
  if layout is PagesV1:
    metadata = metadata._replace(query_start_loc=None)
    run = page_attention
  else:
    run = ragged_page_attention_v2
  return Call(lambda metadata, query, cache, pages: run(
      query, cache, pages_metadata=pages, metadata=metadata).attention_outputs,
              (query, cache, metadata), (ROWS, of_cache, ROWS), 2)


def parts_of(tree, specs, count):
  """Returns the parts of devices."""
  specs = jax.tree.map(lambda _: specs, tree) if isinstance(specs, P) else tuple(
      jax.tree.map(lambda _, spec=spec: spec, x) if isinstance(spec, P) else spec
      for x, spec in zip(tree, specs))
  return [jax.tree.map(lambda x, spec, n=n: jnp.split(
      jax.device_get(x), count, len(spec) - 1)[n], tree, specs) for n in range(count)]


def mesh_of(sizes, other="Auto", devices=None):
  devices = jax.devices() if devices is None else devices
  kinds = AxisType.Auto, getattr(AxisType, other if other != "Manual" else "Auto")
  return Mesh(np.array(devices[:sizes[0] * sizes[1]]).reshape(sizes), ("dp", "tp"),
              axis_types=kinds)


def inside(call, platform, mesh, other, checked, within=True):
  """Returns arrays -> (out, gradients), in a shard_map whose other axis is of a kind.

  Args:
    call: the call.
    platform: whose kernels run.
    mesh: of axes "dp" and "tp".
    other: the kind of "tp" inside.
    checked: `check_vma`.
    within: whether gradients are taken inside the shard_map.
  """
  options = dict(mesh=mesh, in_specs=call.specs, check_vma=checked,
                 axis_names={"dp", "tp"} if other == "Manual" else {"dp"})
  if within:
    return jax.shard_map(call.differentiated(platform), out_specs=call.result_specs, **options)
  def run(metadata, *arrays):
    return jax.shard_map(functools.partial(call.run, metadata), out_specs=ROWS, **options)(*arrays)
  return call._replace(run=run).differentiated(platform)


def product(*values, quick):
  """Returns all combinations, of which one in `quick` is quick and the others are slow."""
  every = list(itertools.product(*values))
  return sampling.with_slow(every[::quick], *(x for n, x in enumerate(every) if n % quick))


class InterpretTest(parameterized.TestCase):

  def check(self, call, platform, mesh, *options, tolerance=1e-5):
    with jax.set_mesh(mesh):
      arrays = jax.device_put(call.arrays, NamedSharding(mesh, P()))
      found = jax.block_until_ready(jax.jit(inside(call, platform, mesh, *options))(*arrays))
    wanted, count = jax.jit(call.differentiated("cpu")), mesh.shape["dp"]
    for got, arrays in zip(parts_of(found, call.result_specs, count),
                           parts_of(call.arrays, call.specs, count)):
      for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted(*arrays)), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()))

  @parameterized.parameters(*product(
      (*DENSE, *PAGED), ("Manual", "Auto", "Explicit"), (True, False), (True, False), quick=17))
  def test_tpu(self, name, other, checked, within):
    if other != "Manual" and jax.__version_info__ < (0, 11):
      self.skipTest("XLA aborts on an interpreted kernel in a shard_map within another one")
    call = call_of(name)
    with tpu_interpret.interpreted():
      self.check(call, "tpu", mesh_of((2, 2), other), other, checked, within)

  @parameterized.parameters(*product(
      PAGED, ("Auto", "Explicit"), (True, False), (True, False), quick=11))
  def test_pages_in_plain_xla(self, name, other, checked, within):
    self.check(call_of(name), "cpu", mesh_of((2, 2), other), other, checked, within)

  @gpu_interpret.interprets
  @parameterized.parameters(*sampling.with_slow(
      [("autoregressive_decodeattn", True, True)], *itertools.product(
          ("flash_attn2", *PAGED), (True, False), (True, False))))
  def test_gpu(self, name, checked, within):
    call = call_of(name, 192, 64, "bfloat16")
    call = call._replace(arrays=parts_of(call.arrays, call.specs, 2)[0])
    with gpu_interpret.interpreted():
      self.check(call, "gpu", mesh_of((1, 1)), "Manual", checked, within, tolerance=2e-2)


class OverEveryAxisTest(parameterized.TestCase):

  @parameterized.parameters((1, 2), (2, 1))
  def test_axes_of_several_devices_are_the_compilers(self, devices, count):
    """Work is not repeated on each of them: only axes of one device become Manual."""
    run = jax.shard_map(functools.partial(shard_map.over_every_axis, jnp.sin), out_specs=ROWS,
                        mesh=mesh_of((2, devices)), in_specs=ROWS, axis_names={"dp"})
    text = str(jax.make_jaxpr(run)(numbers(4, 2)))
    self.assertEqual(text.count("shard_map["), count, text)


class LoweredTest(parameterized.TestCase):
  """Programs for devices that are not here, where the caller leaves out axes of one device, too."""

  @parameterized.parameters(*product(
      ("tpu", "gpu"), (*DENSE, *PAGED), (((2, 1), "Auto"), ((2, 2), "Auto"), ((2, 2), "Manual"),
                                         ((2, 1), "Explicit")), (True, False), quick=23))
  def test_kernels(self, platform, name, mesh, checked):
    (sizes, other), call = mesh, call_of(name, 192, 128, "bfloat16")
    mesh = mesh_of(sizes, other)
    with jax.set_mesh(mesh):
      text = jax.jit(inside(call, platform, mesh, other, checked)).trace(*call.arrays).lower(
          lowering_platforms=({"tpu": "tpu", "gpu": "cuda"}[platform],)).as_text()
    self.assertRegex(text, {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[platform])

  @unittest.skipIf(static_profile.missing(), f"cannot compile: {static_profile.missing()}")
  @sampling.slow_parameters(*itertools.product(DENSE, (True, False)))
  def test_compiles_where_an_axis_of_one_device_is_left_out(self, name, checked):
    mesh, call = mesh_of((4, 1), devices=static_profile.devices("v5e")), call_of(name, 192, 128)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, P())), call.arrays)
    text = jax.jit(inside(call, "tpu", mesh, "Auto", checked)).trace(*shapes).lower(
        lowering_platforms=("tpu",)).compile().as_text()
    self.assertIn('custom_call_target="tpu_custom_call"', text)


if __name__ == "__main__":
  absltest.main()
