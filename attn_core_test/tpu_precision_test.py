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

from attn_core import (Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV2, attention,
                       ragged_page_attention_v2)
from attn_core.caches import dense, pages
from attn_core_test import decode_cases, sampling, tpu_cases

TPU = OperationMetadata(platform="tpu")
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
      [("highest", "bfloat16", 2)],
      *itertools.product(CONFIGURED, ("bfloat16", "float32", "int8"), (1, 2, 40))))
  def test_decode(self, configured, dtype, tokens):
    """Decodes few rows, or with 40 tokens many; int8: that of the cache."""
    dtype, held = ("bfloat16", "int8") if dtype == "int8" else (dtype, dtype)
    query = jax.ShapeDtypeStruct((2, tokens, 8, 128), dtype)
    cache = jax.eval_shape(lambda: dense.init(2, 256, (4, 128), dtype=held))
    self.check(configured, lambda query, cache: attention(
        query, None, None, cache_view=cache, metadata=TPU, **decode_cases.MODE).attention_outputs,
               query, cache)

  @parameterized.parameters(*sampling.with_slow(
      [("highest", "bfloat16", 256)],
      *itertools.product(CONFIGURED, ("bfloat16", "float32"), (4, 256))))
  def test_pages(self, configured, dtype, tokens):
    """Attends to the pages of 4 requests, with 4 tokens by few rows."""
    array = jax.ShapeDtypeStruct
    cache = jax.eval_shape(lambda: pages.init(PagesV2, 8, 16, Heads(2, 128, 128), dtype))
    metadata = PagesMetadata(*(array(x, "int32") for x in ((4, 8), (4,), (5,))))
    self.check(configured, lambda *a: ragged_page_attention_v2(
        *a, PagedOptions(metadata=TPU)).attention_outputs,
               array((tokens, 16, 128), dtype), cache, metadata)


if __name__ == "__main__":
  absltest.main()
