# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for launches of GPU kernels and for what their warpgroups do, which only hardware checks.

Products (WGMMA) run while their warpgroup goes on, until it waits for them. Before that it may not
let the copying warpgroup overwrite their operands in shared memory. What each warpgroup executes is
followed along the branches that depend on its number; other branches may go either way.
"""

import re
from typing import NamedTuple

from jax._src.lib.mlir import ir

from attn_core.kernels.gpu import mosaic
from attn_core_test import gpu_lowered

WARPGROUP = 128  # threads
REGISTERS = 65536  # of a multiprocessor; a thread block that changes its number has all of them
LARGEST_COUNT = 2**20 - 1  # bytes that a barrier can wait for
NAMED_BARRIERS = 16


class Launch(NamedTuple):
  """Numbers that a kernel is launched with."""

  grid: tuple[int, ...]
  block: tuple[int, ...]  # threads
  shared_memory: int  # bytes
  body: ir.Operation

  @property
  def warpgroups(self) -> int:
    return self.block[0] // WARPGROUP

  @property
  def registers(self) -> int:
    """Registers that every thread begins with, if their number changes later."""
    return REGISTERS // self.block[0] // 8 * 8


class Event(NamedTuple):
  """An operation that a warpgroup executes, and whether products may be running then."""

  kind: str  # of gpu_lowered.kind_of
  operation: ir.Operation
  running: bool


# Of each product that may be running, how many groups were committed since.
State = frozenset[int]


def launch_of(module: ir.Module) -> Launch:
  """Returns how a kernel is launched."""
  launch, = (x for x in gpu_lowered.operations(module) if x.name == "gpu.launch")
  sizes = list(ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"]))
  numbers = [gpu_lowered.number(x) for x in list(launch.operands)[sizes[0]:]]
  memory = numbers[sum(sizes[1:10])] if sizes[10] else 0
  return Launch(tuple(numbers[:3]), tuple(numbers[3:6]), memory, launch)


def faults(module: ir.Module) -> list[str]:
  """Returns what is wrong with a kernel's launch and its warpgroups, a line each."""
  launch = launch_of(module)
  threads = launch.block[0]
  rules = {
      f"a grid of {launch.grid}, not along x alone":
          launch.grid[1:] == (1, 1) and 0 < launch.grid[0] < 2**31,
      f"{launch.block} threads, not warpgroups along x":
          launch.block[1:] == (1, 1) and threads % WARPGROUP == 0 and threads <= 1024,
      f"{launch.shared_memory} bytes of shared memory":
          launch.shared_memory <= mosaic.SHARED_MEMORY_BYTES}
  found = [text for text, kept in rules.items() if not kept]
  if found:
    return found
  for operation in gpu_lowered.of_kind(module, "expect"):
    count = gpu_lowered.number(operation.operands[1])
    if count is None or count * WARPGROUP > LARGEST_COUNT:
      found.append(f"a barrier that waits for {count} bytes from each of {WARPGROUP} threads")
  steps = _steps(launch.body.regions[0])
  events = [_Walk(launch, steps, index).events for index in range(launch.warpgroups)]
  return (found + _named(events) + _registers(launch, events) + _overwritten(events)
          + _exchanged(events))


def _named(events: list[list[Event]]) -> list[str]:
  """Returns faults of barriers of the hardware: those without a number are for all warpgroups."""
  found = []
  if len({len([x for x in own if x.kind == "whole"]) for own in events}) > 1:
    found.append("a barrier for all threads that not every warpgroup reaches")
  for index, own in enumerate(events):
    for event in own:
      if event.kind == "named" and event.operation.operands:
        number = gpu_lowered.number(event.operation.operands[0], index, len(events) * WARPGROUP)
        if number is None or not 0 < number < NAMED_BARRIERS:
          found.append(f"named barrier {number} of warpgroup {index}")
  return found


def _registers(launch: Launch, events: list[list[Event]]) -> list[str]:
  """Returns faults of the numbers of registers: an increase waits until enough are free."""
  found, ends = [], []
  for index, own in enumerate(events):
    now = launch.registers
    for event in own:
      if event.kind == "registers":
        less, count = changed_registers(event.operation)
        if count % 8 or not 24 <= count <= 256 or (count > now) == less:
          found.append(f"warpgroup {index} goes from {now} to {count} registers")
        now = count
    ends.append(now)
  if sum(ends) > launch.registers * len(ends):
    found.append(f"warpgroups of {ends} registers, which began with {launch.registers} each")
  return found


def changed_registers(operation: ir.Operation) -> tuple[bool, int]:
  """Returns (whether it is a decrease, the number of registers after it)."""
  action, count = re.findall(r"(dec|inc).* (\d+)", gpu_lowered.line_of(operation))[0]
  return action == "dec", int(count)


def _overwritten(events: list[list[Event]]) -> list[str]:
  """Returns where products may still read what a copying warpgroup is told to overwrite."""
  freed = set()  # barriers that warpgroups wait for which copy and compute no products
  for own in events:
    kinds = {x.kind for x in own}
    if "load" in kinds and "product" not in kinds:
      freed |= {barrier_of(x.operation) for x in own if x.kind == "phase"}
  found = []
  for index, own in enumerate(events):
    found += [f"warpgroup {index} frees shared memory while products may read it"
              for x in own if x.kind == "arrive" and x.running and barrier_of(x.operation) in freed]
    found += [f"warpgroup {index} ends while products run" for x in own
              if x.kind == "end" and x.running]
  return sorted(set(found))


def _exchanged(events: list[list[Event]]) -> list[str]:
  """Returns where warps of several warpgroups may exchange numbers in the same place at once.

  They do not if the warpgroups take turns: each meets the others at a barrier, at which it arrives
  and for which it waits, another number of times before.
  """
  of = lambda own, kind: {barrier_of(x.operation) for x in own if x.kind == kind}
  places: dict[int | None, dict[int, set[int]]] = {}
  exchanging = [own for own in events if any(x.kind == "exchange" for x in own)]
  meetings = set.intersection(*(of(own, "arrive") & of(own, "phase") for own in exchanging), *(
      [set()] if not exchanging else []))
  for index, own in enumerate(exchanging):
    met = 0
    for event in own:
      if event.kind == "arrive":
        met += barrier_of(event.operation) in meetings
      if event.kind == "exchange":
        made = gpu_lowered.maker(event.operation.operands[1])
        assert made is not None
        places.setdefault(gpu_lowered.number(made.operands[1]), {}).setdefault(
            index, set()).add(met)
  return [f"warps of several warpgroups exchange numbers at {place} at once"
          for place, turns in places.items()
          if sum(map(len, turns.values())) > len(set.union(*turns.values()))]


def barrier_of(operation: ir.Operation) -> int | None:
  """Returns the place in shared memory of the barriers that an operation is about one of."""
  array = gpu_lowered.array_of(gpu_lowered.pointers(operation)[0][0])
  made = gpu_lowered.maker(array)
  if made is None or made.name != "memref.view":
    raise ValueError(f"a barrier that is no view: {array}")
  return gpu_lowered.number(made.operands[1])


class _Step(NamedTuple):
  """An operation of KINDS, or a loop or branch with such operations inside."""

  kind: str
  operation: ir.Operation
  inside: tuple[tuple["_Step", ...], ...] = ()  # by region


def _steps(region: ir.Region) -> tuple[_Step, ...]:
  found = []
  for view in (view for block in region for view in block):
    operation = view.operation
    if operation.name.startswith("scf.") and len(operation.regions):
      inside = tuple(map(_steps, operation.regions))
      if any(inside):
        found.append(_Step(operation.name, operation, inside))
    elif (kind := gpu_lowered.kind_of(operation)) is not None:
      found.append(_Step(kind, operation))
  return tuple(found)


class _Walk:
  """Lists what one warpgroup executes, in order; loops are gone through several times."""

  def __init__(self, launch: Launch, steps: tuple[_Step, ...], warpgroup: int):
    self._threads, self._warpgroup = launch.block[0], warpgroup
    self.events: list[Event] = []
    running = self._all(steps, frozenset())
    self.events.append(Event("end", launch.body, bool(running)))

  def _all(self, steps: tuple[_Step, ...], state: State) -> State:
    for step in steps:
      state = self._one(step, state)
    return state

  def _one(self, step: _Step, state: State) -> State:
    if step.kind in ("scf.for", "scf.while"):
      return self._loop(step, state)
    if step.inside:
      return frozenset().union(*(self._all(steps, state) for steps in self._taken(step)))
    self.events.append(Event(step.kind, step.operation, bool(state)))
    if step.kind == "product":
      return state | {0}
    if step.kind == "commit":
      return frozenset(min(x + 1, NAMED_BARRIERS) for x in state)
    if step.kind == "wait":
      pending = _pending(step.operation)
      return frozenset(x for x in state if x == 0 or x <= pending)
    return state

  def _loop(self, step: _Step, state: State) -> State:
    ends = state if step.kind == "scf.for" else frozenset()  # without a round
    seen = None
    while state != seen:
      seen = state
      for index, steps in enumerate(step.inside):
        state = self._all(steps, state)
        if step.kind == "scf.while" and index == 0:
          ends |= state
      if step.kind == "scf.for":
        ends |= state
      state |= seen
    return ends

  def _taken(self, step: _Step) -> list[tuple[_Step, ...]]:
    """Returns the branches that may be executed."""
    value = gpu_lowered.number(step.operation.operands[0], self._warpgroup, self._threads)
    if value is None:
      return list(step.inside)
    if step.kind == "scf.if":
      return [step.inside[0 if value else 1]]
    cases = list(ir.DenseI64ArrayAttr(step.operation.attributes["cases"]))
    return [step.inside[1 + cases.index(value) if value in cases else 0]]


def _pending(operation: ir.Operation) -> int:
  """Returns the number of groups of products that may still run after a wait."""
  return int(re.findall(r"wait\D* (\d+)", gpu_lowered.line_of(operation))[0])
