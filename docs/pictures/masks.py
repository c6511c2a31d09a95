# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Six masks and the blocks that a kernel visits for them."""

import numpy as np

from attn_core import masks
from attn_core.masks import block_map, materialize
from docs.pictures.canvas import WIDTH, Canvas

TOKENS, BLOCK = 16, 4  # of each mask; queries and keys of a block
CELL, PANEL, COLUMNS = 11, 236, 3
DOCUMENTS = np.repeat(np.arange(3, dtype=np.int32), (6, 4, 6))[None]
MASKS = {
    "causal()": masks.causal(), "window(5, 0)": masks.window(5, 0),
    "causal() & chunk(8)": masks.causal() & masks.chunk(8),
    "causal() & segments(ids)": masks.causal() & masks.segments(DOCUMENTS),
    "causal() | prefix(6)": masks.causal() | masks.prefix(6),
    "window(3, 3)": masks.window(3, 3)}


def draw() -> Canvas:
  """Draws each mask token by token, with the kinds of its blocks."""
  canvas = Canvas(590, "Masks and their blocks")
  canvas.text(20, 30, "Masks and the blocks that a kernel visits", bold=True, size=16)
  canvas.text(20, 52, f"Rows are queries, columns are keys; {TOKENS} tokens in blocks of "
              f"{BLOCK} x {BLOCK}", color="muted")
  for index, (name, mask) in enumerate(MASKS.items()):
    _panel(canvas, name, mask, 20 + PANEL * (index % COLUMNS), 88 + 240 * (index // COLUMNS))
  x = 20
  for color, words in (("c0", "visible, in a full block: no mask is evaluated"),
                       ("pale", "visible, in a partial block"), ("empty", "hidden")):
    canvas.rect(x, 562, 12, 12, color)
    canvas.text(x + 18, 573, words, color="muted", size=12)
    x += 18 + 7.2 * len(words) + 18
  assert x < WIDTH + 40
  return canvas


def _panel(canvas: Canvas, name: str, mask: masks.Mask, left: float, top: float) -> None:
  """Draws one mask."""
  sizes = block_map.Sizes(TOKENS, TOKENS, BLOCK, BLOCK)
  blocks = block_map.block_map(block_map.host_kinds(mask, sizes))
  full, visited = (int(np.sum(count)) for count in (blocks.num_full, blocks.num_visited))
  kinds = np.asarray(block_map.host_kinds(mask, sizes))[0, 0]
  visible = np.asarray(materialize.to_dense(mask, (1, 1, TOKENS, TOKENS)))[0, 0]
  canvas.text(left, top - 8, name)
  for row in range(TOKENS):
    for column in range(TOKENS):
      is_full = kinds[row // BLOCK, column // BLOCK] == block_map.FULL
      color = ("c0" if is_full else "pale") if visible[row, column] else "empty"
      canvas.rect(left + CELL * column, top + CELL * row, CELL - 1, CELL - 1, color)
  span = CELL * BLOCK
  for row, column in np.argwhere(kinds != block_map.EMPTY):
    canvas.line([(left + span * x - 0.5, top + span * y - 0.5) for x, y in (
        (column, row), (column + 1, row), (column + 1, row + 1), (column, row + 1),
        (column, row))], "ink", width=1)
  canvas.text(left, top + CELL * TOKENS + 17,
              f"{visited} of {kinds.size} blocks visited, {full} full", color="muted", size=12)
