# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""vanilla: dense attention, the only mechanism that returns the attention weights.

Calls that ask for no weights run the kernel of short sequences, at any length, where it supports
their arguments.
"""

from attn_core.kernels.xla import dense, plain
from attn_core.mechanisms import flash
from attn_core.sharding import shard_map
from attn_core.types import AttentionOutput, Call, Operands


def vanilla(call: Call) -> AttentionOutput:
  """Computes dense attention, on every platform."""
  if not call.return_weights and plain.supports(call.operands, call.spec):
    return flash.by_kernel(plain.KERNEL, call)
  def local(operands: Operands) -> AttentionOutput:
    output = dense.attend(operands, call.spec)
    return output._replace(
        attention_weights=output.attention_weights if call.return_weights else None,
        lse=output.lse if call.return_lse else None)
  return shard_map.sharded(local, call)
