# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The operations of every kernel are those recorded in approved/programs_*.txt.

Most changes of a kernel are noticed by values, but not a missing fence, a barrier's count or the
precision of a product on a machine that runs kernels in interpret mode or not at all.
"""

import difflib

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core_test import program_cases, recorded_programs, sampling

jax.config.update("jax_num_cpu_devices", 8)

COMMAND = "python3 -m attn_core_test.recorded_programs"


def is_alike(name, recorded):
  """Says if a program has the same operations for all versions of JAX."""
  return len({text for (known, _), text in recorded.items() if known == name}) == 1


class RecordedTest(parameterized.TestCase):

  @parameterized.parameters(*recorded_programs.FILES)
  def test_operations_are_those_recorded(self, file):
    recorded = recorded_programs.read(file)
    versions, version = recorded_programs.versions_of(recorded), recorded_programs.VERSION
    if version not in versions:
      self.skipTest(f"recorded for jax {', '.join(sorted(versions))}, not for {version}: {COMMAND}")
    expected = {name: text for (name, known), text in recorded.items() if known == version}
    programs = recorded_programs.programs(file)
    self.assertEqual(list(programs), list(expected), f"other programs than recorded: {COMMAND}")
    # A change of the library shows in programs that are alike with every version of JAX.
    alike = [name for name in programs if is_alike(name, recorded)]
    for name in {*alike} - {*sampling.in_turn(alike, 4)}:
      del programs[name]
    changed = []
    for name, program in programs.items():
      text = recorded_programs.text_of(program)
      if text != expected[name]:
        changed += [f"== {name}", *list(difflib.unified_diff(
            expected[name], text, "recorded", "now", n=0, lineterm=""))[2:]]
    if changed:
      self.fail(f"other operations than recorded; if this is meant: {COMMAND} {file}\n"
                + "\n".join(changed[:60]))


def looped(step, operand=3, length=4, precision=None):
  """Returns a kernel with a loop and a branch, with some choices."""
  def kernel(left, right, out):
    def body(i, total):
      lax.cond(i >= operand, lambda: pl.debug_print("late"), lambda: None)
      return total + step * jnp.dot(left[...], right[...], precision=precision)
    out[...] = lax.fori_loop(0, length, body, jnp.zeros(out.shape))
  return pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 8), jnp.float32), interpret=True)


def text_of(run):
  shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  return recorded_programs.text_of(program_cases.Program(run, (shape, shape)))


class TextTest(parameterized.TestCase):

  def changed(self, run, *others):
    """Returns the places of lines that differ."""
    lines, other = text_of(run), text_of(*others)
    self.assertEqual(len(lines), len(other), (lines, other))
    return [i for i, (x, y) in enumerate(zip(lines, other)) if x != y]

  def test_a_change_is_in_the_line_of_its_scope(self):
    lines = text_of(looped(2.0))
    self.assertEqual([line.lstrip().split(":")[0] for line in lines], [
        "program", "pallas_call jaxpr", "scan jaxpr"])
    self.assertIn("dot_general", lines[2])
    self.assertEqual(self.changed(looped(2.0), looped(2.0)), [])
    for other in (looped(2.5), looped(2.0, operand=2), looped(2.0, precision="highest")):
      self.assertEqual(self.changed(looped(2.0), other), [2])
    self.assertEqual(self.changed(looped(2.0), looped(2.0, length=5)), [1])

  def test_functions_and_names_do_not_count(self):
    plain = lambda x, y: jnp.where(x > y, x, y) * 2
    nested = lambda x, y: jax.jit(lambda a, b: jnp.where(a > b, a, b))(x, y) * 2
    self.assertEqual(text_of(plain), text_of(nested))
    self.assertNotEqual(text_of(plain), text_of(lambda x, y: jnp.where(x >= y, x, y) * 2))

  def test_constants_count(self):
    run = lambda n: lambda x, y: x + y * jnp.asarray(jnp.arange(64).reshape(8, 8) + n)
    table = lambda n: (lambda x, y, c=jax.device_get(jnp.arange(8) * n): x + c)
    self.assertEqual(text_of(run(1)), text_of(run(1)))
    self.assertNotEqual(text_of(table(1)), text_of(table(2)))

  def test_what_was_said_is_not_repeated(self):
    body = lambda i, x: jnp.sin(x) @ x + i
    twice = lambda x, y: lax.fori_loop(0, 3, body, lax.fori_loop(0, 3, body, x + y))
    lines = text_of(twice)
    self.assertLen(lines, 3)
    self.assertEndsWith(lines[2], "as before")


if __name__ == "__main__":
  absltest.main()
