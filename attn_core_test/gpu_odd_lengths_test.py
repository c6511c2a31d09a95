# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The block-wise kernels for Hopper at lengths that fill no block, with several rows and heads.

Results, lse included, against the oracle in interpret mode on a CPU; lowered for CUDA at each pair
of lengths. See gpu_test.
"""

import os

# See gpu_test.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from attn_core import masks
from attn_core_test import gpu_cases, gpu_faults, gpu_interpret, sampling
from attn_core_test.gpu_cases import Case
from attn_core_test.gpu_interpret import interpret
from attn_core_test.odd_lengths_cases import LENGTHS, PAIRS

BIASES = {
    "none": None, "pairs": lambda T, S: (1, 2, T, S), "pairs_per_row": lambda T, S: (2, 1, T, S),
    "keys": lambda T, S: (1, 2, 1, S), "queries": lambda T, S: (2, 1, T, 1)}
# Interpreted: (T, S); those with 1000 and 2047 take minutes.
VALUES = tuple(itertools.product(LENGTHS[:4], LENGTHS[:4])) + (
    (1000, 1000), (2047, 77), (77, 2047), (2047, 1), (1, 1000))
QUICK = 77, 64  # one row of the batch
QUICK_LOWERED = ("77_200_pairs_float32", "2047_1000_pairs_per_row_bfloat16")


def case_of(T, S, bias="none", dtype="float32"):
  """Returns a call with two heads in two rows, causal from the end of the keys."""
  shape = BIASES[bias]
  extras = {} if shape is None else {"bias": (shape(T, S), dtype)}
  return Case(masks.offset(masks.causal(), S - T), B=2, T=T, S=S, H=2, K=1, extras=extras)


@gpu_interpret.interprets
class ValuesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (f"{T}_{S}", T, S) for T, S in VALUES
      if (T, S) == QUICK or sampling.chosen(f"odd lengths {T} {S}"))
  def test_results_and_gradients(self, T, S):
    case = case_of(T, S)
    if (T, S) == QUICK:
      case = case._replace(B=1)
    operands = case.operands()
    residuals, cotangents, expected = case.derivatives(operands)
    def run(operands, residuals, cotangents):
      return case.forward(operands), case.backward(operands, residuals, cotangents)
    found, gradients = interpret(run, operands, residuals, cotangents)
    tolerance = gpu_cases.TOLERANCE[case.dtype]
    for name, x, y, atol in (
        ("out", found[0], residuals.out, tolerance), ("lse", found[1], residuals.lse, 1e-5),
        *((name, gradients[name], y, tolerance) for name, y in expected.items())):
      x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
      size = max(1.0, np.abs(np.where(np.isfinite(y), y, 0)).max())
      np.testing.assert_allclose(x, y, rtol=0, atol=atol * size, err_msg=name)


def lowered():
  """Returns (T, S, bias, dtype) of every pair of lengths, by name."""
  found = {}
  for (T, S), bias, dtype in itertools.product(PAIRS, BIASES, ("float32", "bfloat16")):
    found[f"{T}_{S}_{bias}_{dtype}"] = T, S, bias, dtype
  return found


class LowerTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name, *lowered()[name]) for name in sampling.names(lowered(), QUICK_LOWERED))
  def test_for_cuda(self, T, S, bias, dtype):
    case = case_of(T, S, bias, dtype)
    residuals = case.residual_shapes
    def run(*arrays):
      return case.forward(arrays[0]), case.backward(*arrays)
    # One for the bias, unless it has one number for all keys or none.
    kernels = 3 + (bias != "none" and case.shapes.bias.shape[3] > 1)
    self.assertEqual(
        gpu_faults.check(run, (case.shapes, residuals, residuals)), kernels)


if __name__ == "__main__":
  absltest.main()
