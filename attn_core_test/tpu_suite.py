# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks that need a TPU, in one call of less than fifteen minutes.

    python3 attn_core_test/tpu_suite.py --out DIR            on a machine with TPUs
    python3 attn_core_test/tpu_suite.py --out DIR --tiny     on a CPU, to try the script itself

It has not run on a TPU yet. Each part runs in a process of its own, so that one that fails or hangs
is reported and does not stop the others. First what interpret mode and the compiler cannot show,
most doubtful last: values and gradients against float64 on the host, and the accuracy of exp2, tanh
and others; the same with JAX's default precision of products raised; pages, with one wait for a
block of transfers and with one for each; rings by remote copies on all chips of the host, compared
bit for bit with rings by collectives; pages and caches that kernels write, many times, byte for
byte as plain XLA writes them. Then the property cases against the oracle, and repeatability bit for
bit. Then times: of flash_attn2, JAX's splash and tokamax; of pages, also by the ragged kernel
of tpu-inference (`pip install --no-deps tpu-inference`); and which of the static figures in
attn_core_test/results held. Other libraries are left out where they are not installed.

Writes tpu_suite.json and tpu_suite.md after every part, properties.json after every property,
times.json and pages_times.json after every case. The exit status is 0 if all parts are ok. The
planner takes the report: `python3 -m attn_core.plan --report DIR/tpu_suite.json`.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
sys.path.insert(0, str(ROOT))  # this file is also a program

# pylint: disable=wrong-import-position
from attn_core_test import device_suite

SUITE = device_suite.Suite(
    ROOT / "attn_core_test" / "tpu_suite.py", __doc__, "tpu", "TPU",
    {"environment": 0.04, "accuracy": 0.1, "accuracy_highest": 0.08, "pages": 0.1, "writes": 0.06,
     "remote_ring": 0.16, "properties": 0.14, "repeatability": 0.04, "times": 0.16,
     "pages_times": 0.1, "static_figures": 0.02},
    "attn_core_test.tpu_suite_parts", budget=840,
    # Interpreted kernels wait for other devices on threads of XLA's.
    tiny_variables={"JAX_NUM_CPU_DEVICES": "4", "NPROC": "32"})


if __name__ == "__main__":
  device_suite.run_script(SUITE)
