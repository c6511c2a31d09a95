# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes every picture next to this file, from the library and from measured results."""

import pathlib

from docs.pictures import call, curves, masks, pages, ring_orders

FOLDER = pathlib.Path(__file__).parent
DRAWINGS = {
    "masks": masks.draw, "ring_orders": ring_orders.draw, "pages": pages.draw, "call": call.draw,
    "speed": curves.draw_speed, "memory": curves.draw_memory}


def main() -> None:
  for name, draw in DRAWINGS.items():
    path = FOLDER / f"{name}.svg"
    path.write_text(draw().svg(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
  main()
