# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""flash_attn2, blockwise, blocksparse: one block-wise kernel for each platform, any mask."""

from typing import Callable

from attn_core.autodiff import primitives
from attn_core.kernels.common import online_softmax
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.xla import flash as xla_flash
from attn_core.sharding import shard_map
from attn_core.types import AttentionOutput, Call, Operands


def xla(call: Call) -> AttentionOutput:
  """Computes block-wise attention in plain XLA, on every platform."""
  return by_kernel(xla_flash.KERNEL, call)


def tpu(call: Call) -> AttentionOutput:
  """Computes block-wise attention by Pallas kernels for TPUs."""
  return by_kernel(tpu_kernel(), call)


def gpu(call: Call) -> AttentionOutput:
  """Computes block-wise attention by Mosaic GPU kernels for Hopper GPUs."""
  return by_kernel(gpu_kernel(), call)


def tpu_kernel(*, sends: bool = False) -> Kernel:
  """Returns the block-wise kernel for TPUs; higher derivatives are those of plain XLA.

  Args:
    sends: whether it sends arrays to another device while it computes.
  """
  from attn_core.kernels.tpu.flash import kernel  # imported when chosen: Pallas takes 0.1 s
  make_kernel = kernel.make_remote_copy_kernel if sends else kernel.make_kernel
  return make_kernel(xla_flash.KERNEL)


def gpu_kernel() -> Kernel:
  """Returns the block-wise kernel for Hopper GPUs; higher derivatives are those of plain XLA."""
  from attn_core.kernels.gpu.flash import kernel  # imported when chosen: Mosaic GPU takes 0.3 s
  return kernel.make_kernel(xla_flash.KERNEL)


def by_kernel(kernel: Kernel, call: Call,
              prepared: Callable[[Operands], Operands] = lambda x: x) -> AttentionOutput:
  """Runs a kernel on each shard of the batch and of the heads, `prepared` there."""
  mesh = shard_map.partitioner_mesh(call.placement)
  return sharded(lambda operands: primitives.attend(
      kernel, prepared(operands), call.spec, call.block_sizes, mesh), call)


def sharded(attend: Callable[[Operands], Residuals], call: Call) -> AttentionOutput:
  """Runs `attend` on each device's part of the operands."""
  def local(operands: Operands) -> AttentionOutput:
    out, lse = attend(operands)
    if not call.spec.normalize_output:
      out = online_softmax.numerator(out, lse)
    return AttentionOutput(out, lse=lse if call.return_lse else None)
  return shard_map.sharded(local, call)
