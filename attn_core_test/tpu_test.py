"""The TPU kernels on a CPU, in interpret mode, against the oracle.

Interpret mode starts from memory full of NaN and watches for races between transfers and
computation; it runs with transfers executed at once and as late as possible.
"""

import contextlib
import io
from typing import NamedTuple
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, attention, explain, masks)
from attn_core.masks import dropout
from attn_core.kernels.tpu.flash import tile_inputs as feed, forward, schedule, tiling as tuned
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands

TPU = OperationMetadata(platform="tpu")
BLOCKS = BlockSizes(128, 128, 128, 128)
IDS = np.repeat(np.array([[0, 1, 2, -1], [5, 5, 6, 7]], np.int32), 75, 1)
DENSE = np.random.default_rng(0).random((2, 4, 260, 260)) < 0.5
DENSE[:, :, 7] = False  # a query that sees nothing
KEY = np.array([3, 4], np.uint32)
BACKWARDS = np.tile(np.arange(200, dtype=np.int32)[::-1], (2, 1))
LENGTHS = masks.lengths(np.array([150, 200], np.int32), np.array([0, 190], np.int32))


def predicate(batch, head, query, key):
  return (batch + 2 * head + query - key) % 3 != 0


class Case(NamedTuple):
  """A call: arguments beyond query, key and value, the mask that they mean, and the shape."""

  arguments: dict
  mask: masks.Mask = masks.causal()
  B: int = 1
  T: int = 260
  S: int | None = None  # None: T
  H: int = 2
  K: int | None = None  # None: H
  D: int = 64
  E: int | None = None  # None: D
  dtype: str = "float32"
  blocks: BlockSizes | None = BLOCKS
  floats: dict = {}  # shapes of float32 arguments

  def arrays(self):
    rng = np.random.default_rng(0)
    S, K, E = self.S or self.T, self.K or self.H, self.E or self.D
    shapes = {"query": (self.B, self.T, self.H, self.D), "key": (self.B, S, K, self.D),
              "value": (self.B, S, K, E)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), self.dtype)
              for name, shape in shapes.items()}
    return {**arrays, **{name: jnp.asarray(rng.normal(size=shape), jnp.float32)
                         for name, shape in self.floats.items()}}

  def door(self, arrays):
    output = attention(**arrays, **self.arguments, mechanism="flash_attn2", metadata=TPU,
                       block_sizes=self.blocks, return_lse=True)
    return output.attention_outputs, output.lse

  def oracle(self, arrays):
    a = self.arguments
    leaves, structure = jax.tree.flatten(self.mask)
    spec = AttentionSpec(structure, a.get("softmax_scale", self.D**-0.5), a.get("logits_soft_cap"),
                         a.get("dropout_prob", 0.0))
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    sinks = wide.get("softmax_aux")
    operands = Operands(
        wide["query"], wide["key"], wide["value"], wide.get("bias"),
        MaskOperands(tuple(map(jnp.asarray, leaves))), None if sinks is None else sinks[None],
        dropout.key_words(jnp.asarray(KEY)) if spec.dropout_prob else None)
    output = oracle.attention(operands, spec)
    return output.attention_outputs, output.lse


# What a hop of a ring sees: rows and columns of a longer sequence, the last of them padding.
ZIGZAG = masks.placed(masks.causal() & masks.window(150, 0), *[np.arange(100, 300)[None]] * 2,
                      (280, 290))

CASES = {
    "causal_odd_length": Case({}, T=301),
    "full": Case(dict(causal=False), masks.full(), T=384),
    "gqa_batch": Case({}, B=2, T=300, H=4, K=2),
    "one_query": Case(dict(query_offset=299), masks.full(), T=1, S=300),
    "widths_differ": Case(dict(query_offset=100), masks.offset(masks.causal(), 100), T=260, S=390,
                          D=80, E=48),
    "window": Case(dict(sliding_window=(100, 0)), masks.causal() & masks.window(100, 0), T=512),
    "empty_rows": Case(dict(query_offset=-50), masks.offset(masks.causal(), -50), T=200, S=300),
    "chunk": Case(dict(chunk_size=70), masks.causal() & masks.chunk(70), T=300),
    "segments": Case(dict(mask_info=MaskInfo.from_segments(IDS)),
                     masks.causal() & masks.segments(IDS), B=2, T=300),
    "positions": Case(dict(mask_info=MaskInfo(q_positions=BACKWARDS)),
                      masks.positions(BACKWARDS), B=2, T=200),
    "placed": Case(dict(mask=ZIGZAG, causal=False), ZIGZAG, T=200, H=1),
    "lengths": Case(dict(mask=LENGTHS, causal=False), LENGTHS, B=2, T=200),
    "dense_per_head": Case(dict(mask=DENSE, causal=False), masks.dense(DENSE), B=2, H=4, K=2),
    "dense_row": Case(dict(mask=DENSE[:1, :, :1]), masks.causal() & masks.dense(DENSE[:1, :, :1]),
                      B=2, H=4, K=2),
    "custom": Case(dict(mask=masks.custom(predicate)), masks.causal() & masks.custom(predicate),
                   B=2, H=4, K=2),
    "soft_cap": Case(dict(logits_soft_cap=5.0, softmax_scale=0.9)),
    "negative_scale": Case(dict(softmax_scale=-0.3)),
    "sinks": Case(dict(sliding_window=(20, -1), query_offset=-100, causal=True),
                  masks.offset(masks.causal() & masks.window(20, None), -100),
                  floats={"softmax_aux": (2,)}),
    "bias": Case({}, floats={"bias": (1, 2, 260, 260)}),
    "bias_row": Case({}, floats={"bias": (1, 2, 1, 260)}),
    "dropout": Case(dict(dropout_prob=0.3, dropout_rng=KEY, deterministic=False), B=2, H=4, K=2),
    "bfloat16": Case({}, dtype="bfloat16", H=4, K=2),
    "whole_lanes": Case({}, B=2, T=300, H=4, K=2, D=128),
    "whole_lanes_of_values": Case(dict(causal=False), masks.full(), T=130, S=140, D=192, E=128),
    "heads_of_a_step": Case({}, B=2, T=300, H=8, K=4, blocks=BlockSizes()),
    "heads_side_by_side": Case(dict(causal=False), masks.full(), T=300, S=140, H=6, K=6, D=128,
                               blocks=BlockSizes()),
    "heads_of_a_step_see_differently": Case(
        dict(mask=DENSE, causal=False), masks.dense(DENSE), B=2, H=4, K=4, blocks=BlockSizes(),
        floats={"bias": (1, 4, 260, 260), "softmax_aux": (4,)}),
    "several_tiles_a_block": Case({}, T=1100, H=1, K=1, blocks=BlockSizes()),
}


@contextlib.contextmanager
def interpreted(transfers="on_wait"):
  """Runs TPU kernels on the CPU; fails where a race was seen."""
  printed = io.StringIO()
  parameters = pltpu.InterpretParams(
      detect_races=True, uninitialized_memory="nan", dma_execution_mode=transfers)
  with contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(parameters):
    yield
  assert "RACE" not in printed.getvalue(), printed.getvalue()


def everything(run, weights):
  """A function of the arrays -> gradients of a sum that depends on every output, and these."""
  def loss(arrays):
    out, lse = run(arrays)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    parts = jnp.sin(out.astype(jnp.float32)) * weights[0], finite**2 * weights[1]
    return sum(x.sum() for x in parts), (out, lse)
  return jax.jit(jax.grad(loss, has_aux=True))


class InterpretTest(parameterized.TestCase):

  def compare(self, case, tolerance):
    arrays = case.arrays()
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=x.shape).astype(np.float32)
               for x in jax.eval_shape(case.oracle, arrays)]
    expected = everything(case.oracle, weights)(arrays)
    # Each form of the softmax once, whatever the dtype; the naive one needs no mending here.
    for transfers, naive in (("on_wait", ()), ("eager", (case.dtype,))):
      with interpreted(transfers), mock.patch.object(tuned, "NAIVE", naive), mock.patch.object(
          forward, "_mended", lambda found, safe: found):
        found = jax.block_until_ready(everything(case.door, weights)(arrays))
      flat, _ = jax.tree_util.tree_flatten_with_path(found)
      for (path, x), y in zip(flat, jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        size = max(1.0, np.abs(np.where(np.isfinite(y), y, 0)).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size,
                                   err_msg=f"{jax.tree_util.keystr(path)}, transfers {transfers}")

  @parameterized.named_parameters((name, name) for name in CASES)
  def test_value_and_gradient_equal_the_oracle(self, name):
    self.compare(CASES[name], 2e-2 if CASES[name].dtype == "bfloat16" else 1e-5)

  @parameterized.parameters(64, 128)
  def test_the_backward_in_several_ranges_of_queries(self, width):
    self.enter_context(mock.patch.object(tuned, "RESIDENT", 12 * 2 * 128 * 256))
    self.compare(Case({}, T=700, H=4, K=2, D=width), 1e-5)

  def test_what_is_hidden_may_be_nan(self):
    case = Case({}, T=200, blocks=BlockSizes())
    arrays = case.arrays()
    clean = {**arrays, "key": arrays["key"][:, :150], "value": arrays["value"][:, :150],
             "query": arrays["query"][:, :150]}
    spoilt = {**arrays, "value": arrays["value"].at[:, 150:].set(jnp.nan),
              "key": arrays["key"].at[:, 150:].set(jnp.inf)}
    with interpreted():
      out = jax.jit(case.door)(spoilt)[0]
      np.testing.assert_array_equal(out[:, :150], jax.jit(case.door)(clean)[0])
    self.assertTrue(np.isnan(out[:, 150:]).all())

  def test_second_derivatives(self):
    case = Case({}, T=40, H=1, K=1, D=8, blocks=BlockSizes())
    arrays = case.arrays()
    def twice(run):
      loss = lambda arrays: (run(arrays)[0] ** 2).sum()
      return jax.jit(lambda a: jax.jvp(jax.grad(loss), (a,), (a,))[1])
    expected = twice(case.oracle)(arrays)
    with interpreted():
      found = jax.block_until_ready(twice(case.door)(arrays))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)

  def test_vmap(self):
    case = Case({}, B=2, T=40, D=8, blocks=BlockSizes())
    arrays = case.arrays()
    with interpreted():
      one = jax.jit(case.door)(arrays)[0]
      mapped = jax.jit(jax.vmap(lambda a: case.door(jax.tree.map(lambda x: x[None], a))[0][0]))(
          arrays)
    np.testing.assert_array_equal(mapped, one)


# name: what is done to batch row 0
BEYOND = {
    "large_logits": {"query": lambda x: x.at[0].multiply(1000)},
    "small_logits": {"query": lambda x: x.at[0, ..., 0].set(50),
                     "key": lambda x: x.at[0, ..., 0].set(-50)},
    "one_small_row": {"query": lambda x: x.at[0, 77].set(-40), "key": lambda x: x.at[0].set(3)},
    "large_values": {"value": lambda x: x.at[0, 3].set(3e38)},
    "a_key_of_minus_infinity": {"query": lambda x: x.at[0, ..., 0].set(1),
                                "key": lambda x: x.at[0, 5, :, 0].set(-np.inf)},
    "hidden_values": {"value": lambda x: x.at[0, 150:].set(np.nan)},
    "hidden_keys": {"key": lambda x: x.at[0, 150:].set(np.inf)}}


class NaiveTest(absltest.TestCase):
  """The softmax without a maximum, and what happens where it fails."""

  def test_rows_that_fail_are_mended_and_no_others(self):
    case = Case({}, B=2, T=200, dtype="bfloat16", blocks=BlockSizes())
    arrays = case.arrays()

    def form(mended=forward._mended):
      """A function of the arrays -> (output [B, H, T, E], lse [B, H, T, 1]) in float32."""
      with interpreted(), mock.patch.object(forward, "_mended", mended):
        compiled = jax.jit(lambda arrays: case.door(arrays)).lower(arrays).compile()
      def run(arrays):
        with interpreted():
          out, lse = jax.block_until_ready(compiled(arrays))
        return np.asarray(out, np.float32).swapaxes(1, 2), np.asarray(lse)[..., None]
      return run

    found, safe, naive = form(), form(lambda naive, safe: safe()), form(lambda naive, safe: naive)
    usual = found(arrays)
    self.assertFalse(np.isnan(naive(arrays)[1]).any())
    for name, change in {"nothing": {}, **BEYOND}.items():
      with self.subTest(name):
        given = {key: change.get(key, lambda x: x)(x) for key, x in arrays.items()}
        mended, expected, tried = found(given), safe(given), naive(given)
        failed = np.isnan(tried[1])
        self.assertEqual(failed[0].any(), name != "nothing")
        self.assertFalse(failed[1].any())
        for x, y, z, u in zip(mended, expected, tried, usual):
          np.testing.assert_array_equal(x, np.where(failed, y, z))
          np.testing.assert_array_equal(x[1], u[1])
        # Both forms round alike: the same 16 bits but for few.
        self.assertLess(np.mean((tried[0] != expected[0]) & ~failed), 0.01)
        np.testing.assert_allclose(mended[1], expected[1], rtol=2e-6, atol=2e-6)


class ScheduleTest(parameterized.TestCase):

  def test_patterns_of_a_mask_known_on_the_host(self):
    cut = schedule.Cut(1024, 1024, 512, 512, 256, 256)
    visits, _ = schedule.build(masks.causal(), cut, by_keys=False)
    patterns, complete = visits.patterns(cut)
    full, partial = 2, 1
    diagonal = partial | full << 2 | partial << 6
    self.assertEqual(set(patterns), {0b10101010, diagonal})
    self.assertTrue(complete)

  def test_patterns_of_a_traced_mask(self):
    cut = schedule.Cut(300, 300, 128, 128, 128, 128)
    found = []
    jax.eval_shape(lambda ids: found.append(
        schedule.build(masks.segments(ids), cut, by_keys=False)[0].patterns(cut)), IDS)
    self.assertEqual(found, [((2,), False)])

  @parameterized.parameters(
      (masks.full(), 256, True), (masks.causal(), 256, True), (masks.causal(), 512, False),
      (masks.offset(masks.causal(), -300), 256, False))
  def test_steps_that_are_all_there_is(self, mask, tokens, single):
    cut = schedule.Cut(tokens, 256, 256, 256, 128, 128)
    visits, _ = schedule.build(mask, cut, by_keys=False)
    self.assertEqual(visits.single, single)

  def test_steps_of_a_traced_mask_may_be_anything(self):
    cut = schedule.Cut(300, 300, 384, 384, 128, 128)
    found = []
    jax.eval_shape(lambda ids: found.append(
        schedule.build(masks.segments(ids), cut, by_keys=False)[0].single), IDS)
    self.assertEqual(found, [False])

  @parameterized.parameters(
      (128, 8, False, 8), (512, 8, False, 4), (512, 6, False, 3), (512, 7, False, 1),
      (2048, 8, False, 2), (8192, 8, False, 1), (8192, 8, True, 2), (16384, 8, True, 1))
  def test_heads_of_a_step(self, tokens, heads, backward, expected):
    cut = tuned.choose(shapes(tokens, heads, 128, jnp.bfloat16), BlockSizes(), masks.causal(),
                       backward=backward)
    self.assertEqual(cut.heads, expected)

  @parameterized.parameters(
      (4096, 128, False, (2048, 4096)), (2304, 96, False, (1152, 2304)),
      (2048, 128, False, (2048, 2048)), (4096, 64, False, (2048, 2048)),
      (4097, 128, False, (1408, 2048)), (2304, 128, True, (768, 2048)))
  def test_blocks_of_a_full_mask(self, tokens, width, backward, expected):
    cut = tuned.choose(shapes(tokens, 8, width, jnp.bfloat16), BlockSizes(), masks.full(),
                       backward=backward)
    self.assertEqual((cut.block_q, cut.block_kv), expected)
    self.assertEqual(cut.tile_q, cut.block_q)

  @parameterized.parameters(128, 192)
  def test_tokens_go_and_come_back(self, width):
    form = feed.Tokens(2, 256, 4, width, 2, 128, lambda i, j: i)
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
    mask = masks.custom(lambda b, h, q, k, table: table[q] <= k, np.zeros(256, np.int32))
    self.refusal(NotImplementedError, "masks.custom with operands.*blockwise", mask=mask)

  def test_blocks_that_are_not_tiles(self):
    with self.assertRaisesRegex(ValueError, "block_sizes.block_q: got 100.*multiple of 128"):
      tuned.choose(shapes(256, 2, 64), BlockSizes(block_q=100), masks.causal(), backward=False)

  def test_blocks_that_do_not_fit(self):
    operands = shapes(8192, 8, 256)
    cut = tuned.choose(operands, BlockSizes(8192, 8192), masks.causal(), backward=False)
    with self.assertRaisesRegex(ValueError, "MiB of vector memory.*smaller block_q"):
      tuned.vmem_limit(BlockSizes(), cut, operands, backward=False)

  @parameterized.product(mask=(masks.full(), masks.causal(), masks.window(100, 0)),
                         width=(64, 128, 256, 512, 1024), backward=(False, True))
  def test_blocks_that_are_chosen_fit(self, mask, width, backward):
    operands = shapes(32768, 2, width)
    cut = tuned.choose(operands, BlockSizes(), mask, backward=backward)
    self.assertLess(tuned.vmem_limit(BlockSizes(), cut, operands, backward=backward), 64 * 2**20)

  def test_schedules_that_do_not_fit(self):
    x = jax.ShapeDtypeStruct((1, 65536, 1, 64), jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, "128 queries.*KiB of scalar memory.*larger block_q"):
      jax.eval_shape(lambda x: attention(
          x, x, x, mechanism="flash_attn2", metadata=TPU, block_sizes=BLOCKS), x)

  def test_auto_never_falls_to_quadratic_memory(self):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float16)
    self.assertEqual(explain(x, x, x, metadata=TPU).chosen, "blockwise")


def shapes(tokens, heads, width, dtype=jnp.float32):
  """Operands without numbers."""
  x = jax.ShapeDtypeStruct((1, tokens, heads, width), dtype)
  return Operands(x, x, x)


if __name__ == "__main__":
  absltest.main()
