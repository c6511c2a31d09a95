# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs test modules one after another, each in a copy of a process that has imported JAX.

    python3 -m attn_core_test.loaded

For every line of standard input, JSON of a `Request`, it forks, runs the tests in the copy, and
prints the copy's exit status. So the imports, a second of work, are done once instead of for every
module. Nothing is computed before the fork: JAX starts its threads and reads its flags when it is
used first, in the copy.
"""

import atexit
import dataclasses
import gc
import json
import os
import runpy
import subprocess
import sys
import traceback

from absl.testing import absltest, parameterized
import jax
from jax.experimental.pallas import mosaic_gpu, tpu
import numpy

import attn_core

LOADED = (absltest, parameterized, jax, mosaic_gpu, tpu, numpy, attn_core)  # what most modules need


@dataclasses.dataclass(frozen=True)
class Request:
  """A program to run."""

  program: list[str]  # a module of Python and its arguments
  environment: dict[str, str]  # added to the process's
  output: str  # file for standard output and error


def become(request: Request) -> None:
  """Runs the program in this process, as `python3 -m` does."""
  os.environ.update(request.environment)
  with open(os.devnull, "rb") as nothing, open(request.output, "wb") as output:
    os.dup2(nothing.fileno(), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
  sys.argv[:] = ["-m", *request.program[1:]]
  runpy.run_module(request.program[0], run_name="__main__", alter_sys=True)


def status_of(request: Request) -> int:
  """Runs the program in this process to its end; returns its exit status.

  What Python would take apart after that, module by module for a quarter of a second, ends with the
  process.
  """
  status: str | int = 0
  try:
    become(request)
  except SystemExit as error:
    status = error.code or 0
  except BaseException:  # pylint: disable=broad-exception-caught
    traceback.print_exc()
    status = 1
  if not isinstance(status, int):
    print(status, file=sys.stderr)
    status = 1
  atexit._run_exitfuncs()
  sys.stdout.flush()
  sys.stderr.flush()
  return status & 255


def run_anew(request: Request) -> int:
  """Runs the program in a process of its own, where forking is not safe; returns its status."""
  with open(request.output, "wb") as output:
    return subprocess.run(
        [sys.executable, "-m", *request.program], env={**os.environ, **request.environment},
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode


def main() -> None:
  gc.collect()
  gc.freeze()  # what is imported by now stays
  for line in sys.stdin:
    request = Request(**json.loads(line))
    if sys.platform != "linux":
      status = run_anew(request)
    elif child := os.fork():
      status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    else:
      os._exit(status_of(request))
    print(status, flush=True)


if __name__ == "__main__":
  main()
