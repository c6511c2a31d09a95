# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hazards in machine code for Hopper, found by data flow over the text that nvdisasm prints.

A product (HGMMA) goes on while its warpgroup executes what follows: until the warpgroup has waited
for it, no instruction may read or write the registers it adds to or reads. A warpgroup that changed
its number of registers (USETMAXREG) has no others. A copy to shared memory (UTMALDG) reads its
address and coordinates from registers that were set for it.
"""

import functools
import re
from typing import Callable, Collection, Iterator, NamedTuple

REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
PRODUCT = re.compile(r"[HQI]GMMA(?:\.SP)?\.64x(\d+)x\d+\.(F32|S32|F16)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb\d+, 0x([0-9a-f]+)")
LIMIT = re.compile(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)\S* .*0x([0-9a-f]+)")
OPERAND_REGISTERS = 4  # of the left operand of a product
COPY = re.compile(r"UTMALDG\.(\d)D\S* \[UR(\d+)\]")
_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([^;]+?)\s*;")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_OLDEST = 8  # groups of products; older ones are alike
# Registers of the operands outside brackets.
_WIDTHS = ((re.compile(r"(LD|ST)SM\.\S*\.M?T?88\.?4|\.128\b"), 4), (re.compile(r"\.64\b"), 2),
           (re.compile(r"(LD|ST)SM\.\S*\.M?T?88\.2|IMAD\.WIDE|CS2R(?!\.32)|^D[A-Z]"), 2))


class Instruction(NamedTuple):
  """One instruction, without its predicate."""

  text: str
  conditional: bool
  targets: tuple[int, ...]  # places of the labels that it names
  predicate: str = ""  # such as !UP0; empty: none


# (register, whether a running product adds to it, else reads it) -> the least number of groups that
# were completed since.
State = dict[tuple[int, bool], int]


def parse(code: str) -> list[Instruction]:
  """Reads the instructions of one kernel."""
  labels: dict[str, int] = {}
  found: list[tuple[str | None, str]] = []
  for line in code.splitlines():
    if label := _LABEL.match(line):
      labels[label.group(1)] = len(found)
    elif instruction := _INSTRUCTION.match(line):
      found.append(instruction.groups())
  return [Instruction(text, predicate not in (None, "PT", "UPT"),
                      tuple(labels[x] for x in _TARGET.findall(text)), predicate or "")
          for predicate, text in found]


def faults(code: str, registers: int, threads: int) -> list[str]:
  """Returns the hazards of a kernel, a line each.

  Args:
    code: of one kernel, as nvdisasm prints it.
    registers: of a thread at the start.
    threads: of a thread block.
  """
  instructions = parse(code)
  if not any(x.text.startswith("EXIT") for x in instructions):
    return ["no code that ends"]
  unknown = [f"a jump to any place: {x.text}" for x in instructions
             if x.text.startswith(("BRX", "JMX", "CALL", "RET"))]
  return unknown or [*touched(instructions), *limits(instructions, registers, threads),
                     *unset(instructions)]


def following(instructions: list[Instruction], place: int) -> Iterator[int]:
  """Yields the places that may be executed after one."""
  text, conditional, targets, _ = instructions[place]
  if text.startswith(("BRA", "JMP")):
    yield from targets
    conditional |= bool(re.match(r"\S+ !?U?P\d", text))
  if not text.startswith(("BRA", "JMP", "EXIT")) or conditional:
    if place + 1 < len(instructions):
      yield place + 1


def touched(instructions: list[Instruction]) -> list[str]:
  """Returns the instructions that touch registers of running products, and early ends."""
  before: list[State | None] = [None] * len(instructions)
  before[0] = {}
  waiting, found = [0], {}
  while waiting:
    place = waiting.pop()
    after, fault = _executed(instructions[place], before[place])
    if fault:
      found[place] = f"{fault}: {instructions[place].text}"
    for target in following(instructions, place):
      if (joined := _joined(before[target], after)) != before[target]:
        before[target] = joined
        waiting.append(target)
  return [found[place] for place in sorted(found)]


def _joined(one: State | None, other: State) -> State:
  if one is None:
    return other
  return {**one, **{x: min(n, one.get(x, n)) for x, n in other.items()}}


def _executed(instruction: Instruction, state: State) -> tuple[State, str]:
  """Returns (the state after an instruction, what is wrong with it)."""
  text = instruction.text
  if product := product_registers(text):
    sums, operand = product
    # Products in a row add to the same registers, and may read the same.
    both = {x for x, added in state if x in (operand if added else sums)}
    new = [(x, True) for x in sums] + [(x, False) for x in operand]
    state, fault = {**state, **dict.fromkeys(new, 0)}, _named(both)
    if re.search(r"\bgsb\d", text):
      state = {x: min(n + 1, _OLDEST) for x, n in state.items()}
    return state, fault
  if wait := WAIT.match(text):
    if not instruction.conditional:
      state = {x: n for x, n in state.items() if not n or n <= int(wait.group(1), 16)}
    return state, ""
  if text.startswith("EXIT"):
    return state, "an end while products run" if state else ""
  return state, _named(used_registers(text) & {x for x, _ in state}) if state else ""


def _named(registers: Collection[int]) -> str:
  return f"R{min(registers)} of a running product" if registers else ""


@functools.lru_cache(maxsize=4096)  # data flow reads an instruction often
def product_registers(text: str) -> tuple[frozenset[int], frozenset[int]] | None:
  """Returns registers that a product (adds to, reads on the left); None: no product."""
  kind = PRODUCT.match(text)
  if kind is None:
    return None
  columns, dtype = int(kind.group(1)), kind.group(2)
  operands = [REGISTER.match(x.strip()) for x in text.split(None, 1)[1].split(",")]
  count = columns // (4 if dtype == "F16" else 2)
  span = lambda found, size: frozenset(
      range(int(found.group(1)), int(found.group(1)) + size) if found else ())
  return span(operands[0], count), span(operands[1], OPERAND_REGISTERS)


@functools.lru_cache(maxsize=4096)
def used_registers(text: str) -> frozenset[int]:
  """Returns the registers that an instruction names, all of each operand."""
  if product := product_registers(text):
    return frozenset(product[0] | product[1])
  name, _, operands = text.partition(" ")
  wide = next((size for pattern, size in _WIDTHS if pattern.search(name)), 1)
  found = set()
  for position, operand in enumerate(operands.split(",")):
    for number, double in REGISTER.findall(operand):
      inside = "[" in operand
      size = 2 if double else 1 if inside or (
          name.startswith("IMAD.WIDE") and position in (1, 2)) else wide
      found.update(range(int(number), int(number) + size))
  return frozenset(found)


def limits(instructions: list[Instruction], registers: int, threads: int) -> list[str]:
  """Returns where code uses more registers than it has, or cannot get them."""
  changes = {place: LIMIT.match(x.text) for place, x in enumerate(instructions)}
  changes = {place: found for place, found in changes.items() if found}
  found = []
  for place, change in ((0, None), *changes.items()):
    limit = registers if change is None else int(change.group(2), 16)
    if change and (limit > registers) == (change.group(1) == "DEALLOC"):
      found.append(f"from {registers} registers: {instructions[place].text}")
    used = max((max(used_registers(instructions[x].text), default=0)
                for x in _reached(instructions, place, changes)), default=0)
    if used >= limit:
      found.append(f"R{used} with {limit} registers")
  if changes and registers != 65536 // threads // 8 * 8:
    found.append(f"{threads} threads that begin with {registers} registers")
  return found


def _reached(instructions: list[Instruction], start: int, ends: dict) -> set[int]:
  """Returns the places that are executed from one on, until another of `ends`."""
  seen, waiting = set(), [start]
  while waiting:
    place = waiting.pop()
    if place not in seen and (place == start or place not in ends):
      seen.add(place)
      waiting += following(instructions, place)
  return seen


def unset(instructions: list[Instruction]) -> list[str]:
  """Returns the copies to shared memory that read uniform registers that nothing set for them.

  Where a copy is predicated, so may be what sets its registers, by the same thread's election.
  CUDA's assembler 13.0 to 13.3 sets some only after the copy.
  """
  before: list[list[int]] = [[] for _ in instructions]
  for place in range(len(instructions)):
    for target in following(instructions, place):
      before[target].append(place)
  found = []
  for place, instruction in enumerate(instructions):
    if copy := COPY.match(instruction.text):
      first = int(copy.group(2))
      condition = _condition(instructions, before, place)
      # The address, a barrier, and the coordinates.
      for register in range(first, first + 2 + int(copy.group(1))):
        def sets(x: int, register: int = register) -> bool:
          return register in _uniform_set(instructions[x].text) and (
              not instructions[x].conditional
              or _condition(instructions, before, x) == condition)
        if None in _reaching(before, place, sets):
          found.append(f"UR{register} not set: {instruction.text}")
  return found


@functools.lru_cache(maxsize=4096)
def _uniform_set(text: str) -> range:
  """Returns the uniform registers that an instruction sets."""
  found = re.match(r"(\S+) UR(\d+)\b", text)
  if found is None:
    return range(0)
  name, first = found.group(1), int(found.group(2))
  wide = re.search(r"\.64|\.WIDE", name) is not None
  return range(first, first + (2 if wide else 1))


def _condition(instructions: list[Instruction], before: list[list[int]],
               place: int) -> tuple[bool, frozenset[int | None]]:
  """Returns (whether negated, places that set the predicate), of votes those of what they count."""
  predicate = instructions[place].predicate
  name = predicate.lstrip("!")
  found = _reaching(before, place, lambda x: name in _predicates_set(instructions[x].text))
  while name.startswith("U") and len(found) == 1:
    source, = found
    vote = None if source is None else re.match(r"VOTEU\.ANY \S+ (P\d)", instructions[source].text)
    if vote is None:
      break
    name = vote.group(1)
    found = _reaching(before, source, lambda x: name in _predicates_set(instructions[x].text))
  return predicate.startswith("!"), found


@functools.lru_cache(maxsize=4096)
def _predicates_set(text: str) -> tuple[str, ...]:
  """Returns the predicates that an instruction sets."""
  name, _, operands = text.partition(" ")
  if name.startswith(("BRA", "JMP", "EXIT")):
    return ()
  given = [x.strip() for x in operands.split(",")]
  # Sums set carries, after their first operand; votes and others read what follows the first.
  last = 3 if "IADD3" in name else 1 if name.startswith("VOTEU") else 2
  return tuple(x for x in given[:last] if re.fullmatch(r"U?P\d", x))


def _reaching(before: list[list[int]], place: int,
              sets: Callable[[int], bool]) -> frozenset[int | None]:
  """Returns the last places that set something before a place; None among them: none on a way."""
  seen: set[int] = set()
  found: set[int | None] = set()
  waiting: list[int] = [place]
  while waiting:
    here = waiting.pop()
    if here == 0:
      found.add(None)
    for earlier in before[here]:
      if sets(earlier):
        found.add(earlier)
      elif earlier not in seen:
        seen.add(earlier)
        waiting.append(earlier)
  return frozenset(found)
