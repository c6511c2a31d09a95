# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of the TPU kernels whatever `jax.default_matmul_precision` says.

The compiler for TPUs takes 16-bit operands at the default precision only, and a precision that is
not given inside a kernel is that of the configuration.
"""

import contextlib
import itertools
from typing import Any, Iterator
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax.experimental import pallas as pl

from attn_core_test import sampling, tpu_cases, tpu_decode_test, tpu_paged_test

CONFIGURED = ("bfloat16", "high", "tensorfloat32", "highest", "float32")


def products_of(jaxpr: Any) -> Iterator[tuple[str, Any]]:
  """Yields (dtype of the operands, precision) of every product of a program."""
  is_code = lambda x: hasattr(x, "eqns")
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield equation.invars[0].aval.dtype.name, equation.params["precision"]
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_code):
      yield from products_of(getattr(inner, "jaxpr", inner)) if is_code(inner) else ()


@contextlib.contextmanager
def recorded() -> Iterator[list]:
  """Yields a list to which every kernel that is traced adds its jaxpr."""
  kernels, call = [], pl.pallas_call
  def recording(body, **arguments):
    run = call(body, **arguments)
    def with_arrays(*arrays):
      kernels.append(jax.make_jaxpr(run)(*arrays).jaxpr)
      return run(*arrays)
    return with_arrays
  with mock.patch.object(pl, "pallas_call", recording):
    yield kernels


class PrecisionTest(parameterized.TestCase):

  def check(self, configured, function, *arguments):
    with recorded() as kernels, jax.default_matmul_precision(configured):
      jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    products = set().union(*map(products_of, kernels))
    self.assertNotEmpty(products)
    for dtype, precision in products:
      wanted = {"bfloat16": lax.Precision.DEFAULT, "float32": lax.Precision.HIGHEST}[dtype]
      self.assertEqual(precision, (wanted, wanted), f"{dtype} under {configured}")

  @parameterized.parameters(*sampling.with_slow(
      [("highest", "bfloat16"), ("bfloat16", "causal_odd_length")],
      *itertools.product(CONFIGURED, tpu_cases.CASES)))
  def test_attention(self, configured, name):
    case = tpu_cases.CASES[name]
    def both(arrays):
      out, pull = jax.vjp(case.call, arrays)
      return pull(out)
    self.check(configured, both, case.arrays())

  @parameterized.parameters(*sampling.with_slow(
      [("highest", "several_queries_16_bits")],
      *itertools.product(CONFIGURED, tpu_decode_test.ROWS)))
  def test_decode(self, configured, name):
    with jax.enable_x64(False):  # decode_cases enables 64 bits
      case, dtype, held, _ = tpu_decode_test.ROWS[name]
      operands, cache, _ = tpu_decode_test.setup(case, dtype, held)
      self.check(configured, lambda *a: tpu_decode_test.decoded(case, *a), operands, cache)

  @parameterized.parameters(*sampling.with_slow(
      [("highest", "ragged_16_bits_many_rows")],
      *itertools.product(CONFIGURED, tpu_paged_test.ROWS)))
  def test_pages(self, configured, name):
    with jax.enable_x64(False):
      row = tpu_paged_test.ROWS[name]
      self.check(configured, lambda *a: tpu_paged_test.run(row, *a), *tpu_paged_test.setup(row)[0])


if __name__ == "__main__":
  absltest.main()
