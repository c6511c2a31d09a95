"""The one table of the library: (mechanism, place) -> Implementation.

A place is a platform, or one compute capability of GPUs, whose row then goes before the platform's.
Literal: no decorators, nothing registers itself. A new kernel or mechanism is a new row here.
"""

import re
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.kernels.gpu.split_kv import decode as gpu_decode
from attn_core.kernels.gpu.flash import tiling as gpu_tuned
from attn_core.kernels.tpu.ragged import decode as tpu_decode
from attn_core.masks import leaves as algebra
from attn_core.mechanisms import (decode, flash, paged, sdpa, dense as vanilla)
from attn_core.mechanisms.context_parallel import mechanism as ring
from attn_core.types import (PLATFORMS, RING_TRANSFERS, AttentionMechanism, AttentionOutput,
                             Call)

# What a call can ask for beyond query, key and value; a mechanism honours it or refuses it by name.
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
    "mask_operands": "a custom mask with arrays of its own",
    "bias": "a bias, with its gradient",
    "sinks": "sinks (softmax_aux), with their gradient",
    "soft_cap": "a soft cap on the logits",
    "dropout": "dropout",
    "lse": "returning the lse",
    "lse_gradient": "differentiating the lse",
    "weights": "returning the attention weights",
    "unnormalised": "normalize_output=False",
    "precision": "the precision of the products",
    "softmax_dtype": "a softmax dtype other than float32",
    "block_sizes": "block sizes",
    "optimized": "optimized=True: a linear-memory kernel",
    "vmem_limit_bytes": "a limit on TPU vector memory",
    "sequence_layout": "tokens spread in another order than theirs",
    "cache": "a dense or sliding-window cache",
    "quantized": "keys and values in 8 bits",
    "pages": "a cache in pages",
}


class Request(NamedTuple):
  """What a call needs, as far as the choice of an implementation goes."""

  features: dict  # feature -> how the caller wrote it, for the error message
  dtype: object  # of the query
  width: int  # D
  value_width: int | None = None  # E; None: D
  mask: Any = jax.tree.structure(algebra.full())  # the mask's tree structure
  lengths: tuple[int, int] = (2, 2)  # (T, S)
  bias_dtype: object = None
  capability: str | None = None  # compute capability of the GPU; None: not known, or no GPU
  pages: str | None = None  # the layout of a cache in pages, by the name of its type
  # Why the TPU kernel over pages refuses, by shapes that only it asks for; None: it does not.
  tpu_pages: str | None = None
  gpu_pages: str | None = None  # the same of the kernel for Hopper
  transfer: str = RING_TRANSFERS[0]  # `RingConfig.transfer`
  spread_pages: str | None = None  # why pages cannot be spread over the mesh; None: they can


# Memory in the sequence length.
LINEAR, QUADRATIC = "linear", "quadratic"
LINEAR_BANDED = "linear without bias or mask written out"


class Implementation(NamedTuple):
  """One cell of the table."""

  run: Callable[[Call], AttentionOutput]
  features: frozenset[str]
  memory: str  # LINEAR, QUADRATIC or LINEAR_BANDED
  limits: Callable[[Request], str | None] = lambda request: None  # a reason to refuse, or None
  # Another kernel for the same, which runs wherever it honours everything in linear memory.
  preferred: "Implementation | None" = None
  spreads_sequence: bool = False  # over `OperationMetadata.sequence_axis_name`
  shards_keys: bool = False  # whether mesh axes may shard the key sequence

  @property
  def name(self) -> str:
    """The function that runs, by its module below mechanisms/."""
    return f"{self.run.__module__.rpartition('.')[2]}.{self.run.__name__}"


def _hopper_limits(request: Request) -> str | None:
  dtype, most = jnp.dtype(request.dtype).name, gpu_tuned.WIDTHS[-1]
  if dtype not in gpu_tuned.DTYPES:
    return f"dtype {dtype}: the kernels for Hopper compute {' and '.join(gpu_tuned.DTYPES)} only"
  widest = max(request.width, request.value_width or 0)
  if widest > most:
    return f"a head_dim of {widest}: the kernels for Hopper compute widths up to {most}"
  return None


def _is_banded(request: Request) -> bool:
  return sdpa.banded(request.mask, *request.lengths, "bias" in request.features) is not None


def _cudnn_limits(request: Request) -> str | None:
  dtype, capability = jnp.dtype(request.dtype).name, request.capability
  numbers = capability and re.fullmatch(r"(\d+)\.\d+", capability)
  if capability and not numbers:
    return f"a GPU of kind {capability}: cuDNN runs on NVIDIA's only"
  major = int(numbers[1]) if numbers else None
  if major is not None and major < 8:
    return f"compute capability {capability}: cuDNN's attention needs 8.0 or newer"
  if dtype not in ("float16", "bfloat16"):
    return f"dtype {dtype}: cuDNN computes float16 and bfloat16 only"
  if request.width % 8 or request.width > (256 if major == 9 else 128):
    return (f"head_dim {request.width}: cuDNN needs a multiple of 8 up to 128, or up to 256 with "
            "compute capability 9.0")
  if request.bias_dtype is not None and request.bias_dtype != request.dtype:
    return (f"a bias of dtype {jnp.dtype(request.bias_dtype).name} with queries of {dtype}: cuDNN "
            "takes a bias in the dtype of the queries")
  if {"bias", "mask"} & set(request.features) or _is_banded(request):
    if "optimized" in request.features and not _is_linear(LINEAR_BANDED, request):
      return "optimized=True with a bias or a mask: cuDNN's memory would be quadratic"
    return None
  written = " and ".join(request.features[name] for name in ("window", "positions")
                         if name in request.features)
  if not written:
    return None  # it is by a feature that the mask is no band, and that is refused by its name
  return (f"{written}: cuDNN knows causal masks by row and column, with a window to the left where "
          "there are no more queries than keys; any other has to be written out as `mask`")


def _cudnn_gradient_limits(request: Request) -> str | None:
  """What cuDNN refuses, and what it does not differentiate, for whoever is to be differentiable."""
  reason = _cudnn_limits(request)
  if reason is None and request.capability is None:
    # It compiles only where there is a GPU to ask.
    return "the compute capability of the GPU is not known"
  if reason is None and any(length % 2 for length in request.lengths):
    return (f"{request.lengths[0]} queries and {request.lengths[1]} keys: cuDNN's gradients are "
            "taken for even numbers of both only, as JAX has them beside a bias")
  return reason


def _sdpa_limits(request: Request) -> str | None:
  # float64 is not among the features either: jax.nn's softmax is float32.
  dtype = jnp.dtype(request.dtype)
  if dtype.itemsize < 2:
    return f"dtype {dtype.name}: jax.nn mixes its logits with the operands, and 8 bits do not mix"
  if "lse" in request.features and dtype.itemsize < 4:
    return (f"return_lse with dtype {dtype.name}: jax.nn rounds the lse to it, and the lse is "
            "float32 here")
  return None


def _collective_limits(request: Request) -> str | None:
  if request.transfer != "collective":
    return (f"ring.transfer={request.transfer!r}: the kernels for TPUs send by themselves; "
            "'collective' runs on every platform")
  return None


def _remote_limits(request: Request) -> str | None:
  if request.transfer != "remote":
    return f"ring.transfer={request.transfer!r}: it is for 'remote'"
  return None


_EVERYTHING = frozenset(FEATURES) - {"vmem_limit_bytes", "quantized", "pages", "sequence_layout"}
_BLOCKWISE = _EVERYTHING - {"weights"}
_TPU = _BLOCKWISE - {"float16", "float64", "softmax_dtype", "mask_operands"} | {"vmem_limit_bytes"}
_VANILLA = _EVERYTHING - {"block_sizes", "optimized"}
_DECODE = _BLOCKWISE - {"bias", "dropout"} | {"quantized"}
# jax.nn compiles float16 for GPUs only.
_SDPA = frozenset({"gqa", "causal", "window", "chunk", "segments",
                   "positions", "mask", "mask_operands", "bias", "lse"})
_CUDNN = frozenset({"gqa", "float16", "causal", "window", "positions", "mask", "mask_operands",
                    "bias", "optimized"})

_xla = Implementation(flash.xla, _BLOCKWISE, LINEAR)
_tpu = Implementation(flash.tpu, _TPU, LINEAR)
_dense = Implementation(vanilla.vanilla, _VANILLA, QUADRATIC)
_sdpa = Implementation(sdpa.xla, _SDPA, QUADRATIC, _sdpa_limits)
_cudnn = Implementation(sdpa.cudnn, _CUDNN, LINEAR_BANDED, _cudnn_limits)
# Products of 16-bit operands with float32 sums: there is no precision to choose.
_HOPPER = _BLOCKWISE - {"float64", "softmax_dtype", "mask_operands", "precision"}
_hopper = Implementation(flash.gpu, _HOPPER, LINEAR, _hopper_limits)
_ring, _ring_tpu, _ring_hopper = (
    kernel._replace(run=run, features=kernel.features - {"cache"} | {"sequence_layout"},
                    spreads_sequence=True)
    for kernel, run in ((_xla, ring.xla), (_tpu, ring.tpu), (_hopper, ring.gpu)))
_ring = _ring._replace(limits=_collective_limits)
_ring_tpu = _ring_tpu._replace(preferred=_ring_tpu._replace(
    run=ring.tpu_remote, limits=_remote_limits))
_decode = Implementation(decode.xla, _DECODE, LINEAR, shards_keys=True)
_decode_hopper = Implementation(
    decode.gpu, _DECODE & _HOPPER | {"quantized"}, LINEAR,
    lambda request: gpu_decode.refusal(
        request.dtype, (request.width, request.value_width or request.width), request.lengths,
        "quantized" in request.features), shards_keys=True)
_gpu = _xla._replace(preferred=_cudnn._replace(limits=_cudnn_gradient_limits))

_PAGED = frozenset({"gqa", "value_width", "float16", "float64", "causal", "window", "sinks",
                    "soft_cap", "lse", "lse_gradient", "precision", "softmax_dtype", "block_sizes",
                    "optimized", "pages"})


def _reads(cache: str) -> Callable[[Request], str | None]:
  """Limits of a mechanism that reads pages of one layout."""
  def limits(request: Request) -> str | None:
    given = request.pages if "pages" in request.features else "no cache_view in pages"
    return request.spread_pages if given in (None, cache) else f"{given}: it reads a {cache}"
  return limits


def _with_tpu(cell: Implementation, run,
              limits=lambda request: request.tpu_pages) -> Implementation:
  """The cell with a TPU kernel for what it takes."""
  lacks = {"float16", "float64", "precision", "softmax_dtype"}
  return cell._replace(preferred=cell._replace(
      run=run, limits=limits, features=cell.features - lacks))


def _with_hopper(cell: Implementation, run) -> Implementation:
  """The cell over pages with a kernel for Hopper for what it takes."""
  return cell._replace(preferred=cell._replace(
      run=run, limits=lambda request: request.gpu_pages,
      features=cell.features - {"float64", "precision", "softmax_dtype"}))


def _tpu_decode_limits(request: Request) -> str | None:
  widths = request.width, request.value_width or request.width
  return tpu_decode.refusal(request.dtype, widths, request.lengths[0])


_paged_v1 = Implementation(paged.xla, _PAGED, LINEAR, _reads("PagesV1"))
_paged_v2 = Implementation(paged.xla, _PAGED - {"value_width"}, LINEAR, _reads("PagesV2"))
_paged_v3 = Implementation(paged.xla_writing, _PAGED - {"value_width"}, LINEAR, _reads("PagesV3"))

TABLE = {
    ("vanilla", "cpu"): _dense,
    ("vanilla", "gpu"): _dense,
    ("vanilla", "tpu"): _dense,
    ("sdpa", "cpu"): _sdpa,
    ("sdpa", "gpu"): _cudnn,
    ("sdpa", "tpu"): _sdpa,
    ("cudnn", "gpu"): _cudnn,
    ("cuda_flash_attn2", "gpu"): _cudnn,
    ("cuda_flash_attn2", "gpu 9.0"): _hopper,
    ("blockwise", "cpu"): _xla,
    ("blockwise", "gpu"): _xla,
    ("blockwise", "tpu"): _xla,
    ("flash_attn2", "cpu"): _xla,
    ("flash_attn2", "gpu"): _gpu,
    ("flash_attn2", "gpu 9.0"): _hopper,
    ("flash_attn2", "tpu"): _tpu,
    ("blocksparse", "cpu"): _xla,
    ("blocksparse", "gpu"): _gpu,
    ("blocksparse", "gpu 9.0"): _hopper,
    ("blocksparse", "tpu"): _tpu,
    ("page_attention", "cpu"): _paged_v1,
    ("page_attention", "gpu"): _paged_v1,
    ("page_attention", "gpu 9.0"): _with_hopper(_paged_v1, paged.gpu),
    ("page_attention", "tpu"): _with_tpu(_paged_v1, paged.tpu),
    ("ragged_page_attention_v2", "cpu"): _paged_v2,
    ("ragged_page_attention_v2", "gpu"): _paged_v2,
    ("ragged_page_attention_v2", "gpu 9.0"): _with_hopper(_paged_v2, paged.gpu),
    ("ragged_page_attention_v2", "tpu"): _with_tpu(_paged_v2, paged.tpu),
    ("ragged_page_attention_v3", "cpu"): _paged_v3,
    ("ragged_page_attention_v3", "gpu"): _paged_v3,
    ("ragged_page_attention_v3", "gpu 9.0"): _with_hopper(_paged_v3, paged.gpu_writing),
    ("ragged_page_attention_v3", "tpu"): _with_tpu(_paged_v3, paged.tpu_writing),
    ("ring", "cpu"): _ring,
    ("ring", "gpu"): _ring,
    ("ring", "gpu 9.0"): _ring._replace(preferred=_ring_hopper),
    ("ring", "tpu"): _ring_tpu,
    ("autoregressive_decodeattn", "cpu"): _decode,
    ("autoregressive_decodeattn", "gpu"): _decode,
    ("autoregressive_decodeattn", "gpu 9.0"): _decode._replace(preferred=_decode_hopper),
    ("autoregressive_decodeattn", "tpu"): _with_tpu(_decode, decode.tpu, _tpu_decode_limits),
}

# Names without a row, and why.
_NEEDS_GPU = "it runs on NVIDIA GPUs only: platform 'gpu'"
MISSING = {
    "cudnn": _NEEDS_GPU,
    "cuda_flash_attn2": _NEEDS_GPU,
}

# What `auto` tries, in this order, those first whose memory is linear for the call.
AUTO = {
    "cpu": ("flash_attn2", "autoregressive_decodeattn", "ring", "vanilla"),
    "gpu": ("flash_attn2", "blockwise", "autoregressive_decodeattn", "ring", "vanilla"),
    "tpu": ("flash_attn2", "blockwise", "autoregressive_decodeattn", "ring", "vanilla"),
}

# What `auto` tries before these for one query a row: on CPUs, decoding takes about half the time.
AUTO_ONE_QUERY = {"cpu": "autoregressive_decodeattn"}


def _auto_order(platform: str, request: Request) -> list[str]:
  """The names that `auto` tries, of either kind of memory."""
  first = AUTO_ONE_QUERY.get(platform) if request.lengths[0] == 1 else None
  return sorted(AUTO[platform], key=lambda name: name != first)


class Verdict(NamedTuple):
  """What one mechanism answered to a request."""

  mechanism: str
  reasons: tuple[str, ...]  # why it refuses; empty: it can
  kernel: str | None = None  # what would run; None: it refuses
  why: str = ""  # why that kernel and no other, where there are several

  def __str__(self):
    if self.reasons:
      return "; ".join(self.reasons)
    return f"can, by {self.kernel}{self.why and ', '}{self.why}"


def find(mechanism: str, platform: str, capability: str | None = None) -> Implementation | None:
  """The cell of a mechanism on a platform, for GPUs of a compute capability."""
  special = TABLE.get((mechanism, f"{platform} {capability}"))
  return TABLE.get((mechanism, platform)) if special is None else special


def kernel(mechanism: str, platform: str, request: Request) -> Implementation:
  """What runs a request that the mechanism takes."""
  found = find(mechanism, platform, request.capability)
  return found.preferred if found.preferred and not _passed_over(found, request) else found


def _why(found: Implementation, general: bool, request: Request) -> str:
  """Why a cell's kernel runs; `general`: the cell is the whole platform's."""
  if found.preferred is None:
    return "" if general else f"which is for compute capability {request.capability}"
  passed_over = _passed_over(found, request)
  return (f"not by {'; '.join(passed_over)}" if passed_over
          else f"which goes before {found.name}")


def _passed_over(found: Implementation, request: Request) -> tuple[str, ...]:
  """Why the preferred kernel does not run."""
  if found.preferred is None:
    return ()
  reasons = _reasons(found.preferred, request)
  if not reasons and not _is_linear(found.preferred.memory, request):
    reasons = ("its memory would be quadratic",)
  return tuple(f"{found.preferred.name}: {reason}" for reason in reasons)


def _reasons(implementation: Implementation, request: Request) -> tuple[str, ...]:
  """Why an implementation refuses a request; empty: it does not."""
  reasons = [f"{written} ({FEATURES[feature]}) is not supported"
             for feature, written in request.features.items()
             if feature not in implementation.features]
  limit = implementation.limits(request)
  return tuple(reasons + ([limit] if limit else []))


def _is_linear(memory: str, request: Request) -> bool:
  return memory == LINEAR or (memory == LINEAR_BANDED and "bias" not in request.features
                              and _is_banded(request))


def names() -> tuple[str, ...]:
  """Every mechanism's name."""
  return tuple(mechanism.value for mechanism in AttentionMechanism)


def ask(mechanism: str, platform: str, request: Request) -> Verdict:
  """Whether a mechanism can do what is asked, and if not, every reason why."""
  found = find(mechanism, platform, request.capability)
  if found is None:
    return Verdict(mechanism, (f"no implementation on platform {platform!r}: "
                               f"{MISSING[mechanism]}",))
  reasons = _reasons(found, request)
  if reasons:
    return Verdict(mechanism, reasons)
  why = _why(found, found is TABLE.get((mechanism, platform)), request)
  if request.lengths[0] == 1 and mechanism == AUTO_ONE_QUERY.get(platform):
    why = f"which auto tries first on {platform} for one query a row{why and '; '}{why}"
  return Verdict(mechanism, (), kernel(mechanism, platform, request).name, why)


def ask_all(platform: str, request: Request) -> tuple[Verdict, ...]:
  """Every mechanism's answer, those that `auto` tries first in front."""
  order = _auto_order(platform, request)
  order += [name for name in names() if name not in order]
  return tuple(ask(name, platform, request) for name in order if name != "auto")


def choose(mechanism: str, platform: str, request: Request) -> str:
  """The name of the mechanism that runs.

  A mechanism asked for by name is never replaced. `auto` takes the first of
  AUTO that honours everything, and a quadratic one only where no linear one does.

  Raises:
    ValueError: an unknown mechanism or platform.
    NotImplementedError: the mechanism refuses; the message says why, and who would not.
  """
  mechanism = mechanism.value if isinstance(mechanism, AttentionMechanism) else mechanism
  for what, value, known in (("mechanism", mechanism, names()), ("platform", platform, PLATFORMS)):
    if value not in known:
      raise ValueError(f"{what}={value!r}: expected one of {', '.join(map(repr, known))}")
  if mechanism == "auto":
    order = sorted(_auto_order(platform, request), key=lambda name: not _is_linear(
        find(name, platform, request.capability).memory, request))
    verdicts = [ask(name, platform, request) for name in order]
    for verdict in verdicts:
      if not verdict.reasons:
        return verdict.mechanism
  else:
    verdicts = [ask(mechanism, platform, request)]
    if not verdicts[0].reasons:
      return mechanism
  refusals = "; ".join(f"{v.mechanism}: {', '.join(v.reasons)}" for v in verdicts)
  able = [verdict.mechanism for verdict in ask_all(platform, request) if not verdict.reasons]
  cure = f"mechanism={' or '.join(map(repr, able))} can" if able else "no mechanism here can"
  where = "" if request.capability is None else f", compute capability {request.capability},"
  raise NotImplementedError(f"mechanism={mechanism!r} on platform {platform!r}{where} refuses. "
                            f"{refusals}. On this platform {cure}.")
