# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicts the fastest way to shard a sequence over 8 to 4,096 devices, for up to 16 M tokens.

    python3 -m attn_core.plan                        causal attention of a Llama 3 8B layer on v5p
    python3 -m attn_core.plan --device h100 --window 4095
    python3 -m attn_core.plan --all                  all token orders, not only each variant's best

Times are those of one layer's attention, forward and backward, at published peak rates:
"""

import argparse
import inspect

from jax.sharding import AbstractMesh

from attn_core import masks
from attn_core.plan import context_parallel
from attn_core.plan.context_parallel import Prediction, Shapes
from attn_core.plan.peaks import DEVICES
from attn_core.types import RING_VARIANTS

DEVICES_ALONG = (8, 64, 512, 4096)
TOKENS = (2**17, 2**20, 2**22, 2**24)
HEADER = ("strategy", "members x group", "GB a link", "TFLOP", "imbalance", "compute ms", "link ms",
          "ms")


def report(device_kind: str, shapes: Shapes, mask: masks.Mask, count: int, every: bool) -> str:
  """Formats the predictions for a number of devices.

  Args:
    device_kind: a key of `DEVICES`.
    shapes: shapes of the whole attention.
    mask: mask of the whole attention.
    count: number of devices.
    every: whether to list all token orders; otherwise the fastest of each variant.
  """
  plan = context_parallel.plan_context_parallel(
      shapes, mask, AbstractMesh((count,), ("sp",)), device_kind)
  lines = [f"{count} x {device_kind}, {shapes.queries:,} tokens"]
  for variant in RING_VARIANTS:
    found = [each for each in plan.predictions if each.variant == variant]
    possible = [each for each in found if not each.impossible]
    if not possible:
      lines.append(f"  {variant}: impossible, {str(found[0].impossible).partition(': ')[2]}")
      continue
    for each in possible if every else [context_parallel.fastest(possible)]:
      lines.append(("* " if each == plan.recommended else "  ") + _row(each))
  return "\n".join(lines)


def _row(p: Prediction) -> str:
  assert (p.link_bytes is not None and p.flops is not None and p.compute_seconds is not None
          and p.link_seconds is not None and p.seconds is not None)
  return _line(f"{p.variant} {p.layout}", f"{p.members} x {p.group}", f"{p.link_bytes / 1e9:.3g}",
               f"{p.flops / 1e12:.4g}", f"{p.imbalance:.3f}", f"{p.compute_seconds * 1e3:.4g}",
               f"{p.link_seconds * 1e3:.4g}", f"{p.seconds * 1e3:.4g}")


def _line(*cells: str) -> str:
  return cells[0].ljust(22) + "".join(cell.rjust(16 if i == 0 else 12)
                                      for i, cell in enumerate(cells[1:]))


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(prog="python3 -m attn_core.plan",
                                   description="Predicts how to shard a sequence.")
  parser.add_argument("--device", choices=DEVICES, default="v5p")
  parser.add_argument("--window", type=int, help="number of visible tokens before a query")
  parser.add_argument("--all", action="store_true", help="list every token order of every variant")
  chosen = parser.parse_args()
  if chosen.window is not None and chosen.window < 0:
    parser.error(f"--window: got {chosen.window}; expected tokens, 0 or more; without it, all")
  mask = masks.causal() & (masks.full() if chosen.window is None else
                           masks.window(chosen.window, 0))
  print((__doc__ or "").strip().splitlines()[-1], "\n", inspect.getdoc(context_parallel), sep="")
  print("\n  ", _line(*HEADER), sep="")
  for count in DEVICES_ALONG:
    for tokens in TOKENS:
      shapes = Shapes(1, tokens, tokens, 32, 8, 128, 128)
      print(report(chosen.device, shapes, mask, count, chosen.all), flush=True)


if __name__ == "__main__":
  main()
