# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Overheads of calls and of importing the library."""

import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Callable

import jax
import jax.numpy as jnp

from attn_core.attention import attention

ROUNDS, CALLS = 21, 200

# Prints the seconds of importing the library after jax.
_IMPORT = """
import time
import jax, jax.numpy
start = time.perf_counter()
import attn_core
print(time.perf_counter() - start)
"""


def call_microseconds(mechanism: str) -> dict[str, float]:
  """Median microseconds of a call on arrays so small that only the overhead counts.

  Args:
    mechanism: name of a mechanism of the library.

  Returns:
    By name: interleaved calls of the library and of jax.nn, jitted and without jit, where every
    call checks its arguments again.
  """
  array = jnp.ones((1, 8, 1, 8))
  ours = lambda q, k, v: attention(q, k, v, mechanism=mechanism).attention_outputs
  theirs = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
  calls: dict[str, Callable[..., jax.Array]] = {
      "attn_core jitted": jax.jit(ours), "jax.nn jitted": jax.jit(theirs),
           "attn_core without jit": ours, "jax.nn without jit": theirs}
  times: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(ROUNDS):
    for name, call in calls.items():
      number = CALLS if name.endswith(" jitted") else CALLS // 40
      jax.block_until_ready(call(array, array, array))
      start = time.perf_counter()
      for _ in range(number):
        jax.block_until_ready(call(array, array, array))
      times[name].append((time.perf_counter() - start) / number)
  return {name: 1e6 * statistics.median(seconds) for name, seconds in times.items()}


def import_seconds(repeats: int = 5) -> float:
  """Median seconds of `import attn_core` in a new process that has imported jax already."""
  root = str(pathlib.Path(__file__).parents[2])
  path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
  run = lambda: subprocess.run([sys.executable, "-c", _IMPORT], check=True, text=True,
                               stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
  return statistics.median(float(run().stdout) for _ in range(repeats))
