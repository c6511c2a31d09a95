# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The token orders of a sequence over four devices, and the work that a causal mask gives each."""

import numpy as np

from attn_core.sharding import token_order
from docs.pictures.canvas import Canvas

TOKENS, DEVICES, CELL = 32, 4, 6
LEFT, PANEL = 24, 234
WORDS = {"contiguous": "one run of tokens each", "zigzag": "a head and a tail each",
         "striped": "every fourth token each"}


def draw() -> Canvas:
  """Draws for each order who holds which token, whose pairs are visible, and how many."""
  canvas = Canvas(470, "Token orders of a ring and their balance")
  canvas.text(20, 30, "Token orders of a ring of 4 devices under a causal mask", bold=True, size=16)
  canvas.text(20, 52, "A pair (query, key) is computed by the device that holds the query",
              color="muted")
  for index, order in enumerate(token_order.TOKEN_ORDERS):
    _panel(canvas, order, LEFT + PANEL * index)
  return canvas


def _panel(canvas: Canvas, order: str, left: float) -> None:
  """Draws one order."""
  tokens = token_order.order(order, TOKENS, DEVICES).reshape(DEVICES, -1)
  holder = np.empty(TOKENS, np.int32)
  for device in range(DEVICES):
    holder[tokens[device]] = device
  canvas.text(left, 86, order, bold=True)
  canvas.text(left, 104, WORDS[order], color="muted", size=12)
  for token in range(TOKENS):
    canvas.rect(left + CELL * token, 114, CELL - 1, 12, f"c{holder[token]}")
    y, seen = 134 + CELL * token, token + 1  # the token itself and those before it
    canvas.rect(left, y, CELL * seen - 1, CELL - 1, f"c{holder[token]}")
    canvas.rect(left + CELL * seen, y, CELL * (TOKENS - seen), CELL - 1, "empty")
  pairs = [int((tokens[device] + 1).sum()) for device in range(DEVICES)]
  canvas.text(left, 350, "visible pairs of each device", color="muted", size=12)
  for device, count in enumerate(pairs):
    y = 360 + 24 * device
    canvas.rect(left, y, 140 * count / max(pairs), 16, f"c{device}")
    canvas.text(left + 140 * count / max(pairs) + 8, y + 13, str(count), size=12)
