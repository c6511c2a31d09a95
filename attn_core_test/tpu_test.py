# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The TPU flash kernels in interpret mode on a CPU, against the oracle.

Interpret mode starts from memory full of NaN and watches for races between transfers and
computation; it runs with transfers executed at once and as late as possible.
"""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, MaskInfo, attention, explain, masks
from attn_core.kernels.tpu.flash import backward, patterns, schedule, tile_inputs, tiling
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test.tpu_cases import BLOCKS, CASES, IDS, KEY, TPU, Case
from attn_core_test.tpu_interpret import interpreted


def everything(run, weights):
  """Returns a function from arrays to gradients of a sum of all outputs, and the outputs."""
  def loss(arrays):
    out, lse = run(arrays)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    parts = jnp.sin(out.astype(jnp.float32)) * weights[0], finite**2 * weights[1]
    return sum(x.sum() for x in parts), (out, lse)
  return jax.jit(jax.grad(loss, has_aux=True))


class InterpretTest(parameterized.TestCase):

  def compare(self, case, tolerance, transfers_executed=("on_wait", "eager")):
    arrays = case.arrays()
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=x.shape).astype(np.float32)
               for x in jax.eval_shape(case.oracle, arrays)]
    expected = everything(case.oracle, weights)(arrays)
    # With and without a naive softmax, whatever the dtype.
    for transfers in transfers_executed:
      naive = (case.dtype,) if transfers == "eager" else ()
      with interpreted(transfers), mock.patch.object(tiling, "NAIVE_DTYPES", naive):
        found = jax.block_until_ready(everything(case.call, weights)(arrays))
      flat, _ = jax.tree_util.tree_flatten_with_path(found)
      for (path, x), y in zip(flat, jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        size = max(1.0, np.abs(np.where(np.isfinite(y), y, 0)).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size,
                                   err_msg=f"{jax.tree_util.keystr(path)}, transfers {transfers}")

  @parameterized.named_parameters((name, name) for name in CASES)
  def test_value_and_gradient_equal_the_oracle(self, name):
    self.compare(CASES[name], 2e-2 if CASES[name].dtype == "bfloat16" else 1e-5)

  def test_every_feature_at_once(self):
    """In blocks of several tiles along both sides."""
    self.enter_context(mock.patch.object(tiling, "PER_PAIR_BLOCK", (256, 256, 128)))
    ids = np.repeat(np.array([[0, 1], [2, -1]], np.int32), 100, 1)
    self.compare(Case(
        dict(mask_info=MaskInfo.from_segments(ids), sliding_window=(50, 0), logits_soft_cap=3.0,
             softmax_scale=0.3, dropout_prob=0.3, dropout_rng=KEY, deterministic=False),
        masks.causal() & masks.window(50, 0) & masks.segments(ids), B=2, T=200, H=2, K=1, D=32,
        E=16, blocks=BlockSizes(256, 256, 256, 256),
        floats={"bias": (1, 2, 200, 200), "softmax_aux": (2,)}), 1e-5, ("on_wait",))

  def test_every_mapped_key_drops_other_weights(self):
    case = Case({}, B=1, T=24, H=1, K=1, D=8, blocks=BlockSizes())
    arrays, rng = case.arrays(), np.array([[1, 2], [3, 4]], np.uint32)
    def run(rng):
      return attention(**arrays, mechanism="flash_attn2", metadata=TPU, dropout_prob=0.4,
                       dropout_rng=rng, deterministic=False).attention_outputs
    with interpreted():
      mapped = jax.jit(jax.vmap(run))(rng)
      alone = [jax.jit(run)(x) for x in rng]
    np.testing.assert_array_equal(mapped, alone)
    self.assertTrue((mapped[0] != mapped[1]).any())

  def test_every_mapped_row_has_other_sinks(self):
    case = Case({}, B=2, T=24, H=3, D=8, blocks=BlockSizes(), floats={"softmax_aux": (2, 3)})
    arrays = case.arrays()
    one = lambda a: case.call({name: x if name == "softmax_aux" else x[None]
                               for name, x in a.items()})
    with interpreted():
      mapped = jax.jit(jax.vmap(one))(arrays)
      alone = [jax.jit(one)(jax.tree.map(lambda x: x[n], arrays)) for n in range(2)]
    np.testing.assert_array_equal(mapped[0], [x[0] for x in alone])
    np.testing.assert_array_equal(mapped[1], [x[1] for x in alone])

  def test_a_bias_is_not_copied(self):
    """Checks that the kernel transposes it, forward and backward."""
    case = CASES["bias"]
    arrays = case.arrays()
    def loss(arrays):
      return case.call({**arrays, "bias": jax.lax.stop_gradient(arrays["bias"])})[0].sum()
    with interpreted():
      text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
    self.assertIn(f"tensor<{'x'.join(map(str, arrays['bias'].shape))}xf32>", text)
    self.assertNotIn("dims = [0, 1, 3, 2]", text)

  def test_a_dense_mask_is_not_copied(self):
    """Checks that the kernel transposes it, forward and backward."""
    case = CASES["dense_per_head"]
    loss = lambda arrays: case.call(arrays)[0].sum()
    with interpreted():
      text = jax.jit(jax.grad(loss)).lower(case.arrays()).as_text()
    self.assertIn("x260x260xi8>", text)
    self.assertNotIn("dims = [0, 1, 3, 2]", text)

  def test_every_query_has_other_masks_and_biases(self):
    """Checks arrays with a number per query, in a loop over tiles of more keys than queries."""
    self.enter_context(mock.patch.object(patterns, "MOST_PATTERNS", 0))
    visible = np.random.default_rng(4).random((1, 2, 200, 1)) < 0.7
    self.compare(Case(
        dict(mask=visible, causal=False), masks.dense(visible), T=200, S=600, D=8,
        blocks=BlockSizes(128, 512, 128, 512), floats={"bias": (1, 2, 200, 1)}), 1e-5,
                 ("on_wait",))

  @parameterized.parameters(64, 128)
  def test_the_backward_in_several_ranges_of_queries(self, width):
    self.enter_context(mock.patch.object(tiling, "RESIDENT_BYTES", 12 * 2 * 128 * 256))
    self.compare(Case({}, T=700, H=4, K=2, D=width), 1e-5)

  @parameterized.parameters((64, 6, 2, 600, (3, 3, 1)), (128, 4, 1, 512, (4, 2, 2)))
  def test_parts_of_heads_and_ranges_and_halves(self, width, heads, key_heads, tokens, expected):
    """Checks sums that pass through HBM, of blocks of keys that ranges see once, often, never."""
    self.enter_context(mock.patch.object(tiling, "RESIDENT_BYTES", 12 * 128 * 256))
    self.enter_context(mock.patch.object(tiling, "SMALL_BLOCKS", dict.fromkeys(
        (False, True), (128, 128, 128))))
    self.enter_context(mock.patch.object(backward, "MOST_UNROLLED", 1))
    mask = masks.offset(masks.causal() & masks.window(200, 0), -150)
    case = Case(dict(mask=mask, causal=False, dropout_prob=0.3, dropout_rng=KEY,
                     deterministic=False), mask, T=tokens, H=heads, K=key_heads, D=width,
                blocks=None, floats={"softmax_aux": (heads,)})
    operands = shapes(tokens, heads, width, key_heads=key_heads)
    chosen = tiling.make_tiling(operands, spec_of(mask), BlockSizes(), backward=True)
    self.assertEqual((chosen.head_parts, chosen.num_ranges, chosen.halves), expected)
    self.compare(case, 1e-5)

  @parameterized.parameters(False, True)
  def test_blocks_of_every_length_have_tiles(self, backward):
    """A tile divides its block, also where that is 5, 7 or 19 times 128 tokens."""
    lengths = range(100, 2500, 128)
    for tokens in lengths:
      for dtype in (jnp.float32, jnp.bfloat16):
        for requested in (BlockSizes(), BlockSizes(*[-(-tokens // 128) * 128] * 4)):
          found = tiling.make_tiling(shapes(tokens, 1, 64, dtype), spec_of(masks.causal()),
                                     requested, backward=backward)
          self.assertEqual((found.block_q % found.tile_q, found.block_kv % found.tile_kv), (0, 0))
          self.assertLessEqual(found.tiles_q * found.tiles_kv, tiling.MOST_TILES)

  def test_one_block_of_five_lanes(self):
    self.compare(Case({}, T=600, H=1, K=1, D=16, blocks=None), 1e-5)

  def test_heads_of_parts_may_see_differently(self):
    self.enter_context(mock.patch.object(tiling, "PER_PAIR_BLOCK", (128, 128, 128)))
    self.compare(CASES["dense_per_head"]._replace(blocks=None), 1e-5, ("on_wait",))

  def test_hidden_keys_may_be_nan(self):
    case = Case({}, T=200, blocks=BlockSizes())
    arrays = case.arrays()
    clean = {**arrays, "key": arrays["key"][:, :150], "value": arrays["value"][:, :150],
             "query": arrays["query"][:, :150]}
    with_nan = {**arrays, "value": arrays["value"].at[:, 150:].set(jnp.nan),
              "key": arrays["key"].at[:, 150:].set(jnp.inf)}
    with interpreted():
      out = jax.jit(case.call)(with_nan)[0]
      np.testing.assert_array_equal(out[:, :150], jax.jit(case.call)(clean)[0])
    self.assertTrue(np.isnan(out[:, 150:]).all())

  def test_second_derivatives(self):
    case = Case({}, T=40, H=1, K=1, D=8, blocks=BlockSizes())
    arrays = case.arrays()
    def twice(run):
      loss = lambda arrays: (run(arrays)[0] ** 2).sum()
      return jax.jit(lambda a: jax.jvp(jax.grad(loss), (a,), (a,))[1])
    expected = twice(case.oracle)(arrays)
    with interpreted():
      found = jax.block_until_ready(twice(case.call)(arrays))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)

  def test_vmap(self):
    case = Case({}, B=2, T=40, D=8, blocks=BlockSizes())
    arrays = case.arrays()
    with interpreted():
      one = jax.jit(case.call)(arrays)[0]
      mapped = jax.jit(jax.vmap(lambda a: case.call(jax.tree.map(lambda x: x[None], a))[0][0]))(
          arrays)
    np.testing.assert_array_equal(mapped, one)


class ScheduleTest(parameterized.TestCase):

  def test_patterns_of_a_mask_known_on_the_host(self):
    sizes = schedule.Tiling(1024, 1024, 512, 512, 256, 256)
    steps, _ = schedule.build(masks.causal(), sizes, by_keys=False)
    found = patterns.choose(steps, masks.causal(), sizes, by_keys=False)
    full, partial = 2, 1
    diagonal = partial | full << 2 | partial << 6
    self.assertEqual(set(found.kinds), {0b10101010, diagonal})
    self.assertTrue(found.complete)
    self.assertEqual((found.parts, found.others), ((), (patterns.UNMASKED, patterns.MASKED)))

  def test_a_tile_is_cut_by_one_side_of_a_window(self):
    sizes, mask = schedule.Tiling(2048, 2048, 512, 512, 256, 256), (
        masks.causal() & masks.window(511, 0))
    steps, _ = schedule.build(mask, sizes, by_keys=False)
    found = patterns.choose(steps, mask, sizes, by_keys=False)
    partial, full, by_causal, by_left = 1, 2, 1 | 1 << 1, 1 | 2 << 1
    before, diagonal = partial | full << 4 | partial << 6, partial | full << 2 | partial << 6
    self.assertEqual(set(found.kinds), {before, diagonal})
    of = lambda pattern: [found.evaluated(pattern, n) for n in range(4) if pattern >> 2 * n & 1]
    self.assertEqual((of(before), of(diagonal)), ([by_left] * 2, [by_causal] * 2))

  @parameterized.parameters(
      (masks.full(), 256, (0b10101010,), ((1,) * 4,)),
      (masks.causal(), 256, (0b10101010, 0b01001001, 0b01001101), ((2,) * 4, (3, 2, 3, 3),
                                                                  (3, 2, 3, 3))),
      (masks.full(), 512, (0b10,), ((1,),)))
  def test_patterns_of_a_traced_mask(self, static, tile, expected, parts):
    """Has those of the known mask, and the cut diagonal; others are computed strip by strip."""
    sizes = schedule.Tiling(1024, 1024, 512, 512, tile, tile)
    found = []
    def build(ids):
      mask = static & masks.segments(ids)
      steps, _ = schedule.build(mask, sizes, by_keys=False)
      found.append(patterns.choose(steps, mask, sizes, by_keys=False))
    jax.eval_shape(build, jax.ShapeDtypeStruct((1, 1024), np.int32))
    arrays = 1 | 1 << (2 if static == masks.causal() else 1)
    whole = (patterns.UNMASKED, arrays, patterns.MASKED), 2
    # A block of one tile that is not whole is cut.
    others = ((arrays,), 1) if tile == 512 else whole
    self.assertEqual((found[0].kinds, found[0].complete, found[0].parts), (expected, False, parts))
    self.assertEqual((found[0].others, found[0].strip_tiles), others)

  @parameterized.parameters(
      (masks.full(), 256, True), (masks.causal(), 256, True), (masks.causal(), 512, False),
      (masks.offset(masks.causal(), -300), 256, False))
  def test_rows_with_a_single_step(self, mask, tokens, single):
    sizes = schedule.Tiling(tokens, 256, 256, 256, 128, 128)
    steps, _ = schedule.build(mask, sizes, by_keys=False)
    self.assertEqual(steps.single_step_rows, single)

  def test_rows_of_a_traced_mask_may_have_many_steps(self):
    sizes = schedule.Tiling(300, 300, 384, 384, 128, 128)
    found = []
    jax.eval_shape(lambda ids: found.append(
        schedule.build(masks.segments(ids), sizes, by_keys=False)[0].single_step_rows), IDS)
    self.assertEqual(found, [False])

  @parameterized.parameters(
      (128, 8, False, 8), (512, 8, False, 4), (512, 6, False, 3), (512, 7, False, 1),
      (2048, 8, False, 2), (8192, 8, False, 1), (8192, 8, True, 2), (16384, 8, True, 1))
  def test_heads_of_a_step(self, tokens, heads, backward, expected):
    found = tiling.make_tiling(shapes(tokens, heads, 128, jnp.bfloat16), spec_of(masks.causal()),
                               BlockSizes(), backward=backward)
    self.assertEqual(found.key_heads, expected)

  @parameterized.parameters(
      (1, (1, 1024), (1, 1024)), (2, (2, 1024), (2, 1024)), (4, (4, 1024), (2, 1024)),
      (5, (5, 512), (1, 1024)), (7, (7, 512), (1, 1024)), (8, (4, 1024), (2, 1024)),
      (9, (3, 1024), (3, 512)), (11, (1, 1024), (1, 1024)), (64, (4, 1024), (2, 1024)))
  def test_blocks_of_grouped_heads(self, group, *expected):
    """A step takes as many query heads as are fast; the other ones are other steps.

    Blocks of 768 queries would pad 4,096 to 4,608, and lie in many ways to blocks of keys.
    """
    for is_backward, (heads, rows) in zip((False, True), expected):
      found = tiling.make_tiling(shapes(4096, group, 128, jnp.bfloat16, 1),
                                 spec_of(masks.causal()), BlockSizes(), backward=is_backward)
      self.assertEqual((found.group, found.head_parts), (heads, group // heads))
      self.assertEqual((found.block_q, found.block_kv), (rows, 1024))

  @parameterized.parameters(
      ("bfloat16", None, 1024), ("float32", None, 512), ("bfloat16", (1, 1, 4096, 4096), 512))
  def test_blocks_with_a_bias(self, dtype, dense, expected):
    """In 16 bits they are those without one, unless a dense mask makes their code longer."""
    mask = masks.causal() if dense is None else masks.causal() & masks.dense(np.ones(dense, bool))
    operands = shapes(4096, 2, 128, jnp.dtype(dtype))._replace(
        bias=jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.float32),
        mask=MaskOperands(tuple(jax.tree.leaves(mask))))
    for is_backward in (False, True):
      found = tiling.make_tiling(operands, spec_of(mask), BlockSizes(), backward=is_backward)
      self.assertEqual((found.block_q, found.block_kv), (expected, expected))

  @parameterized.parameters(
      (2, 2, 1024), (4, 2, 1024), (5, 5, 512), (7, 7, 512), (9, 3, 1024), (16, 2, 1024))
  def test_blocks_of_wide_grouped_heads(self, group, heads, rows):
    """A step of four heads of 256 numbers takes longer than two steps of two."""
    found = tiling.make_tiling(shapes(4096, group, 256, jnp.bfloat16, 1), spec_of(masks.causal()),
                               BlockSizes(), backward=False)
    self.assertEqual((found.group, found.block_q, found.block_kv), (heads, rows, 1024))

  @parameterized.parameters(
      (masks.causal(), 2048), (masks.causal() & masks.window(1023, 0), 1024),
      (masks.causal() & masks.segments(np.zeros((1, 8192), np.int32)), 1024),
      (masks.causal() & masks.lengths(np.array([7], np.int32)), 2048))
  def test_blocks_of_long_sequences(self, mask, expected):
    """Documents may be short: large blocks would have many pairs of different ones."""
    operands = shapes(8192, 2, 128, jnp.bfloat16)._replace(
        mask=MaskOperands(tuple(jax.tree.leaves(mask))))
    found = tiling.make_tiling(operands, spec_of(mask), BlockSizes(), backward=False)
    self.assertEqual((found.block_q, found.block_kv), (expected, expected))

  @parameterized.parameters((4095, 256, 1024, 2), (4097, 256, 2048, 1), (4095, 128, 2048, 1))
  def test_forward_blocks_of_long_windows(self, window, width, rows, heads):
    """Wide heads have smaller ones up to 4,096 keys: faster, and less code."""
    operands = shapes(8192, 2, width, jnp.bfloat16, 1)
    for backward, expected in ((False, (rows, heads)), (True, (1024, 1))):
      found = tiling.make_tiling(operands, spec_of(masks.causal() & masks.window(window, 0)),
                                 BlockSizes(), backward=backward)
      self.assertEqual((found.block_q, found.query_heads), expected)

  @parameterized.product(tokens=(1, 100, 300, 500, 1000), group=(1, 3, 5, 8),
                         limit=(None, 128, 384), backward=(False, True))
  def test_blocks_of_short_calls(self, tokens, group, limit, backward):
    """Checks that any length and any request have blocks, and that no query head is left out."""
    blocks = BlockSizes(block_q=limit, block_q_backward=limit)
    found = tiling.make_tiling(shapes(tokens, group, 128, jnp.bfloat16, 1), spec_of(masks.causal()),
                               blocks, backward=backward)
    self.assertEqual(found.group * found.head_parts, group)
    length = schedule.round_up(tokens, 128)
    sizes = (length, 768, 512, 256) if limit is None else (min(limit, length),)
    self.assertIn(found.block_q, sizes)

  @parameterized.parameters(
      (4096, 128, False, (1024, 4096)), (2304, 96, False, (768, 2304)),
      (2048, 128, False, (2048, 2048)), (4096, 64, False, (2048, 2048)),
      (4097, 128, False, (1408, 2048)), (2304, 128, True, (768, 2048)))
  def test_blocks_of_a_full_mask(self, tokens, width, backward, expected):
    found = tiling.make_tiling(shapes(tokens, 8, width, jnp.bfloat16), spec_of(masks.full()),
                               BlockSizes(), backward=backward)
    self.assertEqual((found.block_q, found.block_kv), expected)
    self.assertEqual(found.tile_q, found.block_q)

  @parameterized.parameters(128, 192)
  def test_tokens_are_padded_and_unpadded(self, width):
    form = tile_inputs.TokenBlocks(2, 256, 4, width, 2, 128, lambda i, j: i)
    x = np.arange(2 * 200 * 4 * width).reshape(2, 200, 4, width)
    packed = form.pack(x)
    self.assertEqual(packed.shape, form.shape)
    np.testing.assert_array_equal(form.unpack(packed)[:, :200], x)


class RefusalTest(parameterized.TestCase):

  def refusal(self, error, words, dtype=jnp.float32, **arguments):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), dtype)
    with self.assertRaisesRegex(error, words):
      jax.eval_shape(lambda x: attention(
          x, x, x, **{"mechanism": "flash_attn2", "metadata": TPU, **arguments}), x)

  def test_float16(self):
    self.refusal(NotImplementedError, "float16.*not supported.*blockwise", jnp.float16)

  def test_predicates_with_arrays(self):
    mask = masks.custom(lambda b, h, q, k, table: table[q, k] <= h, np.zeros((256, 256), np.int32))
    self.refusal(NotImplementedError, "masks.custom that reads arrays.*blockwise", mask=mask)

  def test_blocks_that_are_not_tiles(self):
    with self.assertRaisesRegex(ValueError, "block_sizes.block_q: got 100.*multiple of 128"):
      tiling.make_tiling(shapes(256, 2, 64), spec_of(masks.causal()), BlockSizes(block_q=100),
                         backward=False)

  def test_blocks_that_do_not_fit(self):
    operands = shapes(8192, 8, 256)
    large = tiling.make_tiling(operands, spec_of(masks.causal()), BlockSizes(8192, 8192),
                               backward=False)
    with self.assertRaisesRegex(ValueError, "MiB of vector memory.*smaller block_q"):
      tiling.vmem_limit(BlockSizes(), large, operands, backward=False)

  @parameterized.product(mask=(masks.full(), masks.causal(), masks.window(100, 0)),
                         width=(64, 128, 256, 512, 1024), backward=(False, True),
                         dtype=(jnp.float32, jnp.bfloat16))
  def test_chosen_blocks_fit(self, mask, width, backward, dtype):
    """Checks the 64 MiB of a v5p, and up to a width of 512 the 16 MiB of a v4."""
    operands = shapes(32768, 2, width, dtype)
    small = [(BlockSizes(vmem_limit_bytes=2**24), 16)] if width <= 512 else []
    for sizes, most in [(BlockSizes(), 64), *small]:
      chosen = tiling.make_tiling(operands, spec_of(mask), sizes, backward=backward)
      needed = tiling.needed_vmem(chosen, operands, backward)
      self.assertLessEqual(tiling.SLACK * needed, most * 2**20)
      self.assertLessEqual(tiling.vmem_limit(sizes, chosen, operands, backward=backward),
                           most * 2**20)

  @parameterized.parameters((64, 64, 576, 512), (100, 4096, 576, 576))
  def test_many_heads_of_a_key_head_fit(self, queries, keys, width, value_width):
    """Where blocks are as small as they can be, a step computes fewer heads."""
    operands = shapes(keys, 128, width, jnp.bfloat16, 1)
    operands = operands._replace(
        query=jax.ShapeDtypeStruct((1, queries, 128, width), jnp.bfloat16),
        value=jax.ShapeDtypeStruct((1, keys, 1, value_width), jnp.bfloat16))
    spec = spec_of(masks.causal())
    for backward in (False, True):
      chosen = tiling.make_tiling(operands, spec, BlockSizes(), backward=backward)
      tiling.vmem_limit(BlockSizes(), chosen, operands, backward=backward)
      self.assertEqual(chosen.group * chosen.head_parts, 128)

  @parameterized.product(group=(1, 8), width=(64, 256), limit=(None, 2**24))
  def test_ranges_of_queries_stay_in_vector_memory(self, group, width, limit):
    """A cotangent of queries is a float32 sum and two blocks to be written, for every head."""
    operands = shapes(32768, 2 * group, width)
    operands = operands._replace(key=shapes(32768, 2, width).key)
    sizes = BlockSizes(vmem_limit_bytes=limit)
    chosen = tiling.make_tiling(operands, spec_of(masks.causal()), sizes, backward=True)
    self.assertGreater(chosen.num_ranges, 1)
    self.assertGreaterEqual(chosen.num_ranges * chosen.range_blocks, 32768 // chosen.block_q)
    block = chosen.block_q * chosen.query_heads * max(width, 128) * (4 + 2 * 2)
    most = tiling.RESIDENT_BYTES * (1 if limit is None else limit / tiling.SLACK / tiling.MOST_VMEM)
    self.assertLessEqual(chosen.range_blocks * block, max(most, block))

  def test_blocks_that_cannot_fit_a_limit(self):
    operands = shapes(8192, 8, 256)
    large = BlockSizes(2048, 2048, vmem_limit_bytes=2**24)
    chosen = tiling.make_tiling(operands, spec_of(masks.causal()), large, backward=False)
    with self.assertRaisesRegex(ValueError, "2048 keys need about .* MiB.*expected at most 32:"):
      tiling.vmem_limit(large, chosen, operands, backward=False)

  @parameterized.parameters((1, 1, 1, 2, 1), (4, 1, 1, 2, 2), (4, 2, 1, 1, 1), (4, 1, 2, 1, 1),
                            (6, 3, 1, 2, 1), (8, 1, 1, 1, 2))
  def test_two_cores_have_equal_work(self, heads, key_heads, batch, *expected):
    """Checks that a grid can be divided into two halves; with one head only in the forward."""
    operands = shapes(4096, heads, 128, jnp.bfloat16, key_heads)
    operands = operands._replace(**{name: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
                                    for name, x in operands._asdict().items()
                                    if name in ("query", "key", "value")})
    halves = [tiling.make_tiling(operands, spec_of(masks.causal()), BlockSizes(),
                                 backward=is_backward).halves for is_backward in (False, True)]
    self.assertEqual(halves, [*expected])

  def test_schedules_that_do_not_fit(self):
    x = jax.ShapeDtypeStruct((1, 131072, 1, 64), jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, "128 queries.*KiB of scalar memory.*a larger block_q"):
      jax.eval_shape(lambda x: attention(
          x, x, x, mechanism="flash_attn2", metadata=TPU, block_sizes=BLOCKS), x)

  def test_auto_never_falls_to_quadratic_memory(self):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float16)
    self.assertEqual(explain(x, x, x, metadata=TPU).chosen, "blockwise")


def shapes(tokens, heads, width, dtype=jnp.float32, key_heads=None):
  """Returns operands that have only shapes and dtypes; key_heads: None for as many as heads."""
  query, key = (jax.ShapeDtypeStruct((1, tokens, number, width), dtype)
                for number in (heads, key_heads or heads))
  return Operands(query, key, key)


def spec_of(mask):
  """Returns a spec for a mask without arrays."""
  return AttentionSpec(jax.tree.structure(mask), 1.0)


if __name__ == "__main__":
  absltest.main()
