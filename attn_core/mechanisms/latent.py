# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""multi_latent_attention: one latent row per token is the key and the value of all heads.

The keys and values of head h are projections of the row's latent part, key_up[:, h]^T . latent and
value_up[:, h]^T . latent. In the absorbed form the projections move to the queries and outputs,

  query_nope . (key_up^T latent) = (key_up query_nope) . latent

so that attention reads the rows as they are stored, with one key head for all query heads. In the
projected form keys and values are computed, for a few heads at a time.

Queries and rows that are not finite are replaced by zeros in products with up-projections, and made
NaN again afterwards: 0 * NaN in a gradient of the up-projections would be NaN for padding too.

DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434.
"""

import functools
from typing import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from attn_core import array_axes
from attn_core.kernels.common import matmul_precision, nonfinite
from attn_core.kernels.common.contract import Kernel
from attn_core.kernels.xla import decode as xla_decode, flash as xla_flash
from attn_core.mechanisms import decode as decode_lib, flash, paged
from attn_core.types import AttentionOutput, Call, Operands, at_least_float32

# Bytes of a step's keys and values that accelerators may take: a few heads of a short prefill would
# leave most of a chip idle.
STEP_BYTES = 32 * 2**20
# Residuals of the block-wise kernels; the backward of a step computes all else again.
_KEPT = jax.checkpoint_policies.save_only_these_names("attn_output", "attn_lse")


def absorbed(call: Call) -> AttentionOutput:
  """Computes the absorbed form block by block in plain XLA, on every platform."""
  call = call._replace(operands=xla_decode.dequantized(call.operands))
  return _absorb(functools.partial(flash.by_kernel, xla_flash.KERNEL), call)


def decode(call: Call) -> AttentionOutput:
  """Decodes in plain XLA: a few absorbed queries, and every latent row read once."""
  return _absorb(functools.partial(decode_lib.by_kernel, xla_decode.KERNEL), call)


def decode_tpu(call: Call) -> AttentionOutput:
  """Decodes by the Pallas kernel for TPUs; gradients are those of plain XLA."""
  return _absorb(decode_lib.tpu, call)


def decode_gpu(call: Call) -> AttentionOutput:
  """Decodes by the Mosaic GPU kernel for Hopper; gradients are those of plain XLA."""
  return _absorb(decode_lib.gpu, call)


def pages(call: Call) -> AttentionOutput:
  """Writes new rows to pages, if any, and attends by absorbed queries in plain XLA."""
  return _absorb(paged.xla_writing, call)


def pages_tpu(call: Call) -> AttentionOutput:
  """Writes new rows to pages, if any, and attends by absorbed queries in the kernel for TPUs."""
  return _absorb(paged.tpu_writing, call)


def pages_gpu(call: Call) -> AttentionOutput:
  """Writes new rows to pages, if any, and attends by absorbed queries in the kernel for Hopper."""
  return _absorb(paged.gpu_writing, call)


def _absorb(run: Callable[[Call], AttentionOutput], call: Call) -> AttentionOutput:
  """Runs the absorbed form with the up-projections, if any, in queries and outputs."""
  operands = call.operands
  if not operands.up:
    return run(_with_padding(call))
  key_up, value_up = operands.up
  nope, latent = key_up.shape[2], value_up.shape[0]
  query, finite = nonfinite.mask_nonfinite_rows(_with_whole_width(operands.query))
  tokens = "bt" if query.ndim == 4 else "t"
  query = jnp.concatenate([_product(f"{tokens}hd,lhd->{tokens}hl", query[..., :nope], key_up, call),
                           query[..., nope:]], -1)
  query = jnp.where(finite, query, jnp.nan)
  output = run(_with_padding(call._replace(operands=operands._replace(query=query, up=()))))
  assert output.attention_outputs.shape[-1] == latent
  return output._replace(attention_outputs=_product(
      "bthl,lhe->bthe", output.attention_outputs, value_up, call))


def _with_padding(call: Call) -> Call:
  """Pads absorbed queries with zeros to the width of the rows, if a dense cache pads these."""
  operands = call.operands
  if not isinstance(operands, Operands):  # kernels over pages do it
    return call
  query, width = operands.query, operands.key.shape[3] + operands.value.shape[3]
  if query.shape[3] == width:
    return call
  padding = (0, width - query.shape[3])
  return call._replace(
      spec=call.spec._replace(row_width=query.shape[3]), operands=operands._replace(
          query=jnp.pad(_with_whole_width(query), ((0, 0),) * 3 + (padding,))))


def _with_whole_width(query: jax.Array) -> jax.Array:
  """Returns queries whose width, of two parts, no Explicit mesh axis shards."""
  *spec, width = array_axes.typed_spec(query)
  mesh = array_axes.typed_mesh(query)
  if mesh is None or width is None:
    return query
  return array_axes.reshard(query, mesh, P(*spec, None))


def projected(call: Call) -> AttentionOutput:
  """Projects a few heads at a time, for block-wise attention in plain XLA, on every platform."""
  return _project(xla_flash.KERNEL, 0, call)


def projected_tpu(call: Call) -> AttentionOutput:
  """Projects a few heads at a time, for the block-wise kernels for TPUs."""
  return _project(flash.tpu_kernel(), STEP_BYTES, call)


def projected_gpu(call: Call) -> AttentionOutput:
  """Projects a few heads at a time, for the block-wise kernels for Hopper."""
  return _project(flash.gpu_kernel(), STEP_BYTES, call)


def _project(kernel: Kernel, step_bytes: int, call: Call) -> AttentionOutput:
  """Computes keys and values of a few heads at a time, and their block-wise attention.

  A step takes every `steps`-th head, so that each device has some of them where mesh axes shard
  the heads. The backward computes the keys and values of a step again.

  Args:
    kernel: of block-wise attention.
    step_bytes: see `_steps`.
    call: latent rows, and up-projections.
  """
  operands = xla_decode.dequantized(call.operands)
  key_up, value_up = operands.up
  latent = call.spec.latent_width
  # Without the zeros that pad the rows of a cache.
  rows = operands.key[:, :, 0, :latent + operands.query.shape[3] - key_up.shape[2]]
  heads = operands.query.shape[2]
  steps = _steps(call, heads, step_bytes)
  placement = call.placement
  if placement is not None:
    placement = placement._replace(key_heads=placement.heads)

  def step(of_step: tuple[jax.Array, ...]) -> AttentionOutput:
    query, key_up, value_up, *sinks = of_step
    clean, finite = nonfinite.mask_nonfinite_rows(rows)
    key = _product("bsl,lhd->bshd", clean[..., :latent], key_up, call)
    key = jnp.where(finite[:, :, None], key, jnp.nan)
    # A sum, because its type is sharded over Explicit axes of the heads as the keys are.
    shared = rows[:, :, None, latent:] + jnp.zeros_like(key[..., :1])
    value = _product("bsl,lhe->bshe", clean[..., :latent], value_up, call)
    return flash.by_kernel(kernel, call._replace(
        operands=operands._replace(query=query, key=jnp.concatenate([key, shared], -1), value=value,
                                   sinks=sinks[0] if sinks else None, up=()),
        spec=call.spec._replace(latent_width=None), placement=placement))

  def split(x: jax.Array, axis: int) -> jax.Array:
    """Returns the heads of each step, [steps, ...]."""
    shape = (*x.shape[:axis], heads // steps, steps, *x.shape[axis + 1:])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)

  def joined(x: jax.Array, axis: int) -> jax.Array:
    """Returns the inverse of `split`."""
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape(*x.shape[:axis], heads, *x.shape[axis + 2:])

  of_steps = [split(operands.query, 2), split(key_up, 1), split(value_up, 1)]
  if operands.sinks is not None:
    of_steps.append(split(operands.sinks, 1))
  if not kernel.effects():  # those of interpreters, which JAX cannot compute again
    step = jax.checkpoint(step, policy=_KEPT)
  found = jax.lax.map(step, tuple(of_steps))
  return AttentionOutput(joined(found.attention_outputs, 2),
                         lse=None if found.lse is None else joined(found.lse, 1))


def _steps(call: Call, heads: int, step_bytes: int) -> int:
  """Returns the number of steps.

  The keys and values of a step are at most twice as large as the rows, or `step_bytes`, which never
  hold all heads of a device. A step has at least one head of each device.
  """
  rows, (key_up, value_up) = call.operands.key, call.operands.up
  placement = call.placement
  devices = 1 if placement is None else placement.size(placement.heads)
  rope = call.operands.query.shape[3] - key_up.shape[2]
  row = call.spec.latent_width + rope
  of_head = key_up.shape[2] + rope + value_up.shape[2]
  head_bytes = rows.shape[0] * rows.shape[1] * of_head * key_up.dtype.itemsize
  most = max(1, 2 * row // of_head, min(step_bytes // max(head_bytes, 1), heads // devices // 2))
  return min(heads // n for n in range(1, heads + 1)
             if heads % n == 0 and n <= most * devices and n % devices == 0)


def _product(expression: str, left: jax.Array, right: jax.Array, call: Call) -> jax.Array:
  """Returns an einsum in the dtype of its operands, with sums of at least 32 bits."""
  return jnp.einsum(
      expression, left, right, precision=matmul_precision.resolve(left.dtype, call.spec.precision),
      preferred_element_type=at_least_float32(left.dtype)).astype(left.dtype)
