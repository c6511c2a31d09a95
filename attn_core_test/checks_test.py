# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that convert: integers of any dtype become int32 without wrapping around."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Int32Test(parameterized.TestCase):

  @parameterized.parameters(*INTEGERS)
  def test_numbers_are_clipped(self, dtype):
    ends, own = np.iinfo(dtype), np.iinfo(np.int32)
    given = [x for x in (ends.min, -2**31 - 1, -2**31, -1, 0, 1, 2**31 - 1, 2**31, ends.max)
             if ends.min <= x <= ends.max]
    wanted = [min(max(x, own.min), own.max) for x in given]
    with jax.enable_x64(True):
      for array in (np.array(given, dtype), jnp.array(given, dtype)):
        for convert in (checks.int32, jax.jit(checks.int32, static_argnums=(0, 2))):
          found = convert("x", array, "integers")
          self.assertEqual(found.dtype, np.int32)
          self.assertEqual(found.tolist(), wanted)

  @parameterized.parameters("bool", "float32", "complex64")
  def test_other_dtypes_are_refused(self, dtype):
    with self.assertRaisesRegex(ValueError, f"x: got {dtype}.2.; expected integers"):
      checks.int32("x", np.zeros(2, dtype), "integers")


if __name__ == "__main__":
  absltest.main()
