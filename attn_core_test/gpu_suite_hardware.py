# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The first part of gpu_suite: what only a Hopper shows of our kernels, most suspect first.

Interpret mode and the compiler do not show how copies and barriers behave: what one thread block
overwrites of another's results, launches that hang, memory that no kernel wrote.
"""

import functools
import time
from typing import Any, Callable, Iterable, NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, PagedOptions, PagesV1, PagesV2, masks,
                       ragged_page_attention_v2)
from attn_core.caches import pages
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.split_kv import decode as gpu_decode
from attn_core.kernels.xla import decode as xla_decode, flash as xla_flash
from attn_core_test import gpu_cases, paged_cases
from attn_core_test.device_suite_parts import Found, Settings, host
from attn_core_test.gpu_cases import Case

# By platform: of approximate instructions on a GPU; a number of another row is off by more.
LSE_TOLERANCE = {"gpu": 1e-4, "cpu": 1e-3}
LENGTHS = (1, 64, 200, 1000, 2047)
WIDTHS = (64, 128, 256)
POISONED_BYTES = 200 * 1024  # of shared memory, of the 227 KiB that a thread block can have
_ROW = 1024  # numbers written at a time

SPLIT = BlockSizes(block_kv=128)
_LENGTHS = masks.lengths(None, np.array([513, 0, 65], np.int32))
DECODED = {
    "lengths": Case(_LENGTHS, B=3, T=1, S=520, H=8, K=2, D=128, blocks=SPLIT),
    "widths_96_80": Case(_LENGTHS, B=3, T=2, S=520, H=4, K=4, D=96, E=80, blocks=SPLIT),
    "int8": Case(_LENGTHS, B=3, T=1, S=520, H=8, K=2, D=64, stored="int8", blocks=SPLIT)}
# Slots that may not be read hold NaN.
PAGED = {
    f"page_{page}": paged_cases.Case((70, 0, 130, 9), (1, 0, 5, 2), H=4, K=2, page=page, D=64,
                                     dtype="bfloat16")
    for page in (32, 64)}


class Check(NamedTuple):
  """One check."""

  name: str
  run: Callable[[], str]  # returns "right", a measurement, or what is wrong


def hardware(settings: Settings) -> Found:
  """Compares the kernels for Hopper with the oracle where a GPU may differ from a simulation.

  On other platforms it checks itself, with the kernels in plain XLA.
  """
  end = time.monotonic() + settings.seconds
  results = []
  for check in checks(settings.tiny):
    verdict = "no time left"
    if time.monotonic() < end:
      print(check.name, flush=True)  # the last line names the check that hangs, if one does
      try:
        verdict = check.run()
      except Exception as error:  # an error in one check must not stop the others
        verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    results.append({"check": check.name, "verdict": verdict})
  others = [r for r in results if r["verdict"] != "right"]
  wrong = [r for r in others if not r["verdict"].startswith("measured")]
  lines = [f"{len(results)} checks, {len(wrong)} not right."]
  lines += [f"* {r['check']}: {r['verdict']}" for r in others]
  return Found(not wrong, lines, {"results": results})


def checks(tiny: bool) -> Iterable[Check]:
  """Yields all checks, the most important first, since time may run out."""
  runs = 2 if tiny else 100
  for tokens in LENGTHS[1:2] if tiny else LENGTHS:
    for mask in (masks.causal(),) if tiny else (masks.full(), masks.causal()):
      case = Case(mask, B=2, T=tokens, H=2 if tiny else 8, D=64 if tiny else 128)
      yield Check(f"forward T={tokens} {type(mask).__name__}",
                  functools.partial(_forward, case, runs))
  forwards, gradients, biases = gpu_cases.INTERPRETED, gpu_cases.GRADIENTS, gpu_cases.BIASES
  if tiny:
    forwards, gradients, biases = {}, {"causal_odd_length": Case(T=20, H=2, K=1)}, {}
  for name, case in forwards.items():
    yield Check(f"forward {name}", functools.partial(_forward, case, 2))
  for name, case in {**gradients, **biases}.items():
    wrt = ("bias",) if name in biases else case.wrt
    yield Check(f"backward {name}", functools.partial(_backward, case, wrt))
  for width in WIDTHS[:1] if tiny else WIDTHS:
    yield Check(f"launches D={width}", functools.partial(_launches, width, tiny))
  for name, case in list(DECODED.items())[:1 if tiny else None]:
    yield Check(f"decode {name}", functools.partial(_decoded, case, 2 if tiny else 20))
  for name, requests in list(PAGED.items())[:1 if tiny else None]:
    yield Check(f"pages {name}", functools.partial(_paged, requests, 2 if tiny else 20))
  yield Check("times causal 2k", functools.partial(_times, tiny))


def _on_gpu() -> bool:
  return jax.default_backend() == "gpu"


def _kernel():
  return gpu_cases.KERNEL if _on_gpu() else xla_flash.KERNEL


def _on_host(function: Callable[[], Any]) -> Any:
  """Returns the result of a function that runs on the CPU, in full precision."""
  with jax.default_device(host()):
    return jax.tree.map(np.asarray, function())


def _difference(found: Any, expected: Any, tolerance: float) -> str:
  """Returns "" or how far apart two arrays are, of the largest finite number expected."""
  x, y = np.asarray(found, np.float32), np.asarray(expected, np.float32)
  if not np.array_equal(np.isfinite(x), np.isfinite(y)):
    return f"finite elsewhere, in {(np.isfinite(x) != np.isfinite(y)).sum()} places"
  x, y = (np.where(np.isfinite(z), z, 0) for z in (x, y))
  error = np.abs(x - y).max() / max(1.0, np.abs(y).max())
  return "" if error <= tolerance else f"off by {error:.1e}"


def _verdict(problems: Iterable[tuple[str, str]]) -> str:
  return "; ".join(f"{name} {problem}" for name, problem in problems if problem) or "right"


def _repeated(run: Callable[[], Any], runs: int, before: Callable[[], None] = lambda: None
              ) -> tuple[Any, str]:
  """Returns the result of the first run, and "" or how many others differ in a bit."""
  before()
  first, differ = jax.tree.map(np.asarray, run()), 0
  for _ in range(runs - 1):
    before()
    again = jax.tree.map(np.asarray, run())
    differ += not all(x.tobytes() == y.tobytes()
                      for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again)))
  return first, f"differ in {differ} of {runs - 1} runs" if differ else ""


def _results(case: Case, found: Any, expected: Any, repeated: str) -> str:
  """Returns the verdict about (out, lse)."""
  return _verdict([
      ("out", _difference(found[0], expected[0], gpu_cases.TOLERANCE[case.dtype])),
      ("lse", _difference(found[1], expected[1], LSE_TOLERANCE[jax.default_backend()])),
      ("bits", repeated)])


def _forward(case: Case, runs: int) -> str:
  operands = _on_host(case.operands)
  run = jax.jit(lambda x: tuple(_kernel().forward(x, case.full_spec, _blocks(case))))
  found, repeated = _repeated(lambda: run(operands), runs)
  return _results(case, found, _on_host(lambda: case.oracle(operands)), repeated)


def _blocks(case: Case) -> BlockSizes:
  return case.blocks if _on_gpu() else BlockSizes()


def _backward(case: Case, wrt: tuple[str, ...]) -> str:
  operands = _on_host(case.operands)
  residuals, cotangents, expected = _on_host(lambda: case.derivatives(
      jax.tree.map(jnp.asarray, operands)))
  run = jax.jit(lambda *arrays: _kernel().backward(
      arrays[0], case.full_spec, _blocks(case), *arrays[1:], wrt))
  found, repeated = _repeated(lambda: run(operands, residuals, cotangents), 3)
  return _verdict([*((name, _difference(x, expected[name], gpu_cases.TOLERANCE[case.dtype]))
                     for name, x in zip(wrt, found)), ("bits", repeated)])


def _launches(width: int, tiny: bool) -> str:
  """Launches a causal forward many times: a kernel whose barriers do not match hangs sometimes."""
  tokens, calls = (32, 3) if tiny else (1024, 10_000)
  case = Case(T=tokens, H=1 if tiny else 16, D=width)
  operands = jax.device_put(_on_host(case.operands))
  run = jax.jit(lambda x: tuple(_kernel().forward(x, case.full_spec, BlockSizes())))
  first = found = jax.block_until_ready(run(operands))
  for n in range(calls):
    found = run(operands)
    if n % 100 == 0:
      jax.block_until_ready(found)
  same = all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(first, found))
  return "right" if same else "the last launch differs from the first"


# --- Decoding with memory that holds NaN. --------------------------------------------------------


def poison_shared_memory() -> jax.Array:
  """Fills most of the shared memory of every processor of a GPU with NaN."""
  rows = POISONED_BYTES // (4 * _ROW)
  def body(_: Any, outputs: Any, smem: Any) -> None:
    nan = plgpu.layout_cast(jnp.full((_ROW,), jnp.nan, jnp.float32), plgpu.Layout.WG_STRIDED(
        (_ROW,), vec_size=4))
    def fill(n: jax.Array, _: tuple) -> tuple:
      smem[n] = nan
      return ()
    lax.fori_loop(mosaic.int32(0), mosaic.int32(rows), fill, ())
    plgpu.commit_smem()
    block = lax.axis_index("block")
    plgpu.copy_smem_to_gmem(smem.at[0], outputs[0].at[block])
    plgpu.wait_smem_to_gmem(0)
  blocks = 4 * 132  # several for every processor of an H100
  found, = mosaic.call(
      body, (jax.core.ShapedArray((blocks, _ROW), jnp.float32),), (),
      plgpu.SMEM((rows, _ROW), jnp.float32), grid=blocks, name="attn_core_poison")
  return found


def _poison() -> None:
  """Fills shared memory, and device memory that is then free, with NaN."""
  if _on_gpu():
    jax.block_until_ready(jax.jit(poison_shared_memory)())
  for size in (2**12, 2**16, 2**20, 2**22):
    jax.block_until_ready(jnp.full(size, jnp.nan, jnp.float32))


def _decoded(case: Case, runs: int) -> str:
  operands = _on_host(case.operands)
  forward = gpu_decode.forward if _on_gpu() else xla_decode.KERNEL.forward
  run = jax.jit(lambda x: tuple(forward(x, case.full_spec, case.blocks)))
  found, repeated = _repeated(lambda: run(operands), runs, _poison)
  return _results(case, found, _on_host(lambda: case.oracle(operands)), repeated)


def _paged(case: paged_cases.Case, runs: int) -> str:
  query, key, value, _ = arrays = _on_host(case.arrays)
  call = jax.jit(functools.partial(ragged_page_attention_v2, options=PagedOptions(
      block_sizes=SPLIT, return_lse=True)))
  cache = jax.device_put(pages.convert(PagesV1(key, value), PagesV2))
  def run() -> tuple:
    output = call(query, cache, case.metadata())
    return output.attention_outputs, output.lse
  (out, lse), repeated = _repeated(run, runs, _poison)
  wide = [jnp.asarray(x, jnp.float32) for x in arrays[:3]]
  expected, expected_lse = _on_host(lambda: case.oracle(*wide, None))
  live = sum(case.queries)
  return _results(Case(), (out[:live], lse[:, :live]), (expected[:live], expected_lse[:, :live]),
                  repeated)


# --- Times. --------------------------------------------------------------------------------------


def _times(tiny: bool) -> str:
  """Measures forward and backward of the shortest call of the benchmark."""
  case = Case(B=1, T=32, H=1) if tiny else Case(B=8, T=2048, H=16, D=128)
  operands = jax.device_put(_on_host(case.operands))
  kernel, count = _kernel(), 2 if tiny else 30
  forward = jax.jit(lambda x: kernel.forward(x, case.full_spec, BlockSizes()))
  residuals = forward(operands)
  backward = jax.jit(lambda *arrays: kernel.backward(
      arrays[0], case.full_spec, BlockSizes(), *arrays[1:], case.wrt))
  flops = 2 * case.B * case.H * case.T**2 * case.D  # two products, half of each
  found = []
  for name, run, factor in (("forward", lambda: forward(operands), 1),
                            ("backward", lambda: backward(operands, residuals, residuals), 2.5)):
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(count)])
    seconds = (time.perf_counter() - start) / count
    found.append(f"{name} {seconds * 1e6:.0f} us, {factor * flops / seconds / 1e12:.3g} TFLOP/s")
  return "measured: " + "; ".join(found)
