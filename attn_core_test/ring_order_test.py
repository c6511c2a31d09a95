# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rings compiled ahead of time: the order of exchanges and kernels, and the size of schedules."""

import re
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
import numpy as np

from attn_core import BlockSizes, RingConfig, explain, masks, ring_attention, score_mods
from attn_core.benchmark.static import gpu as static_gpu, profile as static_profile
from attn_core.kernels.tpu.flash import kernel as tpu_flash, scalar_memory, tiling
from attn_core.kernels.xla import flash as xla_flash
from attn_core.mechanisms.context_parallel import ring_step
from attn_core.sharding import context_parallel
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling
from attn_core_test.ring_cases import compiled, gradients_of, mesh_of, metadata_of


def issued(metadata, gradient, kernel, dtype=jnp.bfloat16):
  """Returns starts and ends of exchanges, and kernels, in the order in which a ring issues them."""
  run = lambda *x: ring_attention(*x, metadata=metadata).attention_outputs
  text = compiled(gradients_of(run) if gradient else run, metadata, (1, 1024, 4, 128),
                  dtype).as_text()
  assert "is_scheduled=true" in text
  names = {"collective-permute-start": "start", "collective-permute-done": "done",
           "collective-permute": "waits"}
  steps = re.findall(rf" (collective-permute[-a-z]*)\(|custom_call_target=\"({kernel})",
                     text[text.index("\nENTRY"):])
  return [names.get(a, "kernel") for a, _ in steps]


def in_flight(steps):
  """Returns for every kernel how many exchanges are in flight during it."""
  return [steps[:n].count("start") - steps[:n].count("done")
          for n, step in enumerate(steps) if step == "kernel"]


class ShiftsTest(parameterized.TestCase):

  @parameterized.parameters(
      (masks.window(3, 0), (0, 1)), (masks.window(0, 3), (0, 3)), (masks.window(3, 3), (0, 1, 3)),
      (masks.window(5, 0), (0, 1, 2)), (masks.causal(), (0, 1, 2, 3)), (masks.chunk(4), (0,)))
  def test_needed_steps(self, mask, expected):
    """Checks a ring of four devices with four tokens each: step s brings keys from s before."""
    mesh = AbstractMesh((4,), ("sp",))
    sequence = context_parallel.shard_sequence(RingConfig(), "sp", True, mesh, (16, 16, 2))
    self.assertEqual(ring_step.shifts(sequence, jax.tree.structure(mask)), expected)


class ScheduleTest(parameterized.TestCase):

  def test_a_long_shard_has_a_schedule_of_small_blocks(self):
    """Checks shards of 65,536 tokens, whose backward has several ranges of queries."""
    tokens = jax.ShapeDtypeStruct((1, 65536, 1, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 65536), jnp.int32)
    mask = masks.causal() & masks.segments(np.zeros((1, 1), np.int32))
    operands = Operands(tokens, tokens, tokens, mask=MaskOperands((ids, ids)))
    spec = AttentionSpec(jax.tree.structure(mask), 1.0)
    sizes = BlockSizes(block_q_backward=128, block_kv_backward=128)
    kernel = tpu_flash.make_kernel(xla_flash.KERNEL)
    kernel.check(operands, spec, sizes)
    blocks = tiling.make_tiling(operands, spec, sizes, backward=True)
    self.assertGreater(blocks.num_ranges, 1)
    scalar_memory.num_groups(operands, spec, blocks, by_keys=True)
    with self.assertRaisesRegex(ValueError, "128 queries and 128 keys make a schedule"):
      longer = jax.ShapeDtypeStruct((1, 2**17, 1, 128), jnp.bfloat16)
      ids = jax.ShapeDtypeStruct((1, 2**17), jnp.int32)
      kernel.check(Operands(longer, longer, longer, mask=MaskOperands((ids, ids))), spec,
                   BlockSizes(block_q=128, block_kv=128))


class HopperTest(absltest.TestCase):

  def test_lowers_for_gpus(self):
    """Lowers forward and backward of two ring steps with the kernels for Hopper."""
    metadata = metadata_of("ring", mesh=mesh_of("ring", 2), platform="gpu",
                           compute_capability="9.0")
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    run = gradients_of(lambda *x: ring_attention(*x, metadata=metadata).attention_outputs)
    text = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    self.assertGreaterEqual(text.count("custom_call @mosaic_gpu"), 4)
    self.assertIn("collective_permute", text)
    explanation = str(explain(x, x, x, mechanism="ring", metadata=metadata))
    self.assertIn("can, by context_parallel.gpu", explanation)

  def test_score_mods(self):
    """Lowers them with global positions, also tables where these are equally far apart."""
    metadata_in = lambda *layout: metadata_of(
        *layout, mesh=mesh_of(layout[0], 2), platform="gpu", compute_capability="9.0")
    metadata = metadata_in("ring")
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    slopes, column, table = (
        jax.ShapeDtypeStruct(n, jnp.float32) for n in ((2,), (1, 1, 128), (3, 2)))
    def loss(x, slopes, column, table):
      found = ring_attention(x, x, x, metadata=metadata, score_mod=score_mods.alibi(slopes)
                             >> score_mods.soft_cap(2.0) >> score_mods.per_key(column)
                             >> score_mods.by_distance(table))
      return found.attention_outputs.astype(jnp.float32).sum()
    programs = [(loss, 1)]
    if sampling.chosen("gradients of score mods in a ring on GPUs"):
      programs.append((jax.grad(loss, (0, 1, 2)), 5))  # forward, query, key and value, two arrays
    for run, kernels in programs:
      text = jax.jit(run).trace(x, slopes, column, table).lower(
          lowering_platforms=("cuda",)).as_text()
      self.assertEqual(text.count("custom_call @mosaic_gpu"), 2 * kernels)  # of two steps
    def said(tokens, *layout, **arguments):
      x = jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.bfloat16)
      return str(explain(x, x, x, mechanism="ring", metadata=metadata_in(*layout),
                         score_mod=score_mods.by_distance(np.ones((3, 2), np.float32)),
                         **arguments))
    for tokens, layout in ((128, "contiguous"), (128, "striped"), (512, "zigzag")):
      self.assertIn("can, by context_parallel.gpu", said(tokens, "ring", layout))
    self.assertIn("can, by context_parallel.gpu", said(256, "all_gather", "striped"))
    for tokens, variant, layout, runs, length, least, sizes in (
        (128, "ring", "zigzag", (2, 2), 32, 128, BlockSizes()),
        (512, "ring", "zigzag", (2, 2), 128, 256, BlockSizes(block_kv=256)),
        (128, "all_gather", "striped", (1, 2), 64, 128, BlockSizes())):
      self.assertRegex(
          said(tokens, variant, layout, block_sizes=sizes),
          "by context_parallel.xla, not by context_parallel.gpu: .*distance. in layout "
          f"{layout!r}, where a device has {runs[0]} runs of query positions and {runs[1]} of key "
          f"positions of {length} and {length} tokens: only multiples of {least} are taken")

  @unittest.skipIf(static_gpu.missing(), f"nothing to compile with: {static_gpu.missing()}")
  def test_an_exchange_goes_on_while_a_ring_step_computes(self):
    """Compiles ahead of time for four GPUs."""
    mesh = Mesh(np.array(topologies.get_topology_desc(
        platform="cuda", topology="1x1x4", target_config=static_gpu.TARGET).devices), "sp")
    metadata = metadata_of("ring", mesh=mesh, platform="gpu", compute_capability="9.0",
                           scan_ring_attention=False)
    forward, both = (issued(metadata, gradient, "mosaic_gpu") for gradient in (False, True))
    self.assertEqual(forward, ["start", "kernel", "done"] * 3 + ["kernel"])
    # The backward of a ring step has a kernel for queries and one for keys. During two of these
    # eight, and during the last one of the forward, there is nothing to exchange.
    self.assertEqual(both[:10], forward)
    self.assertEqual(both.count("kernel"), 4 + 8)
    self.assertLessEqual(in_flight(both).count(0), 3, both)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class TpuTest(parameterized.TestCase):
  """Programs compiled ahead of time, without a chip."""

  def schedule(self, chip, gradient, dtype=jnp.float32):
    metadata = metadata_of("ring", mesh=Mesh(np.array(static_profile.devices(chip)), "sp"),
                           platform="tpu", scan_ring_attention=False)
    return issued(metadata, gradient, "tpu_custom_call", dtype)

  @parameterized.parameters("v5e", "v5p", "v6e")
  def test_an_exchange_goes_on_while_a_ring_step_computes(self, chip):
    # Exchanges of keys and of values for the next ring step, none for later ones.
    self.assertEqual(in_flight(self.schedule(chip, False)), [2, 2, 2, 0])

  @parameterized.parameters("v5e", "v5p", "v6e")
  def test_both_ways_at_once_in_the_backward(self, chip):
    found = self.schedule(chip, True)
    # Keys and values three times forward and three times backward; gradients three times.
    self.assertEqual((found.count("start"), found.count("kernel")), (18, 8))
    # Only the last step of the forward has none; gradients travel during the next step.
    self.assertLessEqual(in_flight(found).count(0), 1, found)
    self.assertLessEqual(max(in_flight(found)), 4, found)

  def test_bfloat16(self):
    """Checks kernels that try a naive softmax first, with partial results in float32."""
    self.assertGreaterEqual(self.schedule("v5e", False, jnp.bfloat16).count("kernel"), 4)


if __name__ == "__main__":
  absltest.main()
