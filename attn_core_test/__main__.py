"""Runs the tests of this package: python3 -m attn_core_test [pattern ...] [--jobs N] [--list].

Every `*_test.py` module runs in processes of its own, because some set JAX flags, such as the
number of virtual devices, when they are imported. Modules listed in SHARDS are cut into pieces,
each of which runs every n-th test. Of modules listed in TURNS, the whole suite takes every second
test, see there. All share what JAX compiles, until the last has ended. A piece prints one line when
it is done, and its whole output when something failed. The last line is
`N passed, M failed, K skipped`; the exit status is 0 only when tests ran and none failed.
"""

import argparse
import concurrent.futures
import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from attn_core_test import sampling as sweeps

FOLDER = pathlib.Path(__file__).resolve().parent

# Module -> number of pieces. The modules named here start first, in this order.
SHARDS = {
    "properties_test": 2, "shard_test": 2, "derivatives_test": 2, "defects_test": 2,
    "dropout_test": 1, "examples_test": 2, "masks_test": 1, "blockwise_test": 1,
    "tpu_compile_test": 2, "tpu_test": 2, "ring_test": 2, "paged_test": 1, "decode_test": 1,
    "tpu_paged_test": 1, "caches_test": 1, "gpu_test": 1, "gpu_backward_test": 1,
    "gpu_decode_test": 1, "tpu_ring_test": 1, "tpu_decode_test": 1, "paged_shard_test": 1,
    "stripes_test": 1, "plan_test": 1, "cudnn_test": 1, "gpu_suite_test": 1, "benchmark_test": 1,
    "pages_test": 1, "readme_test": 1, "distributed_test": 1}

# Of these the whole suite takes every second test: one half on Python 3.11, 3.13, ..., the other on
# 3.12, 3.14, ... A module that is asked for by name runs whole, and with ATTN_CORE_EVERY=1 in the
# environment every one does.
TURNS = ("shard_test", "derivatives_test", "defects_test", "dropout_test", "examples_test",
         "masks_test", "blockwise_test", "tpu_test", "ring_test", "paged_test", "decode_test",
         "caches_test", "plan_test", "cudnn_test", "gpu_suite_test", "benchmark_test",
         "pages_test", "paged_shard_test", "stripes_test", "bad_input_test", "helpers_test")

# What absltest prints when a test starts and when it ends.
EVENT = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (.*)")


class Piece(NamedTuple):
  """One process: a module, or a share of its tests."""

  module: str  # such as "masks_test"
  index: int  # 0 <= index < total
  total: int

  def __str__(self) -> str:
    return self.module if self.total == 1 else f"{self.module} [{self.index + 1}/{self.total}]"


class Outcome(NamedTuple):
  """What became of the tests of one piece."""

  passed: int
  failed: int
  skipped: int
  seconds: float
  output: str  # standard output and error together


def pieces_of(patterns: list[str]) -> list[Piece]:
  """The pieces of all modules matching any pattern ("masks", "masks_test", "ma*"); none: all."""
  found = sorted(path.stem for path in FOLDER.glob("*_test.py"))
  modules = [name for name in SHARDS if name in found]
  modules += [name for name in found if name not in SHARDS]
  for pattern in patterns:
    if not any(matches(name, pattern) for name in modules):
      raise SystemExit(f"no test module matches {pattern!r}; there are: {', '.join(found)}")
  if patterns:
    modules = [name for name in modules if any(matches(name, p) for p in patterns)]
  pieces = [Piece(name, index, SHARDS.get(name, 1))
            for name in modules for index in range(SHARDS.get(name, 1))]
  turn = sys.version_info.minor % 2
  return [Piece(piece.module, 2 * piece.index + turn, 2 * piece.total)
          if piece.module in TURNS and not patterns and not sweeps.EVERY else piece
          for piece in pieces]


def matches(module: str, pattern: str) -> bool:
  return fnmatch.fnmatch(module, pattern) or fnmatch.fnmatch(module, f"{pattern}_test")


def count(output: str) -> dict[str, int]:
  """How many tests ended as OK, FAILED and SKIPPED.

  A test that started and has no end of its own failed: it crashed, or its subtests did not all pass
  and they print no event; unless an event says that subtests were skipped. Events outside any test
  are failures of a whole class or module, or tests skipped before they started.
  """
  counts = {"OK": 0, "FAILED": 0, "SKIPPED": 0}
  running = ended = None
  verdict = "FAILED"  # of the running test, should it have no end of its own
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


def run(piece: Piece, compiled: str) -> Outcome:
  """Runs one piece to its end; `compiled` is a folder for what JAX compiles, for all pieces.

  One that the environment names goes before it: that outlives this program.
  """
  environment = {"JAX_COMPILATION_CACHE_DIR": compiled,
                 "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                 "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0", **os.environ}
  if piece.total > 1:
    environment.update(TEST_TOTAL_SHARDS=str(piece.total), TEST_SHARD_INDEX=str(piece.index))
  start = time.monotonic()
  process = subprocess.run(
      [sys.executable, "-m", f"{FOLDER.name}.{piece.module}"], cwd=FOLDER.parent, env=environment,
      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
      text=True, errors="replace")
  seconds = time.monotonic() - start
  counts = count(process.stdout)
  output, failed = process.stdout, counts["FAILED"]
  if process.returncode not in (0, 5):  # 5: no test ran, which is right for a small share
    output += f"(exit status {process.returncode})\n"
    failed = max(failed, 1)
  elif sum(counts.values()) == 0 and piece.total == 1:
    output += "(no test ran)\n"
    failed = 1
  return Outcome(counts["OK"], failed, counts["SKIPPED"], seconds, output)


def main() -> int:
  """Runs what the command line asks for; returns the exit status."""
  parser = argparse.ArgumentParser(prog=f"python3 -m {FOLDER.name}", description="Runs the tests.")
  parser.add_argument("patterns", nargs="*", help="modules to run, such as masks or 'ma*'")
  parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
  parser.add_argument("--list", action="store_true", help="only list what would run")
  arguments = parser.parse_args()
  pieces = pieces_of(arguments.patterns)
  if arguments.list:
    print(*pieces, sep="\n")
    return 0

  start = time.monotonic()
  outcomes = {}
  with (tempfile.TemporaryDirectory() as compiled,
        concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as executor):
    futures = {executor.submit(run, piece, compiled): piece for piece in pieces}
    for future in concurrent.futures.as_completed(futures):
      piece, outcome = futures[future], future.result()
      outcomes[piece] = outcome
      tests = outcome.passed + outcome.failed + outcome.skipped
      verdict = "FAILED" if outcome.failed else "ok"
      print(f"[{len(outcomes)}/{len(pieces)}] {piece}: {tests} tests, {outcome.seconds:.1f} s, "
            f"{verdict}", flush=True)
      if outcome.failed:
        print(outcome.output, flush=True)

  empty = {piece.module for piece in pieces} - {
      piece.module for piece, outcome in outcomes.items() if sum(outcome[:3])}
  for name in sorted(empty):
    print(f"{name}: no test ran")
  failed = sum(outcome.failed for outcome in outcomes.values()) + len(empty)
  passed = sum(outcome.passed for outcome in outcomes.values())
  skipped = sum(outcome.skipped for outcome in outcomes.values())
  for piece in (piece for piece in pieces if outcomes[piece].failed):
    print(f"FAILED: {piece}")
  halved = {piece.module for piece in pieces if piece.total > SHARDS.get(piece.module, 1)}
  if halved:
    print(f"of {len(halved)} long modules every second test: ATTN_CORE_EVERY=1 runs all")
  print(f"{len(pieces)} processes in {time.monotonic() - start:.0f} s")
  print(f"{passed} passed, {failed} failed, {skipped} skipped")
  return int(failed > 0 or passed + skipped == 0)


if __name__ == "__main__":
  sys.exit(main())
