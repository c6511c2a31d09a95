# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Speeds of kernels from a report that `tpu_suite.py` or `gpu_suite.py` wrote on a device."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_core import checks
from attn_core.plan import peaks

Report = str | os.PathLike | Mapping[str, object]  # a file, or its contents

EXPECTED = ("tpu_suite.json or gpu_suite.json, as attn_core_test/tpu_suite.py or gpu_suite.py "
            "--out writes it")
CURE = "run the suite on the device with --parts times"


class Speed(NamedTuple):
  """Matrix operations that this library's fastest mechanism computes per second."""

  forward: float
  backward: float


class _Time(NamedTuple):
  """The least time of one case in one direction."""

  width: float  # D
  flops: float
  seconds: float


def device_kind(report: Report) -> str:
  """Returns the `device_kind` of the device on which a report was made.

  Args:
    report: a file, or its contents.

  Raises:
    ValueError: it is not a report of a suite.
  """
  _, found = _times(report)
  return found


def speed(report: Report, device: str, width: int) -> Speed:
  """Returns the speed of attention by the times of a report.

  Of the cases whose head width is nearest to `width`, that with most operations counts, since
  sequences that are sharded are long. The time of a backward is that of forward and backward, less
  that of the forward.

  Args:
    report: a file, or its contents.
    device: a key of `peaks.DEVICES`, or a `jax.Device.device_kind`.
    width: D.

  Raises:
    ValueError: it is not a report of a suite, is of another device, or has no times of forward and
      backward.
  """
  times, measured_on = _times(report)
  checks.require(peaks.find(device) == peaks.find(measured_on), "report",
                 f"times of {measured_on!r}", f"times of {device!r}, for which is planned; "
                 f"{CURE}, or plan for the device of the report")
  pairs = [(forward, times[name, "forward_backward"]) for (name, direction), forward in
           times.items() if direction == "forward" and (name, "forward_backward") in times]
  pairs = [(one, both) for one, both in pairs if both.seconds > one.seconds]
  checks.require(bool(pairs), "report", "no case with times of forward and backward",
                 f"some; {CURE}")
  distance = lambda pair: abs(math.log(pair[0].width / width))
  one, both = min(pairs, key=lambda pair: (distance(pair), -pair[0].flops))
  return Speed(one.flops / one.seconds, (both.flops - one.flops) / (both.seconds - one.seconds))


def _times(report: Report) -> tuple[dict[tuple[str, str], _Time], str]:
  """Reads (case, direction) -> the least time of this library's mechanisms, and the device."""
  contents = _contents(report)
  part = contents.get("times")
  data: Any = part.get("data") if isinstance(part, Mapping) else None
  checks.require(isinstance(data, Mapping) and {"environment", "results"} <= set(data), "report",
                 f"the parts {', '.join(map(str, contents)) or 'none'}, of which 'times' has no "
                 "results", f"{EXPECTED}, with times; {CURE}")
  found: dict[tuple[str, str], _Time] = {}
  try:
    for result in data["results"]:
      if result["peer"] or result["wrong"]:
        continue
      key = str(result["case"]["name"]), str(result["direction"])
      time = _Time(float(result["case"]["width"]), float(result["flops"]),
                   float(result["seconds"]))
      if min(time) <= 0:
        raise ValueError(f"{key} takes {time.seconds} s for {time.flops} operations")
      if key not in found or time.seconds < found[key].seconds:
        found[key] = time
    return found, str(data["environment"]["device"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"report: got times of another form ({type(error).__name__}: {error}); "
                     f"expected {EXPECTED} of this version; {CURE}") from error


def _contents(report: Report) -> Mapping[str, object]:
  """Returns the contents of a report."""
  if isinstance(report, Mapping):
    return report
  checks.require(isinstance(report, (str, os.PathLike)), "report", type(report).__name__,
                 f"the path or the contents of {EXPECTED}")
  try:
    contents = json.loads(pathlib.Path(report).read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(f"report: got {str(report)!r}, which cannot be read ({error.strerror}); "
                     f"expected {EXPECTED}") from error
  except ValueError as error:
    raise ValueError(f"report: got {str(report)!r}, which is not JSON ({error}); expected "
                     f"{EXPECTED}") from error
  checks.require(isinstance(contents, dict), "report", f"{str(report)!r}, JSON of a "
                 f"{type(contents).__name__}", EXPECTED)
  return contents
