# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles programs of single operations quickly on jax before 0.11.

Outside of `jax.jit` every operation of JAX is a program, and a suite has thousands of them. Before
jax 0.11 XLA's pipeline of MLIR takes most of the time of each, and can be turned off for a program.
Here it is turned off where the results stay the same, bit for bit: for programs that move numbers
and compute at most one thing of each, which IEEE 754 rounds in one way. Products that are added, or
sums whose order could differ, do not count among these.
"""

import functools
from typing import Any
import zlib

import jax
from jax._src import compilation_cache, compiler
from jax._src.lib.mlir import ir

from attn_core_test import sampling

MOVES = frozenset(f"stablehlo.{name}" for name in (
    "and", "bitcast_convert", "broadcast_in_dim", "compare", "concatenate", "constant", "convert",
    "dynamic_slice", "dynamic_update_slice", "gather", "iota", "not", "or", "pad", "reshape",
    "reverse", "select", "shift_left", "shift_right_arithmetic", "shift_right_logical", "slice",
    "transpose", "xor")) | {"func.call", "func.return"}
ARITHMETIC = frozenset(f"stablehlo.{name}" for name in (
    "abs", "add", "ceil", "floor", "is_finite", "multiply", "negate", "sign", "subtract"))
MOST = 16  # operations of a small program


def is_exact(computation: ir.Module) -> bool:
  """Whether a program is small, and its results do not depend on how it is optimized."""
  names = [operation.operation.name for function in computation.body.operations
           for region in function.regions for block in region for operation in block.operations]
  arithmetic = [name for name in names if name not in MOVES]
  return (len(names) <= MOST and len(arithmetic) <= 1 and ARITHMETIC.issuperset(arithmetic)
          and "f8" not in str(computation))  # XLA has a conversion to 8 bits in each pipeline


def compile_quickly() -> None:
  """Lets XLA for CPUs compile such programs quickly from here on; changes nothing on newer jax."""
  if jax.__version_info__ >= (0, 11):
    return
  compile_or_get_cached = compiler.compile_or_get_cached

  def compile_least(backend: Any, computation: ir.Module, devices: Any, options: Any, *rest: Any,
                    **more: Any) -> Any:
    if backend.platform == "cpu" and is_exact(computation):
      options.env_option_overrides = [*options.env_option_overrides, *sampling.LEAST.items()]
    return compile_or_get_cached(backend, computation, devices, options, *rest, **more)

  compiler.compile_or_get_cached = compile_least


def keep_quickly() -> None:
  """Compresses what is kept of compiled programs from here on with least effort.

  It is read only by this run, and zlib's usual effort takes two and a half times as long. Changes
  nothing where JAX finds a package that is faster than zlib.
  """
  if not any(getattr(compilation_cache, name, None) for name in ("zstd", "zstandard")):
    compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)
