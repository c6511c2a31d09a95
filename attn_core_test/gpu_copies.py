# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for the copies of GPU kernels that neither interpret mode nor the compilers check.

A copy of consecutive bytes (cp.async.bulk without a tensor map) ends only at the end of the whole
array: one that is longer than the rest of its row goes on in the next row.
"""

import math

from jax._src.lib.mlir import ir

from attn_core_test import gpu_lowered
from attn_core_test.gpu_lowered import DYNAMIC

SIMPLE_BYTES = 16  # a simple copy has a multiple of these, and so have its addresses
TENSOR_BYTES = 128  # shared memory that a copy by a tensor map reads or writes is so aligned
# Of dynamic shared memory: what other shared memory there is takes less.
_BASE_BYTES = 1024
_SAME_PLACE = ("memref.transpose", "memref.expand_shape", "memref.collapse_shape", "memref.cast")


def faults(module: ir.Module) -> list[str]:
  """Returns what is wrong with the copies of a kernel, a line each."""
  found = []
  for operation in gpu_lowered.of_kind(module, "simple"):
    shared, plain = gpu_lowered.pointers(operation)
    array = gpu_lowered.array_of(plain[0])
    found += _beyond_rows(array)
    for name, value in (("global", array), ("shared", gpu_lowered.array_of(shared[0]))):
      if alignment(value) % SIMPLE_BYTES:
        found.append(f"a copy at an address of {name} memory that is a multiple of "
                     f"{alignment(value)} bytes, not of {SIMPLE_BYTES}: {value.type}")
    kind = ir.MemRefType(array.type)
    if math.prod(kind.shape) * gpu_lowered.element_bytes(array) % SIMPLE_BYTES:
      found.append(f"a copy whose bytes are no multiple of {SIMPLE_BYTES}: {kind}")
  for operation in gpu_lowered.of_kind(module, "load", "store"):
    value = gpu_lowered.array_of(gpu_lowered.pointers(operation)[0][0])
    if alignment(value) % TENSOR_BYTES:
      found.append(f"a tile in shared memory at a multiple of {alignment(value)} bytes, not of "
                   f"{TENSOR_BYTES}: {value.type}")
  return found


def _beyond_rows(array: ir.Value) -> list[str]:
  """Returns how an array's views may reach beyond the rows of what they view."""
  found = []
  made = gpu_lowered.maker(array)
  while made is not None and made.name.startswith("memref."):
    source = made.operands[0]
    if made.name == "memref.subview":
      sizes = ir.MemRefType(source.type).shape
      extents = list(ir.DenseI64ArrayAttr(made.attributes["static_sizes"]))
      for size, extent, start in zip(sizes, extents, gpu_lowered.offsets(made)):
        if extent == DYNAMIC or size % extent:
          found.append(f"a copy of {extent} of a row of {size}: {source.type}")
        elif _divisor(start) % extent:
          found.append(f"a copy of {extent} from a multiple of {_divisor(start)} on: {source.type}")
    made = gpu_lowered.maker(source)
  return found


def alignment(array: ir.Value) -> int:
  """Returns a number that divides the address of an array."""
  made = gpu_lowered.maker(array)
  if made is None:
    return 1
  if made.name == "builtin.unrealized_conversion_cast":  # an argument of the kernel
    return _BASE_BYTES
  if made.name in _SAME_PLACE:
    return alignment(made.operands[0])
  if made.name == "memref.view":
    return math.gcd(_BASE_BYTES, gpu_lowered.divisor(made.operands[1]))
  if made.name not in ("memref.subview", "memref.reinterpret_cast"):
    return 1
  found, size = alignment(made.operands[0]), gpu_lowered.element_bytes(array)
  if made.name == "memref.reinterpret_cast":
    start, = gpu_lowered.offsets(made)
    if isinstance(start, int):
      return math.gcd(found, start * size)
    of = gpu_lowered.maker(start)  # where another view of the same memory begins
    return alignment(of.operands[0]) if of and of.name == "memref.extract_strided_metadata" else 1
  strides, _ = ir.MemRefType(made.operands[0].type).get_strides_and_offset()
  return math.gcd(found, *(_divisor(start) * stride * size
                           for start, stride in zip(gpu_lowered.offsets(made), strides)))


def _divisor(start: int | ir.Value) -> int:
  return start if isinstance(start, int) else gpu_lowered.divisor(start)
