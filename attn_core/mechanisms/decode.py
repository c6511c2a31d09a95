"""autoregressive_decodeattn: a few queries a row against many keys, which may be sharded.

Where mesh axes shard the keys, every device attends to its own ones, and the results are merged.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.autodiff import primitives as derivatives
from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.gpu.split_kv import decode as gpu_decode
from attn_core.kernels.common.contract import Kernel
from attn_core.kernels.tpu.ragged import decode as tpu_decode
from attn_core.kernels.xla import decode
from attn_core.masks import leaves as algebra, materialize as dense_mask
from attn_core.sharding import lse_combine as merge, shard_map as shard
from attn_core.types import AttentionOutput, Call, MaskOperands


def xla(call: Call) -> AttentionOutput:
  """Decoding in plain XLA, on every platform."""
  return by_kernel(decode.KERNEL, call)


def tpu(call: Call) -> AttentionOutput:
  """Decoding by a Pallas kernel for TPUs; gradients by XLA."""
  return by_kernel(tpu_decode.KERNEL, call)


def gpu(call: Call) -> AttentionOutput:
  """Decoding by a Mosaic GPU kernel for Hopper GPUs; gradients by XLA.

  Plain XLA where a mesh cuts the keys into shards of a length that the kernel refuses.
  """
  query, value = call.operands.query, call.operands.value
  shards = math.prod(call.placement.mesh.shape[axis]
                     for axis in call.placement.keys) if call.placement else 1
  refused = gpu_decode.refusal(query.dtype, (query.shape[3], value.shape[3]),
                               (query.shape[1], value.shape[1] // shards),
                               call.operands.key_scale is not None)
  return by_kernel(decode.KERNEL if refused else gpu_decode.KERNEL, call)


def by_kernel(kernel: Kernel, call: Call) -> AttentionOutput:
  """Runs a kernel on every shard of the batch, of the heads and of the keys."""
  axes = call.placement.keys if call.placement else ()
  if axes:
    call = _with_written_mask(call)

  def local(operands):
    if axes and operands.sinks is not None:  # they count once
      operands = operands._replace(sinks=jnp.where(
          lax.axis_index(axes) == 0, operands.sinks, -jnp.inf))
    out, lse = derivatives.attend(kernel, operands, call.spec, call.block_sizes)
    if axes:
      out, lse = merge.over_axes(out, lse, axes)
    if not call.spec.normalize_output:
      out = softmax.numerator(out, lse)
    return AttentionOutput(out, lse=lse if call.return_lse else None)

  return shard.sharded(local, call)


def _with_written_mask(call: Call) -> Call:
  """The mask as one boolean array, to be cut like the keys, beside which it is small."""
  query, key = call.operands.query, call.operands.key
  shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
  seen = dense_mask.visible(call.spec.mask, call.operands.mask, shape)
  seen = jnp.broadcast_to(seen, (*seen.shape[:2], *shape[2:]))
  arrays, structure = jax.tree.flatten(algebra.dense(seen))
  return call._replace(spec=call.spec._replace(mask=structure), operands=call.operands._replace(
      mask=MaskOperands(tuple(arrays))))
