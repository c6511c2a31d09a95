# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Time, memory and errors of contenders on one case.

Times are interleaved: in every round each contender has one turn, in a new order, so that other
load on the machine affects all alike; the median of the turns is reported. The same rounds time a
large matrix product, the reference for the achieved operations per second.
"""

import functools
import math
import random
import time
from typing import Any, Callable, Iterable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.benchmark import cases
from attn_core.benchmark.cases import Case
from attn_core.benchmark.contenders import GRADIENTS, Inputs, Runner, repeat
from attn_core.references import oracle
from attn_core.types import MaskOperands, Operands

TURN_SECONDS = 0.02  # minimum duration of a turn; short calls are repeated
BUDGET_SECONDS = 15.0  # of all turns of one contender; slow ones have fewer, at least three
# Time that the system takes to free gigabytes, which slows down the next turn.
SETTLE_SECONDS = 0.5
SETTLE_BYTES = 2**30

MATMUL_SIZE = {"cpu": 2048}  # rows of the square matrices, by platform
MATMUL_SIZE_ELSEWHERE = 8192

# 0.999 quantile of the error above which a result is wrong and not merely rounded; float32 on
# accelerators uses tensor cores, which round their operands.
WRONG = {"float64": 1e-9, "float32": 2e-3, "float16": 1e-2, "bfloat16": 5e-2}


class Error(NamedTuple):
  """Errors of results, relative to each array's largest absolute value."""

  largest: float
  quantile: float  # 0.999 of all elements have a smaller error

  def is_wrong(self, dtype: str) -> bool:
    """Whether the error is larger than rounding, or NaN."""
    return not self.quantile < WRONG[dtype]


def truth(case: Case, inputs: Inputs, backward: bool) -> dict[str, np.ndarray]:
  """Output and gradients by the oracle in float64, on the host."""
  with jax.enable_x64(True), jax.default_device(_host()):
    wide = lambda x: None if x is None else jnp.asarray(np.asarray(x), jnp.float64)
    query, key, value, cotangent, sinks = map(wide, inputs[:5])
    arrays, structure = jax.tree.flatten(cases.mask(case))
    spec = cases.spec(case, structure)
    mask = MaskOperands(tuple(map(jnp.asarray, arrays)))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
      operands = Operands(query, key, value, None, mask, None if sinks is None else sinks[None],
                          mods=cases.mod_arrays(case))
      return oracle.attention(operands, spec).attention_outputs

    def both(*operands: jax.Array) -> tuple[jax.Array, ...]:
      output, pull = jax.vjp(attend, *operands)
      return (output, *(pull(cotangent) if backward else ()))

    return dict(zip(("output", *GRADIENTS), map(np.asarray, jax.jit(both)(query, key, value))))


def _host() -> jax.Device:
  """A CPU device, or the default device if JAX's CPU backend is disabled."""
  try:
    return jax.devices("cpu")[0]
  except RuntimeError:
    return jax.devices()[0]


def error(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Error:
  """The largest error over all arrays, and the largest 0.999 quantile."""
  found = []
  for name, result in results.items():
    distance = np.abs(result.astype(np.float64) - expected[name])
    distance = distance / max(np.abs(expected[name]).max(), np.finfo(np.float64).tiny)
    found.append((distance.max(), np.quantile(distance, 0.999)))
  largest, quantile = np.array(found).max(0)
  return Error(float(largest), float(quantile))


@functools.lru_cache(maxsize=None)
def matmul(dtype: str) -> tuple[Callable[[int], Any], int]:
  """(function that runs a large matrix product n times, operations of one product)."""
  size = MATMUL_SIZE.get(jax.devices()[0].platform, MATMUL_SIZE_ELSEWHERE)
  operands = tuple(jax.random.normal(key, (size, size), jnp.float32).astype(dtype)
                   for key in jax.random.split(jax.random.key(0)))
  compiled = jax.jit(jnp.matmul).lower(*operands).compile()
  return lambda number: repeat(compiled, operands, number), 2 * size**3


def settle_seconds(temp_bytes: Iterable[int | None]) -> float:
  """Warm-up time of a turn, by the temporaries of all contenders; only on CPUs, see _turn."""
  large = any((size or 0) > SETTLE_BYTES for size in temp_bytes)
  return SETTLE_SECONDS if large and jax.devices()[0].platform == "cpu" else 0.0


def rounds(calls: dict[str, Callable[[int], Any]], repeats: int,
           settle: float = 0.0) -> dict[str, list[float]]:
  """Measures interleaved times.

  Args:
    calls: functions, by name, that run something n times and return when it is done.
    repeats: turns of each function.
    settle: seconds for which a turn calls its function before the measurement.

  Returns:
    Seconds of one call for every turn, by name.
  """
  once = {name: _warm_seconds(call) for name, call in calls.items()}
  calls_a_turn = {name: math.ceil(TURN_SECONDS / seconds) for name, seconds in once.items()}
  turns = {name: min(repeats, max(3, int(BUDGET_SECONDS / (seconds * calls_a_turn[name]))))
           for name, seconds in once.items()}
  times: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(repeats):
    order = [name for name in calls if len(times[name]) < turns[name]]
    random.Random(number).shuffle(order)
    for name in order:
      times[name].append(_turn(calls[name], calls_a_turn[name], settle))
  return times


def _warm_seconds(call: Callable[[int], Any]) -> float:
  """Seconds of a function's second call."""
  call(1)
  start = time.perf_counter()
  call(1)
  return max(time.perf_counter() - start, 1e-9)


def _turn(call: Callable[[int], Any], number: int, settle: float) -> float:
  """Seconds of a call, averaged over `number` calls.

  Calls before them are not timed: the caches hold data of the previous contender, and while the
  system frees that contender's gigabytes, a short call takes up to twice its time.
  """
  start = time.perf_counter()
  call(1)
  while time.perf_counter() - start < settle:
    call(1)
  start = time.perf_counter()
  call(number)
  return (time.perf_counter() - start) / number


def check(runner: Runner, expected: dict[str, np.ndarray]) -> Error:
  """The error of one run."""
  return error(runner.outputs(runner.call(1)), expected)
