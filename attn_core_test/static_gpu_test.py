# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of GPU kernels by machine code: its contenders and its report."""

import json
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from attn_core.benchmark import __main__ as command
from attn_core.benchmark.static import gpu as static_gpu, gpu_programs, gpu_report
from attn_core.benchmark.static.gpu import Kernel

FORWARD, BACKWARD = (next(
    program for program in gpu_programs.plan((64,))
    if program.contender == gpu_programs.OURS and program.case.causal
    and program.backward is backward) for backward in (False, True))
OTHER = FORWARD._replace(contender=gpu_programs.TOKAMAX)
LOOPS = [{"all": 425, "products": 12, "exponentials": 66}, {"all": 1702, "products": 12}]


def kernel(program, name, **fields):
  of = dict(registers=168, spills=0, shared_memory=1000, serialized=False, counts={}, loops=LOOPS)
  return Kernel(program.label, name, **{**of, **fields})


class ReportTest(parameterized.TestCase):

  def results(self):
    found = {
        FORWARD.label: [kernel(FORWARD, "attn_core_forward_mosaic_gpu_kernel")],
        BACKWARD.label: [kernel(BACKWARD, f"attn_core_{name}_mosaic_gpu_kernel", spills=4)
                         for name in ("forward", "backward_query", "backward_key")],
        OTHER.label: [{"program": OTHER.label, "error": "ModuleNotFoundError: tokamax"}]}
    absent = OTHER._replace(backward=True)
    return gpu_report.results_of([FORWARD, BACKWARD, OTHER, absent], found)

  def test_a_backward_is_without_its_forward(self):
    forward, backward, failed, absent = self.results()
    self.assertLen(forward.kernels, 1)
    self.assertEqual([x.name.split("_mosaic")[0] for x in backward.kernels],
                     ["attn_core_backward_key", "attn_core_backward_query"])
    self.assertIn("tokamax", failed.reason)
    self.assertEqual(absent.reason, "no kernel")

  def test_tables(self):
    text = gpu_report.to_markdown(self.results(), {"jax": "1.2.3"})
    rows = [line for line in text.splitlines() if line.startswith("| causal_d64")]
    self.assertLen(rows, 3)
    self.assertIn("| forward | flash_attn2: forward | 168 | 0 | no | 12 / 12 | 425 / 1,702 "
                  "| 66 / 0 | 1,000 | 65,536 |", rows[0])
    self.assertIn("backward_key | 168 | 4 |", rows[1])
    self.assertIn("jax 1.2.3", text)
    self.assertIn(f"* {OTHER.label}: ModuleNotFoundError: tokamax", text)
    data = json.loads(gpu_report.to_json(self.results(), {"jax": "1.2.3"}))
    self.assertLen(data["results"], 4)
    self.assertEqual(data["versions"], {"jax": "1.2.3"})

  def test_names_differ(self):
    labels = [program.label for program in gpu_programs.plan()]
    self.assertLen(set(labels), len(labels))
    self.assertEqual(list(gpu_programs.programs()), labels)

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, "widths: got 65.*64, 128, 256"):
      gpu_report.run([65])
    with self.assertRaises(SystemExit):
      command.main(["--static", "gpu", "--chips", "v5e"])


@unittest.skipIf(static_gpu.missing(), f"nothing to compile with: {static_gpu.missing()}")
class CompileTest(absltest.TestCase):

  def test_ours_and_others(self):
    group = [FORWARD._replace(contender=gpu_programs.JAX), FORWARD, BACKWARD]
    found = {}
    for one in static_gpu.measure(gpu_report.PROGRAMS, [x.label for x in group]):
      found.setdefault(one.program, []).append(one)
    # The forward of a backward is the second of this kernel in its process.
    self.assertEqual([len(found[x.label]) for x in group], [1, 1, 3])
    results = gpu_report.results_of(group, found)
    self.assertEqual([len(result.kernels) for result in results], [1, 1, 2])
    for result in results:
      self.assertTrue(all(x.loops and not x.spills for x in result.kernels))


if __name__ == "__main__":
  absltest.main()
