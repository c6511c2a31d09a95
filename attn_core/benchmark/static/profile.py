# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts cycles of TPU kernels without a TPU: libtpu compiles them and profiles its final schedule.

The profiler executes the schedule with a model of the latencies of transfers; it is deterministic.
It underestimates transfers, so the time of a program is taken to be at least that of moving its
arguments and results. It does not model transfers between chips.
"""

from collections.abc import Callable, Iterator
import concurrent.futures
import glob
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from attn_core.benchmark import cases
from attn_core.benchmark.static import (
    tpu_decode_programs, tpu_pages_programs, tpu_programs, tpu_whole_programs)
from attn_core.benchmark.cases import Case
from attn_core.benchmark.static.tpu_programs import Contender, Program
from attn_core.plan.peaks import DEVICES, Device

CONTENDERS: dict[str, Contender] = {
    **tpu_programs.CONTENDERS, **tpu_whole_programs.CONTENDERS, **tpu_decode_programs.CONTENDERS,
    **tpu_pages_programs.CONTENDERS}
TIMEOUT = 600.0  # seconds per compilation and profile


class Chip(NamedTuple):
  """Properties of one kind of JAX device."""

  topology: str
  peak: Device
  flops_per_cycle: int  # of the matrix units; with the peak it gives the clock
  cores: int = 1  # that share the heads


CHIPS = {
    "v5e": Chip("v5e:2x2", DEVICES["v5e"], 2**17),
    "v5p": Chip("v5p:2x2x1", DEVICES["v5p"], 2**18, 2),
    "v6e": Chip("v6e:2x2", DEVICES["v6e"], 2**19),
    "tpu7x": Chip("tpu7x:2x2x1", DEVICES["tpu7x"], 2**19),
}

# Slots of a bundle of instructions: libtpu's name -> ours.
SLOTS = {"MXU": "matrix", "MATMUL": "matrix", "VALU": "vector", "EUP": "transcendental",
         "XLU": "lanes", "VLOAD": "loads", "VSTORE": "stores"}
SPILLS = {"VLOAD:FILL": "spill_loads", "VSTORE:SPILL": "spill_stores"}

# Lets libtpu run without a metadata server, without logs, and in several processes at a time.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost", "TPU_STDERR_LOG_LEVEL": "3", "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def missing() -> str | None:
  """Returns the reason why kernels cannot be compiled on this machine; None if they can."""
  if importlib.util.find_spec("libtpu"):
    return None
  return "libtpu is not installed: pip install 'attn_core[tpu]'"


OLD_TOPOLOGIES = {"v4": "v4:2x2x1"}  # of chips to compile for, but not to measure


def devices(chip: str) -> list:
  """Returns devices of libtpu to compile for, none of which is attached."""
  os.environ.update(QUIET)
  name = OLD_TOPOLOGIES.get(chip) or CHIPS[chip].topology
  return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


class Static(NamedTuple):
  """Measurements of one program."""

  program: Program
  cycles: int  # of its kernels
  other_cycles: int  # of XLA's operations: transpositions, sums
  vmem_bytes: int  # of the largest kernel
  bundles: int  # bundles of instructions of the hot loops
  spills: int  # vector loads and stores of the hot loops, for lack of registers
  slots: dict[str, float]  # used share of each kind of slot in the hot loops
  floor_seconds: float  # time of reading the arguments and writing the results
  flops: int

  @property
  def whole_cycles(self) -> int:
    """Cycles of the whole program."""
    return self.cycles + self.other_cycles

  @property
  def seconds(self) -> float:
    chip = CHIPS[self.program.chip]
    return max(self.cycles * chip.flops_per_cycle / chip.peak.flops, self.floor_seconds)

  @property
  def peak_share(self) -> float:
    return self.flops / self.seconds / CHIPS[self.program.chip].peak.flops


class Failure(NamedTuple):
  """A program that was not measured, and the reason."""

  program: Program
  reason: str


Result = Static | Failure


def measure(programs: list[Program], workers: int | None = None,
            advance: Callable[[Result], object] = lambda result: None) -> list[Result]:
  """Compiles and profiles each program in a separate process, since libtpu aborts on some.

  Args:
    programs: the programs to compile.
    workers: number of processes at a time; None: one per core.
    advance: called with every result as soon as it is known.

  Returns:
    The results, in the order of the programs.
  """
  def one(program: Program) -> Result:
    result = _measure(program)
    advance(result)
    return result
  with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool:
    return list(pool.map(one, programs))


def _measure(program: Program) -> Result:
  with tempfile.TemporaryDirectory(prefix="attn_core_static_") as folder:
    (pathlib.Path(folder) / "profile").mkdir()
    flags = (
        f"--xla_jf_dump_to={folder}/llo", "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo-static-per-bundle-utilization",
        f"--xla_jf_dump_static_llo_profile_to={folder}/profile",
        "--xla_tpu_check_llo_types=false")  # the check fails on profiled programs
    try:
      done = subprocess.run(
          [sys.executable, "-m", __spec__.name, folder, json.dumps(program)],
          # Programs from the compilation cache are not profiled.
          env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false",
               "LIBTPU_INIT_ARGS": " ".join(flags)},
          capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
      return Failure(program, f"not compiled in {TIMEOUT:.0f} s")
    answer = pathlib.Path(folder) / "answer.json"
    if not answer.exists():
      lines = [line for line in done.stderr.splitlines() if re.match(r"\w+(\.\w+)*: |F\d{4}", line)]
      return Failure(program, lines[-1][:300] if lines else f"exit status {done.returncode}")
    return _read(program, pathlib.Path(folder), json.loads(answer.read_text()))


# --- Runs in the process of one program. ---------------------------------------------------------


def compile_one(folder: str, text: str) -> None:
  """Compiles a program given as JSON; writes the properties of the compiled program to a file."""
  contender, fields, backward, chip, (block_q, block_kv, last), *rest = json.loads(text)
  fields = [tuple(x) if isinstance(x, list) else x for x in fields]
  device = devices(chip)[0]
  sharding = jax.sharding.SingleDeviceSharding(device)
  kind = jax.sharding.AbstractDevice(device.device_kind, device.num_cores, "tpu")
  program = Program(contender, Case(*fields), backward, chip, (block_q, block_kv, last), *rest)
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
  with (jax.sharding.use_abstract_mesh(mesh),
        tpu_programs.built(program, CONTENDERS[contender]) as (function, arguments)):
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    function = function if hasattr(function, "trace") else jax.jit(function)
    lowered = function.trace(*arguments).lower(lowering_platforms=("tpu",))
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  answer = {"kernels": kernel_memory(compiled.as_text()),
            "bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes}
  (pathlib.Path(folder) / "answer.json").write_text(json.dumps(answer))
  os._exit(0)  # without the slow shutdown of libtpu


def kernel_memory(text: str) -> dict[str, int]:
  """Returns {Pallas kernel: bytes of vector memory} of a compiled program."""
  found: dict[str, int] = {}
  for line in text.splitlines():
    if 'custom_call_target="tpu_custom_call"' in line:
      used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
      sizes = re.findall(r'"memory_space":"1".*?"size":"(\d+)"', used[1]) if used else ()
      name = re.search(r"%([\w.\-]+) = ", line)
      assert name is not None  # a call has a result
      found[name[1]] = sum(map(int, sizes))
  return found


# --- Reads the files that libtpu wrote. ----------------------------------------------------------


class Estimate(NamedTuple):
  """The profile of one operation, and of those that are equal to it."""

  cycles: int  # of one of them
  copies: int  # how many of them the program has


_NONE = Estimate(0, 0)


def estimates(text: str) -> Iterator[tuple[str, Estimate]]:
  """Yields (name of an operation, its estimate) of a profile.

  Operations with the same code are profiled once, under the name of one of them.
  """
  for operation in text.split("hlo_op_estimate")[1:]:
    name = re.search(r'hlo_op_name: "(.*?)"', operation)
    cycles = re.search(r"estimated_cycles: (-?\d+)", operation)
    copies = re.search(r"num_equivalent_hlos: (\d+)", operation)
    if name and cycles:
      yield name[1], Estimate(int(cycles[1]), int(copies[1]) if copies else 1)


def _read(program: Program, folder: pathlib.Path, answer: dict[str, Any]) -> Result:
  found = dict(itertools.chain.from_iterable(
      estimates(path.read_text()) for path in (folder / "profile").glob("*.textproto")))
  kernels = {name: found[name] for name in answer["kernels"] if found.get(name, _NONE).cycles > 0}
  if not kernels or sum(x.copies for x in kernels.values()) < len(answer["kernels"]):
    missing = [name for name in answer["kernels"] if name not in kernels]
    return Failure(program, f"libtpu did not profile {missing or 'any kernel'}")
  total = lambda estimates: sum(x.cycles * x.copies for x in estimates)
  inside, others = total(kernels.values()), total(found.values()) - total(kernels.values())
  bundles, spills = 0, 0
  used: dict[str, int] = {}
  capacity: dict[str, int] = {}
  for name in answer["kernels"]:
    loop = _hot_loop(folder / "llo", name)
    bundles, spills = bundles + loop.bundles, spills + loop.spills
    for slot, count in loop.used.items():
      used[slot] = used.get(slot, 0) + count
      capacity[slot] = capacity.get(slot, 0) + loop.bundles * loop.capacity[slot]
  chip = CHIPS[program.chip]
  flops = cases.flops(program.case, False)
  flops = cases.flops(program.case, True) - flops if program.backward else flops
  return Static(program, inside, others, max(answer["kernels"].values()),
                bundles, spills, {slot: used[slot] / max(capacity[slot], 1) for slot in used},
                answer["bytes"] / chip.peak.memory_bytes, flops)


class _Loop(NamedTuple):
  """The innermost loop with most of a kernel's matrix work, or the whole kernel."""

  bundles: int
  spills: int
  used: dict[str, int]
  capacity: dict[str, int]  # of one bundle


def _hot_loop(folder: pathlib.Path, kernel: str) -> _Loop:
  marks = _bundles(_dump(folder, kernel, "final_bundles"))
  header, sizes, rows = _utilization(
      _dump(folder, kernel, "final_hlo-static-per-bundle-utilization"))
  if len(rows) != len(marks):
    marks = [(0, False)] * len(rows)
  total = lambda names, first, end: {
      slot: sum(row[i] for row in rows[first:end] for i, name in enumerate(header)
                if names.get(name) == slot) for slot in set(names.values())}
  loops = list(_innermost(marks)) or [(0, len(rows))]
  first, end = max(loops, key=lambda loop: (total(SLOTS, *loop)["matrix"], loop[1] - loop[0]))
  capacity = {SLOTS[name]: size for name, size in zip(header, sizes) if name in SLOTS}
  used = {slot: count for slot, count in total(SLOTS, first, end).items() if slot in capacity}
  return _Loop(end - first, sum(total(SPILLS, first, end).values()), used, capacity)


def _dump(folder: pathlib.Path, kernel: str, label: str) -> list[str]:
  paths = [path for path in glob.glob(f"{glob.escape(str(folder))}/*-{label}.txt")
           if re.search(rf"-{re.escape(kernel)}-\d+-{label}\.txt$", path)]
  return pathlib.Path(max(paths)).read_text().splitlines() if paths else []


def _bundles(lines: list[str]) -> list[tuple[int, bool]]:
  """Returns (depth in nested loops, whether a loop begins) of every bundle."""
  found: list[tuple[int, bool]] = []
  for line in lines:
    match = re.match(r"\s*(?:0x)?[0-9a-f]+\s+([A-Z]{2})?\s*:\s*(>*)\s*\{(\})?", line)
    if match:
      empty = match[3] and found  # empty bundles are printed without their depth
      found.append((found[-1][0] if empty else len(match[2]), match[1] in ("LH", "LB")))
  return found


def _utilization(lines: list[str]) -> tuple[list[str], list[int], list[list[int]]]:
  """Returns (names of slots, number of slots of a bundle, used slots of every bundle)."""
  if not lines:
    return [], [], []
  numbers = lambda line: [int(word) for word in line.split()]
  return ([name.strip() for name in lines[1].split(",")], numbers(lines[2]),
          [numbers(line) for line in lines[4:] if line.strip()])


def _innermost(marks: list[tuple[int, bool]]) -> Iterator[tuple[int, int]]:
  """Yields (first, end) of every loop without inner loops.

  A bundle shows the depth of its first instruction, which may have been moved in from outside: up
  to three such bundles do not end a loop.
  """
  first = None
  for i, (depth, begins) in enumerate([*marks, (0, False)]):
    if first is not None:
      inside = marks[first][0]
      ends = depth < inside and all(d < inside for d, _ in marks[i:i + 4])
      if ends or begins:
        if ends or depth <= inside:
          yield first, i
        first = None
    if begins and depth:
      first = i


if __name__ == "__main__":
  compile_one(*sys.argv[1:])
