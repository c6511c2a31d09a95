"""Measures attention mechanisms against each other and against other libraries.

    python3 -m attn_core.benchmark                      a few cases, in about three minutes
    python3 -m attn_core.benchmark --full --out DIR     the complete comparison
    python3 -m attn_core.benchmark --list               what there is to choose from
    python3 -m attn_core.benchmark --static tpu         cycles of TPU kernels, without a TPU
    python3 -m attn_core.benchmark --static tpu-decode  those of decoding, beside the memory's
    python3 -m attn_core.benchmark --static gpu         code of GPU kernels, without a GPU
"""

import argparse
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

from attn_core import checks, table
from attn_core.benchmark import cases as cases_lib
from attn_core.benchmark import contenders, measure, overheads, report
from attn_core.benchmark.static import tpu_decode as static_decode, gpu_report as static_gpu_report, tpu as static_tpu
from attn_core.benchmark.cases import CASES, Case
from attn_core.benchmark.report import Refusal, Report, Result
from attn_core.config.metadata import OperationMetadata, resolved_capability, resolved_platform

DIRECTIONS = ("forward", "forward_backward")

# Errors are found on a case scaled down to this, where the dense oracle fits in float64.
CHECKED_HEADS, CHECKED_TOKENS, CHECKED_BATCH = 8, 1024, 2

# Cases without being asked, and the size to which they are scaled.
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
    mechanisms: names of `attn_core`; None: every distinct one of this platform.
    cases: names of `attn_core.benchmarks.cases.CASES`, or cases; None: a few small ones, or with
      `full` the complete comparison.
    directions: of "forward" and "forward_backward"; None: both, or with `full` the comparison's.
    dtype: of the operands, instead of the cases' own.
    max_heads: cases with more query heads are scaled down to so many; None: none is.
    max_tokens: cases that are longer are scaled down to so many tokens; None: none is.
    repeats: interleaved turns of every contender (fewer, but at least three, where one is slow).
    peers: whether other libraries are measured too, as far as they can be imported, or which.
    full: the complete comparison, in place of `cases` that are None.
    with_overheads: whether to measure the cost of calls and of importing as well.
    max_temp_bytes: a program with more temporaries is not run; None: a quarter of the memory.
    max_seconds: no case is begun that would end later, were it as long as the longest before it;
      None: all are begun.
    out: folder for NAME.json, NAME.md and, with matplotlib, NAME.png; None: nothing is written.
    name: of the files; None: from the device and the versions.
    progress: whether to tell on standard error what is being done.

  Returns:
    A Report; `attn_core.benchmarks.report.to_markdown` makes text of it.

  Raises:
    ValueError: an unknown mechanism, case or direction, where the message lists the known ones; an
      unknown dtype; or `repeats`, `max_heads` or `max_tokens` that are no int >= 1.
  """
  for argument, number in (("repeats", repeats), ("max_heads", max_heads),
                           ("max_tokens", max_tokens)):
    if number is not None or argument == "repeats":
      checks.integer(argument, number, "an int >= 1", lambda x: x >= 1)
  if dtype is not None:
    dtype = checks.dtype("dtype", dtype, "a floating-point dtype, such as 'bfloat16'").name
  platform = resolved_platform(OperationMetadata())
  chosen = (_distinct_mechanisms(platform) if mechanisms is None
            else _known("mechanisms", mechanisms, table.names()))
  plan = _plan(cases, directions, full)
  known, absent = _peers(platform, peers)
  everyone = contenders.mechanisms(chosen) + known
  limit = _quarter_of_memory() if max_temp_bytes is None else max_temp_bytes
  where = report.environment(tuple(contender.package for contender in known))

  refusals = tuple(Refusal(peer.name, None, None, peer.reason) for peer in absent)
  found = Report(where, (), refusals, _overheads(chosen[0]) if with_overheads else {})
  advance = _progress(sum(len(directions) for _, directions in plan) * len(everyone), progress)
  end = time.monotonic() + (float("inf") if max_seconds is None else max_seconds)
  longest = 0.0
  for case, case_directions in plan:
    begun = time.monotonic()
    if begun + longest > end:
      late = Refusal("everyone", case.name, None, f"no time for it within {max_seconds:.0f} s")
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


def _peers(platform: str, wanted: bool | Iterable[str]):
  """The peers that are here and those that are not, of those wanted."""
  names = contenders.peer_names(platform)
  if isinstance(wanted, bool):
    return contenders.peers(platform, names if wanted else ())
  return contenders.peers(platform, _known("peers", wanted, names))


def _distinct_mechanisms(platform: str) -> tuple[str, ...]:
  return contenders.distinct_mechanisms(platform, resolved_capability(OperationMetadata()))


def _overheads(mechanism: str) -> dict[str, float]:
  """What calling and importing cost; the names end with the unit."""
  calls = overheads.call_microseconds(mechanism)
  return {**{f"{call}, microseconds": number for call, number in calls.items()},
          "import attn_core after jax, seconds": overheads.import_seconds()}


class _Settings(NamedTuple):
  """What is the same for every case."""

  everyone: list[contenders.Contender]
  repeats: int
  max_temp_bytes: int
  advance: Callable[[str], None]


# The same small case stands for many, which differ in their length only.
@functools.lru_cache(maxsize=16)
def _truth(small: Case, backward: bool):
  """(inputs, what is right) of a case."""
  inputs = contenders.make_inputs(small)
  return inputs, measure.truth(small, inputs, backward)


@functools.lru_cache(maxsize=None)
def _error(contender: contenders.Contender, small: Case, backward: bool) -> measure.Error:
  inputs, expected = _truth(small, backward)
  return measure.check(contender.prepare(small, inputs, backward), expected)


class _Ready(NamedTuple):
  """Somebody who can run the case."""

  contender: contenders.Contender
  runner: contenders.Runner
  error: measure.Error


def _add_case(found: Report, case: Case, directions, settings: _Settings) -> Report:
  """A report with the results and refusals of everyone on one more case."""
  small = cases_lib.scale(case, CHECKED_HEADS, CHECKED_TOKENS, CHECKED_BATCH)
  inputs = contenders.make_inputs(case)

  def prepare(contender, direction) -> _Ready:
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
        # Peers refuse with errors of every kind, and whatever it is, the others go on.
        refusals.append(Refusal(contender.name, case.name, direction, _reason(error)))
    results = _time(small, case, direction, ready, settings.repeats)
    found = found._replace(results=(*found.results, *results),
                           refusals=(*found.refusals, *refusals))
    del ready
    gc.collect()  # a program of a long case holds gigabytes until then
  return found


def _time(checked: Case, case: Case, direction: str, ready: list[_Ready], repeats: int):
  """Results of all who are ready, timed in turns with a matrix product."""
  if not ready:
    return []
  product, product_flops = measure.matmul(case.dtype)
  calls = {r.contender.name: r.runner.call for r in ready}
  settle = measure.settle_seconds(r.runner.temp_bytes for r in ready)
  times = measure.rounds({None: product, **calls}, repeats, settle)
  limit = product_flops / statistics.median(times[None])
  return [Result(case, direction, r.contender.name, r.contender.peer,
                 tuple(times[r.contender.name]), limit, r.runner.compile_seconds,
                 r.runner.temp_bytes, r.error, checked) for r in ready]


def _require_memory(runner: contenders.Runner, limit: int) -> None:
  if runner.temp_bytes is not None and runner.temp_bytes > limit:
    raise MemoryError(f"the compiled program has {runner.temp_bytes / 1e9:.1f} GB of temporaries; "
                      f"the limit is {limit / 1e9:.1f} GB")


def _reason(error: Exception) -> str:
  """Why somebody did not run, in at most 300 characters."""
  text = " ".join(str(error).split())
  kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
  return f"{kind}{text[:300]}"


def _plan(chosen, directions, full: bool) -> list[tuple[Case, tuple[str, ...]]]:
  """Cases, and in which directions each is run."""
  if directions is not None:
    directions = _known("directions", directions, DIRECTIONS)
  if chosen is None and full:
    return [(CASES[name], directions or own) for name, own in FULL]
  if chosen is None:
    chosen = [cases_lib.scale(CASES[name], DEFAULT_HEADS, DEFAULT_TOKENS) for name in DEFAULT]
  checks.require(not isinstance(chosen, str), "cases", repr(chosen), "a sequence of names")
  chosen = tuple(chosen)
  _known("cases", [case for case in chosen if not isinstance(case, Case)], tuple(CASES))
  return [(case if isinstance(case, Case) else CASES[case], directions or DIRECTIONS)
          for case in chosen]


def _known(argument: str, names: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
  """The names, all of them known."""
  checks.require(not isinstance(names, str), argument, repr(names), "a sequence of names")
  names = tuple(names)
  for name in names:
    checks.one_of(argument, name, known)
  return names


def _quarter_of_memory() -> int:
  """Bytes, of the device or else of the machine."""
  stats = jax.devices()[0].memory_stats() or {}
  total = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return total // 4


def _progress(total: int, wanted: bool) -> Callable[[str], None]:
  """A function to call with what is done next: a bar by tqdm where it is installed, else lines."""
  if not wanted:
    return lambda text: None
  try:
    import tqdm
  except ImportError:
    done = itertools.count(1)
    return lambda text: print(f"[{next(done)}/{total}] {text}", file=sys.stderr, flush=True)
  bar = tqdm.tqdm(total=total, file=sys.stderr)

  def advance(text):
    bar.set_description_str(text, refresh=False)
    bar.update()

  return advance


def write(found: Report, folder: pathlib.Path, name: str | None = None) -> list[pathlib.Path]:
  """Writes NAME.json, NAME.md and, where there are results and matplotlib, NAME.png.

  Returns:
    The files.
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


def _static(parser: argparse.ArgumentParser, given) -> str:
  """The tables of what is compiled elsewhere."""
  rest = dict(out=given.out, progress=lambda total: _progress(total, True))
  if given.static != "gpu":
    module = static_tpu if given.static == "tpu" else static_decode
    return module.run(given.chips, given.widths, given.tokens, **rest)
  if given.chips or given.tokens:
    parser.error("--chips and --tokens are of --static tpu and tpu-decode")
  return static_gpu_report.run(given.widths, **rest)


def main(arguments: list[str] | None = None) -> int:
  """The command line; returns the exit status."""
  parser = argparse.ArgumentParser(prog="python3 -m attn_core.benchmark", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  several = dict(nargs="+", metavar="NAME")
  parser.add_argument("--mechanisms", **several, help="default: every distinct one")
  parser.add_argument("--cases", **several, help="default: a few small ones")
  parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, help="default: both")
  parser.add_argument("--dtype", help="of the operands, such as bfloat16; default: the cases' own")
  parser.add_argument("--max-heads", type=int, help="scale cases down to so many query heads")
  parser.add_argument("--max-tokens", type=int, help="scale cases down to such a length")
  parser.add_argument("--repeats", type=int, default=7, help="interleaved turns of each")
  parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True,
                      help="whether other libraries are measured too")
  parser.add_argument("--overheads", action=argparse.BooleanOptionalAction,
                      help="whether to measure calls and importing; default: with --full")
  parser.add_argument("--full", action="store_true", help="the complete comparison")
  parser.add_argument("--out", help="folder for JSON, text and picture")
  parser.add_argument("--name", help="of the files; default: from the device and the versions")
  parser.add_argument("--list", action="store_true", help="only list cases and contenders")
  static = parser.add_argument_group("--static")
  static.add_argument("--static", choices=("tpu", "tpu-decode", "gpu"),
                      help="compile, and count cycles or instructions; runs nothing")
  static.add_argument("--chips", **several, help="such as v5e v5p v6e tpu7x; default: v6e; of TPUs")
  static.add_argument("--widths", nargs="+", type=int, help="head dimensions")
  static.add_argument("--tokens", nargs="+", type=int, help="lengths of the sequences; of TPUs")
  given = parser.parse_args(arguments)
  if given.list:
    print(_listing())
    return 0
  if given.static:
    print(_static(parser, given), end="")
    return 0
  try:
    found = run_attention_benchmarks(
        given.mechanisms, given.cases, directions=given.direction, dtype=given.dtype,
        max_heads=given.max_heads, max_tokens=given.max_tokens, repeats=given.repeats,
        peers=given.peers, full=given.full, out=given.out, name=given.name,
        with_overheads=given.full if given.overheads is None else given.overheads)
  except ValueError as error:
    parser.error(str(error))
  print(report.to_markdown(found), end="")
  return 0


def _listing() -> str:
  platform = resolved_platform(OperationMetadata())
  found, absent = contenders.peers(platform)
  lines = ["mechanisms:"] + [f"  {name}" for name in _distinct_mechanisms(platform)]
  lines += ["peers:"] + [f"  {peer.name} ({peer.package} {contenders.version(peer.package)})"
                         for peer in found]
  lines += [f"  {peer.name}: {peer.reason}" for peer in absent]
  lines += ["cases:"] + [f"  {name:24} {cases_lib.describe(case)}" for name, case in CASES.items()]
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
