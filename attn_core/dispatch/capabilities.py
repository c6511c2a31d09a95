# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Capabilities of implementations, and the request that they are asked to support."""

import math
import re
from typing import Callable, Mapping, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.dispatch import derivatives as derivatives_lib
from attn_core.dispatch.latent import Widths
from attn_core.masks import banded, mask as mask_lib
from attn_core.score_mods import evaluate, traceable
from attn_core.sharding.context_parallel import Sequence
from attn_core.sharding.paged import PagedShapes
from attn_core.sharding.placement import Placement
from attn_core.types import (NO_SCORE_MOD, AttentionOutput, BlockSizes, Call, are_known,
                             holds_pairs)

# Features: options of a call beyond query, key and value. An implementation supports a feature, or
# refuses it by name.
FEATURES = {
    "gqa": "fewer key heads than query heads",
    "value_width": "values of another width than queries and keys (E != D)",
    "float16": "float16 operands",
    "float64": "float64 operands",
    "causal": "causal masking",
    "window": "a sliding window",
    "chunk": "chunked-local attention",
    "segments": "segment ids, packed sequences",
    "positions": "positions or an offset of the queries",
    "mask": "a boolean mask or any mask of the algebra",
    "mask_operands": "a custom mask that looks numbers up by both positions",
    "selected": "a mask by indices of blocks or keys",
    "bias": "a bias, with its gradient",
    "score_mod": "a score mod, with the gradients of its arrays",
    "score_function": "a score mod that does more than add to the scores",
    "sinks": "sinks, with their gradient",
    "soft_cap": "a soft cap on the logits",
    "dropout": "dropout",
    "lse": "returning the lse",
    "lse_gradient": "differentiating the lse",
    "weights": "returning the attention weights",
    "unnormalized": "an output not divided by the softmax's denominator",
    "precision": "the precision of the products",
    "softmax_dtype": "a softmax dtype other than float32",
    "block_sizes": "block sizes",
    "optimized": "a promise of linear-memory computation",
    "vmem_limit_bytes": "a limit on TPU vector memory",
    "sequence_layout": "sharded tokens in another order than the sequence's",
    "cache": "a dense or sliding-window cache",
    "quantized": "quantized keys and values",
    "int4": "4-bit keys and values",
    "pages": "a cache in pages",
    "draft_mask": "drafts that form a tree",
    "scope": "a part of each request's tokens in pages",
    "prefixes": "pages that are read once for the requests that share them",
    "stored_heads": "pages that are read and not written",
    "latent": "latent rows in place of keys and values",
}

# How memory grows with the sequence length.
LINEAR, QUADRATIC = "linear", "quadratic"
LINEAR_BANDED = "linear without bias or mask written out"


class PagesRequest(NamedTuple):
  """The part of a request about pages."""

  layout: str  # the name of the cache's type
  shapes: PagedShapes  # of one group of requests on one device
  window: tuple[int | None, int | None] = (None, None)  # (left, right), tokens; None: unbounded
  shards_keys: bool = False  # whether several devices hold parts of a request's pages
  block_sizes: BlockSizes = BlockSizes()  # those given


class Request(NamedTuple):
  """Properties of a call that decide which implementation supports it, on one device.

  The shapes depend on the placement, and the placement on the implementation that is asked.
  """

  features: Mapping[str, str]  # feature -> the caller's argument, for the error message
  query: jax.ShapeDtypeStruct  # [B, T, H, D]
  key: jax.ShapeDtypeStruct  # [B, S, K, D]
  value: jax.ShapeDtypeStruct  # [B, S, K, E]
  mask: jax.tree_util.PyTreeDef  # the structure of the mask
  bias_dtype: np.dtype | None = None
  capability: str | None = None  # compute capability of the GPU; None: not known, or not a GPU
  tpu_version: str | None = None  # the generation, such as "v5e"; None: not known, or not a TPU
  transfer: str = "collective"  # `RingConfig.transfer`
  pages: PagesRequest | None = None
  latent: Widths | None = None  # of latent rows; None: keys and values are given
  mod: jax.tree_util.PyTreeDef = NO_SCORE_MOD  # the structure of the score mod's term
  mods: tuple[jax.ShapeDtypeStruct, ...] = ()  # its arrays
  placement: Placement | None = None  # for which the shapes were computed; None: one device
  blocks: BlockSizes = BlockSizes()  # those given
  placement_error: Exception | None = None  # raised while the call was placed; shapes are global

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the query."""
    return jnp.dtype(self.query.dtype)

  @property
  def symbols(self) -> str:
    """The symbolic sizes, as in an error; empty: there are none."""
    for name, x in (("query", self.query), ("key", self.key)):
      if not are_known(*x.shape):
        return f"{name} {x.dtype.name}[{', '.join(map(str, x.shape))}]"
    return ""

  @property
  def lengths(self) -> tuple[int, int]:
    """(T, S)."""
    return self.query.shape[1], self.key.shape[1]

  @property
  def widths(self) -> tuple[int, int]:
    """(D, E)."""
    return self.query.shape[3], self.value.shape[3]


def request_of(call: Call, features: Mapping[str, str], capability: str | None = None,
               transfer: str = "collective", tpu_version: str | None = None) -> Request:
  """Returns the request of a call, as if on one device.

  Args:
    call: of its arrays shapes and dtypes count only; two numbers in a byte count as two.
    features: feature -> the caller's argument.
    capability: compute capability of the GPU; None: not known, or not a GPU.
    transfer: `RingConfig.transfer`.
    tpu_version: generation of the TPU; None: not known, or not a TPU.
  """
  pairs = holds_pairs(call.operands.key_scale, call.operands.key)
  query, key, value = (jax.ShapeDtypeStruct((*x.shape[:3], x.shape[3] * held), x.dtype)
                       for x, held in zip(call.operands[:3], (1, *[2 if pairs else 1] * 2)))
  bias = call.operands.bias
  mods = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.operands.mods)
  return Request(features, query, key, value, call.spec.mask, None if bias is None else bias.dtype,
                 capability, tpu_version, transfer, mod=call.spec.score_mod, mods=mods,
                 blocks=call.block_sizes)


def _no_limits(request: Request) -> str | None:
  """Supports every request."""
  del request
  return None


class Implementation(NamedTuple):
  """One row of the table: a kernel, its capabilities, and the kernel for other requests."""

  run: Callable[[Call], AttentionOutput]
  features: frozenset[str]
  memory: str  # LINEAR, QUADRATIC or LINEAR_BANDED
  limits: Callable[[Request], str | None] = _no_limits  # a reason to refuse, or None
  # Runs the calls that this row refuses, or supports in quadratic memory only; it supports
  # everything that this row supports.
  fallback: "Implementation | None" = None
  shards_sequence: bool = False  # over `OperationMetadata.sequence_axis_name`
  shards_keys: bool = False  # whether mesh axes may shard the key sequence
  reads_rows: bool = False  # whether it reads `MaskOperands.rows`, and gives their NaN
  takes_symbols: bool = False  # whether batch and lengths may be symbols of a `jax.export`
  has_partitioner: bool = False  # whether JAX partitions its operation by rules of its own
  derivatives: derivatives_lib.Rows = derivatives_lib.Rows()

  @property
  def name(self) -> str:
    """The function that runs, by its module below mechanisms/, or its folder there."""
    module = self.run.__module__.removesuffix(".mechanism").rpartition(".")[2]
    return f"{module}.{self.run.__name__}"

  @property
  def chain(self) -> "tuple[Implementation, ...]":
    """This implementation, its fallback, the fallback's, in the order in which they are asked."""
    return (self,) if self.fallback is None else (self, *self.fallback.chain)

  @property
  def general(self) -> "Implementation":
    """The last fallback, which supports everything that the row supports."""
    return self.chain[-1]

  def unsupported(self, request: Request) -> tuple[str, ...]:
    """Returns every reason why this implementation refuses a request; empty: it supports it."""
    reasons = [f"{argument} ({FEATURES[feature]}) is not supported"
               for feature, argument in request.features.items() if feature not in self.features]
    if not self.takes_symbols and request.symbols:
      return (*reasons, f"{request.symbols} (symbolic sizes of jax.export) is not supported")
    if request.placement_error is not None:
      return (*reasons, str(request.placement_error))
    limit = self.limits(request)
    return (*reasons, limit) if limit else tuple(reasons)

  def is_linear(self, request: Request) -> bool:
    """Whether its memory is linear in the sequence length for a request."""
    return self.memory == LINEAR or self.memory == LINEAR_BANDED and _is_linear_banded(request)

  def derivatives_of(self, request: Request) -> derivatives_lib.Derivatives:
    """Returns which implementations compute the derivatives of a request."""
    given = {"bias": request.bias_dtype is not None,
             "score_mods.dense": bool(traceable.by_pair(request.mod, request.mods))}
    return derivatives_lib.of_call(
        self.name, self.derivatives, LINEAR if self.is_linear(request) else QUADRATIC,
        lengths=request.lengths, returns_lse="lse" in request.features,
        added=tuple(name for name, is_given in given.items() if is_given))


# --- Limits of each back end; modules of kernels are imported only when a limit is evaluated. -----


def sdpa_limits(request: Request) -> str | None:
  """Limits of `jax.nn.dot_product_attention` in XLA."""
  # float64 is not among the features either: jax.nn's softmax is float32.
  dtype = request.dtype
  if dtype.itemsize < 2:
    return f"dtype {dtype.name}: jax.nn mixes its logits with the operands, and 8 bits do not mix"
  if "lse" in request.features and dtype.itemsize < 4:
    return (f"return_lse with dtype {dtype.name}: jax.nn rounds the lse to it, and the lse is "
            "float32 here")
  return None


def _is_banded(request: Request) -> bool:
  return banded.from_structure(request.mask, *request.lengths,
                               has_bias="bias" in request.features) is not None


def _is_linear_banded(request: Request) -> bool:
  """Whether cuDNN computes a request without a bias or mask written out."""
  return "bias" not in request.features and _is_banded(request)


def cudnn_limits(request: Request) -> str | None:
  """Limits of cuDNN, without differentiation."""
  dtype, width, capability = request.dtype.name, request.widths[0], request.capability
  numbers = re.fullmatch(r"(\d+)\.\d+", capability) if capability else None
  if capability and not numbers:
    return f"a GPU of kind {capability}: cuDNN runs on NVIDIA's only"
  major = int(numbers[1]) if numbers else None
  if major is not None and major < 8:
    return f"compute capability {capability}: cuDNN's attention needs 8.0 or newer"
  if dtype not in ("float16", "bfloat16"):
    return f"dtype {dtype}: cuDNN computes float16 and bfloat16 only"
  if width % 8 or width > (256 if major == 9 else 128):
    return (f"head_dim {width}: cuDNN needs a multiple of 8 up to 128, or up to 256 with "
            "compute capability 9.0")
  if request.bias_dtype is not None and request.bias_dtype != request.dtype:
    return (f"a bias of dtype {jnp.dtype(request.bias_dtype).name} with queries of {dtype}: cuDNN "
            "takes a bias in the dtype of the queries")
  return _cudnn_mask_limits(request)


def _cudnn_mask_limits(request: Request) -> str | None:
  if {"bias", "mask"} & set(request.features) or _is_banded(request):
    if "optimized" in request.features and not _is_linear_banded(request):
      return "optimized=True with a bias or a mask: cuDNN's memory would be quadratic"
    return None
  written = " and ".join(request.features[name] for name in ("window", "positions")
                         if name in request.features)
  if not written:
    return None  # another feature keeps the mask from being banded, and is refused by its name
  return (f"{written}: cuDNN knows causal masks by row and column, with a window to the left where "
          "there are no more queries than keys; any other has to be written out as `mask`")


def cudnn_gradient_limits(request: Request) -> str | None:
  """Limits of cuDNN where the call must be differentiable."""
  reason = cudnn_limits(request)
  if reason is None and request.capability is None:
    # It compiles only where there is a GPU to ask.
    return "the compute capability of the GPU is not known"
  if reason is None and any(length % 2 for length in request.lengths):
    return (f"{request.lengths[0]} queries and {request.lengths[1]} keys: cuDNN's gradients are "
            "taken for even numbers of both only, as JAX takes them with a bias")
  return reason


def hopper_flash_limits(request: Request) -> str | None:
  """Limits of the block-wise kernels for Hopper."""
  from attn_core.kernels.common import listed
  from attn_core.kernels.gpu.flash import tiling  # Mosaic GPU takes 0.3 s to import
  mask = mask_lib.of_structure(request.mask)
  return (tiling.unsupported_reason(request.dtype, request.widths)
          or listed.refusal(mask, "Hopper")
          or listed.refusal_of_sizes(mask, request.lengths, request.blocks, "Hopper")
          or traceable.refusal(request.mod, request.mods, _at_positions(request), "Hopper"))


def hopper_decode_limits(request: Request) -> str | None:
  """Limits of the decode kernel for Hopper."""
  from attn_core.kernels.gpu.split_kv import decode  # Mosaic GPU takes 0.3 s to import
  return decode.unsupported_reason(
      request.dtype, request.widths, request.lengths, "quantized" in request.features
      ) or traceable.refusal(request.mod, request.mods, chips="Hopper") or decode.unsupported_mod(
          request.mod, request.query.shape, request.key.shape[2])


# Generations for which Pallas does not compile products of bfloat16, with 16 KiB of scalar memory.
OLD_TPUS = ("v2", "v3")


def tpu_limits(request: Request) -> str | None:
  """Limits of all kernels for TPUs."""
  if request.tpu_version in OLD_TPUS:
    return f"a TPU {request.tpu_version}: the kernels for TPUs need a v4 or newer"
  return None


def tpu_flash_limits(request: Request) -> str | None:
  """Limits of the block-wise kernels for TPUs."""
  from attn_core.kernels.common import listed
  mask = mask_lib.of_structure(request.mask)
  return (tpu_limits(request) or listed.refusal(mask)
          or traceable.refusal(request.mod, request.mods, _at_positions(request)))


def _at_positions(request: Request) -> str:
  """Returns where block-wise kernels do not take tables by distance; empty: they take them."""
  mask = mask_lib.of_structure(request.mask)
  return "" if evaluate.is_consecutive(mask) else " at listed positions"


def tpu_decode_limits(request: Request) -> str | None:
  """Limits of the decode kernel for TPUs."""
  from attn_core.kernels.tpu.ragged import decode  # Pallas takes 0.1 s to import
  return (tpu_limits(request)
          or decode.unsupported_reason(request.dtype, request.widths, request.lengths[0])
          or decode.unsupported_memory(request.query, request.key, request.value, request.blocks,
                                       ("quantized" in request.features, None))
          or traceable.refusal(request.mod, request.mods)
          or decode.unsupported_mod(request.mods, request.query.shape, request.key.shape[2]))


def collective_limits(request: Request) -> str | None:
  """Limits of a ring whose exchanges are collectives."""
  if request.transfer != "collective":
    return (f"ring.transfer={request.transfer!r}: the kernels for TPUs send by themselves; "
            "'collective' runs on every platform")
  return None


# A table takes 64 numbers for each token of each pair of runs and for each head: 1 GiB a head with
# 8 devices that exchange heads, and 131,072 tokens in layout "zigzag" (256 pairs).
MOST_PAIRS_ON_HOPPER = 64


def hopper_ring_limits(request: Request) -> str | None:
  """Limits of a ring of the block-wise kernels for Hopper."""
  from attn_core.kernels.gpu import mosaic  # Mosaic GPU takes 0.3 s to import
  from attn_core.kernels.gpu.flash import score_tiles
  sequence, at = _sequence_of(request), ""
  if sequence is not None and sequence.attended_runs != (1, 1):
    # Sizes that no call may have are left to the error that names them.
    least = math.lcm(score_tiles.RUN_TOKENS, *(x for x in (
        request.blocks.block_q, request.blocks.block_kv) if x and not x % mosaic.WGMMA_ROWS))
    if any(x % least for x in sequence.run_lengths):
      of_blocks = "" if least == score_tiles.RUN_TOKENS else " with these block_sizes"
      at = (f"{_in_runs(sequence)} of {sequence.run_lengths[0]} and {sequence.run_lengths[1]} "
            f"tokens: only multiples of {least} are taken{of_blocks}")
    elif math.prod(sequence.attended_runs) > MOST_PAIRS_ON_HOPPER:
      at = f"{_in_runs(sequence)}: at most {MOST_PAIRS_ON_HOPPER} pairs are taken"
  return collective_limits(request) or hopper_flash_limits(request) or traceable.refusal(
      request.mod, request.mods, at, "Hopper")


# Numbers by distance are tiles of their own for each pair, in vector memory.
MOST_PAIRS_OF_RUNS = 4


def tpu_ring_limits(request: Request) -> str | None:
  """Limits of a ring of the block-wise kernels for TPUs."""
  sequence, at = _sequence_of(request), ""
  if sequence is not None and math.prod(sequence.attended_runs) > MOST_PAIRS_OF_RUNS:
    at = f"{_in_runs(sequence)}: at most {MOST_PAIRS_OF_RUNS} pairs are taken"
  return tpu_limits(request) or traceable.refusal(
      request.mod, request.mods, _at_positions(request) or at)


def _sequence_of(request: Request) -> Sequence | None:
  """Returns how the sequence is sharded; None: it is not."""
  return None if request.placement is None else request.placement.sequence


def _in_runs(sequence: Sequence) -> str:
  """Returns where tables by distance have several runs of positions, as an error says it."""
  queries, keys = sequence.attended_runs
  return (f" in layout {sequence.layout!r}, where a device has {queries} runs of query positions "
          f"and {keys} of key positions")


def remote_limits(request: Request) -> str | None:
  """Limits of a ring whose kernels send by remote copies."""
  if request.transfer != "remote":
    return f"ring.transfer={request.transfer!r}: it is for 'remote'"
  return tpu_ring_limits(request)
