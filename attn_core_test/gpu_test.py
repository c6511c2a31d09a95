# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels: on a CPU in interpret mode against the oracle, and compiled for a Hopper.

Interpret mode starts from memory full of NaN and watches for races between copies and computation.
"""

import os

# Interpreted warpgroups wait for each other on threads of XLA's, of which there are otherwise as
# many as cores.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, masks
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import kernel as gpu_flash, tiling
from attn_core.kernels.xla import flash as xla_flash
from attn_core_test import (gpu_cases, gpu_faults, gpu_interpret, gpu_machine_code, property_cases,
                            sampling)
from attn_core_test.gpu_cases import Case
from attn_core_test.gpu_interpret import interpret

KERNEL = gpu_flash.make_kernel(xla_flash.KERNEL)

# Features in calls of one block; for a kernel the other property cases equal these or those of
# `gpu_cases`.
PROPERTIES = (
    "one_query_one_key", "chunk", "positions", "offset_per_row", "lengths", "prefix_or_causal",
    "custom_predicate", "bias_broadcast", "bias_and_mask", "sinks_several_empty_rows", "soft_cap",
    "everything", "dropout_at_positions")


@gpu_interpret.interprets
class InterpretTest(parameterized.TestCase):

  def compare(self, found, expected, dtype):
    tolerances = gpu_cases.TOLERANCE[dtype], 1e-5
    for name, x, y, tolerance in zip(("out", "lse"), found, expected, tolerances):
      x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
      size = max(1.0, np.abs(np.where(np.isfinite(y), y, 0)).max())
      np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size, err_msg=name)

  @parameterized.named_parameters((name, name) for name in gpu_cases.INTERPRETED)
  def test_equals_the_oracle(self, name):
    case = gpu_cases.INTERPRETED[name]
    operands = case.operands()
    found = interpret(case.forward, operands)
    self.compare(found, case.oracle(operands), case.dtype)

  @parameterized.named_parameters((name, name) for name in PROPERTIES)
  def test_properties(self, name):
    case, arrays, run = gpu_cases.property_call(name)
    found = interpret(run, arrays)
    wide = {key: np.asarray(x, np.float32) for key, x in arrays.items()}
    expected = property_cases.evaluate(property_cases.reference(case), wide)
    self.compare(found, expected, "bfloat16")

  def test_hidden_keys_may_be_nan(self):
    case = Case(T=200, blocks=gpu_cases.SMALL)
    operands = case.operands()
    nonfinite = operands._replace(key=operands.key.at[:, 150:].set(jnp.inf),
                               value=operands.value.at[:, 150:].set(jnp.nan))
    out, lse = interpret(case.forward, nonfinite)
    clean, clean_lse = interpret(case.forward, operands)
    np.testing.assert_array_equal(out[:, :150], clean[:, :150])
    np.testing.assert_array_equal(lse[..., :150], clean_lse[..., :150])
    self.assertTrue(np.isnan(out[:, 150:]).all())
    self.assertTrue(np.isnan(lse[..., 150:]).all())

  @parameterized.parameters("full_odd_lengths", "causal_odd_length",
                            *sampling.with_slow((), "segments"))
  def test_a_key_of_minus_infinity(self, name):
    case = gpu_cases.INTERPRETED[name]
    clean = case.operands()
    clean = clean._replace(query=clean.query.at[..., 3].set(1), key=clean.key.at[..., 3].set(0))
    nonfinite = clean._replace(key=clean.key.at[0, 5, 0, 3].set(-np.inf))
    (out, lse), (clean_out, clean_lse) = (interpret(case.forward, x) for x in (nonfinite, clean))
    sees = np.isnan(case.oracle(nonfinite)[1]).transpose(0, 2, 1)
    self.assertTrue(sees.any())
    self.assertTrue(np.isnan(np.asarray(out, np.float32)[sees]).all())
    np.testing.assert_array_equal(np.isnan(lse).transpose(0, 2, 1), sees)
    np.testing.assert_array_equal(out[~sees], clean_out[~sees])
    np.testing.assert_array_equal(lse.transpose(0, 2, 1)[~sees],
                                  clean_lse.transpose(0, 2, 1)[~sees])


class LowerTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in gpu_cases.lowered())
  def test_for_cuda(self, name):
    case = gpu_cases.lowered()[name]
    self.assertEqual(gpu_faults.check(case.forward, (case.shapes,)), 1)

  def test_interpretation_is_off_by_default(self):
    self.assertFalse(mosaic.interpreted())

  @gpu_interpret.interprets
  def test_interpretation_is_detected(self):
    with gpu_interpret.interpreted():
      self.assertTrue(mosaic.interpreted())


class RefusalTest(parameterized.TestCase):

  def refusal(self, error, words, **fields):
    case = Case(**fields)
    with self.assertRaisesRegex(error, words):
      KERNEL.check(case.shapes, case.full_spec, case.blocks)

  def test_dtypes(self):
    self.refusal(NotImplementedError, "query: dtype float32.*bfloat16 and float16.*blockwise",
                 dtype="float32")

  def test_widths(self):
    self.refusal(NotImplementedError, "query: width 257.*at most 256.*blockwise", D=257)
    self.refusal(NotImplementedError, "value: width 300.*at most 256.*blockwise", E=300)

  def test_predicates_with_arrays(self):
    mask = masks.custom(lambda b, h, q, k, table: table[q] <= k, np.zeros(136, np.int32))
    self.refusal(NotImplementedError, "masks.custom with operands.*blockwise", mask=mask)

  @parameterized.parameters(
      (BlockSizes(100), "block_q: got 100.*multiple of 128"),
      (BlockSizes(512), "block_q: got 512.*up to 256"),
      (BlockSizes(None, 96), "block_kv: got 96.*multiple of 64"),
      (BlockSizes(block_heads=2), "block_heads: got 2.*one query head"),
      (BlockSizes(256, 256), "256 queries and 256 keys need .* KiB.*at most 227"))
  def test_blocks(self, blocks, words):
    self.refusal(ValueError, words, blocks=blocks, D=256)

  @parameterized.product(width=tiling.WIDTHS, value_width=tiling.WIDTHS)
  def test_chosen_blocks_fit(self, width, value_width):
    case = Case(D=width, E=value_width)
    cut = tiling.make_tiling(case.shapes, case.full_spec, case.blocks)
    self.assertLessEqual(tiling.shared_memory(cut), mosaic.SHARED_MEMORY_BYTES)
    # The wider one decides: sums of all values and a block of logits share the registers.
    wide = case._replace(D=max(width, value_width), E=max(width, value_width))
    most = tiling.make_tiling(wide.shapes, wide.full_spec, wide.blocks)
    self.assertEqual((cut.block_q, cut.block_kv), (most.block_q, most.block_kv))


class CompileTest(gpu_machine_code.CompileTestCase):
  programs = {"programs": None}

  @parameterized.named_parameters((name, name) for name in gpu_cases.compiled())
  def test_machine_code(self, name):
    kernel, = self.kernels[name]
    case = gpu_cases.compiled()[name]
    cut = tiling.make_tiling(case.shapes, case.full_spec, case.blocks)
    self.check(kernel, gpu_machine_code.FLASH_REGISTERS, tiling.shared_memory(cut))
    # Products of 64 queries, 16 long: one with keys for every 16 of D, one with values for every 16
    # keys.
    products = cut.warpgroup_rows // mosaic.WGMMA_ROWS * (cut.width + cut.block_kv) // 16
    self.assertNotEmpty(kernel.loops)
    self.assertEqual({loop["products"] for loop in kernel.loops}, {products})


if __name__ == "__main__":
  absltest.main()
