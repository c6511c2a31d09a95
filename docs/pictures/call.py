# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The way of a call through the packages of the library."""

from docs.pictures.canvas import Canvas

STEPS = (
    ("attention(query, key, value, ...)", "attention.py, mechanism_functions/, adapters/"),
    ("arguments: one Call", "arguments/: layout, dtype, mask, cache, pages"),
    ("placement: shapes of one device", "sharding/: mesh axes of batch, heads and sequence"),
    ("choice: one row of the table", "table.py, dispatch/: supported, or refused by name"),
    ("mechanism: shards and exchanges", "mechanisms/: shard_map; ring, Ulysses, all-gather"),
    ("derivatives of every order", "autodiff/: one primitive for all kernels"))
KERNELS = (("XLA", "every platform"), ("TPU", "Pallas"), ("GPU", "Mosaic GPU"))
LEFT, WIDTH, TOP, HEIGHT, GAP = 28, 290, 60, 46, 20


def draw() -> Canvas:
  """Draws one box a step, and the kernels below."""
  canvas = Canvas(560, "The way of a call")
  canvas.text(20, 32, "The way of a call", bold=True, size=16)
  for index, (name, where) in enumerate(STEPS):
    y = TOP + (HEIGHT + GAP) * index
    canvas.rect(LEFT, y, WIDTH, HEIGHT, "box", outline="c0", radius=5)
    canvas.text(LEFT + 14, y + 28, name)
    canvas.text(LEFT + WIDTH + 20, y + 28, where, color="muted", size=12)
    canvas.line([(LEFT + WIDTH / 2, y + HEIGHT), (LEFT + WIDTH / 2, y + HEIGHT + GAP - 3)], "line",
                arrow=True)
  y = TOP + (HEIGHT + GAP) * len(STEPS)
  for index, (name, how) in enumerate(KERNELS):
    x = LEFT + 100 * index
    canvas.rect(x, y, 90, HEIGHT + 10, "empty", outline="line", radius=5)
    canvas.text(x + 45, y + 24, name, anchor="middle", bold=True)
    canvas.text(x + 45, y + 43, how, anchor="middle", color="muted", size=10.5)
  canvas.text(LEFT + WIDTH + 24, y + 24, "kernels/: one device, a block map says which", size=12,
              color="muted")
  canvas.text(LEFT + WIDTH + 24, y + 42, "blocks of the mask are empty, full or partial", size=12,
              color="muted")
  stop = TOP + (HEIGHT + GAP) * 4 - GAP / 2
  canvas.line([(LEFT + WIDTH / 2 + 12, stop), (700, stop)], "c1", dashes="5 4")
  canvas.text(700, stop + 16, "explain(...) stops here", anchor="end", size=12)
  return canvas
