# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The planner with reports of tpu_suite and gpu_suite in place of peak rates."""

import contextlib
import copy
import io
import json
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import AbstractMesh

from attn_core import Shapes, masks, plan_context_parallel
from attn_core.benchmark import cases, report as benchmark_report, runner
from attn_core.plan import __main__ as command, measured, peaks

SHAPES = Shapes(1, 2**17, 2**17, 32, 8, 128, 128)
MESH = AbstractMesh((8,), ("sp",))


def result(name, width, direction, flops, seconds, **more):
  return dict(case=dict(name=name, width=width), direction=direction, contender="flash_attn2",
              peer=False, wrong=False, flops=flops, seconds=seconds) | more


RESULTS = [
    result("long", 128, "forward", 2e14, 1.0), result("long", 128, "forward_backward", 7e14, 6.0),
    result("long", 128, "forward", 2e14, 4.0, contender="blockwise"),
    result("long", 128, "forward", 2e14, 0.1, contender="splash", peer=True),
    result("long", 128, "forward", 2e14, 0.2, contender="cudnn", wrong=True),
    result("short", 128, "forward", 1e13, 0.01),
    result("short", 128, "forward_backward", 3e13, 1.0),
    result("narrow", 64, "forward", 1e14, 1.0), result("narrow", 64, "forward_backward", 3e14, 3.0)]
REPORT = {"environment": {"data": {}}, "times": {"data": {
    "environment": {"device": "TPU v5p"}, "results": RESULTS}}}


def changed(*keys, to):
  """Returns the report with another value in one place; `to` None: without it."""
  found = copy.deepcopy(REPORT)
  inner = found
  for key in keys[:-1]:
    inner = inner[key]
  if to is None:
    del inner[keys[-1]]
  else:
    inner[keys[-1]] = to
  return found


class SpeedTest(parameterized.TestCase):

  @parameterized.parameters((128, 2e14, 1e14), (256, 2e14, 1e14), (64, 1e14, 1e14),
                            (16, 1e14, 1e14))
  def test_of_the_nearest_width_and_the_longest_case(self, width, forward, backward):
    self.assertEqual(measured.speed(REPORT, "v5p", width), (forward, backward))

  def test_the_plan_computes_at_measured_speed(self):
    plans = [plan_context_parallel(SHAPES, masks.causal(), MESH, "v5p", report=report)
             for report in (None, REPORT)]
    for peak, found in zip(*(plan.predictions for plan in plans)):
      if peak.impossible:
        continue
      flops = peaks.find("v5p").flops
      forward, backward = (peak.compute_seconds * flops * share for share in (2 / 7, 5 / 7))
      self.assertAlmostEqual(found.compute_seconds, forward / 2e14 + backward / 1e14, places=9)
      self.assertEqual(found.link_seconds, peak.link_seconds)
      self.assertGreater(found.seconds, peak.seconds)
    only = plan_context_parallel(SHAPES, masks.causal(), MESH, "TPU v5p", backward=False,
                                 report=REPORT).predictions[0]
    forward = plan_context_parallel(SHAPES, masks.causal(), MESH, "v5p",
                                    backward=False).predictions[0]
    self.assertAlmostEqual(only.compute_seconds,
                           forward.compute_seconds * peaks.find("v5p").flops / 2e14)

  def test_reads_what_the_benchmark_writes(self):
    case = cases.scale(cases.CASES["causal_f32_d64_t512"], 1, 32, 1)
    found = runner.run_attention_benchmarks(("flash_attn2",), (case,), repeats=3, peers=(),
                                            progress=False)
    data = json.loads(json.dumps({"times": {"data": benchmark_report.to_data(found)}}))
    for entry in data["times"]["data"]["results"]:  # a busy machine may reverse them
      entry["seconds"] = 1.0 if entry["direction"] == "forward" else 3.0
    self.assertEqual(measured.device_kind(data), "cpu")
    self.assertGreater(measured.speed(data, "cpu", 64).backward, 0)


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (changed("times", to=None), "report: got the parts environment, .*expected tpu_suite.json"),
      (changed("times", "data", "results", to=None), "'times' has no results.*--parts times"),
      (changed("times", "data", "results", to=[]), "no case with times of forward and backward"),
      (changed("times", "data", "results", 0, "seconds", to="soon"), "another form .*'soon'"),
      (changed("times", "data", "results", 0, "seconds", to=0), "another form .*0.0 s"),
      (changed("times", "data", "results", 1, "flops", to=None), "another form .*'flops'"),
      (changed("times", "data", "results", to=3), "another form .*TypeError"),
      (changed("times", "data", "environment", "device", to="NVIDIA H200"),
       "got times of 'NVIDIA H200'; expected times of 'v5p'"),
      (changed("times", "data", "environment", "device", to="TPU v99"), "device_kind='TPU v99'"),
      ({}, "got the parts none"), (7, "got int; expected the path"))
  def test_reports_of_another_form(self, report, message):
    with self.assertRaisesRegex(ValueError, message):
      plan_context_parallel(SHAPES, masks.causal(), MESH, "v5p", report=report)

  def test_files(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    with self.assertRaisesRegex(ValueError, "which cannot be read .No such file"):
      measured.device_kind(folder / "no.json")
    for text, message in (("{", "which is not JSON"), ("[]", "JSON of a list")):
      (folder / "wrong.json").write_text(text, encoding="utf-8")
      with self.assertRaisesRegex(ValueError, message):
        measured.device_kind(str(folder / "wrong.json"))


class CommandTest(absltest.TestCase):

  def run_command(self, *arguments):
    """Returns (what was printed, the exit status)."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, (
        contextlib.redirect_stderr(printed)), mock.patch.object(sys, "argv", ["plan", *arguments]):
      try:
        command.main()
        status = 0
      except SystemExit as ending:
        status = ending.code
    return printed.getvalue(), status

  def test_plans_for_the_device_of_the_report(self):
    file = self.create_tempfile(content=json.dumps(REPORT)).full_path
    few = ("--mesh", "sp=8", "--tokens", "128k")
    text, status = self.run_command("--report", file, *few)
    self.assertEqual(status, 0, text)
    self.assertIn("8 x TPU v5p, 131,072 tokens", text)
    self.assertNotEqual(text, self.run_command("--device", "v5p", *few)[0])
    text, status = self.run_command("--report", file, "--device", "h100", *few)
    self.assertEqual(status, 2)
    self.assertIn("got times of 'TPU v5p'; expected times of 'h100'", text)
    text, status = self.run_command("--report", "/no.json", *few)
    self.assertEqual(status, 2)
    self.assertIn("--report: got '/no.json'", text)


if __name__ == "__main__":
  absltest.main()
