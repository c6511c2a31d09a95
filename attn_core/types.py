# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that travel through the library, and constants that every file shares.

Dimensions, in shapes everywhere: B batch, T query length, S key length, H query heads, K key
heads, G = H / K, D query and key width, E value width; with pages P pages and R requests.

Four kinds of values, never mixed: arrays (`Operands`, traced), what is computed
(`AttentionSpec`, static), where (`OperationMetadata`, static) and how fast
(`BlockSizes`, static; it never changes the meaning).
"""

from collections.abc import Callable, Mapping
import enum
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast

import jax
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:  # for annotations only: these modules import this one
  from attn_core.caches.dense import DenseCache
  from attn_core.caches.latent import LatentCache
  from attn_core.caches.paged.latent_layout import PagesLatent
  from attn_core.caches.paged.layouts import Pages, PagesMetadata, PagesV3
  from attn_core.caches.paged.page_stripes import Stripe
  from attn_core.caches.slots import CacheRows
  from attn_core.caches.window import WindowCache
  from attn_core.sharding.placement import Placement

Array = jax.Array
Mode = Literal["__train__", "__prefill__", "__autoregressive__", "__insert__"]
ArrayLayout = Literal["bthd", "bhtd", "thd"]
SlidingWindow = int | tuple[int | None, int | None] | list[int | None] | None
RingVariant = Literal["ring", "all_gather", "ulysses", "hybrid"]
RingTransfer = Literal["collective", "remote"]
TokenOrder = Literal["contiguous", "zigzag", "striped"]  # see `sharding.token_order`

MODES = ("__train__", "__prefill__", "__autoregressive__", "__insert__")
DECODE_MODES = ("__autoregressive__", "__insert__")
ARRAY_LAYOUTS = ("bthd", "bhtd", "thd")
PLATFORMS = ("cpu", "gpu", "tpu")

# Communication of context parallelism. "ring": keys and values go around a ring of devices;
# "all_gather": every device gathers all keys and values; "ulysses": an all-to-all exchanges tokens
# for heads (DeepSpeed-Ulysses); "hybrid": ulysses within groups of devices that form a ring.
RING_VARIANTS: tuple[RingVariant, ...] = ("ring", "all_gather", "ulysses", "hybrid")

# "collective": collectives between the kernels, which the compiler overlaps with them; "remote":
# the kernels send while they compute, on TPUs only.
RING_TRANSFERS: tuple[RingTransfer, ...] = ("collective", "remote")

# A finite stand-in for -inf where a difference of two of them must not become NaN.
MASK_VALUE = -1e30

# The operands with gradients, in the order in which kernels return them; see `differentiable_names`
# for those of score mods.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


class AttentionMechanism(str, enum.Enum):
  """Names of the attention mechanisms."""

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
  MULTI_LATENT_ATTENTION = "multi_latent_attention"
  MULTI_LATENT_RAGGED_PAGE_ATTENTION = "multi_latent_ragged_page_attention"
  MULTI_LATENT_RAGGED_PAGE_ATTENTION_V1 = "multi_latent_ragged_page_attention"
  MULTI_LATENT_RAGGED_PAGE_ATTENTION_V2 = "multi_latent_ragged_page_attention"

  def __str__(self) -> str:
    return self.value

  @classmethod
  def _missing_(cls, value: object) -> "AttentionMechanism | None":
    return cls.__members__.get(str(value).upper()) if value in MECHANISM_ALIASES else None


# Further names of mechanisms, which mean the same.
MECHANISM_ALIASES = tuple(f"multi_latent_ragged_page_attention_v{n}" for n in (1, 2))


class BlockSizes(NamedTuple):
  """Block sizes of a block-wise kernel, in tokens; None: the tuned value."""

  block_q: int | None = None  # query tokens per step of the forward
  block_kv: int | None = None  # key tokens per step of the forward
  block_q_backward: int | None = None  # query tokens per step of the backward
  block_kv_backward: int | None = None  # key tokens per step of the backward
  block_heads: int | None = None  # key heads computed together
  vmem_limit_bytes: int | None = None  # vector memory of a TPU kernel; None: as much as it needs


class RingConfig(NamedTuple):
  """Sharding of a sequence over `OperationMetadata.sequence_axis_name` by mechanism `ring`."""

  variant: RingVariant = "ring"
  layout: TokenOrder = "contiguous"  # the order of the tokens of every array along T and S
  heads_axis_name: str | None = None  # hybrid only: the mesh axis of the all-to-all, the faster one
  transfer: RingTransfer = "collective"  # how keys and values move around a ring


class LatentOptions(NamedTuple):
  """Latent rows in place of keys and values, as DeepSeek-V2 stores them.

  `key` of a call is then one row [B, S, latent + rope] for each token, and `value` None: a row is
  the key of all heads, and its first latent_width numbers are their value.

  Without up-projections queries are absorbed, [B, T, H, latent + rope], and outputs are weighted
  latents [B, T, H, latent]. With them queries are those of heads, [B, T, H, nope + rope], and
  outputs [B, T, H, E]; whether they or the rows are projected does not change the result.
  """

  latent_width: int = 512  # DeepSeek's kv_lora_rank
  rope_width: int = 64  # of the rotary part, which follows the latents; qk_rope_head_dim
  nope_width: int | None = None  # of the unrotated part of up-projected keys; qk_nope_head_dim
  key_up: Array | None = None  # [latent, H, nope]
  value_up: Array | None = None  # [latent, H, E]


class MaskOperands(NamedTuple):
  """Arrays of a mask, and the global numbers of the batch rows and heads of a shard.

  Custom predicates and the dropout mask are functions of the global numbers.
  """

  arrays: tuple[Array, ...] = ()  # the leaves of the mask, in tree order
  batch_index: Array | None = None  # int32 [B]: global batch row; None: 0..B-1
  head_offset: Array | None = None  # int32 [B or 1]: global number of head 0; None: 0
  rows: "CacheRows | None" = None  # of a dense cache, for implementations that read them


class Operands(NamedTuple):
  """Arrays of one attention, in layout bthd."""

  query: Array  # [B, T, H, D]
  key: Array  # [B, S, K, D]
  value: Array  # [B, S, K, E]
  bias: Array | None = None  # [B or 1, H or 1, T or 1, S or 1], added to the logits
  mask: MaskOperands = MaskOperands()
  sinks: Array | None = None  # float [B or 1, H]: a logit per head without a value
  dropout_key: Array | None = None  # uint32 [B or 1, 2]
  key_scale: Array | None = None  # float32 [B, S, K], or [B, S, K, groups] with D / 2 bytes of keys
  value_scale: Array | None = None  # of quantized values
  mods: tuple[Array, ...] = ()  # of the score mod, each [B or 1, H or 1, ...]; see `score_mods`
  up: tuple[Array, ...] = ()  # as in `PagedOperands`; no kernel reads them


class PagedOperands(NamedTuple):
  """Arrays of one attention over pages."""

  query: Array  # [T, H, D], the requests' queries one after the other
  cache: "Pages"
  metadata: "PagesMetadata"
  sinks: Array | None = None  # float [H]: a logit per head without a value
  key: Array | None = None  # [T, K, D]: to be written first; None: all keys are in the pages
  value: Array | None = None  # [T, K, E]
  stripe: "Stripe | None" = None  # the device's, to which tables and cache belong; None: all pages
  mods: tuple[Array, ...] = ()  # of the score mod, each [1, H or 1, ...], with T or 1 queries
  head_offset: Array | None = None  # int32 scalar, the global number of head 0; None: 0
  up: tuple[Array, ...] = ()  # (key_up [latent, H, nope], value_up [latent, H, E]) of latent rows


_MODS = "mods."  # before the number of an array of the score mod


def operand(operands: Operands | PagedOperands, name: str) -> Array:
  """Returns an operand by its name: a field, or "mods.N" for an array of the score mod."""
  return operands.mods[mod_number(name)] if is_mod(name) else getattr(operands, name)


def is_mod(name: str) -> bool:
  """Returns whether an operand is an array of the score mod."""
  return name.startswith(_MODS)


def mod_number(name: str) -> int:
  """Returns the number of an array of the score mod, by its name."""
  return int(name.removeprefix(_MODS))


def mod_names(operands: Operands | PagedOperands) -> tuple[str, ...]:
  """Returns the names of the arrays of the score mod."""
  return tuple(f"{_MODS}{n}" for n in range(len(operands.mods)))


def with_operands(operands: Operands, values: Mapping[str, Array | None]) -> Operands:
  """Returns operands with some of them replaced, by their names; see `operand`."""
  fields: dict[str, Any] = {name: x for name, x in values.items() if not is_mod(name)}
  mods = (values.get(name, x) for name, x in zip(mod_names(operands), operands.mods))
  return operands._replace(**fields, mods=cast(tuple[Array, ...], tuple(mods)))


def differentiable_names(operands: Operands) -> tuple[str, ...]:
  """Returns the names of the operands with gradients that are given."""
  return (*(name for name in DIFFERENTIABLE if getattr(operands, name) is not None),
          *differentiable_mods(operands))


def differentiable_mods(operands: Operands | PagedOperands) -> tuple[str, ...]:
  """Returns the names of the arrays of the score mod with gradients."""
  return tuple(name for name, x in zip(mod_names(operands), operands.mods)
               if jnp.issubdtype(x.dtype, jnp.inexact))


# Makes a tree like `Operands` of what stands for arrays: of shapes, or of PartitionSpecs.
operands_like: Callable[..., Operands] = Operands

# A structure, because some releases of jaxlib cannot compare a structure with None.
NO_SCORE_MOD: jax.tree_util.PyTreeDef = jax.tree.structure(None)


class AttentionSpec(NamedTuple):
  """Static description of one attention; hashable."""

  mask: jax.tree_util.PyTreeDef  # of a Mask, whose leaves are Operands.mask.arrays
  softmax_scale: float
  logits_soft_cap: float | None = None
  dropout_prob: float = 0.0
  softmax_dtype: DTypeLike = jnp.dtype("float32")
  precision: jax.lax.PrecisionLike = None  # of the two products
  normalize_output: bool = True
  out_dtype: DTypeLike | None = None  # of a partial sum, to which others add; None: the query's
  score_mod: jax.tree_util.PyTreeDef = NO_SCORE_MOD  # of the last term, see Operands.mods
  # Of latent rows: a value is the first `latent_width` numbers of its key. `Operands.value` has no
  # numbers then, or the rest of each key, where 8-bit keys store it apart. None: values are given.
  latent_width: int | None = None
  row_width: int | None = None  # the numbers of a latent row before its padding; None: it has none
  matrix_depth: int = 128  # numbers of a row that the TPU's matrix unit multiplies at once
  num_cores: int = 1  # cores of a TPU that share a kernel
  int8_products: bool = False  # whether the TPU's matrix unit multiplies int8 by int8

  @property
  def has_score_mod(self) -> bool:
    """Whether scores go through a score mod."""
    return self.score_mod != NO_SCORE_MOD


def holds_pairs(scale: Array | None, x: Array) -> bool:
  """Returns whether keys or values hold two numbers in a byte, by their scales."""
  return scale is not None and scale.ndim == x.ndim


def value_width(operands: Operands, spec: AttentionSpec) -> int:
  """Returns the width of the values that a kernel weighs, E of its output."""
  held = 1 + holds_pairs(operands.value_scale, operands.value)
  return operands.value.shape[-1] * held if spec.latent_width is None else spec.latent_width


def output_width(operands: Operands, spec: AttentionSpec) -> int:
  """Returns the width of a call's output: that of the values, after any up-projection."""
  return operands.up[1].shape[-1] if operands.up else value_width(operands, spec)


class PagedSpec(NamedTuple):
  """Static description of one attention over pages; hashable."""

  softmax_scale: float
  logits_soft_cap: float | None = None
  causal: bool = True
  window: tuple[int | None, int | None] = (None, None)  # (left, right), tokens; None: unbounded
  softmax_dtype: DTypeLike = jnp.dtype("float32")
  precision: jax.lax.PrecisionLike = None  # of the two products
  chunk_size: int | None = None  # keys of other chunks of this many positions are hidden (tokens)
  out_dtype: DTypeLike | None = None  # None: the query's dtype
  score_mod: jax.tree_util.PyTreeDef = NO_SCORE_MOD  # of the last term, see PagedOperands.mods
  num_cores: int = 1  # cores of a TPU that share a kernel
  int8_products: bool = False  # whether the TPU's matrix unit multiplies int8 by int8

  @property
  def has_score_mod(self) -> bool:
    """Whether scores go through a score mod."""
    return self.score_mod != NO_SCORE_MOD


OperandsT = TypeVar("OperandsT")  # Operands, or PagedOperands of an attention over pages
SpecT = TypeVar("SpecT")  # AttentionSpec, or PagedSpec


class Call(NamedTuple, Generic[OperandsT, SpecT]):
  """One normalized attention: the only argument of every mechanism."""

  operands: OperandsT
  spec: SpecT
  block_sizes: BlockSizes = BlockSizes()
  placement: "Placement | None" = None  # None: one device
  return_lse: bool = False
  return_weights: bool = False


class NotAnArrayError(AttributeError, TypeError):
  """An AttentionOutput was used as an array; an AttributeError, so that `hasattr` is False."""


class AttentionOutput(NamedTuple):
  """Results of an attention; None where not requested or not existing.

  It is a tuple and no array: arithmetic on it, or with it, is a TypeError.
  """

  attention_outputs: Array  # [B, T, H, E] in the caller's layout, query's dtype
  attention_weights: Array | None = None  # [B, H, T, S], after dropout
  lse: Array | None = None  # float32 [B, H, T], natural logarithm
  # The updated cache of a call that writes to one.
  cache_view: "DenseCache | WindowCache | LatentCache | PagesV3 | PagesLatent | None" = None

  @property
  def out(self) -> Array:
    """Short for `attention_outputs`."""
    return self.attention_outputs


def _not_an_array(used: str, meant: str = "attention(...).attention_outputs") -> NotAnArrayError:
  return NotAnArrayError(f"{used} of an AttentionOutput, a tuple of results; expected the array "
                         f"`{meant}`, or `.out` for short")


def _refuse(operation: str = "") -> Callable[..., object]:
  """Returns a method that refuses an operation of arrays, or the function of numpy it is given."""
  def refuse(self: AttentionOutput, *x: object, copy: object = None, out: object = None,
             dtype: object = None, where: object = None, axis: object = None) -> object:
    raise _not_an_array(operation or f"numpy.{getattr(x[0], '__name__', x[0])}")
  return refuse


def _refuse_conversion(self: AttentionOutput) -> object:
  """Raises a TypeError alone: `hasattr` and `getattr` would hide an AttributeError."""
  raise TypeError(str(_not_an_array("Conversion to an array")))


def _compare(operation: str) -> Callable[..., object]:
  """Returns `==` or `!=`, which is that of tuples; an array or a number is refused."""
  def compare(self: AttentionOutput, other: object) -> object:
    if isinstance(other, (Array, np.ndarray, np.generic, int, float, complex)):
      raise _not_an_array(operation)
    return getattr(tuple, operation)(self, other)
  return compare


def _missing_attribute(self: AttentionOutput, name: str) -> object:
  """Raises an error for an attribute that the tuple lacks."""
  if hasattr(Array, name):
    raise _not_an_array(f".{name}", f"attention(...).attention_outputs.{name}")
  raise AttributeError(f"'AttentionOutput' object has no attribute {name!r}")


def _item(self: AttentionOutput, index: int | slice) -> object:
  """Returns an item or a slice of the tuple; an index of an array is refused."""
  if isinstance(index, slice) or hasattr(index, "__index__") and not isinstance(
      index, (Array, np.ndarray)):
    return tuple.__getitem__(self, index)
  raise _not_an_array("An index of an array", "attention(...).attention_outputs[...]")


# A tuple would answer `* 2`, `== 0` and `+ (x,)` in silence. Set here, so that a type checker
# reports them. JAX reads `__jax_array__`, jax.grad of a function that returns the tuple, too.
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
for _name in (*_BINARY, *(f"r{_name}" for _name in _BINARY), "lt", "le", "gt", "ge", "neg", "pos",
              "abs", "invert", "array"):
  setattr(AttentionOutput, f"__{_name}__", _refuse(f"__{_name}__"))
for _name, _method in zip("array_ufunc array_function eq ne getitem getattr".split(), (
    _refuse(), _refuse(), _compare("__eq__"), _compare("__ne__"), _item, _missing_attribute)):
  setattr(AttentionOutput, f"__{_name}__", _method)
setattr(AttentionOutput, "__jax_array__", property(_refuse_conversion))
setattr(AttentionOutput, "__dir__", lambda self: sorted({*dir(type(self))} - {"__jax_array__"}))


def at_least_float32(dtype: DTypeLike) -> np.dtype:
  """Returns the wider of a dtype and float32, also where JAX must not promote dtypes."""
  return np.promote_types(jnp.dtype(dtype), np.float32)


def are_known(*sizes: object) -> bool:
  """Returns whether all sizes are numbers; those of a `jax.export` may be symbolic."""
  return all(isinstance(size, (int, np.integer)) for size in sizes)


Integer = TypeVar("Integer", int, Array)


def cdiv(numerator: Integer, denominator: int) -> Integer:
  """Returns the quotient rounded up."""
  return -(-numerator // denominator)


for _static in (BlockSizes, RingConfig, AttentionSpec, PagedSpec):
  jax.tree_util.register_static(_static)
