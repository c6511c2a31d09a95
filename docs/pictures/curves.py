# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Time and temporary memory against the length of a sequence, from measured results."""

import json
import math
import pathlib
from typing import Callable

from docs.pictures.canvas import Canvas

RESULTS = (pathlib.Path(__file__).parents[2] / "attn_core_test" / "results" /
           "cpu_py312_jax0.12.0.1.json")
CASE = "causal_f32_d64_t"
COLORS = {"flash_attn2": "c0", "jax.nn xla": "c4", "tokamax": "c1", "ejkernel xla": "c2",
          "torch sdpa": "c3"}
LEFT, RIGHT, TOP, BOTTOM = 84, 560, 96, 380  # of the axes, in pixels


def draw_speed() -> Canvas:
  return _chart("Time of a causal forward on two CPU cores", "milliseconds",
                lambda result: 1e3 * result["seconds"])


def draw_memory() -> Canvas:
  return _chart("Temporary memory of a causal forward", "megabytes",
                lambda result: result["temp_bytes"] and result["temp_bytes"] / 1e6)


def _chart(title: str, unit: str, value: Callable[[dict], float | None]) -> Canvas:
  """Draws one line per library over the lengths that were measured, both axes logarithmic."""
  measured = json.loads(RESULTS.read_text(encoding="utf-8"))
  lines: dict[str, list[tuple[int, float]]] = {}
  for result in measured["results"]:
    case = result["case"]
    if case["name"].startswith(CASE) and result["direction"] == "forward" and value(result):
      lines.setdefault(result["contender"], []).append((case["queries"], value(result)))
  lines = {name: sorted(line) for name, line in lines.items()}
  lengths = sorted({length for line in lines.values() for length, _ in line})
  powers = [math.log10(y) for line in lines.values() for _, y in line]
  low, high = math.floor(min(powers)), math.ceil(max(powers))
  canvas = Canvas(450, title)

  def place(length: float, y: float) -> tuple[float, float]:
    across = math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0])
    up = (math.log10(y) - low) / (high - low)
    return LEFT + 16 + (RIGHT - LEFT - 32) * across, BOTTOM - (BOTTOM - TOP) * up

  _frame(canvas, title, unit, measured["environment"], (low, high))
  for length in lengths:
    x, _ = place(length, 1)
    canvas.line([(x, BOTTOM), (x, BOTTOM + 5)], "line")
    canvas.text(x, BOTTOM + 20, f"{length:,}", anchor="middle", color="muted", size=12)
  canvas.text((LEFT + RIGHT) / 2, BOTTOM + 42, "tokens", anchor="middle", color="muted", size=12)
  ends = sorted((place(*line[-1])[1], name) for name, line in lines.items())
  at = TOP
  for y, name in ends:  # names at the right, in the order of the lines and apart from each other
    at = max(at + 20, y + 4)
    canvas.line([place(*line) for line in lines[name]], COLORS[name],
                width=3 if name == "flash_attn2" else 1.75)
    for point in lines[name]:
      canvas.dot(*place(*point), COLORS[name])
    canvas.rect(RIGHT + 14, at - 10, 12, 12, COLORS[name])
    canvas.text(RIGHT + 32, at, name, bold=name == "flash_attn2")
  return canvas


def _frame(canvas: Canvas, title: str, unit: str, environment: dict,
           powers: tuple[int, int]) -> None:
  """Draws the title, what was measured, and the axes with lines at powers of ten."""
  versions = environment["versions"]
  canvas.text(20, 30, title, bold=True, size=16)
  canvas.text(20, 52, f"B = 1, H = 8, D = 64, float32; {environment['cpu']}, "
              f"{environment['cores']} cores; jax {versions['jax']}; {environment['date'][:10]}",
              color="muted", size=12)
  canvas.text(LEFT, TOP - 14, unit, color="muted", size=12)
  for power in range(powers[0], powers[1] + 1):
    y = BOTTOM - (BOTTOM - TOP) * (power - powers[0]) / (powers[1] - powers[0])
    canvas.line([(LEFT, y), (RIGHT, y)], "line", width=0.5)
    canvas.text(LEFT - 8, y + 4, f"{10.0 ** power:,.10g}", anchor="end", color="muted", size=12)
