# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The mesh, platform and compute capability that OperationMetadata resolves to."""

import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import AxisType, Mesh, PartitionSpec as P
import numpy as np

from attn_core.config.metadata import (OperationMetadata, resolved_capability, resolved_mesh,
                                       resolved_platform, resolved_tpu_version)
from attn_core.sharding.mesh import create_mesh

jax.config.update("jax_num_cpu_devices", 8)


class MeshTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh, self.other, self.third = (
        create_mesh(dims, ("a", "b")) for dims in ((2, 4), (4, 2), (8, 1)))

  def test_order(self):
    config = types.SimpleNamespace(mesh=self.other)
    with jax.set_mesh(self.third):
      metadata = OperationMetadata(mesh=self.mesh, base_config=config)
      self.assertEqual(resolved_mesh(metadata), self.mesh)
      self.assertEqual(resolved_mesh(OperationMetadata(base_config=config)), self.other)
      config.mesh = None
      self.assertEqual(resolved_mesh(OperationMetadata(base_config=config)), self.third)
      self.assertEqual(resolved_mesh(OperationMetadata()), self.third)
    self.assertIsNone(resolved_mesh(OperationMetadata()))

  def test_in_jit(self):
    seen = []

    @jax.jit
    def f(x):
      seen.append(resolved_mesh(OperationMetadata()))
      return x

    f(1.0)
    with jax.set_mesh(self.mesh):
      f(1.0)
    self.assertEqual(seen, [None, self.mesh.abstract_mesh])

  def test_in_shard_map(self):
    seen = []

    def local(x):
      seen.append(resolved_mesh(OperationMetadata()))
      return x

    jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=P("a"), out_specs=P("a")))(np.ones(4))
    self.assertEqual(dict(seen[0].shape), {"a": 2, "b": 4})
    self.assertEqual(seen[0].axis_types, (AxisType.Manual,) * 2)

  def test_abstract_mesh(self):
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      self.assertEqual(resolved_mesh(OperationMetadata()), self.mesh.abstract_mesh)
    metadata = OperationMetadata(mesh=self.other.abstract_mesh)
    self.assertEqual(resolved_mesh(metadata), self.other.abstract_mesh)

  def test_an_empty_mesh_is_none(self):
    with jax.set_mesh(self.mesh):
      self.assertIsNone(resolved_mesh(OperationMetadata(mesh=Mesh(np.empty((), object), ()))))


class PlatformTest(parameterized.TestCase):

  @parameterized.parameters(
      ("cpu", "cpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu"))
  def test_default_backend(self, backend, platform):
    with mock.patch.object(jax, "default_backend", lambda: backend):
      self.assertEqual(resolved_platform(OperationMetadata()), platform)
      self.assertEqual(resolved_platform(OperationMetadata(platform="tpu")), "tpu")

  def test_order(self):
    mesh = create_mesh()
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
      for fields, platform in (
          (dict(platform="tpu", backend="rocm", mesh=mesh), "tpu"),
          (dict(backend="rocm", mesh=mesh), "gpu"), (dict(mesh=mesh), "cpu"),
          (dict(mesh=mesh.abstract_mesh), "cpu"), ({}, "gpu")):
        self.assertEqual(resolved_platform(OperationMetadata(**fields)), platform)

  def test_default_device(self):
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
      for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
          self.assertEqual(resolved_platform(OperationMetadata()), "cpu")
          self.assertEqual(resolved_platform(OperationMetadata(backend="cuda")), "gpu")

  def test_unknown(self):
    with mock.patch.object(jax, "default_backend", lambda: "abacus"):
      with self.assertRaisesRegex(ValueError, "'abacus': expected one of 'cpu', 'gpu', 'tpu'"):
        resolved_platform(OperationMetadata())


class CapabilityTest(parameterized.TestCase):

  @parameterized.parameters("9.0", "8.6", "gfx942")
  def test_attached_gpu_unless_given(self, attached):
    device = types.SimpleNamespace(compute_capability=attached)
    with (mock.patch.object(jax, "default_backend", lambda: "gpu"),
          mock.patch.object(jax, "local_devices", lambda: [device])):
      self.assertEqual(resolved_capability(OperationMetadata()), attached)
      self.assertEqual(resolved_capability(OperationMetadata(compute_capability="10.3")), "10.3")
      self.assertIsNone(resolved_capability(OperationMetadata(mesh=create_mesh())))

  def test_default_gpu(self):
    first, second = (types.SimpleNamespace(platform="gpu", compute_capability=capability)
                     for capability in ("9.0", "8.0"))
    with mock.patch.object(jax, "local_devices", lambda backend=None: [first]):
      for chosen, capability in ((second, "8.0"), ("gpu", "9.0")):
        with mock.patch.object(jax, "config", mock.Mock(jax_default_device=chosen)):
          self.assertEqual(resolved_capability(OperationMetadata()), capability)

  def test_unknown_without_a_gpu(self):
    self.assertIsNone(resolved_capability(OperationMetadata(platform="gpu")))


class TpuVersionTest(absltest.TestCase):

  def test_attached_tpu_or_that_of_the_mesh(self):
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    kind = jax.sharding.AbstractDevice("TPU v4", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=kind)
    with mock.patch.object(jax, "local_devices", lambda: [device]):
      self.assertEqual(resolved_tpu_version(OperationMetadata(platform="tpu")), "v5e")
      self.assertEqual(resolved_tpu_version(OperationMetadata(platform="tpu", mesh=mesh)), "v4")

  def test_unknown_on_other_platforms(self):
    for platform in "cpu", "gpu", "tpu":  # the devices are CPUs
      self.assertIsNone(resolved_tpu_version(OperationMetadata(platform=platform)))
      self.assertIsNone(resolved_tpu_version(OperationMetadata(
          platform=platform, mesh=create_mesh())))


if __name__ == "__main__":
  absltest.main()
