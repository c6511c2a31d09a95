"""vanilla: dense attention, the only mechanism that returns its weights."""

from attn_core.kernels.xla import dense
from attn_core.sharding import shard_map as shard
from attn_core.types import AttentionOutput, Call


def vanilla(call: Call) -> AttentionOutput:
  """Dense attention on every platform."""
  def local(operands):
    output = dense.attend(operands, call.spec)
    return output._replace(
        attention_weights=output.attention_weights if call.return_weights else None,
        lse=output.lse if call.return_lse else None)
  return shard.sharded(local, call)
