# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""autoregressive_decodeattn: a few queries in each row against many keys, which may be sharded.

Where mesh axes shard the keys, each device attends to its shard, and the results are combined.
"""

import functools

import jax
import jax.numpy as jnp

from attn_core.autodiff import primitives
from attn_core.caches import slots
from attn_core.kernels.common import online_softmax
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.xla import decode as xla_decode, flash as xla_flash
from attn_core.masks import constructors, materialize
from attn_core.masks.mask import Mask
from attn_core.mechanisms import flash
from attn_core.score_mods import evaluate
from attn_core.sharding import lse_combine, shard_map
from attn_core.types import AttentionOutput, Call, MaskOperands, Operands


def xla(call: Call) -> AttentionOutput:
  """Decodes in plain XLA, on every platform."""
  return by_kernel(xla_decode.KERNEL, call)


def tpu(call: Call) -> AttentionOutput:
  """Decodes by a Pallas kernel for TPUs; gradients are those of plain XLA."""
  from attn_core.kernels.tpu.ragged import decode  # imported when chosen: Pallas takes 0.1 s
  return by_kernel(decode.make_kernel(xla_decode.KERNEL), call)


def gpu(call: Call) -> AttentionOutput:
  """Decodes by a Mosaic GPU kernel for Hopper GPUs; gradients are those of plain XLA."""
  from attn_core.kernels.gpu.split_kv import decode  # imported when chosen: Mosaic GPU takes 0.3 s
  return by_kernel(decode.make_kernel(xla_decode.KERNEL), call)


def dequantized(call: Call) -> AttentionOutput:
  """Attends to a quantized cache by block-wise attention in plain XLA.

  Keys and values are dequantized once, to the query's dtype, which costs many queries less than
  each block of keys by itself does.
  """
  return flash.by_kernel(xla_flash.KERNEL, call, xla_decode.dequantized)


def dequantized_tpu(call: Call) -> AttentionOutput:
  """Attends to a quantized cache by the block-wise kernels for TPUs; see `dequantized`."""
  return flash.by_kernel(flash.tpu_kernel(), call, xla_decode.dequantized)


def dequantized_gpu(call: Call) -> AttentionOutput:
  """Attends to a quantized cache by the block-wise kernels for Hopper; see `dequantized`."""
  return flash.by_kernel(flash.gpu_kernel(), call, xla_decode.dequantized)


def by_kernel(kernel: Kernel, call: Call) -> AttentionOutput:
  """Runs a kernel on each shard of the batch, of the heads and of the keys."""
  axes = call.placement.keys if call.placement else ()
  if axes:
    call = _with_written_mask(call)

  def local(operands: Operands) -> AttentionOutput:
    if axes:
      operands = operands._replace(sinks=lse_combine.sinks_on_first_device(operands.sinks, axes))
    out, lse = _attend(kernel, operands, call)
    if axes:
      out, lse = lse_combine.combine(out, lse, axes)
    if not call.spec.normalize_output:
      out = online_softmax.numerator(out, lse)
    return AttentionOutput(out, lse=lse if call.return_lse else None)

  return shard_map.sharded(local, call)


def _attend(kernel: Kernel, operands: Operands, call: Call) -> Residuals:
  """Runs a kernel on one device's operands, with NaN for rows of a cache that overflowed.

  The kernel writes it. Where it is differentiated, NaN is selected after it, so that derivatives
  are 0 there, as in the padding.
  """
  attend = lambda operands: primitives.attend(
      kernel, operands, call.spec, call.block_sizes, shard_map.partitioner_mesh(call.placement))
  rows = operands.mask.rows
  if rows is None:
    return attend(operands)

  def selected(operands: Operands) -> Residuals:
    without, rows = operands._replace(mask=operands.mask._replace(rows=None)), operands.mask.rows
    assert rows is not None
    return Residuals(*(slots.nan_rows(x, rows.overflow) for x in attend(without)))

  @jax.custom_jvp
  def run(*leaves: jax.Array) -> Residuals:
    return attend(jax.tree.unflatten(structure, leaves))

  @functools.partial(run.defjvp, symbolic_zeros=True)
  def _(primals: tuple, tangents: tuple) -> tuple[Residuals, Residuals]:
    moved = {n: x for n, x in enumerate(tangents)
             if not isinstance(x, jax.custom_derivatives.SymbolicZero)}
    def of_moved(*values: jax.Array) -> Residuals:
      given = dict(zip(moved, values))
      return selected(jax.tree.unflatten(
          structure, [given.get(n, x) for n, x in enumerate(primals)]))
    return jax.jvp(of_moved, tuple(primals[n] for n in moved), tuple(moved.values()))

  leaves, structure = jax.tree.flatten(operands)
  return run(*leaves)


def _with_written_mask(call: Call) -> Call:
  """Returns the call with its mask as one boolean array, which is sharded as the keys are.

  The array is small in comparison with the keys. A score mod also needs the positions.
  """
  query, key = call.operands.query, call.operands.key
  shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
  seen = materialize.visible(call.spec.mask, call.operands.mask, shape)
  mask: Mask = constructors.dense(jnp.broadcast_to(seen, (*seen.shape[:2], *shape[2:])))
  if call.spec.has_score_mod:
    at = evaluate.positions(call.spec.mask, call.operands.mask, shape)
    rows = lambda x: x.reshape(x.shape[0], -1)
    mask = constructors.positions(rows(at.query_position), rows(at.key_position), mask)
  arrays, structure = jax.tree.flatten(mask)
  return call._replace(spec=call.spec._replace(mask=structure), operands=call.operands._replace(
      mask=MaskOperands(tuple(arrays))))
