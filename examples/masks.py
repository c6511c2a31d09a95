# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of masks: which keys every query sees, and which blocks a kernel visits.

    python3 examples/masks.py
    python3 examples/masks.py --out=pictures

A mask here is a value, not an array of queries by keys: it is made from small parts by `&`, `|` and
`~`, and a kernel asks it which blocks of queries and keys are empty, full or partly visible. Empty
blocks are skipped and full ones need no masking, so the share of visited blocks is the share of the
time that the mask costs. Look at a mask before you train with it: a picture shows at once whether
it hides what you meant.

The program writes seven masks that models use, as text and, with matplotlib, as pictures, and
prints the share of blocks that each visits. It takes a few seconds.
"""

import logging
import pathlib
import tempfile

from absl import app
from absl import flags
import numpy as np

from attn_core import masks

_OUT = flags.DEFINE_string("out", None, "folder for the pictures; none: a new temporary one")
TOKENS, BLOCK = 128, 16


def examples() -> dict[str, masks.Mask]:
  """Masks that models use, by name."""
  documents = np.repeat(np.arange(4, dtype=np.int32), (50, 30, 40, 8))[None]
  causal = masks.causal()
  return {
      "causal": causal,
      "sliding_window": causal & masks.window(31, 0),
      "chunked": causal & masks.chunk(32),
      "prefix_lm": causal | masks.prefix(40),
      "packed_documents": causal & masks.segments(documents),
      "window_with_global_tokens": causal & (masks.window(15, 0) | masks.prefix(8)),
      "not_own_chunk": causal & ~masks.chunk(32),
  }


def main(_):
  folder = pathlib.Path(_OUT.value or tempfile.mkdtemp())
  folder.mkdir(parents=True, exist_ok=True)
  for name, mask in examples().items():
    text = masks.show(mask, TOKENS, block_q=BLOCK, block_kv=BLOCK)
    print(f"{name}: {text.splitlines()[-1]}", flush=True)
    (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    try:
      masks.picture(mask, folder / f"{name}.png", TOKENS, block_q=BLOCK, block_kv=BLOCK)
    except ImportError as error:
      print(f"no picture: {error}")
  print(f"written to {folder}")


if __name__ == "__main__":
  # absl shows logs of level INFO, where jax names every platform that this machine lacks.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  app.run(main)
