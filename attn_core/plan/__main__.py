# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicts the fastest way to shard a sequence over devices.

    python3 -m attn_core.plan                        causal attention of a Llama 3 8B layer on v5p
    python3 -m attn_core.plan --device h100 --window 4095
    python3 -m attn_core.plan --heads 64 --kv-heads 8 --head-dim 128 --tokens 1M --mesh dp=2,sp=16
    python3 -m attn_core.plan --all                  all token orders, not only each variant's best
    python3 -m attn_core.plan --report FILE          by times that tpu_suite or gpu_suite measured

Times are those of one layer's attention, forward and backward, at published or measured rates:
"""

import argparse
import inspect
import math
from typing import NamedTuple

from jax.sharding import AbstractMesh

from attn_core import masks
from attn_core.plan import context_parallel, measured
from attn_core.plan.context_parallel import ContextParallelPlan, Prediction, Shapes
from attn_core.plan.peaks import DEVICES
from attn_core.types import RING_VARIANTS

DEVICES_ALONG = (8, 64, 512, 4096)
TOKENS = (2**17, 2**20, 2**22, 2**24)
UNITS = {"k": 2**10, "m": 2**20}  # suffixes of numbers of tokens
HEADER = ("strategy", "members x group", "GB a link", "TFLOP", "imbalance", "compute ms", "link ms",
          "ms")


class Question(NamedTuple):
  """One table of the report."""

  device: str  # a key of `DEVICES`
  shapes: Shapes  # of the whole attention
  mask: masks.Mask  # of the whole attention
  axes: dict[str, int]  # the mesh: "sp" shards the sequence, other axes batch and heads
  report: str | None = None  # a file of measured times


def report(question: Question, every: bool) -> str:
  """Formats the predictions for one mesh and one length.

  Args:
    question: what is predicted.
    every: whether to list all token orders; otherwise the fastest of each variant.
  """
  device, shapes, mask, axes, measured_times = question
  plan = context_parallel.plan_context_parallel(
      shapes, mask, AbstractMesh(tuple(axes.values()), tuple(axes)), device, report=measured_times)
  mesh = "" if len(axes) == 1 else f" ({', '.join(f'{n}={size}' for n, size in axes.items())})"
  lines = [f"{math.prod(axes.values())} x {device}{mesh}, {shapes.queries:,} tokens"]
  for variant in RING_VARIANTS:
    possible = [each for each in plan.predictions
                if each.variant == variant and not each.impossible]
    for each in possible if every or not possible else [context_parallel.fastest(possible)]:
      lines.append(("* " if each == plan.recommended else "  ") + _row(each))
  return "\n".join(lines + _impossible(plan))


def _impossible(plan: ContextParallelPlan) -> list[str]:
  """Returns one line with the variants that are impossible in every token order, and why."""
  reasons = {}
  for variant in RING_VARIANTS:
    found = [each.impossible for each in plan.predictions if each.variant == variant]
    if all(found):
      reasons[variant] = str(found[0]).partition(": ")[2].partition("; variants")[0]
  return [f"  impossible: {', '.join(f'{v} ({why})' for v, why in reasons.items())}"
          ] if reasons else []


def _row(p: Prediction) -> str:
  assert (p.link_bytes is not None and p.flops is not None and p.compute_seconds is not None
          and p.link_seconds is not None and p.seconds is not None)
  return _line(f"{p.variant} {p.layout}", f"{p.members} x {p.group}", f"{p.link_bytes / 1e9:.3g}",
               f"{p.flops / 1e12:.4g}", f"{p.imbalance:.3f}", f"{p.compute_seconds * 1e3:.4g}",
               f"{p.link_seconds * 1e3:.4g}", f"{p.seconds * 1e3:.4g}")


def _line(*cells: str) -> str:
  return cells[0].ljust(22) + "".join(cell.rjust(16 if i == 0 else 12)
                                      for i, cell in enumerate(cells[1:]))


def _tokens(text: str) -> tuple[int, ...]:
  """Reads "131072" or "128k,1M"."""
  found = []
  for part in text.lower().split(","):
    unit = UNITS.get(part[-1:], 1)
    number = part if unit == 1 else part[:-1]
    if not number.isdecimal() or not int(number):
      raise argparse.ArgumentTypeError(f"got {text!r}; expected numbers of tokens, such as 128k,1M")
    found.append(int(number) * unit)
  return tuple(found)


def _mesh(text: str) -> dict[str, int]:
  """Reads "sp=16" or "dp=2,sp=16"."""
  pairs = [part.partition("=") for part in text.split(",")]
  axes = {name: int(size) for name, _, size in pairs if size.isdecimal()}
  if len(axes) != len(pairs) or axes.get("sp", 0) < 2 or 0 in axes.values():
    raise argparse.ArgumentTypeError(
        f"got {text!r}; expected axes and sizes with at least two devices along sp, the axis of "
        "the sequence, such as dp=2,sp=16,tp=4")
  return axes


def _count(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f"got {text!r}; expected a number of at least 1")
  return int(text)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="python3 -m attn_core.plan",
                                   description="Predicts how to shard a sequence.")
  parser.add_argument("--device", type=str.lower, choices=DEVICES,
                      help="default: that of the report, or v5p")
  parser.add_argument("--report", metavar="FILE", help="tpu_suite.json or gpu_suite.json: "
                      "computations take as long as measured there")
  parser.add_argument("--heads", type=_count, default=32, help="query heads")
  parser.add_argument("--kv-heads", type=_count, help="key heads; default: 8, or the query heads "
                      "where these are not a multiple of it")
  parser.add_argument("--head-dim", type=_count, default=128, help="width of a head")
  parser.add_argument("--batch", type=_count, help="sequences; default: one for each device along "
                      "the axes dp and fsdp")
  parser.add_argument("--tokens", type=_tokens, help="lengths of the sequence, such as 128k,1M")
  parser.add_argument("--mesh", type=_mesh, help="axes and sizes, such as dp=2,sp=16,tp=4; "
                      f"default: sp of {', '.join(map(str, DEVICES_ALONG))}")
  parser.add_argument("--window", type=int, help="number of visible tokens before a query")
  parser.add_argument("--all", action="store_true", help="list every token order of every variant")
  return parser


def main() -> None:
  """Runs the command line."""
  parser = _parser()
  chosen = parser.parse_args()
  if chosen.window is not None and chosen.window < 0:
    parser.error(f"--window: got {chosen.window}; expected tokens, 0 or more; without it, all")
  mask = masks.causal() & (masks.full() if chosen.window is None else
                           masks.window(chosen.window, 0))
  try:
    device = chosen.device or (
        "v5p" if chosen.report is None else measured.device_kind(chosen.report))
  except ValueError as error:
    parser.error(f"--{error}")
  key_heads = chosen.kv_heads or (chosen.heads if chosen.heads % 8 else 8)
  print((__doc__ or "").strip().splitlines()[-1], "\n", inspect.getdoc(context_parallel), sep="")
  print("\n  ", _line(*HEADER), sep="")
  for axes in [chosen.mesh] if chosen.mesh else [{"sp": count} for count in DEVICES_ALONG]:
    batch = chosen.batch or math.prod(axes.get(name, 1) for name in ("dp", "fsdp"))
    for tokens in chosen.tokens or TOKENS:
      shapes = Shapes(batch, tokens, tokens, chosen.heads, key_heads, chosen.head_dim,
                      chosen.head_dim)
      try:
        print(report(Question(device, shapes, mask, axes, chosen.report), chosen.all),
              flush=True)
      except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
  main()
