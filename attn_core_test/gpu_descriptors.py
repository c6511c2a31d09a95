# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules of cuTensorMapEncodeTiled for the tensor maps that GPU kernels copy by.

The encoder runs on the host before a launch, on a machine with a GPU: what it refuses there is an
error that neither lowering nor the compilers report.
"""

from typing import NamedTuple

from jax._src.lib.mlir import ir

from attn_core_test import gpu_lowered

SWIZZLES = (16, 32, 64, 128)  # bytes; 16: none


class Descriptor(NamedTuple):
  """A tensor map; dimensions from the slowest to the fastest."""

  element_bytes: int
  sizes: tuple[int, ...]
  strides: tuple[int, ...]  # in elements
  box: tuple[int, ...]  # elements that a copy has
  swizzle: int  # bytes


def descriptors(module: ir.Module) -> list[Descriptor]:
  """Returns the tensor maps that a kernel's host code encodes."""
  found = []
  for operation in gpu_lowered.of_kind(module, "encode"):
    _, base, _, rank, sizes, strides, swizzle, box = operation.operands
    arrays = (_stored(x, gpu_lowered.number(rank)) for x in (sizes, strides, box))
    width = gpu_lowered.element_bytes(gpu_lowered.array_of(base))
    found.append(Descriptor(width, *arrays, gpu_lowered.number(swizzle)))
  return found


def _stored(pointer: ir.Value, rank: int) -> tuple[int, ...]:
  """Returns the numbers that the host stores in an array."""
  made = gpu_lowered.maker(pointer)
  # jax before 0.12 stores them by pointers.
  array = pointer if made.name == "llvm.alloca" else gpu_lowered.array_of(pointer)
  found = {}
  for use in array.uses:
    operation = use.owner.operation
    if operation.name == "memref.store":
      found[gpu_lowered.number(operation.operands[2])] = operation.operands[0]
    elif operation.name == "llvm.store":
      found[0] = operation.operands[0]
    elif operation.name == "llvm.getelementptr":
      index, = ir.DenseI32ArrayAttr(operation.attributes["rawConstantIndices"])
      store, = operation.result.uses
      found[index] = store.owner.operation.operands[0]
  return tuple(gpu_lowered.number(found[index]) for index in range(rank))


def faults(descriptor: Descriptor) -> list[str]:
  """Returns the rules that a tensor map breaks."""
  size, sizes, strides, box, swizzle = descriptor
  inner = box[-1] * size if box else 0
  rules = {
      "between 1 and 5 dimensions": 1 <= len(sizes) <= 5,
      "coordinates in 32 bits, with a sign": all(0 < x < 2**31 for x in sizes),
      "strides that are multiples of 16 bytes, less than 2^40":
          all(x * size % 16 == 0 and 0 <= x * size < 2**40 for x in strides[:-1]),
      "consecutive elements in the last dimension": strides[-1:] == (1,),
      "between 1 and 256 elements of each dimension": all(1 <= x <= 256 for x in box),
      "a multiple of 16 bytes of the last dimension": inner % 16 == 0,
      "a known swizzle": swizzle in SWIZZLES,
      "a swizzle as wide as the copied part of a row": swizzle in (16, inner),
  }
  return [f"a tensor map without {rule}: {descriptor}" for rule, kept in rules.items() if not kept]
