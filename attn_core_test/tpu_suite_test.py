# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""tpu_suite without a TPU: its expected results, and that it notices and reports wrong ones."""

import contextlib
import io
import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import table
from attn_core.kernels.tpu.flash import remote_copy
from attn_core.masks import constructors
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import (device_suite, sampling, tpu_suite, tpu_suite_parts,
                            tpu_suite_reference, tpu_suite_times, tpu_suite_writes)

NOT_MEASURED = "There is no TPU here: JAX computes on 'cpu'. Nothing below is a measurement"
TINY = tpu_suite_parts.Settings(True, 300.0)


class ReferenceTest(parameterized.TestCase):

  @parameterized.parameters(*tpu_suite_parts.accuracy_cases(12))
  def test_equals_the_oracle(self, name):
    """Compares numpy's results with the oracle's, gradients by JAX included."""
    arguments, seen = tpu_suite_parts.accuracy_cases(12)[name]
    rng, cap = np.random.default_rng(0), arguments.get("logits_soft_cap")
    arrays = [rng.normal(size=(1, 12, heads, 4)) for heads in (4, 2, 2)]
    cotangents = rng.normal(size=(1, 12, 4, 4)), rng.normal(size=(1, 4, 12))
    leaves, structure = jax.tree.flatten(constructors.dense(seen[None, None]))
    with jax.enable_x64(True):
      def loss(*arrays):
        found = oracle.attention(
            Operands(*arrays, mask=MaskOperands(tuple(map(jnp.asarray, leaves)))),
            AttentionSpec(structure, 0.5, cap))
        out, lse = found.attention_outputs, found.lse
        return (out * cotangents[0]).sum() + (
            jnp.where(jnp.isfinite(lse), lse, 0) * cotangents[1]).sum(), (out, lse)
      gradients, results = jax.grad(loss, (0, 1, 2), has_aux=True)(*map(jnp.asarray, arrays))
    for got, want in zip(tpu_suite_reference.attention(*arrays, seen, cap, cotangents),
                         (*results, *gradients)):
      np.testing.assert_allclose(got, want, atol=1e-12)


class TpuSuiteTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if jax.default_backend() == "tpu":
      self.skipTest("run attn_core_test/tpu_suite.py itself")
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def run_suite(self, *arguments):
    """Returns (exit status, printed text, tpu_suite.json, tpu_suite.md)."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      status = device_suite.main(tpu_suite.SUITE, ["--out", str(self.folder), *arguments])
    read = lambda name: (self.folder / name).read_text(encoding="utf-8")
    return status, printed.getvalue(), json.loads(read("tpu_suite.json")), read("tpu_suite.md")

  @sampling.slow("tpu_suite tiny")
  def test_tiny(self):
    status, printed, found, text = self.run_suite("--tiny", "--budget", "1200")
    self.assertEqual(status, 0, text)
    self.assertEqual(list(found), list(tpu_suite.SUITE.shares))
    self.assertIn(NOT_MEASURED, printed)
    self.assertTrue(text.startswith("# attn_core, without a TPU"))
    for part in ("accuracy", "accuracy_highest"):
      self.assertLess(max(found[part]["data"]["errors"]["empty_rows float32"].values()), 1e-5)
    rings = found["remote_ring"]["data"]["results"]["(1, 1)"]
    self.assertEqual({wrong for wrong, _ in rings.values()}, {0})
    self.assertLen(rings, 3)

  def test_without_a_tpu_nothing_is_measured_unless_tiny(self):
    status, printed, found, text = self.run_suite()
    self.assertEqual(status, 2)
    self.assertEqual(list(found), ["environment"])
    self.assertTrue(found["environment"]["ok"])
    self.assertIn(NOT_MEASURED, printed)
    self.assertIn(NOT_MEASURED, text)

  def test_parts_and_mechanisms_exist(self):
    self.assertEqual(list(tpu_suite_parts.PARTS), list(tpu_suite.SUITE.shares))
    self.assertContainsSubset([plan[0] for plan in tpu_suite_parts.PROPERTIES], table.names())

  def test_functions_off_by_more_than_rounding_are_wrong(self):
    compared = tpu_suite_parts.Found(True, [], {})
    functions = dict(tpu_suite_parts.FUNCTIONS, exp2=(
        lambda x: jnp.exp2(x) * (1 + 2e-4), *tpu_suite_parts.FUNCTIONS["exp2"][1:]))
    with mock.patch.object(tpu_suite_parts, "_compared", lambda _: compared):
      self.assertTrue(tpu_suite_parts.accuracy(TINY).ok)
      with mock.patch.object(tpu_suite_parts, "FUNCTIONS", functions):
        found = tpu_suite_parts.accuracy(TINY)
    self.assertFalse(found.ok)
    self.assertIn("exp2 2.0e-04", found.lines[-1])

  def test_wrong_values_are_reported(self):
    """Checks a result that is off, and one with -inf in a place of a number."""
    right = {"out": 1e-6, "lse": 0.0}
    for errors, ok in ((right, True), (dict(right, lse=2e-4), False),
                       (dict(right, lse=float("inf")), False), (dict(right, out=np.nan), False)):
      with mock.patch.object(tpu_suite_parts, "_errors_of", lambda *_, errors=errors: errors):
        found = tpu_suite_parts.accuracy_highest(TINY)
      self.assertEqual(found.ok, ok)
      self.assertEqual("WRONG" in "".join(found.lines), not ok)

  def test_bits_that_differ_are_reported(self):
    for result, ok in (((1e-3, False), True), ((1e-3, True), False), ((0.1, False), False)):
      with mock.patch.object(tpu_suite_parts, "_paged", lambda *_, result=result: result):
        self.assertEqual(tpu_suite_parts.pages(TINY).ok, ok)
    devices = mock.patch.object(jax, "local_devices", lambda: jax.devices() * 2)
    for wrong in 0, 1:
      rings = lambda *_, wrong=wrong: {"alone": (0, 5), "in a scan": (wrong, 5)}
      with devices, mock.patch.object(tpu_suite_parts, "_rings", rings):
        self.assertEqual(tpu_suite_parts.remote_ring(TINY).ok, not wrong)

  def test_running_out_of_time_is_a_failure(self):
    late = tpu_suite_parts.Settings(False, -1.0)
    for part in (tpu_suite_parts.accuracy_highest, tpu_suite_parts.pages,
                 tpu_suite_writes.writes, tpu_suite_times.pages_times):
      self.assertFalse(part(late).ok)

  def test_writes_that_differ_are_reported(self):
    for text, ok in (("right, 5 calls", True), ("WRONG: 1 of 5 calls differ", False)):
      with mock.patch.object(tpu_suite_writes, "_compared", lambda *_, text=text: text):
        self.assertEqual(tpu_suite_writes.writes(TINY).ok, ok)

  def test_wrong_results_of_pages_are_reported(self):
    program = tpu_suite_times.TINY
    arrays = tpu_suite_times._arrays(program)
    expected = tpu_suite_times._expected(program, arrays)
    self.assertGreater(np.abs(expected).max(), 0.1)
    for factor, ok in ((1.0, True), (1.1, False)):
      with (mock.patch.object(tpu_suite_times, "_expected", lambda *_: expected),
            mock.patch.object(tpu_suite_times, "_seconds", lambda *_, factor=factor: (
                1.0, factor * expected))):
        self.assertEqual(tpu_suite_times.pages_times(TINY).ok, ok)

  def test_which_static_figures_held(self):
    flash = tpu_suite_times.static_results("tpu_static")
    first = flash[0]["program"]["case"]["name"]
    one = dict(contender="flash_attn2", case=dict(name=first))
    best = {backward: min(tpu_suite_times._static_seconds(r, "v6e") for r in flash
                          if r["program"]["case"]["name"] == first
                          and r["program"]["contender"] == "flash_attn2"
                          and r["program"]["backward"] == backward) for backward in (False, True)}
    (self.folder / "times.json").write_text(json.dumps({"results": [
        dict(one, direction="forward", seconds=1.1 * best[False]),
        dict(one, direction="forward_backward", seconds=1.1 * best[False] + 2 * best[True])]}),
                                            encoding="utf-8")
    found = tpu_suite_times.static_figures(TINY._replace(out=self.folder))
    self.assertTrue(found.ok)
    self.assertEqual([(f["held"], round(f["ratio"], 6)) for f in found.data["figures"]],
                     [(True, 1.1), (False, 2.0)])
    self.assertIn("1 of 2 static figures for v6e held", found.lines[0])

  def test_static_figures_of_other_devices_are_not_compared(self):
    found = tpu_suite_times.static_figures(TINY._replace(tiny=False, out=self.folder))
    self.assertEqual(found.data, {"figures": []})

  def test_pages_are_compared_with_static_figures_of_the_same_program(self):
    program = dict(chip="v6e", case=dict(name="decode"), blocks=[0, 0, 16], contender="c")
    static = [dict(program=program, cycles=9_000, other_cycles=n, floor_seconds=0.0)
              for n in (1_000, 500)]
    (self.folder / "pages_times.json").write_text(json.dumps([
        dict(case="decode", page=16, contender="c", seconds=9_500 / 1.75e9),
        dict(case="decode", page=64, contender="c", seconds=1.0)]), encoding="utf-8")
    with mock.patch.object(tpu_suite_times, "static_results", lambda name: (
        static if name == "tpu_pages_static" else [])):
      figure, = tpu_suite_times._pages_figures("v6e", self.folder)
    self.assertAlmostEqual(figure.ratio, 1.0, delta=0.01)

  def test_one_device_has_no_ring(self):
    with mock.patch.object(jax, "local_devices", lambda: jax.devices()[:1]):
      self.assertEqual(tpu_suite_parts.remote_ring(TINY).lines, ["Not run: there is one device."])
    self.assertEqual(remote_copy.END_BARRIERS, 2**31)


if __name__ == "__main__":
  absltest.main()
