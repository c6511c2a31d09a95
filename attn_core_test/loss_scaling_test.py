# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients in float16 are finite where they fit it, for cotangents as large as loss scaling's.

dP and dS are then beyond 65,504, the largest number of float16, while the gradients, which are dS
times the softmax scale times keys or queries, are not.
"""

import os

# See gpu_test.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from attn_core import attention
from attn_core.types import DIFFERENTIABLE
from attn_core_test import gpu_cases, gpu_interpret, sampling
from attn_core_test.gpu_cases import Case

LOSS_SCALE = 2048  # a power of two: gradients are that many times as large
VALUES = 8  # times normal numbers
_DROPOUT = {"spec": {"dropout_prob": 0.3}, "extras": {"dropout_key": ((1, 2), "uint32")}}
CASES = {
    "narrow": Case(T=140, H=2, K=1, dtype="float16"),
    "shared_keys": Case(T=140, H=2, K=1, D=192, E=128, dtype="float16"),
    "dropout": Case(T=140, dtype="float16", **_DROPOUT),
}


def derivatives(case):
  """Returns (operands, residuals, cotangents, expected gradients), with `LOSS_SCALE`."""
  operands = case.operands()
  operands = operands._replace(value=operands.value * VALUES)
  residuals, cotangents, expected = case.derivatives(operands)
  cotangents = jax.tree.map(lambda x: x * LOSS_SCALE, cotangents)
  d_weights = np.abs(np.einsum("bthe,bshe->bhts", *(
      np.repeat(np.float64(x), case.H // x.shape[2], 2)
      for x in (cotangents.out, operands.value)))).max()
  assert d_weights > 1e5, d_weights
  return operands, residuals, cotangents, {
      name: np.asarray(x) * LOSS_SCALE for name, x in expected.items()}


class LossScalingTest(parameterized.TestCase):

  def compare(self, found, expected):
    for name, y in expected.items():
      x, y = np.asarray(found[name], np.float64), np.asarray(y, np.float64)
      largest = np.abs(y).max()
      self.assertLess(largest, 65504, name)
      np.testing.assert_allclose(x / largest, y / largest, rtol=0,
                                 atol=gpu_cases.TOLERANCE["float16"], err_msg=name)

  @parameterized.named_parameters((name, name) for name in sampling.names(CASES, ("narrow",)))
  @gpu_interpret.interprets
  def test_on_a_gpu(self, name):
    operands, residuals, cotangents, expected = derivatives(CASES[name])
    self.compare(gpu_interpret.interpret(CASES[name].backward, operands, residuals, cotangents),
                 expected)

  @parameterized.parameters("blockwise", "autoregressive_decodeattn")
  def test_in_plain_xla(self, mechanism):
    case = CASES["narrow"]
    operands, _, cotangents, expected = derivatives(case)
    names = [name for name in DIFFERENTIABLE if name in expected]
    def run(*arrays):
      output = attention(*arrays, mechanism=mechanism, return_lse=True)
      return output.attention_outputs, output.lse
    pull = jax.jit(lambda arrays, cotangents: jax.vjp(run, *arrays)[1](cotangents))
    found = pull([getattr(operands, name) for name in names], tuple(cotangents))
    self.compare(dict(zip(names, found)), expected)


if __name__ == "__main__":
  absltest.main()
