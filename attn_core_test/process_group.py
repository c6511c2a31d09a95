# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that end with all their children when their time is over."""

import contextlib
import os
import signal
import subprocess

TERM_SECONDS = 2  # for a program that is told to end, to end its own children


def run_group(command: list[str], seconds: float, variables=None) -> tuple[str, str]:
  """(output, how it ended) of a program; when the time is over, it ends with all its children."""
  with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                        text=True, errors="replace", start_new_session=True) as process:
    try:
      output, _ = process.communicate(timeout=seconds)
      return output, f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
      # Groups of its own, such as the sanitizer's, are the program's to end.
      os.killpg(process.pid, signal.SIGTERM)
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=TERM_SECONDS)
      kill_group(process.pid)
      output, _ = process.communicate()
      return output, f"stopped after {seconds:.0f} s"
    finally:
      if process.poll() is None:  # this program is told to end
        kill_group(process.pid)


def kill_group(group: int) -> None:
  """Ends a process group at once, should it still be there."""
  with contextlib.suppress(ProcessLookupError):  # all have ended
    os.killpg(group, signal.SIGKILL)
