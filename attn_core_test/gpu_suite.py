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

import os
import pathlib
import sys

ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
sys.path.insert(0, str(ROOT))  # this file is also a program

# pylint: disable=wrong-import-position
from attn_core_test import device_suite

SUITE = device_suite.Suite(
    ROOT / "attn_core_test" / "gpu_suite.py", __doc__, "gpu", "GPU",
    {"environment": 0.1, "properties": 0.28, "repeatability": 0.12, "decoding": 0.1, "times": 0.3,
     "sanitizer": 0.1}, "attn_core_test.gpu_suite_parts", times_cases=True,
    # Other libraries need memory on the same GPU.
    variables={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


if __name__ == "__main__":
  device_suite.run_script(SUITE)
