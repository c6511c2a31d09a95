# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""ring: a sequence sharded over devices, by any of `types.RING_VARIANTS` in any token order.

Each array of a call has its tokens in that order along T and along S; functions of the number of a
row or column (causal masks, windows, lengths, dropout) are functions of the token's number.
"""

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.autodiff import primitives
from attn_core.kernels.common import dense_operands
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.xla import flash as xla_flash
from attn_core.masks import block_map, mask as mask_lib
from attn_core.mechanisms import flash
from attn_core.mechanisms.context_parallel import ring, ring_step, ulysses
from attn_core.score_mods import evaluate
from attn_core.sharding import shard_map, varying_axes
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import AttentionOutput, Call, Operands


def xla(call: Call) -> AttentionOutput:
  """Attends over a sharded sequence in plain XLA."""
  return _over_sequence(xla_flash.KERNEL, call)


def tpu(call: Call) -> AttentionOutput:
  """Attends over a sharded sequence by the Pallas kernels for TPUs."""
  return _over_sequence(flash.tpu_kernel(), call)


def tpu_remote(call: Call) -> AttentionOutput:
  """Attends as `tpu`, by kernels that send keys and values while they compute."""
  return _over_sequence(flash.tpu_kernel(sends=True), call)


def gpu(call: Call) -> AttentionOutput:
  """Attends over a sharded sequence by the Mosaic GPU kernels for Hopper GPUs."""
  return _over_sequence(flash.gpu_kernel(), call)


def _over_sequence(kernel: Kernel, call: Call) -> AttentionOutput:
  placement = call.placement
  sequence = None if placement is None else placement.sequence
  if placement is None or sequence is None:
    return flash.by_kernel(kernel, call)
  def attend(operands: Operands) -> Residuals:
    if sequence.is_split:
      operands = varying_axes.over(operands, sequence.axes)
    inner = lambda operands: _between_members(kernel, sequence, operands, call)
    return ulysses.exchanged(inner, sequence, call.spec, operands)
  output = flash.sharded(attend, call._replace(operands=_padded(call, sequence)))
  return output if sequence.is_split else shard_map.first_tokens(output, placement,
                                                                 sequence.queries)


def _between_members(kernel: Kernel, sequence: Sequence, operands: Operands,
                     call: Call) -> Residuals:
  """Attends to the keys of all members."""
  if sequence.members > 1 and not sequence.gathers:
    return primitives.attend(ring.kernel(kernel, sequence), operands, call.spec,
                             call.block_sizes)
  def attend(operands: Operands) -> Residuals:
    keys = ring_step.own_keys(operands, call.spec)
    if sequence.gathers:
      keys = jax.tree.map(lambda x: lax.all_gather(x, sequence.key_axes, axis=1, tiled=True), keys)
    return primitives.attend(kernel, *ring_step.attended(sequence, operands, call.spec, keys),
                             call.block_sizes)
  if not sequence.gathers:
    return attend(operands)
  # The backward gathers again, so that residuals grow with a shard, not with the sequence.
  kept = jax.checkpoint_policies.save_only_these_names("attn_output", "attn_lse")
  return jax.checkpoint(attend, policy=kept)(operands)


def _padded(call: Call, sequence: Sequence) -> Operands:
  """Returns the operands with T and S padded to a multiple of the shards."""
  operands, shards = call.operands, sequence.shards
  if sequence.is_split:  # all shards are equal
    return operands
  sizes = block_map.Sizes(sequence.queries, sequence.keys, shards, shards)
  operands = dense_operands.pad_operands(operands, sizes, call.spec.mask)
  operands = operands._replace(mods=evaluate.pad(
      call.spec.score_mod, operands.mods, sizes.query_padding, sizes.key_padding))
  lengths = {mask_lib.QUERY: sequence.padded(sequence.queries),
             mask_lib.KEY: sequence.padded(sequence.keys)}
  # An array of length 1 along the sequence is sharded like all others.
  arrays = tuple(
      jnp.broadcast_to(x, (x.shape[0], lengths[role])) if role in lengths else x
      for x, role in zip(operands.mask.arrays, mask_lib.structure_roles(call.spec.mask)))
  return operands._replace(mask=operands.mask._replace(arrays=arrays))
