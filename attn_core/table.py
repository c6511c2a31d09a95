# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one table of the library: (mechanism, place) -> Implementation.

A place is a platform, or one compute capability of GPUs; the row of a capability takes precedence
over that of the platform.
Literal rows only: a new kernel or mechanism is a new row here.
"""

from typing import Callable

from attn_core.dispatch import (capabilities, dequantized, latent as latent_limits,
                                pages as pages_limits, selection)
from attn_core.dispatch.capabilities import (FEATURES, LINEAR, LINEAR_BANDED, QUADRATIC,
                                             Implementation)
from attn_core.dispatch.derivatives import Rows
from attn_core.mechanisms import decode, dense, flash, latent, paged, sdpa
from attn_core.mechanisms.context_parallel import mechanism as ring
from attn_core.types import AttentionOutput, Call

_MODS = frozenset({"score_mod", "score_function"})
_EVERYTHING = frozenset(FEATURES) - _MODS - {
    "vmem_limit_bytes", "quantized", "int4", "pages", "draft_mask", "scope", "prefixes",
    "stored_heads", "sequence_layout", "latent"}
_BLOCKWISE = _EVERYTHING - {"weights"}
_TPU = (_BLOCKWISE - {"float16", "float64", "softmax_dtype", "mask_operands"}
        | {"vmem_limit_bytes"})
_VANILLA = _EVERYTHING - {"block_sizes", "optimized"}
_DECODE = _BLOCKWISE - {"bias", "dropout", "selected"} | {"quantized"}
# jax.nn compiles float16 for GPUs only.
_SDPA = frozenset({"gqa", "causal", "window", "chunk", "segments",
                   "positions", "mask", "mask_operands", "selected", "bias", "score_mod",
                   "lse"})
_CUDNN = frozenset({"gqa", "float16", "causal", "window", "positions", "mask", "mask_operands",
                    "bias", "optimized"})
# Products of 16-bit operands with float32 sums have one precision.
_HOPPER = _BLOCKWISE - {"float64", "softmax_dtype", "mask_operands", "precision"}
_PAGED = frozenset({"gqa", "value_width", "float16", "float64", "causal", "window", "chunk",
                    "sinks", "soft_cap", "lse", "lse_gradient", "precision", "softmax_dtype",
                     "block_sizes", "optimized", "pages", "draft_mask", "scope", "prefixes",
                     "stored_heads"}) | _MODS
# Features that kernels over pages, and the decode kernel for TPUs, lack.
_NOT_ON_HOPPER = frozenset({"float64", "precision", "softmax_dtype", "draft_mask", "scope",
                            "int4"})
_NOT_ON_TPU = _NOT_ON_HOPPER - {"draft_mask", "scope"} | {"float16"}

_Run = Callable[[Call], AttentionOutput]

_dense = Implementation(dense.vanilla, _VANILLA | _MODS, QUADRATIC, takes_symbols=True)
_sdpa = Implementation(sdpa.xla, _SDPA, QUADRATIC, capabilities.sdpa_limits, takes_symbols=True,
                       derivatives=Rows(of_lse=False))
_cudnn = Implementation(sdpa.cudnn, _CUDNN, LINEAR_BANDED, capabilities.cudnn_limits,
                        has_partitioner=True,
                        derivatives=Rows(has_tangent=False, of_lse=False, even=True))

_flash = Implementation(flash.xla, _BLOCKWISE | _MODS, LINEAR, takes_symbols=True)
_flash_tpu = Implementation(flash.tpu, _TPU | _MODS, LINEAR, capabilities.tpu_flash_limits,
                            derivatives=Rows(added=_flash.name, tangent=_flash.name))
_flash_hopper = Implementation(flash.gpu, _HOPPER | _MODS, LINEAR, capabilities.hopper_flash_limits,
                               derivatives=Rows(tangent=_flash.name))
_flash_gpu = _cudnn._replace(limits=capabilities.cudnn_gradient_limits, fallback=_flash)


def _over_shards(row: Implementation, run: _Run) -> Implementation:
  """Returns a row of a block-wise kernel as one of `ring`."""
  rows, xla = row.derivatives, Implementation(ring.xla, frozenset(), LINEAR).name
  return row._replace(run=run, features=row.features - {"cache"} | {"sequence_layout"},
                      shards_sequence=True, takes_symbols=False, derivatives=rows._replace(
                          added=rows.added and xla, tangent=rows.tangent and xla))


_ring = _over_shards(_flash, ring.xla)._replace(limits=capabilities.collective_limits)
_without_lists_hopper = _flash_hopper._replace(features=_flash_hopper.features - {"selected"})
_ring_hopper = _over_shards(_without_lists_hopper, ring.gpu)._replace(
    limits=capabilities.hopper_ring_limits, fallback=_ring)
_without_lists_tpu = _flash_tpu._replace(features=_flash_tpu.features - {"selected"})
_ring_tpu = _over_shards(_without_lists_tpu, ring.tpu)._replace(limits=capabilities.tpu_ring_limits)
_ring_tpu = _over_shards(_without_lists_tpu, ring.tpu_remote)._replace(
    limits=capabilities.remote_limits, fallback=_ring_tpu)

# Asked only where decoding leaves a call to it, which it does not if keys are on several devices.
_dequantized = Implementation(decode.dequantized, _DECODE | _MODS | {"int4"}, LINEAR,
                              shards_keys=True)
_decode = Implementation(decode.xla, _DECODE | _MODS | {"int4"}, LINEAR,
                         dequantized.refusal_of_many, fallback=_dequantized, shards_keys=True,
                         derivatives=Rows(gradient=_flash.name))
_dequantized_hopper = Implementation(
    decode.dequantized_gpu, _DECODE & _HOPPER | _MODS | {"quantized", "int4"}, LINEAR,
    dequantized.limits(capabilities.hopper_flash_limits), fallback=_decode,
    shards_keys=True, derivatives=_flash_hopper.derivatives)
_decode_hopper = Implementation(
    decode.gpu, _DECODE & _HOPPER | _MODS | {"quantized"}, LINEAR,
    capabilities.hopper_decode_limits, fallback=_dequantized_hopper, shards_keys=True,
    derivatives=_decode.derivatives)
_dequantized_tpu = Implementation(
    decode.dequantized_tpu, _DECODE & _TPU | _MODS | {"quantized", "int4", "mask_operands"}, LINEAR,
    dequantized.limits(capabilities.tpu_flash_limits), fallback=_decode,
    shards_keys=True, derivatives=_flash_tpu.derivatives)
_decode_tpu = Implementation(
    decode.tpu, _DECODE - _NOT_ON_TPU | _MODS, LINEAR, capabilities.tpu_decode_limits,
    fallback=_dequantized_tpu, shards_keys=True, reads_rows=True, derivatives=_decode.derivatives)

_OVER_PAGES = Rows(reverses_twice=False)  # the backward loops over the tokens of each request


def _over_pages(layout: str, run: _Run,
                features: frozenset[str] = _PAGED | {"int4"}) -> Implementation:
  """Returns the row of plain XLA over pages of one layout."""
  return Implementation(run, features, LINEAR, pages_limits.limits_of_layout(layout),
                        derivatives=_OVER_PAGES)


def _pages_on_tpu(row: Implementation, layout: str, run: _Run) -> Implementation:
  """Returns a row over pages with the kernel for TPUs."""
  return Implementation(run, row.features - _NOT_ON_TPU - {"chunk"}, LINEAR,
                        pages_limits.kernel_limits("tpu", layout), fallback=row,
                        derivatives=_OVER_PAGES._replace(gradient=row.name))


def _pages_on_hopper(row: Implementation, layout: str, run: _Run) -> Implementation:
  """Returns a row over pages with the kernel for Hopper."""
  of_layout = {"chunk"} if layout == "PagesV1" else {"chunk", "value_width"}
  return Implementation(run, row.features - _NOT_ON_HOPPER - of_layout, LINEAR,
                        pages_limits.kernel_limits("gpu", layout), fallback=row,
                        derivatives=_OVER_PAGES._replace(gradient=row.name))


_paged_v1 = _over_pages("PagesV1", paged.xla)
_paged_v2 = _over_pages("PagesV2", paged.xla)
_paged_v3 = _over_pages("PagesV3", paged.xla_writing)

# Keys and values that are up-projected a few heads at a time, where that is less work; decoding;
# absorbed queries.
_latent = Implementation(
    latent.absorbed, _BLOCKWISE | _MODS | {"latent", "quantized"}, LINEAR,
    latent_limits.limits)
_absorbed_gradient = Rows(gradient=_latent.name)
_latent = Implementation(latent.decode, _DECODE | {"latent"}, LINEAR, latent_limits.decode_limits,
                         fallback=_latent, shards_keys=True, derivatives=_absorbed_gradient)
_latent = Implementation(
    latent.projected, _BLOCKWISE - {"bias", "dropout", "selected"} | {"latent", "quantized"},
    LINEAR, latent_limits.projected_limits, fallback=_latent)
_projected_derivatives = Rows(tangent=_latent.name)
# The limits refuse custom masks, so that their arrays need not be refused as a feature.
_latent_tpu = Implementation(
    latent.projected_tpu,
    _TPU - {"bias", "dropout", "selected"} | {"latent", "quantized", "mask_operands"}, LINEAR,
    latent_limits.projected_tpu_limits(capabilities.tpu_limits), fallback=_latent,
    derivatives=_projected_derivatives)
_latent_tpu = Implementation(
    latent.decode_tpu, _DECODE - _NOT_ON_TPU | {"latent"}, LINEAR,
    latent_limits.tpu_decode_limits(capabilities.tpu_limits), fallback=_latent_tpu,
    shards_keys=True, reads_rows=True, derivatives=_absorbed_gradient)
_latent_hopper = Implementation(
    latent.projected_gpu, _HOPPER - {"bias", "dropout", "selected"} | {"latent", "quantized"},
    LINEAR, latent_limits.projected_hopper_limits, fallback=_latent,
    derivatives=_projected_derivatives)
# Up to 8 queries a row are absorbed on Hopper, even where projecting takes fewer FLOPs.
_latent_hopper = Implementation(
    latent.decode_gpu, _DECODE & _HOPPER | {"latent", "quantized"}, LINEAR,
    latent_limits.hopper_decode_limits, fallback=_latent_hopper, shards_keys=True,
    derivatives=_absorbed_gradient)

_latent_pages = _over_pages("PagesLatent", latent.pages,
                            _PAGED - _MODS - {"value_width", "stored_heads"} | {"latent"})
_latent_pages_tpu = _pages_on_tpu(_latent_pages, "PagesLatent", latent.pages_tpu)
_latent_pages_hopper = _pages_on_hopper(_latent_pages, "PagesLatent", latent.pages_gpu)

TABLE: dict[tuple[str, str], Implementation] = {
    ("vanilla", "cpu"): _dense,
    ("vanilla", "gpu"): _dense,
    ("vanilla", "tpu"): _dense,
    ("sdpa", "cpu"): _sdpa,
    ("sdpa", "gpu"): _cudnn,
    ("sdpa", "tpu"): _sdpa,
    ("cudnn", "gpu"): _cudnn,
    ("cuda_flash_attn2", "gpu"): _cudnn,
    ("cuda_flash_attn2", "gpu 9.0"): _flash_hopper,
    ("blockwise", "cpu"): _flash,
    ("blockwise", "gpu"): _flash,
    ("blockwise", "tpu"): _flash,
    ("flash_attn2", "cpu"): _flash,
    ("flash_attn2", "gpu"): _flash_gpu,
    ("flash_attn2", "gpu 9.0"): _flash_hopper,
    ("flash_attn2", "tpu"): _flash_tpu,
    ("blocksparse", "cpu"): _flash,
    ("blocksparse", "gpu"): _flash_gpu,
    ("blocksparse", "gpu 9.0"): _flash_hopper,
    ("blocksparse", "tpu"): _flash_tpu,
    ("page_attention", "cpu"): _paged_v1,
    ("page_attention", "gpu"): _paged_v1,
    ("page_attention", "gpu 9.0"): _pages_on_hopper(_paged_v1, "PagesV1", paged.gpu),
    ("page_attention", "tpu"): _pages_on_tpu(_paged_v1, "PagesV1", paged.tpu),
    ("ragged_page_attention_v2", "cpu"): _paged_v2,
    ("ragged_page_attention_v2", "gpu"): _paged_v2,
    ("ragged_page_attention_v2", "gpu 9.0"): _pages_on_hopper(_paged_v2, "PagesV2", paged.gpu),
    ("ragged_page_attention_v2", "tpu"): _pages_on_tpu(_paged_v2, "PagesV2", paged.tpu),
    ("ragged_page_attention_v3", "cpu"): _paged_v3,
    ("ragged_page_attention_v3", "gpu"): _paged_v3,
    ("ragged_page_attention_v3", "gpu 9.0"): _pages_on_hopper(_paged_v3, "PagesV3",
                                                              paged.gpu_writing),
    ("ragged_page_attention_v3", "tpu"): _pages_on_tpu(_paged_v3, "PagesV3", paged.tpu_writing),
    ("ring", "cpu"): _ring,
    ("ring", "gpu"): _ring,
    ("ring", "gpu 9.0"): _ring_hopper,
    ("ring", "tpu"): _ring_tpu,
    ("autoregressive_decodeattn", "cpu"): _decode,
    ("autoregressive_decodeattn", "gpu"): _decode,
    ("autoregressive_decodeattn", "gpu 9.0"): _decode_hopper,
    ("autoregressive_decodeattn", "tpu"): _decode_tpu,
    ("multi_latent_attention", "cpu"): _latent,
    ("multi_latent_attention", "gpu"): _latent,
    ("multi_latent_attention", "gpu 9.0"): _latent_hopper,
    ("multi_latent_attention", "tpu"): _latent_tpu,
    ("multi_latent_ragged_page_attention", "cpu"): _latent_pages,
    ("multi_latent_ragged_page_attention", "gpu"): _latent_pages,
    ("multi_latent_ragged_page_attention", "gpu 9.0"): _latent_pages_hopper,
    ("multi_latent_ragged_page_attention", "tpu"): _latent_pages_tpu,
}

# Names without a row on some platform, and why.
_NEEDS_GPU = "it runs on NVIDIA GPUs only: platform 'gpu'"
MISSING = {
    "cudnn": _NEEDS_GPU,
    "cuda_flash_attn2": _NEEDS_GPU,
}

# The names that `auto` tries, in this order; names whose memory is linear for the call come first.
AUTO = {
    "cpu": ("flash_attn2", "autoregressive_decodeattn", "ring", "vanilla",
            "multi_latent_attention"),
    "gpu": ("flash_attn2", "blockwise", "autoregressive_decodeattn", "ring", "vanilla",
            "multi_latent_attention"),
    "tpu": ("flash_attn2", "blockwise", "autoregressive_decodeattn", "ring", "vanilla",
            "multi_latent_attention"),
}

# What `auto` tries first where each row has few queries. On CPUs one query takes about half the
# time so, and two to eight take a third to two thirds over a cache of which a quarter is live. The
# kernels of flash attention compute 128 queries at least: on TPUs one query takes 6.6 times as long
# by these, and 64 as long as by the other (static cycles of a v6e).
AUTO_FEW_QUERIES = {"cpu": selection.FewQueries("autoregressive_decodeattn", 8),
                    "gpu 9.0": selection.FewQueries("autoregressive_decodeattn", 16),
                    "tpu": selection.FewQueries("autoregressive_decodeattn", 64)}

RULES = selection.Rules(TABLE, MISSING, AUTO, AUTO_FEW_QUERIES)


def names() -> tuple[str, ...]:
  """Returns every mechanism's name."""
  return selection.names()
