# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that convert: integers of any dtype and kind become int32 without wrapping around."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Int32Test(parameterized.TestCase):

  @parameterized.parameters(*INTEGERS)
  def test_traced_numbers_are_clipped_and_known_ones_refused(self, dtype):
    ends, own = np.iinfo(dtype), np.iinfo(np.int32)
    given = [x for x in (ends.min, -2**31 - 1, -2**31, -1, 0, 1, 2**31 - 1, 2**31, ends.max)
             if ends.min <= x <= ends.max]
    wanted = [min(max(x, own.min), own.max) for x in given]
    with jax.enable_x64(True):
      for array in (np.array(given, dtype), jnp.array(given, dtype)):
        found = jax.jit(checks.int32, static_argnums=(0, 2))("x", array, "integers")
        self.assertEqual(found.dtype, np.int32)
        self.assertEqual(found.tolist(), wanted)
        if given != wanted:
          with self.assertRaisesRegex(ValueError, "x: got numbers from .*; expected integers"):
            checks.int32("x", array, "integers")
        known = checks.int32("x", array[np.equal(given, wanted)], "integers")
        self.assertEqual((known.dtype, known.tolist()),
                         (np.int32, [x for x in given if own.min <= x <= own.max]))

  @parameterized.parameters((3, []), (np.int64(-4), []), ([1, 2], [2]), ((1, 2, 3), [3]),
                            ([[1, 2], [3, 4]], [2, 2]), ([np.int64(7), 2], [2]))
  def test_numbers_and_lists(self, given, shape):
    found = checks.int32("x", given, "integers")
    self.assertIsInstance(found, (np.ndarray, np.generic))
    self.assertEqual((found.dtype, list(found.shape)), (np.int32, shape))
    np.testing.assert_array_equal(found, given)
    traced = jax.jit(lambda y: checks.int32("x", [y, 2], "integers"))(5)
    self.assertEqual((traced.dtype, traced.tolist()), (np.int32, [5, 2]))

  @parameterized.parameters(("1",), (None,), ([1, [2, 3]],), ([True],), ([1.0],), (b"1",),
                            ([2**40],), (True,))
  def test_others_are_refused(self, given):
    with self.assertRaisesRegex(ValueError, "x: got .*; expected .*integers"):
      checks.int32("x", given, "integers")

  @parameterized.parameters("bool", "float32", "complex64")
  def test_other_dtypes_are_refused(self, dtype):
    with self.assertRaisesRegex(ValueError, f"x: got {dtype}.2.; expected integers"):
      checks.int32("x", np.zeros(2, dtype), "integers")


if __name__ == "__main__":
  absltest.main()
