# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The planner counts what compiled programs send and which blocks kernels visit.

Letters: T sequence length.
"""

import collections
import contextlib
import io
import itertools
import math
import re
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, OperationMetadata, RingConfig, Shapes, masks,
                       plan_context_parallel, ring_attention)
from attn_core.masks import block_map, mask as mask_lib
from attn_core.plan import __main__ as command, context_parallel, peaks, traffic, work
from attn_core.sharding import placement, token_order
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import RING_VARIANTS

jax.config.update("jax_num_cpu_devices", 8)

SHARDS = 8
B, T, H, K, D, E = 2, 256, 8, 2, 16, 8
SHAPES = Shapes(B, T, T, H, K, D, E, "float32")
ROW = AbstractMesh((SHARDS,), ("sp",))

# A collective's result, one or several arrays.
SENT = re.compile(r" = (.*?) (all-gather|all-to-all|collective-permute|reduce-scatter|"
                  r"all-reduce)(?:-start)?\(")
ARRAY = re.compile(r"(f32|s32|u8|pred)\[([\d,]*)\]")


def sent(text):
  """Returns name -> (number, bytes of all results on a device) of a program's collectives."""
  number, size = collections.Counter(), collections.Counter()
  for result, name in SENT.findall(text):
    number[name] += 1
    size[name] += sum((4 if kind[1:] == "32" else 1) * math.prod(
        map(int, filter(None, shape.split(",")))) for kind, shape in ARRAY.findall(result))
  return {name: (number[name], size[name]) for name in number}


def both_passes(run, arrays):
  """Returns the texts of forward and backward, compiled as programs of their own.

  In one program without a layer in between, jax 0.10.2 lets the backward reuse the keys that the
  forward has received.
  """
  lowered = jax.jit(lambda *x: jax.vjp(run, *x)).lower(*arrays)
  forward = lowered.compile()
  infos, tree = jax.tree.flatten(lowered.out_info)
  out, pull = jax.tree.unflatten(tree, [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
      for x, sharding in zip(infos, jax.tree.leaves(forward.output_shardings), strict=True)])
  backward = jax.jit(lambda pull, out: pull(out)).lower(pull, out).compile()
  return forward.as_text() + backward.as_text()


def prediction(plan, variant, layout="contiguous"):
  found, = [p for p in plan.predictions if (p.variant, p.layout) == (variant, layout)]
  return found


def sequence_of(layout, members=SHARDS, group=1, gathers=False, length=T):
  return Sequence(layout, gathers, ("sp",), ("heads",), members, group, False, length, length)


class CollectivesTest(parameterized.TestCase):

  @parameterized.product(case=(("ring", {}), ("ring", dict(sliding_window=(31, 0))),
                               ("all_gather", {}), ("ulysses", {}), ("hybrid", {})),
                         backward=(False, True))
  def test_compiled(self, case, backward):
    variant, arguments = case
    mask = masks.causal() & (masks.window(31, 0) if arguments else masks.full())
    self.compare(variant, mask, backward, arguments)

  def compare(self, variant, mask, backward, arguments):
    shape, names = ((4, 2), ("sp", "x")) if variant == "hybrid" else ((SHARDS,), ("sp",))
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    heads = "x" if variant == "hybrid" else None
    metadata = OperationMetadata(mesh=mesh, ring=RingConfig(variant, "contiguous", heads),
                                 scan_ring_attention=False)
    run = lambda *x: ring_attention(*x, **arguments, metadata=metadata).attention_outputs
    arrays = [jax.ShapeDtypeStruct((B, T, h, w), jnp.float32,
                                   sharding=NamedSharding(mesh, P(None, names)))
              for h, w in ((H, D), (K, D), (K, E))]
    text = (both_passes(run, arrays) if backward
            else jax.jit(run).lower(*arrays).compile().as_text())
    plan = plan_context_parallel(SHAPES, mask, mesh, "cpu", heads_axis_name=heads,
                                 backward=backward)
    found = {c.name: (c.number, c.bytes) for c in prediction(plan, variant).collectives}
    self.assertEqual(found, sent(text))

  @parameterized.parameters(*RING_VARIANTS)
  def test_arrays_of_the_mask(self, variant):
    """Checks that segment ids, and a mask for every pair, are sent with keys and values."""
    ids, key_ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, B, T))).astype(np.int32)
    pairs = np.random.default_rng(1).random((1, H if variant == "ulysses" else 1, T, T)) < 0.9
    mask = masks.segments(ids, key_ids) & masks.dense(pairs)
    self.compare(variant, mask, True, dict(mask=mask, causal=False))


class VisitsTest(parameterized.TestCase):

  @parameterized.product(
      layout=token_order.TOKEN_ORDERS,
      spread=((SHARDS, 1, False), (SHARDS, 1, True), (4, 2, False), (1, SHARDS, False)),
      mask=(masks.causal(), masks.causal() & masks.window(37, 0),
            masks.chunk(64), masks.causal() | masks.prefix(40)))
  def test_blocks_with_a_visible_pair(self, layout, spread, mask):
    """Compares with the dense mask, its rows and columns in the token order."""
    members, group, gathers = spread
    sequence = sequence_of(layout, members, group, gathers)
    visits = work.visits(sequence, mask, (8, 16))
    order = token_order.order(layout, T, SHARDS)
    at = mask_lib.Coordinates(0, 0, *(order[:, None], order[None]) * 2)
    rows, columns = min(8, T // members), min(16, T // members)
    seen = np.broadcast_to(mask.visible(at), (T, T)).reshape(
        members, -1, rows, 1 if gathers else members, (T if gathers else T // members) // columns,
        columns)
    np.testing.assert_array_equal(visits.blocks, seen.any((2, 5)).sum((1, 3)))
    np.testing.assert_array_equal(visits.members, np.arange(members))
    self.assertEqual(visits.pairs, rows * columns)

  @parameterized.product(layout=token_order.TOKEN_ORDERS, group=(1, 2))
  def test_block_maps_of_ring_steps_for_masks_with_arrays(self, layout, group):
    """Checks segments in one batch row, padding in the other; shards do not divide the length."""
    length = T if layout != "contiguous" else T - 13
    ids = np.stack([np.arange(length) // 50, np.where(np.arange(length) < 99, 0, -1)])
    mask = masks.causal() & masks.segments(ids.astype(np.int32))
    sequence = sequence_of(layout, SHARDS // group, group, length=length)
    own = sequence.padded(length) // sequence.members
    ids = np.pad(ids, ((0, 0), (0, sequence.padded(length) - length))).astype(np.int32)
    def visited(member, source):
      rows, columns = sequence.rows(member), sequence.columns(source)
      mask = masks.causal() & masks.segments(ids[:, rows], ids[:, columns])
      kinds = block_map.host_kinds(masks.placed(mask, rows[None], columns[None], sequence.size),
                                   block_map.Sizes(own, own, 24, 16))
      return (kinds != block_map.EMPTY).mean(0).sum()
    everyone = token_order.numbers(sequence.members)
    np.testing.assert_array_equal(work.visits(sequence, mask, (24, 16)).blocks,
                                  [[visited(m, s) for s in everyone] for m in everyone])

  @parameterized.product(layout=token_order.TOKEN_ORDERS, spread=((64, 1), (8, 8), (1, 64)))
  def test_samples(self, layout, spread):
    """Checks that a sample of the blocks predicts all visits, where work grows linearly."""
    for mask in (masks.causal(), masks.causal() & masks.window(2000, 0)):
      sequence = sequence_of(layout, *spread, length=2**17)
      exact = work.visits(sequence, mask, (128, 128))
      with mock.patch.object(work, "CELLS", 2**15):
        part = work.visits(sequence, mask, (128, 128))
      mean = exact.blocks.sum(1).mean()
      self.assertLess(abs(part.blocks.sum(1).mean() / mean - 1), 0.06)
      self.assertLess(abs(part.imbalance / exact.imbalance - 1), 0.06)

  @parameterized.parameters((8, 2), (8, 8), (4096, 16), (6, 4))
  def test_samples_are_centered(self, count, picked):
    numbers = work._middles(count, picked)
    self.assertEqual(numbers.mean(), (count - 1) / 2)
    self.assertLen(set(numbers.tolist()), picked)
    self.assertBetween(numbers.min(), 0, numbers.max())
    self.assertLess(numbers.max(), count)

  def test_causal_balance(self):
    plan = plan_context_parallel(SHAPES._replace(queries=2**16, keys=2**16), masks.causal(), ROW,
                                 "v5e")
    self.assertBetween(prediction(plan, "ring").imbalance, 1.8, 1.95)
    for variant in ("ring", "all_gather"):
      for layout in ("zigzag", "striped"):
        self.assertBetween(prediction(plan, variant, layout).imbalance, 1.0, 1.02)
    self.assertEqual(prediction(plan, "ulysses").imbalance, 1.0)

  @parameterized.parameters((8, 2, 2), (8, 2, 4), (6, 3, 2), (12, 4, 6), (12, 4, 3), (4, 1, 4))
  def test_other_axes_of_the_mesh_divide_rows_and_heads(self, heads, key_heads, parts):
    """A device has the key heads that its query heads read, whether or not all can be divided."""
    shapes = SHAPES._replace(heads=heads, key_heads=key_heads)
    query, key = (2, T, heads, D), (2, T, key_heads, D)
    mesh = AbstractMesh((2, parts, 4), ("dp", "tp", "sp"))
    rules = OperationMetadata(mesh=mesh).get_shardings("__train__")
    placed = placement.place(rules, mesh, query, key, ("sp",))
    one, other = placement.local_shapes(placed, query, key)
    local = shapes._replace(batch=one[0], heads=one[2], key_heads=other[2])
    self.assertEqual((local.batch, local.heads), (1, heads // parts))
    found = plan_context_parallel(shapes, masks.causal(), mesh, "v5e")
    want = plan_context_parallel(local, masks.causal(), AbstractMesh((4,), ("sp",)), "v5e")
    self.assertEqual(found, want)

  @parameterized.product(devices=(2, 4, 8), is_part=(False, True))
  def test_bytes_through_the_busiest_link(self, devices, is_part):
    """Counts the links on the shortest ways between all devices of a ring, or of a row."""
    link, size = traffic.Link(devices, 1.0, True, is_part=is_part), 8 * 9 * 10
    exchanged = collections.Counter()
    for source, target in itertools.permutations(range(devices), 2):
      ways = ((1, target - source), (-1, source - target))
      hops = {direction: distance % devices for direction, distance in ways}
      if is_part:
        hops = {direction: distance for direction, distance in ways if distance > 0}
      shortest = min(hops.values())
      chosen = [direction for direction, count in hops.items() if count == shortest]
      for direction in chosen:
        for hop in range(shortest):
          exchanged[direction, (source + direction * hop) % devices] += size / devices / len(chosen)
    self.assertAlmostEqual(link.exchange(size), max(exchanged.values()))
    # The last device of a row gets everything through one link, one of a ring through two.
    self.assertAlmostEqual(link.gather(size), size * (devices - 1) / (1 if is_part else 2))
    switch = link._replace(is_ring=False)
    self.assertAlmostEqual(switch.gather(size), switch.exchange(size) * devices)

  @parameterized.parameters(((1, 1), 0, 1), ((H, 1), 1, 0), ((1, 0), 0, 0), ((H, 0), 0, 0))
  def test_exchange_of_a_mask_with_a_number_per_pair(self, form, to_heads, gathered):
    """Each head's array goes to the device of the head, one for all heads to all of the group."""
    heads, by_query = form
    mask = masks.dense(np.ones((1, heads, T if by_query else 1, T), bool))
    plan = plan_context_parallel(SHAPES, mask, ROW, "v5e", backward=False)
    found = {each.name: each.number for each in prediction(plan, "ulysses").collectives}
    # Query, key, value and output are exchanged in any case.
    self.assertEqual((found["all-to-all"], found.get("all-gather", 0)), (4 + to_heads, gathered))


TOY = peaks.Device(1000.0, 1.0, 10.0, True, 8, 5.0, ("toy",))


class TimeTest(parameterized.TestCase):
  """Times by hand: 2 tokens a shard, 4 heads, one key head, D = 3, E = 1, 4 bytes, no mask."""

  shapes = Shapes(1, 16, 16, 4, 1, 3, 1, "float32")

  def plan(self, device=TOY, mask=masks.full(), mesh=ROW, **arguments):
    with mock.patch.dict(peaks.DEVICES, toy=device):
      return plan_context_parallel(self.shapes, mask, mesh, "toy", **arguments)

  @parameterized.parameters(10.0, 1000.0)
  def test_forward(self, bandwidth):
    plan = self.plan(TOY._replace(link_bytes=bandwidth), backward=False)
    step = 4 * 4 * 2 * (3 + 1) / 1000  # pairs * heads * operations
    ring, gather, ulysses = (prediction(plan, v) for v in ("ring", "all_gather", "ulysses"))
    send = 2 * (3 + 1) * 4 / bandwidth  # tokens * widths * bytes
    self.assertAlmostEqual(ring.seconds, 7 * max(step, send) + step)
    self.assertAlmostEqual(ring.compute_seconds, 8 * step)
    self.assertAlmostEqual(ring.flops, 8000 * step)
    self.assertAlmostEqual(ring.link_seconds, 7 * send)
    # The ring is used in both directions.
    self.assertAlmostEqual(gather.seconds, 7 / 2 * send + 8 * step)
    self.assertIn("got 4 query heads a device for the 8 devices", ulysses.impossible)

  def test_a_window_takes_one_ring_step(self):
    """Checks that each of 8 members visits its own block and, but for the first, the one before."""
    plan = self.plan(mask=masks.causal() & masks.window(1, 0), backward=False)
    ring = prediction(plan, "ring")
    step, send = 0.128, 3.2
    self.assertAlmostEqual(ring.seconds, send + step)
    self.assertAlmostEqual(ring.flops, 2 * 1000 * step)
    self.assertAlmostEqual(ring.imbalance, 2 / (15 / 8))

  def test_backward(self):
    """Checks that keys, values and their gradients are sent, and that gradients return."""
    both, forward = (prediction(self.plan(backward=b), "ring") for b in (True, False))
    self.assertAlmostEqual(both.link_bytes - forward.link_bytes, 32 * (7 + 7))
    self.assertAlmostEqual(both.flops, forward.flops * (1 + (3 * 3 + 2) / (3 + 1)))
    # One direction in steps 1 and 2, both in the next 5, one in the last, one to return.
    self.assertAlmostEqual(both.seconds - forward.seconds, (2 + 2 * 5 + 1 + 1) * 32 / 10)

  def test_exchange_of_heads(self):
    """Checks 2 devices a group: 2 tokens of 4 query heads and of 2 copies of the key head each.

    On one ring of 8, half of the exchange uses the one link of a pair, and arrays for the next
    group use two links, as do those of the other device of the pair. With a mesh axis of its own, a
    pair has two links.
    """
    size = 2 * (4 + 2) * (3 + 1) * 4
    mesh = AbstractMesh((4, 2), ("sp", "x"))
    one, two = self.plan(backward=False), self.plan(backward=False, mesh=mesh, heads_axis_name="x")
    for plan, within, between in ((one, size / 2, 2 * 3 * 128), (two, size * 2 / 8, 3 * 128)):
      found = prediction(plan, "hybrid")
      self.assertEqual((found.members, found.group), (4, 2))
      exchange, ring = found.collectives
      self.assertEqual((exchange.number, exchange.bytes), (4, size))
      self.assertAlmostEqual(exchange.link_bytes, within)
      self.assertEqual((ring.number, ring.bytes), (6, 3 * 2 * 2 * 4 * 4))
      self.assertAlmostEqual(ring.link_bytes, between / 2)

  def test_between_domains(self):
    """Checks domains of 4 devices: everything that leaves a domain uses the network."""
    near, far = self.plan(backward=False), self.plan(TOY._replace(domain=4), backward=False)
    self.assertAlmostEqual(prediction(far, "ring").link_seconds,
                           2 * prediction(near, "ring").link_seconds)

  def test_recommends_the_fastest(self):
    plan = self.plan(mask=masks.causal())
    possible = [p for p in plan.predictions if not p.impossible]
    self.assertEqual(plan.recommended.seconds, min(p.seconds for p in possible))
    self.assertLen(plan.predictions, len(RING_VARIANTS) * len(token_order.TOKEN_ORDERS))

  def test_sixteen_million_tokens_on_4096_devices(self):
    shapes = Shapes(1, 2**24, 2**24, 32, 8, 128, 128)
    plan = plan_context_parallel(shapes, masks.causal(), AbstractMesh((4096,), ("sp",)), "v5p")
    least = 2**47 * 32 / 4096 * 2 * 7 * 128  # half of all pairs, 7 products
    for variant in ("ring", "hybrid"):
      found = prediction(plan, variant, "zigzag")
      self.assertBetween(found.flops / least, 1, 1.01)
      self.assertLess(found.imbalance, 1.001)
    self.assertIn("expected a multiple of 4096", prediction(plan, "ulysses").impossible)

  def test_finer_blocks_compute_less(self):
    coarse, fine = (self.plan(mask=masks.window(0, 0), block_sizes=BlockSizes(n, n)).recommended
                    for n in (2, 1))
    self.assertEqual(coarse.flops, 2 * fine.flops)

  @parameterized.parameters(
      masks.causal(), masks.causal() & masks.window(1, 0), masks.chunk(4),
      masks.window(1, 0) & masks.segments(np.arange(16, dtype=np.int32)[None] // 3))
  def test_ring_steps_by_the_visits_of_members(self, mask):
    exact = self.plan(mask=mask)
    with mock.patch.object(context_parallel, "MANY_SHARDS", 0):
      self.assertEqual(self.plan(mask=mask), exact)

  def test_other_axes_take_batch_and_heads(self):
    whole = plan_context_parallel(SHAPES, masks.causal(), ROW, "NVIDIA H200")
    mesh = AbstractMesh((2, 2, SHARDS), ("dp", "tp", "sp"))
    part = plan_context_parallel(SHAPES, masks.causal(), mesh, "h200")
    ring, quarter = (prediction(plan, "ring", "zigzag") for plan in (whole, part))
    self.assertEqual((quarter.flops, quarter.link_bytes), (ring.flops / 4, ring.link_bytes / 4))


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(mesh=AbstractMesh((SHARDS,), ("x",))),
       r"sequence_axis_name='sp': expected an axis of the mesh, which has \('x',\)"),
      (dict(heads_axis_name="x"), "ring.heads_axis_name='x': expected an axis of the mesh"),
      (dict(mesh=AbstractMesh((1, SHARDS), ("sp", "tp"))),
       "mesh: got one device along .'sp',.; expec"),
      (dict(mesh=None), "mesh: got None; expected a Mesh or AbstractMesh"),
      (dict(device_kind="v9"), "device_kind='v9': expected one of 'v5e', 'v5p', .*'cpu'"),
      (dict(device_kind=None), "device_kind=None: expected one of"),
      (dict(shapes=SHAPES._replace(key_heads=3)), "shapes.heads: got 8 with 3 key heads; expected"),
      (dict(shapes=SHAPES._replace(queries=0)), "shapes.queries: got 0; expected an int >= 1"),
      (dict(shapes=SHAPES._replace(dtype="float7")), "shapes.dtype: got 'float7'; expected a dty"),
      (dict(block_sizes=BlockSizes(block_kv=0)), "block_sizes.block_kv: got 0; expected an int"),
      (dict(block_sizes=512), "block_sizes: got 512; expected a BlockSizes"),
      (dict(heads_axis_name="sp"), "ring.heads_axis_name='sp': expected another mesh axis"),
      (dict(shapes=(1, 2)), "shapes: got .1, 2.; expected an attn_core.Shapes"),
      (dict(mask="causal"), "mask: got 'causal'; expected a mask value"),
      (dict(mask=masks.segments(np.zeros((1, 5), np.int32))),
       r"mask: an array per query: got int32\[1, 5\]; expected \[2, 256\]"),
      (dict(mask=masks.segments(np.zeros((2, 1), np.int32))),
       r"mask: an array per query: got int32\[2, 1\]; expected \[2, 256\]"))
  def test_refused(self, arguments, message):
    arguments = dict(shapes=SHAPES, mask=masks.causal(), mesh=ROW, device_kind="v5e") | arguments
    with self.assertRaisesRegex(ValueError, message):
      plan_context_parallel(**arguments)

  def test_impossible_plans_give_a_reason(self):
    shapes = SHAPES._replace(queries=T + 8, keys=T + 8, heads=4)
    plan = plan_context_parallel(shapes, masks.causal(), ROW, "v5e")
    self.assertIn("query length=264: expected a multiple of 16 for layout 'zigzag'",
                  prediction(plan, "ring", "zigzag").impossible)
    self.assertRegex(prediction(plan, "ulysses").impossible,
                     "got 4 query heads a device for the 8 devices of mesh axis 'sp'; .*'hybrid' "
                     "with a heads axis of size 2 or 4")
    self.assertIsNone(prediction(plan, "hybrid", "striped").impossible)
    plan = plan_context_parallel(SHAPES, masks.causal(), AbstractMesh((7,), ("sp",)), "cpu")
    self.assertIn("7 devices do not split", prediction(plan, "hybrid").impossible)

  @parameterized.parameters(
      ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"),
      ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("cpu", "cpu"), ("V5E", "v5e"),
      ("NVIDIA H200 NVL", "h200"))
  def test_names_of_devices(self, kind, name):
    self.assertIs(peaks.find(kind), peaks.DEVICES[name])


class CommandTest(absltest.TestCase):

  def test_prints(self):
    out = io.StringIO()
    with (mock.patch.object(command, "DEVICES_ALONG", (8, 64)),
          mock.patch.object(command, "TOKENS", (2**14,)),
          mock.patch.object(sys, "argv", ["plan", "--device", "h100", "--window", "1023"]),
          contextlib.redirect_stdout(out)):
      command.main()
    text = out.getvalue()
    self.assertIn("exchange in step n", text)
    self.assertEqual(text.count("\n* "), 2)
    self.assertIn("64 x h100, 16,384 tokens", text)
    self.assertEqual(text.count("impossible:"), 1)
    self.assertIn("  impossible: ulysses (got 32 query heads", text)

  def printed(self, *arguments):
    out = io.StringIO()
    with (mock.patch.object(sys, "argv", ["plan", *arguments]), contextlib.redirect_stdout(out),
          contextlib.redirect_stderr(out)):
      try:
        command.main()
      except SystemExit:
        pass
    return out.getvalue()

  def test_the_callers_shapes_and_mesh(self):
    text = self.printed("--heads", "6", "--kv-heads", "3", "--head-dim", "64", "--tokens",
                        "16k,20000", "--mesh", "dp=2,sp=4", "--device", "V5E")
    self.assertIn("8 x v5e (dp=2, sp=4), 16,384 tokens\n", text)
    self.assertIn("8 x v5e (dp=2, sp=4), 20,000 tokens\n", text)
    self.assertEqual(text.count("\n* "), 2)
    shapes = context_parallel.Shapes(2, 2**14, 2**14, 6, 3, 64, 64)
    plan = plan_context_parallel(shapes, masks.causal(), AbstractMesh((2, 4), ("dp", "sp")), "v5e")
    self.assertIn(f"{plan.recommended.seconds * 1e3:.4g}", text)
    # Of the four variants the two that exchange heads: in one line.
    line, = {line for line in text.splitlines() if "impossible" in line}
    self.assertRegex(line, r"^  impossible: ulysses \(got 6 query heads.*\)(, hybrid \(.*\))?$")

  def test_windows_shorten_the_way(self):
    shapes = context_parallel.Shapes(1, 2**13, 2**13, 32, 8, 128, 128)
    for window in (0, 100):
      text = self.printed("--tokens", "8k", "--mesh", "sp=2", "--window", str(window))
      plan = plan_context_parallel(shapes, masks.causal() & masks.window(window, 0),
                                   AbstractMesh((2,), ("sp",)), "v5p")
      self.assertIn(f"{plan.recommended.seconds * 1e3:.4g}", text)

  def test_wrong_options(self):
    for arguments, words in (
        (("--mesh", "dp=4"), "at least two devices along sp"), (("--mesh", "sp"), "got 'sp'"),
        (("--tokens", "many"), "numbers of tokens"), (("--heads", "0"), "at least 1"),
        (("--heads", "6", "--kv-heads", "4", "--tokens", "8k", "--mesh", "sp=2"),
         "a multiple of the key heads"), (("--window", "-1"), "--window: got -1")):
      self.assertIn(words, self.printed(*arguments))


if __name__ == "__main__":
  absltest.main()
