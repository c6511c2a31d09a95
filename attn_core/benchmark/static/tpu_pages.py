# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares writing to pages and attending to them on TPUs by static cycles of whole programs.

This library's kernel and the one of tpu-inference, where that package is installed.
"""

import datetime
import os
from typing import Iterable, Iterator, NamedTuple

from attn_core import checks
from attn_core.benchmark.static import Progress, tpu as static_tpu, tpu_pages_programs
from attn_core.benchmark.static.profile import Result, Static
from attn_core.benchmark.static.tpu_pages_programs import (
    OURS, OURS_DENSE, OURS_LATENT, RPA, VERSIONS)
from attn_core.benchmark.static.tpu_programs import Program


class Kind(NamedTuple):
  """Requests of one kind of step of a server."""

  name: str
  requests: tuple[int, int]  # of one query, and of many
  lengths: tuple[int, int]  # tokens of every request, queries of one of many
  # (page size, or 0 without pages, (H, K), D, dtype of the pages if it is not bfloat16)
  forms: tuple[tuple[int, tuple[int, int], int, str], ...]
  blocks: dict[str, tuple[tuple[int, int], ...]]  # contender -> (queries, keys); 0: its own choice


# The first one, and others that differ in one number; few heads, as of a model over several chips.
FORMS = ((16, (32, 8), 128, ""), (64, (32, 8), 128, ""), (256, (32, 8), 128, ""),
         (16, (64, 8), 128, ""), (64, (64, 8), 128, ""), (256, (64, 8), 128, ""),
         (16, (32, 8), 64, ""), (16, (32, 8), 256, ""),
         (16, (32, 8), 128, "float8_e4m3fn"), (16, (32, 8), 128, "int8"),
         (16, (16, 4), 128, ""), (16, (16, 2), 128, ""), (16, (8, 1), 128, ""),
         (64, (8, 1), 128, ""), (256, (8, 1), 128, ""), (16, (8, 1), 64, ""),
         (16, (8, 1), 256, ""), (16, (8, 1), 128, "float8_e4m3fn"), (16, (8, 1), 128, "int8"))
# Prefills of tpu-inference with 64/8 heads do not fit its vector memory.
FEW_HEADS = ((16, (8, 1), 128, ""), (64, (8, 1), 128, ""), (16, (8, 1), 128, "float8_e4m3fn"))
SEVERAL = ((16, (32, 8), 128, ""), (16, (8, 1), 128, ""))
# Of 576 numbers 512 are the value.
LATENTS = ((64, (16, 1), 576, ""), (16, (16, 1), 576, ""), (64, (128, 1), 576, ""),
           (64, (16, 1), 576, "int8"), (64, (16, 1), 576, "float8_e4m3fn"))
DENSE = ((0, (16, 1), 576, ""), (0, (128, 1), 576, ""))  # the profiler refuses writes in 8 bits
KINDS = (
    # More than one block of keys a request would be counted wrongly, see `to_markdown`.
    Kind("decode", (8, 0), (2048, 1), FORMS, {OURS: ((0, 0),), RPA: ((0, 0),)}),
    Kind("drafts4", (0, 8), (2048, 4), SEVERAL, {OURS: ((0, 0),)}),
    Kind("drafts8", (0, 8), (2048, 8), SEVERAL, {OURS: ((0, 0),)}),
    Kind("trees8", (0, 8), (2048, 8), SEVERAL, {OURS: ((0, 0),)}),
    Kind("short", (256, 0), (128, 1), FORMS[:1], {OURS: ((0, 0),), RPA: ((0, 0),)}),
    Kind("prefill", (0, 1), (512, 512), (*FEW_HEADS, FORMS[0]),
         {OURS: ((0, 0),), RPA: ((128, 512), (64, 512), (32, 512))}),
    Kind("mixed", (8, 1), (1024, 128), (*FEW_HEADS, FORMS[0], FORMS[3]),
         {OURS: ((0, 0),), RPA: ((64, 512), (32, 512))}),
    Kind("latent", (8, 0), (4096, 1), LATENTS, {OURS_LATENT: ((0, 0),)}),
    Kind("dense", (8, 0), (4096, 1), DENSE, {OURS_DENSE: ((0, 0),)}))


def programs(chip: str, kinds: Iterable[str] = ("decode", "prefill", "mixed")) -> Iterator[Program]:
  """Yields all programs of some kinds for a chip.

  Decoding in all forms, many requests in the first one, prefill and mixed in a few.

  Args:
    chip: a name of `profile.CHIPS`.
    kinds: names of KINDS.
  """
  for kind in KINDS:
    if kind.name not in kinds:
      continue
    for page, heads, width, stored in kind.forms:
      case = tpu_pages_programs.case_of(kind.name, kind.requests, kind.lengths, heads, width,
                                        stored)
      for contender, choices in kind.blocks.items():
        if contender == RPA and stored == "int8":  # it takes floating point only
          continue
        for block_q, block_kv in choices:
          yield Program(contender, case, False, chip, (block_q, block_kv, page),
                        kind.requests[0], stored)


def run(chips: Iterable[str] | None = None, widths: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None, *, out: str | os.PathLike | None = None,
        progress: Progress = lambda total: lambda _: None) -> str:
  """Measures both kernels.

  Args:
    chips: names of `tpu_pages_programs.VERSIONS`; None: "v6e".
    widths: head dimensions; None: all.
    tokens: None: the lengths are those of KINDS.
    out: folder for tpu_pages_static.json and tpu_pages_static.md; None: nothing is written.
    progress: maps the number of programs to a function to call with a line for each of them.

  Returns:
    The text of the tables.

  Raises:
    ValueError: a chip is unknown, or lengths are given.
    ModuleNotFoundError: libtpu is not installed.
  """
  chips = static_tpu.chosen(chips)
  for chip in chips:
    checks.one_of("chips", chip, tuple(VERSIONS))
  checks.require(tokens is None, "tokens", tokens, "None: the lengths of the requests are fixed")
  missing = tpu_pages_programs.missing_rpa()
  found = [program for chip in chips
           for program in programs(chip, tuple(kind.name for kind in KINDS))
           if (widths is None or program.case.width in tuple(widths))
           and not (missing and program.contender == RPA)]
  return static_tpu.report(found, "tpu_pages_static", _line, to_markdown, out=out,
                           progress=progress)


def _line(result: Result) -> str:
  program = result.program
  block_q, block_kv, page = program.blocks
  stored = f"pages of {page}" if page else "dense"
  return (f"{program.chip} {program.case.name}: {program.contender}, {stored}, blocks "
          f"{block_q or 'own'}/{block_kv or 'own'}")


COLUMNS = ("case", "page", "kernel", "best blocks q/kv", "cycles of the program", "of its kernels",
           "tpu-inference / ours")


def to_markdown(results: list[Result], versions: dict[str, str]) -> str:
  """Formats a table per chip, with each contender at its best blocks."""
  present = {r.program.case.name.partition("_")[0] for r in results}
  lines = [
      "# Static cycles of writing to pages and attending to them on TPUs", "",
      f"libtpu {versions['libtpu']}, jax {versions['jax']}, {datetime.date.today()}; bfloat16. "
      "Cycles of whole programs by libtpu's static profiler: the new keys and values are written, "
      "and all queries attended to. decode_8x2048_h32_8_d128 has 8 requests of 2,048 tokens, 32 "
      "query heads, 8 key heads of width 128. Kinds of requests: " + "; ".join(
          f"{kind.name}: {kind.requests[0]} of one query and {kind.requests[1]} of "
          f"{kind.lengths[1]}, {kind.lengths[0]} tokens each" for kind in KINDS
          if kind.name in present)
      + ". Drafts follow one another; those of trees are given as a mask. Where a request of the "
      "kernel of tpu-inference has several blocks, its transfers are "
      "counted as if they took no time. Both pad heads of width 64 to 128; tpu-inference has a "
      "kernel for these, too, which is not counted. Width 576: latent rows, in 8 bits with a scale "
      "for each. Other pages of 8 bits have one scale of all keys and one of all values; "
      "tpu-inference takes floating point only. The programs did not run on a TPU.", "",
      "By `python3 -m attn_core.benchmark --static tpu-pages`."]
  return static_tpu.by_chip(lines, results, static_tpu.peak_bandwidth, _table, _line)


def _table(results: Iterable[Result]) -> Iterator[str]:
  yield "| " + " | ".join(COLUMNS) + " |"
  yield "|---|---:|---|---|" + "---:|" * 3
  best: dict[tuple[str, int], dict[str, Static]] = {}
  for r in sorted((r for r in results if isinstance(r, Static)), key=lambda r: r.whole_cycles):
    best.setdefault((r.program.case.name, r.program.blocks[2]), {}).setdefault(
        r.program.contender, r)
  order = [kind.name for kind in KINDS]
  for (case, page), found in sorted(best.items(), key=lambda x: (
      order.index(x[0][0].partition("_")[0]), x[0])):
    for contender, r in sorted(found.items()):
      ratio = ""
      if contender == OURS and RPA in found:
        ratio = f"{found[RPA].whole_cycles / r.whole_cycles:.2f}"
      yield "| " + " | ".join((
          case, str(page or "dense"), contender,
          "/".join(str(b or "own") for b in r.program.blocks[:2]),
          f"{r.whole_cycles:,}", f"{r.cycles:,}", ratio)) + " |"
