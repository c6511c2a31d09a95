# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lengths that fill no block: results, lse and gradients against the definition.

Every mechanism in XLA, and the block-wise kernels for TPUs: interpreted, and compiled ahead of
time. For those for Hopper see gpu_odd_lengths_test.
"""

import itertools
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import SingleDeviceSharding

from attn_core import attention
from attn_core.benchmark.static import profile as static_profile
from attn_core_test import odd_lengths_cases as cases, sampling
from attn_core_test.tpu_cases import TPU
from attn_core_test.tpu_interpret import interpreted

# Mechanism -> whether its lse has a gradient.
MECHANISMS = {"vanilla": True, "sdpa": False, "blockwise": True, "autoregressive_decodeattn": True}
WIDTH = 8
QUICK = ((200, 77, True), (77, 1000, False))

TPU_WIDTH = 64
# Interpreted: (T, S); those with 1000 and 2047 take minutes.
INTERPRETED = tuple(itertools.product(cases.LENGTHS[:4], cases.LENGTHS[:4])) + (
    (1000, 1000), (2047, 77), (77, 2047), (2047, 1), (1, 1000))
QUICK_INTERPRETED = ((77, 64, False),)
QUICK_COMPILED = ((77, 2047, True),)


def chosen(pairs, quick, kind):
  """Yields (name, T, S, causal) of the cases that run."""
  for (queries, keys), causal in itertools.product(pairs, (True, False)):
    name = f"{queries}_{keys}_{'causal' if causal else 'full'}"
    if (queries, keys, causal) in quick or sampling.chosen(f"{kind} {name}"):
      yield name, queries, keys, causal


class XlaTest(parameterized.TestCase):

  @parameterized.named_parameters(*chosen(cases.PAIRS, QUICK, "XLA"))
  def test_results_and_gradients(self, queries, keys, causal):
    operands = cases.arrays(queries, keys, WIDTH)
    d_out, d_lse = cases.cotangents(queries, keys, WIDTH, causal)
    expected, both, of_out = cases.defined(operands, causal, [d_out, d_lse], [d_out, 0 * d_lse])
    for mechanism, has_gradient in MECHANISMS.items():

      def run(*operands, with_lse=True, mechanism=mechanism):
        output = attention(*operands, mechanism=mechanism, return_lse=with_lse,
                           **cases.arguments(queries, keys, causal))
        return [output.attention_outputs, *([output.lse] if with_lse else [])]

      @jax.jit
      def everything(operands, given, run=run, has_gradient=has_gradient):
        if has_gradient:
          found, pull = jax.vjp(run, *operands)
          return found, pull(given)
        pull = jax.vjp(lambda *x: run(*x, with_lse=False), *operands)[1]
        return run(*operands), pull(given[:1])

      found, gradients = everything(operands, [d_out, d_lse])
      cases.close(found, expected, ("out", "lse"), 3e-6, mechanism)
      cases.close(gradients, both if has_gradient else of_out, cases.NAMES, 1e-5, mechanism)


def tpu_gradients(queries, keys, causal):
  """Returns a function of operands and cotangents -> ([out, lse], [d_query, d_key, d_value])."""
  def run(*operands):
    output = attention(*operands, mechanism="flash_attn2", metadata=TPU, return_lse=True,
                       **cases.arguments(queries, keys, causal))
    return [output.attention_outputs, output.lse]
  def everything(operands, given):
    found, pull = jax.vjp(run, *operands)
    return found, pull(given)
  return jax.jit(everything)


class TpuInterpretTest(parameterized.TestCase):

  @parameterized.named_parameters(*chosen(INTERPRETED, QUICK_INTERPRETED, "interpreted"))
  def test_results_and_gradients(self, queries, keys, causal):
    operands = cases.arrays(queries, keys, TPU_WIDTH)
    given = cases.cotangents(queries, keys, TPU_WIDTH, causal)
    expected, expected_gradients = cases.defined(operands, causal, given)
    with interpreted():
      found = jax.block_until_ready(tpu_gradients(queries, keys, causal)(operands, given))
    cases.close(found[0], expected, ("out", "lse"), 1e-5)
    cases.close(found[1], expected_gradients, cases.NAMES, 1e-5)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class TpuCompileTest(parameterized.TestCase):

  @parameterized.named_parameters(*chosen(cases.PAIRS, QUICK_COMPILED, "compiled"))
  def test_compiles(self, queries, keys, causal):
    chips = tuple(static_profile.CHIPS)
    number = sampling.number_of(f"{queries} {keys} {causal}")
    placement = SingleDeviceSharding(static_profile.devices(chips[number % len(chips)])[0])
    dtype = ("float32", "bfloat16")[number // len(chips) % 2]
    like = lambda x, name: jax.ShapeDtypeStruct(x.shape, name, sharding=placement)
    out, lse = cases.cotangents(queries, keys, TPU_WIDTH, causal)
    operands = [like(x, dtype) for x in cases.arrays(queries, keys, TPU_WIDTH)]
    given = [like(out, dtype), like(lse, "float32")]
    compiled = tpu_gradients(queries, keys, causal).trace(operands, given).lower(
        lowering_platforms=("tpu",)).compile()
    # The forward, the sums of d_out * out, and the backward.
    self.assertEqual(compiled.as_text().count('custom_call_target="tpu_custom_call"'), 3)


if __name__ == "__main__":
  absltest.main()
