# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""sdpa and cudnn: `jax.nn.dot_product_attention`, with the semantics of this library.

Differences of JAX's function are corrected here: a query without visible keys yields 0 instead of
the mean of the values, hidden keys and queries that are not finite have no effect, float32 is
multiplied as float32, and values with a wrong derivative raise an error when they are
differentiated. A mask that is a band with lengths is passed to JAX by its parameters, so that cuDNN
needs no memory for it; any other is a boolean array.
"""

import contextlib
import functools
from typing import Any, Callable, Iterator, Literal, NamedTuple, NoReturn, Sequence

import jax
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, matmul_precision, nonfinite
from attn_core.masks import banded as banded_lib, materialize
from attn_core.score_mods import evaluate
from attn_core.sharding import shard_map
from attn_core.types import AttentionOutput, AttentionSpec, Call, Operands, at_least_float32


_BackEnd = Literal["xla", "cudnn"]
_Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]  # query, key, value and bias


def xla(call: Call) -> AttentionOutput:
  """Computes attention by JAX's XLA implementation, on any platform."""
  return _sharded("xla", call)


def cudnn(call: Call) -> AttentionOutput:
  """Computes attention by cuDNN on NVIDIA GPUs; differentiable once, in reverse mode only."""
  return _sharded("cudnn", call)


def _sharded(implementation: _BackEnd, call: Call) -> AttentionOutput:
  return shard_map.sharded(functools.partial(_local, implementation, call), call)


class _Masking(NamedTuple):
  """Mask arguments of JAX's function, and the queries whose results are replaced."""

  arguments: dict[str, Any]  # of jax.nn.dot_product_attention
  empty: jax.Array | None  # bool [B or 1, H or 1, T]: queries without visible keys
  sees_nonfinite: jax.Array  # bool [B, H, T or 1]: queries that are not finite or see such a key


def _local(implementation: _BackEnd, call: Call, operands: Operands) -> AttentionOutput:
  spec = call.spec
  operands = _with_score_mod(operands, spec)
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  form = banded_lib.from_structure(spec.mask, queries, keys, has_bias=operands.bias is not None)
  if form is not None:
    form = banded_lib.from_mask(dense_operands.mask_of(operands, spec), queries, keys)
    assert form is not None  # it depends on the structure of the mask
    operands = _without_padding(operands, form)
  key, value, finite = nonfinite.mask_nonfinite_pairs(operands.key, operands.value)
  group = operands.query.shape[2] // key.shape[2]
  finite = jnp.repeat(finite[..., 0].transpose(0, 2, 1), group, 1)  # [B, H, S]
  masking = (_of_dense(operands, spec, ~finite) if form is None
             else _of_band(operands, form, ~finite))
  query, finite_query = nonfinite.mask_nonfinite_rows(operands.query)
  masking = masking._replace(
      sees_nonfinite=masking.sees_nonfinite | ~finite_query[..., 0].transpose(0, 2, 1))
  bias, lowered = operands.bias, None
  if bias is not None:
    bias, lowered, hidden = _raised_bias(bias, operands, spec)
    hidden = hidden & ~masking.sees_nonfinite
    masking = masking._replace(empty=hidden if masking.empty is None else masking.empty | hidden)
  arrays = query, key, value, bias
  if implementation == "cudnn":
    arrays, masking = _for_cudnn(arrays, masking)
  elif jax.config.jax_numpy_dtype_promotion == "strict":  # type: ignore[attr-defined]
    arrays = _in_32_bits(arrays)
  # Its overloads do not describe flags that are not literals.
  attend: Callable[..., Any] = jax.nn.dot_product_attention
  with _configuration(operands.query.dtype), _named_without_cudnn():
    result = attend(
        *arrays, **masking.arguments, scale=spec.softmax_scale, implementation=implementation,
        return_residual=call.return_lse)
  out, lse = result if call.return_lse else (result, None)
  out = out.astype(operands.query.dtype)
  lse = None if lse is None else _not_differentiable(
      lse.transpose(0, 2, 1), operands.query, operands.key, operands.bias)
  if lse is not None and lowered is not None:
    lse = lse + lowered.astype(lse.dtype)
  out = jnp.where(_rows(masking.sees_nonfinite), jnp.nan, out)
  lse = None if lse is None else jnp.where(masking.sees_nonfinite, jnp.nan, lse)
  if masking.empty is not None:
    out = jnp.where(_rows(masking.empty), 0, out)
    lse = None if lse is None else jnp.where(masking.empty, -jnp.inf, lse)
  return AttentionOutput(out, lse=lse)


@contextlib.contextmanager
def _configuration(dtype: jnp.dtype) -> Iterator[None]:
  """Sets the precision of JAX's function, and allows the promotions that it relies on."""
  exact = matmul_precision.resolve(dtype, None) == jax.lax.Precision.HIGHEST
  with (jax.default_matmul_precision("highest") if exact else contextlib.nullcontext(),
        jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")):
    yield


@contextlib.contextmanager
def _named_without_cudnn() -> Iterator[None]:
  """Names the mechanism where JAX finds no cuDNN or no GPU that it runs on."""
  try:
    yield
  except RuntimeError as error:
    if "cudnn" not in str(error).lower():
      raise
    raise NotImplementedError(
        f"metadata.platform='gpu': this mechanism runs by cuDNN, and JAX says: {error} Expected a "
        "GPU with cuDNN; or platform=None, which is that of the default backend "
        f"({jax.default_backend()!r} here); or mechanism='blockwise' or 'vanilla'") from error


def _in_32_bits(arrays: _Arrays) -> _Arrays:
  """Returns query, key and value in at least 32 bits.

  JAX's gradient of 16-bit operands multiplies them by cotangents of 32 bits, which JAX does not
  lower where it must not promote dtypes.
  """
  query, key, value, bias = arrays
  query, key, value = (x.astype(at_least_float32(x.dtype)) for x in (query, key, value))
  return query, key, value, bias


def _rows(x: jax.Array) -> jax.Array:
  """Maps [B, H, T] to [B, T, H, 1]."""
  return x.transpose(0, 2, 1)[..., None]


# --- Masks. ----------------------------------------------------------------------------


def _of_dense(operands: Operands, spec: AttentionSpec, bad: jax.Array) -> _Masking:
  """Returns any mask as a boolean array; `bad` [B, H, S]: keys that are not finite."""
  batch, length, heads, _ = operands.query.shape
  shape = (batch, heads, length, operands.key.shape[1])
  visible = materialize.visible(spec.mask, operands.mask, shape)
  visible = jnp.broadcast_to(visible, (*visible.shape[:2], *shape[2:]))
  return _Masking(dict(mask=visible), ~visible.any(-1), (bad[:, :, None] & visible).any(-1))


def _of_band(operands: Operands, form: banded_lib.Band, bad: jax.Array) -> _Masking:
  """Returns a band; `bad` [B, H, S]: keys before the lengths that are not finite."""
  arguments: dict[str, Any] = dict(is_causal=form.causal)
  if form.left is not None:
    arguments["local_window_size"] = (form.left, 0)
  batch, length = operands.query.shape[:2]
  query_lengths, key_lengths = _lengths(form, batch)
  empty = None
  if query_lengths is not None:
    empty = jnp.arange(length)[None, None] >= query_lengths[:, None, None]
  if key_lengths is not None:
    nothing = jnp.broadcast_to((key_lengths <= 0)[:, None, None], (batch, 1, length))
    empty = nothing if empty is None else empty | nothing
  # A length of 0 would be a softmax over no keys; the result of one zero key is replaced instead.
  # With a length past the end cuDNN would read there.
  for name, lengths, most in (("query_seq_lengths", query_lengths, length),
                              ("key_value_seq_lengths", key_lengths, operands.key.shape[1])):
    if lengths is not None:
      arguments[name] = jnp.clip(lengths, 1, most)
  return _Masking(arguments, empty, _band_sees_any(bad, form, length))


def _lengths(form: banded_lib.Band, batch: int) -> tuple[jax.Array | None, jax.Array | None]:
  """Returns (query lengths, key lengths), each int32 [B] or None."""
  shortest = lambda lengths: jnp.broadcast_to(
      functools.reduce(jnp.minimum, lengths), (batch,)) if lengths else None
  return shortest(form.query_lengths), shortest(form.key_lengths)


def _without_padding(operands: Operands, form: banded_lib.Band) -> Operands:
  """Returns the operands with zeros past the lengths, which then affect no result or gradient."""
  query_lengths, key_lengths = _lengths(form, operands.query.shape[0])
  def masked(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    if lengths is None:
      return x
    return jnp.where((jnp.arange(x.shape[1])[None] < lengths[:, None])[..., None, None], x, 0)
  return operands._replace(query=masked(operands.query, query_lengths),
                           key=masked(operands.key, key_lengths),
                           value=masked(operands.value, key_lengths))


def _band_sees_any(bad: jax.Array, form: banded_lib.Band, length: int) -> jax.Array:
  """Returns whether each query's band has a marked key: bool [B, H, S] -> [B, H, T or 1]."""
  if not form.causal:
    return bad.any(-1, keepdims=True)
  count = jnp.pad(jnp.cumsum(bad.astype(jnp.int32), axis=2), ((0, 0), (0, 0), (1, 0)))
  query = jnp.arange(length)
  first = jnp.maximum(query - form.left, 0) if form.left is not None else jnp.zeros_like(query)
  past = jnp.minimum(query + 1, bad.shape[2])
  return count[:, :, past] > count[:, :, first]


def _with_score_mod(operands: Operands, spec: AttentionSpec) -> Operands:
  """Returns operands whose bias includes what an additive score mod adds."""
  if not spec.has_score_mod:
    return operands
  batch, length, heads, _ = operands.query.shape
  zeros = jnp.zeros((batch, heads, length, operands.key.shape[1]),
                    at_least_float32(operands.query.dtype))
  bias = evaluate.bias_of(spec.score_mod, operands.mods, dense_operands.mask_of(operands, spec),
                          operands.mask, zeros)
  return operands._replace(
      bias=bias if operands.bias is None else bias + operands.bias.astype(bias.dtype))


# JAX hides keys by logits of -32,768 (cuDNN, float16), -2**41 (cuDNN, bfloat16) or -2.4e38 (XLA).
# Rows whose visible biases are all below this are raised, or hidden keys would outweigh them.
_LOW_BIAS = -1e4


def _raised_bias(bias: jax.Array, operands: Operands,
                 spec: AttentionSpec) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the bias minus a constant for each query, which does not change the softmax.

  Returns:
    (bias [B or 1, H or 1, T, S], 0 for hidden keys; the numbers [B or 1, H or 1, T] that were
    subtracted from it; bool, likewise: queries whose bias is -inf for every visible key).
  """
  batch, length, heads, _ = operands.query.shape
  shape = (batch, heads, length, operands.key.shape[1])
  visible = materialize.visible(spec.mask, operands.mask, shape)
  visible = jnp.broadcast_to(visible, (*visible.shape[:2], *shape[2:]))
  # The numbers are constants to a derivative, as they change nothing.
  max_bias = jnp.where(visible, jax.lax.stop_gradient(bias), -jnp.inf).max(-1)
  hidden = max_bias == -jnp.inf
  subtracted = jnp.where((max_bias < _LOW_BIAS) & ~hidden, max_bias, 0)
  raised = jnp.where(visible & ~hidden[..., None], bias - subtracted[..., None], 0)
  return raised, subtracted, hidden


# --- Requirements of JAX's path to cuDNN. --------------------------------------------------------

_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


def _for_cudnn(arrays: _Arrays, masking: _Masking) -> tuple[_Arrays, _Masking]:
  """Returns query, key, value and bias, and the masking, as cuDNN takes them.

  Under vmap, jax 0.10.2 accepts these only if all or none are mapped, computes a wrong gradient of
  a bias that is not mapped, and no version accepts a mapped bias that is not [B, H, T, S]. Adding a
  zero that depends on all of them therefore makes all of them mapped as soon as one is. JAX passes
  a mask without a bias as a bias; a mask that the batch shares is not broadcast over the batch,
  which might need much more memory.
  """
  query, key, value, bias = arrays
  batch, queries, heads, _ = query.shape
  keys = key.shape[1]
  arguments = dict(masking.arguments)
  whole = lambda x: jnp.broadcast_to(x, (batch, heads, queries, keys))
  if bias is not None:
    # One gradient per element: not every cuDNN sums over broadcast dimensions, so JAX sums.
    bias = whole(bias)
  mask = arguments.get("mask")
  if mask is not None and bias is None:
    mask = whole(mask) if mask.shape[0] == batch else _not_mapped(mask)
  if any(name in arguments for name in _LENGTHS):
    for name, length in zip(_LENGTHS, (queries, keys)):
      arguments.setdefault(name, jnp.full((batch,), length, jnp.int32))
  if queries % 2 or keys % 2:
    query, key, value, bias = _even_lengths(query, key, value, bias)
  zero = functools.reduce(jnp.add, [
      jnp.where(x[(0,) * x.ndim] == 0, jnp.int32(0), jnp.int32(0)) for x in (
          query, key, value, bias, mask, *(arguments.get(name) for name in _LENGTHS))
      if x is not None])
  arguments.update({name: arguments[name] + zero for name in _LENGTHS if name in arguments})
  if mask is not None:
    arguments["mask"] = mask & (zero == 0) if mask.shape[0] == batch else mask
  # This also maps the output and its cotangent.
  masking = masking._replace(
      arguments=arguments, sees_nonfinite=masking.sees_nonfinite | (zero != 0))
  query, key, value = (x + zero.astype(x.dtype) for x in (query, key, value))
  return (query, key, value, None if bias is None else bias + zero.astype(bias.dtype)), masking


@jax.custom_batching.custom_vmap
def _not_mapped(mask: jax.Array) -> jax.Array:
  """Returns `mask` [1, H or 1, T, S]; raises if it is mapped by vmap."""
  return mask


@_not_mapped.def_vmap
def _raise_if_mapped(size: int, mapped: list[bool], mask: jax.Array) -> NoReturn:
  raise NotImplementedError(
      f"a mask of shape {mask.shape[1:]}, shared by the batch, mapped by jax.vmap {size} "
      "times: JAX's path to cuDNN maps only masks with a row for each batch row; give `mask` the "
      "batch as its first dimension, or use mechanism='flash_attn2' or 'blockwise'")


@jax.custom_jvp
def _even_lengths(query: jax.Array, key: jax.Array, value: jax.Array,
                  bias: jax.Array | None) -> _Arrays:
  """Returns its arguments; raises if they are differentiated."""
  return query, key, value, bias


@_even_lengths.defjvp
def _raise_if_odd(primals: Sequence[Any], tangents: Sequence[Any]) -> NoReturn:
  raise NotImplementedError(
      f"queries of shape {primals[0].shape} and keys of shape {primals[1].shape} under "
      "differentiation: cuDNN's gradients are taken for even numbers of both only, as JAX takes "
      "them with a bias; use mechanism='flash_attn2', 'blockwise' or 'vanilla', or pad the "
      "sequences to an even length")


@jax.custom_jvp
def _not_differentiable(lse: jax.Array, *operands: jax.Array | None) -> jax.Array:
  """Returns `lse`, without a tangent; raises if operands it depends on are differentiated."""
  del operands
  return lse


@_not_differentiable.defjvp
def _raise_if_differentiated(primals: Sequence[Any], tangents: Sequence[Any]) -> NoReturn:
  raise NotImplementedError(
      "return_lse=True under differentiation: jax.nn.dot_product_attention, behind the mechanisms "
      "'sdpa' and 'cudnn', drops the lse's cotangent, so its gradient would be wrong; use "
      "mechanism='flash_attn2', 'blockwise' or 'vanilla', or return_lse=False")
