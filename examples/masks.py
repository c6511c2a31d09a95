# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of masks: which keys every query sees, and which blocks a kernel visits.

    python3 examples/masks.py
    python3 examples/masks.py --out=pictures
"""

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
    print(f"{name}: {text.splitlines()[-1]}")
    (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    try:
      masks.picture(mask, folder / f"{name}.png", TOKENS, block_q=BLOCK, block_kv=BLOCK)
    except ImportError as error:
      print(f"no picture: {error}")
  print(f"written to {folder}")


if __name__ == "__main__":
  app.run(main)
