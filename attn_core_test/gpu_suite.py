# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs all checks and measurements that need a GPU, in one call of less than ten minutes.

    python3 attn_core_test/gpu_suite.py --out DIR            on a machine with an NVIDIA GPU
    python3 attn_core_test/gpu_suite.py --out DIR --tiny     anywhere, to try the script itself

Each part runs in a process of its own, so that a failure is reported and does not stop the others:
the environment; the property cases against the oracle; repeatability bit for bit; decoding compared
with a copy of the keys; times compared with other libraries that can be imported;
compute-sanitizer, if installed, on a small case.

Writes gpu_suite.json and gpu_suite.md after every part, properties.json after every property,
times.json and times.md after every case. The exit status is 0 if all parts are ok. Cases that the
time did not suffice for are named; another call runs them: `--parts times --cases NAME NAME`.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
sys.path.insert(0, str(ROOT))  # this file is also a program

# pylint: disable=wrong-import-position
from attn_core_test.process_group import run_group

# Part -> its share of the time; the next parts get the time that one leaves.
SHARES = {"environment": 0.1, "properties": 0.28, "repeatability": 0.12, "decoding": 0.1,
          "times": 0.3, "sanitizer": 0.1}
GRACE_SECONDS = 25  # for work that a part has started when its time is over

NO_GPU = ("There is no GPU here: JAX computes on {platform!r}. Nothing below is a measurement of a "
          "GPU; it only shows that the script runs.")
UNKNOWN = "JAX did not say where it computes; take nothing below for a measurement of a GPU."


def main(arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, help="folder for gpu_suite.json and .md")
  parser.add_argument("--budget", type=float, default=560, help="seconds for all parts")
  parser.add_argument("--parts", nargs="+", choices=SHARES, default=tuple(SHARES))
  parser.add_argument("--cases", nargs="+", default=(), metavar="NAME",
                      help="of attn_core.benchmark.cases, to time; default: its GPU_CASES")
  parser.add_argument("--tiny", action="store_true", help="tiny shapes, on any device")
  parser.add_argument("--part", help=argparse.SUPPRESS)  # set in the process of a part
  parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
  given = parser.parse_args(arguments)
  if given.part is not None:
    return run_part(given)
  if given.out is None:
    parser.error("--out DIR is needed")
  return run_all(given)


def run_part(given) -> int:
  """Runs one part in this process; writes its result to `given.result`."""
  start = time.monotonic()
  import jax
  from attn_core_test import gpu_suite_parts
  jax.devices()
  # Imports and the start of the device count toward the part's time.
  left = given.budget - (time.monotonic() - start)
  settings = gpu_suite_parts.Settings(given.tiny, left, given.out, tuple(given.cases))
  found = gpu_suite_parts.PARTS[given.part](settings)
  if given.result is not None:
    given.result.write_text(json.dumps(found._asdict()), encoding="utf-8")
  return 0 if found.ok else 1


def run_all(given) -> int:
  """Runs all parts, each in a process; writes the report after each."""
  given.out.mkdir(parents=True, exist_ok=True)
  end = time.monotonic() + given.budget
  found = {}
  parts = tuple(dict.fromkeys(("environment", *given.parts)))
  for number, part in enumerate(parts):
    left = end - time.monotonic()
    share = SHARES[part] / sum(SHARES[name] for name in parts[number:])
    found[part] = spawn(part, given, max(1.0, left * share))
    print(f"{part}: {'ok' if found[part]['ok'] else 'FAILED'}, {found[part]['seconds']:.0f} s",
          flush=True)
    platform = found["environment"]["data"].get("platform")
    (given.out / "gpu_suite.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (given.out / "gpu_suite.md").write_text(markdown(found, platform), encoding="utf-8")
    if platform not in (None, "gpu") and not given.tiny:
      print(headline(platform), "With --tiny it tries itself.")
      return 2
  print(headline(platform))
  return 0 if all(result["ok"] for result in found.values()) else 1


def spawn(part: str, given, seconds: float) -> dict:
  """Runs a part in a process; returns its result, or how it ended without one."""
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    result = pathlib.Path(folder) / "result.json"
    command = [sys.executable, str(ROOT / "attn_core_test" / "gpu_suite.py"), "--part", part,
               "--budget", str(max(1.0, seconds - GRACE_SECONDS)), "--result", str(result),
               "--out", str(given.out), *["--tiny"] * given.tiny]
    command += ["--cases", *given.cases] if given.cases else []
    # Other libraries need memory on the same GPU.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    output, ending = run_group(command, max(seconds, GRACE_SECONDS), variables)
    taken = time.monotonic() - start
    if result.exists():
      return {**json.loads(result.read_text(encoding="utf-8")), "seconds": taken}
  tail = output[-3000:]
  return {"ok": False, "lines": [f"Ended without a result: {ending}.", f"```\n{tail}\n```"],
          "data": {}, "seconds": taken}


def headline(platform: str | None) -> str:
  """Says on which platform the numbers were measured."""
  if platform == "gpu":
    return "Measured on a GPU."
  return UNKNOWN if platform is None else NO_GPU.format(platform=platform)


def markdown(found: dict, platform: str | None) -> str:
  """Returns the report: a section for every part."""
  parts = ["# attn_core on a GPU" if platform == "gpu" else "# attn_core, without a GPU",
           headline(platform)]
  for part, result in found.items():
    verdict = "ok" if result["ok"] else "FAILED"
    parts += [f"## {part}: {verdict}, {result['seconds']:.0f} s", "\n".join(result["lines"])]
  return "\n\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs `finally`
  sys.exit(main())
