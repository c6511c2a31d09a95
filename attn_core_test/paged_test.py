# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages against the dense oracle: output, lse and derivatives."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import PagedOptions, checkpoint_policy, ragged_page_attention_v2
from attn_core_test import sampling
from attn_core_test.paged_cases import BLOCKS, Case, plain, run_pages


class Frozen(dict):
  __hash__ = object.__hash__


RAGGED = Frozen({
    "window_sinks_cap": Case((9, 0, 17, 5), (9, 0, 5, 1), sinks=True, options=PagedOptions(
        sliding_window=(6, 0), logits_soft_cap=1.5, softmax_scale=0.7)),
    "both_sides_large_logits": Case((9, 0, 21), (9, 0, 5), options=PagedOptions(
        sliding_window=(3, 2), causal=False, softmax_scale=30.0)),
    "itself_in_pages_of_one_token": Case((5, 3), (4, 3), page=1, options=PagedOptions(
        sliding_window=(0, 0))),
    "not_causal_one_head": Case((5, 17), (4, 1), H=1, K=1, D=1, options=PagedOptions(causal=False)),
    "unused_rows_odd_pages": Case((13, 1), (7, 1), page=3, unused=3, rest=7, K=1),
    "distribution": Case((20, 11), (1, 5), distribution=(1, 1, 2), unused=2),
})


def run(mechanism, case, query, key, value, sinks):
  """Returns (output, lse) of the mechanism; v3 gets the new tokens as arguments, not in pages."""
  options = case.options._replace(softmax_aux=sinks, block_sizes=BLOCKS, return_lse=True)
  return run_pages(mechanism, case, (query, key, value), options)


def with_gradients(function, case, wanted):
  """Returns a function of arrays: [output, lse, gradients...] of a scalar that uses both."""
  rows = sum(case.queries)  # rows of no request do not count
  weights = lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
  def loss(*arrays):
    found = function(*arrays)
    out, lse = found[0][:rows].astype(jnp.float32), found[1][:, :rows].astype(jnp.float32)
    return (out * weights(out)).sum() + jnp.where(
        lse == -jnp.inf, 0, lse * weights(lse)).sum(), found
  def everything(*arrays):
    (_, found), gradients = jax.value_and_grad(loss, wanted, has_aux=True)(*arrays)
    return [*found, *gradients]
  return everything


def both(function, case, arrays, options=None):
  """Returns [output, lse, gradients...] with respect to every array given."""
  wanted = tuple(i for i, x in enumerate(arrays) if x is not None)
  return jax.jit(with_gradients(function, case, wanted), compiler_options=options)(*arrays)


@functools.cache
def expected_of(name, table):
  case = table[name]
  with jax.enable_x64(True):
    arrays = tuple(None if x is None else x.astype(jnp.float64) for x in case.arrays())
    return [np.asarray(x) for x in both(case.oracle, case, arrays, sampling.LEAST)]


SINGLE = Frozen({
    "window_sinks_cap_mqa": Case((9, 0, 32), (1,) * 3, rest=0, K=1, D=8, sinks=True,
                                 options=PagedOptions(sliding_window=(6, 0), logits_soft_cap=2.0)),
    "one": Case((1,), (1,), rest=0, page=1),
})


class OracleTest(parameterized.TestCase):

  def check(self, mechanism, name, table):
    case = table[name]
    got = both(functools.partial(run, mechanism, case), case, case.arrays())
    rows = sum(case.queries)
    self.assertFalse(np.asarray(got[0][rows:]).any())
    self.assertTrue((np.asarray(got[1][:, rows:]) == -np.inf).all())
    for index, (mine, want) in enumerate(zip(got, expected_of(name, table), strict=True)):
      # Rows of no request are 0, and unused places have gradient 0.
      self.assertFalse(np.isnan(mine).any(), index)
      same = np.isfinite(want)
      np.testing.assert_array_equal(np.asarray(mine)[~same], want[~same])
      scale = max(1.0, np.abs(want[same]).max())
      np.testing.assert_allclose(np.asarray(mine)[same], want[same], rtol=1e-5, atol=5e-6 * scale,
                                 err_msg=str(index))

  @parameterized.parameters(*RAGGED)
  def test_ragged(self, name):
    self.check("v2", name, RAGGED)

  @parameterized.parameters("window_sinks_cap", "unused_rows_odd_pages")
  def test_ragged_that_writes(self, name):
    self.check("v3", name, RAGGED)

  @parameterized.parameters(("bfloat16", 1.5e-2), ("float16", 2e-3))
  def test_16_bits(self, dtype, tolerance):
    case = RAGGED["window_sinks_cap"]._replace(dtype=dtype)
    got = both(functools.partial(run, "v2", case), case, case.arrays())
    for mine, want in zip(got, expected_of("window_sinks_cap", RAGGED), strict=True):
      seen = np.isfinite(want)
      error = np.abs(np.asarray(mine, np.float64) - want)[seen].max()
      self.assertLess(error, tolerance * np.abs(want[seen]).max())

  @parameterized.parameters(*SINGLE)
  def test_page_attention(self, name):
    self.check("v1", name, SINGLE)


class DerivativesTest(absltest.TestCase):

  def test_forward_mode_and_second_derivatives(self):
    """Checks tangents of output, lse and gradients along random directions, in NaN places too."""
    case = RAGGED["window_sinks_cap"]._replace(lengths=(9, 5), queries=(4, 1))
    rng = np.random.default_rng(5)
    directions = [rng.normal(size=x.shape) for x in case.arrays()]
    def tangents(function, arrays):
      everything = with_gradients(function, case, (0, 1, 2, 3))
      moved = tuple(jnp.asarray(d, x.dtype) for d, x in zip(directions, arrays))
      return jax.jit(lambda a, d: jax.jvp(everything, a, d)[1])(arrays, moved)
    got = tangents(functools.partial(run, "v2", case), case.arrays())
    with jax.enable_x64(True):
      want = tangents(case.oracle, tuple(x.astype(jnp.float64) for x in case.arrays()))
    for index, (mine, right) in enumerate(zip(got, want, strict=True)):
      right = np.nan_to_num(np.asarray(right))  # rows of no request, where the oracle has NaN
      np.testing.assert_allclose(mine, right, rtol=2e-5, atol=2e-5 * max(1, np.abs(right).max()),
                                 err_msg=str(index))

  def test_tangents_of_keys_and_values_in_two_arrays(self):
    case = SINGLE["window_sinks_cap_mqa"]
    rng = np.random.default_rng(6)
    # Tangents in unused places are not finite, as these are.
    directions = [np.where(np.isnan(x), np.nan, rng.normal(size=x.shape)) for x in case.arrays()]
    def tangents(function, arrays):
      moved = tuple(jnp.asarray(d, x.dtype) for d, x in zip(directions, arrays))
      return jax.jit(lambda a, d: jax.jvp(function, a, d)[1])(arrays, moved)
    got = tangents(functools.partial(run, "v1", case), case.arrays())
    with jax.enable_x64(True):
      want = tangents(case.oracle, tuple(x.astype(jnp.float64) for x in case.arrays()))
    for mine, right in zip(got, want, strict=True):
      right = np.nan_to_num(np.asarray(right))  # a request without tokens, where the oracle has NaN
      np.testing.assert_allclose(mine, right, rtol=2e-5, atol=2e-5)

  def test_saved_residuals_are_not_computed_again(self):
    query, cache, metadata = plain(Case((9, 6), (4, 2), rest=2))
    run = lambda query, cache: ragged_page_attention_v2(
        2 * query, cache, metadata).attention_outputs.sum()
    def loops(*targets):
      policy = checkpoint_policy("save_only_these_names", targets)
      kept = jax.checkpoint(run, policy=policy)
      return str(jax.make_jaxpr(jax.grad(kept, (0, 1)))(query, cache)).count("while[")
    plain_loops = str(jax.make_jaxpr(jax.grad(run, (0, 1)))(query, cache)).count("while[")
    self.assertEqual(loops("attn_output", "attn_query"), plain_loops)
    self.assertGreater(loops("attn_query"), plain_loops)


if __name__ == "__main__":
  absltest.main()
