"""sdpa and cudnn: `jax.nn.dot_product_attention`, held to this library's meanings.

What JAX's function does otherwise is mended here: a query that sees nothing gets
0 instead of the mean of the values, hidden keys that are not finite stay hidden,
and the lse, whose cotangent JAX drops, refuses to be differentiated.

Letters: B batch, T query length, S key length, H query heads.
"""

import functools

import jax
import jax.numpy as jnp

from attn_core.kernels.xla.dense import clean
from attn_core.masks import algebra, dense_mask
from attn_core.sharding import shard
from attn_core.types import AttentionOutput, Call


def xla(call: Call) -> AttentionOutput:
  """The XLA implementation, on any platform."""
  return _spread("xla", call)


def cudnn(call: Call) -> AttentionOutput:
  """The cuDNN implementation, on NVIDIA GPUs."""
  return _spread("cudnn", call)


def _spread(implementation: str, call: Call) -> AttentionOutput:
  return shard.sharded(functools.partial(_local, implementation, call), call)


def _local(implementation, call, operands):
  spec = call.spec
  key, value, finite = clean(operands)
  structure = jax.tree.unflatten(spec.mask, range(spec.mask.num_leaves))
  causal = isinstance(structure, algebra.Causal) and operands.query.shape[1] == key.shape[1]
  visible = None
  if not causal and not isinstance(structure, algebra.Full):
    batch, length, heads, _ = operands.query.shape
    shape = (batch, heads, length, key.shape[1])
    visible = dense_mask.visible(spec.mask, operands.mask, shape)
    visible = jnp.broadcast_to(visible, (*visible.shape[:2], *shape[2:]))
  result = jax.nn.dot_product_attention(
      operands.query, key, value, operands.bias, visible, scale=spec.softmax_scale,
      is_causal=causal, implementation=implementation, return_residual=call.return_lse)
  out, lse = result if call.return_lse else (result, None)
  lse = None if lse is None else _not_differentiable(
      lse.transpose(0, 2, 1), operands.query, operands.key, operands.bias)
  spoiled = _sees_any(~finite, visible, causal, operands.query.shape[1])
  if visible is not None:
    empty = ~visible.any(-1)
    out = jnp.where(_rows(empty), 0, out)
    lse = None if lse is None else jnp.where(empty, -jnp.inf, lse)
  out = jnp.where(_rows(spoiled), jnp.nan, out)
  lse = None if lse is None else jnp.where(spoiled, jnp.nan, lse)
  return AttentionOutput(out, lse=lse)


def _rows(x):
  """[B, H, T] -> [B, T, H, 1]."""
  return x.transpose(0, 2, 1)[..., None]


def _sees_any(keys, visible, causal: bool, length: int):
  """Whether a query sees any of the marked keys: bool [B, H, S] -> [B, H, T or 1]."""
  if causal:
    return jax.lax.cummax(keys.astype(jnp.int32), axis=2)[..., :length] > 0
  if visible is None:
    return keys.any(-1, keepdims=True)
  return (keys[:, :, None] & visible).any(-1)


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
