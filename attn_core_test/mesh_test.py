# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes: sizes, granules (hosts or slices), coordinates of expert meshes, conversion to a dict."""

import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core.sharding import mesh as mesh_lib
from attn_core.sharding.mesh import (
    auto_expert_mesh, create_mesh, expert_abstract_mesh, expert_mesh, mesh_from_dict, mesh_to_dict)

jax.config.update("jax_num_cpu_devices", 8)

ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent

# One of two processes with two devices each; prints the mesh that it gets.
PROCESS = """
import sys, jax
index, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from attn_core.sharding.mesh import create_mesh
for dims, dcn in (((1, -1, 1, 1, 1), None), ((1, 2, 1, 2, 1), (1, 1, 1, 2, 1))):
  mesh = create_mesh(dims, sharding_dcn_axis_dims=dcn)
  print("processes", [device.process_index for device in mesh.devices.flat])
"""


class Device:
  """The attributes of a device that a mesh reads."""

  def __init__(self, index, process, slice_index, platform="cpu"):
    self.id, self.process_index, self.slice_index = index, process, slice_index
    self.platform = self.device_kind = platform

  def __repr__(self):
    return f"Device({self.id})"


def devices(granules, platform="cpu", slices=True):
  """Returns eight devices by granule: slices, or processes of one slice."""
  return [Device(i, i * granules // 8, i * granules // 8 if slices else 0, platform)
          for i in range(8)]


def mesh_of_devices(fakes, *args, **kwargs):
  with mock.patch.object(jax, "devices", lambda backend=None: fakes):
    return create_mesh(*args, **kwargs)


def ids(mesh):
  return np.vectorize(lambda device: device.id)(mesh.devices)


class CreateMeshTest(parameterized.TestCase):

  def test_defaults(self):
    mesh = create_mesh()
    self.assertEqual(mesh.axis_names, ("dp", "fsdp", "ep", "tp", "sp"))
    self.assertEqual(mesh.devices.shape, (1, 8, 1, 1, 1))
    self.assertEqual(mesh.axis_types, (AxisType.Auto,) * 5)
    self.assertCountEqual(mesh.devices.flat, jax.devices())

  @parameterized.parameters(
      ((-1, 1, 1, 1, 1), (8, 1, 1, 1, 1)),
      ((2, -1, 1, 2, 1), (2, 2, 1, 2, 1)),
      ((2, 2, 1, 2, -1), (2, 2, 1, 2, 1)),
      ([4, 1, 1, 2, 1], (4, 1, 1, 2, 1)),
      (np.array([1, 1, 1, 1, 8]), (1, 1, 1, 1, 8)),
  )
  def test_sizes(self, dims, shape):
    self.assertEqual(create_mesh(dims).devices.shape, shape)

  def test_names_and_backend(self):
    mesh = create_mesh((2, -1), ("a", "b"), backend="cpu")
    self.assertEqual(dict(mesh.shape), {"a": 2, "b": 4})
    self.assertEqual(mesh, create_mesh((2, 4), ["a", "b"], backend=""))

  @parameterized.parameters(
      # A mesh shape within a granule, and one of granules.
      dict(dims=(1, -1, 1, 1, 1), dcn=None, slow=(1, 4, 1, 1, 1)),
      dict(dims=(2, 2, 1, 2, 1), dcn=None, slow=(2, 2, 1, 1, 1)),
      dict(dims=(1, 1, 1, 8, 1), dcn=None, slow=(1, 1, 1, 4, 1)),
      dict(dims=(2, 1, 1, 1, 4), dcn=(1, 1, 1, 1, -1), slow=(1, 1, 1, 1, 4)),
      dict(dims=(2, 1, 1, 4, 1), dcn=(2, 1, 1, 2, 1), slow=(2, 1, 1, 2, 1)),
  )
  def test_granules_are_the_slower_part_of_every_axis(self, dims, dcn, slow):
    for slices in (True, False):
      mesh = mesh_of_devices(devices(4, slices=slices), dims, sharding_dcn_axis_dims=dcn)
      fast = [size // granules for size, granules in zip(mesh.devices.shape, slow)]
      for place, device in np.ndenumerate(mesh.devices):
        granule = [coordinate // size for coordinate, size in zip(place, fast)]
        self.assertEqual(np.ravel_multi_index(granule, slow), device.process_index)

  def test_processes_can_be_granules_of_slices(self):
    fakes = [Device(i, i // 2, i // 4) for i in range(8)]
    dims, dcn = (1, 2, 1, 4, 1), (1, 1, 1, 4, 1)
    mesh = mesh_of_devices(fakes, dims, sharding_dcn_axis_dims=dcn, process_is_granule=True)
    self.assertEqual(mesh.devices.shape, dims)
    self.assertEqual([d.process_index for d in mesh.devices[0, 0, 0, :, 0]], [0, 1, 2, 3])
    with self.assertRaisesRegex(ValueError, r"product 4: expected 2, as there are 2 granules"):
      mesh_of_devices(fakes, dims, sharding_dcn_axis_dims=dcn)

  def test_order_of_granules(self):
    fakes = devices(2)[::-1]
    self.assertEqual(mesh_of_devices(fakes, (2, 4), ("a", "b")).devices[0, 0].slice_index, 0)
    mesh = mesh_of_devices(fakes, (2, 4), ("a", "b"), should_sort_granules_by_key=False)
    self.assertEqual(mesh.devices[0, 0].slice_index, 1)

  def test_two_processes(self):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      port = str(free.getsockname()[1])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT)] + sys.path))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(index), port], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE) for index in range(2)]
    for process in processes:
      self.addCleanup(process.kill)
    for process in processes:
      output, errors = process.communicate(timeout=120)
      self.assertEqual(process.returncode, 0, errors)
      self.assertEqual([line for line in output.splitlines() if line.startswith("processes")],
                       ["processes [0, 0, 1, 1]", "processes [0, 1, 0, 1]"])


class OutermostTest(absltest.TestCase):

  def test_every_number_of_granules(self):
    """The first axes take as many as divide them; what is left over is refused."""
    for dims in itertools.product((1, 2, 3, 4, 6), repeat=3):
      for granules in range(1, 13):
        left, wanted = granules, []
        for dim in dims:
          wanted.append(max(n for n in range(1, dim + 1) if dim % n == 0 and left % n == 0))
          left //= wanted[-1]
        if left == 1:
          self.assertEqual(mesh_lib._outermost(dims, granules), tuple(wanted))
        else:
          with self.assertRaisesRegex(ValueError, f"; {left} of them are left"):
            mesh_lib._outermost(dims, granules)


class ExpertMeshTest(parameterized.TestCase):

  @parameterized.product(
      dims=[(2, 2, 1, 2, 1), (1, 2, 2, 1, 2), (2, 1, 2, 1, 2), (1, 2, 1, 2, 2), (1, 1, 2, 2, 2)],
      fsdp=[True, False], sp=[True, False])
  def test_coordinates_agree_with_the_main_mesh(self, dims, fsdp, sp):
    main = create_mesh(dims)
    # Devices out of the order of their ids, as on a torus.
    main = Mesh(np.random.default_rng(0).permutation(main.devices.ravel()).reshape(dims),
                main.axis_names)
    mesh = expert_mesh(main, fsdp, sp)
    self.assertEqual(mesh.axis_names, ("dp", "ep", "tp"))
    seen = set()
    for place, device in np.ndenumerate(main.devices):
      at = dict(zip(main.axis_names, place))
      size = dict(main.shape)
      dp, ep = at["dp"], at["ep"]
      if fsdp:
        ep = ep * size["fsdp"] + at["fsdp"]
      else:
        dp = at["fsdp"] * size["dp"] + dp
      if sp:
        ep = ep * size["sp"] + at["sp"]
      else:
        dp = dp * size["sp"] + at["sp"]
      self.assertIs(mesh.devices[dp, ep, at["tp"]], device)
      seen.add((dp, ep, at["tp"]))
    self.assertLen(seen, 8)

  @parameterized.product(
      dims=[(2, 2, 1, 2, 1), (1, 2, 2, 1, 2), (2, 1, 2, 1, 2), (1, 2, 2, 2, 1)],
      fsdp=[True, False], sp=[True, False])
  def test_moving_to_an_expert_mesh_only_slices_shards(self, dims, fsdp, sp):
    main = create_mesh(dims)
    experts = auto_expert_mesh(main, fsdp, sp)
    batch = "dp" if fsdp else ("fsdp", "dp")
    for there, here in ((batch, "dp"), ("ep", "ep"), ("tp", "tp")):
      before = NamedSharding(main, P(there)).devices_indices_map((8,))
      after = NamedSharding(experts, P(here)).devices_indices_map((8,))
      for device in main.devices.flat:
        kept = set(range(8)[before[device][0]])
        self.assertContainsSubset(set(range(8)[after[device][0]]), kept)

  def test_bound_axes_leave_dp_and_tp_alone(self):
    main = create_mesh((2, 2, 1, 2, 1))
    mesh = expert_mesh(main)
    self.assertEqual(mesh.devices.shape, (2, 2, 2))
    for place, device in np.ndenumerate(main.devices):
      (dp,), _, (tp,) = np.where(mesh.devices == device)
      self.assertEqual((dp, tp), (place[0], place[3]))

  def test_types_and_abstract_mesh(self):
    main = create_mesh((2, 2, 1, 2, 1))
    for flags in itertools.product((True, False), repeat=2):
      explicit, auto = expert_mesh(main, *flags), auto_expert_mesh(main, *flags)
      self.assertEqual(explicit.axis_types, (AxisType.Explicit,) * 3)
      self.assertEqual(auto.axis_types, (AxisType.Auto,) * 3)
      np.testing.assert_array_equal(ids(explicit), ids(auto))
      abstract = expert_abstract_mesh(main, *flags)
      self.assertIsInstance(abstract, AbstractMesh)
      self.assertEqual(abstract, explicit.abstract_mesh)

  def test_other_orders_and_absent_axes(self):
    main = create_mesh((2, 4), ("tp", "fsdp"))
    mesh = expert_mesh(main)
    self.assertEqual(mesh.devices.shape, (1, 4, 2))
    np.testing.assert_array_equal(ids(mesh)[0], ids(main).T)


class MeshToDictTest(parameterized.TestCase):

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_round_trip(self, kind):
    grid = np.array(jax.devices())[[3, 1, 2, 0]].reshape(2, 2)
    mesh = Mesh(grid, ("x", "y"), axis_types=(AxisType.Auto, kind))
    back = mesh_from_dict(json.loads(json.dumps(mesh_to_dict(mesh))))
    self.assertEqual(back, mesh)
    self.assertEqual(back.axis_types, mesh.axis_types)
    np.testing.assert_array_equal(ids(back), [[3, 1], [2, 0]])

  def test_contents(self):
    mesh = create_mesh((2, 4), ("x", "y"))
    self.assertEqual(mesh_to_dict(mesh), {
        "axis_names": ["x", "y"], "axis_sizes": [2, 4], "axis_types": ["Auto", "Auto"],
        "platform": "cpu", "device_ids": [0, 1, 2, 3, 4, 5, 6, 7]})


def altered(**entries):
  return dict(mesh_to_dict(create_mesh((2, 4), ("x", "y"))), **entries)


class ErrorsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("product", lambda: create_mesh((2, 2, 1, 1, 1)),
       r"sharding_axis_dims=\(2, 2, 1, 1, 1\) has the product 4: expected 8, .* 8 devices; .* -1"),
      ("rest", lambda: create_mesh((3, -1, 1, 1, 1)),
       r"sharding_axis_dims=\(3, -1, 1, 1, 1\): .* divides the 8 devices; the given ones have 3"),
      ("two open", lambda: create_mesh((-1, -1, 1, 1, 1)),
       r"has 2 sizes of -1: expected at most one"),
      ("zero", lambda: create_mesh((0, -1, 1, 1, 1)), r"\(0, -1, 1, 1, 1\): expected positive"),
      ("fraction", lambda: create_mesh((2.0, 4), ("a", "b")), r"expected positive integers"),
      ("no sizes", lambda: create_mesh(None), r"sharding_axis_dims=None: expected a tuple"),
      ("a number", lambda: create_mesh(8), r"sharding_axis_dims=8: expected a tuple"),
      ("a string", lambda: create_mesh("8", ("a",)), r"sharding_axis_dims='8': expected a tuple"),
      ("a flag", lambda: create_mesh((True, 8), ("a", "b")), r"expected positive integers"),
      ("a name", lambda: create_mesh((8,), "a"), r"sharding_axis_names='a': expected a tuple"),
      ("no names", lambda: create_mesh((8,), None), r"sharding_axis_names=None: expected a tuple"),
      ("lists", lambda: create_mesh((8,), (["a"],)), r"sharding_axis_names=\(\['a'\],\)"),
      ("backend's kind", lambda: create_mesh(backend=3), r"backend=3: expected the name"),
      ("expert flag", lambda: expert_mesh(create_mesh(), "no"), r"fsdp_is_ep_bound='no'"),
      ("length", lambda: create_mesh((8,)), r"\(8,\) has 1 sizes: expected one for each of the 5"),
      ("names", lambda: create_mesh((2, 4), ("a", "a")), r"sharding_axis_names=\('a', 'a'\)"),
      ("no name", lambda: create_mesh((2, 4), ("a", "")), r"sharding_axis_names=\('a', ''\)"),
      ("backend", lambda: create_mesh(backend="abacus"),
       r"backend='abacus': expected a backend that has devices here, .* 'cpu'"),
      ("granules of one", lambda: create_mesh(sharding_dcn_axis_dims=(2, 1, 1, 1, 1)),
       r"sharding_dcn_axis_dims=\(2, 1, 1, 1, 1\) has the product 2: expected 1, .* 1 granules"),
      ("dcn length", lambda: create_mesh(sharding_dcn_axis_dims=(1,)),
       r"sharding_dcn_axis_dims=\(1,\) has 1 sizes"),
      ("dcn divisor",
       lambda: mesh_of_devices(devices(4), (2, 4), ("a", "b"), sharding_dcn_axis_dims=(4, 1)),
       r"sharding_dcn_axis_dims=\(4, 1\): expected divisors of sharding_axis_dims=\(2, 4\)"),
      ("granules that do not fit",
       lambda: mesh_of_devices([Device(i, i // 2, i // 2) for i in range(6)] +
                       [Device(i, 3, 3) for i in range(6, 9)], (3, 3), ("a", "b")),
       r"sharding_axis_dims=\(3, 3\): .* the 4 granules .* 4 of them are left over"),
      ("expert axes", lambda: expert_mesh(create_mesh((2, 4), ("dp", "x"))),
       r"mesh has axes \('dp', 'x'\): expected axes of \('dp', 'fsdp', 'ep', 'tp', 'sp'\)"),
      ("expert mesh", lambda: auto_expert_mesh(create_mesh().abstract_mesh),
       r"mesh=AbstractMesh.*: expected a jax.sharding.Mesh"),
      ("abstract to dict", lambda: mesh_to_dict(create_mesh().abstract_mesh), r"without devices"),
      ("name to dict", lambda: mesh_to_dict(Mesh(np.array(jax.devices()), (3,))),
       r"axis_names=\(3,\): expected strings"),
      ("keys", lambda: mesh_from_dict({"axis_names": []}), r"expected a dict of axis_names,"),
      ("platform", lambda: mesh_from_dict(altered(platform="abacus")), r"platform 'abacus'"),
      ("ids", lambda: mesh_from_dict(altered(device_ids=[0, 1, 2, 3, 4, 5, 6, 99])),
       r"device_ids \[99\]: expected ids of the cpu devices here, \[0, 1,"),
      ("sizes", lambda: mesh_from_dict(altered(axis_sizes=[2, 2])), r"axis_sizes \[2, 2\] and 8"),
      *((f"{entry} {value!r}", lambda entry=entry, value=value: mesh_from_dict(
          altered(**{entry: value})), f"mesh has {entry} .*: expected") for entry, values in (
              ("axis_names", (None, 3, "xy", ["x", ""], ["x", "x"], [1, 2])),
              ("axis_sizes", (None, 8, "24", [8], [2.0, 4], [-2, -4], [True, 8])),
              ("axis_types", (None, 3, [], ["Auto"], [["Auto"], ["Auto"]])),
              ("device_ids", (None, 8, "01234567", [str(n) for n in range(8)])),
              ("platform", (3, ["cpu"]))) for value in values),
      ("types", lambda: mesh_from_dict(altered(axis_types=["Auto", "Car"])),
       r"axis_types \['Auto', 'Car'\]: expected names among Auto, Explicit"),
  )
  def test_bad_call(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  def test_hosts_of_one_tpu_slice_are_one_granule(self):
    self.assertEqual(mesh_lib._granules(devices(4, "tpu", slices=False), False), ("slice_index", 1))
    self.assertEqual(mesh_lib._granules(devices(4, "tpu", slices=False), True),
                     ("process_index", 4))
    self.assertEqual(mesh_lib._granules(devices(4, "gpu", slices=False), False),
                     ("process_index", 4))


if __name__ == "__main__":
  absltest.main()
