# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks by indices: their meaning, derivatives, blocks visited, memory, placement and errors."""

import itertools
import math
import re
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, CacheMetadata, MaskInfo, OperationMetadata, RingConfig,
                       attention, create_mesh, explain, masks, score_mods)
from attn_core.caches import window
from attn_core.kernels.common import listed
from attn_core.kernels.gpu.flash import kernel_params, tiling as gpu_tiling
from attn_core.kernels.tpu.flash import scalar_memory, schedule, tiling
from attn_core.kernels.tpu.flash.schedule import round_up
from attn_core.kernels.xla import selected_bits, selected_steps, selected_union
from attn_core.masks import block_map
from attn_core.masks.selected import fitted
from attn_core.types import AttentionSpec, MaskOperands, Operands, cdiv
from attn_core_test import sampling
from attn_core_test.masks_cases import dense
from attn_core_test.tpu_interpret import interpreted

jax.config.update("jax_num_cpu_devices", 4)

HOPPER = OperationMetadata(platform="gpu", compute_capability="9.0")
B, T, S, H, K, D, E = 2, 22, 26, 4, 2, 5, 3


def numbers(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def lists(most, *shape, seed=0):
  """Returns random lists, with -1 and repeated numbers among them."""
  return np.random.default_rng(seed).integers(-1, most, shape).astype(np.int32)


def seen_by(indices, block_q, block_kv, shape):
  """Returns bool [B, H, T, S] by loops over numbers."""
  batch, heads, queries, keys = shape
  found = np.zeros(shape, bool)
  rows, kinds, _, _ = indices.shape
  for b, h, t in np.ndindex(batch, heads, queries):
    for number in indices[b % rows, h // (heads // kinds), t // block_q]:
      if number >= 0:
        found[b, h, t, number * block_kv:(number + 1) * block_kv] = True
  return found


BLOCKS, WIDE = lists(7, B, K, 6, 3), lists(4, 1, 1, 3, 2, seed=1)
KEYS, BY_HEAD = lists(S, B, T, 6, seed=2), lists(S, 1, H, T, 5, seed=3)
# In the second row of the batch, 8 neighbors list the same keys.
AGREEING = np.stack([KEYS[0], np.repeat(KEYS[1, ::8], 8, 0)[:T]])
SHAPE = (B, H, T, S)
CAUSAL = np.arange(S) <= np.arange(T)[:, None] + S - T
IDS = (np.arange(T) // 9)[None].astype(np.int32), (np.arange(S) // 11)[None].astype(np.int32)

# name, mask, [B, H, T, S] by hand.
CASES = (
    ("blocks", masks.selected_blocks(BLOCKS, 4, 4), seen_by(BLOCKS, 4, 4, SHAPE)),
    ("blocks_of_all_heads", masks.selected_blocks(WIDE, 10, 8), seen_by(WIDE, 10, 8, SHAPE)),
    ("keys", masks.selected_keys(KEYS), seen_by(KEYS[:, None], 1, 1, SHAPE)),
    ("keys_of_query_heads", masks.selected_keys(BY_HEAD), seen_by(BY_HEAD, 1, 1, SHAPE)),
    ("both", masks.selected_blocks(BLOCKS, 4, 4) & masks.selected_keys(KEYS),
     seen_by(BLOCKS, 4, 4, SHAPE) & seen_by(KEYS[:, None], 1, 1, SHAPE)),
    ("or", masks.selected_keys(KEYS) | masks.prefix(3),
     seen_by(KEYS[:, None], 1, 1, SHAPE) | (np.arange(S) < 3)),
    ("not", ~masks.selected_blocks(WIDE, 10, 8), ~seen_by(WIDE, 10, 8, SHAPE)),
)


def operands():
  return (numbers(B, T, H, D), numbers(B, S, K, D, seed=1), numbers(B, S, K, E, seed=2),
          numbers(H, seed=3))


def call(mechanism, mask, **arguments):
  def run(query, key, value, sinks):
    found = attention(query, key, value, softmax_aux=sinks, mask=mask, mechanism=mechanism,
                      return_lse=True, query_offset=S - T, **arguments)
    return found.attention_outputs, found.lse
  return run


def assert_close(found, expected):
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def inputs_of(indices, block_q, block_kv, shape, key_heads=1):
  """Returns the inputs of an attention of [B, H, T, S] to selected blocks."""
  batch, heads, queries, keys = shape
  like = [jax.ShapeDtypeStruct((batch, *x, 8), jnp.float32) for x in (
      (queries, heads), (keys, key_heads), (keys, key_heads))]
  mask = fitted(masks.selected_blocks(indices, block_q, block_kv), shape)
  arrays, structure = jax.tree.flatten(mask)
  return selected_steps.make_inputs(Operands(*like, mask=MaskOperands(tuple(arrays))),
                                    AttentionSpec(structure, 1.0))


class MeaningTest(parameterized.TestCase):

  @parameterized.named_parameters(*CASES)
  def test_dense(self, mask, expected):
    np.testing.assert_array_equal(dense(fitted(mask, SHAPE), SHAPE), expected)

  @parameterized.named_parameters(*CASES)
  def test_block_map_hides_no_visible_pair(self, mask, expected):
    for block in ((4, 4), (3, 7), (16, 2), (32, 32)):
      sizes = block_map.Sizes(T, S, *block)
      for kinds in (block_map.block_kinds(mask, sizes),
                    block_map.host_kinds(jax.tree.map(np.asarray, mask), sizes)):
        wide = np.repeat(np.repeat(kinds, block[0], 2), block[1], 3)[:, :, :T, :S]
        self.assertFalse((expected & (wide == block_map.EMPTY)).any())
        self.assertFalse((~expected & (wide == block_map.FULL)).any())

  @parameterized.named_parameters(*CASES)
  def test_every_derivative(self, mask, expected):
    arrays = operands()
    by_hand = call("vanilla", masks.dense(expected))
    extras = dict(mask_info=MaskInfo.from_segments(*IDS), logits_soft_cap=2.0, dropout_prob=0.25,
                  dropout_rng=jax.random.key(3), deterministic=False)
    moves = tuple(x * 0.5 + 0.1 for x in arrays)

    def derivatives(run, most):
      """Returns the value, the gradient and, where `most` is 2, the tangent of the gradient."""
      def loss(*x):
        out, lse = run(*x)
        return (out * out).sum() + jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0)).sum()
      slope = jax.grad(loss, (0, 1, 2, 3))
      def found(*x):
        return run(*x), *(jax.jvp(slope, x, moves) if most == 2 else (slope(*x),))
      return jax.jit(found)(*arrays)

    wanted = derivatives(call("vanilla", masks.dense(expected), **extras), 2)
    assert_close(derivatives(call("vanilla", mask, **extras), 1), wanted[:2])
    assert_close(derivatives(call("blockwise", mask, **extras), 2), wanted)
    assert_close(jax.jit(call("flash_attn2", mask))(*arrays), jax.jit(by_hand)(*arrays))

  def test_a_block_named_twice_counts_once(self):
    twice, once = (masks.selected_blocks(np.array([[[x] * 6]], np.int32), 4, 4)
                   for x in ([1, 3, 1, 1], [3, 1, -1, -1]))
    for mechanism in ("vanilla", "blockwise", "sdpa"):
      run = lambda mask: attention(*operands()[:3][:2], numbers(B, S, K, D, seed=2), mask=mask,
                                   mechanism=mechanism, causal=False).attention_outputs
      assert_close(run(twice), run(once))

  def test_traced_numbers_out_of_range_name_none(self):
    arrays = operands()
    wild = np.where(KEYS % 5 == 0, KEYS + 100, np.where(KEYS % 7 == 0, -9, KEYS))
    tame = np.where((wild < 0) | (wild >= S), -1, wild)
    for mechanism in ("vanilla", "blockwise"):
      run = jax.jit(lambda x: call(mechanism, masks.selected_keys(x))(*arrays))
      assert_close(run(wild), run(tame))

  @parameterized.parameters(0, selected_union.MOST_ROWS)
  def test_nothing_hidden_reaches_a_result(self, most_rows):
    self.enter_context(mock.patch.object(selected_union, "MOST_ROWS", most_rows))
    query, key, value, sinks = operands()
    seen = seen_by(BLOCKS, 4, 4, SHAPE) & CAUSAL
    key = key.at[:, 9].set(jnp.nan)
    value = value.at[:, 17].set(jnp.inf)
    mask = masks.selected_blocks(BLOCKS, 4, 4)
    touched = seen[..., [9, 17]].any(-1).transpose(0, 2, 1)
    out, lse = call("blockwise", mask)(query, key, value, sinks)
    np.testing.assert_array_equal(np.isnan(out).all(-1), touched)
    np.testing.assert_array_equal(np.isnan(lse).transpose(0, 2, 1), touched)
    gradient = jax.jit(jax.grad(lambda *x: jnp.where(touched[..., None], 0, call(
        "blockwise", mask)(*x, sinks)[0]).sum(), (0, 1, 2)))
    slope, clean = gradient(query, key, value), gradient(query, *operands()[1:3])
    np.testing.assert_allclose(np.where(touched[..., None], 0, slope[0]),
                               np.where(touched[..., None], 0, clean[0]), rtol=1e-5, atol=1e-6)

  @parameterized.named_parameters(
      ("blocks", masks.selected_blocks(BLOCKS, 4, 4) & masks.custom(
          lambda b, h, q, k: (b + h + q + k) % 3 > 0), {}),
      ("keys", masks.selected_keys(AGREEING), dict(
          mask_info=MaskInfo.from_segments(*IDS), logits_soft_cap=2.0, dropout_prob=0.25,
          dropout_rng=jax.random.key(3), deterministic=False)))
  def test_unions_of_lists_equal_gathered_ones(self, mask, extras):
    """A tile, and a chunk of keys, that are and are not shorter than the arrays.

    Neighbors that agree gather few keys, others slice most of a chunk.
    """
    def gradients(*sizes):
      def loss(*arrays):
        out, lse = call("blockwise", mask, **extras)(*arrays)
        return (out * out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)
      tile, chunk, most_rows = sizes
      with (mock.patch.multiple(selected_bits, TILE=tile, CHUNK=chunk),
            mock.patch.object(selected_union, "MOST_ROWS", most_rows),
            jax.numpy_rank_promotion("raise")):
        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*operands())
    expected = gradients(8, 8, 0)
    assert_close(gradients(8, 8, 16), expected)
    assert_close(gradients(128, 256, 16), expected)

  @parameterized.parameters(
      (1, 1, "random"), (3, 2, "random"), (4, 1, "random"), (40, 3, "random"), (1, 1, "all"),
      (1, 1, "window"), (4, 3, "every other"))
  def test_unions(self, block_q, block_kv, kind):
    """Bits say which list names which block, and a union has all blocks that a tile lists.

    Blocks and chunks that do and do not divide a tile and the keys.
    """
    queries, keys, tile, chunk = 51, 86, 16, 8
    blocks, count = cdiv(queries, block_q), cdiv(keys, block_kv)
    rows = np.arange(blocks)[:, None]
    indices = {"random": np.random.default_rng(24).integers(-3, count + 5, (blocks, 7)),
               "all": np.broadcast_to(np.arange(count), (blocks, count)),
               "window": rows - np.arange(9), "every other": 2 * ((rows + np.arange(9)) // 2)}[kind]
    indices = indices.astype(np.int32)
    named = np.zeros((queries, count), bool)
    for query, number in np.ndindex(queries, indices.shape[1]):
      block = indices[query // block_q, number]
      if 0 <= block < count:
        named[query, block] = True
    of = lambda indices: inputs_of(indices[None, None], block_q, block_kv, (1, 1, queries, keys))
    inputs = of(np.zeros_like(indices))
    with mock.patch.multiple(selected_bits, TILE=tile, CHUNK=chunk):
      found = jax.jit(lambda indices: selected_bits.find(of(indices)))(indices)
      per_chunk = selected_bits.chunk_blocks(inputs)
      for n in range(cdiv(queries, tile)):
        part = named[n * tile:(n + 1) * tile]
        for transposed in (False, True):
          bits = selected_bits.listed(inputs, found.bits[0, 0, n], transposed=transposed)
          bits = np.asarray(bits.T if transposed else bits)
          bits = np.repeat(bits, tile // bits.shape[0], 0)
          np.testing.assert_array_equal(bits[:len(part), :count], part)
          self.assertFalse(bits[:, count:].any())
        union = np.asarray(found.blocks[0, 0, n])[:int(found.num_chunks[0, 0, n]) * per_chunk]
        self.assertTrue((np.diff(union) > 0).all())
        self.assertContainsSubset(np.flatnonzero(part.any(0)), union)

  def test_a_gradient_finds_unions_once(self):
    query, mask = numbers(1, 64, 2, 8), masks.selected_keys(lists(64, 1, 64, 16))
    def loss(query):
      return (attention(query, query, query, mask=mask, mechanism="blockwise"
                        ).attention_outputs ** 2).sum()
    counts = [len(re.findall(r"u8\S* or\(", jax.jit(run).lower(query).compile().as_text()))
              for run in (loss, jax.value_and_grad(loss))]
    self.assertGreater(counts[0], 0)
    self.assertEqual(*counts)

  def test_chooses_unions_by_sizes(self):
    """Long lists of few rows; a list of many rows multiplies matrices as it is."""
    def chosen(queries, keys, heads, key_heads, k, block_q=1, block_kv=1):
      indices = np.zeros((1, 1, queries // block_q, k), np.int32)
      return selected_union.is_faster(inputs_of(
          indices, block_q, block_kv, (1, heads, queries, keys), key_heads))
    self.assertTrue(chosen(512, 512, 2, 2, 32))
    self.assertFalse(chosen(512, 512, 2, 2, 31))
    self.assertFalse(chosen(512, 512, 4, 2, 32))
    self.assertTrue(chosen(512, 512, 4, 2, 64))
    self.assertFalse(chosen(512, 512, 10, 2, 64))
    self.assertTrue(chosen(512, 512, 10, 2, 128))
    self.assertTrue(chosen(512, 512, 4, 2, 8, 8, 16))
    self.assertFalse(chosen(512, 512, 6, 2, 8, 8, 16))

  @parameterized.parameters("float16", "bfloat16")
  def test_16_bits(self, dtype):
    arrays = [x.astype(dtype) for x in operands()]
    mask = masks.selected_blocks(BLOCKS, 4, 4)
    found, wanted = (jax.jit(jax.grad(lambda *x: call(mechanism, mask)(*x)[0].astype(
        jnp.float32).sum(), (0, 1, 2)))(*given) for mechanism, given in (
            ("blockwise", arrays), ("vanilla", [x.astype(jnp.float32) for x in arrays])))
    for x, y in zip(*map(jax.tree.leaves, (found, wanted))):
      self.assertEqual(x.dtype, dtype)
      np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=2e-2, atol=2e-2)


class WorkTest(parameterized.TestCase):

  def test_visited_blocks_grow_with_the_lists(self):
    for queries in (2048, 4096):
      kinds = block_map.block_kinds(masks.selected_blocks(
          lists(queries // 64, 1, 1, queries // 64, 8), 64, 64), block_map.Sizes(
              queries, queries, 64, 64))
      visited = block_map.block_map(kinds).num_visited
      self.assertLessEqual(int(visited.max()), 8)
      self.assertGreater(int(visited.max()), 5)

  @parameterized.parameters("blocks", "keys")
  def test_memory_and_work_grow_with_the_queries_only(self, kind):
    def measured(queries):
      indices = jax.ShapeDtypeStruct(
          (1, 1, queries // 64, 8) if kind == "blocks" else (1, queries, 96), jnp.int32)
      like = jax.ShapeDtypeStruct((1, queries, 2, 16), jnp.float32)
      def loss(query, key, value, indices):
        mask = (masks.selected_blocks(indices, 64, 64) if kind == "blocks"
                else masks.selected_keys(indices))
        return attention(query, key, value, mask=mask, mechanism="flash_attn2"
                         ).attention_outputs.sum()
      compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(like, like, like, indices).compile()
      return compiled.memory_analysis().temp_size_in_bytes
    short, long = measured(2048), measured(16384)
    self.assertLess(long, 64 << 20)
    self.assertLess(long, 8 * short)


class PlacementTest(parameterized.TestCase):

  @parameterized.parameters("flash_attn2", "ring")
  def test_over_devices(self, mechanism):
    axes = (2, 1, 2, 1, 1) if mechanism == "flash_attn2" else (1, 1, 1, 4, 1)
    mesh = create_mesh(axes, ("dp", "fsdp", "tp", "sp", "ep"))
    query, key, value = numbers(2, 16, H, D), numbers(2, 16, K, D, seed=1), numbers(
        2, 16, K, D, seed=2)
    metadata = OperationMetadata(mesh=mesh, ring=RingConfig())
    mask = masks.selected_blocks(lists(4, 2, K, 4, 2, seed=4), 4, 4)
    def loss(query, key, value, mechanism=mechanism, metadata=metadata):
      out = attention(query, key, value, mask=mask, mechanism=mechanism, metadata=metadata
                      ).attention_outputs
      return (out * out).sum(), out
    found = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(query, key, value)
    expected = jax.jit(jax.grad(lambda *x: loss(*x, mechanism="vanilla", metadata=None),
                                (0, 1, 2), has_aux=True))(query, key, value)
    assert_close(found, expected)

  def test_vmap(self):
    arrays = [jnp.stack([x, x[::-1]]) for x in (numbers(2, 16, H, D), numbers(
        2, 16, K, D, seed=1), numbers(2, 16, K, D, seed=2))]
    mask = masks.selected_keys(lists(16, 2, 16, 3, seed=5))
    run = lambda *x: attention(*x, mask=mask, mechanism="blockwise").attention_outputs
    assert_close(jax.vmap(run)(*arrays), jnp.stack([run(*(x[n] for x in arrays))
                                                    for n in range(2)]))

  def test_vmap_over_the_lists(self):
    arrays = numbers(2, 16, H, D), numbers(2, 16, K, D, seed=1), numbers(2, 16, K, D, seed=2)
    many = lists(16, 3, 2, 16, 3, seed=6)
    run = lambda x: attention(*arrays, mask=masks.selected_keys(x),
                              mechanism="blockwise").attention_outputs
    assert_close(jax.vmap(run)(many), jnp.stack([run(x) for x in many]))


# Of the kernels for TPUs: tokens, the lists and their blocks, and other arguments.
ALL_IDS = (np.arange(384) // 130)[None].astype(np.int32)
ON_TPU = {
    "rows_and_heads": (384, lists(3, B, K, 3, 2, seed=7), (128, 128), {}),
    "segments_sinks_dropout": (384, lists(3, B, 1, 3, 2, seed=8), (128, 128), dict(
        mask_info=MaskInfo.from_segments(ALL_IDS, ALL_IDS), softmax_aux=numbers(H, seed=3),
        dropout_prob=0.25, dropout_rng=jax.random.key(3), deterministic=False)),
    "query_heads": (300, lists(2, 1, H, 1, 1, seed=9), (512, 256), {}),
    "blocks_of_several": (640, lists(2, B, 1, 2, 1, seed=10), (512, 384), {}),
    "a_score_mod": (384, lists(3, B, K, 3, 2, seed=11), (128, 128), dict(
        score_mod=score_mods.alibi(np.arange(1, 5) * np.float32(0.1)))),
    "soft_cap": (256, lists(2, 1, 1, 2, 2, seed=12), (128, 128), dict(
        logits_soft_cap=2.0, bias=numbers(1, H, 256, 256, seed=4))),
    # Blocks that are no multiples of 128 tokens.
    "a_list_a_token": (300, lists(5, B, K, 300, 2, seed=15), (1, 64), {}),
    "small_blocks": (256, lists(16, B, 1, 32, 4, seed=16), (8, 16), dict(
        mask_info=MaskInfo.from_segments(ALL_IDS[:, :256], ALL_IDS[:, :256]), dropout_prob=0.25,
        softmax_aux=numbers(H, seed=3), dropout_rng=jax.random.key(3), deterministic=False)),
    "uneven_blocks": (420, lists(5, B, H, 17, 2, seed=17), (26, 96), dict(
        also=masks.selected_blocks(lists(2, 1, K, 2, 1, seed=18), 256, 256))),
    "long_blocks_of_tokens": (400, lists(2, B, K, 400, 1, seed=19), (1, 384), dict(
        score_mod=score_mods.alibi(np.arange(1, 5) * np.float32(0.1)))),
    "keys_of_tokens": (260, lists(260, B, K, 260, 40, seed=20), (1, 1), dict(
        also=masks.window(200, 0))),
    "three_keys": (384, lists(128, 1, 1, 384, 20, seed=22), (1, 3), dict(
        bias=numbers(1, H, 384, 384, seed=4))),  # tiles of 384 keys
    "pairs_of_keys": (256, lists(128, 1, 1, 128, 9, seed=21), (2, 2), {}),
}


class TpuTest(parameterized.TestCase):

  def assert_equal_to_vanilla(self, name, dtype="float32", **arguments):
    """Compares values and all gradients, of lists that are traced."""
    tokens, indices, blocks, given = ON_TPU[name]
    also = given.get("also", masks.full())
    given = {name: x for name, x in given.items() if name != "also"}
    arrays = [x.astype(dtype) for x in (numbers(B, tokens, H, 64), numbers(
        B, tokens, K, 64, seed=1), numbers(B, tokens, K, 64, seed=2))]
    weights = numbers(B, tokens, H, 64, seed=3)
    def gradients(**others):
      def loss(query, key, value, indices):
        mask = masks.selected_blocks(indices, *blocks) & also
        found = attention(query, key, value, mask=mask, causal=True, return_lse=True, **given,
                          **others)
        total = (found.attention_outputs.astype(jnp.float32) * weights).sum()
        return total + jnp.where(jnp.isfinite(found.lse), found.lse, 0).sum(), found[:1]
      run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), compiler_options=sampling.LEAST)
      return run(*arrays, jnp.asarray(indices))
    with interpreted():
      found = jax.block_until_ready(gradients(
          mechanism="flash_attn2", metadata=OperationMetadata(platform="tpu"), **arguments))
    expected = gradients(mechanism="vanilla")
    most = 1e-5 if dtype == "float32" else 2e-2
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=0,
                                 atol=most * max(1, abs(y.astype(jnp.float32)).max()))

  @parameterized.parameters(*sampling.with_slow(
      [("rows_and_heads",)], *((name,) for name in ON_TPU if name != "rows_and_heads")))
  def test_value_and_gradients(self, name):
    self.assert_equal_to_vanilla(name)

  @sampling.slow("selected TPU 16 bits")
  def test_16_bits(self):
    self.assert_equal_to_vanilla("rows_and_heads", "bfloat16")

  @sampling.slow_parameters(*itertools.product(
      ("ranges of queries", "groups of batch rows"), ("rows_and_heads", "a_list_a_token")))
  def test_in_parts(self, parts, name):
    changed = mock.patch.object(tiling, "RESIDENT_BYTES", 1)
    if parts == "groups of batch rows":
      changed = mock.patch.object(scalar_memory, "num_groups", lambda *_, **__: B)
    with changed:
      self.assert_equal_to_vanilla(name)

  @parameterized.parameters(False, True)
  def test_visits_listed_blocks_only(self, by_keys):
    """Each row block has the blocks that its list names and causality shows, in few steps."""
    for tokens in (2048, 8192):
      count = tokens // 256
      indices = lists(count, 1, 3, count, 2, seed=13)
      mask = masks.causal() & fitted(masks.selected_blocks(indices, 256, 256), (
          1, 3, tokens, tokens))
      blocks = schedule.Tiling(tokens, tokens, 256, 256, 256, 256)
      steps, found = schedule.build(mask, blocks, by_keys=by_keys)
      self.assertEqual((found.batches, found.heads), (1, 3))
      self.assertLessEqual(schedule.num_steps(mask, blocks, by_keys=by_keys), 3 * count + 1)
      for head in range(3):
        seen = np.zeros((count, count), int)
        for row, column, kinds, _ in zip(*(np.asarray(x)[head] for x in steps)):
          seen[(column, row) if by_keys else (row, column)] += kinds != 0
        expected = np.zeros((count, count), int)
        for row, column in ((row, column) for row in range(count) for column in indices[
            0, head, row]):
          expected[row, column] = 0 <= column <= row
        np.testing.assert_array_equal(seen, expected)

  @parameterized.parameters((1, 64, 2048), (8, 16, 2048), (96, 160, 1000), (1, 1, 1000),
                            (1, 512, 2048))
  def test_visits_what_a_token_of_a_tile_lists(self, block_q, block_kv, tokens):
    """A step has what any of its queries lists, and says what all of them list; both directions."""
    most = cdiv(tokens, block_kv)
    around = np.random.default_rng(22).integers(0, most, (1, 2, cdiv(tokens, 256), 3))
    indices = np.repeat(around, cdiv(256, block_q), 2)[:, :, :cdiv(tokens, block_q)]
    indices = np.minimum(indices + lists(2, *indices.shape, seed=23), most - 1).astype(np.int32)
    shape = 1, 2, tokens, tokens
    mask = masks.causal() & fitted(masks.selected_blocks(indices, block_q, block_kv), shape)
    seen = np.asarray(dense(mask, shape))[0]
    padded = round_up(tokens, 256)
    seen = np.pad(seen, ((0, 0), (0, padded - tokens), (0, padded - tokens)))
    seen = seen.reshape(2, padded // 256, 256, padded // 256, 256).swapaxes(2, 3)
    blocks = schedule.Tiling(tokens, tokens, 256, 256, 256, 256)
    for by_keys, traced in ((False, False), (True, False), (False, True)):
      given = jax.tree.map(jnp.asarray, mask) if traced else mask
      steps, _ = schedule.build(given, blocks, by_keys=by_keys)
      room = schedule.num_steps(given, blocks, by_keys=by_keys)
      self.assertEqual(steps.rows.shape[1], room)
      for head in range(2):
        kinds = np.zeros((padded // 256, padded // 256), int)
        for row, column, kind, _ in zip(*(np.asarray(x)[head] for x in steps)):
          kinds[(column, row) if by_keys else (row, column)] += kind
        np.testing.assert_array_equal(kinds[kinds == 0], seen[head].any((2, 3))[kinds == 0])
        self.assertTrue(seen[head].all((2, 3))[kinds == block_map.FULL].all())
        # Not exactly: queries of a tile may list what causality hides from them.
        self.assertLessEqual((kinds != 0).sum(), seen[head].any((2, 3)).sum() + padded // 256)

  def test_lists_of_a_shard(self):
    """The lists of rows and heads by their global numbers, where a head's share divides none."""
    indices = lists(4, 3, 2, 4, 2, seed=14)
    mask = masks.causal() & fitted(masks.selected_blocks(indices, 128, 128), (3, 12, 512, 512))
    arrays, structure = jax.tree.flatten(mask)
    query = jnp.zeros((2, 512, 4, 8))
    operands = Operands(query, query, query, mask=MaskOperands(
        tuple(arrays), jnp.array([2, 0]), jnp.array([4])))
    moved, spec = listed.of_local_rows(operands, AttentionSpec(structure, 1.0))
    found = jax.tree.unflatten(spec.mask, moved.mask.arrays).right
    self.assertEqual(found.group, math.gcd(6, 4))
    np.testing.assert_array_equal(found.indices, indices[np.array([[2], [0]]), [[0, 1]]])
    shapes, of_shapes = listed.shapes_of_local_rows(operands, AttentionSpec(structure, 1.0))
    self.assertEqual(of_shapes.mask, spec.mask)
    self.assertEqual(shapes.mask.arrays[0].shape, (2, 2, 4, 2))

  def test_refuses(self):
    like = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    mask = ~masks.selected_blocks(np.zeros((1, 1, 2, 1), np.int32), 128, 128)
    for chips, metadata in (("Hopper", HOPPER), ("TPUs", OperationMetadata(platform="tpu"))):
      text = str(explain(like, like, like, mask=mask, metadata=metadata))
      self.assertIn(f"under `|`, `~` or masks.placed: the kernels for {chips}", text)
      self.assertRegex(text, "blockwise.*can, by flash.xla")

  def test_refuses_blocks_that_divide_no_listed_one(self):
    array = numbers(1, 512, 2, 64)
    with self.assertRaisesRegex(ValueError, r"block_kv: got 384; with a mask that lists blocks "
                                r"expected a multiple of 128 that divides 256 tokens"):
      attention(array, array, array, mechanism="flash_attn2", block_sizes=BlockSizes(block_kv=384),
                metadata=OperationMetadata(platform="tpu"),
                mask=masks.selected_blocks(np.zeros((1, 1, 2, 1), np.int32), 256, 256))


class HopperTest(parameterized.TestCase):
  """Its kernels are interpreted in gpu_backward_test."""

  @parameterized.parameters(False, True)
  def test_visits_listed_blocks_only(self, by_keys):
    mask = masks.causal() & fitted(masks.selected_blocks(
        lists(8, 2, 3, 8, 2, seed=13), 256, 256), (2, 6, 2048, 2048))
    arrays, structure = jax.tree.flatten(mask)
    query, key = (jax.ShapeDtypeStruct((2, 2048, heads, 64), jnp.bfloat16) for heads in (6, 3))
    spec = AttentionSpec(structure, 1.0)
    seen = dense(mask, (2, 6, 2048, 2048)).reshape(2, 6, 16, 128, 16, 128).any((3, 5))
    for indices in (arrays[0], jnp.asarray(arrays[0])):
      operands = Operands(query, key, key, mask=MaskOperands((indices,)))
      blocks = gpu_tiling.Tiling(2048, 2048, 128, 128, 2, 64, 64)
      params, found, _ = kernel_params.make_kernel_params(operands, spec, blocks, by_keys)
      self.assertEqual(jax.tree.unflatten(params.loader.spec.mask, ()), masks.causal())
      expected = seen.swapaxes(2, 3) if by_keys else seen
      np.testing.assert_array_equal(found.num_visited, expected.sum(-1))
      if not by_keys:
        self.assertLessEqual(found.indices.shape[3], 4)
      for at in np.ndindex(2, 6, 16):
        visited = np.asarray(found.indices[at])[:found.num_visited[at]]
        np.testing.assert_array_equal(np.sort(visited), np.flatnonzero(expected[at]))

  @parameterized.parameters((1, 1, 300), (1, 64, 300), (26, 96, 420), (8, 2, 300))
  def test_reads_what_small_blocks_list(self, block_q, block_kv, tokens):
    """Visited tiles and the bits of their pairs, of each direction and of traced lists."""
    shape = 2, 6, tokens, tokens
    mask = masks.causal() & fitted(masks.selected_blocks(
        lists(cdiv(tokens, block_kv), 2, 3, cdiv(tokens, block_q), 5, seed=24), block_q, block_kv),
                                   shape)
    arrays, structure = jax.tree.flatten(mask)
    query, key = (jax.ShapeDtypeStruct((2, tokens, heads, 64), jnp.bfloat16) for heads in (6, 3))
    expected = dense(mask, shape)
    for by_keys, indices in ((False, arrays[0]), (True, jnp.asarray(arrays[0]))):
      operands = Operands(query, key, key, mask=MaskOperands((indices,)))
      blocks = gpu_tiling.Tiling(tokens, tokens, 128, 128, 2, 64, 64)
      params, found, inputs = kernel_params.make_kernel_params(
          operands, AttentionSpec(structure, 1.0), blocks, by_keys)
      bits, = params.loader.lists
      words = np.repeat(np.asarray(inputs.lists[0]), bits.group, 1)[..., :tokens]
      pairs = words[:, :, :, None] >> np.arange(32)[:, None] & 1
      pairs = np.repeat(pairs.reshape(2, 6, -1, tokens), bits.size, 2)[:, :, :tokens] == 1
      self.assertEqual(bits.by_key, by_keys and block_kv == 1)
      pairs = pairs if bits.by_key else pairs.swapaxes(2, 3)  # [.., queries, keys]
      np.testing.assert_array_equal(pairs & np.tri(tokens, dtype=bool), expected)
      padded = np.pad(expected, ((0, 0), (0, 0), *[(0, -tokens % 128)] * 2))
      tiles = padded.reshape(2, 6, padded.shape[2] // 128, 128, -1, 128)
      seen, full = tiles.any((3, 5)), tiles.all((3, 5))
      for at in np.ndindex(2, 6, seen.shape[2]):
        row = lambda x, at=at: (x.swapaxes(2, 3) if by_keys else x)[at]
        visited = np.asarray(found.indices[at])[:found.num_visited[at]]
        self.assertLessEqual(set(np.flatnonzero(row(seen))), set(visited))
        self.assertLessEqual(set(visited[:found.num_full[at]]), set(np.flatnonzero(row(full))))

  @parameterized.named_parameters(
      ("blocks", masks.selected_blocks(np.zeros((1, 1, 4, 1), np.int32), 128, 128)),
      ("keys", masks.selected_keys(np.zeros((1, 512, 1), np.int32))))
  def test_whole_calls_run_the_kernel(self, mask):
    array = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    def run(x):
      return attention(x, x, x, causal=True, metadata=HOPPER, mask=mask).attention_outputs
    for function in (run, jax.grad(lambda x: run(x).astype(jnp.float32).sum())):
      self.assertIn("gpu", str(jax.make_jaxpr(function)(array)))

  def test_refuses_blocks_that_divide_no_listed_one(self):
    """Refuses them by name, but for sequences shorter than a listed block."""
    def said(length, **sizes):
      x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
      return str(explain(
          x, x, x, block_sizes=BlockSizes(**sizes), metadata=HOPPER,
          mask=masks.selected_blocks(np.zeros((1, 1, -(-length // 128), 1), np.int32), 128, 128)))
    for field in ("block_q", "block_kv"):
      self.assertRegex(said(512, **{field: 256}), (
          f"(?s)^blockwise runs.*flash_attn2 *block_sizes.{field}=256 with [^\n]*selected_keys of "
          f"{field}=128: the kernels for Hopper [^\n]*; give a divisor of 128, or None\n"))
      for length, size in ((512, 128), (100, 256)):
        self.assertIn("can, by flash.gpu", said(length, **{field: size}))

  def test_refuses_bits_of_no_power_of_two(self):
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    said = lambda size: str(explain(
        x, x, x, block_sizes=BlockSizes(block_kv=size), metadata=HOPPER,
        mask=masks.selected_keys(np.zeros((1, 512, 1), np.int32))))
    self.assertRegex(said(192), r"(?s)^blockwise runs.*flash_attn2 *block_sizes.block_kv=192 with "
                     r"[^\n]*a power of two of keys; give 64, 128, 256 or None\n")
    self.assertIn("can, by flash.gpu", said(256))


class ErrorsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("float", lambda: masks.selected_keys(np.zeros((1, 4, 2))),
       r"selected_keys: indices have dtype float64 and shape \(1, 4, 2\); expected int32"),
      ("rank", lambda: masks.selected_blocks(np.zeros((1, 4, 2), int), 2, 2),
       r"selected_blocks: indices .*shape \(1, 4, 2\); expected int32 .*num_query_blocks"),
      ("rank_of_keys", lambda: masks.selected_keys(np.zeros((4, 2), int)),
       r"selected_keys: .*shape \(4, 2\); expected int32 \[B or 1, T, k\]"),
      ("negative", lambda: masks.selected_keys(np.full((1, 4, 2), -2)),
       "selected_keys: indices: got the number -2; expected .*-1 for no key"),
      ("no_entry", lambda: masks.selected_keys(np.zeros((1, 4, 0), int)), "k >= 1"),
      ("block", lambda: masks.selected_blocks(np.zeros((1, 1, 4, 2), int), 0, 2),
       "selected_blocks: block_q.*0.*expected an int >= 1"),
      ("not_an_array", lambda: masks.selected_keys("all"), "selected_keys: indices: got str"))
  def test_bad_arguments(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()

  @parameterized.named_parameters(
      ("too_high", lists(3, 2, T, 4) + S, r"got the number 2\d; expected numbers below 26"),
      ("rows", lists(3, 3, T, 4), r"got int32\[3, 1, 22, 4\].*B = 2"),
      ("heads", lists(3, 2, 3, T, 4), r"got int32\[2, 3, 22, 4\].*a divisor of the 4 query heads"),
      ("queries", lists(3, 2, T - 1, 4), r"got int32\[2, 1, 21, 4\].*22 blocks of 1 for 22"))
  def test_lists_that_do_not_fit_a_call(self, indices, message):
    with self.assertRaisesRegex(ValueError, f"mask: indices of selected blocks or keys: {message}"):
      call("auto", masks.selected_keys(indices))(*operands())

  @parameterized.parameters("tpu", "gpu")
  def test_kernels_that_do_not_follow_lists_name_one_that_does(self, platform):
    args = [jax.ShapeDtypeStruct((2, 16, n, 64), jnp.bfloat16) for n in (H, K, K)]
    text = str(explain(*args, mask=masks.selected_keys(lists(16, 2, 16, 3)),
                       metadata=OperationMetadata(platform=platform)))
    self.assertIn("masks.selected_blocks or masks.selected_keys (a mask by indices of blocks or "
                  "keys) is not supported", text)
    self.assertRegex(text, "blockwise.*can, by flash.xla")

  def test_window_cache(self):
    cache = window.init(2, 8, (K, D), dtype=jnp.float32)
    with self.assertRaisesRegex(ValueError, "mask: got Selected with a WindowCache"):
      attention(numbers(2, 1, H, D), numbers(2, 1, K, D), numbers(2, 1, K, D),
                cache_view=cache, cache_metadata=CacheMetadata(), causal=True,
                mask=masks.selected_keys(lists(8, 2, 1, 3)))


if __name__ == "__main__":
  absltest.main()
