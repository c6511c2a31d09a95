# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line, processes and reports that gpu_suite and tpu_suite share.

Each part of a suite runs in a process of its own, so that a failure is reported and does not stop
the others. NAME.json and NAME.md are written after every part.
"""

import argparse
import importlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from typing import Mapping, NamedTuple

from attn_core_test.process_group import run_group

GRACE_SECONDS = 25  # for work that a part has started when its time is over
UNKNOWN = "JAX did not say where it computes; take nothing below for a measurement of a {device}."
NO_DEVICE = ("There is no {device} here: JAX computes on {platform!r}. Nothing below is a "
             "measurement of a {device}; it only shows that the script runs.")


class Suite(NamedTuple):
  """A program of parts that need one kind of device."""

  script: pathlib.Path  # the program, which runs one part with --part
  description: str
  platform: str  # of JAX
  device: str  # in sentences
  shares: Mapping[str, float]  # part -> its share of the time; the next get the time one leaves
  parts: str  # the module with `PARTS`, imported in the process of a part only
  times_cases: bool = False  # whether --cases chooses what is timed
  budget: float = 560  # seconds for all parts, unless given
  variables: Mapping[str, str] = {}  # environment variables of a part
  tiny_variables: Mapping[str, str] = {}  # those with --tiny

  @property
  def name(self) -> str:
    """The name of the program and its reports."""
    return self.script.stem


def main(suite: Suite, arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  name = suite.name
  parser = argparse.ArgumentParser(description=suite.description,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, help=f"folder for {name}.json and .md")
  parser.add_argument("--budget", type=float, default=suite.budget, help="seconds for all parts")
  parser.add_argument("--parts", nargs="+", choices=suite.shares, default=tuple(suite.shares))
  if suite.times_cases:
    parser.add_argument("--cases", nargs="+", default=(), metavar="NAME",
                        help="of attn_core.benchmark.cases, to time; default: those of the suite")
  parser.add_argument("--tiny", action="store_true", help="tiny shapes, on any device")
  parser.add_argument("--part", help=argparse.SUPPRESS)  # set in the process of a part
  parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
  parser.set_defaults(cases=())
  given = parser.parse_args(arguments)
  if given.part is not None:
    return run_part(suite, given)
  if given.out is None:
    parser.error("--out DIR is needed")
  return run_all(suite, given)


def run_script(suite: Suite) -> None:
  """Runs the command line of a program, and exits; children end with it."""
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs `finally`
  sys.exit(main(suite))


def run_part(suite: Suite, given: argparse.Namespace) -> int:
  """Runs one part in this process; writes its result to `given.result`."""
  start = time.monotonic()
  import jax
  module = importlib.import_module(suite.parts)
  jax.devices()
  # Imports and the start of the device count toward the part's time.
  left = given.budget - (time.monotonic() - start)
  settings = module.Settings(given.tiny, left, given.out, tuple(given.cases))
  found = module.PARTS[given.part](settings)
  if given.result is not None:
    given.result.write_text(json.dumps(found._asdict()), encoding="utf-8")
  return 0 if found.ok else 1


def run_all(suite: Suite, given: argparse.Namespace) -> int:
  """Runs all parts, each in a process; writes the report after each."""
  given.out.mkdir(parents=True, exist_ok=True)
  end = time.monotonic() + given.budget
  found: dict[str, dict] = {}
  parts = tuple(dict.fromkeys(("environment", *given.parts)))
  for number, part in enumerate(parts):
    left = end - time.monotonic()
    share = suite.shares[part] / sum(suite.shares[name] for name in parts[number:])
    found[part] = spawn(suite, part, given, max(1.0, left * share))
    print(f"{part}: {'ok' if found[part]['ok'] else 'FAILED'}, {found[part]['seconds']:.0f} s",
          flush=True)
    platform = found["environment"]["data"].get("platform")
    write = lambda ending, text: (given.out / f"{suite.name}{ending}").write_text(
        text, encoding="utf-8")
    write(".json", json.dumps(found, indent=1) + "\n")
    write(".md", markdown(suite, found, platform))
    if platform not in (None, suite.platform) and not given.tiny:
      print(headline(suite, platform), "With --tiny it tries itself.")
      return 2
  print(headline(suite, platform))
  return 0 if all(result["ok"] for result in found.values()) else 1


def spawn(suite: Suite, part: str, given: argparse.Namespace, seconds: float) -> dict:
  """Runs a part in a process; returns its result, or how it ended without one."""
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    result = pathlib.Path(folder) / "result.json"
    command = [sys.executable, str(suite.script), "--part", part,
               "--budget", str(max(1.0, seconds - GRACE_SECONDS)), "--result", str(result),
               "--out", str(given.out), *["--tiny"] * given.tiny]
    command += ["--cases", *given.cases] if given.cases else []
    variables = {**suite.variables, **(suite.tiny_variables if given.tiny else {}), **os.environ}
    output, ending = run_group(command, max(seconds, GRACE_SECONDS), variables)
    taken = time.monotonic() - start
    if result.exists():
      return {**json.loads(result.read_text(encoding="utf-8")), "seconds": taken}
  tail = output[-3000:]
  return {"ok": False, "lines": [f"Ended without a result: {ending}.", f"```\n{tail}\n```"],
          "data": {}, "seconds": taken}


def headline(suite: Suite, platform: str | None) -> str:
  """Says on which platform the numbers were measured."""
  if platform == suite.platform:
    return f"Measured on a {suite.device}."
  return (UNKNOWN if platform is None else NO_DEVICE).format(device=suite.device, platform=platform)


def markdown(suite: Suite, found: dict, platform: str | None) -> str:
  """Returns the report: a section for every part."""
  title = "on" if platform == suite.platform else "without"
  parts = [f"# attn_core{'' if title == 'on' else ','} {title} a {suite.device}",
           headline(suite, platform)]
  for part, result in found.items():
    verdict = "ok" if result["ok"] else "FAILED"
    parts += [f"## {part}: {verdict}, {result['seconds']:.0f} s", "\n".join(result["lines"])]
  return "\n\n".join(parts).rstrip() + "\n"
