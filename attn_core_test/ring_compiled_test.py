# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The compiled program of a ring: its exchanges, their order, and its memory."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import attention, masks, ring_attention
from attn_core.kernels.xla import cpu_math
from attn_core.masks import position_range
from attn_core.masks.materialize import to_dense
from attn_core.mechanisms.context_parallel import ring_step
from attn_core.sharding import context_parallel
from attn_core_test.ring_cases import (COLLECTIVE, SHARDS, compiled, gradients_of, mesh_of,
                                       metadata_of)


class CompiledTest(parameterized.TestCase):
  """Collectives and memory of compiled rings, and static bounds of their masks."""

  def count(self, metadata, gradient=False, **arguments):
    run = lambda *x: ring_attention(*x, metadata=metadata, **arguments).attention_outputs
    text = compiled(gradients_of(run) if gradient else run, metadata).as_text()
    found = COLLECTIVE.findall(text)
    return {name: found.count(name) for name in set(found)}

  def test_a_window_shorter_than_a_shard_takes_one_ring_step(self):
    ring = metadata_of("ring", scan_ring_attention=False)
    window = dict(sliding_window=(63, 0))
    self.assertEqual(self.count(ring, **window), {"collective-permute": 2})
    # Two in the forward; in the backward two, and two for gradients on their way back.
    self.assertEqual(self.count(ring, True, **window), {"collective-permute": 6})

  @parameterized.parameters(
      ("ring", dict(chunk_size=64), {}),
      ("ring", dict(sliding_window=(70, 65), causal=False), {"collective-permute": 8}),
      ("ring", {}, {"collective-permute": 14}),
      ("all_gather", {}, {"all-gather": 2}),
      ("ulysses", {}, {"all-to-all": 4}),
      ("hybrid", {}, {"all-to-all": 4, "collective-permute": 6}))
  def test_collectives(self, variant, arguments, sent):
    self.assertEqual(self.count(metadata_of(variant, scan_ring_attention=False), **arguments), sent)

  def test_ring_steps(self):
    def shifts(mask, layout="contiguous", length=512):
      sharded = context_parallel.Sequence(
          layout, False, ("sp",), (), SHARDS, 1, True, length, length)
      return ring_step.shifts(sharded, jax.tree.structure(mask))
    all_steps = tuple(range(SHARDS))
    self.assertEqual(shifts(masks.causal()), all_steps)
    self.assertEqual(shifts(masks.causal() & masks.window(64, 0)), (0, 1))
    self.assertEqual(shifts(masks.causal() & masks.window(65, 0)), (0, 1, 2))
    self.assertEqual(shifts(masks.window(3, 3)), (0, 1, 7))
    self.assertEqual(shifts(masks.offset(masks.window(0, 0), -256)), (0, 4))
    self.assertEqual(shifts(masks.chunk(64)), (0,))
    self.assertEqual(shifts(masks.chunk(64), length=509), (0,))
    self.assertEqual(shifts(masks.prefix(64)), all_steps)
    self.assertEqual(shifts(masks.causal() & masks.window(31, 0), "zigzag"), (0, 1, 7))
    self.assertEqual(shifts(masks.causal() & masks.window(3, 0), "striped"), all_steps)
    ids = masks.segments(np.zeros((1, 512), np.int32))
    self.assertEqual(shifts(ids), all_steps)
    self.assertEqual(shifts(ids & masks.causal() & masks.window(64, 0)), (0, 1))
    self.assertEqual(shifts(masks.chunk(64) & ~ids), (0,))
    self.assertEqual(shifts(masks.chunk(64) | ids), all_steps)
    self.assertEqual(shifts(~(ids | ~masks.chunk(64))), (0,))
    self.assertEqual(shifts(masks.offset(masks.window(0, 0) & ids, -256)), (0, 4))
    self.assertEqual(shifts(masks.positions(np.zeros((1, 512), np.int32), None, masks.window(3, 3))
                            ), all_steps)

  def test_static_bounds_of_masks_with_arrays(self):
    """Checks that static bounds never hide a visible pair, for every way to build a mask."""
    rng = np.random.default_rng(0)
    ids, places = (rng.integers(-1, 5, (1, 16)).astype(np.int32) for _ in range(2))
    leaves = (masks.segments(ids), masks.causal(), masks.window(3, 2), masks.chunk(4),
              masks.prefix(np.array([5])), masks.lengths(None, np.array([9])),
              masks.positions(places), masks.dense(rng.random((1, 1, 16, 16)) < 0.5),
              masks.offset(masks.chunk(4) & masks.segments(ids), 2),
              masks.offset(masks.causal(), np.array([3])))
    shown = lambda mask: to_dense(mask, (1, 1, 16, 16))
    bounded = 0
    for first, second in itertools.product(leaves, leaves):
      for mask in (first & second, first | second, ~first & second, ~(first | ~second)):
        known = position_range.static_superset(mask)
        self.assertEmpty(jax.tree.leaves(known))
        self.assertFalse((shown(mask) & ~shown(known)).any(), mask)
        bounded += not shown(known).all()
    self.assertGreater(bounded, 100)

  def test_memory_is_that_of_a_shard(self):
    """Checks 131,072 tokens: memory per device halves with every doubling of devices."""
    tokens = 131072
    def temporary(devices):
      metadata = metadata_of("ring", "zigzag", mesh_of("ring", devices))
      run = lambda *x: ring_attention(*x, metadata=metadata).attention_outputs
      return compiled(gradients_of(run), metadata, (1, tokens, 1, 64)).memory_analysis(
          ).temp_size_in_bytes
    eighth, quarter = temporary(8), temporary(4)
    self.assertLess(eighth, 0.55 * quarter)
    self.assertLess(eighth, 16 * tokens // 8 * 64 * 4)  # 16 arrays as large as a shard of the keys

  def test_memory_compared_with_one_device(self):
    """Checks the gradient of a layer over 65,536 tokens, and of its attention alone."""
    metadata, tokens = metadata_of("ring", "zigzag"), 65536
    def temporary(run, sharding, *shapes):
      arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]
      return jax.jit(run).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    def layer(mechanism, metadata):
      def loss(x, weights):
        q, k, v = jnp.split(x @ weights[:, :640], (512, 576), -1)
        heads = lambda x: x.reshape(1, tokens, -1, 64)
        out = attention(heads(q), heads(k), heads(v), mechanism=mechanism, metadata=metadata)
        x = x + out.attention_outputs.reshape(1, tokens, 512) @ weights[:, 640:1152].T
        return (jax.nn.gelu(x @ weights[:, 1152:]) ** 2).mean()
      return jax.grad(loss, 1)
    def alone(mechanism, metadata):
      return gradients_of(lambda *x: attention(
          *x, mechanism=mechanism, metadata=metadata).attention_outputs)
    def ratio(run, *shapes):
      sharded = NamedSharding(metadata.mesh, P(None, "sp"))
      return temporary(run("flash_attn2", None), None, *shapes) / temporary(
          run("ring", metadata), sharded, *shapes)
    self.assertGreater(ratio(layer, (1, tokens, 256), (256, 2048)), 6)
    heads = lambda number: (1, tokens, number, 64)
    self.assertGreater(ratio(alone, heads(8), heads(1), heads(1)), 4.5)

  def test_waiting_keeps_bits(self):
    """Checks that arrays made to wait for others keep their bits."""
    bits = np.array([0, 1 << 31, 1, 0x7f800000, 0xff800000, 0x7fc12345], np.uint32)
    x = bits.view(np.float32), bits.view(np.int32)
    for done in (np.float32(-0.0), np.float32(np.nan), np.float32(-np.inf), np.float32(3)):
      got = jax.jit(cpu_math.after)(x, [np.full((2, 3), done), done])
      self.assertEqual([np.asarray(y).tobytes() for y in got], [bits.tobytes()] * 2)
      zeros = jax.jit(lambda x: cpu_math.zeros((2, 2), jnp.bfloat16, done=x))(done)
      self.assertFalse(np.asarray(zeros).view(np.uint16).any())


if __name__ == "__main__":
  absltest.main()
