# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Device meshes: the main mesh, meshes for mixtures of experts, and meshes as plain data."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh
import numpy as np

AXIS_NAMES = ("dp", "fsdp", "ep", "tp", "sp")
EXPERT_AXIS_NAMES = ("dp", "ep", "tp")


def create_mesh(
    sharding_axis_dims: Sequence[int] = (1, -1, 1, 1, 1),
    sharding_axis_names: Sequence[str] = AXIS_NAMES,
    sharding_dcn_axis_dims: Sequence[int] | None = None,
    process_is_granule: bool = False,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
) -> Mesh:
  """Creates a mesh over all devices of a backend; all its axes are Auto.

  A granule is a group of devices joined by a fast network: a slice if there are several slices,
  else a process if there are several and they are not the hosts of one TPU slice, else all devices.
  With several granules the mesh is hybrid: along each axis the granule is the slower part of the
  coordinate and the device within the granule the faster part.

  Example (with 8 devices):
    >>> from attn_core import create_mesh
    >>> mesh = create_mesh((2, -1, 1, 2, 1))
    >>> dict(mesh.shape)
    {'dp': 2, 'fsdp': 2, 'ep': 1, 'tp': 2, 'sp': 1}

  Args:
    sharding_axis_dims: devices along each axis of the whole mesh, over all granules; one -1 is
      filled with the remaining devices.
    sharding_axis_names: the axes, outermost first.
    sharding_dcn_axis_dims: granules along each axis, each a divisor of the axis; one -1 is filled.
      None: the outermost axes take as many granules as divide them, since they communicate least.
    process_is_granule: whether every process is a granule, even where there are slices.
    should_sort_granules_by_key: whether granules are ordered by their slice or process index;
      otherwise they keep the order in which the backend lists their devices.
    allow_split_physical_axes: whether one axis of the hardware's torus may be split into several
      axes of the mesh.
    backend: the platform of the devices; None or "": the default backend.

  Returns:
    A mesh of shape `sharding_axis_dims`.

  Raises:
    ValueError: sizes or names are not sequences, or differ in number; a name is empty, not a string
      or repeated; a size is neither positive nor the only -1; the product of the sizes is not the
      number of devices (for `sharding_dcn_axis_dims`: of granules); granules do not divide the
      axes; or `backend` is not a string or has no devices here.
  """
  names = _sequence("sharding_axis_names", sharding_axis_names)
  if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
    raise ValueError(f"sharding_axis_names={names}: expected different, non-empty strings")
  if backend is not None and not isinstance(backend, str):
    raise ValueError(f"backend={backend!r}: expected the name of a backend, or None for the "
                     "default one")
  try:
    devices = jax.devices(backend or None)
  except RuntimeError as error:
    raise ValueError(f"backend={backend!r}: expected a backend that has devices here, or None for "
                     f"the default one, {jax.default_backend()!r}") from error
  dims = _filled("sharding_axis_dims", sharding_axis_dims, names, len(devices), "devices")
  key, granules = _granules(devices, process_is_granule)
  if sharding_dcn_axis_dims is None:
    dcn_dims = _outermost(dims, granules)
  else:
    dcn_dims = _filled("sharding_dcn_axis_dims", sharding_dcn_axis_dims, names, granules,
                       "granules (slices; processes if process_is_granule)")
  if any(dim % dcn for dim, dcn in zip(dims, dcn_dims)):
    raise ValueError(f"sharding_dcn_axis_dims={dcn_dims}: expected divisors of "
                     f"sharding_axis_dims={dims}, the sizes of the whole mesh")
  if granules == 1:
    grid = mesh_utils.create_device_mesh(
        dims, devices, allow_split_physical_axes=allow_split_physical_axes)
  else:
    grid = mesh_utils.create_hybrid_device_mesh(
        tuple(dim // dcn for dim, dcn in zip(dims, dcn_dims)), dcn_dims, devices,
        process_is_granule=key == "process_index",
        should_sort_granules_by_key=should_sort_granules_by_key,
        allow_split_physical_axes=allow_split_physical_axes)
  return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def expert_mesh(mesh: Mesh, fsdp_is_ep_bound: bool = True, sp_is_ep_bound: bool = True) -> Mesh:
  """Rearranges the devices of a mesh over ("dp", "ep", "tp"), for mixtures of experts.

  All axes are Explicit. fsdp and sp become part of ep if bound and part of dp otherwise. The
  coordinates are those of the main mesh, read as digits, slowest first:

      dp' = (fsdp if unbound, dp, sp if unbound)
      ep' = (ep, fsdp if bound, sp if bound)
      tp' = (tp)

  If both are bound every device keeps its dp; it always keeps its tp. In this order a device's
  block of the experts, over ep', is a part of its block over ep on the main mesh, and its block of
  the batch, over dp', is a part of its block over the main mesh's ("fsdp", "dp"), or over "dp" if
  fsdp is bound: resharding between the two meshes slices blocks and moves no data.

  Args:
    mesh: a mesh with axes of AXIS_NAMES, in any order; an absent axis counts as size 1.
    fsdp_is_ep_bound: whether fsdp is part of ep.
    sp_is_ep_bound: whether sp is part of ep.

  Returns:
    A mesh over ("dp", "ep", "tp").

  Raises:
    ValueError: `mesh` is not a `jax.sharding.Mesh`, or has an axis that is not of AXIS_NAMES; or a
      flag is neither True nor False.
  """
  return _folded(mesh, fsdp_is_ep_bound, sp_is_ep_bound, AxisType.Explicit)


def auto_expert_mesh(
    mesh: Mesh, fsdp_is_ep_bound: bool = True, sp_is_ep_bound: bool = True) -> Mesh:
  """Same as `expert_mesh`, with Auto axes: the compiler chooses shardings."""
  return _folded(mesh, fsdp_is_ep_bound, sp_is_ep_bound, AxisType.Auto)


def expert_abstract_mesh(
    mesh: Mesh, fsdp_is_ep_bound: bool = True, sp_is_ep_bound: bool = True) -> AbstractMesh:
  """Same as `expert_mesh`, as an abstract mesh: names, sizes and axis types without devices."""
  return expert_mesh(mesh, fsdp_is_ep_bound, sp_is_ep_bound).abstract_mesh


def mesh_to_dict(mesh: Mesh) -> dict[str, Any]:
  """Converts a mesh to JSON-serializable values; `mesh_from_dict` is the inverse.

  Args:
    mesh: a mesh of devices of one platform, with strings as axis names.

  Returns:
    axis_names, axis_sizes, axis_types, platform and device_ids.

  Raises:
    ValueError: `mesh` is not a `jax.sharding.Mesh` with at least one device (an abstract mesh has
      none), or an axis name is not a string.
  """
  if not isinstance(mesh, Mesh) or mesh.empty:
    raise ValueError(f"mesh={mesh!r}: expected a jax.sharding.Mesh of at least one device; a mesh "
                     "without devices cannot be serialized: replace it, or set it to None")
  if not all(isinstance(name, str) for name in mesh.axis_names):
    raise ValueError(f"mesh has axis_names={mesh.axis_names}: expected strings, which can be "
                     "serialized")
  return {
      "axis_names": list(mesh.axis_names),
      "axis_sizes": list(mesh.devices.shape),
      "axis_types": [kind.name for kind in mesh.axis_types],
      "platform": mesh.devices.flat[0].platform,
      "device_ids": [device.id for device in mesh.devices.flat],
  }


def mesh_from_dict(data: dict[str, Any]) -> Mesh:
  """Rebuilds a mesh from `mesh_to_dict`, with this process's devices of the same ids.

  Args:
    data: the result of `mesh_to_dict`.

  Returns:
    The mesh.

  Raises:
    ValueError: `data` is not a dict with exactly the entries of `mesh_to_dict`, each of its type;
      the number of device ids is not the product of the sizes, an axis type is unknown, or this
      process does not have the platform or the devices.
  """
  expected = ("axis_names", "axis_sizes", "axis_types", "platform", "device_ids")
  if not isinstance(data, dict) or set(data) != set(expected):
    raise ValueError(f"mesh={data!r}: expected a dict of {', '.join(expected)}")
  _check_entries(data)
  try:
    devices = {device.id: device for device in jax.devices(data["platform"])}
    kinds = tuple(AxisType[name] for name in data["axis_types"])
  except RuntimeError as error:
    raise ValueError(f"mesh of platform {data['platform']!r}: expected one that has devices here; "
                     f"the default backend is {jax.default_backend()!r}") from error
  except KeyError as error:
    raise ValueError(f"mesh has axis_types {data['axis_types']}: expected names among "
                     f"{', '.join(kind.name for kind in AxisType)}") from error
  if math.prod(data["axis_sizes"]) != len(data["device_ids"]):
    raise ValueError(f"mesh has axis_sizes {data['axis_sizes']} and {len(data['device_ids'])} "
                     "device_ids: expected as many ids as the product of the sizes")
  missing = [i for i in data["device_ids"] if i not in devices]
  if missing:
    raise ValueError(f"mesh has device_ids {missing}: expected ids of the {data['platform']} "
                     f"devices here, {sorted(devices)}")
  grid = np.empty(len(data["device_ids"]), dtype=object)
  grid[:] = [devices[i] for i in data["device_ids"]]
  return Mesh(grid.reshape(data["axis_sizes"]), tuple(data["axis_names"]), axis_types=kinds)


def _check_entries(data: dict[str, Any]) -> None:
  """Checks the type of each entry of a mesh as a dictionary, and the numbers of axes."""
  names = data["axis_names"]
  size = lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 0
  rules = (
      ("axis_names", "different strings that are not empty", lambda x: isinstance(x, str) and x),
      ("axis_sizes", "an int for each of axis_names", size),
      ("axis_types", "a name for each of axis_names", lambda x: isinstance(x, str)),
      ("device_ids", "ints", size))
  for entry, expected, good in rules:
    found = data[entry]
    if not (isinstance(found, (list, tuple)) and all(map(good, found))
            and (entry == "device_ids" or len(found) == len(names))
            and (entry != "axis_names" or len(set(found)) == len(found))):
      raise ValueError(f"mesh has {entry} {found!r}: expected a list of {expected}")
  if not isinstance(data["platform"], (str, type(None))):
    raise ValueError(f"mesh has platform {data['platform']!r}: expected the name of a platform")


def _filled(
    argument: str, dims: Sequence[int], names: tuple[str, ...], total: int, unit: str,
) -> tuple[int, ...]:
  """Checks `dims` and replaces its -1 so that the product is `total`."""
  dims = _sequence(argument, dims)
  if len(dims) != len(names):
    raise ValueError(f"{argument}={dims} has {len(dims)} sizes: expected one for each of the "
                     f"{len(names)} axes {names}")
  if not all(isinstance(dim, (int, np.integer)) and not isinstance(dim, bool)
             and (dim > 0 or dim == -1) for dim in dims):
    raise ValueError(f"{argument}={dims}: expected positive integers, or -1 for one to be filled")
  if dims.count(-1) > 1:
    raise ValueError(f"{argument}={dims} has {dims.count(-1)} sizes of -1: expected at most one")
  given = math.prod(dim for dim in dims if dim != -1)
  if -1 in dims and total % given:
    raise ValueError(f"{argument}={dims}: expected sizes whose product divides the {total} {unit}; "
                     f"the given ones have {given}")
  if -1 not in dims and given != total:
    raise ValueError(f"{argument}={dims} has the product {given}: expected {total}, as there are "
                     f"{total} {unit}; one size can be -1 to take the remaining ones")
  return tuple(total // given if dim == -1 else int(dim) for dim in dims)


def _sequence(argument: str, value: Any) -> tuple[Any, ...]:
  """Converts a tuple, list or array to a tuple.

  Raises:
    ValueError: `value` is something else; a string would be split into its letters.
  """
  if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
    raise ValueError(f"{argument}={value!r}: expected a tuple with one entry for each axis")
  return tuple(value)


def _granules(devices: Sequence[Any], process_is_granule: bool) -> tuple[str, int]:
  """(attribute of a device that identifies its granule, number of granules)."""
  processes = len({device.process_index for device in devices})
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if process_is_granule or (slices == 1 and devices[0].platform != "tpu"):
    return "process_index", processes
  return "slice_index", slices


def _outermost(dims: tuple[int, ...], granules: int) -> tuple[int, ...]:
  """Distributes granules over the axes, as many as possible along the first axes."""
  left, dcn_dims = granules, []
  for dim in dims:
    dcn_dims.append(math.gcd(dim, left))
    left //= dcn_dims[-1]
  if left > 1:
    raise ValueError(f"sharding_axis_dims={dims}: expected sizes over which the {granules} "
                     f"granules (slices or processes) can be divided; {left} of them are left "
                     f"over; pass sharding_dcn_axis_dims, or sizes that {granules} divides")
  return tuple(dcn_dims)


def _folded(mesh: Mesh, fsdp_is_ep_bound: bool, sp_is_ep_bound: bool, kind: AxisType) -> Mesh:
  """The mesh of `expert_mesh` with axes of one type."""
  if not isinstance(mesh, Mesh):
    raise ValueError(f"mesh={mesh!r}: expected a jax.sharding.Mesh, as create_mesh gives")
  for name, bound in (("fsdp_is_ep_bound", fsdp_is_ep_bound), ("sp_is_ep_bound", sp_is_ep_bound)):
    if not isinstance(bound, bool):
      raise ValueError(f"{name}={bound!r}: expected True or False")
  if not set(mesh.axis_names) <= set(AXIS_NAMES):
    raise ValueError(f"mesh has axes {mesh.axis_names}: expected axes of {AXIS_NAMES}, which "
                     "expert_mesh knows how to fold")
  groups = (
      ([] if fsdp_is_ep_bound else ["fsdp"]) + ["dp"] + ([] if sp_is_ep_bound else ["sp"]),
      ["ep"] + (["fsdp"] if fsdp_is_ep_bound else []) + (["sp"] if sp_is_ep_bound else []),
      ["tp"],
  )
  order = [mesh.axis_names.index(n) for group in groups for n in group if n in mesh.axis_names]
  shape = [math.prod(mesh.shape.get(name, 1) for name in group) for group in groups]
  grid = mesh.devices.transpose(order).reshape(shape)
  return Mesh(grid, EXPERT_AXIS_NAMES, axis_types=(kind,) * len(EXPERT_AXIS_NAMES))
