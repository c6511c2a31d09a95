# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tags of slow tests: every test runs in some rotation, on every Python in the same one.

And the processes that run them: each has an environment, an output and an end of its own.
"""

import pathlib
import tempfile
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax._src import compilation_cache, compiler
import jax.numpy as jnp
import numpy as np

from attn_core_test import __main__ as suite, loaded, sampling, small_programs

NAMES = [f"test_{n}" for n in range(29)]


class SamplingTest(parameterized.TestCase):

  @parameterized.product(share=(1, 2, 3, 40), parts=(1, 2, 7, 50))
  def test_rotations_run_every_test(self, share, parts):
    self.enter_context(mock.patch.dict(sampling.QUICK, {"a.B.test_2*": 5, "a.*": share}))
    quick = sampling.taken_of(NAMES, "a.B", None)
    self.assertLen(quick, 2 + -(-19 // share))  # of test_2 and test_20 to test_28, and of the rest
    more = [sampling.taken_of(NAMES, "a.B", sampling.Rotation(k, parts)) for k in range(parts)]
    for taken in more:
      self.assertContainsSubset(quick, taken)
    slow = sorted(name for taken in more for name in taken if name not in quick)
    self.assertEqual(slow, sorted(set(NAMES) - set(quick)))

  def test_a_single_test_is_quick(self):
    self.enter_context(mock.patch.dict(sampling.QUICK, {"a.*": 9}))
    self.assertEqual(sampling.taken_of(["test_a"], "a.B", None), ["test_a"])

  @parameterized.parameters("bad_input_test", "no_such_test")
  def test_again_tests_take_turns(self, module):
    run = lambda k, names, again: sampling.taken_of(names, f"{module}.B", k and sampling.Rotation(
        k, 64), again)
    quick = sampling.taken_of(NAMES, f"{module}.B", None, False)
    self.assertLen(quick, len(NAMES))
    first, second = run(None, NAMES, True), run(9, NAMES, True)
    of_meaning = module == "bad_input_test"
    self.assertLen(first, 15 if of_meaning else 29)
    self.assertSequenceEqual(sorted({*first, *second}), sorted(quick))
    self.assertEqual({*first} & {*second}, set() if of_meaning else set(quick))
    for k in (4, 5):
      self.assertEqual(run(k, NAMES[:1], True), NAMES[:1])
      self.assertEqual(run(k, NAMES, False), quick)

  def test_parts_take_turns(self):
    runs = [sampling.in_turn(NAMES, 4, True, sampling.Rotation(k, 64)) for k in range(7, 11)]
    self.assertEqual(sorted(sum(runs, [])), sorted(NAMES))
    self.assertEqual(sorted(map(len, runs)), [7, 7, 7, 8])
    self.assertEqual(sampling.in_turn(NAMES, 4, False, None), NAMES)
    self.assertEqual(sampling.in_turn([], 4, True, None), [])

  def test_every_slow_case_runs_in_one_rotation(self):
    for name in NAMES:
      taken = [k for k in range(5) if sampling.chosen(name, sampling.Rotation(k, 5))]
      self.assertLen(taken, 1)
      self.assertFalse(sampling.chosen(name, None))

  def test_numbers_depend_on_the_name_alone(self):
    self.assertEqual(sampling.number_of("test_0"), 1158476611)

  @parameterized.parameters("", "3", "3/", "/3", "3/3", "-1/3", "a/b")
  def test_bad_rotations(self, text):
    with self.assertRaisesRegex(ValueError, "rotation=.*expected K/N with 0 <= K < N"):
      sampling.rotation_of(text)

  def test_tables_name_modules(self):
    modules = [path.stem for path in pathlib.Path(suite.FOLDER).glob("*_test.py")]
    for pattern in sampling.QUICK:
      module, _, rest = pattern.partition(".")
      self.assertTrue(rest, pattern)
      self.assertTrue(any(suite.matches(name, module) for name in modules), pattern)
    for pattern in (*sampling.EMULATING, *sampling.OF_MEANING):
      self.assertTrue(any(suite.matches(name, pattern) for name in modules), pattern)
    self.assertContainsSubset((*sampling.SHARDS, *sampling.LONG), modules)
    self.assertEqual({piece.module for piece in suite.pieces_of([])}, set(modules))
    self.assertContainsSubset({*sampling.READERS, *sampling.ONCE}, modules)
    self.assertEqual({piece.module for piece in suite.pieces_of([], again=True)},
                     set(modules) - set(sampling.ONCE))
    short = suite.pieces_of([], short=True)
    self.assertEqual({piece.module for piece in short}, set(modules) - set(sampling.SHARDS))
    self.assertEqual({piece.module for piece in short if piece.few},
                     set(modules) - {*sampling.SHARDS, *sampling.READERS})

  def test_one_test_of_a_module(self):
    run = lambda case: None
    skipped = type("Skipped", (), dict.fromkeys(NAMES, unittest.skip("")(run)))
    first, second = (type(name, (), dict.fromkeys(NAMES, run)) for name in ("First", "Second"))
    setattr(first, min(NAMES, key=sampling.number_of), unittest.skip("")(run))
    one = sampling.OneTest()
    classes = unittest.skip("")(type("Whole", (), dict.fromkeys(NAMES, run))), skipped, first
    for _ in range(2):
      taken = [one.of_class(case, NAMES) for case in (*classes, second)]
      quick = min(NAMES, key=sampling.number_of)
      self.assertEqual(taken, [[quick], [quick], [sorted(NAMES, key=sampling.number_of)[1]], []])


class SmallProgramsTest(parameterized.TestCase):

  @parameterized.parameters(
      (lambda x, y: x + y, True), (lambda x, y: jnp.where(x > 0, x[::-1] * 2, 0), True),
      (lambda x, y: x * y + 1, False), (lambda x, y: jnp.exp(x), False),
      (lambda x, y: x.sum(), False), (lambda x, y: x @ y, False),
      (lambda x, y: x.at[0].set(y[0]), False), (lambda x, y: x.astype("float8_e4m3fn"), False),
      (lambda x, y: jax.lax.fori_loop(0, 3, lambda _, x: -x, x), False),
      (lambda x, y: jnp.stack([x] * 20), False))
  def test_exact_programs(self, function, exact):
    x = jnp.ones(3)
    program = jax.jit(function).lower(x, x).compiler_ir()
    self.assertEqual(small_programs.is_exact(program), exact)

  def test_only_exact_programs_are_compiled_quickly(self):
    made = []
    def compile_or_get_cached(backend, computation, devices, options, *rest, **more):
      made.append(options.env_option_overrides)
      return original(backend, computation, devices, options, *rest, **more)
    original = compiler.compile_or_get_cached
    with mock.patch.object(compiler, "compile_or_get_cached", compile_or_get_cached):
      small_programs.compile_quickly()
      found = [jax.jit(lambda x: x * 3)(jnp.float32(5)), jax.jit(jnp.exp)(jnp.float32(0))]
    np.testing.assert_array_equal(found, [15, 1])
    older = jax.__version_info__ < (0, 11)
    self.assertEqual(made[-2:], [list(sampling.LEAST.items()) if older else [], []])

  def test_what_is_kept_can_be_read(self):
    kept = compilation_cache.compress_executable
    self.enter_context(mock.patch.object(compilation_cache, "compress_executable", kept))
    small_programs.keep_quickly()
    data = b"program" * 100
    found = compilation_cache.compress_executable(data)
    self.assertLess(len(found), len(data))
    self.assertEqual(compilation_cache.decompress_executable(found), data)


class StartersTest(absltest.TestCase):

  def test_processes_do_not_change_each_other(self):
    self.assertTrue(loaded.LOADED)
    with tempfile.TemporaryDirectory() as folder, suite.Starters(
        folder, sampling.Rotation(2, 5)) as starters:
      run = lambda code, **environment: starters.run(["timeit", "-n1", "-r1", code], environment)
      status, output = run("import os; os.system('echo $A $B $ATTN_CORE_SLOW'); os.abort()", A="1")
      self.assertEqual((status, output.split("\n")[0]), (-6, "1 2/5"))
      status, output = run("import os; print(os.environ.get('A'), os.environ['B'])", B="2")
      self.assertEqual((status, output.split("\n")[0]), (0, "None 2"))
      self.assertEqual(run("import os; os._exit(3)")[0], 3)
      status, output = run("import atexit; atexit.register(print, 'at exit'); 1 / 0")
      self.assertEqual(status, 1)
      self.assertEqual(output.splitlines()[-2:], ["ZeroDivisionError: division by zero", "at exit"])
      status, output = starters.run(["attn_core_test.no_such_module"], {})
      self.assertEqual(status, 1)
      self.assertIn("No module named attn_core_test.no_such_module", output)


if __name__ == "__main__":
  absltest.main()
