# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward of the GPU kernels: interpreted on a CPU against the oracle, and compiled.

See gpu_test for the forward and for what both share.
"""

import os
import re

# Interpreted warpgroups wait for each other on threads of XLA's, of which there are otherwise as
# many as cores.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, masks, score_mods
from attn_core.kernels.common.backward import compute_delta
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import backward, kernel as gpu_flash, tiling
from attn_core.kernels.xla import flash as xla_flash
from attn_core.types import operand
from attn_core_test import (gpu_cases, gpu_faults, gpu_interpret, gpu_machine_code, property_cases,
                            sampling)
from attn_core_test.gpu_cases import Case
from attn_core_test.gpu_interpret import interpret

KERNEL = gpu_flash.make_kernel(xla_flash.KERNEL)

# Run through `attention`, forward and backward; the other cases of properties_test differ from
# these before a kernel is reached, or in what `gpu_cases.GRADIENTS` has.
PROPERTIES = ("positions", "everything", "sinks_several_empty_rows",
              *sampling.with_slow((), "full_odd_sizes_e_not_d", "unnormalized"))
# The others of `gpu_cases.BIASES`, and those of its GRADIENTS that are like others, are slow.
BIASES = ("batch", "all_but_keys")
ALIKE = ("causal_odd_length", "window", "placed", "widths_192_128", "width_96_float16", "soft_cap")
MODS_AND_LISTS = {**gpu_cases.MODS, **gpu_cases.LISTS}


@gpu_interpret.interprets
class InterpretTest(parameterized.TestCase):

  def compare(self, found, expected, dtype):
    for name, y in expected.items():
      x, y = np.asarray(found[name], np.float32), np.asarray(y, np.float32)
      size = max(1.0, np.abs(y).max())
      np.testing.assert_allclose(x, y, rtol=0, atol=gpu_cases.TOLERANCE[dtype] * size, err_msg=name)

  @parameterized.named_parameters((name, name) for name in gpu_cases.GRADIENTS
                                   if name not in ALIKE or sampling.chosen(name))
  def test_equals_the_oracle(self, name):
    case = gpu_cases.GRADIENTS[name]
    operands = case.operands()
    residuals, cotangents, expected = case.derivatives(operands)
    found = interpret(case.backward, operands, residuals, cotangents)
    self.assertEqual(set(found), set(expected))
    self.compare(found, expected, case.dtype)

  @parameterized.named_parameters((name, name) for name in gpu_cases.BIASES
                                   if name in BIASES or sampling.chosen(name))
  def test_bias(self, name):
    case = gpu_cases.BIASES[name]
    operands = case.operands()
    residuals, cotangents, expected = case.derivatives(operands)
    run = lambda *args: case.backward(*args, ("bias",))
    found = interpret(run, operands, residuals, cotangents)
    if name == "all_but_keys":
      np.testing.assert_array_equal(
          found["bias"], interpret(run, operands, residuals, cotangents)["bias"])
    self.assertEqual(found["bias"].dtype, operands.bias.dtype)
    self.compare(found, {"bias": expected["bias"]}, case.dtype)

  @parameterized.named_parameters(
      (name, name) for name in sampling.names(MODS_AND_LISTS, ("every_kind", "by_distance")))
  def test_score_mods_and_lists(self, name):
    case = MODS_AND_LISTS[name]
    operands = case.operands()
    of_oracle = case._replace(mod=gpu_cases.TOTAL_MODS.get(name, case.mod))
    residuals, cotangents, expected = of_oracle.derivatives(operands, rounds=False)
    def run(operands, residuals, cotangents):
      return case.forward(operands), case.backward(operands, residuals, cotangents)
    (out, lse), found = interpret(run, operands, residuals, cotangents)
    self.assertEqual(set(found), set(expected))
    for key, x in found.items():
      self.assertEqual((x.shape, x.dtype), (operand(operands, key).shape,
                                            operand(operands, key).dtype))
    self.compare(found | {"out": out}, expected | {"out": residuals.out}, case.dtype)
    size = max(1.0, np.abs(np.where(np.isfinite(lse), lse, 0)).max())
    np.testing.assert_allclose(lse, residuals.lse, rtol=0, atol=1e-5 * size)

  @parameterized.named_parameters((name, name) for name in PROPERTIES)
  def test_properties(self, name):
    case, arrays, run = gpu_cases.property_call(name)
    rng = np.random.default_rng(2)
    reference = property_cases.reference(case)
    weights = [rng.normal(size=x.shape) for x in jax.eval_shape(reference, arrays)]
    def gradient(run):
      def loss(arrays):
        parts = [jnp.where(jnp.isfinite(x), x.astype(jnp.float32), 0) * w
                 for x, w in zip(run(arrays), weights)]
        return sum(x.sum() for x in parts)
      return jax.grad(loss)
    found = interpret(gradient(run), arrays)
    wide = {key: np.asarray(x, np.float32) for key, x in arrays.items()}
    expected = jax.jit(gradient(reference))(wide)
    self.compare(found, expected, "bfloat16")

  @parameterized.parameters("width_128_group_float16", "group_of_shared_keys")
  def test_results_repeat_bit_for_bit(self, name):
    case = gpu_cases.GRADIENTS[name]
    operands = case.operands()
    residuals, cotangents, _ = case.derivatives(operands)
    first, second = (interpret(case.backward, operands, residuals, cotangents) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)

  def test_hidden_keys_may_be_nan(self):
    case = Case(T=200)
    operands = case.operands()
    residuals, cotangents, _ = case.derivatives(operands)
    # The last queries see the last keys: their cotangents are 0 and their lse is -inf here.
    cotangents = jax.tree.map(jnp.array, cotangents)
    late = jnp.arange(200) >= 150
    residuals = residuals._replace(lse=jnp.where(late, -jnp.inf, residuals.lse))
    cotangents = cotangents._replace(lse=jnp.where(late, 0, cotangents.lse))
    nonfinite = operands._replace(key=operands.key.at[:, 150:].set(jnp.inf),
                               value=operands.value.at[:, 150:].set(jnp.nan))
    found, clean = (interpret(case.backward, x, residuals, cotangents)
                    for x in (nonfinite, operands))
    for name in case.wrt:
      np.testing.assert_array_equal(found[name][:, :150], clean[name][:, :150])
      self.assertTrue((np.asarray(found[name][:, 150:]) == 0).all())


class RingTest(parameterized.TestCase):

  def test_a_row_bias_in_two_ring_steps(self):
    """Checks the calls that a ring makes: for some of the keys, and without the output."""
    case = Case(masks.full(), T=4, S=8, H=2, D=8, dtype="float32",
                extras={"bias": ((1, 2, 4, 1), "float32")})
    operands = case.operands()
    residuals, cotangents, expected = case.derivatives(operands)
    cotangents = cotangents._replace(
        lse=-compute_delta(residuals, cotangents, jnp.float32))
    found = sum(backward.backward(
        operands._replace(**{name: getattr(operands, name)[:, keys] for name in ("key", "value")}),
        case.full_spec, case.blocks, residuals._replace(out=None), cotangents, ("bias",),
        fallback=xla_flash.backward)[0]
                for keys in (slice(4), slice(4, None)))
    np.testing.assert_allclose(found, expected["bias"], rtol=1e-5, atol=1e-5)


class LowerTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in gpu_cases.compiled_backward())
  def test_for_cuda(self, name):
    self.assertEqual(gpu_faults.check(*gpu_cases.backward_programs()[name]), 2)

  @parameterized.named_parameters((name, name) for name in gpu_cases.bias_programs())
  def test_biases_for_cuda(self, name):
    self.assertEqual(gpu_faults.check(*gpu_cases.bias_programs()[name]), 1)

  @parameterized.named_parameters((name, name) for name in gpu_cases.table_programs())
  def test_tables_for_cuda(self, name):
    self.assertEqual(gpu_faults.check(*gpu_cases.table_programs()[name]), 1)

  @parameterized.parameters((1, 4096), (4096, 1), (1, 1))
  def test_a_shared_bias_takes_linear_memory(self, *shape):
    self.check_is_linear(Case(T=4096, extras={"bias": ((1, 1, *shape), "float32")}))

  def test_a_table_takes_linear_memory(self):
    mod = score_mods.by_distance(np.zeros((8192, 1), np.float32), -4096)
    self.check_is_linear(Case(T=4096, mod=mod))

  def check_is_linear(self, case):
    residuals = case.residual_shapes
    jaxpr = jax.make_jaxpr(case.backward)(case.shapes, residuals, residuals)
    sizes = [x.aval.size for x in _results(jaxpr.jaxpr)]
    self.assertGreaterEqual(max(sizes), case.T * case.D)
    self.assertLess(max(sizes), 16 * case.T * case.D)


def _results(jaxpr):
  """Yields every array that a program computes outside its kernels."""
  for equation in jaxpr.eqns:
    yield from equation.outvars
    inner = equation.params.get("jaxpr")
    if hasattr(inner, "jaxpr"):
      yield from _results(inner.jaxpr)


def _program(case):
  """Returns the text of a backward without addresses."""
  residuals = case.residual_shapes
  jaxpr = jax.make_jaxpr(case.backward)(case.shapes, residuals, residuals)
  return re.sub("0x[0-9a-f]+", "", str(jaxpr))


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      (BlockSizes(block_q_backward=128), 64, "block_q_backward: got 128.*up to 64"),
      (BlockSizes(block_kv_backward=100), 64, "block_kv_backward: got 100.*multiple of 64"),
      (BlockSizes(block_kv_backward=128), 256, "block_kv_backward: 128 keys need .* KiB.*give 64"))
  def test_blocks(self, blocks, width, words):
    case = Case(D=width, blocks=blocks)
    with self.assertRaisesRegex(ValueError, words):
      KERNEL.check(case.shapes, case.full_spec, case.blocks)

  def test_requested_blocks_reach_the_kernel(self):
    chosen, as_chosen, smaller = (_program(Case(blocks=BlockSizes(block_kv_backward=size)))
                                  for size in (None, 128, 64))
    self.assertTrue(as_chosen == chosen)  # without printing the programs
    self.assertFalse(smaller == chosen)

  @parameterized.product(width=tiling.WIDTHS, value_width=tiling.WIDTHS)
  def test_chosen_blocks_fit(self, width, value_width):
    case = Case(D=width, E=value_width)
    for cut in tiling.make_backward_tilings(case.shapes, case.full_spec, case.blocks):
      self.assertLessEqual(tiling.shared_memory_backward(cut), mosaic.SHARED_MEMORY_BYTES)
    for cut in tiling.make_bias_tilings(case.shapes):
      self.assertLessEqual(tiling.shared_memory_bias(cut), mosaic.SHARED_MEMORY_BYTES)


class CompileTest(gpu_machine_code.CompileTestCase):
  programs = {"backward_programs": None, "bias_programs": None, "table_programs": None,
              "constant_copy_programs": None, "crowded_programs": None}

  @parameterized.named_parameters((name, name) for name in gpu_cases.compiled_backward())
  def test_machine_code(self, name):
    case = gpu_cases.compiled_backward()[name]
    cuts = tiling.make_backward_tilings(case.shapes, case.full_spec, case.blocks)
    self.assertLen(self.kernels[name], 2)
    for direction, cut in zip(("query", "key"), cuts):
      with self.subTest(direction):
        kernel = self.kernel_named(name, f"backward_{direction}")
        self.check(kernel, gpu_machine_code.FLASH_REGISTERS, tiling.shared_memory_backward(cut))
        self.assertEqual(sorted(loop["products"] for loop in kernel.loops), self.products(cut))

  @parameterized.named_parameters((name, name) for name in gpu_cases.crowded())
  def test_crowded_machine_code(self, name):
    self.assertLen(self.kernels[name], 2)
    for kernel in self.kernels[name]:
      self.check(kernel, gpu_machine_code.FLASH_REGISTERS, mosaic.SHARED_MEMORY_BYTES)

  @parameterized.named_parameters((name, name) for name in gpu_cases.bias_programs())
  def test_machine_code_of_biases(self, name):
    kernel, = self.kernels[name]
    width = int(name.split("_")[-2])
    cut = tiling.make_bias_tilings(Case(D=width).shapes)[name.endswith("keys")]
    self.check(kernel, gpu_machine_code.FLASH_REGISTERS, tiling.shared_memory_bias(cut))
    self.assertEqual([loop["products"] for loop in kernel.loops], [2 * width // 16])

  @parameterized.named_parameters((name, name) for name in gpu_cases.table_programs())
  def test_machine_code_of_tables(self, name):
    kernel, = self.kernels[name]
    width = int(name.split("_")[-1])
    cut = tiling.make_bias_tilings(Case(D=width).shapes).table
    self.check(kernel, gpu_machine_code.FLASH_REGISTERS, tiling.shared_memory_bias(cut))
    self.assertEqual([loop["products"] for loop in kernel.loops], [2 * width // 16])
    # Queries and d_out of two warpgroups, keys and values: no copy apart from its loop.
    self.assertEqual(kernel.counts["copies"], 6)

  def test_no_copy_apart_from_its_loop(self):
    """CUDA's assembler 13.0 to 13.3 lost coordinates of others: a wrong d_query, or a fault."""
    kernel = self.kernel_named("width_256", "backward_query")
    self.assertEqual(kernel.counts["copies"], 4)  # queries, d_out, keys and values

  def products(self, cut):
    """Returns matrix products of the loops, sorted: each 16 long, 64 or the sums' width wide."""
    scores, d_weights = cut.width // 16, cut.value_width // 16
    if not cut.by_keys:
      return [scores + d_weights + cut.block_kv // 16]
    added = cut.block_q // 16
    if cut.shared:
      return sorted([scores + added, d_weights + added])
    return [scores + d_weights + 2 * added]


if __name__ == "__main__":
  absltest.main()
