# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes, shardings, token orders, rings and predictions as text."""

import contextlib
import io
import itertools
import sys
from typing import Any, Iterator
from unittest import mock

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

import attn_core
from attn_core import BlockSizes, OperationMetadata, PartitionAxis, RingConfig, masks
from attn_core.array_axes import axes_of, size_of
from attn_core.config import constraints
from attn_core.mechanisms.context_parallel import ring_step, ulysses
from attn_core.plan import __main__ as plan_report, context_parallel as plan, peaks, traffic, work
from attn_core.sharding import (context_parallel, mesh as mesh_lib, partition, rules as rules_lib,
                                token_order)
from attn_core.types import MODES
from attn_core_test.approved_text import abstract_mesh, attempt, text
from attn_core_test.approved_values import alternatives

TOKEN_ORDERS = token_order.TOKEN_ORDERS


class Device:
  """The attributes of a device that a mesh reads."""

  def __init__(self, index: int, process: int, slice_index: int | None):
    self.id, self.process_index, self.platform = index, process, "cpu"
    self.device_kind = "cpu"
    if slice_index is not None:
      self.slice_index = slice_index

  def __repr__(self) -> str:
    return f"D{self.id}"

  def __lt__(self, other: "Device") -> bool:
    return self.id < other.id


def _ids(mesh: Any) -> str:
  ids = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None
  return f"{text(mesh)} {ids}"


def meshes() -> Iterator[str]:
  """Yields meshes of numbers of devices in granules."""
  for dims, names, dcn in (
      ((1, -1, 1, 1, 1), None, None), ((2, 1, 1, 2, 2), None, None), ((-1, 4), ("a", "b"), None),
      ((2, 2), ("a", "b"), None), ((3, -1), ("a", "b"), None), ((-1, -1), ("a", "b"), None),
      ((8,), ("a", "b"), None), ((0, 8), ("a", "b"), None), ((8, 1), ("a", "a"), None),
      ((8, 1), ("a", 3), None), (8, ("a",), None), ((2, 4), "ab", None), 
      ((2.0, 4), ("a", "b"), None),
      ((1, 4), ("a", "b"), (2, 1)), ((4, 1), ("a", "b"), (1, 2)), ((2, 2), ("a", "b"), (1, -1)),
      ((1, 4), ("a", "b"), (2, 2)), ((1, 4), ("a", "b"), (2,)), ((2, 4), ("a", "b"), (3, 1)),
      ([1, 8], ["a", "b"], None), (np.array([2, 4]), ("a", "b"), None),
      ((-2, 8), ("a", "b"), None)):
    for granules, kind in ((1, "slice"), (2, "slice"), (4, "process")):
      devices = [Device(i, i * granules // 8, i * granules // 8 if kind == "slice" else None)
                 for i in range(8)]
      with mock.patch.object(jax, "devices", lambda backend=None, devices=devices: devices):
        yield f"{dims} {names} {dcn} {granules} of a {kind}: " + attempt(lambda a=(
            dims, names or mesh_lib.AXIS_NAMES, dcn), kind=kind: _ids(mesh_lib.create_mesh(
                *a, process_is_granule=kind == "process")))
  base = mesh_lib.create_mesh((2, 1, 1, 2, 2))
  others = {"default": base, "sp": mesh_lib.create_mesh((1, 1, 2, 1, 4)),
            "fsdp": mesh_lib.create_mesh((1, 2, 2, 2, 1)), "other": Mesh(
                np.array(jax.devices()).reshape(2, 4), ("a", "tp"))}
  for (name, mesh), fsdp, sp in itertools.product(others.items(), (True, False), (True, False)):
    yield f"{name}: experts {fsdp} {sp}: " + "; ".join(attempt(
        lambda f=function, a=(mesh, fsdp, sp): _ids(f(*a))) for function in (
            mesh_lib.expert_mesh, mesh_lib.auto_expert_mesh, mesh_lib.expert_abstract_mesh))
  for name, mesh in others.items():
    written = mesh_lib.mesh_to_dict(mesh)
    yield f"{name}: {written} {mesh_lib.mesh_from_dict(written) == mesh}"
  good = mesh_lib.mesh_to_dict(base)
  for key in good:
    for value in (None, 3, [], [1, 2], "x", [99] * 8):
      yield f"{key}={value}: " + attempt(
          lambda key=key, value=value: _ids(mesh_lib.mesh_from_dict({**good, key: value})))
  for value in (base, None, 3, abstract_mesh((2,), ("dp",))):
    yield f"expert_mesh of {text(value)}: {attempt(lambda v=value: _ids(mesh_lib.expert_mesh(v)))}"
  yield f"axes {[axes_of(e) for e in (None, 'a', ('a', 'b'))]} {size_of(base, ('dp', 'sp'))}"


def specs() -> Iterator[str]:
  """Yields the specs of tensors by meaning, mode, shape and mesh."""
  mesh = abstract_mesh((2, 3, 2, 1), ("dp", "tp", "sp", "fsdp"))
  names = sorted(partition.SEMANTIC_AXES)
  for mode in MODES:
    yield f"{mode}: " + " ".join(f"{name}={partition.mesh_axes(PartitionAxis(), name, mode)}"
                                 for name in names)
  own = PartitionAxis(**{field: f"x{i}" for i, field in enumerate(PartitionAxis._fields)})
  for mode in ("__train__", "__autoregressive__"):
    yield f"own {mode}: " + " ".join(f"{name}={partition.mesh_axes(own, name, mode)}"
                                     for name in names)
  for axes, shape, on in itertools.product(
      (("batch", "length", "head", None), ("batch", "batch", "kv_head"), (None, "head"),
       ("head", "kv_head", "batch"), ("x",), ("batch", 3), "batch"),
      (None, (4, 6, 6, 5), (3, 2, 9), (1, 1), (2, 6, 4), "x"), (None, mesh, 3)):
    yield f"{axes} {shape} {text(on)}: " + attempt(lambda a=(axes, shape, on): partition.resolve(
        PartitionAxis(), a[0], "__train__", a[1], a[2], "it"))
  for spec, shape in itertools.product(
      (P("dp"), P(("dp", "tp"), "sp"), P(("tp", "dp")), P("x", "sp"), P(None, ("sp", "x", "fsdp")),
       P("fsdp"), P("dp", "dp"), P(3), P(("dp", 3))), ((6, 4), (4,), (12, 3), (5, 5), (), None)):
    found = attempt(lambda a=(spec, shape): partition.fit(*a, mesh, "it"))
    drops = attempt(lambda a=(spec, shape): [tuple(d) for d in partition.fit(*a, mesh, "it").drops])
    yield f"fit {text(spec)} {shape}: {found} {drops if 'Error' not in drops else ''}"
  yield from alternatives(lambda value: partition.axis_names(value, "given"), {"value": "a"})
  parameters = {"layers": [{"w": np.zeros((4, 6)), "b": np.zeros(6)}, {"w": np.zeros((5, 6))}],
                "head": np.zeros((12, 4)), "one": np.zeros(()), "n": 3}
  good = (("w$", P("dp", "tp")), ("layers/1", P("sp")), ("head", P(("dp", "tp"), "sp")),
          (".*", P()))
  for given, on in itertools.product(
      (good, good[:1], good[::-1], (), "x", (("w",),), (("[", P()),), ((3, P()),), (("w", "dp"),),
       [("b", P("dp"))], ((".*", P("dp")),)), (None, mesh)):
    said = attempt(lambda a=(given, on): rules_lib.match_partition_rules(a[0], parameters, a[1]))
    yield f"rules {text(given)} {on is not None}: {said}"


def orders() -> Iterator[str]:
  """Yields orders of tokens, the tokens of shards, and permuted arrays."""
  for order, (length, shards) in itertools.product(
      (*TOKEN_ORDERS, "x"), ((24, 2), (24, 3), (24, 4), (30, 5), (7, 1), (16, 8), (9, 2), (0, 3))):
    yield f"{order} {length} over {shards}: " + attempt(
        lambda a=(order, length, shards): token_order.order(*a))
    if order in TOKEN_ORDERS and length % (2 * shards) == 0 and length:
      yield "  shards " + "; ".join(
          text(token_order.tokens_of(order, length, shards, np.int32([n])))
          for n in range(shards))
      yield "  traced " + attempt(lambda a=(order, length, shards): token_order.tokens_of(
          *a, jnp.arange(a[2])))
    yield "  " + attempt(lambda a=(order, length, shards): token_order.require_length("x", *a))
  x = {"a": np.arange(24).reshape(1, 12, 2), "b": np.arange(12)[None]}
  for function, order in itertools.product((attn_core.to_layout, attn_core.from_layout),
                                           TOKEN_ORDERS):
    yield f"{function.__name__} {order}: {attempt(lambda f=function, o=order: f(x, o, 3))}"
    yield "  traced " + attempt(lambda f=function, o=order: jax.tree.map(
        lambda y: jnp.ravel(y), f(jax.tree.map(jnp.asarray, x), o, 2)))
  good = {"x": np.arange(24).reshape(12, 2), "layout": "zigzag", "shards": 3, "axis": 0}
  yield from alternatives(lambda **given: attn_core.to_layout(**given), good,
                          {"layout": ("striped", "contiguous"), "axis": (1, -2)}, traced=True)
  yield f"pieces {[token_order.pieces(order) for order in TOKEN_ORDERS]}"


RINGS = (*(RingConfig(variant, order) for variant in ("ring", "all_gather", "ulysses")
           for order in TOKEN_ORDERS),
         *(RingConfig("hybrid", order, "tp") for order in TOKEN_ORDERS))
MASKS = {"causal": masks.causal(), "window": masks.causal() & masks.window(9, 0),
         "wide": masks.window(3, 20), "chunk": masks.chunk(12), "full": masks.full(),
         "prefix": masks.prefix(7) | masks.causal(), "segments": masks.segments(
             np.arange(48, dtype=np.int32)[None] // 11)}


def rings() -> Iterator[str]:
  """Yields the sharding of a sequence, its steps, and who sees whom."""
  mesh = abstract_mesh((4, 2, 1), ("sp", "tp", "dp"))
  for ring, (queries, keys, heads) in itertools.product(
      RINGS, ((48, 48, 8), (48, 48, 6), (40, 24, 16), (10, 14, 4), (7, 48, 3))):
    yield f"{text(ring)} {queries} {keys} {heads}"
    try:
      sequence = context_parallel.shard_sequence(ring, "sp", True, mesh, (queries, keys, heads))
    except ValueError as exception:
      yield f"  {attempt(lambda e=exception: (_ for _ in ()).throw(e))}"
      continue
    yield f"  {text(sequence)} shards {sequence.shards} natural {sequence.is_natural} padded " + (
        f"{[sequence.padded(n) for n in sequence.size]} {context_parallel.axes_of(ring, 'sp')}")
    for member in range(sequence.members):
      yield f"  {member}: {text(sequence.rows(member))} | {text(sequence.columns(member))}"
    for name, mask in MASKS.items():
      if name != "segments":
        shifts = ring_step.shifts(sequence, jax.tree.structure(mask))
        yield f"  {name}: steps {shifts} " + text(ring_step.visible_members(sequence, mask))
  for given in (RingConfig(), RingConfig("hybrid", heads_axis_name="tp"), RingConfig(
      "hybrid", heads_axis_name="sp"), RingConfig("ulysses"), RingConfig(
          "hybrid", heads_axis_name="x")):
    for name, on in (("sp", mesh), ("x", mesh), ("dp", mesh), ("tp", mesh)):
      yield f"{text(given)} {name}: {context_parallel.shards_of(given, name, on)} " + attempt(
          lambda a=(given, name, on): context_parallel.require_axes(*a))
  yield f"no mesh: {context_parallel.shards_of(RingConfig(), 'sp', None)}"
  manual = AbstractMesh((4, 2, 1), ("sp", "tp", "dp"),
                        axis_types=(AxisType.Manual, AxisType.Auto, AxisType.Auto))
  for ring in RINGS:
    yield f"split {text(ring)}: {context_parallel.is_split(ring, 'sp', manual)} " + attempt(
        lambda r=ring: context_parallel.require_axes(r, "sp", manual)) + " " + attempt(
            lambda r=ring: context_parallel.shard_sequence(r, "sp", False, manual, (6, 12, 4)))
  numbers = [context_parallel.mesh_number(abstract_mesh(s, ("a", "b"))) for s in ((2, 3), (3, 2))]
  yield f"numbers {numbers}"
  for heads, key_heads, group in itertools.product((8, 12), (1, 2, 4), (2, 4)):
    yield f"heads {heads}/{key_heads} over {group}: " + text(
        ulysses.key_heads_needed(heads, key_heads, group))


# --- Predictions. --------------------------------------------------------------------------------


PRECISE = ("causal", "segments")  # masks of which every prediction is written


def predictions() -> Iterator[str]:
  """Yields predicted traffic, work and time."""
  shapes = {"small": plan.Shapes(3, 48, 48, 8, 2, 64, 32), "cross": plan.Shapes(
      1, 80, 96, 16, 16, 128, 128, "float32"),
            "long": plan.Shapes(2, 2**17, 2**17, 32, 8, 128, 128)}
  for (name, shape), (mask_name, mask), device in itertools.product(
      shapes.items(), MASKS.items(), ("v5p", "h100")):
    if mask_name == "segments" and name != "small":
      continue
    blocks = BlockSizes() if name == "long" else BlockSizes(4, 6)
    for sizes, heads_axis in (((8, 1), None), ((4, 2), "tp"), ((2, 4), None)):
      if name == "cross" and heads_axis or device == "h100" and name == "small" and not heads_axis:
        continue
      mesh = abstract_mesh(sizes, ("sp", "tp"))
      yield f"{name} {mask_name} {device} {sizes} {heads_axis}"
      for backward, every in ((True, 1 if name == "small" and mask_name in PRECISE else 7),
                              (False, 12)):
        found = plan.plan_context_parallel(
            shape, mask, mesh, device, heads_axis_name=heads_axis, backward=backward,
            block_sizes=blocks)
        best = found.recommended
        yield f"  {'both' if backward else 'forward'}: {best.variant} {best.layout}"
        for one in found.predictions[::every]:
          yield "    " + (f"{one.variant} {one.layout}: {one.impossible}" if one.impossible else
                          " ".join(map(text, one[:4] + one[6:])) + " " + "; ".join(
                              " ".join(map(text, c)) for c in one.collectives or ()))


def plan_functions() -> Iterator[str]:
  """Yields parts of the predictions, their report and what other arguments give."""
  for pair in ((64, 32), (7, 5)):
    yield f"flops {pair}: {[work.flops_of_pair(*pair, backward) for backward in (False, True)]}"
  mesh = abstract_mesh((4, 2, 1), ("sp", "tp", "dp"))
  for ring, (name, mask), sizes in itertools.product(
      RINGS, MASKS.items(), ((48, 48, 8), (4800, 4800, 8))):
    if name == "segments" and sizes[0] > 48:
      continue
    sequence = context_parallel.shard_sequence(ring, "sp", True, mesh, sizes)
    for block, cells in (((5, 7), 2**20), ((4, 4), 60)):
      if name in ("causal", "segments") or block == (5, 7) and sizes[0] == 48:
        with mock.patch.object(work, "CELLS", cells), mock.patch.object(
            work, "FEWEST_MEMBERS", 16 if cells > 60 else 2):
          visits = work.visits(sequence, mask, block)
        yield f"{ring.variant} {ring.layout} {name} {sizes[0]} {block} {cells}: " + text(
            (visits, visits.imbalance))
  for devices, ring, stride, part in itertools.product((2, 3, 8), (True, False), (1, 2),
                                                       (False, True)):
    link = traffic.Link(devices, 1e9, ring, stride, part)
    yield f"{text(link)}: {[link.permute(12.0, d) for d in (0, 1, 2, -1, devices - 1)]} " + (
        f"{link.gather(12.0):.4g} {link.exchange(12.0):.4g}")
  for name in ("v5p", "V5P", "TPU v5 lite", "TPU v5", "NVIDIA H100 80GB HBM3", "TPU7x", "x", 3,
               None):
    yield f"device {name}: {attempt(lambda n=name: peaks.find(n))}"
  good = {"shapes": plan.Shapes(1, 8, 8, 2, 1, 4, 4), "mask": masks.causal(),
          "mesh": abstract_mesh((2, 2), ("sp", "tp")), "device_kind": "v5e",
          "sequence_axis_name": "sp", "heads_axis_name": None, "backward": True,
          "block_sizes": BlockSizes(4, 4)}
  more = {"shapes": tuple(good["shapes"]._replace(**{f: v}) for f in plan.Shapes._fields
                          for v in (0, 3, 2.0)), "mesh": (abstract_mesh((1,), ("sp",)),),
          "block_sizes": (BlockSizes(0), BlockSizes(block_q=3), BlockSizes(block_kv="x")),
          "mask": (masks.segments(np.zeros((1, 7), np.int32)), masks.dense(np.ones((1, 1, 8, 8),
                                                                                   bool)))}
  yield from alternatives(
      lambda device_kind, **given: plan.plan_context_parallel(
          **given, device_kind=device_kind).recommended, good, more)


def plan_report_lines() -> Iterator[str]:
  """Yields what the command line prints."""
  for arguments in (
      "--tokens 1k,2k --mesh sp=4", "--device h100 --window 99 --tokens 4k --mesh dp=2,sp=8 --all",
      "--heads 12 --kv-heads 3 --head-dim 64 --tokens 2k --mesh sp=8,tp=2 --batch 3",
      "--heads 12 --tokens 1k --mesh sp=5", "--tokens 1k --mesh fsdp=2,dp=3,sp=2", "--tokens x",
      "--tokens 0", "--tokens 1k,", "--mesh sp=1", "--mesh x", "--mesh sp=2,tp=0", "--heads 0",
      "--heads x", "--window -1", "--batch 5 --mesh dp=2,sp=4 --tokens 1k", "--device x",
      "--heads 7 --kv-heads 2", "--mesh dp=3,sp=2 --heads 3 --kv-heads 3 --tokens 1k"):
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["plan", *arguments.split()]), (
        contextlib.redirect_stdout(out)), contextlib.redirect_stderr(err):
      try:
        plan_report.main()
      except SystemExit as exception:
        yield f"{arguments}: exit {exception.code}, " + err.getvalue().strip().split(
            "error: ")[-1].replace("'", "")
        continue
    lines = out.getvalue().rstrip().split("\n")
    yield arguments
    yield from (f"  {line}".rstrip() for line in lines[lines.index("") + 1 if "" in lines else 0:])


# --- Constraints on arrays. ----------------------------------------------------------------------


def constrained() -> Iterator[str]:
  """Yields repeated heads, positions, and the shardings that arrays are constrained to."""
  x = np.arange(4 * 2 * 2 * 3, dtype=np.float32).reshape(4, 2, 2, 3)
  good = {"key": x, "value": x + 100, "num_reps": 3}
  yield "repeated: " + attempt(lambda: constraints.repeat_key_value(**good))
  yield from alternatives(constraints.repeat_key_value, good, traced=True)
  mask = np.array([[1, 1, 0], [0, 1, 1]], bool)
  view = attn_core.caches.dense.init(2, 5, (1, 2))._replace(lengths=jnp.int32([2, 4]))
  good = {"attention_mask": mask, "mode": "__prefill__", "cache_view": view}
  yield from alternatives(constraints.build_cache_pos, good, {
      "attention_mask": (mask[:, None, None], mask[:, None, :, None] & mask[:, None, None]),
      "mode": MODES})
  mesh = mesh_lib.create_mesh((2, 1, 1, 2, 2))
  for on, mode, layout in itertools.product((mesh, None), MODES[:3], ("bthd", "bhtd")):
    metadata = OperationMetadata(mesh=on, platform="cpu")
    shapes = attempt(lambda m=metadata, a=(mode, layout): [y.sharding.spec for y in (
        jax.eval_shape(lambda q: constraints.apply_qkv_shardings(q, q, q, m, *a), x))])
    yield f"{on is not None} {mode} {layout}: {shapes} " + attempt(
        lambda m=metadata, mode=mode: constraints.default_key_value_sharding(m, mode))
    for function in (constraints.apply_qk_shardings, constraints.apply_qkv_shardings):
      number = 2 if function is constraints.apply_qk_shardings else 3
      yield f"  {function.__name__}: " + attempt(
          lambda f=function, m=metadata, a=(mode, layout), n=number: [
              y.sharding.spec if isinstance(y, jax.Array) and isinstance(
                  y.sharding, NamedSharding) else None for y in f(*[x] * n, m, *a)])
    yield "  product: " + attempt(lambda m=metadata, mode=mode: getattr(
        constraints.shard_attention_prod(x.reshape(4, 2, 6), m, mode), "sharding", None)
                                  if m.mesh else None)
    yield "  safely: " + attempt(lambda m=metadata: (
        constraints.get_sharding_safely(x, m), constraints.get_sharding_safely(
            jax.device_put(x, NamedSharding(mesh, P("tp"))), m)))
  good = {"query": x, "key": x, "metadata": OperationMetadata(mesh=mesh), "mode": "__train__",
          "layout": "bthd"}
  for line in alternatives(lambda **given: len(constraints.apply_qk_shardings(**given)), good,
                           traced=True):
    if "Error" in line:
      yield line
  explicit = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("tp", "dp"),
                  axis_types=(AxisType.Explicit,) * 2)
  sharded = jax.device_put(x, NamedSharding(explicit, P("dp", None, "tp")))
  specs_seen: list[Any] = []
  with jax.set_mesh(explicit):
    jax.eval_shape(lambda y: specs_seen.append(constraints.get_sharding_safely(
        y, OperationMetadata(mesh=explicit))), sharded)
  yield f"traced: {text(specs_seen)}"
  for function in (constraints.shard_attention_prod, constraints.get_sharding_safely):
    yield f"{function.__name__}: {attempt(lambda f=function: f(x, 3))}"


FILES = {"sharding_meshes": meshes, "sharding_specs": specs, "sharding_orders": orders,
         "sharding_rings": rings, "plan_predictions": predictions, "plan_functions": plan_functions,
         "plan_report": plan_report_lines, "sharding_constraints": constrained}
