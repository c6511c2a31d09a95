# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The TPU kernel over dense caches: interpreted against the oracle, and compiled ahead of time.

Interpret mode starts from memory full of NaN and watches for races between transfers and
computation. Slots of a cache that may not be read hold NaN.
"""

import itertools
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import OperationMetadata, attention, explain
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import dense, quantize
from attn_core.kernels.tpu.ragged import common, decode as decode_tpu
from attn_core.types import BlockSizes, cdiv
from attn_core_test import decode_cases, sampling, tpu_cases
from attn_core_test.decode_cases import Case
from attn_core_test.tpu_interpret import counted, interpreted

TPU = OperationMetadata(platform="tpu")
ROWS = decode_cases.ON_TPU
# Every dtype; the other rows are slow.
CHOSEN = sampling.names(ROWS, ("lengths_starts_window_sinks", "several_queries_16_bits", "int8"))
# More programs compiled for every chip: (K, group, D), dtypes of query and cache, tokens.
SWEPT = [
    ((16, 1, 128), "bfloat16", "int8", 1), ((8, 4, 256), "bfloat16", "int8", 2),
    ((6, 4, 128), "bfloat16", "int8", 2), ((8, 4, 128), "float32", "int8", 2),
    ((8, 4, 64), "bfloat16", "float8_e4m3fn", 2), ((8, 8, 128), "bfloat16", None, 8),
    ((8, 4, 128), "bfloat16", "int8", 64),
    # The most queries that are not refused; see `RefusalTest`.
    ((8, 8, 512), "float32", None, 48), ((32, 1, 512), "bfloat16", None, 32)]


def decoded(case: Case, operands, cache):
  return decode_cases.from_cache(case, operands, cache, metadata=TPU)


class InterpretTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(False))  # decode_cases enables 64 bits

  @parameterized.parameters(*CHOSEN)
  def test_equals_the_definition(self, name):
    case, dtype, held, transfers = ROWS[name]
    operands, cache, read = decode_cases.with_holes(case, dtype, held)
    with interpreted(transfers):
      output = jax.block_until_ready(
          jax.jit(lambda *a: decoded(case, *a))(operands, cache))
    tolerances = (1.5e-2 if dtype == "bfloat16" else 5e-6), 2e-5
    with jax.enable_x64(True):
      expected = decode_cases.defined(case, {
          name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in read.items()})
    for x, y, most in zip(output, expected, tolerances):
      x, y = np.asarray(x, np.float64), np.asarray(y)
      np.testing.assert_array_equal(x == -np.inf, y == -np.inf)
      np.testing.assert_allclose(x, y, atol=most)

  @parameterized.parameters((2, 4, -0.4, 4.0, 1e-5), (40, 4, -0.4, None, 1e-5),
                            (2, 1, -0.4, None, 5e-5))
  def test_a_mask_of_every_head_and_a_negative_scale(self, tokens, key_heads, scale, cap, most):
    """Checks groups of heads that see differently, and logits that fall where products rise."""
    # With few rows, several groups in one round of a loop over them, and several rounds.
    self.enter_context(mock.patch.object(common, "FEW_ROWS_GROUPS", 2))
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, length, heads, 16)), jnp.float32)
                         for length, heads in ((tokens, 2 * key_heads), *[(130, key_heads)] * 2))
    if key_heads == 1:  # all logits are so low that relative to 0 every weight would be 0
      query, key = query.at[..., 0].set(16), key.at[..., 0].set(20)
    mask = rng.random((1, 2 * key_heads, tokens, 130)) < 0.6
    run = lambda mechanism, **arguments: jax.jit(lambda *x: attention(
        *x, mask=mask, causal=False, softmax_scale=scale, logits_soft_cap=cap,
        mechanism=mechanism, return_lse=True, **arguments))(query, key, value)
    with interpreted():
      got = jax.block_until_ready(run("autoregressive_decodeattn", mode="__autoregressive__",
                                      metadata=TPU))
    want = run("vanilla")
    for name in ("attention_outputs", "lse"):
      np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=most)

  def test_a_scale_that_is_nan_reaches_what_sees_it(self):
    case, dtype, held, transfers = ROWS["int8"]
    operands, cache, _ = decode_cases.with_holes(case._replace(lengths=(50, 77), S=80), dtype, held)
    run = lambda metadata: jax.jit(lambda query, cache: attention(
        query, None, None, cache_view=cache, metadata=metadata, return_lse=True,
        **case.arguments)[:4])
    on_tpu, on_cpu = run(TPU), run(OperationMetadata(platform="cpu"))
    for name in ("key_scale", "value_scale"):
      wrong = cache._replace(**{name: getattr(cache, name).at[0, 49, 1].set(jnp.nan)})
      with interpreted(transfers):
        got = jax.block_until_ready(on_tpu(operands["query"], wrong))
      nan = np.isnan(on_cpu(operands["query"], wrong)[0])
      self.assertEqual(nan.mean(), 1 / 8)
      np.testing.assert_array_equal(np.isnan(got[0]), nan)

  def test_the_same_bits_in_any_batch_and_only_live_keys_move(self):
    """Checks that at 4k tokens at most 5% more bytes move than those of visible keys and values."""
    case = Case((4050, 4000), S=4096, H=2, K=2, D=128, E=128, block=1024)
    operands, cache, _ = decode_cases.with_holes(case, "float32", None)
    with counted() as moved:
      attend = jax.jit(lambda query, cache: decoded(case, {"query": query}, cache))
      def run(query, cache):
        found = jax.block_until_ready(attend(query, cache))
        jax.effects_barrier()
        size, moved[:] = sum(moved), []
        return *found, size
      both = run(operands["query"], cache)
      turn = lambda tree: jax.tree.map(lambda x: x[::-1], tree)
      turned = turn(cache)._replace(lengths=jnp.array([4000, 0], jnp.int32))
      alone = run(turn(operands["query"]), turned)
    token = 2 * 2 * 128 * 4
    self.assertBetween(both[2], (4050 + 4000) * token, 1.05 * (4050 + 4000) * token)
    self.assertBetween(alone[2], 4000 * token, 1.05 * 4000 * token)
    for i in range(2):
      np.testing.assert_array_equal(alone[i][0], both[i][1])
    self.assertFalse(alone[0][1].any())


class RefusalTest(parameterized.TestCase):

  def why(self, tokens, heads, width, dtype, latent=None):
    """Returns why a call is refused, or None; of latent rows if their width is given."""
    key_heads, group = heads
    shape = lambda *sizes: jax.ShapeDtypeStruct((8, *sizes), dtype)
    key = shape(4096, key_heads, width)
    value = shape(4096, key_heads, 0) if latent else key
    return decode_tpu.unsupported_memory(shape(tokens, key_heads * group, width), key, value,
                                         BlockSizes(), (False, latent))

  @parameterized.parameters(
      (48, (8, 8), 512, "float32"), (32, (32, 1), 512, "bfloat16"),
      (16, (32, 2), 512, "bfloat16"), (8, (32, 4), 512, "bfloat16"))
  def test_as_many_queries_as_the_vector_memory_holds(self, most, heads, width, dtype):
    """The cure of a refusal is taken, and one query more is refused."""
    for tokens in (most + 1, 64):
      words = self.why(tokens, heads, width, dtype)
      self.assertRegex(words, rf"^{tokens} queries of .* bytes of vector memory, of which it has "
                              rf"{51 * 2**20}: give at most {most} queries at a time$")
    self.assertIsNone(self.why(most, heads, width, dtype))

  def test_more_rows_than_the_scalar_memory_holds(self):
    query, key = (jax.ShapeDtypeStruct((2**15, n, 4, 128), jnp.bfloat16) for n in (1, 128))
    said = explain(query, key, key, causal=False, metadata=TPU)
    self.assertEqual(said.chosen, "flash_attn2")
    self.assertRegex(str(said), r"decode.xla, not by decode.tpu: 32768 batch rows.*fewer rows")

  def test_one_query_of_too_many_wide_heads(self):
    self.assertIsNone(self.why(1, (16, 1), 512, "float32"))
    self.assertRegex(self.why(1, (32, 1), 512, "float32"), "give fewer or narrower heads$")
    self.assertIsNone(self.why(1, (1, 128), 640, "bfloat16", 512))

  def test_explain_says_it(self):
    key = jax.ShapeDtypeStruct((8, 4096, 8, 512), jnp.float32)
    of = lambda tokens: next(v for v in explain(
        jax.ShapeDtypeStruct((8, tokens, 64, 512), jnp.float32), key, key, query_offset=0,
        mechanism="autoregressive_decodeattn", metadata=TPU).verdicts
        if v.mechanism == "autoregressive_decodeattn" and "tpu" in str(v))
    self.assertIn("give at most 48 queries at a time", str(of(49)))
    self.assertNotIn("vector memory", str(of(48)))


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):

  def compile(self, chip, attend, *shapes):
    place = SingleDeviceSharding(static_profile.devices(chip)[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    with jax.enable_x64(True):  # the kernels use 32 bits all the same
      found = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
    self.assertEqual(found.as_text().count('custom_call_target="tpu_custom_call"'), 1)
    return found

  def compiled(self, chip, shape, dtype, held=None, tokens=2):
    key_heads, group, width = shape
    cache = jax.eval_shape(lambda: dense.init(
        8, 4096, (key_heads, width), dtype=held or dtype))
    query = jax.ShapeDtypeStruct((8, tokens, key_heads * group, width), dtype)
    attend = lambda query, cache: attention(query, None, None, cache_view=cache, metadata=TPU,
                                            **decode_cases.MODE).attention_outputs
    return self.compile(chip, attend, query, cache)

  @parameterized.parameters(*sampling.with_slow([("lengths_starts_window_sinks", 512)],
                                                *itertools.product(ROWS, (1, 512))))
  def test_interpreted_rows(self, name, rows):
    """Compiles what is interpreted above, in rotation for every chip and configuration."""
    case, dtype, held, _ = ROWS[name]
    repeated = cdiv(rows, len(case.lengths))
    case = case._replace(lengths=case.lengths * repeated,
                         starts=case.starts and case.starts * repeated)
    with jax.enable_x64(False):
      operands, cache = jax.eval_shape(lambda: decode_cases.with_holes(case, dtype, held)[:2])
    chip, precision = tpu_cases.compiled_for(f"{name} {rows}")
    with jax.default_matmul_precision(precision):
      self.compile(chip, lambda *a: decoded(case, *a), operands, cache)

  @parameterized.named_parameters(
      ("one_head", "v5e", (1, 1, 64), "bfloat16", None, 1),
      ("v5e", "v5e", (8, 4, 128), "bfloat16", "int8"), ("v5p", "v5p", (1, 8, 128), "bfloat16"),
      ("v6e", "v6e", (6, 2, 128), "bfloat16"), ("tpu7x", "tpu7x", (2, 4, 256), "float32"))
  def test_compiles_without_copies_of_the_cache(self, chip, shape, *rest):
    memory = self.compiled(chip, shape, *rest).memory_analysis()
    if shape[2] % 128 == 0:  # XLA keeps narrower caches with the tokens along the lanes
      self.assertLess(memory.temp_size_in_bytes, memory.argument_size_in_bytes // 20)

  @parameterized.parameters(*sampling.with_slow(
      [("v5e", SWEPT[0])], *(case for case in itertools.product(static_profile.CHIPS, SWEPT)
                             if case != ("v5e", SWEPT[0]))))
  def test_fits_the_vector_memory(self, chip, case):
    """Compiles cases where the keys and values of many heads are in vector memory at once."""
    self.compiled(chip, *case)


if __name__ == "__main__":
  absltest.main()
