# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark: counts, errors, files and refusals; speed is never asserted."""

import contextlib
import importlib.util
import io
import itertools
import json
import pathlib
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from attn_core.benchmark import __main__ as command, runner
from attn_core.benchmark import cases as cases_lib, contenders, measure, paged, report
from attn_core.masks import materialize
from attn_core_test.cases import CASES, Case, flops, mask, scale, visible_pairs

TINY = Case("tiny", heads=4, key_heads=2, width=8, value_width=4, queries=24, keys=24)
MECHANISMS = ("flash_attn2", "vanilla")

# The cases of the grid differ in length, width and dtype only: one of each mask is enough.
DIFFERENT = ("causal_f32_d64_t512", "full_f32_d64_t512", *(
    name for name in CASES if not name.startswith(("causal_", "full_")) and "_f32_" not in name))


def _small(case):
  return scale(case, 4, 48)


class CasesTest(parameterized.TestCase):

  @parameterized.parameters(*DIFFERENT)
  def test_visible_pairs_are_those_of_the_dense_mask(self, name):
    case = _small(CASES[name])
    shape = (case.batch, case.heads, case.queries, case.keys)
    dense = np.asarray(materialize.to_dense(mask(case), shape))
    self.assertEqual(visible_pairs(case), dense.sum())
    self.assertEqual(flops(case, False), 2 * dense.sum() * (case.width + case.value_width))

  def test_names_are_keys(self):
    self.assertEqual(list(CASES), [case.name for case in CASES.values()])

  def test_backward_costs_two_and_a_half_forwards(self):
    case = TINY._replace(value_width=TINY.width)
    self.assertEqual(flops(case, True), 3.5 * flops(case, False))
    self.assertEqual(flops(case, False), 4 * 4 * (24 * 25 // 2) * 8)

  def test_backward_counts_both_widths(self):
    pairs = visible_pairs(TINY)
    self.assertEqual(flops(TINY, True), 2 * pairs * (4 * 8 + 3 * 4))

  @parameterized.parameters(*DIFFERENT)
  def test_scaling_keeps_ratios(self, name):
    case = CASES[name]
    small = scale(case, 16, 1024)
    self.assertEqual(small.heads // small.key_heads, case.heads // case.key_heads)
    self.assertLessEqual(small.heads, max(16, case.heads // case.key_heads))
    self.assertLessEqual(max(small.queries, small.keys), 1024)
    if case.window and max(case.queries, case.keys) > 1024:
      self.assertEqual((small.window[0] + 1) * case.keys, (case.window[0] + 1) * small.keys)
    self.assertEqual(scale(case, None, None), case)

  def test_visited_blocks(self):
    case = CASES["causal_f32_d64_t1024"]  # Query blocks of 512 see 2 and 4 blocks of 256 keys.
    self.assertEqual(cases_lib.visited_blocks(case), 8 * (2 + 4))
    packed = case._replace(documents=2)
    self.assertEqual(cases_lib.visited_blocks(packed), 8 * (2 + 2))


class MeasureTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(window=(7, 0), soft_cap=50.0, softmax_scale=0.3, sinks=True, documents=2),
      dict(queries=3), dict(queries=1), dict(score_mod="custom"))
  def test_the_library_is_right(self, **changes):
    case = TINY._replace(**changes)
    inputs = contenders.make_inputs(case)
    expected = measure.truth(case, inputs, True)
    self.assertEqual(expected["output"].dtype, np.float64)
    contender, = contenders.mechanisms(("flash_attn2",))
    error = measure.check(contender.prepare(case, inputs, True), expected)
    self.assertLess(error.largest, 1e-5)

  @parameterized.parameters(
      (dict(queries=1, prefix=32), "drafts"), (dict(queries=4), "prefix once"))
  def test_pages_hold_the_keys_and_values(self, changes, refuses):
    case = TINY._replace(batch=3, keys=40, value_width=TINY.width, **changes)
    inputs = contenders.make_inputs(case)
    np.testing.assert_array_equal(inputs.key[0, :case.prefix], inputs.key[2, :case.prefix])
    self.assertGreater(np.abs(inputs.key[0] - inputs.key[2]).max(), 0)
    expected = measure.truth(case, inputs, False)
    everyone = paged.mechanisms((paged.MECHANISM,))
    self.assertLen(everyone, 3)
    for contender in everyone:
      if refuses in contender.name:
        with self.assertRaisesRegex(NotImplementedError, "a case without|one query a row"):
          contender.prepare(case, inputs, False)
        continue
      error = measure.check(contender.prepare(case, inputs, False), expected)
      self.assertLess(error.largest, 1e-5, contender.name)
    self.assertEmpty(paged.mechanisms(("vanilla",)))
    with self.assertRaisesRegex(NotImplementedError, "gradient or as many keys as queries"):
      everyone[0].prepare(TINY, inputs, True)

  def test_peers_decode_what_the_library_decodes(self):
    case = TINY._replace(queries=1, value_width=TINY.width)
    inputs = contenders.make_inputs(case)
    expected = measure.truth(case, inputs, False)
    peers, _ = contenders.peers("cpu")
    self.assertIn("jax.nn xla", [peer.name for peer in peers])
    for peer in peers:
      if peer.name == "tokamax flex":
        with self.assertRaisesRegex(NotImplementedError, "with a score mod only"):
          peer.prepare(case, inputs, False)
        continue
      error = measure.check(peer.prepare(case, inputs, False), expected)
      self.assertLess(error.largest, 1e-5, peer.name)

  def test_peers_add_what_score_mods_add(self):
    case = TINY._replace(score_mod="relative", value_width=TINY.width)
    inputs = contenders.make_inputs(case)
    expected = measure.truth(case, inputs, False)
    for peer in contenders.peers("cpu")[0]:
      if peer.package != "ejkernel":  # which has no bias
        error = measure.check(peer.prepare(case, inputs, False), expected)
        self.assertLess(error.largest, 1e-5, peer.name)

  def test_wrong_results_are_reported(self):
    inputs = contenders.make_inputs(TINY)
    expected = measure.truth(TINY, inputs, False)
    full, = contenders.mechanisms(("vanilla",))
    error = measure.check(full.prepare(TINY._replace(causal=False), inputs, False), expected)
    self.assertTrue(error.is_wrong("bfloat16"))
    self.assertTrue(measure.Error(float("nan"), float("nan")).is_wrong("bfloat16"))

  def test_every_contender_is_timed_in_every_round(self):
    calls = {"a": [], "b": []}
    times = measure.rounds({name: lambda n, x=x: x.append(n) for name, x in calls.items()}, 3)
    self.assertEqual({name: len(x) for name, x in times.items()}, {"a": 3, "b": 3})

  def test_rounds_settle_when_a_contender_takes_gigabytes(self):
    self.assertEqual(measure.settle_seconds([None, 1000]), 0)
    self.assertGreater(measure.settle_seconds([None, 1000, 2**32]), 0)
    calls = {0.0: 0, 0.2: 0}
    for settle in calls:
      def call(number, settle=settle):
        calls[settle] += number
        time.sleep(0.02 * number)
      measure.rounds({"a": call}, 2, settle)
    self.assertGreater(calls[0.2], calls[0.0])


class BenchmarkTest(parameterized.TestCase):

  def run_tiny(self, **kwargs):
    return runner.run_attention_benchmarks(
        MECHANISMS, [TINY], repeats=1, peers=False, progress=False, **kwargs)

  def test_writes_json_text_and_picture(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    found = self.run_tiny(out=folder, name="tiny")
    read = json.loads((folder / "tiny.json").read_text("utf-8"))
    for field in ("date", "device", "cpu", "cores", "python", "versions", "load_average"):
      self.assertIn(field, read["environment"])
    self.assertEqual(read["environment"]["versions"]["jax"], jax.__version__)
    self.assertEqual(
        [(r["contender"], r["direction"]) for r in read["results"]],
        [(name, direction) for direction in runner.DIRECTIONS for name in MECHANISMS])
    for result in read["results"]:
      self.assertEqual(Case(**result["case"]), TINY)
      self.assertEqual(result["flops"], flops(TINY, result["direction"] != "forward"))
      self.assertFalse(result["wrong"])
      self.assertLess(result["error"]["largest"], 1e-5)
      self.assertGreater(result["temp_bytes"], 0)
      self.assertGreater(result["compile_seconds"], 0)
    text = (folder / "tiny.md").read_text("utf-8")
    self.assertEqual(text, report.to_markdown(found))
    for words in ("tiny, forward_backward", "B1 H4/2 T24 D8 E4 float32 causal", *MECHANISMS):
      self.assertIn(words, text)
    self.assertEqual((folder / "tiny.png").exists(), bool(importlib.util.find_spec("matplotlib")))

  def test_json_is_read_back(self):
    wrong = report.Result(TINY._replace(window=(7, 0)), "forward", "peer", True, (0.1, 0.2, 0.4),
                          1e9, None, None, measure.Error(float("nan"), float("nan")), TINY)
    where = report.environment(())
    refused = report.Refusal("cudnn", None, None, "no GPU")
    text = report.to_json(report.Report(where, (wrong,), (refused,), {"calls, seconds": 1.0}))
    self.assertIn('"window": [', text)
    again = report.from_json(text)
    self.assertEqual(report.to_json(again), text)
    self.assertTrue(again.results[0].wrong)
    self.assertEqual(hash(again.results[0].case), hash(wrong.case))

  def test_no_text_of_a_picture_overlaps_another(self):
    if importlib.util.find_spec("matplotlib") is None:
      self.skipTest("matplotlib is not installed")
    from matplotlib import text
    paths = sorted((pathlib.Path(report.__file__).parents[2] / "attn_core_test" / "results").glob(
        "cpu_*.json"))
    self.assertNotEmpty(paths)
    reports = [report.from_json(path.read_text("utf-8")) for path in paths]
    # One panel, whose title has to wrap, with the longest label that there is.
    result = report.Result(TINY, "forward", "a peer", True, (0.1234,), 1e9, None, None,
                           measure.Error(1.0, 1.0), TINY)
    where = report.environment(()) | {"cpu": "A Processor With a Long Name " * 3}
    reports.append(report.Report(where, (result, result._replace(contender="flash_attn2"))))
    for number, found in enumerate(reports):
      drawn = report.figure(found)
      self.assertEqual(drawn.get_facecolor(), (1, 1, 1, 1))
      boxes = []  # of the texts that are drawn, not of those of ticks outside the axes
      def draw(word, renderer):
        if word.get_visible() and word.get_text():
          boxes.append((word.get_text(), word.get_window_extent(renderer)))
      with mock.patch.object(text.Text, "draw", draw):
        drawn.canvas.draw()
      self.assertGreater(len(boxes), 4)
      for (one, a), (other, b) in itertools.combinations(boxes, 2):
        self.assertFalse(a.overlaps(b), f"report {number}: {one!r} over {other!r}")
      for word, box in boxes:
        self.assertTrue(drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 and
                        drawn.bbox.y0 <= box.y0 and box.y1 <= drawn.bbox.y1, word)

  def test_draws_an_earlier_run_again(self):
    if importlib.util.find_spec("matplotlib") is None:
      self.skipTest("matplotlib is not installed")
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.run_tiny(out=folder, name="tiny_1.0")
    (folder / "tiny_1.0.png").unlink()
    self.assertEqual(command.main(["--redraw", str(folder / "tiny_1.0.json")]), 0)
    self.assertTrue((folder / "tiny_1.0.png").exists())

  def test_refusals_are_reported(self):
    found = runner.run_attention_benchmarks(
        ("vanilla", "sdpa", "cudnn"), [TINY], directions=("forward",), repeats=1, peers=False,
        progress=False)
    self.assertEqual([r.contender for r in found.results], ["vanilla"])
    self.assertEqual([r.contender for r in found.refusals], ["sdpa", "cudnn"])
    text = report.to_markdown(found)
    self.assertIn("E != D", text)
    self.assertIn("tiny forward", text)

  def test_no_case_starts_that_might_end_too_late(self):
    clock = [100.0]
    durations = iter((3.0, 5.0, 3.0))
    def add(found, *_):
      clock[0] += next(durations)
      return found
    cases = [TINY._replace(name=f"case {number}") for number in range(5)]
    with (mock.patch.object(runner, "_add_case", add),
          mock.patch.object(runner.time, "monotonic", lambda: clock[0])):
      found = runner.run_attention_benchmarks(
          MECHANISMS, cases, peers=False, progress=False, max_seconds=13.5)
    # Calls start after 0, 3 and 8 seconds; at 11 seconds another call of 5 would be too late.
    self.assertEqual([(r.contender, r.case, r.reason) for r in found.refusals],
                     [("everyone", f"case {number}", "no time for it within 14 s")
                      for number in (3, 4)])

  def test_programs_over_the_memory_limit_are_refused(self):
    found = self.run_tiny(directions=("forward",), max_temp_bytes=1)
    self.assertEmpty(found.results)
    self.assertLen(found.refusals, 2)
    self.assertIn("MemoryError", found.refusals[0].reason)

  @parameterized.parameters(
      (dict(mechanisms=["flash"]), "flash_attn2"), (dict(cases=["llama9"]), "llama3_8b"),
      (dict(directions=["backward"]), "forward_backward"), (dict(cases="vit_b16"), "sequence"))
  def test_errors_for_unknown_names_list_the_known_ones(self, arguments, known):
    with self.assertRaisesRegex(ValueError, f"{list(arguments)[0]}.*{known}"):
      runner.run_attention_benchmarks(peers=False, progress=False, **arguments)

  @parameterized.parameters(
      (dict(repeats=0), "repeats: got 0"), (dict(max_heads=0), "max_heads: got 0"),
      (dict(max_tokens=-1), "max_tokens: got -1"), (dict(dtype="small"), "dtype: got 'small'"))
  def test_bad_sizes(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      runner.run_attention_benchmarks(["vanilla"], ["vit_b16"], peers=False, progress=False,
                                         **arguments)

  def test_suites_name_cases(self):
    for name in (*runner.DEFAULT, *(name for name, _ in runner.FULL), *cases_lib.SHORT_CASES):
      self.assertIn(name, CASES)

  def test_peers_are_found_or_reported(self):
    found, absent = contenders.peers("cpu")
    names = {peer.name for peer in (*found, *absent)}
    self.assertEqual(names, {"jax.nn xla", "tokamax", "tokamax flex", "ejkernel xla", "torch sdpa"})
    self.assertIn("jax.nn xla", {peer.name for peer in found})
    on_gpu = {peer.name for peer in itertools.chain(*contenders.peers("gpu"))}
    self.assertEqual(on_gpu, names | {"jax.nn cudnn", "flash_attn"})

  def test_command_line(self):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      self.assertEqual(command.main(["--list"]), 0)
    for name in (*CASES, "flash_attn2"):
      self.assertIn(name, printed.getvalue())
    with contextlib.redirect_stderr(io.StringIO()) as printed, self.assertRaises(SystemExit):
      command.main(["--cases", "llama9", "--no-peers"])
    self.assertIn("llama3_8b", printed.getvalue())


if __name__ == "__main__":
  absltest.main()
