# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of this package: `python3 -m attn_core_test [pattern ...] [--slow] [--jobs JOBS]`.

Every `*_test.py` module runs in separate processes, because some set JAX flags, such as the number
of virtual devices, when they are imported; `loaded` starts them. Modules listed in sampling.SHARDS
are divided into pieces, each of which runs every n-th test. Without patterns the tests that
`sampling` tags as slow are left out; `--slow` runs them too, and `--slow --rotation K/N` the K-th
of N parts of them. A module given by name runs whole, except for slow cases. `--short` leaves out
what sampling.SHARDS lists, and of most other modules all but one test. `--again`, for a second run
with other versions of Python and JAX, leaves out what they cannot change, and takes some tests in
turns with other rotations. All processes share a cache of compiled programs, which is removed at
the end. A piece prints one line when it is done, and its whole output if a test failed, else the
lines that begin with MARK. The last line is `N passed, M failed, K skipped`; the exit status is 0
only if tests ran and none failed.
"""

import argparse
import concurrent.futures
import fnmatch
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from attn_core_test import sampling

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
FOLDER = pathlib.Path(os.path.abspath(__file__)).parent

# What absltest prints when a test starts and when it ends.
EVENT = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (.*)")

# A name for several modules -> their pattern.
GROUPS = {"adapters": "adapters*"}

# Lines of a module's output that are shown also when all its tests pass begin so.
MARK = "measured: "


class Piece(NamedTuple):
  """One process: a module, or a share of its tests."""

  module: str  # such as "rope_test"
  index: int  # 0 <= index < total
  total: int
  few: bool = False  # run one test

  def __str__(self) -> str:
    return self.module if self.total == 1 else f"{self.module} [{self.index + 1}/{self.total}]"


class Outcome(NamedTuple):
  """Results of the tests of one piece."""

  passed: int
  failed: int
  skipped: int
  seconds: float
  output: str  # standard output and error together


def pieces_of(patterns: list[str], short: bool = False, again: bool = False) -> list[Piece]:
  """The pieces of all modules matching any pattern ("rope", "rope_test", "ro*"); none: all.

  Args:
    patterns: names of modules, or patterns of them.
    short: leave out the modules of sampling.SHARDS, and most tests of others but sampling.READERS.
    again: leave out the modules of sampling.ONCE.
  """
  found = sorted(path.stem for path in FOLDER.glob("*_test.py")
                 if not (short and path.stem in sampling.SHARDS
                         or again and path.stem in sampling.ONCE))
  first = (*sampling.SHARDS, *sampling.LONG)
  modules = [name for name in first if name in found]
  modules += [name for name in found if name not in first]
  for pattern in patterns:
    if not any(matches(name, pattern) for name in modules):
      raise SystemExit(f"no test module matches {pattern!r}; there are: {', '.join(found)}")
  if patterns:
    modules = [name for name in modules if any(matches(name, p) for p in patterns)]
  few = {*modules} - {*sampling.READERS} if short else ()
  return [Piece(name, index, sampling.SHARDS.get(name, 1), name in few)
          for name in modules for index in range(sampling.SHARDS.get(name, 1))]


def matches(module: str, pattern: str) -> bool:
  pattern = GROUPS.get(pattern, pattern)
  return fnmatch.fnmatch(module, pattern) or fnmatch.fnmatch(module, f"{pattern}_test")


def count(output: str) -> dict[str, int]:
  """Counts the tests that ended as OK, FAILED and SKIPPED.

  A test that started and did not report its end failed: it crashed, or one of its subtests, which
  print no events, failed; unless an event says that subtests were skipped. Events outside any test
  are failures of a whole class or module, or tests skipped before they started.
  """
  counts = {"OK": 0, "FAILED": 0, "SKIPPED": 0}
  running = ended = None
  verdict = "FAILED"  # of the running test, if it does not report its end
  for event, name in EVENT.findall(output):
    if event == "RUN":
      counts[verdict] += running is not None
      running, ended, verdict = name, None, "FAILED"
    elif running is not None and (name == running or name.startswith(f"{running} - ")):
      counts[event] += 1
      running, ended = None, running
    elif running is not None:
      verdict = event
    elif name != ended:
      counts[event] += 1
  counts[verdict] += running is not None
  return counts


class Starters:
  """Processes of `loaded`, which start all others; made when needed, ended with the context."""

  def __init__(self, compiled: str, rotation: sampling.Rotation | None, again: bool = False):
    """Prepares the environment of all pieces.

    Args:
      compiled: folder for what JAX compiles; one that the environment names is used instead, and
        outlives this program.
      rotation: which slow tests run; None: none.
      again: leave out what other versions of packages cannot change.
    """
    self._folder = pathlib.Path(compiled)
    self._environment = {"JAX_COMPILATION_CACHE_DIR": compiled,
                         "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                         "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
                         # Filtering costs milliseconds an error, and tests raise thousands.
                         "JAX_TRACEBACK_FILTERING": "off",
                         # Threads of numpy's that wait for a product spin on the other job's core.
                         "OPENBLAS_NUM_THREADS": "1", **os.environ,
                         sampling.VARIABLE: "" if rotation is None else str(rotation),
                         sampling.AGAIN: "1" if again else ""}
    self._environment.pop("XML_OUTPUT_FILE", None)  # Bazel's, for the results of one module
    self._idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()

  def __enter__(self) -> "Starters":
    return self

  def __exit__(self, *_) -> None:
    while not self._idle.empty():
      self._idle.get().communicate()

  def run(self, program: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Returns (exit status, output) of `python3 -m PROGRAM` with additions to the environment."""
    try:
      process = self._idle.get_nowait()
    except queue.Empty:
      process = subprocess.Popen(
          [sys.executable, "-m", f"{FOLDER.name}.loaded"], cwd=FOLDER.parent,
          env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    with tempfile.NamedTemporaryFile(dir=self._folder, prefix="output_") as output:
      request = {"program": program, "environment": environment, "output": output.name}
      print(json.dumps(request), file=process.stdin, flush=True)
      status = int(process.stdout.readline())
      self._idle.put(process)
      return status, output.read().decode(errors="replace")


def run(piece: Piece, starters: Starters, whole: bool) -> Outcome:
  """Runs one piece to its end.

  Args:
    piece: the module and which of its tests.
    starters: start it.
    whole: run tests that are slow because of sampling.QUICK.
  """
  environment = {sampling.FEW: "1" if piece.few else ""}
  if piece.total > 1:
    environment |= {"TEST_TOTAL_SHARDS": str(piece.total), "TEST_SHARD_INDEX": str(piece.index)}
  program = [f"{FOLDER.name}.{piece.module}"] if whole else [
      f"{FOLDER.name}.run_module", piece.module]
  start = time.monotonic()
  status, output = starters.run(program, environment)
  seconds = time.monotonic() - start
  counts = count(output)
  failed = counts["FAILED"]
  if status not in (0, 5):  # 5: no test ran, which is right for a small share
    output += f"(exit status {status})\n"
    failed = max(failed, 1)
  elif sum(counts.values()) == 0 and piece.total == 1:
    output += "(no test ran)\n"
    failed = 1
  return Outcome(counts["OK"], failed, counts["SKIPPED"], seconds, output)


def main() -> int:
  """Runs what the command line asks for; returns the exit status."""
  parser = argparse.ArgumentParser(prog=f"python3 -m {FOLDER.name}", description="Runs the tests.")
  parser.add_argument("patterns", nargs="*", help="modules to run, such as rope or 'masks_*'")
  parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
  parser.add_argument("--short", action="store_true", help="leave out what is long, for Bazel")
  parser.add_argument("--again", action="store_true", help="leave out what versions do not change")
  parser.add_argument("--list", action="store_true", help="only list what would run")
  parser.add_argument("--slow", action="store_true", help="run the slow tests too: hours")
  parser.add_argument("--rotation", metavar="K/N", type=sampling.rotation_of,
                      default=sampling.Rotation(0, 1), help="only a part of the slow tests")
  arguments = parser.parse_args()
  rotation = arguments.rotation if arguments.slow else None
  pieces = pieces_of(arguments.patterns, arguments.short, arguments.again)
  if arguments.list:
    print(*pieces, sep="\n")
    return 0

  start = time.monotonic()
  outcomes = {}
  with (tempfile.TemporaryDirectory() as compiled,
        Starters(compiled, rotation, arguments.again) as starters,
        concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as executor):
    futures = {executor.submit(run, piece, starters, bool(arguments.patterns)): piece
               for piece in pieces}
    for future in concurrent.futures.as_completed(futures):
      piece, outcome = futures[future], future.result()
      outcomes[piece] = outcome
      tests = outcome.passed + outcome.failed + outcome.skipped
      verdict = "FAILED" if outcome.failed else "ok"
      print(f"[{len(outcomes)}/{len(pieces)}] {piece}: {tests} tests, {outcome.seconds:.1f} s, "
            f"{verdict}", flush=True)
      if outcome.failed:
        print(outcome.output, flush=True)
      else:
        for line in outcome.output.splitlines():
          if line.startswith(MARK):
            print(line, flush=True)

  empty = {piece.module for piece in pieces} - {
      piece.module for piece, outcome in outcomes.items() if sum(outcome[:3])}
  for name in sorted(empty):
    print(f"{name}: no test ran")
  failed = sum(outcome.failed for outcome in outcomes.values()) + len(empty)
  passed = sum(outcome.passed for outcome in outcomes.values())
  skipped = sum(outcome.skipped for outcome in outcomes.values())
  for piece in (piece for piece in pieces if outcomes[piece].failed):
    print(f"FAILED: {piece}")
  if arguments.again:
    print(f"left out, as after a run without --again: {', '.join(sampling.ONCE)}, and what takes "
          "turns by sampling.in_turn")
  if rotation is not None:
    print(f"slow tests: rotation {rotation}")
  elif not arguments.patterns:
    print("slow tests are left out: --slow runs them")
  print(f"{len(pieces)} processes in {time.monotonic() - start:.0f} s")
  print(f"{passed} passed, {failed} failed, {skipped} skipped")
  return int(failed > 0 or passed + skipped == 0)


if __name__ == "__main__":
  sys.exit(main())
