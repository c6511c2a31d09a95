# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every property of every case for every implementation in the table that runs on this machine.

Float64 operands show that the formulas are the oracle's (1e-9); narrower ones
show the rounding. Block sizes are tiny and odd, so that every case crosses blocks.
"""

import functools
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.tree_util import Partial
import numpy as np

from attn_core import AttentionMechanism, BlockSizes, OperationMetadata, attention, table
from attn_core.caches import dense, quantize
from attn_core_test import property_cases, sampling
from attn_core_test.property_cases import (BY_NAME, CASES, IMPLEMENTATIONS, NAMES, ON_GPU,
                                           PALLAS_TPU, TOLERANCES)

jax.config.update("jax_enable_x64", True)

BLOCKS = BlockSizes(4, 3, 5, 4, 1)


def call(case, mechanism, platform):
  """A function of the differentiable arguments -> (output, lse), by the door."""
  return _call(case.name, mechanism, platform)


@functools.cache  # the same object, so that jax.jit compiles it once
def _call(name, mechanism, platform):
  case = BY_NAME[name]
  arguments = dict(mechanism=mechanism, return_lse=True,
                   metadata=OperationMetadata(platform=platform))
  if "block_sizes" in table.TABLE[mechanism, platform].general.features:
    # Blocks of TPU kernels come in multiples of 128.
    arguments["block_sizes"] = BlockSizes() if (mechanism, platform) == PALLAS_TPU else BLOCKS
  def run(arrays):
    output = attention(**property_cases.arguments(case, arrays), **arguments)
    return output.attention_outputs, output.lse
  return run


def precise(mechanism, platform):
  """(widest dtype, tolerance): float64 shows that formulas agree; float32 where it must do."""
  if "float64" in table.TABLE[mechanism, platform].general.features:
    return "float64", 1e-9
  return "float32", 5e-5


def supported(case, mechanism, platform, dtype=None) -> bool:
  """Returns whether the implementation computes the case; bad_input_test has the refusals."""
  dtype = dtype or precise(mechanism, platform)[0]
  arrays = jax.eval_shape(lambda: property_cases.operands(case, dtype))
  try:
    jax.eval_shape(call(case, mechanism, platform), arrays)
  except NotImplementedError:
    return False
  return True


# Interpreting TPU kernels is slow, and tpu_test has most features, over several blocks: here are
# the others, and all together.
ON_TPU = ("everything", "causal_gqa", "prefix_or_causal", "not_chunk", "layout_thd_other_keys",
          "bias_and_mask", "sinks_several_empty_rows", "dropout_at_positions", "unnormalized",
          "segments_interleaved", "one_query_one_key", "window_both_sides", "offset_per_row",
          "soft_cap", "score_mod_added")

# Decoding has decode_test; here are masks and layouts that it has not.
DECODE = ("autoregressive_decodeattn", "cpu")
ON_DECODE = ("causal_gqa", "one_query_bottom_right", "window_both_sides", "chunk",
             "segments_with_padding", "dense_mask_per_head", "custom_predicate", "unnormalized",
             "sinks_several_empty_rows", "layout_thd_other_keys")
SOME = {PALLAS_TPU: ON_TPU, DECODE: ON_DECODE}

PAIRS = tuple((f"{case.name}_{mechanism}", case.name, mechanism, platform)
              for case in CASES for mechanism, platform in NAMES
              if case.name in SOME.get((mechanism, platform), BY_NAME))


def jitted(function, platform):
  """Returns the compiled function; XLA optimizes emulated kernels of other chips little."""
  return jax.jit(function, compiler_options=None if platform == "cpu" else sampling.LEAST)


def everything(run, case, dtype, tested=True):
  """Value, gradient and jvp of arrays -> (output, lse)."""
  return property_cases.everything(run, property_cases.operands(case, dtype), tested=tested)


@functools.cache
def expected(name: str, differentiable: bool):
  """Computes `everything` by the oracle in float64."""
  case = BY_NAME[name]
  want = property_cases.reference(case)
  return everything(want if differentiable else Partial(_zero_lse, want), case, "float64",
                    tested=False)


class InterpretedTestCase(parameterized.TestCase):
  """TPU kernels run on this machine, too."""

  def setUp(self):
    super().setUp()
    self.enterContext(pltpu.force_tpu_interpret_mode())


class PropertiesTest(InterpretedTestCase):

  @parameterized.named_parameters(*PAIRS)
  def test_value_gradient_and_jvp_equal_the_oracle(self, name, mechanism, platform):
    case = BY_NAME[name]
    if not supported(case, mechanism, platform):
      self.skipTest("refused by name")
    dtype, tolerance = precise(mechanism, platform)
    differentiable = "lse_gradient" in table.TABLE[mechanism, platform].general.features
    arrays = property_cases.operands(case, dtype)
    run = call(case, mechanism, platform)
    if not differentiable:
      lse = jitted(run, platform)(arrays)[1]
      np.testing.assert_allclose(lse, expected(name, True)["value"][1],
                                 rtol=tolerance, atol=tolerance)
      run = _without_lse(run, case, mechanism, platform)
    got = everything(run, case, dtype, tested=platform == "cpu")
    flat, _ = jax.tree_util.tree_flatten_with_path(got)
    for (path, x), y in zip(flat, jax.tree.leaves(expected(name, differentiable)),
                            strict=True):
      np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance,
                                 err_msg=jax.tree_util.keystr(path))

  @parameterized.named_parameters(*(
      (f"{pair[0]}_{dtype}", *pair[1:], dtype) for pair in PAIRS for dtype in TOLERANCES
      if pair[1] in ("causal_gqa", "everything", "window_both_sides", "sinks_several_empty_rows",
                     "soft_cap", "score_mod")))
  def test_rounding(self, name, mechanism, platform, dtype):
    case = BY_NAME[name]
    if not supported(case, mechanism, platform, dtype):
      self.skipTest("refused by name")
    arrays = property_cases.operands(case, dtype)
    if dtype != "float32" and mechanism == "sdpa":
      self.skipTest("refuses an lse of 16 bits by name")
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
    out, lse = jitted(call(case, mechanism, platform), platform)(arrays)
    want, want_lse = property_cases.evaluate(property_cases.reference(case), wide)
    self.assertEqual(out.dtype, dtype)
    self.assertEqual(lse.dtype, jnp.float32)
    quantile, largest = TOLERANCES[dtype]
    error = np.abs(np.asarray(out, np.float64) - want) / (1 + np.abs(want))
    self.assertLess(np.quantile(error, 0.9), quantile)
    self.assertLess(error.max(), largest)
    empty = ~np.isfinite(want_lse)
    np.testing.assert_array_equal(~np.isfinite(lse), empty)
    self.assertLess(np.abs(np.where(empty, 0, lse - want_lse)).max(), largest)

  @parameterized.named_parameters(*(
      pair for pair in PAIRS if pair[1] in ("everything", "causal_gqa", "score_mod")))
  def test_repeats_bit_for_bit_and_jit_changes_nothing(self, name, mechanism, platform):
    case = BY_NAME[name]
    if not supported(case, mechanism, platform):
      self.skipTest("refused by name")
    run = call(case, mechanism, platform)
    arrays = property_cases.operands(case, "float32")
    compiled = jitted(run, platform)
    first, second, eager = compiled(arrays), compiled(arrays), run(arrays)
    for a, b, c in zip(first, second, eager):
      np.testing.assert_array_equal(a, b)
      np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-6)
    if "lse_gradient" in table.TABLE[mechanism, platform].general.features:
      gradient = jitted(jax.grad(lambda arrays: run(arrays)[0].sum()), platform)
      jax.tree.map(np.testing.assert_array_equal, gradient(arrays), gradient(arrays))

  @parameterized.named_parameters(*[(f"{m}_{p}", m, p) for m, p in table.TABLE])
  def test_every_table_entry_is_one_of_the_implementations(self, mechanism, platform):
    implementation = table.TABLE[mechanism, platform].general
    if implementation.run in ON_GPU or " " in platform:  # of a compute capability
      self.skipTest("needs an NVIDIA GPU")
    if {"pages", "latent"} & implementation.features:
      self.skipTest("reads pages, as in paged_test, or latent rows, as in latent_test")
    if not implementation.shards_sequence:  # see ring_test.MeshTest.test_one_shard_is_flash
      self.assertIn(implementation.run, IMPLEMENTATIONS)
    case = BY_NAME["causal_gqa"]
    arrays = property_cases.operands(case, "float32")
    got = attention(**arrays, mechanism=AttentionMechanism(mechanism),
                    metadata=OperationMetadata(platform=platform)).attention_outputs
    want, _ = property_cases.evaluate(property_cases.reference(case), arrays)
    np.testing.assert_allclose(got, want, atol=2e-5)


def _zero_lse(run, arrays):
  out, lse = run(arrays)
  return out, jnp.zeros_like(lse)


def _without_lse(run, case, mechanism, platform):
  """The same call without `return_lse`, for implementations whose lse cannot be differentiated."""
  def only_out(arrays):
    out = attention(**property_cases.arguments(case, arrays), mechanism=mechanism,
                    metadata=OperationMetadata(platform=platform)).attention_outputs
    return out, jnp.zeros(jax.eval_shape(run, arrays)[1].shape)
  return only_out


# What rounding may cost: at most 1/254, 1/28 and 1/14 of the largest number of a token's head (with
# 4 bits of its 32 columns), and so of an output about as much of the largest keys and values.
QUANTIZED = {"int8": 0.03, "float8_e4m3fn": 0.2, "int4": 0.5}


class QuantizedTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("even_window", dtype) for dtype in QUANTIZED],
      *itertools.product(("even_causal", "even_full"), QUANTIZED)))
  def test_a_cache_equals_the_oracle_on_what_it_holds(self, name, dtype):
    case, = (x for x in property_cases.EVEN_CASES if x.name == name)
    arrays = property_cases.operands(case, jnp.float32)
    def run(arrays):
      cache = dense.init(case.shape.B, case.shape.S, (case.shape.K, case.shape.D), dtype=dtype)
      cache = dense.append(cache, arrays["key"], arrays["value"])
      found = attention(arrays["query"], None, None, cache_view=cache, return_lse=True,
                        **case.arguments)
      held = {x: quantize.dequantize(*quantize.quantize(arrays[x], dtype))
              for x in ("key", "value")}
      return (found.attention_outputs, found.lse), {**arrays, **held}
    got, held = jax.jit(run, compiler_options=sampling.LEAST)(arrays)
    reference = property_cases.reference(case)
    for x, y in zip(got, property_cases.evaluate(reference, held)):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    whole = property_cases.evaluate(reference, arrays)
    self.assertLess(abs(got[0] - whole[0]).max(), QUANTIZED[dtype])


@parameterized.named_parameters(*[(m, m, p) for m, p in NAMES])
class LeakageTest(InterpretedTestCase):
  """Nothing reaches a query but what it sees."""

  def run_case(self, name, mechanism, platform, **change):
    case = BY_NAME[name]
    arrays = property_cases.operands(case, "float32")
    for key, f in change.items():
      arrays[key] = f(arrays[key])
    return arrays, jitted(call(case, mechanism, platform), platform)(arrays)

  def test_rows_of_the_batch_do_not_mix(self, mechanism, platform):
    for name in ("segments_with_padding", "dense_mask_per_head", "padding_mask"):
      _, (out, lse) = self.run_case(name, mechanism, platform)
      with_nan = lambda x: x.at[0].set(jnp.nan)
      _, (with_nan_out, with_nan_lse) = self.run_case(
          name, mechanism, platform, query=with_nan, key=with_nan, value=with_nan)
      np.testing.assert_array_equal(out[1], with_nan_out[1])
      np.testing.assert_array_equal(lse[1], with_nan_lse[1])

  @staticmethod
  def poisons():
    return [(array, number) for array in ("key", "value") for number in (np.nan, np.inf, -np.inf)]

  def test_hidden_keys_that_are_not_finite_do_nothing(self, mechanism, platform):
    for name, hidden in (("causal_gqa", 9), ("padding_mask", 11), ("segments_with_padding", 12)):
      sees = property_cases.visible(BY_NAME[name])
      _, (out, lse) = self.run_case(name, mechanism, platform)
      for array, number in self.poisons():
        _, (got, got_lse) = self.run_case(
            name, mechanism, platform, **{array: lambda x: x.at[:, hidden].set(number)})
        clean = ~sees[..., hidden]  # [B, H, T]
        np.testing.assert_array_equal(np.where(clean, lse, 0), np.where(clean, got_lse, 0))
        rows = clean.transpose(0, 2, 1)[..., None]
        np.testing.assert_array_equal(np.where(rows, out, 0), np.where(rows, got, 0))
        self.assertTrue(np.isnan(np.where(rows, np.nan, got)).all(),
                        "a query that sees what is not finite must show it")

  def test_padding_gets_no_gradient_and_gives_none(self, mechanism, platform):
    case = BY_NAME["padding_mask"]
    arrays = property_cases.operands(case, "float32")
    arrays["value"] = arrays["value"].at[0, 5:].set(jnp.nan)
    arrays["key"] = arrays["key"].at[0, 5:].set(jnp.inf)
    run = lambda arrays: attention(**case.arguments, **arrays, mechanism=mechanism,
                                   metadata=OperationMetadata(platform=platform))
    loss = lambda x: (run(x).attention_outputs**2).sum()
    gradients = jitted(jax.grad(loss), platform)(arrays)
    for name, gradient in gradients.items():
      self.assertTrue(np.isfinite(gradient).all(), name)
      if name in ("key", "value"):
        np.testing.assert_array_equal(gradient[0, 5:], 0)

  def test_huge_logits(self, mechanism, platform):
    _, (out, lse) = self.run_case("causal_gqa", mechanism, platform,
                                  query=lambda x: x * 1e4, key=lambda x: x * 1e4)
    self.assertTrue(np.isfinite(out).all())
    self.assertTrue(np.isfinite(lse).all())

  def test_empty_rows_are_zero_with_zero_gradients(self, mechanism, platform):
    case = BY_NAME["dense_mask_per_head"]
    arrays = property_cases.operands(case, "float32")
    def row(arrays):
      out = attention(**case.arguments, **arrays, mechanism=mechanism,
                      metadata=OperationMetadata(platform=platform)).attention_outputs[:, 2]
      return out.sum(), out
    gradient, out = jitted(jax.grad(row, has_aux=True), platform)(arrays)
    np.testing.assert_array_equal(out, 0)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), gradient)


# Arguments that vmap maps over, by case.
MAPPED = (("causal_gqa", ("query", "key", "value")), ("segments_with_padding", ("query",)),
          ("everything", ("bias", "softmax_aux")), ("everything", ("query", "value")),
          ("custom_predicate", ("key",)), ("score_mod_added", ("slopes", "per_key")),
          ("score_mod", ("odd", "query")), ("score_mod_tables", ("grid", "key")))
ON_TPU_MAPPED = sampling.with_slow(MAPPED[1:3], MAPPED[0], *MAPPED[3:])


class VmapTest(InterpretedTestCase):

  @parameterized.named_parameters(*(
      (f"{case}_{'_'.join(mapped)}_{mechanism}", case, mapped, mechanism, platform)
      for case, mapped in MAPPED for mechanism, platform in NAMES
      if (mechanism, platform) != PALLAS_TPU or (case, mapped) in ON_TPU_MAPPED))
  def test_equals_a_loop(self, name, mapped, mechanism, platform):
    """In value and gradient."""
    case = BY_NAME[name]
    run = call(case, mechanism, platform)
    if not supported(case, mechanism, platform):
      self.skipTest("refused by name")
    if "lse_gradient" not in table.TABLE[mechanism, platform].general.features:
      run = _without_lse(run, case, mechanism, platform)
    dtype, tolerance = precise(mechanism, platform)
    arrays = property_cases.operands(case, dtype)
    stacked = {k: jnp.stack([x, 0.5 * x, -x]) if k in mapped else x for k, x in arrays.items()}
    axes = ({k: 0 if k in mapped else None for k in arrays},)
    weights = [jnp.ones(x.shape) for x in jax.eval_shape(run, arrays)]
    scalar = lambda x: property_cases.loss(run, weights)(x)[0]
    both = jax.value_and_grad(scalar)
    got = jitted(jax.vmap(both, axes), platform)(stacked)
    alone = jitted(both, platform)
    for i in range(3):
      one = alone({k: x[i] if k in mapped else x for k, x in stacked.items()})
      jax.tree.map(lambda x, y: np.testing.assert_allclose(x[i], y, rtol=tolerance,
                                                           atol=tolerance), got, one)
    total = jitted(jax.grad(lambda x: jax.vmap(scalar, axes)(x).sum()), platform)(stacked)
    for k, x in total.items():
      want = got[1][k] if k in mapped else got[1][k].sum(0)
      np.testing.assert_allclose(x, want, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
  absltest.main()
