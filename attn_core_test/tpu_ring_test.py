# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rings whose kernels copy keys and values: on virtual devices, and compiled ahead of time.

Interpret mode starts from memory full of NaN and watches for races between transfers of all devices
and what they compute, with transfers executed at once and as late as possible.
"""

import os

# Interpreted kernels and exchanges wait for other devices on threads of XLA's, of which there are
# otherwise as many as cores.
os.environ["NPROC"] = "32"

# pylint: disable=g-import-not-at-top
import contextlib
import functools
import itertools
import re
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, RingConfig, attention, explain,
                       from_layout, ring_attention, score_mods, to_layout)
from attn_core.benchmark.static import profile as static_profile
from attn_core.kernels.common.contract import RemoteCopy
from attn_core.kernels.tpu.flash import remote_copy
from attn_core.sharding import context_parallel, token_order
from attn_core_test import ring_cases, sampling, tpu_cases, tpu_interpret
from attn_core_test.ring_cases import numbers

# Before jax 0.11 the interpreter hangs with more devices.
DEVICES = (4,) if jax.__version_info__ < (0, 11) else (4, 8)


def metadata_of(variant="ring", layout="contiguous", devices=4, transfer="remote", **fields):
  mesh = ring_cases.mesh_of(variant, devices)
  metadata = ring_cases.metadata_of(variant, layout, mesh, platform="tpu", **fields)
  return metadata.replace(ring=metadata.ring._replace(transfer=transfer))


@contextlib.contextmanager
def watched(transfers):
  """Runs TPU kernels on CPU devices; yields the text file that reports races."""
  # The interpreter numbers barrier semaphores by int16.
  with (mock.patch.object(remote_copy, "END_BARRIERS", 2**15),
        tpu_interpret.watched(transfers) as printed):
    yield printed


@contextlib.contextmanager
def interpreted(transfers):
  """Interprets TPU kernels; fails on a race or a semaphore with a remaining count."""
  with watched(transfers) as printed:
    yield
  for words in ("RACE", "non-zero count"):
    assert words not in printed.getvalue(), printed.getvalue()


class RemoteCopyTest(parameterized.TestCase):
  """The remote copies alone, around a kernel that doubles its input."""

  def send(self, devices, distance, cores=1, grid=(2, 3, 1, 1, 2)):
    """Checks that the right arrays arrive, and that the kernel's own result is unchanged."""
    sent, arrived = self.transferred(devices, distance, cores, grid)
    for got, want in zip(arrived, sent):
      np.testing.assert_array_equal(got, np.roll(want, 2 * distance, 0))

  def transferred(self, devices, distance, cores=1, grid=(2, 3, 1, 1, 2)):
    """Returns what was sent and what arrived; checks the kernel's own result and the signals."""
    sent = (numbers(devices, 5, 2, 3), np.arange(devices * 7, dtype=np.int32).reshape(-1, 7))
    x, signal, signals = numbers(devices, *grid, 8, 128), pl.semaphore_signal, set()

    def recorded(semaphore, value, *, device_id):
      jax.debug.callback(lambda *pair: signals.add(tuple(map(int, pair))),
                         jax.lax.axis_index("sp"), device_id["sp"])
      signal(semaphore, value, device_id=device_id)

    def local(x, *arrays):
      # The second transfer starts after the first has arrived.
      for _ in range(2):
        runner = remote_copy.RemoteCopyGrid(
            grid, RemoteCopy(arrays, jax.lax.axis_index("sp")[None], ("sp",), 0, devices, distance,
                             cores))
        count = len(runner.inputs)
        def kernel(source, *refs, runner=runner, count=count):
          inputs, (result, *results), semaphores = refs[:count], refs[count:-1], refs[-1:]
          def step(place):
            del place
            result[...] = source[...] * 2
          runner.run(step, inputs, results, semaphores)
        block = runner.block_spec(
            pl.BlockSpec((1,) * 6 + (8, 128), lambda *ids: (0, *ids, 0, 0)))
        x, *arrived = pl.pallas_call(
            kernel, grid=runner.grid, in_specs=[block, *runner.input_specs],
            out_specs=[block, *[remote_copy.MEMORY] * len(runner.results)],
            out_shape=[jax.core.ShapedArray(x.shape, x.dtype), *runner.results],
            scratch_shapes=runner.semaphores,
            compiler_params=pltpu.CompilerParams(dimension_semantics=runner.semantics,
                                                 collective_id=runner.barrier))(x, *runner.inputs)
        arrays = runner.unpack(arrived)
      return x, *arrays

    mesh = ring_cases.mesh_of("ring", devices)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"),
                                check_vma=False))
    with mock.patch.object(pl, "semaphore_signal", recorded):
      doubled, *arrived = jax.block_until_ready(run(x, *sent))
    # A device says that it has begun to the device that it receives from, not the one it sends to.
    jax.effects_barrier()
    self.assertEqual(signals, {(n, (n - distance) % devices) for n in range(devices)})
    np.testing.assert_array_equal(doubled, 4 * x)
    return sent, arrived

  @parameterized.parameters((4, "eager", 2), (DEVICES[-1], "on_wait", 7))
  def test_arrays_arrive_unchanged(self, devices, transfers, distance):
    with interpreted(transfers):
      self.send(devices, distance % devices)

  @parameterized.parameters(
      ((2, 3, 1, 1, 2),), ((3, 2, 2, 1, 1),), ((3, 1, 1, 1, 2),), ((4, 3, 1, 2, 1),),
      ((6, 1, 1, 1, 2),), ((3, 4, 1, 1, 2),), ((1, 6, 1, 1, 1),), ((1, 1, 2, 3, 2),))
  def test_a_grid_for_two_cores(self, grid):
    """Checks that the grid is halved where it divides, and that every step runs once."""
    runner = remote_copy.RemoteCopyGrid(grid, RemoteCopy((), None, ("sp",), 0, 4, 1, 2))
    places = [runner.logical_index(*at) for at in itertools.product(*map(range, runner.grid))]
    self.assertEqual(sorted(places), list(itertools.product(*map(range, grid))))
    self.assertEqual(runner.grid[0], 1 if grid[0] % 2 and grid[1] % 2 else 2)
    if grid[1] == 2 or sampling.chosen(f"grid for two cores {grid}"):
      with interpreted("eager"):
        self.send(4, 1, 2, grid)

  def test_every_mesh_axis_and_distance_has_its_own_barrier(self):
    barriers = [remote_copy.RemoteCopyGrid(
        (1, 1, 1, 1, 1), RemoteCopy((), None, (), axis, 64, distance, 1, mesh)).barrier
                for mesh in (0, 1, 2**31 - 1) for axis in range(16) for distance in range(1, 64)]
    self.assertEqual(len(set(barriers)), len(barriers))
    self.assertBetween(min(barriers), remote_copy.FIRST_BARRIER, 2**31 - 1)
    self.assertLess(max(barriers), 2**31)

  def test_an_arrival_that_is_not_awaited_is_a_race(self):
    make = pltpu.make_async_remote_copy
    def careless(*arguments, **keywords):
      copy = make(*arguments, **keywords)
      return mock.Mock(start=copy.start, wait=copy.wait_send)
    with mock.patch.object(pltpu, "make_async_remote_copy", careless), watched("eager") as seen:
      # The second transfer may read its source before the first has arrived.
      self.transferred(4, 1)
    self.assertIn("RACE DETECTED", seen.getvalue())
    self.assertIn("non-zero count", seen.getvalue())


IDS = np.array([[0] * 5 + [1] * 8 + [-1] * 3], np.int32)


@functools.cache
def documents():
  """Returns a case of causal documents across shards, empty rows and fewer key heads."""
  return ring_cases.Case(
      lambda b, h, t, s: s <= t and IDS[0, t] == IDS[0, s] >= 0, (1, 16, 16, 2, 1, 4, 6),
      floats=(), arrays=lambda permuted: dict(
          mask_info=MaskInfo.from_segments(permuted(IDS, 1))))


@functools.cache
def full():
  return ring_cases.Case(lambda b, h, t, s: True, (1, 16, 16, 2, 1, 4, 4), floats=(),
                        arguments=dict(causal=False))


@functools.cache
def window(layout):
  """Returns a case where ring steps are skipped, also between others."""
  left, right = {"contiguous": (17, 17), "zigzag": (5, 0)}[layout]
  return ring_cases.Case(lambda b, h, t, s: -left <= s - t <= right, (1, 64, 64, 2, 1, 4, 4),
                        floats=(), arguments=dict(causal=False, sliding_window=(left, right)))


# name: (case, fields of `metadata_of`)
EVERYTHING = {
    **{f"everything_{layout}_{devices}": (
        ring_cases.everything, dict(layout=layout, devices=devices))
       for layout in token_order.TOKEN_ORDERS for devices in DEVICES},
    "positions": (ring_cases.positions, dict(layout="striped", scan_ring_attention=False)),
    "padded": (ring_cases.padded, {}),
    "full": (full, {}),
    **{f"window_{layout}_{devices}": (
        functools.partial(window, layout), dict(layout=layout, devices=devices))
       for layout in ("contiguous", "zigzag") for devices in DEVICES},
    **({"hybrid": (ring_cases.everything, dict(variant="hybrid", layout="zigzag", devices=8))}
       if 8 in DEVICES else {})}


def by_parity(score, batch, head, query, key, amount):
  return jnp.where(key & 1 == 0, score * amount, score) + 0.1 * jnp.tanh(score) * (
      batch + head - query).astype(score.dtype)


class ScoreModsTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("ring", "zigzag", "collective", "lse")],
      *((*variant, "gradient") for variant in itertools.product(
          ("ring",), ("zigzag", "contiguous"), ("collective", "remote"))),
      ("all_gather", "striped", "collective", "lse"),
      ("ring", "striped", "collective", "lse"), ("ring", "striped", "remote", "gradient"),
      ("all_gather", "striped", "collective", "gradient"),
      ("ulysses", "contiguous", "collective", "gradient")))
  def test_positions_are_global(self, variant, layout, transfer, what):
    """Compares with one device, in float64; arrays have the order of the tokens."""
    shapes = {"query": (1, 16, 4, 8), "key": (1, 16, 4, 8), "value": (1, 16, 4, 8), "slopes": (4,),
              "row": (1, 4, 16), "column": (1, 1, 16), "amount": (), "table": (8, 4)}
    tokens = {"query": 1, "key": 1, "value": 1, "row": 2, "column": 2}
    arrays = {name: numbers(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    weights = numbers(1, 16, 4, 8, seed=20)

    def run(arrays, metadata):
      if metadata is not None:
        arrays = arrays | {name: to_layout(arrays[name], layout, 4, axis)
                           for name, axis in tokens.items()}
      mod = (score_mods.alibi(arrays["slopes"]) >> score_mods.per_query(arrays["row"])
             >> score_mods.custom(by_parity, arrays["amount"]) >> score_mods.soft_cap(2.0)
             >> score_mods.per_key(arrays["column"])
             >> score_mods.relative(arrays["table"], max_distance=9))
      found = attention(arrays["query"], arrays["key"], arrays["value"], score_mod=mod,
                        mechanism="ring" if metadata else "vanilla", metadata=metadata,
                        return_lse=True)
      out, lse = found.attention_outputs, found.lse
      if metadata is not None:
        out, lse = from_layout(out, layout, 4), from_layout(lse, layout, 4, 2)
      return (out, lse) if what == "lse" else jnp.sin(out * weights).sum() + (lse**2).sum()

    make = (lambda run: run) if what == "lse" else (lambda run: jax.value_and_grad(run))
    metadata = metadata_of(variant, layout, transfer=transfer)
    with interpreted("on_wait"):
      got = jax.block_until_ready(jax.jit(make(functools.partial(run, metadata=metadata)))(arrays))
    with jax.enable_x64(True):
      want = jax.jit(make(functools.partial(run, metadata=None)))(
          {name: np.asarray(x, np.float64) for name, x in arrays.items()})
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5 * max(1, abs(y).max()))

  @parameterized.parameters("contiguous", "zigzag", "striped")
  def test_long_shards_have_tables_by_distance(self, layout):
    """Traces forward and backward: the tiles of all pairs of runs fit in vector memory."""
    x = jax.ShapeDtypeStruct((1, 2**17, 8, 128), jnp.bfloat16)
    mod = score_mods.relative(np.ones((32, 8), np.float32), max_distance=900)
    run = lambda x: ring_attention(
        x, x, x, score_mod=mod, metadata=metadata_of(layout=layout)).attention_outputs.sum()
    self.assertEqual(jax.eval_shape(jax.grad(run), x).shape, x.shape)

  def test_tables_by_distance_are_refused_by_name(self):
    """Where the tokens of a device and the keys that it sees at once are in many runs."""
    x = jax.ShapeDtypeStruct((1, 16, 4, 8), jnp.float32)
    mod = score_mods.relative(np.ones((8, 4), np.float32), max_distance=9)
    for variant, queries in (("all_gather", 2), ("ulysses", 8)):
      metadata = metadata_of(variant, "zigzag", transfer="collective")
      with self.assertRaisesRegex(
          NotImplementedError, f"by_distance. in layout 'zigzag', where a device has {queries} "
          "runs of query positions and 8 of key positions: at most 4 pairs"):
        jax.eval_shape(lambda x, metadata=metadata: attention(
            x, x, x, score_mod=mod, mechanism="ring", metadata=metadata), x)


class EqualTest(parameterized.TestCase):
  """The whole attention against the oracle in float64."""

  def check(self, case, metadata, transfers="on_wait", **arguments):
    self.enter_context(mock.patch.object(ring_cases, "BLOCKS", BlockSizes()))
    with interpreted(transfers):
      case.check(metadata, shards=metadata.mesh.size, **arguments)

  def test_value_and_lse(self):
    case, metadata = documents(), metadata_of(layout="zigzag")
    self.enter_context(mock.patch.object(ring_cases, "BLOCKS", BlockSizes()))
    with interpreted("on_wait"):
      found = jax.block_until_ready(jax.jit(case.run(metadata, 4))(case.floats))
    ring_cases.close(found, case.truth[0])

  def test_gradient(self):
    self.check(full(), metadata_of(), "eager", forward_mode=False)

  @sampling.slow_parameters(*(
      (f"{name}_{transfers}", name, transfers)
      for name, transfers in itertools.product(EVERYTHING, ("on_wait", "eager"))), named=True)
  def test_every(self, name, transfers):
    case, fields = EVERYTHING[name]
    self.check(case(), metadata_of(**fields), transfers, forward_mode=transfers == "eager")

  @sampling.slow_parameters(*((devices,) for devices in DEVICES))
  def test_bfloat16(self, devices):
    """Runs the naive softmax; no row is recomputed, or the interpreter would wait.

    It waits in every kernel for all devices, also where only some of them recompute rows.
    """
    q, k, v = (jnp.asarray(numbers(1, 16, h, 8, seed=h), jnp.bfloat16) for h in (4, 2, 2))
    def run(mechanism, metadata, dtype):
      arrays = [x.astype(dtype) for x in (q, k, v)]
      def loss(*arrays):
        found = attention(*arrays, mechanism=mechanism, metadata=metadata, return_lse=True)
        out = found.attention_outputs.astype(jnp.float32)
        return jnp.sum(out**2), (out, found.lse)
      return jax.jit(jax.grad(loss, (1, 2), has_aux=True))(*arrays)
    with interpreted("eager"):
      got = jax.block_until_ready(run("ring", metadata_of(devices=devices), jnp.bfloat16))
    ring_cases.close(got, run("vanilla", None, jnp.float32), 2e-2)


class SplitTest(parameterized.TestCase):
  """Rings inside the caller's own shard_map, which has split the sequence or the batch."""

  @parameterized.named_parameters(*sampling.with_slow(
      [("all_axes", {"dp", "sp"}, True)], ("all_axes_unchecked", {"dp", "sp"}, False),
      *((f"{name}_{'checked' if checked else 'unchecked'}", {name}, checked)
        for name in ("dp", "sp") for checked in (True, False))))
  def test_gradient(self, names, checked):
    """Checks zigzag order over one axis of a mesh, whose other axis shards the batch."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "sp"))
    metadata = OperationMetadata(platform="tpu", mesh=None if "sp" in names else mesh,
                                 ring=RingConfig("ring", "zigzag", transfer="remote"))
    spec = P(*(axis if axis in names else None for axis in ("dp", "sp")))
    x = tuple(numbers(2, 16, heads, 4, seed=heads) for heads in (2, 1, 1))
    def split(*x):
      run = lambda *x: ring_attention(*x, metadata=metadata).attention_outputs
      out = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names,
                          check_vma=checked)(*(to_layout(x, "zigzag", 2) for x in x))
      return from_layout(out, "zigzag", 2)
    plain = lambda *x: attention(*x, mechanism="vanilla").attention_outputs
    found = lambda run: jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(run(*x))), (0, 1, 2)))
    with interpreted("on_wait"):
      got = jax.block_until_ready(found(split)(*x))
    ring_cases.close(got, found(plain)(*x))

  @parameterized.product(checked=[True, False], rest=[True, False])
  def test_lowered(self, checked, rest):
    """Checks axes of one device, also where the caller leaves them out."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4, 1), ("dp", "sp", "tp"))
    metadata = OperationMetadata(platform="tpu", ring=RingConfig(transfer="remote"))
    run = jax.shard_map(
        lambda x: ring_attention(x, x, x, metadata=metadata).attention_outputs, mesh=mesh,
        in_specs=P(None, "sp"), out_specs=P(None, "sp"), check_vma=checked,
        axis_names=set(mesh.axis_names) if rest else {"sp"})
    text = jax.jit(jax.grad(lambda x: run(x).sum())).trace(
        jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)).lower(
            lowering_platforms=("tpu",)).as_text()
    self.assertIn("tpu_custom_call", text)


STEPS = {"semaphore_signal": "signal", "semaphore_wait": "begin", "dma_start": "start",
         "dma_wait": "wait", "dot_general": "product"}


def steps_of(jaxpr):
  """Returns the names of STEPS in the order of a kernel's code."""
  found, is_code = [], lambda x: hasattr(x, "eqns")
  for equation in jaxpr.eqns:
    if equation.primitive.name in STEPS:
      found.append(STEPS[equation.primitive.name])
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_code):
      found += steps_of(getattr(inner, "jaxpr", inner)) if is_code(inner) else []
  return found


class ChoiceTest(parameterized.TestCase):

  def test_runs_on_a_tpu_if_requested(self):
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    remote = metadata_of()
    collective = remote.replace(ring=RingConfig())
    explanation = [str(explain(x, x, x, mechanism="ring", metadata=metadata))
                   for metadata in (remote, collective)]
    self.assertIn("can, by context_parallel.tpu_remote, which goes before context_parallel.tpu",
                  explanation[0])
    self.assertIn("can, by context_parallel.tpu, not by context_parallel.tpu_remote: "
                  "ring.transfer='collective'", explanation[1])

  def test_meshes_have_their_own_barriers(self):
    x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)
    devices = np.array(jax.devices()[:4])

    def barriers(order, names=("sp",), shape=(4,), inside=False):
      """Returns the numbers in the lowered program of a ring over devices in this order."""
      mesh = Mesh(devices[list(order)].reshape(shape), names)
      metadata = metadata_of(scan_ring_attention=False).replace(mesh=mesh)
      run = lambda *x: ring_attention(*x, metadata=metadata).attention_outputs
      if inside:  # a shard_map of the caller, where the mesh in force does not know its devices
        run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"dp"},
                            check_vma=False)
      text = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("tpu",)).as_text()
      found = set(re.findall(r'collective_id(?:\\22|")\W*(\d+)', text))
      self.assertNotEmpty(found)
      return found

    order = range(4)
    with_dp = (("dp", "sp"), (1, 4))
    kinds = [(order,), ((0, 2, 1, 3),), (order, ("sp", "dp"), (2, 2)), (order, *with_dp, True),
             ((0, 2, 1, 3), *with_dp, True)]
    found = [barriers(*kind) for kind in kinds]
    for first, second in itertools.combinations(found, 2):
      self.assertEmpty(first & second)
    self.assertEqual(barriers(order), found[0])

  def test_the_number_of_a_mesh_is_the_same_in_every_process(self):
    mesh = Mesh(np.array(jax.devices()[:4]), "sp")
    self.assertEqual(context_parallel.mesh_number(mesh), 752728439)

  @parameterized.parameters("cpu", "gpu")
  def test_other_platforms_refuse(self, platform):
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    metadata = metadata_of().replace(platform=platform)
    with self.assertRaisesRegex(NotImplementedError, "mechanism='ring' .*ring.transfer='remote': "
                                "the kernels for TPUs send by themselves; 'collective' runs"):
      jax.eval_shape(lambda x: ring_attention(x, x, x, metadata=metadata), x)
    self.assertEqual(explain(x, x, x, metadata=metadata).chosen, "flash_attn2")

  @parameterized.parameters(
      (RingConfig(transfer="dma"), "ring.transfer='dma': expected one of 'collective', 'remote'"),
      (RingConfig("ulysses", transfer="remote"),
       "ring.transfer='remote': expected 'collective' with variant 'ulysses', which has no ring; "
       "'remote' is for 'ring' and 'hybrid'"))
  def test_bad_input(self, config, message):
    with self.assertRaisesRegex(ValueError, message):
      OperationMetadata(ring=config)

  def test_kernels_start_transfers_before_the_first_product_and_await_them_after_the_last(self):
    metadata = metadata_of(scan_ring_attention=False)
    x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)
    def loss(*x):
      return ring_attention(*x, metadata=metadata).attention_outputs.sum()
    kernels = []
    call = pl.pallas_call
    def traced(body, **arguments):
      run = call(body, **arguments)
      def with_arrays(*arrays):
        closed = jax.make_jaxpr(run)(*arrays)
        kernels.append((arguments.get("name"), steps_of(closed.jaxpr)))
        return run(*arrays)
      return with_arrays
    with mock.patch.object(pl, "pallas_call", traced):
      jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("tpu",))
    for name, sent in (("attn_core_forward", (2, 2, 2, 0)), ("attn_core_backward", (2, 2, 4, 2))):
      found = [steps for which, steps in kernels if which == name]
      self.assertEqual(tuple(steps.count("start") for steps in found), sent)
      for steps in found:
        count = steps.count("start")
        products = steps.count("product")
        self.assertGreater(products, 0)
        # Both the sending and the receiving end of each transfer are awaited.
        self.assertEqual(steps, ["signal", "begin"] * bool(count) + ["start"] * count
                         + ["product"] * products + ["wait"] * 2 * count)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompiledTest(parameterized.TestCase):
  """Programs compiled ahead of time, without a chip."""

  def steps(self, chip, gradient=False, dtype=jnp.float32, tokens=512, layout="contiguous",
            **arguments):
    """Returns collectives and kernels in the order of the compiled program."""
    mesh = Mesh(np.array(static_profile.devices(chip)[:4]), "sp")
    metadata = OperationMetadata(
        mesh=mesh, platform="tpu", ring=RingConfig(layout=layout, transfer="remote"),
        scan_ring_attention=False)
    run = lambda *x: ring_attention(*x, metadata=metadata, **arguments).attention_outputs
    run = ring_cases.gradients_of(run) if gradient else run
    text = ring_cases.compiled(run, metadata, (1, tokens, 2, 128), dtype).as_text()
    return re.findall(r"collective-permute-start(?=\()|tpu_custom_call(?=\")", text)

  @parameterized.parameters("v5e", "v5p", "v6e")
  def test_a_ring_without_collectives(self, chip):
    self.assertEqual(self.steps(chip, causal=False), ["tpu_custom_call"] * 4)

  @sampling.slow_parameters(*((name,) for name, (_, fields) in EVERYTHING.items()
                              if fields.get("devices") != 8 or "variant" in fields))
  def test_interpreted_cases(self, name):
    """Compiles what is interpreted above, in rotation for every chip and configuration."""
    case, fields = EVERYTHING[name]
    chip, precision = tpu_cases.compiled_for(name)
    metadata = metadata_of(**fields)
    axes = metadata.mesh.axis_names
    mesh = Mesh(np.array(static_profile.devices(chip)[:4]).reshape((-1, 2)[:len(axes)]), axes)
    run = case().run(metadata.replace(mesh=mesh), mesh.size)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, P())), case().floats)
    def both(arrays):
      out, pull = jax.vjp(run, arrays)
      return pull(out)
    with (mock.patch.object(ring_cases, "BLOCKS", BlockSizes()),
          jax.default_matmul_precision(precision)):
      text = jax.jit(both).trace(shapes).lower(lowering_platforms=("tpu",)).compile().as_text()
    # Forward and backward of several ring steps; loops hold one step.
    self.assertGreaterEqual(text.count('custom_call_target="tpu_custom_call"'), 4)

  @sampling.slow_parameters(*itertools.product(
      ("v5e", "v5p", "v6e"), ("float32", "bfloat16"),
      ("causal", "window", "score_mod", "zigzag", "striped")))
  def test_gradients(self, chip, dtype, name):
    """Checks that the only collectives left return gradients to their owners."""
    by_distance = {layout: {"layout": layout, "score_mod": score_mods.by_distance(
        np.ones((301, 2), np.float32), -300)} for layout in ("zigzag", "striped")}
    arguments = {**by_distance, "causal": {}, "window": {"sliding_window": (200, 0)}, "score_mod": {
        "score_mod": score_mods.alibi(np.ones(2, np.float32))
                     >> score_mods.custom(by_parity, np.ones((), np.float32))}}[name]
    found = self.steps(chip, True, dtype, 2048, **arguments)
    self.assertEqual(found.count("collective-permute-start"), 2)


if __name__ == "__main__":
  absltest.main()
