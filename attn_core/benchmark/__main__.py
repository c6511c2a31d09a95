# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures attention mechanisms against each other and against other libraries.

    python3 -m attn_core.benchmark                      a few cases, in about three minutes
    python3 -m attn_core.benchmark --full --out DIR     the complete comparison
    python3 -m attn_core.benchmark --short --out DIR   short sequences, compared with jax.nn
    python3 -m attn_core.benchmark --redraw FILE.json   draws the chart of an earlier run again
    python3 -m attn_core.benchmark --list               all mechanisms, peers and cases
    python3 -m attn_core.benchmark --static tpu         cycles of TPU kernels, without a TPU
    python3 -m attn_core.benchmark --static tpu-whole   those of whole programs, and splash's
    python3 -m attn_core.benchmark --static tpu-decode  those of decoding, with memory bounds
    python3 -m attn_core.benchmark --static tpu-pages   those of serving, and tpu-inference's
    python3 -m attn_core.benchmark --static gpu         code of GPU kernels, without a GPU
"""

import argparse
import pathlib
import sys
from typing import Callable

from attn_core.benchmark import cases as cases_lib
from attn_core.benchmark import contenders, report, runner
from attn_core.benchmark.cases import CASES
from attn_core.benchmark.static import (
    gpu_report, tpu as static_tpu, tpu_decode, tpu_pages, tpu_whole)
from attn_core.config.metadata import OperationMetadata, resolved_platform


def _static(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
  """The tables of kernels that are compiled for other machines and do not run."""
  def progress(total: int) -> Callable[[str], None]:
    return runner.progress_bar(total, True)

  if given.static != "gpu":
    module = {"tpu": static_tpu, "tpu-whole": tpu_whole, "tpu-decode": tpu_decode,
              "tpu-pages": tpu_pages}[given.static]
    return module.run(given.chips, given.widths, given.tokens, out=given.out, progress=progress)
  if given.chips or given.tokens:
    parser.error("--chips and --tokens are of --static tpu, tpu-whole, tpu-decode and tpu-pages")
  return gpu_report.run(given.widths, out=given.out, progress=progress)


def _parser() -> argparse.ArgumentParser:
  """The parser of the command line."""
  parser = argparse.ArgumentParser(prog="python3 -m attn_core.benchmark", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--mechanisms", nargs="+", metavar="NAME", help="default: every distinct one")
  parser.add_argument("--cases", nargs="+", metavar="NAME", help="default: a few small ones")
  parser.add_argument("--direction", nargs="+", choices=runner.DIRECTIONS, help="default: both")
  parser.add_argument("--dtype", help="of the operands, such as bfloat16; default: the case's")
  parser.add_argument("--max-heads", type=int, help="scale cases down to so many query heads")
  parser.add_argument("--max-tokens", type=int, help="scale cases down to this length")
  parser.add_argument("--repeats", type=int, default=7, help="interleaved turns of each contender")
  parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True,
                      help="whether other libraries are measured too")
  parser.add_argument("--overheads", action=argparse.BooleanOptionalAction,
                      help="whether to measure calls and importing; default: with --full")
  parser.add_argument("--full", action="store_true", help="the complete comparison")
  parser.add_argument("--short", action="store_true",
                      help="short sequences: flash_attn2 and vanilla, compared with jax.nn")
  parser.add_argument("--out", help="folder for the JSON file, the text and the chart")
  parser.add_argument("--name", help="stem of the files; default: from the device and the versions")
  parser.add_argument("--redraw", metavar="FILE", help="only draw the chart of this JSON file, "
                      "with the suffix .png")
  parser.add_argument("--list", action="store_true", help="only list cases and contenders")
  static = parser.add_argument_group("--static")
  static.add_argument("--static", choices=("tpu", "tpu-whole", "tpu-decode", "tpu-pages", "gpu"),
                      help="compile and count cycles or instructions, without running")
  static.add_argument("--chips", nargs="+", metavar="NAME",
                      help="TPUs, such as v5e v5p v6e tpu7x; default: v6e")
  static.add_argument("--widths", nargs="+", type=int, help="head dimensions")
  static.add_argument("--tokens", nargs="+", type=int, help="lengths of the sequences, for TPUs")
  return parser


def main(arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = _parser()
  given = parser.parse_args(arguments)
  if given.list:
    print(_listing())
    return 0
  if given.redraw:
    path = pathlib.Path(given.redraw)
    report.plot(report.from_json(path.read_text(encoding="utf-8")), path.with_suffix(".png"))
    return 0
  if given.static:
    print(_static(parser, given), end="")
    return 0
  peers = given.peers
  if given.short:
    given.mechanisms = given.mechanisms or ["flash_attn2", "vanilla"]
    given.cases = given.cases or cases_lib.SHORT_CASES
    peers = ("jax.nn xla",) if peers else False
  try:
    found = runner.run_attention_benchmarks(
        given.mechanisms, given.cases, directions=given.direction, dtype=given.dtype,
        max_heads=given.max_heads, max_tokens=given.max_tokens, repeats=given.repeats,
        peers=peers, full=given.full, out=given.out, name=given.name,
        with_overheads=given.full if given.overheads is None else given.overheads)
  except ValueError as error:
    parser.error(str(error))
  print(report.to_markdown(found), end="")
  return 0


def _listing() -> str:
  """The mechanisms, peers and cases, one per line."""
  platform = resolved_platform(OperationMetadata())
  found, absent = contenders.peers(platform)
  lines = ["mechanisms:"] + [f"  {name}" for name in runner.distinct_mechanisms(platform)]
  lines += ["peers:"] + [f"  {peer.name} ({peer.package} {contenders.version(peer.package)})"
                         for peer in found]
  lines += [f"  {peer.name}: {peer.reason}" for peer in absent]
  lines += ["cases:"] + [f"  {name:24} {cases_lib.describe(case)}" for name, case in CASES.items()]
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
