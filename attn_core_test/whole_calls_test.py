# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random whole calls by every kernel: values, lse, gradients and tangents against the oracle.

The quick ones are the same in every run; slow runs go through more of them. See random_cases.
"""

import os

# Interpreted warpgroups wait for each other on threads of XLA's, see gpu_test.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
import functools
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, OperationMetadata, attention
from attn_core_test import (gpu_cases, gpu_interpret, property_cases, random_cases, sampling,
                            tpu_interpret)
from attn_core_test.property_cases import Shape

jax.config.update("jax_enable_x64", True)

# Kernel -> features that it refuses.
REFUSED = {"blockwise": frozenset(), "vanilla": frozenset(),
           "autoregressive_decodeattn": frozenset(("bias", "dropout"))}
ALL = -1  # the seed of a call with all features
# In turn, so that the kernels share the rows of a covering array.
QUICK = [*((mechanism, ALL) for mechanism in REFUSED),
         *((tuple(REFUSED)[seed % 2], seed) for seed in range(random_cases.COVER))]
SLOW = [(mechanism, seed) for mechanism, seed in itertools.product(
    REFUSED, range(8 * random_cases.COVER)) if (mechanism, seed) not in QUICK]


def call(case, mechanism, metadata, blocks):
  """Returns the call of a case: arrays -> (output, lse)."""
  def run(arrays):
    output = attention(**case.arguments, **arrays, mechanism=mechanism, metadata=metadata,
                       block_sizes=blocks, return_lse=True)
    return output.attention_outputs, output.lse
  return run


def compare(found, expected, tolerance):
  flat, _ = jax.tree_util.tree_flatten_with_path(found)
  for (path, x), y in zip(flat, jax.tree.leaves(expected), strict=True):
    x, y = np.asarray(x, np.float64), np.asarray(y)
    np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), jax.tree_util.keystr(path))
    size = max(1.0, np.abs(y[np.isfinite(y)]).max(initial=0))
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size,
                               err_msg=jax.tree_util.keystr(path))


@functools.cache  # kernels that refuse nothing share the call with all features
def expected(seed, refused):
  """Returns a random call, and value, gradient and jvp of the oracle in float64."""
  drawn = random_cases.make(seed, refused)
  wide = {name: np.asarray(x, np.float64) for name, x in drawn.clean.items()}
  return drawn, property_cases.everything(property_cases.reference(drawn.case), wide)


class XlaTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(QUICK, *SLOW))
  def test_equals_the_oracle(self, mechanism, seed):
    drawn, want = expected(seed, REFUSED[mechanism])
    sizes = [int(x) for x in np.random.default_rng(seed + 1).permutation((2, 3, 4, 5))]
    blocks = BlockSizes(*sizes) if mechanism == "blockwise" else None
    if mechanism == "autoregressive_decodeattn":
      blocks = BlockSizes(block_kv=sizes[0])
    run = call(drawn.case, mechanism, OperationMetadata(platform="cpu"), blocks)
    compare(property_cases.everything(run, drawn.arrays), want, 1e-9)


# On kernels with tiles of 64 and 128: lengths that cross them, and different numbers of everything.
TILES = Shape(2, 139, 151, 4, 2, 64, 96)
SEEDS = [(seed,) for seed in range(2 * random_cases.COVER)]


class InterpretTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow([(ALL,)], *SEEDS))
  def test_tpu_kernels_equal_the_oracle(self, seed):
    drawn = random_cases.make(seed, dtype="float32", shape=TILES)
    run = call(drawn.case, "flash_attn2", OperationMetadata(platform="tpu"),
               BlockSizes(128, 128, 128, 128))
    gradient = functools.partial(_gradient, run, _weights(drawn))
    with tpu_interpret.interpreted(("on_wait", "eager")[seed % 2]):
      found = jax.block_until_ready(jax.jit(gradient)(drawn.arrays))
    compare(found, _expected_gradient(drawn), 2e-5)

  @gpu_interpret.interprets
  @parameterized.parameters(*sampling.with_slow([(ALL,)], *SEEDS))
  def test_gpu_kernels_equal_the_oracle(self, seed):
    drawn = random_cases.make(seed, frozenset(("huge",)), "bfloat16", TILES)
    for arrays in (drawn.arrays, drawn.clean):
      arrays.update({name: arrays[name].astype(jnp.float32)
                     for name in ("bias", "softmax_aux") if name in arrays})
    run = call(drawn.case, "flash_attn2", gpu_cases.HOPPER, None)
    gradient = functools.partial(_gradient, run, _weights(drawn))
    found = gpu_interpret.interpret(gradient, drawn.arrays)
    compare(found, _expected_gradient(drawn), 2e-2)


def _weights(drawn):
  rng = np.random.default_rng(2)
  shapes = jax.eval_shape(property_cases.reference(drawn.case), drawn.clean)
  return [rng.normal(size=x.shape).astype(np.float32) for x in shapes]


def _gradient(run, weights, arrays):
  """Returns the gradient of a sum of all outputs, and the outputs."""
  def loss(arrays):
    out, lse = run(arrays)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    return (out.astype(jnp.float32) * weights[0]).sum() + (finite * weights[1]).sum(), (out, lse)
  return jax.grad(loss, has_aux=True)(arrays)


def _expected_gradient(drawn):
  wide = {name: jnp.asarray(x, jnp.float64) for name, x in drawn.clean.items()}
  run = functools.partial(_gradient, property_cases.reference(drawn.case), _weights(drawn))
  return jax.jit(run)(wide)


class CoverTest(absltest.TestCase):

  def test_every_two_features_meet_and_part(self):
    for first in range(0, 5 * random_cases.COVER, random_cases.COVER):
      drawn = [random_cases.features_of(first + i) for i in range(random_cases.COVER)]
      for pair in itertools.combinations(random_cases.FEATURES, 2):
        self.assertLen({tuple(x in features for x in pair) for features in drawn}, 4, pair)


if __name__ == "__main__":
  absltest.main()
