# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs programs with a time limit, and ends them with all their children."""

import contextlib
import os
import signal
import subprocess

TERM_SECONDS = 2  # a program gets this long to end its own children


def run_group(command: list[str], seconds: float, variables=None) -> tuple[str, str]:
  """Returns (output, how it ended) of a program, which ends with all its children at the limit."""
  with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                        text=True, errors="replace", start_new_session=True) as process:
    try:
      output, _ = process.communicate(timeout=seconds)
      return output, f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
      # Process groups that the program made, such as the sanitizer's, are for it to end.
      os.killpg(process.pid, signal.SIGTERM)
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=TERM_SECONDS)
      kill_group(process.pid)
      output, _ = process.communicate()
      return output, f"stopped after {seconds:.0f} s"
    finally:
      if process.poll() is None:  # this program itself is ending
        kill_group(process.pid)


def kill_group(group: int) -> None:
  """Ends a process group at once, if it still exists."""
  with contextlib.suppress(ProcessLookupError):  # all have ended
    os.killpg(group, signal.SIGKILL)
