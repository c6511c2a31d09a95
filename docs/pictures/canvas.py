# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A page to draw on that becomes an SVG file, legible on light and dark backgrounds.

Colors are names of CSS classes: the file has a set for light and one for dark pages, and a
background of its own.
"""

from html import escape
from typing import NamedTuple

WIDTH = 720  # pixels, of every picture
SIZE = 13  # pixels, of letters
LETTER = 0.6  # width of a letter in units of its size, on the safe side

# Class -> (fill on a light page, fill on a dark page).
FILLS = {
    "paper": ("#ffffff", "#15181d"), "ink": ("#1f2937", "#e5e7eb"), "muted": ("#5b6472", "#a3acba"),
    "line": ("#9aa3b0", "#6b7482"), "empty": ("#eef0f3", "#262b33"), "box": ("#e6eefb", "#1e3354"),
    "c0": ("#2f6fdb", "#5b93f0"), "c1": ("#d97706", "#f0a33c"), "c2": ("#1f9d61", "#3cc482"),
    "c3": ("#9b4fc7", "#bf84e6"), "c4": ("#c2384b", "#ec6d7e"), "pale": ("#a9c7f5", "#35557f")}


class Box(NamedTuple):
  """A rectangle that a text covers, in pixels."""

  left: float
  top: float
  right: float
  bottom: float
  text: str


class Canvas:
  """Collects shapes; `svg` returns the file."""

  def __init__(self, height: int, title: str):
    self.height, self.title = height, title
    self.texts: list[Box] = []
    self._shapes: list[str] = []

  def rect(self, x: float, y: float, width: float, height: float, color: str, *,
           outline: str = "", radius: float = 0) -> None:
    """Draws a rectangle from its upper left corner; `outline` is a color, or "" for none."""
    shown = f' class="{color}"' if not outline else f' class="{color} stroke-{outline}"'
    corner = f' rx="{radius:g}"' if radius else ""
    self._shapes.append(
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner}{shown}/>')

  def text(self, x: float, y: float, words: str, *, color: str = "ink", anchor: str = "start",
           size: float = SIZE, bold: bool = False) -> None:
    """Writes a line of text on the base line y; `anchor` is start, middle or end."""
    width = LETTER * size * len(words)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    self.texts.append(Box(left, y - size * 0.8, left + width, y + size * 0.2, words))
    weight = ' font-weight="600"' if bold else ""
    self._shapes.append(f'<text x="{x:g}" y="{y:g}" class="{color}" text-anchor="{anchor}" '
                        f'font-size="{size:g}"{weight}>{escape(words)}</text>')

  def line(self, points: list[tuple[float, float]], color: str, *, width: float = 1.5,
           arrow: bool = False, dashes: str = "") -> None:
    """Draws straight lines through points, with the head of an arrow at the last if asked."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    ends = ' marker-end="url(#tip)"' if arrow else ""
    ends += f' stroke-dasharray="{dashes}"' if dashes else ""
    self._shapes.append(f'<polyline points="{path}" class="stroke-{color}" fill="none" '
                        f'stroke-width="{width:g}"{ends}/>')

  def dot(self, x: float, y: float, color: str, radius: float = 3.5) -> None:
    self._shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{color}"/>')

  def svg(self) -> str:
    """Returns the picture as the text of an SVG file."""
    def rules(index: int) -> str:
      return "".join(f".{name}{{fill:{fills[index]}}}.stroke-{name}{{stroke:{fills[index]}}}"
                     for name, fills in FILLS.items())
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
        f'width="{WIDTH}" height="{self.height}" role="img">',
        "<!-- Written by `python3 -m docs.pictures`. -->", f"<title>{escape(self.title)}</title>",
        f"<style>text{{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',"
        f"sans-serif}}{rules(0)}@media (prefers-color-scheme: dark){{{rules(1)}}}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" class="line"/></marker>'
        "</defs>", f'<rect width="{WIDTH}" height="{self.height}" rx="8" class="paper"/>',
        *self._shapes, "</svg>"]) + "\n"
