# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""gpu_suite without a GPU: it runs, reports that nothing is measured, survives failing parts."""

import contextlib
import io
import itertools
import json
import os
import pathlib
import sys
import time
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np

from attn_core import table
from attn_core.benchmark import contenders
from attn_core.benchmark.cases import CASES, GPU_CASES
from attn_core_test import (device_suite, device_suite_parts, gpu_faults, gpu_suite,
                            gpu_suite_hardware, gpu_suite_parts, property_cases)

NOT_MEASURED = "There is no GPU here: JAX computes on 'cpu'. Nothing below is a measurement"


class GpuSuiteTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if jax.default_backend() == "gpu":
      self.skipTest("run attn_core_test/gpu_suite.py itself")
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def run_suite(self, *arguments):
    """Returns (exit status, printed text, gpu_suite.json, gpu_suite.md)."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      status = device_suite.main(gpu_suite.SUITE, ["--out", str(self.folder), *arguments])
    read = lambda name: (self.folder / name).read_text(encoding="utf-8")
    return status, printed.getvalue(), json.loads(read("gpu_suite.json")), read("gpu_suite.md")

  def test_tiny(self):
    status, printed, found, text = self.run_suite("--tiny")
    self.assertEqual(status, 0, text)
    self.assertEqual(list(found), list(gpu_suite.SUITE.shares))
    self.assertIn(NOT_MEASURED, printed)
    self.assertIn(NOT_MEASURED, text)
    self.assertTrue(text.startswith("# attn_core, without a GPU"))
    self.assertEqual(found["environment"]["data"]["versions"]["jax"], jax.__version__)
    self.assertIn(jax.__version__, text)
    verdicts = [result["verdict"] for result in found["hardware"]["data"]["results"]]
    self.assertEqual(verdicts[:-1], ["right"] * 5)
    self.assertStartsWith(verdicts[-1], "measured: forward ")
    self.assertEqual([result["verdict"] for result in found["properties"]["data"]["results"]],
                     ["right", "right"])
    properties = json.loads((self.folder / "properties.json").read_text("utf-8"))
    self.assertEqual(properties, found["properties"]["data"]["results"])
    self.assertEmpty(found["repeatability"]["data"]["differ"])
    self.assertIn("Not run: no", text)
    results = found["times"]["data"]["results"]
    self.assertEqual({(result["contender"], result["direction"]) for result in results},
                     {(name, direction) for name in ("flash_attn2", "jax.nn xla")
                      for direction in ("forward", "forward_backward")})
    times = json.loads((self.folder / "times.json").read_text("utf-8"))
    self.assertEqual(times["results"], results)
    self.assertIn("| window_bf16_d128_t16384_b1 |", text)

  def test_without_a_gpu_nothing_is_measured_unless_tiny(self):
    status, printed, found, text = self.run_suite()
    self.assertEqual(status, 2)
    self.assertEqual(list(found), ["environment"])
    self.assertIn(NOT_MEASURED, printed)
    self.assertIn(NOT_MEASURED, text)

  def test_a_failing_part_does_not_stop_the_others(self):
    spawn = device_suite.spawn
    begun = []
    def fail_properties(suite, part, given, seconds):
      begun.append(part)
      if part == "environment":
        return {"ok": True, "lines": ["here"], "data": {"platform": platform}, "seconds": 0.0}
      if part == "properties":
        return spawn(suite, "no such part", given, seconds)
      return {"ok": True, "lines": ["well"], "data": {}, "seconds": 0.0}
    for platform, says in (("gpu", "Measured on a GPU."), ("cpu", NOT_MEASURED),
                           (None, "take nothing below for a measurement")):
      begun.clear()
      with mock.patch.object(device_suite, "spawn", fail_properties):
        status, printed, found, text = self.run_suite("--tiny")
      self.assertEqual(status, 1)
      self.assertEqual(begun, list(gpu_suite.SUITE.shares))
      self.assertIn(says, printed)
      self.assertIn(says, text)
    self.assertIn("properties: FAILED", printed)
    self.assertIn("Ended without a result: exit status 1", text)
    self.assertIn("KeyError", found["properties"]["lines"][1])

  def test_a_part_that_hangs_is_stopped(self):
    run_group = device_suite.run_group
    hangs = lambda command, *rest: run_group(
        [command[0], "-c", "import time; time.sleep(60)"], *rest)
    with (mock.patch.object(device_suite, "GRACE_SECONDS", 0.2),
          mock.patch.object(device_suite, "run_group", hangs),
          contextlib.redirect_stdout(io.StringIO())):
      given = mock.Mock(out=self.folder, tiny=True, cases=())
      found = device_suite.spawn(gpu_suite.SUITE, "environment", given, 0.2)
    self.assertFalse(found["ok"])
    self.assertIn("stopped after 0 s", found["lines"][0])

  def test_stopping_a_part_stops_the_programs_it_started(self):
    # The script itself, without JAX, with a part that starts a program in its own process group.
    pid_file = self.folder / "process"
    started = (f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); "
               "time.sleep(60)")
    script = gpu_suite.ROOT / "attn_core_test" / "gpu_suite.py"
    program = f'''
import runpy, sys, types
sys.path.insert(0, {str(script.parent)!r})
import process_group
def part(settings):
  process_group.run_group([sys.executable, "-c", {started!r}], 60)
parts = types.SimpleNamespace(Settings=lambda *_: None, PARTS=dict(environment=part))
sys.modules["jax"] = types.SimpleNamespace(devices=list)
sys.modules["attn_core_test.gpu_suite_parts"] = parts
sys.modules["attn_core_test.process_group"] = process_group
sys.argv = ["gpu_suite.py", "--part", "environment"]
runpy.run_path({str(script)!r}, run_name="__main__")'''
    output, ending = device_suite.run_group([sys.executable, "-c", program], 5)
    self.assertEqual(ending, "stopped after 5 s", output)
    with self.assertRaises(ProcessLookupError):
      os.kill(int(pid_file.read_text("utf-8")), 0)

  def test_startup_counts_toward_the_time_of_a_part(self):
    given = device_suite.argparse.Namespace(part="late", budget=10.0, tiny=True, out=None, cases=(),
                                         result=None)
    budgets = []
    def late(settings):
      budgets.append(settings.seconds)
      return gpu_suite_parts.Found(True, [], {})
    with (mock.patch.dict(gpu_suite_parts.PARTS, late=late),
          mock.patch.object(jax, "devices", lambda: time.sleep(0.5))):
      self.assertEqual(device_suite.run_part(gpu_suite.SUITE, given), 0)
    self.assertLess(budgets[0], 9.6)

  def test_wrong_results_are_reported(self):
    case = property_cases.CASES[0]
    wrong = case._replace(sees=lambda b, h, t, s: s < t)
    plan = ("flash_attn2", "float32", (wrong,)), ("sdpa", "float32", property_cases.CASES[1:2])
    with mock.patch.object(device_suite_parts, "TINY_PROPERTIES", plan):
      found = gpu_suite_parts.properties(gpu_suite_parts.Settings(True, 100.0))
    self.assertFalse(found.ok)
    self.assertRegex(found.lines[1], r"flash_attn2 float32 causal_gqa: out off by .*d_key off by")
    self.assertStartsWith(found.data["results"][1]["verdict"], "refused: mechanism='sdpa'")

  def test_running_out_of_time_is_a_failure(self):
    found = gpu_suite_parts.properties(gpu_suite_parts.Settings(True, -1.0))
    self.assertFalse(found.ok)
    self.assertIn("2 no time left", found.lines[0])
    found = gpu_suite_parts.repeatability(gpu_suite_parts.Settings(True, -1.0))
    self.assertFalse(found.ok)
    self.assertIn("No time left for causal D16", found.lines[1])

  def test_the_hardware_part_begins_with_the_lse_of_odd_lengths(self):
    names = [check.name for check in gpu_suite_hardware.checks(False)]
    self.assertEqual(names[:10], [f"forward T={length} {mask}" for length in (
        1, 64, 200, 1000, 2047) for mask in ("Full", "Causal")])
    self.assertLen(set(names), len(names))
    self.assertEqual(gpu_faults.check(gpu_suite_hardware.poison_shared_memory, ()), 1)

  def test_the_hardware_part_reports_wrong_numbers_and_bits_that_differ(self):
    check = next(iter(gpu_suite_hardware.checks(True)))
    zeros = lambda operands, *_: (operands.query * 0, operands.query[..., 0].swapaxes(1, 2) * 0)
    with mock.patch.object(gpu_suite_hardware, "_kernel", lambda: mock.Mock(forward=zeros)):
      self.assertRegex(check.run(), "out off by .*; lse off by [^;]*$")
    _, text = gpu_suite_hardware._repeated(lambda count=itertools.count(): np.array(next(count)), 3)
    self.assertEqual(text, "differ in 2 of 2 runs")

  def test_summaries_of_the_sanitizer(self):
    nothing = "========= ERROR SUMMARY: 0 errors"
    for text, ending, clean in (
        (nothing, "exit status 0", True), (nothing, "exit status 1", False),
        ("========= ERROR SUMMARY: 3 errors", "exit status 0", False),
        ("killed", "exit status 137", False)):
      summary = gpu_suite_parts.sanitizer_summary(text, ending)
      self.assertEqual(gpu_suite_parts.is_clean(summary), clean, summary)
    self.assertTrue(gpu_suite_parts.is_clean(gpu_suite_parts.sanitizer_summary(
        "== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "exit status 0")))

  def test_a_failed_program_is_never_clean(self):
    output = "NotImplementedError: x\n========= ERROR SUMMARY: 0 errors\n"
    for ending, ok in (("exit status 1", False), ("exit status 0", True)):
      run_group = lambda *_, ending=ending: (output, ending)
      with (mock.patch.object(gpu_suite_parts, "run_group", run_group),
            mock.patch.object(gpu_suite_parts, "_sanitizer_path", lambda: "tool"),
            mock.patch.object(gpu_suite_parts, "resolved_platform", lambda _: "gpu")):
        found = gpu_suite_parts.sanitizer(gpu_suite_parts.Settings(True, 10.0))
      self.assertEqual(found.ok, ok, found.lines)
    self.assertIn("memcheck: ERROR SUMMARY: 0 errors", found.lines)

  def test_cases(self):
    self.assertLen(GPU_CASES, 4 + 2 * 3 * 6)
    for name in GPU_CASES[4:]:
      case = CASES[name]
      self.assertEqual((case.batch * case.queries, case.heads * case.width), (16384, 2048), name)

  def test_mechanisms_and_peers_exist(self):
    self.assertContainsSubset(gpu_suite_parts.PEERS, contenders.peer_names("gpu"))
    mechanisms = (*gpu_suite_parts.MECHANISMS, *(plan[0] for plan in gpu_suite_parts.PROPERTIES))
    self.assertContainsSubset(mechanisms, table.names())


if __name__ == "__main__":
  absltest.main()
