# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares whole programs of attention on TPUs by static cycles, with JAX's splash attention.

Forward, and forward and backward in one program, with XLA's operations around the kernels; for
numbers for which a naive softmax suffices, and for the worst ones; packed documents whose segment
ids are arguments; features relative to plain causal attention.
"""

import datetime
import itertools
import os
from typing import Iterable, Iterator

from attn_core import checks
from attn_core.benchmark.cases import Case
from attn_core.benchmark.static import Progress, tpu as static_tpu, tpu_whole_programs as programs
from attn_core.benchmark.static.profile import Result, Static
from attn_core.benchmark.static.tpu_programs import Program
from attn_core.kernels.tpu.flash.schedule import LANES

CAUSAL = Case("causal", 1, 2, 2, 128, 128, 4096, 4096, dtype="bfloat16")
OWN = (0, 0, 0)  # blocks that the library chooses
# Splash's blocks that were the fastest of several: (query tokens, key tokens, computed at once).
CAUSAL_BLOCKS = ((1024, 1024, 512),)
FULL_BLOCKS = ((1024, 2048, 1024), (1024, 2048, 512))


def _wide(width: int) -> Case:
  """Returns plain causal attention of a width; narrower than the lanes with one head.

  libtpu's profiler takes no more.
  """
  heads = CAUSAL.heads if width >= LANES else 1
  return CAUSAL._replace(name=f"causal_d{width}", width=width, value_width=width, heads=heads,
                         key_heads=heads)


def _long(case: Case, tokens: int) -> Case:
  """Returns the case with sequences of a length."""
  return case._replace(name=f"{case.name}_t{tokens}", queries=tokens, keys=tokens)


# Compared with splash, friendly and worst numbers.
RIVALED = (
    CAUSAL, CAUSAL._replace(name="full", causal=False),
    # Two heads, forward and backward, take more than 5 GB of memory to profile.
    CAUSAL._replace(name="full_h1", causal=False, heads=1, key_heads=1), _long(CAUSAL, 1024),
    _long(_wide(64), 2048), _wide(256), _wide(256)._replace(name="full_d256", causal=False),
    CAUSAL._replace(name="causal_h4_k1", heads=4, key_heads=1))
# Documents of equal length, whose ids are arguments. Splash takes as long for any number of them.
PACKED = tuple(
    _long(CAUSAL._replace(name=f"{programs.PACKED}{documents}", documents=documents), tokens)
    for tokens in (8192, 32768) for documents in (1, 4, 16))
# Compared with plain causal attention.
FEATURES = (
    CAUSAL._replace(name="soft_cap", soft_cap=50.0), CAUSAL._replace(name="dropout", dropout=0.1),
    _long(CAUSAL, 8192), _long(CAUSAL._replace(name="window", window=(1023, 0)), 8192),
    *(_long(CAUSAL._replace(name=name, heads=1, key_heads=1), 2048)
      for name in (programs.BIASED, programs.DENSE)),
    _long(CAUSAL._replace(name="causal_d192", width=192), 2048))
# Query heads and key heads, compared by query head.
GROUPED = tuple(
    _long(CAUSAL._replace(name=f"causal_h{heads}_k{key_heads}_d{width}", heads=heads,
                          key_heads=key_heads, width=width, value_width=width), 2048)
    for width in (64, 128, 256)
    for heads, key_heads in ((4, 4), (2, 1), (4, 1), (5, 1), (7, 1), (8, 1), (16, 1)))


def all_programs(chip: str, cases: Iterable[Case]) -> Iterator[Program]:
  """Yields all programs of some cases for a chip."""
  for case, gradient in itertools.product(cases, ("", programs.GRADIENT)):
    # Copies of XLA's around 5 or 7 heads in one tile are not profiled.
    ours = programs.OURS + programs.PROJECTED * (case in GROUPED)
    yield Program(ours + gradient, case, False, chip, OWN)
    if case in RIVALED:
      yield Program(programs.OURS_WORST + gradient, case, False, chip, OWN)
    if case in RIVALED or case in PACKED and case.documents == 1:
      for blocks in CAUSAL_BLOCKS if case.causal else FULL_BLOCKS:
        yield Program(programs.SPLASH + gradient, case, False, chip, blocks)


def run(chips: Iterable[str] | None = None, widths: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None, *, out: str | os.PathLike | None = None,
        progress: Progress = lambda total: lambda _: None) -> str:
  """Measures whole programs.

  Args:
    chips: names of `profile.CHIPS`; None: "v6e".
    widths: head dimensions; None: all.
    tokens: lengths of the sequences; None: all.
    out: folder for tpu_whole_static.json and tpu_whole_static.md; None: nothing is written.
    progress: maps the number of programs to a function to call with a line for each of them.

  Returns:
    The text of the tables.

  Raises:
    ValueError: a chip is unknown, or no case has such a width and length.
    ModuleNotFoundError: libtpu is not installed.
  """
  chips = static_tpu.chosen(chips)
  widths, tokens = (None if x is None else tuple(x) for x in (widths, tokens))
  cases = [case for case in (*RIVALED, *PACKED, *FEATURES, *GROUPED)
           if (widths is None or case.width in widths)
           and (tokens is None or case.queries in tokens)]
  lengths = sorted({case.queries for case in (*RIVALED, *PACKED, *FEATURES, *GROUPED)
                    if widths is None or case.width in widths})
  checks.require(bool(cases), "tokens", tokens,
                 f"a length of a case of these widths: {', '.join(map(str, lengths))}")
  found = [program for chip in chips for program in all_programs(chip, cases)]
  return static_tpu.report(found, "tpu_whole_static", _line, to_markdown, out=out,
                           progress=progress)


def _line(result: Result) -> str:
  program = result.program
  blocks = "own blocks" if program.blocks == OWN else "/".join(map(str, program.blocks))
  return f"{program.chip} {program.case.name}: {program.contender} {blocks}"


COLUMNS = ("case", "H/K", "D", "tokens", "direction", "cycles", "of its kernels", "a query head",
           "worst numbers", "splash", "splash's kernels", "splash / ours", "splash / worst")


def to_markdown(results: list[Result], versions: dict[str, str]) -> str:
  """Formats a table per chip."""
  lines = [
      "# Static cycles of whole programs of attention on TPUs", "",
      f"libtpu {versions['libtpu']}, jax {versions['jax']}, {datetime.date.today()}; bfloat16, "
      "[B, T, H, D], one batch row. Cycles of programs by libtpu's static profiler, XLA's "
      "operations included; \"both\": forward and backward in one program. What kernels read "
      "from scalar memory is computed instead: lists of steps, and whether the naive softmax "
      "failed. \"A query head\": of the cycles of the kernels. \"Worst numbers\": it fails in "
      "every step that tries it. causal_h4_k1_d128 and those named so: arrays lie as the kernels "
      "read them, as those of a model's projections do. packed4_t8192: ids of 4 documents of equal "
      "length are arguments of the program; splash computes all blocks of the causal mask, so "
      "that it was counted with one document only. The programs did not run on a "
      "TPU.", "",
      "By `python3 -m attn_core.benchmark --static tpu-whole`; splash with blocks of "
      + " and ".join("/".join(map(str, b)) for b in CAUSAL_BLOCKS) + " where causal, else "
      + " and ".join("/".join(map(str, b)) for b in FULL_BLOCKS) + "."]
  return static_tpu.by_chip(lines, results, static_tpu.peak_flops, _table, _line)


def _table(results: Iterable[Result]) -> Iterator[str]:
  yield "| " + " | ".join(COLUMNS) + " |"
  yield "|---|---|" + "---:|" * 2 + "---|" + "---:|" * (len(COLUMNS) - 5)
  best: dict[tuple[Case, str], Static] = {}
  found = sorted((r for r in results if isinstance(r, Static)), key=lambda r: r.whole_cycles)
  for r in found:
    best.setdefault((r.program.case, r.program.contender), r)
  order = [*RIVALED, *PACKED, *FEATURES, *GROUPED]
  ours = [r for (_, name), r in best.items() if name.startswith(programs.OURS)
          and not name.startswith(programs.OURS_WORST)]
  place = lambda case: order.index(case) if case in order else len(order)
  for r in sorted(ours, key=lambda r: (place(r.program.case), r.program.contender)):
    yield "| " + " | ".join(_cells(r, best)) + " |"


def _cells(ours: Static, best: dict[tuple[Case, str], Static]) -> tuple[str, ...]:
  case, gradient = ours.program.case, ours.program.contender.endswith(programs.GRADIENT)
  suffix = programs.GRADIENT * gradient
  worst = best.get((case, programs.OURS_WORST + suffix))
  splash = best.get((_splash_case(case), programs.SPLASH + suffix))
  ratio = lambda r: f"{splash.whole_cycles / r.whole_cycles:.2f}" if splash and r else ""
  number = lambda r: f"{r.whole_cycles:,}" if r else ""
  return (case.name, f"{case.heads}/{case.key_heads}", str(case.width), f"{case.queries:,}",
          "both" if gradient else "forward", number(ours), f"{ours.cycles:,}",
          f"{ours.cycles / case.heads:,.0f}", number(worst),
          number(splash), f"{splash.cycles:,}" if splash else "", ratio(ours), ratio(worst))


def _splash_case(case: Case) -> Case:
  """Returns the case with which splash is counted in place of `case`."""
  if case.documents == 1:
    return case
  one = f"{programs.PACKED}1_t{case.queries}"
  return next((x for x in PACKED if x.name == one), case)
