# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares our GPU kernels with JAX's and tokamax's by their machine code for Hopper.

`static.gpu` compiles and reads all of them. A program of a backward includes its forward, whose
kernels are left out of the comparison.
"""

import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
from typing import Any, Iterable, NamedTuple

from attn_core import checks
from attn_core.benchmark.static import Progress, gpu as static_gpu, gpu_programs
from attn_core.benchmark.static.gpu import Kernel
from attn_core.benchmark.static.gpu_programs import OURS, Program

PROGRAMS = f"{gpu_programs.__name__}:{gpu_programs.programs.__name__}"
PACKAGES = ("jax", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc", "tokamax")
COLUMNS = ("case", "direction", "kernel", "registers", "spilled bytes", "products wait",
           "products a step", "instructions a step", "exponentials a step", "shared memory",
           "bytes a step")


class Compiled(NamedTuple):
  """The kernels of one program."""

  program: Program
  kernels: list[Kernel]
  reason: str | None = None  # why there are no kernels


def run(widths: Iterable[int] | None = None, *, out: str | os.PathLike | None = None,
        progress: Progress = lambda total: lambda _: None) -> str:
  """Compiles all contenders.

  Args:
    widths: head dimensions; None: 64, 128 and 256.
    out: folder for gpu_static.json and gpu_static.md; None: nothing is written.
    progress: maps the number of programs to a function to call with a line for each of them.

  Returns:
    The text of the tables.

  Raises:
    ValueError: a width is not one of `gpu_programs.WIDTHS`.
    ModuleNotFoundError: a compiler is not installed.
  """
  widths = gpu_programs.WIDTHS if widths is None else tuple(widths)
  for width in widths:
    checks.one_of("widths", width, gpu_programs.WIDTHS)
  if static_gpu.missing():
    raise ModuleNotFoundError(static_gpu.missing())
  plan = gpu_programs.plan(widths)
  advance = progress(len(plan))
  results = []
  # Forward and backward in one process, so that the kernels of the forward are known.
  for _, programs in itertools.groupby(plan, lambda program: program.case):
    group = list(programs)
    results += _compiled(group)
    for program in group:
      advance(program.label)
  versions = _versions()
  text = to_markdown(results, versions)
  if out is not None:
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_static.md").write_text(text, encoding="utf-8")
    (folder / "gpu_static.json").write_text(to_json(results, versions), encoding="utf-8")
  return text


def _compiled(group: list[Program]) -> list[Compiled]:
  found: dict[str, list[Kernel | dict[str, str]]] = {}
  for kernel in static_gpu.measure(PROGRAMS, [program.label for program in group]):
    label = kernel["program"] if isinstance(kernel, dict) else kernel.program
    found.setdefault(label, []).append(kernel)
  return results_of(group, found)


def results_of(group: list[Program],
               found: dict[str, list[Kernel | dict[str, str]]]) -> list[Compiled]:
  """Returns the kernels of some programs, those of a backward without its forward.

  Args:
    group: programs of one case.
    found: program label -> results of `static.gpu.measure`.
  """
  results = []
  for program in group:
    every = found.get(program.label, [])
    failed = [kernel["error"] for kernel in every if isinstance(kernel, dict)]
    kernels = [kernel for kernel in every if isinstance(kernel, Kernel)]
    if failed or not kernels:
      results.append(Compiled(program, [], failed[0] if failed else "no kernel"))
      continue
    if program.backward:
      forward = {kernel.name for kernel in found.get(program._replace(backward=False).label, [])
                 if isinstance(kernel, Kernel)}
      kernels = [kernel for kernel in kernels if kernel.name not in forward]
    results.append(Compiled(program, sorted(kernels, key=lambda kernel: kernel.name)))
  return results


def _versions() -> dict[str, str]:
  found = {}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def to_markdown(results: list[Compiled], versions: dict[str, str]) -> str:
  """Formats a table with a row per kernel; cells have a number per loop over keys or queries."""
  named = ", ".join(f"{name} {version}" for name, version in versions.items())
  lines = [
      "# Machine code of GPU kernels for sm_90a", "",
      f"{named}; {datetime.date.today()}. Compiled without a GPU by `python3 -m "
      "attn_core.benchmark --static gpu`; the kernels did not run, and no number is a time.", "",
      f"{gpu_programs.HEADS} heads, {gpu_programs.TOKENS:,} tokens, bfloat16; JAX's "
      "kernel in float16, the only dtype it supports. A window has "
      f"{gpu_programs.WINDOW[0] + 1:,} keys; {gpu_programs.DOCUMENTS} documents are "
      "segments here and a dense mask for tokamax. A cell has a number per innermost loop that "
      "multiplies matrices: for blocks without a mask and with one, or for the two warpgroups that "
      "share their keys. A step is one iteration of that loop; bytes a step are copied by our "
      "kernels for one step.", "",
      "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * 3 + "---:|" * (len(COLUMNS) - 3)]
  for result in results:
    lines += ["| " + " | ".join(row) + " |" for row in _rows(result)]
  failures = [result for result in results if result.reason is not None]
  if failures:
    lines += ["", "## Not compiled", ""]
    lines += [f"* {failure.program.label}: {failure.reason}" for failure in failures]
  return "\n".join(lines) + "\n"


def _rows(result: Compiled) -> Iterable[tuple[str, ...]]:
  program = result.program
  staged = gpu_programs.staged_bytes(program) if program.contender == OURS else ()
  for kernel, copied in itertools.zip_longest(result.kernels, staged[:len(result.kernels)]):
    each = lambda name: " / ".join(f"{loop.get(name, 0):,}" for loop in kernel.loops)
    yield (program.case.name, "backward" if program.backward else "forward",
           _title(program, kernel), str(kernel.registers), f"{kernel.spills:,}",
           "yes" if kernel.serialized else "no", each("products"), each("all"),
           each("exponentials"), f"{kernel.shared_memory:,}", f"{copied:,}" if copied else "")


def _title(program: Program, kernel: Kernel) -> str:
  name = kernel.name.removesuffix("_mosaic_gpu_kernel").removeprefix("attn_core_")
  return f"{program.contender}: {name}" if program.contender == OURS else program.contender


def to_json(results: list[Compiled], versions: dict[str, str]) -> str:
  """Converts all results to JSON text."""
  plain: list[Any] = [
      {"program": {**result.program._asdict(), "case": result.program.case._asdict()},
       "kernels": [kernel.numbers() for kernel in result.kernels], "reason": result.reason}
      for result in results]
  return json.dumps({"versions": versions, "date": str(datetime.date.today()), "results": plain},
                    indent=1) + "\n"
