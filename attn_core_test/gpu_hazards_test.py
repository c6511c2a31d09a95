# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small programs in machine code with one hazard each, which gpu_hazards must report."""

from absl.testing import absltest
from absl.testing import parameterized

from attn_core_test import gpu_hazards

# A loop that adds products of registers R4 to R7 to R24 to R55.
LOOP = (
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], RZ, !UPT",
    "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR28].tnspB, R24, gsb0",
    "IMAD.WIDE.U32 R2, R60, 0x2, R62",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "FADD R24, R24, R55",
    "@P0 BRA `(.L_x_1)")
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], R24, gsb0"


def text_of(*lines):
  """Returns instructions as nvdisasm prints them; lines that end in a colon are labels."""
  return "\n".join(line if line.endswith(":") else f"        /*{16 * n:04x}*/  {line} ;"
                   for n, line in enumerate(lines)) + "\n"


def loop_with(place, *changed):
  """Returns LOOP in a kernel, with other lines in one place."""
  return text_of(".L_x_1:", *LOOP[:place], *changed, *LOOP[place + 1:], "EXIT")


class HazardsTestCase(parameterized.TestCase):

  def check(self, code, *words, registers=168, threads=384):
    found = gpu_hazards.faults(code, registers, threads)
    self.assertLen(found, len(words), found)
    for text, part in zip(found, words):
      self.assertRegex(text, part)


class TouchedTest(HazardsTestCase):

  def test_nothing_touched(self):
    self.check(loop_with(0, LOOP[0]))
    # Two groups: the older one has ended.
    self.check(text_of(PRODUCT, "HGMMA.64x8x16.F32.BF16 R56, gdesc[UR4], RZ, !UPT, gsb0",
                       "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R0, R24",
                       "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R0, R56", "EXIT"))

  @parameterized.parameters(
      ("FADD R0, R24, R1", "R24"), ("FADD R55, R0, R1", "R55"), ("MOV R7, RZ", "R7"),
      ("LDS.128 R20, [R0]", ""), ("LDS.128 R21, [R0]", "R24"), ("STS.64 [R0+0x8], R22", ""),
      ("STS.64 [R0+0x8], R23", "R24"), ("LDG.E.128 R8, desc[UR4][R2.64]", ""),
      ("LDG.E R8, desc[UR4][R54.64]", "R54"), ("CS2R R54, SRZ", "R54"), ("LDS.64 R8, [R3]", ""),
      ("IMAD.WIDE.U32 R2, R23, 0x2, R62", ""), ("IMAD.WIDE.U32 R2, R60, 0x2, R23", "R24"),
      ("STSM.16.M88.4 [R0], R21", "R24"), ("LDSM.16.M88.2 R22, [R0]", ""),
      ("HGMMA.64x8x16.F32.BF16 R56, R52, gdesc[UR28], RZ, !UPT, gsb0", "R52"),
      ("HGMMA.64x8x16.F32.BF16 R56, R4, gdesc[UR28], RZ, !UPT, gsb0", ""),
      ("HGMMA.64x8x16.F32.BF16 R4, gdesc[UR28], RZ, !UPT, gsb0", "R4"))
  def test_registers_of_a_running_product(self, instruction, words):
    self.check(loop_with(2, instruction), *([f"{words} .*{instruction[:5]}"] if words else []))

  @parameterized.parameters("NOP", "@P1 WARPGROUP.DEPBAR.LE gsb0, 0x0",
                            "WARPGROUP.DEPBAR.LE gsb0, 0x1")
  def test_without_a_wait(self, instruction):
    self.check(loop_with(3, instruction), "R24.*FADD", "end while.*EXIT")

  def test_a_wait_for_what_is_in_no_group(self):
    self.check(loop_with(1, LOOP[1].removesuffix(", gsb0")), "R24.*FADD", "end while.*EXIT")

  def test_a_product_of_the_round_before(self):
    late = (*LOOP[:2], LOOP[3], PRODUCT, LOOP[5])
    self.check(text_of(".L_x_1:", "FADD R9, R30, R9", *late, LOOP[3], "EXIT"), "R30.*FADD")
    self.check(text_of("FADD R9, R30, R9", ".L_x_1:", *late, LOOP[3], "EXIT"))

  def test_an_operand_that_is_written(self):
    self.check(loop_with(2, "F2FP.BF16.F32.PACK_AB R5, R0, R1"), "R5")

  def test_code_that_cannot_be_followed(self):
    self.check(text_of("BRX R4 -0x10", "EXIT"), "jump")
    self.check("", "no code")


class LimitsTest(HazardsTestCase):

  def check_parts(self, copying, computing, *words, registers=168, threads=384):
    self.check(text_of("MOV R167, RZ", "@P0 BRA `(.L_x_2)", *copying, "EXIT", ".L_x_2:",
                       *computing, "EXIT"), *words, registers=registers, threads=threads)

  def test_registers_of_a_warpgroup(self):
    less = "USETMAXREG.DEALLOC.CTAPOOL 0x18", "MOV R23, RZ"
    more = "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", "MOV R239, R23"
    self.check_parts(less, more)
    self.check_parts((*less, "MOV R24, RZ"), more, "R24 with 24")
    self.check_parts((*less, "LDS.64 R23, [R0]"), more, "R24 with 24")
    self.check_parts(less, (*more, "MOV R0, R240"), "R240 with 240")
    self.check_parts(less, more[1:], "R239 with 168")
    self.check_parts(less, ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0",), "from 168 registers")
    self.check_parts(("USETMAXREG.DEALLOC.CTAPOOL 0xb0",), more, "from 168 registers")
    self.check_parts(less, more, "384 threads that begin with 176", registers=176)
    self.check_parts(less, more, "256 threads that begin with 168", threads=256)


class UnsetTest(HazardsTestCase):
  # Two warps, each of which elects a thread, which copies a block of two dimensions.
  ELECT = "ELECT P1, URZ, PT", "VOTEU.ANY UP1, P1"
  OTHERS = "ELECT P0, URZ, PT", "VOTEU.ANY UP0, P0"
  SET = tuple(f"@UP1 UMOV UR{n}, URZ" for n in range(8, 12))
  COPY = "@UP1 UTMALDG.2D [UR8], [UR24]"

  def test_registers_of_a_copy(self):
    self.check(text_of(*self.ELECT, *self.SET, self.COPY, "EXIT"))
    self.check(text_of(*self.ELECT, "ULDC.64 UR8, c[0x0][0x210]", "UIMAD.WIDE UR10, UR4, UR5, URZ",
                       self.COPY, "EXIT"))
    # One vote more on the same election.
    self.check(text_of(*self.ELECT, *self.SET, "VOTEU.ANY UP2, P1", "@UP2" + self.COPY[4:], "EXIT"))
    self.check(text_of(*self.ELECT, *self.SET[:3], self.COPY, self.SET[3], "EXIT"), "UR11 not set")

  def test_registers_set_on_every_way(self):
    loop = ".L_x_1:", self.COPY, self.SET[3], "@P2 BRA `(.L_x_1)", "EXIT"
    self.check(text_of(*self.ELECT, *self.SET, *loop))
    self.check(text_of(*self.ELECT, *self.SET[:3], *loop), "UR11 not set")
    self.check(text_of(*self.ELECT, *self.SET[:3], "@P3 BRA `(.L_x_1)", self.SET[3], *loop),
               "UR11 not set")

  def test_registers_set_by_others(self):
    other = self.SET[3].replace("UP1", "UP0")
    self.check(text_of(*self.OTHERS, other, *self.ELECT, *self.SET[:3], self.COPY, "EXIT"),
               "UR11 not set")
    self.check(text_of(*self.OTHERS, *self.ELECT, *self.SET, other, self.COPY, "EXIT"))


if __name__ == "__main__":
  absltest.main()
