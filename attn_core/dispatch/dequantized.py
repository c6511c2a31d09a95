# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of block-wise kernels that dequantize a cache before they attend to it."""

from typing import Callable

from attn_core.caches.quantize import MANY_QUERIES
from attn_core.dispatch.capabilities import Request
from attn_core.types import are_known


def limits(of_kernel: Callable[[Request], str | None]) -> Callable[[Request], str | None]:
  """Returns the limits, with those of the kernel."""
  def refused(request: Request) -> str | None:
    # A feature of the row before, so that it is one of this row, too.
    return request.features.get("mask_operands") or _unsuitable(request) or of_kernel(request)
  return refused


def _unsuitable(request: Request) -> str | None:
  """Returns why a call is not one over a quantized cache with many queries, or None."""
  queries, placement = request.lengths[0], request.placement
  if not {"quantized", "int4"} & set(request.features):
    return "keys and values that are not quantized"
  if placement is not None and placement.keys:
    return "a cache whose keys are on several devices"
  if not are_known(queries) or queries < MANY_QUERIES:
    return f"fewer queries than {MANY_QUERIES}"
  return None


def refusal_of_many(request: Request) -> str | None:
  """Returns why decoding block by block leaves a call to the fallback, or None."""
  if _unsuitable(request):
    return None
  return f"{request.lengths[0]} queries: a quantized cache is dequantized once for so many"
