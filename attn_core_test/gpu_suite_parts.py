# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of gpu_suite: each checks or measures one thing and returns its result as plain data.

Every part runs in a process of its own, so that a kernel that crashes one leaves the others alone.
"""

import functools
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import OperationMetadata, attention
from attn_core.benchmark import runner
from attn_core.benchmark import cases as cases_lib, report
from attn_core.caches import dense, pages, quantize
from attn_core.config.metadata import resolved_capability, resolved_platform
from attn_core_test import property_cases
from attn_core_test.process_group import run_group
from attn_core_test.property_cases import CASES, EVEN_CASES, TOLERANCES

GRADIENT_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}  # largest error

# (mechanism, dtype, cases), the most important first, since time may run out.
_FEW = tuple(case for case in CASES if case.name in (
    "causal_gqa", "everything", "window_both_sides", "sinks_several_empty_rows", "soft_cap"))
PROPERTIES = (("flash_attn2", "bfloat16", CASES), ("sdpa", "bfloat16", EVEN_CASES),
              ("flash_attn2", "float16", _FEW), ("sdpa", "float16", EVEN_CASES[:3]),
              ("blockwise", "float32", _FEW))
TINY_PROPERTIES = (("flash_attn2", "float32", _FEW[:1]), ("sdpa", "float32", EVEN_CASES[4:5]))

# Mechanisms and other libraries to time; all take memory linear in the length.
MECHANISMS = ("flash_attn2", "cudnn")
PEERS = ("jax.nn cudnn", "tokamax", "torch sdpa", "flash_attn")
PACKAGES = ("tokamax", "torch", "flash_attn", "jax-cuda13-plugin", "jax-cuda12-plugin",
            "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


class Settings(NamedTuple):
  """Settings of a part."""

  tiny: bool  # shapes small enough for a CPU
  seconds: float  # no work starts later
  out: pathlib.Path | None = None  # folder for intermediate files; None: none are written
  cases: tuple[str, ...] = ()  # cases to time; empty: GPU_CASES


class Found(NamedTuple):
  """Result of a part."""

  ok: bool
  lines: list[str]  # a summary, in Markdown
  data: dict  # all results, as JSON


def environment(settings: Settings) -> Found:
  """Reports device, driver, versions and date."""
  del settings
  where = report.environment(tuple(name for name in PACKAGES if _is_installed(name)))
  where["compute_capability"] = resolved_capability(OperationMetadata())
  where["nvidia_smi"] = _nvidia_smi()
  versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
  return Found(True, [
      f"{where['device']} ({where['platform']}, compute capability {where['compute_capability']}), "
      f"{where['nvidia_smi'] or 'no nvidia-smi'}; {where['cpu']}, {where['cores']} cores; Python "
      f"{where['python']}, {versions}; {where['date']}."], where)


def _is_installed(package: str) -> bool:
  try:
    report.contenders.version(package)
  except ImportError:
    return False
  return True


def _nvidia_smi() -> str | None:
  """Returns name, driver, clock and power limits of the GPUs."""
  if shutil.which("nvidia-smi") is None:
    return None
  query = "--query-gpu=name,driver_version,clocks.max.sm,power.limit,ecc.mode.current"
  done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True,
                        text=True, check=False)
  return done.stdout.strip() or None


# --- Properties. ---------------------------------------------------------------------------------


def properties(settings: Settings) -> Found:
  """Compares the property cases with the oracle: values, gradients, empty rows.

  Writes properties.json after every case, so that nothing is lost if a later one crashes.
  """
  end = time.monotonic() + settings.seconds
  results = []
  for mechanism, dtype, cases in TINY_PROPERTIES if settings.tiny else PROPERTIES:
    for case in cases:
      verdict = "no time left"
      if time.monotonic() < end:
        # The last line names the case that hangs, if one does.
        print(f"{mechanism} {dtype} {case.name}", flush=True)
        verdict = judge(case, mechanism, dtype)
      results.append({"case": case.name, "mechanism": mechanism, "dtype": dtype,
                      "verdict": verdict})
      if settings.out is not None:
        (settings.out / "properties.json").write_text(json.dumps(results, indent=1) + "\n",
                                                      encoding="utf-8")
  verdicts = [result["verdict"] for result in results]
  kinds = {"right": verdicts.count("right"), "no time left": verdicts.count("no time left"),
           "refused": sum(verdict.startswith("refused") for verdict in verdicts)}
  wrong = [result for result in results
           if result["verdict"] not in ("right", "no time left")
           and not result["verdict"].startswith("refused")]
  lines = [f"{len(results)} properties: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
           + f", {len(wrong)} wrong."]
  lines += [f"* {r['mechanism']} {r['dtype']} {r['case']}: {r['verdict']}" for r in wrong]
  return Found(not wrong and kinds["right"] > 0, lines, {"results": results})


def judge(case, mechanism: str, dtype: str) -> str:
  """Returns "right", or one line about the errors."""
  try:
    problems = list(_problems(case, mechanism, dtype))
  except NotImplementedError as error:
    return f"refused: {error}"
  except Exception as error:
    # An error in one case must not stop the others.
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
  return "; ".join(problems) or "right"


def _problems(case, mechanism: str, dtype: str):
  """Yields differences from the oracle that are larger than rounding."""
  arrays = property_cases.operands(case, dtype)
  with_lse = mechanism not in ("sdpa", "cudnn")
  arguments = dict(case.arguments, mechanism=mechanism, return_lse=with_lse)
  if dtype == "float32" and with_lse:
    arguments["precision"] = "highest"  # tensor cores would round the operands

  def run(arrays):
    output = attention(**arguments, **arrays)
    return output.attention_outputs, output.lse if with_lse else None

  # Both sides compute the loss in the same precision, so that only the attention is compared.
  got = _value_and_gradient(run, arrays)
  with jax.enable_x64(True), jax.default_device(_host()):
    wide = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in arrays.items()}
    reference = property_cases.reference(case)
    want = _value_and_gradient(lambda a: (reference(a)[0], reference(a)[1] if with_lse else None),
                               wide)
    want_lse = np.asarray(reference(wide)[1])
  quantile, largest = TOLERANCES[dtype]
  error = _error(got["out"], want["out"])
  if not (np.quantile(error, 0.9) < quantile and error.max() < largest):
    yield f"out off by {error.max():.1e}"
  if with_lse:
    empty = ~np.isfinite(want_lse)
    if not np.array_equal(~np.isfinite(got["lse"]), empty):
      yield "lse infinite elsewhere"
    elif not _error(*(np.where(empty, 0, x) for x in (got["lse"], want_lse))).max() < largest:
      yield "lse off"
  for name in arrays:
    error = _error(got[f"d_{name}"], want[f"d_{name}"]).max()
    if not error < GRADIENT_TOLERANCES[dtype]:
      yield f"d_{name} off by {error:.1e}"


def _value_and_gradient(run: Callable, arrays: dict) -> dict[str, np.ndarray]:
  """Returns out, lse and the gradient of a sum of both, on the host."""
  def loss(arrays):
    out, lse = run(arrays)
    wide = jnp.promote_types(out.dtype, jnp.float32)
    # A linear loss: the rounding of large outputs must not change their cotangents.
    value = (out.astype(wide) * np.cos(np.arange(out.size)).reshape(out.shape)).sum()
    if lse is not None:
      value = value + jnp.where(jnp.isfinite(lse), lse, 0).sum()
    return value, (out, lse)
  gradient, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
  found = {"out": out, "lse": lse, **{f"d_{name}": x for name, x in gradient.items()}}
  return {name: np.asarray(x, np.float64) for name, x in found.items() if x is not None}


def _error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
  return np.abs(got - want) / (1 + np.abs(want))


def _host():
  try:
    return jax.devices("cpu")[0]
  except RuntimeError:
    return jax.devices()[0]


# --- Repeatability. ------------------------------------------------------------------------------


def repeatability(settings: Settings) -> Found:
  """Checks that repeated runs give the same bits, values and gradients."""
  times, tokens, heads = (2, 32, 2) if settings.tiny else (20, 2048, 8)
  widths = (16,) if settings.tiny else (64, 128, 256)
  end = time.monotonic() + settings.seconds
  differ, late, looked = [], [], 0
  for width in widths:
    for name, more in (("causal", {}), ("window", dict(sliding_window=(tokens // 4, 0))),
                       ("soft_cap_sinks", dict(logits_soft_cap=30.0,
                                               softmax_aux=jnp.ones(heads)))):
      if time.monotonic() > end:
        late.append(f"{name} D{width}")
        continue
      first = None
      run = _step(tokens, heads, width, more)
      for _ in range(times):
        bits = [np.asarray(x).tobytes() for x in run()]
        first = first or bits
        looked += 1
        if bits != first:
          differ.append(f"{name} D{width}")
          break
  lines = [f"flash_attn2, {looked} runs, forward and backward: "
           + (f"bits differ in {', '.join(differ)}." if differ else "the same bits every time.")]
  lines += [f"No time left for {', '.join(late)}."] if late else []
  return Found(not differ and looked > 0, lines, {"runs": looked, "differ": differ, "late": late})


def _step(tokens: int, heads: int, width: int, more: dict) -> Callable:
  """Returns a function that runs a forward and a backward: () -> (output, gradients)."""
  dtype = jnp.bfloat16 if resolved_platform(OperationMetadata()) == "gpu" else jnp.float32
  keys = jax.random.split(jax.random.key(1), 3)
  arrays = [jax.random.normal(key, (2, tokens, n, width)).astype(dtype)
            for key, n in zip(keys, (heads, heads // 2, heads // 2))]

  @jax.jit
  def step(*arrays):
    def loss(*arrays):
      out = attention(*arrays, mechanism="flash_attn2", **more).attention_outputs
      return jnp.sin(out.astype(jnp.float32)).sum(), out
    gradient, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return (out, *gradient)

  return lambda: step(*arrays)


# --- compute-sanitizer. --------------------------------------------------------------------------

TOOLS = ("memcheck", "racecheck")


def watched(settings: Settings) -> Found:
  """Runs the program for the sanitizer: forward and backward at a length that fills no block."""
  tokens = 32 if settings.tiny else 300
  jax.block_until_ready(_step(tokens, 2, 64, dict(sliding_window=(tokens // 2, 0)))())
  return Found(True, ["ran"], {})


def sanitizer(settings: Settings) -> Found:
  """Runs compute-sanitizer on a small case, if it is installed and there is a GPU."""
  tool = _sanitizer_path()
  if resolved_platform(OperationMetadata()) != "gpu" or tool is None:
    reason = "no GPU" if tool is not None else "no compute-sanitizer here"
    return Found(True, [f"Not run: {reason}."], {"tools": {}, "reason": reason})
  end = time.monotonic() + settings.seconds
  summaries = {}
  for check in TOOLS:
    command = [tool, "--tool", check, sys.executable,
               str(pathlib.Path(__file__).with_name("gpu_suite.py")), "--part", "watched"]
    output, ending = run_group(command, max(1.0, end - time.monotonic()))
    stopped = ending.startswith("stopped")
    summaries[check] = "no time left" if stopped else sanitizer_summary(output, ending)
  clean = all(is_clean(text) or text == "no time left" for text in summaries.values())
  return Found(clean, [f"{check}: {text}" for check, text in summaries.items()],
               {"tools": summaries})


def _sanitizer_path() -> str | None:
  """Returns compute-sanitizer on the PATH, or where CUDA toolkits install it."""
  found = sorted(pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
  return shutil.which("compute-sanitizer") or (str(found[-1]) if found else None)


def is_clean(summary: str) -> bool:
  """Returns whether a summary reports no errors."""
  return re.match(r"\w+ SUMMARY: 0 (errors|hazards)", summary) is not None


def sanitizer_summary(text: str, ending: str) -> str:
  """Returns the tool's last line, or how it ended if it has none or the program failed."""
  lines = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
  if not lines:
    return f"no summary; {ending}: {text[-300:]}"
  if is_clean(lines[-1]) and ending != "exit status 0":
    return f"the watched program failed; {ending}: {text[-300:]}"
  return lines[-1]


# --- Times. --------------------------------------------------------------------------------------


def times(settings: Settings) -> Found:
  """Times forward, and forward and backward, side by side with other libraries.

  Writes times.json and times.md after every case, so that nothing is lost if a later one crashes.
  """
  run = functools.partial(runner.run_attention_benchmarks, out=settings.out, name="times",
                          progress=not settings.tiny, max_seconds=settings.seconds)
  if settings.tiny:
    case = cases_lib.scale(cases_lib.CASES[cases_lib.GPU_CASES[0]], 1, 64, 1)
    found = run(("flash_attn2",), (case,), repeats=1, peers=("jax.nn xla",))
  else:
    found = run(MECHANISMS, settings.cases or cases_lib.GPU_CASES, repeats=5, peers=PEERS)
  wrong = [f"* wrong: {r.contender}, {r.case.name}, {r.direction}"
           for r in found.results if r.wrong and not r.peer]
  text = report.to_markdown(found).replace("\n#", "\n##")
  return Found(not wrong and bool(found.results), [*wrong, text.partition("\n\n")[2]],
               report.to_data(found))


# --- Decoding. -----------------------------------------------------------------------------------

# (batch, slots, query heads, key heads, width)
DECODES = ((8, 4096, 32, 8, 128), (8, 32768, 32, 8, 128), (64, 4096, 32, 8, 128),
           (8, 32768, 32, 8, 64), (8, 16384, 16, 8, 256), (1, 131072, 64, 8, 128))
PAGE_SIZES = (16, 64)
STORED = (None, *quantize.LIMITS)  # dtypes of caches; None: that of the queries


def decoding(settings: Settings) -> Found:
  """Checks decoding from a dense cache and from pages, and times it against a copy of the keys.

  Bytes per second count live keys, values and scales; for the copy, bytes read and written.
  """
  end = time.monotonic() + settings.seconds
  dtype = jnp.bfloat16 if resolved_platform(OperationMetadata()) == "gpu" else jnp.float32
  lines, results = ["| B, S, H, K, D | kernel | GB/s | of copy | error |", "|---" * 5 + "|"], []
  shapes, kinds = (((2, 64, 4, 2, 64),), STORED[:2]) if settings.tiny else (DECODES, STORED)
  for shape, stored in itertools.product(shapes, kinds):
    if time.monotonic() > end:
      lines.append(f"No time left for {shape} {stored or ''}.")
      continue
    for kernel, speed, copy, error in _decoded(settings, shape, dtype, stored):
      results.append({"shape": shape, "kernel": kernel, "bytes_per_second": speed,
                      "copy_bytes_per_second": copy, "error": error})
      lines.append(f"| {shape} | {kernel} | {speed / 1e9:.0f} | {speed / copy:.2f} | {error:.1e} |")
  right = all(result["error"] < 2e-2 for result in results)
  return Found(right and bool(results), lines, {"results": results})


def _decoded(settings: Settings, shape, dtype, stored: str | None):
  """Yields (kernel, bytes per second, those of a copy, largest error) of decoding a full cache."""
  (batch, slots, heads, key_heads, width), calls = shape, 1 if settings.tiny else 30
  keys = jax.random.split(jax.random.key(0), 3)
  query, *plain = [jax.random.normal(key, (batch, n, h, width), dtype)
                   for key, n, h in zip(keys, (1, slots, slots), (heads, key_heads, key_heads))]
  copy = 2 * plain[0].nbytes / _seconds(jax.jit(lambda x: -x), plain[:1], calls)
  arrays, scales = plain, (None, None)
  if stored is not None:
    arrays, scales = zip(*(jax.jit(quantize.quantize, static_argnums=1)(x, stored) for x in plain))
  count = sum(x.nbytes for x in (*arrays, *scales) if x is not None)
  kind = f" in {stored}" if stored else ""
  cache = dense.DenseCache(*arrays, jnp.zeros(batch, jnp.int32),
                           jnp.full(batch, slots, jnp.int32), jnp.zeros(batch, bool), *scales)
  def decode(query, cache):
    return attention(query, None, None, cache_view=cache, mode="__autoregressive__",
                     mechanism="autoregressive_decodeattn").attention_outputs
  # The definition, in float32, a row at a time.
  @jax.jit
  def wanted(query, key, value, *scales):
    key, value = (x.astype(jnp.float32) if scale is None else quantize.dequantize(x, scale)
                  for x, scale in zip((key, value), scales))
    query = query.astype(jnp.float32).reshape(1, key_heads, -1, width) * width**-0.5
    logits = jnp.einsum("tkgd,skd->kgs", query, key, precision="highest")
    return jnp.einsum("kgs,ske->kge", jax.nn.softmax(logits), value,
                      precision="highest").reshape(1, heads, width)
  want = np.stack([np.asarray(wanted(*(x if x is None else x[b]
                                       for x in (query, *arrays, *scales))))
                   for b in range(batch)])
  error = lambda found: float(np.abs(np.asarray(found, np.float32) - want).max()
                              / np.abs(want).max())
  run = jax.jit(decode)
  yield ("dense cache" + kind, count / _seconds(run, (query, cache), calls), copy,
         error(run(query, cache)))
  for page in PAGE_SIZES[:1] if settings.tiny else PAGE_SIZES:
    tables = jnp.arange(batch * slots // page, dtype=jnp.int32).reshape(batch, -1)
    metadata = pages.PagesMetadata(tables, cache.lengths)
    pool = pages.PagesV2(
        pages.interleave(*arrays).reshape(-1, page, 2 * key_heads, width),
        *(x if x is None else x.reshape(-1, page, key_heads) for x in scales))
    paged = jax.jit(lambda query, pool, metadata: attention(
        query, None, None, layout="thd", cache_view=pool, cache_metadata=metadata,
        mechanism="ragged_page_attention_v2").attention_outputs)
    given = query[:, 0], pool, metadata
    yield (f"pages of {page}{kind}", count / _seconds(paged, given, calls), copy,
           error(paged(*given)[:, None]))


def _seconds(run: Callable, arrays, calls: int) -> float:
  """Returns the least time per call, of three runs of `calls` calls in a row."""
  jax.block_until_ready(run(*arrays))
  taken = []
  for _ in range(3):
    start = time.perf_counter()
    found = [run(*arrays) for _ in range(calls)][-1]
    jax.block_until_ready(found)
    taken.append((time.perf_counter() - start) / calls)
  return min(taken)


PARTS = {part.__name__: part for part in (
    environment, properties, repeatability, sanitizer, watched, times, decoding)}
