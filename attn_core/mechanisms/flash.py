"""flash_attn2, blockwise, blocksparse: one block-wise kernel a platform, any mask by BlockMap."""

from typing import Callable

from attn_core.autodiff import primitives as derivatives
from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.gpu.flash import kernel as gpu_flash
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.tpu.flash import kernel as tpu_flash
from attn_core.kernels.xla import flash as blockwise
from attn_core.sharding import shard_map as shard
from attn_core.types import AttentionOutput, Call, Operands


def xla(call: Call) -> AttentionOutput:
  """Block-wise attention in plain XLA, on every platform."""
  return by_kernel(blockwise.KERNEL, call)


def tpu(call: Call) -> AttentionOutput:
  """Block-wise attention by Pallas kernels for TPUs."""
  return by_kernel(tpu_flash.KERNEL, call)


def gpu(call: Call) -> AttentionOutput:
  """Block-wise attention by Mosaic GPU kernels for Hopper GPUs."""
  return by_kernel(gpu_flash.KERNEL, call)


def by_kernel(kernel: Kernel, call: Call) -> AttentionOutput:
  """Runs a kernel on every shard of the batch and of the heads."""
  return spread(lambda operands: derivatives.attend(kernel, operands, call.spec, call.block_sizes),
                call)


def spread(attend: Callable[[Operands], Residuals], call: Call) -> AttentionOutput:
  """Runs `attend` on every device's part."""
  def local(operands):
    out, lse = attend(operands)
    if not call.spec.normalize_output:
      out = softmax.numerator(out, lse)
    return AttentionOutput(out, lse=lse if call.return_lse else None)
  return shard.sharded(local, call)
