# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of tpu_suite that time kernels, and compare the times with static figures.

On a CPU the kernels are interpreted, which only tries the parts themselves.
"""

import functools
import json
import pathlib
import time
from typing import Any, Callable, Iterator, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core import (OperationMetadata, PagedOptions, PagesMetadata, PagesV3, attention,
                       ragged_page_attention_v2)
from attn_core.benchmark import cases as cases_lib, report, runner
from attn_core.benchmark.cases import Case
from attn_core.benchmark.static import profile, tpu_pages, tpu_pages_programs
from attn_core.benchmark.static.tpu_programs import Program
from attn_core.caches import pages as pages_lib
from attn_core.plan import peaks
from attn_core_test.device_suite_parts import Found, Settings
from attn_core_test.tpu_suite_interpret import running

MECHANISMS = ("flash_attn2",)
PEERS = ("jax splash", "tokamax")
FIGURES = pathlib.Path(__file__).with_name("results")
HELD = 1.3  # a static figure holds if the measured time is at most so many times as long
TPU = OperationMetadata(platform="tpu")
TINY = Program(tpu_pages_programs.OURS, tpu_pages_programs.case_of(
    "mixed", (1, 1), (32, 8), (2, 1), 128), False, "v6e", (0, 0, 8), 1)


def chip() -> str | None:
  """Returns the name of the TPU, a key of `profile.CHIPS`; None if there is none that is known."""
  device = jax.devices()[0]
  if device.platform != "tpu":
    return None
  try:
    found = peaks.find(device.device_kind)
  except ValueError:
    return None
  return next((name for name, one in profile.CHIPS.items() if one.peak == found), None)


# --- Flash. --------------------------------------------------------------------------------------


def static_results(name: str) -> list[dict[str, Any]]:
  """Returns the measured programs of a file of static figures; none without the file."""
  path = FIGURES / f"{name}.json"
  if not path.exists():
    return []
  return [r for r in json.loads(path.read_text(encoding="utf-8"))["results"] if "cycles" in r]


def _cases(settings: Settings) -> list[Case]:
  """Returns the cases of the static figures, causal ones first and long ones last."""
  if settings.tiny:
    return [cases_lib.scale(cases_lib.CASES["causal_f32_d64_t512"], 1, 32, 1)]
  found = {}
  for result in static_results("tpu_static"):
    fields = result["program"]["case"]
    window = None if fields["window"] is None else tuple(fields["window"])
    found[fields["name"]] = Case(**{**fields, "window": window})
  return sorted(found.values(), key=lambda case: (case.keys > 4096, not case.causal, case.name))


def times(settings: Settings) -> Found:
  """Times forward, and forward and backward, side by side with splash and tokamax.

  Writes times.json and times.md after every case, so that nothing is lost if a later one crashes.
  """
  peers = ("jax.nn xla",) if settings.tiny else PEERS
  found = runner.run_attention_benchmarks(
      MECHANISMS, _cases(settings), repeats=1 if settings.tiny else 5, peers=peers,
      out=settings.out, name="times", progress=not settings.tiny, max_seconds=settings.seconds)
  wrong = [f"* wrong: {r.contender}, {r.case.name}, {r.direction}"
           for r in found.results if r.wrong and not r.peer]
  text = report.to_markdown(found).replace("\n#", "\n##")
  return Found(not wrong and bool(found.results), [*wrong, text.partition("\n\n")[2]],
               report.to_data(found))


# --- Pages. --------------------------------------------------------------------------------------


class _Call(NamedTuple):
  """A function of (pages, query), which returns (output, pages)."""

  run: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
  pages: jax.Array
  query: jax.Array


def _arrays(program: Program) -> tuple[Any, ...]:
  """Returns numbers in the shapes of a program: pages in random order, and where queries begin."""
  rng, case = np.random.default_rng(0), program.case
  requests = tpu_pages_programs.Requests(program)
  query, key, value, pages, _, tables, _ = tpu_pages_programs.shapes(program)
  normal = lambda x: jax.random.normal(jax.random.key(x.size % 97), x.shape, jnp.float32).astype(
      x.dtype)
  order = rng.permutation(pages.shape[0]).reshape(tables.shape).astype(np.int32)
  starts = np.array([requests.start(r) for r in range(case.batch + 1)], np.int32)
  return (*map(normal, (query, key, value, pages)), jnp.full(case.batch, case.keys, jnp.int32),
          jnp.asarray(order), jnp.asarray(starts), jnp.asarray(requests.distribution(), jnp.int32))


def _ours(program: Program, arrays: tuple[Any, ...]) -> _Call:
  query, key, value, pages, lengths, tables, starts, distribution = arrays
  mixed = 0 < program.decoding < program.case.batch
  metadata = PagesMetadata(tables, lengths, starts, None, distribution if mixed else None)

  def run(pages: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
    output = attention(query, key, value, mechanism="ragged_page_attention_v3", layout="thd",
                       metadata=TPU, cache_view=PagesV3(pages), cache_metadata=metadata)
    assert isinstance(output.cache_view, PagesV3)
    return output.attention_outputs, output.cache_view.pages
  return _Call(run, pages, query)


def _rpa(program: Program, arrays: tuple[Any, ...]) -> _Call:
  library = tpu_pages_programs.load_rpa()
  query, key, value, pages, lengths, tables, *rest = arrays
  run = lambda pages, query: library.ragged_paged_attention(
      query, key, value, pages, lengths, tables.reshape(-1), *rest,
      sm_scale=program.case.width**-0.5,
      vmem_limit_bytes=tpu_pages_programs.RPA_VECTOR_BYTES)
  return _Call(run, pages, query)


def _expected(program: Program, arrays: tuple[Any, ...]) -> np.ndarray:
  """Returns the output by plain XLA, from pages to which XLA has written."""
  query, key, value, pages, lengths, tables, starts, _ = arrays
  metadata = PagesMetadata(tables, lengths, starts)
  cache = pages_lib.append(PagesV3(pages), key, value, pages_lib.slots(
      metadata, pages.shape[1], query.shape[0]))
  case = program.case
  heads = pages_lib.Heads(case.key_heads, case.width, case.width)
  cache = pages_lib.convert(cache, pages_lib.PagesV2, heads)
  xla = PagedOptions(metadata=OperationMetadata(platform="cpu"))
  with jax.default_device(jax.devices("cpu")[0]):
    found = jax.jit(lambda *a: _attend_v2(*a, xla))(*jax.device_put(
        (query, cache, metadata), jax.devices("cpu")[0]))
  return np.asarray(found, np.float32)


def _attend_v2(query: Any, cache: Any, metadata: Any, options: PagedOptions) -> Any:
  return ragged_page_attention_v2(query, cache, metadata, options).attention_outputs


CONTENDERS = {tpu_pages_programs.OURS: _ours, tpu_pages_programs.RPA: _rpa}


def _seconds(call: _Call, calls: int) -> tuple[float, np.ndarray]:
  """Returns the least time of a call in three loops of `calls`, and the first output."""
  def loop(pages: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      out, pages = call.run(carry[1], query + 0 * carry[0])  # one call after the other
      return out.astype(query.dtype), pages
    return lax.fori_loop(0, calls, step, (jnp.zeros_like(query), pages))
  run = jax.jit(loop, donate_argnums=0)
  # Every call writes the same tokens, so that pages and results remain as after the first one.
  out, pages = jax.block_until_ready(run(call.pages + 0, call.query))
  taken = []
  for _ in range(3 if calls > 1 else 1):
    start = time.perf_counter()
    out, pages = jax.block_until_ready(run(pages, call.query))
    taken.append((time.perf_counter() - start) / calls)
  return min(taken), np.asarray(out, np.float32)


def _programs(settings: Settings) -> Iterator[Program]:
  if settings.tiny:
    yield TINY
    return
  for program in tpu_pages.programs(chip() or "v6e"):
    if program.contender == tpu_pages_programs.OURS:
      yield program


def pages_times(settings: Settings) -> Found:
  """Checks and times writing and attending to pages, and tpu-inference's kernel if it is installed.

  Writes pages_times.json after every case.
  """
  end, results = time.monotonic() + settings.seconds, []
  reason = tpu_pages_programs.missing_rpa()
  reason = "the interpreter does not run it" if settings.tiny else reason
  lines = [f"{tpu_pages_programs.RPA}: not timed: {reason}."] if reason else []
  lines += ["", "| case | page | kernel | us | error |", "|---|---:|---|---:|---:|"]
  for program in _programs(settings):
    if time.monotonic() > end:
      lines.append(f"| {program.case.name} | {program.blocks[2]} | no time left | | |")
      continue
    arrays = _arrays(program)
    expected = _expected(program, arrays)
    for name, make in CONTENDERS.items():
      if name == tpu_pages_programs.RPA and reason:
        continue
      print(f"{program.case.name} {program.blocks[2]} {name}", flush=True)
      found: dict[str, Any] = {"case": program.case.name, "page": program.blocks[2],
                               "contender": name}
      try:
        with running():
          seconds, out = _seconds(make(program, arrays), 1 if settings.tiny else 50)
        error = float(np.abs(out - expected).max() / max(1.0, np.abs(expected).max()))
        found |= {"seconds": seconds, "error": error if np.isfinite(error) else 1e9}
        lines.append(f"| {program.case.name} | {program.blocks[2]} | {name} | {seconds * 1e6:.1f} "
                     f"| {error:.1e} |")
      except Exception as problem:  # another library's limits must not stop the others
        found["problem"] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        lines.append(f"| {program.case.name} | {program.blocks[2]} | {name} | "
                     f"{found['problem']} | |")
      results.append(found)
    if settings.out is not None:
      (settings.out / "pages_times.json").write_text(json.dumps(results, indent=1) + "\n",
                                                     encoding="utf-8")
  own = [r for r in results if r["contender"] == tpu_pages_programs.OURS]
  right = all(r.get("error", 1e9) < 3e-2 for r in own)
  return Found(bool(own) and right, lines, {"results": results})


# --- Static figures. -----------------------------------------------------------------------------


class Figure(NamedTuple):
  """A static figure, and the time measured here."""

  name: str
  static: float  # seconds
  measured: float

  @property
  def ratio(self) -> float:
    """Measured over static."""
    return self.measured / self.static


def static_figures(settings: Settings) -> Found:
  """Compares the times of the parts before with the static figures, and says which held."""
  name = "v6e" if settings.tiny else chip()
  if name is None or settings.out is None:
    return Found(True, ["Not compared: no static figures of this device."], {"figures": []})
  found = [*_flash_figures(name, settings.out), *_pages_figures(name, settings.out)]
  held = [f for f in found if f.ratio <= HELD]
  lines = [f"{len(held)} of {len(found)} static figures for {name} held: at most {HELD} times as "
           "long.", "", "| program | static us | measured us | ratio | held |",
           "|---|---:|---:|---:|---|"]
  lines += [f"| {f.name} | {f.static * 1e6:.1f} | {f.measured * 1e6:.1f} | {f.ratio:.2f} | "
            f"{'yes' if f in held else 'no'} |" for f in found]
  return Found(True, lines, {"chip": name, "figures": [
      {**f._asdict(), "ratio": f.ratio, "held": f in held} for f in found]})


def _read(path: pathlib.Path) -> Any:
  """Returns the contents of a part's file; None if the part wrote none."""
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _static_seconds(result: dict[str, Any], name: str) -> float:
  """Returns the time of a whole program: its cycles, but no less than its bytes take."""
  one = profile.CHIPS[name]
  cycles = result["cycles"] + result["other_cycles"]
  return max(cycles * one.flops_per_cycle / one.peak.flops, result["floor_seconds"])


def _best(results: list[dict[str, Any]], name: str,
          key: Callable[[dict[str, Any]], Any]) -> dict[Any, float]:
  """Returns the least time by key, of the figures for a chip."""
  found: dict[Any, float] = {}
  for result in results:
    if result["program"]["chip"] == name:
      seconds = _static_seconds(result, name)
      found[key(result)] = min(seconds, found.get(key(result), seconds))
  return found


def _flash_figures(name: str, folder: pathlib.Path) -> Iterator[Figure]:
  measured: dict[tuple[str, str, str], float] = {}
  for result in (_read(folder / "times.json") or {"results": []})["results"]:
    measured[result["case"]["name"], result["contender"], result["direction"]] = result["seconds"]
  key = lambda r: (r["program"]["case"]["name"], *(r["program"][name] for name in (
      "contender", "backward")))
  for (case, contender, backward), static in _best(
      static_results("tpu_static"), name, key).items():
    forward = measured.get((case, contender, "forward"))
    both = measured.get((case, contender, "forward_backward"))
    if forward is not None and not backward:
      yield Figure(f"{contender} {case} forward", static, forward)
    if forward is not None and both is not None and backward:
      yield Figure(f"{contender} {case} backward", static, both - forward)


def _pages_figures(name: str, folder: pathlib.Path) -> Iterator[Figure]:
  measured = {(r["case"], r["page"], r["contender"]): r["seconds"]
              for r in _read(folder / "pages_times.json") or [] if "seconds" in r}
  key = lambda r: (r["program"]["case"]["name"], r["program"]["blocks"][2],
                   r["program"]["contender"])
  for where, static in _best(static_results("tpu_pages_static"), name, key).items():
    if where in measured:
      case, page, contender = where
      yield Figure(f"{contender} {case}, pages of {page}", static, measured[where])
