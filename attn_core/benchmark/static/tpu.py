# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares TPU kernels, and choices of their blocks, by static cycles.

Every contender is compiled at several block sizes, and its best one is reported. All heads do the
same work: a few are enough to make the cost of the first transfer negligible.
"""

import datetime
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import threading
from typing import Callable, Iterable, Iterator

from attn_core import checks
from attn_core.benchmark import cases
from attn_core.benchmark.static import Progress, profile as static_profile
from attn_core.benchmark.cases import Case
from attn_core.benchmark.static.profile import CHIPS, Failure, Result, Static
from attn_core.benchmark.static.tpu_programs import OURS, OURS_SAFE, Program
from attn_core.kernels.tpu.flash.schedule import LANES

WIDTHS = (64, 128, 256)
MASKS = ("full", "causal", "window")  # "window" for this library only
WINDOW = (1023, 0)
TOKENS = (4096,)
# Heads per core; one where heads are narrower than the lanes, as libtpu's profiler takes no more.
HEADS = 4
COUNTED_BLOCK = (1024, 1024)  # (queries, keys): the unit of work that makes masks comparable

# (query tokens, key tokens, key tokens computed at once)
FORWARD_BLOCKS = {
    OURS: ((512, 512, 512), (1024, 1024, 256), (1024, 1024, 512), (1024, 2048, 512),
           (2048, 2048, 512), (2048, 4096, 256)),
    OURS_SAFE: ((1024, 1024, 256), (2048, 2048, 512)),
    "jax flash": ((512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024)),
    "jax splash": ((512, 512, 512), (1024, 1024, 512), (1024, 2048, 512), (1024, 2048, 1024),
                   (2048, 2048, 512)),
}
BACKWARD_BLOCKS = {
    OURS: ((512, 512, 256), (1024, 1024, 256), (1024, 1024, 512), (1024, 2048, 512)),
    "jax flash": ((512, 512, 512), (1024, 1024, 512)),
    "jax splash": ((512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024)),
    "jax splash, fused": ((512, 512, 512), (1024, 1024, 512), (1024, 2048, 512)),
}


def run(chips: Iterable[str] | None = None, widths: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None, *, out: str | os.PathLike | None = None,
        progress: Progress = lambda total: lambda _: None) -> str:
  """Measures all contenders.

  Args:
    chips: names of `profile.CHIPS`; None: "v6e".
    widths: head dimensions; None: 64, 128 and 256.
    tokens: lengths of the sequences; None: 4,096.
    out: folder for tpu_static.json and tpu_static.md; None: nothing is written.
    progress: maps the number of programs to a function to call with a line for each of them.

  Returns:
    The text of the tables.

  Raises:
    ValueError: a chip is unknown.
    ModuleNotFoundError: libtpu is not installed.
  """
  programs = _programs(chosen(chips), tuple(widths or WIDTHS), tuple(tokens or TOKENS))
  return report(list(programs), "tpu_static", _line, to_markdown, out=out, progress=progress)


def chosen(chips: Iterable[str] | None) -> tuple[str, ...]:
  """Returns the chips to compile for (None: "v6e"); raises ValueError for unknown ones."""
  chips = ("v6e",) if chips is None else tuple(chips)
  for chip in chips:
    checks.one_of("chips", chip, tuple(CHIPS))
  return chips


def report(programs: list[Program], name: str, line: Callable[[Result], str],
           to_markdown: Callable[[list[Result], dict[str, str]], str], *,
           out: str | os.PathLike | None, progress: Progress) -> str:
  """Measures programs and returns the text of their tables.

  Args:
    programs: the programs to measure.
    name: stem of the file names.
    line: maps a result to a line of text.
    to_markdown: maps (results, versions) to the text.
    out, progress: as in `run`. A run that was interrupted continues where it was.
  """
  if static_profile.missing():
    raise ModuleNotFoundError(static_profile.missing())
  versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
  advance = progress(len(programs))
  show = lambda result: advance(line(result))
  if out is None:
    return to_markdown(static_profile.measure(programs, advance=show), versions)
  folder = pathlib.Path(out)
  folder.mkdir(parents=True, exist_ok=True)
  unfinished = folder / f"{name}.unfinished.jsonl"
  results = _continued(programs, unfinished, versions, show)
  text = to_markdown(results, versions)
  (folder / f"{name}.md").write_text(text, encoding="utf-8")
  (folder / f"{name}.json").write_text(to_json(results, versions), encoding="utf-8")
  unfinished.unlink(missing_ok=True)
  return text


def _continued(programs: list[Program], unfinished: pathlib.Path, versions: dict[str, str],
               show: Callable[[Result], object]) -> list[Result]:
  """Measures programs, except those that an interrupted run has measured.

  Args:
    programs: the programs to measure.
    unfinished: a file, which a run that ends removes. Its first line says of which versions and of
      which sources it is; for others, all are measured.
    versions: of JAX and libtpu.
    show: called with every new result.
  """
  library = pathlib.Path(checks.__file__).parent
  sources = hashlib.sha256(b"".join(
      path.read_bytes() for path in sorted(library.rglob("*.py"))))
  head = json.dumps({"versions": versions, "sources": sources.hexdigest()})
  text = unfinished.read_text(encoding="utf-8") if unfinished.exists() else ""
  lines = text.split("\n")[:-1]  # without a line that was not written to its end
  if lines[:1] != [head]:
    lines = [head]
  whole = "".join(f"{line}\n" for line in lines)
  if whole != text:
    unfinished.write_text(whole, encoding="utf-8")
  known = {json.dumps(program): fields for program, fields in map(json.loads, lines[1:])}
  lock = threading.Lock()

  def keep(result: Result) -> None:
    show(result)
    if isinstance(result, Static):
      with lock, unfinished.open("a", encoding="utf-8") as file:
        file.write(json.dumps([result.program, result[1:]]) + "\n")

  key = json.dumps
  new = static_profile.measure([x for x in programs if key(x) not in known], advance=keep)
  found: dict[str, Result] = {key(x.program): x for x in new}
  return [found[key(x)] if key(x) in found else Static(x, *known[key(x)]) for x in programs]


def _programs(chips: tuple[str, ...], widths: tuple[int, ...],
              tokens: tuple[int, ...]) -> Iterator[Program]:
  for chip, length, width, mask, backward in itertools.product(
      chips, tokens, widths, MASKS, (False, True)):
    heads = (HEADS if width % LANES == 0 else 1) * CHIPS[chip].cores
    case = Case(f"{mask}_d{width}_t{length}", 1, heads, heads, width, width, length, length,
                mask != "full", WINDOW if mask == "window" else None, dtype="bfloat16")
    for contender, choices in (BACKWARD_BLOCKS if backward else FORWARD_BLOCKS).items():
      if mask == "window" and contender not in (OURS, OURS_SAFE):
        continue
      fitting = dict.fromkeys((min(block_q, length), min(block_kv, length), min(compute, length))
                              for block_q, block_kv, compute in choices)
      for blocks in fitting:
        yield Program(contender, case, backward, chip, blocks)


def _line(result: Result) -> str:
  program = result.program
  return (f"{program.chip} {program.case.name} {_direction(program)}: {program.contender} "
          f"{'/'.join(map(str, program.blocks))}")


def _direction(program: Program) -> str:
  return "backward" if program.backward else "forward"


def to_markdown(results: list[Result], versions: dict[str, str]) -> str:
  """Formats a table per chip, with each contender at its best blocks."""
  lines = [
      "# Static cycles of TPU kernels", "",
      f"libtpu {versions['libtpu']}, jax {versions['jax']}, {datetime.date.today()}; bfloat16, "
      f"{HEADS} heads per core, one where D is not a multiple of {LANES}. Cycles of the kernels by "
      "libtpu's static profiler; TFLOP/s from the cycles and the chip's clock, or from the bytes "
      "of the arguments where those take longer; only visible pairs count. A block is one of "
      f"{COUNTED_BLOCK[0]} x {COUNTED_BLOCK[1]} tokens with a visible pair. Used slots and spills "
      "are those of the hot loop. The programs did not run on a TPU.", "",
      "By `python3 -m attn_core.benchmark --static tpu`, which tries these blocks:", ""]
  for direction, table in (("forward", FORWARD_BLOCKS), ("backward", BACKWARD_BLOCKS)):
    lines += [f"* {direction}, {name}: " + ", ".join("/".join(map(str, b)) for b in choices)
              for name, choices in table.items()]
  return by_chip(lines, results, peak_flops, _table, _line, failed="Not compiled")


def by_chip(lines: list[str], results: list[Result], peak: Callable[[str], str],
            table: Callable[[Iterable[Result]], Iterator[str]],
            line: Callable[[Result], str], *, failed: str = "Not measured") -> str:
  """Returns lines, a table for each chip, and the failures.

  Args:
    lines: before the tables.
    results: in the order of the chips.
    peak: maps a chip to what is said of it after its name.
    table: maps the results of a chip to the lines of its table.
    line: maps a failure to what is said of its program.
    failed: the title of the failures.
  """
  lines = list(lines)
  for chip, group in itertools.groupby(results, lambda r: r.program.chip):
    lines += ["", f"## {chip}, {peak(chip)}", "", *table(group)]
  failures = [f"* {line(r)}: {r.reason}" for r in results if isinstance(r, Failure)]
  lines += ["", f"## {failed}", "", *failures] if failures else []
  return "\n".join(lines) + "\n"


def peak_flops(chip: str) -> str:
  """Returns the peak rate of a chip, in words."""
  return f"peak {CHIPS[chip].peak.flops / 1e12:g} TFLOP/s"


def peak_bandwidth(chip: str) -> str:
  """Returns the bandwidth of a chip's memory, in words."""
  return f"{CHIPS[chip].peak.memory_bytes / 1e9:,.0f} GB/s"


COLUMNS = ("case", "direction", "kernel", "best blocks", "cycles", "TFLOP/s", "of peak",
           "cycles a block", "against splash", "vector memory MiB", "spills", "bundles", "matrix",
           "vector", "transcendental", "lanes", "loads", "stores", "other cycles")


def _table(results: Iterable[Result]) -> Iterator[str]:
  yield "| " + " | ".join(COLUMNS) + " |"
  yield "|" + "---|" * 4 + "---:|" * (len(COLUMNS) - 4)
  key = lambda r: (r.program.case, r.program.backward)
  for _, group in itertools.groupby(results, key):
    found = [r for r in group if isinstance(r, Static)]
    best: dict[str, Static] = {}
    for r in sorted(found, key=lambda r: r.seconds):
      best.setdefault(r.program.contender, r)
    splash = [r for name, r in best.items() if "splash" in name]
    record = min((r.seconds for r in splash), default=None)
    for r in sorted(best.values(), key=lambda r: r.seconds):
      yield "| " + " | ".join(_cells(r, record)) + " |"


def _cells(result: Static, record: float | None) -> tuple[str, ...]:
  program, slots = result.program, result.slots
  visited = cases.visited_blocks(program.case, COUNTED_BLOCK)
  share = lambda name: f"{100 * slots.get(name, 0):.0f}%"
  return (program.case.name, _direction(program), program.contender,
          "/".join(map(str, program.blocks)), f"{result.cycles:,}",
          f"{result.flops / result.seconds / 1e12:.0f}", f"{100 * result.peak_share:.0f}%",
          f"{result.cycles * CHIPS[program.chip].cores / visited:.0f}",
          f"{record / result.seconds:.2f}" if record else "", f"{result.vmem_bytes / 2**20:.0f}",
          str(result.spills), str(result.bundles), share("matrix"), share("vector"),
          share("transcendental"), share("lanes"), share("loads"), share("stores"),
          f"{result.other_cycles:,}")


def to_json(results: list[Result], versions: dict[str, str]) -> str:
  """Converts all results to JSON text."""
  plain = [{**r._asdict(), "program": {**r.program._asdict(), "case": r.program.case._asdict()}}
           for r in results]
  return json.dumps({"versions": versions, "date": str(datetime.date.today()), "results": plain},
                    indent=1)
