"""The values that travel through the library, and the constants every file shares.

Letters: B batch, T query length, S key length, H query heads, K key heads,
G = H / K, D query and key width, E value width.

Four kinds of values, never mixed: arrays (`Operands`, traced), what is computed
(`AttentionSpec`, static), where (`OperationMetadata`, static) and how fast
(`BlockSizes`, static; it never changes the meaning).
"""

import enum
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Mode = Literal["__train__", "__prefill__", "__autoregressive__", "__insert__"]
Layout = Literal["bthd", "bhtd", "thd"]

MODES = ("__train__", "__prefill__", "__autoregressive__", "__insert__")
DECODE_MODES = ("__autoregressive__", "__insert__")
LAYOUTS = ("bthd", "bhtd", "thd")
PLATFORMS = ("cpu", "gpu", "tpu")

# What travels: keys and values around a ring, or to everybody; everything, tokens for heads
# (DeepSpeed-Ulysses); or the latter within groups of devices that form a ring.
RING_VARIANTS = ("ring", "all_gather", "ulysses", "hybrid")

# Collectives between the kernels, which the compiler overlaps with them; or the kernels themselves,
# while they compute, on TPUs only.
RING_TRANSFERS = ("collective", "remote")

# A finite stand-in for -inf where a difference of two of them must not become NaN.
MASK_VALUE = -1e30

# The operands that have gradients, in the order in which kernels return them.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


class AttentionMechanism(str, enum.Enum):
  """The names by which the field knows its attention mechanisms."""

  AUTO = "auto"
  VANILLA = "vanilla"
  SDPA = "sdpa"
  CUDNN = "cudnn"
  CUDA_FLASH_ATTN2 = "cuda_flash_attn2"
  BLOCKWISE = "blockwise"
  FLASH_ATTN2 = "flash_attn2"
  BLOCKSPARSE = "blocksparse"
  SPLASH = "blocksparse"
  RING = "ring"
  REGRESSIVE_DECODE = "autoregressive_decodeattn"
  PAGED_ATTENTION = "page_attention"
  RAGGED_PAGE_ATTENTION_V2 = "ragged_page_attention_v2"
  RAGGED_PAGE_ATTENTION_V3 = "ragged_page_attention_v3"

  def __str__(self) -> str:
    return self.value


class BlockSizes(NamedTuple):
  """How a block-wise kernel cuts its work, in tokens; None: the tuned value."""

  block_q: int | None = None  # query tokens per step of the forward
  block_kv: int | None = None  # key tokens per step of the forward
  block_q_backward: int | None = None  # query tokens per step of the backward
  block_kv_backward: int | None = None  # key tokens per step of the backward
  block_heads: int | None = None  # key heads computed together
  vmem_limit_bytes: int | None = None  # of a TPU kernel; None: what it needs


class RingConfig(NamedTuple):
  """How `ring` spreads a sequence over `OperationMetadata.sequence_axis_name`."""

  variant: str = "ring"  # one of RING_VARIANTS
  # The order in which every array has its tokens along T and S; one of `layouts.LAYOUTS`.
  layout: str = "contiguous"
  heads_axis_name: str | None = None  # of hybrid: the mesh axis of the all-to-all, the faster one
  # Who sends what goes around a ring: one of RING_TRANSFERS.
  transfer: str = "collective"


class MaskOperands(NamedTuple):
  """What a mask structure needs at run time, and where these rows and heads stand.

  A kernel that sees one shard, or a batch with a mapped axis folded into it,
  reads the global batch row and head numbers here; custom predicates and the
  dropout mask are functions of the global numbers.
  """

  arrays: tuple[Array, ...] = ()  # the leaves of the mask, in tree order
  batch_index: Array | None = None  # int32 [B]: global batch row; None: 0..B-1
  head_offset: Array | None = None  # int32 [B or 1]: global number of head 0; None: 0


class Operands(NamedTuple):
  """The arrays of one attention, in layout bthd."""

  query: Array  # [B, T, H, D]
  key: Array  # [B, S, K, D]
  value: Array  # [B, S, K, E]
  bias: Array | None = None  # [B or 1, H or 1, T or 1, S or 1], added to the logits
  mask: MaskOperands = MaskOperands()
  sinks: Array | None = None  # float [B or 1, H]: a logit per head without a value
  dropout_key: Array | None = None  # uint32 [B or 1, 2]
  key_scale: Array | None = None  # float32 [B, S, K], of keys in 8 bits; see caches.quantize
  value_scale: Array | None = None  # float32 [B, S, K]


class AttentionSpec(NamedTuple):
  """What is computed: static and hashable."""

  mask: Any  # the tree structure of an algebra.Mask; its leaves are Operands.mask.arrays
  softmax_scale: float
  logits_soft_cap: float | None = None
  dropout_prob: float = 0.0
  softmax_dtype: Any = jnp.dtype("float32")
  precision: Any = None  # jax.lax.PrecisionLike of the two products
  normalize_output: bool = True
  out_dtype: Any = None  # of the output, where it is a part that others are added to; None: query's


class PagedSpec(NamedTuple):
  """What an attention over pages computes: static and hashable."""

  softmax_scale: float
  logits_soft_cap: float | None = None
  causal: bool = True
  window: tuple[int | None, int | None] = (None, None)  # (left, right), tokens; None: unbounded
  softmax_dtype: Any = jnp.dtype("float32")
  precision: Any = None  # jax.lax.PrecisionLike of the two products


class Call(NamedTuple):
  """One attention, normalised: the only argument of every mechanism."""

  operands: Operands
  spec: AttentionSpec
  block_sizes: BlockSizes = BlockSizes()
  placement: Any = None  # sharding.shard.Placement; None: one device
  return_lse: bool = False
  return_weights: bool = False


class AttentionOutput(NamedTuple):
  """What an attention gives back; None where it was not asked for or does not exist."""

  attention_outputs: Array  # [B, T, H, E] in the caller's layout, query's dtype
  attention_weights: Array | None = None  # [B, H, T, S], those the values were multiplied with
  lse: Array | None = None  # float32 [B, H, T], natural logarithm
  cache_view: Any = None  # the updated cache of mechanisms that write one


def cdiv(numerator: int, denominator: int) -> int:
  """Division rounded up."""
  return -(-numerator // denominator)


for _static in (BlockSizes, RingConfig, AttentionSpec, PagedSpec):
  jax.tree_util.register_static(_static)
