# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures attention mechanisms against each other and against other libraries."""

import functools
import gc
import itertools
import os
import pathlib
import statistics
import sys
import time
from typing import Callable, Iterable, NamedTuple

import jax
import numpy as np

from attn_core import checks, table
from attn_core.benchmark import cases as cases_lib
from attn_core.benchmark import contenders, measure, overheads, paged, report
from attn_core.benchmark.cases import CASES, Case
from attn_core.benchmark.report import Refusal, Report, Result
from attn_core.config.metadata import OperationMetadata, resolved_capability, resolved_platform

DIRECTIONS = ("forward", "forward_backward")
_PRODUCT = "matrix product"  # timed with the contenders

# Errors are measured on a case scaled down to these sizes, where the dense oracle fits in float64.
CHECKED_HEADS, CHECKED_TOKENS, CHECKED_BATCH = 8, 1024, 2

# The default cases, and the sizes to which they are scaled.
DEFAULT = ("causal_f32_d64_t2048", "causal_bf16_d64_t2048", "full_f32_d64_t512", "gpt_oss_local")
DEFAULT_HEADS, DEFAULT_TOKENS = 8, 2048

# The complete comparison, unscaled: (case, directions).
FULL = (
    *((name, DIRECTIONS) for name in (
        "causal_f32_d64_t4096", "causal_f32_d128_t4096", "causal_bf16_d64_t4096",
        "full_f32_d64_t4096", "causal_f32_d64_t512", "full_f32_d64_t512", "gqa_f32_d64_t4096",
        "gqa_bf16_d64_t4096")),
    *((name, DIRECTIONS[:1]) for name in (
        "causal_f32_d64_t8192", "packed_f32_d64_t8192", "causal_f32_d64_t16384",
        "window_f32_d64_t16384")),
)


def run_attention_benchmarks(
    mechanisms: Iterable[str] | None = None, cases: Iterable[str | Case] | None = None, *,
    directions: Iterable[str] | None = None, dtype: str | None = None, max_heads: int | None = None,
    max_tokens: int | None = None, repeats: int = 7, peers: bool | Iterable[str] = True,
    full: bool = False, with_overheads: bool = False, max_temp_bytes: int | None = None,
    max_seconds: float | None = None, out: str | os.PathLike | None = None, name: str | None = None,
    progress: bool = True) -> Report:
  """Measures mechanisms and other libraries on named cases.

  Args:
    mechanisms: names of mechanisms; None: one for each implementation of this platform.
    cases: names of `attn_core.benchmark.cases.CASES`, or cases; None: a few small ones, or with
      `full` the complete comparison.
    directions: of "forward" and "forward_backward"; None: both, or with `full` those of the
      complete comparison.
    dtype: dtype of the operands; None: that of the case.
    max_heads: cases with more query heads are scaled down to this number; None: unlimited.
    max_tokens: longer cases are scaled down to this length; None: unlimited.
    repeats: interleaved turns of every contender (fewer, but at least three, for slow ones).
    peers: whether to measure the other libraries that can be imported, or the names of those to
      measure.
    full: whether to run the complete comparison if `cases` is None.
    with_overheads: whether to measure the overheads of calls and of importing as well.
    max_temp_bytes: programs with more temporaries are not run; None: a quarter of the memory.
    max_seconds: a case is skipped if it would end after this time, were it as long as the longest
      before it; None: unlimited.
    out: folder for NAME.json, NAME.md and, with matplotlib, NAME.png; None: files are not written.
    name: stem of the file names; None: from the device and the versions.
    progress: whether to print the progress to standard error.

  Returns:
    A Report; `attn_core.benchmark.report.to_markdown` converts it to text.

  Raises:
    ValueError: a mechanism, case, direction or peer is unknown (the message lists the known ones),
      `dtype` is not a dtype, or `repeats`, `max_heads` or `max_tokens` is not an int >= 1.
  """
  for argument, number in (("repeats", repeats), ("max_heads", max_heads),
                           ("max_tokens", max_tokens)):
    if number is not None or argument == "repeats":
      checks.integer(argument, number, "an int >= 1", lambda x: x >= 1)
  if dtype is not None:
    dtype = checks.dtype("dtype", dtype, "a floating-point dtype, such as 'bfloat16'").name
  platform = resolved_platform(OperationMetadata())
  chosen = (distinct_mechanisms(platform) if mechanisms is None
            else _known("mechanisms", mechanisms, table.names()))
  plan = _plan(cases, directions, full)
  known, absent = _peers(platform, peers)
  over_dense = tuple(name for name in chosen if name != paged.MECHANISM)
  everyone = contenders.mechanisms(over_dense) + paged.mechanisms(chosen) + known
  limit = _quarter_of_memory() if max_temp_bytes is None else max_temp_bytes
  where = report.environment(tuple(contender.package for contender in known))

  refusals = tuple(Refusal(peer.name, None, None, peer.reason) for peer in absent)
  found = Report(where, (), refusals, _overheads(chosen[0]) if with_overheads else {})
  advance = progress_bar(sum(len(directions) for _, directions in plan) * len(everyone), progress)
  end = time.monotonic() + (float("inf") if max_seconds is None else max_seconds)
  longest = 0.0
  for case, case_directions in plan:
    begun = time.monotonic()
    if begun + longest > end:
      late = Refusal("everyone", case.name, None, f"no time for it within {max_seconds or 0:.0f} s")
      found = found._replace(refusals=(*found.refusals, late))
      continue
    case = case if dtype is None else case._replace(dtype=dtype)
    case = cases_lib.scale(case, max_heads, max_tokens)
    found = _add_case(found, case, case_directions, _Settings(everyone, repeats, limit, advance))
    longest = max(longest, time.monotonic() - begun)
    where["load_average"].append(os.getloadavg()[0])
    if out is not None:  # after every case, since the whole may take long
      write(found, pathlib.Path(out), name)
  if out is not None:
    write(found, pathlib.Path(out), name)
  return found


def _peers(platform: str, wanted: bool | Iterable[str],
           ) -> tuple[list[contenders.Contender], list[contenders.Absent]]:
  """The wanted peers that can be imported, and those that cannot."""
  names = contenders.peer_names(platform)
  if isinstance(wanted, bool):
    return contenders.peers(platform, names if wanted else ())
  return contenders.peers(platform, _known("peers", wanted, names))


def distinct_mechanisms(platform: str) -> tuple[str, ...]:
  """The mechanisms of this machine, with one name for each implementation."""
  return contenders.distinct_mechanisms(platform, resolved_capability(OperationMetadata()))


def _overheads(mechanism: str) -> dict[str, float]:
  """The overheads of calls and of importing, by name; the names end with the unit."""
  calls = overheads.call_microseconds(mechanism)
  return {**{f"{call}, microseconds": number for call, number in calls.items()},
          "import attn_core after jax, seconds": overheads.import_seconds()}


class _Settings(NamedTuple):
  """The settings of a benchmark that are the same for every case."""

  everyone: list[contenders.Contender]
  repeats: int
  max_temp_bytes: int
  advance: Callable[[str], None]


# Cases that differ only in their length share one small case.
@functools.lru_cache(maxsize=16)
def _truth(small: Case, backward: bool) -> tuple[contenders.Inputs, dict[str, np.ndarray]]:
  """(inputs, exact results) of a case."""
  inputs = contenders.make_inputs(small)
  return inputs, measure.truth(small, inputs, backward)


@functools.lru_cache(maxsize=None)
def _error(contender: contenders.Contender, small: Case, backward: bool) -> measure.Error:
  """The error of a contender on a small case."""
  inputs, expected = _truth(small, backward)
  return measure.check(contender.prepare(small, inputs, backward), expected)


class _Ready(NamedTuple):
  """A contender that can run the case."""

  contender: contenders.Contender
  runner: contenders.Runner
  error: measure.Error


def _add_case(
    found: Report, case: Case, directions: tuple[str, ...], settings: _Settings) -> Report:
  """Adds the results and refusals of all contenders on one more case to a report."""
  small = cases_lib.scale(case, CHECKED_HEADS, CHECKED_TOKENS, CHECKED_BATCH)
  inputs = contenders.make_inputs(case)

  def prepare(contender: contenders.Contender, direction: str) -> _Ready:
    backward = direction != "forward"
    error = _error(contender, small._replace(name="small"), backward)
    runner = contender.prepare(case, inputs, backward)
    _require_memory(runner, settings.max_temp_bytes)
    runner.call(1)
    return _Ready(contender, runner, error)

  for direction in directions:
    ready, refusals = [], []
    for contender in settings.everyone:
      settings.advance(f"{case.name}, {direction}: {contender.name}")
      try:
        ready.append(prepare(contender, direction))
      except Exception as error:
        # Peers raise exceptions of every kind; the other contenders still run.
        refusals.append(Refusal(contender.name, case.name, direction, _reason(error)))
    results = _time(small, case, direction, ready, settings.repeats)
    found = found._replace(results=(*found.results, *results),
                           refusals=(*found.refusals, *refusals))
    del ready
    gc.collect()  # frees the gigabytes that programs of long cases hold
  return found


def _time(checked: Case, case: Case, direction: str, ready: list[_Ready],
          repeats: int) -> list[Result]:
  """Times all contenders that are ready, in turns with a matrix product."""
  if not ready:
    return []
  product, product_flops = measure.matmul(case.dtype)
  calls = {_PRODUCT: product, **{r.contender.name: r.runner.call for r in ready}}
  settle = measure.settle_seconds(r.runner.temp_bytes for r in ready)
  times = measure.rounds(calls, repeats, settle)
  limit = product_flops / statistics.median(times[_PRODUCT])
  return [Result(case, direction, r.contender.name, r.contender.peer,
                 tuple(times[r.contender.name]), limit, r.runner.compile_seconds,
                 r.runner.temp_bytes, r.error, checked) for r in ready]


def _require_memory(runner: contenders.Runner, limit: int) -> None:
  """Raises MemoryError if the temporaries of a program exceed the limit."""
  if runner.temp_bytes is not None and runner.temp_bytes > limit:
    raise MemoryError(f"the compiled program has {runner.temp_bytes / 1e9:.1f} GB of temporaries; "
                      f"the limit is {limit / 1e9:.1f} GB")


def _reason(error: Exception) -> str:
  """The reason why a contender did not run, in at most 300 characters."""
  text = " ".join(str(error).split())
  kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
  return f"{kind}{text[:300]}"


def _plan(chosen: Iterable[str | Case] | None, directions: Iterable[str] | None,
          full: bool) -> list[tuple[Case, tuple[str, ...]]]:
  """The cases to run, with the directions of each."""
  wanted = None if directions is None else _known("directions", directions, DIRECTIONS)
  if chosen is None and full:
    return [(CASES[name], wanted or own) for name, own in FULL]
  if chosen is None:
    chosen = [cases_lib.scale(CASES[name], DEFAULT_HEADS, DEFAULT_TOKENS) for name in DEFAULT]
  checks.require(not isinstance(chosen, str), "cases", repr(chosen), "a sequence of names")
  chosen = tuple(chosen)
  _known("cases", [case for case in chosen if not isinstance(case, Case)], tuple(CASES))
  return [(case if isinstance(case, Case) else CASES[case], wanted or DIRECTIONS)
          for case in chosen]


def _known(argument: str, names: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
  """Checks that all names are known, and returns them as a tuple."""
  checks.require(not isinstance(names, str), argument, repr(names), "a sequence of names")
  names = tuple(names)
  for name in names:
    checks.one_of(argument, name, known)
  return names


def _quarter_of_memory() -> int:
  """A quarter of the memory of the device, else of the machine (bytes)."""
  stats = jax.devices()[0].memory_stats() or {}
  total = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return total // 4


def progress_bar(total: int, wanted: bool) -> Callable[[str], None]:
  """Returns a function to call with the next step: a tqdm bar if it is installed, else lines.

  Args:
    total: number of steps.
    wanted: whether to print anything.
  """
  if not wanted:
    return lambda text: None
  try:
    import tqdm
  except ImportError:
    done = itertools.count(1)
    return lambda text: print(f"[{next(done)}/{total}] {text}", file=sys.stderr, flush=True)
  bar = tqdm.tqdm(total=total, file=sys.stderr)

  def advance(text: str) -> None:
    bar.set_description_str(text, refresh=False)
    bar.update()

  return advance


def write(found: Report, folder: pathlib.Path, name: str | None = None) -> list[pathlib.Path]:
  """Writes NAME.json, NAME.md and, if there are results and matplotlib is installed, NAME.png.

  Returns:
    The paths of the files.
  """
  folder.mkdir(parents=True, exist_ok=True)
  stem = folder / (report.default_name(found.environment) if name is None else name)
  paths = [stem.with_name(stem.name + suffix) for suffix in (".json", ".md", ".png")]
  paths[0].write_text(report.to_json(found), encoding="utf-8")
  paths[1].write_text(report.to_markdown(found), encoding="utf-8")
  try:
    if found.results:
      report.plot(found, paths[2])
  except ImportError:
    pass
  return [path for path in paths if path.exists()]
