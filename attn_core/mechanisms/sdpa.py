"""sdpa and cudnn: `jax.nn.dot_product_attention`, held to this library's meanings.

What JAX's function does otherwise is mended here: a query that sees nothing gets 0 instead of the
mean of the values, hidden keys that are not finite stay hidden, and what would be differentiated
wrongly refuses to be differentiated. A mask that is a band with lengths is named to JAX as one, so
that cuDNN needs no memory for it; any other is written out.

Letters: B batch, T query length, S key length, H query heads.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.kernels.xla import tile_ops as steps
from attn_core.kernels.xla.dense import clean
from attn_core.masks import banded as band, materialize as dense_mask
from attn_core.sharding import shard_map as shard
from attn_core.types import AttentionOutput, Call, Operands


def xla(call: Call) -> AttentionOutput:
  """The XLA implementation, on any platform."""
  return _spread("xla", call)


def cudnn(call: Call) -> AttentionOutput:
  """The cuDNN implementation, on NVIDIA GPUs; reverse mode only, and only once."""
  return _spread("cudnn", call)


def _spread(implementation: str, call: Call) -> AttentionOutput:
  return shard.sharded(functools.partial(_local, implementation, call), call)


def banded(structure, queries: int, keys: int, has_bias: bool) -> band.Band | None:
  """The mask as JAX's function names it to cuDNN; None: it must be written out.

  Beside a bias only causality is named: the memory is spent on the bias anyway, and not every cuDNN
  takes both.
  """
  form = band.of(jax.tree.unflatten(structure, range(structure.num_leaves)), queries, keys)
  plain = form is None or (form.left is None and not form.query_lengths and not form.key_lengths)
  return form if plain or not has_bias else None


class _Masking(NamedTuple):
  """How JAX's function is told what is visible, and which queries it must not be asked about."""

  arguments: dict  # of jax.nn.dot_product_attention
  empty: Any  # bool [B or 1, H or 1, T]: queries that see nothing; None: there are none
  spoiled: Any  # bool [B, H, T or 1]: queries that see a key that is not finite


def _local(implementation, call, operands):
  spec = call.spec
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  form = banded(spec.mask, queries, keys, operands.bias is not None)
  if form is not None:
    form = band.of(steps.mask_of(operands, spec), queries, keys)
    operands = _without_padding(operands, form)
  key, value, finite = clean(operands)
  masking = (_of_dense(operands, spec, ~finite) if form is None
             else _of_band(operands, form, ~finite))
  bias, lowered = operands.bias, None
  if bias is not None:
    bias, lowered, hidden = _raised_bias(operands, spec)
    hidden = hidden & ~masking.spoiled
    masking = masking._replace(empty=hidden if masking.empty is None else masking.empty | hidden)
  arrays = [operands.query, key, value, bias]
  if implementation == "cudnn":
    arrays, masking = _for_cudnn(arrays, masking)
  result = jax.nn.dot_product_attention(
      *arrays, **masking.arguments, scale=spec.softmax_scale, implementation=implementation,
      return_residual=call.return_lse)
  out, lse = result if call.return_lse else (result, None)
  lse = None if lse is None else _not_differentiable(
      lse.transpose(0, 2, 1), operands.query, operands.key, operands.bias)
  if lse is not None and lowered is not None:
    lse = lse + lowered.astype(lse.dtype)
  out = jnp.where(_rows(masking.spoiled), jnp.nan, out)
  lse = None if lse is None else jnp.where(masking.spoiled, jnp.nan, lse)
  if masking.empty is not None:
    out = jnp.where(_rows(masking.empty), 0, out)
    lse = None if lse is None else jnp.where(masking.empty, -jnp.inf, lse)
  return AttentionOutput(out, lse=lse)


def _rows(x):
  """[B, H, T] -> [B, T, H, 1]."""
  return x.transpose(0, 2, 1)[..., None]


# --- What is visible. ----------------------------------------------------------------------------


def _of_dense(operands: Operands, spec, bad) -> _Masking:
  """Any mask, written out; `bad` [B, H, S]: keys that are not finite."""
  batch, length, heads, _ = operands.query.shape
  shape = (batch, heads, length, operands.key.shape[1])
  visible = dense_mask.visible(spec.mask, operands.mask, shape)
  visible = jnp.broadcast_to(visible, (*visible.shape[:2], *shape[2:]))
  return _Masking(dict(mask=visible), ~visible.any(-1), (bad[:, :, None] & visible).any(-1))


def _of_band(operands: Operands, form: band.Band, bad) -> _Masking:
  """A band; `bad` [B, H, S]: keys that are not finite, none of them past the lengths."""
  arguments = dict(is_causal=form.causal)
  if form.left is not None:
    arguments["local_window_size"] = (form.left, 0)
  batch, length = operands.query.shape[:2]
  query_lengths, key_lengths = _lengths(form, batch)
  empty = None
  if query_lengths is not None:
    empty = jnp.arange(length) >= query_lengths[:, None, None]
  if key_lengths is not None:
    nothing = jnp.broadcast_to((key_lengths <= 0)[:, None, None], (batch, 1, length))
    empty = nothing if empty is None else empty | nothing
  # A length of 0 would leave a softmax over nothing; what comes of one zero key is thrown away. One
  # past the end would have cuDNN read there.
  for name, lengths, most in (("query_seq_lengths", query_lengths, length),
                              ("key_value_seq_lengths", key_lengths, operands.key.shape[1])):
    if lengths is not None:
      arguments[name] = jnp.clip(lengths, 1, most)
  return _Masking(arguments, empty, _band_sees_any(bad, form, length))


def _lengths(form: band.Band, batch: int):
  """(query lengths, key lengths), each int32 [B] or None."""
  shortest = lambda lengths: jnp.broadcast_to(
      functools.reduce(jnp.minimum, lengths), (batch,)) if lengths else None
  return shortest(form.query_lengths), shortest(form.key_lengths)


def _without_padding(operands: Operands, form: band.Band) -> Operands:
  """Zeros past the lengths: no matter what stands there, it reaches nothing, and no gradient it."""
  query_lengths, key_lengths = _lengths(form, operands.query.shape[0])
  def cut(x, lengths):
    if lengths is None:
      return x
    return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[..., None, None], x, 0)
  return operands._replace(query=cut(operands.query, query_lengths),
                           key=cut(operands.key, key_lengths),
                           value=cut(operands.value, key_lengths))


def _band_sees_any(bad, form: band.Band, length: int):
  """Whether a query's band holds any of the marked keys: bool [B, H, S] -> [B, H, T or 1]."""
  if not form.causal:
    return bad.any(-1, keepdims=True)
  count = jnp.pad(jnp.cumsum(bad.astype(jnp.int32), axis=2), ((0, 0), (0, 0), (1, 0)))
  query = jnp.arange(length)
  first = jnp.maximum(query - form.left, 0) if form.left is not None else jnp.zeros_like(query)
  past = jnp.minimum(query + 1, bad.shape[2])
  return count[:, :, past] > count[:, :, first]


# JAX hides keys by logits of -32,768 (cuDNN, float16), -2**41 (cuDNN, bfloat16) or -2.4e38 (XLA).
# Rows whose visible biases are all below this are raised, or hidden keys would outweigh them.
_LOW_BIAS = -1e4


def _raised_bias(operands: Operands, spec):
  """A bias that differs from the operand by a number per query, which no softmax notices.

  Returns:
    (bias [B or 1, H or 1, T, S], 0 for hidden keys; the numbers [B or 1, H or 1, T] that were
    subtracted from it; bool, likewise: queries whose bias is -inf for every visible key).
  """
  batch, length, heads, _ = operands.query.shape
  shape = (batch, heads, length, operands.key.shape[1])
  visible = dense_mask.visible(spec.mask, operands.mask, shape)
  visible = jnp.broadcast_to(visible, (*visible.shape[:2], *shape[2:]))
  # The numbers are constants to a derivative, as they change nothing.
  highest = jnp.where(visible, jax.lax.stop_gradient(operands.bias), -jnp.inf).max(-1)
  hidden = highest == -jnp.inf
  lowered = jnp.where((highest < _LOW_BIAS) & ~hidden, highest, 0)
  bias = jnp.where(visible & ~hidden[..., None], operands.bias - lowered[..., None], 0)
  return bias, lowered, hidden


# --- What JAX's path to cuDNN needs. -------------------------------------------------------------

_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


def _for_cudnn(arrays, masking: _Masking):
  """query, key, value and bias as cuDNN takes them, and the masking, likewise.

  Under vmap, jax 0.10.2 takes all of these mapped or none, confuses the gradient of a bias that is
  not, and no version takes a mapped bias that is not whole: [B, H, T, S]. So all become mapped with
  any, by a zero that is made of all. A mask without bias is JAX's bias; one that all of the batch
  share stays what it is, as whole it may need much more memory.
  """
  query, key, value, bias = arrays
  batch, queries, heads, _ = query.shape
  keys = key.shape[1]
  arguments = dict(masking.arguments)
  whole = lambda x: jnp.broadcast_to(x, (batch, heads, queries, keys))
  if bias is not None:
    # One gradient per element: not every cuDNN sums over broadcast dimensions, so that is ours.
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
  # The output with its cotangent, too.
  masking = masking._replace(arguments=arguments, spoiled=masking.spoiled | (zero != 0))
  return [None if x is None else x + zero.astype(x.dtype)
          for x in (query, key, value, bias)], masking


@jax.custom_batching.custom_vmap
def _not_mapped(mask):
  """`mask` [1, H or 1, T, S], if it is not mapped."""
  return mask


@_not_mapped.def_vmap
def _refuse_mapped(size, mapped, mask):
  raise NotImplementedError(
      f"a mask of shape {mask.shape[1:]}, one for all of the batch, mapped over by jax.vmap "
      f"{size} times: JAX's path to cuDNN maps no mask but one for each of the batch; give it as "
      "`mask` with the batch's own first dimension, or use mechanism='flash_attn2' or 'blockwise'")


@jax.custom_jvp
def _even_lengths(*arrays):
  """`arrays`, if nobody differentiates."""
  return arrays


@_even_lengths.defjvp
def _refuse_odd(primals, tangents):
  raise NotImplementedError(
      f"queries of shape {primals[0].shape} and keys of shape {primals[1].shape} under "
      "differentiation: cuDNN's gradients are taken for even numbers of both only, as JAX has them "
      "beside a bias; use mechanism='flash_attn2', 'blockwise' or 'vanilla', or pad the sequences "
      "to an even length")


@jax.custom_jvp
def _not_differentiable(lse, *operands):
  """`lse`. It comes without a tangent, so those of the operands it depends on are what is seen."""
  del operands
  return lse


@_not_differentiable.defjvp
def _refuse(primals, tangents):
  raise NotImplementedError(
      "return_lse=True under differentiation: jax.nn.dot_product_attention, behind the mechanisms "
      "'sdpa' and 'cudnn', drops the lse's cotangent, so its gradient would be wrong; use "
      "mechanism='flash_attn2', 'blockwise' or 'vanilla', or return_lse=False")
