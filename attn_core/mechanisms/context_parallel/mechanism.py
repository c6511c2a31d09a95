"""ring: one sequence over several devices, by any of `types.RING_VARIANTS` in any layout.

Every array of a call has its tokens in the layout's order, along T and along S; what goes by the
number of a row or column (causal masks, windows, lengths, dropout) goes by the token's.
"""

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.autodiff import primitives as derivatives
from attn_core.kernels.gpu.flash import kernel as gpu_flash
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.tpu.flash import kernel as tpu_flash
from attn_core.kernels.xla import flash as blockwise, tile_ops as steps
from attn_core.masks import leaves as algebra, block_map as blocks
from attn_core.mechanisms.context_parallel import ring as around, ulysses as heads, ring_step as hops
from attn_core.mechanisms import flash
from attn_core.sharding import shard_map as shard
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import AttentionOutput, Call, Operands


def xla(call: Call) -> AttentionOutput:
  """A spread sequence, computed in plain XLA."""
  return _spread(blockwise.KERNEL, call)


def tpu(call: Call) -> AttentionOutput:
  """A spread sequence, computed by the Pallas kernels for TPUs."""
  return _spread(tpu_flash.KERNEL, call)


def tpu_remote(call: Call) -> AttentionOutput:
  """The same, by kernels that send keys and values themselves while they compute."""
  return _spread(tpu_flash.CARRYING, call)


def gpu(call: Call) -> AttentionOutput:
  """A spread sequence, computed by the Mosaic GPU kernels for Hopper GPUs."""
  return _spread(gpu_flash.KERNEL, call)


def _spread(kernel: Kernel, call: Call) -> AttentionOutput:
  sequence = None if call.placement is None else call.placement.sequence
  if sequence is None:
    return flash.by_kernel(kernel, call)
  def attend(operands: Operands) -> Residuals:
    inner = lambda operands: _between_members(kernel, sequence, operands, call)
    return heads.exchanged(inner, sequence, call.spec.mask, operands)
  output = flash.spread(attend, call._replace(operands=_padded(call, sequence)))
  return shard.first_tokens(output, call.placement, sequence.queries)


def _between_members(kernel, sequence: Sequence, operands, call: Call) -> Residuals:
  """Attends to the keys of all members."""
  if sequence.members > 1 and not sequence.gathers:
    return derivatives.attend(around.kernel(kernel, sequence), operands, call.spec,
                              call.block_sizes)
  def attend(operands):
    keys = hops.own_keys(operands, call.spec)
    if sequence.gathers:
      keys = jax.tree.map(lambda x: lax.all_gather(x, sequence.key_axes, axis=1, tiled=True), keys)
    return derivatives.attend(kernel, *hops.attended(sequence, operands, call.spec, keys),
                              call.block_sizes)
  if not sequence.gathers:
    return attend(operands)
  # The backward gathers again: what is kept from one to the other grows with a shard only.
  kept = jax.checkpoint_policies.save_only_these_names("attn_output", "attn_lse")
  return jax.checkpoint(attend, policy=kept)(operands)


def _padded(call: Call, sequence: Sequence) -> Operands:
  """All operands with T and S padded to a multiple of the shards."""
  operands, shards = call.operands, sequence.shards
  sizes = blocks.Sizes(sequence.queries, sequence.keys, shards, shards)
  operands = steps.pad(operands, sizes, call.spec.mask)
  lengths = {algebra.QUERY: sequence.padded(sequence.queries),
             algebra.KEY: sequence.padded(sequence.keys)}
  # What has one number for a sequence of length 1 is cut like all others.
  arrays = tuple(
      jnp.broadcast_to(x, (x.shape[0], lengths[role])) if role in lengths else x
      for x, role in zip(operands.mask.arrays, algebra.structure_roles(call.spec.mask)))
  return operands._replace(mask=operands.mask._replace(arrays=arrays))
