# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports of a benchmark: as text, as JSON, as a chart."""

import datetime
import json
import os
import pathlib
import platform
import statistics
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from attn_core.benchmark import cases, contenders
from attn_core.benchmark.cases import Case
from attn_core.benchmark.measure import Error

if TYPE_CHECKING:
  from matplotlib.figure import Figure


class Result(NamedTuple):
  """Measurements of one contender on one case in one direction."""

  case: Case
  direction: str  # "forward" or "forward_backward"
  contender: str
  peer: bool  # whether it belongs to another library
  times: tuple[float, ...]  # seconds of one call, per turn
  matmul_flops_per_second: float  # of a large product in the same rounds
  compile_seconds: float | None
  temp_bytes: int | None
  error: Error
  checked: Case  # the case on which the error was measured

  @property
  def seconds(self) -> float:
    """The median time of a call."""
    return statistics.median(self.times)

  @property
  def flops_per_second(self) -> float:
    """Achieved operations per second; only visible pairs are counted."""
    return cases.flops(self.case, self.direction != "forward") / self.seconds

  @property
  def matmul_share(self) -> float:
    """Achieved operations as a fraction of those of the matrix product."""
    return self.flops_per_second / self.matmul_flops_per_second

  @property
  def wrong(self) -> bool:
    """Whether the error is larger than rounding."""
    return self.error.is_wrong(self.case.dtype)


class Refusal(NamedTuple):
  """A contender that did not run, with the reason."""

  contender: str
  case: str | None  # None: all cases
  direction: str | None
  reason: str


class Report(NamedTuple):
  """All results of a benchmark."""

  environment: dict[str, Any]
  results: tuple[Result, ...]
  refusals: tuple[Refusal, ...] = ()
  overheads: dict[str, float] = {}  # name -> number; the name ends with the unit


def environment(packages: tuple[str, ...]) -> dict[str, Any]:
  """The environment of a benchmark: device, processor, cores, load, versions, date.

  The load is a list, to which measurements append.
  """
  device = jax.devices()[0]
  return {
      "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
      "platform": device.platform, "device": device.device_kind, "devices": jax.device_count(),
      "cpu": _cpu_model(), "cores": _cores(), "load_average": [os.getloadavg()[0]],
      "system": platform.system(), "python": platform.python_version(),
      "versions": {name: contenders.version(name)
                   for name in dict.fromkeys(("jax", "jaxlib", "numpy", "attn_core", *packages))}}


def _cores() -> int:
  """Number of cores that this process may use."""
  affinity = getattr(os, "sched_getaffinity", None)
  return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpu_model() -> str:
  """The name of the processor."""
  path = pathlib.Path("/proc/cpuinfo")
  lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
  names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.processor() or platform.machine()


def default_name(where: dict[str, Any]) -> str:
  """The stem of the files, such as "cpu_py311_jax0.10.2"."""
  device = "".join(c if c.isalnum() else "_" for c in where["device"].lower()).strip("_")
  python = "".join(where["python"].split(".")[:2])
  return f"{device}_py{python}_jax{where['versions']['jax']}"


# --- JSON. ---------------------------------------------------------------------------------------


def to_json(report: Report) -> str:
  """Converts a report to JSON text; non-finite numbers are null."""
  return json.dumps(to_data(report), indent=1, allow_nan=False) + "\n"


def to_data(report: Report) -> dict[str, Any]:
  """Converts a report to JSON-serializable values; non-finite numbers are None."""
  return _finite({
      "environment": report.environment, "results": [_result_fields(r) for r in report.results],
      "refusals": [r._asdict() for r in report.refusals], "overheads": report.overheads})


def _result_fields(result: Result) -> dict[str, Any]:
  """The fields of a result and the values derived from them."""
  fields = result._asdict()
  fields |= {"case": result.case._asdict(), "checked": result.checked._asdict()}
  fields |= {"error": result.error._asdict(), "wrong": result.wrong, "seconds": result.seconds}
  fields |= {"flops": cases.flops(result.case, result.direction != "forward")}
  fields |= {"flops_per_second": result.flops_per_second, "matmul_share": result.matmul_share}
  return fields | {"visited_blocks": cases.visited_blocks(result.case)}


def _finite(x: Any) -> Any:
  """Replaces non-finite numbers by None, recursively."""
  if isinstance(x, dict):
    return {name: _finite(value) for name, value in x.items()}
  if isinstance(x, (list, tuple)):
    return [_finite(value) for value in x]
  return None if isinstance(x, float) and not abs(x) < float("inf") else x


def from_json(text: str) -> Report:
  """Converts the JSON text of `to_json` back to a report; an error that was not finite is NaN."""
  data = json.loads(text)
  results = []
  for fields in data["results"]:
    error = Error(*(float("nan") if fields["error"][name] is None else fields["error"][name]
                    for name in Error._fields))
    known = {name: fields[name] for name in Result._fields}
    known |= {"case": _case(fields["case"]), "checked": _case(fields["checked"])}
    results.append(Result(**known | {"times": tuple(fields["times"]), "error": error}))
  refusals = tuple(Refusal(**fields) for fields in data["refusals"])
  return Report(data["environment"], tuple(results), refusals, data["overheads"])


def _case(fields: dict[str, Any]) -> Case:
  """A case from its fields in JSON, which has no tuples."""
  return Case(**fields | {"window": fields["window"] and tuple(fields["window"])})


# --- Text. ---------------------------------------------------------------------------------------


def to_markdown(report: Report) -> str:
  """Converts a report to text: a summary of the medians, all numbers, overheads and refusals."""
  where = report.environment
  versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
  load = f"{min(where['load_average']):.2f} to {max(where['load_average']):.2f}"
  parts = [
      f"# Attention on {where['device']}",
      f"{where['cpu']}, {where['cores']} cores, load {load}; Python "
      f"{where['python']}, {versions}; {where['date']}.",
      "## Milliseconds\n\nMedians of interleaved turns; the fastest correct one is bold.",
      _summary(report), "## All numbers\n\n" + _LEGEND, _details(report)]
  if report.overheads:
    lines = [f"* {name}: {number:.4g}" for name, number in report.overheads.items()]
    parts += ["## Overheads", "\n".join(lines)]
  if report.refusals:
    parts += ["## Not run", _refused(report)]
  return "\n\n".join(parts) + "\n"


_LEGEND = (
    "ratio: time relative to the fastest mechanism of attn_core. GF/s: operations of visible pairs "
    "only. limit: fraction of the rate of a large matrix product in the same rounds. us/block: "
    f"microseconds per visited block of {cases.COUNTED_BLOCK[0]} x {cases.COUNTED_BLOCK[1]} tokens "
    "of a head. temp: temporaries of the compiled program. Errors: against the float64 oracle, on "
    "the case or a smaller one of the same kind, relative to the largest absolute value.")


def _refused(report: Report) -> str:
  """A line for every contender and reason."""
  found: dict[tuple[str, str], dict[str, list[str]]] = {}
  for contender, case, direction, reason in report.refusals:
    places = found.setdefault((contender, reason), {})
    places.setdefault(case or "every case", []).extend([direction] if direction else [])
  return "\n".join(
      f"* {contender}: {reason} ("
      + ", ".join(" ".join((case, *directions)) for case, directions in places.items()) + ")"
      for (contender, reason), places in found.items())


def groups(report: Report) -> list[list[Result]]:
  """Groups results by case and direction, in the order of the report."""
  found: dict[tuple[Case, str], list[Result]] = {}
  for result in report.results:
    found.setdefault((result.case, result.direction), []).append(result)
  return list(found.values())


def _names(report: Report) -> list[str]:
  """The names of all contenders with results."""
  return list(dict.fromkeys(result.contender for result in report.results))


def _summary(report: Report) -> str:
  """A table of medians, with a row for every case and direction."""
  names = _names(report)
  rows = [["case", "direction", *names]]
  for group in groups(report):
    by_name = {result.contender: result for result in group}
    best = min((r.seconds for r in group if not r.wrong), default=None)
    cells = []
    for name in names:
      result = by_name.get(name)
      text = "-" if result is None else _number(1e3 * result.seconds)
      text = f"**{text}**" if result and result.seconds == best and not result.wrong else text
      cells.append(f"{text} wrong" if result and result.wrong else text)
    rows.append([group[0].case.name, group[0].direction, *cells])
  return _table(rows)


def _details(report: Report) -> str:
  """A table of all numbers for every case and direction."""
  parts = []
  for group in groups(report):
    rows = [["contender", "ms", "ratio", "GF/s", "limit", "us/block", "temp MB", "compile s",
             "largest error", "0.999 quantile", ""]]
    own = min((result.seconds for result in group if not result.peer), default=None)
    visited = cases.visited_blocks(group[0].case)
    for r in group:
      rows.append([
          r.contender, _number(1e3 * r.seconds), _number(own and r.seconds / own),
          _number(r.flops_per_second / 1e9), f"{r.matmul_share:.0%}",
          _number(1e6 * r.seconds / visited),
          _number(None if r.temp_bytes is None else r.temp_bytes / 1e6),
          _number(r.compile_seconds), f"{r.error.largest:.1e}", f"{r.error.quantile:.1e}",
          "wrong" if r.wrong else ""])
    first = group[0]
    parts.append(f"### {first.case.name}, {first.direction}\n\n{cases.describe(first.case)}; "
                 f"matrix product {first.matmul_flops_per_second / 1e9:.0f} GF/s\n\n{_table(rows)}")
  return "\n\n".join(parts)


def _number(x: float | None) -> str:
  """Three significant digits; "-" for None."""
  if x is None:
    return "-"
  return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:.3g}"


def _table(rows: list[list[str]]) -> str:
  """Formats rows as a markdown table; the first column is left-aligned, the others right."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  align = lambda cells: " | ".join(
      cell.rjust(width) if index else cell.ljust(width)
      for index, (cell, width) in enumerate(zip(cells, widths)))
  rule = "|".join(f"{'-' * (width + 1)}{':' if index else '-'}"
                  for index, width in enumerate(widths))
  return "\n".join([f"| {align(rows[0])} |", f"|{rule}|", *(f"| {align(r)} |" for r in rows[1:])])


# --- A chart. ------------------------------------------------------------------------------------


def plot(report: Report, path: pathlib.Path) -> None:
  """Writes a PNG with one panel of bars, in milliseconds, for every case and direction.

  Args:
    report: a report with at least one result.
    path: the file to write.

  Raises:
    ImportError: matplotlib is not installed.
  """
  figure(report).savefig(path, format="png")


def figure(report: Report) -> "Figure":
  """Draws the chart of `plot` as a matplotlib Figure."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  from matplotlib.layout_engine import ConstrainedLayoutEngine
  found, colors = groups(report), _colors(report)
  columns = min(3, len(found))
  rows = -(-len(found) // columns)
  # The constrained layout reserves space for the title; the white ground, which a viewer's own
  # settings must not replace, keeps the black text legible on dark pages.
  drawn = Figure(figsize=(5.2 * columns, 0.8 + rows * (1.1 + 0.26 * len(colors))),
                 layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), facecolor="white")
  FigureCanvasAgg(drawn)
  where = report.environment
  title = (f"milliseconds on {where['cpu']}, {where['device']}, jax {where['versions']['jax']}; "
           "shorter is better")
  drawn.suptitle("\n".join(textwrap.wrap(title, 48 * columns)), fontsize=12)
  axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
  for axis, group in zip(axes, found):
    _panel(axis, group, colors)
  for axis in axes[len(found):]:
    axis.set_axis_off()
  return drawn


# Distinguishable for color-blind readers too: cool colors for the library, warm ones for peers.
_OWN_COLORS = ("#2a78d6", "#1baf7a", "#4a3aa7", "#008300")
_PEER_COLORS = ("#eb6834", "#e87ba4", "#eda100", "#e34948")


def _colors(report: Report) -> dict[str, str]:
  """A color for every contender, the same in every panel."""
  peer = {result.contender: result.peer for result in report.results}
  colors: dict[str, str] = {}
  for palette, wanted in ((_OWN_COLORS, False), (_PEER_COLORS, True)):
    names = [name for name in peer if peer[name] == wanted]
    colors |= {name: palette[n % len(palette)] for n, name in enumerate(names)}
  return colors


def _panel(axis: Any, group: list[Result], colors: dict[str, str]) -> None:
  """Draws the bars of one case on a matplotlib axis, hatched if the result is wrong."""
  bars = axis.barh([r.contender for r in group], [1e3 * r.seconds for r in group],
                   color=[colors[r.contender] for r in group], height=0.7,
                   hatch=["//" if r.wrong else "" for r in group])
  axis.bar_label(bars, [_number(1e3 * r.seconds) + (" wrong" if r.wrong else "") for r in group],
                 padding=3, fontsize=8)
  axis.set_ylim(len(colors) - 0.5, -0.5)  # downwards, bars equally thick in all panels
  # Room for the longest label to the right of the longest bar.
  axis.set_xlim(0, (1.35 if any(r.wrong for r in group) else 1.15) * 1e3 * max(
      r.seconds for r in group))
  axis.set_title(f"{group[0].case.name}, {group[0].direction.replace('_', ' and ')}", fontsize=9)
  axis.tick_params(labelsize=8)
  axis.spines[["top", "right"]].set_visible(False)
