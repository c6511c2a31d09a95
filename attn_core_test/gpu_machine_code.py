# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of GPU kernels that are compiled for a Hopper, without a GPU."""

import unittest
from typing import Any, Sequence

from absl.testing import parameterized

from attn_core.benchmark.static import gpu as static_gpu
from attn_core.benchmark.static.gpu import Kernel
from attn_core.kernels.gpu.split_kv import kernel as split_kv
from attn_core_test import gpu_cases, gpu_hazards

PROGRAMS_OF_A_PROCESS = 40
# The 65,536 registers of a multiprocessor, shared by the threads of what runs there at once.
FLASH_REGISTERS = 168  # one thread block of 384 threads; a multiple of 8
SPLIT_KV_REGISTERS = 128  # two thread blocks of 256 threads


def compile_programs(function: str, among: Sequence[str] | None) -> dict[str, list[Kernel | dict]]:
  """Compiles programs of a function of `gpu_cases`.

  Args:
    function: its name.
    among: names of programs to compile, unknown ones ignored; None: all.

  Returns:
    Kernels, or errors, by the name of their program.
  """
  found = {}
  names = [name for name in getattr(gpu_cases, function)() if among is None or name in among]
  for start in range(0, len(names), PROGRAMS_OF_A_PROCESS):
    part = names[start:start + PROGRAMS_OF_A_PROCESS]
    for kernel in static_gpu.measure(f"{gpu_cases.__name__}:{function}", part):
      program = kernel["program"] if isinstance(kernel, dict) else kernel.program
      found.setdefault(program, []).append(kernel)
  return found


@unittest.skipIf(static_gpu.missing(), f"nothing to compile with: {static_gpu.missing()}")
class CompileTestCase(parameterized.TestCase):
  """Compiles programs once for all tests of a class.

  A class names them in `programs`: function of `gpu_cases` -> names of its programs, None for all.
  """

  programs: dict[str, Sequence[str] | None] = {}
  kernels: dict[str, list[Kernel | dict]]  # by the name of their program

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.kernels = {}
    for function, among in cls.programs.items():
      cls.kernels.update(compile_programs(function, among))

  def check(self, kernel: Kernel | dict, registers: int | None = None,
            shared_memory: int | None = None) -> None:
    """Checks that a kernel compiled well and needs at most these resources; None: any.

    Without spills, its registers suffice; serialized products would wait for each other. Its code
    has no hazards; see gpu_hazards.
    """
    self.assertIsInstance(kernel, Kernel, kernel)
    self.assertEmpty(gpu_hazards.faults(kernel.code, kernel.registers, kernel.threads))
    self.assertEqual(kernel.spills, 0)
    self.assertFalse(kernel.serialized)
    if registers is not None:
      self.assertLessEqual(kernel.registers, registers)
    if shared_memory is not None:
      self.assertLessEqual(kernel.shared_memory, shared_memory)

  def kernel_named(self, program: str, part: str) -> Kernel:
    """Returns the kernel of a program whose name contains `part`, if all compiled well."""
    for kernel in self.kernels[program]:
      self.check(kernel)
    found, = (kernel for kernel in self.kernels[program] if part in kernel.name)
    return found

  def check_split_kv(self, program: str, part: str, params: Any) -> None:
    """Checks the two kernels of decoding: one attends to splits of the keys, one combines them.

    Args:
      program: their program.
      part: part of the name of the first kernel.
      params: its parameters.
    """
    kernel = self.kernel_named(program, part)
    self.check(kernel, SPLIT_KV_REGISTERS if split_kv.fits_twice(params) else None,
               split_kv.shared_memory(params))
    # Products are 16 long, and 64 keys or 64 values high.
    products = params.width // 16 + params.padded_value_width // 64 * (split_kv.BLOCK_KV // 16)
    self.assertNotEmpty(kernel.loops)
    self.assertEqual({loop["products"] for loop in kernel.loops}, {products})
