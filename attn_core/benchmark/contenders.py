"""Who is measured: the library's mechanisms, and other libraries on the same arrays.

A contender is prepared for one case and either runs it or says why not. Whatever a peer cannot
express is refused here, by name; whether what it computes is right, the oracle says afterwards.

Letters: B batch, T query length, S key length, H query heads, K key heads,
D query and key width, E value width.
"""

import functools
import importlib.metadata
import time
from typing import Any, Callable, NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import table
from attn_core.attention import attention
from attn_core.benchmark import cases
from attn_core.benchmark.cases import Case
from attn_core.masks import materialize as dense_mask
from attn_core.masks.info import MaskInfo


class Inputs(NamedTuple):
  """The arrays of a case."""

  query: Any  # [B, T, H, D]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  cotangent: Any  # [B, T, H, E], of the output
  sinks: Any = None  # float32 [H]
  segment_ids: Any = None  # int32 [B, T]


class Runner(NamedTuple):
  """A contender, ready to run one case."""

  call: Callable[[int], Any]  # runs so many times and returns when the last results are there
  outputs: Callable[[Any], dict[str, np.ndarray]]  # of what `call` returned, in layout bthd
  compile_seconds: float | None = None  # tracing and compiling; None: nothing is compiled
  temp_bytes: int | None = None  # temporaries of the compiled program; None: not known


class Contender(NamedTuple):
  """Somebody who computes attention."""

  name: str
  prepare: Callable[[Case, Inputs, bool], Runner]  # (case, inputs, with backward)
  package: str  # whose version counts
  peer: bool = True


class Absent(NamedTuple):
  """A peer that cannot be asked at all."""

  name: str
  reason: str


GRADIENTS = ("d_query", "d_key", "d_value")  # names of outputs, in this order, beside "output"


def mechanisms(names: tuple[str, ...]) -> list[Contender]:
  """The library's own, by name."""
  return [Contender(name, functools.partial(_prepare, functools.partial(_mechanism, name)),
                    "attn_core", peer=False) for name in names]


def distinct_mechanisms(platform: str, capability: str | None = None) -> tuple[str, ...]:
  """Every mechanism of a platform, but one name only of those that are the same implementation.

  Args:
    platform: of `types.PLATFORMS`.
    capability: compute capability of the GPU; None: not known, or no GPU.
  """
  order = dict.fromkeys((*table.AUTO[platform], *table.names()))
  found = {}
  for name in order:
    implementation = table.find(name, platform, capability)
    if implementation is not None:
      found.setdefault(implementation, name)
  return tuple(found.values())


def peers(platform: str, names: tuple[str, ...] | None = None
          ) -> tuple[list[Contender], list[Absent]]:
  """The other libraries that can be imported here, and those that cannot.

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
  """All other libraries that there is code for."""
  return tuple(contender.name for contender in _known_peers(platform))


def _known_peers(platform: str) -> list[Contender]:
  chunked = "xla_chunked" if platform == "cpu" else None
  compiled = [("jax.nn xla", "jax", functools.partial(_jax_nn, "xla")),
              ("tokamax", "tokamax", functools.partial(tokamax_mechanism, chunked)),
              ("ejkernel xla", "ejkernel", _ejkernel)]
  if platform == "gpu":
    compiled.append(("jax.nn cudnn", "jax", functools.partial(_jax_nn, "cudnn")))
  known = [Contender(name, functools.partial(_prepare, attend), package)
           for name, package, attend in compiled]
  known.append(Contender("torch sdpa", _prepare_torch, "torch"))
  if platform == "gpu":
    known.append(Contender("flash_attn", _prepare_flash_attn, "flash_attn"))
  return known


def _import_error(package: str) -> str | None:
  try:
    importlib.import_module(package)
  except Exception as error:
    # A package that is there may break in any way while it is imported; that is a reason, too.
    return f"import {package}: {type(error).__name__}: {error}"
  return None


def version(package: str) -> str:
  """The installed version of a package."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return getattr(importlib.import_module(package), "__version__", "unknown")


def make_inputs(case: Case, seed: int = 0) -> Inputs:
  """Normally distributed arrays of a case, the same for the same case and seed."""
  random = iter(jax.random.split(jax.random.key(seed), 5))
  normal = lambda *shape: jax.random.normal(next(random), shape, jnp.float32)
  # Logits near the cap, or ignoring it would go unnoticed.
  size = 1.0 if case.soft_cap is None else 0.25 * case.soft_cap
  query = size * normal(case.batch, case.queries, case.heads, case.width)
  key = normal(case.batch, case.keys, case.key_heads, case.width)
  value = normal(case.batch, case.keys, case.key_heads, case.value_width)
  cotangent = normal(case.batch, case.queries, case.heads, case.value_width)
  arrays = (x.astype(case.dtype) for x in (query, key, value, cotangent))
  sinks = normal(case.heads) if case.sinks else None
  ids = cases.segment_ids(case)
  return Inputs(*arrays, sinks, None if ids is None else jnp.asarray(ids))


# --- Contenders that are functions of JAX arrays: (case, inputs) -> output [B, T, H, E]. ---------


def _mechanism(name: str, case: Case, inputs: Inputs):
  info = None if inputs.segment_ids is None else MaskInfo.from_segments(inputs.segment_ids)
  offset = None if case.queries == case.keys else case.keys - case.queries
  return attention(
      inputs.query, inputs.key, inputs.value, mechanism=name, mask_info=info, causal=case.causal,
      query_offset=offset, sliding_window=case.window, softmax_scale=case.softmax_scale,
      logits_soft_cap=case.soft_cap, softmax_aux=inputs.sinks).attention_outputs


def _refuse(who: str, needs: dict[str, Any]) -> None:
  """Raises NotImplementedError naming what is needed and not offered."""
  missing = [name for name, needed in needs.items() if needed]
  if missing:
    raise NotImplementedError(f"{who} offers no {', no '.join(missing)}")


def _has_offset(case: Case) -> bool:
  return case.queries != case.keys and (case.causal or case.window is not None)


def _is_decode(case: Case) -> bool:
  """Whether there is one query, beside the last key, that sees every key."""
  return case.queries == 1 < case.keys and case.window is None and case.documents == 1


def _for_peers(case: Case) -> Case:
  """The same without a mask that hides nothing, which peers would have to be given written out."""
  return case._replace(causal=False) if _is_decode(case) else case


def _lengths(case: Case):
  """int32 [B]: what is in a cache that is full."""
  return jnp.full(case.batch, case.keys, jnp.int32)


def _mask_argument(case: Case, inputs: Inputs):
  """bool [B, 1, T, S] for libraries that know nothing of documents or of an offset; else None."""
  if case.documents == 1 and not _has_offset(case):
    return None
  shape = (case.batch, 1, case.queries, case.keys)
  return dense_mask.to_dense(cases.mask(case, inputs.segment_ids), shape)


def _jax_nn(implementation: str, case: Case, inputs: Inputs):
  lengths = _lengths(case) if _is_decode(case) else None
  case = _for_peers(case)
  _refuse("jax.nn", {"soft cap": case.soft_cap, "sinks": case.sinks,
                     "E != D": case.value_width != case.width})
  visible = _mask_argument(case, inputs)
  plain = visible is None
  return jax.nn.dot_product_attention(
      inputs.query, inputs.key, inputs.value, mask=visible, scale=case.softmax_scale,
      is_causal=case.causal and plain, local_window_size=case.window if plain else None,
      key_value_seq_lengths=lengths, implementation=implementation)


def tokamax_mechanism(implementation: str | None, case: Case, inputs: Inputs):
  """tokamax by the name of one of its implementations; None: what it chooses."""
  import tokamax
  case = _for_peers(case)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # tokamax would read this program's command line as its own
  _refuse("tokamax", {"sinks": case.sinks})
  visible = _mask_argument(case, inputs)
  plain = visible is None
  return tokamax.dot_product_attention(
      inputs.query, inputs.key, inputs.value, mask=visible, scale=case.softmax_scale,
      is_causal=case.causal and plain, local_window_size=case.window if plain else None,
      logits_soft_cap=case.soft_cap, implementation=implementation)


def _ejkernel(case: Case, inputs: Inputs):
  from ejkernel.kernels._xla.flash_attention import flash_attention
  from ejkernel.kernels._xla.ragged_decode_attention import ragged_decode_attention
  decode = _is_decode(case)
  _refuse("ejkernel", {"sinks per head": case.sinks, "E != D": case.value_width != case.width,
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


def _prepare(attend, case: Case, inputs: Inputs, backward: bool) -> Runner:
  """Compiles a function of JAX arrays, with or without its gradients."""

  def forward(inputs):
    return (attend(case, inputs),)

  def both(inputs):
    output, pull = jax.vjp(
        lambda *arrays: attend(case, Inputs(*arrays, *inputs[3:])), *inputs[:3])
    return (output, *pull(inputs.cotangent))

  start = time.perf_counter()
  compiled = jax.jit(both if backward else forward).lower(inputs).compile()
  seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  return Runner(
      lambda number: repeat(compiled, (inputs,), number),
      lambda results: {name: np.asarray(x) for name, x in zip(("output", *GRADIENTS), results)},
      seconds, None if memory is None else int(memory.temp_size_in_bytes))


def repeat(compiled, operands: tuple, number: int):
  """The results of the last of so many calls in a row.

  An accelerator's queue is never empty, so that the time is its own; a CPU would compute several at
  a time.
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
  _refuse("torch", {"soft cap": case.soft_cap, "sinks": case.sinks})
  device = _torch_device(torch)
  query, key, value, cotangent = (
      _to_torch(torch, x).to(device).permute(0, 2, 1, 3).contiguous() for x in inputs[:4])
  visible = None
  if case.documents > 1 or case.window or _has_offset(case):
    visible = torch.from_numpy(_dense_on_host(case)).to(device)
  leaves = [x.requires_grad_(backward) for x in (query, key, value)]

  def attend():
    return torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=visible, is_causal=case.causal and visible is None,
        scale=case.softmax_scale, enable_gqa=case.heads != case.key_heads)

  return _torch_runner(torch, attend, leaves, cotangent, lambda x: x.permute(0, 2, 1, 3))


def _torch_runner(torch, attend, leaves, cotangent, to_bthd) -> Runner:
  """Runs attend() -> output, and its gradients by `leaves` where these require them."""
  backward = leaves[0].requires_grad

  def call(number):
    with torch.set_grad_enabled(backward):
      for _ in range(number):
        output = attend()
        results = (output, *(torch.autograd.grad(output, leaves, cotangent) if backward else ()))
    if output.is_cuda:
      torch.cuda.synchronize()
    return results

  def outputs(results):
    return {name: to_bthd(x.detach()).float().cpu().numpy()
            for name, x in zip(("output", *GRADIENTS), results)}

  return Runner(call, outputs)


def _prepare_flash_attn(case: Case, inputs: Inputs, backward: bool) -> Runner:
  """FlashAttention-2 by the package of that name, in layout bthd."""
  import flash_attn
  import torch
  _refuse("flash_attn", {"sinks": case.sinks, "documents in a batch row": case.documents > 1,
                         "E != D": case.value_width != case.width})
  device = _torch_device(torch)
  *leaves, cotangent = (_to_torch(torch, x).to(device) for x in inputs[:4])
  leaves = [x.requires_grad_(backward) for x in leaves]

  def attend():
    return flash_attn.flash_attn_func(
        *leaves, softmax_scale=case.softmax_scale, causal=case.causal,
        window_size=case.window or (-1, -1), softcap=case.soft_cap or 0.0)

  return _torch_runner(torch, attend, leaves, cotangent, lambda x: x)


def _torch_device(torch) -> str:
  """Where torch computes: the kind of device that JAX uses."""
  platform = jax.devices()[0].platform
  if platform == "cpu":
    return "cpu"
  if platform == "gpu" and torch.cuda.is_available():
    return "cuda"
  raise NotImplementedError(f"this torch does not compute on JAX's platform {platform!r}")


def _to_torch(torch, x):
  x = np.array(x)
  if x.dtype == jnp.bfloat16:  # numpy has none of its own, so torch takes the bits
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
  return torch.from_numpy(x)


def _dense_on_host(case: Case) -> np.ndarray:
  """The mask as bool [1, 1, T, S]; every batch row is alike."""
  one = case._replace(batch=1)
  return np.array(dense_mask.to_dense(cases.mask(one), (1, 1, case.queries, case.keys)))
