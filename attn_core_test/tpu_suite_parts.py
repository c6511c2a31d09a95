# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of tpu_suite: each checks one thing and returns its result as plain data.

On a CPU the kernels are interpreted, which only tries the parts themselves.
"""

import time
from typing import Callable
from unittest import mock

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import MaskInfo, OperationMetadata, PagesMetadata, PagesV2, RingConfig, attention
from attn_core.caches import pages as pages_lib, quantize
from attn_core.kernels.tpu.ragged import kv_layout
from attn_core_test import (device_suite_parts, tpu_suite_reference as reference,
                            tpu_suite_writes)
from attn_core_test.device_suite_parts import (FEW_CASES, Found, Settings, error_of,
                                               repeatability)
from attn_core_test.property_cases import CASES, EVEN_CASES
from attn_core_test.tpu_suite_interpret import running
from attn_core_test.tpu_suite_times import pages_times, static_figures, times

# Largest errors. The chip's own exp2 and division are trusted to 1e-5.
ERRORS = {"float32": 1e-4, "bfloat16": 6e-2}
PACKAGES = ("libtpu",)
PROPERTIES = (("flash_attn2", "float32", CASES), ("flash_attn2", "bfloat16", CASES),
              ("blockwise", "float32", FEW_CASES), ("vanilla", "float32", FEW_CASES),
              ("sdpa", "bfloat16", EVEN_CASES))
TPU = OperationMetadata(platform="tpu")


def environment(settings: Settings) -> Found:
  """Reports device, versions and date; fails where no CPU can compute the expected results."""
  del settings
  where = device_suite_parts.environment(PACKAGES)
  versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
  lines = [f"{where['devices']} x {where['device']} ({where['platform']}); {where['cpu']}, "
           f"{where['cores']} cores; Python {where['python']}, {versions}; {where['date']}."]
  has_cpu = device_suite_parts.host().platform == "cpu"
  if not has_cpu:
    lines.append("JAX has no CPU here, and float64 on a TPU is not the expected result: unset "
                 "JAX_PLATFORMS, or add ',cpu' to it.")
  return Found(has_cpu, lines, where)


def properties(settings: Settings) -> Found:
  """Compares the property cases with the oracle; see `device_suite_parts.properties`."""
  return device_suite_parts.properties(PROPERTIES, settings)


# --- Accuracy. -----------------------------------------------------------------------------------


def _ids(tokens: int) -> np.ndarray:
  """Returns segment ids of two documents and padding, [1, T]."""
  return np.array([[0] * (tokens // 2) + [1] * (tokens // 4)
                   + [-1] * (tokens - tokens // 2 - tokens // 4)], np.int32)


def accuracy_cases(tokens: int) -> dict[str, tuple[dict, np.ndarray]]:
  """Returns name -> (arguments of `attention`, bool [T, T] which keys are seen)."""
  t, s = np.arange(tokens)[:, None], np.arange(tokens)[None]
  ids = _ids(tokens)
  same = (ids[0][:, None] == ids[0][None]) & (ids[0] >= 0)[:, None]
  return {
      "empty_rows": (dict(mask_info=MaskInfo.from_segments(ids), causal=False), same),
      "soft_cap": (dict(logits_soft_cap=5.0, sliding_window=(tokens // 3, 0)),
                   (s <= t) & (t - s <= tokens // 3)),
      "causal": ({}, s <= t), "full": (dict(causal=False), np.ones((tokens, tokens), bool))}


def accuracy(settings: Settings) -> Found:
  """Compares values and gradients with float64 on the host, and measures the chip's functions.

  Rows that see nothing give 0 and -inf, and NaN in keys that no query sees reaches nothing.
  """
  with running():
    found = _compared(settings)
    functions = _functions()
  wrong = [name for name, error in functions.items() if not error < ERRORS["float32"]]
  measured = ", ".join(f"{name} {error:.1e}" for name, error in functions.items())
  return Found(found.ok and not wrong, [*found.lines, f"Largest errors of functions: {measured}."],
               {**found.data, "functions": functions})


def accuracy_highest(settings: Settings) -> Found:
  """Repeats the comparison under jax.default_matmul_precision("highest"), as many tests set it."""
  with running(), jax.default_matmul_precision("highest"):
    return _compared(settings)


def _compared(settings: Settings) -> Found:
  tokens, heads, width = (32, (2, 1), 16) if settings.tiny else (512, (4, 2), 128)
  end, lines, ok = time.monotonic() + settings.seconds, [], True
  results: dict[str, dict] = {}
  for name, (arguments, seen) in accuracy_cases(tokens).items():
    for dtype in ("float32",) if settings.tiny else ERRORS:
      if settings.tiny and name not in ("empty_rows",) or time.monotonic() > end:
        lines.append(f"* {name} {dtype}: not run")
        ok &= settings.tiny
        continue
      print(f"{name} {dtype}", flush=True)
      errors = _errors_of(arguments, seen, dtype, (1, tokens, *heads, width))
      results[f"{name} {dtype}"] = errors
      right = all(error < ERRORS[dtype] for error in errors.values())
      ok &= right
      lines.append(f"* {name} {dtype}: " + ", ".join(
          f"{array} {error:.1e}" for array, error in errors.items()) + ("" if right else ": WRONG"))
  return Found(ok and bool(results), lines, {"errors": results})


def _errors_of(arguments: dict, seen: np.ndarray, dtype: str, shape: tuple) -> dict[str, float]:
  """Returns the largest error of each result; inf where one is infinite elsewhere, or NaN."""
  batch, tokens, heads, key_heads, width = shape
  rng = np.random.default_rng(0)
  draw = lambda n: jnp.asarray(rng.normal(size=(batch, tokens, n, width)), dtype)
  query, key, value = draw(heads), draw(key_heads), draw(key_heads)
  unseen = jnp.asarray(~seen.any(0))[None, :, None, None]
  hidden = [jnp.where(unseen, jnp.nan, x) for x in (key, value)]
  d_out = rng.normal(size=query.shape)
  d_lse = rng.normal(size=(batch, heads, tokens))

  @jax.jit
  def run(*arrays):
    def loss(*arrays):
      found = attention(*arrays, mechanism="flash_attn2", metadata=TPU, return_lse=True,
                        **arguments)
      out, lse = found.attention_outputs, found.lse
      value = (out.astype(jnp.float32) * d_out.astype(np.float32)).sum()
      return value + (jnp.where(jnp.isfinite(lse), lse, 0) * d_lse.astype(np.float32)).sum(), (
          out, lse)
    gradients, results = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return *results, *gradients

  got = [np.asarray(x, np.float64) for x in run(query, *hidden)]
  want = reference.attention(query, key, value, seen, arguments.get("logits_soft_cap"),
                             (d_out, d_lse))
  errors = {}
  for name, x, y in zip(("out", "lse", "d_query", "d_key", "d_value"), got, want):
    empty = np.isneginf(y)
    same = np.array_equal(np.isneginf(x), empty) and np.isfinite(x[~empty]).all()
    errors[name] = float(error_of(x[~empty], y[~empty]).max()) if same else float("inf")
  return errors


FUNCTIONS: dict[str, tuple[Callable, Callable, tuple[float, float]]] = {
    "exp2": (jnp.exp2, np.exp2, (-30, 5)), "tanh": (jnp.tanh, np.tanh, (-5, 5)),
    "log": (jnp.log, np.log, (1e-3, 1e3)), "division": (lambda x: 1 / x, lambda x: 1 / x, (0.1, 9))}


def _functions() -> dict[str, float]:
  """Returns the largest relative errors of functions in a kernel; inf where -inf is not kept."""
  def evaluated(function, x):
    def kernel(source, target):
      target[...] = function(source[...])
    return np.asarray(pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32))(x), np.float64)
  found = {}
  for name, (function, exact, (low, high)) in FUNCTIONS.items():
    x = np.linspace(low, high, 8 * 128, dtype=np.float32).reshape(8, 128)
    want = exact(x.astype(np.float64))
    found[name] = float((np.abs(evaluated(function, x) - want) / np.abs(want + (want == 0))).max())
  infinite = np.full((8, 128), -np.inf, np.float32)  # what hidden logits and empty rows rely on
  for name, function, want in (("exp2(-inf)", jnp.exp2, 0.0), ("ceil(-inf)", jnp.ceil, -np.inf)):
    found[name] = 0.0 if (evaluated(function, infinite) == want).all() else float("inf")
  return found


# --- Pages. --------------------------------------------------------------------------------------

# (tokens of each request, how many of them are queries)
REQUESTS = {"8 x 2,048": ((2048,) * 8, (1,) * 8),
            "ragged": ((700, 0, 33, 2048, 1, 512), (300, 0, 1, 1024, 1, 7))}
TINY_REQUESTS = {"ragged": ((20, 0, 9), (3, 0, 1))}
PAGE = 16


def pages(settings: Settings) -> Found:
  """Compares pages with float64 on the host, and one wait for all transfers of a block with many.

  Semaphores of transfers count bytes. Were it otherwise, one wait would hang or end early.
  """
  end, lines, results = time.monotonic() + settings.seconds, [], {}
  ok = True
  for name, requests in (TINY_REQUESTS if settings.tiny else REQUESTS).items():
    for key_heads in (2,) if settings.tiny else (1, 2, 8):
      for stored in (None,) if settings.tiny else (None, "int8"):
        case = f"{name}, K = {key_heads}, {stored or 'bfloat16'}"
        if time.monotonic() > end:
          lines.append(f"* {case}: no time left")
          ok = False
          continue
        print(case, flush=True)
        with running():
          results[case] = error, differs = _paged(requests, key_heads, stored)
        right = error < 2e-2 and not differs
        ok &= right
        lines.append(f"* {case}: off by {error:.1e}; " + (
            "bits DIFFER with a wait for each page" if differs else
            "the same bits with a wait for each page") + ("" if right else ": WRONG"))
  return Found(ok and bool(results), lines, {"results": results})


def _paged(requests: tuple, key_heads: int, stored: str | None) -> tuple[float, bool]:
  """Returns (largest error, whether bits differ if each page is awaited)."""
  (lengths, queries), width, rng = requests, 128, np.random.default_rng(0)
  row_pages = -(-max(lengths) // PAGE)
  count = row_pages * len(lengths)
  query = jnp.asarray(rng.normal(size=(sum(queries), 4 * key_heads, width)), jnp.bfloat16)
  arrays = [jnp.asarray(rng.normal(size=(count, PAGE, key_heads, width)), jnp.bfloat16)
            for _ in range(2)]
  read, scales = arrays, []
  if stored is not None:
    arrays, scales = map(list, zip(*(quantize.quantize(x, stored) for x in arrays)))
    read = [quantize.dequantize(*x) for x in zip(arrays, scales)]
  tables = rng.permutation(count).reshape(len(lengths), row_pages).astype(np.int32)
  starts = np.cumsum([0, *queries]).astype(np.int32)
  metadata = PagesMetadata(*map(jnp.asarray, (tables, np.array(lengths, np.int32), starts)))
  cache = PagesV2(pages_lib.interleave(*arrays), *scales)

  def run():
    return np.asarray(jax.jit(lambda *x: attention(
        x[0], None, None, layout="thd", cache_view=x[1], cache_metadata=x[2], metadata=TPU,
        mechanism="ragged_page_attention_v2").attention_outputs)(query, cache, metadata))

  once = run()
  jax.clear_caches()
  with mock.patch.object(kv_layout, "ONE_WAIT_PER_BLOCK", False):
    each = run()
  jax.clear_caches()
  rows = [np.asarray(x, np.float64)[tables].reshape(len(lengths), -1, key_heads, width)
          for x in read]
  want = reference.paged(query, *rows, lengths, queries)
  error = error_of(once.astype(np.float64), want).max()
  return float(error if np.isfinite(error) else np.inf), once.tobytes() != each.tobytes()


# --- Rings by remote copies. ---------------------------------------------------------------------


def remote_ring(settings: Settings) -> Found:
  """Compares rings by remote copies with rings by collectives, bit for bit, many times.

  Alone, in a scan, and alternating with a ring over the same devices in another order. On chips
  with two cores a grid of one batch row and head is not divided between them, and others are.
  """
  devices = jax.local_devices()
  if len(devices) < 2:
    return Found(True, ["Not run: there is one device."], {})
  if settings.tiny:
    devices = devices[:2]
  orders = [list(range(len(devices))), [*range(0, len(devices), 2), *range(1, len(devices), 2)]]
  if orders[1] == orders[0]:
    orders[1] = orders[0][::-1]
  meshes = [Mesh(np.array(devices)[order], "sp") for order in orders]
  calls, lines, results = 1 if settings.tiny else 10_000, [], {}
  shapes = ((1, 1),) if settings.tiny else ((1, 1), (2, 2))
  end = time.monotonic() + settings.seconds
  with running():
    for number, shape in enumerate(shapes):
      until = time.monotonic() + (end - time.monotonic()) / (len(shapes) - number)
      results[str(shape)] = found = _rings(meshes, shape, calls, until, settings.tiny)
      lines += [f"* B, H = {shape}, {kind}: {wrong} of {count} calls differ"
                + (f"; time for {calls} did not suffice" if count < calls else "")
                for kind, (wrong, count) in found.items()]
  ok = all(wrong == 0 and count > 0 for found in results.values()
           for wrong, count in found.values())
  return Found(ok, [f"{len(devices)} devices.", *lines], {"results": results})


def _rings(meshes: list[Mesh], shape: tuple[int, int], calls: int, until: float,
           tiny: bool) -> dict[str, tuple[int, int]]:
  """Returns kind -> (calls that differ, calls)."""
  (batch, heads), size = shape, meshes[0].size
  tokens, width = (8 * size, 8) if tiny else (512 * size, 128)
  rng, dtype = np.random.default_rng(0), jnp.float32 if tiny else jnp.bfloat16
  whole = [jnp.asarray(rng.normal(size=(batch, tokens, heads, width)), dtype) for _ in range(3)]

  def results_of(mesh: Mesh, transfer: str) -> Callable:
    metadata = TPU.replace(mesh=mesh, ring=RingConfig(transfer=transfer))
    def run(*arrays):
      def loss(*arrays):
        out = attention(*arrays, mechanism="ring", metadata=metadata).attention_outputs
        return jnp.sin(out.astype(jnp.float32)).sum(), out
      gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
      return out, *gradients
    return run

  programs = []
  for mesh in meshes:
    arrays = [jax.device_put(x, NamedSharding(mesh, P(None, "sp"))) for x in whole]
    expected = jax.block_until_ready(jax.jit(results_of(mesh, "collective"))(*arrays))
    def differs(arrays, expected, run=results_of(mesh, "remote")):
      return jnp.any(jnp.stack([jnp.any(x != y) for x, y in zip(run(*arrays), expected)]))
    programs.append((differs, (arrays, expected)))

  def repeated(chosen: list, share: float) -> tuple[int, int]:
    """Runs programs in turns, without waiting for one before the next begins."""
    compiled = [(jax.jit(function), arguments) for function, arguments in chosen]
    wrong, count, stop = 0, 0, time.monotonic() + share * (until - time.monotonic())
    while count < calls and (count == 0 or time.monotonic() < stop):
      some = min(100, calls - count)
      found = [function(*arguments) for _ in range(some) for function, arguments in compiled]
      wrong, count = wrong + int(sum(map(bool, found))), count + some
    return wrong, count

  def in_scan(arrays, expected):
    def step(count, _):
      # Without the barrier the loop would compute the same arrays once.
      x, y, count = lax.optimization_barrier((arrays, expected, count))
      return count + programs[0][0](x, y), None
    return lax.scan(step, jnp.int32(0), length=length)[0]

  print(f"B, H = {shape}, alone", flush=True)
  found = {"alone": repeated(programs[:1], 0.4)}
  length = min(calls, 2 if tiny else 100)
  print(f"B, H = {shape}, in a scan", flush=True)
  found["in a scan"] = int(jax.jit(in_scan)(*programs[0][1])), length
  print(f"B, H = {shape}, two orders of devices", flush=True)
  found["two orders of the devices in turns"] = repeated(programs, 1.0)
  return found


PARTS = {part.__name__: part for part in (
    environment, accuracy, accuracy_highest, pages, tpu_suite_writes.writes, remote_ring,
    properties, repeatability, times, pages_times, static_figures)}
