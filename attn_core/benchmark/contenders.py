# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Contenders of a benchmark: the library's mechanisms, and other libraries (peers).

A contender is prepared for one case and either runs it or raises an error with the reason. Features
that a peer does not support are rejected here by name; its results are checked by the oracle.
"""

import functools
import importlib.metadata
import time
from typing import Any, Callable, Literal, Mapping, NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import table
from attn_core.dispatch import selection
from attn_core.dispatch.capabilities import Implementation
from attn_core.attention import attention
from attn_core.benchmark import cases, flex, splash, torch_arrays
from attn_core.benchmark.cases import Case
from attn_core.masks import materialize
from attn_core.masks.info import MaskInfo
from attn_core.types import LatentOptions


Tensor = Any  # a torch.Tensor; torch is optional


class Inputs(NamedTuple):
  """The arrays of a case."""

  query: jax.Array  # [B, T, H, D]
  key: jax.Array  # [B, S, K, D]
  value: jax.Array  # [B, S, K, E]
  cotangent: jax.Array  # [B, T, H, E], of the output
  sinks: jax.Array | None = None  # float32 [H]
  segment_ids: jax.Array | None = None  # int32 [B, T]
  bias: jax.Array | None = None  # float32 [1, H, T, S]: the score mod, for peers


class Runner(NamedTuple):
  """A contender that is ready to run one case."""

  call: Callable[[int], Any]  # runs n times and returns when the last results are ready
  outputs: Callable[[Any], dict[str, np.ndarray]]  # converts the result of `call`, in layout bthd
  compile_seconds: float | None = None  # tracing and compiling; None: without compilation
  temp_bytes: int | None = None  # temporaries of the compiled program; None: unknown


class Contender(NamedTuple):
  """An implementation of attention."""

  name: str
  prepare: Callable[[Case, Inputs, bool], Runner]  # (case, inputs, with backward)
  package: str  # the package that contains it
  peer: bool = True  # whether it belongs to another library


class Absent(NamedTuple):
  """A peer that cannot be imported."""

  name: str
  reason: str


GRADIENTS = ("d_query", "d_key", "d_value")  # names of the outputs that follow "output"

# (case, inputs) -> output [B, T, H, E]
Attend = Callable[[Case, Inputs], jax.Array]


def mechanisms(names: tuple[str, ...]) -> list[Contender]:
  """The library's mechanisms, by name."""
  return [Contender(name, functools.partial(_prepare, functools.partial(_mechanism, name)),
                    "attn_core", peer=False) for name in names]


def distinct_mechanisms(platform: str, capability: str | None = None) -> tuple[str, ...]:
  """The mechanisms of a platform, with one name for each implementation.

  Args:
    platform: of `types.PLATFORMS`.
    capability: compute capability of the GPU; None: unknown, or not a GPU.
  """
  order = dict.fromkeys((*table.AUTO[platform], *table.names()))
  found: dict[Implementation, str] = {}
  for name in order:
    implementation = selection.find(table.RULES, name, selection.Target(platform, capability))
    if implementation is not None:
      found.setdefault(implementation, name)
  return tuple(found.values())


def peers(platform: str, names: tuple[str, ...] | None = None
          ) -> tuple[list[Contender], list[Absent]]:
  """The peers that can be imported, and those that cannot.

  Args:
    platform: of `types.PLATFORMS`.
    names: the peers to look for, of `peer_names`; None: all.
  """
  found, absent = [], []
  for contender in _known_peers(platform):
    if names is not None and contender.name not in names:
      continue
    reason = _import_error(contender.package)
    if reason is None:
      found.append(contender)
    else:
      absent.append(Absent(contender.name, reason))
  return found, absent


def peer_names(platform: str) -> tuple[str, ...]:
  """The names of all supported peers."""
  return tuple(contender.name for contender in _known_peers(platform))


def _known_peers(platform: str) -> list[Contender]:
  """All supported peers, importable or not."""
  chunked = "xla_chunked" if platform == "cpu" else None
  compiled: list[tuple[str, str, Attend]] = [
      ("jax.nn xla", "jax", functools.partial(_jax_nn, "xla")),
      ("tokamax", "tokamax", functools.partial(tokamax_mechanism, chunked)),
      ("tokamax flex", "tokamax", lambda case, x: flex.attend(case, x[:3])),
      ("ejkernel xla", "ejkernel", _ejkernel)]
  if platform == "gpu":
    compiled.append(("jax.nn cudnn", "jax", functools.partial(_jax_nn, "cudnn")))
  if platform == "tpu":
    compiled.append(("jax splash", "jax", lambda case, x: splash.attend(
        case, (x.query, x.key, x.value), x.segment_ids)))
  known = [Contender(name, functools.partial(_prepare, attend), package)
           for name, package, attend in compiled]
  known.append(Contender("torch sdpa", _prepare_torch, "torch"))
  if platform == "gpu":
    known.append(Contender("flash_attn", _prepare_flash_attn, "flash_attn"))
  return known


def _import_error(package: str) -> str | None:
  """The reason why a package cannot be imported; None if it can."""
  try:
    importlib.import_module(package)
  except Exception as error:
    # The import of an installed package may raise any exception.
    return f"import {package}: {type(error).__name__}: {error}"
  return None


def version(package: str) -> str:
  """The installed version of a package."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return getattr(importlib.import_module(package), "__version__", "unknown")


def make_inputs(case: Case, seed: int = 0) -> Inputs:
  """Makes normally distributed arrays for a case, the same for the same case and seed."""
  random = iter(jax.random.split(jax.random.key(seed), 5))
  normal = lambda *shape: jax.random.normal(next(random), shape, jnp.float32)
  # Logits are near the cap, so that ignoring the cap would be detected.
  size = 1.0 if case.soft_cap is None else 0.25 * case.soft_cap
  query = size * normal(case.batch, case.queries, case.heads, case.width)
  key = normal(case.batch, case.keys, case.key_heads, case.width)
  key = key.at[:, :case.prefix].set(key[:1, :case.prefix])
  value = key[..., :case.value_width] if case.latent else normal(*key.shape[:3], case.value_width)
  value = value.at[:, :case.prefix].set(value[:1, :case.prefix])
  cotangent = normal(case.batch, case.queries, case.heads, case.value_width)
  query, key, value, cotangent = (x.astype(case.dtype) for x in (query, key, value, cotangent))
  sinks = normal(case.heads) if case.sinks else None
  ids = cases.segment_ids(case)
  return Inputs(query, key, value, cotangent, sinks, None if ids is None else jnp.asarray(ids),
                cases.dense_bias(case))


# --- Contenders that are functions of JAX arrays: (case, inputs) -> output [B, T, H, E]. ---------


def _mechanism(name: str, case: Case, inputs: Inputs) -> jax.Array:
  """A mechanism of this library."""
  info = None if inputs.segment_ids is None else MaskInfo.from_segments(inputs.segment_ids)
  offset = None if case.queries == case.keys else case.keys - case.queries
  key, options = inputs.key, None
  if case.latent and name == "multi_latent_attention":
    options = LatentOptions(case.value_width, case.width - case.value_width)
    key = key[:, :, 0]
  return attention(
      inputs.query, key, None if options else inputs.value, latent_options=options, mechanism=name,
      mask_info=info, causal=case.causal, query_offset=offset, sliding_window=case.window,
      softmax_scale=case.softmax_scale, logits_soft_cap=case.soft_cap,
      softmax_aux=inputs.sinks, score_mod=cases.score_mod(case)).attention_outputs


def require_none(name: str, needs: Mapping[str, object]) -> None:
  """Raises NotImplementedError with the features that are needed and not supported."""
  missing = [feature for feature, needed in needs.items() if needed]
  if missing:
    raise NotImplementedError(f"{name} does not support {' or '.join(missing)}")


def _has_offset(case: Case) -> bool:
  """Whether the positions of queries are offset and matter for the mask."""
  return case.queries != case.keys and (case.causal or case.window is not None)


def _is_decode(case: Case) -> bool:
  """Whether there is one query, at the position of the last key, and all keys are visible."""
  return case.queries == 1 < case.keys and case.window is None and case.documents == 1


def _for_peers(case: Case) -> Case:
  """Removes a mask that hides no key, which peers would have to be given as an array."""
  return case._replace(causal=False) if _is_decode(case) else case


def _lengths(case: Case) -> jax.Array:
  """int32 [B]: the lengths of a full cache."""
  return jnp.full(case.batch, case.keys, jnp.int32)


def _mask_argument(case: Case, inputs: Inputs) -> jax.Array | None:
  """bool [B, 1, T, S] for libraries without documents or offsets; None if it is not needed."""
  if case.documents == 1 and not _has_offset(case):
    return None
  shape = (case.batch, 1, case.queries, case.keys)
  return materialize.to_dense(cases.mask(case, inputs.segment_ids), shape)


def _jax_nn(implementation: Literal["xla", "cudnn"], case: Case, inputs: Inputs) -> jax.Array:
  """`jax.nn.dot_product_attention`."""
  lengths = _lengths(case) if _is_decode(case) else None
  case = _for_peers(case)
  require_none("jax.nn", {"soft cap": case.soft_cap, "sinks": case.sinks,
                     "E != D": case.value_width != case.width and not case.latent})
  visible = _mask_argument(case, inputs)
  plain = visible is None
  value = inputs.key if case.latent else inputs.value
  return jax.nn.dot_product_attention(
      inputs.query, inputs.key, value, inputs.bias, visible, scale=case.softmax_scale,
      is_causal=case.causal and plain, local_window_size=case.window if plain else None,
      key_value_seq_lengths=lengths, implementation=implementation)[..., :case.value_width]


def tokamax_mechanism(implementation: str | None, case: Case, inputs: Inputs) -> jax.Array:
  """tokamax by the name of one of its implementations; None: its default."""
  import tokamax
  case = _for_peers(case)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # tokamax would parse this program's command line
  require_none("tokamax", {"sinks": case.sinks})
  visible = _mask_argument(case, inputs)
  plain = visible is None
  return tokamax.dot_product_attention(
      inputs.query, inputs.key, inputs.value, bias=inputs.bias, mask=visible,
      scale=case.softmax_scale, is_causal=case.causal and plain,
      local_window_size=case.window if plain else None,
      logits_soft_cap=case.soft_cap, implementation=implementation)


def _ejkernel(case: Case, inputs: Inputs) -> jax.Array:
  """ejkernel's XLA kernels."""
  from ejkernel.kernels._xla.flash_attention import flash_attention
  from ejkernel.kernels._xla.ragged_decode_attention import ragged_decode_attention
  decode = _is_decode(case)
  require_none("ejkernel", {
      "sinks per head": case.sinks, "score mods": case.score_mod,
      "E != D": case.value_width != case.width,
      "offset of the queries": _has_offset(case) and not decode})
  if decode:
    lengths = _lengths(case)
    return ragged_decode_attention(
        inputs.query[:, 0], inputs.key, inputs.value, jnp.zeros_like(lengths), lengths,
        softmax_scale=case.softmax_scale, logits_soft_cap=case.soft_cap)[:, None]
  return flash_attention(
      inputs.query, inputs.key, inputs.value, softmax_scale=case.softmax_scale, causal=case.causal,
      sliding_window=case.window, logits_soft_cap=case.soft_cap,
      q_segment_ids=inputs.segment_ids, kv_segment_ids=inputs.segment_ids)


def _prepare(attend: Attend, case: Case, inputs: Inputs, backward: bool) -> Runner:
  """Compiles a function of JAX arrays, with or without its gradients."""
  require_none("gradient", {"latent rows, keys and values in one": backward and case.latent})

  def forward(inputs: Inputs) -> tuple[jax.Array, ...]:
    return (attend(case, inputs),)

  def both(inputs: Inputs) -> tuple[jax.Array, ...]:
    output, pull = jax.vjp(
        lambda query, key, value: attend(
            case, inputs._replace(query=query, key=key, value=value)), *inputs[:3])
    return (output, *pull(inputs.cotangent))

  start = time.perf_counter()
  compiled = jax.jit(both if backward else forward).lower(inputs).compile()
  seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  return Runner(
      lambda number: repeat(compiled, (inputs,), number),
      lambda results: {name: np.asarray(x) for name, x in zip(("output", *GRADIENTS), results)},
      seconds, None if memory is None else int(memory.temp_size_in_bytes))


def repeat(compiled: Callable[..., Any], operands: tuple[Any, ...], number: int) -> Any:
  """Calls a function `number` times and returns the results of the last call.

  On an accelerator the calls are queued, so that only its time is measured; a CPU would run
  several of them at a time, so each call waits for its results.
  """
  wait = jax.devices()[0].platform == "cpu"
  for _ in range(number):
    results = compiled(*operands)
    if wait:
      jax.block_until_ready(results)
  return jax.block_until_ready(results)


# --- PyTorch. ------------------------------------------------------------------------------------


def _prepare_torch(case: Case, inputs: Inputs, backward: bool) -> Runner:
  """torch.nn.functional.scaled_dot_product_attention, in its own layout bhtd."""
  import torch
  case = _for_peers(case)
  require_none("torch", {"soft cap": case.soft_cap, "sinks": case.sinks})
  device = torch_arrays.device(torch)
  query, key, value, cotangent = (
      torch_arrays.from_jax(torch, x).to(device).permute(0, 2, 1, 3).contiguous()
      for x in inputs[:4])
  visible = None
  if case.documents > 1 or case.window or _has_offset(case) or case.score_mod:
    visible = torch_arrays.bias(torch, case, inputs.bias).to(device)
  leaves = [x.requires_grad_(backward) for x in (query, key, value)]

  def attend() -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=visible, is_causal=case.causal and visible is None,
        scale=case.softmax_scale, enable_gqa=case.heads != case.key_heads)

  return _torch_runner(torch, attend, leaves, cotangent, lambda x: x.permute(0, 2, 1, 3))


def _torch_runner(torch: Any, attend: Callable[[], Tensor], leaves: list[Tensor],
                  cotangent: Tensor, to_bthd: Callable[[Tensor], Tensor]) -> Runner:
  """Runs attend() -> output, and its gradients for `leaves` if they require gradients."""
  backward = leaves[0].requires_grad

  def call(number: int) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(backward):
      for _ in range(number):
        output = attend()
        results = (output, *(torch.autograd.grad(output, leaves, cotangent) if backward else ()))
    if output.is_cuda:
      torch.cuda.synchronize()
    return results

  def outputs(results: tuple[Tensor, ...]) -> dict[str, np.ndarray]:
    return {name: to_bthd(x.detach()).float().cpu().numpy()
            for name, x in zip(("output", *GRADIENTS), results)}

  return Runner(call, outputs)


def _prepare_flash_attn(case: Case, inputs: Inputs, backward: bool) -> Runner:
  """FlashAttention-2 by the package of that name, in layout bthd."""
  import flash_attn
  import torch
  require_none("flash_attn", {
      "sinks": case.sinks, "score mods": case.score_mod,
      "documents in a batch row": case.documents > 1, "E != D": case.value_width != case.width})
  device = torch_arrays.device(torch)
  *leaves, cotangent = (torch_arrays.from_jax(torch, x).to(device) for x in inputs[:4])
  leaves = [x.requires_grad_(backward) for x in leaves]

  def attend() -> Tensor:
    return flash_attn.flash_attn_func(
        *leaves, softmax_scale=case.softmax_scale, causal=case.causal,
        window_size=case.window or (-1, -1), softcap=case.soft_cap or 0.0)

  return _torch_runner(torch, attend, leaves, cotangent, lambda x: x)
