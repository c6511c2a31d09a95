# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The grid of the TPU flash kernels: its steps, and the scalar memory that they take."""

import functools
import itertools
import re
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import BlockSizes, MaskInfo, attention, masks
from attn_core.benchmark.static import profile as static_profile
from attn_core.kernels.common.contract import RemoteCopy
from attn_core.kernels.tpu.flash import (
    backward, call, forward, forward_step, patterns, scalar_memory, schedule, step_list, tile_loop,
    tiling)
from attn_core.masks import block_map, materialize, tile
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling
from attn_core_test.tpu_cases import BLOCKS, TPU, Case
from attn_core_test.tpu_interpret import interpreted

# One document, 16 documents, and only padding.
PACKED = np.stack([np.zeros(400), np.arange(400) // 25, np.full(400, -1)]).astype(np.int32)
STATIC = {"window": masks.window(300, 0), "full": masks.full(),
          "offset": masks.offset(masks.causal(), -200)}
MANY_PATTERNS = ~masks.window(100, 30)
PACKED_CASE = Case(dict(mask_info=MaskInfo.from_segments(PACKED)),
                   masks.causal() & masks.segments(PACKED), B=3, T=400, H=2, K=1, D=8)


def listed(mask, sizes, by_keys, batch=1):
  """Returns (row, column, flags) of the steps of each batch row, by a plain loop."""
  visible = np.zeros((batch, sizes.padded_queries, sizes.padded_keys), bool)
  visible[:, :sizes.query_length, :sizes.key_length] = materialize.to_dense(
      mask, (batch, 1, sizes.query_length, sizes.key_length))[:, 0]
  blocks = visible.reshape(batch, sizes.query_blocks, sizes.block_q, sizes.key_blocks,
                           sizes.block_kv).any((2, 4))
  blocks = blocks.swapaxes(1, 2) if by_keys else blocks
  size = sizes.blocks_of_range if by_keys else blocks.shape[2]
  return [_listed_of_row(x, range(0, blocks.shape[2], size), size) for x in blocks]


def _listed_of_row(blocks, starts, size):
  """Returns (row, column, flags) of the steps of bool [row blocks, column blocks], by ranges."""
  found, seen = [], set()
  for start in starts:
    before = len(found)
    for row, visible in enumerate(blocks):
      columns = start + np.flatnonzero(visible[start:start + size])
      if not len(columns) and (start == 0 and not visible.any() or
                               row == 0 and not blocks[:, start:start + size].any()):
        columns = [start]
      for n, column in enumerate(columns):
        flags = (step_list.FIRST * (n == 0) + step_list.LAST * (n == len(columns) - 1)
                 + step_list.NEW * (row not in seen))
        found.append([row, int(column), flags])
      seen |= {row} if len(columns) else set()
    found[before][2] += step_list.BEGIN
    found[-1][2] += step_list.END
  return [tuple(x) for x in found]


class ListTest(parameterized.TestCase):

  @parameterized.product(
      mask=(masks.full(), masks.causal(), masks.window(300, 10), ~masks.window(200, 200),
            masks.offset(masks.causal(), -700), masks.offset(masks.causal(), 700)),
      ranges=((False, 0), (True, 0), (True, 1), (True, 2), (True, 3)))
  def test_steps_are_the_visible_blocks_in_order(self, mask, ranges):
    by_keys, range_blocks = ranges
    sizes = schedule.Tiling(1100, 900, 256, 128, 128, 128, range_blocks=range_blocks)
    steps, lists = schedule.build(mask, sizes, by_keys=by_keys)
    expected, = listed(mask, sizes, by_keys)
    self.assertEqual(list(zip(steps.rows[0], steps.columns[0], steps.flags[0])), expected)
    self.assertEqual(lists, (1, 1, len(expected), 1))
    self.assertEqual(schedule.num_steps(mask, sizes, by_keys=by_keys), len(expected))

  @parameterized.product(make=(masks.causal, lambda: masks.window(300, 10)), traced=(False, True))
  def test_descending_steps_are_the_same_from_last_to_first(self, make, traced):
    sizes = schedule.Tiling(1100, 900, 256, 128, 128, 128)
    ids = np.zeros((1, 1100), np.int32)
    def build(ids, descending):
      mask = make() & masks.segments(ids, ids[:, :900]) if traced else make()
      return schedule.build(mask, sizes, by_keys=False, descending=descending)[0]
    run = jax.jit(build, static_argnums=1) if traced else build
    steps, reversed_steps = (
        [x for x in zip(*(y[0].tolist() for y in run(ids, descending))) if x[3]]
        for descending in (False, True))
    key = lambda step: (step[0], -step[1])
    columns_and_kinds = [x[:3] for x in sorted(steps, key=key)]
    self.assertNotEqual(columns_and_kinds, [x[:3] for x in steps])
    self.assertEqual([x[:3] for x in reversed_steps], columns_and_kinds)
    self.assertEqual([x[3] for x in reversed_steps], [x[3] for x in steps])

  @parameterized.product(range_blocks=(1, 2, 3), compares=(False, True))
  def test_ranges_of_traced_masks(self, range_blocks, compares):
    """Checks lists of batch rows that see all blocks, some, and none."""
    if not compares:
      self.enter_context(mock.patch.object(step_list, "MOST_COMPARED", 0))
    sizes = schedule.Tiling(400, 400, 128, 128, 128, 128, range_blocks=range_blocks)
    make = lambda ids: masks.causal() & masks.segments(ids)
    steps, lists = jax.jit(lambda ids: schedule.build(make(ids), sizes, by_keys=True))(PACKED)
    expected = listed(make(PACKED), sizes, True, batch=3)
    self.assertEqual(lists, (3, 1, max(map(len, expected)), 1))
    for b, blocks in enumerate(expected):
      found = list(zip(*(x[b].tolist() for x in (steps.rows, steps.columns, steps.flags))))
      self.assertEqual(found[:len(blocks)], blocks)
      idle = len(found) - len(blocks)
      self.assertEqual(found[len(blocks):], [(*blocks[-1][:2], 0)] * idle)
      self.assertTrue((steps.kinds[b, len(blocks):] == 0).all())

  @parameterized.product(mask=(masks.full(), masks.causal(), masks.window(300, 10)),
                         traced=(False, True))
  def test_halves_have_all_steps(self, mask, traced):
    """Checks that lists of half of the query blocks are as long, where a mask is causal or full."""
    sizes = schedule.Tiling(1000, 900, 128, 128, 128, 128)
    make = lambda ids: mask & masks.segments(ids) if traced else mask
    build = lambda ids, halves: schedule.build(make(ids), sizes._replace(halves=halves),
                                               by_keys=False)
    ids = np.zeros((2 if traced else 1, 1000), np.int32)
    run = jax.jit(build, static_argnums=1) if traced else build
    (one, _), (two, lists) = (run(ids, halves) for halves in (1, 2))
    self.assertEqual(lists.halves, 2)
    steps = lambda found, n: [x for x in zip(*(x[n].tolist() for x in found)) if x[3]]
    without_ends = lambda found: [(*x[:3], x[3] & 7) for x in found]
    for n in range(len(ids)):
      self.assertEqual([int(x) for b in range(2) for x in [lists.list_of(n, 0, b)]],
                       [2 * n * (len(ids) > 1), 2 * n * (len(ids) > 1) + 1])
      halves = [steps(two, 2 * n + half) for half in range(2)]
      self.assertEqual(sorted(without_ends(halves[0] + halves[1])),
                       sorted(without_ends(steps(one, n))))
      self.assertEqual([{row for row, *_ in half} for half in halves], [{0, 3, 4, 7}, {1, 2, 5, 6}])
      self.assertAlmostEqual(len(halves[0]), len(halves[1]), delta=1)
    self.assertEqual(schedule.num_steps(make(ids), sizes._replace(halves=2), by_keys=False),
                     two.rows.shape[1])

  @parameterized.product(by_keys=(False, True), compares=(False, True))
  def test_steps_of_traced_masks_end_with_the_longest_list(self, by_keys, compares):
    if not compares:
      self.enter_context(mock.patch.object(step_list, "MOST_COMPARED", 0))
    sizes = schedule.Tiling(400, 400, 128, 128, 128, 128)
    make = lambda ids: masks.causal() & masks.segments(ids)
    steps, lists = jax.jit(lambda ids: schedule.build(make(ids), sizes, by_keys=by_keys))(PACKED)
    expected = listed(make(PACKED), sizes, by_keys, batch=3)
    self.assertEqual([len(x) for x in expected], [10, 7, 4])
    self.assertEqual(lists, (3, 1, 10, 1))
    self.assertEqual(schedule.num_steps(make(PACKED), sizes, by_keys=by_keys), 10)  # of 16 blocks
    self.assertEqual(schedule.num_lists(make(PACKED), sizes), (3, 1))
    for b, blocks in enumerate(expected):
      # The rest repeats the last blocks, without visible tiles.
      idle = 10 - len(blocks)
      self.assertEqual(list(zip(steps.rows[b], steps.columns[b], steps.flags[b])),
                       blocks + [(*blocks[-1][:2], 0)] * idle)
      np.testing.assert_array_equal(steps.kinds[b, len(blocks):], 0)
      self.assertEqual((steps.kinds[b] != 0).sum(), len(blocks) if b < 2 else 0)

  @parameterized.product(by_keys=(False, True), documents=(1, 3, 16, 100))
  def test_kinds_of_tiles_that_a_traced_mask_cuts(self, by_keys, documents):
    """Only arrays can hide a pair of a CUT tile; forward blocks with many may be rounded."""
    sizes = schedule.Tiling(2048, 2048, 512, 512, 128, 128)
    ids = np.sort(np.arange(2048) * documents // 2048).astype(np.int32)[None]
    mask = masks.causal() & masks.segments(ids)
    found = []
    def build(ids):
      mask = masks.causal() & masks.segments(ids)
      steps, _ = schedule.build(mask, sizes, by_keys=by_keys)
      found.append(patterns.choose(steps, mask, sizes, by_keys=by_keys).kinds)
      return steps
    traced = jax.jit(build)(ids)
    exact, _ = schedule.build(mask, sizes, by_keys=by_keys)
    kinds = lambda steps: (np.asarray(steps.kinds)[0].view(np.uint32)[:, None]
                           >> (2 * np.arange(16, dtype=np.uint32))) & 3
    steps = len(exact.kinds[0])
    new, old = kinds(traced)[:steps], kinds(exact)
    static = schedule.static_tiles(mask, sizes, by_keys)[exact.rows[0], exact.columns[0]]
    cut = lambda tiles: np.where((tiles == block_map.PARTIAL) & (static == block_map.FULL),
                                 schedule.CUT, tiles)
    uncut = (old == static).all(-1)
    visible = (old != block_map.EMPTY).sum(-1)
    rounded = (exact.rows[0] == exact.columns[0]) & ~uncut & (not by_keys) & (
        visible * schedule.TILES_FOR_BRANCH >= 10)  # that causal shows there
    expected = np.where(rounded[:, None], cut(np.minimum(static, block_map.PARTIAL)), cut(old))
    np.testing.assert_array_equal(new, expected)
    in_pattern = np.isin(np.asarray(traced.kinds)[0].view(np.uint32)[:steps], found[0])
    np.testing.assert_array_equal(in_pattern, uncut | rounded)

  @parameterized.parameters(False, True)
  def test_patterns_of_traced_masks_include_all_static_ones(self, by_keys):
    """Checks a mask whose static blocks differ in FULL tiles only, so that few are partial."""
    sizes = schedule.Tiling(2048, 2048, 256, 256, 128, 128)
    static, found = masks.window(520, 60), []
    def build(ids):
      mask = static & masks.segments(ids)
      steps, _ = schedule.build(mask, sizes, by_keys=by_keys)
      found.append(patterns.choose(steps, mask, sizes, by_keys=by_keys))
    jax.eval_shape(build, np.zeros((1, 2048), np.int32))
    steps, _ = schedule.build(static, sizes, by_keys=by_keys)
    expected = patterns.choose(steps, static, sizes, by_keys=by_keys)
    self.assertTrue(expected.complete)
    self.assertLessEqual(set(expected.kinds), set(found[0].kinds))

  @parameterized.product(static=(masks.causal(), masks.window(600, 200), masks.full()),
                         by_keys=(False, True), lists=(False, True))
  def test_other_parts_of_a_mask_hide_no_pair_of_such_tiles(self, static, by_keys, lists):
    """Checks all blocks of a pattern; those of a window may have that of another one by chance."""
    sizes = schedule.Tiling(1024, 1024, 256, 256, 128, 128)
    parts = tile.parts(static & masks.segments(np.zeros((1, 1024), np.int32)))
    whole = [schedule.static_tiles(part, sizes, by_keys) == block_map.FULL for part in parts[:-1]]
    found, unread = [], 0
    def build(ids):
      # Lists of the block of 64 keys whose number is an id.
      mask = static & (masks.selected_blocks(ids[:, None, :, None] % 16, 1, 64) if lists
                       else masks.segments(ids))
      steps, _ = schedule.build(mask, sizes, by_keys=by_keys)
      found.append(patterns.choose(steps, mask, sizes, by_keys=by_keys))
      return steps
    run = jax.jit(build)
    for size in (100,) if lists else (10, 100, 150, 400):
      steps = run((np.arange(1024) // size)[None].astype(np.int32))
      for row, column, bits in zip(*(np.asarray(x[0]) for x in steps[:3])):
        if bits in found[0].kinds:
          kinds = int(np.uint32(bits))
          # In tiles that nothing hides, or that are hidden, no part of a mask is left out.
          which = np.array([found[0].evaluated(kinds, n) >> 1 if kinds >> 2 * n & 1 else -1
                            for n in range(4)])
          self.assertTrue(lists or (which >> len(whole) & 1).all())
          for number, of_part in enumerate(whole):
            shown = which >> number & 1 == 0
            self.assertTrue(of_part[row, column][shown].all())
            unread += shown.sum()
    if not by_keys and not lists:  # there, blocks that arrays cut have no pattern
      self.assertEqual(bool(unread), static != masks.full())

  @parameterized.product(
      mask=(masks.causal() & masks.window(300, 0), masks.window(600, 200),
            masks.offset(masks.window(100, 50) & masks.causal(), 300),
            masks.causal() & masks.chunk(300) & masks.window(None, 9)), by_keys=(False, True))
  def test_parts_that_a_tile_does_not_evaluate_show_it_whole(self, mask, by_keys):
    sizes = schedule.Tiling(1024, 1024, 256, 256, 128, 128)
    steps, _ = schedule.build(mask, sizes, by_keys=by_keys)
    found = patterns.choose(steps, mask, sizes, by_keys=by_keys)
    parts = tile.parts(mask)
    whole = [schedule.static_tiles(part, sizes, by_keys) == block_map.FULL for part in parts]
    skipped = 0
    for row, column, bits in zip(*(x[0] for x in steps[:3])):
      for n in range(4):
        which = found.evaluated(int(np.uint32(bits)), n) >> 1
        if bits >> 2 * n & 3 == block_map.PARTIAL:
          hidden = [number for number in range(len(parts)) if not which >> number & 1]
          self.assertTrue(all(whole[number][row, column, n] for number in hidden))
          skipped += len(hidden)
    self.assertGreater(skipped, 0)
    dense = lambda mask: materialize.to_dense(mask, (1, 1, 1024, 1024))
    np.testing.assert_array_equal(dense(functools.reduce(lambda x, y: x & y, parts)), dense(mask))

  @parameterized.parameters(1, 2, 3)
  def test_what_is_evaluated_in_a_strip(self, width):
    """Compares all combinations of kinds of tiles with what hides a pair of them."""
    for kinds in itertools.product(range(4), repeat=width):
      bits = sum(kind << 2 * n for n, kind in enumerate(kinds)) | 1 << 2 * width
      found = tile_loop._strip_kinds(np.int32(bits), width)
      visible = set(kinds) != {block_map.EMPTY}
      # A hidden tile in a visible strip may be hidden by any part of the mask.
      by_arrays = 0b101
      expected = (None if not visible else patterns.UNMASKED if set(kinds) == {block_map.FULL} else
                  by_arrays if set(kinds) <= {block_map.FULL, schedule.CUT} else patterns.MASKED)
      self.assertEqual(bool(found.any), visible)
      for case in (patterns.UNMASKED, by_arrays, patterns.MASKED):
        self.assertEqual(bool(found.is_case(case)), case == expected, (kinds, case))

  def test_lists_of_blocks_have_strips_of_one_tile(self):
    """The mask would show the hidden tile of a strip."""
    sizes = schedule.Tiling(1024, 1024, 512, 512, 128, 128)
    for mask, width in ((masks.causal(), 2), (masks.selected_blocks(
        np.zeros((1, 1, 8, 1), np.int32), 128, 128), 1)):
      steps, _ = schedule.build(mask, sizes, by_keys=False)
      self.assertEqual(patterns.choose(steps, mask, sizes, by_keys=False).strip_tiles, width)

  @parameterized.product(columns=(1, 2, 3, 4, 5, 1000), tiles=(1, 2, 4, 5, 16))
  def test_packing_keeps_everything(self, columns, tiles):
    rng = np.random.default_rng(columns)
    numbers = lambda most: rng.integers(0, most, (3, 40), np.int32)
    sizes = step_list.WordSizes(700, columns, tiles)
    self.assertEqual(sizes.words, 1 if 4 ** tiles * columns * 700 * 32 < 2**31 else 2)
    steps = step_list.Schedule(numbers(700), numbers(columns), numbers(min(4**tiles, 2**31 - 1)),
                               numbers(32))
    packed = step_list.PackedSchedule.pack(steps, sizes)
    self.assertLen([x for x in packed if x is not None], sizes.words)
    for x, y in zip(packed.step(np.arange(120), sizes), steps, strict=True):
      np.testing.assert_array_equal(np.broadcast_to(x, 120), y.reshape(-1))

  @parameterized.parameters(False, True)
  def test_all_kinds_have_code_where_patterns_are_complete(self, by_keys):
    sizes = schedule.Tiling(600, 600, 256, 256, 128, 128)
    for mask, complete in ((MANY_PATTERNS, False), (masks.causal(), True), (masks.full(), True)):
      steps, _ = schedule.build(mask, sizes, by_keys=by_keys)
      kinds = set(np.unique(steps.kinds.view(np.uint32)).tolist()) - {0}
      found = patterns.choose(steps, mask, sizes, by_keys=by_keys)
      self.assertEqual(found.complete, complete)
      self.assertEqual(kinds <= set(found.kinds), complete)


class InterpretedTest(parameterized.TestCase):
  """Kernels in interpret mode, against the oracle."""

  def compare(self, case, num_groups=scalar_memory.num_groups):
    """Compares values and gradients; returns (grid steps, steps with a body) of both kernels."""
    counts, original = {}, tile_loop.for_each_block
    def counting(name):
      def for_each_block(params, grid, kinds, compute, otherwise):
        count = lambda what: jax.debug.callback(
            lambda: counts.__setitem__((name, what), counts.get((name, what), 0) + 1))
        def counted(body):
          def run_body(*strips):
            count("bodies")
            body(*strips)
          return run_body
        count("steps")
        original(params, grid, kinds, counted(compute), counted(otherwise))
      return for_each_block

    def everything(run):
      def loss(arrays):
        out, lse = run(arrays)
        return (jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()), (out, lse)
      return jax.jit(jax.grad(loss, has_aux=True))

    arrays = case.arrays()
    expected = everything(case.oracle)(arrays)
    with (interpreted(), mock.patch.object(scalar_memory, "num_groups", num_groups),
          mock.patch.object(tile_loop, "for_each_block", counting("forward")),
          mock.patch.object(backward, "for_each_block", counting("backward"))):
      found = jax.block_until_ready(everything(case.call)(arrays))
      jax.effects_barrier()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1, np.abs(y[np.isfinite(y)]).max()))
    return [(counts[name, "steps"], counts[name, "bodies"]) for name in ("forward", "backward")]

  def test_steps_without_visible_tiles_run_nothing(self):
    """Checks that the grid is as long as the longest list, and that its idle steps have no body."""
    counts = self.compare(PACKED_CASE)
    # 10 steps of each of 3 rows; 10, 7 and 4 blocks are listed, the 4 of padding without a tile.
    self.assertEqual(counts, [(30, 17), (30, 17)])

  def documents(self, number, tokens, block, dtype="bfloat16", static=masks.causal(), floats=()):
    """Compares random documents, with padding, in blocks of tiles of 128 tokens.

    Args:
      number, tokens: of documents.
      block: tokens of a block.
      dtype: of the operands.
      static: the mask without the documents.
      floats: items of `Case.floats`.
    """
    for name in ("SMALL_BLOCKS", "BLOCKS"):
      self.enter_context(mock.patch.object(
          tiling, name, dict.fromkeys(getattr(tiling, name), (block, block, 128))))
    rng = np.random.default_rng(number)
    cuts = np.sort(rng.choice(np.arange(1, tokens), number - 1, replace=False))
    ids = np.searchsorted(cuts, np.arange(tokens), side="right")[None].astype(np.int32)
    ids[:, -10:] = -1
    mask = static & masks.segments(ids)
    case = Case(dict(mask=mask, causal=False), mask, T=tokens, H=2, D=8, blocks=None, dtype=dtype,
                floats=dict(floats))
    arrays = case.arrays()
    def loss(run, arrays):
      out, lse = run({name: x.astype(dtype) if name in ("query", "key", "value") else x
                      for name, x in arrays.items()})
      out, seen = out.astype(jnp.float32), jnp.isfinite(lse)
      return jnp.sin(out).sum() + jnp.where(seen, lse, 0).sum(), (out, lse)
    both = lambda run: jax.jit(jax.grad(lambda x: loss(run, x), has_aux=True))(arrays)
    expected = both(lambda x: case.oracle(x))
    with interpreted():
      found = both(case.call)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
      tolerance = 2e-5 if dtype == "float32" else 2e-2
      np.testing.assert_allclose(x, y, rtol=0,
                                 atol=tolerance * max(1, np.abs(y[np.isfinite(y)]).max()))

  @parameterized.parameters((True, {1}, {1, 2}), (False, {2}, {2}))
  def test_code_of_traced_masks_is_written_for_one_head(self, traced, safe, of_backward):
    """Checks blocks of a pattern: the safe softmax and the backward. Others loop over strips.

    A block has one tile, so that it has as many strips as its code has heads.
    """
    for name in ("BLOCKS", "GROUPED_ROWS"):
      size = (256, 256, 256) if name == "BLOCKS" else 256
      self.enter_context(mock.patch.object(
          tiling, name, dict.fromkeys(getattr(tiling, name), size)))
    mask = masks.causal()
    if traced:
      mask = mask & masks.segments(np.zeros((1, 512), np.int32))
    case = Case(dict(mask=mask, causal=False), mask, T=512, H=2, D=8, blocks=None, dtype="bfloat16")
    found = set(), set()
    fold, issue = forward_step.ForwardStep.fold_block, backward.issue_ahead
    def fold_block(step, strips):
      if step.form.safe and not step.form.shielded:
        found[0].add(len(strips))
      return fold(step, strips)
    def issue_ahead(strips, *arguments):
      found[1].add(len(strips))
      return issue(strips, *arguments)
    loss = lambda arrays: case.call(arrays)[0].astype(jnp.float32).sum()
    with (mock.patch.object(forward_step.ForwardStep, "fold_block", fold_block),
          mock.patch.object(backward, "issue_ahead", issue_ahead), interpreted()):
      jax.jit(jax.grad(loss)).lower(case.arrays())
    self.assertEqual(found, (safe, of_backward))

  def test_documents_cut_blocks(self):
    self.documents(4, 500, 256, "float32")

  @sampling.slow_parameters(*itertools.product((2, 5, 60), ("bfloat16", "float32")))
  def test_any_documents(self, number, dtype):
    self.documents(number, 1000, 512, dtype)

  @sampling.slow_parameters(*itertools.product(STATIC, (False, True)))
  def test_any_documents_and_static_masks(self, name, has_sinks):
    self.documents(6, 1000, 512, static=STATIC[name],
                   floats=(("softmax_aux", (2,)),) if has_sinks else ())

  @sampling.slow("TPU kernels by groups of batch rows")
  def test_groups_of_batch_rows(self):
    """Checks the grid of each group, and that dropout depends on the row's number."""
    counts = self.compare(
        PACKED_CASE._replace(
            arguments=dict(dropout_prob=0.3, dropout_rng=np.array([3, 4], np.uint32),
                           deterministic=False, **PACKED_CASE.arguments),
            floats={"softmax_aux": (2,)}), lambda *arguments, **keywords: 3)
    # In the forward the 7 blocks are halves of 3 and 4, which take 4 steps each.
    self.assertEqual(counts, [(10 + 8 + 4, 17), (10 + 7 + 4, 17)])

  @sampling.slow("TPU kernels with more tile patterns than have code")
  def test_more_patterns_than_have_code(self):
    """Compares a static mask with more tile patterns than MOST_PATTERNS."""
    mask = MANY_PATTERNS
    sizes = schedule.Tiling(600, 600, 256, 256, 128, 128)
    for by_keys in (False, True):
      steps, _ = schedule.build(mask, sizes, by_keys=by_keys)
      found = patterns.choose(steps, mask, sizes, by_keys=by_keys)
      self.assertEqual((len(found.kinds), found.complete), (patterns.MOST_PATTERNS, False))
    self.enter_context(mock.patch.object(
        tiling, "SMALL_BLOCKS", dict.fromkeys((False, True), (256, 256, 128))))
    counts = self.compare(Case(dict(mask=mask, causal=False), mask, T=600, H=1, D=8, blocks=None))
    self.assertEqual(counts, [(9, 9)] * 2)


def operands_of(batch, tokens, heads, key_heads, dtype="bfloat16", width=128, kind="packed"):
  """Returns (operands, spec) of a call without values."""
  shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, dtype)
  query, key = (shape(batch, tokens, n, width) for n in (heads, key_heads))
  ids, ends = shape(batch, tokens, dtype="int32"), shape(batch, dtype="int32")
  mask = masks.causal() & jax.eval_shape(*{
      "packed": (masks.segments, ids), "lengths": (masks.lengths, ends, ends),
      "causal": (masks.full,)}[kind])
  arrays, structure = jax.tree.flatten(mask)
  return Operands(query, key, key, mask=MaskOperands(tuple(arrays))), AttentionSpec(structure, 1.0)


class ScalarMemoryTest(parameterized.TestCase):

  @parameterized.parameters("packed", "lengths", "causal")
  def test_chosen_blocks_fit(self, kind):
    sizes = ((1, 131072), (8, 32768), (8, 131072), (512, 197), (2**16, 128))
    dtypes = itertools.cycle((("bfloat16", 64), ("float32", 256), ("bfloat16", 128)))
    for (batch, tokens), heads in itertools.product(sizes, ((32, 32), (32, 8), (32, 1))):
      operands, spec = operands_of(batch, tokens, *heads, *next(dtypes), kind)
      for is_backward in (False, True):
        chosen = tiling.make_tiling(operands, spec, BlockSizes(), backward=is_backward)
        groups = scalar_memory.num_groups(operands, spec, chosen, by_keys=is_backward)
        self.assertEqual(batch % groups, 0)
        tiling.vmem_limit(BlockSizes(), chosen, operands, backward=is_backward)

  def test_every_array_is_counted(self):
    """Compares the size with that of the arrays that a forward puts there."""
    operands, spec = operands_of(3, 1000, 4, 2, kind="lengths")
    shape = lambda *sizes, dtype="int32": jax.ShapeDtypeStruct(sizes, dtype)
    operands = operands._replace(
        sinks=shape(3, 4, dtype="float32"), dropout_key=shape(3, 2, dtype="uint32"),
        mask=operands.mask._replace(batch_index=shape(3), head_offset=shape(1)))
    spec, found = spec._replace(dropout_prob=0.1), []
    def called(kernel, inputs, outputs, launch, transfer):
      found.extend(x.size for x in inputs.scalars)
      return [jnp.zeros(x.shape, x.dtype) for x in outputs], ()
    with mock.patch.object(call, "call", called):
      jax.eval_shape(lambda operands: forward.forward(operands, spec, BLOCKS), operands)
    chosen = tiling.make_tiling(operands, spec, BLOCKS, backward=False)
    self.assertEqual(scalar_memory.needed(operands, spec, chosen, by_keys=False),
                     sum(4 * schedule.round_up(n, schedule.LANES) for n in found))

  def test_blocks_grow_until_the_schedule_of_a_row_fits(self):
    operands, spec = operands_of(2, 2**19, 32, 1)
    chosen = tiling.make_tiling(operands, spec, BlockSizes(), backward=False)
    self.assertGreater(chosen.block_kv, tiling.BLOCKS[tiling.MASKED, False][1])
    self.assertTrue(scalar_memory.fits(operands, spec, chosen, by_keys=False))

  def test_the_least_number_of_groups_is_chosen(self):
    operands, spec = operands_of(48, 131072, 32, 8)
    chosen = tiling.make_tiling(operands, spec, BlockSizes(), backward=False)
    size = lambda groups: scalar_memory.needed(operands, spec, chosen, by_keys=False,
                                               groups=groups)
    found = scalar_memory.num_groups(operands, spec, chosen, by_keys=False)
    self.assertGreater(found, 1)
    self.assertLessEqual(size(found), scalar_memory.MOST_BYTES)
    self.assertTrue(all(size(n) > scalar_memory.MOST_BYTES for n in (1, 2, 3, 4) if n < found))

  def test_heads_of_one_key_head_are_halved_where_there_is_one_block_of_queries(self):
    case = Case({}, T=128, H=8, K=1, D=128, dtype="bfloat16",
                blocks=BlockSizes(128, 128, 128, 128))
    shapes = case.shapes()
    out, _ = jax.eval_shape(case.call, shapes)
    self.assertEqual(out.shape, shapes["query"].shape)
    long = {name: jax.ShapeDtypeStruct((1, 1024, *x.shape[2:]), x.dtype)
            for name, x in shapes.items()}
    jax.eval_shape(case._replace(blocks=None).call, long)

  def test_requested_blocks_are_refused_by_name(self):
    operands, spec = operands_of(1, 131072, 32, 8)
    blocks = BlockSizes(128, 128)
    chosen = tiling.make_tiling(operands, spec, blocks, backward=False)
    self.assertEqual((chosen.block_q, chosen.block_kv), (128, 128))
    with self.assertRaisesRegex(ValueError, "block_sizes: blocks of 128 queries and 128 keys make "
                                "a schedule of 2050 KiB of scalar memory for each batch row; "
                                "expected at most 960: give a larger block_q and a larger "
                                "block_kv, or None"):
      scalar_memory.num_groups(operands, spec, chosen, by_keys=False, requested=blocks)

  def test_what_errors_say_can_be_followed(self):
    """Follows them from blocks that are too small to a mechanism that takes a million tokens."""
    x = jax.ShapeDtypeStruct((1, 10**6, 1, 128), jnp.bfloat16)
    def run(mechanism, sizes):
      attend = lambda x: attention(x, x, x, mechanism=mechanism, metadata=TPU, block_sizes=sizes
                                   ).attention_outputs
      return jax.eval_shape(lambda x: jax.vjp(attend, x)[1](x), x)
    small = BlockSizes(block_kv_backward=512)
    for sizes, cure in ((small, "512 keys.*of the backward.*: give a larger block_kv_backward, or "
                         "None$"), (None, 'give mechanism="blockwise", which has no schedule$')):
      with self.assertRaisesRegex(ValueError, cure):
        run("flash_attn2", sizes)
    self.assertEqual(run("blockwise", None)[0].shape, x.shape)

  @parameterized.parameters((6, False), (6, True), (2, False))
  def test_groups_are_computed_in_order(self, batch, sends):
    """Checks what the function of a group gets, and that only the first one sends."""
    groups = 2 if batch == 2 else 3
    arrays = np.arange(1.0 * batch)[:, None], np.arange(1.0 * batch)[:, None, None]
    sinks = np.ones((1, 2))
    operands = Operands(arrays[0], arrays[0], arrays[0], sinks=sinks)
    transfer = RemoteCopy((arrays[0],), None, ("x",), 0, 2, 1) if sends else None
    seen = []
    def run(operands, array, transfer):
      seen.append(transfer)
      rows = batch // groups
      self.assertEqual((operands.query.shape, operands.sinks.shape), ((rows, 1), (1, 2)))
      found = operands.query[:, 0] + 10 * array[:, 0, 0] + 100 * operands.mask.batch_index
      return (found,), transfer.arrays if transfer else ()
    (found,), received = scalar_memory.in_groups(run, operands, arrays[1], groups, transfer)
    np.testing.assert_array_equal(found, 111 * np.arange(batch))
    self.assertLen(received, int(sends))
    self.assertEqual(seen, [transfer, None] if sends else [None])


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompiledTest(parameterized.TestCase):
  """Programs compiled ahead of time, without a chip."""

  def compile(self, chip, call, shapes):
    placement = SingleDeviceSharding(static_profile.devices(chip)[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement),
                          shapes)
    return jax.jit(call).trace(shapes).lower(lowering_platforms=("tpu",)).compile()

  def test_size_is_the_compilers_own(self):
    """Compiles what needs more than there is: the compiler then lists what lies there."""
    case = Case({}, T=2**16, H=1, D=8, floats={"softmax_aux": (1,)})
    needed, sizes = scalar_memory.needed, []
    def recorded(*arguments, **keywords):
      sizes.append(needed(*arguments, **keywords))
      return sizes[-1]
    with (mock.patch.multiple(scalar_memory, MOST_BYTES=2**21, needed=recorded),
          mock.patch.object(step_list.WordSizes, "kind_bits", 0),  # two words for each step
          self.assertRaisesRegex(Exception, "memory space smem") as raised):
      self.compile("v6e", case.call, jax.eval_shape(case.arrays))
    found = [float(re.search(r"Size: ([\d.]+)", text)[1]) * (1024 if "K\n" in text[:30] else 1)
             for text in re.split(r"\n +\d+\. ", str(raised.exception))
             if "Tag: prefetched SMEM operand" in text]
    self.assertLen(found, 3)  # two of the schedule, and the sinks
    self.assertEqual(sum(found), sizes[-1])

  @sampling.slow_parameters(*((chip,) for chip in static_profile.CHIPS))
  def test_what_fits_compiles(self, chip):
    case = Case({}, T=89600, H=1, D=8)  # 700 * 701 / 2 steps
    operands, spec = operands_of(1, case.T, 1, 1, case.dtype, case.D, "causal")
    chosen = tiling.make_tiling(operands, spec, BLOCKS, backward=False)
    size = scalar_memory.needed(operands, spec, chosen, by_keys=False)
    self.assertBetween(size, 0.98 * scalar_memory.MOST_BYTES, scalar_memory.MOST_BYTES)
    self.compile(chip, case.call, jax.eval_shape(case.arrays))

  @sampling.slow_parameters(*itertools.product(("v5e", "v6e"), ("segments", "key mask")))
  def test_many_batch_rows(self, chip, kind):
    def run(arrays):
      *arrays, ids = arrays
      arguments = (dict(mask_info=MaskInfo.from_segments(ids)) if kind == "segments"
                   else dict(mask=ids[:, None, None] > 0, causal=False))
      def attend(*x):
        return attention(*x, mechanism="flash_attn2", metadata=TPU, **arguments).attention_outputs
      out, pull = jax.vjp(attend, *arrays)
      return pull(out)
    x = jax.ShapeDtypeStruct((512, 197, 2, 64), jnp.bfloat16)
    self.compile(chip, run, (x, x, x, jax.ShapeDtypeStruct((512, 197), jnp.int32)))

  @sampling.slow_parameters(*((chip,) for chip in static_profile.CHIPS))
  def test_traced_number_of_steps(self, chip):
    self.compile(chip, lambda x: jax.vjp(PACKED_CASE.call, x)[1](PACKED_CASE.call(x)),
                 jax.eval_shape(PACKED_CASE.arrays))


if __name__ == "__main__":
  absltest.main()
