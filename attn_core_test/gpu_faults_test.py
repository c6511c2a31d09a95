# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels with one fault each, which gpu_faults must report; and that it sees every kernel."""

import pathlib
import re
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core_test import (gpu_cases, gpu_descriptors, gpu_faults, gpu_interpret, gpu_launch,
                            gpu_lowered, sampling)

KERNEL = """
module @kernel {{
  func.func @launch(%arg: !llvm.ptr) {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %grid = arith.constant {grid} : index
    %threads = arith.constant {threads} : index
    %size = arith.constant {memory} : i32
    %array = builtin.unrealized_conversion_cast %arg : !llvm.ptr to memref<2x{row}xf32>
    gpu.launch blocks(%bx, %by, %bz) in (%gx = %grid, %gy = {grid_y}, %gz = %c1)
        threads(%tx, %ty, %tz) in (%nx = %threads, %ny = %c1, %nz = %c1)
        dynamic_shared_memory_size %size {{
      %true = arith.constant true
      %block = gpu.block_id x
      %thread = gpu.thread_id x
      %minus = arith.constant -1 : i32
      %zero = arith.constant 0 : i32
      %two = arith.constant 2 : i32
      %seven = arith.constant 7 : i32
      %lanes = arith.constant 31 : i32
      %number = arith.index_cast %thread : index to i32
      %shifted = arith.shrui %number, %seven : i32
      %warpgroup = nvvm.shfl.sync idx %minus, %shifted, %zero, %lanes : i32 -> i32
      %copies = arith.cmpi eq, %warpgroup, %two : i32
      %place = arith.constant {place} : index
      %free = arith.constant 4096 : index
      %full = arith.constant 4104 : index
      %shared = gpu.dynamic_shared_memory : memref<?xi8, #gpu.address_space<workgroup>>
      %tile = memref.view %shared[%place][]
          : memref<?xi8, #gpu.address_space<workgroup>> to {tile}
      %view0 = memref.view %shared[%free][] : memref<?xi8, #gpu.address_space<workgroup>>
          to memref<1xi64, #gpu.address_space<workgroup>>
      %view1 = memref.view %shared[%full][] : memref<?xi8, #gpu.address_space<workgroup>>
          to memref<1xi64, #gpu.address_space<workgroup>>
      %from = builtin.unrealized_conversion_cast %tile : {tile} to !llvm.ptr<3>
      %freed = builtin.unrealized_conversion_cast %view0
          : memref<1xi64, #gpu.address_space<workgroup>> to !llvm.ptr<3>
      %filled = builtin.unrealized_conversion_cast %view1
          : memref<1xi64, #gpu.address_space<workgroup>> to !llvm.ptr<3>
      {body}
      gpu.terminator
    }}
    return
  }}
}}
"""
NUMBERS = {"grid": 4, "grid_y": "%c1", "threads": 384, "memory": 8192, "row": 256, "place": 1024,
           "tile": "memref<64xf32, #gpu.address_space<workgroup>>", "body": ""}


def assembly(text, constraints="", *operands):
  """Returns inline assembly with operands of (name, type)."""
  names = ", ".join(name for name, _ in operands)
  types = ", ".join(kind for _, kind in operands)
  return (f'llvm.inline_asm has_side_effects "{text}", "{constraints}" {names} '
          f": ({types}) -> !llvm.void")


SHARED, INT = "!llvm.ptr<3>", "i32"
LOAD = assembly("@$0 cp.async.bulk.tensor.1d.shared::cta.global [$1], [$2, {$4}], [$3];",
                "b,r,l,r", ("%true", "i1"), ("%from", SHARED), ("%arg", "!llvm.ptr"),
                ("%filled", SHARED))
FREE = assembly("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0], 1;", "r", ("%freed", SHARED))
WAIT_FREE = "nvvm.mbarrier.try_wait.parity %freed, %zero, %seven : !llvm.ptr<3>, i32, i32"
PRODUCT = assembly("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16")
COMMIT, WAIT = assembly("wgmma.commit_group.sync.aligned;"), assembly(
    "wgmma.wait_group.sync.aligned 0;")
WAIT_BUT_ONE = assembly("wgmma.wait_group.sync.aligned 1;")
BARRIER = "gpu.barrier"


def copy_of(extent, step):
  """Returns a copy of some numbers to a multiple of `step` in a row."""
  view = f"memref<1x{extent}xf32, strided<[{{row}}, 1], offset: ?>>"
  return f"""%step = arith.constant {step} : index
      %start = arith.muli %block, %step : index
      %part = memref.subview %array[1, %start] [1, {extent}] [1, 1]
          : memref<2x{{row}}xf32> to {view}
      %to = builtin.unrealized_conversion_cast %part : {view} to !llvm.ptr
      """ + assembly("@$0 cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;", "b,l,l,r",
                     ("%true", "i1"), ("%to", "!llvm.ptr"), ("%from", SHARED), ("%two", INT))


def branches(copying, computing):
  """Returns the third warpgroup's instructions and the others'."""
  return "\n".join(["scf.if %copies {", *copying, "} else {", *computing, "}"])


def loop(*lines):
  return "\n".join(["scf.for %n = %c0 to %block step %c1 {", *lines, "}"])


def registers(action, count):
  return assembly(f"setmaxnreg.{action}.sync.aligned.u32 {count};")


class SnippetTest(parameterized.TestCase):

  def check(self, *words, **numbers):
    numbers = {**NUMBERS, **numbers}
    numbers["body"] = numbers["body"].replace("{row}", str(numbers["row"]))
    found = gpu_faults.faults(gpu_lowered.parsed(KERNEL.format(**numbers)))
    self.assertLen(found, len(words), found)
    for text, part in zip(found, words):
      self.assertRegex(text, part)

  @parameterized.parameters(
      (64, 64, 256, 1024), (64, 64, 136, 1024, "64 of a row of 136"),
      (64, 32, 256, 1024, "64 from a multiple of 32"), (64, 64, 256, 1032, "shared.* 8 bytes"),
      (2, 2, 256, 1024, "global.* 8 bytes", "bytes are no multiple of 16"))
  def test_copies(self, extent, step, row, place, *words):
    self.check(*words, body=copy_of(extent, step), row=row, place=place)

  @parameterized.parameters((1024,), (1088, "tile.*multiple of 64 bytes"))
  def test_tiles(self, place, *words):
    self.check(*words, body=LOAD, place=place)

  @parameterized.parameters(
      (dict(grid=4),), (dict(grid_y="%grid"), "grid of"), (dict(threads=320), "320.*threads"),
      (dict(threads=1152), "1152.*threads"), (dict(memory=232449), "232449 bytes"))
  def test_launches(self, numbers, *words):
    self.check(*words, **numbers)

  @parameterized.parameters((8191,), (8192, "8192 bytes from each"))
  def test_bytes_of_a_barrier(self, count, *words):
    self.check(*words, body=f"%count = arith.constant {count} : i32\n" + assembly(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;", "r,r",
        ("%filled", SHARED), ("%count", INT)))

  @parameterized.parameters(1, 0, 16)
  def test_named_barriers(self, number):
    words = () if number == 1 else [f"barrier {number} of warpgroup {n}" for n in range(3)]
    self.check(*words, body=f"%id = arith.constant {number} : i32\n" + assembly(
        "bar.sync $0, 128;", "r", ("%id", INT)))

  def test_barriers_of_all(self):
    self.check(body=branches([BARRIER], [BARRIER]))
    self.check("not every warpgroup reaches", body=branches([BARRIER], [FREE]))

  @parameterized.parameters(
      ((("dec", 24), ("inc", 240)),), ((("dec", 40), ("inc", 232)),),
      ((("dec", 32), ("inc", 240)), "240, 240, 32"),
      ((("dec", 24), ("inc", 248)), "248, 248, 24"), ((("dec", 20), ("inc", 240)), "to 20"),
      ((("dec", 24), ("inc", 160)), "from 168 to 160", "from 168 to 160"),
      ((("inc", 24), ("inc", 240)), "168 to 24"))
  def test_registers(self, changes, *words):
    self.check(*words, body=branches(*([registers(*x)] for x in changes)))

  def test_memory_that_products_read(self):
    copying = [loop(WAIT_FREE, LOAD)]
    check = lambda computing, *words: self.check(*words, body=branches(copying, computing))
    frees, ends = ["0 frees", "1 frees"], ["0 ends", "1 ends"]
    check([loop(PRODUCT, COMMIT, WAIT, FREE)])
    check([loop(PRODUCT, COMMIT, FREE, WAIT)], *frees)
    check([loop(PRODUCT, COMMIT, FREE), WAIT], *frees)
    check([loop(FREE, PRODUCT, COMMIT), WAIT], *frees)
    check([loop(WAIT, FREE, PRODUCT, COMMIT), WAIT])
    check([loop(PRODUCT, COMMIT, WAIT_BUT_ONE, FREE), WAIT], *frees)
    check([loop(PRODUCT, WAIT, FREE)], "0 ends", "0 frees", "1 ends", "1 frees")
    check([loop(PRODUCT, COMMIT)], *ends)
    # The turn of another computing warpgroup may be passed on before.
    self.check(body=branches([LOAD], [loop(WAIT_FREE, PRODUCT, COMMIT, FREE, WAIT)]))


  def test_numbers_that_warps_exchange(self):
    meet = [FREE, WAIT_FREE]
    def check(computing, first, second, *words):
      self.check(*words, body="\n".join([
          "%first = arith.cmpi eq, %warpgroup, %zero : i32",
          "%value = arith.constant dense<0.0> : vector<2xf32>",
          *branches([], ["scf.if %first {", *first, "}", *computing[:1], "scf.if %first {} else {",
                         *second, "}", *computing[1:]]).split("\n")]))
    store = "vector.store %value, %tile[%c0] : {tile}, vector<2xf32>".format(**NUMBERS)
    check([loop(store, *meet)], [], [], "warpgroups exchange numbers at 1024 at once")
    check([], [store, *meet], [*meet, store])
    check([], [store, *meet], [store, *meet], "at once")
    check([], [store, FREE], [FREE, store], "at once")  # without waiting
    check([], [*meet, store], [*meet, *meet, store])
    check([], [store], [])


class DescriptorTest(parameterized.TestCase):

  @parameterized.parameters(
      ({},), (dict(swizzle=64), "as wide"), (dict(swizzle=48), "known", "as wide"),
      (dict(box=(1, 512, 64)), "256 elements"), (dict(box=(1, 0, 64)), "256 elements"),
      (dict(strides=(8192, 60, 1)), "16 bytes"), (dict(strides=(2**39, 64, 1)), "16 bytes"),
      (dict(strides=(8192, 64, 2)), "consecutive"), (dict(sizes=(2**31, 128, 64)), "32 bits"),
      (dict(sizes=(0, 128, 64)), "32 bits"),
      (dict(box=(1, 8, 4), swizzle=16), "a multiple of 16 bytes"),
      (dict(sizes=(2,) * 6, strides=(64,) * 5 + (1,)), "5 dimensions"))
  def test_rules(self, changes, *words):
    right = gpu_descriptors.Descriptor(2, (2, 128, 64), (8192, 64, 1), (1, 8, 64), 128)
    found = gpu_descriptors.faults(right._replace(**changes))
    self.assertLen(found, len(words), found)
    for text, part in zip(found, words):
      self.assertRegex(text, part)


def copied(row):
  """Returns a program of one kernel, which copies 64 numbers at a time to rows of two."""
  def body(_, outputs, memory):
    index = jax.lax.axis_index("block")
    plgpu.copy_smem_to_gmem(memory, outputs[0].at[index % 2, pl.ds(index // 2 * 64, 64)])
    plgpu.wait_smem_to_gmem(0)
  return lambda x: mosaic.call(
      body, (jax.core.ShapedArray((2, row), jnp.float32),), x, plgpu.SMEM((64,), jnp.float32),
      grid=2 * -(-row // 64), name="attn_core_copied")


class LoweredTest(parameterized.TestCase):

  def test_rows_of_a_kernel(self):
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    self.assertEqual(gpu_faults.check(copied(256), (shape,)), 1)
    with self.assertRaisesRegex(AssertionError, "attn_core_copied: a copy of 64 of a row of 136"):
      gpu_faults.check(copied(136), (shape,))

  def test_everything_is_seen(self):
    case = gpu_cases.INTERPRETED["full_odd_lengths"]
    module, = gpu_lowered.kernels(case.forward, (case.shapes,))
    for kind in (*gpu_lowered.KINDS, "encode"):
      self.assertNotEmpty(gpu_lowered.of_kind(module, kind), kind)
    launch = gpu_launch.launch_of(module)
    self.assertEqual((launch.block, launch.warpgroups, launch.registers), ((384, 1, 1), 3, 168))
    maps = gpu_descriptors.descriptors(module)
    self.assertLen(maps, 4)  # of keys, values, queries and the output
    self.assertEqual({(x.element_bytes, x.swizzle, x.box[-1]) for x in maps}, {(2, 128, 64)})

  def test_every_interpreted_program_is_checked(self):
    uses = {path.stem: len(re.findall(
        r"force_gpu_interpret_mode\(|gpu_interpret\.interpreted\(|import.* interpreted", text))
            for path in pathlib.Path(__file__).parent.glob("*.py")
            if "gpu_interpret" in (text := path.read_text(encoding="utf-8"))}
    del uses[pathlib.Path(__file__).stem]
    self.assertEqual({name: n for name, n in uses.items() if n},
                     # The second runs no kernel, the last one those that other tests check.
                     {"gpu_interpret": 1, "gpu_test": 1, "manual_axes_test": 1})

  @gpu_interpret.interprets
  def test_a_fault_fails_an_interpreted_program(self):
    with self.assertRaisesRegex(AssertionError, "64 of a row of 136"):
      gpu_interpret.interpret(copied(136), jnp.zeros(8))
    with self.assertRaisesRegex(AssertionError, "no GPU kernel"):
      gpu_interpret.interpret(jnp.sin, jnp.zeros(8))
    with mock.patch.object(gpu_faults, "faults", return_value=["broken"]):
      with self.assertRaisesRegex(AssertionError, "attn_core_copied: broken"):
        gpu_interpret.interpret(copied(192), jnp.zeros(8))


INTERPRETED = {f"{group}_{name}": (group, name) for group in ("INTERPRETED", "GRADIENTS", "BIASES")
               for name in getattr(gpu_cases, group)}


@unittest.skipIf(hasattr(plgpu, "force_gpu_interpret_mode"), "interpreted, and checked there")
class OlderJaxTest(parameterized.TestCase):
  """Checks what newer versions of jax interpret."""

  @parameterized.named_parameters((name, *INTERPRETED[name]) for name in sampling.names(
      INTERPRETED, ("INTERPRETED_causal_odd_length", "GRADIENTS_bias_and_sinks")))
  def test_interpreted_cases(self, group, name):
    case = getattr(gpu_cases, group)[name]
    residuals = case.residual_shapes
    def run(*arrays):
      return case.forward(arrays[0]), case.backward(*arrays)
    self.assertGreaterEqual(gpu_faults.check(run, (case.shapes, residuals, residuals)), 3)


if __name__ == "__main__":
  absltest.main()
