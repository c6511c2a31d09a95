# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts that gpu_suite and tpu_suite share; each returns its result as plain data.

Every part runs in a process of its own, so that a kernel that crashes one leaves the others alone.
"""

import json
import pathlib
import time
from typing import Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import OperationMetadata, attention
from attn_core.benchmark import report
from attn_core.config.metadata import resolved_platform
from attn_core_test import property_cases
from attn_core_test.property_cases import CASES, EVEN_CASES, TOLERANCES

GRADIENT_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}  # largest error
FEW_CASES = tuple(case for case in CASES if case.name in (
    "causal_gqa", "everything", "window_both_sides", "sinks_several_empty_rows", "soft_cap"))

# (mechanism, dtype, cases), the most important first, since time may run out.
Plan = tuple[tuple[str, str, tuple], ...]
TINY_PROPERTIES: Plan = (("flash_attn2", "float32", FEW_CASES[:1]),
                         ("sdpa", "float32", EVEN_CASES[4:5]))


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


def environment(packages: Sequence[str]) -> dict:
  """Returns device, versions of the installed packages among these, and date."""
  return report.environment(tuple(name for name in packages if _is_installed(name)))


def _is_installed(package: str) -> bool:
  try:
    report.contenders.version(package)
  except ImportError:
    return False
  return True


# --- Properties. ---------------------------------------------------------------------------------


def properties(plan: Plan, settings: Settings) -> Found:
  """Compares the property cases of a plan with the oracle: values, gradients, empty rows.

  Writes properties.json after every case, so that nothing is lost if a later one crashes.
  """
  end = time.monotonic() + settings.seconds
  results = []
  for mechanism, dtype, cases in TINY_PROPERTIES if settings.tiny else plan:
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
  options: dict = dict(mechanism=mechanism, return_lse=with_lse)
  if dtype == "float32" and with_lse:
    options["precision"] = "highest"  # tensor cores would round the operands

  def run(arrays):
    output = attention(**property_cases.arguments(case, arrays), **options)
    return output.attention_outputs, output.lse if with_lse else None

  # Both sides compute the loss in the same precision, so that only the attention is compared.
  got = _value_and_gradient(run, arrays)
  with jax.enable_x64(True), jax.default_device(host()):
    wide = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in arrays.items()}
    reference = property_cases.reference(case)
    want = _value_and_gradient(lambda a: (reference(a)[0], reference(a)[1] if with_lse else None),
                               wide)
    want_lse = np.asarray(reference(wide)[1])
  quantile, largest = TOLERANCES[dtype]
  error = error_of(got["out"], want["out"])
  if not (np.quantile(error, 0.9) < quantile and error.max() < largest):
    yield f"out off by {error.max():.1e}"
  if with_lse:
    empty = ~np.isfinite(want_lse)
    if not np.array_equal(~np.isfinite(got["lse"]), empty):
      yield "lse infinite elsewhere"
    elif not error_of(*(np.where(empty, 0, x) for x in (got["lse"], want_lse))).max() < largest:
      yield "lse off"
  for name in arrays:
    error = error_of(got[f"d_{name}"], want[f"d_{name}"]).max()
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


def error_of(got: np.ndarray, want: np.ndarray) -> np.ndarray:
  return np.abs(got - want) / (1 + np.abs(want))


def host():
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
      run = step_of(tokens, heads, width, more)
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


def step_of(tokens: int, heads: int, width: int, more: dict) -> Callable:
  """Returns a function that runs a forward and a backward: () -> (output, gradients)."""
  dtype = jnp.float32 if resolved_platform(OperationMetadata()) == "cpu" else jnp.bfloat16
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
