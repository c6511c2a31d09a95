# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of mechanisms over pages and of their kernels."""

from typing import Any, Callable

from attn_core.caches.paged import layouts
from attn_core.dispatch import capabilities
from attn_core.dispatch.capabilities import Request
from attn_core.score_mods import score_mod, traceable
from attn_core.types import NO_SCORE_MOD


def limits_of_layout(layout: str) -> Callable[[Request], str | None]:
  """Returns the limits of a mechanism that reads pages of one layout."""
  def limits(request: Request) -> str | None:
    if "pages" not in request.features:
      return f"no cache_view in pages: it reads a {layout}"
    if request.pages is None or request.pages.layout == layout:
      return None
    return f"{request.pages.layout}: it reads a {layout}"
  return limits


def kernel_limits(platform: str, layout: str) -> Callable[[Request], str | None]:
  """Returns the limits of the kernel for TPUs, or for Hopper, over pages of one layout."""
  def limits(request: Request) -> str | None:
    reason = limits_of_layout(layout)(request) or _stripes_limits(request)
    if reason or request.pages is None:
      return reason
    shapes: Any = request.pages.shapes  # in place of arrays
    call = (shapes.query, shapes.cache, shapes.metadata, shapes.heads)
    blocks, mod = request.pages.block_sizes, (request.mod, request.mods)
    if platform == "tpu":
      # Pallas takes 0.1 s to import.
      from attn_core.kernels.tpu.ragged import paged_tiling as on_tpu, prefix_groups
      return (capabilities.tpu_limits(request) or on_tpu.unsupported_reason(*call, blocks)
              or prefix_groups.unsupported_reason(*call, blocks) or traceable.refusal(*mod)
              or on_tpu.unsupported_mod(*call, blocks, *mod))
    # Mosaic GPU takes 0.3 s to import.
    from attn_core.kernels.gpu.split_kv import paged as on_gpu, prefix_groups as of_groups
    return (on_gpu.unsupported_reason(*call) or of_groups.unsupported_reason(*call, blocks)
            or traceable.refusal(*mod, chips="Hopper")
            or on_gpu.unsupported_mod(*call, blocks, request.mods))
  return limits


def _stripes_limits(request: Request) -> str | None:
  """Limits of kernels that need a request's whole context, where devices hold parts of it."""
  pages = request.pages
  if pages is None or not pages.shards_keys:
    return None
  if request.mod != NO_SCORE_MOD and score_mod.of_structure(request.mod).reads_positions:
    return "a score mod that reads positions, where a request's pages are on several devices"
  metadata = pages.shapes.metadata
  found = {"cache_metadata.scope": metadata.scope != layouts.Scope.ALL,
           "cache_metadata.draft_mask": metadata.draft_mask is not None,
           "cache_metadata.query_start_loc": metadata.query_start_loc is not None,
           "a window": pages.window[0] is not None}
  for name, is_given in found.items():
    if is_given:
      return f"{name} where a request's pages are on several devices"
  return None
