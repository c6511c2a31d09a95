# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of the forms of latent attention, and the work that each form is."""

from typing import TYPE_CHECKING, Callable, NamedTuple

from attn_core.masks import leaves, looked_up, mask as mask_lib

if TYPE_CHECKING:  # for annotations only: that module imports this one
  from attn_core.dispatch.capabilities import Request

  Limits = Callable[[Request], str | None]

# Queries of a row up to which decoding, which reads every row of the cache once, is faster.
DECODE_QUERIES = 8


class Widths(NamedTuple):
  """Widths of the parts of latent rows and of up-projected heads."""

  latent: int
  rope: int
  nope: int | None = None  # of the up-projections; None: queries are absorbed
  value: int | None = None


class Flops(NamedTuple):
  """Floating-point operations of both forms for one row of the batch."""

  absorbed: int
  projected: int


def flops(widths: Widths, queries: int, keys: int, heads: int) -> Flops:
  """Returns the work of both forms, counted without a mask.

    absorbed  = 2 H (T latent (nope + E) + T S (2 latent + rope))
    projected = 2 H (S latent (nope + E) + T S (nope + rope + E))

  Args:
    widths: with those of the up-projections.
    queries: T.
    keys: S.
    heads: H.
  """
  assert widths.nope is not None and widths.value is not None
  of_token = widths.latent * (widths.nope + widths.value)
  pairs = queries * keys
  return Flops(
      2 * heads * (queries * of_token + pairs * (2 * widths.latent + widths.rope)),
      2 * heads * (keys * of_token + pairs * (widths.nope + widths.rope + widths.value)))


def limits(request: "Request") -> str | None:
  """Limits of every form of latent attention."""
  if request.latent is None:
    return "no latent_options: it reads latent rows"
  return None


def decode_limits(request: "Request", most: int = DECODE_QUERIES) -> str | None:
  """Limits of decoding, for up to `most` queries a row."""
  if request.lengths[0] > most:
    return f"{request.lengths[0]} queries a row: decoding is for up to {most}"
  return limits(request)


def tpu_decode_limits(of_chip: "Limits") -> "Limits":
  """Returns the limits of decoding by the kernel for TPUs, given those of all such kernels."""
  def limits_on_tpu(request: "Request") -> str | None:
    from attn_core.kernels.tpu.ragged import decode  # Pallas takes 0.1 s to import
    # Also some more, such as of a chunked prefill, that pass by the rows of the cache at once.
    most = min(decode.MOST_QUERIES, decode.MOST_LATENT_ROWS // request.query.shape[2])
    reason = (of_chip(request) or decode_limits(request, max(most, DECODE_QUERIES))
              or decode.unsupported_rows(request.dtype, request.key, request.value))
    if reason is None and request.latent:
      reason = decode.unsupported_memory(
          request.query, request.key, request.value, request.blocks,
          ("quantized" in request.features, request.latent.latent))
    if reason is None and request.latent and projected_limits(request) is None:
      work = flops(request.latent, *request.lengths, request.query.shape[2])
      return (f"{work.absorbed:.3g} FLOPs a row of the batch for {request.lengths[0]} queries and "
              f"{request.lengths[1]} keys, and {work.projected:.3g} projected")
    return reason
  return limits_on_tpu


def hopper_decode_limits(request: "Request") -> str | None:
  """Limits of decoding by the kernel for Hopper."""
  from attn_core.kernels.gpu.split_kv import decode  # Mosaic GPU takes 0.3 s to import
  reason, widths = decode_limits(request), request.latent
  if reason is not None or widths is None:
    return reason
  quantized = "quantized" in request.features
  return decode.unsupported_reason(
      request.dtype, (widths.latent + widths.rope, widths.latent), request.lengths, quantized,
      True, request.value.dtype if quantized else None)


def projected_limits(request: "Request") -> str | None:
  """Limits of up-projecting keys and values a few heads at a time."""
  widths = request.latent
  if widths is None:
    return limits(request)
  if widths.nope is None:
    return "absorbed queries: only queries of heads, with key_up and value_up, are projected"
  for node in mask_lib.nodes(mask_lib.of_structure(request.mask)):
    if isinstance(node, (leaves.Dense, leaves.Custom, looked_up.LookedUp)):
      kind = "Dense" if isinstance(node, leaves.Dense) else "Custom"  # as the caller made it
      return f"a mask of kind {kind}, which may differ between heads"
  work = flops(widths, *request.lengths, request.query.shape[2])
  if work.absorbed <= work.projected:
    return (f"{work.projected:.3g} FLOPs a row of the batch for {request.lengths[0]} queries and "
            f"{request.lengths[1]} keys, and {work.absorbed:.3g} absorbed")
  return None


def projected_tpu_limits(of_chip: "Limits") -> "Limits":
  """Returns the limits of the projected form on TPUs, given those of all kernels for TPUs."""
  return lambda request: of_chip(request) or projected_limits(request)


def projected_hopper_limits(request: "Request") -> str | None:
  """Limits of the projected form by the block-wise kernels for Hopper."""
  reason, widths = projected_limits(request), request.latent
  if reason is not None or widths is None or widths.nope is None or widths.value is None:
    return reason
  from attn_core.kernels.gpu.flash import tiling  # Mosaic GPU takes 0.3 s to import
  return tiling.unsupported_reason(request.dtype, (widths.nope + widths.rope, widths.value))
