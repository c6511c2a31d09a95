# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metadata, its shardings, kinds of devices and policies of rematerialization as text."""

import itertools
import types
from typing import Any, Iterator

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, OperationMetadata, PartitionAxis, RingConfig
from attn_core.config import devices, metadata as metadata_lib, remat
from attn_core.config.remat import checkpoint_policy
from attn_core.types import MODES
from attn_core_test.approved_config import BASE, metadata_text
from attn_core_test.approved_text import Line, abstract_mesh, attempt, text
from attn_core_test.approved_values import candidates, lines

METADATA_VALUES: dict[str, tuple[Any, ...]] = {
    "runtime_dtype": (jnp.bfloat16, "float16", np.dtype(">f4")),
    "platform": ("gpu", "TPU", "cuda"),
    "backend": ("cuda", "GPU"), "mesh": (abstract_mesh((2, 3), ("dp", "tp"), AxisType.Explicit),),
    "partition_axis": (PartitionAxis(head_axis=["tp", "sp"]), PartitionAxis(head_axis=3)),
    "operation_configs": ({"ring": BlockSizes(3), "flash_attn2": BlockSizes()}, {"x": BlockSizes()},
                          (("ring", 3),), {"ring": BlockSizes(0)}, {"splash": BlockSizes(2)}),
    "compute_capability": ("9.0", "10.3", "9", "sm90", 9.0, "9.0a"),
    "ring": (RingConfig("all_gather", "zigzag"), RingConfig("hybrid"), RingConfig("x"),
             RingConfig("hybrid", heads_axis_name="tp"), RingConfig(layout="x"),
             RingConfig(heads_axis_name="tp"), RingConfig(transfer="x"),
             RingConfig("ulysses", transfer="remote"), RingConfig("hybrid", heads_axis_name="sp"),
             RingConfig("hybrid", heads_axis_name=3), {"variant": "ring"}),
    "softmax_scale": (0.125,), "blocksize_q": (64, np.int64(3))}


def metadata() -> Iterator[str]:
  """Yields what metadata makes of each value of each field, and the files that it writes."""
  base = OperationMetadata()
  names = [f.name for f in base.__dataclass_fields__.values()]
  for name in names:
    yield from lines(name, lambda x, name=name: base.replace(**{name: x}),
                     candidates(0, METADATA_VALUES.get(name, ())))
  full = OperationMetadata(
      "bfloat16", "float32", "tp", None, "gpu", None, PartitionAxis(batch_axis=("dp", "sp")), BASE,
      False, 0.5, 0.25, 3, 5, 7, {"ring": BlockSizes(1, 2)}, "9.0", RingConfig("ulysses"))
  for indent in (None, 2):
    written = full.to_json(indent)
    yield from (f"json {indent}: {written[i:i + 200]}" for i in range(0, len(written), 200)) if (
        indent is None) else (f"json {indent}: {len(written.splitlines())} lines",)
    yield text(OperationMetadata.from_json(written) == full)
  for given in ({}, {"x": 1}, {"ring": {"variant": "ulysses"}}, {"ring": {"x": 1}}, 3, "x",
                {"partition_axis": {"batch_axis": "dp"}}, {"operation_configs": {"ring": {"x": 1}}},
                {"operation_configs": {"ring": {"block_q": 3}}}, {"base_config": {"a": 1}},
                {"mesh": {"axis_names": ["a"]}}, {"runtime_dtype": "x"}):
    yield f"from_dict {given}: {attempt(lambda given=given: OperationMetadata.from_dict(given))}"
  for given in ("", "[1]", "{", 3):
    yield f"from_json {given!r}: {attempt(lambda given=given: OperationMetadata.from_json(given))}"
  for given in (None, 3, {"attn_dtype": "float16"}, types.SimpleNamespace(attn_dtype="bfloat16"),
                types.SimpleNamespace(platform="x"), types.SimpleNamespace(
                    platform="triton", blocksize_q=3, scan_ring_attention=False)):
    yield f"from_config {text(given) if given is None else given}: " + attempt(
        lambda given=given: Line(metadata_text(OperationMetadata.from_config(given))))
  for name in ("ring", "splash", "blocksparse", "x", 3, "auto"):
    yield f"get_operation_config {name}: " + attempt(
        lambda name=name: full.replace(operation_configs={
            "ring": BlockSizes(3), "blocksparse": BlockSizes(5)}).get_operation_config(name))


def shardings() -> Iterator[str]:
  """Yields the specs of all tensors, by mode, layout and axes."""
  mesh = abstract_mesh((2, 2, 2), ("dp", "tp", "sp"))
  for name, axes in {"default": PartitionAxis(), "own": PartitionAxis(
      batch_axis="dp", head_axis=("tp", "x"), kv_head_axis="x", decode_batch_axis=None,
      attention_dim_axis="d", attention_kv_dim_axis="e", bias_head_sequence_axis="b",
      decode_query_sequence_axis="q", bias_key_sequence_axis="c", decode_head_axis="h"),
                     "twice": PartitionAxis(batch_axis="tp", query_sequence_axis=("dp", "tp"))
                     }.items():
    for on, mode, layout, mni in itertools.product(
        (None, mesh), (*MODES, "x"), ("bthd", "bhtd", "thd", "x"), (False, True)):
      if name != "default" and (mni or on):
        continue
      one = OperationMetadata(partition_axis=axes, mesh=on, platform="cpu")
      where = "on a mesh " if on else ""
      yield f"{name} {where}{mode} {layout} {'mni' if mni else ''}: " + attempt(
          lambda a=(one, mode, layout, mni): a[0].get_shardings(*a[1:]))
      drops = attempt(lambda a=(one, mode, layout, mni): [
          f"{d.tensor}[{d.dimension}] {d.axis}: {d.reason}" for d in metadata_lib.dropped_axes(*a)])
      if drops != "[]":
        yield f"  {drops}"
  for aux in (np.zeros(3), np.zeros((3, 2)), np.zeros((1, 2, 3)), 3, None):
    yield f"sinks {text(aux)}: " + attempt(lambda aux=aux: OperationMetadata().get_shardings(
        "__train__", softmax_aux=aux).softmax_aux)


class _Device:
  """A device with a kind, and a capability if it has any."""

  def __init__(self, platform: str, kind: str, capability: str | None = None):
    self.platform, self.device_kind, self.id, self.process_index = platform, kind, 0, 0
    if capability:
      self.compute_capability = capability


def hardware() -> Iterator[str]:
  """Yields what is chosen for kinds of devices."""
  kinds = [("tpu", kind) for kind in (
      "TPU v2", "TPU v3", "TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite",
      "TPU v6e", "TPU7x", "TPU v7x", "TPU v8")] + [
          ("gpu", "NVIDIA H100 80GB HBM3"), ("cuda", "Tesla V100"), ("rocm", "AMD MI300"),
          ("cpu", "cpu"), ("METAL", "Apple")]
  for platform, kind in kinds:
    device = _Device(platform, kind)
    versions = [v for v in (*devices.TPU_VERSIONS,) if devices.tpu_version_check(v, device)]
    yield f"{platform} {kind}: {attempt(lambda device=device: devices.get_optimal_config(device))}"
    yield f"  versions {versions}, {attempt(lambda kind=kind: devices.tpu_version(kind))}"
  for version in ("v1", "5", "V5E", 3, ""):
    yield f"{version}: " + attempt(lambda v=version: devices.tpu_version_check(
        v, _Device("tpu", "TPU v5e")))
  yield "not a device: " + attempt(lambda: devices.get_optimal_config("cpu"))
  for platform, capability in itertools.product(("cpu", "gpu", "tpu", None), ("9.0", None)):
    for backend in ("cuda", "tpu", None):
      one = OperationMetadata(platform=platform, compute_capability=capability, backend=backend)
      yield f"{platform} {capability} {backend}: {metadata_lib.resolved_platform(one)} " + attempt(
          lambda one=one: (metadata_lib.resolved_capability(one),
                           metadata_lib.resolved_tpu_version(one)))
  for platform, kind, capability in (
      ("gpu", "NVIDIA H100", "9.0"), ("cuda", "NVIDIA A100", "8.0"), ("gpu", "?", None),
      ("tpu", "TPU v5e", None), ("tpu", "TPU7x", None), ("cpu", "cpu", None), ("x", "x", None)):
    mesh = Mesh(np.array([_Device(platform, kind, capability)]), ("dp",))
    for name, given in {"mesh": {"mesh": mesh}, "base": {"base_config": types.SimpleNamespace(
        mesh=mesh)}, "platform": {"mesh": mesh, "platform": "gpu"}, "capability": {
            "mesh": mesh, "compute_capability": "7.5"}, "backend": {
                "mesh": mesh, "backend": "tpu"}}.items():
      one = attempt(lambda given=given: Line(text([f(OperationMetadata(**given)) for f in (
          metadata_lib.resolved_platform, metadata_lib.resolved_capability,
          metadata_lib.resolved_tpu_version)])))
      yield f"{kind} by {name}: {one}"


def policies() -> Iterator[str]:
  """Yields what the policies of rematerialization save, by their names."""
  names = (*remat.NAMES, "mine")
  program = jax.make_jaxpr(lambda x: [checkpoint_name(x, name) for name in names] + [
      x @ x, jnp.einsum("bij,bjk->bik", x[None], x[None]), x + x])(jnp.ones((3, 3)))
  equations = {str(e.params.get("name", f"{e.primitive.name} of rank {e.outvars[0].aval.ndim}")): e
               for e in program.eqns if e.primitive.name in ("name", "dot_general", "add")}

  def saved(policy: Any) -> Any:
    if policy is None:
      return None
    return [name for name, e in equations.items()
            if policy(e.primitive, *(x.aval for x in e.invars), **e.params) not in (False, None)]

  for name in (*remat.POLICIES, *remat.TARGETED, *remat.NONE, "x", None, 3):
    for targets in (None, ("attn_output",), ("attn_qkv", "mine"), ("attn_key_value",), (),
                    "attn_output", (3,)):
      said = attempt(lambda name=name, targets=targets: saved(checkpoint_policy(name, targets)))
      yield f"{name} {targets}: {said}"


FILES = {"metadata_fields": metadata, "metadata_shardings": shardings, "metadata_devices": hardware,
         "metadata_policies": policies}
