# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of gpu_suite: each checks or measures one thing and returns its result as plain data.

Every part runs in a process of its own, so that a kernel that crashes one leaves the others alone.
"""

import functools
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import LatentOptions, OperationMetadata, attention
from attn_core.benchmark import runner
from attn_core.benchmark import cases as cases_lib, report
from attn_core.caches import dense, latent, latent_pages, pages, quantize
from attn_core.config.metadata import resolved_capability, resolved_platform
from attn_core_test import device_suite_parts
from attn_core_test.device_suite_parts import FEW_CASES, Found, Settings, repeatability, step_of
from attn_core_test.gpu_suite_hardware import hardware
from attn_core_test.process_group import run_group
from attn_core_test.property_cases import CASES, EVEN_CASES

# (mechanism, dtype, cases), the most important first, since time may run out.
PROPERTIES = (("flash_attn2", "bfloat16", CASES), ("sdpa", "bfloat16", EVEN_CASES),
              ("flash_attn2", "float16", FEW_CASES), ("sdpa", "float16", EVEN_CASES[:3]),
              ("blockwise", "float32", FEW_CASES))

# Mechanisms and other libraries to time; all take memory linear in the length.
MECHANISMS = ("flash_attn2", "cudnn")
PEERS = ("jax.nn cudnn", "tokamax", "torch sdpa", "flash_attn")
PACKAGES = ("tokamax", "torch", "flash_attn", "jax-cuda13-plugin", "jax-cuda12-plugin",
            "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def environment(settings: Settings) -> Found:
  """Reports device, driver, versions and date."""
  del settings
  where = device_suite_parts.environment(PACKAGES)
  where["compute_capability"] = resolved_capability(OperationMetadata())
  where["nvidia_smi"] = _nvidia_smi()
  versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
  return Found(True, [
      f"{where['device']} ({where['platform']}, compute capability {where['compute_capability']}), "
      f"{where['nvidia_smi'] or 'no nvidia-smi'}; {where['cpu']}, {where['cores']} cores; Python "
      f"{where['python']}, {versions}; {where['date']}."], where)


def _nvidia_smi() -> str | None:
  """Returns name, driver, clock and power limits of the GPUs."""
  if shutil.which("nvidia-smi") is None:
    return None
  query = "--query-gpu=name,driver_version,clocks.max.sm,power.limit,ecc.mode.current"
  done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True,
                        text=True, check=False)
  return done.stdout.strip() or None


def properties(settings: Settings) -> Found:
  """Compares the property cases with the oracle; see `device_suite_parts.properties`."""
  return device_suite_parts.properties(PROPERTIES, settings)


# --- compute-sanitizer. --------------------------------------------------------------------------

TOOLS = ("memcheck", "racecheck")


def watched(settings: Settings) -> Found:
  """Runs the program for the sanitizer: forward and backward at a length that fills no block."""
  tokens = 32 if settings.tiny else 300
  jax.block_until_ready(step_of(tokens, 2, 64, dict(sliding_window=(tokens // 2, 0)))())
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
LATENTS = ((8, 4096, 16), (8, 32768, 16), (64, 4096, 128))  # (batch, slots, query heads)
LATENT = LatentOptions(512, 64, nope_width=128)


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
  for shape in LATENTS if not settings.tiny else ((2, 64, 4),):
    if time.monotonic() > end:
      lines.append(f"No time left for latent rows {shape}.")
      continue
    for kernel, speed, error in _latents_decoded(settings, shape, dtype):
      results.append({"shape": shape, "kernel": kernel, "bytes_per_second": speed, "error": error})
      lines.append(f"| {shape} | {kernel} | {speed / 1e9:.0f} | | {error:.1e} |")
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


def _latents_decoded(settings: Settings, shape, dtype):
  """Yields (kernel, bytes of latent rows per second, largest error) of decoding a full cache."""
  (batch, slots, heads), calls = shape, 1 if settings.tiny else 30
  width = LATENT.latent_width + LATENT.rope_width
  query, rows = (jax.random.normal(key, shape, dtype) for key, shape in zip(
      jax.random.split(jax.random.key(1)), ((batch, heads, width), (batch, slots, width))))
  @jax.jit
  def wanted(query, rows):
    query, rows = query.astype(jnp.float32), rows.astype(jnp.float32)
    logits = jnp.einsum("hd,sd->hs", query, rows, precision="highest") * 192**-0.5
    return jnp.einsum("hs,sd->hd", jax.nn.softmax(logits), rows[:, :LATENT.latent_width],
                      precision="highest")
  want = np.stack([np.asarray(wanted(*x)) for x in zip(query, rows)])
  error = lambda found: float(np.abs(np.asarray(found, np.float32).reshape(want.shape) - want).max()
                              / np.abs(want).max())
  lengths = jnp.full(batch, slots, jnp.int32)
  cache = latent.LatentCache(rows, jnp.zeros(batch, jnp.int32), lengths, jnp.zeros(batch, bool))
  run = jax.jit(lambda query, cache: attention(
      query[:, None], None, None, cache_view=cache, mode="__autoregressive__",
      mechanism="multi_latent_attention", latent_options=LATENT).attention_outputs)
  yield "latent cache", rows.nbytes / _seconds(run, (query, cache), calls), error(run(query, cache))
  page = 16 if settings.tiny else 64
  metadata = pages.PagesMetadata(
      jnp.arange(batch * slots // page, dtype=jnp.int32).reshape(batch, -1), lengths)
  pool = latent_pages.init(batch * slots // page, page, (512, 64), dtype=dtype)
  pool = pool._replace(pages=rows.reshape(pool.pages.shape))
  paged = jax.jit(lambda query, pool, metadata: attention(
      query, None, None, layout="thd", cache_view=pool, cache_metadata=metadata,
      mechanism="multi_latent_ragged_page_attention", latent_options=LATENT).attention_outputs)
  given = query, pool, metadata
  yield f"latent pages of {page}", rows.nbytes / _seconds(paged, given, calls), error(paged(*given))


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
    environment, hardware, properties, repeatability, sanitizer, watched, times, decoding)}
