# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares decoding on TPUs by static cycles with the cycles that the memory needs.

Every contender is compiled at several block sizes, and its best one is reported.
"""

import datetime
import itertools
import os
from typing import Iterable, Iterator

from attn_core import checks
from attn_core.benchmark.static import Progress, tpu_decode_programs as programs_lib
from attn_core.benchmark.static import tpu as static_tpu
from attn_core.benchmark.static.tpu_decode_programs import (DENSE, JAX_PAGED, JAX_RAGGED, PAGES,
                                                            WRITES)
from attn_core.benchmark.static.profile import CHIPS, Result, Static
from attn_core.benchmark.static.tpu_programs import Program

REQUESTS = 8
TOKENS = (2048,)
HEADS = (32, 8)
WIDTHS = (128,)
PAGE_SIZES = (16, 64, 128)

# (query tokens, key tokens); JAX's own table of block sizes can only be read on a TPU.
BLOCKS = {
    DENSE: ((1, 512), (1, 1024)), PAGES: ((1, 512), (1, 1024)), WRITES: ((1, 1024),),
    JAX_RAGGED: ((1, 512), (1, 1024), (1, 2048), (8, 1024)), JAX_PAGED: ((1, 512), (1, 2048)),
}


def run(chips: Iterable[str] | None = None, widths: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None, *, out: str | os.PathLike | None = None,
        progress: Progress = lambda total: lambda _: None) -> str:
  """Measures all contenders.

  Args:
    chips: names of `profile.CHIPS`; None: "v6e".
    widths: head dimensions; None: 128.
    tokens: lengths of the requests, multiples of the pages; None: 2,048.
    out: folder for tpu_decode_static.json and tpu_decode_static.md; None: nothing is written.
    progress: maps the number of programs to a function to call with a line for each of them.

  Returns:
    The text of the tables.

  Raises:
    ValueError: a chip is unknown, or a length is not a multiple of all page sizes.
    ModuleNotFoundError: libtpu is not installed.
  """
  chips = static_tpu.chosen(chips)
  tokens = tuple(tokens or TOKENS)
  for length in tokens:
    checks.require(length % max(PAGE_SIZES) == 0, "tokens", length,
                   f"multiples of {max(PAGE_SIZES)}")
  programs = list(_programs(chips, tuple(widths or WIDTHS), tokens))
  return static_tpu.report(programs, "tpu_decode_static", _line, to_markdown, out=out,
                           progress=progress)


def _programs(chips: tuple[str, ...], widths: tuple[int, ...],
              tokens: tuple[int, ...]) -> Iterator[Program]:
  for chip, length, width in itertools.product(chips, tokens, widths):
    case = programs_lib.case_of(REQUESTS, length, HEADS, width)
    for (contender, choices), page in itertools.product(BLOCKS.items(), PAGE_SIZES):
      if contender == DENSE and page != PAGE_SIZES[0]:
        continue
      for block_q, block_kv in choices:
        yield Program(contender, case, False, chip, (
            block_q, min(block_kv, length), 0 if contender == DENSE else page))


def memory_cycles(program: Program) -> float:
  """Returns the cycles in which the memory delivers all keys and values."""
  chip = CHIPS[program.chip]
  return (programs_lib.live_bytes(program.case) / chip.peak.memory_bytes
          * chip.peak.flops / chip.flops_per_cycle)


def memory_share(result: Static) -> float:
  """Returns the reached share of the memory's speed, at most 1 whatever the profiler estimates."""
  least = memory_cycles(result.program)
  return least / max(result.cycles, least)


def _line(result: Result) -> str:
  program = result.program
  block_q, block_kv, page = program.blocks
  storage = f"pages of {page}" if page else "dense"
  return f"{program.chip} {program.case.name}: {program.contender}, {storage} {block_q}/{block_kv}"


COLUMNS = ("case", "page", "kernel", "best blocks q/kv", "cycles", "cycles of the memory",
           "of the memory's speed", "other cycles", "vector memory MiB")


def to_markdown(results: list[Result], versions: dict[str, str]) -> str:
  """Formats a table per chip, with each contender at its best blocks."""
  lines = [
      "# Static cycles of TPU decoding", "",
      f"libtpu {versions['libtpu']}, jax {versions['jax']}, {datetime.date.today()}; bfloat16, H = "
      f"{HEADS[0]}, K = {HEADS[1]}, {REQUESTS} requests of one query each. Cycles of the kernels "
      "by libtpu's static profiler, and those in which the memory delivers the live keys and "
      "values; other cycles are those of XLA's own operations in the same program. A kernel that "
      "takes fewer cycles than the memory is bound by memory. The programs did not run on a "
      "TPU.", "",
      "By `python3 -m attn_core.benchmark --static tpu-decode`, which tries these blocks:", ""]
  lines += [f"* {name}: " + ", ".join("/".join(map(str, b)) for b in choices)
            for name, choices in BLOCKS.items()]
  return static_tpu.by_chip(lines, results, static_tpu.peak_bandwidth, _table, _line)


def _table(results: Iterable[Result]) -> Iterator[str]:
  yield "| " + " | ".join(COLUMNS) + " |"
  yield "|" + "---|" * 4 + "---:|" * (len(COLUMNS) - 4)
  best: dict[tuple[str, int, str], Static] = {}
  for r in sorted((r for r in results if isinstance(r, Static)), key=lambda r: r.cycles):
    best.setdefault((r.program.case.name, r.program.blocks[2], r.program.contender), r)
  for (case, page, contender), r in sorted(best.items(), key=lambda x: (*x[0][:2], x[1].cycles)):
    yield "| " + " | ".join((
        case, str(page or "dense"), contender, "/".join(map(str, r.program.blocks[:2])),
        f"{r.cycles:,}", f"{memory_cycles(r.program):,.0f}", f"{100 * memory_share(r):.0f}%",
        f"{r.other_cycles:,}", f"{r.vmem_bytes / 2**20:.0f}")) + " |"
