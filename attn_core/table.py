"""The one table of the library: (mechanism, platform) -> Implementation.

Literal: no decorators, nothing registers itself. A new kernel or mechanism is a
new row here.
"""

from typing import Callable, NamedTuple

import jax.numpy as jnp

from attn_core.mechanisms import flash, sdpa, vanilla
from attn_core.types import PLATFORMS, AttentionMechanism, AttentionOutput, Call

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
    "cache": "a cache",
}


class Request(NamedTuple):
  """What a call needs, as far as the choice of an implementation goes."""

  features: dict  # feature -> how the caller wrote it, for the error message
  dtype: object  # of the query
  width: int  # D


# Memory in the sequence length.
LINEAR, QUADRATIC = "linear", "quadratic"
LINEAR_UNMASKED = "linear without mask or bias"


class Implementation(NamedTuple):
  """One cell of the table."""

  run: Callable[[Call], AttentionOutput]
  features: frozenset[str]
  memory: str  # LINEAR, QUADRATIC or LINEAR_UNMASKED
  limits: Callable[[Request], str | None] = lambda request: None  # a reason to refuse, or None


def _cudnn_limits(request: Request) -> str | None:
  if request.dtype not in (jnp.float16, jnp.bfloat16):
    return f"dtype {jnp.dtype(request.dtype).name}: cuDNN computes float16 and bfloat16 only"
  if request.width % 8 or request.width > 256:
    return f"head_dim {request.width}: cuDNN needs a multiple of 8 up to 256"
  return None


def _sdpa_limits(request: Request) -> str | None:
  # float64 is not among the features either: jax.nn's softmax is float32.
  if "lse" in request.features and jnp.dtype(request.dtype).itemsize < 4:
    return (f"return_lse with dtype {jnp.dtype(request.dtype).name}: jax.nn rounds the lse to it, "
            "and the lse is float32 here")
  return None


_EVERYTHING = frozenset(FEATURES) - {"vmem_limit_bytes", "cache"}
_BLOCKWISE = _EVERYTHING - {"weights"}
_TPU = _BLOCKWISE - {"float16", "float64", "softmax_dtype", "mask_operands"} | {"vmem_limit_bytes"}
_VANILLA = _EVERYTHING - {"block_sizes", "optimized"}
_SDPA = frozenset({"gqa", "float16", "causal", "window", "chunk", "segments",
                   "positions", "mask", "mask_operands", "bias", "lse"})
_CUDNN = frozenset({"gqa", "float16", "causal", "mask", "mask_operands", "bias"})

_xla = Implementation(flash.xla, _BLOCKWISE, LINEAR)
_tpu = Implementation(flash.tpu, _TPU, LINEAR)
_dense = Implementation(vanilla.vanilla, _VANILLA, QUADRATIC)
_sdpa = Implementation(sdpa.xla, _SDPA, QUADRATIC, _sdpa_limits)
_cudnn = Implementation(sdpa.cudnn, _CUDNN, LINEAR_UNMASKED, _cudnn_limits)

TABLE = {
    ("vanilla", "cpu"): _dense,
    ("vanilla", "gpu"): _dense,
    ("vanilla", "tpu"): _dense,
    ("sdpa", "cpu"): _sdpa,
    ("sdpa", "gpu"): _cudnn,
    ("sdpa", "tpu"): _sdpa,
    ("cudnn", "gpu"): _cudnn,
    ("cuda_flash_attn2", "gpu"): _cudnn,
    ("blockwise", "cpu"): _xla,
    ("blockwise", "gpu"): _xla,
    ("blockwise", "tpu"): _xla,
    ("flash_attn2", "cpu"): _xla,
    ("flash_attn2", "gpu"): _xla,
    ("flash_attn2", "tpu"): _tpu,
    ("blocksparse", "cpu"): _xla,
    ("blocksparse", "gpu"): _xla,
    ("blocksparse", "tpu"): _tpu,
}

# Names without a row, and why.
_NEEDS_GPU = "it runs on NVIDIA GPUs only: platform 'gpu'"
_LATER = "it is not part of this version"
MISSING = {
    "cudnn": _NEEDS_GPU,
    "cuda_flash_attn2": _NEEDS_GPU,
    "ring": _LATER,
    "autoregressive_decodeattn": _LATER,
    "page_attention": _LATER,
    "ragged_page_attention_v2": _LATER,
    "ragged_page_attention_v3": _LATER,
}

# What `auto` tries, in this order, those first whose memory is linear for the call.
AUTO = {
    "cpu": ("flash_attn2", "vanilla"),
    "gpu": ("cudnn", "flash_attn2", "vanilla"),
    "tpu": ("flash_attn2", "blockwise", "vanilla"),
}


class Verdict(NamedTuple):
  """What one mechanism answered to a request."""

  mechanism: str
  reasons: tuple[str, ...]  # why it refuses; empty: it can


def _linear(mechanism: str, platform: str, request: Request) -> bool:
  memory = TABLE[mechanism, platform].memory
  return memory == LINEAR or (memory == LINEAR_UNMASKED
                              and not {"mask", "bias"} & set(request.features))


def names() -> tuple[str, ...]:
  """Every mechanism's name."""
  return tuple(mechanism.value for mechanism in AttentionMechanism)


def ask(mechanism: str, platform: str, request: Request) -> Verdict:
  """Whether a mechanism can do what is asked, and if not, every reason why."""
  implementation = TABLE.get((mechanism, platform))
  if implementation is None:
    return Verdict(mechanism, (f"no implementation on platform {platform!r}: "
                               f"{MISSING[mechanism]}",))
  reasons = [f"{written} ({FEATURES[feature]}) is not supported"
             for feature, written in request.features.items()
             if feature not in implementation.features]
  limit = implementation.limits(request)
  return Verdict(mechanism, tuple(reasons + ([limit] if limit else [])))


def ask_all(platform: str, request: Request) -> tuple[Verdict, ...]:
  """Every mechanism's answer, those that `auto` tries first in front."""
  order = [*AUTO[platform], *(name for name in names() if name not in AUTO[platform])]
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
  able = [verdict.mechanism for verdict in ask_all(platform, request) if not verdict.reasons]
  if mechanism == "auto":
    order = sorted(AUTO[platform], key=lambda name: not _linear(name, platform, request))
    verdicts = [ask(name, platform, request) for name in order]
    for verdict in verdicts:
      if not verdict.reasons:
        return verdict.mechanism
  else:
    verdicts = [ask(mechanism, platform, request)]
    if not verdicts[0].reasons:
      return mechanism
  refusals = "; ".join(f"{v.mechanism}: {', '.join(v.reasons)}" for v in verdicts)
  cure = f"mechanism={' or '.join(map(repr, able))} can" if able else "no mechanism here can"
  raise NotImplementedError(f"mechanism={mechanism!r} on platform {platform!r} refuses. "
                            f"{refusals}. On this platform {cure}.")
