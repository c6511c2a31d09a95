# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Static cycles of TPU kernels: computed schedules, and the parser of libtpu's output."""

import functools
import importlib.util
import json
import pathlib
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import masks
from attn_core.benchmark.static import (profile as static_profile, tpu as static_tpu, tpu_decode,
                                        tpu_decode_programs, tpu_pages, tpu_pages_programs,
                                        tpu_programs, tpu_whole, tpu_whole_programs)
from attn_core.benchmark.cases import Case
from attn_core.kernels.tpu.flash import schedule
from attn_core_test import sampling

DECODERS = sampling.names(tpu_decode_programs.CONTENDERS, (
    tpu_decode_programs.WRITES, tpu_decode_programs.JAX_PAGED))
RESULTS = pathlib.Path(__file__).parent / "results"
SMALL = Case("small", 1, 1, 1, 128, 128, 512, 512, dtype="bfloat16")


def result_of(entry):
  """Returns the result that `static_tpu.to_json` wrote as `entry`."""
  program = dict(entry["program"])
  case = {key: tuple(x) if isinstance(x, list) else x for key, x in program["case"].items()}
  program |= {"case": Case(**case), "blocks": tuple(program["blocks"])}
  kind = static_profile.Failure if "reason" in entry else static_profile.Static
  return kind(**{**entry, "program": tpu_programs.Program(**program)})


class ComputedTest(parameterized.TestCase):

  @parameterized.product(
      mask=(masks.full(), masks.causal(), masks.causal() & masks.window(300, 0)),
      tiling=(schedule.Tiling(1024, 1024, 256, 256, 128, 128),
              schedule.Tiling(1024, 1024, 256, 512, 256, 256),
              schedule.Tiling(1024, 2048, 512, 256, 256, 128)),
      by_keys=(False, True))
  def test_equals_the_schedule(self, mask, tiling, by_keys):
    steps, _ = schedule.build(mask, tiling, by_keys=by_keys)
    self._check(steps)

  @parameterized.product(halves=(1, 2), descending=(False, True))
  def test_rows_in_falling_order_and_lists_of_two_lengths(self, halves, descending):
    tiling = schedule.Tiling(512, 512, 256, 256, 128, 128, halves=halves)
    steps, _ = schedule.build(masks.causal(), tiling, by_keys=False, descending=descending)
    self.assertLen(steps.rows, halves)
    for k in range(halves):
      self._check(type(steps)(*(x[k:k + 1] for x in steps)))

  def _check(self, steps):
    entry = tpu_programs.computed(steps)
    for n in range(steps.rows.shape[1]):
      self.assertEqual(tuple(int(x) for x in entry(np.int32(n))),
                       tuple(int(x[0, n]) for x in steps))

  def test_refuses_masks_that_distances_do_not_determine(self):
    tiling = schedule.Tiling(1024, 1024, 128, 128, 128, 128)
    steps, _ = schedule.build(~masks.window(200, 200), tiling, by_keys=False)
    with self.assertRaisesRegex(ValueError, "visits.*distances"):
      tpu_programs.computed(steps)


  @parameterized.product(
      mask=(masks.full(), masks.causal(), masks.causal() & masks.window(300, 0)),
      tiling=(schedule.Tiling(1024, 1024, 256, 256, 128, 128),
              schedule.Tiling(1024, 2048, 512, 256, 256, 128)))
  def test_blocks_of_keys_are_looked_at_in_their_first_step(self, mask, tiling):
    steps, _ = schedule.build(mask, tiling, by_keys=False)
    choice = tpu_whole_programs._ComputedChoice(None).prepared(steps, False)
    seen = set()
    for n, column in enumerate(steps.columns[0]):
      choice._step = n
      self.assertEqual(bool(choice._is_new(column)), int(column) not in seen)
      seen.add(int(column))

  def test_schedules_of_traced_ids_are_those_of_their_values(self):
    tiling = schedule.Tiling(1024, 1024, 256, 256, 128, 128)
    case = tpu_whole.CAUSAL._replace(name="packed4", queries=1024, keys=1024, documents=4)
    known = tpu_whole_programs._KnownSteps(tpu_whole_programs.mask_array(case))
    def traced(ids):
      _, lists = known.build(masks.causal() & masks.segments(ids), tiling, by_keys=False)
      return jnp.int32(lists.longest)
    self.assertEqual(int(jax.jit(traced)(jnp.zeros((1, 1024), jnp.int32))), 4)
    steps = known._found[-1][1]
    np.testing.assert_array_equal(steps.rows, [[0, 1, 2, 3]])
    np.testing.assert_array_equal(steps.columns, [[0, 1, 2, 3]])


class ReadingTest(parameterized.TestCase):

  def test_innermost_loops(self):
    depths = [0, 1, 1, 2, 2, 1, 2, 1, 0]  # one bundle of the inner loop was hoisted
    begins = [0, 1, 0, 1, 0, 0, 0, 0, 0]
    marks = list(zip(depths, map(bool, begins)))
    self.assertEqual(list(static_profile._innermost(marks)), [(3, 7)])

  def test_bundles_without_a_printed_depth(self):
    lines = ["  0x1 LH: > { a }", "  0x2   : {}", "  0x3   : { b }"]
    self.assertEqual(static_profile._bundles(lines), [(1, True), (1, False), (0, False)])

  def test_tables(self):
    program = tpu_programs.Program("flash_attn2", SMALL, False, "v6e", (512, 512, 512))
    fast = static_profile.Static(program, 1000, 10, 2**20, 50, 0, {"matrix": 0.5}, 0.0, 10**9)
    slow = fast._replace(program=program._replace(contender="jax splash"), cycles=1500)
    worse = slow._replace(cycles=1600)
    failure = static_profile.Failure(program, "too large")
    versions = {"jax": "1", "libtpu": "2"}
    text = static_tpu.to_markdown([fast, worse, slow, failure], versions)
    row, other = [line for line in text.splitlines() if line.startswith("| small")]
    self.assertIn("| 1.50 |", row)
    self.assertIn("| 1000 |", row)  # for the one block
    self.assertIn("| 1,500 |", other)
    self.assertIn("too large", text)
    self.assertLen(json.loads(static_tpu.to_json([fast, failure], versions))["results"], 2)

  def test_an_interrupted_run_continues(self):
    programs = [tpu_programs.Program("flash_attn2", SMALL, False, "v6e", (n, 512, 512))
                for n in (128, 256, 512)]
    folder = pathlib.Path(self.create_tempdir().full_path)
    measured, interrupts = [], [1]
    def measure(programs, advance):
      found = []
      for n, program in enumerate(programs):
        if n == 2 and interrupts:
          raise KeyboardInterrupt(interrupts.pop())
        measured.append(program)
        found.append(static_profile.Static(program, 1000 * program.blocks[0], 1, 2, 3, 4,
                                           {"matrix": 0.5}, 6e-9, 7))
        advance(found[-1])
      return found
    run = functools.partial(
        static_tpu.report, programs, "name", static_tpu._line, static_tpu.to_markdown, out=folder,
        progress=lambda total: lambda line: None)
    with (mock.patch.object(static_profile, "missing", lambda: None),
          mock.patch.object(importlib.metadata, "version", lambda name: "1"),
          mock.patch.object(static_profile, "measure", measure)):
      with self.assertRaises(KeyboardInterrupt):
        run()
      self.assertEqual(measured, programs[:2])
      unfinished = folder / "name.unfinished.jsonl"
      with unfinished.open("a") as file:
        file.write(unfinished.read_text().splitlines()[-1][:50])  # stopped while it wrote
      with mock.patch.object(static_profile, "measure", side_effect=KeyboardInterrupt):
        with self.assertRaises(KeyboardInterrupt):
          run()
      self.assertLen(list(map(json.loads, unfinished.read_text().splitlines())), 3)
      text = run()
      self.assertEqual(measured, programs)
      self.assertIn("| 128/512/512 | 128,000 |", text)  # the best one, of the first run
      self.assertLen(json.loads((folder / "name.json").read_text())["results"], 3)
      run()  # a run that ended is not continued
      self.assertLen(measured, 6)

  def test_decode_tables(self):
    case = tpu_decode_programs.case_of(8, 2048, (32, 8), 128)
    program = tpu_programs.Program(tpu_decode_programs.PAGES, case, False, "v6e",
                                      (1, 1024, 16))
    # 67 MB at 1,640 GB/s and 1.75 GHz.
    self.assertBetween(tpu_decode.memory_cycles(program), 71_600, 71_700)
    slow = static_profile.Static(program, 143_298, 10, 2**20, 50, 0, {}, 0.0, 10**9)
    worse, fast = slow._replace(cycles=150_000), slow._replace(
        program=program._replace(contender="other"), cycles=70_000)
    failure = static_profile.Failure(program, "too large")
    text = tpu_decode.to_markdown([worse, slow, fast, failure], {"jax": "1", "libtpu": "2"})
    first, second = [line for line in text.splitlines() if line.startswith("| decode_8x2048")]
    self.assertIn("| other | 1/1024 | 70,000 | 71,649 | 100% |", first)
    self.assertIn("| 143,298 | 71,649 | 50% |", second)
    self.assertIn("pages of 16 1/1024: too large", text)

  def test_pages_tables(self):
    programs = list(tpu_pages.programs("v6e", ["decode"]))
    # tpu-inference does not take int8.
    self.assertLen(programs, sum(2 - (form[3] == "int8") for form in tpu_pages.FORMS))
    long = list(tpu_pages.programs("v6e", ["prefill", "mixed"]))
    self.assertEqual([x.case.key_heads for x in long], 12 * [1] + 4 * [8] + 9 * [1] + 6 * [8])
    latents = list(tpu_pages.programs("v6e", ["latent", "dense"]))
    self.assertEqual([(x.contender, x.case.width, x.case.value_width) for x in latents],
                     5 * [(tpu_pages_programs.OURS_LATENT, 576, 512)]
                     + 2 * [(tpu_pages_programs.OURS_DENSE, 576, 512)])
    self.assertEqual(latents[-1].blocks[2], 0)  # no pages
    ours, theirs = programs[:2]
    self.assertEqual([x.contender for x in (ours, theirs)],
                     [tpu_pages_programs.OURS, tpu_pages_programs.RPA])
    fast = static_profile.Static(ours, 60_000, 5_000, 2**20, 50, 0, {}, 0.0, 10**9)
    slow = fast._replace(program=theirs, cycles=75_000, other_cycles=3_000)
    text = tpu_pages.to_markdown(
        [slow, fast, slow._replace(cycles=80_000), static_profile.Failure(theirs, "too large")],
        {"jax": "1", "libtpu": "2"})
    first, second = [line for line in text.splitlines() if line.startswith("| decode")]
    self.assertIn("own/own | 65,000 | 60,000 | 1.20 |", first)
    self.assertIn("| 78,000 | 75,000 |", second)
    self.assertIn("pages of 16, blocks own/own: too large", text)
    self.assertNotIn("mixed:", text)

  def test_whole_tables(self):
    programs = list(tpu_whole.all_programs("v6e", [tpu_whole.CAUSAL, *tpu_whole.PACKED[:2]]))
    names = [(x.contender, x.case.name) for x in programs]
    self.assertLen(set(names), len(names))
    fast = static_profile.Static(programs[0], 60_000, 5_000, 2**20, 50, 0, {}, 0.0, 10**9)
    of = lambda contender, case, cycles: fast._replace(program=next(
        x for x in programs if (x.contender, x.case.name) == (contender, case)), cycles=cycles)
    failure = static_profile.Failure(programs[-1], "too large")
    text = tpu_whole.to_markdown(
        [of(tpu_whole_programs.OURS, "packed4_t8192", 15_000),
         of(tpu_whole_programs.SPLASH, "causal", 125_000),
         of(tpu_whole_programs.SPLASH, "packed1_t8192", 75_000),
         of(tpu_whole_programs.OURS_WORST, "causal", 95_000), fast, failure],
        {"jax": "1", "libtpu": "2"})
    first, second = [line for line in text.splitlines() if line.startswith("| ")][1:]
    self.assertEqual(first, "| causal | 2/2 | 128 | 4,096 | forward | 65,000 | 60,000 | 30,000 | "
                     "100,000 | "
                     "130,000 | 125,000 | 2.00 | 1.30 |")
    self.assertIn("| packed4_t8192 | 2/2 | 128 | 8,192 | forward | 20,000 ", second)
    self.assertEndsWith(second, "| 80,000 | 75,000 | 4.00 |  |")
    self.assertIn("flash_attn2, whole gradient own blocks: too large", text)

  @parameterized.parameters(("tpu_static", static_tpu), ("tpu_whole_static", tpu_whole),
                            ("tpu_pages_static", tpu_pages), ("tpu_decode_static", tpu_decode))
  def test_rows_of_a_table_are_the_numbers_of_its_json(self, name, module):
    """Checks the files of results, of which `tpu_suite` reads the numbers."""
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    found = module.to_markdown([result_of(x) for x in data["results"]], data["versions"])
    rows = lambda text: [line for line in text.splitlines() if line.startswith(("|", "* v", "* t"))]
    self.assertEqual(rows(found), rows((RESULTS / f"{name}.md").read_text(encoding="utf-8")))

  def test_requests_of_one_query_come_first(self):
    case = tpu_pages_programs.case_of("mixed", (2, 3), (64, 5), (4, 2), 128)
    program = tpu_programs.Program(tpu_pages_programs.OURS, case, False, "v6e", (0, 0, 16), 2)
    requests = tpu_pages_programs.Requests(program)
    expected = [0, 1, 2, 7, 12, 17]
    self.assertEqual([requests.start(r) for r in range(6)], expected)
    self.assertEqual([int(requests.start(jnp.int32(r))) for r in range(6)], expected)
    self.assertEqual((requests.tokens, requests.distribution()), (17, (2, 2, 5)))
    query, *_, starts = tpu_pages_programs.shapes(program)
    self.assertEqual((query.shape, starts.shape), ((17, 4, 128), (6,)))

  def test_a_program_without_cycles_is_not_a_result(self):
    program = tpu_programs.Program("flash_attn2", SMALL, False, "v6e", (512, 512, 512))
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "profile").mkdir()
    profile = folder / "profile" / "a.textproto"
    profile.write_text('hlo_op_estimate {\n hlo_op_name: "k"\n estimated_cycles: 0\n}\n')
    found = static_profile._read(program, folder, {"kernels": {"k": 1}, "bytes": 1})
    self.assertIsInstance(found, static_profile.Failure)
    self.assertIn("did not profile ['k']", found.reason)

  def test_operations_with_the_same_code_count_once_each(self):
    program = tpu_programs.Program("flash_attn2", SMALL, False, "v6e", (512, 512, 512))
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "profile").mkdir()
    for name, cycles, count in (("k.1", 100, 2), ("copy", 7, 3), ("add", 5, 1)):
      (folder / "profile" / f"{name}.textproto").write_text(
          f'hlo_op_estimate {{\n  hlo_op_name: "{name}"\n  estimated_cycles: {cycles}\n'
          f'  num_equivalent_hlos: {count}\n}}\n')
    read = lambda *kernels: static_profile._read(
        program, folder, {"kernels": dict.fromkeys(kernels, 1), "bytes": 1})
    found = read("k.1", "k.2")
    self.assertIsInstance(found, static_profile.Static)
    self.assertEqual((found.cycles, found.other_cycles), (200, 3 * 7 + 5))
    self.assertIsInstance(read("k.1", "k.2", "k.3"), static_profile.Failure)

  def test_time_is_never_less_than_the_bytes_take(self):
    program = tpu_programs.Program("flash_attn2", SMALL, False, "v6e", (512, 512, 512))
    found = static_profile.Static(program, 1, 0, 0, 1, 0, {}, 2.0, 10**9)
    self.assertEqual(found.seconds, 2.0)

  def test_unknown_chip(self):
    with self.assertRaisesRegex(ValueError, "chips: got 'v99'.*v6e"):
      static_tpu.run(["v99"])
    with self.assertRaisesRegex(ValueError, "chips: got 'v99'.*v6e"):
      tpu_decode.run(["v99"])
    with self.assertRaisesRegex(ValueError, "chips: got 'v5p'.*v6e"):
      tpu_pages.run(["v5p"])
    with self.assertRaisesRegex(ValueError, "tokens: got .100.; expected None"):
      tpu_pages.run(tokens=[100])
    with self.assertRaisesRegex(ValueError, "tokens: got .100,.; expected a length of a case"):
      tpu_whole.run(tokens=[100])
    with self.assertRaisesRegex(ValueError, "tokens: got 100; expected multiples of 128"):
      tpu_decode.run(tokens=[100])

  def test_no_compiler(self):
    with mock.patch.object(importlib.util, "find_spec", lambda name: None):
      for run in static_tpu.run, tpu_whole.run, tpu_decode.run, tpu_pages.run:
        with self.assertRaisesRegex(ModuleNotFoundError, "libtpu.*pip install 'attn_core.tpu.'"):
          run()


# Shapes, and how often the cycles of plain causal their kernels may take, forward and backward.
CAUSAL = Case("causal", 1, 2, 2, 128, 128, 1024, 1024, dtype="bfloat16")
MULTIPLES = {
    "full": (CAUSAL._replace(causal=False), 1.4, 1.6),  # twice the pairs
    "window": (CAUSAL._replace(window=(255, 0)), 1.0, 0.9),
    "soft_cap": (CAUSAL._replace(soft_cap=50.0), 1.25, 1.2),
    "sinks": (CAUSAL._replace(sinks=True), 1.2, 1.1),
    "dropout": (CAUSAL._replace(dropout=0.1), 1.4, 1.4),
    # By query head.
    "four_heads_of_one_key_head": (CAUSAL._replace(heads=4, key_heads=1), 0.8, 1.2),
    "width_64": (CAUSAL._replace(heads=1, key_heads=1, width=64, value_width=64), 1.4, 1.3),
    "width_256": (CAUSAL._replace(width=256, value_width=256), 1.6, 1.4),
}


@functools.cache
def cycles_of(case, backward):
  """Returns the static cycles of a query head, or the reason why there are none."""
  result, = static_profile.measure([tpu_programs.Program(
      tpu_programs.OURS, case, backward, "v6e", (1024, 1024, 256))])
  return (result.cycles / case.heads if isinstance(result, static_profile.Static)
          else result.reason)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class MultiplesTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("soft_cap", False), ("window", False)],
      *((name, backward) for name in MULTIPLES for backward in (False, True))))
  def test_no_longer_than_the_stated_multiple_of_causal(self, name, backward):
    case, *most = MULTIPLES[name]
    plain, found = cycles_of(CAUSAL, backward), cycles_of(case, backward)
    self.assertIsInstance(found, float, found)
    self.assertLessEqual(found, most[backward] * plain)


# The same of whole programs, forward only, with arrays in HBM as long ones are: from vector memory
# the rest of a short program takes so little that a multiple of it says less about the kernel.
WHOLE = CAUSAL._replace(name="causal_t1024")
WHOLE_MULTIPLES = {
    "worst": (tpu_whole_programs.OURS_WORST, WHOLE, 1.4),
    # With the lists of steps, which XLA makes of the ids.
    "packed": (tpu_whole_programs.OURS, WHOLE._replace(name="packed4", documents=4), 2.3)}


@functools.cache
def whole_cycles_of(contender, case):
  """Returns the static cycles of a whole program, or the reason why there are none."""
  result, = static_profile.measure([
      tpu_programs.Program(contender + tpu_whole_programs.IN_HBM, case, False, "v6e",
                           tpu_whole.OWN)])
  return result.whole_cycles if isinstance(result, static_profile.Static) else result.reason


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class WholeTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow([("worst",)], ("packed",)))
  def test_no_longer_than_the_stated_multiple_of_causal(self, name):
    contender, case, most = WHOLE_MULTIPLES[name]
    plain = whole_cycles_of(tpu_whole_programs.OURS, WHOLE)
    found = whole_cycles_of(contender, case)
    self.assertIsInstance(found, int, found)
    self.assertLessEqual(found, most * plain)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class ProfileTest(absltest.TestCase):

  def test_every_contender(self):
    programs = [
        tpu_programs.Program(contender, SMALL, backward, "v6e", (512, 512, 256))
        for contender in tpu_programs.CONTENDERS for backward in (False, True)]
    results = static_profile.measure(programs)
    for result in results:
      self.assertIsInstance(result, static_profile.Static, result)
      self.assertGreater(result.cycles, 500)
      # libtpu does not print it for every kernel of other libraries.
      self.assertGreaterEqual(result.vmem_bytes, result.program.contender == tpu_programs.OURS)
      self.assertBetween(result.slots["matrix"], 0.01, 1)
      self.assertBetween(result.peak_share, 0.001, 1)

  def test_decoders(self):
    case = tpu_decode_programs.case_of(2, 256, (2, 2), 128)
    programs = [tpu_programs.Program(
        contender, case, False, "v6e",
        (1, 128, 0 if contender == tpu_decode_programs.DENSE else 64)) for contender in DECODERS
                if contender != tpu_decode_programs.JAX_RAGGED]
    for result in static_profile.measure(programs):
      self.assertIsInstance(result, static_profile.Static, result)
      self.assertGreater(result.cycles, 500)

  def test_a_failure_gives_a_reason(self):
    program = tpu_programs.Program("flash_attn2", SMALL._replace(dtype="float16"), False, "v6e",
                                      (512, 512, 512))
    result, = static_profile.measure([program])
    self.assertIn("float16", result.reason)


if __name__ == "__main__":
  absltest.main()
